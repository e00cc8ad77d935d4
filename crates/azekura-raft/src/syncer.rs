//! One sync for all writes that wait for one.

use crate::codec::io_error;
use azekura::{Database, PersistMode};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Called with the result of the sync.
type Callback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Calls back when what was written before is durable. A thread syncs the database once for all callbacks that wait,
/// of all groups.
///
/// Dropping it syncs for the callbacks that still wait, and ends the thread.
#[derive(Debug)]
pub struct Syncer {
    shared: Arc<Shared>,
    runner: Runner,
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
        self.shared.step()
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
            let is_closed = queue.is_closed;
            drop(queue);
            if self.step() == 0 && is_closed {
                return;
            }
        }
    }

    fn step(&self) -> usize {
        let waiting = std::mem::take(&mut self.lock().waiting);
        if waiting.is_empty() {
            return 0;
        }
        let panicked = |_| Err(io::Error::other("the sync panicked"));
        let synced = catch_unwind(AssertUnwindSafe(|| (self.sync)())).unwrap_or_else(panicked);
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
