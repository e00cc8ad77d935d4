//! Blocks: the unit that tables are read, checked, compressed and cached in.
//!
//! Invariants:
//! - a block's checksum is verified when it is loaded, never on a hit;
//! - any bytes give entries or a typed error: no panic, no endless walk, no memory beyond what the file's size allows;
//! - a loaded block never changes; who holds an `Arc` of it may keep it as long as needed;
//! - the cache never holds more than its capacity, what was evicted and is not freed yet included.
//!
//! The layouts are drawn in `docs/format/block.md`. Rooms in reading order: [`kind`], [`handle`], [`frame`], [`entry`]
//! (what all layouts have), [`hash_index`], [`builder`], [`fences`], [`restart_block`] and [`fingerprint_block`] (the
//! layouts), [`block`] (one of either), [`iter`], [`bloom`], [`cached_block`] (what the cache holds), [`cache`] with
//! its [`shard`].

#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds what blocks are made of and kept in")]
pub(crate) mod block;
pub(crate) mod bloom;
pub(crate) mod builder;
pub(crate) mod cache;
pub(crate) mod cached_block;
pub(crate) mod entry;
pub(crate) mod fences;
pub(crate) mod fingerprint_block;
pub(crate) mod frame;
pub(crate) mod handle;
pub(crate) mod hash_index;
pub(crate) mod iter;
pub(crate) mod kind;
pub(crate) mod restart_block;
pub(crate) mod shard;

pub(crate) use block::Block;
pub(crate) use bloom::FilterBlock;
pub(crate) use builder::{DataBlockBuilder, RestartBlockBuilder};
pub(crate) use cache::BlockCache;
pub(crate) use fingerprint_block::FingerprintBlockBuilder;
pub(crate) use handle::BlockHandle;
pub(crate) use iter::BlockIter;
pub(crate) use kind::BlockKind;
