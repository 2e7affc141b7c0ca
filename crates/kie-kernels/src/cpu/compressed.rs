//! What compressed attention has beside products: running softmaxes over positions, scores of
//! entries and the choice among them. In float32, for one column.

use crate::abi::Dtype;
use crate::numbers::number_to_f32;

/// Numbers of a running softmax: the maximum, the mass below it, the weighted sum.
pub(super) const RUNNING: usize = 3;

/// Columns whose entries are scored before any are chosen.
pub(super) const INDEX_COLUMNS: usize = 32;

/// What one member alone uses.
#[derive(Default)]
pub(super) struct Scratch {
    /// Stored rows that a column sees, one behind the other.
    pub rows: Vec<u8>,
    /// Numbers of entries.
    pub order: Vec<u32>,
    /// One key.
    pub key: Vec<f32>,
    /// cos and sin of one position.
    pub angles: Vec<f32>,
}

/// A running softmax that has seen nothing.
pub(super) const EMPTY: [f32; RUNNING] = [f32::NEG_INFINITY, 0.0, 0.0];

/// Takes one more position in.
fn take_in([max, mass, sum]: &mut [f32; RUNNING], score: f32, value: f32) {
    if score > *max {
        let keep = (*max - score).exp();
        (*max, *mass, *sum) = (score, *mass * keep + 1.0, *sum * keep + value);
    } else {
        let weight = (score - *max).exp();
        (*mass, *sum) = (*mass + weight, *sum + weight * value);
    }
}

/// One channel of one position: (score, value) of the entry behind its own, where entries overlap,
/// then of its own, whose running softmax is the last. With `ends` what the entry is of this
/// channel; then the next one's is begun.
pub(super) fn pool(state: &mut [[f32; RUNNING]], taken: &[[f32; 2]], ends: bool) -> Option<f32> {
    for (state, [score, value]) in state.iter_mut().zip(taken) {
        take_in(state, *score, *value);
    }
    let [_, mass, sum] = *state.last().filter(|_| ends)?;
    let entry = sum / mass;
    match state {
        [behind, own] => (*behind, *own) = (EMPTY, *behind),
        state => state.fill(EMPTY),
    }
    Some(entry)
}

/// What an indexer makes of one entry: heads' products with its key, those above 0, times the
/// heads' weights.
pub(super) fn score(q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    let heads = q.chunks_exact(key.len()).zip(weights);
    heads.fold(0.0, |sum, (q, weight)| {
        let dot = dot(q, key);
        // A NaN stays one.
        sum + if dot < 0.0 { 0.0 } else { dot } * weight
    })
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a, a_left) = a.as_chunks::<LANES>();
    let (b, b_left) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let left: f32 = a_left.iter().zip(b_left).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + left
}

/// The `chosen` largest of `scores` by number, ascending, equal ones by the lower number; `order`
/// is worked on.
pub(super) fn choose(scores: &[f32], chosen: usize, order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..scores.len() as u32);
    if chosen < scores.len() {
        // A zero's sign is nothing that scores differ by.
        let value = |at: u32| scores[at as usize] + 0.0;
        order.select_nth_unstable_by(chosen, |a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
        order.truncate(chosen);
        order.sort_unstable();
    }
}

/// Numbers of a stored row.
pub(super) fn load(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let stored = bytes.chunks_exact(dtype.bytes());
    out.iter_mut().zip(stored).for_each(|(x, bytes)| *x = number_to_f32(dtype, bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry by entry as it is written in the paper.
    #[test]
    fn running_softmaxes_are_softmaxes() {
        let number =
            |n: usize| ((n * 7919 % 1009) as f64 / 100.0 - 5.0, (n * 31 % 97) as f64 - 48.0);
        for overlap in [false, true] {
            let mut state = vec![EMPTY; 1 + usize::from(overlap)];
            for position in 0..24 {
                let both = [number(position), number(1000 + position)];
                let taken = both.map(|(score, value)| [score as f32, value as f32]);
                let taken = if overlap { &taken[..] } else { &taken[1..] };
                let ends = (position + 1) % 4 == 0;
                let got = pool(&mut state, taken, ends);
                assert_eq!(got.is_some(), ends);
                let Some(got) = got else { continue };
                let begin = position - 3;
                let own = (begin..=position).map(|p| number(1000 + p));
                let before = (begin.saturating_sub(4)..begin).map(number).filter(|_| overlap);
                let all: Vec<_> = own.chain(before).collect();
                let top = all.iter().map(|(score, _)| *score).fold(f64::MIN, f64::max);
                let mass: f64 = all.iter().map(|(score, _)| (score - top).exp()).sum();
                let sum: f64 = all.iter().map(|(score, value)| (score - top).exp() * value).sum();
                assert!((f64::from(got) - sum / mass).abs() < 1e-5 * (1.0 + (sum / mass).abs()));
            }
        }
        let mut state = [EMPTY];
        assert!(pool(&mut state, &[[f32::NAN, 1.0]], true).is_some_and(f32::is_nan));
    }

    #[test]
    fn equal_scores_go_to_the_lower_entry() {
        let chosen = |scores: &[f32], count: usize| {
            let mut order = Vec::new();
            choose(scores, count, &mut order);
            order
        };
        assert_eq!(chosen(&[1.0, 3.0, 2.0, 3.0], 2), [1, 3]);
        assert_eq!(chosen(&[0.0, -0.0, 0.0, -0.0, 1.0], 3), [0, 1, 4]);
        assert_eq!(chosen(&[-0.0, 0.0], 1), [0]);
        assert_eq!(chosen(&[2.0; 700], 512), (0..512).collect::<Vec<_>>());
        assert_eq!(chosen(&[2.0, 1.0], 2), [0, 1]);
        assert_eq!(chosen(&[], 2), [0_u32; 0]);
        let many: Vec<f32> = (0..3000).map(|n| ((n * 7919) % 251) as f32).collect();
        let mut sorted: Vec<u32> = (0..3000).collect();
        sorted.sort_by(|a, b| many[*b as usize].total_cmp(&many[*a as usize]).then(a.cmp(b)));
        let mut wanted = sorted[..512].to_vec();
        wanted.sort_unstable();
        assert_eq!(chosen(&many, 512), wanted);
    }

    #[test]
    fn scores_take_what_is_above_zero() {
        // One product is above 0, one below.
        let sign = |n: usize| if n < 20 { 1.0 } else { -1.0 };
        let q: Vec<f32> = (0..40).map(|n| sign(n) * (n as f32 * 0.3).cos()).collect();
        let key: Vec<f32> = (0..20).map(|n| (n as f32 * 0.9).sin()).collect();
        let dot = |head: usize| -> f32 { (0..20).map(|n| q[20 * head + n] * key[n]).sum() };
        let weights = [0.5, -2.0];
        let wanted: f32 = (0..2).map(|head| dot(head).max(0.0) * weights[head]).sum();
        assert!((score(&q, &weights, &key) - wanted).abs() < 1e-5);
        assert!(dot(0) > 0.0 && dot(1) < 0.0, "one is cut off");
        assert!(score(&[f32::NAN; 2], &[1.0], &[1.0; 2]).is_nan());
    }
}
