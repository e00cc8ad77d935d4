//! Three nodes and the links between them.

use azekura::testing::{MemFs, SeededRng, Survival, TestEnv};
use azekura::{Batch, Config, Database, Partition, PartitionCreateOptions, PersistMode};
use azekura_raft::snapshot::{SnapshotData, SnapshotReceiver};
use azekura_raft::{
    Application, LogStore, SnapshotReceivers, State, StateMachine, StateReader, Syncer, required_config,
};
use openraft::errors::{RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::type_config::alias::{LogIdOf, SnapshotOf, VoteOf};
use openraft::{
    AsyncRuntime, BasicNode, LogState, OptionalSend, Raft, RaftLogReader, RaftNetworkFactory, RaftNetworkV2, Snapshot,
    SnapshotPolicy,
};
use openraft_rt_sim::SimRuntime;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const NODES: std::ops::RangeInclusive<u64> = 1..=3;

openraft::declare_raft_types!(pub(crate) Types: D = String, R = String, AsyncRuntime = SimRuntime);

pub(crate) type Node = Raft<Types, StateMachine<Types, Lists>>;

/// What is wrong with the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    Nothing,
    /// An append is reported as durable before its sync.
    EarlyCallback,
    /// A vote is not synced.
    UnsyncedVote,
    /// A read does not ask the leader.
    StaleRead,
    /// A leader that was restarted leads on without an election.
    RestoredLeader,
}

/// Keys have lists of numbers: the command `KEY NUMBER` appends one.
#[derive(Debug)]
pub(crate) struct Lists;

impl Application for Lists {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        vec![("lists".into(), PartitionCreateOptions::default().max_memtable_size(16 << 10))]
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &String) -> azekura::Result<String> {
        let (key, number) = command.split_once(' ').expect("commands are made by `append`");
        let lists = state.partition("lists").expect("named above");
        let mut list = lists.get(key)?.map_or_else(Vec::new, |list| list.to_vec());
        list.extend_from_slice(&number.parse::<u64>().expect("made by `append`").to_le_bytes());
        batch.insert(lists, key, list);
        Ok(String::new())
    }
}

pub(crate) fn append(key: u8, number: u64) -> String {
    format!("{key} {number}")
}

fn decode(list: &[u8]) -> Vec<u64> {
    list.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().expect("8 bytes"))).collect()
}

fn lists_of(state: &State) -> &Partition {
    state.partition("lists").expect("named in `partitions`")
}

/// A running node.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) raft: Node,
    pub(crate) database: Database,
    fs: MemFs,
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

    /// The list of a key in this node's state.
    pub(crate) fn list(&self, key: u8) -> azekura::Result<Vec<u64>> {
        Ok(lists_of(&self.reader.current()).get(key.to_string())?.map_or_else(Vec::new, |list| decode(&list)))
    }

    /// All lists of this node's state.
    pub(crate) fn lists(&self) -> azekura::Result<BTreeMap<u8, Vec<u64>>> {
        lists_of(&self.reader.current())
            .iter()
            .map(|pair| {
                pair.map(|(key, list)| (String::from_utf8_lossy(&key).parse().expect("a number"), decode(&list)))
            })
            .collect()
    }
}

/// The nodes and the links, which all tasks share.
pub(crate) struct Cluster {
    pub(crate) rng: SeededRng,
    pub(crate) running: BTreeMap<u64, Running>,
    disks: BTreeMap<u64, MemFs>,
    /// Pairs of nodes that cannot reach each other.
    pub(crate) cut: Vec<(u64, u64)>,
    pub(crate) loses_messages: bool,
    /// No entries and heartbeats arrive.
    pub(crate) loses_appends: bool,
    bug: Bug,
    /// Nodes are candidates only when a test makes them.
    pub(crate) elects: bool,
    pub(crate) snapshots: u64,
}

pub(crate) type SharedCluster = Arc<Mutex<Cluster>>;

