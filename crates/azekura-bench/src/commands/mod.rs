//! The commands: each takes its part of the command line, runs, and prints.
//!
//! [`run`] compares engines; [`openings`] holds `open`, `partitions` and `device`; [`report`] runs presets and writes
//! pages; [`experiment`] answers one question.

pub(crate) mod experiment;
pub(crate) mod openings;
pub(crate) mod report;
pub(crate) mod run;
