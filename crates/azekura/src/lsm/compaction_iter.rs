//! The versions of each key that survive a flush or a compaction, and the tables that they are written to.
//!
//! The drop rules are a pure function of order, kinds and snapshots of the versions of one key. A `Put` includes a
//! value in a blob file.
//!
//! The snapshots, ascending, divide the sequence numbers into stripes: stripe `i` has the sequence numbers above
//! snapshot `i - 1` and up to snapshot `i`. The stripe after the last snapshot is *open*, because a reader may still
//! read at any sequence number in it. In a closed stripe only the newest version of a key is visible; in the open one
//! every version may be.
//!
//! - A version below a newer one of its closed stripe is dropped. The exception is the newest tombstone directly below
//!   a `Put`: it stays while an older version may exist, because a later `SingleDelete` would remove the `Put` and
//!   expose the older version.
//! - A `SingleDelete` and the next older `Put` of its closed stripe are dropped together. A `SingleDelete` whose next
//!   older version is another tombstone of its stripe hides nothing more than that one, and is dropped alone.
//! - Tombstones are deferred until it is known whether an older version of the key is kept. If none is kept, and no
//!   table outside of the compaction can have one, the tombstones are dropped.

use std::sync::Arc;

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::output::TableOutputWriter;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::version::{HasTableMeta, SortedRun};

/// Merges the inputs of a flush or a compaction and writes the versions that are kept. It can pause after any entry.
///
/// It uses the snapshots of its creation. Later readers read at or above the last of them, where every version is kept.
pub(crate) struct CompactionIter {
    input: MergingIter,
    order: KeyOrder,
    rules: VersionDropRules,
    older_runs: OlderRuns<TableHandle>,
    /// Whether sequence numbers may be set to 0. Not on level 0, whose runs are ordered by sequence number.
    zero_seqnos: bool,
    started: bool,
    /// The current user key.
    key: Vec<u8>,
    in_key: bool,
    is_base_level_for_key: bool,
    /// Whether an entry of the current key was written.
    key_written: bool,
}

impl CompactionIter {
    /// `snapshots`: those of all readers, ascending. `older_runs` are older than every input.
    pub(crate) fn new(
        order: &KeyOrder,
        inputs: Vec<Box<dyn InternalIter>>,
        snapshots: Vec<SeqNo>,
        older_runs: Vec<Arc<SortedRun<TableHandle>>>,
        zero_seqnos: bool,
    ) -> CompactionIter {
        CompactionIter {
            input: MergingIter::new(order.clone(), inputs),
            order: order.clone(),
            rules: VersionDropRules::new(snapshots),
            older_runs: OlderRuns::new(order.clone(), older_runs),
            zero_seqnos,
            started: false,
            key: Vec::new(),
            in_key: false,
            is_base_level_for_key: false,
            key_written: false,
        }
    }

    /// Continues for about `budget` bytes of entries; true at the end.
    pub(crate) fn step(&mut self, budget: u64, output: &mut TableOutputWriter) -> Result<bool> {
        if !self.started {
            self.input.seek_to_first()?;
            self.started = true;
        }
        let mut passed = 0;
        while self.input.valid() {
            if passed >= budget {
                return Ok(false);
            }
            let user_key = self.input.entry().user_key;
            if !self.in_key || self.order.cmp(&self.key, user_key).is_ne() {
                self.finish_key(output)?;
                self.begin_key();
            }
            passed += self.process_entry(output)?;
            self.input.next()?;
        }
        self.finish_key(output)?;
        Ok(true)
    }

    fn begin_key(&mut self) {
        let user_key = self.input.entry().user_key;
        self.key.clear();
        self.key.extend_from_slice(user_key);
        self.in_key = true;
        self.is_base_level_for_key = !self.older_runs.may_contain_key(user_key);
        self.key_written = false;
    }

