//! `stats`, `levels` and `blobs`: metrics of the database, levels of the partitions, staleness of the blob files.

use std::cmp::Reverse;
use std::path::Path;

use azekura::{BlobFileMetrics, BlockKindMetrics, Database, Metrics, PartitionMetrics, PoolMetrics, Settings};
use serde_json::{Value, json};

use crate::args::{PartitionFilter, StatsArgs};
use crate::display::{self, bytes, count, plural};
use crate::error::{CommandOutcome, Result};
use crate::open::{self, FollowerLag, OpenedDatabase};
use crate::output::CommandOutput;

/// Width of the longest bar of `levels`, in characters.
const LEVEL_BAR_WIDTH: usize = 30;

/// Width of the bar of a fully stale blob file, in characters.
const BLOB_BAR_WIDTH: usize = 20;

/// The metrics of a database at one time.
#[derive(Debug)]
pub(crate) struct StatsReading {
    metrics: Metrics,
    disk: u64,
    /// `None` if an older version wrote the database.
    settings: Option<Settings>,
    partitions: Vec<PartitionMetrics>,
    /// `None` unless the database is a follower.
    lag: Option<FollowerLag>,
}

impl StatsReading {
    /// Reads the metrics of one partition, or of all in the order of their names.
    pub(crate) fn of(db: &Database, is_follower: bool, partition: Option<&str>) -> Result<StatsReading> {
        let partitions = partition_metrics(db, partition)?;
        let (metrics, disk, settings) = (db.metrics(), db.disk_space(), db.stored_settings());
        let lag = is_follower.then(|| FollowerLag::measure(db)).transpose()?;
        Ok(StatsReading { metrics, disk, settings, partitions, lag })
    }

    /// Every metric as a JSON object.
    pub(crate) fn to_json(&self) -> Value {
        let mut object = metrics_json(&self.metrics);
        object["disk_bytes"] = json!(self.disk);
        object["settings"] = json!(self.settings.as_ref().map(settings_json));
        object["partitions"] = self.partitions.iter().map(partition_json).collect();
        object["follower"] = json!(self.lag.map(FollowerLag::to_json));
        object
    }

    /// Prints the metrics as text. Unless `all` is set, rows of zeros and settings with their default are left out.
    pub(crate) fn print(&self, all: bool, output: &mut CommandOutput) -> Result<()> {
        let rows = metrics_rows(&self.metrics, self.disk);
        let shown: Vec<_> = rows.iter().filter(|row| all || !row.is_zero).cloned().collect();
        output.line(metrics_table(&shown))?;
        if shown.len() < rows.len() {
            let left_out = plural((rows.len() - shown.len()) as u64, "row");
            output.line(format!("{left_out} of zeros left out; --all shows them."))?;
        }
        if let Some(settings) = &self.settings {
            print_settings(settings, all, output)?;
        }
        for partition in &self.partitions {
            output.line("")?;
            print_partition(partition, output)?;
        }
        if let Some(lag) = self.lag {
            output.line("")?;
            output.line(format!("As of sequence number {}; {lag}.", lag.sequence_number))?;
        }
        Ok(())
    }
}

/// Prints every metric.
pub(crate) fn stats(args: &StatsArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let OpenedDatabase { db, is_follower } = open::open_to_read(db, output.json())?;
    let reading = StatsReading::of(&db, is_follower, args.filter.partition.as_deref())?;
    if output.json() {
        output.line(reading.to_json())?;
    } else {
        output.line("Counters start at zero when a database is opened, and this command has just opened it.")?;
        reading.print(args.all, output)?;
    }
    Ok(CommandOutcome::Success)
}

/// Prints the levels of each partition.
pub(crate) fn levels(args: &PartitionFilter, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let partitions = read_partition_metrics(args, db, output.json())?;
    output.partitions(&partitions, partition_json, print_partition)?;
    if partitions.is_empty() && !output.json() {
        output.line("There are no partitions.")?;
    }
    Ok(CommandOutcome::Success)
}

/// Prints the blob files of each partition, by descending staleness.
pub(crate) fn blobs(args: &PartitionFilter, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let mut partitions = read_partition_metrics(args, db, output.json())?;
    if args.partition.is_none() {
        partitions.retain(|partition| partition.has_kv_separation);
    }
    let share = |file: &BlobFileMetrics| (u128::from(file.stale_bytes()) << 64) / u128::from(file.value_bytes.max(1));
    for partition in &mut partitions {
        partition.blob_files.sort_by_key(|file| (Reverse(share(file)), file.id));
    }
    output.partitions(&partitions, blobs_json, print_blob_files)?;
    if !output.json() {
        output.line(if partitions.is_empty() {
            "No partition has key-value separation, so there are no blob files."
        } else if partitions.iter().any(|partition| partition.stale_blob_bytes() > 0) {
            "`azekura gc run` reclaims stale bytes; `azekura gc scan` also counts those that no compaction has dropped."
        } else {
            "A value counts as referenced until a compaction drops its entry; `azekura gc scan` is exact."
        })?;
    }
    Ok(CommandOutcome::Success)
}

