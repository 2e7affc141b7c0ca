//! The decode kernel itself, on a small random model, against plain loops over the same weights.
//!
//! Everything about layouts is said in C++ beside the kernel's own constants: one more kernel lays
//! the model out and fills the args, another computes the reference.

#![allow(clippy::unwrap_used)]

use super::tests::{fetch, land, run_with};
use super::*;
use crate::machine::MachineInfo;
use crate::meter::Mode;
use crate::mono::lower::layout::Kind;
use crate::mono::lower::matrix::Matrix;
use crate::mono::lower::model::{Class, Coded, Model};
use crate::mono::lower::partition::Partition;
use crate::mono::lower::segments;
use crate::mono::lower::tiling::StoredBits;
use crate::mono::lower::tuning::Tuning;
use crate::mono::wire::Wire as _;
use crate::mono::{shapes, source};

const CHECK: &str = r"
// Weights that anybody can compute, as halves.
u32 mix(u32 x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ x >> 16;
}
float uniform(u32 stream, u32 row, u32 col, float scale) {
    const u32 h = mix(mix(mix(stream * 0x9e3779b9u + 77u) ^ row) + col * 0x85ebca6bu);
    const float v = ((h >> 8) * (1.0f / 16777216.0f) - 0.5f) * 3.4641016f * scale;
    float a, b;
    unpack_half2(pack_half2(v, 0), a, b);
    return a;
}
enum { kMatQkv, kMatO, kMatGu, kMatDown, kMatHead, kMatEmbed, kMatNorm };
float weight(int matrix, int layer, int row, int col, int k) {
    return uniform(1000 + layer * 8 + matrix, row, col, 1.0f / __builtin_sqrtf((float)k));
}
float norm_weight(int which, int i) { return 1 + uniform(kMatNorm, which, i, 0.1f); }
float bias_of(int layer, int row) { return uniform(900 + layer, row, 0, 0.1f); }
template <class C>
float angle(int position, int j) {
    return position * __builtin_powf(10000.0f, -2.0f * j / C::kHeadDim);
}

// Matrices of codes: drawn, times a scale that blocks of scale_rows rows by the columns of a group
// share.
int bits_of(int matrix) {
    return matrix == kMatQkv    ? Class0::TilingQkv::bits
           : matrix == kMatO    ? Class0::TilingO::bits
           : matrix == kMatGu   ? Class0::TilingGu::bits
           : matrix == kMatDown ? Class0::TilingDown::bits
                                : TilingHead::bits;
}
// Neighbouring rows differ, too.
int scale_rows(int bits) { return bits == kBitsF8 || bits == kBitsI8 ? 23 : 1; }
int group_of(int matrix) {  // its columns
    const int columns[] = {64, 32, 128, 64, 128};
    return bits_of(matrix) == kBitsF16 ? 0 : columns[matrix];
}
u32 code_of(int matrix, int layer, int row, int col) {
    if (bits_of(matrix) != kBitsF8)
        return mix(mix(matrix * 64 + layer + 7) + row * 8191 + col) >> 9 &
               (is_bytes(bits_of(matrix)) ? 255 : 15);
    const float v = uniform(5000 + layer * 8 + matrix, row, col, 1);
    const u32 h = pack_half2(v, 0), magnitude = (h & 0x7fff) >> 7;
    return (h >> 15 & 1) << 7 | (magnitude > 64 ? magnitude - 64 : 0);
}
// 8 more than what is taken from a group's codes.
int zero_point(int matrix, int layer, int row, int col) {
    if (bits_of(matrix) != kBitsI4Zeros) return 8;
    return 6 + mix(mix(matrix * 64 + layer + 11) + row * 4099 + col / group_of(matrix)) % 5;
}
float value_of(int bits, u32 code, int zero) {
    const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    if (bits == kBitsI8 || bits == kBitsI8Half) return (float)(int)(signed char)code;
    if (bits != kBitsF8 && bits != kBitsE2m1) return (float)((int)code - zero);
    if (bits == kBitsE2m1) return code & 8 ? -e2m1[code & 7] : e2m1[code];
    u32 low, high;
    unpack_f8(code, low, high);
    float v, none;
    unpack_half2(low, v, none);
    return v;
}
float scale_of(int matrix, int layer, int row, int col, int k) {
    const int kind = bits_of(matrix);
    const u32 h = mix(mix(matrix * 64 + layer) + row / scale_rows(kind) * 4099 +
                      col / group_of(matrix));
    const float spread = is_bytes(kind) && kind != kBitsF8 ? 74
                         : kind == kBitsE2m1               ? 3
                         : kind == kBitsF8                 ? 1
                                                           : 5;
    const float s = (0.5f + (h >> 8) * (1.0f / 16777216.0f)) / __builtin_sqrtf((float)k) / spread;
    float half, none;
    unpack_half2(pack_half2(s, 0), half, none);
    return kind == kBitsI4     ? number(bits(s) & 0xffff0000)
           : kind == kBitsI4Half || kind == kBitsI4Zeros || kind == kBitsI8Half ? half
           : kind == kBitsE2m1 ? number(bits(s * 1.4f) & 0x7f800000)
                               : s;
}
float stored(int matrix, int layer, int row, int col, int k) {
    if (group_of(matrix) == 0) return weight(matrix, layer, row, col, k);
    const float v = value_of(bits_of(matrix), code_of(matrix, layer, row, col),
                             zero_point(matrix, layer, row, col));
    return v * scale_of(matrix, layer, row, col, k);
}

