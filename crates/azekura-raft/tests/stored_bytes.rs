//! Stored and sent bytes do not change: those of a group and of a snapshot, in `testdata/stored_bytes.txt`, which
//! `UPDATE=1` rewrites.

use azekura::testing::{MemFs, check_script, parse_script};
use azekura::{Batch, Config, Database, PartitionCreateOptions};
use azekura_raft::{Application, LogStore, SnapshotData, State, StateMachine, Syncer};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, RaftLogStorage, RaftStateMachine};
use openraft::testing::{blank_ent, log_id, membership_ent};
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::{EntryOf, SnapshotMetaOf, VoteOf};
use openraft::{EntryPayload, RaftLogReader, RaftSnapshotBuilder, SnapshotMeta, StoredMembership};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

/// Commands are `KEY=VALUE`. A second partition has the keys by their values.
struct Store;

impl Application for Store {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        ["values", "keys"].map(|name| (name.to_owned(), PartitionCreateOptions::default())).to_vec()
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &String) -> azekura::Result<String> {
        let (key, value) = command.split_once('=').unwrap();
        batch.insert(state.partition("values").unwrap(), key, value);
        batch.insert(state.partition("keys").unwrap(), value, key);
        Ok(String::new())
    }
}

struct Node {
    database: Database,
    log: LogStore<Types>,
    state: StateMachine<Types, Store>,
}

fn new_database() -> Database {
    Config::new("/raft").fs(Arc::new(MemFs::new())).open().unwrap()
}

impl Node {
    fn open(database: Database) -> Node {
        let log = LogStore::open(&database, 7, Default::default(), Arc::new(Syncer::inline(|| Ok(())))).unwrap();
        let state = StateMachine::open(&log, Store).unwrap();
        Node { database, log, state }
    }

    async fn append(&mut self, entry: EntryOf<Types>) {
        self.log.append([entry], IOFlushed::noop()).await.unwrap();
    }

    async fn snapshot(&mut self) -> SnapshotData {
        self.state.get_snapshot_builder().await.build_snapshot().await.unwrap().snapshot
    }

    async fn run(&mut self, command: &str, output: &mut String) {
        let words: Vec<&str> = command.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        let id = |term, index| log_id::<Types>(term, 1, index);
        match words[0] {
            "membership" => {
                let configs = vec![BTreeSet::from([1, 2, 300])];
                self.append(membership_ent::<Types>(number(1), 1, number(2), configs)).await;
            }
            "blank" => self.append(blank_ent::<Types>(number(1), 1, number(2))).await,
            "append" => self.append(EntryOf::<Types>::new_normal(id(number(1), number(2)), words[3].into())).await,
            "vote" => self.log.save_vote(&VoteOf::<Types>::new(number(1), number(2))).await.unwrap(),
            "commit" => self.log.save_committed(Some(id(number(1), number(2)))).await.unwrap(),
            "apply" => {
                let entries = self.log.try_get_log_entries(number(1)..=number(2)).await.unwrap();
                let entries: Vec<_> = entries.into_iter().map(|entry| Ok((entry, None))).collect();
                self.state.apply(futures_util::stream::iter(entries)).await.unwrap();
            }
            "purge" => self.log.purge(id(number(1), number(2))).await.unwrap(),
            "partitions" => {
                for name in self.database.list_partitions() {
                    let partition = self.database.open_partition(&name, Default::default()).unwrap();
                    for pair in partition.iter() {
                        let (key, value) = pair.unwrap();
                        writeln!(output, "{name} {} {}", hex(&key), hex(&value)).unwrap();
                    }
                }
            }
            "frames" => {
                let mut receiver = self.state.receivers().receive().unwrap();
                let frames = self.snapshot().await.frames(&[]).unwrap().unwrap();
                for frame in frames.frame_len(number(1) as usize) {
                    let frame = frame.unwrap();
                    writeln!(output, "frame {}", hex(&frame)).unwrap();
                    receiver.receive(&frame).unwrap();
                    writeln!(output, "position {}", hex(&receiver.position().unwrap())).unwrap();
                }
            }
            unknown => panic!("{unknown} is no command"),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/stored_bytes.txt")
}

#[test]
fn bytes_are_written_as_before() {
    check_script(&script(), |script| {
        let mut node = Node::open(new_database());
        let mut blocks = Vec::new();
        for block in parse_script(script) {
            let mut output = String::new();
            for command in block.iter().filter(|line| !line.starts_with('#')) {
                Types::run(async { node.run(command, &mut output).await });
            }
            let separator = if output.is_empty() { "" } else { "----\n" };
            blocks.push(format!("{}\n{separator}{output}", block.join("\n")));
        }
        blocks.join("\n")
    });
}

/// The lines of the outputs that begin with a word, without it.
fn lines<'a>(script: &'a str, word: &str) -> Vec<Vec<&'a str>> {
    let lines = script.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.filter(|words| words[0] == word).map(|words| words[1..].to_vec()).collect()
}

