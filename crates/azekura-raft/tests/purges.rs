//! What a log costs whose entries are purged: bytes written, and blocks that a read of its first entries visits.

use azekura::testing::{MemFs, SeededRng};
use azekura::{Config, Database, PartitionCreateOptions, PersistMode};
use azekura_raft::{LogStore, Syncer};
use openraft::RaftLogReader;
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::testing::log_id;
use openraft::type_config::TypeConfigExt;
use openraft::type_config::alias::EntryOf;
use std::io;
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

const ENTRIES: u64 = 60_000;
const PURGE_AFTER: u64 = 5_000;
/// Entries that stay, as in azekura-node.
const KEPT: u64 = PURGE_AFTER / 5;
const COMMAND_LEN: usize = 200;
/// Entries that a scan reads.
const SCANNED: u64 = 100;

struct Cost {
    /// Bytes of WAL and tables for each byte of a commit of entries, including a flush at the end.
    written: f64,
    /// Data blocks that a scan of the first entries visited, after each purge.
    blocks: Vec<u64>,
}

/// Data blocks that were visited, cached or not.
fn blocks_visited(database: &Database) -> u64 {
    let data = database.metrics().cache.data;
    data.hits + data.misses
}

/// Appends all entries, each append synced, and purges them as a node does.
fn run(options: PartitionCreateOptions, per_append: usize) -> Cost {
    let database = Config::new("/raft").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
    let own = database.clone();
    let syncer = Syncer::inline(move || own.persist(PersistMode::SyncData).map_err(io::Error::other));
    let mut log: LogStore<Types> = LogStore::open(&database, 1, options, Arc::new(syncer)).unwrap();
    let (mut rng, mut entries) = (SeededRng::new(1), Vec::new());
    let (mut blocks, mut purge_bytes) = (Vec::new(), 0);
    Types::run(async {
        for index in 1..=ENTRIES {
            // It hardly compresses.
            let command = (0..COMMAND_LEN).map(|_| char::from(33 + rng.below(90u64) as u8)).collect();
            entries.push(EntryOf::<Types>::new_normal(log_id::<Types>(1, 1, index), command));
            if entries.len() == per_append {
                log.append(std::mem::take(&mut entries), IOFlushed::noop()).await.unwrap();
            }
            if index % PURGE_AFTER == 0 {
                let before = database.metrics().user_bytes;
                log.purge(log_id::<Types>(1, 1, index - KEPT)).await.unwrap();
                purge_bytes += database.metrics().user_bytes - before;
                while database.step().unwrap() {}
                let (before, first) = (blocks_visited(&database), index - KEPT + 1);
                let found = log.try_get_log_entries(first..first + SCANNED).await.unwrap();
                assert_eq!((found.len() as u64, found[0].index()), (SCANNED, first));
                blocks.push(blocks_visited(&database) - before);
            }
        }
    });
    database.open_partition("raft.log", PartitionCreateOptions::default()).unwrap().flush().unwrap();
    let metrics = database.metrics();
    let written = metrics.wal_bytes + metrics.flushed_bytes + metrics.compaction_bytes_written;
    Cost { written: written as f64 / (metrics.user_bytes - purge_bytes) as f64, blocks }
}

/// Regression: a purge of 5,000 entries flushed the memtable, and with it most entries that the next one removed.
#[test]
fn purged_entries_stay_out_of_tables() {
    for (per_append, max) in [(1, 1.4), (8, 1.2)] {
        let Cost { written, blocks } = run(PartitionCreateOptions::default(), per_append);
        println!("{per_append} entries per append: {written:.2} bytes written per byte, blocks of scans {blocks:?}");
        assert!(written <= max, "{written}");
        assert!(blocks.iter().all(|blocks| *blocks == 0), "all entries are in the memtable: {blocks:?}");
    }
}

/// With memtables so small that most entries are flushed before they are purged.
#[test]
fn scans_visit_no_blocks_of_purged_entries() {
    let Cost { written, blocks } = run(PartitionCreateOptions::default().max_memtable_size(128 << 10), 8);
    println!("small memtables: {written:.2} bytes written per byte, blocks of scans {blocks:?}");
    assert!(blocks.iter().all(|visited| *visited <= blocks[0] + 4), "{blocks:?}");
}
