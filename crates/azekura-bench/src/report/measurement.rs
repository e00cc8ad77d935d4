//! The figures of one measurement. Field names are the names in the JSON output; they are a promise to scripts.

use crate::failure::{Kind, Told};
use crate::machine::meter::{Tally, percentile_us};
use crate::machine::process::Usage;
use crate::machine::settle::Settled;
use crate::task::task::{Plan, Task};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One workload, one engine, one round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    /// Engine by name.
    pub(crate) engine: String,
    /// Workload by name.
    pub(crate) workload: String,
    /// Round, from 1.
    pub(crate) round: u32,
    /// Threads.
    pub(crate) threads: u64,
    /// Records of the data set.
    pub(crate) n: u64,
    /// Operations done.
    pub(crate) ops: u64,
    /// Seconds they took; what follows in the background is in `settle_s`.
    pub(crate) elapsed_s: f64,
    /// Operations per second.
    pub(crate) ops_per_s: f64,
    /// Operations per second if the time until the engine came to rest counts too.
    pub(crate) settled_ops_per_s: f64,
    /// Mean microseconds of an operation.
    pub(crate) mean_us: f64,
    /// Median.
    pub(crate) p50_us: f64,
    /// 90th percentile.
    #[serde(default)]
    pub(crate) p90_us: f64,
    /// 99th percentile.
    pub(crate) p99_us: f64,
    /// 99.9th percentile.
    pub(crate) p999_us: f64,
    /// The longest one.
    pub(crate) max_us: f64,
    /// CPU seconds of the process while operations ran, background threads included.
    pub(crate) cpu_s: f64,
    /// CPU seconds from then until the engine was at rest.
    pub(crate) settle_cpu_s: f64,
    /// Microseconds of CPU per operation, settling included.
    pub(crate) cpu_us_per_op: f64,
    /// Seconds until the engine was at rest.
    pub(crate) settle_s: f64,
    /// Whether it came to rest.
    pub(crate) settled: bool,
    /// Bytes of keys and values written by the workload.
    pub(crate) user_bytes: u64,
    /// Bytes of pages made dirty or written directly.
    pub(crate) dirtied_bytes: u64,
    /// Bytes handed to `write` and its kin.
    pub(crate) syscall_write_bytes: u64,
    /// Bytes fetched from the device.
    pub(crate) device_read_bytes: u64,
    /// The larger of the two kinds of written bytes per byte of `user_bytes`; absent where nothing was written.
    pub(crate) write_amp: Option<f64>,
    /// Bytes allocated in the database directory at rest.
    pub(crate) disk_bytes: u64,
    /// `disk_bytes` per byte of live keys and values.
    pub(crate) space_amp: f64,
    /// Highest resident bytes of the process, mapped files and the harness included.
    pub(crate) peak_rss_bytes: u64,
    /// Highest resident bytes seen that are not pages of files.
    pub(crate) anonymous_rss_bytes: u64,
    /// Operations per second in each whole second.
    pub(crate) intervals_ops_per_s: Vec<f64>,
    /// What happened while operations ran, one sample after another.
    #[serde(default)]
    pub(crate) series: Vec<Sample>,
    /// Figures only this engine has.
    pub(crate) engine_stats: Map<String, Value>,
    /// Figures only this workload has; in the JSON, fields like the others.
    #[serde(flatten)]
    pub(crate) extra: Map<String, Value>,
    /// Why there are no figures: then all of them are 0.
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// What kind of error.
    #[serde(default)]
    pub(crate) error_kind: Option<Kind>,
}

/// What was seen at one moment of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Seconds since the measurement began.
    pub(crate) s: f64,
    /// Operations per second since the sample before.
    pub(crate) ops_per_s: f64,
    /// Bytes written per byte of keys and values since the measurement began; absent while there are none.
    pub(crate) write_amp: Option<f64>,
    /// Bytes allocated in the directory per byte of live keys and values.
    pub(crate) space_amp: f64,
    /// Resident bytes of the process.
    pub(crate) rss_bytes: u64,
}

