//! What a block holds, as its frame says.

use crate::base::{Error, Result};

/// The kind byte of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum BlockKind {
    /// Entries of the table, with restart points. A reader requests a data block of any layout by this kind.
    Data = 1,
    /// The same with a hash index behind the restart points.
    DataWithHashIndex = 2,
    /// Entries of the table, with offset slots and fingerprints.
    FingerprintData = 3,
    /// A piece of the index: separators and the data blocks they lead to.
    IndexPartition = 4,
    /// The top of the index: last separators and their pieces.
    TopLevelIndex = 5,
    /// A piece of the filter.
    FilterPartition = 6,
    /// The top of the filter: bounds and their pieces.
    TopLevelFilter = 7,
    Properties = 8,
    /// What sections the file has and where they are.
    Metaindex = 9,
    /// A value of a blob file.
    Blob = 10,
    /// A page of the index of a blob file: ordinals and the frames they lead to.
    BlobIndex = 11,
    /// Which values of blob files a table's entries point to.
    BlobReferences = 12,
}

impl BlockKind {
    /// The kinds that live in the cache, for its statistics; data blocks of every layout are counted as one.
    pub(crate) const CACHED: [BlockKind; 7] = [
        BlockKind::Data,
        BlockKind::IndexPartition,
        BlockKind::TopLevelIndex,
        BlockKind::FilterPartition,
        BlockKind::TopLevelFilter,
        BlockKind::Blob,
        BlockKind::BlobIndex,
    ];

    /// Whether it leads to other blocks, or says that they need not be read.
    pub(crate) fn is_metadata(self) -> bool {
        matches!(
            self,
            BlockKind::IndexPartition
                | BlockKind::TopLevelIndex
                | BlockKind::FilterPartition
                | BlockKind::TopLevelFilter
        )
    }

    /// # Errors
    /// `Corruption` for numbers without meaning.
    pub(crate) fn from_byte(byte: u8) -> Result<BlockKind> {
        Ok(match byte {
            1 => BlockKind::Data,
            2 => BlockKind::DataWithHashIndex,
            3 => BlockKind::FingerprintData,
            4 => BlockKind::IndexPartition,
            5 => BlockKind::TopLevelIndex,
            6 => BlockKind::FilterPartition,
            7 => BlockKind::TopLevelFilter,
            8 => BlockKind::Properties,
            9 => BlockKind::Metaindex,
            10 => BlockKind::Blob,
            11 => BlockKind::BlobIndex,
            12 => BlockKind::BlobReferences,
            _ => return Err(Error::corruption(format!("block kind {byte} does not exist"))),
        })
    }

    /// The kind that a handle's place in the file tells: every layout of a data block is `Data`.
    pub(crate) fn without_layout(self) -> BlockKind {
        match self {
            BlockKind::DataWithHashIndex | BlockKind::FingerprintData => BlockKind::Data,
            kind => kind,
        }
    }
}
