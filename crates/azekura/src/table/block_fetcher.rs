//! Where an open table's blocks come from: a link, what the table holds, the cache, the file.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::BlobReferences;
use crate::base::version_edit::FileNumber;
use crate::base::{Error, Result};
use crate::block::cached_block::{Cacheable, ParentSlot};
use crate::block::frame::{BlockContents, decode_capacity, open_frame};
use crate::block::restart_block::RestartBlock;
use crate::block::{Block, BlockCache, BlockHandle, BlockKind};
use crate::mem::buffer_pool::Buffer;
use crate::mem::epoch::Pin;
use crate::mem::parent_block::{ParentBlock, PinnedRef};
use crate::mem::slice::Slice;
use crate::vfs::open_files::DataFiles;
use crate::vfs::read_ahead::{ReadAhead, ReadAheadRequest};

/// The blocks of one table. Thread safe.
pub(crate) struct BlockFetcher {
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) id: FileNumber,
    /// Of the file, from its header.
    pub(crate) file_id: [u8; 16],
    /// Of the file, in bytes.
    pub(crate) size: u64,
    /// Whether pieces of index and filter are pinned in the cache.
    pub(crate) pin_partitions: bool,
}

/// The handle that the `at`-th entry of an index block holds.
pub(crate) fn child_handle(block: &RestartBlock, at: usize) -> Result<BlockHandle> {
    BlockHandle::decode(block.parse_restart(at)?.value)
}

impl BlockFetcher {
    pub(crate) fn path(&self) -> PathBuf {
        self.files.path(self.id)
    }

    /// Names the file, and the offset where there is none yet.
    #[cold]
    pub(crate) fn with_location(&self, error: Error, offset: u64) -> Error {
        error.at_offset(offset).in_file(self.path())
    }

    /// The same for the block that the `at`-th entry of an index block names.
    #[cold]
    pub(crate) fn with_entry_location(&self, error: Error, block: &RestartBlock, at: usize) -> Error {
        self.with_location(error, child_handle(block, at).map_or(0, |handle| handle.offset))
    }

    /// Reads a frame from the file and checks it.
    pub(crate) fn read_body(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        self.read_frame(handle, kind).map_err(|error| self.with_location(error, handle.offset))
    }

    /// The section of references to blob files.
    pub(crate) fn read_blob_references(&self, handle: BlockHandle) -> Result<BlobReferences> {
        let body = self.read_body(handle, BlockKind::BlobReferences)?;
        BlobReferences::decode(&body).map_err(|error| self.with_location(error, handle.offset))
    }

    fn read_frame(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        if handle.end()? > self.size {
            return Err(Error::corruption("block reaches past the end of the file"));
        }
        let mut bytes = self.allocate_buffer(handle.len)?;
        bytes.extend_with_zeros(handle.len as usize);
        self.files.get(self.id)?.read_exact_at(&mut bytes, handle.offset)?;
        open_frame(bytes, &self.file_id, handle.offset, kind)
    }

    /// For a block of this many stored bytes, and for the bytes that loading adds.
    fn allocate_buffer(&self, len: u64) -> Result<Buffer> {
        let len = usize::try_from(len).map_err(|_| Error::unsupported("block is larger than this machine's memory"))?;
        let buffer = self.cache.buffer(decode_capacity(len));
        buffer.ok_or_else(|| Error::corruption("no memory for a block of its declared length"))
    }

