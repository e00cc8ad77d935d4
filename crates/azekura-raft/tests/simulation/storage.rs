//! The log and the state of a node, with planted bugs. All calls are forwarded to azekura-raft.

use crate::totals::SharedTotals;
use azekura::{Batch, Partition, PartitionCreateOptions, Slice};
use azekura_raft::{Application, LogStore, RaftLog, SnapshotBuilder, SnapshotData, State, StateMachine};
use futures_util::Stream;
use openraft::entry::RaftEntry;
use openraft::storage::{EntryResponder, IOFlushed, LeaderBoundedStreamResult, RaftLogStorage, RaftStateMachine};
use openraft::type_config::alias::{
    EntryOf, LeaderIdOf, LogIdOf, SnapshotMetaOf, SnapshotOf, StoredMembershipOf, VoteOf,
};
use openraft::{LogState, OptionalSend, RaftLogReader};
use openraft_rt_sim::SimRuntime;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::ops::{RangeBounds, RangeInclusive};
use std::sync::{Arc, Mutex};

openraft::declare_raft_types!(pub(crate) Types: D = String, R = String, AsyncRuntime = SimRuntime);

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
    /// A snapshot is installed, but what was applied last is stored as before.
    UnplacedSnapshot,
    /// Power loss undoes a truncation, although votes and entries that were written after it are durable.
    LostTruncation,
    /// A node becomes a candidate without asking before whether it would be elected.
    NoPreVote,
}

/// Keys have lists of numbers: the command `KEY NUMBER` appends one. A second partition has a record of each number.
#[derive(Debug)]
pub(crate) struct Lists {
    pub(crate) lists: PartitionCreateOptions,
    pub(crate) numbers: PartitionCreateOptions,
}

impl Application for Lists {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        vec![("numbers".into(), self.numbers.clone()), ("lists".into(), self.lists.clone())]
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &String) -> azekura::Result<String> {
        let (key, number) = command.split_once(' ').expect("commands are made by `append`");
        let number = number.parse::<u64>().expect("made by `append`");
        let lists = partition_of(state, "lists");
        let mut list = lists.get(key)?.map_or_else(Vec::new, |list| list.to_vec());
        list.extend_from_slice(&number.to_le_bytes());
        batch.insert(lists, key, list);
        batch.insert(partition_of(state, "numbers"), number.to_be_bytes(), key);
        Ok(String::new())
    }
}

pub(crate) fn append(key: u8, number: u64) -> String {
    format!("{key} {number}")
}

fn partition_of<'a>(state: &'a State, name: &str) -> &'a Partition {
    state.partition(name).expect("named in `partitions`")
}

fn decode(list: &[u8]) -> Vec<u64> {
    list.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().expect("8 bytes"))).collect()
}

/// The list of a key.
pub(crate) fn list_in(state: &State, key: u8) -> azekura::Result<Vec<u64>> {
    Ok(partition_of(state, "lists").get(key.to_string())?.map_or_else(Vec::new, |list| decode(&list)))
}

/// All lists. An error if the second partition has other numbers.
pub(crate) fn lists_in(state: &State) -> Result<BTreeMap<u8, Vec<u64>>, String> {
    let key_of = |key: &[u8]| String::from_utf8_lossy(key).parse::<u8>().expect("a number");
    let (mut lists, mut numbers) = (BTreeMap::new(), Vec::new());
    for pair in partition_of(state, "lists").iter() {
        let (key, list) = pair.map_err(|error| error.to_string())?;
        lists.insert(key_of(&key), decode(&list));
    }
    for pair in partition_of(state, "numbers").iter() {
        let (number, key) = pair.map_err(|error| error.to_string())?;
        numbers.push((u64::from_be_bytes(number[..].try_into().expect("8 bytes")), key_of(&key)));
    }
    let mut in_lists: Vec<_> = lists.iter().flat_map(|(key, list)| list.iter().map(|number| (*number, *key))).collect();
    in_lists.sort_unstable();
    if in_lists == numbers { Ok(lists) } else { Err(format!("the partitions differ: {lists:?}, {numbers:?}")) }
}

/// Entries of a group that a node truncated and no later entry replaced.
pub(crate) type TruncatedEntries = Arc<Mutex<BTreeMap<u64, Slice>>>;

