//! `kie serve` in front of an engine of a fixed pace: what a client can take, apart from what a
//! model costs.
//!
//!     cargo run --release -p kie-server --example paced_server -- tests/data/llama 5000
//!
//! The model is a real one; it must be faster than the pace, which each of its passes waits for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_core::Engine;
use kie_kernels::buffer::{Buffer, HostBytes};
use kie_kernels::device::{Device, DeviceInfo, ExactReuse, Gone, Options, Running};
use kie_kernels::devices;
use kie_kernels::mailbox::Mailbox;
use kie_kernels::validate::ValidProgram;
use kie_server::{Config, Server};

/// Time that is made up for after a pass that was late; more is lost.
const ARREARS_MAX: Duration = Duration::from_millis(20);

/// A CPU whose passes end at a fixed pace.
struct Paced {
    inner: Arc<dyn Device>,
    pass: Duration,
}

impl Device for Paced {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> kie_kernels::Result<Buffer> {
        self.inner.load(bytes)
    }

    fn exact_reuse(&self, program: &ValidProgram) -> kie_kernels::Result<ExactReuse> {
        self.inner.exact_reuse(program)
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> kie_kernels::Result<Box<dyn Running>> {
        let inner = self.inner.start(program, buffers, mailbox)?;
        Ok(Box::new(Pacer { inner, pass: self.pass, due: Instant::now() }))
    }
}

struct Pacer {
    inner: Box<dyn Running>,
    pass: Duration,
    /// When the next pass may begin.
    due: Instant,
}

impl Running for Pacer {
    fn drive(&mut self, gone: Gone<'_>) -> kie_kernels::Result<bool> {
        let now = Instant::now();
        if let Some(rest) = self.due.checked_duration_since(now) {
            // A sleep that ends late is made up for by the next one; to spin would take a core
            // from the client.
            std::thread::sleep(rest);
        } else {
            self.due = self.due.max(now - ARREARS_MAX);
        }
        let busy = self.inner.drive(gone)?;
        self.due = if busy { self.due + self.pass } else { Instant::now() };
        Ok(busy)
    }

    fn park(&mut self) {
        self.inner.park();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "tests/data/llama".to_owned());
    let rate: f64 = args.next().as_deref().unwrap_or("5000").parse()?;

    let options = Options { threads: Some(1), ..Options::default() };
    let inner = devices::open("cpu", &options)?;
    let pass = Duration::try_from_secs_f64(1.0 / rate)?;
    let server = Server::bind(Config { port: 0, ..Config::default() })?;
    server.serve(Engine::builder(model).runner(Arc::new(Paced { inner, pass })).build()?);
    eprintln!("http://{}", server.address());
    while !server.wait(Duration::from_secs(3600)) {}
    Ok(())
}
