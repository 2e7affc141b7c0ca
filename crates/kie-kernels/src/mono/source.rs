//! The kernel sources, carried as text. One compilation is one text: a root and what it includes,
//! each file once, where its first `#include` stands. A name is looked for in the platform's
//! folder, then in `kernels/common`, as a compiler would with both as include paths; `lowered.h`
//! is the header that [`super::lower::header`] generates.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::lower::header::header;
use super::lower::layout::{Kind, Layout};
use super::lower::model::Model;
use super::lower::partition::Partition;
use super::wire;
use crate::error::Result;
use crate::machine::{Platform, Source};
use crate::meter::Mode;

macro_rules! carried {
    ($($path:literal,)+) => {
        &[$(($path, include_str!(concat!("../../kernels/", $path)))),+]
    };
}

/// A file's path in `kernels`, and what it says.
pub type File<'a> = (&'a str, &'a str);

/// All files, by path. Their order says nothing.
const FILES: &[File<'static>] = carried![
    "common/args.h",
    "common/bandwidth.h",
    "common/block.h",
    "common/chiplets.h",
    "common/control.h",
    "common/decode.h",
    "common/echo.h",
    "common/emit.h",
    "common/exchange.h",
    "common/litmus.h",
    "common/ops/all_reduce.h",
    "common/ops/attend.h",
    "common/ops/attend_combine.h",
    "common/ops/attend_exact.h",
    "common/ops/attend_ring.h",
    "common/ops/choose.h",
    "common/ops/compressed.h",
    "common/ops/decode_fp8.h",
    "common/ops/decode_int4.h",
    "common/ops/decode_int8.h",
    "common/ops/decode_mxfp4.h",
    "common/ops/delta.h",
    "common/ops/drafts.h",
    "common/ops/entries.h",
    "common/ops/experts.h",
    "common/ops/experts_columns.h",
    "common/ops/filter.h",
    "common/ops/gate.h",
    "common/ops/gather.h",
    "common/ops/head.h",
    "common/ops/hyper.h",
    "common/ops/indexer.h",
    "common/ops/latent.h",
    "common/ops/latent_attend.h",
    "common/ops/latent_words.h",
    "common/ops/lookup.h",
    "common/ops/mask.h",
    "common/ops/matvec.h",
    "common/ops/matvec_words.h",
    "common/ops/mtp.h",
    "common/ops/order.h",
    "common/ops/parts.h",
    "common/ops/project.h",
    "common/ops/residual.h",
    "common/ops/route.h",
    "common/ops/sample.h",
    "common/ops/scale.h",
    "common/ops/shared.h",
    "common/ops/sigmoid.h",
    "common/ops/states.h",
    "common/ops/unit.h",
    "common/pack.h",
    "common/pages.h",
    "common/prefill.h",
    "common/prefill/attend.h",
    "common/prefill/delta.h",
    "common/prefill/delta_scan.h",
    "common/prefill/experts.h",
    "common/prefill/feed.h",
    "common/prefill/grid.h",
    "common/prefill/lanes.h",
    "common/prefill/layout.h",
    "common/prefill/multiply.h",
    "common/prefill/norm_heads.h",
    "common/prefill/phases.h",
    "common/prefill/pipe.h",
    "common/prefill/product.h",
    "common/prefill/project.h",
    "common/prefill/reduce_tp.h",
    "common/prefill/residual.h",
    "common/prefill/tasks.h",
    "common/prefill/tiles.h",
    "common/ring.h",
    "common/shape.h",
    "common/stream.h",
    "cuda/platform.h",
    "cuda/tile.h",
    "cuda/wide.h",
    "hip/platform.h",
    "hip/tile.h",
    "hip/wide.h",
    "sim/fibers.h",
    "sim/order.h",
    "sim/platform.h",
    "sim/tile.h",
    "sim/wide.h",
];

/// The files with the kernels in them.
const DECODE: &str = "common/decode.h";
const PREFILL: &str = "common/prefill.h";
const PACK: &str = "common/pack.h";
const ECHO: &str = "common/echo.h";
const LITMUS: &str = "common/litmus.h";
const BANDWIDTH: &str = "common/bandwidth.h";

/// By what name kernels include the generated header.
const LOWERED: &str = "lowered.h";
/// Copies and the matrix unit for several warps at once: a platform without them has no prefill
/// kernel.
const WIDE: &str = "wide.h";

const fn folder(platform: Platform) -> &'static str {
    match platform {
        Platform::Cuda => "cuda",
        Platform::Hip => "hip",
        Platform::Sim => "sim",
    }
}

