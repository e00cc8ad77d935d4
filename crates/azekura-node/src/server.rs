//! The HTTP server: routes, limits, the token, TLS.

use crate::error::Failure;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::{admin, kv, peers, wire};
use axum::Router;
use axum::body::HttpBody as _;
use axum::extract::{DefaultBodyLimit, MatchedPath, OriginalUri, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};
use std::sync::Arc;
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq as _;
use tokio::sync::Semaphore;
use tower_http::timeout::RequestBodyTimeoutLayer;

/// A request's body is refused if no part of it has arrived for this time.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// All routes. Every request needs the token, if there is one.
pub(crate) fn router(node: Arc<Node>, token: Option<&str>, metrics: Arc<Metrics>) -> Router {
    let capacity = Arc::new(Capacity {
        requests: Semaphore::new(node.limits.requests),
        body_kib: Semaphore::new(node.limits.body_kib),
        body_len_max: node.limits.client_body_len(),
    });
    let records = Router::new()
        .route("/kv/{partition}", get(kv::scan))
        .route("/kv/{partition}/", any(kv::record))
        .route("/kv/{partition}/{*key}", any(kv::record))
        .route("/batch", post(kv::batch))
        .layer(DefaultBodyLimit::max(node.limits.client_body_len()))
        .layer(middleware::from_fn_with_state(capacity, limit_requests));
    let cluster = Router::new()
        .route("/cluster/init", post(admin::init))
        .route("/cluster/add-learner", post(admin::add_learner))
        .route("/cluster/change-membership", post(admin::change_membership))
        .route("/cluster/transfer-leader", post(admin::transfer_leader))
        .route("/cluster/metrics", get(admin::metrics))
        .route("/health", get(admin::health));
    let raft = Router::new()
        .route(wire::APPEND, post(peers::append))
        .route(wire::VOTE, post(peers::vote))
        .route(wire::PRE_VOTE, post(peers::pre_vote))
        .route(wire::TRANSFER_LEADER, post(peers::transfer_leader))
        .route(wire::SNAPSHOT, post(peers::snapshot))
        .route(wire::SNAPSHOT_FRAME, post(peers::snapshot_frame))
        .layer(DefaultBodyLimit::max(node.limits.peer_body_len()));
    let token: Option<Arc<str>> = token.map(Arc::from);
    let exposition = {
        let (node, metrics) = (Arc::clone(&node), Arc::clone(&metrics));
        get(move || async move { metrics.exposition(&node) })
    };
    Router::new()
        .merge(records)
        .merge(cluster)
        .merge(raft)
        .with_state(node)
        .route("/metrics", exposition)
        .layer(RequestBodyTimeoutLayer::new(BODY_TIMEOUT))
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

/// What requests of clients may use at the same time.
#[derive(Debug)]
struct Capacity {
    requests: Semaphore,
    /// KiB of bodies.
    body_kib: Semaphore,
    /// The length of a body that does not state it.
    body_len_max: usize,
}

async fn limit_requests(
    State(capacity): State<Arc<Capacity>>,
    OriginalUri(uri): OriginalUri,
    request: Request,
    next: Next,
) -> Response {
    let body_len = request.body().size_hint().upper().and_then(|len| usize::try_from(len).ok());
    let body_kib = body_len.unwrap_or(usize::MAX).min(capacity.body_len_max) / 1024;
    let body_kib = capacity.body_kib.try_acquire_many(u32::try_from(body_kib).unwrap_or(u32::MAX));
    match (capacity.requests.try_acquire(), body_kib) {
        (Ok(_request), Ok(_body)) => next.run(request).await,
        _ => Failure::Unavailable("too many requests at the same time".into()).response(&uri),
    }
}

async fn count(State(metrics): State<Arc<Metrics>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let begin = Instant::now();
    let response = next.run(request).await;
    metrics.count(route, response.status().as_u16(), begin.elapsed());
    response
}
