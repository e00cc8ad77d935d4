//! A simulated persistence backend that loses power. It tracks which stores are durable, and enumerates the states
//! that a power failure can leave.
//!
//! Each line has a list of stores that may not be durable. A flush marks the current length of the list, and a fence
//! makes the stores up to the mark durable. At a power failure any prefix of each line's list may have become
//! durable, independently of other lines. In word mode, each word may have any of the values that were stored into it
//! since.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::Result;
use crate::base::checksum::xxh3;
use crate::mem::persist::LINE;
use crate::mem::region::Region;
use crate::pmem::persistence::{PersistGranularity, PersistSite, PersistenceBackend};
use crate::testing::seeded_rng::SeededRng;
use crate::vfs::fs::PersistenceLevel;

/// A planted fault, which the tests must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SimFault {
    NoFlush(PersistSite),
    NoFence(PersistSite),
    /// The two stores of a site are made in the opposite order.
    Swapped(PersistSite),
}

/// Stores to one line that may not be durable, in their order: (offset, word).
#[derive(Clone, Debug, Default)]
struct SimLine {
    stores: Vec<(u64, u64)>,
    flushed: usize,
}

#[derive(Default)]
struct SimState {
    /// The bytes that are certainly durable.
    durable: Vec<u8>,
    pending: BTreeMap<u64, SimLine>,
    points: Vec<CrashPoint>,
    recording: bool,
    fences: u64,
    flushed_lines: u64,
    /// Sites that flushed or fenced at least once.
    sites_seen: HashSet<PersistSite>,
}

/// The state at a time when power may fail.
pub(crate) struct CrashPoint {
    durable: Vec<u8>,
    pending: BTreeMap<u64, SimLine>,
    granularity: PersistGranularity,
}

pub(crate) struct Sim {
    region: Region,
    granularity: PersistGranularity,
    fault: Option<SimFault>,
    state: Mutex<SimState>,
    stores: AtomicU64,
}

impl Sim {
    /// A backend on which `image` is durable, and which may grow to `len_max` bytes.
    pub(crate) fn new(image: &[u8], len_max: u64, granularity: PersistGranularity, fault: Option<SimFault>) -> Sim {
        let region = Region::private(len_max).unwrap();
        region.grow(image.len() as u64).unwrap();
        region.write(0, &[image], |_, _| ());
        let state = SimState { durable: image.to_vec(), ..SimState::default() };
        Sim { region, granularity, fault, state: Mutex::new(state), stores: AtomicU64::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a crash point at every fence, until [`take_crash_points`](Sim::take_crash_points).
    pub(crate) fn start_recording(&self) {
        self.state().recording = true;
    }

    /// The crash points since [`start_recording`](Sim::start_recording). The last one is the current state.
    pub(crate) fn take_crash_points(&self) -> Vec<CrashPoint> {
        let mut state = self.state();
        state.recording = false;
        let now = state.crash_point(self.granularity);
        let mut points = std::mem::take(&mut state.points);
        points.push(now);
        points
    }

    /// Number of fences and of flushed lines.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.fences, state.flushed_lines)
    }

    pub(crate) fn sites_seen(&self) -> HashSet<PersistSite> {
        self.state().sites_seen.clone()
    }

    /// The current bytes in memory, whether durable or not.
    pub(crate) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.region.len() as usize];
        self.region.read(0, &mut image);
        image
    }

    fn record_store(&self, at: u64, word: u64) {
        self.stores.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        let line = at / LINE as u64 * LINE as u64;
        let durable = u64::from_le_bytes(state.durable[at as usize..][..8].try_into().unwrap());
        let pending = state.pending.entry(line).or_default();
        let last = pending.stores.iter().rev().find(|(place, _)| *place == at).map_or(durable, |(_, word)| *word);
        if last != word {
            pending.stores.push((at, word));
        } else if pending.stores.is_empty() {
            state.pending.remove(&line);
        }
    }
}

impl SimState {
    fn crash_point(&self, granularity: PersistGranularity) -> CrashPoint {
        CrashPoint { durable: self.durable.clone(), pending: self.pending.clone(), granularity }
    }
}

impl PersistenceBackend for Sim {
    fn region(&self) -> &Region {
        &self.region
    }

    fn store(&self, at: u64, word: u64) {
        self.record_store(at, word);
        self.region.store(at, word);
    }

