//! Implements the engine interface for the LSM tree: the calls of a partition, and the choice of the next task.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::{EntryRef, RecordKind, Result, SeqNo};
use crate::engine::{
    BlobResolver, Engine, EngineHost, EngineView, KeyBounds, Pressure, ReadSeqno, RecordReservation, Task, TaskReport,
};
use crate::iter::InternalIter;
use crate::lsm::blob::direct_file::DirectBlobFiles;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::blob_resolver::{ReadAheadBlobResolver, missing_blob_file_error};
use crate::lsm::compaction::leveled;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::table_handle::TreeContext;
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::table::block_fetcher::BlockValue;

/// A view of the tree. It holds the memtables and the tables of one super version.
struct LsmView {
    super_version: SuperVersion,
    context: Arc<TreeContext>,
}

impl EngineView for LsmView {
    fn iter(&self, _at: SeqNo, _bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        Ok(self.super_version.iter(&self.context))
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        Box::new(ReadAheadBlobResolver::new(&self.super_version))
    }
}

/// The result of a lookup.
enum LookupValue {
    Inline(Slice),
    /// In this blob file. The handle keeps the file open.
    InBlobFile(BlobPointer, Arc<BlobHandle>),
    /// In a blob file that was created after the super version was taken.
    UnknownBlobFile(BlobPointer, Arc<DirectBlobFiles>),
}

impl Engine for LsmTree {
    fn apply(&self, entry: EntryRef<'_>, _room: Option<RecordReservation>) -> Result<bool> {
        self.insert(entry)
    }

    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        loop {
            let found = self.current.with_pin(|now, pin| {
                let read = |kind: RecordKind, value: BlockValue<'_>| match kind {
                    RecordKind::BlobPointer => {
                        let pointer = BlobPointer::decode(&value)?;
                        Ok(match now.blob_file(pointer.logical_file) {
                            Some(handle) => LookupValue::InBlobFile(pointer, Arc::clone(handle)),
                            None => LookupValue::UnknownBlobFile(pointer, Arc::clone(&now.direct_blobs)),
                        })
                    }
                    _ => Ok(LookupValue::Inline(value.to_slice())),
                };
                now.find(&self.context, key, at, pin, read)
            })?;
            match found.transpose()? {
                None => return Ok(None),
                Some(LookupValue::Inline(value)) => return Ok(Some(value)),
                // Without the epoch pin, because a file read would delay the freeing of all memory that waits for the
                // epoch.
                Some(LookupValue::InBlobFile(pointer, handle)) => return handle.file().read(&pointer, true).map(Some),
                // The file was created and the record was published after the super version was taken and before `at`
                // was resolved. The next super version has the file.
                Some(LookupValue::UnknownBlobFile(pointer, direct_blobs)) => {
                    if self.current.with(|now| Arc::ptr_eq(&now.direct_blobs, &direct_blobs)) {
                        return Err(missing_blob_file_error(&pointer));
                    }
                }
            }
        }
    }

    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        let read = |kind: RecordKind, value: BlockValue<'_>| match kind {
            RecordKind::BlobPointer => BlobPointer::decode(&value).map(|pointer| pointer.value_len),
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            _ => Ok(value.len() as u32),
        };
        self.current.with_pin(|now, pin| now.find(&self.context, key, at, pin, read))?.transpose()
    }

    fn view(&self) -> Box<dyn EngineView> {
        Box::new(LsmView { super_version: self.current.get(), context: Arc::clone(&self.context) })
    }

    fn flushed_through(&self) -> SeqNo {
        self.current.with(|now| now.flushed_through)
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        self.current.with(|now| {
            let oldest = now.sealed.last().unwrap_or(&now.active);
            (!oldest.is_empty()).then(|| oldest.smallest_seqno())
        })
    }

    fn seal(&self) {
        self.seal_memtable();
    }

    /// If not `forced`, only tasks that can start now. If `forced`, also tasks that another thread is running:
    /// [`run`](Engine::run) waits for it, so that no work is left when this returns `None`. Call [`seal`](Engine::seal)
    /// first to include the active memtable.
    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.is_discarded() {
            return None;
        }
        let may = |task| !held.contains(&task);
        if may(Task::Flush) && self.current.with(|now| !now.sealed.is_empty()) && (forced || !self.flush_lock.is_held())
        {
            return Some(Task::Flush);
        }
        if self.compaction_lock.is_held() {
            return (forced && may(Task::Compact)).then_some(Task::Compact);
        }
        if may(Task::Compact) && self.needs_compaction(forced) {
            return Some(Task::Compact);
        }
        (!forced && may(Task::BlobGc) && self.needs_blob_gc()).then_some(Task::BlobGc)
    }

    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        match task {
            Task::Flush => self.flush(forced, host),
            Task::Compact => self.compact(forced, host),
            Task::BlobGc => self.run_automatic_blob_gc(forced, host),
        }
    }

    fn pressure(&self) -> Pressure {
        let options = self.options();
        self.current.with(|now| Pressure {
            sealed_bytes: now.sealed.iter().map(|memtable| memtable.bytes()).sum(),
            sealed_memtables: now.sealed.len(),
            compaction_debt: leveled::compaction_debt(&now.version, &options.compaction),
            l0_runs: now.version.level(0).runs.len(),
        })
    }
}
