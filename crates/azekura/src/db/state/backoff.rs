//! Backoff of failed background tasks: when a failed task is retried, and which of its errors are reported.
//!
//! Each kind of task of each partition has its own backoff, so a failed task delays no other task. The delay doubles
//! with each failure in a row, up to a maximum. The maximum is longer for damaged files, because a retry rarely repairs
//! them, and shorter for other errors, because a full disk may get space at any time.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind};
use crate::engine::Task;

/// Base of the delay in milliseconds; the delay after the first failure is twice as long.
const BACKOFF_BASE_MS: u64 = 50;
/// Maximum number of doublings for errors other than damage: the delay is at most 3.2 seconds.
const DOUBLINGS_MAX: u32 = 6;
/// Maximum number of doublings for damaged files: the delay is at most 102.4 seconds.
const DOUBLINGS_MAX_DAMAGED: u32 = 11;

/// Returns the delay in nanoseconds after `failures` failures in a row. Pure.
fn backoff_ns(failures: u32, kind: ErrorKind) -> u64 {
    let doublings = if kind == ErrorKind::Corruption { DOUBLINGS_MAX_DAMAGED } else { DOUBLINGS_MAX };
    (BACKOFF_BASE_MS << failures.min(doublings)) * 1_000_000
}

/// Consecutive failures of one kind of task. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Backoff(Mutex<FailureSeries>);

#[derive(Debug, Default)]
struct FailureSeries {
    failures: u32,
    /// Earliest time of the next attempt, on the monotonic clock.
    retry_at_ns: u64,
    /// Kind of the last reported error, and its file if the error is `Corruption`.
    reported: Option<(ErrorKind, Option<PathBuf>)>,
}

impl Backoff {
    pub(crate) fn record_failure(&self, error: &Error, now_ns: u64) {
        let mut series = lock(&self.0);
        series.failures = series.failures.saturating_add(1);
        series.retry_at_ns = now_ns.saturating_add(backoff_ns(series.failures, error.kind()));
        debug_assert!(series.retry_at_ns > now_ns || now_ns == u64::MAX, "a failed task waits");
    }

    /// Forgets all failures, after a success.
    pub(crate) fn reset(&self) {
        *lock(&self.0) = FailureSeries::default();
    }

    pub(crate) fn is_failing(&self) -> bool {
        lock(&self.0).failures > 0
    }

    /// Returns the nanoseconds until the next attempt; `None` if the task may run now.
    pub(crate) fn remaining_ns(&self, now_ns: u64) -> Option<u64> {
        let series = lock(&self.0);
        debug_assert!(series.failures > 0 || series.retry_at_ns == 0, "only a failed task waits");
        (series.failures > 0 && series.retry_at_ns > now_ns).then(|| series.retry_at_ns - now_ns)
    }

    /// Returns whether `error` differs from the last reported error of this series of failures, and records it as
    /// reported. Errors of different kinds differ, and so do `Corruption` errors in different files. The file of other
    /// errors is ignored, because each attempt may fail on a new file.
    pub(crate) fn should_report(&self, error: &Error) -> bool {
        let file = error.file().filter(|_| error.kind() == ErrorKind::Corruption);
        let reported = Some((error.kind(), file.map(Path::to_path_buf)));
        std::mem::replace(&mut lock(&self.0).reported, reported.clone()) != reported
    }
}

/// The backoffs of a partition, one for each kind of task.
#[derive(Debug, Default)]
pub(crate) struct TaskBackoffs {
    flush: Backoff,
    compact: Backoff,
    blob_gc: Backoff,
}

impl TaskBackoffs {
    pub(crate) fn for_task(&self, task: Task) -> &Backoff {
        match task {
            Task::Flush => &self.flush,
            Task::Compact => &self.compact,
            Task::BlobGc => &self.blob_gc,
        }
    }

    /// Returns the tasks that may not run yet, with the nanoseconds until their next attempt.
    pub(crate) fn delayed_tasks(&self, now_ns: u64) -> impl Iterator<Item = (Task, u64)> {
        let all = [Task::Flush, Task::Compact, Task::BlobGc].into_iter();
        all.filter_map(move |task| self.for_task(task).remaining_ns(now_ns).map(|ns| (task, ns)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn backoff_grows_up_to_a_bound() {
        let delays = |kind| (1..40).map(move |failures| backoff_ns(failures, kind) / MS).collect::<Vec<_>>();
        let full = delays(ErrorKind::OutOfSpace);
        assert_eq!((&full[..6], full[38]), (&[100, 200, 400, 800, 1_600, 3_200][..], 3_200));
        assert_eq!(delays(ErrorKind::Corruption)[38], 102_400);
        assert!(full.is_sorted() && delays(ErrorKind::Corruption).is_sorted());
    }

    #[test]
    fn tasks_back_off_separately_and_report_once() {
        let backoffs = TaskBackoffs::default();
        let (compact, damaged) = (backoffs.for_task(Task::Compact), Error::corruption("damaged"));
        assert!(!compact.is_failing() && backoffs.delayed_tasks(0).next().is_none());
        compact.record_failure(&damaged, 5 * MS);
        assert_eq!(backoffs.delayed_tasks(5 * MS).collect::<Vec<_>>(), [(Task::Compact, 100 * MS)]);
        assert_eq!(backoffs.delayed_tasks(104 * MS).collect::<Vec<_>>(), [(Task::Compact, MS)]);
        assert!(backoffs.delayed_tasks(105 * MS).next().is_none() && compact.is_failing(), "the task may be retried");
        assert!(compact.should_report(&damaged) && !compact.should_report(&damaged));
        compact.record_failure(&damaged, 105 * MS);
        let full = |file: &str| Error::new(ErrorKind::OutOfSpace, "disk full").in_file(file);
        assert!(
            !compact.should_report(&damaged)
                && compact.should_report(&full("/db/7.sst"))
                && !compact.should_report(&full("/db/8.sst"))
        );
        assert!(
            compact.should_report(&damaged.clone().in_file("/db/1.blob")) && compact.should_report(&damaged),
            "another file"
        );
        assert_eq!(compact.remaining_ns(105 * MS), Some(200 * MS));
        backoffs.for_task(Task::Flush).record_failure(&damaged, 0);
        assert_eq!(
            backoffs.delayed_tasks(10 * MS).map(|(task, _)| task).collect::<Vec<_>>(),
            [Task::Flush, Task::Compact]
        );
        compact.reset();
        assert_eq!(compact.remaining_ns(105 * MS), None);
        compact.record_failure(&damaged, 0);
        assert!(compact.remaining_ns(0) == Some(100 * MS) && compact.should_report(&damaged), "a new series");
    }
}
