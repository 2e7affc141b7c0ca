//! Random life cycles against a model that remembers what was written into every page.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

/// What a slot of a page holds: a hash of the tokens up to and including that position.
type Content = Vec<[u64; PAGE]>;

struct Running {
    lease: Lease,
    tokens: Vec<u32>,
    written: usize,
    reserve: usize,
}

struct World {
    pages: Pages,
    content: Vec<Content>,
    running: Vec<Running>,
    /// Histories to draw prompts from.
    past: Vec<Vec<u32>>,
    fresh: u32,
}

/// Where bits matter, what decoding made is in no tree, and prompts go on at multiples alone.
#[test]
fn exact_reuse_ends_where_prefill_did() {
    let (prompt, answer): (Vec<u32>, Vec<u32>) = ((0..640).collect(), (700..900).collect());
    let whole = [&prompt[..], &answer[..], &[1][..]].concat();
    for (every, last, found) in [(64, true, 640), (64, false, 576), (256, true, 512)] {
        let exact = Some(ExactReuse { every, last });
        for window in [None, Some(100)] {
            let mut pages = Pages::new(PagesConfig { exact, ..config(40, 40, window, 2) });
            let lease = pages.admit(&prompt, whole.len(), whole.len()).unwrap();
            let kept = pages.reusable(prompt.len(), prompt.len());
            pages.commit(&lease, &prompt[..kept]);
            let kept = pages.reusable(prompt.len(), whole.len() - 1);
            pages.retire(&lease, &whole[..kept], whole.len());
            assert_eq!(pages.how_far(&whole), found, "{every} {last} {window:?}");
            pages.check().unwrap();
        }
    }
    let mut pages = Pages::new(config(40, 0, None, 2));
    let lease = pages.admit(&prompt, whole.len(), whole.len()).unwrap();
    pages.retire(&lease, &whole[..pages.reusable(640, 840)], 841);
    assert_eq!(pages.how_far(&whole), 832, "elsewhere the answer's pages, too");
}

