//! How a database is opened.

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

/// How far a commit must get before it is acknowledged.
///
/// What each survives is told in `DURABILITY.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PersistMode {
    /// Survives the death of the process at any instruction; power loss may take the newest commits, whole and in
    /// order.
    #[default]
    Buffer,
    /// Survives power loss: the log's bytes are synced (`fdatasync`).
    SyncData,
    /// Survives power loss: the log's bytes and all file metadata are synced (`fsync`).
    SyncAll,
}

/// A rule of the engine that a test leaves out, to show that the proofs would notice.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// Tables become permanent although the log behind them is not durable.
    FlushBeforeWalSync,
    /// The log becomes durable although values that it points to are not.
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
            planted_bug: None,
        }
    }
}

/// Builds a [`Database`](crate::Database): settings, and the components it stands on.
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
    /// The database in `.azekura_data` below the current directory.
    fn default() -> Config {
        Config::new(".azekura_data")
    }
}

impl Config {
    /// The database in the directory `path`, which is created if it is missing. A relative path is made absolute when
    /// the database is opened; changing the working directory later does not matter. While it is open the directory
    /// must keep its path: do not rename it, nor a directory or symbolic link on the way to it.
    pub fn new(path: impl AsRef<Path>) -> Config {
        Config {
            path: path.as_ref().to_path_buf(),
            settings: Settings::default(),
            fs: Arc::new(DiskFs::new()),
            env: Arc::new(SystemEnv::new()),
            listener: None,
        }
    }

    /// Bytes of blocks that the cache holds at most. Default 64 MiB.
    #[must_use]
    pub fn cache_size(mut self, bytes: u64) -> Config {
        self.settings.cache_size = bytes;
        self
    }

    /// Bytes that the memtables of all partitions may take. Default 512 MiB, at least 1 MiB. A batch larger than half
    /// of it is refused.
    ///
    /// When the memtables that take records hold more than half of it, the largest is flushed. Writers wait for a
    /// flush when all memtables together exceed it. Two things are not bounded by it: each partition may keep up to
    /// 64 KiB that is not flushed for its sake, so that tables do not become tiny; and an iterator keeps memtables that
    /// it reads after their flush. [`Metrics::pinned_memtable_bytes`](crate::Metrics) tells of the latter: they slow
    /// writers down to the speed of flushes, and never stop them. With [`workers(0)`](Config::workers) memtables are
    /// sealed likewise, but writers do not wait: they grow until [`Database::step`](crate::Database::step) has flushed.
    #[must_use]
    pub fn memory_budget(mut self, bytes: u64) -> Config {
        self.settings.memory_budget = bytes;
        self
    }

    /// Sync the log every so many milliseconds in the background, whatever single commits ask for. Default: never.
    ///
    /// A thread that does nothing else keeps the interval, so that no flush or compaction delays it: a commit is
    /// unsynced for at most the interval and the time of two syncs. With [`workers(0)`](Config::workers) there is no
    /// such thread: [`Database::step`](crate::Database::step) syncs first if the interval is over.
    #[must_use]
    pub fn sync_interval(mut self, ms: Option<u64>) -> Config {
        self.settings.sync_interval_ms = ms;
        self
    }

    /// How far commits get that do not say it themselves. Default [`PersistMode::Buffer`].
    #[must_use]
    pub fn durability(mut self, mode: PersistMode) -> Config {
        self.settings.durability = mode;
        self
    }

    /// Background threads, 0..=64. Default 2. With 0 nothing happens by itself: call
    /// [`Database::step`](crate::Database::step), which makes a test deterministic.
    #[must_use]
    pub fn workers(mut self, n: usize) -> Config {
        self.settings.workers = n;
        self
    }

    /// The codec of partitions that do not choose one. Default [`CompressionType::Lz4`].
    #[must_use]
    pub fn compression(mut self, compression: CompressionType) -> Config {
        self.settings.compression = compression;
        self
    }

    /// Tables and blob files held open at a time, at least 8. Default 512. Where the process may not open so many, it
    /// is half of the files that the process may still open when the database is opened. When the process or the
    /// machine runs out of file descriptors, the database closes some of these files and tries again.
    #[must_use]
    pub fn max_open_files(mut self, n: usize) -> Config {
        self.settings.max_open_files = n;
        self
    }

