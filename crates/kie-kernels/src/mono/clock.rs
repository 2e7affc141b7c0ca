//! The device's clock in the host's time.

/// Maps device nanoseconds (their low 40 bits) to CLOCK_MONOTONIC. The offset is the smallest that
/// was ever seen between a stamp and its arrival, so it errs by the fastest way of a token to the
/// host; times never run backwards.
#[derive(Debug, Default)]
pub struct DeviceClock {
    /// Device time with its high bits restored, and host time minus device time.
    seen: Option<(u64, i128)>,
    last: u64,
}

const RANGE: u64 = 1 << 40;

impl DeviceClock {
    /// Host time of a stamp that has just arrived.
    pub fn host_ns(&mut self, stamp: u64) -> u64 {
        self.host_ns_at(stamp, crate::host::now_ns())
    }

    fn host_ns_at(&mut self, stamp: u64, now: u64) -> u64 {
        let device = match self.seen {
            None => stamp,
            // The nearest time with these low bits, at or after what was seen a half range ago.
            Some((seen, _)) => {
                let from = seen.saturating_sub(RANGE / 2);
                from + (stamp.wrapping_sub(from) & (RANGE - 1))
            }
        };
        let offset = i128::from(now) - i128::from(device);
        let offset = self.seen.map_or(offset, |(_, best)| offset.min(best));
        self.seen = Some((device, offset));
        let host = (i128::from(device) + offset).clamp(0, i128::from(now)) as u64;
        self.last = self.last.max(host);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_the_devices_and_time_never_runs_back() {
        let mut clock = DeviceClock::default();
        assert_eq!(clock.host_ns_at(1_000, 50_000), 50_000);
        // Seen late, but made 500 ns after the first.
        assert_eq!(clock.host_ns_at(1_500, 90_000), 50_500);
        // A faster way to the host shortens the offset; the time does not run back.
        assert_eq!(clock.host_ns_at(2_000, 50_700), 50_700);
        assert_eq!(clock.host_ns_at(2_100, 60_000), 50_800);
    }

    #[test]
    fn the_stamp_wraps() {
        let mut clock = DeviceClock::default();
        let first = clock.host_ns_at(RANGE - 100, 1_000_000);
        assert_eq!(clock.host_ns_at(150, 1_000_900), first + 250);
    }
}
