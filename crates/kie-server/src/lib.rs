//! kie over HTTP: `router(engine)` for a program of your own, [`Server`] for a whole server.
//!
//! ```text
//! server.rs  the port, connections, draining      router.rs  paths, and what stands around each
//! conn.rs    one socket: slow heads, departures   app.rs     what all requests share
//! generate.rs  one request's tokens, coalesced    sse.rs     event streams
//! request.rs   fields of a body, one by one       openai/    one file a path
//! chat.rs  the model's template, prompts and answers      anthropic/  the same of that API
//! tools/   calls in what a model writes
//! ```
//!
//! # Invariants
//! * tokio is in this crate alone. The engine wakes a stream's reader through one eventfd; there is
//!   no thread a request, and nothing here is on the engine's token path.
//! * What a client sends is answered with a status below 500 (503 while loading or draining).
//! * A body that is dropped, and a socket whose other side is closed, cancel the request.
//! * No text of a prompt or an answer is logged.

mod anthropic;
mod app;
mod auth;
mod chat;
mod config;
mod conn;
mod errors;
mod format;
mod generate;
mod health;
mod ledger;
mod limits;
mod log;
mod messages;
mod metrics;
mod models;
mod openai;
mod page;
mod queue;
mod request;
mod router;
mod sampling;
mod server;
mod sse;
mod text;
mod tokens;
mod tools;
mod trace;

pub use config::Config;
pub use log::Log;
pub use router::{router, router_with};
pub use server::Server;
