//! The one error of the engine: a kind that says what the caller should do, and a sentence that says what happened.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The machine has too many open files. The number is the same on all Unix systems.
const ENFILE: i32 = 23;
/// The process has too many open files.
pub(crate) const EMFILE: i32 = 24;

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller should do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system refused or failed an operation: look at the device and the permissions, then try again.
    Io,
    /// Bytes on disk are not what was written: restore the named file from a copy.
    Corruption,
    /// Another commit came first: read again and retry.
    Conflict,
    /// The call itself is wrong (a limit, an option, a name): change it.
    Invalid,
    /// Another handle holds the directory: close that one first.
    Locked,
    /// An earlier failure of the log or the manifest stopped all writes; reads go on: close, look at the device, open
    /// again.
    Poisoned,
    /// The database is closed or the partition was deleted: drop the handle.
    Closed,
    /// No space is left: free some; writing resumes by itself.
    OutOfSpace,
    /// Written by a newer version, or asks for something this build cannot do: upgrade.
    Unsupported,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::Io => "I/O error",
            ErrorKind::Corruption => "corruption",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Invalid => "invalid",
            ErrorKind::Locked => "locked",
            ErrorKind::Poisoned => "poisoned",
            ErrorKind::Closed => "closed",
            ErrorKind::OutOfSpace => "out of space",
            ErrorKind::Unsupported => "unsupported",
        })
    }
}

/// An error: kind, message, and where known the file and the offset in it.
///
/// Cheap to clone, so that every member of a failed group of commits gets the same one. Messages never hold
/// bytes of keys or values.
#[derive(Clone)]
pub struct Error(Arc<ErrorInner>);

#[derive(Clone)]
struct ErrorInner {
    kind: ErrorKind,
    message: String,
    file: Option<PathBuf>,
    offset: Option<u64>,
    os_kind: Option<io::ErrorKind>,
    os_code: Option<i32>,
}

impl Error {
    /// An error of `kind` with a message that is a sentence without its full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Arc::new(ErrorInner {
            kind,
            message: message.into(),
            file: None,
            offset: None,
            os_kind: None,
            os_code: None,
        }))
    }

    /// The bytes are not what was written.
    pub fn corruption(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Corruption, message)
    }

    /// The call is wrong.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Invalid, message)
    }

    /// This build cannot do or read that.
    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Unsupported, message)
    }

    /// An operating-system error while doing `what` (a verb phrase: "open", "sync"); a full disk becomes
    /// [`ErrorKind::OutOfSpace`].
    pub fn io(what: &str, source: &io::Error) -> Error {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                ErrorKind::OutOfSpace
            }
            _ => ErrorKind::Io,
        };
        let message = format!("cannot {what}: {source}");
        let (os, os_code) = (Some(source.kind()), source.raw_os_error());
        Error(Arc::new(ErrorInner { kind, message, file: None, offset: None, os_kind: os, os_code }))
    }

    /// Names the file, if none is named yet.
    #[must_use]
    pub fn in_file(mut self, file: impl AsRef<Path>) -> Error {
        let inner = Arc::make_mut(&mut self.0);
        inner.file.get_or_insert_with(|| file.as_ref().to_path_buf());
        self
    }

    /// Names the offset in the file, in bytes, if none is named yet.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Error {
        Arc::make_mut(&mut self.0).offset.get_or_insert(offset);
        self
    }

    /// The same error with another kind (a failed sync becomes [`ErrorKind::Poisoned`] for later calls).
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Error {
        Arc::make_mut(&mut self.0).kind = kind;
        self
    }

    /// What to do about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What happened.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The file it happened in.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// The offset in [`file`](Error::file), in bytes.
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// The operating system's own kind, where there was one.
    pub fn os_kind(&self) -> Option<io::ErrorKind> {
        self.0.os_kind
    }

    /// Whether a file could not be opened because the process or the machine has too many open files. Nothing was done
    /// then, and a later attempt may succeed.
    pub(crate) fn is_too_many_open_files(&self) -> bool {
        matches!(self.0.os_code, Some(ENFILE | EMFILE))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.kind, self.0.message)?;
        match (&self.0.file, self.0.offset) {
            (Some(file), Some(offset)) => write!(f, " ({} at byte {offset})", file.display()),
            (Some(file), None) => write!(f, " ({})", file.display()),
            (None, Some(offset)) => write!(f, " (at byte {offset})"),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_kind_message_file_and_offset() {
        let e = Error::corruption("checksum of block does not match").in_file("/db/7.sst").at_offset(4096);
        assert_eq!(e.to_string(), "corruption: checksum of block does not match (/db/7.sst at byte 4096)");
        assert_eq!(e.clone().in_file("/other").file(), Some(Path::new("/db/7.sst")), "the first name stays");
    }

    #[test]
    fn too_many_open_files_are_recognized() {
        let raw = |code| Error::io("open", &io::Error::from_raw_os_error(code));
        assert!(raw(EMFILE).is_too_many_open_files() && raw(ENFILE).is_too_many_open_files());
        assert!(!raw(28).is_too_many_open_files() && !Error::invalid("24").is_too_many_open_files());
        assert_eq!(raw(EMFILE).kind(), ErrorKind::Io);
    }

    #[test]
    fn full_disk_is_out_of_space() {
        let e = Error::io("write", &io::Error::from(io::ErrorKind::StorageFull));
        assert_eq!(e.kind(), ErrorKind::OutOfSpace);
        assert_eq!(Error::io("write", &io::Error::from(io::ErrorKind::PermissionDenied)).kind(), ErrorKind::Io);
    }
}
