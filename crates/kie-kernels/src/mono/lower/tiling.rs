//! How a block's rows of a matrix lie in its stream, and how its warps share them (ops/matvec.h).

/// What bounds a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stage {
    /// Bytes, at most.
    pub slot_bytes: u32,
    /// Tile pairs that a warp holds in registers.
    pub max_tiles: u32,
    /// Warps may share columns unevenly.
    pub uneven: bool,
}

/// Bits in which weights lie in the stream (shape.h's `StoredBits`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StoredBits {
    /// Halves, whatever was stored.
    #[default]
    F16 = 0,
    /// FP8 e4m3 codes, float32 scales that several rows may share.
    F8 = 1,
    /// Integers of 4 bits, a bfloat16 scale for each row.
    I4 = 2,
    /// MXFP4: floats e2m1 of 4 bits, an e8m0 scale for each row.
    E2m1 = 3,
    /// Integers of 4 bits, a float16 scale for each row.
    I4Half = 4,
    /// The same with a zero point beside each scale.
    I4Zeros = 5,
    /// Signed bytes, float32 scales that several rows may share.
    I8 = 6,
    /// Signed bytes, a float16 scale for each row.
    I8Half = 7,
}

impl StoredBits {
    /// Whether a weight has 4 bits.
    pub const fn is_4_bits(self) -> bool {
        match self {
            Self::F16 | Self::F8 | Self::I8 | Self::I8Half => false,
            Self::I4 | Self::E2m1 | Self::I4Half | Self::I4Zeros => true,
        }
    }

    /// Whether each row has a scale of its own for a group of columns: rows need no index.
    pub const fn per_row(self) -> bool {
        self.is_4_bits() || matches!(self, Self::I8Half)
    }
}

/// A matrix whose codes become halves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsHalves {
    /// Which, and why.
    pub why: String,
    /// Whether that rounds: halves have all of MXFP4's numbers.
    pub rounds: bool,
}

/// How the weights of a matrix lie in the stream (shape.h's `Encoding`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Encoding {
    /// A number.
    pub bits: StoredBits,
    /// Units that share their scales, at most; 0: there are none.
    pub group: u32,
    /// Scales that a block has for such a group, at most.
    pub scale_rows: u32,
}

impl Encoding {
    /// Bytes of a row of a unit, which has 32 columns.
    pub const fn row_bytes(&self) -> u32 {
        match self.bits {
            StoredBits::F16 => 64,
            StoredBits::F8 | StoredBits::I8 | StoredBits::I8Half => 32,
            StoredBits::I4 | StoredBits::E2m1 | StoredBits::I4Half | StoredBits::I4Zeros => 16,
        }
    }

    /// Bytes of a row pair's 8 columns of a unit: what a lane loads at once.
    pub const fn lane_bytes(&self) -> u32 {
        match self.bits {
            StoredBits::F16 | StoredBits::F8 | StoredBits::I8 | StoredBits::I8Half => 16,
            StoredBits::I4 | StoredBits::E2m1 | StoredBits::I4Half | StoredBits::I4Zeros => 8,
        }
    }

    /// Bytes of a scale, and of the zero point beside it.
    pub const fn scale_bytes(&self) -> u32 {
        match self.bits {
            StoredBits::F16 | StoredBits::F8 | StoredBits::I8 | StoredBits::I4Zeros => 4,
            StoredBits::I4 | StoredBits::I4Half | StoredBits::I8Half => 2,
            StoredBits::E2m1 => 1,
        }
    }

    /// Units of a stage of a warp, at most: each has its columns of the vector in registers. Of
    /// experts a block has few rows, whose stages fill a slot with more.
    const fn most_units(&self, experts: bool) -> u32 {
        match (self.bits.is_4_bits(), experts) {
            (true, false) => 4,
            (true, true) => 6,
            (false, _) => u32::MAX,
        }
    }

    /// Whether stages have scales behind the codes.
    pub const fn scaled(&self) -> bool {
        self.group > 0
    }

    /// Units of a stage of `chunk` a warp that share their scales.
    fn span(&self, chunk: u32) -> u32 {
        if self.scaled() {
            (1..=chunk)
                .rev()
                .find(|s| chunk.is_multiple_of(*s) && self.group.is_multiple_of(*s))
                .unwrap_or(1)
        } else {
            chunk
        }
    }

