//! Verifies a whole table: every byte, every count, and every invariant of the format.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::blob_pointer::{BlobPointer, BlobReferencesBuilder};
use crate::base::file_format::{FileFooter, FileHeader};
use crate::base::key::split_expiry;
use crate::base::{Error, InternalKey, RecordKind, Result, SeqNo};
use crate::block::{Block, BlockHandle, BlockIter, BlockKind, FilterBlock};
use crate::table::format::{TableProperties, is_padding_range};
use crate::table::index::{IndexIter, TAG_CONTINUES};
use crate::table::options::TableReadOptions;
use crate::table::prefix::prefix_hash;
use crate::table::reader::TableReader;

/// State of a verification.
struct TableVerifier<'a> {
    table: &'a TableReader,
    /// Handles of all frames, which must cover the file without gaps but for padding.
    frames: Vec<BlockHandle>,
    observed: TableProperties,
    last_key: (Vec<u8>, SeqNo),
    last_is_operand: bool,
    /// The separator of the previous block, and whether its last user key continues.
    separator: Option<(Vec<u8>, SeqNo, bool)>,
    filter: Option<FilterVerifier>,
    references: BlobReferencesBuilder,
}

/// Advances through the filter partitions together with the keys.
struct FilterVerifier {
    top_level: BlockIter,
    partition: Arc<FilterBlock>,
}

impl TableReader {
    /// Reads and verifies the whole file, without the cache: afterwards, its properties are those of its content.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first violation.
    pub(crate) fn verify(&self) -> Result<()> {
        let mut verifier = TableVerifier {
            table: self,
            frames: Vec::new(),
            observed: TableProperties { smallest_seqno: SeqNo::MAX, ..TableProperties::default() },
            last_key: (Vec::new(), SeqNo::ZERO),
            last_is_operand: false,
            separator: None,
            filter: None,
            references: BlobReferencesBuilder::default(),
        };
        verifier.verify_table().map_err(|error| error.in_file(self.fetcher.path()))
    }
}

