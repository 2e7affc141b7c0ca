//! Softmax attention over pages of 64 positions, for query heads that share a kv head.
//!
//! `out = sum over p in span of softmax(scale * q . k[p]) * v[p]`, float32 throughout, one page at
//! a time with a running maximum. Invariants: pages are cut at absolute positions, so the bits of a
//! query's output depend on the level, the query, its span and its keys and values only, whatever
//! other queries go along; positions outside the span are never part of a sum, not even times
//! zero; a NaN anywhere in the span makes the output NaN.
//!
//! [`attend`] reads each key and value once for one position's heads. [`attend_chunk`] turns each
//! page's keys once for many positions; its sums have another order than those of [`attend`].

#![allow(clippy::needless_range_loop)]

use std::ops::RangeInclusive;

use super::codes::{part, Weight, F16, F32};
use crate::abi::{Dtype, PAGE};
use crate::field::Columns;
use crate::simd::{dispatch, Kernel, Level, Vector};

/// 64 positions of one kv head.
#[derive(Debug, Clone, Copy)]
pub struct KvPage<'a> {
    /// Keys, `[64][head_dim]`, any alignment.
    pub k: &'a [u8],
    /// Values, `[64][head_dim]`, any alignment.
    pub v: &'a [u8],
}

/// Working memory of one thread, reused; it grows to the largest call.
#[derive(Default)]
pub struct Scratch {
    /// Scores, then weights, `[head][64]`.
    scores: Vec<f32>,
    /// Running maximum and sum of weights of each query head.
    state: Vec<[f32; 2]>,
    /// One page's keys as `[head_dim][64]`, then its values as `[64][head_dim]`.
    page: Vec<f32>,
}

impl Scratch {
    /// Room for `positions` queries of `heads` heads each, so that no call allocates.
    pub fn with_capacity(heads: usize, head_dim: usize, positions: usize) -> Self {
        Self {
            scores: Vec::with_capacity(heads * PAGE),
            state: Vec::with_capacity(heads * positions),
            page: Vec::with_capacity(2 * head_dim * PAGE),
        }
    }

    fn prepare(&mut self, heads: usize, positions: usize, page: usize, sinks: Option<&[f32]>) {
        self.scores.clear();
        self.scores.resize(heads * PAGE, 0.0);
        self.state.clear();
        self.state.resize(heads * positions, [f32::NEG_INFINITY, 0.0]);
        if let Some(sinks) = sinks {
            // A sink is a score that was seen already.
            let all =
                self.state.chunks_exact_mut(heads).flat_map(|state| state.iter_mut().zip(sinks));
            all.for_each(|(state, sink)| *state = [*sink, 1.0]);
        }
        self.page.resize(page, 0.0);
    }
}

/// Positions of page `page` that lie in `span`, counted from the page's start.
fn within(page: usize, span: &RangeInclusive<usize>) -> std::ops::Range<usize> {
    let start = (*span.start()).max(page * PAGE);
    let end = (span.end() + 1).min((page + 1) * PAGE);
    start.saturating_sub(page * PAGE)..end.saturating_sub(page * PAGE)
}

/// One position: `q` and `out` are `[heads][head_dim]`, `span` the positions it sees, counted from
/// the start of page 0; `page(i)` gives the i-th page. Each head's sink, where there are some, is a
/// score whose value is 0.
///
/// # Panics
/// When `kv_dtype` is neither F32 nor F16, a page is too short, or the machine lacks `level`.
#[allow(clippy::too_many_arguments)]
pub fn attend<'a>(
    level: Level,
    kv_dtype: Dtype,
    head_dim: usize,
    q: &[f32],
    page: impl Fn(usize) -> KvPage<'a>,
    span: RangeInclusive<usize>,
    scale: f32,
    sinks: Option<&[f32]>,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let heads = q.len() / head_dim;
    assert!(q.len() == heads * head_dim && out.len() == q.len(), "q and out [heads][head_dim]");
    scratch.prepare(heads, 1, 0, sinks);
    out.fill(0.0);
    for index in span.start() / PAGE..=span.end() / PAGE {
        let page = page(index);
        check(&page, head_dim, kv_dtype);
        let live = within(index, &span);
        let Scratch { scores, state, .. } = scratch;
        dispatch(
            level,
            One { dtype: kv_dtype, head_dim, q, page, live, scale, out, scores, state },
        );
    }
    finish(out, head_dim, &scratch.state);
}

