//! Prompts beside sequences at work, where there is a prefill kernel: a chunk of positions goes
//! through some layers, the sequences make a token, the chunk goes on. The chunk is as long as it
//! would be with nobody beside it, so neither changes a bit of the other; only how many layers a
//! launch takes follows the clock.

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

/// How long things took lately, and how long a token may be held up.
#[derive(Debug, Default)]
pub struct Pace {
    gap: Option<Duration>,
    step: Duration,
    /// A layer of a chunk, and the chunk's positions.
    layer: Option<(Duration, usize)>,
}

impl Pace {
    /// Knows nothing yet. `gap`: the bound on the time between two tokens.
    pub fn new(gap: Option<Duration>) -> Self {
        Self { gap, ..Self::default() }
    }

    /// Layers that the chunk's next launch takes, of those that are left.
    pub fn layers(&self, chunk: &Chunk, left: u32) -> u32 {
        let Some((layer, positions)) = self.layer else { return 1.min(left) };
        let budget = self.gap.map_or(UNBOUNDED, |gap| gap.saturating_sub(self.step + MARGIN));
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
        let mut pace = Pace::new(Some(ms(10)));
        assert_eq!(pace.layers(&chunk(1024), 32), 1, "nothing is known");
        pace.note_layers(&chunk(1024), 1, ms(1));
        pace.note_steps(4, ms(16));
        assert_eq!(pace.layers(&chunk(1024), 32), 5, "10 - 4 - 0.5 ms, a layer a millisecond");
        assert_eq!(pace.layers(&chunk(1024), 3), 3, "the last ones");
        assert_eq!(pace.layers(&chunk(64), 32), 5, "a shorter chunk may take as long");
        assert_eq!(pace.layers(&chunk(2048), 32), 2, "a longer one takes longer");
        pace.note_layers(&chunk(64), 2, ms(1));
        assert_eq!(pace.layers(&chunk(1024), 32), 1, "16 times 0.5 ms is more than is left");
        pace.note_steps(1, ms(50));
        assert_eq!(pace.layers(&chunk(64), 32), 1, "never none");
    }

    #[test]
    fn without_a_bound_a_launch_has_its_own_measure() {
        let mut pace = Pace::new(None);
        pace.note_steps(1, Duration::from_secs(1));
        pace.note_layers(&chunk(2048), 2, Duration::from_millis(4));
        assert_eq!(pace.layers(&chunk(2048), 32), 5);
        pace.note_layers(&chunk(2048), 4, Duration::ZERO);
        assert_eq!(pace.layers(&chunk(2048), 32), 32);
    }
}
