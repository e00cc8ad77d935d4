//! The sequence numbers and the times at which readers read, and the list of those that are registered.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::key::split_expiry;
use crate::base::sync::CachePadded;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, Result, SeqNo};
use crate::engine::EngineView;
use crate::mem::atomic::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, SCHEDULE_EXPLORATION, lock};
use crate::vfs::env::OpeningProcess;
use crate::vfs::expiry_clock::ExpiryClock;

/// What a reader sees: the records up to a sequence number that have not expired at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadMoment {
    pub(crate) seqno: SeqNo,
    /// In milliseconds since 1970. 0 if the reader has no time, because it can see no record that expires, except in
    /// its own transaction: nothing has expired then.
    pub(crate) now_ms: u64,
}

impl From<SeqNo> for ReadMoment {
    /// A reader that sees expired records too.
    fn from(seqno: SeqNo) -> ReadMoment {
        ReadMoment { seqno, now_ms: 0 }
    }
}

/// Until when a record must have expired, so that no reader sees it: what the registered readers and all later ones
/// have in common. The default is that no record has expired.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExpiryLimits {
    /// The sequence number of each registered reader, ascending, with the lowest time of the reader and all behind it.
    readers: Vec<ReadMoment>,
    /// The lowest time of later readers.
    pub(crate) now_ms: u64,
}

impl ExpiryLimits {
    /// A record with this sequence number that expires at or before the result has expired for every reader that can
    /// see it.
    pub(crate) fn limit_ms(&self, seqno: SeqNo) -> u64 {
        let at = self.readers.partition_point(|reader| reader.seqno < seqno);
        self.readers.get(at).map_or(self.now_ms, |reader| reader.now_ms)
    }

    /// Whether an entry has expired for every reader that can see it.
    ///
    /// # Errors
    /// As [`split_expiry`].
    #[inline]
    pub(crate) fn is_expired(&self, entry: &EntryRef<'_>) -> Result<bool> {
        expires_by(entry, || self.limit_ms(entry.seqno))
    }

    /// Whether an entry has expired for every reader that begins later.
    ///
    /// # Errors
    /// As [`split_expiry`].
    pub(crate) fn is_expired_now(&self, entry: &EntryRef<'_>) -> Result<bool> {
        expires_by(entry, || self.now_ms)
    }
}

#[inline]
fn expires_by(entry: &EntryRef<'_>, limit_ms: impl FnOnce() -> u64) -> Result<bool> {
    Ok(entry.kind.has_expiry() && split_expiry(entry.kind, entry.value)?.0 <= limit_ms())
}

/// The newest sequence number that readers may see. `db` advances it by whole commits; the trees read it.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastVisibleSeqno(pub(super) Arc<CachePadded<AtomicU64>>);

impl LastVisibleSeqno {
    #[inline]
    pub(crate) fn get(&self) -> SeqNo {
        SeqNo(self.0.0.load(Ordering::Acquire))
    }

    pub(crate) fn publish(&self, seqno: SeqNo) {
        debug_assert!(SCHEDULE_EXPLORATION || self.get() <= seqno, "the last visible sequence number never decreases");
        self.0.0.store(seqno.0, Ordering::Release);
    }
}

/// What one or more readers read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ReaderScope {
    moment: ReadMoment,
    /// The only partition that they may read; `None` if they may read any.
    partition: Option<PartitionId>,
    /// The number of states that were replaced before.
    replacements: u64,
}

impl ReaderScope {
    /// Whether they may read `partition`, or any partition if it is `None`.
    fn may_read(&self, partition: Option<PartitionId>) -> bool {
        partition.is_none() || self.partition.is_none() || self.partition == partition
    }
}

#[derive(Debug, Default)]
struct RegisteredReaders {
    /// What they read, ascending, with their number. A vector, because most readers register and unregister at its end.
    scopes: Vec<(ReaderScope, usize)>,
    /// Number of states of partitions that were replaced since the database was opened: by the deletion of the
    /// partition, and in a follower also by a newer state.
    replacements: u64,
    /// The replaced states that a reader may need, each with the number of replacements up to this one.
    replaced: Vec<(u64, PartitionId, Arc<dyn EngineView>)>,
}