/// Many positions: position `i` has its heads at `q[i * q_stride..]` and in piece `i` of `out`,
/// `[heads][head_dim]` each, and sees `spans[i]`.
///
/// # Panics
/// As [`attend`].
#[allow(clippy::too_many_arguments)]
pub fn attend_chunk<'a>(
    level: Level,
    kv_dtype: Dtype,
    head_dim: usize,
    heads: usize,
    q: &[f32],
    q_stride: usize,
    page: impl Fn(usize) -> KvPage<'a>,
    spans: &[RangeInclusive<usize>],
    scale: f32,
    sinks: Option<&[f32]>,
    mut out: Columns<'_, f32>,
    scratch: &mut Scratch,
) {
    let width = heads * head_dim;
    let (Some(first), Some(last)) =
        (spans.iter().map(|s| *s.start()).min(), spans.iter().map(|s| *s.end()).max())
    else {
        return;
    };
    scratch.prepare(heads, spans.len(), 2 * head_dim * PAGE, sinks);
    for i in 0..spans.len() {
        out.piece(i).fill(0.0);
    }
    for index in first / PAGE..=last / PAGE {
        let page = page(index);
        check(&page, head_dim, kv_dtype);
        dispatch(level, Turn { dtype: kv_dtype, head_dim, page, to: &mut scratch.page });
        for (i, span) in spans.iter().enumerate() {
            let live = within(index, span);
            if live.is_empty() {
                continue;
            }
            let q = &q[i * q_stride..][..width];
            let out = out.piece(i);
            let state = &mut scratch.state[i * heads..(i + 1) * heads];
            let (page, scores) = (&scratch.page, &mut scratch.scores);
            dispatch(level, Turned { head_dim, q, page, live, scale, out, scores, state });
        }
    }
    for (i, state) in scratch.state.chunks_exact(heads).enumerate() {
        finish(out.piece(i), head_dim, state);
    }
}

fn check(page: &KvPage<'_>, head_dim: usize, dtype: Dtype) {
    assert!(matches!(dtype, Dtype::F32 | Dtype::F16), "KV pages are F32 or F16");
    let bytes = PAGE * head_dim * dtype.bytes();
    assert!(page.k.len() >= bytes && page.v.len() >= bytes, "a KV page of {bytes} bytes");
}

/// Divides by the sums of weights.
fn finish(out: &mut [f32], head_dim: usize, state: &[[f32; 2]]) {
    for (out, [_, sum]) in out.chunks_exact_mut(head_dim).zip(state) {
        let factor = 1.0 / sum;
        out.iter_mut().for_each(|x| *x *= factor);
    }
}

/// One page for the heads of one position.
struct One<'a> {
    dtype: Dtype,
    head_dim: usize,
    q: &'a [f32],
    page: KvPage<'a>,
    live: std::ops::Range<usize>,
    scale: f32,
    out: &'a mut [f32],
    scores: &'a mut [f32],
    state: &'a mut [[f32; 2]],
}

impl Kernel for One<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller has V's level; `attend` checked the slices.
        unsafe {
            match self.dtype {
                Dtype::F32 => self.page::<V, F32>(),
                Dtype::F16 | Dtype::Bf16 | Dtype::F8E4m3 | Dtype::F8E8m0 => self.page::<V, F16>(),
            }
        }
    }
}

