//! A request's tokens for asynchronous code: the engine's eventfd in tokio's reactor.
//!
//! Invariant: the descriptor belongs to the stream, so it leaves the reactor first (field order).

use std::os::fd::{AsRawFd, RawFd};

use kie_core::{Next, TokenStream};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

const READ: Interest = Interest::READABLE;

/// See the module. Dropped, it cancels the request.
pub(crate) struct Tokens {
    fd: Option<AsyncFd<Borrowed>>,
    stream: TokenStream,
}

/// A descriptor that somebody else closes.
struct Borrowed(RawFd);

impl AsRawFd for Borrowed {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl Tokens {
    pub(crate) fn new(stream: TokenStream) -> Self {
        Self { fd: None, stream }
    }

    /// What is there now.
    ///
    /// # Errors
    /// What ended the request, once.
    pub(crate) fn try_next(&mut self) -> kie_core::Result<Next> {
        self.stream.try_next()
    }

    /// Waits until [`try_next`](Self::try_next), which was pending, may have something. May be
    /// dropped and called again.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) async fn ready(&mut self) -> kie_core::Result<()> {
        let failed = |e: std::io::Error| kie_core::Error::Device(format!("eventfd: {e}"));
        let Some(fd) = &self.fd else {
            let raw = self.stream.poll_fd()?;
            // SAFETY: `raw` stays what it is until `self.stream` is dropped, which is behind
            // `self.fd` (field order); `Borrowed` is private and always answers with `raw`.
            let fd = unsafe { AsyncFd::register_with_interest(Borrowed(raw), READ) };
            self.fd = Some(fd.map_err(|e| failed(e.into()))?);
            // What came before the descriptor was made wrote to none.
            return Ok(());
        };
        // Forgotten before the caller looks: what comes later sets it again.
        fd.readable().await.map_err(failed)?.clear_ready();
        Ok(())
    }

    /// The stream itself.
    pub(crate) fn stream(&mut self) -> &mut TokenStream {
        &mut self.stream
    }
}
