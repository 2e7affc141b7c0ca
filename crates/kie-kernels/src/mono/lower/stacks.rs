//! How experts that columns chose are multiplied: which ones as one, and how many pairs of an
//! expert and a column at a time.

use super::layout::TEAM;
use super::matrix::Matrix;
use super::partition::ClassPartition;
use super::tiling::Stack;

impl ClassPartition {
    /// Floats of the parts that warps leave for each other of the router, and of gate and up: of
    /// all experts of a column, or of two batches of pairs of an expert and a column.
    pub fn expert_floats(&self, columns: u32, slot_bytes: u32) -> u32 {
        let Some(e) = &self.experts else { return 0 };
        let gate_up = self.tiling(Matrix::GateUp);
        let pairs = if columns > 1 { 2 * self.batch(columns, slot_bytes) } else { e.chosen };
        let router = self.tiling(Matrix::Router).part_floats(columns);
        (pairs * gate_up.k_warps * gate_up.rows).max(router)
    }

    /// Pairs of an expert and one of several columns whose activations are published together: at
    /// least those of a stack.
    pub fn batch(&self, columns: u32, slot_bytes: u32) -> u32 {
        let gate_up = self.tiling(Matrix::GateUp);
        let stacked = self.stack(columns, slot_bytes).map_or(1, |stack| stack.experts);
        let turns = if stacked * gate_up.rows <= 16 { 2 } else { 1 };
        turns * columns * stacked
    }

    /// Pairs whose activations are on their way to a warp's share of down at once, of several
    /// columns: a lane has so many loads in flight.
    pub fn gathered(&self) -> u32 {
        const LOADS: u32 = 8;
        let loads = |pairs: u32| (pairs * self.tiling(Matrix::Down).pairs * 8).div_ceil(TEAM);
        [8, 4, 2].into_iter().find(|pairs| loads(*pairs) <= LOADS).unwrap_or(1)
    }

    /// How experts can be stacked; `Partition::stack` says where it is worth it.
    pub(super) fn stack(&self, columns: u32, slot_bytes: u32) -> Option<Stack> {
        let (e, t) = (self.experts?, self.tiling(Matrix::GateUp));
        // One column's are as many each time; of several the last stack may be short.
        let even = |n: u32| columns > 1 || e.chosen.is_multiple_of(n);
        let good = |n: &u32| even(*n) && n * t.stage_bytes <= slot_bytes && t.stacks(*n);
        let experts = (2..=Stack::MOST.min(e.chosen)).rev().find(good)?;
        Some(Stack { experts })
    }
}
