//! The sending side of what nodes tell each other.

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
use std::io;
use std::time::Duration;

/// A receiver answers a frame of a snapshot within this time, and what [`transfer_time`] adds.
const FRAME_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes of a message that a network transfers in a second, at least.
const BYTES_PER_S_MIN: u64 = 256 << 10;

/// What a message of this length may take in addition. openraft's timeout of an append is less than the interval of
/// heartbeats, whatever the append contains. One that always takes longer would be repeated forever.
fn transfer_time(len: usize) -> Duration {
    Duration::from_micros((len as u64).saturating_mul(1_000_000) / BYTES_PER_S_MIN)
}

/// Makes connections to other nodes.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub(crate) client: Client,
    pub(crate) cluster: String,
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

/// Why a request has no answer.
#[derive(Debug)]
enum CallError {
    /// It makes sense to wait before the next attempt.
    Unreachable(String),
    Broken(String),
}

impl From<reqwest::Error> for CallError {
    fn from(error: reqwest::Error) -> CallError {
        let text = format!("{:#}", Chain(&error));
        if error.is_connect() || error.is_timeout() { CallError::Unreachable(text) } else { CallError::Broken(text) }
    }
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> CallError {
        CallError::Broken(error.to_string())
    }
}

impl From<CallError> for RPCError<Types> {
    fn from(error: CallError) -> RPCError<Types> {
        match error {
            CallError::Unreachable(why) => Unreachable::from_string(why).into(),
            CallError::Broken(why) => NetworkError::from_string(why).into(),
        }
    }
}

impl From<CallError> for StreamingError<Types> {
    fn from(error: CallError) -> StreamingError<Types> {
        match error {
            CallError::Unreachable(why) => Unreachable::from_string(why).into(),
            CallError::Broken(why) => NetworkError::from_string(why).into(),
        }
    }
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

impl Peer {
    async fn post(
        &self,
        path: &str,
        body: Vec<u8>,
        timeout: Duration,
        transfer: Option<u64>,
    ) -> Result<Response, CallError> {
        let timeout = timeout + transfer_time(body.len());
        let mut request = self.network.client.post(format!("{}{path}", self.address)).timeout(timeout);
        request = request.header(CONTENT_TYPE, MESSAGE_PACK).header(CLUSTER_HEADER, &self.network.cluster);
        request = request.header(TARGET_HEADER, self.target);
        if let Some(number) = transfer {
            request = request.header(TRANSFER_HEADER, number);
        }
        if let Some(token) = &self.network.token {
            request = request.bearer_auth(token);
        }
        let response = request.body(body).send().await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let why = response.text().await.unwrap_or_default();
        Err(CallError::Unreachable(format!("node {} at {} answers {status}: {why}", self.target, self.address)))
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        request: &Q,
        timeout: Duration,
    ) -> Result<A, CallError> {
        let response = self.post(path, wire::encode(request)?, timeout, None).await?;
        Ok(wire::decode(&response.bytes().await?)?)
    }

    /// Sends a snapshot from where an earlier transfer of it ended.
    async fn send_snapshot(
        &self,
        vote: VoteOf<Types>,
        snapshot: SnapshotOf<Types, SnapshotData>,
    ) -> Result<SnapshotResponse<Types>, CallError> {
        let request = SnapshotRequest { vote, meta: snapshot.meta };
        let transfer: Transfer = self.call(wire::SNAPSHOT, &request, FRAME_TIMEOUT).await?;
        let frames = snapshot.snapshot.frames(&transfer.position)?;
        let mut frames = frames.ok_or_else(|| CallError::Broken("a received snapshot is not sent".into()))?;
        while let Some(frame) = tokio::task::block_in_place(|| frames.next()) {
            let response = self.post(wire::SNAPSHOT_FRAME, frame?, FRAME_TIMEOUT, Some(transfer.number)).await?;
            let installed: Option<SnapshotResponse<Types>> = wire::decode(&response.bytes().await?)?;
            if let Some(response) = installed {
                return Ok(response);
            }
        }
        Err(CallError::Broken("the receiver did not install the snapshot after its last frame".into()))
    }
}

impl RaftNetworkV2<Types> for Peer {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<Types>, RPCError<Types>> {
        Ok(self.call(wire::APPEND, &rpc, option.soft_ttl()).await?)
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        Ok(self.call(wire::VOTE, &rpc, option.soft_ttl()).await?)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Types>,
        option: RPCOption,
    ) -> Result<VoteResponse<Types>, RPCError<Types>> {
        Ok(self.call(wire::PRE_VOTE, &rpc, option.soft_ttl()).await?)
    }

    async fn transfer_leader(
        &mut self,
        rpc: TransferLeaderRequest<Types>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Types>, RPCError<Types>> {
        Ok(self.call(wire::TRANSFER_LEADER, &rpc, option.soft_ttl()).await?)
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
