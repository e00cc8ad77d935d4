//! Reads the files of a database without opening it, and returns plain reports.
//!
//! For tools and tests: nothing is written, no lock is taken, and damage is reported instead of returned as an error.
//!
//! Modules, in reading order: `report`, `fuzz_decoders`, `data_blocks` (for benchmarks).

pub(crate) mod data_blocks;
pub(crate) mod fuzz_decoders;
pub(crate) mod report;

#[doc(hidden)]
pub use data_blocks::{DataBlockPosition, DataBlocks};
#[doc(hidden)]
pub use fuzz_decoders::{FuzzDecoder, decode};
pub use report::{BlobReport, FileReport, TableReport, VerifyReport, blobs, tables, verify, verify_file};
