//! An open table: lookups.

use std::sync::Arc;

use crate::base::blob_ref::References;
use crate::base::checksum::key_hash;
use crate::base::edit::{FileId, TableMeta};
use crate::base::file_footer::FileFooter;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, ErrorKind, KeyOrder, KeyRef, RecordKind, Result, SeqNo};
use crate::block::cached::{Cacheable, FilterTop, IndexTop};
use crate::block::entry::Located;
use crate::block::frame::{Body, open_frame};
use crate::block::restarts::RestartBlock;
use crate::block::{Block, BlockCache, BlockHandle, BlockKind, FilterBlock};
use crate::mem::epoch::Pin;
use crate::table::filter::Filter;
use crate::table::format::Directory;
use crate::table::index::{Index, continues, only_piece};
use crate::table::options::ReadOptions;
use crate::table::properties::Properties;
use crate::table::source::{Held, Slot, Source, Value};
use crate::table::writer;
use crate::vfs::files::DataFiles;

/// What opening reads at once from the end of the file: enough for footer, directory, properties and the tops of tables
/// of some ten thousand blocks.
const TAIL_LEN: u64 = 8 << 10;
/// A block of index or filter of at most so many bytes is held where the cache is too small for it.
const HELD_MAX: u64 = 16 << 10;

/// What is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup<'a> {
    pub(crate) key: &'a [u8],
    /// Of the key, under the database's seed; `None` where the order allows no hash.
    pub(crate) hash: Option<u64>,
    pub(crate) at: SeqNo,
}

impl<'a> Lookup<'a> {
    /// A lookup of `key` as of `at` in a database with that hash seed.
    pub(crate) fn new(key: &'a [u8], at: SeqNo, order: &KeyOrder, hash_seed: u64) -> Lookup<'a> {
        let hash = order.hashable(key, &mut Vec::new()).map(|bytes| key_hash(hash_seed, bytes));
        Lookup { key, hash, at }
    }
}

/// An open table. Thread safe; holds no file open by itself.
pub(crate) struct Table {
    pub(crate) source: Source,
    pub(crate) order: KeyOrder,
    pub(crate) index: Index,
    filter: Option<Filter>,
    pub(crate) directory: Directory,
    properties: Properties,
    pub(crate) meta: TableMeta,
    /// Whether the hashes of lookups are made with the seed that the table's were.
    same_seed: bool,
}

impl Table {
    /// Reads header and end of the file. `db_hash_seed` is that of the hashes in lookups.
    ///
    /// # Errors
    /// `Corruption` if the file is not the table that `meta` speaks of, `Invalid` if it was written in another order,
    /// `Unsupported` if a newer version wrote it.
    pub(crate) fn open(
        files: Arc<DataFiles>,
        cache: Arc<BlockCache>,
        meta: &TableMeta,
        order: KeyOrder,
        db_hash_seed: u64,
        options: ReadOptions,
    ) -> Result<Table> {
        let path = files.path(meta.id);
        let pin_pieces = options.pin_pieces;
        let mut source = Source { files, cache, id: meta.id, file_id: [0; 16], size: meta.size, pin_pieces };
        let opened = Tail::read(&mut source).and_then(|tail| {
            let properties = tail.properties()?;
            check(&properties, meta, &order)?;
            let index = tail.index(&source, &properties, options)?;
            let filter = tail.filter(&source, &properties, options, &order)?;
            Ok((tail.directory, properties, index, filter))
        });
        let (directory, properties, index, filter) = opened.map_err(|error| error.in_file(path))?;
        let same_seed = properties.hash_seed == db_hash_seed;
        Ok(Table { source, order, index, filter, directory, properties, meta: meta.clone(), same_seed })
    }

    /// What the manifest would say of a table that only its file is known of.
    ///
    /// # Errors
    /// As [`open`](Table::open).
    pub(crate) fn describe(files: &Arc<DataFiles>, cache: &Arc<BlockCache>, id: FileId) -> Result<TableMeta> {
        let (source, tail) = Table::read_tail(files, cache, id)?;
        let references = match tail.directory.references {
            Some(handle) => source.references(handle)?,
            None => References::default(),
        };
        Ok(writer::meta(id, source.size, tail.properties()?, &references))
    }

