//! The partition of a model's work on a machine: sizes padded to what the kernel's tiles need, rows
//! dealt out to blocks, and how the warps of a block share its rows. All layers of a class are
//! partitioned alike; what classes have in common (the residual's rows, the ring, the head) is
//! decided over all of them.

use std::collections::BTreeSet;

use super::compressed::CompressedPartition;
use super::delta::{self, DeltaPartition};
use super::experts::Experts;
use super::latent::{heads_of_rows, rows_first, share_heads, splits, LatentPartition};
use super::matrix::Matrix;
use super::model::{touched, Class, Layer, Model, Stored};
use super::others;
use super::parts::Parts;
use super::slots::Slots;
use super::tiling::{AsHalves, Encoding, Stack, Stage, StoredBits, Tiling};
use super::tuning::Tuning;
use crate::abi::{HeadMode, PAGE};
use crate::error::{Error, Result};
use crate::machine::MachineInfo;

/// Most vectors of a weight pass: the second operand of a matrix unit has eight columns.
pub const COLUMNS_MAX: u32 = 8;

/// What a class has of the partition.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassPartition {
    /// Features of a head, padded.
    pub head_dim: u32,
    /// Features that a rotary table has.
    pub rope_dim: u32,
    /// MLP width of a lane, padded.
    pub ffn: u32,
    /// Latents of attention.
    pub latent: Option<LatentPartition>,
    /// Attention over a window and entries.
    pub compressed: Option<CompressedPartition>,
    /// Blocks that share the pages of a kv head.
    pub kv_splits: u32,
    /// Attention's partials are combined by owners first.
    pub combine_by_owners: bool,
    /// The matrices of a layer that there are, in the order of [`Matrix`]; of experts those of one.
    pub tilings: [Option<Tiling>; Matrix::COUNT],
    /// Where there are experts.
    pub experts: Option<ExpertsPartition>,
    /// Where there is a delta rule.
    pub delta: Option<DeltaPartition>,
}

/// What a class with experts has of the partition besides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsPartition {
    /// Experts of a layer.
    pub count: u32,
    /// Those of a column.
    pub chosen: u32,
    /// MLP width of a lane's shared expert, padded, or 0.
    pub shared: u32,
}

impl ClassPartition {
    fn new(
        class: &Class,
        rows: &Rows,
        tilings: [Option<Tiling>; Matrix::COUNT],
        (combine_by_owners, each): (bool, u32),
        t: &Tuning,
    ) -> Self {
        let whole = class.latent.is_some() || class.compressed.is_some();
        let combine_by_owners = combine_by_owners || whole;
        let kv_splits = match (class.latent, combine_by_owners) {
            _ if rows.delta.is_some() || rows.compressed.is_some() => 1,
            (Some(_), _) => splits(class.heads, each, t.most_splits_latents),
            (None, true) => t.most_splits_by_owners.min(each / class.kv_heads),
            (None, false) => t.most_splits.min(each / class.kv_heads),
        };
        let experts = |Experts { count, chosen, .. }: Experts| ExpertsPartition {
            count,
            chosen,
            shared: rows.shared,
        };
        Self {
            head_dim: rows.head_dim,
            rope_dim: match (&rows.latent, &rows.delta, &class.compressed) {
                (Some(latent), ..) => latent.turned,
                (None, Some(_), _) => 0,
                (None, None, Some(of)) => of.turned,
                (None, None, None) => rows.head_dim,
            },
            ffn: rows.ffn,
            latent: rows.latent,
            compressed: rows.compressed,
            kv_splits,
            combine_by_owners,
            delta: rows.delta,
            tilings,
            experts: class.experts.map(experts),
        }
    }

    /// How warps share a matrix that there is.
    pub fn tiling(&self, matrix: Matrix) -> &Tiling {
        self.tilings[matrix as usize].as_ref().expect("a matrix of the class")
    }

    /// The matrices there are, in the order of the stream.
    pub fn matrices(&self) -> impl Iterator<Item = (Matrix, &Tiling)> {
        Matrix::ALL.into_iter().zip(&self.tilings).filter_map(|(m, t)| Some((m, t.as_ref()?)))
    }

    /// Whether a matrix is one of each expert.
    pub const fn is_chosen(&self, matrix: Matrix) -> bool {
        self.experts.is_some() && matrix.is_experts()
    }

    /// The products of a layer whose weights are the same every step, in order.
    pub fn fixed(&self) -> impl Iterator<Item = (Matrix, &Tiling)> {
        self.matrices().filter(|(matrix, _)| !self.is_chosen(*matrix))
    }

    /// Those of its chosen experts.
    fn chosen(&self) -> impl Iterator<Item = &Tiling> {
        self.matrices().filter(|(matrix, _)| self.is_chosen(*matrix)).map(|(_, tiling)| tiling)
    }

    /// Bytes of a layer in a block's stream.
    pub fn layer_bytes(&self) -> u64 {
        self.fixed().map(|(_, tiling)| tiling.bytes()).sum()
    }

    /// Bytes of a block's part of one expert.
    pub fn piece_bytes(&self) -> u64 {
        self.chosen().map(Tiling::bytes).sum()
    }

    /// Bytes of a layer that a block reads for a token of one column.
    pub fn read_bytes(&self) -> u64 {
        let chosen = self.experts.map_or(0, |e| u64::from(e.chosen));
        self.layer_bytes() + chosen * self.chosen().map(Tiling::used_bytes).sum::<u64>()
    }

