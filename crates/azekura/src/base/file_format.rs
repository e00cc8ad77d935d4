#![doc = include_str!("../../docs/format/file_header.md")]

use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::ByteReader;
use crate::base::error::{Error, Result};

/// The kinds of file that have a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum FileKind {
    Table,
    Blob,
    Wal,
    Manifest,
    Pool,
    PoolImage,
    PoolShadow,
}

impl FileKind {
    /// The first bytes of a file of this kind.
    pub(crate) fn magic(self) -> [u8; 8] {
        *match self {
            FileKind::Table => b"AZEKTBL\n",
            FileKind::Blob => b"AZEKBLB\n",
            FileKind::Wal => b"AZEKWAL\n",
            FileKind::Manifest => b"AZEKMAN\n",
            FileKind::Pool => b"AZEKPMP\n",
            FileKind::PoolImage => b"AZEKPMI\n",
            FileKind::PoolShadow => b"AZEKPMS\n",
        }
    }

    /// The last bytes of a file of a kind that ends with a footer. Those of a table are `AZEKTBE\n`.
    pub(crate) fn footer_magic(self) -> [u8; 8] {
        let mut magic = self.magic();
        magic[6] = b'E';
        magic
    }

    /// The format version that this build writes, and the newest one that it reads.
    fn version(self) -> u16 {
        1
    }
}

/// The header: the first 64 bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    pub(crate) kind: FileKind,
    /// Random bytes. Every checksum in the file is bound to them.
    pub(crate) file_id: [u8; 16],
}

impl FileHeader {
    /// Length in bytes.
    pub(crate) const LEN: usize = 64;

    pub(crate) fn encode(&self) -> [u8; FileHeader::LEN] {
        let mut out = [0u8; FileHeader::LEN];
        out[..8].copy_from_slice(&self.kind.magic());
        out[8..10].copy_from_slice(&self.kind.version().to_le_bytes());
        out[10..12].copy_from_slice(&(FileHeader::LEN as u16).to_le_bytes());
        out[24..40].copy_from_slice(&self.file_id);
        let sum = xxh3(0, &out[..56]);
        out[56..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes the header of a file of `kind`.
    ///
    /// # Errors
    /// `Corruption` if it is not a valid header of that kind; `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(kind: FileKind, bytes: &[u8]) -> Result<FileHeader> {
        let Some(bytes) = bytes.get(..FileHeader::LEN) else {
            return Err(Error::corruption("file is shorter than its header").at_offset(0));
        };
        if bytes[..8] != kind.magic() {
            return Err(
                Error::corruption(format!("file does not start with the magic number of a {kind:?} file")).at_offset(0)
            );
        }
        let mut d = ByteReader::new(&bytes[8..]);
        let (version, len) = (d.u16()?, d.u16()?);
        let (_compatible, _read_only, incompatible) = (d.u32()?, d.u32()?, d.u32()?);
        let (file_id, encryption, sum) = (d.bytes16()?, d.bytes16()?, d.u64()?);
        if sum != xxh3(0, &bytes[..56]) {
            return Err(Error::corruption("checksum of the file header does not match").at_offset(0));
        }
        if version > kind.version() || usize::from(len) != FileHeader::LEN {
            let mine = kind.version();
            return Err(Error::unsupported(format!(
                "file has format version {version}, this build reads up to {mine}: open it with a newer azekura"
            )));
        }
        if incompatible != 0 {
            return Err(Error::unsupported(format!("file uses features {incompatible:#x} of a newer azekura")));
        }
        if encryption != [0; 16] {
            return Err(Error::unsupported("file is encrypted; this build has no encryption"));
        }
        Ok(FileHeader { kind, file_id })
    }
}

/// The footer: the last bytes of a table or a blob file, which locate the frame of its metaindex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileFooter {
    pub(crate) kind: FileKind,
    /// Offset of the metaindex frame in bytes.
    pub(crate) metaindex_offset: u64,
    pub(crate) metaindex_len: u64,
}

impl FileFooter {
    /// Length in bytes.
    pub(crate) const LEN: usize = 40;

    /// Creates the footer of a file in which it is at the offset `at`.
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
    /// `Corruption` if it does not verify, or is not the footer of a file of `kind` with `size` bytes.
    pub(crate) fn decode(
        kind: FileKind,
        bytes: &[u8; FileFooter::LEN],
        file_id: &[u8; 16],
        size: u64,
    ) -> Result<FileFooter> {
        if bytes[32..] != kind.footer_magic() {
            return Err(Error::corruption(format!("file does not end with the magic number of a {kind:?} file")));
        }
        let mut d = ByteReader::new(bytes);
        let (sum, offset, len) = (d.u64()?, d.u64()?, d.u64()?);
        let at = size.checked_sub(FileFooter::LEN as u64).ok_or_else(|| Error::corruption("file is too short"))?;
        if sum != xxh3(location_seed(file_id, at), &bytes[8..]) || d.u64()? != size {
            return Err(Error::corruption("checksum of the footer does not match"));
        }
        if offset < FileHeader::LEN as u64 || offset.checked_add(len) != Some(at) {
            return Err(Error::corruption("metaindex of the file is not before its footer"));
        }
        Ok(FileFooter { kind, metaindex_offset: offset, metaindex_len: len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn every_flipped_bit_is_detected() {
        let header = FileHeader { kind: FileKind::Table, file_id: [9; 16] };
        let good = header.encode();
        assert_eq!(FileHeader::decode(FileKind::Table, &good).unwrap(), header);
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = FileHeader::decode(FileKind::Table, &bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corruption);
        }
        for len in 0..good.len() {
            assert!(FileHeader::decode(FileKind::Table, &good[..len]).is_err());
        }
        assert!(FileHeader::decode(FileKind::Wal, &good).is_err());
    }

    #[test]
    fn a_newer_version_is_unsupported() {
        for (at, what) in [(8, "version"), (20, "feature"), (40, "encryption")] {
            let mut bytes = FileHeader { kind: FileKind::Wal, file_id: [1; 16] }.encode();
            bytes[at] += 7;
            let sum = xxh3(0, &bytes[..56]);
            bytes[56..].copy_from_slice(&sum.to_le_bytes());
            assert_eq!(FileHeader::decode(FileKind::Wal, &bytes).unwrap_err().kind(), ErrorKind::Unsupported, "{what}");
        }
    }

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
