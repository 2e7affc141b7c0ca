//! Whether a device keeps what its platform's header promises: small kernels whose answers are
//! known, for devices on which nobody has seen any (litmus.h).

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::machine::{wait_within, Launch, Machine, Module, Platform, Source};
use crate::mono::source;
use crate::mono::wire::{LitmusArgs, Wire};

/// As litmus.h has them.
const THREADS: usize = 256;
const STAGE_BYTES: usize = 4096;
const SHARED_BYTES: u32 = 1024 + 3 * STAGE_BYTES as u32;
/// What a block says that has waited for too long.
const VAIN: u64 = 0xffff_ffff;
/// Stages of a block: each slot of the ring several times.
const STAGES: u32 = 8;

/// The kernels of a platform.
pub fn kernel(platform: Platform) -> Source {
    let (defines, text) = (Vec::new(), source::litmus_text(platform));
    Source { defines, text, entries: vec!["kie_litmus_words", "kie_litmus_copies"] }
}

/// As litmus.h computes it.
fn number(block: u32, round: u32, n: u32) -> u32 {
    (block.wrapping_mul(0x9e37_79b9) ^ round.wrapping_mul(0x85eb_ca6b))
        .wrapping_add(n.wrapping_mul(0xc2b2_ae35))
}

/// Runs both kernels on all multiprocessors: `rounds` messages between each two neighbours, and a
/// few copies of each block. No wait is longer than `budget`.
///
/// # Errors
/// [`Error::Failed`] with what was wrong and where, or what the machine says.
pub fn check(machine: &dyn Machine, rounds: u32, budget: Duration) -> Result<()> {
    let module = machine.compile(&kernel(machine.platform()))?;
    check_with(machine, &module, rounds, budget)
}

/// The same of kernels that were compiled before.
///
/// # Errors
/// As [`check`].
pub fn check_with(
    machine: &dyn Machine,
    module: &Arc<dyn Module>,
    rounds: u32,
    budget: Duration,
) -> Result<()> {
    let blocks = machine.info()?.multiprocessors;
    let all = blocks as usize;
    let data = machine.alloc(2 * all * THREADS * 4)?;
    let from = machine.alloc(all * STAGES as usize * STAGE_BYTES)?;
    let stage = |at: u32| {
        let words = 0..STAGE_BYTES as u32 / 4;
        words.flat_map(move |n| number(at / STAGES, at % STAGES, n).to_le_bytes())
    };
    machine.write(&from, 0, &(0..blocks * STAGES).flat_map(stage).collect::<Vec<u8>>())?;
    for (entry, rounds, threads) in
        [("kie_litmus_words", rounds, 0), ("kie_litmus_copies", STAGES, machine.warp())]
    {
        let [words, wrong] = [machine.alloc(8 * all)?, machine.alloc(8 * all)?];
        let args = LitmusArgs {
            data: data.address,
            words: words.address,
            wrong: wrong.address,
            from: from.address,
            budget_ns: u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX),
            rounds,
            blocks,
        };
        let threads = THREADS as u32 + threads;
        let launch =
            Launch { entry, blocks, threads, shared_bytes: SHARED_BYTES, args: args.as_bytes() };
        let mut flight = machine.launch(module, &launch)?;
        let failed = |what: String| Err(Error::Failed(format!("{entry}: {what}")));
        if !wait_within(&mut *flight, budget.saturating_mul(4))? {
            return failed(format!("no end after {:?}", budget.saturating_mul(4)));
        }
        drop(flight);
        let mut found = vec![0; 8 * all];
        machine.read(&wrong, 0, &mut found)?;
        let counts =
            found.chunks_exact(8).map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i])));
        let bad: Vec<(usize, u64)> = counts.enumerate().filter(|(_, count)| *count != 0).collect();
        match bad.first() {
            None => {}
            Some((block, VAIN)) => return failed(format!("block {block} waited in vain")),
            Some((block, _)) => {
                let blocks = bad.len();
                return failed(format!(
                    "stale numbers in {blocks} of {all} blocks, first in {block}"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sim::Sim;

    #[test]
    fn a_machine_that_keeps_its_word_passes_and_others_are_told() {
        for warp in [32, 64] {
            let sim = Sim::open(&format!("sim:seed={warp},warp={warp},blocks=4")).unwrap();
            let budget = Duration::from_secs(20);
            check(&sim, 10, budget).unwrap();
            for (from, to, what) in [
                ("store_word(args.words + me, round)", "store_word(args.words + me, 99)", "stale"),
                ("+ i) * kLitmusBytes;", "+ i) * kLitmusBytes + 16;", "kie_litmus_copies: stale"),
            ] {
                let mut source = kernel(Platform::Sim);
                assert!(source.text.contains(from), "{from}");
                source.text = source.text.replace(from, to);
                let module = sim.compile(&source).unwrap();
                let error = check_with(&sim, &module, 10, budget).unwrap_err().to_string();
                assert!(error.contains(what), "{from}: {error}");
            }
        }
    }
}
