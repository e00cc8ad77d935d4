//! A tree and who keeps it, as one engine.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::{Engine, Host, KeyBounds, Pressure, ReadPoint, Room, Task, TaskReport, Values, View};
use crate::mem::slice::Slice;
use crate::pmem::engine::contract::{PmemTree, PoolFigures, TakeNumber};
use crate::pmem::medium::Medium;
use crate::pmem::options::PmemOptions;
use crate::pmem::reserve::{Planned, Promise};
use crate::pmem::tree::Tree;
use crate::vfs::fs::PersistenceLevel;

/// What makes the records of a tree durable. Thread safe.
pub(crate) trait Keeper<M: Medium>: Send + Sync {
    /// To be called before a record of the log goes into the tree. Others may do so at the same time.
    fn before_logged(&self, tree: &Tree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// To be called before a record goes into the tree that the log does not get. Others may do so at the same time.
    fn before_alone(&self, tree: &Tree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// All through this number was in the files when they were opened, and perhaps more, through the other one.
    fn at_open(&self) -> (SeqNo, SeqNo);

    fn first_unflushed(&self) -> Option<SeqNo>;

    /// A checkpoint is wanted.
    fn want(&self);

    fn is_wanted(&self) -> bool;

    /// One is under way.
    fn is_busy(&self) -> bool;

    fn checkpoint(&self, tree: &Tree<M>, host: &dyn Host) -> Result<TaskReport>;

    fn hold(&self) -> MutexGuard<'_, ()>;

    fn copy_to(&self, tree: &Tree<M>, dir: &Path) -> Result<()>;

    fn close(&self, tree: &Tree<M>);

    fn discard(&self);

    fn is_discarded(&self) -> bool;

    fn remove_files(&self);

    /// Of its files, in bytes; checkpoints, and the bytes that they have written.
    fn figures(&self, tree: &Tree<M>) -> (u64, u64, u64);

    /// Space that the next checkpoint takes beyond what the files have, in bytes.
    fn checkpoint_bytes(&self, tree: &Tree<M>) -> u64;
}

/// A pool. Thread safe.
pub(crate) struct Pool<M: Medium, K> {
    tree: Arc<Tree<M>>,
    keeper: K,
    options: Mutex<PmemOptions>,
}

impl<M: Medium, K: Keeper<M>> Pool<M, K> {
    /// A pool into which the log is replayed, until [`end_replay`](PmemTree::end_replay).
    pub(crate) fn new(tree: Tree<M>, keeper: K, options: &PmemOptions) -> Pool<M, K> {
        tree.begin_replay();
        Pool { tree: Arc::new(tree), keeper, options: Mutex::new(options.clone()) }
    }
}

/// Puts or removes a record.
fn change<M: Medium>(tree: &Tree<M>, entry: EntryRef<'_>, room: Option<Room>) -> Result<()> {
    match (entry.kind, room) {
        (RecordKind::Put, Some(room)) => tree.put_into(entry, room),
        (RecordKind::Put, None) => tree.put(entry.user, entry.seqno, entry.value),
        (RecordKind::Delete | RecordKind::SingleDelete, _) => tree.remove(entry.user, entry.seqno).map(drop),
        (kind, _) => Err(no_pool_record(kind)),
    }
}

#[cold]
fn no_pool_record(kind: RecordKind) -> Error {
    Error::corruption(format!("a record of kind {kind:?} does not stand in a pool"))
}

/// A pool, from which cursors can be made.
struct PoolView<M: Medium>(Arc<Tree<M>>);

impl<M: Medium> View for PoolView<M> {
    fn cursor(&self, at: SeqNo, bounds: KeyBounds<'_>) -> Result<Box<dyn Cursor>> {
        Ok(Box::new(self.0.cursor(at).within(bounds)))
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

impl<M: Medium, K: Keeper<M>> PmemTree for Pool<M, K> {
    fn order(&self) -> &KeyOrder {
        &self.tree.order
    }

    fn approximate_len(&self) -> u64 {
        self.tree.len()
    }

    fn reserve(&self, records: &[Planned<'_>], rooms: &mut [Room]) -> Result<Promise> {
        self.tree.reserve(records, rooms)
    }

    fn give_back(&self, room: Room) {
        self.tree.give_back(room);
    }

    fn end_promise(&self, promise: Promise) {
        self.tree.end_promise(promise);
    }

    fn level(&self) -> PersistenceLevel {
        self.tree.level()
    }

    fn change(&self, kind: RecordKind, key: &[u8], value: &[u8], turn: &mut TakeNumber<'_>) -> Result<bool> {
        let (tree, keeper) = (&*self.tree, &self.keeper);
        let take = || {
            let Some(seqno) = turn()? else { return Ok(None) };
            match tree.level() {
                PersistenceLevel::Logged => keeper.before_logged(tree, kind, seqno)?,
                _ => keeper.before_alone(tree, kind, seqno)?,
            }
            Ok(Some(seqno))
        };
        match kind {
            RecordKind::Put => tree.put_in_turn(key, value, take),
            RecordKind::Delete | RecordKind::SingleDelete => tree.remove_in_turn(key, take),
            kind => Err(no_pool_record(kind)),
        }
    }

    fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        self.apply(entry, None).map(drop)
    }

    fn end_replay(&self) -> Result<()> {
        self.tree.end_replay()
    }

    fn set_options(&self, options: &PmemOptions) -> Result<()> {
        self.tree.space()?.set_limit(options.max_size);
        *lock(&self.options) = options.clone();
        self.tree.versions.set_limit(options.max_size);
        Ok(())
    }

    fn highest_at_open(&self) -> SeqNo {
        self.keeper.at_open().1
    }

    fn end_changes(&self) {
        self.tree.end_changes();
    }

    fn close(&self) {
        self.keeper.close(&self.tree);
    }

    fn discard(&self) {
        self.keeper.discard();
    }

    fn remove_files(&self) {
        self.keeper.remove_files();
    }

    fn figures(&self) -> PoolFigures {
        let (usage, leaves) = self.tree.usage().unwrap_or_default();
        let (splits, in_splits) = self.tree.splits.so_far();
        let (disk, checkpoints, written) = self.keeper.figures(&self.tree);
        PoolFigures {
            level: self.tree.level(),
            records: self.tree.len(),
            leaves,
            leaves_free: usage.leaves_free as u64,
            len: usage.len,
            free: usage.free,
            index: self.tree.inner.bytes() + self.tree.orders.bytes(),
            kept: self.tree.versions.memory_bytes(),
            disk,
            checkpoints,
            written,
            splits,
            in_splits,
        }
    }

    fn checkpoint_bytes(&self) -> u64 {
        self.keeper.checkpoint_bytes(&self.tree)
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        self.keeper.hold()
    }

    fn copy_to(&self, dir: &Path) -> Result<()> {
        self.keeper.copy_to(&self.tree, dir)
    }
}

impl<M: Medium, K: Keeper<M>> Engine for Pool<M, K> {
    #[inline]
    fn apply(&self, entry: EntryRef<'_>, room: Option<Room>) -> Result<bool> {
        self.keeper.before_logged(&self.tree, entry.kind, entry.seqno)?;
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
        self.keeper.at_open().0
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        self.keeper.first_unflushed()
    }

    fn seal(&self) {
        self.keeper.want();
    }

    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.keeper.is_discarded() || held.contains(&Task::Flush) {
            return None;
        }
        let wanted = self.keeper.is_wanted() && self.keeper.first_unflushed().is_some();
        let next = if forced { wanted || self.keeper.is_busy() } else { wanted && !self.keeper.is_busy() };
        if next {
            return Some(Task::Flush);
        }
        // What the last of its readers let go of.
        let stale = !held.contains(&Task::Compact) && self.tree.versions.has_stale();
        stale.then_some(Task::Compact)
    }

    fn run(&self, task: Task, _forced: bool, host: &dyn Host) -> Result<TaskReport> {
        match task {
            Task::Flush => self.keeper.checkpoint(&self.tree, host),
            Task::Compact => self.tree.forget_stale().map(|()| TaskReport::default()),
            Task::Collect => Ok(TaskReport::default()),
        }
    }

    fn pressure(&self) -> Pressure {
        Pressure { sealed: usize::from(self.keeper.is_wanted()), ..Pressure::default() }
    }
}
