//! `stats` and `levels`: what the database says of itself.

use std::time::Duration;

use azekura::{Database, DroppedAfterDamage, ErrorKind, Metrics, PartitionMetrics, PoolMetrics};
use serde_json::{Value, json};

use crate::args::LookArgs;
use crate::display::{self, bytes, count, plural};
use crate::failure::{Answer, Failure, Result, complain};
use crate::open;
use crate::output::Output;

/// Every counter.
pub(crate) fn stats(args: &LookArgs, output: &mut Output) -> Result<Answer> {
    let (db, partitions) = look(args)?;
    let (metrics, disk) = (db.metrics(), db.disk_space());
    if output.json() {
        let mut object = metrics_json(&metrics);
        object["disk_bytes"] = json!(disk);
        object["partitions"] = partitions.iter().map(partition_json).collect();
        output.line(object)?;
        return Ok(Answer::Yes);
    }
    output.line("Counters begin when a database is opened; this command opened it just now, to read.")?;
    output.line(display::facts(&metrics_rows(&metrics, disk)))?;
    for partition in &partitions {
        output.line("")?;
        draw_partition(partition, output)?;
    }
    Ok(Answer::Yes)
}

/// The shape of the trees.
pub(crate) fn levels(args: &LookArgs, output: &mut Output) -> Result<Answer> {
    let (_db, partitions) = look(args)?;
    show(&partitions, output, partition_json, draw_partition)?;
    if partitions.is_empty() && !output.json() {
        output.line("There are no partitions yet.")?;
    }
    Ok(Answer::Yes)
}

/// All of them in one object, or one below the other with an empty line between.
pub(crate) fn show<T>(
    partitions: &[T],
    output: &mut Output,
    as_json: impl Fn(&T) -> Value,
    draw: impl Fn(&T, &mut Output) -> Result<()>,
) -> Result<()> {
    if output.json() {
        let all: Vec<Value> = partitions.iter().map(as_json).collect();
        return output.line(json!({ "partitions": all }));
    }
    for (i, partition) in partitions.iter().enumerate() {
        if i > 0 {
            output.line("")?;
        }
        draw(partition, output)?;
    }
    Ok(())
}

