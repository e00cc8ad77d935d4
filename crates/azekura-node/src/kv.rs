//! Requests of clients for records: `/kv/{partition}/{key}`, `/kv/{partition}` and `/batch`.

use crate::error::Failure;
use crate::node::Node;
use crate::records::{self, Change, Command, Condition, Outcome, RecordId};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{OriginalUri, Query, State};
use axum::http::header::{CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderValue, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;

/// Records of a page if the client requests no number.
const PAGE_RECORDS: usize = 100;
const PAGE_RECORDS_MAX: usize = 10_000;
/// A page ends with the record that reaches this number of bytes.
const PAGE_LEN: usize = 4 << 20;
/// Maximum number of conditions and changes of a batch together.
const BATCH_RECORDS_MAX: usize = 10_000;

/// Options of reads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReadOptions {
    /// Whether the node answers from its own state without asking the leader.
    #[serde(default)]
    stale: bool,
}

/// The record that the path `/kv/{partition}/{key}` names. The key is everything after the second slash.
fn record_of(uri: &Uri) -> Result<RecordId, Failure> {
    let path = uri.path().strip_prefix("/kv/").unwrap_or_default();
    let (partition, key) = path.split_once('/').ok_or_else(|| Failure::Invalid("the path has no key".into()))?;
    let partition = percent_decode_str(partition).decode_utf8();
    let partition = partition.map_err(|_| Failure::Invalid("the name of a partition is UTF-8".into()))?.into_owned();
    let record = RecordId { partition, key: percent_decode_str(key).collect() };
    record.check().map_err(Failure::Invalid)?;
    Ok(record)
}

fn etag(value: &[u8]) -> String {
    format!("\"{:032x}\"", records::tag(value))
}

/// The condition that the headers `If-Match` and `If-None-Match` state.
fn condition_of(headers: &HeaderMap) -> Result<Option<Condition>, Failure> {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default().trim());
    match (text(IF_MATCH), text(IF_NONE_MATCH)) {
        (None, None) => Ok(None),
        (None, Some("*")) => Ok(Some(Condition::Absent)),
        (Some("*"), None) => Ok(Some(Condition::Present)),
        (Some(tag), None) => {
            let tag = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
            let tag = tag.and_then(|tag| u128::from_str_radix(tag, 16).ok());
            let tag = tag.ok_or_else(|| Failure::Invalid("If-Match is `*` or the ETag of one value".into()))?;
            Ok(Some(Condition::Tag(tag)))
        }
        _ => Err(Failure::Invalid("a request has If-Match or `If-None-Match: *`, not both".into())),
    }
}

/// `GET /kv/{partition}/{key}`.
pub(crate) async fn get(
    State(node): State<Arc<Node>>,
    OriginalUri(uri): OriginalUri,
    options: Query<ReadOptions>,
) -> Response {
    let answer = async {
        let id = record_of(&uri)?;
        let value = node.read(options.stale, |state| records::get(state, &id)).await?.ok_or(Failure::NotFound)?;
        let headers = [(ETAG, etag(&value)), (CONTENT_TYPE, "application/octet-stream".to_owned())];
        Ok((headers, value.to_vec()).into_response())
    };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}

/// `PUT /kv/{partition}/{key}`.
pub(crate) async fn put(
    State(node): State<Arc<Node>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let answer = async { change(&node, &headers, Change::Insert(record_of(&uri)?, body.into())).await };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}

/// `DELETE /kv/{partition}/{key}`.
pub(crate) async fn delete(
    State(node): State<Arc<Node>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Response {
    let answer = async { change(&node, &headers, Change::Remove(record_of(&uri)?)).await };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}

async fn change(node: &Node, headers: &HeaderMap, change: Change) -> Result<Response, Failure> {
    let conditions = condition_of(headers)?.map(|condition| (change.record().clone(), condition));
    let command = Command { conditions: conditions.into_iter().collect(), changes: vec![change] };
    write(node, command).await
}

async fn write(node: &Node, command: Command) -> Result<Response, Failure> {
    let (len, len_max) = (command.len(), node.limits.command_len);
    if len > len_max {
        return Err(Failure::TooLarge(format!("the command has {len} bytes, at most {len_max} are allowed")));
    }
    match node.write(command).await? {
        (log_id, Outcome::Done) => Ok(Json(Applied { index: log_id.index }).into_response()),
        (_, Outcome::Conflict(record)) => Err(Failure::Conflict(record)),
    }
}

/// The answer to a write.
#[derive(Debug, Serialize)]
struct Applied {
    /// The index of the command in the log.
    index: u64,
}

/// What a scan returns. Keys are bytes, so a query is not decoded as text.
#[derive(Debug, Default)]
struct ScanOptions {
    prefix: Vec<u8>,
    /// The scan begins behind this key.
    after: Option<Vec<u8>>,
    limit: Option<usize>,
    stale: bool,
}

impl ScanOptions {
    fn parse(query: &str) -> Result<ScanOptions, Failure> {
        let mut options = ScanOptions::default();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, text) = part.split_once('=').unwrap_or((part, ""));
            let invalid = || Failure::Invalid(format!("`{part}` is not an option of a scan"));
            match name {
                "prefix" => options.prefix = key_bytes(text),
                "after" => options.after = Some(key_bytes(text)),
                "limit" => options.limit = Some(text.parse().map_err(|_| invalid())?),
                "stale" => options.stale = text.parse().map_err(|_| invalid())?,
                _ => return Err(invalid()),
            }
        }
        Ok(options)
    }
}

