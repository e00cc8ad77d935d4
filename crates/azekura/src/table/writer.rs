//! Writes a table, front to back.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::blob_ref::{BlobRef, ReferenceBuilder, References};
use crate::base::checksum::key_hash;
use crate::base::compression::CompressionType;
use crate::base::edit::{FileId, TableMeta};
use crate::base::file_footer::FileFooter;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{EntryRef, Error, KeyOrder, KeyRef, RecordKind, Result, SeqNo};
use crate::block::frame::put_frame;
use crate::block::{BlockBuilder, BlockHandle, BlockKind, DataBuilder, SlotBuilder};
use crate::table::filter::FilterBuilder;
use crate::table::format::{Directory, VALUE_ALONE};
use crate::table::index::{IndexBuilder, Piece, build_top};
use crate::table::options::{DataBlockIndexType, TableOptions};
use crate::table::properties::Properties;
use crate::vfs::File;
use crate::vfs::append::Appender;

/// Writes one table. One thread at a time; nothing of it may be used before [`TableWriter::finish`] succeeded and the
/// file was synced.
pub(crate) struct TableWriter {
    out: Output,
    options: TableOptions,
    order: KeyOrder,
    data: DataBuilder,
    /// The data block that was written last and is not in the index yet: its separator depends on what follows.
    pending: Option<BlockHandle>,
    index: IndexBuilder,
    filter: Option<FilterBuilder>,
    /// The key added last.
    last: (Vec<u8>, SeqNo),
    /// Of the user key added last; `None` where there is none, or nothing here needs one.
    hash: Option<u64>,
    references: ReferenceBuilder,
    properties: Properties,
    scratch: Vec<u8>,
}

