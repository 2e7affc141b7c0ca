//! The lowered plan as text: all that this folder computes, for a machine that need not be here.

use std::fmt::{self, Debug, Write as _};
use std::ops::Range;

use super::compressed::Entries;
use super::delta::{Delta, DeltaPartition};
use super::layout::{ClassLayout, Kind, Layout};
use super::matrix::Matrix;
use super::model::{Class, Model};
use super::partition::{ClassPartition, Partition};
use super::segments::{layers, page_bytes, segments, Source};
use super::tiling::{StoredBits, Tiling};
use crate::abi::NormSpan;
use crate::error::Result;
use crate::machine::Platform;

impl Partition {
    /// Where lanes lie, to print; nothing where there is one die.
    pub fn placement(&self, model: &Model) -> String {
        if self.chiplets == 1 {
            return String::new();
        }
        let lane = |lane| {
            let dies = self.dies_of(model, lane);
            let ends = dies.first().zip(dies.last()).map_or((0, 0), |(a, b)| (*a, *b));
            match ends {
                (one, other) if one == other => format!("lane {lane} on {one}"),
                (from, to) => format!("lane {lane} on {from} to {to}"),
            }
        };
        let lanes: Vec<_> = (0..model.lanes).map(lane).collect();
        format!("placed    {} chiplets: {}\n", self.chiplets, lanes.join(", "))
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "partition {} blocks of {} warps, {} columns, {} KB slots, {} KB in flight",
            self.blocks,
            self.warps,
            self.columns,
            self.slot_bytes / 1024,
            self.in_flight_bytes / 1024,
        )?;
        for (at, class) in self.classes.iter().enumerate() {
            let combined = if class.combine_by_owners { ", combined by owners" } else { "" };
            writeln!(f, "  class {at}: {} kv splits{combined}", class.kv_splits)?;
            let mut matrix = |name: String, s: &Tiling| {
                writeln!(
                    f,
                    "    {name}: {} rows x {}, {} k-warps, {} stages of {} bytes",
                    s.rows, s.k, s.k_warps, s.stages, s.stage_bytes
                )
            };
            for (name, s) in class.matrices() {
                matrix(format!("{name:?}"), s)?;
            }
            if let Some(DeltaPartition { unit, units, each, .. }) = &class.delta {
                writeln!(
                    f,
                    "    delta rule: {units} units of {} columns, {each} a block, {} bytes of a \
                     sequence each",
                    unit.cols, unit.bytes
                )?;
            }
            if let Some(e) = &class.experts {
                writeln!(
                    f,
                    "    experts: {} of {}, {} bytes of a block of each",
                    e.chosen,
                    e.count,
                    class.piece_bytes()
                )?;
            }
        }
        writeln!(f, "  head: {} rows in {} passes", self.rows_head, self.head_passes)?;
        self.as_halves.iter().try_for_each(|m| writeln!(f, "  as halves: {}", m.why))
    }
}

/// Everything: classes of layers, rows over blocks, segments of a block's stream, what differs
/// between layers, and of each decode kernel the words of its exchange and its shared memory.
///
/// # Errors
/// [`crate::Error::InvalidProgram`] for a kernel that does not fit the machine.
pub fn lowered(model: &Model, partition: &Partition, platform: Platform) -> Result<String> {
    let mut out = String::new();
    classes(&mut out, model, partition);
    experts(&mut out, model, partition);
    rows(&mut out, model, partition);
    stream(&mut out, model, partition);
    of_layers(&mut out, model, partition);
    for kind in partition.kernels(model, platform) {
        kernel(&mut out, &Layout::new(model, partition, kind)?);
    }
    Ok(out)
}

/// A line of the text.
macro_rules! say {
    ($out:expr, $($what:tt)*) => {
        writeln!($out, $($what)*).expect("a String takes it")
    };
}

