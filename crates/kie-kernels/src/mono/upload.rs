//! Weights on their way: their bytes go up as they are stored, a scratch full at a time, and the
//! kernel of `kernels/common/pack.h` puts them where [`super::pack`]'s tables say, while the other
//! scratch is filled.
//!
//! Invariants: a scratch is written only when the kernel that read it has ended; both are freed
//! before [`run`] returns.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lower::parts::Parts;
use super::pack::{beyond, Packing, Target, Weights};
use super::source;
use super::wire::{PackArgs, PackJob, Wire};
use crate::abi::{Layout, Tensor};
use crate::device::Phase;
use crate::error::{Error, Result};
use crate::machine::{wait_within, Flight, Launch, Machine, Memory, Module, Platform, Source};
use crate::matrix::{rows_of_columns, Matrix as Stored};

/// Bytes of a scratch at most.
const SCRATCH_BYTES: usize = 128 << 20;
/// Bytes of rows that are made of columns at a time.
const ROWS_BYTES: usize = 4 << 20;
/// Jobs of a scratch; they lie at its beginning.
const JOBS: usize = 512;
/// Alignment of what lies in a scratch: that of every number, and of whole lines of memory.
const ALIGN: usize = 256;

/// What the compiler is given. It does not depend on the model.
pub fn kernel(platform: Platform) -> Source {
    Source { defines: Vec::new(), text: source::pack_text(platform), entries: vec!["kie_pack"] }
}

/// Device memory that [`run`] takes for as long as it runs, at most, for so many packed bytes.
/// They were stored in 32 bits a number at most.
pub fn most_bytes(packed: u64) -> u64 {
    2 * (2 * packed).min(SCRATCH_BYTES as u64)
}

/// Half of the memory under way.
struct Half<'a> {
    memory: Memory,
    flight: Option<Box<dyn Flight>>,
    /// Bytes taken of it.
    used: usize,
    pieces: Vec<(usize, &'a [u8])>,
    jobs: Vec<PackJob>,
}

/// Where the time went.
#[derive(Debug, Default)]
struct Times {
    copy: Duration,
    bytes: u64,
    pack: Duration,
}

struct Upload<'a> {
    weights: &'a Weights<'a>,
    machine: &'a dyn Machine,
    module: Arc<dyn Module>,
    halves: [Half<'a>; 2],
    /// The half being filled.
    current: usize,
    beyond: Memory,
    times: Times,
}

/// Copies and packs everything; tells how long it took.
///
/// # Errors
/// [`Error::InvalidProgram`] for a weight beyond float16, or what the machine says.
pub fn run(machine: &dyn Machine, weights: &Weights<'_>, packing: &Packing) -> Result<Vec<Phase>> {
    run_within(machine, weights, packing, SCRATCH_BYTES)
}

/// The same with a scratch of so many bytes at most.
fn run_within(
    machine: &dyn Machine,
    weights: &Weights<'_>,
    packing: &Packing,
    most: usize,
) -> Result<Vec<Phase>> {
    let began = Instant::now();
    let module = machine.compile(&kernel(machine.platform()))?;
    let compiled = began.elapsed();
    let places: Vec<&[u8]> = packing.tables.iter().map(|table| bytes_of(&table.places)).collect();
    let mut at = 0;
    let mut pieces = Vec::new();
    for bytes in places {
        pieces.push((at, bytes));
        at += bytes.len();
    }
    let places = machine.alloc(at.max(ALIGN))?;
    machine.write_all(&places, &pieces)?;
    let tables: Vec<u64> = pieces.iter().map(|(at, _)| places.address + *at as u64).collect();
    let room = scratch_bytes(weights, packing, most);
    let half = || -> Result<Half<'_>> {
        let memory = machine.alloc(room)?;
        Ok(Half { memory, flight: None, used: JOBS_BYTES, pieces: vec![], jobs: vec![] })
    };
    let mut upload = Upload {
        weights,
        machine,
        module,
        halves: [half()?, half()?],
        current: 0,
        beyond: machine.alloc(8)?,
        times: Times::default(),
    };
    let prepared = began.elapsed() - compiled;
    for ((tensor, lane), targets) in &packing.tasks {
        upload.matrix((*tensor, *lane), targets, packing, &tables)?;
    }
    upload.flush()?;
    upload.wait_for(0)?;
    upload.wait_for(1)?;
    upload.check()?;
    let times = upload.times;
    Ok(vec![
        Phase::new("packing kernel", compiled, 0),
        Phase::new("tables and scratch", prepared, 0),
        Phase::new("weights to the device", times.copy, times.bytes),
        Phase::new("rest of packing", times.pack, 0),
    ])
}

