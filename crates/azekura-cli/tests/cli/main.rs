//! The built program, run in temporary directories as a user would.

#[cfg(feature = "backup")]
mod backup;
mod blob_gc;
mod demo;
mod entries;
mod errors;
mod fixture;
mod followers;
mod formats;
mod generate;
mod partitions;
mod peers;
mod rebuilt_manifest;
mod repair;
mod shell;
mod terminal;
mod transfer;
mod whole_database;
