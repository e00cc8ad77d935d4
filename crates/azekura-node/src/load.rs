//! `azekura-node load`: clients that write to a cluster, and what they measure.

use crate::options::LoadOptions;
use reqwest::header::LOCATION;
use reqwest::{Client, Response, StatusCode};
use serde_json::json;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Clients begin to measure after this time.
const WARM_UP: Duration = Duration::from_secs(1);

/// A node that is not the leader redirects. It may know an old one.
const REDIRECTIONS_MAX: usize = 5;

/// Writes with as many clients as requested, each of which sends its next write when the last is acknowledged, and
/// prints a line of JSON.
pub(crate) async fn run(options: LoadOptions) -> io::Result<()> {
    // The token is for the leader too, and redirections would be part of each measured time.
    let client = Client::builder().redirect(reqwest::redirect::Policy::none());
    let mut client = client.no_proxy().timeout(Duration::from_secs(20)).tcp_nodelay(true);
    if let Some(path) = &options.tls_ca {
        client = client.tls_certs_only(crate::certificates(path)?);
    }
    if let Some(token) = &options.token {
        let value = format!("Bearer {token}").parse().map_err(io::Error::other)?;
        client = client.default_headers([(reqwest::header::AUTHORIZATION, value)].into_iter().collect());
    }
    let client = client.build().map_err(io::Error::other)?;
    let leader = leader_of(&client, &options.address).await?;
    let value = vec![b'v'; options.value_size];
    let failures = Arc::new(AtomicU64::new(0));
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs(options.seconds);
    let clients = (0..options.clients).map(|number| {
        let (client, leader, value, failures) = (client.clone(), leader.clone(), value.clone(), Arc::clone(&failures));
        tokio::spawn(async move {
            let (mut micros, mut count) = (Vec::new(), 0u64);
            while Instant::now() < end {
                let sent = Instant::now();
                let url = format!("{leader}/kv/load/{number}-{count}");
                let response = client.put(url).body(value.clone()).send().await.and_then(Response::error_for_status);
                match response {
                    Ok(_) if sent >= begin => micros.push(sent.elapsed().as_micros()),
                    Ok(_) => {}
                    Err(_) => _ = failures.fetch_add(1, Ordering::Relaxed),
                }
                count += 1;
            }
            micros
        })
    });
    let clients: Vec<_> = clients.collect();
    tokio::time::sleep_until(begin.into()).await;
    let before = counters(&client, &leader).await?;
    let mut micros = Vec::new();
    for client in clients {
        micros.extend(client.await.map_err(io::Error::other)?);
    }
    let after = counters(&client, &leader).await?;
    micros.sort_unstable();
    let quantile = |q: f64| micros.get((micros.len() as f64 * q) as usize).copied().unwrap_or_default();
    let per_sync = (after.0 - before.0) / (after.1 - before.1).max(1.0);
    let line = json!({
        "clients": options.clients,
        "writes_per_s": micros.len() as u64 / options.seconds.max(1),
        "p50_us": quantile(0.5),
        "p99_us": quantile(0.99),
        "max_us": micros.last(),
        "failures": failures.load(Ordering::Relaxed),
        "leader_entries_per_sync": (per_sync * 100.0).round() / 100.0,
    });
    println!("{line}");
    Ok(())
}

/// The address to which a node redirects, or its own.
async fn leader_of(client: &Client, address: &str) -> io::Result<String> {
    let mut url = format!("{address}/kv/load/leader");
    for _ in 0..REDIRECTIONS_MAX {
        let probe = client.get(url).send().await.map_err(io::Error::other)?;
        match (probe.status(), probe.headers().get(LOCATION).and_then(|location| location.to_str().ok())) {
            (StatusCode::OK | StatusCode::NOT_FOUND, _) => return Ok(probe.url().origin().ascii_serialization()),
            (StatusCode::TEMPORARY_REDIRECT, Some(location)) => url = location.to_owned(),
            _ => return Err(io::Error::other(probe.text().await.unwrap_or_default())),
        }
    }
    Err(io::Error::other("the nodes do not agree on a leader"))
}

/// Applied entries, and syncs of the log, of a node.
async fn counters(client: &Client, address: &str) -> io::Result<(f64, f64)> {
    let text = client.get(format!("{address}/metrics")).send().await.map_err(io::Error::other)?;
    let text = text.text().await.map_err(io::Error::other)?;
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0.0)
    };
    Ok((value("azekura_raft_applied_index "), value("azekura_database_wal_syncs ")))
}
