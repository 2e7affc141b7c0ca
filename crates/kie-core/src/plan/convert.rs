//! Weights in another number format than the checkpoint's, on request only: what it costs is said.

use half::{bf16, f16};
use kie_kernels::abi::{Codes, Dtype, Encoding, Tensor};
use kie_kernels::cpu::matmul::Matrix;
use kie_kernels::cpu::numbers;
use kie_kernels::device::Stop;

use crate::error::{Error, Result};
use crate::weights;

/// The format a configuration asks for; `None`: as stored.
pub(super) fn wanted(dtype: &str) -> Result<Option<Dtype>> {
    match dtype {
        "auto" => Ok(None),
        "f32" => Ok(Some(Dtype::F32)),
        "f16" => Ok(Some(Dtype::F16)),
        "bf16" => Ok(Some(Dtype::Bf16)),
        other => Err(Error::InvalidRequest(format!(
            "dtype must be auto, f32, f16 or bf16, got {other:?}"
        ))),
    }
}

/// A converted tensor, its bytes and what it lost.
pub(super) struct Converted {
    pub tensor: Tensor,
    pub bytes: Vec<u8>,
    pub note: Option<String>,
}

/// Rewrites a tensor. `stored` describes it in its checkpoint; the result lies at offset 0 of a
/// buffer of its own.
///
/// # Errors
/// [`Error::Load`] where a number does not fit the wanted format, [`Error::OutOfMemory`],
/// [`Error::Interrupted`].
pub(super) fn convert(
    described: &Tensor,
    stored: &weights::Tensor,
    dtype: Dtype,
    stop: &Stop,
) -> Result<Converted> {
    let cols = described.cols as usize;
    let numbers = described.lanes as usize * described.rows as usize * cols;
    let need = numbers * dtype.bytes();
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(need).map_err(|_| Error::OutOfMemory {
        need: need as u64,
        free: 0,
        plan: format!("{} as {}; open it as it is stored", stored.name, dtype.name()),
    })?;
    let mut row = vec![0.0f32; cols];
    let (mut error, mut norm) = (0.0f64, 0.0f64);
    for at in 0..(described.lanes * described.rows) as usize {
        stop.check()?;
        let (lane, at) = (at / described.rows as usize, at % described.rows as usize);
        numbers::row_to_f32(&matrix(described, stored, lane), at, &mut row);
        for value in &row {
            let kept = push(&mut bytes, *value, dtype);
            if value.is_finite() && !kept.is_finite() {
                return Err(Error::tensor(
                    &stored.path,
                    &stored.name,
                    format!("numbers that fit {}", dtype.name()),
                    format!("{value}"),
                ));
            }
            error += f64::from(kept - value).powi(2);
            norm += f64::from(*value).powi(2);
        }
    }
    let codes = Codes::plain(dtype).expect("a configuration asks for plain numbers");
    let relative = (error / norm.max(f64::MIN_POSITIVE)).sqrt();
    let note = (relative > 0.0).then(|| {
        format!(
            "{}: {} to {}, relative error {relative:.1e}",
            stored.name,
            stored.encoding.codes.name(),
            dtype.name()
        )
    });
    let tensor = Tensor {
        encoding: Encoding::plain(codes),
        offset: 0,
        scale_offset: 0,
        scale_buffer: 0,
        ..*described
    };
    Ok(Converted { tensor, bytes, note })
}

/// One lane of a stored tensor.
fn matrix<'a>(described: &Tensor, stored: &'a weights::Tensor, lane: usize) -> Matrix<'a> {
    let part = |all: &'a [u8], bytes: u64| {
        let bytes = bytes as usize;
        &all[lane * bytes..(lane + 1) * bytes]
    };
    let scales = || stored.scales.as_ref().map_or(&[][..], |scales| scales.bytes());
    Matrix::described(
        described,
        part(stored.bytes(), described.lane_bytes()),
        || part(scales(), described.scale_bytes()),
        || &[],
    )
}

/// Appends one number and returns what was kept of it.
fn push(bytes: &mut Vec<u8>, value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => {
            bytes.extend(value.to_le_bytes());
            value
        }
        Dtype::F16 => {
            let half = f16::from_f32(value);
            bytes.extend(half.to_le_bytes());
            half.to_f32()
        }
        Dtype::Bf16 => {
            let half = bf16::from_f32(value);
            bytes.extend(half.to_le_bytes());
            half.to_f32()
        }
        Dtype::F8E4m3 | Dtype::F8E8m0 => unreachable!("no configuration asks for it"),
    }
}
