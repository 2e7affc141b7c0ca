//! How long the way of a token to the host and back is: the device tells of one as the decode
//! kernel does, the host answers it from the loop of [`super::runner`], the device times both.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use super::source;
use super::wire::{self, EchoArgs, Wire, RING};
use crate::error::{Error, Result};
use crate::machine::{Launch, Machine, Platform, Source};

/// The kernel of a platform.
pub(crate) fn kernel(platform: Platform) -> Source {
    let (defines, text) = (Vec::new(), source::echo_text(platform));
    Source { defines, text, entries: vec!["kie_echo"] }
}

/// Microseconds of each of `rounds` round trips, one after another.
///
/// # Errors
/// [`Error::Hang`] where a round takes longer than `budget`, or what the machine says.
pub fn round_trips(machine: &dyn Machine, rounds: u32, budget: Duration) -> Result<Vec<f64>> {
    let module = machine.compile(&kernel(machine.platform()))?;
    let out = machine.alloc_shared(RING * wire::TOKEN_BYTES)?;
    let control = machine.alloc_shared(wire::CONTROL_BYTES)?;
    let times = machine.alloc((rounds as usize + 2) * 8)?;
    let args = EchoArgs {
        out: out.address,
        control: control.address,
        times: times.address,
        budget_ns: u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX),
        rounds,
        ring: RING as u32,
    };
    let (blocks, threads) = (1, machine.warp());
    let launch =
        Launch { entry: "kie_echo", blocks, threads, shared_bytes: 0, args: args.as_bytes() };
    let mut flight = machine.launch(&module, &launch)?;
    let mut emitted = 0;
    // The runner's loop: has it ended, what has it emitted, the heartbeat.
    while !flight.done()? {
        while wire::next_token(&out, 0, emitted).is_some() {
            emitted += 1;
            control.word32(0).store(emitted, Release);
        }
        machine.platform().between_looks();
        control.word32(4).fetch_add(1, Relaxed);
    }
    drop(flight);
    let mut bytes = vec![0; times.bytes];
    machine.read(&times, 0, &mut bytes)?;
    let word = |b: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| b[i]));
    let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
    let (each, all) = words.split_at(rounds as usize);
    if let Some(lost) = each.iter().position(|ticks| *ticks == 0) {
        let detail = format!("round trip {lost} of {rounds} took more than {budget:?}");
        return Err(Error::Hang(detail));
    }
    let us_a_tick = all[1] as f64 / all[0].max(1) as f64 / 1e3;
    Ok(each.iter().map(|ticks| *ticks as f64 * us_a_tick).collect())
}
