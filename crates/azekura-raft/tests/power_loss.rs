//! Power loss and kills at every operation of the file system that openraft's calls make: appends, a vote, a
//! truncation, a purge, the installation of a snapshot, and the flushes after them. What is found at the next open is
//! the state after one of these calls, and not before the last one that was acknowledged as durable. A second loss of
//! power takes nothing of it.

use azekura::testing::{MemFs, Survival, TestEnv};
use azekura::{Batch, Config, Database, EngineType, PartitionCreateOptions, PersistMode, PmemOptions};
use azekura_raft::{Application, LogStore, State, StateMachine, Syncer};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, RaftLogStorage, RaftStateMachine};
use openraft::testing::log_id;
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::{EntryOf, SnapshotMetaOf, VoteOf};
use openraft::{RaftLogReader, RaftSnapshotBuilder, SnapshotMeta, StoredMembership};
use std::fmt::Debug;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

/// Commands are numbers with a text of any length. One partition has a record of each, the other one their count.
#[derive(Clone, Debug)]
struct Commands(PartitionCreateOptions);

impl Application for Commands {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        ["count", "records"].map(|name| (name.to_owned(), self.0.clone())).to_vec()
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &String) -> azekura::Result<String> {
        let (count, records) = (state.partition("count").unwrap(), state.partition("records").unwrap());
        let before = count.get("count")?.map_or(0, |count| u64::from_be_bytes(count[..].try_into().unwrap()));
        batch.insert(count, "count", (before + 1).to_be_bytes());
        batch.insert(records, &command[..4], command);
        Ok(String::new())
    }
}

fn command(index: u64) -> String {
    format!("{index:04} {}", "x".repeat(500))
}

struct Node {
    options: PartitionCreateOptions,
    database: Database,
    log: LogStore<Types>,
    state: StateMachine<Types, Commands>,
}

/// Term and index of an entry.
type Id = (u64, u64);

/// What a node has stored.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stored {
    term: Option<u64>,
    purged: Option<Id>,
    log: Vec<Id>,
    applied: Option<Id>,
}

/// A call of openraft, or what the database does by itself.
#[derive(Clone, Copy, Debug)]
enum Call {
    /// Entries of a term, with the first and the last index.
    Append(u64, (u64, u64)),
    Vote(u64),
    /// Removes the entries after this index.
    Truncate(u64),
    /// Applies the entry with this index.
    Apply(u64),
    Purge(Id),
    /// Receives and installs the snapshot of the sender.
    Install,
    Flush,
}

/// The frames of a snapshot after 20 entries of term 2.
struct Sender(Vec<Vec<u8>>);

impl Node {
    fn open(fs: &MemFs, options: &PartitionCreateOptions) -> Node {
        let config = Config::new("/raft").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
        let database = config.wal_segment_size(64 << 10).cache_size(1 << 20).open().unwrap();
        let own = database.clone();
        let syncer = Syncer::inline(move || own.persist(PersistMode::SyncData).map_err(io::Error::other));
        let log = LogStore::open(&database, 7, options.clone(), Arc::new(syncer)).unwrap();
        let state = StateMachine::open(&log, Commands(options.clone())).unwrap();
        Node { options: options.clone(), database, log, state }
    }

    async fn append(&mut self, term: u64, indexes: RangeInclusive<u64>) -> io::Result<()> {
        let entries =
            indexes.map(|index| EntryOf::<Types>::new_normal(log_id::<Types>(term, 1, index), command(index)));
        let (done, durable) = Types::oneshot();
        self.log.append(entries.collect::<Vec<_>>(), IOFlushed::signal(done)).await?;
        durable.await.expect("the callback is called")
    }

    async fn apply(&mut self, index: u64) -> io::Result<()> {
        let entries = self.log.try_get_log_entries(index..=index).await?;
        let entries = entries.into_iter().map(|entry| Ok((entry, None)));
        self.state.apply(futures_util::stream::iter(entries.collect::<Vec<_>>())).await
    }

