//! Parent and child processes: each measurement runs in a process of its own.
//!
//! A child that hangs is killed and becomes a row with an error; the run goes on. Figures of a child are not affected
//! by earlier measurements.
//!
//! [`child`] starts and kills processes and has their tasks; [`measure`] carries out the tasks; [`comparison`] is the
//! parent's schedule of engines and rounds.

pub(crate) mod child;
pub(crate) mod comparison;
pub(crate) mod measure;
