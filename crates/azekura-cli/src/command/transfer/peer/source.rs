//! What an importer provides: the tables of a database, and the entries of each.

use std::path::Path;

#[cfg(feature = "_peer-library")]
use crate::command::transfer::peer::c_library::CStore;
use crate::encoding;
use crate::error::{CliError, Result};

/// Receives the key and the value of each entry. An error ends the read.
pub(super) type EntryVisitor<'a> = dyn FnMut(&[u8], &[u8]) -> Result<()> + 'a;

/// A column family, table, tree, named database or keyspace.
#[derive(Debug, Clone)]
pub(super) struct SourceTable {
    /// The name in the source. Bytes that are not UTF-8 are escaped.
    pub(super) name: String,
    /// The name in the source, as the library takes it.
    pub(super) id: Vec<u8>,
    /// The name of the partition unless `--partition` is given.
    pub(super) partition: String,
    /// Whether every database of the engine has this table, even if no program uses it.
    pub(super) is_implicit: bool,
    /// Why the table cannot be imported.
    pub(super) refusal: Option<String>,
}

impl SourceTable {
    pub(super) fn new(id: impl Into<Vec<u8>>) -> SourceTable {
        let id = id.into();
        let name = String::from_utf8(id.clone()).unwrap_or_else(|_| encoding::escaped(&id));
        SourceTable { partition: name.clone(), name, id, is_implicit: false, refusal: None }
    }

    /// The table that every database of the engine has.
    pub(super) fn implicit(name: &str, id: impl Into<Vec<u8>>) -> SourceTable {
        SourceTable { is_implicit: true, name: name.into(), partition: name.into(), ..SourceTable::new(id) }
    }

    pub(super) fn refused(self, reason: impl Into<String>) -> SourceTable {
        SourceTable { refusal: Some(reason.into()), ..self }
    }
}

/// An open database of another engine. Its errors are those of [`CliError::input`].
pub(super) trait PeerSource {
    /// All tables, sorted by name.
    fn tables(&self) -> Result<Vec<SourceTable>>;

    /// Passes all entries of a table to `visit`, in the order of the source.
    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()>;
}

/// Fails unless all of `files` exist in the directory `source`, because the libraries create what is missing.
pub(super) fn check_files(source: &Path, engine: &str, files: &[&str]) -> Result<()> {
    if !source.exists() {
        return Err(CliError::input(source, "there is no such directory"));
    }
    match files.iter().find(|file| !source.join(file).is_file()) {
        Some(file) => Err(CliError::input(source, format!("this is no {engine} database: it has no file \"{file}\""))),
        None => Ok(()),
    }
}

/// Turns errors of a library into errors of the source.
pub(super) fn library_error<E: std::fmt::Display>(engine: &str, path: &Path) -> impl Fn(E) -> CliError {
    move |error| CliError::input(path, format!("{engine} cannot read this database: {error}"))
}

/// [`PeerSource::read`] of a database that a C library has open.
#[cfg(feature = "_peer-library")]
pub(super) fn read_c_store(
    store: &CStore,
    table: &SourceTable,
    engine: &str,
    path: &Path,
    visit: &mut EntryVisitor<'_>,
) -> Result<()> {
    let mut visited = Ok(());
    let read = store.read(&table.id, &mut |key, value| {
        visited = visit(key, value);
        visited.is_ok()
    });
    visited?;
    read.map_err(library_error(engine, path))
}
