//! The directory tree, the operation counter, and the simulated power. Errors have the kinds of the operating system;
//! [`MemFs`](crate::testing::MemFs) adds the path.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

use crate::testing::mem_fs::content::PAGE;
use crate::testing::mem_fs::crash::{Survival, state_after_crash};
use crate::testing::mem_fs::inode::{DirNode, FileNode, Ino, Inode};
use crate::testing::mem_fs::mapped_words::{self, MappedFileTable, MappedFileWords, SharedWords};
use crate::vfs::fs::{DirEntry, LockMode, PersistenceLevel};

const ROOT: Ino = 1;

/// State of the lock on a file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MemLockState {
    Exclusive,
    Shared(u32),
}

/// Space in bytes that a file of length `len` uses.
fn pages(len: u64) -> u64 {
    len.next_multiple_of(PAGE as u64)
}

/// The whole file system.
#[derive(Clone, Debug)]
pub(crate) struct MemFsTree {
    inodes: BTreeMap<Ino, Arc<Inode>>,
    next_ino: Ino,
    next_group: u64,
    /// Number of open handles of each file. A handle keeps a file without a name alive.
    handles: BTreeMap<Ino, u32>,
    locks: BTreeMap<Ino, MemLockState>,
    /// A name was removed since the last sweep.
    needs_sweep: bool,
    ops: u64,
    freeze_at: Option<u64>,
    /// Number of power failures. Handles of an earlier boot are invalid.
    boot: u64,
    /// Limit of the space of all files in bytes.
    pub(crate) capacity: Option<u64>,
    pub(crate) mappings_enabled: bool,
    pub(crate) persistence_level: PersistenceLevel,
    mapped_files: MappedFileTable,
}

impl MemFsTree {
    pub(crate) fn new() -> MemFsTree {
        MemFsTree {
            inodes: BTreeMap::from([(ROOT, Arc::new(Inode::Dir(DirNode::default())))]),
            next_ino: ROOT + 1,
            next_group: 0,
            handles: BTreeMap::new(),
            locks: BTreeMap::new(),
            needs_sweep: false,
            ops: 0,
            freeze_at: None,
            boot: 0,
            capacity: None,
            mappings_enabled: true,
            persistence_level: PersistenceLevel::WalOnly,
            mapped_files: MappedFileTable::new(),
        }
    }

    /// Returns a copy without open files and locks. The copies share all pages.
    pub(crate) fn fork(&self) -> MemFsTree {
        let mut copy = self.clone();
        copy.unmap_all();
        copy.handles.clear();
        copy.locks.clear();
        copy.needs_sweep = true;
        copy
    }

    /// Maps a file as memory. `None` if this is not supported.
    pub(crate) fn map_words(&mut self, ino: Ino, len: u64) -> io::Result<Option<SharedWords>> {
        if self.persistence_level == PersistenceLevel::WalOnly {
            return Ok(None);
        }
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if let Some(mapped) = self.mapped_files.get_mut(&ino) {
            let longer = || io::Error::other("the file is already mapped as memory, with a shorter length");
            let words = mapped.words.first(len).ok_or_else(longer)?;
            mapped.mappings += 1;
            return Ok(Some(words));
        }
        let words = mapped_words::load_words(self.file(ino)?, len);
        self.mapped_files.insert(ino, MappedFileWords { words: words.clone(), mappings: 1 });
        Ok(Some(words))
    }

    /// Removes one mapping of a file and copies its words to the bytes of the file. The last mapping also frees the
    /// words.
    pub(crate) fn unmap_words(&mut self, ino: Ino) {
        let Some(mapped) = self.mapped_files.get_mut(&ino) else { return };
        mapped.mappings -= 1;
        let words = mapped.words.clone();
        if mapped.mappings == 0 {
            self.mapped_files.remove(&ino);
        }
        if let Ok(file) = self.file_mut(ino) {
            mapped_words::write_back(file, words.words());
        }
    }

    fn unmap_all(&mut self) {
        let all: Vec<Ino> = self.mapped_files.keys().copied().collect();
        for ino in all {
            while self.mapped_files.contains_key(&ino) {
                self.unmap_words(ino);
            }
        }
    }

