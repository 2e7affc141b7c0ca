//! What the simulated device packs, against lines written out one number after another from whole
//! matrices: every format, padding, turned heads, lanes, slices, scales, tails, and scratches so
//! small that matrices come in pieces.

use std::sync::Arc;

use half::{bf16, f16};

use super::super::lower::hyper::HyperTensors;
use super::super::lower::matrix::Matrix;
use super::super::lower::model::{Class, Coded, Layer, Model, Norm};
use super::super::lower::partition::Partition;
use super::super::lower::tiling::{StoredBits, Tiling};
use super::super::pack::{To, Weights};
use super::super::shapes;
use super::*;
use crate::abi::{Codes, Dims, Dtype, Encoding, HeadMode, Layout, Program, NONE};
use crate::buffer::Buffer;
use crate::numbers::{code_to_f32, number_to_f32};
use crate::sim::Sim;

/// A program's weights with the sizes of `model`, one buffer.
struct Case {
    model: Model,
    program: Program,
    bytes: Vec<u8>,
    rank: u32,
    codes: Codes,
    /// Of a scale.
    group: [u32; 2],
    /// Which scales integers of 4 bits have.
    bits: StoredBits,
    random: u32,
}

/// Numbers by row and column.
type Grid = Vec<Vec<f32>>;

impl Case {
    fn new(model: Model, codes: Codes, rank: u32) -> Self {
        let mut case = Self::empty(model, codes, rank);
        case.fill();
        case
    }

    /// Without tensors.
    fn empty(model: Model, codes: Codes, rank: u32) -> Self {
        let whole = if model.sliced { model.ranks } else { 1 };
        let mut model = model;
        for class in &mut model.classes {
            class.heads_all = [class.heads, class.kv_heads].map(|heads| heads * whole);
        }
        let dims = Dims {
            hidden: model.hidden,
            lanes: model.lanes_all(),
            vocab: model.vocab_all,
            eps: 1e-5,
            max_positions: 64,
            slots: 1,
            columns: 2,
        };
        let program = Program {
            dims,
            blocks: 1,
            steps: vec![],
            tensors: vec![],
            vectors: vec![],
            groups: vec![],
            row_partition: vec![],
        };
        let group = [48, 32];
        let bits = StoredBits::I4;
        Self { model, program, bytes: vec![0; 3], rank, codes, group, bits, random: 1 }
    }

    /// Tensors of all layers, the embedding and the head, as a checkpoint has them.
    fn fill(&mut self) {
        let m = self.model.clone();
        let lanes = if m.sliced { 1 } else { m.lanes_all() };
        let all = if m.sliced { m.ranks } else { 1 };
        self.model.layer.clear();
        for layer in &m.layer {
            let c = &m.classes[layer.class];
            let [attn, kv] = c.heads_all.map(|heads| heads * c.head_dim);
            // A slice of the last rank may be shorter.
            let piece = self.codes.row().numbers;
            let ffn = if m.sliced { c.ffn * all - piece } else { c.ffn };
            let layer = Layer {
                class: layer.class,
                qkv: [attn, kv, kv].map(|rows| self.matrix(lanes, rows, m.hidden)),
                biases: [NONE; 3],
                head_norms: [NONE; 2],
                outputs: [attn, ffn].map(|cols| self.matrix(lanes, m.hidden, cols)),
                gate_up: [ffn; 2].map(|rows| self.matrix(lanes, rows, m.hidden)),
                latent: None,
                compressed: None,
                hyper: [HyperTensors::NONE; 2],
                extras: layer.extras,
                norms: layer.norms.map(|norm| self.norm(norm)),
                window: 0,
                pool: [0, 0],
                own: [1.0; 2],
                delay: [0; 2],
                shares: [true; 2],
            };
            self.model.layer.push(layer);
        }
        self.model.final_norm = self.norm(m.final_norm);
        self.model.embed = self.matrix(1, m.vocab_all, m.hidden);
        let per_lane = m.head_mode == HeadMode::PerLane;
        self.model.head = match (per_lane, m.lanes_all()) {
            (true, 1) => self.model.embed,
            (true, _) if !m.sliced => self.matrix(lanes, m.vocab, m.hidden),
            (true, _) => self.matrix(1, m.vocab_all, m.hidden),
            (false, lanes) => {
                let wide = if m.head_mode == HeadMode::Concat { lanes } else { 1 };
                self.matrix(1, m.vocab_all, m.hidden * wide)
            }
        };
    }

