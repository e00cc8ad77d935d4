//! The interface of the file system in memory.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::base::{Error, ErrorKind, Result};
use crate::testing::mem_fs::crash::Survival;
use crate::testing::mem_fs::handle::{InodeHandle, MemDirLock, MemFile, MemLock, SharedMemFsTree, lock_tree};
use crate::testing::mem_fs::inode::Ino;
use crate::testing::mem_fs::tree::MemFsTree;
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LOCK_FILE_NAME, LockMode, OpenMode, PersistenceLevel};

/// A file system in memory that can lose power. A clone is the same file system; [`fork`](MemFs::fork) creates
/// another one.
///
/// It starts with an empty root directory. Relative paths start at the root.
///
/// ```
/// use azekura::fs::{Fs, OpenMode};
/// use azekura::testing::{MemFs, Survival};
/// use std::path::Path;
///
/// # fn main() -> azekura::Result<()> {
/// let fs = MemFs::new();
/// let file = fs.open(Path::new("/log"), OpenMode::Create)?;
/// file.write_at(b"kept", 0)?;
/// file.sync_data()?; // the bytes are durable
/// fs.sync_dir(Path::new("/"))?; // and so is the name
/// file.write_at(b" lost", 4)?;
///
/// fs.crash(Survival::Nothing, 0);
/// assert!(file.length().is_err(), "a handle from before the crash is invalid");
/// assert_eq!(fs.open(Path::new("/log"), OpenMode::Read)?.length()?, 4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemFs {
    tree: SharedMemFsTree,
}

impl MemFs {
    /// Creates an empty file system.
    pub fn new() -> MemFs {
        MemFs { tree: Arc::new(Mutex::new(MemFsTree::new())) }
    }

    /// Simulates a power failure and a restart. Synced changes survive; `survival` and `seed` choose the surviving
    /// unsynced changes. Every open file, mapping and lock becomes invalid. A freeze ends.
    ///
    /// The same operations, `survival` and `seed` give the same state.
    pub fn crash(&self, survival: Survival, seed: u64) {
        lock_tree(&self.tree).crash(survival, seed);
    }

    /// Loses the unsynced changes of the files with a name that contains `part`, as a system does that could not write
    /// pages back and counts them as clean. Reads return the changes until the power fails. The next sync succeeds and
    /// does not make them durable, unless the same bytes were written again before.
    pub fn lose_unsynced_writes(&self, part: &str) {
        lock_tree(&self.tree).lose_unsynced_writes(part);
    }

    /// Creates another file system in the same state, including unsynced changes, without open files. So a test can
    /// crash one state in many ways. The cost depends on the number of files, not on their lengths.
    #[must_use]
    pub fn fork(&self) -> MemFs {
        MemFs { tree: Arc::new(Mutex::new(lock_tree(&self.tree).fork())) }
    }

    /// Number of operations so far that changed something or made it durable, including stores through mappings.
    pub fn op_count(&self) -> u64 {
        lock_tree(&self.tree).op_count()
    }

    /// After `ops` more such operations every operation fails and has no effect, as if the machine stopped just
    /// before it lost power. `None` ends the freeze.
    pub fn freeze_after(&self, ops: Option<u64>) {
        lock_tree(&self.tree).freeze_after(ops);
    }

    /// Whether the operations allowed by [`freeze_after`](MemFs::freeze_after) are used up.
    pub fn is_frozen(&self) -> bool {
        lock_tree(&self.tree).is_frozen()
    }

