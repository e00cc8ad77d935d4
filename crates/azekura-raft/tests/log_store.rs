//! What openraft's suite does not test of the log and the state.

use azekura::testing::MemFs;
use azekura::{Batch, Config, Database, PartitionCreateOptions};
use azekura_raft::{Application, LogStore, RaftLog, State, StateMachine, Syncer};
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, RaftLogStorage, RaftStateMachine};
use openraft::testing::log_id;
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::EntryOf;
use openraft::{RaftLogReader, RaftTypeConfig};
use std::io::ErrorKind;
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

type Entry = <Types as RaftTypeConfig>::Entry;

fn open(fs: &MemFs) -> (Database, LogStore<Types>) {
    let database = Config::new("/raft").fs(Arc::new(fs.clone())).memory_budget(1 << 20).open().unwrap();
    let syncer = Arc::new(Syncer::inline(|| Ok(())));
    let log = LogStore::open(&database, 7, Default::default(), syncer).unwrap();
    (database, log)
}

fn entry(index: u64, len: usize) -> Entry {
    EntryOf::<Types>::new_normal(log_id::<Types>(1, 1, index), "x".repeat(len))
}

/// Regression: openraft appends hundreds of entries at once, which may be more than a commit may have. That stopped the
/// node.
#[test]
fn append_may_be_larger_than_a_commit() {
    let (_database, mut log) = open(&MemFs::new());
    let entries: Vec<Entry> = (1..=9).map(|index| entry(index, log.command_len_max() - 8)).collect();
    Types::run(async {
        log.append(entries.clone(), IOFlushed::noop()).await.unwrap();
        let stored = log.try_get_log_entries(..).await.unwrap();
        assert!(stored == entries);
    });
}

#[test]
fn command_that_the_log_refuses_is_found() {
    let (_database, mut log) = open(&MemFs::new());
    let max = log.command_len_max();
    // Postcard adds its length, in 3 bytes, and the version.
    log.check_command(&"x".repeat(max - 4)).unwrap();
    let error = log.check_command(&"x".repeat(max - 3)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains(&format!("has {} bytes", max + 1)), "{error}");
    Types::run(async {
        log.append([entry(1, max - 4)], IOFlushed::noop()).await.unwrap();
        let error = log.append([entry(2, 4 * max)], IOFlushed::noop()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    });
}

/// Regression: openraft got the entries around a missing one as if they followed each other.
#[test]
fn missing_entry_is_an_error() {
    let (database, mut log) = open(&MemFs::new());
    let raw = RaftLog::open(&database, 7, Default::default()).unwrap();
    Types::run(async {
        log.append([entry(4, 1), entry(5, 1)], IOFlushed::noop()).await.unwrap();
        let (_, stored) = raw.last().unwrap().unwrap();
        raw.append([(7, stored)]).unwrap();
        // Only at the begin and the end of a range entries may be missing.
        assert_eq!(log.try_get_log_entries(1..7).await.unwrap().len(), 2);
        assert_eq!(log.limited_get_log_entries(1, 7).await.unwrap().len(), 2);
        for error in [log.try_get_log_entries(1..8).await.err(), log.limited_get_log_entries(4, 8).await.err()] {
            let error = error.unwrap();
            assert!(error.to_string().contains("entries 6 to 6 of group 7 are missing"), "{error}");
        }
    });
}

/// Counts nothing and stores nothing.
struct Empty;

impl Application for Empty {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        Vec::new()
    }

    fn apply(&self, state: &State, _: &mut Batch, _: &String) -> azekura::Result<String> {
        Ok(state.group().to_string())
    }
}

/// Regression: after the first applied entry a state without partitions could not be opened.
#[test]
fn state_without_partitions_is_opened_again() {
    let fs = MemFs::new();
    for index in 1..3 {
        let (_database, log) = open(&fs);
        let mut state = StateMachine::open(&log, Empty).unwrap();
        Types::run(async {
            let before = state.applied_state().await.unwrap().0.map_or(0, |applied| applied.index);
            assert_eq!(before, index - 1);
            let entries = futures_util::stream::iter([Ok((entry(index, 1), None))]);
            state.apply(entries).await.unwrap();
        });
    }
}
