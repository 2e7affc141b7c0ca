//! The kernel sources, carried as text. One compilation is one text: the platform's headers first,
//! then `kernels/common` in the order of [`COMMON`].

use super::lower::header::header;
use super::lower::layout::Layout;
use super::lower::model::Model;
use super::lower::partition::{Kind, Partition};
use super::machine::{Platform, Source};
use super::meter::Mode;
use crate::error::Result;

macro_rules! kernel {
    ($path:literal) => {
        ($path, include_str!(concat!("../../kernels/", $path)))
    };
}

/// All of `kernels/common`, in the order in which each needs the ones before it.
pub const COMMON: &[(&str, &str)] = &[
    kernel!("common/args.h"),
    kernel!("common/shape.h"),
    kernel!("common/exchange.h"),
    kernel!("common/ring.h"),
    UNIT,
    DECODE_FP8,
    DECODE_INT4,
    DECODE_MXFP4,
    kernel!("common/matvec.h"),
    kernel!("common/attention.h"),
    kernel!("common/block.h"),
    TELL,
    kernel!("common/stream.h"),
    kernel!("common/attend_pages.h"),
    kernel!("common/control.h"),
    kernel!("common/sample.h"),
    kernel!("common/filter.h"),
    kernel!("common/columns.h"),
    kernel!("common/decode.h"),
];

const UNIT: (&str, &str) = kernel!("common/ops/unit.h");
const DECODE_FP8: (&str, &str) = kernel!("common/ops/decode_fp8.h");
const DECODE_INT4: (&str, &str) = kernel!("common/ops/decode_int4.h");
const DECODE_MXFP4: (&str, &str) = kernel!("common/ops/decode_mxfp4.h");
/// Decoders of stored bits, which need the platform only.
#[cfg(test)]
pub const DECODERS: &[(&str, &str)] = &[UNIT, DECODE_FP8, DECODE_INT4, DECODE_MXFP4];
const TELL: (&str, &str) = kernel!("common/tell.h");
const ECHO: (&str, &str) = kernel!("common/echo.h");

/// Of [`COMMON`], what the prefill kernel stands on: up to the pages' layout.
const UNDER_PREFILL: usize = 10;

/// The prefill kernel, behind those.
pub const PREFILL: &[(&str, &str)] = &[
    kernel!("common/prefill_shape.h"),
    kernel!("common/prefill_attention.h"),
    kernel!("common/prefill_feed.h"),
    kernel!("common/prefill_norm.h"),
    kernel!("common/prefill_mix.h"),
    kernel!("common/prefill.h"),
    kernel!("common/prefill_slices.h"),
];
/// The kernel that packs weights, behind the platform without its tiles.
const PACK: (&str, &str) = kernel!("common/pack.h");
/// Wide tiles, which the prefill kernel needs.
const WIDE_CUDA: (&str, &str) = kernel!("cuda/wide.h");
const WIDE_SIM: (&str, &str) = kernel!("sim/wide.h");

/// Behind the platforms whose blocks may lie on several dies: which block a block is.
const PLACE: (&str, &str) = kernel!("common/place.h");
const CUDA: &[(&str, &str)] = &[kernel!("cuda/platform.h"), kernel!("cuda/tile.h")];
const HIP: &[(&str, &str)] = &[kernel!("hip/platform.h"), PLACE, kernel!("hip/tile.h")];
const SIM: &[(&str, &str)] = &[kernel!("sim/platform.h"), PLACE, kernel!("sim/tile.h")];

/// The headers that stand before [`COMMON`] on a platform.
pub fn platform_headers(platform: Platform) -> &'static [(&'static str, &'static str)] {
    match platform {
        Platform::Cuda => CUDA,
        Platform::Hip => HIP,
        Platform::Sim => SIM,
    }
}

/// What the platforms' own headers ask for before anything else.
fn defines(partition: &Partition, model: &Model) -> Vec<(String, String)> {
    let all = [("KIE_RANKS", model.ranks), ("KIE_BLOCKS", partition.blocks)];
    // Where there is one die, nothing of it is in the source.
    let dies = (partition.chiplets > 1).then_some(("KIE_CHIPLETS", partition.chiplets));
    all.into_iter().chain(dies).map(|(name, value)| (name.to_owned(), value.to_string())).collect()
}

/// A decode kernel, to run or to measure with.
///
/// # Errors
/// Where the kernel does not fit the machine: see [`Layout::new`].
pub fn decode(
    platform: Platform,
    (model, partition): (&Model, &Partition),
    kind: Kind,
    mode: Mode,
) -> Result<Source> {
    let layout = Layout::new(model, partition, kind)?;
    let mut defines = defines(partition, model);
    if mode == Mode::Trace {
        defines.push(("KIE_TRACE".to_owned(), "1".to_owned()));
    }
    let text = header(model, partition, &layout, mode) + &text(platform);
    Ok(Source { defines, text, entries: vec!["kie_decode"] })
}

/// The prefill kernel, with definitions of its own; none where there are no wide tiles.
///
/// # Errors
/// As [`decode`].
pub fn prefill(
    platform: Platform,
    (model, partition): (&Model, &Partition),
    own: impl IntoIterator<Item = (String, String)>,
) -> Result<Option<Source>> {
    let Some(text) = prefill_text(platform) else { return Ok(None) };
    let layout = Layout::new(model, partition, Kind { columns: 1, streamed: false })?;
    let mut defines = defines(partition, model);
    defines.extend(own);
    let text = header(model, partition, &layout, Mode::Full) + &text;
    Ok(Some(Source { defines, text, entries: vec!["kie_prefill"] }))
}

/// Everything but the generated header as one text. Line directives keep the compiler's messages
/// readable.
pub fn text(platform: Platform) -> String {
    join(platform_headers(platform).iter().chain(COMMON))
}

/// The prefill kernel as one text; none where there are no wide tiles.
fn prefill_text(platform: Platform) -> Option<String> {
    let wide = match platform {
        Platform::Cuda => &WIDE_CUDA,
        Platform::Sim => &WIDE_SIM,
        Platform::Hip => return None,
    };
    let before = platform_headers(platform).iter().chain([wide]);
    Some(join(before.chain(&COMMON[..UNDER_PREFILL]).chain(PREFILL)))
}

/// The kernel that times the host's answer, as one text.
pub fn echo_text(platform: Platform) -> String {
    join(platform_headers(platform).iter().chain([&TELL, &ECHO]))
}

/// The kernel that packs weights, as one text.
pub fn pack_text(platform: Platform) -> String {
    let headers = platform_headers(platform);
    join(headers[..headers.len() - 1].iter().chain([&PACK]))
}

fn join<'a>(headers: impl Iterator<Item = &'a (&'static str, &'static str)>) -> String {
    let mut all = String::new();
    for (path, text) in headers {
        all.push_str(&format!("#line 1 \"{path}\"\n"));
        all.push_str(&text.replace("#pragma once\n", ""));
    }
    all
}