    fn stage_bytes(&self, rows: u32, k_warps: u32, chunk: u32) -> u32 {
        let codes = k_warps * chunk * rows * self.row_bytes();
        if self.scaled() {
            (codes + self.stage_scale_bytes(k_warps, chunk)).next_multiple_of(128)
        } else {
            codes
        }
    }

    /// Bytes of the scales of a stage.
    fn stage_scale_bytes(&self, k_warps: u32, chunk: u32) -> u32 {
        if self.scaled() {
            k_warps * (chunk / self.span(chunk)) * self.scale_rows * self.scale_bytes()
        } else {
            0
        }
    }
}

/// How the warps of a block share a matrix of `rows` x `k` (ops/matvec.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// What its weights are in the stream.
    pub encoding: Encoding,
    /// Rows of a block.
    pub rows: u32,
    /// Columns.
    pub k: u32,
    /// Warps that share the rows.
    pub row_warps: u32,
    /// Warps that share `k`.
    pub k_warps: u32,
    /// Tiles of 16 rows of a warp.
    pub tiles: u32,
    /// Units of 32 columns of a warp, at most.
    pub pairs: u32,
    /// Those of a stage.
    pub chunk: u32,
    /// Those of a stage that share their scales.
    pub span: u32,
    /// Stages.
    pub stages: u32,
    /// Bytes of a stage.
    pub stage_bytes: u32,
    /// The last warps have fewer units than the others, or none. A stage's scales then stand before
    /// its codes, so that those of warps without units can be left out at its end.
    pub uneven: bool,
}

/// Experts whose stages of gate and up stand side by side in one slot and are multiplied as one,
/// rows below each other (ops/experts.h). A row's sum is what it is alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stack {
    /// How many.
    pub experts: u32,
}

impl Stack {
    /// Of how many a tile has room at most: rows are those of two features and more.
    pub const MOST: u32 = 4;

    /// What they are multiplied as; pieces lie as the tiling of one has them.
    pub const fn tiling(self, of: &Tiling) -> Tiling {
        let rows = self.experts * of.rows;
        Tiling { rows, tiles: rows.div_ceil(16), ..*of }
    }
}

impl Tiling {
    /// Warps that share the rows; the others share `k`.
    pub(super) fn row_warps(
        rows: u32,
        k: u32,
        warps: u32,
        Stage { slot_bytes, uneven, .. }: Stage,
        encoding: Encoding,
    ) -> u32 {
        let tiles_all = rows.div_ceil(16);
        let fits = |w: &u32| {
            let columns = if uneven { 32 } else { 32 * (warps / w) };
            warps.is_multiple_of(*w)
                && tiles_all.is_multiple_of(*w)
                && k.is_multiple_of(columns)
                && encoding.stage_bytes(rows, warps / w, 1) <= slot_bytes
        };
        // Decoding 4 bits takes about what the stream takes: no warp should have less of it.
        let idle = encoding.bits.is_4_bits() && !tiles_all.is_multiple_of(warps);
        if tiles_all >= warps && !idle {
            warps
        } else {
            (1..warps).find(fits).unwrap_or(warps)
        }
    }

    pub(super) fn new(
        rows: u32,
        k: u32,
        warps: u32,
        stage: Stage,
        encoding: Encoding,
    ) -> Option<Self> {
        let row_warps = Self::row_warps(rows, k, warps, stage, encoding);
        Self::with_row_warps((rows, k), row_warps, warps, stage, encoding)
    }

