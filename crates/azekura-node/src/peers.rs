//! The receiving side of what nodes tell each other: `/raft/...`.

use crate::error::Failure;
use crate::node::{Incoming, Node};
use crate::records::Types;
use crate::wire::{self, CLUSTER_HEADER, MESSAGE_PACK, SnapshotRequest, TARGET_HEADER, TRANSFER_HEADER, Transfer};
use axum::body::Bytes;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName};
use axum::response::{IntoResponse, Response};
use openraft::Snapshot;
use openraft::raft::SnapshotResponse;
use serde::Serialize;
use std::sync::Arc;

type Shared = State<Arc<Node>>;
type Answer = Result<Response, Failure>;

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// # Errors
/// `Misdirected` for a message of another cluster, or for another node.
fn check_headers(node: &Node, headers: &HeaderMap) -> Result<(), Failure> {
    let (cluster, target) = (text(headers, &CLUSTER_HEADER), text(headers, &TARGET_HEADER));
    if target != node.id.to_string() {
        return Err(Failure::Misdirected(format!("this is node {}, not node {target}", node.id)));
    }
    node.cluster.check(cluster)
}

fn encoded<T: Serialize>(answer: &T) -> Answer {
    Ok(([(CONTENT_TYPE, MESSAGE_PACK)], wire::encode(answer)?).into_response())
}

pub(crate) async fn append(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    encoded(&node.raft.append_entries(wire::decode(&body)?).await?)
}

pub(crate) async fn vote(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    encoded(&node.raft.vote(wire::decode(&body)?).await?)
}

pub(crate) async fn pre_vote(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    encoded(&node.raft.pre_vote(wire::decode(&body)?).await?)
}

pub(crate) async fn transfer_leader(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    encoded(&node.raft.handle_transfer_leader(wire::decode(&body)?).await?)
}

pub(crate) async fn snapshot(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    let SnapshotRequest { vote, meta } = wire::decode(&body)?;
    let (number, position) = node.receive(vote, meta).await?;
    encoded(&Transfer { number, position })
}

/// The next frame of a snapshot. The answer to the last one is that of its installation.
pub(crate) async fn snapshot_frame(State(node): Shared, headers: HeaderMap, body: Bytes) -> Answer {
    check_headers(&node, &headers)?;
    let mut slot = node.incoming.lock().await;
    let number = text(&headers, &TRANSFER_HEADER);
    let Some(incoming) = slot.as_mut().filter(|incoming| incoming.number.to_string() == number) else {
        return Err(Failure::Refused(format!("transfer {number} has ended")));
    };
    let Some(received) = tokio::task::block_in_place(|| incoming.receiver.receive(&body))? else {
        return encoded(&None::<SnapshotResponse<Types>>);
    };
    let Some(Incoming { vote, meta, .. }) = slot.take() else { unreachable!("the slot was not empty") };
    drop(slot);
    let snapshot = Snapshot { meta, snapshot: received };
    encoded(&Some(node.raft.install_full_snapshot(vote, snapshot).await?))
}
