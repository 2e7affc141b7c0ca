//! One key head's part of the gated delta rule, position by position, in float32.

use super::ops;
use crate::abi::DeltaHeads;
use crate::simd::{dispatch, Kernel, Level, Vector};

/// As in the reference: no head is divided by 0.
const LENGTH_EPS: f32 = 1e-6;

/// What a member works on.
#[derive(Default)]
pub(super) struct Scratch {
    /// Channels behind the convolution: q, k and v.
    mixed: Vec<f32>,
    ones: Vec<f32>,
    /// z of a value head.
    gate: Vec<f32>,
}

impl Scratch {
    pub fn with_capacity(heads: DeltaHeads) -> Self {
        let channels = heads.channels() as usize;
        Self {
            mixed: vec![0.0; channels],
            ones: vec![1.0; channels],
            gate: vec![0.0; heads.value_dim as usize],
        }
    }
}

/// What a step says of one key head.
pub(super) struct Rule<'a> {
    pub heads: DeltaHeads,
    /// Key head, over all lanes.
    pub head: usize,
    /// What [`arranged`] made of the taps.
    pub taps: &'a [f32],
    /// As in [`crate::abi::DeltaRule`].
    pub decay: &'a [f32],
    pub bias: &'a [f32],
    pub norm: &'a [f32],
    pub eps: f32,
    pub level: Level,
}

/// Taps by key head, and there tap by tap, of those that stand channel by channel: all of q, then
/// of k, then of v.
pub(super) fn arranged(conv: &[f32], h: DeltaHeads) -> Box<[f32]> {
    let (key, value) = (h.key_dim as usize, (h.shared() * h.value_dim) as usize);
    let (channels, taps) = (h.channels() as usize, h.taps as usize);
    let heads = conv.len() / (channels * taps);
    let row_of = |head: usize, channel: usize| match channel {
        q if q < key => head * key + q,
        k if k < 2 * key => (heads + head) * key + k - key,
        v => 2 * heads * key + head * value + v - 2 * key,
    };
    let mut out = Vec::with_capacity(conv.len());
    for head in 0..heads {
        for tap in 0..taps {
            out.extend((0..channels).map(|channel| conv[row_of(head, channel) * taps + tap]));
        }
    }
    out.into()
}

impl Rule<'_> {
    /// One position: `row` is the head's of [`crate::abi::DeltaIn`]'s first output, `gates` of its
    /// second; `state` moves on, and `out` gets the outputs of its value heads.
    pub fn step(
        &self,
        row: &[f32],
        gates: &[f32],
        state: &mut [f32],
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let h = self.heads;
        let (key_dim, value_dim) = (h.key_dim as usize, h.value_dim as usize);
        let (channels, shared) = (h.channels() as usize, h.shared() as usize);
        let (x, z) = row.split_at(channels);
        let (before, matrices) = state.split_at_mut(channels * (h.taps as usize - 1));
        let Scratch { mixed, ones, gate } = scratch;
        let taps = channels * h.taps as usize;
        convolve(&self.taps[self.head * taps..][..taps], before, x, mixed);
        ops::silu_mul(self.level, mixed, ones);
        let (q, rest) = mixed.split_at_mut(key_dim);
        let (k, v) = rest.split_at_mut(key_dim);
        self.to_length(q, 1.0 / (key_dim as f32).sqrt());
        self.to_length(k, 1.0);
        let (b, a) = gates.split_at(shared);
        let values = out.chunks_exact_mut(value_dim).zip(z.chunks_exact(value_dim));
        let matrices = matrices.chunks_exact_mut(key_dim * value_dim);
        let inputs = v.chunks_exact(value_dim).zip(b.iter().zip(a));
        for (n, (((out, z), s), (v, (b, a)))) in values.zip(matrices).zip(inputs).enumerate() {
            let at = self.head * shared + n;
            let keep = (-self.decay[at].exp() * ops::softplus(a + self.bias[at])).exp();
            let beta = 1.0 / (1.0 + (-b).exp());
            dispatch(self.level, Update { s, q, k, v, keep, beta, out });
            let factor = 1.0 / (ops::mean_square(self.level, out) + self.eps).sqrt();
            out.iter_mut().zip(self.norm).for_each(|(o, scale)| *o = scale * (*o * factor));
            gate.copy_from_slice(z);
            ops::silu_mul(self.level, gate, out);
            out.copy_from_slice(gate);
        }
    }

    /// Divides a head by its length, times `factor`.
    fn to_length(&self, x: &mut [f32], factor: f32) {
        let square = ops::mean_square(self.level, x) * x.len() as f32;
        let factor = factor / (square + LENGTH_EPS).sqrt();
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The convolution at one position; `before`, the last inputs, oldest first, moves on by it.
fn convolve(taps: &[f32], before: &mut [f32], x: &[f32], out: &mut [f32]) {
    let channels = x.len();
    let (old, own) = taps.split_at(before.len());
    out.iter_mut().zip(x).zip(own).for_each(|((y, x), w)| *y = w * x);
    for (before, w) in before.chunks_exact(channels).zip(old.chunks_exact(channels)) {
        out.iter_mut().zip(before).zip(w).for_each(|((y, x), w)| *y += w * x);
    }
    before.copy_within(channels.., 0);
    let last = before.len() - channels;
    before[last..].copy_from_slice(x);
}

/// `S = keep S`, `S += k (beta (v - Sᵀ k))ᵀ`, `out = Sᵀ q`; S is `[key_dim, value_dim]`.
struct Update<'a> {
    s: &'a mut [f32],
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    keep: f32,
    beta: f32,
    out: &'a mut [f32],
}

