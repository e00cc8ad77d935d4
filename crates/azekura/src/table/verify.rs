//! Checks a whole table: every byte, every count, every promise that the format makes.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::blob_pointer::{BlobPointer, BlobReferencesBuilder};
use crate::base::file_format::{FileFooter, FileHeader};
use crate::base::{Error, InternalKey, RecordKind, Result, SeqNo};
use crate::block::{Block, BlockHandle, BlockIter, BlockKind, FilterBlock};
use crate::table::format::TableProperties;
use crate::table::index::{IndexIter, TAG_CONTINUES};
use crate::table::options::TableReadOptions;
use crate::table::reader::TableReader;

/// What a verified table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableVerifyReport {
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    pub(crate) data_blocks: u64,
    pub(crate) index_partitions: u64,
    pub(crate) filter_partitions: u64,
    /// Of the file.
    pub(crate) bytes: u64,
}

/// What has been seen of the table so far.
struct TableVerifier<'a> {
    table: &'a TableReader,
    /// Where each frame lies; together they tile the file.
    frames: Vec<BlockHandle>,
    observed: TableProperties,
    last_key: (Vec<u8>, SeqNo),
    /// The separator of the block before, and whether its last user key goes on.
    separator: Option<(Vec<u8>, SeqNo, bool)>,
    filter: Option<FilterVerifier>,
    references: BlobReferencesBuilder,
}

/// A walk over the pieces of the filter beside the keys.
struct FilterVerifier {
    top_level: BlockIter,
    partition: Arc<FilterBlock>,
}

impl TableReader {
    /// Reads all of the file, past the cache.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first thing that is wrong.
    pub(crate) fn verify(&self) -> Result<TableVerifyReport> {
        let mut walk = TableVerifier {
            table: self,
            frames: Vec::new(),
            observed: TableProperties { smallest_seqno: SeqNo::MAX, ..TableProperties::default() },
            last_key: (Vec::new(), SeqNo::ZERO),
            separator: None,
            filter: None,
            references: BlobReferencesBuilder::default(),
        };
        walk.verify_table().map_err(|error| error.in_file(self.fetcher.path()))
    }
}