struct Check {
    u8* base;  // zeros, for everything
    DecodeArgs* args;
    u8* host;  // order, heartbeat, watch; from 64 on the rows' rings
    float* errors;
    u32 steps, token;
    const Segment* segments;  // of the host, like all that says where things are
    const Layer* layers;
    u32 segment_count, page_bytes;
};
template <class F>
void at_layer(const Check& c, int layer, F visit) {
    if (c.layers[layer].kind == 0)
        visit(Class0{});
    else
        visit(ClassLast{});
}
template <class T>
T* take(u8*& at, u64 count) {
    T* p = (T*)at;
    at += (count * sizeof(T) + 255) / 256 * 256;
    return p;
}

struct Op {
    int matrix, layer, rows, k, chunk, stage_bytes, k_warps, first, each, all;
};
template <class S>
void fill_codes(u8* lines, u8* index, long at, int matrix, int layer, int first, int each,
                int all) {
    for (int b = 0; b < kBlocks; ++b)
        for (int n = 0; n < S::rows * S::k; ++n) {
            const int r = n / S::k, col = n % S::k, row = b * each + first + r;
            if (first + r >= each || row >= all) continue;
            const int unit = col / 32, kw = unit / S::pairs, p = unit % S::pairs,
                      c = p % S::chunk;
            u8* stage = lines + b * kStreamBytes + at + p / S::chunk * S::stage_bytes;
            u8* codes = stage + (kw * S::chunk + c) * S::unit_bytes;
            u8* scales = stage + S::code_bytes +
                         (kw * S::spans + c / S::span) * S::scale_rows * S::scale_bytes;
            const u32 code = code_of(matrix, layer, row, col);
            const float scale = scale_of(matrix, layer, row, col, S::k);
            const u32 half = pack_half2(scale, 0) & 0xffff;
            if (S::bits == kBitsI4Half || S::bits == kBitsI8Half) ((u16*)scales)[r] = (u16)half;
            if (S::bits == kBitsI4Zeros)
                ((u32*)scales)[r] = half | zero_point(matrix, layer, row, col) << 16;
            if (!is_bytes(S::bits)) {
                u32* word = (u32*)(codes + r / 16 * 256 + r % 16 / 2 * 32 + col % 32 / 8 * 8 +
                                   r % 2 * 4);
                const int pair = col % 8 / 2, shift = col % 2 * 16;
                const int sign[] = {15, 12, 14, 13}, rest[] = {9, 6, 3, 0};
                if (S::bits != kBitsE2m1) {
                    *word |= (code ^ 8) << (4 * pair + shift);
                    if (S::bits == kBitsI4) ((u16*)scales)[r] = (u16)(bits(scale) >> 16);
                } else {
                    *word |= code >> 3 << (sign[pair] + shift) |
                             (code & 7) << (rest[pair] + shift);
                    scales[r] = (u8)((bits(scale) >> 23) + 14);
                }
                continue;
            }
            codes[r / 16 * 512 + r % 16 / 2 * 64 + col % 32 / 8 * 16 + col % 8 / 2 * 4 +
                  r % 2 * 2 + col % 2] = code;
            if (S::per_row) continue;
            const int at_scale = row / scale_rows(S::bits) -
                                 (b * each + first) / scale_rows(S::bits);
            index[b * kIndexBytes + S::index_at + first + r] = at_scale;
            ((float*)scales)[at_scale] = scale;
        }
}
template <class S>
void fill(u8* lines, u8* index, long& at, int matrix, int layer, int first, int each, int all) {
    if (S::scaled) {
        fill_codes<S>(lines, index, at, matrix, layer, first, each, all);
        at += (long)S::stages * S::stage_bytes;
        return;
    }
    for (int b = 0; b < kBlocks; ++b) {
        u32* to = (u32*)(lines + b * kStreamBytes + at);
        for (long n = 0; n < (long)S::rows * S::k / 2; ++n) {
            const int stage = n * 4 / S::stage_bytes;
            int r = n * 4 % S::stage_bytes;
            const int pair = S::rows * 64, kw = r / (S::chunk * pair);
            r %= S::chunk * pair;
            const int c = r / pair;
            r %= pair;
            const int tile = r / 1024;
            r %= 1024;
            const int rows = S::rows - 16 * tile < 16 ? S::rows - 16 * tile : 16;
            const int half = r / (rows * 32);
            r %= rows * 32;
            const int ln = r / 16, w = r % 16 / 4, g = ln / 4, t = ln % 4;
            const int col = (kw * S::pairs + stage * S::chunk + c) * 32 + 8 * t + 4 * half +
                            2 * (w / 2);
            const int local = first + 16 * tile + 2 * g + w % 2, row = b * each + local;
            const bool real = local < each && row < all;
            to[n] = !real ? 0 : pack_half2(weight(matrix, layer, row, col, S::k),
                                           weight(matrix, layer, row, col + 1, S::k));
        }
    }
    at += (long)S::stages * S::stage_bytes;
}

