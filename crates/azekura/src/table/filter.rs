//! The filter of a table: excludes user keys that the table does not contain. It has two levels, described in
//! `docs/format/table.md`.

use crate::base::{InternalKey, KeyOrder, Result, SeqNo};
use crate::block::cached_block::TopLevelFilterBlock;
use crate::block::frame::FRAME_HEADER_LEN;
use crate::block::restart_block::RestartBlock;
use crate::block::{BlockKind, FilterBlock};
use crate::mem::epoch::Pin;
use crate::mem::parent_block::PinnedRef;
use crate::table::block_fetcher::{BlockFetcher, BlockRef, TableBlockSlot, child_handle};
use crate::table::index::{MetadataPartition, lower_bound_entry};
use crate::table::options::FilterPolicy;

/// Maximum number of filter partitions that a search for a prefix excludes.
const PREFIX_PARTITIONS_MAX: usize = 4;

/// Collects the hashes of user keys into filter partitions, which stay in memory until the data blocks are written.
pub(crate) struct FilterBuilder {
    bits_per_key: f32,
    /// Maximum number of keys in a partition; `None` for a single partition.
    keys_per_partition: Option<usize>,
    hashes: Vec<u64>,
    /// The last hash of a prefix in `hashes`.
    last_prefix: Option<u64>,
    keys: u64,
    partitions: Vec<MetadataPartition>,
    partition_bytes: u64,
}

impl FilterBuilder {
    /// `None` if the policy or the order allows no filter.
    pub(crate) fn new(policy: FilterPolicy, partition_size: Option<u32>, order: &KeyOrder) -> Option<FilterBuilder> {
        let FilterPolicy::Bloom { bits_per_key } = policy else { return None };
        if !order.can_hash_keys() {
            return None;
        }
        let bits_len = |size: u32| FilterBlock::bits_len_within((size as usize).saturating_sub(FRAME_HEADER_LEN));
        let keys_per_partition =
            partition_size.map(|size| ((bits_len(size) as f32 * 8.0 / bits_per_key) as usize).max(1));
        Some(FilterBuilder {
            bits_per_key,
            keys_per_partition,
            hashes: Vec::new(),
            last_prefix: None,
            keys: 0,
            partitions: Vec::new(),
            partition_bytes: 0,
        })
    }

    /// Adds the hash of `user_key`, which differs from the previous user key `before`, and the hash of its prefix,
    /// unless that was added last.
    pub(crate) fn add(&mut self, hash: u64, prefix: Option<u64>, before: &[u8], user_key: &[u8], order: &KeyOrder) {
        let added = 1 + usize::from(prefix.is_some_and(|prefix| self.last_prefix != Some(prefix)));
        if !self.hashes.is_empty() && self.keys_per_partition.is_some_and(|keys| self.hashes.len() + added > keys) {
            let mut bound = Vec::new();
            order.separator(before, user_key, &mut bound);
            debug_assert!(
                order.is_custom() || self.partitions.last().is_none_or(|last| last.key < bound),
                "the bounds of filter partitions ascend"
            );
            self.finish_partition(bound);
        }
        debug_assert!(self.keys == 0 || order.is_custom() || before < user_key, "user keys are added in order");
        self.hashes.push(hash);
        if let Some(prefix) = prefix.filter(|prefix| self.last_prefix != Some(*prefix)) {
            self.hashes.push(prefix);
            self.last_prefix = Some(prefix);
        }
        self.keys += 1;
    }

    fn finish_partition(&mut self, bound: Vec<u8>) {
        debug_assert!(
            self.keys_per_partition.is_none_or(|keys| self.hashes.len() <= keys.max(2)),
            "a partition has no more hashes than fit, or one key and its prefix"
        );
        let raw = FilterBlock::build(&self.hashes, self.bits_per_key);
        self.partition_bytes += raw.len() as u64;
        self.partitions.push(MetadataPartition { key: bound, seqno: SeqNo::ZERO, tag: 0, raw });
        self.hashes.clear();
        self.last_prefix = None;
    }

