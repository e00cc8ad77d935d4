//! The file system interface of the engine, and the guarantees that every implementation gives.
//!
//! Durability is explicit. Bytes and a file's length survive power loss after [`File::sync_data`]; a name survives
//! after [`Fs::sync_dir`] of its directory. Everything else may or may not survive, in any combination.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::mapped_memory::{MappedBytes, MappedMemory};
use crate::base::{Error, Result};

/// Name of the file that carries a database's lock.
pub(crate) const LOCK_FILE_NAME: &str = "LOCK";
/// Name of the file that contains a database's disk reserve.
pub(crate) const DISK_RESERVE_FILE_NAME: &str = "RESERVE";

/// How a file is opened.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, Fs, OpenMode};
/// let path = dir.path().join("notes");
/// DiskFs::new().open(&path, OpenMode::Create)?;
/// let again = DiskFs::new().open(&path, OpenMode::Create);
/// assert_eq!(again.unwrap_err().os_kind(), Some(std::io::ErrorKind::AlreadyExists));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file, for reading.
    Read,
    /// An existing file, for reading and writing.
    Write,
    /// A file that must not exist yet, for reading and writing.
    Create,
}

/// Whether a lock excludes other holders.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, Fs, LockMode};
/// let path = dir.path().join("LOCK");
/// let reader = DiskFs::new().lock(&path, LockMode::Shared)?;
/// assert!(DiskFs::new().lock(&path, LockMode::Shared).is_ok());
/// assert!(DiskFs::new().lock(&path, LockMode::Exclusive).is_err());
/// drop(reader); // releases the lock
/// assert!(DiskFs::new().lock(&path, LockMode::Exclusive).is_ok());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// The lock admits other shared locks.
    Shared,
    /// The lock excludes every other lock.
    Exclusive,
}

/// One name in a directory.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, Fs};
/// std::fs::write(dir.path().join("notes"), "text").unwrap();
/// let entries = DiskFs::new().read_dir(dir.path())?;
/// assert_eq!((entries[0].name.as_str(), entries[0].len, entries[0].is_file), ("notes", 4, true));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Name without the directory. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Length in bytes; 0 if the entry is not a regular file.
    pub len: u64,
    /// Whether the entry is a regular file.
    pub is_file: bool,
}

/// A lock on a path. It is released when it is dropped and when the process ends.
pub trait FileLock: Send + Sync + fmt::Debug {}

/// A file system. [`DiskFs`](crate::fs::DiskFs) is that of the operating system.
///
/// Thread safe. The example wraps one file system in another.
///
/// # Errors
/// A method without such a section fails with `Io` if the operating system fails the call, and with
/// [`OutOfSpace`](crate::ErrorKind::OutOfSpace) if the disk is full. Errors carry the path.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::fs::{DirEntry, DiskFs, File, FileLock, Fs, LockMode, OpenMode};
/// use azekura::Result;
/// use std::{path::Path, sync::{Arc, atomic::{AtomicU64, Ordering}}};
///
/// /// Counts the files that are created; every other call goes to the disk.
/// #[derive(Debug, Default)]
/// struct CountingFs { created: AtomicU64 }
///
/// impl Fs for CountingFs {
///     fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
///         self.created.fetch_add((mode == OpenMode::Create) as u64, Ordering::Relaxed);
///         DiskFs.open(path, mode)
///     }
///     fn create_dir_all(&self, path: &Path) -> Result<()> { DiskFs.create_dir_all(path) }
///     fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> { DiskFs.read_dir(path) }
///     fn exists(&self, path: &Path) -> Result<bool> { DiskFs.exists(path) }
///     fn rename(&self, from: &Path, to: &Path) -> Result<()> { DiskFs.rename(from, to) }
///     fn remove_file(&self, path: &Path) -> Result<()> { DiskFs.remove_file(path) }
///     fn remove_dir_all(&self, path: &Path) -> Result<()> { DiskFs.remove_dir_all(path) }
///     fn hard_link(&self, from: &Path, to: &Path) -> Result<()> { DiskFs.hard_link(from, to) }
///     fn sync_dir(&self, path: &Path) -> Result<()> { DiskFs.sync_dir(path) }
///     fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> { DiskFs.lock(path, mode) }
///     fn overwrites_in_place(&self, dir: &Path) -> bool { DiskFs.overwrites_in_place(dir) }
/// }
///
/// let fs = Arc::new(CountingFs::default());
/// let db = azekura::Config::new(&path).fs(Arc::clone(&fs) as Arc<dyn Fs>).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let before = fs.created.load(Ordering::Relaxed);
/// fruit.insert("apple", "red")?;
/// fruit.flush()?; // creates a table
/// assert!(fs.created.load(Ordering::Relaxed) > before);
/// # Ok(()) }
/// ```
pub trait Fs: Send + Sync + fmt::Debug {
    /// Opens a regular file. Fails for a symbolic link and for anything else that is not a regular file. New files
    /// get mode 0600.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `NotFound` or `AlreadyExists` among others.
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>>;

