//! The file system of the machine, through std and rustix.
//!
//! Everything works on Unix and Windows. Mappings, direct I/O, and the tests of what a file system supports exist on
//! Linux only: elsewhere files are read and written by system calls.

use std::fs::{self, File as StdFile, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::base::{Error, ErrorKind, Result};
use crate::vfs::disk_file::{DiskFile, io_error_at_path};
use crate::vfs::env::process_token;
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LOCK_FILE_NAME, LockMode, OpenMode, PersistenceLevel};
use crate::vfs::lock_holder::{self, lock_holders};
use crate::vfs::platform::{extras, family};

/// The file system of the machine.
///
/// New files get mode 0600, new directories 0700 (on Windows the rights of their parent). Opening a symbolic link, or
/// anything else that is not a regular file, fails. Locks are `flock` locks (`LockFileEx` on Windows): they end with
/// the process that took them, and a forked child does not release them.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// use azekura::fs::{DiskFs, Fs, OpenMode};
/// let file = DiskFs::new().open(&dir.path().join("notes"), OpenMode::Create)?;
/// file.write_at(b"text", 0)?;
/// file.sync_data()?; // the bytes survive power loss
/// DiskFs::new().sync_dir(dir.path())?; // and so does the name
/// assert_eq!(file.length()?, 4);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFs;

impl DiskFs {
    /// Returns the file system of the machine.
    ///
    /// ```
    /// use azekura::fs::{DiskFs, Fs};
    /// assert!(!DiskFs::new().exists("no such file".as_ref()).unwrap());
    /// ```
    pub fn new() -> DiskFs {
        DiskFs
    }
}