impl RegisteredReaders {
    fn find(&self, scope: &ReaderScope) -> std::result::Result<usize, usize> {
        self.scopes.binary_search_by_key(scope, |(scope, _)| *scope)
    }

    /// Keeps a state that is being replaced.
    fn keep(&mut self, partition: PartitionId, view: Arc<dyn EngineView>) {
        self.replacements += 1;
        let number = self.replacements;
        debug_assert!(self.replaced.last().is_none_or(|(last, ..)| *last < number), "replacements are numbered");
        self.replaced.push((number, partition, view));
    }

    /// What the readers read that may read `partition`, ascending, or all readers if it is `None`.
    fn of(&self, partition: Option<PartitionId>) -> impl DoubleEndedIterator<Item = &(ReaderScope, usize)> {
        self.scopes.iter().filter(move |(scope, _)| scope.may_read(partition))
    }
}

impl std::fmt::Debug for dyn EngineView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineView")
    }
}

/// List of what snapshots and iterators read, with the number of readers of each.
///
/// A reader chooses its sequence number and registers it under one lock. Flushes and compactions read the list under
/// the same lock. A version is therefore dropped only if no registered reader needs it, because later readers choose
/// a sequence number at or above the newest one in the list. The same holds for the time of readers.
///
/// A forked child registers and unregisters nothing, because it may wait forever for the lock.
pub(crate) struct SnapshotList {
    visible: LastVisibleSeqno,
    clock: ExpiryClock,
    /// `None` without an environment.
    opened_by: Option<OpeningProcess>,
    /// Whether a partition may have records that expire. Set for good before the first of them is visible.
    uses_expiry: AtomicBool,
    registered: Mutex<RegisteredReaders>,
    /// Number of removals from the list.
    removals: AtomicU64,
}

impl std::fmt::Debug for SnapshotList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotList").field("registered", &self.registered).finish_non_exhaustive()
    }
}

impl SnapshotList {
    /// A list for trees in which nothing expires.
    pub(crate) fn new(visible: LastVisibleSeqno) -> Arc<SnapshotList> {
        SnapshotList::with_clock(visible, ExpiryClock::default())
    }

    pub(crate) fn with_clock(visible: LastVisibleSeqno, clock: ExpiryClock) -> Arc<SnapshotList> {
        Arc::new(SnapshotList {
            visible,
            opened_by: clock.env().cloned().map(OpeningProcess::new),
            clock,
            uses_expiry: AtomicBool::new(false),
            registered: Mutex::default(),
            removals: AtomicU64::new(0),
        })
    }

