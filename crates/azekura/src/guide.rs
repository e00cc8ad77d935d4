//! The user guide. Every program in it is compiled and run with the tests.
//!
//! 1. [`first_program`]: open, write, read, close.
//! 2. [`modelling_keys`]: numbers, tuples, prefixes, indexes; partitions or prefixes; comparators.
//! 3. [`batches_and_snapshots`]: changes and views that span partitions.
//! 4. [`transactions`]: decisions that depend on what was read; atomic operations on single keys.
//! 5. [`durability`]: which failures a commit survives.
//! 6. [`changes`]: the committed changes in order, for indexes, outboxes and caches.
//! 7. [`followers`]: reading in another process beside the writer.
//! 8. [`tuning`]: options for point reads, scans, ingest, large values and data in memory.
//! 9. [`operating`]: the command, metrics, events, checkpoints, verification, full disks, memory.
//! 10. [`recipes`]: queues, counters, reverts, indexes, expiry, caches, time series, clearing, retries, backup.
//! 11. [`migrating`]: equivalents of RocksDB, sled, redb, Fjall, LMDB and SurrealKV.
//! 12. [`stability`]: of file formats and of the interface; moving data between versions.
//! 13. [`costs_and_questions`]: build time, disk, memory, threads, frequent questions.

/// Declares a chapter. The link definitions stand before the text, so that they take precedence over those of the text,
/// which are for readers of the file in the repository. The lint test compares both.
macro_rules! chapter {
    ($name:ident, $text:expr) => {
        /// [`AssociativeMerge`]: crate::AssociativeMerge
        /// [`Batch`]: crate::Batch
        /// [`Batch::expect`]: crate::Batch::expect
        /// [`Comparator`]: crate::Comparator
        /// [changes]: crate::guide::changes
        /// [`Config`]: crate::Config
        /// [`Config::follow_interval`]: crate::Config::follow_interval
        /// [`Config::open_follower`]: crate::Config::open_follower
        /// [costs and questions]: crate::guide::costs_and_questions
        /// [`Database`]: crate::Database
        /// [`Database::catch_up`]: crate::Database::catch_up
        /// [`Database::transact`]: crate::Database::transact
        /// [`Changes`]: crate::Changes
        /// [`ChangePosition`]: crate::ChangePosition
        /// [`Config::max_retained_wal_size`]: crate::Config::max_retained_wal_size
        /// [`Config::wal_retention`]: crate::Config::wal_retention
        /// [`Database::changes_since`]: crate::Database::changes_since
        /// [`ErrorKind::Stale`]: crate::ErrorKind::Stale
        /// [`Database::transaction`]: crate::Database::transaction
        /// [durability]: crate::guide::durability
        /// [`Error`]: crate::Error
        /// [`Error::conflicting_key`]: crate::Error::conflicting_key
        /// [`Error::kind`]: crate::Error::kind
        /// [followers]: crate::guide::followers
        /// [`GarbageCollection`]: crate::GarbageCollection
        /// [`inspect::verify`]: crate::inspect::verify
        /// [`inspect::verify_follower`]: crate::inspect::verify_follower
        /// [`Isolation::Serializable`]: crate::Isolation::Serializable
        /// [`Isolation::Snapshot`]: crate::Isolation::Snapshot
        /// [`Listener`]: crate::Listener
        /// [`merge_operators`]: crate::merge_operators
        /// [`MergeOperator`]: crate::MergeOperator
        /// [modelling keys]: crate::guide::modelling_keys
        /// [operating]: crate::guide::operating
        /// [`Partition`]: crate::Partition
        /// [`Partition::bulk`]: crate::Partition::bulk
        /// [`Partition::clear`]: crate::Partition::clear
        /// [`Partition::compare_and_swap`]: crate::Partition::compare_and_swap
        /// [`Partition::ingest`]: crate::Partition::ingest
        /// [`Partition::insert_with_ttl`]: crate::Partition::insert_with_ttl
        /// [`Partition::set_options`]: crate::Partition::set_options
        /// [`PartitionComponents`]: crate::PartitionComponents
        /// [`PartitionCreateOptions`]: crate::PartitionCreateOptions
        /// [`PersistMode`]: crate::PersistMode
        /// [`Pmem`]: crate::EngineType::Pmem
        /// [recipes]: crate::guide::recipes
        /// [`Slice`]: crate::Slice
        /// [`Snapshot`]: crate::Snapshot
        /// [`Transaction`]: crate::Transaction
        /// [`Transaction::savepoint`]: crate::Transaction::savepoint
        /// [`Transaction::untracked`]: crate::Transaction::untracked
        /// [transactions]: crate::guide::transactions
        /// [tuning]: crate::guide::tuning
        ///
        #[doc = $text]
        pub mod $name {}
    };
}

chapter!(first_program, include_str!("../docs/guide/first_program.md"));
chapter!(modelling_keys, include_str!("../docs/guide/modelling_keys.md"));
chapter!(batches_and_snapshots, include_str!("../docs/guide/batches_and_snapshots.md"));
chapter!(transactions, include_str!("../docs/guide/transactions.md"));
chapter!(durability, include_str!("../docs/guide/durability.md"));
chapter!(changes, include_str!("../docs/guide/changes.md"));
chapter!(followers, include_str!("../docs/guide/followers.md"));
chapter!(tuning, include_str!("../docs/guide/tuning.md"));
chapter!(operating, include_str!("../docs/guide/operating.md"));
chapter!(recipes, include_str!("../docs/guide/recipes.md"));
chapter!(migrating, include_str!("../docs/guide/migrating.md"));
chapter!(stability, include_str!("../docs/guide/stability.md"));
chapter!(costs_and_questions, include_str!("../docs/guide/costs_and_questions.md"));
