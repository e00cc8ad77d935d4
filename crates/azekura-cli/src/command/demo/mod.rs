//! `demo`: stores real files, kills the writer process, recovers, and checks the result.
//!
//! `run` executes the steps. `input` lists the files and defines the puts; `writer` has both sides of the writer
//! process, which reports each put through a pipe; `check` compares the database with these acknowledgements.
//!
//! Invariants: the n-th acknowledgement belongs to the n-th put. A put counts as acknowledged once the parent process
//! has received its complete record. The demo keeps in memory the list of files, 16 bytes per put, and the content of
//! one file.

mod check;
mod input;
mod run;
mod writer;

pub(crate) use run::run;
pub(crate) use writer::run_writer;
