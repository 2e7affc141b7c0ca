//! Weights in another format than the checkpoint's, on request only: what it costs is said.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use half::{bf16, f16};
use kie_kernels::abi::{Codes, Dtype, Encoding, Tensor};
use kie_kernels::device::Stop;
use kie_kernels::matrix::{row_to_f32, Matrix};

use super::quantize::{quantise, Scheme};
use crate::error::{Error, Result};
use crate::model::Role;
use crate::weights::{self, Parts};

/// What a configuration asks of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// As stored.
    Stored,
    /// Every number in a type.
    Plain(Dtype),
    /// Matrices of layers quantised, all else as stored.
    Quantised(Scheme),
}

/// The format a configuration asks for.
pub(super) fn wanted(dtype: &str) -> Result<Wanted> {
    match (dtype, Scheme::named(dtype)) {
        (_, Some(scheme)) => Ok(Wanted::Quantised(scheme)),
        ("auto", None) => Ok(Wanted::Stored),
        ("f32", None) => Ok(Wanted::Plain(Dtype::F32)),
        ("f16", None) => Ok(Wanted::Plain(Dtype::F16)),
        ("bf16", None) => Ok(Wanted::Plain(Dtype::Bf16)),
        (other, None) => Err(Error::InvalidRequest(format!(
            "dtype must be auto, f32, f16, bf16, fp8, int4 or mxfp4, got {other:?}"
        ))),
    }
}

impl Wanted {
    /// How a stored tensor will be held.
    pub(super) fn encoding(self, stored: &weights::Tensor, described: &Tensor) -> Encoding {
        let plain = !described.encoding.is_quantised();
        match self {
            // Numbers of experts, which are exact in float32 alone.
            Self::Plain(_) if matches!(stored.role, Role::TokenExperts(_)) => described.encoding,
            Self::Plain(dtype) => Codes::plain(dtype).map_or(described.encoding, Encoding::plain),
            Self::Quantised(scheme)
                if plain && stored.role.is_linear() && scheme.fits(described.cols) =>
            {
                scheme.encoding()
            }
            Self::Stored | Self::Quantised(_) => described.encoding,
        }
    }
}

/// What conversions to plain numbers lost: tensors, squared errors and squares of each kind.
#[derive(Default)]
pub(super) struct Losses(BTreeMap<String, (usize, [f64; 2])>);

impl Losses {
    /// Counts a tensor of `encoding` that became numbers of `dtype`.
    pub(super) fn add(&mut self, encoding: &Encoding, dtype: Dtype, error: [f64; 2]) {
        // That 16 bits are exact in 32 needs no line.
        if error[0] > 0.0 || encoding.is_quantised() {
            let kind = format!("of {encoding} to {}", dtype.name());
            let (count, sum) = self.0.entry(kind).or_default();
            *count += 1;
            *sum = [sum[0] + error[0], sum[1] + error[1]];
        }
    }

    /// A line a kind, for people.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> + '_ {
        self.0.iter().map(|(kind, (count, [error, norm]))| {
            let relative = relative([*error, *norm]);
            match *error > 0.0 {
                true => format!("{count} tensors {kind}: relative error {relative:.1e}"),
                false => format!("{count} tensors {kind}: exactly"),
            }
        })
    }
}

/// The relative error, of squared errors and squares.
fn relative([error, norm]: [f64; 2]) -> f64 {
    (error / norm.max(f64::MIN_POSITIVE)).sqrt()
}

/// Rewrites a tensor as numbers of `dtype`; with the squared error and the sum of squares.
/// `described` and `parts` are what there is of it.
///
/// # Errors
/// [`Error::Load`] where a number does not fit the wanted format, [`Error::OutOfMemory`],
/// [`Error::GivenUp`].
pub(super) fn convert(
    described: &Tensor,
    parts: &Parts<'_>,
    stored: &weights::Tensor,
    dtype: Dtype,
    stop: &Stop,
) -> Result<(Vec<u8>, [f64; 2])> {
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
        row_to_f32(&matrix(described, parts, lane), at, &mut row);
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
    Ok((bytes, [error, norm]))
}

