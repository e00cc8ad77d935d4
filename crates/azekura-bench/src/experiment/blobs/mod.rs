//! Experiments with large values: HTML pages, kept apart from the tree or not.
//!
//! Invariants: every page that is read is compared to the last byte; what is said to be written was counted where files
//! are written.
//!
//! Rooms: [`pages`] what is stored; [`generate`] pages where there are none; [`load`] the experiment `blob-load`,
//! [`load_answer`] what its rounds say; [`history`] versions that come and go; [`gc`] the experiment `blob-gc`,
//! [`gc_run`] one of its ways to collect, [`series`] what that shows over time.

pub(crate) mod gc;
pub(crate) mod gc_run;
pub(crate) mod generate;
pub(crate) mod history;
pub(crate) mod load;
pub(crate) mod load_answer;
pub(crate) mod pages;
pub(crate) mod series;
