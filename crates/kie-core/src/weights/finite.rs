//! Weights that are not finite are refused before anything runs. One pass over all bytes, by all
//! cores: one alone would take longer than everything else that loading does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kie_kernels::abi::{Codes, Dtype};
use kie_kernels::cpu::allowed_cores;
use kie_kernels::device::Stop;

use super::{Checkpoint, Tensor};
use crate::error::{Error, Result};

/// Bytes that a core takes at a time: whole numbers of every format.
const PIECE_BYTES: usize = 4 << 20;

/// Bytes to look at: of which tensor, whether they are its scales, which piece.
type Piece<'a> = (usize, bool, usize, Dtype, &'a [u8]);

impl Checkpoint {
    /// Refuses a tensor with numbers that are not finite.
    ///
    /// # Errors
    /// As [`Checkpoint::check_all_finite`].
    pub fn check_finite(&self, tensor: &Tensor) -> Result<()> {
        self.check_all_finite(&[tensor], &|_| {}, &Stop::default())
    }

    /// Refuses numbers that are not finite; `told` hears which tensor comes next.
    ///
    /// # Errors
    /// [`Error::Load`] with the first bad number's tensor and index; [`Error::Interrupted`] once
    /// `stop` is set.
    pub fn check_all_finite(
        &self,
        tensors: &[&Tensor],
        told: &dyn Fn(usize),
        stop: &Stop,
    ) -> Result<()> {
        let pieces: Vec<Piece<'_>> = tensors.iter().enumerate().flat_map(pieces_of).collect();
        let next = AtomicUsize::new(0);
        let worst = Mutex::new(None);
        let work = |told: &dyn Fn(usize)| {
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                told(piece.0);
                if stop.is_set() {
                    return;
                }
                let Some(index) = first_not_finite(piece.3, piece.4) else { continue };
                // Earlier pieces are taken already; none behind this one matters.
                next.fetch_max(pieces.len(), Ordering::Relaxed);
                let mut worst = worst.lock().unwrap_or_else(PoisonError::into_inner);
                let found = (piece.0, piece.1, piece.2 * PIECE_BYTES / piece.3.bytes() + index);
                let first = worst.is_none_or(|other| found < other);
                *worst = if first { Some(found) } else { *worst };
            }
        };
        std::thread::scope(|scope| {
            let others = allowed_cores().min(pieces.len()).saturating_sub(1);
            for _ in 0..others {
                // With fewer threads it takes longer.
                let quiet = || work(&|_| {});
                if std::thread::Builder::new().spawn_scoped(scope, quiet).is_err() {
                    break;
                }
            }
            work(told);
        });
        stop.check()?;
        let Some((tensor, scale, index)) =
            worst.into_inner().unwrap_or_else(PoisonError::into_inner)
        else {
            return Ok(());
        };
        let tensor = tensors[tensor];
        let name = format!("{}{}", tensor.name, if scale { "_scale_inv" } else { "" });
        let got = format!("NaN or infinity at number {index}");
        Err(Error::tensor(&tensor.path, name, "finite numbers", got))
    }
}

fn pieces_of<'a>((number, tensor): (usize, &&'a Tensor)) -> impl Iterator<Item = Piece<'a>> {
    let cut = move |scale: bool, dtype: Dtype, bytes: &'a [u8]| {
        let pieces = bytes.chunks(PIECE_BYTES).enumerate();
        pieces.map(move |(n, piece)| (number, scale, n, dtype, piece))
    };
    let scales = tensor.scales.as_ref().map_or(&[][..], |s| s.bytes());
    let codes = match tensor.encoding.codes {
        Codes::F32 => Dtype::F32,
        Codes::F16 => Dtype::F16,
        Codes::Bf16 => Dtype::Bf16,
        Codes::E4m3 => Dtype::F8E4m3,
    };
    cut(false, codes, tensor.bytes()).chain(cut(true, tensor.encoding.scale, scales))
}

/// Index of the first number whose exponent is all ones (FP8: whose bits mean NaN).
pub(super) fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    fn find<const N: usize>(bytes: &[u8], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
        const NUMBERS: usize = 4096;
        let (numbers, _) = bytes.as_chunks::<N>();
        // Without an early exit inside a block the compiler uses vectors; the place matters once.
        let dirty = |block: &[[u8; N]]| block.iter().fold(false, |any, b| any | bad(*b));
        let block = numbers.chunks(NUMBERS).position(dirty)?;
        let at = numbers[block * NUMBERS..].iter().position(|b| bad(*b))?;
        Some(block * NUMBERS + at)
    }
    match dtype {
        Dtype::F32 => find(bytes, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
        Dtype::F16 => find(bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
        Dtype::Bf16 => find(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
        Dtype::F8E4m3 => find(bytes, |[b]| b & 0x7f == 0x7f),
        Dtype::F8E8m0 => find(bytes, |[b]| b == 0xff),
    }
}
