//! The traits of openraft, and nothing else: what they store is in the other files.

use crate::codec::{decode, encode, encoded_len, io_error};
use crate::log::{Field, RaftLog};
use crate::snapshot::{Data, SnapshotData, SnapshotReceiver};
use crate::state::{Application, ReceivedState, StateReader, StateSnapshot, StateStore};
use crate::syncer::Syncer;
use azekura::{Database, PartitionCreateOptions, Slice};
use futures_util::{Stream, StreamExt};
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, IOFlushed, RaftLogStorage, RaftStateMachine};
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::{
    CommittedLeaderIdOf, EntryPayloadOf, LogIdOf, SnapshotMetaOf, SnapshotOf, StoredMembershipOf, VoteOf,
};
use openraft::type_config::async_runtime::OneshotSender;
use openraft::{
    Config, Entry, EntryPayload, LogState, OptionalSend, RaftLogReader, RaftSnapshotBuilder, RaftTypeConfig, Snapshot,
    SnapshotMeta, StoredMembership,
};
use std::fmt::Debug;
use std::io;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};

/// The configuration of a node, with the settings that this store requires.
///
/// A leader that restarts must be elected again (`enable_leader_restore`): applied entries and the committed log id are
/// not synced, so after power loss it may know less than it has acknowledged, and would answer reads from that.
#[must_use]
pub fn required_config(config: Config) -> Config {
    Config { enable_leader_restore: Some(false), ..config }
}

/// Entries that one read returns have at most this many bytes, unless there is only one.
const READ_LEN: usize = 4 << 20;

/// The maximum length of a stored entry without its command: the log id and the kind of the payload, as postcard, and
/// what a commit adds to an entry.
const ENTRY_OVERHEAD: usize = 256;

/// The log and the vote of one group, for openraft. Clones are the same log.
#[derive(Debug)]
pub struct LogStore<C> {
    log: RaftLog,
    syncer: Arc<Syncer>,
    config: PhantomData<fn() -> C>,
}

impl<C> Clone for LogStore<C> {
    fn clone(&self) -> Self {
        LogStore { log: self.log.clone(), syncer: Arc::clone(&self.syncer), config: PhantomData }
    }
}

impl<C: RaftTypeConfig> LogStore<C> {
    /// Opens the log of a group. Groups of one database share one syncer of it. The options are those of the
    /// partitions of all groups, and apply when the first is created.
    ///
    /// # Errors
    /// Those of [`Database::open_partition`].
    pub fn open(
        database: &Database,
        group: u64,
        options: PartitionCreateOptions,
        syncer: Arc<Syncer>,
    ) -> azekura::Result<LogStore<C>> {
        Ok(LogStore { log: RaftLog::open(database, group, options)?, syncer, config: PhantomData })
    }

    fn field<T: serde::de::DeserializeOwned>(&self, field: Field) -> io::Result<Option<T>> {
        let bytes = self.log.field(field).map_err(io_error)?;
        bytes.map(|bytes| decode(&bytes, &format!("{field:?} of group {}", self.log.group()))).transpose()
    }

    fn entry(&self, (index, bytes): (u64, Slice)) -> io::Result<C::Entry> {
        decode(&bytes, &format!("entry {index} of group {}", self.log.group()))
    }

