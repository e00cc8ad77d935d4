//! File systems that pass everything on and watch what goes by.
//!
//! Rooms: [`through`] the passing on; [`persistent`] memory taken for persistent; [`spindle`] a disk with a head,
//! simulated; [`tally`] what is written, by kind of file.

pub(crate) mod persistent;
pub(crate) mod spindle;
pub(crate) mod tally;
pub(crate) mod through;