    /// Floats of the parts that warps leave for each other of a product, where there is one.
    pub fn part_floats(&self, matrix: Matrix, columns: u32) -> u32 {
        self.tilings[matrix as usize].as_ref().map_or(0, |t| t.part_floats(columns))
    }

    /// Whether it is attention over keys and values.
    pub const fn attends(&self) -> bool {
        self.latent.is_none() && self.delta.is_none() && self.compressed.is_none()
    }

    /// Numbers of the widest vector of attention's products but its output's, of one column.
    pub fn widest(&self) -> u32 {
        let compressed = self.compressed.map_or(0, |of| of.widest());
        self.latent.map_or(compressed, |latent| latent.widest())
    }

    /// Bytes of what stands in the place of vectors while a block attends.
    pub fn attend_bytes(&self, parts: u32, warps: u32) -> u32 {
        let compressed = self.compressed.map_or(0, |of| of.attend_bytes(warps));
        self.latent.map_or(compressed, |latent| latent.attend_bytes(parts, warps))
    }

    /// Numbers of the vector of activations of one column.
    pub const fn activations(&self) -> u32 {
        match self.experts {
            Some(e) => e.chosen * self.ffn,
            None => self.ffn,
        }
    }
}

/// The partition of a model for a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// Width of a residual stream, padded.
    pub hidden: u32,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Dies among which the machine deals out the grid's blocks; see [`Partition::block_of`].
    pub chiplets: u32,
    /// Warps that compute.
    pub warps: u32,
    /// Warps of the machine's behind them: who copies, who watches the host, who fills a group.
    pub helpers: u32,
    /// Bytes of a slot of the ring: of a stage, at most.
    pub slot_bytes: u32,
    /// Tile pairs of a stage that a warp holds in registers.
    pub max_tiles: u32,
    /// Weight bytes in flight of a block.
    pub in_flight_bytes: u32,
    /// Positions of a longest sequence.
    pub positions: u32,
    /// Its pages.
    pub pages_max: u32,
    /// Tables of pages stand in shared memory, where they are not too long.
    pub table: bool,
    /// Shared memory of a block at most.
    pub shared_max: u32,
    /// Rows of the residual that a block owns, in every layer.
    pub residual: u32,
    /// Of each class of layers.
    pub classes: Vec<ClassPartition>,
    /// Rows of the head that one pass takes, and the rest.
    pub head: Tiling,
    /// Passes of `head`.
    pub head_passes: u32,
    /// The rest of the head's rows.
    pub tail: Option<Tiling>,
    /// Rows of the head a block has.
    pub rows_head: u32,
    /// Columns of the widest kernel; there is one for a single column, too.
    pub columns: u32,
    /// What was chosen by measurements.
    pub tuning: Tuning,
    /// Matrices whose codes do not stay as they are stored.
    pub as_halves: Vec<AsHalves>,
}

/// Matrices whose warps leave each other parts in one place, and in the other.
pub(super) const PARTS_A: &[Matrix] = &[
    Matrix::Qkv,
    Matrix::LatentDown,
    Matrix::QueryUp,
    Matrix::KeyUp,
    Matrix::ValueUp,
    Matrix::GateUp,
];
/// See above.
pub(super) const PARTS_B: &[Matrix] = &[
    Matrix::MtpIn,
    Matrix::Gates,
    Matrix::Output,
    Matrix::SharedGateUp,
    Matrix::SharedDown,
    Matrix::Down,
];

/// Sizes that are the same in all classes, padded.
#[derive(Debug, Clone, Copy)]
struct Common {
    hidden: u32,
    /// Rows of the residual that a block owns.
    residual: u32,
    /// Blocks of a lane.
    each: u32,
    warps: u32,
    unit: u32,
    /// See [`Model::parts`].
    parts: u32,
    /// Some class has experts.
    experts: bool,
    /// Positions of a longest sequence.
    positions: u32,
}

impl Common {
    fn new(model: &Model, each: u32, positions: u32) -> Self {
        let wide = |c: &Class| [c.heads * c.head_dim, c.ffn];
        let mut widths = model.classes.iter().flat_map(wide).chain([model.hidden]);
        let experts = model.classes.iter().any(|c| c.experts.is_some());
        let twelve = widths.all(|w| w.is_multiple_of(384)) && !experts;
        let warps = if twelve { 12 } else { 8 };
        let unit = 4 * warps.max(8);
        let hidden = model.hidden.next_multiple_of(unit);
        let residual = share(hidden, each, 2);
        Self { hidden, residual, each, warps, unit, parts: model.parts, experts, positions }
    }
}

/// What a block has of one matrix of a layer.
#[derive(Debug, Clone, Copy)]
struct Product {
    matrix: Matrix,
    rows: u32,
    /// Columns, padded.
    k: u32,
    encoding: Encoding,
    /// How often it is read for a column.
    times: u32,
}

/// What a block has of a layer: its rows of each matrix, and widths, padded.
#[derive(Debug, Clone)]
struct Rows {
    products: Vec<Product>,
    attn: u32,
    ffn: u32,
    /// Of the shared expert.
    shared: u32,
    latent: Option<LatentPartition>,
    compressed: Option<CompressedPartition>,
    delta: Option<DeltaPartition>,
    head_dim: u32,
    layers: u32,
}