    /// Sets the limit of the space of all files in bytes. A file uses whole pages up to its length. An operation that
    /// would exceed the limit fails with [`OutOfSpace`](ErrorKind::OutOfSpace). A file without a name counts as long
    /// as it is open. `None`, the default, means no limit.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        lock_tree(&self.tree).capacity = bytes;
    }

    /// The limit of the space of all files in bytes, or `None`.
    pub fn capacity(&self) -> Option<u64> {
        lock_tree(&self.tree).capacity
    }

    /// The space that all files use now, in bytes.
    pub fn used_space(&self) -> u64 {
        lock_tree(&self.tree).used()
    }

    /// Sets whether mappings are supported, which is the default. Without mappings
    /// [`overwrites_in_place`](Fs::overwrites_in_place) is false.
    pub fn set_mappings_enabled(&self, offered: bool) {
        lock_tree(&self.tree).mappings_enabled = offered;
    }

    /// Sets whether files can be mapped as memory, and the failures that stores into this memory survive. The default
    /// is [`PersistenceLevel::WalOnly`]: files cannot be mapped as memory. Such stores are not counted as operations,
    /// and all of them survive [`crash`](MemFs::crash).
    pub fn set_mapped_memory(&self, level: PersistenceLevel) {
        lock_tree(&self.tree).persistence_level = level;
    }

    /// Locks the inode that `find` returns.
    fn take_lock(
        &self,
        path: &Path,
        mode: LockMode,
        find: impl FnOnce(&mut MemFsTree) -> io::Result<Ino>,
    ) -> Result<MemLock> {
        let lock = self.run("lock", path, |tree| {
            let ino = find(tree)?;
            Ok(tree.lock(ino, mode).then(|| InodeHandle::new(&self.tree, tree, ino, path)))
        })?;
        let locked = || Error::new(ErrorKind::Locked, "another handle holds the lock").in_file(path);
        lock.map(MemLock).ok_or_else(locked)
    }

    /// Runs an operation on the tree. Fails if the power is off.
    fn run<T>(&self, what: &str, path: &Path, body: impl FnOnce(&mut MemFsTree) -> io::Result<T>) -> Result<T> {
        let mut tree = lock_tree(&self.tree);
        let done = tree.check_power().and_then(|()| body(&mut tree));
        done.map_err(|e| Error::io(what, &e).in_file(path))
    }
}

impl Default for MemFs {
    fn default() -> MemFs {
        MemFs::new()
    }
}

impl fmt::Debug for MemFs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFs").field("ops", &self.op_count()).finish_non_exhaustive()
    }
}

