//! An open table: opening and lookups.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::blob_pointer::BlobReferences;
use crate::base::checksum::key_hash;
use crate::base::compression::CompressionType;
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::version_edit::{FileNumber, TableMeta};
use crate::base::{Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::block::cached_block::{DecodableBlock, TopLevelFilterBlock, TopLevelIndexBlock};
use crate::block::frame::{BlockContents, open_frame};
use crate::block::restart_block::RestartBlock;
use crate::block::search::BlockLookup;
use crate::block::{Block, BlockCache, BlockHandle, BlockIter, BlockKind, FilterBlock};
use crate::mem::epoch::Pin;
use crate::table::block_fetcher::{BlockFetcher, BlockRef, BlockValue, TableBlockSlot, child_handle};
use crate::table::filter::{FilterCheck, TableFilter, UnlinkedPartition};
use crate::table::filter_usage::FilterUsage;
use crate::table::format::{TableMetaindex, TableOrigin, TableProperties};
use crate::table::index::{TableIndex, entry_continues, single_partition};
use crate::table::options::TableReadOptions;
use crate::table::prefix::prefix_hash;
use crate::table::writer;
use crate::vfs::open_files::DataFiles;

/// Bytes that opening reads from the end of the file in one read: enough for the footer, the metaindex, the
/// properties and the top levels of tables with about ten thousand blocks.
const TAIL_LEN: u64 = 8 << 10;
/// Maximum length in bytes of an index or filter block that the table pins because the cache is too small for it.
const PINNED_BLOCK_MAX: u64 = 16 << 10;

/// A point lookup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PointLookup<'a> {
    pub(crate) key: &'a [u8],
    /// Hash of the key with the seed of the database; `None` if the order allows no hash.
    pub(crate) hash: Option<u64>,
    pub(crate) snapshot_seqno: SeqNo,
}

impl<'a> PointLookup<'a> {
    /// Creates a lookup of `key` as of `at`, in a database with that hash seed.
    pub(crate) fn new(key: &'a [u8], at: SeqNo, order: &KeyOrder, hash_seed: u64) -> PointLookup<'a> {
        let hash = order.hash_input(key, &mut Vec::new()).map(|bytes| key_hash(hash_seed, bytes));
        PointLookup { key, hash, snapshot_seqno: at }
    }
}

/// An open table. Thread safe. It does not keep its file open.
pub(crate) struct TableReader {
    pub(crate) fetcher: BlockFetcher,
    pub(crate) order: KeyOrder,
    pub(crate) index: TableIndex,
    pub(crate) filter: Option<TableFilter>,
    filter_usage: FilterUsage,
    pub(crate) metaindex: TableMetaindex,
    properties: TableProperties,
    pub(crate) meta: TableMeta,
    /// Whether the table has the same hash seed as the database, so that the hash of a lookup can be used.
    hash_seed_matches: bool,
}

impl TableReader {
    /// Opens a table. Reads the header and the end of the file. `db_hash_seed` is the seed of the hashes in lookups.
    ///
    /// # Errors
    /// `Corruption` if the file is not the table that `meta` describes, `Invalid` if it was written with another
    /// comparator, `Unsupported` if a newer version wrote it.
    pub(crate) fn open(
        files: &DataFiles,
        cache: Arc<BlockCache>,
        meta: &TableMeta,
        order: KeyOrder,
        db_hash_seed: u64,
        options: TableReadOptions,
    ) -> Result<TableReader> {
        let path = files.path(meta.number);
        let mut fetcher = BlockFetcher::new(files, cache, meta.number, meta.size);
        fetcher.pin_partitions = options.pin_partitions;
        let opened = TableTail::read(&mut fetcher).and_then(|tail| {
            let properties = tail.properties()?;
            check_properties(&properties, meta, &order)?;
            let index = tail.open_index(&fetcher, &properties, options)?;
            let filter = tail.open_filter(&fetcher, &properties, options, &order)?;
            Ok((tail.metaindex, properties, index, filter))
        });
        let (metaindex, mut properties, index, filter) = opened.map_err(|error| error.in_file(path))?;
        fetcher.is_compressed = properties.compression != CompressionType::None;
        properties.origin = TableOrigin::Unknown;
        let hash_seed_matches = properties.hash_seed == db_hash_seed;
        let filter_usage = FilterUsage::new();
        let meta = meta.clone();
        Ok(TableReader { fetcher, order, index, filter, filter_usage, metaindex, properties, meta, hash_seed_matches })
    }