    pub(crate) fn crash(&mut self, survival: Survival, seed: u64) {
        self.unmap_all();
        for (ino, inode) in &mut self.inodes {
            let dirty = match &**inode {
                Inode::File(file) => !file.pending.is_empty() || file.has_lost_writes,
                Inode::Dir(dir) => !dir.pending.is_empty(),
            };
            if dirty {
                *inode = Arc::new(state_after_crash(inode, *ino, survival, seed));
            }
        }
        self.handles.clear();
        self.locks.clear();
        self.freeze_at = None;
        self.boot += 1;
        self.needs_sweep = true;
        self.sweep();
    }

    pub(crate) fn boot(&self) -> u64 {
        self.boot
    }

    pub(crate) fn op_count(&self) -> u64 {
        self.ops
    }

    pub(crate) fn freeze_after(&mut self, ops: Option<u64>) {
        self.freeze_at = ops.map(|ops| self.ops.saturating_add(ops));
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.freeze_at.is_some_and(|at| self.ops >= at)
    }

    /// Fails if the power is off.
    pub(crate) fn check_power(&self) -> io::Result<()> {
        if self.is_frozen() { Err(io::Error::other("the simulated machine is frozen")) } else { Ok(()) }
    }

    /// Counts an operation that changes something, or fails if the power is off.
    pub(crate) fn begin_op(&mut self) -> io::Result<()> {
        self.check_power()?;
        self.ops += 1;
        Ok(())
    }

    fn inode(&self, ino: Ino) -> &Inode {
        self.inodes.get(&ino).expect("a name or a handle keeps its inode")
    }

