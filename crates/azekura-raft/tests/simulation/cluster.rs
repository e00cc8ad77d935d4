//! Nodes with several groups, their disks, and the links between them.

use crate::storage::{Bug, Lists, NodeLog, NodeState, TruncatedEntries, Types, list_in, lists_in};
use crate::totals::SharedTotals;
use azekura::testing::{FaultFs, MemFs, SeededRng, Survival, TestEnv};
use azekura::{Config, Database, EngineType, PartitionCreateOptions, PersistMode, PersistenceLevel, PmemOptions};
use azekura_raft::snapshot::{SnapshotData, SnapshotReceiver};
use azekura_raft::{LogStore, RaftLog, SnapshotReceivers, StateMachine, StateReader, Syncer, required_config};
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::alias::{LogIdOf, SnapshotOf, VoteOf};
use openraft::{
    AsyncRuntime, BasicNode, OptionalSend, Raft, RaftNetworkFactory, RaftNetworkV2, ServerState, Snapshot,
    SnapshotPolicy,
};
use openraft_rt_sim::SimRuntime;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// What differs between simulations.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) bug: Bug,
    pub(crate) nodes: u64,
    pub(crate) groups: u64,
    /// Nodes are candidates only when a test makes them.
    pub(crate) elects: bool,
    frame_len: usize,
    log: PartitionCreateOptions,
    lists: PartitionCreateOptions,
    numbers: PartitionCreateOptions,
    /// Of the memory to which files can be mapped.
    level: PersistenceLevel,
    /// A message takes 0 to 3 times this, in microseconds.
    pub(crate) message_us: u64,
    /// Time that a sync takes, in microseconds; random times if None.
    pub(crate) sync_us: Option<u64>,
    /// How fast the clock of each node runs, in percent of the others' time.
    clock_percents: BTreeMap<u64, u64>,
}

impl Options {
    /// LSM partitions and one group.
    pub(crate) fn small(bug: Bug, nodes: u64) -> Options {
        let partition = lsm();
        Options {
            bug,
            nodes,
            groups: 1,
            elects: true,
            frame_len: 64,
            log: partition.clone(),
            lists: partition.clone(),
            numbers: partition,
            level: PersistenceLevel::WalOnly,
            message_us: 1_000,
            sync_us: None,
            clock_percents: BTreeMap::new(),
        }
    }

    /// Drawn from a seed.
    pub(crate) fn draw(seed: u64, bug: Bug) -> Options {
        let mut rng = SeededRng::with_stream(seed, 100);
        let pools = rng.chance_one_in(2);
        let mut partition = || if pools && rng.chance_in_8(6) { pool() } else { lsm() };
        let (log, lists, numbers) = (partition(), partition(), partition());
        let groups = 1 + rng.below(3u64);
        let frame_len = rng.pick(&[1, 64, 300]);
        let level = rng.pick(&[PersistenceLevel::WalOnly, PersistenceLevel::PowerLoss]);
        let mut rng = SeededRng::with_stream(seed, 101);
        let has_wrong_clocks = bug == Bug::Nothing && rng.chance_one_in(2);
        let mut percent = || if has_wrong_clocks { rng.pick(&[50, 100, 100, 200]) } else { 100 };
        let clock_percents = (1..=4).map(|id| (id, percent())).collect();
        Options { groups, frame_len, log, lists, numbers, level, clock_percents, ..Options::small(bug, 4) }
    }

    pub(crate) fn has_wrong_clocks(&self) -> bool {
        self.clock_percents.values().any(|percent| *percent != 100)
    }

    pub(crate) fn has_pools(&self) -> bool {
        [&self.log, &self.lists, &self.numbers].iter().any(|options| **options != lsm())
    }

    pub(crate) fn nodes(&self) -> std::ops::RangeInclusive<u64> {
        1..=self.nodes
    }
}

fn lsm() -> PartitionCreateOptions {
    PartitionCreateOptions::default().max_memtable_size(16 << 10)
}

fn pool() -> PartitionCreateOptions {
    let options = PmemOptions::default().max_size(4 << 20).growth_step(64 << 10);
    PartitionCreateOptions::default().engine(EngineType::Pmem(options))
}