impl Rows {
    fn new(model: &Model, at: usize, common: &Common, why: &mut Vec<AsHalves>) -> Option<Self> {
        let (class, &Common { hidden, residual, each, unit, .. }) = (&model.classes[at], common);
        let head_dim = class.head_dim.next_multiple_of(32);
        let ffn = class.ffn.next_multiple_of(unit);
        let sizes = [class.heads, class.head_dim];
        let compressed = class
            .compressed
            .map(|of| CompressedPartition::new(sizes, &of, (unit, each, common.positions)));
        let attn = compressed.map_or(class.heads * head_dim, |of| of.grouped());
        let other = class.latent.is_some() || class.delta.is_some() || compressed.is_some();
        let few = class.group() <= 8 || other;
        let good = attn.is_multiple_of(unit) && few;
        let mut latent = class.latent.map(|of| LatentPartition::new(&of, unit));
        let delta = match &class.delta {
            Some(of) => {
                let unit = delta::unit((class.heads, each), of, head_dim, 32 * common.warps)?;
                Some(DeltaPartition::new(class.heads, unit, each))
            }
            None => None,
        };
        let beside = class.experts.and_then(|e| e.shared);
        let shared = beside.map_or(0, |of| of.ffn.next_multiple_of(unit));
        let times = class.experts.map_or(1, |e| e.chosen);
        // What makes latents is dealt out to all machines, who tell each other.
        let of_all = |rows| (Matrix::LatentDown, share(rows, each * model.ranks, 2), hidden);
        let mut all = match (&mut latent, &compressed) {
            (None, Some(of)) => vec![
                of_all(of.down_all()),
                (Matrix::QueryUp, share(of.query_rows(class.heads), each, 2), of.query_rank),
                (Matrix::ValueUp, of.group_rows(each), of.group[1]),
            ],
            (None, None) => vec![(Matrix::Qkv, share(class.input_rows(head_dim), each, 2), hidden)],
            (Some(of), _) => {
                let keys = share_heads(of.rank, class.heads, each);
                let values = share_heads(head_dim, class.heads, each);
                of.heads = [heads_of_rows(keys, of.rank), heads_of_rows(values, head_dim)];
                vec![
                    of_all(of.down()),
                    (Matrix::QueryUp, share(class.heads * of.query(), each, 2), of.query_rank),
                    (Matrix::KeyUp, keys, of.plain),
                    (Matrix::ValueUp, values, of.rank),
                ]
            }
        };
        all.extend(class.predicts.then_some((Matrix::MtpIn, residual, 2 * hidden)));
        if let Some(delta) = &delta {
            all.push((Matrix::Gates, 2 * delta.each, hidden));
        }
        all.push((Matrix::Output, residual, attn));
        if let Some(experts) = class.experts {
            all.push((Matrix::Router, share(experts.logits(), each, 2), hidden));
        }
        if beside.is_some() {
            all.push((Matrix::SharedGateUp, share(2 * shared, each, 4), hidden));
            all.push((Matrix::SharedDown, residual, shared));
        }
        all.push((Matrix::GateUp, share(2 * ffn, each, 4), hidden));
        all.push((Matrix::Down, residual, ffn));
        let sizes = Widths { hidden, head_dim, ffn, shared, latent, compressed };
        let product = |(matrix, rows, k): (Matrix, u32, u32)| {
            let encoding = encoding_of(model, at, matrix, rows, sizes, why);
            let times = if matrix.is_experts() { times } else { 1 };
            Product { matrix, rows, k, encoding, times }
        };
        let products = all.into_iter().map(product).collect();
        let layers = model.layers_of(at);
        let rows =
            Self { products, attn, ffn, shared, latent, compressed, delta, head_dim, layers };
        good.then_some(rows)
    }

    /// All products but those of few rows.
    fn heavy(&self) -> impl Iterator<Item = &Product> {
        self.products.iter().filter(|p| !matches!(p.matrix, Matrix::Router | Matrix::Gates))
    }

    /// Whether some of its weights have 4 bits.
    fn has_4_bits(&self) -> bool {
        self.products.iter().any(|p| p.encoding.bits.is_4_bits())
    }

    /// Bytes of all the class's layers, without scales.
    fn bytes(&self) -> u64 {
        let of = |p: &Product| {
            u64::from(p.times) * u64::from(p.rows) * u64::from(p.k / 32 * p.encoding.row_bytes())
        };
        u64::from(self.layers) * self.heavy().map(of).sum::<u64>()
    }
}

/// The matrices of each class's layers, as warps share them and stages divide them.
fn tilings(
    all: &[Rows],
    common: &Common,
    stage: Stage,
) -> Option<Vec<[Option<Tiling>; Matrix::COUNT]>> {
    let warps = common.warps;
    let row_warps = |p: &Product| Tiling::row_warps(p.rows, p.k, warps, stage, p.encoding);
    // A thread owns the same residual rows in all of these: any of them by rows means all.
    let owners = |r: &Rows| -> Vec<Product> {
        r.products.iter().filter(|p| p.matrix.is_owned()).copied().collect()
    };
    let by_rows = all.iter().flat_map(owners).any(|p| row_warps(&p) == warps);
    let of_product = |r: &Rows, p: &Product| {
        // What is added to the shared expert's sums stands in the same registers.
        let alike = |other: &&Product| match p.matrix {
            Matrix::SharedDown | Matrix::Down => {
                matches!(other.matrix, Matrix::SharedDown | Matrix::Down)
            }
            _ => other.matrix == p.matrix,
        };
        let row_warps = match by_rows && p.matrix.is_owned() {
            true => warps,
            false => r.products.iter().filter(alike).map(row_warps).max()?,
        };
        // Rows of several heads are in tiles of their own; columns are few.
        let (row_warps, stage) = match p.matrix.is_by_head() {
            true => (rows_first(p.rows, warps), Stage { uneven: true, ..stage }),
            false => (row_warps, stage),
        };
        Tiling::with_row_warps((p.rows, p.k), row_warps, warps, stage, p.encoding)
    };
    let of_class = |r: &Rows| {
        let mut out = [None; Matrix::COUNT];
        for p in &r.products {
            out[p.matrix as usize] = Some(of_product(r, p)?);
        }
        Some(out)
    };
    all.iter().map(of_class).collect()
}

