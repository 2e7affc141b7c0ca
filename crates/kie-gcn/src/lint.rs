//! Rules over compiled kernels that no compiler keeps for us, on the text of llvm-objdump:
//!
//! - Behind `buffer_wbl2`, which writes a die's cache back, comes a wait for it before anything
//!   that reaches memory or branches: otherwise the release does not release.
//! - At `s_barrier` no store is on its way, on any path: whoever tells others behind the barrier
//!   speaks for all waves.
//! - What is polled is loaded past the caches, and the first store behind a write-back, which tells
//!   of what was written, goes as far. In a decode kernel all stores of 8 bytes are words for
//!   others, but for times. Between devices whatever goes past one cache goes past all.
//! - What is streamed into shared memory stays out of the caches. The memory register, which says
//!   where it goes, is nobody else's.
//! - No thread has memory of its own, and every mnemonic is known.

use std::collections::BTreeMap;

use crate::inst;
use crate::text::{far, functions, Function, Line};
use crate::Fault;

/// How far words go that blocks exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Words {
    /// There are none.
    None,
    /// To all blocks of a device; all that is stored in 8 bytes is a word, or a time.
    Device,
    /// To all blocks of a device; results are stored in 8 bytes, too, and told of behind a
    /// write-back, and what is copied into shared memory other blocks read as well: prefill.
    Phases,
    /// As [`Words::Device`], to other devices, too.
    System,
    /// To other devices; results are stored in 8 bytes, too.
    Flags,
}

impl Words {
    fn carried_by(self, line: &Line<'_>) -> bool {
        match self {
            Self::None => true,
            Self::Device | Self::Phases => line.has("sc1"),
            Self::System | Self::Flags => line.has("sc0") && line.has("sc1"),
        }
    }
}

fn reaches_memory(line: &Line<'_>) -> bool {
    ["global_", "flat_", "buffer_", "ds_", "scratch_"].iter().any(|p| line.name.starts_with(p))
}

fn is_branch(line: &Line<'_>) -> bool {
    ["s_branch", "s_cbranch", "s_setpc", "s_swappc", "s_endpgm", "s_barrier"]
        .iter()
        .any(|name| line.name.starts_with(name))
}

fn waits_for_all(line: &Line<'_>) -> bool {
    line.name == "s_waitcnt" && line.value("vmcnt") == Some("0")
}

fn is_store(line: &Line<'_>) -> bool {
    let stores = ["global_store", "flat_store", "global_atomic", "flat_atomic", "buffer_wbl2"];
    stores.iter().any(|name| line.name.starts_with(name))
}

/// What a fault says of an access to memory that belongs to one thread.
pub const MEMORY_OF_A_THREAD: &str = "memory of a thread";

/// What is wrong with a listing, a line each; nothing where all rules are kept.
///
/// # Errors
/// [`Fault`] for a listing that is not understood, an unknown mnemonic above all.
pub fn check(listing: &str, words: Words) -> Result<Vec<String>, Fault> {
    let mut faults = Vec::new();
    for function in functions(listing)? {
        let mut found: Vec<Fault> = own_memory(&function).collect();
        // What spills has instructions that are not known here; that is said already.
        if found.is_empty() {
            inst::code(&function)?;
        }
        found.extend(write_backs(&function));
        found.extend(barriers(&function)?);
        found.extend(polls(&function, words)?);
        found.extend(published(&function, words));
        found.extend(streams(&function, words));
        found.extend(memory_register(&function));
        faults.extend(found.iter().map(|fault| format!("{}: {fault}", function.name)));
    }
    Ok(faults)
}

/// Write-backs that are not waited for.
fn write_backs<'a>(function: &'a Function<'_>) -> impl Iterator<Item = Fault> + 'a {
    let lines = &function.lines;
    let begins = lines.iter().enumerate().filter(|(_, line)| line.name == "buffer_wbl2");
    begins.filter_map(|(at, line)| {
        let waits =
            lines[at + 1..].iter().take_while(|next| !reaches_memory(next) && !is_branch(next));
        let waited = waits.into_iter().any(waits_for_all);
        (!waited).then(|| line.fault("the write-back is not waited for"))
    })
}

