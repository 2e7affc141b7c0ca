//! KV pages and the prefix cache: who owns which page. Bookkeeping only, no tensor data.
//!
//! A request gets its page tables once, at admission; nothing here is called per token.
//! Layer group 0 sees everything: each logical page of a request has a physical page of its own.
//! Group 1 sees the last W positions: with room to spare its pages are distinct too; otherwise a
//! request runs on a ring (logical pages j and j + R share a physical one), with distinct pages
//! only where a checkpoint (every 1,024 positions) will want the window in front of it.
//!
//! Invariants:
//! - a page's owner count is the number of leases, tree nodes and pins that hold it;
//! - a page in a ring has one owner, the lease that writes it; a shared page is never written;
//! - a cached prefix of p tokens is used only with all its full pages and the window pages that
//!   hold `[p - W + 1, p)`;
//! - what is free or can be evicted in the window pool covers one ring for every idle slot, so
//!   long as the pool holds `slots` rings: admission then fails for want of full pages only;
//! - the same calls in the same order give the same pages.

mod pool;
mod prefix;

use pool::Pool;
use prefix::{Id, Tree};
use std::collections::{BTreeMap, BTreeSet};

pub use kie_kernels::abi::{GROUPS, PAGE};

/// Entry of a page table that is never read: a page behind the window.
pub const DEAD: u32 = u32::MAX;

/// Positions between checkpoints of the window group.
pub const CHECKPOINT: usize = 1024;

/// What the pools are made of.
#[derive(Debug, Clone)]
pub struct PagesConfig {
    /// Pages of each group's pool; the second is 0 without windowed layers. A model of windowed
    /// layers only still counts pages in group 0 (they have no bytes).
    pub pages: [usize; GROUPS],
    /// Positions that a windowed layer sees, the own included; `None`: no windowed layers.
    pub window: Option<usize>,
    /// Requests that may hold a lease at once.
    pub slots: usize,
    /// Most positions computed in one pass.
    pub chunk: usize,
    /// Whether requests share pages.
    pub prefix_cache: bool,
}

impl PagesConfig {
    /// Window pages that one slot can always run on.
    pub fn ring(&self) -> usize {
        self.window.map_or(0, |window| ring_pages(window, self.chunk))
    }
}

/// Window pages that a slot cannot do without: its window, a chunk in flight, the edges. The
/// planner sizes the pool by it and [`Pages`] guarantees it, so there is one formula.
pub(crate) fn ring_pages(window: usize, chunk: usize) -> usize {
    window.saturating_add(chunk).div_ceil(PAGE) + 1
}

/// Too few pages are free or evictable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page group {group}: {wanted} pages wanted, {available} available of {total}")]
pub struct NoRoom {
    /// Layer group.
    pub group: usize,
    /// Pages the request needs.
    pub wanted: usize,
    /// Pages that could be given.
    pub available: usize,
    /// Pages of the pool: if fewer than wanted, waiting does not help.
    pub total: usize,
}

/// A request's pages. Give it back with [`Pages::retire`].
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    id: u64,
    /// Leading tokens whose keys and values are already in the pages; a multiple of 64.
    pub cached: usize,
    /// Per group: physical page of each logical page, [`DEAD`] where it is never read.
    pub tables: [Vec<u32>; GROUPS],
}

/// Keeps the cached pages of one history from eviction. Give it back with [`Pages::unpin`].
#[derive(Debug, PartialEq, Eq)]
pub struct Pin {
    id: u64,
    /// Leading tokens that are held; a multiple of 64.
    pub tokens: usize,
}

/// Figures for `metrics()`; arrays are per group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PagesStats {
    /// Pages without an owner.
    pub free: [usize; GROUPS],
    /// Pages held by leases or pins.
    pub used: [usize; GROUPS],
    /// Pages held by the cache alone; evicted when room is wanted.
    pub cached: [usize; GROUPS],
    /// Requests that found a prefix.
    pub hits: u64,
    /// Requests admitted.
    pub admitted: u64,
    /// Tokens that were not computed again.
    pub tokens_reused: u64,
}