    fn norm(&mut self, norm: Norm) -> Norm {
        Norm { tensor: self.plain(norm.rows, self.model.hidden), ..norm }
    }

    /// Vectors are never FP8.
    fn plain(&mut self, rows: u32, cols: u32) -> u32 {
        let codes = std::mem::replace(&mut self.codes, Codes::Bf16);
        let index = self.matrix(1, rows, cols);
        self.codes = codes;
        index
    }

    fn next(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.random >> 8
    }

    /// A tensor of random numbers at an odd offset.
    fn matrix(&mut self, lanes: u32, rows: u32, cols: u32) -> u32 {
        let (group, scale) = match self.codes {
            Codes::E4m3 | Codes::I8 => (self.group, Dtype::F32),
            Codes::I4 if self.bits != StoredBits::I4 => (self.group, Dtype::F16),
            Codes::I4 => (self.group, Dtype::Bf16),
            Codes::E2m1 => (self.group, Dtype::F8E8m0),
            _ => ([0, 0], Dtype::F32),
        };
        let zeros = self.codes == Codes::I4 && self.bits == StoredBits::I4Zeros;
        let mut tensor = Tensor {
            buffer: 0,
            encoding: Encoding { zeros, ..Encoding::scaled(self.codes, group, scale) },
            layout: Layout::RowMajor,
            lanes,
            rows,
            cols,
            row_step: 1,
            scale_buffer: 0,
            offset: self.bytes.len() as u64,
            scale_offset: 0,
            zero_offset: 0,
        };
        for _ in 0..lanes * rows * cols / self.codes.row().numbers {
            let drawn = self.next();
            let value = (drawn as f32 / (1 << 23) as f32 - 1.0) / 7.0;
            match self.codes {
                Codes::F32 => self.bytes.extend(value.to_le_bytes()),
                Codes::F16 => self.bytes.extend(f16::from_f32(value).to_le_bytes()),
                Codes::Bf16 => self.bytes.extend(bf16::from_f32(value).to_le_bytes()),
                // Subnormal numbers and both signs, but no NaN.
                Codes::E4m3 => self.bytes.push((drawn % 0x7f) as u8 | (drawn >> 8) as u8 & 0x80),
                // Two numbers.
                Codes::I4 | Codes::E2m1 | Codes::I8 => self.bytes.push(drawn as u8),
                Codes::Q8x0 | Codes::Q4x0 | Codes::Q4k | Codes::Q6k => {
                    unreachable!("{} is in no case", self.codes.name())
                }
            }
        }
        tensor.scale_offset = self.bytes.len() as u64;
        let [down, across] = tensor.scale_grid();
        for _ in 0..lanes * down * across {
            let drawn = self.next() % 100;
            let value = 0.1 + drawn as f32 / 1000.0;
            match scale {
                Dtype::Bf16 => self.bytes.extend(bf16::from_f32(value).to_le_bytes()),
                Dtype::F16 => self.bytes.extend(f16::from_f32(value).to_le_bytes()),
                Dtype::F8E8m0 => self.bytes.push(115 + (drawn % 20) as u8),
                _ => self.bytes.extend(value.to_le_bytes()),
            }
        }
        tensor.zero_offset = self.bytes.len() as u64;
        for _ in 0..u64::from(lanes) * tensor.zero_bytes() {
            let drawn = self.next() % 16;
            self.bytes.push((drawn as i8 - 8) as u8);
        }
        self.program.tensors.push(tensor);
        self.program.tensors.len() as u32 - 1
    }

