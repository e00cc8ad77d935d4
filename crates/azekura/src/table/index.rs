//! The index of a table: maps a key to its data block. It has two levels, described in `docs/format/table.md`.

use std::sync::Arc;

use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::cached_block::{IndexPartitionBlock, TopLevelIndexBlock};
use crate::block::restart_block::RestartBlock;
use crate::block::{BlockHandle, BlockKind, RestartBlockBuilder};
use crate::mem::epoch::Pin;
use crate::table::block_fetcher::{BlockFetcher, BlockRef, TableBlockSlot};
use crate::table::format::is_padding_range;

/// Bit of the tag of an index entry: the next block begins with an older version of the last user key of this block.
pub(crate) const TAG_CONTINUES: u8 = 1;
/// Index blocks are read more often than written, so every entry is a restart. The number of an entry is also that of
/// its child link.
const RESTART_INTERVAL: u8 = 1;

/// A finished partition of an index or a filter, with its entry in the top level.
pub(crate) struct MetadataPartition {
    pub(crate) key: Vec<u8>,
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) raw: Vec<u8>,
}

/// Collects the entries of the index into partitions, which stay in memory until the data blocks are written.
pub(crate) struct IndexBuilder {
    block_builder: RestartBlockBuilder,
    /// Maximum length of a partition in bytes; `None` for a single partition.
    partition_size: Option<usize>,
    last_key: (Vec<u8>, SeqNo, u8),
    partitions: Vec<MetadataPartition>,
    partition_bytes: u64,
    value: Vec<u8>,
}

impl IndexBuilder {
    pub(crate) fn new(partition_size: Option<u32>) -> IndexBuilder {
        IndexBuilder {
            block_builder: RestartBlockBuilder::new(RESTART_INTERVAL),
            partition_size: partition_size.map(|size| size as usize),
            last_key: (Vec::new(), SeqNo::ZERO, 0),
            partitions: Vec::new(),
            partition_bytes: 0,
            value: Vec::new(),
        }
    }

    /// Adds the block at `handle`, whose last entry is at or before `separator`.
    pub(crate) fn add(&mut self, separator: InternalKey<'_>, continues: bool, handle: BlockHandle) {
        self.value.clear();
        handle.encode(&mut self.value);
        let full =
            self.partition_size.is_some_and(|size| self.block_builder.len_with(separator, self.value.len()) > size);
        if full && !self.block_builder.is_empty() {
            self.finish_partition();
        }
        let tag = if continues { TAG_CONTINUES } else { 0 };
        self.block_builder.add(separator, tag, &self.value);
        self.last_key.0.clear();
        self.last_key.0.extend_from_slice(separator.user_key);
        (self.last_key.1, self.last_key.2) = (separator.seqno, tag);
    }

    fn finish_partition(&mut self) {
        debug_assert!(!self.block_builder.is_empty(), "a partition has an entry");
        let (key, seqno, tag) = self.last_key.clone();
        let raw = self.block_builder.finish().to_vec();
        self.partition_bytes += raw.len() as u64;
        self.partitions.push(MetadataPartition { key, seqno, tag, raw });
        self.block_builder.clear();
    }

    /// Returns all partitions; at least one if an entry was added.
    pub(crate) fn finish(mut self) -> Vec<MetadataPartition> {
        if !self.block_builder.is_empty() {
            self.finish_partition();
        }
        self.partitions
    }

    /// Number of bytes collected so far.
    pub(crate) fn estimated_bytes(&self) -> u64 {
        self.partition_bytes + self.block_builder.len() as u64
    }
}

/// Builds the top-level block of `partitions`, which are stored at `handles`.
pub(crate) fn build_top_level(partitions: &[MetadataPartition], handles: &[BlockHandle]) -> Vec<u8> {
    debug_assert_eq!(partitions.len(), handles.len(), "each partition has a handle");
    debug_assert!(
        handles.windows(2).all(|pair| is_padding_range(pair[0].offset + pair[0].len, pair[1].offset)),
        "partitions are adjacent but for padding, in the order of their keys"
    );
    let mut top = RestartBlockBuilder::new(RESTART_INTERVAL);
    let mut value = Vec::new();
    for (partition, handle) in partitions.iter().zip(handles) {
        value.clear();
        handle.encode(&mut value);
        top.add(InternalKey::new(&partition.key, partition.seqno), partition.tag, &value);
    }
    top.finish().to_vec()
}

