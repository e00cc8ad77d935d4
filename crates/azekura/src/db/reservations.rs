//! Reservations of a commit: space in pools, and direct blob writes. They are undone unless the commit is applied.

use std::sync::Arc;

use crate::base::Result;
use crate::db::catalog::PartitionState;
use crate::db::commit::{CommitPath, CommitRequest};
use crate::engine::RecordReservation;
use crate::lsm::blob::direct_file::DirectBlobWrite;
use crate::pmem::pool::PmemEngine;
use crate::pmem::reserve::{Planned, Promise};
use crate::vfs::fs::PersistenceLevel;
use crate::wal::batch_codec::WalRecordIter;

/// What a commit has set aside in pools. Dropped before the commit is in memory it gives all of it back.
pub(crate) struct PoolReservations<'a> {
    per_pool: Vec<PoolReservation<'a>>,
    reservations: Vec<RecordReservation>,
    applied: bool,
}

/// What one pool has set aside.
struct PoolReservation<'a> {
    pool: &'a dyn PmemEngine,
    records: Vec<Planned<'a>>,
    /// For which of all rooms, by their places.
    indexes: Vec<usize>,
    promise: Promise,
}

fn pool_reservation(pool: &dyn PmemEngine) -> PoolReservation<'_> {
    PoolReservation { pool, records: Vec::new(), indexes: Vec::new(), promise: Promise::default() }
}

fn pool_of(partition: &PartitionState) -> Option<&dyn PmemEngine> {
    partition.pool_if_built().map(|pool| &**pool)
}

impl<'a> PoolReservations<'a> {
    /// Sets aside what the pools that `commit` names will need for it.
    ///
    /// # Errors
    /// `OutOfSpace` if one of them is full; then nothing is set aside.
    pub(crate) fn reserve(commit: &CommitRequest<'a>) -> Result<PoolReservations<'a>> {
        let pools: Vec<_> = commit.partitions.iter().map(|partition| (partition.id, pool_of(partition))).collect();
        let mut shares: Vec<_> =
            pools.iter().filter_map(|(id, pool)| Some((*id, pool_reservation((*pool)?)))).collect();
        // One pool after the other in an order that all batches have: each may have to wait for other batches.
        shares.sort_by_key(|(id, _)| *id);
        let mut count = 0;
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            let wanting = shares.iter_mut().find(|(id, _)| *id == record.partition);
            let Some((_, share)) = wanting else { continue };
            let value_len = record.kind.is_value().then_some(record.value.len());
            share.records.push(Planned { key: record.key, value_len });
            if value_len.is_some() {
                share.indexes.push(count);
                count += 1;
            }
        }
        let mut held = PoolReservations {
            per_pool: Vec::with_capacity(shares.len()),
            reservations: vec![(0, 0); count],
            applied: false,
        };
        for (_, mut share) in shares {
            let mut reservations = vec![(0, 0); share.indexes.len()];
            share.promise = share.pool.reserve(&share.records, &mut reservations)?;
            share
                .indexes
                .iter()
                .zip(reservations)
                .for_each(|(place, reservation)| held.reservations[*place] = reservation);
            held.per_pool.push(share);
        }
        Ok(held)
    }

    /// How the commit becomes durable.
    pub(crate) fn commit_path(&self, commit: &CommitRequest<'_>) -> CommitPath {
        let level = |partition: &Arc<PartitionState>| pool_of(partition).map(|pool| pool.persistence_level());
        match commit.partitions.iter().any(|one| level(one) == Some(PersistenceLevel::PowerLoss)) {
            true => CommitPath::SyncBeforeApply,
            false => CommitPath::Logged,
        }
    }

    /// All of them, in the order of the commit.
    pub(crate) fn all(&self) -> &[RecordReservation] {
        &self.reservations
    }

    /// The commit is applied, or its state is unknown: no reservation is released.
    pub(crate) fn mark_applied(mut self) {
        self.applied = true;
    }
}

impl Drop for PoolReservations<'_> {
    fn drop(&mut self) {
        for share in &self.per_pool {
            if !self.applied {
                share.indexes.iter().for_each(|place| share.pool.free_reservation(self.reservations[*place]));
            }
            share.pool.release_leaf_reservation(share.promise);
        }
    }
}

/// The direct blob writes of a commit. If this is dropped before the commit is applied, all of them are abandoned, so
/// that the files know that no pointer leads to these values.
#[derive(Default)]
pub(crate) struct DirectBlobWrites {
    writes: Vec<(Arc<PartitionState>, DirectBlobWrite)>,
    bytes: u64,
}

impl DirectBlobWrites {
    pub(crate) fn add(&mut self, partition: &Arc<PartitionState>, claim: DirectBlobWrite) {
        self.bytes += u64::from(claim.pointer.value_len);
        self.writes.push((Arc::clone(partition), claim));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Bytes of the values.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the values durable.
    ///
    /// # Errors
    /// `Poisoned` if values of other commits may be lost; else the commit can fail alone.
    pub(crate) fn sync(&self) -> Result<()> {
        let mut done: Vec<&Arc<PartitionState>> = Vec::new();
        for (partition, _) in &self.writes {
            if done.iter().any(|other| Arc::ptr_eq(other, partition)) {
                continue;
            }
            done.push(partition);
            let own = self.writes.iter().filter(|(other, _)| Arc::ptr_eq(other, partition)).map(|(_, claim)| claim);
            partition.lsm()?.sync_direct_writes(own)?;
        }
        Ok(())
    }

    /// Memtables point to the values now, or the state of the commit is unknown.
    pub(crate) fn mark_applied(mut self) {
        self.writes.clear();
    }
}

impl Drop for DirectBlobWrites {
    fn drop(&mut self) {
        for (partition, claim) in self.writes.drain(..) {
            if let Some(tree) = partition.lsm_if_built() {
                tree.release_direct_write(&claim);
            }
        }
    }
}
