//! Parent and child processes: each measurement runs in a process of its own.
//!
//! A child that hangs is killed and becomes a row with an error; the run goes on. Figures of a child are not affected
//! by earlier measurements.
//!
//! [`plan`] the tasks of child processes; [`child`] starts and kills processes; [`threads`] runs and samples the
//! threads of a measurement; [`measure`] loads and measures; [`openings`] opens databases after a clean close or a
//! kill; [`comparison`] is the parent's schedule of engines and rounds.

pub(crate) mod child;
pub(crate) mod comparison;
pub(crate) mod measure;
pub(crate) mod openings;
pub(crate) mod plan;
pub(crate) mod threads;
