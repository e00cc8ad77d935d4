//! redb: files of versions 3 and 4.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::fs::File;
use std::path::{Path, PathBuf};

use redb::{
    Builder, Database, DatabaseError, Key, MultimapTableHandle, ReadOnlyDatabase, ReadTransaction, ReadableDatabase,
    ReadableTable, TableDefinition, TableError, TableHandle, TypeName, Value,
};

use crate::command::transfer::peer::overlay_backend::OverlayBackend;
use crate::command::transfer::peer::source::{EntryVisitor, PeerSource, SourceTable, library_error};
use crate::error::{CliError, Result};

const ENGINE: &str = "redb";
/// What a table may hold.
const SUPPORTED: &str = "&[u8], &str, String, (), bool, char, u8 to u128 and i8 to i128";

thread_local! {
    /// The types of keys and of values of the table that this thread reads.
    static KEY_TYPE: RefCell<Option<ColumnType>> = const { RefCell::new(None) };
    static VALUE_TYPE: RefCell<Option<ColumnType>> = const { RefCell::new(None) };
}

/// How the bytes of a key or a value become those of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    /// Unchanged.
    Bytes,
    /// redb stores integers in little-endian order, an entry has them in big-endian order.
    Unsigned,
    /// As `Unsigned`. In keys the sign bit is inverted, so that the order of the keys is that of the numbers.
    Signed,
}

/// A type of redb, with what redb asks of it.
#[derive(Clone, Debug)]
struct ColumnType {
    name: TypeName,
    width: Option<usize>,
    encoding: Encoding,
}

impl ColumnType {
    /// `None` if the type is not supported.
    fn of(name: &TypeName) -> Option<ColumnType> {
        fn type_of<T: Value>(encoding: Encoding) -> ColumnType {
            ColumnType { name: T::type_name(), width: T::fixed_width(), encoding }
        }
        use Encoding::{Bytes, Signed, Unsigned};
        let supported = [
            type_of::<&[u8]>(Bytes),
            type_of::<&str>(Bytes),
            type_of::<String>(Bytes),
            type_of::<()>(Bytes),
            type_of::<bool>(Bytes),
            type_of::<char>(Unsigned),
            type_of::<u8>(Unsigned),
            type_of::<u16>(Unsigned),
            type_of::<u32>(Unsigned),
            type_of::<u64>(Unsigned),
            type_of::<u128>(Unsigned),
            type_of::<i8>(Signed),
            type_of::<i16>(Signed),
            type_of::<i32>(Signed),
            type_of::<i64>(Signed),
            type_of::<i128>(Signed),
        ];
        supported.into_iter().find(|supported| supported.name == *name)
    }

    /// The bytes of an entry.
    fn convert(&self, bytes: &[u8], is_key: bool) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        if self.encoding != Encoding::Bytes {
            bytes.reverse();
        }
        if let (Encoding::Signed, true, Some(first)) = (self.encoding, is_key, bytes.first_mut()) {
            *first ^= 0x80;
        }
        bytes
    }
}

/// Stands for the type of the keys or values of any table, as raw bytes.
#[derive(Debug)]
struct Raw<const IS_KEY: bool>;

impl<const IS_KEY: bool> Raw<IS_KEY> {
    fn column_type() -> Option<ColumnType> {
        let column = if IS_KEY { &KEY_TYPE } else { &VALUE_TYPE };
        column.with_borrow(Clone::clone)
    }
}

impl<const IS_KEY: bool> Value for Raw<IS_KEY> {
    type SelfType<'a> = &'a [u8];
    type AsBytes<'a> = &'a [u8];

    fn fixed_width() -> Option<usize> {
        Self::column_type().and_then(|column| column.width)
    }

    fn from_bytes<'a>(data: &'a [u8]) -> &'a [u8]
    where
        Self: 'a,
    {
        data
    }

    fn as_bytes<'a, 'b: 'a>(value: &'a &'b [u8]) -> &'a [u8]
    where
        Self: 'b,
    {
        value
    }

    fn type_name() -> TypeName {
        Self::column_type().map_or_else(|| TypeName::new("azekura::unknown"), |column| column.name)
    }
}

impl Key for Raw<true> {
    /// Not called: tables are read from end to end.
    fn compare(a: &[u8], b: &[u8]) -> Ordering {
        a.cmp(b)
    }
}

