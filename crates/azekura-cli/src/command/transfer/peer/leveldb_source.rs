//! LevelDB, by its library.

use std::path::{Path, PathBuf};

use crate::command::transfer::peer::c_library::{self, CStore};
use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, check_files, read_c_store};
use crate::command::transfer::peer::source_copy::SourceCopy;
use crate::command::transfer::peer::source_lock;
use crate::error::Result;

const ENGINE: &str = "LevelDB";

/// Fields are dropped in this order: the database before its files.
struct LevelDbSource {
    store: CStore,
    _copy: SourceCopy,
    path: PathBuf,
}

/// Opens a copy of the database, because LevelDB writes to every database that it opens.
pub(super) fn open(path: &Path) -> Result<Box<dyn PeerSource>> {
    check_files(path, ENGINE, &["CURRENT"])?;
    let lock = source_lock::share_record_lock(&path.join("LOCK"))?;
    let copy = SourceCopy::of(path)?;
    drop(lock);
    let store = c_library::open_leveldb(copy.path(), path)?;
    Ok(Box::new(LevelDbSource { store, _copy: copy, path: path.into() }))
}

impl PeerSource for LevelDbSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        Ok(self.store.names().into_iter().map(SourceTable::new).collect())
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        read_c_store(&self.store, table, ENGINE, &self.path, visit)
    }
}