/// All numbers of a tensor, in float32.
pub(super) fn numbers(described: &Tensor, stored: &weights::Tensor) -> Vec<f32> {
    let cols = described.cols as usize;
    let (parts, rows) = (stored.parts(), (described.lanes * described.rows) as usize);
    let whole = Tensor { lanes: 1, rows: rows as u32, ..*described };
    let mut all = vec![0.0; rows * cols];
    for (at, row) in all.chunks_exact_mut(cols).enumerate() {
        row_to_f32(&matrix(&whole, &parts, 0), at, row);
    }
    all
}

/// The type that a matrix has behind a merge: the one asked for, else its own.
///
/// # Errors
/// [`Error::InvalidRequest`] for a quantised one that is to stay so.
pub(super) fn merged_as(
    wanted: Wanted,
    stored: &weights::Tensor,
    described: &Tensor,
) -> Result<Dtype> {
    match (wanted, described.encoding.codes) {
        (Wanted::Plain(dtype), _) => Ok(dtype),
        (_, Codes::F32) => Ok(Dtype::F32),
        (_, Codes::F16) => Ok(Dtype::F16),
        (_, Codes::Bf16) => Ok(Dtype::Bf16),
        (_, _) => Err(Error::InvalidRequest(format!(
            "dtype must be \"f16\", \"bf16\" or \"f32\" where an adapter is merged into {}, got \
             one that leaves it as it is stored ({})",
            stored.name, described.encoding
        ))),
    }
}

/// A matrix with what an adapter adds to it, in float32, rounded once.
///
/// # Errors
/// As [`convert`].
pub(super) fn merge(
    described: &Tensor,
    stored: &weights::Tensor,
    delta: &weights::Delta,
    dtype: Dtype,
    stop: &Stop,
) -> Result<Vec<u8>> {
    let mut all = numbers(described, stored);
    delta.add_to(&mut all, stop)?;
    let mut bytes = Vec::with_capacity(all.len() * dtype.bytes());
    for value in all {
        if !push(&mut bytes, value, dtype).is_finite() {
            let wanted = format!("numbers that fit {} behind the merge", dtype.name());
            return Err(Error::tensor(&stored.path, &stored.name, wanted, format!("{value}")));
        }
    }
    Ok(bytes)
}

/// What quantising has done so far.
#[derive(Default)]
pub(super) struct Tally {
    matrices: usize,
    bytes: [u64; 2],
    error: [f64; 2],
}

impl Tally {
    /// Quantises all lanes of a tensor.
    ///
    /// # Errors
    /// [`Error::GivenUp`].
    pub(super) fn quantise(
        &mut self,
        scheme: Scheme,
        described: &Tensor,
        parts: &Parts<'_>,
        stop: &Stop,
    ) -> Result<Parts<'static>> {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for lane in 0..described.lanes as usize {
            let made = quantise(scheme, &matrix(described, parts, lane), stop)?;
            codes.extend(made.codes);
            scales.extend(made.scales);
            self.error = [self.error[0] + made.error[0], self.error[1] + made.error[1]];
        }
        self.matrices += 1;
        self.bytes[0] += described.bytes();
        self.bytes[1] += (codes.len() + scales.len()) as u64;
        let [codes, scales] = [codes, scales].map(Cow::Owned);
        Ok(Parts { codes, scales, zeros: Cow::Borrowed(&[]) })
    }

    /// A line for people, if there was anything.
    pub(super) fn note(&self, scheme: Scheme) -> Option<String> {
        let [before, after] = self.bytes.map(super::memory::human);
        let relative = relative(self.error);
        let what = format!("{} matrices to {}", self.matrices, scheme.name());
        (self.matrices > 0).then(|| {
            format!("{what}: {before} became {after}, relative error of the weights {relative:.1e}")
        })
    }
}

/// One lane of a tensor.
fn matrix<'a>(described: &Tensor, parts: &'a Parts<'_>, lane: usize) -> Matrix<'a> {
    let part = |all: &'a [u8], range: Range<u64>| &all[range.start as usize..range.end as usize];
    let lane = lane as u32;
    Matrix::described(
        described,
        part(&parts.codes, described.lane_range(lane)),
        || part(&parts.scales, described.scale_range(lane)),
        || part(&parts.zeros, described.zero_range(lane)),
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