    /// Decides about the current entry of the input, and returns its size in bytes.
    fn process_entry(&mut self, output: &mut TableOutputWriter) -> Result<u64> {
        let entry = self.input.entry();
        if self.rules.decide(entry.seqno, entry.kind) == DropDecision::Keep {
            for (seqno, kind) in self.rules.take_deferred() {
                output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
                self.key_written = true;
            }
            let seqno =
                self.rules.output_seqno(entry.seqno, entry.kind, self.zero_seqnos && self.is_base_level_for_key);
            output.add(EntryRef { seqno, ..entry }, !self.key_written)?;
            self.key_written = true;
        }
        Ok((entry.user_key.len() + entry.value.len() + size_of::<SeqNo>()) as u64)
    }

    fn finish_key(&mut self, output: &mut TableOutputWriter) -> Result<()> {
        for (seqno, kind) in self.rules.finish_key(self.is_base_level_for_key) {
            output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
            self.key_written = true;
        }
        self.in_key = false;
        Ok(())
    }
}

fn tombstone(user_key: &[u8], seqno: SeqNo, kind: RecordKind) -> EntryRef<'_> {
    EntryRef { user_key, seqno, kind, value: &[] }
}

/// The decision about a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DropDecision {
    /// No reader can see it.
    Drop,
    /// A tombstone. [`VersionDropRules::take_deferred`] returns it if it is kept, or [`VersionDropRules::finish_key`].
    Defer,
    /// The version is kept, and so are the deferred tombstones: write [`VersionDropRules::take_deferred`] first.
    Keep,
}

/// The version directly above the next one. It is kept or deferred.
#[derive(Clone, Copy, Debug)]
struct NewerVersion {
    stripe: usize,
    kind: RecordKind,
}

/// A deferred tombstone.
#[derive(Clone, Copy, Debug)]
struct DeferredTombstone {
    seqno: SeqNo,
    kind: RecordKind,
    stripe: usize,
    /// The version above it. This is the version above the next one if the tombstone is dropped.
    newer: Option<NewerVersion>,
}

/// The drop rules, with their state for the current key. The versions of a key are passed from the newest to the
/// oldest.
#[derive(Debug)]
pub(crate) struct VersionDropRules {
    snapshots: Vec<SeqNo>,
    newer: Option<NewerVersion>,
    deferred: Vec<DeferredTombstone>,
}

impl VersionDropRules {
    /// `snapshots` are ascending. Without any, every version may be visible.
    pub(crate) fn new(snapshots: Vec<SeqNo>) -> VersionDropRules {
        debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
        VersionDropRules { snapshots, newer: None, deferred: Vec::new() }
    }

    /// Decides about the next older version of the current key.
    pub(crate) fn decide(&mut self, seqno: SeqNo, kind: RecordKind) -> DropDecision {
        let stripe = self.snapshots.partition_point(|&point| point < seqno);
        let closed = stripe < self.snapshots.len();
        if closed && self.is_below_single_delete(stripe) {
            let single = self.deferred.pop().expect("it was just seen");
            self.newer = single.newer;
            if kind.is_value() {
                return DropDecision::Drop;
            }
        }
        if let Some(newer) = self.newer
            && closed
            && newer.stripe == stripe
            && !(kind.is_tombstone() && newer.kind.is_value())
        {
            return DropDecision::Drop;
        }
        let above = self.newer.replace(NewerVersion { stripe, kind });
        if kind.is_value() {
            return DropDecision::Keep;
        }
        self.deferred.push(DeferredTombstone { seqno, kind, stripe, newer: above });
        DropDecision::Defer
    }

    /// Whether the version directly above the next one is a `SingleDelete` of this stripe.
    fn is_below_single_delete(&self, stripe: usize) -> bool {
        let is_single_delete = self.newer.is_some_and(|newer| newer.kind == RecordKind::SingleDelete);
        is_single_delete && self.deferred.last().is_some_and(|deferred| deferred.stripe == stripe)
    }

