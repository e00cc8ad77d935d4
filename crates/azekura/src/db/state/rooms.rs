//! Space that the pools of a commit have set aside for it.

use std::sync::Arc;

use crate::base::Result;
use crate::db::catalog::PartitionState;
use crate::db::commit::{Commit, Path};
use crate::engine::Room;
use crate::pmem::engine::PmemTree;
use crate::pmem::reserve::{Planned, Promise};
use crate::vfs::fs::PersistenceLevel;
use crate::wal::payload::Records;

/// What a commit has set aside in pools. Dropped before the commit is in memory it gives all of it back.
pub(crate) struct Rooms<'a> {
    shares: Vec<Share<'a>>,
    all: Vec<Room>,
    settled: bool,
}

/// What one pool has set aside.
struct Share<'a> {
    pool: &'a dyn PmemTree,
    records: Vec<Planned<'a>>,
    /// For which of all rooms, by their places.
    places: Vec<usize>,
    promise: Promise,
}

fn share(pool: &dyn PmemTree) -> Share<'_> {
    Share { pool, records: Vec::new(), places: Vec::new(), promise: Promise::default() }
}

fn pool_of(partition: &PartitionState) -> Option<&dyn PmemTree> {
    partition.pool_if_built().map(|pool| &**pool)
}

impl<'a> Rooms<'a> {
    /// Sets aside what the pools that `commit` names will need for it.
    ///
    /// # Errors
    /// `OutOfSpace` if one of them is full; then nothing is set aside.
    pub(crate) fn reserve(commit: &Commit<'a>) -> Result<Rooms<'a>> {
        let pools: Vec<_> = commit.partitions.iter().map(|partition| (partition.id, pool_of(partition))).collect();
        let mut shares: Vec<_> = pools.iter().filter_map(|(id, pool)| Some((*id, share((*pool)?)))).collect();
        // One pool after the other in an order that all batches have: each may have to wait for other batches.
        shares.sort_by_key(|(id, _)| *id);
        let mut count = 0;
        for record in Records::new(commit.payload) {
            let record = record?;
            let wanting = shares.iter_mut().find(|(id, _)| *id == record.partition);
            let Some((_, share)) = wanting else { continue };
            let value_len = record.kind.is_value().then_some(record.value.len());
            share.records.push(Planned { key: record.key, value_len });
            if value_len.is_some() {
                share.places.push(count);
                count += 1;
            }
        }
        let mut held = Rooms { shares: Vec::with_capacity(shares.len()), all: vec![(0, 0); count], settled: false };
        for (_, mut share) in shares {
            let mut rooms = vec![(0, 0); share.places.len()];
            share.promise = share.pool.reserve(&share.records, &mut rooms)?;
            share.places.iter().zip(rooms).for_each(|(place, room)| held.all[*place] = room);
            held.shares.push(share);
        }
        Ok(held)
    }

    /// How the commit becomes durable.
    pub(crate) fn path(&self, commit: &Commit<'_>) -> Path {
        let level = |partition: &Arc<PartitionState>| pool_of(partition).map(|pool| pool.level());
        match commit.partitions.iter().any(|one| level(one) == Some(PersistenceLevel::Power)) {
            true => Path::Ahead,
            false => Path::Logged,
        }
    }

    /// All of them, in the order of the commit.
    pub(crate) fn all(&self) -> &[Room] {
        &self.all
    }

    /// The commit is in memory, or nobody knows whether it is: no room is given back.
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }
}

impl Drop for Rooms<'_> {
    fn drop(&mut self) {
        for share in &self.shares {
            if !self.settled {
                share.places.iter().for_each(|place| share.pool.give_back(self.all[*place]));
            }
            share.pool.end_promise(share.promise);
        }
    }
}