fn carried(path: &str) -> Option<File<'static>> {
    FILES.iter().find(|(known, _)| *known == path).copied()
}

/// The file that a platform's kernels include by this name.
fn find(platform: Platform, name: &str) -> Option<File<'static>> {
    let folders = [folder(platform), "common"];
    folders.iter().find_map(|folder| carried(&format!("{folder}/{name}")))
}

/// What a line includes, if it does.
fn included(line: &str) -> Option<&str> {
    line.strip_prefix("#include \"")?.strip_suffix('"')
}

/// A text under way, and the files in it: false where one is not at its end.
struct Joined<'a> {
    platform: Platform,
    lowered: &'a str,
    files: BTreeMap<String, bool>,
    text: String,
}

impl Joined<'_> {
    /// Line directives keep the compiler's messages readable.
    fn add(&mut self, (path, text): File<'_>) {
        let _ = writeln!(self.text, "#line 1 \"{path}\"");
        for (at, line) in text.lines().enumerate() {
            match included(line) {
                Some(name) if self.include(path, name) => {
                    let _ = writeln!(self.text, "#line {} \"{path}\"", at + 2);
                }
                Some(_) => self.text.push('\n'),
                None if line == "#pragma once" => self.text.push('\n'),
                None => {
                    self.text.push_str(line);
                    self.text.push('\n');
                }
            }
        }
    }

    /// False where it is there already.
    fn include(&mut self, from: &str, name: &str) -> bool {
        if let Some(whole) = self.files.get(name) {
            assert!(*whole, "{from} includes {name}, which includes it");
            return false;
        }
        self.files.insert(name.to_owned(), false);
        if name == LOWERED {
            self.add(("generated/lowered.h", self.lowered));
        } else {
            let file = find(self.platform, name);
            self.add(file.unwrap_or_else(|| panic!("{from} includes {name}: there is none")));
        }
        self.files.insert(name.to_owned(), true);
        true
    }
}

fn join_with(platform: Platform, root: File<'_>, lowered: &str) -> String {
    let mut joined = Joined { platform, lowered, files: BTreeMap::new(), text: String::new() };
    joined.add(root);
    joined.text
}

/// A file that needs no generated header, with all that it includes.
pub fn join(platform: Platform, root: File<'_>) -> String {
    join_with(platform, root, "")
}

/// One of the kernels.
fn kernel(platform: Platform, path: &str, lowered: &str) -> String {
    join_with(platform, carried(path).expect("a row of FILES"), lowered)
}

/// What the platforms' own headers ask for before anything else.
fn defines(partition: &Partition, model: &Model) -> Vec<(String, String)> {
    let all = [("KIE_RANKS", model.ranks), ("KIE_BLOCKS", partition.blocks)];
    // Where there is one die, nothing of it is in the code.
    let dies = (partition.chiplets > 1).then_some(("KIE_CHIPLETS", partition.chiplets));
    all.into_iter().chain(dies).map(|(name, value)| (name.to_owned(), value.to_string())).collect()
}

/// A decode kernel, to run or to measure with.
///
/// # Errors
/// Where the kernel does not fit the machine: see [`Layout::new`].
pub fn decode(
    platform: Platform,
    (model, partition): (&Model, &Partition),
    kind: Kind,
    mode: Mode,
) -> Result<Source> {
    let layout = Layout::new(model, partition, kind)?;
    let mut defines = defines(partition, model);
    if mode == Mode::Trace {
        defines.push(("KIE_TRACE".to_owned(), "1".to_owned()));
    }
    let text = kernel(platform, DECODE, &header(model, partition, &layout, mode));
    Ok(Source { defines, text, entries: vec!["kie_decode"] })
}

/// The prefill kernel, with constants of its own behind those of decoding; none where there are no
/// wide tiles.
///
/// # Errors
/// As [`decode`].
pub fn prefill(
    platform: Platform,
    (model, partition): (&Model, &Partition),
    own: &str,
) -> Result<Option<Source>> {
    if find(platform, WIDE).is_none() {
        return Ok(None);
    }
    let layout = Layout::new(model, partition, Kind::plain(1, false))?;
    let header = header(model, partition, &layout, Mode::Full) + own;
    let text = kernel(platform, PREFILL, &header);
    let defines = defines(partition, model);
    Ok(Some(Source { defines, text, entries: vec!["kie_prefill"] }))
}

/// The kernel that times the host's answer, as one text.
pub fn echo_text(platform: Platform) -> String {
    kernel(platform, ECHO, &wire::declarations())
}

