//! Removes expired records of a pool, in passes over all leaves.
//!
//! A pass removes only what no reader can see: the record has expired for all current and later readers, is visible,
//! and no older version of its key is retained. So a removal needs no sequence number and no tombstone. A removal is
//! not logged: after a crash the record may be in the pool again, still expired. The write-ahead log (WAL) must not
//! contain an older record of the key that would be replayed without the removed one; see
//! [`before_sweep`](crate::pmem::pool::engine::PoolDurability::before_sweep).

use crate::base::version_edit::ExpiryTimes;
use crate::base::{Result, SeqNo};
use crate::mem::atomic::{MutexGuard, Ordering, lock, try_lock};
use crate::mem::epoch::Pin;
use crate::pmem::allocator::PoolRange;
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::{LeafAddr, PoolLeaf};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::tree::{PoolTree, SweepProgress};

/// Number of leaves that one call of [`PoolTree::sweep_expired`] visits.
const SWEEP_LEAVES_MAX: usize = 512;
/// A pass begins when about one record in this many has expired: in the background, and if forced. Fewer records may
/// expire during a pass, after which no other pass begins.
pub(crate) const SWEEP_SHARE: u64 = 4;
pub(crate) const FORCED_SWEEP_SHARE: u64 = 16;
/// An expired record that a pass could not remove counts as if it expired this much later than the pass.
const RETRY_AFTER_MS: u64 = 1_000;

impl<M: PersistenceBackend> PoolTree<M> {
    /// Whether a pass runs, or should begin because about one record in `share` has expired. Reads no clock if no
    /// record expires.
    pub(crate) fn is_sweep_due(&self, share: u64) -> bool {
        let is_running = try_lock(&self.expiry.sweep).is_none_or(|sweep| sweep.is_running);
        let times = *lock(&self.expiry.times);
        if is_running || times.entries == 0 || self.replaying.load(Ordering::Acquire) {
            return is_running;
        }
        let expired = times.estimate_expired(self.versions.readers().expiry_limits().limit_ms(SeqNo::ZERO));
        expired > 0 && expired >= self.len() / share
    }

    /// Continues the pass over all leaves, or begins one. Visits a bounded number of leaves. `visible` is a sequence
    /// number up to which all records are applied; [`before_sweep`] was called for it. Returns the number of removed
    /// records, and whether the pass has ended.
    ///
    /// # Errors
    /// `Corruption` if the bytes of the pool are not valid, `Closed` after [`stop_writes`](PoolTree::stop_writes).
    ///
    /// [`before_sweep`]: crate::pmem::pool::engine::PoolDurability::before_sweep
    pub(crate) fn sweep_expired(&self, visible: SeqNo) -> Result<(u64, bool)> {
        let mut sweep = lock(&self.expiry.sweep);
        self.forget_versions()?; // a key with retained versions is skipped
        if !sweep.is_running {
            sweep.limit_ms = self.versions.readers().expiry_limits().limit_ms(SeqNo::ZERO);
            (sweep.is_running, sweep.next_key) = (true, None);
            *lock(&self.expiry.times) = ExpiryTimes::default();
        }
        let mut removed = 0;
        for _ in 0..SWEEP_LEAVES_MAX {
            let (removed_ranges, next_key) = self.sweep_leaf(sweep.next_key.as_deref(), sweep.limit_ms, visible)?;
            removed += removed_ranges.len() as u64;
            self.retire_all(removed_ranges)?;
            sweep.next_key = next_key;
            if sweep.next_key.is_none() {
                sweep.is_running = false;
                break;
            }
        }
        Ok((removed, !sweep.is_running))
    }

    /// Keeps a pass from changing the pool until the guard is dropped.
    pub(crate) fn block_sweeps(&self) -> MutexGuard<'_, SweepProgress> {
        lock(&self.expiry.sweep)
    }

    /// Removes the expired records of the leaf of `key`, or of the first leaf, and counts the others that expire.
    /// Returns the space of the removed records, and a key of the leaf to continue with, or `None` after the last leaf.
    fn sweep_leaf(
        &self,
        key: Option<&[u8]>,
        limit_ms: u64,
        visible: SeqNo,
    ) -> Result<(Vec<PoolRange>, Option<Vec<u8>>)> {
        let (leaf, high, locked) = self.lock_leaf_with_bound(key)?;
        let commit = leaf.commit_word();
        let (mut remaining, mut removed_ranges, mut key) = (commit, Vec::new(), Vec::new());
        let pin = self.pin()?; // fails if the pool is closed; closing waits for it
        let contents = self.read_leaf(leaf, commit)?;
        for ((n, slot, fingerprint), record) in contents.slots.iter().zip(&contents.records) {
            let Some(expires_ms) = record.expires_ms(self.region())? else { continue };
            record.read_key(self.region(), &mut key);
            if expires_ms > limit_ms || record.seqno > visible || self.versions.contains_key(&key) {
                let retry_ms = if expires_ms > limit_ms { 0 } else { limit_ms.saturating_add(RETRY_AFTER_MS) };
                self.expiry.add(expires_ms.max(retry_ms));
                continue;
            }
            remaining = remaining.flipped(*n, self.check_seed.slot_check(leaf.offset, *n, *fingerprint, *slot));
            removed_ranges.push((record.offset, record.buffer_len()));
        }
        if removed_ranges.is_empty() {
            return Ok((removed_ranges, high));
        }
        debug_assert_eq!(remaining.count() + removed_ranges.len(), commit.count(), "each removed record has one slot");
        self.backend.publish(leaf.offset, remaining.0);
        self.backend.flush(leaf.offset, 8, PersistSite::RemoveCommit);
        self.backend.fence(PersistSite::RemoveDone);
        self.add_to_record_count(leaf.offset, -(removed_ranges.len() as i64));
        drop((pin, locked));
        if remaining.count() <= self.slots_per_leaf / 4 {
            self.merge_or_unlink_leaf(&key)?;
        }
        Ok((removed_ranges, high))
    }

    /// Finds the leaf of `key`, or the first leaf, and locks it. Also returns the bound before which its keys are.
    fn lock_leaf_with_bound(&self, key: Option<&[u8]>) -> Result<(PoolLeaf<'_>, Option<Vec<u8>>, MutexGuard<'_, ()>)> {
        loop {
            let shape = self.structure_version.load(Ordering::Acquire);
            let (leaf, high) = {
                let pin = Pin::new();
                let found = self.inner.find_position(key.map_or(LeafTarget::First, LeafTarget::Key), &pin);
                (self.leaf(LeafAddr(found.leaf)), found.high.map(<[u8]>::to_vec))
            };
            let locked = self.lock_stripe(leaf.offset)?;
            if self.structure_version.load(Ordering::Acquire) == shape {
                return Ok((leaf, high, locked));
            }
        }
    }
}
