//! What the engine writes, by kind of file: a file system that passes everything on and counts the bytes handed to it.

use azekura::Result;
use azekura::fs::{DirEntry, DiskFs, File, FileLock, Fs, LockMode, Mapping, OpenMode};
use serde::{Deserialize, Serialize};
use std::ops::Sub;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes written, by kind of file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) log: u64,
    pub(super) tables: u64,
    pub(super) blobs: u64,
    /// The manifest and the like.
    pub(super) other: u64,
}

impl Written {
    pub(super) fn without_log(self) -> u64 {
        self.tables + self.blobs + self.other
    }
}

impl Sub for Written {
    type Output = Written;

    fn sub(self, earlier: Written) -> Written {
        Written {
            log: self.log.saturating_sub(earlier.log),
            tables: self.tables.saturating_sub(earlier.tables),
            blobs: self.blobs.saturating_sub(earlier.blobs),
            other: self.other.saturating_sub(earlier.other),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Log,
    Tables,
    Blobs,
    Other,
}

/// The counters, in the order of [`Kind`].
#[derive(Debug, Default)]
struct Counters([AtomicU64; 4]);

impl Counters {
    fn add(&self, kind: Kind, bytes: usize) {
        self.0[kind as usize].fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// The file system. A clone counts together with it. Thread safe.
#[derive(Clone, Debug)]
pub(super) struct TallyFs {
    inner: Arc<dyn Fs>,
    counters: Arc<Counters>,
}

impl TallyFs {
    /// Of the disk.
    pub(super) fn new() -> TallyFs {
        TallyFs::on(Arc::new(DiskFs::new()))
    }

    fn on(inner: Arc<dyn Fs>) -> TallyFs {
        TallyFs { inner, counters: Arc::default() }
    }

    /// What was written so far.
    pub(super) fn written(&self) -> Written {
        let [log, tables, blobs, other] = self.counters.0.each_ref().map(|counter| counter.load(Ordering::Relaxed));
        Written { log, tables, blobs, other }
    }

    fn opened(&self, path: &Path, inner: Result<Arc<dyn File>>) -> Result<Arc<dyn File>> {
        let kind = match path.extension().and_then(|end| end.to_str()) {
            Some("wal") => Kind::Log,
            Some("sst") => Kind::Tables,
            Some("blob") => Kind::Blobs,
            _ => Kind::Other,
        };
        Ok(Arc::new(TallyFile { inner: inner?, kind, counters: Arc::clone(&self.counters) }))
    }
}

impl Fs for TallyFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, self.inner.open(path, mode))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.opened(path, self.inner.open_direct(path, mode))
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
}

#[derive(Debug)]
struct TallyFile {
    inner: Arc<dyn File>,
    kind: Kind,
    counters: Arc<Counters>,
}

impl File for TallyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        self.counters.add(self.kind, bytes.len());
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

    fn sync_data(&self) -> Result<()> {
        self.inner.sync_data()
    }

    fn sync_all(&self) -> Result<()> {
        self.inner.sync_all()
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        let counters = Arc::clone(&self.counters);
        let tallied = |inner| Box::new(TallyMapping { inner, kind: self.kind, counters }) as Box<dyn Mapping>;
        Ok(self.inner.map(len)?.map(tallied))
    }
}

struct TallyMapping {
    inner: Box<dyn Mapping>,
    kind: Kind,
    counters: Arc<Counters>,
}

impl std::fmt::Debug for TallyMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl Mapping for TallyMapping {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        self.inner.write_at(bytes, offset);
        self.counters.add(self.kind, bytes.len());
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.populate(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::{TallyFs, Written};
    use azekura::fs::{Fs, MemFs, OpenMode};
    use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
    use std::path::Path;
    use std::sync::Arc;

    #[test]
    fn bytes_are_counted_by_the_kind_of_their_file() {
        let fs = TallyFs::on(Arc::new(MemFs::new()));
        fs.create_dir_all(Path::new("/dir")).unwrap();
        for (name, bytes) in [("1.wal", 1), ("2.sst", 20), ("3.blob", 300), ("MANIFEST", 4000)] {
            let file = fs.open(&Path::new("/dir").join(name), OpenMode::Create).unwrap();
            file.write_at(&vec![1; bytes], 0).unwrap();
            file.read_exact_at(&mut [0; 1], 0).unwrap();
        }
        assert_eq!(fs.written(), Written { log: 1, tables: 20, blobs: 300, other: 4000 });
        assert_eq!(fs.written().without_log(), 4320);
        let file = fs.open_direct(Path::new("/dir/3.blob"), OpenMode::Write).unwrap();
        file.write_at(&[1; 5], 0).unwrap();
        assert_eq!(
            fs.clone().written() - Written { blobs: 300, ..Written::default() },
            Written { log: 1, tables: 20, blobs: 5, other: 4000 }
        );
    }

    #[test]
    fn what_a_database_writes_is_what_its_files_have() {
        let dir = tempfile::tempdir().unwrap();
        let fs = TallyFs::new();
        let path = dir.path().join("db");
        let db = Config::new(&path).fs(Arc::new(fs.clone())).open().unwrap();
        let apart = KvSeparationOptions::default().compression(azekura::CompressionType::None);
        let options = PartitionCreateOptions::default().with_kv_separation(apart);
        let pages = db.open_partition("pages", options).unwrap();
        (0..50u32).for_each(|i| pages.insert(i.to_be_bytes(), vec![7; 10_000]).unwrap());
        pages.flush().unwrap();
        let (written, metrics) = (fs.written(), pages.metrics());
        let blobs: u64 = metrics.blob_files.iter().map(|file| file.bytes).sum();
        let tables: u64 = metrics.levels.iter().map(|level| level.bytes).sum();
        assert_eq!((written.blobs, written.tables), (blobs, tables), "{written:?}");
        assert!(blobs > 500_000 && tables > 500 && written.log > 500_000 && written.other > 100, "{written:?}");
    }
}
