//! Writes that expire: their expiry times, and the record that a partition may have them.

use crate::base::key::{EXPIRY_LEN, NEVER_MS, VALUE_LEN_MAX};
use crate::base::version_edit::PartitionEdit;
use crate::base::{Error, Result};
use crate::db::inner::DbInner;
use crate::db::partition_state::PartitionState;
use crate::db::state::disk_reserve::ReserveUse;

impl DbInner {
    /// Prepares a write to `partition` that expires after `ttl_ms`. Returns the expiry time.
    ///
    /// # Errors
    /// `Invalid` if the value is too long with an expiry time, or the expiry time does not fit 64 bits. Those of
    /// writing the manifest before the first such write of the partition. Nothing is logged.
    pub(crate) fn begin_expiring_write(&self, partition: &PartitionState, ttl_ms: u64, value: &[u8]) -> Result<u64> {
        let expires_ms = self.snapshots.now_ms().checked_add(ttl_ms).unwrap_or(NEVER_MS);
        self.begin_write_until(partition, expires_ms, value)?;
        Ok(expires_ms)
    }

    /// Prepares a write to `partition` that expires at `expires_ms`.
    ///
    /// # Errors
    /// As [`begin_expiring_write`](DbInner::begin_expiring_write).
    pub(crate) fn begin_write_until(&self, partition: &PartitionState, expires_ms: u64, value: &[u8]) -> Result<()> {
        let (len, limit) = (value.len(), VALUE_LEN_MAX - EXPIRY_LEN as u64);
        if len as u64 > limit {
            let message = format!("value has {len} bytes, at most {limit} are allowed with a time to live");
            return Err(Error::invalid(message));
        }
        if expires_ms == NEVER_MS {
            return Err(Error::invalid("a record would expire 2^64 ms or more after 1970"));
        }
        match partition.expiry.is_used() {
            true => Ok(()),
            false => self.record_expiry_use(partition),
        }
    }

    /// Records in the manifest that `partition` may have records that expire.
    #[cold]
    fn record_expiry_use(&self, partition: &PartitionState) -> Result<()> {
        let _call = self.begin_api_call();
        self.check_outside()?;
        let version_set = &self.writer()?.version_set;
        partition.tree()?;
        let _work = self.begin_work()?;
        let edits = [PartitionEdit::ExpiryUsed.of(partition.id)];
        let recorded = self.with_reserve(ReserveUse::Flush, || version_set.log_and_apply_durably(&edits));
        self.poison.poison_on_failure(recorded)?;
        partition.expiry.note_use(&self.snapshots);
        Ok(())
    }
}
