//! The sending side of what nodes tell each other.

use crate::identity::Membership;
use crate::records::Types;
use crate::wire::{self, CLUSTER_HEADER, MESSAGE_PACK, SnapshotRequest, TARGET_HEADER, TRANSFER_HEADER, Transfer};
use azekura_raft::SnapshotData;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::RPCOption;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::type_config::alias::{SnapshotOf, VoteOf};
use openraft::{BasicNode, OptionalSend, RaftNetworkFactory, RaftNetworkV2};
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A receiver answers a frame of a snapshot within this time, and what [`wire::transfer_time`] adds.
const FRAME_TIMEOUT: Duration = Duration::from_secs(60);
/// Makes connections to other nodes.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub(crate) client: Client,
    pub(crate) cluster: Arc<Membership>,
    pub(crate) token: Option<String>,
}

impl RaftNetworkFactory<Types> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Peer {
        Peer { network: self.clone(), target, address: node.addr.clone() }
    }
}

/// Another node.
#[derive(Debug)]
pub(crate) struct Peer {
    network: Network,
    target: u64,
    address: String,
}

fn broken(why: impl std::fmt::Display) -> RPCError<Types> {
    NetworkError::from_string(why).into()
}

/// openraft waits before the next attempt only if a node is unreachable.
fn failed(error: reqwest::Error) -> RPCError<Types> {
    let text = Chain(&error).to_string();
    if error.is_connect() || error.is_timeout() { Unreachable::from_string(text).into() } else { broken(text) }
}

/// An error with its sources.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

async fn answer<A: DeserializeOwned>(response: Response) -> Result<A, RPCError<Types>> {
    wire::decode(&response.bytes().await.map_err(failed)?).map_err(broken)
}

impl Peer {
    async fn post(
        &self,
        path: &str,
        body: Vec<u8>,
        timeout: Duration,
        transfer: Option<u64>,
    ) -> Result<Response, RPCError<Types>> {
        let timeout = timeout + wire::transfer_time(body.len());
        let mut request = self.network.client.post(format!("{}{path}", self.address)).timeout(timeout);
        request = request.header(CONTENT_TYPE, MESSAGE_PACK).header(CLUSTER_HEADER, self.network.cluster.header());
        request = request.header(TARGET_HEADER, self.target);
        if let Some(number) = transfer {
            request = request.header(TRANSFER_HEADER, number);
        }
        if let Some(token) = &self.network.token {
            request = request.bearer_auth(token);
        }
        let response = request.body(body).send().await.map_err(failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let why = response.text().await.unwrap_or_default();
        let why = format!("node {} at {} answers {status}: {why}", self.target, self.address);
        Err(Unreachable::from_string(why).into())
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &Q,
        timeout: Duration,
    ) -> Result<A, RPCError<Types>> {
        let response = self.post(path, wire::encode(request).map_err(broken)?, timeout, None).await?;
        answer(response).await
    }

    /// Sends a snapshot from where an earlier transfer of it ended.
    async fn send_snapshot(
        &self,
        vote: VoteOf<Types>,
        snapshot: SnapshotOf<Types, SnapshotData>,
    ) -> Result<SnapshotResponse<Types>, RPCError<Types>> {
        let request = SnapshotRequest { vote, meta: snapshot.meta };
        let transfer: Transfer = self.call(wire::SNAPSHOT, &request, FRAME_TIMEOUT).await?;
        let frames = snapshot.snapshot.frames(&transfer.position).map_err(broken)?;
        let mut frames = frames.ok_or_else(|| broken("a received snapshot is not sent"))?;
        while let Some(frame) = tokio::task::block_in_place(|| frames.next()) {
            let (frame, number) = (frame.map_err(broken)?, Some(transfer.number));
            let response = self.post(wire::SNAPSHOT_FRAME, frame, FRAME_TIMEOUT, number).await?;
            if let Some(installed) = answer::<Option<SnapshotResponse<Types>>>(response).await? {
                return Ok(installed);
            }
        }
        Err(broken("the receiver did not install the snapshot after its last frame"))
    }
}

impl RaftNetworkV2<Types> for Peer {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        self.call(wire::APPEND, &rpc, option.soft_ttl()).await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(wire::VOTE, &rpc, option.soft_ttl()).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        self.call(wire::PRE_VOTE, &rpc, option.soft_ttl()).await
    }

    async fn transfer_leader(
        &mut self,
        rpc: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        self.call(wire::TRANSFER_LEADER, &rpc, option.soft_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: VoteOf<Types>,
        snapshot: SnapshotOf<Types, SnapshotData>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<Types>, StreamingError<Types>> {
        tokio::select! {
            closed = cancel => Err(closed.into()),
            sent = self.send_snapshot(vote, snapshot) => Ok(sent?),
        }
    }
}