    pub(super) fn with_row_warps(
        (rows, k): (u32, u32),
        row_warps: u32,
        warps: u32,
        stage: Stage,
        encoding: Encoding,
    ) -> Option<Self> {
        let Stage { slot_bytes, max_tiles, .. } = stage;
        let tiles_all = rows.div_ceil(16);
        let k_warps = warps / row_warps;
        let tiles = tiles_all.div_ceil(row_warps);
        let uneven = stage.uneven && !(k / 32).is_multiple_of(k_warps);
        // What a warp's units are whole stages of.
        let units = if uneven { k / 32 } else { k / 32 / k_warps };
        let good = |c: &u32| {
            units.is_multiple_of(*c)
                && *c <= encoding.most_units(stage.uneven)
                && encoding.stage_bytes(rows, k_warps, *c) <= slot_bytes
                && c * tiles * encoding.row_bytes() <= 64 * max_tiles
        };
        let (chunk, stages) = if uneven {
            // No warp has many more units than need be; a stage takes the time of a third of one.
            let stages = |c: &u32| (units / c).div_ceil(k_warps);
            let all = (1..=units).filter(good);
            let chunk = all.min_by_key(|c| (stages(c) * (3 * c + 1), u32::MAX - c)).unwrap_or(1);
            (chunk, stages(&chunk))
        } else {
            let chunk = (1..=units).rev().find(good).unwrap_or(1);
            (chunk, units / chunk)
        };
        let (pairs, span) = (stages * chunk, encoding.span(chunk));
        let mut stage_bytes = encoding.stage_bytes(rows, k_warps, chunk);
        if uneven && encoding.scaled() {
            let scales = encoding.stage_scale_bytes(k_warps, chunk).next_multiple_of(128);
            stage_bytes =
                (scales + k_warps * chunk * rows * encoding.row_bytes()).next_multiple_of(128);
        }
        let whole = (uneven || pairs * 32 * k_warps == k)
            && k.is_multiple_of(32)
            && stage_bytes <= slot_bytes;
        let tiling = Self {
            encoding,
            rows,
            k,
            row_warps,
            k_warps,
            tiles,
            pairs,
            chunk,
            span,
            stages,
            stage_bytes,
            uneven,
        };
        whole.then_some(tiling)
    }

    /// Whether the rows of so many experts are one tile.
    pub(super) const fn stacks(&self, experts: u32) -> bool {
        self.row_warps == 1 && experts * self.rows <= 16
    }

    /// Bytes of a unit.
    pub const fn unit_bytes(&self) -> u32 {
        self.rows * self.encoding.row_bytes()
    }

    /// Bytes of the codes of a stage; its scales stand behind them.
    pub const fn code_bytes(&self) -> u32 {
        self.k_warps * self.chunk * self.unit_bytes()
    }

    /// Where the codes of a stage begin.
    pub fn codes_at(&self) -> u32 {
        if self.uneven {
            self.encoding.stage_scale_bytes(self.k_warps, self.chunk).next_multiple_of(128)
        } else {
            0
        }
    }

    /// Where its scales begin.
    pub const fn scales_at(&self) -> u32 {
        if self.uneven {
            0
        } else {
            self.code_bytes()
        }
    }

    /// Chunks of the whole matrix: of units that a warp has in a stage.
    pub const fn chunks(&self) -> u32 {
        self.k / 32 / self.chunk
    }

    /// The first stages, in which one more warp than in the others has units, and the bytes of
    /// either that hold anything.
    pub fn used(&self) -> (u32, [u32; 2]) {
        if !self.uneven {
            return (0, [self.stage_bytes; 2]);
        }
        let (warps, long) = (self.chunks() / self.stages, self.chunks() % self.stages);
        let bytes = |warps| self.codes_at() + warps * self.chunk * self.unit_bytes();
        (long, [bytes(warps + 1).min(self.stage_bytes), bytes(warps)])
    }

    /// Bytes of the stages that hold anything.
    pub fn used_bytes(&self) -> u64 {
        let (long, [more, less]) = self.used();
        u64::from(long) * u64::from(more) + u64::from(self.stages - long) * u64::from(less)
    }

    /// Bytes that say which scales the rows have.
    pub const fn index_bytes(&self) -> u32 {
        if self.encoding.scaled() && !self.encoding.bits.per_row() {
            self.rows
        } else {
            0
        }
    }

    /// Bytes of the whole matrix in a block's stream.
    pub const fn bytes(&self) -> u64 {
        self.stages as u64 * self.stage_bytes as u64
    }

    /// Pairs of rows.
    pub const fn row_pairs(&self) -> u32 {
        self.rows / 2
    }

    /// Results that one of so many threads ends up with: row pairs of a column, whose vectors are
    /// `parts` of those that a matrix unit multiplies at once.
    pub const fn items(&self, (columns, parts): (u32, u32), threads: u32) -> u32 {
        match (self.k_warps, columns, parts) {
            (1, 1, _) | (1, _, 2) => self.tiles,
            (1, ..) => 2 * self.tiles,
            _ => (self.row_pairs() * columns).div_ceil(threads),
        }
    }

    /// Floats of the parts that warps which share `k` leave for each other.
    pub const fn part_floats(&self, columns: u32) -> u32 {
        if self.k_warps == 1 {
            0
        } else {
            self.k_warps * self.rows * columns
        }
    }
}
