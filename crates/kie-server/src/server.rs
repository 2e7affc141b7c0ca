//! A server that runs by itself: its port, its threads, its end.
//!
//! # Invariants
//! * The port is bound before [`Server::bind`] returns, and answers before there is an engine.
//! * After [`Server::drain`] no request begins; those that run have `drain` seconds, then they end
//!   with an error, and then the server is over.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulConnection;
use kie_core::Engine;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tower::ServiceExt;

use crate::app::{reached, App, Phase};
use crate::config::Config;
use crate::conn::{last_words, linger, until_deadline, Answer, Conn, Io, Peer};
use crate::router::routes;
use crate::trace::Tracer;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Most bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// How long a drained server waits for the first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(1);
/// How long ended streams have to be written.
const LAST_WRITE: Duration = Duration::from_millis(500);
const SLOW_HEAD: &str = "{\"error\":{\"message\":\"the request's head did not come in time\",\
    \"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}";

/// A server; see the module. Dropped, it ends at once.
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    over: Arc<Over>,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Over {
    is: Mutex<bool>,
    changed: Condvar,
}

impl Server {
    /// Binds the port and begins to answer, with 503 until [`serve`](Self::serve).
    ///
    /// # Errors
    /// What the system said about host and port; a collector that cannot be one.
    pub fn bind(config: Config) -> io::Result<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).clamp(1, 4);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("kie-server")
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            listen(&config)?
        };
        let address = listener.local_addr()?;
        let tracer = Tracer::new(config.otlp_endpoint.as_deref());
        let tracer = tracer.map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let app = App::new(config, tracer);
        let over = Arc::new(Over::default());
        let (app_of_loop, over_of_loop) = (Arc::clone(&app), Arc::clone(&over));
        runtime.spawn(async move {
            accept(&app_of_loop, listener).await;
            *over_of_loop.is.lock().unwrap_or_else(PoisonError::into_inner) = true;
            over_of_loop.changed.notify_all();
        });
        Ok(Self { app, address, over, runtime: Some(runtime) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Begins to answer from `engine`.
    pub fn serve(&self, engine: Engine) {
        self.app.serve(engine);
    }

    /// No new requests; running ones have the configured time.
    pub fn drain(&self) {
        self.app.phase.send_if_modified(|phase| {
            let open = *phase == Phase::Open;
            if open {
                *phase = Phase::Draining;
            }
            open
        });
    }

    /// Waits until a drained server is over, for at most `timeout`; true if it is.
    pub fn wait(&self, timeout: Duration) -> bool {
        let is = self.over.is.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.over.changed.wait_timeout_while(is, timeout, |is| !*is);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The first address of the host that can be bound.
fn listen(config: &Config) -> io::Result<TcpListener> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (config.host.as_str(), config.port).to_socket_addrs()? {
        let listen = || {
            let socket = match address {
                SocketAddr::V4(_) => TcpSocket::new_v4()?,
                SocketAddr::V6(_) => TcpSocket::new_v6()?,
            };
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            socket.listen(BACKLOG)
        };
        match listen() {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Accepts until drained, then waits for the connections.
async fn accept(app: &Arc<App>, listener: TcpListener) {
    let router = routes(app);
    let mut phase = app.phase.subscribe();
    // Each connection holds a sender: nothing is received, but the last one's end is seen.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = reached(&mut phase, |phase| phase != Phase::Open) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, router, alive) = (Arc::clone(app), router.clone(), alive.clone());
                tokio::spawn(async move {
                    connection(&app, stream, router).await;
                    drop(alive);
                });
            }
            // No descriptors left: some will be closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    drop(alive);
    // New connections are still answered, with 503, as long as there are old ones.
    let refuse = async {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn({
                let (app, router) = (Arc::clone(app), router.clone());
                async move { connection(&app, stream, router).await }
            });
        }
        std::future::pending::<()>().await
    };
    tokio::select! {
        _ = all_gone.recv() => {}
        () = tokio::time::sleep(app.config.drain) => {}
        () = refuse => {}
    }
    app.phase.send_replace(Phase::Over);
    drop(tokio::time::timeout(LAST_WRITE, all_gone.recv()).await);
}

/// One connection, to its end.
async fn connection(app: &Arc<App>, stream: TcpStream, router: Router) {
    // Tokens are small and each is to go out at once.
    drop(stream.set_nodelay(true));
    let conn = Conn::new(stream);
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        let busy = conn.request();
        request.extensions_mut().insert(Peer::new(&conn));
        let router = router.clone();
        // Boxed: hyper keeps room for one of it as long as there is the connection.
        Box::pin(async move {
            let response = router.oneshot(request).await;
            response.map(|response| response.map(|body| Answer { body, _busy: busy }))
        })
    });
    let io = TokioIo::new(Io(Arc::clone(&conn)));
    let (head, rest) = (app.config.header_timeout, app.config.idle_timeout);
    let mut phase = app.phase.subscribe();
    let begins = async {
        tokio::select! {
            http2 = conn.begins_like_http2() => http2,
            () = reached(&mut phase, |phase| phase != Phase::Open) => true,
        }
    };
    let in_time = match until_deadline(std::pin::pin!(begins), &conn, head, rest).await {
        Err(in_head) => Err(in_head),
        // What tells the two apart would read the head in two pieces, for which a connection's
        // buffer grows to twice its size and stays so.
        Ok(false) => {
            let mut builder = http1::Builder::new();
            builder.header_read_timeout(None).half_close(true).max_buf_size(HEAD_BYTES_MAX);
            let served = std::pin::pin!(builder.serve_connection(io, service));
            to_its_end(app, &conn, served).await
        }
        Ok(true) => {
            let mut builder = auto::Builder::new(TokioExecutor::new());
            builder.http1().header_read_timeout(None).half_close(true).max_buf_size(HEAD_BYTES_MAX);
            builder.http2().max_header_list_size(HEAD_BYTES_MAX as u32);
            // Boxed: a task is as large as the largest of its steps.
            let mut served = Box::pin(builder.serve_connection(io, service));
            to_its_end(app, &conn, served.as_mut()).await
        }
    };
    match in_time {
        // Boxed as above: a connection mostly rests.
        Ok(()) => Box::pin(linger(&conn)).await,
        Err(true) => {
            let length = SLOW_HEAD.len();
            let words = format!(
                "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\n\
                 content-length: {length}\r\nconnection: close\r\n\r\n{SLOW_HEAD}"
            );
            Box::pin(last_words(&conn, words.as_bytes())).await;
        }
        Err(false) => {}
    }
}

/// Serves until the connection ends, by itself, by a deadline (`Err(true)`: a head was too slow) or
/// behind the requests that run when the server is drained.
async fn to_its_end<C: GracefulConnection>(
    app: &App,
    conn: &Conn,
    mut served: Pin<&mut C>,
) -> Result<(), bool> {
    let (head, rest) = (app.config.header_timeout, app.config.idle_timeout);
    let mut phase = app.phase.subscribe();
    tokio::select! {
        ended = until_deadline(served.as_mut(), conn, head, rest) => return ended.map(drop),
        () = reached(&mut phase, |phase| phase != Phase::Open) => {}
    }
    // A request that is on its way into a new connection is to hear why it is refused.
    let first = tokio::time::timeout(FIRST_REQUEST, conn.first_request());
    tokio::select! {
        ended = until_deadline(served.as_mut(), conn, head, rest) => return ended.map(drop),
        _ = first => {}
    }
    served.as_mut().graceful_shutdown();
    until_deadline(served, conn, head, rest).await.map(drop)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_resting_connection_is_a_small_task() {
        let app = App::new(Config::default(), Tracer::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (_client, (stream, _)) = tokio::try_join!(client, listener.accept()).unwrap();
        let task = connection(&app, stream, routes(&app));
        // hyper's two buffers of 8 KiB come on top.
        assert!(std::mem::size_of_val(&task) < 4 << 10, "{}", std::mem::size_of_val(&task));
    }
}
