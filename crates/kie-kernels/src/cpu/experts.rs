//! What a pass keeps for a mixture of experts: which columns go to which expert, and room for their
//! inputs and products.

use std::ops::Range;

use super::ops::{sigmoid, softplus};
use super::prefill::{Form, Line, BLOCK};
use crate::abi::{Dims, ExpertGroups, Program, Route, Scoring, StepKind};
use crate::field::Field;

/// Columns that the decode path takes in one go.
pub(super) const DECODE_COLUMNS: usize = 8;

/// Rows of an expert that packed columns are multiplied with at a time, so that gates meet their
/// ups in a cache.
const TILE: usize = 128;

/// A column, and which of its chosen experts.
#[derive(Clone, Copy, Default)]
pub(super) struct Pair {
    pub column: u32,
    pub place: u32,
}

/// Columns by expert.
#[derive(Default)]
pub(super) struct Grouped {
    /// Where each expert's pairs end.
    ends: Vec<usize>,
    /// Experts in ascending order, the columns of each as well.
    pairs: Vec<Pair>,
}

impl Grouped {
    /// Groups columns whose choices are given, of so many experts.
    pub fn fill<'c>(
        &mut self,
        columns: Range<usize>,
        experts: u32,
        choice: impl Fn(usize) -> &'c [f32],
    ) {
        self.ends.clear();
        self.ends.resize(experts as usize + 1, 0);
        let ids = |column| choice(column).iter().map(|id| *id as usize);
        columns.clone().flat_map(&ids).for_each(|id| self.ends[id + 1] += 1);
        (0..experts as usize).for_each(|id| self.ends[id + 1] += self.ends[id]);
        self.pairs.resize(self.ends[experts as usize], Pair::default());
        for column in columns {
            for (place, id) in ids(column).enumerate() {
                self.pairs[self.ends[id]] = Pair { column: column as u32, place: place as u32 };
                self.ends[id] += 1;
            }
        }
        self.ends.pop();
    }

    /// The experts that were chosen, each with its pairs.
    pub fn each(&self) -> impl Iterator<Item = (u32, &[Pair])> {
        let starts = std::iter::once(&0).chain(&self.ends);
        let ranges = starts.zip(&self.ends).map(|(start, end)| *start..*end);
        let chosen = (0..).zip(ranges).filter(|(_, range)| !range.is_empty());
        chosen.map(|(expert, range)| (expert, &self.pairs[range]))
    }

    /// Packed blocks of all of them.
    pub fn blocks(&self) -> usize {
        self.each().map(|(_, pairs)| pairs.len().div_ceil(BLOCK)).sum()
    }
}

/// What one member alone uses.
#[derive(Default)]
pub(super) struct Scratch {
    pub grouped: Grouped,
    /// Inputs of the columns of one product, one behind the other.
    pub gathered: Vec<f32>,
    /// Products of a tile: of gates and ups, or of two lanes.
    pub products: [Vec<f32>; 2],
}

/// Packed inputs of all pairs, in each [`Form`].
pub(super) type Lines = [Field<Line>; 2];

/// The largest sizes of a program's experts.
#[derive(Default)]
pub(super) struct Largest {
    pairs: usize,
    experts: usize,
    width: usize,
    /// Lines of packed blocks, in each form.
    lines: [usize; 2],
}

impl Largest {
    pub fn of(program: &Program, form_of: impl Fn(u32) -> Form) -> Self {
        let Dims { hidden, lanes, columns, .. } = program.dims;
        let mut most = Self::default();
        for step in &program.steps {
            let (experts, chosen, width, weights, lanes) = match &step.kind {
                StepKind::ExpertsGateUp(s) => (s.experts, s.chosen, hidden, &s.weights[..], 1),
                StepKind::ExpertsDown(s) => {
                    (s.experts, s.chosen, s.ffn, std::slice::from_ref(&s.weight), lanes)
                }
                StepKind::Embed(_)
                | StepKind::Qkv(_)
                | StepKind::Attend(_)
                | StepKind::DeltaIn(_)
                | StepKind::DeltaRule(_)
                | StepKind::LatentDown(_)
                | StepKind::LatentQuery(_)
                | StepKind::LatentAttend(_)
                | StepKind::LatentUp(_)
                | StepKind::CompressedDown(_)
                | StepKind::Compress(_)
                | StepKind::CompressedIndex(_)
                | StepKind::CompressedQuery(_)
                | StepKind::CompressedAttend(_)
                | StepKind::GroupedDown(_)
                | StepKind::HyperIn(_)
                | StepKind::HyperOut(_)
                | StepKind::Project(_)
                | StepKind::ProjectNormed(_)
                | StepKind::GateUp(_)
                | StepKind::Route(_)
                | StepKind::Head(_)
                | StepKind::Sample(_)
                | StepKind::MtpIn(_) => continue,
            };
            let pairs = columns as usize * chosen as usize;
            most.pairs = most.pairs.max(pairs);
            most.experts = most.experts.max(experts as usize);
            most.width = most.width.max(width as usize);
            let blocks = lanes as usize * (pairs / BLOCK + pairs.min(experts as usize));
            for weight in weights {
                let form = form_of(*weight);
                let lines = &mut most.lines[form as usize];
                *lines = blocks.saturating_mul(form.lines(width as usize)).max(*lines);
            }
        }
        most
    }

