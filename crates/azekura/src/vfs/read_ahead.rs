//! Read-ahead: reads adjacent blocks of a file with few large reads.

/// Length of the first read-ahead in bytes. Each later one is twice as long.
const INITIAL_READAHEAD_LEN: u64 = 16 << 10;

/// Length of the longest read-ahead in bytes. An iterator uses up to this much memory for each file that it reads.
const MAX_READAHEAD_LEN: u64 = 256 << 10;

/// Number of sequential blocks that are read alone before read-ahead starts.
const READS_BEFORE_READAHEAD: u32 = 2;

/// Read-ahead state of one iterator in one file.
pub(crate) struct ReadAhead {
    /// Bytes of the file from offset `start`.
    bytes: Vec<u8>,
    start: u64,
    /// Number of sequential blocks since the last reset.
    sequential_reads: u32,
    readahead_len: u64,
    /// Initial value of `readahead_len`, in bytes.
    initial_len: u64,
    reads_before_readahead: u32,
}

/// The read that a block needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadAheadRequest {
    /// No read, because the block is in the buffer.
    Buffered,
    /// A read of the block alone.
    Exact,
    /// A read of this many bytes from the offset of the block, or up to the end of the file.
    Ahead(u64),
}

impl ReadAhead {
    /// For an iterator with any access pattern: starts read-ahead once its reads are sequential.
    pub(crate) fn adaptive() -> ReadAhead {
        ReadAhead {
            bytes: Vec::new(),
            start: 0,
            sequential_reads: 0,
            readahead_len: INITIAL_READAHEAD_LEN,
            initial_len: INITIAL_READAHEAD_LEN,
            reads_before_readahead: READS_BEFORE_READAHEAD,
        }
    }

    /// For an iterator that reads the whole file sequentially: starts read-ahead at once.
    pub(crate) fn eager() -> ReadAhead {
        ReadAhead {
            reads_before_readahead: 0,
            readahead_len: MAX_READAHEAD_LEN,
            initial_len: MAX_READAHEAD_LEN,
            ..ReadAhead::adaptive()
        }
    }

    /// Notes that the next block is not adjacent to the last one. Frees the buffer.
    pub(crate) fn reset(&mut self) {
        (self.sequential_reads, self.readahead_len) = (0, self.initial_len);
        self.bytes = Vec::new();
    }

    /// Counts a sequential block. The iterator calls this for each block that it moves to, also if the block is in
    /// the block cache.
    pub(crate) fn note_sequential_read(&mut self) {
        self.sequential_reads = self.sequential_reads.saturating_add(1);
    }

    /// The read that is needed for the block at `offset`, to which the iterator has just moved. Frees the buffer if
    /// it does not contain the block.
    pub(crate) fn request_for(&mut self, offset: u64, len: u64) -> ReadAheadRequest {
        if self.buffered(offset, len).is_some() {
            return ReadAheadRequest::Buffered;
        }
        self.bytes = Vec::new();
        if self.sequential_reads <= self.reads_before_readahead || len >= MAX_READAHEAD_LEN {
            return ReadAheadRequest::Exact;
        }
        debug_assert!(
            (self.initial_len..=MAX_READAHEAD_LEN).contains(&self.readahead_len),
            "read-ahead grows from its first to its maximum length"
        );
        let window = self.readahead_len.max(len);
        self.readahead_len = (2 * self.readahead_len).min(MAX_READAHEAD_LEN);
        ReadAheadRequest::Ahead(window)
    }

    /// Whether the buffer has bytes that were read ahead.
    pub(crate) fn is_reading_ahead(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// Sets the buffer to the bytes of the file from `start`.
    pub(crate) fn fill(&mut self, start: u64, bytes: Vec<u8>) {
        (self.start, self.bytes) = (start, bytes);
    }

    /// The block at `offset`, if the buffer contains all of it.
    pub(crate) fn buffered(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let from = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        self.bytes.get(from..to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_next(ahead: &mut ReadAhead, offset: u64, len: u64) -> ReadAheadRequest {
        ahead.note_sequential_read();
        ahead.request_for(offset, len)
    }

    /// Reads blocks of 4 KiB sequentially from `offset`. Returns the request for each block.
    fn read_sequentially(ahead: &mut ReadAhead, offset: u64, count: u64) -> Vec<ReadAheadRequest> {
        (0..count)
            .map(|i| {
                let at = offset + i * 4096;
                let wanted = read_next(ahead, at, 4096);
                if let ReadAheadRequest::Ahead(len) = wanted {
                    ahead.fill(at, (0..len).map(|j| ((at + j) % 251) as u8).collect());
                }
                if let Some(frame) = ahead.buffered(at, 4096) {
                    assert_eq!(frame.len(), 4096);
                    assert_eq!(frame[9], ((at + 9) % 251) as u8, "bytes of another offset");
                }
                wanted
            })
            .collect()
    }

    #[test]
    fn readahead_grows_on_sequential_reads() {
        let mut ahead = ReadAhead::adaptive();
        let wanted = read_sequentially(&mut ahead, 64, 300);
        assert_eq!(wanted[..3], [ReadAheadRequest::Exact, ReadAheadRequest::Exact, ReadAheadRequest::Ahead(16 << 10)]);
        let windows: Vec<ReadAheadRequest> =
            wanted.iter().copied().filter(|w| matches!(w, ReadAheadRequest::Ahead(_))).collect();
        assert_eq!(windows[1..6], [32 << 10, 64 << 10, 128 << 10, 256 << 10, 256 << 10].map(ReadAheadRequest::Ahead));
        assert!(windows.len() < 12, "{windows:?}");
    }

    #[test]
    fn reset_restarts_readahead() {
        let mut ahead = ReadAhead::adaptive();
        read_sequentially(&mut ahead, 64, 20);
        ahead.reset();
        assert_eq!(
            read_sequentially(&mut ahead, 1 << 30, 3),
            [ReadAheadRequest::Exact, ReadAheadRequest::Exact, ReadAheadRequest::Ahead(16 << 10)]
        );
        ahead.reset();
        assert_eq!(read_next(&mut ahead, 0, 4096), ReadAheadRequest::Exact);
        assert!(ahead.bytes.is_empty(), "the buffer was not freed");
    }

    #[test]
    fn eager_readahead_uses_longest_reads() {
        let wanted = read_sequentially(&mut ReadAhead::eager(), 64, 128);
        assert_eq!(wanted.iter().filter(|w| **w == ReadAheadRequest::Ahead(MAX_READAHEAD_LEN)).count(), 2);
        assert!(wanted.iter().all(|w| *w != ReadAheadRequest::Exact));
    }

    #[test]
    fn large_block_and_invalid_handle_are_read_alone() {
        let mut ahead = ReadAhead::eager();
        assert_eq!(read_next(&mut ahead, 64, 1 << 20), ReadAheadRequest::Exact);
        assert_eq!(read_next(&mut ahead, u64::MAX - 5, u64::MAX), ReadAheadRequest::Exact);
        assert_eq!(ahead.buffered(u64::MAX, u64::MAX), None);
    }
}
