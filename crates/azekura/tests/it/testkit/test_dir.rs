//! Directories for tests, and the bytes of their files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{DiskFs, File, Fs, OpenMode};
use azekura::testing::{FaultFs, MemFs, Survival};

/// A file system with a directory for a database; the temporary directory is removed when this is dropped.
pub(crate) struct TestDir {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) dir: std::path::PathBuf,
    /// If it is in memory.
    pub(crate) mem_fs: Option<MemFs>,
    max_open: Option<usize>,
    _temporary: Option<tempfile::TempDir>,
}

impl TestDir {
    /// In memory.
    pub(crate) fn in_memory() -> TestDir {
        let memory = MemFs::new();
        let fs: Arc<dyn Fs> = Arc::new(memory.clone());
        fs.create_dir_all(Path::new("/srv")).unwrap();
        TestDir { fs, dir: "/srv/db".into(), mem_fs: Some(memory), max_open: None, _temporary: None }
    }

    /// In memory, with at most `max` open files.
    pub(crate) fn with_open_file_limit(max: usize) -> TestDir {
        let mut place = TestDir { max_open: Some(max), ..TestDir::in_memory() };
        place.restart();
        place
    }

    /// Counts open files from 0, as a new process does. Handles of the old database may be closed later, when readers
    /// of other tests have unpinned.
    pub(crate) fn restart(&mut self) {
        if self.max_open.is_some() {
            let limited = FaultFs::new(self.unlimited_fs());
            limited.limit_open(self.max_open);
            self.fs = Arc::new(limited);
        }
    }

    /// The same files without a limit on open ones: each database has its own cache of handles.
    pub(crate) fn unlimited_fs(&self) -> Arc<dyn Fs> {
        self.mem_fs.as_ref().map_or_else(|| Arc::clone(&self.fs), |memory| Arc::new(memory.clone()))
    }

    /// In a temporary directory.
    pub(crate) fn on_disk() -> TestDir {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("db");
        TestDir { fs: Arc::new(DiskFs::new()), dir, mem_fs: None, max_open: None, _temporary: Some(temporary) }
    }
}

/// All bytes of a file.
pub(crate) fn file_bytes(file: &dyn File) -> Vec<u8> {
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Whether the file never has content: the lock file is empty, the disk reserve is space without bytes.
fn is_always_empty(name: &str) -> bool {
    ["LOCK", "RESERVE"].contains(&name)
}

/// The regular files of a directory by name, with their bytes, without files that never have content.
pub(crate) fn dir_contents(fs: &dyn Fs, dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs.read_dir(dir).unwrap().into_iter().filter(|entry| entry.is_file && !is_always_empty(&entry.name));
    names.map(|entry| (entry.name.clone(), read_file(fs, &dir.join(&entry.name)))).collect()
}

/// All bytes of the file at `path`.
pub(crate) fn read_file(fs: &dyn Fs, path: &Path) -> Vec<u8> {
    file_bytes(&*fs.open(path, OpenMode::Read).unwrap())
}

/// Makes the file at `path` hold exactly `bytes`.
pub(crate) fn write_file(fs: &dyn Fs, path: &Path, bytes: &[u8]) {
    if fs.exists(path).unwrap() {
        fs.remove_file(path).unwrap();
    }
    fs.open(path, OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
}

/// Ends all processes on `machine`: by power loss or, if everything survives, by killing them. A killed process
/// leaves the page cache as it is, so a later power loss may still take unsynced data.
pub(crate) fn crash_or_kill(machine: &MemFs, survival: Survival, seed: u64) {
    match survival {
        Survival::Everything => machine.freeze_after(None),
        _ => machine.crash(survival, seed),
    }
}