    /// Whether tables are read and written past the cache of the operating system. Default [`DirectIo::Automatic`]. The
    /// log never is.
    #[must_use]
    pub fn direct_io(mut self, mode: DirectIo) -> Config {
        self.settings.direct_io = mode;
        self
    }

    /// Bytes of one log segment, 64 KiB to 1 GiB. Default 64 MiB.
    #[must_use]
    pub fn wal_segment_size(mut self, bytes: u64) -> Config {
        self.settings.wal_segment_size = bytes;
        self
    }

    /// Bytes of log beyond which the partitions that hold its oldest segment are flushed, before any compaction.
    /// Default 512 MiB. Until that is done the log goes on growing: by what is written during those flushes. It is not
    /// cut while a checkpoint copies it. Records of a partition whose comparator was not given since the database was
    /// opened are moved to tables, and read back into memory when the comparator is given.
    #[must_use]
    pub fn max_wal_size(mut self, bytes: u64) -> Config {
        self.settings.max_wal_size = bytes;
        self
    }

    /// Bytes that the disk reserve may take, 0 for none. Default 128 MiB.
    ///
    /// The reserve is a file that holds space which ordinary writes cannot use. When the disk is full they fail with
    /// [`OutOfSpace`](crate::ErrorKind::OutOfSpace) and change nothing, and out of the reserve the database can be
    /// opened, removals are accepted, and flushes, compactions and blob GC run. Ordinary writes go on, without a
    /// restart, once the reserve has all its space again.
    ///
    /// The file has 1.5 MiB. It grows, up to this bound, with the log to twice what would have to be replayed, and
    /// with the changed pages of pools to what their next checkpoints write; a clean close cuts it again. A flush of
    /// one memtable, a checkpoint of a pool, and a compaction need as much as they write: where one of them writes
    /// more than the reserve has, it has to wait until there is more space.
    #[must_use]
    pub fn disk_reserve(mut self, bytes: u64) -> Config {
        self.settings.disk_reserve = bytes;
        self
    }

    /// Whether the log is written through a mapping where the file system makes that safe. Default true.
    ///
    /// A store into a mapping has no way to return an error. If the device fails to provide a page of a segment, or
    /// another program truncates a segment, the signal `SIGBUS` ends the process; what was acknowledged is in the log
    /// as after any other end of the process. With `false` the log is written by system calls, and the same failures
    /// are errors of the commit; a small commit costs several times as much processor time. Pools in files that are
    /// memory (tmpfs, DAX) are always mapped, whatever this option says.
    #[must_use]
    pub fn mapped_wal(mut self, yes: bool) -> Config {
        self.settings.mapped_wal = yes;
        self
    }

    /// What recovery does about damage in the log. Default [`RecoveryMode::Strict`].
    #[must_use]
    pub fn recovery_mode(mut self, mode: RecoveryMode) -> Config {
        self.settings.recovery_mode = mode;
        self
    }

    /// For tests of the tests: breaks the engine.
    #[doc(hidden)]
    #[must_use]
    pub fn plant_bug(mut self, bug: PlantedBug) -> Config {
        self.settings.planted_bug = Some(bug);
        self
    }

    /// The file system. Default: the disk.
    #[must_use]
    pub fn fs(mut self, fs: Arc<dyn Fs>) -> Config {
        self.fs = fs;
        self
    }

    /// Clock, randomness and threads. Default: the system's.
    #[must_use]
    pub fn env(mut self, env: Arc<dyn Env>) -> Config {
        self.env = env;
        self
    }

    /// Who hears of what happens in the background. Default: nobody.
    #[must_use]
    pub fn listener(mut self, listener: Arc<dyn Listener>) -> Config {
        self.listener = Some(listener);
        self
    }

    /// Fails if a setting is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        let s = &self.settings;
        let range = |what: &str, value: u64, low: u64, high: u64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(format!("{what} is {value}, out of its range {low}..={high}"))),
        };
        range("workers", s.workers as u64, 0, 64)?;
        range("log_segment_size", s.wal_segment_size, 64 << 10, 1 << 30)?;
        range("max_open_files", s.max_open_files as u64, 8, 1 << 20)?;
        range("memory_budget", s.memory_budget, 1 << 20, 1 << 50)?;
        range("cache_size", s.cache_size, 0, 1 << 50)?;
        range("max_log_size", s.max_wal_size, s.wal_segment_size, 1 << 50)?;
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