/// The log of a node. With a planted bug, appends or votes are not synced.
#[derive(Clone)]
pub(crate) struct NodeLog {
    pub(crate) appends: LogStore<Types>,
    pub(crate) votes: LogStore<Types>,
    pub(crate) raw: RaftLog,
    pub(crate) truncated: TruncatedEntries,
    pub(crate) totals: SharedTotals,
}

impl NodeLog {
    /// Writes truncated entries again, as if their truncation was lost.
    pub(crate) fn undo_truncation(&self) -> azekura::Result<()> {
        let last = self.raw.last()?.map(|(index, _)| index);
        let truncated = std::mem::take(&mut *self.truncated.lock().unwrap());
        self.raw.append(truncated.into_iter().filter(|(index, _)| Some(*index) > last))
    }
}

impl RaftLogReader<Types> for NodeLog {
    async fn leader_bounded_stream<RB>(
        &mut self,
        leader: LeaderIdOf<Types>,
        range: RB,
    ) -> impl Stream<Item = LeaderBoundedStreamResult<Types>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        self.appends.leader_bounded_stream(leader, range).await
    }

    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = io::Result<EntryOf<Types>>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        self.totals.lock().unwrap().count("streams of entries");
        self.appends.entries_stream(range).await
    }

    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<EntryOf<Types>>> {
        self.appends.try_get_log_entries(range).await
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<EntryOf<Types>>> {
        self.totals.lock().unwrap().count("limited reads of entries");
        self.appends.limited_get_log_entries(start, end).await
    }

    async fn read_vote(&mut self) -> io::Result<Option<VoteOf<Types>>> {
        self.votes.read_vote().await
    }

    async fn get_key_log_ids(&mut self, range: RangeInclusive<LogIdOf<Types>>) -> io::Result<Vec<LogIdOf<Types>>> {
        self.appends.get_key_log_ids(range).await
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
        I: IntoIterator<Item = EntryOf<Types>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<_> = entries.into_iter().collect();
        for entry in &entries {
            self.truncated.lock().unwrap().remove(&entry.index());
        }
        self.appends.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogIdOf<Types>>) -> io::Result<()> {
        let first = last_log_id.map_or(0, |last| last.index + 1);
        let removed: Result<Vec<_>, _> = self.raw.entries(first..).collect();
        let removed = removed.map_err(io::Error::other)?;
        self.appends.truncate_after(last_log_id).await?;
        if !removed.is_empty() {
            self.totals.lock().unwrap().count("truncations");
            self.truncated.lock().unwrap().extend(removed);
        }
        Ok(())
    }

    async fn purge(&mut self, log_id: LogIdOf<Types>) -> io::Result<()> {
        self.appends.purge(log_id).await?;
        self.totals.lock().unwrap().count("purges");
        Ok(())
    }
}

/// The state of a node. With a planted bug, an installed snapshot has no position.
pub(crate) struct NodeState {
    pub(crate) inner: StateMachine<Types, Lists>,
    pub(crate) bug: Bug,
    pub(crate) totals: SharedTotals,
}

impl RaftStateMachine<Types> for NodeState {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = SnapshotBuilder<Types>;

    async fn applied_state(&mut self) -> io::Result<(Option<LogIdOf<Types>>, StoredMembershipOf<Types>)> {
        self.inner.applied_state().await
    }

    async fn apply<S>(&mut self, entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<Types>>> + Unpin + OptionalSend,
    {
        self.inner.apply(entries).await
    }

    async fn try_create_snapshot_builder(&mut self, force: bool) -> Option<SnapshotBuilder<Types>> {
        self.inner.try_create_snapshot_builder(force).await
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder<Types> {
        self.inner.get_snapshot_builder().await
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMetaOf<Types>, snapshot: SnapshotData) -> io::Result<()> {
        let mut meta = meta.clone();
        if self.bug == Bug::UnplacedSnapshot {
            meta.last_log_id = self.inner.applied_state().await?.0;
        }
        self.inner.install_snapshot(&meta, snapshot).await?;
        self.totals.lock().unwrap().count("snapshots installed");
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<SnapshotOf<Types, SnapshotData>>> {
        self.inner.get_current_snapshot().await
    }
}
