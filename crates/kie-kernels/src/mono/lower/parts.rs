//! Which columns of a stored row a block's weights are, and how they are padded.

/// Numbers of a row in equal parts, each padded to a width of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// How many.
    pub count: u32,
    /// Numbers of each.
    pub real: u32,
    /// The same with padding.
    pub padded: u32,
    /// Numbers of the stored row before the first part.
    pub skip: u32,
}

impl Parts {
    /// Units of 32 columns that share their scales, which the stored matrix has for each `columns`
    /// of its own: as many as always do, at most 16; 0 where one unit has several.
    pub fn group(&self, columns: u32) -> u32 {
        let stored = |column: u32| {
            let (part, inside) = (column / self.padded, column % self.padded);
            (inside < self.real).then_some(self.skip + part * self.real + inside)
        };
        let alike = |group: &u32| {
            let runs = (self.count * self.padded).div_ceil(32 * group);
            (0..runs).all(|run| {
                let mut found = (32 * group * run..32 * group * (run + 1))
                    .filter(|column| *column < self.count * self.padded)
                    .filter_map(stored)
                    .map(|column| column / columns);
                let first = found.next();
                found.all(|block| Some(block) == first)
            })
        };
        [16, 8, 4, 2, 1].into_iter().find(alike).unwrap_or(0)
    }
}
