//! Handles of the file system in memory: open files, mappings, locks. A power failure invalidates all of them.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::mapped_memory::{MappedBytes, MappedMemory};
use crate::base::shared_bytes::BytesOwner;
use crate::base::{Error, Result};
use crate::testing::mem_fs::content::{MAX_LEN, PAGE};
use crate::testing::mem_fs::inode::Ino;
use crate::testing::mem_fs::mapped_words::SharedWords;
use crate::testing::mem_fs::tree::MemFsTree;
use crate::vfs::fs::{File, FileLock, Mapping, PersistenceLevel, check_read_len};

/// The tree, shared by all handles.
pub(crate) type SharedMemFsTree = Arc<Mutex<MemFsTree>>;

/// Locks the tree for one operation. After a panic in another thread the tree is still consistent, because no code
/// panics between two changes.
pub(crate) fn lock_tree(tree: &SharedMemFsTree) -> MutexGuard<'_, MemFsTree> {
    tree.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps an inode alive. The handle is valid until the next power failure.
#[derive(Debug)]
pub(crate) struct InodeHandle {
    tree: SharedMemFsTree,
    ino: Ino,
    boot: u64,
    path: PathBuf,
}

impl InodeHandle {
    /// `locked_tree` is the content of `tree`, which the caller has locked.
    pub(crate) fn new(tree: &SharedMemFsTree, locked_tree: &mut MemFsTree, ino: Ino, path: &Path) -> InodeHandle {
        locked_tree.add_handle(ino);
        InodeHandle { tree: Arc::clone(tree), ino, boot: locked_tree.boot(), path: path.to_path_buf() }
    }

    /// Locks the tree. Fails if the power is off, or failed after this handle was opened.
    fn lock_tree(&self) -> io::Result<MutexGuard<'_, MemFsTree>> {
        let tree = lock_tree(&self.tree);
        if tree.boot() != self.boot {
            return Err(io::Error::other("the simulated machine lost power after the handle was opened"));
        }
        tree.check_power()?;
        Ok(tree)
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::io(what, &error).in_file(&self.path)
    }
}

impl Drop for InodeHandle {
    fn drop(&mut self) {
        let mut tree = lock_tree(&self.tree);
        if tree.boot() == self.boot {
            tree.remove_handle(self.ino);
        }
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct MemFile {
    handle: Arc<InodeHandle>,
    writable: bool,
}

impl MemFile {
    pub(crate) fn new(handle: InodeHandle, writable: bool) -> MemFile {
        MemFile { handle: Arc::new(handle), writable }
    }

    /// Locks the tree for a change that extends the file up to `end` at most. `None` means that the end overflows.
    fn change(&self, end: Option<u64>) -> io::Result<MutexGuard<'_, MemFsTree>> {
        let mut tree = self.handle.lock_tree()?;
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if end.is_none_or(|end| end > MAX_LEN) {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        tree.begin_op()?;
        Ok(tree)
    }

    /// Locks the tree for a change that needs space up to `end`.
    fn grow(&self, end: Option<u64>) -> io::Result<MutexGuard<'_, MemFsTree>> {
        let tree = self.change(end)?;
        tree.check_space(self.handle.ino, end.unwrap_or(u64::MAX))?;
        Ok(tree)
    }

    fn sync(&self) -> Result<()> {
        let done = self.handle.lock_tree().and_then(|mut tree| {
            tree.begin_op()?;
            tree.file_mut(self.handle.ino)?.sync();
            Ok(())
        });
        done.map_err(|e| self.handle.failed("sync", e))
    }
}

impl File for MemFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let done = self.handle.lock_tree().and_then(|tree| Ok(tree.file(self.handle.ino)?.live.read(buf, offset)));
        done.map_err(|e| self.handle.failed("read", e).at_offset(offset))
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let got = self.read_at(buf, offset)?;
        check_read_len(got, buf.len(), offset).map_err(|e| e.in_file(&self.handle.path))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let done = self.grow(offset.checked_add(bytes.len() as u64)).and_then(|mut tree| {
            tree.file_mut(self.handle.ino)?.store(bytes, offset, false);
            Ok(())
        });
        done.map_err(|e| self.handle.failed("write", e).at_offset(offset))
    }

    fn is_in_memory(&self, _offset: u64) -> bool {
        true
    }

    fn length(&self) -> Result<u64> {
        let done = self.handle.lock_tree().and_then(|tree| Ok(tree.file(self.handle.ino)?.live.length()));
        done.map_err(|e| self.handle.failed("read the length", e))
    }

    fn set_length(&self, len: u64) -> Result<()> {
        let done = self.grow(Some(len)).and_then(|mut tree| {
            tree.file_mut(self.handle.ino)?.set_length(len);
            Ok(())
        });
        done.map_err(|e| self.handle.failed("set the length", e))
    }

    fn allocate(&self, len: u64) -> Result<()> {
        let done = self.grow(Some(len)).and_then(|mut tree| {
            let file = tree.file_mut(self.handle.ino)?;
            file.set_length(len.max(file.live.length()));
            Ok(())
        });
        done.map_err(|e| self.handle.failed("allocate", e))
    }

    fn sync_data(&self) -> Result<()> {
        self.sync()
    }

    fn sync_all(&self) -> Result<()> {
        self.sync()
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        let maps =
            self.handle.lock_tree().map(|tree| tree.mappings_enabled).map_err(|e| self.handle.failed("map", e))?;
        if !maps {
            return Ok(None);
        }
        if !(1..=MAX_LEN).contains(&len) {
            return Err(
                Error::invalid("a mapping needs at least 1 byte and must fit into memory").in_file(&self.handle.path)
            );
        }
        if !self.writable {
            return Err(self.handle.failed("map", io::ErrorKind::PermissionDenied.into()));
        }
        let resident = Mutex::new(Vec::new());
        Ok(Some(Box::new(MemMapping { handle: Arc::clone(&self.handle), len, resident })))
    }

    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        if !(8..=MAX_LEN).contains(&len) || !len.is_multiple_of(8) {
            return Err(Error::invalid("mapped memory needs a positive multiple of 8 bytes and must fit into memory")
                .in_file(&self.handle.path));
        }
        let words = self
            .handle
            .lock_tree()
            .and_then(|mut tree| Ok((tree.persistence_level, tree.map_words(self.handle.ino, len)?)));
        let (level, words) = words.map_err(|e| self.handle.failed("map", e))?;
        let survives = level == PersistenceLevel::PowerLoss;
        Ok(words.map(|words| {
            Box::new(MemMappedMemory { handle: Arc::clone(&self.handle), words, survives_power_loss: survives })
                as Box<dyn MappedMemory>
        }))
    }

    fn map_for_reading(&self, len: u64) -> Result<Option<Arc<MappedBytes>>> {
        let maps = self.handle.lock_tree().map(|tree| tree.mappings_enabled);
        if !maps.map_err(|e| self.handle.failed("map", e))? || len == 0 {
            return Ok(None);
        }
        let length = self.length()?;
        check_read_len(length.min(len) as usize, len as usize, 0).map_err(|e| e.in_file(&self.handle.path))?;
        let mut bytes = vec![0; len as usize];
        self.read_exact_at(&mut bytes, 0)?;
        Ok(Some(MappedBytes::new(MemMappedBytes { handle: Arc::clone(&self.handle), bytes: bytes.into() })))
    }
}

