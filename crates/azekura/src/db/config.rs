//! Configuration of a database: settings with their ranges and defaults, and the components it uses.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::base::coding::{ByteReader, put_number_field};
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
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?; // Buffer is the default
/// # let orders = db.open_partition("orders", Default::default())?;
/// use azekura::PersistMode;
/// orders.insert("order 1", "one apple")?; // Buffer: survives a crash of the process
/// let mut batch = db.batch();
/// batch.insert(&orders, "order 2", "two apples");
/// batch.durability(PersistMode::SyncData).commit()?; // both orders survive power loss
/// assert!(PersistMode::Buffer < PersistMode::SyncData && PersistMode::SyncData < PersistMode::SyncAll);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
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

/// A rule that a test disables, to show that the crash tests detect its absence.
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
    /// The commit of a transaction does not check what the transaction has read.
    UntrackedTransactions,
    /// A follower shows the last commit that it has read without its last record.
    FollowerTearsCommits,
    /// A follower takes a WAL whose next commits are gone for one without new commits.
    FollowerMissesRecycling,
    /// A follower does not keep the states that its snapshots read.
    FollowerForgetsSnapshots,
    /// A reader of durable changes reads beyond the last durable commit.
    ChangesBeyondDurable,
    /// A reader of changes goes on with the oldest WAL segment when the next commit was recycled.
    UnnoticedRecycling,
}

/// The variants by the number that the stored settings contain.
const PERSIST_MODES: [PersistMode; 3] = [PersistMode::Buffer, PersistMode::SyncData, PersistMode::SyncAll];
const DIRECT_IO_MODES: [DirectIo; 3] = [DirectIo::Never, DirectIo::Automatic, DirectIo::Always];
const RECOVERY_MODES: [RecoveryMode; 3] = [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage];

fn variant<T: Copy>(variants: &[T], number: u64, unknown: T) -> T {
    usize::try_from(number).ok().and_then(|n| variants.get(n)).copied().unwrap_or(unknown)
}

/// Valid intervals between periodic syncs.
const SYNC_INTERVALS: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(1 << 40);

/// The settings of a database. The methods of [`Config`] that set them state their ranges and defaults.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).cache_size(16 << 20).open()?;
/// assert_eq!(db.settings().cache_size, 16 << 20);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct Settings {
    /// Capacity of the block cache in bytes.
    pub cache_size: u64,
    /// Bytes that the memtables of all partitions may use.
    pub memory_budget: u64,
    /// Interval of periodic syncs of the WAL; `None`: no periodic sync.
    pub sync_interval: Option<Duration>,
    /// Durability of commits that do not choose one.
    pub durability: PersistMode,
    /// Number of worker threads.
    pub workers: usize,
    /// Codec of partitions that do not choose one.
    pub compression: CompressionType,
    /// Number of tables and blob files that are open at a time.
    pub max_open_files: usize,
    /// Whether tables and blob files bypass the page cache.
    pub direct_io: DirectIo,
    /// Whether tables and blob files are mapped for reading.
    pub mapped_reads: bool,
    /// Size of a WAL segment in bytes.
    pub wal_segment_size: u64,
    /// Size of the WAL in bytes above which partitions are flushed.
    pub max_wal_size: u64,
    /// How long WAL segments that no partition needs are kept for readers of changes.
    pub wal_retention: Duration,
    /// Maximum number of bytes of WAL segments that are kept for readers of changes only.
    pub max_retained_wal_size: u64,
    /// Maximum size of the disk reserve in bytes.
    pub disk_reserve: u64,
    /// Whether the WAL is written through a memory mapping where this is safe.
    pub mapped_wal: bool,
    /// How recovery handles damage in the WAL.
    pub recovery_mode: RecoveryMode,
    #[cfg(any(test, feature = "testing"))]
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) planted_bug: Option<PlantedBug>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            cache_size: 64 << 20,
            memory_budget: 512 << 20,
            sync_interval: None,
            durability: PersistMode::Buffer,
            workers: 2,
            compression: CompressionType::Lz4,
            max_open_files: 512,
            direct_io: DirectIo::default(),
            mapped_reads: false,
            wal_segment_size: 64 << 20,
            max_wal_size: 512 << 20,
            wal_retention: Duration::ZERO,
            max_retained_wal_size: 256 << 20,
            disk_reserve: 128 << 20,
            mapped_wal: true,
            recovery_mode: RecoveryMode::Strict,
            #[cfg(any(test, feature = "testing"))]
            planted_bug: None,
        }
    }
}

