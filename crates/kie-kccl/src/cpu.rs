//! The collectives in plain sight: what every other algorithm is compared with.
//!
//! Invariant: sums are float32, in the order of the ranks, rounded once.

use half::{bf16, f16};

use crate::op::{Dtype, Op};

/// The outputs of all ranks. The inputs are of one length, which the operation's slices divide.
///
/// # Panics
/// Where [`Dtype::U8`] is to be added.
pub fn run(op: Op, dtype: Dtype, root: usize, inputs: &[&[u8]]) -> Vec<Vec<u8>> {
    let ranks = inputs.len();
    let slice = inputs[0].len() / op.slices_in(ranks).max(1);
    let part = |from: usize, index: usize| &inputs[from][index * slice..(index + 1) * slice];
    let sum = |index: usize| {
        let parts: Vec<_> = (0..ranks).map(|rank| part(rank, index)).collect();
        sum(dtype, &parts)
    };
    let one = |rank: usize| match op {
        Op::AllReduce => sum(0),
        Op::ReduceScatter => sum(rank),
        Op::AllGather => inputs.concat(),
        Op::Broadcast => inputs[root].to_vec(),
        Op::AllToAll => (0..ranks).flat_map(|from| part(from, rank)).copied().collect(),
        Op::Barrier => Vec::new(),
    };
    (0..ranks).map(one).collect()
}

fn sum(dtype: Dtype, parts: &[&[u8]]) -> Vec<u8> {
    let width = dtype.bytes();
    let mut out = Vec::with_capacity(parts[0].len());
    for at in (0..parts[0].len()).step_by(width) {
        let numbers = parts.iter().map(|part| decode(dtype, &part[at..at + width]));
        let total = numbers.reduce(|a, b| a + b).unwrap_or(0.0);
        match dtype {
            Dtype::F16 => out.extend(f16::from_f32(total).to_le_bytes()),
            Dtype::Bf16 => out.extend(bf16::from_f32(total).to_le_bytes()),
            Dtype::F32 => out.extend(total.to_le_bytes()),
            Dtype::U8 => unreachable!("bytes are not added: the caller's check"),
        }
    }
    out
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        Dtype::U8 => unreachable!("bytes are not added: the caller's check"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn all(op: Op, root: usize, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        run(op, Dtype::F32, root, &inputs)
    }

    #[test]
    fn every_operation_by_hand() {
        let given = [floats(&[1.0, 2.0]), floats(&[10.0, 20.0])];
        let same = |values: &[f32]| vec![floats(values); 2];
        assert_eq!(all(Op::AllReduce, 0, &given), same(&[11.0, 22.0]));
        assert_eq!(all(Op::ReduceScatter, 0, &given), [floats(&[11.0]), floats(&[22.0])]);
        assert_eq!(all(Op::AllGather, 0, &given), same(&[1.0, 2.0, 10.0, 20.0]));
        assert_eq!(all(Op::Broadcast, 1, &given), same(&[10.0, 20.0]));
        assert_eq!(all(Op::AllToAll, 0, &given), [floats(&[1.0, 10.0]), floats(&[2.0, 20.0])]);
        assert_eq!(all(Op::Barrier, 0, &given), vec![Vec::<u8>::new(); 2]);
    }

    #[test]
    fn sums_are_in_the_order_of_the_ranks() {
        let given = [floats(&[1e8]), floats(&[1.0]), floats(&[-1e8])];
        assert_eq!(all(Op::AllReduce, 0, &given)[0], floats(&[0.0]));
        let given = [floats(&[1e8]), floats(&[-1e8]), floats(&[1.0])];
        assert_eq!(all(Op::AllReduce, 0, &given)[0], floats(&[1.0]));
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once() {
        // 2048 + 1 + 1 in halves would stay 2048 if it were rounded after each addition.
        let parts: Vec<Vec<u8>> =
            [2048.0, 1.0, 1.0].iter().map(|v| f16::from_f32(*v).to_le_bytes().to_vec()).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let out = run(Op::AllReduce, Dtype::F16, 0, &parts);
        assert_eq!(out[0], f16::from_f32(2050.0).to_le_bytes());
    }
}
