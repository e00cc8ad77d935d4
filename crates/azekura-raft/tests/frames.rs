//! Transfers of snapshots that are damaged, repeated, reordered or interrupted.

use azekura::testing::MemFs;
use azekura::{Batch, Config, Database, PartitionCreateOptions};
use azekura_raft::snapshot::SnapshotReceiver;
use azekura_raft::{Application, LogStore, SnapshotData, State, StateMachine, Syncer};
use openraft::storage::RaftStateMachine;
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::SnapshotMetaOf;
use openraft::{RaftSnapshotBuilder, SnapshotMeta, StoredMembership};
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

/// Two partitions, which the tests fill directly. Nodes may name them in different orders.
#[derive(Debug)]
struct Two(&'static [&'static str]);

impl Application for Two {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        self.0.iter().map(|name| ((*name).to_owned(), PartitionCreateOptions::default())).collect()
    }

    fn apply(&self, _: &State, _: &mut Batch, _: &String) -> azekura::Result<String> {
        Ok(String::new())
    }
}

fn open(fs: &MemFs) -> (Database, StateMachine<Types, Two>) {
    let database = Config::new("/raft").fs(Arc::new(fs.clone())).open().unwrap();
    let state = open_group(&database, 7, &["second", "first"]);
    (database, state)
}

fn open_group(database: &Database, group: u64, names: &'static [&'static str]) -> StateMachine<Types, Two> {
    let syncer = Arc::new(Syncer::inline(|| Ok(())));
    let log = LogStore::open(database, group, Default::default(), syncer).unwrap();
    StateMachine::open(&log, Two(names)).unwrap()
}

/// A state of several frames, and its frames.
fn sender() -> (Database, StateMachine<Types, Two>, SnapshotData) {
    let database = Config::new("/raft").fs(Arc::new(MemFs::new())).open().unwrap();
    let mut state = open_group(&database, 7, &["first", "second"]);
    let partitions = state.reader().current();
    assert_eq!(partitions.group(), 7);
    for (name, count) in [("first", 9u32), ("second", 2)] {
        for n in 0..count {
            partitions.partition(name).unwrap().insert(n.to_be_bytes(), vec![n as u8; 1 << 20]).unwrap();
        }
    }
    let built = Types::run(async { state.get_snapshot_builder().await.build_snapshot().await.unwrap() });
    (database, state, built.snapshot)
}

fn frames(snapshot: &SnapshotData, position: &[u8]) -> Vec<Vec<u8>> {
    snapshot.frames(position).unwrap().unwrap().map(Result::unwrap).collect()
}

/// Installs a snapshot, and compares the states.
fn install(state: &mut StateMachine<Types, Two>, received: SnapshotData, sender: &StateMachine<Types, Two>) {
    let meta: SnapshotMetaOf<Types> = SnapshotMeta { last_log_id: None, last_membership: StoredMembership::default() };
    Types::run(async { state.install_snapshot(&meta, received).await.unwrap() });
    let (theirs, ours) = (sender.reader().current(), state.reader().current());
    for name in ["first", "second"] {
        let [theirs, ours] = [&theirs, &ours].map(|state| state.partition(name).unwrap().iter());
        assert!(theirs.map(Result::unwrap).eq(ours.map(Result::unwrap)), "{name}");
    }
}

#[test]
fn interrupted_transfer_continues_at_its_position() {
    let (_theirs, sender, snapshot) = sender();
    let (_ours, mut state) = open(&MemFs::new());
    let all = frames(&snapshot, &[]);
    assert!(all.len() >= 4, "{} frames", all.len());
    let mut receiver = state.receivers().receive().unwrap();
    for frame in &all[..2] {
        assert!(receiver.receive(frame).unwrap().is_none());
    }
    // Not with the frames of another snapshot.
    let other = [&[2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0][..], &all[2][16..all[2].len() - 8]].concat();
    let other = [&other[..], &xxhash_rust::xxh3::xxh3_64(&other).to_le_bytes()].concat();
    assert!(receiver.receive(&other).unwrap_err().to_string().contains("another snapshot"));
    let rest = frames(&snapshot, &receiver.position().unwrap());
    assert_eq!(rest, all[2..]);
    let received = rest.iter().find_map(|frame| receiver.receive(frame).unwrap()).unwrap();
    install(&mut state, received, &sender);
}

