//! Writes a table sequentially.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::blob_pointer::{BlobPointer, BlobReferences, BlobReferencesBuilder};
use crate::base::checksum::key_hash;
use crate::base::compression::CompressionType;
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::key::split_expiry;
use crate::base::options::OptionTable;
use crate::base::version_edit::{FileNumber, PartitionId, TableMeta};
use crate::base::{EntryRef, Error, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::block::frame::{CompressedBlock, FRAME_HEADER_LEN, put_frame};
use crate::block::{BlockHandle, BlockKind, DataBlockBuilder, FingerprintBlockBuilder, RestartBlockBuilder};
use crate::table::filter::FilterBuilder;
use crate::table::format::{
    OWN_BLOCK_VALUE_MIN, PADDING_DIVISOR, TableMetaindex, TableOrigin, TableProperties, padding_before,
};
use crate::table::index::{IndexBuilder, MetadataPartition, build_top_level};
use crate::table::options::{DataBlockIndexType, TableOptions};
use crate::table::prefix::prefix_hash;
use crate::vfs::File;
use crate::vfs::buffered_writer::BufferedFileWriter;

/// Writes one table. Used by one thread at a time. The table may be used only after [`TableWriter::finish`] succeeded
/// and the file was synced.
pub(crate) struct TableWriter {
    out: TableFileOutput,
    options: TableOptions,
    order: KeyOrder,
    data: DataBlockBuilder,
    /// The last written data block, which is not in the index yet, because its separator depends on the next key.
    unindexed_block: Option<BlockHandle>,
    /// Maximum length in bytes of a data block with several entries. Without compression its frame then fits into the
    /// configured size, which is usually that of a page.
    data_len_max: usize,
    index: IndexBuilder,
    filter: Option<FilterBuilder>,
    /// The last key.
    last_key: (Vec<u8>, SeqNo),
    /// Hash of the last user key; `None` if it has none, or if neither filter nor data blocks need it.
    last_key_hash: Option<u64>,
    /// Whether the last entry is an operand of a merge operator, which does not supersede older versions.
    last_is_operand: bool,
    references: BlobReferencesBuilder,
    properties: TableProperties,
    scratch: Vec<u8>,
}

impl TableWriter {
    /// Begins a table in an empty file. `file_id` is random and new. `hash_seed` is that of the database. The options
    /// are in their ranges.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        options: TableOptions,
        order: KeyOrder,
        hash_seed: u64,
        created_ms: u64,
    ) -> TableWriter {
        debug_assert!(options.check_ranges().is_ok(), "{options:?}");
        let partition_size = options.partition_index_and_filters.then_some(options.metadata_block_size);
        let index_type = effective_index_type(&options, &order);
        let filter = FilterBuilder::new(options.filter_policy, partition_size, &order);
        let prefix_extractor = options.prefix_extractor.filter(|_| filter.is_some() && order.is_bytewise());
        let properties = TableProperties {
            hash_seed,
            created_ms,
            comparator: order.name().to_owned(),
            prefix_extractor,
            compression: options.compression,
            data_block_index_type: Some(index_type),
            partitioned: options.partition_index_and_filters,
            smallest_seqno: SeqNo::MAX,
            ..TableProperties::default()
        };
        let frame_len = if options.compression == CompressionType::None { FRAME_HEADER_LEN } else { 0 };
        TableWriter {
            data_len_max: options.block_size as usize - frame_len,
            out: TableFileOutput::new(file, file_id),
            data: data_builder(index_type, &options),
            unindexed_block: None,
            index: IndexBuilder::new(partition_size),
            filter,
            last_key: (Vec::new(), SeqNo::ZERO),
            last_key_hash: None,
            last_is_operand: false,
            options,
            order,
            references: BlobReferencesBuilder::default(),
            properties,
            scratch: Vec::new(),
        }
    }

    /// States the partition in the properties.
    pub(crate) fn set_partition(&mut self, id: PartitionId, name: &str) {
        self.properties.partition = Some((id, name.to_owned()));
    }

    /// States in the properties what has written the table.
    pub(crate) fn set_origin(&mut self, origin: TableOrigin) {
        self.properties.origin = origin;
    }

    /// Adds the next entry in internal order.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file. `Corruption` if the entry is not after the previous one, because of damaged
    /// input or an inconsistent comparator, or if a blob pointer is malformed. The table is unusable after an error.
    pub(crate) fn add(&mut self, entry: EntryRef<'_>) -> Result<()> {
        let key = entry.key();
        let first = self.properties.entries == 0;
        // Before the first entry `last_key` is the empty key, which the comparator must not get because it was not
        // inserted.
        let user_key_order = if first { Ordering::Less } else { self.order.cmp(&self.last_key.0, key.user_key) };
        if user_key_order.then_with(|| key.seqno.cmp(&self.last_key.1)).is_ge() {
            return Err(Error::corruption("entries are not in order, or the comparator contradicts itself"));
        }
        if let Some(pointer) = BlobPointer::of_record(entry.kind, entry.value)? {
            self.references.add(&pointer);
        }
        let (expires_ms, ..) = split_expiry(entry.kind, entry.value)?;
        self.finish_block_before(key, entry.value.len())?;
        self.index_last_block(Some((key.user_key, user_key_order.is_eq())));
        if user_key_order.is_lt() {
            self.hash_key(key.user_key);
        } else if !self.last_is_operand {
            self.properties.count_superseded(self.last_key.1);
        }
        self.data.add(key, self.last_key_hash, entry.kind.to_byte(), entry.value);
        self.count_entry(&entry);
        if entry.kind.has_expiry() {
            self.properties.expiry.add(expires_ms);
        }
        self.last_key.0.clear();
        self.last_key.0.extend_from_slice(key.user_key);
        self.last_key.1 = key.seqno;
        self.last_is_operand = entry.kind == RecordKind::Merge;
        if entry.value.len() > OWN_BLOCK_VALUE_MIN { self.finish_block() } else { Ok(()) }
    }

    fn count_entry(&mut self, entry: &EntryRef<'_>) {
        let properties = &mut self.properties;
        if properties.entries == 0 {
            properties.smallest_key = (entry.user_key.to_vec(), entry.seqno);
        }
        properties.entries += 1;
        properties.tombstones += u64::from(entry.kind.is_tombstone());
        properties.raw_bytes += (entry.user_key.len() + entry.value.len()) as u64;
        properties.smallest_seqno = properties.smallest_seqno.min(entry.seqno);
        properties.largest_seqno = properties.largest_seqno.max(entry.seqno);
    }

    /// Hashes a user key that differs from the previous one, once for both filter and data block.
    fn hash_key(&mut self, user_key: &[u8]) {
        let indexed = self.properties.data_block_index_type.is_some_and(DataBlockIndexType::needs_key_hash);
        if self.filter.is_none() && !indexed {
            return;
        }
        let hashable = self.order.hash_input(user_key, &mut self.scratch);
        self.last_key_hash = hashable.map(|bytes| key_hash(self.properties.hash_seed, bytes));
        match (&mut self.filter, self.last_key_hash) {
            (Some(filter), Some(hash)) => {
                let prefix = self.properties.prefix_extractor.and_then(|extractor| extractor.extract(user_key));
                let prefix = prefix.map(|prefix| prefix_hash(self.properties.hash_seed, prefix));
                filter.add(hash, prefix, &self.last_key.0, user_key, &self.order);
            }
            // An order with a hash input for one key has one for every key. A key without a hash input must not be
            // looked up in a filter, so the table gets none.
            _ => self.filter = None,
        }
    }

    /// Finishes the data block if the next entry must not be in it.
    fn finish_block_before(&mut self, key: InternalKey<'_>, value_len: usize) -> Result<()> {
        let alone = value_len > OWN_BLOCK_VALUE_MIN;
        if !self.data.is_empty() && (alone || self.data.len_with(key, value_len) > self.data_len_max) {
            self.finish_block()?;
        }
        Ok(())
    }

    fn finish_block(&mut self) -> Result<()> {
        debug_assert!(self.unindexed_block.is_none(), "each data block is in the index before the next one ends");
        let (kind, raw) = self.data.finish();
        let handle = self.out.put_block_in_page(kind, self.options.compression, raw)?;
        self.data.clear();
        self.properties.data_blocks += 1;
        self.properties.data_bytes += handle.len;
        self.unindexed_block = Some(handle);
        Ok(())
    }

    /// Adds the last data block to the index. `next` is the user key that follows, and whether it equals the last
    /// user key of the block.
    fn index_last_block(&mut self, next: Option<(&[u8], bool)>) {
        let Some(handle) = self.unindexed_block.take() else { return };
        debug_assert!(self.data.is_empty(), "a data block is indexed before the next one begins");
        let (user_key, seqno) = (&self.last_key.0, self.last_key.1);
        match next {
            Some((_, true)) => self.index.add(InternalKey::new(user_key, seqno), true, handle),
            Some((next, false)) => {
                self.order.separator(user_key, next, &mut self.scratch);
                self.index.add(InternalKey::new(&self.scratch, SeqNo::ZERO), false, handle);
            }
            None => {
                self.order.successor(user_key, &mut self.scratch);
                self.index.add(InternalKey::new(&self.scratch, SeqNo::ZERO), false, handle);
            }
        }
    }

    /// Approximate length of the file in bytes if the table ended here.
    pub(crate) fn written_bytes(&self) -> u64 {
        let open = if self.data.is_empty() { 0 } else { self.data.len() as u64 };
        let filter = self.filter.as_ref().map_or(0, FilterBuilder::estimated_bytes);
        self.out.offset() + open + self.index.estimated_bytes() + filter + self.references.estimated_encoded_len()
    }

    /// Writes the rest of the table. The caller syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Corruption` if two entries point to the same value.
    pub(crate) fn finish(mut self, id: FileNumber) -> Result<TableMeta> {
        assert!(self.properties.entries > 0, "an empty table is never written");
        if !self.data.is_empty() {
            self.finish_block()?;
        }
        self.index_last_block(None);
        self.properties.largest_key = std::mem::take(&mut self.last_key);
        debug_assert!(self.data.is_empty() && self.unindexed_block.is_none(), "every data block is in the index");
        let compression = self.options.compression;
        let index = self.index.finish();
        let (index_handles, index_bytes) = self.out.put_partitions(BlockKind::IndexPartition, compression, &index)?;
        self.properties.index_partitions = index.len() as u64;
        self.properties.index_bytes = index_bytes;
        let mut metaindex = TableMetaindex::default();
        let mut filter_top = None;
        if let Some(filter) = self.filter {
            self.properties.filter_keys = filter.key_count();
            let partitions = filter.finish(&self.properties.largest_key.0);
            let (handles, bytes) =
                self.out.put_partitions(BlockKind::FilterPartition, CompressionType::None, &partitions)?;
            self.properties.filter_partitions = partitions.len() as u64;
            self.properties.filter_bytes = bytes;
            filter_top = Some(build_top_level(&partitions, &handles));
        }
        let index_top = build_top_level(&index, &index_handles);
        metaindex.index_top = self.out.put_block(BlockKind::TopLevelIndex, CompressionType::None, &index_top)?;
        if let Some(top) = filter_top {
            metaindex.filter_top = Some(self.out.put_block(BlockKind::TopLevelFilter, CompressionType::None, &top)?);
        }
        let references = self.references.finish()?;
        if !references.is_empty() {
            metaindex.blob_references =
                Some(self.out.put_block(BlockKind::BlobReferences, compression, &references.encode())?);
        }
        let properties = self.properties.encode();
        metaindex.properties = self.out.put_block(BlockKind::Properties, CompressionType::None, &properties)?;
        let size = self.out.finish(&metaindex)?;
        if cfg!(debug_assertions) {
            check_written(&self.properties, size, &self.order);
        }
        Ok(table_meta(id, size, self.properties, &references))
    }
}

