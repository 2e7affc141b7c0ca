//! Philox4x32-10, the counter-based generator behind every random choice (Salmon, Moraes, Dror,
//! Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
//!
//! Invariant: a number depends on (seed, position, id) only, never on threads, neighbours or order.

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds of Philox on four 32-bit words.
#[inline]
pub fn philox4x32_10(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIER[0]) * u64::from(counter[0]);
        let p1 = u64::from(MULTIPLIER[1]) * u64::from(counter[2]);
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The 32 random bits of (seed, position, id): key = (low, high) word of the seed,
/// counter = (id, 0, position, 0), first word of the result.
#[inline]
pub fn bits(seed: u64, position: u32, id: u32) -> u32 {
    philox4x32_10([seed as u32, (seed >> 32) as u32], [id, 0, position, 0])[0]
}

/// `bits` as a number strictly between 0 and 1: `(x + 0.5) / 2^32`, exact in float64.
#[inline]
pub fn uniform(bits: u32) -> f64 {
    (f64::from(bits) + 0.5) / 4_294_967_296.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors that the authors publish with Random123 (`kat_vectors`).
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(
            philox4x32_10([0; 2], [0; 4]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([ones; 2], [ones; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_stays_inside() {
        assert!(uniform(0) > 0.0 && uniform(u32::MAX) < 1.0);
    }
}
