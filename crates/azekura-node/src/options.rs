//! The command line.

use clap::{Args, Parser, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;

pub(crate) const TOKEN_VARIABLE: &str = "AZEKURA_NODE_TOKEN";

/// A replicated key-value store over HTTP.
#[derive(Debug, Parser)]
#[command(version, args_override_self = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    pub(crate) command: Subcommands,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Subcommands {
    /// Run one node
    Serve(ServeOptions),
    /// Run a cluster of several nodes on this machine, to try it out: without a token and TLS
    Cluster(ClusterOptions),
    /// Write to a cluster for some time, and print how long the writes took
    Load(LoadOptions),
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeOptions {
    /// Number of the node, unlike that of every other node of the cluster
    #[arg(long)]
    pub(crate) id: u64,
    /// Directory of the node, created if it does not exist
    #[arg(long)]
    pub(crate) dir: PathBuf,
    /// Address to listen on. Others than loopback need TLS and a token, or --insecure
    #[arg(long, default_value = "127.0.0.1:7001")]
    pub(crate) listen: SocketAddr,
    /// Name of the cluster. Nodes of other clusters are refused
    #[arg(long, default_value = "azekura")]
    pub(crate) cluster: String,
    /// Token that every request must have as `Authorization: Bearer TOKEN`: the same on all nodes
    #[arg(long, env = TOKEN_VARIABLE, hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// Certificates of the node, PEM
    #[arg(long, requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key of the certificate, PEM
    #[arg(long, requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Certificates of the authorities that the other nodes' certificates are checked with, PEM; those of the system
    /// by default
    #[arg(long)]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Allow to listen beyond loopback without TLS and token
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Shortest time without a message of the leader after which a node wants to be the leader, in milliseconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(20..=600_000))]
    pub(crate) election_timeout_ms: u64,
    /// Number of log entries after which a snapshot is made and older entries are removed
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(10..))]
    pub(crate) snapshot_after: u64,
    /// Time after which a request fails, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pub(crate) request_timeout_ms: u64,
    /// Maximum number of bytes of keys and values of one write
    #[arg(long, default_value_t = 8 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) max_write_len: u64,
    /// Maximum number of MiB of the bodies of requests of clients, and of answers that are not sent yet, at the same
    /// time: at least twice the maximum of one write and 1 MiB. More are answered with 503
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) max_request_mib: u32,
    /// Maximum number of requests of clients at the same time. More are answered with 503
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) max_requests: u32,
    /// Stop when the standard input ends
    #[arg(long, hide = true)]
    pub(crate) until_input_ends: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ClusterOptions {
    /// Number of nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) nodes: u16,
    /// Port of node 1 on loopback; the others have the next ones
    #[arg(long, default_value_t = 7001)]
    pub(crate) port: u16,
    /// Directory below which each node has one. A cluster that was stopped continues
    #[arg(long, default_value = "azekura-cluster")]
    pub(crate) dir: PathBuf,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct LoadOptions {
    /// Address of any node
    #[arg(long, default_value = "http://127.0.0.1:7001")]
    pub(crate) address: String,
    /// Number of clients that write at the same time
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) clients: u64,
    /// Seconds to measure, after one second that is not measured
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) seconds: u64,
    /// Bytes of each value
    #[arg(long, default_value_t = 100)]
    pub(crate) value_size: usize,
    /// Certificates of the authorities that the nodes' certificates are checked with, PEM; by default those of the
    /// system
    #[arg(long)]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Token of the cluster
    #[arg(long, env = TOKEN_VARIABLE, hide_env_values = true)]
    pub(crate) token: Option<String>,
}
