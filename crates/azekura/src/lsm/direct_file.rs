//! Direct blob files: memtables may point into them, and no version edit names them yet. Tracks which of them are
//! unsynced, so that a sync of the WAL first syncs the blob files that its records point into.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::blob_pointer::BlobPointer;
use crate::base::sync::lock;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, ErrorKind, Result};
use crate::blob::writer::DirectBlobWriter;
use crate::block::frame::CompressedBlock;
use crate::lsm::blob_map::{BlobFileMetrics, BlobHandle};
use crate::vfs::{File, Fs};

/// The direct blob files of a super version, by file number.
pub(crate) type DirectBlobFiles = BTreeMap<FileNumber, Arc<DirectBlobFile>>;

/// Returns a copy without `removed`.
pub(crate) fn without_files(files: &Arc<DirectBlobFiles>, removed: &[Arc<DirectBlobFile>]) -> Arc<DirectBlobFiles> {
    let mut files = Arc::clone(files);
    for file in removed {
        Arc::make_mut(&mut files).remove(&file.id);
    }
    files
}

/// A blob file that is written while readers follow pointers into it. Thread safe.
pub(crate) struct DirectBlobFile {
    pub(crate) id: FileNumber,
    pub(crate) handle: Arc<BlobHandle>,
    /// Number of values, and bytes of their frames.
    values: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of the frames whose commits have failed.
    uncommitted_bytes: AtomicU64,
    /// `None` for a file of an earlier process, which is only read.
    pub(crate) appender: Option<Arc<DirectBlobAppender>>,
}

impl DirectBlobFile {
    /// A file that has `values`, with `bytes` in their frames.
    pub(crate) fn new(
        handle: Arc<BlobHandle>,
        values: u64,
        bytes: u64,
        appender: Option<Arc<DirectBlobAppender>>,
    ) -> Arc<DirectBlobFile> {
        let (id, values, bytes) = (handle.meta().number, AtomicU64::new(values), AtomicU64::new(bytes));
        Arc::new(DirectBlobFile { id, handle, values, bytes, uncommitted_bytes: AtomicU64::new(0), appender })
    }

    /// # Errors
    /// `Invalid` for a file of an earlier process.
    pub(crate) fn appender(&self) -> Result<&Arc<DirectBlobAppender>> {
        self.appender.as_ref().ok_or_else(|| Error::invalid("a blob file of an earlier process is read-only"))
    }

    /// Its statistics as if every value in it were referenced: exact figures are unknown before a flush.
    pub(crate) fn stats(&self) -> BlobFileMetrics {
        let (values, bytes) = (self.values.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        BlobFileMetrics {
            id: self.id.0,
            bytes: self.written(),
            values,
            value_bytes: bytes,
            referenced_values: values,
            referenced_bytes: bytes,
        }
    }

    /// Bytes of the frames whose commits have failed.
    pub(crate) fn uncommitted_bytes(&self) -> u64 {
        self.uncommitted_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.handle.file().path()
    }

    /// File offset of the end of the last value.
    pub(crate) fn written(&self) -> u64 {
        self.handle.file().size()
    }

    /// Appends a value, and adds the file to `unsynced`; the bytes of the value are in the file when this returns. The
    /// caller excludes other writers.
    ///
    /// # Errors
    /// As [`DirectBlobWriter::append`].
    pub(crate) fn append(&self, value: &CompressedBlock<'_>, unsynced: &UnsyncedBlobFiles) -> Result<BlobPointer> {
        let appender = self.appender()?;
        let mut state = lock(&appender.state);
        let pointer = state.writer.append(&value.frame()).map_err(|error| error.in_file(self.path()))?;
        let end = state.writer.end_offset();
        debug_assert_eq!(pointer.logical_file, self.id, "a pointer names the file that has the value");
        debug_assert_eq!(pointer.frame_offset + pointer.frame_len, end, "the value is the last one");
        self.handle.file().grow_to(end);
        self.values.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(pointer.frame_len, Ordering::Relaxed);
        appender.record_write(end, self.id, unsynced);
        Ok(pointer)
    }
}

/// State of the direct blob files of a tree that is not in the super version. Thread safe.
#[derive(Default)]
pub(crate) struct DirectBlobTracker {
    /// Values of at least this many bytes are direct writes, in commits that request no sync and in those that do;
    /// `u64::MAX` if none are.
    thresholds: [AtomicU64; 2],
    /// The file that is open for values. A thread holds this lock while it writes a value, so that values follow each
    /// other in the file.
    pub(crate) open_file: Mutex<Option<Arc<DirectBlobFile>>>,
    /// The pointers into each logical file that are neither in tables nor released.
    counted_pointers: Mutex<BTreeMap<FileNumber, CountedPointers>>,
}

#[derive(Default)]
struct CountedPointers {
    count: u64,
    /// `None` for a file of an earlier process.
    file: Option<Arc<DirectBlobFile>>,
}

impl DirectBlobTracker {
    pub(crate) fn new(thresholds: [u64; 2]) -> DirectBlobTracker {
        DirectBlobTracker { thresholds: thresholds.map(AtomicU64::new), ..DirectBlobTracker::default() }
    }