    /// The name of the order that a table says it is in.
    ///
    /// # Errors
    /// As [`open`](Table::open).
    pub(crate) fn comparator(files: &Arc<DataFiles>, cache: &Arc<BlockCache>, id: FileId) -> Result<String> {
        Table::read_tail(files, cache, id)?.1.properties().map(|properties| properties.comparator)
    }

    fn read_tail(files: &Arc<DataFiles>, cache: &Arc<BlockCache>, id: FileId) -> Result<(Source, Tail)> {
        let size = files.file(id)?.length()?;
        let (files, cache) = (Arc::clone(files), Arc::clone(cache));
        let mut source = Source { files, cache, id, file_id: [0; 16], size, pin_pieces: false };
        let tail = Tail::read(&mut source)?;
        Ok((source, tail))
    }

    /// Which values of blob files its entries point to, past the cache.
    ///
    /// # Errors
    /// `Corruption` if the section does not verify, or says something else than the manifest.
    pub(crate) fn blob_references(&self) -> Result<References> {
        let references = match self.directory.references {
            Some(handle) => self.source.references(handle)?,
            None => References::default(),
        };
        if !references.uses().eq(self.meta.blobs.iter().copied()) {
            let error = Error::corruption("table points to other values of blob files than the manifest says");
            return Err(error.in_file(self.source.path()));
        }
        Ok(references)
    }

    /// The newest version of the key that is not newer than asked for; tombstones are found like values. `read` sees
    /// the value where it lies. Blocks in the cache are reached by links, and stay while the pin lives.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if a block on the way cannot be read.
    #[inline]
    pub(crate) fn find<R>(
        &self,
        lookup: &Lookup<'_>,
        pin: &Pin,
        read: impl FnOnce(SeqNo, RecordKind, Value<'_>) -> R,
    ) -> Result<Option<R>> {
        let hash = if self.same_seed { lookup.hash } else { self.rehash(lookup.key) };
        if !self.may_contain(lookup.key, hash, pin) {
            return Ok(None);
        }
        let target = KeyRef::new(lookup.key, lookup.at);
        let found = self.index.find(&self.source, target, &self.order, pin);
        let Some((piece, at)) = found.map_err(|error| error.in_file(self.source.path()))? else {
            return Ok(None);
        };
        let block: Held<'_, Block> = self.source.follow(&piece, at, BlockKind::Data, pin)?;
        let found = match self.find_in(&block, &piece, at, target, hash) {
            Ok(Some(entry)) if entry.same_key => RecordKind::from_byte(entry.tag).map(|kind| Some((entry, kind))),
            Ok(Some(_)) => Ok(None),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        let found = found.map_err(|error| self.source.locate_entry(error, &piece, at))?;
        Ok(found.map(|(entry, kind)| read(entry.seqno, kind, Value::within(&block, entry.value))))
    }

    /// The index leads to the block that the first entry at or behind the target is in. So a lookup by hash that finds
    /// nothing there is final. But where the `at`-th entry of the piece `continues` it is exactly the last key of the
    /// block: then there must be such an entry, and only the search by order can tell whether it is of another key.
    #[inline]
    fn find_in<'b>(
        &self,
        block: &'b Block,
        piece: &RestartBlock,
        at: usize,
        target: KeyRef<'_>,
        hash: Option<u64>,
    ) -> Result<Option<Located<'b>>> {
        match block.find(target, hash, &self.order)? {
            None if continues(piece, at)? => match block.locate(target, &self.order)? {
                None => Err(Error::corruption("data block ends before the index says")),
                found => Ok(found),
            },
            found => Ok(found),
        }
    }

    /// False only if the filter knows that the key is not here.
    #[inline]
    fn may_contain(&self, key: &[u8], hash: Option<u64>, pin: &Pin) -> bool {
        let (Some(filter), Some(hash)) = (&self.filter, hash) else { return true };
        // A filter that cannot be read only costs the look into the data.
        filter.may_contain(&self.source, key, hash, &self.order, pin).unwrap_or(true)
    }