/// What a lease or a pin holds.
#[derive(Debug, Default)]
struct Holding {
    path: Vec<Id>,
    /// Pages held, each once, per group.
    pages: [Vec<u32>; GROUPS],
    /// Window pages that are written more than once.
    ring: BTreeSet<u32>,
}

/// The pools of all groups, the tree, and who holds what.
#[derive(Debug)]
pub struct Pages {
    config: PagesConfig,
    pools: [Pool; GROUPS],
    tree: Tree,
    leases: BTreeMap<u64, Holding>,
    pins: BTreeMap<u64, Holding>,
    next_id: u64,
    stats: PagesStats,
}

impl Pages {
    /// All pages free.
    pub fn new(config: PagesConfig) -> Self {
        Self {
            pools: config.pages.map(Pool::new),
            config,
            tree: Tree::default(),
            leases: BTreeMap::new(),
            pins: BTreeMap::new(),
            next_id: 0,
            stats: PagesStats::default(),
        }
    }

    /// Tokens that a request with these prompt tokens would find cached (a multiple of 64, less
    /// than the prompt: one token is left to compute).
    pub fn how_far(&self, tokens: &[u32]) -> usize {
        self.usable_path(&tokens[..tokens.len().saturating_sub(1)]).len() * PAGE
    }

    /// Pages for a request of these prompt tokens that may grow to `reserve` positions.
    pub fn admit(&mut self, tokens: &[u32], reserve: usize) -> Result<Lease, NoRoom> {
        let path = self.usable_path(&tokens[..tokens.len().saturating_sub(1)]);
        let reserve = reserve.max(tokens.len());
        // Holding a prefix can be what leaves too little; without it there may be room.
        let mut admitted = self.admit_on(path, reserve);
        if matches!(admitted, Err(NoRoom { group: 1, .. })) {
            admitted = self.admit_on(Vec::new(), reserve);
        }
        let lease = admitted?;
        self.stats.admitted += 1;
        self.stats.hits += u64::from(lease.cached > 0);
        self.stats.tokens_reused += lease.cached as u64;
        Ok(lease)
    }

    fn admit_on(&mut self, path: Vec<Id>, reserve: usize) -> Result<Lease, NoRoom> {
        let cached = path.len();
        let total = reserve.div_ceil(PAGE);
        let first_seen = self.window_start(cached * PAGE);
        let mut holding = self.hold(path, |depth| depth >= first_seen);
        let mut tables = [Vec::new(), Vec::new()];
        tables[0].clone_from(&holding.pages[0]);
        let room = self.plan_room(total - cached);
        let taken = room.and_then(|distinct_room| {
            self.take(0, total - cached, &mut holding)?;
            tables[0].extend(&holding.pages[0][cached..]);
            if self.config.window.is_some() {
                tables[1].resize(first_seen, DEAD);
                tables[1].extend(&holding.pages[1]);
                self.take_window(cached..total, distinct_room, &mut holding, &mut tables[1])?;
            }
            Ok(())
        });
        if let Err(no_room) = taken {
            self.let_go(holding);
            return Err(no_room);
        }
        let id = self.new_id();
        self.leases.insert(id, holding);
        Ok(Lease { id, cached: cached * PAGE, tables })
    }

    /// Whether `need` more logical pages can be had in both groups; returns the window pages that
    /// may be taken beyond a ring without touching what the idle slots are sure of.
    fn plan_room(&self, need: usize) -> Result<usize, NoRoom> {
        let ring = self.config.ring();
        let idle_others = self.config.slots.saturating_sub(self.leases.len() + 1);
        let sure = [0, idle_others * ring];
        let wanted = [need, need.min(ring)];
        for group in 0..GROUPS {
            let available = self.available(group).saturating_sub(sure[group]);
            if wanted[group] > available {
                let total = self.pools[group].len();
                return Err(NoRoom { group, wanted: wanted[group], available, total });
            }
        }
        Ok(self.available(1) - sure[1] - wanted[1])
    }

