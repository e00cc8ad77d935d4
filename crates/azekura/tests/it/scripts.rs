//! Data-driven scripts: commands and their output, in `testdata/*.txt`, run through the public interface on every
//! engine. `UPDATE=1 cargo test -p azekura --test it scripts` rewrites the expected output.
//!
//! A script consists of blocks that are separated by empty lines. A block is a list of commands, then `----` and their
//! output. Where engines differ, there is one `---- engine …` with output for each group of engines. Lines that start
//! with `#` are comments. A line `engines: …` at the top restricts the script to some engines.
//!
//! Modules, in reading order: `engines` (what a script runs on), `text` (keys, values and bounds as text), `run` (the
//! state of a script, and its commands), `transactions` (commands of transactions).

mod engines;
mod run;
mod text;
mod transactions;

use std::path::PathBuf;

use azekura::testing::{SCRIPT_SEPARATOR, is_in_own_process, parse_script};
use engines::ScriptEngine;
use run::ScriptRun;

/// Commands with their output on each engine.
struct ScriptBlock {
    /// Commands and comments, as written.
    input: Vec<String>,
    outputs: Vec<(ScriptEngine, String)>,
}

fn is_command(line: &str) -> bool {
    !line.starts_with('#') && !line.starts_with("engines:")
}

/// The engines that the script is for; all if it names none.
fn script_engines(script: &str) -> Vec<ScriptEngine> {
    match script.lines().find_map(|line| line.strip_prefix("engines:")) {
        Some(names) => names.split_whitespace().flat_map(ScriptEngine::named).collect(),
        None => engines::ALL.to_vec(),
    }
}

/// Runs all blocks on all engines and returns the script with the output.
fn run_script(script: &str) -> String {
    let blocks = parse_script(script).into_iter().map(|input| ScriptBlock { input, outputs: Vec::new() });
    let mut blocks: Vec<ScriptBlock> = blocks.collect();
    let all = script_engines(script);
    for engine in &all {
        let mut run = ScriptRun::new(*engine);
        for block in &mut blocks {
            let mut output = String::new();
            for command in block.input.iter().filter(|line| is_command(line)) {
                run.run_command(command, &mut output);
            }
            block.outputs.push((*engine, output));
        }
    }
    let texts: Vec<String> = blocks.iter().map(|block| render_block(block, &all)).collect();
    texts.join("\n")
}

fn render_block(block: &ScriptBlock, all: &[ScriptEngine]) -> String {
    let mut text = block.input.join("\n") + "\n";
    if !block.input.iter().any(|line| is_command(line)) {
        return text;
    }
    let mut groups: Vec<(&str, Vec<ScriptEngine>)> = Vec::new();
    for (engine, output) in &block.outputs {
        match groups.iter_mut().find(|(other, _)| other == output) {
            Some((_, engines)) => engines.push(*engine),
            None => groups.push((output, vec![*engine])),
        }
    }
    for (output, engines) in groups {
        let names = if engines == all { String::new() } else { engines::group_names(&engines) };
        text += &format!("{SCRIPT_SEPARATOR}{names}\n{output}");
    }
    text
}

/// Runs the script `testdata/{name}.txt` and compares it with its expected output, or rewrites it.
fn check_script(name: &str) {
    azekura::testing::check_script(&script_folder().join(name).with_extension("txt"), run_script);
}

fn script_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/testdata")
}

#[test]
fn blob_gc() {
    check_script("blob_gc");
}

#[test]
fn blob_separation() {
    check_script("blob_separation");
}

#[test]
fn checkpoint() {
    check_script("checkpoint");
}

#[test]
fn compaction() {
    check_script("compaction");
}

#[test]
fn comparators() {
    check_script("comparators");
}

#[test]
fn disk_full() {
    check_script("disk_full");
}

#[test]
fn expiry() {
    check_script("expiry");
    check_script("expiry_blobs");
    check_script("expiry_compaction");
}

/// How many records fit into a full pool depends on readers of all databases of the process.
#[test]
fn expiry_pools() {
    if is_in_own_process("scripts::expiry_pools") {
        check_script("expiry_pools");
    }
}

#[test]
fn faults() {
    check_script("faults");
    check_script("faults_of_blobs");
}

#[test]
fn flush() {
    check_script("flush");
}

#[test]
fn ingest() {
    check_script("ingest");
}

#[test]
fn iterators() {
    check_script("iterators");
}

#[test]
fn merge() {
    check_script("merge");
}

#[test]
fn merge_compaction() {
    check_script("merge_compaction");
}

#[test]
fn partitions() {
    check_script("partitions");
}

#[test]
fn pools() {
    check_script("pools");
}

#[test]
fn range_deletes() {
    check_script("range_deletes");
}

#[test]
fn range_deletes_of_pools() {
    check_script("range_deletes_of_pools");
}

#[test]
fn recovery() {
    check_script("recovery");
}

#[test]
fn every_script_has_a_test() {
    let tests = include_str!("scripts.rs");
    for entry in std::fs::read_dir(script_folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(tests.contains(&format!("check_script(\"{name}\");")), "{name}.txt is never run");
    }
}

#[test]
fn output_is_grouped_by_engine() {
    let script = "engines: lsm pool\n\n# A comment.\n\nput a 1\nkind\nget a\n----\nwrong\n";
    let found = run_script(script);
    let expected =
        "engines: lsm pool\n\n# A comment.\n\nput a 1\nkind\nget a\n---- lsm\nlsm\na=1\n---- pool\npool\na=1\n";
    assert_eq!(found, expected);
    assert_eq!(run_script(&found), found);
}

#[test]
fn transactions() {
    check_script("transactions");
}