    /// Whether this process was forked from the process that opened the database. Files, threads and the directory
    /// lock belong to the parent.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.opened_by.as_ref().is_some_and(OpeningProcess::has_forked_caller)
    }

    /// Tells that a partition may have records that expire from now on.
    pub(crate) fn note_expiry_use(&self) {
        self.uses_expiry.store(true, Ordering::SeqCst);
    }

    /// The time, which never goes back; see [`ExpiryClock`].
    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    fn lock_registered(&self) -> MutexGuard<'_, RegisteredReaders> {
        lock(&self.registered)
    }

    /// Registers a reader of any partition at the last visible sequence number.
    pub(crate) fn register(self: &Arc<Self>) -> SnapshotGuard {
        self.register_as(None, &self.uses_expiry)
    }

    /// Registers a reader of one partition at the last visible sequence number. The reader has a time if `uses_expiry`
    /// is set, which tells that the partition may have records that expire. It is set before the first of them is
    /// visible.
    pub(crate) fn register_for(self: &Arc<Self>, partition: PartitionId, uses_expiry: &AtomicBool) -> SnapshotGuard {
        self.register_as(Some(partition), uses_expiry)
    }

    fn register_as(self: &Arc<Self>, partition: Option<PartitionId>, uses_expiry: &AtomicBool) -> SnapshotGuard {
        if self.is_forked() {
            let scope = ReaderScope { moment: self.visible.get().into(), partition, replacements: 0 };
            return SnapshotGuard { scope, list: Arc::clone(self) };
        }
        let mut registered = self.lock_registered();
        let seqno = self.visible.get();
        // Behind the visible sequence number: a reader without a time sees no record that expires.
        let now_ms = if uses_expiry.load(Ordering::SeqCst) { self.clock.now_ms() } else { 0 };
        let moment = ReadMoment { seqno, now_ms };
        let scope = ReaderScope { moment, partition, replacements: registered.replacements };
        match registered.scopes.last_mut() {
            Some((last, count)) if *last == scope => *count += 1,
            // Neither the last visible sequence number nor the time decreases, so this is near the end.
            _ => match registered.find(&scope) {
                Ok(at) => registered.scopes[at].1 += 1,
                Err(at) => registered.scopes.insert(at, (scope, 1)),
            },
        }
        debug_assert!(
            registered.scopes.is_sorted_by(|(a, _), (b, _)| a < b),
            "scopes are in ascending order, each once"
        );
        debug_assert!(
            registered.scopes.last().is_none_or(|(last, _)| last.moment.seqno <= seqno),
            "no reader is registered above the last visible sequence number"
        );
        SnapshotGuard { scope, list: Arc::clone(self) }
    }

    /// Returns all registered sequence numbers, ascending, followed by the last visible one.
    pub(crate) fn seqnos(&self) -> Vec<SeqNo> {
        self.seqnos_of(None)
    }

    fn seqnos_of(&self, partition: Option<PartitionId>) -> Vec<SeqNo> {
        let registered = self.lock_registered();
        let mut list: Vec<SeqNo> = registered.of(partition).map(|(scope, _)| scope.moment.seqno).collect();
        list.push(self.visible.get());
        list.dedup();
        debug_assert!(list.is_sorted(), "no reader is registered above the last visible sequence number");
        list
    }

    /// Returns the limits for the current and all later readers.
    pub(crate) fn expiry_limits(&self) -> ExpiryLimits {
        self.expiry_limits_of(None)
    }

    fn expiry_limits_of(&self, partition: Option<PartitionId>) -> ExpiryLimits {
        let registered = self.lock_registered();
        let now_ms = self.clock.now_ms();
        let mut lowest = now_ms;
        let mut readers: Vec<ReadMoment> = registered.of(partition).rev().map(|(scope, _)| scope.moment).collect();
        for reader in &mut readers {
            if reader.now_ms > 0 {
                lowest = lowest.min(reader.now_ms);
            }
            reader.now_ms = lowest;
        }
        readers.reverse();
        debug_assert!(readers.is_sorted(), "a later reader has a higher sequence number and time");
        ExpiryLimits { readers, now_ms }
    }

    /// Returns the lowest sequence number that a current or later reader may read at.
    pub(crate) fn oldest(&self) -> SeqNo {
        self.oldest_of(None)
    }

    fn oldest_of(&self, partition: Option<PartitionId>) -> SeqNo {
        let registered = self.lock_registered();
        let first = registered.of(partition).next();
        debug_assert!(
            SCHEDULE_EXPLORATION || first.is_none_or(|(scope, _)| scope.moment.seqno <= self.visible.get()),
            "no reader is registered above the last visible sequence number"
        );
        first.map_or_else(|| self.visible.get(), |(scope, _)| scope.moment.seqno)
    }

    /// Returns the highest sequence number of a registered reader.
    pub(crate) fn newest_registered(&self) -> Option<SeqNo> {
        self.lock_registered().scopes.last().map(|(scope, _)| scope.moment.seqno)
    }

    #[inline]
    pub(crate) fn visible(&self) -> SeqNo {
        self.visible.get()
    }

    /// As [`visible`](Self::visible), but never a number that [`replace_states`](Self::replace_states) has published
    /// and for which it still installs the states.
    pub(crate) fn visible_and_installed(&self) -> SeqNo {
        let _registered = self.lock_registered();
        self.visible.get()
    }

    /// Returns the number of registered readers.
    pub(crate) fn count(&self) -> usize {
        self.count_of(None)
    }

    fn count_of(&self, partition: Option<PartitionId>) -> usize {
        let registered = self.lock_registered();
        registered.of(partition).map(|(_, count)| count).sum()
    }

    /// Keeps the last state of a partition that is being deleted for the registered readers of any partition. An
    /// iterator, which reads one partition only, keeps its state itself.
    pub(crate) fn keep_deleted(&self, partition: PartitionId, view: Arc<dyn EngineView>) {
        let mut registered = self.lock_registered();
        if registered.scopes.iter().any(|(scope, _)| scope.partition.is_none()) {
            registered.keep(partition, view);
        } else {
            registered.replacements += 1;
        }
    }

    /// In a follower: keeps the states of partitions for the registered readers, then publishes `seqno` and calls
    /// `install`, which replaces these states. A reader that registers meanwhile waits. It reads at `seqno` or later
    /// and finds the new states.
    pub(crate) fn replace_states(
        &self,
        seqno: SeqNo,
        old: Vec<(PartitionId, Arc<dyn EngineView>)>,
        install: impl FnOnce(),
    ) {
        let mut registered = self.lock_registered();
        for (partition, view) in old {
            // A reader that has a kept state already does not need this one.
            let served = registered.replaced.iter().rev().find(|(_, replaced, _)| *replaced == partition);
            let served = served.map_or(0, |(number, ..)| *number);
            if registered.of(Some(partition)).any(|(scope, _)| scope.replacements >= served) {
                registered.keep(partition, view);
            }
        }
        self.visible.publish(seqno);
        install();
    }

    /// The readers that may read `partition`.
    pub(crate) fn readers_of(self: &Arc<Self>, partition: PartitionId) -> PartitionReaders {
        PartitionReaders { list: Arc::clone(self), partition: Some(partition) }
    }
}

