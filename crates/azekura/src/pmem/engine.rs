//! Pools behind the contract of an engine.
//!
//! [`LoggedPool`] has its image in memory of this process: the log makes its records durable, and a checkpoint, which is
//! this tree's flush, brings the image to its file.
//!
//! What only the log holds: a checkpoint is of one moment, its cut. It says that all is in it up to the number that was
//! visible when it began; what was under way then may be in it or not, and stays in the log until the next one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::edit::{Edit, PartitionId};
use crate::base::sync::lock;
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::{Engine, Host, Pressure, ReadPoint, ReadPoints, Room, Task, TaskReport, Values, View, Visible};
use crate::mem::slice::Slice;
use crate::pmem::medium::{Image, Medium, Moved, PersistenceLevel};
use crate::pmem::options::PmemOptions;
use crate::pmem::recover;
use crate::pmem::store::{ImageStore, Loaded};
use crate::pmem::tree::Tree;
use crate::vfs::{Env, Fs};

/// What a pool asks of `db`, and tells it, beyond what any tree does.
pub(crate) trait PmemTree: Engine {
    fn order(&self) -> &KeyOrder;

    /// Records in the tree.
    fn approximate_len(&self) -> u64;

    /// Sets space aside for records that will be put, each with the lengths of its key and its value: fills as many
    /// rooms, and says how many leaves there are, which [`end_promise`](PmemTree::end_promise) wants to know when all of them are put or not.
    ///
    /// # Errors
    /// `OutOfSpace`; then nothing was set aside.
    fn reserve(&self, records: &[(usize, usize)], rooms: &mut [Room]) -> Result<usize>;

    /// Gives back a room that was not used.
    fn give_back(&self, room: Room);

    fn end_promise(&self, leaves: usize);

    fn level(&self) -> PersistenceLevel;

    /// Puts one record into memory, as [`apply`](Engine::apply), that is not in the log: a pool that is durable by itself
    /// makes it so.
    fn apply_alone(&self, entry: EntryRef<'_>, room: Option<Room>) -> Result<()>;

    /// Adds a record of the log again. What is there already may be more than the pool may hold for a while.
    fn replay(&self, entry: EntryRef<'_>) -> Result<()>;

    /// All of the log was added again: from now on the pool is no larger than it may be.
    fn end_replay(&self) -> Result<()>;

    fn set_options(&self, options: &PmemOptions) -> Result<()>;

    /// The highest sequence number that its files may have held when it was opened.
    fn highest_at_open(&self) -> SeqNo;

    /// Ends the tree of a deleted partition: waits for a checkpoint to give up.
    fn discard(&self);

    fn figures(&self) -> PoolFigures;

    /// Removes the files of a tree that was discarded, as far as that can be done.
    fn remove_files(&self);

    /// Lets no checkpoint begin, for as long as what it returns is held; waits for the one under way.
    fn hold(&self) -> MutexGuard<'_, ()>;

    /// Copies the files as the last checkpoint left them, for who [holds](PmemTree::hold) them.
    fn copy_to(&self, dir: &Path) -> Result<()>;
}

/// Counts of one moment, in bytes unless said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolFigures {
    pub(crate) level: PersistenceLevel,
    /// Records.
    pub(crate) records: u64,
    /// Leaves in use, and leaves that are cut out and free.
    pub(crate) leaves: u64,
    pub(crate) leaves_free: u64,
    /// The length of the pool, and what of it is free, without leaves.
    pub(crate) len: u64,
    pub(crate) free: u64,
    /// Memory that leads to the leaves.
    pub(crate) index: u64,
    /// Memory that says what was replaced, for readers.
    pub(crate) kept: u64,
    /// Of its files.
    pub(crate) disk: u64,
    /// Checkpoints since it was opened, and what they have written.
    pub(crate) checkpoints: u64,
    pub(crate) written: u64,
    /// Leaves that were split since it was opened, and what that did.
    pub(crate) splits: u64,
    pub(crate) in_splits: Moved,
}

/// Where a pool belongs.
pub(crate) struct PoolHome {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
    pub(crate) visible: Visible,
    pub(crate) points: Arc<ReadPoints>,
    pub(crate) read_only: bool,
}

/// A pool as its files have it, before the order of its keys is known.
pub(crate) struct StoredPool {
    home: PoolHome,
    store: ImageStore,
    loaded: Option<Loaded>,
}

impl StoredPool {
    /// Reads the files, which hold what the manifest says was `flushed`; none, if that is nothing.
    ///
    /// # Errors
    /// `Corruption` if they are not what was written, `OutOfSpace` if there is not so much memory.
    pub(crate) fn read(home: PoolHome, flushed: SeqNo, options: &PmemOptions) -> Result<StoredPool> {
        let never_written = flushed == SeqNo::ZERO;
        let len_max = options.pool().len_max;
        let (store, loaded) =
            ImageStore::open(&home.fs, &home.dir, home.partition, len_max, never_written, home.read_only)?;
        Ok(StoredPool { home, store, loaded })
    }