impl Kernel for Update<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let width = self.v.len();
        assert!(self.out.len() == width && self.s.len() == width * self.k.len(), "S and its sides");
        let mut first = 0;
        while first + SIDE_BY_SIDE * V::LANES <= width {
            // SAFETY: the caller has V's level; so many columns are there.
            unsafe { self.columns::<V, SIDE_BY_SIDE>(first, SIDE_BY_SIDE * V::LANES) };
            first += SIDE_BY_SIDE * V::LANES;
        }
        while first < width {
            let len = V::LANES.min(width - first);
            // SAFETY: as above.
            unsafe { self.columns::<V, 1>(first, len) };
            first += len;
        }
    }
}

/// Vectors of columns whose sums, a row behind the other, hide each other's latency.
const SIDE_BY_SIDE: usize = 4;

impl Update<'_> {
    /// `len` columns from `first` on: `N` vectors, of which one alone may be a part.
    ///
    /// # Safety
    /// The processor has V's level.
    #[inline(always)]
    unsafe fn columns<V: Vector, const N: usize>(&mut self, first: usize, len: usize) {
        assert!(len == N * V::LANES || N == 1 && len < V::LANES, "{len} columns");
        let width = self.v.len();
        let at = |n: usize| n * V::LANES..(n * V::LANES + V::LANES).min(len);
        // SAFETY: the assertion: where there are several vectors, all are whole.
        let load = |from: &[f32]| unsafe {
            if N > 1 {
                V::load(from.as_ptr())
            } else {
                V::load_part(from.as_ptr(), len)
            }
        };
        // SAFETY: as the loads.
        let store = |x: V, to: &mut [f32]| unsafe {
            if N > 1 {
                x.store(to.as_mut_ptr());
            } else {
                x.store_part(to.as_mut_ptr(), len);
            }
        };
        // SAFETY: the caller has V's level.
        let [zero, keep, beta] = unsafe { [0.0, self.keep, self.beta].map(|x| V::splat(x)) };
        let mut recalled = [zero; N];
        for (row, k) in self.s.chunks_exact(width).zip(self.k) {
            let row = &row[first..first + len];
            // SAFETY: the caller has V's level.
            let k = unsafe { V::splat(*k) };
            for (n, recalled) in recalled.iter_mut().enumerate() {
                *recalled = load(&row[at(n)]).fma(k, *recalled);
            }
        }
        let mut change = recalled;
        for (n, change) in change.iter_mut().enumerate() {
            let recalled = change.mul(keep);
            *change = load(&self.v[first..first + len][at(n)]).sub(recalled).mul(beta);
        }
        let mut output = [zero; N];
        for (row, (k, q)) in self.s.chunks_exact_mut(width).zip(self.k.iter().zip(self.q)) {
            let row = &mut row[first..first + len];
            // SAFETY: the caller has V's level.
            let [k, q] = unsafe { [*k, *q].map(|x| V::splat(x)) };
            for (n, output) in output.iter_mut().enumerate() {
                let x = change[n].fma(k, load(&row[at(n)]).mul(keep));
                store(x, &mut row[at(n)]);
                *output = x.fma(q, *output);
            }
        }
        for (n, output) in output.into_iter().enumerate() {
            store(output, &mut self.out[first..first + len][at(n)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd;

    /// The definition, in float64: positions of one key head with two value heads.
    fn reference(
        rule: &Rule<'_>,
        conv: &[f32],
        rows: &[Vec<f32>],
        gates: &[Vec<f32>],
    ) -> Vec<Vec<f64>> {
        let h = rule.heads;
        let (dk, dv, shared) = (h.key_dim as usize, h.value_dim as usize, h.shared() as usize);
        let (channels, taps) = (h.channels() as usize, h.taps as usize);
        let (head, heads) = (rule.head, 2);
        let row_of = |c: usize| match c {
            c if c < dk => head * dk + c,
            c if c < 2 * dk => heads * dk + head * dk + c - dk,
            c => 2 * heads * dk + head * shared * dv + c - 2 * dk,
        };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let mut s = vec![vec![0.0_f64; dk * dv]; shared];
        let mut all = Vec::new();
        for (t, row) in rows.iter().enumerate() {
            let mix = |c: usize| {
                let past =
                    (0..taps).filter_map(|tap| Some((tap, (t + tap + 1).checked_sub(taps)?)));
                let weight = |tap: usize| f64::from(conv[row_of(c) * taps + tap]);
                silu(past.map(|(tap, at)| weight(tap) * f64::from(rows[at][c])).sum())
            };
            let mixed: Vec<f64> = (0..channels).map(mix).collect();
            let length = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            let (q, k) = (&mixed[..dk], &mixed[dk..2 * dk]);
            let (lq, lk) = (length(q) * (dk as f64).sqrt(), length(k));
            let mut out = Vec::new();
            for (n, s) in s.iter_mut().enumerate() {
                let at = head * shared + n;
                let [decay, bias] = [rule.decay[at], rule.bias[at]].map(f64::from);
                let [b, a] = [gates[t][n], gates[t][shared + n]].map(f64::from);
                let keep = (-decay.exp() * (a + bias).exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-b).exp());
                s.iter_mut().for_each(|x| *x *= keep);
                let v = &mixed[2 * dk + n * dv..][..dv];
                let recall = |c: usize| (0..dk).map(|r| s[r * dv + c] * k[r] / lk).sum::<f64>();
                let change: Vec<f64> = (0..dv).map(|c| beta * (v[c] - recall(c))).collect();
                for r in 0..dk {
                    (0..dv).for_each(|c| s[r * dv + c] += k[r] / lk * change[c]);
                }
                let o = (0..dv).map(|c| (0..dk).map(|r| s[r * dv + c] * q[r] / lq).sum::<f64>());
                let o: Vec<f64> = o.collect();
                let mean = o.iter().map(|x| x * x).sum::<f64>() / dv as f64;
                let rms = (mean + f64::from(rule.eps)).sqrt();
                let z = &row[channels + n * dv..][..dv];
                out.extend(
                    (0..dv).map(|c| o[c] / rms * f64::from(rule.norm[c]) * silu(f64::from(z[c]))),
                );
            }
            all.push(out);
        }
        all
    }

    #[test]
    fn every_level_is_the_definition() {
        for value_dim in [19, 84] {
            definition(DeltaHeads { keys: 1, values: 2, key_dim: 6, value_dim, taps: 4 });
        }
    }

    fn definition(heads: DeltaHeads) {
        let mut state = 1_u32;
        let mut draw = |count: u32| -> Vec<f32> {
            let mut one = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            (0..count).map(|_| one()).collect()
        };
        // The second of two key heads.
        let conv = draw(2 * heads.channels() * heads.taps);
        let (decay, bias, norm) = (draw(4), draw(4), draw(heads.value_dim));
        let rows: Vec<_> = (0..9).map(|_| draw(heads.rows())).collect();
        let gates: Vec<_> = (0..9).map(|_| draw(2 * heads.shared())).collect();
        for level in simd::available() {
            let taps = &arranged(&conv, heads)[..];
            let (decay, bias, norm) = (&decay[..], &bias[..], &norm[..]);
            let rule = Rule { heads, head: 1, taps, decay, bias, norm, eps: 1e-6, level };
            let mut scratch = Scratch::with_capacity(heads);
            let mut state = vec![0.0; heads.kept() as usize];
            let mut out = vec![0.0; heads.value_width() as usize];
            let wanted = reference(&rule, &conv, &rows, &gates);
            for ((row, gates), wanted) in rows.iter().zip(&gates).zip(wanted) {
                rule.step(row, gates, &mut state, &mut out, &mut scratch);
                for (out, wanted) in out.iter().zip(wanted) {
                    let error = (f64::from(*out) - wanted).abs();
                    assert!(error <= 2e-5 * (1.0 + wanted.abs()), "{level:?} {out} {wanted}");
                }
            }
        }
    }
}