    /// As [`read`](BlockFetcher::read_block); while blocks follow each other, what lies behind is read ahead into
    /// `ahead`.
    fn read_sequential<T: Cacheable>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        ahead: &mut ReadAhead,
    ) -> Result<Arc<T>> {
        let end = handle.end().map_err(|error| self.with_location(error, handle.offset))?;
        if let ReadAheadRequest::Ahead(len) = ahead.request_for(handle.offset, handle.len)
            && end <= self.size
        {
            let mut bytes = vec![0; len.min(self.size - handle.offset) as usize]; // a window is short
            let read = self.files.get(self.id).and_then(|file| file.read_exact_at(&mut bytes, handle.offset));
            read.map_err(|error| self.with_location(error, handle.offset))?;
            ahead.fill(handle.offset, bytes);
        }
        let Some(frame) = ahead.buffered(handle.offset, handle.len) else { return self.read_block(handle, kind) };
        let block = self.allocate_buffer(handle.len).and_then(|mut bytes| {
            bytes.extend_from_slice(frame);
            T::decode_body(open_frame(bytes, &self.file_id, handle.offset, kind)?)
        });
        block.map(Arc::new).map_err(|error| self.with_location(error, handle.offset))
    }

    /// Reads and decodes a block, past the cache.
    pub(crate) fn read_block<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block =
            T::decode_body(self.read_body(handle, kind)?).map_err(|error| self.with_location(error, handle.offset))?;
        Ok(Arc::new(block))
    }

    /// The block at `handle`, from the cache, or from the file and then into the cache; `home` leads to it from then
    /// on.
    fn fetch_cached<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, home: ParentSlot<T>) -> Result<Arc<T>> {
        // A block of another type can only be there if handles of two kinds name one offset: the read will tell.
        if let Some(block) = self.cache.get(self.id, handle.offset, kind, Some(home.clone())) {
            return Ok(block);
        }
        let block = self.read_block::<T>(handle, kind)?;
        self.insert_into_cache(handle, kind, &block, home);
        Ok(block)
    }

    fn insert_into_cache<T: Cacheable>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        block: &Arc<T>,
        home: ParentSlot<T>,
    ) {
        let pin = self.pin_partitions && kind.is_metadata();
        self.cache.insert(self.id, handle.offset, kind, block, Some(home), pin);
    }

    /// The block that the `at`-th entry of `hub` names, for as long as the pin lives: by its link, or by its handle,
    /// which leaves a link.
    #[inline]
    pub(crate) fn fetch_child<'p, T: Cacheable>(
        &self,
        parent: &BlockRef<'_, ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        pin: &'p Pin,
    ) -> Result<BlockRef<'p, T>> {
        if let Some(block) = parent.child(at, pin) {
            self.cache.count_link_hit(kind, pin);
            return Ok(BlockRef::Pinned(block));
        }
        self.fetch_child_slow(parent.to_arc(), at, kind)
    }

    #[cold]
    fn fetch_child_slow<'p, T: Cacheable>(
        &self,
        parent: Arc<ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
    ) -> Result<BlockRef<'p, T>> {
        let handle = child_handle(&parent, at)?;
        self.fetch_cached(handle, kind, (Arc::downgrade(&parent) as _, at)).map(BlockRef::Shared)
    }

    /// The block that the `at`-th entry of `hub` names, pinned. With `fill`, a block that was read is inserted into
    /// the cache; without, neither a mark nor a link is set. A sequential caller reads ahead into `ahead`.
    pub(crate) fn fetch_child_arc<T: Cacheable>(
        &self,
        parent: &Arc<ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        fill: bool,
        mut ahead: Option<&mut ReadAhead>,
    ) -> Result<Arc<T>> {
        if let Some(ahead) = &mut ahead {
            ahead.note_sequential_read();
        }
        {
            let pin = Pin::new();
            if let Some(block) = if fill { parent.child(at, &pin) } else { parent.peek(at, &pin) } {
                self.cache.count_link_hit(kind, &pin);
                return Ok(block.to_arc());
            }
        }
        let handle = child_handle(parent, at)?;
        let home = fill.then(|| -> ParentSlot<T> { (Arc::downgrade(parent) as _, at) });
        if let Some(block) = self.cache.get(self.id, handle.offset, kind, home.clone()) {
            return Ok(block);
        }
        let block = match ahead {
            Some(ahead) => self.read_sequential(handle, kind, ahead)?,
            None => self.read_block(handle, kind)?,
        };
        if let Some(home) = home {
            self.insert_into_cache(handle, kind, &block, home);
        }
        Ok(block)
    }
}

/// A block for the length of a call: there for as long as the thread is pinned, or counted.
pub(crate) enum BlockRef<'a, T> {
    Pinned(PinnedRef<'a, T>),
    Shared(Arc<T>),
}

impl<T> Deref for BlockRef<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            BlockRef::Pinned(block) => block,
            BlockRef::Shared(block) => block,
        }
    }
}

