//! Single reads and writes of clients, judged by the checker `porcupine`, a program in Go. Nodes are killed, paused and
//! cut off meanwhile, and their clocks jump.
//!
//! - `AZEKURA_NODE_TRANSACTIONS`: number of operations (default 600; the long run has 5,000).

use crate::cluster::{Cluster, client_with_timeout, join_all};
use crate::faults::{ARGUMENTS, env_u64};
use crate::nemesis::Nemesis;
use azekura::testing::SeededRng;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::sleep;

const CLIENTS: u64 = 8;
const KEYS: u64 = 4;
/// Operations after which the keys are replaced, so that a key has few writes whose outcome is unknown. The checker
/// takes exponential time for these.
const OPERATIONS_PER_KEYS: u64 = 100;
/// After a request without an effect.
const PAUSE: Duration = Duration::from_millis(10);

/// The checker, built.
struct Porcupine {
    _dir: TempDir,
    program: PathBuf,
}

impl Porcupine {
    /// None, with a note, if it cannot be built here.
    async fn build() -> Option<Porcupine> {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("registers");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/porcupine");
        let mut go = Command::new("go");
        let built = go.current_dir(source).arg("build").arg("-o").arg(&program).arg(".").output().await;
        match built {
            Ok(output) if output.status.success() => Some(Porcupine { _dir: dir, program }),
            Ok(output) => {
                println!("skipped: porcupine cannot be built: {}", String::from_utf8_lossy(&output.stderr));
                None
            }
            Err(error) => {
                println!("skipped: porcupine needs Go: {error}");
                None
            }
        }
    }

    /// Its verdict: `Ok`, `Illegal` or `Unknown`.
    async fn judge(&self, operations: &[Value]) -> String {
        let mut checker = Command::new(&self.program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines: String = operations.iter().map(|operation| format!("{operation}\n")).collect();
        let mut input = checker.stdin.take().unwrap();
        input.write_all(lines.as_bytes()).await.unwrap();
        drop(input);
        let output = String::from_utf8(checker.wait_with_output().await.unwrap().stdout).unwrap();
        let count = format!("{} operations: ", operations.len());
        output.trim().strip_prefix(&count).unwrap_or_else(|| panic!("all operations are judged: {output}")).to_owned()
    }
}

/// What a client does until all operations are done. Operations that had no effect are left out.
async fn operate(
    client: u64,
    addresses: Vec<String>,
    query: &'static str,
    next: Arc<AtomicU64>,
    may_end: Arc<AtomicBool>,
    operations: Arc<Mutex<Vec<Value>>>,
    begin: Instant,
) {
    let http = client_with_timeout(3);
    let mut rng = SeededRng::new(client + 1);
    let count = env_u64("AZEKURA_NODE_TRANSACTIONS", 600);
    loop {
        if operations.lock().unwrap().len() as u64 >= count && may_end.load(Ordering::Relaxed) {
            return;
        }
        let number = next.fetch_add(1, Ordering::Relaxed);
        let key = number / OPERATIONS_PER_KEYS * KEYS + rng.below(KEYS);
        let is_write = rng.below(2) == 0;
        let url = format!("{}/kv/registers/{key}", addresses[rng.below(addresses.len() as u64) as usize]);
        let call = begin.elapsed().as_nanos() as u64;
        let (value, is_known) = if is_write {
            match http.put(url).body(number.to_string()).send().await {
                Ok(response) if response.status() == StatusCode::OK => (number.to_string(), true),
                Ok(response) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
                    sleep(PAUSE).await;
                    continue;
                }
                Err(error) if error.is_connect() => {
                    sleep(PAUSE).await;
                    continue;
                }
                _ => (number.to_string(), false),
            }
        } else {
            let Ok(response) = http.get(format!("{url}{query}")).send().await else { continue };
            match response.status() {
                StatusCode::OK => (response.text().await.unwrap_or_default(), true),
                StatusCode::NOT_FOUND => (String::new(), true),
                _ => continue,
            }
        };
        // A write whose outcome is unknown may happen at any later time.
        let end = if is_known { begin.elapsed().as_nanos() as u64 } else { i64::MAX as u64 };
        operations.lock().unwrap().push(json!({
            "client": client, "key": key.to_string(), "is_write": is_write, "value": value, "call": call, "return": end,
        }));
    }
}

/// Runs all clients, at least until `may_end`, and `nemesis` until they have ended.
async fn history(
    addresses: Vec<String>,
    query: &'static str,
    may_end: Arc<AtomicBool>,
    nemesis: impl Future<Output = ()>,
) -> Vec<Value> {
    let (next, operations) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let begin = Instant::now();
    let clients = (0..CLIENTS).map(|client| {
        let (next, may_end) = (Arc::clone(&next), Arc::clone(&may_end));
        tokio::spawn(operate(client, addresses.clone(), query, next, may_end, Arc::clone(&operations), begin))
    });
    join_all(clients.collect(), nemesis).await;
    Arc::into_inner(operations).unwrap().into_inner().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn registers_are_linearizable() {
    let Some(porcupine) = Porcupine::build().await else { return };
    let mut nemesis = Nemesis::new().await;
    let (addresses, may_end) = (nemesis.addresses(), Arc::clone(&nemesis.is_complete));
    let operations = history(addresses, "", may_end, nemesis.run()).await;
    nemesis.end().await;
    assert_eq!(porcupine.judge(&operations).await, "Ok");
}

/// The checker finds reads of followers that do not ask the leader.
#[tokio::test(flavor = "multi_thread")]
async fn stale_registers_are_found() {
    let Some(porcupine) = Porcupine::build().await else { return };
    let cluster = Cluster::of_three(&ARGUMENTS).await;
    let addresses = (1..=3).map(|id| cluster.address(id)).collect();
    let operations = history(addresses, "?stale=true", Arc::new(true.into()), std::future::pending()).await;
    assert_eq!(porcupine.judge(&operations).await, "Illegal");
}
