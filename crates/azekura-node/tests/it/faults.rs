//! Nodes that are killed, stopped and wiped while clients write: no acknowledged write is lost, and all nodes end with
//! the same records.
//!
//! - `AZEKURA_NODE_KILLS`: how often each node is killed (default 2; the long run has 50).

use crate::clocks::Clocks;
use crate::cluster::{Cluster, answer, client_with_timeout, wait_for};
use crate::namespaces::Namespaces;
use reqwest::StatusCode;
use rustix::process::Signal;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::sleep;

const WRITERS: u64 = 4;

pub(crate) fn env_u64(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Clients that write new keys until they are told to end.
struct Writers {
    acknowledged: Arc<Mutex<BTreeSet<String>>>,
    count: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Writers {
    fn start(addresses: Vec<String>) -> Writers {
        let (acknowledged, count, is_over): (Arc<Mutex<BTreeSet<String>>>, Arc<AtomicU64>, Arc<AtomicBool>) =
            Default::default();
        let tasks = (0..WRITERS).map(|writer| {
            let addresses = addresses.clone();
            let (acknowledged, count, is_over) = (Arc::clone(&acknowledged), Arc::clone(&count), Arc::clone(&is_over));
            tokio::spawn(async move {
                let client = client_with_timeout(1);
                for number in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let key = format!("{writer}x{number}");
                    let address = &addresses[(number % addresses.len() as u64) as usize];
                    let response = client.put(format!("{address}/kv/p/{key}")).body(key.clone()).send().await;
                    if response.is_ok_and(|response| response.status() == StatusCode::OK) {
                        acknowledged.lock().unwrap().insert(key);
                        count.fetch_add(1, Ordering::Relaxed);
                    } else {
                        sleep(Duration::from_millis(5)).await;
                    }
                }
            })
        });
        let tasks = tasks.collect();
        Writers { acknowledged, count, is_over, tasks }
    }

    /// Waits until `more` more writes are acknowledged.
    async fn progress(&self, more: u64) {
        let target = self.count.load(Ordering::Relaxed) + more;
        wait_for("acknowledged writes", || async { (self.count.load(Ordering::Relaxed) >= target).then_some(()) })
            .await;
    }

    async fn end(self) -> BTreeSet<String> {
        self.is_over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        Arc::into_inner(self.acknowledged).unwrap().into_inner().unwrap()
    }
}

async fn assert_nothing_is_lost(cluster: &Cluster, acknowledged: &BTreeSet<String>) {
    let records = cluster.assert_nodes_agree("p").await;
    let lost: Vec<_> = acknowledged.iter().filter(|key| !records.contains_key(*key)).collect();
    assert!(lost.is_empty(), "{} of {} acknowledged writes are lost: {lost:?}", lost.len(), acknowledged.len());
}

/// Short timeouts, and a snapshot every few entries, so that killed nodes are caught up by snapshots too.
pub(crate) const ARGUMENTS: [&str; 6] =
    ["--election-timeout-ms", "300", "--snapshot-after", "50", "--request-timeout-ms", "2000"];

#[tokio::test(flavor = "multi_thread")]
async fn killed_nodes_lose_no_acknowledged_write() {
    let mut cluster = Cluster::of_three(&ARGUMENTS).await;
    let writers = Writers::start((1..=3).map(|id| cluster.address(id)).collect());
    for round in 0..env_u64("AZEKURA_NODE_KILLS", 2) {
        for id in 1..=3 {
            writers.progress(20).await;
            cluster.kill(id).await;
            // Every other time, the node misses more entries than the log keeps.
            writers.progress(if round % 2 == 0 { 20 } else { 200 }).await;
            cluster.start(id).await;
        }
        // The leader too, whichever it is.
        writers.progress(20).await;
        let leader = cluster.wait_for_leader().await;
        cluster.kill(leader).await;
        cluster.start(leader).await;
    }
    let acknowledged = writers.end().await;
    assert_nothing_is_lost(&cluster, &acknowledged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_are_killed_at_once() {
    let mut cluster = Cluster::of_three(&ARGUMENTS).await;
    for _ in 0..2 {
        let writers = Writers::start((1..=3).map(|id| cluster.address(id)).collect());
        writers.progress(100).await;
        for id in 1..=3 {
            cluster.kill(id).await;
        }
        let acknowledged = writers.end().await;
        for id in 1..=3 {
            cluster.start(id).await;
        }
        cluster.wait_for_leader().await;
        assert_nothing_is_lost(&cluster, &acknowledged).await;
    }
}

/// Wall clocks jump by hours and years, forward and back, each node's by another time. Nodes are killed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_jump_change_nothing() {
    const HOUR: i64 = 3600;
    let clocks = match Clocks::new() {
        Ok(clocks) => clocks,
        Err(why) => {
            println!("skipped: clocks_that_jump_change_nothing needs a C compiler: {why}");
            return;
        }
    };
    let mut cluster = Cluster::new(&ARGUMENTS);
    cluster.clocks = Some(clocks);
    cluster.form(1..=3).await;
    let writers = Writers::start((1..=3).map(|id| cluster.address(id)).collect());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    // The last one is near the begin of 1970.
    for (round, jump) in [HOUR, -HOUR, 10 * 365 * 24 * HOUR, -now + HOUR].into_iter().enumerate() {
        for id in 1..=3 {
            writers.progress(20).await;
            let offset = if id as usize == round % 3 + 1 { 0 } else { jump + id as i64 * 60 };
            cluster.clocks.as_ref().unwrap().set(id, offset);
            writers.progress(20).await;
            let leader = cluster.wait_for_leader().await;
            if leader == id {
                // In its metrics, openraft states times by the wall clock.
                let has_jumped = wait_for("a time of the leader", || async {
                    let acked = cluster.metrics(id).await?["last_quorum_acked"].as_u64()?;
                    let seconds = (acked / 1_000_000_000) as i64;
                    ((seconds - now - offset).abs() < HOUR / 2 || cluster.wait_for_leader().await != id).then_some(())
                });
                has_jumped.await;
            }
        }
        cluster.kill(round as u64 % 3 + 1).await;
        writers.progress(20).await;
        cluster.start(round as u64 % 3 + 1).await;
    }
    let acknowledged = writers.end().await;
    assert_nothing_is_lost(&cluster, &acknowledged).await;
}

/// A node that stands still for a while is no longer a leader when it continues.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_leader_is_replaced() {
    let cluster = Cluster::of_three(&ARGUMENTS).await;
    let leader = cluster.wait_for_leader().await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    let writers = Writers::start(others.iter().map(|id| cluster.address(*id)).collect());
    writers.progress(20).await;
    cluster.signal(leader, Signal::STOP);
    writers.progress(100).await;
    cluster.signal(leader, Signal::CONT);
    let acknowledged = writers.end().await;
    let key = acknowledged.last().unwrap();
    let value = wait_for("the paused node answers", || async {
        let response = cluster.get(leader, &format!("/kv/p/{key}")).send().await.ok()?;
        response.status().is_success().then_some(response)
    });
    assert_eq!(value.await.text().await.unwrap(), *key, "a read after the pause sees every acknowledged write");
    assert_nothing_is_lost(&cluster, &acknowledged).await;
}

/// A node that has lost its directory is replaced by one with a new id, which gets a snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_node_is_replaced() {
    let mut cluster = Cluster::of_three(&ARGUMENTS).await;
    let writers = Writers::start((1..=3).map(|id| cluster.address(id)).collect());
    writers.progress(300).await;
    cluster.kill(3).await;
    cluster.start(4).await;
    let change = |path: &'static str, body: serde_json::Value| {
        let cluster = &cluster;
        async move {
            wait_for(path, || async {
                let response = cluster.post(1, path, &body).send().await.ok()?;
                response.status().is_success().then_some(())
            })
            .await;
        }
    };
    change("/cluster/add-learner", json!({ "id": 4, "address": cluster.address(4) })).await;
    change("/cluster/change-membership", json!({ "voters": [1, 2, 4] })).await;
    writers.progress(50).await;
    let leader = cluster.wait_for_leader().await;
    if leader != 4 {
        let transfer = cluster.post(leader, "/cluster/transfer-leader", &json!({ "to": 4 }));
        assert!(transfer.send().await.unwrap().status().is_success());
        wait_for("node 4 leads", || async { (cluster.wait_for_leader().await == 4).then_some(()) }).await;
    }
    writers.progress(50).await;
    let acknowledged = writers.end().await;
    let metrics = cluster.metrics(4).await.unwrap();
    assert!(metrics["purged"]["index"].as_u64().unwrap() > 0, "the new node began with a snapshot: {metrics}");
    assert_nothing_is_lost(&cluster, &acknowledged).await;
}