/// Where each line may go on.
fn successors(function: &Function<'_>) -> Result<Vec<Vec<usize>>, Fault> {
    let lines = &function.lines;
    let places: BTreeMap<u64, usize> =
        lines.iter().enumerate().map(|(at, line)| (line.address, at)).collect();
    let one = |(at, line): (usize, &Line<'_>)| {
        let next = (at + 1 < lines.len()).then_some(at + 1);
        let target = || {
            let is_far = line.name == "s_setpc_b64";
            let to = if is_far { far(lines, at)? } else { line.target()? };
            places.get(&to).copied().ok_or_else(|| line.fault("a branch out of the function"))
        };
        Ok(match line.name {
            "s_endpgm" => Vec::new(),
            "s_branch" | "s_setpc_b64" => vec![target()?],
            name if name.starts_with("s_cbranch") => next.into_iter().chain([target()?]).collect(),
            _ => next.into_iter().collect(),
        })
    };
    lines.iter().enumerate().map(one).collect()
}

/// Barriers that are met with stores on their way.
fn barriers(function: &Function<'_>) -> Result<Vec<Fault>, Fault> {
    let (lines, next) = (&function.lines, successors(function)?);
    // Lines that a store may be on its way at.
    let mut open = vec![false; lines.len()];
    let mut work = Vec::new();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| is_store(line)) {
        work.extend(next[at].iter().copied());
    }
    while let Some(at) = work.pop() {
        if !std::mem::replace(&mut open[at], true) && !waits_for_all(&lines[at]) {
            work.extend(next[at].iter().copied());
        }
    }
    let met = lines.iter().zip(open).filter(|(line, open)| *open && line.name == "s_barrier");
    Ok(met.map(|(line, _)| line.fault("met with stores on their way")).collect())
}

/// Lines of a loop that does nothing but look, at most.
const POLL_LINES: usize = 24;

/// Loops that look at memory until it changes, past the caches or not.
fn polls(function: &Function<'_>, words: Words) -> Result<Vec<Fault>, Fault> {
    let (lines, next) = (&function.lines, successors(function)?);
    let mut faults = Vec::new();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| is_branch(line)) {
        let Some(&to) = next[at].iter().find(|to| **to <= at) else { continue };
        let body = &lines[to..=at];
        let works = |line: &&Line<'_>| is_store(line) || line.name.starts_with("ds_write");
        if body.len() > POLL_LINES || body.iter().any(|line| works(&line)) {
            continue;
        }
        let looks = body.iter().filter(|line| line.name.starts_with("global_load_dwordx2"));
        let bare = looks.filter(|line| words != Words::None && !words.carried_by(line));
        faults.extend(bare.map(|line| line.fault("polled in a cache")));
    }
    Ok(faults)
}

/// Lines between the reading of a clock and the storing of what it said, at most.
const TIME_LINES: usize = 40;

/// Words that stay in a cache, or go past some of them only.
fn published(function: &Function<'_>, words: Words) -> Vec<Fault> {
    let lines = &function.lines;
    let mut faults = Vec::new();
    let is_time = |at: usize| {
        let before = &lines[at.saturating_sub(TIME_LINES)..at];
        before.iter().any(|line| line.name.starts_with("s_mem"))
    };
    let accesses = lines.iter().enumerate().filter(|(_, line)| line.name.starts_with("global_"));
    for (at, line) in accesses {
        let has_results = matches!(words, Words::Phases | Words::Flags);
        let is_store = line.name == "global_store_dwordx2" && !has_results;
        let is_scoped = line.has("sc1") || line.has("sc0");
        if (is_store && !is_time(at) || is_scoped) && !words.carried_by(line) {
            faults.push(line.fault("a word that stays in a cache"));
        }
    }
    let begins = lines.iter().enumerate().filter(|(_, line)| line.name == "buffer_wbl2");
    for (begin, _) in begins {
        // Who loads first received something.
        let next = lines.iter().enumerate().skip(begin + 1);
        let next = next.take_while(|(_, line)| !is_branch(line) && !line.name.contains("_load_"));
        let told = next.into_iter().find(|(_, line)| line.name.starts_with("global_store"));
        let bare = told.filter(|(at, line)| !words.carried_by(line) && !is_time(*at));
        faults.extend(bare.map(|(_, line)| line.fault("tells of a write-back from a cache")));
    }
    faults
}

