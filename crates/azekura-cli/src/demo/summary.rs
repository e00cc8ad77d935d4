//! The figures at the end, as a table and as JSON.

use std::time::Duration;

use azekura::{CacheMetrics, Database, KindMetrics, LevelMetrics, Partition};
use comfy_table::Table;
use serde_json::{Value, json};

use super::check::Check;
use super::ledger::Digest;
use super::message::Counters;
use super::plan::LeftOut;
use crate::display::{self, bytes, count, duration, plural, share};

/// The opening after the crash.
#[derive(Debug, Default)]
pub(crate) struct Recovery {
    pub(crate) took: Duration,
    pub(crate) replayed: u64,
    pub(crate) acknowledged: u64,
}

/// What the demo measured.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) files: u64,
    pub(crate) generated: u64,
    pub(crate) recovery: Recovery,
    /// Over all writers.
    pub(crate) counters: Counters,
    /// Files that changed while the demo ran: how many, and the first few.
    pub(crate) changed: (u64, Vec<String>),
    pub(crate) took: Duration,
    stored: Digest,
    disk_bytes: u64,
    /// Those that hold tables.
    pub(crate) levels: Vec<LevelMetrics>,
    cache: Option<CacheMetrics>,
}

impl Summary {
    /// Takes the figures of a database that was just read as a whole.
    pub(crate) fn read(&mut self, db: &Database, partition: &Partition, stored: Digest) {
        self.stored = stored;
        self.disk_bytes = db.disk_space();
        self.levels = partition.metrics().levels.into_iter().filter(|level| level.tables > 0).collect();
        self.cache = Some(db.metrics().cache);
    }

    fn compression_ratio(&self) -> f64 {
        let raw: u64 = self.levels.iter().map(|level| level.raw_bytes).sum();
        raw as f64 / (self.table_bytes() as f64).max(1.0)
    }

    fn table_bytes(&self) -> u64 {
        self.levels.iter().map(|level| level.bytes).sum()
    }

    pub(crate) fn table(&self, left_out: &LeftOut) -> Table {
        let tables = self.table_bytes();
        let levels = self
            .levels
            .iter()
            .map(|l| format!("L{}: {}, {}", l.level, plural(l.tables as u64, "table"), bytes(l.bytes)));
        let hits = self.cache.as_ref().map_or(String::new(), |c| {
            format!("data {}\nindex {}\nfilter {}", hits(&c.data), hits(&c.index), hits(&c.filter))
        });
        let rows = [
            ("files", format!("{}, {} left out", count(self.files), count(left_out.count))),
            ("generated versions", count(self.generated)),
            ("bytes", bytes(self.stored.bytes)),
            (
                "bytes on disk",
                format!(
                    "{} in tables, {} of log and the like",
                    bytes(tables),
                    bytes(self.disk_bytes.saturating_sub(tables))
                ),
            ),
            ("compression ratio", format!("{:.2}", self.compression_ratio())),
            ("write amplification", format!("{:.2}", self.counters.write_amplification())),
            ("levels", levels.collect::<Vec<_>>().join("\n")),
            ("flushes, compactions", format!("{}, {}", count(self.counters.flushes), count(self.counters.compactions))),
            ("cache hits", hits),
            (
                "recovery time",
                format!("{}, {} replayed", duration(self.recovery.took), plural(self.recovery.replayed, "record")),
            ),
            ("time in all", duration(self.took)),
        ];
        display::facts(&rows.map(|(name, value)| (name.to_string(), value)))
    }

    /// Sentences about what was not as asked for, though nothing went wrong.
    pub(crate) fn notes(&self, left_out: &LeftOut, cut_short: &[String]) -> Vec<String> {
        let mut notes: Vec<String> = cut_short.iter().map(|why| format!("Note: {why}.")).collect();
        if left_out.count > 0 {
            notes.push(format!("Left out, {}:", plural(left_out.count, "file")));
            notes.extend(left_out.first.iter().map(|sentence| format!("  {sentence}")));
        }
        if self.changed.0 > 0 {
            let n = plural(self.changed.0, "value");
            notes.push(format!("Changed while we looked: the files of {n}; what was stored is what was read then:"));
            notes.extend(self.changed.1.iter().map(|path| format!("  {path}")));
        }
        notes
    }

    pub(crate) fn json(&self, checks: &[Check], left_out: &LeftOut, cut_short: &[String]) -> Value {
        let level =
            |l: &LevelMetrics| json!({ "level": l.level, "tables": l.tables, "bytes": l.bytes, "entries": l.entries });
        let kind = |k: &KindMetrics| json!({ "hits": k.hits, "misses": k.misses });
        let check = |c: &Check| json!({ "claim": c.claim, "held": c.held, "detail": c.detail });
        json!({
            "held": checks.iter().all(|check| check.held),
            "checks": checks.iter().map(check).collect::<Vec<_>>(),
            "files": self.files,
            "generated_versions": self.generated,
            "left_out": { "count": left_out.count, "first": left_out.first },
            "changed_while_we_looked": { "count": self.changed.0, "first": self.changed.1 },
            "cut_short": cut_short,
            "entries": self.stored.entries,
            "bytes": self.stored.bytes,
            "disk_bytes": self.disk_bytes,
            "table_bytes": self.table_bytes(),
            "compression_ratio": self.compression_ratio(),
            "write_amplification": self.counters.write_amplification(),
            "levels": self.levels.iter().map(level).collect::<Vec<_>>(),
            "flushes": self.counters.flushes,
            "compactions": self.counters.compactions,
            "cache": self.cache.as_ref().map(|c| {
                json!({ "data": kind(&c.data), "index": kind(&c.index), "filter": kind(&c.filter) })
            }),
            "acknowledged_before_the_kill": self.recovery.acknowledged,
            "recovery_ms": self.recovery.took.as_secs_f64() * 1e3,
            "replayed_records": self.recovery.replayed,
            "seconds": self.took.as_secs_f64(),
        })
    }
}

fn hits(kind: &KindMetrics) -> String {
    share(kind.hits, kind.hits + kind.misses)
}