impl TableWriter {
    /// Begins a table in an empty file. `file_id` is random and new; `hash_seed` is the database's.
    ///
    /// # Errors
    /// `Invalid` for options out of range.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        options: TableOptions,
        order: KeyOrder,
        hash_seed: u64,
        created_ms: u64,
    ) -> Result<TableWriter> {
        options.check()?;
        let piece_size = options.partition_index_and_filters.then_some(options.metadata_block_size);
        let index_type = index_type_for(&options, &order);
        let properties = Properties {
            hash_seed,
            created_ms,
            comparator: order.name().to_owned(),
            compression: options.compression,
            data_block_index_type: Some(index_type),
            partitioned: options.partition_index_and_filters,
            lowest: SeqNo::MAX,
            ..Properties::default()
        };
        Ok(TableWriter {
            out: Output::new(file, file_id),
            data: data_builder(index_type, &options),
            pending: None,
            index: IndexBuilder::new(piece_size),
            filter: FilterBuilder::new(options.filter, piece_size, &order),
            last: (Vec::new(), SeqNo::ZERO),
            hash: None,
            options,
            order,
            references: ReferenceBuilder::default(),
            properties,
            scratch: Vec::new(),
        })
    }

    /// Adds the next entry in internal order.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Corruption` if the entry is not behind the one before, which can only come
    /// from what was read, or from a comparator that contradicts itself, or for a pointer that is none. The table is
    /// then of no use.
    pub(crate) fn add(&mut self, entry: EntryRef<'_>) -> Result<()> {
        let key = entry.key();
        let first = self.properties.entries == 0;
        // Without an entry there is no key to compare with: the empty one was not inserted.
        let by_user = if first { Ordering::Less } else { self.order.cmp(&self.last.0, key.user) };
        if by_user.then_with(|| key.seqno.cmp(&self.last.1)).is_ge() {
            return Err(Error::corruption("entries are not in order, or the comparator contradicts itself"));
        }
        if entry.kind == RecordKind::BlobPointer {
            self.references.add(&BlobRef::decode(entry.value)?);
        }
        self.cut_before(key, entry.value.len())?;
        self.index_pending(Some((key.user, by_user.is_eq())));
        if by_user.is_lt() {
            self.hash_key(key.user);
        } else {
            self.properties.count_superseded(self.last.1);
        }
        self.data.add(key, self.hash, entry.kind.to_byte(), entry.value);
        self.count(&entry);
        self.last.0.clear();
        self.last.0.extend_from_slice(key.user);
        self.last.1 = key.seqno;
        if entry.value.len() > VALUE_ALONE { self.cut() } else { Ok(()) }
    }

    fn count(&mut self, entry: &EntryRef<'_>) {
        let properties = &mut self.properties;
        if properties.entries == 0 {
            properties.smallest = (entry.user.to_vec(), entry.seqno);
        }
        properties.entries += 1;
        properties.tombstones += u64::from(entry.kind.is_tombstone());
        properties.raw_bytes += (entry.user.len() + entry.value.len()) as u64;
        properties.lowest = properties.lowest.min(entry.seqno);
        properties.highest = properties.highest.max(entry.seqno);
    }

    /// Hashes a user key that differs from the one before, once for filter and data block.
    fn hash_key(&mut self, user: &[u8]) {
        let indexed = self.properties.data_block_index_type.is_some_and(DataBlockIndexType::hashes);
        if self.filter.is_none() && !indexed {
            return;
        }
        let hashable = self.order.hashable(user, &mut self.scratch);
        self.hash = hashable.map(|bytes| key_hash(self.properties.hash_seed, bytes));
        match (&mut self.filter, self.hash) {
            (Some(filter), Some(hash)) => filter.add(hash, &self.last.0, user, &self.order),
            // An order that has a hashable form for one key has it for all; a key without must not be looked for.
            _ => self.filter = None,
        }
    }

    /// Ends the data block if the next entry should not be in it.
    fn cut_before(&mut self, key: KeyRef<'_>, value_len: usize) -> Result<()> {
        let alone = value_len > VALUE_ALONE;
        if !self.data.is_empty() && (alone || self.data.len_with(key, value_len) > self.options.block_size as usize) {
            self.cut()?;
        }
        Ok(())
    }

    fn cut(&mut self) -> Result<()> {
        let (kind, raw) = self.data.finish();
        let handle = self.out.put(kind, self.options.compression, raw)?;
        self.data.clear();
        self.properties.data_blocks += 1;
        self.properties.data_bytes += handle.len;
        self.pending = Some(handle);
        Ok(())
    }

    /// Puts the last data block into the index, now that `next` is known: the user key that follows, and whether it
    /// equals the one before.
    fn index_pending(&mut self, next: Option<(&[u8], bool)>) {
        let Some(handle) = self.pending.take() else { return };
        let (user, seqno) = (&self.last.0, self.last.1);
        match next {
            Some((_, true)) => self.index.add(KeyRef::new(user, seqno), true, handle),
            Some((next, false)) => {
                self.order.separator(user, next, &mut self.scratch);
                self.index.add(KeyRef::new(&self.scratch, SeqNo::ZERO), false, handle);
            }
            None => self.index.add(KeyRef::new(user, SeqNo::ZERO), false, handle),
        }
    }

    /// The file's length if it ended here, about.
    pub(crate) fn written_bytes(&self) -> u64 {
        let open = if self.data.is_empty() { 0 } else { self.data.len() as u64 };
        let filter = self.filter.as_ref().map_or(0, FilterBuilder::bytes);
        self.out.offset() + open + self.index.bytes() + filter + self.references.encoded_bytes()
    }

    /// Writes the rest. The caller syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Corruption` if two entries point to the same value.
    pub(crate) fn finish(mut self, id: FileId) -> Result<TableMeta> {
        assert!(self.properties.entries > 0, "an empty table is never written");
        if !self.data.is_empty() {
            self.cut()?;
        }
        self.index_pending(None);
        self.properties.largest = std::mem::take(&mut self.last);
        let compression = self.options.compression;
        let index = self.index.finish();
        let (index_handles, index_bytes) = self.out.put_pieces(BlockKind::Index, compression, &index)?;
        self.properties.index_pieces = index.len() as u64;
        self.properties.index_bytes = index_bytes;
        let mut directory = Directory::default();
        let mut filter_top = None;
        if let Some(filter) = self.filter {
            self.properties.filter_keys = filter.keys();
            let pieces = filter.finish(&self.properties.largest.0);
            let (handles, bytes) = self.out.put_pieces(BlockKind::Filter, CompressionType::None, &pieces)?;
            self.properties.filter_pieces = pieces.len() as u64;
            self.properties.filter_bytes = bytes;
            filter_top = Some(build_top(&pieces, &handles));
        }
        let index_top = build_top(&index, &index_handles);
        directory.index_top = self.out.put(BlockKind::IndexTop, CompressionType::None, &index_top)?;
        if let Some(top) = filter_top {
            directory.filter_top = Some(self.out.put(BlockKind::FilterTop, CompressionType::None, &top)?);
        }
        let references = self.references.finish()?;
        if !references.is_empty() {
            directory.references = Some(self.out.put(BlockKind::BlobReferences, compression, &references.encode())?);
        }
        let properties = self.properties.encode();
        directory.properties = self.out.put(BlockKind::Properties, CompressionType::None, &properties)?;
        let size = self.out.end(&directory)?;
        Ok(meta(id, size, self.properties, &references))
    }
}

