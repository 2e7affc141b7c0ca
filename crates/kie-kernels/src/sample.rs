//! How a token is chosen: the reference that every device agrees with, and the CPU's sampler.
//!
//! Float64 throughout, in this order:
//! 1. `logit_bias` is added;
//! 2. repetition: ids seen in prompt or output are divided (> 0) or multiplied by the penalty;
//! 3. presence (once) and frequency (per output occurrence) are subtracted; banned ids, and those
//!    that a mask does not allow, are gone;
//! 4. `temperature` divides; 0 takes the largest and ends here;
//! 5. `top_k` keeps the k largest;
//! 6. `top_p` keeps the smallest head of the sorted rest whose mass reaches p of the rest's mass;
//!    the id that crosses is kept, so at least one is;
//! 7. `min_p` keeps ids whose probability is at least `min_p` times the largest;
//! 8. of what is left, argmax of `l / T - ln(-ln u)`, u from [`crate::philox`] (Gumbel-max).
//!
//! Invariants: ties always go to the lower id; nothing is allocated once [`Scratch`] exists; every
//! shortcut is exact (it skips only what provably cannot win).

use crate::mask::allows;
use crate::philox;
use std::cmp::Ordering;
use std::sync::atomic::AtomicU32;

/// Bit of a count that says "seen in the prompt"; the other bits count outputs.
pub const SEEN_IN_PROMPT: u32 = 1 << 31;

/// No Gumbel value from 32 random bits is larger: `-ln(-ln(1 - 2^-33))` is 22.874.
const GUMBEL_MAX: f64 = 22.88;

/// Parameters of the choice.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is neutral.
    pub repetition_penalty: f32,
    /// 0 is neutral.
    pub presence_penalty: f32,
    /// 0 is neutral.
    pub frequency_penalty: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Alternatives wanted + 1; 0: no log-probabilities.
    pub logprobs: u32,
    /// Key of the random numbers.
    pub seed: u64,
}

impl Sampling {
    /// The largest logit, nothing else.
    pub const fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_k: 0,
            logprobs: 0,
            seed: 0,
        }
    }

    /// Whether counts of seen tokens matter.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self::greedy()
    }
}

/// What was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The token.
    pub id: u32,
    /// Natural log of its probability under the raw logits; 0 unless [`Sampling::logprobs`]
    /// asks.
    pub logprob: f32,
    /// A logit is NaN or +inf, or no id is left to choose; `id` means nothing then.
    pub bad: bool,
}

impl Choice {
    const BAD: Self = Self { id: 0, logprob: 0.0, bad: true };
}

/// Working memory of [`sample`], sized once for a vocabulary.
#[derive(Debug)]
pub struct Scratch {
    values: Vec<f64>,
    kept: Vec<(f64, u32)>,
}

impl Scratch {
    /// For logits of `vocab` ids: 24 bytes an id.
    pub fn new(vocab: usize) -> Self {
        Self { values: Vec::with_capacity(vocab), kept: Vec::with_capacity(vocab) }
    }
}

/// What may be chosen, but for the parameters.
#[derive(Clone, Copy, Default)]
pub struct Rules<'a> {
    /// Pairs of id and addend; ids beyond the vocabulary are ignored.
    pub bias: &'a [(u32, f32)],
    /// `[vocab]` as [`SEEN_IN_PROMPT`] says; read only if a penalty is set, else it may be empty.
    pub counts: &'a [u32],
    /// Ids that must not be chosen (stop ids before `min_tokens`).
    pub banned: &'a [u32],
    /// Bits of the ids that may be chosen; none: all.
    pub mask: Option<&'a [AtomicU32]>,
}

/// Chooses the token that follows position `position - 1` of a sequence; `logits` `[vocab]` raw.
pub fn sample(
    logits: &[f32],
    s: &Sampling,
    rules: &Rules<'_>,
    position: u32,
    scratch: &mut Scratch,
) -> Choice {
    let Some(best) = argmax_raw(logits) else { return Choice::BAD };
    let greedy = s.temperature <= 0.0;
    let free = rules.bias.is_empty() && rules.banned.is_empty() && rules.mask.is_none();
    let id = if greedy && free && !s.penalises() {
        (logits[best as usize] > f32::NEG_INFINITY).then_some(best)
    } else {
        adjust(logits, s, rules, &mut scratch.values);
        match argmax(&scratch.values) {
            Some(top) if !greedy => Some(draw(s, top, position, scratch)),
            other => other,
        }
    };
    let Some(id) = id else { return Choice::BAD };
    let logprob = if s.logprobs > 0 {
        (f64::from(logits[id as usize]) - log_sum_exp(logits)) as f32
    } else {
        0.0
    };
    Choice { id, logprob, bad: false }
}

