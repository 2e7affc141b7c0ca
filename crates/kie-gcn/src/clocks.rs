//! What instructions keep busy. Of a multiprocessor, four vector units of 16 lanes each take a wave
//! in four clocks, and shared memory moves 128 bytes a clock.

use std::ops::AddAssign;

/// Clocks for which waves kept something busy, and their instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clocks {
    /// All instructions.
    pub instructions: u64,
    /// Of one vector unit.
    pub vector: u64,
    /// Of shared memory.
    pub local: u64,
    /// Of one vector unit's matrix unit: 256 products of halves a clock.
    pub matrix: u64,
}

impl AddAssign for Clocks {
    fn add_assign(&mut self, more: Self) {
        self.instructions += more.instructions;
        self.vector += more.vector;
        self.local += more.local;
        self.matrix += more.matrix;
    }
}

/// Of one instruction of a whole wave.
pub(crate) fn of(base: &str) -> Clocks {
    let slow = ["v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt", "v_sin", "v_cos"];
    let vector = match base {
        _ if !base.starts_with("v_") => 0,
        _ if slow.iter().any(|name| base.starts_with(name)) => 16,
        _ => 4,
    };
    let bytes = |name: &str| match name.rsplit('_').next() {
        Some("b128") => 16,
        Some("b96") => 12,
        Some("b64" | "u64") => 8,
        _ => 4,
    };
    let times = if base.contains("read2") || base.contains("write2") { 2 } else { 1 };
    let local = match base {
        // A word for each lane.
        "global_load_lds_dword" => 2,
        _ if base.starts_with("ds_") => times * bytes(base) / 2,
        _ => 0,
    };
    let matrix = if base.starts_with("v_mfma_f32_16x16x16") { 16 } else { 0 };
    Clocks { instructions: 1, vector, local, matrix }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_in_the_names() {
        let of = |base| (of(base).vector, of(base).local);
        assert_eq!(of("v_dot2c_f32_f16"), (4, 0));
        assert_eq!(of("v_rcp_f32"), (16, 0));
        assert_eq!(of("ds_read_b128"), (0, 8));
        assert_eq!(of("ds_read2st64_b64"), (0, 8));
        assert_eq!(of("ds_bpermute_b32"), (0, 2));
        assert_eq!(of("s_mov_b32"), (0, 0));
    }
}