    pub(crate) fn rehash(&self, key: &[u8]) -> Option<u64> {
        let mut scratch = Vec::new();
        self.order.hashable(key, &mut scratch).map(|bytes| key_hash(self.properties.hash_seed, bytes))
    }

    pub(crate) fn properties(&self) -> &Properties {
        &self.properties
    }

    /// What the open table holds outside of the cache, in bytes.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let keys = self.meta.smallest.0.len() + self.meta.largest.0.len();
        let own = size_of::<Table>() + 2 * keys + self.properties.comparator.len();
        let filter = self.filter.as_ref().map_or(0, Filter::held_bytes);
        own as u64 + self.index.held_bytes() + filter
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Table({}, {} entries)", self.source.id.0, self.properties.entries)
    }
}

/// Whether the file is the one that the manifest means, and this is its order.
fn check(properties: &Properties, meta: &TableMeta, order: &KeyOrder) -> Result<()> {
    if properties.comparator != order.name() {
        let (theirs, ours) = (&properties.comparator, order.name());
        return Err(Error::invalid(format!("table is in the order of {theirs:?}, it was opened with {ours:?}")));
    }
    let theirs = (properties.entries, properties.tombstones, properties.lowest, properties.highest);
    if theirs != (meta.entries, meta.tombstones, meta.lowest, meta.highest) {
        return Err(Error::corruption("table has other entries than the manifest says"));
    }
    Ok(())
}

/// The end of a file in memory.
struct Tail {
    bytes: Vec<u8>,
    /// Where it begins in the file.
    start: u64,
    file_id: [u8; 16],
    footer: FileFooter,
    directory: Directory,
}

impl Tail {
    /// Reads header and end of the file, in one read if it is small, else in two, and makes the file's id known to
    /// `source`; a third read is needed if tops are large.
    fn read(source: &mut Source) -> Result<Tail> {
        let file = source.files.file(source.id)?;
        let size = source.size;
        let found = file.length()?;
        if found != size || size < (FileHeader::LEN + FileFooter::LEN) as u64 {
            return Err(Error::corruption(format!("table has {found} bytes, the manifest says {size}")));
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
        source.file_id = FileHeader::decode(FileKind::Table, &header)?.file_id;
        let footer_bytes = bytes.last_chunk::<{ FileFooter::LEN }>().expect("the file is longer than that");
        let footer = FileFooter::decode(FileKind::Table, footer_bytes, &source.file_id, size)
            .map_err(|error| error.at_offset(size - FileFooter::LEN as u64))?;
        let mut tail = Tail { bytes, start, file_id: source.file_id, footer, directory: Directory::default() };
        tail.directory = tail.decode_directory(source)?;
        tail.reach_back(source)?;
        Ok(tail)
    }

    fn decode_directory(&self, source: &Source) -> Result<Directory> {
        let handle = BlockHandle { offset: self.footer.offset, len: self.footer.len };
        let body = if handle.offset >= self.start {
            self.body(handle, BlockKind::Directory)?
        } else {
            source.body(handle, BlockKind::Directory)? // only a newer version writes so large a directory
        };
        Directory::decode(&body).map_err(|error| error.at_offset(handle.offset))
    }

    /// Reads more of the file if a section that is needed begins before the tail does.
    fn reach_back(&mut self, source: &Source) -> Result<()> {
        let Directory { properties, index_top, filter_top, .. } = &self.directory;
        let handles = [Some(properties), Some(index_top), filter_top.as_ref()];
        let first = handles.iter().flatten().map(|handle| handle.offset).min().expect("two are always there");
        if first >= self.start {
            return Ok(());
        }
        let missing = usize::try_from(self.start - first).ok();
        let mut bytes = Vec::new();
        let len = missing.and_then(|len| len.checked_add(self.bytes.len()));
        let reserved = len.is_some_and(|len| bytes.try_reserve_exact(len).is_ok());
        let Some(missing) = missing.filter(|_| reserved) else {
            return Err(Error::corruption("no memory for the top levels of the table"));
        };
        bytes.resize(missing, 0);
        source.files.file(source.id)?.read_exact_at(&mut bytes, first)?;
        bytes.extend_from_slice(&self.bytes);
        (self.bytes, self.start) = (bytes, first);
        Ok(())
    }

    fn body(&self, handle: BlockHandle, kind: BlockKind) -> Result<Body> {
        let frame = handle.end().ok().and_then(|end| {
            let from = usize::try_from(handle.offset.checked_sub(self.start)?).ok()?;
            let to = usize::try_from(end.checked_sub(self.start)?).ok()?;
            self.bytes.get(from..to)
        });
        let frame = frame.ok_or_else(|| Error::corruption("section reaches past the end of the file"));
        frame
            .and_then(|frame| open_frame(frame.into(), &self.file_id, handle.offset, kind))
            .map_err(|error| error.at_offset(handle.offset))
    }

    fn block<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block = T::decode_body(self.body(handle, kind)?).map_err(|error| error.at_offset(handle.offset))?;
        Ok(Arc::new(block))
    }

