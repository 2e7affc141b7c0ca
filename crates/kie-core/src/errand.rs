//! What the engine thread does between turns for callers that run no request: pages of a prefix
//! are copied out of the cache, or into it. A few megabytes at a time, so that requests go on
//! meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;

use kie_kernels::device::Running;

use crate::error::Result;
use crate::memory::copies::Hold;
use crate::memory::{Pages, PAGE};

/// Bytes that are copied between two turns, about.
const BITE_BYTES: usize = 4 << 20;

/// Something to do, and who waits for it.
pub(crate) struct Errand {
    /// Ids whose pages are copied.
    pub(crate) tokens: Vec<u32>,
    pub(crate) task: Task,
    /// The caller waits no more.
    pub(crate) given_up: Arc<AtomicBool>,
    /// The prefix that is being copied.
    pub(crate) hold: Option<Hold>,
}

pub(crate) enum Task {
    /// Pages of the longest prefix of the ids that is cached.
    Save { copied: Vec<Copied>, out: Sender<Result<Vec<Copied>>> },
    /// Pages, by depth, then by group, for the cache.
    Load { pages: Arc<dyn Stored>, out: Sender<Result<usize>> },
}

/// A page's place and content.
pub(crate) struct Copied {
    pub(crate) depth: usize,
    pub(crate) group: usize,
    pub(crate) bytes: Vec<u8>,
}

/// Pages that lie somewhere else.
pub(crate) trait Stored: Send + Sync {
    /// Pages of the prefix.
    fn pages(&self) -> usize;

    /// What a page of a group holds, if it is there.
    fn bytes(&self, depth: usize, group: usize) -> Option<&[u8]>;
}

impl Errand {
    /// One bite; true when there is nothing left to do and the caller was told.
    pub(crate) fn step(&mut self, pages: &mut Pages, device: &mut dyn Running) -> bool {
        let tokens = &self.tokens;
        let hold = self.hold.get_or_insert_with(|| match &self.task {
            Task::Save { .. } => pages.hold_prefix(tokens),
            Task::Load { .. } => pages.hold_nothing(),
        });
        let gone = self.given_up.load(Ordering::Acquire);
        let done = match &mut self.task {
            Task::Save { copied, .. } => gone || save(copied, hold, pages, device),
            Task::Load { pages: stored, .. } => {
                gone || load(&**stored, tokens, hold, pages, device)
            }
        };
        if done {
            pages.release(hold);
            // A caller that is gone hears nothing.
            match &mut self.task {
                Task::Save { copied, out } => drop(out.send(Ok(std::mem::take(copied)))),
                Task::Load { out, .. } => drop(out.send(Ok(hold.pages * PAGE))),
            }
        }
        done
    }
}

/// Copies further pages out; true when all are there.
fn save(copied: &mut Vec<Copied>, hold: &Hold, pages: &Pages, device: &mut dyn Running) -> bool {
    let mut left = BITE_BYTES;
    let first = copied.last().map_or(0, |last| last.depth + 1);
    for depth in first..hold.pages {
        if left == 0 {
            return false;
        }
        for group in 0..pages.group_count() {
            let Some(page) = pages.page_of(hold, group, depth) else { continue };
            let Some(bytes) = device.page(group, page) else {
                // A device that keeps its pages to itself: the ids alone are saved.
                copied.clear();
                return true;
            };
            left = left.saturating_sub(bytes.len());
            copied.push(Copied { depth, group, bytes: bytes.to_vec() });
        }
    }
    true
}

/// Copies further pages in; true when all are there, or no more find room.
fn load(
    stored: &dyn Stored,
    tokens: &[u32],
    hold: &mut Hold,
    pages: &mut Pages,
    device: &mut dyn Running,
) -> bool {
    let mut left = BITE_BYTES;
    let groups = pages.group_count();
    while let Some(page) = tokens.as_chunks::<PAGE>().0.get(hold.pages) {
        let depth = hold.pages;
        if depth == stored.pages() {
            return true;
        }
        if left == 0 {
            return false;
        }
        let has: Vec<bool> =
            (0..groups).map(|group| stored.bytes(depth, group).is_some()).collect();
        // Before a page is promised: its bytes must have a place to go.
        if device.page(0, 0).is_none() {
            return true;
        }
        let Some(places) = pages.adopt(hold, page, &has) else { return true };
        for (group, place) in places.into_iter().enumerate() {
            let (Some(place), Some(bytes)) = (place, stored.bytes(depth, group)) else { continue };
            if let Some(to) = device.page(group, place) {
                to.copy_from_slice(bytes);
                left = left.saturating_sub(bytes.len());
            }
        }
    }
    true
}
