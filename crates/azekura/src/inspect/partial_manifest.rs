//! A manifest without damaged files, for reading the rest of a database, and one for a copy.

use std::path::Path;
use std::sync::Arc;

use crate::base::version_edit::EngineKind;
use crate::base::{Error, Result};
use crate::inspect::report::{random_instance, read_manifest_state, verify_pool};
use crate::manifest::encode_manifest;
use crate::vfs::Fs;

/// The manifest of a database without damaged pools and without some of its tables.
///
/// A file system that shows [`bytes`](PartialManifest::bytes) as the file `MANIFEST` lets a read-only open read the
/// rest of a database that does not open. The tables that are left out may contain newer versions of a key than the
/// rest, so such a database shows which keys exist, and not their values.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// # drop(fruit);
/// db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let table = azekura::inspect::tables(&fs, &path)?[0].id;
/// let partial = azekura::inspect::partial_manifest(&fs, &path, &[table])?;
/// assert!(partial.damaged_pools.is_empty());
/// # let copy = dir.path().join("copy");
/// # std::fs::create_dir(&copy).unwrap();
/// std::fs::write(copy.join("MANIFEST"), &partial.bytes).unwrap(); // the partition without its table
/// let rest = azekura::Config::new(&copy).recovery_mode(azekura::RecoveryMode::Salvage).open_read_only()?;
/// assert!(rest.partition("fruit")?.is_empty()?);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PartialManifest {
    /// The content of the file.
    pub bytes: Vec<u8>,
    /// The pools that cannot be read.
    pub damaged_pools: Vec<DamagedPool>,
}

/// A pool that cannot be read.
///
/// ```
/// # use azekura::{Config, EngineType, PartitionCreateOptions, PmemOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = Config::new(&path).open()?;
/// let pool = EngineType::Pmem(PmemOptions::default().max_size(1 << 20));
/// let counters = db.open_partition("counters", PartitionCreateOptions::default().engine(pool))?;
/// counters.insert("visits", "1")?;
/// counters.flush()?;
/// # drop(counters);
/// db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// std::fs::write(path.join("p000001.pool"), "not a pool").unwrap();
/// let partial = azekura::inspect::partial_manifest(&fs, &path, &[])?;
/// assert_eq!(partial.damaged_pools[0].partition, "counters");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DamagedPool {
    /// Name of the partition.
    pub partition: String,
    /// The damage.
    pub error: Error,
    /// Whether the partial manifest has a partition of this name with the records that were written to the WAL after
    /// the last checkpoint of the pool. A mapped pool has none, because its single changes are not in the WAL, so the
    /// WAL may have an older version of a key.
    pub has_wal_records: bool,
}

/// Reads the manifest and returns it without the tables with the given file numbers. Checks every pool, and replaces
/// the damaged ones. Positions of changes of the damaged database are `Invalid` in the new one.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # azekura::Config::new(&path).open()?.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let partial = azekura::inspect::partial_manifest(&fs, &path, &[])?;
/// assert!(partial.bytes.starts_with(b"AZEKMAN\n"));
/// # Ok(()) }
/// ```
pub fn partial_manifest(fs: &Arc<dyn Fs>, dir: &Path, omitted_tables: &[u64]) -> Result<PartialManifest> {
    let dir = &*fs.absolute(dir)?;
    let mut manifest_state = read_manifest_state(fs, dir)?.0;
    let mut damaged_pools = Vec::new();
    for partition in manifest_state.partitions.values_mut() {
        partition.tables.retain(|number, _| !omitted_tables.contains(&number.0));
        partition.spilled.retain(|number, _| !omitted_tables.contains(&number.0));
        let is_pool = partition.meta.engine != EngineKind::Lsm as u8;
        let Some(error) = verify_pool(fs, dir, partition).err().filter(|_| is_pool) else { continue };
        let has_wal_records = partition.meta.engine == EngineKind::Pmem as u8;
        // The WAL has every record above the flushed sequence number.
        partition.meta.engine = EngineKind::Lsm as u8;
        partition.pool_file_id = None;
        damaged_pools.push(DamagedPool { partition: partition.meta.name.clone(), error, has_wal_records });
    }
    let lost: Vec<&str> =
        damaged_pools.iter().filter(|pool| !pool.has_wal_records).map(|pool| pool.partition.as_str()).collect();
    manifest_state.partitions.retain(|_, partition| !lost.contains(&partition.meta.name.as_str()));
    // The new database lacks changes of the damaged one, so positions of its changes are not valid.
    manifest_state.instance = random_instance();
    let bytes = encode_manifest(manifest_state.instance, &manifest_state.edits())?;
    Ok(PartialManifest { bytes, damaged_pools })
}

/// Returns the content of the manifest of a closed database with a new random instance id, for a copy of its files.
///
/// With it a copy is another database, as a [checkpoint](crate::Database::checkpoint) is: positions of changes of the
/// one are `Invalid` in the other.
///
/// # Errors
/// `Io` or `Corruption` from the manifest.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let open = || azekura::Config::new(&path).open();
/// let db = open()?;
/// let before = db.change_position()?;
/// db.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// let manifest = azekura::inspect::manifest_of_copy(&fs, &path)?; // here the copy takes the place of the database
/// std::fs::write(path.join("MANIFEST"), manifest).unwrap();
/// assert_ne!(open()?.change_position()?.database_id(), before.database_id());
/// # Ok(()) }
/// ```
pub fn manifest_of_copy(fs: &Arc<dyn Fs>, dir: &Path) -> Result<Vec<u8>> {
    let mut manifest_state = read_manifest_state(fs, dir)?.0;
    manifest_state.instance = random_instance();
    encode_manifest(random_instance(), &manifest_state.edits())
}
