//! Which sequences the next launch has and for how long, which positions of a prompt go beside
//! them, and when a launch makes room for others. Pure: it knows slots and numbers, and neither
//! devices nor the mailbox.

use std::collections::VecDeque;

use super::drafts::SlotDrafts;
use super::mtp::Predicted;
use crate::abi::{Command, CommandKind, SlotEnd};
use crate::mailbox::SlotMemory;
use crate::mask::Place;
use crate::mono::interleave::{Bounds, Chunk, Pace};

/// Prompt positions of a launch beside decoding sequences that leave no column free, and tokens of
/// a launch where others wait for their turn.
pub(super) const TURN_POSITIONS: usize = 128;
const TURN_TOKENS: u32 = 8;
/// Steps of a launch when nobody else waits.
pub(super) const LONG: u32 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum State {
    #[default]
    Idle,
    /// Prompt positions below `next` are done.
    Prefill,
    /// Feeds `token` at position `next`.
    Decode,
}

/// One sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct Slot {
    pub state: State,
    pub next: usize,
    /// Positions that have pages: a slot that decodes waits there for more.
    pub granted: usize,
    /// The page table is to be written before the next launch.
    pub grown: bool,
    /// What is fed next; none as long as no launch has seen the request, so that its tables are
    /// still to be written.
    pub token: Option<u32>,
    pub generated: usize,
    /// Recurrent states of the row.
    pub recurrent: Recurrent,
    /// Where its request wants drafts of tokens.
    pub drafts: Option<SlotDrafts>,
    /// Where it wants those of the model's own layers.
    pub predicted: Option<Predicted>,
    /// Tokens that the row's ring ever held.
    pub emitted: u32,
    /// Order of arrival.
    since: u64,
    /// The prompt runs in the prefill kernel, to its end.
    pub wide: bool,
    /// The number of the emitted token for which the grammar's mask was handed on.
    pub masked: Option<u32>,
    /// The first token of the masks of which that was one.
    pub masked_from: usize,
    /// Its mask was not there in time: it sits out until it is.
    pub late: bool,
    /// It was late until now, and a launch without it may be under way.
    pub woken: bool,
    pub cancelled: bool,
    /// Why it ended, once its last record is published.
    pub end: Option<SlotEnd>,
}

/// Of a row's two recurrent states, the one that is current, and the position behind which it is:
/// a launch reads it, or a copy in a page, and writes the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Recurrent {
    pub half: u32,
    pub position: usize,
}

impl Recurrent {
    /// What a launch from `position` on is told (`wire::Sequence`).
    pub fn ask(&self, position: usize) -> u32 {
        (1 - self.half) | (u32::from(position != self.position) << 1)
    }

    /// A launch wrote the other state, behind the position before `position`, if it went anywhere
    /// from `from`.
    pub fn advance(&mut self, from: usize, position: usize) {
        if position > from {
            (self.half, self.position) = (1 - self.half, position);
        }
    }
}

impl Slot {
    /// It decodes, its next position has a page, and it is not late.
    fn is_ready(&self) -> bool {
        self.state == State::Decode && self.next < self.granted && !self.late
    }

    /// Where it stands among its masks.
    pub fn place(&self) -> Place {
        let last = self.token.unwrap_or(0);
        Place { made: self.generated, last, begin: self.masked_from }
    }

    /// Its mask for the token that it emits next was handed on, of those that begin there.
    pub fn mask_came(&mut self, begin: usize) {
        (self.masked, self.masked_from) = (Some(self.emitted), begin);
        self.woken |= std::mem::take(&mut self.late);
    }

    /// Its next token was generated: whether the sequence ends with it, by the kernel's own rule.
    pub fn generate(&mut self, token: u32, request: &SlotMemory, max_positions: usize) {
        self.generated += 1;
        self.next += 1;
        self.token = Some(token);
        if let Some(drafts) = &mut self.drafts {
            drafts.text.push(token);
        }
        let params = &request.params;
        if request.stop_ids[..params.stop_ids as usize].contains(&token) {
            self.end = Some(SlotEnd::StopId);
        } else if self.generated == params.max_new as usize || self.next + 1 > max_positions {
            self.end = Some(SlotEnd::Length);
        }
    }
}

