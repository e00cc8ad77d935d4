//! The list of workloads, read from `workloads.json`.

use crate::engine::{Options, Sync};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Values of at least this size are separated in workloads of blobs, by engines that can.
const BLOBS_SEPARATE_FROM: u64 = 1 << 10;

/// All of them.
pub(crate) static WORKLOADS: LazyLock<Vec<Workload>> =
    LazyLock::new(|| serde_json::from_str(include_str!("workloads.json")).expect("a test parses the file"));

/// One step of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    /// Writes the next record of the thread.
    Insert,
    /// Writes the next records of the thread as one batch.
    Batch,
    /// Writes all records of the thread with the engine's call for sorted data.
    Ingest,
    /// Writes the next generation of a record.
    Update,
    /// Reads a record.
    Read,
    /// Reads a key that does not exist.
    Missing,
    /// Reads a record, then writes its next generation.
    ReadModifyWrite,
    /// Reads records and writes their next generations, as one transaction.
    Transact,
    /// Reads records from a chosen one on.
    Scan,
    /// Reads all records.
    ScanAll,
    /// Appends ten records to a queue, then deletes the first ten.
    Queue,
}

/// How a step chooses its record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pick {
    #[default]
    Uniform,
    Zipfian,
    /// Records inserted by this thread, the newest most often.
    Latest,
    /// Records inserted by this thread, uniformly.
    Inserted,
}

/// One workload.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) name: String,
    about: String,
    /// Steps and how many of 100 they are.
    pub(crate) steps: BTreeMap<Step, u64>,
    /// Whether it runs on a loaded database; otherwise on an empty one.
    pub(crate) loads: bool,
    /// Whether ascending indices give ascending keys.
    pub(crate) sequential: bool,
    pub(crate) pick: Pick,
    /// Records of a scan.
    pub(crate) scan_length: Option<u64>,
    /// Largest number of records of a scan, which is drawn.
    pub(crate) max_scan_length: Option<u64>,
    pub(crate) reverse: bool,
    /// Further partitions that hold the records.
    pub(crate) partitions: u64,
    pub(crate) blobs: bool,
    /// Whether `--threads` makes no difference to it.
    pub(crate) single_threaded: bool,
    /// The workload of a concurrent writer: one more thread, uncounted, at `--write-rate`.
    pub(crate) concurrent_writer: Option<String>,
    /// The workload that is carried out before, uncounted, to warm the caches.
    pub(crate) warm_up: Option<String>,
    /// `none`: always; otherwise where the command line asks for none.
    sync: Option<Sync>,
    /// Default operations for each record of the data set.
    ops_per_n: Option<f64>,
    min_ops: Option<u64>,
}

impl Workload {
    /// The workload of that name, which must be in the list.
    pub(crate) fn named(name: &str) -> Workload {
        WORKLOADS.iter().find(|workload| workload.name == name).expect("the name is in the list").clone()
    }

    /// Reads a workload's name from the command line, where help lists them all.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Workload> {
        let values = WORKLOADS.iter().map(|one| PossibleValue::new(one.name.as_str()).help(one.about.as_str()));
        PossibleValuesParser::new(values).map(|name| Workload::named(&name))
    }

    pub(crate) fn has(&self, steps: &[Step]) -> bool {
        steps.iter().any(|step| self.steps.contains_key(step))
    }

    /// Whether it changes records that may have been changed before.
    pub(crate) fn updates(&self) -> bool {
        self.has(&[Step::Update, Step::ReadModifyWrite, Step::Transact]) || self.concurrent_writer.is_some()
    }

    /// Whether it writes.
    pub(crate) fn writes(&self) -> bool {
        self.updates() || self.has(&[Step::Insert, Step::Batch, Step::Ingest, Step::Queue])
    }

    /// Whether it ends with the data set, because each record is written once.
    pub(crate) fn fills(&self) -> bool {
        self.steps.len() == 1 && self.has(&[Step::Insert, Step::Batch, Step::Ingest])
    }

    /// The options it runs with; some workloads need their own.
    pub(crate) fn options(&self, asked: &Options) -> Options {
        let mut options = asked.clone();
        if let Some(sync) = self.sync.filter(|sync| *sync == Sync::None || asked.sync == Sync::None) {
            options.sync = sync;
        }
        if self.blobs {
            options.separate_from = asked.separate_from.or(Some(BLOBS_SEPARATE_FROM));
        }
        options
    }

    /// Operations when none are asked for.
    pub(crate) fn default_ops(&self, n: u64) -> u64 {
        let wanted = (n as f64 * self.ops_per_n.unwrap_or(1.0)) as u64;
        wanted.max(self.min_ops.unwrap_or(1).min(n)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::{Step, WORKLOADS, Workload};

    #[test]
    fn every_workload_is_complete() {
        assert_eq!(WORKLOADS.len(), 31);
        for workload in WORKLOADS.iter() {
            assert!(!workload.name.is_empty() && !workload.about.is_empty());
            assert_eq!(workload.steps.values().sum::<u64>(), 100, "{}", workload.name);
            assert!(!workload.steps.contains_key(&Step::Scan) || workload.scan_length != workload.max_scan_length);
            let warm_up = workload.warm_up.as_deref().map(Workload::named);
            assert!(warm_up.is_none_or(|warm_up| warm_up.loads && !warm_up.writes()), "{}", workload.name);
            assert!(workload.concurrent_writer.as_deref().map(Workload::named).is_none_or(|writer| writer.writes()));
        }
    }

    #[test]
    fn properties_follow_from_the_steps() {
        let of = Workload::named;
        assert!(of("fillseq").fills() && of("recovery").fills() && !of("partitions64").fills());
        assert!(of("readwhilewriting").updates() && !of("ycsb-d").updates() && of("ycsb-d").writes());
        assert!(!of("scan100").writes() && of("queue").writes() && of("ycsb-e").steps.contains_key(&Step::Insert));
        for (name, n, ops) in [("fillsync", 200_000, 4000), ("fillsync", 500, 500), ("fillsync", 10_000, 1000)] {
            assert_eq!(of(name).default_ops(n), ops, "{name}");
        }
        let defaults = ["scan100", "scan10", "open", "bloboverwrite", "queue"].map(|name| of(name).default_ops(1000));
        assert_eq!(defaults, [20, 100, 1, 2000, 1000]);
    }
}
