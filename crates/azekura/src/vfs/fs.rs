//! The contract of a file system: what the engine asks, and what it may rely on.
//!
//! Durability is explicit. Bytes and a file's length survive power loss after [`File::sync_data`]; a name survives
//! after [`Fs::sync_dir`] of its directory. Everything else may or may not survive, in any combination.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use crate::base::sync::Words;
use crate::base::{Error, Result};

/// The name of the file that a database's lock is taken on.
pub(crate) const LOCK: &str = "LOCK";

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

    /// The names in a directory, in no order.
    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>>;

    /// Whether anything has that name.
    fn exists(&self, path: &Path) -> Result<bool>;

    /// Gives a file or a directory another name, replacing a file of that name. The name is durable after
    /// [`Fs::sync_dir`].
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

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

    /// Whether stores into a mapping of an allocated file below `dir` can never fail for want of space. True only where
    /// overwriting an allocated block needs no new one (ext4, tmpfs, XFS without reflinks).
    fn overwrites_in_place(&self, dir: &Path) -> bool;

    /// What stores into files below `dir` survive that are used as memory ([`File::map_words`]):
    /// [`Power`](PersistenceLevel::Power) if what is flushed from the processor's caches is durable,
    /// [`Process`](PersistenceLevel::Process) if the files are nowhere but in memory. As by default,
    /// [`Logged`](PersistenceLevel::Logged) where the system writes them to a device when it likes, in any order: such
    /// files are not used as memory.
    fn memory_level(&self, dir: &Path) -> PersistenceLevel {
        let _ = dir;
        PersistenceLevel::Logged
    }
}

/// What a change to a pool has survived when the call that made it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum PersistenceLevel {
    /// Nothing by itself: the log makes it durable.
    Logged,
    /// The end of the process.
    Process,
    /// Power loss.
    Power,
}

impl std::fmt::Display for PersistenceLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PersistenceLevel::Logged => "nothing, the log does",
            PersistenceLevel::Process => "the end of the process",
            PersistenceLevel::Power => "power loss",
        })
    }
}

/// Makes the names that lead to `path` durable: that of `path` in its parent, that of the parent in its own, up to the
/// root or the working directory. Directories above the first that may not be read were there before.
pub(crate) fn sync_names_above(fs: &dyn Fs, path: &Path) -> Result<()> {
    for (height, above) in path.ancestors().skip(1).enumerate() {
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match fs.sync_dir(above) {
            Err(error) if height > 0 && error.os_kind() == Some(ErrorKind::PermissionDenied) => break,
            other => other?,
        }
    }
    Ok(())
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
    /// be touched there. With [`Words::survives_power_loss`] where the file lies in memory that keeps its bytes and the
    /// system answers for their places. `None` where this is not offered, as by default.
    fn map_words(&self, len: u64) -> Result<Option<Box<dyn Words>>> {
        let _ = len;
        Ok(None)
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `Corruption` if the file ends before.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        all_or_corruption(self.read_at(buf, offset)?, buf.len(), offset)
    }
}

/// What it means that `got` bytes came where `wanted` were asked for.
pub(crate) fn all_or_corruption(got: usize, wanted: usize, offset: u64) -> Result<()> {
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