const JOBS_BYTES: usize = (JOBS * size_of::<PackJob>()).next_multiple_of(ALIGN);

/// Plain structures one after another.
fn bytes_of<T: Wire>(all: &[T]) -> &[u8] {
    // SAFETY: no padding (`Wire`'s promise), so every byte is initialised.
    unsafe { std::slice::from_raw_parts(all.as_ptr().cast(), size_of_val(all)) }
}

/// Bytes of one scratch: all weights, or the most.
fn scratch_bytes(weights: &Weights<'_>, packing: &Packing, most: usize) -> usize {
    let all = packing.tasks.keys().map(|(tensor, _)| {
        let tensor = weights.tensor(*tensor);
        (tensor.bytes() / u64::from(tensor.lanes)) as usize + 2 * ALIGN
    });
    JOBS_BYTES + all.sum::<usize>().clamp(ALIGN, most)
}

/// Columns of a stored matrix of which something is made: a rank's own, of a matrix that it has a
/// slice of.
fn columns_of(targets: &[Target], stored: &Stored<'_>) -> Range<usize> {
    let (cols, piece) = (stored.cols, stored.codes.row().numbers as usize);
    if targets.iter().any(|t| t.turned.is_some()) {
        return 0..cols;
    }
    let end = |p: &Parts| (p.skip + p.count * p.real) as usize;
    let first = targets.iter().map(|t| t.parts.skip as usize).min().unwrap_or(0);
    let last = targets.iter().map(|t| end(&t.parts)).max().unwrap_or(0);
    // Whole pieces of codes.
    first.min(cols) / piece * piece..last.min(cols).next_multiple_of(piece)
}

impl<'a> Upload<'a> {
    /// One stored matrix, in pieces that fit.
    fn matrix(
        &mut self,
        of: (u32, u32),
        targets: &[Target],
        packing: &Packing,
        tables: &[u64],
    ) -> Result<()> {
        let (weights, (tensor, lane)) = (self.weights, of);
        let (tensor, stored) = (weights.tensor(tensor), weights.stored(tensor, lane));
        let all = targets.iter().map(|t| t.rows(&packing.tables[t.table]));
        let rows = stored.rows as u32;
        let first = all.clone().map(|t| t.start).min().unwrap_or(0).min(rows);
        let end = all.map(|t| t.end).max().unwrap_or(0).min(rows);
        if stored.row_step > 1 && stored.scales.is_some_and(|s| s.block_rows > 1) {
            let why = "rows of two matrices in turn, and scales of several rows";
            return Err(Error::Failed(why.to_owned()));
        }
        let columns = columns_of(targets, &stored);
        let width = columns.len();
        let row_bytes = stored.codes.bytes_of(width);
        let mut at = first;
        while at < end {
            let fit = self.rows_that_fit(tensor, width, targets.len());
            if fit == 0 && self.halves[self.current].jobs.is_empty() {
                let why = format!("a row of {row_bytes} bytes is too long to load");
                return Err(Error::Failed(why));
            }
            if fit == 0 {
                self.flush()?;
                continue;
            }
            let count = fit.min(end - at);
            let rows = at..at + count;
            let [from, scales, zeros] = match tensor.layout {
                Layout::RowMajor => self.take(&stored, rows, &columns),
                Layout::ColumnMajor => [self.take_columns(&stored, rows, &columns)?, 0, 0],
            };
            for target in targets {
                let all = target.rows(&packing.tables[target.table]);
                let begin = at.max(all.start);
                let rows = (at + count).min(all.end).saturating_sub(begin);
                if rows == 0 {
                    continue;
                }
                let each = tensor.encoding.scale.bytes() as u64;
                let grid = u64::from(tensor.scale_grid()[1]);
                let before = stored.codes.bytes_of(columns.start) as u64;
                let blocks =
                    |row: u32| u64::from(row.checked_div(tensor.encoding.group[0]).unwrap_or(0));
                let (turned, k_first, places) = target.place_of(begin - all.start);
                let job = PackJob {
                    // Where the row's first number would stand.
                    from: (from + u64::from(begin - at) * row_bytes as u64).wrapping_sub(before),
                    scales: scales + (blocks(begin) - blocks(at)) * grid * each,
                    zeros: if zeros == 0 { 0 } else { zeros + (blocks(begin) - blocks(at)) * grid },
                    places: tables[target.table] + places,
                    turned,
                    k_first,
                    first: begin,
                    rows,
                    tag: (of.0 + 1) << TAG_LANE | of.1,
                    stride: width as u32,
                    ..PackJob::of(tensor, target)
                };
                self.halves[self.current].jobs.push(job);
            }
            at += count;
        }
        Ok(())
    }