impl Settings {
    /// Encodes the settings for the manifest. Numbers of fields are never reused.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let [codec, codec_level] = self.compression.to_stored();
        let numbers = [
            (1, self.cache_size),
            (2, self.memory_budget),
            (3, self.sync_interval.map_or(0, |interval| interval.as_millis() as u64)), // at most 2^40, at least 1
            (4, self.durability as u64),
            (5, self.workers as u64),
            (6, u64::from(codec)),
            (7, u64::from(codec_level)),
            (8, self.max_open_files as u64),
            (9, self.direct_io as u64),
            (10, self.wal_segment_size),
            (11, self.max_wal_size),
            (12, self.disk_reserve),
            (13, u64::from(self.mapped_wal)),
            (14, self.recovery_mode as u64),
            (15, u64::from(self.mapped_reads)),
            (16, self.wal_retention.as_millis() as u64), // at most 2^40
            (17, self.max_retained_wal_size),
        ];
        let mut out = Vec::new();
        for (field, number) in numbers {
            put_number_field(&mut out, field, number);
        }
        out
    }

    /// Decodes stored settings. A field whose value is unknown, malformed or out of range has its default. Ignores
    /// unknown fields.
    ///
    /// # Errors
    /// `Corruption` if the bytes are not a sequence of fields.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Settings> {
        let mut settings = Settings::default();
        let mut codec = settings.compression.to_stored();
        let mut d = ByteReader::new(bytes);
        while !d.is_empty() {
            let (field, value) = (d.varint()?, d.bytes()?);
            let mut value = ByteReader::new(value);
            let Some(number) = value.varint().ok().filter(|_| value.is_empty()) else { continue };
            match field {
                1 => settings.cache_size = number,
                2 => settings.memory_budget = number,
                3 => settings.sync_interval = Some(number).filter(|ms| *ms > 0).map(Duration::from_millis),
                4 => settings.durability = variant(&PERSIST_MODES, number, settings.durability),
                5 => settings.workers = number.try_into().unwrap_or(settings.workers),
                6 => codec[0] = number.try_into().unwrap_or(u8::MAX), // an unknown codec
                7 => codec[1] = number.try_into().unwrap_or(u8::MAX),
                8 => settings.max_open_files = number.try_into().unwrap_or(settings.max_open_files),
                9 => settings.direct_io = variant(&DIRECT_IO_MODES, number, settings.direct_io),
                10 => settings.wal_segment_size = number,
                11 => settings.max_wal_size = number,
                12 => settings.disk_reserve = number,
                13 => settings.mapped_wal = number != 0,
                14 => settings.recovery_mode = variant(&RECOVERY_MODES, number, settings.recovery_mode),
                15 => settings.mapped_reads = number != 0,
                16 => settings.wal_retention = Duration::from_millis(number),
                17 => settings.max_retained_wal_size = number,
                _ => {}
            }
        }
        let stored = CompressionType::from_stored(codec).filter(|codec| codec.check().is_ok());
        settings.compression = stored.unwrap_or(settings.compression);
        Ok(settings)
    }

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
/// let db = azekura::Config::new(&path).cache_size(16 << 20).workers(1).open()?;
/// assert_eq!((db.settings().cache_size, db.settings().workers), (16 << 20, 1));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Config {
    pub(crate) path: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) listener: Option<Arc<dyn Listener>>,
    /// The longest wait for the lock of the directory.
    pub(crate) lock_wait: Duration,
    /// How often a follower catches up by itself.
    pub(crate) follow_interval: Option<Duration>,
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
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).open()?;
    /// assert!(path.is_dir());
    /// # Ok(()) }
    /// ```
    pub fn new(path: impl AsRef<Path>) -> Config {
        Config {
            path: path.as_ref().to_path_buf(),
            settings: Settings::default(),
            fs: Arc::new(DiskFs::new()),
            env: Arc::new(SystemEnv::new()),
            lock_wait: Duration::ZERO,
            follow_interval: None,
            listener: None,
        }
    }

    /// Returns the settings that this configuration has now.
    ///
    /// ```
    /// let config = azekura::Config::new("db").workers(4);
    /// assert_eq!((config.settings().workers, config.settings().cache_size), (4, 64 << 20));
    /// ```
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sets the capacity of the block cache in bytes, 0 to 2^50. Default 64 MiB.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).cache_size(256 << 20).open()?;
    /// assert_eq!(db.metrics().cache.capacity, 256 << 20);
    /// # Ok(()) }
    /// ```
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
    ///
    /// The next memtables use memory of flushed ones again. Up to a quarter of the budget is kept for them, and never
    /// more than the memtables leave of the budget; [`Metrics::spare_memtable_bytes`](crate::Metrics) reports it. A
    /// worker frees it when no memtable has needed it for about a second, and closing the database does.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).memory_budget(1 << 20).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// let error = photos.insert("sky", vec![7; 600 << 10]).unwrap_err(); // more than half the budget
    /// assert_eq!(error.kind(), azekura::ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn memory_budget(mut self, bytes: u64) -> Config {
        self.settings.memory_budget = bytes;
        self
    }

    /// Sets the interval at which a background thread syncs the WAL, 1 ms to 2^40 ms. Default `None`: no periodic
    /// sync.
    ///
    /// The interval applies in addition to the durability of each commit.
    ///
    /// A dedicated thread syncs, so flushes and compactions do not delay it: a commit stays unsynced for at most the
    /// interval plus the time of two syncs. With [`workers(0)`](Config::workers) there is no such thread:
    /// [`Database::step`](crate::Database::step) syncs first if the interval has passed.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use std::time::Duration;
    /// // Power loss removes at most the commits of about the last second.
    /// let db = azekura::Config::new(&path).sync_interval(Some(Duration::from_secs(1))).open()?;
    /// assert_eq!(db.settings().sync_interval, Some(Duration::from_secs(1)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn sync_interval(mut self, interval: Option<Duration>) -> Config {
        self.settings.sync_interval = interval;
        self
    }

    /// Sets the durability of commits that do not choose one. Default [`PersistMode::Buffer`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, PersistMode};
    /// let db = Config::new(&path).durability(PersistMode::SyncData).open()?;
    /// let orders = db.open_partition("orders", Default::default())?;
    /// let syncs = db.metrics().wal_syncs;
    /// orders.insert("order 1", "one apple")?; // survives power loss
    /// assert!(db.metrics().wal_syncs > syncs);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn durability(mut self, mode: PersistMode) -> Config {
        self.settings.durability = mode;
        self
    }

    /// Sets the number of worker threads, 0 to 64. Default 2.
    ///
    /// Workers run flushes, compactions and blob GC. If there are two or more, one of them runs no compactions and no
    /// blob GC. A [sync interval](Config::sync_interval) and a [listener](Config::listener) have one more thread each.
    ///
    /// With 0 no background work runs until the caller calls [`Database::step`](crate::Database::step), which makes a
    /// test deterministic.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).workers(0).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// assert!(!db.step()?); // no task is due, and no thread can start one
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn workers(mut self, n: usize) -> Config {
        self.settings.workers = n;
        self
    }

    /// Sets the compression codec of partitions that do not choose one. Default [`CompressionType::Lz4`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{CompressionType, Config, PartitionCreateOptions};
    /// let db = Config::new(&path).compression(CompressionType::None).open()?;
    /// let plain = db.open_partition("plain", PartitionCreateOptions::default())?;
    /// let packed = db.open_partition("packed", PartitionCreateOptions::default().compression(CompressionType::Lz4))?;
    /// for partition in [&plain, &packed] {
    ///     partition.insert("zeros", [0; 50_000])?;
    ///     partition.flush()?;
    /// }
    /// assert!(plain.disk_space() > 10 * packed.disk_space());
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).max_open_files(64).open()?;
    /// assert_eq!(db.settings().max_open_files, 64);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_open_files(mut self, n: usize) -> Config {
        self.settings.max_open_files = n;
        self
    }

    /// Sets whether reads and writes of tables and blob files bypass the page cache of the operating system. Default
    /// [`DirectIo::Automatic`]. The WAL always uses the page cache.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, DirectIo};
    /// let db = Config::new(&path).direct_io(DirectIo::Always).open()?; // the block cache is the only cache
    /// assert_eq!(db.settings().direct_io, DirectIo::Always);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn direct_io(mut self, mode: DirectIo) -> Config {
        self.settings.direct_io = mode;
        self
    }

    /// Sets whether tables and blob files are mapped into memory for reading. Default false: a mapping turns some
    /// errors into signals.
    ///
    /// An uncompressed data block or value of a blob file is then read in place: it is not copied, and its bytes do not
    /// count towards [`cache_size`](Config::cache_size), because the operating system can take back the pages of its
    /// page cache. The block cache keeps a reference of about 400 bytes to it. Compressed blocks are decompressed into
    /// the block cache as without the option. Checksums are verified when a block enters the block cache.
    ///
    /// - If the device fails a read, the process receives the signal SIGBUS, which ends it. Without the option, the
    ///   call returns `Io`. No data is lost.
    /// - No other program may change or shorten the files while the database is open. Readers would return the changed
    ///   bytes, panic, or receive SIGBUS. A page that the system drops and reads again is not verified again while the
    ///   block cache refers to it. Compactions and blob GC do not read in place: they verify what they copy.
    /// - A returned [`Slice`](crate::Slice) of 4 KiB or more may keep the mapping, and so the disk space of its file.
    /// - It has an effect on Linux with 64-bit addresses only. It excludes [`DirectIo::Always`], and turns
    ///   [`DirectIo::Automatic`] off. A file that cannot be mapped is read as without the option,
    ///   and so are files beyond 16,384 mapped ones of a process.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{CompressionType, Config};
    /// let db = Config::new(&path).mapped_reads(true).compression(CompressionType::None).cache_size(8 << 20).open()?;
    /// let pages = db.open_partition("pages", Default::default())?;
    /// pages.insert("page", vec![7; 50_000])?;
    /// pages.flush()?;
    /// assert_eq!(pages.get("page")?.unwrap().len(), 50_000);
    /// assert!(db.metrics().cache.used < 50_000); // the value is in the page cache
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn mapped_reads(mut self, yes: bool) -> Config {
        self.settings.mapped_reads = yes;
        self
    }

    /// Sets the size of a WAL segment in bytes, 64 KiB to 1 GiB. Default 64 MiB.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).wal_segment_size(64 << 10).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// for photo in 0..3u8 {
    ///     photos.insert([photo], vec![photo; 50_000])?;
    /// }
    /// assert!(db.metrics().wal_segments >= 2);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// // Recovery replays at most about 1 MiB; partitions are flushed more often.
    /// let config = azekura::Config::new(&path).wal_segment_size(256 << 10).max_wal_size(1 << 20);
    /// assert!(config.clone().open().is_ok());
    /// assert!(config.max_wal_size(64 << 10).open().is_err()); // less than one segment
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_wal_size(mut self, bytes: u64) -> Config {
        self.settings.max_wal_size = bytes;
        self
    }

    /// Sets how long WAL segments that no partition needs any more are kept for [readers of
    /// changes](crate::Database::changes_since) that come later, up to 2^40 ms. Default 0.
    ///
    /// Segments are kept within [`max_retained_wal_size`](Config::max_retained_wal_size), also when the database is
    /// closed and opened again with this setting; then the time begins anew. While the disk is full, none is kept. They
    /// are removed after a flush.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use std::time::Duration;
    /// let config = azekura::Config::new(&path).wal_retention(Duration::from_secs(3600));
    /// let db = config.clone().open()?;
    /// let (fruit, start) = (db.open_partition("fruit", Default::default())?, db.change_position()?);
    /// fruit.insert("apple", "red")?;
    /// db.close()?; // no partition needs the WAL any more
    /// let db = config.open()?;
    /// assert_eq!(db.changes_since(start)?.count(), 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn wal_retention(mut self, age: Duration) -> Config {
        self.settings.wal_retention = age;
        self
    }

    /// Sets the maximum number of bytes of WAL segments that are kept only for [readers of
    /// changes](crate::Database::changes_since), 0 to 2^50. Default 256 MiB.
    ///
    /// A reader that falls further behind gets [`Stale`](crate::ErrorKind::Stale).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # use azekura::{Config, ErrorKind};
    /// let db = Config::new(&path).max_retained_wal_size(0).wal_segment_size(64 << 10).workers(0).open()?;
    /// let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut changes = db.changes_since(db.change_position()?)?;
    /// for _ in 0..60 {
    ///     fruit.insert("apple", vec![7; 10_000])?;
    ///     fruit.flush()?; // frees segments of the WAL
    /// }
    /// assert_eq!(changes.next().unwrap().unwrap_err().kind(), ErrorKind::Stale);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_retained_wal_size(mut self, bytes: u64) -> Config {
        self.settings.max_retained_wal_size = bytes;
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
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).disk_reserve(0).open()?; // for a test with little data
    /// assert!(!path.join("RESERVE").exists());
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).mapped_wal(false).open()?; // a failing device returns errors, no SIGBUS
    /// assert!(!db.settings().mapped_wal);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn mapped_wal(mut self, yes: bool) -> Config {
        self.settings.mapped_wal = yes;
        self
    }

    /// Sets how recovery handles damage in the WAL. Default [`RecoveryMode::Strict`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, ErrorKind, RecoveryMode};
    /// let db = match Config::new(&path).open() {
    ///     Err(error) if error.kind() == ErrorKind::Corruption => {
    ///         // Copy the directory first. Then accept an older, consistent state:
    ///         Config::new(&path).recovery_mode(RecoveryMode::PointInTime).open()?
    ///     }
    ///     opened => opened?,
    /// };
    /// assert_eq!(db.settings().recovery_mode, RecoveryMode::Strict); // there was no damage
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn recovery_mode(mut self, mode: RecoveryMode) -> Config {
        self.settings.recovery_mode = mode;
        self
    }

    /// Disables one rule, for tests that check whether the crash tests detect it. Never use it in
    /// production: power loss may then lose synced records.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn plant_bug(mut self, bug: PlantedBug) -> Config {
        self.settings.planted_bug = Some(bug);
        self
    }

    /// Sets how long opening waits while another handle has the directory locked, before it returns `Locked`. Default:
    /// 0, do not wait.
    ///
    /// For example, a service waits this way for its predecessor to end. The time is that of the
    /// [environment](Config::env).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::Config;
    /// use std::time::Duration;
    /// let db = Config::new(&path).open()?;
    /// let next = std::thread::spawn({
    ///     let config = Config::new(&path).wait_for_lock(Duration::from_secs(60));
    ///     move || config.open()
    /// });
    /// db.close()?;
    /// assert!(next.join().unwrap().is_ok()); // opened once the lock was free
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn wait_for_lock(mut self, longest: Duration) -> Config {
        self.lock_wait = longest;
        self
    }

    /// Sets how often a [follower](Config::open_follower) catches up by itself, in a thread of its own. At least 1 ms.
    /// Default: `None`, only when [`catch_up`](crate::Database::catch_up) is called.
    ///
    /// The time counts from the begin of a call to that of the next. If a call takes longer than three quarters of it,
    /// the thread rests for a quarter.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::Config;
    /// use std::time::Duration;
    /// let writer = Config::new(&path).open()?.open_partition("fruit", Default::default())?;
    /// let follower = Config::new(&path).follow_interval(Some(Duration::from_millis(5))).open_follower()?;
    /// let fruit = follower.partition("fruit")?;
    /// writer.insert("apple", "red")?;
    /// while fruit.get("apple")?.is_none() {
    ///     std::thread::sleep(Duration::from_millis(1));
    /// }
    /// assert!(follower.change_position()?.sequence_number() > 0);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn follow_interval(mut self, interval: Option<Duration>) -> Config {
        self.follow_interval = interval;
        self
    }

    /// Sets the file system. Default: the operating system's.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::fs::DiskFs;
    /// use std::sync::Arc;
    /// let db = azekura::Config::new(&path).fs(Arc::new(DiskFs::new())).open()?; // the default
    /// assert!(db.path().exists());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fs(mut self, fs: Arc<dyn Fs>) -> Config {
        self.fs = fs;
        self
    }

    /// Sets the source of time, random numbers and threads. Default: the operating system's.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::fs::{Env, SystemEnv};
    /// use std::sync::Arc;
    /// let env = Arc::new(SystemEnv::new()); // several databases may share it
    /// let db = azekura::Config::new(&path).env(Arc::clone(&env) as Arc<dyn Env>).open()?;
    /// assert!(db.metrics().recovery_time.as_nanos() <= u128::from(env.monotonic_ns()));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn env(mut self, env: Arc<dyn Env>) -> Config {
        self.env = env;
        self
    }

    /// Registers a listener for background events (flush, compaction, errors). Default: none.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, Event, Listener};
    /// use std::sync::{Arc, Mutex};
    /// #[derive(Default)]
    /// struct Flushes(Mutex<Vec<String>>);
    /// impl Listener for Flushes {
    ///     fn on_event(&self, event: &Event) {
    ///         if let Event::Flushed { partition, .. } = event {
    ///             self.0.lock().unwrap().push(partition.clone());
    ///         }
    ///     }
    /// }
    /// let flushes = Arc::new(Flushes::default());
    /// let db = Config::new(&path).listener(Arc::clone(&flushes) as Arc<dyn Listener>).open()?;
    /// let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.flush()?;
    /// db.close()?; // delivers all events
    /// assert_eq!(*flushes.0.lock().unwrap(), ["fruit"]);
    /// # Ok(()) }
    /// ```
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
        range("max_retained_wal_size", s.max_retained_wal_size, 0, 1 << 50)?;
        if s.wal_retention > *SYNC_INTERVALS.end() {
            let (age, high) = (s.wal_retention, SYNC_INTERVALS.end());
            return Err(Error::invalid(format!("wal_retention is {age:?}, above its maximum {high:?}")));
        }
        if let Some(interval) = s.sync_interval
            && !SYNC_INTERVALS.contains(&interval)
        {
            let (low, high) = (SYNC_INTERVALS.start(), SYNC_INTERVALS.end());
            return Err(Error::invalid(format!("sync_interval is {interval:?}, out of its range {low:?}..={high:?}")));
        }
        if s.mapped_reads && s.direct_io == DirectIo::Always {
            return Err(Error::invalid("mapped_reads needs the page cache, which DirectIo::Always bypasses"));
        }
        s.compression.check()
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").field("path", &self.path).field("settings", &self.settings).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::coding::{put_bytes, put_varint};

    #[test]
    fn stored_settings_round_trip() {
        let none = Settings::default();
        assert_eq!(Settings::decode(&none.encode()).unwrap(), none);
        let config = Config::new("db").cache_size(1).memory_budget(2 << 20).workers(3).max_open_files(44);
        let config = config.sync_interval(Some(Duration::from_millis(7))).compression(CompressionType::Miniz(9));
        let config = config.wal_segment_size(1 << 20).max_wal_size(5 << 20).disk_reserve(6).mapped_wal(false);
        let config = config.mapped_reads(true).wal_retention(Duration::from_secs(9)).max_retained_wal_size(10);
        for n in 0..3 {
            let config = config.clone().durability(PERSIST_MODES[n]).direct_io(DIRECT_IO_MODES[n]);
            let settings = config.recovery_mode(RECOVERY_MODES[n]).settings;
            assert_eq!(Settings::decode(&settings.encode()).unwrap(), settings);
        }
        let mut newer = none.encode();
        put_number_field(&mut newer, 9, 200);
        put_number_field(&mut newer, 77, 5);
        assert_eq!(Settings::decode(&newer).unwrap(), none);
        assert!(Settings::decode(&newer[..newer.len() - 1]).is_err());
    }

    /// Regression: codec 257 was read as LZ4, zlib level 200 was accepted, and one malformed field discarded all
    /// settings.
    #[test]
    fn invalid_stored_fields_have_their_default() {
        let other = Config::new("db").workers(9).compression(CompressionType::Miniz(3)).settings;
        let with = |fields: &[(u64, u64)]| {
            let mut bytes = other.encode();
            fields.iter().for_each(|(field, number)| put_number_field(&mut bytes, *field, *number));
            Settings::decode(&bytes).unwrap()
        };
        assert_eq!(with(&[]), other);
        let none_256 = with(&[(6, 256), (7, 0)]);
        assert_eq!(none_256, Settings { compression: CompressionType::Lz4, ..other.clone() });
        for level in [11, 200, 256 + 6, u64::MAX] {
            assert_eq!(with(&[(6, 2), (7, level)]).compression, CompressionType::Lz4, "level {level}");
        }
        // A value that is no varint, and one with bytes after it.
        for value in [&[0x80][..], &[], &[5, 5]] {
            let mut bytes = other.encode();
            put_varint(&mut bytes, 2);
            put_bytes(&mut bytes, value);
            assert_eq!(Settings::decode(&bytes).unwrap(), other, "{value:?}");
        }
    }
}
