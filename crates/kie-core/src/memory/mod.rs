//! KV pages and the prefix cache: who owns which page. Bookkeeping only, no tensor data.
//!
//! A request gets pages for its prompt and for some positions more at admission, and further ones
//! as it grows ([`Pages::grow`]); nothing here is called per token. What all running requests may
//! grow to is at most [`OVERCOMMIT`] times what there is.
//! There is a pool a page group of the program. In a group that sees everything each logical page
//! of a request has a physical page of its own; the first group always does. A windowed group sees
//! the last W positions: with room to spare its pages are distinct too; otherwise a request runs on
//! a ring (logical pages j and j + R share a physical one), with distinct pages only where a
//! checkpoint (every 1,024 positions) will want the window in front of it.
//!
//! Invariants:
//! - a page's owner count is the number of leases, held prefixes and tree nodes that hold it;
//! - a page in a ring has one owner, the lease that writes it; a shared page is never written;
//! - a cached prefix of p tokens is used only with all its full pages and, of each windowed group,
//!   the pages that hold `[p - W + 1, p)`;
//! - what is free or can be evicted in a windowed pool covers one ring for every idle slot, so
//!   long as the pool holds `slots` rings: admission then fails for want of full pages only;
//! - where bits matter ([`PagesConfig::exact`]) the tree has only pages that prefill made, and a
//!   request continues only where a cold run would have begun anew.
//! - the same calls in the same order give the same pages.

pub mod copies;
mod pool;
mod prefix;

use pool::Pool;
use prefix::{Id, Tree};
use std::collections::{BTreeMap, BTreeSet};

use kie_kernels::abi::PageGroup;
use kie_kernels::device::ExactReuse;

pub use kie_kernels::abi::PAGE;

/// Entry of a page table that is never read: a page behind the window.
pub const DEAD: u32 = u32::MAX;

/// Positions between checkpoints of windowed groups.
pub const CHECKPOINT: usize = 1024;

/// The same of recurrent states, which need one page each.
pub const COPY: usize = 256;

/// What running requests may grow to, in times of the pages that there are.
pub const OVERCOMMIT: usize = 2;

/// The pool of one page group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupConfig {
    /// Pages of the pool.
    pub pages: usize,
    /// Most positions that a layer looks back, the own included; `None`: all. Only then are the
    /// pages of a sequence ever given up while it runs.
    pub window: Option<usize>,
    /// Bytes of a page; 0 where it only counts positions.
    pub page_bytes: u64,
    /// Pages hold copies of a recurrent state, which its runner keeps and never reads from pages
    /// but where a request continues.
    pub recurrent: bool,
}

impl GroupConfig {
    /// The pool of a program's group.
    pub fn of(group: &PageGroup) -> Self {
        Self {
            pages: group.pages as usize,
            window: group.window.map(|window| window as usize),
            page_bytes: group.page_bytes(),
            recurrent: group.is_recurrent(),
        }
    }
}

/// What the pools are made of.
#[derive(Debug, Clone)]
pub struct PagesConfig {
    /// One a page group; the first is not windowed.
    pub groups: Vec<GroupConfig>,
    /// Requests that may hold a lease at once.
    pub slots: usize,
    /// Most positions computed in one pass.
    pub chunk: usize,
    /// Whether requests share pages.
    pub prefix_cache: bool,
    /// Pages are shared only where a prompt goes on behind them with the bits that it would have
    /// without them; `None`: wherever their tokens are the same.
    pub exact: Option<ExactReuse>,
}

impl PagesConfig {
    /// Pages of a windowed group that one slot can always run on; 0 where the group is not.
    pub fn ring(&self, group: usize) -> usize {
        let group = &self.groups[group];
        ring_pages(group.window, group.recurrent, self.chunk)
    }
}