/// Bytes of weights that a ring of such slots holds in `room`: stages fill a slot or do not.
fn held_by_ring(all: &[Rows], common: &Common, stage: Stage, room: u32) -> u64 {
    let Some(tilings) = tilings(all, common, stage) else { return 0 };
    let stages = |(rows, tilings): (&Rows, &[Option<Tiling>; Matrix::COUNT])| {
        let of = |p: &Product| p.times * tilings[p.matrix as usize].map_or(0, |t| t.stages);
        u64::from(rows.layers) * u64::from(rows.heavy().map(of).sum::<u32>())
    };
    let stages: u64 = all.iter().zip(&tilings).map(stages).sum();
    let bytes: u64 = all.iter().map(Rows::bytes).sum();
    u64::from(room / stage.slot_bytes) * bytes / stages
}

/// Slots of the machine's usual sizes, the one whose ring holds more, or smaller ones where shared
/// memory has no room for three beside the vectors.
fn slot_bytes(all: &[Rows], common: &Common, max_tiles: u32, shared_bytes: u32, t: &Tuning) -> u32 {
    let latent = |r: &Rows| {
        r.latent.map_or(r.compressed.map_or(0, |of| of.widest()), |latent| latent.widest())
    };
    let narrow = all.iter().map(|r| r.attn.max(r.ffn).max(latent(r))).max().unwrap_or(0);
    let vectors = 2 * common.parts * (common.hidden + narrow);
    let room = shared_bytes.saturating_sub(vectors + others::ABOUT_BYTES);
    let usual = match common.warps {
        12 => t.slots_12_warps,
        _ if max_tiles > 2 && all.iter().any(Rows::has_4_bits) => match common.experts {
            true => t.slots_experts_4_bits,
            false => t.slots_4_bits,
        },
        _ => t.slots_8_warps,
    };
    // Where stages have scales there is room for those beside the codes.
    let scaled = all.iter().flat_map(|r| &r.products).any(|p| p.encoding.scaled());
    let more = if scaled { 512 } else { 0 };
    let fits = |slot_bytes: &u32| 3 * *slot_bytes <= room;
    let holds = |slot_bytes: &u32| {
        let stage = Stage { slot_bytes: *slot_bytes, max_tiles, uneven: common.experts };
        held_by_ring(all, common, stage, room)
    };
    let best = usual.iter().map(|size| size + more).filter(fits).max_by_key(holds);
    let smaller = [12 << 10, 8 << 10, 6 << 10].map(|size| size + more);
    best.or_else(|| smaller.into_iter().find(fits)).unwrap_or((6 << 10) + more)
}

/// Rows of the head that a block of a lane of `each` has, and their columns.
fn head(model: &Model, each: u32, hidden: u32) -> (u32, u32) {
    let per_lane = model.head_mode == HeadMode::PerLane;
    let blocks = if per_lane { each } else { each * model.lanes * model.ranks };
    (share(model.vocab, blocks, 2), model.head_width(hidden))
}

/// How one matrix lies in the stream; as halves, and why is told, where its scales do not line up
/// with what blocks have of it: `parts` of `rows` with `most` scales, at most.
fn encoding(
    (name, stored): (&str, &Stored),
    parts: &[Parts],
    (rows, most): (u32, u32),
    why: &mut Vec<AsHalves>,
) -> Encoding {
    let Some(stored) = stored else { return Encoding::default() };
    let found = stored.as_ref().map_err(Clone::clone).and_then(|coded| {
        let (bits, columns) = (coded.bits, coded.group[1]);
        let group = parts.iter().map(|p| p.group(columns)).min().unwrap_or(0);
        let most = if bits.per_row() { rows } else { most.min(rows) };
        match (group, most) {
            (0, _) => Err(format!("scales of {columns} columns in units of 32")),
            (_, 256..) if !bits.per_row() => Err(format!("a block has {most} scales a column")),
            (..) => Ok(Encoding { bits, group, scale_rows: most }),
        }
    });
    found.unwrap_or_else(|reason| {
        let rounds = stored.as_ref().map_or(true, |coded| coded.bits != StoredBits::E2m1);
        why.push(AsHalves { why: format!("{name}: {reason}"), rounds });
        Encoding::default()
    })
}

/// Widths of vectors, padded.
#[derive(Debug, Clone, Copy)]
struct Widths {
    hidden: u32,
    head_dim: u32,
    ffn: u32,
    shared: u32,
    latent: Option<LatentPartition>,
    compressed: Option<CompressedPartition>,
}