/// Natural log-probabilities of the `out.len()` likeliest ids under the raw `logits`, best first,
/// ties to the lower id. Returns how many were written (fewer only if the vocabulary is smaller).
pub fn top_logprobs(logits: &[f32], out: &mut [(u32, f32)]) -> usize {
    let mut found = 0;
    for (id, &l) in logits.iter().enumerate() {
        if found == out.len() && (found == 0 || l <= out[found - 1].1) {
            continue;
        }
        let at = out[..found].partition_point(|o| o.1 >= l);
        found = (found + 1).min(out.len());
        out[at..found].rotate_right(1);
        out[at] = (id as u32, l);
    }
    let norm = log_sum_exp(logits);
    for o in &mut out[..found] {
        o.1 = (f64::from(o.1) - norm) as f32;
    }
    found
}

/// `ln(sum(exp(logits)))`, in float64.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|&l| (f64::from(l) - max).exp()).sum::<f64>().ln()
}

/// First id of the largest logit; `None` if one is NaN or +inf, or there is none. Two passes that
/// the compiler turns into vector code.
fn argmax_raw(logits: &[f32]) -> Option<u32> {
    const WIDE: usize = 32;
    let mut max = [f32::NEG_INFINITY; WIDE];
    let mut wrong = [0u32; WIDE];
    let (blocks, rest) = logits.as_chunks::<WIDE>();
    for block in blocks {
        for i in 0..WIDE {
            max[i] = if block[i] > max[i] { block[i] } else { max[i] };
            wrong[i] |= u32::from(!is_sound(block[i]));
        }
    }
    if wrong.iter().any(|&w| w != 0) || rest.iter().any(|&l| !is_sound(l)) {
        return None;
    }
    let max = max.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&l| l == max).map(|i| i as u32)
}

/// Neither NaN nor +inf; -inf is a lawful "never".
fn is_sound(l: f32) -> bool {
    l < f32::INFINITY
}

/// First id of the largest value; `None` if one is NaN or +inf, or all are -inf.
fn argmax(values: &[f64]) -> Option<u32> {
    let mut best = (f64::NEG_INFINITY, None);
    let mut sound = true;
    for (id, &v) in values.iter().enumerate() {
        sound &= v < f64::INFINITY;
        if v > best.0 {
            best = (v, Some(id as u32));
        }
    }
    best.1.filter(|_| sound)
}

/// Steps 1 to 4 into `values`.
fn adjust(logits: &[f32], s: &Sampling, rules: &Rules<'_>, values: &mut Vec<f64>) {
    let Rules { bias, counts, banned, mask } = *rules;
    values.clear();
    values.extend(logits.iter().map(|&l| f64::from(l)));
    for &(id, b) in bias {
        if let Some(v) = values.get_mut(id as usize) {
            *v += f64::from(b);
        }
    }
    if s.penalises() {
        for (v, &count) in values.iter_mut().zip(counts).filter(|(_, &c)| c != 0) {
            let repetition = f64::from(s.repetition_penalty);
            *v = if *v > 0.0 { *v / repetition } else { *v * repetition };
            let outputs = count & !SEEN_IN_PROMPT;
            if outputs > 0 {
                *v -= f64::from(s.presence_penalty);
                *v -= f64::from(s.frequency_penalty) * f64::from(outputs);
            }
        }
    }
    for &id in banned {
        if let Some(v) = values.get_mut(id as usize) {
            *v = f64::NEG_INFINITY;
        }
    }
    if let Some(mask) = mask {
        let gone = values.iter_mut().enumerate().filter(|(id, _)| !allows(mask, *id));
        gone.for_each(|(_, v)| *v = f64::NEG_INFINITY);
    }
    if s.temperature > 0.0 {
        let temperature = f64::from(s.temperature);
        // Adding 0 turns -0 into +0, so that `total_cmp` sees the tie.
        values.iter_mut().for_each(|v| *v = *v / temperature + 0.0);
    }
}