/// The registered readers that may read one partition, and all later readers. A reader of other partitions only does
/// not count.
#[derive(Clone, Debug)]
pub(crate) struct PartitionReaders {
    list: Arc<SnapshotList>,
    partition: Option<PartitionId>,
}

impl PartitionReaders {
    /// As [`SnapshotList::now_ms`].
    pub(crate) fn now_ms(&self) -> u64 {
        self.list.now_ms()
    }

    /// As [`SnapshotList::seqnos`].
    pub(crate) fn seqnos(&self) -> Vec<SeqNo> {
        self.list.seqnos_of(self.partition)
    }

    /// As [`SnapshotList::expiry_limits`].
    pub(crate) fn expiry_limits(&self) -> ExpiryLimits {
        self.list.expiry_limits_of(self.partition)
    }

    /// As [`SnapshotList::oldest`].
    pub(crate) fn oldest(&self) -> SeqNo {
        self.list.oldest_of(self.partition)
    }

    /// The last visible sequence number.
    #[inline]
    pub(crate) fn visible(&self) -> SeqNo {
        self.list.visible()
    }

    /// As [`SnapshotList::count`].
    pub(crate) fn count(&self) -> usize {
        self.list.count_of(self.partition)
    }

    /// Number of readers of any partition that have ended. A sequence number that was needed stays needed as long as
    /// this does not change.
    #[inline]
    pub(crate) fn removals(&self) -> u64 {
        self.list.removals.load(Ordering::Acquire)
    }

    /// Whether a current or later reader may read at a sequence number from `from` on and below `to`.
    pub(crate) fn may_read_between(&self, from: SeqNo, to: SeqNo) -> bool {
        let registered = self.list.lock_registered();
        let first = registered.scopes.partition_point(|(scope, _)| scope.moment.seqno < from);
        let mut between = registered.scopes[first..].iter().take_while(|(scope, _)| scope.moment.seqno < to);
        to > self.list.visible() || between.any(|(scope, _)| scope.may_read(self.partition))
    }
}

/// Registration of one reader, removed on drop.
#[derive(Debug)]
pub(crate) struct SnapshotGuard {
    scope: ReaderScope,
    list: Arc<SnapshotList>,
}

impl SnapshotGuard {
    pub(crate) fn seqno(&self) -> SeqNo {
        self.scope.moment.seqno
    }

    pub(crate) fn moment(&self) -> ReadMoment {
        self.scope.moment
    }