    pub(crate) fn set_thresholds(&self, thresholds: [u64; 2]) {
        self.thresholds.iter().zip(thresholds).for_each(|(known, new)| known.store(new, Ordering::Relaxed));
    }

    /// Whether a value of `len` bytes is a direct write. `synced`: whether its commit requests a sync.
    #[inline]
    pub(crate) fn writes_directly(&self, len: usize, synced: bool) -> bool {
        len as u64 >= self.thresholds[usize::from(synced)].load(Ordering::Relaxed)
    }

    /// Counts a pointer into the logical file `logical` that is in a memtable.
    pub(crate) fn add_pointer(&self, logical: FileNumber) {
        lock(&self.counted_pointers).entry(logical).or_default().count += 1;
    }

    /// Counts a pointer into `file` that a memtable will have.
    pub(crate) fn add_staged_pointer(&self, file: &Arc<DirectBlobFile>) {
        let mut counted = lock(&self.counted_pointers);
        let pointers = counted.entry(file.id).or_default();
        pointers.count += 1;
        pointers.file.get_or_insert_with(|| Arc::clone(file));
    }

    /// The file of a counted pointer to a [staged value](crate::engine::Staged::Blob).
    ///
    /// # Errors
    /// `Closed` after [`forget_files`](DirectBlobTracker::forget_files).
    pub(crate) fn appender_of(&self, pointer: &BlobPointer) -> Result<Arc<DirectBlobAppender>> {
        let counted = lock(&self.counted_pointers);
        let file = counted.get(&pointer.logical_file).and_then(|pointers| pointers.file.as_ref());
        file.ok_or_else(|| Error::new(ErrorKind::Closed, "the tree is closed"))?.appender().map(Arc::clone)
    }

    /// Counts a value whose commit has failed. Its pointer is still counted.
    pub(crate) fn note_uncommitted(&self, pointer: &BlobPointer) {
        let counted = lock(&self.counted_pointers);
        if let Some(file) = counted.get(&pointer.logical_file).and_then(|pointers| pointers.file.as_ref()) {
            file.uncommitted_bytes.fetch_add(pointer.frame_len, Ordering::Relaxed);
        }
    }

    /// Releases the files of all pointers, which will never be read again.
    pub(crate) fn forget_files(&self) {
        let forgotten: Vec<_> =
            lock(&self.counted_pointers).values_mut().map(|pointers| pointers.file.take()).collect();
        drop(forgotten);
    }

    /// Subtracts `by` pointers from the count. True if none is left.
    pub(crate) fn remove_pointers(&self, logical: FileNumber, by: u64) -> bool {
        let mut counted = lock(&self.counted_pointers);
        let Some(pointers) = counted.get_mut(&logical) else { return false };
        debug_assert!(pointers.count >= by, "{by} of {} pointers are released", pointers.count);
        pointers.count = pointers.count.saturating_sub(by);
        let is_last = pointers.count == 0;
        let removed = if is_last { counted.remove(&logical) } else { None };
        drop(counted);
        drop(removed);
        is_last
    }

