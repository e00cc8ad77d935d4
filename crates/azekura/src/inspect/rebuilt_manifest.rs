//! A manifest that is built from the files that it should name, for repair.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::file_format::FileKind;
use crate::base::manifest_state::{ManifestState, PartitionManifestState};
use crate::base::version_edit::{
    BlobFileMeta, BlobFileSection, EngineKind, FileNumber, PartitionId, PartitionMeta, TableBlobUsage,
};
use crate::base::{Error, Result};
use crate::blob::reader::BlobFile;
use crate::block::cache::BlockCache;
use crate::inspect::report::read_whole;
use crate::manifest::{MANIFEST_NAME, encode_manifest, salvage_edits};
use crate::pmem::pool::{self, ImageHeader, PAGE_LEN, PoolFileKind};
use crate::table::reader::TableReader;
use crate::vfs::open_files::{DataFileKind, DataFiles, DirectIoPolicy, parse_data_file_name};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::{WalSegmentHeader, parse_segment_name, partitions_of_segment};

/// Files of a database have numbers below this one. Files with higher numbers are ignored.
const FILE_NUMBER_LIMIT: u64 = 1 << 61;

/// A manifest that was built from the files of a database.
///
/// A file system that shows [`bytes`](RebuiltManifest::bytes) as the file `MANIFEST` lets a read-only open in the mode
/// `Salvage` read the database. The order of its tables is not known, so lookups of single keys may find older
/// versions; scans find the newest versions. Old files that the database no longer used are part of it, so removed keys
/// and older versions may be there.
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
/// std::fs::remove_file(path.join("MANIFEST")).unwrap();
/// let rebuilt = azekura::inspect::rebuilt_manifest(&fs, &path)?;
/// std::fs::write(path.join("MANIFEST"), &rebuilt.bytes).unwrap();
/// let db = azekura::Config::new(&path).recovery_mode(azekura::RecoveryMode::Salvage).open_read_only()?;
/// assert_eq!(db.partition("fruit")?.get("apple")?.unwrap(), "red");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RebuiltManifest {
    /// The content of the file.
    pub bytes: Vec<u8>,
    /// Files that are not part of it because of damage, and the damage.
    pub left_out: Vec<(PathBuf, Error)>,
}

/// Builds a manifest from the records of the damaged one that can be read, and from the headers and properties of the
/// tables, blob files, pools and WAL segments.
///
/// # Errors
/// `Io` if the directory cannot be read.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # azekura::Config::new(&path).open()?.close()?;
/// # let fs: std::sync::Arc<dyn azekura::fs::Fs> = std::sync::Arc::new(azekura::fs::DiskFs::new());
/// std::fs::write(path.join("MANIFEST"), "not a manifest").unwrap();
/// assert!(azekura::inspect::rebuilt_manifest(&fs, &path)?.left_out.is_empty());
/// # Ok(()) }
/// ```
pub fn rebuilt_manifest(fs: &Arc<dyn Fs>, dir: &Path) -> Result<RebuiltManifest> {
    let dir = fs.absolute(dir)?;
    let mut rebuild = ManifestRebuild::begin(fs, dir)?;
    rebuild.add_tables();
    rebuild.add_blob_files();
    rebuild.add_pools();
    rebuild.add_wal();
    rebuild.finish()
}

struct ManifestRebuild {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// Names and lengths of the files.
    names: BTreeMap<String, u64>,
    files: Arc<DataFiles>,
    cache: Arc<BlockCache>,
    state: ManifestState,
    left_out: Vec<(PathBuf, Error)>,
}

impl ManifestRebuild {
    /// Applies the edits of the damaged manifest that can be read and do not contradict the ones before them. Of the
    /// tables that they name, those with a file are kept, on level 0, because edits that moved or removed them may be
    /// lost.
    fn begin(fs: &Arc<dyn Fs>, dir: PathBuf) -> Result<ManifestRebuild> {
        let names: BTreeMap<String, u64> =
            fs.read_dir(&dir)?.into_iter().filter(|entry| entry.is_file).map(|entry| (entry.name, entry.len)).collect();
        let files = Arc::new(DataFiles::tables(Arc::clone(fs), &dir, 8, DirectIoPolicy::never()));
        let cache = Arc::new(BlockCache::new(0));
        let state = ManifestState::default();
        let mut rebuild = ManifestRebuild { fs: Arc::clone(fs), dir, names, files, cache, state, left_out: Vec::new() };
        let manifest = rebuild.read(MANIFEST_NAME, u64::MAX).unwrap_or_default();
        for edit in salvage_edits(&manifest).unwrap_or_default() {
            // An edit that refers to lost ones is lost, too.
            let _ = rebuild.state.apply(&edit);
        }
        let names = &rebuild.names;
        for partition in rebuild.state.partitions.values_mut() {
            partition.tables.retain(|number, _| names.contains_key(&DataFileKind::Table.file_name(*number)));
            partition.tables.values_mut().for_each(|(level, _)| *level = 0);
            partition.spilled.retain(|number, _| names.contains_key(&DataFileKind::Table.file_name(*number)));
        }
        rebuild.state.wal_segments.clear();
        Ok(rebuild)
    }

