//! Lists and verifies the files of a database directory, as plain reports.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::blob_pointer::BlobReferences;
use crate::base::comparator::{BYTEWISE_NAME, Comparator};
use crate::base::event::DroppedAfterDamage;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::manifest_state::{ManifestState, PartitionManifestState};
use crate::base::version_edit::{BlobFileMeta, EngineKind, FileNumber, TableBlobUsage, TableMeta};
use crate::base::{Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::blob::reader::{BlobFile, LiveBlobs, add_references};
use crate::blob::unfinished::UnfinishedBlobFiles;
use crate::block::cache::BlockCache;
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::manifest::{self, FollowedFiles, MANIFEST_NAME, MANIFEST_TEMP_NAME, Manifest};
use crate::pmem::options::PmemOptions;
use crate::pmem::pool::{self, ManifestPoolInfo, PoolFileKind, PoolLocation, StoredPool};
use crate::table::options::{DataBlockIndexType, TableReadOptions};
use crate::table::reader::TableReader;
use crate::vfs::env::{Env, SystemEnv};
use crate::vfs::fs::{DISK_RESERVE_FILE_NAME, LOCK_FILE_NAME};
use crate::vfs::open_files::{DataFileKind, DataFiles, FileAccess, parse_data_file_name};
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::format::{
    SEQNO_GAP_PAYLOAD, WalRecordIter, blob_pointers, check_payload, parse_segment_name, segment_path,
};
use crate::wal::{self, PartitionSeqno, RecoveryMode, WalReplayOptions};

/// Result of checking one file.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
/// # db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let report = azekura::inspect::verify(&fs, &path, &mut |_, _| {})?;
/// let table = report.files.iter().find(|file| file.kind == "table").unwrap();
/// assert_eq!((table.entries, table.problem.is_none()), (1, true));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FileReport {
    /// Path of the file.
    pub path: PathBuf,
    /// `manifest`, `table`, `blob`, `pool`, `log` (WAL segment), `lock`, `reserve` (disk reserve), `left over` (a
    /// temporary manifest, or a data file or segment that the manifest does not name) or `unknown`.
    pub kind: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Entries of a table, values of a blob file, commits of the WAL (reported for its first segment), or version
    /// edits of the manifest.
    pub entries: u64,
    /// The data block index type of a table, if the table records it.
    pub data_block_index_type: Option<DataBlockIndexType>,
    /// The damage found, if any.
    pub problem: Option<Error>,
}

impl FileReport {
    fn new(path: PathBuf, kind: &str, bytes: u64) -> FileReport {
        let kind = kind.to_owned();
        FileReport { path, kind, bytes, entries: 0, data_block_index_type: None, problem: None }
    }
}

/// Result of checking a directory.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # azekura::Config::new(&path).open()?.close()?;
/// # std::fs::write(path.join("notes.txt"), "").unwrap();
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let report = azekura::inspect::verify(&fs, &path, &mut |_, _| {})?;
/// let unknown = report.files.iter().find(|file| file.kind == "unknown").unwrap();
/// assert!(unknown.path.ends_with("notes.txt"));
/// assert!(report.is_clean()); // a file of another program is not damage
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct VerifyReport {
    /// All files, sorted by name.
    pub files: Vec<FileReport>,
    /// WAL frames after damage above the durable watermark, if any; opening would drop them.
    pub dropped_after_damage: Option<DroppedAfterDamage>,
}

impl VerifyReport {
    /// Returns whether no damage was found.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # azekura::Config::new(&path).open()?.close()?;
    /// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
    /// assert!(azekura::inspect::verify(&fs, &path, &mut |_, _| {})?.is_clean());
    /// std::fs::write(path.join("MANIFEST"), "not a manifest").unwrap();
    /// assert!(!azekura::inspect::verify(&fs, &path, &mut |_, _| {})?.is_clean());
    /// # Ok(()) }
    /// ```
    pub fn is_clean(&self) -> bool {
        self.files.iter().all(|file| file.problem.is_none())
    }
}

/// A table, as recorded in the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
/// # db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let tables = azekura::inspect::tables(&fs, &path)?;
/// let bytes: u64 = tables.iter().filter(|table| table.partition == "fruit").map(|table| table.bytes).sum();
/// assert!(bytes > 0);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableReport {
    /// Name of the partition.
    pub partition: String,
    /// Level number; flushes write to level 0.
    pub level: u8,
    /// File number, as in the file name.
    pub id: u64,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Entries, tombstones included.
    pub entries: u64,
    /// Tombstones.
    pub tombstones: u64,
    /// Smallest key.
    pub smallest: Vec<u8>,
    /// Largest key.
    pub largest: Vec<u8>,
}