    /// Derives the manifest's description of a table from its file alone.
    ///
    /// # Errors
    /// As [`open`](TableReader::open).
    pub(crate) fn read_meta(files: &DataFiles, cache: &Arc<BlockCache>, id: FileNumber) -> Result<TableMeta> {
        let (fetcher, tail) = TableReader::read_tail(files, cache, id)?;
        let references = match tail.metaindex.blob_references {
            Some(handle) => fetcher.read_blob_references(handle)?,
            None => BlobReferences::default(),
        };
        Ok(writer::table_meta(id, fetcher.size, tail.properties()?, &references))
    }

    /// The properties of a table, from its file alone.
    ///
    /// # Errors
    /// As [`open`](TableReader::open).
    pub(crate) fn read_properties(
        files: &DataFiles,
        cache: &Arc<BlockCache>,
        id: FileNumber,
    ) -> Result<TableProperties> {
        TableReader::read_tail(files, cache, id)?.1.properties()
    }

    /// A key after all keys that a damaged block at this offset can have: the separator of the data block or the index
    /// partition in the index. `None` if the index names no such block.
    ///
    /// # Errors
    /// `Io` or `Corruption` if the top level of the index cannot be read. Damaged partitions are skipped.
    pub(crate) fn last_key_of_block(&self, offset: u64) -> Result<Option<Vec<u8>>> {
        let mut top =
            BlockIter::new(self.fetcher.read_block::<Block>(self.metaindex.index_top, BlockKind::TopLevelIndex)?);
        top.seek_to_first()?;
        while top.valid() {
            let handle = BlockHandle::decode(top.value())?;
            if handle.offset == offset {
                return Ok(Some(top.key().user_key.to_vec()));
            }
            if let Ok(block) = self.fetcher.read_block::<Block>(handle, BlockKind::IndexPartition) {
                let mut partition = BlockIter::new(block);
                partition.seek_to_first()?;
                while partition.valid() {
                    if BlockHandle::decode(partition.value())?.offset == offset {
                        return Ok(Some(partition.key().user_key.to_vec()));
                    }
                    partition.next()?;
                }
            }
            top.next()?;
        }
        Ok(None)
    }

    fn read_tail(files: &DataFiles, cache: &Arc<BlockCache>, id: FileNumber) -> Result<(BlockFetcher, TableTail)> {
        let size = files.get(id)?.length()?;
        let mut fetcher = BlockFetcher::new(files, Arc::clone(cache), id, size);
        let tail = TableTail::read(&mut fetcher)?;
        Ok((fetcher, tail))
    }

    /// Reads the references to values of blob files, without the cache.
    ///
    /// # Errors
    /// `Corruption` if the section is damaged or differs from the manifest.
    pub(crate) fn blob_references(&self) -> Result<BlobReferences> {
        let references = match self.metaindex.blob_references {
            Some(handle) => self.fetcher.read_blob_references(handle)?,
            None => BlobReferences::default(),
        };
        if !references.file_usage().eq(self.meta.blob_usage.iter().copied()) {
            let error = Error::corruption("blob references of the table differ from the manifest");
            return Err(error.in_file(self.fetcher.path()));
        }
        Ok(references)
    }