impl TableVerifier<'_> {
    fn verify_table(&mut self) -> Result<()> {
        let fetcher = &self.table.fetcher;
        let file = fetcher.file.get()?;
        if file.length()? != fetcher.size {
            return Err(Error::corruption("length of the file changed after it was opened"));
        }
        self.verify_sections()?;
        self.verify_index_top_level()?;
        self.verify_data()?;
        self.verify_filter_end()?;
        if std::mem::take(&mut self.references).finish()? != self.table.blob_references()? {
            return Err(Error::corruption("blob pointers of the table differ from its blob references"));
        }
        self.verify_frame_coverage()?;
        self.verify_properties()
    }

    /// Opens the file again, so that header, footer, metaindex, properties and top levels are read again.
    fn verify_sections(&mut self) -> Result<()> {
        let table = self.table;
        let options =
            TableReadOptions { cache_index_and_filter_blocks: false, pin_top_level: true, pin_partitions: false };
        let (files, cache) = (table.fetcher.file.files(), Arc::clone(&table.fetcher.cache));
        let again = TableReader::open(files, cache, &table.meta, table.order.clone(), 0, options)?;
        if again.properties() != table.properties() || again.metaindex != table.metaindex {
            return Err(Error::corruption("file was replaced after it was opened"));
        }
        let metaindex = &table.metaindex;
        self.frames.extend([metaindex.properties, metaindex.index_top]);
        self.frames.extend(metaindex.filter_top);
        self.frames.extend(metaindex.blob_references);
        self.frames.extend(&metaindex.ignored_sections);
        let Some(handle) = metaindex.filter_top else { return Ok(()) };
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

    /// Reads the index partitions and compares each with its entry in the top level.
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
                return Err(Error::corruption("last entry of an index partition differs from its top-level entry")
                    .at_offset(handle.offset));
            }
            top.next()?;
        }
        Ok(())
    }

    fn verify_data(&mut self) -> Result<()> {
        let (index, fetcher) = (&self.table.index, &self.table.fetcher);
        let mut iter = IndexIter::new(false);
        iter.seek_to_first(index, fetcher)?;
        while let Some((handle, separator, tag)) = iter.entry()? {
            let bound = (separator.user_key.to_vec(), separator.seqno, tag & TAG_CONTINUES != 0);
            self.verify_data_block(handle).map_err(|error| error.at_offset(handle.offset))?;
            self.verify_separator(bound).map_err(|error| error.at_offset(handle.offset))?;
            iter.next(fetcher)?;
        }
        if self.separator.as_ref().is_some_and(|(_, _, continues)| *continues) {
            return Err(Error::corruption("index entry of the last block has the continues bit"));
        }
        Ok(())
    }

    fn verify_data_block(&mut self, handle: BlockHandle) -> Result<()> {
        self.frames.push(handle);
        self.observed.data_blocks += 1;
        self.observed.data_bytes += handle.len;
        let block = self.table.fetcher.read_block::<Block>(handle, BlockKind::Data)?;
        let count = block.count();
        let mut iter = BlockIter::new(Arc::clone(&block));
        let mut entries = 0;
        iter.seek_to_first()?;
        self.verify_first_key(iter.key())?;
        while iter.valid() {
            self.verify_entry(iter.key(), RecordKind::from_byte(iter.tag())?, iter.value())?;
            self.verify_hash_lookup(&block, iter.key())?;
            entries += 1;
            iter.next()?;
        }
        if entries != count {
            return Err(Error::corruption("entry count of a block differs from its trailer"));
        }
        Ok(())
    }

    /// Checks that a lookup by hash finds this entry.
    fn verify_hash_lookup(&self, block: &Block, key: InternalKey<'_>) -> Result<()> {
        let Some(hash) = self.table.hash_key(key.user_key) else { return Ok(()) };
        let found = block.lookup(key, Some(hash), &self.table.order)?;
        match found.filter(|entry| entry.key_matches && entry.seqno == key.seqno) {
            Some(_) => Ok(()),
            None => Err(Error::corruption("lookup by hash does not find a key of the block")),
        }
    }

    /// The separator of a block is before the first user key of the next block, unless the last user key continues.
    fn verify_first_key(&self, first: InternalKey<'_>) -> Result<()> {
        let Some((user_key, _, continues)) = &self.separator else { return Ok(()) };
        match (self.table.order.cmp(user_key, first.user_key), continues) {
            (Ordering::Less, false) | (Ordering::Equal, true) => Ok(()),
            _ => Err(Error::corruption("separator in the index is not before the next block")),
        }
    }

    /// The separator of a block is at or after its last key, and exactly the last key if this key continues.
    fn verify_separator(&mut self, bound: (Vec<u8>, SeqNo, bool)) -> Result<()> {
        let separator = InternalKey::new(&bound.0, bound.1);
        let ordering = InternalKey::new(&self.last_key.0, self.last_key.1).cmp(&separator, &self.table.order);
        let is_valid = if bound.2 { ordering.is_eq() } else { ordering.is_le() && bound.1 == SeqNo::ZERO };
        if !is_valid {
            return Err(Error::corruption("separator in the index is before the end of its block"));
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
        if let Some(pointer) = BlobPointer::of_record(kind, value)? {
            self.references.add(&pointer);
        }
        let new_key = first || order.cmp(&self.last_key.0, key.user_key).is_lt();
        let observed = &mut self.observed;
        if !new_key && !self.last_is_operand {
            observed.count_superseded(self.last_key.1);
        }
        if first {
            observed.smallest_key = (key.user_key.to_vec(), key.seqno);
        }
        observed.entries += 1;
        observed.tombstones += u64::from(kind.is_tombstone());
        if kind.has_expiry() {
            observed.expiry.add(split_expiry(kind, value)?.0);
        }
        observed.raw_bytes += (key.user_key.len() + value.len()) as u64;
        observed.smallest_seqno = observed.smallest_seqno.min(key.seqno);
        observed.largest_seqno = observed.largest_seqno.max(key.seqno);
        self.last_key.0.clear();
        self.last_key.0.extend_from_slice(key.user_key);
        self.last_key.1 = key.seqno;
        self.last_is_operand = kind == RecordKind::Merge;
        if new_key { self.verify_filter_has_key(key.user_key) } else { Ok(()) }
    }

    /// Checks that the filter partition of a key does not exclude it.
    fn verify_filter_has_key(&mut self, user_key: &[u8]) -> Result<()> {
        let order = self.table.order.clone();
        let Some(mut filter) = self.filter.take() else { return Ok(()) };
        if order.hash_input(user_key, &mut Vec::new()).is_none() {
            self.observed.filter_keys += 1; // the order has no hash here: verify_filter_end reads the partitions
            self.filter = Some(filter);
            return Ok(());
        }
        while filter.top_level.valid() && order.cmp(filter.top_level.key().user_key, user_key).is_lt() {
            filter.top_level.next()?;
            if filter.top_level.valid() {
                filter.partition = self.read_filter_partition(&filter.top_level)?;
            }
        }
        let properties = self.table.properties();
        let prefix = properties.prefix_extractor.and_then(|extractor| extractor.extract(user_key));
        let prefix = prefix.map(|prefix| prefix_hash(properties.hash_seed, prefix));
        let hashes = self.table.hash_key(user_key).into_iter().chain(prefix);
        let may_contain = filter.top_level.valid() && hashes.into_iter().all(|hash| filter.partition.may_contain(hash));
        self.observed.filter_keys += 1;
        self.filter = Some(filter);
        if may_contain { Ok(()) } else { Err(Error::corruption("filter excludes a key of the table")) }
    }

    /// Checks that no filter partition is left.
    fn verify_filter_end(&mut self) -> Result<()> {
        let Some(mut filter) = self.filter.take() else { return Ok(()) };
        filter.top_level.next()?;
        while filter.top_level.valid() && !self.table.order.can_hash_keys() {
            self.read_filter_partition(&filter.top_level)?;
            filter.top_level.next()?;
        }
        if filter.top_level.valid() {
            Err(Error::corruption("filter has partitions after the last key"))
        } else {
            Ok(())
        }
    }

    /// Checks that the frames cover the file between header and footer without overlaps, and without gaps but for
    /// padding, which is zero.
    fn verify_frame_coverage(&mut self) -> Result<()> {
        let footer = self.table.fetcher.size - FileFooter::LEN as u64;
        self.frames.sort_unstable();
        let mut at = FileHeader::LEN as u64;
        for frame in &self.frames {
            if !is_padding_range(at, frame.offset) {
                return Err(Error::corruption("frames of the table have gaps or overlap").at_offset(at));
            }
            let mut padding = vec![0; (frame.offset - at) as usize]; // less than a page
            self.table.fetcher.file.get()?.read_exact_at(&mut padding, at)?;
            if let Some(other) = padding.iter().position(|byte| *byte != 0) {
                return Err(Error::corruption("padding of the table is not zero; no record is affected")
                    .at_offset(at + other as u64));
            }
            at = frame.end()?;
        }
        // The remaining frame is the metaindex. Opening has checked that it ends at the footer.
        if at < footer { Ok(()) } else { Err(Error::corruption("table has no metaindex").at_offset(at)) }
    }

    fn verify_properties(&mut self) -> Result<()> {
        let properties = self.table.properties();
        let meta = &self.table.meta;
        // Tables of older versions do not count superseded entries.
        let has_superseded_counts = properties.smallest_superseding_seqno > SeqNo::ZERO;
        let observed = TableProperties {
            superseded_entries: if has_superseded_counts { self.observed.superseded_entries } else { 0 },
            smallest_superseding_seqno: if has_superseded_counts {
                self.observed.smallest_superseding_seqno
            } else {
                SeqNo::ZERO
            },
            largest_key: std::mem::take(&mut self.last_key),
            hash_seed: properties.hash_seed,
            comparator: properties.comparator.clone(),
            compression: properties.compression,
            data_block_index_type: properties.data_block_index_type,
            created_ms: properties.created_ms,
            partitioned: properties.partitioned,
            prefix_extractor: properties.prefix_extractor,
            partition: properties.partition.clone(),
            origin: properties.origin.clone(),
            ..std::mem::take(&mut self.observed)
        };
        if observed != *properties {
            return Err(Error::corruption("content of the table differs from its properties"));
        }
        let in_file = |(user_key, seqno): &(Vec<u8>, SeqNo)| (user_key.clone(), meta.seqno_in_file(*seqno));
        let keys = (in_file(&meta.smallest_key), in_file(&meta.largest_key));
        let same_meta = (observed.raw_bytes, &observed.smallest_key, &observed.largest_key, observed.created_ms)
            == (meta.raw_bytes, &keys.0, &keys.1, meta.created_ms);
        if same_meta { Ok(()) } else { Err(Error::corruption("properties of the table differ from the manifest")) }
    }
}
