//! Nodes on simulated file systems in one thread with virtual time. Each has one to three groups in a database, whose
//! partitions are LSM partitions or pools. Nodes lose power or are killed at any operation of their file system,
//! operations fail, links fail, clocks of nodes run at half or double speed, an operator changes the members of groups
//! and transfers leaderships, and clients append to lists and read them, also from followers. Every acknowledged append
//! must be in the lists, in the order of real time, and every linearizable read a prefix of them.
//!
//! Syncs are those of a `Syncer` without its thread: a task calls its step function at random times.
//!
//! - `AZEKURA_RAFT_SEEDS`: simulations; 12 by default.
//! - `AZEKURA_SEED`: the simulation of this seed only.
//!
//! Modules: `totals` (what happened), `storage` (log and state with planted bugs), `cluster` (nodes and the links
//! between them), `history` (what clients saw, and its check), `run` (clients, operator and failures), `scenarios`
//! (single histories for planted bugs), `syncs` (how many entries one sync makes durable).

mod cluster;
mod history;
mod run;
mod scenarios;
mod storage;
mod syncs;
mod totals;

use run::simulate;
use storage::Bug;
use totals::Totals;

/// What a run with the default seeds must have done.
const COVERED: &[&str] = &[
    "appends",
    "unknown appends",
    "reads",
    "reads of followers",
    "simulations with pools",
    "simulations of several groups",
    "simulations with clocks of different speed",
    "power losses",
    "power losses of all nodes",
    "kills",
    "cuts",
    "I/O errors",
    "shared syncs",
    "leader changes",
    "leaderships transferred",
    "learners added",
    "learners promoted",
    "members removed",
    "membership changes",
    "truncations",
    "purges",
    "frames",
    "transfers continued",
    "snapshots installed",
    "streams of entries",
    "limited reads of entries",
];

fn env_u64(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

#[test]
fn acknowledged_appends_survive_in_order() {
    if std::env::var("AZEKURA_SEED").is_ok() {
        println!("{:#?}", simulate(env_u64("AZEKURA_SEED", 0), Bug::Nothing).unwrap());
        return;
    }
    let mut totals = Totals::default();
    for seed in 1..=env_u64("AZEKURA_RAFT_SEEDS", 12) {
        match simulate(seed, Bug::Nothing) {
            Ok(found) => totals.merge(&found),
            Err(error) => panic!("AZEKURA_SEED={seed}: {error}"),
        }
    }
    println!("{totals:#?}");
    assert_eq!(totals.missing(COVERED), Vec::<&str>::new(), "{totals:#?}");
}

/// The first simulation that finds the planted bug finds it by one of the expected errors.
fn finds(bug: Bug, expected: &[&str]) {
    let found = (1..=200).find_map(|seed| simulate(seed, bug).err().map(|error| (seed, error)));
    let (seed, error) = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
    println!("{bug:?}: seed {seed}: {error}");
    assert!(expected.iter().any(|expected| error.contains(expected)), "{bug:?} was found by another error: {error}");
}

/// The scenario succeeds without the planted bug, and with it fails by the expected error.
fn fails(scenario: fn(Bug) -> Result<(), String>, bug: Bug, expected: &str) {
    scenario(Bug::Nothing).unwrap();
    let error = scenario(bug).unwrap_err();
    println!("{bug:?}: {error}");
    assert!(error.contains(expected), "{bug:?} was found by another error: {error}");
}

#[test]
fn callback_before_the_sync_is_found() {
    finds(Bug::EarlyCallback, &["is lost"]);
}

#[test]
fn unsynced_vote_is_found() {
    fails(scenarios::vote_twice, Bug::UnsyncedVote, "acknowledged 2 is not on all nodes");
}

#[test]
fn stale_read_of_a_follower_is_found() {
    finds(Bug::StaleRead, &["does not see"]);
}

/// openraft's default: a restarted leader answered a read without an acknowledged append.
#[test]
fn restored_leader_is_found() {
    finds(Bug::RestoredLeader, &["does not see"]);
}

#[test]
fn snapshot_without_position_is_found() {
    fails(scenarios::installed_and_killed, Bug::UnplacedSnapshot, "node 3 applies nothing after its snapshot");
}

/// openraft refuses such a log when the node starts.
#[test]
fn truncation_lost_beside_a_vote_is_found() {
    fails(scenarios::longer_log, Bug::LostTruncation, "inverted log order");
}

/// Nodes ask before an election whether they would win it (`enable_pre_vote`), as those of azekura-node do.
#[test]
fn term_raised_by_a_cut_off_node_is_found() {
    fails(scenarios::cut_off_and_back, Bug::NoPreVote, "came back and raised term");
}

#[test]
fn simulation_is_repeatable() {
    for seed in 3..6 {
        assert_eq!(simulate(seed, Bug::Nothing), simulate(seed, Bug::Nothing));
    }
}