    /// Whether the call is durable when it has returned.
    async fn call(&mut self, call: Call, sender: &Sender) -> io::Result<bool> {
        match call {
            Call::Append(term, (first, last)) => self.append(term, first..=last).await.map(|()| true),
            Call::Vote(term) => self.log.save_vote(&VoteOf::<Types>::new(term, 1)).await.map(|()| true),
            Call::Truncate(after) => {
                let entries = self.log.try_get_log_entries(after..=after).await?;
                let last = entries.first().map(RaftEntry::log_id);
                self.log.truncate_after(last).await.map(|()| false)
            }
            Call::Apply(index) => self.apply(index).await.map(|()| false),
            Call::Purge((term, index)) => self.log.purge(log_id::<Types>(term, 1, index)).await.map(|()| false),
            Call::Install => {
                let mut receiver = self.state.receivers().receive()?;
                let mut received = None;
                for frame in &sender.0 {
                    received = receiver.receive(frame)?;
                }
                let last_log_id = Some(log_id::<Types>(2, 1, 20));
                let meta: SnapshotMetaOf<Types> =
                    SnapshotMeta { last_log_id, last_membership: StoredMembership::default() };
                self.state.install_snapshot(&meta, received.expect("all frames")).await.map(|()| true)
            }
            Call::Flush => {
                for name in self.database.list_partitions() {
                    let partition = self.database.open_partition(&name, self.options.clone());
                    partition.and_then(|partition| partition.flush()).map_err(io::Error::other)?;
                }
                while self.database.step().map_err(io::Error::other)? {}
                Ok(false)
            }
        }
    }

    /// # Errors
    /// What openraft does not allow.
    async fn stored(&mut self) -> Result<Stored, String> {
        let text = |error: io::Error| error.to_string();
        let vote = self.log.read_vote().await.map_err(text)?;
        let log_state = self.log.get_log_state().await.map_err(text)?;
        let entries = self.log.try_get_log_entries(..).await.map_err(text)?;
        let (applied, _) = self.state.applied_state().await.map_err(text)?;
        let id_of = |id: openraft::type_config::alias::LogIdOf<Types>| (id.leader_id.term, id.index);
        let log: Vec<Id> = entries.iter().map(|entry| id_of(entry.log_id())).collect();
        let (purged, applied) = (log_state.last_purged_log_id.map(id_of), applied.map(id_of));
        let next = purged.map_or(1, |(_, index)| index + 1);
        if !log.iter().map(|(_, index)| *index).eq(next..next + log.len() as u64) {
            return Err(format!("the log has a hole: {purged:?}, {log:?}"));
        }
        if !log.is_sorted() || log.last().copied().or(purged) != log_state.last_log_id.map(id_of) {
            return Err(format!("the log is not in order: {purged:?}, {log:?}, {:?}", log_state.last_log_id));
        }
        if purged > applied {
            return Err(format!("{purged:?} is purged, but the state has {applied:?} only"));
        }
        let state = self.state.reader().current();
        let records = state.partition("records").unwrap().iter().map(|record| record.unwrap().1.to_vec());
        let count = state.partition("count").unwrap().get("count").unwrap();
        let count = count.map_or(0, |count| u64::from_be_bytes(count[..].try_into().unwrap()));
        let index = applied.map_or(0, |(_, index)| index);
        if count != index || !records.eq((1..=index).map(|index| command(index).into_bytes())) {
            return Err(format!("the state is at {applied:?}, but has {count} commands"));
        }
        // The log, its metadata and one generation of the state.
        let names = self.database.list_partitions();
        if names.len() != 4 {
            return Err(format!("partitions are left over: {names:?}"));
        }
        Ok(Stored { term: vote.map(|vote| vote.leader_id.term), purged, log, applied })
    }
}

fn sender(options: &PartitionCreateOptions) -> Sender {
    let mut node = Node::open(&MemFs::new(), options);
    Types::run(async {
        node.append(2, 1..=20).await.unwrap();
        for index in 1..=20 {
            node.apply(index).await.unwrap();
        }
        let snapshot = node.state.get_snapshot_builder().await.build_snapshot().await.unwrap().snapshot;
        let frames = snapshot.frames(&[]).unwrap().unwrap().frame_len(3_000);
        Sender(frames.map(Result::unwrap).collect())
    })
}

/// A disk with ten entries, six of them applied and two purged.
fn prepare(options: &PartitionCreateOptions) -> MemFs {
    let fs = MemFs::new();
    let mut node = Node::open(&fs, options);
    Types::run(async {
        node.append(1, 1..=10).await.unwrap();
        for index in 1..=6 {
            node.apply(index).await.unwrap();
        }
        node.log.purge(log_id::<Types>(1, 1, 2)).await.unwrap();
        node.call(Call::Vote(1), &Sender(Vec::new())).await.unwrap();
    });
    let Node { database, log, state, .. } = node;
    drop((log, state));
    database.close().unwrap();
    fs
}

