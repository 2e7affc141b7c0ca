//! A program at work on a machine. `schedule` says which sequences the next launch has, `launches`
//! starts it on every rank, `delivery` carries its tokens to the mailbox, `hang` tells of one that
//! does not end; here they meet.
//!
//! A launch holds the whole decode loop of the sequences it was made for: it ends when one of them
//! ends, or when the host asks because something else waits (a new request, a cancel). Prompts run
//! in launches of the prefill kernel where there is one: beside sequences at work some layers at a
//! time, with a token between. Elsewhere, and where they are short, they are columns of the decode
//! kernel: beside sequences those that they leave free. So what a column is for never changes while
//! a launch runs, pages and tables are written only between launches, and the host only reads
//! tokens as they come, and writes what grammars allow behind them.
//!
//! A sequence whose mask is not there when its token is to be chosen tells so in place of a token,
//! which ends the launch as an end does. It sits out until the mask has come, then computes the
//! same position again. Drafts that come with masks end a launch, too: the next one is a step that
//! checks them.

mod delivery;
mod drafts;
mod hang;
mod launches;
mod mtp;
mod predictor;
mod schedule;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::delivery::Delivery;
use self::drafts::{Drafts, SlotDrafts};
use self::hang::Watch;
use self::launches::{sequence, Ask, Launches, Started};
use self::mtp::{Predicted, Residual, Seen, Unseen};
use self::predictor::Predictor;
use self::schedule::{MixedPrompt, Next, Schedule, State, Work, LONG, TURN_POSITIONS};
use crate::abi::{Command, CommandKind, SlotEnd, PAGE};
use crate::device::{Gone, Phase, Running};
use crate::error::{Error, Result};
use crate::lookup::DRAFT_MAX;
use crate::machine::{Flight, Platform};
use crate::mailbox::Mailbox;
use crate::meter::{Meter, Mode};
use crate::mono::interleave::{Bounds, Chunk};
use crate::mono::loaded::Loaded;
use crate::mono::prefill::{self, Prefill};
use crate::mono::wire::{self, Drafted, Drafting, Order, Sequence};

/// A launch under way.
struct InFlight {
    flights: Vec<Box<dyn Flight>>,
    work: Work,
    steps: u32,
    columns: u32,
    /// How it is measured, if it is.
    mode: Option<Mode>,
    since: Instant,
    /// Slots whose recurrent states go on, and from which positions.
    from: Vec<(usize, usize)>,
    /// It makes drafts.
    drafts: bool,
    /// The end of a prompt stands before the tokens.
    behind_prompt: bool,
    /// Asked to leave.
    leaving: bool,
    watch: Watch,
}

impl InFlight {
    fn new((flights, mode): Started, work: Work, steps: u32) -> Self {
        let (since, watch) = (Instant::now(), Watch::new());
        let (behind_prompt, leaving, drafts, from) = (false, false, false, Vec::new());
        Self {
            flights,
            work,
            steps,
            columns: 0,
            mode,
            since,
            from,
            drafts,
            behind_prompt,
            leaving,
            watch,
        }
    }
}

/// The error of a launch, which says that it was not the model's where it was not.
fn named(work: &Work, error: Error) -> Error {
    match (work, error) {
        (Work::Predict(_), Error::Hang(told)) => {
            Error::Hang(format!("multi-token prediction: {told}"))
        }
        (_, error) => error,
    }
}

/// First position and number of those that a command wants the logits of.
fn logits_range(command: Command) -> (usize, usize) {
    let count = match command.kind {
        CommandKind::LogitsDecode => 1,
        CommandKind::LogitsPrefill
        | CommandKind::Start
        | CommandKind::Cancel
        | CommandKind::Grow => command.b as usize,
    };
    (command.a as usize, count)
}

/// A program at work.
pub struct Runner {
    launches: Launches,
    schedule: Schedule,
    delivery: Delivery,
    in_flight: Option<InFlight>,
    /// What predicts further tokens, and columns of the model's last launch that it has not seen
    /// yet.
    predictor: Option<Predictor>,
    unseen: VecDeque<Unseen>,
    /// Which kernel takes a prompt is a matter of its length, not of what is cached of it.
    pub(super) reproducible: bool,
}

impl Runner {
    /// Over a program whose weights are on the machines.
    pub fn new(
        ranks: Vec<Loaded>,
        mailbox: Arc<Mailbox>,
        first_seqno: u32,
        hang_timeout: Duration,
        bounds: Bounds,
    ) -> Self {
        let dims = ranks[0].dims;
        let schedule = Schedule::new(dims.slots as usize, ranks[0].most_columns(), bounds);
        Self {
            schedule,
            delivery: Delivery::new(mailbox, dims.vocab, dims.max_positions),
            launches: Launches::new(ranks, first_seqno, hang_timeout),
            in_flight: None,
            predictor: None,
            unseen: VecDeque::new(),
            reproducible: false,
        }
    }

