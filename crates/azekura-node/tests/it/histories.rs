//! Concurrent transactions of clients, judged by the checker `adya`: reads of lists and appends to them, as batches
//! with the values that were read as conditions. Nodes are killed, paused and cut off meanwhile, and their clocks jump.
//!
//! - `AZEKURA_NODE_TRANSACTIONS`: number of committed transactions (default 600; the long run has 5,000).

use crate::cluster::{Cluster, client_with_timeout, join_all};
use crate::faults::{ARGUMENTS, env_u64};
use crate::nemesis::Nemesis;
use adya::{History, Opts, Valid, Workload};
use azekura::testing::SeededRng;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::sleep;

const CLIENTS: u64 = 8;
/// After a request without an effect.
const PAUSE: Duration = Duration::from_millis(10);
const HOT_KEYS: u64 = 6;
/// Transactions after which the hot keys are replaced, so that lists stay short.
const TRANSACTIONS_PER_KEYS: u64 = 100;

/// How a transaction ended.
enum End {
    /// With what it read, in the order of its steps.
    Committed(Vec<Value>),
    /// It had no effect.
    Failed,
    Unknown,
}

/// Transactions of one client.
struct Session {
    client: Client,
    addresses: Vec<String>,
    /// Whether reads ask any node for its own state, and are not checked at the end.
    is_stale: bool,
    rng: SeededRng,
}

impl Session {
    fn address(&mut self) -> String {
        self.addresses[self.rng.below(self.addresses.len() as u64) as usize].clone()
    }