/// Opens the database to read, and reads the metrics of one partition, or of all in the order of their names.
fn read_partition_metrics(args: &PartitionFilter, db: &Path, json: bool) -> Result<Vec<PartitionMetrics>> {
    partition_metrics(&open::open_to_read(db, json)?.db, args.partition.as_deref())
}

fn partition_metrics(db: &Database, name: Option<&str>) -> Result<Vec<PartitionMetrics>> {
    let partitions = match name {
        Some(name) => vec![open::existing_partition(db, name)?],
        None => open::all_partitions(db)?,
    };
    Ok(partitions.iter().map(|partition| partition.metrics()).collect())
}

/// A metric, or several that belong together.
#[derive(Clone, Debug)]
pub(crate) struct MetricsRow {
    pub(crate) name: &'static str,
    value: String,
    /// Whether every number in `value` that can change is zero.
    is_zero: bool,
}

/// The rows as a table with borders.
pub(crate) fn metrics_table(rows: &[MetricsRow]) -> impl std::fmt::Display {
    let cells: Vec<_> = rows.iter().map(|row| (row.name, row.value.clone())).collect();
    display::name_value_table(&cells)
}

/// All metrics of a database.
pub(crate) fn metrics_rows(m: &Metrics, disk: u64) -> Vec<MetricsRow> {
    let hits = |kind: &BlockKindMetrics| {
        let share = display::share(kind.hits, kind.hits + kind.misses);
        format!("{share}, {} with {} cached", plural(kind.blocks, "block"), bytes(kind.bytes))
    };
    let read_and_written = |read, written| format!("{} read, {} written", bytes(read), bytes(written));
    let dropped = m.dropped_after_damage.as_ref().map_or("nothing".to_string(), |d| {
        format!("{} after {} at byte {}", plural(d.frames, "frame"), d.file.display(), d.offset)
    });
    let compaction_bytes = read_and_written(m.compaction_bytes_read, m.compaction_bytes_written);
    let gc_bytes = read_and_written(m.blob_gc_bytes_read, m.blob_gc_bytes_written);
    let moves = count(m.trivial_moves);
    let no_writes = "nothing written since the database was opened".to_string();
    let amplification = if m.user_bytes == 0 { no_writes } else { format!("{:.2}", m.write_amplification()) };
    let cache = format!("{} of {}, {} pinned", bytes(m.cache.used), bytes(m.cache.capacity), bytes(m.cache.pinned));
    let row = |name, numbers: &[u64], value| MetricsRow { name, value, is_zero: numbers.iter().all(|n| *n == 0) };
    let kind = |name, kind: &BlockKindMetrics| row(name, &[kind.hits, kind.misses, kind.blocks], hits(kind));
    let compaction_counts = [m.compactions, m.trivial_moves, m.compaction_bytes_read, m.compaction_bytes_written];
    let gc_counts = [m.blob_gc_runs, m.blob_gc_bytes_read, m.blob_gc_bytes_written, m.blob_bytes_freed];
    let (partitions, segments, snapshots) = (m.partitions as u64, m.wal_segments as u64, m.open_snapshots as u64);
    vec![
        row("partitions", &[partitions], count(partitions)),
        row("bytes on disk", &[disk], bytes(disk)),
        row("commits, records", &[m.commits, m.records], format!("{}, {}", count(m.commits), count(m.records))),
        row("written by callers", &[m.user_bytes], bytes(m.user_bytes)),
        row(
            "WAL: written, syncs",
            &[m.wal_bytes, m.wal_syncs],
            format!("{}, {}", bytes(m.wal_bytes), count(m.wal_syncs)),
        ),
        row("direct blob writes", &[m.direct_blob_bytes], bytes(m.direct_blob_bytes)),
        row(
            "WAL: live, segments",
            &[m.wal_live_bytes, segments],
            format!("{}, {}", bytes(m.wal_live_bytes), m.wal_segments),
        ),
        row("manifest", &[m.manifest_bytes], bytes(m.manifest_bytes)),
        row("memtables", &[m.memtable_bytes], bytes(m.memtable_bytes)),
        row(
            "flushes",
            &[m.flushes, m.flushed_bytes],
            format!("{}, {} written", count(m.flushes), bytes(m.flushed_bytes)),
        ),
        row(
            "compactions",
            &compaction_counts,
            format!("{} ({compaction_bytes}), {moves} trivial moves", count(m.compactions)),
        ),
        row(
            "blob GC",
            &gc_counts,
            format!("{} ({gc_bytes}), {} freed", count(m.blob_gc_runs), bytes(m.blob_bytes_freed)),
        ),
        row("write amplification", &[m.user_bytes], amplification),
        row("write stalls", &[m.stall_time.as_nanos() as u64], display::duration(m.stall_time)),
        row("cache", &[m.cache.used, m.cache.pinned], cache),
        kind("cache hits: data", &m.cache.data),
        kind("cache hits: index", &m.cache.index),
        kind("cache hits: filter", &m.cache.filter),
        kind("cache hits: blobs", &m.cache.blob),
        row("open snapshots", &[snapshots], count(snapshots)),
        row(
            "recovery",
            &[m.recovery_time.as_nanos() as u64],
            format!("{}, {} replayed", display::duration(m.recovery_time), plural(m.replayed_records, "record")),
        ),
        row("dropped after damage", &[m.dropped_after_damage.is_some().into()], dropped),
    ]
}

