//! sled 0.34.

use std::path::{Path, PathBuf};

use sled::{Config, Db};

use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, check_files, library_error};
use crate::command::transfer::peer::source_copy::SourceCopy;
use crate::command::transfer::peer::source_lock;
use crate::error::Result;

const ENGINE: &str = "sled";
/// The name of the tree that every database has.
const DEFAULT_TREE: &[u8] = b"__sled__default";

/// Fields are dropped in this order: the database before its files.
struct SledSource {
    db: Db,
    _copy: SourceCopy,
    path: PathBuf,
}

/// Opens a copy of the database, because sled writes to every database that it opens.
pub(super) fn open(path: &Path, allow_torn_log: bool) -> Result<Box<dyn PeerSource>> {
    check_files(path, ENGINE, &["conf", "db"])?;
    let lock = source_lock::share_flock(&path.join("db"))?;
    let copy = SourceCopy::of(path)?;
    drop(lock);
    let db = Config::new().path(copy.path()).flush_every_ms(None).open().map_err(library_error(ENGINE, path))?;
    if !allow_torn_log {
        // sled also overwrites the content of segments that it had freed, so not every overwritten byte is a loss.
        copy.check_log(path, ENGINE, &["db".into()])?;
    }
    Ok(Box::new(SledSource { db, _copy: copy, path: path.into() }))
}

impl PeerSource for SledSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        let table = |name: &[u8]| match name {
            DEFAULT_TREE => SourceTable::implicit("default", name),
            _ if std::str::from_utf8(name).is_err() => SourceTable::new(name).refused("its name is not UTF-8"),
            _ => SourceTable::new(name),
        };
        let mut tables: Vec<_> = self.db.tree_names().iter().map(|name| table(name)).collect();
        tables.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tables)
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        let error = library_error(ENGINE, &self.path);
        let tree = self.db.open_tree(&table.id).map_err(&error)?;
        for entry in &tree {
            let (key, value) = entry.map_err(&error)?;
            visit(&key, &value)?;
        }
        Ok(())
    }
}
