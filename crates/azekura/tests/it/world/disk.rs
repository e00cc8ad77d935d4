//! A directory's bytes, and what a test does to them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{DiskFs, FaultFs, File, Fs, MemFs, OpenMode};

/// A file system of each kind with a directory for a database; the temporary directory lives as long as the place.
pub(crate) struct Place {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) dir: std::path::PathBuf,
    /// When in memory.
    pub(crate) memory: Option<MemFs>,
    max_open: Option<usize>,
    _temporary: Option<tempfile::TempDir>,
}

impl Place {
    /// In memory.
    pub(crate) fn memory() -> Place {
        let memory = MemFs::new();
        let fs: Arc<dyn Fs> = Arc::new(memory.clone());
        fs.create_dir_all(Path::new("/srv")).unwrap();
        Place { fs, dir: "/srv/db".into(), memory: Some(memory), max_open: None, _temporary: None }
    }

    /// In memory, where no more than `max` files may be open at a time.
    pub(crate) fn with_few_files(max: usize) -> Place {
        let mut place = Place { max_open: Some(max), ..Place::memory() };
        place.restart();
        place
    }

    /// Counts open files from 0, as a new process does. Handles that the old one had may close later, when readers of
    /// other tests have unpinned.
    pub(crate) fn restart(&mut self) {
        if self.max_open.is_some() {
            let limited = FaultFs::new(self.unlimited());
            limited.limit_open(self.max_open);
            self.fs = Arc::new(limited);
        }
    }

    /// The same files without a limit on open ones: each database has a cache of handles of its own.
    pub(crate) fn unlimited(&self) -> Arc<dyn Fs> {
        self.memory.as_ref().map_or_else(|| Arc::clone(&self.fs), |memory| Arc::new(memory.clone()))
    }

    /// In a temporary directory.
    pub(crate) fn disk() -> Place {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("db");
        Place { fs: Arc::new(DiskFs::new()), dir, memory: None, max_open: None, _temporary: Some(temporary) }
    }
}

/// All bytes of a file.
pub(crate) fn bytes_of(file: &dyn File) -> Vec<u8> {
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Whether the file never holds anything: the lock file is empty, the disk reserve is space without bytes.
fn is_empty(name: &str) -> bool {
    ["LOCK", "RESERVE"].contains(&name)
}

/// The regular files of a directory by name, with their bytes, without those that never hold anything.
pub(crate) fn image(fs: &dyn Fs, dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs.read_dir(dir).unwrap().into_iter().filter(|entry| entry.is_file && !is_empty(&entry.name));
    names.map(|entry| (entry.name.clone(), content(fs, &dir.join(&entry.name)))).collect()
}

/// All bytes of the file at `path`.
pub(crate) fn content(fs: &dyn Fs, path: &Path) -> Vec<u8> {
    bytes_of(&*fs.open(path, OpenMode::Read).unwrap())
}

/// Makes the file at `path` hold exactly `bytes`.
pub(crate) fn put(fs: &dyn Fs, path: &Path, bytes: &[u8]) {
    if fs.exists(path).unwrap() {
        fs.remove_file(path).unwrap();
    }
    fs.open(path, OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
}
