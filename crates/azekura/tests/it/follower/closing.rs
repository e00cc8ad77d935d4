//! Followers that are closed by other threads than those that read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::testing::MemFs;
use azekura::{
    CompactionFilter, Database, Event, FilterContext, FilterDecision, FilterValue, Listener, PartitionComponents,
    Result,
};

use super::faults::{config, open_writer};
use crate::testkit::watchdog::wait_until;

/// A compaction filter that drops a handle.
#[derive(Default)]
struct DroppingFilter(Mutex<Option<Database>>);

impl CompactionFilter for DroppingFilter {
    fn name(&self) -> &str {
        "dropping"
    }

    fn filter(&self, _: &FilterContext<'_>, _: &[u8], _: &mut FilterValue<'_>) -> Result<FilterDecision> {
        drop(self.0.lock().unwrap().take());
        Ok(FilterDecision::Keep)
    }
}

#[derive(Default)]
struct ClosedListener(AtomicBool);

impl Listener for ClosedListener {
    fn on_event(&self, event: &Event) {
        if matches!(event, Event::Closed) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// Regression: a compaction of another database dropped the last handle of a follower, and left its close to a worker,
/// which a follower does not have. The follower stayed open as long as the process ran.
#[test]
fn a_compaction_drops_the_last_handle() {
    let machine = MemFs::new();
    let writer = open_writer(&machine);
    let filter = Arc::new(DroppingFilter::default());
    let components = PartitionComponents::default().compaction_filter(Arc::clone(&filter) as _);
    let p = writer.open_partition_with("p", Default::default(), components).unwrap();
    p.insert("k", "v").unwrap();
    let listener = Arc::new(ClosedListener::default());
    let config = config(Arc::new(machine)).listener(listener.clone());
    // The thread of the follower does not catch up during this test.
    let follower = config.follow_interval(Some(Duration::from_secs(1 << 20))).open_follower().unwrap();
    *filter.0.lock().unwrap() = Some(follower);
    p.major_compact().unwrap();
    assert!(filter.0.lock().unwrap().is_none(), "the filter has dropped the handle");
    wait_until("the follower is closed", || listener.0.load(Ordering::SeqCst));
}