/// Opens a regular file. Does not follow a symbolic link in the last path component, and does not wait for the other
/// end of a pipe.
fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<StdFile> {
    family::guard_open(options);
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        Ok(file)
    } else if kind.is_dir() {
        Err(io::ErrorKind::IsADirectory.into())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

fn open_file(path: &Path, mode: OpenMode) -> Result<DiskFile> {
    let mut options = OpenOptions::new();
    let (options, what) = match mode {
        OpenMode::Read => (options.read(true), "open"),
        OpenMode::Write => (options.read(true).write(true), "open"),
        OpenMode::Create => (options.read(true).write(true).create_new(true), "create"),
    };
    let file = open_regular(path, options).map_err(|e| io_error_at_path(what, path, e))?;
    Ok(DiskFile { file, path: path.to_path_buf() })
}

/// Replaces an empty path by `.`, because the parent of a relative name is the empty path, which system calls reject.
fn or_current_dir(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// The error of a call on the directory `path`. Names the symbolic link if a dangling one in the path is the cause.
fn explain_dangling_symlink(path: &Path, error: io::Error) -> io::Error {
    let is_dangling = |path: &Path| {
        fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink())
            && fs::metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    };
    match path.ancestors().find(|path| is_dangling(path)) {
        Some(link) => {
            let message = format!("{} is a symbolic link to a path that does not exist", link.display());
            io::Error::new(io::ErrorKind::NotFound, message)
        }
        None => error,
    }
}

/// Turns on direct I/O if the file system supports it.
#[cfg(target_os = "linux")]
fn with_direct_io(file: DiskFile) -> Arc<dyn File> {
    match crate::vfs::direct_io::DirectFile::new(file) {
        Ok(direct) => Arc::new(direct),
        Err(usual) => Arc::new(usual),
    }
}

#[cfg(not(target_os = "linux"))]
fn with_direct_io(file: DiskFile) -> Arc<dyn File> {
    Arc::new(file)
}

impl Fs for DiskFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        Ok(Arc::new(open_file(path, mode)?))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        Ok(with_direct_io(open_file(path, mode)?))
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        let done = family::dir_builder().recursive(true).create(or_current_dir(path));
        done.map_err(|e| io_error_at_path("create the directory", path, explain_dangling_symlink(path, e)))
    }

    fn create_dir(&self, path: &Path) -> Result<()> {
        family::dir_builder().create(path).map_err(|e| io_error_at_path("create the directory", path, e))
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let listed = || -> io::Result<Vec<DirEntry>> {
            let mut entries = Vec::new();
            for entry in fs::read_dir(or_current_dir(path))? {
                let entry = entry?;
                let metadata = match entry.metadata() {
                    Ok(metadata) => metadata,
                    // The entry was removed after the directory was read.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    Err(e) => return Err(e),
                };
                let is_file = metadata.is_file();
                let len = if is_file { metadata.len() } else { 0 };
                entries.push(DirEntry { name: entry.file_name().to_string_lossy().into_owned(), len, is_file });
            }
            Ok(entries)
        };
        listed().map_err(|e| io_error_at_path("list the directory", path, explain_dangling_symlink(path, e)))
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        match fs::symlink_metadata(or_current_dir(path)) {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
            Err(e) => Err(io_error_at_path("look up", path, e)),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(|e| io_error_at_path(&format!("rename to {}", to.display()), from, e))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        match extras::rename_noreplace(from, to) {
            Some(done) => done.map_err(|e| io_error_at_path(&format!("rename to {}", to.display()), from, e)),
            None if self.exists(to)? => Err(io_error_at_path("rename", to, io::ErrorKind::AlreadyExists)),
            None => self.rename(from, to),
        }
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        fs::remove_file(path).map_err(|e| io_error_at_path("remove", path, e))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        fs::remove_dir_all(path).map_err(|e| io_error_at_path("remove the directory", path, e))
    }

    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        fs::hard_link(from, to).map_err(|e| {
            use io::ErrorKind::{CrossesDevices, PermissionDenied, TooManyLinks, Unsupported};
            let kind = e.kind();
            let error = io_error_at_path(&format!("link as {}", to.display()), from, e);
            // The names are on different file systems, or the file system does not support hard links (some then
            // return EPERM), or the file has too many. The caller copies the file instead.
            match kind {
                CrossesDevices | PermissionDenied | TooManyLinks | Unsupported => {
                    error.with_kind(ErrorKind::Unsupported)
                }
                _ => error,
            }
        })
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let synced = family::open_dir(or_current_dir(path)).and_then(|dir| dir.map_or(Ok(()), |dir| dir.sync_all()));
        synced.map_err(|e| io_error_at_path("sync the directory", path, e))
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        // A shared lock is taken through a read-only handle, so that it works on a read-only file system.
        let create = || open_regular(path, OpenOptions::new().read(true).write(true).create(true));
        let opened = match mode {
            LockMode::Shared => match open_regular(path, OpenOptions::new().read(true)) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => create(),
                opened => opened,
            },
            LockMode::Exclusive => create(),
        };
        let file = opened.map_err(|e| io_error_at_path("open the lock file", path, e))?;
        Ok(Box::new(DiskLock::acquire(file, path, mode)?))
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        let path = dir.join(LOCK_FILE_NAME);
        // A reader does not create a missing lock file, because its lock on the directory excludes writers.
        let file = match mode == LockMode::Shared && !self.exists(&path)? {
            true => None,
            false => Some(self.lock(&path, mode)?),
        };
        let opened = family::open_dir(dir).map_err(|e| io_error_at_path("open the directory", dir, e))?;
        let locked_dir = match opened.map(|opened| DiskLock::acquire(opened, dir, mode)) {
            Some(Ok(locked)) => Some(locked),
            Some(Err(error)) if error.kind() != ErrorKind::Io => return Err(error),
            // The system or the file system (NFS) does not lock directories, so the lock on the file must suffice.
            Some(Err(_)) | None => None,
        };
        let file = match (&locked_dir, file) {
            (None, None) => Some(self.lock(&path, mode)?),
            (_, file) => file,
        };
        Ok(Box::new(DirLock { _dir: locked_dir, _file: file }))
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        extras::overwrites_in_place(or_current_dir(dir))
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        extras::persistence_level(or_current_dir(dir))
    }
}

/// A lock on an open file or directory. The end of the process also releases it.
#[derive(Debug)]
struct DiskLock {
    file: StdFile,
    /// [`process_token`] of the process that took the lock.
    process: u64,
}

impl DiskLock {
    fn acquire(file: StdFile, path: &Path, mode: LockMode) -> Result<DiskLock> {
        let locked = match mode {
            LockMode::Shared => file.try_lock_shared(),
            LockMode::Exclusive => file.try_lock(),
        };
        match locked {
            Ok(()) => Ok(DiskLock { file, process: process_token() }),
            Err(TryLockError::WouldBlock) => {
                let holding =
                    lock_holder::describe(&lock_holders(path)).map_or(String::new(), |who| format!(": {who}"));
                Err(Error::new(ErrorKind::Locked, format!("another handle holds the lock{holding}")).in_file(path))
            }
            Err(TryLockError::Error(e)) => Err(io_error_at_path("lock", path, e)),
        }
    }
}

impl FileLock for DiskLock {}

impl Drop for DiskLock {
    /// Unlocks explicitly, because closing the file is not enough: a child that another thread is starting may keep
    /// the file open a moment longer. A forked child does not unlock, because it shares the lock with its parent,
    /// which still needs it.
    fn drop(&mut self) {
        if self.process == process_token() {
            let _closing_unlocks_too = self.file.unlock();
        }
    }
}

