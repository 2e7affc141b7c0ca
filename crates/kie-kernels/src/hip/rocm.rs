//! Where libraries of ROCm may lie.

use std::path::PathBuf;

/// Where a library of ROCm may be: by name, then in its folders.
pub(super) fn candidates(names: &[&str]) -> Vec<PathBuf> {
    let homes = ["ROCM_PATH", "HIP_PATH"].iter().filter_map(std::env::var_os);
    let homes = homes.filter(|home| !home.is_empty()).map(PathBuf::from);
    let files = homes
        .chain([PathBuf::from("/opt/rocm")])
        .flat_map(|home| names.iter().map(move |name| home.join("lib").join(name)))
        .filter(|file| file.is_file());
    names.iter().map(PathBuf::from).chain(files).collect()
}