    /// Bytes of [`Largest::lines`] and of so many members' [`Scratch`].
    pub fn bytes(&self, columns: usize, members: usize) -> u64 {
        let lines: usize = self.lines.iter().map(|lines| lines * size_of::<Line>()).sum();
        let own = 4 * (BLOCK * self.width + 2 * TILE * columns) + 8 * self.pairs;
        let own = if self.pairs == 0 { 0 } else { own };
        lines as u64 + (members * own) as u64
    }

    pub fn lines(&self) -> Lines {
        self.lines.map(Field::new)
    }

    /// What a member uses in passes of so many columns.
    pub fn scratch(&self, columns: usize) -> Scratch {
        if self.pairs == 0 {
            return Scratch::default();
        }
        let ends = Vec::with_capacity(self.experts + 1);
        Scratch {
            grouped: Grouped { ends, pairs: Vec::with_capacity(self.pairs) },
            gathered: vec![0.0; BLOCK * self.width],
            products: [(); 2].map(|()| vec![0.0; TILE * columns.max(DECODE_COLUMNS)]),
        }
    }
}

/// Inputs of so many pairs, one behind the other: in place where it is one.
pub(super) fn gather<'a, 'x: 'a>(
    pairs: &[Pair],
    into: &'a mut [f32],
    input: impl Fn(&Pair) -> &'x [f32],
) -> &'a [f32] {
    if let [pair] = pairs {
        return input(pair);
    }
    let mut end = 0;
    for pair in pairs {
        let x = input(pair);
        into[end..end + x.len()].copy_from_slice(x);
        end += x.len();
    }
    &into[..end]
}

/// Rows in tiles, whose products have so much room. Of the few columns of the decode path a tile is
/// as many rows as there is room for: inputs are gathered, and made digits of, once a tile.
pub(super) fn tiles(
    rows: &Range<usize>,
    room: usize,
    columns: usize,
    packed: bool,
) -> impl Iterator<Item = Range<usize>> {
    let tile = if packed { TILE } else { room / columns };
    let Range { start, end } = *rows;
    (start..end).step_by(tile).map(move |first| first..end.min(first + tile))
}

/// Turns logits into scores; ids of the largest ones, or those `told`, ascending, go into the first
/// half of `out`, their factors into the second one. Equal ones go to the lower id; with a NaN
/// among the logits all factors are NaN.
pub(super) fn choose(
    step: &Route,
    (correction, told): (Option<&[f32]>, Option<&[f32]>),
    logits: &mut [f32],
    out: &mut [f32],
) {
    let (ids, factors) = out.split_at_mut(out.len() / 2);
    if logits.iter().any(|logit| logit.is_nan()) {
        ids.iter_mut().enumerate().for_each(|(n, id)| *id = n as f32);
        return factors.fill(f32::NAN);
    }
    let scores = logits;
    match step.scoring {
        Scoring::Sigmoid { .. } => scores.iter_mut().for_each(|x| *x = sigmoid(*x)),
        Scoring::SqrtSoftplus { .. } => scores.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
        Scoring::SoftmaxOfAll | Scoring::SoftmaxOfChosen => {}
    }
    if let Some(groups) = step.groups {
        keep_groups(groups, correction, scores);
    }
    match told {
        Some(told) => ids.copy_from_slice(told),
        None => {
            let corrected = |at: usize| scores[at] + correction.map_or(0.0, |c| c[at]);
            let mut best = largest(scores.len(), corrected);
            ids.fill_with(|| best.next().expect("no more are chosen than there are") as f32);
        }
    }
    ids.sort_unstable_by(f32::total_cmp);
    let chosen = |id: &f32| scores[*id as usize];
    let top = ids.iter().map(chosen).fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = match step.scoring {
        Scoring::Sigmoid { normed } | Scoring::SqrtSoftplus { normed } => {
            factors.iter_mut().zip(&*ids).for_each(|(factor, id)| *factor = chosen(id));
            // As in DeepSeek's own code: no sum is 0.
            if normed {
                factors.iter().sum::<f32>() + 1e-20
            } else {
                1.0
            }
        }
        Scoring::SoftmaxOfChosen | Scoring::SoftmaxOfAll => {
            let weight = |score: f32| (score - top).exp();
            factors.iter_mut().zip(&*ids).for_each(|(factor, id)| *factor = weight(chosen(id)));
            match step.scoring {
                Scoring::SoftmaxOfAll => scores.iter().map(|score| weight(*score)).sum(),
                Scoring::SoftmaxOfChosen
                | Scoring::Sigmoid { .. }
                | Scoring::SqrtSoftplus { .. } => factors.iter().sum(),
            }
        }
    };
    factors.iter_mut().for_each(|factor| *factor = *factor / sum * step.factor);
}

