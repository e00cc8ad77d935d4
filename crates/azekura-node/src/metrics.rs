//! Metrics of the node, its Raft instance and its database in the OpenMetrics format.

use crate::error::Failure;
use crate::node::Node;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::fmt;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteAndStatus {
    route: String,
    status: u16,
}

/// Counts requests.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: Family<RouteAndStatus, Counter>,
    durations: Family<Route, Histogram>,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        // From 0.1 ms to 13 s.
        let durations = || Histogram::new(exponential_buckets(0.0001, 2.0, 18));
        Metrics { requests: Family::default(), durations: Family::new_with_constructor(durations) }
    }

    pub(crate) fn count(&self, route: String, status: u16, took: Duration) {
        self.durations.get_or_create(&Route { route: route.clone() }).observe(took.as_secs_f64());
        self.requests.get_or_create(&RouteAndStatus { route, status }).inc();
    }

    /// `GET /metrics`.
    pub(crate) fn exposition(&self, node: &Node) -> Result<Response, Failure> {
        let mut registry = Registry::with_prefix("azekura");
        registry.register("http_requests", "Requests", self.requests.clone());
        registry.register("http_request_seconds", "Duration of requests", self.durations.clone());
        let raft = node.raft_metrics();
        let raft = [
            ("id", Some(raft.id)),
            ("is_leader", Some(u64::from(raft.current_leader == Some(raft.id)))),
            ("term", Some(raft.current_term)),
            ("last_log_index", raft.last_log_index),
            ("committed_index", raft.local_committed.map(|committed| committed.index)),
            ("applied_index", raft.last_applied.map(|applied| applied.index)),
            ("snapshot_index", raft.snapshot.map(|snapshot| snapshot.index)),
            ("purged_index", raft.purged.map(|purged| purged.index)),
        ];
        let raft = raft.iter().map(|(name, value)| (format!("raft_{name}"), value.unwrap_or_default() as f64));
        let database = serde_json::to_value(node.database.metrics()).map_err(|e| Failure::Stopped(e.to_string()))?;
        let mut gauges: Vec<_> = raft.collect();
        add_numbers("database", &database, &mut gauges);
        registry.register_collector(Box::new(Gauges(gauges)));
        let mut text = String::new();
        encode(&mut text, &registry).map_err(|error| Failure::Stopped(error.to_string()))?;
        Ok(([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response())
    }
}

/// The numbers in a value, with the names of their fields. A duration is a number of seconds.
fn add_numbers(name: &str, value: &Value, numbers: &mut Vec<(String, f64)>) {
    match value {
        Value::Bool(value) => numbers.push((name.to_owned(), f64::from(u8::from(*value)))),
        Value::Number(value) => numbers.push((name.to_owned(), value.as_f64().unwrap_or_default())),
        Value::Object(fields) => match (fields.len(), fields.get("secs"), fields.get("nanos")) {
            (2, Some(secs), Some(nanos)) => {
                let seconds = secs.as_f64().unwrap_or_default() + nanos.as_f64().unwrap_or_default() / 1e9;
                numbers.push((format!("{name}_seconds"), seconds));
            }
            _ => fields.iter().for_each(|(field, value)| add_numbers(&format!("{name}_{field}"), value, numbers)),
        },
        Value::Null | Value::String(_) | Value::Array(_) => {}
    }
}

#[derive(Debug)]
struct Gauges(Vec<(String, f64)>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, value) in &self.0 {
            let gauge = ConstGauge::new(*value);
            let help = "As in the metrics of Raft, or in azekura's Metrics";
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}
