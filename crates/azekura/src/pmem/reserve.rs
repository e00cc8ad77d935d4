//! What a batch needs of a pool, set aside before the log has it: nothing may fail in between.
//!
//! A batch needs a buffer for each record that it puts, leaves for those that it splits, and memory for the versions
//! that it replaces or removes ([`RetainedVersions::reserve`]). Lengths alone give an upper bound that is cheap. Where
//! that does not fit, the tree is asked which keys there are and which leaves they belong to.

use crate::base::{ErrorKind, Result, SeqNo};
use crate::mem::atomic::Ordering;
use crate::pmem::allocator::PoolRange;
use crate::pmem::inner::LeafTarget;
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::buffer_len_for;
use crate::pmem::tree::PoolTree;
use crate::pmem::versions::{RetainedVersions, VersionsGuard};

/// A record of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned<'a> {
    pub(crate) key: &'a [u8],
    /// The length of its value; none for a removal.
    pub(crate) value_len: Option<usize>,
}

/// What a pool has promised to a batch, beside buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Promise {
    leaves: usize,
    /// Bytes of memory for versions.
    versions: u64,
}

impl Planned<'_> {
    /// The most bytes of memory that its versions take.
    fn kept_most(&self) -> u64 {
        RetainedVersions::bytes_most(self.key.len(), self.value_len.is_none())
    }
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Sets space aside for the records of a batch: fills `rooms` with a buffer for each that is put, to be used with
    /// [`put_reserved`](PoolTree::put_reserved) or [`free_reservation`](PoolTree::free_reservation). In any case
    /// [`release_leaf_reservation`](PoolTree::release_leaf_reservation) is to be called afterwards. Waits for other
    /// batches where these have the memory for versions that it needs.
    ///
    /// # Errors
    /// `OutOfSpace` if the pool is full, or keeps too much for readers; then nothing was set aside.
    pub(crate) fn reserve(&self, records: &[Planned<'_>], rooms: &mut [PoolRange]) -> Result<Promise> {
        let mut counted = None;
        let most = records.iter().map(Planned::kept_most).sum();
        let versions = match self.versions.try_reserve(most) {
            Some(guard) => guard,
            None => {
                let (kept, _) = *counted.insert(self.count_needs(records)?);
                self.versions.reserve(kept, || self.forget_versions())?
            }
        };
        let puts = rooms.len();
        let leaves = if puts == 0 { 0 } else { self.reserve_buffers(records, puts, &mut counted, rooms)? };
        Ok(Promise { leaves, versions: VersionsGuard::into_bytes(versions) })
    }

    /// Sets buffers and leaves aside: as many leaves as `puts` records need wherever they belong, or, where there is no
    /// space for these, as many as they need in the leaves that they belong to. Returns the number of leaves.
    fn reserve_buffers(
        &self,
        records: &[Planned<'_>],
        puts: usize,
        counted: &mut Option<(u64, usize)>,
        rooms: &mut [PoolRange],
    ) -> Result<usize> {
        let end = self.seqno_estimate(records.len());
        // Each leaf that is full by now may be split for the first record that it gets. What a split has left takes
        // half as many as a leaf before it is full again.
        let full = usize::try_from(self.leaf_count.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let most = puts.min(full) + puts / (self.slots_per_leaf / 2 - 1) + 1;
        let mut leaves = counted.map_or(most, |(_, leaves)| leaves.min(most));
        self.retry_after_reclaim(|| {
            let full = match self.try_reserve(records, end, leaves, rooms) {
                Err(error) if error.kind() == ErrorKind::OutOfSpace && counted.is_none() => error,
                done => return done,
            };
            let (_, needed) = *counted.insert(self.count_needs(records)?);
            if needed >= leaves {
                return Err(full);
            }
            leaves = needed;
            self.try_reserve(records, end, leaves, rooms)
        })?;
        Ok(leaves)
    }

    /// All of it or nothing, under one lock.
    fn try_reserve(&self, records: &[Planned<'_>], end: SeqNo, leaves: usize, rooms: &mut [PoolRange]) -> Result<()> {
        let mut space = self.allocator_after_releases()?;
        space.reserve_leaves(&self.backend, leaves)?;
        let puts = records.iter().filter_map(|record| Some((record.key.len(), record.value_len?)));
        for (n, (key_len, value_len)) in puts.enumerate() {
            let len = buffer_len_for(key_len, value_len, end);
            match space.allocate(&self.backend, len) {
                Ok(at) => rooms[n] = (at, len),
                Err(error) => {
                    rooms[..n].iter().for_each(|reservation| space.free(*reservation));
                    space.release_leaf_reservation(leaves);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// What the records need by the keys that there are now: memory for versions in bytes, and leaves, as if each leaf
    /// that gets a new key were full. Other writers may change that before the batch is applied: an entry more is kept
    /// for each key that they put meanwhile and the batch replaces, or the pool gets a little longer than its
    /// limit ([`Allocator::insist`](crate::pmem::allocator::Allocator::allocate_beyond_limit)).
    fn count_needs(&self, records: &[Planned<'_>]) -> Result<(u64, usize)> {
        let mut sorted: Vec<&Planned<'_>> = records.iter().collect();
        sorted.sort_by(|a, b| self.key_order.cmp(a.key, b.key));
        let (mut kept, mut leaves, mut all_new) = (0, 0, 0);
        // Of the leaf that the last key belongs to: new records, and where it ends. Its free slots do not count:
        // packing and other writers may fill them before the batch is applied.
        let (mut new, mut high) = (0, Some(Vec::new()));
        for same in sorted.chunk_by(|a, b| self.key_order.keys_equal(a.key, b.key)) {
            let pin = self.pin()?;
            let key = same[0].key;
            if high.as_deref().is_some_and(|high| self.key_order.cmp(key, high).is_ge()) {
                leaves += self.splits_most(new);
                new = 0;
                high = self.inner.find_position(LeafTarget::Key(key), &pin).high.map(<[u8]>::to_vec);
            }
            let is_there = self.find_newest(key, &pin)?.is_some();
            // Of a key that is not there, the first record replaces nothing.
            kept += same[usize::from(!is_there)..].iter().map(|record| record.kept_most()).sum::<u64>();
            let is_new = !is_there && same.iter().any(|record| record.value_len.is_some());
            new += usize::from(is_new);
            all_new += usize::from(is_new);
        }
        leaves += self.splits_most(new);
        // Where removals let leaves be joined, those are fuller than they were: up to five eighths.
        let removals = records.iter().filter(|record| record.value_len.is_none()).count();
        Ok((kept, leaves + removals.min(all_new / (self.slots_per_leaf * 3 / 8).max(1)) + 1))
    }

    /// How often a full leaf is split at most if it gets `new` new records.
    fn splits_most(&self, new: usize) -> usize {
        if new > 0 { 1 + (new - 1) / (self.slots_per_leaf / 2 - 1) } else { 0 }
    }

    /// A batch has used what it was promised, or will not. The next one to set leaves aside sees it.
    #[inline]
    pub(crate) fn release_leaf_reservation(&self, promise: Promise) {
        self.released_leaf_reservations.fetch_add(promise.leaves, Ordering::Relaxed);
        self.versions.end_reservation(promise.versions);
    }
}