/// Panics if the properties of a table that was written contradict each other. `size`: the length of its file.
fn check_written(properties: &TableProperties, size: u64, order: &KeyOrder) {
    let entries = properties.entries;
    assert!(properties.smallest_seqno <= properties.largest_seqno, "bounds of the sequence numbers");
    assert!(
        properties.tombstones <= entries && properties.expiry.entries <= entries,
        "counts are parts of the entries"
    );
    assert!(properties.expiry.lowest_ms <= properties.expiry.highest_ms, "bounds of the expiry times");
    assert!(properties.superseded_entries < entries, "the newest version of a key is not superseded");
    let (smallest, largest) = (&properties.smallest_key, &properties.largest_key);
    assert!(order.is_custom() || smallest.0 <= largest.0, "the first key is not above the last one");
    assert!(properties.filter_keys + properties.superseded_entries <= entries, "the filter has each user key once");
    assert!((1..=properties.data_blocks).contains(&properties.index_partitions), "a partition names a data block");
    let sections = properties.data_bytes + properties.index_bytes + properties.filter_bytes;
    assert!(sections < size, "the file has all of its sections");
}

/// The type of the data blocks. An order without hashes gets data blocks without hashes.
fn effective_index_type(options: &TableOptions, order: &KeyOrder) -> DataBlockIndexType {
    if order.can_hash_keys() { options.data_block_index_type } else { DataBlockIndexType::BinarySearch }
}