    /// The deferred tombstones, newest first. They are kept.
    pub(crate) fn take_deferred(&mut self) -> impl Iterator<Item = (SeqNo, RecordKind)> + '_ {
        self.deferred.drain(..).map(|deferred| (deferred.seqno, deferred.kind))
    }

    /// Ends the key, and returns the tombstones that are kept, newest first. `is_base_level_for_key`: no table outside
    /// of the compaction can contain an older version of the key.
    pub(crate) fn finish_key(&mut self, is_base_level_for_key: bool) -> impl Iterator<Item = (SeqNo, RecordKind)> + '_ {
        self.newer = None;
        if is_base_level_for_key {
            self.deferred.clear();
        }
        self.take_deferred()
    }

    /// The sequence number of a kept version in its table: 0 if no reader needs to distinguish it from older ones.
    ///
    /// Only a `Put` at or below the oldest snapshot may lose its sequence number, and only if no older version exists:
    /// then it is the last version of its key.
    pub(crate) fn output_seqno(&self, seqno: SeqNo, kind: RecordKind, is_base_level_for_key: bool) -> SeqNo {
        let seen_by_all = self.snapshots.first().is_some_and(|&oldest| seqno <= oldest);
        if is_base_level_for_key && seen_by_all && kind.is_value() { SeqNo::ZERO } else { seqno }
    }
}

/// The runs that are older than every input of a compaction. Keys are asked for in ascending order, and each search
/// continues from the previous one.
pub(crate) struct OlderRuns<T> {
    order: KeyOrder,
    /// A run, and the index of its first table that does not end before the last key.
    runs: Vec<(Arc<SortedRun<T>>, usize)>,
}

impl<T: HasTableMeta> OlderRuns<T> {
    pub(crate) fn new(order: KeyOrder, runs: Vec<Arc<SortedRun<T>>>) -> OlderRuns<T> {
        OlderRuns { order, runs: runs.into_iter().map(|run| (run, 0)).collect() }
    }