KIE_KERNEL(prepare, 32, Check c) {
    if (thread() != 0) return;
    u8* at = c.base;
    DecodeArgs& a = *c.args;
    u8* lines = take<u8>(at, kStreamBytes * kBlocks);
    u8* index = take<u8>(at, kBlocks * kIndexBytes + 1);
    a.weights = lines, a.segments = c.segments, a.segment_count = c.segment_count;
    a.scale_index = index;
    long line = 0;
    for (int l = 0; l < kLayers; ++l)
        at_layer(c, l, [&](auto of) {
            using C = decltype(of);
            fill<typename C::TilingQkv>(lines, index, line, kMatQkv, l, 0, C::kRowsQkv, C::kQkv);
            fill<typename C::TilingO>(lines, index, line, kMatO, l, 0, kRowsO, kHidden);
            fill<typename C::TilingGu>(lines, index, line, kMatGu, l, 0, C::kRowsGu, 2 * C::kFfn);
            fill<typename C::TilingDown>(lines, index, line, kMatDown, l, 0, kRowsO, kHidden);
        });
    for (int p = 0; p < kHeadPasses; ++p)
        fill<TilingHead>(lines, index, line, kMatHead, kLayers, p * kHeadPassRows, kRowsHead,
                         kVocab);
    if (kHeadTail)
        fill<TilingTail>(lines, index, line, kMatHead, kLayers, kHeadPasses * kHeadPassRows,
                         kRowsHead, kVocab);
    u32* embed = take<u32>(at, (u64)kVocab * kHidden / 2);
    for (int i = 0; i < kVocab * kHidden / 2; ++i) {
        const int row = i / (kHidden / 2), col = i % (kHidden / 2) * 2;
        embed[i] = pack_half2(uniform(kMatEmbed, row, col, 1), uniform(kMatEmbed, row, col + 1, 1));
    }
    u32* norms = take<u32>(at, (2 * kLayers + 1) * kHidden / 2);
    for (int i = 0; i < (2 * kLayers + 1) * kHidden / 2; ++i) {
        const int row = i / (kHidden / 2), col = i % (kHidden / 2) * 2;
        norms[i] = pack_half2(norm_weight(row, col), norm_weight(row, col + 1));
    }
    int dims = 0;
    each_class([&](auto of) { dims += decltype(of)::kHeadDim; });
    float* rope = take<float>(at, kPagesMax * kPage * dims);
    each_class([&](auto of) {
        using C = decltype(of);
        for (int p = 0; p < kPagesMax * kPage; ++p)
            for (int j = 0; j < C::kHeadDim / 2; ++j) {
                float* to = rope + C::kRope + (p * C::kHeadDim / 2 + j) * 2;
                to[0] = __builtin_cosf(angle<C>(p, j)), to[1] = __builtin_sinf(angle<C>(p, j));
            }
    });
    float* biases = take<float>(at, kLayers * 2048);
    for (int l = 0; l < kLayers; ++l)
        at_layer(c, l, [&](auto of) {
            using C = decltype(of);
            for (int row = 0; C::kBias && row < C::kQkv; ++row)
                biases[c.layers[l].biases + row] = bias_of(l, row);
        });
    a.biases = biases;
    u32* pages = take<u32>(at, kColumns * kPools * kPagesMax);
    for (int r = 0; r < kColumns; ++r)
        for (int i = 0; i < kPagesMax; ++i)
            pages[r * kPools * kPagesMax + i] = (r + 1) * kPagesMax - 1 - i;
    a.embed = embed, a.norms = norms, a.rope = rope, a.layers = c.layers, a.pages = pages;
    const u64 pool = (u64)kColumns * kPagesMax * c.page_bytes;
    a.pools[0] = a.pools[1] = take<u8>(at, pool);
    a.page_bytes[0] = a.page_bytes[1] = c.page_bytes;
    a.stop_ids = take<u32>(at, kColumns * kStopsMax), a.ll_words = take<u64>(at, kWords);
    a.values = take<float>(at, 2 * kColumns * kVocabAll);
    a.abort_flag = take<u64>(at, 1), a.records = take<Record>(at, kBlocks * kRecordsBlock);
    a.logits = take<float>(at, (u64)(c.steps + 3) * kColumns * kVocabAll);
    a.out = (u64*)(c.host + 64), a.control = (u32*)c.host;
    a.budget_ns = 200000000, a.steps = c.steps + 3, a.seqno = 0x7ffffffd;
    a.live = kColumns < 3 ? kColumns : 3;
    a.in_flight_bytes = 3 * kSlotBytes;
    Sequence& q = a.column[0];
    q.token = c.token, q.last = c.steps, q.repetition = 1, q.top_p = 1;
    for (int i = 1; i < kColumns; ++i) a.column[i] = q, a.column[i].row = i;
}

