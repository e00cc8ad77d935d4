//! One sync for all writes that wait for one.

use crate::codec::io_error;
use azekura::{Database, PersistMode};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// A sync waits for more callbacks for this part of the time that a sync takes. Measured by the simulation `syncs` with
/// 64 clients and syncs of 3 ms, beside a half and a quarter: all nodes of a cluster sync, so that clients come back to
/// the leader later than its own sync ends.
const BATCHING_WINDOW_DIVISOR: u32 = 3;
/// Maximum time that a sync waits for more callbacks.
const BATCHING_WINDOW_MAX: Duration = Duration::from_millis(2);
/// A sync does not wait if the window is shorter than this.
const BATCHING_WINDOW_MIN: Duration = Duration::from_micros(20);

/// Called with the result of the sync.
type Callback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Calls back when what was written before is durable. A thread syncs the database once for all callbacks that wait,
/// of all groups. If more callbacks are to be expected, because clients wait for the last sync, it waits for them up to
/// a third of the time that a sync takes.
///
/// Dropping it syncs for the callbacks that still wait, and ends the thread.
#[derive(Debug)]
pub struct Syncer {
    shared: Arc<Shared>,
    runner: Runner,
}

/// Callbacks that one sync serves.
pub struct SyncGroup(Vec<Callback>);

impl std::fmt::Debug for SyncGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SyncGroup of {}", self.0.len())
    }
}

/// The thread that syncs.
#[derive(Debug)]
enum Runner {
    Thread(Option<JoinHandle<()>>),
    /// The caller of `step`.
    Stepped,
    /// The caller of `on_durable`.
    Inline,
}

struct Shared {
    sync: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Callback>,
    is_closed: bool,
    /// Callbacks that the last sync served, and those that came meanwhile: as many as there are clients that write in a
    /// closed loop.
    expected: usize,
    /// Moving average of the duration of a sync.
    average_sync: Duration,
}

impl Queue {
    /// The number of callbacks for which a sync waits, and the maximum time. None if it does not wait.
    ///
    /// Without this window, clients that write in a closed loop form two half groups that alternate, each waiting for
    /// the sync of the other.
    fn batching_window(&self) -> Option<(usize, Duration)> {
        let window = (self.average_sync / BATCHING_WINDOW_DIVISOR).min(BATCHING_WINDOW_MAX);
        let is_worth_it = self.waiting.len() < self.expected && window >= BATCHING_WINDOW_MIN && !self.is_closed;
        is_worth_it.then_some((self.expected, window))
    }
}