impl One<'_> {
    /// Safety: V's level; the slices were checked.
    #[inline(always)]
    unsafe fn page<V: Vector, W: Weight>(self) {
        let (hd, heads) = (self.head_dim, self.state.len());
        let keys = self.page.k.as_ptr();
        for p in self.live.clone() {
            let mut h = 0;
            while h < heads {
                // SAFETY: position and heads exist; the caller's promise otherwise.
                unsafe {
                    let key = keys.add(p * hd * W::BYTES);
                    let q = self.q.as_ptr().add(h * hd);
                    if heads - h >= 4 {
                        let dots = dots::<V, W, 4>(key, q, hd);
                        for (i, dot) in dots.into_iter().enumerate() {
                            self.scores[(h + i) * PAGE + p] = dot * self.scale;
                        }
                        h += 4;
                    } else {
                        let [dot] = dots::<V, W, 1>(key, q, hd);
                        self.scores[h * PAGE + p] = dot * self.scale;
                        h += 1;
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe {
            weigh::<V>(self.scores, self.state, self.out, &self.live);
            values::<V, W>(self.scores, self.page.v.as_ptr(), self.out, hd, self.live);
        }
    }
}

/// Products of one key with `H` heads. Safety: V's level; `hd` numbers of each.
#[inline(always)]
unsafe fn dots<V: Vector, W: Weight, const H: usize>(
    key: *const u8,
    q: *const f32,
    hd: usize,
) -> [f32; H] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [V::splat(0.0); H];
        let mut d = 0;
        while d < hd {
            let len = V::LANES.min(hd - d);
            let key = part::<V, W>(key.add(d * W::BYTES), len);
            for h in 0..H {
                acc[h] = key.fma(V::load_part(q.add(h * hd + d), len), acc[h]);
            }
            d += len;
        }
        let mut sums = [0.0; H];
        for h in 0..H {
            sums[h] = acc[h].sum();
        }
        sums
    }
}

/// Turns the live scores of each head into weights, zeros elsewhere; brings maximum, sum and
/// output up to date. Safety: V's level.
#[inline(always)]
unsafe fn weigh<V: Vector>(
    scores: &mut [f32],
    state: &mut [[f32; 2]],
    out: &mut [f32],
    live: &std::ops::Range<usize>,
) {
    let hd = out.len() / state.len();
    for (h, [max, sum]) in state.iter_mut().enumerate() {
        let scores = &mut scores[h * PAGE..(h + 1) * PAGE];
        scores[..live.start].fill(f32::NEG_INFINITY);
        scores[live.end..].fill(f32::NEG_INFINITY);
        let mut top = *max;
        for score in scores.iter() {
            // A NaN score is passed over here and shows in the sum.
            top = if *score > top { *score } else { top };
        }
        // SAFETY: the caller has the level; PAGE is a multiple of LANES.
        let added = unsafe {
            let limit = V::splat(top);
            let mut added = V::splat(0.0);
            for at in (0..PAGE).step_by(V::LANES) {
                let at = scores.as_mut_ptr().add(at);
                let weight = V::load(at).sub(limit).exp();
                weight.store(at);
                added = added.add(weight);
            }
            added.sum()
        };
        let keep = if *max == f32::NEG_INFINITY { 0.0 } else { (*max - top).exp() };
        (*max, *sum) = (top, *sum * keep + added);
        if keep != 1.0 {
            out[h * hd..(h + 1) * hd].iter_mut().for_each(|x| *x *= keep);
        }
    }
}

/// Adds the live positions' values, times their weights, to each head's output. Safety: V's
/// level; `values` has PAGE rows of `hd` numbers.
#[inline(always)]
unsafe fn values<V: Vector, W: Weight>(
    weights: &[f32],
    values: *const u8,
    out: &mut [f32],
    hd: usize,
    live: std::ops::Range<usize>,
) {
    let heads = out.len() / hd;
    let mut h = 0;
    while h < heads {
        let count = if heads - h >= 4 { 4 } else { 1 };
        let mut d = 0;
        while d < hd {
            let len = V::LANES.min(hd - d);
            let live = live.clone();
            // SAFETY: heads and dims exist; the caller's promise otherwise.
            unsafe {
                let weights = weights.as_ptr().add(h * PAGE);
                let values = values.add(d * W::BYTES);
                let out = out.as_mut_ptr().add(h * hd + d);
                let two = hd - d >= 2 * V::LANES;
                if two && count == 4 {
                    mix::<V, W, 4, 2>(weights, values, out, hd, V::LANES, live);
                } else if two {
                    mix::<V, W, 1, 2>(weights, values, out, hd, V::LANES, live);
                } else if count == 4 {
                    mix::<V, W, 4, 1>(weights, values, out, hd, len, live);
                } else {
                    mix::<V, W, 1, 1>(weights, values, out, hd, len, live);
                }
                d += if two { 2 * V::LANES } else { len };
            }
        }
        h += count;
    }
}

/// `H` heads x `D` vectors of `values`; the last vector has `len` lanes. Safety: as `values`.
#[inline(always)]
unsafe fn mix<V: Vector, W: Weight, const H: usize, const D: usize>(
    weights: *const f32,
    values: *const u8,
    out: *mut f32,
    hd: usize,
    len: usize,
    live: std::ops::Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); D]; H];
        for h in 0..H {
            for d in 0..D {
                acc[h][d] = V::load_part(out.add(h * hd + d * V::LANES), len);
            }
        }
        for p in live {
            let mut value = [V::splat(0.0); D];
            for d in 0..D {
                value[d] = part::<V, W>(values.add((p * hd + d * V::LANES) * W::BYTES), len);
            }
            for h in 0..H {
                let weight = V::splat(*weights.add(h * PAGE + p));
                for d in 0..D {
                    acc[h][d] = weight.fma(value[d], acc[h][d]);
                }
            }
        }
        for h in 0..H {
            for d in 0..D {
                acc[h][d].store_part(out.add(h * hd + d * V::LANES), len);
            }
        }
    }
}