    /// The same with what predicts further tokens beside the model.
    pub fn set_predictor(&mut self, ranks: Vec<Loaded>, first_seqno: u32, hang_timeout: Duration) {
        self.predictor = Some(Predictor::new(ranks, first_seqno, hang_timeout));
        self.schedule.singly = true;
    }

    /// Whose launch it is that some work is done by.
    fn launches_of(&self, work: &Work) -> &Launches {
        if let (Some(predictor), Work::Predict(_)) = (&self.predictor, work) {
            return &predictor.launches;
        }
        &self.launches
    }

    /// The same, with launches timed.
    #[must_use]
    pub fn metered(mut self, meter: Option<Arc<Meter>>) -> Self {
        self.launches.meter = meter;
        self
    }

    /// The machine that the host listens to.
    fn first(&self) -> &Loaded {
        self.launches.first()
    }

    fn is_simulated(&self) -> bool {
        self.first().machine.platform() == Platform::Sim
    }

    fn command(&mut self, command: Command) {
        let cached = match command.kind {
            CommandKind::Start => {
                self.delivery.request(command.slot as usize).params.cached as usize
            }
            CommandKind::Cancel
            | CommandKind::Grow
            | CommandKind::LogitsPrefill
            | CommandKind::LogitsDecode => 0,
        };
        self.schedule.command(command, cached);
    }

    /// Reads what a launch on its way has made; ends it where it has ended.
    fn follow(&mut self, mut launch: InFlight) -> Result<()> {
        let ended: Result<Vec<bool>> = launch.flights.iter_mut().map(|f| f.done()).collect();
        let ended = match ended {
            Ok(ended) => ended,
            Err(error) => {
                self.in_flight = Some(launch);
                return Err(error);
            }
        };
        let mut draftable = false;
        if let Work::Tokens(slots) | Work::Mixed(slots, _) = &launch.work {
            if slots.iter().fold(false, |any, slot| self.collect(*slot) | any) {
                launch.watch.heard();
                // One without drafts may have a slot that could have some by now.
                let now = |slots: &[usize]| matches!(self.looking_up(slots), Drafts::Now);
                draftable =
                    !launch.drafts && matches!(&launch.work, Work::Tokens(slots) if now(slots));
            }
        }
        if ended.iter().all(|ended| *ended) {
            return self.complete(launch);
        }
        draftable |= self.is_outrun(&launch);
        self.first().machine.platform().between_looks();
        self.launches_of(&launch.work).heartbeat();
        // The simulator finds blocks that are stuck by itself.
        let partly = ended.contains(&true);
        if !self.is_simulated() && launch.watch.is_due(self.launches.budget(), partly) {
            let waits = self.launches_of(&launch.work).expired_waits()?;
            if let Some(error) = launch.watch.look(&waits) {
                let error = named(&launch.work, error);
                // Its end may take long to come, or never does.
                self.in_flight = Some(launch);
                return Err(error);
            }
        }
        let leaves = draftable || self.is_over(&launch) || self.schedule.should_leave(&launch.work);
        if !launch.leaving && leaves {
            self.launches.order(Order::Leave);
            launch.leaving = true;
        }
        self.in_flight = Some(launch);
        Ok(())
    }

    /// Whether a launch has had its time: others use the GPU, too. Launches that are measured make
    /// their steps, and one for logits would begin anew.
    fn is_over(&self, launch: &InFlight) -> bool {
        self.launches.meter.is_none()
            && !matches!(launch.work, Work::Logits(..) | Work::Predict(_))
            && self.schedule.pace.is_over(launch.since.elapsed())
    }

    /// Takes the tokens of a slot that are there; whether there were any.
    fn collect(&mut self, index: usize) -> bool {
        let (out, garbage) = (&self.launches.ranks[0].room.out, self.launches.is_garbage());
        self.delivery.collect(out, index, &mut self.schedule.slots[index], garbage)
    }