    /// Looks up the newest version of the key that is not newer than the lookup's snapshot. Tombstones are returned
    /// like values. `read` gets the value without a copy. Cached blocks are reached through child links, and stay in
    /// memory as long as `pin`.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if a block of the lookup cannot be read.
    #[inline(always)]
    pub(crate) fn get_with<R>(
        &self,
        lookup: &PointLookup<'_>,
        pin: &Pin,
        read: impl FnOnce(SeqNo, RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        if self.meta.global_seqno.is_some_and(|global| global > lookup.snapshot_seqno) {
            return Ok(None);
        }
        let hash = self.hash_for(lookup);
        if let (Some(filter), Some(hash)) = (&self.filter, hash) {
            match filter.check_linked(&self.fetcher, lookup.key, hash, &self.order, pin) {
                Ok(FilterCheck::Excluded) => return Ok(None),
                Ok(FilterCheck::Unlinked(partition)) => {
                    return self.get_with_unlinked_filter(&partition, lookup, hash, pin, read);
                }
                // A filter that cannot be read only costs a search of the data.
                Ok(FilterCheck::MayContain) | Err(_) => {}
            }
        }
        self.search_with(lookup, hash, pin, read)
    }

    /// A lookup that may have to read its filter partition from the file.
    #[cold]
    #[inline(never)]
    fn get_with_unlinked_filter<R>(
        &self,
        partition: &UnlinkedPartition<'_>,
        lookup: &PointLookup<'_>,
        hash: u64,
        pin: &Pin,
        read: impl FnOnce(SeqNo, RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        let found = if self.leaves_out_filter(partition)
            || partition.may_contain(&self.fetcher, lookup.key, hash, &self.order, pin).unwrap_or(true)
        {
            self.search_with(lookup, Some(hash), pin, read)?
        } else {
            None
        };
        self.filter_usage.record(found.is_some());
        Ok(found)
    }

    /// Whether a lookup should search the data at once, because the filter would have to be read and excludes little.
    /// While the cache has space, the filter is read, because it stays there.
    fn leaves_out_filter(&self, partition: &UnlinkedPartition<'_>) -> bool {
        self.fetcher.cache.has_evicted()
            && self.filter_usage.leaves_out_filter()
            && partition.is_read_for_lookup(&self.fetcher).unwrap_or(false)
    }

    /// The lookup in the index and the data blocks.
    #[inline(always)]
    fn search_with<R>(
        &self,
        lookup: &PointLookup<'_>,
        hash: Option<u64>,
        pin: &Pin,
        read: impl FnOnce(SeqNo, RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        let target = InternalKey::new(lookup.key, lookup.snapshot_seqno);
        let found = self.index.find_entry(&self.fetcher, target, &self.order, pin);
        let Some((partition, at)) = found.map_err(|error| error.in_file(self.fetcher.path()))? else {
            return Ok(None);
        };
        let block: BlockRef<'_, Block> = self.fetcher.fetch_child(&partition, at, BlockKind::Data, pin)?;
        let found = self.search_block(&block, &partition, at, target, hash)?;
        Ok(found.map(|(entry, kind)| read(entry.seqno, kind, BlockValue::in_block(&block, entry.value))))
    }

    /// The last step of a lookup: the entry of the target in the block of the `at`-th index entry of `partition`.
    #[inline(always)]
    pub(crate) fn search_block<'b>(
        &self,
        block: &'b Block,
        partition: &RestartBlock,
        at: usize,
        target: InternalKey<'_>,
        hash: Option<u64>,
    ) -> Result<Option<(BlockLookup<'b>, RecordKind)>> {
        let found = match self.find_in_block(block, partition, at, target, hash) {
            Ok(Some(entry)) if entry.key_matches => {
                let seqno = self.meta.global_seqno.unwrap_or(entry.seqno);
                RecordKind::from_byte(entry.tag).map(|kind| Some((BlockLookup { seqno, ..entry }, kind)))
            }
            Ok(Some(_)) => Ok(None),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        found.map_err(|error| self.fetcher.with_entry_location(error, partition, at))
    }

    /// The hash of the key of a lookup with the seed of this table.
    #[inline(always)]
    pub(crate) fn hash_for(&self, lookup: &PointLookup<'_>) -> Option<u64> {
        if self.hash_seed_matches { lookup.hash } else { self.hash_key(lookup.key) }
    }

    /// Searches the block of the `at`-th index entry, which contains the first entry at or after the target. If a
    /// lookup by hash finds nothing in the block, the result is final, unless the index entry `continues`. Such an
    /// index entry is exactly the last key of the block, so the block must contain an entry at or after the target.
    /// Only a search by order can find whether it has another key.
    #[inline]
    fn find_in_block<'b>(
        &self,
        block: &'b Block,
        partition: &RestartBlock,
        at: usize,
        target: InternalKey<'_>,
        hash: Option<u64>,
    ) -> Result<Option<BlockLookup<'b>>> {
        match block.lookup(target, hash, &self.order)? {
            None if entry_continues(partition, at)? => match block.lower_bound(target, &self.order)? {
                None => Err(Error::corruption("data block ends before its separator")),
                found => Ok(found),
            },
            found => Ok(found),
        }
    }

    /// Returns false only if the filter shows that the table has no key within the bounds: all keys there would have a
    /// prefix that it excludes.
    pub(crate) fn may_contain_range(&self, lower: Bound<&[u8]>, upper: Bound<&[u8]>) -> bool {
        let (Some(extractor), Some(filter)) = (self.properties.prefix_extractor, &self.filter) else { return true };
        let (Bound::Included(start) | Bound::Excluded(start)) = lower else { return true };
        let Some(prefix) = extractor.common_prefix(lower, upper).filter(|_| self.order.is_bytewise()) else {
            return true;
        };
        let hash = prefix_hash(self.properties.hash_seed, prefix);
        // A filter that cannot be read only costs a search of the data.
        filter.may_contain_prefix(&self.fetcher, start, prefix, hash, &self.order, &Pin::new()).unwrap_or(true)
    }

    pub(crate) fn hash_key(&self, key: &[u8]) -> Option<u64> {
        let mut scratch = Vec::new();
        self.order.hash_input(key, &mut scratch).map(|bytes| key_hash(self.properties.hash_seed, bytes))
    }

    pub(crate) fn properties(&self) -> &TableProperties {
        &self.properties
    }

    /// The file offset of the data block that contains the first entry at or after `target`; the size of the file if
    /// all entries are before it. Reads an index partition.
    ///
    /// # Errors
    /// `Corruption` or `Io` if the index cannot be read.
    pub(crate) fn approximate_offset(&self, target: InternalKey<'_>) -> Result<u64> {
        let pin = Pin::new();
        let found = self.index.find_entry(&self.fetcher, target, &self.order, &pin).and_then(|found| {
            let Some((partition, at)) = found else { return Ok(self.meta.size) };
            Ok(child_handle(&partition, at)?.offset)
        });
        found.map_err(|error| error.in_file(self.fetcher.path()))
    }

    /// Bytes that the open table holds outside of the cache.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let keys = self.meta.smallest_key.0.len() + self.meta.largest_key.0.len();
        let own = size_of::<TableReader>() + 2 * keys + self.properties.comparator.len();
        let filter = self.filter.as_ref().map_or(0, TableFilter::pinned_bytes);
        own as u64 + self.index.pinned_bytes() + filter
    }
}

impl std::fmt::Debug for TableReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Table({}, {} entries)", self.fetcher.id.0, self.properties.entries)
    }
}

