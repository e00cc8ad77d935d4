//! Lookups of several keys in tables, in stages: filter, index, data block. In each stage the memory that the next one
//! reads is prefetched for all keys, so that cache misses of the processor overlap. Data blocks that are not in the
//! block cache are read together, in the order of files and offsets.

use std::sync::Arc;

use crate::base::{InternalKey, RecordKind, Result, SeqNo};
use crate::block::cached_block::IndexPartitionBlock;
use crate::block::{Block, BlockHandle, BlockKind, FilterBlock};
use crate::mem::buffer_pool::Buffer;
use crate::mem::epoch::Pin;
use crate::mem::simd::prefetch;
use crate::table::block_fetcher::{BlockRef, BlockValue, FrameBytes, child_handle};
use crate::table::format::is_padding_range;
use crate::table::reader::{PointLookup, TableReader};
use crate::vfs::read_many::{RangeRead, finished, read_all};

/// Number of lookups in a stage. More would evict what was prefetched for the first of them.
const STAGE_LEN: usize = 32;
/// Maximum number of bytes of adjacent blocks that are read at once.
const ADJACENT_READ_MAX: u64 = 256 << 10;
/// Maximum number of bytes of missing blocks that are in memory at the same time, unless one block is larger.
const MISSING_BYTES_MAX: u64 = 1 << 20;

/// A lookup of a key in one table.
pub(crate) struct TableLookup<'a> {
    /// The caller's number of the key.
    pub(crate) number: usize,
    pub(crate) table: &'a TableReader,
    pub(crate) lookup: &'a PointLookup<'a>,
}

/// A [`TableLookup`] and what the stages have found for it.
struct LookupState<'l, 'p> {
    of: &'l TableLookup<'l>,
    hash: Option<u64>,
    filter: Option<BlockRef<'p, FilterBlock>>,
    partition: Option<BlockRef<'p, IndexPartitionBlock>>,
    /// Number of the entry in `partition`.
    entry: usize,
    block: Option<BlockRef<'p, Block>>,
}

/// A data block that must be read from its file, for one lookup.
struct MissingBlock<'l> {
    of: &'l TableLookup<'l>,
    hash: Option<u64>,
    partition: Arc<IndexPartitionBlock>,
    entry: usize,
    handle: BlockHandle,
}

impl<'a> TableLookup<'a> {
    fn target(&self) -> InternalKey<'a> {
        InternalKey::new(self.lookup.key, self.lookup.snapshot_seqno)
    }
}