#[test]
fn bytes_of_before_are_read() {
    let script = std::fs::read_to_string(script()).unwrap();
    let database = new_database();
    for name in ["raft.log", "raft.meta", "raft.state.7.0.keys", "raft.state.7.0.values"] {
        let partition = database.open_partition(name, PartitionCreateOptions::default()).unwrap();
        for pair in lines(&script, name) {
            partition.insert(bytes(pair[0]), bytes(pair[1])).unwrap();
        }
    }
    let mut node = Node::open(database);
    Types::run(async {
        let id = |index| log_id::<Types>(2, 1, index);
        assert_eq!(node.log.read_vote().await.unwrap(), Some(VoteOf::<Types>::new(3, 2)));
        assert_eq!(node.log.read_committed().await.unwrap(), Some(id(4)));
        let stored = node.log.get_log_state().await.unwrap();
        assert_eq!((stored.last_purged_log_id, stored.last_log_id), (Some(log_id::<Types>(1, 1, 1)), Some(id(6))));
        let entries = node.log.try_get_log_entries(..).await.unwrap();
        let payloads = entries.iter().map(|entry| match &entry.payload {
            EntryPayload::Blank => "blank".to_owned(),
            EntryPayload::Normal(command) => command.clone(),
            EntryPayload::Membership(members) => format!("{:?}", members.voter_ids().collect::<Vec<_>>()),
        });
        assert!(payloads.eq(["blank", "a=1", "b=2", "a=3", "[1, 2, 300]"]));
        let (applied, membership) = node.state.applied_state().await.unwrap();
        assert_eq!(applied, Some(id(4)));
        assert!(membership.voter_ids().eq([1, 2, 300]), "{membership}");
    });
    assert_state(&node);

    let mut receiving = Node::open(new_database());
    let mut receiver = receiving.state.receivers().receive().unwrap();
    let (frames, positions) = (lines(&script, "frame"), lines(&script, "position"));
    let received = frames.iter().zip(positions).find_map(|(frame, position)| {
        let received = receiver.receive(&bytes(frame[0])).unwrap();
        assert_eq!(hex(&receiver.position().unwrap()), position[0]);
        received
    });
    let meta: SnapshotMetaOf<Types> = SnapshotMeta { last_log_id: None, last_membership: StoredMembership::default() };
    Types::run(async { receiving.state.install_snapshot(&meta, received.unwrap()).await.unwrap() });
    assert_state(&receiving);
}

fn assert_state(node: &Node) {
    let state = node.state.reader().current();
    for (name, expected) in [("values", [("a", "1"), ("b", "2")]), ("keys", [("1", "a"), ("2", "b")])] {
        let pairs = state.partition(name).unwrap().iter().map(|pair| pair.unwrap());
        let expected = expected.map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec()));
        assert!(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).eq(expected), "{name}");
    }
}