    /// A launch has ended.
    fn complete(&mut self, launch: InFlight) -> Result<()> {
        let InFlight { flights, work, steps, columns, mode, since, from, drafts, .. } = launch;
        let behind_prompt = launch.behind_prompt;
        drop(flights);
        if let Some(error) = hang::of_ended(&self.launches_of(&work).expired_waits()?) {
            return Err(named(&work, error));
        }
        let made = self.launches.steps_made();
        self.note(&work, steps, mode)?;
        let drafted = self.end_drafts(drafts, &from);
        match work {
            Work::Tokens(slots) => {
                if !behind_prompt {
                    self.schedule.pace.note_steps(made, since.elapsed());
                }
                let generated = |s: &usize| self.schedule.slots[*s].generated;
                let most = slots.iter().map(generated).max().unwrap_or(0);
                self.launches.advance((most as u32).min(steps) + 1);
                self.finish_all(&slots)?;
                self.tokens_seen(&from, &drafted, columns);
            }
            Work::Mixed(slots, prompt) => {
                self.launches.advance(steps);
                let done = made as usize * prompt.share;
                self.schedule.slots[prompt.slot].next += done.min(prompt.count);
                self.finish_all(&slots)?;
                self.finish(prompt.slot);
            }
            Work::Prompt(slot, to) => {
                self.launches.advance(steps);
                // A kernel that believed its host gone may have left before the end.
                let done =
                    if made < steps { made as usize * self.first().most_columns() } else { to };
                let slot_now = &mut self.schedule.slots[slot];
                let first = slot_now.next;
                slot_now.next = to.min(slot_now.next.saturating_add(done));
                self.finish(slot);
                self.prompt_seen(slot, first, columns);
            }
            Work::Layers(chunk, layers) => {
                self.schedule.pace.note_layers(&chunk, layers, since.elapsed());
                let all = self.first().model.layers();
                self.schedule.went_on(chunk, layers, all);
                self.finish(chunk.slot);
                if chunk.done + layers == all {
                    self.chunk_seen(&chunk);
                }
            }
            Work::Predict(slots) => self.predicted(slots, steps),
            Work::Logits(command) => {
                self.launches.advance(steps);
                if made < steps {
                    self.schedule.logits.push_front(command);
                    return Ok(());
                }
                let (first, count) = logits_range(command);
                let state = &mut self.schedule.slots[command.slot as usize].recurrent;
                state.advance(first, first + count);
                let mut logits = vec![0.0; count * self.first().dims.vocab as usize];
                self.launches.read_logits(0, &mut logits)?;
                self.delivery.publish_logits(command.slot as usize, logits);
                return Ok(());
            }
        }
        for (slot, from) in from {
            let slot = &mut self.schedule.slots[slot];
            slot.recurrent.advance(from, slot.next);
        }
        Ok(())
    }

    /// Tells the meter of a launch that made all its steps.
    fn note(&self, work: &Work, steps: u32, mode: Option<Mode>) -> Result<()> {
        let (Some(meter), Some(mode), Work::Tokens(slots)) = (&self.launches.meter, mode, work)
        else {
            return Ok(());
        };
        let (first, slot) = (self.first(), &self.schedule.slots[slots[0]]);
        if let Some(probe) = first.probe.as_ref().filter(|_| slot.end == Some(SlotEnd::Length)) {
            meter.note(probe.read(&*first.machine, mode, steps)?);
        }
        Ok(())
    }

    /// What is to be done for each column of a launch that has ended.
    fn finish_all(&mut self, slots: &[usize]) -> Result<()> {
        for (column, index) in slots.iter().enumerate() {
            let slot = &self.schedule.slots[*index];
            let wanted = self.delivery.alternatives_wanted(*index, slot);
            if wanted > 0 {
                let mut logits = vec![0.0; self.first().dims.vocab as usize];
                self.launches.read_logits(column, &mut logits)?;
                self.delivery.publish_alternatives(*index, slot, wanted, &logits);
            }
            self.finish(*index);
        }
        Ok(())
    }

    /// Gives a slot back where it has ended.
    fn finish(&mut self, index: usize) {
        if let Some(end) = self.schedule.take_end(index) {
            self.delivery.mailbox.end(index, end);
        }
    }

    /// Starts the next launch, if there is work.
    fn begin(&mut self) -> Result<()> {
        self.write_grown()?;
        if let Some(unseen) = self.unseen.pop_front() {
            return self.start_predicting(unseen);
        }
        let oldest = loop {
            for index in self.schedule.cancelled() {
                self.finish(index);
            }
            if let Some(command) = self.schedule.logits.pop_front() {
                return self.start_logits(command);
            }
            let Some(slot) = self.schedule.oldest_prompt() else { break None };
            match self.prompt_left(slot)? {
                0 => {}
                left => break Some((slot, left)),
            }
        };
        match self.schedule.next(oldest) {
            Next::Nothing => Ok(()),
            Next::Mixed { decoding, slot, left } => self.start_mixed(decoding, slot, left),
            Next::Prompt { slot, left, beside } => self.start_prompt(slot, left, beside),
            Next::Tokens { slots, steps } => self.start_tokens(slots, steps, false),
        }
    }

