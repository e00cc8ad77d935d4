//! Files that are mapped as memory. Their words are stored separately. They are copied to the bytes of the file when
//! the file is unmapped, and before a fork or a crash of the file system.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::testing::mem_fs::inode::{FileNode, Ino};

/// The words of one file. The first word is at the start of a cache line.
#[derive(Clone, Debug)]
pub(crate) struct SharedWords {
    /// Contains more words than the file, so that the first word can be aligned.
    all: Arc<[AtomicU64]>,
    len: usize,
}

impl SharedWords {
    pub(crate) fn words(&self) -> &[AtomicU64] {
        let first = self.all.as_ptr().align_offset(LINE).min(self.all.len() - self.len);
        &self.all[first..first + self.len]
    }

    /// The first `len` bytes of the same words; `None` if there are fewer.
    pub(crate) fn first(&self, len: usize) -> Option<SharedWords> {
        (len / 8 <= self.len).then(|| SharedWords { all: Arc::clone(&self.all), len: len / 8 })
    }
}

/// Cache line size in bytes.
const LINE: usize = 64;

/// The words of a file that is mapped as memory, and the number of its mappings.
#[derive(Clone, Debug)]
pub(crate) struct MappedFileWords {
    pub(crate) words: SharedWords,
    pub(crate) mappings: usize,
}

/// The files that are mapped as memory.
pub(crate) type MappedFileTable = BTreeMap<Ino, MappedFileWords>;

/// Allocates words for `len` bytes and fills them with the content of `file`.
pub(crate) fn load_words(file: &FileNode, len: usize) -> SharedWords {
    let mut bytes = vec![0; len];
    file.live.read(&mut bytes, 0);
    let spare = LINE / 8 - 1;
    let shared = SharedWords { all: (0..len / 8 + spare).map(|_| AtomicU64::new(0)).collect(), len: len / 8 };
    for (chunk, word) in bytes.chunks_exact(8).zip(shared.words()) {
        word.store(u64::from_le_bytes(chunk.try_into().expect("eight bytes")), Ordering::Relaxed);
    }
    shared
}

/// Copies the words to the live and the synced content of a file. All stores are durable, because the words model
/// memory that keeps its bytes, and a store to such memory may become durable at any time.
pub(crate) fn write_back(file: &mut FileNode, words: &[AtomicU64]) {
    const STEP: usize = 512;
    let len = file.live.length();
    file.sync();
    let (mut bytes, mut current) = ([0; 8 * STEP], [0; 8 * STEP]);
    for (n, words) in words.chunks(STEP).enumerate() {
        let at = (n * 8 * STEP) as u64;
        let count = usize::try_from(len.saturating_sub(at)).map_or(8 * words.len(), |rest| rest.min(8 * words.len()));
        if count == 0 {
            break;
        }
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.load(Ordering::Acquire).to_le_bytes());
        }
        file.live.read(&mut current[..count], at);
        if current[..count] != bytes[..count] {
            file.live.store(&bytes[..count], at);
            file.synced.store(&bytes[..count], at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::{MemFs, Survival};
    use crate::vfs::fs::{Fs, OpenMode, PersistenceLevel};

    #[test]
    fn mapped_stores_survive_crash_and_fork() {
        let fs = MemFs::new();
        let path = Path::new("/pool");
        let file = fs.open(path, OpenMode::Create).unwrap();
        assert!(file.map_memory(64).unwrap().is_none() && fs.persistence_level(path) == PersistenceLevel::WalOnly);
        fs.set_mapped_memory(PersistenceLevel::PowerLoss);
        assert_eq!(fs.persistence_level(path), PersistenceLevel::PowerLoss);
        file.allocate(32).unwrap();
        fs.sync_dir(Path::new("/")).unwrap();
        let words = file.map_memory(64).unwrap().unwrap();
        assert!(words.survives_power_loss() && words.atomic_words().len() == 8);
        words.atomic_words()[1].store(7, Ordering::Relaxed);
        words.atomic_words()[7].store(9, Ordering::Relaxed); // past the end
        let read = |fs: &MemFs| {
            let file = fs.open(path, OpenMode::Read).unwrap();
            let mut bytes = [0; 40];
            let got = file.read_at(&mut bytes, 0).unwrap();
            (got, u64::from_le_bytes(bytes[8..16].try_into().unwrap()))
        };
        assert_eq!(read(&fs.fork()), (32, 7));
        words.atomic_words()[1].store(8, Ordering::Relaxed);
        fs.crash(Survival::Nothing, 0);
        assert_eq!(read(&fs), (32, 8));
        words.atomic_words()[1].store(9, Ordering::Relaxed);
        drop((words, file));
        // Two mappings of a file share its words.
        let file = fs.open(path, OpenMode::Write).unwrap();
        let (one, other) = (file.map_memory(64).unwrap().unwrap(), file.map_memory(32).unwrap().unwrap());
        one.atomic_words()[2].store(3, Ordering::Relaxed);
        assert!(other.atomic_words()[2].load(Ordering::Relaxed) == 3 && file.map_memory(72).is_err());
        drop((one, other, file));
        assert_eq!(read(&fs), (32, 8), "a store without power has no effect");
        let again = fs.open(path, OpenMode::Write).unwrap();
        again.map_memory(32).unwrap().unwrap().atomic_words()[1].store(10, Ordering::Relaxed);
        assert_eq!(read(&fs), (32, 10));
    }
}
