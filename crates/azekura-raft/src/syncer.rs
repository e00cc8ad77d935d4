//! One sync for all writes that wait for one.

use crate::codec::io_error;
use azekura::{Database, PersistMode};
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
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
    /// None: the caller syncs.
    thread: Option<JoinHandle<()>>,
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
        let mut syncer = Syncer::inline(move || database.persist(PersistMode::SyncData).map_err(io_error));
        let shared = Arc::clone(&syncer.shared);
        syncer.thread = Some(Builder::new().name("azekura-raft-sync".into()).spawn(move || shared.run())?);
        Ok(syncer)
    }

    /// Calls `sync` in the thread of the caller, once for each callback: for tests on one thread.
    pub fn inline(sync: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Syncer {
        let shared = Shared { sync: Box::new(sync), queue: Mutex::default(), changed: Condvar::new() };
        Syncer { shared: Arc::new(shared), thread: None }
    }

    /// Calls `done` when everything that was written before this call is durable, or with the error of the sync.
    pub fn on_durable(&self, done: impl FnOnce(io::Result<()>) + Send + 'static) {
        if self.thread.is_none() {
            return done((self.shared.sync)());
        }
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.waiting.push(Box::new(done));
        drop(queue);
        self.shared.changed.notify_one();
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).is_closed = true;
        self.shared.changed.notify_one();
        // A callback may hold the last reference to this, so that the thread drops itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Until the syncer is closed and nothing waits.
    fn run(&self) {
        loop {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let is_idle = |queue: &mut Queue| queue.waiting.is_empty() && !queue.is_closed;
            let mut queue = self.changed.wait_while(queue, is_idle).unwrap_or_else(PoisonError::into_inner);
            let waiting = std::mem::take(&mut queue.waiting);
            drop(queue);
            if waiting.is_empty() {
                return; // closed
            }
            let synced = (self.sync)();
            for done in waiting {
                done(match &synced {
                    Ok(()) => Ok(()),
                    Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
                });
            }
        }
    }
}
