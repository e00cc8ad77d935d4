//! The built program, run in temporary directories as a user would.

mod collection;
mod demo;
mod entries;
mod failures;
mod program;
mod transfer;
mod whole_database;