impl Syncer {
    /// Starts a thread that syncs the database.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn new(database: &Database) -> io::Result<Syncer> {
        let database = database.clone();
        let shared = Shared::new(move || database.persist(PersistMode::SyncData).map_err(io_error));
        let own = Arc::clone(&shared);
        let thread = Builder::new().name("azekura-raft-sync".into()).spawn(move || own.run())?;
        Ok(Syncer { shared, runner: Runner::Thread(Some(thread)) })
    }

    /// Starts no thread: the program calls [`step`](Syncer::step), which is what the thread of [`new`](Syncer::new)
    /// does when callbacks wait. For simulations on one thread.
    pub fn stepped(sync: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Syncer {
        Syncer { shared: Shared::new(sync), runner: Runner::Stepped }
    }

    /// Calls `sync` in the thread of the caller, once for each callback: for tests on one thread.
    pub fn inline(sync: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Syncer {
        Syncer { shared: Shared::new(sync), runner: Runner::Inline }
    }

    /// Calls `done` when everything that was written before this call is durable, or with the error of the sync.
    pub fn on_durable(&self, done: impl FnOnce(io::Result<()>) + Send + 'static) {
        if matches!(self.runner, Runner::Inline) {
            return done((self.shared.sync)());
        }
        self.shared.lock().waiting.push(Box::new(done));
        self.shared.changed.notify_one();
    }

    /// Syncs once for all callbacks that wait now, and calls them. Returns their number; without any it does not sync.
    pub fn step(&self) -> usize {
        self.begin().map_or(0, |group| self.end(group, None))
    }

    /// For how many callbacks, and how long at most, a sync should wait that could begin now. None if it should not.
    pub fn batching_window(&self) -> Option<(usize, Duration)> {
        self.shared.lock().batching_window()
    }

    /// Number of callbacks that wait.
    pub fn waiting(&self) -> usize {
        self.shared.lock().waiting.len()
    }

    /// The first half of a [`step`](Syncer::step): takes the callbacks that wait now. None if there are none. For
    /// simulations of syncs that take time: callbacks that come before the second half wait for the next sync.
    pub fn begin(&self) -> Option<SyncGroup> {
        self.shared.begin()
    }

    /// The second half: syncs, and calls the callbacks. Returns their number. `simulated` is the duration of the sync,
    /// if it is not that of this call.
    pub fn end(&self, group: SyncGroup, simulated: Option<Duration>) -> usize {
        self.shared.end(group, simulated)
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        let Runner::Thread(thread) = &mut self.runner else {
            while self.step() > 0 {}
            return;
        };
        let Some(thread) = thread.take() else { return };
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_one();
        // A callback may hold the last reference to this, so that the thread drops itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn new(sync: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Arc<Shared> {
        Arc::new(Shared { sync: Box::new(sync), queue: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the syncer is closed and nothing waits.
    fn run(&self) {
        loop {
            let is_idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.is_closed;
            let queue = self.changed.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
            let queue = match queue.batching_window() {
                Some((wanted, window)) => {
                    let is_alone = |queue: &mut Queue| queue.waiting.len() < wanted && !queue.is_closed;
                    let waited = self.changed.wait_timeout_while(queue, window, is_alone);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => queue,
            };
            let is_closed = queue.is_closed;
            drop(queue);
            match self.begin() {
                Some(group) => _ = self.end(group, None),
                None if is_closed => return,
                None => {}
            }
        }
    }

    fn begin(&self) -> Option<SyncGroup> {
        let waiting = std::mem::take(&mut self.lock().waiting);
        (!waiting.is_empty()).then_some(SyncGroup(waiting))
    }

    fn end(&self, SyncGroup(waiting): SyncGroup, simulated: Option<Duration>) -> usize {
        let begin = Instant::now();
        let panicked = |_| Err(io::Error::other("the sync panicked"));
        let synced = catch_unwind(AssertUnwindSafe(|| (self.sync)())).unwrap_or_else(panicked);
        let took = simulated.unwrap_or_else(|| begin.elapsed());
        let mut queue = self.lock();
        queue.expected = waiting.len() + queue.waiting.len();
        queue.average_sync = if queue.average_sync.is_zero() { took } else { (queue.average_sync * 7 + took) / 8 };
        drop(queue);
        let count = waiting.len();
        for done in waiting {
            let result = match &synced {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            // A panic concerns one caller. The others are called, and later syncs are done.
            let _ = catch_unwind(AssertUnwindSafe(|| done(result)));
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::Syncer;
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    /// A syncer, the number of its syncs, and the results that callbacks of `wait` got.
    fn stepped(fails: bool) -> (Syncer, Arc<AtomicUsize>, Arc<Mutex<Vec<bool>>>) {
        let syncs = Arc::new(AtomicUsize::new(0));
        let own = Arc::clone(&syncs);
        let syncer = Syncer::stepped(move || {
            own.fetch_add(1, Ordering::Relaxed);
            if fails { Err(io::Error::other("planted")) } else { Ok(()) }
        });
        (syncer, syncs, Arc::default())
    }

    fn wait(syncer: &Syncer, results: &Arc<Mutex<Vec<bool>>>) {
        let results = Arc::clone(results);
        syncer.on_durable(move |synced| results.lock().unwrap().push(synced.is_ok()));
    }

    #[test]
    fn one_step_syncs_once_for_all_callbacks() {
        for fails in [false, true] {
            let (syncer, syncs, results) = stepped(fails);
            assert_eq!(syncer.step(), 0);
            wait(&syncer, &results);
            wait(&syncer, &results);
            assert!(results.lock().unwrap().is_empty());
            assert_eq!((syncer.step(), syncer.step()), (2, 0));
            assert_eq!(syncs.load(Ordering::Relaxed), 1);
            assert_eq!(*results.lock().unwrap(), [!fails; 2]);
            wait(&syncer, &results);
            drop(syncer);
            assert_eq!(*results.lock().unwrap(), [!fails; 3]);
        }
    }

    /// Otherwise each sync would serve one of two half groups of clients.
    #[test]
    fn sync_waits_for_as_many_as_before() {
        let (syncer, _, results) = stepped(false);
        let window = |syncer: &Syncer| syncer.batching_window().map(|(wanted, window)| (wanted, window.as_millis()));
        let sync = |ms: u64, meanwhile: usize| {
            let group = syncer.begin().unwrap();
            (0..meanwhile).for_each(|_| wait(&syncer, &results));
            syncer.end(group, Some(Duration::from_millis(ms)))
        };
        wait(&syncer, &results);
        assert_eq!(window(&syncer), None, "before the first sync");
        assert_eq!(sync(3, 2), 1);
        assert_eq!(window(&syncer), Some((3, 1)), "the client of the last sync comes back");
        wait(&syncer, &results);
        assert_eq!(window(&syncer), None, "all are there");
        assert_eq!(sync(3, 0), 3);
        wait(&syncer, &results);
        assert_eq!(window(&syncer), Some((3, 1)));
        assert_eq!(sync(3, 0), 1);
        wait(&syncer, &results);
        assert_eq!(window(&syncer), None, "the others did not come");
        assert_eq!(sync(1_000, 1), 1);
        assert_eq!(window(&syncer), Some((2, 2)), "the window is limited");
    }

    /// Regression: the thread ended, and callbacks of all groups waited forever.
    #[test]
    fn panicking_callback_stops_no_others() {
        let (syncer, _, results) = stepped(false);
        syncer.on_durable(|_| panic!("planted"));
        wait(&syncer, &results);
        assert_eq!(syncer.step(), 2);
        wait(&syncer, &results);
        assert_eq!(syncer.step(), 1);
        assert_eq!(*results.lock().unwrap(), [true; 2]);
    }
}
