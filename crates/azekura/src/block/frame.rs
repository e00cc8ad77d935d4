#![doc = include_str!("../../docs/format/block.md")]

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::base::checksum::{location_seed, xxh3, xxh3_concat};
use crate::base::coding::{ByteReader, put_varint};
use crate::base::compression::{Codec, CompressedBytes, CompressionType, decompress};
use crate::base::key::{KEY_LEN_MAX, VALUE_LEN_MAX};
use crate::base::mapped_memory::MappedBytes;
use crate::base::scratch::{KEPT_SCRATCH_MAX, with_scratch};
use crate::base::{Error, Result};
use crate::mem::buffer_pool::Buffer;

/// Length of the header of a frame in bytes.
pub(crate) const FRAME_HEADER_LEN: usize = 16;
/// Maximum length of an uncompressed block in bytes: the largest entry and the fields around it.
pub(crate) const RAW_LEN_MAX: u64 = VALUE_LEN_MAX + KEY_LEN_MAX as u64 + 64;
/// Maximum length in bytes of a block that is compressed. A larger block contains one huge value and is stored
/// uncompressed, because a codec would need as much memory again.
const COMPRESS_LEN_MAX: usize = 256 << 20;
/// The largest number of bytes that one stored byte can decompress to, for LZ4 and zlib.
const LZ4_RATIO_MAX: u64 = 255;
const ZLIB_RATIO_MAX: u64 = 1040;

/// The kind byte of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum BlockKind {
    /// Entries of the table with restart points. A reader requests a data block of any layout by this kind.
    Data = 1,
    /// Entries of the table with restart points, followed by a hash index.
    DataWithHashIndex = 2,
    /// Entries of the table, with offset slots and fingerprints.
    FingerprintData = 3,
    /// An index partition: separators and the handles of their data blocks.
    IndexPartition = 4,
    /// The top-level index: the last separator and the handle of each index partition.
    TopLevelIndex = 5,
    /// A filter partition.
    FilterPartition = 6,
    /// The top-level filter: an upper bound and the handle of each filter partition.
    TopLevelFilter = 7,
    Properties = 8,
    /// Kinds and handles of the sections of the file.
    Metaindex = 9,
    /// A value of a blob file.
    Blob = 10,
    /// A page of the index of a blob file: ordinals and the lengths of their frames.
    BlobIndex = 11,
    /// The blob values that the table's entries refer to.
    BlobReferences = 12,
}

impl BlockKind {
    /// The kinds that the cache contains, for its statistics. Data blocks of every layout are counted as one kind.
    pub(crate) const CACHED: [BlockKind; 7] = [
        BlockKind::Data,
        BlockKind::IndexPartition,
        BlockKind::TopLevelIndex,
        BlockKind::FilterPartition,
        BlockKind::TopLevelFilter,
        BlockKind::Blob,
        BlockKind::BlobIndex,
    ];

    /// Whether the block is part of an index or a filter.
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
    /// `Unsupported` for a byte that is not the number of a kind: the checksum has been verified, so a newer version
    /// wrote it.
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
            _ => return Err(Error::unsupported(format!("block kind {byte} needs a newer version"))),
        })
    }

    /// The kind without the layout: `Data` for a data block of any layout. Handles do not store the layout.
    pub(crate) fn without_layout(self) -> BlockKind {
        match self {
            BlockKind::DataWithHashIndex | BlockKind::FingerprintData => BlockKind::Data,
            kind => kind,
        }
    }
}

/// The bytes of an uncompressed block. If the block was stored uncompressed, they may follow the header of its frame
/// in the same buffer, so that they need not be moved.
#[derive(Debug)]
pub(crate) struct BlockContents {
    bytes: Buffer,
    start: usize,
    kind: BlockKind,
}

impl BlockContents {
    /// A block of that kind that was not read from a frame.
    pub(crate) fn new(kind: BlockKind, bytes: impl Into<Buffer>) -> BlockContents {
        BlockContents { bytes: bytes.into(), start: 0, kind }
    }

    /// The kind of the block, as stored in the frame.
    #[inline]
    pub(crate) fn kind(&self) -> BlockKind {
        self.kind
    }

    /// The buffer, and the start of the block in it.
    pub(crate) fn into_parts(self) -> (Buffer, usize) {
        (self.bytes, self.start)
    }
}

