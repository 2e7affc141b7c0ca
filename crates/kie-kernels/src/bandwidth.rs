//! How fast a GPU's memory is read: the limit that a decode step is held against (bandwidth.h).

use std::time::Duration;

use crate::error::{Error, Result};
use crate::machine::{wait_within, Launch, Machine, Memory, Platform, Source};
use crate::mono::source;
use crate::mono::wire::{BandwidthArgs, Wire};

/// As bandwidth.h has them.
const STAGE_BYTES: u64 = 16384;
const MAX_SLOTS: u32 = 6;
const FILL_THREADS: u32 = 256;
/// The slots' barriers, before the ring.
const RING_AT: u32 = 1024;
/// Of memory that is read: far more than caches hold, or as much as there is room for.
const MOST_BYTES: u64 = 4 << 30;
const LEAST_BYTES: u64 = 1 << 30;
/// How long a measurement is to last, of which the best of three counts.
const MEASURED: Duration = Duration::from_millis(60);
const MOST_PASSES: u32 = 1000;

/// The kernels of a platform.
pub fn kernel(platform: Platform) -> Source {
    let (defines, text) = (Vec::new(), source::bandwidth_text(platform));
    Source { defines, text, entries: vec!["kie_bandwidth_fill", "kie_bandwidth_read"] }
}

/// Bytes a second that all multiprocessors read from the device's memory by copies into shared
/// memory: best of three runs over numbers without a pattern. None where less than 2 GiB of memory
/// are free, since caches would answer.
///
/// # Errors
/// [`Error::Failed`] and [`Error::Compile`] as the machine has them.
pub fn measure(machine: &dyn Machine) -> Result<Option<f64>> {
    let bytes = bytes_of(machine.info()?.free_bytes);
    bytes.map(|bytes| measure_with(machine, bytes, MEASURED)).transpose()
}

/// How many bytes are read where so many are free.
fn bytes_of(free: u64) -> Option<u64> {
    (free / 2 >= LEAST_BYTES).then_some((free / 2).min(MOST_BYTES))
}

/// The same of so many bytes, in runs of about that length.
fn measure_with(machine: &dyn Machine, bytes: u64, length: Duration) -> Result<f64> {
    let info = machine.info()?;
    let blocks = info.multiprocessors;
    let stages = (bytes / u64::from(blocks) / STAGE_BYTES).max(1);
    let slots = (info.shared_bytes.saturating_sub(RING_AT) / STAGE_BYTES as u32).min(MAX_SLOTS);
    if slots == 0 {
        let found = info.shared_bytes;
        return Err(Error::Failed(format!("{}: {found} bytes of shared memory", info.name)));
    }
    let module = machine.compile(&kernel(machine.platform()))?;
    let run_bytes = u64::from(blocks) * stages * STAGE_BYTES;
    let room = usize::try_from(run_bytes).unwrap_or(usize::MAX);
    let [data, times] = [machine.alloc(room)?, machine.alloc(16 * blocks as usize)?];
    let run = |entry: &str, threads: u32, passes: u32| -> Result<()> {
        let args = BandwidthArgs {
            data: data.address,
            times: times.address,
            stages: u32::try_from(stages).unwrap_or(u32::MAX),
            passes,
            slots,
            padding: 0,
        };
        let shared_bytes = RING_AT + slots * STAGE_BYTES as u32;
        let launch = Launch { entry, blocks, threads, shared_bytes, args: args.as_bytes() };
        // It waits for nobody but its own copies.
        let mut flight = machine.launch(&module, &launch)?;
        wait_within(&mut *flight, Duration::MAX).map(|_| ())
    };
    let read = |passes: u32| -> Result<f64> {
        run("kie_bandwidth_read", 2 * machine.warp(), passes)?;
        Ok((f64::from(passes) * run_bytes as f64) / seconds(machine, &times, blocks)?)
    };
    run("kie_bandwidth_fill", FILL_THREADS, 1)?;
    let rate = read(1)?;
    let passes = (rate * length.as_secs_f64() / run_bytes as f64).ceil();
    let passes = (passes as u32).clamp(1, MOST_PASSES);
    (0..3).try_fold(0.0, |best: f64, _| Ok(best.max(read(passes)?)))
}

/// From the first block's beginning to the last one's end.
fn seconds(machine: &dyn Machine, times: &Memory, blocks: u32) -> Result<f64> {
    let mut bytes = vec![0; 16 * blocks as usize];
    machine.read(times, 0, &mut bytes)?;
    let words = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i])));
    let words: Vec<u64> = words.collect();
    let began = words.iter().step_by(2).min().copied().unwrap_or(0);
    let ended = words.iter().skip(1).step_by(2).max().copied().unwrap_or(0);
    Ok(ended.saturating_sub(began).max(1) as f64 / 1e9)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sim::Sim;

    #[test]
    fn memory_is_read_to_the_end_by_both_widths_of_warps() {
        for warp in [32, 64] {
            let sim = Sim::open(&format!("sim:seed={warp},warp={warp},blocks=4")).unwrap();
            let rate = measure_with(&sim, 40 * STAGE_BYTES, Duration::ZERO).unwrap();
            assert!(rate.is_finite() && rate > 0.0, "{rate}");
        }
    }

    #[test]
    fn what_caches_could_answer_is_not_measured() {
        assert_eq!(bytes_of(2 * LEAST_BYTES - 1), None);
        assert_eq!(bytes_of(2 * LEAST_BYTES), Some(LEAST_BYTES));
        assert_eq!(bytes_of(u64::MAX), Some(MOST_BYTES));
    }
}
