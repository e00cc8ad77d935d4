//! What the cache contains: the types of blocks, the memory that each is charged for, and the handle that owns it.

use std::ops::Deref;
use std::sync::{Arc, Weak};

use crate::base::blob_pointer::BlobValueId;
use crate::base::shared_bytes::{BytesOwner, SHARED_LEN_MIN, SharedBytes};
use crate::base::{Error, Result};
use crate::block::frame::BlockContents;
use crate::block::restart_block::RestartBlock;
use crate::block::{Block, FilterBlock};
use crate::mem::atomic::{AtomicU64, Ordering, subtract_counted};
use crate::mem::buffer_pool::Buffer;
use crate::mem::parent_block::{AnyParentBlock, CacheHandle, ParentBlock, RetiredBlock};
use crate::mem::slice::Slice;

/// An index partition, with a child link for each data block that it names.
pub(crate) type IndexPartitionBlock = ParentBlock<Block, RestartBlock>;
/// The top-level index, with a child link for each index partition.
pub(crate) type TopLevelIndexBlock = ParentBlock<IndexPartitionBlock, RestartBlock>;
/// The top-level filter, with a child link for each filter partition.
pub(crate) type TopLevelFilterBlock = ParentBlock<FilterBlock, RestartBlock>;

/// A value of a blob file. The slices returned for it share its bytes.
pub(crate) struct CachedBlobValue {
    id: BlobValueId,
    /// The value, possibly after the header of its frame.
    bytes: Buffer,
    start: usize,
}

impl CachedBlobValue {
    /// The value is `bytes` from `start` on.
    pub(crate) fn new(id: BlobValueId, bytes: Buffer, start: usize) -> CachedBlobValue {
        debug_assert!(start <= bytes.len(), "the value is a part of the bytes");
        CachedBlobValue { id, bytes, start }
    }

    /// A value that was read from a frame.
    pub(crate) fn from_contents(id: BlobValueId, contents: BlockContents) -> CachedBlobValue {
        let (bytes, start) = contents.into_parts();
        CachedBlobValue::new(id, bytes, start)
    }

    #[inline]
    pub(crate) fn id(&self) -> BlobValueId {
        self.id
    }

    /// Returns the value: shared if it has at least [`SHARED_LEN_MIN`] bytes, otherwise copied.
    pub(crate) fn to_slice(&self, to_arc: impl FnOnce() -> Arc<CachedBlobValue>) -> Slice {
        let shared = if self.len() < SHARED_LEN_MIN { None } else { SharedBytes::new(to_arc(), 0..self.len()) };
        shared.map_or_else(|| Slice::from(&**self), Slice::from)
    }

    fn memory(&self) -> usize {
        size_of::<CachedBlobValue>() + self.bytes.memory()
    }
}

impl Deref for CachedBlobValue {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

impl BytesOwner for CachedBlobValue {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A page of the index of a blob file, as stored in its frame.
pub(crate) struct CachedBlobIndexPage(BlockContents);

impl Deref for CachedBlobIndexPage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that are reserved in the cache's budget. Dropping the charge releases them, when the block that they were
/// reserved for is freed.
pub(crate) struct MemoryCharge {
    bytes: u64,
    charged: Arc<AtomicU64>,
}

impl MemoryCharge {
    /// Reserves `bytes` if the sum of all charges stays within `capacity`.
    pub(crate) fn try_new(charged: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<MemoryCharge> {
        add_within_limit(charged, bytes, capacity).then(|| MemoryCharge { bytes, charged: Arc::clone(charged) })
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        subtract_counted(&self.charged, self.bytes);
    }
}

/// Adds `bytes` to `sum` if the result is at most `limit`. Returns whether it did.
pub(crate) fn add_within_limit(sum: &AtomicU64, bytes: u64, limit: u64) -> bool {
    let within = |sum: u64| sum.checked_add(bytes).filter(|sum| *sum <= limit);
    sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
}

/// The child link of a parent block that is to point to a block: the parent and the index of the link.
pub(crate) type ParentSlot<T> = (Weak<AnyParentBlock<T>>, usize);

/// A block in the cache.
pub(crate) enum CachedBlock {
    Data(CacheHandle<Block, MemoryCharge>),
    IndexPartition(CacheHandle<IndexPartitionBlock, MemoryCharge>),
    TopLevelIndex(CacheHandle<TopLevelIndexBlock, MemoryCharge>),
    FilterPartition(CacheHandle<FilterBlock, MemoryCharge>),
    TopLevelFilter(CacheHandle<TopLevelFilterBlock, MemoryCharge>),
    BlobValue(CacheHandle<CachedBlobValue, MemoryCharge>),
    BlobIndexPage(CacheHandle<CachedBlobIndexPage, MemoryCharge>),
}

impl CachedBlock {
    /// Whether a reader followed the link to this block since the last call.
    pub(crate) fn take_referenced(&self) -> bool {
        match self {
            CachedBlock::Data(handle) => handle.take_referenced(),
            CachedBlock::IndexPartition(handle) => handle.take_referenced(),
            CachedBlock::TopLevelIndex(handle) => handle.take_referenced(),
            CachedBlock::FilterPartition(handle) => handle.take_referenced(),
            CachedBlock::TopLevelFilter(handle) => handle.take_referenced(),
            CachedBlock::BlobValue(handle) => handle.take_referenced(),
            CachedBlock::BlobIndexPage(handle) => handle.take_referenced(),
        }
    }