    fn publish(&self, at: u64, word: u64) {
        self.record_store(at, word);
        self.region.store_seqcst(at, word);
    }

    fn write(&self, at: u64, parts: &[&[u8]]) {
        self.region.write(at, parts, |at, word| self.record_store(at, word));
    }

    fn flush(&self, at: u64, len: u64, site: PersistSite) {
        let mut state = self.state();
        state.sites_seen.insert(site);
        let lines = at / LINE as u64..(at + len).div_ceil(LINE as u64);
        state.flushed_lines += lines.end - lines.start;
        if self.fault != Some(SimFault::NoFlush(site)) {
            for line in lines {
                if let Some(line) = state.pending.get_mut(&(line * LINE as u64)) {
                    line.flushed = line.stores.len();
                }
            }
        }
    }

    fn fence(&self, site: PersistSite) {
        let mut state = self.state();
        state.sites_seen.insert(site);
        if state.recording {
            let point = state.crash_point(self.granularity);
            state.points.push(point);
        }
        state.fences += 1;
        if self.fault != Some(SimFault::NoFence(site)) {
            let SimState { durable, pending, .. } = &mut *state;
            for line in pending.values_mut() {
                for (at, word) in line.stores.drain(..std::mem::take(&mut line.flushed)) {
                    durable[at as usize..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
            pending.retain(|_, line| !line.stores.is_empty());
        }
    }

    fn granularity(&self) -> PersistGranularity {
        self.granularity
    }

    fn level(&self) -> PersistenceLevel {
        PersistenceLevel::PowerLoss
    }

    fn grow(&self, len: u64) -> Result<()> {
        self.region.grow(len)?;
        let mut state = self.state();
        let len = state.durable.len().max(len as usize);
        state.durable.resize(len, 0);
        Ok(())
    }

    fn publish_both(&self, first: (u64, u64), second: (u64, u64), site: PersistSite) {
        let swapped = self.fault == Some(SimFault::Swapped(site));
        let (first, second) = if swapped { (second, first) } else { (first, second) };
        self.publish(first.0, first.1);
        if self.granularity() == PersistGranularity::Word {
            self.flush(first.0, 8, site);
            self.fence(site);
        }
        self.publish(second.0, second.1);
    }
}

/// Independent choices of the stores that became durable. Each lists the stores of which a prefix may be durable.
type CrashChoices = Vec<Vec<(u64, u64)>>;

impl CrashPoint {
    fn choices(&self) -> CrashChoices {
        match self.granularity {
            PersistGranularity::Line => self.pending.values().map(|line| line.stores.clone()).collect(),
            PersistGranularity::Word => {
                let mut words: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
                for (at, word) in self.pending.values().flat_map(|line| &line.stores) {
                    words.entry(*at).or_default().push((*at, *word));
                }
                words.into_values().collect()
            }
        }
    }

    /// Calls `visit` with every image that a power failure can leave here, each once. If there are more than `bound`
    /// combinations, it visits the corner cases and `bound` random combinations.
    pub(crate) fn images(&self, bound: usize, rng: &mut SeededRng, mut visit: impl FnMut(&[u8])) -> usize {
        let choices = self.choices();
        let lens: Vec<usize> = choices.iter().map(Vec::len).collect();
        let mut seen = HashSet::new();
        let mut image = self.durable.clone();
        let mut show = |kept: &[usize]| {
            for (choice, kept) in choices.iter().zip(kept) {
                for (at, word) in &choice[..*kept] {
                    image[*at as usize..][..8].copy_from_slice(&word.to_le_bytes());
                }
            }
            if seen.insert(xxh3(1, &image)) {
                visit(&image);
            }
            for (at, _) in choices.iter().flatten() {
                let at = *at as usize;
                image[at..at + 8].copy_from_slice(&self.durable[at..at + 8]);
            }
        };
        let states = lens.iter().try_fold(1usize, |states, len| states.checked_mul(len + 1).filter(|n| *n <= bound));
        if states.is_some() {
            let mut kept = vec![0; lens.len()];
            loop {
                show(&kept);
                let Some(next) = (0..lens.len()).find(|n| kept[*n] < lens[*n]) else { break };
                kept[next] += 1;
                kept[..next].fill(0);
            }
        } else {
            corners(&lens, &mut show);
            for _ in 0..bound {
                let kept: Vec<usize> = lens.iter().map(|len| rng.below(len + 1)).collect();
                show(&kept);
            }
        }
        seen.len()
    }
}

/// No store, all stores, all but one choice, only one choice, and each prefix and suffix of the choices.
fn corners(lens: &[usize], show: &mut impl FnMut(&[usize])) {
    let none = vec![0; lens.len()];
    show(&none);
    show(lens);
    for n in 0..lens.len() {
        let mut only = none.clone();
        only[n] = lens[n];
        show(&only);
        let mut but = lens.to_vec();
        but[n] = 0;
        show(&but);
        let mut first = none.clone();
        first[..n].copy_from_slice(&lens[..n]);
        show(&first);
        let mut last = none.clone();
        last[n..].copy_from_slice(&lens[n..]);
        show(&last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::pages::PAGE;

    fn states(sim: &Sim, bound: usize) -> Vec<[u64; 10]> {
        let mut states = Vec::new();
        for point in sim.take_crash_points() {
            point.images(bound, &mut SeededRng::new(1), |image| {
                states.push(std::array::from_fn(|n| u64::from_le_bytes(image[8 * n..][..8].try_into().unwrap())));
            });
        }
        states.sort();
        states.dedup();
        states
    }

    fn sim(granularity: PersistGranularity, fault: Option<SimFault>) -> Sim {
        Sim::new(&[0; PAGE as usize], PAGE, granularity, fault)
    }

    #[test]
    fn lines_keep_an_order_and_words_do_not() {
        for (granularity, expected) in [(PersistGranularity::Line, 6), (PersistGranularity::Word, 12)] {
            let sim = sim(granularity, None);
            for (at, word) in [(0, 1), (8, 2), (0, 3)] {
                sim.store(at, word);
            }
            sim.publish(64, 4);
            let states = states(&sim, 100);
            let word_of = |n: usize| states.iter().map(|state| state[n]).collect::<HashSet<_>>();
            assert_eq!((word_of(0).len(), word_of(1).len(), word_of(8).len()), (3, 2, 2));
            // Of a line: nothing, 1, 1 and 2, 3 and 2.
            assert_eq!(states.len(), if expected == 6 { 8 } else { expected });
        }
    }

    #[test]
    fn only_flushed_and_fenced_lines_are_durable() {
        let sim = sim(PersistGranularity::Line, None);
        sim.start_recording();
        sim.store(0, 1);
        sim.flush(0, 8, PersistSite::PutSlot);
        sim.store(8, 2);
        sim.store(64, 3);
        sim.fence(PersistSite::PutReady);
        let points = sim.take_crash_points();
        assert_eq!(points.len(), 2);
        let mut images = Vec::new();
        points[1].images(100, &mut SeededRng::new(1), |image| images.push((image[0], image[8], image[64])));
        images.sort_unstable();
        assert_eq!(images, [(1, 0, 0), (1, 0, 3), (1, 2, 0), (1, 2, 3)]);
        assert_eq!(sim.counts(), (1, 1));
        assert_eq!(sim.image()[..9], [1, 0, 0, 0, 0, 0, 0, 0, 2]);
    }

    #[test]
    fn planted_faults_do_what_they_say() {
        for fault in [SimFault::NoFlush(PersistSite::PutSlot), SimFault::NoFence(PersistSite::PutReady)] {
            let sim = sim(PersistGranularity::Line, Some(fault));
            sim.store(0, 1);
            sim.flush(0, 8, PersistSite::PutSlot);
            sim.fence(PersistSite::PutReady);
            assert_eq!(states(&sim, 100).len(), 2);
        }
        let sim = sim(PersistGranularity::Line, Some(SimFault::Swapped(PersistSite::SplitLink)));
        sim.publish_both((0, 1), (8, 2), PersistSite::SplitLink);
        assert_eq!(
            states(&sim, 100).iter().map(|state| (state[0], state[1])).collect::<Vec<_>>(),
            [(0, 0), (0, 2), (1, 2)]
        );
    }

    #[test]
    fn beyond_the_bound_there_are_corners_and_picks() {
        let sim = sim(PersistGranularity::Word, None);
        (0..40).for_each(|n| sim.store(8 * n, n + 1));
        let point = sim.take_crash_points().pop().unwrap();
        let mut all = 0;
        let shown =
            point.images(50, &mut SeededRng::new(1), |image| all += usize::from(image[312] == 40 && image[0] == 1));
        assert!((150..300).contains(&shown) && all > 0, "{shown}");
    }
}
