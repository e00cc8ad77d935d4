//! A file system that lets a test work before a file is opened or a directory is listed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use azekura::Result;
use azekura::fs::{DirEntry, File, FileLock, Fs, LockMode, OpenMode};

use crate::changes::DIR;

type OpenHook = Box<dyn FnMut(&Path) + Send>;

/// Makes another file of one that was opened.
type FileWrapper = Arc<dyn Fn(&Path, Arc<dyn File>) -> Arc<dyn File> + Send + Sync>;

/// A file system that calls a hook before it opens a file, and before it lists a directory.
#[derive(Clone)]
pub(super) struct OpenHookFs {
    inner: Arc<dyn Fs>,
    hook: Arc<Mutex<Option<OpenHook>>>,
    wrapper: Option<FileWrapper>,
    overwrites_in_place: bool,
}

impl std::fmt::Debug for OpenHookFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpenHookFs")
    }
}

impl OpenHookFs {
    pub(super) fn new(inner: impl Fs + 'static) -> OpenHookFs {
        OpenHookFs { inner: Arc::new(inner), hook: Arc::default(), wrapper: None, overwrites_in_place: true }
    }

    /// As a file system that does not overwrite in place, whose opened files are replaced by those that `wrap` returns.
    pub(super) fn copying_on_write(
        self,
        wrap: impl Fn(&Path, Arc<dyn File>) -> Arc<dyn File> + Send + Sync + 'static,
    ) -> OpenHookFs {
        OpenHookFs { wrapper: Some(Arc::new(wrap)), overwrites_in_place: false, ..self }
    }

    pub(super) fn set(&self, hook: impl FnMut(&Path) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    pub(super) fn clear(&self) {
        *self.hook.lock().unwrap() = None;
    }

    /// Calls `work` before the `nth` opening, from 0, of a file in the database whose name ends with `end`. If `end` is
    /// empty, the listings of the database count too. Returns whether it was called.
    pub(super) fn once(&self, end: &'static str, nth: u64, work: impl FnOnce() + Send + 'static) -> Arc<AtomicBool> {
        let is_done = Arc::new(AtomicBool::new(false));
        let (done, mut seen, mut work) = (Arc::clone(&is_done), 0, Some(work));
        self.set(move |path| {
            let is_listing = path == Path::new(DIR) && end.is_empty();
            let is_wanted =
                is_listing || (path.parent() == Some(Path::new(DIR)) && path.to_string_lossy().ends_with(end));
            if is_wanted && seen == nth {
                if let Some(work) = work.take() {
                    work();
                }
                done.store(true, Ordering::SeqCst);
            }
            seen += u64::from(is_wanted);
        });
        is_done
    }

    fn call(&self, path: &Path) {
        // Not locked while it runs: the work may open files too.
        let hook = self.hook.lock().unwrap().take();
        if let Some(mut hook) = hook {
            // On another thread, because the follower is at work on this one.
            std::thread::scope(|scope| scope.spawn(|| hook(path)).join().unwrap());
            self.hook.lock().unwrap().get_or_insert(hook);
        }
    }
}

impl Fs for OpenHookFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.call(path);
        let file = self.inner.open(path, mode)?;
        Ok(match &self.wrapper {
            Some(wrap) => wrap(path, file),
            None => file,
        })
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.create_dir_all(path)
    }
    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        self.inner.absolute(path)
    }
    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.call(path);
        self.inner.read_dir(path)
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        self.inner.exists(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to)
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        self.inner.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.inner.remove_dir_all(path)
    }
    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.hard_link(from, to)
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.inner.sync_dir(path)
    }
    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.inner.lock(path, mode)
    }
    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.overwrites_in_place && self.inner.overwrites_in_place(dir)
    }
}
