//! The decoders of bytes from disk, each as one function, for fuzzing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::blob_pointer::{BlobPointer, BlobReferences};
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{FileNumber, PartitionId, VersionEdit};
use crate::base::{Error, ErrorKind, InternalKey, KeyOrder, Result, coding};
use crate::blob::format::{BlobIndexPageIter, BlobMetaindex, BlobPageHandle};
use crate::blob::reader::BlobFile;
use crate::block::block::Block;
use crate::block::bloom::FilterBlock;
use crate::block::cache::BlockCache;
use crate::block::frame::{BlockContents, BlockHandle, BlockKind, FRAME_HEADER_LEN, open_frame};
use crate::block::iter::BlockIter;
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::inspect::report::verify_table;
use crate::pmem::pool::image_format::Shadow;
use crate::pmem::pool::{ImageStore, PoolCheckLevel, PoolFileKind, pool_recovery};
use crate::pmem::tree::PoolOptions;
use crate::table::reader::TableReader;
use crate::testing::MemFs;
use crate::vfs::open_files::{DataFiles, FileAccess};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::{IngestNote, WalRecordIter};
use crate::{manifest, wal};

/// A decoder of bytes from disk, for fuzzing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FuzzDecoder {
    /// The frames of a WAL segment.
    WalFrame,
    /// A manifest.
    Manifest,
    /// A whole table.
    Table,
    /// A data block with restart points.
    Block,
    /// A data block with a hash index.
    BlockWithHashIndex,
    /// A data block with fingerprints.
    FingerprintBlock,
    /// The frame of a block: header, checksum, compression.
    Frame,
    /// A filter partition.
    FilterPartition,
    /// The header of a file of any kind.
    FileHeader,
    /// A record of the manifest.
    VersionEdits,
    /// The payload of a commit in the WAL.
    Batch,
    /// A whole blob file.
    BlobFile,
    /// The metaindex of a blob file.
    BlobMetaindex,
    /// A page of the index of a blob file.
    BlobIndexPage,
    /// A blob pointer.
    BlobPointer,
    /// The list of blob references of a table.
    BlobReferences,
    /// The image of a pool.
    Pool,
    /// The shadow of a pool checkpoint.
    PoolShadow,
}

/// Decodes `bytes` completely with one decoder.
///
/// # Errors
/// `Corruption` or `Unsupported`.
pub fn decode(decoder: FuzzDecoder, bytes: &[u8]) -> Result<()> {
    match decoder {
        FuzzDecoder::WalFrame => wal::scan_segment_bytes(bytes).map(drop),
        FuzzDecoder::Manifest => ManifestState::replay(&manifest::decode_manifest(bytes)?.edits).map(drop),
        FuzzDecoder::Table => decode_table(bytes),
        FuzzDecoder::Block => decode_block(BlockKind::Data, bytes),
        FuzzDecoder::BlockWithHashIndex => decode_block(BlockKind::DataWithHashIndex, bytes),
        FuzzDecoder::FingerprintBlock => decode_block(BlockKind::FingerprintData, bytes),
        FuzzDecoder::Frame => decode_frame(bytes),
        FuzzDecoder::FilterPartition => {
            FilterBlock::decode(BlockContents::new(BlockKind::FilterPartition, bytes)).map(drop)
        }
        FuzzDecoder::FileHeader => decode_header(bytes),
        FuzzDecoder::VersionEdits => VersionEdit::decode_batch(bytes).map(drop),
        FuzzDecoder::Batch => {
            WalRecordIter::new(bytes).try_for_each(|record| IngestNote::of_record(&record?).map(drop))
        }
        FuzzDecoder::BlobFile => decode_blob_file(bytes),
        FuzzDecoder::BlobMetaindex => decode_blob_metaindex(bytes),
        FuzzDecoder::BlobIndexPage => decode_blob_index_page(bytes),
        FuzzDecoder::BlobPointer => BlobPointer::decode(bytes).map(drop),
        FuzzDecoder::BlobReferences => BlobReferences::decode(bytes).map(drop),
        FuzzDecoder::Pool => decode_pool(bytes),
        FuzzDecoder::PoolShadow => decode_pool_shadow(bytes),
    }
}

/// Decodes a file header of any kind.
fn decode_header(bytes: &[u8]) -> Result<()> {
    let mut error = Error::corruption("bytes are not the header of any kind of file");
    let pools = [FileKind::Pool, FileKind::PoolImage, FileKind::PoolShadow];
    for kind in [FileKind::Table, FileKind::Blob, FileKind::Wal, FileKind::Manifest].into_iter().chain(pools) {
        match FileHeader::decode(kind, bytes) {
            Ok(_) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::Unsupported => error = e,
            Err(_) => {}
        }
    }
    Err(error)
}

