//! The first fatal error of a database, after which writes fail and reads continue.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::base::event::{Event, Listener};
use crate::base::{Error, ErrorKind, Result};
use crate::db::state::event_queue::EventQueue;

/// The fatal error of a database: the first failed sync of the write-ahead log (WAL) or of the manifest, or a panic.
/// Afterwards writes fail and reads continue.
///
/// After a failed sync the kernel may have marked the pages clean, so a later successful sync does not show that the
/// data is durable. Only reopening the database ends the poisoned state.
pub(crate) struct DbPoison {
    error: OnceLock<Error>,
    events: EventQueue,
}

impl DbPoison {
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> DbPoison {
        DbPoison { error: OnceLock::new(), events: EventQueue::new(listener) }
    }

    /// Poisons the database with `cause`, unless it is poisoned already. Returns `cause` as a `Poisoned` error.
    pub(crate) fn set(&self, cause: Error) -> Error {
        let error = cause.with_kind(ErrorKind::Poisoned);
        if self.error.set(error.clone()).is_ok() {
            self.emit(&Event::Poisoned { error: error.clone() });
        }
        error
    }

    /// Returns the fatal error if the database is poisoned.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.error.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.error.get().is_some()
    }

    /// Queues an event for the listener.
    pub(crate) fn emit(&self, event: &Event) {
        self.events.push(event);
    }

    /// Returns the event queue. A caller that delivers events passes the result to
    /// [`record_delivery`](DbPoison::record_delivery).
    pub(crate) fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Poisons the database, without an event, if a delivery did not succeed because the listener panicked.
    pub(crate) fn record_delivery(&self, succeeded: bool) {
        if !succeeded {
            let error = Error::new(ErrorKind::Poisoned, "a listener panicked");
            let _poisoned_before = self.error.set(error);
        }
    }

    /// Runs `work`, which may call code of the user. A panic in it poisons the database, and is the error `message`.
    #[inline]
    pub(crate) fn catch_panics<T>(&self, message: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(self.set(Error::new(ErrorKind::Poisoned, message))))
    }

    /// Returns `result`, and poisons the database if it is a `Poisoned` error.
    #[inline]
    pub(crate) fn poison_on_failure<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| if error.kind() == ErrorKind::Poisoned { self.set(error) } else { error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct PanickingListener;
    impl Listener for PanickingListener {
        fn on_event(&self, _: &Event) {
            panic!("listener");
        }
    }

    #[test]
    fn first_error_stays_and_listener_panic_poisons() {
        let poison = DbPoison::new(None);
        poison.check().unwrap();
        poison.set(Error::new(ErrorKind::Io, "first"));
        poison.set(Error::new(ErrorKind::Io, "second"));
        let error = poison.check().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Poisoned, "first"));

        let poison = DbPoison::new(Some(Arc::new(PanickingListener)));
        poison.emit(&Event::Closed);
        poison.record_delivery(poison.events().start_delivery());
        assert!(poison.check().is_err());
    }
}
