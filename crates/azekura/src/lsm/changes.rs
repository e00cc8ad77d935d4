//! Whether keys of a tree have changed since a sequence number, for the validation of transactions.

use std::sync::Arc;

use crate::base::key_range::KeyRange;
use crate::base::{KeyOrder, Result, SeqNo};
use crate::engine::KeyBounds;
use crate::iter::changes::find_newer_key;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::read::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::HasTableMeta;
use crate::mem::epoch::Pin;
use crate::table::reader::PointLookup;
use std::ops::Bound;

impl SuperVersion {
    /// Whether the newest version of `key` is above `since`. Memtables and tables without newer records are not
    /// searched. A tombstone of a key that did not exist counts as a change.
    pub(crate) fn changed_since(&self, context: &TreeContext, key: &[u8], since: SeqNo, pin: &Pin) -> Result<bool> {
        let lookup = PointLookup::new(key, SeqNo::MAX, &context.order, context.hash_seed);
        if self.has_range_deletes() {
            let is_newer = |set: &Arc<RangeTombstones>| set.covering_seqno(key, SeqNo::MAX, &context.order) > since;
            if self.range_tombstones().iter().any(is_newer) {
                return Ok(true);
            }
        }
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if memtable.largest_seqno() <= since {
                continue; // or it is empty: then the sealed ones may be newer
            }
            if let Some(entry) = memtable.get(key, lookup.hash, SeqNo::MAX) {
                return Ok(entry.seqno > since);
            }
        }
        for run in self.version.runs() {
            let Some(table) = run.find(key, &context.order) else { continue };
            if table.meta().largest_seqno <= since {
                continue;
            }
            if let Some(newest) = table.table()?.get_with(&lookup, pin, |seqno, _, _| seqno)? {
                return Ok(newest > since);
            }
        }
        Ok(false)
    }

    /// Returns a key within `bounds` that has a record above `since`. Memtables and tables without newer records, or
    /// beyond the bounds, are not searched.
    pub(crate) fn range_changed_since(
        &self,
        context: &TreeContext,
        bounds: KeyBounds<'_>,
        since: SeqNo,
    ) -> Result<Option<Vec<u8>>> {
        if let Some(key) = self.range_removed_since(context, bounds, since) {
            return Ok(Some(key));
        }
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if memtable.largest_seqno() <= since {
                continue; // or it is empty
            }
            let newer_key = match memtable.find_recent_key(bounds, since) {
                Some(newer_key) => newer_key,
                None => find_newer_key(&mut memtable.iter(), &context.order, bounds, since)?,
            };
            if newer_key.is_some() {
                return Ok(newer_key);
            }
        }
        let tables = self.version.runs().flat_map(|run| run.tables());
        for table in tables.filter(|table| table.meta().largest_seqno > since) {
            if overlaps(table, &context.order, bounds)
                && let Some(key) = find_newer_key(&mut table.table()?.iter(false), &context.order, bounds, since)?
            {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}

impl SuperVersion {
    /// A key at a bound of a range delete above `since` that overlaps `bounds`.
    fn range_removed_since(&self, context: &TreeContext, (start, end): KeyBounds<'_>, since: SeqNo) -> Option<Vec<u8>> {
        if !self.has_range_deletes() {
            return None;
        }
        let range = KeyRange::between(start, end);
        self.range_tombstones().iter().find_map(|set| set.newer_key_in(&range, since, &context.order))
    }
}

/// Whether the key range of the table overlaps `bounds`. May be true of an excluded bound that is a key of the table.
fn overlaps(table: &TableHandle, order: &KeyOrder, (start, end): KeyBounds<'_>) -> bool {
    let meta = table.meta();
    let begins_after = match end {
        Bound::Unbounded => false,
        Bound::Included(end) | Bound::Excluded(end) => order.cmp(&meta.smallest_key.0, end).is_gt(),
    };
    let ends_before = match start {
        Bound::Unbounded => false,
        Bound::Included(start) | Bound::Excluded(start) => order.cmp(&meta.largest_key.0, start).is_lt(),
    };
    !begins_after && !ends_before
}