    /// The highest sequence number that may be in it.
    pub(crate) fn highest(&self) -> SeqNo {
        self.loaded.as_ref().map_or(SeqNo::ZERO, |loaded| loaded.highest)
    }

    /// Copies the files.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        self.store.copy_to(dir)
    }

    /// The tree.
    ///
    /// # Errors
    /// `Corruption` if the image is no pool with keys in that order, `OutOfSpace` if there is no memory.
    pub(crate) fn open(self, order: KeyOrder, options: &PmemOptions) -> Result<Arc<LoggedPool>> {
        let (highest, StoredPool { home, store, loaded }) = (self.highest(), self);
        let (tree, replay_from) = match loaded {
            Some(loaded) => {
                let opened = recover::open(loaded.image, order, &options.pool(), home.points);
                let (tree, _) = opened.map_err(|error| error.in_file(store.path()))?;
                (tree, loaded.replay_from)
            }
            None => {
                let image = Image::new(options.pool().len_max)?;
                let mut file_id = [0; 16];
                home.env.random(&mut file_id);
                (recover::create(image, file_id, order, &options.pool(), home.points)?, SeqNo::ZERO)
            }
        };
        Ok(Arc::new(LoggedPool {
            tree: Arc::new(tree),
            store,
            partition: home.partition,
            name: home.name,
            visible: home.visible,
            options: Mutex::new(options.clone()),
            replay_from,
            highest,
            dirty_from: AtomicU64::new(NOTHING),
            applied: AtomicU64::new(replay_from.0),
            taken_from: Mutex::new(NOTHING),
            wanted: AtomicBool::new(false),
            turn: Mutex::new(()),
            discarded: AtomicBool::new(false),
            checkpoints: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }))
    }
}

/// A pool whose image is in memory of this process. Thread safe.
pub(crate) struct LoggedPool {
    tree: Arc<Tree<Image>>,
    store: ImageStore,
    partition: PartitionId,
    name: String,
    visible: Visible,
    options: Mutex<PmemOptions>,
    /// What the files held already when it was opened, and what may have been in them beyond it.
    replay_from: SeqNo,
    highest: SeqNo,
    /// The lowest number that no checkpoint has begun to take, [`NOTHING`] if there is none.
    dirty_from: AtomicU64,
    /// The highest number that was given to the tree.
    applied: AtomicU64,
    /// The lowest number that the checkpoint under way takes. Locked also while `dirty_from` passes into it.
    taken_from: Mutex<u64>,
    /// A checkpoint is wanted.
    wanted: AtomicBool,
    /// Held by who makes one.
    turn: Mutex<()>,
    discarded: AtomicBool,
    checkpoints: AtomicU64,
    written: AtomicU64,
}

const NOTHING: u64 = u64::MAX;