    /// Returns all partitions. The bound of the last one is `largest`.
    pub(crate) fn finish(mut self, largest: &[u8]) -> Vec<MetadataPartition> {
        self.finish_partition(largest.to_vec());
        self.partitions
    }

    /// Number of user keys that were added.
    pub(crate) fn key_count(&self) -> u64 {
        self.keys
    }

    /// Approximate number of bytes collected so far.
    pub(crate) fn estimated_bytes(&self) -> u64 {
        let open = self.hashes.len() as f64 * f64::from(self.bits_per_key) / 8.0;
        self.partition_bytes + open as u64
    }
}

/// The filter of an open table.
pub(crate) enum TableFilter {
    /// The only partition. The top level contains nothing but its handle.
    Single(TableBlockSlot<FilterBlock>),
    /// The top level, whose partitions are in the cache.
    Partitioned(TableBlockSlot<TopLevelFilterBlock>),
}

/// What the linked blocks of a filter show about a user key.
pub(crate) enum FilterCheck<'p> {
    /// No entry has the key.
    Excluded,
    MayContain,
    /// No link leads to the partition.
    Unlinked(UnlinkedPartition<'p>),
}

/// The partition for a user key, which a check of the linked blocks has not reached.
pub(crate) enum UnlinkedPartition<'p> {
    /// The only one of the filter, or one that a top level without a link names.
    OfFilter(&'p TableFilter),
    /// The partition of this entry of the top level.
    Entry(PinnedRef<'p, TopLevelFilterBlock>, usize),
}

impl UnlinkedPartition<'_> {
    /// Returns false only if no entry has this user key, whose check has led to this partition.
    pub(crate) fn may_contain(
        &self,
        fetcher: &BlockFetcher,
        user_key: &[u8],
        hash: u64,
        order: &KeyOrder,
        pin: &Pin,
    ) -> Result<bool> {
        let partition = match self {
            UnlinkedPartition::OfFilter(filter) => filter.find_partition(fetcher, user_key, order, pin)?,
            UnlinkedPartition::Entry(top, at) => {
                Some(fetcher.fetch_child(&BlockRef::Pinned(*top), *at, BlockKind::FilterPartition, pin)?)
            }
        };
        Ok(partition.is_some_and(|partition| partition.may_contain(hash)))
    }

    /// Whether it is one of several partitions, and a lookup must read it from the file. The only partition of a table
    /// is read once, for all keys. A top level that must be read is read once too, with the partition.
    pub(crate) fn is_read_for_lookup(&self, fetcher: &BlockFetcher) -> Result<bool> {
        match self {
            UnlinkedPartition::OfFilter(_) => Ok(false),
            UnlinkedPartition::Entry(top, at) => {
                Ok(!fetcher.cache.contains(fetcher.id, child_handle(top, *at)?.offset))
            }
        }
    }
}

/// The entry of the partition for a user key; `None` if the key is above all keys of the table.
#[inline(always)]
fn find_in_top_level(top: &RestartBlock, user_key: &[u8], order: &KeyOrder) -> Result<Option<usize>> {
    // Bounds have sequence number 0, so every version of a key is at or before a bound with the same key.
    lower_bound_entry(top, InternalKey::before_versions_of(user_key), order)
}