    /// Rows of a matrix for which there is room, with their scales.
    fn rows_that_fit(&self, tensor: &Tensor, width: usize, targets: usize) -> u32 {
        let half = &self.halves[self.current];
        if half.jobs.len() + targets > JOBS {
            return 0;
        }
        let scales = match tensor.scale_grid() {
            [0, _] => 0,
            _ => (tensor.scale_bytes() + tensor.zero_bytes()) as usize + 2 * ALIGN,
        };
        let room = half.memory.bytes.saturating_sub(half.used + ALIGN + scales);
        (room / tensor.encoding.codes.bytes_of(width).max(1)) as u32
    }

    /// Gives columns of rows (and the rows' scales and zero points) room in the scratch: where they
    /// will be; 0 where there are none.
    fn take(&mut self, stored: &Stored<'a>, rows: Range<u32>, columns: &Range<usize>) -> [u64; 3] {
        let half = &mut self.halves[self.current];
        // Of each of `rows`, which begin `each` bytes apart, `take` bytes behind the first `skip`.
        let mut put =
            |bytes: &'a [u8], rows: Range<usize>, each: usize, [skip, take]: [usize; 2]| {
                let at = half.used;
                if (skip, take) == (0, each) {
                    half.pieces.push((at, &bytes[rows.start * each..rows.end * each]));
                    half.used += rows.len() * each;
                } else {
                    for row in rows {
                        half.pieces.push((half.used, &bytes[row * each + skip..][..take]));
                        half.used += take;
                    }
                }
                half.used = half.used.next_multiple_of(ALIGN);
                half.memory.address + at as u64
            };
        let (first, end) = (rows.start as usize, rows.end as usize);
        let of = |numbers| stored.codes.bytes_of(numbers);
        let part = [of(columns.start), of(columns.len())];
        let from = put(stored.data, first..end, stored.stride(), part);
        let Some(s) = stored.scales else { return [from, 0, 0] };
        let mut of_groups = |all: &'a [u8], each: usize| {
            let grid = each * stored.cols.div_ceil(s.block_cols);
            let rows = first / s.block_rows..end.div_ceil(s.block_rows);
            // Rows that are not neighbours have scales of their own.
            put(all, rows, stored.row_step * grid, [0, grid])
        };
        let scales = of_groups(s.data, s.dtype.bytes());
        [from, scales, s.zeros.map_or(0, |zeros| of_groups(zeros, 1))]
    }

    /// The same of numbers that are stored by columns: rows are made of them a few at a time, and
    /// go up at once.
    fn take_columns(
        &mut self,
        stored: &Stored<'a>,
        rows: Range<u32>,
        columns: &Range<usize>,
    ) -> Result<u64> {
        self.wait_for(self.current)?;
        let began = Instant::now();
        let half = &mut self.halves[self.current];
        let (at, size) = (half.used, stored.codes.bytes_of(1));
        let sizes = (size, stored.rows * stored.row_step, stored.row_step);
        let together = (ROWS_BYTES / (columns.len() * size).max(1)).max(1);
        let (first, end) = (rows.start as usize, rows.end as usize);
        // A rank may have none of the columns.
        let end = if columns.is_empty() { first } else { end };
        for first in (first..end).step_by(together) {
            let rows = first..end.min(first + together);
            let bytes = rows_of_columns(stored.data, sizes, rows, columns.clone());
            self.machine.write(&half.memory, half.used, &bytes)?;
            half.used += bytes.len();
        }
        self.times.copy += began.elapsed();
        self.times.bytes += (half.used - at) as u64;
        half.used = half.used.next_multiple_of(ALIGN);
        Ok(half.memory.address + at as u64)
    }

    /// Sends the scratch up, starts the kernel on it, and goes on with the other one.
    fn flush(&mut self) -> Result<()> {
        self.wait_for(self.current)?;
        let half = &mut self.halves[self.current];
        if half.jobs.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let jobs = std::mem::take(&mut half.jobs);
        let mut pieces: Vec<(usize, &[u8])> = std::mem::take(&mut half.pieces);
        pieces.push((0, bytes_of(&jobs)));
        self.machine.write_all(&half.memory, &pieces)?;
        self.times.copy += began.elapsed();
        self.times.bytes += pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
        let (blocks, threads) = match self.machine.platform() {
            // A fiber a thread: as few as show that blocks share the rows.
            Platform::Sim => (2, self.machine.warp()),
            Platform::Cuda | Platform::Hip => (self.machine.info()?.multiprocessors, 1024),
        };
        let args = PackArgs {
            jobs: half.memory.address,
            beyond: self.beyond.address,
            count: jobs.len() as u32,
            blocks,
            threads,
            padding: 0,
        };
        let args = args.as_bytes();
        let launch = Launch { entry: "kie_pack", blocks, threads, shared_bytes: 0, args };
        half.flight = Some(self.machine.launch_alone(&self.module, &launch)?);
        half.used = JOBS_BYTES;
        self.current = 1 - self.current;
        Ok(())
    }

    /// Waits until a scratch is free.
    fn wait_for(&mut self, half: usize) -> Result<()> {
        let began = Instant::now();
        if let Some(mut flight) = self.halves[half].flight.take() {
            wait_within(&mut *flight, Duration::MAX)?;
        }
        self.times.pack += began.elapsed();
        Ok(())
    }

    /// Refuses what the kernel found to be beyond float16.
    fn check(&self) -> Result<()> {
        let mut found = [0; 8];
        self.machine.read(&self.beyond, 0, &mut found)?;
        let found = u64::from_le_bytes(found);
        let (tag, row) = ((found >> 32) as u32, found as u32);
        let Some(tensor) = (tag >> TAG_LANE).checked_sub(1) else { return Ok(()) };
        let far = self.weights.beyond_half(tensor, tag & ((1 << TAG_LANE) - 1), row);
        let far = far.map_or_else(String::new, |far| format!(" of {far}"));
        Err(beyond(&far, tensor, row))
    }
}

