//! Fetches the blocks of an open table: through a child link, from the table itself, from the cache, or from the
//! file.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::BlobReferences;
use crate::base::version_edit::FileNumber;
use crate::base::{Error, Result};
use crate::block::cached_block::{DecodableBlock, ParentSlot};
use crate::block::frame::{BlockContents, BlockFrame, allocate_block, open_frame, open_mapped_frame, read_frame};
use crate::block::restart_block::RestartBlock;
use crate::block::{Block, BlockCache, BlockHandle, BlockKind};
use crate::mem::buffer_pool::Buffer;
use crate::mem::epoch::Pin;
use crate::mem::parent_block::{ParentBlock, PinnedRef};
use crate::mem::slice::Slice;
use crate::vfs::open_files::{DataFile, DataFiles};
use crate::vfs::read_ahead::{ReadAhead, ReadAheadRequest};
use crate::vfs::read_many::RangeRead;

/// Fetches the blocks of one table. Thread safe.
pub(crate) struct BlockFetcher {
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) id: FileNumber,
    pub(crate) file: DataFile,
    /// Random id of the file, from its header.
    pub(crate) file_id: [u8; 16],
    /// Length of the file in bytes.
    pub(crate) size: u64,
    /// Whether index and filter partitions are pinned in the cache.
    pub(crate) pin_partitions: bool,
    /// Whether data blocks and index partitions are probably compressed. Only the frame of a block says it for certain.
    pub(crate) is_compressed: bool,
}

/// The bytes of one frame: a buffer of their own, part of a larger read, or not read.
pub(crate) enum FrameBytes<'a> {
    Owned(Buffer),
    Borrowed(&'a [u8]),
    /// In the mapped file.
    Mapped,
}

/// The handle in the `at`-th entry of an index block.
pub(crate) fn child_handle(block: &RestartBlock, at: usize) -> Result<BlockHandle> {
    debug_assert!(at < block.count(), "the index block has this entry");
    BlockHandle::decode(block.parse_restart(at)?.value)
}

impl BlockFetcher {
    /// A fetcher for a file of `size` bytes, whose header has not been read yet.
    pub(crate) fn new(files: &DataFiles, cache: Arc<BlockCache>, id: FileNumber, size: u64) -> BlockFetcher {
        let file = files.data_file(id);
        BlockFetcher { cache, id, file, file_id: [0; 16], size, pin_partitions: false, is_compressed: true }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Adds the file to an error, and the offset if the error has none.
    #[cold]
    pub(crate) fn with_location(&self, error: Error, offset: u64) -> Error {
        error.at_offset(offset).in_file(self.path())
    }

    /// Adds the location of the block that the `at`-th entry of an index block names.
    #[cold]
    pub(crate) fn with_entry_location(&self, error: Error, block: &RestartBlock, at: usize) -> Error {
        self.with_location(error, child_handle(block, at).map_or(0, |handle| handle.offset))
    }

    /// Reads and checks a frame of the file.
    pub(crate) fn read_body(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        self.read_frame(handle, kind).map_err(|error| self.with_location(error, handle.offset))
    }

    /// Reads the section of references to blob files.
    pub(crate) fn read_blob_references(&self, handle: BlockHandle) -> Result<BlobReferences> {
        let body = self.read_body(handle, BlockKind::BlobReferences)?;
        BlobReferences::decode(&body).map_err(|error| self.with_location(error, handle.offset))
    }

    fn read_frame(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        if handle.end()? > self.size {
            return Err(Error::corruption("block ends past the end of the file"));
        }
        let allocate = |capacity| self.cache.buffer(capacity);
        let file = self.file.get()?;
        let is_compressed = self.is_compressed || !matches!(kind, BlockKind::Data | BlockKind::IndexPartition);
        let read = |bytes: &mut [u8]| file.read_exact_at(bytes, handle.offset);
        read_frame(handle, kind, &self.file_id, is_compressed, allocate, read)
    }

    /// Opens a frame for the cache: in place if the file is mapped, else as [`read_frame`](BlockFetcher::read_frame).
    fn open_frame(&self, handle: BlockHandle, kind: BlockKind) -> Result<BlockContents> {
        match self.file.mapped_range(handle.offset, handle.len, self.size) {
            Some(file) => open_mapped_frame(file, handle, kind, &self.file_id, |capacity| self.cache.buffer(capacity)),
            None => self.read_frame(handle, kind),
        }
    }

    /// Checks the frame that was read from `offset`, and decodes its block into a buffer of the cache.
    fn decode_frame(&self, frame: &[u8], offset: u64, kind: BlockKind) -> Result<BlockContents> {
        BlockFrame::check(frame, &self.file_id, offset, kind)?.decode(|capacity| self.cache.buffer(capacity))
    }

    /// Reads a block as [`read_block`](BlockFetcher::read_block) does. While reads are sequential, it also reads the
    /// following bytes into `ahead`. With `fill`, the block may be in a mapped file.
    fn read_sequential<T: DecodableBlock>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        fill: bool,
        ahead: &mut ReadAhead,
    ) -> Result<Arc<T>> {
        let end = handle.end().map_err(|error| self.with_location(error, handle.offset))?;
        if let ReadAheadRequest::Ahead(len) = ahead.request_for(handle.offset, handle.len)
            && end <= self.size
        {
            let mut bytes = vec![0; len.min(self.size - handle.offset) as usize]; // bounded by the longest read-ahead
            let read = self.file.get().and_then(|file| file.read_exact_at(&mut bytes, handle.offset));
            read.map_err(|error| self.with_location(error, handle.offset))?;
            ahead.fill(handle.offset, bytes);
        }
        let Some(frame) = ahead.buffered(handle.offset, handle.len) else {
            return if fill { self.open_block(handle, kind) } else { self.read_block(handle, kind) };
        };
        let block = self.decode_frame(frame, handle.offset, kind).and_then(T::decode_body);
        block.map(Arc::new).map_err(|error| self.with_location(error, handle.offset))
    }

