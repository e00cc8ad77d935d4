//! RocksDB, by its library.

use std::path::{Path, PathBuf};

use crate::command::transfer::peer::c_library::{self, CStore};
use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, check_files, read_c_store};
use crate::command::transfer::peer::source_lock::{self, SourceLock};
use crate::error::{CliError, Result};

const ENGINE: &str = "RocksDB";

/// Fields are dropped in this order: the database before its lock.
struct RocksDbSource {
    store: CStore,
    _lock: Option<SourceLock>,
    path: PathBuf,
}

/// Opens the database read-only. RocksDB takes no lock for that, so this shares the lock of a program that writes.
pub(super) fn open(path: &Path) -> Result<Box<dyn PeerSource>> {
    check_files(path, ENGINE, &["CURRENT"])?;
    check_wal(path)?;
    let lock = source_lock::share_record_lock(&path.join("LOCK"))?;
    let store = c_library::open_rocksdb(path)?;
    Ok(Box::new(RocksDbSource { store, _lock: lock, path: path.into() }))
}

/// Fails if the WAL is in another directory: the library would open the database without it. The newest file of options
/// states the directory, as it was when the database was last opened.
fn check_wal(path: &Path) -> Result<()> {
    let read_error = |error| CliError::os("read the directory", path, error);
    let entries = path.read_dir().map_err(read_error)?.collect::<Result<Vec<_>, _>>().map_err(read_error)?;
    let names: Vec<String> = entries.iter().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let has_wal = names.iter().any(|name| name.ends_with(".log"));
    let number = |name: &&String| name.strip_prefix("OPTIONS-").and_then(|number| number.parse::<u64>().ok());
    let newest = names.iter().filter(|name| number(name).is_some()).max_by_key(number);
    let Some(options) = newest.filter(|_| !has_wal) else { return Ok(()) };
    let options = std::fs::read(path.join(options)).map_err(|error| CliError::os("read the options", path, error))?;
    let options = String::from_utf8_lossy(&options);
    let directory = options.lines().find_map(|line| line.trim().strip_prefix("wal_dir=")).unwrap_or_default();
    if directory.is_empty() || Path::new(directory).canonicalize().ok() == path.canonicalize().ok() {
        return Ok(());
    }
    let message = format!("its log is in another directory (wal_dir), {directory:?}; move its files here first");
    Err(CliError::input(path, message))
}

impl PeerSource for RocksDbSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        let table = |name: Vec<u8>| match &*name {
            b"default" => SourceTable::implicit("default", name),
            _ if std::str::from_utf8(&name).is_err() => SourceTable::new(name).refused("its name is not UTF-8"),
            _ => SourceTable::new(name),
        };
        let mut tables: Vec<_> = self.store.names().into_iter().map(table).collect();
        tables.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tables)
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        read_c_store(&self.store, table, ENGINE, &self.path, visit)
    }
}
