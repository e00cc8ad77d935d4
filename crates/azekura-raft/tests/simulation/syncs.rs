//! How many entries one sync makes durable, if syncs take 3 ms.

use crate::cluster::{Options, leader_of, new_cluster, sleep, start_all};
use crate::storage::{Bug, append};
use azekura::testing::SeededRng;
use openraft::AsyncRuntime;
use openraft::async_runtime::WatchReceiver;
use openraft_rt_sim::SimRuntime;
use std::time::Duration;

/// Entries per sync of the leader, and entries per second, with clients each of which sends its next append up to
/// 200 us after the last one was acknowledged.
fn measure(nodes: u64, clients: u64) -> (f64, f64) {
    // Of 64 clients, 400 ms would take half a minute.
    let (begin_ms, measured_ms) = if clients > 16 { (60, 100) } else { (100, 300) };
    SimRuntime::with_seed(1).block_on(async move {
        let mut options = Options::small(Bug::Nothing, nodes);
        (options.message_us, options.sync_us) = (50, Some(3_000));
        let cluster = new_cluster(1, options);
        start_all(&cluster, nodes).await.unwrap();
        sleep(2_000).await;
        let (_, leader) = leader_of(&cluster, 0).unwrap();
        for client in 0..clients {
            let raft = leader.group(0).raft.clone();
            SimRuntime::spawn(async move {
                let mut rng = SeededRng::with_stream(1, client);
                for number in 0.. {
                    SimRuntime::sleep(Duration::from_micros(rng.below(200))).await;
                    if raft.client_write(append((client % 100) as u8, number)).await.is_err() {
                        return;
                    }
                }
            });
        }
        let counts = || {
            let applied = leader.group(0).raft.data_metrics().borrow_watched().last_applied;
            (applied.map_or(0, |applied| applied.index), leader.database.metrics().wal_syncs)
        };
        sleep(begin_ms).await;
        let before = counts();
        sleep(measured_ms).await;
        let after = counts();
        let entries = (after.0 - before.0) as f64;
        (entries / (after.1 - before.1) as f64, entries * 1000.0 / measured_ms as f64)
    })
}

/// Bars of entries per sync and client, near the measured numbers, because runs are repeatable. Clients of three
/// nodes wait for the syncs of two of them, so that some come back to the leader too late for its next sync.
#[test]
fn entries_share_slow_syncs() {
    for (nodes, bars) in [(1, [0.99, 0.99, 0.97, 0.98]), (3, [0.99, 0.77, 0.78, 0.77])] {
        for (clients, bar) in [1, 4, 16, 64].into_iter().zip(bars) {
            let (per_sync, per_s) = measure(nodes, clients);
            println!("{nodes} nodes, {clients} clients: {per_sync:.1} entries per sync, {per_s:.0} entries/s");
            assert!(per_sync >= bar * clients as f64, "{nodes} nodes, {clients} clients: {per_sync:.2}");
        }
    }
}
