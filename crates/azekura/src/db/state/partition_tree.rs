//! The tree of a partition.

use std::ops::Deref;
use std::sync::Arc;

use crate::base::{EntryRef, RecordKind, Result};
use crate::engine::{Engine, ReadSeqno, RecordReservation, SingleCommit};
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::pmem::pool::PmemEngine;

/// The tree of a partition. Dereferences to its engine. The methods on the paths of a put and a get are also here,
/// because a call through `match` costs less than one through `dyn`.
#[derive(Clone)]
pub(crate) enum PartitionTree {
    Lsm(Arc<LsmTree>),
    Pmem(Arc<dyn PmemEngine>),
}

impl Deref for PartitionTree {
    type Target = dyn Engine;

    fn deref(&self) -> &Self::Target {
        match self {
            PartitionTree::Lsm(tree) => &**tree,
            PartitionTree::Pmem(tree) => &**tree,
        }
    }
}

impl PartitionTree {
    /// Returns the LSM tree, for calls that only concern tables and blob files; `None` for a pool.
    #[inline]
    pub(crate) fn lsm(&self) -> Option<&Arc<LsmTree>> {
        match self {
            PartitionTree::Lsm(tree) => Some(tree),
            PartitionTree::Pmem(_) => None,
        }
    }

    /// Returns the pool, for calls that only concern pools; `None` for an LSM tree.
    pub(crate) fn pmem(&self) -> Option<&Arc<dyn PmemEngine>> {
        match self {
            PartitionTree::Lsm(_) => None,
            PartitionTree::Pmem(tree) => Some(tree),
        }
    }

    /// Returns how a single record is committed.
    #[inline]
    pub(crate) fn single_commit(&self) -> SingleCommit {
        match self {
            PartitionTree::Lsm(_) => SingleCommit::InGroup,
            PartitionTree::Pmem(tree) => tree.single_commit(),
        }
    }

    /// Whether a batch must be [prepared](Engine::prepare) before it is appended to the WAL.
    #[inline]
    pub(crate) fn needs_preparation(&self) -> bool {
        matches!(self, PartitionTree::Pmem(_))
    }

    /// Whether [`prepare`](Engine::prepare) reserves space for a record of this kind.
    #[inline]
    pub(crate) fn reserves_space_for(&self, kind: RecordKind) -> bool {
        self.needs_preparation() && kind.is_value()
    }

    /// As [`Engine::apply`].
    #[inline]
    pub(crate) fn apply(&self, entry: EntryRef<'_>, reservation: Option<RecordReservation>) -> Result<bool> {
        match self {
            PartitionTree::Lsm(tree) => tree.apply(entry, reservation),
            PartitionTree::Pmem(tree) => tree.apply(entry, reservation),
        }
    }

    /// As [`Engine::get`].
    #[inline]
    pub(crate) fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        match self {
            PartitionTree::Lsm(tree) => tree.get(key, at),
            PartitionTree::Pmem(tree) => tree.get(key, at),
        }
    }

    /// Calls `read` with the value of `key` at `at`, in place if the tree can lend it.
    pub(crate) fn get_with<R>(&self, key: &[u8], at: ReadSeqno, read: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        match self {
            PartitionTree::Lsm(tree) => tree.get_with(key, at, read),
            PartitionTree::Pmem(tree) => Ok(tree.get(key, at)?.map(|value| read(&value))),
        }
    }

    /// As [`Engine::size_of`].
    #[inline]
    pub(crate) fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        match self {
            PartitionTree::Lsm(tree) => tree.size_of(key, at),
            PartitionTree::Pmem(tree) => tree.size_of(key, at),
        }
    }
}
