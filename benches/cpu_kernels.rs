//! Speed of the CPU kernels beside the machine's own limits: GB/s and GFLOP/s.
//!
//! `cargo bench -p kie-kernels --bench cpu_kernels [-- threads level part]`, of the parts `cached`,
//! `decode`, `attend` and `prefill` one or all. Each figure is the median of several passes over
//! weights that no cache holds; the read bandwidth is sampled before each. "on CPU" counts the
//! processor time of member 0 only, and so leaves out what a busy machine takes away. A prefill
//! stands beside what the unit does: products a second of nothing but the instruction, in
//! registers, taken in turns with it.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::ops::Range;
use std::time::Instant;

use kie_kernels::abi::{Codes, Dtype, Encoding};
use kie_kernels::cpu::attention::{attend, attend_chunk, KvPage, Scratch};
use kie_kernels::cpu::digits::Digits;
use kie_kernels::cpu::matmul::{matmul, Matrix, Scales};
use kie_kernels::cpu::prefill::{pack, prefill, Form, Packed, Panels};
use kie_kernels::cpu::stream::read_bandwidth;
use kie_kernels::cpu::team::Team;
use kie_kernels::field::{Columns, Field};
use kie_kernels::simd::{available, Level};

const COLS: usize = 2048;
/// Bytes of weights a pass reads: more than a shared 480 MB cache is likely to keep.
const BYTES: usize = 1 << 30;

/// Where a member's rows of `all` rows of every column go.
fn own<'a>(y: &'a Field<f32>, rows: &Range<usize>, all: usize, n: usize) -> Columns<'a, f32> {
    // SAFETY: members write disjoint rows and read none.
    unsafe { y.columns(rows.start, rows.len(), all, n) }
}

/// Processor time of this thread in seconds.
fn processor_s() -> f64 {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid clock and a place for its time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut at) };
    at.tv_sec as f64 + at.tv_nsec as f64 * 1e-9
}

/// Runs `body` on the team; processor seconds of member 0.
fn timed(team: &Team, body: impl Fn(usize) + Sync) -> f64 {
    let used = Field::new(1);
    team.run(|member, _| {
        let start = processor_s();
        body(member);
        if member == 0 {
            // SAFETY: member 0 alone touches it.
            let used = unsafe { used.write(0..1) };
            used[0] = processor_s() - start;
        }
    });
    // SAFETY: the team is done.
    let used = unsafe { used.read(0..1) };
    used[0]
}

fn median(mut run: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..7).map(|_| run()).collect();
    all.sort_by(f64::total_cmp);
    all[3]
}

/// Weights of small magnitude for any dtype, in huge pages where the system gives them.
fn weights(huge: bool) -> &'static mut [u8] {
    // SAFETY: an anonymous mapping of our own, never unmapped.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            BYTES + (2 << 20),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED);
    let at = (at as usize).next_multiple_of(2 << 20) as *mut u8;
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: the range lies in the mapping.
    unsafe { libc::madvise(at.cast(), BYTES, advice) };
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at, BYTES) };
    for (i, b) in bytes.iter_mut().enumerate() {
        *b = (i.wrapping_mul(0x9e37_79b1) >> 13) as u8 & 0x37 | 0x08;
    }
    bytes
}

fn rows_of(member: usize, members: usize, rows: usize) -> std::ops::Range<usize> {
    rows * member / members..rows * (member + 1) / members
}

/// Scales that are ordinary numbers of any type.
fn factors(encoding: Encoding, rows: usize, cols: usize) -> Vec<u8> {
    let [down, across] = encoding.grid(rows as u32, cols as u32);
    vec![0x3c; (down * across) as usize * encoding.scale.bytes()]
}

fn matrix<'a>(
    data: &'a [u8],
    encoding: Encoding,
    (rows, cols): (usize, usize),
    factors: &'a [u8],
) -> Matrix<'a> {
    let scales = encoding.has_scales().then_some(Scales {
        data: factors,
        dtype: encoding.scale,
        zeros: None,
        block_rows: encoding.group[0] as usize,
        block_cols: encoding.group[1] as usize,
    });
    Matrix { data, codes: encoding.codes, rows, cols, row_step: 1, scales }
}

