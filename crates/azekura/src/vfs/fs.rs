//! The contract of a file system: what the engine asks, and what it may rely on.
//!
//! Durability is explicit. Bytes and a file's length survive power loss after [`File::sync_data`]; a name survives
//! after [`Fs::sync_dir`] of its directory. Everything else may or may not survive, in any combination.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::sync::MappedMemory;
use crate::base::{Error, Result};

/// The name of the file that a database's lock is taken on.
pub(crate) const LOCK_FILE_NAME: &str = "LOCK";
/// The name of the file that holds a database's disk reserve.
pub(crate) const DISK_RESERVE_FILE_NAME: &str = "RESERVE";

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file, for reading.
    Read,
    /// An existing file, for reading and writing.
    Write,
    /// A file that must not exist yet, for reading and writing.
    Create,
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Beside other shared holders.
    Shared,
    /// Alone.
    Exclusive,
}

/// One name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Without the directory; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Length in bytes; 0 for what is not a regular file.
    pub len: u64,
    /// Whether it is a regular file.
    pub is_file: bool,
}

/// A lock on a path, released when dropped and when the process dies.
pub trait FileLock: Send + Sync + fmt::Debug {}

/// A file system. Implementations: [`DiskFs`](crate::fs::DiskFs), [`MemFs`](crate::fs::MemFs),
/// [`FaultFs`](crate::fs::FaultFs).
///
/// Thread safe. Errors carry the path; a full disk is [`OutOfSpace`](crate::ErrorKind::OutOfSpace).
pub trait Fs: Send + Sync + fmt::Debug {
    /// Opens a regular file; a symbolic link or anything else in its place is an error. New files get mode 0600.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `NotFound` or `AlreadyExists` among others.
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>>;

    /// As [`open`](Fs::open), for a file whose bytes the system need not keep in its cache. Meant for large files that
    /// are written front to back and read in places; other handles see what was written once this one was synced. The
    /// default opens the usual way, and so does an implementation where the device cannot do better.
    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.open(path, mode)
    }

    /// Creates a directory with mode 0700, and its parents; fine if it exists.
    fn create_dir_all(&self, path: &Path) -> Result<()>;

    /// Creates one directory with mode 0700; its parent must exist. The default is for a single caller: two at the same
    /// time may both succeed.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `AlreadyExists` if anything has that name.
    fn create_dir(&self, path: &Path) -> Result<()> {
        check_not_exists(self.exists(path)?, "create the directory", path)?;
        self.create_dir_all(path)
    }

    /// `path` with the working directory in front of it if it is relative, so that a later change of the working
    /// directory does not change what it names. Symbolic links and `..` stay as they are. The default asks the
    /// process; a file system without working directories begins at its root.
    ///
    /// # Errors
    /// `Io` if the working directory cannot be found, because it was removed for example.
    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        let named = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        std::path::absolute(named).map_err(|e| Error::io("find the working directory", &e).in_file(path))
    }

    /// The names in a directory, in no order.
    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>>;

    /// Whether anything has that name.
    fn exists(&self, path: &Path) -> Result<bool>;

    /// Gives a file or a directory another name, replacing a file of that name. The name is durable after
    /// [`Fs::sync_dir`].
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// As [`rename`](Fs::rename), but nothing is replaced, an empty directory neither. The default is for a single
    /// caller: what appears under the new name meanwhile may be replaced.
    ///
    /// # Errors
    /// `Io` with [`os_kind`](Error::os_kind) `AlreadyExists` if anything has the new name.
    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        check_not_exists(self.exists(to)?, "rename", to)?;
        self.rename(from, to)
    }

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> Result<()>;

    /// Removes a directory and all below it.
    fn remove_dir_all(&self, path: &Path) -> Result<()>;

    /// A second name for a file, which must not exist yet.
    ///
    /// # Errors
    /// `Unsupported` where there cannot be one (across file systems, for a directory): the caller copies instead.
    fn hard_link(&self, from: &Path, to: &Path) -> Result<()>;

    /// Makes the names in a directory durable.
    fn sync_dir(&self, path: &Path) -> Result<()>;

    /// Takes a lock on a file, which is created if it is missing, without waiting.
    ///
    /// # Errors
    /// `Locked` if another handle, in this process or another, holds it in a mode that excludes this one.
    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>>;

    /// Takes the lock of a database directory without waiting: a lock on the file `LOCK` in it, and on the
    /// directory itself where the file system has such locks. Then a second holder does not get in when the file was
    /// removed or replaced. The default locks the file only.
    ///
    /// # Errors
    /// As [`lock`](Fs::lock).
    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.lock(&dir.join(LOCK_FILE_NAME), mode)
    }

    /// Whether stores into a mapping of an allocated file below `dir` can never fail for want of space. True only where
    /// overwriting an allocated block needs no new one (ext4, tmpfs, XFS without reflinks).
    fn overwrites_in_place(&self, dir: &Path) -> bool;

    /// What stores into files below `dir` survive that are used as memory ([`File::map_memory`]):
    /// [`PowerLoss`](PersistenceLevel::PowerLoss) if what is flushed from the processor's caches is durable,
    /// [`ProcessCrash`](PersistenceLevel::ProcessCrash) if the files are nowhere but in memory. As by default,
    /// [`WalOnly`](PersistenceLevel::WalOnly) where the system writes them to a device when it likes, in any order:
    /// such files are not used as memory.
    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        let _ = dir;
        PersistenceLevel::WalOnly
    }
}