    /// The logical files that memtables may point into. If a thread takes this list first and a version then, all
    /// references to a logical file that is not in the list are in the version. A file that an edit names and that
    /// was removed from the list is never added again.
    pub(crate) fn files_with_pointers(&self) -> BTreeSet<FileNumber> {
        lock(&self.counted_pointers).keys().copied().collect()
    }
}

/// Direct blob files of all trees with bytes that may not be durable yet. Thread safe. A thread that syncs a file holds
/// no lock that an appending thread takes.
#[derive(Default)]
pub(crate) struct UnsyncedBlobFiles {
    files: Mutex<BTreeMap<FileNumber, Arc<DirectBlobAppender>>>,
    /// Number of direct blob files that are open, whether they are synced or not.
    open: AtomicUsize,
}

/// While the database has this many open direct blob files, a tree begins another one only for values that are written
/// directly in synced commits too. Each has a file handle, and a sync of the WAL may have to sync each of them.
const OPEN_FILES_MAX: usize = 32;

impl UnsyncedBlobFiles {
    /// Whether the database has that many open direct blob files that no further one should be begun.
    pub(crate) fn has_many_open_files(&self) -> bool {
        self.open.load(Ordering::Relaxed) >= OPEN_FILES_MAX
    }

    /// Removes a file that needs no sync any more, because no record will point to its unsynced bytes.
    pub(crate) fn remove(&self, id: FileNumber) {
        lock(&self.files).remove(&id);
    }

    /// Makes all values durable that commits need and whose files were added before, by any thread.
    ///
    /// # Errors
    /// `Io` if a sync fails or has failed before, because then it is unknown whether the bytes are on the device. `Io`
    /// also if the process has too many open files; then a later call may succeed.
    pub(crate) fn sync_all(&self) -> Result<()> {
        let files = lock(&self.files).clone();
        for (id, file) in files {
            match file.sync() {
                Err(error) if error.is_too_many_open_files() || file.has_lost_commits() => return Err(error),
                // No commit needs the lost bytes, and none can from now on.
                Err(_) => {
                    self.remove(id);
                    continue;
                }
                Ok(()) => {}
            }
            let mut files = lock(&self.files);
            if file.synced() >= file.written() {
                files.remove(&id);
            }
        }
        Ok(())
    }
}

/// Writes a direct blob file, and knows its written and its durable length. Thread safe.
pub(crate) struct DirectBlobAppender {
    fs: Arc<dyn Fs>,
    file: Arc<dyn File>,
    path: PathBuf,
    pub(crate) state: Mutex<DirectBlobWriterState>,
    written: AtomicU64,
    synced: AtomicU64,
    committed: Mutex<CommittedValues>,
    /// Whether a sync failed. Set before the syncing thread locks `committed`; a commit reads it after it has entered
    /// itself there. So the commit finds that its value may be lost, or the syncing thread finds the commit.
    has_failed: AtomicBool,
    /// Held while the file is synced, because of two concurrent syncs one would wrongly succeed.
    progress: Mutex<BlobFileSyncProgress>,
    counted_in: Arc<UnsyncedBlobFiles>,
}

impl Drop for DirectBlobAppender {
    fn drop(&mut self) {
        let before = self.counted_in.open.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "an open file was counted");
    }
}

/// The values that the WAL may point to, by the offsets of their ends.
#[derive(Default)]
struct CommittedValues {
    /// The last one that the WAL may have.
    last: u64,
    /// Those of commits in progress, which may still be refused.
    in_progress: BTreeSet<u64>,
}

pub(crate) struct DirectBlobWriterState {
    pub(crate) writer: DirectBlobWriter,
    /// The metadata for the edit, once the file is finished and durable.
    pub(crate) finished_meta: Option<BlobFileMeta>,
}

#[derive(Default)]
struct BlobFileSyncProgress {
    /// Whether the file's name is durable.
    dir_synced: bool,
    /// The first failure. A later sync that succeeds proves nothing.
    failed: Option<Error>,
}

impl DirectBlobAppender {
    pub(crate) fn new(
        fs: Arc<dyn Fs>,
        file: Arc<dyn File>,
        path: PathBuf,
        writer: DirectBlobWriter,
        unsynced: &Arc<UnsyncedBlobFiles>,
    ) -> Arc<DirectBlobAppender> {
        unsynced.open.fetch_add(1, Ordering::Relaxed);
        Arc::new(DirectBlobAppender {
            counted_in: Arc::clone(unsynced),
            fs,
            file,
            path,
            state: Mutex::new(DirectBlobWriterState { writer, finished_meta: None }),
            written: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            committed: Mutex::default(),
            has_failed: AtomicBool::new(false),
            progress: Mutex::default(),
        })
    }

