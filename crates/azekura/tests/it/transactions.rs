//! Transactions, conditional batches and atomic operations on single keys, on LSM partitions and pools.
//!
//! Modules, in reading order: `calls` (what the calls return), `conflicts` (which changes interfere with which reads),
//! `turns` (exclusive transactions), `model` (random transactions against an oracle), `histories` (concurrent
//! transactions, judged by the checker `adya`).

mod calls;
mod conflicts;
mod histories;
mod model;
mod turns;

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions};

use crate::testkit::test_dir::TestDir;

/// A database in memory with background work by hand, and partitions of both kinds.
struct Fixture {
    dir: TestDir,
    db: Database,
    lsm: Partition,
    pool: Partition,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = TestDir::in_memory();
        let db = Config::new(&dir.dir).fs(dir.fs.clone()).workers(0).memory_budget(16 << 20).open().unwrap();
        let lsm = db.open_partition("lsm", lsm_options()).unwrap();
        let pool = db.open_partition("pool", pool_options()).unwrap();
        Fixture { dir, db, lsm, pool }
    }

    fn partitions(&self) -> [&Partition; 2] {
        [&self.lsm, &self.pool]
    }

    fn other(&self, partition: &Partition) -> &Partition {
        if partition.name == self.lsm.name { &self.pool } else { &self.lsm }
    }
}

fn lsm_options() -> PartitionCreateOptions {
    PartitionCreateOptions::default().block_size(256)
}

fn pool_options() -> PartitionCreateOptions {
    let sizes = PmemOptions::default().max_size(32 << 20).growth_step(64 << 10);
    PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))
}