    fn properties(&self) -> Result<Properties> {
        let handle = self.directory.properties;
        Properties::decode(&self.body(handle, BlockKind::Properties)?).map_err(|error| error.at_offset(handle.offset))
    }

    fn index(&self, source: &Source, properties: &Properties, options: ReadOptions) -> Result<Index> {
        let handle = self.directory.index_top;
        let top: Arc<IndexTop> = self.block(handle, BlockKind::IndexTop)?;
        if let Some(piece) = only_piece(&top).map_err(|error| error.at_offset(handle.offset))? {
            let hold = hold_piece(source, piece, BlockKind::Index, properties, options);
            return Ok(Index::One(Slot::new(piece, BlockKind::Index, hold)));
        }
        let slot = Slot::new(handle, BlockKind::IndexTop, hold_top(source, handle, BlockKind::IndexTop, options));
        slot.offer(source, top);
        Ok(Index::Many(slot))
    }

    /// The filter, if the table has one and the order can use it. One that is damaged is done without.
    fn filter(
        &self,
        source: &Source,
        properties: &Properties,
        options: ReadOptions,
        order: &KeyOrder,
    ) -> Result<Option<Filter>> {
        let usable = order.hashes_keys();
        let Some(handle) = self.directory.filter_top.filter(|_| usable) else { return Ok(None) };
        let top = self.block::<FilterTop>(handle, BlockKind::FilterTop).and_then(|top| Ok((only_piece(&top)?, top)));
        match top {
            Ok((Some(piece), _)) => {
                let hold = hold_piece(source, piece, BlockKind::Filter, properties, options);
                Ok(Some(Filter::One(Slot::<FilterBlock>::new(piece, BlockKind::Filter, hold))))
            }
            Ok((None, top)) => {
                let hold = hold_top(source, handle, BlockKind::FilterTop, options);
                let slot = Slot::new(handle, BlockKind::FilterTop, hold);
                slot.offer(source, top);
                Ok(Some(Filter::Many(slot)))
            }
            Err(error) if error.kind() == ErrorKind::Corruption => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Pieces of partitioned tables always live in the cache. The one piece of another table is held if the options say so.
fn hold_piece(
    source: &Source,
    piece: BlockHandle,
    kind: BlockKind,
    properties: &Properties,
    options: ReadOptions,
) -> bool {
    let by_option = !properties.partitioned && !options.cache_index_and_filter_blocks;
    by_option || hold_anyway(source, piece, kind)
}

fn hold_top(source: &Source, top: BlockHandle, kind: BlockKind, options: ReadOptions) -> bool {
    options.pin_top_level || !options.cache_index_and_filter_blocks || hold_anyway(source, top, kind)
}

/// What shall live in a cache that would never take it is read again by every lookup. It is held beside the cache only
/// if it is small, or open tables would take memory that nobody has allowed them.
fn hold_anyway(source: &Source, handle: BlockHandle, kind: BlockKind) -> bool {
    handle.len <= HELD_MAX && !source.cache.takes(kind, 2 * handle.len)
}