fn decode(data: &[u8], team: &Team, level: Level, encoding: Encoding, n: usize) {
    let rows = BYTES / encoding.codes.bytes_of(COLS);
    let data = &data[..encoding.codes.bytes_of(COLS) * rows];
    let factors = factors(encoding, rows, COLS);
    let m = matrix(data, encoding, (rows, COLS), &factors);
    let bytes = data.len() + factors.len();
    let x = vec![0.25f32; COLS * n];
    let y = Field::new(rows * n);
    let (mut limit, mut share) = (Vec::new(), Vec::new());
    let mut alone = f64::MAX;
    let speed = median(|| {
        limit.push(read_bandwidth(data, team));
        let start = Instant::now();
        let used = timed(team, |member| {
            let rows = rows_of(member, team.members(), m.rows);
            let y = own(&y, &rows, m.rows, n);
            matmul(level, &m, rows.clone(), &x, y, &mut Digits::default());
        });
        alone = alone.min(used);
        let speed = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
        share.push(speed / limit[limit.len() - 1]);
        speed
    });
    share.sort_by(f64::total_cmp);
    println!(
        "decode  {:12} {:8} n={n}  {speed:6.1} GB/s  {:4.2} of the read loop; on CPU {:.1} GB/s",
        level.name(),
        encoding.codes.name(),
        share[3],
        bytes as f64 / team.members() as f64 / alone / 1e9,
    );
}

/// Bytes of weights that a core's second cache holds.
const RESIDENT: usize = 1 << 19;

/// The same from a core's own cache, where only instructions count: processor time of one thread,
/// the best of many.
fn resident(data: &[u8], level: Level, encoding: Encoding, n: usize) {
    let rows = RESIDENT / encoding.codes.bytes_of(COLS);
    let data = &data[..encoding.codes.bytes_of(COLS) * rows];
    let factors = factors(encoding, rows, COLS);
    let m = matrix(data, encoding, (rows, COLS), &factors);
    let x = vec![0.25f32; COLS * n];
    let mut y = vec![0.0; rows * n];
    let mut digits = Digits::default();
    let mut best = f64::MAX;
    for _ in 0..200 {
        let start = processor_s();
        for _ in 0..4 {
            matmul(level, &m, 0..rows, &x, Columns::of(&mut y, rows, rows, n), &mut digits);
        }
        best = best.min((processor_s() - start) / 4.0);
    }
    println!(
        "cached  {:12} {:8} n={n}  {:6.1} GB/s  {:.1} G weights/s",
        level.name(),
        encoding.codes.name(),
        (data.len() + factors.len()) as f64 / best / 1e9,
        (rows * COLS * n) as f64 / best / 1e9,
    );
}

/// Products a second of a thread, in G, of nothing but what a prefill multiplies with: 24 sums in
/// registers. None where the unit is AMX, or there is no such instruction.
#[cfg(target_arch = "x86_64")]
fn unit(level: Level, form: Form) -> Option<f64> {
    use std::arch::x86_64::*;
    const TIMES: usize = 400_000;
    const SUMS: usize = 24;

    macro_rules! unit {
        ($name:ident, $features:literal, $sums:expr, $zero:expr, $one:expr, $body:expr) => {
            /// Safety: the features.
            #[target_feature(enable = $features)]
            unsafe fn $name() {
                let mut sums = [$zero; $sums];
                let one = std::hint::black_box($one);
                for _ in 0..TIMES {
                    for sum in &mut sums {
                        *sum = $body(*sum, one);
                    }
                }
                std::hint::black_box(sums);
            }
        };
    }
    unit!(
        pairs,
        "avx512f,avx512bf16",
        SUMS,
        _mm512_setzero_ps(),
        _mm512_set1_epi32(0x3f80_3f80),
        {
            // SAFETY: both are 64 plain bytes.
            |sum, one| unsafe {
                let one = std::mem::transmute::<__m512i, __m512bh>(one);
                _mm512_dpbf16_ps(sum, one, one)
            }
        }
    );
    unit!(wide, "avx512f", SUMS, _mm512_setzero_ps(), _mm512_set1_ps(1.0), |sum, one| {
        _mm512_fmadd_ps(one, one, sum)
    });
    unit!(narrow, "avx2,fma", SUMS / 2, _mm256_setzero_ps(), _mm256_set1_ps(1.0), |sum, one| {
        _mm256_fmadd_ps(one, one, sum)
    });
    let (products, body): (usize, unsafe fn()) = match (level, form) {
        (Level::Avx512Bf16, Form::Pairs) => (32 * SUMS, pairs),
        (Level::Avx512 | Level::Avx512Bf16 | Level::Amx, Form::Single) => (16 * SUMS, wide),
        (Level::Avx2, Form::Single) => (8 * SUMS / 2, narrow),
        (Level::Scalar | Level::Avx2 | Level::Avx512 | Level::Amx, _) => return None,
    };
    let start = processor_s();
    // SAFETY: the machine has the level.
    unsafe { body() };
    Some((products * TIMES) as f64 / (processor_s() - start) / 1e9)
}