pub(crate) type Node = Raft<Types, NodeState>;

/// A running node.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) database: Database,
    fs: MemFs,
    pub(crate) faults: FaultFs,
    pub(crate) groups: Vec<Member>,
}

/// A group on a node.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) raft: Node,
    reader: StateReader,
    receivers: SnapshotReceivers<Lists>,
    incoming: Arc<Mutex<Option<Incoming>>>,
}

/// A snapshot that is being received, which a later call of the same sender continues.
struct Incoming {
    from: u64,
    last: Option<LogIdOf<Types>>,
    receiver: SnapshotReceiver<Lists>,
}

impl Running {
    /// Whether the machine still works.
    pub(crate) fn works(&self) -> bool {
        !self.fs.is_frozen()
    }

    /// Stops the machine after some operations of its file system.
    pub(crate) fn freeze_after(&self, ops: u64) {
        self.fs.freeze_after(Some(ops));
    }

    pub(crate) fn group(&self, group: u64) -> &Member {
        &self.groups[group as usize]
    }
}

impl Member {
    /// The list of a key in this node's state.
    pub(crate) fn list(&self, key: u8) -> azekura::Result<Vec<u64>> {
        list_in(&self.reader.current(), key)
    }

    /// All lists of this node's state.
    pub(crate) fn lists(&self) -> Result<BTreeMap<u8, Vec<u64>>, String> {
        lists_in(&self.reader.current())
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.raft.server_metrics().borrow_watched().state == ServerState::Leader
    }

    pub(crate) fn term(&self) -> u64 {
        self.raft.server_metrics().borrow_watched().vote.leader_id.term
    }
}

/// The nodes and the links, which all tasks share.
pub(crate) struct Cluster {
    pub(crate) rng: SeededRng,
    pub(crate) options: Options,
    pub(crate) running: BTreeMap<u64, Running>,
    disks: BTreeMap<u64, MemFs>,
    truncated: BTreeMap<(u64, u64), TruncatedEntries>,
    /// Pairs of nodes that cannot reach each other.
    pub(crate) cut: Vec<(u64, u64)>,
    pub(crate) loses_messages: bool,
    /// No entries and heartbeats arrive.
    pub(crate) loses_appends: bool,
    /// Group and vote of each leader that sent something.
    leaders: BTreeSet<(u64, u64, u64)>,
    pub(crate) totals: SharedTotals,
}

pub(crate) type SharedCluster = Arc<Mutex<Cluster>>;

pub(crate) fn new_cluster(seed: u64, options: Options) -> SharedCluster {
    let disk = || {
        let fs = MemFs::new();
        fs.set_mapped_memory(options.level);
        fs
    };
    Arc::new(Mutex::new(Cluster {
        rng: SeededRng::new(seed),
        running: BTreeMap::new(),
        disks: options.nodes().map(|id| (id, disk())).collect(),
        truncated: BTreeMap::new(),
        cut: Vec::new(),
        loses_messages: false,
        loses_appends: false,
        leaders: BTreeSet::new(),
        totals: SharedTotals::default(),
        options,
    }))
}

pub(crate) fn count(cluster: &SharedCluster, name: &'static str) {
    let totals = Arc::clone(&cluster.lock().unwrap().totals);
    totals.lock().unwrap().count(name);
}

pub(crate) async fn sleep(ms: u64) {
    SimRuntime::sleep(Duration::from_millis(ms)).await;
}

/// The running nodes that work.
pub(crate) fn working(cluster: &SharedCluster) -> Vec<(u64, Running)> {
    let cluster = cluster.lock().unwrap();
    cluster.running.iter().filter(|(_, node)| node.works()).map(|(id, node)| (*id, node.clone())).collect()
}

/// The leader of a group with the highest term.
pub(crate) fn leader_of(cluster: &SharedCluster, group: u64) -> Option<(u64, Running)> {
    let leaders = working(cluster).into_iter().filter(|(_, node)| node.group(group).is_leader());
    leaders.max_by_key(|(_, node)| node.group(group).term())
}

