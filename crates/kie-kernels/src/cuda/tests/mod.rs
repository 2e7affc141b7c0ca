//! CUDA without a GPU: the real compiler where there is one, and a stub driver that does what a
//! test tells it to.

mod compiler;