    /// Page tables that have grown, to where kernels look for them.
    fn write_grown(&mut self) -> Result<()> {
        for index in self.schedule.take_grown() {
            self.launches.write_pages(index, &self.delivery.mailbox)?;
            self.write_predictors_pages(index)?;
        }
        Ok(())
    }

    /// Positions of a prompt that are still to be done; its last token is the first that the
    /// decode loop feeds, so with none left the slot decodes.
    fn prompt_left(&mut self, index: usize) -> Result<usize> {
        let request = self.delivery.request(index);
        let last = request.params.prompt as usize - 1;
        let slot = &mut self.schedule.slots[index];
        if slot.token.is_none() {
            self.launches.write_slot(index, request, &self.delivery.mailbox)?;
            if let Some(predictor) = &self.predictor {
                predictor.launches.write_pages(index, &self.delivery.mailbox)?;
                slot.predicted = Predicted::new(request);
            }
            if slot.predicted.is_none() {
                let positions = self.launches.first().dims.max_positions;
                slot.drafts = SlotDrafts::new(request, positions as usize);
            }
            // A few positions are done sooner as columns, in steps of a token's time.
            let few = 2 * self.launches.first().most_columns();
            let begin = if self.reproducible { 0 } else { slot.next };
            let wide = self.launches.is_wide() && last - begin > few;
            (slot.token, slot.wide) = (Some(0), wide);
        }
        if slot.next == last {
            (slot.state, slot.token) = (State::Decode, Some(request.tokens[last]));
        }
        Ok(last - slot.next)
    }

    /// The `count` positions left of a prompt, in the columns that the sequences leave free.
    fn start_mixed(&mut self, slots: Vec<usize>, index: usize, count: usize) -> Result<()> {
        let first = self.schedule.slots[index].next;
        self.write_prompt(index, first, count)?;
        let columns = self.first().most_columns();
        let share = columns - slots.len();
        let (mut column, dump) = self.sequences(&slots);
        let (row, position) = (index as u32, first as u32);
        let state = self.schedule.slots[index].recurrent.ask(first);
        column[slots.len()..].fill(Sequence { row, position, state, ..Sequence::default() });
        let once = dump || self.goes_singly(&slots);
        let steps = if once { 1 } else { count.div_ceil(share) } as u32;
        let (mixed, prompt) = (MixedPrompt { slot: index, count, share }, count as u32);
        let (columns, live) = (columns as u32, slots.len() as u32);
        let logits = dump.then_some(columns);
        let ask = Ask { columns, steps, live, prompt, logits, column, ..Ask::default() };
        self.launch(&ask, Work::Mixed(slots, mixed))
    }

    /// A slot's tokens `from .. from + count` to where prompts are read.
    fn write_prompt(&self, index: usize, from: usize, count: usize) -> Result<()> {
        self.launches.write_prompt(&self.delivery.request(index).tokens[from..from + count])
    }

    /// The next positions of a prompt that has so many left, in a launch of their own.
    fn start_prompt(&mut self, index: usize, left: usize, beside: bool) -> Result<()> {
        let slot = &self.schedule.slots[index];
        if slot.wide {
            return self.start_layers(index, left, beside);
        }
        let position = slot.next;
        let count = match (&self.predictor, beside) {
            (Some(_), _) => left.min(self.first().most_columns()),
            (None, true) => left.min(TURN_POSITIONS),
            (None, false) => left,
        };
        self.launch_prompt(index, position, count, None, Work::Prompt(index, position + count))
    }

    /// A prompt's next positions through the prefill kernel, or those that are between its layers.
    fn start_layers(&mut self, index: usize, left: usize, beside: bool) -> Result<()> {
        let chunk = match self.schedule.take_chunk(index) {
            Some(chunk) => chunk,
            None => {
                let first = self.schedule.slots[index].next;
                // Chunks start at whole pages, so launches end there.
                let count = left.min(self.launch_positions(beside) - first % PAGE);
                let whole = count == left && self.takes_last(index, first, count);
                let count = count + usize::from(whole);
                self.write_prompt(index, first, count)?;
                Chunk { slot: index, first, count, done: 0, whole }
            }
        };
        let left = self.first().model.layers() - chunk.done;
        let layers = self.schedule.pace.layers(&chunk, left, beside);
        let to_head = chunk.whole && layers == left;
        // States move on once the chunk is through all layers: until then each launch of it, and
        // the tokens right behind it, find what the first one found.
        let state = self.schedule.slots[index].recurrent.ask(chunk.first);
        let flights = self.launches.prefill(&chunk, layers, state, to_head)?;
        if to_head {
            return self.start_at_head(&chunk, flights);
        }
        self.in_flight = Some(InFlight::new((flights, None), Work::Layers(chunk, layers), 0));
        Ok(())
    }

