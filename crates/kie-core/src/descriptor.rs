//! A descriptor that one side makes readable and the other polls: an eventfd on Linux, elsewhere
//! (and with feature `portable`) two connected sockets.
//!
//! Invariant: between a `signal` and the next `drain` the descriptor is readable.

#[cfg(all(target_os = "linux", not(feature = "portable")))]
pub use eventfd::EventFd as Descriptor;
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
pub use sockets::Sockets as Descriptor;

#[cfg(all(target_os = "linux", any(test, not(feature = "portable"))))]
mod eventfd {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

    /// A counter of the kernel's, readable while it is not zero.
    #[derive(Debug)]
    pub struct EventFd(OwnedFd);

    impl EventFd {
        /// A new one, not readable.
        pub fn new() -> std::io::Result<Self> {
            // SAFETY: eventfd takes no pointers.
            let made = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
            if made < 0 {
                return Err(std::io::Error::last_os_error());
            }
            // SAFETY: the descriptor is new and nobody else has it.
            Ok(Self(unsafe { OwnedFd::from_raw_fd(made) }))
        }

        /// Makes it readable.
        pub fn signal(&self) {
            let one = 1u64;
            // SAFETY: eight bytes of `one` are read; the descriptor lives as long as `self`. A
            // failure means that the counter is full, which is readable already.
            unsafe { libc::write(self.0.as_raw_fd(), std::ptr::from_ref(&one).cast(), 8) };
        }

        /// Makes it unreadable.
        pub fn drain(&self) {
            let mut count = 0u64;
            // SAFETY: eight bytes of `count` are written; a failure means that it was drained.
            unsafe { libc::read(self.0.as_raw_fd(), std::ptr::from_mut(&mut count).cast(), 8) };
        }
    }

    impl AsRawFd for EventFd {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_raw_fd()
        }
    }
}

#[cfg(any(test, feature = "portable", not(target_os = "linux")))]
mod sockets {
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, RawFd};
    use std::os::unix::net::UnixStream;

    /// Bytes written to one end, not yet read from the other.
    #[derive(Debug)]
    pub struct Sockets {
        polled: UnixStream,
        written: UnixStream,
    }

    impl Sockets {
        /// A new pair, not readable.
        pub fn new() -> std::io::Result<Self> {
            let (polled, written) = UnixStream::pair()?;
            polled.set_nonblocking(true)?;
            written.set_nonblocking(true)?;
            Ok(Self { polled, written })
        }

        /// Makes it readable.
        pub fn signal(&self) {
            // A failure means that the buffer is full, which is readable already.
            let _ = (&self.written).write(&[1]);
        }

        /// Makes it unreadable.
        pub fn drain(&self) {
            let mut bytes = [0; 256];
            while matches!((&self.polled).read(&mut bytes), Ok(read) if read > 0) {}
        }
    }

    impl AsRawFd for Sockets {
        fn as_raw_fd(&self) -> RawFd {
            self.polled.as_raw_fd()
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::sockets::Sockets;
    use crate::primitive::poll;

    /// The promise that both kinds give.
    fn keeps_its_promise<D: AsRawFd>(made: &D, signal: impl Fn(&D), drain: impl Fn(&D)) {
        let readable = |wait_ms| poll(made.as_raw_fd(), wait_ms);
        assert!(!readable(0), "new");
        drain(made);
        assert!(!readable(0), "drained before any signal");
        for signals in [1, 3, 100_000] {
            for _ in 0..signals {
                signal(made);
            }
            assert!(readable(1_000), "{signals} signals");
            assert!(readable(1_000), "polling takes nothing away");
            drain(made);
            assert!(!readable(0), "{signals} signals, drained");
        }
    }

    #[test]
    fn sockets_are_readable_from_signal_to_drain() {
        keeps_its_promise(&Sockets::new().unwrap(), Sockets::signal, Sockets::drain);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_eventfd_is_readable_from_signal_to_drain() {
        use super::eventfd::EventFd;
        keeps_its_promise(&EventFd::new().unwrap(), EventFd::signal, EventFd::drain);
    }
}
