//! Fjall 3.

use std::path::{Path, PathBuf};

use fjall::{Database, KeyspaceCreateOptions};

use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, check_files, library_error};
use crate::command::transfer::peer::source_copy::SourceCopy;
use crate::command::transfer::peer::source_lock;
use crate::error::{CliError, Result};

const ENGINE: &str = "Fjall";

/// Fields are dropped in this order: the database before its files.
struct FjallSource {
    db: Database,
    _copy: SourceCopy,
    path: PathBuf,
}

/// Opens a copy of the database, because Fjall writes to every database that it opens.
pub(super) fn open(path: &Path, allow_torn_log: bool) -> Result<Box<dyn PeerSource>> {
    check_files(path, ENGINE, &["version"])?;
    let lock = source_lock::share_flock(&path.join("lock"))?;
    let copy = SourceCopy::of(path)?;
    drop(lock);
    let db = Database::builder(copy.path()).worker_threads_unchecked(0).open().map_err(|error| match error {
        fjall::Error::InvalidVersion(Some(version)) => {
            let message = format!("this database is of Fjall {version}; only Fjall 3 can be imported");
            CliError::input(path, message)
        }
        error => library_error(ENGINE, path)(error),
    })?;
    if !allow_torn_log {
        copy.check_log(path, ENGINE, &journals(path)?)?;
    }
    Ok(Box::new(FjallSource { db, _copy: copy, path: path.into() }))
}

/// The names of the journals in the directory of the database.
fn journals(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = path.read_dir().map_err(|e| CliError::os("read the directory", path, e))?;
    let names = entries.filter_map(|entry| entry.ok().map(|entry| PathBuf::from(entry.file_name())));
    Ok(names.filter(|name| name.extension().is_some_and(|extension| extension == "jnl")).collect())
}

impl PeerSource for FjallSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        let mut names: Vec<_> = self.db.list_keyspace_names().iter().map(|name| name.to_string()).collect();
        names.sort();
        Ok(names.into_iter().map(SourceTable::new).collect())
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        let error = library_error(ENGINE, &self.path);
        let keyspace = self.db.keyspace(&table.name, KeyspaceCreateOptions::default).map_err(&error)?;
        for entry in keyspace.iter() {
            let (key, value) = entry.into_inner().map_err(&error)?;
            visit(&key, &value)?;
        }
        Ok(())
    }
}
