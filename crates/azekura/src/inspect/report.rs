//! What there is in a directory, and what is wrong with it, as plain reports.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::blob_ref::References;
use crate::base::comparator::{BYTEWISE_NAME, Comparator};
use crate::base::edit::{BlobMeta, BlobUse, EngineKind, FileId, TableMeta};
use crate::base::event::DroppedAfterDamage;
use crate::base::ledger::{Ledger, PartitionLedger};
use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::blob::liveness::Liveness;
use crate::blob::reader::BlobFile;
use crate::blob::unsealed::Unsealed;
use crate::block::cache::BlockCache;
use crate::engine::{ReadPoints, Visible};
use crate::manifest::{self, Manifest, NAME, TEMPORARY};
use crate::pmem::engine::{KnownPool, PoolHome, StoredPool};
use crate::pmem::options::PmemOptions;
use crate::pmem::store::{self, PoolFile};
use crate::table::options::{DataBlockIndexType, ReadOptions};
use crate::table::reader::Table;
use crate::vfs::env::TestEnv;
use crate::vfs::files::{DataFiles, DataKind, DirectPolicy, parse_name};
use crate::vfs::fs::{LOCK, RESERVE};
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::format::{parse_name as parse_segment_name, segment_path};
use crate::wal::payload::{check_payload, pointers};
use crate::wal::{self, Mark, RecoveryMode, ReplayOptions};

/// What was found out about one file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// Where it is.
    pub path: PathBuf,
    /// `manifest`, `table`, `blob`, `pool`, `log`, `lock`, `left over` (a data file or segment that nothing names) or
    /// `unknown`.
    pub kind: String,
    /// Its length.
    pub bytes: u64,
    /// Entries of a table, values of a blob file, commits of the log (under its first segment), edits of the manifest.
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

/// A blob file as the manifest names it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlobReport {
    /// Name of its partition.
    pub partition: String,
    /// The number in its name.
    pub id: u64,
    /// Of the file.
    pub bytes: u64,
    /// Values it holds.
    pub values: u64,
    /// Bytes of those, as they are stored.
    pub value_bytes: u64,
    /// Values that tables point to.
    pub referenced_values: u64,
    /// Bytes of those.
    pub referenced_bytes: u64,
    /// Files that its values were first written to: itself, or those that they were collected from.
    pub logical_files: Vec<u64>,
}

