//! Writes blocks of entries: with restart points and prefix compression here, with slots in `slots.rs`.

use crate::base::KeyRef;
use crate::base::coding::{put_varint, varint_len};
use crate::block::entry::common_prefix;
use crate::block::hash_index::HashIndexBuilder;
use crate::block::kind::BlockKind;
use crate::block::restarts::{HASHED, TRAILER_LEN};
use crate::block::slots::SlotBuilder;

/// Builds data blocks of one layout.
pub(crate) enum DataBuilder {
    Restarts(BlockBuilder),
    Slots(SlotBuilder),
}

impl DataBuilder {
    /// Appends an entry, as the builders of the layouts do. `hash` is that of the key, or of its canonical form; `None`
    /// where it cannot be hashed.
    pub(crate) fn add(&mut self, key: KeyRef<'_>, hash: Option<u64>, tag: u8, value: &[u8]) {
        match self {
            DataBuilder::Restarts(builder) => {
                builder.add(key, tag, value);
                builder.index(hash);
            }
            DataBuilder::Slots(builder) => builder.add(key, hash, tag, value),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            DataBuilder::Restarts(builder) => builder.is_empty(),
            DataBuilder::Slots(builder) => builder.is_empty(),
        }
    }

    /// The length of the block as it stands, in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            DataBuilder::Restarts(builder) => builder.len(),
            DataBuilder::Slots(builder) => builder.len(),
        }
    }

    /// The length that the block would have with one more entry.
    pub(crate) fn len_with(&self, key: KeyRef<'_>, value_len: usize) -> usize {
        match self {
            DataBuilder::Restarts(builder) => builder.len_with(key, value_len),
            DataBuilder::Slots(builder) => builder.len_with(key, value_len),
        }
    }

    /// The whole block, which must not be empty, and its kind; call [`DataBuilder::clear`] before the next one.
    pub(crate) fn finish(&mut self) -> (BlockKind, &[u8]) {
        match self {
            DataBuilder::Restarts(builder) => (builder.kind(), builder.finish()),
            DataBuilder::Slots(builder) => (BlockKind::SlottedData, builder.finish()),
        }
    }

    pub(crate) fn clear(&mut self) {
        match self {
            DataBuilder::Restarts(builder) => builder.clear(),
            DataBuilder::Slots(builder) => builder.clear(),
        }
    }
}

/// Builds one block with restart points after the other; its buffers are kept from block to block.
pub(crate) struct BlockBuilder {
    out: Vec<u8>,
    restarts: Vec<u32>,
    interval: u32,
    since_restart: u32,
    count: u32,
    last_key: Vec<u8>,
    hash_index: Option<HashIndexBuilder>,
}

impl BlockBuilder {
    /// Every `interval`-th entry is a restart point; 0 counts as 1.
    pub(crate) fn new(interval: u8) -> BlockBuilder {
        let interval = u32::from(interval.max(1));
        BlockBuilder {
            out: Vec::new(),
            restarts: Vec::new(),
            interval,
            since_restart: 0,
            count: 0,
            last_key: Vec::new(),
            hash_index: None,
        }
    }

    /// The same, with a hash index in each block that can have one.
    pub(crate) fn with_hash_index(interval: u8, util_ratio: f64) -> BlockBuilder {
        BlockBuilder { hash_index: Some(HashIndexBuilder::new(util_ratio)), ..BlockBuilder::new(interval) }
    }

    /// Appends an entry; the caller keeps internal order, and gives a value that reaches past 4 GiB a block of its own.
    pub(crate) fn add(&mut self, key: KeyRef<'_>, tag: u8, value: &[u8]) {
        let mut shared = 0;
        if self.count == 0 || self.since_restart == self.interval {
            self.restarts.push(u32::try_from(self.out.len()).expect("a block of several entries is far below 4 GiB"));
            self.since_restart = 0;
        } else {
            shared = common_prefix(&self.last_key, key.user);
        }
        let rest = &key.user[shared..];
        put_varint(&mut self.out, shared as u64);
        put_varint(&mut self.out, rest.len() as u64);
        put_varint(&mut self.out, value.len() as u64);
        self.out.push(tag);
        put_varint(&mut self.out, key.seqno.0);
        self.out.extend_from_slice(rest);
        self.out.extend_from_slice(value);
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(rest);
        self.since_restart += 1;
        self.count += 1;
    }

    /// Puts the key added last into the hash index, if there is one.
    fn index(&mut self, hash: Option<u64>) {
        if let Some(index) = &mut self.hash_index {
            index.add(hash, self.restarts.len() - 1);
        }
    }

    fn buckets_of(&self, entries: usize, restarts: usize) -> usize {
        self.hash_index.as_ref().map_or(0, |index| index.buckets_of(entries, restarts))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The kind that a data block has as it stands.
    fn kind(&self) -> BlockKind {
        match self.buckets_of(self.count as usize, self.restarts.len()) {
            0 => BlockKind::Data,
            _ => BlockKind::HashedData,
        }
    }

    /// The length of the block as it stands, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len_of(self.out.len(), self.count as usize, self.restarts.len())
    }

    fn len_of(&self, entries_len: usize, entries: usize, restarts: usize) -> usize {
        entries_len + 4 * restarts + self.buckets_of(entries, restarts) + TRAILER_LEN
    }

    /// The length that the block would have with one more entry.
    pub(crate) fn len_with(&self, key: KeyRef<'_>, value_len: usize) -> usize {
        let (shared, restart) = if self.count == 0 || self.since_restart == self.interval {
            (0, 1)
        } else {
            (common_prefix(&self.last_key, key.user), 0)
        };
        let rest = key.user.len() - shared;
        let lengths = varint_len(shared as u64) + varint_len(rest as u64) + varint_len(value_len as u64);
        let entry = lengths + 1 + varint_len(key.seqno.0) + rest + value_len;
        self.len_of(self.out.len() + entry, self.count as usize + 1, self.restarts.len() + restart)
    }

    /// The whole block, which must not be empty; call [`BlockBuilder::clear`] before the next one.
    pub(crate) fn finish(&mut self) -> &[u8] {
        assert!(self.count > 0, "an empty block is never written");
        for restart in &self.restarts {
            self.out.extend_from_slice(&restart.to_le_bytes());
        }
        let flags = match &self.hash_index {
            Some(index) if index.fits() => HASHED | u32::from(index.put(&mut self.out)) << 16,
            _ => 0,
        };
        self.out.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        self.out.extend_from_slice(&self.count.to_le_bytes());
        self.out.extend_from_slice(&flags.to_le_bytes());
        &self.out
    }

    pub(crate) fn clear(&mut self) {
        const KEPT: usize = 1 << 20;
        self.out.clear();
        self.out.shrink_to(KEPT);
        self.restarts.clear();
        self.since_restart = 0;
        self.count = 0;
        self.last_key.clear();
        if let Some(index) = &mut self.hash_index {
            index.clear();
        }
    }
}