    /// A number as the checkpoint means it.
    fn number(&self, tensor: u32, lane: u32, row: u32, col: u32) -> f32 {
        let t = &self.program.tensors[tensor as usize];
        let codes = t.encoding.codes;
        let at = t.offset as usize + (lane * t.rows + row) as usize * t.row_bytes() as usize;
        let value = code_to_f32(codes, &self.bytes[at..], col as usize);
        let value = if codes == Codes::F32 { bf16::from_f32(value).to_f32() } else { value };
        if !t.encoding.has_scales() {
            return value;
        }
        let [down, across] = t.scale_grid();
        let (row, col) = (row / t.encoding.group[0], col / t.encoding.group[1]);
        let (kind, each) = (t.encoding.scale, t.encoding.scale.bytes());
        let group = ((lane * down + row) * across + col) as usize;
        let at = t.scale_offset as usize + each * group;
        let zero =
            if t.encoding.zeros { self.bytes[t.zero_offset as usize + group] as i8 } else { 0 };
        (value - f32::from(zero)) * number_to_f32(kind, &self.bytes[at..at + each])
    }

    fn grid(&self, tensor: u32, lane: u32) -> Grid {
        let t = &self.program.tensors[tensor as usize];
        let row = |row| (0..t.cols).map(|col| self.number(tensor, lane, row, col)).collect();
        (0..t.rows).map(row).collect()
    }

    /// A lane's rows, or its share of the whole matrix's: `share` of them.
    fn rows(&self, tensor: u32, lane: u32, share: u32) -> Grid {
        if !self.model.sliced {
            return self.grid(tensor, lane);
        }
        let whole = self.grid(tensor, 0).into_iter();
        whole.skip((lane * share) as usize).take(share as usize).collect()
    }

    /// The same by columns.
    fn columns(&self, tensor: u32, lane: u32, share: u32) -> Grid {
        let turned = |grid: Grid| -> Grid {
            (0..grid[0].len()).map(|col| grid.iter().map(|row| row[col]).collect()).collect()
        };
        if !self.model.sliced {
            return self.grid(tensor, lane);
        }
        let whole = turned(self.grid(tensor, 0)).into_iter();
        turned(whole.skip((lane * share) as usize).take(share as usize).collect())
    }

    /// A lane's matrix of a layer as its blocks multiply it, without padding at the end.
    fn matrix_of(&self, partition: &Partition, layer: usize, matrix: Matrix, lane: u32) -> Grid {
        let (m, l) = (&self.model, &self.model.layer[layer]);
        let (c, part) = (m.class_of(layer), &partition.classes[l.class]);
        let (dim, padded) = (c.head_dim as usize, part.head_dim as usize);
        match matrix {
            Matrix::Qkv => {
                let mut all = Grid::new();
                for (which, tensor) in l.qkv.into_iter().enumerate() {
                    let heads = if which == 0 { c.heads } else { c.kv_heads };
                    for head in self.rows(tensor, lane, heads * c.head_dim).chunks(dim) {
                        let mut out = vec![Vec::new(); padded];
                        for (feature, row) in head.iter().enumerate() {
                            let turned = which < 2 && !m.interleaved;
                            let (half, pair) = (feature / (dim / 2), feature % (dim / 2));
                            out[if turned { 2 * pair + half } else { feature }] = row.clone();
                        }
                        all.extend(out);
                    }
                }
                all
            }
            Matrix::Output => {
                let rows = self.columns(l.outputs[0], lane, c.heads * c.head_dim);
                let pad = |head: &[f32]| [head, &vec![0.0; padded - dim]].concat();
                rows.iter().map(|row| row.chunks(dim).flat_map(pad).collect()).collect()
            }
            Matrix::Down => self.columns(l.outputs[1], lane, c.ffn),
            Matrix::GateUp => {
                let [gate, up] = l.gate_up.map(|tensor| self.rows(tensor, lane, c.ffn));
                gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect()
            }
            other => unreachable!("{other:?} of a dense model"),
        }
    }