/// Numbers as ranges: `0-2, 5`.
fn ranges(numbers: impl Iterator<Item = usize>) -> String {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some(run) if run.end == n => run.end += 1,
            Some(_) | None => runs.push(n..n + 1),
        }
    }
    let one = |run: &Range<usize>| match run.len() {
        1 => run.start.to_string(),
        _ => format!("{}-{}", run.start, run.end - 1),
    };
    runs.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn classes(out: &mut String, model: &Model, partition: &Partition) {
    for (number, (class, part)) in model.classes.iter().zip(&partition.classes).enumerate() {
        if let (Some(of), Some(delta)) = (&class.delta, &part.delta) {
            delta_rule(out, model, (number, class, part), (of, delta));
            continue;
        }
        let of = (0..model.layer.len()).filter(|layer| model.layer[*layer].class == number);
        let norms = |span| class.head_norm == Some(span);
        let with = [
            (class.bias, ", biases"),
            (norms(NormSpan::Head), ", head norms"),
            (norms(NormSpan::AllHeads), ", norms over all heads"),
            (class.gated, ", gated"),
            (class.still > 0, ", turned in part"),
        ];
        let with: String = with.into_iter().filter_map(|(on, what)| on.then_some(what)).collect();
        say!(
            out,
            "class {number}   layers {}: {} heads of {} (padded {}) on {} kv heads, mlp {} \
             (padded {}){with}",
            ranges(of),
            class.heads,
            class.head_dim,
            part.head_dim,
            class.kv_heads,
            class.ffn,
            part.ffn
        );
        if let (Some(of), Some(l)) = (&class.compressed, &part.compressed) {
            let entries = match of.entries {
                None => "no entries".to_owned(),
                Some(Entries { every, index: None, .. }) => format!("entries of {every} positions"),
                Some(Entries { every, index: Some(i), .. }) => format!(
                    "entries of {every} positions, {} chosen by {} heads of {}",
                    i.chosen, i.heads, i.dim
                ),
            };
            say!(
                out,
                "  a key for all heads, {entries}; queries of {} (padded {}), {} groups of {} rows \
                 (padded {}); {} channels of running softmaxes a block",
                of.query_rank,
                l.query_rank,
                l.groups,
                of.group_rank,
                l.group[0],
                l.channels
            );
        }
        if let (Some(of), Some(l)) = (&class.latent, &part.latent) {
            say!(
                out,
                "  latents of queries {} (padded {}), of keys and values {} (padded {}) and {} \
                 that turn; {} numbers kept of a position; heads' queries {} and {}; scores times \
                 {}",
                of.query_rank,
                l.query_rank,
                of.rank,
                l.rank,
                of.turned,
                of.kept(),
                l.plain,
                l.turned,
                of.scale
            );
        }
    }
}

/// A class with a delta rule: its heads, their units, and what a block keeps of a sequence.
fn delta_rule(
    out: &mut String,
    model: &Model,
    (number, class, part): (usize, &Class, &ClassPartition),
    (of, delta): (&Delta, &DeltaPartition),
) {
    let layers = (0..model.layer.len()).filter(|layer| model.layer[*layer].class == number);
    let DeltaPartition { unit, units, each, .. } = delta;
    say!(
        out,
        "class {number}   layers {}: delta rule, {} heads of {} (padded {}) on {} of {}, {} taps, \
         mlp {} (padded {})",
        ranges(layers),
        class.heads,
        class.head_dim,
        part.head_dim,
        class.kv_heads,
        of.key_dim,
        of.taps,
        class.ffn,
        part.ffn
    );
    say!(
        out,
        "state     class {number}: {units} units of {} columns, {each} of a block, {} bytes of a \
         sequence each; {} threads, of a column {}, hold {} numbers",
        unit.cols,
        unit.bytes,
        unit.threads,
        unit.lanes,
        unit.held * unit.turns
    );
}

/// Classes with experts, and by what the residual is divided.
fn experts(out: &mut String, model: &Model, partition: &Partition) {
    if model.residual_shift > 0 {
        say!(out, "residual  carried as 2^-{} of what it is", model.residual_shift);
    }
    for (number, (class, part)) in model.classes.iter().zip(&partition.classes).enumerate() {
        let (Some(of), Some(experts)) = (&class.experts, &part.experts) else { continue };
        let gate = format!("{:?}, {:?}", of.gate, of.scoring);
        let (router, piece) = (part.tiling(Matrix::Router), part.piece_bytes());
        say!(
            out,
            "experts   class {number}: {} of {}, {gate}; router {} rows of a block; {piece} bytes \
             of a block of each",
            of.chosen,
            of.count,
            router.rows
        );
        if let Some(groups) = of.groups {
            say!(out, "  chosen in {} of {} groups", groups.chosen, groups.count);
        }
        if let Some(shared) = of.shared {
            let by = if shared.scaled { ", times the sigmoid of a logit" } else { "" };
            let (ffn, padded) = (shared.ffn, experts.shared);
            say!(out, "  one for all columns, mlp {ffn} (padded {padded}){by}");
        }
    }
}