/// Bits of a lane in a tag.
const TAG_LANE: u32 = 10;

impl PackJob {
    /// What does not depend on the rows.
    fn of(tensor: &Tensor, target: &Target) -> Self {
        let Parts { count: parts, real, padded, skip } = target.parts;
        let split = target.split;
        let [unit_bytes, k_warps, pairs, chunk] =
            split.map_or([0, 1, 1, 1], |s| [s.unit_bytes(), s.k_warps, s.pairs, s.chunk]);
        let e = split.map(|s| s.encoding).unwrap_or_default();
        let [stage_bytes, span] = split.map_or([0, 1], |s| [s.stage_bytes, s.span]);
        let [block_rows, block_cols] = match tensor.encoding.codes.row().group {
            0 => tensor.encoding.group,
            among => [1, among],
        };
        Self {
            from: 0,
            scales: 0,
            zeros: 0,
            places: 0,
            to: target.to,
            rows: 0,
            cols: tensor.cols,
            first: 0,
            format: tensor.encoding.codes as u32,
            block_rows,
            block_cols,
            parts,
            real,
            padded,
            skip,
            unit_bytes,
            k_warps,
            pairs,
            chunk,
            tag: 0,
            stride: tensor.cols,
            codes: e.bits as u32,
            stage_bytes,
            span,
            scale_rows: e.scale_rows,
            scale_bytes: e.scale_bytes(),
            scale_format: tensor.encoding.scale as u32,
            turned: 0,
            k_first: 0,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "upload_tests.rs"]
mod tests;
