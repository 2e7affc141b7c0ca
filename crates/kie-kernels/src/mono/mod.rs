//! The monokernel: one persistent launch that holds the whole decode loop, over any [`machine`].

pub mod cache;
pub(crate) mod library;
pub mod machine;