impl TableVerifier<'_> {
    fn verify_table(&mut self) -> Result<TableVerifyReport> {
        let fetcher = &self.table.fetcher;
        let file = fetcher.files.get(fetcher.id)?;
        if file.length()? != fetcher.size {
            return Err(Error::corruption("file has another length than when it was opened"));
        }
        self.verify_sections()?;
        self.verify_index_top_level()?;
        self.verify_data()?;
        self.verify_filter_end()?;
        if std::mem::take(&mut self.references).finish()? != self.table.blob_references()? {
            return Err(Error::corruption("entries of the table point to other values than its references say"));
        }
        self.verify_frame_coverage()?;
        self.verify_properties()?;
        let seen = &self.observed;
        Ok(TableVerifyReport {
            entries: seen.entries,
            tombstones: seen.tombstones,
            data_blocks: seen.data_blocks,
            index_partitions: seen.index_partitions,
            filter_partitions: seen.filter_partitions,
            bytes: fetcher.size,
        })
    }

    /// Opens the file anew, so that header, footer, directory, properties and tops are read again.
    fn verify_sections(&mut self) -> Result<()> {
        let table = self.table;
        let options =
            TableReadOptions { cache_index_and_filter_blocks: false, pin_top_level: true, pin_partitions: false };
        let (files, cache) = (table.fetcher.files.clone(), table.fetcher.cache.clone());
        let again = TableReader::open(files, cache, &table.meta, table.order.clone(), 0, options)?;
        if again.properties() != table.properties() || again.metaindex != table.metaindex {
            return Err(Error::corruption("file is not the one that was opened"));
        }
        let directory = &table.metaindex;
        self.frames.extend([directory.properties, directory.index_top]);
        self.frames.extend(directory.filter_top);
        self.frames.extend(directory.blob_references);
        self.frames.extend(&directory.ignored_sections);
        let Some(handle) = directory.filter_top else { return Ok(()) };
        let mut top = BlockIter::new(table.fetcher.read_block::<Block>(handle, BlockKind::TopLevelFilter)?);
        top.seek_to_first()?;
        let partition = self.read_filter_partition(&top)?;
        self.filter = Some(FilterVerifier { top_level: top, partition });
        Ok(())
    }

    fn read_filter_partition(&mut self, top: &BlockIter) -> Result<Arc<FilterBlock>> {
        let handle = BlockHandle::decode(top.value())?;
        self.frames.push(handle);
        self.observed.filter_partitions += 1;
        self.observed.filter_bytes += handle.len;
        self.table.fetcher.read_block(handle, BlockKind::FilterPartition)
    }

    /// Reads the pieces of the index and checks each against its entry in the top.
    fn verify_index_top_level(&mut self) -> Result<()> {
        let fetcher = &self.table.fetcher;
        let handle = self.table.metaindex.index_top;
        let mut top = BlockIter::new(fetcher.read_block::<Block>(handle, BlockKind::TopLevelIndex)?);
        top.seek_to_first()?;
        while top.valid() {
            let handle = BlockHandle::decode(top.value())?;
            self.frames.push(handle);
            self.observed.index_partitions += 1;
            self.observed.index_bytes += handle.len;
            let block = fetcher.read_block::<Block>(handle, BlockKind::IndexPartition)?;
            let count = block.count();
            let mut partition = BlockIter::new(block);
            partition.seek_to_last()?;
            if (partition.key(), partition.tag()) != (top.key(), top.tag()) || count == 0 {
                return Err(
                    Error::corruption("piece of the index does not end as its top says").at_offset(handle.offset)
                );
            }
            top.next()?;
        }
        Ok(())
    }

    fn verify_data(&mut self) -> Result<()> {
        let (index, fetcher) = (&self.table.index, &self.table.fetcher);
        let mut cursor = IndexIter::new(false);
        cursor.seek_to_first(index, fetcher)?;
        while let Some((handle, separator, tag)) = cursor.entry()? {
            let bound = (separator.user_key.to_vec(), separator.seqno, tag & TAG_CONTINUES != 0);
            self.verify_data_block(handle).map_err(|error| error.at_offset(handle.offset))?;
            self.verify_separator(bound).map_err(|error| error.at_offset(handle.offset))?;
            cursor.next(fetcher)?;
        }
        if self.separator.as_ref().is_some_and(|(_, _, continues)| *continues) {
            return Err(Error::corruption("last block of the table claims to go on"));
        }
        Ok(())
    }

    fn verify_data_block(&mut self, handle: BlockHandle) -> Result<()> {
        self.frames.push(handle);
        self.observed.data_blocks += 1;
        self.observed.data_bytes += handle.len;
        let block = self.table.fetcher.read_block::<Block>(handle, BlockKind::Data)?;
        let count = block.count();
        let mut cursor = BlockIter::new(Arc::clone(&block));
        let mut entries = 0;
        cursor.seek_to_first()?;
        self.verify_first_key(cursor.key())?;
        while cursor.valid() {
            self.verify_entry(cursor.key(), RecordKind::from_byte(cursor.tag())?, cursor.value())?;
            self.verify_hash_lookup(&block, cursor.key())?;
            entries += 1;
            cursor.next()?;
        }
        if entries != count {
            return Err(Error::corruption("block has another number of entries than it says"));
        }
        Ok(())
    }

    /// What leads to entries by their hash leads to this one.
    fn verify_hash_lookup(&self, block: &Block, key: InternalKey<'_>) -> Result<()> {
        let Some(hash) = self.table.hash_key(key.user_key) else { return Ok(()) };
        let found = block.lookup(key, Some(hash), &self.table.order)?;
        match found.filter(|entry| entry.key_matches && entry.seqno == key.seqno) {
            Some(_) => Ok(()),
            None => Err(Error::corruption("block does not lead to a key of its own by its hash")),
        }
    }

    /// The separator before a block lies strictly before its first user key, unless it says that the key goes on.
    fn verify_first_key(&self, first: InternalKey<'_>) -> Result<()> {
        let Some((user, _, continues)) = &self.separator else { return Ok(()) };
        match (self.table.order.cmp(user, first.user_key), continues) {
            (Ordering::Less, false) | (Ordering::Equal, true) => Ok(()),
            _ => Err(Error::corruption("separator of the index does not lie before the next block")),
        }
    }

    /// The separator behind a block is at or behind its last key, and exactly that key if it goes on.
    fn verify_separator(&mut self, bound: (Vec<u8>, SeqNo, bool)) -> Result<()> {
        let separator = InternalKey::new(&bound.0, bound.1);
        let by = InternalKey::new(&self.last_key.0, self.last_key.1).cmp(&separator, &self.table.order);
        let sound = if bound.2 { by.is_eq() } else { by.is_le() && bound.1 == SeqNo::ZERO };
        if !sound {
            return Err(Error::corruption("separator of the index lies before the end of its block"));
        }
        self.separator = Some(bound);
        Ok(())
    }

    fn verify_entry(&mut self, key: InternalKey<'_>, kind: RecordKind, value: &[u8]) -> Result<()> {
        let order = &self.table.order;
        let first = self.observed.entries == 0;
        if !first && InternalKey::new(&self.last_key.0, self.last_key.1).cmp(&key, order).is_ge() {
            return Err(Error::corruption("entries are not in order"));
        }
        if kind == RecordKind::BlobPointer {
            self.references.add(&BlobPointer::decode(value)?);
        }
        let new_key = first || order.cmp(&self.last_key.0, key.user_key).is_lt();
        let seen = &mut self.observed;
        if !new_key {
            seen.count_superseded(self.last_key.1);
        }
        if first {
            seen.smallest_key = (key.user_key.to_vec(), key.seqno);
        }
        seen.entries += 1;
        seen.tombstones += u64::from(kind.is_tombstone());
        seen.raw_bytes += (key.user_key.len() + value.len()) as u64;
        seen.smallest_seqno = seen.smallest_seqno.min(key.seqno);
        seen.largest_seqno = seen.largest_seqno.max(key.seqno);
        self.last_key.0.clear();
        self.last_key.0.extend_from_slice(key.user_key);
        self.last_key.1 = key.seqno;
        if new_key { self.verify_filter_has_key(key.user_key) } else { Ok(()) }
    }

    /// The piece of the filter that the bounds lead to lets the key through.
    fn verify_filter_has_key(&mut self, user: &[u8]) -> Result<()> {
        let order = self.table.order.clone();
        let Some(mut walk) = self.filter.take() else { return Ok(()) };
        if order.hash_input(user, &mut Vec::new()).is_none() {
            self.observed.filter_keys += 1; // an order that only its owner knows: the pieces are read at the end
            self.filter = Some(walk);
            return Ok(());
        }
        while walk.top_level.valid() && order.cmp(walk.top_level.key().user_key, user).is_lt() {
            walk.top_level.next()?;
            if walk.top_level.valid() {
                walk.partition = self.read_filter_partition(&walk.top_level)?;
            }
        }
        let holds =
            walk.top_level.valid() && self.table.hash_key(user).is_none_or(|hash| walk.partition.may_contain(hash));
        self.observed.filter_keys += 1;
        self.filter = Some(walk);
        if holds { Ok(()) } else { Err(Error::corruption("filter does not know a key of the table")) }
    }

    /// Every piece of the filter was come by.
    fn verify_filter_end(&mut self) -> Result<()> {
        let Some(mut walk) = self.filter.take() else { return Ok(()) };
        walk.top_level.next()?;
        while walk.top_level.valid() && !self.table.order.can_hash_keys() {
            self.read_filter_partition(&walk.top_level)?;
            walk.top_level.next()?;
        }
        if walk.top_level.valid() { Err(Error::corruption("filter goes on behind the last key")) } else { Ok(()) }
    }

    /// The frames fill the file between header and footer, without gaps and without sharing.
    fn verify_frame_coverage(&mut self) -> Result<()> {
        let footer = self.table.fetcher.size - FileFooter::LEN as u64;
        self.frames.sort_unstable();
        let mut at = FileHeader::LEN as u64;
        for frame in &self.frames {
            if frame.offset != at {
                return Err(Error::corruption("frames of the table do not lie one behind the other").at_offset(at));
            }
            at = frame.end()?;
        }
        // What is left is the directory, which opening has found to end at the footer.
        if at < footer { Ok(()) } else { Err(Error::corruption("table has no directory").at_offset(at)) }
    }

    fn verify_properties(&mut self) -> Result<()> {
        let properties = self.table.properties();
        let meta = &self.table.meta;
        // Tables of older versions say nothing of superseded entries.
        let says = properties.smallest_superseding_seqno > SeqNo::ZERO;
        let seen = TableProperties {
            superseded_entries: if says { self.observed.superseded_entries } else { 0 },
            smallest_superseding_seqno: if says { self.observed.smallest_superseding_seqno } else { SeqNo::ZERO },
            largest_key: std::mem::take(&mut self.last_key),
            hash_seed: properties.hash_seed,
            comparator: properties.comparator.clone(),
            compression: properties.compression,
            data_block_index_type: properties.data_block_index_type,
            created_ms: properties.created_ms,
            partitioned: properties.partitioned,
            ..std::mem::take(&mut self.observed)
        };
        if seen != *properties {
            return Err(Error::corruption("table has other entries or blocks than its properties say"));
        }
        let same_meta = (seen.raw_bytes, &seen.smallest_key, &seen.largest_key, seen.created_ms)
            == (meta.raw_bytes, &meta.smallest_key, &meta.largest_key, meta.created_ms);
        self.observed = seen;
        if same_meta { Ok(()) } else { Err(Error::corruption("table has other bounds than the manifest says")) }
    }
}
