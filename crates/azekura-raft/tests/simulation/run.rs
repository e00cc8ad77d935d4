//! Clients and failures of one simulation.

use crate::cluster::{Bug, NODES, Running, SharedCluster, append, isolate, kill, new_cluster, sleep, start};
use crate::history::{Call, History, Seen};
use azekura::testing::{SeededRng, Survival};
use openraft::async_runtime::WatchReceiver;
use openraft::{AsyncRuntime, BasicNode, ReadPolicy, ServerState};
use openraft_rt_sim::SimRuntime;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CLIENTS: u64 = 3;
const FAILURES: u64 = 12;
const KEYS: u8 = 2;

/// What simulations did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) appends: u64,
    pub(crate) unknown: u64,
    pub(crate) reads: u64,
    pub(crate) power_losses: u64,
    pub(crate) kills: u64,
    pub(crate) cuts: u64,
    pub(crate) snapshots: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, other: &Totals) {
        self.appends += other.appends;
        self.unknown += other.unknown;
        self.reads += other.reads;
        self.power_losses += other.power_losses;
        self.kills += other.kills;
        self.cuts += other.cuts;
        self.snapshots += other.snapshots;
    }
}

/// Runs the simulation of a seed. An error says what is wrong with what the clients saw.
pub(crate) fn simulate(seed: u64, bug: Bug) -> Result<Totals, String> {
    SimRuntime::with_seed(seed).block_on(async move {
        let cluster = new_cluster(seed, bug);
        let history = Arc::new(Mutex::new(History::default()));
        for id in NODES {
            start(&cluster, id).await?;
        }
        let first = cluster.lock().unwrap().running[&1].clone();
        let nodes: BTreeMap<u64, BasicNode> = NODES.map(|id| (id, BasicNode::default())).collect();
        first.raft.initialize(nodes).await.map_err(|error| error.to_string())?;
        let is_over = Arc::new(Mutex::new(false));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let rng = SeededRng::with_stream(seed, number + 1);
                let client = Client { number, rng, bug, cluster: Arc::clone(&cluster), history: Arc::clone(&history) };
                SimRuntime::spawn(client.run(Arc::clone(&is_over)))
            })
            .collect();
        let mut totals = Totals::default();
        for _ in 0..FAILURES {
            fail(&cluster, &mut totals).await?;
        }
        *is_over.lock().unwrap() = true;
        for client in clients {
            client.await.map_err(|error| format!("a client panicked: {error:?}"))?;
        }
        let lists = settle(&cluster).await?;
        let history = history.lock().unwrap();
        for call in &history.calls {
            match (&call.seen, call.end) {
                (Seen::Append(_), Some(_)) => totals.appends += 1,
                (Seen::Append(_), None) => totals.unknown += 1,
                (Seen::Read(_), _) => totals.reads += 1,
            }
        }
        totals.snapshots = cluster.lock().unwrap().snapshots;
        history.check(&lists).map(|()| totals)
    })
}