impl Fs for MemFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        let what = if mode == OpenMode::Create { "create" } else { "open" };
        self.run(what, path, |tree| {
            let ino = if mode == OpenMode::Create { tree.create(path)? } else { tree.find(path)? };
            tree.file(ino)?;
            let handle = InodeHandle::new(&self.tree, tree, ino, path);
            Ok(Arc::new(MemFile::new(handle, mode != OpenMode::Read)) as Arc<dyn File>)
        })
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.run("create the directory", path, |tree| tree.create_dir_all(path))
    }

    fn create_dir(&self, path: &Path) -> Result<()> {
        self.run("create the directory", path, |tree| tree.create_dir(path))
    }

    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        Ok(Path::new("/").join(path))
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.run("list the directory", path, |tree| tree.list(path))
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        self.run("look up", path, |tree| Ok(tree.find(path).is_ok()))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.run(&format!("rename to {}", to.display()), from, |tree| tree.rename(from, to))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        self.run(&format!("rename to {}", to.display()), from, |tree| match tree.find(to) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => tree.rename(from, to),
        })
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.run("remove", path, |tree| tree.remove_file(path))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.run("remove the directory", path, |tree| tree.remove_dir_all(path))
    }

    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        let linked = self.run(&format!("link as {}", to.display()), from, |tree| tree.hard_link(from, to));
        linked.map_err(|e| match e.os_kind() {
            Some(io::ErrorKind::PermissionDenied) => e.with_kind(ErrorKind::Unsupported),
            _ => e,
        })
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.run("sync the directory", path, |tree| tree.sync_dir(path))
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        Ok(Box::new(self.take_lock(path, mode, |tree| {
            let ino = match tree.find(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => tree.create(path)?,
                found => found?,
            };
            tree.file(ino).map(|_| ino)
        })?))
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        let file = self.lock(&dir.join(LOCK_FILE_NAME), mode)?;
        let dir = self.take_lock(dir, mode, |tree| tree.find(dir))?;
        Ok(Box::new(MemDirLock { _dir: dir, _file: file }))
    }

    fn overwrites_in_place(&self, _dir: &Path) -> bool {
        lock_tree(&self.tree).mappings_enabled
    }

    fn persistence_level(&self, _dir: &Path) -> PersistenceLevel {
        lock_tree(&self.tree).persistence_level
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "/f";

    fn read(fs: &MemFs, path: &str) -> Result<Vec<u8>> {
        let file = fs.open(Path::new(path), OpenMode::Read)?;
        let mut bytes = vec![0; file.length()? as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    fn durable_file(fs: &MemFs) -> Arc<dyn File> {
        let file = fs.open(Path::new(FILE), OpenMode::Create).unwrap();
        fs.sync_dir(Path::new("/")).unwrap();
        file
    }

    #[test]
    fn frozen_file_system_fails_every_operation() {
        let fs = MemFs::new();
        let file = durable_file(&fs);
        fs.freeze_after(Some(2));
        file.write_at(b"1", 0).unwrap();
        assert!(!fs.is_frozen() && file.length().is_ok());
        file.write_at(b"2", 1).unwrap();
        assert!(fs.is_frozen());
        let ops = fs.op_count();
        let errors = [
            file.write_at(b"3", 2).unwrap_err(),
            file.sync_data().unwrap_err(),
            file.length().unwrap_err(),
            file.read_at(&mut [0], 0).unwrap_err(),
            fs.exists(Path::new(FILE)).unwrap_err(),
            fs.remove_file(Path::new(FILE)).unwrap_err(),
            fs.lock(Path::new("/LOCK"), LockMode::Shared).map(|_| ()).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Io && error.file().is_some()));
        assert_eq!(fs.op_count(), ops);
        assert_eq!(fs.fork().exists(Path::new(FILE)).unwrap_err().kind(), ErrorKind::Io, "a fork is frozen too");
        fs.crash(Survival::Everything, 0);
        assert_eq!(read(&fs, FILE).unwrap(), b"12");
    }

    #[test]
    fn unfreeze_ends_a_freeze() {
        let fs = MemFs::new();
        let file = durable_file(&fs);
        fs.freeze_after(Some(0));
        assert!(file.write_at(b"x", 0).is_err());
        fs.freeze_after(None);
        file.write_at(b"x", 0).unwrap();
    }

    #[test]
    fn fork_is_independent() {
        let fs = MemFs::new();
        let file = durable_file(&fs);
        file.write_at(b"both", 0).unwrap();
        let _lock = fs.lock(Path::new("/LOCK"), LockMode::Exclusive).unwrap();
        let fork = fs.fork();
        fork.lock(Path::new("/LOCK"), LockMode::Exclusive).expect("the fork has no locks");
        file.write_at(b"mine", 0).unwrap();
        assert_eq!((read(&fs, FILE).unwrap(), read(&fork, FILE).unwrap()), (b"mine".to_vec(), b"both".to_vec()));
        fork.crash(Survival::Nothing, 0);
        assert_eq!(read(&fork, FILE).unwrap(), b"");
        file.sync_data().expect("the crash of the fork has no effect on this file system");
    }

    #[test]
    fn locks_end_at_crash_and_old_ones_do_not_unlock() {
        let fs = MemFs::new();
        let path = Path::new("/LOCK");
        let old = fs.lock(path, LockMode::Exclusive).unwrap();
        fs.crash(Survival::Everything, 0);
        let new = fs.lock(path, LockMode::Exclusive).unwrap();
        drop(old);
        assert_eq!(fs.lock(path, LockMode::Shared).map(|_| ()).unwrap_err().kind(), ErrorKind::Locked);
        drop(new);
        fs.lock(path, LockMode::Shared).unwrap();
    }

    #[test]
    fn map_returns_none_when_mappings_are_disabled() {
        let fs = MemFs::new();
        let file = durable_file(&fs);
        assert!(fs.overwrites_in_place(Path::new("/")) && file.map(1).unwrap().is_some());
        fs.set_mappings_enabled(false);
        assert!(!fs.overwrites_in_place(Path::new("/")) && file.map(1).unwrap().is_none());
    }
}