    /// Positions of a launch of the prefill kernel: beside sequences one chunk, else many.
    fn launch_positions(&self, beside: bool) -> usize {
        let chunk = self.first().prefill.as_ref().map_or(PAGE, Prefill::chunk);
        // What predicts further tokens goes on from one chunk at a time.
        if beside || self.predictor.is_some() {
            chunk
        } else {
            chunk * (prefill::MOST_POSITIONS / chunk).max(1)
        }
    }

    fn start_logits(&mut self, command: Command) -> Result<()> {
        let index = command.slot as usize;
        let request = self.delivery.request(index);
        self.launches.write_slot(index, request, &self.delivery.mailbox)?;
        let (position, count) = logits_range(command);
        let columns = (command.kind == CommandKind::LogitsDecode).then_some(1);
        self.launch_prompt(index, position, count, columns, Work::Logits(command))
    }

    fn launch_prompt(
        &mut self,
        index: usize,
        position: usize,
        count: usize,
        columns: Option<u32>,
        work: Work,
    ) -> Result<()> {
        let columns = columns.unwrap_or(self.first().most_columns() as u32);
        self.write_prompt(index, position, count)?;
        let count = count as u32;
        // Every column is of this sequence, whose pages it finds by its own row.
        let state = self.schedule.slots[index].recurrent.ask(position);
        let (row, position) = (index as u32, position as u32);
        let column = [Sequence { row, position, state, ..Sequence::default() }; 8];
        let steps = count.div_ceil(columns);
        let logits = matches!(work, Work::Logits(..)).then_some(steps * columns);
        // What a token's launch would take.
        let streamed = count == 1 && position >= self.first().streams_from();
        let ask = Ask { columns, steps, streamed, prompt: count, logits, column, ..Ask::default() };
        self.launch(&ask, work)
    }

    /// Whether the prefill kernel takes the very last token of a prompt with these positions before
    /// it, so that the decode kernel's first step is but the head.
    fn takes_last(&self, index: usize, first: usize, count: usize) -> bool {
        let chunk = self.first().prefill.as_ref().map_or(1, Prefill::chunk);
        // A chunk of one position is a pass over all weights, too; what is measured is whole steps.
        // Where a mask is late the last position is computed again, with the same bits.
        !(first % PAGE + count).is_multiple_of(chunk)
            && self.launches.meter.is_none()
            && self.predictor.is_none()
            && self.delivery.request(index).masks.is_none()
    }

    /// Whether a launch with these slots makes one step only, since it may have to make its last
    /// one again: a recurrent state is behind all of them.
    fn goes_singly(&self, slots: &[usize]) -> bool {
        self.first().model.classes.iter().any(|class| class.is_recurrent())
            && slots.iter().any(|slot| self.delivery.request(*slot).masks.is_some())
    }

    /// Hands on the masks that have come.
    fn hand_on_masks(&mut self) {
        for index in 0..self.schedule.slots.len() {
            let slot = &mut self.schedule.slots[index];
            if slot.state == State::Idle || slot.masked == Some(slot.emitted) {
                continue;
            }
            let Some(masks) = &self.delivery.request(index).masks else { continue };
            let mut place = slot.place();
            if let Some(mask) = masks.next(&mut place) {
                self.launches.write_mask(index, slot.emitted, 0, mask);
                slot.mask_came(place.begin);
            }
        }
    }

    /// Tokens of a slot, behind the launches that take its prompt to the end: only one beside
    /// others, which wait for it.
    fn start_at_head(&mut self, chunk: &Chunk, prompt: Vec<Box<dyn Flight>>) -> Result<()> {
        let others = self.schedule.any_decodes();
        self.schedule.slots[chunk.slot].next = chunk.first + chunk.count - 1;
        self.prompt_left(chunk.slot)?;
        self.start_tokens(vec![chunk.slot], if others { 1 } else { LONG }, true)?;
        if let Some(launch) = &mut self.in_flight {
            launch.flights.extend(prompt);
            launch.behind_prompt = true;
        }
        Ok(())
    }

