//! Cached pages that are read out, and pages that come from elsewhere: sessions that are saved and
//! loaded. A prefix that is held is not evicted; it is no lease, and counts as none.

use super::prefix::Id;
use super::{Holding, Pages, PAGE};

/// A cached prefix that nobody evicts. Give it back with [`Pages::release`].
#[derive(Debug)]
pub struct Hold {
    id: u64,
    /// Pages of the prefix.
    pub pages: usize,
}

impl Pages {
    /// Holds the longest prefix of `tokens` behind which a request could go on.
    pub fn hold_prefix(&mut self, tokens: &[u32]) -> Hold {
        let path = self.usable_path(tokens);
        let pages = path.len();
        let first: Vec<usize> = self.groups().map(|g| self.first_seen(g, pages * PAGE)).collect();
        let holding = self.hold(path, |group, depth| depth >= first[group]);
        self.held(holding, pages)
    }

    /// Holds nothing yet; [`adopt`](Self::adopt) adds to it.
    pub fn hold_nothing(&mut self) -> Hold {
        let holding = self.hold(Vec::new(), |_, _| false);
        self.held(holding, 0)
    }

    fn held(&mut self, holding: Holding, pages: usize) -> Hold {
        let id = self.new_id();
        self.held.insert(id, holding);
        Hold { id, pages }
    }

    /// Physical page of a held prefix's page, if its group needs it to go on behind the prefix.
    pub fn page_of(&self, hold: &Hold, group: usize, depth: usize) -> Option<u32> {
        let node: Id = *self.held.get(&hold.id)?.path.get(depth)?;
        let wanted = depth >= self.first_seen(group, hold.pages * PAGE);
        self.tree.node(node).pages[group].filter(|_| wanted)
    }

    /// Adds the page of `tokens` behind a held prefix; where the cache has it not, with a page of
    /// each group that `has` some content for it, which the caller writes at once. None where
    /// there is no room.
    pub fn adopt(
        &mut self,
        hold: &mut Hold,
        tokens: &[u32; PAGE],
        has: &[bool],
    ) -> Option<Vec<Option<u32>>> {
        if !self.config.prefix_cache {
            return None;
        }
        let mut holding = self.held.remove(&hold.id)?;
        let parent = holding.path.last().copied();
        let known = self.tree.child(parent, tokens);
        let mut pages = vec![None; self.pools.len()];
        let made = known.is_some() || self.take_for_cache(has, &mut pages);
        if made {
            let id = known.unwrap_or_else(|| {
                self.tree.insert(parent, tokens, pages.clone().into_boxed_slice())
            });
            self.tree.node_mut(id).users += 1;
            holding.path.push(id);
            hold.pages += 1;
        }
        self.held.insert(hold.id, holding);
        made.then_some(pages)
    }

    /// A page of each group that sees everything, and of others as far as there are some: those
    /// can be evicted at once, so what idle slots are sure of stays. None at all where one of the
    /// first lacks.
    fn take_for_cache(&mut self, has: &[bool], pages: &mut [Option<u32>]) -> bool {
        for group in self.groups().filter(|group| has[*group]) {
            match self.window(group) {
                None => self.evict_full(group, 1),
                Some(window) => self.evict_window(group, window, 1),
            }
            pages[group] = self.pools[group].take();
        }
        let whole = self.groups().all(|g| pages[g].is_some() || self.window(g).is_some());
        if !whole {
            for (pool, page) in self.pools.iter_mut().zip(pages.iter_mut()) {
                page.take().into_iter().for_each(|page| pool.release(page));
            }
        }
        whole
    }

    /// Ends a hold: what it held stays in the cache, as used now.
    pub fn release(&mut self, hold: &Hold) {
        if let Some(holding) = self.held.remove(&hold.id) {
            self.tree.touch(&holding.path);
            self.let_go(holding);
        }
    }
}
