//! Charts as inline SVG.
//!
//! Invariants: every drawing is well-formed XML whatever it is given; a number that is none is drawn nowhere; colours
//! are classes, so that the style sheet of the page decides; colour alone never tells one engine from another.
//!
//! Rooms: [`svg`] the writer; [`scale`] axes with round ticks; [`chart`] lines, dots and bars; [`cases`] which charts a
//! workload gets.

pub(crate) mod cases;
pub(crate) mod chart;
pub(crate) mod scale;
pub(crate) mod svg;