/// Starts the first nodes, and makes them the voters of all groups. The others are started too.
pub(crate) async fn start_all(cluster: &SharedCluster, voters: u64) -> Result<(), String> {
    let options = cluster.lock().unwrap().options.clone();
    for id in options.nodes() {
        start(cluster, id).await?;
    }
    let voters: BTreeMap<u64, BasicNode> = (1..=voters).map(|id| (id, BasicNode::default())).collect();
    let first = cluster.lock().unwrap().running[&1].clone();
    for group in 0..options.groups {
        let initialized = first.group(group).raft.initialize(voters.clone()).await;
        initialized.map_err(|error| format!("group {group}: {error}"))?;
    }
    Ok(())
}

/// Starts a node on its disk.
pub(crate) async fn start(cluster: &SharedCluster, id: u64) -> Result<(), String> {
    let (fs, options, seed, totals) = {
        let mut cluster = cluster.lock().unwrap();
        let seed = cluster.rng.next_u64();
        (cluster.disks[&id].clone(), cluster.options.clone(), seed, Arc::clone(&cluster.totals))
    };
    let faults = FaultFs::new(Arc::new(fs.clone()));
    let config = Config::new("/raft").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(seed))).workers(0);
    let config = config.wal_segment_size(64 << 10).cache_size(1 << 20);
    let database = config.open().map_err(|error| format!("node {id} does not open: {error}"))?;
    let syncing = {
        let database = database.clone();
        Arc::new(Syncer::stepped(move || database.persist(PersistMode::SyncData).map_err(io::Error::other)))
    };
    let syncer = Arc::downgrade(&syncing);
    match options.sync_us {
        Some(us) => SimRuntime::spawn(run_slow_syncer(syncer, Duration::from_micros(us))),
        None => SimRuntime::spawn(run_syncer(syncer, SeededRng::with_stream(seed, id), Arc::clone(&totals))),
    };
    let never = Arc::new(Syncer::inline(|| Ok(())));
    let mut groups = Vec::new();
    for group in 0..options.groups {
        let open = |is_wrong: bool| {
            let syncer = Arc::clone(if is_wrong { &never } else { &syncing });
            LogStore::open(&database, group, options.log.clone(), syncer).map_err(|error| error.to_string())
        };
        let log = NodeLog {
            appends: open(options.bug == Bug::EarlyCallback)?,
            votes: open(options.bug == Bug::UnsyncedVote)?,
            raw: RaftLog::open(&database, group, options.log.clone()).map_err(|error| error.to_string())?,
            truncated: Arc::clone(cluster.lock().unwrap().truncated.entry((id, group)).or_default()),
            totals: Arc::clone(&totals),
        };
        if options.bug == Bug::LostTruncation {
            log.undo_truncation().map_err(|error| error.to_string())?;
        }
        let application = Lists { lists: options.lists.clone(), numbers: options.numbers.clone() };
        let inner = StateMachine::open(&log.appends, application).map_err(|error| format!("node {id}: {error}"))?;
        let (reader, receivers) = (inner.reader(), inner.receivers());
        let state = NodeState { inner, bug: options.bug, totals: Arc::clone(&totals) };
        let links = Links { from: id, group, cluster: Arc::clone(cluster) };
        let raft = Raft::new(id, Arc::new(raft_config(&options, id)), links, log, state).await;
        let raft = raft.map_err(|error| format!("node {id}, group {group}: {error}"))?;
        groups.push(Member { raft, reader, receivers, incoming: Arc::default() });
    }
    cluster.lock().unwrap().running.insert(id, Running { database, fs, faults, groups });
    Ok(())
}

fn raft_config(options: &Options, id: u64) -> openraft::Config {
    let percent = options.clock_percents.get(&id).copied().unwrap_or(100);
    let by_own_clock = |ms: u64| ms * 100 / percent;
    let config = openraft::Config {
        heartbeat_interval: by_own_clock(50),
        election_timeout_min: by_own_clock(150),
        election_timeout_max: by_own_clock(300),
        install_snapshot_timeout: by_own_clock(1000),
        snapshot_policy: SnapshotPolicy::LogsSinceLast(20),
        replication_lag_threshold: 10,
        max_in_snapshot_log_to_keep: 5,
        enable_pre_vote: Some(options.elects && options.bug != Bug::NoPreVote),
        enable_elect: options.elects,
        ..Default::default()
    };
    if options.bug == Bug::RestoredLeader { config } else { required_config(config) }
}

