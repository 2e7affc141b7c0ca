//! Which block does which rows of a step: even shares, on multiples of what a unit of work is.

use crate::abi::{Dims, Step, StepKind};

/// Rows that one block takes at least: an AMX or mma tile.
const TILE_ROWS: u32 = 16;
/// The same of a router, which has few.
const ROUTER_ROWS: u32 = 4;

/// Fills in the steps' partitions and returns [`crate::abi::Program::row_partition`].
pub fn partition_rows(steps: &mut [Step], dims: &Dims, blocks: u32) -> Vec<u32> {
    let mut ends = Vec::new();
    for step in steps {
        let (partition, rows, unit) = match &mut step.kind {
            StepKind::Qkv(qkv) => {
                let heads = dims.lanes * qkv.all_heads();
                (&mut qkv.partition, heads, 1)
            }
            StepKind::DeltaIn(delta) => {
                let rows = dims.lanes * delta.rows();
                (&mut delta.partition, rows, TILE_ROWS)
            }
            StepKind::LatentDown(down) => {
                let rows = down.query.map_or(0, |_| down.width) + down.heads.key();
                (&mut down.partition, rows, TILE_ROWS)
            }
            StepKind::LatentQuery(query) => {
                (&mut query.partition, dims.lanes * query.heads.count, 1)
            }
            StepKind::LatentUp(up) => (&mut up.partition, dims.lanes * up.heads.count, 1),
            StepKind::CompressedDown(down) => {
                (&mut down.partition, down.rank + down.heads.dim, TILE_ROWS)
            }
            StepKind::Compress(compress) => {
                let rows = 2 * compress.sets() * compress.dim;
                (&mut compress.partition, rows, TILE_ROWS)
            }
            StepKind::CompressedIndex(index) => {
                let rows = index.rows();
                (&mut index.partition, rows, TILE_ROWS)
            }
            StepKind::CompressedQuery(query) => {
                (&mut query.partition, dims.lanes * query.heads.count, 1)
            }
            StepKind::GroupedDown(down) => {
                (&mut down.partition, dims.lanes * down.groups * down.rank, TILE_ROWS)
            }
            StepKind::HyperIn(hyper) => {
                let rows = hyper.rows();
                (&mut hyper.partition, rows, ROUTER_ROWS)
            }
            StepKind::HyperOut(hyper) => (&mut hyper.partition, dims.hidden, TILE_ROWS),
            StepKind::Project(project) => (&mut project.partition, dims.hidden, TILE_ROWS),
            StepKind::ProjectNormed(project) => (&mut project.partition, dims.hidden, TILE_ROWS),
            StepKind::GateUp(gate_up) => {
                (&mut gate_up.partition, dims.lanes * gate_up.ffn, TILE_ROWS)
            }
            StepKind::Route(route) => (&mut route.partition, route.experts, ROUTER_ROWS),
            StepKind::ExpertsGateUp(experts) => {
                (&mut experts.partition, dims.lanes * experts.ffn, TILE_ROWS)
            }
            StepKind::ExpertsDown(experts) => (&mut experts.partition, dims.hidden, TILE_ROWS),
            StepKind::MtpIn(mtp) => (&mut mtp.partition, dims.hidden, TILE_ROWS),
            StepKind::Head(head) => (&mut head.partition, dims.vocab, TILE_ROWS),
            // Their items go round the blocks.
            StepKind::Embed(_)
            | StepKind::Attend(_)
            | StepKind::DeltaRule(_)
            | StepKind::LatentAttend(_)
            | StepKind::CompressedAttend(_)
            | StepKind::Sample(_) => continue,
        };
        *partition = ends.len() as u32;
        ends.extend(evenly(rows, unit, blocks));
    }
    ends
}

/// Ends of the blocks' shares of `rows`; the last block takes what is no whole unit.
fn evenly(rows: u32, unit: u32, blocks: u32) -> impl Iterator<Item = u32> {
    let units = u64::from(rows.div_ceil(unit));
    (0..=blocks)
        .map(move |b| (units * u64::from(b) / u64::from(blocks)) as u32 * unit)
        .map(move |row| row.min(rows))
}
