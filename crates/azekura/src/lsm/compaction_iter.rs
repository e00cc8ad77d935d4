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
//! - A version that a range delete covers is dropped if the range delete is in its closed stripe.
//! - A value that has expired for every reader that can see it counts as a tombstone.
//! - A `Merge` hides no older version, because its value depends on them. A newer version of its closed stripe hides
//!   it; a `SingleDelete` stays when it hides one. Successive `Merge` versions of a closed stripe become one version
//!   before the other rules see them: a `Put` if the version that they change is in the stripe, or a tombstone or a
//!   range delete of the stripe is directly below them, or nothing older can exist; otherwise, and above a value that
//!   expires, a `Merge`, if the operator can combine operands. If the operator fails, they stay as they are.
//! - Tombstones are deferred until it is known whether an older version of the key is kept. If none is kept, and no
//!   table outside of the compaction can have one, the tombstones are dropped.

use std::sync::Arc;

use crate::base::key::{put_expiry, split_expiry};
use crate::base::key_range::KeyBoundary;
use crate::base::merge_operator::{MergeOperator, merge_fully, merge_partially};
use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{BlobResolver, ExpiryLimits};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::compaction_filter::{AppliedFilter, FilterDecision};
use crate::lsm::output::{PendingOutputs, TableOutputWriter, ValueOrigin};
use crate::lsm::table_handle::TableHandle;
use crate::lsm::version::{HasTableMeta, SortedRun};

/// Merges the inputs of a flush or a compaction and writes the versions that are kept. It can pause after any entry.
///
/// It uses the snapshots of its creation. Later readers read at or above the last of them, where every version is kept.
pub(crate) struct CompactionIter {
    input: MergingIter,
    order: KeyOrder,
    older_runs: OlderRuns<TableHandle>,
    started: bool,
    in_key: bool,
    entries_read: EntriesRead,
    versions: KeyVersionWriter,
}

/// What a [`CompactionIter`] has read, counted in builds with debug assertions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntriesRead {
    count: u64,
    smallest_seqno: SeqNo,
    largest_seqno: SeqNo,
}

impl EntriesRead {
    const NONE: EntriesRead = EntriesRead { count: 0, smallest_seqno: SeqNo::MAX, largest_seqno: SeqNo::ZERO };

    fn add(&mut self, seqno: SeqNo) {
        self.count += 1;
        self.smallest_seqno = self.smallest_seqno.min(seqno);
        self.largest_seqno = self.largest_seqno.max(seqno);
    }

    /// Panics if the finished tables have more, newer or older entries than were read. A compaction may set sequence
    /// numbers to 0.
    pub(crate) fn check_written(&self, outputs: &PendingOutputs) {
        let entries: u64 = outputs.tables.iter().map(|table| table.entries).sum();
        assert!(entries <= self.count, "at most one entry is written for each that is read");
        let largest = outputs.tables.iter().map(|table| table.largest_seqno).max();
        assert!(largest <= Some(self.largest_seqno), "no entry is newer than those that are read");
        let mut smallest = outputs.tables.iter().map(|table| table.smallest_seqno);
        assert!(
            smallest.all(|seqno| seqno == SeqNo::ZERO || seqno >= self.smallest_seqno),
            "no entry is older than those that are read"
        );
    }
}

impl CompactionIter {
    /// `snapshots`: those of all readers, ascending. `older_runs` are older than every input. `range_tombstones`: all
    /// flushed ones, and those of the inputs.
    pub(crate) fn new(
        order: &KeyOrder,
        inputs: Vec<Box<dyn InternalIter>>,
        snapshots: Vec<SeqNo>,
        older_runs: Vec<Arc<SortedRun<TableHandle>>>,
        range_tombstones: Arc<RangeTombstones>,
        zero_seqnos: bool,
    ) -> CompactionIter {
        CompactionIter {
            input: MergingIter::new(order.clone(), inputs),
            order: order.clone(),
            older_runs: OlderRuns::new(order.clone(), older_runs),
            started: false,
            in_key: false,
            entries_read: EntriesRead::NONE,
            versions: KeyVersionWriter {
                rules: VersionDropRules::new(snapshots),
                zero_seqnos,
                range_tombstones: CoveringRangeDeletes::new(range_tombstones, order.clone()),
                key: Vec::new(),
                is_base_level_for_key: false,
                key_written: false,
                filter: None,
                merge: None,
                pending: PendingOperands::default(),
                expiry_limits: ExpiryLimits::default(),
                expiring_value: Vec::new(),
            },
        }
    }