/// The kernels that look at a device itself, as one text.
pub fn litmus_text(platform: Platform) -> String {
    kernel(platform, LITMUS, &wire::declarations())
}

/// The kernels that read memory and nothing else, as one text.
pub fn bandwidth_text(platform: Platform) -> String {
    kernel(platform, BANDWIDTH, &wire::declarations())
}

/// The kernel that packs weights, as one text.
pub fn pack_text(platform: Platform) -> String {
    kernel(platform, PACK, &wire::declarations())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::mono::shapes;

    /// Every header below `folder`, by its path in `kernels`.
    fn headers(folder: &Path, prefix: &str, found: &mut BTreeSet<String>) {
        for entry in folder.read_dir().unwrap().map(|entry| entry.unwrap()) {
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type().unwrap().is_dir() {
                headers(&entry.path(), &format!("{path}/"), found);
            } else if path.ends_with(".h") {
                found.insert(path);
            }
        }
    }

    #[test]
    fn every_file_is_carried_and_in_some_kernel() {
        let mut there = BTreeSet::new();
        headers(&Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels"), "", &mut there);
        assert!(there.remove("common/kccl.h"), "carried by kie-kccl");
        assert!(FILES.iter().map(|(path, _)| *path).eq(there.iter().map(String::as_str)));
        let mut used = BTreeSet::new();
        for platform in [Platform::Cuda, Platform::Hip, Platform::Sim] {
            for root in [DECODE, PREFILL, PACK, ECHO, LITMUS, BANDWIDTH] {
                if root == PREFILL && find(platform, WIDE).is_none() {
                    continue;
                }
                let text = kernel(platform, root, "");
                let paths = text.lines().filter_map(|line| line.strip_prefix("#line 1 \""));
                let paths = paths.map(|path| path.trim_end_matches('"').to_owned());
                used.extend(paths.filter(|path| !path.starts_with("generated/")));
            }
        }
        assert_eq!(used, there);
    }

    /// By the simulator's compiler, which finds files as a reader does: by two folders.
    #[test]
    fn every_file_includes_what_it_uses() {
        let model = shapes::model("1b");
        let partition = Partition::new(&model, &shapes::nvidia(), 33_280).unwrap();
        let kind = Kind::plain(1, false);
        let layout = Layout::new(&model, &partition, kind).unwrap();
        let made = std::env::temp_dir().join(format!("kie-headers-{}", std::process::id()));
        std::fs::create_dir_all(&made).unwrap();
        let of_prefill = shapes::prefill_plan(&model).unwrap().constants(&model, &partition, false);
        let header = header(&model, &partition, &layout, Mode::Full) + &of_prefill;
        std::fs::write(made.join(LOWERED), header).unwrap();
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let words = crate::sim::compiler().unwrap().0;
        let mut words = words.split_whitespace();
        let mut compiler = Command::new(words.next().unwrap());
        compiler.args(words).args(["-std=c++17", "-fsyntax-only", "-w", "-DKIE_SIM_WARP=32"]);
        for folder in [kernels.join("sim"), kernels.join("common"), made.clone()] {
            compiler.arg("-I").arg(folder);
        }
        let defines = defines(&partition, &model);
        compiler.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        let mut there = BTreeSet::new();
        headers(&kernels, "", &mut there);
        for (at, path) in there.iter().enumerate() {
            let Some(name) = ["sim/", "common/"].iter().find_map(|of| path.strip_prefix(of)) else {
                continue;
            };
            let unit = made.join(format!("{at}.cc"));
            std::fs::write(&unit, format!("#include \"{name}\"\n")).unwrap();
            compiler.arg(unit);
        }
        let done = compiler.output().unwrap();
        std::fs::remove_dir_all(&made).unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    #[test]
    fn a_file_stands_once_where_it_is_first_included() {
        let root = "// 1\n#include \"emit.h\"\nint a;\n#include \"emit.h\"\nint b;\n";
        let text = join(Platform::Cuda, ("root.h", root));
        assert!(text.starts_with("#line 1 \"root.h\"\n// 1\n#line 1 \"common/emit.h\"\n"));
        assert!(text.ends_with("}\n#line 3 \"root.h\"\nint a;\n\nint b;\n"));
        assert_eq!(text.matches("#line 1 \"cuda/platform.h\"\n").count(), 1);
        assert!(!text.contains("#include") && !text.contains("#pragma once"));
    }

    #[test]
    #[should_panic(expected = "root.h includes there.h: there is none")]
    fn what_is_not_there_is_told() {
        join(Platform::Cuda, ("root.h", "#include \"there.h\"\n"));
    }
}
