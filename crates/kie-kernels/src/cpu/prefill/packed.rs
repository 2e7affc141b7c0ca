//! Activations as the products of a prefill read them.

use crate::abi::Codes;
use crate::matrix::Factors;
use crate::simd::Level;

/// Columns of a packed block.
pub const BLOCK: usize = 16;
/// Columns between two readings of the weights.
pub(super) const CHUNK: usize = 512;

/// Rows that a group of panels of pairs holds; the packed columns are read once for each group.
pub(super) const GROUP: usize = 256;
/// Most steps of 32 in k that a panel holds.
pub(super) const STEPS: usize = 8;
/// Most cuts of a piece: one for each half of a step.
pub(super) const CUTS: usize = 2 * STEPS;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

impl Default for Line {
    fn default() -> Self {
        Self([0; 64])
    }
}

/// How activations lie in [`Packed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `[block][k][16 columns]` float32: a line for each k.
    Single,
    /// `[block][pair of k][16 columns][2]` bfloat16, zeros up to a multiple of 32 in k.
    Pairs,
}

impl Form {
    /// How weights of such codes want them.
    pub fn of(level: Level, codes: Codes) -> Self {
        // Exact in bfloat16.
        let fits = match codes {
            Codes::Bf16
            | Codes::E4m3
            | Codes::I8
            | Codes::I4
            | Codes::E2m1
            | Codes::Q8x0
            | Codes::Q4x0
            | Codes::Q4k
            | Codes::Q6k => true,
            Codes::F32 | Codes::F16 => false,
        };
        if fits && level >= Level::Avx512Bf16 {
            Self::Pairs
        } else {
            Self::Single
        }
    }

    /// Lines of one block.
    pub fn lines(self, cols: usize) -> usize {
        match self {
            Self::Single => cols,
            Self::Pairs => cols.next_multiple_of(32) / 2,
        }
    }
}

/// Activations in the layout of [`prefill`], in each form that the weights of a step want. Reused
/// from step to step, it grows to the largest.
#[derive(Default)]
pub struct Packed {
    /// By [`Form`].
    pub(super) lines: [Vec<Line>; 2],
    /// The forms that hold the present activations.
    pub(super) ready: [bool; 2],
    pub(super) n: usize,
    pub(super) cols: usize,
}

impl Packed {
    /// Room for `n` columns of `cols` numbers in every form, so that packing never allocates.
    pub fn with_capacity(n: usize, cols: usize) -> Self {
        let lines = |form: Form| Vec::with_capacity(n.div_ceil(BLOCK) * form.lines(cols));
        Self { lines: [lines(Form::Single), lines(Form::Pairs)], ..Self::default() }
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.n
    }

    /// All of them.
    pub fn all(&self) -> Part<'_> {
        Part::new(self.n, self.cols, |form| {
            self.ready[form as usize].then_some(&self.lines[form as usize][..])
        })
    }
}

/// What a thread needs to multiply [`Form::Pairs`]: weights on their way, and their sums.
///
/// Taken before a pass begins, since an allocation that fails inside one ends the process.
#[derive(Default)]
pub struct Panels {
    /// `[GROUP / 16][STEPS]` tiles of 16 rows x 32 numbers.
    pub(super) panel: Vec<Line>,
    /// `[block][GROUP][16]` float32.
    pub(super) sums: Vec<Line>,
    /// Four tiles that wait for their factors, or go nowhere.
    pub(super) aside: Vec<Line>,
    /// Of each row of a group those of its cuts.
    pub(super) factors: Vec<Factors>,
    /// `[block][cut]` sums of 16 columns, which offsets are multiplied with.
    pub(super) columns: Vec<Line>,
}

impl Panels {
    /// Room for products with one of these forms; [`Form::Single`] needs none.
    pub fn of(mut forms: impl Iterator<Item = Form>) -> Self {
        if forms.all(|form| form == Form::Single) {
            return Self::default();
        }
        let lines = |n| vec![Line::default(); n];
        let [panel, sums, aside, columns] = Self::LINES.map(lines);
        Self { panel, sums, aside, factors: vec![Factors::NONE; GROUP], columns }
    }

    /// Lines of panel, sums, aside and columns.
    const LINES: [usize; 4] =
        [GROUP / 16 * STEPS * 16, CHUNK / BLOCK * GROUP, 64, CHUNK / BLOCK * CUTS];

    /// Bytes of one that holds something.
    pub const BYTES: usize = 64
        * (Self::LINES[0] + Self::LINES[1] + Self::LINES[2] + Self::LINES[3])
        + size_of::<Factors>() * GROUP;
}

/// Packed activations as a product reads them.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// By [`Form`]; blocks one behind the other, none of those that were not packed.
    lines: [&'a [Line]; 2],
    pub(super) n: usize,
    pub(super) cols: usize,
}

impl<'a> Part<'a> {
    /// So many columns of `cols` numbers, in the forms that there are.
    pub fn new(n: usize, cols: usize, lines: impl Fn(Form) -> Option<&'a [Line]>) -> Self {
        let lines = [Form::Single, Form::Pairs].map(|form| lines(form).unwrap_or_default());
        Self { lines, n, cols }
    }

    /// Whether they are packed in a form.
    pub(super) fn is_ready(&self, form: Form) -> bool {
        self.lines[form as usize].len() >= self.n.div_ceil(BLOCK) * form.lines(self.cols)
    }

    /// First line of a block.
    pub(super) fn block(&self, form: Form, block: usize) -> *const Line {
        let lines = form.lines(self.cols);
        self.lines[form as usize][block * lines..(block + 1) * lines].as_ptr()
    }
}