/// What a launch is for.
#[derive(Debug)]
pub(super) enum Work {
    /// Positions of one slot's prompt, up to here.
    Prompt(usize, usize),
    /// A chunk through so many layers more.
    Layers(Chunk, u32),
    /// Tokens of these slots.
    Tokens(Vec<usize>),
    /// Tokens of the slots, and positions of another's prompt in the columns that are left.
    Mixed(Vec<usize>, MixedPrompt),
    /// Logits of some positions of a slot.
    Logits(Command),
    /// What follows is predicted, so many tokens of each of these slots.
    Predict(Vec<(usize, usize)>),
}

/// A prompt beside sequences that decode.
#[derive(Debug)]
pub(super) struct MixedPrompt {
    pub slot: usize,
    /// Positions of the launch, and how many of them a step takes.
    pub count: usize,
    pub share: usize,
}

/// What comes next.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    Nothing,
    /// The positions left of a slot's prompt, in the columns that these sequences leave free.
    Mixed {
        decoding: Vec<usize>,
        slot: usize,
        left: usize,
    },
    /// Positions of a slot's prompt, so many of which are left; `beside` others that decode.
    Prompt {
        slot: usize,
        left: usize,
        beside: bool,
    },
    /// So many tokens at most of each of these.
    Tokens {
        slots: Vec<usize>,
        steps: u32,
    },
}

/// All sequences, and what waits.
pub(super) struct Schedule {
    pub slots: Vec<Slot>,
    /// Commands for logits, oldest first.
    pub logits: VecDeque<Command>,
    arrivals: u64,
    /// The last launch was a prompt's.
    prompted: bool,
    /// What is between its layers, of the oldest prompt.
    chunk: Option<Chunk>,
    pub pace: Pace,
    /// Columns of the widest kernel.
    columns: usize,
    /// A launch of a prompt is one step, alone: what predicts further tokens sees its columns.
    pub singly: bool,
}

impl Schedule {
    /// So many idle slots.
    pub fn new(slots: usize, columns: usize, bounds: Bounds) -> Self {
        Self {
            slots: vec![Slot::default(); slots],
            logits: VecDeque::new(),
            arrivals: 0,
            prompted: false,
            chunk: None,
            pace: Pace::new(bounds),
            columns,
            singly: false,
        }
    }

    /// A command has come; of a start's prompt the first `cached` positions are there.
    pub fn command(&mut self, command: Command, cached: usize) {
        let slot = &mut self.slots[command.slot as usize];
        match command.kind {
            CommandKind::Start => {
                self.arrivals += 1;
                *slot = Slot {
                    state: State::Prefill,
                    next: cached,
                    granted: command.a as usize,
                    since: self.arrivals,
                    // Whose mask may be there, of a request that ended before it.
                    emitted: slot.emitted.wrapping_add(1),
                    ..Slot::default()
                };
            }
            CommandKind::Cancel => slot.cancelled = slot.state != State::Idle,
            CommandKind::Grow => {
                (slot.granted, slot.grown) = (command.a as usize, slot.state != State::Idle);
            }
            CommandKind::LogitsPrefill | CommandKind::LogitsDecode => {
                self.logits.push_back(command);
            }
        }
    }

    /// Slots, in their order, for which `is` holds.
    fn those(&self, is: impl Fn(&Slot) -> bool) -> Vec<usize> {
        (0..self.slots.len()).filter(|index| is(&self.slots[*index])).collect()
    }

    /// Slots that were cancelled.
    pub fn cancelled(&self) -> Vec<usize> {
        self.those(|slot| slot.cancelled)
    }

    /// Slots whose page tables have grown since a launch has seen them, once. Of a prompt that no
    /// launch has seen they are written with all else.
    pub fn take_grown(&mut self) -> Vec<usize> {
        let grown = self.those(|slot| slot.grown && slot.token.is_some());
        self.slots.iter_mut().for_each(|slot| slot.grown = false);
        grown
    }

