//! Bounded reads of a file that may be larger than memory.

use crate::base::{Error, Result};
use crate::vfs::File;

/// What is read at once, in bytes.
const WINDOW_LEN: u64 = 1 << 20;

/// Where the bytes come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LogSource<'a> {
    File(&'a dyn File),
    Bytes(&'a [u8]),
}

/// A view of a file that moves with what is asked for: one MiB, or a single larger piece.
#[derive(Debug)]
pub(crate) struct LogReadWindow<'a> {
    source: LogSource<'a>,
    len: u64,
    buffer: Vec<u8>,
    start: u64,
}

impl<'a> LogReadWindow<'a> {
    /// A view of the whole source, whose length is read now.
    pub(crate) fn new(source: LogSource<'a>) -> Result<LogReadWindow<'a>> {
        let len = match source {
            LogSource::File(file) => file.length()?,
            LogSource::Bytes(bytes) => bytes.len() as u64,
        };
        Ok(LogReadWindow { source, len, buffer: Vec::new(), start: 0 })
    }

    /// Length of the source, in bytes.
    pub(crate) fn source_len(&self) -> u64 {
        self.len
    }

    /// The `len` bytes at `offset`; `None` if the source ends before.
    #[inline]
    pub(crate) fn bytes(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>> {
        Ok(self.at_least(offset, len)?.map(|bytes| &bytes[..len]))
    }

    /// `len` bytes at `offset` and what else of the view follows them; `None` if the source ends before.
    #[inline]
    pub(crate) fn at_least(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>> {
        if offset > self.len || self.len - offset < len as u64 {
            return Ok(None);
        }
        if let LogSource::Bytes(bytes) = self.source {
            return Ok(Some(&bytes[offset as usize..]));
        }
        let held = self.start..self.start + self.buffer.len() as u64;
        if offset < held.start || offset + len as u64 > held.end {
            self.move_to(offset, len as u64)?;
        }
        Ok(Some(&self.buffer[(offset - self.start) as usize..]))
    }

    #[cold]
    fn move_to(&mut self, offset: u64, len: u64) -> Result<()> {
        let LogSource::File(file) = self.source else { return Ok(()) };
        let want = len.max(WINDOW_LEN).min(self.len - offset) as usize;
        self.buffer.clear();
        if self.buffer.capacity() as u64 > 2 * WINDOW_LEN && (want as u64) <= WINDOW_LEN {
            self.buffer = Vec::new();
        }
        let no_memory = |_| Error::corruption(format!("no memory for a frame of {want} bytes")).at_offset(offset);
        self.buffer.try_reserve_exact(want).map_err(no_memory)?;
        self.buffer.resize(want, 0);
        self.start = offset;
        let read = file.read_exact_at(&mut self.buffer, offset);
        if read.is_err() {
            self.buffer.clear();
        }
        read
    }
}