    fn start_tokens(&mut self, slots: Vec<usize>, most: u32, at_head: bool) -> Result<()> {
        let (column, dump) = self.sequences(&slots);
        // What predicts further tokens sees each step.
        let seen = slots.iter().any(|slot| self.schedule.slots[*slot].predicted.is_some());
        let most = if seen { 1 } else { most };
        let most = match self.drafting(&slots) {
            Drafts::None => most,
            Drafts::Now if !at_head && !dump => return self.start_drafting(slots, most, column),
            // The next launch has some.
            Drafts::Now => 1,
            Drafts::Later(steps) => most.min(steps),
        };
        let columns = if slots.len() == 1 { 1 } else { self.first().most_columns() as u32 };
        // Measured launches make their steps and no more.
        let left = column[0].last - column[0].position;
        let most = if self.launches.meter.is_some() { most.min(left) } else { most };
        // A launch of one column ends where the kernel with streamed pages takes over.
        let from = self.first().streams_from();
        let streamed = column[0].position >= from;
        let most = if streamed || columns > 1 { most } else { most.min(from - column[0].position) };
        let once = dump || self.goes_singly(&slots);
        let (live, steps) = (slots.len() as u32, if once { 1 } else { most });
        let logits = dump.then_some(columns);
        let ask = Ask { columns, steps, live, streamed, at_head, logits, column, ..Ask::default() };
        self.launch(&ask, Work::Tokens(slots))
    }

    /// What these slots' drafts ask of their next launch.
    fn drafting(&self, slots: &[usize]) -> Drafts {
        let ready = |slot: &usize| {
            let predicted = &self.schedule.slots[*slot].predicted;
            predicted.as_ref().is_some_and(Predicted::is_ready) || self.drafts_beside(*slot) > 0
        };
        let given = self.have_room(slots) && slots.iter().any(ready);
        if given {
            Drafts::Now
        } else {
            self.looking_up(slots)
        }
    }

    /// Whether drafts of these slots' next tokens could be columns.
    fn have_room(&self, slots: &[usize]) -> bool {
        slots.len() < self.first().most_columns() && self.launches.meter.is_none()
    }

    /// Drafts of a slot's next tokens that came with its masks.
    fn drafts_beside(&self, slot: usize) -> usize {
        let place = self.schedule.slots[slot].place();
        drafts::beside(&place, self.delivery.request(slot), DRAFT_MAX).given as usize
    }

    /// Whether the host has drafts of a slot beyond the token that a launch is choosing.
    fn is_outrun(&self, launch: &InFlight) -> bool {
        let Work::Tokens(slots) = &launch.work else { return false };
        // A launch with drafts is choosing these until it has told of its first step.
        let more = |(slot, from): &(usize, usize)| {
            let told = !launch.drafts || self.schedule.slots[*slot].next > *from;
            told && self.drafts_beside(*slot) > 1
        };
        self.have_room(slots) && launch.from.iter().any(more)
    }

    /// What these slots' texts ask of their next launch.
    fn looking_up(&self, slots: &[usize]) -> Drafts {
        let of = |slot: &usize| Some((*slot, self.schedule.slots[*slot].drafts.as_ref()?));
        let mut some = slots.iter().filter_map(of).peekable();
        if some.peek().is_none() || !self.have_room(slots) {
            return Drafts::None;
        }
        let mut rest = u32::MAX;
        for (slot, drafts) in some {
            if drafts.wants(self.delivery.request(slot)) {
                return Drafts::Now;
            }
            if drafts.rest() > 0 {
                rest = rest.min(drafts.rest());
            }
        }
        Drafts::Later(rest)
    }

    /// Starts the kernel that makes drafts of the next tokens of these slots, or is given them.
    fn start_drafting(
        &mut self,
        slots: Vec<usize>,
        steps: u32,
        column: [Sequence; 8],
    ) -> Result<()> {
        let mut drafting = [Drafting::default(); 8];
        let columns = self.first().most_columns() as u32;
        let mut room = columns as usize - slots.len();
        let mut looks_up = false;
        for (drafting, index) in drafting.iter_mut().zip(&slots) {
            let (slot, request) = (&mut self.schedule.slots[*index], self.delivery.request(*index));
            let Some(drafts) = &mut slot.drafts else {
                *drafting = match &mut slot.predicted {
                    Some(predicted) => predicted.take(room),
                    None => drafts::beside(&slot.place(), request, room),
                };
                room -= drafting.given as usize;
                continue;
            };
            looks_up = true;
            let write =
                |which, from, ids: &[u32]| self.launches.write_ids(*index, which, from, ids);
            *drafting = drafts.begin(request, write)?;
        }
        let live = slots.len() as u32;
        // What is given is for the first step, and kernels without drafts are faster.
        let steps = if looks_up && !self.goes_singly(&slots) { steps } else { 1 };
        let ask = Ask { columns, steps, live, drafting: Some(drafting), column, ..Ask::default() };
        self.launch(&ask, Work::Tokens(slots.clone()))?;
        // They are looked for at the step's end.
        for (drafting, index) in drafting.iter().zip(slots) {
            self.hand_on_drafts(index, drafting.given as usize);
        }
        Ok(())
    }