    /// Clears the link. The caller drops the result outside of locks.
    pub(crate) fn retire(self) -> RetiredBlock<MemoryCharge> {
        match self {
            CachedBlock::Data(handle) => handle.retire(),
            CachedBlock::IndexPartition(handle) => handle.retire(),
            CachedBlock::TopLevelIndex(handle) => handle.retire(),
            CachedBlock::FilterPartition(handle) => handle.retire(),
            CachedBlock::TopLevelFilter(handle) => handle.retire(),
            CachedBlock::BlobValue(handle) => handle.retire(),
            CachedBlock::BlobIndexPage(handle) => handle.retire(),
        }
    }
}

/// A type that the cache can contain.
pub(crate) trait Cacheable: Send + Sync + Sized + 'static {
    /// Memory use in bytes.
    fn bytes_held(&self) -> u64;
    fn into_cached(handle: CacheHandle<Self, MemoryCharge>) -> CachedBlock;
    /// The cache handle, if the block is of this type.
    fn cache_handle(cached: &mut CachedBlock) -> Option<&mut CacheHandle<Self, MemoryCharge>>;
}

/// A type of block that the contents of a frame can be decoded to.
pub(crate) trait DecodableBlock: Cacheable {
    /// # Errors
    /// `Corruption` or `Unsupported` if the bytes are not such a block.
    fn decode_body(body: BlockContents) -> Result<Self>;
}

/// Decodes a parent block. Its `i`-th child link belongs to its `i`-th entry, which is also its `i`-th restart.
fn decode_parent_block<T>(body: BlockContents) -> Result<ParentBlock<T, RestartBlock>> {
    let block = RestartBlock::decode(body)?;
    let count = block.count();
    if block.restarts() != count {
        return Err(Error::corruption("index block has entries that are not restarts"));
    }
    Ok(ParentBlock::new(block, count))
}

macro_rules! cacheable {
    ($type:ty, $variant:ident, $memory:expr) => {
        impl Cacheable for $type {
            fn bytes_held(&self) -> u64 {
                $memory(self) as u64
            }
            fn into_cached(handle: CacheHandle<$type, MemoryCharge>) -> CachedBlock {
                CachedBlock::$variant(handle)
            }
            fn cache_handle(cached: &mut CachedBlock) -> Option<&mut CacheHandle<$type, MemoryCharge>> {
                if let CachedBlock::$variant(handle) = cached { Some(handle) } else { None }
            }
        }
    };
    ($type:ty, $variant:ident, $memory:expr, $decode:expr) => {
        cacheable!($type, $variant, $memory);

        impl DecodableBlock for $type {
            fn decode_body(body: BlockContents) -> Result<$type> {
                $decode(body)
            }
        }
    };
}

fn parent_block_memory<T>(parent: &ParentBlock<T, RestartBlock>) -> usize {
    parent.memory() + parent.links_memory()
}

cacheable!(Block, Data, Block::memory, Block::decode);
cacheable!(FilterBlock, FilterPartition, FilterBlock::memory, FilterBlock::decode);
cacheable!(IndexPartitionBlock, IndexPartition, parent_block_memory, decode_parent_block);
cacheable!(TopLevelIndexBlock, TopLevelIndex, parent_block_memory, decode_parent_block);
cacheable!(TopLevelFilterBlock, TopLevelFilter, parent_block_memory, decode_parent_block);
cacheable!(CachedBlobValue, BlobValue, CachedBlobValue::memory);
cacheable!(
    CachedBlobIndexPage,
    BlobIndexPage,
    |page: &CachedBlobIndexPage| page.len() + size_of::<CachedBlobIndexPage>(),
    |body: BlockContents| Ok(CachedBlobIndexPage(body))
);