    /// The first `len` bytes of a file, or all of a shorter one.
    fn read(&self, name: &str, len: u64) -> Result<Vec<u8>> {
        let file = self.fs.open(&self.dir.join(name), OpenMode::Read)?;
        read_whole(&*file, file.length()?.min(len))
    }

    fn numbers(&self, kind: DataFileKind) -> Vec<FileNumber> {
        let parsed = self.names.keys().filter_map(|name| parse_data_file_name(name));
        let of_kind = parsed.filter(|(of, number)| *of == kind && number.0 < FILE_NUMBER_LIMIT);
        of_kind.map(|(_, number)| number).collect()
    }

    fn leave_out(&mut self, name: String, error: Error) {
        self.left_out.push((self.dir.join(name), error));
    }

    /// The partition with this id. A new one gets the name, or another one if that is taken.
    fn partition(&mut self, id: PartitionId, engine: EngineKind, name: &str) -> &mut PartitionManifestState {
        let is_taken = |name: &str| self.state.partitions.values().any(|other| other.meta.name == name);
        let name = if is_taken(name) { format!("{name} (partition {})", id.0) } else { name.to_owned() };
        self.state.raise_next_numbers(0, id.0 + 1, 0);
        self.state.partitions.entry(id).or_insert_with(|| {
            let comparator = BYTEWISE_NAME.to_owned();
            PartitionManifestState::new(PartitionMeta {
                id,
                engine: engine as u8,
                name,
                comparator,
                settings: Vec::new(),
            })
        })
    }

    /// Adds every table whose properties can be read to the partition that these name. A table of an earlier version
    /// names none, and becomes a partition of its own.
    fn add_tables(&mut self) {
        let known: BTreeSet<FileNumber> =
            self.state.partitions.values().flat_map(|p| p.all_tables().map(|table| table.number)).collect();
        for number in self.numbers(DataFileKind::Table) {
            self.state.raise_next_numbers(number.0 + 1, 0, 0);
            if known.contains(&number) {
                continue;
            }
            let read = TableReader::read_properties(&self.files, &self.cache, number)
                .and_then(|properties| Ok((properties, TableReader::read_meta(&self.files, &self.cache, number)?)));
            match read {
                Ok((properties, meta)) => {
                    let unnamed =
                        || (PartitionId(self.state.next_partition_id.max(1)), format!("table-{:06}", number.0));
                    let (id, name) =
                        properties.partition.filter(|(id, _)| id.0 < FILE_NUMBER_LIMIT).unwrap_or_else(unnamed);
                    let partition = self.partition(id, EngineKind::Lsm, &name);
                    if partition.tables.is_empty() && partition.meta.settings.is_empty() {
                        partition.meta.comparator = properties.comparator;
                    }
                    partition.uses_expiry |= meta.expiry.entries > 0;
                    partition.tables.insert(number, (0, meta));
                    self.state.hash_seed = properties.hash_seed;
                }
                Err(error) => self.leave_out(DataFileKind::Table.file_name(number), error),
            }
        }
        // The records of a flushed table are in no part of the WAL that is still needed. An ingested table tells
        // nothing of older records.
        for partition in self.state.partitions.values_mut() {
            let flushed = partition.tables.values().filter(|(_, table)| table.global_seqno.is_none());
            let flushed = flushed.map(|(_, table)| table.largest_seqno).max().unwrap_or_default();
            partition.flushed_seqno = partition.flushed_seqno.max(flushed);
            partition.spilled.retain(|_, table| table.largest_seqno > flushed);
        }
    }