impl TableFilter {
    /// Whether an entry may have this user key, as far as linked blocks show it. `hash` is its hash with the seed of
    /// the table.
    #[inline(always)]
    pub(crate) fn check_linked<'p>(
        &'p self,
        fetcher: &BlockFetcher,
        user_key: &[u8],
        hash: u64,
        order: &KeyOrder,
        pin: &'p Pin,
    ) -> Result<FilterCheck<'p>> {
        let partition = match self {
            TableFilter::Single(partition) => match partition.fetch_loaded(fetcher, pin) {
                Some(partition) => partition,
                None => return Ok(FilterCheck::Unlinked(UnlinkedPartition::OfFilter(self))),
            },
            TableFilter::Partitioned(top) => {
                let Some(top) = top.fetch_loaded(fetcher, pin) else {
                    return Ok(FilterCheck::Unlinked(UnlinkedPartition::OfFilter(self)));
                };
                let Some(at) = find_in_top_level(&top, user_key, order)? else { return Ok(FilterCheck::Excluded) };
                match fetcher.linked_child(&top, at, BlockKind::FilterPartition, pin) {
                    Some(partition) => partition,
                    None => return Ok(FilterCheck::Unlinked(UnlinkedPartition::Entry(top, at))),
                }
            }
        };
        Ok(if partition.may_contain(hash) { FilterCheck::MayContain } else { FilterCheck::Excluded })
    }

    /// The partition for a user key; `None` if the key is above all keys of the table.
    #[inline(always)]
    pub(crate) fn find_partition<'a>(
        &'a self,
        fetcher: &BlockFetcher,
        user_key: &[u8],
        order: &KeyOrder,
        pin: &'a Pin,
    ) -> Result<Option<BlockRef<'a, FilterBlock>>> {
        match self {
            TableFilter::Single(partition) => partition.get(fetcher, pin).map(Some),
            TableFilter::Partitioned(top) => {
                let top = top.get(fetcher, pin)?;
                let Some(at) = find_in_top_level(&top, user_key, order)? else { return Ok(None) };
                fetcher.fetch_child(&top, at, BlockKind::FilterPartition, pin).map(Some)
            }
        }
    }

    /// Returns false only if no key at or after `start` has the prefix with this hash. `start` has that prefix, and
    /// keys are in the order of bytes.
    pub(crate) fn may_contain_prefix(
        &self,
        fetcher: &BlockFetcher,
        start: &[u8],
        prefix: &[u8],
        hash: u64,
        order: &KeyOrder,
        pin: &Pin,
    ) -> Result<bool> {
        let top = match self {
            TableFilter::Single(partition) => return Ok(partition.get(fetcher, pin)?.may_contain(hash)),
            TableFilter::Partitioned(top) => top.get(fetcher, pin)?,
        };
        let Some(first) = lower_bound_entry(&top, InternalKey::before_versions_of(start), order)? else {
            return Ok(false);
        };
        for at in first..top.count() {
            let partition: BlockRef<'_, FilterBlock> =
                fetcher.fetch_child(&top, at, BlockKind::FilterPartition, pin)?;
            if at - first == PREFIX_PARTITIONS_MAX || partition.may_contain(hash) {
                return Ok(true);
            }
            // The bound is not before `start`. If it has another prefix, so have all keys after it.
            if !top.parse_restart(at)?.rest.starts_with(prefix) {
                break;
            }
        }
        Ok(false)
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        match self {
            TableFilter::Single(slot) => slot.pinned_bytes(),
            TableFilter::Partitioned(slot) => slot.pinned_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each key has a prefix of its own, so each adds two hashes.
    #[test]
    fn partitions_with_prefixes_fit_a_page() {
        let order = KeyOrder::bytewise();
        let policy = FilterPolicy::Bloom { bits_per_key: 10.0 };
        let mut filter = FilterBuilder::new(policy, Some(4096), &order).unwrap();
        let (mut before, mut key) = (Vec::new(), Vec::new());
        for n in 0..20_000u32 {
            std::mem::swap(&mut before, &mut key);
            key = n.to_be_bytes().to_vec();
            filter.add(u64::from(n) * 77, Some(u64::from(n) * 99 + 1), &before, &key, &order);
        }
        let lens: Vec<usize> = filter.finish(&key).iter().map(|part| part.raw.len() + FRAME_HEADER_LEN).collect();
        assert!(lens.len() > 5 && lens.iter().all(|len| *len <= 4096), "{lens:?}");
    }
}