fn data_builder(index_type: DataBlockIndexType, options: &TableOptions) -> DataBlockBuilder {
    let interval = options.restart_interval;
    match index_type {
        DataBlockIndexType::BinarySearch => DataBlockBuilder::Restart(RestartBlockBuilder::new(interval)),
        DataBlockIndexType::BinaryAndHash => {
            let ratio = options.data_block_hash_table_util_ratio;
            DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(interval, ratio))
        }
        DataBlockIndexType::Fingerprint => DataBlockBuilder::Fingerprint(FingerprintBlockBuilder::new()),
    }
}

/// The manifest's description of a table.
pub(crate) fn table_meta(
    id: FileNumber,
    size: u64,
    properties: TableProperties,
    references: &BlobReferences,
) -> TableMeta {
    TableMeta {
        number: id,
        size,
        entries: properties.entries,
        tombstones: properties.tombstones,
        smallest_seqno: properties.smallest_seqno,
        largest_seqno: properties.largest_seqno,
        created_ms: properties.created_ms,
        raw_bytes: properties.raw_bytes,
        smallest_key: properties.smallest_key,
        largest_key: properties.largest_key,
        blob_usage: references.file_usage().collect(),
        range_deletes_applied_through: SeqNo::ZERO,
        expiry: properties.expiry,
        global_seqno: None,
    }
}