    /// The prompt that has waited longest.
    pub fn oldest_prompt(&self) -> Option<usize> {
        let waiting = self.those(|slot| slot.state == State::Prefill);
        waiting.into_iter().min_by_key(|index| self.slots[*index].since)
    }

    /// Some sequence decodes, whether or not it has pages.
    pub fn any_decodes(&self) -> bool {
        self.slots.iter().any(|slot| slot.state == State::Decode)
    }

    /// What comes next, given the oldest prompt and how many positions are left of it.
    pub fn next(&mut self, oldest: Option<(usize, usize)>) -> Next {
        let decoding = self.those(Slot::is_ready);
        self.slots.iter_mut().for_each(|slot| slot.woken = false);
        match oldest {
            Some((slot, left)) if self.goes_beside(&decoding, slot) => {
                Next::Mixed { decoding, slot, left }
            }
            Some((slot, left)) if decoding.is_empty() || !self.prompted => {
                self.prompted = true;
                Next::Prompt { slot, left, beside: !decoding.is_empty() }
            }
            Some(_) | None if decoding.is_empty() => Next::Nothing,
            waits => {
                self.prompted = false;
                let crowded = decoding.len() > self.columns;
                // Those with the fewest tokens come first, so that all get their turn.
                let mut slots = decoding;
                slots.sort_by_key(|i| (self.slots[*i].generated, *i));
                slots.truncate(self.columns);
                slots.sort_unstable();
                let steps = match waits {
                    Some((slot, _)) if self.slots[slot].wide || self.singly => 1,
                    None if !crowded => LONG,
                    Some(_) | None => TURN_TOKENS,
                };
                Next::Tokens { slots, steps }
            }
        }
    }

    /// Whether a prompt takes the columns that these sequences leave free.
    fn goes_beside(&self, decoding: &[usize], slot: usize) -> bool {
        let free = self.columns.saturating_sub(decoding.len());
        !decoding.is_empty() && free > 0 && !self.slots[slot].wide && !self.singly
    }

    /// Whether a launch should make room: somebody waits, or wants no more of it.
    pub fn should_leave(&self, work: &Work) -> bool {
        let cancelled = |slot: &usize| self.slots[*slot].cancelled;
        match work {
            Work::Tokens(slots) => {
                // It waited for pages or its mask when the launch began, and has some now.
                let woken = |slot: &Slot| slot.grown || slot.woken;
                let resumes = |i: &usize| woken(&self.slots[*i]) && !slots.contains(i);
                !self.logits.is_empty()
                    || self.slots.iter().any(|slot| slot.state == State::Prefill)
                    || self.those(Slot::is_ready).iter().any(resumes)
                    || self.slots.iter().any(|slot| slot.cancelled)
            }
            // Other prompts wait until this one is done.
            Work::Mixed(slots, prompt) => {
                !self.logits.is_empty() || slots.iter().chain([&prompt.slot]).any(cancelled)
            }
            Work::Prompt(slot, _) => cancelled(slot),
            Work::Layers(..) | Work::Logits(..) | Work::Predict(_) => false,
        }
    }

    /// The chunk of a slot's prompt that is between its layers.
    pub fn take_chunk(&mut self, slot: usize) -> Option<Chunk> {
        self.chunk.take().filter(|chunk| chunk.slot == slot)
    }

    /// A chunk went through so many layers more, of `all`.
    pub fn went_on(&mut self, mut chunk: Chunk, layers: u32, all: u32) {
        chunk.done += layers;
        if chunk.done == all {
            let slot = &mut self.slots[chunk.slot];
            slot.next = chunk.first + chunk.count;
            slot.recurrent.advance(chunk.first, slot.next);
        } else {
            self.chunk = Some(chunk);
        }
    }