/// Decodes the payload of a block, searches the block by key and by hash, and iterates over it in both directions.
fn decode_block(kind: BlockKind, bytes: &[u8]) -> Result<()> {
    let block = Arc::new(Block::decode(BlockContents::new(kind, bytes))?);
    let order = KeyOrder::bytewise();
    let mut iter = BlockIter::new(Arc::clone(&block));
    for (i, user_key) in [&b""[..], b"k", b"key 5", &[255; 9]].into_iter().enumerate() {
        let target = InternalKey::before_versions_of(user_key);
        let _ignored = block.lookup(target, Some(i as u64 * 0x5555_5555), &order);
        let _ignored = (block.lower_bound(target, &order), iter.seek_before(target, &order));
    }
    iter.seek_to_first()?;
    while iter.valid() {
        iter.next()?;
    }
    iter.seek_to_last()?;
    while iter.valid() {
        iter.prev()?;
    }
    Ok(())
}

/// Decodes a frame at offset 0 of a file whose id is zero. The frame itself names its kind.
fn decode_frame(bytes: &[u8]) -> Result<()> {
    let header = bytes.get(..FRAME_HEADER_LEN).ok_or_else(|| Error::corruption("block is shorter than its header"))?;
    let kind = BlockKind::from_byte(header[10]).unwrap_or(BlockKind::Data);
    open_frame(bytes.into(), &[0; 16], 0, kind).map(drop)
}

/// Decodes the metaindex of a blob file. The first four bytes are its offset in the file.
fn decode_blob_metaindex(bytes: &[u8]) -> Result<()> {
    let mut d = coding::ByteReader::new(bytes);
    let offset = u64::from(d.u32()?);
    BlobMetaindex::decode(d.rest(), offset).map(drop)
}

/// Decodes an index page of a blob file. The first four bytes are the end offset of its frames.
fn decode_blob_index_page(bytes: &[u8]) -> Result<()> {
    let mut d = coding::ByteReader::new(bytes);
    let end = u64::from(d.u32()?);
    let page = BlobPageHandle { first_ordinal: 7, offset: FileHeader::LEN as u64, handle: BlockHandle::default() };
    BlobIndexPageIter::new(d.rest(), &page, end).try_for_each(|entry| entry.map(drop))
}

/// Returns the files of an in-memory directory with one file, which contains `bytes`.
fn files_with(bytes: &[u8], path: impl FnOnce(&DataFiles) -> PathBuf) -> Result<DataFiles> {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let dir = PathBuf::from("/fuzz");
    fs.create_dir_all(&dir)?;
    let files = DataFiles::tables(Arc::clone(&fs), &dir, 1, FileAccess::buffered());
    fs.open(&path(&files), OpenMode::Create)?.write_at(bytes, 0)?;
    Ok(files)
}

/// Decodes a whole blob file, in memory.
fn decode_blob_file(bytes: &[u8]) -> Result<()> {
    let files = files_with(bytes, |files| files.blob_files().path(FileNumber(1)))?.blob_files();
    let cache = Arc::new(BlockCache::new(0));
    let meta = BlobFile::read_meta(&files, &cache, FileNumber(1))?;
    BlobFile::new(&files, cache, FileNumber(1), meta.size).verify(&meta).map(drop)
}

/// Returns an in-memory file system with one file, which contains `bytes`.
fn mem_fs_with_file(bytes: &[u8], path: &Path) -> Result<MemFs> {
    let fs = MemFs::new();
    fs.open(path, OpenMode::Create)?.write_at(bytes, 0)?;
    Ok(fs)
}

/// Decodes a pool file, mapped or image, and all pages and records in it.
fn decode_pool(bytes: &[u8]) -> Result<()> {
    // An image contains the id of its partition.
    let partition = bytes.get(72..80).map_or(Ok(0), |field| coding::ByteReader::new(field).u64())?;
    let (partition, dir) = (PartitionId(partition), Path::new("/"));
    let fs: Arc<dyn Fs> = Arc::new(mem_fs_with_file(bytes, &dir.join(PoolFileKind::Pool.name(partition)))?);
    let mut outcome = Ok(());
    for check_level in [PoolCheckLevel::StructureOnly, PoolCheckLevel::Full] {
        let Some(loaded) = ImageStore::open(&fs, dir, partition, 0, false, true, None)?.1 else { return Ok(()) };
        let (order, snapshots) = (KeyOrder::bytewise(), SnapshotList::new(LastVisibleSeqno::default()));
        let readers = snapshots.readers_of(partition);
        outcome = pool_recovery::open_with(loaded.image, order, &PoolOptions::default(), readers, check_level, None)
            .map(drop);
    }
    outcome
}

fn decode_pool_shadow(bytes: &[u8]) -> Result<()> {
    let path = Path::new("/shadow");
    let shadow = Shadow::read(&*mem_fs_with_file(bytes, path)?.open(path, OpenMode::Read)?)?;
    shadow.map(drop).ok_or_else(|| Error::corruption("pool shadow is incomplete"))
}

/// Decodes a whole table, in memory.
fn decode_table(bytes: &[u8]) -> Result<()> {
    let files = files_with(bytes, |files| files.path(FileNumber(1)))?;
    let cache = Arc::new(BlockCache::new(0));
    let meta = TableReader::read_meta(&files, &cache, FileNumber(1))?;
    verify_table(&files, &cache, &meta, &KeyOrder::bytewise(), 0).map(drop)
}
