//! A database that was opened several times: recycled segments, a rewritten manifest, and tables from different
//! opens.

use std::path::Path;
use std::sync::Arc;

use azekura::PersistMode;
use azekura::fs::Fs;
use azekura::testing::{MemFs, Survival};

use super::sample::{DIR, SampleDatabase, config, options};
use crate::regressions::run_until_no_obsolete_tables;
use crate::testkit::test_dir::dir_contents;
use crate::testkit::{HistoryEvent, HistoryWrite, WriteHistory};

const NAMES: [&str; 2] = ["plain", "packed"];

/// Commits that each fill a large part of a segment.
fn commit_filling_segments(db: &azekura::Database, history: &mut WriteHistory, n: u32, len: usize, mode: PersistMode) {
    let mut batch = db.batch();
    batch.durability(mode);
    let mut writes = Vec::new();
    for name in NAMES {
        let part = db.open_partition(name, options(name)).unwrap();
        let (key, value) = (format!("key {:03}", n % 30).into_bytes(), vec![n as u8; len]);
        batch.insert(&part, &key, &value);
        writes.push(HistoryWrite { partition: name.into(), key, value: Some(value) });
    }
    history.begin_event(HistoryEvent::Commit(writes));
    batch.commit().unwrap();
    history.acknowledge_event();
    if mode != PersistMode::Buffer {
        history.mark_durable();
    }
}

impl SampleDatabase {
    /// Opens the database three times: the first ends with a clean close, the second is killed, the third continues.
    pub(super) fn with_reused_files(salt: u64) -> SampleDatabase {
        let machine = MemFs::new();
        let mut history = WriteHistory::default();
        for name in NAMES {
            history.begin_event(HistoryEvent::Create(name.into()));
            history.acknowledge_event();
        }
        let mut flushed = 0;
        for life in 0..3 {
            let fs: Arc<dyn Fs> = Arc::new(machine.clone());
            let db = config(fs, salt * 10 + life).open().unwrap();
            for n in 0..6 {
                // Each commit uses two segments and frees them.
                (0..3).for_each(|m| commit_filling_segments(&db, &mut history, n * 3 + m, 12_000, PersistMode::Buffer));
                NAMES.iter().for_each(|name| db.open_partition(name, options(name)).unwrap().flush().unwrap());
                while db.step().unwrap() {}
                flushed = history.acknowledged;
            }
            (0..4).for_each(|n| commit_filling_segments(&db, &mut history, n, 10, PersistMode::SyncData));
            (4..9).for_each(|n| commit_filling_segments(&db, &mut history, n, 10, PersistMode::Buffer));
            let partitions = NAMES.map(|name| db.open_partition(name, options(name)).unwrap());
            run_until_no_obsolete_tables(&machine, &db, &partitions);
            drop(partitions);
            match life {
                0 => db.close().unwrap(),
                1 => {
                    machine.freeze_after(Some(0));
                    drop(db);
                    machine.crash(Survival::Everything, 0);
                }
                _ => return SampleDatabase { files: dir_contents(&machine.fork(), Path::new(DIR)), history, flushed },
            }
        }
        unreachable!("the third open returns")
    }
}