/// Scale blocks that a block's `rows` of a matrix touch, at most.
fn scales_touched(
    class: &Class,
    matrix: Matrix,
    (rows, head_dim): (u32, u32),
    stored: &Stored,
) -> u32 {
    match matrix {
        Matrix::Qkv => {
            // Neighbouring stored rows of which a block's are parts: the shortest, and the longest.
            let [short, long] = match &class.delta {
                Some(delta) => [head_dim.min(delta.key_dim), class.head_dim.max(delta.key_dim)],
                None => [head_dim, class.head_dim],
            };
            ((rows + short).saturating_sub(2) / short + 1) * touched(stored, long)
        }
        // Of two tensors, or of rows that stand in another order.
        Matrix::LatentDown | Matrix::QueryUp | Matrix::KeyUp | Matrix::ValueUp => {
            2 * touched(stored, rows) + 2
        }
        Matrix::SharedGateUp | Matrix::GateUp => 2 * touched(stored, rows / 2),
        Matrix::MtpIn
        | Matrix::Gates
        | Matrix::Output
        | Matrix::Router
        | Matrix::SharedDown
        | Matrix::Down => touched(stored, rows),
    }
}

/// How a matrix of a class's layers lies in the stream, of which a block has `rows`.
fn encoding_of(
    model: &Model,
    at: usize,
    matrix: Matrix,
    rows: u32,
    Widths { hidden, head_dim, ffn, shared, latent, compressed }: Widths,
    why: &mut Vec<AsHalves>,
) -> Encoding {
    let (class, stored) = (&model.classes[at], model.stored(at, matrix));
    let ranks = if model.sliced { model.ranks } else { 1 };
    let whole = Parts { count: 1, real: model.hidden, padded: hidden, skip: 0 };
    let of_ranks = |part: &dyn Fn(u32) -> Parts| (0..ranks).map(part).collect::<Vec<_>>();
    let slices = |real, padded| of_ranks(&|r| Parts { count: 1, real, padded, skip: r * real });
    let heads = |rank| {
        let skip = model.heads_of(rank, class)[0].start * class.head_dim;
        Parts { count: class.heads, real: class.head_dim, padded: head_dim, skip }
    };
    let parts = match matrix {
        Matrix::MtpIn => vec![Parts { count: 2, ..whole }],
        Matrix::Qkv
        | Matrix::Gates
        | Matrix::LatentDown
        | Matrix::Router
        | Matrix::SharedGateUp
        | Matrix::GateUp => vec![whole],
        Matrix::QueryUp | Matrix::ValueUp | Matrix::Output if compressed.is_some() => {
            let sizes = class.compressed.zip(compressed).expect("it is there");
            of_ranks(&|rank| sizes.1.parts(&sizes.0, (matrix, rank)))
        }
        Matrix::QueryUp | Matrix::KeyUp | Matrix::ValueUp => {
            let sizes = class.latent.zip(latent).expect("latents of the class");
            let (of, padded) = sizes;
            let part = |real, padded, skip| Parts { count: 1, real, padded, skip };
            let key = |head| part(of.plain, padded.plain, head * (of.plain + class.head_dim));
            match matrix {
                Matrix::QueryUp => vec![part(of.query_rank, padded.query_rank, 0)],
                // Turned around: columns are rows.
                Matrix::KeyUp => (0..class.heads_all[0]).map(key).collect(),
                _ => vec![part(of.rank, padded.rank, 0)],
            }
        }
        Matrix::Output => of_ranks(&heads),
        Matrix::SharedDown => {
            let of = class.experts.and_then(|e| e.shared);
            slices(of.map_or(0, |of| of.ffn), shared)
        }
        Matrix::Down => slices(class.ffn, ffn),
    };
    let most = scales_touched(class, matrix, (rows, head_dim), stored);
    encoding((matrix.name(), stored), &parts, (rows, most), why)
}

/// Columns that a kernel of several may have: each has a vector a part. Experts take one column
/// after another, in one part.
fn widths(model: &Model) -> Vec<u32> {
    let has_experts = model.classes.iter().any(|c| c.experts.is_some());
    if has_experts && model.parts > 1 {
        return Vec::new();
    }
    [1, 2, 4].map(|n| COLUMNS_MAX / model.parts / n).into()
}

fn share(rows: u32, blocks: u32, unit: u32) -> u32 {
    rows.div_ceil(blocks).next_multiple_of(unit)
}

impl Partition {
    /// The partition that reads the fewest bytes a block, of block counts that the machine holds.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] where none fits, with what does not.
    pub fn new(model: &Model, machine: &MachineInfo, positions: u32) -> Result<Self> {
        Self::tuned(model, machine, positions, Tuning::of(machine))
    }

