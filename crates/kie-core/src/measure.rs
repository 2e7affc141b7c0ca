//! A decode step looked at from inside the kernel: its time by the device's clock, phase by phase,
//! and what is left of it without its waits, its weights or the other devices.
//!
//! Invariant: some of the kernels that run here compute garbage, so the engine lives and dies
//! in [`Builder::measure`] and nothing but times leaves it.

use std::sync::Arc;

use kie_kernels::device::Options;
use kie_kernels::meter::{Meter, Mode, Phase, Seen};
use serde::Serialize;

use crate::builder::Builder;
use crate::device;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::request::{EngineConfig, Prompt, Request, SamplingParams};

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens that each request generates.
    pub tokens: usize,
    /// Requests of each kernel, after one that is not counted.
    pub runs: usize,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Name of the device.
    pub device: String,
    /// What a person would call it.
    pub device_model: String,
    /// Blocks that the kernel ran on; of several devices, those of one.
    pub blocks: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Tokens of each request.
    pub tokens: usize,
    /// Bytes of weights that a step reads.
    pub bytes_per_token: u64,
    /// Microseconds of every step of every run.
    pub full: Vec<Vec<f64>>,
    /// The same with phases told.
    pub trace: Vec<Vec<f64>>,
    /// The same where nobody waits for another block.
    pub stream_only: Vec<Vec<f64>>,
    /// The same where nobody waits for weights.
    pub exchange_only: Vec<Vec<f64>>,
    /// The same where each of several devices takes its own words for those of the others; of one
    /// device nothing.
    pub alone: Vec<Vec<f64>>,
    /// Where the traced steps' time went, in order.
    pub phases: Vec<PhaseTimes>,
}

/// One phase of a step; times are of one step, averaged over all.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseTimes {
    /// What it is.
    pub name: &'static str,
    /// Bytes of weights that all blocks take in it.
    pub bytes: u64,
    /// Of the block that spent the least.
    pub us_min: f64,
    /// Over all blocks.
    pub us_mean: f64,
    /// Of the block that spent the most.
    pub us_max: f64,
}

impl Builder {
    /// Opens an engine to measure its decode steps from inside, and closes it. Prompts are made of
    /// ids drawn anew for each request.
    ///
    /// # Errors
    /// As [`build`](Self::build), and [`Error::NoDevice`] for the CPU, whose passes are timed from
    /// outside.
    pub fn measure(mut self, work: Work) -> Result<Measured> {
        if work.prompt_tokens == 0 || work.tokens == 0 || work.runs == 0 {
            let detail = format!("nothing to measure: {work:?} must all be at least 1");
            return Err(Error::InvalidRequest(detail));
        }
        let meter = Arc::new(Meter::default());
        self.meter = Some(Arc::clone(&meter));
        let config = &mut self.config;
        (config.max_batch, config.prefix_cache) = (1, false);
        config.max_seq_len.get_or_insert(work.prompt_tokens + work.tokens);
        let stop = self.stop.clone();
        let engine = self.build()?;
        let mut source = Source(0x9e37_79b9_7f4a_7c15);
        let mut found = Vec::new();
        for mode in Mode::of(meter.ranks()) {
            meter.set_mode(mode);
            let mut seen = Vec::with_capacity(work.runs);
            for run in 0..=work.runs {
                stop.check()?;
                generate(&engine, &mut source, work)?;
                let new = meter.take();
                if run > 0 {
                    seen.extend(new.into_iter().filter(|s| s.stamps.len() == work.tokens + 1));
                }
            }
            if seen.len() != work.runs {
                let (got, wanted) = (seen.len(), work.runs);
                let name = mode.name();
                return Err(Error::Device(format!("{name}: {got} of {wanted} runs were timed")));
            }
            found.push(seen);
        }
        let info = engine.info();
        let measured = Measured {
            device: info.device.clone(),
            device_model: info.device_model.clone(),
            blocks: found[1].first().map_or(0, |s| s.ticks.len()),
            prompt_tokens: work.prompt_tokens,
            tokens: work.tokens,
            bytes_per_token: info.bytes_per_token,
            full: found[0].iter().map(steps_us).collect(),
            trace: found[1].iter().map(steps_us).collect(),
            stream_only: found[2].iter().map(steps_us).collect(),
            exchange_only: found[3].iter().map(steps_us).collect(),
            alone: found.get(4).into_iter().flatten().map(steps_us).collect(),
            phases: phases(&meter, &found[1]),
        };
        engine.close();
        Ok(measured)
    }
}

/// Microseconds of each of `rounds` round trips of a token between a device and the host.
///
/// # Errors
/// [`Error::NoDevice`] for the CPU and for what is not there, [`Error::EngineHang`].
pub fn echo(config: &EngineConfig, rounds: u32) -> Result<Vec<f64>> {
    let options = Options {
        nvrtc_dirs: config.nvrtc_dirs.clone(),
        cache_dir: config.cache_dir.clone(),
        ..Options::default()
    };
    let name = if config.device == "auto" { "cpu" } else { &config.device };
    Ok(device::open(name, &options)?.echo(rounds)?)
}

fn steps_us(seen: &Seen) -> Vec<f64> {
    seen.stamps.windows(2).map(|w| (w[1] - w[0]) as f64 / 1e3).collect()
}

/// Where the time of traced runs went. Ticks become time by the first block's, which wrote the
/// stamps, over the launch's.
fn phases(meter: &Meter, seen: &[Seen]) -> Vec<PhaseTimes> {
    let mut blocks = vec![Vec::new(); meter.phases().len()];
    for run in seen {
        let steps = (run.stamps.len() - 1) as f64;
        let us = (run.stamps[run.stamps.len() - 1] - run.stamps[0]) as f64 / 1e3;
        let first: u64 = run.ticks.first().map_or(0, |ticks| ticks.iter().sum());
        let us_a_tick = us / first.max(1) as f64;
        for (block, ticks) in run.ticks.iter().enumerate() {
            for (phase, ticks) in blocks.iter_mut().zip(ticks) {
                phase.resize(run.ticks.len(), 0.0);
                phase[block] += *ticks as f64 * us_a_tick / steps / seen.len() as f64;
            }
        }
    }
    let times = |(phase, us): (Phase, Vec<f64>)| PhaseTimes {
        name: phase.name,
        bytes: phase.bytes,
        us_min: us.iter().copied().fold(f64::INFINITY, f64::min),
        us_mean: us.iter().sum::<f64>() / us.len() as f64,
        us_max: us.iter().copied().fold(0.0, f64::max),
    };
    meter.phases().into_iter().zip(blocks).map(times).collect()
}

/// One request whose tokens nobody sees.
fn generate(engine: &Engine, source: &mut Source, work: Work) -> Result<()> {
    let vocab = engine.info().vocab as u64;
    let ids = (0..work.prompt_tokens).map(|_| (source.next() % vocab) as u32).collect();
    let params = SamplingParams {
        max_tokens: Some(work.tokens),
        temperature: Some(0.0),
        repetition_penalty: Some(1.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let mut stream = engine.stream(Request { prompt: Prompt::Ids(ids), params })?;
    stream.by_ref().try_for_each(|token| token.map(drop))
}

/// Numbers that look random (xorshift).
struct Source(u64);

impl Source {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }
}