/// What [`Measurement::new`] is made from.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) seconds: f64,
    pub(crate) tally: Tally,
    pub(crate) intervals: Vec<f64>,
    pub(crate) series: Vec<Sample>,
    /// Bytes of keys and values of the data set before the measurement.
    pub(crate) loaded_bytes: u64,
    /// Bytes of keys and values written beside the counted operations.
    pub(crate) user_bytes_beside: u64,
    pub(crate) extra: Map<String, Value>,
    pub(crate) used: Usage,
    pub(crate) used_settling: Usage,
    pub(crate) settled: Settled,
    pub(crate) disk_bytes: u64,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) anonymous_rss_bytes: u64,
    pub(crate) stats: Map<String, Value>,
}

impl Measurement {
    /// Derives every figure from what was counted.
    pub(crate) fn new(task: &Task, plan: &Plan, facts: Facts) -> Measurement {
        let tally = &facts.tally;
        let ops = tally.ops.max(1) as f64;
        let dirtied = facts.used.dirtied_bytes + facts.used_settling.dirtied_bytes;
        let syscall = facts.used.syscall_write_bytes + facts.used_settling.syscall_write_bytes;
        let live = facts.loaded_bytes.saturating_add_signed(tally.live_bytes).max(1) as f64;
        let user_bytes = tally.user_bytes + facts.user_bytes_beside;
        Measurement {
            engine: task.engine.clone(),
            workload: plan.workload.name(),
            round: plan.round,
            threads: plan.threads,
            n: plan.shape.n,
            ops: tally.ops,
            elapsed_s: facts.seconds,
            ops_per_s: tally.ops as f64 / facts.seconds.max(1e-9),
            settled_ops_per_s: tally.ops as f64 / (facts.seconds + facts.settled.seconds).max(1e-9),
            mean_us: tally.latencies.mean() / 1000.0,
            p50_us: percentile_us(&tally.latencies, 50.0),
            p90_us: percentile_us(&tally.latencies, 90.0),
            p99_us: percentile_us(&tally.latencies, 99.0),
            p999_us: percentile_us(&tally.latencies, 99.9),
            max_us: tally.latencies.max() as f64 / 1000.0,
            cpu_s: facts.used.cpu_s,
            settle_cpu_s: facts.used_settling.cpu_s,
            cpu_us_per_op: (facts.used.cpu_s + facts.used_settling.cpu_s) * 1e6 / ops,
            settle_s: facts.settled.seconds,
            settled: facts.settled.reached,
            user_bytes,
            dirtied_bytes: dirtied,
            syscall_write_bytes: syscall,
            device_read_bytes: facts.used.device_read_bytes + facts.used_settling.device_read_bytes,
            write_amp: (user_bytes > 0).then(|| dirtied.max(syscall) as f64 / user_bytes as f64),
            disk_bytes: facts.disk_bytes,
            space_amp: facts.disk_bytes as f64 / live,
            peak_rss_bytes: facts.peak_rss_bytes,
            anonymous_rss_bytes: facts.anonymous_rss_bytes,
            intervals_ops_per_s: facts.intervals,
            series: facts.series,
            engine_stats: facts.stats,
            extra: facts.extra,
            error: None,
            error_kind: None,
        }
    }