impl LoggedPool {
    /// To be called before a record goes into the tree.
    #[inline]
    fn note(&self, seqno: SeqNo) {
        // Both in one order with what `begin_cut` and `end_cut` do: either this finds that a checkpoint has begun, or
        // that finds this record.
        self.applied.store(seqno.0, Ordering::SeqCst);
        if self.dirty_from.load(Ordering::SeqCst) == NOTHING {
            self.dirty_from.fetch_min(seqno.0, Ordering::SeqCst);
        }
    }

    /// A checkpoint begins: all that is visible now will be in it.
    fn begin_cut(&self) -> SeqNo {
        let from = self.visible.get();
        let mut taken = lock(&self.taken_from);
        *taken = self.dirty_from.swap(NOTHING, Ordering::SeqCst).min(*taken);
        from
    }

    /// The image was cut: the highest number that may be in it. What came meanwhile is left to the next checkpoint.
    fn end_cut(&self, from: SeqNo) -> SeqNo {
        let highest = SeqNo(self.applied.load(Ordering::SeqCst));
        if highest > from {
            self.dirty_from.fetch_min(from.0 + 1, Ordering::SeqCst);
        }
        highest.max(from)
    }

    /// Nothing waits for this checkpoint any more.
    fn finish_cut(&self, done: bool) {
        let mut taken = lock(&self.taken_from);
        if !done {
            self.dirty_from.fetch_min(*taken, Ordering::SeqCst);
            self.wanted.store(true, Ordering::Release);
        }
        *taken = NOTHING;
    }

    fn checkpoint(&self, host: &dyn Host) -> Result<TaskReport> {
        let _turn = lock(&self.turn);
        if self.discarded.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", self.name)));
        }
        self.wanted.store(false, Ordering::Release);
        if self.first_unflushed().is_none() {
            return Ok(TaskReport::default());
        }
        let mut from = SeqNo::ZERO;
        let written = self.store.checkpoint(&self.tree.medium, &mut || self.begin_cut(), &mut |begun| {
            from = begun;
            let highest = self.end_cut(begun);
            host.make_log_durable(highest)?;
            Ok(highest)
        });
        let done = written.and_then(|written| {
            host.commit_edits(&[Edit::Flushed { partition: self.partition, through: from }])?;
            Ok(written)
        });
        self.finish_cut(done.is_ok());
        let written = done?;
        self.checkpoints.fetch_add(1, Ordering::Relaxed);
        self.written.fetch_add(written.bytes, Ordering::Relaxed);
        Ok(TaskReport { tables: 1, bytes_written: written.bytes, ..TaskReport::default() })
    }

    fn is_busy(&self) -> bool {
        *lock(&self.taken_from) != NOTHING
    }
}

/// Puts or removes a record.
fn change<M: Medium>(tree: &Tree<M>, entry: EntryRef<'_>, room: Option<Room>) -> Result<()> {
    match (entry.kind, room) {
        (RecordKind::Put, Some(room)) => tree.put_into(entry, room),
        (RecordKind::Put, None) => tree.put(entry.user, entry.seqno, entry.value),
        (RecordKind::Delete | RecordKind::SingleDelete, _) => tree.remove(entry.user, entry.seqno).map(drop),
        (kind, _) => Err(Error::corruption(format!("a record of kind {kind:?} does not stand in a pool"))),
    }
}

/// A pool, from which cursors can be made.
struct PoolView<M: Medium>(Arc<Tree<M>>);

impl<M: Medium> View for PoolView<M> {
    fn cursor(&self, at: SeqNo) -> Result<Box<dyn Cursor>> {
        Ok(Box::new(self.0.cursor(at)))
    }

    fn values(&self) -> Box<dyn Values> {
        Box::new(NoValues)
    }
}

/// All values stand with their keys.
struct NoValues;

impl Values for NoValues {
    fn read(&mut self, _pointer: &[u8]) -> Result<Slice> {
        Err(Error::corruption("a pool points to a blob file"))
    }
}

impl PmemTree for LoggedPool {
    fn order(&self) -> &KeyOrder {
        &self.tree.order
    }

    fn approximate_len(&self) -> u64 {
        self.tree.len()
    }

