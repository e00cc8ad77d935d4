//! Results: medians and ratios of measurements, and how they are shown.
//!
//! A page is made from a [`document`] alone, which is a file, so it can be made again without running. A missing figure
//! is shown as missing; wins and losses are shown alike.
//!
//! [`compare`] medians, ratios and ranges; [`table`] text tables; [`chart`] SVG drawings; [`preset`] reads
//! `presets.json`, what `report quick` and `report full` run; [`document`] the result of a preset; [`render`] fills the
//! templates `report.html` and `report.md`.

pub(crate) mod chart;
pub(crate) mod compare;
pub(crate) mod document;
pub(crate) mod preset;
pub(crate) mod render;
pub(crate) mod table;