pub(crate) fn new_cluster(seed: u64, bug: Bug) -> SharedCluster {
    Arc::new(Mutex::new(Cluster {
        rng: SeededRng::new(seed),
        running: BTreeMap::new(),
        disks: NODES.map(|id| (id, MemFs::new())).collect(),
        cut: Vec::new(),
        loses_messages: false,
        loses_appends: false,
        bug,
        elects: true,
        snapshots: 0,
    }))
}

pub(crate) async fn sleep(ms: u64) {
    SimRuntime::sleep(Duration::from_millis(ms)).await;
}

/// Starts a node on its disk.
pub(crate) async fn start(cluster: &SharedCluster, id: u64) -> Result<(), String> {
    let (fs, bug, enable_elect, seed) = {
        let mut cluster = cluster.lock().unwrap();
        (cluster.disks[&id].clone(), cluster.bug, cluster.elects, cluster.rng.next_u64())
    };
    let config = Config::new("/raft").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(seed))).workers(0);
    let config = config.wal_segment_size(64 << 10).cache_size(1 << 20);
    let database = config.open().map_err(|error| format!("node {id} does not open: {error}"))?;
    let syncing = {
        let database = database.clone();
        Syncer::inline(move || database.persist(PersistMode::SyncData).map_err(io::Error::other))
    };
    let (syncing, never) = (Arc::new(syncing), Arc::new(Syncer::inline(|| Ok(()))));
    let options = PartitionCreateOptions::default().max_memtable_size(16 << 10);
    let open = |is_wrong: bool| {
        let syncer = if is_wrong { &never } else { &syncing };
        LogStore::open(&database, 1, options.clone(), Arc::clone(syncer)).map_err(|error| error.to_string())
    };
    let log = NodeLog { appends: open(bug == Bug::EarlyCallback)?, votes: open(bug == Bug::UnsyncedVote)? };
    let state = StateMachine::open(&log.appends, Lists).map_err(|error| format!("node {id}: {error}"))?;
    let (reader, receivers) = (state.reader(), state.receivers());
    let config = openraft::Config {
        heartbeat_interval: 50,
        election_timeout_min: 150,
        election_timeout_max: 300,
        install_snapshot_timeout: 1000,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(20),
        replication_lag_threshold: 10,
        max_in_snapshot_log_to_keep: 5,
        enable_pre_vote: Some(enable_elect),
        enable_elect,
        ..Default::default()
    };
    let config = if bug == Bug::RestoredLeader { config } else { required_config(config) };
    let links = Links { from: id, cluster: Arc::clone(cluster) };
    let raft =
        Raft::new(id, Arc::new(config), links, log, state).await.map_err(|error| format!("node {id}: {error}"))?;
    let running = Running { raft, database, fs, reader, receivers, incoming: Arc::default() };
    cluster.lock().unwrap().running.insert(id, running);
    Ok(())
}

/// Cuts a node off from the others.
pub(crate) fn isolate(cluster: &SharedCluster, id: u64) {
    cluster.lock().unwrap().cut = NODES.filter(|other| *other != id).map(|other| (id, other)).collect();
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
    let _ = SimRuntime::timeout(Duration::from_secs(5), killed.raft.shutdown()).await;
}

/// Links from one node to the others.
struct Links {
    from: u64,
    cluster: SharedCluster,
}

impl RaftNetworkFactory<Types> for Links {
    type Network = Link;

    async fn new_client(&mut self, to: u64, _: &BasicNode) -> Link {
        Link {
            from: self.from,
            to,
            cluster: Arc::clone(&self.cluster),
            fs: self.cluster.lock().unwrap().disks[&self.from].clone(),
        }
    }
}

/// A link from one node, as it was started last, to another.
pub(crate) struct Link {
    from: u64,
    to: u64,
    cluster: SharedCluster,
    fs: MemFs,
}

