//! `kie._kie`: arguments in, iterator out. Nothing but PyO3 lives here; the Python package `kie`
//! puts the documented surface on top.
//!
//! Invariants: no engine thread ever attaches to Python; whatever may wait does so detached, in
//! slices after which signals are looked at; a handle carried over `fork` raises and never waits.

mod args;
mod doctor;
mod engine;
mod error;
mod kccl;
mod loading;
mod measure;
mod owned;
mod server;
mod stream;
mod types;

use pyo3::prelude::*;

#[pymodule]
fn _kie(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("__commit__", env!("KIE_COMMIT"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Session>()?;
    module.add_class::<kccl::Communicator>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<types::Token>()?;
    module.add_class::<types::TopLogprob>()?;
    module.add_class::<types::TokenLogprob>()?;
    module.add_class::<types::Completion>()?;
    module.add_class::<types::Usage>()?;
    module.add_class::<types::Timings>()?;
    module.add_function(wrap_pyfunction!(engine::compile, module)?)?;
    module.add_function(wrap_pyfunction!(engine::plan, module)?)?;
    module.add_function(wrap_pyfunction!(engine::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::topology, module)?)?;
    module.add_function(wrap_pyfunction!(measure::measure, module)?)?;
    module.add_function(wrap_pyfunction!(measure::echo, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::gpus, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::compiler, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::host, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::supported, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::gpu_bandwidth, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::read_bandwidth, module)?)
}
