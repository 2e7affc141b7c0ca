//! Whether memory is to be had, asked before it is taken piece by piece: an allocation that fails
//! inside a library, or in one of many small ones, ends the process.

use std::hint::black_box;

use crate::error::{Error, Result};
use crate::limits;

/// Refuses unless so many bytes of the host's memory could be allocated at once. They are given
/// back, so whoever asks takes them next.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub fn ask(bytes: u64) -> Result<()> {
    // Or else the pieces take more than they are.
    limits::share_arenas();
    let mut all = Vec::<u8>::new();
    let had = usize::try_from(bytes).is_ok_and(|n| all.try_reserve_exact(n).is_ok());
    // Or else the compiler would see that nobody uses the memory, and not ask.
    drop(black_box(all));
    let device = "the host".to_owned();
    had.then_some(()).ok_or(Error::OutOfMemory { device, wanted_bytes: bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_any_machine_has_is_refused() {
        assert_eq!(ask(0), Ok(()));
        assert_eq!(ask(1 << 20), Ok(()));
        for bytes in [1 << 60, u64::MAX] {
            let device = "the host".to_owned();
            assert_eq!(ask(bytes), Err(Error::OutOfMemory { device, wanted_bytes: bytes }));
        }
    }
}
