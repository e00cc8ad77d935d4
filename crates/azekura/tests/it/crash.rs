//! The power fails after every operation of the file system, and what is left of unsynced data is chosen in every way:
//! the database opens, shows a whole-commit prefix of its history at or after the last sync, over all partitions, and
//! goes on working.
//!
//! - `AZEKURA_CRASH_POINTS`: crash points to explore.
//! - `AZEKURA_SEED`: explore the script of this seed only.
//! - `AZEKURA_CRASH_AT`: beside it, this crash point only, with its story.
//!
//! Rooms in reading order: `script` (a workload and its player), `search` (crash, open, judge), `gates` (bugs that must
//! turn the search red).

mod gates;
mod script;
mod search;

use crate::world::dice::seeds;
use crate::world::number;
use script::Script;
use search::{Planted, Search};

/// Steps of a script; about ten times as many operations of the file system.
const STEPS: usize = 45;

#[test]
fn every_crash_leaves_a_whole_commit_prefix() {
    let points = number("AZEKURA_CRASH_POINTS", 800);
    let mut search = Search::default();
    let mut left = points;
    for seed in seeds(points) {
        if std::env::var("AZEKURA_CRASH_AT").is_ok() {
            search.retell(&Script::new(seed, STEPS), number("AZEKURA_CRASH_AT", 0));
            break;
        }
        left -= search.explore(&Script::new(seed, STEPS), &Planted::Nothing, left, 10).min(left);
        if left == 0 || search.findings.len() >= 10 {
            break;
        }
    }
    println!("{search}");
    let list: Vec<String> = search.findings.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{search}:\n{}\nagain: AZEKURA_SEED=<seed>", list.join("\n"));
}

#[test]
fn a_manifest_that_is_written_anew_is_never_missing() {
    let mut search = Search::default();
    let points = (number("AZEKURA_CRASH_POINTS", 400) / 8).min(300);
    search.explore(&Script::with_a_fat_manifest(3), &Planted::Nothing, points, 10);
    println!("{search}");
    let list: Vec<String> = search.findings.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{search}:\n{}", list.join("\n"));
}