impl Deref for BlockContents {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// Capacity of a buffer for a block of `len` bytes that will be decoded, because decoding appends fences to most
/// blocks, but nothing to values.
fn decode_capacity(kind: BlockKind, len: usize) -> usize {
    match kind {
        BlockKind::Blob => len,
        _ => len.saturating_add(len / 64 + 32),
    }
}

/// Allocates a buffer of `len` bytes of arbitrary content for a block or a frame of `kind`, which the caller
/// overwrites. `allocate` returns an empty buffer of a capacity in bytes, which includes the bytes that decoding
/// appends.
///
/// # Errors
/// `Corruption` if there is no memory for that length, `Unsupported` if this machine cannot address it.
pub(crate) fn allocate_block(
    kind: BlockKind,
    len: u64,
    allocate: impl FnOnce(usize) -> Option<Buffer>,
) -> Result<Buffer> {
    let len = usize::try_from(len).map_err(|_| Error::unsupported("block is larger than this machine's memory"))?;
    let buffer = allocate(decode_capacity(kind, len));
    let mut buffer = buffer.ok_or_else(|| Error::corruption("no memory for a block of its declared length"))?;
    buffer.extend_for_overwrite(len);
    Ok(buffer)
}

/// Appends the frame of a block. The frame will be stored at `offset` of the file.
pub(crate) fn put_frame(
    out: &mut Vec<u8>,
    file_id: &[u8; 16],
    offset: u64,
    kind: BlockKind,
    compression: CompressionType,
    raw: &[u8],
) -> BlockHandle {
    CompressedBlock::new(kind, compression, raw).frame().append_copy(out, file_id, offset)
}

/// A block after compression, whose offset in the file is not known yet.
pub(crate) struct CompressedBlock<'a> {
    kind: BlockKind,
    raw: &'a [u8],
    compressed: Option<(Codec, CompressedBytes)>,
}

impl<'a> CompressedBlock<'a> {
    pub(crate) fn new(kind: BlockKind, compression: CompressionType, raw: &'a [u8]) -> CompressedBlock<'a> {
        assert!(raw.len() as u64 <= RAW_LEN_MAX, "a block holds at most one huge value");
        let compressed = if raw.len() <= COMPRESS_LEN_MAX { compression.compress(raw) } else { None };
        CompressedBlock { kind, raw, compressed }
    }

    pub(crate) fn frame(&self) -> BlockFrame<'_> {
        let (codec, stored) = match &self.compressed {
            Some((codec, bytes)) => (*codec, &**bytes),
            None => (Codec::None, self.raw),
        };
        BlockFrame { kind: self.kind, codec, raw_len: self.raw.len(), stored }
    }
}

/// Checks the frame that was stored at `offset` and decompresses its block. The block must be of `kind`; a data block
/// may have any layout.
///
/// # Errors
/// `Corruption` if the checksum does not match or the block is of another kind, `Unsupported` if a newer version
/// wrote it.
pub(crate) fn open_frame(bytes: Buffer, file_id: &[u8; 16], offset: u64, kind: BlockKind) -> Result<BlockContents> {
    let frame = BlockFrame::check(&bytes, file_id, offset, kind)?;
    let found = frame.kind;
    match frame.codec {
        Codec::None => Ok(BlockContents { bytes, start: FRAME_HEADER_LEN, kind: found }),
        _ => frame.decode(|capacity| bytes.new_from_same_pool(capacity)),
    }
}

