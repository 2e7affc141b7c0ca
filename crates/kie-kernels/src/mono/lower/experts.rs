//! Experts of a layer, and the one beside them that all columns go to.

use crate::abi::{ExpertGroups, Gate, Scoring};

/// Experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How many.
    pub count: u32,
    /// Those of a column.
    pub chosen: u32,
    /// What factors are made of.
    pub scoring: Scoring,
    /// Scores have corrections for the choice.
    pub correction: bool,
    /// The token says which are chosen.
    pub by_token: bool,
    /// The choice is among the experts of some groups.
    pub groups: Option<ExpertGroups>,
    /// On every factor.
    pub factor: f32,
    /// What is made of gate and up.
    pub gate: Gate,
    /// The router has a bias.
    pub router_bias: bool,
    /// Gate, up and down have biases.
    pub bias: bool,
    /// The expert that all columns go to.
    pub shared: Option<SharedExpert>,
}

/// An expert beside the chosen ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedExpert {
    /// MLP width.
    pub ffn: u32,
    /// The same of the program.
    pub ffn_all: u32,
    /// Its output is multiplied by the sigmoid of one more of the router's logits.
    pub scaled: bool,
}

impl Experts {
    /// Rows of the router.
    pub fn logits(&self) -> u32 {
        self.count + u32::from(self.shared.is_some_and(|shared| shared.scaled))
    }
}