/// Window pages that a slot cannot do without: its window, a chunk in flight, the edges; or one to
/// write copies to that nobody keeps. The planner sizes the pool by it and [`Pages`] guarantees it,
/// so there is one formula.
fn ring_pages(window: Option<usize>, recurrent: bool, chunk: usize) -> usize {
    match window {
        Some(_) if recurrent => 1,
        Some(window) => window.saturating_add(chunk).div_ceil(PAGE) + 1,
        None => 0,
    }
}

/// The same of a program's group.
pub(crate) fn ring_of(group: &PageGroup, chunk: usize) -> usize {
    ring_pages(group.window.map(|window| window as usize), group.is_recurrent(), chunk)
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
    /// Per group: physical page of each logical page, [`DEAD`] where it is never read. Those of a
    /// windowed group are all there; the others grow.
    pub tables: Vec<Vec<u32>>,
    /// Pages that it may grow to.
    most: usize,
}

impl Lease {
    /// Positions that have pages in all groups.
    pub fn positions(&self) -> usize {
        self.tables[0].len() * PAGE
    }
}

/// Figures for `metrics()`; lists are per group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PagesStats {
    /// Pages without an owner.
    pub free: Vec<usize>,
    /// Pages held by leases.
    pub used: Vec<usize>,
    /// Pages held by the cache alone; evicted when room is wanted.
    pub cached: Vec<usize>,
    /// Requests that found a prefix.
    pub hits: u64,
    /// Requests admitted.
    pub admitted: u64,
    /// Tokens that were not computed again.
    pub tokens_reused: u64,
}

/// What a lease holds.
#[derive(Debug, Default)]
struct Holding {
    path: Vec<Id>,
    /// Pages that a lease may grow to.
    most: usize,
    /// Pages held, each once, per group.
    pages: Vec<Vec<u32>>,
    /// Pages that are written more than once, per group.
    rings: Vec<BTreeSet<u32>>,
}

/// The pools of all groups, the tree, and who holds what.
#[derive(Debug)]
pub struct Pages {
    config: PagesConfig,
    pools: Vec<Pool>,
    tree: Tree,
    leases: BTreeMap<u64, Holding>,
    /// Prefixes that are copied.
    held: BTreeMap<u64, Holding>,
    next_id: u64,
    stats: PagesStats,
}

impl Pages {
    /// All pages free.
    pub fn new(config: PagesConfig) -> Self {
        Self {
            pools: config.groups.iter().map(|group| Pool::new(group.pages)).collect(),
            config,
            tree: Tree::default(),
            leases: BTreeMap::new(),
            held: BTreeMap::new(),
            next_id: 0,
            stats: PagesStats::default(),
        }
    }

    /// Bytes of a page of a group.
    pub fn page_bytes(&self, group: usize) -> u64 {
        self.config.groups[group].page_bytes
    }

    /// Tokens that a request with these prompt tokens would find cached (a multiple of 64, less
    /// than the prompt: one token is left to compute).
    pub fn how_far(&self, tokens: &[u32]) -> usize {
        self.usable_path(&tokens[..tokens.len().saturating_sub(1)]).len() * PAGE
    }

    /// Pages for the first `now` positions of a request of these prompt tokens, which may grow to
    /// `most` positions.
    pub fn admit(&mut self, tokens: &[u32], now: usize, most: usize) -> Result<Lease, NoRoom> {
        let path = self.usable_path(&tokens[..tokens.len().saturating_sub(1)]);
        let most = most.max(tokens.len());
        let need = (now.clamp(tokens.len(), most).div_ceil(PAGE), most.div_ceil(PAGE));
        self.check_promises(need.1)?;
        // Holding a prefix can be what leaves too little; without it there may be room.
        let mut admitted = self.admit_on(path, need);
        if admitted.as_ref().is_err_and(|room| self.window(room.group).is_some()) {
            admitted = self.admit_on(Vec::new(), need);
        }
        let lease = admitted?;
        self.stats.admitted += 1;
        self.stats.hits += u64::from(lease.cached > 0);
        self.stats.tokens_reused += lease.cached as u64;
        Ok(lease)
    }

