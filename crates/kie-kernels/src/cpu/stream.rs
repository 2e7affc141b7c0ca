//! How fast this machine reads memory: the limit of decoding, as `kie doctor` and benches report.
//!
//! Invariant: every byte of the buffer is loaded into a vector register once a pass.

use std::time::Instant;

use super::team::Team;
use crate::simd::{detect, dispatch, prefetch, Kernel, Vector};

/// Gigabytes a second at which the members of `team` read `buffer` once, each a share of its own.
///
/// The buffer should be several times larger than the last-level cache, and written before, so
/// that its pages exist.
pub fn read_bandwidth(buffer: &[u8], team: &Team) -> f64 {
    let share = buffer.len().div_ceil(team.members()).next_multiple_of(4096);
    let start = Instant::now();
    team.run(|member, _| {
        let begin = (member * share).min(buffer.len());
        let end = (begin + share).min(buffer.len());
        std::hint::black_box(read_once(&buffer[begin..end]));
    });
    buffer.len() as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Loads every byte once; the result depends on all of them.
pub fn read_once(bytes: &[u8]) -> f32 {
    dispatch(detect(), Read(bytes))
}

struct Read<'a>(&'a [u8]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // Four streams, as four rows of a matrix: one alone leaves bandwidth unused.
        let step = 2 * V::LANES * 4;
        let quarter = self.0.len() / 4 / step * step;
        let whole = 4 * quarter;
        // SAFETY: the caller has V's level; every load ends inside its quarter.
        let sums = unsafe {
            let mut sums = [V::splat(0.0); 8];
            for at in (0..quarter).step_by(step) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let from = self.0.as_ptr().add(i / 2 * quarter + at + i % 2 * V::LANES * 4);
                    prefetch(from.wrapping_add(1024));
                    *sum = sum.add(V::load(from.cast()));
                }
            }
            sums
        };
        let rest: u32 = self.0[whole..].iter().map(|&b| u32::from(b)).sum();
        sums.iter().map(|s| s.sum()).sum::<f32>() + rest as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_is_read() {
        for at in [0usize, 1, 500, 999] {
            let mut floats = vec![0f32; 1000];
            floats[at] = 1.5;
            let bytes: Vec<u8> = floats.iter().flat_map(|f| f.to_le_bytes()).collect();
            assert!(read_once(&bytes) > 0.0, "float {at} was not read");
        }
        let team = Team::new(3, false).expect("threads");
        assert!(read_bandwidth(&vec![1; 1 << 20], &team) > 0.0);
    }
}
