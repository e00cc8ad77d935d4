//! The HTTP server: routes, limits, the token, TLS.

use crate::error::Failure;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::{admin, kv, peers, wire};
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, FromRequest as _, MatchedPath, OriginalUri, Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use http_body::{Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A request's body arrives within this time, and what [`wire::transfer_time`] adds.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The connection takes this many bytes of an answer at once. It has a few of these parts in its own buffer.
const ANSWER_PART_LEN: usize = 64 << 10;

/// Requests to `/cluster/` at the same time. One that adds a learner waits until that has caught up.
const CLUSTER_REQUESTS: usize = 64;
const CLUSTER_BODY_LEN: usize = 1 << 20;
/// Messages of other nodes at the same time: more than the nodes of a cluster send.
const PEER_REQUESTS: usize = 256;

/// All routes. Every request needs the token, if there is one.
pub(crate) fn router(node: Arc<Node>, token: Option<&str>, metrics: Arc<Metrics>) -> Router {
    let limits = node.limits;
    let of_clients = Capacity::new(limits.requests, limits.body_kib, limits.client_body_len());
    let of_cluster = Capacity::new(CLUSTER_REQUESTS, CLUSTER_REQUESTS * CLUSTER_BODY_LEN / 1024, CLUSTER_BODY_LEN);
    let of_peers = Capacity::new(PEER_REQUESTS, limits.peer_body_len / 1024, limits.peer_body_len);
    let record = get(kv::get).put(kv::put).delete(kv::delete);
    let records = Router::new()
        .route("/kv/{partition}", get(kv::scan))
        .route("/kv/{partition}/", record.clone())
        .route("/kv/{partition}/{*key}", record)
        .route("/batch", post(kv::batch));
    let cluster = Router::new()
        .route("/cluster/init", post(admin::init))
        .route("/cluster/add-learner", post(admin::add_learner))
        .route("/cluster/remove-learner", post(admin::remove_learner))
        .route("/cluster/change-membership", post(admin::change_membership))
        .route("/cluster/transfer-leader", post(admin::transfer_leader));
    let raft = Router::new()
        .route(wire::APPEND, post(peers::append))
        .route(wire::VOTE, post(peers::vote))
        .route(wire::PRE_VOTE, post(peers::pre_vote))
        .route(wire::TRANSFER_LEADER, post(peers::transfer_leader))
        .route(wire::SNAPSHOT, post(peers::snapshot))
        .route(wire::SNAPSHOT_FRAME, post(peers::snapshot_frame));
    let state = Router::new().route("/cluster/metrics", get(admin::metrics)).route("/health", get(admin::health));
    let token: Option<Arc<str>> = token.map(Arc::from);
    let exposition = {
        let (node, metrics) = (Arc::clone(&node), Arc::clone(&metrics));
        get(move || async move { metrics.exposition(&node) })
    };
    of_clients
        .limit(records)
        .merge(of_cluster.limit(cluster))
        .merge(of_peers.limit(raft))
        .merge(state)
        .with_state(node)
        .route("/metrics", exposition)
        .layer(middleware::from_fn_with_state(token, check_token))
        .layer(middleware::from_fn_with_state(metrics, count))
}

async fn check_token(State(token): State<Option<Arc<str>>>, request: Request, next: Next) -> Result<Response, Failure> {
    if let Some(token) = token {
        let sent = request.headers().get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
        let sent = sent.strip_prefix(b"Bearer ").unwrap_or_default();
        if !bool::from(sent.ct_eq(token.as_bytes())) {
            return Err(Failure::Unauthorized);
        }
    }
    Ok(next.run(request).await)
}

/// What requests of one kind may use at the same time.
#[derive(Debug)]
struct Capacity {
    requests: Arc<Semaphore>,
    /// KiB of their bodies, and of the bodies of the answers.
    body_kib: Arc<Semaphore>,
    /// The maximum length of a body, which counts for one that does not state its length.
    body_len_max: usize,
}

impl Capacity {
    fn new(requests: usize, body_kib: usize, body_len_max: usize) -> Arc<Capacity> {
        let semaphore = |permits: usize| Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
        Arc::new(Capacity { requests: semaphore(requests), body_kib: semaphore(body_kib), body_len_max })
    }

    /// Limits the requests of a router.
    fn limit(self: Arc<Self>, router: Router<Arc<Node>>) -> Router<Arc<Node>> {
        let body_len_max = self.body_len_max;
        router.layer(middleware::from_fn_with_state(self, limit_requests)).layer(DefaultBodyLimit::max(body_len_max))
    }

    fn take_request(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.requests).try_acquire_owned().map_err(|_| too_many())
    }

    fn take_body(&self, len: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let kib = u32::try_from(len.min(self.body_len_max) / 1024).unwrap_or(u32::MAX);
        Arc::clone(&self.body_kib).try_acquire_many_owned(kib).map_err(|_| too_many())
    }
}

fn too_many() -> Failure {
    Failure::Unavailable("too many requests at the same time".into())
}

/// Reads the body of a request, which must arrive in time, and handles the request. What it uses is free when the
/// answer is sent.
async fn limit_requests(
    State(capacity): State<Arc<Capacity>>,
    OriginalUri(uri): OriginalUri,
    request: Request,
    next: Next,
) -> Response {
    let answer = async {
        let request_permit = capacity.take_request()?;
        let len =
            request.body().size_hint().upper().map_or(usize::MAX, |len| usize::try_from(len).unwrap_or(usize::MAX));
        let body_permit = capacity.take_body(len)?;
        let limit = BODY_TIMEOUT + wire::transfer_time(len.min(capacity.body_len_max));
        let (parts, body) = request.into_parts();
        let body = Bytes::from_request(Request::from_parts(parts.clone(), body), &());
        let body = match tokio::time::timeout(limit, body).await {
            Ok(Ok(body)) => body,
            Ok(Err(rejection)) => return Ok(rejection.into_response()),
            Err(_) => return Ok(StatusCode::REQUEST_TIMEOUT.into_response()),
        };
        let response = next.run(Request::from_parts(parts, Body::from(body))).await;
        drop(body_permit);
        let (parts, body) = response.into_parts();
        let data = axum::body::to_bytes(body, usize::MAX).await.map_err(|error| Failure::Stopped(error.to_string()))?;
        let answer_permit = capacity.take_body(data.len())?;
        let body = HeldBody { data, _permits: [request_permit, answer_permit] };
        Ok(Response::from_parts(parts, Body::new(body)))
    };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}

/// The body of an answer, which has permits until the last part of it is taken for sending.
#[derive(Debug)]
struct HeldBody {
    data: Bytes,
    _permits: [OwnedSemaphorePermit; 2],
}

impl HttpBody for HeldBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let len = self.data.len().min(ANSWER_PART_LEN);
        Poll::Ready((len > 0).then(|| Ok(Frame::data(self.data.split_to(len)))))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.len() as u64)
    }
}

async fn count(State(metrics): State<Arc<Metrics>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let begin = Instant::now();
    let response = next.run(request).await;
    metrics.count(route, response.status().as_u16(), begin.elapsed());
    response
}
