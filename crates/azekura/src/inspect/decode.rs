//! The decoders that meet bytes from disk, each by itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::blob_ref::{BlobRef, References};
use crate::base::coding;
use crate::base::edit::{Edit, FileId, PartitionId};
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::ledger::Ledger;
use crate::base::{Error, ErrorKind, KeyOrder, KeyRef, Result};
use crate::blob::format::{Directory, Page, PageWalk};
use crate::blob::reader::BlobFile;
use crate::block::block::Block;
use crate::block::bloom::FilterBlock;
use crate::block::cache::BlockCache;
use crate::block::cursor::BlockCursor;
use crate::block::frame::{Body, FRAME_HEADER_LEN, open_frame};
use crate::block::handle::BlockHandle;
use crate::block::kind::BlockKind;
use crate::engine::{ReadPoints, Visible};
use crate::inspect::report::verify_table;
use crate::manifest;
use crate::pmem::recover::{self, Trust};
use crate::pmem::store::shadow::Shadow;
use crate::pmem::store::{ImageStore, PoolFile};
use crate::pmem::tree::PoolOptions;
use crate::table::reader::Table;
use crate::vfs::files::{DataFiles, DirectPolicy};
use crate::vfs::mem::MemFs;
use crate::vfs::{Fs, OpenMode};
use crate::wal;
use crate::wal::payload::Records;

/// The decoders that meet bytes from disk, for fuzzing.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoder {
    WalFrame,
    Manifest,
    Table,
    Block,
    HashedBlock,
    SlottedBlock,
    Frame,
    FilterPiece,
    FileHeader,
    Edits,
    Batch,
    BlobFile,
    BlobDirectory,
    BlobPage,
    BlobPointer,
    BlobReferences,
    Pool,
    PoolShadow,
}

/// Reads bytes with one decoder, all that it would read of them.
///
/// # Errors
/// `Corruption` or `Unsupported`.
#[doc(hidden)]
pub fn decode(decoder: Decoder, bytes: &[u8]) -> Result<()> {
    match decoder {
        Decoder::WalFrame => wal::scan_bytes(bytes).map(drop),
        Decoder::Manifest => Ledger::replay(&manifest::decode(bytes)?.edits).map(drop),
        Decoder::Table => decode_table(bytes),
        Decoder::Block => decode_block(BlockKind::Data, bytes),
        Decoder::HashedBlock => decode_block(BlockKind::HashedData, bytes),
        Decoder::SlottedBlock => decode_block(BlockKind::SlottedData, bytes),
        Decoder::Frame => decode_frame(bytes),
        Decoder::FilterPiece => FilterBlock::decode(Body::new(BlockKind::Filter, bytes)).map(drop),
        Decoder::FileHeader => decode_header(bytes),
        Decoder::Edits => Edit::decode_batch(bytes).map(drop),
        Decoder::Batch => Records::new(bytes).try_for_each(|record| record.map(drop)),
        Decoder::BlobFile => decode_blob_file(bytes),
        Decoder::BlobDirectory => decode_blob_directory(bytes),
        Decoder::BlobPage => decode_blob_page(bytes),
        Decoder::BlobPointer => BlobRef::decode(bytes).map(drop),
        Decoder::BlobReferences => References::decode(bytes).map(drop),
        Decoder::Pool => decode_pool(bytes),
        Decoder::PoolShadow => decode_pool_shadow(bytes),
    }
}