    /// Opens and decodes a block for the cache. It may be in a mapped file.
    fn open_block<T: DecodableBlock>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block = self.open_frame(handle, kind).and_then(T::decode_body);
        block.map(Arc::new).map_err(|error| self.with_location(error, handle.offset))
    }

    /// Reads and decodes a block into memory of its own, without the cache.
    pub(crate) fn read_block<T: DecodableBlock>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block =
            T::decode_body(self.read_body(handle, kind)?).map_err(|error| self.with_location(error, handle.offset))?;
        Ok(Arc::new(block))
    }

    /// Returns the block at `handle` from the cache; else reads it and inserts it into the cache. Afterwards the
    /// child link `parent_slot` points to it.
    fn fetch_cached<T: DecodableBlock>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        parent_slot: ParentSlot<T>,
    ) -> Result<Arc<T>> {
        // The cache can contain a block of another type at this offset only if handles of two kinds have the same
        // offset. Then the read fails.
        if let Some(block) = self.cache.get(self.id, handle.offset, kind, Some(parent_slot.clone())) {
            return Ok(block);
        }
        let block = self.open_block::<T>(handle, kind)?;
        self.insert_into_cache(handle, kind, &block, parent_slot);
        Ok(block)
    }

    fn insert_into_cache<T: DecodableBlock>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        block: &Arc<T>,
        parent_slot: ParentSlot<T>,
    ) {
        let pin = self.pin_partitions && kind.is_metadata();
        self.cache.insert(self.id, handle.offset, kind, block, Some(parent_slot), pin);
    }

    /// Returns the block of the `at`-th entry of `parent`, valid as long as `pin`, if a child link leads to it.
    #[inline(always)]
    pub(crate) fn linked_child<'p, T: DecodableBlock>(
        &self,
        parent: &ParentBlock<T, RestartBlock>,
        at: usize,
        kind: BlockKind,
        pin: &'p Pin,
    ) -> Option<PinnedRef<'p, T>> {
        parent.child(at, pin).inspect(|_| self.cache.count_link_hit(kind, pin))
    }

    /// Returns the block of the `at`-th entry of `parent`, valid as long as `pin`: through its child link, or by its
    /// handle, which sets the link.
    #[inline]
    pub(crate) fn fetch_child<'p, T: DecodableBlock>(
        &self,
        parent: &BlockRef<'_, ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        pin: &'p Pin,
    ) -> Result<BlockRef<'p, T>> {
        if let Some(block) = self.linked_child(parent, at, kind, pin) {
            return Ok(BlockRef::Pinned(block));
        }
        self.fetch_child_slow(parent.to_arc(), at, kind)
    }

    /// As [`fetch_child`](BlockFetcher::fetch_child), but returns `None` if the block must be read from the file.
    #[inline]
    pub(crate) fn cached_child<'p, T: DecodableBlock>(
        &self,
        parent: &BlockRef<'_, ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        pin: &'p Pin,
    ) -> Result<Option<BlockRef<'p, T>>> {
        if let Some(block) = self.linked_child(parent, at, kind, pin) {
            return Ok(Some(BlockRef::Pinned(block)));
        }
        let parent = parent.to_arc();
        let handle = child_handle(&parent, at)?;
        let cached = self.cache.get(self.id, handle.offset, kind, Some((Arc::downgrade(&parent) as _, at)));
        Ok(cached.map(BlockRef::Shared))
    }

    /// Prepares the read of `len` bytes from `offset`: one data block, or several. If the file is mapped, only
    /// announces the read, and returns `None`.
    ///
    /// # Errors
    /// `Corruption` if the range ends past the end of the file, `Io` if the file cannot be opened.
    pub(crate) fn start_read(&self, offset: u64, len: u64) -> Result<Option<RangeRead<Buffer>>> {
        let start = || {
            if offset.checked_add(len).is_none_or(|end| end > self.size) {
                return Err(Error::corruption("block ends past the end of the file"));
            }
            if self.file.mapped_range(offset, len, self.size).is_some() {
                return Ok(None);
            }
            let bytes = allocate_block(BlockKind::Data, len, |capacity| self.cache.buffer(capacity))?;
            Ok(Some(RangeRead { file: self.file.get()?, offset, bytes, error: None }))
        };
        start().map_err(|error| self.with_location(error, offset))
    }

    /// Decodes the data block at `handle` from the bytes that were read for it, and inserts it into the cache, linked
    /// to the `at`-th entry of `parent`.
    pub(crate) fn finish_read<T: DecodableBlock>(
        &self,
        handle: BlockHandle,
        kind: BlockKind,
        frame: FrameBytes<'_>,
        parent_slot: ParentSlot<T>,
    ) -> Result<Arc<T>> {
        let contents = match frame {
            FrameBytes::Owned(bytes) => open_frame(bytes, &self.file_id, handle.offset, kind),
            FrameBytes::Borrowed(bytes) => self.decode_frame(bytes, handle.offset, kind),
            FrameBytes::Mapped => self.open_frame(handle, kind),
        };
        let block = contents.and_then(T::decode_body);
        let block = block.map(Arc::new).map_err(|error| self.with_location(error, handle.offset))?;
        self.insert_into_cache(handle, kind, &block, parent_slot);
        Ok(block)
    }

    #[cold]
    fn fetch_child_slow<'p, T: DecodableBlock>(
        &self,
        parent: Arc<ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
    ) -> Result<BlockRef<'p, T>> {
        let handle = child_handle(&parent, at)?;
        self.fetch_cached(handle, kind, (Arc::downgrade(&parent) as _, at)).map(BlockRef::Shared)
    }

    /// Returns the block of the `at`-th entry of `parent`, with a count. With `fill`, a block that was read is
    /// inserted into the cache; without it, no link is set or marked, and the block is in memory of its own, because a
    /// caller that writes its entries to another file must not rely on the check of a page that was read again since. A
    /// sequential caller reads ahead into `ahead`.
    pub(crate) fn fetch_child_arc<T: DecodableBlock>(
        &self,
        parent: &Arc<ParentBlock<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        fill: bool,
        mut read_ahead: Option<&mut ReadAhead>,
    ) -> Result<Arc<T>> {
        if let Some(read_ahead) = &mut read_ahead {
            read_ahead.note_sequential_read();
        }
        let uses_cache = fill || kind != BlockKind::Data || self.file.mapped(self.size).is_none();
        if uses_cache {
            let pin = Pin::new();
            if let Some(block) = if fill { parent.child(at, &pin) } else { parent.peek(at, &pin) } {
                self.cache.count_link_hit(kind, &pin);
                return Ok(block.to_arc());
            }
        }
        let handle = child_handle(parent, at)?;
        let parent_slot = fill.then(|| -> ParentSlot<T> { (Arc::downgrade(parent) as _, at) });
        if uses_cache && let Some(block) = self.cache.get(self.id, handle.offset, kind, parent_slot.clone()) {
            return Ok(block);
        }
        let block = match read_ahead {
            Some(read_ahead) => self.read_sequential(handle, kind, fill, read_ahead)?,
            None => self.read_block(handle, kind)?,
        };
        if let Some(parent_slot) = parent_slot {
            self.insert_into_cache(handle, kind, &block, parent_slot);
        }
        Ok(block)
    }
}

