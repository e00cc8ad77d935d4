//! Durable storage of a Raft node for [openraft](https://docs.rs/openraft): the log, the vote, the state machine and
//! its snapshots, in one azekura database.
//!
//! - [`LogStore`] is openraft's log storage and [`StateMachine`] its state machine. All other files except the decoders
//!   for fuzzing are free of types of openraft: [`RaftLog`] stores entries as bytes, [`Syncer`] shares syncs among
//!   groups, [`snapshot`] streams a state.
//! - **One database for log and state.** Its write-ahead log keeps a prefix of whole commits over all partitions. An
//!   entry that was purged is therefore never missing in the state that made it superfluous, and truncations, purges
//!   and applied entries need no sync of their own: the next sync of an appended entry or a vote covers them.
//! - **[`required_config`]** sets what the store requires of openraft.
//! - **Many groups** may share one database and one [`Syncer`]: one sync completes the appends of all of them.
//!
//! Raft's own rules (terms, elections, membership) are openraft's.

mod codec;
mod log;
mod openraft_impl;
pub mod snapshot;
mod state;
mod syncer;
#[cfg(feature = "testing")]
pub mod testing;

pub use log::RaftLog;
pub use openraft_impl::{LogStore, SnapshotBuilder, SnapshotReceivers, StateMachine, required_config};
pub use snapshot::SnapshotData;
pub use state::{Application, State, StateReader};
pub use syncer::{SyncGroup, Syncer};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
