//! Where an open table's blocks come from: a link, what the table holds, the cache, the file.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::base::blob_ref::References;
use crate::base::edit::FileId;
use crate::base::{Error, Result};
use crate::block::cached::{Cacheable, Home};
use crate::block::frame::{Body, open_frame, room_for};
use crate::block::restarts::RestartBlock;
use crate::block::{Block, BlockCache, BlockHandle, BlockKind};
use crate::mem::epoch::Pin;
use crate::mem::link::{Hub, Pinned};
use crate::mem::pool::Buffer;
use crate::mem::slice::Slice;
use crate::vfs::ahead::{ReadAhead, Wanted};
use crate::vfs::files::DataFiles;

/// The blocks of one table. Thread safe.
pub(crate) struct Source {
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) id: FileId,
    /// Of the file, from its header.
    pub(crate) file_id: [u8; 16],
    /// Of the file, in bytes.
    pub(crate) size: u64,
    /// Whether pieces of index and filter are pinned in the cache.
    pub(crate) pin_pieces: bool,
}

/// The handle that the `at`-th entry of an index block holds.
pub(crate) fn handle_at(block: &RestartBlock, at: usize) -> Result<BlockHandle> {
    BlockHandle::decode(block.parse_restart(at)?.value)
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

    /// The same for the block that the `at`-th entry of an index block names.
    #[cold]
    pub(crate) fn locate_entry(&self, error: Error, block: &RestartBlock, at: usize) -> Error {
        self.locate(error, handle_at(block, at).map_or(0, |handle| handle.offset))
    }

    /// Reads a frame from the file and checks it.
    pub(crate) fn body(&self, handle: BlockHandle, kind: BlockKind) -> Result<Body> {
        self.read_frame(handle, kind).map_err(|error| self.locate(error, handle.offset))
    }

    /// The section of references to blob files.
    pub(crate) fn references(&self, handle: BlockHandle) -> Result<References> {
        let body = self.body(handle, BlockKind::BlobReferences)?;
        References::decode(&body).map_err(|error| self.locate(error, handle.offset))
    }

    fn read_frame(&self, handle: BlockHandle, kind: BlockKind) -> Result<Body> {
        if handle.end()? > self.size {
            return Err(Error::corruption("block reaches past the end of the file"));
        }
        let mut bytes = self.buffer(handle.len)?;
        bytes.grow_to(handle.len as usize);
        self.files.file(self.id)?.read_exact_at(&mut bytes, handle.offset)?;
        open_frame(bytes, &self.file_id, handle.offset, kind)
    }

    /// For a block of so many bytes, and for what it adds when it is loaded.
    fn buffer(&self, len: u64) -> Result<Buffer> {
        let len = usize::try_from(len).map_err(|_| Error::unsupported("block is larger than this machine's memory"))?;
        let buffer = self.cache.buffer(room_for(len));
        buffer.ok_or_else(|| Error::corruption("no memory for a block of its declared length"))
    }

    /// As [`read`](Source::read); while blocks follow each other, what lies behind is read ahead into `ahead`.
    fn read_on<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, ahead: &mut ReadAhead) -> Result<Arc<T>> {
        let end = handle.end().map_err(|error| self.locate(error, handle.offset))?;
        if let Wanted::Window(len) = ahead.wanted(handle.offset, handle.len)
            && end <= self.size
        {
            let mut bytes = vec![0; len.min(self.size - handle.offset) as usize]; // a window is short
            let read = self.files.file(self.id).and_then(|file| file.read_exact_at(&mut bytes, handle.offset));
            read.map_err(|error| self.locate(error, handle.offset))?;
            ahead.fill(handle.offset, bytes);
        }
        let Some(frame) = ahead.piece(handle.offset, handle.len) else { return self.read(handle, kind) };
        let block = self.buffer(handle.len).and_then(|mut bytes| {
            bytes.extend_from_slice(frame);
            T::decode_body(open_frame(bytes, &self.file_id, handle.offset, kind)?)
        });
        block.map(Arc::new).map_err(|error| self.locate(error, handle.offset))
    }

    /// Reads and decodes a block, past the cache.
    pub(crate) fn read<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind) -> Result<Arc<T>> {
        let block = T::decode_body(self.body(handle, kind)?).map_err(|error| self.locate(error, handle.offset))?;
        Ok(Arc::new(block))
    }

    /// The block at `handle`, from the cache, or from the file and then into the cache; `home` leads to it from then
    /// on.
    fn cached<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, home: Home<T>) -> Result<Arc<T>> {
        // A block of another type can only be there if handles of two kinds name one offset: the read will tell.
        if let Some(block) = self.cache.get(self.id, handle.offset, kind, Some(home.clone())) {
            return Ok(block);
        }
        let block = self.read::<T>(handle, kind)?;
        self.put(handle, kind, &block, home);
        Ok(block)
    }

    fn put<T: Cacheable>(&self, handle: BlockHandle, kind: BlockKind, block: &Arc<T>, home: Home<T>) {
        let pin = self.pin_pieces && kind.is_metadata();
        self.cache.insert(self.id, handle.offset, kind, block, Some(home), pin);
    }

    /// The block that the `at`-th entry of `hub` names, for as long as the pin lives: by its link, or by its handle,
    /// which leaves a link.
    #[inline]
    pub(crate) fn follow<'p, T: Cacheable>(
        &self,
        hub: &Held<'_, Hub<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        pin: &'p Pin,
    ) -> Result<Held<'p, T>> {
        if let Some(block) = hub.follow(at, pin) {
            self.cache.count_hit(kind, pin);
            return Ok(Held::Pinned(block));
        }
        self.fetch(hub.to_arc(), at, kind)
    }

    #[cold]
    fn fetch<'p, T: Cacheable>(
        &self,
        hub: Arc<Hub<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
    ) -> Result<Held<'p, T>> {
        let handle = handle_at(&hub, at)?;
        self.cached(handle, kind, (Arc::downgrade(&hub) as _, at)).map(Held::Counted)
    }

    /// The block that the `at`-th entry of `hub` names, to keep; `fill` puts what was read into the cache. Who does not
    /// leaves no mark or link in it. One who walks over blocks has what lies behind read ahead into `ahead`.
    pub(crate) fn keep<T: Cacheable>(
        &self,
        hub: &Arc<Hub<T, RestartBlock>>,
        at: usize,
        kind: BlockKind,
        fill: bool,
        mut ahead: Option<&mut ReadAhead>,
    ) -> Result<Arc<T>> {
        if let Some(ahead) = &mut ahead {
            ahead.pass();
        }
        {
            let pin = Pin::new();
            if let Some(block) = if fill { hub.follow(at, &pin) } else { hub.peek(at, &pin) } {
                self.cache.count_hit(kind, &pin);
                return Ok(block.to_arc());
            }
        }
        let handle = handle_at(hub, at)?;
        let home = fill.then(|| -> Home<T> { (Arc::downgrade(hub) as _, at) });
        if let Some(block) = self.cache.get(self.id, handle.offset, kind, home.clone()) {
            return Ok(block);
        }
        let block = match ahead {
            Some(ahead) => self.read_on(handle, kind, ahead)?,
            None => self.read(handle, kind)?,
        };
        if let Some(home) = home {
            self.put(handle, kind, &block, home);
        }
        Ok(block)
    }
}