void product(int matrix, int layer, int rows, int k, const float* x, float* y) {
    for (int r = 0; r < rows; ++r) {
        double sum = 0;
        for (int i = 0; i < k; ++i) sum += (double)stored(matrix, layer, r, i, k) * x[i];
        y[r] = (float)sum;
    }
}
void normed(const float* x, int which, float* y) {
    float s = 0;
    for (int i = 0; i < kHidden; ++i) s += x[i] * x[i];
    const float f = 1 / __builtin_sqrtf(s / kHidden + kEps);
    for (int i = 0; i < kHidden; ++i) y[i] = x[i] * f * norm_weight(which, i);
}
template <class C>
void attention(float* y, float* past, int window, int step, float* out) {
    constexpr int kHeads = C::kHeads, kKvHeads = C::kKvHeads, kHeadDim = C::kHeadDim;
    for (int r = 0; r < (kHeads + kKvHeads) * kHeadDim; r += 2) {
        const float a = angle<C>(step, r % kHeadDim / 2), v0 = y[r], v1 = y[r + 1];
        y[r] = v0 * __builtin_cosf(a) - v1 * __builtin_sinf(a);
        y[r + 1] = v0 * __builtin_sinf(a) + v1 * __builtin_cosf(a);
    }
    constexpr int kBoth = 2 * kKvHeads * kHeadDim;
    for (int i = 0; i < kBoth; ++i) past[step * kBoth + i] = y[C::kAttn + i];
    for (int h = 0; h < kHeads; ++h) {
        const float *k = past + h / C::kGroup * kHeadDim, *v = k + kKvHeads * kHeadDim;
        float sum = 0;
        for (int d = 0; d < kHeadDim; ++d) out[h * kHeadDim + d] = 0;
        for (int p = window > 0 && step >= window ? step - window + 1 : 0; p <= step; ++p) {
            float s = 0;
            for (int d = 0; d < kHeadDim; ++d) s += y[h * kHeadDim + d] * k[p * kBoth + d];
            s = __builtin_expf(s / __builtin_sqrtf((float)kHeadDim)), sum += s;
            for (int d = 0; d < kHeadDim; ++d) out[h * kHeadDim + d] += s * v[p * kBoth + d];
        }
        for (int d = 0; d < kHeadDim; ++d) out[h * kHeadDim + d] /= sum;
    }
}
// Relative L2 of each step's logits, or what makes no sense of them.
KIE_KERNEL(reference, 32, Check c) {
    if (thread() != 0) return;
    u8* at = c.base;
    const DecodeArgs& a = *c.args;
    float *x = take<float>(at, kHidden), *h = take<float>(at, kHidden),
          *y = take<float>(at, 4096), *o = take<float>(at, 4096),
          *z = take<float>(at, kHidden), *logits = take<float>(at, kVocab);
    constexpr int kBothMost = max_i(Class0::kKvHeads * Class0::kHeadDim,
                                    ClassLast::kKvHeads * ClassLast::kHeadDim) * 2;
    float* past = take<float>(at, (u64)kLayers * c.steps * kBothMost);
    u32 token = c.token, hash = 0;
    for (u32 step = 0; step < c.steps; ++step) {
        for (int i = 0; i < kHidden; ++i) x[i] = uniform(kMatEmbed, token, i, 1);
        for (int l = 0; l < kLayers; ++l)
            at_layer(c, l, [&](auto of) {
                using C = decltype(of);
                static_assert(C::kQkv <= 4096 && 2 * C::kFfn <= 4096);
                normed(x, 2 * l, h), product(kMatQkv, l, C::kQkv, kHidden, h, y);
                for (int i = 0; C::kBias && i < C::kQkv; ++i) y[i] += bias_of(l, i);
                float* its = past + (u64)l * c.steps * kBothMost;
                attention<C>(y, its, (int)c.layers[l].window, step, o);
                product(kMatO, l, kHidden, C::kAttn, o, z);
                for (int i = 0; i < kHidden; ++i) x[i] += z[i];
                normed(x, 2 * l + 1, h), product(kMatGu, l, 2 * C::kFfn, kHidden, h, y);
                for (int i = 0; i < C::kFfn; ++i)
                    o[i] = y[2 * i] / (1 + __builtin_expf(-y[2 * i])) * y[2 * i + 1];
                product(kMatDown, l, kHidden, C::kFfn, o, z);
                for (int i = 0; i < kHidden; ++i) x[i] += z[i];
            });
        normed(x, 2 * kLayers, h), product(kMatHead, kLayers, kVocab, kHidden, h, logits);
        const float* got = a.logits + (u64)step * kColumns * kVocabAll;
        float wrong = 0, norm = 0;
        int best = 0;
        for (int i = 0; i < kVocab; ++i) {
            wrong += (got[i] - logits[i]) * (got[i] - logits[i]), norm += logits[i] * logits[i];
            if (got[i] > got[best]) best = i;
            hash = mix(hash ^ bits(got[i]));
            for (u32 n = 1; n < a.live; ++n)  // the same sequence in other pages
                if (got[n * kVocabAll + i] != got[i]) wrong = 1e15f;
        }
        const u64 told = a.out[step * 3];
        token = (u32)told;
        const bool ended = step + 1 < c.steps || a.out[c.steps * 3] == 0;
        c.errors[step] = *a.abort_flag ? 1e9f : told >> 32 != step + 1 ? 1e8f
                         : (int)token != best ? 1e7f : !ended ? 1e6f
                         : __builtin_sqrtf(wrong / norm);
    }
    *(u32*)(c.errors + c.steps) = hash;
}
";

