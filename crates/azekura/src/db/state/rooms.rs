//! Space that the pools of a commit have set aside for it.

use std::sync::Arc;

use crate::base::Result;
use crate::db::catalog::PartitionState;
use crate::db::commit::{Commit, Path};
use crate::engine::Room;
use crate::pmem::engine::PmemTree;
use crate::vfs::fs::PersistenceLevel;
use crate::wal::payload::Records;

/// What a commit has set aside in pools. Dropped before the commit is in memory it gives all of it back.
pub(crate) struct Rooms<'a> {
    held: Held<'a>,
    settled: bool,
}

enum Held<'a> {
    Nothing,
    /// For one record: nothing is allocated.
    One(Share<'a>, [Room; 1]),
    Many(Vec<Share<'a>>, Vec<Room>),
}

/// What one pool has set aside.
struct Share<'a> {
    pool: &'a dyn PmemTree,
    /// Lengths of keys and values.
    records: Vec<(usize, usize)>,
    /// For which of all rooms, by their places.
    places: Vec<usize>,
    leaves: usize,
}

fn share(pool: &dyn PmemTree) -> Share<'_> {
    Share { pool, records: Vec::new(), places: Vec::new(), leaves: 0 }
}

fn pool_of(partition: &PartitionState) -> Option<&dyn PmemTree> {
    partition.tree_if_built()?.pmem().map(|pool| &**pool)
}

impl<'a> Rooms<'a> {
    /// Sets aside what the pools that `commit` names will need for it.
    ///
    /// # Errors
    /// `OutOfSpace` if one of them is full; then nothing is set aside.
    pub(crate) fn reserve(commit: &Commit<'a>) -> Result<Rooms<'a>> {
        if commit.count == 1
            && let [partition] = commit.partitions
            && let Some(pool) = pool_of(partition)
            && let Some(record) = Records::new(commit.payload).next().transpose()?
        {
            if !record.kind.is_value() {
                return Ok(Held::Nothing.into());
            }
            let (mut one, mut room) = (share(pool), [(0, 0)]);
            one.leaves = pool.reserve(&[(record.key.len(), record.value.len())], &mut room)?;
            return Ok(Held::One(one, room).into());
        }
        Rooms::reserve_many(commit)
    }

    fn reserve_many(commit: &Commit<'a>) -> Result<Rooms<'a>> {
        let pools: Vec<_> = commit.partitions.iter().map(|partition| (partition.id, pool_of(partition))).collect();
        let mut shares: Vec<_> = pools.iter().filter_map(|(id, pool)| Some((*id, share((*pool)?)))).collect();
        let mut count = 0;
        for record in Records::new(commit.payload) {
            let record = record?;
            let wanting = shares.iter_mut().find(|(id, _)| *id == record.partition);
            if let Some((_, share)) = wanting.filter(|_| record.kind.is_value()) {
                share.records.push((record.key.len(), record.value.len()));
                share.places.push(count);
                count += 1;
            }
        }
        let (mut held, mut all) = (Vec::with_capacity(shares.len()), vec![(0, 0); count]);
        for (_, mut share) in shares.into_iter().filter(|(_, share)| !share.records.is_empty()) {
            let mut rooms = vec![(0, 0); share.records.len()];
            share.leaves = match share.pool.reserve(&share.records, &mut rooms) {
                Ok(leaves) => leaves,
                Err(error) => {
                    drop(Rooms::from(Held::Many(held, all)));
                    return Err(error);
                }
            };
            share.places.iter().zip(rooms).for_each(|(place, room)| all[*place] = room);
            held.push(share);
        }
        Ok(Held::Many(held, all).into())
    }

    /// How the commit becomes durable.
    pub(crate) fn path(&self, commit: &Commit<'_>) -> Path {
        let level = |partition: &Arc<PartitionState>| pool_of(partition).map(|pool| pool.level());
        match commit.partitions {
            [one] if commit.count == 1 && level(one) > Some(PersistenceLevel::Logged) => Path::Alone,
            all if all.iter().any(|one| level(one) == Some(PersistenceLevel::Power)) => Path::Ahead,
            _ => Path::Logged,
        }
    }

    /// All of them, in the order of the commit.
    pub(crate) fn all(&self) -> &[Room] {
        match &self.held {
            Held::Nothing => &[],
            Held::One(_, room) => room,
            Held::Many(_, rooms) => rooms,
        }
    }

    /// The commit is in memory, or nobody knows whether it is: no room is given back.
    pub(crate) fn settle(mut self) {
        self.settled = true;
    }
}

impl<'a> From<Held<'a>> for Rooms<'a> {
    fn from(held: Held<'a>) -> Rooms<'a> {
        Rooms { held, settled: false }
    }
}

impl Drop for Rooms<'_> {
    fn drop(&mut self) {
        let (shares, rooms): (&[Share<'_>], &[Room]) = match &self.held {
            Held::Nothing => return,
            Held::One(share, room) => (std::slice::from_ref(share), room),
            Held::Many(shares, rooms) => (shares, rooms),
        };
        for share in shares {
            match (self.settled, &self.held) {
                (true, _) => {}
                (false, Held::One(..)) => share.pool.give_back(rooms[0]),
                (false, _) => share.places.iter().for_each(|place| share.pool.give_back(rooms[*place])),
            }
            share.pool.end_promise(share.leaves);
        }
    }
}
