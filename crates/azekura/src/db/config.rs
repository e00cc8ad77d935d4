//! Configuration of a database: settings with their ranges and defaults, and the components it uses.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::event::Listener;
use crate::base::{Error, Result};
use crate::vfs::disk::DiskFs;
use crate::vfs::env::SystemEnv;
use crate::vfs::open_files::DirectIo;
use crate::vfs::{Env, Fs};
use crate::wal::RecoveryMode;

/// The durability that a commit must have before it returns.
///
/// `DURABILITY.md` describes which failures each mode survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PersistMode {
    /// Survives a crash of the process at any instruction. Power loss may remove the newest commits; it removes whole
    /// commits, newest first.
    #[default]
    Buffer,
    /// Survives power loss: the bytes of the write-ahead log (WAL) are synced with `fdatasync`.
    SyncData,
    /// Survives power loss: the bytes and all file metadata of the WAL are synced with `fsync`.
    SyncAll,
}

/// A durability rule that a test disables, to show that the crash tests detect its absence.
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(unreachable_pub, reason = "exported with the feature `testing` only")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// A flush commits its tables to the manifest before the WAL records in them are durable.
    FlushBeforeWalSync,
    /// A WAL sync does not first sync the blob files that its records point to.
    WalSyncBeforeBlobs,
}

/// The settings of a database, as plain data.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Settings {
    pub(crate) cache_size: u64,
    pub(crate) memory_budget: u64,
    pub(crate) sync_interval_ms: Option<u64>,
    pub(crate) durability: PersistMode,
    pub(crate) workers: usize,
    pub(crate) compression: CompressionType,
    pub(crate) max_open_files: usize,
    pub(crate) direct_io: DirectIo,
    pub(crate) wal_segment_size: u64,
    pub(crate) max_wal_size: u64,
    pub(crate) disk_reserve: u64,
    pub(crate) mapped_wal: bool,
    pub(crate) recovery_mode: RecoveryMode,
    #[cfg(any(test, feature = "testing"))]
    pub(crate) planted_bug: Option<PlantedBug>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            cache_size: 64 << 20,
            memory_budget: 512 << 20,
            sync_interval_ms: None,
            durability: PersistMode::Buffer,
            workers: 2,
            compression: CompressionType::Lz4,
            max_open_files: 512,
            direct_io: DirectIo::default(),
            wal_segment_size: 64 << 20,
            max_wal_size: 512 << 20,
            disk_reserve: 128 << 20,
            mapped_wal: true,
            recovery_mode: RecoveryMode::Strict,
            #[cfg(any(test, feature = "testing"))]
            planted_bug: None,
        }
    }
}

impl Settings {
    /// Whether a test has disabled this durability rule. Always false without the feature `testing`.
    pub(crate) fn has_planted_bug(&self, bug: PlantedBug) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.planted_bug == Some(bug);
        #[cfg(not(any(test, feature = "testing")))]
        {
            let _unused: PlantedBug = bug;
            false
        }
    }
}

/// Builds a [`Database`](crate::Database) from settings and components (file system, environment, listener).
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// let db = azekura::Config::new(&path).cache_size(16 << 20).open()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Config {
    pub(crate) path: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) listener: Option<Arc<dyn Listener>>,
}

impl Default for Config {
    /// Uses the directory `.azekura_data` in the current working directory.
    fn default() -> Config {
        Config::new(".azekura_data")
    }
}

impl Config {
    /// Creates a configuration with default settings for the database in the directory `path`.
    ///
    /// Opening creates the directory if it is missing. A relative path is made absolute at open, so a later change of
    /// the working directory has no effect. While the database is open, do not rename the directory, one of its
    /// parents, or a symbolic link in its path.
    pub fn new(path: impl AsRef<Path>) -> Config {
        Config {
            path: path.as_ref().to_path_buf(),
            settings: Settings::default(),
            fs: Arc::new(DiskFs::new()),
            env: Arc::new(SystemEnv::new()),
            listener: None,
        }
    }