fn hashes(tokens: &[u32]) -> Vec<u64> {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let step = |h: u64, t: u32| (h ^ u64::from(t)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    tokens
        .iter()
        .map(|&t| {
            h = step(h, t);
            h
        })
        .collect()
}

fn config(full: usize, window_pages: usize, window: Option<usize>, slots: usize) -> PagesConfig {
    let group = |pages, window| GroupConfig { pages, window, page_bytes: 1, recurrent: false };
    let windowed = window.map(|window| group(window_pages, Some(window)));
    let groups = [group(full, None)].into_iter().chain(windowed).collect();
    PagesConfig { groups, slots, chunk: 96, prefix_cache: true, exact: None }
}

impl World {
    fn new(config: PagesConfig) -> Self {
        Self {
            content: config.groups.iter().map(|g| vec![[0; PAGE]; g.pages]).collect(),
            pages: Pages::new(config),
            running: Vec::new(),
            past: vec![Vec::new()],
            fresh: 0,
        }
    }

    /// All that a request at position `at` reads must be what its tokens say.
    fn verify(&self, lease: &Lease, hashes: &[u64], at: usize, to: usize) {
        for group in self.pages.groups() {
            let from = self.pages.window(group).map_or(0, |w| (at + 1).saturating_sub(w));
            // What is kept behind a position is read where a request continues, and nowhere else.
            let to = match self.pages.config.groups[group].recurrent {
                true if at > lease.cached => continue,
                true => at,
                false => to,
            };
            for (i, &want) in hashes.iter().enumerate().take(to).skip(from) {
                let page = lease.tables[group][i / PAGE];
                assert_eq!(self.content[group][page as usize][i % PAGE], want, "group {group} {i}");
            }
        }
    }

    /// Computes positions up to `tokens.len()`, in chunks, as a device would.
    fn compute(&mut self, mut r: Running) -> Running {
        let hashes = hashes(&r.tokens);
        while r.written < r.tokens.len() {
            let to = r.tokens.len().min(r.written + self.pages.config.chunk);
            for (i, &hash) in hashes.iter().enumerate().take(to).skip(r.written) {
                for group in self.pages.groups() {
                    if let Some(&page) = r.lease.tables[group].get(i / PAGE) {
                        self.content[group][page as usize][i % PAGE] = hash;
                    }
                }
            }
            self.verify(&r.lease, &hashes, r.written, to);
            r.written = to;
        }
        r
    }

    fn tokens_after(&mut self, from: usize, keep: usize, more: usize) -> Vec<u32> {
        let mut tokens = self.past[from % self.past.len()].clone();
        tokens.truncate(keep);
        for i in 0..more as u32 {
            // Few different continuations, so that histories meet again.
            self.fresh = self.fresh.wrapping_mul(5).wrapping_add(1);
            tokens.push(i * 8 + (self.fresh >> 7) % 8 * u32::from(i % 200 == 0));
        }
        if tokens.is_empty() {
            tokens.push(1);
        }
        tokens
    }

    fn start(&mut self, tokens: Vec<u32>, reserve_more: usize) -> bool {
        if self.running.len() >= self.pages.config.slots {
            return false;
        }
        let (far, reserve) = (self.pages.how_far(&tokens), tokens.len() + reserve_more);
        let now = tokens.len() + reserve_more % 100;
        let Ok(lease) = self.pages.admit(&tokens, now, reserve) else { return false };
        assert!(lease.cached == far || lease.cached == 0);
        assert!(lease.cached < tokens.len() && lease.cached % PAGE == 0);
        assert!((now.min(reserve)..reserve + PAGE).contains(&lease.positions()));
        self.verify(&lease, &hashes(&tokens), lease.cached, lease.cached);
        let written = lease.cached;
        self.past.push(tokens.clone());
        self.running.push(Running { lease, tokens, written, reserve });
        true
    }

    /// Prefills, and lets others share.
    fn prefill(&mut self, which: usize) {
        let Some(i) = which.checked_rem(self.running.len()) else { return };
        let r = self.running.remove(i);
        let r = self.compute(r);
        self.pages.commit(&r.lease, &r.tokens);
        self.running.push(r);
    }

    /// Generates `more`, then ends with `drop` tokens rolled back.
    fn finish(&mut self, which: usize, more: usize, drop: usize) {
        let Some(i) = which.checked_rem(self.running.len()) else { return };
        let mut r = self.running.remove(i);
        let wanted = r.reserve.min(r.tokens.len() + more);
        let had = r.lease.positions();
        let grown = self.pages.grow(&mut r.lease, wanted);
        assert_eq!(grown, r.lease.positions() > had);
        assert!(r.lease.positions() < r.reserve + PAGE);
        let room = wanted.min(r.lease.positions()) - r.tokens.len();
        r.tokens.extend((0..more.min(room) as u32).map(|t| t % 3));
        let mut r = self.compute(r);
        r.tokens.truncate(r.tokens.len().saturating_sub(drop));
        self.past.push(r.tokens.clone());
        self.pages.retire(&r.lease, &r.tokens, r.written);
    }

    /// Cancelled in the middle of the prompt.
    fn cancel(&mut self, which: usize, at: usize) {
        let Some(i) = which.checked_rem(self.running.len()) else { return };
        let mut r = self.running.remove(i);
        r.tokens.truncate(r.written.max(at));
        let r = self.compute(r);
        self.pages.retire(&r.lease, &r.tokens[..r.written], r.written);
    }

    fn check(&self) {
        self.pages.check().unwrap();
        let mut writable = BTreeSet::new();
        for r in &self.running {
            for group in self.pages.groups() {
                let ahead = r.lease.tables[group].iter().skip(r.written / PAGE);
                let own: BTreeSet<u32> = ahead.copied().collect();
                for page in own {
                    assert!(writable.insert((group, page)), "two leases write page {page}");
                    assert_eq!(self.pages.pools[group].owners(page), 1);
                }
            }
        }
    }

    fn close(&mut self) {
        while !self.running.is_empty() {
            self.finish(0, 0, 0);
        }
        self.pages.clear();
        self.check();
        let stats = self.pages.stats();
        let all: Vec<usize> = self.pages.config.groups.iter().map(|group| group.pages).collect();
        assert_eq!((stats.used, stats.free), (vec![0; all.len()], all));
    }
}

#[derive(Debug, Clone)]
enum Act {
    Start { from: usize, keep: usize, more: usize, reserve: usize },
    Prefill(usize),
    Finish { which: usize, more: usize, drop: usize },
    Cancel { which: usize, at: usize },
    Grow { which: usize, by: usize },
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    let any = 0usize..1000;
    prop_oneof![
        5 => (any.clone(), 0usize..3000, 0usize..900, 0usize..700)
            .prop_map(|(from, keep, more, reserve)| Act::Start { from, keep, more, reserve }),
        3 => any.clone().prop_map(Act::Prefill),
        4 => (any.clone(), 0usize..600, prop_oneof![Just(0usize), 0usize..300])
            .prop_map(|(which, more, drop)| Act::Finish { which, more, drop }),
        1 => (any.clone(), 0usize..500).prop_map(|(which, at)| Act::Cancel { which, at }),
        3 => (any, 0usize..400).prop_map(|(which, by)| Act::Grow { which, by }),
        1 => Just(Act::Clear),
    ]
}

impl World {
    fn act(&mut self, act: Act) {
        match act {
            Act::Start { from, keep, more, reserve } => {
                let tokens = self.tokens_after(from, keep, more);
                self.start(tokens, reserve);
            }
            Act::Prefill(which) => self.prefill(which),
            Act::Finish { which, more, drop } => self.finish(which, more, drop),
            Act::Cancel { which, at } => self.cancel(which, at),
            Act::Grow { which, by } => {
                if let Some(i) = which.checked_rem(self.running.len()) {
                    let lease = &mut self.running[i].lease;
                    let to = lease.positions() + by;
                    self.pages.grow(lease, to);
                }
            }
            Act::Clear => self.pages.clear(),
        }
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 2000, ..Default::default() })]
    #[test]
    fn every_page_has_its_owners(
        acts in prop::collection::vec(act(), 1..60),
        full in 20usize..200,
        window in prop::option::of(1usize..400),
        spare in 0usize..60,
        slots in 1usize..5,
        // Further groups, with windows of their own or seeing everything.
        more in prop::collection::vec(prop::option::of(1usize..400), 0..3),
    ) {
        let mut config = config(full, 0, window, slots);
        let group = |window: Option<usize>| {
            // Some of them keep copies of a recurrent state.
            let recurrent = window.is_some_and(|window| window % 3 == 0);
            let window = if recurrent { Some(2) } else { window };
            GroupConfig { pages: full, window, page_bytes: 1, recurrent }
        };
        let further = more.into_iter().map(group);
        config.groups.extend(further);
        for group in 0..config.groups.len() {
            if config.groups[group].window.is_some() {
                config.groups[group].pages = slots * config.ring(group) + spare;
            }
        }
        let mut world = World::new(config.clone());
        let mut twin = World::new(config);
        for act in acts {
            world.act(act.clone());
            twin.act(act);
        }
        let leases =
            |w: &World| w.running.iter().map(|r| r.lease.tables.clone()).collect::<Vec<_>>();
        prop_assert_eq!(leases(&world), leases(&twin), "same calls, other pages");
        world.close();
    }
}

