//! Checks a whole table: every byte, every count, every promise that the format makes.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::blob_ref::{BlobRef, ReferenceBuilder};
use crate::base::file_footer::FileFooter;
use crate::base::file_header::FileHeader;
use crate::base::{Error, KeyRef, RecordKind, Result, SeqNo};
use crate::block::{Block, BlockCursor, BlockHandle, BlockKind, FilterBlock};
use crate::table::index::{CONTINUES, IndexCursor};
use crate::table::options::ReadOptions;
use crate::table::properties::Properties;
use crate::table::reader::Table;

/// What a verified table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VerifyReport {
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    pub(crate) data_blocks: u64,
    pub(crate) index_pieces: u64,
    pub(crate) filter_pieces: u64,
    /// Of the file.
    pub(crate) bytes: u64,
}

/// What has been seen of the table so far.
struct Walk<'a> {
    table: &'a Table,
    /// Where each frame lies; together they tile the file.
    frames: Vec<BlockHandle>,
    seen: Properties,
    last: (Vec<u8>, SeqNo),
    /// The separator of the block before, and whether its last user key goes on.
    bound: Option<(Vec<u8>, SeqNo, bool)>,
    filter: Option<FilterWalk>,
    references: ReferenceBuilder,
}

/// A walk over the pieces of the filter beside the keys.
struct FilterWalk {
    top: BlockCursor,
    piece: Arc<FilterBlock>,
}

impl Table {
    /// Reads all of the file, past the cache.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first thing that is wrong.
    pub(crate) fn verify(&self) -> Result<VerifyReport> {
        let mut walk = Walk {
            table: self,
            frames: Vec::new(),
            seen: Properties { lowest: SeqNo::MAX, ..Properties::default() },
            last: (Vec::new(), SeqNo::ZERO),
            bound: None,
            filter: None,
            references: ReferenceBuilder::default(),
        };
        walk.run().map_err(|error| error.in_file(self.source.path()))
    }
}

