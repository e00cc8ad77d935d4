//! Reads the files of a database without opening it, into plain reports.
//!
//! For tools and tests: nothing is written, no lock is taken, and damage is a report and not a failure.

use std::cmp::Ordering;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::comparator::{BYTEWISE_NAME, Comparator};
use crate::base::edit::{Edit, FileId, TableMeta};
use crate::base::event::DroppedAfterDamage;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::ledger::Ledger;
use crate::base::{Error, ErrorKind, KeyOrder, KeyRef, Result, SeqNo};
use crate::block::block::Block;
use crate::block::bloom::FilterBlock;
use crate::block::cache::BlockCache;
use crate::block::cursor::BlockCursor;
use crate::block::frame::{Body, FRAME_HEADER_LEN, open_frame};
use crate::block::kind::BlockKind;
use crate::manifest::{self, Manifest, NAME, TEMPORARY};
use crate::table::files::{self, DirectPolicy, TableFiles};
use crate::table::index::IndexCursor;
use crate::table::options::{DataBlockIndexType, ReadOptions};
use crate::table::reader::Table;
use crate::vfs::fs::LOCK;
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::format::{parse_name as parse_segment_name, segment_path};
use crate::wal::payload::Records;
use crate::wal::payload::check_payload;
use crate::wal::{self, RecoveryMode, ReplayOptions};

/// What was found out about one file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// Where it is.
    pub path: PathBuf,
    /// `manifest`, `table`, `log`, `lock`, `left over` (a table or segment that nothing names) or `unknown`.
    pub kind: String,
    /// Its length.
    pub bytes: u64,
    /// Entries of a table, commits of the log (under its first segment), edits of the manifest.
    pub entries: u64,
    /// Of a table that names it: how its data blocks were asked to lead to their entries.
    pub data_block_index_type: Option<DataBlockIndexType>,
    /// What is wrong with it.
    pub problem: Option<Error>,
}

impl FileReport {
    fn new(path: PathBuf, kind: &str, bytes: u64) -> FileReport {
        let kind = kind.to_owned();
        FileReport { path, kind, bytes, entries: 0, data_block_index_type: None, problem: None }
    }
}

/// What was found out about a directory.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Every file, in the order of their names.
    pub files: Vec<FileReport>,
    /// What the log holds behind damage above its last known durable position; opening would leave it out.
    pub dropped_after_damage: Option<DroppedAfterDamage>,
}

impl VerifyReport {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.files.iter().all(|file| file.problem.is_none())
    }
}

/// A table as the manifest names it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableReport {
    /// Name of its partition.
    pub partition: String,
    /// 0 is the youngest.
    pub level: u8,
    /// The number in its name.
    pub id: u64,
    /// Of the file.
    pub bytes: u64,
    /// Entries, tombstones included.
    pub entries: u64,
    /// Tombstones.
    pub tombstones: u64,
    /// Its first key.
    pub smallest: Vec<u8>,
    /// Its last key.
    pub largest: Vec<u8>,
}

