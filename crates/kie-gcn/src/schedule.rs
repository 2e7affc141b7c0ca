//! Which wave runs next: the seed draws it, and for how long. A wave that polls in vain is left
//! alone until something was stored; one that sleeps, until its time has come.

use std::time::Duration;

use crate::inst::Code;
use crate::wave::{Next, Wave, World};

/// Instructions of a turn, at most.
const TURN: usize = 1000;
/// The same under a weak memory, where neighbours of each instruction matter.
const TURN_WEAK: usize = 40;
/// Wave instructions of a nanosecond: a small part of a GPU's.
const A_NANOSECOND: u64 = 8;
/// Turns of each wave before all that poll in vain go on for a while whatever they see: what looks
/// like a poll may be a loop that counts.
const PATIENCE: u64 = 64;
/// Instructions of such a turn.
const TURN_PATIENT: usize = 200;

/// A launch that runs.
pub(crate) struct Run<'a> {
    pub(crate) code: &'a Code,
    pub(crate) waves: Vec<Wave>,
    pub(crate) world: World,
    pub(crate) random: u64,
    /// Wave instructions, at most.
    pub(crate) steps_max: u64,
    pub(crate) steps: u64,
    /// Of the nanosecond that has begun.
    pub(crate) spent: u64,
    /// Turns, and how often nobody could run.
    pub(crate) turns: u64,
}

impl Run<'_> {
    fn draw(&mut self, most: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % most
    }

    /// Until all waves have ended.
    ///
    /// # Errors
    /// What went wrong, with block, wave and instruction.
    pub(crate) fn all(&mut self) -> Result<(), String> {
        // Of those that may run: the others are at a barrier or have ended.
        let mut ready: Vec<usize> = (0..self.waves.len()).collect();
        while !ready.is_empty() {
            if self.steps > self.steps_max {
                return Err(format!("no end after {} wave instructions", self.steps_max));
            }
            self.turns += 1;
            if self.turns.is_multiple_of(PATIENCE * self.waves.len() as u64) {
                self.go_on();
            }
            let Some(at) = self.pick(&ready) else {
                self.wait();
                continue;
            };
            let which = ready[at];
            let before = [self.world.changes, self.world.local_changes[self.waves[which].block]];
            match self.turn(which) {
                Next::Fault => return Err(self.told(which)),
                Next::Vain if self.world.weak.is_none() => self.park(which, before),
                state @ (Next::Barrier | Next::End) => {
                    self.waves[which].state = state;
                    ready.swap_remove(at);
                    self.meet(self.waves[which].block, &mut ready)?;
                }
                _ => {}
            }
        }
        self.world.settle();
        Ok(())
    }

    /// One that may run, from a drawn one on.
    fn pick(&mut self, ready: &[usize]) -> Option<usize> {
        let first = self.draw(ready.len());
        let may = |at: &usize| {
            let wave = &self.waves[ready[*at]];
            let local = self.world.local_changes[wave.block];
            let seen = wave.parked.is_none_or(|[global, own]| {
                own != local || wave.poll.global_before && global != self.world.changes
            });
            seen && wave.wakes_ns <= self.world.now_ns
        };
        (first..ready.len()).chain(0..first).find(may)
    }

    /// Until something is stored. What was stored while it looked, it may not have seen.
    fn park(&mut self, which: usize, before: [u64; 2]) {
        self.waves[which].parked = Some(before);
    }

    /// Whoever is left alone gets a turn.
    fn go_on(&mut self) {
        for wave in self.waves.iter_mut().filter(|wave| wave.parked.is_some()) {
            (wave.parked, wave.patient) = (None, true);
        }
    }

    /// Nobody may run: time goes on to where one wakes, and the host gets to its work.
    fn wait(&mut self) {
        let sleeping = |wave: &&Wave| wave.wakes_ns > self.world.now_ns && wave.state == Next::Go;
        let next = self.waves.iter().filter(sleeping).map(|wave| wave.wakes_ns).min();
        if self.world.tick() {
            for _ in 0..8 {
                self.world.tick();
            }
        }
        match next {
            Some(at) => self.world.now_ns = at,
            None => {
                std::thread::sleep(Duration::from_micros(20));
                self.world.now_ns += 1000;
                self.go_on();
            }
        }
    }

    /// Instructions of one wave.
    fn turn(&mut self, which: usize) -> Next {
        let weak = self.world.weak.is_some();
        let patient = std::mem::take(&mut self.waves[which].patient);
        let drawn = 1 + self.draw(if weak { TURN_WEAK } else { TURN });
        let most = if patient { TURN_PATIENT } else { drawn };
        let mut left = most;
        let next = loop {
            if left == 0 {
                break Next::Go;
            }
            left -= 1;
            if weak && self.draw(3) == 0 {
                self.world.tick();
            }
            let wave = &mut self.waves[which];
            let Some(inst) = self.code.insts.get(wave.pc) else {
                break self.world.fail("behind the kernel's end".to_owned());
            };
            if wave.awaits(inst) {
                break self.world.fail("touches a register that it has not waited for".to_owned());
            }
            wave.issued += inst.clocks;
            match (inst.run)(wave, inst, &mut self.world) {
                Next::Go => wave.pc += 1,
                Next::Jump => {}
                Next::Vain if patient => {}
                next @ (Next::Rest | Next::Barrier) => {
                    wave.pc += 1;
                    break next;
                }
                next @ (Next::Vain | Next::Again | Next::End | Next::Fault) => break next,
            }
        };
        self.waves[which].parked = None;
        let done = (most - left) as u64;
        self.steps += done;
        self.spent += done;
        self.world.now_ns += self.spent / A_NANOSECOND;
        self.spent %= A_NANOSECOND;
        if next == Next::Again {
            self.world.tick();
        }
        next
    }

    /// Lets a block's waves go on where all that have not ended are at the barrier.
    fn meet(&mut self, block: usize, ready: &mut Vec<usize>) -> Result<(), String> {
        let of_block = |wave: &&Wave| wave.block == block;
        let here = |state| self.waves.iter().filter(of_block).filter(|w| w.state == state).count();
        let (ended, met) = (here(Next::End), here(Next::Barrier));
        let all = self.waves.iter().filter(of_block).count();
        if met > 0 && ended + met == all {
            for (at, wave) in self.waves.iter_mut().enumerate() {
                if wave.block == block && wave.state == Next::Barrier {
                    wave.state = Next::Go;
                    ready.push(at);
                }
            }
        }
        let stuck = self.waves.iter().filter(|wave| wave.state == Next::Barrier).count();
        if ready.is_empty() && stuck > 0 {
            return Err(format!("{stuck} waves wait at a barrier for waves that have ended"));
        }
        Ok(())
    }

    /// A fault with its place.
    fn told(&self, which: usize) -> String {
        let wave = &self.waves[which];
        let why = self.world.fault.as_deref().unwrap_or("an unknown fault");
        let line = self
            .code
            .texts
            .get(wave.pc)
            .map_or_else(String::new, |(address, text)| format!("{address:x}: {text}: "));
        format!("block {} wave {}: {line}{why}", wave.block, wave.number)
    }
}