    /// Opens a file as [`open`](Fs::open) does, but bypasses the page cache of the operating system where that is
    /// possible. Meant for large files that are written sequentially and read at random offsets. Other handles see
    /// the written bytes after this handle is synced. The default calls [`open`](Fs::open), and so does an
    /// implementation whose device does not support direct I/O.
    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.open(path, mode)
    }

    /// Creates a directory with mode 0700 and its missing parents. Succeeds if the directory exists.
    fn create_dir_all(&self, path: &Path) -> Result<()>;

    /// Creates one directory with mode 0700. Its parent must exist. The default is not atomic: of two concurrent
    /// calls both may succeed.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `AlreadyExists` if the name exists.
    fn create_dir(&self, path: &Path) -> Result<()> {
        check_not_exists(self.exists(path)?, "create the directory", path)?;
        self.create_dir_all(path)
    }

    /// Makes `path` absolute: joins a relative path to the working directory, so that a later change of the working
    /// directory does not change the file that the path names. Symbolic links and `..` are not resolved. The default
    /// uses the working directory of the process; a file system without working directories uses its root.
    ///
    /// # Errors
    /// `Io` if the working directory cannot be determined, for example because it was removed.
    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        let named = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        std::path::absolute(named).map_err(|e| Error::io("find the working directory", &e).in_file(path))
    }

    /// Lists the names in a directory, in no particular order.
    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>>;

    /// Whether the name exists, for a file, a directory or a symbolic link.
    fn exists(&self, path: &Path) -> Result<bool>;

    /// Renames a file or a directory. Replaces a file that has the new name. The new name is durable after
    /// [`Fs::sync_dir`].
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Renames as [`rename`](Fs::rename) does, but replaces nothing, not even an empty directory. The default is not
    /// atomic: it may replace a file that is created under the new name during the call.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `AlreadyExists` if the new name exists.
    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        check_not_exists(self.exists(to)?, "rename", to)?;
        self.rename(from, to)
    }

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> Result<()>;

    /// Removes a directory with all of its content.
    fn remove_dir_all(&self, path: &Path) -> Result<()>;

    /// Creates `to` as a second name of the file `from`. `to` must not exist.
    ///
    /// # Errors
    /// `Unsupported` if a hard link is impossible (across file systems, for a directory). The caller then copies the
    /// file.
    fn hard_link(&self, from: &Path, to: &Path) -> Result<()>;

    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> Result<()>;

    /// Locks a file without waiting. Creates the file if it is missing.
    ///
    /// # Errors
    /// `Locked` if another handle, in this process or another, holds a lock that excludes this one.
    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>>;

    /// Locks a database directory without waiting: locks the file `LOCK` in it and, where the file system supports
    /// it, the directory itself. The lock on the directory excludes a second holder even if the lock file was removed
    /// or replaced. The default locks the file only.
    ///
    /// # Errors
    /// As [`lock`](Fs::lock).
    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.lock(&dir.join(LOCK_FILE_NAME), mode)
    }

    /// Whether a store into a mapping of an allocated file below `dir` can never fail for lack of space. True only
    /// where overwriting an allocated block needs no new block (ext4, tmpfs, XFS without reflinks).
    fn overwrites_in_place(&self, dir: &Path) -> bool;

    /// The failures that stores into mapped memory ([`File::map_memory`]) of files below `dir` survive.
    /// [`PowerLoss`](PersistenceLevel::PowerLoss) if bytes are durable once they are flushed from the processor's
    /// caches. [`ProcessCrash`](PersistenceLevel::ProcessCrash) if the files exist in memory only (tmpfs). The
    /// default is [`WalOnly`](PersistenceLevel::WalOnly), for a system that writes dirty pages to a device at any
    /// time and in any order; the engine does not map such files as memory.
    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        let _ = dir;
        PersistenceLevel::WalOnly
    }
}

