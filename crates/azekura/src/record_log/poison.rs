//! The end of all writes: after a failed sync the content of the device is unknown, so no write is retried.

use std::sync::OnceLock;

use crate::base::{Error, ErrorKind, Result};

/// Remembers the first failure for ever. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct LogPoison {
    first_error: OnceLock<Error>,
}

impl LogPoison {
    /// Fails with kind `Poisoned` once [`LogPoison::set`] was called.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.first_error.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Poisons, unless an earlier failure has; gives the error that everyone gets from now on.
    #[cold]
    pub(crate) fn set(&self, error: Error) -> Error {
        self.first_error.get_or_init(|| error.with_kind(ErrorKind::Poisoned)).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_stays() {
        let poison = LogPoison::default();
        poison.check().unwrap();
        poison.set(Error::new(ErrorKind::Io, "first"));
        poison.set(Error::new(ErrorKind::OutOfSpace, "second"));
        let error = poison.check().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Poisoned, "first"));
    }
}
