//! A node: its database, its Raft instance, and what is known of the cluster.

use crate::error::Failure;
use crate::network::Network;
use crate::options::ServeOptions;
use crate::records::{Command, Outcome, Records, Types};
use azekura::{Config, Database, ErrorKind, PersistMode};
use azekura_raft::snapshot::SnapshotReceiver;
use azekura_raft::{LogStore, SnapshotReceivers, State, StateMachine, StateReader, Syncer};
use openraft::raft::ReadPolicy;
use openraft::type_config::alias::{LogIdOf, SnapshotMetaOf, VoteOf};
use openraft::type_config::async_runtime::watch::WatchReceiver as _;
use openraft::{Raft, RaftMetrics, SnapshotPolicy};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// The only Raft group of a node.
const GROUP: u64 = 1;
/// Partition that has the record [`IDENTITY_KEY`] only.
const IDENTITY: &str = "node";
const IDENTITY_KEY: &str = "identity";
/// A snapshot of any size may be transferred; single frames have timeouts.
const SNAPSHOT_TIMEOUT_MS: u64 = 24 * 60 * 60 * 1000;

/// Limits of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of bytes of a command.
    pub(crate) command_len: usize,
    /// Maximum number of requests of clients at the same time.
    pub(crate) requests: usize,
    /// Maximum number of KiB of their bodies.
    pub(crate) body_kib: usize,
    /// A command is applied, or a read is confirmed, within this time.
    timeout: Duration,
}

impl Limits {
    fn new(options: &ServeOptions) -> Limits {
        Limits {
            command_len: usize::try_from(options.max_write_len).unwrap_or(usize::MAX),
            requests: options.max_requests as usize,
            body_kib: options.max_request_mib as usize * 1024,
            timeout: Duration::from_millis(options.request_timeout_ms),
        }
    }

    /// Maximum length of a request of a client. Values of a batch are Base64 in JSON.
    pub(crate) fn client_body_len(self) -> usize {
        self.command_len.saturating_mul(2).saturating_add(1 << 20)
    }

    /// Maximum length of a message of another node. Entries are sent until they reach 4 MiB, and so are the pairs of a
    /// snapshot's frame. The last one may be as long as a command.
    pub(crate) fn peer_body_len(self) -> usize {
        self.command_len.saturating_mul(2).saturating_add(16 << 20)
    }
}

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) cluster: String,
    pub(crate) raft: Raft<Types, StateMachine<Types, Records>>,
    pub(crate) database: Database,
    pub(crate) limits: Limits,
    reader: StateReader,
    receivers: SnapshotReceivers<Records>,
    /// The snapshot that is being received.
    pub(crate) incoming: Mutex<Option<Incoming>>,
}

/// A snapshot that is being received. A later transfer of the same snapshot continues it.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) number: u64,
    pub(crate) vote: VoteOf<Types>,
    pub(crate) meta: SnapshotMetaOf<Types>,
    pub(crate) receiver: SnapshotReceiver<Records>,
}