    /// Window pages for the logical pages `span`, appended to `table`.
    fn take_window(
        &mut self,
        span: std::ops::Range<usize>,
        mut room: usize,
        holding: &mut Holding,
        table: &mut Vec<u32>,
    ) -> Result<(), NoRoom> {
        let ring = self.config.ring();
        if span.len() <= ring + room {
            let before = holding.pages[1].len();
            self.take(1, span.len(), holding)?;
            table.extend(&holding.pages[1][before..]);
            return Ok(());
        }
        let before = holding.pages[1].len();
        self.take(1, ring, holding)?;
        let pages: Vec<u32> = holding.pages[1][before..].to_vec();
        holding.ring.extend(&pages);
        let end = span.end;
        for logical in span {
            let reached = checkpoint_after(logical) <= end * PAGE;
            if room > 0 && reached && self.before_checkpoint(logical) {
                room -= 1;
                self.take(1, 1, holding)?;
                table.extend(holding.pages[1].last());
            } else {
                table.push(pages[logical % ring]);
            }
        }
        Ok(())
    }

    /// Puts the complete pages of `tokens` (all tokens whose keys and values are valid, the
    /// prompt first) into the tree, so that other requests find them. Call it after prefill.
    pub fn commit(&mut self, lease: &Lease, tokens: &[u32]) {
        self.publish(lease, tokens, None);
    }

    /// Ends a request: commits `tokens` and gives its pages back. `written` is the number of
    /// positions that were computed at most; more than `tokens` where the end is rolled back.
    pub fn retire(&mut self, lease: Lease, tokens: &[u32], written: usize) {
        self.publish(&lease, tokens, Some(written.max(tokens.len())));
        if let Some(holding) = self.leases.remove(&lease.id) {
            self.let_go(holding);
        }
    }

    /// Ring pages are given away only at the end (`written` is set), and only those that no later
    /// logical page has overwritten.
    fn publish(&mut self, lease: &Lease, tokens: &[u32], written: Option<usize>) {
        let Some(mut holding) = self.leases.remove(&lease.id) else { return };
        let pages = if self.config.prefix_cache { tokens.as_chunks::<PAGE>().0 } else { &[] };
        let mut parent = None;
        for (logical, page) in pages.iter().take(lease.tables[0].len()).enumerate() {
            let id = self.tree.child(parent, page).unwrap_or_else(|| {
                self.pools[0].share(lease.tables[0][logical]);
                self.tree.insert(parent, page, lease.tables[0][logical])
            });
            match holding.path.get(logical) {
                Some(&held) if held != id => break, // not the tokens it was admitted with
                Some(_) => {}
                None => {
                    self.tree.node_mut(id).users += 1;
                    holding.path.push(id);
                }
            }
            let own = lease.tables[1].get(logical).copied().filter(|&own| own != DEAD);
            if let Some(own) = own.filter(|own| {
                !holding.ring.contains(own)
                    || written.is_some_and(|w| survives(&lease.tables[1], logical, w))
            }) {
                if self.tree.node(id).window.is_none() {
                    self.tree.node_mut(id).window = Some(own);
                    self.pools[1].share(own);
                }
            }
            parent = Some(id);
        }
        self.tree.touch(&holding.path);
        self.leases.insert(lease.id, holding);
    }

