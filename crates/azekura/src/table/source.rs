//! Where an open table's blocks come from: what the table holds, the cache, the file.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::base::edit::FileId;
use crate::base::{Error, Result};
use crate::block::frame::{Body, open_frame};
use crate::block::shard::Cached;
use crate::block::{Block, BlockCache, BlockHandle, BlockKind, FilterBlock};
use crate::table::ahead::{ReadAhead, Wanted};
use crate::table::files::TableFiles;

/// What a body can be decoded to and kept in the cache as.
pub(crate) trait Cacheable: Sized {
    fn decode_body(body: Body) -> Result<Self>;
    fn wrap(block: Arc<Self>) -> Cached;
    fn unwrap(cached: Cached) -> Option<Arc<Self>>;
    fn bytes_held(&self) -> u64;
}

impl Cacheable for Block {
    fn decode_body(body: Body) -> Result<Block> {
        Block::decode(body)
    }
    fn wrap(block: Arc<Block>) -> Cached {
        Cached::Entries(block)
    }
    #[inline]
    fn unwrap(cached: Cached) -> Option<Arc<Block>> {
        if let Cached::Entries(block) = cached { Some(block) } else { None }
    }
    fn bytes_held(&self) -> u64 {
        self.memory() as u64
    }
}

impl Cacheable for FilterBlock {
    fn decode_body(body: Body) -> Result<FilterBlock> {
        FilterBlock::decode(&body)
    }
    fn wrap(block: Arc<FilterBlock>) -> Cached {
        Cached::Filter(block)
    }
    #[inline]
    fn unwrap(cached: Cached) -> Option<Arc<FilterBlock>> {
        if let Cached::Filter(filter) = cached { Some(filter) } else { None }
    }
    fn bytes_held(&self) -> u64 {
        self.memory() as u64
    }
}

/// The blocks of one table. Thread safe.
pub(crate) struct Source {
    pub(crate) files: Arc<TableFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) id: FileId,
    /// Of the file, from its header.
    pub(crate) file_id: [u8; 16],
    /// Of the file, in bytes.
    pub(crate) size: u64,
}

impl Source {
    pub(crate) fn path(&self) -> PathBuf {
        self.files.path(self.id)
    }

    /// Names the file, and the offset where there is none yet.
    #[cold]
    pub(crate) fn locate(&self, error: Error, offset: u64) -> Error {
        error.at_offset(offset).in_file(self.path())
    }

    /// Reads a frame from the file and checks it.
    pub(crate) fn body(&self, handle: BlockHandle, kind: BlockKind) -> Result<Body> {
        self.read_frame(handle, kind).map_err(|error| self.locate(error, handle.offset))
    }

    fn read_frame(&self, handle: BlockHandle, kind: BlockKind) -> Result<Body> {
        if handle.end()? > self.size {
            return Err(Error::corruption("block reaches past the end of the file"));
        }
        let bytes = self.read_bytes(handle.offset, handle.len)?;
        open_frame(bytes, &self.file_id, handle.offset, kind)
    }

    /// Bytes of the file, none of them past its end.
    fn read_bytes(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        let len = usize::try_from(len).map_err(|_| Error::unsupported("block is larger than this machine's memory"))?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Error::corruption("no memory for a block of its declared length"))?;
        bytes.resize(len, 0);
        self.files.file(self.id)?.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// As [`read`](Source::read); while blocks follow each other, what lies behind is read ahead into `ahead`.
    pub(crate) fn read_on<T: Cacheable>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        ahead: &mut ReadAhead,
    ) -> Result<Arc<T>> {
        let wanted = handle.end().map(|end| (end, ahead.wanted(handle)));
        let wanted = wanted.map_err(|error| self.locate(error, handle.offset))?;
        if let (end, Wanted::Window(len)) = wanted
            && end <= self.size
        {
            let bytes = self.read_bytes(handle.offset, len.min(self.size - handle.offset));
            ahead.fill(handle.offset, bytes.map_err(|error| self.locate(error, handle.offset))?);
        }
        let Some(frame) = ahead.frame(handle) else { return self.read(handle, kind) };
        let body = open_frame(frame.to_vec(), &self.file_id, handle.offset, kind);
        let block = body.and_then(T::decode_body).map_err(|error| self.locate(error, handle.offset))?;
        Ok(Arc::new(block))
    }

    /// Reads and decodes a block, past the cache.
    pub(crate) fn read<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block = T::decode_body(self.body(handle, kind)?).map_err(|error| self.locate(error, handle.offset))?;
        Ok(Arc::new(block))
    }

    /// The block at `handle`, from the cache or the file; `fill` puts what was read into the cache.
    #[inline]
    pub(crate) fn cached<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, fill: bool) -> Result<Arc<T>> {
        if let Some(block) = self.in_cache(handle, kind) {
            return Ok(block);
        }
        let block = self.read::<T>(handle, kind)?;
        if fill {
            self.put_into_cache(handle, kind, &block);
        }
        Ok(block)
    }

    /// The block at `handle`, if the cache has it.
    #[inline]
    pub(crate) fn in_cache<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind) -> Option<Arc<T>> {
        // A block of another type can only be there if handles of two kinds name one offset: the read will tell.
        self.cache.get(self.id, handle.offset, kind).and_then(T::unwrap)
    }

    pub(crate) fn put_into_cache<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, block: &Arc<T>) {
        self.cache.insert(self.id, handle.offset, kind, T::wrap(Arc::clone(block)));
    }
}

/// A block that the table may hold for as long as it is open.
pub(crate) struct Slot<T> {
    handle: BlockHandle,
    kind: BlockKind,
    /// Held once it was read, or else left to the cache.
    hold: bool,
    held: OnceLock<Arc<T>>,
}

/// A block for the length of a call: borrowed from the table, or counted.
pub(crate) enum Held<'a, T> {
    Borrowed(&'a Arc<T>),
    Shared(Arc<T>),
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Held::Borrowed(block) => block,
            Held::Shared(block) => block,
        }
    }
}

impl<T> Held<'_, T> {
    pub(crate) fn to_arc(&self) -> Arc<T> {
        match self {
            Held::Borrowed(block) => Arc::clone(block),
            Held::Shared(block) => Arc::clone(block),
        }
    }
}

impl<T: Cacheable> Slot<T> {
    pub(crate) fn new(handle: BlockHandle, kind: BlockKind, hold: bool) -> Slot<T> {
        Slot { handle, kind, hold, held: OnceLock::new() }
    }

    /// Puts in a block that was read already; it stays if the slot holds.
    pub(crate) fn offer(&self, source: &Source, block: Arc<T>) {
        if self.hold {
            let _ = self.held.set(block);
        } else {
            source.cache.insert(source.id, self.handle.offset, self.kind, T::wrap(block));
        }
    }

    #[inline]
    pub(crate) fn get(&self, source: &Source) -> Result<Held<'_, T>> {
        if let Some(block) = self.held.get() {
            return Ok(Held::Borrowed(block));
        }
        self.fetch(source)
    }

    fn fetch(&self, source: &Source) -> Result<Held<'_, T>> {
        if !self.hold {
            return Ok(Held::Shared(source.cached(self.handle, self.kind, true)?));
        }
        let block = source.read(self.handle, self.kind)?;
        Ok(Held::Borrowed(self.held.get_or_init(|| block)))
    }

    /// What the table holds by this slot now, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held.get().map_or(0, |block| block.bytes_held())
    }
}
