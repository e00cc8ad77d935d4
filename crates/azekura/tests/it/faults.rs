//! The n-th call of each kind to the file system fails, once or for ever, in every phase of a database's life: no
//! panic, no wait without an end, nothing acknowledged is lost. Then two calls of one life fail.
//!
//! - `AZEKURA_FAULT_STRIDE`: try every so many calls only.
//! - `AZEKURA_FAULT_PAIRS`: how many random pairs of faults to try; `AZEKURA_SEED` tries one of them.
//!
//! Modules in reading order: `life` (the phases, and what must hold at their end), `sweep` (every call), `pairs` (a
//! second fault after the first), `rules` (failed syncs poison, a full disk does not), `full` (workloads on small
//! disks), `setbacks` (work that always fails does not stop other work).

mod backoff;
mod error_handling;
mod full_disk;
mod pairs;
mod run;
mod sweep;
