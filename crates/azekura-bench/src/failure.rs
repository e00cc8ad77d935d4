//! What goes wrong in a bench: one boxed error, because nobody but the person at the screen reads it. Only its kind is
//! told apart, because a wrong answer weighs more than an engine that cannot do something.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Any error, with the message that is shown.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The result of anything that can stop a measurement.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// It took longer than a child process is given.
    TimedOut,
    /// The engine does not offer what the workload needs, or is not there.
    Refused,
    /// An answer was wrong: a lost, stale, misplaced or changed record.
    Wrong,
    /// Anything else: the engine returned an error or its process died.
    Failed,
}

/// An error of a known kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Told {
    /// Which kind.
    pub(crate) kind: Kind,
    /// In words.
    pub(crate) error: String,
}

impl fmt::Display for Told {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.error)
    }
}

impl std::error::Error for Told {}

impl Told {
    /// What `failure` says, and its kind if it has one.
    pub(crate) fn of(failure: &Failure) -> Told {
        let plain = || Told { kind: Kind::Failed, error: failure.to_string() };
        failure.downcast_ref::<Told>().cloned().unwrap_or_else(plain)
    }
}

/// An answer was wrong.
pub(crate) fn wrong(words: impl Into<String>) -> Failure {
    Box::new(Told { kind: Kind::Wrong, error: words.into() })
}

/// The engine cannot do this.
pub(crate) fn refused(words: impl Into<String>) -> Failure {
    Box::new(Told { kind: Kind::Refused, error: words.into() })
}

#[cfg(test)]
mod tests {
    use super::{Failure, Kind, Told, refused, wrong};

    #[test]
    fn kinds_survive_the_box() {
        assert_eq!(Told::of(&wrong("lost")).kind, Kind::Wrong);
        assert_eq!(Told::of(&refused("no partitions")).kind, Kind::Refused);
        let plain: Failure = "disk full".into();
        assert_eq!(Told::of(&plain), Told { kind: Kind::Failed, error: "disk full".into() });
    }
}