/// Node 2 votes for node 3, loses power at once, and is asked for its vote by node 1 in the same term. Node 1 then
/// commits an append with node 2, which node 3, the older candidate with the higher number, must not replace.
pub(crate) fn vote_twice(bug: Bug) -> Result<(), String> {
    SimRuntime::with_seed(1).block_on(async move {
        let cluster = new_cluster(1, bug);
        for id in NODES {
            start(&cluster, id).await?;
        }
        let node = |id: u64| cluster.lock().unwrap().running[&id].clone();
        let nodes: BTreeMap<u64, BasicNode> = NODES.map(|id| (id, BasicNode::default())).collect();
        node(1).raft.initialize(nodes).await.map_err(|error| error.to_string())?;
        while write(&node(1), 1).await.is_none() {
            sleep(100).await;
        }
        // From here on nodes are candidates only when they are told to be.
        for id in NODES {
            node(id).raft.runtime_config().elect(false);
            node(id).raft.runtime_config().heartbeat(false);
        }
        cluster.lock().unwrap().elects = false;
        sleep(1_000).await;
        cluster.lock().unwrap().cut = vec![(1, 2), (1, 3)];
        cluster.lock().unwrap().loses_appends = true;
        node(3).raft.trigger().elect(false).await.map_err(|error| error.to_string())?;
        for _ in 0..1_000 {
            sleep(1).await;
            if node(3).raft.server_metrics().borrow_watched().state == ServerState::Leader {
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
        let term = |id: u64| node(id).raft.server_metrics().borrow_watched().vote.leader_id.term;
        for _ in 0..20 {
            node(1).raft.trigger().elect(false).await.map_err(|error| error.to_string())?;
            sleep(200).await;
            if node(1).raft.server_metrics().borrow_watched().state == ServerState::Leader {
                break;
            }
        }
        println!("{bug:?}: term {} of node 1, term {} of node 3", term(1), term(3));
        write(&node(1), 2).await.ok_or("the second append failed")?;
        cluster.lock().unwrap().cut.clear();
        node(3).raft.runtime_config().heartbeat(true);
        sleep(3_000).await;
        let list = node(2).list(0).map_err(|error| error.to_string())?;
        let stored: Vec<_> = NODES.map(|id| node(id).list(0)).collect();
        if list == [1, 2] { Ok(()) } else { Err(format!("the lists are {stored:?}")) }
    })
}

/// Appends a number to list 0.
async fn write(node: &Running, number: u64) -> Option<()> {
    let write = node.raft.client_write(append(0, number));
    SimRuntime::timeout(Duration::from_secs(2), write).await.ok()?.ok().map(drop)
}

/// One failure of a node, of all, or of a link, and its end.
async fn fail(cluster: &SharedCluster, totals: &mut Totals) -> Result<(), String> {
    let (kind, id, ops, pause, survival) = {
        let rng = &mut cluster.lock().unwrap().rng;
        let survivals =
            [Survival::Nothing, Survival::Random, Survival::Random, Survival::DataOnly, Survival::MetadataOnly];
        (rng.below(8u64), rng.below(3u64) + 1, rng.below(60u64), rng.below(400u64), rng.pick(&survivals))
    };
    cluster.lock().unwrap().loses_messages = kind % 2 == 0;
    sleep(pause).await;
    match kind {
        0..=2 => {
            totals.power_losses += 1;
            lose_power(cluster, id, ops, survival).await;
            sleep(pause).await;
            start(cluster, id).await?;
        }
        3 => {
            totals.power_losses += 1;
            for id in NODES {
                lose_power(cluster, id, ops / 4, survival).await;
            }
            for id in NODES {
                start(cluster, id).await?;
            }
        }
        4 => {
            totals.kills += 1;
            kill(cluster, id, Survival::Everything).await;
            sleep(pause).await;
            start(cluster, id).await?;
        }
        5 => {
            // Long enough for the others to purge what the node misses.
            kill(cluster, id, Survival::Nothing).await;
            totals.power_losses += 1;
            sleep(3_000).await;
            start(cluster, id).await?;
        }
        _ => {
            totals.cuts += 1;
            isolate(cluster, id);
            sleep(500 + pause).await;
            cluster.lock().unwrap().cut.clear();
        }
    }
    for node in running(cluster) {
        while node.works() && node.database.step().unwrap_or(false) {}
    }
    Ok(())
}

fn running(cluster: &SharedCluster) -> Vec<Running> {
    cluster.lock().unwrap().running.values().cloned().collect()
}

/// Stops the file system of a node after some operations, then cuts its power.
async fn lose_power(cluster: &SharedCluster, id: u64, ops: u64, survival: Survival) {
    let node = cluster.lock().unwrap().running.get(&id).cloned();
    if let Some(node) = node {
        node.freeze_after(ops);
        for _ in 0..20 {
            if !node.works() {
                break;
            }
            sleep(10).await;
        }
        kill(cluster, id, survival).await;
    }
}

/// Waits until all nodes have the same state, and returns it.
async fn settle(cluster: &SharedCluster) -> Result<BTreeMap<u8, Vec<u64>>, String> {
    cluster.lock().unwrap().loses_messages = false;
    let mut last = None;
    for _ in 0..600 {
        sleep(50).await;
        if last.is_none() {
            for node in running(cluster) {
                if let Ok(Ok(written)) = SimRuntime::timeout(Duration::from_secs(1), node.raft.write_blank()).await {
                    last = Some(written.log_id.index);
                    break;
                }
            }
        }
        let applied = |node: &Running| node.raft.data_metrics().borrow_watched().last_applied.map(|id| id.index);
        let nodes = running(cluster);
        if last.is_some() && nodes.iter().all(|node| applied(node) >= last) {
            let lists: Result<Vec<_>, _> = nodes.iter().map(Running::lists).collect();
            let lists = lists.map_err(|error| error.to_string())?;
            let differ = lists.iter().any(|other| *other != lists[0]);
            return if differ { Err(format!("the states differ: {lists:?}")) } else { Ok(lists[0].clone()) };
        }
    }
    Err("the nodes do not settle".into())
}

struct Client {
    number: u64,
    rng: SeededRng,
    bug: Bug,
    cluster: SharedCluster,
    history: Arc<Mutex<History>>,
}

impl Client {
    async fn run(mut self, is_over: Arc<Mutex<bool>>) {
        let mut calls = 0;
        while !*is_over.lock().unwrap() {
            calls += 1;
            sleep(self.rng.below(30)).await;
            let (key, id) = (self.rng.below(KEYS), self.rng.below(3u64) + 1);
            let node = self.cluster.lock().unwrap().running.get(&id).cloned();
            let Some(node) = node else { continue };
            let begin = self.history.lock().unwrap().tick();
            let seen = match self.rng.chance_in_8(3) {
                true => self.read(&node, key).await.map(|list| (Seen::Read(list), true)),
                false => {
                    let number = self.number * 1_000_000 + calls;
                    self.append(&node, key, number).await.map(|is_known| (Seen::Append(number), is_known))
                }
            };
            let mut history = self.history.lock().unwrap();
            let end = history.tick();
            if let Some((seen, is_known)) = seen {
                history.calls.push(Call { key, begin, end: is_known.then_some(end), seen });
            }
        }
    }

    /// Whether the append is known to have taken effect; `None` if it is known not to have.
    async fn append(&self, node: &Running, key: u8, number: u64) -> Option<bool> {
        let write = SimRuntime::timeout(Duration::from_secs(2), node.raft.client_write(append(key, number)));
        match write.await {
            Ok(Ok(_)) => Some(node.works()),
            Ok(Err(error)) if error.forward_to_leader().is_some() => None,
            _ => Some(false),
        }
    }

    async fn read(&self, node: &Running, key: u8) -> Option<Vec<u64>> {
        if self.bug != Bug::StaleRead {
            let ready = node.raft.ensure_linearizable(ReadPolicy::ReadIndex);
            SimRuntime::timeout(Duration::from_secs(2), ready).await.ok()?.ok()?;
        }
        node.list(key).ok().filter(|_| node.works())
    }
}