    /// Asks `filter` about the values that the drop rules allow it to decide about, and merges operands with `merge`.
    pub(crate) fn with_components(
        mut self,
        filter: Option<AppliedFilter>,
        merge: Option<AppliedMergeOperator>,
    ) -> CompactionIter {
        debug_assert!(!self.started, "filter and operator are the same for every key");
        (self.versions.filter, self.versions.merge) = (filter, merge);
        self
    }

    /// What was read until now.
    pub(crate) fn entries_read(&self) -> EntriesRead {
        self.entries_read
    }

    /// Drops what has expired by these limits.
    pub(crate) fn with_expiry(mut self, expiry_limits: ExpiryLimits) -> CompactionIter {
        debug_assert!(!self.started, "the limits are the same for every key");
        self.versions.expiry_limits = expiry_limits;
        self
    }

    /// Continues for about `budget` bytes of entries; true at the end.
    pub(crate) fn step(&mut self, budget: u64, output: &mut TableOutputWriter) -> Result<bool> {
        debug_assert!(budget > 0, "a step makes progress");
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
            if !self.in_key || self.order.cmp(&self.versions.key, user_key).is_ne() {
                self.versions.finish_key(output)?;
                let user_key = self.input.entry().user_key;
                self.versions.begin_key(user_key, !self.older_runs.may_contain_key(user_key));
                self.in_key = true;
            }
            let entry = self.input.entry();
            passed += (entry.user_key.len() + entry.value.len() + size_of::<SeqNo>()) as u64;
            if cfg!(debug_assertions) {
                self.entries_read.add(entry.seqno);
            }
            self.versions.add(entry, output)?;
            self.input.next()?;
        }
        self.versions.finish_key(output)?;
        self.in_key = false;
        Ok(true)
    }
}

/// Writes the versions of one key after another, as far as they are kept.
struct KeyVersionWriter {
    rules: VersionDropRules,
    /// Whether sequence numbers may be set to 0. Not on level 0, whose runs are ordered by sequence number.
    zero_seqnos: bool,
    range_tombstones: CoveringRangeDeletes,
    /// The current user key.
    key: Vec<u8>,
    is_base_level_for_key: bool,
    /// Whether an entry of the current key was written.
    key_written: bool,
    filter: Option<AppliedFilter>,
    merge: Option<AppliedMergeOperator>,
    /// The operands directly above the next version. The drop rules do not know them yet.
    pending: PendingOperands,
    expiry_limits: ExpiryLimits,
    /// A value that a filter has replaced, behind its expiry time.
    expiring_value: Vec<u8>,
}

impl KeyVersionWriter {
    fn begin_key(&mut self, user_key: &[u8], is_base_level_for_key: bool) {
        debug_assert!(self.pending.is_empty() && self.rules.is_between_keys(), "the previous key is finished");
        self.key.clear();
        self.key.extend_from_slice(user_key);
        self.is_base_level_for_key = is_base_level_for_key;
        self.range_tombstones.move_to(user_key);
        self.key_written = false;
    }

    /// Takes the next older version of the current key.
    #[inline]
    fn add(&mut self, stored: EntryRef<'_>, output: &mut TableOutputWriter) -> Result<()> {
        let is_custom = self.range_tombstones.order.is_custom();
        debug_assert!(is_custom || stored.user_key == self.key, "the version is one of the current key");
        // An expired record counts as a tombstone, because older versions must not become visible again.
        let stored = match self.expiry_limits.is_expired(&stored)? {
            true => tombstone(stored.user_key, stored.seqno, RecordKind::Delete),
            false => stored,
        };
        let is_deleted = self.rules.is_range_deleted(stored.seqno, self.range_tombstones.seqnos());
        if stored.kind == RecordKind::Merge || !self.pending.is_empty() {
            return self.add_near_operands(stored, is_deleted, output);
        }
        if is_deleted { Ok(()) } else { self.write(stored, ValueOrigin::Stored, output) }
    }