    /// Whether one more request may grow to `most` pages: more than there are is nothing that
    /// waiting helps, more than is promised already something that it does.
    fn check_promises(&self, most: usize) -> Result<(), NoRoom> {
        let promised: usize = self.leases.values().map(|holding| holding.most).sum();
        for group in self.groups().filter(|group| self.window(*group).is_none()) {
            let total = self.pools[group].len();
            let left = (OVERCOMMIT * total).saturating_sub(promised);
            let available = if most > total { self.available(group) } else { left };
            if most > total || (promised > 0 && most > left) {
                return Err(NoRoom { group, wanted: most, available, total });
            }
        }
        Ok(())
    }

    fn admit_on(&mut self, path: Vec<Id>, (now, most): (usize, usize)) -> Result<Lease, NoRoom> {
        let cached = path.len();
        let first_seen: Vec<usize> =
            self.groups().map(|group| self.first_seen(group, cached * PAGE)).collect();
        let mut holding = self.hold(path, |group, depth| depth >= first_seen[group]);
        holding.most = most;
        let mut tables = vec![Vec::new(); self.pools.len()];
        let room = self.plan_room(now - cached, most - cached);
        let taken = room.and_then(|room| {
            for (group, table) in tables.iter_mut().enumerate() {
                // Growing allocates nothing.
                table.reserve_exact(most);
                table.resize(first_seen[group], DEAD);
                table.extend(&holding.pages[group]);
                if self.window(group).is_some() {
                    self.take_window(group, cached..most, room[group], &mut holding, table)?;
                } else {
                    holding.pages[group].reserve_exact(most - cached);
                    self.take(group, now - cached, &mut holding)?;
                    table.extend(&holding.pages[group][cached..]);
                }
            }
            Ok(())
        });
        if let Err(no_room) = taken {
            self.let_go(holding);
            return Err(no_room);
        }
        let id = self.new_id();
        self.leases.insert(id, holding);
        Ok(Lease { id, cached: cached * PAGE, tables, most })
    }

    /// The least of a count over the pools of whole sequences.
    fn fewest(&self, count: impl Fn(&Pool) -> usize) -> usize {
        let whole = self.groups().filter(|group| self.window(*group).is_none());
        whole.map(|group| count(&self.pools[group])).min().unwrap_or(0)
    }

    /// Positions that a request has pages for before it gets there, whatever that evicts: a quarter
    /// of a slot's share of the smallest pool, 512 at most.
    pub fn ahead(&self) -> usize {
        let pages = self.fewest(Pool::len);
        (pages / (4 * self.config.slots.max(1))).clamp(1, 8) * PAGE
    }

    /// Positions for which there are pages that hold nothing: an idle slot's share of them, or all
    /// where no slot is idle. Where a request has them at once a device works longer by itself.
    pub fn share(&self) -> usize {
        self.fewest(Pool::free) / self.config.slots.saturating_sub(self.leases.len()).max(1) * PAGE
    }

    /// Further pages for a lease, so that it has `to` positions, or as many as can be had. True if
    /// there were any.
    pub fn grow(&mut self, lease: &mut Lease, to: usize) -> bool {
        let had = lease.tables[0].len();
        let wanted = to.div_ceil(PAGE).min(lease.most).saturating_sub(had);
        let whole = |pages: &Self, group: &usize| pages.window(*group).is_none();
        let groups = self.groups().filter(|group| whole(self, group));
        // What is free is counted at once, what could be evicted is not.
        let has = |group: usize| match self.pools[group].free() {
            free if free >= wanted => wanted,
            _ => self.available(group),
        };
        let more = groups.map(has).min().unwrap_or(0).min(wanted);
        let Some(holding) = self.leases.get_mut(&lease.id).filter(|_| more > 0) else {
            return false;
        };
        let mut holding = std::mem::take(holding);
        for group in 0..self.pools.len() {
            if whole(self, &group) && self.take(group, more, &mut holding).is_ok() {
                let from = holding.pages[group].len() - more;
                lease.tables[group].extend(&holding.pages[group][from..]);
            }
        }
        self.leases.insert(lease.id, holding);
        true
    }