const ENTRIES: [&str; 3] = ["prepare", "kie_decode", "reference"];

/// What a test may have otherwise.
#[derive(Debug, Clone, Copy)]
struct Shape {
    columns: u32,
    /// Attention's partials are combined by owners.
    merge: bool,
    streamed: bool,
    head_dim: u32,
    kv_splits: u32,
    /// Of every other layer.
    window: u32,
    /// Layers of two classes.
    hybrid: bool,
    /// Stages of different sizes stand side by side in the ring.
    packed: bool,
    /// Which matrices are codes, of which bits: q, k and v, attention's output, gate and up, down,
    /// the head.
    coded: [Option<StoredBits>; 5],
}

const SHAPE: Shape = Shape {
    columns: 1,
    merge: true,
    streamed: false,
    head_dim: 32,
    kv_splits: 4,
    window: 0,
    hybrid: false,
    packed: false,
    coded: [None; 5],
};

/// A kernel with its reference, and what the host says of where things are.
struct Case {
    source: Source,
    segments: Vec<u8>,
    layers: Vec<u8>,
    segment_count: u32,
    page_bytes: u32,
}

fn case_of(shape: Shape) -> Case {
    let Shape { columns, streamed, head_dim, .. } = shape;
    let class = |c: &mut Class| *c = Class { heads: 8, kv_heads: 2, head_dim, ffn: 384, ..*c };
    let mut model = shapes::with_class(shapes::model("1b"), class);
    let kinds: &[usize] = if shape.hybrid { &[0, 1, 1, 0] } else { &[0, 0] };
    model.layer.truncate(kinds.len());
    if shape.hybrid {
        let wide =
            Class { heads: 4, kv_heads: 1, head_dim: 64, ffn: 640, bias: true, ..model.classes[0] };
        model.classes.push(wide);
    }
    for (at, (layer, class)) in model.layer.iter_mut().zip(kinds).enumerate() {
        layer.class = *class;
        layer.pool = [0, at as u32];
        layer.window = if at % 2 == 1 { shape.window } else { 0 };
    }
    let coded = |at: usize| {
        let of = |bits: StoredBits| {
            let rows = if bits.per_row() { 1 } else { 23 };
            Coded { bits, group: [rows, CODED[at]] }
        };
        shape.coded[at].map(of)
    };
    let coded_head = coded(4).map(Ok);
    let model = Model { hidden: 256, vocab: 300, vocab_all: 300, coded_head, ..model };
    let dense = [Matrix::Qkv, Matrix::Output, Matrix::GateUp, Matrix::Down];
    let model = shapes::coded(model, |m| coded(dense.iter().position(|d| *d == m)?));
    let arch = "sim".into();
    let machine = MachineInfo { multiprocessors: 8, chiplets: 1, arch, ..shapes::nvidia() };
    let found = Partition::new(&model, &machine, 4 * 64).unwrap();
    assert_eq!((found.blocks, found.warps, found.slot_bytes >> 10), (8, 8, 16), "{found}");
    assert!(found.as_halves.is_empty());
    let mut tuning = Tuning { poll_delay_retries_ns: 250, ahead_short: 3, ..found.tuning };
    if shape.packed {
        tuning = Tuning { variable_stages_always: true, ring_most: 0, ..tuning };
    }
    let mut partition = Partition { tuning, ..found };
    for class in &mut partition.classes {
        (class.kv_splits, class.combine_by_owners) = (shape.kv_splits, shape.merge);
    }
    let kind = Kind::plain(columns, streamed);
    let mut source = source::decode(Platform::Sim, (&model, &partition), kind, Mode::Full).unwrap();
    source.text += CHECK;
    let segments = segments::segments(&model, &partition);
    let bytes = |one: &segments::Segment| one.wire().as_bytes().to_vec();
    Case {
        source: Source { entries: ENTRIES.to_vec(), ..source },
        segments: segments.iter().flat_map(bytes).collect(),
        layers: segments::layers(&model, &partition)
            .iter()
            .flat_map(|layer| layer.as_bytes().to_vec())
            .collect(),
        segment_count: segments.len() as u32,
        page_bytes: segments::page_bytes(&model, &partition)[0],
    }
}