    /// Sets the capacity of the block cache in bytes, 0 to 2^50. Default 64 MiB.
    #[must_use]
    pub fn cache_size(mut self, bytes: u64) -> Config {
        self.settings.cache_size = bytes;
        self
    }

    /// Sets the bytes that the memtables of all partitions may use, 1 MiB to 2^50. Default 512 MiB.
    ///
    /// A batch larger than half the budget is rejected with `Invalid`.
    ///
    /// When active memtables use more than half the budget, the largest one is flushed. When all memtables together
    /// exceed the budget, writers wait for a flush. The budget does not bound two uses. Each partition may keep up to
    /// 64 KiB that is not flushed because of the budget, so that tables do not become tiny. An iterator keeps the
    /// memtables that it reads after they were flushed; [`Metrics::pinned_memtable_bytes`](crate::Metrics) reports
    /// these bytes. Pinned memtables slow writers down to the speed of flushes but never stop them. With
    /// [`workers(0)`](Config::workers) memtables are sealed by the same rule, but writers do not wait: memory grows
    /// until [`Database::step`](crate::Database::step) has flushed.
    #[must_use]
    pub fn memory_budget(mut self, bytes: u64) -> Config {
        self.settings.memory_budget = bytes;
        self
    }

    /// Sets the interval in milliseconds at which a background thread syncs the WAL, 1 to 2^40. Default `None`: no
    /// periodic sync.
    ///
    /// The interval applies in addition to the durability of each commit.
    ///
    /// A dedicated thread syncs, so flushes and compactions do not delay it: a commit stays unsynced for at most the
    /// interval plus the time of two syncs. With [`workers(0)`](Config::workers) there is no such thread:
    /// [`Database::step`](crate::Database::step) syncs first if the interval has passed.
    #[must_use]
    pub fn sync_interval(mut self, ms: Option<u64>) -> Config {
        self.settings.sync_interval_ms = ms;
        self
    }

    /// Sets the durability of commits that do not choose one. Default [`PersistMode::Buffer`].
    #[must_use]
    pub fn durability(mut self, mode: PersistMode) -> Config {
        self.settings.durability = mode;
        self
    }

    /// Sets the number of background threads, 0 to 64. Default 2.
    ///
    /// With 0 no background work runs until the caller calls [`Database::step`](crate::Database::step), which makes a
    /// test deterministic.
    #[must_use]
    pub fn workers(mut self, n: usize) -> Config {
        self.settings.workers = n;
        self
    }

    /// Sets the compression codec of partitions that do not choose one. Default [`CompressionType::Lz4`].
    #[must_use]
    pub fn compression(mut self, compression: CompressionType) -> Config {
        self.settings.compression = compression;
        self
    }

    /// Sets how many tables and blob files are open at a time, 8 to 2^20. Default 512.
    ///
    /// If the file descriptor limit of the process is lower, the database uses half of the descriptors that are free
    /// at open. If the process or the system runs out of descriptors later, the database closes some of these files
    /// and retries.
    #[must_use]
    pub fn max_open_files(mut self, n: usize) -> Config {
        self.settings.max_open_files = n;
        self
    }

    /// Sets whether reads and writes of tables bypass the page cache of the operating system. Default
    /// [`DirectIo::Automatic`]. The WAL always uses the page cache.
    #[must_use]
    pub fn direct_io(mut self, mode: DirectIo) -> Config {
        self.settings.direct_io = mode;
        self
    }

    /// Sets the size of a WAL segment in bytes, 64 KiB to 1 GiB. Default 64 MiB.
    #[must_use]
    pub fn wal_segment_size(mut self, bytes: u64) -> Config {
        self.settings.wal_segment_size = bytes;
        self
    }

    /// Sets the WAL size in bytes above which partitions are flushed to free the oldest segment, from
    /// [`wal_segment_size`](Config::wal_segment_size) to 2^50. Default 512 MiB.
    ///
    /// These flushes run before any compaction. The WAL still grows by the records that are written during these
    /// flushes. No segment is removed while a checkpoint copies the WAL. If the comparator of a partition was not given
    /// since open, its records are moved to tables, and are read back into memory when the comparator is given.
    #[must_use]
    pub fn max_wal_size(mut self, bytes: u64) -> Config {
        self.settings.max_wal_size = bytes;
        self
    }

