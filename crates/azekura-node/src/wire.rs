//! What nodes send to each other: requests to paths below `/raft/`, with bodies in MessagePack with names of fields,
//! so that a node of a later version may add some.

use crate::records::Types;
use axum::http::{HeaderName, HeaderValue};
use openraft::type_config::alias::{SnapshotMetaOf, VoteOf};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

pub(crate) const APPEND: &str = "/raft/append";
pub(crate) const VOTE: &str = "/raft/vote";
pub(crate) const PRE_VOTE: &str = "/raft/pre-vote";
pub(crate) const TRANSFER_LEADER: &str = "/raft/transfer-leader";
pub(crate) const SNAPSHOT: &str = "/raft/snapshot";
pub(crate) const SNAPSHOT_FRAME: &str = "/raft/snapshot/frame";

/// The sender's cluster: its name, a slash, and its number as hexadecimal digits.
pub(crate) const CLUSTER_HEADER: HeaderName = HeaderName::from_static("x-azekura-cluster");
/// The id of the node for which a request is meant.
pub(crate) const TARGET_HEADER: HeaderName = HeaderName::from_static("x-azekura-target");
/// The number that the answer to [`SNAPSHOT`] has.
pub(crate) const TRANSFER_HEADER: HeaderName = HeaderName::from_static("x-azekura-transfer");
pub(crate) const MESSAGE_PACK: HeaderValue = HeaderValue::from_static("application/msgpack");

/// Begins or continues the transfer of a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotRequest {
    pub(crate) vote: VoteOf<Types>,
    pub(crate) meta: SnapshotMetaOf<Types>,
}

/// Where a transfer begins.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Transfer {
    pub(crate) number: u64,
    /// For `SnapshotData::frames`.
    #[serde(with = "serde_bytes")]
    pub(crate) position: Vec<u8>,
}

/// Number of bytes of a message that a network transfers in a second, at least.
const BYTES_PER_S_MIN: u64 = 256 << 10;

/// What a message of this length may take in addition. openraft's timeout of an append is less than the interval of
/// heartbeats, whatever the append contains. One that always takes longer would be repeated forever.
pub(crate) fn transfer_time(len: usize) -> Duration {
    Duration::from_micros((len as u64).saturating_mul(1_000_000) / BYTES_PER_S_MIN)
}

pub(crate) fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec_named(message).map_err(io::Error::other)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    rmp_serde::from_slice(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
