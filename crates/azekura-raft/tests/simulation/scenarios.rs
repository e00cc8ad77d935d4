//! Planted bugs that random failures seldom show: one history each, in which the bug has an effect.

use crate::cluster::{
    Member, Options, Running, SharedCluster, isolate, kill, leader_of, new_cluster, sleep, start, start_all,
};
use crate::storage::{Bug, append};
use azekura::testing::Survival;
use openraft::AsyncRuntime;
use openraft::async_runtime::WatchReceiver;
use openraft_rt_sim::SimRuntime;
use std::time::Duration;

/// Node 2 votes for node 3, loses power at once, and is asked for its vote by node 1 in the same term. Node 1 then
/// commits an append with node 2, which node 3, the older candidate with the higher number, must not replace.
pub(crate) fn vote_twice(bug: Bug) -> Result<(), String> {
    SimRuntime::with_seed(1).block_on(async move {
        let cluster = new_cluster(1, Options::small(bug, 3));
        start_all(&cluster, 3).await?;
        write_again(&cluster, 1, 1).await?;
        sleep(500).await;
        elect_by_hand(&cluster).await;
        cluster.lock().unwrap().cut = vec![(1, 2), (1, 3)];
        cluster.lock().unwrap().loses_appends = true;
        member(&cluster, 3).raft.trigger().elect(false).await.map_err(|error| error.to_string())?;
        for _ in 0..1_000 {
            sleep(1).await;
            if member(&cluster, 3).is_leader() {
                break;
            }
        }
        isolate(&cluster, 3);
        cluster.lock().unwrap().loses_appends = false;
        // Node 1 would otherwise lead on in the first term.
        kill(&cluster, 1, Survival::Everything).await;
        start(&cluster, 1).await?;
        kill(&cluster, 2, Survival::Nothing).await;
        start(&cluster, 2).await?;
        elect(&cluster, 1, 20).await?;
        write(&member(&cluster, 1), 2).await.ok_or("the second append failed")?;
        cluster.lock().unwrap().cut.clear();
        member(&cluster, 3).raft.runtime_config().heartbeat(true);
        sleep(3_000).await;
        let stored = lists(&cluster);
        if stored.iter().all(|list| *list == [1, 2]) {
            Ok(())
        } else {
            Err(format!("acknowledged 2 is not on all nodes: {stored:?}"))
        }
    })
}

