//! What the harness itself costs per operation: it is inside every engine's figures and pulls ratios towards 1.

use crate::machine::meter::{Meter, Progress};
use crate::workload::Shape;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::time::Instant;

const OPERATIONS: u64 = 400_000;
/// Bytes of records after which it is enough: blobs take microseconds each.
const ENOUGH_BYTES: f64 = 5e8;

/// Nanoseconds per operation that no engine is to blame for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct HarnessCost {
    /// Making a key and a value, reading the clock, counting.
    pub(crate) put_ns: f64,
    /// Making a key, checking a value, reading the clock, counting.
    pub(crate) get_ns: f64,
}

/// Does everything but call an engine, for records of `shape`.
pub(crate) fn measure(shape: &Shape) -> HarnessCost {
    let (keys, values) = (shape.keys(), shape.values());
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let operations = (OPERATIONS as f64).min(ENOUGH_BYTES / shape.mean_record_bytes()).max(100.0) as u64;
    let put_ns = timed(operations, |index| {
        keys.write(index, &mut key);
        values.write(index, 1, &mut value);
        black_box((&key, &value));
    });
    // A record of about the mean size stands for all.
    let distance = |index: &u64| (shape.record_bytes(*index) as f64 - shape.mean_record_bytes()).abs();
    let typical = (0..1000).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    let mut stored = Vec::new();
    values.write(typical, 1, &mut stored);
    let get_ns = timed(operations, |index| {
        keys.write(index, &mut key);
        black_box((&key, values.check(black_box(typical), black_box(&stored))));
    });
    HarnessCost { put_ns, get_ns }
}

fn timed(operations: u64, mut act: impl FnMut(u64)) -> f64 {
    let progress = Progress::default();
    let mut meter = Meter::start(&progress, operations, None);
    let start = Instant::now();
    for index in 0..operations {
        act(index);
        meter.done(1);
    }
    start.elapsed().as_nanos() as f64 / operations as f64
}

#[cfg(test)]
mod tests {
    use super::measure;
    use crate::workload::Shape;
    use crate::workload::keys::KeyOrder;

    #[test]
    fn cost_is_more_than_nothing() {
        let cost =
            measure(&Shape { n: 1, key_size: 16, least_value: 100, value_size: 100, order: KeyOrder::Scrambled });
        assert!(cost.put_ns > 1.0 && cost.get_ns > 1.0, "{cost:?}");
    }
}
