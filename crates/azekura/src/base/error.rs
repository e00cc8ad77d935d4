//! The error type of the engine: a kind that says what the caller should do, and a message that says what happened.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Error number of the operating system: the machine has too many open files. The same on all Unix systems.
const ENFILE: i32 = 23;
/// Error number of the operating system: the process has too many open files.
pub(crate) const EMFILE: i32 = 24;

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller should do about an [`Error`].
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # use azekura::{Config, Database, Error, ErrorKind};
/// /// What a program does after a failed write.
/// fn advice(error: &Error) -> &'static str {
///     match error.kind() {
///         ErrorKind::OutOfSpace => "free space; then write again, without reopening",
///         ErrorKind::Poisoned => "close, check the device, open again",
///         ErrorKind::Closed => "drop the handle",
///         ErrorKind::Invalid => "correct the call",
///         ErrorKind::Corruption => "restore the file from a copy",
///         _ => "log the error, and write again later",
///     }
/// }
/// # let db = Config::new(&path).open()?;
/// let fruit = db.open_partition("fruit", Default::default())?;
/// let error = fruit.insert([0; 65_536], "the key is too long").unwrap_err();
/// assert_eq!(advice(&error), "correct the call");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system failed an operation: check the device and the permissions, then try again.
    Io,
    /// Bytes on disk differ from what was written: restore the named file from a copy.
    Corruption,
    /// Other work of the database interfered: another commit changed a key that a transaction has read or expected, or
    /// compactions ran during a checkpoint. Nothing was written: try again.
    Conflict,
    /// The call is wrong (a limit, an option, a name): change it.
    Invalid,
    /// There is no database in the directory, or no partition of the name: create it, or correct the name.
    NotFound,
    /// Another handle has the directory locked: close that one first, or read beside it with
    /// [`Config::open_follower`](crate::Config::open_follower).
    Locked,
    /// An earlier failure of the WAL or the manifest, or a panic, stopped all writes; reads continue: close, check the
    /// device, open again.
    Poisoned,
    /// The database is closed or the partition was deleted: drop the handle.
    Closed,
    /// The disk or a pool is full: free space; then writes succeed again.
    OutOfSpace,
    /// Written by a newer version, or a request that this build does not support: upgrade.
    Unsupported,
    /// The merge operator of the partition failed or panicked for a key: correct the operator, or write the key anew.
    /// Other keys are not affected.
    MergeFailed,
    /// What a reader of changes needs next is not in the log any more: read the data anew, and go on from
    /// [`Database::change_position`](crate::Database::change_position). In a follower: commits that it has read are
    /// lost; open it again.
    Stale,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::Io => "I/O error",
            ErrorKind::Corruption => "corruption",
            ErrorKind::Conflict => "conflict",
            ErrorKind::Invalid => "invalid",
            ErrorKind::NotFound => "not found",
            ErrorKind::Locked => "locked",
            ErrorKind::Poisoned => "poisoned",
            ErrorKind::Closed => "closed",
            ErrorKind::OutOfSpace => "out of space",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::MergeFailed => "merge failed",
            ErrorKind::Stale => "stale",
        })
    }
}

/// An error: kind, message, and if known the file and the offset in it.
///
/// Cheap to clone, so that every member of a failed commit group gets the same error. Messages never contain bytes of
/// keys or values.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # use azekura::{Config, ErrorKind};
/// # Config::new(&path).open()?.close()?;
/// # std::fs::write(path.join("MANIFEST"), "not a manifest").unwrap();
/// let error = Config::new(&path).open().unwrap_err(); // the manifest was overwritten
/// assert_eq!(error.kind(), ErrorKind::Corruption); // for the program
/// assert_eq!(error.file(), Some(&*path.join("MANIFEST")));
/// assert!(error.to_string().starts_with("corruption: ")); // for the log: kind, message, file and offset
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Error(Arc<ErrorInner>);

#[derive(Clone)]
struct ErrorInner {
    kind: ErrorKind,
    message: String,
    file: Option<PathBuf>,
    offset: Option<u64>,
    source: Option<Arc<io::Error>>,
    conflict: Option<(Box<str>, Box<[u8]>)>,
    unmerged_key: Option<Box<[u8]>>,
    batch_position: Option<usize>,
}