/// Numbers from 0 on, those with the largest values first, equal ones in their order.
fn largest(count: usize, value: impl Fn(usize) -> f32) -> impl Iterator<Item = usize> {
    let mut last: Option<(f32, usize)> = None;
    std::iter::from_fn(move || {
        // Of those behind the last one, in the order of descending values and ascending numbers.
        let behind = |&(at, own): &(usize, f32)| {
            last.is_none_or(|(value, id)| own < value || own == value && at > id)
        };
        let left = (0..count).map(|at| (at, value(at))).filter(behind);
        let (at, own) = left.reduce(|a, b| if b.1 > a.1 { b } else { a })?;
        last = Some((own, at));
        Some(at)
    })
}

/// Takes the scores of all groups but the chosen ones out of the choice.
fn keep_groups(groups: ExpertGroups, correction: Option<&[f32]>, scores: &mut [f32]) {
    let each = scores.len() / groups.count as usize;
    let rank = |group: usize| {
        let corrected = |at: usize| {
            let at = group * each + at;
            scores[at] + correction.map_or(0.0, |c| c[at])
        };
        largest(each, &corrected).take(2).map(&corrected).sum::<f32>()
    };
    let kept = largest(groups.count as usize, rank).take(groups.chosen as usize);
    let kept = kept.fold(0_u64, |kept, group| kept | 1 << group);
    for (group, scores) in scores.chunks_exact_mut(each).enumerate() {
        if kept >> group & 1 == 0 {
            scores.fill(f32::NEG_INFINITY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_lower_id() {
        let chosen = |scoring, logits: &[f32], count| {
            let step = Route { scoring, ..route(logits, count) };
            chosen(&step, None, logits)
        };
        let logits = [0.5, 2.0, -1.0, 2.0, 0.5, 0.5];
        let out = chosen(Scoring::SoftmaxOfChosen, &logits, 3);
        assert_eq!(out[..3], [0.0, 1.0, 3.0]);
        let all: f32 = logits.iter().map(|x: &f32| x.exp()).sum();
        let own: f32 = [0, 1, 3].iter().map(|id| logits[*id].exp()).sum();
        let parts = chosen(Scoring::SoftmaxOfAll, &logits, 3);
        for (n, id) in [0, 1, 3].into_iter().enumerate() {
            assert!((out[3 + n] - logits[id].exp() / own).abs() < 1e-6, "{out:?}");
            assert!((parts[3 + n] - logits[id].exp() / all).abs() < 1e-6, "{parts:?}");
        }
        assert_eq!(chosen(Scoring::SoftmaxOfChosen, &logits, 6)[..6], [0., 1., 2., 3., 4., 5.]);
        assert_eq!(chosen(Scoring::SoftmaxOfChosen, &[0.0; 4], 2), [0.0, 1.0, 0.5, 0.5]);
        let far = chosen(Scoring::SoftmaxOfChosen, &[f32::MIN, f32::NEG_INFINITY, 1e30], 2);
        assert_eq!(far, [0.0, 2.0, 0.0, 1.0]);
        for bad in [f32::NAN, f32::INFINITY] {
            let out = chosen(Scoring::SoftmaxOfChosen, &[1.0, bad, 3.0, 0.0], 2);
            assert!(out[2..].iter().any(|factor| factor.is_nan()), "{out:?}");
        }
        assert!(chosen(Scoring::SoftmaxOfAll, &[f32::NAN, 1.0], 1)[1].is_nan());
    }

    #[test]
    fn corrections_and_groups_change_the_choice_and_not_the_factors() {
        let logits = [1.0, -2.0, 0.5, 0.4, 3.0, -9.0];
        let scores = logits.map(sigmoid);
        let check = |step: &Route, correction: Option<&[f32]>, ids: &[usize], normed: bool| {
            let out = chosen(step, correction, &logits);
            let sum: f32 = ids.iter().map(|id| scores[*id]).sum();
            let sum = if normed { sum } else { 1.0 };
            for (n, id) in ids.iter().enumerate() {
                assert_eq!(out[n] as usize, *id, "{out:?}");
                let wanted = scores[*id] / sum * step.factor;
                assert!((out[ids.len() + n] - wanted).abs() < 1e-6, "{out:?}");
            }
        };
        for normed in [true, false] {
            let scoring = Scoring::Sigmoid { normed };
            let step = Route { scoring, factor: 2.5, ..route(&logits, 2) };
            check(&step, None, &[0, 4], normed);
            // 0.119 + 0.8 is more than 0.731.
            check(&step, Some(&[0.0, 0.8, 0.0, 0.0, 0.0, 0.0]), &[1, 4], normed);
            // The pair of 2 and 3 has the largest sum, then that of 4 and 5, then 0 and 1.
            let groups = |chosen| Route { groups: Some(ExpertGroups { count: 3, chosen }), ..step };
            check(&groups(1), None, &[2, 3], normed);
            check(&groups(2), None, &[2, 4], normed);
            check(&groups(3), None, &[0, 4], normed);
            check(&groups(1), Some(&[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]), &[0, 1], normed);
        }
        let scoring = Scoring::Sigmoid { normed: true };
        let groups = Some(ExpertGroups { count: 2, chosen: 1 });
        let step = Route { scoring, groups, ..route(&logits, 2) };
        assert_eq!(chosen(&step, None, &[0.0; 4]), [0.0, 1.0, 0.5, 0.5], "ties go to the lower id");
        assert!(chosen(&step, None, &[f32::NAN, 0.0, 0.0, 0.0])[2].is_nan());
    }

    fn route(logits: &[f32], chosen: u32) -> Route {
        Route {
            norm: None,
            weight: 0,
            bias: None,
            scoring: Scoring::SoftmaxOfChosen,
            correction: None,
            by_token: None,
            groups: None,
            factor: 1.0,
            experts: logits.len() as u32,
            chosen,
            input: 0,
            output: 0,
            partition: 0,
        }
    }

    /// Ids, then factors.
    fn chosen(step: &Route, correction: Option<&[f32]>, logits: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; 2 * step.chosen as usize];
        choose(step, (correction, None), &mut logits.to_vec(), &mut out);
        out
    }

    #[test]
    fn experts_of_a_token_have_the_factors_of_its_scores() {
        let logits = [1.0, -2.0, 0.5, 40.0];
        let score = |at: usize| (1.0 + f64::from(logits[at]).exp()).ln().sqrt() as f32;
        for normed in [true, false] {
            let scoring = Scoring::SqrtSoftplus { normed };
            let step = Route { scoring, factor: 1.5, ..route(&logits, 2) };
            let mut out = [0.0; 4];
            let sum = if normed { score(0) + score(1) } else { 1.0 };
            choose(&step, (None, Some(&[1.0, 0.0])), &mut logits.to_vec(), &mut out);
            assert_eq!(out[..2], [0.0, 1.0], "ascending");
            for (factor, at) in out[2..].iter().zip([0, 1]) {
                assert!((factor - score(at) / sum * 1.5).abs() < 1e-6, "{out:?}");
            }
            let best = chosen(&step, Some(&[9.0, 0.0, 0.0, 0.0]), &logits);
            assert_eq!(best[..2], [0.0, 3.0], "by corrected scores");
        }
    }

    #[test]
    fn columns_stand_behind_their_experts_in_order() {
        let choices = [[1.0, 4.0], [0.0, 4.0], [1.0, 3.0]];
        let mut grouped = Grouped::default();
        for first in [0, 1] {
            grouped.fill(first..3, 5, |column| &choices[column]);
            let all: Vec<_> = grouped
                .each()
                .flat_map(|(expert, pairs)| pairs.iter().map(move |p| (expert, p.column, p.place)))
                .collect();
            let wanted = [(0, 1, 0), (1, 0, 0), (1, 2, 0), (3, 2, 1), (4, 0, 1), (4, 1, 1)];
            let wanted: Vec<_> =
                wanted.into_iter().filter(|(_, c, _)| *c >= first as u32).collect();
            assert_eq!(all, wanted);
            assert_eq!(grouped.blocks(), 4);
        }
    }
}