    /// Records that the file is written up to `end`, and adds the file to `unsynced`. The caller does this before a
    /// frame of the WAL contains a pointer to the new bytes.
    pub(crate) fn record_write(self: &Arc<Self>, end: u64, id: FileNumber, unsynced: &UnsyncedBlobFiles) {
        debug_assert!(self.written() <= end, "a direct blob file grows");
        self.written.store(end, Ordering::SeqCst);
        lock(&unsynced.files).entry(id).or_insert_with(|| Arc::clone(self));
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// The file is durable up to this offset.
    pub(crate) fn synced(&self) -> u64 {
        self.synced.load(Ordering::SeqCst)
    }

    /// Whether a sync failed. Then the file gets no further values.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// Whether the WAL may point to a value that a failed sync has lost.
    fn has_lost_commits(&self) -> bool {
        let committed = lock(&self.committed);
        let last = committed.in_progress.last().map_or(committed.last, |end| committed.last.max(*end));
        last > self.synced()
    }

    /// Tells that the WAL may point to the value that ends at `end` from now on.
    ///
    /// # Errors
    /// The error of a failed sync that has lost the value.
    pub(crate) fn begin_commit(&self, end: u64) -> Result<()> {
        // Held briefly: no sync is made after one has failed.
        let check = || match self.has_failed() && end > self.synced() {
            true => lock(&self.progress).failed.clone().map_or(Ok(()), Err),
            false => Ok(()),
        };
        check()?;
        let is_first = lock(&self.committed).in_progress.insert(end);
        debug_assert!(is_first, "a value belongs to one commit");
        check().inspect_err(|_| self.end_commit(end, false))
    }

    /// Ends what [`begin_commit`](DirectBlobAppender::begin_commit) has begun. Unless the WAL may have the pointer, a
    /// later loss of the value concerns no commit.
    pub(crate) fn end_commit(&self, end: u64, may_be_in_wal: bool) {
        let mut committed = lock(&self.committed);
        if may_be_in_wal {
            committed.last = committed.last.max(end);
        }
        let has_begun = committed.in_progress.remove(&end);
        debug_assert!(has_begun, "a commit that ends has begun");
    }

    /// Makes the written bytes and the file name durable.
    fn sync(&self) -> Result<()> {
        let mut turn = lock(&self.progress);
        let written = self.written();
        if self.synced() >= written {
            return Ok(());
        }
        if let Some(error) = &turn.failed {
            return Err(error.clone());
        }
        let synced =
            self.file.sync_data().map_err(|error| error.in_file(&self.path)).and_then(|()| match turn.dir_synced {
                true => Ok(()),
                false => self.fs.sync_dir(self.path.parent().unwrap_or(&self.path)),
            });
        if let Err(error) = synced {
            if error.is_too_many_open_files() {
                return Err(error); // the directory was not opened, so no sync of it failed
            }
            turn.failed = Some(error.clone());
            self.has_failed.store(true, Ordering::SeqCst);
            return Err(error);
        }
        turn.dir_synced = true;
        debug_assert!(self.synced() < written, "a sync makes more bytes durable");
        self.synced.store(written, Ordering::SeqCst);
        Ok(())
    }

    /// The same for a thread whose bytes no commit needs yet. `close` excludes further writers.
    ///
    /// # Errors
    /// `Poisoned` if values of commits may be lost. The file then stays in `unsynced`, so that every later sync of the
    /// WAL fails too. It also stays there if the process has too many open files, because a later sync may succeed.
    /// Else the error of the sync: the file, with the number `id`, is usable only up to its durable length, is removed
    /// from `unsynced`, and a later commit of a value behind that length [fails](crate::engine::Engine::begin_commit).
    pub(crate) fn sync_for_commit(
        &self,
        id: FileNumber,
        unsynced: &UnsyncedBlobFiles,
        close: impl FnOnce(),
    ) -> Result<()> {
        self.sync().map_err(|error| {
            if error.is_too_many_open_files() {
                return error;
            }
            close();
            if self.has_lost_commits() {
                return error.with_kind(ErrorKind::Poisoned);
            }
            unsynced.remove(id);
            error
        })
    }
}
