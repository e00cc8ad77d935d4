//! What the cache holds: blocks of five types, each behind a keeper that takes links away.

use std::sync::{Arc, Weak};

use crate::base::{Error, Result};
use crate::block::frame::Body;
use crate::block::restarts::RestartBlock;
use crate::block::{Block, FilterBlock};
use crate::mem::atomic::{AtomicU64, Ordering};
use crate::mem::link::{AnyHub, Hub, Keeper, Retired};

/// A piece of the index, and a link for each data block that it names.
pub(crate) type IndexPiece = Hub<Block, RestartBlock>;
/// The top of the index, and a link for each piece.
pub(crate) type IndexTop = Hub<IndexPiece, RestartBlock>;
/// The top of the filter, and a link for each piece.
pub(crate) type FilterTop = Hub<FilterBlock, RestartBlock>;

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
