//! What a plan and a quantised copy both ask of a checkpoint: its tensors in place, and whether
//! they are plain numbers; and who hears how reading them goes.

use kie_kernels::abi::{Layout, Tensor};
use kie_kernels::device::Stop;

use crate::error::{Error, Result};
use crate::model::{Role, Spec};
use crate::weights::{self, Checkpoint};

/// Told what is being done: phase, units done, units in all.
pub type Progress = dyn Fn(&str, u64, u64) + Send + Sync;

/// Who hears how reading goes, and who ends it.
pub struct Reads<'a> {
    /// Told what is being done.
    pub progress: &'a Progress,
    /// Asked all the while.
    pub stop: &'a Stop,
}

/// Whether matrices are plain numbers still.
///
/// # Errors
/// [`Error::InvalidRequest`] names one that is not.
pub(super) fn not_quantised(spec: &Spec, checkpoint: &Checkpoint) -> Result<()> {
    let tensors = spec.tensors.iter().flat_map(|tensor| checkpoint.all(tensor.role));
    match tensors.filter(|tensor| tensor.encoding.is_quantised()).collect::<Vec<_>>()[..] {
        [] => Ok(()),
        [first, ..] => Err(Error::InvalidRequest(format!(
            "{} is quantised already ({}); wanted a model of 16 or 32 bits",
            first.name, first.encoding
        ))),
    }
}

/// A checkpoint tensor in place. Matrices have the lane first where they have three dimensions;
/// everything else is rows of numbers.
pub(super) fn describe(t: &weights::Tensor) -> Tensor {
    let (lanes, rows, cols) = match t.shape[..] {
        // A convolution has one input a channel.
        [rows, 1, cols] if matches!(t.role, Role::DeltaConv(_)) => (1, rows, cols),
        [lanes, rows, cols] => (lanes, rows, cols),
        [rows, cols] => (1, rows, cols),
        [cols] => (1, 1, cols),
        _ => unreachable!("the spec asks for one to three dimensions"),
    };
    let (scale_file, scale_offset) = t.scales.as_ref().map_or((0, 0), |s| (s.file, s.offset));
    let described = Tensor {
        buffer: t.file as u32 + 1,
        encoding: t.encoding,
        layout: Layout::RowMajor,
        lanes: lanes as u32,
        rows: rows as u32,
        cols: cols as u32,
        row_step: t.row_step as u32,
        scale_buffer: scale_file as u32 + 1,
        offset: t.offset as u64,
        scale_offset: scale_offset as u64,
        zero_offset: 0,
    };
    if t.is_repacked() {
        // What rows will be made of; where they lie is known when they are.
        return Tensor { offset: 0, scale_offset: 0, ..described };
    }
    described
}
