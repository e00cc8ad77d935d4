//! `demo`: the main job on real files, with a crash in the middle.
//!
//! The parent lists the files (`plan`) and starts a writer process (`session`, `writer`), which stores one file after
//! the other and tells of each through a pipe (`message`); what it told is acknowledged and goes into the `ledger`. The
//! writer is killed half-way; the parent opens the database and compares it with the ledger (`check`); a second writer
//! goes on. Then everything is read back, scanned, and looked at through a snapshot (`snapshot_check`).
//!
//! Invariants: the n-th line of the ledger is about the n-th job of the plan; a job counts as acknowledged only once
//! its message has reached the parent whole. Memory does not grow with the number or the size of the files: plan and
//! ledger are files, and one file's content is held at a time. What the demo creates stands in `scratch`, which removes
//! itself.
//!
//! Rooms in reading order: `options`, `story`, `plan`, `version`, `message`, `writer`, `session`, `ledger`, `check`,
//! `snapshot_check`, `summary`, `scratch`.

mod check;
mod ledger;
mod message;
mod options;
mod plan;
mod scratch;
mod session;
mod snapshot_check;
mod story;
mod summary;
mod version;
mod writer;

pub(crate) use options::{DemoArgs, WriterArgs};
pub(crate) use story::run;
pub(crate) use writer::run_writer;
