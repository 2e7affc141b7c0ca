//! One socket: requests whose head is slow, connections that rest, clients that leave.
//!
//! # Invariants
//! * `head_since` is set by the first byte after a finished request and cleared when the next
//!   request's head is whole, so a connection that merely rests is not a slow one.
//! * The socket is shared by hyper, which reads and writes it, and by requests, which only look
//!   whether the other side has closed it.

use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{ready, Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::Frame;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Most bytes of one read.
const READ_BYTES: usize = 4096;
/// What a connection of HTTP/2 begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How often a socket with a further request waiting in it is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// What is known about one socket.
pub(crate) struct Conn {
    pub(crate) stream: TcpStream,
    /// Requests whose answers are not written yet.
    busy: AtomicUsize,
    /// Told of the first request.
    asked: Semaphore,
    /// When the head that is being read began, or the connection came to rest.
    since: Mutex<Since>,
}

#[derive(Clone, Copy)]
enum Since {
    Resting(Instant),
    Head(Instant),
    Busy,
}

impl Conn {
    pub(crate) fn new(stream: TcpStream) -> Arc<Self> {
        Arc::new(Self {
            stream,
            busy: AtomicUsize::new(0),
            asked: Semaphore::new(0),
            since: Mutex::new(Since::Resting(Instant::now())),
        })
    }

    fn since(&self) -> std::sync::MutexGuard<'_, Since> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self) {
        let mut since = self.since();
        if matches!(*since, Since::Resting(_)) {
            *since = Since::Head(Instant::now());
        }
    }

    /// A request's head is whole; the guard goes with its answer.
    pub(crate) fn request(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::AcqRel);
        self.asked.close();
        *self.since() = Since::Busy;
        Busy(Arc::clone(self))
    }

    /// Waits for the first bytes: whether they may be those of HTTP/2.
    pub(crate) async fn begins_like_http2(&self) -> bool {
        let mut first = [0; PREFACE.len()];
        let seen = self.stream.peek(&mut first).await.unwrap_or(0);
        seen > 0 && PREFACE.starts_with(&first[..seen])
    }

    /// Waits until there has been a request.
    pub(crate) async fn first_request(&self) {
        drop(self.asked.acquire().await);
    }

    /// When it must be closed, and whether a head is being read.
    pub(crate) fn deadline(&self, head: Duration, rest: Duration) -> Option<(Instant, bool)> {
        match *self.since() {
            Since::Resting(began) => Some((began + rest, false)),
            Since::Head(began) => Some((began + head, true)),
            Since::Busy => None,
        }
    }
}

/// A request whose answer is not written yet.
pub(crate) struct Busy(Arc<Conn>);

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            *self.0.since() = Since::Resting(Instant::now());
        }
    }
}

/// The other side of a request's socket; of an unknown one where the router runs elsewhere.
#[derive(Clone, Default)]
pub(crate) struct Peer(Option<Arc<Conn>>);

impl Peer {
    pub(crate) fn new(conn: &Arc<Conn>) -> Self {
        Self(Some(Arc::clone(conn)))
    }

    /// Ends when the other side has closed its socket. Of an unknown socket never: there the
    /// server that runs the router drops the request.
    pub(crate) async fn gone(&self) {
        let Some(conn) = &self.0 else { return std::future::pending().await };
        loop {
            match conn.stream.peek(&mut [0]).await {
                Ok(0) | Err(_) => return,
                // A further request stands before the end.
                Ok(_) => tokio::time::sleep(LOOK).await,
            }
            match conn.stream.ready(Interest::READABLE).await {
                Ok(ready) if !ready.is_read_closed() => {}
                Ok(_) | Err(_) => return,
            }
        }
    }
}

/// The socket as hyper has it.
pub(crate) struct Io(pub(crate) Arc<Conn>);

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = &self.0.stream;
        loop {
            ready!(stream.poll_read_ready(cx))?;
            // Initializing all of hyper's buffer would make a resting connection's pages resident.
            let mut room = [0; READ_BYTES];
            let most = buffer.remaining().min(READ_BYTES);
            match stream.try_read(&mut room[..most]) {
                Ok(n) => {
                    buffer.put_slice(&room[..n]);
                    if n > 0 {
                        self.0.arrived();
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl Io {
    fn poll_with(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.stream.poll_write_ready(cx))?;
            match write(&self.0.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |stream| stream.try_write_vectored(bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(socket2::SockRef::from(&self.0.stream).shutdown(Shutdown::Write))
    }
}

/// A body, and the request that is busy until it is written or dropped.
pub(crate) struct Answer {
    pub(crate) body: Body,
    pub(crate) _busy: Busy,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// Reads and drops what a client still sends, for a moment, so that it finds the answer instead of
/// a reset connection.
pub(crate) async fn linger(conn: &Conn) {
    let read = async {
        // On the heap: a connection's task is as large as the largest of its steps.
        let mut room = vec![0; 16384];
        loop {
            if conn.stream.readable().await.is_err() {
                return;
            }
            match conn.stream.try_read(&mut room) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    drop(tokio::time::timeout(Duration::from_secs(2), read).await);
}

/// Writes an answer of its own to a socket that hyper has let go of.
pub(crate) async fn last_words(conn: &Conn, words: &[u8]) {
    let write = async {
        let mut left = words;
        while !left.is_empty() && conn.stream.writable().await.is_ok() {
            match conn.stream.try_write(left) {
                Ok(n) => left = &left[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        drop(socket2::SockRef::from(&conn.stream).shutdown(Shutdown::Write));
    };
    drop(tokio::time::timeout(Duration::from_secs(1), write).await);
    linger(conn).await;
}

/// Polls `future` until it or the connection's deadline ends; `Err(true)`: a head was too slow.
pub(crate) async fn until_deadline<F: Future>(
    future: Pin<&mut F>,
    conn: &Conn,
    head: Duration,
    rest: Duration,
) -> Result<F::Output, bool> {
    let mut future = future;
    let far = Instant::now() + Duration::from_secs(86_400);
    let mut clock = Box::pin(tokio::time::sleep_until(far));
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        // The poll may have read a first byte, or ended a request.
        let Some((due, in_head)) = conn.deadline(head, rest) else { return Poll::Pending };
        if clock.deadline() != due {
            clock.as_mut().reset(due);
        }
        clock.as_mut().poll(cx).map(|()| Err(in_head))
    })
    .await
}