/// Node 1 and node 4 have entries that are not committed. Node 1 replaces the first of them by a committed one of
/// leader 2, and loses power. Node 4 with its longer log must not get the vote of node 1: with it and node 5, which
/// misses the committed entry, it would replace that. When the truncation was lost, openraft refuses to start node 1.
pub(crate) fn longer_log(bug: Bug) -> Result<(), String> {
    SimRuntime::with_seed(1).block_on(async move {
        let cluster = new_cluster(1, Options::small(bug, 5));
        start_all(&cluster, 5).await?;
        // Node 1 made the first members known, but another may lead.
        for _ in 0..100 {
            if leader_of(&cluster, 0).is_some_and(|(id, _)| id == 1) {
                break;
            }
            if let Some((_, leader)) = leader_of(&cluster, 0) {
                let _ = leader.group(0).raft.trigger().transfer_leader(1).await;
            }
            sleep(500).await;
        }
        write_again(&cluster, 1, 1).await?;
        sleep(500).await;
        elect_by_hand(&cluster).await;
        // Four entries that only nodes 1 and 4 get, written while node 1 has the lease of a leader.
        member(&cluster, 1).raft.runtime_config().heartbeat(true);
        sleep(500).await;
        cluster.lock().unwrap().cut = vec![(1, 2), (1, 3), (1, 5)];
        let writes = (10..14).map(|number| {
            let leader = member(&cluster, 1);
            SimRuntime::spawn(async move { write(&leader, number).await })
        });
        let writes: Vec<_> = writes.collect();
        for write in writes {
            if write.await.map_err(|error| format!("{error:?}"))?.is_some() {
                return Err("two of five nodes have committed an entry".into());
            }
        }
        member(&cluster, 1).raft.runtime_config().heartbeat(false);
        sleep(1_000).await;
        let last = |id: u64| member(&cluster, id).raft.metrics().borrow_watched().last_log_index;
        if last(4) != last(1) || last(4) < last(5).map(|last| last + 4) {
            return Err(format!("node 4 has not got the entries: {:?}, {:?}, {:?}", last(1), last(4), last(5)));
        }
        // Leader 2 commits its entries with nodes 3 and 1.
        cluster.lock().unwrap().cut = vec![(1, 4), (1, 5), (2, 4), (3, 4), (5, 4), (1, 2), (1, 3)];
        cluster.lock().unwrap().loses_appends = true;
        elect(&cluster, 2, 20).await?;
        cluster.lock().unwrap().cut = vec![(1, 4), (1, 5), (2, 4), (2, 5), (3, 4), (5, 4)];
        cluster.lock().unwrap().loses_appends = false;
        member(&cluster, 2).raft.runtime_config().heartbeat(true);
        write_again(&cluster, 2, 2).await?;
        for _ in 0..100 {
            if last(1) == last(2) {
                break;
            }
            sleep(50).await;
        }
        member(&cluster, 2).raft.runtime_config().heartbeat(false);
        kill(&cluster, 1, Survival::Nothing).await;
        start(&cluster, 1).await?;
        cluster.lock().unwrap().cut = [1, 4, 5].into_iter().flat_map(|id| [(2, id), (3, id)]).collect();
        sleep(1_000).await;
        if elect(&cluster, 4, 5).await.is_err() {
            return Ok(());
        }
        member(&cluster, 4).raft.runtime_config().heartbeat(true);
        write_again(&cluster, 4, 3).await?;
        let list = member(&cluster, 4).list(0).map_err(|error| error.to_string())?;
        if list.contains(&2) { Ok(()) } else { Err(format!("acknowledged 2 is lost: {list:?}")) }
    })
}

/// Node 3 gets a snapshot of everything, because the others have purged their logs, and is killed when it is installed.
pub(crate) fn installed_and_killed(bug: Bug) -> Result<(), String> {
    SimRuntime::with_seed(1).block_on(async move {
        let cluster = new_cluster(1, Options::small(bug, 3));
        start_all(&cluster, 3).await?;
        write_again(&cluster, 1, 1).await?;
        sleep(500).await;
        kill(&cluster, 3, Survival::Everything).await;
        for number in 2..40 {
            for _ in 0..100 {
                let Some((_, leader)) = leader_of(&cluster, 0) else {
                    sleep(50).await;
                    continue;
                };
                if write(leader.group(0), number).await.is_some() {
                    break;
                }
            }
        }
        for id in 1..=2 {
            let raft = member(&cluster, id).raft;
            let last = raft.metrics().borrow_watched().last_log_index.ok_or("an empty log")?;
            sleep(500).await;
            raft.trigger().snapshot().await.map_err(|error| error.to_string())?;
            sleep(500).await;
            raft.trigger().purge_log(last).await.map_err(|error| error.to_string())?;
        }
        sleep(1_000).await;
        start(&cluster, 3).await?;
        let totals = cluster.lock().unwrap().totals.clone();
        for _ in 0..10_000 {
            if totals.lock().unwrap().missing(&["snapshots installed"]).is_empty() {
                break;
            }
            sleep(1).await;
        }
        kill(&cluster, 3, Survival::Everything).await;
        start(&cluster, 3).await?;
        sleep(1_000).await;
        let leader = leader_of(&cluster, 0).ok_or("no leader")?.0;
        write_again(&cluster, leader, 40).await?;
        sleep(2_000).await;
        let stored = lists(&cluster);
        let all: Vec<u64> = (1..=40).collect();
        match (stored[0] == all && stored[1] == all, stored[2] == all) {
            (true, true) => Ok(()),
            (true, false) if stored[2] == all[..39] => Err("node 3 applies nothing after its snapshot".into()),
            _ => Err(format!("the lists are {stored:?}")),
        }
    })
}

