//! Puts in batches: large enough to be quick, small enough to need little memory.

use azekura::{Batch, ErrorKind};

use crate::args::MapArgs;
use crate::command::transfer::moved::Moved;
use crate::failure::Result;
use crate::open::{self, Target};
use crate::progress::Progress;

const BATCH_BYTES: u64 = 4 << 20;
const BATCH_ENTRIES: usize = 1000;

/// A partition that is being filled. It is opened, and created if it is missing, for the first entry: input that is
/// wrong before it has an entry leaves nothing behind.
pub(crate) struct Load<'a> {
    map: &'a MapArgs,
    target: Option<(Target, Batch)>,
    batch_bytes: u64,
    moved: Moved,
    progress: Progress,
}

impl<'a> Load<'a> {
    pub(crate) fn new(map: &'a MapArgs, progress: Progress) -> Load<'a> {
        Load { map, target: None, batch_bytes: 0, moved: Moved::default(), progress }
    }

    fn target(&mut self) -> Result<&mut (Target, Batch)> {
        if self.target.is_none() {
            let target = open::map_to_fill(self.map)?;
            let batch = target.db.batch();
            self.target = Some((target, batch));
        }
        Ok(self.target.as_mut().expect("it was opened above"))
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Stores one entry, now or with the next ones.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        let bytes = (key.len() + value.len()) as u64;
        if bytes >= BATCH_BYTES || key.len() > usize::from(u16::MAX) {
            return self.put_alone(key, value, name);
        }
        let (target, batch) = self.target()?;
        batch.insert(&target.partition, key, value);
        let entries = batch.len();
        self.batch_bytes += bytes;
        self.count(bytes);
        if self.batch_bytes >= BATCH_BYTES || entries >= BATCH_ENTRIES {
            self.commit()?;
        }
        Ok(())
    }

    /// A large entry by itself; one that is beyond the limits of the database is left out.
    fn put_alone(&mut self, key: &[u8], value: &[u8], name: impl Fn() -> String) -> Result<()> {
        self.commit()?;
        match self.target()?.0.partition.insert(key, value) {
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
        self.batch_bytes = 0;
        if let Some((target, batch)) = &mut self.target {
            std::mem::replace(batch, target.db.batch()).commit()?;
        }
        Ok(())
    }

    /// Writes the rest and closes the database. Input without entries, and without errors, leaves an empty partition.
    pub(crate) fn finish(mut self) -> Result<Moved> {
        let stored = self.moved.left_out.is_empty() || self.moved.entries > 0;
        if stored {
            self.target()?;
        }
        self.commit()?;
        self.close(stored)
    }

    /// The same for input that is wrong from here on.
    pub(crate) fn give_up(mut self) -> Result<Moved> {
        self.commit()?;
        let stored = self.moved.entries > 0;
        self.close(stored)
    }

    fn close(self, stored: bool) -> Result<Moved> {
        if let Some((target, batch)) = self.target {
            drop(batch);
            target.close(stored)?;
        }
        Ok(self.moved)
    }

    fn count(&mut self, bytes: u64) {
        self.moved.entries += 1;
        self.moved.bytes += bytes;
    }
}
