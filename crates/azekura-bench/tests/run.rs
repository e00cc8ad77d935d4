//! The binary as its users run it: parent and children, on azekura, with little data.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(line: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_azekura-bench"))
        .args(line.split_whitespace())
        .args(["--memtable-size", "1M", "--cache-size", "1M", "--dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "databases remain after the run");
    output
}

fn objects(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn a_kill_loses_nothing_and_openings_are_timed() {
    let output = bench("run --workload recovery,open --n 20000 --rounds 2 --threads 1,2 --json");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = objects(&output);
    assert_eq!(rows.len(), 2, "{rows:?}");
    for row in &rows {
        assert_eq!((row["error"].clone(), row["rounds"].as_array().map(Vec::len)), (Value::Null, Some(2)), "{row}");
        for field in ["open_ms", "first_get_ms", "close_ms", "ops_per_s", "p50_us", "space_amp", "peak_rss_bytes"] {
            assert!(row[field].as_f64().is_some_and(|number| number > 0.0), "{field}: {row}");
        }
    }
    assert_eq!((&rows[0]["workload"], &rows[1]["workload"]), (&Value::from("recovery"), &Value::from("open")));
    let counts = ["written_records", "lost_records", "lost_holes"].map(|field| rows[0][field].as_u64());
    assert_eq!(counts, [Some(20_000), Some(0), Some(0)]);
}

#[test]
fn workloads_have_their_own_figures() {
    let output = bench(
        "run --workload fillsync,queue,bloboverwrite,partitions64 --n 2000 --ops 500 --threads 1,2 \
         --value-size 1K-8K --rounds 1 --cold --json",
    );
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = objects(&output);
    assert_eq!(rows.len(), 8);
    for row in &rows {
        assert_eq!((&row["error"], row["ops"].as_u64()), (&Value::Null, Some(500)), "{row}");
        assert!(row["series"].as_array().is_some_and(|series| !series.is_empty()), "{row}");
        assert_eq!(row["scaling"].is_number(), row["threads"] == 2, "{row}");
        let own = match row["workload"].as_str().unwrap() {
            "fillsync" => "commits_per_sync",
            "queue" => "consume_p99_us",
            _ => "write_amp",
        };
        assert!(row[own].as_f64().is_some_and(|number| number > 0.0), "{own}: {row}");
    }
}

#[test]
fn concurrent_writer_has_figures() {
    let output = bench("run --workload readwhilewriting --n 2000 --ops 300000 --write-rate 0 --rounds 1 --json");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = objects(&output);
    for field in ["writes_per_s", "write_p50_us", "write_p99_us", "write_amp"] {
        assert!(rows[0][field].as_f64().is_some_and(|number| number > 0.0), "{field}: {rows:?}");
    }
}

#[test]
fn run_continues_when_a_child_times_out() {
    // With a load timeout of 0 s, the row has the error, and the run fails because the row is azekura's.
    let output = bench("run --workload readrandom,fillrandom --n 200000 --rounds 2 --limit 0 --json");
    assert!(!output.status.success());
    let rows = objects(&output);
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(row["error_kind"], "timed_out", "{row}");
        assert!(row["error"].as_str().unwrap().contains("timed out after 0 s"), "{row}");
        assert_eq!(row["ops_per_s"], 0.0);
    }
}
