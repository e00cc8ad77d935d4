//! What stands behind a partition: one tree or another, called without a detour.

use std::sync::Arc;

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, EngineHost, EngineView, Pressure, ReadSeqno, RecordReservation, Task, TaskReport};
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::pmem::pool::PmemEngine;

/// The tree of a partition.
#[derive(Clone)]
pub(crate) enum PartitionTree {
    Lsm(Arc<LsmTree>),
    Pmem(Arc<dyn PmemEngine>),
}

/// Does the same with whatever tree it is.
macro_rules! either {
    ($self:expr, $tree:ident => $work:expr) => {
        match $self {
            PartitionTree::Lsm($tree) => $work,
            PartitionTree::Pmem($tree) => $work,
        }
    };
}

impl PartitionTree {
    /// The tree, if it is of tables and memtables.
    #[inline]
    pub(crate) fn lsm(&self) -> Option<&Arc<LsmTree>> {
        match self {
            PartitionTree::Lsm(tree) => Some(tree),
            PartitionTree::Pmem(_) => None,
        }
    }

    pub(crate) fn pmem(&self) -> Option<&Arc<dyn PmemEngine>> {
        match self {
            PartitionTree::Lsm(_) => None,
            PartitionTree::Pmem(tree) => Some(tree),
        }
    }

    /// Whether space is set aside for a record of that kind before it is written to the log.
    #[inline]
    pub(crate) fn needs_reservation(&self, kind: RecordKind) -> bool {
        matches!(self, PartitionTree::Pmem(_)) && kind.is_value()
    }

    pub(crate) fn key_order(&self) -> &KeyOrder {
        either!(self, tree => tree.key_order())
    }

    /// About how many keys there are.
    pub(crate) fn approximate_len(&self) -> u64 {
        either!(self, tree => tree.approximate_len())
    }

    /// Adds a record of the log again.
    pub(crate) fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        either!(self, tree => tree.replay(entry))
    }

    /// Ends the tree of a deleted partition, after the edit that drops it.
    pub(crate) fn discard(&self) {
        either!(self, tree => tree.discard());
    }
}

impl Engine for PartitionTree {
    #[inline]
    fn apply(&self, entry: EntryRef<'_>, reservation: Option<RecordReservation>) -> Result<bool> {
        either!(self, tree => tree.apply(entry, reservation))
    }

    #[inline]
    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        either!(self, tree => tree.get(key, at))
    }

    #[inline]
    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        either!(self, tree => tree.size_of(key, at))
    }

    fn view(&self) -> Box<dyn EngineView> {
        either!(self, tree => tree.view())
    }

    fn flushed_through(&self) -> SeqNo {
        either!(self, tree => tree.flushed_through())
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        either!(self, tree => tree.first_unflushed())
    }

    fn seal(&self) {
        either!(self, tree => tree.seal());
    }

    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        either!(self, tree => tree.next_task(forced, held))
    }

    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        either!(self, tree => tree.run(task, forced, host))
    }

    fn pressure(&self) -> Pressure {
        either!(self, tree => tree.pressure())
    }
}