#[test]
fn wrong_frames_are_refused_and_change_nothing() {
    let (_theirs, sender, snapshot) = sender();
    let (_ours, mut state) = open(&MemFs::new());
    let all = frames(&snapshot, &[]);
    let mut receiver = state.receivers().receive().unwrap();
    let refuses = |receiver: &mut SnapshotReceiver<Two>, frame: &[u8], why: &str| {
        let error = receiver.receive(frame).unwrap_err();
        assert!(error.kind() == std::io::ErrorKind::InvalidData && error.to_string().contains(why), "{error}");
    };
    refuses(&mut receiver, &all[1], "has number 1 instead of 0");
    for frame in &all[..all.len() - 1] {
        for at in [0, 8, 12, 16, 20, frame.len() / 2, frame.len() - 1] {
            let mut damaged = frame.clone();
            damaged[at] ^= 1;
            refuses(&mut receiver, &damaged, "is damaged");
        }
        for len in [0, 7, 8, 15, 16, frame.len() - 1] {
            refuses(&mut receiver, &frame[..len], "is damaged");
        }
        receiver.receive(frame).unwrap();
        refuses(&mut receiver, frame, "has number");
    }
    let received = receiver.receive(all.last().unwrap()).unwrap().unwrap();
    assert!(receiver.receive(all.last().unwrap()).is_err());
    install(&mut state, received, &sender);
}

#[test]
fn frames_with_a_right_checksum_are_checked() {
    let (_ours, state) = open(&MemFs::new());
    let frame = |body: &[u8]| {
        let mut frame = [&[0; 16][..], body].concat();
        frame.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&frame).to_le_bytes());
        frame
    };
    let first = [&5u32.to_le_bytes()[..], b"first"].concat();
    let pair = |key_len: u32, value_len: u32, bytes: &[u8]| {
        [&first[..], &key_len.to_le_bytes(), &value_len.to_le_bytes(), bytes].concat()
    };
    let two = [pair(1, 1, b"bx"), pair(1, 1, b"ax")[first.len()..].to_vec()].concat();
    let third = [&5u32.to_le_bytes()[..], b"third", &pair(1, 1, b"ax")[first.len()..]].concat();
    for (body, why) in [
        (vec![], "too short"),
        (first[..8].to_vec(), "too short"),
        ([&1u32.to_le_bytes()[..], &[0xff]].concat(), "not UTF-8"),
        (first.clone(), "no pairs"),
        (pair(1, 1, b"a"), "too short"),
        (pair(u32::MAX, u32::MAX, b"ax"), "too short"),
        (third, "unknown partition \"third\""),
        ([&u32::MAX.to_le_bytes()[..], &1u64.to_le_bytes()].concat(), "counts other pairs"),
        (u32::MAX.to_le_bytes().to_vec(), "no number of pairs"),
        (two, ""),
    ] {
        let mut receiver = state.receivers().receive().unwrap();
        let before = receiver.position().unwrap();
        let error = receiver.receive(&frame(&body)).unwrap_err();
        assert!(error.to_string().contains(why), "{why}: {error}");
        assert_eq!(receiver.position().unwrap(), before);
    }
}

