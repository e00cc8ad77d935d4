//! Results: one measurement, what several of them say together, and how that is shown.
//!
//! Rooms: [`measurement`] one run's figures; [`summary`] medians and ratios over rounds; [`table`] text for people.

pub(crate) mod measurement;
pub(crate) mod summary;
pub(crate) mod table;