    /// Hands on what the tokens behind each of so many drafts of a slot may be.
    fn hand_on_drafts(&self, index: usize, given: usize) {
        let slot = &self.schedule.slots[index];
        let Some(masks) = &self.delivery.request(index).masks else { return };
        for n in 0..given {
            if let Some(mask) = masks.behind_draft(&slot.place(), n) {
                self.launches.write_mask(index, slot.emitted, n + 1, mask);
            }
        }
    }

    /// A launch of tokens has ended, with drafts or without; each slot's position was so far. Says
    /// how many drafts each had.
    fn end_drafts(&mut self, drafts: bool, from: &[(usize, usize)]) -> Vec<u32> {
        let mut all = vec![0; from.len()];
        for (column, (index, from)) in from.iter().enumerate() {
            let slot = &mut self.schedule.slots[*index];
            let made = slot.next.saturating_sub(*from) as u32;
            if drafts {
                let told = Drafted::read(&self.launches.ranks[0].room.control, column);
                let [drafted, accepted] = told.counts;
                self.delivery.mailbox.count_drafts(*index, drafted, accepted);
                slot.drafts.iter_mut().for_each(|of_slot| of_slot.ended(&told));
                slot.predicted.iter_mut().for_each(|of_slot| of_slot.saw(drafted, accepted));
                all[column] = drafted;
            } else {
                slot.drafts.iter_mut().for_each(|of_slot| of_slot.passed(made));
            }
        }
        all
    }

    /// The page tables of a slot for what predicts further tokens.
    fn write_predictors_pages(&self, index: usize) -> Result<()> {
        let mut all = self.predictor.iter();
        all.try_for_each(|p| p.launches.write_pages(index, &self.delivery.mailbox))
    }

    /// Columns of a launch of tokens, one step of slots that were there and had so many drafts
    /// each: what predicts further tokens sees those of slots that want its drafts.
    fn tokens_seen(&mut self, from: &[(usize, usize)], drafted: &[u32], columns: u32) {
        if self.predictor.is_none() {
            return;
        }
        // Drafts need columns beside the sequences' own; alternatives come without.
        let several = |(index, _): &(usize, usize)| {
            self.delivery.request(*index).params.sampling.logprobs > 1
        };
        let none = from.iter().any(several);
        let mut spare = self.first().most_columns() - from.len();
        let (mut all, mut behind) = (Vec::new(), from.len());
        for (at, ((index, first), drafts)) in from.iter().zip(drafted).enumerate() {
            let begin = behind;
            behind += *drafts as usize;
            let slot = &mut self.schedule.slots[*index];
            let made = slot.next - first;
            let decodes = made > 0 && slot.state == State::Decode;
            let Some(predicted) = slot.predicted.as_mut().filter(|_| decodes) else { continue };
            let columns = [at].into_iter().chain(begin..).take(made).collect();
            let token = |n| self.delivery.mailbox.record(*index, n as u32, 0, &mut []).token;
            let tokens = (slot.generated - made..slot.generated).map(token).collect();
            let most = self.delivery.request(*index).params.max_new as usize;
            let left = (most - slot.generated).min(slot.granted.saturating_sub(slot.next));
            let left = if none { 0 } else { left.min(1 + spare) };
            let seen = Seen::all(*index, *first, columns, tokens).predicted(predicted, left);
            spare -= seen.wanted;
            all.push(seen);
        }
        let residual = Residual::OfColumns(columns);
        self.unseen.extend((!all.is_empty()).then_some(Unseen { seen: all, residual }));
    }

    /// Columns of a launch of a slot's prompt from `first` on.
    fn prompt_seen(&mut self, index: usize, first: usize, columns: u32) {
        let slot = &self.schedule.slots[index];
        if self.predictor.is_none() || slot.state == State::Idle {
            return;
        }
        let tokens = self.delivery.request(index).tokens[first + 1..=slot.next].to_vec();
        if !tokens.is_empty() {
            let seen = Seen::all(index, first, (0..tokens.len()).collect(), tokens);
            let residual = Residual::OfColumns(columns);
            self.unseen.push_back(Unseen { seen: vec![seen], residual });
        }
    }

    /// Positions of a chunk that the prefill kernel has taken through all layers, some at a time.
    fn chunk_seen(&mut self, chunk: &Chunk) {
        let slot = &self.schedule.slots[chunk.slot];
        if self.predictor.is_none() || slot.state == State::Idle {
            return;
        }
        let (first, most) = (chunk.first, self.first().most_columns());
        let tokens = &self.delivery.request(chunk.slot).tokens[first + 1..=first + chunk.count];
        for (n, tokens) in tokens.chunks(most).enumerate() {
            // Places of a chunk begin with its first position's page.
            let place = first % PAGE + n * most;
            let columns = (place..place + tokens.len()).collect();
            let seen = Seen::all(chunk.slot, first + n * most, columns, tokens.to_vec());
            self.unseen.push_back(Unseen { seen: vec![seen], residual: Residual::OfChunk });
        }
    }