    /// Sets the maximum size of the disk reserve in bytes, 0 (no reserve) to 2^50. Default 128 MiB.
    ///
    /// The reserve is a file that holds disk space for recovery from a full disk. When the disk is full, ordinary
    /// writes fail with [`OutOfSpace`](crate::ErrorKind::OutOfSpace) and change nothing. The database then uses the
    /// space of the reserve to open, to accept removals, and to run flushes, compactions and blob GC. Ordinary writes
    /// succeed again, without reopening, once the reserve has its full size again.
    ///
    /// The file starts at about 1.5 MiB. It grows to about 1.5 times the WAL bytes that recovery would replay, plus the
    /// bytes that the next checkpoints of changed pool pages write, plus up to 6 MiB. A clean close shrinks it again.
    /// The maximum does not include the space to open the database: 256 KiB and twice the size of the manifest. A
    /// memtable flush, a pool checkpoint and a compaction each need as much space as they write. On a full disk they
    /// wait for more space if the reserve is too small.
    #[must_use]
    pub fn disk_reserve(mut self, bytes: u64) -> Config {
        self.settings.disk_reserve = bytes;
        self
    }

    /// Sets whether the WAL is written through a memory mapping where the file system makes this safe. Default true.
    ///
    /// A store into a mapping cannot return an error. If the device cannot provide a page of a segment, or another
    /// program truncates a segment, the signal `SIGBUS` ends the process. Acknowledged commits are in the WAL, as
    /// after any other crash of the process. With `false` the WAL is written by system calls, and the same failures
    /// are errors of the commit; a small commit then uses several times as much processor time. Pools in
    /// memory-backed files (tmpfs, DAX) are always mapped, regardless of this option.
    #[must_use]
    pub fn mapped_wal(mut self, yes: bool) -> Config {
        self.settings.mapped_wal = yes;
        self
    }

    /// Sets how recovery handles damage in the WAL. Default [`RecoveryMode::Strict`].
    #[must_use]
    pub fn recovery_mode(mut self, mode: RecoveryMode) -> Config {
        self.settings.recovery_mode = mode;
        self
    }

    /// Disables one durability rule, for tests that check whether the crash tests detect it. Never use it in
    /// production: power loss may then lose synced records.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn plant_bug(mut self, bug: PlantedBug) -> Config {
        self.settings.planted_bug = Some(bug);
        self
    }

    /// Sets the file system. Default: the operating system's.
    #[must_use]
    pub fn fs(mut self, fs: Arc<dyn Fs>) -> Config {
        self.fs = fs;
        self
    }

    /// Sets the source of time, random numbers and threads. Default: the operating system's.
    #[must_use]
    pub fn env(mut self, env: Arc<dyn Env>) -> Config {
        self.env = env;
        self
    }

    /// Registers a listener for background events (flush, compaction, errors). Default: none.
    #[must_use]
    pub fn listener(mut self, listener: Arc<dyn Listener>) -> Config {
        self.listener = Some(listener);
        self
    }

    /// Returns `Invalid` if a setting is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        let s = &self.settings;
        let range = |what: &str, value: u64, low: u64, high: u64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(format!("{what} is {value}, out of its range {low}..={high}"))),
        };
        range("workers", s.workers as u64, 0, 64)?;
        range("wal_segment_size", s.wal_segment_size, 64 << 10, 1 << 30)?;
        range("max_open_files", s.max_open_files as u64, 8, 1 << 20)?;
        range("memory_budget", s.memory_budget, 1 << 20, 1 << 50)?;
        range("cache_size", s.cache_size, 0, 1 << 50)?;
        range("max_wal_size", s.max_wal_size, s.wal_segment_size, 1 << 50)?;
        range("disk_reserve", s.disk_reserve, 0, 1 << 50)?;
        if let Some(ms) = s.sync_interval_ms {
            range("sync_interval", ms, 1, 1 << 40)?;
        }
        s.compression.check()
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").field("path", &self.path).field("settings", &self.settings).finish_non_exhaustive()
    }
}
