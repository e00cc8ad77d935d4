//! The file system of the machine, through std and rustix.

use std::fs::{self, DirBuilder, File as StdFile, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::base::sync::MappedMemory;
use crate::base::{Error, ErrorKind, Result};
use crate::vfs::direct_io::DirectFile;
use crate::vfs::disk_file::{DiskFile, io_error_at_path};
use crate::vfs::env::process_token;
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LOCK_FILE_NAME, LockMode, OpenMode, PersistenceLevel};
use crate::vfs::mmap::DiskMappedMemory;

const EXT4_MAGIC: u64 = 0xEF53;
const TMPFS_MAGIC: u64 = 0x0102_1994;
const XFS_MAGIC: u64 = 0x5846_5342;

/// Files are for their owner only.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);
const DIR_MODE: u32 = 0o700;

/// The file system of the machine.
///
/// Files are made with mode 0600, directories with 0700. Symbolic links in the place of a file, and anything that is
/// not a regular file, are refused. Locks are `flock` locks: they end with the process that took them, and a child that
/// it forks does not release them.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFs;

impl DiskFs {
    /// The file system of the machine.
    pub fn new() -> DiskFs {
        DiskFs
    }
}

/// Opens a regular file. Never follows a symbolic link in the last place, never waits for the other end of a pipe.
fn open_regular(path: &Path, flags: OFlags) -> io::Result<StdFile> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = StdFile::from(retry_on_intr(|| rustix::fs::open(path, flags, FILE_MODE))?);
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
    let (flags, what) = match mode {
        OpenMode::Read => (OFlags::RDONLY, "open"),
        OpenMode::Write => (OFlags::RDWR, "open"),
        OpenMode::Create => (OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, "create"),
    };
    let file = open_regular(path, flags).map_err(|e| io_error_at_path(what, path, e))?;
    Ok(DiskFile { file, path: path.to_path_buf() })
}

/// The directory as the system wants it named: the parent of a relative name is the empty path.
fn or_current_dir(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// The error of a call on the directory `path`, in plain words where a symbolic link on the way leads to nothing.
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

/// Whether files in `dir` can never share blocks, asked with two unnamed files that are gone when they are closed.
fn has_no_reflinks(dir: &Path) -> bool {
    let unnamed = || rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, FILE_MODE);
    let (Ok(from), Ok(to)) = (unnamed(), unnamed()) else { return false };
    rustix::fs::ioctl_ficlone(&to, &from) == Err(Errno::OPNOTSUPP)
}

/// Whether files in `dir` lie in memory that keeps its bytes, asked with an unnamed file that is gone when it is
/// closed.
fn supports_synchronous_mapping(dir: &Path) -> bool {
    const LEN: u64 = 4096;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(dir, flags, FILE_MODE).map(StdFile::from) else { return false };
    file.set_len(LEN).is_ok() && DiskMappedMemory::new(&file, LEN, dir).is_ok_and(|words| words.survives_power_loss())
}

