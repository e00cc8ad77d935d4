//! What the cache holds: blocks of seven types, each behind a keeper that takes links away.

use std::ops::Deref;
use std::sync::{Arc, Weak};

use crate::base::{Error, Result};
use crate::block::frame::Body;
use crate::block::restarts::RestartBlock;
use crate::block::{Block, FilterBlock};
use crate::mem::atomic::{AtomicU64, Ordering};
use crate::mem::link::{AnyHub, Hub, Keeper, Retired};
use crate::mem::slice::Slice;

/// A piece of the index, and a link for each data block that it names.
pub(crate) type IndexPiece = Hub<Block, RestartBlock>;
/// The top of the index, and a link for each piece.
pub(crate) type IndexTop = Hub<IndexPiece, RestartBlock>;
/// The top of the filter, and a link for each piece.
pub(crate) type FilterTop = Hub<FilterBlock, RestartBlock>;

/// A value of a blob file. What is handed out of it shares its bytes.
pub(crate) struct BlobValue {
    /// The value to its end, possibly behind the header of its frame.
    bytes: Arc<[u8]>,
    start: usize,
}

impl BlobValue {
    /// The value is what lies from `start` on.
    pub(crate) fn new(bytes: Arc<[u8]>, start: usize) -> BlobValue {
        BlobValue { bytes, start }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// The value, without a copy unless it is short.
    pub(crate) fn slice(&self) -> Slice {
        Slice::shared(Arc::clone(&self.bytes), self.start)
    }

    fn memory(&self) -> usize {
        // With the counts before the bytes.
        size_of::<BlobValue>() + self.bytes.len() + 2 * size_of::<usize>()
    }
}

/// A page of the index of a blob file, as its frame had it.
pub(crate) struct BlobPage(Body);

impl Deref for BlobPage {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that were reserved in the budget; they are given back when what they were reserved for is freed.
pub(crate) struct Receipt {
    bytes: u64,
    charged: Arc<AtomicU64>,
}

impl Receipt {
    /// Takes `bytes` if the sum of all receipts stays within `capacity`.
    pub(crate) fn take(charged: &Arc<AtomicU64>, bytes: u64, capacity: u64) -> Option<Receipt> {
        raise(charged, bytes, capacity).then(|| Receipt { bytes, charged: Arc::clone(charged) })
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        self.charged.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Adds `bytes` to `sum` if it stays within `limit`.
pub(crate) fn raise(sum: &AtomicU64, bytes: u64, limit: u64) -> bool {
    let within = |sum: u64| sum.checked_add(bytes).filter(|sum| *sum <= limit);
    sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
}

/// The link of a hub that shall lead to a block.
pub(crate) type Home<T> = (Weak<AnyHub<T>>, usize);

/// A block in the cache.
pub(crate) enum Cached {
    Data(Keeper<Block, Receipt>),
    IndexPiece(Keeper<IndexPiece, Receipt>),
    IndexTop(Keeper<IndexTop, Receipt>),
    Filter(Keeper<FilterBlock, Receipt>),
    FilterTop(Keeper<FilterTop, Receipt>),
    Blob(Keeper<BlobValue, Receipt>),
    BlobPage(Keeper<BlobPage, Receipt>),
}

impl Cached {
    /// Whether the link that leads here was followed since this was last asked.
    pub(crate) fn take_mark(&self) -> bool {
        match self {
            Cached::Data(keeper) => keeper.take_mark(),
            Cached::IndexPiece(keeper) => keeper.take_mark(),
            Cached::IndexTop(keeper) => keeper.take_mark(),
            Cached::Filter(keeper) => keeper.take_mark(),
            Cached::FilterTop(keeper) => keeper.take_mark(),
            Cached::Blob(keeper) => keeper.take_mark(),
            Cached::BlobPage(keeper) => keeper.take_mark(),
        }
    }

    /// Takes the link away; what is returned is dropped outside of locks.
    pub(crate) fn retire(self) -> Retired {
        match self {
            Cached::Data(keeper) => keeper.retire(),
            Cached::IndexPiece(keeper) => keeper.retire(),
            Cached::IndexTop(keeper) => keeper.retire(),
            Cached::Filter(keeper) => keeper.retire(),
            Cached::FilterTop(keeper) => keeper.retire(),
            Cached::Blob(keeper) => keeper.retire(),
            Cached::BlobPage(keeper) => keeper.retire(),
        }
    }
}

/// What a body can be decoded to and kept in the cache as.
pub(crate) trait Cacheable: Send + Sync + Sized + 'static {
    /// # Errors
    /// `Corruption` or `Unsupported` for bytes that are no such block.
    fn decode_body(body: Body) -> Result<Self>;
    /// Memory held, in bytes.
    fn bytes_held(&self) -> u64;
    fn wrap(keeper: Keeper<Self, Receipt>) -> Cached;
    /// The keeper, if it is one of this type.
    fn keeper(cached: &mut Cached) -> Option<&mut Keeper<Self, Receipt>>;
}

/// The block as a hub: its `i`-th link is that of its `i`-th entry, which is the `i`-th restart.
fn decode_hub<T>(body: Body) -> Result<Hub<T, RestartBlock>> {
    let block = RestartBlock::decode(body)?;
    let count = block.count();
    if block.restarts() != count {
        return Err(Error::corruption("block of the index has entries that are no restarts"));
    }
    Ok(Hub::new(block, count))
}

fn decode_blob(body: Body) -> Result<BlobValue> {
    Ok(BlobValue::new(Arc::from(&*body), 0))
}

macro_rules! cacheable {
    ($type:ty, $variant:ident, $decode:expr, $memory:expr) => {
        impl Cacheable for $type {
            fn decode_body(body: Body) -> Result<$type> {
                $decode(body)
            }
            fn bytes_held(&self) -> u64 {
                $memory(self) as u64
            }
            fn wrap(keeper: Keeper<$type, Receipt>) -> Cached {
                Cached::$variant(keeper)
            }
            fn keeper(cached: &mut Cached) -> Option<&mut Keeper<$type, Receipt>> {
                if let Cached::$variant(keeper) = cached { Some(keeper) } else { None }
            }
        }
    };
}

fn hub_memory<T>(hub: &Hub<T, RestartBlock>) -> usize {
    hub.memory() + hub.links_memory()
}

cacheable!(Block, Data, Block::decode, Block::memory);
cacheable!(FilterBlock, Filter, FilterBlock::decode, FilterBlock::memory);
cacheable!(IndexPiece, IndexPiece, decode_hub, hub_memory);
cacheable!(IndexTop, IndexTop, decode_hub, hub_memory);
cacheable!(FilterTop, FilterTop, decode_hub, hub_memory);
cacheable!(BlobValue, Blob, decode_blob, BlobValue::memory);
cacheable!(BlobPage, BlobPage, |body: Body| Ok(BlobPage(body)), |page: &BlobPage| page.len() + size_of::<BlobPage>());
