//! A file system that passes everything on and counts: bytes written by kind of file, and the reads that reach a
//! simulated disk with one head.
//!
//! The clock of the disk is virtual: its time follows from the number of seeks and bytes. One disk serves all threads.
//! The file system can also claim that files used as memory survive power loss: the engine then flushes and fences
//! every persistent store by the processor's own instructions, at their cost on such memory, except for the speed of
//! the memory itself.

use azekura::fs::{DirEntry, DiskFs, File, FileLock, Fs, LockMode, MappedMemory, Mapping, OpenMode};
use azekura::{PersistenceLevel, Result};
use derive_more::Sub;
use serde::Serialize;
use std::fmt::{Debug, Formatter};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Direct reads are done in whole sectors.
pub(crate) const SECTOR: u64 = 4096;

/// Speed of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct DiskSpeed {
    pub(crate) seeks_per_s: f64,
    pub(crate) bytes_per_s: f64,
}

/// Reads that reached the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Sub)]
pub(crate) struct Traffic {
    pub(crate) reads: u64,
    /// Reads that did not continue the previous one.
    pub(crate) seeks: u64,
    /// Bytes of whole sectors.
    pub(crate) bytes: u64,
}

impl Traffic {
    /// Seconds that a disk of that speed needs.
    pub(crate) fn seconds(&self, speed: DiskSpeed) -> f64 {
        self.seeks as f64 / speed.seeks_per_s + self.bytes as f64 / speed.bytes_per_s
    }
}

/// Bytes written, by kind of file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Sub)]
pub(crate) struct Written {
    pub(crate) log: u64,
    pub(crate) tables: u64,
    pub(crate) blobs: u64,
    /// Manifest and the like.
    pub(crate) other: u64,
}

impl Written {
    pub(crate) fn without_log(self) -> u64 {
        self.tables + self.blobs + self.other
    }
}

#[derive(Debug, Default)]
struct Counters {
    /// File and end of the last read.
    position: Option<(u64, u64)>,
    traffic: Traffic,
    written: Written,
}

impl Counters {
    /// Counts a read. Of a read that continues the previous one, the sector at the seam was read already.
    fn read(&mut self, file: u64, offset: u64, len: u64) {
        if len == 0 {
            return; // the end of the file is known without the disk
        }
        let continues = self.position == Some((file, offset));
        let first = if continues { offset.div_ceil(SECTOR) } else { offset / SECTOR };
        let end = offset.saturating_add(len);
        self.traffic.reads += 1;
        self.traffic.seeks += u64::from(!continues);
        self.traffic.bytes += end.div_ceil(SECTOR).saturating_sub(first) * SECTOR;
        self.position = Some((file, end));
    }
}

/// What open files share. Reads of many threads reach the disk one after the other.
#[derive(Debug, Default)]
struct WatchState {
    counters: Mutex<Counters>,
    /// Files opened so far; each opening has a place of its own on the disk.
    files: AtomicU64,
}

/// The kinds of files, by extension.
#[derive(Clone, Copy, Debug)]
enum FileKind {
    Log,
    Table,
    Blob,
    Other,
}

impl WatchState {
    fn with<T>(&self, act: impl FnOnce(&mut Counters) -> T) -> T {
        act(&mut self.counters.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wrote(&self, kind: FileKind, bytes: u64) {
        self.with(|counters| match kind {
            FileKind::Log => counters.written.log += bytes,
            FileKind::Table => counters.written.tables += bytes,
            FileKind::Blob => counters.written.blobs += bytes,
            FileKind::Other => counters.written.other += bytes,
        });
    }
}

/// The file system. A clone has the same counters.
#[derive(Clone, Debug)]
pub(crate) struct WatchFs {
    inner: Arc<dyn Fs>,
    watch: Arc<WatchState>,
    /// Whether direct I/O is passed on; otherwise the page cache serves it.
    direct: bool,
    /// Whether files used as memory are said to survive power loss.
    persistent: bool,
}

impl WatchFs {
    /// The machine's file system.
    pub(crate) fn on_disk(direct: bool, persistent: bool) -> WatchFs {
        WatchFs { inner: Arc::new(DiskFs::new()), watch: Arc::default(), direct, persistent }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.watch.with(|counters| counters.traffic)
    }

    pub(crate) fn written(&self) -> Written {
        self.watch.with(|counters| counters.written)
    }

    fn opened(&self, path: &Path, inner: Result<Arc<dyn File>>) -> Result<Arc<dyn File>> {
        let kind = match path.extension().and_then(|end| end.to_str()) {
            Some("wal") => FileKind::Log,
            Some("sst") => FileKind::Table,
            Some("blob") => FileKind::Blob,
            _ => FileKind::Other,
        };
        let (id, watch) = (self.watch.files.fetch_add(1, Ordering::Relaxed), Arc::clone(&self.watch));
        Ok(Arc::new(WatchedFile { inner: inner?, id, kind, watch, persistent: self.persistent }))
    }
}

impl Fs for WatchFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, self.inner.open(path, mode))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, if self.direct { self.inner.open_direct(path, mode) } else { self.inner.open(path, mode) })
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.create_dir_all(path)
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.inner.read_dir(path)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        self.inner.exists(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.inner.remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.remove_dir_all(path)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.hard_link(from, to)
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.inner.sync_dir(path)
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.inner.lock(path, mode)
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.inner.overwrites_in_place(dir)
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        if self.persistent { PersistenceLevel::PowerLoss } else { self.inner.persistence_level(dir) }
    }
}

