//! The integration tests of azekura, in one binary.
//!
//! Tests may use files, clocks and the environment directly.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the bans of clippy.toml are for the engine; a test that judges it stands outside of it"
)]

mod bad_input;
mod changes;
mod compaction_filter;
mod crash;
mod damage;
mod data_blocks;
mod faults;
mod follower;
mod fs_contract;
mod fuzz_replay;
mod ingest;
mod kill;
mod limits;
mod mapped_reads;
mod merge;
mod model;
mod multi_get;
mod options;
mod pools;
mod prefix_filters;
mod queues;
mod range_deletes;
mod regressions;
mod scripts;
mod separation;
mod spill;
mod testkit;
mod transactions;