fn model(columns: u32, merge: bool) -> Case {
    case_of(Shape { columns, merge, ..SHAPE })
}

/// Errors of `steps` steps, how the decode kernel's launch went, and its seconds.
fn decode(sim: &Sim, case: &Case, steps: u32) -> Result<(Vec<f32>, Trace, f64)> {
    let (mut errors, trace, seconds) = decode_hashed(sim, case, steps)?;
    errors.pop();
    Ok((errors, trace, seconds))
}

/// The same, and behind the errors a hash of all logits.
fn decode_hashed(sim: &Sim, case: &Case, steps: u32) -> Result<(Vec<f32>, Trace, f64)> {
    let module = &sim.compile(&case.source).unwrap();
    let [base, args, errors] = [48 << 20, 4096, 4096].map(|bytes| sim.alloc(bytes).unwrap());
    let host = sim.alloc_shared(64 + 8 * 8192 * 24).unwrap();
    let [segments, layers] = [&case.segments, &case.layers].map(|bytes| {
        let memory = sim.alloc(bytes.len()).unwrap();
        sim.write(&memory, 0, bytes).unwrap();
        memory
    });
    let words = [base.address, args.address, host.address, errors.address];
    let more = [
        u64::from(steps) | 11 << 32,
        segments.address,
        layers.address,
        u64::from(case.segment_count) | u64::from(case.page_bytes) << 32,
    ];
    let words: Vec<u64> = words.into_iter().chain(more).collect();
    run_with(sim, module, "prepare", &words, (1, 32)).unwrap();
    let given = fetch(sim, &args);
    let launch = Launch {
        entry: "kie_decode",
        blocks: 8,
        threads: 8 * 32 + 2 * sim.warp(),
        shared_bytes: 232_448,
        args: &given,
    };
    let start = Instant::now();
    land(sim.launch(module, &launch).unwrap())?;
    let seconds = start.elapsed().as_secs_f64();
    let trace = sim.last_trace().unwrap();
    let spare = sim.alloc(4 << 20).unwrap();
    let words: Vec<u64> = std::iter::once(spare.address).chain(words.into_iter().skip(1)).collect();
    run_with(sim, module, "reference", &words, (1, 32)).unwrap();
    let got = fetch(sim, &errors);
    let errors = got.chunks_exact(4).map(|part| f32::from_ne_bytes(part.try_into().unwrap()));
    Ok((errors.take(steps as usize + 1).collect(), trace, seconds))
}

#[test]
fn the_decode_kernel_computes_what_plain_loops_compute() {
    for (warp, seed, columns, merge) in [
        (32, 1, 1, true),
        (64, 2, 1, true),
        (32, 3, 1, false),
        (64, 4, 1, false),
        (32, 5, 8, true),
        (64, 6, 8, false),
    ] {
        let sim = Sim::open(&format!("sim:warp={warp},seed={seed}")).unwrap();
        let (errors, ..) = decode(&sim, &model(columns, merge), 3).unwrap();
        assert!(errors.iter().all(|&e| e < 2e-3), "{warp} {columns} {merge}: {errors:?}");
    }
}

/// Pages through the ring, whole or in halves, all of them or a window's, several a block or one,
/// to one column or to three, whose bits do not depend on their neighbours; those of the kernel
/// without are the same where no block has two pages.
#[test]
fn pages_come_through_the_ring() {
    let one = Shape { kv_splits: 1, window: 70, ..SHAPE };
    let rows = [(one, 70, false), (SHAPE, 67, true), (Shape { head_dim: 96, ..one }, 66, false)];
    for (seed, (shape, steps, same)) in rows.into_iter().enumerate() {
        let mut hashes = Vec::new();
        for (warp, columns, streamed) in
            [(32, 1, false), (64, 1, true), (32, 1, true), (32, 4, true)]
        {
            let sim = Sim::open(&format!("sim:warp={warp},seed={seed}")).unwrap();
            let case = case_of(Shape { columns, streamed, ..shape });
            let (mut errors, ..) = decode_hashed(&sim, &case, steps).unwrap();
            hashes.push(errors.pop().unwrap().to_bits());
            let worst = errors.iter().copied().fold(0.0, f32::max);
            assert!(worst < 2e-3, "{warp} {columns} {shape:?}: {errors:?}");
        }
        let alike = if same { &hashes[..] } else { &hashes[1..] };
        assert!(alike.iter().all(|h| *h == hashes[1]), "{shape:?}: {hashes:x?}");
    }
}

/// Layers of two classes that take turns: heads of two sizes, two widths of the mlp, biases and
/// windows in some, with pages by loads and through the ring, in one column and in several.
#[test]
fn layers_of_two_classes_compute_what_plain_loops_compute() {
    let hybrid = Shape { hybrid: true, window: 3, kv_splits: 2, ..SHAPE };
    for (seed, (warp, columns, merge, streamed)) in
        [(32, 1, true, false), (64, 1, false, true), (32, 4, true, true), (64, 8, false, false)]
            .into_iter()
            .enumerate()
    {
        let sim = Sim::open(&format!("sim:warp={warp},seed={seed}")).unwrap();
        let case = case_of(Shape { columns, merge, streamed, ..hybrid });
        let (errors, ..) = decode(&sim, &case, 6).unwrap();
        assert!(errors.iter().all(|&e| e < 2e-3), "{warp} {columns} {merge}: {errors:?}");
    }
}

