//! Cuts power after every file system operation, with different choices of the unsynced data that survives. The
//! database must open, contain a prefix of whole commits at or after the last sync over all partitions, and accept
//! writes.
//!
//! - `AZEKURA_CRASH_POINTS`: crash points to explore; 240 by default.
//! - `AZEKURA_SEED`: explore the script of this seed only.
//! - `AZEKURA_CRASH_AT`: with `AZEKURA_SEED`, explore this crash point only and print its steps.
//!
//! Half of the partitions have a comparator, most of which panic on a key that was not inserted.
//!
//! A reader of changes keeps its position across the crashes: it finds the same whole commits, each once, or is told
//! that the next one is gone.
//!
//! A follower, which is another process of the machine, shows whole commits beside the writer. It goes on after a kill
//! of the writer, at any operation; after power loss, one that is opened shows what the writer finds.
//!
//! Modules in reading order: `script` (a workload and its player), `feed` (a reader of changes), `beside` (a follower),
//! `search` (crash, open, check), `planted_bugs` (bugs that must turn the search red).

mod beside;
mod feed;
mod planted_bugs;
mod script;
mod search;

use crate::testkit::env_u64;
use crate::testkit::seeds::test_seeds;
use script::CrashScript;
use search::{CrashSearch, InjectedBug};

/// Steps of a script; about ten times as many operations of the file system.
const SCRIPT_STEPS: usize = 45;

#[test]
fn every_crash_leaves_a_whole_commit_prefix() {
    let points = env_u64("AZEKURA_CRASH_POINTS", 240);
    let mut search = CrashSearch::default();
    let (mut remaining_points, seeds) = (points, test_seeds(points));
    let is_whole = seeds.len() >= 800;
    for seed in seeds {
        if std::env::var("AZEKURA_CRASH_AT").is_ok() {
            search.reproduce(&CrashScript::new(seed, SCRIPT_STEPS), env_u64("AZEKURA_CRASH_AT", 0));
            break;
        }
        // A short search explores a part of the crash points of several scripts.
        let share = remaining_points.min((points / 8).max(100));
        remaining_points -= search
            .explore(&CrashScript::new(seed, SCRIPT_STEPS), &InjectedBug::Nothing, share, 10)
            .min(remaining_points);
        if remaining_points == 0 || search.findings.len() >= 10 {
            break;
        }
    }
    println!("{search}");
    assert!(!is_whole || search.strict.iter().all(|met| *met > 0), "{search}");
    assert!(!is_whole || (search.changes_read > 0 && search.stale_readers > 0), "{search}");
    assert!(!is_whole || search.followers.iter().all(|met| *met > 0), "{search}");
    let list: Vec<String> = search.findings.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{search}:\n{}\nagain: AZEKURA_SEED=<seed>", list.join("\n"));
}

#[test]
fn rewritten_manifest_is_never_missing() {
    let mut search = CrashSearch::default();
    let points = (env_u64("AZEKURA_CRASH_POINTS", 160) / 16).min(300);
    let mut script = CrashScript::with_large_manifest(7);
    search.explore_manifest_rewrite(&mut script);
    search.explore(&script, &InjectedBug::Nothing, points, 10);
    println!("{search}");
    let list: Vec<String> = search.findings.iter().map(ToString::to_string).collect();
    assert!(list.is_empty(), "{search}:\n{}", list.join("\n"));
}
