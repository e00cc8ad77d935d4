//! The user guide. Every program in it is compiled and run with the tests.
//!
//! 1. [`first_program`]: open, write, read, close.
//! 2. [`modelling_keys`]: numbers, tuples, prefixes, indexes; partitions or prefixes; comparators.
//! 3. [`batches_and_snapshots`]: changes and views that span partitions.
//! 4. [`transactions`]: decisions that depend on what was read; atomic operations on single keys.
//! 5. [`durability`]: which failures a commit survives.
//! 6. [`tuning`]: options for point reads, scans, ingest, large values and data in memory.
//! 7. [`operating`]: metrics, events, checkpoints, verification, full disks, memory.
//! 8. [`recipes`]: queues, counters, indexes, time series, retries, backup.
//! 9. [`migrating`]: equivalents of RocksDB, sled, redb and Fjall.
//! 10. [`stability`]: of file formats and of the interface.
//! 11. [`costs_and_questions`]: build time, disk, memory, threads, frequent questions.

#[doc = include_str!("first_program.md")]
pub mod first_program {}

#[doc = include_str!("modelling_keys.md")]
pub mod modelling_keys {}

#[doc = include_str!("batches_and_snapshots.md")]
pub mod batches_and_snapshots {}

#[doc = include_str!("transactions.md")]
pub mod transactions {}

#[doc = include_str!("durability.md")]
pub mod durability {}

#[doc = include_str!("tuning.md")]
pub mod tuning {}

#[doc = include_str!("operating.md")]
pub mod operating {}

#[doc = include_str!("recipes.md")]
pub mod recipes {}

#[doc = include_str!("migrating.md")]
pub mod migrating {}

#[doc = include_str!("stability.md")]
pub mod stability {}

#[doc = include_str!("costs_and_questions.md")]
pub mod costs_and_questions {}