/// The locks of a database directory. The file is locked first and unlocked last, so that two processes that open the
/// directory compete for the file.
#[derive(Debug)]
struct DirLock {
    _dir: Option<DiskLock>,
    _file: Option<Box<dyn FileLock>>,
}

impl FileLock for DirLock {}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A temporary directory on this machine, removed on drop. It is in memory if `in_memory` is set and `/dev/shm`
    /// exists.
    pub(crate) fn temp_dir(in_memory: bool) -> tempfile::TempDir {
        let shm = Path::new("/dev/shm");
        let dir = if in_memory { tempfile::tempdir_in(shm).ok() } else { None };
        dir.unwrap_or_else(|| tempfile::tempdir().unwrap())
    }

    #[test]
    fn file_modes_are_owner_only() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b");
        DiskFs.create_dir_all(&dir).unwrap();
        DiskFs.open(&dir.join("f"), OpenMode::Create).unwrap();
        let _lock = DiskFs.lock(&dir.join("LOCK"), LockMode::Exclusive).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&root.path().join("a"))), (0o700, 0o700));
        assert_eq!((mode(&dir.join("f")), mode(&dir.join("LOCK"))), (0o600, 0o600));
    }

    /// A forked child shares the open lock file. Dropping a handle in the child must not release the lock of the
    /// parent.
    #[test]
    fn a_forked_child_does_not_release_the_lock() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("LOCK");
        let file = open_regular(&path, OpenOptions::new().read(true).write(true).create(true)).unwrap();
        let shared_with_child = file.try_clone().unwrap();
        let lock = DiskLock::acquire(file, &path, LockMode::Exclusive).unwrap();
        drop(DiskLock { file: shared_with_child, process: lock.process + 2 });
        assert_eq!(DiskFs.lock(&path, LockMode::Shared).unwrap_err().kind(), ErrorKind::Locked);
        drop(lock);
        DiskFs.lock(&path, LockMode::Shared).unwrap();
    }

    /// Every read-only open created the file `LOCK` if it was missing, also in a damaged database that `repair` reads.
    #[test]
    fn reader_creates_no_lock_file_when_missing() {
        let root = tempfile::tempdir().unwrap();
        let reader = DiskFs.lock_dir(root.path(), LockMode::Shared).unwrap();
        assert_eq!(DiskFs.read_dir(root.path()).unwrap(), []);
        assert!(DiskFs.lock_dir(root.path(), LockMode::Shared).is_ok());
        assert_eq!(DiskFs.lock_dir(root.path(), LockMode::Exclusive).unwrap_err().kind(), ErrorKind::Locked);
        drop(reader);
        let _writer = DiskFs.lock_dir(root.path(), LockMode::Exclusive).unwrap();
        assert_eq!(DiskFs.lock_dir(root.path(), LockMode::Shared).unwrap_err().kind(), ErrorKind::Locked);
    }

    #[test]
    fn links_pipes_and_directories_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        DiskFs.open(&at("real"), OpenMode::Create).unwrap();
        std::os::unix::fs::symlink(at("real"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
        std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        for name in ["link", "dangling", "socket", "pipe", "."] {
            for mode in [OpenMode::Read, OpenMode::Write, OpenMode::Create] {
                assert_eq!(DiskFs.open(&at(name), mode).unwrap_err().kind(), ErrorKind::Io, "{name} {mode:?}");
            }
            assert_eq!(DiskFs.lock(&at(name), LockMode::Shared).unwrap_err().kind(), ErrorKind::Io, "{name}");
        }
        assert!(!DiskFs.exists(&at("nowhere")).unwrap(), "a dangling link was followed");
        let others = DiskFs.read_dir(root.path()).unwrap().into_iter().filter(|entry| !entry.is_file).count();
        assert_eq!(others, 4);
    }

    #[test]
    fn huge_offsets_are_past_the_end_or_too_large() {
        let root = tempfile::tempdir().unwrap();
        let file = DiskFs.open(&root.path().join("f"), OpenMode::Create).unwrap();
        assert_eq!(file.read_at(&mut [0; 4], u64::MAX).unwrap(), 0);
        assert_eq!(file.read_at(&mut [0; 4], i64::MAX as u64 - 1).unwrap_or(0), 0);
        assert_eq!(file.write_at(b"x", i64::MAX as u64).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(file.write_at(b"x", u64::MAX).unwrap_err().kind(), ErrorKind::OutOfSpace);
    }
}
