//! Blocks: the unit in which tables are read, checked, compressed and cached.
//!
//! Invariants:
//! - The checksum of a block is verified when it is loaded, not at a cache hit.
//! - Any bytes give entries or a typed error: no panic, no endless loop, no memory beyond a bound given by the file's
//!   size.
//! - A loaded block never changes. An `Arc` of it may be kept as long as needed.
//! - The cache never holds more than its capacity, including evicted blocks that are not freed yet.
//!
//! Layouts: `docs/format/block.md`. Modules, in reading order: [`kind`], [`frame`], [`search`] (shared by all
//! layouts), [`hash_index`], [`builder`], [`restart_block`] and [`fingerprint_block`] (the layouts), [`block`] (a
//! block of either layout), [`iter`], [`bloom`], [`cached_block`] (the types that the cache holds), [`cache`] with
//! its [`shard`].

#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds what blocks are made of and kept in")]
pub(crate) mod block;
pub(crate) mod bloom;
pub(crate) mod builder;
pub(crate) mod cache;
pub(crate) mod cached_block;
pub(crate) mod fingerprint_block;
pub(crate) mod frame;
pub(crate) mod hash_index;
pub(crate) mod iter;
pub(crate) mod kind;
pub(crate) mod restart_block;
pub(crate) mod search;
pub(crate) mod shard;

pub(crate) use block::Block;
pub(crate) use bloom::FilterBlock;
pub(crate) use builder::{DataBlockBuilder, RestartBlockBuilder};
pub(crate) use cache::BlockCache;
pub(crate) use fingerprint_block::FingerprintBlockBuilder;
pub(crate) use frame::BlockHandle;
pub(crate) use iter::BlockIter;
pub(crate) use kind::BlockKind;
