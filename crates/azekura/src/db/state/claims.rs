//! Values of a commit that are written to blob files ahead of it.

use std::sync::Arc;

use crate::base::Result;
use crate::db::catalog::PartitionState;
use crate::lsm::blobs::early::Claim;

/// What a commit has written to early files. Dropped before the commit is in memory it gives all of it up, so that the
/// files know that nobody will ever point there.
#[derive(Default)]
pub(crate) struct Claims {
    held: Vec<(Arc<PartitionState>, Claim)>,
    bytes: u64,
}

impl Claims {
    pub(crate) fn add(&mut self, partition: &Arc<PartitionState>, claim: Claim) {
        self.bytes += u64::from(claim.pointer.len);
        self.held.push((Arc::clone(partition), claim));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
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
        for (partition, _) in &self.held {
            if done.iter().any(|other| Arc::ptr_eq(other, partition)) {
                continue;
            }
            done.push(partition);
            let own = self.held.iter().filter(|(other, _)| Arc::ptr_eq(other, partition)).map(|(_, claim)| claim);
            partition.lsm()?.sync_claims(own)?;
        }
        Ok(())
    }

    /// Memory points to the values now, or nobody knows whether it does.
    pub(crate) fn settle(mut self) {
        self.held.clear();
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        for (partition, claim) in self.held.drain(..) {
            if let Some(tree) = partition.lsm_if_built() {
                tree.release(&claim);
            }
        }
    }
}
