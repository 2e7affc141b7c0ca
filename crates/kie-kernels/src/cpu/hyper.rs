//! Numbers that residual streams are mixed by, of one column, in float32.

use super::ops::sigmoid;
use crate::abi::{HyperIn, HyperJoin};

/// Makes what is taken of each stream of `f`, in place of its first numbers; with `mix`, how an
/// output joins: what each stream gets of it, then what of each stream row by row.
pub(super) fn mixes(
    step: &HyperIn,
    [scale, base]: [&[f32]; 2],
    f: &mut [f32],
    mix: Option<(HyperJoin, &mut [f32])>,
) {
    let n = step.streams as usize;
    let place = |at: usize| if at < 2 * n { at / n } else { 2 };
    f.iter_mut()
        .zip(base)
        .enumerate()
        .for_each(|(at, (f, base))| *f = *f * scale[place(at)] + base);
    let (pre, rest) = f.split_at_mut(n);
    pre.iter_mut().for_each(|x| *x = sigmoid(*x) + step.eps);
    let Some((join, mix)) = mix else { return };
    let (post, comb) = mix.split_at_mut(n);
    post.iter_mut().zip(&*rest).for_each(|(post, x)| *post = 2.0 * sigmoid(*x));
    comb.copy_from_slice(&rest[n..]);
    for row in comb.chunks_exact_mut(n) {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|x| *x = (*x - top).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + step.eps);
    }
    columns(comb, n, step.eps);
    for _ in 1..join.rounds {
        for row in comb.chunks_exact_mut(n) {
            let sum = row.iter().sum::<f32>() + step.eps;
            row.iter_mut().for_each(|x| *x /= sum);
        }
        columns(comb, n, step.eps);
    }
}

/// Divides each column by its sum.
fn columns(comb: &mut [f32], n: usize, eps: f32) {
    for col in 0..n {
        let sum = comb.iter().skip(col).step_by(n).sum::<f32>() + eps;
        comb.iter_mut().skip(col).step_by(n).for_each(|x| *x /= sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_mixed_by_rows_and_columns_that_sum_to_one() {
        let join = HyperJoin { rounds: 20, mix: 0, sum: 0 };
        let step = HyperIn {
            weight: 0,
            scale: 0,
            base: 0,
            streams: 3,
            eps: 1e-6,
            input: 0,
            output: 0,
            join: Some(join),
            partition: 0,
        };
        let mut f: Vec<f32> = (0..15).map(|n| (n as f32 * 0.7).sin()).collect();
        let before = f.clone();
        let base: Vec<f32> = (0..15).map(|n| 0.1 * n as f32 - 0.5).collect();
        let scale = [0.5, 2.0, 3.0];
        let mut mix = [0.0; 12];
        mixes(&step, [&scale, &base], &mut f, Some((join, &mut mix)));
        for n in 0..3 {
            let pre = sigmoid(0.5 * before[n] + base[n]) + 1e-6;
            let post = 2.0 * sigmoid(2.0 * before[3 + n] + base[3 + n]);
            assert!((f[n] - pre).abs() < 1e-6 && (mix[n] - post).abs() < 1e-6);
            let row: f32 = mix[3 + 3 * n..6 + 3 * n].iter().sum();
            let column: f32 = (0..3).map(|i| mix[3 + 3 * i + n]).sum();
            assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-5, "{row} {column}");
        }
        // One round leaves rows as they are.
        let rough = HyperJoin { rounds: 1, ..join };
        let (mut f, mut other) = (before, [0.0; 12]);
        mixes(&step, [&scale, &base], &mut f, Some((rough, &mut other)));
        let row: f32 = other[3..6].iter().sum();
        assert!((row - 1.0).abs() > 1e-2, "{row}");
    }
}