    /// The row of an engine that has no figures for `plan`.
    pub(crate) fn failed(engine: &str, plan: &Plan, told: &Told) -> Measurement {
        Measurement {
            engine: engine.to_owned(),
            workload: plan.workload.name(),
            round: plan.round,
            threads: plan.threads,
            n: plan.shape.n,
            error: Some(told.error.clone()),
            error_kind: Some(told.kind),
            ..Measurement::default()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Facts, Measurement, Sample};
    use crate::engine::{Compression, Options, Sync};
    use crate::failure::{Kind, Told};
    use crate::machine::meter::{Meter, Progress};
    use crate::machine::process::Usage;
    use crate::machine::settle::Settled;
    use crate::task::task::{Job, Plan, Task};
    use crate::workload::keys::KeyOrder;
    use crate::workload::{Shape, Workload};

    /// A small measurement, not run.
    pub(crate) fn sample_task(engine: &str, round: u32) -> (Task, Plan) {
        let plan = Plan {
            workload: Workload::FillRandom,
            shape: Shape { n: 100, key_size: 16, least_value: 84, value_size: 84, order: KeyOrder::Scrambled },
            ops: 100,
            seconds: None,
            threads: 1,
            warm_ops: 0,
            seek_nexts: 10,
            write_rate: 10_000,
            depth: None,
            cold: false,
            seed: 1,
            round,
            show_seconds: false,
        };
        let options = Options {
            cache_bytes: 1,
            memtable_bytes: 1,
            table_bytes: None,
            sync: Sync::None,
            compression: Compression::None,
            workers: 1,
            separate_from: None,
            data_bytes: 0,
        };
        (Task { engine: engine.into(), dir: "d".into(), options, job: Job::Measure(plan.clone()) }, plan)
    }

    pub(crate) fn sample(engine: &str, round: u32, seconds: f64) -> Measurement {
        let (task, plan) = sample_task(engine, round);
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, 100, None);
        for _ in 0..100 {
            meter.wrote(100);
            meter.inserted(100);
            meter.done(1);
        }
        let used = Usage { cpu_s: 0.5, dirtied_bytes: 30_000, syscall_write_bytes: 10_000, ..Usage::default() };
        let used_settling = Usage { cpu_s: 0.1, dirtied_bytes: 10_000, ..Usage::default() };
        let facts = Facts {
            seconds,
            tally: meter.tally,
            intervals: vec![50.0, 50.0],
            series: vec![Sample { s: 1.0, ops_per_s: 50.0, write_amp: None, space_amp: 1.5, rss_bytes: 7 }],
            loaded_bytes: 0,
            user_bytes_beside: 0,
            extra: serde_json::Map::from_iter([("commits_per_s".to_owned(), serde_json::json!(50.0))]),
            used,
            used_settling,
            settled: Settled { seconds, reached: true },
            disk_bytes: 15_000,
            peak_rss_bytes: 1 << 20,
            anonymous_rss_bytes: 1 << 19,
            stats: serde_json::Map::new(),
        };
        Measurement::new(&task, &plan, facts)
    }

    #[test]
    fn figures_follow_from_the_counts() {
        let m = sample("azekura", 1, 2.0);
        assert_eq!((m.ops_per_s, m.settled_ops_per_s), (50.0, 25.0));
        assert_eq!((m.write_amp, m.space_amp), (Some(4.0), 1.5));
        assert!((m.cpu_us_per_op - 6000.0).abs() < 1e-6);
    }

    #[test]
    fn json_has_the_promised_fields() {
        let json = serde_json::to_value(sample("azekura", 1, 2.0)).unwrap();
        let promised = [
            "engine",
            "workload",
            "ops_per_s",
            "p50_us",
            "p99_us",
            "p999_us",
            "cpu_us_per_op",
            "write_amp",
            "space_amp",
            "peak_rss_bytes",
            "max_us",
            "p90_us",
            "series",
            "commits_per_s",
            "error",
            "cpu_s",
            "intervals_ops_per_s",
        ];
        for field in promised {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["workload"], "fillrandom");
        let back: Measurement = serde_json::from_value(json).unwrap();
        let one = sample("azekura", 1, 2.0);
        assert_eq!((back.ops, &back.engine_stats, &back.extra), (one.ops, &one.engine_stats, &one.extra));
        assert_eq!((back.series, back.write_amp), (one.series, one.write_amp));
        let (_, plan) = sample_task("azekura", 1);
        let failed = Measurement::failed("fjall", &plan, &Told { kind: Kind::TimedOut, error: "late".into() });
        let json = serde_json::to_string(&failed).unwrap();
        assert_eq!(serde_json::from_str::<Measurement>(&json).unwrap(), failed);
    }
}
