//! Puts in batches: large enough to be quick, small enough to need little memory.

use azekura::{Batch, Database, ErrorKind, Partition};

use crate::args::MapArgs;
use crate::command::transfer::moved::Moved;
use crate::failure::Result;
use crate::open;
use crate::progress::Progress;

const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ENTRIES: usize = 1000;

/// A partition that is being filled.
pub(crate) struct Load {
    db: Database,
    partition: Partition,
    batch: Batch,
    batch_bytes: u64,
    moved: Moved,
    progress: Progress,
}

impl Load {
    /// Opens the target, and creates it if it is missing.
    pub(crate) fn start(map: &MapArgs, progress: Progress) -> Result<Load> {
        let (db, partition) = open::map_to_fill(map)?;
        let batch = db.batch();
        Ok(Load { db, partition, batch, batch_bytes: 0, moved: Moved::default(), progress })
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(crate) fn entries(&self) -> u64 {
        self.moved.entries
    }

    /// Stores one entry, now or with the next ones.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        let bytes = (key.len() + value.len()) as u64;
        if bytes >= BATCH_BYTES || key.len() > usize::from(u16::MAX) {
            return self.put_alone(key, value, name);
        }
        self.batch.insert(&self.partition, key, value);
        self.batch_bytes += bytes;
        self.count(bytes);
        if self.batch_bytes >= BATCH_BYTES || self.batch.len() >= BATCH_ENTRIES {
            self.commit()?;
        }
        Ok(())
    }

    /// A large entry by itself; one that is beyond the limits of the database is left out.
    fn put_alone(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        self.commit()?;
        match self.partition.insert(key, value) {
            Ok(()) => self.count((key.len() + value.len()) as u64),
            Err(error) if error.kind() == ErrorKind::Invalid => self.leave_out(name(), error.message().to_string()),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    pub(crate) fn leave_out(&mut self, name: String, why: String) {
        self.moved.left_out.push((name, why));
    }

    /// Writes what is still collected.
    pub(crate) fn commit(&mut self) -> Result<()> {
        let batch = std::mem::replace(&mut self.batch, self.db.batch());
        self.batch_bytes = 0;
        if !batch.is_empty() {
            batch.commit()?;
        }
        Ok(())
    }

    /// Writes the rest and closes the database.
    pub(crate) fn finish(mut self) -> Result<Moved> {
        self.commit()?;
        let Load { db, partition, batch, moved, .. } = self;
        drop((partition, batch));
        db.close()?;
        Ok(moved)
    }

    fn count(&mut self, bytes: u64) {
        self.moved.entries += 1;
        self.moved.bytes += bytes;
    }
}