/// An order without hashes has data blocks without them.
fn index_type_for(options: &TableOptions, order: &KeyOrder) -> DataBlockIndexType {
    if order.hashes_keys() { options.data_block_index_type } else { DataBlockIndexType::BinarySearch }
}

fn data_builder(index_type: DataBlockIndexType, options: &TableOptions) -> DataBuilder {
    let interval = options.restart_interval;
    match index_type {
        DataBlockIndexType::BinarySearch => DataBuilder::Restarts(BlockBuilder::new(interval)),
        DataBlockIndexType::BinaryAndHash => {
            let ratio = options.data_block_hash_table_util_ratio;
            DataBuilder::Restarts(BlockBuilder::with_hash_index(interval, ratio))
        }
        DataBlockIndexType::Fingerprint => DataBuilder::Slots(SlotBuilder::new()),
    }
}

/// What the manifest says of a table.
pub(crate) fn meta(id: FileId, size: u64, properties: Properties, references: &References) -> TableMeta {
    TableMeta {
        id,
        size,
        entries: properties.entries,
        tombstones: properties.tombstones,
        lowest: properties.lowest,
        highest: properties.highest,
        created_ms: properties.created_ms,
        raw_bytes: properties.raw_bytes,
        smallest: properties.smallest,
        largest: properties.largest,
        blobs: references.uses().collect(),
    }
}

/// The file, frame by frame.
struct Output {
    end: Appender,
    file_id: [u8; 16],
}

impl Output {
    fn new(file: Arc<dyn File>, file_id: [u8; 16]) -> Output {
        let header = FileHeader { kind: FileKind::Table, file_id }.encode();
        Output { end: Appender::new(file, &header), file_id }
    }

    fn offset(&self) -> u64 {
        self.end.offset()
    }

    fn put(&mut self, kind: BlockKind, compression: CompressionType, raw: &[u8]) -> Result<BlockHandle> {
        self.end.put(|out, offset| put_frame(out, &self.file_id, offset, kind, compression, raw))
    }

    /// Writes pieces and says where they went and how many bytes they took.
    fn put_pieces(
        &mut self,
        kind: BlockKind,
        compression: CompressionType,
        pieces: &[Piece],
    ) -> Result<(Vec<BlockHandle>, u64)> {
        let mut handles = Vec::with_capacity(pieces.len());
        for piece in pieces {
            handles.push(self.put(kind, compression, &piece.raw)?);
        }
        let bytes = handles.iter().map(|handle| handle.len).sum();
        Ok((handles, bytes))
    }

    /// Writes directory and footer, and returns the file's length.
    fn end(mut self, directory: &Directory) -> Result<u64> {
        let BlockHandle { offset, len } = self.put(BlockKind::Directory, CompressionType::None, &directory.encode())?;
        let footer = FileFooter { kind: FileKind::Table, offset, len }.encode(&self.file_id, self.offset());
        self.end.put(|out, _| out.extend_from_slice(&footer))?;
        self.end.end()
    }
}
