//! The n-th call of each kind to the file system fails, once or permanently, in every phase of a run: no panic, no
//! endless wait, no acknowledged write is lost. Then two calls of one run fail.
//!
//! - `AZEKURA_FAULT_STRIDE`: tests only every n-th call; 19 by default.
//! - `AZEKURA_FAULT_PAIRS`: number of random pairs of faults, 100 by default; `AZEKURA_SEED` runs one of them.
//!
//! Modules, in reading order: `run` (the phases, and the checks at their end), `sweep` (every call), `pairs` (a
//! second fault after the first), `error_handling` (a failed sync poisons the database, a full disk does not),
//! `full_disk` (workloads on small disks), `backoff` (work that always fails does not block other work).

mod backoff;
mod error_handling;
mod full_disk;
mod pairs;
mod run;
mod sweep;
