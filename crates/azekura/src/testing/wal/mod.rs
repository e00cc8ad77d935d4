//! A database that consists of a write-ahead log (WAL) and a small manifest, for the tests of the WAL.
//!
//! Modules, in reading order: [`test_manifest`] (records the callbacks of the WAL), [`wal_fixture`] (the database),
//! [`reader_script`] (the script of the WAL reader).

mod reader_script;
mod test_manifest;
pub(crate) mod wal_fixture;