/// Regression: a write that took longer to send than a heartbeat may take was sent again and again, and no later write
/// was applied.
#[tokio::test(flavor = "multi_thread")]
async fn large_writes_pass_slow_networks() {
    let mut cluster = Cluster::new(&["--election-timeout-ms", "1500", "--request-timeout-ms", "30000"]);
    let mut nodes = BTreeMap::new();
    for id in 1..=3 {
        cluster.start(id).await;
        let address = cluster.address(id);
        nodes.insert(id, format!("http://{}", slow_proxy(address.replace("http://", "")).await));
    }
    let init = answer(cluster.post(1, "/cluster/init", &json!({ "nodes": nodes }))).await;
    assert!(init.status().is_success());
    let leader = cluster.wait_for_leader().await;
    let client = client_with_timeout(60);
    for value in [b"first".to_vec(), vec![b'l'; 7 << 20], b"last".to_vec()] {
        let written = wait_for("an answer of a leader", || async {
            let request = client.put(format!("{}/kv/p/k", cluster.address(leader))).body(value.clone());
            let status = request.send().await.unwrap().status();
            (status != StatusCode::SERVICE_UNAVAILABLE).then_some(status)
        });
        assert_eq!(written.await, StatusCode::OK);
    }
}

/// Forwards connections to `to`, at most 64 KiB in 10 ms towards it. Returns its address.
async fn slow_proxy(to: String) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((from, _)) = listener.accept().await {
            let Ok(to) = TcpStream::connect(&to).await else { continue };
            let ((mut from_read, mut from_write), (mut to_read, mut to_write)) = (from.into_split(), to.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut to_read, &mut from_write).await });
            tokio::spawn(async move {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(len @ 1..) = from_read.read(&mut bytes).await {
                    sleep(Duration::from_millis(10)).await;
                    if to_write.write_all(&bytes[..len]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A transfer of a snapshot goes on with the frame in which its connection broke.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_transfer_goes_on() {
    // A single voter, so that no other leader begins another transfer, and no second snapshot after the first.
    let mut cluster = Cluster::new(&["--snapshot-after", "30"]);
    cluster.form(1..=1).await;
    for i in 0..40 {
        // Five frames of 4 MiB with pairs. The number makes the values differ.
        let value = if i < 20 { vec![i as u8; 1 << 20] } else { vec![i as u8] };
        assert!(answer(cluster.put(1, &format!("/kv/p/{i:02}"), value)).await.status().is_success());
    }
    wait_for("the log is purged", || async {
        (cluster.metrics(1).await?["purged"]["index"].as_u64()? > 20).then_some(())
    })
    .await;
    cluster.start(2).await;
    let frames = Arc::default();
    let address = breaking_proxy(cluster.address(2).replace("http://", ""), Arc::clone(&frames)).await;
    let learner = json!({ "id": 2, "address": format!("http://{address}") });
    assert!(answer(cluster.post(1, "/cluster/add-learner", &learner)).await.status().is_success());
    cluster.assert_nodes_agree("p").await;
    let frames = frames.lock().unwrap().clone();
    let last = *frames.last().unwrap();
    assert!(last >= 5, "the snapshot has several frames after the broken one: {frames:?}");
    assert_eq!(frames, (0..=2).chain(2..=last).collect::<Vec<_>>());
}

/// Forwards connections to `to`. In the middle of the first frame of a snapshot with the number 2, it breaks the
/// connection. Puts the numbers of all frames into `frames`. Returns its address.
async fn breaking_proxy(to: String, frames: Arc<Mutex<Vec<u64>>>) -> SocketAddr {
    const REQUEST: &[u8] = b"POST /raft/snapshot/frame ";
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|window| window == what);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            let Ok(mut to) = TcpStream::connect(&to).await else { continue };
            let frames = Arc::clone(&frames);
            tokio::spawn(async move {
                // What was read of the last request for a frame, or what may be its begin.
                let (mut bytes, mut answers, mut seen) = (vec![0; 64 << 10], vec![0; 64 << 10], Vec::new());
                loop {
                    let len = tokio::select! {
                        read = from.read(&mut bytes) => read,
                        read = to.read(&mut answers) => {
                            let Ok(len @ 1..) = read else { return };
                            if from.write_all(&answers[..len]).await.is_err() {
                                return;
                            }
                            continue;
                        }
                    };
                    let Ok(len @ 1..) = len else { return };
                    seen.extend_from_slice(&bytes[..len]);
                    let mut breaks = false;
                    while let Some(at) = find(&seen, REQUEST) {
                        let body = find(&seen[at..], b"\r\n\r\n").map(|len| at + len + 4);
                        let Some(number) = body.and_then(|body| seen[body..].first_chunk()) else { break };
                        let number = u64::from_le_bytes(*number);
                        let mut frames = frames.lock().unwrap();
                        breaks |= number == 2 && !frames.contains(&2);
                        frames.push(number);
                        seen.drain(..at + REQUEST.len());
                    }
                    // Only a request that has just begun is still of interest.
                    if find(&seen, REQUEST).is_none() {
                        seen.drain(..seen.len().saturating_sub(REQUEST.len() - 1));
                    }
                    if to.write_all(&bytes[..len]).await.is_err() || breaks {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A leader that is cut off from the others neither acknowledges writes nor answers reads from what it knows.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_cut_off_from_the_network() {
    let namespaces = match Namespaces::new(3) {
        Ok(namespaces) => namespaces,
        Err(why) => {
            println!("skipped: nodes_are_cut_off_from_the_network needs network namespaces: {why}");
            return;
        }
    };
    let mut cluster = Cluster::in_namespaces(&ARGUMENTS, namespaces);
    cluster.form(1..=3).await;
    let writers = Writers::start((1..=3).map(|id| cluster.address(id)).collect());
    for round in 0..2 {
        writers.progress(10).await;
        let leader = cluster.wait_for_leader().await;
        let other = leader % 3 + 1;
        assert!(answer(cluster.put(other, "/kv/q/round", "before")).await.status().is_success());
        let namespaces = cluster.namespaces.as_ref().unwrap();
        namespaces.cut(leader);
        let value = round.to_string();
        wait_for("the others have a leader", || async {
            let response = cluster.put(other, "/kv/q/round", value.clone()).send().await.ok()?;
            response.status().is_success().then_some(())
        })
        .await;
        // A client beside the old leader.
        let [program, arguments @ ..] = namespaces.prefix(leader);
        let url = format!("{}/kv/q/round", cluster.address(leader));
        let curl = ["curl", "-sS", "--max-time", "5", "-w", "%{http_code}", &url];
        let old = tokio::process::Command::new(program).args(arguments).args(curl).output().await.unwrap();
        let answer = String::from_utf8_lossy(&old.stdout).into_owned();
        assert!(answer.len() >= 3, "curl runs: {}", String::from_utf8_lossy(&old.stderr));
        assert!(!answer.contains("before") && !answer.ends_with("200"), "the old leader answers: {answer}");
        writers.progress(30).await;
        namespaces.heal(leader);
        writers.progress(10).await;
        // A follower.
        let leader = cluster.wait_for_leader().await;
        namespaces.cut(leader % 3 + 1);
        writers.progress(30).await;
        namespaces.heal(leader % 3 + 1);
    }
    let acknowledged = writers.end().await;
    assert_nothing_is_lost(&cluster, &acknowledged).await;
}