    /// The head's matrix for a lane, or for all.
    fn head_of(&self, partition: &Partition, lane: u32) -> Grid {
        let m = &self.model;
        match m.head_mode {
            HeadMode::PerLane => self.rows(m.head, lane, m.vocab),
            HeadMode::Mean | HeadMode::SumThenNorm => self.grid(m.head, 0),
            HeadMode::Concat => {
                let pad = |part: &[f32]| {
                    let mut part = part.to_vec();
                    part.resize(partition.hidden as usize, 0.0);
                    part
                };
                let whole = self.grid(m.head, 0).into_iter();
                whole.map(|row| row.chunks(m.hidden as usize).flat_map(pad).collect()).collect()
            }
        }
    }

    /// What blocks' lines are made of, one after another.
    fn lines(&self, partition: &Partition) -> Vec<Piece> {
        let (m, each) = (&self.model, partition.blocks_a_lane(&self.model));
        let mut out = Vec::new();
        let mut write = |grid: &Grid, split: &Tiling, first: u32, index: u32| {
            out.push(Piece { grid: grid.clone(), split: *split, first, index });
        };
        for block in 0..partition.blocks {
            let (lane, seat) = (self.rank * m.lanes + block / each, block % each);
            let start = block * partition.index_bytes();
            for layer in 0..m.layer.len() {
                let class = m.layer[layer].class;
                for (matrix, tiling) in partition.classes[class].matrices() {
                    let whole = self.matrix_of(partition, layer, matrix, lane);
                    let index = start + partition.index_offset(class, matrix);
                    write(&whole, tiling, seat * tiling.rows, index);
                }
            }
            let per_lane = m.head_mode == HeadMode::PerLane;
            let seat = if per_lane { seat } else { self.rank * partition.blocks + block };
            let whole = self.head_of(partition, lane);
            let index = start + partition.index_offset(partition.classes.len(), Matrix::Qkv);
            for pass in 0..partition.head_passes {
                let row = pass * partition.head.rows;
                write(&whole, &partition.head, seat * partition.rows_head + row, index + row);
            }
            if let Some(tail) = &partition.tail {
                let row = partition.head_passes * partition.head.rows;
                write(&whole, tail, seat * partition.rows_head + row, index + row);
            }
        }
        out
    }