impl Fs for DiskFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        Ok(Arc::new(open_file(path, mode)?))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        match DirectFile::new(open_file(path, mode)?) {
            Ok(direct) => Ok(Arc::new(direct)),
            Err(usual) => Ok(Arc::new(usual)),
        }
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        let done = DirBuilder::new().recursive(true).mode(DIR_MODE).create(or_current_dir(path));
        done.map_err(|e| io_error_at_path("create the directory", path, explain_dangling_symlink(path, e)))
    }

    fn create_dir(&self, path: &Path) -> Result<()> {
        DirBuilder::new().mode(DIR_MODE).create(path).map_err(|e| io_error_at_path("create the directory", path, e))
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        let listed = || -> io::Result<Vec<DirEntry>> {
            let mut entries = Vec::new();
            for entry in fs::read_dir(or_current_dir(path))? {
                let entry = entry?;
                let metadata = match entry.metadata() {
                    Ok(metadata) => metadata,
                    // Removed since the directory was read.
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
            Err(e) => Err(io_error_at_path("look for", path, e)),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(|e| io_error_at_path(&format!("rename to {}", to.display()), from, e))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        let named = retry_on_intr(|| rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE));
        match named {
            // A file system or a kernel without the flag.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match self.exists(to)? {
                true => Err(io_error_at_path("rename", to, io::ErrorKind::AlreadyExists)),
                false => self.rename(from, to),
            },
            done => done.map_err(|e| io_error_at_path(&format!("rename to {}", to.display()), from, e)),
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
            let errno = Errno::from_io_error(&e);
            let error = io_error_at_path(&format!("link as {}", to.display()), from, e);
            // Across file systems, without hard links at all, or with too many: the caller's copy does the same.
            match errno {
                Some(Errno::XDEV | Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                    error.with_kind(ErrorKind::Unsupported)
                }
                _ => error,
            }
        })
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let synced = retry_on_intr(|| rustix::fs::open(or_current_dir(path), flags, Mode::empty()))
            .and_then(|dir| retry_on_intr(|| rustix::fs::fsync(&dir)));
        synced.map_err(|e| io_error_at_path("sync the directory", path, e))
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        // A shared lock is taken through a read-only handle, so that it works on a read-only file system.
        let access = if mode == LockMode::Shared { OFlags::RDONLY } else { OFlags::RDWR };
        let file =
            open_regular(path, access | OFlags::CREATE).map_err(|e| io_error_at_path("open the lock file", path, e))?;
        Ok(Box::new(DiskLock::acquire(file, path, mode)?))
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        let path = dir.join(LOCK_FILE_NAME);
        let file = match self.lock(&path, mode) {
            Ok(file) => Ok(file),
            // There is no file to lock and none can be created: a copy on a read-only file system.
            Err(error) if mode == LockMode::Shared && !self.exists(&path)? => Err(error),
            Err(error) => return Err(error),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = retry_on_intr(|| rustix::fs::open(dir, flags, Mode::empty()));
        let opened = opened.map_err(|e| io_error_at_path("open the directory", dir, e))?;
        match DiskLock::acquire(StdFile::from(opened), dir, mode) {
            Ok(dir) => Ok(Box::new(DirLock { _dir: Some(dir), _file: file.ok() })),
            // A file system without locks on directories (NFS): the lock on the file has to do.
            Err(error) if error.kind() == ErrorKind::Io => Ok(Box::new(DirLock { _dir: None, _file: Some(file?) })),
            Err(error) => Err(error),
        }
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        let dir = or_current_dir(dir);
        match retry_on_intr(|| rustix::fs::statfs(dir)).map(|stat| stat.f_type as u64 & 0xFFFF_FFFF) {
            Ok(EXT4_MAGIC | TMPFS_MAGIC) => true,
            Ok(XFS_MAGIC) => has_no_reflinks(dir),
            _ => false,
        }
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        let dir = or_current_dir(dir);
        match retry_on_intr(|| rustix::fs::statfs(dir)).map(|stat| stat.f_type as u64 & 0xFFFF_FFFF) {
            Ok(TMPFS_MAGIC) => PersistenceLevel::ProcessCrash,
            Ok(_) if supports_synchronous_mapping(dir) => PersistenceLevel::PowerLoss,
            _ => PersistenceLevel::WalOnly,
        }
    }
}

/// A lock on an open file or directory. The end of the process releases it too.
#[derive(Debug)]
struct DiskLock {
    file: StdFile,
    /// The process that took it, by its [`process_token`].
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
                Err(Error::new(ErrorKind::Locked, "another handle holds the lock").in_file(path))
            }
            Err(TryLockError::Error(e)) => Err(io_error_at_path("lock", path, e)),
        }
    }
}

impl FileLock for DiskLock {}

impl Drop for DiskLock {
    /// Closing the file is not enough: a child that another thread is about to start may hold it a moment longer. And a
    /// forked child shares the lock with its parent, which still needs it.
    fn drop(&mut self) {
        if self.process == process_token() {
            let _closing_unlocks_too = self.file.unlock();
        }
    }
}

/// The locks of a database directory. The file is locked first and released last, so that two processes that open the
/// directory meet at the file.
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

    /// A directory on this machine that goes with what is returned, in memory if there is such a place and it is asked
    /// for.
    pub(crate) fn temp_dir(in_memory: bool) -> tempfile::TempDir {
        let place = Path::new("/dev/shm");
        let there = if in_memory { tempfile::tempdir_in(place).ok() } else { None };
        there.unwrap_or_else(|| tempfile::tempdir().unwrap())
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

    /// A child has the lock's file open too; when it dropped its handles, its parent had no lock any more.
    #[test]
    fn a_forked_child_does_not_release_the_lock() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("LOCK");
        let file = open_regular(&path, OFlags::RDWR | OFlags::CREATE).unwrap();
        let shared_with_child = file.try_clone().unwrap();
        let lock = DiskLock::acquire(file, &path, LockMode::Exclusive).unwrap();
        drop(DiskLock { file: shared_with_child, process: lock.process + 2 });
        assert_eq!(DiskFs.lock(&path, LockMode::Shared).unwrap_err().kind(), ErrorKind::Locked);
        drop(lock);
        DiskFs.lock(&path, LockMode::Shared).unwrap();
    }

    #[test]
    fn links_pipes_and_directories_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        DiskFs.open(&at("real"), OpenMode::Create).unwrap();
        std::os::unix::fs::symlink(at("real"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
        std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, FILE_MODE, 0).unwrap();
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

    #[test]
    fn overwrites_in_place_depends_on_file_system() {
        if Path::new("/dev/shm").is_dir() {
            let shm = rustix::fs::statfs("/dev/shm").unwrap().f_type as u64;
            assert_eq!(DiskFs.overwrites_in_place(Path::new("/dev/shm")), shm == TMPFS_MAGIC);
        }
        assert!(!DiskFs.overwrites_in_place(Path::new("/proc")));
        assert!(!DiskFs.overwrites_in_place(Path::new("/no/such/directory")));
    }
}
