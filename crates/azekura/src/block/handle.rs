//! Where a frame lies in its file.

use crate::base::coding::{ByteReader, put_varint};
use crate::base::{Error, Result};

/// Offset and length of a frame, header included, in bytes.
///
/// The length is wider than 32 bits because a value of 4 GiB − 1 has a block of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockHandle {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl BlockHandle {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.offset);
        put_varint(out, self.len);
    }

    pub(crate) fn read(d: &mut ByteReader<'_>) -> Result<BlockHandle> {
        Ok(BlockHandle { offset: d.varint()?, len: d.varint()? })
    }

    /// Reads a handle that is all of `bytes`.
    #[inline]
    pub(crate) fn decode(bytes: &[u8]) -> Result<BlockHandle> {
        let mut d = ByteReader::new(bytes);
        let handle = BlockHandle::read(&mut d)?;
        d.finish()?;
        Ok(handle)
    }

    /// The offset behind the frame.
    ///
    /// # Errors
    /// `Corruption` if that does not fit 64 bits.
    pub(crate) fn end(&self) -> Result<u64> {
        self.offset.checked_add(self.len).ok_or_else(|| Error::corruption("block reaches past the end of all files"))
    }
}