/// A follower is cut off for many election timeouts and comes back, with less in its log than the others. The leader
/// leads on in its term.
pub(crate) fn cut_off_and_back(bug: Bug) -> Result<(), String> {
    SimRuntime::with_seed(1).block_on(async move {
        let cluster = new_cluster(1, Options::small(bug, 3));
        start_all(&cluster, 3).await?;
        sleep(1_000).await;
        let (leader_id, leader) = leader_of(&cluster, 0).ok_or("no leader")?;
        let term = leader.group(0).term();
        let follower = leader_id % 3 + 1;
        isolate(&cluster, follower);
        for number in 1..=5 {
            write_again(&cluster, leader_id, number).await?;
            sleep(1_000).await;
        }
        if !member(&cluster, follower).list(0).map_err(|error| error.to_string())?.is_empty() {
            return Err(format!("node {follower} was not cut off"));
        }
        cluster.lock().unwrap().cut.clear();
        sleep(3_000).await;
        let nodes = cluster.lock().unwrap().options.nodes();
        let terms: Vec<u64> = nodes.map(|id| member(&cluster, id).term()).collect();
        if terms != [term; 3] || !member(&cluster, leader_id).is_leader() {
            return Err(format!("node {follower} came back and raised term {term}: {terms:?}"));
        }
        let stored = lists(&cluster);
        let is_complete = stored.iter().all(|list| *list == [1, 2, 3, 4, 5]);
        if is_complete { Ok(()) } else { Err(format!("the lists are {stored:?}")) }
    })
}

fn running(cluster: &SharedCluster, id: u64) -> Running {
    cluster.lock().unwrap().running[&id].clone()
}

fn member(cluster: &SharedCluster, id: u64) -> Member {
    running(cluster, id).group(0).clone()
}

/// Appends a number to list 0.
async fn write(member: &Member, number: u64) -> Option<()> {
    let write = member.raft.client_write(append(0, number));
    SimRuntime::timeout(Duration::from_secs(2), write).await.ok()?.ok().map(drop)
}

/// Appends a number at a node until it is acknowledged.
async fn write_again(cluster: &SharedCluster, id: u64, number: u64) -> Result<(), String> {
    for _ in 0..50 {
        if write(&member(cluster, id), number).await.is_some() {
            return Ok(());
        }
        sleep(100).await;
    }
    Err(format!("node {id} does not append {number}"))
}

/// List 0 of all nodes.
fn lists(cluster: &SharedCluster) -> Vec<Vec<u64>> {
    let nodes = cluster.lock().unwrap().options.nodes();
    nodes.map(|id| member(cluster, id).list(0).unwrap_or_default()).collect()
}

/// From here on nodes are candidates only when they are told to be, and leaders send no heartbeats.
async fn elect_by_hand(cluster: &SharedCluster) {
    let nodes = cluster.lock().unwrap().options.nodes();
    for id in nodes {
        member(cluster, id).raft.runtime_config().elect(false);
        member(cluster, id).raft.runtime_config().heartbeat(false);
    }
    cluster.lock().unwrap().options.elects = false;
    sleep(1_000).await;
}

/// Makes a node the leader.
async fn elect(cluster: &SharedCluster, id: u64, attempts: usize) -> Result<(), String> {
    for _ in 0..attempts {
        member(cluster, id).raft.trigger().elect(false).await.map_err(|error| error.to_string())?;
        sleep(200).await;
        if member(cluster, id).is_leader() {
            return Ok(());
        }
    }
    Err(format!("node {id} is not elected"))
}
