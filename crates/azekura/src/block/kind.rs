//! What a block holds, as its frame says.

use crate::base::{Error, Result};

/// The kind byte of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum BlockKind {
    /// Entries of the table, with restart points.
    Data = 1,
    /// A piece of the index: separators and the data blocks they lead to.
    Index = 4,
    /// The top of the index: last separators and their pieces.
    IndexTop = 5,
    /// A piece of the filter.
    Filter = 6,
    /// The top of the filter: bounds and their pieces.
    FilterTop = 7,
    Properties = 8,
    /// What sections the file has and where they are.
    Directory = 9,
}

impl BlockKind {
    /// The kinds that live in the cache, for its statistics.
    pub(crate) const CACHED: [BlockKind; 5] =
        [BlockKind::Data, BlockKind::Index, BlockKind::IndexTop, BlockKind::Filter, BlockKind::FilterTop];

    /// Whether it leads to other blocks, or says that they need not be read.
    pub(crate) fn is_metadata(self) -> bool {
        matches!(self, BlockKind::Index | BlockKind::IndexTop | BlockKind::Filter | BlockKind::FilterTop)
    }

    /// # Errors
    /// `Unsupported` for kinds of block that a newer version may write, `Corruption` for numbers without meaning.
    pub(crate) fn from_byte(byte: u8) -> Result<BlockKind> {
        Ok(match byte {
            1 => BlockKind::Data,
            2 | 3 => return Err(Error::unsupported(format!("data blocks of kind {byte} need a newer version"))),
            4 => BlockKind::Index,
            5 => BlockKind::IndexTop,
            6 => BlockKind::Filter,
            7 => BlockKind::FilterTop,
            8 => BlockKind::Properties,
            9 => BlockKind::Directory,
            _ => return Err(Error::corruption(format!("block kind {byte} does not exist"))),
        })
    }
}