/// Brings a page into the layout of [`Scratch::page`].
struct Turn<'a> {
    dtype: Dtype,
    head_dim: usize,
    page: KvPage<'a>,
    to: &'a mut [f32],
}

impl Kernel for Turn<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller has V's level; `attend_chunk` checked the slices.
        unsafe {
            match self.dtype {
                Dtype::F32 => self.turn::<V, F32>(),
                Dtype::F16 | Dtype::Bf16 | Dtype::F8E4m3 | Dtype::F8E8m0 => self.turn::<V, F16>(),
            }
        }
    }
}

impl Turn<'_> {
    /// Safety: V's level; the slices were checked.
    #[inline(always)]
    unsafe fn turn<V: Vector, W: Weight>(self) {
        let hd = self.head_dim;
        let (keys, values) = self.to.split_at_mut(hd * PAGE);
        let mut lanes = [[0f32; 16]; 16];
        let mut d = 0;
        while d < hd {
            let len = V::LANES.min(hd - d);
            for first in (0..PAGE).step_by(16) {
                for (p, lanes) in lanes.iter_mut().enumerate() {
                    let at = ((first + p) * hd + d) * W::BYTES;
                    // SAFETY: `len` numbers of an existing position; lanes hold a vector.
                    unsafe {
                        let key = part::<V, W>(self.page.k.as_ptr().add(at), len);
                        key.store(lanes.as_mut_ptr());
                        let value = part::<V, W>(self.page.v.as_ptr().add(at), len);
                        value.store_part(values.as_mut_ptr().add((first + p) * hd + d), len);
                    }
                }
                for i in 0..len {
                    for p in 0..16 {
                        keys[(d + i) * PAGE + first + p] = lanes[p][i];
                    }
                }
            }
            d += len;
        }
    }
}

/// One turned page for the heads of one of many positions.
struct Turned<'a> {
    head_dim: usize,
    q: &'a [f32],
    page: &'a [f32],
    live: std::ops::Range<usize>,
    scale: f32,
    out: &'a mut [f32],
    scores: &'a mut [f32],
    state: &'a mut [[f32; 2]],
}

impl Kernel for Turned<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let (hd, heads) = (self.head_dim, self.state.len());
        let (keys, page_values) = self.page.split_at(hd * PAGE);
        let mut h = 0;
        while h < heads {
            // SAFETY: the caller has V's level; heads and dims exist.
            unsafe {
                let q = self.q.as_ptr().add(h * hd);
                let to = self.scores.as_mut_ptr().add(h * PAGE);
                if heads - h >= 4 {
                    scores::<V, 4>(keys.as_ptr(), q, hd, self.scale, to);
                    h += 4;
                } else {
                    scores::<V, 1>(keys.as_ptr(), q, hd, self.scale, to);
                    h += 1;
                }
            }
        }
        // SAFETY: as above; the page's values are float32.
        unsafe {
            weigh::<V>(self.scores, self.state, self.out, &self.live);
            values::<V, F32>(self.scores, page_values.as_ptr().cast(), self.out, hd, self.live);
        }
    }
}

