//! Llama 3 and its relatives (Meta, "The Llama 3 Herd of Models", 2024).

use super::config::Config;
use super::spec::Spec;
use super::transformer;
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    transformer::spec(config, &transformer::Traits::LLAMA)
}