    /// The same with another choice of what measurements decide.
    ///
    /// # Errors
    /// As [`Partition::new`].
    pub fn tuned(
        model: &Model,
        machine: &MachineInfo,
        positions: u32,
        tuning: Tuning,
    ) -> Result<Self> {
        let most = machine.multiprocessors / model.lanes;
        let attends = model.classes.iter().filter(|c| c.delta.is_none());
        let kv_heads = attends.map(|c| c.kv_heads).max().unwrap_or(1);
        let least = kv_heads.max(1);
        if most < least {
            return refuse(format!(
                "{} lanes of {} kv heads need {} multiprocessors, {} has {}",
                model.lanes,
                kv_heads,
                model.lanes * least,
                machine.name,
                machine.multiprocessors
            ));
        }
        let from = least.max(most * 3 / 4);
        let with = |n, slots| Self::with_blocks(model, machine, positions, (n, slots), tuning);
        // Equal bytes: the fewer blocks the better, as each one more only waits and polls.
        // Partials of attention that cannot be combined by owners cost a narrow model about a
        // twentieth.
        let owners = |p: &Self| p.warps == 8 && model.lanes_all() == 1;
        let combine_by_owners = |p: &Self| p.classes.iter().all(|c| c.combine_by_owners);
        let cost = |p: &Self| {
            p.read_bytes(model) * if owners(p) && !combine_by_owners(p) { 21 } else { 20 }
        };
        let best = |slots: &[Slots]| {
            let all = (from..=most).filter_map(|n| slots.iter().find_map(|s| with(n, *s)));
            all.min_by_key(|p| (cost(p), p.blocks))
        };
        let best = best(&Slots::ALL).or_else(|| Slots::TIGHT.chunks(1).find_map(best));
        let none = || {
            let Model { lanes, hidden, .. } = model;
            let class = |c: &Class| {
                format!("{}/{} heads of {}, ffn {}", c.heads, c.kv_heads, c.head_dim, c.ffn)
            };
            let classes: Vec<_> = model.classes.iter().map(class).collect();
            refuse(format!(
                "no partition fits: {lanes} lanes of hidden {hidden}, {} on {} multiprocessors \
                 with {} bytes of shared memory; query heads a kv head are at most 8",
                classes.join(" and "),
                machine.multiprocessors,
                machine.shared_bytes
            ))
        };
        best.map_or_else(none, Ok)
    }

    /// With `each` blocks a lane and such slots; none if that is no partition.
    fn with_blocks(
        model: &Model,
        m: &MachineInfo,
        positions: u32,
        (each, slots): (u32, Slots),
        tuning: Tuning,
    ) -> Option<Self> {
        let common = Common::new(model, each, positions);
        let Common { hidden, residual, warps, .. } = common;
        let mut as_halves = Vec::new();
        let of_class = |at| Rows::new(model, at, &common, &mut as_halves);
        let rows: Vec<_> = (0..model.classes.len()).map(of_class).collect::<Option<_>>()?;
        // Twelve warps have fewer registers each; where steps are short several stages are held.
        let long = tuning.long_stream(rows.iter().any(Rows::has_4_bits));
        let short = rows.iter().map(Rows::bytes).sum::<u64>() < long;
        let max_tiles = if warps > 8 || short { 2 } else { 4 };
        let usual = || slot_bytes(&rows, &common, max_tiles, m.shared_bytes, &tuning);
        let slot_bytes = slots.bytes(usual);
        let stage = Stage { slot_bytes, max_tiles, uneven: common.experts };
        let tilings = tilings(&rows, &common, stage)?;
        let (rows_head, width) = head(model, each, hidden);
        let pass_rows = rows_head.min(slots.pass_rows(warps));
        let count = width / hidden;
        let parts = [Parts { count, real: model.hidden, padded: hidden, skip: 0 }];
        let most = (pass_rows, touched(&model.coded_head, pass_rows));
        let of_head = encoding(("head", &model.coded_head), &parts, most, &mut as_halves);
        let tiling = |rows, k| Tiling::new(rows, k, warps, stage, of_head);
        let rest = rows_head % pass_rows;
        let tail = if rest > 0 { Some(tiling(rest, width)?) } else { None };
        let owners = model.lanes_all() == 1 && warps == 8;
        let each_class = model.classes.iter().zip(&rows).zip(tilings);
        let classes = each_class.map(|((class, rows), tilings)| {
            // Beside experts' bytes a block without a share costs nothing; the outputs of a delta
            // rule are whole as they are.
            let none = common.experts || rows.delta.is_some();
            let owners = owners && (none || (rows.attn / 2).is_multiple_of(each));
            ClassPartition::new(class, rows, tilings, (owners, each), &tuning)
        });
        let mut partition = Self {
            hidden,
            blocks: each * model.lanes,
            chiplets: m.chiplets.max(1),
            warps,
            helpers: if m.passes_registers() { 4 } else { 2 },
            slot_bytes,
            max_tiles,
            in_flight_bytes: 0,
            positions,
            pages_max: positions.div_ceil(PAGE as u32),
            table: slots.table(),
            shared_max: m.shared_bytes,
            residual,
            classes: classes.collect(),
            head: tiling(pass_rows, width)?,
            head_passes: rows_head / pass_rows,
            tail,
            rows_head,
            columns: 1,
            tuning,
            as_halves,
        };
        partition.in_flight_bytes = partition.in_flight(model);
        let fits = |c: &u32| partition.shared_bytes(model, *c) <= m.shared_bytes;
        partition.columns = widths(model).into_iter().find(fits).unwrap_or(1);
        let room =
            slots.asked(|| partition.shared_bytes(model, 1), || partition.tight_bytes(model));
        (room <= m.shared_bytes).then_some(partition)
    }