    /// Whether `now` more logical pages, and `most` in a windowed group, can be had in all groups;
    /// returns the pages of each that may be taken beyond a ring without touching what the idle
    /// slots are sure of.
    fn plan_room(&self, now: usize, most: usize) -> Result<Vec<usize>, NoRoom> {
        let idle_others = self.config.slots.saturating_sub(self.leases.len() + 1);
        let room = |group: usize| {
            let ring = self.config.ring(group);
            let wanted = if self.window(group).is_some() { most.min(ring) } else { now };
            let available = self.available(group).saturating_sub(idle_others * ring);
            let total = self.pools[group].len();
            let none = NoRoom { group, wanted, available, total };
            available.checked_sub(wanted).ok_or(none)
        };
        self.groups().map(room).collect()
    }

    /// Pages of a windowed group for the logical pages `span`, appended to `table`.
    fn take_window(
        &mut self,
        group: usize,
        span: std::ops::Range<usize>,
        mut room: usize,
        holding: &mut Holding,
        table: &mut Vec<u32>,
    ) -> Result<(), NoRoom> {
        let ring = self.config.ring(group);
        let before = holding.pages[group].len();
        if span.len() <= ring + room {
            self.take(group, span.len(), holding)?;
            table.extend(&holding.pages[group][before..]);
            return Ok(());
        }
        self.take(group, ring, holding)?;
        let pages: Vec<u32> = holding.pages[group][before..].to_vec();
        holding.rings[group].extend(&pages);
        let end = span.end;
        for logical in span {
            let reached = self.checkpoint_after(group, logical) <= end * PAGE;
            if room > 0 && reached && self.before_checkpoint(group, logical) {
                room -= 1;
                self.take(group, 1, holding)?;
                table.extend(holding.pages[group].last());
            } else {
                table.push(pages[logical % ring]);
            }
        }
        Ok(())
    }

    /// How many of a request's `valid` tokens, the prompt's first, may be put into the tree: where
    /// bits matter, no more than prefill has made as it would for any prompt that begins so.
    pub fn reusable(&self, prompt: usize, valid: usize) -> usize {
        let Some(ExactReuse { every, last }) = self.config.exact else { return valid };
        let alike = if last { prompt } else { prompt.saturating_sub(1) };
        valid.min(alike / every as usize * every as usize)
    }

    /// Puts the complete pages of `tokens` (all tokens whose keys and values are valid, the
    /// prompt first) into the tree, so that other requests find them. Call it after prefill.
    pub fn commit(&mut self, lease: &Lease, tokens: &[u32]) {
        self.publish(lease, tokens, None);
    }

