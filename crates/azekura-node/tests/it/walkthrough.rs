//! The commands of the README, as they stand there.

use crate::cluster::{client_with_timeout, free_ports, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

const README: &str = include_str!("../../README.md");

/// The blocks of a language in the README.
fn blocks(language: &str) -> Vec<&'static str> {
    let begin = format!("```{language}\n");
    README.split(&begin).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// `azekura-node cluster`, when it has said how to use it.
async fn start(arguments: &str, port: u16, dir: &Path) -> Child {
    let mut cluster = Command::new(env!("CARGO_BIN_EXE_azekura-node"));
    cluster.args(arguments.split(' ')).args(["--port", &port.to_string()]).env("AZEKURA_NODE_TOKEN", "secret");
    let mut cluster = cluster.current_dir(dir).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(cluster.stdout.take().unwrap()).lines();
    while !lines.next_line().await.unwrap().expect("the cluster starts").starts_with("Ctrl-C") {}
    cluster
}

async fn stop(mut cluster: Child) {
    let pid = cluster.id().and_then(|pid| Pid::from_raw(pid as i32)).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert!(cluster.wait().await.unwrap().success(), "the cluster ends without an error");
}

/// Numbers of log entries depend on the number of elections.
fn without_index(text: &str) -> String {
    match text.trim_end().strip_prefix("{\"index\":") {
        Some(rest) if rest.trim_end_matches('}').parse::<u64>().is_ok() => "{\"index\":…}".into(),
        _ => text.trim_end().into(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_is_true() {
    if Command::new("curl").arg("--version").stdout(Stdio::null()).status().await.is_err() {
        println!("skipped: the_readme_is_true needs curl");
        return;
    }
    let (dir, port) = (tempfile::tempdir().unwrap(), free_ports(3));
    let with_ports = |text: &str| {
        (0..3).fold(text.to_owned(), |text, i| text.replace(&(7001 + i).to_string(), &(port + i).to_string()))
    };
    let arguments = blocks("sh")[0].trim().strip_prefix("azekura-node ").unwrap();
    let cluster = start(arguments, port, dir.path()).await;

    let session = with_ports(blocks("console")[0]);
    let mut commands = 0;
    for step in session.split("$ ").skip(1) {
        let (command, expected) = step.split_once('\n').unwrap();
        let output = Command::new("sh").args(["-c", command]).output().await.unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(without_index(&printed), without_index(expected), "{command}\n{problem}");
        commands += 1;
    }
    assert!(commands >= 6, "the session has all its commands");

    stop(cluster).await;
    // It continues with the same records.
    let cluster = start(arguments, port, dir.path()).await;
    let log = wait_for("the second record of the batch", || async {
        let client = client_with_timeout(20);
        let response = client.get(format!("http://127.0.0.1:{port}/kv/log/1")).send().await.ok()?;
        response.status().is_success().then_some(response.text().await.ok()?)
    });
    assert_eq!(log.await, "bye");
    stop(cluster).await;
}

/// Regression: nodes went on when the process that had started them was killed. A token in its environment is not that
/// of the nodes.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_end_with_a_killed_cluster() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_ports(1));
    let mut cluster = start("cluster --nodes 1", port, dir.path()).await;
    cluster.kill().await.unwrap();
    let client = client_with_timeout(20);
    wait_for("the node ends", || async {
        client.get(format!("http://127.0.0.1:{port}/health")).send().await.is_err().then_some(())
    })
    .await;
}
