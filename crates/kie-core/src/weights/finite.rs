//! Weights that are not finite are refused before anything runs. One pass over all bytes, by all
//! cores: one alone would take longer than everything else that loading does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use kie_kernels::abi::{Codes, Dtype};
use kie_kernels::device::Stop;
use kie_kernels::host::allowed_cores;

use super::tensor::Tensor;
use crate::error::{Error, Result};

/// Bytes that a core takes at a time, about.
const PIECE_BYTES: usize = 4 << 20;

/// What is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Numbers {
    /// Numbers of a type.
    Plain(Dtype),
    /// Blocks of codes: the scales among them.
    Blocks(Codes),
}

impl Numbers {
    /// Those of codes that can be something else than finite.
    fn of(codes: Codes) -> Option<Self> {
        match codes {
            Codes::F32 => Some(Self::Plain(Dtype::F32)),
            Codes::F16 => Some(Self::Plain(Dtype::F16)),
            Codes::Bf16 => Some(Self::Plain(Dtype::Bf16)),
            Codes::E4m3 => Some(Self::Plain(Dtype::F8E4m3)),
            Codes::I8 | Codes::I4 | Codes::E2m1 => None,
            Codes::Q8x0 | Codes::Q4x0 | Codes::Q4k | Codes::Q6k => Some(Self::Blocks(codes)),
        }
    }

    /// Numbers of the smallest piece, and its bytes.
    fn piece(self) -> [usize; 2] {
        match self {
            Self::Plain(dtype) => [1, dtype.bytes()],
            Self::Blocks(codes) => [codes.row().numbers as usize, codes.row().bytes as usize],
        }
    }
}

/// Bytes to look at: of which tensor, whether they are its scales, the first one's index.
type Piece<'a> = (usize, bool, usize, Numbers, &'a [u8]);

/// Refuses tensors with numbers that are not finite; `told` hears which tensor comes next.
///
/// # Errors
/// [`Error::Load`] with the first bad number's tensor and index; [`Error::GivenUp`] once `stop` is
/// set.
pub(super) fn check(tensors: &[&Tensor], told: &dyn Fn(usize), stop: &Stop) -> Result<()> {
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
            let found = (piece.0, piece.1, piece.2 + index);
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
    let Some((tensor, scale, index)) = worst.into_inner().unwrap_or_else(PoisonError::into_inner)
    else {
        return Ok(());
    };
    let tensor = tensors[tensor];
    let name = format!("{}{}", tensor.name, if scale { ", its scales" } else { "" });
    let got = format!("NaN or infinity at number {index}");
    Err(Error::tensor(&tensor.path, name, "finite numbers", got))
}

fn pieces_of<'a>((number, tensor): (usize, &&'a Tensor)) -> impl Iterator<Item = Piece<'a>> {
    let tensor: &'a Tensor = tensor;
    let cut = move |scale: bool, numbers: Numbers, bytes: &'a [u8]| {
        let [count, size] = numbers.piece();
        let each = PIECE_BYTES / size;
        let pieces = bytes.chunks(each * size).enumerate();
        pieces.map(move |(n, piece)| (number, scale, n * each * count, numbers, piece))
    };
    let codes = Numbers::of(tensor.encoding.codes);
    let codes = codes.into_iter().flat_map(move |codes| cut(false, codes, tensor.bytes()));
    let scales = tensor.scales.as_ref().map_or(&[][..], |s| s.bytes());
    codes.chain(cut(true, Numbers::Plain(tensor.encoding.scale), scales))
}

/// Index of the first number of a block with a scale that is not finite.
fn first_block_not_finite(codes: Codes, bytes: &[u8]) -> Option<usize> {
    let row = codes.row();
    let halves: &[usize] = match codes {
        Codes::Q4k => &[0, 2],
        Codes::Q6k => &[208],
        _ => &[0],
    };
    let bad = |block: &[u8]| {
        halves.iter().any(|at| first_not_finite_of(Dtype::F16, &block[*at..at + 2]).is_some())
    };
    let block = bytes.chunks_exact(row.bytes as usize).position(bad)?;
    Some(block * row.numbers as usize)
}

/// Index of the first number that is not finite, or of the first of a block whose scale is not.
pub(super) fn first_not_finite(numbers: Numbers, bytes: &[u8]) -> Option<usize> {
    match numbers {
        Numbers::Plain(dtype) => first_not_finite_of(dtype, bytes),
        Numbers::Blocks(codes) => first_block_not_finite(codes, bytes),
    }
}

/// Index of the first number whose exponent is all ones (FP8: whose bits mean NaN).
fn first_not_finite_of(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
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
