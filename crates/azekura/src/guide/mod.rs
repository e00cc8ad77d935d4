//! The user guide. Every program in it is compiled and run with the tests.
//!
//! 1. [`first_program`]: open, write, read, close.
//! 2. [`modelling_keys`]: numbers, tuples, prefixes, indexes; partitions or prefixes; comparators.
//! 3. [`batches_and_snapshots`]: changes and views that span partitions.
//! 4. [`durability`]: which failures a commit survives.
//! 5. [`tuning`]: options for point reads, scans, ingest, large values and data in memory.
//! 6. [`operating`]: metrics, events, checkpoints, verification, full disks, memory.
//! 7. [`recipes`]: queues, counters, indexes, time series, retries, backup.
//! 8. [`migrating`]: equivalents of RocksDB, sled, redb and Fjall.
//! 9. [`stability`]: of file formats and of the interface.
//! 10. [`costs_and_questions`]: build time, disk, memory, threads, frequent questions.

#[doc = include_str!("first_program.md")]
pub mod first_program {}

#[doc = include_str!("modelling_keys.md")]
pub mod modelling_keys {}

#[doc = include_str!("batches_and_snapshots.md")]
pub mod batches_and_snapshots {}

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
