//! The end of all writing after a failure that must not be papered over.

use std::sync::{Arc, OnceLock};

use crate::base::event::{Event, Listener};
use crate::base::{Error, ErrorKind, Result};
use crate::db::state::event_queue::EventQueue;

/// Set once, by the first failed sync of log or manifest, or by a panic; reads go on, writes fail. After a failed sync
/// the kernel may have marked the pages clean, so neither a retry nor a later sync proves anything: only opening the
/// database anew does.
pub(crate) struct DbPoison {
    error: OnceLock<Error>,
    events: EventQueue,
}

impl DbPoison {
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> DbPoison {
        DbPoison { error: OnceLock::new(), events: EventQueue::new(listener) }
    }

    /// Poisons; returns the error that writers get.
    pub(crate) fn set(&self, cause: Error) -> Error {
        let error = cause.with_kind(ErrorKind::Poisoned);
        if self.error.set(error.clone()).is_ok() {
            self.emit(&Event::Poisoned { error: error.clone() });
        }
        error
    }

    /// Fails if poisoned.
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

    /// Queues an event for the listener, which may poison by a panic when it gets it.
    pub(crate) fn emit(&self, event: &Event) {
        self.events.push(event);
    }

    /// The events for the listener; what delivers them reports a panic by [`heard`](DbPoison::record_delivery).
    pub(crate) fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Notes whether the listener took its events `calm`ly, or panicked.
    pub(crate) fn record_delivery(&self, calm: bool) {
        if !calm {
            let error = Error::new(ErrorKind::Poisoned, "a listener panicked");
            let _already = self.error.set(error);
        }
    }

    /// Passes a result on, and poisons if it failed in a way that ends writing.
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
