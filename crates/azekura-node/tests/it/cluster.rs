//! A cluster of processes, each on a port of its own.

use crate::clocks::Clocks;
use crate::namespaces::Namespaces;
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::future::Future;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Waits end after this time. It is only reached if something is wrong.
const DEADLINE: Duration = Duration::from_secs(300);

/// Repeats an attempt until it returns a value.
pub(crate) async fn wait_for<T, F: Future<Output = Option<T>>>(what: &str, mut attempt: impl FnMut() -> F) -> T {
    let attempts = async {
        loop {
            if let Some(value) = attempt().await {
                return value;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(DEADLINE, attempts).await.unwrap_or_else(|_| panic!("{what}: not after {DEADLINE:?}"))
}

/// Waits until all clients have ended. `nemesis` runs until then, or ends before.
pub(crate) async fn join_all(clients: Vec<JoinHandle<()>>, nemesis: impl Future<Output = ()>) {
    let clients = async {
        for client in clients {
            client.await.unwrap();
        }
    };
    tokio::pin!(clients);
    tokio::select! {
        () = &mut clients => {}
        () = nemesis => clients.await,
    }
}

/// A client that waits `seconds` seconds for an answer.
pub(crate) fn client_with_timeout(seconds: u64) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder().no_proxy().connect_timeout(Duration::from_millis(500));
    client.timeout(Duration::from_secs(seconds)).build().unwrap()
}

/// A number of consecutive free ports, outside the range that systems take for outgoing connections.
pub(crate) fn free_ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let begin = (std::process::id() % 1000 * 20) as u16;
    loop {
        let first = 10_000 + (begin + NEXT.fetch_add(count, Ordering::Relaxed)) % 20_000;
        let listeners = (first..first + count).map(|port| TcpListener::bind(("127.0.0.1", port)));
        if listeners.collect::<Result<Vec<_>, _>>().is_ok() {
            return first;
        }
    }
}

/// The answer to a request, which is repeated while there is no leader: nothing was done then.
pub(crate) async fn answer(request: RequestBuilder) -> Response {
    wait_for("an answer of a leader", || async {
        let response = request.try_clone().expect("its body is in memory").send().await.unwrap();
        (response.status() != StatusCode::SERVICE_UNAVAILABLE).then_some(response)
    })
    .await
}

pub(crate) struct Cluster {
    dir: TempDir,
    port: u16,
    scheme: &'static str,
    arguments: Vec<String>,
    pub(crate) namespaces: Option<Namespaces>,
    pub(crate) clocks: Option<Clocks>,
    pub(crate) client: Client,
    pub(crate) nodes: BTreeMap<u64, Child>,
}

impl Cluster {
    /// No nodes yet. Up to nine can be started.
    pub(crate) fn new(arguments: &[&str]) -> Cluster {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let client = client_with_timeout(20);
        let (dir, port) = (tempfile::tempdir().unwrap(), free_ports(9));
        Cluster { dir, port, scheme: "http", arguments, namespaces: None, clocks: None, client, nodes: BTreeMap::new() }
    }

    /// A cluster whose nodes are reached with `https`.
    pub(crate) fn with_tls(arguments: &[&str], client: Client) -> Cluster {
        Cluster { client, scheme: "https", ..Cluster::new(arguments) }
    }

    /// A cluster whose nodes have namespaces.
    pub(crate) fn in_namespaces(arguments: &[&str], namespaces: Namespaces) -> Cluster {
        Cluster { namespaces: Some(namespaces), ..Cluster::new(&[&["--insecure"], arguments].concat()) }
    }

    /// Three nodes with a leader.
    pub(crate) async fn of_three(arguments: &[&str]) -> Cluster {
        let mut cluster = Cluster::new(arguments);
        cluster.form(1..=3).await;
        cluster
    }

    pub(crate) async fn form(&mut self, ids: std::ops::RangeInclusive<u64>) {
        for id in ids.clone() {
            self.start(id).await;
        }
        let nodes: BTreeMap<u64, String> = ids.map(|id| (id, self.address(id))).collect();
        let formed = answer(self.post(1, "/cluster/init", &json!({ "nodes": nodes }))).await;
        assert_eq!(formed.status(), StatusCode::OK, "{}", formed.text().await.unwrap());
        self.wait_for_leader().await;
    }

    pub(crate) fn address(&self, id: u64) -> String {
        format!("{}://{}", self.scheme, self.listen(id))
    }

    fn listen(&self, id: u64) -> String {
        let host = self.namespaces.as_ref().map_or_else(|| "127.0.0.1".into(), |namespaces| namespaces.host(id));
        format!("{host}:{}", u64::from(self.port) + id)
    }

    fn node_dir(&self, id: u64) -> std::path::PathBuf {
        self.dir.path().join(format!("node-{id}"))
    }

    /// The command that starts a node. What it prints goes to a file.
    pub(crate) fn command(&self, id: u64) -> Command {
        let program = [env!("CARGO_BIN_EXE_azekura-node").to_owned()];
        let prefix = self.namespaces.iter().flat_map(|namespaces| namespaces.prefix(id));
        let mut words = prefix.chain(program);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(["serve", "--id", &id.to_string(), "--listen", &self.listen(id), "--dir"]);
        command.arg(self.node_dir(id));
        command.envs(self.clocks.iter().flat_map(|clocks| clocks.variables(id)));
        let log = File::options().create(true).append(true).open(self.dir.path().join(format!("node-{id}.log")));
        let log = log.unwrap();
        command.args(&self.arguments).stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        command
    }

    /// Starts a node and waits until it answers.
    pub(crate) async fn start(&mut self, id: u64) {
        let node = self.command(id).spawn().unwrap();
        self.nodes.insert(id, node);
        wait_for("a node answers", || async { self.metrics(id).await }).await;
    }

    /// Ends a node without notice.
    pub(crate) async fn kill(&mut self, id: u64) {
        let mut node = self.nodes.remove(&id).unwrap();
        node.kill().await.unwrap();
    }

    pub(crate) fn signal(&self, id: u64, signal: Signal) {
        let pid = self.nodes[&id].id().and_then(|pid| Pid::from_raw(pid as i32)).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// What the nodes have printed.
    pub(crate) fn logs(&self) -> String {
        let logs = (1..=9).filter_map(|id| {
            let text = std::fs::read_to_string(self.dir.path().join(format!("node-{id}.log"))).ok()?;
            Some(format!("node {id}:\n{text}\n"))
        });
        logs.collect()
    }

    pub(crate) fn request(&self, method: Method, id: u64, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.address(id)))
    }

    pub(crate) fn get(&self, id: u64, path: &str) -> RequestBuilder {
        self.request(Method::GET, id, path)
    }

    pub(crate) fn put(&self, id: u64, path: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
        self.request(Method::PUT, id, path).body(body)
    }

    pub(crate) fn post(&self, id: u64, path: &str, body: &Value) -> RequestBuilder {
        self.request(Method::POST, id, path).json(body)
    }

    /// Raft's metrics of a node that answers.
    pub(crate) async fn metrics(&self, id: u64) -> Option<Value> {
        self.get(id, "/cluster/metrics").send().await.ok()?.json().await.ok()
    }

    /// The leader that at least one node knows and that answers itself.
    pub(crate) async fn wait_for_leader(&self) -> u64 {
        wait_for("a leader", || async {
            for id in self.nodes.keys() {
                let leader = self.metrics(*id).await.and_then(|metrics| metrics["current_leader"].as_u64());
                if leader == Some(*id) {
                    return leader;
                }
            }
            None
        })
        .await
    }

    /// Waits until some node has applied `more` more entries.
    pub(crate) async fn wait_for_progress(&self, more: u64) {
        let ids: Vec<u64> = self.nodes.keys().copied().collect();
        self.wait_for_progress_of(&ids, more).await;
    }

    /// Waits until one of these nodes has applied `more` more entries. The others need not answer.
    pub(crate) async fn wait_for_progress_of(&self, ids: &[u64], more: u64) {
        let applied = || async {
            let mut applied = 0;
            for id in ids {
                let metrics = self.metrics(*id).await.unwrap_or_default();
                applied = applied.max(metrics["last_applied"]["index"].as_u64().unwrap_or_default());
            }
            applied
        };
        let target = applied().await + more;
        wait_for("applied entries", || async { (applied().await >= target).then_some(()) }).await;
    }

    /// Returns when all running nodes have applied everything, and asserts that they have the same records.
    pub(crate) async fn assert_nodes_agree(&self, partition: &str) -> BTreeMap<String, String> {
        wait_for("the nodes have applied the same entries", || async {
            let mut applied = BTreeSet::new();
            for id in self.nodes.keys() {
                let metrics = self.metrics(*id).await?;
                if metrics["last_log_index"] != metrics["last_applied"]["index"] {
                    return None;
                }
                applied.insert(metrics["last_applied"]["index"].as_u64()?);
            }
            (applied.len() == 1).then_some(())
        })
        .await;
        let mut all = Vec::new();
        for id in self.nodes.keys() {
            all.push((id, self.records(*id, partition).await));
        }
        let (_, first) = &all[0];
        for (id, records) in &all {
            assert!(records == first, "node {id} has other records than the first one");
        }
        first.clone()
    }

    /// All records of a partition in the state of a node.
    async fn records(&self, id: u64, partition: &str) -> BTreeMap<String, String> {
        let (mut records, mut after) = (BTreeMap::new(), None);
        loop {
            let query = after.as_ref().map_or_else(String::new, |after: &String| format!("&after={after}"));
            let path = format!("/kv/{partition}?stale=true&limit=1000{query}");
            let page: Value = self.get(id, &path).send().await.unwrap().json().await.unwrap();
            for record in page["records"].as_array().unwrap_or_else(|| panic!("a page: {page}")) {
                let text = |field: &str| record[field].as_str().unwrap().to_owned();
                records.insert(text("key"), text("value"));
            }
            after = page["next"].as_str().map(str::to_owned);
            if after.is_none() {
                return records;
            }
        }
    }
}