impl Error {
    /// Creates an error. `message` is a sentence without the full stop.
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// let error = Error::new(ErrorKind::NotFound, "partition \"fruit\" does not exist");
    /// assert_eq!(error.to_string(), "not found: partition \"fruit\" does not exist");
    /// ```
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Arc::new(ErrorInner {
            kind,
            message: message.into(),
            file: None,
            offset: None,
            source: None,
            conflict: None,
            unmerged_key: None,
            batch_position: None,
        }))
    }

    /// Creates a [`ErrorKind::Corruption`] error.
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// assert_eq!(Error::corruption("the checksum does not match").kind(), ErrorKind::Corruption);
    /// ```
    pub fn corruption(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Corruption, message)
    }

    /// Creates an [`ErrorKind::Invalid`] error.
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// assert_eq!(Error::invalid("workers is 65, out of its range 0..=64").kind(), ErrorKind::Invalid);
    /// ```
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Invalid, message)
    }

    /// Creates an [`ErrorKind::Unsupported`] error.
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// assert_eq!(Error::unsupported("this file system has no hard links").kind(), ErrorKind::Unsupported);
    /// ```
    pub fn unsupported(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Unsupported, message)
    }

    /// Creates an error of the operating system. `what` is the failed action (a verb phrase: "open", "sync"). A full
    /// disk becomes [`ErrorKind::OutOfSpace`].
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// use std::io;
    /// let denied = Error::io("open", &io::ErrorKind::PermissionDenied.into());
    /// assert_eq!((denied.kind(), denied.os_kind()), (ErrorKind::Io, Some(io::ErrorKind::PermissionDenied)));
    /// let full = Error::io("write", &io::ErrorKind::StorageFull.into());
    /// assert_eq!(full.kind(), ErrorKind::OutOfSpace);
    /// ```
    pub fn io(what: &str, source: &io::Error) -> Error {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                ErrorKind::OutOfSpace
            }
            _ => ErrorKind::Io,
        };
        let message = format!("cannot {what}: {source}");
        let source = source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        Error(Arc::new(ErrorInner {
            kind,
            message,
            file: None,
            offset: None,
            source: Some(Arc::new(source)),
            conflict: None,
            unmerged_key: None,
            batch_position: None,
        }))
    }

    /// Creates an [`ErrorKind::Conflict`] error for a key that another commit has changed.
    #[cold]
    pub(crate) fn conflict(partition: &str, key: &[u8]) -> Error {
        let message = format!("another commit changed a key of partition {partition:?}: try again");
        let mut error = Error::new(ErrorKind::Conflict, message);
        Arc::make_mut(&mut error.0).conflict = Some((partition.into(), key.into()));
        error
    }

    /// Creates a [`ErrorKind::MergeFailed`] error for a key.
    #[cold]
    pub(crate) fn merge_failed(message: impl Into<String>, key: &[u8]) -> Error {
        let mut error = Error::new(ErrorKind::MergeFailed, message);
        Arc::make_mut(&mut error.0).unmerged_key = Some(key.into());
        error
    }

    /// Sets the file, if it has none.
    ///
    /// ```
    /// use azekura::Error;
    /// let error = Error::corruption("the checksum does not match").in_file("db/000007.sst");
    /// assert_eq!(error.in_file("other").file().unwrap().to_str(), Some("db/000007.sst")); // the first one stays
    /// ```
    #[must_use]
    pub fn in_file(mut self, file: impl AsRef<Path>) -> Error {
        let inner = Arc::make_mut(&mut self.0);
        inner.file.get_or_insert_with(|| file.as_ref().to_path_buf());
        self
    }

    /// Sets the offset in the file in bytes, if it has none.
    ///
    /// ```
    /// use azekura::Error;
    /// let error = Error::corruption("the checksum does not match").in_file("db/000007.sst").at_offset(4096);
    /// assert_eq!(error.to_string(), "corruption: the checksum does not match (db/000007.sst at byte 4096)");
    /// ```
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Error {
        Arc::make_mut(&mut self.0).offset.get_or_insert(offset);
        self
    }

    /// Sets the position of the failed operation in its batch, if it has none.
    #[cold]
    pub(crate) fn at_batch_position(mut self, position: usize) -> Error {
        Arc::make_mut(&mut self.0).batch_position.get_or_insert(position);
        self
    }

    /// Changes the kind: a failed sync becomes [`ErrorKind::Poisoned`] for later calls.
    ///
    /// ```
    /// use azekura::{Error, ErrorKind};
    /// let failed_sync = Error::io("sync", &std::io::Error::other("device error"));
    /// let later = failed_sync.with_kind(ErrorKind::Poisoned);
    /// assert_eq!((later.kind(), later.message()), (ErrorKind::Poisoned, "cannot sync: device error"));
    /// ```
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Error {
        Arc::make_mut(&mut self.0).kind = kind;
        self
    }

    /// The kind, which says what the caller should do.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let error = db.partition("fruit").unwrap_err();
    /// assert_eq!(error.kind(), azekura::ErrorKind::NotFound);
    /// # Ok(()) }
    /// ```
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message, which says what happened.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let error = db.partition("fruit").unwrap_err();
    /// assert_eq!(error.message(), "partition \"fruit\" does not exist");
    /// # Ok(()) }
    /// ```
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The file in which the error occurred, if known.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).open()?;
    /// assert_eq!(db.partition("fruit").unwrap_err().file(), None); // no file is concerned
    /// # db.close()?;
    /// # std::fs::write(path.join("MANIFEST"), "").unwrap();
    /// let error = azekura::Config::new(&path).open().unwrap_err(); // the manifest was truncated
    /// assert_eq!(error.file(), Some(&*path.join("MANIFEST")));
    /// # Ok(()) }
    /// ```
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_deref()
    }

    /// The offset in [`file`](Error::file), in bytes, if known.
    ///
    /// ```
    /// let error = azekura::Error::corruption("the checksum does not match").at_offset(4096);
    /// assert_eq!(error.offset(), Some(4096));
    /// ```
    pub fn offset(&self) -> Option<u64> {
        self.0.offset
    }

    /// The position of the operation in its [`Batch`](crate::Batch) that caused the error, if one did. The first
    /// operation has the position 0.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "red");
    /// batch.insert(&fruit, [0; 65_536], "the key is too long");
    /// let error = batch.commit().unwrap_err();
    /// assert_eq!(error.batch_position(), Some(1));
    /// assert!(error.to_string().ends_with(" (position 1 in the batch)"));
    /// # Ok(()) }
    /// ```
    pub fn batch_position(&self) -> Option<usize> {
        self.0.batch_position
    }

    /// The partition and the key that another commit changed, if that caused the error. A transaction that has read a
    /// range may name any changed key of the range.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.expect(&fruit, "apple", Some(b"green"));
    /// batch.insert(&fruit, "apple", "red");
    /// let error = batch.commit().unwrap_err(); // there is no apple
    /// assert_eq!(error.conflicting_key(), Some(("fruit", &b"apple"[..])));
    /// # Ok(()) }
    /// ```
    pub fn conflicting_key(&self) -> Option<(&str, &[u8])> {
        self.0.conflict.as_ref().map(|(partition, key)| (&**partition, &**key))
    }

    /// The key whose value a merge operator could not compute, if that caused the error.
    ///
    /// ```
    /// # use azekura::{Config, PartitionComponents, merge_operators};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// let components = PartitionComponents::default().merge_operator(merge_operators::u64_add());
    /// let visits = db.open_partition_with("visits", Default::default(), components)?;
    /// visits.insert("ada", "not a number of 8 bytes")?;
    /// visits.merge("ada", 1u64.to_le_bytes())?;
    /// let error = visits.get("ada").unwrap_err();
    /// assert_eq!(error.unmerged_key(), Some(&b"ada"[..]));
    /// # Ok(()) }
    /// ```
    pub fn unmerged_key(&self) -> Option<&[u8]> {
        self.0.unmerged_key.as_deref()
    }

    /// The operating system's error kind, if the operating system caused the error.
    ///
    /// ```
    /// use azekura::fs::{DiskFs, Fs, OpenMode};
    /// let error = DiskFs::new().open("no such file".as_ref(), OpenMode::Read).unwrap_err();
    /// assert_eq!(error.os_kind(), Some(std::io::ErrorKind::NotFound));
    /// ```
    pub fn os_kind(&self) -> Option<io::ErrorKind> {
        self.0.source.as_ref().map(|source| source.kind())
    }

    #[cold]
    pub(crate) fn stale(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Stale, message)
    }

    /// Whether the error is an `Io` error because a file does not exist.
    pub(crate) fn is_missing_file(&self) -> bool {
        self.kind() == ErrorKind::Io && self.os_kind() == Some(io::ErrorKind::NotFound)
    }

    /// Whether a file could not be opened because the process or the machine has too many open files. Nothing was
    /// changed, and a later attempt may succeed.
    pub(crate) fn is_too_many_open_files(&self) -> bool {
        let code = self.0.source.as_ref().and_then(|source| source.raw_os_error());
        cfg!(unix) && matches!(code, Some(ENFILE | EMFILE))
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
        }?;
        self.0.batch_position.map_or(Ok(()), |position| write!(f, " (position {position} in the batch)"))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without keys.
        let ErrorInner { kind, message, file, offset, source, conflict: _, unmerged_key: _, batch_position } = &*self.0;
        let mut shown = f.debug_struct("Error");
        shown.field("kind", kind).field("message", message).field("file", file).field("offset", offset);
        shown.field("source", source).field("batch_position", batch_position).finish()
    }
}

impl std::error::Error for Error {
    /// The error of the operating system, if it caused this one.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_kind_message_file_and_offset() {
        let e = Error::corruption("checksum of block does not match").in_file("/db/7.sst").at_offset(4096);
        assert_eq!(e.to_string(), "corruption: checksum of block does not match (/db/7.sst at byte 4096)");
        assert_eq!(e.clone().in_file("/other").file(), Some(Path::new("/db/7.sst")), "the first file name is kept");
    }

    #[test]
    fn source_is_the_error_of_the_system() {
        let e = Error::io("open", &io::Error::from_raw_os_error(13)).in_file("/db/LOCK");
        let source = std::error::Error::source(&e).and_then(|source| source.downcast_ref::<io::Error>()).unwrap();
        assert_eq!((source.raw_os_error(), source.kind()), (Some(13), io::ErrorKind::PermissionDenied));
        let shown = format!("{e:?}");
        assert!(shown.contains("kind: Io") && shown.contains("/db/LOCK") && shown.contains("code: 13"), "{shown}");
        assert!(std::error::Error::source(&Error::invalid("x")).is_none());
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
