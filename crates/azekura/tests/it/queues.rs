//! Partitions as queues: what a round costs does not grow with the number of entries that were removed before.

use std::sync::Arc;

use azekura::testing::MemFs;
use azekura::{Config, PartitionCreateOptions};

use crate::pools::pool_options;
use crate::testkit::ordered_partitions::open_counting;

/// Rounds of which the comparisons are counted together.
const ROUNDS: u64 = 500;

/// Each round puts an entry at the tail, scans for the first one, and removes it. Returns the comparisons of each
/// [`ROUNDS`] rounds. With `backward`, the tail is at the low keys. With `flushes`, flushes and compacts after them.
fn run_queue(name: &str, options: PartitionCreateOptions, backward: bool, flushes: bool) -> Vec<u64> {
    let config = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(16 << 20);
    let db = config.open().unwrap();
    let (p, counting) = open_counting(&db, name, options);
    let key = |n: u64| if backward { u64::MAX - n } else { n }.to_be_bytes();
    (0..10).for_each(|n| p.insert(key(n), "job").unwrap());
    let mut compared = Vec::new();
    for slice in 0..6 {
        let before = counting.comparisons();
        for n in slice * ROUNDS..(slice + 1) * ROUNDS {
            p.insert(key(n + 10), "job").unwrap();
            let first = match (n % 2 == 0, backward) {
                (true, false) => p.first_key_value().unwrap(),
                (true, true) => p.last_key_value().unwrap(),
                (false, false) => p.iter().next().transpose().unwrap(),
                (false, true) => p.iter().next_back().transpose().unwrap(),
            };
            let (first, _) = first.unwrap();
            assert_eq!(first, key(n), "{name}, round {n}");
            p.remove(first).unwrap();
        }
        compared.push(counting.comparisons() - before);
        if flushes {
            p.flush().unwrap();
            while db.step().unwrap() {}
        }
    }
    assert_eq!(p.len().unwrap(), 10);
    compared
}

#[test]
fn a_plain_queue_stays_flat() {
    for (name, options) in
        [("lsm", PartitionCreateOptions::default().block_size(256)), ("pool", pool_options(32 << 20))]
    {
        for (backward, flushes) in [(false, false), (true, false), (false, true), (true, true)] {
            let compared = run_queue(name, options.clone(), backward, flushes);
            let what = format!("{name}, backward: {backward}, flushes: {flushes}");
            assert!(compared[5] < 2 * compared[0], "{what}: comparisons of {ROUNDS} rounds each: {compared:?}");
        }
    }
}
