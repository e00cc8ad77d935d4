//! The tree of a partition.

use std::ops::Deref;
use std::sync::Arc;

use crate::base::merge_operator::MergeOperator;
use crate::base::version_edit::BlobFileMeta;
use crate::base::{EntryRef, Result};
use crate::engine::{Engine, NumberedRecords, ReadSeqno, SingleCommit, Staged};
use crate::lsm::direct_file::DirectBlobFile;
use crate::lsm::options::LsmOptions;
use crate::lsm::tree::LsmTree;
use crate::mem::slice::Slice;
use crate::pmem::options::PmemOptions;
use crate::pmem::pool::PmemEngine;
use crate::vfs::fs::PersistenceLevel;

/// Options of a tree of either kind.
#[derive(Clone, Debug)]
pub(crate) struct TreeOptions {
    pub(crate) lsm: LsmOptions,
    pub(crate) pmem: PmemOptions,
}

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

    /// Applies options to new data.
    ///
    /// # Errors
    /// `Invalid` if the address space of a pool is too small for its new limit.
    pub(crate) fn set_options(&self, options: &TreeOptions) -> Result<()> {
        match self {
            PartitionTree::Lsm(tree) => tree.set_options(options.lsm.clone()),
            PartitionTree::Pmem(tree) => tree.set_options(&options.pmem)?,
        }
        Ok(())
    }

    /// In a follower: prepares the tree for records of a live WAL.
    ///
    /// # Errors
    /// `Invalid` if the address space of a pool is too small.
    pub(crate) fn prepare_to_follow(&self) -> Result<()> {
        match self {
            PartitionTree::Lsm(tree) => tree.limit_memtables(),
            // The limit of the writer holds. A pool of a follower may need more, as its free space is not the same.
            PartitionTree::Pmem(tree) => tree.set_options(&PmemOptions::default().max_size(8 << 40))?,
        }
        Ok(())
    }

    /// Whether `new` options lower the size limit of a pool below that of the `old` ones. The WAL was written under the
    /// old limit, so it must not be replayed under the lower one.
    pub(crate) fn lowers_max_size(&self, new: &TreeOptions, old: &TreeOptions) -> bool {
        matches!(self, PartitionTree::Pmem(_)) && new.pmem.lowers_max_size(&old.pmem)
    }

    /// Gives the tree its merge operator, unless it has one. Pools need none, because they keep no operands.
    pub(crate) fn set_merge_operator(&self, operator: &Arc<dyn MergeOperator>) {
        if let PartitionTree::Lsm(tree) = self {
            tree.merge_operator.get_or_init(|| Arc::clone(operator));
        }
    }

    /// Whether the tree keeps operands of merges. For any other tree, the value is computed before the commit.
    pub(crate) fn keeps_operands(&self) -> bool {
        matches!(self, PartitionTree::Lsm(_))
    }

    /// Adds a blob file that recovery made of a direct blob file. Only records of the WAL point into it.
    pub(crate) fn add_blob_file(&self, file: BlobFileMeta) {
        if let PartitionTree::Lsm(tree) = self {
            tree.add_blob_files(vec![file]);
        }
    }

    /// Adds a direct blob file that the WAL points into, and that a read-only open cannot finish.
    pub(crate) fn add_unfinished_blobs(&self, file: Arc<DirectBlobFile>) {
        if let PartitionTree::Lsm(tree) = self {
            tree.add_direct_blob_files([file]);
        }
    }

    /// Whether a value of `len` bytes is [staged](Engine::stage) before its commit. `synced`: whether the commit
    /// requests a sync.
    #[inline]
    pub(crate) fn stages_value(&self, len: usize, synced: bool) -> bool {
        self.lsm().is_some_and(|tree| tree.direct_blobs.writes_directly(len, synced))
    }

    /// Returns how a single record is committed.
    #[inline]
    pub(crate) fn single_commit(&self) -> SingleCommit {
        match self {
            PartitionTree::Lsm(_) => SingleCommit::InGroup,
            PartitionTree::Pmem(tree) => tree.single_commit(),
        }
    }

    /// Whether a change survives the end of the process through the WAL only.
    pub(crate) fn needs_wal(&self) -> bool {
        self.persistence_level() == PersistenceLevel::WalOnly
    }

    /// Whether a change survives power loss without the WAL.
    #[inline]
    pub(crate) fn survives_power_loss(&self) -> bool {
        matches!(self, PartitionTree::Pmem(tree) if tree.persistence_level() == PersistenceLevel::PowerLoss)
    }

    /// As [`Engine::prepare`].
    #[inline]
    pub(crate) fn prepare<'a>(&self, records: &dyn Fn() -> Result<NumberedRecords<'a>>) -> Result<Vec<(u32, Staged)>> {
        match self {
            PartitionTree::Lsm(tree) => tree.prepare(records),
            PartitionTree::Pmem(tree) => tree.prepare(records),
        }
    }

    /// As [`Engine::apply`].
    #[inline]
    pub(crate) fn apply(&self, entry: EntryRef<'_>, staged: Staged) -> Result<bool> {
        match self {
            PartitionTree::Lsm(tree) => tree.apply(entry, staged),
            PartitionTree::Pmem(tree) => tree.apply(entry, staged),
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
