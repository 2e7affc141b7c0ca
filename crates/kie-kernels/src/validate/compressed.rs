//! Checks of steps over compressed entries and of several residual streams.

use super::{divides_pages, wanted, Check, Checker};
use crate::abi::{
    Compress, CompressedAttend, CompressedDown, CompressedHeads, CompressedIndex, CompressedQuery,
    Dtype, Entries, GroupedDown, HyperIn, HyperOut, StateAt, StateKind, STREAMS_MAX,
};

impl Checker<'_> {
    pub(super) fn compressed_down(&mut self, step: &CompressedDown) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        heads_fit(heads)?;
        wanted(step.rank > 0, || "a latent of no numbers".to_owned())?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        for ((weight, scale), rows) in
            step.weights.into_iter().zip(step.scales).zip([step.rank, heads.dim])
        {
            self.matrix(weight, [1, rows, d.hidden])?;
            self.numbers(scale, rows, "norm of a product")?;
        }
        self.tail(step.rotary.table, heads.turned)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, 1, step.rank)?;
        self.keys(step.state, heads.dim)?;
        self.keeps(step.state)?;
        self.partition(step.partition, step.rank + heads.dim)
    }

    pub(super) fn compress(&mut self, step: &Compress) -> Check {
        let d = self.program.dims;
        let Compress { dim, every, turned, .. } = *step;
        wanted(dim > 0 && turned <= dim, || format!("{turned} of {dim} numbers turn"))?;
        wanted(divides_pages(every), || format!("an entry of {every} positions"))?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        let rows = step.sets() * dim;
        for weight in step.weights {
            self.matrix(weight, [1, rows, d.hidden])?;
        }
        self.numbers(step.bias, every * rows, "bias")?;
        self.numbers(step.scale, dim, "norm of an entry")?;
        self.tail(step.rotary.table, turned)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        let state = self.group_of(step.sums)?.state;
        let end = step.first.checked_add(step.kept());
        let fits =
            matches!((state, end), (StateKind::Sums { numbers }, Some(end)) if end <= numbers);
        wanted(fits, || format!("numbers of {:?} from {}: {state:?}", step.sums, step.first))?;
        self.entries(step.entries, dim, every)?;
        self.keeps(step.entries)?;
        self.partition(step.partition, 2 * rows)
    }

    pub(super) fn compressed_index(&mut self, step: &CompressedIndex) -> Check {
        let d = self.program.dims;
        let CompressedIndex { heads, dim, turned, chosen, every, .. } = *step;
        let sized = ![heads, dim, chosen, every].contains(&0) && turned <= dim;
        wanted(sized, || format!("{heads} heads of {dim}, of which {turned} turn: {chosen}"))?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        let width = self.program.vectors.get(step.latent as usize).map_or(0, |v| v.width);
        self.reads(step.latent, 1, width)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.matrix(step.weights[0], [1, heads * dim, width])?;
        self.matrix(step.weights[1], [1, heads, d.hidden])?;
        self.tail(step.rotary.table, turned)?;
        self.entries(step.keys, dim, every)?;
        self.is_kept(step.keys)?;
        self.writes(step.output, 1, 1 + chosen)?;
        self.partition(step.partition, step.rows())
    }

    pub(super) fn compressed_query(&mut self, step: &CompressedQuery) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        heads_fit(heads)?;
        let width = self.program.vectors.get(step.input as usize).map_or(0, |v| v.width);
        self.reads(step.input, 1, width)?;
        self.matrix(step.weight, [d.lanes, heads.width(), width])?;
        self.tail(step.rotary.table, heads.turned)?;
        self.writes(step.output, d.lanes, heads.width())?;
        self.partition(step.partition, d.lanes * heads.count)
    }

    pub(super) fn compressed_attend(&mut self, step: &CompressedAttend) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        heads_fit(heads)?;
        self.tail(step.rotary.table, heads.turned)?;
        self.numbers(step.sinks, d.lanes * heads.count, "sinks")?;
        let dtype = self.keys(step.state, heads.dim)?;
        self.is_kept(step.state)?;
        let most = self.group_of(step.state)?.window;
        wanted(most.is_some_and(|most| (1..=most).contains(&step.window)), || {
            format!("a window of {} in a page group of {most:?}", step.window)
        })?;
        if let Some(Entries { state, every, choice }) = step.entries {
            let other = self.entries(state, heads.dim, every)?;
            self.is_kept(state)?;
            wanted(other == dtype, || format!("entries are {other:?}, keys {dtype:?}"))?;
            if let Some(choice) = choice {
                let width = self.program.vectors.get(choice as usize).map_or(0, |v| v.width);
                wanted(width > 1, || format!("vector {choice} holds no choice"))?;
                self.reads(choice, 1, width)?;
            }
        }
        self.reads(step.input, d.lanes, heads.width())?;
        self.writes(step.output, d.lanes * heads.groups, heads.group())
    }

    pub(super) fn grouped_down(&mut self, step: &GroupedDown) -> Check {
        let (lanes, groups) = (self.program.dims.lanes, step.groups);
        wanted(groups > 0 && step.rank > 0, || "no groups, or none of any rows".to_owned())?;
        let width = self.program.vectors.get(step.input as usize).map_or(0, |v| v.width);
        self.reads(step.input, lanes * groups, width)?;
        self.matrix(step.weight, [lanes, groups * step.rank, width])?;
        self.writes(step.output, lanes, groups * step.rank)?;
        self.partition(step.partition, lanes * groups * step.rank)
    }

    pub(super) fn hyper_in(&mut self, step: &HyperIn) -> Check {
        let d = self.program.dims;
        wanted((1..=STREAMS_MAX as u32).contains(&step.streams), || {
            format!("{} streams", step.streams)
        })?;
        wanted(step.eps.is_finite() && step.eps >= 0.0, || format!("an epsilon of {}", step.eps))?;
        let width = step.streams * d.hidden;
        self.reads(step.input, 1, width)?;
        self.matrix(step.weight, [1, step.rows(), width])?;
        self.numbers(step.base, step.rows(), "base")?;
        self.numbers(step.scale, if step.join.is_some() { 3 } else { 1 }, "scale")?;
        self.writes(step.output, d.lanes, d.hidden)?;
        if let Some(join) = step.join {
            wanted(join.rounds > 0, || "no rounds".to_owned())?;
            self.writes(join.mix, 1, step.streams * (1 + step.streams))?;
            self.writes(join.sum, d.lanes, d.hidden)?;
        }
        self.partition(step.partition, step.rows())
    }

    pub(super) fn hyper_out(&mut self, step: &HyperOut) -> Check {
        let d = self.program.dims;
        wanted((1..=STREAMS_MAX as u32).contains(&step.streams), || {
            format!("{} streams", step.streams)
        })?;
        self.reads(step.mix, 1, step.streams * (1 + step.streams))?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.reads(step.residual, 1, step.streams * d.hidden)?;
        self.writes(step.residual, 1, step.streams * d.hidden)?;
        self.partition(step.partition, d.hidden)
    }

    /// A rotary table of so many features, all of which turn.
    fn tail(&self, table: u32, turned: u32) -> Check {
        self.rotary(table, turned)?;
        let pairs = self.found(table)?.cols;
        wanted(2 * pairs == turned, || format!("{pairs} pairs turn of {turned} features"))
    }

    /// The place exists, is windowed and keeps such keys; the format of their numbers.
    fn keys(&self, at: StateAt, dim: u32) -> Result<Dtype, String> {
        let group = self.group_of(at)?;
        match group.state {
            StateKind::Latents { dtype, width } if width == dim && group.window.is_some() => {
                Ok(dtype)
            }
            state => Err(format!("{at:?} keeps {state:?}, not keys of {dim} in a window")),
        }
    }

    /// The place exists and keeps such entries; the format of their numbers.
    fn entries(&self, at: StateAt, dim: u32, of: u32) -> Result<Dtype, String> {
        let group = self.group_of(at)?;
        match group.state {
            StateKind::Entries { dtype, width, every }
                if (width, every) == (dim, of) && group.window.is_none() =>
            {
                Ok(dtype)
            }
            state => Err(format!("{at:?} keeps {state:?}, not entries of {dim} for {of}")),
        }
    }
}

fn heads_fit(heads: CompressedHeads) -> Check {
    let CompressedHeads { count, dim, turned, groups } = heads;
    let fits = ![count, dim, groups].contains(&0)
        && turned <= dim
        && turned.is_multiple_of(2)
        && count.is_multiple_of(groups);
    wanted(fits, || format!("heads on one key: {heads:?}"))
}
