//! Space that the pools of a commit have set aside for it.

use std::sync::Arc;

use crate::base::Result;
use crate::base::edit::PartitionId;
use crate::db::catalog::PartitionState;
use crate::db::commit::Commit;
use crate::engine::Room;
use crate::wal::payload::Records;

/// What a commit has set aside in pools. Dropped before the commit is in memory it gives all of it back.
pub(crate) struct Rooms {
    rooms: Vec<Room>,
    shares: Vec<Share>,
}

/// What one pool has set aside.
struct Share {
    partition: Arc<PartitionState>,
    /// For which of all rooms, by their places; given back one by one.
    rooms: Vec<usize>,
    leaves: usize,
}

/// What one pool is asked for.
struct Wish {
    partition: PartitionId,
    /// Lengths of keys and values.
    records: Vec<(usize, usize)>,
    /// Places among all rooms.
    places: Vec<usize>,
}

impl Rooms {
    /// Sets aside what the pools that `commit` names will need for it.
    ///
    /// # Errors
    /// `OutOfSpace` if one of them is full; then nothing is set aside.
    pub(crate) fn reserve(commit: &Commit<'_>) -> Result<Rooms> {
        let mut wishes: Vec<Wish> = Vec::with_capacity(1);
        let mut count = 0;
        for record in Records::new(commit.payload) {
            let record = record?;
            let partition = commit.partitions.iter().find(|partition| partition.id == record.partition);
            let Some(tree) = partition.and_then(|partition| partition.tree_if_built()) else { continue };
            if !tree.takes_room(record.kind) {
                continue;
            }
            let at = wishes.iter().position(|wish| wish.partition == record.partition).unwrap_or_else(|| {
                wishes.push(Wish { partition: record.partition, records: Vec::new(), places: Vec::new() });
                wishes.len() - 1
            });
            wishes[at].records.push((record.key.len(), record.value.len()));
            wishes[at].places.push(count);
            count += 1;
        }
        let mut all = Rooms { rooms: vec![(0, 0); count], shares: Vec::with_capacity(wishes.len()) };
        for wish in wishes {
            let partition = commit.partitions.iter().find(|partition| partition.id == wish.partition);
            let Some(partition) = partition else { continue };
            let Some(pool) = partition.tree_if_built().and_then(|tree| tree.pmem()) else { continue };
            let mut rooms = Vec::with_capacity(wish.records.len());
            let leaves = pool.reserve(&wish.records, &mut rooms)?;
            wish.places.iter().zip(rooms).for_each(|(place, room)| all.rooms[*place] = room);
            all.shares.push(Share { partition: Arc::clone(partition), rooms: wish.places, leaves });
        }
        Ok(all)
    }

    /// All of them, in the order of the commit.
    pub(crate) fn all(&self) -> &[Room] {
        &self.rooms
    }

    /// The commit is in memory, or nobody knows whether it is: no room is given back.
    pub(crate) fn settle(mut self) {
        self.shares.iter_mut().for_each(|share| share.rooms.clear());
    }
}

impl Drop for Rooms {
    fn drop(&mut self) {
        for share in &self.shares {
            if let Some(pool) = share.partition.tree_if_built().and_then(|tree| tree.pmem()) {
                share.rooms.iter().for_each(|place| pool.give_back(self.rooms[*place]));
                pool.end_promise(share.leaves);
            }
        }
    }
}
