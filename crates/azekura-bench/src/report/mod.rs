//! Results: one measurement, what several of them say together, and how that is shown.
//!
//! Invariants: pages and Markdown are made from a [`document`] alone, which is a file, so they can be made again
//! without running; a figure that is missing is shown as missing; a loss looks as a win does.
//!
//! Rooms: [`measurement`] one run's figures; [`summary`] medians and ratios over rounds; [`table`] text for people.
//! Reports: [`preset`] what is run; [`produce`] runs it; [`document`] what came out; [`figures`] cases, standings and
//! verdicts; [`columns`], [`facts`] and [`versions`] what stands in tables; [`page`] and [`markdown`] the two outputs.
//! [`draw`] makes the charts; [`quantity`] puts numbers, and [`clock`] the date, in words.

pub(crate) mod clock;
pub(crate) mod columns;
pub(crate) mod document;
pub(crate) mod draw;
pub(crate) mod facts;
pub(crate) mod figures;
pub(crate) mod markdown;
pub(crate) mod measurement;
pub(crate) mod page;
pub(crate) mod preset;
pub(crate) mod produce;
pub(crate) mod quantity;
pub(crate) mod summary;
pub(crate) mod table;
pub(crate) mod versions;
