//! Opens a damaged database for reading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{self, DamagedPool, TableReport};
use azekura::{Config, Database, Error, RecoveryMode};

use crate::command::repair::padded_fs::PaddedFs;

/// A damaged database, open for reading.
pub(super) struct DamagedDatabase {
    pub(super) database: Database,
    /// The pools that cannot be read. Where `has_wal_records` is set, the database has a partition of the same name.
    pub(super) pools: Vec<DamagedPool>,
    path: PathBuf,
    fs: Arc<dyn Fs>,
    /// Lengths that the manifest states, of the files that have another one or are missing.
    lengths: BTreeMap<String, u64>,
}

impl DamagedDatabase {
    /// Opens the database read-only. Shows files that are too short, too long or missing as if they had the length
    /// that the manifest states. If it does not open, leaves out the damaged pools.
    pub(super) fn open(path: &Path, fs: &Arc<dyn Fs>, tables: &[TableReport]) -> azekura::Result<DamagedDatabase> {
        let mut lengths: BTreeMap<String, u64> = BTreeMap::new();
        lengths.extend(tables.iter().map(|table| (format!("{:06}.sst", table.id), table.bytes)));
        lengths.extend(inspect::blobs(fs, path)?.iter().map(|file| (format!("{:06}.blob", file.id), file.bytes)));
        lengths.retain(|name, length| path.join(name).metadata().map_or(true, |data| data.len() != *length));
        let (fs, path) = (Arc::clone(fs), path.to_path_buf());
        let (database, pools) = match open_as(&path, &lengths, None) {
            Ok(database) => (database, Vec::new()),
            Err(error) => {
                let partial = inspect::partial_manifest(&fs, &path, &[])?;
                if partial.damaged_pools.is_empty() {
                    return Err(error);
                }
                (open_as(&path, &lengths, Some(partial.bytes.into()))?, partial.damaged_pools)
            }
        };
        Ok(DamagedDatabase { database, pools, path, fs, lengths })
    }

    /// Opens the database without the tables in which the errors are. It may show old versions of keys, and keys that
    /// do not exist.
    pub(super) fn without_tables_of<'a>(&self, errors: impl Iterator<Item = &'a Error>) -> azekura::Result<Database> {
        let id = |error: &Error| error.file()?.file_name()?.to_str()?.strip_suffix(".sst")?.parse().ok();
        let tables: BTreeSet<u64> = errors.filter_map(id).collect();
        let tables: Vec<u64> = tables.into_iter().collect();
        let partial = inspect::partial_manifest(&self.fs, &self.path, &tables)?;
        open_as(&self.path, &self.lengths, Some(partial.bytes.into()))
    }
}

fn open_as(path: &Path, lengths: &BTreeMap<String, u64>, manifest: Option<Arc<[u8]>>) -> azekura::Result<Database> {
    let config = Config::new(path).recovery_mode(RecoveryMode::Salvage);
    if lengths.is_empty() && manifest.is_none() {
        return config.open_read_only();
    }
    config.fs(Arc::new(PaddedFs { inner: DiskFs::new(), lengths: lengths.clone(), manifest })).open_read_only()
}