/// Regression: an installation deleted the partitions of every lower generation, also those of a snapshot that was
/// received and is installed later.
#[test]
fn later_installation_of_an_earlier_receiver_works() {
    let (_theirs, sender, snapshot) = sender();
    let (ours, mut state) = open(&MemFs::new());
    let all = frames(&snapshot, &[]);
    let receive = |receiver: &mut SnapshotReceiver<Two>, frames: &[Vec<u8>]| {
        frames.iter().find_map(|frame| receiver.receive(frame).unwrap())
    };
    let mut earlier = state.receivers().receive().unwrap();
    assert!(receive(&mut earlier, &all[..all.len() - 1]).is_none());
    let mut later = state.receivers().receive().unwrap();
    install(&mut state, receive(&mut later, &all).unwrap(), &sender);
    install(&mut state, receive(&mut earlier, &all[all.len() - 1..]).unwrap(), &sender);
    // Only the log, its metadata and the current state are left.
    assert_eq!(ours.list_partitions().len(), 4, "{:?}", ours.list_partitions());
}

#[test]
fn sender_limits_the_length_of_frames() {
    let (_theirs, sender, snapshot) = sender();
    let (_ours, mut state) = open(&MemFs::new());
    let frames: Vec<_> = snapshot.frames(&[]).unwrap().unwrap().frame_len(1).map(Result::unwrap).collect();
    // A frame for each of 11 pairs, and the last one.
    assert_eq!(frames.len(), 12);
    let mut receiver = state.receivers().receive().unwrap();
    let received = frames.iter().find_map(|frame| receiver.receive(frame).unwrap()).unwrap();
    install(&mut state, received, &sender);
}

/// Regression: a snapshot of group 8 became the state of group 7, because a received state did not tell its group.
#[test]
fn snapshot_of_another_group_is_refused() {
    let (_theirs, _, snapshot) = sender();
    let (ours, mut state) = open(&MemFs::new());
    let other_group = open_group(&ours, 8, &["first", "second"]);
    let (_other, other_node) = open(&MemFs::new());
    let before = ours.list_partitions();
    for other in [other_group, other_node] {
        let mut receiver = other.receivers().receive().unwrap();
        let all = frames(&snapshot, &[]);
        let received = all.iter().find_map(|frame| receiver.receive(frame).unwrap()).unwrap();
        let meta: SnapshotMetaOf<Types> =
            SnapshotMeta { last_log_id: None, last_membership: StoredMembership::default() };
        let error = Types::run(async { state.install_snapshot(&meta, received).await.unwrap_err() });
        assert!(error.to_string().contains("another node or group"), "{error}");
        assert_eq!(state.reader().current().partition("first").unwrap().iter().count(), 0);
    }
    assert_eq!(ours.list_partitions(), before);
}

/// Regression: the partitions stayed until the next open.
#[test]
fn received_snapshot_that_is_dropped_is_deleted() {
    let (_theirs, _, snapshot) = sender();
    let (database, state) = open(&MemFs::new());
    let before = database.list_partitions();
    let mut receiver = state.receivers().receive().unwrap();
    let received = frames(&snapshot, &[]).iter().find_map(|frame| receiver.receive(frame).unwrap());
    drop(receiver);
    assert_ne!(database.list_partitions(), before);
    drop(received);
    assert_eq!(database.list_partitions(), before);
}

#[test]
fn abandoned_transfers_leave_no_partitions() {
    let (_theirs, _, snapshot) = sender();
    let fs = MemFs::new();
    let (database, state) = open(&fs);
    let before = database.list_partitions();
    let mut receiver = state.receivers().receive().unwrap();
    receiver.receive(&frames(&snapshot, &[])[0]).unwrap();
    assert_ne!(database.list_partitions(), before);
    drop(receiver);
    assert_eq!(database.list_partitions(), before);
    // A receiver that its program does not drop, as after a kill.
    std::mem::forget(state.receivers().receive().unwrap());
    assert_ne!(database.list_partitions(), before);
    drop((state, database));
    let crashed = fs.fork();
    crashed.crash(azekura::testing::Survival::Everything, 0);
    assert_eq!(open(&crashed).0.list_partitions(), before);
}
