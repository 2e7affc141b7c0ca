//! Shared libraries that are found at run time: drivers and compilers of GPUs.
//!
//! A library is never closed: drivers keep threads and exit handlers of their own, and the function
//! pointers taken here outlive every handle. That leaves three calls of libc, which the crate
//! already uses, so no other crate is needed.

use std::ffi::{c_char, c_void, CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A loaded library.
#[derive(Debug)]
pub(crate) struct Library {
    /// `NonNull` as a number: only the loader follows it.
    handle: usize,
    /// As it was asked for: a file, or a name that the loader searched.
    pub path: PathBuf,
}

impl Library {
    /// Loads a file (a path with a slash) or searches a name as the system's loader does.
    ///
    /// # Errors
    /// The loader's words.
    pub fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| format!("{}: a path with a zero byte", path.display()))?;
        // SAFETY: the name is a C string; the library's own initialisers are the vendor's.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(loader_error());
        }
        Ok(Self { handle: handle as usize, path: path.to_path_buf() })
    }

    /// Where a symbol is, if the library has it.
    pub fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open for ever and the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.handle as *mut c_void, name.as_ptr()) })
    }

    /// The file that a symbol came from, with no links in its path.
    pub fn file_of(&self, name: &str) -> Option<PathBuf> {
        let at = self.symbol(name)?;
        // SAFETY: all zeros is a value of this plain struct.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked about.
        let found = unsafe { libc::dladdr(at.as_ptr(), &mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: a C string of the loader that stands while the library is open, for ever.
        let file = unsafe { CStr::from_ptr(info.dli_fname) };
        Path::new(OsStr::from_bytes(file.to_bytes())).canonicalize().ok()
    }
}

fn loader_error() -> String {
    // SAFETY: the message belongs to this thread.
    let words = unsafe { libc::dlerror() };
    if words.is_null() {
        return "the loader gave no reason".into();
    }
    // SAFETY: not null, hence a C string that stands until this thread's next call of the loader.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

/// A library's text; `None` where there is none.
///
/// # Safety
/// Null, or a C string that stands for ever.
pub(crate) unsafe fn text_of(words: *const c_char) -> Option<String> {
    if words.is_null() {
        return None;
    }
    // SAFETY: not null: the caller's promise.
    Some(unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
}

/// A struct of function pointers, named and typed as in the vendor's header, and its `load`.
macro_rules! symbols {
    ($(#[$doc:meta])* $table:ident { $(fn $name:ident($($arg:ty),* $(,)?) -> $ret:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(crate) struct $table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $table {
            /// All of them, or the name of the first that the library lacks.
            pub fn load(
                library: &$crate::machine::library::Library,
            ) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let at = library.symbol(stringify!($name)).ok_or(stringify!($name))?;
                        // SAFETY: the vendor's symbol of this name has this signature, and the
                        // library is never closed.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<std::ffi::c_void>,
                                unsafe extern "C" fn($($arg),*) -> $ret,
                            >(at)
                        }
                    },)*
                })
            }
        }
    };
}
pub(crate) use symbols;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_which() {
        let error = Library::open(Path::new("libkie-no-such.so.7")).unwrap_err();
        assert!(error.contains("libkie-no-such.so.7"), "{error}");
    }

    #[test]
    fn symbols_are_found_or_not() {
        let library = Library::open(Path::new("libc.so.6")).unwrap();
        assert!(library.symbol("malloc").is_some());
        assert!(library.symbol("kie_no_such_symbol").is_none());
        assert!(library.symbol("with\0zero").is_none());
        let file = library.file_of("malloc").unwrap();
        assert!(file.is_absolute() && file.is_file(), "{}", file.display());
    }
}
