//! A small database that contains every kind of file.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{MemFs, TestEnv};
use azekura::{
    CompactionStrategy, CompressionType, Config, DataBlockIndexType, Database, EngineType, FilterPolicy,
    KvSeparationOptions, LeveledOptions, Partition, PartitionCreateOptions, PersistMode, PmemOptions,
};

use crate::testkit::atomic_writes::AtomicWrites;
use crate::testkit::test_dir::{dir_contents, write_file};
use crate::testkit::{HistoryEvent, HistoryWrite, WriteHistory};

pub(super) const DIR: &str = "/db";

pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// A database that was not closed: tables on two levels, blob files, a pool, a WAL with synced and unsynced commits.
pub(super) struct SampleDatabase {
    pub(super) files: Files,
    pub(super) history: WriteHistory,
    /// Number of events that are in tables, so that damage of the WAL cannot remove them.
    pub(super) flushed: usize,
}

pub(super) fn config(fs: Arc<dyn Fs>, salt: u64) -> Config {
    Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).wal_segment_size(64 << 10).cache_size(1 << 20)
}

/// Flushes write some values to blob files; longer values are direct blob writes.
fn separation_options() -> KvSeparationOptions {
    KvSeparationOptions::default().separation_threshold(20).blob_file_target_size(1 << 10).direct_write_threshold(30)
}

/// The options of a partition, by its name.
pub(super) fn options(name: &str) -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().l0_compaction_trigger(2).target_file_size(4 << 10).level_size_multiplier(2);
    let options = PartitionCreateOptions::default()
        .block_size(128)
        .metadata_block_size(64)
        .compaction_strategy(CompactionStrategy::Leveled(leveled));
    match name {
        "plain" => options
            .data_block_index_type(DataBlockIndexType::Fingerprint)
            .compression(CompressionType::None)
            .partition_index_and_filters(true),
        "packed" => options
            .data_block_index_type(DataBlockIndexType::BinaryAndHash)
            .compression(CompressionType::Lz4)
            .restart_interval(4)
            .with_kv_separation(separation_options()),
        "pooled" => {
            let small = PmemOptions::default().max_size(1 << 20).growth_step(4 << 10);
            PartitionCreateOptions::default().engine(EngineType::Pmem(small))
        }
        _ => options
            .data_block_index_type(DataBlockIndexType::BinarySearch)
            .compression(CompressionType::Miniz(6))
            .filter_policy(FilterPolicy::None),
    }
}

const NAMES: [&str; 4] = ["plain", "packed", "zipped", "pooled"];

struct SampleBuilder {
    db: Database,
    partitions: Vec<Partition>,
    history: WriteHistory,
}

impl SampleBuilder {
    /// One commit over all partitions: sets one key of each partition and removes another. It is a batch, a transaction
    /// or a conditional batch.
    fn commit(&mut self, n: u32, mode: PersistMode) {
        let mut writes = Vec::new();
        for name in NAMES {
            let value = format!("value {n} {}", "abcdefgh ".repeat(n as usize % 4)).into_bytes();
            writes.push(HistoryWrite { partition: name.into(), key: format!("key {n:03}").into(), value: Some(value) });
            if n > 3 && n.is_multiple_of(3) {
                writes.push(HistoryWrite {
                    partition: name.into(),
                    key: format!("key {:03}", n - 3).into(),
                    value: None,
                });
            }
        }
        self.history.begin_event(HistoryEvent::Commit(writes.clone()));
        let mut commit = AtomicWrites::begin(&self.db, u64::from(n), mode);
        for write in &writes {
            let part = self.partitions.iter().find(|part| *part.name == write.partition[..]).expect("it is open");
            match &write.value {
                Some(value) => commit.insert(part, &write.key, value),
                None if ["packed", "pooled"].contains(&&*part.name) => commit.remove_range(part, &write.key),
                None => commit.remove(part, &write.key),
            }
        }
        commit.commit().unwrap();
        self.history.acknowledge_event();
        if mode != PersistMode::Buffer {
            self.history.mark_durable();
        }
    }