    /// Rows of halves, padded.
    fn plain_rows(&self, partition: &Partition, tensors: &[u32]) -> Vec<u8> {
        let grids = tensors.iter().flat_map(|tensor| self.grid(*tensor, 0));
        let row = |mut row: Vec<f32>| {
            row.resize(partition.hidden as usize, 0.0);
            row.into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes())
        };
        grids.flat_map(row).collect()
    }

    /// What becomes of it: lines, embedding, norms.
    fn packed(&self, partition: &Partition, sim: &Sim, most: usize) -> Result<[Vec<u8>; 4]> {
        Ok(self.uploaded(partition, sim, most)?.0)
    }

    /// The same, which scales rows have, and how many bytes went to the device.
    fn uploaded(
        &self,
        partition: &Partition,
        sim: &Sim,
        most: usize,
    ) -> Result<([Vec<u8>; 4], u64)> {
        let buffers = [Buffer::in_place(Arc::new(self.bytes.clone()))];
        let (program, model) = (&self.program, &self.model);
        let weights = Weights { program, buffers: &buffers, model, partition, rank: self.rank };
        let row = partition.hidden as usize * 2;
        let line = (partition.stream_bytes(model) * u64::from(partition.blocks)) as usize;
        let to = [line, model.vocab_all as usize * row].map(|n| sim.alloc(n).unwrap());
        let [line, embed] = to.each_ref().map(|memory| memory.address);
        let packing = weights.packing(To { line, embed, experts: 0 });
        let phases = run_within(sim, &weights, &packing, most)?;
        let read = to.each_ref().map(|memory| {
            let mut out = vec![0; memory.bytes];
            sim.read(memory, 0, &mut out).unwrap();
            out
        });
        let [line, embed] = read;
        let all = [line, embed, weights.norms()?, packing.scale_index];
        Ok((all, phases.iter().map(|phase| phase.bytes).sum()))
    }

    fn check(&self, sim: &Sim, most: usize) {
        let partition = Partition::new(&self.model, &sim.info().unwrap(), 64).unwrap();
        let norms = self.model.norms().map(|norm| norm.tensor);
        let norms: Vec<_> = norms.collect();
        let [lines, embed, plain, index] = self.packed(&partition, sim, most).unwrap();
        let what = format!("{:?} {:?}\n{partition}", self.codes, self.model);
        for (name, got, wanted) in [
            ("embedding", embed, self.plain_rows(&partition, &[self.model.embed])),
            ("norms", plain, self.plain_rows(&partition, &norms)),
        ] {
            assert_eq!(got.len(), wanted.len(), "{name}");
            let differs = got.iter().zip(&wanted).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{name} of {what}");
        }
        let mut rest = &lines[..];
        for (at, piece) in self.lines(&partition).iter().enumerate() {
            let (got, behind) = rest.split_at(piece.split.bytes() as usize);
            rest = behind;
            let differs = match piece.split.encoding.bits {
                StoredBits::F16 => {
                    let mut wanted = Vec::new();
                    write(&piece.grid, &piece.split, piece.first, &mut wanted);
                    got.iter().zip(&wanted).position(|(a, b)| a != b)
                }
                _ => {
                    let index = &index[piece.index as usize..];
                    let wanted = piece.split.rows * piece.split.k;
                    (0..wanted).position(|n| {
                        let (row, col) = (n / piece.split.k, n % piece.split.k);
                        decoded(got, &piece.split, index, row, col) != piece.number(row, col)
                    })
                }
            };
            assert_eq!(differs, None, "piece {at}, {:?}, of {what}", piece.split);
        }
        assert!(rest.is_empty());
    }
}

/// A block's rows of a matrix.
struct Piece {
    /// All rows.
    grid: Grid,
    split: Tiling,
    /// The block's first one.
    first: u32,
    /// Where the index says which scales they have.
    index: u32,
}

impl Piece {
    /// A number of the block's, 0 where there is none.
    fn number(&self, row: u32, col: u32) -> f32 {
        let row = self.grid.get((self.first + row) as usize);
        row.and_then(|row| row.get(col as usize)).copied().unwrap_or(0.0)
    }
}

