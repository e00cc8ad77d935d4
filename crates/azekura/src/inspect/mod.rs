//! Reads the files of a database, most of the time without opening it, and returns plain reports.
//!
//! For tools and tests: nothing is written, no lock is taken, and damage is reported instead of returned as an error.
//!
//! Modules, in reading order: `report`, `partial_manifest` (for repair and copies), `found_tables` and
//! `rebuilt_manifest` (for repair), `data_blocks` (for benchmarks).

pub(crate) mod data_blocks;
mod found_tables;
pub(crate) mod partial_manifest;
pub(crate) mod rebuilt_manifest;
pub(crate) mod report;

#[doc(hidden)]
pub use data_blocks::{DataBlockPosition, DataBlocks};
pub use partial_manifest::{DamagedPool, PartialManifest, manifest_of_copy, partial_manifest};
pub use rebuilt_manifest::{RebuiltManifest, rebuilt_manifest};
pub use report::{
    BlobReport, FileReport, TableReport, VerifyReport, WalEnds, blobs, immutable_file_id, last_key_of_block,
    partition_ids, tables, verify, verify_file, verify_follower, wal_end, wal_ends,
};