/// Scores of `H` heads with all positions of a turned page. Safety: V's level; the sizes.
#[inline(always)]
unsafe fn scores<V: Vector, const H: usize>(
    keys: *const f32,
    q: *const f32,
    hd: usize,
    scale: f32,
    to: *mut f32,
) {
    // SAFETY: the caller's promise; PAGE is a multiple of two vectors.
    unsafe {
        for first in (0..PAGE).step_by(2 * V::LANES) {
            let mut acc = [[V::splat(0.0); 2]; H];
            for d in 0..hd {
                let key = keys.add(d * PAGE + first);
                let (a, b) = (V::load(key), V::load(key.add(V::LANES)));
                for h in 0..H {
                    let q = V::splat(*q.add(h * hd + d));
                    acc[h][0] = q.fma(a, acc[h][0]);
                    acc[h][1] = q.fma(b, acc[h][1]);
                }
            }
            let scale = V::splat(scale);
            for h in 0..H {
                let to = to.add(h * PAGE + first);
                acc[h][0].mul(scale).store(to);
                acc[h][1].mul(scale).store(to.add(V::LANES));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::matmul::tests::noise;
    use crate::simd::available;
    use proptest::prelude::*;

    /// Keys and values of `pages` pages, `skew` bytes off alignment; NaN at and after `poison`.
    struct Cache {
        dtype: Dtype,
        hd: usize,
        floats: [Vec<f32>; 2],
        bytes: [Vec<u8>; 2],
        skew: usize,
    }

    impl Cache {
        fn random(dtype: Dtype, hd: usize, pages: usize, poison: usize, seed: u64) -> Self {
            let skew = seed as usize % 3;
            let make = |seed| {
                let mut floats = noise(seed, pages * PAGE * hd);
                let at = (poison * hd).min(floats.len());
                floats[at..].fill(f32::NAN);
                let mut bytes = vec![0; skew];
                for x in &mut floats {
                    if dtype == Dtype::F16 {
                        *x = half::f16::from_f32(*x).to_f32();
                        bytes.extend(half::f16::from_f32(*x).to_le_bytes());
                    } else {
                        bytes.extend(x.to_le_bytes());
                    }
                }
                (floats, bytes)
            };
            let ((k, kb), (v, vb)) = (make(seed), make(seed + 1));
            Self { dtype, hd, floats: [k, v], bytes: [kb, vb], skew }
        }

        fn page(&self, index: usize) -> KvPage<'_> {
            let bytes = PAGE * self.hd * self.dtype.bytes();
            let range = self.skew + index * bytes..self.skew + (index + 1) * bytes;
            KvPage { k: &self.bytes[0][range.clone()], v: &self.bytes[1][range] }
        }

        /// What float32 may cost. A weight's relative error is its score's absolute one: a few
        /// roundings of sums as large as `scale * sum |q k|`. The rest is the exponential and the
        /// weighted sum, over values below 1.
        fn bound(&self, q: &[f32], span: RangeInclusive<usize>, scale: f32) -> f64 {
            let size = |p: usize| {
                let k = &self.floats[0][p * self.hd..][..self.hd];
                q.iter().zip(k).map(|(a, b)| f64::from((a * b).abs())).sum::<f64>()
            };
            let largest = span.map(size).fold(0.0, f64::max) * f64::from(scale);
            1e-5 + 4.0 * f64::from(f32::EPSILON) / 2.0 * largest
        }

        fn reference(
            &self,
            q: &[f32],
            span: RangeInclusive<usize>,
            scale: f32,
            sink: Option<f32>,
        ) -> Vec<f64> {
            let row = |which: usize, p: usize| &self.floats[which][p * self.hd..][..self.hd];
            let dot = |p| q.iter().zip(row(0, p)).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let scores: Vec<f64> =
                span.clone().map(|p| dot(p).sum::<f64>() * f64::from(scale)).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sink = sink.map_or(0.0, |sink| (f64::from(sink) - top).exp());
            let sum = weights.iter().sum::<f64>() + sink;
            let mut out = vec![0.0; self.hd];
            for (p, w) in span.zip(weights) {
                for (o, v) in out.iter_mut().zip(row(1, p)) {
                    *o += w / sum * f64::from(*v);
                }
            }
            out
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn equals_a_float64_softmax(
            half in any::<bool>(), hd in 1usize..180, heads in 1usize..7,
            first in 0usize..150, len in 1usize..150, scale in 0.01f32..6.0, seed in 1u64..1000,
            sinks in prop::option::of(prop::collection::vec(-8f32..8.0, 7)),
        ) {
            let dtype = if half { Dtype::F16 } else { Dtype::F32 };
            let span = first..=first + len - 1;
            // Positions after the span are NaN: touching one shows.
            let cache = Cache::random(dtype, hd, 5, first + len, seed);
            let q = noise(seed + 3, heads * hd);
            let mut scratch = Scratch::default();
            let sink = sinks.as_deref();
            for level in available() {
                let (mut one, mut many) = (vec![0.0; heads * hd], vec![0.0; heads * hd]);
                let page = |i| cache.page(i);
                let (seen, scratch) = (span.clone(), &mut scratch);
                attend(level, dtype, hd, &q, page, seen, scale, sink, &mut one, scratch);
                let spans = std::slice::from_ref(&span);
                let width = heads * hd;
                let out = Columns::of(&mut many, width, width, 1);
                attend_chunk(
                    level, dtype, hd, heads, &q, width, page, spans, scale, sink, out, scratch,
                );
                for h in 0..heads {
                    let q = &q[h * hd..][..hd];
                    let bound = cache.bound(q, span.clone(), scale);
                    let sink = sinks.as_ref().map(|sinks| sinks[h]);
                    let want = cache.reference(q, span.clone(), scale, sink);
                    for (d, want) in want.into_iter().enumerate() {
                        for got in [one[h * hd + d], many[h * hd + d]] {
                            let error = (f64::from(got) - want).abs();
                            prop_assert!(error <= bound, "{level:?} {got} {want} {bound}");
                        }
                    }
                }
            }
        }

        #[test]
        fn a_query_ignores_the_rest_of_its_chunk(
            hd in 1usize..100, heads in 1usize..6, first in 0usize..100, n in 1usize..80,
            window in 1usize..200, seed in 1u64..1000,
        ) {
            let cache = Cache::random(Dtype::F32, hd, 3, 192, seed);
            let spans: Vec<_> = (first..first + n)
                .map(|p| (p + 1usize).saturating_sub(window)..=p).collect();
            let width = heads * hd;
            let q = noise(seed + 3, n * width);
            let mut scratch = Scratch::default();
            let page = |i| cache.page(i);
            for level in available() {
                let mut whole = vec![0.0; n * width];
                let out = Columns::of(&mut whole, width, width, n);
                attend_chunk(level, Dtype::F32, hd, heads, &q, width, page, &spans, 0.3, None, out,
                    &mut scratch);
                for i in [0, n / 2, n - 1] {
                    let mut alone = vec![0.0; width];
                    let out = Columns::of(&mut alone, width, width, 1);
                    attend_chunk(level, Dtype::F32, hd, heads, &q[i * width..], width, page,
                        &spans[i..=i], 0.3, None, out, &mut scratch);
                    for (a, b) in alone.iter().zip(&whole[i * width..]) {
                        prop_assert_eq!(a.to_bits(), b.to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn a_nan_in_the_span_shows() {
        let cache = Cache::random(Dtype::F32, 8, 2, 70, 1);
        for level in available() {
            let mut out = [0.0; 8];
            let scratch = &mut Scratch::default();
            attend(
                level,
                Dtype::F32,
                8,
                &[0.1; 8],
                |i| cache.page(i),
                0..=70,
                1.0,
                None,
                &mut out,
                scratch,
            );
            assert!(out.iter().all(|x| x.is_nan()));
        }
    }
}
