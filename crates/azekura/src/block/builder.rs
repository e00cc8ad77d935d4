//! Writes a block of entries with restart points and prefix compression.

use crate::base::KeyRef;
use crate::base::coding::{put_varint, varint_len};
use crate::block::block::{TRAILER_LEN, common_prefix};

/// Builds one block after the other; its buffers are kept from block to block.
pub(crate) struct BlockBuilder {
    out: Vec<u8>,
    restarts: Vec<u32>,
    interval: u32,
    since_restart: u32,
    count: u32,
    last_key: Vec<u8>,
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
        }
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

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The length of the block as it stands, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.out.len() + 4 * self.restarts.len() + TRAILER_LEN
    }

    /// The length that the block would have with one more entry.
    pub(crate) fn len_with(&self, key: KeyRef<'_>, value_len: usize) -> usize {
        let (shared, restart) = if self.count == 0 || self.since_restart == self.interval {
            (0, 4)
        } else {
            (common_prefix(&self.last_key, key.user), 0)
        };
        let rest = key.user.len() - shared;
        let lengths = varint_len(shared as u64) + varint_len(rest as u64) + varint_len(value_len as u64);
        self.len() + restart + lengths + 1 + varint_len(key.seqno.0) + rest + value_len
    }

    /// The whole block, which must not be empty; call [`BlockBuilder::clear`] before the next one.
    pub(crate) fn finish(&mut self) -> &[u8] {
        assert!(self.count > 0, "an empty block is never written");
        for restart in &self.restarts {
            self.out.extend_from_slice(&restart.to_le_bytes());
        }
        self.out.extend_from_slice(&(self.restarts.len() as u32).to_le_bytes());
        self.out.extend_from_slice(&self.count.to_le_bytes());
        self.out.extend_from_slice(&[0; 4]);
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
    }
}