    /// The stored value of a list, from any node that answers.
    async fn read(&mut self, key: u64) -> Option<Vec<u8>> {
        let query = if self.is_stale { "?stale=true" } else { "" };
        loop {
            let url = format!("{}/kv/lists/{key}{query}", self.address());
            if let Ok(response) = self.client.get(url).send().await {
                match (response.status(), response.bytes().await) {
                    (StatusCode::OK, Ok(value)) => return Some(value.to_vec()),
                    (StatusCode::NOT_FOUND, _) => return None,
                    _ => {}
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn run(&mut self, steps: &[(u64, Option<u64>)]) -> End {
        let (mut lists, mut first_values): (BTreeMap<u64, Option<Vec<u8>>>, Vec<_>) = Default::default();
        let mut done = Vec::new();
        for (key, appended) in steps {
            if !lists.contains_key(key) {
                let value = self.read(*key).await;
                first_values.push((*key, value.clone()));
                lists.insert(*key, value);
            }
            let list = lists.get_mut(key).expect("just read");
            match appended {
                None => {
                    let numbers: Vec<u64> = list.iter().flat_map(|list| numbers(list)).collect();
                    done.push(json!(["r", key, numbers]));
                }
                Some(number) => {
                    list.get_or_insert_default().extend_from_slice(&number.to_le_bytes());
                    done.push(json!(["append", key, number]));
                }
            }
        }
        let encode = |value: &Option<Vec<u8>>| value.as_ref().map(|value| BASE64_STANDARD.encode(value));
        let record = |key: &u64, value: &Option<Vec<u8>>| {
            let key = key.to_string();
            json!({ "partition": "lists", "key": key, "value": encode(value) })
        };
        let writes = |key: &u64| steps.iter().any(|(written, appended)| written == key && appended.is_some());
        let conditions = first_values.iter().filter(|(key, _)| !self.is_stale || writes(key));
        let conditions: Vec<Value> = conditions.map(|(key, value)| record(key, value)).collect();
        let changes = lists.iter().filter(|(key, _)| writes(key)).map(|(key, value)| record(key, value));
        let body = json!({ "conditions": conditions, "changes": changes.collect::<Vec<_>>() });
        if conditions.is_empty() {
            return End::Committed(done);
        }
        let url = format!("{}/batch", self.address());
        match self.client.post(url).json(&body).send().await {
            Ok(response) => match response.status() {
                StatusCode::OK => End::Committed(done),
                StatusCode::CONFLICT | StatusCode::SERVICE_UNAVAILABLE => End::Failed,
                _ => End::Unknown,
            },
            Err(error) if error.is_connect() => End::Failed,
            Err(_) => End::Unknown,
        }
    }
}

fn numbers(list: &[u8]) -> impl Iterator<Item = u64> + '_ {
    list.chunks_exact(8).map(|number| u64::from_le_bytes(number.try_into().expect("8 bytes")))
}

/// Up to four reads and appends of hot keys. Appended numbers are unique.
fn steps_of(rng: &mut SeededRng, transaction: u64) -> Vec<(u64, Option<u64>)> {
    let keys = transaction / TRANSACTIONS_PER_KEYS * HOT_KEYS;
    let count = 1 + rng.below(4);
    let step = |i| (keys + rng.below(HOT_KEYS), (rng.below(2) == 0).then_some(transaction * 8 + i));
    (0..count).map(step).collect()
}

/// Runs transactions of all clients, at least until `may_end`, and `nemesis` until they have ended, and returns their
/// history.
async fn history(
    addresses: Vec<String>,
    is_stale: bool,
    may_end: Arc<AtomicBool>,
    nemesis: impl Future<Output = ()>,
) -> History {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (next, processes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(CLIENTS)));
    let (committed, count) = (Arc::new(AtomicU64::new(0)), env_u64("AZEKURA_NODE_TRANSACTIONS", 600));
    let clients = (0..CLIENTS).map(|client| {
        let (lines, next, processes) = (Arc::clone(&lines), Arc::clone(&next), Arc::clone(&processes));
        let (committed, may_end) = (Arc::clone(&committed), Arc::clone(&may_end));
        let http = client_with_timeout(3);
        let mut session =
            Session { client: http, addresses: addresses.clone(), is_stale, rng: SeededRng::new(client + 1) };
        tokio::spawn(async move {
            let mut process = client;
            let record = |kind: &str, process: u64, value: &[Value]| {
                let line = json!({ "type": kind, "process": process, "value": value });
                lines.lock().unwrap().push(format!("{line}\n"));
            };
            loop {
                if committed.load(Ordering::Relaxed) >= count && may_end.load(Ordering::Relaxed) {
                    return;
                }
                let transaction = next.fetch_add(1, Ordering::Relaxed);
                let steps = steps_of(&mut session.rng, transaction);
                let invoked = steps.iter().map(|(key, appended)| match appended {
                    None => json!(["r", key, null]),
                    Some(number) => json!(["append", key, number]),
                });
                let invoked: Vec<Value> = invoked.collect();
                record("invoke", process, &invoked);
                match session.run(&steps).await {
                    End::Committed(done) => {
                        record("ok", process, &done);
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    End::Failed => {
                        record("fail", process, &invoked);
                        sleep(PAUSE).await;
                    }
                    End::Unknown => {
                        // It may still happen, so its process does not go on.
                        record("info", process, &invoked);
                        process = processes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        })
    });
    join_all(clients.collect(), nemesis).await;
    let lines = lines.lock().unwrap();
    History::from_json(&lines.concat()).unwrap()
}

fn judge(history: &History) -> adya::Report {
    let timeout = Duration::from_secs(3600);
    let opts = Opts { models: vec!["strict-serializable".into()], timeout, ..Opts::default() };
    adya::check(history, Workload::ListAppend, &opts)
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_are_strictly_serializable() {
    let mut nemesis = Nemesis::new().await;
    let (addresses, may_end) = (nemesis.addresses(), Arc::clone(&nemesis.is_complete));
    let history = history(addresses, false, may_end, nemesis.run()).await;
    nemesis.end().await;
    let report = judge(&history);
    assert!(matches!(report.valid, Valid::True), "{report:?}");
    nemesis.cluster.assert_nodes_agree("lists").await;
}

/// The checker finds reads of followers that do not ask the leader.
#[tokio::test(flavor = "multi_thread")]
async fn stale_reads_are_found() {
    let cluster = Cluster::of_three(&ARGUMENTS).await;
    let addresses = (1..=3).map(|id| cluster.address(id)).collect();
    let report = judge(&history(addresses, true, Arc::new(true.into()), async {}).await);
    assert!(matches!(report.valid, Valid::False), "{report:?}");
}
