//! RocksDB, by its library.

use std::path::{Path, PathBuf};

use crate::command::transfer::peer::c_library::{self, CStore};
use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, check_files, read_c_store};
use crate::command::transfer::peer::source_lock::{self, SourceLock};
use crate::error::Result;

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
    let lock = source_lock::share_record_lock(&path.join("LOCK"))?;
    let store = c_library::open_rocksdb(path)?;
    Ok(Box::new(RocksDbSource { store, _lock: lock, path: path.into() }))
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
