//! What can go wrong with a backup.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A result of this crate.
pub type Result<T, E = BackupError> = std::result::Result<T, E>;

/// Why a call failed. Nothing in the store that a backup needs was changed.
#[derive(Debug)]
#[non_exhaustive]
pub enum BackupError {
    /// An error of the database.
    Database(azekura::Error),
    /// An error of the local file system.
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// An error of the object store, also after several attempts.
    Store {
        /// The object or the prefix.
        object: String,
        /// The error.
        source: object_store::Error,
    },
    /// The object store, or the local disk that a restore writes to, has no space left.
    Full {
        /// The object or the file.
        object: String,
        /// The error as text.
        message: String,
    },
    /// An object does not have the bytes or the length that were stored.
    WrongContent {
        /// The object.
        object: String,
        /// What is wrong.
        message: String,
    },
    /// The store does not have an object that a backup needs.
    Missing {
        /// The object.
        object: String,
    },
    /// There are objects under the prefix, and they are not those of a backup store.
    NotABackupStore {
        /// The store or an object in it.
        object: String,
    },
    /// Nothing is stored there, or no backup that was asked for.
    NoBackup {
        /// What was looked for.
        message: String,
    },
    /// A newer version of this crate wrote the object.
    NewerVersion {
        /// The object.
        object: String,
        /// Its format version.
        version: u64,
    },
    /// The store has the backups of another database. A restored copy is another database too.
    OtherDatabase {
        /// The id of the database that the store belongs to.
        stored: String,
        /// The id of this database.
        found: String,
    },
    /// The store has commits that the database does not have: it was replaced by an older state of its own files, or a
    /// recovery has lost them. A restore gives what was lost; the database needs another prefix.
    OtherHistory {
        /// What does not fit.
        message: String,
    },
    /// The log in the store lacks commits that the restore needs.
    Gap {
        /// The last sequence number before the gap.
        after: u64,
        /// The first sequence number of the log behind it.
        before: u64,
    },
    /// The changes of the database cannot be followed: some of its partitions write without the log.
    NoFeed(azekura::Error),
    /// An upload or `prune` was interrupted for longer than objects are protected. The next call goes on from what is
    /// stored.
    TooSlow,
    /// The progress callback asked to stop.
    Interrupted,
    /// An argument is wrong.
    Invalid {
        /// What is wrong.
        message: String,
    },
}

impl BackupError {
    pub(crate) fn io(what: &'static str, path: impl AsRef<Path>, source: io::Error) -> BackupError {
        let path = path.as_ref().to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                BackupError::Full { object: path.display().to_string(), message: source.to_string() }
            }
            _ => BackupError::Io { what, path, source },
        }
    }

    pub(crate) fn store(object: impl Into<String>, source: object_store::Error) -> BackupError {
        let object = object.into();
        match source {
            object_store::Error::NotFound { .. } => BackupError::Missing { object },
            source if is_full(&source) => BackupError::Full { object, message: source.to_string() },
            source => BackupError::Store { object, source },
        }
    }

    pub(crate) fn wrong(object: impl Into<String>, message: impl Into<String>) -> BackupError {
        BackupError::WrongContent { object: object.into(), message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> BackupError {
        BackupError::Invalid { message: message.into() }
    }

    /// The kind of the error as one word, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            BackupError::Database(_) => "database",
            BackupError::Io { .. } => "io",
            BackupError::Store { .. } => "store",
            BackupError::Full { .. } => "out_of_space",
            BackupError::WrongContent { .. } => "corruption",
            BackupError::Missing { .. } => "missing_object",
            BackupError::NotABackupStore { .. } => "not_a_backup_store",
            BackupError::NoBackup { .. } => "no_backup",
            BackupError::NewerVersion { .. } => "newer_version",
            BackupError::OtherDatabase { .. } => "other_database",
            BackupError::OtherHistory { .. } => "other_history",
            BackupError::Gap { .. } => "gap",
            BackupError::NoFeed(_) => "no_feed",
            BackupError::TooSlow => "too_slow",
            BackupError::Interrupted => "interrupted",
            BackupError::Invalid { .. } => "invalid",
        }
    }
}

/// Whether the store reports that it is full: by the error of an operating system, or by an HTTP status of 507.
fn is_full(error: &object_store::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && matches!(io.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        {
            return true;
        }
        next = error.source();
    }
    error.to_string().contains("507 Insufficient Storage")
}

impl fmt::Display for BackupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackupError::Database(error) => error.fmt(f),
            BackupError::Io { what, path, source } => write!(f, "cannot {what}: {source} ({})", path.display()),
            BackupError::Store { object, source } => write!(f, "the object store failed: {source} ({object})"),
            BackupError::Full { object, message } => write!(f, "no space left: {message} ({object})"),
            BackupError::WrongContent { object, message } => write!(f, "{message} ({object})"),
            BackupError::Missing { object } => write!(f, "the store does not have the object {object}"),
            BackupError::NotABackupStore { object } => {
                write!(f, "this is not a store of backups, but not empty either ({object})")
            }
            BackupError::NoBackup { message } => message.fmt(f),
            BackupError::NewerVersion { object, version } => {
                write!(f, "format version {version} is of a newer azekura-backup ({object})")
            }
            BackupError::OtherDatabase { stored, found } => write!(
                f,
                "the store has the backups of database {stored}, and this is database {found}: use another prefix"
            ),
            BackupError::OtherHistory { message } => write!(
                f,
                "the store has later commits than this database, which was replaced by older files, or has lost them \
                 in a recovery: {message}; restore what was lost from here, and use another prefix for this database"
            ),
            BackupError::Gap { after, before } => {
                write!(f, "the log in the store lacks the commits between {after} and {before}")
            }
            BackupError::NoFeed(error) => write!(f, "the changes cannot be followed: {}", error.message()),
            BackupError::TooSlow => {
                write!(f, "the call paused for too long; start it again, and it goes on from what is stored")
            }
            BackupError::Interrupted => write!(f, "interrupted"),
            BackupError::Invalid { message } => message.fmt(f),
        }
    }
}

impl std::error::Error for BackupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BackupError::Database(error) | BackupError::NoFeed(error) => Some(error),
            BackupError::Io { source, .. } => Some(source),
            BackupError::Store { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<azekura::Error> for BackupError {
    fn from(error: azekura::Error) -> BackupError {
        match (error.kind(), error.file()) {
            (azekura::ErrorKind::OutOfSpace, Some(file)) => {
                BackupError::Full { object: file.display().to_string(), message: error.message().to_owned() }
            }
            _ => BackupError::Database(error),
        }
    }
}