/// A block for the length of a call: there for as long as the thread is pinned, or counted.
pub(crate) enum Held<'a, T> {
    Pinned(Pinned<'a, T>),
    Counted(Arc<T>),
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        match self {
            Held::Pinned(block) => block,
            Held::Counted(block) => block,
        }
    }
}

impl<T> Held<'_, T> {
    pub(crate) fn to_arc(&self) -> Arc<T> {
        match self {
            Held::Pinned(block) => block.to_arc(),
            Held::Counted(block) => Arc::clone(block),
        }
    }
}

/// A value where it lies, and the block that it lies in if that may be kept.
pub(crate) struct Value<'a> {
    bytes: &'a [u8],
    block: Option<&'a Held<'a, Block>>,
}

impl<'a> Value<'a> {
    /// A value that must be copied.
    pub(crate) fn loose(bytes: &'a [u8]) -> Value<'a> {
        Value { bytes, block: None }
    }

    pub(crate) fn within(block: &'a Held<'a, Block>, bytes: &'a [u8]) -> Value<'a> {
        Value { bytes, block: Some(block) }
    }

    /// The value to keep, without a copy if it is large and its block mostly the value.
    #[inline]
    pub(crate) fn to_slice(&self) -> Slice {
        let shared = self.block.and_then(|block| block.share(self.bytes, || block.to_arc()));
        shared.map_or_else(|| Slice::from(self.bytes), Slice::from)
    }
}

impl Deref for Value<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

/// A block that the table may hold for as long as it is open.
pub(crate) struct Slot<T> {
    handle: BlockHandle,
    kind: BlockKind,
    /// Held once it was read, or else left to the cache.
    hold: bool,
    held: OnceLock<Arc<T>>,
    /// One link, to what the cache has.
    home: Arc<Hub<T, ()>>,
}

impl<T: Cacheable> Slot<T> {
    pub(crate) fn new(handle: BlockHandle, kind: BlockKind, hold: bool) -> Slot<T> {
        Slot { handle, kind, hold, held: OnceLock::new(), home: Arc::new(Hub::new((), usize::from(!hold))) }
    }

    fn home(&self) -> Home<T> {
        (Arc::downgrade(&self.home) as _, 0)
    }

    /// Puts in a block that was read already; it stays if the slot holds.
    pub(crate) fn offer(&self, source: &Source, block: Arc<T>) {
        if self.hold {
            let _ = self.held.set(block);
        } else {
            source.put(self.handle, self.kind, &block, self.home());
        }
    }

    #[inline]
    pub(crate) fn get<'a>(&'a self, source: &Source, pin: &'a Pin) -> Result<Held<'a, T>> {
        match self.at_hand(source, pin) {
            Some(block) => Ok(Held::Pinned(block)),
            None => self.fetch(source),
        }
    }

    #[inline]
    fn at_hand<'a>(&'a self, source: &Source, pin: &'a Pin) -> Option<Pinned<'a, T>> {
        if let Some(block) = self.held.get() {
            return Some(Pinned::held(block));
        }
        self.home.follow(0, pin).inspect(|_| source.cache.count_hit(self.kind, pin))
    }

    #[cold]
    fn fetch(&self, source: &Source) -> Result<Held<'_, T>> {
        if !self.hold {
            return Ok(Held::Counted(source.cached(self.handle, self.kind, self.home())?));
        }
        let block = source.read(self.handle, self.kind)?;
        Ok(Held::Pinned(Pinned::held(self.held.get_or_init(|| block))))
    }

    /// The block, to keep.
    pub(crate) fn keep(&self, source: &Source) -> Result<Arc<T>> {
        let at_hand = self.at_hand(source, &Pin::new()).map(Pinned::to_arc);
        at_hand.map_or_else(|| self.fetch(source).map(|block| block.to_arc()), Ok)
    }

    /// What the table holds by this slot now, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held.get().map_or(0, |block| block.bytes_held())
    }
}
