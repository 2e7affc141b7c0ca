//! The kernels that a [`Meter`](crate::meter::Meter) asks for: one of one column for each further
//! [`Mode`] beside the usual ones, and where they write times.

use std::sync::Arc;

use super::lower::layout::Kind;
use super::lower::matrix::Matrix;
use super::lower::model::{Layer, Model};
use super::lower::partition::Partition;
use super::source;
use super::wire::Args;
use crate::error::{Error, Result};
use crate::host::side_by_side;
use crate::machine::{Machine, Memory, Module};
use crate::meter::{Mode, Phase, Seen, PHASES};

/// The phases of a step, in the order of the kernel's numbers.
pub fn phases(model: &Model, partition: &Partition) -> Vec<Phase> {
    let blocks = u64::from(partition.blocks);
    let layers = |m: Matrix| {
        let of = |layer: &Layer| {
            let class = &partition.classes[layer.class];
            let chosen = class.experts.filter(|_| m.is_experts()).map_or(1, |e| e.chosen);
            let tiling = class.tilings[m as usize].as_ref();
            u64::from(chosen) * tiling.map_or(0, |tiling| tiling.used_bytes())
        };
        blocks * model.layer.iter().map(of).sum::<u64>()
    };
    let head = blocks * partition.head_bytes();
    let has_experts = partition.has_experts();
    let bytes = layers(Matrix::GateUp);
    let router = layers(Matrix::Router) + layers(Matrix::SharedGateUp);
    let gate_up = if has_experts { [router, bytes] } else { [bytes, 0] };
    // Of a dense mlp, or of one with experts.
    let either = |dense: &'static str, experts: &'static str| {
        if has_experts {
            experts
        } else {
            dense
        }
    };
    let all = [
        ("attention input: gather, norm", 0),
        ("qkv: product", layers(Matrix::Qkv) + layers(Matrix::Gates)),
        ("qkv: turn, publish", 0),
        ("attention: scores, values", 0),
        ("attention: merge, gather", 0),
        ("attention output: product", layers(Matrix::Output)),
        ("attention output: add, publish", 0),
        ("mlp input: gather, norm", 0),
        (either("gate/up: product", "router: product, publish"), gate_up[0]),
        (either("gate/up: silu, publish", "router: choice"), 0),
        (either("activations: gather", "experts: gate/up"), gate_up[1]),
        (
            either("down: product", "experts: gather, down"),
            layers(Matrix::Down) + layers(Matrix::SharedDown),
        ),
        ("down: add, publish", 0),
        ("head input: gather, norm", 0),
        ("head: product", head),
        ("token: candidates, choice", 0),
    ];
    all.map(|(name, bytes)| Phase { name, bytes }).into()
}

/// A program's kernels to measure with, and where they write times.
pub(super) struct Probe {
    /// By mode, and by whether pages are streamed.
    modules: Vec<((Mode, bool), Arc<dyn Module>)>,
    stamps: Memory,
    trace: Memory,
}

impl Probe {
    /// Compiles them, side by side. `positions`: of a longest sequence.
    ///
    /// # Errors
    /// What the machine's compiler says, [`Error::OutOfMemory`].
    pub fn new(
        machine: &dyn Machine,
        model: &Model,
        partition: &Partition,
        positions: u32,
    ) -> Result<Self> {
        let one = |&(mode, kind): &(Mode, Kind)| -> Result<((Mode, bool), Arc<dyn Module>)> {
            let source = source::decode(machine.platform(), (model, partition), kind, mode)?;
            Ok(((mode, kind.streamed), machine.compile(&source)?))
        };
        let mut kinds = partition.kernels(model, machine.platform());
        kinds.retain(|kind| kind.columns == 1);
        let modes = Mode::of(model.ranks as usize).skip(1);
        let pairs: Vec<_> = modes.flat_map(|m| kinds.iter().map(move |k| (m, *k))).collect();
        let modules = side_by_side(&pairs, "compiler", one)?.into_iter().collect();
        let stamps = machine.alloc((positions as usize + 1) * 8)?;
        let trace = machine.alloc(partition.blocks as usize * PHASES * 8)?;
        Ok(Self { modules, stamps, trace })
    }

    /// The kernel of a mode, if it is not the usual one; `args` learns where to write.
    pub fn module(&self, mode: Mode, streamed: bool, args: &mut Args) -> Option<&Arc<dyn Module>> {
        args.stamps = self.stamps.address;
        if mode == Mode::Trace {
            args.trace = self.trace.address;
        }
        self.modules.iter().find(|(m, _)| *m == (mode, streamed)).map(|(_, module)| module)
    }

    /// What a launch of so many steps wrote.
    ///
    /// # Errors
    /// What the machine says; [`Error::Failed`] for steps that were not made.
    pub fn read(&self, machine: &dyn Machine, mode: Mode, steps: u32) -> Result<Seen> {
        let words = |memory: &Memory, count: usize| -> Result<Vec<u64>> {
            let mut bytes = vec![0; count * 8];
            machine.read(memory, 0, &mut bytes)?;
            let word = |b: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| b[i]));
            Ok(bytes.chunks_exact(8).map(word).collect())
        };
        let stamps = words(&self.stamps, steps as usize + 1)?;
        if stamps.iter().zip(&stamps[1..]).any(|(a, b)| b < a) {
            let detail = format!("the stamps of {steps} measured steps run back");
            return Err(Error::Failed(detail));
        }
        let ticks = match mode {
            Mode::Trace => words(&self.trace, self.trace.bytes / 8)?,
            Mode::Full | Mode::StreamOnly | Mode::ExchangeOnly | Mode::Alone => Vec::new(),
        };
        let ticks = ticks.chunks_exact(PHASES).map(|t| std::array::from_fn(|i| t[i])).collect();
        Ok(Seen { mode, stamps, ticks })
    }
}
