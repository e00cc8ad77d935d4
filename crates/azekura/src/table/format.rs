#![doc = include_str!("../../docs/format/table.md")]

use crate::base::coding::ByteReader;
use crate::base::{Error, Result};
use crate::block::BlockHandle;

/// Values of more bytes have a data block of their own.
pub(crate) const OWN_BLOCK_VALUE_MIN: usize = 32 << 10;
/// Directory and properties: a reader that does not know the tag may skip it.
pub(crate) const SECTION_IGNORABLE: u8 = 0x80;
/// The section of references to blob files. A reader that does not know it cannot read the entries that need it.
const SECTION_BLOB_REFERENCES: u8 = 0x85;

/// Where the sections are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableMetaindex {
    pub(crate) properties: BlockHandle,
    pub(crate) index_top: BlockHandle,
    pub(crate) filter_top: Option<BlockHandle>,
    /// To values of blob files; a table without pointers has none.
    pub(crate) blob_references: Option<BlockHandle>,
    /// Sections of a newer version that need not be known.
    pub(crate) ignored_sections: Vec<BlockHandle>,
}

impl TableMetaindex {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let filter_top = self.filter_top.as_ref().map(|handle| (3, handle));
        let references = self.blob_references.as_ref().map(|handle| (SECTION_BLOB_REFERENCES, handle));
        let required = [(1, &self.properties), (2, &self.index_top)];
        for (tag, handle) in required.into_iter().chain(filter_top).chain(references) {
            out.push(tag);
            handle.encode(&mut out);
        }
        out
    }

    /// # Errors
    /// `Corruption` for bytes that are no directory, `Unsupported` for a section that must be known.
    pub(crate) fn decode(bytes: &[u8]) -> Result<TableMetaindex> {
        let mut d = ByteReader::new(bytes);
        let (mut known, mut references, mut unknown) = ([None; 3], None, Vec::new());
        while !d.is_empty() {
            let tag = d.u8()?;
            let handle = BlockHandle::read(&mut d)?;
            match tag {
                1..=3 if known[usize::from(tag) - 1].replace(handle).is_some() => {
                    return Err(Error::corruption(format!("directory names section {tag} twice")));
                }
                1..=3 => {}
                SECTION_BLOB_REFERENCES if references.replace(handle).is_some() => {
                    return Err(Error::corruption("directory names the references twice"));
                }
                SECTION_BLOB_REFERENCES => {}
                _ if tag & SECTION_IGNORABLE != 0 => unknown.push(handle),
                _ => return Err(Error::unsupported(format!("table section {tag} needs a newer version"))),
            }
        }
        match known {
            [Some(properties), Some(index_top), filter_top] => Ok(TableMetaindex {
                properties,
                index_top,
                filter_top,
                blob_references: references,
                ignored_sections: unknown,
            }),
            _ => Err(Error::corruption("directory names no properties or no index")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn metaindex_round_trips_and_skips_ignorable() {
        let handle = |offset| BlockHandle { offset, len: 9 };
        let mut directory = TableMetaindex { properties: handle(1), index_top: handle(2), ..TableMetaindex::default() };
        assert_eq!(TableMetaindex::decode(&directory.encode()).unwrap(), directory);
        directory.filter_top = Some(handle(3));
        assert_eq!(TableMetaindex::decode(&directory.encode()).unwrap(), directory);
        directory.blob_references = Some(handle(4));
        let mut bytes = directory.encode();
        assert_eq!(TableMetaindex::decode(&bytes).unwrap(), directory);
        for cut in 0..bytes.len() {
            if let Ok(d) = TableMetaindex::decode(&bytes[..cut]) {
                assert_eq!(d.blob_references, None);
            }
        }
        bytes.extend_from_slice(&[0x86, 7, 9]);
        assert_eq!(TableMetaindex::decode(&bytes).unwrap().ignored_sections, [handle(7)]);
        bytes.extend_from_slice(&[4, 7, 9]);
        assert_eq!(TableMetaindex::decode(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(TableMetaindex::decode(&[1, 1, 1, 1, 1, 1]).unwrap_err().kind(), ErrorKind::Corruption);
    }
}