    /// Returns the state of a partition that was replaced after the reader was registered: because the partition was
    /// deleted, or in a follower by a newer state.
    pub(crate) fn replaced_view(&self, partition: PartitionId) -> Option<Arc<dyn EngineView>> {
        if self.list.is_forked() {
            return None;
        }
        let registered = self.list.lock_registered();
        let mut replaced = registered.replaced.iter();
        let found = replaced.find(|(number, replaced, _)| *replaced == partition && *number > self.scope.replacements);
        found.map(|(_, _, view)| Arc::clone(view))
    }
}

impl Clone for SnapshotGuard {
    fn clone(&self) -> SnapshotGuard {
        if !self.list.is_forked() {
            let mut registered = self.list.lock_registered();
            let found = registered.find(&self.scope);
            debug_assert!(found.is_ok(), "the reader of a guard is registered");
            if let Ok(i) = found {
                registered.scopes[i].1 += 1;
            }
        }
        SnapshotGuard { scope: self.scope, list: Arc::clone(&self.list) }
    }
}

impl Drop for SnapshotGuard {
    fn drop(&mut self) {
        if self.list.is_forked() {
            return;
        }
        let mut registered = self.list.lock_registered();
        let found = registered.find(&self.scope);
        debug_assert!(found.is_ok(), "the reader of a guard is registered");
        let Ok(i) = found else { return };
        debug_assert!(registered.scopes[i].1 > 0, "a reader is removed once");
        registered.scopes[i].1 -= 1;
        if registered.scopes[i].1 > 0 {
            return;
        }
        registered.scopes.remove(i);
        self.list.removals.fetch_add(1, Ordering::Release);
        if !registered.replaced.is_empty() {
            let RegisteredReaders { scopes, replaced, .. } = &mut *registered;
            // A reader needs the first state of a partition that was replaced after its registration.
            let mut before: BTreeMap<PartitionId, u64> = BTreeMap::new();
            let released: Vec<_> = replaced
                .extract_if(.., |(number, partition, _)| {
                    let served = before.insert(*partition, *number).unwrap_or(0)..*number;
                    let needs =
                        |scope: &ReaderScope| scope.may_read(Some(*partition)) && served.contains(&scope.replacements);
                    !scopes.iter().any(|(scope, _)| needs(scope))
                })
                .collect();
            drop(registered);
            drop(released); // without the lock, because it may free much memory
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::TestEnv;

    #[test]
    fn seqnos_are_distinct_and_include_the_newest() {
        let visible = LastVisibleSeqno::default();
        let points = SnapshotList::new(visible.clone());
        assert_eq!(points.seqnos(), [SeqNo(0)]);
        visible.publish(SeqNo(5));
        let (a, b) = (points.register(), points.register());
        visible.publish(SeqNo(9));
        let c = points.register();
        assert_eq!(points.seqnos(), [SeqNo(5), SeqNo(9)]);
        assert_eq!((points.oldest(), points.visible()), (SeqNo(5), SeqNo(9)));
        assert_eq!(points.newest_registered(), Some(SeqNo(9)));
        drop(a);
        let d = b.clone();
        drop(b);
        visible.publish(SeqNo(12));
        assert_eq!(points.seqnos(), [SeqNo(5), SeqNo(9), SeqNo(12)]);
        assert_eq!(points.count(), 2);
        drop((c, d));
        assert_eq!(points.seqnos(), [SeqNo(12)]);
        assert_eq!(points.newest_registered(), None);
        assert_eq!(points.oldest(), SeqNo(12));
    }

    #[test]
    fn expired_for_the_oldest_reader_that_sees_it() {
        let (env, visible) = (TestEnv::new(1), LastVisibleSeqno::default());
        let list = SnapshotList::with_clock(visible.clone(), ExpiryClock::new(Arc::new(env.clone())));
        let pass = || env.advance(Duration::from_secs(1));
        visible.publish(SeqNo(5));
        let timeless = list.register();
        assert_eq!(timeless.moment(), ReadMoment::from(SeqNo(5)));
        list.note_expiry_use();
        let first = list.register();
        pass();
        let second = list.register();
        pass();
        visible.publish(SeqNo(9));
        let third = list.register();
        pass();
        assert_eq!(list.seqnos(), [SeqNo(5), SeqNo(9)]);
        let start = first.moment().now_ms;
        let limits = || {
            let limits = list.expiry_limits();
            [1, 5, 6, 9, 10].map(|seqno| limits.limit_ms(SeqNo(seqno)) - start)
        };
        assert_eq!(limits(), [0, 0, 2_000, 2_000, 3_000]);
        drop((first, timeless));
        assert_eq!(limits(), [1_000, 1_000, 2_000, 2_000, 3_000]);
        env.jump_wall_clock(-9_000);
        let fourth = list.register();
        assert_eq!((fourth.moment().now_ms, list.count()), (start + 3_000, 3), "the clock has jumped back");
        drop((second, third, fourth));
        assert_eq!(limits(), [3_000; 5]);
        assert_eq!(ExpiryLimits::default().limit_ms(SeqNo(1)), 0);
    }

    /// Regression: a forked child that began or ended a reader waited forever if another thread of the parent had held
    /// the lock of the list at the fork.
    #[test]
    fn forked_child_does_not_lock_the_list() {
        let (env, visible) = (TestEnv::new(1), LastVisibleSeqno::default());
        let list = SnapshotList::with_clock(visible.clone(), ExpiryClock::new(Arc::new(env.clone())));
        visible.publish(SeqNo(5));
        let (of_parent, other) = (list.register(), list.register());
        let registered_lock = list.lock_registered();
        env.set_process(2);
        let of_child = list.register();
        assert_eq!(of_child.clone().seqno(), SeqNo(5));
        assert!(of_child.replaced_view(PartitionId(1)).is_none());
        drop((of_parent, of_child));
        env.set_process(1);
        drop(registered_lock);
        assert_eq!(list.count(), 2);
        drop(other);
    }

    struct NumberedView(u64);

    impl EngineView for NumberedView {
        fn iter(&self, _: ReadMoment, _: crate::engine::KeyBounds<'_>) -> Result<Box<dyn crate::iter::InternalIter>> {
            Err(crate::base::Error::invalid(self.0.to_string()))
        }

        fn blob_resolver(&self) -> Box<dyn crate::engine::BlobResolver> {
            unreachable!("nothing is resolved")
        }
    }

    #[test]
    fn readers_keep_the_first_replaced_state() {
        let visible = LastVisibleSeqno::default();
        let list = SnapshotList::new(visible.clone());
        let (one, two) = (PartitionId(1), PartitionId(2));
        let view = |n| Arc::new(NumberedView(n)) as Arc<dyn EngineView>;
        let replace = |seqno: u64| {
            let old = vec![(one, view(seqno)), (two, view(seqno))];
            list.replace_states(SeqNo(seqno), old, || assert_eq!(list.visible(), SeqNo(seqno), "it is visible"));
        };
        let found = |guard: &SnapshotGuard, partition| {
            let unbounded = (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded);
            let view = guard.replaced_view(partition)?;
            view.iter(guard.moment(), unbounded).err().map(|error| error.message().to_owned())
        };
        replace(1);
        assert!(list.lock_registered().replaced.is_empty(), "no reader needs it");
        let all = list.register();
        replace(2);
        replace(3);
        let of_two = list.register_for(two, &AtomicBool::new(false));
        assert_eq!((all.seqno(), of_two.seqno()), (SeqNo(1), SeqNo(3)));
        assert_eq!((found(&all, one), found(&all, two)), (Some("2".into()), Some("2".into())));
        assert_eq!(found(&of_two, two), None);
        replace(4);
        assert_eq!((found(&all, two), found(&of_two, two)), (Some("2".into()), Some("4".into())));
        assert_eq!(list.lock_registered().replaced.len(), 3, "what no reader needs is not kept");
        drop(all);
        assert_eq!(list.lock_registered().replaced.len(), 1);
        drop(of_two);
        assert!(list.lock_registered().replaced.is_empty());
    }

    #[test]
    fn removals_are_counted_by_seqno() {
        let visible = LastVisibleSeqno::default();
        let list = SnapshotList::new(visible.clone());
        let readers = list.readers_of(PartitionId(1));
        let (first, second) = (list.register(), list.register());
        drop(first);
        assert_eq!(readers.removals(), 0);
        drop(second);
        assert_eq!(readers.removals(), 1);
    }
}