/// Writes the frames of the file.
struct TableFileOutput {
    file_writer: BufferedFileWriter,
    file_id: [u8; 16],
    /// Number of bytes of padding in the file.
    padding: u64,
}

impl TableFileOutput {
    fn new(file: Arc<dyn File>, file_id: [u8; 16]) -> TableFileOutput {
        let header = FileHeader { kind: FileKind::Table, file_id }.encode();
        TableFileOutput { file_writer: BufferedFileWriter::new(file, &header), file_id, padding: 0 }
    }

    fn offset(&self) -> u64 {
        self.file_writer.offset()
    }

    fn put_block(&mut self, kind: BlockKind, compression: CompressionType, raw: &[u8]) -> Result<BlockHandle> {
        let start = self.offset();
        let handle = self
            .file_writer
            .append_with(|out, offset| put_frame(out, &self.file_id, offset, kind, compression, raw))?;
        debug_assert_eq!((handle.offset, handle.offset + handle.len), (start, self.offset()), "frames are adjacent");
        Ok(handle)
    }

    /// Writes a block that is read alone. Padding precedes it if it then is in fewer pages.
    fn put_block_in_page(&mut self, kind: BlockKind, compression: CompressionType, raw: &[u8]) -> Result<BlockHandle> {
        let block = CompressedBlock::new(kind, compression, raw);
        let frame = block.frame();
        let start = self.offset();
        let padding = padding_before(start, frame.len(), self.padding);
        let handle = self.file_writer.append_with(|out, offset| {
            out.resize(out.len() + padding as usize, 0);
            frame.append_copy(out, &self.file_id, offset + padding)
        })?;
        self.padding += padding;
        debug_assert_eq!(
            (handle.offset, handle.offset + handle.len),
            (start + padding, self.offset()),
            "frame and padding"
        );
        debug_assert!(self.padding * PADDING_DIVISOR <= handle.offset, "padding is a small part of the file");
        Ok(handle)
    }

    /// Writes partitions. Returns their handles and the sum of their lengths in bytes.
    fn put_partitions(
        &mut self,
        kind: BlockKind,
        compression: CompressionType,
        partitions: &[MetadataPartition],
    ) -> Result<(Vec<BlockHandle>, u64)> {
        let mut handles = Vec::with_capacity(partitions.len());
        for partition in partitions {
            handles.push(self.put_block_in_page(kind, compression, &partition.raw)?);
        }
        let bytes = handles.iter().map(|handle| handle.len).sum();
        Ok((handles, bytes))
    }

    /// Writes the metaindex and the footer. Returns the length of the file in bytes.
    fn finish(mut self, metaindex: &TableMetaindex) -> Result<u64> {
        let BlockHandle { offset, len } =
            self.put_block(BlockKind::Metaindex, CompressionType::None, &metaindex.encode())?;
        debug_assert!(
            metaindex.index_top.offset < offset && metaindex.properties.offset < offset,
            "sections precede it"
        );
        let footer = FileFooter { kind: FileKind::Table, metaindex_offset: offset, metaindex_len: len }
            .encode(&self.file_id, self.offset());
        self.file_writer.append_with(|out, _| out.extend_from_slice(&footer))?;
        self.file_writer.finish()
    }
}