/// Returns the tables of all partitions, as recorded in the manifest.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::fs::{DiskFs, Fs};
/// use std::sync::Arc;
/// # let db = azekura::Config::new(&path).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.insert("pear", "green")?;
/// fruit.flush()?;
/// let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
/// let tables = azekura::inspect::tables(&fs, db.path())?; // the database may be open
/// assert_eq!((tables[0].entries, tables[0].level), (2, 0));
/// assert_eq!((&*tables[0].smallest, &*tables[0].largest), (&b"apple"[..], &b"pear"[..]));
/// # Ok(()) }
/// ```
pub fn tables(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<TableReport>> {
    let manifest_state = read_manifest_state(fs, dir)?.0;
    let mut reports = Vec::new();
    for partition in manifest_state.partitions.values() {
        for (level, table) in partition.tables.values() {
            reports.push(TableReport {
                partition: partition.meta.name.clone(),
                level: *level,
                id: table.number.0,
                bytes: table.size,
                entries: table.entries,
                tombstones: table.tombstones,
                smallest: table.smallest_key.0.clone(),
                largest: table.largest_key.0.clone(),
            });
        }
    }
    reports.sort_by(|a, b| (&a.partition, a.level, &a.smallest).cmp(&(&b.partition, b.level, &b.smallest)));
    Ok(reports)
}

/// A blob file, as recorded in the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # let separated = azekura::PartitionCreateOptions::default().with_kv_separation(Default::default());
/// # db.open_partition("photos", separated)?.insert("sky", vec![7; 100_000])?;
/// # db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// for file in azekura::inspect::blobs(&fs, &path)? {
///     assert_eq!(file.logical_files, [file.id]); // blob GC copied no values into it
///     assert_eq!(file.value_bytes - file.referenced_bytes, 0); // no value is stale
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlobReport {
    /// Name of the partition.
    pub partition: String,
    /// File number, as in the file name.
    pub id: u64,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Values stored in the file.
    pub values: u64,
    /// Bytes of these values as stored.
    pub value_bytes: u64,
    /// Values that tables point to.
    pub referenced_values: u64,
    /// Bytes of the referenced values as stored.
    pub referenced_bytes: u64,
    /// File numbers under which its values were first written: its own, or those of the files that blob GC copied
    /// them from.
    pub logical_files: Vec<u64>,
}

/// Returns the blob files of all partitions, as recorded in the manifest.
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
/// # let separation = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
/// pages.insert("page", vec![1; 5_000])?;
/// drop(pages);
/// db.close()?;
/// let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
/// let files = azekura::inspect::blobs(&fs, &dir.path().join("db"))?;
/// assert_eq!((files[0].partition.as_str(), files[0].values, files[0].referenced_values), ("pages", 1, 1));
/// # Ok(()) }
/// ```
pub fn blobs(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<BlobReport>> {
    let manifest_state = read_manifest_state(fs, dir)?.0;
    let mut reports = Vec::new();
    for partition in manifest_state.partitions.values() {
        let uses: Vec<TableBlobUsage> =
            partition.tables.values().flat_map(|(_, table)| table.blob_usage.clone()).collect();
        for file in partition.blob_files.values() {
            let in_file = |logical| file.sections.iter().any(|section| section.logical_file == logical);
            let referenced: Vec<&TableBlobUsage> = uses.iter().filter(|usage| in_file(usage.logical_file)).collect();
            // Damaged figures are reported as they are; their sums may exceed 64 bits.
            let sum = |figures: &mut dyn Iterator<Item = u64>| figures.fold(0, u64::saturating_add);
            reports.push(BlobReport {
                partition: partition.meta.name.clone(),
                id: file.number.0,
                bytes: file.size,
                values: sum(&mut file.sections.iter().map(|section| section.values)),
                value_bytes: sum(&mut file.sections.iter().map(|section| section.bytes)),
                referenced_values: sum(&mut referenced.iter().map(|usage| usage.count)),
                referenced_bytes: sum(&mut referenced.iter().map(|usage| usage.bytes)),
                logical_files: file.sections.iter().map(|section| section.logical_file.0).collect(),
            });
        }
    }
    reports.sort_by(|a, b| (&a.partition, a.id).cmp(&(&b.partition, b.id)));
    Ok(reports)
}

pub(crate) fn read_manifest_state(fs: &Arc<dyn Fs>, dir: &Path) -> Result<(ManifestState, usize)> {
    let edits = Manifest::load(Arc::clone(fs), dir)?.edits;
    let manifest_state = ManifestState::replay(&edits).map_err(|error| error.in_file(dir.join(MANIFEST_NAME)))?;
    Ok((manifest_state, edits.len()))
}

/// Returns the random id in the header of a table or of a finished blob file. Two files with the same id have the same
/// content, also in copies of the database. `None` for every other file.
///
/// # Errors
/// `Io`. `Corruption` if the file has the name of a table or of a blob file, but not the header. `Unsupported` if a
/// newer version wrote it.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// # fruit.insert("apple", "red")?;
/// # fruit.flush()?;
/// let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// db.checkpoint(dir.path().join("copy"))?;
/// let table = format!("{:06}.sst", azekura::inspect::tables(&fs, db.path())?[0].id);
/// let id = |of: &str| azekura::inspect::immutable_file_id(&fs, &dir.path().join(of).join(&table));
/// assert_eq!(id("db")?.unwrap(), id("copy")?.unwrap());
/// assert!(azekura::inspect::immutable_file_id(&fs, &dir.path().join("copy/MANIFEST"))?.is_none());
/// # Ok(()) }
/// ```
pub fn immutable_file_id(fs: &Arc<dyn Fs>, path: &Path) -> Result<Option<[u8; 16]>> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let kind = match parse_data_file_name(name) {
        Some((DataFileKind::Table, _)) => FileKind::Table,
        Some((DataFileKind::Blob, _)) => FileKind::Blob,
        None => return Ok(None),
    };
    let read = || {
        let file = fs.open(path, OpenMode::Read)?;
        let len = file.length()?;
        if kind == FileKind::Blob && len < FileHeader::LEN as u64 {
            return Ok(None); // still written
        }
        let mut header = [0; FileHeader::LEN];
        file.read_exact_at(&mut header, 0)?;
        let header = FileHeader::decode(kind, &header)?;
        // A direct blob file that is still written has no footer.
        let mut end = [0; 8];
        file.read_exact_at(&mut end, len.saturating_sub(8))?;
        Ok((end == kind.footer_magic()).then_some(header.file_id))
    };
    read().map_err(|error: Error| error.in_file(path))
}

/// Returns the last sequence number in the write-ahead log (WAL) of a checkpoint, which its manifest records.
///
/// In the database of which the checkpoint was made, the checkpoint has every commit up to this
/// [`sequence_number`](crate::ChangePosition::sequence_number), and no later one. `None` if the manifest records none.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// # fruit.insert("apple", "red")?;
/// let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// db.checkpoint(dir.path().join("copy"))?;
/// let end = azekura::inspect::wal_end(&fs, &dir.path().join("copy"))?;
/// assert_eq!(end, Some(db.change_position()?.sequence_number()));
/// # Ok(()) }
/// ```
pub fn wal_end(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Option<u64>> {
    Ok(read_manifest_state(fs, dir)?.0.wal_end.map(|(_, seqno)| seqno.0))
}

/// The ends of the WAL that a manifest records; see [`wal_ends`].
///
/// ```
/// let ends = azekura::inspect::WalEnds { known: vec![(3, Some(40))], forgotten: None };
/// assert_eq!(ends.first(3), Some((3, Some(40)))); // commits of epoch 3 after number 40 are lost
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WalEnds {
    /// Oldest first: an epoch, and the last sequence number that is valid of this and earlier epochs. `None`: no commit
    /// up to this epoch is known to be part of the database. The last one is [`wal_end`].
    pub known: Vec<(u32, Option<u64>)>,
    /// The highest epoch of ends that the manifest has recorded and has forgotten, because there were too many.
    pub forgotten: Option<u32>,
}

impl WalEnds {
    /// Returns the first end that was recorded for commits of this epoch, or a later one if it is forgotten.
    ///
    /// ```
    /// let ends = azekura::inspect::WalEnds { known: vec![(3, Some(40)), (5, None)], forgotten: Some(1) };
    /// assert_eq!((ends.first(2), ends.first(6)), (Some((3, Some(40))), None));
    /// ```
    pub fn first(&self, epoch: u32) -> Option<(u32, Option<u64>)> {
        self.known.iter().find(|(of, _)| *of >= epoch).copied()
    }

    /// Returns whether [`first`](WalEnds::first) is not forgotten.
    ///
    /// ```
    /// let ends = azekura::inspect::WalEnds { known: vec![(3, Some(40)), (5, None)], forgotten: Some(1) };
    /// assert_eq!((ends.knows_first(1), ends.knows_first(2)), (false, true));
    /// ```
    pub fn knows_first(&self, epoch: u32) -> bool {
        self.forgotten.is_none_or(|forgotten| forgotten < epoch)
    }
}

/// Returns the ends of the WAL that the manifest records.
///
/// Each open records one. Up to its epoch, no commit with a higher number is part of the database: a recovery has lost
/// those that there were. A manifest records the last 65, without those that a later one replaces.
///
/// A commit of a [`ChangePosition`](crate::ChangePosition) is lost if the [first](WalEnds::first) of these ends for its
/// epoch has a lower number.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
/// let position = db.change_position()?;
/// # db.close()?;
/// # azekura::Config::new(&path).open()?.close()?;
/// // After another open:
/// let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let ends = azekura::inspect::wal_ends(&fs, &path)?;
/// assert!(ends.knows_first(position.epoch()));
/// let (_, end) = ends.first(position.epoch()).unwrap();
/// assert_eq!(end, Some(position.sequence_number()));
/// # Ok(()) }
/// ```
pub fn wal_ends(fs: &Arc<dyn Fs>, dir: &Path) -> Result<WalEnds> {
    let state = read_manifest_state(fs, dir)?.0;
    let known = state.wal_ends().map(|(epoch, end)| (epoch.0, end.map(|end| end.0))).collect();
    Ok(WalEnds { known, forgotten: state.forgotten_ends().map(|epoch| epoch.0) })
}

/// Returns the names and ids of the partitions of a copy of a database, in the order of their names, as
/// [`Database::partition_ids`](crate::Database::partition_ids).
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let copy = dir.path().join("copy");
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// db.open_partition("fruit", Default::default())?;
/// db.checkpoint(&copy)?;
/// let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// assert_eq!(azekura::inspect::partition_ids(&fs, &copy)?, db.partition_ids());
/// # Ok(()) }
/// ```
pub fn partition_ids(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<(String, u64)>> {
    let state = read_manifest_state(fs, dir)?.0;
    let mut partitions: Vec<_> = state.partitions.values().map(|of| (of.meta.name.clone(), of.meta.id.0)).collect();
    partitions.sort_unstable();
    Ok(partitions)
}

/// Reads and checks the manifest and the tables, blob files, pools and WAL segments that it names. Other files are only
/// listed. Calls `progress` with the bytes checked so far and the total bytes.
///
/// # Errors
/// `Io` only if the directory itself cannot be read. Damage to a file is in its report.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::fs::{DiskFs, Fs};
/// use std::sync::Arc;
/// # azekura::Config::new(&path).open()?.close()?;
/// let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
/// let mut percent = 0;
/// let report = azekura::inspect::verify(&fs, &path, &mut |done, total| percent = 100 * done / total.max(1))?;
/// let damaged: Vec<_> = report.files.iter().filter(|file| file.problem.is_some()).collect();
/// assert!(damaged.is_empty() && percent == 100);
/// # Ok(()) }
/// ```
pub fn verify(fs: &Arc<dyn Fs>, dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
    let dir = &*fs.absolute(dir)?;
    let mut entries = fs.read_dir(dir)?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let total = entries.iter().map(|entry| entry.len).sum();
    let mut report = VerifyReport::default();
    for entry in entries {
        let kind = match entry.name.as_str() {
            MANIFEST_NAME => "manifest",
            LOCK_FILE_NAME => "lock",
            DISK_RESERVE_FILE_NAME => "reserve",
            MANIFEST_TEMP_NAME => "left over",
            name if parse_data_file_name(name).is_some() || parse_segment_name(name).is_some() => "left over",
            name if pool::parse_pool_file_name(name).is_some() => "pool",
            _ => "unknown",
        };
        report.files.push(FileReport::new(dir.join(&entry.name), kind, entry.len));
    }
    let mut done = report.files.iter().filter(|file| file.kind != "left over").map(|file| file.bytes).sum();
    progress(done, total);
    match read_manifest_state(fs, dir) {
        Err(error) => drop(report.set_file_result(&dir.join(MANIFEST_NAME), "manifest", 0, Err(error))),
        Ok((manifest_state, edits)) => {
            report.set_file_result(&dir.join(MANIFEST_NAME), "manifest", edits as u64, Ok(()));
            let files = DataFiles::tables(Arc::clone(fs), dir, 8, FileAccess::buffered());
            verify_tables(&files, &manifest_state, &mut report, &mut |bytes| {
                done += bytes;
                progress(done, total);
            });
            verify_pools(fs, dir, &manifest_state, &mut report);
            verify_wal(fs, dir, &manifest_state, &mut report);
        }
    }
    progress(total, total);
    report.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

/// Reads and checks the tables and blob files that a [follower](crate::Config::open_follower) reads, while another
/// process may write. The follower keeps them open, so it does not matter whether the writer has removed them. Calls
/// `progress` with the bytes checked so far and the total bytes.
///
/// The manifest, the WAL and pools change meanwhile. They are not in the report: opening and catching up check what
/// they read of them. A tail of the WAL that is damaged looks like its end.
///
/// # Errors
/// `Io` or `Corruption` from the manifest, which is read if a file is
/// missing. Damage to a file is in its report.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::Config;
/// # let db = Config::new(&path).open()?;
/// let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// let follower = Config::new(&path).open_follower()?; // also in another process
/// fruit.remove("apple")?;
/// fruit.flush()?;
/// fruit.major_compact()?; // removes the table
/// let report = azekura::inspect::verify_follower(&follower.followed_files()?, &mut |_, _| {})?;
/// assert_eq!((report.files.len(), report.files[0].entries, report.is_clean()), (1, 1, true));
/// # Ok(()) }
/// ```
pub fn verify_follower(followed: &FollowedFiles, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
    let FollowedFiles { manifest_state, files: tables, fs, dir } = followed;
    let blob_files = tables.blob_files();
    let mut report = VerifyReport::default();
    for partition in manifest_state.partitions.values() {
        let found = |path, kind, bytes| FileReport::new(path, kind, bytes);
        let all = partition.all_tables().map(|meta| found(tables.path(meta.number), "table", meta.size));
        report.files.extend(all);
        let all = partition.blob_files.values().map(|meta| found(blob_files.path(meta.number), "blob", meta.size));
        report.files.extend(all);
    }
    let total = report.files.iter().map(|file| file.bytes).sum();
    let mut done = 0;
    progress(done, total);
    verify_tables(tables, manifest_state, &mut report, &mut |bytes| {
        done += bytes;
        progress(done, total);
    });
    let is_missing = |file: &FileReport| file.problem.as_ref().is_some_and(Error::is_missing_file);
    if report.files.iter().any(is_missing) {
        // The follower does not open the files of partitions whose comparator is not available. The writer has removed
        // those that its manifest no longer names.
        let newer = read_manifest_state(fs, dir)?.0;
        let named: BTreeSet<PathBuf> = newer
            .partitions
            .values()
            .flat_map(|partition| {
                let all = partition.all_tables().map(|meta| tables.path(meta.number));
                all.chain(partition.blob_files.values().map(|meta| blob_files.path(meta.number)))
            })
            .collect();
        report.files.retain(|file| !is_missing(file) || named.contains(&file.path));
    }
    report.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(report)
}

impl VerifyReport {
    /// Sets the result for a file; adds a report for a missing file.
    fn set_file_result(&mut self, path: &Path, kind: &str, entries: u64, outcome: Result<()>) -> &mut FileReport {
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

/// Replacement for a custom comparator that is not available here. It accepts any order of the keys, because it
/// compares two different keys as ascending.
struct UnknownComparator(String);

impl Comparator for UnknownComparator {
    fn name(&self) -> &str {
        &self.0
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        if a == b { Ordering::Equal } else { Ordering::Less }
    }
}

fn verify_tables(
    files: &DataFiles,
    manifest_state: &ManifestState,
    report: &mut VerifyReport,
    progress: &mut dyn FnMut(u64),
) {
    let cache = Arc::new(BlockCache::new(0));
    for partition in manifest_state.partitions.values() {
        let order = key_order_for_name(&partition.meta.comparator);
        let mut live = LiveBlobs::default();
        for (_, meta) in partition.tables.values() {
            let outcome = verify_table(files, &cache, meta, &order, manifest_state.hash_seed);
            let (index_type, outcome) = match outcome {
                Ok((index_type, references)) => {
                    add_references(&mut live, &references, |_| true);
                    (index_type, Ok(()))
                }
                Err(error) => (None, Err(error)),
            };
            report.set_file_result(&files.path(meta.number), "table", meta.entries, outcome).data_block_index_type =
                index_type;
            progress(meta.size);
        }
        for meta in partition.spilled.values() {
            let outcome = verify_table(files, &cache, meta, &KeyOrder::bytewise(), manifest_state.hash_seed);
            report.set_file_result(&files.path(meta.number), "table", meta.entries, outcome.map(drop));
            progress(meta.size);
        }
        for &logical in live.keys().filter(|logical| !has_logical_file(partition, **logical)) {
            let error = Error::corruption("tables point to this blob file, which is not in the manifest");
            report.set_file_result(&files.blob_files().path(logical), "blob", 0, Err(error));
        }
        for meta in partition.blob_files.values() {
            let outcome = verify_blob_file(&files.blob_files(), &cache, meta, &live);
            let values = outcome.as_ref().map_or(0, |values| *values);
            report.set_file_result(&files.blob_files().path(meta.number), "blob", values, outcome.map(drop));
            progress(meta.size);
        }
    }
}

/// Checks every page and record of the pools, and the key order if the comparator is available.
fn verify_pools(fs: &Arc<dyn Fs>, dir: &Path, manifest_state: &ManifestState, report: &mut VerifyReport) {
    let mapped = EngineKind::PmemMapped as u8;
    let has_pool_file = |p: &&PartitionManifestState| {
        p.meta.engine == mapped || p.meta.engine == EngineKind::Pmem as u8 && p.flushed_seqno > SeqNo::ZERO
    };
    for partition in manifest_state.partitions.values().filter(has_pool_file) {
        let path = dir.join(PoolFileKind::Pool.name(partition.meta.id));
        let records = verify_pool(fs, dir, partition);
        let count = records.as_ref().map_or(0, |records| *records);
        report.set_file_result(&path, "pool", count, records.map(drop).map_err(|error| error.in_file(&path)));
    }
}

/// Reads every record of a pool; returns their number. 0 for a pool that has no file yet.
pub(crate) fn verify_pool(fs: &Arc<dyn Fs>, dir: &Path, partition: &PartitionManifestState) -> Result<u64> {
    let options = PmemOptions::from_settings(&partition.meta.settings)?;
    let visible = LastVisibleSeqno::default();
    let location = PoolLocation {
        fs: Arc::clone(fs),
        env: Arc::new(SystemEnv::new()),
        dir: dir.to_path_buf(),
        partition: partition.meta.id,
        name: partition.meta.name.clone(),
        snapshots: SnapshotList::new(visible.clone()),
        visible,
        read_only: true,
        wal_bytes: 0,
    };
    let manifest_info = ManifestPoolInfo {
        created_mapped: partition.meta.engine == EngineKind::PmemMapped as u8,
        flushed_through: partition.flushed_seqno,
        file_id: partition.pool_file_id,
    };
    let stored = StoredPool::read(location, &manifest_info, &options)?;
    stored.verify(partition.meta.comparator == BYTEWISE_NAME, &options)
}

fn has_logical_file(partition: &PartitionManifestState, logical: FileNumber) -> bool {
    partition.blob_files.values().flat_map(|file| &file.sections).any(|section| section.logical_file == logical)
}

/// Checks a blob file, and that it contains every value of `live`. Returns its number of values.
fn verify_blob_file(files: &DataFiles, cache: &Arc<BlockCache>, meta: &BlobFileMeta, live: &LiveBlobs) -> Result<u64> {
    let file = BlobFile::new(files, Arc::clone(cache), meta.number, meta.size);
    let values = file.verify(meta)?;
    for section in &meta.sections {
        let Some(ordinals) = live.get(&section.logical_file) else { continue };
        let mut found = 0;
        for entry in file.section_entries(section.logical_file, 0)? {
            found += u64::from(ordinals.contains(entry?.0));
        }
        if found != ordinals.count() {
            return Err(
                Error::corruption("tables point to values that the blob file does not contain").in_file(file.path())
            );
        }
    }
    Ok(values)
}

/// Checks a table; returns the data block index type from its properties and the blob references of its entries.
pub(crate) fn verify_table(
    files: &DataFiles,
    cache: &Arc<BlockCache>,
    meta: &TableMeta,
    order: &KeyOrder,
    hash_seed: u64,
) -> Result<(Option<DataBlockIndexType>, BlobReferences)> {
    let options = TableReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_partitions: false };
    let path = files.path(meta.number);
    let table = TableReader::open(files, Arc::clone(cache), meta, order.clone(), hash_seed, options);
    let verified = table.and_then(|table| {
        table.verify()?;
        Ok((table.properties().data_block_index_type, table.blob_references()?))
    });
    verified.map_err(|error| error.in_file(path))
}

fn verify_wal(fs: &Arc<dyn Fs>, dir: &Path, manifest_state: &ManifestState, report: &mut VerifyReport) {
    let options = WalReplayOptions {
        mode: RecoveryMode::Strict,
        listed_segments: manifest_state.wal_segments.iter().map(|(epoch, file)| (*epoch, *file)).collect(),
        wal_end: manifest_state.wal_end,
        // The whole WAL is read, including records that no partition needs.
        durable_through: PartitionSeqno { seqno: manifest_state.durable_seqno(), partition: String::new() },
        file_number_limit: manifest_state.file_number_limit(),
        ..WalReplayOptions::default()
    };
    for file in manifest_state.wal_segments.values() {
        report.set_file_result(&segment_path(dir, *file), "log", 0, Ok(()));
    }
    let files = DataFiles::tables(Arc::clone(fs), dir, 8, FileAccess::buffered()).blob_files();
    let mut unfinished = UnfinishedBlobFiles::new(manifest_state, files.clone(), Arc::new(BlockCache::new(0)));
    let mut check = |commit: wal::WalCommit<'_>| {
        check_payload(commit.payload, commit.seqno_count)?;
        for record in WalRecordIter::new(commit.payload).filter(|_| commit.payload != SEQNO_GAP_PAYLOAD) {
            if record?.partition.0 >= manifest_state.next_partition_id {
                let message =
                    "a commit names a partition that the manifest does not know: the manifest has lost its end";
                return Ok(Some(Error::corruption(message).in_file(dir.join(MANIFEST_NAME))));
            }
        }
        unfinished.check_commit(&blob_pointers(&commit)?)
    };
    let replayed = wal::replay(Arc::clone(fs), dir, manifest_state.id, options, &mut check);
    for (id, found) in unfinished.unfinished_files() {
        report.set_file_result(&files.path(id), "blob", found.frames.len() as u64, Ok(()));
    }
    match replayed {
        Ok(replayed) => {
            for segment in &replayed.segments {
                report.set_file_result(&segment_path(dir, segment.file), "log", 0, Ok(()));
            }
            if let Some(first) = replayed.segments.first() {
                report.set_file_result(&segment_path(dir, first.file), "log", replayed.commits, Ok(()));
            }
            report.dropped_after_damage = replayed.dropped_after_damage;
        }
        Err(error) => {
            let path = error.file().map_or_else(|| dir.to_path_buf(), Path::to_path_buf);
            report.set_file_result(&path, "log", 0, Err(error));
        }
    }
}

/// Reads and checks one file without the manifest.
///
/// # Errors
/// `Io` if the file cannot be read. Damage is in the report.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::fs::{DiskFs, Fs};
/// use std::sync::Arc;
/// # azekura::Config::new(&path).open()?.close()?;
/// let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
/// let report = azekura::inspect::verify_file(&fs, &path.join("MANIFEST"))?;
/// assert_eq!((report.kind.as_str(), report.problem.is_none()), ("manifest", true));
/// # Ok(()) }
/// ```
pub fn verify_file(fs: &Arc<dyn Fs>, path: &Path) -> Result<FileReport> {
    let path = &*fs.absolute(path)?;
    let open = fs.open(path, OpenMode::Read)?;
    let bytes = open.length()?;
    let mut magic = [0; 8];
    let n = open.read_at(&mut magic, 0)?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (kind, outcome) = match (&magic[..n], parse_data_file_name(name)) {
        (b"AZEKTBL\n", Some((DataFileKind::Table, id))) => ("table", verify_lone_table(fs, dir, id)),
        (b"AZEKBLB\n", Some((DataFileKind::Blob, id))) => {
            ("blob", verify_lone_blob_file(fs, dir, id).map(|values| (values, None)))
        }
        (b"AZEKWAL\n", _) => {
            ("log", read_whole(&*open, bytes).and_then(|b| Ok((wal::scan_segment_bytes(&b)?.commits, None))))
        }
        (b"AZEKMAN\n", _) => {
            let edits = |b: Vec<u8>| Ok((manifest::decode_manifest(&b)?.edits.len() as u64, None));
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

fn verify_lone_table(fs: &Arc<dyn Fs>, dir: &Path, id: FileNumber) -> Result<(u64, Option<DataBlockIndexType>)> {
    let files = DataFiles::tables(Arc::clone(fs), dir, 1, FileAccess::buffered());
    let cache = Arc::new(BlockCache::new(0));
    let meta = TableReader::read_meta(&files, &cache, id)?;
    let comparator = TableReader::read_properties(&files, &cache, id)?.comparator;
    let (index_type, _) = verify_table(&files, &cache, &meta, &key_order_for_name(&comparator), 0)?;
    Ok((meta.entries, index_type))
}

fn verify_lone_blob_file(fs: &Arc<dyn Fs>, dir: &Path, id: FileNumber) -> Result<u64> {
    let files = DataFiles::tables(Arc::clone(fs), dir, 1, FileAccess::buffered()).blob_files();
    let cache = Arc::new(BlockCache::new(0));
    let meta = BlobFile::read_meta(&files, &cache, id)?;
    BlobFile::new(&files, cache, id, meta.size).verify(&meta)
}

/// Returns the last key that a damaged block of a table can have, from the index of the table. The offset is that of
/// the error of the block. `None` if no block begins there.
///
/// # Errors
/// `Io` or `Corruption` if the index cannot be read, `NotFound` if the manifest has no such table.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let table = azekura::inspect::tables(&fs, db.path())?[0].id;
/// let key = azekura::inspect::last_key_of_block(&fs, db.path(), table, 64)?; // the first block follows the header
/// assert!(key.unwrap() >= b"apple".to_vec());
/// # Ok(()) }
/// ```
pub fn last_key_of_block(fs: &Arc<dyn Fs>, dir: &Path, table: u64, offset: u64) -> Result<Option<Vec<u8>>> {
    let dir = &*fs.absolute(dir)?;
    let manifest_state = read_manifest_state(fs, dir)?.0;
    let mut partitions = manifest_state.partitions.values();
    let found = partitions.find_map(|p| Some((p, p.all_tables().find(|meta| meta.number.0 == table)?)));
    let (partition, meta) =
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the manifest has no table {table}")))?;
    let files = DataFiles::tables(Arc::clone(fs), dir, 1, FileAccess::buffered());
    let options = TableReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_partitions: false };
    let order = key_order_for_name(&partition.meta.comparator);
    TableReader::open(&files, Arc::new(BlockCache::new(0)), meta, order, manifest_state.hash_seed, options)?
        .last_key_of_block(offset)
}

/// The id of a new instance of a database.
pub(crate) fn random_instance() -> [u8; 16] {
    let mut instance = [0; 16];
    SystemEnv::new().random(&mut instance);
    instance
}

pub(crate) fn read_whole(file: &dyn File, len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let len = usize::try_from(len).ok().filter(|len| bytes.try_reserve_exact(*len).is_ok());
    bytes.resize(len.ok_or_else(|| Error::corruption("no memory for a file of this length"))?, 0);
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Returns the key order for a comparator name.
fn key_order_for_name(comparator: &str) -> KeyOrder {
    match comparator {
        BYTEWISE_NAME => KeyOrder::bytewise(),
        name => KeyOrder::custom(Arc::new(UnknownComparator(name.to_owned()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::{BlobFileSection, PartitionEdit, PartitionId, PartitionMeta, VersionEdit};
    use crate::testing::MemFs;

    /// Regression: the sums of damaged figures overflowed.
    #[test]
    fn damaged_blob_figures_are_reported() {
        let (fs, dir): (Arc<dyn Fs>, _) = (Arc::new(MemFs::new()), Path::new("/db"));
        fs.create_dir_all(dir).unwrap();
        let id = PartitionId(1);
        let (name, comparator) = ("p".to_owned(), BYTEWISE_NAME.to_owned());
        let partition = PartitionMeta { id, engine: EngineKind::Lsm as u8, name, comparator, settings: Vec::new() };
        let (values, bytes, rewritten) = (u64::MAX, u64::MAX, false);
        let section = |file| BlobFileSection { logical_file: FileNumber(file), values, bytes, rewritten };
        let file = BlobFileMeta { number: FileNumber(2), size: 1, created_ms: 0, sections: [2, 3].map(section).into() };
        let edits = [
            VersionEdit::Database { id: [1; 16], instance: [2; 16], hash_seed: 0, created_ms: 0 },
            VersionEdit::PartitionCreated(partition),
            PartitionEdit::BlobFileAdded { file }.of(id),
        ];
        drop(Manifest::create(Arc::clone(&fs), dir, [1; 16], &edits).unwrap());
        let report = &blobs(&fs, dir).unwrap()[0];
        assert_eq!((report.values, report.value_bytes), (u64::MAX, u64::MAX));
    }
}
