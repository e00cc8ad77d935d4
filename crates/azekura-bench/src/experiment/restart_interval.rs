//! `restart-interval`: what a shorter distance between whole keys costs in space and gains in cached point reads.

use crate::engine::azekura::open_with;
use crate::engine::registry;
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::reads::{self, Choice, cached_options};
use crate::experiment::rounds::{Variant, interleave};
use crate::failure::Result;
use azekura::DataBlockIndexType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// The intervals; the first is what the others are compared to, and what RocksDB uses.
const INTERVALS: [u8; 3] = [16, 4, 1];
/// The peer whose blocks have the same layout.
const PEER: &str = "rocksdb";
const MEMTABLE_BYTES: u64 = 16 << 20;

/// See the module.
pub(crate) struct RestartInterval;

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    dir: PathBuf,
    /// The interval of azekura; the peer where there is none.
    interval: Option<u8>,
    n: u64,
    /// Seconds to read; it loads where there are none.
    seconds: Option<f64>,
}

fn name(interval: Option<u8>) -> String {
    interval.map_or_else(|| PEER.to_owned(), |interval| format!("interval-{interval}"))
}

impl Experiment for RestartInterval {
    fn name(&self) -> &'static str {
        "restart-interval"
    }

    fn about(&self) -> &'static str {
        "cached point reads and space with a whole key every 16, 4 and 1 records of a data block"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (n, seconds, rounds) = context.size((200_000, 0.6, 5), (2_000_000, 3.0, 7));
        let mut asked: Vec<Option<u8>> = INTERVALS.map(Some).to_vec();
        if registry::check(PEER).is_ok() {
            asked.push(None);
        }
        let mut answer = Map::new();
        let mut sizes = Vec::new();
        let mut variants = Vec::new();
        for interval in asked {
            let task = Task { dir: context.fresh(&name(interval))?, interval, n, seconds: None };
            let loaded = context.child(&json!(task))?;
            sizes.push((interval, loaded.get("disk_bytes").and_then(Value::as_f64).unwrap_or(0.0)));
            let task = Task { seconds: Some(seconds), ..task };
            variants.push(Variant { name: name(interval), task: json!(task) });
        }
        let all = interleave(context, &variants, rounds)?;
        let baseline = name(Some(INTERVALS[0]));
        for interval in &INTERVALS[1..] {
            let field = format!("throughput_ratio_{interval}");
            all.put_ratio(&mut answer, &field, "gets_per_s", &name(Some(*interval)), &baseline);
            let space =
                |wanted: u8| sizes.iter().find(|(interval, _)| *interval == Some(wanted)).map(|(_, size)| *size);
            let ratio = space(*interval)
                .zip(space(INTERVALS[0]))
                .and_then(|(one, base)| crate::report::figures::ratio(one, base));
            answer.insert(format!("space_ratio_{interval}"), json!(ratio));
        }
        all.put_ratio(&mut answer, "baseline_vs_peer", "ns", &baseline, PEER);
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        let options = cached_options(MEMTABLE_BYTES);
        let engine = match task.interval {
            // The only layout that the interval alone decides.
            Some(interval) => open_with(&task.dir, &options, |own| {
                own.data_block_index_type(DataBlockIndexType::BinarySearch).restart_interval(interval)
            })?,
            None => registry::open(PEER, &task.dir, &options)?,
        };
        match task.seconds {
            None => reads::load(engine, &task.dir, task.n),
            Some(seconds) => {
                let answer = reads::time(engine.as_ref(), task.n, Choice::Present, seconds)?;
                engine.close()?;
                Ok(answer)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{INTERVALS, RestartInterval, Task};
    use crate::experiment::experiment::Experiment;
    use serde_json::json;

    #[test]
    fn intervals_are_those_of_the_tables_written() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = INTERVALS.map(|interval| {
            let dir = dir.path().join(interval.to_string());
            let load = Task { dir: dir.clone(), interval: Some(interval), n: 20_000, seconds: None };
            let loaded = RestartInterval.variant(&json!(load)).unwrap();
            let timed = RestartInterval.variant(&json!(Task { seconds: Some(0.01), ..load })).unwrap();
            assert!(timed["gets"].as_u64().unwrap() > 0);
            loaded["disk_bytes"].as_u64().unwrap()
        });
        assert!(sizes.is_sorted() && sizes[2] > sizes[0], "whole keys take room: {sizes:?}");
    }
}