#[derive(Debug)]
struct WatchedFile {
    inner: Arc<dyn File>,
    id: u64,
    kind: FileKind,
    watch: Arc<WatchState>,
    persistent: bool,
}

impl File for WatchedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let got = self.inner.read_at(buf, offset)?;
        self.watch.with(|counters| counters.read(self.id, offset, got as u64));
        Ok(got)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        self.watch.wrote(self.kind, bytes.len() as u64);
        Ok(())
    }

    fn length(&self) -> Result<u64> {
        self.inner.length()
    }

    fn set_length(&self, len: u64) -> Result<()> {
        self.inner.set_length(len)
    }

    fn allocate(&self, len: u64) -> Result<()> {
        self.inner.allocate(len)
    }

    fn allocate_from(&self, from: u64, len: u64) -> Result<()> {
        self.inner.allocate_from(from, len)
    }

    fn sync_data(&self) -> Result<()> {
        self.inner.sync_data()
    }

    fn sync_all(&self) -> Result<()> {
        self.inner.sync_all()
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        let (kind, watch) = (self.kind, Arc::clone(&self.watch));
        let watched = |inner| Box::new(WatchedMapping { inner, kind, watch }) as Box<dyn Mapping>;
        Ok(self.inner.map(len)?.map(watched))
    }

    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        let words = self.inner.map_memory(len)?;
        let persistent = |words| Box::new(PersistentWords(words)) as Box<dyn MappedMemory>;
        Ok(if self.persistent { words.map(persistent) } else { words })
    }
}

struct WatchedMapping {
    inner: Box<dyn Mapping>,
    kind: FileKind,
    watch: Arc<WatchState>,
}

impl Debug for WatchedMapping {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Mapping for WatchedMapping {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        self.inner.write_at(bytes, offset);
        self.watch.wrote(self.kind, bytes.len() as u64);
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.populate(offset, len)
    }
}

/// Mapped memory that is said to survive power loss.
#[derive(Debug)]
struct PersistentWords(Box<dyn MappedMemory>);

impl MappedMemory for PersistentWords {
    fn atomic_words(&self) -> &[AtomicU64] {
        self.0.atomic_words()
    }

    fn survives_power_loss(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{Counters, DiskSpeed, SECTOR, Traffic, WatchFs};
    use azekura::fs::{Fs, OpenMode};
    use azekura::{CompressionType, Config, KvSeparationOptions, PartitionCreateOptions, PersistenceLevel};
    use std::sync::Arc;

    #[test]
    fn seeks_and_whole_sectors_are_counted() {
        let mut disk = Counters::default();
        let mut after = |file, offset, len| {
            disk.read(file, offset, len);
            (disk.traffic.reads, disk.traffic.seeks, disk.traffic.bytes / SECTOR)
        };
        assert_eq!(after(0, 4000, 200), (1, 1, 2));
        assert_eq!(after(0, 4200, 100), (2, 1, 2), "the sector at the seam counts once");
        assert_eq!(after(0, 4300, 4000), (3, 1, 3));
        assert_eq!(after(0, 4300, 10), (4, 2, 4));
        assert_eq!(after(1, 4310, 10), (5, 3, 5), "another file");
        assert_eq!(after(1, 9999, 0), (5, 3, 5), "the end of a file is no read");
        let slow = DiskSpeed { seeks_per_s: 100.0, bytes_per_s: 1e6 };
        let traffic = Traffic { reads: 100, seeks: 1, bytes: 100 * SECTOR };
        assert!((traffic.seconds(slow) - 0.4196).abs() < 1e-9);
        assert_eq!((traffic - Traffic { reads: 1, seeks: 1, bytes: SECTOR }).bytes, 99 * SECTOR);
    }

    #[test]
    fn written_bytes_are_those_of_the_files() {
        let (dir, fs) = (tempfile::tempdir().unwrap(), WatchFs::on_disk(true, false));
        let db = Config::new(dir.path().join("db")).fs(Arc::new(fs.clone())).open().unwrap();
        let separated = KvSeparationOptions::default().compression(CompressionType::None);
        let pages =
            db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separated)).unwrap();
        (0..50u32).for_each(|i| pages.insert(i.to_be_bytes(), vec![7; 10_000]).unwrap());
        pages.flush().unwrap();
        let (written, metrics) = (fs.written(), pages.metrics());
        let blobs: u64 = metrics.blob_files.iter().map(|file| file.bytes).sum();
        let tables: u64 = metrics.levels.iter().map(|level| level.bytes).sum();
        assert_eq!((written.blobs, written.tables), (blobs, tables), "{written:?}");
        assert!(blobs > 500_000 && tables > 500 && written.log > 500_000 && written.other > 100, "{written:?}");
        assert!(fs.traffic().reads > 0);
    }

    #[test]
    fn persistent_files_claim_to_survive_power_loss() {
        let (dir, fs) = (tempfile::tempdir().unwrap(), WatchFs::on_disk(true, true));
        assert_eq!(fs.persistence_level(dir.path()), PersistenceLevel::PowerLoss);
        let file = fs.open(&dir.path().join("some"), OpenMode::Create).unwrap();
        file.allocate(4096).unwrap();
        let words = file.map_memory(1 << 20).unwrap().unwrap();
        assert!(words.survives_power_loss() && words.atomic_words().len() == 1 << 17);
    }
}
