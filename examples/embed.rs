//! kie inside a Rust program: open a model, stream one completion, read the closing figures.
//!
//!     cargo run --release -p kie-core --example embed -- python/kie/demo "def fibonacci(n):"

use std::io::Write;

use kie_core::engine::Engine;
use kie_core::request::{Prompt, Request, SamplingParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().unwrap_or_else(|| "python/kie/demo".to_owned());
    let prompt = args.next().unwrap_or_else(|| "def fibonacci(n):".to_owned());

    let engine = Engine::builder(model).device("cpu").build()?;
    let params = SamplingParams { max_tokens: Some(64), ..SamplingParams::default() };
    let mut stream = engine.stream(Request { prompt: Prompt::Text(prompt), params })?;
    let mut out = std::io::stdout().lock();
    for token in stream.by_ref() {
        write!(out, "{}", token?.text)?;
        out.flush()?;
    }
    let done = stream.completion()?;
    writeln!(
        out,
        "\n[{} tokens, {}, {:.0} tok/s]",
        done.usage.completion_tokens,
        done.finish_reason.name(),
        done.timings.predicted_per_second
    )?;
    Ok(())
}
