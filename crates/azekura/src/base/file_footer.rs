//! The end of files that are made of frames: where their directory is. Drawn in `docs/format/table.md`.

use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::ByteReader;
use crate::base::error::{Error, Result};
use crate::base::file_header::{FileHeader, FileKind};

/// The last bytes of a table or a blob file: where the frame of its directory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileFooter {
    pub(crate) kind: FileKind,
    /// Of the directory's frame.
    pub(crate) metaindex_offset: u64,
    pub(crate) metaindex_len: u64,
}

impl FileFooter {
    /// In bytes.
    pub(crate) const LEN: usize = 40;

    /// The footer of a file in which it lies at `at`.
    pub(crate) fn encode(&self, file_id: &[u8; 16], at: u64) -> [u8; FileFooter::LEN] {
        let mut out = [0; FileFooter::LEN];
        out[8..16].copy_from_slice(&self.metaindex_offset.to_le_bytes());
        out[16..24].copy_from_slice(&self.metaindex_len.to_le_bytes());
        out[24..32].copy_from_slice(&(at + FileFooter::LEN as u64).to_le_bytes());
        out[32..].copy_from_slice(&self.kind.footer_magic());
        let sum = xxh3(location_seed(file_id, at), &out[8..]);
        out[..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// # Errors
    /// `Corruption` if it does not verify, or is not that of a file of `kind` and of `size` bytes.
    pub(crate) fn decode(
        kind: FileKind,
        bytes: &[u8; FileFooter::LEN],
        file_id: &[u8; 16],
        size: u64,
    ) -> Result<FileFooter> {
        if bytes[32..] != kind.footer_magic() {
            return Err(Error::corruption(format!("file does not end as a {kind:?} file does")));
        }
        let mut d = ByteReader::new(bytes);
        let (sum, offset, len) = (d.u64()?, d.u64()?, d.u64()?);
        let at = size.checked_sub(FileFooter::LEN as u64).ok_or_else(|| Error::corruption("file is too short"))?;
        if sum != xxh3(location_seed(file_id, at), &bytes[8..]) || d.u64()? != size {
            return Err(Error::corruption("checksum of the footer does not match"));
        }
        if offset < FileHeader::LEN as u64 || offset.checked_add(len) != Some(at) {
            return Err(Error::corruption("directory of the file does not lie before its footer"));
        }
        Ok(FileFooter { kind, metaindex_offset: offset, metaindex_len: len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn footer_is_bound_to_file_offset_and_size() {
        let id = *b"0123456789abcdef";
        let footer = FileFooter { kind: FileKind::Table, metaindex_offset: 900, metaindex_len: 100 };
        let bytes = footer.encode(&id, 1000);
        assert_eq!(FileFooter::decode(FileKind::Table, &bytes, &id, 1040).unwrap(), footer);
        assert!(FileFooter::decode(FileKind::Table, &bytes, &id, 1041).is_err());
        assert!(FileFooter::decode(FileKind::Table, &bytes, &id, 3).is_err());
        assert!(FileFooter::decode(FileKind::Table, &bytes, b"0123456789abcdeg", 1040).is_err());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FileFooter::decode(FileKind::Table, &bad, &id, 1040).unwrap_err().kind(), ErrorKind::Corruption);
        }
        assert!(FileFooter::decode(FileKind::Blob, &bytes, &id, 1040).is_err(), "of another kind");
        for (offset, len) in [(900, 101), (u64::MAX, 9), (10, 990)] {
            let bytes = FileFooter { metaindex_offset: offset, metaindex_len: len, ..footer }.encode(&id, 1000);
            assert!(FileFooter::decode(FileKind::Table, &bytes, &id, 1040).is_err());
        }
    }
}
