//! Layer 2: a log of checksummed records with a rule for torn tails, for the WAL and the manifest.
//!
//! A record is an opaque payload with a first sequence number and a count. It is written as one frame, or as several
//! if it is larger than a frame may be, and exists once its last frame verifies.
//!
//! Invariants:
//! - Every byte of a frame is under a checksum that is bound to the random id of the file, the offset of the frame and
//!   its epoch.
//! - Every record states how far the log was known to be durable when it was written, so that a reader can distinguish
//!   a torn tail from damage.
//! - A reader allocates no more than a bound given by the file's length.
//!
//! Modules, in reading order: [`frame`] (the bytes of a frame), [`writer`] (also the state after a failed sync),
//! [`reader`] (records in order, and the search for valid frames after damage).

pub(crate) mod frame;
pub(crate) mod reader;
pub(crate) mod writer;