/// Registers of an operand such as `v[4:7]`.
fn registers(operand: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let inner = operand.strip_prefix('v')?;
    match inner.strip_prefix('[').and_then(|range| range.strip_suffix(']')) {
        None => inner.parse().ok().map(|at| at..=at),
        Some(range) => {
            let (from, to) = range.split_once(':')?;
            Some(from.parse().ok()?..=to.parse().ok()?)
        }
    }
}

/// Loads into shared memory, and those of 16 bytes whose registers go there as they are: they pass
/// once.
fn streams<'a>(function: &'a Function<'_>, words: Words) -> impl Iterator<Item = Fault> + 'a {
    let lines = &function.lines;
    let is_direct = |line: &&Line<'_>| line.name.starts_with("global_load_lds");
    let direct = lines.iter().filter(is_direct).filter(|line| !line.has("nt"));
    let direct = direct.map(|line| line.fault("streamed through the caches"));
    let is_once = words != Words::Phases;
    let stores = lines.iter().enumerate();
    let stores = stores.filter(move |(_, line)| is_once && line.name == "ds_write_b128");
    let moved = stores.filter_map(|(at, line)| {
        let data = line.operands.get(1)?;
        let wanted = registers(data)?;
        let before = lines[..at].iter().rev().take_while(|line| !is_branch(line));
        let made = before.into_iter().find(|line| {
            let first = line.operands.first().and_then(|operand| registers(operand));
            let fills = !is_store(line) && !line.name.starts_with("ds_write");
            fills && first.is_some_and(|r| r.contains(wanted.start()))
        })?;
        let bare = made.name == "global_load_dwordx4" && !made.has("nt");
        bare.then(|| made.fault("streamed through the caches"))
    });
    direct.chain(moved)
}

/// Where the memory register is read that was not set right before: assembly in the source sets it
/// behind the compiler's back.
fn memory_register<'a>(function: &'a Function<'_>) -> impl Iterator<Item = Fault> + 'a {
    let lines = &function.lines;
    let sets = |line: &Line<'_>| line.name.starts_with("s_mov") && line.operands[0] == "m0";
    let reads = move |line: &Line<'_>| !sets(line) && line.operands.contains(&"m0");
    let stale = (1..lines.len()).filter(move |at| reads(&lines[*at]) && !sets(&lines[at - 1]));
    stale.map(|at| lines[at].fault("the memory register was set elsewhere"))
}