/// Runs the calls up to the first one that fails. Returns how many were acknowledged as durable, counted to the last of
/// these, and how many may have had an effect.
fn run(node: &mut Node, calls: &[Call], sender: &Sender) -> (usize, usize) {
    Types::run(async {
        let mut durable = 0;
        for (i, call) in calls.iter().enumerate() {
            match node.call(*call, sender).await {
                Ok(true) => durable = i + 1,
                Ok(false) => {}
                Err(_) => return (durable, i + 1),
            }
        }
        (durable, calls.len())
    })
}

/// Loses power at every operation of these calls, in several ways. Returns the number of operations.
fn lose_power_at_every_operation(options: &PartitionCreateOptions, sender: &Sender, calls: &[Call]) -> u64 {
    let disk = prepare(options);
    // What is stored before the first call, and after each.
    let mut node = Node::open(&disk.fork(), options);
    let mut expected = vec![Types::run(async { node.stored().await.unwrap() })];
    for call in calls {
        Types::run(async { node.call(*call, sender).await.unwrap() });
        expected.push(Types::run(async { node.stored().await.unwrap() }));
    }
    drop(node);
    for ops in 0.. {
        let fs = disk.fork();
        let mut node = Node::open(&fs, options);
        fs.freeze_after(Some(ops));
        let (durable, last) = run(&mut node, calls, sender);
        let is_complete = !fs.is_frozen();
        let cut = fs.fork();
        drop(node);
        let random = (0..4).map(|seed| (Survival::Random, ops * 4 + seed));
        let survivals = [Survival::Nothing, Survival::Everything, Survival::DataOnly, Survival::MetadataOnly];
        for (survival, seed) in survivals.map(|survival| (survival, 0)).into_iter().chain(random) {
            let at = format!("{calls:?} after {ops} operations, {survival:?} {seed}");
            let crashed = cut.fork();
            crashed.crash(survival, seed);
            let found = read(&crashed, options).unwrap_or_else(|error| panic!("{at}: {error}"));
            let allowed = &expected[durable..=last];
            assert!(allowed.contains(&found), "{at}: {found:?} is none of {allowed:#?}");
            // openraft takes for durable what it finds.
            crashed.crash(Survival::Nothing, 0);
            let again = read(&crashed, options).unwrap_or_else(|error| panic!("{at}, once more: {error}"));
            assert_eq!(again, found, "{at}: the second power loss takes more");
        }
        if is_complete {
            return ops;
        }
    }
    unreachable!("the calls end")
}

/// Opens a disk and reads what is stored. The power fails before the database is closed.
fn read(fs: &MemFs, options: &PartitionCreateOptions) -> Result<Stored, String> {
    let mut node = Node::open(fs, options);
    let stored = Types::run(async { node.stored().await });
    fs.freeze_after(Some(0));
    stored
}

fn check(options: &PartitionCreateOptions) {
    let sender = sender(options);
    let calls: [&[Call]; 6] = [
        &[Call::Append(1, (11, 13)), Call::Flush],
        &[Call::Vote(2), Call::Flush],
        &[Call::Truncate(7), Call::Flush],
        // A new leader replaces entries.
        &[Call::Vote(2), Call::Truncate(7), Call::Append(2, (8, 9)), Call::Vote(3)],
        &[Call::Apply(7), Call::Apply(8), Call::Purge((1, 8)), Call::Append(1, (11, 11)), Call::Flush],
        &[Call::Install, Call::Purge((2, 20)), Call::Append(2, (21, 21)), Call::Flush],
    ];
    for calls in calls {
        let ops = lose_power_at_every_operation(options, &sender, calls);
        println!("{ops} operations of {calls:?}");
        assert!(ops >= 4, "{calls:?}: {ops} operations");
    }
}

#[test]
fn lsm_power_loss_at_every_operation() {
    check(&PartitionCreateOptions::default().max_memtable_size(16 << 10));
}

#[test]
fn pool_power_loss_at_every_operation() {
    let options = PmemOptions::default().max_size(4 << 20).growth_step(64 << 10);
    check(&PartitionCreateOptions::default().engine(EngineType::Pmem(options)));
}
