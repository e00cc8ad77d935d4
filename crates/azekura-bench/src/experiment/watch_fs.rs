//! A file system that forwards to the disk and counts: bytes written by kind of file, and the reads that reach a
//! simulated disk with one head.
//!
//! The clock of the simulated disk is virtual: its time follows from the number of seeks and bytes. All threads share
//! one disk. The file system can also claim that mapped files survive power loss: the engine then flushes and fences
//! every persistent store by the processor's own instructions.

use azekura::fs::{DirEntry, DiskFs, File, FileLock, Fs, LockMode, MappedMemory, Mapping, OpenMode};
use azekura::{PersistenceLevel, Result};
use derive_more::{Debug, Sub};
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Written {
    pub(crate) log: u64,
    pub(crate) tables: u64,
    pub(crate) blobs: u64,
    /// The manifest and other small files.
    pub(crate) other: u64,
}

impl Written {
    pub(crate) fn without_log(self) -> u64 {
        self.tables + self.blobs + self.other
    }

    fn add(&mut self, extension: &str, bytes: u64) {
        *match extension {
            "wal" => &mut self.log,
            "sst" => &mut self.tables,
            "blob" => &mut self.blobs,
            _ => &mut self.other,
        } += bytes;
    }
}

#[derive(Debug, Default)]
struct Counters {
    /// File and end of the last read.
    position: Option<(u64, u64)>,
    traffic: Traffic,
    written: Written,
    /// Files opened so far; each opening has its own position on the disk.
    files: u64,
}

impl Counters {
    /// Counts a read. If it continues the previous one, their common sector counts once.
    fn read(&mut self, file: u64, offset: u64, len: u64) {
        if len == 0 {
            return; // the length of the file is known without the disk
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

/// The file system. A clone has the same counters.
#[derive(Clone, Debug)]
pub(crate) struct WatchFs {
    inner: Arc<dyn Fs>,
    counters: Arc<Mutex<Counters>>,
    /// Whether direct I/O is forwarded; otherwise the page cache serves it.
    direct: bool,
    /// Whether mapped files are said to survive power loss.
    persistent: bool,
}

impl WatchFs {
    /// The machine's file system.
    pub(crate) fn on_disk(direct: bool, persistent: bool) -> WatchFs {
        WatchFs { inner: Arc::new(DiskFs::new()), counters: Arc::default(), direct, persistent }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.counters().traffic
    }

    pub(crate) fn written(&self) -> Written {
        self.counters().written
    }

    fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().expect("a thread panicked while it counted")
    }

    fn opened(&self, path: &Path, inner: Result<Arc<dyn File>>) -> Result<Arc<dyn File>> {
        let extension = path.extension().map_or_else(String::new, |end| end.to_string_lossy().into_owned());
        let mut counters = self.counters();
        counters.files += 1;
        let id = counters.files;
        Ok(Arc::new(Watched { inner: inner?, id, extension, fs: self.clone() }))
    }
}

/// Methods that only forward to `inner`.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.inner.$name($($argument),*)
        })*
    };
}

impl Fs for WatchFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, self.inner.open(path, mode))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, if self.direct { self.inner.open_direct(path, mode) } else { self.inner.open(path, mode) })
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        if self.persistent { PersistenceLevel::PowerLoss } else { self.inner.persistence_level(dir) }
    }

    forward! {
        create_dir_all(path: &Path) -> Result<()>;
        read_dir(path: &Path) -> Result<Vec<DirEntry>>;
        exists(path: &Path) -> Result<bool>;
        rename(from: &Path, to: &Path) -> Result<()>;
        remove_file(path: &Path) -> Result<()>;
        remove_dir_all(path: &Path) -> Result<()>;
        hard_link(from: &Path, to: &Path) -> Result<()>;
        sync_dir(path: &Path) -> Result<()>;
        lock(path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>>;
        overwrites_in_place(dir: &Path) -> bool;
    }
}

/// An open file, or a mapping of one.
#[derive(Debug)]
struct Watched<T> {
    #[debug(skip)]
    inner: T,
    id: u64,
    extension: String,
    #[debug(skip)]
    fs: WatchFs,
}

impl<T> Watched<T> {
    fn watch<M>(&self, inner: M) -> Watched<M> {
        Watched { inner, id: self.id, extension: self.extension.clone(), fs: self.fs.clone() }
    }

    fn wrote(&self, bytes: &[u8]) {
        self.fs.counters().written.add(&self.extension, bytes.len() as u64);
    }
}

impl File for Watched<Arc<dyn File>> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let got = self.inner.read_at(buf, offset)?;
        self.fs.counters().read(self.id, offset, got as u64);
        Ok(got)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        self.wrote(bytes);
        Ok(())
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        Ok(self.inner.map(len)?.map(|inner| Box::new(self.watch(inner)) as Box<dyn Mapping>))
    }

    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        Ok(self.inner.map_memory(len)?.map(|inner| Box::new(self.watch(inner)) as Box<dyn MappedMemory>))
    }

    forward! {
        length() -> Result<u64>;
        set_length(len: u64) -> Result<()>;
        allocate(len: u64) -> Result<()>;
        allocate_from(from: u64, len: u64) -> Result<()>;
        sync_data() -> Result<()>;
        sync_all() -> Result<()>;
    }
}

impl Mapping for Watched<Box<dyn Mapping>> {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        self.inner.write_at(bytes, offset);
        self.wrote(bytes);
    }

    forward! { populate(offset: u64, len: u64) -> Result<()>; }
}

impl MappedMemory for Watched<Box<dyn MappedMemory>> {
    forward! { atomic_words() -> &[AtomicU64]; }

    fn survives_power_loss(&self) -> bool {
        self.fs.persistent || self.inner.survives_power_loss()
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
        // Values of 4 KiB or more are not in the log.
        (0..250u32).for_each(|i| pages.insert(i.to_be_bytes(), vec![7; 2_000]).unwrap());
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
