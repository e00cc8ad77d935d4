//! Clients, an operator and failures of one simulation.

use crate::cluster::{
    Options, Running, SharedCluster, count, isolate, kill, leader_of, new_cluster, sleep, start, start_all, working,
};
use crate::history::{Call, History, Seen};
use crate::storage::{Bug, append};
use crate::totals::Totals;
use azekura::testing::{Fault, FaultPlan, OpKind, SeededRng, Survival};
use openraft::async_runtime::WatchReceiver;
use openraft::{AsyncRuntime, BasicNode, ReadPolicy};
use openraft_rt_sim::SimRuntime;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CLIENTS: u64 = 3;
const FAILURES: u64 = 12;
/// Of each group.
const KEYS: u64 = 2;

/// A failure of a node, of all, or of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    PowerLoss,
    PowerLossOfAll,
    /// Long enough for the others to purge what the node misses.
    LongPowerLoss,
    Kill,
    Cut,
    IoError,
}

/// The failures of a simulation, each as often as it is drawn.
fn failures(bug: Bug) -> &'static [Failure] {
    use Failure::{Cut, IoError, Kill, LongPowerLoss, PowerLoss, PowerLossOfAll};
    match bug {
        Bug::EarlyCallback | Bug::RestoredLeader => &[PowerLossOfAll],
        Bug::StaleRead => &[Cut],
        _ => &[PowerLoss, PowerLoss, PowerLossOfAll, LongPowerLoss, Kill, Cut, Cut, IoError, IoError],
    }
}

type IsOver = Arc<Mutex<bool>>;

/// Runs the simulation of a seed. An error says what is wrong with what the clients saw.
pub(crate) fn simulate(seed: u64, bug: Bug) -> Result<Totals, String> {
    SimRuntime::with_seed(seed).block_on(async move {
        let options = Options::draw(seed, bug);
        let cluster = new_cluster(seed, options.clone());
        let history = Arc::new(Mutex::new(History::default()));
        start_all(&cluster, 3).await?;
        let is_over = IsOver::default();
        let mut tasks: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let rng = SeededRng::with_stream(seed, number + 1);
                let (cluster, history) = (Arc::clone(&cluster), Arc::clone(&history));
                let client = Client { number, rng, bug, groups: options.groups, cluster, history };
                SimRuntime::spawn(client.run(Arc::clone(&is_over)))
            })
            .collect();
        if bug == Bug::Nothing {
            let operator = operate(Arc::clone(&cluster), SeededRng::with_stream(seed, 50), Arc::clone(&is_over));
            tasks.push(SimRuntime::spawn(operator));
        }
        for _ in 0..FAILURES {
            fail(&cluster, failures(bug)).await?;
        }
        *is_over.lock().unwrap() = true;
        for task in tasks {
            task.await.map_err(|error| format!("a client or the operator panicked: {error:?}"))?;
        }
        let mut lists = BTreeMap::new();
        for group in 0..options.groups {
            lists.extend(settle(&cluster, group).await?);
        }
        let history = history.lock().unwrap();
        let totals = Arc::clone(&cluster.lock().unwrap().totals);
        let mut totals = totals.lock().unwrap();
        for call in &history.calls {
            match (&call.seen, call.end) {
                (Seen::Append(_), Some(_)) => totals.count("appends"),
                (Seen::Append(_), None) => totals.count("unknown appends"),
                (Seen::Read(_), _) => totals.count("reads"),
            }
        }
        if options.has_pools() {
            totals.count("simulations with pools");
        }
        if options.has_wrong_clocks() {
            totals.count("simulations with clocks of different speed");
        }
        if options.groups > 1 {
            totals.count("simulations of several groups");
        }
        history.check(&lists).map(|()| totals.clone())
    })
}