/// The failures that a change to a pool survives once the call that made the change has returned.
///
/// ```
/// use azekura::PersistenceLevel;
/// assert!(PersistenceLevel::WalOnly < PersistenceLevel::ProcessCrash);
/// assert!(PersistenceLevel::ProcessCrash < PersistenceLevel::PowerLoss); // the strongest
/// assert_eq!(PersistenceLevel::PowerLoss.to_string(), "power loss");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PersistenceLevel {
    /// No failure: only the write-ahead log (WAL) makes the change durable.
    WalOnly,
    /// A crash of the process.
    ProcessCrash,
    /// Power loss.
    PowerLoss,
}

impl std::fmt::Display for PersistenceLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PersistenceLevel::WalOnly => "no failure (only the WAL makes it durable)",
            PersistenceLevel::ProcessCrash => "a process crash",
            PersistenceLevel::PowerLoss => "power loss",
        })
    }
}

/// Fails with `AlreadyExists` if `taken`. `what` names the operation that needs the name `path` to be free.
fn check_not_exists(taken: bool, what: &str, path: &Path) -> Result<()> {
    match taken {
        true => Err(Error::io(what, &ErrorKind::AlreadyExists.into()).in_file(path)),
        false => Ok(()),
    }
}

/// Creates a directory and its missing parents. Returns the number of created directories.
pub(crate) fn create_dirs(fs: &dyn Fs, path: &Path) -> Result<usize> {
    let mut created = 0;
    for dir in path.ancestors() {
        if fs.exists(dir)? {
            break;
        }
        created += 1;
    }
    fs.create_dir_all(path)?;
    Ok(created)
}

/// Makes the names that lead to the absolute `path` durable: the name of `path` in its parent, the name of the parent
/// in its own parent, up to the root.
///
/// The caller has just created the last `created` of these names, so a failure to sync one of them is an error. The
/// other names existed before. They are synced too, because the process that created them may have crashed before it
/// synced them. A parent directory that does not support syncs (autofs, squashfs, procfs), or that this process may
/// not read, is skipped.
pub(crate) fn sync_parent_dirs(fs: &dyn Fs, path: &Path, created: usize) -> Result<()> {
    for (height, parent) in path.ancestors().skip(1).enumerate() {
        match fs.sync_dir(parent) {
            Err(error) if height >= created && is_sync_unsupported(&error) => {}
            done => done?,
        }
    }
    Ok(())
}

/// Whether a sync failed because the directory does not support it or may not be read, not because the device failed.
fn is_sync_unsupported(error: &Error) -> bool {
    let kinds =
        [ErrorKind::InvalidInput, ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem, ErrorKind::Unsupported];
    error.os_kind().is_some_and(|kind| kinds.contains(&kind))
}

/// An open file. Thread safe. Every call takes an explicit offset; there is no file position.
///
/// # Errors
/// A method without such a section fails with `Io` if the operating system fails the call, and with
/// [`OutOfSpace`](crate::ErrorKind::OutOfSpace) if the disk is full. Errors carry the path.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, File, Fs, OpenMode};
/// let file = DiskFs::new().open(&dir.path().join("notes"), OpenMode::Create)?;
/// file.write_at(b"text", 10)?; // the bytes before it are zeros
/// let mut bytes = [1; 14];
/// file.read_exact_at(&mut bytes, 0)?;
/// assert_eq!(&bytes, b"\0\0\0\0\0\0\0\0\0\0text");
/// assert_eq!(file.read_at(&mut bytes, 12)?, 2); // fewer than requested: the end of the file
/// # Ok(()) }
/// ```
pub trait File: Send + Sync + fmt::Debug {
    /// Reads up to `buf.len()` bytes at `offset`. Returns fewer only at the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes all of `bytes` at `offset`, growing the file if needed.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()>;

