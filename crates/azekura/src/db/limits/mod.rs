//! The limits of a database: memory of memtables, disk space, and the size of the WAL.
//!
//! Modules, in reading order: [`write_controller`] (write stalls), [`write_buffer_manager`] (memory of memtables),
//! [`space_manager`] (disk space), [`wal_maintenance`] (the WAL's size, and when its segments are retired).

pub(crate) mod space_manager;
pub(crate) mod wal_maintenance;
pub(crate) mod write_buffer_manager;
pub(crate) mod write_controller;