    /// As [`add`](KeyVersionWriter::add), for an operand or a version below one.
    #[cold]
    fn add_near_operands(
        &mut self,
        stored: EntryRef<'_>,
        is_deleted: bool,
        output: &mut TableOutputWriter,
    ) -> Result<()> {
        debug_assert!(
            stored.kind == RecordKind::Merge || !self.pending.is_empty(),
            "the version is an operand or below one"
        );
        let stripe = self.rules.stripe(stored.seqno);
        if !self.pending.is_empty() && self.pending.stripe != stripe {
            self.finish_operands(OperandBase::Unknown, output)?;
        }
        if is_deleted {
            // The range delete is above this version and below the pending operands, if there are any.
            return self.finish_operands(OperandBase::Missing, output).map(drop);
        }
        if stored.kind == RecordKind::Merge {
            if self.pending.is_empty() && self.rules.hides_operand(stored.seqno) {
                return Ok(());
            }
            if self.merge.is_none() || !self.rules.is_closed(stripe) {
                return self.write(stored, ValueOrigin::Stored, output);
            }
            self.pending.push(stored, stripe);
            return match self.pending.bytes > PENDING_OPERAND_BYTES_MAX {
                true => self.finish_operands(OperandBase::Unknown, output).map(drop),
                false => Ok(()),
            };
        }
        let base = match stored.kind {
            // The operands stay above it, because they change nothing once it has expired.
            kind if kind.has_expiry() => OperandBase::Unknown,
            kind if kind.is_value() => OperandBase::Value(stored),
            _ => OperandBase::Missing,
        };
        let is_merged = self.finish_operands(base, output)?;
        if is_merged && stored.kind.is_value() {
            return Ok(()); // the merged value supersedes it
        }
        self.write(stored, ValueOrigin::Stored, output)
    }

    /// Writes the pending operands: as a value if what they change is known, else as one operand if possible. Writes
    /// them unchanged if the operator fails. True if the result is a value.
    fn finish_operands(&mut self, base: OperandBase<'_>, output: &mut TableOutputWriter) -> Result<bool> {
        let pending = std::mem::take(&mut self.pending);
        debug_assert!(pending.is_empty() || self.merge.is_some(), "operands are pending only if they can be merged");
        let (Some(merge), Some(&seqno)) = (&mut self.merge, pending.seqnos.first()) else { return Ok(false) };
        let (user_key, operands) = (&*pending.user_key, &*pending.operands);
        if let Some(value) = merge.merge_fully(user_key, base, operands) {
            let merged = EntryRef { user_key, seqno, kind: RecordKind::Put, value: &value };
            return self.write(merged, ValueOrigin::New, output).map(|()| true);
        }
        if matches!(base, OperandBase::Unknown)
            && operands.len() > 1
            && let Some(value) = merge_partially(&*merge.operator, user_key, operands)
        {
            let merged = EntryRef { user_key, seqno, kind: RecordKind::Merge, value: &value };
            return self.write(merged, ValueOrigin::New, output).map(|()| false);
        }
        for (&seqno, value) in pending.seqnos.iter().zip(operands) {
            let operand = EntryRef { user_key, seqno, kind: RecordKind::Merge, value };
            self.write(operand, ValueOrigin::Stored, output)?;
        }
        Ok(false)
    }

    /// Writes the next older version, unless a rule or the filter drops it.
    fn write(&mut self, stored: EntryRef<'_>, origin: ValueOrigin, output: &mut TableOutputWriter) -> Result<()> {
        let decision = match self.filter.as_mut().filter(|_| self.rules.may_filter(stored.seqno, stored.kind)) {
            Some(filter) => filter.decide(stored, self.is_base_level_for_key)?,
            None => FilterDecision::Keep,
        };
        let (entry, origin) = match &decision {
            FilterDecision::Keep => (stored, origin),
            FilterDecision::Remove => (tombstone(stored.user_key, stored.seqno, RecordKind::Delete), origin),
            FilterDecision::Replace(value) if stored.kind.has_expiry() => {
                self.expiring_value.clear();
                put_expiry(&mut self.expiring_value, split_expiry(stored.kind, stored.value)?.0, value);
                (EntryRef { kind: RecordKind::ExpiringPut, value: &self.expiring_value, ..stored }, ValueOrigin::New)
            }
            FilterDecision::Replace(value) => (EntryRef { kind: RecordKind::Put, value, ..stored }, ValueOrigin::New),
        };
        if self.rules.decide(entry.seqno, entry.kind) == DropDecision::Keep {
            for (seqno, kind) in self.rules.take_deferred() {
                output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
                self.key_written = true;
            }
            // A range delete over the key must not cover a newer entry whose sequence number is lost.
            let may_lose_seqno =
                self.zero_seqnos && self.is_base_level_for_key && self.range_tombstones.seqnos().is_empty();
            let seqno = self.rules.output_seqno(entry.seqno, entry.kind, may_lose_seqno);
            debug_assert!(self.zero_seqnos || seqno == entry.seqno, "entries of level 0 keep their sequence numbers");
            output.add_value(EntryRef { seqno, ..entry }, !self.key_written, origin)?;
            self.key_written = true;
        }
        Ok(())
    }

