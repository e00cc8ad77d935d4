//! `azekura-node cluster`: several nodes as processes on loopback.

use crate::options::{ClusterOptions, TOKEN_VARIABLE};
use reqwest::{Client, StatusCode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

/// A node answers within this time after its start, and a leader is elected.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// A node ends within this time after a signal, or is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts the nodes, forms the cluster if it is new, says how to use it, and waits for a signal.
pub(crate) async fn run(options: ClusterOptions) -> io::Result<()> {
    let ids = 1..=u64::from(options.nodes);
    let last_port = u32::from(options.port) + u32::from(options.nodes) - 1;
    if options.port == 0 || last_port > u32::from(u16::MAX) {
        let why = format!("the nodes need ports {} to {last_port}", options.port);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let port = |id: u64| u64::from(options.port) + id - 1;
    let program = std::env::current_exe()?;
    let mut nodes = BTreeMap::new();
    for id in ids.clone() {
        let mut command = Command::new(&program);
        command.args(["serve", "--id", &id.to_string(), "--listen", &format!("127.0.0.1:{}", port(id)), "--dir"]);
        command.arg(options.dir.join(format!("node-{id}"))).kill_on_drop(true);
        // Nodes end with this process, even if it is killed: then their input ends.
        command.arg("--until-input-ends").stdin(Stdio::piped()).env_remove(TOKEN_VARIABLE);
        // A signal of the terminal goes to this process only, which stops the nodes.
        command.process_group(0);
        nodes.insert(id, command.spawn()?);
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let addresses: BTreeMap<u64, String> = ids.map(|id| (id, format!("http://127.0.0.1:{}", port(id)))).collect();
    let ended = tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        ended = watch(&mut nodes) => ended,
        failed = form_and_wait(&addresses) => failed,
    };
    stop(nodes).await;
    ended
}

/// Returns when a node has ended, which is an error.
async fn watch(nodes: &mut BTreeMap<u64, Child>) -> io::Result<()> {
    loop {
        for (id, node) in nodes.iter_mut() {
            if let Some(status) = node.try_wait()? {
                return Err(io::Error::other(format!("node {id} has ended: {status}")));
            }
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// Forms the cluster unless it exists, prints how to use it, and waits for ever.
async fn form_and_wait(addresses: &BTreeMap<u64, String>) -> io::Result<()> {
    timeout(START_TIMEOUT, form(addresses))
        .await
        .map_err(|_| io::Error::other(format!("the cluster has no leader after {} s", START_TIMEOUT.as_secs())))??;
    let first = addresses.values().next().map_or("", String::as_str);
    let mut out = io::stdout();
    let _ = writeln!(out, "\n{} nodes run. Any of them answers; -L follows to the leader:\n", addresses.len());
    for command in [
        format!("curl -L -X PUT --data-binary 'hello' {first}/kv/greetings/world"),
        format!("curl -L {first}/kv/greetings/world"),
        format!("curl {first}/cluster/metrics"),
    ] {
        let _ = writeln!(out, "    {command}");
    }
    let _ = writeln!(out, "\nCtrl-C stops them. The same command continues with the same records.");
    std::future::pending().await
}

async fn form(addresses: &BTreeMap<u64, String>) -> io::Result<()> {
    let client = Client::builder().no_proxy().build().map_err(io::Error::other)?;
    let first = addresses.values().next().ok_or_else(|| io::Error::other("no nodes"))?;
    for address in addresses.values() {
        while client.get(format!("{address}/cluster/metrics")).send().await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
    }
    let metrics = client.get(format!("{first}/cluster/metrics")).send().await.map_err(io::Error::other)?;
    let metrics: Value = metrics.json().await.map_err(io::Error::other)?;
    if metrics["last_log_index"].is_null() {
        let body = json!({ "nodes": addresses });
        let formed = client.post(format!("{first}/cluster/init")).json(&body).send().await.map_err(io::Error::other)?;
        if !formed.status().is_success() {
            return Err(io::Error::other(formed.text().await.unwrap_or_default()));
        }
    }
    loop {
        let health = client.get(format!("{first}/health")).send().await;
        if health.is_ok_and(|health| health.status() == StatusCode::OK) {
            return Ok(());
        }
        sleep(Duration::from_millis(50)).await;
    }
}

async fn stop(nodes: BTreeMap<u64, Child>) {
    let mut nodes: Vec<Child> = nodes.into_values().collect();
    for node in &nodes {
        let pid = node.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
    for node in &mut nodes {
        let ended: Result<io::Result<ExitStatus>, _> = timeout(STOP_TIMEOUT, node.wait()).await;
        if ended.is_err() {
            let _ = node.kill().await;
        }
    }
}