    /// Shared memory of the vectors at work.
    pub(super) fn vector_bytes(&self, model: &Model, columns: u32) -> u32 {
        // Where every warp has a range of its own, several columns' vectors stay where they are.
        let direct = |t: &Tiling| columns > 1 && t.k_warps == self.warps && !t.uneven;
        let kept = |t: &Tiling| if direct(t) { 0 } else { columns * t.k };
        let narrow = |c: &ClassPartition| {
            let down = match c.experts {
                Some(_) if columns > 1 => (columns + c.gathered()) * c.ffn,
                Some(_) => c.activations(),
                None => kept(c.tiling(Matrix::Down)),
            };
            // All columns' at once.
            let shared = c.experts.map_or(0, |e| columns * e.shared);
            let latent = columns * c.widest();
            let output = c.tiling(Matrix::Output);
            let output = if c.attends() { kept(output) } else { columns * output.k };
            output.max(down).max(shared).max(latent)
        };
        let narrow = self.classes.iter().map(narrow).max().unwrap_or(0);
        let (vectors, parts) = (columns * model.parts, model.parts);
        let wide = vectors * model.widest_input(self.hidden);
        let pad = if vectors > 1 { 32 * vectors } else { 0 };
        // One place for both, one after the other, unless only the wide one needs a place.
        let room = if columns == 1 { wide + parts * narrow } else { wide.max(parts * narrow) };
        let heads = |c: &ClassPartition| c.attend_bytes(parts, self.warps);
        let heads = self.classes.iter().map(heads).max().unwrap_or(0);
        (2 * (room + 2 * pad)).max(heads)
    }

    /// Shared memory with two slots of the ring, about.
    pub(super) fn shared_bytes(&self, model: &Model, columns: u32) -> u32 {
        let others = self.table_bytes(model, columns) + others::model_bytes(model);
        self.shared_beside(model, columns, others::ABOUT_BYTES.max(others))
    }

    /// The same for one column, as little as it may be.
    fn tight_bytes(&self, model: &Model) -> u32 {
        let others = others::model_bytes(model) + others::owned_bytes(32 * self.warps);
        self.shared_beside(model, 1, others + self.table_bytes(model, 1))
    }

    /// The same beside so many bytes for others.
    fn shared_beside(&self, model: &Model, columns: u32, others: u32) -> u32 {
        let parts = |t: &Tiling| 4 * t.part_floats(columns);
        let widest = |matrices: &[Matrix]| {
            let of =
                |c: &ClassPartition| matrices.iter().map(|m| 4 * c.part_floats(*m, columns)).max();
            self.classes.iter().filter_map(of).max().unwrap_or(0)
        };
        let tail = self.tail.as_ref().map_or(0, parts);
        let of_experts = |c: &ClassPartition| 4 * c.expert_floats(columns, self.slot_bytes);
        let of_experts = self.classes.iter().map(of_experts).max().unwrap_or(0);
        let wide = widest(PARTS_A).max(parts(&self.head)).max(tail);
        let wide = wide.max(of_experts);
        let delta = |d: &DeltaPartition| 4 * d.floats(self.warps, columns);
        let deltas = self.classes.iter().filter_map(|c| c.delta.as_ref());
        let deltas = deltas.map(delta).max().unwrap_or(0) + 4 * self.state_floats(model, columns);
        let parts = wide + widest(PARTS_B) + deltas;
        self.vector_bytes(model, columns) + parts + 2 * self.slot_bytes + others
    }

    /// Floats of attention over entries, and of several residual streams.
    pub(super) fn state_floats(&self, model: &Model, columns: u32) -> u32 {
        let of = |c: &ClassPartition| {
            c.compressed.map_or(0, |of| of.floats(columns, model.parts, self.warps))
        };
        let streams = model.hyper.map_or(0, |hyper| hyper.floats(self.residual, columns));
        self.classes.iter().map(of).max().unwrap_or(0).next_multiple_of(4) + streams
    }

    /// The columns' pages in shared memory: none where there are too many of them.
    pub(super) fn table_bytes(&self, model: &Model, columns: u32) -> u32 {
        if !self.table {
            return 0;
        }
        others::table_bytes(columns * model.pools * self.pages_max)
    }

    /// Bytes of a block that say which of a stage's scales each row has: of each class's matrices,
    /// then of the head.
    pub fn index_bytes(&self) -> u32 {
        let head = if self.head.index_bytes() > 0 { self.rows_head } else { 0 };
        self.index_offset(self.classes.len(), Matrix::Qkv) + head
    }

    /// Where those of a class's matrix begin; behind the last class the head's.
    pub fn index_offset(&self, class: usize, matrix: Matrix) -> u32 {
        let before = self.classes[..class].iter().flat_map(|c| &c.tilings);
        let here = self.classes.get(class).map_or(&[][..], |c| &c.tilings[..matrix as usize]);
        before.chain(here).flatten().map(Tiling::index_bytes).sum()
    }

    /// Whether a gather asks for all its words at once, and once more for what was late: where the
    /// chain of exchanges weighs more than the weights.
    pub(super) fn retries(&self, model: &Model, columns: u32) -> bool {
        let (line, t) = (self.read_bytes(model), &self.tuning);
        let ffn = self.classes.iter().map(|c| c.ffn).max().unwrap_or(0);
        let narrow = model.lanes == 1 && self.hidden.max(ffn) <= t.narrow;
        columns == 1 && (line < t.short_stream_bytes || narrow && line < t.long_stream_bytes)
    }

    /// Weight bytes in flight of a block: more hide the memory's latency, but stand before every
    /// word that somebody waits for.
    fn in_flight(&self, model: &Model) -> u32 {
        let t = &self.tuning;
        match self.warps {
            _ if self.read_bytes(model) < t.shortest_stream_bytes => t.in_flight_shortest,
            12 => t.in_flight_12_warps,
            _ if self.hidden < t.wide_hidden => t.in_flight_narrow,
            _ => t.in_flight_wide,
        }
    }