    fn finish_key(&mut self, output: &mut TableOutputWriter) -> Result<()> {
        let base = if self.is_base_level_for_key { OperandBase::Missing } else { OperandBase::Unknown };
        self.finish_operands(base, output)?;
        for (seqno, kind) in self.rules.finish_key(self.is_base_level_for_key) {
            output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
            self.key_written = true;
        }
        Ok(())
    }
}

/// The merge operator of a flush or a compaction.
pub(crate) struct AppliedMergeOperator {
    pub(crate) operator: Arc<dyn MergeOperator>,
    pub(crate) blobs: Box<dyn BlobResolver>,
}

impl AppliedMergeOperator {
    /// The value of a key after `operands`, from the newest to the oldest. `None` if what they change is not known or
    /// cannot be read, or the operator fails: then a reader of the key gets the error.
    fn merge_fully(&mut self, key: &[u8], base: OperandBase<'_>, operands: &[Vec<u8>]) -> Option<Vec<u8>> {
        let blob_value;
        let existing = match base {
            OperandBase::Unknown => return None,
            OperandBase::Missing => None,
            OperandBase::Value(entry) if entry.kind == RecordKind::BlobPointer => {
                blob_value = self.blobs.resolve(entry.value).ok()?;
                Some(&*blob_value)
            }
            OperandBase::Value(entry) => Some(entry.value),
        };
        merge_fully(&*self.operator, key, existing, operands).ok()
    }
}

/// What operands change.
#[derive(Clone, Copy)]
enum OperandBase<'a> {
    /// A version that the inputs may not have.
    Unknown,
    /// The key has no value below them.
    Missing,
    /// A value, inline or in a blob file.
    Value(EntryRef<'a>),
}

/// Pending operands are merged partially, or written unchanged, when they have more bytes than this. Tests have shorter
/// operands.
const PENDING_OPERAND_BYTES_MAX: usize = if cfg!(any(test, feature = "testing")) { 4 << 10 } else { 16 << 20 };

/// Successive operands of one key in one closed stripe, from the newest to the oldest.
#[derive(Default)]
struct PendingOperands {
    user_key: Vec<u8>,
    stripe: usize,
    seqnos: Vec<SeqNo>,
    operands: Vec<Vec<u8>>,
    bytes: usize,
}

impl PendingOperands {
    fn is_empty(&self) -> bool {
        self.seqnos.is_empty()
    }