/// Reads the frame at `handle` and opens it as [`open_frame`] does. `read` fills a buffer with its bytes. A frame that
/// is probably compressed is read into a buffer that the thread keeps, and decoded into one from `allocate`. Another is
/// read into a buffer from `allocate`, and its block stays there.
///
/// # Errors
/// As for [`open_frame`] and [`allocate_block`], and the errors of `read`.
pub(crate) fn read_frame(
    handle: BlockHandle,
    kind: BlockKind,
    file_id: &[u8; 16],
    is_compressed: bool,
    allocate: impl FnOnce(usize) -> Option<Buffer>,
    read: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<BlockContents> {
    if is_compressed && handle.len <= KEPT_SCRATCH_MAX as u64 {
        return with_scratch(handle.len as usize, |bytes| {
            read(bytes)?;
            BlockFrame::check(bytes, file_id, handle.offset, kind)?.decode(allocate)
        });
    }
    let mut bytes = allocate_block(kind, handle.len, allocate)?;
    read(&mut bytes)?;
    open_frame(bytes, file_id, handle.offset, kind)
}

/// Opens the frame at `handle` of a mapped file, as [`open_frame`] does. An uncompressed data block or value stays in
/// the file. Another block is decoded into a buffer from `allocate`.
///
/// # Errors
/// As for [`open_frame`]; `Corruption` if the frame ends past the end of the file.
pub(crate) fn open_mapped_frame(
    file: &Arc<MappedBytes>,
    handle: BlockHandle,
    kind: BlockKind,
    file_id: &[u8; 16],
    allocate: impl FnOnce(usize) -> Option<Buffer>,
) -> Result<BlockContents> {
    let range = handle.range_in(file.bytes())?;
    let frame = BlockFrame::check(&file.bytes()[range.clone()], file_id, handle.offset, kind)?;
    match (frame.codec, kind) {
        (Codec::None, BlockKind::Data | BlockKind::Blob) => {
            Ok(BlockContents { bytes: Buffer::mapped(file, range), start: FRAME_HEADER_LEN, kind: frame.kind })
        }
        _ => frame.decode(allocate),
    }
}

/// A frame with a valid checksum and plausible lengths. Borrows the bytes of the frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockFrame<'a> {
    pub(crate) kind: BlockKind,
    pub(crate) codec: Codec,
    /// Length of the uncompressed block in bytes.
    pub(crate) raw_len: usize,
    /// The block as stored.
    pub(crate) stored: &'a [u8],
}

impl<'a> BlockFrame<'a> {
    /// Does the checks of [`open_frame`] without decompressing the block.
    ///
    /// # Errors
    /// As for [`open_frame`].
    pub(crate) fn check(bytes: &'a [u8], file_id: &[u8; 16], offset: u64, kind: BlockKind) -> Result<BlockFrame<'a>> {
        let Some((header, stored)) = bytes.split_first_chunk::<FRAME_HEADER_LEN>() else {
            return Err(Error::corruption("block is shorter than its header"));
        };
        let sum = u64::from_le_bytes(header[..8].try_into().expect("eight bytes"));
        if sum != xxh3(location_seed(file_id, offset), &bytes[8..]) {
            return Err(Error::corruption("checksum of the block does not match"));
        }
        let codec = Codec::from_byte(header[8])?;
        if header[9] != 0 {
            return Err(Error::unsupported(format!("transform {} needs a newer version", header[9])));
        }
        let found = BlockKind::from_byte(header[10])?;
        if found.without_layout() != kind.without_layout() {
            return Err(Error::corruption(format!("block has kind {found:?} instead of {kind:?}")));
        }
        let mut wide = [0u8; 8];
        wide[..5].copy_from_slice(&header[11..]);
        let raw_len = u64::from_le_bytes(wide);
        let stored_len = stored.len() as u64;
        let plausible = match codec {
            Codec::None => raw_len == stored_len,
            Codec::Lz4 => raw_len <= stored_len * LZ4_RATIO_MAX,
            Codec::Zlib => raw_len <= stored_len * ZLIB_RATIO_MAX,
        };
        let raw_len = usize::try_from(raw_len).ok().filter(|_| plausible && raw_len <= RAW_LEN_MAX);
        let raw_len = raw_len.ok_or_else(|| Error::corruption("block declares an impossible length"))?;
        Ok(BlockFrame { kind: found, codec, raw_len, stored })
    }

    /// Decompresses or copies the block into a buffer that `allocate` returns for a capacity in bytes.
    ///
    /// # Errors
    /// `Corruption` if the block does not decompress to its declared length, or if there is no memory for that length.
    pub(crate) fn decode(&self, allocate: impl FnOnce(usize) -> Option<Buffer>) -> Result<BlockContents> {
        let mut raw = allocate_block(self.kind, self.raw_len as u64, allocate)?;
        decompress(self.codec, self.stored, &mut raw)?;
        Ok(BlockContents::new(self.kind, raw))
    }

    /// Length of the frame with its header in bytes.
    pub(crate) fn len(&self) -> u64 {
        (FRAME_HEADER_LEN + self.stored.len()) as u64
    }

    /// Appends a frame with the same stored bytes. The frame will be stored at `offset` of another file.
    pub(crate) fn append_copy(&self, out: &mut Vec<u8>, file_id: &[u8; 16], offset: u64) -> BlockHandle {
        let start = out.len();
        out.reserve(FRAME_HEADER_LEN + self.stored.len());
        out.extend_from_slice(&self.unsummed_header());
        out.extend_from_slice(self.stored);
        let sum = xxh3(location_seed(file_id, offset), &out[start + 8..]);
        out[start..start + 8].copy_from_slice(&sum.to_le_bytes());
        debug_assert_eq!((out.len() - start) as u64, self.len(), "a frame is its header and its stored bytes");
        BlockHandle { offset, len: self.len() }
    }

    /// The header of a frame. The caller writes the stored bytes after it without a copy.
    pub(crate) fn header(&self, file_id: &[u8; 16], offset: u64) -> [u8; FRAME_HEADER_LEN] {
        let mut header = self.unsummed_header();
        let sum = xxh3_concat(location_seed(file_id, offset), &header[8..], self.stored);
        header[..8].copy_from_slice(&sum.to_le_bytes());
        header
    }

    fn unsummed_header(&self) -> [u8; FRAME_HEADER_LEN] {
        debug_assert!(self.raw_len as u64 <= RAW_LEN_MAX, "a reader accepts the length of the block");
        debug_assert!(self.codec != Codec::None || self.raw_len == self.stored.len(), "the block is stored as it is");
        let mut header = [0; FRAME_HEADER_LEN];
        (header[8], header[10]) = (self.codec as u8, self.kind as u8);
        header[11..].copy_from_slice(&(self.raw_len as u64).to_le_bytes()[..5]);
        header
    }
}

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

