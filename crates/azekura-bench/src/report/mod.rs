//! Presentation of measurements: [`compare`] computes medians and ratios; [`table`] prints them; [`chart`] draws;
//! [`page`] makes the results page of a preset.

pub(crate) mod chart;
pub(crate) mod compare;
pub(crate) mod page;
pub(crate) mod table;