    /// The stored entries of a range. An error follows the last one before a missing index.
    fn entries<RB: RangeBounds<u64>>(&self, range: RB) -> impl Iterator<Item = io::Result<(u64, Slice)>> + use<C, RB> {
        let (group, mut next) = (self.log.group(), None);
        self.log.entries(range).map(move |entry| {
            let (index, bytes) = entry.map_err(io_error)?;
            if let Some(next) = next.filter(|next| *next != index) {
                let why = format!("entries {next} to {} of group {group} are missing", index - 1);
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            next = index.checked_add(1);
            Ok((index, bytes))
        })
    }

    /// A commit may have half the memory budget. An append that is larger is several commits, and a single entry leaves
    /// as much for what the application writes when it applies its command.
    fn commit_len(&self) -> usize {
        let quarter = self.log.database().settings().memory_budget / 4;
        usize::try_from(quarter).unwrap_or(usize::MAX).min(u32::MAX as usize)
    }

    /// The maximum length of a command, encoded by postcard: a little less than a quarter of the
    /// [memory budget](azekura::Config::memory_budget). So all nodes should have the same.
    pub fn command_len_max(&self) -> usize {
        self.commit_len().saturating_sub(ENTRY_OVERHEAD)
    }

    /// Checks that the log takes a command. A program checks each before it proposes it, because openraft stops a node
    /// whose log refuses an entry.
    ///
    /// # Errors
    /// `InvalidInput` if the command is longer than [`command_len_max`](Self::command_len_max), or postcard does not
    /// support it.
    pub fn check_command(&self, command: &C::D) -> io::Result<()> {
        let (len, max) = (encoded_len(command)?, self.command_len_max());
        if len > max {
            let why = format!("the command has {len} bytes, at most {max} are allowed");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(())
    }
}

impl<C: RaftTypeConfig> RaftLogReader<C> for LogStore<C> {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<C::Entry>> {
        self.entries(range).map(|entry| self.entry(entry?)).collect()
    }

    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = io::Result<C::Entry>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let log = self.clone();
        futures_util::stream::iter(self.entries(range).map(move |entry| log.entry(entry?)))
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<C::Entry>> {
        let (mut entries, mut len) = (Vec::new(), 0);
        for entry in self.entries(start..end) {
            let entry = entry?;
            len += entry.1.len();
            if len > READ_LEN && !entries.is_empty() {
                break;
            }
            entries.push(self.entry(entry)?);
        }
        Ok(entries)
    }

    async fn read_vote(&mut self) -> io::Result<Option<VoteOf<C>>> {
        self.field(Field::Vote)
    }
}

impl<C: RaftTypeConfig> RaftLogStorage<C> for LogStore<C> {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<C>> {
        let purged = self.field(Field::Purged)?;
        let last = self.log.last().map_err(io_error)?.map(|last| self.entry(last)).transpose()?;
        Ok(LogState { last_log_id: last.map(|last| last.log_id()).or(purged.clone()), last_purged_log_id: purged })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &VoteOf<C>) -> io::Result<()> {
        self.log.set_field(Field::Vote, &encode(vote)?).map_err(io_error)?;
        let (done, durable) = C::oneshot();
        self.syncer.on_durable(move |synced| {
            let _ = done.send(synced);
        });
        durable.await.map_err(|_| io::Error::other("the syncer ended"))?
    }

    async fn save_committed(&mut self, committed: Option<LogIdOf<C>>) -> io::Result<()> {
        self.log.set_field(Field::Committed, &encode(&committed)?).map_err(io_error)
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogIdOf<C>>> {
        Ok(self.field(Field::Committed)?.flatten())
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<C>) -> io::Result<()>
    where
        I: IntoIterator<Item = C::Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries = entries.into_iter().map(|entry| Ok((entry.index(), encode(&entry)?)));
        let (mut commit, mut len, len_max) = (Vec::new(), 0, self.commit_len());
        for (index, entry) in entries.collect::<io::Result<Vec<_>>>()? {
            len += entry.len() + ENTRY_OVERHEAD;
            if len > len_max && !commit.is_empty() {
                self.log.append(std::mem::take(&mut commit)).map_err(io_error)?;
                len = entry.len() + ENTRY_OVERHEAD;
            }
            commit.push((index, entry));
        }
        self.log.append(commit).map_err(io_error)?;
        self.syncer.on_durable(|synced| callback.io_completed(synced));
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogIdOf<C>>) -> io::Result<()> {
        match last_log_id.map_or(Some(0), |last| last.index.checked_add(1)) {
            Some(first) => self.log.truncate_from(first).map_err(io_error),
            None => Ok(()),
        }
    }

    async fn purge(&mut self, log_id: LogIdOf<C>) -> io::Result<()> {
        let purged: Option<LogIdOf<C>> = self.field(Field::Purged)?;
        let first = purged.map_or(0, |purged| purged.index.saturating_add(1));
        self.log.purge(first, log_id.index, &encode(&log_id)?).map_err(io_error)
    }
}

/// What was applied last, and the membership at that position.
type Position<C> = (Option<LogIdOf<C>>, StoredMembershipOf<C>);

/// A snapshot of this node, and what it contains.
type Current<C> = Option<(SnapshotMetaOf<C>, StateSnapshot)>;

/// The replicated state of one group, for openraft.
#[derive(Debug)]
pub struct StateMachine<C: RaftTypeConfig, A> {
    store: Arc<StateStore<A>>,
    position: Position<C>,
    /// The last snapshot that was built or installed. It keeps replaced versions of records until the next one.
    current: Arc<Mutex<Current<C>>>,
}

impl<C, A> StateMachine<C, A>
where
    C: RaftTypeConfig,
    A: Application<Command = C::D, Response = C::R>,
{
    /// Opens the state of the group to which `log` belongs: in the same database, because a purged log must not be
    /// more durable than the state.
    ///
    /// # Errors
    /// `InvalidData` if the stored position cannot be decoded; otherwise those of [`Database::open_partition`].
    pub fn open(log: &LogStore<C>, application: A) -> io::Result<StateMachine<C, A>> {
        let store = Arc::new(StateStore::open(log.log.clone(), application)?);
        let position = decode_position::<C>(store.position()?.as_deref())?;
        Ok(StateMachine { store, position, current: Arc::default() })
    }

    /// Reads the state.
    pub fn reader(&self) -> StateReader {
        self.store.reader()
    }

    /// Makes receivers of snapshots.
    pub fn receivers(&self) -> SnapshotReceivers<A> {
        SnapshotReceivers(Arc::clone(&self.store))
    }

    /// The state of another node of this process, as its partitions here.
    fn copy(&self, snapshot: &SnapshotData) -> io::Result<ReceivedState> {
        let mut receiver = SnapshotReceiver::new(&self.store)?;
        for frame in snapshot.frames(&[])?.into_iter().flatten() {
            if let Some(SnapshotData(Data::Received(state))) = receiver.receive(&frame?)? {
                return Ok(state);
            }
        }
        Err(io::Error::other("a snapshot without a last frame"))
    }

    fn own_snapshot(&self) -> io::Result<(SnapshotMetaOf<C>, StateSnapshot)> {
        let (snapshot, position) = self.store.snapshot()?;
        let (last_log_id, last_membership) = decode_position::<C>(position.as_deref())?;
        Ok((SnapshotMeta { last_log_id, last_membership }, snapshot))
    }
}

fn decode_position<C: RaftTypeConfig>(bytes: Option<&[u8]>) -> io::Result<Position<C>> {
    bytes.map_or_else(|| Ok((None, StoredMembership::default())), |bytes| decode(bytes, "applied state"))
}

/// Makes receivers of snapshots for one group. Clones make receivers for the same group.
#[derive(Debug)]
pub struct SnapshotReceivers<A>(Arc<StateStore<A>>);

impl<A> Clone for SnapshotReceivers<A> {
    fn clone(&self) -> Self {
        SnapshotReceivers(Arc::clone(&self.0))
    }
}

impl<A: Application> SnapshotReceivers<A> {
    /// Begins to receive a snapshot.
    ///
    /// # Errors
    /// Those of [`Database::open_partition`].
    pub fn receive(&self) -> io::Result<SnapshotReceiver<A>> {
        SnapshotReceiver::new(&self.0)
    }
}

impl<C, A> RaftStateMachine<C> for StateMachine<C, A>
where
    C: RaftTypeConfig<Entry = Entry<CommittedLeaderIdOf<C>, EntryPayloadOf<C>>>,
    C::R: Default,
    A: Application<Command = C::D, Response = C::R>,
{
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = SnapshotBuilder<C>;

    async fn applied_state(&mut self) -> io::Result<Position<C>> {
        Ok(self.position.clone())
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<C>>> + Unpin + OptionalSend,
    {
        while let Some(entry) = entries.next().await {
            let (entry, responder) = entry?;
            let membership = match &entry.payload {
                EntryPayload::Membership(members) => StoredMembership::new(Some(entry.log_id.clone()), members.clone()),
                _ => self.position.1.clone(),
            };
            let command = match &entry.payload {
                EntryPayload::Normal(command) => Some(command),
                _ => None,
            };
            let position = (Some(entry.log_id.clone()), membership);
            let response = self.store.apply(command, &encode(&position)?)?;
            self.position = position;
            if let Some(responder) = responder {
                responder.send(response.unwrap_or_default());
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder<C> {
        // Here and not in the builder, because this call is between two entries.
        SnapshotBuilder { built: Some(self.own_snapshot()), current: Arc::clone(&self.current) }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMetaOf<C>, snapshot: SnapshotData) -> io::Result<()> {
        let position = (meta.last_log_id.clone(), meta.last_membership.clone());
        let state = match snapshot.0 {
            Data::Received(state) => state,
            Data::Own(_) => self.copy(&snapshot)?,
        };
        self.store.install(state, &encode(&position)?)?;
        self.position = position;
        let own = self.own_snapshot()?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(own);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<SnapshotOf<C, SnapshotData>>> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(current.clone().map(|(meta, snapshot)| Snapshot { meta, snapshot: SnapshotData(Data::Own(snapshot)) }))
    }
}

/// A snapshot that is to be reported as built.
#[derive(Debug)]
pub struct SnapshotBuilder<C: RaftTypeConfig> {
    built: Option<io::Result<(SnapshotMetaOf<C>, StateSnapshot)>>,
    current: Arc<Mutex<Current<C>>>,
}

impl<C: RaftTypeConfig> RaftSnapshotBuilder<C> for SnapshotBuilder<C> {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> io::Result<SnapshotOf<C, SnapshotData>> {
        let built = self.built.take().ok_or_else(|| io::Error::other("a builder builds one snapshot"))?;
        let (meta, snapshot) = built?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // A newer one may have been installed meanwhile.
        if current.as_ref().is_none_or(|(current, _)| current.last_log_id <= meta.last_log_id) {
            *current = Some((meta.clone(), snapshot.clone()));
        }
        drop(current);
        Ok(Snapshot { meta, snapshot: SnapshotData(Data::Own(snapshot)) })
    }
}