    pub(crate) fn file(&self, ino: Ino) -> io::Result<&FileNode> {
        match self.inode(ino) {
            Inode::File(file) => Ok(file),
            Inode::Dir(_) => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// Loses the pending changes of the files with a name that contains `part`.
    pub(crate) fn lose_unsynced_writes(&mut self, part: &str) {
        let dirs = self.inodes.values().filter_map(|inode| match &**inode {
            Inode::Dir(dir) => Some(dir),
            Inode::File(_) => None,
        });
        let names = dirs.flat_map(|dir| &dir.live).filter(|(name, _)| name.contains(part));
        let found: Vec<Ino> = names.map(|(_, ino)| *ino).collect();
        for ino in found {
            if let Ok(file) = self.file_mut(ino) {
                file.lose_pending();
            }
        }
    }

    pub(crate) fn file_mut(&mut self, ino: Ino) -> io::Result<&mut FileNode> {
        match Arc::make_mut(self.inodes.get_mut(&ino).expect("a name or a handle keeps its inode")) {
            Inode::File(file) => Ok(file),
            Inode::Dir(_) => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// Space in bytes that files with a name or an open handle use: whole pages up to their lengths.
    pub(crate) fn used(&self) -> u64 {
        let dirs = self.inodes.values().filter_map(|inode| match &**inode {
            Inode::Dir(dir) => Some(dir),
            Inode::File(_) => None,
        });
        let named: BTreeSet<Ino> = dirs.flat_map(|dir| dir.live.values().copied()).chain(self.open_files()).collect();
        named.into_iter().filter_map(|ino| self.file(ino).ok()).map(|file| pages(file.live.length())).sum()
    }

    fn open_files(&self) -> impl Iterator<Item = Ino> {
        self.handles.keys().copied()
    }

    /// Fails if there is not enough space for a file to grow to `len` bytes.
    pub(crate) fn check_space(&self, ino: Ino, len: u64) -> io::Result<()> {
        let Some(capacity) = self.capacity else { return Ok(()) };
        let (before, after) = (pages(self.file(ino)?.live.length()), pages(len));
        let fits = after <= before || self.used() - before + after <= capacity;
        if fits { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }

    fn dir(&self, ino: Ino) -> io::Result<&DirNode> {
        match self.inode(ino) {
            Inode::Dir(dir) => Ok(dir),
            Inode::File(_) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn dir_mut(&mut self, ino: Ino) -> io::Result<&mut DirNode> {
        match Arc::make_mut(self.inodes.get_mut(&ino).expect("a name or a handle keeps its inode")) {
            Inode::Dir(dir) => Ok(dir),
            Inode::File(_) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// The inode that `path` names.
    pub(crate) fn find(&self, path: &Path) -> io::Result<Ino> {
        self.resolve(&names(path))
    }

    fn resolve(&self, names: &[String]) -> io::Result<Ino> {
        let mut at = ROOT;
        for name in names {
            at = self.child(at, name)?.ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(at)
    }

    fn child(&self, dir: Ino, name: &str) -> io::Result<Option<Ino>> {
        Ok(self.dir(dir)?.live.get(name).copied())
    }

    /// The directory that contains the last component of `path`, that component, and its inode if it exists.
    fn resolve_parent(&self, path: &Path) -> io::Result<(Ino, String, Option<Ino>)> {
        let mut names = names(path);
        let last = names.pop().ok_or(io::ErrorKind::InvalidInput)?;
        let dir = self.resolve(&names)?;
        let target = self.child(dir, &last)?;
        Ok((dir, last, target))
    }

    fn add(&mut self, inode: Inode) -> Ino {
        let ino = self.next_ino;
        self.next_ino += 1;
        self.inodes.insert(ino, Arc::new(inode));
        ino
    }

    /// Creates an empty file under a new name.
    pub(crate) fn create(&mut self, path: &Path) -> io::Result<Ino> {
        let (dir, name, target) = self.resolve_parent(path)?;
        if target.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.begin_op()?;
        let ino = self.add(Inode::File(FileNode::default()));
        self.dir_mut(dir)?.set(&name, Some(ino), None);
        Ok(ino)
    }

    pub(crate) fn create_dir_all(&mut self, path: &Path) -> io::Result<()> {
        let mut at = ROOT;
        for name in names(path) {
            at = match self.child(at, &name)? {
                Some(ino) => ino,
                None => {
                    self.begin_op()?;
                    let ino = self.add(Inode::Dir(DirNode::default()));
                    self.dir_mut(at)?.set(&name, Some(ino), None);
                    ino
                }
            };
        }
        self.dir(at).map(|_| ()).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Creates an empty directory under a new name.
    pub(crate) fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        let (dir, name, target) = self.resolve_parent(path)?;
        if target.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.begin_op()?;
        let ino = self.add(Inode::Dir(DirNode::default()));
        self.dir_mut(dir)?.set(&name, Some(ino), None);
        Ok(())
    }

    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let entry = |(name, ino): (&String, &Ino)| {
            let file = self.file(*ino).ok();
            DirEntry { name: name.clone(), len: file.map_or(0, |f| f.live.length()), is_file: file.is_some() }
        };
        Ok(self.dir(self.find(path)?)?.live.iter().map(entry).collect())
    }

    pub(crate) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let (from_dir, from_name, moved) = self.resolve_parent(from)?;
        let (to_dir, to_name, replaced) = self.resolve_parent(to)?;
        let moved = moved.ok_or(io::ErrorKind::NotFound)?;
        if replaced == Some(moved) {
            return Ok(());
        }
        let is_dir = self.dir(moved).is_ok();
        if is_dir && self.descendants(moved).contains(&to_dir) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match replaced.map(|ino| self.dir(ino)) {
            Some(Ok(_)) if !is_dir => return Err(io::ErrorKind::IsADirectory.into()),
            Some(Ok(dir)) if !dir.live.is_empty() => return Err(io::ErrorKind::DirectoryNotEmpty.into()),
            Some(Err(_)) if is_dir => return Err(io::ErrorKind::NotADirectory.into()),
            _ => {}
        }
        self.begin_op()?;
        self.next_group += 1;
        let group = is_dir.then_some(self.next_group);
        self.dir_mut(to_dir)?.set(&to_name, Some(moved), group);
        self.dir_mut(from_dir)?.set(&from_name, None, group);
        self.needs_sweep = true;
        Ok(())
    }

    pub(crate) fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        let (dir, name, target) = self.resolve_parent(path)?;
        self.file(target.ok_or(io::ErrorKind::NotFound)?)?;
        self.begin_op()?;
        self.needs_sweep = true;
        self.dir_mut(dir)?.set(&name, None, None);
        Ok(())
    }

    /// Removes the names below the directory one after the other, and the directory itself last. Each removal is an
    /// operation, after which the power may fail.
    pub(crate) fn remove_dir_all(&mut self, path: &Path) -> io::Result<()> {
        let (parent, name, target) = self.resolve_parent(path)?;
        let top = target.ok_or(io::ErrorKind::NotFound)?;
        self.dir(top)?;
        self.needs_sweep = true;
        for ino in self.descendants(top) {
            let names = self.dir(ino).map_or(Vec::new(), |dir| dir.live.keys().cloned().collect());
            for name in names {
                self.begin_op()?;
                self.dir_mut(ino)?.set(&name, None, None);
            }
        }
        self.begin_op()?;
        self.dir_mut(parent)?.set(&name, None, None);
        Ok(())
    }

    pub(crate) fn hard_link(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let ino = self.find(from)?;
        // Linux refuses links to directories with EPERM.
        self.file(ino).map_err(|_| io::ErrorKind::PermissionDenied)?;
        let (dir, name, target) = self.resolve_parent(to)?;
        if target.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.begin_op()?;
        self.dir_mut(dir)?.set(&name, Some(ino), None);
        Ok(())
    }

    pub(crate) fn sync_dir(&mut self, path: &Path) -> io::Result<()> {
        let ino = self.find(path)?;
        self.dir(ino)?;
        self.begin_op()?;
        let groups = self.dir_mut(ino)?.sync();
        if !groups.is_empty() {
            for inode in
                self.inodes.values_mut().filter(|inode| matches!(&***inode, Inode::Dir(d) if !d.pending.is_empty()))
            {
                if let Inode::Dir(dir) = Arc::make_mut(inode) {
                    dir.pending
                        .iter_mut()
                        .for_each(|op| op.must_survive |= op.group.is_some_and(|g| groups.contains(&g)));
                }
            }
        }
        self.sweep();
        Ok(())
    }

    /// Locks a file. Returns false if a lock on it excludes this one.
    pub(crate) fn lock(&mut self, ino: Ino, mode: LockMode) -> bool {
        match (self.locks.get_mut(&ino), mode) {
            (None, LockMode::Exclusive) => _ = self.locks.insert(ino, MemLockState::Exclusive),
            (None, LockMode::Shared) => _ = self.locks.insert(ino, MemLockState::Shared(1)),
            (Some(MemLockState::Shared(holders)), LockMode::Shared) => *holders += 1,
            (Some(_), _) => return false,
        }
        true
    }

    pub(crate) fn unlock(&mut self, ino: Ino) {
        match self.locks.get_mut(&ino) {
            Some(MemLockState::Shared(holders)) if *holders > 1 => *holders -= 1,
            _ => _ = self.locks.remove(&ino),
        }
    }

    pub(crate) fn add_handle(&mut self, ino: Ino) {
        *self.handles.entry(ino).or_insert(0) += 1;
    }

    pub(crate) fn remove_handle(&mut self, ino: Ino) {
        if let Some(count) = self.handles.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                self.handles.remove(&ino);
            }
        }
    }

    /// `top` and all inodes that are reachable from it through live names.
    fn descendants(&self, top: Ino) -> BTreeSet<Ino> {
        self.reachable_from(vec![top], |dir, found| found.extend(dir.live.values()))
    }

    fn reachable_from(&self, mut open: Vec<Ino>, each: impl Fn(&DirNode, &mut Vec<Ino>)) -> BTreeSet<Ino> {
        let mut seen = BTreeSet::new();
        while let Some(ino) = open.pop() {
            if seen.insert(ino)
                && let Some(Inode::Dir(dir)) = self.inodes.get(&ino).map(|inode| &**inode)
            {
                each(dir, &mut open);
            }
        }
        seen
    }

    /// Removes the inodes that no handle and no name reaches. Names that may exist after a crash count as well.
    fn sweep(&mut self) {
        if !std::mem::take(&mut self.needs_sweep) {
            return;
        }
        let possible = |dir: &DirNode, found: &mut Vec<Ino>| {
            found.extend(dir.live.values());
            found.extend(dir.synced.values());
            found.extend(dir.pending.iter().filter_map(|op| op.target));
        };
        let named = self.reachable_from(vec![ROOT], possible);
        // Inodes that only a handle keeps are checked again in the next sweep.
        self.needs_sweep = self.handles.keys().any(|ino| !named.contains(ino));
        let handles = &self.handles;
        self.inodes.retain(|ino, _| named.contains(ino) || handles.contains_key(ino));
    }

    #[cfg(test)]
    pub(crate) fn inode_count(&self) -> usize {
        self.inodes.len()
    }
}

/// The components of a path from the root. There is no working directory, so relative paths start at the root too.
fn names(path: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => names.push(name.to_string_lossy().into_owned()),
            Component::ParentDir => _ = names.pop(),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> &Path {
        Path::new(name)
    }

    fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> io::ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn paths_are_cleaned_and_start_at_the_root() {
        assert_eq!(names(path("/a/./b//../c")), ["a", "c"]);
        assert_eq!(names(path("a/c")), ["a", "c"]);
        assert!(names(path("")).is_empty() && names(path("../..")).is_empty());
    }

    #[test]
    fn errors_match_the_operating_system() {
        let mut tree = MemFsTree::new();
        tree.create_dir_all(path("/d/e")).unwrap();
        tree.create(path("/f")).unwrap();
        let ops = tree.op_count();
        assert_eq!(kind(tree.create(path("/f"))), io::ErrorKind::AlreadyExists);
        assert_eq!(kind(tree.create(path("/none/f"))), io::ErrorKind::NotFound);
        assert_eq!(kind(tree.create(path("/f/g"))), io::ErrorKind::NotADirectory);
        assert_eq!(kind(tree.create(path("/"))), io::ErrorKind::InvalidInput);
        assert_eq!(kind(tree.create_dir_all(path("/f"))), io::ErrorKind::AlreadyExists);
        assert_eq!(kind(tree.rename(path("/d"), path("/d/e/d"))), io::ErrorKind::InvalidInput);
        assert_eq!(kind(tree.rename(path("/f"), path("/d"))), io::ErrorKind::IsADirectory);
        assert_eq!(kind(tree.rename(path("/d"), path("/f"))), io::ErrorKind::NotADirectory);
        tree.create_dir_all(path("/x")).unwrap();
        assert_eq!(kind(tree.rename(path("/x"), path("/d"))), io::ErrorKind::DirectoryNotEmpty);
        assert_eq!(kind(tree.hard_link(path("/d"), path("/d2"))), io::ErrorKind::PermissionDenied);
        assert_eq!(kind(tree.remove_dir_all(path("/f"))), io::ErrorKind::NotADirectory);
        assert_eq!(tree.op_count(), ops + 1, "a refused operation was counted");
        tree.rename(path("/x"), path("/d/e")).unwrap();
        tree.rename(path("/f"), path("/f")).unwrap();
        assert_eq!(tree.list(path("/")).unwrap().len(), 2);
    }

    #[test]
    fn unreachable_inodes_are_removed() {
        let mut tree = MemFsTree::new();
        tree.create_dir_all(path("/d")).unwrap();
        let ino = tree.create(path("/d/f")).unwrap();
        tree.add_handle(ino);
        tree.sync_dir(path("/d")).unwrap();
        tree.sync_dir(path("/")).unwrap();
        tree.remove_dir_all(path("/d")).unwrap();
        tree.sync_dir(path("/")).unwrap();
        assert_eq!(tree.inode_count(), 2, "the root, and the file with a handle");
        tree.remove_handle(ino);
        tree.sync_dir(path("/")).unwrap();
        assert_eq!(tree.inode_count(), 1);
    }

    #[test]
    fn unsynced_removal_keeps_the_file() {
        let mut tree = MemFsTree::new();
        tree.create(path("/f")).unwrap();
        tree.sync_dir(path("/")).unwrap();
        tree.remove_file(path("/f")).unwrap();
        tree.create_dir_all(path("/d")).unwrap();
        tree.sync_dir(path("/d")).unwrap();
        assert_eq!(tree.inode_count(), 3);
        tree.crash(Survival::Nothing, 0);
        assert_eq!(tree.list(path("/")).unwrap()[0].name, "f");
    }

    #[test]
    fn synced_half_of_dir_rename_keeps_other_half() {
        for seed in 0..50 {
            let mut tree = MemFsTree::new();
            tree.create_dir_all(path("/a/moved")).unwrap();
            tree.create_dir_all(path("/b")).unwrap();
            tree.sync_dir(path("/")).unwrap();
            tree.sync_dir(path("/a")).unwrap();
            tree.rename(path("/a/moved"), path("/b/moved")).unwrap();
            let mut synced = tree.fork();
            synced.sync_dir(path("/b")).unwrap();
            synced.crash(Survival::Nothing, seed);
            assert!(synced.find(path("/b/moved")).is_ok() && synced.find(path("/a/moved")).is_err());
            tree.crash(Survival::Random, seed);
            assert_ne!(tree.find(path("/b/moved")).is_ok(), tree.find(path("/a/moved")).is_ok(), "seed {seed}");
        }
    }
}