    /// Length in bytes.
    fn length(&self) -> Result<u64>;

    /// Truncates the file, or grows it with zeros that use no space.
    fn set_length(&self, len: u64) -> Result<()>;

    /// Reserves space on the device for the first `len` bytes. Grows the file with zeros if it is shorter.
    fn allocate(&self, len: u64) -> Result<()>;

    /// Allocates as [`allocate`](File::allocate) does, if the first `from` bytes already have space. The cost should
    /// depend on the new bytes only. The default ignores `from`.
    fn allocate_from(&self, from: u64, len: u64) -> Result<()> {
        let _ = from;
        self.allocate(len)
    }

    /// Makes bytes and length durable.
    fn sync_data(&self) -> Result<()>;

    /// Makes bytes, length and all metadata durable.
    fn sync_all(&self) -> Result<()>;

    /// Maps the first `len` bytes, shared. The mapping may extend past the end of the file, but a store must not.
    /// `None` if mappings are not supported.
    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>>;

    /// Maps the first `len` bytes as memory that several threads read and write. The mapping may extend past the end
    /// of the file, but words past the end must not be accessed. [`MappedMemory::survives_power_loss`] is true if the
    /// file is in persistent memory and the system guarantees that its block allocation is durable. `None` if this is
    /// not supported, which is the default.
    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        let _ = len;
        Ok(None)
    }

    /// Maps the first `len` bytes for reading. The caller changes none of these bytes afterwards, by any handle, and
    /// does not shorten the file. `None` if this is not supported, which is the default.
    ///
    /// # Errors
    /// `Corruption` if the file is shorter, and `Io`.
    fn map_for_reading(&self, len: u64) -> Result<Option<Arc<MappedBytes>>> {
        let _ = len;
        Ok(None)
    }

    /// Announces that this range will be read soon. Returns whether reads of announced ranges overlap although one
    /// thread makes one after another, or need no device. If it returns false, the engine reads several ranges from
    /// several threads. Never waits for the device. The default does nothing and returns true.
    fn will_read(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        true
    }

    /// Whether the byte at `offset` is in memory, so that no device is needed to read it. Never waits for the device.
    /// The default returns false.
    fn is_in_memory(&self, offset: u64) -> bool {
        let _ = offset;
        false
    }

    /// Fills `buf` with the bytes at `offset`.
    ///
    /// # Errors
    /// `Corruption` if the file ends before the range does.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        check_read_len(self.read_at(buf, offset)?, buf.len(), offset)
    }
}

/// Checks that a read of `wanted` bytes at `offset` returned all of them; `got` is the number that it returned.
///
/// # Errors
/// `Corruption` if the file ended early.
pub(crate) fn check_read_len(got: usize, wanted: usize, offset: u64) -> Result<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::corruption(format!("the file ends after {got} of {wanted} bytes")).at_offset(offset))
}

/// A shared mapping of a file, written only through [`Mapping::write_at`]. Stored bytes survive a crash of the
/// process at once, and power loss after [`File::sync_data`].
pub trait Mapping: Send + Sync + fmt::Debug {
    /// Stores `bytes` at `offset`. The caller must have made the range resident with [`Mapping::populate`], which
    /// reports failures as errors. Panics if the range is outside the mapping.
    fn write_at(&self, bytes: &[u8], offset: u64);

    /// Makes a range of the file resident and writable.
    ///
    /// # Errors
    /// `Io` or `OutOfSpace` where a store would raise a signal; `Unsupported` if the kernel does not have the call.
    /// The caller then uses [`File::write_at`].
    fn populate(&self, offset: u64, len: u64) -> Result<()>;
}
