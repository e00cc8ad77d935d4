//! Blocks: the unit in which tables and blob files are read, verified, compressed and cached.
//!
//! Invariants:
//! - The checksum of a block is verified when it is loaded, not at a cache hit.
//! - Decoding arbitrary bytes gives entries or a typed error: no panic, no endless loop, and no memory use beyond a
//!   bound that the size of the file determines.
//! - A loaded block never changes. An `Arc` of it may be kept as long as needed.
//! - The cache never holds more than its capacity, including evicted blocks that are not freed yet.
//!
//! Layouts: `docs/format/block.md`. Modules, in reading order: [`frame`] (also the kinds of blocks), [`search`] (shared
//! by all layouts), [`hash_index`], [`builder`], [`restart_block`] and [`fingerprint_block`] (the layouts), [`block`]
//! (a block of either layout), [`iter`], [`bloom`], [`cached_block`] (what the cache contains), [`shard`], [`cache`].

#[expect(
    clippy::module_inception,
    reason = "the file defines `Block`; the folder also contains its layouts and its cache"
)]
pub(crate) mod block;
pub(crate) mod bloom;
pub(crate) mod builder;
pub(crate) mod cache;
pub(crate) mod cached_block;
pub(crate) mod fingerprint_block;
pub(crate) mod frame;
pub(crate) mod hash_index;
pub(crate) mod iter;
pub(crate) mod restart_block;
pub(crate) mod search;
pub(crate) mod shard;

pub(crate) use block::Block;
pub(crate) use bloom::FilterBlock;
pub(crate) use builder::{DataBlockBuilder, RestartBlockBuilder};
pub(crate) use cache::BlockCache;
pub(crate) use fingerprint_block::FingerprintBlockBuilder;
pub(crate) use frame::{BlockHandle, BlockKind};
pub(crate) use iter::BlockIter;
