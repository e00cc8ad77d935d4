//! The end of all writing after a failure that must not be papered over.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::base::event::{Event, Listener};
use crate::base::{Error, ErrorKind, Result};

/// Set once, by the first failed sync of log or manifest, or by a panic; reads go on, writes fail. After a failed sync
/// the kernel may have marked the pages clean, so neither a retry nor a later sync proves anything: only opening the
/// database anew does.
pub(crate) struct Poison {
    error: OnceLock<Error>,
    listener: Option<Arc<dyn Listener>>,
}

impl Poison {
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> Poison {
        Poison { error: OnceLock::new(), listener }
    }

    /// Poisons; returns the error that writers get.
    pub(crate) fn set(&self, cause: Error) -> Error {
        let error = cause.with_kind(ErrorKind::Poisoned);
        if self.error.set(error.clone()).is_ok() {
            self.tell(&Event::Poisoned { error: error.clone() });
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

    /// Tells the listener; one that panics poisons.
    pub(crate) fn tell(&self, event: &Event) {
        let Some(listener) = &self.listener else { return };
        if catch_unwind(AssertUnwindSafe(|| listener.on_event(event))).is_err() {
            let error = Error::new(ErrorKind::Poisoned, "a listener panicked");
            let _already = self.error.set(error);
        }
    }

    /// Passes a result on, and poisons if it failed in a way that ends writing.
    pub(crate) fn watch<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| if error.kind() == ErrorKind::Poisoned { self.set(error) } else { error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Panics;
    impl Listener for Panics {
        fn on_event(&self, _: &Event) {
            panic!("listener");
        }
    }

    #[test]
    fn the_first_cause_stays_and_a_panicking_listener_is_contained() {
        let poison = Poison::new(None);
        poison.check().unwrap();
        poison.set(Error::new(ErrorKind::Io, "first"));
        poison.set(Error::new(ErrorKind::Io, "second"));
        let error = poison.check().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Poisoned, "first"));

        let poison = Poison::new(Some(Arc::new(Panics)));
        poison.tell(&Event::Closed);
        assert!(poison.check().is_err());
    }
}
