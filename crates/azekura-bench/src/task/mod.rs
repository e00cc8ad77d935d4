//! What the binary does: the parent plans rounds and starts one child process per measurement; a child does one task.
//!
//! Invariants: a child opens one database of one engine, does one thing, prints one line of JSON and ends, so its CPU
//! time, its bytes and its peak memory are those of that one thing. The parent opens no database.
//!
//! Rooms: [`child`] starts a process and ends it in time; [`task`] what a child can be asked; [`measure`] runs a
//! workload in a child, [`crew`] its threads, while [`watch`] looks on; [`recovery`] opens after a kill or a clean end;
//! [`opening`] opens many tables or partitions in a child; [`rounds`] the parent's plan: engines interleaved, A B A B.

pub(crate) mod child;
pub(crate) mod crew;
pub(crate) mod measure;
pub(crate) mod opening;
pub(crate) mod recovery;
pub(crate) mod rounds;
#[allow(clippy::module_inception)]
pub(crate) mod task;
pub(crate) mod watch;