/// Checks that the file is the table of the manifest, and that it was written with this order.
fn check_properties(properties: &TableProperties, meta: &TableMeta, order: &KeyOrder) -> Result<()> {
    if properties.comparator != order.name() {
        let (stored, given) = (&properties.comparator, order.name());
        return Err(Error::invalid(format!("table was written with comparator {stored:?} and opened with {given:?}")));
    }
    let stored = (properties.entries, properties.tombstones, properties.smallest_seqno, properties.largest_seqno);
    let (smallest, largest) = (meta.seqno_in_file(meta.smallest_seqno), meta.seqno_in_file(meta.largest_seqno));
    if stored != (meta.entries, meta.tombstones, smallest, largest) {
        return Err(Error::corruption("entry counts or sequence numbers of the table differ from the manifest"));
    }
    Ok(())
}

/// The end of a table file, in memory.
struct TableTail {
    bytes: Vec<u8>,
    /// File offset of `bytes`.
    start_offset: u64,
    file_id: [u8; 16],
    footer: FileFooter,
    metaindex: TableMetaindex,
}

impl TableTail {
    /// Reads the header and the end of the file: in one read if the file is small, otherwise in two, or three if the
    /// top levels are large. Sets the file id of `fetcher`.
    fn read(fetcher: &mut BlockFetcher) -> Result<TableTail> {
        let file = fetcher.file.get()?;
        let size = fetcher.size;
        let found = file.length()?;
        if found != size || size < (FileHeader::LEN + FileFooter::LEN) as u64 {
            return Err(Error::corruption(format!("table has {found} bytes instead of {size} as in the manifest")));
        }
        let len = size.min(TAIL_LEN);
        let mut bytes = vec![0; len as usize];
        let start = size - len;
        file.read_exact_at(&mut bytes, start)?;
        let mut header = [0; FileHeader::LEN];
        if start == 0 {
            header.copy_from_slice(&bytes[..FileHeader::LEN]);
        } else {
            file.read_exact_at(&mut header, 0)?;
        }
        fetcher.file_id = FileHeader::decode(FileKind::Table, &header)?.file_id;
        let footer_bytes = bytes.last_chunk::<{ FileFooter::LEN }>().expect("the file is longer than a footer");
        let footer = FileFooter::decode(FileKind::Table, footer_bytes, &fetcher.file_id, size)
            .map_err(|error| error.at_offset(size - FileFooter::LEN as u64))?;
        let mut tail = TableTail {
            bytes,
            start_offset: start,
            file_id: fetcher.file_id,
            footer,
            metaindex: TableMetaindex::default(),
        };
        tail.metaindex = tail.decode_metaindex(fetcher)?;
        tail.extend_to_sections(fetcher)?;
        debug_assert_eq!(tail.start_offset + tail.bytes.len() as u64, size, "the tail ends with the file");
        Ok(tail)
    }