/// A number out of a block's stages of codes and scales, as matvec.h finds it.
fn decoded(stages: &[u8], split: &Tiling, index: &[u8], row: u32, col: u32) -> f32 {
    let pairs = split.k / 32 / split.k_warps;
    let (warp, unit) = (col / 32 / pairs, col / 32 % pairs);
    let (stage, unit) = (unit / split.chunk * split.stage_bytes, unit % split.chunk);
    let e = &split.encoding;
    let unit_at = (warp * split.chunk + unit) * split.unit_bytes();
    let tile = unit_at + row / 16 * 16 * e.row_bytes();
    // Lane 4 g + t has rows 2 g and 2 g + 1, columns 8 t to 8 t + 7, four codes a word.
    let lane = row % 16 / 2 * 4 + col % 32 / 8;
    let at = (stage + tile + lane * e.lane_bytes()) as usize;
    let run = warp * (split.chunk / split.span) + unit / split.span;
    let own = if e.bits.per_row() { row } else { u32::from(index[row as usize]) };
    let scale = (run * e.scale_rows + own) * e.scale_bytes();
    let scale = &stages[(stage + split.code_bytes() + scale) as usize..];
    let (pair, odd) = (col % 8 / 2, col % 2);
    // Of 4 bits a word is eight columns of a row.
    let word = || {
        let at = at + (row % 2 * 4) as usize;
        u32::from_le_bytes(stages[at..at + 4].try_into().unwrap()) >> (16 * odd)
    };
    match e.bits {
        StoredBits::F16 => unreachable!("halves have no scales"),
        StoredBits::F8 => {
            let code = at + (pair * 4 + row % 2 * 2 + odd) as usize;
            code_to_f32(Codes::E4m3, &stages[code..], 0) * number_to_f32(Dtype::F32, &scale[..4])
        }
        StoredBits::I8 | StoredBits::I8Half => {
            let code = at + (pair * 4 + row % 2 * 2 + odd) as usize;
            code_to_f32(Codes::I8, &stages[code..], 0) * number_to_f32(Dtype::F32, &scale[..4])
        }
        StoredBits::I4 | StoredBits::I4Half | StoredBits::I4Zeros => {
            let code = (word() >> (4 * pair) & 15) as u8 ^ 8;
            let kind = if e.bits == StoredBits::I4 { Dtype::Bf16 } else { Dtype::F16 };
            // Padding has no scale.
            let zero = if e.bits == StoredBits::I4Zeros { f32::from(scale[2]) - 8.0 } else { 0.0 };
            (code_to_f32(Codes::I4, &[code], 0) - zero) * number_to_f32(kind, &scale[..2])
        }
        StoredBits::E2m1 => {
            let [sign, rest] = [[15, 9], [12, 6], [14, 3], [13, 0]][pair as usize];
            let code = (word() >> sign & 1) << 3 | word() >> rest & 7;
            // Padding has neither code nor scale.
            let scale = scale[0].saturating_sub(14);
            code_to_f32(Codes::E2m1, &[code as u8], 0) * number_to_f32(Dtype::F8E8m0, &[scale])
        }
    }
}

