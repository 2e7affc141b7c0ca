//! Which process this is: threads and eventfds do not survive a fork as one would like, so what
//! belongs to a process says so and refuses to work in its children.
//!
//! Invariant: asking is one atomic load, cheap enough for every token.

use crate::primitive::{forks, Forks};

/// The process that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    id: u32,
    forks: Forks,
}

impl Process {
    /// The one that runs now.
    pub fn current() -> Self {
        Self { id: std::process::id(), forks: forks() }
    }

    /// False in a fork of it.
    pub fn is_current(&self) -> bool {
        self.forks == forks()
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use super::Process;
    use crate::primitive::in_fork;

    #[test]
    fn a_fork_is_another_process() {
        let here = Process::current();
        assert!(here.is_current());
        assert!(in_fork(|| {
            let child = Process::current();
            !here.is_current() && child.is_current() && in_fork(|| !child.is_current())
        }));
        assert!(here.is_current());
    }
}