    /// Stages of a product that are in registers before its vector has arrived.
    pub(super) fn prefetch_depth(&self, model: &Model) -> u32 {
        let mut tilings = self.classes.iter().flat_map(|c| &c.tilings).flatten();
        let has_4_bits = tilings.any(|t| t.encoding.bits.is_4_bits());
        if self.read_bytes(model) < self.tuning.long_stream(has_4_bits) {
            self.tuning.ahead_short
        } else {
            1
        }
    }

    /// How experts are stacked, where one has few rows of gate and up: as many as fill a tile, as
    /// far as a slot has room. Of one column only what is multiplied from registers.
    pub(super) fn stack(
        &self,
        model: &Model,
        class: &ClassPartition,
        of: Matrix,
        columns: u32,
    ) -> Option<Stack> {
        let worth = of == Matrix::GateUp && (columns > 1 || self.prefetch_depth(model) > 1);
        class.stack(columns, self.slot_bytes).filter(|_| worth)
    }

    /// Whether stages stand side by side in the ring, and more of gate and up in registers: where a
    /// rank waits for others about as long as its weights take, the stream stands still once the
    /// ring is full, so that what it holds counts. Twelve warps have no registers for that.
    pub(super) fn variable_stages(&self, model: &Model) -> bool {
        let (line, t) = (self.read_bytes(model), &self.tuning);
        if self.has_experts() || self.classes.iter().any(|c| c.latent.is_some()) {
            return false;
        }
        t.variable_stages_always
            || model.ranks > 1
                && model.lanes == 1
                && self.warps == 8
                && (t.short_stream_bytes..t.long_stream_bytes).contains(&line)
    }

    /// Blocks of a lane.
    pub const fn blocks_a_lane(&self, model: &Model) -> u32 {
        self.blocks / model.lanes
    }

    /// Which block of the work a block of the grid is (chiplets.h): numbered die by die, so that
    /// those of a lane, who exchange most, share as few second-level caches as can be.
    pub const fn block_of(&self, grid_block: u32) -> u32 {
        let (die, row) = (grid_block % self.chiplets, grid_block / self.chiplets);
        let (each, more) = (self.blocks / self.chiplets, self.blocks % self.chiplets);
        die * each + if die < more { die } else { more } + row
    }

    /// The dies on which a lane's blocks lie.
    pub fn dies_of(&self, model: &Model, lane: u32) -> BTreeSet<u32> {
        let each = self.blocks_a_lane(model);
        let own = |block: u32| self.block_of(block) / each == lane;
        (0..self.blocks).filter(|block| own(*block)).map(|block| block % self.chiplets).collect()
    }

    /// Tensors that lie in the stream as halves.
    pub fn tensors_as_halves(&self, model: &Model) -> Vec<u32> {
        let halves = |tiling: &Tiling| tiling.encoding.bits == StoredBits::F16;
        let of_layer = |layer: &Layer| {
            let class = &self.classes[layer.class];
            let all = class.matrices().filter(|(_, tiling)| halves(tiling));
            // The tensors behind the first one are those of other experts.
            let experts = class.experts.map_or(1, |e| e.count);
            let of = |(matrix, _)| {
                let count = if class.is_chosen(matrix) { experts } else { 1 };
                layer.tensors(matrix).into_iter().flat_map(move |first| first..first + count)
            };
            all.flat_map(of).collect::<Vec<_>>()
        };
        let mut all: Vec<u32> = model.layer.iter().flat_map(of_layer).collect();
        all.extend(halves(&self.head).then_some(model.head));
        all
    }

    /// Whether some layers have experts.
    pub fn has_experts(&self) -> bool {
        self.classes.iter().any(|c| c.experts.is_some())
    }

    /// Bytes that a block reads for a token of one column: its stream, and its part of the experts
    /// that are chosen.
    pub fn read_bytes(&self, model: &Model) -> u64 {
        let layers = model.layer.iter().map(|l| self.classes[l.class].read_bytes());
        layers.sum::<u64>() + self.head_bytes()
    }

    /// Bytes of the experts of all layers.
    pub fn bank_bytes(&self, model: &Model) -> u64 {
        let of = |c: &ClassPartition| {
            c.experts.map_or(0, |e| u64::from(e.count) * u64::from(self.blocks) * c.piece_bytes())
        };
        model.layer.iter().map(|l| of(&self.classes[l.class])).sum()
    }

    /// 32-bit words that a block's rows of the head touch of a mask of all ids.
    pub const fn mask_words(&self) -> u32 {
        (self.rows_head + 62) / 32
    }

    /// Bytes of a block's stream, which are the same every step.
    pub fn stream_bytes(&self, model: &Model) -> u64 {
        let layers = model.layer.iter().map(|l| self.classes[l.class].layer_bytes());
        layers.sum::<u64>() + self.head_bytes()
    }

    /// The head's part of it.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.head_passes) * self.head.bytes() + self.tail.map_or(0, |t| t.bytes())
    }

    /// Threads of a block: teams of 32 that compute, a warp of the machine's that copies, one that
    /// watches the host.
    pub const fn threads(&self, warp: u32) -> u32 {
        self.warps * 32 + self.helpers * warp
    }
}

fn refuse<T>(detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step: usize::MAX, detail })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "partition_tests.rs"]
mod tests;