    /// Adds the blob files that tables refer to. Where a file is missing or damaged, one is added whose values cannot
    /// be read.
    fn add_blob_files(&mut self) {
        let mut found: BTreeMap<FileNumber, BlobFileMeta> = BTreeMap::new();
        let blobs = self.files.blob_files();
        for number in self.numbers(DataFileKind::Blob) {
            self.state.raise_next_numbers(number.0 + 1, 0, 0);
            match BlobFile::read_meta(&blobs, &self.cache, number) {
                // Of two files with the same values, the newer one was written by a blob GC.
                Ok(meta) => {
                    found.extend(meta.sections.iter().map(|s| (s.logical_file, meta.clone())).collect::<Vec<_>>())
                }
                Err(error) => self.leave_out(DataFileKind::Blob.file_name(number), error),
            }
        }
        for partition in self.state.partitions.values_mut() {
            let mut usage: BTreeMap<FileNumber, TableBlobUsage> = BTreeMap::new();
            for used in partition.all_tables().flat_map(|table| table.blob_usage.clone()) {
                let sum = usage.entry(used.logical_file).or_insert(TableBlobUsage { count: 0, bytes: 0, ..used });
                sum.count = sum.count.saturating_add(used.count);
                sum.bytes = sum.bytes.saturating_add(used.bytes);
            }
            partition.blob_files.clear();
            for (logical, used) in usage {
                let file = found.get(&logical).cloned().unwrap_or_else(|| {
                    let length = self.names.get(&DataFileKind::Blob.file_name(logical)).copied().unwrap_or_default();
                    BlobFileMeta { number: logical, size: length.max(1), created_ms: 0, sections: Vec::new() }
                });
                let file = partition
                    .blob_files
                    .entry(file.number)
                    .or_insert(BlobFileMeta { sections: Vec::new(), ..file.clone() });
                let section =
                    found.get(&logical).and_then(|file| file.sections.iter().find(|s| s.logical_file == logical));
                let mut section = section.copied().unwrap_or(BlobFileSection {
                    logical_file: logical,
                    values: 0,
                    bytes: 0,
                    rewritten: false,
                });
                // Tables that are not needed any more may refer to more values than there are.
                section.values = section.values.max(used.count);
                section.bytes = section.bytes.max(used.bytes);
                file.sections.push(section);
            }
        }
    }

    /// Adds the pools of partitions that the readable edits do not name.
    fn add_pools(&mut self) {
        let pools: Vec<PartitionId> = (self.names.keys())
            .filter_map(|name| pool::parse_pool_file_name(name))
            .filter(|(id, kind)| *kind == PoolFileKind::Pool && id.0 < FILE_NUMBER_LIMIT)
            .map(|(id, _)| id)
            .collect();
        for id in pools {
            if self.state.partitions.contains_key(&id) {
                continue;
            }
            let name = PoolFileKind::Pool.name(id);
            let read =
                self.read(&name, PAGE_LEN as u64).and_then(|page| match page.starts_with(&FileKind::Pool.magic()) {
                    true => Ok((EngineKind::PmemMapped, Default::default())),
                    false => ImageHeader::decode(&page).map(|header| (EngineKind::Pmem, header.replay_from)),
                });
            let (engine, flushed) = match read {
                Ok(read) => read,
                Err(error) => {
                    self.leave_out(name, error);
                    continue;
                }
            };
            self.partition(id, engine, &format!("partition-{}", id.0)).flushed_seqno = flushed;
        }
    }

    /// Adds the WAL segments of the database, and the partitions of their records.
    fn add_wal(&mut self) {
        let mut segments = BTreeMap::new();
        for (name, number) in self.names.keys().filter_map(|name| Some((name, parse_segment_name(name)?))) {
            let Some(bytes) = self.read(name, u64::MAX).ok().filter(|_| number.0 < FILE_NUMBER_LIMIT) else { continue };
            if let Ok(header) = WalSegmentHeader::decode(&bytes)
                && header.epoch.0 != 0
            {
                segments.insert(header.epoch, (number, header, bytes));
            }
        }
        if self.state.id == [0; 16]
            && let Some((_, newest, _)) = segments.values().next_back()
        {
            self.state.id = newest.database_id;
        }
        let id = self.state.id;
        segments.retain(|_, (_, header, _)| header.database_id == id);
        for (epoch, (number, header, bytes)) in segments {
            self.state.raise_next_numbers(number.0 + 1, 0, epoch.0.saturating_add(1));
            self.state.wal_segments.insert(epoch, number);
            for id in partitions_of_segment(&header, &bytes).unwrap_or_default() {
                if id.0 < FILE_NUMBER_LIMIT {
                    self.partition(id, EngineKind::Lsm, &format!("partition-{}", id.0));
                }
            }
        }
    }

    fn finish(mut self) -> Result<RebuiltManifest> {
        if self.state.instance == [0; 16] {
            self.state.instance = self.state.id;
        }
        self.state.raise_next_numbers(1, 1, 1);
        let edits = self.state.edits();
        ManifestState::replay(&edits)?;
        Ok(RebuiltManifest { bytes: encode_manifest(self.state.instance, &edits)?, left_out: self.left_out })
    }
}