    fn decode_metaindex(&self, fetcher: &BlockFetcher) -> Result<TableMetaindex> {
        let handle = BlockHandle { offset: self.footer.metaindex_offset, len: self.footer.metaindex_len };
        let body = if handle.offset >= self.start_offset {
            self.body(handle, BlockKind::Metaindex)?
        } else {
            fetcher.read_body(handle, BlockKind::Metaindex)? // only a newer version writes such a large metaindex
        };
        TableMetaindex::decode(&body).map_err(|error| error.at_offset(handle.offset))
    }

    /// Reads more of the file if a required section begins before `start_offset`.
    fn extend_to_sections(&mut self, fetcher: &BlockFetcher) -> Result<()> {
        let TableMetaindex { properties, index_top, filter_top, .. } = &self.metaindex;
        let handles = [Some(properties), Some(index_top), filter_top.as_ref()];
        let first =
            handles.iter().flatten().map(|handle| handle.offset).min().expect("two of the handles are always present");
        if first >= self.start_offset {
            return Ok(());
        }
        let missing = usize::try_from(self.start_offset - first).ok();
        let mut bytes = Vec::new();
        let len = missing.and_then(|len| len.checked_add(self.bytes.len()));
        let reserved = len.is_some_and(|len| bytes.try_reserve_exact(len).is_ok());
        let Some(missing) = missing.filter(|_| reserved) else {
            return Err(Error::corruption("no memory for the top levels of the table"));
        };
        bytes.resize(missing, 0);
        fetcher.file.get()?.read_exact_at(&mut bytes, first)?;
        bytes.extend_from_slice(&self.bytes);
        (self.bytes, self.start_offset) = (bytes, first);
        Ok(())
    }

    fn body(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        let frame = handle.end().ok().and_then(|end| {
            let from = usize::try_from(handle.offset.checked_sub(self.start_offset)?).ok()?;
            let to = usize::try_from(end.checked_sub(self.start_offset)?).ok()?;
            self.bytes.get(from..to)
        });
        let frame = frame.ok_or_else(|| Error::corruption("section ends past the end of the file"));
        frame
            .and_then(|frame| open_frame(frame.into(), &self.file_id, handle.offset, kind))
            .map_err(|error| error.at_offset(handle.offset))
    }

