//! Experiments with trees in persistent memory.
//!
//! Invariants: what is compared in time stands on the same kind of memory, and makes its stores persistent by the same
//! instructions; what is counted was counted where it is done, and what was written is read back.
//!
//! Rooms: [`records`] what is put, in which order; [`subject`] into what; [`split`] the experiment `zero-copy-split`,
//! [`split_answer`] what its rounds say; [`speed`] the experiment
//! `memory-speed`, [`speed_answer`] what its rounds say.

pub(crate) mod records;
pub(crate) mod speed;
pub(crate) mod speed_answer;
pub(crate) mod split;
pub(crate) mod split_answer;
pub(crate) mod subject;