/// Keys are percent-encoded as in paths and queries; values are Base64.
#[derive(Debug, Serialize)]
struct ScanPage {
    records: Vec<ScanRecord>,
    /// The argument `after` of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Debug, Serialize)]
struct ScanRecord {
    key: String,
    value: String,
}

fn key_bytes(text: &str) -> Vec<u8> {
    Cow::from(percent_decode_str(text)).into_owned()
}

/// `GET /kv/{partition}`: a page of a scan.
pub(crate) async fn scan(State(node): State<Arc<Node>>, OriginalUri(uri): OriginalUri) -> Response {
    let answer = async {
        let options = ScanOptions::parse(uri.query().unwrap_or_default())?;
        let name = uri.path().strip_prefix("/kv/").unwrap_or_default();
        let partition = percent_decode_str(name).decode_utf8();
        let partition = partition.map_err(|_| Failure::Invalid("the name of a partition is UTF-8".into()))?;
        let prefix = RecordId { partition: partition.into_owned(), key: options.prefix };
        prefix.check().map_err(Failure::Invalid)?;
        let limit = options.limit.unwrap_or(PAGE_RECORDS);
        if !(1..=PAGE_RECORDS_MAX).contains(&limit) {
            return Err(Failure::Invalid(format!("`limit` is 1 to {PAGE_RECORDS_MAX}")));
        }
        let page = node.read(options.stale, |state| {
            records::scan(state, &prefix.partition, &prefix.key, options.after.as_deref(), limit, PAGE_LEN)
        });
        let page = page.await?;
        let encode = |key: &[u8]| percent_encode(key, NON_ALPHANUMERIC).to_string();
        let next = page.records.last().filter(|_| page.has_more).map(|(key, _)| encode(key));
        let records = page.records.iter();
        let records = records.map(|(key, value)| ScanRecord { key: encode(key), value: BASE64_STANDARD.encode(value) });
        Ok(Json(ScanPage { records: records.collect(), next }).into_response())
    };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}

/// A batch: if all conditions hold, all changes happen.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchBody {
    #[serde(default)]
    conditions: Vec<BatchCondition>,
    #[serde(default)]
    changes: Vec<BatchChange>,
}

/// A record must have this value (Base64), or be absent if it is null.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchCondition {
    partition: String,
    key: String,
    value: Option<String>,
}

/// Sets a record to a value (Base64), or removes it if it is null. With `prefix` instead of `key`, removes all records
/// whose keys begin with it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchChange {
    partition: String,
    key: Option<String>,
    prefix: Option<String>,
    value: Option<String>,
}

impl BatchBody {
    fn command(self) -> Result<Command, Failure> {
        let conditions = self.conditions.into_iter().map(|condition| {
            let value = condition.value.as_deref().map(decode_value).transpose()?;
            let id = RecordId { partition: condition.partition, key: key_bytes(&condition.key) };
            id.check().map_err(Failure::Invalid)?;
            Ok((id, value.map_or(Condition::Absent, Condition::Value)))
        });
        let changes = self.changes.into_iter().map(|change| {
            let value = change.value.as_deref().map(decode_value).transpose()?;
            let (key, is_prefix) = match (change.key, change.prefix) {
                (Some(key), None) => (key, false),
                (None, Some(prefix)) if value.is_none() => (prefix, true),
                _ => {
                    return Err(Failure::Invalid("a change has a key, or else a prefix and no value".into()));
                }
            };
            let id = RecordId { partition: change.partition, key: key_bytes(&key) };
            id.check().map_err(Failure::Invalid)?;
            Ok(match value {
                Some(value) => Change::Insert(id, value),
                None if is_prefix => Change::RemovePrefix(id),
                None => Change::Remove(id),
            })
        });
        let conditions = conditions.collect::<Result<_, Failure>>()?;
        Ok(Command { conditions, changes: changes.collect::<Result<_, Failure>>()? })
    }
}

fn decode_value(text: &str) -> Result<Vec<u8>, Failure> {
    BASE64_STANDARD.decode(text).map_err(|error| Failure::Invalid(format!("a value is Base64: {error}")))
}

/// `POST /batch`.
pub(crate) async fn batch(
    State(node): State<Arc<Node>>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
    Json(body): Json<BatchBody>,
) -> Response {
    let answer = async {
        if headers.contains_key(IF_MATCH) || headers.contains_key(IF_NONE_MATCH) {
            return Err(Failure::Invalid("the conditions of a batch are in its body".into()));
        }
        if body.conditions.len() + body.changes.len() > BATCH_RECORDS_MAX {
            let why = format!("a batch has at most {BATCH_RECORDS_MAX} conditions and changes");
            return Err(Failure::TooLarge(why));
        }
        write(&node, body.command()?).await
    };
    answer.await.unwrap_or_else(|failure: Failure| failure.response(&uri))
}
