//! What goes wrong in a bench: one boxed error, because nobody but the person at the screen reads it.

/// Any error, with the message that is shown.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The result of anything that can stop a measurement.
pub(crate) type Result<T> = std::result::Result<T, Failure>;
