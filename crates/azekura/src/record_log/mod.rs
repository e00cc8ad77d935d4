//! Floor 2: a log of checksummed records with a torn-tail rule; serves the write-ahead log and the manifest.
//!
//! A record is an opaque payload with a first sequence number and a count. It is written as one frame, or as several
//! when it is larger than a frame may be, and exists once its last frame verifies.
//!
//! Invariants:
//! - every byte of a frame is under a checksum that is bound to the file's random id, the frame's offset and its epoch;
//! - every record says up to where the log was known to be durable when it was written, so that a reader can tell a
//!   torn tail from damage;
//! - a reader allocates nothing that the file's length does not bear out.
//!
//! Rooms in reading order: [`frame`] (the bytes of one), [`writer`], [`read_window`] (bounded reads), [`reader`]
//! (records in order, and the search behind damage), [`poison`] (what a failed sync leaves).

pub(crate) mod frame;
pub(crate) mod poison;
pub(crate) mod read_window;
pub(crate) mod reader;
pub(crate) mod writer;
