//! Whether keys of a pool have changed since a sequence number, for the validation of transactions.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::key_range::KeyRange;
use crate::base::{Result, SeqNo};
use crate::engine::KeyBounds;
use crate::iter::changes::find_newer_key;
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::tree::PoolTree;

impl<M: PersistenceBackend> PoolTree<M> {
    /// Whether the state of `key` differs from its state at `since`. A sequence number at or below `since` is
    /// registered, and the key has not changed between the two. So a record that was removed since is retained.
    pub(crate) fn changed_since(&self, key: &[u8], since: SeqNo) -> Result<bool> {
        let pin = self.pin()?;
        let pending = self.range_deletes.set_at(SeqNo::MAX);
        if pending.is_some_and(|set| set.covering_seqno(key, SeqNo::MAX, &self.key_order) > since) {
            return Ok(true);
        }
        Ok(match self.find_newest(key, &pin)? {
            Some(record) => record.seqno > since,
            None => self.versions.find(key, since).is_some(),
        })
    }

    /// Returns a key within `bounds` that has a record above `since`, or was removed after `since`. Reads every
    /// record within the bounds.
    pub(crate) fn range_changed_since(
        self: &Arc<Self>,
        bounds: KeyBounds<'_>,
        since: SeqNo,
    ) -> Result<Option<Vec<u8>>> {
        let order = &self.key_order;
        if let (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) = bounds
            && order.cmp(low, high).is_gt()
        {
            return Ok(None);
        }
        let range = KeyRange::between(bounds.0, bounds.1);
        let pending = self.range_deletes.set_at(SeqNo::MAX);
        if let Some(key) = pending.and_then(|set| set.newer_key_in(&range, since, order)) {
            return Ok(Some(key));
        }
        let mut records = self.iter(SeqNo::MAX).with_bounds(bounds);
        if let Some(key) = find_newer_key(&mut records, order, bounds, since)? {
            return Ok(Some(key));
        }
        self.versions.find_changed_key(order, bounds, since)
    }
}