    /// Why a slot has ended, if it has: it is idle then.
    pub fn take_end(&mut self, index: usize) -> Option<SlotEnd> {
        let slot = &mut self.slots[index];
        let end = slot.end.take().or(slot.cancelled.then_some(SlotEnd::Cancelled))?;
        slot.state = State::Idle;
        slot.cancelled = false;
        self.chunk = self.chunk.take().filter(|chunk| chunk.slot != index);
        Some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn command(kind: CommandKind, slot: u32, a: u32) -> Command {
        Command { kind, slot, a, b: 0 }
    }

    /// So many slots over four columns; those of `decoding` decode and have made so many tokens.
    fn schedule(slots: usize, decoding: &[(usize, usize)]) -> Schedule {
        let mut schedule = Schedule::new(slots, 4, Bounds::default());
        for (index, generated) in decoding {
            schedule.command(command(CommandKind::Start, *index as u32, 100), 0);
            let slot = &mut schedule.slots[*index];
            (slot.state, slot.token, slot.generated) = (State::Decode, Some(1), *generated);
        }
        schedule
    }

    /// A prompt of so many positions comes to a slot; the prefill kernel takes it if it is `wide`.
    fn prompt(schedule: &mut Schedule, slot: usize, left: usize, wide: bool) -> (usize, usize) {
        schedule.command(command(CommandKind::Start, slot as u32, 100), 0);
        schedule.slots[slot].wide = wide;
        (slot, left)
    }

    #[test]
    fn with_nobody_waiting_a_launch_is_long() {
        let mut alone = schedule(8, &[(2, 5)]);
        assert_eq!(alone.next(None), Next::Tokens { slots: vec![2], steps: LONG });
        assert_eq!(schedule(8, &[]).next(None), Next::Nothing);
        let mut without = schedule(8, &[(2, 5)]);
        without.slots[2].granted = 0;
        assert_eq!(without.next(None), Next::Nothing, "no page for its next position");
    }

    #[test]
    fn a_crowd_takes_turns_by_what_each_has() {
        let mut crowd = schedule(8, &[(0, 9), (1, 2), (2, 3), (3, 1), (5, 2)]);
        let first = Next::Tokens { slots: vec![1, 2, 3, 5], steps: TURN_TOKENS };
        assert_eq!(crowd.next(None), first);
        for slot in [1, 2, 3, 5] {
            crowd.slots[slot].generated += 8;
        }
        let Next::Tokens { slots, .. } = crowd.next(None) else { panic!("nothing") };
        assert!(slots.contains(&0) && !slots.contains(&2), "{slots:?}");
    }

    #[test]
    fn a_short_prompt_goes_beside_and_a_wide_one_in_between() {
        let mut some = schedule(8, &[(0, 1), (1, 1)]);
        let oldest = prompt(&mut some, 4, 30, false);
        assert_eq!(
            some.next(Some(oldest)),
            Next::Mixed { decoding: vec![0, 1], slot: 4, left: 30 }
        );
        some.slots[4].wide = true;
        let beside = Next::Prompt { slot: 4, left: 30, beside: true };
        assert_eq!(some.next(Some(oldest)), beside);
        let between = Next::Tokens { slots: vec![0, 1], steps: 1 };
        assert_eq!(some.next(Some(oldest)), between, "a token between two of its launches");
        assert_eq!(some.next(Some(oldest)), beside);

        let mut full = schedule(8, &[(0, 1), (1, 1), (2, 1), (3, 1)]);
        let oldest = prompt(&mut full, 6, 30, false);
        assert_eq!(full.next(Some(oldest)), Next::Prompt { slot: 6, left: 30, beside: true });
        let turn = Next::Tokens { slots: vec![0, 1, 2, 3], steps: TURN_TOKENS };
        assert_eq!(full.next(Some(oldest)), turn, "no column is free");

        let mut none = schedule(8, &[]);
        let oldest = prompt(&mut none, 6, 30, false);
        for _ in 0..2 {
            let alone = Next::Prompt { slot: 6, left: 30, beside: false };
            assert_eq!(none.next(Some(oldest)), alone);
        }
    }

    #[test]
    fn prompts_come_in_their_order_of_arrival() {
        let mut two = schedule(8, &[]);
        prompt(&mut two, 5, 9, false);
        prompt(&mut two, 1, 9, false);
        assert_eq!(two.oldest_prompt(), Some(5));
        two.command(command(CommandKind::Cancel, 5, 0), 0);
        assert_eq!((two.cancelled(), two.take_end(5)), (vec![5], Some(SlotEnd::Cancelled)));
        assert_eq!((two.oldest_prompt(), two.take_end(5)), (Some(1), None));
    }

    #[test]
    fn a_launch_makes_room_for_who_waits() {
        let tokens = |slots: &[usize]| Work::Tokens(slots.to_vec());
        let mut some = schedule(8, &[(0, 1), (1, 1)]);
        assert!(!some.should_leave(&tokens(&[0, 1])));
        some.command(command(CommandKind::Cancel, 3, 0), 0);
        assert!(!some.should_leave(&tokens(&[0, 1])), "of an idle slot");
        some.command(command(CommandKind::Grow, 1, 200), 0);
        assert!(!some.should_leave(&tokens(&[0, 1])), "it is in the launch");
        assert!(some.should_leave(&tokens(&[0])), "it waited for pages");
        assert_eq!((some.take_grown(), some.take_grown()), (vec![1], vec![]));

        let mut logits = schedule(8, &[(0, 1)]);
        logits.command(command(CommandKind::LogitsDecode, 2, 0), 0);
        assert!(logits.should_leave(&tokens(&[0])));
        let mut started = schedule(8, &[(0, 1)]);
        prompt(&mut started, 2, 9, false);
        assert!(started.should_leave(&tokens(&[0])));
        let beside = |slot| MixedPrompt { slot, count: 9, share: 3 };
        assert!(!started.should_leave(&Work::Mixed(vec![0], beside(3))), "prompts wait");
        started.command(command(CommandKind::Cancel, 2, 0), 0);
        assert!(started.should_leave(&Work::Mixed(vec![0], beside(2))));
        assert!(started.should_leave(&Work::Prompt(2, 9)));
    }

    #[test]
    fn who_is_late_sits_out_until_its_mask_has_come() {
        let tokens = |slots: &[usize]| Work::Tokens(slots.to_vec());
        let mut some = schedule(8, &[(0, 1), (1, 1)]);
        some.slots[1].late = true;
        assert_eq!(some.next(None), Next::Tokens { slots: vec![0], steps: LONG });
        assert!(!some.should_leave(&tokens(&[0])));
        some.slots[1].mask_came(0);
        assert!(some.should_leave(&tokens(&[0])), "it waited for its mask");
        assert_eq!(some.next(None), Next::Tokens { slots: vec![0, 1], steps: LONG });
        assert!(!some.should_leave(&tokens(&[0, 1])));
        assert_eq!(some.slots[1].masked, Some(some.slots[1].emitted));
        // The row's words may be those of a mask that nobody took.
        let before = some.slots[1].emitted;
        some.command(command(CommandKind::Start, 1, 100), 0);
        assert_eq!((some.slots[1].emitted, some.slots[1].masked), (before + 1, None));
        let mut late = schedule(8, &[(0, 1), (1, 1)]);
        late.slots[1].late = true;
        late.command(command(CommandKind::Cancel, 1, 0), 0);
        assert!(late.should_leave(&tokens(&[0])), "nothing else tells its caller");
    }

    #[test]
    fn a_chunk_goes_on_where_it_was() {
        let mut one = schedule(8, &[]);
        prompt(&mut one, 3, 64, true);
        let chunk = Chunk { slot: 3, first: 0, count: 64, done: 0, whole: false };
        one.went_on(chunk, 2, 8);
        assert_eq!(one.take_chunk(3), Some(Chunk { done: 2, ..chunk }));
        one.went_on(Chunk { done: 2, ..chunk }, 6, 8);
        assert_eq!((one.take_chunk(3), one.slots[3].next), (None, 64));
        one.went_on(chunk, 2, 8);
        one.command(command(CommandKind::Cancel, 3, 0), 0);
        assert_eq!(one.take_end(3), Some(SlotEnd::Cancelled));
        assert_eq!(one.take_chunk(3), None, "nothing of it goes on");
    }
}
