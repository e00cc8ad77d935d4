//! Reads the files of a database without opening it, into plain reports.
//!
//! For tools and tests: nothing is written, no lock is taken, and damage is a report and not a failure.
//!
//! Rooms in reading order: `report`, `decode` (for fuzzing), `blocks` (for measuring).

pub(crate) mod blocks;
pub(crate) mod decode;
pub(crate) mod report;

#[doc(hidden)]
pub use blocks::{DataBlocks, Place};
#[doc(hidden)]
pub use decode::{Decoder, decode};
pub use report::{BlobReport, FileReport, TableReport, VerifyReport, blobs, file, tables, verify};
