//! kie's HTTP paths beside those of a server of your own.
//!
//!     cargo run --release -p kie-server --example embed_server -- python/kie/demo 127.0.0.1:8000

use axum::routing::get;
use axum::Router;
use kie_core::Engine;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "python/kie/demo".to_owned());
    let address = args.next().unwrap_or_else(|| "127.0.0.1:8000".to_owned());

    let engine = Engine::builder(model).device("cpu").build()?;
    let own = Router::new().route("/hello", get(|| async { "hello" }));
    let listener = tokio::net::TcpListener::bind(address).await?;
    eprintln!("http://{}/hello", listener.local_addr()?);
    axum::serve(listener, own.merge(kie_server::router(engine))).await?;
    Ok(())
}
