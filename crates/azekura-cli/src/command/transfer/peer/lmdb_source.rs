//! LMDB, through heed.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use heed::types::Bytes;
use heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, MdbError, RoTxn, WithTls};

use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, library_error};
use crate::error::{CliError, Result};

const ENGINE: &str = "LMDB";
/// Maximum number of named databases. LMDB allocates about 100 bytes for each in a transaction.
const DATABASES_MAX: u32 = 10_000;
/// Size of the record of a named database in the unnamed one: `MDB_db` of LMDB's source.
const DATABASE_RECORD_BYTES: usize = 8 + 5 * size_of::<usize>();

struct LmdbSource {
    env: Env,
    path: PathBuf,
}

/// Opens an environment read-only: a directory with `data.mdb`, or a single file.
pub(super) fn open(path: &Path) -> Result<Box<dyn PeerSource>> {
    let is_file = path.is_file();
    let data = if is_file { path.to_path_buf() } else { path.join("data.mdb") };
    if !path.exists() {
        return Err(CliError::input(path, "there is no such directory or file"));
    }
    if !data.is_file() {
        return Err(CliError::input(path, "this is no LMDB database: it has no file \"data.mdb\""));
    }
    let mut lock = if is_file { path.as_os_str().to_owned() } else { path.join("lock.mdb").into_os_string() };
    if is_file {
        lock.push("-lock");
    }
    let mut flags = EnvFlags::READ_ONLY;
    flags.set(EnvFlags::NO_SUB_DIR, is_file);
    // Without a lock file no program has the environment open. LMDB would create one.
    flags.set(EnvFlags::NO_LOCK, !Path::new(&lock).exists());
    let mut options = EnvOpenOptions::new();
    options.max_dbs(DATABASES_MAX);
    // SAFETY: the map is read-only. With a lock file, LMDB keeps the pages of this reader from being reused; without
    // one, no program has the file open. A file that is damaged or cut off may end the process by a signal, so
    // `check_process` reads it in another process first.
    let env = unsafe { options.flags(flags).open(path) }.map_err(library_error(ENGINE, path))?;
    let source = LmdbSource { env, path: path.into() };
    Ok(Box::new(source))
}

impl LmdbSource {
    fn transaction(&self) -> Result<RoTxn<'_, WithTls>> {
        self.env.read_txn().map_err(library_error(ENGINE, &self.path))
    }

    /// A database by name; `None` if the key of that name is an entry.
    fn database(&self, name: Option<&str>) -> Result<Option<Database<'_, Bytes, Bytes>>> {
        let opened = self.env.open_databases_and_commit(self.transaction()?, |opener, transaction| {
            opener.open_database::<Bytes, Bytes>(transaction, name).map(CommitOrAbort::<_, ()>::Commit)
        });
        match opened {
            Ok(opened) => Ok(opened.commit().flatten()),
            Err(heed::Error::Mdb(MdbError::Incompatible)) => Ok(None),
            Err(error) => Err(library_error(ENGINE, &self.path)(error)),
        }
    }

    /// The named databases, whose names are keys of the unnamed one.
    fn names(&self) -> Result<DatabaseNames> {
        let mut candidates = Vec::new();
        let mut names = DatabaseNames::default();
        if let Some(unnamed) = self.database(None)? {
            let (error, transaction) = (library_error(ENGINE, &self.path), self.transaction()?);
            let last_page = self.env.info().last_page_number;
            for entry in unnamed.iter(&transaction).map_err(&error)? {
                let (key, value) = entry.map_err(&error)?;
                if value.len() != DATABASE_RECORD_BYTES || key.contains(&0) {
                    continue;
                }
                match std::str::from_utf8(key) {
                    Ok(name) => candidates.push(name.to_string()),
                    Err(_) if is_database_record(value, last_page) => _ = names.unreadable.insert(key.to_vec()),
                    Err(_) => {}
                }
            }
        }
        for name in candidates {
            if self.database(Some(&name))?.is_some() {
                names.readable.insert(name);
            }
        }
        Ok(names)
    }
}

/// The named databases of an environment.
#[derive(Default)]
struct DatabaseNames {
    readable: BTreeSet<String>,
    /// Names that are not UTF-8, which heed cannot open.
    unreadable: BTreeSet<Vec<u8>>,
}

impl DatabaseNames {
    fn contains(&self, key: &[u8]) -> bool {
        self.unreadable.contains(key) || std::str::from_utf8(key).is_ok_and(|key| self.readable.contains(key))
    }
}

/// Whether a value of the unnamed database can be the record of a named one: the fields of `MDB_db` agree.
fn is_database_record(value: &[u8], last_page: usize) -> bool {
    const KNOWN_FLAGS: u16 = 0x7e;
    const DEPTH_MAX: u16 = 32;
    let half = |at: usize| u16::from_ne_bytes([value[at], value[at + 1]]);
    let words: Vec<usize> = value[8..]
        .chunks_exact(size_of::<usize>())
        .map(|word| usize::from_ne_bytes(word.try_into().expect("a chunk has the length of a word")))
        .collect();
    let (flags, depth) = (half(4), half(6));
    let [branches, leaves, overflows, entries, root] = words[..] else { return false };
    let is_empty = depth == 0 && root == usize::MAX && entries == 0;
    let pages = [branches, leaves, overflows].iter().fold(0usize, |sum, pages| sum.saturating_add(*pages));
    let is_tree = (1..=DEPTH_MAX).contains(&depth) && leaves > 0 && entries > 0 && root <= last_page;
    flags & !KNOWN_FLAGS == 0 && (is_empty || is_tree && pages <= last_page)
}

impl PeerSource for LmdbSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        let names = self.names()?;
        let named = names.readable.into_iter().map(SourceTable::new);
        let unreadable =
            names.unreadable.into_iter().map(|name| SourceTable::new(name).refused("its name is not UTF-8"));
        Ok(std::iter::once(SourceTable::implicit("default", "")).chain(named).chain(unreadable).collect())
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        let names = if table.is_implicit { self.names()? } else { DatabaseNames::default() };
        let name = (!table.is_implicit).then_some(&*table.name);
        let Some(database) = self.database(name)? else { return Ok(()) };
        let (error, transaction) = (library_error(ENGINE, &self.path), self.transaction()?);
        let mut previous: Option<Vec<u8>> = None;
        for entry in database.iter(&transaction).map_err(&error)? {
            let (key, value) = entry.map_err(&error)?;
            if names.contains(key) {
                continue;
            }
            if previous.as_deref() == Some(key) {
                let message = format!(
                    "database \"{}\" has several values for a key (MDB_DUPSORT), a partition has one",
                    table.name
                );
                return Err(CliError::input(&self.path, message));
            }
            let previous_key = previous.get_or_insert_default();
            previous_key.clear();
            previous_key.extend_from_slice(key);
            visit(key, value)?;
        }
        Ok(())
    }
}