/// A block for the duration of a call: protected by the pin of the thread, or counted.
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

/// A value in a block, and the block if the value may keep it alive.
pub(crate) struct BlockValue<'a> {
    bytes: &'a [u8],
    block: Option<&'a BlockRef<'a, Block>>,
}

impl<'a> BlockValue<'a> {
    /// A value that is always copied.
    pub(crate) fn unpinned(bytes: &'a [u8]) -> BlockValue<'a> {
        BlockValue { bytes, block: None }
    }

    pub(crate) fn in_block(block: &'a BlockRef<'a, Block>, bytes: &'a [u8]) -> BlockValue<'a> {
        BlockValue { bytes, block: Some(block) }
    }

    /// The value without its first `len` bytes.
    pub(crate) fn without_prefix(self, len: usize) -> BlockValue<'a> {
        BlockValue { bytes: &self.bytes[len..], ..self }
    }

    /// The value as a slice. A large value that is most of its block is shared, others are copied.
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

/// A block that the table may hold as long as it is open.
pub(crate) struct TableBlockSlot<T> {
    handle: BlockHandle,
    kind: BlockKind,
    /// Whether the table keeps the block once it was read. Otherwise the block is in the cache.
    pin_in_table: bool,
    pinned: OnceLock<Arc<T>>,
    /// A parent with one child link, to the block in the cache.
    parent: Arc<ParentBlock<T, ()>>,
}

impl<T: DecodableBlock> TableBlockSlot<T> {
    pub(crate) fn new(handle: BlockHandle, kind: BlockKind, pin_in_table: bool) -> TableBlockSlot<T> {
        TableBlockSlot {
            handle,
            kind,
            pin_in_table,
            pinned: OnceLock::new(),
            parent: Arc::new(ParentBlock::new((), usize::from(!pin_in_table))),
        }
    }

    fn parent_slot(&self) -> ParentSlot<T> {
        (Arc::downgrade(&self.parent) as _, 0)
    }

    /// Takes a block that was already read: keeps it in the table, or inserts it into the cache.
    pub(crate) fn insert_loaded(&self, fetcher: &BlockFetcher, block: Arc<T>) {
        debug_assert!(self.pinned.get().is_none(), "a block is loaded before the slot is used");
        if self.pin_in_table {
            let _ = self.pinned.set(block);
        } else {
            fetcher.insert_into_cache(self.handle, self.kind, &block, self.parent_slot());
        }
    }

    #[inline(always)]
    pub(crate) fn get<'a>(&'a self, fetcher: &BlockFetcher, pin: &'a Pin) -> Result<BlockRef<'a, T>> {
        match self.fetch_loaded(fetcher, pin) {
            Some(block) => Ok(BlockRef::Pinned(block)),
            None => self.fetch_slow(fetcher),
        }
    }

    /// The block if the table holds it or its link leads to it.
    #[inline(always)]
    pub(crate) fn fetch_loaded<'a>(&'a self, fetcher: &BlockFetcher, pin: &'a Pin) -> Option<PinnedRef<'a, T>> {
        if let Some(block) = self.pinned.get() {
            return Some(PinnedRef::from_borrowed_arc(block));
        }
        self.parent.child(0, pin).inspect(|_| fetcher.cache.count_link_hit(self.kind, pin))
    }

    #[cold]
    fn fetch_slow(&self, fetcher: &BlockFetcher) -> Result<BlockRef<'_, T>> {
        debug_assert!(self.pin_in_table || self.pinned.get().is_none(), "the block is in the cache or in the table");
        if !self.pin_in_table {
            return Ok(BlockRef::Shared(fetcher.fetch_cached(self.handle, self.kind, self.parent_slot())?));
        }
        let block = fetcher.read_block(self.handle, self.kind)?;
        Ok(BlockRef::Pinned(PinnedRef::from_borrowed_arc(self.pinned.get_or_init(|| block))))
    }

    /// Returns the block with a count.
    pub(crate) fn fetch_arc(&self, fetcher: &BlockFetcher) -> Result<Arc<T>> {
        let loaded = self.fetch_loaded(fetcher, &Pin::new()).map(PinnedRef::to_arc);
        loaded.map_or_else(|| self.fetch_slow(fetcher).map(|block| block.to_arc()), Ok)
    }

    /// Bytes that the table holds in this slot.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned.get().map_or(0, |block| block.bytes_held())
    }
}
