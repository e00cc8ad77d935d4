#![doc = include_str!("../../docs/format/table.md")]

use crate::base::checksum::{place_seed, xxh3};
use crate::base::coding::Decoder;
use crate::base::file_header::FileHeader;
use crate::base::{Error, Result};
use crate::block::BlockHandle;

/// In bytes.
pub(crate) const FOOTER_LEN: usize = 40;
/// Values of more bytes have a data block of their own.
pub(crate) const VALUE_ALONE: usize = 32 << 10;
/// Directory and properties: a reader that does not know the tag may skip it.
pub(crate) const IGNORABLE: u8 = 0x80;

const MAGIC: [u8; 8] = *b"AZEKTBE\n";

/// The end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) directory: BlockHandle,
}

impl Footer {
    /// The footer of a file in which it lies at `offset`.
    pub(crate) fn encode(&self, file_id: &[u8; 16], offset: u64) -> [u8; FOOTER_LEN] {
        let mut out = [0; FOOTER_LEN];
        out[8..16].copy_from_slice(&self.directory.offset.to_le_bytes());
        out[16..24].copy_from_slice(&self.directory.len.to_le_bytes());
        out[24..32].copy_from_slice(&(offset + FOOTER_LEN as u64).to_le_bytes());
        out[32..].copy_from_slice(&MAGIC);
        let sum = xxh3(place_seed(file_id, offset), &out[8..]);
        out[..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// # Errors
    /// `Corruption` if it does not verify, or is not that of a file of `size` bytes.
    pub(crate) fn decode(bytes: &[u8; FOOTER_LEN], file_id: &[u8; 16], size: u64) -> Result<Footer> {
        if bytes[32..] != MAGIC {
            return Err(Error::corruption("file does not end as a table does"));
        }
        let mut d = Decoder::new(bytes);
        let (sum, directory) = (d.u64()?, BlockHandle { offset: d.u64()?, len: d.u64()? });
        let offset = size.checked_sub(FOOTER_LEN as u64).ok_or_else(|| Error::corruption("file is too short"))?;
        if sum != xxh3(place_seed(file_id, offset), &bytes[8..]) || d.u64()? != size {
            return Err(Error::corruption("checksum of the footer does not match"));
        }
        if directory.offset < FileHeader::LEN as u64 || directory.end()? != offset {
            return Err(Error::corruption("directory of the table does not lie before its footer"));
        }
        Ok(Footer { directory })
    }
}

/// Where the sections are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Directory {
    pub(crate) properties: BlockHandle,
    pub(crate) index_top: BlockHandle,
    pub(crate) filter_top: Option<BlockHandle>,
    /// Sections of a newer version that need not be known.
    pub(crate) unknown: Vec<BlockHandle>,
}

impl Directory {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let filter_top = self.filter_top.as_ref().map(|handle| (3, handle));
        for (tag, handle) in [(1, &self.properties), (2, &self.index_top)].into_iter().chain(filter_top) {
            out.push(tag);
            handle.encode(&mut out);
        }
        out
    }

    /// # Errors
    /// `Corruption` for bytes that are no directory, `Unsupported` for a section that must be known.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Directory> {
        let mut d = Decoder::new(bytes);
        let (mut known, mut unknown) = ([None; 3], Vec::new());
        while !d.is_empty() {
            let tag = d.u8()?;
            let handle = BlockHandle::read(&mut d)?;
            match tag {
                1..=3 if known[usize::from(tag) - 1].replace(handle).is_some() => {
                    return Err(Error::corruption(format!("directory names section {tag} twice")));
                }
                1..=3 => {}
                _ if tag & IGNORABLE != 0 => unknown.push(handle),
                _ => return Err(Error::unsupported(format!("table section {tag} needs a newer version"))),
            }
        }
        match known {
            [Some(properties), Some(index_top), filter_top] => {
                Ok(Directory { properties, index_top, filter_top, unknown })
            }
            _ => Err(Error::corruption("directory names no properties or no index")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn the_footer_is_bound_to_file_place_and_size() {
        let id = *b"0123456789abcdef";
        let footer = Footer { directory: BlockHandle { offset: 900, len: 100 } };
        let bytes = footer.encode(&id, 1000);
        assert_eq!(Footer::decode(&bytes, &id, 1040).unwrap(), footer);
        assert!(Footer::decode(&bytes, &id, 1041).is_err());
        assert!(Footer::decode(&bytes, &id, 3).is_err());
        assert!(Footer::decode(&bytes, b"0123456789abcdeg", 1040).is_err());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Footer::decode(&bad, &id, 1040).unwrap_err().kind(), ErrorKind::Corruption);
        }
        for directory in [BlockHandle { offset: 900, len: 101 }, BlockHandle { offset: u64::MAX, len: 9 }] {
            assert!(Footer::decode(&Footer { directory }.encode(&id, 1000), &id, 1040).is_err());
        }
    }

    #[test]
    fn the_directory_round_trips_and_knows_what_it_may_skip() {
        let handle = |offset| BlockHandle { offset, len: 9 };
        let mut directory = Directory { properties: handle(1), index_top: handle(2), ..Directory::default() };
        assert_eq!(Directory::decode(&directory.encode()).unwrap(), directory);
        directory.filter_top = Some(handle(3));
        let mut bytes = directory.encode();
        assert_eq!(Directory::decode(&bytes).unwrap(), directory);
        for cut in 0..bytes.len() {
            if let Ok(d) = Directory::decode(&bytes[..cut]) {
                assert_eq!(d.filter_top, None);
            }
        }
        bytes.extend_from_slice(&[0x85, 7, 9]);
        assert_eq!(Directory::decode(&bytes).unwrap().unknown, [handle(7)]);
        bytes.extend_from_slice(&[4, 7, 9]);
        assert_eq!(Directory::decode(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(Directory::decode(&[1, 1, 1, 1, 1, 1]).unwrap_err().kind(), ErrorKind::Corruption);
    }
}