/// The blob files of every partition, as the manifest names them.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
/// # use azekura::fs::{DiskFs, Fs};
/// # use std::sync::Arc;
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).open()?;
/// # let apart = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
/// pages.insert("page", vec![1; 5_000])?;
/// drop(pages);
/// db.close()?;
/// let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
/// let files = azekura::inspect::blobs(&fs, &dir.path().join("db"))?;
/// assert_eq!((files[0].partition.as_str(), files[0].values, files[0].referenced_values), ("pages", 1, 1));
/// # Ok(()) }
/// ```
pub fn blobs(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<BlobReport>> {
    let ledger = read_ledger(fs, dir)?.0;
    let mut reports = Vec::new();
    for partition in ledger.partitions.values() {
        let uses: Vec<BlobUse> = partition.tables.values().flat_map(|(_, table)| table.blobs.clone()).collect();
        for file in partition.blobs.values() {
            let here = |logical| file.sections.iter().any(|section| section.logical == logical);
            let referenced: Vec<&BlobUse> = uses.iter().filter(|uses| here(uses.logical)).collect();
            reports.push(BlobReport {
                partition: partition.meta.name.clone(),
                id: file.id.0,
                bytes: file.size,
                values: file.sections.iter().map(|section| section.values).sum(),
                value_bytes: file.sections.iter().map(|section| section.bytes).sum(),
                referenced_values: referenced.iter().map(|uses| uses.count).sum(),
                referenced_bytes: referenced.iter().map(|uses| uses.bytes).sum(),
                logical_files: file.sections.iter().map(|section| section.logical.0).collect(),
            });
        }
    }
    reports.sort_by(|a, b| (&a.partition, a.id).cmp(&(&b.partition, b.id)));
    Ok(reports)
}

pub(crate) fn read_ledger(fs: &Arc<dyn Fs>, dir: &Path) -> Result<(Ledger, usize)> {
    let edits = Manifest::load(Arc::clone(fs), dir)?.edits;
    let ledger = Ledger::replay(&edits).map_err(|error| error.in_file(dir.join(NAME)))?;
    Ok((ledger, edits.len()))
}

/// Reads and checks every byte of every file; `progress` hears the bytes done and the bytes in all.
///
/// # Errors
/// Only where the directory itself cannot be read; what is wrong with a file stands in its report.
pub fn verify(fs: &Arc<dyn Fs>, dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
    let dir = &*fs.absolute(dir)?;
    let mut entries = fs.read_dir(dir)?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let total = entries.iter().map(|entry| entry.len).sum();
    let mut report = VerifyReport::default();
    for entry in entries {
        let kind = match entry.name.as_str() {
            NAME => "manifest",
            LOCK => "lock",
            RESERVE => "reserve",
            TEMPORARY => "left over",
            name if parse_name(name).is_some() || parse_segment_name(name).is_some() => "left over",
            name if store::parse_name(name).is_some() => "pool",
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
            verify_pools(fs, dir, &ledger, &mut report);
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
    let files = Arc::new(DataFiles::tables(Arc::clone(fs), dir, 8, DirectPolicy::never()));
    let cache = Arc::new(BlockCache::new(0));
    for partition in ledger.partitions.values() {
        let order = order_named(&partition.meta.comparator);
        let mut live = Liveness::default();
        for (_, meta) in partition.tables.values() {
            let outcome = verify_table(&files, &cache, meta, &order, ledger.hash_seed);
            let (index_type, outcome) = match outcome {
                Ok((index_type, references)) => {
                    live.add(&references);
                    (index_type, Ok(()))
                }
                Err(error) => (None, Err(error)),
            };
            report.note(&files.path(meta.id), "table", meta.entries, outcome).data_block_index_type = index_type;
            progress(meta.size);
        }
        for meta in partition.spilled.values() {
            let outcome = verify_table(&files, &cache, meta, &KeyOrder::bytewise(), ledger.hash_seed);
            report.note(&files.path(meta.id), "table", meta.entries, outcome.map(drop));
            progress(meta.size);
        }
        for (logical, _) in live.files().filter(|(logical, _)| !has_logical(partition, *logical)) {
            let error = Error::corruption("tables point to this blob file, which the manifest does not know");
            report.note(&files.blobs().path(logical), "blob", 0, Err(error));
        }
        for meta in partition.blobs.values() {
            let outcome = verify_blobs(&files.blobs(), &cache, meta, &live);
            let values = outcome.as_ref().map_or(0, |values| *values);
            report.note(&files.blobs().path(meta.id), "blob", values, outcome.map(drop));
            progress(meta.size);
        }
    }
}

/// Checks every page and every record of the pools, and where that is known, the order of their keys.
fn verify_pools(fs: &Arc<dyn Fs>, dir: &Path, ledger: &Ledger, report: &mut VerifyReport) {
    let memory = EngineKind::PmemMemory as u8;
    let is_there = |p: &&PartitionLedger| {
        p.meta.engine == memory || p.meta.engine == EngineKind::Pmem as u8 && p.flushed > SeqNo::ZERO
    };
    for partition in ledger.partitions.values().filter(is_there) {
        let path = dir.join(PoolFile::Pool.name(partition.meta.id));
        let records = verify_pool(fs, dir, partition);
        let count = records.as_ref().map_or(0, |records| *records);
        report.note(&path, "pool", count, records.map(drop).map_err(|error| error.in_file(&path)));
    }
}

fn verify_pool(fs: &Arc<dyn Fs>, dir: &Path, partition: &PartitionLedger) -> Result<u64> {
    let options = PmemOptions::of_settings(&partition.meta.settings)?;
    let visible = Visible::default();
    let home = PoolHome {
        fs: Arc::clone(fs),
        env: Arc::new(TestEnv::new(0)),
        dir: dir.to_path_buf(),
        partition: partition.meta.id,
        name: partition.meta.name.clone(),
        points: ReadPoints::new(visible.clone()),
        visible,
        read_only: true,
        log_bytes: 0,
    };
    let known = KnownPool {
        made_as_memory: partition.meta.engine == EngineKind::PmemMemory as u8,
        flushed: partition.flushed,
        file_id: partition.pool_file_id,
    };
    let stored = StoredPool::read(home, &known, &options)?;
    stored.verify(partition.meta.comparator == BYTEWISE_NAME, &options)
}

fn has_logical(partition: &PartitionLedger, logical: FileId) -> bool {
    partition.blobs.values().flat_map(|file| &file.sections).any(|section| section.logical == logical)
}

/// Checks a blob file, and that it has every value of `live`; returns how many values it has.
fn verify_blobs(files: &DataFiles, cache: &Arc<BlockCache>, meta: &BlobMeta, live: &Liveness) -> Result<u64> {
    let file = BlobFile::new(files.clone(), Arc::clone(cache), meta.id, meta.size);
    let values = file.verify(meta)?;
    for section in &meta.sections {
        let Some(ordinals) = live.of(section.logical) else { continue };
        let (mut walk, mut held) = (file.walk(section.logical)?, 0);
        while let Some((ordinal, _)) = walk.next()? {
            held += u64::from(ordinals.contains(ordinal));
        }
        if held != ordinals.count() {
            return Err(
                Error::corruption("tables point to values that the blob file does not have").in_file(file.path())
            );
        }
    }
    Ok(values)
}

/// Checks a table and returns what its properties say of its data blocks, and what its entries point to.
pub(crate) fn verify_table(
    files: &Arc<DataFiles>,
    cache: &Arc<BlockCache>,
    meta: &TableMeta,
    order: &KeyOrder,
    hash_seed: u64,
) -> Result<(Option<DataBlockIndexType>, References)> {
    let options = ReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_pieces: false };
    let (files, cache) = (Arc::clone(files), Arc::clone(cache));
    let path = files.path(meta.id);
    let table = Table::open(files, cache, meta, order.clone(), hash_seed, options);
    let verified = table.and_then(|table| {
        table.verify()?;
        Ok((table.properties().data_block_index_type, table.blob_references()?))
    });
    verified.map_err(|error| error.in_file(path))
}

fn verify_log(fs: &Arc<dyn Fs>, dir: &Path, ledger: &Ledger, report: &mut VerifyReport) {
    let options = ReplayOptions {
        mode: RecoveryMode::Strict,
        live: ledger.segments.iter().map(|(epoch, file)| (*epoch, *file)).collect(),
        log_end: ledger.log_end,
        // All of it is read, also what no partition needs.
        durable: Mark { seqno: ledger.durable(), partition: String::new() },
        files_end: ledger.files_end(),
        ..ReplayOptions::default()
    };
    for file in ledger.segments.values() {
        report.note(&segment_path(dir, *file), "log", 0, Ok(()));
    }
    let files = DataFiles::tables(Arc::clone(fs), dir, 8, DirectPolicy::never()).blobs();
    let mut unsealed = Unsealed::new(ledger, files.clone(), Arc::new(BlockCache::new(0)));
    let mut check = |commit: wal::LogCommit<'_>| {
        check_payload(commit.payload, commit.count)?;
        unsealed.check(&pointers(&commit)?)
    };
    let replayed = wal::replay(Arc::clone(fs), dir, ledger.id, options, &mut check);
    for (id, found) in unsealed.found() {
        report.note(&files.path(id), "blob", found.frames.len() as u64, Ok(()));
    }
    match replayed {
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
    let path = &*fs.absolute(path)?;
    let open = fs.open(path, OpenMode::Read)?;
    let bytes = open.length()?;
    let mut magic = [0; 8];
    let n = open.read_at(&mut magic, 0)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (kind, outcome) = match (&magic[..n], parse_name(name)) {
        (b"AZEKTBL\n", Some((DataKind::Table, id))) => ("table", file_of_table(fs, dir, id)),
        (b"AZEKBLB\n", Some((DataKind::Blob, id))) => ("blob", file_of_blobs(fs, dir, id).map(|values| (values, None))),
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
    let files = Arc::new(DataFiles::tables(Arc::clone(fs), dir, 1, DirectPolicy::never()));
    let cache = Arc::new(BlockCache::new(0));
    let meta = Table::describe(&files, &cache, id)?;
    let comparator = Table::comparator(&files, &cache, id)?;
    let (index_type, _) = verify_table(&files, &cache, &meta, &order_named(&comparator), 0)?;
    Ok((meta.entries, index_type))
}

fn file_of_blobs(fs: &Arc<dyn Fs>, dir: &Path, id: FileId) -> Result<u64> {
    let files = DataFiles::tables(Arc::clone(fs), dir, 1, DirectPolicy::never()).blobs();
    let cache = Arc::new(BlockCache::new(0));
    let meta = BlobFile::describe(&files, &cache, id)?;
    BlobFile::new(files, cache, id, meta.size).verify(&meta)
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