/// The handle of the only partition; `None` if the top level has several.
pub(crate) fn single_partition(top: &RestartBlock) -> Result<Option<BlockHandle>> {
    if top.count() > 1 { Ok(None) } else { BlockHandle::decode(top.parse_restart(0)?.value).map(Some) }
}

/// The index of an open table.
pub(crate) enum TableIndex {
    /// The only partition. The top level contains nothing but its handle.
    Single(TableBlockSlot<IndexPartitionBlock>),
    /// The top level, whose partitions are in the cache.
    Partitioned(TableBlockSlot<TopLevelIndexBlock>),
}

/// Number of the first entry of an index block at or after `target`; also the number of its child link.
#[inline]
pub(crate) fn lower_bound_entry(
    block: &RestartBlock,
    target: InternalKey<'_>,
    order: &KeyOrder,
) -> Result<Option<usize>> {
    let before = block.restarts_before(target, order)?;
    Ok((before < block.restarts()).then_some(before))
}

/// Whether the last user key of the block of the `at`-th entry continues in the next block.
pub(crate) fn entry_continues(partition: &RestartBlock, at: usize) -> Result<bool> {
    Ok(partition.parse_restart(at)?.tag & TAG_CONTINUES != 0)
}

impl TableIndex {
    /// The index partition and the number of the entry in it for the data block that contains the first entry at or
    /// after `target`. `None` if all entries are before `target`.
    #[inline]
    pub(crate) fn find_entry<'a>(
        &'a self,
        fetcher: &BlockFetcher,
        target: InternalKey<'_>,
        order: &KeyOrder,
        pin: &'a Pin,
    ) -> Result<Option<(BlockRef<'a, IndexPartitionBlock>, usize)>> {
        let Some(partition) = self.find_partition(fetcher, target, order, pin)? else { return Ok(None) };
        let at = self.find_in_partition(&partition, target, order)?;
        Ok(at.map(|at| (partition, at)))
    }

    /// The first step of [`find_entry`](TableIndex::find_entry): the index partition.
    #[inline(always)]
    pub(crate) fn find_partition<'a>(
        &'a self,
        fetcher: &BlockFetcher,
        target: InternalKey<'_>,
        order: &KeyOrder,
        pin: &'a Pin,
    ) -> Result<Option<BlockRef<'a, IndexPartitionBlock>>> {
        match self {
            TableIndex::Single(partition) => partition.get(fetcher, pin).map(Some),
            TableIndex::Partitioned(top) => {
                let top = top.get(fetcher, pin)?;
                let Some(at) = lower_bound_entry(&top, target, order)? else { return Ok(None) };
                fetcher.fetch_child(&top, at, BlockKind::IndexPartition, pin).map(Some)
            }
        }
    }

    /// The second step of [`find_entry`](TableIndex::find_entry): the number of the entry in the partition.
    #[inline(always)]
    pub(crate) fn find_in_partition(
        &self,
        partition: &RestartBlock,
        target: InternalKey<'_>,
        order: &KeyOrder,
    ) -> Result<Option<usize>> {
        match lower_bound_entry(partition, target, order)? {
            Some(at) => Ok(Some(at)),
            None if matches!(self, TableIndex::Single(_)) => Ok(None),
            None => Err(partition_ends_early_error()),
        }
    }

    /// Bytes of the index that the open table holds outside of the cache.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        match self {
            TableIndex::Single(slot) => slot.pinned_bytes(),
            TableIndex::Partitioned(slot) => slot.pinned_bytes(),
        }
    }
}

/// An iterator over the data blocks of a table, in the order of the index. It is not valid until the first seek.
/// After an error its position is undefined until a seek succeeds.
pub(crate) struct IndexIter {
    /// The top level and the position in it; `None` if there is only one partition.
    top_level: Option<(Arc<TopLevelIndexBlock>, usize)>,
    /// The partition and the position in it, while the iterator is valid.
    partition: Option<(Arc<IndexPartitionBlock>, usize)>,
    fill_cache: bool,
}

impl IndexIter {
    pub(crate) fn new(fill_cache: bool) -> IndexIter {
        IndexIter { top_level: None, partition: None, fill_cache }
    }