    fn reserve(&self, records: &[(usize, usize)], rooms: &mut [Room]) -> Result<usize> {
        self.tree.reserve(records, rooms)
    }

    fn give_back(&self, room: Room) {
        self.tree.give_back(room);
    }

    fn end_promise(&self, leaves: usize) {
        self.tree.end_promise(leaves);
    }

    fn level(&self) -> PersistenceLevel {
        PersistenceLevel::Logged
    }

    fn apply_alone(&self, entry: EntryRef<'_>, room: Option<Room>) -> Result<()> {
        self.apply(entry, room).map(drop)
    }

    fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        self.apply(entry, None).map(drop)
    }

    fn end_replay(&self) -> Result<()> {
        self.tree.space()?.set_limit(lock(&self.options).max_size);
        Ok(())
    }

    fn set_options(&self, options: &PmemOptions) -> Result<()> {
        *lock(&self.options) = options.clone();
        self.end_replay()
    }

    fn highest_at_open(&self) -> SeqNo {
        self.highest
    }

    fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
        drop(lock(&self.turn));
    }

    fn figures(&self) -> PoolFigures {
        let (usage, leaves) = self.tree.usage().unwrap_or_default();
        let (splits, in_splits) = self.tree.splits.so_far();
        PoolFigures {
            level: self.tree.level(),
            records: self.tree.len(),
            leaves,
            leaves_free: usage.leaves_free as u64,
            len: usage.len,
            free: usage.free,
            index: self.tree.inner.bytes(),
            kept: self.tree.versions.memory_bytes(),
            disk: self.store.disk_bytes(),
            checkpoints: self.checkpoints.load(Ordering::Relaxed),
            written: self.written.load(Ordering::Relaxed),
            splits,
            in_splits,
        }
    }

    fn remove_files(&self) {
        self.store.remove();
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    fn copy_to(&self, dir: &Path) -> Result<()> {
        self.store.copy_to(dir)
    }
}

impl Engine for LoggedPool {
    #[inline]
    fn apply(&self, entry: EntryRef<'_>, room: Option<Room>) -> Result<bool> {
        self.note(entry.seqno);
        change(&self.tree, entry, room)?;
        Ok(false)
    }

    #[inline]
    fn get(&self, key: &[u8], at: ReadPoint) -> Result<Option<Slice>> {
        match at {
            ReadPoint::Latest => self.tree.get(key),
            ReadPoint::At(seqno) => self.tree.get_at(key, seqno),
        }
    }

    fn size_of(&self, key: &[u8], at: ReadPoint) -> Result<Option<u32>> {
        match at {
            ReadPoint::Latest => self.tree.size_of(key),
            ReadPoint::At(seqno) => self.tree.size_of_at(key, seqno),
        }
    }

    fn view(&self) -> Box<dyn View> {
        Box::new(PoolView(Arc::clone(&self.tree)))
    }

    fn flushed_through(&self) -> SeqNo {
        self.replay_from
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        let taken = lock(&self.taken_from);
        let first = self.dirty_from.load(Ordering::SeqCst).min(*taken);
        (first != NOTHING).then_some(SeqNo(first))
    }

    fn seal(&self) {
        self.wanted.store(true, Ordering::Release);
    }

    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.discarded.load(Ordering::SeqCst) || held.contains(&Task::Flush) {
            return None;
        }
        let wanted = self.wanted.load(Ordering::Acquire) && self.first_unflushed().is_some();
        let next = if forced { wanted || self.is_busy() } else { wanted && !self.is_busy() };
        next.then_some(Task::Flush)
    }

    fn run(&self, task: Task, _forced: bool, host: &dyn Host) -> Result<TaskReport> {
        match task {
            Task::Flush => self.checkpoint(host),
            Task::Compact | Task::Collect => Ok(TaskReport::default()),
        }
    }

    fn pressure(&self) -> Pressure {
        Pressure { sealed: usize::from(self.wanted.load(Ordering::Acquire)), ..Pressure::default() }
    }
}