    fn block<T: DecodableBlock>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block = T::decode_body(self.body(handle, kind)?).map_err(|error| error.at_offset(handle.offset))?;
        Ok(Arc::new(block))
    }

    fn properties(&self) -> Result<TableProperties> {
        let handle = self.metaindex.properties;
        TableProperties::decode(&self.body(handle, BlockKind::Properties)?)
            .map_err(|error| error.at_offset(handle.offset))
    }

    fn open_index(
        &self,
        fetcher: &BlockFetcher,
        properties: &TableProperties,
        options: TableReadOptions,
    ) -> Result<TableIndex> {
        let handle = self.metaindex.index_top;
        let top: Arc<TopLevelIndexBlock> = self.block(handle, BlockKind::TopLevelIndex)?;
        if let Some(partition) = single_partition(&top).map_err(|error| error.at_offset(handle.offset))? {
            let pin_in_table = pins_partition(fetcher, partition, BlockKind::IndexPartition, properties, options);
            return Ok(TableIndex::Single(TableBlockSlot::new(partition, BlockKind::IndexPartition, pin_in_table)));
        }
        let slot = TableBlockSlot::new(
            handle,
            BlockKind::TopLevelIndex,
            pins_top_level(fetcher, handle, BlockKind::TopLevelIndex, options),
        );
        slot.insert_loaded(fetcher, top);
        Ok(TableIndex::Partitioned(slot))
    }

    /// Opens the filter, if the table has one and the order can use it. A damaged filter is ignored.
    fn open_filter(
        &self,
        fetcher: &BlockFetcher,
        properties: &TableProperties,
        options: TableReadOptions,
        order: &KeyOrder,
    ) -> Result<Option<TableFilter>> {
        let usable = order.can_hash_keys();
        let Some(handle) = self.metaindex.filter_top.filter(|_| usable) else { return Ok(None) };
        let top = self
            .block::<TopLevelFilterBlock>(handle, BlockKind::TopLevelFilter)
            .and_then(|top| Ok((single_partition(&top)?, top)));
        match top {
            Ok((Some(partition), _)) => {
                let pin_in_table = pins_partition(fetcher, partition, BlockKind::FilterPartition, properties, options);
                Ok(Some(TableFilter::Single(TableBlockSlot::<FilterBlock>::new(
                    partition,
                    BlockKind::FilterPartition,
                    pin_in_table,
                ))))
            }
            Ok((None, top)) => {
                let pin_in_table = pins_top_level(fetcher, handle, BlockKind::TopLevelFilter, options);
                let slot = TableBlockSlot::new(handle, BlockKind::TopLevelFilter, pin_in_table);
                slot.insert_loaded(fetcher, top);
                Ok(Some(TableFilter::Partitioned(slot)))
            }
            Err(error) if error.kind() == ErrorKind::Corruption => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The partitions of a partitioned table are always in the cache. The table pins a single partition if the options
/// require it.
fn pins_partition(
    fetcher: &BlockFetcher,
    partition: BlockHandle,
    kind: BlockKind,
    properties: &TableProperties,
    options: TableReadOptions,
) -> bool {
    let by_option = !properties.partitioned && !options.cache_index_and_filter_blocks;
    by_option || pins_uncacheable_block(fetcher, partition, kind)
}

fn pins_top_level(fetcher: &BlockFetcher, top: BlockHandle, kind: BlockKind, options: TableReadOptions) -> bool {
    options.pin_top_level || !options.cache_index_and_filter_blocks || pins_uncacheable_block(fetcher, top, kind)
}

/// Whether the table pins a block that is too large for the cache, which every lookup would otherwise read from the
/// file. Only a small block is pinned, because open tables would otherwise use unbounded memory.
fn pins_uncacheable_block(fetcher: &BlockFetcher, handle: BlockHandle, kind: BlockKind) -> bool {
    handle.len <= PINNED_BLOCK_MAX && !fetcher.cache.admits(kind, 2 * handle.len)
}