/// What a change to a pool has survived when the call that made it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum PersistenceLevel {
    /// Nothing by itself: the log makes it durable.
    WalOnly,
    /// The end of the process.
    ProcessCrash,
    /// Power loss.
    PowerLoss,
}

impl std::fmt::Display for PersistenceLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PersistenceLevel::WalOnly => "nothing, the log does",
            PersistenceLevel::ProcessCrash => "the end of the process",
            PersistenceLevel::PowerLoss => "power loss",
        })
    }
}

/// Fails with `AlreadyExists` if the name that is wanted for `path` is `taken`.
fn check_not_exists(taken: bool, what: &str, path: &Path) -> Result<()> {
    match taken {
        true => Err(Error::io(what, &ErrorKind::AlreadyExists.into()).in_file(path)),
        false => Ok(()),
    }
}

/// Creates a directory and its parents. Returns how many of them did not exist.
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

/// Makes the names that lead to the absolute `path` durable: that of `path` in its parent, that of the parent in its
/// own parent, up to the root.
///
/// The caller has just created the last `created` of these names, and a failure to make one of them durable is an
/// error. The others existed. They are synced too, because the process that created them may have died before it synced
/// them; but a parent that no sync is possible on (autofs, squashfs, procfs), or that this process may not read, is
/// passed over.
pub(crate) fn sync_parent_dirs(fs: &dyn Fs, path: &Path, created: usize) -> Result<()> {
    for (height, parent) in path.ancestors().skip(1).enumerate() {
        match fs.sync_dir(parent) {
            Err(error) if height >= created && is_sync_unsupported(&error) => {}
            done => done?,
        }
    }
    Ok(())
}

/// Whether a sync failed because there are no syncs of that directory, not because the device failed.
fn is_sync_unsupported(error: &Error) -> bool {
    let kinds =
        [ErrorKind::InvalidInput, ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem, ErrorKind::Unsupported];
    error.os_kind().is_some_and(|kind| kinds.contains(&kind))
}

/// An open file. Thread safe; offsets are explicit, there is no position.
pub trait File: Send + Sync + fmt::Debug {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes all of `bytes` at `offset`, growing the file if needed.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()>;

    /// Length in bytes.
    fn length(&self) -> Result<u64>;

    /// Cuts the file, or grows it with zeros that take no space.
    fn set_length(&self, len: u64) -> Result<()>;

    /// Makes sure that the first `len` bytes have space on the device; grows the file with zeros if it is shorter.
    fn allocate(&self, len: u64) -> Result<()>;

    /// The same where the first `from` bytes have their space already: what it costs should follow what is new.
    fn allocate_from(&self, from: u64, len: u64) -> Result<()> {
        let _ = from;
        self.allocate(len)
    }

    /// Makes bytes and length durable.
    fn sync_data(&self) -> Result<()>;

    /// Makes bytes, length and all metadata durable.
    fn sync_all(&self) -> Result<()>;

    /// Maps the first `len` bytes shared; they may reach past the end, but a store must not. `None` where mapping is
    /// not offered.
    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>>;

    /// The first `len` bytes as memory to be read and written beside others; they may reach past the end, but must not
    /// be touched there. With [`MappedMemory::survives_power_loss`] where the file lies in memory that keeps its bytes
    /// and the system answers for their places. `None` where this is not offered, as by default.
    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        let _ = len;
        Ok(None)
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `Corruption` if the file ends before.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        check_read_len(self.read_at(buf, offset)?, buf.len(), offset)
    }
}

/// What it means that `got` bytes came where `wanted` were asked for.
pub(crate) fn check_read_len(got: usize, wanted: usize, offset: u64) -> Result<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::corruption(format!("the file ends after {got} of {wanted} bytes")).at_offset(offset))
}

/// A shared mapping of a file, written only through [`Mapping::write_at`]. Bytes stored survive the death of the
/// process at once, and power loss after [`File::sync_data`].
pub trait Mapping: Send + Sync + fmt::Debug {
    /// Stores `bytes` at `offset`. The range must have been made resident by [`Mapping::populate`], which is where a
    /// failure shows as an error; a range outside the mapping panics.
    fn write_at(&self, bytes: &[u8], offset: u64);

    /// Makes a range of the file resident and writable.
    ///
    /// # Errors
    /// `Io` or `OutOfSpace` where a store would raise a signal; `Unsupported` on a kernel without the call. The caller
    /// goes back to [`File::write_at`].
    fn populate(&self, offset: u64, len: u64) -> Result<()>;
}