    /// The partition and the number of the entry in it that names the current block; `None` if the iterator is not
    /// valid.
    pub(crate) fn position(&self) -> Option<(&Arc<IndexPartitionBlock>, usize)> {
        self.partition.as_ref().map(|(partition, at)| (partition, *at))
    }

    /// Handle, separator and tag of the current block.
    pub(crate) fn entry(&self) -> Result<Option<(BlockHandle, InternalKey<'_>, u8)>> {
        let Some((partition, at)) = &self.partition else { return Ok(None) };
        let entry = partition.parse_restart(*at)?;
        Ok(Some((BlockHandle::decode(entry.value)?, InternalKey::new(entry.rest, entry.seqno), entry.tag)))
    }

    pub(crate) fn seek_to_first(&mut self, index: &TableIndex, fetcher: &BlockFetcher) -> Result<()> {
        self.seek_with(index, fetcher, |_| Ok(Some(0)))
    }

    pub(crate) fn seek_to_last(&mut self, index: &TableIndex, fetcher: &BlockFetcher) -> Result<()> {
        self.seek_with(index, fetcher, |block| Ok(block.count().checked_sub(1)))
    }

    /// Moves to the block that contains the first entry at or after `target`.
    pub(crate) fn seek(
        &mut self,
        index: &TableIndex,
        fetcher: &BlockFetcher,
        target: InternalKey<'_>,
        order: &KeyOrder,
    ) -> Result<()> {
        self.seek_with(index, fetcher, |block| lower_bound_entry(block, target, order))
    }

    pub(crate) fn next(&mut self, fetcher: &BlockFetcher) -> Result<()> {
        self.advance(fetcher, |at, count| Some(at + 1).filter(|at| *at < count), |_| Some(0))
    }

    pub(crate) fn prev(&mut self, fetcher: &BlockFetcher) -> Result<()> {
        self.advance(fetcher, |at, _| at.checked_sub(1), |count| count.checked_sub(1))
    }

    /// Finds the position in the top level, then the position in the partition that it refers to.
    fn seek_with(
        &mut self,
        index: &TableIndex,
        fetcher: &BlockFetcher,
        find: impl Fn(&RestartBlock) -> Result<Option<usize>>,
    ) -> Result<()> {
        (self.top_level, self.partition) = (None, None);
        match index {
            TableIndex::Single(slot) => {
                let partition = slot.fetch_arc(fetcher)?;
                self.partition = find(&partition)?.map(|at| (partition, at));
            }
            TableIndex::Partitioned(slot) => {
                let top = slot.fetch_arc(fetcher)?;
                let Some(at) = find(&top)? else { return Ok(()) };
                let partition: Arc<IndexPartitionBlock> =
                    fetcher.fetch_child_arc(&top, at, BlockKind::IndexPartition, self.fill_cache, None)?;
                let partition_at = find(&partition)?.ok_or_else(partition_ends_early_error)?;
                (self.top_level, self.partition) = (Some((top, at)), Some((partition, partition_at)));
            }
        }
        Ok(())
    }

    /// Moves by one entry in the partition. At its end, moves by one entry in the top level, to the near end of that
    /// partition.
    fn advance(
        &mut self,
        fetcher: &BlockFetcher,
        on: impl Fn(usize, usize) -> Option<usize>,
        near_end: impl FnOnce(usize) -> Option<usize>,
    ) -> Result<()> {
        let Some((partition, at)) = &mut self.partition else { return Ok(()) };
        debug_assert!(*at < partition.count(), "a valid iterator is at an entry of its partition");
        if let Some(next) = on(*at, partition.count()) {
            *at = next;
            return Ok(());
        }
        self.partition = None;
        let Some((top, at)) = &mut self.top_level else { return Ok(()) };
        let Some(next) = on(*at, top.count()) else { return Ok(()) };
        *at = next;
        let partition: Arc<IndexPartitionBlock> =
            fetcher.fetch_child_arc(top, next, BlockKind::IndexPartition, self.fill_cache, None)?;
        self.partition = near_end(partition.count()).map(|at| (partition, at));
        Ok(())
    }
}

#[cold]
fn partition_ends_early_error() -> Error {
    Error::corruption("index partition ends before its top-level entry")
}
