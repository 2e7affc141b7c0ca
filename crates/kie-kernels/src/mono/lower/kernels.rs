//! Which decode kernels a partition has: of how many columns, how they read keys and values, and
//! whether they check drafts.

use super::layout::{Kind, Layout};
use super::model::{Class, Model};
use super::partition::{ClassPartition, Partition};
use crate::abi::PAGE;
use crate::machine::Platform;

impl Partition {
    /// The kernels of this partition.
    pub fn kernels(&self, model: &Model, platform: Platform) -> Vec<Kind> {
        // Bits do not depend on neighbours: where sequences are long, all kernels stream, or none.
        let streamed =
            platform != Platform::Hip && [1, self.columns].iter().all(|c| self.streams(model, *c));
        // Attention whose numbers have two parts loads its pages (ops/attend_exact.h).
        let streamed = streamed && model.parts == 1;
        // So does attention over latents (ops/latent.h).
        let plain = |c: &Class| c.latent.is_none() && c.compressed.is_none();
        let streamed = streamed && model.classes.iter().all(plain);
        let drafting = Kind { columns: self.columns, streamed, lookup: true };
        if model.mtp.is_some() {
            // Its columns are those of a kernel that checks drafts.
            return vec![drafting];
        }
        let mut all = Vec::new();
        if !streamed || self.streams_from(model) > 0 {
            all.push(Kind::plain(1, false));
        }
        if streamed {
            all.push(Kind::plain(1, streamed));
        }
        if self.columns > 1 {
            all.push(Kind::plain(self.columns, streamed));
        }
        all.extend(self.drafts(model, drafting).then_some(drafting));
        all
    }

    /// Whether steps can have drafts: there are columns for them, and shared memory has room.
    fn drafts(&self, model: &Model, kind: Kind) -> bool {
        self.columns > 1 && Layout::new(model, self, kind).is_ok()
    }

    /// Whether pages fit the ring's slots, and shared memory what joins them (stream.h).
    fn streams(&self, model: &Model, columns: u32) -> bool {
        let room = |(class, p): (&Class, &ClassPartition)| {
            if p.delta.is_some() {
                return 0;
            }
            let heads =
                if columns > 1 { self.warps * (class.group() + 2) * p.head_dim * 2 } else { 0 };
            heads + self.warps * (p.head_dim / 16) * 8 * class.group().div_ceil(2) * 16
        };
        let room = model.classes.iter().zip(&self.classes).map(room).max().unwrap_or(0);
        let there = room <= self.vector_bytes(model, columns);
        let own = if there { 0 } else { room };
        self.classes
            .iter()
            .all(|c| c.delta.is_some() || PAGE as u32 * c.head_dim * 2 <= self.slot_bytes)
            && self.shared_bytes(model, columns) + own <= self.shared_max
    }

    /// The first position that the kernel of one column with streamed keys is for. Where a step is
    /// short, loads are sooner as long as no block has two pages; then both make the same bits.
    pub fn streams_from(&self, model: &Model) -> u32 {
        let long = self.read_bytes(model) >= self.tuning.long_stream_bytes;
        let attend = self.classes.iter().filter(|c| c.delta.is_none());
        let splits = attend.map(|c| c.kv_splits).min().unwrap_or(0);
        if long {
            0
        } else {
            splits * PAGE as u32
        }
    }
}
