//! Attention over a window and compressed entries, by one member: keys of a window's positions,
//! entries that are made of positions, the choice among them, and what queries see of both.
//!
//! Running softmaxes are by channel: an item is some channels of one sequence, whose columns a
//! member walks in order.

use std::ops::Range;

use super::states::Place;
use super::steps::{intersect, turn};
use super::{angles_at, Column, Walk, LATENT_HEADS};
use crate::abi::{
    Compress, CompressedAttend, CompressedDown, CompressedIndex, CompressedQuery, Dtype, Entries,
    GroupedDown, Rotary, StateAt, StateKind, PAGE,
};
use crate::cpu::attention::{self, KvPage};
use crate::cpu::compressed::{choose, load, pool, score, EMPTY, INDEX_COLUMNS, RUNNING};
use crate::numbers::store_f32;

/// Channels of an item.
const CHANNELS: usize = 64;
/// Entries that one item scores.
const INDEX_ENTRIES: usize = 64;

impl Walk<'_> {
    pub(super) fn compressed_down(&self, step: &CompressedDown) {
        self.norm(step.norm, step.input, &step.weights);
        let hidden = self.dims().hidden as usize;
        let rank = step.rank as usize;
        let stride = rank + step.heads.dim as usize;
        // Lanes hold the same residual stream.
        let x = self.normed(0, hidden);
        let parts = step.weights.into_iter().zip([0..rank, rank..stride]);
        self.multiply_stacked(parts, stride, &self.rows(step.partition), x);
        self.barrier.wait();
        for column in self.mine(self.columns.len()) {
            let at = self.at(0, column, stride);
            // SAFETY: one member a column.
            let raw = unsafe { self.pass.raw.write(at..at + stride) };
            let (latent, key) = raw.split_at_mut(rank);
            let eps = self.dims().eps;
            self.scaled(eps, step.scales[0], latent);
            self.write(step.output, 0, column, 0..rank).copy_from_slice(latent);
            self.scaled(eps, step.scales[1], key);
            self.rotate(step.rotary, column, tail(key, step.heads.turned));
            self.store_latent(step.state, column, key);
        }
    }

    pub(super) fn compress(&self, step: &Compress) {
        self.norm(step.norm, step.input, &step.weights);
        let (hidden, dim) = (self.dims().hidden as usize, step.dim as usize);
        let rows = step.sets() as usize * dim;
        let x = self.normed(0, hidden);
        let parts = step.weights.into_iter().zip([0..rows, rows..2 * rows]);
        self.multiply_stacked(parts, 2 * rows, &self.rows(step.partition), x);
        self.barrier.wait();
        let parts = dim.div_ceil(CHANNELS);
        let channels = |part: usize| part * CHANNELS..dim.min((part + 1) * CHANNELS);
        let items = self
            .sequences()
            .flat_map(|columns| (0..parts).map(move |part| (columns.clone(), channels(part))));
        let blocks = self.pass.program.blocks as usize;
        for (columns, channels) in items.skip(self.member).step_by(blocks) {
            self.pool_channels(step, columns, channels);
        }
        self.barrier.wait();
        for column in self.mine(self.columns.len()) {
            if self.ends(step.every, column) {
                self.finish_entry(step, column);
            }
        }
    }

    /// Whether a column's position is an entry's last one.
    fn ends(&self, every: u32, column: usize) -> bool {
        (self.columns[column].position + 1).is_multiple_of(every as usize)
    }

    /// Some channels of one sequence: entries that end take the place of what they were made of.
    fn pool_channels(&self, step: &Compress, columns: Range<usize>, channels: Range<usize>) {
        let (dim, sets) = (step.dim as usize, step.sets() as usize);
        let first = step.first as usize;
        let numbers = |channel: usize| first + channel * sets * RUNNING;
        let part = numbers(channels.start)..numbers(channels.end);
        let place = Place { state: step.sums, slot: self.columns[columns.start].slot, part };
        let (state, begins) = self.recall(&place, self.columns[columns.start].position);
        let (state, _) = state.as_chunks_mut::<RUNNING>();
        if begins {
            state.fill(EMPTY);
        }
        let bias = self.pass.constant(step.bias);
        for column in columns {
            if !self.goes_on() {
                return;
            }
            let position = self.columns[column].position;
            let ends = self.ends(step.every, column);
            let bias = &bias[position % step.every as usize * sets * dim..];
            let at = self.at(0, column, 2 * sets * dim);
            let place_of = |number: usize| at + number..at + number + channels.len();
            // SAFETY: these channels of this sequence are the item's own.
            let raw = |number: usize| unsafe { self.pass.raw.read(place_of(number)) };
            let [of_own, of_other] = [sets - 1, 0].map(|set| set * dim + channels.start);
            let both = [of_other, of_own].map(|at| (raw(at), raw(sets * dim + at), &bias[at..]));
            let mut made = [0.0; CHANNELS];
            for (n, state) in state.chunks_exact_mut(sets).enumerate() {
                let taken = both.map(|(value, score, bias)| [score[n] + bias[n], value[n]]);
                made[n] = pool(state, &taken[2 - sets..], ends).unwrap_or_default();
            }
            if ends {
                // SAFETY: as above.
                let out = unsafe { self.pass.raw.write(place_of(of_other)) };
                out.copy_from_slice(&made[..channels.len()]);
            }
            self.keep(&place, column, state.as_flattened());
        }
    }

    /// Norms, turns and stores the entry that ends at a column.
    fn finish_entry(&self, step: &Compress, column: usize) {
        let (dim, at) =
            (step.dim as usize, self.at(0, column, (2 * step.sets() * step.dim) as usize));
        // SAFETY: one member a column.
        let entry = unsafe { self.pass.raw.write(at..at + dim) };
        self.scaled(self.dims().eps, step.scale, entry);
        let Column { slot, position, .. } = self.columns[column];
        let begin = position + 1 - step.every as usize;
        self.rotate_at(step.rotary, begin, tail(entry, step.turned));
        let (place, dtype) = self.entry_at(step.entries, slot, position / step.every as usize);
        // SAFETY: one member a column, and one column ends an entry.
        let out = unsafe { self.pass.pages[step.entries.group as usize].write(place) };
        store_f32(dtype, entry, out);
    }

    /// Bytes of an entry of a sequence, by its number, and the format of its numbers.
    fn entry_at(&self, state: StateAt, slot: usize, number: usize) -> (Range<usize>, Dtype) {
        let group = &self.pass.program.groups[state.group as usize];
        let StateKind::Entries { dtype, width, every } = group.state else {
            unreachable!("the validator saw entries");
        };
        // In the page of its last position.
        let last = (number + 1) * every as usize - 1;
        let page = self.page(state, slot, last / PAGE) * group.page_bytes() as usize;
        let layer = state.layer as usize * group.state.layer_bytes() as usize;
        let bytes = width as usize * dtype.bytes();
        let at = page + layer + last % PAGE / every as usize * bytes;
        (at..at + bytes, dtype)
    }

    /// Entries that are complete at a column's position.
    fn complete(&self, every: u32, column: usize) -> usize {
        (self.columns[column].position + 1) / every as usize
    }

    pub(super) fn compressed_index(&self, step: &CompressedIndex) {
        self.norm(step.norm, step.input, &[]);
        let most = step.chosen as usize;
        let all = 0..self.columns.len();
        // All members see the same.
        let scored = all.clone().any(|column| self.complete(step.every, column) > most);
        if scored {
            self.index_queries(step);
        }
        for columns in
            all.clone().step_by(INDEX_COLUMNS).map(|at| at..all.end.min(at + INDEX_COLUMNS))
        {
            if scored {
                self.score_entries(step, columns.clone());
                self.barrier.wait();
            }
            for column in self.mine(columns.len()) {
                self.choose_entries(step, columns.start, column);
            }
            if scored {
                self.barrier.wait();
            }
        }
    }

    /// Queries and weights of an indexer, into `raw`.
    fn index_queries(&self, step: &CompressedIndex) {
        let hidden = self.dims().hidden as usize;
        let (heads, dim) = (step.heads as usize, step.dim as usize);
        let stride = step.rows() as usize;
        let mine = self.rows(step.partition);
        let width = self.pass.program.vectors[step.latent as usize].width as usize;
        let inputs = [self.whole(step.latent, 0, width), self.normed(0, hidden)];
        let parts = [0..heads * dim, heads * dim..stride];
        for ((weight, all), x) in step.weights.into_iter().zip(parts).zip(inputs) {
            let part = intersect(&mine, all.clone());
            let rows = part.start - all.start..part.end - all.start;
            let out = self.output(&self.pass.raw, part.start, rows.len(), stride);
            self.exactly(&self.pass.matrix(weight, 0), rows, x, out);
        }
        self.barrier.wait();
        for column in self.mine(self.columns.len()) {
            let at = self.at(0, column, stride);
            // SAFETY: one member a column.
            let q = unsafe { self.pass.raw.write(at..at + heads * dim) };
            for q in q.chunks_exact_mut(dim) {
                self.rotate(step.rotary, column, tail(q, step.turned));
            }
        }
        self.barrier.wait();
    }

    /// Scores of all entries that some columns could see, where they are more than are chosen.
    fn score_entries(&self, step: &CompressedIndex, columns: Range<usize>) {
        let (heads, dim) = (step.heads as usize, step.dim as usize);
        let stride = step.rows() as usize;
        let factor = 1.0 / ((dim * heads) as f32).sqrt();
        let room = self.pass.most_entries;
        let items = columns.clone().flat_map(|column| {
            let complete = self.complete(step.every, column);
            let scored = if complete > step.chosen as usize { complete } else { 0 };
            let blocks = (0..scored).step_by(INDEX_ENTRIES);
            blocks.map(move |begin| (column, begin..scored.min(begin + INDEX_ENTRIES)))
        });
        let key = &mut self.scratch().compressed.key[..dim];
        let blocks = self.pass.program.blocks as usize;
        for (column, entries) in items.skip(self.member).step_by(blocks) {
            if !self.goes_on() {
                return;
            }
            let at = self.at(0, column, stride);
            // SAFETY: written before the last barrier.
            let raw = unsafe { self.pass.raw.read(at..at + stride) };
            let (q, weights) = raw.split_at(heads * dim);
            let first = (column - columns.start) * room;
            // SAFETY: these entries of this column are the item's own.
            let out = unsafe { self.pass.scores.write(first + entries.start..first + entries.end) };
            for (out, entry) in out.iter_mut().zip(entries) {
                let slot = self.columns[column].slot;
                let (place, dtype) = self.entry_at(step.keys, slot, entry);
                // SAFETY: entries were stored in an earlier step.
                let stored = unsafe { self.pass.pages[step.keys.group as usize].read(place) };
                load(dtype, stored, key);
                *out = factor * score(q, weights, key);
            }
        }
    }

    /// The entries of one column: those with the largest scores, or all.
    fn choose_entries(&self, step: &CompressedIndex, first: usize, column: usize) {
        let complete = self.complete(step.every, first + column);
        let most = step.chosen as usize;
        let out = self.write(step.output, 0, first + column, 0..1 + most);
        let (count, ids) = out.split_at_mut(1);
        count[0] = complete.min(most) as f32;
        if complete <= most {
            ids.iter_mut().enumerate().for_each(|(n, id)| *id = n as f32);
            return;
        }
        let at = column * self.pass.most_entries;
        // SAFETY: written before the last barrier.
        let scores = unsafe { self.pass.scores.read(at..at + complete) };
        let order = &mut self.scratch().compressed.order;
        choose(scores, most, order);
        ids.iter_mut().zip(order).for_each(|(id, entry)| *id = *entry as f32);
    }

    pub(super) fn compressed_query(&self, step: &CompressedQuery) {
        let (dim, count) = (step.heads.dim as usize, step.heads.count as usize);
        let width = self.pass.program.vectors[step.input as usize].width as usize;
        let x = self.whole(step.input, 0, width);
        self.pack_input(&[step.weight], width, 1, |_| &x[self.decode * width..]);
        let mine = self.rows(step.partition);
        for lane in 0..self.dims().lanes as usize {
            let part = intersect(&mine, lane * count..(lane + 1) * count);
            let heads = part.start - lane * count..part.end - lane * count;
            let rows = heads.start * dim..heads.end * dim;
            let at = self.at(lane, 0, count * dim) + rows.start;
            let field = &self.pass.vectors[step.output as usize];
            let out = self.output(field, at, rows.len(), count * dim);
            self.multiply(&self.pass.matrix(step.weight, lane), rows.clone(), x, 0, out);
            for column in 0..self.columns.len() {
                let q = self.write(step.output, lane, column, rows.clone());
                for q in q.chunks_exact_mut(dim) {
                    let factor = self.factor_by(self.dims().eps, q);
                    q.iter_mut().for_each(|x| *x *= factor);
                    self.rotate(step.rotary, column, tail(q, step.heads.turned));
                }
            }
        }
    }

    pub(super) fn compressed_attend(&self, step: &CompressedAttend) {
        let heads = step.heads;
        let (lanes, groups) = (self.dims().lanes as usize, heads.groups as usize);
        let each = (heads.count / heads.groups) as usize;
        let parts = each.div_ceil(LATENT_HEADS);
        for item in self.mine(self.columns.len() * lanes * groups * parts) {
            // Consecutive items are the heads of one column.
            let (column, part) = (item / (lanes * groups * parts), item % (lanes * groups * parts));
            if !self.goes_on() {
                return;
            }
            let (group, first) = (part / parts, part % parts * LATENT_HEADS);
            self.attend_entries(step, column, group, first..each.min(first + LATENT_HEADS));
        }
    }

    /// Some heads of one group, counted over all lanes, for one column.
    fn attend_entries(
        &self,
        step: &CompressedAttend,
        column: usize,
        group: usize,
        heads: Range<usize>,
    ) {
        let (dim, groups) = (step.heads.dim as usize, step.heads.groups as usize);
        let (lane, own) = (group / groups, group % groups);
        let each = (step.heads.count / step.heads.groups) as usize;
        let first = own * each + heads.start;
        let q = self.read(step.input, lane, column, first * dim..(first + heads.len()) * dim);
        let sinks = self.pass.constant(step.sinks);
        let sinks = &sinks[lane * step.heads.count as usize + first..][..heads.len()];
        let out = self.write(step.output, group, column, heads.start * dim..heads.end * dim);
        let scratch = self.scratch();
        let (rows, dtype) = (&mut scratch.compressed.rows, self.latents_at(step.state, 0).1);
        let seen = self.gather(step, column, rows);
        let page = dim * dtype.bytes() * PAGE;
        let page = |at: usize| KvPage { k: &rows[at * page..], v: &rows[at * page..] };
        let scale = 1.0 / (dim as f32).sqrt();
        let (level, scratch) = (self.pass.level, &mut scratch.attention);
        attention::attend(
            level,
            dtype,
            dim,
            q,
            page,
            0..=seen - 1,
            scale,
            Some(sinks),
            out,
            scratch,
        );
        for out in out.chunks_exact_mut(dim) {
            self.rotate_back(step.rotary, column, tail(out, step.heads.turned));
        }
    }

    /// Copies the stored rows that a column sees: entries, then keys of the window. How many.
    fn gather(&self, step: &CompressedAttend, column: usize, rows: &mut [u8]) -> usize {
        let Column { slot, position, .. } = self.columns[column];
        let dim = step.heads.dim as usize;
        let mut count = 0;
        let mut copy = |group: u32, place: Range<usize>| {
            let bytes = place.len();
            // SAFETY: stored in an earlier step.
            let stored = unsafe { self.pass.pages[group as usize].read(place) };
            rows[count * bytes..(count + 1) * bytes].copy_from_slice(stored);
            count += 1;
        };
        if let Some(Entries { state, every, choice }) = step.entries {
            let mut entry = |number: usize| copy(state.group, self.entry_at(state, slot, number).0);
            match choice {
                None => (0..self.complete(every, column)).for_each(&mut entry),
                Some(choice) => {
                    let width = self.pass.program.vectors[choice as usize].width as usize;
                    let choice = self.read(choice, 0, column, 0..width);
                    let chosen = &choice[1..1 + choice[0] as usize];
                    chosen.iter().for_each(|number| entry(*number as usize));
                }
            }
        }
        for at in (position + 1).saturating_sub(step.window as usize)..=position {
            let (page, dtype) = self.latents_at(step.state, self.page(step.state, slot, at / PAGE));
            let bytes = dim * dtype.bytes();
            let first = page.start + at % PAGE * bytes;
            copy(step.state.group, first..first + bytes);
        }
        count
    }

    pub(super) fn grouped_down(&self, step: &GroupedDown) {
        let (lanes, groups) = (self.dims().lanes as usize, step.groups as usize);
        let rank = step.rank as usize;
        let width = self.pass.program.vectors[step.input as usize].width as usize;
        let mine = self.rows(step.partition);
        for group in 0..groups {
            // Of each lane the same one: a lane has one place for packed columns.
            let input = |lane: usize| self.whole(step.input, lane * groups + group, width);
            self.pack_input(&[step.weight], width, lanes, |lane| {
                &input(lane)[self.decode * width..]
            });
            for lane in 0..lanes {
                let first = lane * groups * rank;
                let all = first + group * rank..first + (group + 1) * rank;
                let part = intersect(&mine, all);
                let rows = part.start - first..part.end - first;
                let at = self.at(lane, 0, groups * rank) + rows.start;
                let field = &self.pass.vectors[step.output as usize];
                let out = self.output(field, at, rows.len(), groups * rank);
                self.multiply(&self.pass.matrix(step.weight, lane), rows, input(lane), lane, out);
            }
            if self.decode < self.columns.len() {
                self.barrier.wait();
            }
        }
    }

    /// Turns features as at a position that is no column's.
    fn rotate_at(&self, rotary: Rotary, position: usize, x: &mut [f32]) {
        let table = self.angles_of(rotary);
        let angles = &mut self.scratch().compressed.angles[..2 * table.pairs[0].len()];
        angles_at(&table.pairs, position, angles);
        turn(rotary.interleaved, angles, x);
    }

    /// Turns features back from a column's position.
    fn rotate_back(&self, rotary: Rotary, column: usize, x: &mut [f32]) {
        // What turns forth, mirrored: pairs (a, -b).
        let mirror = |x: &mut [f32]| {
            let half = x.len() / 2;
            match rotary.interleaved {
                true => x.iter_mut().skip(1).step_by(2).for_each(|x| *x = -*x),
                false => x[half..].iter_mut().for_each(|x| *x = -*x),
            }
        };
        mirror(x);
        self.rotate(rotary, column, x);
        mirror(x);
    }
}

/// The last features of a head.
fn tail(x: &mut [f32], turned: u32) -> &mut [f32] {
    let first = x.len() - turned as usize;
    &mut x[first..]
}
