//! Physical pages of one layer group and how many owners each has.
//!
//! Invariant: a page is in `free` exactly when it has no owner.

/// Reference-counted page numbers `0..n`.
#[derive(Debug)]
pub(super) struct Pool {
    owners: Vec<u32>,
    free: Vec<u32>,
}

impl Pool {
    pub(super) fn new(pages: usize) -> Self {
        Self { owners: vec![0; pages], free: (0..pages as u32).rev().collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn owners(&self, page: u32) -> u32 {
        self.owners[page as usize]
    }

    /// A free page, with one owner.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.owners[page as usize] = 1;
        Some(page)
    }

    /// One more owner.
    pub(super) fn share(&mut self, page: u32) {
        debug_assert!(self.owners[page as usize] > 0, "page {page} is free");
        self.owners[page as usize] += 1;
    }

    /// One owner less; the last one frees the page.
    pub(super) fn release(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        *owners = owners.checked_sub(1).expect("every release follows a take or a share");
        if *owners == 0 {
            self.free.push(page);
        }
    }

    /// Compares with the owners counted from outside.
    pub(super) fn check(&self, counted: &[u32]) -> Result<(), String> {
        if self.owners != counted {
            return Err(format!("owners {:?}, counted {counted:?}", self.owners));
        }
        let mut free = self.free.clone();
        free.sort_unstable();
        let unowned: Vec<u32> =
            (0..self.owners.len() as u32).filter(|&p| self.owners(p) == 0).collect();
        if free != unowned {
            return Err(format!("free {free:?}, without owner {unowned:?}"));
        }
        Ok(())
    }
}