/// Steps 5 to 8; `top` is the id of the largest value.
fn draw(s: &Sampling, top: u32, position: u32, scratch: &mut Scratch) -> u32 {
    let Scratch { values, kept } = scratch;
    let max = values[top as usize];
    let floor = if s.min_p > 0.0 { max + f64::from(s.min_p.min(1.0)).ln() } else { f64::MIN };
    let top_k = if s.top_k == 0 { values.len() } else { s.top_k as usize };
    let mut race = Race::new(s.seed, position, max, top);
    if top_k >= values.len() && s.top_p >= 1.0 {
        for (id, &v) in values.iter().enumerate() {
            if v >= floor {
                race.enter(v, id as u32);
            }
        }
        return race.best.1;
    }
    kept.clear();
    kept.extend(
        values.iter().zip(0..).filter(|(v, _)| **v > f64::NEG_INFINITY).map(|(v, i)| (*v, i)),
    );
    if top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, by_rank);
        kept.truncate(top_k);
        kept.sort_unstable_by(by_rank);
    }
    if s.top_p < 1.0 {
        let head = head_of_mass(kept, f64::from(s.top_p), max);
        kept.truncate(head);
    }
    for &(v, id) in kept.iter().filter(|k| k.0 >= floor) {
        race.enter(v, id);
    }
    race.best.1
}

/// Larger value first, then lower id.
fn by_rank(a: &(f64, u32), b: &(f64, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Brings the smallest head whose mass reaches `p` of the whole to the front, in order of rank,
/// and returns its length. Sorts 64 entries, then 512, ...: the vocabulary only if p needs it.
fn head_of_mass(kept: &mut [(f64, u32)], p: f64, max: f64) -> usize {
    let wanted = p * kept.iter().map(|k| (k.0 - max).exp()).sum::<f64>();
    let (mut mass, mut sorted, mut step) = (0.0, 0, 64);
    while sorted < kept.len() {
        let rest = &mut kept[sorted..];
        if step < rest.len() {
            rest.select_nth_unstable_by(step - 1, by_rank);
        }
        let block = step.min(rest.len());
        rest[..block].sort_unstable_by(by_rank);
        for (i, k) in rest[..block].iter().enumerate() {
            mass += (k.0 - max).exp();
            if mass >= wanted {
                return sorted + i + 1;
            }
        }
        sorted += block;
        step *= 8;
    }
    kept.len()
}

/// The Gumbel-max race: whoever has the largest `value - ln(-ln u)` wins.
struct Race {
    seed: u64,
    position: u32,
    best: (f64, u32),
}

impl Race {
    fn new(seed: u64, position: u32, value: f64, id: u32) -> Self {
        let score = value + gumbel(philox::bits(seed, position, id));
        Self { seed, position, best: (score, id) }
    }

    /// Enters one id. Skips the random number where no Gumbel value could win, and the logarithms
    /// where this one cannot: winning by `gap` needs `1 - u <= -ln u <= e^-gap`, and
    /// `(1 + gap/16)^16 <= e^gap`. The slack covers rounding while scores are below 1e6.
    #[inline]
    fn enter(&mut self, value: f64, id: u32) {
        let (best, best_id) = self.best;
        if value + GUMBEL_MAX < best {
            return;
        }
        let bits = philox::bits(self.seed, self.position, id);
        let gap = best - value;
        if gap > 0.0 && best.abs() < 1e6 {
            let p2 = (1.0 + gap / 16.0) * (1.0 + gap / 16.0);
            let p8 = p2 * p2 * (p2 * p2);
            if (1.0 - philox::uniform(bits)) * (p8 * p8) > 1.0 + 1e-9 {
                return;
            }
        }
        let score = value + gumbel(bits);
        if score > best || (score == best && id < best_id) {
            self.best = (score, id);
        }
    }
}

fn gumbel(bits: u32) -> f64 {
    -(-philox::uniform(bits).ln()).ln()
}

#[cfg(test)]
#[path = "sample_tests.rs"]
mod tests;
