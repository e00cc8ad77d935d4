//! A node: its database, its Raft instance, and what is known of the cluster.

use crate::error::Failure;
use crate::identity::{Membership, random_number};
use crate::network::Network;
use crate::options::ServeOptions;
use crate::records::{Command, Outcome, Records, Types};
use azekura::{Config, Database, ErrorKind};
use azekura_raft::snapshot::SnapshotReceiver;
use azekura_raft::{LogStore, SnapshotReceivers, State, StateMachine, StateReader, Syncer};
use openraft::raft::ReadPolicy;
use openraft::type_config::alias::{LogIdOf, SnapshotMetaOf, VoteOf};
use openraft::type_config::async_runtime::watch::WatchReceiver as _;
use openraft::{Raft, RaftMetrics, SnapshotPolicy};
use reqwest::Client;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;

/// The only Raft group of a node.
const GROUP: u64 = 1;
/// A snapshot of any size may be transferred; single frames have timeouts.
const SNAPSHOT_TIMEOUT_MS: u64 = 24 * 60 * 60 * 1000;

/// Limits of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of bytes of a command.
    pub(crate) command_len: usize,
    /// Maximum number of requests of clients at the same time.
    pub(crate) requests: usize,
    /// Maximum number of KiB of their bodies, and of the answers.
    pub(crate) body_kib: usize,
    /// Maximum length of a message of another node.
    pub(crate) peer_body_len: usize,
    /// A command is applied, or a read is confirmed, within this time.
    timeout: Duration,
}

impl Limits {
    /// `log_len_max` is the maximum length of a command that the log takes. Messages of other nodes are limited by it
    /// and not by the node's own limit of a write, because other nodes, or this one before, may have a larger one.
    /// Entries are sent until they reach 4 MiB, and so are the pairs of a snapshot's frame; the last one may be as long
    /// as a command.
    fn new(options: &ServeOptions, log_len_max: usize) -> Limits {
        Limits {
            peer_body_len: log_len_max.saturating_mul(2).saturating_add(16 << 20),
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
}

/// The result of `work`, or `late` if it takes longer than `limit`.
pub(crate) async fn within<T, E: Into<Failure>>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
    late: impl FnOnce() -> Failure,
) -> Result<T, Failure> {
    tokio::time::timeout(limit, work).await.map_or_else(|_| Err(late()), |done| done.map_err(Into::into))
}

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) cluster: Arc<Membership>,
    /// Held while the node forms a cluster.
    pub(crate) forming: Mutex<()>,
    /// Whether the node speaks TLS.
    pub(crate) uses_tls: bool,
    pub(crate) raft: Raft<Types, StateMachine<Types, Records>>,
    pub(crate) database: Database,
    pub(crate) limits: Limits,
    reader: StateReader,
    receivers: SnapshotReceivers<Records>,
    /// The snapshot that is being received.
    pub(crate) incoming: Mutex<Option<Incoming>>,
    /// The number of the last transfer. The first one is random, so that a frame that was sent before a restart belongs
    /// to no transfer after it.
    transfers: AtomicU64,
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
    pub(crate) async fn start(options: &ServeOptions, client: Client) -> io::Result<Node> {
        let database = Config::new(options.dir.join("db")).open().map_err(io::Error::other)?;
        let cluster = Arc::new(Membership::open(&database, options.id, &options.cluster)?);
        let syncer = Arc::new(Syncer::new(&database)?);
        let log: LogStore<Types> =
            LogStore::open(&database, GROUP, Default::default(), syncer).map_err(io::Error::other)?;
        let limits = Limits::new(options, log.command_len_max());
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
        let network = Network { client, cluster: Arc::clone(&cluster), token: options.token.clone() };
        let raft = Raft::new(options.id, Arc::new(config), network, log, state).await.map_err(io::Error::other)?;
        if !raft.is_initialized().await.map_err(io::Error::other)? {
            // The process ended while it formed a cluster, or before it took part in one.
            cluster.forget().map_err(io::Error::other)?;
        }
        let (id, uses_tls) = (options.id, options.tls_cert.is_some());
        let (forming, incoming, transfers) = (Mutex::default(), Mutex::default(), AtomicU64::new(random_number()));
        Ok(Node { id, cluster, forming, uses_tls, raft, database, limits, reader, receivers, incoming, transfers })
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
        let late = || Failure::UnknownOutcome("the command was not applied in time".into());
        let response = within(self.limits.timeout, self.raft.client_write(command), late).await?;
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
            let late = || Failure::Unavailable("a majority of the nodes did not answer in time".into());
            within(self.limits.timeout, ready, late).await?;
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
        let receiver = match slot.take() {
            Some(incoming) if incoming.vote == vote && incoming.meta == meta => incoming.receiver,
            _ => tokio::task::block_in_place(|| self.receivers.receive())?,
        };
        let position = receiver.position()?;
        // Frames of an earlier transfer may still arrive. They have another number.
        let number = self.transfers.fetch_add(1, Ordering::Relaxed);
        *slot = Some(Incoming { number, vote, meta, receiver });
        Ok((number, position))
    }
}
