//! Latent attention, by one member: the latents of a pass, queries that meet them, and values made
//! of what the queries saw. Heads' keys are never made: what would make them is applied to queries.

use std::ops::Range;

use super::steps::{add, intersect, Attending};
use super::{Column, Walk, DECODE_COLUMNS, LATENT_HEADS};
use crate::abi::{
    Dtype, LatentAttend, LatentDown, LatentHeads, LatentQuery, LatentUp, StateAt, StateKind, PAGE,
};
use crate::cpu::attention::KvPage;
use crate::cpu::matmul::matmul;
use crate::matrix::row_to_f32;
use crate::numbers::store_f32;

impl Walk<'_> {
    pub(super) fn latent_down(&self, step: &LatentDown) {
        let weights = [step.query.map(|[weight, _]| weight), Some(step.weight)];
        let mut both = [step.weight; 2];
        both.iter_mut().zip(weights.iter().flatten()).for_each(|(to, weight)| *to = *weight);
        self.norm(step.norm, step.input, &both[..weights.iter().flatten().count()]);
        let hidden = self.dims().hidden as usize;
        let query = step.query.map_or(0, |_| step.width as usize);
        let stride = query + step.heads.key() as usize;
        // Lanes hold the same residual stream.
        let x = self.normed(0, hidden);
        let parts = weights.into_iter().zip([0..query, query..stride]);
        let parts = parts.filter_map(|(weight, rows)| Some((weight?, rows)));
        self.multiply_stacked(parts, stride, &self.rows(step.partition), x);
        self.barrier.wait();
        for column in self.mine(self.columns.len()) {
            let at = self.at(0, column, stride);
            // SAFETY: one member a column.
            let raw = unsafe { self.pass.raw.write(at..at + stride) };
            let (query, kept) = raw.split_at_mut(query);
            let out = self.write(step.output, 0, column, 0..step.width as usize);
            match step.query {
                Some([_, norm]) => {
                    self.scaled(step.eps, norm, query);
                    out.copy_from_slice(query);
                }
                None => out.copy_from_slice(&x[column * hidden..][..hidden]),
            }
            let (latent, key) = kept.split_at_mut(step.heads.rank as usize);
            self.scaled(step.eps, step.scale, latent);
            self.rotate(step.rotary, column, key);
            self.store_latent(step.state, column, kept);
        }
    }

    /// RMSNorm in place.
    pub(super) fn scaled(&self, eps: f32, scale: u32, x: &mut [f32]) {
        let factor = self.factor_by(eps, x);
        x.iter_mut()
            .zip(self.pass.constant(scale))
            .for_each(|(x, scale)| *x = scale * (*x * factor));
    }

    /// Bytes of a layer's positions in one page, and the format of their numbers.
    pub(super) fn latents_at(&self, state: StateAt, page: usize) -> (Range<usize>, Dtype) {
        let group = &self.pass.program.groups[state.group as usize];
        let StateKind::Latents { dtype, .. } = group.state else {
            unreachable!("the validator saw latents");
        };
        let layer = group.state.layer_bytes() as usize;
        let first = page * group.page_bytes() as usize + state.layer as usize * layer;
        (first..first + layer, dtype)
    }

    pub(super) fn store_latent(&self, state: StateAt, column: usize, x: &[f32]) {
        let Column { slot, position, .. } = self.columns[column];
        let (place, dtype) = self.latents_at(state, self.page(state, slot, position / PAGE));
        let bytes = x.len() * dtype.bytes();
        let at = place.start + position % PAGE * bytes;
        // SAFETY: one member a column, and a position of a slot is one column.
        let out = unsafe { self.pass.pages[state.group as usize].write(at..at + bytes) };
        store_f32(dtype, x, out);
    }

    /// This member's heads of each lane.
    fn latent_heads(&self, heads: LatentHeads, partition: u32, each: impl Fn(usize, Range<usize>)) {
        let (mine, count) = (self.rows(partition), heads.count as usize);
        for lane in 0..self.dims().lanes as usize {
            let first = lane * count;
            let part = intersect(&mine, first..first + count);
            each(lane, part.start - first..part.end - first);
        }
    }

    pub(super) fn latent_query(&self, step: &LatentQuery) {
        let (each, stride) = (step.heads.query() as usize, step.heads.count * step.heads.query());
        let (stride, all) = (stride as usize, self.columns.len());
        let width = self.pass.program.vectors[step.input as usize].width as usize;
        let input = |columns: Range<usize>| {
            let at = self.at(0, columns.start, width);
            // SAFETY: nobody writes the input in this step.
            unsafe { self.pass.vectors[step.input as usize].read(at..at + columns.len() * width) }
        };
        self.pack_input(&[step.weight], width, 1, |_| input(self.decode..all));
        self.latent_heads(step.heads, step.partition, |lane, heads| {
            let rows = heads.start * each..heads.end * each;
            let at = self.at(lane, 0, stride) + rows.start;
            let out = self.output(&self.pass.raw, at, rows.len(), stride);
            self.multiply(&self.pass.matrix(step.weight, lane), rows, input(0..all), 0, out);
            heads.for_each(|head| self.absorb(step, lane, head));
        });
    }

    /// One head's queries of all columns, to where latents meet them.
    fn absorb(&self, step: &LatentQuery, lane: usize, head: usize) {
        if !self.goes_on() {
            return;
        }
        let [rank, plain] = [step.heads.rank, step.heads.plain].map(|size| size as usize);
        let [query, key] = [step.heads.query(), step.heads.key()].map(|size| size as usize);
        let up = self.pass.matrix(step.up, lane);
        let raw = |column: usize| {
            let at = self.at(lane, column, step.heads.count as usize * query) + head * query;
            // SAFETY: this member's own rows.
            unsafe { self.pass.raw.read(at..at + query) }
        };
        let out = |column| self.write(step.output, lane, column, head * key..(head + 1) * key);
        for column in 0..self.columns.len() {
            let (latent, turned) = out(column).split_at_mut(rank);
            latent.fill(0.0);
            turned.copy_from_slice(&raw(column)[plain..]);
            self.rotate(step.rotary, column, turned);
        }
        let row = &mut self.scratch().latents[..rank];
        for n in 0..plain {
            row_to_f32(&up, head * step.heads.up() as usize + n, row);
            for column in 0..self.columns.len() {
                add(&mut out(column)[..rank], row, raw(column)[n]);
            }
        }
    }

    pub(super) fn latent_attend(&self, step: &LatentAttend) {
        let (count, dim) = (step.heads.count as usize, step.heads.key() as usize);
        let parts = count.div_ceil(LATENT_HEADS);
        let pages = &self.pass.pages[step.state.group as usize];
        let (_, dtype) = self.latents_at(step.state, 0);
        let page = |page: usize| {
            // SAFETY: latents were stored before the last barrier.
            let rows = unsafe { pages.read(self.latents_at(step.state, page).0) };
            KvPage { k: rows, v: rows }
        };
        self.attend_items(self.dims().lanes as usize * parts, |part, columns| {
            let first = part % parts * LATENT_HEADS;
            let attending = Attending {
                vectors: [step.input, step.output],
                lane: part / parts,
                heads: first..count.min(first + LATENT_HEADS),
                dim,
                scale: step.scale,
                sinks: None,
                window: None,
                state: step.state,
                dtype,
            };
            self.attend_pages(&attending, columns, page);
        });
    }

    /// In float32 for all columns.
    pub(super) fn latent_up(&self, step: &LatentUp) {
        let LatentHeads { count, rank, plain, value, .. } = step.heads;
        let [count, rank, plain, value] = [count, rank, plain, value].map(|size| size as usize);
        let (key, up) = (step.heads.key() as usize, step.heads.up() as usize);
        let all = self.columns.len();
        self.latent_heads(step.heads, step.partition, |lane, heads| {
            let matrix = self.pass.matrix(step.weight, lane);
            for head in heads {
                let rows = head * up + plain..(head + 1) * up;
                let at = self.at(lane, 0, count * value) + head * value;
                let field = &self.pass.vectors[step.output as usize];
                let mut out = self.output(field, at, value, count * value);
                for begin in (0..all).step_by(DECODE_COLUMNS) {
                    if !self.goes_on() {
                        return;
                    }
                    let columns = begin..all.min(begin + DECODE_COLUMNS);
                    let x = &mut self.scratch().latents[..columns.len() * rank];
                    for (x, column) in x.chunks_exact_mut(rank).zip(columns.clone()) {
                        let seen = head * key..head * key + rank;
                        x.copy_from_slice(self.read(step.input, lane, column, seen));
                    }
                    let y = out.some(columns, 0..value);
                    matmul(self.pass.level, &matrix, rows.clone(), x, y, self.digits());
                }
            }
        });
    }
}
