//! `repair`: copies what is intact of a damaged database to a new one, and reports the rest.
//!
//! Reading order: `run` (the command and its report), `damaged_database` (opens it), `salvage` (reads a partition
//! around its damage), `padded_fs` (shows files of the length that the manifest states).

mod damaged_database;
mod padded_fs;
mod run;
mod salvage;

pub(crate) use run::repair;
