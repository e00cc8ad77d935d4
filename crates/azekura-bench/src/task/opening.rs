//! Opens databases of many tables and of many partitions; in child processes.

use crate::engine::registry;
use crate::failure::Result;
use crate::machine::disk;
use crate::machine::settle::settle;
use crate::task::task::Task;
use crate::workload::Shape;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::keys::KeyOrder;
use crate::workload::read::get_checked;
use serde_json::{Value, json};
use std::time::Instant;

/// The records of these databases: 16-byte keys, 100-byte values.
pub(crate) const SMALL_RECORDS: Shape =
    Shape { n: u64::MAX, key_size: 16, least_value: 100, value_size: 100, order: KeyOrder::Scrambled };

/// Milliseconds since then.
pub(crate) fn millis(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

/// Writes until the database rests on at least `count` tables.
pub(crate) fn build_tables(task: &Task, count: u64) -> Result<Value> {
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let start = Instant::now();
    let table_bytes = task.options.table_bytes.unwrap_or(task.options.memtable_bytes);
    let per_table = (table_bytes / SMALL_RECORDS.record_bytes(0)).max(1);
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let mut written = 0;
    let mut tables = 0;
    while tables < count {
        for index in written..written + (count - tables) * per_table {
            SMALL_RECORDS.keys().write(index, &mut key);
            SMALL_RECORDS.values().write(index, FIRST_GENERATION, &mut value);
            engine.put(&key, &value)?;
        }
        written += (count - tables) * per_table;
        settle(&[engine.as_ref()], start.elapsed())?;
        tables = engine.tables()?;
    }
    engine.sync()?;
    engine.close()?;
    let build_ms = millis(start);
    let disk_bytes = disk::usage(&task.dir).allocated;
    Ok(json!({"records": written, "tables": tables, "build_ms": build_ms, "disk_bytes": disk_bytes}))
}

/// Opens the database, reads one record, closes it.
pub(crate) fn open_tables(task: &Task) -> Result<Value> {
    let start = Instant::now();
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let open_ms = millis(start);
    let start = Instant::now();
    get_checked(engine.as_ref(), &SMALL_RECORDS, 0, &mut Vec::new())?;
    let first_get_ms = millis(start);
    let tables = engine.tables()?;
    let start = Instant::now();
    engine.close()?;
    Ok(json!({"open_ms": open_ms, "first_get_ms": first_get_ms, "close_ms": millis(start), "tables": tables}))
}

fn name(i: u64) -> String {
    format!("partition-{i:05}")
}

/// Creates a database, `count` partitions in it, and one record in each.
pub(crate) fn create_partitions(task: &Task, count: u64) -> Result<Value> {
    let start = Instant::now();
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let open_ms = millis(start);
    let start = Instant::now();
    let partitions = (0..count).map(|i| engine.partition(&name(i))).collect::<Result<Vec<_>>>()?;
    let create_ms = millis(start);
    let start = Instant::now();
    let (mut key, mut value) = (Vec::new(), Vec::new());
    for (i, partition) in partitions.iter().enumerate() {
        SMALL_RECORDS.keys().write(i as u64, &mut key);
        SMALL_RECORDS.values().write(i as u64, FIRST_GENERATION, &mut value);
        partition.put(&key, &value)?;
    }
    let put_ms = millis(start);
    let start = Instant::now();
    engine.sync()?;
    let sync_ms = millis(start);
    let start = Instant::now();
    drop(partitions);
    engine.close()?;
    let close_ms = millis(start);
    Ok(json!({
        "open_empty_ms": open_ms, "create_ms": create_ms, "put_ms": put_ms, "sync_ms": sync_ms, "close_ms": close_ms,
    }))
}

/// Opens the database and its partitions and reads the record of each.
pub(crate) fn open_partitions(task: &Task, count: u64) -> Result<Value> {
    let start = Instant::now();
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let open_ms = millis(start);
    let partitions = (0..count).map(|i| engine.partition(&name(i))).collect::<Result<Vec<_>>>()?;
    let reopen_ms = millis(start);
    let start = Instant::now();
    for (i, partition) in partitions.iter().enumerate() {
        get_checked(partition.as_ref(), &SMALL_RECORDS, i as u64, &mut Vec::new())?;
    }
    let get_ms = millis(start);
    let start = Instant::now();
    drop(partitions);
    engine.close()?;
    Ok(json!({"open_database_ms": open_ms, "reopen_ms": reopen_ms, "get_ms": get_ms, "reclose_ms": millis(start)}))
}