    /// Has what predicts further tokens see what it has not seen yet.
    fn start_predicting(&mut self, unseen: Unseen) -> Result<()> {
        let Some(predictor) = &mut self.predictor else { return Ok(()) };
        let ask = predictor::Ask::new(unseen.seen);
        let residuals = match unseen.residual {
            Residual::OfColumns(columns) => self.launches.residuals(columns),
            Residual::OfChunk => self.launches.ranks.iter().map(Loaded::residuals).collect(),
        };
        let flights = predictor.start(&ask, &residuals)?;
        let work = Work::Predict(ask.slots);
        self.in_flight = Some(InFlight::new((flights, None), work, ask.steps));
        Ok(())
    }

    /// What follows was predicted, so many tokens of each slot.
    fn predicted(&mut self, slots: Vec<(usize, usize)>, steps: u32) {
        let Some(predictor) = &mut self.predictor else { return };
        predictor.launches.advance(steps + 1);
        for (index, count) in slots {
            let drafts = predictor.predicted(index, count);
            if let Some(of_slot) = &mut self.schedule.slots[index].predicted {
                of_slot.came(drafts);
            }
        }
    }

    /// The columns of these slots, and whether some slot's logits are wanted.
    fn sequences(&self, slots: &[usize]) -> ([Sequence; 8], bool) {
        let (mut dump, mut column) = (false, [Sequence::default(); 8]);
        let longest = self.first().dims.max_positions as usize;
        for (column, index) in column.iter_mut().zip(slots) {
            let request = self.delivery.request(*index);
            dump |= request.params.sampling.logprobs > 1;
            *column = sequence(*index, &self.schedule.slots[*index], request, longest);
        }
        (column, dump)
    }

    fn launch(&mut self, ask: &Ask, work: Work) -> Result<()> {
        let measured = matches!(work, Work::Tokens(_)) && ask.columns == 1;
        let started = self.launches.decode(ask, measured)?;
        let next = |slot: &usize| (*slot, self.schedule.slots[*slot].next);
        let from = match &work {
            Work::Tokens(slots) => slots.iter().map(next).collect(),
            Work::Mixed(slots, prompt) => slots.iter().chain([&prompt.slot]).map(next).collect(),
            Work::Prompt(slot, _) => vec![next(slot)],
            Work::Layers(..) | Work::Logits(_) | Work::Predict(_) => Vec::new(),
        };
        let (columns, drafts) = (ask.columns, ask.drafting.is_some());
        self.in_flight =
            Some(InFlight { from, columns, drafts, ..InFlight::new(started, work, ask.steps) });
        Ok(())
    }
}

impl Running for Runner {
    fn drive(&mut self, _gone: Gone<'_>) -> Result<bool> {
        while let Some(command) = self.delivery.mailbox.receive() {
            self.command(command);
        }
        if let Some(launch) = self.in_flight.take() {
            self.follow(launch)?;
        }
        self.hand_on_masks();
        if self.in_flight.is_none() {
            self.begin()?;
        }
        if self.in_flight.is_none() && self.schedule.slots.iter().any(|slot| slot.late) {
            std::thread::yield_now(); // to whoever makes the mask
        }
        Ok(self.in_flight.is_some())
    }

    /// Of the machine that took longest, phase by phase: they load side by side.
    fn phases(&self) -> Vec<Phase> {
        let mut all = self.first().phases.clone();
        for (n, phase) in all.iter_mut().enumerate() {
            let others = self.launches.ranks.iter().filter_map(|rank| rank.phases.get(n));
            phase.seconds = others.clone().map(|p| p.seconds).fold(0.0, f64::max);
            phase.bytes = others.map(|p| p.bytes).sum();
        }
        all
    }

    fn warnings(&self) -> Vec<String> {
        let of =
            |(rank, l): (usize, &Loaded)| Some(format!("rank {rank}: {}", l.warning.as_ref()?));
        self.launches.ranks.iter().enumerate().filter_map(of).collect()
    }

    fn park(&mut self) {}
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.launches.order(Order::Abort);
        self.predictor.iter().for_each(|predictor| predictor.launches.order(Order::Abort));
        let Some(mut launch) = self.in_flight.take() else { return };
        // As long as a kernel runs it may store into any rank's words, whoever else has ended.
        let mut ended = true;
        for flight in &mut launch.flights {
            ended &= flight.wait();
        }
        if !ended {
            std::mem::forget(std::mem::take(&mut self.launches.ranks));
            std::mem::forget(self.predictor.take());
        }
    }
}

const _: () = assert!(wire::CONTROL_BYTES >= 16);