/// The bytes of a file when it was mapped for reading. They use space until they are dropped.
struct MemMappedBytes {
    handle: Arc<InodeHandle>,
    bytes: Box<[u8]>,
}

impl BytesOwner for MemMappedBytes {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for MemMappedBytes {
    /// Checks that the file was not changed while it was mapped.
    fn drop(&mut self) {
        let tree = lock_tree(&self.handle.tree);
        if tree.boot() != self.handle.boot || std::thread::panicking() {
            return;
        }
        let mut now = vec![0; self.bytes.len()];
        let got = tree.file(self.handle.ino).map_or(0, |file| file.live.read(&mut now, 0));
        drop(tree);
        assert!(got == now.len() && now == *self.bytes, "a file that is mapped for reading was changed");
    }
}

/// The words of an open file that is mapped as memory.
struct MemMappedMemory {
    handle: Arc<InodeHandle>,
    words: SharedWords,
    survives_power_loss: bool,
}

impl MappedMemory for MemMappedMemory {
    fn atomic_words(&self) -> &[AtomicU64] {
        self.words.words()
    }

    fn survives_power_loss(&self) -> bool {
        self.survives_power_loss
    }
}

impl Drop for MemMappedMemory {
    fn drop(&mut self) {
        let mut tree = lock_tree(&self.handle.tree);
        if tree.boot() == self.handle.boot {
            tree.unmap_words(self.handle.ino);
        }
    }
}

impl fmt::Debug for MemMappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemMappedMemory").field("words", &self.words.words().len()).finish_non_exhaustive()
    }
}

/// A mapping. It is stricter than a real one: a store into a range that was not populated panics, because on disk
/// such a store could raise a signal.
struct MemMapping {
    handle: Arc<InodeHandle>,
    len: u64,
    /// Bitmap of the populated pages.
    resident: Mutex<Vec<u64>>,
}