/// A block's rows of a matrix in the order of matvec.h's stages.
fn write(whole: &Grid, split: &Tiling, first: u32, out: &mut Vec<u8>) {
    let at = |row: u32, col: u32| {
        let row = whole.get((first + row) as usize);
        let value = row.and_then(|row| row.get(col as usize)).copied().unwrap_or(0.0);
        f16::from_f32(value).to_le_bytes()
    };
    let pairs = split.k / 32 / split.k_warps;
    for stage in 0..split.stages {
        for warp in 0..split.k_warps {
            for pair in 0..split.chunk {
                let column = (warp * pairs + stage * split.chunk + pair) * 32;
                for tile in (0..split.rows).step_by(16) {
                    for half in 0..2 {
                        for row in (tile..split.rows.min(tile + 16)).step_by(2) {
                            for col in (0..32).filter(|c| c / 4 % 2 == half && c % 2 == 0) {
                                let col = column + col;
                                for (row, col) in
                                    [(row, col), (row, col + 1), (row + 1, col), (row + 1, col + 1)]
                                {
                                    out.extend(at(row, col));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A small dense model with a padded width and padded heads.
fn small() -> Model {
    let class = |c: &mut Class| *c = Class { heads: 4, kv_heads: 2, head_dim: 24, ffn: 100, ..*c };
    let mut model = shapes::with_class(shapes::model("1b"), class);
    model.layer.truncate(2);
    Model { hidden: 72, vocab: 333, vocab_all: 333, ..model }
}

/// The same with norms of so many rows.
fn norms(mut model: Model, rows: u32) -> Model {
    model.final_norm.rows = rows;
    model.layer.iter_mut().for_each(|layer| layer.norms.iter_mut().for_each(|n| n.rows = rows));
    model
}

/// Enough that nothing comes in pieces.
const ROOM: usize = 64 << 20;

#[test]
fn dense_models_of_every_format() {
    let sim = Sim::open("sim:blocks=8").unwrap();
    for codes in [Codes::F32, Codes::F16, Codes::Bf16, Codes::E4m3, Codes::I4, Codes::E2m1] {
        for interleaved in [false, true] {
            let case = Case::new(Model { interleaved, ..small() }, codes, 0);
            case.check(&sim, ROOM);
        }
    }
}

/// Codes as they are stored: each number is found again, in shorter lines. Where a unit
/// would have two scales, the matrix becomes halves, and the plan says so.
#[test]
fn codes_land_where_they_are_decoded() {
    let class = |c: &mut Class| *c = Class { heads: 16, kv_heads: 8, head_dim: 8, ffn: 144, ..*c };
    let wide = Model { hidden: 136, ..shapes::with_class(small(), class) };
    // Rows and columns of a block; which matrices stay codes, head included.
    let (f8, i4, e2m1) = (StoredBits::F8, StoredBits::I4, StoredBits::E2m1);
    for (bits, block, coded) in [
        (f8, [128, 128], [true; 5]),
        (f8, [24, 64], [true; 5]),
        (f8, [1, 32], [true; 5]),
        // Heads have a unit each, whose scale is the same six times.
        (f8, [200, 48], [false, true, false, false, false]),
        (i4, [1, 32], [true; 5]),
        (i4, [1, 128], [true; 5]),
        (e2m1, [1, 32], [true; 5]),
        (StoredBits::I4Half, [1, 64], [true; 5]),
        (StoredBits::I4Zeros, [1, 32], [true; 5]),
        (StoredBits::I8, [1, 1000], [true; 5]),
    ] {
        let codes = match bits {
            StoredBits::F16 | StoredBits::F8 => Codes::E4m3,
            StoredBits::I4 | StoredBits::I4Half | StoredBits::I4Zeros => Codes::I4,
            StoredBits::I8 | StoredBits::I8Half => Codes::I8,
            StoredBits::E2m1 => Codes::E2m1,
        };
        for (sim, rank) in [("sim:blocks=8", 0), ("sim:blocks=11,warp=64", 1)] {
            let sim = Sim::open(sim).unwrap();
            let sliced = Model { sliced: true, ranks: 2, vocab: 167, ..wide.clone() };
            let model = if rank == 0 { wide.clone() } else { sliced };
            let mut case = Case { group: block, bits, ..Case::empty(model, codes, rank) };
            case.fill();
            let all = Coded { bits, group: block };
            case.model = shapes::coded(case.model, |_| Some(all));
            case.model.coded_head = Some(Ok(all));
            let partition = Partition::new(&case.model, &sim.info().unwrap(), 64).unwrap();
            let all = partition.classes[0].matrices().map(|(_, t)| t).chain([&partition.head]);
            let seen: Vec<_> = all.map(|s| s.encoding.bits == bits).collect();
            let halves = seen.iter().filter(|coded| !**coded).count();
            assert_eq!(partition.as_halves.len(), halves, "{partition}");
            // A slice of 72 columns begins in the middle of a unit.
            if rank == 0 {
                assert_eq!(seen, coded, "{block:?}: {partition}");
            }
            case.check(&sim, if block[0] == 24 { 9000 } else { ROOM });
        }
    }
}

#[test]
fn a_small_scratch_takes_matrices_in_pieces() {
    let sim = Sim::open("sim:blocks=8,warp=64").unwrap();
    for codes in [Codes::F32, Codes::E4m3] {
        Case::new(small(), codes, 0).check(&sim, 8000);
    }
    let error = Case::new(small(), Codes::F32, 0);
    let partition = Partition::new(&error.model, &sim.info().unwrap(), 64).unwrap();
    let error = error.packed(&partition, &sim, 300).unwrap_err().to_string();
    assert!(error.contains("a row of 288 bytes"), "{error}");
}

/// Twelve warps of many blocks: several warps, stages and tiles a matrix, passes and a tail.
#[test]
fn a_wide_model_on_many_blocks() {
    let sim = Sim::open("sim:blocks=44,shared=120000").unwrap();
    let class = |c: &mut Class| *c = Class { head_dim: 96, ffn: 1536, ..*c };
    let mut wide = shapes::with_class(small(), class);
    wide.layer.truncate(1);
    let model = Model { hidden: 384, vocab: 12_345, vocab_all: 12_345, ..wide };
    let case = Case::new(model, Codes::Bf16, 0);
    let partition = Partition::new(&case.model, &sim.info().unwrap(), 64).unwrap();
    assert!(
        partition.warps == 12 && partition.head_passes > 0 && partition.tail.is_some(),
        "{partition}"
    );
    assert!(
        partition.classes[0].matrices().any(|(_, t)| t.k_warps > 1 && t.stages > 1),
        "{partition}"
    );
    case.check(&sim, ROOM);
}

#[test]
fn lanes_and_their_heads() {
    let sim = Sim::open("sim:blocks=11").unwrap();
    for head_mode in [HeadMode::PerLane, HeadMode::Mean, HeadMode::Concat] {
        let vocab = if head_mode == HeadMode::PerLane { 111 } else { 222 };
        let one = norms(Model { lanes: 2, head_mode, vocab, vocab_all: 222, ..small() }, 2);
        Case::new(one.clone(), Codes::Bf16, 0).check(&sim, ROOM);
        // The second of two machines with as many lanes each.
        let all = if head_mode == HeadMode::PerLane { 444 } else { 222 };
        let two = norms(Model { ranks: 2, vocab_all: all, ..one }, 1);
        Case::new(two, Codes::F16, 1).check(&sim, ROOM);
    }
}

#[test]
fn slices_of_whole_matrices() {
    let sim = Sim::open("sim:blocks=8").unwrap();
    for rank in 0..2 {
        for codes in [Codes::Bf16, Codes::E4m3] {
            let (ranks, sliced) = (2, true);
            let model = Model { ranks, sliced, vocab: 167, vocab_all: 333, ..small() };
            Case::new(model, codes, rank).check(&sim, ROOM);
        }
    }
}

/// Of what ranks share out each byte goes to one of them, all else to all.
#[test]
fn no_rank_copies_what_is_anothers() {
    let sim = Sim::open("sim:blocks=8").unwrap();
    for codes in [Codes::Bf16, Codes::E4m3] {
        let (mut copied, mut wanted) = (0, 0);
        for rank in 0..2 {
            let class = |c: &mut Class| *c = Class { heads: 2, kv_heads: 1, ffn: 500, ..*c };
            let wide = shapes::with_class(small(), class);
            let model = Model { ranks: 2, sliced: true, vocab: 167, vocab_all: 333, ..wide };
            let case = Case::new(model, codes, rank);
            let partition = Partition::new(&case.model, &sim.info().unwrap(), 64).unwrap();
            let bytes = |tensor: u32| case.program.tensors[tensor as usize].bytes();
            let norms = case.model.norms().map(|norm| norm.tensor);
            let (whole, norms) = (bytes(case.model.embed), norms.map(bytes).sum::<u64>());
            let all: u64 = (0..case.program.tensors.len() as u32).map(bytes).sum();
            wanted += whole + u64::from(rank == 0) * (all - norms - whole);
            copied += case.uploaded(&partition, &sim, ROOM).unwrap().1;
        }
        // Jobs, and the scales of FP8 once more.
        assert!((wanted..wanted + 8000).contains(&copied), "{codes:?}: {wanted}, {copied}");
    }
}

#[test]
fn a_weight_beyond_halves_is_told_with_tensor_and_row() {
    let sim = Sim::open("sim:blocks=8").unwrap();
    let mut case = Case::new(small(), Codes::Bf16, 0);
    let partition = Partition::new(&case.model, &sim.info().unwrap(), 64).unwrap();
    let tensor = case.model.layer[1].outputs[1];
    let t = case.program.tensors[tensor as usize];
    let mut put = |value: f32| {
        let at = (t.offset + u64::from(71 * t.cols + 99) * 2) as usize;
        case.bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        case.packed(&partition, &sim, ROOM)
    };
    put(-65_280.0).unwrap();
    let error = put(-65_536.0).unwrap_err().to_string();
    let wanted = format!("a weight of -65536 is beyond float16 (tensor {tensor}, row 71)");
    assert!(error.contains(&wanted), "{error}");
}