struct RedbSource {
    transaction: ReadTransaction,
    _db: Database,
    /// Keeps other programs from writing to the file. `None` if it was not closed properly.
    _reader: Option<ReadOnlyDatabase>,
    path: PathBuf,
}

/// Opens the file, and verifies the checksum of every page. A file that was not closed is repaired in memory.
pub(super) fn open(path: &Path) -> Result<Box<dyn PeerSource>> {
    let file = File::open(path).map_err(|e| CliError::os("open the input", path, e))?;
    if !file.metadata().is_ok_and(|data| data.is_file()) {
        return Err(CliError::input(path, "a redb database is a file; this is not"));
    }
    if file.metadata().is_ok_and(|data| data.len() == 0) {
        return Err(CliError::input(path, "this is no redb database: the file is empty"));
    }
    let reader = match ReadOnlyDatabase::open(path) {
        Ok(reader) => Some(reader),
        Err(DatabaseError::RepairAborted) => None,
        Err(error) => return Err(open_error(error, path)),
    };
    let overlay = OverlayBackend::new(file).map_err(|e| CliError::os("read the input", path, e))?;
    let mut builder = Builder::new();
    let db = builder.set_check_integrity_on_open(true).create_with_backend(overlay);
    let db = db.map_err(|error| open_error(error, path))?;
    let transaction = db.begin_read().map_err(library_error(ENGINE, path))?;
    Ok(Box::new(RedbSource { transaction, _db: db, _reader: reader, path: path.into() }))
}

fn open_error(error: DatabaseError, path: &Path) -> CliError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => CliError::source_in_use(path),
        DatabaseError::UpgradeRequired(version) => {
            let message = format!(
                "this file has version {version} of redb's format; upgrade it with redb 2.6 (Database::upgrade)"
            );
            CliError::input(path, message)
        }
        error => library_error(ENGINE, path)(error),
    }
}

impl RedbSource {
    /// The types of a table.
    fn types(&self, name: &str) -> Result<Result<(ColumnType, ColumnType), String>> {
        set_types(None, None);
        let definition = TableDefinition::<Raw<true>, Raw<false>>::new(name);
        let (key, value) = match self.transaction.open_table(definition) {
            Err(TableError::TableTypeMismatch { key, value, .. }) => (key, value),
            Err(error) => return Err(library_error(ENGINE, &self.path)(error)),
            // A type of a program has the name of the placeholder.
            Ok(_) => (TypeName::new("azekura::unknown"), TypeName::new("azekura::unknown")),
        };
        let types = (ColumnType::of(&key), ColumnType::of(&value));
        Ok(if let (Some(key), Some(value)) = types {
            Ok((key, value))
        } else {
            Err(format!(
                "its keys are of the type {} and its values of the type {}; supported are {SUPPORTED}",
                key.name(),
                value.name()
            ))
        })
    }
}

fn set_types(key: Option<ColumnType>, value: Option<ColumnType>) {
    KEY_TYPE.set(key);
    VALUE_TYPE.set(value);
}

impl PeerSource for RedbSource {
    fn tables(&self) -> Result<Vec<SourceTable>> {
        let error = library_error(ENGINE, &self.path);
        let mut tables = Vec::new();
        for handle in self.transaction.list_tables().map_err(&error)? {
            let table = SourceTable::new(handle.name());
            tables.push(match self.types(handle.name())? {
                Ok(_) => table,
                Err(reason) => table.refused(reason),
            });
        }
        for handle in self.transaction.list_multimap_tables().map_err(&error)? {
            let table = SourceTable::new(handle.name());
            tables.push(table.refused("it is a multimap, which has several values for a key"));
        }
        tables.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(tables)
    }

    fn read(&self, table: &SourceTable, visit: &mut EntryVisitor<'_>) -> Result<()> {
        let (key_type, value_type) = self.types(&table.name)?.map_err(|reason| CliError::input(&self.path, reason))?;
        set_types(Some(key_type.clone()), Some(value_type.clone()));
        let definition = TableDefinition::<Raw<true>, Raw<false>>::new(&table.name);
        let opened = self.transaction.open_table(definition).map_err(library_error(ENGINE, &self.path))?;
        for entry in opened.iter().map_err(library_error(ENGINE, &self.path))? {
            let (key, value) = entry.map_err(library_error(ENGINE, &self.path))?;
            visit(&key_type.convert(key.value(), true), &value_type.convert(value.value(), false))?;
        }
        Ok(())
    }
}
