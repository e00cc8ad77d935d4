//! What simulations did, so that a run can assert that it covered what it is for.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// How often something happened, by its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals(BTreeMap<&'static str, u64>);

pub(crate) type SharedTotals = Arc<Mutex<Totals>>;

impl Totals {
    pub(crate) fn count(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    pub(crate) fn add(&mut self, name: &'static str, number: u64) {
        *self.0.entry(name).or_default() += number;
    }

    pub(crate) fn merge(&mut self, other: &Totals) {
        for (name, number) in &other.0 {
            self.add(name, *number);
        }
    }

    /// Those of the names that never happened.
    pub(crate) fn missing<'a>(&self, names: &[&'a str]) -> Vec<&'a str> {
        names.iter().copied().filter(|name| !self.0.contains_key(name)).collect()
    }
}