    /// Holds the cached pages of a history: all its full pages, and the window pages at its end
    /// and at checkpoints while the idle slots' rings stay covered. Pinning again is a fork.
    pub fn pin(&mut self, tokens: &[u32]) -> Pin {
        let path = self.usable_path(tokens);
        let first_seen = self.window_start(path.len() * PAGE);
        let sure = self.config.slots.saturating_sub(self.leases.len()) * self.config.ring();
        let mut spare = self.available(1).saturating_sub(sure);
        let mut wanted = vec![false; path.len()];
        for (depth, &id) in path.iter().enumerate().rev() {
            let Some(page) = self.tree.node(id).window else { continue };
            let cost = usize::from(self.pools[1].owners(page) == 1);
            if (depth >= first_seen || self.before_checkpoint(depth)) && spare >= cost {
                wanted[depth] = true;
                spare -= cost;
            }
        }
        let tokens = path.len() * PAGE;
        let holding = self.hold(path, |depth| wanted[depth]);
        let id = self.new_id();
        self.pins.insert(id, holding);
        Pin { id, tokens }
    }

    /// Lets go of what a pin held; the cache keeps it until room is wanted.
    pub fn unpin(&mut self, pin: Pin) {
        if let Some(holding) = self.pins.remove(&pin.id) {
            self.let_go(holding);
        }
    }

    /// Empties the cache of all that no lease and no pin holds.
    pub fn clear(&mut self) {
        self.evict_full(self.pools[0].len() + 1);
    }

