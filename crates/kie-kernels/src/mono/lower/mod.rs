//! Lowering: from a program to all that a launch is made of. Pure and printable; no machine is
//! touched, and every size, offset and buffer is computed here and nowhere else.
//!
//! ```text
//! Program ─ model     ─▶ layers of a few classes, or InvalidProgram with the step
//!         ─ matrix    ─▶ the matrices of a layer, in the order of the stream
//!         ─ partition ─▶ rows over blocks, how warps share them, stages (by tuning, a row a GPU)
//!         ─ kernels   ─▶ of how many columns, with streamed pages or without, with drafts
//!         ─ delta     ─▶ of a delta rule: heads over blocks, what each keeps of a sequence
//!         ─ stacks    ─▶ which experts are multiplied as one, and how many at a time
//!         ─ extras    ─▶ a layer's sinks and biases, one after another
//!         ─ segments  ─▶ what passes through a block's ring, and the offset table of layers
//!         ─ layout    ─▶ of one kernel: words of the exchange, shared memory
//!         ─ header    ─▶ all of it as constants, the text in front of the kernels
//!         ─ print     ─▶ all of it for people (`kie info --plan -v`)
//! ```

pub mod compressed;
pub mod delta;
pub mod experts;
pub mod extras;
pub mod header;
pub mod hyper;
pub mod kernels;
pub mod latent;
pub mod layout;
pub mod matrix;
pub mod model;
mod others;
pub mod partition;
pub mod parts;
pub mod print;
mod read;
pub mod segments;
mod slots;
mod stacks;
pub mod tiling;
pub mod tuning;