/// One failure, and its end.
async fn fail(cluster: &SharedCluster, failures: &[Failure]) -> Result<(), String> {
    let (failure, id, ops, pause, survival, loses_messages) = {
        let cluster = &mut *cluster.lock().unwrap();
        let rng = &mut cluster.rng;
        let survivals =
            [Survival::Nothing, Survival::Random, Survival::Random, Survival::DataOnly, Survival::MetadataOnly];
        let id = rng.below(cluster.options.nodes) + 1;
        (rng.pick(failures), id, rng.below(60u64), rng.below(400u64), rng.pick(&survivals), rng.chance_in_8(4))
    };
    cluster.lock().unwrap().loses_messages = loses_messages;
    sleep(pause).await;
    match failure {
        Failure::PowerLoss => {
            count(cluster, "power losses");
            lose_power(cluster, id, ops, survival).await;
            sleep(pause).await;
            start(cluster, id).await?;
        }
        Failure::PowerLossOfAll => {
            count(cluster, "power losses of all nodes");
            let nodes = cluster.lock().unwrap().options.nodes();
            for id in nodes.clone() {
                lose_power(cluster, id, ops / 4, survival).await;
            }
            for id in nodes {
                start(cluster, id).await?;
            }
            sleep(300).await;
        }
        Failure::LongPowerLoss => {
            count(cluster, "power losses");
            kill(cluster, id, Survival::Nothing).await;
            sleep(3_000).await;
            start(cluster, id).await?;
        }
        Failure::Kill => {
            count(cluster, "kills");
            kill(cluster, id, Survival::Everything).await;
            sleep(pause).await;
            start(cluster, id).await?;
        }
        Failure::Cut => {
            count(cluster, "cuts");
            isolate(cluster, id);
            sleep(500 + pause).await;
            cluster.lock().unwrap().cut.clear();
        }
        Failure::IoError => {
            if fail_io(cluster, id, ops).await {
                count(cluster, "I/O errors");
            }
            sleep(pause).await;
            // The process is started again, or the machine.
            let survival = if ops % 2 == 0 { Survival::Everything } else { survival };
            kill(cluster, id, survival).await;
            start(cluster, id).await?;
        }
    }
    for (_, node) in working(cluster) {
        while node.works() && node.database.step().unwrap_or(false) {}
    }
    Ok(())
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

/// Lets an operation of a node's file system fail. Returns whether one did.
async fn fail_io(cluster: &SharedCluster, id: u64, ops: u64) -> bool {
    let (node, op, fault) = {
        let cluster = &mut *cluster.lock().unwrap();
        let op = cluster.rng.pick(&[OpKind::Any, OpKind::Write, OpKind::Sync]);
        let fault = cluster.rng.pick(&[Fault::Error(std::io::ErrorKind::Other), Fault::Short]);
        (cluster.running[&id].clone(), op, fault)
    };
    node.faults.inject(FaultPlan::new(op, 1 + ops / 4, fault));
    for _ in 0..40 {
        if node.faults.fault_count() > 0 {
            return true;
        }
        sleep(10).await;
    }
    false
}

async fn within<T>(ms: u64, future: impl Future<Output = T> + Send) -> Option<T> {
    SimRuntime::timeout(Duration::from_millis(ms), future).await.ok()
}

/// Changes the members of groups, and transfers their leaderships.
async fn operate(cluster: SharedCluster, mut rng: SeededRng, is_over: IsOver) {
    let options = cluster.lock().unwrap().options.clone();
    while !*is_over.lock().unwrap() {
        sleep(100 + rng.below(900u64)).await;
        let group = rng.below(options.groups);
        if rng.chance_in_8(3) {
            transfer(&cluster, group, &mut rng).await;
        } else {
            let without = rng.below(options.nodes + 1);
            let voters = options.nodes().filter(|id| *id != without).collect();
            change_members(&cluster, group, &voters).await;
        }
    }
}

/// Makes these nodes the voters of a group; those that are not its members are learners first. Returns whether it did.
async fn change_members(cluster: &SharedCluster, group: u64, voters: &BTreeSet<u64>) -> bool {
    let Some((leader_id, leader)) = leader_of(cluster, group) else { return false };
    let raft = &leader.group(group).raft;
    let members = Arc::clone(&raft.server_metrics().borrow_watched().membership_config);
    let before: BTreeSet<u64> = members.voter_ids().collect();
    // A removed leader leads on for a while. openraft panics in debug builds when it changes the members once more.
    if !before.contains(&leader_id) {
        return false;
    }
    for id in voters.iter().filter(|id| members.get_node(id).is_none()) {
        match within(2_000, raft.add_learner(*id, BasicNode::default(), true)).await {
            Some(Ok(_)) => count(cluster, "learners added"),
            _ => return false,
        }
    }
    let changed = within(3_000, raft.change_membership(voters.clone(), false)).await.is_some_and(|done| done.is_ok());
    if changed && before != *voters {
        count(cluster, "membership changes");
        let name = if before.is_subset(voters) { "learners promoted" } else { "members removed" };
        count(cluster, name);
    }
    changed
}

/// Transfers the leadership of a group to another voter.
async fn transfer(cluster: &SharedCluster, group: u64, rng: &mut SeededRng) {
    let Some((id, leader)) = leader_of(cluster, group) else { return };
    let raft = &leader.group(group).raft;
    let members = Arc::clone(&raft.server_metrics().borrow_watched().membership_config);
    let others: Vec<u64> = members.voter_ids().filter(|other| *other != id).collect();
    if others.is_empty() {
        return;
    }
    let to = rng.pick(&others);
    let _ = raft.trigger().transfer_leader(to).await;
    for _ in 0..25 {
        sleep(20).await;
        if leader_of(cluster, group).is_some_and(|(id, _)| id == to) {
            return count(cluster, "leaderships transferred");
        }
    }
}

/// Waits until all nodes are members of a group and have the same state, and returns it.
async fn settle(cluster: &SharedCluster, group: u64) -> Result<BTreeMap<u8, Vec<u64>>, String> {
    cluster.lock().unwrap().loses_messages = false;
    let all: BTreeSet<u64> = cluster.lock().unwrap().options.nodes().collect();
    let (mut is_complete, mut last) = (false, None);
    for _ in 0..600 {
        sleep(50).await;
        is_complete = is_complete || change_members(cluster, group, &all).await;
        if !is_complete {
            continue;
        }
        if last.is_none()
            && let Some((_, leader)) = leader_of(cluster, group)
            && let Some(Ok(written)) = within(1_000, leader.group(group).raft.write_blank()).await
        {
            last = Some(written.log_id.index);
        }
        let nodes = working(cluster);
        let applied = |node: &Running| {
            node.group(group).raft.data_metrics().borrow_watched().last_applied.map(|applied| applied.index)
        };
        if last.is_some() && nodes.len() == all.len() && nodes.iter().all(|(_, node)| applied(node) >= last) {
            let lists: Result<Vec<_>, _> = nodes.iter().map(|(_, node)| node.group(group).lists()).collect();
            let lists = lists?;
            let differ = lists.iter().any(|other| *other != lists[0]);
            return if differ { Err(format!("the states differ: {lists:?}")) } else { Ok(lists[0].clone()) };
        }
    }
    let state = |node: &Running| node.group(group).raft.metrics().borrow_watched().clone();
    let states: Vec<_> = working(cluster).iter().map(|(id, node)| format!("node {id}: {}", state(node))).collect();
    Err(format!("group {group} does not settle (complete: {is_complete}, last {last:?}): {states:#?}"))
}

struct Client {
    number: u64,
    rng: SeededRng,
    bug: Bug,
    groups: u64,
    cluster: SharedCluster,
    history: Arc<Mutex<History>>,
}

impl Client {
    async fn run(mut self, is_over: IsOver) {
        let nodes = self.cluster.lock().unwrap().options.nodes;
        let mut calls = 0;
        while !*is_over.lock().unwrap() {
            calls += 1;
            sleep(self.rng.below(30)).await;
            let (group, id) = (self.rng.below(self.groups), self.rng.below(nodes) + 1);
            let key = (group * KEYS + self.rng.below(KEYS)) as u8;
            let node = self.cluster.lock().unwrap().running.get(&id).cloned();
            let Some(node) = node else { continue };
            let begin = self.history.lock().unwrap().tick();
            let seen = match self.rng.below(8u64) {
                0..=1 => self.read(&node, group, key).await.map(|list| (Seen::Read(list), true)),
                2..=3 => self.read_follower(&node, group, key).await.map(|list| (Seen::Read(list), true)),
                _ => {
                    let number = self.number * 1_000_000 + calls;
                    let is_known = self.append(&node, group, key, number).await;
                    is_known.map(|is_known| (Seen::Append(number), is_known))
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
    async fn append(&self, node: &Running, group: u64, key: u8, number: u64) -> Option<bool> {
        match within(2_000, node.group(group).raft.client_write(append(key, number))).await {
            Some(Ok(_)) => Some(node.works()),
            Some(Err(error)) if error.forward_to_leader().is_some() => None,
            _ => Some(false),
        }
    }

    /// Reads from a node that is the leader.
    async fn read(&self, node: &Running, group: u64, key: u8) -> Option<Vec<u64>> {
        let member = node.group(group);
        if self.bug != Bug::StaleRead {
            within(2_000, member.raft.ensure_linearizable(ReadPolicy::ReadIndex)).await?.ok()?;
        }
        member.list(key).ok().filter(|_| node.works())
    }

    /// Asks the leader for the position that a read must see, waits until this node has applied it, and reads there.
    async fn read_follower(&self, node: &Running, group: u64, key: u8) -> Option<Vec<u64>> {
        let member = node.group(group);
        let leader = member.raft.server_metrics().borrow_watched().current_leader?;
        let leader = self.cluster.lock().unwrap().running.get(&leader).cloned()?;
        let raft = &leader.group(group).raft;
        let position = within(2_000, raft.get_read_linearizer(ReadPolicy::ReadIndex)).await?.ok()?;
        let _ =
            within(3_000, position.try_await_ready(&member.raft, Some(Duration::from_secs(2)))).await?.ok()?.ok()?;
        let list = member.list(key).ok().filter(|_| node.works())?;
        if !member.is_leader() {
            count(&self.cluster, "reads of followers");
        }
        Some(list)
    }
}
