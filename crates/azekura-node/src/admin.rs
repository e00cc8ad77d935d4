//! Requests that form and change the cluster: `/cluster/...`.

use crate::error::Failure;
use crate::node::{Node, within};
use crate::records::Types;
use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use openraft::errors::RaftError;
use openraft::{BasicNode, ChangeMembers, RaftMetrics};
use reqwest::Url;
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A new learner has caught up, or a new membership is committed, within this time; otherwise the change goes on, and
/// the answer says that its outcome is unknown.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

type Shared = State<Arc<Node>>;

async fn answer<F>(uri: &Uri, change: F) -> Response
where
    F: Future<Output = Result<Response, Failure>>,
{
    let late = || Failure::UnknownOutcome(format!("the change takes longer than {} s", CHANGE_TIMEOUT.as_secs()));
    within(CHANGE_TIMEOUT, change, late).await.unwrap_or_else(|failure| failure.response(uri))
}

/// The first members, by id, with their addresses.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InitBody {
    nodes: BTreeMap<u64, String>,
}

/// `POST /cluster/init`, on one node that has no cluster yet.
pub(crate) async fn init(State(node): Shared, OriginalUri(uri): OriginalUri, Json(body): Json<InitBody>) -> Response {
    let change = async {
        let nodes: BTreeMap<u64, BasicNode> = body
            .nodes
            .into_iter()
            .map(|(id, address)| Ok((id, BasicNode { addr: checked_address(&node, &address)? })))
            .collect::<Result<_, Failure>>()?;
        let addresses: BTreeSet<&str> = nodes.values().map(|node| node.addr.as_str()).collect();
        if addresses.len() < nodes.len() {
            return Err(Failure::Invalid("two nodes have the same address".into()));
        }
        let form = async move {
            // One call at a time, so that none forgets the number of a cluster that another one forms.
            let _turn = node.forming.lock().await;
            let is_new = node.cluster.draw()?;
            let formed = node.raft.initialize(nodes).await;
            if is_new && matches!(formed, Err(RaftError::APIError(_))) {
                node.cluster.forget()?;
            }
            formed.map_err(Failure::from)
        };
        // In a task, which goes on if the client disconnects.
        tokio::spawn(form).await.map_err(|error| Failure::Stopped(error.to_string()))??;
        Ok(Json(json!({})).into_response())
    };
    answer(&uri, change).await
}

/// Addresses have a scheme, a host and a port only: `https`, if the node uses TLS.
fn checked_address(node: &Node, address: &str) -> Result<String, Failure> {
    let schemes: &[&str] = if node.uses_tls { &["https"] } else { &["http", "https"] };
    let address = address.trim_end_matches('/');
    let is_bare = |url: &Url| {
        let has_no_more = url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        url.has_host() && has_no_more && url.username().is_empty() && url.password().is_none()
    };
    match Url::parse(address) {
        Ok(url) if schemes.contains(&url.scheme()) && is_bare(&url) => Ok(address.into()),
        _ => Err(Failure::Invalid(format!("`{address}` is not an address like {}://127.0.0.1:7001", schemes[0]))),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LearnerBody {
    id: u64,
    address: String,
}

/// `POST /cluster/add-learner`: returns when the learner has caught up.
pub(crate) async fn add_learner(
    State(node): Shared,
    OriginalUri(uri): OriginalUri,
    Json(body): Json<LearnerBody>,
) -> Response {
    let change = async {
        let (id, address) = (body.id, checked_address(&node, &body.address)?);
        // openraft keeps the address of a known node, without an error.
        let metrics = node.raft_metrics();
        for (known_id, known) in metrics.membership_config.nodes() {
            if (*known_id == id) != (known.addr == address) {
                return Err(Failure::Refused(format!("node {known_id} is at {}", known.addr)));
            }
        }
        let added = node.raft.add_learner(id, BasicNode { addr: address }, false).await?.log_id;
        // openraft's own wait ends when the learner lacks fewer entries than a snapshot contains.
        let has_caught_up = |metrics: &RaftMetrics<Types>| match &metrics.replication {
            Some(replication) => replication.get(&id).is_none_or(|matching| *matching >= Some(added)),
            None => true,
        };
        let caught_up = node.raft.wait(None).metrics(has_caught_up, "the learner has caught up").await;
        caught_up.map_err(|error| Failure::UnknownOutcome(error.to_string()))?;
        Ok(Json(json!({ "index": added.index })).into_response())
    };
    answer(&uri, change).await
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemovalBody {
    id: u64,
}

/// `POST /cluster/remove-learner`: ends the replication to a node that is not a voter.
pub(crate) async fn remove_learner(
    State(node): Shared,
    OriginalUri(uri): OriginalUri,
    Json(body): Json<RemovalBody>,
) -> Response {
    let change = async {
        node.raft.as_leader()?;
        if !node.raft_metrics().membership_config.membership().learner_ids().any(|id| id == body.id) {
            return Err(Failure::Refused(format!("node {} is not a learner", body.id)));
        }
        let removal = ChangeMembers::RemoveNodes([body.id].into());
        let removed = node.raft.change_membership(removal, false).await?;
        Ok(Json(json!({ "index": removed.log_id.index })).into_response())
    };
    answer(&uri, change).await
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MembershipBody {
    voters: BTreeSet<u64>,
    /// Whether voters that are removed stay as learners.
    #[serde(default)]
    retain: bool,
}

/// `POST /cluster/change-membership`: the voters, all of which are learners or voters already.
pub(crate) async fn change_membership(
    State(node): Shared,
    OriginalUri(uri): OriginalUri,
    Json(body): Json<MembershipBody>,
) -> Response {
    let change = async {
        // It has two steps. As a task, it does the second one even if the client does not wait.
        let raft = node.raft.clone();
        let change = tokio::spawn(async move { raft.change_membership(body.voters, body.retain).await });
        let changed = change.await.map_err(|error| Failure::UnknownOutcome(error.to_string()))??;
        Ok(Json(json!({ "index": changed.log_id.index })).into_response())
    };
    answer(&uri, change).await
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TransferBody {
    to: u64,
}

/// `POST /cluster/transfer-leader`: asks another voter to become the leader, and does not wait for it.
pub(crate) async fn transfer_leader(
    State(node): Shared,
    OriginalUri(uri): OriginalUri,
    Json(body): Json<TransferBody>,
) -> Response {
    let change = async {
        node.raft.as_leader()?;
        // openraft does not check it, and a leader that is to transfer refuses requests until another one is elected.
        let is_voter = node.raft_metrics().membership_config.voter_ids().any(|id| id == body.to);
        if !is_voter || body.to == node.id {
            return Err(Failure::Refused(format!("node {} is not another voter", body.to)));
        }
        node.raft.trigger().transfer_leader(body.to).await?;
        Ok(Json(json!({})).into_response())
    };
    answer(&uri, change).await
}

/// `GET /cluster/metrics`: what Raft says of this node.
pub(crate) async fn metrics(State(node): Shared) -> Response {
    Json(node.raft_metrics()).into_response()
}

/// `GET /health`: 200 if this node knows a leader, with the name and the number of the cluster.
pub(crate) async fn health(State(node): Shared) -> Result<Response, Failure> {
    match node.raft.current_leader().await {
        Some(leader) => Ok(Json(json!({ "leader": leader, "cluster": node.cluster.header() })).into_response()),
        None => Err(Failure::NotLeader(None)),
    }
}