/// Columns of a scale of each matrix, as group_of has them.
const CODED: [u32; 5] = [64, 32, 128, 64, 128];

/// A model whose matrices are FP8 codes, some of them or all.
fn coded_model(columns: u32, hybrid: bool, coded: [Option<StoredBits>; 5]) -> Case {
    case_of(Shape { columns, hybrid, coded, ..SHAPE })
}

/// Every matrix step in every encoding, against sums in float64; encodings side by side, too.
#[test]
fn codes_are_decoded_in_registers() {
    let (f8, i4, e2m1) = (Some(StoredBits::F8), Some(StoredBits::I4), Some(StoredBits::E2m1));
    let [i8, half, zeros] = [StoredBits::I8, StoredBits::I4Half, StoredBits::I4Zeros].map(Some);
    for (warp, columns, hybrid, coded) in [
        (32, 1, false, [f8; 5]),
        (64, 1, true, [f8; 5]),
        (32, 8, false, [f8; 5]),
        (32, 1, false, [None, f8, f8, None, None]),
        (32, 1, false, [i4; 5]),
        (64, 8, true, [i4; 5]),
        (64, 1, true, [e2m1; 5]),
        (32, 8, false, [e2m1; 5]),
        (32, 1, false, [f8, None, e2m1, i4, i4]),
        (32, 1, true, [Some(StoredBits::I4Zeros); 5]),
        (64, 8, false, [Some(StoredBits::I8Half); 5]),
        (64, 1, false, [i8, half, zeros, Some(StoredBits::I8Half), zeros]),
        (32, 8, true, [i8, zeros, half, i8, half]),
    ] {
        let sim = Sim::open(&format!("sim:warp={warp},seed={columns}")).unwrap();
        let (errors, ..) = decode(&sim, &coded_model(columns, hybrid, coded), 3).unwrap();
        assert!(
            errors.iter().all(|&e| e < 2e-3),
            "{warp} {columns} {hybrid} {coded:?}: {errors:?}"
        );
    }
}

#[test]
fn codes_and_scales_of_all_sizes_stand_side_by_side() {
    let (f8, i4, e2m1) = (Some(StoredBits::F8), Some(StoredBits::I4), Some(StoredBits::E2m1));
    for (warp, hybrid, coded) in [(32, false, [f8; 5]), (64, true, [i4, None, e2m1, f8, i4])] {
        let sim = Sim::open(&format!("sim:warp={warp},seed=5")).unwrap();
        let case = case_of(Shape { packed: true, hybrid, coded, ..SHAPE });
        let (errors, ..) = decode(&sim, &case, 3).unwrap();
        assert!(errors.iter().all(|&e| e < 2e-3), "{warp} {hybrid} {coded:?}: {errors:?}");
    }
}

#[test]
fn mutants_of_scales_fail() {
    let (f8, i4, e2m1) = (StoredBits::F8, StoredBits::I4, StoredBits::E2m1);
    let mutants = [
        (f8, "scales_at + n * (S::scale_rows", "scales_at + (n + 1) % S::spans * (S::scale_rows"),
        (f8, "(from + (at >> 16) + behind)", "(from + (at & 0xffff) + behind)"),
        (f8, "k_warp * S::spans * S::scale_rows;", "k_warp / 2 * S::spans * S::scale_rows;"),
        (f8, "shared[kShIndex + i] = index[i];", "shared[kShIndex + i] = index[0];"),
        // A neighbouring group's, the next row pair's, the other row's.
        (i4, "scales_at + n * (S::scale_rows", "scales_at + (n + 1) % S::spans * (S::scale_rows"),
        (i4, "(base + own) * S::scale_bytes", "(base + own / 4 * 4) * S::scale_bytes"),
        (i4, "scale.v & 0xffff0000)", "scale.v << 16)"),
        (e2m1, "(row == 0 ? 23 : 15)", "23"),
        (e2m1, "(1 << 2) + (1 << 9)", "(1 << 2) + (1 << 8)"),
        (i4, "0x2c002c00, 0xd480d480", "0x2c002c00, 0xd400d400"),
        // The other row's zero point, none for one of two numbers; a byte's sign.
        (StoredBits::I4Zeros, "(32 * row + 16)", "(32 * (1 - row) + 16)"),
        (StoredBits::I4Zeros, "zero * 0x00100010", "zero * 0x00100000"),
        (StoredBits::I8, "^ 0x80808080", "^ 0x80808000"),
    ];
    for (i, (bits, from, to)) in mutants.into_iter().enumerate() {
        let warp = if i % 2 == 0 { 32 } else { 64 };
        let caught = is_caught(&coded_model(1, false, [Some(bits); 5]), warp, from, to);
        assert!(caught, "{from:?} -> {to:?} at warp {warp} goes unnoticed");
    }
}