/// Looks up each key in its table, as [`TableReader::get_with`] does. Calls `found` with the number of each key that is
/// found, and its version. The epoch is pinned, but not while data blocks are read.
///
/// # Errors
/// Those of [`TableReader::get_with`]. `found` may have been called for some keys.
pub(crate) fn find_all(
    lookups: &[TableLookup<'_>],
    found: &mut impl FnMut(usize, SeqNo, RecordKind, BlockValue<'_>) -> Result<()>,
) -> Result<()> {
    let mut missing = Vec::new();
    for lookups in lookups.chunks(STAGE_LEN) {
        let pin = Pin::new();
        let states = filter_stage(lookups, &pin);
        let states = index_stage(states, &pin)?;
        let states = block_stage(states, &pin, &mut missing)?;
        for state in &states {
            let (Some(block), Some(partition)) = (&state.block, &state.partition) else { continue };
            search(state.of, state.hash, block, partition, state.entry, found)?;
        }
    }
    missing.sort_by_key(|block| (block.of.table.meta.number, block.handle.offset));
    let mut rest = &missing[..];
    while !rest.is_empty() {
        let (now, later) = rest.split_at(round_len(rest));
        read_round(now, found)?;
        rest = later;
    }
    Ok(())
}

fn search(
    of: &TableLookup<'_>,
    hash: Option<u64>,
    block: &BlockRef<'_, Block>,
    partition: &IndexPartitionBlock,
    entry: usize,
    found: &mut impl FnMut(usize, SeqNo, RecordKind, BlockValue<'_>) -> Result<()>,
) -> Result<()> {
    match of.table.search_block(block, partition, entry, of.target(), hash)? {
        Some((entry, kind)) => found(of.number, entry.seqno, kind, BlockValue::in_block(block, entry.value)),
        None => Ok(()),
    }
}

/// Keeps the lookups that the filters do not exclude.
fn filter_stage<'l: 'p, 'p>(lookups: &'l [TableLookup<'l>], pin: &'p Pin) -> Vec<LookupState<'l, 'p>> {
    let mut states: Vec<LookupState<'l, 'p>> = Vec::with_capacity(lookups.len());
    for of in lookups {
        let table = of.table;
        let hash = table.hash_for(of.lookup);
        let mut state = LookupState { of, hash, filter: None, partition: None, entry: 0, block: None };
        if let (Some(filter), Some(hash)) = (&table.filter, hash) {
            match filter.find_partition(&table.fetcher, of.lookup.key, &table.order, pin) {
                Ok(None) => continue,
                Ok(Some(partition)) => {
                    partition.prefetch(hash);
                    state.filter = Some(partition);
                }
                // A filter that cannot be read only costs a search of the data.
                Err(_) => {}
            }
        }
        states.push(state);
    }
    states.retain(|state| match (&state.filter, state.hash) {
        (Some(filter), Some(hash)) => filter.may_contain(hash),
        _ => true,
    });
    states
}

/// Finds the index entry of each lookup, and drops the lookups of keys after the last one of their table.
fn index_stage<'l: 'p, 'p>(mut states: Vec<LookupState<'l, 'p>>, pin: &'p Pin) -> Result<Vec<LookupState<'l, 'p>>> {
    for state in &mut states {
        let table = state.of.table;
        let partition = table.index.find_partition(&table.fetcher, state.of.target(), &table.order, pin);
        state.partition = partition.map_err(|error| error.in_file(table.fetcher.path()))?;
        if let Some(partition) = &state.partition {
            prefetch::<IndexPartitionBlock>(partition);
        }
    }
    for state in &states {
        if let Some(partition) = &state.partition {
            partition.prefetch_search();
        }
    }
    for state in &mut states {
        let table = state.of.table;
        let Some(partition) = &state.partition else { continue };
        let entry = table.index.find_in_partition(partition, state.of.target(), &table.order);
        match entry.map_err(|error| error.in_file(table.fetcher.path()))? {
            Some(entry) => {
                state.entry = entry;
                partition.prefetch_link(entry);
            }
            None => state.partition = None,
        }
    }
    states.retain(|state| state.partition.is_some());
    Ok(states)
}

/// Finds the cached data blocks, and adds the others to `missing`.
fn block_stage<'l: 'p, 'p>(
    mut states: Vec<LookupState<'l, 'p>>,
    pin: &'p Pin,
    missing: &mut Vec<MissingBlock<'l>>,
) -> Result<Vec<LookupState<'l, 'p>>> {
    for state in &mut states {
        let (of, entry) = (state.of, state.entry);
        let Some(partition) = &state.partition else { continue };
        let fetcher = &of.table.fetcher;
        match fetcher.cached_child(partition, entry, BlockKind::Data, pin)? {
            Some(block) => {
                prefetch::<Block>(&block);
                state.block = Some(block);
            }
            None => {
                let handle = child_handle(partition, entry)?;
                missing.push(MissingBlock { of, hash: state.hash, partition: partition.to_arc(), entry, handle });
            }
        }
    }
    let blocks = || states.iter().filter_map(|state| Some((state.block.as_ref()?, state.hash)));
    blocks().for_each(|(block, _)| block.prefetch_lookup());
    blocks().for_each(|(block, hash)| block.prefetch_entry(hash));
    Ok(states)
}

/// The number of missing blocks that are read in the next round.
fn round_len(missing: &[MissingBlock<'_>]) -> usize {
    debug_assert!(!missing.is_empty(), "a round reads a block");
    let mut bytes = 0u64;
    let fits = |block: &&MissingBlock<'_>| {
        bytes = bytes.saturating_add(block.handle.len);
        bytes <= MISSING_BYTES_MAX
    };
    missing.iter().take_while(fits).count().max(1)
}

/// Whether `next` is in the same read as the blocks from offset `start` that end with `last`.
fn continues_read(start: u64, last: &MissingBlock<'_>, next: &MissingBlock<'_>) -> bool {
    let same_file = last.of.table.meta.number == next.of.table.meta.number;
    let end = |handle: BlockHandle| handle.offset.saturating_add(handle.len);
    let follows = next.handle == last.handle || is_padding_range(end(last.handle), next.handle.offset);
    same_file && follows && end(next.handle) - start <= ADJACENT_READ_MAX
}

/// Reads the sorted missing blocks, adjacent ones by one read, and searches them.
fn read_round(
    missing: &[MissingBlock<'_>],
    found: &mut impl FnMut(usize, SeqNo, RecordKind, BlockValue<'_>) -> Result<()>,
) -> Result<()> {
    let position = |block: &MissingBlock<'_>| (block.of.table.meta.number, block.handle.offset);
    debug_assert!(missing.is_sorted_by_key(position), "missing blocks are in the order of files and offsets");
    let mut groups: Vec<&[MissingBlock<'_>]> = Vec::new();
    let mut rest = missing;
    while let Some(first) = rest.first() {
        let start = first.handle.offset;
        let len = 1 + rest.windows(2).take_while(|pair| continues_read(start, &pair[0], &pair[1])).count();
        let (group, later) = rest.split_at(len);
        groups.push(group);
        rest = later;
    }
    debug_assert_eq!(groups.iter().map(|group| group.len()).sum::<usize>(), missing.len(), "each block is in a group");
    let mut reads: Vec<RangeRead<Buffer>> = Vec::with_capacity(groups.len());
    let (mut read_groups, mut mapped_groups) = (Vec::with_capacity(groups.len()), Vec::new());
    for group in groups {
        let (first, last) = (group[0].handle, group[group.len() - 1].handle);
        let len = last.offset.saturating_add(last.len) - first.offset;
        match group[0].of.table.fetcher.start_read(first.offset, len)? {
            Some(read) => {
                reads.push(read);
                read_groups.push(group);
            }
            None => mapped_groups.push(group),
        }
    }
    read_all(&mut reads);
    for (group, read) in read_groups.into_iter().zip(reads) {
        let bytes = finished(read);
        let bytes = bytes.map_err(|error| group[0].of.table.fetcher.with_location(error, group[0].handle.offset))?;
        search_group(group, Some(bytes), found)?;
    }
    mapped_groups.into_iter().try_for_each(|group| search_group(group, None, found))
}

/// Decodes the blocks of a group, each once, and searches them. `bytes` begin with the first block; `None` if the file
/// is mapped.
fn search_group(
    group: &[MissingBlock<'_>],
    bytes: Option<Buffer>,
    found: &mut impl FnMut(usize, SeqNo, RecordKind, BlockValue<'_>) -> Result<()>,
) -> Result<()> {
    let start = group[0].handle.offset;
    debug_assert!(group.iter().all(|block| block.handle.offset >= start), "the read begins at the first block");
    let (is_mapped, mut whole) = (bytes.is_none(), bytes);
    let mut block: Option<(BlockHandle, BlockRef<'_, Block>)> = None;
    for missing in group {
        let (fetcher, handle) = (&missing.of.table.fetcher, missing.handle);
        let block = match &mut block {
            Some((of, block)) if *of == handle => &*block,
            slot => {
                let is_whole = whole.as_ref().is_some_and(|bytes| bytes.len() as u64 == handle.len);
                let frame = match (&mut whole, is_whole) {
                    (None, false) if is_mapped => FrameBytes::Mapped,
                    (whole, true) => {
                        FrameBytes::Owned(whole.take().expect("the only block of the group is decoded once"))
                    }
                    (Some(bytes), false) => {
                        let from = (handle.offset - start) as usize;
                        FrameBytes::Borrowed(&bytes[from..from + handle.len as usize])
                    }
                    (None, false) => unreachable!("the bytes are taken for the only block of the group"),
                };
                let parent_slot = (Arc::downgrade(&missing.partition) as _, missing.entry);
                let read: Arc<Block> = fetcher.finish_read(handle, BlockKind::Data, frame, parent_slot)?;
                &slot.insert((handle, BlockRef::Shared(read))).1
            }
        };
        search(missing.of, missing.hash, block, &missing.partition, missing.entry, found)?;
    }
    Ok(())
}
