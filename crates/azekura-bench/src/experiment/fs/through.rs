//! A file system that passes everything on and tells somebody what is read and written.

use azekura::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode, Words};
use azekura::{PersistenceLevel, Result};
use std::fmt::{Debug, Formatter};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Who is told. Many threads tell at the same time.
pub(crate) trait Watch: Debug + Send + Sync + 'static {
    /// What an open file is known by.
    type Known: Copy + Debug + Send + Sync;

    /// A file is opened.
    fn opened(&self, path: &Path) -> Self::Known;

    /// So many bytes were read there.
    fn read(&self, file: Self::Known, offset: u64, bytes: u64);

    /// So many bytes were written, also by way of a mapping.
    fn wrote(&self, file: Self::Known, bytes: u64);
}

/// The file system. A clone tells the same one.
#[derive(Debug)]
pub(crate) struct ThroughFs<W> {
    inner: Arc<dyn Fs>,
    pub(super) watch: Arc<W>,
    /// Whether what is asked for past the cache of the system is opened so in fact.
    direct: bool,
    /// Whether files are said to survive power loss when they are used as memory.
    persistent: bool,
}

impl<W> Clone for ThroughFs<W> {
    fn clone(&self) -> ThroughFs<W> {
        ThroughFs { inner: Arc::clone(&self.inner), watch: Arc::clone(&self.watch), ..*self }
    }
}

impl<W: Watch> ThroughFs<W> {
    pub(super) fn on(inner: Arc<dyn Fs>, watch: W, direct: bool) -> ThroughFs<W> {
        ThroughFs { inner, watch: Arc::new(watch), direct, persistent: false }
    }

    pub(super) fn taken_for_persistent(inner: Arc<dyn Fs>, watch: W) -> ThroughFs<W> {
        ThroughFs { persistent: true, ..ThroughFs::on(inner, watch, true) }
    }

    fn opened(&self, path: &Path, inner: Result<Arc<dyn File>>) -> Result<Arc<dyn File>> {
        let (inner, known, watch) = (inner?, self.watch.opened(path), Arc::clone(&self.watch));
        Ok(Arc::new(ThroughFile { inner, known, watch, persistent: self.persistent }))
    }
}

impl<W: Watch> Fs for ThroughFs<W> {
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

    fn memory_level(&self, dir: &Path) -> PersistenceLevel {
        if self.persistent { PersistenceLevel::Power } else { self.inner.memory_level(dir) }
    }
}

/// An open file.
#[derive(Debug)]
struct ThroughFile<W: Watch> {
    inner: Arc<dyn File>,
    known: W::Known,
    watch: Arc<W>,
    persistent: bool,
}

impl<W: Watch> File for ThroughFile<W> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let got = self.inner.read_at(buf, offset)?;
        self.watch.read(self.known, offset, got as u64);
        Ok(got)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        self.watch.wrote(self.known, bytes.len() as u64);
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
        let (known, watch) = (self.known, Arc::clone(&self.watch));
        let watched = |inner| Box::new(ThroughMapping { inner, known, watch }) as Box<dyn Mapping>;
        Ok(self.inner.map(len)?.map(watched))
    }

    fn map_words(&self, len: u64) -> Result<Option<Box<dyn Words>>> {
        let words = self.inner.map_words(len)?;
        let lasting = |words| Box::new(LastingWords(words)) as Box<dyn Words>;
        Ok(if self.persistent { words.map(lasting) } else { words })
    }
}

/// A mapping of an open file.
struct ThroughMapping<W: Watch> {
    inner: Box<dyn Mapping>,
    known: W::Known,
    watch: Arc<W>,
}

impl<W: Watch> Debug for ThroughMapping<W> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}

impl<W: Watch> Mapping for ThroughMapping<W> {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        self.inner.write_at(bytes, offset);
        self.watch.wrote(self.known, bytes.len() as u64);
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.populate(offset, len)
    }
}

/// Words that are said to survive power loss.
#[derive(Debug)]
struct LastingWords(Box<dyn Words>);

impl Words for LastingWords {
    fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }

    fn survives_power_loss(&self) -> bool {
        true
    }
}