/// How weights lie in the stream.
fn encoding(tiling: &Tiling) -> String {
    let codes = match tiling.encoding.bits {
        StoredBits::F16 => "halves",
        StoredBits::F8 => "e4m3",
        StoredBits::I4 => "int4",
        StoredBits::E2m1 => "e2m1",
        StoredBits::I4Half => "int4 (float16 scales)",
        StoredBits::I4Zeros => "int4 (float16 scales, zero points)",
        StoredBits::I8 => "int8",
        StoredBits::I8Half => "int8 (float16 scales)",
    };
    match tiling.encoding.group {
        0 => codes.to_owned(),
        units => format!("{codes}, a scale for {} columns", 32 * units),
    }
}

/// Which rows of each matrix a block has.
fn rows(out: &mut String, model: &Model, partition: &Partition) {
    let each = partition.blocks_a_lane(model);
    say!(
        out,
        "rows      {} blocks, {each} a lane, in order: block b of a lane has rows n b to n (b + 1)",
        partition.blocks
    );
    let mut one = |what: &str, t: &Tiling, rows: u32, experts: Option<u32>| {
        let stacked = experts.map_or_else(String::new, |n| format!("; {n} experts at once"));
        say!(
            out,
            "  {what:<18} n = {rows:>5} x {:<6} {} warps by rows, {} by columns; {}{stacked}",
            t.k,
            t.row_warps,
            t.k_warps,
            encoding(t)
        );
    };
    for (number, class) in partition.classes.iter().enumerate() {
        for (matrix, t) in class.matrices() {
            let stack = partition.stack(model, class, matrix, 1).map(|stack| stack.experts);
            one(&format!("class {number} {matrix:?}"), t, t.rows, stack);
        }
    }
    one("head", &partition.head, partition.rows_head, None);
}

/// The segments of a block's stream, in the order of a step.
fn stream(out: &mut String, model: &Model, partition: &Partition) {
    let all = segments(model, partition);
    say!(
        out,
        "segments  {} of a step, {} bytes of weights a block",
        all.len(),
        partition.stream_bytes(model)
    );
    say!(out, "  layer  source       offset   stages x  bytes  encoding");
    let fixed = |layer: &super::model::Layer| {
        let all = partition.classes[layer.class].fixed();
        all.map(|(matrix, t)| format!("{matrix:?}, {}", encoding(t))).collect::<Vec<_>>()
    };
    let mut fixed = model.layer.iter().flat_map(fixed);
    for segment in &all {
        let layer = segment.layer as usize;
        let (place, what) = match (segment.source, model.layer.get(layer)) {
            (Source::Pages, _) => {
                say!(out, "  {layer:>5}  pages");
                continue;
            }
            (Source::GateUp | Source::Down, _) => {
                let (at, stages, bytes) = (segment.offset, segment.stages, segment.bytes);
                let what = segment.source;
                say!(out, "  {layer:>5}  chosen {at:>12} {stages:>8} x {bytes:>6}  {what:?}");
                continue;
            }
            (Source::Fixed, Some(_)) => (layer.to_string(), fixed.next().expect("one of them")),
            (Source::Fixed, None) => ("head".to_owned(), encoding(&partition.head)),
        };
        let (at, stages, bytes) = (segment.offset, segment.stages, segment.bytes);
        say!(out, "  {place:>5}  fixed  {at:>12} {stages:>8} x {bytes:>6}  {what}");
    }
}

/// What differs between layers of a class, as launches have it.
fn of_layers(out: &mut String, model: &Model, partition: &Partition) {
    let pools = page_bytes(model, partition);
    say!(out, "pages     {} positions at most, bytes by pool {pools:?}", partition.positions);
    say!(out, "layers    class      stream  pool   page_at  window  norms");
    for (layer, of) in layers(model, partition).iter().enumerate() {
        say!(
            out,
            "  {layer:>5}   {:>5} {:>11} {:>5} {:>9} {:>7}  {}, {}",
            of.kind,
            of.stream,
            of.pool,
            of.page_at,
            of.window,
            of.norm[0],
            of.norm[1]
        );
    }
}

