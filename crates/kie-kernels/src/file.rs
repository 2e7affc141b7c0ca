//! Files that the user, or whoever wrote a model folder, names: regular ones of a bounded size.
//!
//! Invariants: what is asked about is what is read (one descriptor for both); opening waits for
//! nobody, so a pipe without a writer is refused like any other file that is not regular; a file
//! that grows while it is read is not followed.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading; also tells its length in bytes.
///
/// # Errors
/// What is there instead, in words.
pub fn open(path: &Path) -> Result<(File, u64), String> {
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(|error| error.to_string())?;
    let about = file.metadata().map_err(|error| error.to_string())?;
    if !about.is_file() {
        return Err("not a regular file".to_owned());
    }
    Ok((file, about.len()))
}

/// The bytes of a regular file of at most `most` bytes.
///
/// # Errors
/// What is there instead, in words.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let (file, length) = open(path)?;
    let too_long = |bytes: u64| format!("{bytes} bytes, more than {most}");
    if length > most {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(length).map_err(|_| too_long(length))?;
    bytes.try_reserve_exact(room).map_err(|_| format!("{length} bytes: out of memory"))?;
    file.take(most + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    match bytes.len() as u64 {
        got if got > most => Err(too_long(got)),
        _ => Ok(bytes),
    }
}

/// Whether a folder has an entry of this name, even a link that leads nowhere: what is there and
/// cannot be read is an error, not absent.
pub fn is_listed(path: &Path) -> bool {
    let about = path.symlink_metadata();
    let absent = [ErrorKind::NotFound, ErrorKind::NotADirectory];
    about.map_or_else(|error| !absent.contains(&error.kind()), |_| true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = std::env::temp_dir().join(format!("kie-file-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        std::fs::write(at("five"), b"12345").unwrap();
        assert_eq!(read(&at("five"), 5).unwrap(), b"12345");
        assert!(read(&at("five"), 4).unwrap_err().contains("more than 4"));
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
        link("/dev/zero", "zeros");
        link("five", "link");
        link("nowhere", "dangling");
        let pipe = CString::new(at("pipe").as_os_str().as_bytes()).unwrap();
        // SAFETY: a path that ends in a zero; the call keeps nothing of it.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        assert_eq!(read(&at("link"), 5).unwrap(), b"12345");
        for name in ["zeros", "pipe", "."] {
            assert_eq!(read(&at(name), 1 << 20).unwrap_err(), "not a regular file", "{name}");
        }
        assert!(read(&at("dangling"), 5).unwrap_err().contains("No such file"));
        assert!(is_listed(&at("dangling")) && !is_listed(&at("nowhere")));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
