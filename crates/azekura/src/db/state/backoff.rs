//! Background work that has failed, and when it is tried again.
//!
//! A damaged file does not mend itself, and a full disk stays full for a while. So what has failed is tried again after
//! ever longer pauses, up to a bound, and all other work goes on meanwhile: each kind of work of each partition waits
//! for itself.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::base::sync::lock;
use crate::base::{Error, ErrorKind};
use crate::engine::Task;

/// The first pause is twice as long.
const BACKOFF_BASE_MS: u64 = 50;
/// How often the pause is doubled: up to 3.2 seconds, because space may come back.
const DOUBLINGS_MAX: u32 = 6;
/// The same where bytes on disk are damaged: up to 102 seconds.
const DOUBLINGS_MAX_DAMAGED: u32 = 11;

/// The pause after this many failures in a row: a pure function.
fn backoff_ns(failures: u32, kind: ErrorKind) -> u64 {
    let doublings = if kind == ErrorKind::Corruption { DOUBLINGS_MAX_DAMAGED } else { DOUBLINGS_MAX };
    (BACKOFF_BASE_MS << failures.min(doublings)) * 1_000_000
}

/// Failures in a row of one kind of work. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Backoff(Mutex<FailureSeries>);

#[derive(Debug, Default)]
struct FailureSeries {
    failures: u32,
    /// On the monotonic clock.
    retry_at_ns: u64,
    reported: Option<(ErrorKind, Option<PathBuf>)>,
}

impl Backoff {
    pub(crate) fn record_failure(&self, error: &Error, now_ns: u64) {
        let mut series = lock(&self.0);
        series.failures = series.failures.saturating_add(1);
        series.retry_at_ns = now_ns.saturating_add(backoff_ns(series.failures, error.kind()));
    }

    /// The work was done.
    pub(crate) fn reset(&self) {
        *lock(&self.0) = FailureSeries::default();
    }

    pub(crate) fn is_failing(&self) -> bool {
        lock(&self.0).failures > 0
    }

    /// How long the work still has to wait; `None` if it may be done.
    pub(crate) fn remaining_ns(&self, now_ns: u64) -> Option<u64> {
        let series = lock(&self.0);
        (series.failures > 0 && series.retry_at_ns > now_ns).then(|| series.retry_at_ns - now_ns)
    }

    /// Whether the listener has not heard of such an error yet in this row of failures; it has from now on. Each file
    /// that is damaged is a matter of its own; other errors may name another new file each time.
    pub(crate) fn should_report(&self, error: &Error) -> bool {
        let file = error.file().filter(|_| error.kind() == ErrorKind::Corruption);
        let told = Some((error.kind(), file.map(Path::to_path_buf)));
        std::mem::replace(&mut lock(&self.0).reported, told.clone()) != told
    }
}

/// Those of a partition.
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

    /// What has to wait, and how long.
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
        let pauses = |kind| (1..40).map(move |failures| backoff_ns(failures, kind) / MS).collect::<Vec<_>>();
        let full = pauses(ErrorKind::OutOfSpace);
        assert_eq!((&full[..6], full[38]), (&[100, 200, 400, 800, 1_600, 3_200][..], 3_200));
        assert_eq!(pauses(ErrorKind::Corruption)[38], 102_400);
        assert!(full.is_sorted() && pauses(ErrorKind::Corruption).is_sorted());
    }

    #[test]
    fn tasks_back_off_separately_and_report_once() {
        let backoffs = TaskBackoffs::default();
        let (compact, damaged) = (backoffs.for_task(Task::Compact), Error::corruption("worn"));
        assert!(!compact.is_failing() && backoffs.delayed_tasks(0).next().is_none());
        compact.record_failure(&damaged, 5 * MS);
        assert_eq!(backoffs.delayed_tasks(5 * MS).collect::<Vec<_>>(), [(Task::Compact, 100 * MS)]);
        assert_eq!(backoffs.delayed_tasks(104 * MS).collect::<Vec<_>>(), [(Task::Compact, MS)]);
        assert!(backoffs.delayed_tasks(105 * MS).next().is_none() && compact.is_failing(), "it may be tried again");
        assert!(compact.should_report(&damaged) && !compact.should_report(&damaged));
        compact.record_failure(&damaged, 105 * MS);
        let full = |file: &str| Error::new(ErrorKind::OutOfSpace, "another matter").in_file(file);
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
        assert!(compact.remaining_ns(0) == Some(100 * MS) && compact.should_report(&damaged), "a new row of failures");
    }
}
