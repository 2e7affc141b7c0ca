//! What an emulated machine is like, from its name.

use std::collections::BTreeMap;

use kie_kernels::{Error, Result};

/// What an emulated machine is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Draws which wave runs, and what of a weak memory's work is done.
    pub seed: u64,
    /// Compute units of each rank, one block each.
    pub blocks: u32,
    /// Dies with a second-level cache of their own, among which blocks are dealt out in turn.
    pub chiplets: u32,
    /// Machines under one scheduler.
    pub ranks: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// A launch of more wave instructions fails.
    pub steps_max: u64,
    /// Memory is as weak as it is documented; else each access is done at once.
    pub weak: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 0,
            blocks: 8,
            chiplets: 8,
            ranks: 1,
            shared_bytes: 65_520,
            steps_max: 20_000_000_000,
            weak: false,
        }
    }
}

impl Options {
    /// From `gcn` or `gcn:seed=3,blocks=8`, each key at most once. There are `seed`, `blocks`,
    /// `chiplets`, `ranks`, `shared` (bytes), `steps` and `weak` (0 or 1).
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the part that is not understood.
    pub fn parse(name: &str) -> Result<Self> {
        let fault = |detail: String| Error::NoDevice { device: name.to_owned(), detail };
        let list = match name.strip_prefix("gcn") {
            Some("") => "",
            Some(rest) if rest.starts_with(':') => &rest[1..],
            _ => return Err(fault("an emulator's name is gcn or gcn:key=value,..".to_owned())),
        };
        let mut found = BTreeMap::new();
        for part in list.split(',').filter(|part| !part.is_empty()) {
            let number = part.split_once('=').and_then(|(key, n)| Some((key, n.parse().ok()?)));
            let Some((key, number)) = number else {
                return Err(fault(format!("{part:?} is not key=number")));
            };
            if found.insert(key, number).is_some() {
                return Err(fault(format!("{key} stands twice")));
            }
        }
        let mut options = Self::default();
        for (key, number) in found {
            let range = match key {
                "seed" | "steps" => 0..=u64::MAX,
                "blocks" => 1..=304,
                "chiplets" | "ranks" => 1..=8,
                "shared" => 1024..=65_536,
                "weak" => 0..=1,
                _ => {
                    let known = "seed, blocks, chiplets, ranks, shared, steps, weak";
                    return Err(fault(format!("no option {key}; there are {known}")));
                }
            };
            if !range.contains(&number) {
                let (low, high) = range.into_inner();
                return Err(fault(format!("{key}: {number} is not in range ({low} to {high})")));
            }
            let small = number as u32;
            match key {
                "seed" => options.seed = number,
                "steps" => options.steps_max = number,
                "blocks" => options.blocks = small,
                "chiplets" => options.chiplets = small,
                "ranks" => options.ranks = small,
                "shared" => options.shared_bytes = small,
                _ => options.weak = number != 0,
            }
        }
        Ok(options)
    }

    /// The name of one that is such.
    pub fn name(&self) -> String {
        let Self { seed, blocks, chiplets, ranks, shared_bytes: shared, steps_max: steps, weak } =
            self;
        let weak = u32::from(*weak);
        format!(
            "gcn:seed={seed},blocks={blocks},chiplets={chiplets},ranks={ranks},shared={shared},\
             steps={steps},weak={weak}"
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_or_refused_in_words() {
        let options = Options::parse("gcn:seed=3,blocks=12,weak=1").unwrap();
        assert_eq!((options.seed, options.blocks, options.weak), (3, 12, true));
        assert_eq!(Options::parse("gcn").unwrap(), Options::default());
        assert_eq!(Options::parse(&options.name()).unwrap(), options);
        for name in ["gc", "gcn:blocks=0", "gcn:seed", "gcn:seed=1,seed=2", "gcn:warp=64"] {
            let error = Options::parse(name).unwrap_err();
            assert!(matches!(error, Error::NoDevice { .. }), "{name}: {error}");
        }
    }
}