/// The window pool never refuses while it holds a ring a slot.
#[test]
fn a_ring_is_guaranteed() {
    let mut c = config(4000, 0, Some(200), 4);
    c.groups[1].pages = 4 * c.ring(1);
    let mut world = World::new(c);
    for round in 0..40 {
        while world.running.len() < 4 {
            let tokens = world.tokens_after(round, 1500, 700);
            assert!(world.start(tokens, 1000), "round {round}");
            world.check();
        }
        world.prefill(0);
        world.finish(round, 900, 10);
        world.finish(round, 5, 0);
        world.check();
    }
    world.close();
}

#[test]
fn a_shared_thousand_is_found() {
    for window in [None, Some(512)] {
        let mut world = World::new(config(100, 100, window, 2));
        let mut tokens: Vec<u32> = (0..1000).collect();
        tokens.extend([7; 30]);
        world.start(tokens.clone(), 10);
        world.prefill(0);
        tokens.truncate(1000);
        tokens.extend([9; 40]);
        assert_eq!(world.pages.how_far(&tokens), 960, "{window:?}: while the first still runs");
        assert!(world.start(tokens, 10));
        assert_eq!(world.running[1].lease.cached, 960);
        world.close();
    }
}

/// A long request in a small pool runs on its ring and keeps the windows before checkpoints.
#[test]
fn windows_drop_old_pages_but_checkpoints() {
    let mut c = config(100, 0, Some(128), 1);
    let ring = c.ring(1);
    c.groups[1].pages = ring + 6;
    let mut world = World::new(c);
    let tokens: Vec<u32> = (0..3000).collect();
    world.start(tokens.clone(), 0);
    let distinct: BTreeSet<u32> = world.running[0].lease.tables[1].iter().copied().collect();
    assert_eq!(distinct.len(), ring + 4, "the ring, and two pages before each of two checkpoints");
    world.finish(0, 0, 0);
    assert_eq!(world.pages.how_far(&tokens), 2944);
    assert_eq!(world.pages.how_far(&tokens[..2500]), 2048);
    assert_eq!(world.pages.how_far(&tokens[..1500]), 1024);
    assert_eq!(world.pages.how_far(&tokens[..1024]), 0, "one token is left to compute");
    world.close();
}