#[cfg(not(target_arch = "x86_64"))]
fn unit(_: Level, _: Form) -> Option<f64> {
    None
}

fn chunk(
    data: &[u8],
    team: &Team,
    level: Level,
    encoding: Encoding,
    (rows, cols, n): (usize, usize, usize),
) {
    let size = rows * encoding.codes.bytes_of(cols);
    let x = vec![0.25f32; cols * n];
    let y = Field::new(rows * n);
    let factors = factors(encoding, rows, cols);
    let mut packed = Packed::default();
    let forms = || [Form::of(level, encoding.codes)].into_iter();
    let panels = Field::of((0..team.members()).map(|_| Panels::of(forms())).collect());
    let mut layer = 0;
    let (mut packing, mut alone) = (0.0, f64::MAX);
    let mut peak = None;
    let speed = median(|| {
        let form = Form::of(level, encoding.codes);
        peak = unit(level, form).map(|found| found.max(peak.unwrap_or(0.0)));
        let start = Instant::now();
        pack(level, &[encoding.codes], &x, n, cols, &mut packed);
        packing = start.elapsed().as_secs_f64() * 1e3;
        layer = (layer + 1) % (BYTES / size);
        let data = &data[layer * size..(layer + 1) * size];
        let m = matrix(data, encoding, (rows, cols), &factors);
        let start = Instant::now();
        let used = timed(team, |member| {
            let rows = rows_of(member, team.members(), m.rows);
            // SAFETY: each member takes its own.
            let panels = unsafe { &mut panels.write(member..member + 1)[0] };
            let out = own(&y, &rows, m.rows, n);
            prefill(level, panels, &m, rows.clone(), packed.all(), out, &|| true);
        });
        alone = alone.min(used);
        2.0 * (rows * cols * n) as f64 / start.elapsed().as_secs_f64() / 1e9
    });
    let own = 2.0 * (rows * cols * n) as f64 / team.members() as f64 / alone / 1e9;
    let share = peak.map_or(String::new(), |peak| {
        format!(", {:.0} % of the unit's {:.0}", 50.0 * own / peak, 2.0 * peak)
    });
    println!(
        "prefill {:12} {:8} {rows}x{cols}x{n}  {speed:6.0} GFLOP/s; on CPU {own:.0} GFLOP/s{share} \
         (packing {packing:.2} ms)",
        level.name(),
        encoding.codes.name(),
    );
}

