//! Why a request fails, as a response.

use crate::records::{RecordId, Types};
use axum::Json;
use axum::http::header::{CONNECTION, LOCATION, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use openraft::errors::{ClientWriteError, Fatal, ForwardToLeader, InitializeError, LinearizableReadError, RaftError};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use serde_json::{Value, json};
use std::io;

/// Why a request was not fulfilled.
#[derive(Debug)]
pub(crate) enum Failure {
    Invalid(String),
    Unauthorized,
    NotFound,
    /// A condition of a command did not hold.
    Conflict(RecordId),
    /// The request contradicts the state of the cluster.
    Refused(String),
    TooLarge(String),
    /// The request is meant for another cluster or another node.
    Misdirected(String),
    /// Another node is the leader: its address, if it is known.
    NotLeader(Option<String>),
    /// Too many requests, or no majority: nothing was done.
    Unavailable(String),
    /// The command may be applied or not.
    UnknownOutcome(String),
    /// The node has stopped or cannot read its data.
    Stopped(String),
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Failure::Invalid(_) => StatusCode::BAD_REQUEST,
            Failure::Unauthorized => StatusCode::UNAUTHORIZED,
            Failure::NotFound => StatusCode::NOT_FOUND,
            Failure::Conflict(_) | Failure::Refused(_) => StatusCode::CONFLICT,
            Failure::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Failure::Misdirected(_) => StatusCode::MISDIRECTED_REQUEST,
            Failure::NotLeader(Some(_)) => StatusCode::TEMPORARY_REDIRECT,
            Failure::NotLeader(None) | Failure::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Failure::UnknownOutcome(_) => StatusCode::GATEWAY_TIMEOUT,
            Failure::Stopped(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// `error` is one word for programs, `message` a sentence for people.
    fn body(&self) -> Value {
        let (word, message) = match self {
            Failure::Invalid(why) => ("invalid", why.clone()),
            Failure::Unauthorized => ("unauthorized", "the token is missing or wrong".into()),
            Failure::NotFound => ("not-found", "there is no such record".into()),
            Failure::Conflict(RecordId { partition, key }) => {
                let key = percent_encode(key, NON_ALPHANUMERIC).to_string();
                let message = format!("a condition on key {key} of partition {partition} does not hold");
                return json!({ "error": "conflict", "message": message, "partition": partition, "key": key });
            }
            Failure::Refused(why) => ("refused", why.clone()),
            Failure::TooLarge(why) => ("too-large", why.clone()),
            Failure::Misdirected(why) => ("misdirected", why.clone()),
            Failure::NotLeader(Some(address)) => ("not-leader", format!("the leader is at {address}")),
            Failure::NotLeader(None) => ("no-leader", "no leader is known".into()),
            Failure::Unavailable(why) => ("unavailable", why.clone()),
            Failure::UnknownOutcome(why) => ("unknown-outcome", why.clone()),
            Failure::Stopped(why) => ("stopped", why.clone()),
        };
        json!({ "error": word, "message": message })
    }

    /// The response. The leader's address is completed by `uri`, the path and query of the request.
    pub(crate) fn response(self, uri: &Uri) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Failure::NotLeader(Some(address)) = &self {
            let path = uri.path_and_query().map_or("/", |path| path.as_str());
            if let Ok(location) = HeaderValue::from_str(&format!("{address}{path}")) {
                headers.insert(LOCATION, location);
            }
        }
        // Strangers keep no connections.
        if matches!(self, Failure::Unauthorized) {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if matches!(self, Failure::NotLeader(None) | Failure::Unavailable(_)) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Without a redirection, because the request's path is not known.
impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        self.response(&Uri::default())
    }
}

impl From<ForwardToLeader<Types>> for Failure {
    fn from(error: ForwardToLeader<Types>) -> Failure {
        Failure::NotLeader(error.leader_node.map(|node| node.addr))
    }
}

impl From<Fatal<Types>> for Failure {
    fn from(error: Fatal<Types>) -> Failure {
        Failure::Stopped(error.to_string())
    }
}

impl From<RaftError<Types, ClientWriteError<Types>>> for Failure {
    fn from(error: RaftError<Types, ClientWriteError<Types>>) -> Failure {
        match error {
            RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => forward.into(),
            RaftError::APIError(ClientWriteError::LogEntryDiscarded(forward)) => {
                Failure::UnknownOutcome(format!("another node became the leader: {forward}"))
            }
            RaftError::APIError(error) => Failure::Refused(error.to_string()),
            RaftError::Fatal(error) => error.into(),
        }
    }
}

impl From<RaftError<Types, LinearizableReadError<Types>>> for Failure {
    fn from(error: RaftError<Types, LinearizableReadError<Types>>) -> Failure {
        match error {
            RaftError::APIError(LinearizableReadError::ForwardToLeader(forward)) => forward.into(),
            RaftError::APIError(LinearizableReadError::QuorumNotEnough(error)) => {
                Failure::Unavailable(error.to_string())
            }
            RaftError::Fatal(error) => error.into(),
        }
    }
}

impl From<RaftError<Types, InitializeError<Types>>> for Failure {
    fn from(error: RaftError<Types, InitializeError<Types>>) -> Failure {
        match error {
            RaftError::APIError(error) => Failure::Refused(error.to_string()),
            RaftError::Fatal(error) => error.into(),
        }
    }
}

impl From<RaftError<Types>> for Failure {
    fn from(error: RaftError<Types>) -> Failure {
        Failure::Stopped(error.to_string())
    }
}

impl From<azekura::Error> for Failure {
    fn from(error: azekura::Error) -> Failure {
        Failure::Stopped(error.to_string())
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::InvalidData => Failure::Invalid(error.to_string()),
            _ => Failure::Stopped(error.to_string()),
        }
    }
}