/// The database, opened to read, and what the partitions that were asked for say of themselves.
pub(crate) fn look(args: &LookArgs) -> Result<(Database, Vec<PartitionMetrics>)> {
    let db = open::to_read(&args.db.path)?;
    let mut names = match &args.partition {
        Some(name) => vec![name.clone()],
        None => db.list_partitions(),
    };
    names.sort();
    let mut metrics = Vec::new();
    for name in names {
        match open::existing(&db, &name) {
            Ok(partition) => metrics.push(partition.metrics()),
            // Its keys have an order that only its program knows; the others can be shown all the same.
            Err(Failure::Engine(error)) if args.partition.is_none() && error.kind() == ErrorKind::Invalid => {
                complain(format_args!("azekura: not shown: {}.", error.message()));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok((db, metrics))
}

fn metrics_rows(m: &Metrics, disk: u64) -> Vec<(String, String)> {
    let cache = &m.cache;
    let hits = |kind: &azekura::KindMetrics| {
        let share = display::share(kind.hits, kind.hits + kind.misses);
        format!("{share}, {} with {} there now", plural(kind.blocks, "block"), bytes(kind.bytes))
    };
    let dropped = m.dropped_after_damage.as_ref().map_or("nothing".to_string(), |d| {
        format!("{} behind {} at byte {}", plural(d.frames, "frame"), d.file.display(), d.offset)
    });
    let rows = [
        ("partitions", count(m.partitions as u64)),
        ("bytes on disk", bytes(disk)),
        ("commits, records", format!("{}, {}", count(m.commits), count(m.records))),
        ("written by callers", bytes(m.user_bytes)),
        ("log: written, syncs", format!("{}, {}", bytes(m.log_bytes), count(m.log_syncs))),
        ("large values: written ahead", bytes(m.early_bytes)),
        ("log: live, segments", format!("{}, {}", bytes(m.log_live_bytes), m.log_segments)),
        ("manifest", bytes(m.manifest_bytes)),
        ("memtables", bytes(m.memtable_bytes)),
        ("flushes", format!("{}, {} written", count(m.flushes), bytes(m.flushed_bytes))),
        (
            "compactions",
            format!(
                "{} ({} read, {} written), {} moves without rewriting",
                count(m.compactions),
                bytes(m.compaction_bytes_read),
                bytes(m.compaction_bytes_written),
                count(m.trivial_moves)
            ),
        ),
        (
            "collections of blob files",
            format!(
                "{} ({} read, {} written), {} freed",
                count(m.collections),
                bytes(m.collection_bytes_read),
                bytes(m.collection_bytes_written),
                bytes(m.blob_bytes_freed)
            ),
        ),
        ("write amplification", amplification(m.user_bytes, m.write_amplification())),
        ("writers were slowed down", display::duration(Duration::from_nanos(m.stall_ns))),
        ("cache", format!("{} of {}, {} pinned", bytes(cache.used), bytes(cache.capacity), bytes(cache.pinned))),
        ("cache hits: data", hits(&cache.data)),
        ("cache hits: index", hits(&cache.index)),
        ("cache hits: filter", hits(&cache.filter)),
        ("cache hits: blobs", hits(&cache.blob)),
        ("open snapshots", count(m.open_snapshots as u64)),
        (
            "recovery",
            format!(
                "{}, {} replayed",
                display::duration(Duration::from_nanos(m.recovery_ns)),
                plural(m.replayed_records, "record")
            ),
        ),
        ("dropped after damage", dropped),
    ];
    rows.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

/// "2.4", or a word where nothing was written.
fn amplification(user_bytes: u64, factor: f64) -> String {
    if user_bytes == 0 { "nothing written since opening".into() } else { format!("{factor:.2}") }
}

fn metrics_json(m: &Metrics) -> Value {
    let kind =
        |k: &azekura::KindMetrics| json!({ "hits": k.hits, "misses": k.misses, "blocks": k.blocks, "bytes": k.bytes });
    json!({
        "commits": m.commits,
        "records": m.records,
        "user_bytes": m.user_bytes,
        "log_bytes": m.log_bytes,
        "log_syncs": m.log_syncs,
        "early_bytes": m.early_bytes,
        "log_live_bytes": m.log_live_bytes,
        "log_segments": m.log_segments,
        "flushes": m.flushes,
        "flushed_bytes": m.flushed_bytes,
        "compactions": m.compactions,
        "trivial_moves": m.trivial_moves,
        "compaction_bytes_read": m.compaction_bytes_read,
        "compaction_bytes_written": m.compaction_bytes_written,
        "collections": m.collections,
        "collection_bytes_read": m.collection_bytes_read,
        "collection_bytes_written": m.collection_bytes_written,
        "blob_bytes_freed": m.blob_bytes_freed,
        "write_amplification": (m.user_bytes > 0).then(|| m.write_amplification()),
        "manifest_bytes": m.manifest_bytes,
        "memtable_bytes": m.memtable_bytes,
        "stall_ns": m.stall_ns,
        "cache": {
            "capacity": m.cache.capacity,
            "used": m.cache.used,
            "pinned": m.cache.pinned,
            "data": kind(&m.cache.data),
            "index": kind(&m.cache.index),
            "filter": kind(&m.cache.filter),
            "blob": kind(&m.cache.blob),
        },
        "open_snapshots": m.open_snapshots,
        "oldest_snapshot_age": m.oldest_snapshot_age,
        "poisoned": m.poisoned,
        "replayed_records": m.replayed_records,
        "recovery_ns": m.recovery_ns,
        "dropped_after_damage": m.dropped_after_damage.as_ref().map(dropped_json),
    })
}

/// What the log held behind damage, as JSON.
pub(crate) fn dropped_json(dropped: &DroppedAfterDamage) -> Value {
    json!({ "file": dropped.file.to_string_lossy(), "offset": dropped.offset, "frames": dropped.frames })
}

/// A partition and its levels as JSON.
fn partition_json(partition: &PartitionMetrics) -> Value {
    let levels: Vec<Value> = partition
        .levels
        .iter()
        .map(|l| {
            json!({
                "level": l.level,
                "runs": l.runs,
                "tables": l.tables,
                "bytes": l.bytes,
                "raw_bytes": l.raw_bytes,
                "entries": l.entries,
                "tombstones": l.tombstones,
            })
        })
        .collect();
    json!({
        "name": partition.name,
        "levels": levels,
        "memtable_bytes": partition.memtable_bytes,
        "sealed_memtables": partition.sealed_memtables,
        "disk_bytes": partition.disk_bytes,
        "pinned_bytes": partition.pinned_bytes,
        "separated": partition.separated,
        "blob_files": partition.blob_files.len(),
        "blob_bytes": partition.blob_bytes(),
        "referenced_blob_bytes": partition.referenced_blob_bytes(),
        "stale_blob_bytes": partition.stale_blob_bytes(),
        "pool": partition.pool.as_ref().map(pool_json),
    })
}

/// A pool as JSON.
fn pool_json(pool: &PoolMetrics) -> Value {
    json!({
        "survives": format!("{:?}", pool.level).to_lowercase(),
        "records": pool.records,
        "leaves": pool.leaves,
        "leaves_free": pool.leaves_free,
        "bytes": pool.bytes,
        "free_bytes": pool.free_bytes,
        "index_bytes": pool.index_bytes,
        "kept_bytes": pool.kept_bytes,
        "checkpoints": pool.checkpoints,
        "checkpoint_bytes": pool.checkpoint_bytes,
        "splits": pool.splits,
    })
}

/// Name and sums of a partition that is a pool, and a bar of what of it is in use.
fn draw_pool(partition: &PartitionMetrics, pool: &PoolMetrics, output: &mut Output) -> Result<()> {
    output.line(format!(
        "{}: pool of {}, {} in {}, {} on disk",
        partition.name,
        bytes(pool.bytes),
        plural(pool.records, "record"),
        plural(pool.leaves, "leaf node"),
        bytes(partition.disk_bytes)
    ))?;
    let used = pool.bytes.saturating_sub(pool.free_bytes);
    output.line(format!("in use {:<30} {}", display::bar(used, pool.bytes, 30), bytes(used)))?;
    output.line(format!("by itself a write survives {}", pool.level))
}

/// Name, sum and one bar a level.
fn draw_partition(partition: &PartitionMetrics, output: &mut Output) -> Result<()> {
    if let Some(pool) = &partition.pool {
        return draw_pool(partition, pool, output);
    }
    let used: Vec<_> = partition.levels.iter().filter(|level| level.tables > 0).collect();
    let tables = used.iter().map(|level| level.tables as u64).sum();
    output.line(format!(
        "{}: {} in {}, {} on disk, {} in memory",
        partition.name,
        plural(tables, "table"),
        plural(used.len() as u64, "level"),
        bytes(partition.disk_bytes),
        bytes(partition.memtable_bytes)
    ))?;
    let largest = used.iter().map(|level| level.bytes).max().unwrap_or(0);
    let mut table =
        display::plain_table(&["level", "shape", "tables", "runs", "bytes", "raw", "entries", "tombstones"], 2..8);
    for level in &used {
        table.add_row([
            format!("L{}", level.level),
            format!("{:<30}", display::bar(level.bytes, largest, 30)),
            count(level.tables as u64),
            count(level.runs as u64),
            bytes(level.bytes),
            bytes(level.raw_bytes),
            count(level.entries),
            count(level.tombstones),
        ]);
    }
    if !used.is_empty() {
        output.line(table)?;
    }
    if !partition.blob_files.is_empty() {
        let referenced = partition.referenced_blob_bytes();
        output.line(format!(
            "{}, {}; of their values {} referenced, {} stale",
            plural(partition.blob_files.len() as u64, "blob file"),
            bytes(partition.blob_bytes()),
            bytes(referenced),
            bytes(partition.stale_blob_bytes())
        ))?;
    }
    Ok(())
}
