//! Builds data blocks: with restart points and prefix compression here, with fingerprints in `fingerprint_block.rs`.

use crate::base::coding::{put_varint, varint_len};
use crate::base::key::KEY_LEN_MAX;
use crate::base::{InternalKey, SeqNo};
use crate::block::fingerprint_block::FingerprintBlockBuilder;
use crate::block::frame::BlockKind;
use crate::block::hash_index::BlockHashIndexBuilder;
use crate::block::restart_block::{HASHED, TRAILER_LEN};
use crate::block::search::common_prefix;

/// Builds data blocks of one layout.
pub(crate) enum DataBlockBuilder {
    Restart(RestartBlockBuilder),
    Fingerprint(FingerprintBlockBuilder),
}

impl DataBlockBuilder {
    /// Appends an entry. `hash` is the hash of the key, or of its canonical form; `None` if the key cannot be hashed.
    pub(crate) fn add(&mut self, key: InternalKey<'_>, hash: Option<u64>, tag: u8, value: &[u8]) {
        match self {
            DataBlockBuilder::Restart(builder) => {
                builder.add(key, tag, value);
                builder.index(hash);
            }
            DataBlockBuilder::Fingerprint(builder) => builder.add(key, hash, tag, value),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            DataBlockBuilder::Restart(builder) => builder.is_empty(),
            DataBlockBuilder::Fingerprint(builder) => builder.is_empty(),
        }
    }

    /// Current length of the block in bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            DataBlockBuilder::Restart(builder) => builder.len(),
            DataBlockBuilder::Fingerprint(builder) => builder.len(),
        }
    }

    /// Length of the block in bytes after one more entry.
    pub(crate) fn len_with(&self, key: InternalKey<'_>, value_len: usize) -> usize {
        match self {
            DataBlockBuilder::Restart(builder) => builder.len_with(key, value_len),
            DataBlockBuilder::Fingerprint(builder) => builder.len_with(key, value_len),
        }
    }

    /// Returns the complete block and its kind. Call [`DataBlockBuilder::clear`] before the next block.
    pub(crate) fn finish(&mut self) -> (BlockKind, &[u8]) {
        match self {
            DataBlockBuilder::Restart(builder) => (builder.kind(), builder.finish()),
            DataBlockBuilder::Fingerprint(builder) => (BlockKind::FingerprintData, builder.finish()),
        }
    }

    pub(crate) fn clear(&mut self) {
        match self {
            DataBlockBuilder::Restart(builder) => builder.clear(),
            DataBlockBuilder::Fingerprint(builder) => builder.clear(),
        }
    }
}

/// Builds blocks with restart points, one after another. The buffers are reused.
pub(crate) struct RestartBlockBuilder {
    out: Vec<u8>,
    restarts: Vec<u32>,
    interval: u32,
    since_restart: u32,
    count: u32,
    last_key: Vec<u8>,
    hash_index: Option<BlockHashIndexBuilder>,
}

impl RestartBlockBuilder {
    /// Creates a builder that makes every `interval`-th entry a restart point; 0 counts as 1.
    pub(crate) fn new(interval: u8) -> RestartBlockBuilder {
        let interval = u32::from(interval.max(1));
        RestartBlockBuilder {
            out: Vec::new(),
            restarts: Vec::new(),
            interval,
            since_restart: 0,
            count: 0,
            last_key: Vec::new(),
            hash_index: None,
        }
    }

    /// Creates a builder that also adds a hash index to each block that is small enough for one.
    pub(crate) fn with_hash_index(interval: u8, util_ratio: f64) -> RestartBlockBuilder {
        RestartBlockBuilder {
            hash_index: Some(BlockHashIndexBuilder::new(util_ratio)),
            ..RestartBlockBuilder::new(interval)
        }
    }

    /// Appends an entry. The caller adds entries in internal order, and starts a new block for a value that would end
    /// past 4 GiB.
    pub(crate) fn add(&mut self, key: InternalKey<'_>, tag: u8, value: &[u8]) {
        debug_assert!(key.user_key.len() <= KEY_LEN_MAX && key.seqno <= SeqNo::MAX, "a reader accepts the entry");
        let mut shared = 0;
        if self.count == 0 || self.since_restart == self.interval {
            self.restarts.push(u32::try_from(self.out.len()).expect("a block of several entries is far below 4 GiB"));
            self.since_restart = 0;
        } else {
            shared = common_prefix(&self.last_key, key.user_key);
        }
        let rest = &key.user_key[shared..];
        put_varint(&mut self.out, shared as u64);
        put_varint(&mut self.out, rest.len() as u64);
        put_varint(&mut self.out, value.len() as u64);
        self.out.push(tag);
        put_varint(&mut self.out, key.seqno.0);
        self.out.extend_from_slice(rest);
        self.out.extend_from_slice(value);
        self.last_key.truncate(shared);
        self.last_key.extend_from_slice(rest);
        debug_assert!(self.last_key == key.user_key, "a key is what it shares with the previous one, and its rest");
        self.since_restart += 1;
        self.count += 1;
        debug_assert!((1..=self.interval).contains(&self.since_restart), "an interval begins with a restart");
    }

    /// Adds the key of the last entry to the hash index, if there is one.
    fn index(&mut self, hash: Option<u64>) {
        if let Some(index) = &mut self.hash_index {
            index.add(hash, self.restarts.len() - 1);
            debug_assert_eq!(index.entry_count(), self.count as usize, "the index counts every entry");
        }
    }

    fn buckets_of(&self, entries: usize, restarts: usize) -> usize {
        self.hash_index.as_ref().map_or(0, |index| index.buckets_of(entries, restarts))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The kind of the current block.
    fn kind(&self) -> BlockKind {
        match self.buckets_of(self.count as usize, self.restarts.len()) {
            0 => BlockKind::Data,
            _ => BlockKind::DataWithHashIndex,
        }
    }

    /// Current length of the block in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len_of(self.out.len(), self.count as usize, self.restarts.len())
    }

    fn len_of(&self, entries_len: usize, entries: usize, restarts: usize) -> usize {
        entries_len + 4 * restarts + self.buckets_of(entries, restarts) + TRAILER_LEN
    }

    /// Length of the block in bytes after one more entry.
    pub(crate) fn len_with(&self, key: InternalKey<'_>, value_len: usize) -> usize {
        let (shared, restart) = if self.count == 0 || self.since_restart == self.interval {
            (0, 1)
        } else {
            (common_prefix(&self.last_key, key.user_key), 0)
        };
        let rest = key.user_key.len() - shared;
        let lengths = varint_len(shared as u64) + varint_len(rest as u64) + varint_len(value_len as u64);
        let entry = lengths + 1 + varint_len(key.seqno.0) + rest + value_len;
        self.len_of(self.out.len() + entry, self.count as usize + 1, self.restarts.len() + restart)
    }

    /// Returns the complete block. Call [`RestartBlockBuilder::clear`] before the next block.
    pub(crate) fn finish(&mut self) -> &[u8] {
        assert!(self.count > 0, "an empty block is never written");
        debug_assert!(self.restarts.is_sorted_by(|a, b| a < b), "restarts are ascending offsets");
        debug_assert_eq!(self.restarts.len(), self.count.div_ceil(self.interval) as usize, "a restart per interval");
        let len = self.len();
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
        debug_assert_eq!(self.out.len(), len, "the length of a block is known before it is finished");
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
