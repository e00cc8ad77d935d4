//! Opens a damaged database for reading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::inspect::{self, DamagedPool, TableReport};
use azekura::{Config, Database, Error, RecoveryMode};

use crate::command::repair::padded_fs::PaddedFs;

/// A damaged database, open for reading.
pub(super) struct DamagedDatabase {
    pub(super) database: Database,
    /// The pools that cannot be read. Where `has_wal_records` is set, the database has a partition of the same name.
    pub(super) pools: Vec<DamagedPool>,
    /// Whether the manifest was built from the other files. Then only scans find the newest versions.
    pub(super) is_rebuilt: bool,
    path: PathBuf,
    fs: Arc<dyn Fs>,
    /// Lengths that the manifest states, of the files that have another one or are missing.
    lengths: BTreeMap<String, u64>,
    tables: Vec<TableReport>,
}

impl DamagedDatabase {
    /// Opens the database read-only. Shows files that are too short, too long or missing as if they had the length
    /// that the manifest states. If it does not open, leaves out the damaged pools. With `rebuilt`, this is the content
    /// of its manifest.
    pub(super) fn open(path: &Path, fs: &Arc<dyn Fs>, rebuilt: Option<Vec<u8>>) -> azekura::Result<DamagedDatabase> {
        let is_rebuilt = rebuilt.is_some();
        let fs: Arc<dyn Fs> = match rebuilt {
            Some(bytes) => {
                Arc::new(PaddedFs { inner: Arc::clone(fs), lengths: BTreeMap::new(), manifest: Some(bytes.into()) })
            }
            None => Arc::clone(fs),
        };
        let path = path.to_path_buf();
        let tables = inspect::tables(&fs, &path)?;
        let mut lengths: BTreeMap<String, u64> = BTreeMap::new();
        lengths.extend(tables.iter().map(|table| (format!("{:06}.sst", table.id), table.bytes)));
        lengths.extend(inspect::blobs(&fs, &path)?.iter().map(|file| (format!("{:06}.blob", file.id), file.bytes)));
        lengths.retain(|name, length| path.join(name).metadata().map_or(true, |data| data.len() != *length));
        let (database, pools) = match open_as(&path, &fs, &lengths, None) {
            Ok(database) => (database, Vec::new()),
            Err(error) => {
                let partial = inspect::partial_manifest(&fs, &path, &[])?;
                if partial.damaged_pools.is_empty() {
                    return Err(error);
                }
                (open_as(&path, &fs, &lengths, Some(partial.bytes.into()))?, partial.damaged_pools)
            }
        };
        Ok(DamagedDatabase { database, pools, is_rebuilt, path, fs, lengths, tables })
    }

    /// Opens the database without the tables in which the errors are. It may show old versions of keys, and keys that
    /// do not exist.
    pub(super) fn without_tables_of<'a>(&self, errors: impl Iterator<Item = &'a Error>) -> azekura::Result<Database> {
        let tables: BTreeSet<u64> = errors.filter_map(table_of).collect();
        let tables: Vec<u64> = tables.into_iter().collect();
        let partial = inspect::partial_manifest(&self.fs, &self.path, &tables)?;
        open_as(&self.path, &self.fs, &self.lengths, Some(partial.bytes.into()))
    }

    /// The last key that the damage in an error of a scan can hide. `None` if the error is in no table.
    pub(super) fn last_damaged_key(&self, error: &Error) -> Option<Vec<u8>> {
        let id = table_of(error)?;
        let in_index = error.offset().and_then(|at| inspect::last_key_of_block(&self.fs, &self.path, id, at).ok()?);
        in_index.or_else(|| self.tables.iter().find(|table| table.id == id).map(|table| table.largest.clone()))
    }
}

/// The number of the table in which an error is.
fn table_of(error: &Error) -> Option<u64> {
    error.file()?.file_name()?.to_str()?.strip_suffix(".sst")?.parse().ok()
}

fn open_as(
    path: &Path,
    fs: &Arc<dyn Fs>,
    lengths: &BTreeMap<String, u64>,
    manifest: Option<Arc<[u8]>>,
) -> azekura::Result<Database> {
    let fs: Arc<dyn Fs> = match lengths.is_empty() && manifest.is_none() {
        true => Arc::clone(fs),
        false => Arc::new(PaddedFs { inner: Arc::clone(fs), lengths: lengths.clone(), manifest }),
    };
    Config::new(path).recovery_mode(RecoveryMode::Salvage).fs(fs).open_read_only()
}