/// Every field of a structure of numbers, by its name.
fn fields(out: &mut String, of: &impl Debug) {
    let all = format!("{of:?}");
    let inside = all.split_once('{').map_or("", |(_, inside)| inside);
    let inside = inside.trim().trim_end_matches('}').trim_end();
    let (mut depth, mut from) = (0_i32, 0);
    let mut parts = Vec::new();
    for (at, c) in inside.char_indices() {
        depth += i32::from("[({".contains(c)) - i32::from("])}".contains(c));
        if c == ',' && depth == 0 {
            parts.push(&inside[from..at]);
            from = at + 1;
        }
    }
    parts.push(&inside[from..]);
    let row = |some: &[&str]| some.iter().map(|part| format!("{:<24}", part.trim())).collect();
    for line in parts.chunks(4) {
        let line: String = row(line);
        say!(out, "    {}", line.trim_end());
    }
}

fn kernel(out: &mut String, layout: &Layout) {
    let (columns, kind) = (layout.kind.columns, layout.kind);
    let pages = match kind {
        Kind { lookup: true, .. } => "drafts of tokens",
        Kind { streamed: true, .. } => "pages through the ring",
        Kind { streamed: false, .. } => "pages by loads",
    };
    say!(out, "kernel    {columns} column(s), {pages}");
    say!(out, "  exchange, in words of 8 bytes");
    fields(out, &layout.exchange);
    for (number, class) in layout.classes.iter().enumerate() {
        let ClassLayout { words, .. } = class;
        say!(out, "  class {number}, words of a column, and its shared memory");
        fields(out, words);
        fields(out, class);
    }
    say!(out, "  vectors");
    fields(out, &layout.vectors);
    say!(out, "  shared memory, offsets in bytes");
    fields(out, &layout.at);
    say!(out, "  ring");
    fields(out, &layout.ring);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mono::shapes::{self, model, nvidia};

    #[test]
    fn all_of_it_is_printed() {
        let model = model("2b");
        let partition = Partition::new(&model, &nvidia(), 4096).unwrap();
        let text = lowered(&model, &partition, Platform::Cuda).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        let all = segments(&model, &partition);
        let fixed = all.iter().filter(|s| s.source == Source::Fixed).count();
        assert_eq!((count("  fixed  "), count("  pages\n")), (fixed, 0), "{text}");
        assert_eq!(text.matches("  pages\n").count(), model.layer.len(), "{text}");
        for segment in all.iter().filter(|s| s.source == Source::Fixed) {
            let at = format!(" {} ", segment.offset);
            assert!(text.contains(&at), "no segment at {at}: {text}");
        }
        for kind in partition.kernels(&model, Platform::Cuda) {
            let layout = Layout::new(&model, &partition, kind).unwrap();
            let (words, end) = (layout.exchange.words, layout.at.end);
            assert!(text.contains(&format!("words: {words}")), "{text}");
            assert!(text.contains(&format!("end: {end}")), "{text}");
            assert!(text.contains(&format!("bytes: {}", layout.ring.bytes)), "{text}");
        }
    }

    #[test]
    fn latents_and_shared_experts_are_printed() {
        for (name, ranks, said) in [
            ("kimi-k2", 8, ["class 1 KeyUp", "chosen", "one for all columns, mlp 256"]),
            ("kimi-k2", 4, ["class 1 ValueUp", "int4", "one for all columns, mlp 512"]),
            ("deepseek-v3", 8, ["576 numbers kept", "chosen in 4 of 8 groups", "e4m3"]),
        ] {
            let model = shapes::with_latents(name, ranks);
            let partition = Partition::new(&model, &nvidia(), 4096).unwrap();
            assert!(partition.as_halves.is_empty(), "{partition}");
            let text = lowered(&model, &partition, Platform::Cuda).unwrap();
            for what in said {
                assert!(text.contains(what), "no {what:?}: {partition}{text}");
            }
        }
    }

    #[test]
    fn fields_are_read_whole() {
        #[derive(Debug)]
        #[allow(dead_code)]
        struct Some {
            one: u32,
            many: Vec<u32>,
        }
        let mut out = String::new();
        fields(&mut out, &Some { one: 7, many: vec![1, 2] });
        assert_eq!(out.split_whitespace().collect::<Vec<_>>(), ["one:", "7", "many:", "[1,", "2]"]);
        assert_eq!(ranges([0, 1, 2, 5, 7, 8].into_iter()), "0-2, 5, 7-8");
    }
}