    /// Ingests entries of one partition.
    fn ingest(&mut self, name: &str, numbers: std::ops::Range<u32>) {
        let write = |n: u32| HistoryWrite {
            partition: name.into(),
            key: format!("key {n:03}").into(),
            value: Some(format!("ingested {n} {}", "abcdefgh ".repeat(n as usize % 4)).into()),
        };
        let writes: Vec<HistoryWrite> = numbers.map(write).collect();
        self.history.begin_event(HistoryEvent::Commit(writes.clone()));
        let part = self.partitions.iter().find(|part| *part.name == *name).expect("it is open");
        part.ingest(writes.iter().map(|write| (&write.key, write.value.as_deref().unwrap_or_default()))).unwrap();
        self.history.acknowledge_event();
        self.history.mark_durable();
    }

    fn flush(&mut self) {
        self.partitions.iter().for_each(|part| part.flush().unwrap());
    }
}

impl SampleDatabase {
    /// Equal values of `salt` produce equal files.
    pub(super) fn new(salt: u64) -> SampleDatabase {
        SampleDatabase::not_closed(salt, true)
    }

    /// The same database, where every commit is in the WAL and writes to all partitions.
    pub(super) fn without_ingests(salt: u64) -> SampleDatabase {
        SampleDatabase::not_closed(salt, false)
    }

    fn not_closed(salt: u64, ingests: bool) -> SampleDatabase {
        let machine = MemFs::new();
        let (builder, flushed) = build(&machine, salt, ingests);
        let mut files = dir_contents(&machine.fork(), Path::new(DIR));
        for (_, bytes) in files.iter_mut().filter(|(name, _)| name.ends_with(".wal")) {
            // Segments are preallocated; the unused part is zeros, and a few of them are enough here.
            let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
            bytes.truncate((used + 100).min(bytes.len()));
        }
        let history = builder.history.clone();
        SampleDatabase { files, history, flushed }
    }

    /// The same database, closed.
    pub(super) fn closed(salt: u64) -> SampleDatabase {
        let machine = MemFs::new();
        let (builder, _) = build(&machine, salt, true);
        let SampleBuilder { db, partitions, mut history } = builder;
        drop(partitions);
        db.close().unwrap();
        history.mark_durable();
        let flushed = history.acknowledged;
        SampleDatabase { files: dir_contents(&machine, Path::new(DIR)), history, flushed }
    }

    /// A new machine with these files.
    pub(super) fn machine(&self) -> MemFs {
        let machine = MemFs::new();
        machine.create_dir_all(Path::new(DIR)).unwrap();
        write_file(&machine, &Path::new(DIR).join("LOCK"), b"");
        for (name, bytes) in &self.files {
            write_file(&machine, &Path::new(DIR).join(name), bytes);
        }
        machine
    }
}

fn build(machine: &MemFs, salt: u64, ingests: bool) -> (SampleBuilder, usize) {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let db = config(Arc::clone(&fs), salt).open().unwrap();
    let mut history = WriteHistory::default();
    let mut partitions = Vec::new();
    for name in NAMES {
        history.begin_event(HistoryEvent::Create(name.into()));
        partitions.push(db.open_partition(name, options(name)).unwrap());
        history.acknowledge_event();
    }
    let mut builder = SampleBuilder { db, partitions, history };
    (0..12).for_each(|n| builder.commit(n, PersistMode::Buffer));
    builder.flush();
    builder.partitions.iter().for_each(|part| part.major_compact().unwrap());
    (12..18).for_each(|n| builder.commit(n, PersistMode::Buffer));
    builder.flush();
    if ingests {
        builder.ingest("plain", 40..46);
        builder.ingest("packed", 10..16);
    }
    let flushed = builder.history.acknowledged;
    (18..22).for_each(|n| builder.commit(n, PersistMode::Buffer));
    builder.commit(22, PersistMode::SyncData);
    builder.history.mark_durable();
    (23..27).for_each(|n| builder.commit(n, PersistMode::Buffer));
    (builder, flushed)
}