/// A header of whichever kind.
fn decode_header(bytes: &[u8]) -> Result<()> {
    let mut error = Error::corruption("no kind of file begins so");
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

/// A block behind its frame, looked into by key and by hash, and walked in both directions.
fn decode_block(kind: BlockKind, bytes: &[u8]) -> Result<()> {
    let block = Arc::new(Block::decode(Body::new(kind, bytes))?);
    let order = KeyOrder::bytewise();
    let mut cursor = BlockCursor::new(Arc::clone(&block));
    for (i, user) in [&b""[..], b"k", b"key 5", &[255; 9]].into_iter().enumerate() {
        let target = KeyRef::first_of(user);
        let _only_harmless = block.find(target, Some(i as u64 * 0x5555_5555), &order);
        let _only_harmless = (block.locate(target, &order), cursor.seek_before(target, &order));
    }
    cursor.seek_to_first()?;
    while cursor.valid() {
        cursor.next()?;
    }
    cursor.seek_to_last()?;
    while cursor.valid() {
        cursor.prev()?;
    }
    Ok(())
}

/// A frame at the beginning of a file without an id, of whichever kind it says it is.
fn decode_frame(bytes: &[u8]) -> Result<()> {
    let header = bytes.get(..FRAME_HEADER_LEN).ok_or_else(|| Error::corruption("block is shorter than its header"))?;
    let kind = BlockKind::from_byte(header[10]).unwrap_or(BlockKind::Data);
    open_frame(bytes.into(), &[0; 16], 0, kind).map(drop)
}

/// The directory of a blob file, which ends where its first four bytes say.
fn decode_blob_directory(bytes: &[u8]) -> Result<()> {
    let mut d = coding::Decoder::new(bytes);
    let offset = u64::from(d.u32()?);
    Directory::decode(d.rest(), offset).map(drop)
}

/// A page of the index of a blob file, whose frames end where its first four bytes say.
fn decode_blob_page(bytes: &[u8]) -> Result<()> {
    let mut d = coding::Decoder::new(bytes);
    let end = u64::from(d.u32()?);
    let page = Page { first: 7, offset: FileHeader::LEN as u64, handle: BlockHandle::default() };
    let mut walk = PageWalk::new(d.rest(), &page, end);
    while walk.next()?.is_some() {}
    Ok(())
}

/// A directory in memory with one file of that name.
fn directory_of(bytes: &[u8], path: impl FnOnce(&DataFiles) -> PathBuf) -> Result<DataFiles> {
    let fs: Arc<dyn Fs> = Arc::new(crate::vfs::mem::MemFs::new());
    let dir = PathBuf::from("/fuzz");
    fs.create_dir_all(&dir)?;
    let files = DataFiles::tables(Arc::clone(&fs), &dir, 1, DirectPolicy::never());
    fs.open(&path(&files), OpenMode::Create)?.write_at(bytes, 0)?;
    Ok(files)
}

/// A whole blob file, from memory.
fn decode_blob_file(bytes: &[u8]) -> Result<()> {
    let files = directory_of(bytes, |files| files.blobs().path(FileId(1)))?.blobs();
    let cache = Arc::new(BlockCache::new(0));
    let meta = BlobFile::describe(&files, &cache, FileId(1))?;
    BlobFile::new(files, cache, FileId(1), meta.size).verify(&meta).map(drop)
}

/// A file system in memory with one file of these bytes.
fn file_of(bytes: &[u8], path: &Path) -> Result<MemFs> {
    let fs = MemFs::new();
    fs.open(path, OpenMode::Create)?.write_at(bytes, 0)?;
    Ok(fs)
}

/// The file of a pool, as memory or as an image, and all that stands in it.
fn decode_pool(bytes: &[u8]) -> Result<()> {
    // An image says whose it is.
    let partition = bytes.get(72..80).map_or(Ok(0), |field| coding::Decoder::new(field).u64())?;
    let (partition, dir) = (PartitionId(partition), Path::new("/"));
    let fs: Arc<dyn Fs> = Arc::new(file_of(bytes, &dir.join(PoolFile::Pool.name(partition)))?);
    let mut outcome = Ok(());
    for trust in [Trust::Bytes, Trust::Nothing] {
        let Some(loaded) = ImageStore::open(&fs, dir, partition, 0, false, true, None)?.1 else { return Ok(()) };
        let (order, points) = (KeyOrder::bytewise(), ReadPoints::new(Visible::default()));
        outcome = recover::open_with(loaded.image, order, &PoolOptions::default(), points, trust, None).map(drop);
    }
    outcome
}

fn decode_pool_shadow(bytes: &[u8]) -> Result<()> {
    let path = Path::new("/shadow");
    let shadow = Shadow::read(&*file_of(bytes, path)?.open(path, OpenMode::Read)?)?;
    shadow.map(drop).ok_or_else(|| Error::corruption("there is no whole shadow"))
}

/// A whole table, from memory.
fn decode_table(bytes: &[u8]) -> Result<()> {
    let files = Arc::new(directory_of(bytes, |files| files.path(FileId(1)))?);
    let cache = Arc::new(BlockCache::new(0));
    let meta = Table::describe(&files, &cache, FileId(1))?;
    verify_table(&files, &cache, &meta, &KeyOrder::bytewise(), 0).map(drop)
}