impl Node {
    /// Opens the database and starts Raft. A node without a cluster waits until it is made a member of one.
    ///
    /// # Errors
    /// If the directory is that of another node, and those of the database.
    pub(crate) async fn start(options: &ServeOptions, network: Network) -> io::Result<Node> {
        let database = Config::new(options.dir.join("db")).open().map_err(io::Error::other)?;
        check_identity(&database, options.id, &options.cluster)?;
        let syncer = Arc::new(Syncer::new(&database)?);
        let log: LogStore<Types> =
            LogStore::open(&database, GROUP, Default::default(), syncer).map_err(io::Error::other)?;
        let limits = Limits::new(options);
        // Raft stops if the log refuses a command. 64 bytes are more than a command has beside its records.
        if limits.command_len > log.command_len_max().saturating_sub(64) {
            let why = format!("--max-write-len is at most {}", log.command_len_max().saturating_sub(64));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let state = StateMachine::open(&log, Records)?;
        let (reader, receivers) = (state.reader(), state.receivers());
        let election_timeout = options.election_timeout_ms;
        let config = openraft::Config {
            cluster_name: options.cluster.clone(),
            heartbeat_interval: (election_timeout / 4).max(1),
            election_timeout_min: election_timeout,
            election_timeout_max: election_timeout * 2,
            install_snapshot_timeout: SNAPSHOT_TIMEOUT_MS,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(options.snapshot_after),
            replication_lag_threshold: options.snapshot_after,
            max_in_snapshot_log_to_keep: options.snapshot_after / 5,
            enable_pre_vote: Some(true),
            ..Default::default()
        };
        let config = azekura_raft::required_config(config).validate().map_err(io::Error::other)?;
        let raft = Raft::new(options.id, Arc::new(config), network, log, state).await.map_err(io::Error::other)?;
        let (id, cluster) = (options.id, options.cluster.clone());
        Ok(Node { id, cluster, raft, database, limits, reader, receivers, incoming: Mutex::default() })
    }

    /// Stops Raft and closes the database.
    pub(crate) async fn stop(self) -> io::Result<()> {
        self.raft.shutdown().await.map_err(io::Error::other)?;
        let Node { raft, database, reader, receivers, incoming, .. } = self;
        drop((raft, reader, receivers, incoming));
        tokio::task::block_in_place(|| database.close()).map_err(io::Error::other)
    }

    /// What Raft says of this node.
    pub(crate) fn raft_metrics(&self) -> RaftMetrics<Types> {
        self.raft.metrics().borrow_watched().clone()
    }

    /// Proposes a command, and waits until it is applied.
    pub(crate) async fn write(&self, command: Command) -> Result<(LogIdOf<Types>, Outcome), Failure> {
        let written = tokio::time::timeout(self.limits.timeout, self.raft.client_write(command)).await;
        let response = written.map_err(|_| Failure::UnknownOutcome("the command was not applied in time".into()))??;
        Ok((response.log_id, response.data))
    }

    /// Reads the state with everything that was acknowledged before this call, unless `is_stale` is true.
    pub(crate) async fn read<T>(
        &self,
        is_stale: bool,
        read: impl Fn(&State) -> azekura::Result<T>,
    ) -> Result<T, Failure> {
        if !is_stale {
            let ready = async {
                let linearizer = self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await?;
                linearizer.await_ready(&self.raft).await.map_err(|error| Failure::Stopped(error.to_string()))
            };
            tokio::time::timeout(self.limits.timeout, ready)
                .await
                .map_err(|_| Failure::Unavailable("a majority of the nodes did not answer in time".into()))??;
        }
        tokio::task::block_in_place(|| {
            loop {
                let state = self.reader.current();
                match read(&state) {
                    // A snapshot was installed meanwhile.
                    Err(error) if error.kind() == ErrorKind::Closed && !Arc::ptr_eq(&state, &self.reader.current()) => {
                    }
                    read => return read.map_err(Failure::from),
                }
            }
        })
    }

    /// Begins to receive a snapshot, or continues where an earlier transfer of it ended.
    pub(crate) async fn receive(
        &self,
        vote: VoteOf<Types>,
        meta: SnapshotMetaOf<Types>,
    ) -> Result<(u64, Vec<u8>), Failure> {
        let mut slot = self.incoming.lock().await;
        let (number, receiver) = match slot.take() {
            Some(incoming) if incoming.vote == vote && incoming.meta == meta => (incoming.number, incoming.receiver),
            earlier => {
                let number = earlier.map_or(0, |incoming| incoming.number);
                (number, tokio::task::block_in_place(|| self.receivers.receive())?)
            }
        };
        let position = receiver.position()?;
        // Frames of an earlier transfer may still arrive. They have another number.
        *slot = Some(Incoming { number: number + 1, vote, meta, receiver });
        Ok((number + 1, position))
    }
}

/// Stores which node the database is of, or checks it.
fn check_identity(database: &Database, id: u64, cluster: &str) -> io::Result<()> {
    let identity = database.open_partition(IDENTITY, Default::default()).map_err(io::Error::other)?;
    let expected = format!("{id} {cluster}");
    match identity.get(IDENTITY_KEY).map_err(io::Error::other)? {
        Some(stored) if stored[..] == *expected.as_bytes() => Ok(()),
        Some(stored) => {
            let stored = String::from_utf8_lossy(&stored).into_owned();
            let (stored_id, stored_cluster) = stored.split_once(' ').unwrap_or((&stored, ""));
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "the directory is that of node {stored_id} of cluster `{stored_cluster}`, not of node {id} of \
                     cluster `{cluster}`"
                ),
            ))
        }
        None => {
            identity.insert(IDENTITY_KEY, expected).map_err(io::Error::other)?;
            database.persist(PersistMode::SyncAll).map_err(io::Error::other)
        }
    }
}
