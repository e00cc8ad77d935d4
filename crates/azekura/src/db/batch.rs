//! Several writes that happen together.

use std::sync::Arc;

use crate::base::{Error, RecordKind, Result};
use crate::db::catalog::PartitionState;
use crate::db::commit::{Commit, Path};
use crate::db::config::PersistMode;
use crate::db::handle::Handle;
use crate::db::partition::Partition;
use crate::db::state::claims::Claims;
use crate::wal::payload::{Record, check_limits, put_record};

/// Writes, over any partitions of one database, that become visible and durable together or not at all.
///
/// Later writes of the same key win. Dropping a batch without [`commit`](Batch::commit) changes nothing.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let stock = db.open_partition("stock", Default::default())?;
/// let orders = db.open_partition("orders", Default::default())?;
/// let mut batch = db.batch();
/// batch.insert(&stock, "apples", "41");
/// batch.insert(&orders, "order 1", "one apple");
/// batch.commit()?;
/// # Ok(()) }
/// ```
#[must_use = "a batch does nothing until it is committed"]
pub struct Batch {
    handle: Arc<Handle>,
    payload: Vec<u8>,
    count: u32,
    partitions: Vec<Arc<PartitionState>>,
    ahead: Claims,
    durability: PersistMode,
    /// The first wrong call; `commit` reports it, and nothing is written.
    wrong: Option<Error>,
}

impl Batch {
    pub(crate) fn new(handle: Arc<Handle>) -> Batch {
        let durability = handle.shared.settings.durability;
        let ahead = Claims::default();
        Batch { handle, payload: Vec::new(), count: 0, partitions: Vec::new(), ahead, durability, wrong: None }
    }

    /// Sets the value of a key. A value of a MiB and more, of a partition with key-value separation, is written to a
    /// blob file here and now and takes no memory; a failure of that is told by [`commit`](Batch::commit).
    pub fn insert(&mut self, partition: &Partition, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::Put, key.as_ref(), value.as_ref());
    }

    /// Removes a key.
    pub fn remove(&mut self, partition: &Partition, key: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::Delete, key.as_ref(), &[]);
    }

    /// Removes a key that was inserted exactly once; see [`Partition::remove_weak`].
    pub fn remove_weak(&mut self, partition: &Partition, key: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::SingleDelete, key.as_ref(), &[]);
    }

    fn push(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) {
        if self.wrong.is_some() {
            return;
        }
        let checked = check_limits(key, value).and_then(|()| partition.check_home(&self.handle));
        let written =
            checked.and_then(|()| match kind == RecordKind::Put && partition.state.takes_early(value.len()) {
                true => self.write_ahead(partition, key, value),
                false => self.write(partition, kind, key, value),
            });
        if let Err(error) = written {
            self.wrong = Some(error);
        }
    }

    #[cold]
    fn write_ahead(&mut self, partition: &Partition, key: &[u8], value: &[u8]) -> Result<()> {
        let claim = self.handle.shared.put_early(&partition.state, value)?;
        let mut pointer = Vec::new();
        claim.pointer.encode(&mut pointer);
        self.ahead.add(&partition.state, claim);
        self.write(partition, RecordKind::BlobPointer, key, &pointer)
    }

    fn write(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        let limit = self.handle.shared.settings.memory_budget / 2;
        let size = self.payload.len() as u64 + key.len() as u64 + value.len() as u64;
        if size > limit || self.count == u32::MAX {
            return Err(Error::invalid(format!("batch is larger than half the memory budget ({limit} bytes)")));
        }
        if self.partitions.last().is_none_or(|last| last.id != partition.state.id)
            && !self.partitions.iter().any(|known| known.id == partition.state.id)
        {
            self.partitions.push(Arc::clone(&partition.state));
        }
        put_record(&mut self.payload, &Record { kind, partition: partition.state.id, key, value });
        self.count += 1;
        Ok(())
    }

    /// How far [`commit`](Batch::commit) gets before it returns. Default: the database's.
    pub fn durability(mut self, mode: PersistMode) -> Batch {
        self.durability = mode;
        self
    }

    /// The number of writes.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Whether there are no writes.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Makes all writes visible at once, as durable as asked for. An empty batch only does what its durability asks
    /// for.
    ///
    /// # Errors
    /// `Invalid` for the first write that broke a limit or came from another database; otherwise as
    /// [`Partition::insert`]. On an error nothing of the batch is visible, with one exception: where writing succeeded
    /// and only the sync failed, all of it is visible, and the next open finds all of it or nothing.
    pub fn commit(self) -> Result<()> {
        if let Some(wrong) = self.wrong {
            return Err(wrong);
        }
        let shared = &self.handle.shared;
        if self.count == 0 {
            shared.writer()?;
            return shared.persist(self.durability);
        }
        let (payload, partitions) = (&self.payload[..], &self.partitions[..]);
        let commit = Commit { payload, count: self.count, partitions, rooms: &[], path: Path::Logged };
        match self.ahead.is_empty() {
            true => shared.commit(commit, self.durability),
            false => shared.commit_ahead(commit, self.ahead, self.durability),
        }
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("len", &self.count).field("bytes", &self.payload.len()).finish_non_exhaustive()
    }
}