impl<T> BlockRef<'_, T> {
    pub(crate) fn to_arc(&self) -> Arc<T> {
        match self {
            BlockRef::Pinned(block) => block.to_arc(),
            BlockRef::Shared(block) => Arc::clone(block),
        }
    }
}

/// A value where it lies, and the block that it lies in if that may be kept.
pub(crate) struct BlockValue<'a> {
    bytes: &'a [u8],
    block: Option<&'a BlockRef<'a, Block>>,
}

impl<'a> BlockValue<'a> {
    /// A value that must be copied.
    pub(crate) fn unpinned(bytes: &'a [u8]) -> BlockValue<'a> {
        BlockValue { bytes, block: None }
    }

    pub(crate) fn in_block(block: &'a BlockRef<'a, Block>, bytes: &'a [u8]) -> BlockValue<'a> {
        BlockValue { bytes, block: Some(block) }
    }

    /// The value to keep, without a copy if it is large and its block mostly the value.
    #[inline]
    pub(crate) fn to_slice(&self) -> Slice {
        let shared = self.block.and_then(|block| block.shared_value(self.bytes, || block.to_arc()));
        shared.map_or_else(|| Slice::from(self.bytes), Slice::from)
    }
}

impl Deref for BlockValue<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

/// A block that the table may hold for as long as it is open.
pub(crate) struct TableBlockSlot<T> {
    handle: BlockHandle,
    kind: BlockKind,
    /// Held once it was read, or else left to the cache.
    pin_in_table: bool,
    pinned: OnceLock<Arc<T>>,
    /// One link, to what the cache has.
    parent: Arc<ParentBlock<T, ()>>,
}

impl<T: Cacheable> TableBlockSlot<T> {
    pub(crate) fn new(handle: BlockHandle, kind: BlockKind, hold: bool) -> TableBlockSlot<T> {
        TableBlockSlot {
            handle,
            kind,
            pin_in_table: hold,
            pinned: OnceLock::new(),
            parent: Arc::new(ParentBlock::new((), usize::from(!hold))),
        }
    }

    fn parent_slot(&self) -> ParentSlot<T> {
        (Arc::downgrade(&self.parent) as _, 0)
    }

    /// Puts in a block that was read already; it stays if the slot holds.
    pub(crate) fn insert_loaded(&self, fetcher: &BlockFetcher, block: Arc<T>) {
        if self.pin_in_table {
            let _ = self.pinned.set(block);
        } else {
            fetcher.insert_into_cache(self.handle, self.kind, &block, self.parent_slot());
        }
    }

    #[inline]
    pub(crate) fn get<'a>(&'a self, fetcher: &BlockFetcher, pin: &'a Pin) -> Result<BlockRef<'a, T>> {
        match self.fetch_loaded(fetcher, pin) {
            Some(block) => Ok(BlockRef::Pinned(block)),
            None => self.fetch_slow(fetcher),
        }
    }

    #[inline]
    fn fetch_loaded<'a>(&'a self, fetcher: &BlockFetcher, pin: &'a Pin) -> Option<PinnedRef<'a, T>> {
        if let Some(block) = self.pinned.get() {
            return Some(PinnedRef::from_borrowed_arc(block));
        }
        self.parent.child(0, pin).inspect(|_| fetcher.cache.count_link_hit(self.kind, pin))
    }

    #[cold]
    fn fetch_slow(&self, fetcher: &BlockFetcher) -> Result<BlockRef<'_, T>> {
        if !self.pin_in_table {
            return Ok(BlockRef::Shared(fetcher.fetch_cached(self.handle, self.kind, self.parent_slot())?));
        }
        let block = fetcher.read_block(self.handle, self.kind)?;
        Ok(BlockRef::Pinned(PinnedRef::from_borrowed_arc(self.pinned.get_or_init(|| block))))
    }

    /// The block, to keep.
    pub(crate) fn fetch_arc(&self, fetcher: &BlockFetcher) -> Result<Arc<T>> {
        let at_hand = self.fetch_loaded(fetcher, &Pin::new()).map(PinnedRef::to_arc);
        at_hand.map_or_else(|| self.fetch_slow(fetcher).map(|block| block.to_arc()), Ok)
    }

    /// What the table holds by this slot now, in bytes.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned.get().map_or(0, |block| block.bytes_held())
    }
}
