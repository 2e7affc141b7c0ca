//! Several simulated machines that run a model together, under one scheduler (`machine/group.rs`).
//!
//! Each rank owns what it allocates: a kernel that loads or copies from another's memory, or stores
//! into it but for symmetric memory in the system's scope, faults with both ranks and the address.
//! Seen are words, states, copies and words of the host, not plain loads and stores of C++. Virtual
//! ranks that share one machine (kie-kccl) own nothing apart and cannot be told from each other.

use std::sync::Arc;

use super::{memory_of, shared_of, Options, Sim};
use crate::error::Result;
use crate::machine::group::{self, Group};
use crate::machine::{Flight, Launch, Machine, Memory, Module, Shared};

/// The machines that `name` describes, in order of rank; see [`Options::parse`].
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) for a name that is not understood, or where there is
/// no C++ compiler.
pub fn open(name: &str) -> Result<Vec<Arc<dyn Machine>>> {
    let options = Options::parse(name)?;
    let ranks = options.ranks as usize;
    Ok(group::of(Sim::new(options)?, ranks))
}

impl Group for Sim {
    fn launch_all(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
        ranks: &[&[u8]],
    ) -> Result<Box<dyn Flight>> {
        Sim::launch_all(self, module, launch, ranks)
    }

    fn alloc_of(&self, rank: usize, bytes: usize, open: bool) -> Result<Memory> {
        Ok(memory_of(self.region_of_rank(bytes, rank, open)?, bytes))
    }

    fn alloc_shared_of(&self, rank: usize, bytes: usize) -> Result<Shared> {
        Ok(shared_of(self.region_of_rank(bytes, rank, false)?, bytes))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::machine::{Platform, Source};
    use crate::mono::source::join;

    /// Two ranks run `body`, in which rank 1 may do with rank 0's memory what it should not: `own`
    /// is what `alloc` gave rank 0, `open` what `alloc_symmetric` did.
    fn outcome(body: &str) -> (Result<bool>, u64) {
        let machines = super::open("sim:ranks=2,blocks=1").unwrap();
        let text = join(Platform::Sim, ("toy", "#include \"platform.h\"\n"))
            + "struct Args { u64 rank; u64* own; u64* open; };\nKIE_KERNEL(toy, 32, Args a) {\n"
            + "KIE_SHARED_BYTES(shared);\nSlot* slot = (Slot*)shared;\nslot_init(slot, 1);\n"
            + &format!("if (a.rank == 1 && thread() == 0) {{ {body} }}\n}}\n");
        let source = Source { defines: Vec::new(), text, entries: vec!["toy"] };
        let module = machines[0].compile(&source).unwrap();
        let own = machines[0].alloc(4096).unwrap();
        let open = machines[0].alloc_symmetric(4096).unwrap();
        // Freed memory has no owner.
        drop(machines[0].alloc(1 << 20).unwrap());
        let flights = (0..2_u64).map(|rank| {
            let args: Vec<u8> =
                [rank, own.address, open.address].iter().flat_map(|w| w.to_ne_bytes()).collect();
            let launch =
                Launch { entry: "toy", blocks: 1, threads: 32, shared_bytes: 1024, args: &args };
            machines[rank as usize].launch(&module, &launch).unwrap()
        });
        let mut flights: Vec<_> = flights.collect();
        let outcome = loop {
            match flights[1].done() {
                Ok(false) => std::thread::yield_now(),
                ended => break ended,
            }
        };
        (outcome, own.address)
    }

    #[test]
    fn a_rank_reaches_anothers_memory_only_as_it_may() {
        for lawful in [
            "store_word_system(a.open + 511, 1);",
            "store_words_system(a.open + 2, 1, 2);",
            "store_state(a.open, Quad{{1, 2, 3, 4}});",
            "u64 mine[2] = {}; store_word(mine, load_word(mine + 1));",
        ] {
            assert_eq!(outcome(lawful).0, Ok(true), "{lawful}");
        }
        for stray in [
            "store_word_system(a.own, 1);",
            "store_words_system(a.own, 1, 2);",
            "store_state(a.own, Quad{{1, 2, 3, 4}});",
            "store_word(a.open, 1);",
            "load_word(a.own);",
            "load_word(a.open);",
            "u64 x, y; load_words_system(a.open, x, y);",
            "load_state(a.own);",
            "store_host(a.own, 1ull);",
            "load_host(a.own);",
            "Copies c = copies_into(slot, 1); copy_async(slot, shared + 512, a.open, 16, c);",
        ] {
            let error = outcome(stray).0.unwrap_err().to_string();
            let named = error.contains("rank 1: ") && error.contains("is memory of rank 0, which");
            assert!(named, "{stray}: {error}");
        }
        let (error, own) = outcome("load_word(a.own + 1);");
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("load_word at {:#x} is", own + 8)), "{error}");
    }
}