/// Accesses to a thread's own memory.
fn own_memory<'a>(function: &'a Function<'_>) -> impl Iterator<Item = Fault> + 'a {
    let own = |line: &&Line<'_>| {
        line.name.starts_with("scratch_")
            || line.name.starts_with("buffer_load")
            || line.name.starts_with("buffer_store")
    };
    function.lines.iter().filter(own).map(|line| line.fault(MEMORY_OF_A_THREAD))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A listing of one function; addresses count up by 8.
    fn listing(lines: &[&str]) -> String {
        let one = |(at, line): (usize, &&str)| format!("\t{line} // {:012X}: 0\n", 0x1000 + 8 * at);
        let all: String = lines.iter().enumerate().map(one).collect();
        format!("0000000000001000 <k>:\n{all}")
    }

    fn faults(lines: &[&str], words: Words) -> Vec<String> {
        check(&listing(lines), words).unwrap()
    }

    /// What clang 19 made of `fence_device` and a word behind it before the wait stood in it.
    const OLD_FENCE: [&str; 7] = [
        "global_load_dword v1, v[4:5], off",
        "s_waitcnt vmcnt(0)",
        "buffer_wbl2 sc1",
        "buffer_inv sc1",
        "v_mov_b64_e32 v[4:5], 1",
        "global_store_dwordx2 v3, v[4:5], s[6:7] sc1",
        "s_endpgm",
    ];
    /// And of `sync_block` behind stores for another rank.
    const OLD_SYNC: [&str; 8] = [
        "global_store_dword v[4:5], v1, off offset:512 sc0 sc1",
        "s_barrier",
        "v_cmp_eq_u32_e32 vcc, 0, v0",
        "s_and_saveexec_b64 s[2:3], vcc",
        "buffer_wbl2 sc0 sc1",
        "s_waitcnt vmcnt(0)",
        "global_store_dwordx2 v3, v[4:5], s[6:7] sc0 sc1",
        "s_endpgm",
    ];

    #[test]
    fn what_compilers_made_of_the_old_sources_is_refused() {
        let found = faults(&OLD_FENCE, Words::Device);
        assert_eq!(found, ["k: 1010: buffer_wbl2 sc1: the write-back is not waited for"]);
        let mut waited = OLD_FENCE.to_vec();
        waited.insert(3, "s_waitcnt vmcnt(0)");
        assert_eq!(faults(&waited, Words::Device), [""; 0]);
        let found = faults(&OLD_SYNC, Words::System);
        assert_eq!(found, ["k: 1008: s_barrier: met with stores on their way"]);
        let mut waited = OLD_SYNC.to_vec();
        waited.insert(1, "s_waitcnt vmcnt(0)");
        assert_eq!(faults(&waited, Words::System), [""; 0]);
        // A wait for some is none, and one on another path neither.
        waited[1] = "s_waitcnt vmcnt(1)";
        assert_eq!(faults(&waited, Words::System).len(), 1);
        waited[1] = "s_cbranch_scc1 3";
        waited.insert(2, "s_waitcnt vmcnt(0)");
        waited.insert(3, "s_nop 0");
        assert_eq!(faults(&waited, Words::System).len(), 1);
    }

    #[test]
    fn words_and_streams_go_where_they_should() {
        let poll = [
            "global_load_dwordx2 v[2:3], v1, s[6:7] sc1",
            "s_waitcnt vmcnt(0)",
            "v_cmp_ne_u64_e32 vcc, 1, v[2:3]",
            "s_cbranch_vccnz 65529",
            "global_store_dwordx2 v1, v[2:3], s[6:7] sc1",
            "s_endpgm",
        ];
        assert_eq!(faults(&poll, Words::Device), [""; 0]);
        assert_eq!(faults(&poll, Words::System).len(), 3, "sc0 is wanted, too");
        for (at, what) in [(0, "polled in a cache"), (4, "a word that stays in a cache")] {
            let mut bare = poll;
            bare[at] = bare[at].strip_suffix(" sc1").unwrap();
            let found = faults(&bare, Words::Device);
            assert!(found.len() == 1 && found[0].ends_with(what), "{found:?}");
        }
        let copy = [
            "global_load_dwordx4 v[4:7], v[2:3], off nt",
            "s_waitcnt vmcnt(0)",
            "ds_write_b128 v1, v[4:7]",
            "s_endpgm",
        ];
        assert_eq!(faults(&copy, Words::None), [""; 0]);
        let mut bare = copy;
        bare[0] = "global_load_dwordx4 v[4:7], v[2:3], off";
        assert!(faults(&bare, Words::None)[0].ends_with("streamed through the caches"));
        assert_eq!(faults(&bare, Words::Phases), [""; 0], "others read it, too");
        let direct = ["global_load_lds_dword v[2:3], off offset:256", "s_endpgm"];
        assert!(faults(&direct, Words::None)[0].ends_with("streamed through the caches"));
        let set = ["s_mov_b32 m0, s1", "v_writelane_b32 v1, s2, m0", "s_endpgm"];
        assert_eq!(faults(&set, Words::None), [""; 0]);
        let stale = ["s_mov_b32 m0, s1", "s_nop 0", "v_writelane_b32 v1, s2, m0", "s_endpgm"];
        assert!(faults(&stale, Words::None)[0].ends_with("the memory register was set elsewhere"));
        let spilled = ["scratch_store_dword off, v1, s32", "s_endpgm"];
        assert!(faults(&spilled, Words::None)[0].ends_with(MEMORY_OF_A_THREAD));
    }
}