    fn push(&mut self, entry: EntryRef<'_>, stripe: usize) {
        if self.is_empty() {
            self.user_key = entry.user_key.to_vec();
            self.stripe = stripe;
        }
        debug_assert!(entry.kind == RecordKind::Merge, "only operands are pending");
        debug_assert_eq!(self.stripe, stripe, "pending operands are in one stripe");
        self.seqnos.push(entry.seqno);
        self.operands.push(entry.value.to_vec());
        self.bytes += entry.value.len() + size_of::<Vec<u8>>() + size_of::<SeqNo>();
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

    /// Whether no version of a key was passed since the last one was finished.
    fn is_between_keys(&self) -> bool {
        self.newer.is_none() && self.deferred.is_empty()
    }

    fn stripe(&self, seqno: SeqNo) -> usize {
        self.snapshots.partition_point(|&point| point < seqno)
    }

    fn is_closed(&self, stripe: usize) -> bool {
        stripe < self.snapshots.len()
    }

    /// Whether a newer version hides the next older one of the current key, an operand.
    fn hides_operand(&self, seqno: SeqNo) -> bool {
        let stripe = self.stripe(seqno);
        let hides = |newer: NewerVersion| newer.stripe == stripe && newer.kind != RecordKind::Merge;
        self.is_closed(stripe) && self.newer.is_some_and(hides)
    }

    /// Decides about the next older version of the current key.
    pub(crate) fn decide(&mut self, seqno: SeqNo, kind: RecordKind) -> DropDecision {
        let stripe = self.stripe(seqno);
        let closed = self.is_closed(stripe);
        if closed && kind != RecordKind::Merge && self.is_below_single_delete(stripe) {
            let single = self.deferred.pop().expect("it was just seen");
            debug_assert_eq!(single.kind, RecordKind::SingleDelete, "the version above is the last deferred tombstone");
            self.newer = single.newer;
            if kind.is_value() {
                return DropDecision::Drop;
            }
        }
        if let Some(newer) = self.newer
            && closed
            && newer.stripe == stripe
            && newer.kind != RecordKind::Merge
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

    /// Whether a compaction filter may decide about the next older version of the current key: it is a value, and the
    /// newest version at or below the last snapshot, and not needed by another snapshot.
    pub(crate) fn may_filter(&self, seqno: SeqNo, kind: RecordKind) -> bool {
        let stripe = self.stripe(seqno);
        let is_last = stripe + 1 == self.snapshots.len();
        kind.is_value() && kind != RecordKind::Merge && is_last && self.newer.is_none_or(|newer| newer.stripe != stripe)
    }

    /// Whether no reader can see an entry, because one of the range deletes over its key covers it. `covering`: their
    /// sequence numbers, newest first. It is dropped if a newer range delete is in its closed stripe.
    pub(crate) fn is_range_deleted(&self, seqno: SeqNo, covering: &[SeqNo]) -> bool {
        debug_assert!(covering.is_sorted_by(|a, b| a > b), "range deletes are newest first");
        let Some(next) = covering.iter().rfind(|&&range_delete| range_delete > seqno) else { return false };
        let stripe = self.snapshots.partition_point(|point| point < next);
        stripe < self.snapshots.len() && self.snapshots.partition_point(|&point| point < seqno) == stripe
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
        let may_lose = is_base_level_for_key && seen_by_all && kind.is_value() && kind != RecordKind::Merge;
        if may_lose { SeqNo::ZERO } else { seqno }
    }
}

/// The range deletes that cover the current key of a merge, whose keys ascend.
pub(crate) struct CoveringRangeDeletes {
    set: Arc<RangeTombstones>,
    order: KeyOrder,
    /// Newest first.
    seqnos: Vec<SeqNo>,
    /// The end of the keys that have the same range deletes.
    end: KeyBoundary,
}

impl CoveringRangeDeletes {
    pub(crate) fn new(set: Arc<RangeTombstones>, order: KeyOrder) -> CoveringRangeDeletes {
        let end = if set.is_empty() { KeyBoundary::Max } else { KeyBoundary::Min };
        CoveringRangeDeletes { set, order, seqnos: Vec::new(), end }
    }

    /// Keys must not descend.
    #[inline]
    pub(crate) fn move_to(&mut self, key: &[u8]) {
        if self.end.cmp_key(key, &self.order).is_lt() {
            let (range, seqnos) = self.set.fragment_or_gap(key, &self.order);
            self.end = range.end;
            self.seqnos.clear();
            self.seqnos.extend_from_slice(seqnos);
        }
    }

    pub(crate) fn seqnos(&self) -> &[SeqNo] {
        &self.seqnos
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
        debug_assert!(runs.iter().all(|run| !run.tables().is_empty()), "a run has at least one table");
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
    use RecordKind::{BlobPointer as B, Delete as D, Merge as M, Put as P, SingleDelete as S};

    use super::*;
    use crate::lsm::version::tests::{run, table};
    use crate::testing::seeded_rng::SeededRng;

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

    #[test]
    fn filter_sees_newest_value_above_snapshots() {
        // Snapshots at 4 and 6; 9 is the last visible sequence number.
        let mut rules = VersionDropRules::new(vec![SeqNo(4), SeqNo(6), SeqNo(9)]);
        let mut asked = Vec::new();
        for (seqno, kind) in [(11, P), (9, B), (8, P), (6, P), (3, P)] {
            if rules.may_filter(SeqNo(seqno), kind) {
                asked.push(seqno);
            }
            rules.decide(SeqNo(seqno), kind);
        }
        assert_eq!(asked, [9]);
        let mut rules = VersionDropRules::new(vec![SeqNo(9)]);
        assert!(![D, S, M].iter().any(|&kind| rules.may_filter(SeqNo(7), kind)));
        rules.decide(SeqNo(7), S);
        assert!(!rules.may_filter(SeqNo(5), P), "the removal above hides it");
        assert!(!VersionDropRules::new(Vec::new()).may_filter(SeqNo(5), P));
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
            name: "an operand keeps the value below it",
            snapshots: &[9],
            versions: &[(8, M), (7, M), (5, P), (3, P)],
            bottom: &[(8, M), (7, M), (5, P)],
            above: &[(8, M), (7, M), (5, P)],
        },
        DropRulesCase {
            name: "a newer value or tombstone hides operands",
            snapshots: &[4, 9],
            versions: &[(8, P), (7, M), (4, D), (3, M), (2, P)],
            bottom: &[(8, P)],
            above: &[(8, P), (4, D)],
        },
        DropRulesCase {
            name: "an operand above a tombstone",
            snapshots: &[9],
            versions: &[(8, M), (7, D), (5, P)],
            bottom: &[(8, M)],
            above: &[(8, M), (7, D)],
        },
        DropRulesCase {
            name: "a single delete stays when it hides an operand",
            snapshots: &[9],
            versions: &[(8, S), (7, M)],
            bottom: &[],
            above: &[(8, S)],
        },
        DropRulesCase {
            name: "a single delete is dropped with the put below the operands",
            snapshots: &[9],
            versions: &[(8, S), (7, M), (6, M), (5, P)],
            bottom: &[],
            above: &[],
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
        assert_eq!(retain.output_seqno(SeqNo(5), M, true), SeqNo(5));
        assert_eq!(VersionDropRules::new(Vec::new()).output_seqno(SeqNo(1), P, true), SeqNo(1));
    }

    /// The versions that make up the value that a reader sees: the operands, and the `Put` below them.
    fn shown(versions: &[(u64, RecordKind)], at: u64) -> Vec<u64> {
        let mut seen = Vec::new();
        for &(seqno, kind) in versions.iter().filter(|(seqno, _)| *seqno <= at) {
            seen.extend(kind.is_value().then_some(seqno));
            if kind != M {
                break;
            }
        }
        seen
    }

    /// A valid history of one key, newest first, with even sequence numbers. A `SingleDelete` comes only after exactly
    /// one `Put` since the last tombstone of either kind, with operands above it, or after operands only. Before a
    /// `Delete`, the key may have been put any number of times, or never.
    fn valid_history(rng: &mut SeededRng, len: u64) -> KeyVersions {
        let mut history = KeyVersions::new();
        let mut puts = 0;
        for n in 1..=len {
            let kind = match rng.below(10) {
                0..4 if puts == 1 => S,
                4 | 5 => D,
                6 | 7 => M,
                _ => P,
            };
            puts = match kind {
                P => puts + 1,
                M => puts.max(1),
                _ => 0,
            };
            let kind = if kind == P && rng.below(2) == 0 { B } else { kind };
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
        fn merge(&mut self, rng: &mut SeededRng) -> bool {
            let from = rng.below(self.runs.len());
            let to = (from + 1 + rng.below(3)).min(self.runs.len());
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
        fn advance(&mut self, rng: &mut SeededRng) {
            let newest = *self.snapshots.last().expect("there is always a newest snapshot");
            let end = self.history[0].0 + 1;
            match rng.below(6) {
                0 | 1 if self.snapshots.len() > 1 => {
                    let dropped_at = rng.below(self.snapshots.len() - 1);
                    self.snapshots.remove(dropped_at);
                }
                2 if newest < end => {
                    if rng.below(2) == 0 {
                        self.snapshots.pop();
                    }
                    self.snapshots.push(newest + 1 + rng.below(end - newest));
                }
                _ => {}
            }
        }

        fn check(&self) {
            let entries = self.runs.concat();
            let newest = *self.snapshots.last().expect("there is always a newest snapshot");
            for at in self.snapshots.iter().copied().chain(newest..=self.history[0].0 + 1) {
                let mut seen = shown(&entries, at);
                seen.iter_mut().filter(|seqno| **seqno == 0).for_each(|seqno| *seqno = self.zeroed_seqno);
                let (snapshots, history) = (&self.snapshots, &self.history);
                assert_eq!(seen, shown(history, at), "at {at} of {snapshots:?}: {history:?} became {entries:?}");
            }
        }
    }

    /// The history is cut into runs that are merged in any order, while snapshots are created and dropped. The visible
    /// version of every reader never changes.
    #[test]
    fn merges_in_any_order_keep_visible_values() {
        let mut rng = SeededRng::new(1);
        let (mut singles, mut settled) = (0, 0);
        for _ in 0..if cfg!(miri) { 200 } else { 30_000 } {
            let len = 1 + rng.below(12);
            let history = valid_history(&mut rng, len);
            let visible = rng.below(2 * len + 2);
            let mut snapshots: Vec<u64> = (0..rng.below(4)).map(|_| rng.below(visible + 1)).collect();
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