/// Names and values of all settings.
fn settings_rows(s: &Settings) -> Vec<(&'static str, String)> {
    vec![
        ("cache_size", bytes(s.cache_size)),
        ("memory_budget", bytes(s.memory_budget)),
        ("sync_interval", s.sync_interval.map_or("none".into(), display::duration)),
        ("durability", format!("{:?}", s.durability)),
        ("workers", s.workers.to_string()),
        ("compression", s.compression.to_string()),
        ("max_open_files", count(s.max_open_files as u64)),
        ("direct_io", format!("{:?}", s.direct_io)),
        ("wal_segment_size", bytes(s.wal_segment_size)),
        ("max_wal_size", bytes(s.max_wal_size)),
        ("disk_reserve", bytes(s.disk_reserve)),
        ("mapped_wal", s.mapped_wal.to_string()),
        ("mapped_reads", s.mapped_reads.to_string()),
        ("recovery_mode", format!("{:?}", s.recovery_mode)),
    ]
}

/// All settings as a JSON object.
fn settings_json(s: &Settings) -> Value {
    let mut object = without(json!(s), &["sync_interval"]);
    object["sync_interval_seconds"] = json!(s.sync_interval.map(|interval| interval.as_secs_f64()));
    object["durability"] = json!(format!("{:?}", s.durability));
    object["compression"] = json!(s.compression.to_string());
    object["direct_io"] = json!(format!("{:?}", s.direct_io));
    object["recovery_mode"] = json!(format!("{:?}", s.recovery_mode));
    object
}

/// A JSON object without some fields, which the caller replaces by fields that are easier to read.
fn without(mut object: Value, names: &[&str]) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.retain(|name, _| !names.contains(&&**name));
    }
    object
}

/// Prints the settings with which the database was last opened to write; without `all`, those that are not the default.
fn print_settings(settings: &Settings, all: bool, output: &mut CommandOutput) -> Result<()> {
    let defaults = settings_rows(&Settings::default());
    let mut rows = settings_rows(settings);
    rows.retain(|row| all || !defaults.contains(row));
    if rows.is_empty() {
        return Ok(());
    }
    output.line("")?;
    output.line("Settings of the last program that opened the database to write:")?;
    output.line(display::name_value_table(&rows))
}

/// All metrics of a database as a JSON object.
pub(crate) fn metrics_json(m: &Metrics) -> Value {
    let mut object = without(json!(m), &["stall_time", "recovery_time"]);
    object["stall_ns"] = json!(m.stall_time.as_nanos() as u64);
    object["recovery_ns"] = json!(m.recovery_time.as_nanos() as u64);
    object["write_amplification"] = json!((m.user_bytes > 0).then(|| m.write_amplification()));
    object
}

/// All metrics of a partition as a JSON object.
pub(crate) fn partition_json(partition: &PartitionMetrics) -> Value {
    let mut object = json!(partition);
    object["blob_files"] = json!(partition.blob_files.len());
    object["blob_bytes"] = json!(partition.blob_bytes());
    object["referenced_blob_bytes"] = json!(partition.referenced_blob_bytes());
    object["stale_blob_bytes"] = json!(partition.stale_blob_bytes());
    object["pool"] = json!(partition.pool.as_ref().map(pool_json));
    object
}