    /// Figures of this moment.
    pub fn stats(&self) -> PagesStats {
        let mut stats = self.stats;
        for group in 0..GROUPS {
            stats.free[group] = self.pools[group].free();
            stats.cached[group] = self.evictable(group);
            stats.used[group] = self.pools[group].len() - stats.free[group] - stats.cached[group];
        }
        stats
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// First logical page that the windowed layers need to continue at position `p`.
    fn window_start(&self, p: usize) -> usize {
        self.config.window.map_or(p / PAGE, |w| (p + 1).saturating_sub(w) / PAGE)
    }

    /// Whether the logical page belongs to the window in front of a checkpoint.
    fn before_checkpoint(&self, logical: usize) -> bool {
        logical >= self.window_start(checkpoint_after(logical))
    }

    /// The longest cached path along `tokens` from whose end a request can continue.
    fn usable_path(&self, tokens: &[u32]) -> Vec<Id> {
        let mut path = self.tree.path(tokens);
        if self.config.window.is_some() {
            let (mut run, mut usable) = (0, 0);
            for (depth, &id) in path.iter().enumerate() {
                run = if self.tree.node(id).window.is_some() { run + 1 } else { 0 };
                if depth + 1 - run <= self.window_start((depth + 1) * PAGE) {
                    usable = depth + 1;
                }
            }
            path.truncate(usable);
        }
        path
    }

    /// Becomes an owner of a path's full pages and of those window pages that `wanted` names.
    fn hold(&mut self, path: Vec<Id>, wanted: impl Fn(usize) -> bool) -> Holding {
        let mut pages = [Vec::new(), Vec::new()];
        for (depth, &id) in path.iter().enumerate() {
            let node = self.tree.node_mut(id);
            node.users += 1;
            pages[0].push(node.full);
            pages[1].extend(node.window.filter(|_| wanted(depth)));
        }
        for (pool, pages) in self.pools.iter_mut().zip(&pages) {
            pages.iter().for_each(|&page| pool.share(page));
        }
        self.tree.touch(&path);
        Holding { path, pages, ring: BTreeSet::new() }
    }

    fn let_go(&mut self, holding: Holding) {
        for id in holding.path {
            self.tree.node_mut(id).users -= 1;
        }
        for (pool, pages) in self.pools.iter_mut().zip(holding.pages) {
            pages.into_iter().for_each(|page| pool.release(page));
        }
    }

    /// Takes `n` private pages, evicting as needed.
    fn take(&mut self, group: usize, n: usize, holding: &mut Holding) -> Result<(), NoRoom> {
        match group {
            0 => self.evict_full(n),
            _ => self.evict_window(n),
        }
        for _ in 0..n {
            let page = self.pools[group].take().ok_or(NoRoom {
                group,
                wanted: n,
                available: 0,
                total: self.pools[group].len(),
            })?;
            holding.pages[group].push(page);
        }
        Ok(())
    }

    fn available(&self, group: usize) -> usize {
        self.pools[group].free() + self.evictable(group)
    }

    /// Pages that only the tree holds.
    fn evictable(&self, group: usize) -> usize {
        let page = |n: &prefix::Node| match group {
            0 => (n.users == 0).then_some(n.full),
            _ => n.window,
        };
        let alone = |p: &u32| self.pools[group].owners(*p) == 1;
        self.tree.iter().filter_map(|(_, n)| page(n)).filter(alone).count()
    }

    /// Removes unused nodes, oldest first, until `wanted` full pages are free.
    fn evict_full(&mut self, wanted: usize) {
        if self.pools[0].free() >= wanted {
            return;
        }
        for id in self.tree.by_age() {
            if self.pools[0].free() >= wanted {
                return;
            }
            if self.tree.node(id).users == 0 {
                let node = self.tree.remove(id);
                self.pools[0].release(node.full);
                node.window.into_iter().for_each(|page| self.pools[1].release(page));
            }
        }
    }

    /// Drops window pages of the tree, oldest first, until `wanted` are free: first those away
    /// from checkpoints and more than a window before the end of any path, then all.
    fn evict_window(&mut self, wanted: usize) {
        if self.pools[1].free() >= wanted {
            return;
        }
        let distance = self.tree.distance_to_end();
        let reach = self.config.window.unwrap_or(0).div_ceil(PAGE);
        let ages = self.tree.by_age();
        for all in [false, true] {
            for &id in &ages {
                if self.pools[1].free() >= wanted {
                    return;
                }
                let depth = self.tree.node(id).depth;
                let kept = self.before_checkpoint(depth) || distance[id as usize] <= reach;
                let Some(page) = self.tree.node(id).window.filter(|_| all || !kept) else {
                    continue;
                };
                if self.pools[1].owners(page) == 1 {
                    self.tree.node_mut(id).window = None;
                    self.pools[1].release(page);
                }
            }
        }
    }

    /// Verifies the ownership invariants of the module by counting from scratch; O(pages).
    pub fn check(&self) -> Result<(), String> {
        self.tree.check()?;
        let mut owners = self.config.pages.map(|n| vec![0u32; n]);
        let mut users: BTreeMap<Id, u32> = BTreeMap::new();
        for holding in self.leases.values().chain(self.pins.values()) {
            holding.path.iter().for_each(|&id| *users.entry(id).or_default() += 1);
            for (group, pages) in holding.pages.iter().enumerate() {
                pages.iter().for_each(|&page| owners[group][page as usize] += 1);
            }
            if let Some(p) = holding.ring.iter().find(|&&p| self.pools[1].owners(p) != 1) {
                return Err(format!("ring page {p} is shared"));
            }
        }
        for (id, node) in self.tree.iter() {
            owners[0][node.full as usize] += 1;
            node.window.into_iter().for_each(|page| owners[1][page as usize] += 1);
            if node.users != users.get(&id).copied().unwrap_or(0) {
                return Err(format!("node {id} counts {} users", node.users));
            }
        }
        for (pool, owners) in self.pools.iter().zip(&owners) {
            pool.check(owners)?;
        }
        Ok(())
    }
}

/// First checkpoint at or after the end of a logical page, in positions.
fn checkpoint_after(logical: usize) -> usize {
    ((logical + 1) * PAGE).next_multiple_of(CHECKPOINT)
}

/// Whether logical page `logical` is the last that was written into its physical page.
fn survives(table: &[u32], logical: usize, written: usize) -> bool {
    let end = written.div_ceil(PAGE).min(table.len());
    table[logical + 1..end.max(logical + 1)].iter().all(|&page| page != table[logical])
}

#[cfg(test)]
mod tests;
