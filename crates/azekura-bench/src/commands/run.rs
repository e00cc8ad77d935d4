//! `run`: workloads on engines, interleaved, compared.

use crate::cli::{Run, Sizes};
use crate::error::Result;
use crate::measure::device::Conditions;
use crate::report::compare::run_objects;
use crate::report::table;
use crate::task::comparison::{Comparison, Loaded, verdict};
use crate::task::measure::harness_cost;
use crate::task::plan::Plan;
use crate::workload::Shape;
use crate::workload::data::mean_size;
use serde_json::{Value, json};

/// Records of a data set, and of one of blobs, by default.
const RECORDS: u64 = 1_000_000;
const BLOBS: u64 = 4_000;
/// Sizes of values, and of blobs, by default.
const VALUES: Sizes = Sizes { least: 100, most: 100 };
const BLOB_VALUES: Sizes = Sizes { least: 4 << 10, most: 1 << 20 };
/// The largest value.
const LARGEST: u64 = 1 << 31;

/// Runs the comparison and prints it.
pub(crate) fn run(run: &Run) -> Result<()> {
    let comparison = comparison(run)?;
    let (scratch, seconds) = (run.common.place.scratch()?, run.common.device_seconds);
    let mut conditions = Conditions::begin(&scratch.path, harness_cost(&comparison.first_shape()), seconds)?;
    let mut loaded = Loaded::default();
    let rows = comparison.run(&scratch, &mut loaded)?;
    if !scratch.keep {
        loaded.clear(); // the device is measured without them
    }
    conditions.finish(&scratch.path, seconds)?;
    let objects = run_objects(&rows, &comparison.settings(), &json!(conditions));
    if run.common.json {
        objects.into_iter().for_each(|object| println!("{}", Value::Object(object)));
    } else {
        print!("{}\n{}", table::medians(&objects), table::conditions(&conditions));
        println!("medians of {} interleaved rounds; {:?}", comparison.rounds, comparison.options);
    }
    verdict(&rows)
}

/// The sizes of blobs: a range as it is, a number as the mean of a range.
fn blob_sizes(asked: Option<Sizes>) -> Sizes {
    let Some(Sizes { least, most }) = asked else { return BLOB_VALUES };
    let (from, mean) = (BLOB_VALUES.least as f64, least as f64);
    if least != most || mean <= from {
        return Sizes { least, most };
    }
    // The mean grows with the end of the range: bisect.
    let (mut low, mut high) = (mean, LARGEST as f64);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if mean_size(from, middle) < mean { low = middle } else { high = middle }
    }
    Sizes { least: BLOB_VALUES.least, most: low as u64 }
}

fn shape(run: &Run, n: u64, sizes: Sizes) -> Result<Shape> {
    if sizes.least < 8 || sizes.most > LARGEST {
        return Err("--value-size must be 8 bytes to 2 GiB: the first 8 hold the generation of the record".into());
    }
    Ok(Shape {
        n: run.n.unwrap_or(n),
        key_size: usize::from(run.key_size),
        least_value: sizes.least as usize,
        value_size: sizes.most as usize,
        sequential: false,
    })
}

/// The comparison that was asked for.
pub(crate) fn comparison(run: &Run) -> Result<Comparison> {
    let engines = run.engines.names()?;
    let small = shape(run, RECORDS, run.value_size.unwrap_or(VALUES))?;
    let blobs = shape(run, BLOBS, blob_sizes(run.value_size))?;
    if run.threads.iter().any(|&threads| small.n.min(blobs.n) < threads) {
        return Err("--n must be at least --threads: each thread writes records of its own".into());
    }
    let plan = Plan {
        workload: run.workload[0],
        shape: small,
        ops: 0,
        seconds: run.seconds,
        threads: 1,
        warm_ops: 0,
        seek_nexts: run.seek_nexts,
        write_rate: run.write_rate,
        depth: run.depth,
        cold: run.cold,
        seed: u64::from(run.seed),
        round: 0,
        show_seconds: run.seconds_report,
    };
    Ok(Comparison {
        workloads: run.workload.clone(),
        engines,
        rounds: run.engines.rounds,
        threads: run.threads.clone(),
        options: run.engines.options(run.memtable_size, None),
        blobs,
        plan,
        ops: run.ops,
        warm_ops: run.warm_ops,
        limit: run.engines.limit(),
        deadline: None,
    })
}

#[cfg(test)]
mod tests {
    use super::comparison;
    use crate::cli::{Cli, Command};
    use crate::error::Result;
    use crate::task::comparison::Comparison;
    use clap::Parser;

    fn parse(arguments: &str) -> Result<Comparison> {
        let line = format!("azekura-bench run {arguments}");
        let Command::Run(run) = Cli::parse_from(line.split_whitespace()).command else { panic!("not a run") };
        comparison(&run)
    }

    #[test]
    fn lists_and_sizes_are_parsed() {
        let two =
            parse("--workload fillrandom,ycsb-a --value-size 4K --n 10 --sync data --threads 1,2,4 --limit 7").unwrap();
        assert_eq!((two.workloads.len(), two.plan.shape.value_size, two.threads.as_slice()), (2, 4096, &[1, 2, 4][..]));
        assert_eq!(two.limit.map(|limit| limit.as_secs()), Some(7));
    }

    #[test]
    fn blobs_have_sizes_of_their_own() {
        let plain = parse("--workload blobload").unwrap();
        assert_eq!((plain.blobs.n, plain.blobs.least_value, plain.blobs.value_size), (4000, 4 << 10, 1 << 20));
        assert_eq!((plain.plan.shape.n, plain.plan.shape.value_size), (1_000_000, 100));
        let range = parse("--workload blobload --n 50 --value-size 1K-2K").unwrap().blobs;
        assert_eq!((range.n, range.least_value, range.value_size), (50, 1024, 2048));
        let mean = parse("--workload blobload --value-size 64K").unwrap().blobs;
        assert!((mean.mean_record_bytes() / f64::from(64 << 10) - 1.0).abs() < 0.01, "{mean:?}");
        assert_eq!(parse("--workload blobload --value-size 1K").unwrap().blobs.value_size, 1024);
    }

    #[test]
    fn impossible_runs_are_refused() {
        for arguments in ["--value-size 4", "--value-size 4-16", "--threads 8 --n 4", "--engine nosuchdb"] {
            assert!(parse(&format!("--workload overwrite {arguments}")).is_err(), "{arguments}");
        }
    }
}