    /// The range of the frame in the bytes of its file.
    ///
    /// # Errors
    /// `Corruption` if the frame ends past the end of the file.
    pub(crate) fn range_in(&self, file: &[u8]) -> Result<Range<usize>> {
        match self.end()? {
            end if end <= file.len() as u64 => Ok(self.offset as usize..end as usize),
            _ => Err(Error::corruption("block ends past the end of the file")),
        }
    }

    /// End offset of the frame.
    ///
    /// # Errors
    /// `Corruption` if the end does not fit into 64 bits.
    pub(crate) fn end(&self) -> Result<u64> {
        self.offset.checked_add(self.len).ok_or_else(|| Error::corruption("block end exceeds 64 bits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    const ID: [u8; 16] = *b"a random file id";

    fn framed(compression: CompressionType, raw: &[u8]) -> Vec<u8> {
        let mut out = vec![1, 2, 3];
        let handle = put_frame(&mut out, &ID, 99, BlockKind::Data, compression, raw);
        assert_eq!((handle.offset, handle.len), (99, out.len() as u64 - 3));
        out.split_off(3)
    }

    #[test]
    fn round_trips_with_every_codec_and_length() {
        for compression in [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(6)] {
            for len in [0usize, 1, 7, 300, 5000] {
                let raw: Vec<u8> = (0..len).map(|i| (i / 9) as u8).collect();
                let frame = framed(compression, &raw);
                let checked = BlockFrame::check(&frame, &ID, 99, BlockKind::Data).unwrap();
                assert_eq!(&*checked.decode(|len| Some(Buffer::with_capacity(len))).unwrap(), &raw);
                assert!(checked.decode(|_| None).is_err());
                assert_eq!(&*open_frame(frame.into(), &ID, 99, BlockKind::Data).unwrap(), &raw);
            }
        }
    }

    /// Only an uncompressed block that was not expected to be compressed stays where it was read.
    #[test]
    fn frame_is_read_in_place_or_decoded() {
        let raw = [9; 6400];
        for (kind, raw_capacity, more) in [(BlockKind::Data, 6532, 132), (BlockKind::Blob, 6400, 0)] {
            for (compression, is_compressed) in
                [CompressionType::None, CompressionType::Lz4].into_iter().flat_map(|c| [(c, false), (c, true)])
            {
                let mut frame = Vec::new();
                let handle = put_frame(&mut frame, &ID, 99, kind, compression, &raw);
                let in_place = compression == CompressionType::None && !is_compressed;
                let allocated = std::cell::Cell::new(0);
                let allocate = |capacity| {
                    allocated.set(capacity);
                    Some(Buffer::with_capacity(capacity))
                };
                let read = |bytes: &mut [u8]| {
                    bytes.copy_from_slice(&frame);
                    Ok(())
                };
                let contents = read_frame(handle, kind, &ID, is_compressed, allocate, read).unwrap();
                assert_eq!((&*contents, contents.kind()), (&raw[..], kind));
                assert_eq!(contents.into_parts().1, if in_place { FRAME_HEADER_LEN } else { 0 });
                if in_place {
                    assert_eq!(allocated.get(), frame.len() + more, "the frame, and what decoding appends");
                } else if is_compressed {
                    assert_eq!(allocated.get(), raw_capacity, "only the decoded block takes memory");
                }
                let no_memory = read_frame(handle, kind, &ID, is_compressed, |_| None, read);
                assert_eq!(no_memory.unwrap_err().kind(), ErrorKind::Corruption);
                let unread = read_frame(
                    handle,
                    kind,
                    &ID,
                    is_compressed,
                    |_| Some(Buffer::with_capacity(9)),
                    |_| Err(Error::invalid("the file cannot be read")),
                );
                assert_eq!(unread.unwrap_err().kind(), ErrorKind::Invalid);
            }
        }
    }

    #[test]
    fn separate_header_matches_whole_frame() {
        for (compression, len) in
            [(CompressionType::None, 0), (CompressionType::Lz4, 9_000), (CompressionType::None, 77)]
        {
            let raw = vec![7; len];
            let packed = CompressedBlock::new(BlockKind::Blob, compression, &raw);
            let (frame, mut whole) = (packed.frame(), Vec::new());
            let handle = frame.append_copy(&mut whole, &ID, 4_711);
            assert_eq!(whole, [&frame.header(&ID, 4_711)[..], frame.stored].concat());
            assert_eq!((handle.len, frame.len()), (whole.len() as u64, whole.len() as u64));
        }
    }

    #[test]
    fn damage_moves_and_wrong_kinds_are_detected() {
        let raw = vec![5u8; 400];
        for compression in [CompressionType::None, CompressionType::Lz4] {
            let frame = framed(compression, &raw);
            for bit in 0..frame.len() * 8 {
                let mut bad = frame.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(open_frame(bad.into(), &ID, 99, BlockKind::Data).unwrap_err().kind(), ErrorKind::Corruption);
            }
            for cut in 0..frame.len() {
                assert!(open_frame(frame[..cut].into(), &ID, 99, BlockKind::Data).is_err());
            }
            assert!(open_frame(frame.clone().into(), &ID, 100, BlockKind::Data).is_err(), "moved");
            assert!(open_frame(frame.clone().into(), &[8; 16], 99, BlockKind::Data).is_err(), "from another file");
            assert!(open_frame(frame.into(), &ID, 99, BlockKind::IndexPartition).is_err(), "of another kind");
        }
    }

    /// A frame with a valid checksum around any header and any stored bytes.
    fn forged(header: [u8; 8], stored: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 8];
        frame.extend_from_slice(&header);
        frame.extend_from_slice(stored);
        let sum = xxh3(location_seed(&ID, 0), &frame[8..]);
        frame[..8].copy_from_slice(&sum.to_le_bytes());
        frame
    }

    #[test]
    fn false_lengths_fail_before_allocation() {
        let kind_of = |header, stored: &[u8]| {
            open_frame(forged(header, stored).into(), &ID, 0, BlockKind::Data).map(|b| b.len()).map_err(|e| e.kind())
        };
        assert_eq!(kind_of([0, 0, 1, 3, 0, 0, 0, 0], b"abc"), Ok(3));
        assert_eq!(kind_of([0, 0, 1, 4, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Corruption));
        for codec in [1, 2] {
            assert_eq!(kind_of([codec, 0, 1, 255, 255, 255, 255, 255], b"abc"), Err(ErrorKind::Corruption));
            assert_eq!(kind_of([codec, 0, 1, 255, 255, 255, 255, 0], &[0; 64]), Err(ErrorKind::Corruption));
        }
        assert_eq!(kind_of([9, 0, 1, 3, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Unsupported));
        assert_eq!(kind_of([0, 1, 1, 3, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Unsupported));
        assert_eq!(kind_of([0, 0, 3, 3, 0, 0, 0, 0], b"abc"), Ok(3), "a data block of another layout");
        assert_eq!(kind_of([0, 0, 4, 3, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Corruption));
        assert_eq!(kind_of([0, 0, 10, 3, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Corruption));
        assert_eq!(kind_of([0, 0, 77, 3, 0, 0, 0, 0], b"abc"), Err(ErrorKind::Unsupported));
    }
}
