//! Ranks that die, come late or lose a word: the request ends in one typed error that says which
//! rank waited for what of which, no token of incomplete words is emitted, and the engine closes.
//! The machines stay good for the next engine. On GPUs, `KIE_DEVICE=cuda:0,1`, those with so many
//! ranks run, and the error has to come within a second.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_core::engine::Engine;
use kie_core::Error;
use kie_kernels::device::Options;
use kie_kernels::devices;
use kie_kernels::machine::{Flight, Launch, Machine, Memory, Module, Source};
use kie_kernels::mono::Mono;

use super::failures::{continue_greedily, edited, open_over, several};
use super::support::{goldens, greedy_request};
use super::{fixture, two_at_a_time};

/// A step's start, for what a rank does there that it should not.
const STEP: &str = "        b.live = live_at(args, step);\n";
/// Where a lane's output goes to all ranks.
pub const SHARE: &str =
    "publish_share(args, share + (long)column * kWordsH + pair, mine[item], b.seqno);";
/// Where all ranks' blocks offer their token.
const OFFER: &str = "            publish_all(args, to + 1, best.id, b.seqno);
            if (masses) {";

/// The tokens that came before the end, and the error at the end.
fn until_the_end(engine: &Engine, ids: &[u32], count: usize) -> (Vec<u32>, String) {
    let mut tokens = Vec::new();
    for token in engine.stream(greedy_request(ids, count)).unwrap() {
        match token {
            Ok(token) => tokens.extend(token.token_ids),
            Err(Error::EngineHang { detail }) => return (tokens, detail),
            Err(other) => panic!("{other}"),
        }
    }
    panic!("no error behind {tokens:?}");
}

/// A fault in the fourth step of a launch: no token but the three before it, as far as they were
/// read in time, then an error with these parts.
fn fails(
    name: &str,
    device: &str,
    mutant: (&'static str, &'static str),
    parts: &[&str],
) -> Duration {
    let runner = edited("kie_decode", device, mutant, &Arc::default());
    let engine = open_over(name, runner.clone());
    let golden = &goldens(&fixture(name), "")[0];
    let start = Instant::now();
    let (tokens, detail) = until_the_end(&engine, &golden.ids, 8);
    let took = start.elapsed();
    assert!(golden.generated[..3].starts_with(&tokens), "{name} {device}: {tokens:?}, {detail}");
    for part in parts {
        assert!(detail.contains(part), "{name} {device}: no {part:?} in {detail:?}");
    }
    assert!(engine.is_closed());
    let after = continue_greedily(&engine, &[5], 1).unwrap_err();
    assert!(matches!(after, Error::EngineHang { .. }), "{after}");
    engine.close();
    // The machines are whole: another engine on them answers.
    let again = open_over(name, runner);
    assert_eq!(continue_greedily(&again, &golden.ids, 3).unwrap(), golden.generated[..3]);
    took
}

/// Of a request: all that comes before the fault, and the fault. Simulated time is its own.
fn in_time(took: Duration, device: &str) {
    let most = Duration::from_secs(if device.starts_with("sim") { 30 } else { 1 });
    println!("{device}: told after {took:?}");
    assert!(took < most, "{device}: told after {took:?}");
}

#[test]
fn a_dead_rank_ends_the_request_on_all() {
    const DIES: &str = "        b.live = live_at(args, step);
        if (args.rank == 1 && step == 3) {
            *stop = step + 1;
            break;
        }
";
    let all: [(&str, u32, &[&str]); 5] = [
        ("llama", 2, &["in step 3 waited for layer 0, other lanes' attention of rank 1 (wanted"]),
        ("laneformer_d2", 4, &["rank 0: ", "rank 2: ", "rank 3: ", "' attention of rank 1 (wan"]),
        ("laneformer_d2_noearly_vp_lanescale", 2, &["rank 0: ", "in step 3", "of rank 1 (wanted"]),
        ("own_laneformer_mixed", 8, &["rank 0: ", "rank 7: ", "in step 3", "of rank 1 (wanted"]),
        ("own_llama_fp8_tied", 8, &["rank 0: ", "rank 7: ", "layer 0, other lanes' attention of"]),
    ];
    two_at_a_time(all.into(), |(name, ranks, parts)| {
        let Some(device) = several(ranks, &format!("blocks=4,seed={ranks}")) else { return };
        in_time(fails(name, &device, (STEP, DIES), parts), &device);
    });
}

#[test]
fn a_word_lost_between_ranks_is_told() {
    const OUTPUT: &str = "for (int to = 0; to < kRanks; ++to)
        if (!(layer == 1 && b.step == 3 && args.rank == 1 && block() == 1 && to == 2 % kRanks &&
              pair == 0))
            store_word_system(share + (long)column * kWordsH + pair + args.peer_offset[to],
                              ll_word(mine[item].v[0], b.seqno));";
    const TOKEN: &str = "            for (int i = 0; i < kRanks; ++i)
                if (!(b.step == 3 && !args.prompt && block_all(args) == kBlocks + 1 && i == 0))
                    store_word_system(to + 1 + args.peer_offset[i], ll_word(best.id, b.seqno));
            if (masses) {";
    type Case = (&'static str, u32, (&'static str, &'static str), &'static [&'static str]);
    let all: [Case; 6] = [
        ("llama", 2, (SHARE, OUTPUT), &["rank 0: ", "layer 1, other lanes' attention of rank 1 ("]),
        (
            "laneformer_d2",
            4,
            (SHARE, OUTPUT),
            &["rank 2: ", "layer 1, other lanes'", "of rank 1 ("],
        ),
        (
            "llama",
            2,
            (OFFER, TOKEN),
            &["rank 0: ", "in step 3 waited for the token's candidates ("],
        ),
        ("laneformer_d2", 4, (OFFER, TOKEN), &["rank 0: ", "in step 3 waited for the token's"]),
        // Of a layer that takes them two layers later.
        ("own_laneformer_mixed", 8, (SHARE, OUTPUT), &["rank 2: ", "layer 3, other lanes' atten"]),
        (
            "own_llama_fp8_tied",
            8,
            (OFFER, TOKEN),
            &["rank 0: ", "in step 3 waited for the token's"],
        ),
    ];
    two_at_a_time(all.into(), |(name, ranks, mutant, parts)| {
        let Some(device) = several(ranks, "blocks=4,seed=9") else { return };
        in_time(fails(name, &device, mutant, parts), &device);
    });
}

#[test]
fn a_late_rank_is_waited_for_within_the_budget() {
    const LATE: &str = "        b.live = live_at(args, step);
        for (const u64 from = clock_ns(); args.rank == 1 && clock_ns() - from < 30000000;)
            pause_ns(1000);
";
    const TOO_LATE: &str = "        b.live = live_at(args, step);
        for (const u64 from = clock_ns();
             args.rank == 1 && step == 3 && clock_ns() - from < 3000000000;)
            pause_ns(1000);
";
    let all = [
        ("llama", 2, true),
        ("laneformer_d2", 4, true),
        ("own_laneformer_mixed", 8, true),
        ("laneformer_d2", 2, false),
        ("own_llama_fp8_tied", 8, false),
    ];
    two_at_a_time(all.into(), |(name, ranks, in_time)| {
        let Some(device) = several(ranks, "blocks=4,seed=5") else { return };
        if !in_time {
            fails(name, &device, (STEP, TOO_LATE), &["rank 0: ", "in step 3", "of rank 1"]);
            return;
        }
        let engine = open_over(name, edited("kie_decode", &device, (STEP, LATE), &Arc::default()));
        let golden = &goldens(&fixture(name), "")[0];
        let tokens = continue_greedily(&engine, &golden.ids, 6).unwrap();
        assert_eq!(tokens, golden.generated[..6], "{name} {device}");
    });
}

#[test]
fn a_launch_that_one_rank_refuses_closes_the_engine() {
    let broken = Arc::new(AtomicBool::new(false));
    let same = (STEP, "        b.live = live_at(args, step); \n");
    let Some(device) = several(2, "blocks=4,seed=6") else { return };
    let runner = edited("kie_decode", &device, same, &broken);
    let engine = open_over("llama", runner.clone());
    let golden = &goldens(&fixture("llama"), "")[0];
    let ask = |engine: &Engine| continue_greedily(engine, &golden.ids, 2);
    assert_eq!(ask(&engine).unwrap(), golden.generated[..2]);
    broken.store(true, Relaxed);
    let error = ask(&engine).unwrap_err().to_string();
    assert!(error.contains("broken on purpose"), "{error}");
    assert!(engine.is_closed());
    broken.store(false, Relaxed);
    assert!(ask(&engine).unwrap_err().to_string().contains("broken on purpose"));
    assert_eq!(ask(&open_over("llama", runner)).unwrap(), golden.generated[..2]);
}

#[test]
fn a_stray_access_is_a_fault_that_names_both_ranks() {
    const HOP: &str = "store_word_system(p + args.peer_offset[rank], ll_word(payload, seqno));";
    const PLAIN: &str = "store_word(p + args.peer_offset[rank], ll_word(payload, seqno));";
    const OWN: &str = "                words[i] = load_word(p);";
    const OTHERS: &str =
        "                words[i] = load_word(p + args.peer_offset[from / kLanes]);";
    for (from, to, what) in [(HOP, PLAIN, "store_word at 0x"), (OWN, OTHERS, "load_word at 0x")] {
        let device = "sim:ranks=2,blocks=4,seed=8";
        let engine = open_over("llama", edited("kie_decode", device, (from, to), &Arc::default()));
        let error = continue_greedily(&engine, &[5, 6, 7], 4).unwrap_err().to_string();
        let parts = [what, "memory of rank ", "which others "];
        assert!(parts.iter().all(|part| error.contains(part)), "{to}: {error}");
    }
}

/// The kernels under way of a group whose last rank is slow, and what was freed meanwhile.
#[derive(Default)]
struct Watched {
    flying: AtomicUsize,
    freed: AtomicUsize,
}

/// A machine whose memory tells when it is freed, and whose kernels end late where it is slow.
struct Slow {
    machine: Arc<dyn Machine>,
    slow: bool,
    watched: Arc<Watched>,
}

struct Owned(Option<Arc<dyn Any + Send + Sync>>, Arc<Watched>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.1.freed.fetch_add(usize::from(self.1.flying.load(Relaxed) > 0), Relaxed);
        self.0.take();
    }
}

struct SlowFlight {
    flight: Box<dyn Flight>,
    ended: Option<Instant>,
    late: Duration,
    watched: Arc<Watched>,
}

impl Flight for SlowFlight {
    fn done(&mut self) -> kie_kernels::Result<bool> {
        if self.ended.is_none() && self.flight.done()? {
            self.ended = Some(Instant::now());
        }
        Ok(self.ended.is_some_and(|ended| ended.elapsed() >= self.late))
    }
}

impl Drop for SlowFlight {
    fn drop(&mut self) {
        self.wait();
        self.watched.flying.fetch_sub(1, Relaxed);
    }
}

impl Machine for Slow {
    as_the_machine_does!();
    fn compile(&self, source: &Source) -> kie_kernels::Result<Arc<dyn Module>> {
        self.machine.compile(source)
    }
    fn alloc(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        self.machine.alloc(bytes)
    }
    fn alloc_symmetric(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        let Memory { address, bytes, owner } = self.machine.alloc_symmetric(bytes)?;
        let owner = Arc::new(Owned(Some(owner), self.watched.clone()));
        Ok(Memory { address, bytes, owner })
    }
    fn launch(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> kie_kernels::Result<Box<dyn Flight>> {
        let flight = self.machine.launch(module, launch)?;
        self.watched.flying.fetch_add(1, Relaxed);
        let late = Duration::from_millis(if self.slow { 300 } else { 0 });
        Ok(Box::new(SlowFlight { flight, ended: None, late, watched: self.watched.clone() }))
    }
}

/// A rank that still runs may store into any rank's words.
#[test]
fn nothing_is_freed_before_the_last_rank_has_ended() {
    let (name, sim) = ("sim:ranks=2,blocks=4,seed=3", Options::default());
    let watched = Arc::new(Watched::default());
    let slow = |(rank, machine)| -> Arc<dyn Machine> {
        Arc::new(Slow { machine, slow: rank == 1, watched: watched.clone() })
    };
    let machines = devices::machines(name, &sim).unwrap();
    let machines = machines.into_iter().enumerate().map(slow).collect();
    let engine = open_over("llama", Arc::new(Mono::new(name, machines, &sim).unwrap()));
    let mut stream = engine.stream(greedy_request(&goldens(&fixture("llama"), "")[0].ids, 400));
    assert!(stream.as_mut().unwrap().next().unwrap().is_ok());
    engine.close();
    assert_eq!(watched.flying.load(Relaxed), 0);
    assert_eq!(watched.freed.load(Relaxed), 0, "freed under a kernel");
}
