//! The tree behind the contract of an engine: what a partition calls, and which task is next.

use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::{EntryRef, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::{Engine, Host, KeyBounds, Pressure, ReadPoint, Room, Task, TaskReport, Values, View};
use crate::lsm::blobs::early::EarlyMap;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::resolve::{BlobValues, no_such_file};
use crate::lsm::compaction::leveled;
use crate::lsm::handle::TreeContext;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::table::source::Value;

/// The tree at one moment: it keeps the memtables and the tables that were there.
struct TreeView {
    now: SuperVersion,
    context: Arc<TreeContext>,
}

impl View for TreeView {
    fn cursor(&self, _at: SeqNo, _bounds: KeyBounds<'_>) -> Result<Box<dyn Cursor>> {
        Ok(self.now.cursor(&self.context))
    }

    fn values(&self) -> Box<dyn Values> {
        Box::new(BlobValues::new(&self.now))
    }
}

/// What a lookup found.
enum Found {
    Here(Slice),
    /// In that file, which is held.
    Elsewhere(BlobRef, Arc<BlobHandle>),
    /// In a file that was not there yet when the super version was taken.
    Nowhere(BlobRef, Arc<EarlyMap>),
}

impl Engine for LsmTree {
    fn apply(&self, entry: EntryRef<'_>, _room: Option<Room>) -> Result<bool> {
        self.insert(entry)
    }

    fn get(&self, key: &[u8], at: ReadPoint) -> Result<Option<Slice>> {
        loop {
            let found = self.current.with_pin(|now, pin| {
                let read = |kind: RecordKind, value: Value<'_>| match kind {
                    RecordKind::BlobPointer => {
                        let pointer = BlobRef::decode(&value)?;
                        Ok(match now.blob_file(pointer.logical) {
                            Some(handle) => Found::Elsewhere(pointer, Arc::clone(handle)),
                            None => Found::Nowhere(pointer, Arc::clone(&now.early)),
                        })
                    }
                    _ => Ok(Found::Here(value.to_slice())),
                };
                now.find(&self.context, key, at, pin, read)
            })?;
            match found.transpose()? {
                None => return Ok(None),
                Some(Found::Here(value)) => return Ok(Some(value)),
                // Without the pin: reading a file would hold up all that waits to be freed.
                Some(Found::Elsewhere(pointer, handle)) => return handle.file().read(&pointer, true).map(Some),
                // A file was begun, and the record published, after the super version was taken and before the moment
                // was: the next one has it.
                Some(Found::Nowhere(pointer, early)) => {
                    if self.current.with(|now| Arc::ptr_eq(&now.early, &early)) {
                        return Err(no_such_file(&pointer));
                    }
                }
            }
        }
    }

    fn size_of(&self, key: &[u8], at: ReadPoint) -> Result<Option<u32>> {
        let read = |kind: RecordKind, value: Value<'_>| match kind {
            RecordKind::BlobPointer => BlobRef::decode(&value).map(|pointer| pointer.len),
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            _ => Ok(value.len() as u32),
        };
        self.current.with_pin(|now, pin| now.find(&self.context, key, at, pin, read))?.transpose()
    }

    fn view(&self) -> Box<dyn View> {
        Box::new(TreeView { now: self.current.get(), context: Arc::clone(&self.context) })
    }

    fn flushed_through(&self) -> SeqNo {
        self.current.with(|now| now.flushed)
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        self.current.with(|now| {
            let oldest = now.sealed.last().unwrap_or(&now.active);
            (!oldest.is_empty()).then(|| oldest.lowest_seqno())
        })
    }

    fn seal(&self) {
        self.seal_memtable();
    }

    /// Unforced, only what can be started now. Forced, also what another thread is doing: [`run`](Engine::run) waits
    /// for it, so that there is nothing left to do when this says `None`. Call [`seal`](Engine::seal) first to have
    /// what is in memory compacted too.
    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.is_discarded() {
            return None;
        }
        let may = |task| !held.contains(&task);
        if may(Task::Flush) && self.current.with(|now| !now.sealed.is_empty()) && (forced || !self.flushing.is_busy()) {
            return Some(Task::Flush);
        }
        if self.compacting.is_busy() {
            return (forced && may(Task::Compact)).then_some(Task::Compact);
        }
        if may(Task::Compact) && self.wants_compaction(forced) {
            return Some(Task::Compact);
        }
        (!forced && may(Task::Collect) && self.wants_collection()).then_some(Task::Collect)
    }

    fn run(&self, task: Task, forced: bool, host: &dyn Host) -> Result<TaskReport> {
        match task {
            Task::Flush => self.flush(forced, host),
            Task::Compact => self.compact(forced, host),
            Task::Collect => self.collect_by_itself(forced, host),
        }
    }

    fn pressure(&self) -> Pressure {
        let options = self.options();
        self.current.with(|now| Pressure {
            sealed_bytes: now.sealed.iter().map(|memtable| memtable.bytes()).sum(),
            sealed: now.sealed.len(),
            compaction_debt: leveled::debt(&now.version, &options.compaction),
            young_runs: now.version.level(0).runs.len(),
        })
    }
}