/// Does what the thread of a `Syncer` does, at random times.
async fn run_syncer(syncer: Weak<Syncer>, mut rng: SeededRng, totals: SharedTotals) {
    while let Some(syncer) = syncer.upgrade() {
        if syncer.step() > 1 {
            totals.lock().unwrap().count("shared syncs");
        }
        drop(syncer);
        sleep(1 + rng.below(3u64)).await;
    }
}

/// Does what the thread of a `Syncer` does on a disk whose syncs take this time.
async fn run_slow_syncer(syncer: Weak<Syncer>, duration: Duration) {
    const TICK: Duration = Duration::from_micros(10);
    while let Some(syncer) = syncer.upgrade() {
        if syncer.waiting() > 0
            && let Some((wanted, mut window)) = syncer.batching_window()
        {
            while syncer.waiting() < wanted && window > TICK {
                SimRuntime::sleep(TICK).await;
                window -= TICK;
            }
        }
        match syncer.begin() {
            Some(group) => {
                SimRuntime::sleep(duration).await;
                syncer.end(group, Some(duration));
            }
            None => SimRuntime::sleep(TICK).await,
        }
    }
}

/// Cuts a node off from the others.
pub(crate) fn isolate(cluster: &SharedCluster, id: u64) {
    let mut cluster = cluster.lock().unwrap();
    cluster.cut = cluster.options.nodes().filter(|other| *other != id).map(|other| (id, other)).collect();
}

/// Ends a node, with what its disk keeps of unsynced writes.
pub(crate) async fn kill(cluster: &SharedCluster, id: u64, survival: Survival) {
    let killed = {
        let mut cluster = cluster.lock().unwrap();
        let Some(killed) = cluster.running.remove(&id) else { return };
        let (disk, seed) = (killed.fs.fork(), cluster.rng.next_u64());
        disk.crash(survival, seed);
        cluster.disks.insert(id, disk);
        killed
    };
    // Its tasks may go on. They change the abandoned disk only, and the links take no messages from it.
    killed.fs.freeze_after(Some(0));
    for member in &killed.groups {
        let _ = SimRuntime::timeout(Duration::from_secs(5), member.raft.shutdown()).await;
    }
}

/// Links of a group from one node to the others.
struct Links {
    from: u64,
    group: u64,
    cluster: SharedCluster,
}

impl RaftNetworkFactory<Types> for Links {
    type Network = Link;

    async fn new_client(&mut self, to: u64, _: &BasicNode) -> Link {
        let fs = self.cluster.lock().unwrap().disks[&self.from].clone();
        Link { from: self.from, to, group: self.group, cluster: Arc::clone(&self.cluster), fs }
    }
}

/// A link from one node, as it was started last, to another.
pub(crate) struct Link {
    from: u64,
    to: u64,
    group: u64,
    cluster: SharedCluster,
    fs: MemFs,
}

impl Link {
    /// Brings a message to its end, unless it is lost. Returns the receiving node.
    async fn send(&self) -> Result<Running, Unreachable<Types>> {
        let (us, is_lost) = {
            let mut cluster = self.cluster.lock().unwrap();
            let (loses_messages, message_us) = (cluster.loses_messages, cluster.options.message_us);
            (cluster.rng.below(4) * message_us, loses_messages && cluster.rng.chance_one_in(8))
        };
        SimRuntime::sleep(Duration::from_micros(us)).await;
        let cluster = self.cluster.lock().unwrap();
        let is_cut = cluster.cut.iter().any(|pair| [(self.from, self.to), (self.to, self.from)].contains(pair));
        match cluster.running.get(&self.to) {
            Some(running) if running.works() && !self.fs.is_frozen() && !is_cut && !is_lost => Ok(running.clone()),
            _ => Err(unreachable()),
        }
    }