    /// Whether a table of one of the runs has a key range that contains `key`. Keys must not descend.
    pub(crate) fn may_contain_key(&mut self, key: &[u8]) -> bool {
        let order = &self.order;
        let mut found = false;
        for (run, at) in &mut self.runs {
            let tables = run.tables();
            while tables.get(*at).is_some_and(|table| order.cmp(&table.meta().largest_key.0, key).is_lt()) {
                *at += 1;
            }
            found |= tables.get(*at).is_some_and(|table| order.cmp(&table.meta().smallest_key.0, key).is_le());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use RecordKind::{BlobPointer as B, Delete as D, Put as P, SingleDelete as S};

    use super::*;
    use crate::lsm::version::tests::{run, table};

    type KeyVersions = Vec<(u64, RecordKind)>;

    fn survivors(snapshots: &[u64], versions: &[(u64, RecordKind)], nothing_older: bool) -> KeyVersions {
        let mut retain = VersionDropRules::new(snapshots.iter().map(|&p| SeqNo(p)).collect());
        let mut out = Vec::new();
        for &(seqno, kind) in versions {
            if retain.decide(SeqNo(seqno), kind) == DropDecision::Keep {
                out.extend(retain.take_deferred().map(|(s, k)| (s.0, k)));
                out.push((seqno, kind));
            }
        }
        out.extend(retain.finish_key(nothing_older).map(|(s, k)| (s.0, k)));
        out
    }

    struct DropRulesCase {
        name: &'static str,
        snapshots: &'static [u64],
        versions: &'static [(u64, RecordKind)],
        bottom: &'static [(u64, RecordKind)],
        above: &'static [(u64, RecordKind)],
    }

    const CASES: &[DropRulesCase] = &[
        DropRulesCase {
            name: "one snapshot sees the newest version",
            snapshots: &[9],
            versions: &[(7, P), (5, P), (3, P)],
            bottom: &[(7, P)],
            above: &[(7, P)],
        },
        DropRulesCase {
            name: "each snapshot keeps its version",
            snapshots: &[4, 6, 9],
            versions: &[(8, P), (7, P), (5, P), (3, P), (2, P)],
            bottom: &[(8, P), (5, P), (3, P)],
            above: &[(8, P), (5, P), (3, P)],
        },
        DropRulesCase {
            name: "versions above the last snapshot are kept",
            snapshots: &[4],
            versions: &[(8, P), (7, D), (5, P), (4, P), (3, P)],
            bottom: &[(8, P), (7, D), (5, P), (4, P)],
            above: &[(8, P), (7, D), (5, P), (4, P)],
        },
        DropRulesCase {
            name: "without snapshots all versions are kept",
            snapshots: &[],
            versions: &[(8, P), (7, P)],
            bottom: &[(8, P), (7, P)],
            above: &[(8, P), (7, P)],
        },
        DropRulesCase {
            name: "a tombstone is dropped only at the bottom",
            snapshots: &[9],
            versions: &[(7, D), (5, P)],
            bottom: &[],
            above: &[(7, D)],
        },
        DropRulesCase {
            name: "a tombstone above a kept version is kept",
            snapshots: &[6, 9],
            versions: &[(7, D), (5, P)],
            bottom: &[(7, D), (5, P)],
            above: &[(7, D), (5, P)],
        },
        DropRulesCase {
            name: "a tombstone below a kept version is dropped at the bottom",
            snapshots: &[6, 9],
            versions: &[(7, P), (5, D), (3, P)],
            bottom: &[(7, P)],
            above: &[(7, P), (5, D)],
        },
        DropRulesCase {
            name: "a tombstone above no version is dropped at the bottom",
            snapshots: &[2],
            versions: &[(7, D)],
            bottom: &[],
            above: &[(7, D)],
        },
        DropRulesCase {
            name: "a pair is dropped",
            snapshots: &[9],
            versions: &[(7, S), (5, P)],
            bottom: &[],
            above: &[],
        },
        DropRulesCase {
            name: "a pair with a snapshot between is kept",
            snapshots: &[6, 9],
            versions: &[(7, S), (5, P)],
            bottom: &[(7, S), (5, P)],
            above: &[(7, S), (5, P)],
        },
        DropRulesCase {
            name: "a pair above the last snapshot is kept",
            snapshots: &[3],
            versions: &[(7, S), (5, P)],
            bottom: &[(7, S), (5, P)],
            above: &[(7, S), (5, P)],
        },
        DropRulesCase {
            name: "a single delete without its put is dropped only at the bottom",
            snapshots: &[9],
            versions: &[(7, S)],
            bottom: &[],
            above: &[(7, S)],
        },
        DropRulesCase {
            name: "successive pairs are dropped",
            snapshots: &[9],
            versions: &[(8, S), (7, P), (6, S), (5, P)],
            bottom: &[],
            above: &[],
        },
        DropRulesCase {
            name: "a superseded single delete is kept for the put below",
            snapshots: &[9],
            versions: &[(8, P), (6, S)],
            bottom: &[(8, P)],
            above: &[(8, P), (6, S)],
        },
        DropRulesCase {
            name: "a superseded single delete is dropped with its put",
            snapshots: &[9],
            versions: &[(8, P), (6, S), (5, P)],
            bottom: &[(8, P)],
            above: &[(8, P)],
        },
        DropRulesCase {
            name: "below a pair, a single delete is the newest version",
            snapshots: &[4, 9],
            versions: &[(8, S), (7, P), (6, S), (3, P)],
            bottom: &[(6, S), (3, P)],
            above: &[(6, S), (3, P)],
        },
        DropRulesCase {
            name: "a single delete above a delete is dropped",
            snapshots: &[9],
            versions: &[(8, S), (7, D)],
            bottom: &[],
            above: &[(7, D)],
        },
        DropRulesCase {
            name: "a delete above a single delete supersedes it",
            snapshots: &[9],
            versions: &[(8, D), (7, S), (5, P)],
            bottom: &[],
            above: &[(8, D)],
        },
        DropRulesCase {
            name: "pointers and values supersede each other",
            snapshots: &[6, 9],
            versions: &[(8, B), (7, P), (5, P), (4, B)],
            bottom: &[(8, B), (5, P)],
            above: &[(8, B), (5, P)],
        },
        DropRulesCase {
            name: "a pair with a pointer is dropped",
            snapshots: &[9],
            versions: &[(7, S), (5, B)],
            bottom: &[],
            above: &[],
        },
        DropRulesCase {
            name: "a tombstone below a pointer is kept while an older version may exist",
            snapshots: &[9],
            versions: &[(7, B), (5, D), (3, B)],
            bottom: &[(7, B)],
            above: &[(7, B), (5, D)],
        },
        DropRulesCase {
            name: "a put with sequence number 0",
            snapshots: &[9],
            versions: &[(5, S), (0, P)],
            bottom: &[],
            above: &[],
        },
    ];

    #[test]
    fn drop_rules_match_cases() {
        for case in CASES {
            assert_eq!(survivors(case.snapshots, case.versions, true), case.bottom, "{} (bottom)", case.name);
            assert_eq!(survivors(case.snapshots, case.versions, false), case.above, "{} (above)", case.name);
        }
    }

    #[test]
    fn only_last_put_of_a_key_gets_seqno_0() {
        let retain = VersionDropRules::new(vec![SeqNo(5), SeqNo(9)]);
        assert_eq!(retain.output_seqno(SeqNo(5), P, true), SeqNo(0));
        assert_eq!(retain.output_seqno(SeqNo(5), B, true), SeqNo(0));
        assert_eq!(retain.output_seqno(SeqNo(5), P, false), SeqNo(5));
        assert_eq!(retain.output_seqno(SeqNo(6), P, true), SeqNo(6));
        assert_eq!(retain.output_seqno(SeqNo(5), D, true), SeqNo(5));
        assert_eq!(VersionDropRules::new(Vec::new()).output_seqno(SeqNo(1), P, true), SeqNo(1));
    }

    fn shown(versions: &[(u64, RecordKind)], at: u64) -> Option<u64> {
        let &(seqno, kind) = versions.iter().find(|(seqno, _)| *seqno <= at)?;
        kind.is_value().then_some(seqno)
    }

    fn random(state: &mut u64, below: u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state % below
    }

    /// A valid history of one key, newest first, with even sequence numbers. A `SingleDelete` comes only after exactly
    /// one `Put` since the last tombstone of either kind. Before a `Delete`, the key may have been put any number of
    /// times, or never.
    fn valid_history(rng: &mut u64, len: u64) -> KeyVersions {
        let mut history = KeyVersions::new();
        let mut puts = 0;
        for n in 1..=len {
            let kind = match random(rng, 8) {
                0..4 if puts == 1 => S,
                4 | 5 => D,
                _ => P,
            };
            puts = if kind == P { puts + 1 } else { 0 };
            let kind = if kind == P && random(rng, 2) == 0 { B } else { kind };
            history.insert(0, (n * 2, kind));
        }
        history
    }

    /// The versions of one key in runs, newest first, that compactions merge.
    struct CompactionModel {
        history: KeyVersions,
        runs: Vec<KeyVersions>,
        /// The sequence number of the `Put` before it was set to 0.
        zeroed_seqno: u64,
        snapshots: Vec<u64>,
    }

    impl CompactionModel {
        /// Merges some adjacent runs, as a compaction does. False if there was only one.
        fn merge(&mut self, rng: &mut u64) -> bool {
            let from = random(rng, self.runs.len() as u64) as usize;
            let to = (from + 1 + random(rng, 3) as usize).min(self.runs.len());
            let bottom = to == self.runs.len();
            let mut out = survivors(&self.snapshots, &self.runs[from..to].concat(), bottom);
            let retain = VersionDropRules::new(self.snapshots.iter().map(|&p| SeqNo(p)).collect());
            for (seqno, kind) in &mut out {
                let given = retain.output_seqno(SeqNo(*seqno), *kind, bottom).0;
                if given != *seqno {
                    self.zeroed_seqno = std::mem::replace(seqno, given);
                }
            }
            let whole = self.runs.len() == 1;
            self.runs.splice(from..to, [out]);
            !whole
        }

        /// Snapshots are dropped, commits are added, and some readers stay at the newest sequence number.
        fn advance(&mut self, rng: &mut u64) {
            let newest = *self.snapshots.last().expect("there is always a newest moment");
            let end = self.history[0].0 + 1;
            match random(rng, 6) {
                0 | 1 if self.snapshots.len() > 1 => {
                    let gone = random(rng, self.snapshots.len() as u64 - 1) as usize;
                    self.snapshots.remove(gone);
                }
                2 if newest < end => {
                    if random(rng, 2) == 0 {
                        self.snapshots.pop();
                    }
                    self.snapshots.push(newest + 1 + random(rng, end - newest));
                }
                _ => {}
            }
        }

        fn check(&self) {
            let left = self.runs.concat();
            let newest = *self.snapshots.last().expect("there is always a newest moment");
            for at in self.snapshots.iter().copied().chain(newest..=self.history[0].0 + 1) {
                let seen = shown(&left, at).map(|seqno| if seqno == 0 { self.zeroed_seqno } else { seqno });
                let (snapshots, history) = (&self.snapshots, &self.history);
                assert_eq!(seen, shown(history, at), "at {at} of {snapshots:?}: {history:?} became {left:?}");
            }
        }
    }

    /// The history is cut into runs that are merged in any order, while snapshots are taken and released. The visible
    /// version of every reader never changes.
    #[test]
    fn merges_in_any_order_keep_visible_values() {
        let mut rng = 0x9e37_79b9_7f4a_7c15u64;
        let (mut singles, mut settled) = (0, 0);
        for _ in 0..if cfg!(miri) { 200 } else { 30_000 } {
            let len = 1 + random(&mut rng, 12);
            let history = valid_history(&mut rng, len);
            let visible = random(&mut rng, 2 * len + 2);
            let mut snapshots: Vec<u64> = (0..random(&mut rng, 4)).map(|_| random(&mut rng, visible + 1)).collect();
            snapshots.push(visible);
            snapshots.sort_unstable();
            let runs = history.iter().map(|&version| vec![version]).collect();
            let mut falling = CompactionModel { history, runs, zeroed_seqno: 0, snapshots };
            falling.check();
            while falling.merge(&mut rng) {
                falling.check();
                falling.advance(&mut rng);
            }
            falling.check();
            let kinds: Vec<RecordKind> = falling.history.iter().map(|&(_, kind)| kind).collect();
            singles += usize::from(
                kinds.contains(&S)
                    && kinds.contains(&D)
                    && kinds.windows(2).any(|w| w[0].is_value() && w[1].is_value()),
            );
            settled += usize::from(falling.zeroed_seqno > 0);
        }
        assert!(cfg!(miri) || (singles > 3_000 && settled > 3_000), "{singles} were mixed, {settled} settled");
    }

    #[test]
    fn only_keys_in_table_ranges_may_be_older() {
        let runs = vec![run(vec![table(1, "b", "d"), table(2, "f", "h")]), run(vec![table(3, "m", "m")])];
        let mut older = OlderRuns::new(KeyOrder::bytewise(), runs);
        let answers: Vec<bool> = ["a", "b", "c", "d", "e", "h", "i", "m", "n"]
            .iter()
            .map(|key| older.may_contain_key(key.as_bytes()))
            .collect();
        assert_eq!(answers, [false, true, true, true, false, true, false, true, false]);
    }
}