impl MemMapping {
    fn inside(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Page numbers of a range that is not empty.
    fn pages(offset: u64, len: u64) -> std::ops::RangeInclusive<usize> {
        (offset / PAGE as u64) as usize..=((offset + len - 1) / PAGE as u64) as usize
    }

    fn is_resident(&self, offset: u64, len: u64) -> bool {
        let resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        Self::pages(offset, len).all(|page| resident.get(page / 64).is_some_and(|word| word >> (page % 64) & 1 == 1))
    }
}

impl Mapping for MemMapping {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        let len = bytes.len() as u64;
        assert!(self.inside(offset, len), "a store is inside its mapping");
        if len == 0 {
            return;
        }
        assert!(self.is_resident(offset, len), "a store is in a range that was populated");
        // Without power a store has no effect, and the caller gets no error.
        let Ok(mut tree) = self.handle.lock_tree() else { return };
        let length = tree.file(self.handle.ino).map_or(0, |file| file.live.length());
        let past_the_end = offset + len > length;
        if !past_the_end && tree.begin_op().is_ok() {
            let file = tree.file_mut(self.handle.ino).expect("only files are mapped");
            file.store(bytes, offset, true);
        }
        drop(tree);
        assert!(!past_the_end, "a store is inside its file");
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        if !self.inside(offset, len) {
            let error = Error::invalid("the range is outside the mapping");
            return Err(error.in_file(&self.handle.path).at_offset(offset));
        }
        let length = self.handle.lock_tree().and_then(|tree| Ok(tree.file(self.handle.ino)?.live.length()));
        let length = length.map_err(|e| self.handle.failed("populate", e).at_offset(offset))?;
        if len == 0 {
            return Ok(());
        }
        if offset + len > length.next_multiple_of(PAGE as u64) {
            let error = io::Error::other("the range is past the end of the file");
            return Err(self.handle.failed("populate", error).at_offset(offset));
        }
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        for page in Self::pages(offset, len) {
            if resident.len() <= page / 64 {
                resident.resize(page / 64 + 1, 0);
            }
            resident[page / 64] |= 1 << (page % 64);
        }
        Ok(())
    }
}

impl fmt::Debug for MemMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemMapping").field("path", &self.handle.path).field("len", &self.len).finish()
    }
}

/// A lock on a file.
#[derive(Debug)]
pub(crate) struct MemLock(pub(crate) InodeHandle);

impl FileLock for MemLock {}

impl Drop for MemLock {
    fn drop(&mut self) {
        let mut tree = lock_tree(&self.0.tree);
        if tree.boot() == self.0.boot {
            tree.unlock(self.0.ino);
        }
    }
}

/// The locks of a database directory.
#[derive(Debug)]
pub(crate) struct MemDirLock {
    pub(crate) _dir: MemLock,
    pub(crate) _file: Box<dyn FileLock>,
}

impl FileLock for MemDirLock {}

#[cfg(test)]
mod tests {
    use crate::base::ErrorKind;
    use crate::testing::mem_fs::content::MAX_LEN;
    use crate::testing::{MemFs, Survival};
    use crate::vfs::fs::{File, Fs, Mapping, OpenMode};
    use std::path::Path;
    use std::sync::Arc;

    fn mapped(len: u64) -> (MemFs, Arc<dyn File>, Box<dyn Mapping>) {
        let fs = MemFs::new();
        let file = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
        file.allocate(len).unwrap();
        let mapping = file.map(100_000).unwrap().unwrap();
        (fs, file, mapping)
    }

    #[test]
    #[should_panic(expected = "was populated")]
    fn store_panics_when_range_is_not_populated() {
        let (_fs, _file, mapping) = mapped(100_000);
        mapping.populate(0, 4096).unwrap();
        mapping.write_at(&[1; 2], 4095);
    }

    #[test]
    #[should_panic(expected = "inside its file")]
    fn a_store_behind_the_end_of_the_file_panics() {
        let (_fs, _file, mapping) = mapped(5000);
        mapping.populate(4096, 4096).unwrap();
        mapping.write_at(b"x", 5000);
    }

    #[test]
    #[should_panic(expected = "inside its mapping")]
    fn a_store_outside_panics() {
        mapped(200_000).2.write_at(b"x", 100_000);
    }

    #[test]
    fn populating_outside_is_an_error() {
        let (_fs, _file, mapping) = mapped(5000);
        assert_eq!(mapping.populate(0, 8193).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(mapping.populate(99_999, 2).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(mapping.populate(u64::MAX, 2).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn mapped_stores_are_visible_counted_and_synced() {
        let (fs, file, mapping) = mapped(100_000);
        fs.sync_dir(Path::new("/")).unwrap();
        mapping.populate(0, 100_000).unwrap();
        let ops = fs.op_count();
        mapping.write_at(b"kept", 10);
        file.sync_data().unwrap();
        mapping.write_at(b"lost", 20);
        assert_eq!(fs.op_count(), ops + 3);
        fs.crash(Survival::Nothing, 0);
        mapping.write_at(b"dead", 30);
        assert!(mapping.populate(0, 1).is_err());
        let mut buf = [0; 40];
        fs.open(Path::new("/f"), OpenMode::Read).unwrap().read_exact_at(&mut buf, 0).unwrap();
        assert_eq!((&buf[10..14], &buf[20..24], &buf[30..34]), (&b"kept"[..], &[0; 4][..], &[0; 4][..]));
    }

    #[test]
    fn absurd_lengths_are_out_of_space() {
        let (fs, file, _mapping) = mapped(1);
        for error in [
            file.write_at(b"x", u64::MAX).unwrap_err(),
            file.write_at(b"x", MAX_LEN).unwrap_err(),
            file.set_length(MAX_LEN + 1).unwrap_err(),
            file.allocate(u64::MAX).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::OutOfSpace);
        }
        assert_eq!(file.length().unwrap(), 1);
        drop(fs);
        assert_eq!(file.length().unwrap(), 1, "an open file keeps its file system alive");
    }
}