/// The tables of every partition, as the manifest names them.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
pub fn tables(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<TableReport>> {
    let ledger = read_ledger(fs, dir)?.0;
    let mut reports = Vec::new();
    for partition in ledger.partitions.values() {
        for (level, table) in partition.tables.values() {
            reports.push(TableReport {
                partition: partition.meta.name.clone(),
                level: *level,
                id: table.id.0,
                bytes: table.size,
                entries: table.entries,
                tombstones: table.tombstones,
                smallest: table.smallest.0.clone(),
                largest: table.largest.0.clone(),
            });
        }
    }
    reports.sort_by(|a, b| (&a.partition, a.level, &a.smallest).cmp(&(&b.partition, b.level, &b.smallest)));
    Ok(reports)
}

fn read_ledger(fs: &Arc<dyn Fs>, dir: &Path) -> Result<(Ledger, usize)> {
    let edits = Manifest::load(Arc::clone(fs), dir)?.edits;
    let ledger = Ledger::replay(&edits).map_err(|error| error.in_file(dir.join(NAME)))?;
    Ok((ledger, edits.len()))
}

/// Reads and checks every byte of every file; `progress` hears the bytes done and the bytes in all.
///
/// # Errors
/// Only where the directory itself cannot be read; what is wrong with a file stands in its report.
pub fn verify(fs: &Arc<dyn Fs>, dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
    let mut entries = fs.read_dir(dir)?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let total = entries.iter().map(|entry| entry.len).sum();
    let mut report = VerifyReport::default();
    for entry in entries {
        let kind = match entry.name.as_str() {
            NAME => "manifest",
            LOCK => "lock",
            TEMPORARY => "left over",
            name if files::parse_name(name).is_some() || parse_segment_name(name).is_some() => "left over",
            _ => "unknown",
        };
        report.files.push(FileReport::new(dir.join(&entry.name), kind, entry.len));
    }
    let mut done = report.files.iter().filter(|file| file.kind != "left over").map(|file| file.bytes).sum();
    progress(done, total);
    match read_ledger(fs, dir) {
        Err(error) => drop(report.note(&dir.join(NAME), "manifest", 0, Err(error))),
        Ok((ledger, edits)) => {
            report.note(&dir.join(NAME), "manifest", edits as u64, Ok(()));
            verify_tables(fs, dir, &ledger, &mut report, &mut |bytes| {
                done += bytes;
                progress(done, total);
            });
            verify_log(fs, dir, &ledger, &mut report);
        }
    }
    progress(total, total);
    report.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

impl VerifyReport {
    /// Sets what is known of a file; one that is missing gets a report too.
    fn note(&mut self, path: &Path, kind: &str, entries: u64, outcome: Result<()>) -> &mut FileReport {
        let at = self.files.iter().position(|file| file.path == path).unwrap_or_else(|| {
            self.files.push(FileReport::new(path.to_path_buf(), kind, 0));
            self.files.len() - 1
        });
        let file = &mut self.files[at];
        kind.clone_into(&mut file.kind);
        file.entries = entries;
        if let Err(error) = outcome {
            file.problem.get_or_insert(error);
        }
        file
    }
}

/// Stands in for a comparator that only its owner has: every order of keys is accepted.
struct AnyOrder(String);

impl Comparator for AnyOrder {
    fn name(&self) -> &str {
        &self.0
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        if a == b { Ordering::Equal } else { Ordering::Less }
    }
}

fn verify_tables(
    fs: &Arc<dyn Fs>,
    dir: &Path,
    ledger: &Ledger,
    report: &mut VerifyReport,
    progress: &mut dyn FnMut(u64),
) {
    let files = Arc::new(TableFiles::new(Arc::clone(fs), dir, 8, DirectPolicy::never()));
    let cache = Arc::new(BlockCache::new(0));
    for partition in ledger.partitions.values() {
        let order = order_named(&partition.meta.comparator);
        for (_, meta) in partition.tables.values() {
            let outcome = verify_table(&files, &cache, meta, &order, ledger.hash_seed);
            let (index_type, outcome) = outcome.map_or_else(|error| (None, Err(error)), |found| (found, Ok(())));
            report.note(&files.path(meta.id), "table", meta.entries, outcome).data_block_index_type = index_type;
            progress(meta.size);
        }
    }
}

/// Checks a table and returns what its properties say of its data blocks.
fn verify_table(
    files: &Arc<TableFiles>,
    cache: &Arc<BlockCache>,
    meta: &TableMeta,
    order: &KeyOrder,
    hash_seed: u64,
) -> Result<Option<DataBlockIndexType>> {
    let options = ReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_pieces: false };
    let (files, cache) = (Arc::clone(files), Arc::clone(cache));
    let path = files.path(meta.id);
    let table = Table::open(files, cache, meta, order.clone(), hash_seed, options);
    let verified = table.and_then(|table| table.verify().map(|_| table.properties().data_block_index_type));
    verified.map_err(|error| error.in_file(path))
}

fn verify_log(fs: &Arc<dyn Fs>, dir: &Path, ledger: &Ledger, report: &mut VerifyReport) {
    let options = ReplayOptions {
        mode: RecoveryMode::Strict,
        live: ledger.segments.iter().map(|(epoch, file)| (*epoch, *file)).collect(),
        log_end: ledger.log_end,
        from: ledger.partitions.values().map(|partition| partition.flushed).min().unwrap_or(SeqNo::ZERO),
    };
    for file in ledger.segments.values() {
        report.note(&segment_path(dir, *file), "log", 0, Ok(()));
    }
    let mut check = |commit: wal::LogCommit<'_>| check_payload(commit.payload, commit.count).map(|()| true);
    match wal::replay(Arc::clone(fs), dir, ledger.id, options, &mut check) {
        Ok(replayed) => {
            for segment in &replayed.segments {
                report.note(&segment_path(dir, segment.file), "log", 0, Ok(()));
            }
            if let Some(first) = replayed.segments.first() {
                report.note(&segment_path(dir, first.file), "log", replayed.commits, Ok(()));
            }
            report.dropped_after_damage = replayed.dropped_after_damage;
        }
        Err(error) => {
            let path = error.file().map_or_else(|| dir.to_path_buf(), Path::to_path_buf);
            report.note(&path, "log", 0, Err(error));
        }
    }
}

/// Reads and checks one file by itself, without what the manifest knows of it.
///
/// # Errors
/// `Io` where it cannot be read; damage stands in the report.
pub fn file(fs: &Arc<dyn Fs>, path: &Path) -> Result<FileReport> {
    let open = fs.open(path, OpenMode::Read)?;
    let bytes = open.length()?;
    let mut magic = [0; 8];
    let n = open.read_at(&mut magic, 0)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (kind, outcome) = match (&magic[..n], files::parse_name(name)) {
        (b"AZEKTBL\n", Some(id)) => ("table", file_of_table(fs, dir, id)),
        (b"AZEKWAL\n", _) => ("log", read_whole(&*open, bytes).and_then(|b| Ok((wal::scan_bytes(&b)?.commits, None)))),
        (b"AZEKMAN\n", _) => {
            let edits = |b: Vec<u8>| Ok((manifest::decode(&b)?.edits.len() as u64, None));
            ("manifest", read_whole(&*open, bytes).and_then(edits))
        }
        _ => ("unknown", Ok((0, None))),
    };
    let mut report = FileReport::new(path.to_path_buf(), kind, bytes);
    match outcome {
        Ok((entries, index_type)) => (report.entries, report.data_block_index_type) = (entries, index_type),
        Err(error) => report.problem = Some(error.in_file(path)),
    }
    Ok(report)
}

fn file_of_table(fs: &Arc<dyn Fs>, dir: &Path, id: FileId) -> Result<(u64, Option<DataBlockIndexType>)> {
    let files = Arc::new(TableFiles::new(Arc::clone(fs), dir, 1, DirectPolicy::never()));
    let cache = Arc::new(BlockCache::new(0));
    let meta = Table::describe(&files, &cache, id)?;
    let comparator = Table::comparator(&files, &cache, id)?;
    let index_type = verify_table(&files, &cache, &meta, &order_named(&comparator), 0)?;
    Ok((meta.entries, index_type))
}

fn read_whole(file: &dyn File, len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let len = usize::try_from(len).ok().filter(|len| bytes.try_reserve_exact(*len).is_ok());
    bytes.resize(len.ok_or_else(|| Error::corruption("no memory for a file of this length"))?, 0);
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// The order of that name, as far as it is known here.
fn order_named(comparator: &str) -> KeyOrder {
    match comparator {
        BYTEWISE_NAME => KeyOrder::bytewise(),
        name => KeyOrder::custom(Arc::new(AnyOrder(name.to_owned()))),
    }
}

/// Of a cache that gives its blocks huge pages, as those of most databases do.
const LARGE: u64 = 1 << 40;

/// The data blocks of all tables of a database, in memory and with nothing around them, so that what a lookup costs
/// inside of a block can be measured apart from what leads to the block. Thread safe.
#[doc(hidden)]
pub struct DataBlocks {
    blocks: Vec<Arc<Block>>,
    order: KeyOrder,
}

/// A block, and the hash of a key in it, which a lookup has made before it comes to the block.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    block: usize,
    hash: Option<u64>,
}

impl DataBlocks {
    /// Reads the blocks from their files, past every cache; `entry` hears of each entry its place and its key.
    ///
    /// # Errors
    /// `Io` or `Corruption` from the files, `Unsupported` where keys are in an order that only its owner knows.
    pub fn read(fs: &Arc<dyn Fs>, dir: &Path, entry: &mut dyn FnMut(Place, &[u8])) -> Result<DataBlocks> {
        let ledger = read_ledger(fs, dir)?.0;
        let files = Arc::new(TableFiles::new(Arc::clone(fs), dir, 8, DirectPolicy::never()));
        let cache = Arc::new(BlockCache::new(LARGE));
        let options = ReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_pieces: false };
        let mut read = DataBlocks { blocks: Vec::new(), order: KeyOrder::bytewise() };
        for partition in ledger.partitions.values() {
            if partition.meta.comparator != BYTEWISE_NAME {
                let (name, order) = (&partition.meta.name, &partition.meta.comparator);
                let what = format!("keys of partition {name:?} are in the order {order:?}, which is not known here");
                return Err(Error::unsupported(what));
            }
            for (_, meta) in partition.tables.values() {
                let (files, cache) = (Arc::clone(&files), Arc::clone(&cache));
                let table = Table::open(files, cache, meta, read.order.clone(), ledger.hash_seed, options)?;
                read.add(&table, entry).map_err(|error| error.in_file(table.source.path()))?;
            }
        }
        Ok(read)
    }

    fn add(&mut self, table: &Table, entry: &mut dyn FnMut(Place, &[u8])) -> Result<()> {
        let mut index = IndexCursor::new(false);
        index.seek_to_first(&table.index, &table.source)?;
        while let Some((handle, ..)) = index.entry()? {
            let block: Arc<Block> = table.source.read(handle, BlockKind::Data)?;
            let mut cursor = BlockCursor::new(Arc::clone(&block));
            cursor.seek_to_first()?;
            while cursor.valid() {
                let key = cursor.key().user;
                entry(Place { block: self.blocks.len(), hash: table.rehash(key) }, key);
                cursor.next()?;
            }
            self.blocks.push(block);
            index.next(&table.source)?;
        }
        Ok(())
    }

    /// Blocks.
    pub fn count(&self) -> usize {
        self.blocks.len()
    }

    /// The length of the key's value, if the block has the key: by what a lookup does once it is at the block.
    ///
    /// # Errors
    /// `Corruption` if the block is damaged.
    #[inline(never)]
    pub fn find(&self, place: Place, key: &[u8]) -> Result<Option<usize>> {
        let Some(block) = self.blocks.get(place.block) else { return Ok(None) };
        let found = block.find(KeyRef::first_of(key), place.hash, &self.order)?;
        Ok(found.filter(|found| found.same_key).map(|found| found.value.len()))
    }

    /// As [`find`](DataBlocks::find), but without looking into the block: what is left is the cost of asking. Gives the
    /// length of the key, if there is such a block.
    ///
    /// # Errors
    /// None; it is called as `find` is.
    #[inline(never)]
    pub fn reach(&self, place: Place, key: &[u8]) -> Result<Option<usize>> {
        Ok(black_box(self.blocks.get(place.block).map(Arc::as_ptr)).map(|_| key.len()))
    }
}

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
    }
}

/// A header of whichever kind.
fn decode_header(bytes: &[u8]) -> Result<()> {
    let mut error = Error::corruption("no kind of file begins so");
    for kind in [FileKind::Table, FileKind::Wal, FileKind::Manifest] {
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

/// A whole table, from memory.
fn decode_table(bytes: &[u8]) -> Result<()> {
    let fs: Arc<dyn Fs> = Arc::new(crate::vfs::mem::MemFs::new());
    let dir = PathBuf::from("/fuzz");
    fs.create_dir_all(&dir)?;
    let files = Arc::new(TableFiles::new(Arc::clone(&fs), &dir, 1, DirectPolicy::never()));
    let file = fs.open(&files.path(FileId(1)), OpenMode::Create)?;
    file.write_at(bytes, 0)?;
    let cache = Arc::new(BlockCache::new(0));
    let meta = Table::describe(&files, &cache, FileId(1))?;
    verify_table(&files, &cache, &meta, &KeyOrder::bytewise(), 0).map(drop)
}