fn attention(level: Level, dtype: Dtype) {
    let (hd, heads, pages, n) = (64, 4, 16, 64);
    let bytes = vec![0u8; pages * 64 * hd * dtype.bytes()];
    let width = 64 * hd * dtype.bytes();
    let page = |i: usize| {
        let part = &bytes[i * width..(i + 1) * width];
        KvPage { k: part, v: part }
    };
    let (q, mut out) = (vec![0.1f32; n * heads * hd], vec![0f32; n * heads * hd]);
    let mut scratch = Scratch::default();
    let last = pages * 64 - 1;
    let one = median(|| {
        let start = Instant::now();
        let (q, out) = (&q[..heads * hd], &mut out[..heads * hd]);
        attend(level, dtype, hd, q, page, 0..=last, 0.1, None, out, &mut scratch);
        start.elapsed().as_secs_f64() * 1e6
    });
    let spans: Vec<_> = (0..n).map(|i| 0..=last - n + 1 + i).collect();
    let many = median(|| {
        let start = Instant::now();
        let stride = heads * hd;
        let out = Columns::of(&mut out, stride, stride, n);
        attend_chunk(
            level,
            dtype,
            hd,
            heads,
            &q,
            stride,
            page,
            &spans,
            0.1,
            None,
            out,
            &mut scratch,
        );
        start.elapsed().as_secs_f64() * 1e6
    });
    let flops = (4 * n * heads * hd * last) as f64 / many / 1e3;
    println!(
        "attend  {:12} {:4} 4 heads x 1024 positions: {one:.1} us; 64 queries {many:.0} us \
         ({flops:.0} GFLOP/s a thread)",
        level.name(),
        dtype.name(),
    );
}

/// Encodings of fewer than 16 bits a number.
fn quantised() -> [Encoding; 9] {
    let plain = Encoding::plain;
    let group = |codes, width| Encoding::scaled(codes, [1, width], Dtype::F16);
    [
        Encoding::scaled(Codes::E4m3, [128, 128], Dtype::F32),
        group(Codes::I8, COLS as u32),
        group(Codes::I4, 32),
        group(Codes::I4, 128),
        Encoding::scaled(Codes::E2m1, [1, 32], Dtype::F8E8m0),
        plain(Codes::Q8x0),
        plain(Codes::Q4x0),
        plain(Codes::Q4k),
        plain(Codes::Q6k),
    ]
}

fn main() {
    let threads = std::env::args().find_map(|a| a.parse().ok()).unwrap_or(2);
    let team = Team::new(threads, true).unwrap();
    team.pin_caller();
    let huge = weights(true);
    println!(
        "read {threads} threads, huge pages: {:.1} GB/s",
        median(|| read_bandwidth(huge, &team))
    );
    let (plain, quantised) = (Encoding::plain, quantised());
    let parts = ["cached", "decode", "attend", "prefill"];
    let part = std::env::args().find(|arg| parts.contains(&arg.as_str()));
    let wanted = |name| part.as_ref().is_none_or(|part| part == name);
    let only = std::env::args().find_map(|a| Level::ALL.into_iter().find(|l| l.name() == a));
    for level in available().into_iter().skip(1) {
        if only.is_some_and(|only| only != level) {
            continue;
        }
        let all = [&[plain(Codes::Bf16)], &quantised[..]].concat();
        for encoding in all.iter().filter(|_| wanted("cached")) {
            for n in [1, 4] {
                resident(huge, level, *encoding, n);
            }
        }
        let floats = [plain(Codes::Bf16), plain(Codes::F16), plain(Codes::F32)];
        for encoding in floats.into_iter().chain(quantised).filter(|_| wanted("decode")) {
            for n in [1, 4, 8] {
                if n == 1 || encoding.codes == Codes::Bf16 {
                    decode(huge, &team, level, encoding, n);
                }
            }
        }
        if wanted("attend") {
            attention(level, Dtype::F32);
            attention(level, Dtype::F16);
        }
        for encoding in [&all[..], &[plain(Codes::F32)]].concat() {
            // The last one as an expert of a mixture sees it.
            for shape in [(2048, 2048, 512), (8192, 2048, 512), (2048, 8192, 512), (2048, 2048, 64)]
            {
                if wanted("prefill") && (level > Level::Avx2 || shape.0 < 8192) {
                    chunk(huge, &team, level, encoding, shape);
                }
            }
        }
    }
    // SAFETY: the mapping began at most 2 MB before; what stays mapped is small.
    unsafe { libc::munmap(huge.as_mut_ptr().cast(), BYTES) };
    if !wanted("decode") {
        return;
    }
    let small = weights(false);
    println!(
        "read {threads} threads, 4 KB pages: {:.1} GB/s",
        median(|| read_bandwidth(small, &team))
    );
    decode(small, &team, available()[available().len() - 1], plain(Codes::Bf16), 1);
}
