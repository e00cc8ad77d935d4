//! Reads and changes the options of an existing partition.

use crate::base::Result;
use crate::base::sync::lock;
use crate::base::version_edit::PartitionEdit;
use crate::db::options::PartitionCreateOptions;
use crate::db::partition::Partition;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::worker::flush_and_wait;

impl Partition {
    /// Returns the stored options: those with which the partition was created, or the last
    /// [set](Partition::set_options) ones.
    ///
    /// ```
    /// # use azekura::{Config, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// let options = PartitionCreateOptions::default().block_size(16 << 10);
    /// let logs = db.open_partition("logs", options.clone())?;
    /// assert_eq!(logs.options(), options);
    /// let copy = db.open_partition("copy of logs", logs.options())?;
    /// assert_eq!(copy.options(), options);
    /// # Ok(()) }
    /// ```
    pub fn options(&self) -> PartitionCreateOptions {
        // A partition whose stored options cannot be decoded is never opened, and only encoded options replace them.
        let of_parent = self.handle.inner.is_forked().then(PartitionCreateOptions::default);
        of_parent.unwrap_or_else(|| self.state.stored_options().unwrap_or_default())
    }

    /// Changes the options of the partition, and stores them: they hold for all of its handles and for later opens.
    ///
    /// The change survives the end of the process; a later sync makes it survive power loss. New options apply to data
    /// written from now on; those that place index and filter blocks also apply to tables that were not read yet. A
    /// lower [`max_size`](crate::PmemOptions::max_size) of a pool first writes a checkpoint.
    ///
    /// # Errors
    /// `Invalid` if an option is out of range or does not fit the comparator, if the engine is another one than that of
    /// the partition, or if the database is open for reading only. `Closed`. `Io`, `OutOfSpace`, `Poisoned` from
    /// writing. After an error the old options hold.
    ///
    /// ```
    /// # use azekura::{CompressionType, Config, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// let logs = db.open_partition("logs", Default::default())?;
    /// logs.set_options(logs.options().compression(CompressionType::Miniz(6)))?; // keeps the other options
    /// logs.major_compact()?; // writes the existing data anew
    /// let again = db.open_partition("logs", Default::default())?; // an open changes nothing
    /// assert_eq!(again.options(), PartitionCreateOptions::default().compression(CompressionType::Miniz(6)));
    /// # Ok(()) }
    /// ```
    pub fn set_options(&self, options: PartitionCreateOptions) -> Result<()> {
        options.check()?;
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let _ddl_guard = lock(&inner.partition_ddl_lock);
        options.check_order(self.state.tree()?.key_order())?;
        self.state.check_engine(&options)?;
        inner.writer()?;
        self.replace_options(&options).inspect_err(|_| {
            let old_options = self.state.stored_options();
            let _kept_on_failure = old_options.and_then(|old| inner.catalog.set_options(&self.state, &old));
        })
    }

    /// Applies new options and stores them. After a failure the old options are still stored, and the caller applies
    /// them again. The caller holds the lock for changes of partitions.
    fn replace_options(&self, options: &PartitionCreateOptions) -> Result<()> {
        let (inner, state) = (&self.handle.inner, &self.state);
        let settings = options.encode();
        let work = inner.begin_work()?;
        inner.catalog.set_options(state, options)?;
        if state.has_settings(&settings) {
            return Ok(());
        }
        // `flush_and_wait` begins work of its own.
        drop(work);
        if inner.catalog.lowers_max_size(state, options)? {
            flush_and_wait(inner, state)?;
        }
        let _work = inner.begin_work()?;
        let edits = [PartitionEdit::Settings { settings: settings.clone() }.of(state.id)];
        let version_set = &inner.writer()?.version_set;
        inner.poison.poison_on_failure(inner.with_reserve(ReserveUse::Flush, || version_set.log_and_apply(&edits)))?;
        state.note_settings(settings);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::db::config::Config;
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::lsm::options::KvSeparationOptions;
    use crate::pmem::options::PmemOptions;
    use crate::testing::MemFs;

    /// Regression: the options of a pool whose stored options are out of range, as a newer version may store them, had
    /// the engine of the defaults. The pool refused its own options.
    #[test]
    fn stored_options_keep_the_engine() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let pool = EngineType::Pmem(PmemOptions::default().max_size(4 << 20));
        let separated = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
        let lsm = PartitionCreateOptions::default();
        for (name, own, other) in
            [("pool", lsm.clone().engine(pool.clone()), separated), ("lsm", lsm.clone(), lsm.engine(pool))]
        {
            let part = db.open_partition(name, own).unwrap();
            let engine = part.options().engine;
            for stored in [other.clone().block_size(63).encode(), other.encode(), Vec::new()] {
                part.state.note_settings(stored);
                assert_eq!(std::mem::discriminant(&part.options().engine), std::mem::discriminant(&engine), "{name}");
                part.set_options(part.options()).unwrap();
            }
        }
    }
}
