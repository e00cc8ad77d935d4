//! Versions of pages that come and go, as in a table of a web crawler: rounds in which random pages are written anew,
//! and behind each a truncation that leaves the youngest versions of each page.

use crate::workload::rng::Rng;
use std::collections::VecDeque;

/// Versions of a page that a truncation leaves.
pub(super) const KEPT: usize = 5;
const SEED: u64 = 5;

/// One version of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) page: u64,
    /// No two versions of any pages have the same number, and younger ones have higher ones.
    pub(super) number: u64,
}

/// Which versions there are. The same pages give the same history.
pub(super) struct History {
    rng: Rng,
    /// The versions of each page, the oldest first.
    versions: Vec<VecDeque<u64>>,
    last: u64,
}

impl History {
    /// Of so many pages, at least one.
    pub(super) fn new(pages: u64) -> History {
        History { rng: Rng::new(SEED), versions: vec![VecDeque::new(); pages as usize], last: 0 }
    }

    /// The version that is written next.
    pub(super) fn write(&mut self) -> Version {
        let page = self.rng.below(self.versions.len() as u64);
        self.last += 1;
        self.versions[page as usize].push_back(self.last);
        Version { page, number: self.last }
    }

    /// The versions that a truncation takes away from one page, the oldest first.
    pub(super) fn truncate(&mut self, page: u64) -> Vec<Version> {
        let versions = &mut self.versions[page as usize];
        let over = versions.len().saturating_sub(KEPT);
        versions.drain(..over).map(|number| Version { page, number }).collect()
    }

    /// The versions of a page that are there, the oldest first.
    pub(super) fn of(&self, page: u64) -> impl Iterator<Item = Version> + '_ {
        self.versions[page as usize].iter().map(move |&number| Version { page, number })
    }
}

#[cfg(test)]
mod tests {
    use super::{History, KEPT, Version};

    #[test]
    fn the_oldest_versions_go_and_numbers_rise() {
        let mut history = History::new(10);
        let mut written: Vec<Version> = (0..200).map(|_| history.write()).collect();
        assert!(written.iter().zip(1..).all(|(version, number)| version.number == number));
        for page in 0..10 {
            let here: Vec<Version> = written.iter().copied().filter(|version| version.page == page).collect();
            assert!(here.len() > KEPT, "twenty on average");
            let gone = history.truncate(page);
            assert_eq!(gone, here[..here.len() - KEPT]);
            assert!(history.of(page).eq(here[here.len() - KEPT..].iter().copied()));
            assert!(history.truncate(page).is_empty());
        }
        let mut again = History::new(10);
        assert!(written.drain(..).all(|version| again.write() == version), "it is the same each time");
    }
}
