//! The index: which data block a key is in. Two levels; its rules are drawn in `docs/format/table.md`.

use std::sync::Arc;

use crate::base::{Error, InternalKey, KeyOrder, Result, SeqNo};
use crate::block::cached_block::{IndexPartitionBlock, TopLevelIndexBlock};
use crate::block::restart_block::RestartBlock;
use crate::block::{BlockHandle, BlockKind, RestartBlockBuilder};
use crate::mem::epoch::Pin;
use crate::table::block_fetcher::{BlockFetcher, BlockRef, TableBlockSlot};

/// Bit of an index entry's tag: the next block begins with an older version of the user key that this one ends with.
pub(crate) const TAG_CONTINUES: u8 = 1;
/// Index blocks are searched more than they are stored: every entry is a restart, and has the link of its number.
const RESTART_INTERVAL: u8 = 1;

/// A finished piece of an index or a filter, and the entry of the top that will lead to it.
pub(crate) struct MetadataPartition {
    pub(crate) key: Vec<u8>,
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) raw: Vec<u8>,
}

/// Collects the entries of the index into pieces, which are kept until the data is written.
pub(crate) struct IndexBuilder {
    block_builder: RestartBlockBuilder,
    /// None: all in one piece.
    partition_size: Option<usize>,
    last_key: (Vec<u8>, SeqNo, u8),
    partitions: Vec<MetadataPartition>,
    partition_bytes: u64,
    value: Vec<u8>,
}

impl IndexBuilder {
    pub(crate) fn new(piece_size: Option<u32>) -> IndexBuilder {
        IndexBuilder {
            block_builder: RestartBlockBuilder::new(RESTART_INTERVAL),
            partition_size: piece_size.map(|size| size as usize),
            last_key: (Vec::new(), SeqNo::ZERO, 0),
            partitions: Vec::new(),
            partition_bytes: 0,
            value: Vec::new(),
        }
    }

    /// The block at `handle` ends at or before `separator`.
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
        let (key, seqno, tag) = self.last_key.clone();
        let raw = self.block_builder.finish().to_vec();
        self.partition_bytes += raw.len() as u64;
        self.partitions.push(MetadataPartition { key, seqno, tag, raw });
        self.block_builder.clear();
    }

    /// All pieces; there is at least one if there was an entry.
    pub(crate) fn finish(mut self) -> Vec<MetadataPartition> {
        if !self.block_builder.is_empty() {
            self.finish_partition();
        }
        self.partitions
    }

    /// Bytes collected so far.
    pub(crate) fn estimated_bytes(&self) -> u64 {
        self.partition_bytes + self.block_builder.len() as u64
    }
}

/// Builds the block that leads to `partitions`, which lie at `handles`.
pub(crate) fn build_top_level(partitions: &[MetadataPartition], handles: &[BlockHandle]) -> Vec<u8> {
    let mut top = RestartBlockBuilder::new(RESTART_INTERVAL);
    let mut value = Vec::new();
    for (partition, handle) in partitions.iter().zip(handles) {
        value.clear();
        handle.encode(&mut value);
        top.add(InternalKey::new(&partition.key, partition.seqno), partition.tag, &value);
    }
    top.finish().to_vec()
}

/// The handle in the only entry of a top that has just one.
pub(crate) fn single_partition(top: &RestartBlock) -> Result<Option<BlockHandle>> {
    if top.count() > 1 { Ok(None) } else { BlockHandle::decode(top.parse_restart(0)?.value).map(Some) }
}

/// The index of an open table.
pub(crate) enum TableIndex {
    /// One piece; its top says nothing more than where it is.
    Single(TableBlockSlot<IndexPartitionBlock>),
    /// The top, which leads to pieces in the cache.
    Partitioned(TableBlockSlot<TopLevelIndexBlock>),
}

/// The first entry of an index block at or behind `target`; its number is also that of its link.
#[inline]
pub(crate) fn lower_bound_entry(
    block: &RestartBlock,
    target: InternalKey<'_>,
    order: &KeyOrder,
) -> Result<Option<usize>> {
    let before = block.restarts_before(target, order)?;
    Ok((before < block.restarts()).then_some(before))
}

/// Whether the user key at the end of the block that the `at`-th entry names goes on in the next one.
pub(crate) fn entry_continues(partition: &RestartBlock, at: usize) -> Result<bool> {
    Ok(partition.parse_restart(at)?.tag & TAG_CONTINUES != 0)
}

impl TableIndex {
    /// The piece, and its entry, for the block that the first entry at or behind `target` is in; `None` if all entries
    /// are before `target`.
    #[inline]
    pub(crate) fn find_entry<'a>(
        &'a self,
        fetcher: &BlockFetcher,
        target: InternalKey<'_>,
        order: &KeyOrder,
        pin: &'a Pin,
    ) -> Result<Option<(BlockRef<'a, IndexPartitionBlock>, usize)>> {
        let partition = match self {
            TableIndex::Single(partition) => partition.get(fetcher, pin)?,
            TableIndex::Partitioned(top) => {
                let top = top.get(fetcher, pin)?;
                let Some(at) = lower_bound_entry(&top, target, order)? else { return Ok(None) };
                fetcher.fetch_child(&top, at, BlockKind::IndexPartition, pin)?
            }
        };
        match lower_bound_entry(&partition, target, order)? {
            Some(at) => Ok(Some((partition, at))),
            None if matches!(self, TableIndex::Single(_)) => Ok(None),
            None => Err(partition_ends_early_error()),
        }
    }

    /// What the open table holds of it outside of the cache, in bytes.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        match self {
            TableIndex::Single(slot) => slot.pinned_bytes(),
            TableIndex::Partitioned(slot) => slot.pinned_bytes(),
        }
    }
}

/// A cursor over the data blocks of a table, in the order of the index. Not valid until the first seek; after an error
/// only a seek that succeeds makes it mean anything again.
pub(crate) struct IndexIter {
    /// Top and place in it; none where there is one piece only.
    top_level: Option<(Arc<TopLevelIndexBlock>, usize)>,
    /// Piece and place in it, while it is valid.
    partition: Option<(Arc<IndexPartitionBlock>, usize)>,
    fill_cache: bool,
}

impl IndexIter {
    pub(crate) fn new(fill_cache: bool) -> IndexIter {
        IndexIter { top_level: None, partition: None, fill_cache }
    }

    /// The piece that names the block it stands on, and which entry does; `None` where it is not valid.
    pub(crate) fn position(&self) -> Option<(&Arc<IndexPartitionBlock>, usize)> {
        self.partition.as_ref().map(|(partition, at)| (partition, *at))
    }

    /// The block it stands on, with separator and tag of its entry.
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

    /// To the block with the first entry at or behind `target`.
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

    /// Finds the place in the top, then that in the piece that it leads to.
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
                let in_piece = find(&partition)?.ok_or_else(partition_ends_early_error)?;
                (self.top_level, self.partition) = (Some((top, at)), Some((partition, in_piece)));
            }
        }
        Ok(())
    }

    /// One on in the piece, or else in the top and to the near end of the piece there.
    fn advance(
        &mut self,
        fetcher: &BlockFetcher,
        on: impl Fn(usize, usize) -> Option<usize>,
        near_end: impl FnOnce(usize) -> Option<usize>,
    ) -> Result<()> {
        let Some((partition, at)) = &mut self.partition else { return Ok(()) };
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
    Error::corruption("piece of the index ends before its top says")
}