fn pool_json(pool: &PoolMetrics) -> Value {
    let mut object = without(json!(pool), &["persistence"]);
    object["survives"] = json!(format!("{:?}", pool.persistence).to_lowercase());
    object
}

/// Prints the name and the sums of a pool, and a bar for its used share.
fn print_pool(partition: &PartitionMetrics, pool: &PoolMetrics, output: &mut CommandOutput) -> Result<()> {
    output.line(format!(
        "{}: pool of {}, {} in {}, {} on disk",
        partition.name,
        bytes(pool.bytes),
        plural(pool.records, "record"),
        plural(pool.leaves, "leaf node"),
        bytes(partition.disk_bytes)
    ))?;
    let used = pool.bytes.saturating_sub(pool.free_bytes);
    let bar = display::bar(used, pool.bytes, LEVEL_BAR_WIDTH);
    output.line(format!("in use {bar:<LEVEL_BAR_WIDTH$} {}", bytes(used)))?;
    output.line(format!("without the WAL a write survives {}", pool.persistence))
}

/// Prints the name and the sums of a partition, and one bar for each level.
pub(crate) fn print_partition(partition: &PartitionMetrics, output: &mut CommandOutput) -> Result<()> {
    if let Some(pool) = &partition.pool {
        return print_pool(partition, pool, output);
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
            format!("{:<LEVEL_BAR_WIDTH$}", display::bar(level.bytes, largest, LEVEL_BAR_WIDTH)),
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
    if partition.range_tombstones > 0 {
        output.line(format!(
            "{} over about {} of tables",
            plural(partition.range_tombstones as u64, "range tombstone"),
            bytes(partition.range_deleted_bytes)
        ))?;
    }
    if !partition.blob_files.is_empty() {
        output.line(format!(
            "{}, {}; values: {} referenced, {} stale",
            plural(partition.blob_files.len() as u64, "blob file"),
            bytes(partition.blob_bytes()),
            bytes(partition.referenced_blob_bytes()),
            bytes(partition.stale_blob_bytes())
        ))?;
    }
    Ok(())
}

fn file_name(file: &BlobFileMetrics) -> String {
    format!("{:06}.blob", file.id)
}

/// "12.5 %".
fn percent(stale: u64, of: u64) -> String {
    format!("{:.1} %", stale as f64 * 100.0 / of.max(1) as f64)
}

fn print_blob_files(partition: &PartitionMetrics, output: &mut CommandOutput) -> Result<()> {
    let files = &partition.blob_files;
    if files.is_empty() {
        let reason = if partition.has_kv_separation { "none was written yet" } else { "no key-value separation" };
        return output.line(format!("{}: no blob files ({reason})", partition.name));
    }
    let values: u64 = files.iter().map(|file| file.values).sum();
    let value_bytes: u64 = files.iter().map(|file| file.value_bytes).sum();
    let stale = partition.stale_blob_bytes();
    output.line(format!(
        "{}: {} of {}, {} of {}: {} referenced, {} stale ({})",
        partition.name,
        plural(files.len() as u64, "blob file"),
        bytes(partition.blob_bytes()),
        plural(values, "value"),
        bytes(value_bytes),
        bytes(partition.referenced_blob_bytes()),
        bytes(stale),
        percent(stale, value_bytes)
    ))?;
    let mut table = display::plain_table(&["file", "bytes", "values", "referenced", "stale", "staleness"], 1..5);
    for file in files {
        table.add_row([
            file_name(file),
            bytes(file.bytes),
            count(file.values),
            bytes(file.referenced_bytes),
            percent(file.stale_bytes(), file.value_bytes),
            display::bar(file.stale_bytes(), file.value_bytes, BLOB_BAR_WIDTH),
        ]);
    }
    output.line(table)
}

fn blobs_json(partition: &PartitionMetrics) -> Value {
    let file = |file: &BlobFileMetrics| {
        let mut object = without(json!(file), &["id"]);
        object["file"] = json!(file_name(file));
        object["stale_bytes"] = json!(file.stale_bytes());
        object
    };
    json!({
        "name": partition.name,
        "separated": partition.has_kv_separation,
        "files": partition.blob_files.iter().map(file).collect::<Vec<_>>(),
        "bytes": partition.blob_bytes(),
        "referenced_bytes": partition.referenced_blob_bytes(),
        "stale_bytes": partition.stale_blob_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_of_zero_is_zero() {
        assert_eq!(percent(0, 0), "0.0 %");
        assert_eq!(percent(1, 8), "12.5 %");
        assert_eq!(percent(7, 7), "100.0 %");
    }
}