/// Prints how fast the simulator is; run it by name.
#[test]
#[ignore = "a measurement"]
fn speed() {
    for (warp, columns) in [(32, 1), (64, 1), (32, 8)] {
        let sim = Sim::open(&format!("sim:warp={warp}")).unwrap();
        let (_, trace, seconds) = decode(&sim, &model(columns, true), 100).unwrap();
        let rate = trace.switches as f64 / seconds * 1e-6;
        eprintln!(
            "warp {warp}, {columns} columns: {seconds:.2} s, {rate:.0} M switches/s, {trace:?}"
        );
    }
}

/// Whether one of eight seeds finds a mutant of a kernel of one column out.
fn is_caught(case: &Case, warp: u32, from: &str, to: &str) -> bool {
    let source = mutate(&case.source, from, to).unwrap();
    let Case { segments, layers, segment_count, page_bytes, .. } = case;
    let (segment_count, page_bytes) = (*segment_count, *page_bytes);
    let (segments, layers) = (segments.clone(), layers.clone());
    let wrong = Case { source, segments, layers, segment_count, page_bytes };
    (0..8).any(|seed| {
        let sim = Sim::open(&format!("sim:warp={warp},seed={seed},host=200")).unwrap();
        !matches!(decode(&sim, &wrong, 4), Ok((e, ..)) if e.iter().all(|&e| e < 2e-3))
    })
}

#[test]
fn mutants_of_the_decode_kernel_fail() {
    let mutants = [
        (
            "if (late == 0 || kNoWaits || wait_expired(w, where, seqno, seqno ^ late)) break;",
            "break;",
        ),
        ("while (!kNoWaits && seqno_of(v[i]) != seqno &&", "while (v[i] == 0 &&"),
        ("slot_init(slots + i, kWarps)", "slot_init(slots + i, kWarps - 1)"),
        ("sync_consumers<kThreads>();  // the step barrier: see exchange.h", ""),
        ("while (!slot_filled(r.slots + r.at, r.parity)) {", "if (false) {"),
        (
            "give_back(r.slots + r.at, lane() == 0);\n    advance(r.at, r.parity);",
            "give_back(r.slots + r.at, lane() == 0);\n    u32 same = 0; advance(r.at, same);",
        ),
        ("sync_warp();\n    if (one) slot_release", "if (one) slot_release"),
        // Where a warp copies.
        ("all = all && passed[i], free += all;", "++free;"),
        ("seqno_at(args.seqno + b.step, first)", "seqno_at(args.seqno + b.step / 2, first)"),
    ];
    for (i, (from, to)) in mutants.into_iter().enumerate() {
        let warp = if i % 2 == 0 { 32 } else { 64 };
        assert!(
            is_caught(&model(1, true), warp, from, to),
            "{from:?} -> {to:?} at warp {warp} goes unnoticed"
        );
    }
}

#[test]
fn mutants_of_streamed_pages_fail() {
    let streamed = case_of(Shape { streamed: true, ..SHAPE });
    let mutants = [
        ("store_key<C>(keys, position % kPage, n, heads[C::kQWords + n]);", "{}"),
        ("values - C::kPageHalf, position % kPage,", "values - C::kPageHalf, 63,"),
        ("if (at > position || at <= lowest)", "if (at <= lowest)"),
        ("(int)segment.layer, step);", "(int)segment.layer ^ 1, step);"),
    ];
    for (i, (from, to)) in mutants.into_iter().enumerate() {
        let warp = if i % 2 == 0 { 32 } else { 64 };
        let caught = is_caught(&streamed, warp, from, to);
        assert!(caught, "{from:?} -> {to:?} at warp {warp} goes unnoticed");
    }
}

#[test]
fn mutants_of_classes_fail() {
    let hybrid = case_of(Shape { hybrid: true, window: 3, kv_splits: 2, ..SHAPE });
    let mutants = [
        // Another class's layer, rotations, biases, or place in a page.
        ("[layer].kind;", "[layer ^ 1].kind;"),
        ("args.rope + C::kRope +\n", "args.rope +\n"),
        ("layer_of(b, layer).biases", "layer_of(b, layer ^ 3).biases"),
        ("[layer.pool] + layer.page_at;", "[layer.pool];"),
        // A stage too short, and one that is elsewhere.
        (
            "expect_stages(f, g.bytes);",
            "expect_stages(f, g.bytes); if (g.layer == 1) g.bytes -= 512;",
        ),
        ("kStreamBytes + g.at", "kStreamBytes + (g.layer == 2 ? g.at - 1024 : g.at)"),
    ];
    for (i, (from, to)) in mutants.into_iter().enumerate() {
        let warp = if i % 2 == 0 { 32 } else { 64 };
        let caught = is_caught(&hybrid, warp, from, to);
        assert!(caught, "{from:?} -> {to:?} at warp {warp} goes unnoticed");
    }
}