impl Link {
    /// Brings a message to its end, unless it is lost. Returns the receiving node.
    async fn send(&self) -> Result<Running, Unreachable<Types>> {
        let (ms, is_lost) = {
            let mut cluster = self.cluster.lock().unwrap();
            let loses_messages = cluster.loses_messages;
            (cluster.rng.below(4), loses_messages && cluster.rng.chance_one_in(8))
        };
        sleep(ms).await;
        let cluster = self.cluster.lock().unwrap();
        let is_cut = cluster.cut.iter().any(|pair| [(self.from, self.to), (self.to, self.from)].contains(pair));
        match cluster.running.get(&self.to) {
            Some(running) if running.works() && !self.fs.is_frozen() && !is_cut && !is_lost => Ok(running.clone()),
            _ => Err(unreachable()),
        }
    }

    /// Brings a message to its end, and the answer back.
    async fn call<T, E, F>(&self, deliver: impl FnOnce(Running) -> F) -> Result<T, Unreachable<Types>>
    where
        F: Future<Output = Result<T, E>>,
    {
        let there = self.send().await?;
        let answer = deliver(there.clone()).await.map_err(|_| unreachable())?;
        let back = self.send().await?;
        // A node that was started again meanwhile has not answered.
        if there.works() && back.works() { Ok(answer) } else { Err(unreachable()) }
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
        if self.cluster.lock().unwrap().loses_appends {
            return Err(unreachable().into());
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
        let there = self.send().await?;
        let incoming = there.incoming.lock().unwrap().take();
        let mut incoming = match incoming.filter(|incoming| (incoming.from, incoming.last) == (from, last)) {
            Some(incoming) => incoming,
            None => Incoming { from, last, receiver: there.receivers.receive().map_err(|_| unreachable())? },
        };
        let position = incoming.receiver.position().map_err(|_| unreachable())?;
        let frames = snapshot.snapshot.frames(&position).map_err(|_| unreachable())?;
        for frame in frames.into_iter().flatten() {
            let sent = self
                .send()
                .await
                .and_then(|_| incoming.receiver.receive(&frame.map_err(|_| unreachable())?).map_err(|_| unreachable()));
            match sent {
                Ok(None) => {}
                Ok(Some(received)) => {
                    self.cluster.lock().unwrap().snapshots += 1;
                    let received = Snapshot { meta: snapshot.meta.clone(), snapshot: received };
                    let install = |node: Running| async move { node.raft.install_full_snapshot(vote, received).await };
                    return Ok(self.call(install).await?);
                }
                Err(error) => {
                    *there.incoming.lock().unwrap() = Some(incoming);
                    return Err(error.into());
                }
            }
        }
        Err(unreachable().into())
    }
}

/// The log of a node. With a planted bug, appends or votes are not synced.
#[derive(Clone)]
struct NodeLog {
    appends: LogStore<Types>,
    votes: LogStore<Types>,
}

type EntryOf = <Types as openraft::RaftTypeConfig>::Entry;

impl RaftLogReader<Types> for NodeLog {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<EntryOf>> {
        self.appends.try_get_log_entries(range).await
    }

    async fn read_vote(&mut self) -> io::Result<Option<VoteOf<Types>>> {
        self.votes.read_vote().await
    }
}

impl RaftLogStorage<Types> for NodeLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Types>> {
        self.appends.get_log_state().await
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &VoteOf<Types>) -> io::Result<()> {
        self.votes.save_vote(vote).await
    }

    async fn save_committed(&mut self, committed: Option<LogIdOf<Types>>) -> io::Result<()> {
        self.appends.save_committed(committed).await
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogIdOf<Types>>> {
        self.appends.read_committed().await
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Types>) -> io::Result<()>
    where
        I: IntoIterator<Item = EntryOf> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.appends.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogIdOf<Types>>) -> io::Result<()> {
        self.appends.truncate_after(last_log_id).await
    }

    async fn purge(&mut self, log_id: LogIdOf<Types>) -> io::Result<()> {
        self.appends.purge(log_id).await
    }
}
