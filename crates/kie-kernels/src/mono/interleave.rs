//! Prompts beside sequences at work, where there is a prefill kernel: a chunk of positions goes
//! through some layers, the sequences make a token, the chunk goes on. The chunk is as long as it
//! would be with nobody beside it, so neither changes a bit of the other; only how many layers a
//! launch takes follows the clock. It does so, too, where launches are to be short for the sake of
//! whoever else uses the GPU.

use std::time::Duration;

/// What a launch of layers may take where the gap between tokens has no bound.
const UNBOUNDED: Duration = Duration::from_millis(10);
/// Of a bounded gap, what is left for launches and for steps that take longer than the last one.
const MARGIN: Duration = Duration::from_micros(500);

/// A chunk of a slot's prompt on its way through the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Whose.
    pub slot: usize,
    /// Its first position.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// Layers behind it.
    pub done: u32,
    /// The prompt's last token is among them: what decoding begins with is the head.
    pub whole: bool,
}

/// How long things may take.
#[derive(Debug, Default, Clone, Copy)]
pub struct Bounds {
    /// The time between two tokens of a sequence beside a prompt.
    pub gap: Option<Duration>,
    /// A launch: it ends with the step, or the layer, in which the time is over.
    pub launch: Option<Duration>,
}

/// How long things took lately, and how long they may take.
#[derive(Debug, Default)]
pub struct Pace {
    bounds: Bounds,
    step: Duration,
    /// A layer of a chunk, and the chunk's positions.
    layer: Option<(Duration, usize)>,
}

impl Pace {
    /// Knows nothing yet.
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// A launch that has taken so long should end.
    pub fn is_over(&self, took: Duration) -> bool {
        self.bounds.launch.is_some_and(|most| took >= most)
    }

    /// Layers that the chunk's next launch takes, of those that are left; `beside` sequences that
    /// decode.
    pub fn layers(&self, chunk: &Chunk, left: u32, beside: bool) -> u32 {
        let Bounds { gap, launch } = self.bounds;
        let gap = gap.map_or(UNBOUNDED, |gap| gap.saturating_sub(self.step + MARGIN));
        let gap = beside.then_some(gap);
        let Some(budget) = gap.into_iter().chain(launch).min() else { return left };
        let Some((layer, positions)) = self.layer else { return 1.min(left) };
        // Fewer positions save less than their share, so a shorter chunk is taken for a whole one.
        let longer = (chunk.count as f64 / positions as f64).max(1.0);
        let layer = layer.mul_f64(longer).max(Duration::from_nanos(1));
        let most = budget.as_nanos() / layer.as_nanos();
        u32::try_from(most).unwrap_or(u32::MAX).clamp(1.min(left), left)
    }

    /// A launch of the chunk took so many layers, and so long.
    pub fn note_layers(&mut self, chunk: &Chunk, layers: u32, took: Duration) {
        self.layer = (layers > 0).then(|| (took / layers, chunk.count));
    }

    /// A launch made so many tokens of each sequence, and took so long.
    pub fn note_steps(&mut self, steps: u32, took: Duration) {
        if steps > 0 {
            self.step = took / steps;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn chunk(count: usize) -> Chunk {
        Chunk { slot: 0, first: 0, count, done: 0, whole: false }
    }

    #[test]
    fn a_launch_takes_what_a_bounded_gap_leaves() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new(Bounds { gap: Some(ms(10)), launch: None });
        assert_eq!(pace.layers(&chunk(1024), 32, true), 1, "nothing is known");
        pace.note_layers(&chunk(1024), 1, ms(1));
        pace.note_steps(4, ms(16));
        assert_eq!(
            pace.layers(&chunk(1024), 32, true),
            5,
            "10 - 4 - 0.5 ms, a layer a millisecond"
        );
        assert_eq!(pace.layers(&chunk(1024), 3, true), 3, "the last ones");
        assert_eq!(pace.layers(&chunk(64), 32, true), 5, "a shorter chunk may take as long");
        assert_eq!(pace.layers(&chunk(2048), 32, true), 2, "a longer one takes longer");
        pace.note_layers(&chunk(64), 2, ms(1));
        assert_eq!(pace.layers(&chunk(1024), 32, true), 1, "16 times 0.5 ms is more than is left");
        pace.note_steps(1, ms(50));
        assert_eq!(pace.layers(&chunk(64), 32, true), 1, "never none");
    }

    #[test]
    fn without_a_bound_a_launch_has_its_own_measure() {
        let mut pace = Pace::new(Bounds::default());
        pace.note_steps(1, Duration::from_secs(1));
        pace.note_layers(&chunk(2048), 2, Duration::from_millis(4));
        assert_eq!(pace.layers(&chunk(2048), 32, true), 5);
        pace.note_layers(&chunk(2048), 4, Duration::ZERO);
        assert_eq!(pace.layers(&chunk(2048), 32, true), 32);
    }

    #[test]
    fn a_bounded_launch_takes_what_it_may_alone_or_beside_others() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new(Bounds { gap: None, launch: Some(ms(4)) });
        assert_eq!(pace.layers(&chunk(1024), 32, false), 1, "nothing is known");
        pace.note_layers(&chunk(1024), 1, ms(1));
        assert_eq!(pace.layers(&chunk(1024), 32, false), 4);
        assert_eq!(pace.layers(&chunk(1024), 32, true), 4, "less than 10 ms");
        assert!(pace.is_over(ms(4)) && !pace.is_over(ms(3)));
        let mut free = Pace::new(Bounds { gap: Some(ms(2)), launch: None });
        free.note_layers(&chunk(1024), 1, ms(1));
        assert_eq!(free.layers(&chunk(1024), 32, false), 32, "nobody waits");
        assert!(!free.is_over(Duration::MAX));
    }
}
