//! Failures of a cluster while clients run: nodes are killed, paused and cut off, and their wall clocks jump.

use crate::clocks::Clocks;
use crate::cluster::Cluster;
use crate::faults::ARGUMENTS;
use crate::namespaces::Namespaces;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Failure {
    /// Ends a node, and starts it again when the others have applied this many entries.
    Kill(u64),
    /// Stops the process of the leader or of a follower for a while.
    Pause {
        is_leader: bool,
    },
    /// Cuts the leader or a follower off from the network for a while.
    Cut {
        is_leader: bool,
    },
    Jump,
}

const FAILURES: [Failure; 8] = [
    Failure::Kill(10),
    Failure::Pause { is_leader: true },
    Failure::Jump,
    Failure::Cut { is_leader: true },
    // The node misses more entries than the log keeps.
    Failure::Kill(60),
    Failure::Pause { is_leader: false },
    Failure::Jump,
    Failure::Cut { is_leader: false },
];

/// Entries that are applied between two failures, and during a pause or a cut.
const ENTRIES_BETWEEN: u64 = 20;
const ENTRIES_DURING: u64 = 5;

/// A cluster of three nodes, and the failures that it has had.
pub(crate) struct Nemesis {
    pub(crate) cluster: Cluster,
    counts: BTreeMap<&'static str, u64>,
    /// Whether there was each failure. Clients run until then.
    pub(crate) is_complete: Arc<AtomicBool>,
}

impl Nemesis {
    /// What this machine does not allow is left out, with a note.
    pub(crate) async fn new() -> Nemesis {
        let mut cluster = match Namespaces::new(3) {
            Ok(namespaces) => Cluster::in_namespaces(&ARGUMENTS, namespaces),
            Err(why) => {
                println!("skipped: cuts in a history need network namespaces: {why}");
                Cluster::new(&ARGUMENTS)
            }
        };
        match Clocks::new() {
            Ok(clocks) => cluster.clocks = Some(clocks),
            Err(why) => println!("skipped: clock jumps in a history need a C compiler: {why}"),
        }
        cluster.form(1..=3).await;
        Nemesis { cluster, counts: BTreeMap::new(), is_complete: Arc::default() }
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        (1..=3).map(|id| self.cluster.address(id)).collect()
    }

    /// One failure after the other, without an end.
    pub(crate) async fn run(&mut self) {
        for (i, failure) in FAILURES.into_iter().cycle().enumerate() {
            self.is_complete.store(i >= FAILURES.len(), Ordering::Relaxed);
            self.cluster.wait_for_progress(ENTRIES_BETWEEN).await;
            let leader = self.cluster.wait_for_leader().await;
            let one_of_all = i as u64 % 3 + 1;
            match failure {
                Failure::Kill(entries) => {
                    self.cluster.kill(one_of_all).await;
                    self.cluster.wait_for_progress(entries).await;
                    self.cluster.start(one_of_all).await;
                    self.count("kills");
                }
                Failure::Pause { is_leader } => {
                    let id = if is_leader { leader } else { leader % 3 + 1 };
                    self.cluster.signal(id, Signal::STOP);
                    self.wait_for_others(id).await;
                    self.cluster.signal(id, Signal::CONT);
                    self.count("pauses");
                }
                Failure::Cut { is_leader } => {
                    let id = if is_leader { leader } else { leader % 3 + 1 };
                    let Some(namespaces) = &self.cluster.namespaces else { continue };
                    namespaces.cut(id);
                    self.wait_for_others(id).await;
                    self.cluster.namespaces.as_ref().expect("found above").heal(id);
                    self.count("cuts");
                }
                Failure::Jump => {
                    let Some(clocks) = &self.cluster.clocks else { continue };
                    clocks.set(one_of_all, clock_offset(self.counts.get("jumps").copied().unwrap_or_default()));
                    self.count("jumps");
                }
            }
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    async fn wait_for_others(&self, id: u64) {
        let others: Vec<u64> = (1..=3).filter(|other| *other != id).collect();
        self.cluster.wait_for_progress_of(&others, ENTRIES_DURING).await;
    }

    /// Ends the failure in which `run` was ended, and asserts that there was one of each kind.
    pub(crate) async fn end(&mut self) {
        for id in 1..=3 {
            if self.cluster.nodes.contains_key(&id) {
                self.cluster.signal(id, Signal::CONT);
            }
            if let Some(namespaces) = &self.cluster.namespaces {
                namespaces.heal(id);
            }
            if !self.cluster.nodes.contains_key(&id) {
                self.cluster.start(id).await;
            }
        }
        let count = |what: &str| self.counts.get(what).copied().unwrap_or_default();
        assert!(count("kills") >= 2 && count("pauses") >= 2, "{:?}", self.counts);
        assert!(self.cluster.namespaces.is_none() || count("cuts") >= 2, "{:?}", self.counts);
        assert!(self.cluster.clocks.is_none() || count("jumps") >= 2, "{:?}", self.counts);
    }
}

/// Seconds by which a wall clock is wrong: an hour, years, near the begin of 1970.
fn clock_offset(number: u64) -> i64 {
    const HOUR: i64 = 3600;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    [HOUR, -HOUR, 10 * 365 * 24 * HOUR, -now + HOUR][number as usize % 4]
}