/// Copies of recurrent states: at every page where there is room, else at every 256th position.
#[test]
fn recurrent_states_are_copied_as_far_as_there_is_room() {
    for (pages, distinct, found) in [(60, 47, [2944, 2496, 64]), (13, 12, [2816, 2304, 0])] {
        let mut c = config(100, pages, Some(2), 1);
        c.groups[1].recurrent = true;
        assert_eq!(c.ring(1), 1);
        let mut world = World::new(c);
        let tokens: Vec<u32> = (0..3000).collect();
        world.start(tokens.clone(), 0);
        let table: BTreeSet<u32> = world.running[0].lease.tables[1].iter().copied().collect();
        assert_eq!(table.len(), distinct, "{pages} pages");
        world.finish(0, 0, 0);
        let lengths = [3000, 2500, 100];
        let got = lengths.map(|length| world.pages.how_far(&tokens[..length]));
        assert_eq!(got, found, "{pages} pages");
        // What is found is what its tokens say.
        assert!(world.start(tokens[..2500].to_vec(), 0));
        world.close();
    }
}

#[test]
fn ten_thousand_requests_leave_nothing() {
    let mut world = World::new(config(64, 30, Some(100), 3));
    for i in 0..10_000usize {
        let tokens = world.tokens_after(i * 7, i % 300, 1 + i % 90);
        world.start(tokens, i % 50);
        if i % 3 == 0 {
            world.prefill(i);
        }
        if i % 5 != 0 || world.running.len() == 3 {
            world.finish(i, i % 40, i % 4);
        }
        if i % 11 == 0 {
            world.act(Act::Grow { which: i, by: 70 });
        }
        world.past.drain(..world.past.len().saturating_sub(50));
    }
    assert!(world.pages.stats().hits > 1000);
    world.close();
}

#[test]
fn without_the_cache_nothing_is_shared() {
    let config = PagesConfig { prefix_cache: false, ..config(40, 20, Some(64), 1) };
    let mut world = World::new(config);
    let tokens: Vec<u32> = (0..600).collect();
    world.start(tokens.clone(), 0);
    world.finish(0, 0, 0);
    assert_eq!(world.pages.how_far(&tokens), 0);
    assert_eq!(world.pages.stats().free, [40, 20]);
}

#[test]
fn no_room_says_what_is_missing() {
    let mut world = World::new(config(4, 0, None, 2));
    let refused = world.pages.admit(&[1; 10], 10, 300).unwrap_err();
    assert_eq!(refused, NoRoom { group: 0, wanted: 5, available: 4, total: 4 });
    world.check();
}

/// Requests are promised twice what there is, and get it as they grow while there is some.
#[test]
fn what_is_promised_is_bounded() {
    let mut pages = Pages::new(config(8, 0, None, 4));
    let mut first = pages.admit(&[1; 10], 10, 512).unwrap();
    let mut second = pages.admit(&[2; 10], 10, 448).unwrap();
    assert_eq!((first.positions(), second.positions()), (64, 64));
    let refused = pages.admit(&[3; 10], 10, 128).unwrap_err();
    assert_eq!(refused, NoRoom { group: 0, wanted: 2, available: 1, total: 8 });
    let third = pages.admit(&[3; 10], 10, 64).unwrap();
    assert!(pages.grow(&mut first, 300) && first.positions() == 320);
    assert!(pages.grow(&mut second, 500) && second.positions() == 128, "as many as there are");
    assert!(!pages.grow(&mut first, 400));
    pages.retire(&third, &[], 10);
    assert!(pages.grow(&mut first, 400) && !pages.grow(&mut first, 512));
    pages.retire(&second, &[], 10);
    assert!(pages.grow(&mut first, 4000) && first.positions() == 512, "never beyond the promise");
    pages.check().unwrap();
}

#[test]
fn pages_that_hold_nothing_are_shared_among_idle_slots() {
    let mut pages = Pages::new(config(12, 0, None, 3));
    assert_eq!(pages.share(), 4 * PAGE);
    let tokens: Vec<u32> = (0..8 * PAGE as u32).collect();
    let first = pages.admit(&tokens, 0, tokens.len()).unwrap();
    assert_eq!(pages.share(), 2 * PAGE);
    pages.retire(&first, &tokens, tokens.len());
    // Eight pages are the cache's now: evicting them is not free.
    assert_eq!(pages.share(), PAGE);
}