    /// Brings a message to its end, and the answer back.
    async fn call<T, E, F>(&self, deliver: impl FnOnce(Member) -> F) -> Result<T, Unreachable<Types>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let there = self.send().await?;
        let answer = deliver(there.group(self.group).clone()).await.map_err(|_| unreachable())?;
        let back = self.send().await?;
        // A node that was started again meanwhile has not answered.
        if there.works() && back.works() { Ok(answer) } else { Err(unreachable()) }
    }

    /// Sends the frames of a snapshot that are missing there. Returns what is received with the last one.
    async fn send_frames(
        &self,
        snapshot: &SnapshotOf<Types, SnapshotData>,
        incoming: &mut Incoming,
    ) -> Result<SnapshotData, Unreachable<Types>> {
        let (frame_len, totals) = {
            let cluster = self.cluster.lock().unwrap();
            (cluster.options.frame_len, Arc::clone(&cluster.totals))
        };
        let position = incoming.receiver.position().map_err(|_| unreachable())?;
        let frames = snapshot.snapshot.frames(&position).map_err(|_| unreachable())?.ok_or_else(unreachable)?;
        for frame in frames.frame_len(frame_len) {
            self.send().await?;
            totals.lock().unwrap().count("frames");
            let frame = frame.map_err(|_| unreachable())?;
            if let Some(received) = incoming.receiver.receive(&frame).map_err(|_| unreachable())? {
                return Ok(received);
            }
        }
        Err(unreachable())
    }
}

fn unreachable() -> Unreachable<Types> {
    Unreachable::new(&io::Error::other("unreachable"))
}

impl RaftNetworkV2<Types> for Link {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        {
            let mut cluster = self.cluster.lock().unwrap();
            let leader = (self.group, rpc.vote.leader_id.term, rpc.vote.leader_id.node_id);
            let is_first = !cluster.leaders.iter().any(|(group, ..)| *group == self.group);
            if cluster.leaders.insert(leader) && !is_first {
                cluster.totals.lock().unwrap().count("leader changes");
            }
            if cluster.loses_appends {
                return Err(unreachable().into());
            }
        }
        Ok(self.call(|node| async move { node.raft.append_entries(rpc).await }).await?)
    }

    async fn vote(&mut self, rpc: VoteRequest<Types>, _: RPCOption) -> Result<VoteResponse<Types>, RPCError<Types>> {
        Ok(self.call(|node| async move { node.raft.vote(rpc).await }).await?)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        _: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        Ok(self.call(|node| async move { node.raft.pre_vote(rpc).await }).await?)
    }

    async fn transfer_leader(
        &mut self,
        rpc: TransferLeaderRequest<Types>,
        _: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        Ok(self.call(|node| async move { node.raft.handle_transfer_leader(rpc).await }).await?)
    }

    async fn full_snapshot(
        &mut self,
        vote: VoteOf<Types>,
        snapshot: SnapshotOf<Types, SnapshotData>,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        let (from, last) = (self.from, snapshot.meta.last_log_id);
        let there = self.send().await?.group(self.group).clone();
        let incoming = there.incoming.lock().unwrap().take();
        let mut incoming = match incoming.filter(|incoming| (incoming.from, incoming.last) == (from, last)) {
            Some(incoming) => {
                count(&self.cluster, "transfers continued");
                incoming
            }
            None => Incoming { from, last, receiver: there.receivers.receive().map_err(|_| unreachable())? },
        };
        match self.send_frames(&snapshot, &mut incoming).await {
            Ok(received) => {
                let received = Snapshot { meta: snapshot.meta.clone(), snapshot: received };
                let install = |node: Member| async move {
                    // A node that was started again has not received it.
                    let is_same = Arc::ptr_eq(&node.incoming, &there.incoming);
                    if is_same { node.raft.install_full_snapshot(vote, received).await.map_err(drop) } else { Err(()) }
                };
                Ok(self.call(install).await?)
            }
            Err(error) => {
                *there.incoming.lock().unwrap() = Some(incoming);
                Err(error.into())
            }
        }
    }
}
