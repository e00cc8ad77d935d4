//! The error type of the bench. Only its kind is inspected: a wrong answer weighs more than an unsupported operation.

use serde::{Deserialize, Serialize};

/// Any error, with the message that is printed.
pub(crate) type Error = anyhow::Error;

/// The result of anything that can end a measurement.
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of error ended a measurement; part of the JSON output as `error_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ErrorKind {
    /// The child process exceeded its time limit.
    TimedOut,
    /// The engine is not available or does not offer what the workload needs.
    Refused,
    /// The engine returned a lost, stale, misplaced or changed record.
    Wrong,
    /// The engine returned an error, or its process died.
    Failed,
}

/// An error of a known kind. A child process prints it as JSON for its parent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, derive_more::Display, derive_more::Error)]
#[display("{error}")]
pub(crate) struct KnownError {
    pub(crate) kind: ErrorKind,
    pub(crate) error: String,
}

impl KnownError {
    /// The kind and message of `error`; [`ErrorKind::Failed`] if it has no kind.
    pub(crate) fn of(error: &Error) -> KnownError {
        let kind = error.downcast_ref::<KnownError>().map_or(ErrorKind::Failed, |known| known.kind);
        KnownError { kind, error: format!("{error:#}") }
    }
}

/// Builds an error of a kind.
pub(crate) fn error_of(kind: ErrorKind, message: impl Into<String>) -> Error {
    KnownError { kind, error: message.into() }.into()
}

/// An answer was wrong.
pub(crate) fn wrong(message: impl Into<String>) -> Error {
    error_of(ErrorKind::Wrong, message)
}

#[cfg(test)]
mod tests {
    use super::{Error, ErrorKind, KnownError, error_of, wrong};

    #[test]
    fn boxed_error_has_its_kind() {
        assert_eq!(KnownError::of(&wrong("lost")).kind, ErrorKind::Wrong);
        assert_eq!(KnownError::of(&error_of(ErrorKind::Refused, "no partitions")).kind, ErrorKind::Refused);
        let plain: Error = anyhow::anyhow!("disk full");
        assert_eq!(KnownError::of(&plain), KnownError { kind: ErrorKind::Failed, error: "disk full".into() });
    }
}