    /// Ends a request: commits `tokens` and gives its pages back. `written` is the number of
    /// positions that were computed at most; more than `tokens` where the end is rolled back.
    pub fn retire(&mut self, lease: &Lease, tokens: &[u32], written: usize) {
        self.publish(lease, tokens, Some(written.max(tokens.len())));
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
            let id = self
                .tree
                .child(parent, page)
                .unwrap_or_else(|| self.insert(parent, page, lease, logical));
            match holding.path.get(logical) {
                Some(&held) if held != id => break, // not the tokens it was admitted with
                Some(_) => {}
                None => {
                    self.tree.node_mut(id).users += 1;
                    holding.path.push(id);
                }
            }
            for group in 0..self.pools.len() {
                let (table, ring) = (&lease.tables[group], &holding.rings[group]);
                let own = table.get(logical).copied().filter(|&own| own != DEAD);
                // A pass that was given up may have copied to a ring what nobody computed.
                let copies = self.config.groups[group].recurrent;
                let valid = |own: &u32| {
                    let kept = |written| !copies && survives(table, logical, written);
                    !ring.contains(own) || written.is_some_and(kept)
                };
                let vacant = self.tree.node(id).pages[group].is_none();
                if let Some(own) = own.filter(|own| vacant && valid(own)) {
                    self.tree.node_mut(id).pages[group] = Some(own);
                    self.pools[group].share(own);
                }
            }
            parent = Some(id);
        }
        self.tree.touch(&holding.path);
        self.leases.insert(lease.id, holding);
    }

    /// A node with the lease's pages of the groups that see everything.
    fn insert(
        &mut self,
        parent: Option<Id>,
        tokens: &[u32; PAGE],
        lease: &Lease,
        logical: usize,
    ) -> Id {
        let mut pages = vec![None; self.pools.len()];
        for (group, page) in pages.iter_mut().enumerate() {
            if self.config.groups[group].window.is_none() {
                let own = lease.tables[group][logical];
                self.pools[group].share(own);
                *page = Some(own);
            }
        }
        self.tree.insert(parent, tokens, pages.into())
    }

    /// Empties the cache of all that no lease holds.
    pub fn clear(&mut self) {
        self.evict_full(0, self.pools[0].len() + 1);
    }

    /// Figures of this moment.
    pub fn stats(&self) -> PagesStats {
        let free: Vec<usize> = self.pools.iter().map(Pool::free).collect();
        let cached: Vec<usize> = self.groups().map(|group| self.evictable(group)).collect();
        let used = |(pool, (free, cached)): (&Pool, (&usize, &usize))| pool.len() - free - cached;
        let used = self.pools.iter().zip(free.iter().zip(&cached)).map(used).collect();
        PagesStats { free, used, cached, ..self.stats.clone() }
    }

    /// Page groups.
    pub fn group_count(&self) -> usize {
        self.pools.len()
    }

    fn groups(&self) -> std::ops::Range<usize> {
        0..self.pools.len()
    }

    fn window(&self, group: usize) -> Option<usize> {
        self.config.groups[group].window
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// First logical page that a group's layers need to continue at position `p`.
    fn first_seen(&self, group: usize, p: usize) -> usize {
        self.window(group).map_or(0, |w| (p + 1).saturating_sub(w) / PAGE)
    }

    /// Whether the logical page belongs to a windowed group's window in front of a checkpoint.
    fn before_checkpoint(&self, group: usize, logical: usize) -> bool {
        logical >= self.first_seen(group, self.checkpoint_after(group, logical))
    }

    /// First checkpoint at or after the end of a logical page, in positions.
    fn checkpoint_after(&self, group: usize, logical: usize) -> usize {
        let every = if self.config.groups[group].recurrent { COPY } else { CHECKPOINT };
        ((logical + 1) * PAGE).next_multiple_of(every)
    }

    /// The longest cached path along `tokens` from whose end a request can continue.
    fn usable_path(&self, tokens: &[u32]) -> Vec<Id> {
        let mut path = self.tree.path(tokens);
        let every = self.config.exact.map_or(1, |exact| exact.every as usize / PAGE);
        let mut usable = 0;
        // Pages in a row, up to here, of each group.
        let mut runs = vec![0; self.pools.len()];
        for (depth, &id) in path.iter().enumerate() {
            for (run, page) in runs.iter_mut().zip(&self.tree.node(id).pages) {
                *run = if page.is_some() { *run + 1 } else { 0 };
            }
            let end = depth + 1;
            let whole = |group: usize| end - runs[group] <= self.first_seen(group, end * PAGE);
            if end.is_multiple_of(every) && self.groups().all(whole) {
                usable = end;
            }
        }
        path.truncate(usable);
        path
    }

    /// Becomes an owner of those pages of a path that `wanted` names by group and depth.
    fn hold(&mut self, path: Vec<Id>, wanted: impl Fn(usize, usize) -> bool) -> Holding {
        let mut pages = vec![Vec::new(); self.pools.len()];
        for (depth, &id) in path.iter().enumerate() {
            let node = self.tree.node_mut(id);
            node.users += 1;
            for (group, pages) in pages.iter_mut().enumerate() {
                pages.extend(node.pages[group].filter(|_| wanted(group, depth)));
            }
        }
        for (pool, pages) in self.pools.iter_mut().zip(&pages) {
            pages.iter().for_each(|&page| pool.share(page));
        }
        self.tree.touch(&path);
        Holding { path, most: 0, rings: vec![BTreeSet::new(); pages.len()], pages }
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
        match self.window(group) {
            None => self.evict_full(group, n),
            Some(window) => self.evict_window(group, window, n),
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
        let windowed = self.window(group).is_some();
        let page = |n: &prefix::Node| n.pages[group].filter(|_| windowed || n.users == 0);
        let alone = |p: &u32| self.pools[group].owners(*p) == 1;
        self.tree.iter().filter_map(|(_, n)| page(n)).filter(alone).count()
    }

    /// Removes unused nodes, oldest first, until `wanted` pages of a group that sees everything are
    /// free.
    fn evict_full(&mut self, group: usize, wanted: usize) {
        if self.pools[group].free() >= wanted {
            return;
        }
        for id in self.tree.by_age() {
            if self.pools[group].free() >= wanted {
                return;
            }
            if self.tree.node(id).users == 0 {
                let node = self.tree.remove(id);
                for (pool, page) in self.pools.iter_mut().zip(&node.pages) {
                    page.iter().for_each(|&page| pool.release(page));
                }
            }
        }
    }

    /// Drops the tree's pages of a windowed group, oldest first, until `wanted` are free: first
    /// those away from checkpoints and more than a window before the end of any path, then all.
    fn evict_window(&mut self, group: usize, window: usize, wanted: usize) {
        if self.pools[group].free() >= wanted {
            return;
        }
        let distance = self.tree.distance_to_end();
        let reach = window.div_ceil(PAGE);
        let ages = self.tree.by_age();
        for all in [false, true] {
            for &id in &ages {
                if self.pools[group].free() >= wanted {
                    return;
                }
                let depth = self.tree.node(id).depth;
                let kept = self.before_checkpoint(group, depth) || distance[id as usize] <= reach;
                let page = self.tree.node(id).pages[group].filter(|_| all || !kept);
                let Some(page) = page else { continue };
                if self.pools[group].owners(page) == 1 {
                    self.tree.node_mut(id).pages[group] = None;
                    self.pools[group].release(page);
                }
            }
        }
    }

    /// Verifies the ownership invariants of the module by counting from scratch; O(pages).
    pub fn check(&self) -> Result<(), String> {
        self.tree.check()?;
        let mut owners: Vec<Vec<u32>> = self.pools.iter().map(|p| vec![0; p.len()]).collect();
        let mut users: BTreeMap<Id, u32> = BTreeMap::new();
        for holding in self.leases.values().chain(self.held.values()) {
            holding.path.iter().for_each(|&id| *users.entry(id).or_default() += 1);
            for (group, pages) in holding.pages.iter().enumerate() {
                pages.iter().for_each(|&page| owners[group][page as usize] += 1);
            }
            for (pool, ring) in self.pools.iter().zip(&holding.rings) {
                if let Some(p) = ring.iter().find(|&&p| pool.owners(p) != 1) {
                    return Err(format!("ring page {p} is shared"));
                }
            }
        }
        for (id, node) in self.tree.iter() {
            for (owners, page) in owners.iter_mut().zip(&node.pages) {
                page.iter().for_each(|&page| owners[page as usize] += 1);
            }
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

/// Whether logical page `logical` is the last that was written into its physical page.
fn survives(table: &[u32], logical: usize, written: usize) -> bool {
    let end = written.div_ceil(PAGE).min(table.len());
    table[logical + 1..end.max(logical + 1)].iter().all(|&page| page != table[logical])
}

#[cfg(test)]
mod tests;
