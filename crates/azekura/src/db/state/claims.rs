//! Values of a commit that are written to blob files ahead of it.

use std::sync::Arc;

use crate::base::Result;
use crate::db::catalog::PartitionState;
use crate::lsm::blob::direct_file::DirectBlobWrite;

/// What a commit has written to early files. Dropped before the commit is in memory it gives all of it up, so that the
/// files know that nobody will ever point there.
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

    /// Memory points to the values now, or nobody knows whether it does.
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
