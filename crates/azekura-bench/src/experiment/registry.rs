//! The experiments there are.

use crate::experiment::blobs::gc::BlobGc;
use crate::experiment::blobs::load::BlobLoad;
use crate::experiment::cache_hit::CacheHit;
use crate::experiment::experiment::Experiment;
use crate::experiment::hash_index::HashIndex;
use crate::experiment::partitioned::Partitioned;
use crate::experiment::pmem::speed::MemorySpeed;
use crate::experiment::pmem::split::ZeroCopySplit;
use crate::experiment::restart_interval::RestartInterval;
use crate::failure::Result;

/// All of them.
pub(crate) const EXPERIMENTS: &[&dyn Experiment] =
    &[&RestartInterval, &CacheHit, &HashIndex, &Partitioned, &BlobLoad, &BlobGc, &ZeroCopySplit, &MemorySpeed];

/// The experiment of that name.
pub(crate) fn named(name: &str) -> Result<&'static dyn Experiment> {
    let known: Vec<&str> = EXPERIMENTS.iter().map(|one| one.name()).collect();
    let found = EXPERIMENTS.iter().find(|one| one.name() == name);
    Ok(*found.ok_or_else(|| format!("no experiment is called `{name}`; there are {}", known.join(", ")))?)
}

#[cfg(test)]
mod tests {
    use super::{EXPERIMENTS, named};

    #[test]
    fn names_are_unique_and_known() {
        for one in EXPERIMENTS {
            assert_eq!(named(one.name()).unwrap().about(), one.about());
            assert_eq!(EXPERIMENTS.iter().filter(|other| other.name() == one.name()).count(), 1);
        }
        assert!(named("nothing").err().unwrap().to_string().contains("restart-interval"));
    }
}