impl Walk<'_> {
    fn run(&mut self) -> Result<VerifyReport> {
        let source = &self.table.source;
        let file = source.files.file(source.id)?;
        if file.length()? != source.size {
            return Err(Error::corruption("file has another length than when it was opened"));
        }
        self.sections()?;
        self.index_top()?;
        self.data()?;
        self.filter_ends()?;
        if std::mem::take(&mut self.references).finish()? != self.table.blob_references()? {
            return Err(Error::corruption("entries of the table point to other values than its references say"));
        }
        self.tiles()?;
        self.counts()?;
        let seen = &self.seen;
        Ok(VerifyReport {
            entries: seen.entries,
            tombstones: seen.tombstones,
            data_blocks: seen.data_blocks,
            index_pieces: seen.index_pieces,
            filter_pieces: seen.filter_pieces,
            bytes: source.size,
        })
    }

    /// Opens the file anew, so that header, footer, directory, properties and tops are read again.
    fn sections(&mut self) -> Result<()> {
        let table = self.table;
        let options = ReadOptions { cache_index_and_filter_blocks: false, pin_top_level: true, pin_pieces: false };
        let (files, cache) = (table.source.files.clone(), table.source.cache.clone());
        let again = Table::open(files, cache, &table.meta, table.order.clone(), 0, options)?;
        if again.properties() != table.properties() || again.directory != table.directory {
            return Err(Error::corruption("file is not the one that was opened"));
        }
        let directory = &table.directory;
        self.frames.extend([directory.properties, directory.index_top]);
        self.frames.extend(directory.filter_top);
        self.frames.extend(directory.references);
        self.frames.extend(&directory.unknown);
        let Some(handle) = directory.filter_top else { return Ok(()) };
        let mut top = BlockCursor::new(table.source.read::<Block>(handle, BlockKind::FilterTop)?);
        top.seek_to_first()?;
        let piece = self.filter_piece(&top)?;
        self.filter = Some(FilterWalk { top, piece });
        Ok(())
    }

    fn filter_piece(&mut self, top: &BlockCursor) -> Result<Arc<FilterBlock>> {
        let handle = BlockHandle::decode(top.value())?;
        self.frames.push(handle);
        self.seen.filter_pieces += 1;
        self.seen.filter_bytes += handle.len;
        self.table.source.read(handle, BlockKind::Filter)
    }

    /// Reads the pieces of the index and checks each against its entry in the top.
    fn index_top(&mut self) -> Result<()> {
        let source = &self.table.source;
        let handle = self.table.directory.index_top;
        let mut top = BlockCursor::new(source.read::<Block>(handle, BlockKind::IndexTop)?);
        top.seek_to_first()?;
        while top.valid() {
            let handle = BlockHandle::decode(top.value())?;
            self.frames.push(handle);
            self.seen.index_pieces += 1;
            self.seen.index_bytes += handle.len;
            let block = source.read::<Block>(handle, BlockKind::Index)?;
            let count = block.count();
            let mut piece = BlockCursor::new(block);
            piece.seek_to_last()?;
            if (piece.key(), piece.tag()) != (top.key(), top.tag()) || count == 0 {
                return Err(
                    Error::corruption("piece of the index does not end as its top says").at_offset(handle.offset)
                );
            }
            top.next()?;
        }
        Ok(())
    }

    fn data(&mut self) -> Result<()> {
        let (index, source) = (&self.table.index, &self.table.source);
        let mut cursor = IndexCursor::new(false);
        cursor.seek_to_first(index, source)?;
        while let Some((handle, separator, tag)) = cursor.entry()? {
            let bound = (separator.user.to_vec(), separator.seqno, tag & CONTINUES != 0);
            self.data_block(handle).map_err(|error| error.at_offset(handle.offset))?;
            self.block_bound(bound).map_err(|error| error.at_offset(handle.offset))?;
            cursor.next(source)?;
        }
        if self.bound.as_ref().is_some_and(|(_, _, continues)| *continues) {
            return Err(Error::corruption("last block of the table claims to go on"));
        }
        Ok(())
    }

    fn data_block(&mut self, handle: BlockHandle) -> Result<()> {
        self.frames.push(handle);
        self.seen.data_blocks += 1;
        self.seen.data_bytes += handle.len;
        let block = self.table.source.read::<Block>(handle, BlockKind::Data)?;
        let count = block.count();
        let mut cursor = BlockCursor::new(Arc::clone(&block));
        let mut entries = 0;
        cursor.seek_to_first()?;
        self.first_of_block(cursor.key())?;
        while cursor.valid() {
            self.entry(cursor.key(), RecordKind::from_byte(cursor.tag())?, cursor.value())?;
            self.by_hash(&block, cursor.key())?;
            entries += 1;
            cursor.next()?;
        }
        if entries != count {
            return Err(Error::corruption("block has another number of entries than it says"));
        }
        Ok(())
    }

    /// What leads to entries by their hash leads to this one.
    fn by_hash(&self, block: &Block, key: KeyRef<'_>) -> Result<()> {
        let Some(hash) = self.table.rehash(key.user) else { return Ok(()) };
        let found = block.find(key, Some(hash), &self.table.order)?;
        match found.filter(|entry| entry.same_key && entry.seqno == key.seqno) {
            Some(_) => Ok(()),
            None => Err(Error::corruption("block does not lead to a key of its own by its hash")),
        }
    }

    /// The separator before a block lies strictly before its first user key, unless it says that the key goes on.
    fn first_of_block(&self, first: KeyRef<'_>) -> Result<()> {
        let Some((user, _, continues)) = &self.bound else { return Ok(()) };
        match (self.table.order.cmp(user, first.user), continues) {
            (Ordering::Less, false) | (Ordering::Equal, true) => Ok(()),
            _ => Err(Error::corruption("separator of the index does not lie before the next block")),
        }
    }

    /// The separator behind a block is at or behind its last key, and exactly that key if it goes on.
    fn block_bound(&mut self, bound: (Vec<u8>, SeqNo, bool)) -> Result<()> {
        let separator = KeyRef::new(&bound.0, bound.1);
        let by = KeyRef::new(&self.last.0, self.last.1).cmp(&separator, &self.table.order);
        let sound = if bound.2 { by.is_eq() } else { by.is_le() && bound.1 == SeqNo::ZERO };
        if !sound {
            return Err(Error::corruption("separator of the index lies before the end of its block"));
        }
        self.bound = Some(bound);
        Ok(())
    }

    fn entry(&mut self, key: KeyRef<'_>, kind: RecordKind, value: &[u8]) -> Result<()> {
        let order = &self.table.order;
        let first = self.seen.entries == 0;
        if !first && KeyRef::new(&self.last.0, self.last.1).cmp(&key, order).is_ge() {
            return Err(Error::corruption("entries are not in order"));
        }
        if kind == RecordKind::BlobPointer {
            self.references.add(&BlobRef::decode(value)?);
        }
        let new_key = first || order.cmp(&self.last.0, key.user).is_lt();
        let seen = &mut self.seen;
        if !new_key {
            seen.count_superseded(self.last.1);
        }
        if first {
            seen.smallest = (key.user.to_vec(), key.seqno);
        }
        seen.entries += 1;
        seen.tombstones += u64::from(kind.is_tombstone());
        seen.raw_bytes += (key.user.len() + value.len()) as u64;
        seen.lowest = seen.lowest.min(key.seqno);
        seen.highest = seen.highest.max(key.seqno);
        self.last.0.clear();
        self.last.0.extend_from_slice(key.user);
        self.last.1 = key.seqno;
        if new_key { self.in_filter(key.user) } else { Ok(()) }
    }

    /// The piece of the filter that the bounds lead to lets the key through.
    fn in_filter(&mut self, user: &[u8]) -> Result<()> {
        let order = self.table.order.clone();
        let Some(mut walk) = self.filter.take() else { return Ok(()) };
        if order.hashable(user, &mut Vec::new()).is_none() {
            self.seen.filter_keys += 1; // an order that only its owner knows: the pieces are read at the end
            self.filter = Some(walk);
            return Ok(());
        }
        while walk.top.valid() && order.cmp(walk.top.key().user, user).is_lt() {
            walk.top.next()?;
            if walk.top.valid() {
                walk.piece = self.filter_piece(&walk.top)?;
            }
        }
        let holds = walk.top.valid() && self.table.rehash(user).is_none_or(|hash| walk.piece.may_contain(hash));
        self.seen.filter_keys += 1;
        self.filter = Some(walk);
        if holds { Ok(()) } else { Err(Error::corruption("filter does not know a key of the table")) }
    }

    /// Every piece of the filter was come by.
    fn filter_ends(&mut self) -> Result<()> {
        let Some(mut walk) = self.filter.take() else { return Ok(()) };
        walk.top.next()?;
        while walk.top.valid() && !self.table.order.hashes_keys() {
            self.filter_piece(&walk.top)?;
            walk.top.next()?;
        }
        if walk.top.valid() { Err(Error::corruption("filter goes on behind the last key")) } else { Ok(()) }
    }

    /// The frames fill the file between header and footer, without gaps and without sharing.
    fn tiles(&mut self) -> Result<()> {
        let footer = self.table.source.size - FileFooter::LEN as u64;
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

    fn counts(&mut self) -> Result<()> {
        let properties = self.table.properties();
        let meta = &self.table.meta;
        // Tables of older versions say nothing of superseded entries.
        let says = properties.superseded_from > SeqNo::ZERO;
        let seen = Properties {
            superseded: if says { self.seen.superseded } else { 0 },
            superseded_from: if says { self.seen.superseded_from } else { SeqNo::ZERO },
            largest: std::mem::take(&mut self.last),
            hash_seed: properties.hash_seed,
            comparator: properties.comparator.clone(),
            compression: properties.compression,
            data_block_index_type: properties.data_block_index_type,
            created_ms: properties.created_ms,
            partitioned: properties.partitioned,
            ..std::mem::take(&mut self.seen)
        };
        if seen != *properties {
            return Err(Error::corruption("table has other entries or blocks than its properties say"));
        }
        let same_meta = (seen.raw_bytes, &seen.smallest, &seen.largest, seen.created_ms)
            == (meta.raw_bytes, &meta.smallest, &meta.largest, meta.created_ms);
        self.seen = seen;
        if same_meta { Ok(()) } else { Err(Error::corruption("table has other bounds than the manifest says")) }
    }
}
