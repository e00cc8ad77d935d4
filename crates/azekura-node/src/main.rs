//! A replicated key-value store over HTTP: [openraft](https://docs.rs/openraft) decides, azekura stores. The README
//! has a walk-through.

mod admin;
mod connections;
mod error;
mod identity;
mod kv;
mod launch;
mod load;
mod metrics;
mod network;
mod node;
mod options;
mod peers;
mod records;
mod server;
mod wire;

use crate::connections::LimitedAcceptor;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::options::{Options, ServeOptions, Subcommands};
use axum_server::Handle;
use axum_server::tls_rustls::RustlsConfig;
use clap::Parser as _;
use openraft::type_config::async_runtime::watch::WatchReceiver as _;
use reqwest::Certificate;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Requests end within this time after a signal, or are cut off.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection that has sent no request within this time is closed.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Threads that run requests. Reads and writes of the database block them.
const THREADS_MIN: usize = 4;

fn main() -> ExitCode {
    let options = Options::parse();
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        unreachable!("nothing has installed a provider before");
    }
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("error"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let threads = std::thread::available_parallelism().map_or(THREADS_MIN, |cpus| cpus.get().max(THREADS_MIN));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let done = runtime.and_then(|runtime| match options.command {
        Subcommands::Serve(options) => runtime.block_on(serve(options)),
        Subcommands::Cluster(options) => runtime.block_on(launch::run(options)),
        Subcommands::Load(options) => runtime.block_on(load::run(options)),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("azekura-node: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check_options(options: &ServeOptions) -> io::Result<()> {
    let invalid = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    let is_protected = options.token.is_some() && options.tls_cert.is_some();
    if !options.listen.ip().is_loopback() && !is_protected && !options.insecure {
        return invalid("an address beyond loopback needs --token, --tls-cert and --tls-key, or else --insecure");
    }
    if u64::from(options.max_request_mib) << 20 < 2 * options.max_write_len + (1 << 20) {
        return invalid("--max-request-mib is less than one request may have");
    }
    if options.cluster.is_empty() || !options.cluster.bytes().all(|b| b.is_ascii_graphic()) {
        return invalid("the name of a cluster has visible ASCII characters only, and at least one");
    }
    if options.token.as_ref().is_some_and(|token| token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic())) {
        return invalid("a token has visible ASCII characters only, and at least one");
    }
    Ok(())
}

/// The client for messages to other nodes.
fn client(options: &ServeOptions) -> io::Result<reqwest::Client> {
    let mut client = reqwest::Client::builder()
        .connect_timeout(Duration::from_millis(options.election_timeout_ms))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .tcp_nodelay(true);
    if let Some(path) = &options.tls_ca {
        client = client.tls_certs_only(certificates(path)?);
    }
    client.build().map_err(io::Error::other)
}

fn certificates(path: &Path) -> io::Result<Vec<Certificate>> {
    Certificate::from_pem_bundle(&std::fs::read(path)?).map_err(io::Error::other)
}

/// Runs a node until it gets a signal to end, or Raft stops.
async fn serve(options: ServeOptions) -> io::Result<()> {
    check_options(&options)?;
    let connections = connections::max();
    // Before the database is opened, so that a node whose port is used has no effect.
    let listener = std::net::TcpListener::bind(options.listen)?;
    listener.set_nonblocking(true)?;
    let tls = match (&options.tls_cert, &options.tls_key) {
        (Some(cert), Some(key)) => Some(RustlsConfig::from_pem_file(cert, key).await?),
        _ => None,
    };
    let node = Arc::new(Node::start(&options, client(&options)?).await?);
    let handle = Handle::new();
    let input_ended = options.until_input_ends.then(input_end).transpose()?;
    tokio::spawn(shut_down(Arc::clone(&node), handle.clone(), input_ended));
    let app = server::router(Arc::clone(&node), options.token.as_deref(), Arc::new(Metrics::new())).into_make_service();
    let _ = writeln!(io::stdout(), "node {} of cluster `{}` listens on {}", node.id, node.cluster.name, options.listen);
    match tls {
        Some(tls) => {
            let server = axum_server::from_tcp_rustls(listener, tls)?.handle(handle);
            let server = server.map(|acceptor| LimitedAcceptor::new(acceptor, connections));
            server.first_request_timeout(FIRST_REQUEST_TIMEOUT).serve(app).await?;
        }
        None => {
            let server = axum_server::from_tcp(listener)?.handle(handle);
            let server = server.map(|acceptor| LimitedAcceptor::new(acceptor, connections));
            server.first_request_timeout(FIRST_REQUEST_TIMEOUT).serve(app).await?;
        }
    }
    let stopped = node.raft_metrics().running_state;
    // Requests that were cut off may still end.
    let mut node = node;
    let node = loop {
        match Arc::try_unwrap(node) {
            Ok(node) => break node,
            Err(shared) => node = shared,
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    node.stop().await?;
    stopped.map_err(io::Error::other)
}

/// A thread that reads the standard input, and sends when it has ended.
fn input_end() -> io::Result<oneshot::Receiver<()>> {
    let (ended, receiver) = oneshot::channel();
    let read = move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = ended.send(());
    };
    std::thread::Builder::new().name("input".into()).spawn(read)?;
    Ok(receiver)
}

/// Ends the server after a signal, when the input has ended, or when Raft has stopped because of an error.
async fn shut_down(node: Arc<Node>, handle: Handle<std::net::SocketAddr>, input_ended: Option<oneshot::Receiver<()>>) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return;
    };
    let mut metrics = node.raft.metrics();
    let has_stopped =
        async { while metrics.borrow_watched().running_state.is_ok() && metrics.changed().await.is_ok() {} };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = has_stopped => {}
        Some(_) = async { Some(input_ended?.await) } => {}
    }
    drop(metrics);
    drop(node);
    handle.graceful_shutdown(Some(SHUTDOWN_TIMEOUT));
}
