//! A manifest that is built from the files that it should name, for repair.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::file_format::FileKind;
use crate::base::key_range::{KeyBoundary, KeyRange, RangeTombstone};
use crate::base::manifest_state::{ManifestState, PartitionManifestState};
use crate::base::version_edit::{
    BlobFileMeta, BlobFileSection, EngineKind, FileNumber, INGEST_PLACEHOLDER, PartitionEdit, PartitionId,
    PartitionMeta, TableBlobUsage, TableMeta, VersionEdit, WalEpoch,
};
use crate::base::{Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::reader::BlobFile;
use crate::blob::unfinished::UnfinishedBlobFiles;
use crate::block::cache::BlockCache;
use crate::inspect::found_tables::{FoundTable, FoundTables, WritingJob, WritingJobs, hides_range_delete};
use crate::inspect::report::{random_instance, read_whole};
use crate::iter::range_tombstones::RangeTombstones;
use crate::manifest::{MANIFEST_NAME, encode_manifest, salvage_edits};
use crate::pmem::pool::{self, ImageHeader, PAGE_LEN, PoolFileKind};
use crate::table::format::TableOrigin;
use crate::table::reader::TableReader;
use crate::vfs::open_files::{DataFileKind, DataFiles, FileAccess, parse_data_file_name};
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::WalCommit;
use crate::wal::format::{
    IngestMarker, IngestNote, SEGMENT_HEADER_LEN, WalRecordIter, WalSegmentHeader, blob_pointers, parse_segment_name,
    segment_path, visit_commits, whole_through,
};
use crate::wal::reader::find_segment_file;

/// Files of a database have numbers below this one. Files with higher numbers are ignored.
const FILE_NUMBER_LIMIT: u64 = 1 << 61;

/// A manifest that was built from the files of a database.
///
/// A file system that shows [`bytes`](RebuiltManifest::bytes) as the file `MANIFEST` lets a read-only open in the mode
/// `Salvage` read the database. The levels of its tables are not known, so lookups of single keys may find older
/// versions; scans find the newest versions. Files that the database no longer used are left out if other files show
/// that. Range deletes are known from readable edits and the WAL only, and not used if a compaction may have applied
/// them. So removed keys and older versions may be there.
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
    /// Intact files that are not part of it, and files whose data may be too old or too new: one sentence for each.
    pub notes: Vec<(PathBuf, String)>,
}

/// Builds a manifest from the records of the damaged one that can be read, and from the headers and properties of the
/// tables, blob files, pools and WAL segments. Positions of changes of the damaged database are `Invalid` in the new
/// one.
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
    let mut tables = rebuild.read_tables();
    let (blob_files, unreadable) = rebuild.read_blob_files();
    let jobs = WritingJobs::new(&tables, |logical| blob_files.contains_key(&logical));
    let flushed = jobs.flushed_through(&tables);
    rebuild.leave_out_removed(&mut tables, &jobs);
    rebuild.leave_out_dropped(&mut tables);
    rebuild.add_named_partitions(&tables);
    let segments = rebuild.find_segments();
    let direct_values = rebuild.check_direct_values(&blob_files, &flushed, &segments);
    rebuild.leave_out_unfinished_flushes(&mut tables, &jobs, &flushed, &segments, &blob_files, &direct_values);
    rebuild.add_named_tables(&tables, &flushed);
    rebuild.leave_out_applied_range_deletes(&tables)?;
    rebuild.add_pools();
    let wal = rebuild.add_wal(&tables, segments);
    rebuild.add_ingested_tables(&tables, &wal);
    rebuild.add_unnamed_tables(&tables);
    rebuild.add_range_tombstones(wal)?;
    rebuild.add_blob_files(&blob_files);
    rebuild.leave_out_blob_files(unreadable, direct_values);
    rebuild.finish()
}

/// What the WAL says.
#[derive(Default)]
struct WalFacts {
    /// The sequence number of each commit that may be a marker, and its partition, by the first table of the ingest.
    markers: BTreeMap<FileNumber, Vec<(PartitionId, SeqNo)>>,
    /// The number of records of each partition, and the sequence number of the last one.
    records: BTreeMap<PartitionId, (u64, SeqNo)>,
    /// The flushed range deletes.
    range_tombstones: BTreeMap<PartitionId, RangeTombstones>,
    /// The first sequence number of the WAL, unless a segment may be missing.
    complete_from: Option<SeqNo>,
}

/// The blob files without an end that the WAL refers to, with the damage of one value, if there is any.
type DirectValues = BTreeMap<FileNumber, Option<Error>>;

/// A segment file with its header.
type FoundSegment = (FileNumber, WalSegmentHeader);
type FoundSegments = BTreeMap<WalEpoch, FoundSegment>;

/// The segment files of the WAL.
struct Segments {
    by_epoch: FoundSegments,
    /// No segment is missing, apart from the oldest ones.
    is_complete: bool,
}

impl Segments {
    /// The first sequence number of the WAL, unless a segment may be missing.
    fn complete_from(&self) -> Option<SeqNo> {
        let first = self.by_epoch.values().map(|(_, header)| header.first_seqno).min();
        first.filter(|_| self.is_complete)
    }
}

/// The newest segment, and those that it follows, over any number of others.
fn newest_chain(segments: &FoundSegments) -> BTreeSet<WalEpoch> {
    let mut linked = BTreeSet::new();
    let mut next = segments.last_key_value().map(|(epoch, _)| *epoch);
    while let Some(epoch) = next.filter(|epoch| segments.contains_key(epoch)) {
        linked.insert(epoch);
        next = segments.get(&epoch).map(|(_, header)| header.previous_epoch);
    }
    linked
}

/// The sequence number behind `seqno`, or the highest one.
fn next_seqno(seqno: SeqNo) -> SeqNo {
    SeqNo(seqno.0 + 1).min(SeqNo::MAX)
}

fn last_seqno(commit: &WalCommit<'_>) -> SeqNo {
    SeqNo(commit.first_seqno.0.saturating_add(u64::from(commit.seqno_count)).saturating_sub(1))
}

/// Whether a table of a partition [hides](hides_range_delete) a range delete.
fn hides(partition: &PartitionManifestState, tables: &FoundTables, range: &KeyRange, seqno: SeqNo) -> bool {
    let order = KeyOrder::bytewise();
    partition.tables.iter().any(|(number, (_, meta))| match tables.get(number) {
        Some(table) => table.hides(range, seqno, &order),
        // A part of the table may be damaged.
        None => hides_range_delete(meta, &TableOrigin::Unknown, range, seqno, &order),
    })
}

/// The set of these fragments, which may overlap. Empty ones are left out.
fn merged_fragments(mut fragments: Vec<RangeTombstone>, order: &KeyOrder) -> Result<RangeTombstones> {
    fragments.retain(|fragment| !fragment.range.is_empty(order));
    fragments.sort_by(|a, b| a.range.start.cmp(&b.range.start, order));
    let mut disjoint: Vec<Vec<RangeTombstone>> = Vec::new();
    for fragment in fragments {
        let is_before = |other: &RangeTombstone| other.range.end.cmp(&fragment.range.start, order).is_le();
        match disjoint.iter_mut().find(|list| list.last().is_some_and(is_before)) {
            Some(list) => list.push(fragment),
            None => disjoint.push(vec![fragment]),
        }
    }
    disjoint.into_iter().try_fold(RangeTombstones::default(), |merged, list| {
        Ok(merged.merged_with(&RangeTombstones::from_fragments(list, order)?, &[SeqNo::MAX], order))
    })
}

struct ManifestRebuild {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    /// Names and lengths of the files.
    names: BTreeMap<String, u64>,
    files: DataFiles,
    cache: Arc<BlockCache>,
    state: ManifestState,
    /// The partitions and tables that readable edits remove, and the partitions whose name a newer one has.
    dropped: BTreeSet<PartitionId>,
    removed: BTreeSet<FileNumber>,
    left_out: Vec<(PathBuf, Error)>,
    notes: Vec<(PathBuf, String)>,
}

impl ManifestRebuild {
    /// Applies the edits of the damaged manifest that can be read and do not contradict the ones before them. Of the
    /// tables that they name, those with a file are kept, on level 0, because edits that moved or removed them may be
    /// lost.
    fn begin(fs: &Arc<dyn Fs>, dir: PathBuf) -> Result<ManifestRebuild> {
        let names: BTreeMap<String, u64> =
            fs.read_dir(&dir)?.into_iter().filter(|entry| entry.is_file).map(|entry| (entry.name, entry.len)).collect();
        let files = DataFiles::tables(Arc::clone(fs), &dir, 8, FileAccess::buffered());
        let mut rebuild = ManifestRebuild {
            fs: Arc::clone(fs),
            dir,
            names,
            files,
            cache: Arc::new(BlockCache::new(0)),
            state: ManifestState::default(),
            dropped: BTreeSet::new(),
            removed: BTreeSet::new(),
            left_out: Vec::new(),
            notes: Vec::new(),
        };
        let manifest = rebuild.read(MANIFEST_NAME, u64::MAX).unwrap_or_default();
        for edit in salvage_edits(&manifest).unwrap_or_default() {
            match &edit {
                VersionEdit::Partition { id, edit: PartitionEdit::Dropped } => _ = rebuild.dropped.insert(*id),
                VersionEdit::Partition { edit: PartitionEdit::TableRemoved { table }, .. } => {
                    rebuild.removed.insert(*table);
                }
                _ => {}
            }
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

    fn note(&mut self, name: String, sentence: impl Into<String>) {
        self.notes.push((self.dir.join(name), sentence.into()));
    }

    fn note_table(&mut self, number: FileNumber, sentence: impl Into<String>) {
        self.note(DataFileKind::Table.file_name(number), sentence);
    }

    /// The partition with this id. A new one gets the name, or another one if that is taken.
    fn partition(&mut self, id: PartitionId, engine: EngineKind, name: &str) -> &mut PartitionManifestState {
        let is_taken = |name: &str| self.state.partitions.values().any(|other| other.meta.name == name);
        let mut free = name.to_owned();
        while is_taken(&free) {
            free += " (recovered)";
        }
        self.state.raise_next_numbers(0, id.0 + 1, 0);
        self.state.partitions.entry(id).or_insert_with(|| {
            let comparator = BYTEWISE_NAME.to_owned();
            PartitionManifestState::new(PartitionMeta {
                id,
                engine: engine as u8,
                name: free,
                comparator,
                settings: Vec::new(),
            })
        })
    }

    /// Reads the properties of all tables.
    fn read_tables(&mut self) -> FoundTables {
        let (mut tables, mut inputs) = (BTreeMap::new(), BTreeMap::new());
        for number in self.numbers(DataFileKind::Table) {
            self.state.raise_next_numbers(number.0 + 1, 0, 0);
            let read = TableReader::read_properties(&self.files, &self.cache, number)
                .and_then(|properties| Ok((properties, TableReader::read_meta(&self.files, &self.cache, number)?)));
            match read {
                Ok((mut properties, meta)) => {
                    properties.partition = properties.partition.filter(|(id, _)| id.0 < FILE_NUMBER_LIMIT);
                    self.state.hash_seed = properties.hash_seed;
                    let mut table = FoundTable { properties, meta };
                    table.share_inputs(&mut inputs);
                    tables.insert(number, table);
                }
                Err(error) if !self.removed.contains(&number) => {
                    self.leave_out(DataFileKind::Table.file_name(number), error);
                }
                Err(_) => {}
            }
        }
        tables
    }

    /// Removes the tables that readable edits remove, or that a compaction has replaced of which all tables are there,
    /// and those that no edit may name.
    fn leave_out_removed(&mut self, tables: &mut FoundTables, jobs: &WritingJobs) {
        let is_temporary = |table: &FoundTable| table.properties.origin == TableOrigin::Temporary;
        let temporary: Vec<FileNumber> = tables.iter().filter(|(_, t)| is_temporary(t)).map(|(n, _)| *n).collect();
        for number in temporary {
            tables.remove(&number);
            self.note_table(number, "not used: a part of the input of an ingest");
        }
        let (mut replaced, mut unclear, mut unfinished) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        for (first, job) in jobs.0.iter().filter(|(_, job)| !job.is_flush) {
            let is_named = job.outputs.iter().any(|output| self.is_known(*output));
            let inputs = job.inputs.iter().copied();
            if job.is_complete {
                replaced.extend(inputs);
            } else if !is_named && jobs.is_unfinished_compaction(*first, tables) {
                unfinished.extend_from_slice(&job.outputs);
            } else {
                unclear.extend(inputs);
            }
        }
        for number in unfinished {
            tables.remove(&number);
            self.note_table(number, "not used: the compaction has not ended, and the tables that it reads are there");
        }
        for number in self.removed.union(&replaced) {
            if tables.remove(number).is_some() {
                let sentence = "not used: the table was removed, or a compaction has replaced it";
                self.notes.push((self.dir.join(DataFileKind::Table.file_name(*number)), sentence.into()));
            }
        }
        for partition in self.state.partitions.values_mut() {
            partition.tables.retain(|number, _| !replaced.contains(number));
        }
        let replaced_file =
            |path: &PathBuf| replaced.iter().any(|number| path.ends_with(DataFileKind::Table.file_name(*number)));
        self.left_out.retain(|(path, _)| !replaced_file(path));
        let is_spilled = |table: &FoundTable| table.properties.origin == TableOrigin::Spilled;
        for (number, table) in tables.iter() {
            if unclear.contains(number) {
                let sentence = "a compaction of this table has not ended, or tables of it are lost: older values and \
                                removed keys may be back";
                self.note_table(*number, sentence);
            } else if !table.is_ingested() && !is_spilled(table) && jobs.may_have_replaced(table, tables) {
                let sentence = "a compaction may have replaced this table before a later one: older values and removed \
                                keys may be back";
                self.note_table(*number, sentence);
            }
        }
    }

    /// Removes the partitions that readable edits drop, or whose name a partition with a higher id has, and their
    /// tables. No two partitions have one name at the same time, so the older one was dropped.
    fn leave_out_dropped(&mut self, tables: &mut FoundTables) {
        let known = self.state.partitions.values().map(|partition| (partition.meta.id, partition.meta.name.clone()));
        let named = tables.values().filter_map(|table| table.properties.partition.clone());
        let mut newest: BTreeMap<String, PartitionId> = BTreeMap::new();
        for (id, name) in known.chain(named) {
            let newest = newest.entry(name).or_insert(id);
            let older = if *newest < id { std::mem::replace(newest, id) } else { id };
            if older != *newest {
                self.dropped.insert(older);
            }
        }
        self.state.partitions.retain(|id, _| !self.dropped.contains(id));
        let is_dropped =
            |table: &FoundTable| table.properties.partition.as_ref().is_some_and(|(id, _)| self.dropped.contains(id));
        let numbers: Vec<FileNumber> = tables.iter().filter(|(_, t)| is_dropped(t)).map(|(n, _)| *n).collect();
        for number in numbers {
            tables.remove(&number);
            self.note_table(number, "not used: its partition was dropped");
        }
    }

    /// Checks the values in blob files without an end that records of the WAL above the flushed sequence numbers refer
    /// to. Returns these files with the damage of one value, if there is any.
    fn check_direct_values(
        &self,
        blob_files: &BTreeMap<FileNumber, BlobFileMeta>,
        flushed: &BTreeMap<PartitionId, SeqNo>,
        segments: &Segments,
    ) -> DirectValues {
        let no_manifest = ManifestState::default();
        let mut files = UnfinishedBlobFiles::new(&no_manifest, self.files.blob_files(), Arc::clone(&self.cache));
        let mut checked = DirectValues::new();
        let is_flushed = |id: PartitionId, seqno: SeqNo| {
            let known = self.state.partitions.get(&id).map(PartitionManifestState::permanent);
            known.max(flushed.get(&id).copied()).is_some_and(|through| seqno <= through)
        };
        for (number, header) in segments.by_epoch.values() {
            let Ok(file) = self.open_segment(*number) else { continue };
            // The replay reports what cannot be read.
            let _ = visit_commits(header, &*file, &mut |commit| {
                for (id, seqno, pointer) in blob_pointers(&commit).unwrap_or_default() {
                    let file = pointer.logical_file;
                    if !blob_files.contains_key(&file) && !is_flushed(id, seqno) && !self.dropped.contains(&id) {
                        let damage = checked.entry(file).or_default();
                        *damage = damage.take().or_else(|| files.check_pointer(id, &pointer).err());
                    }
                }
            });
        }
        checked
    }

    /// Removes the tables of flushes that have not ended, if the WAL has all of their records, and
    /// - a merge operator would apply their operands once more when the WAL is replayed, or
    /// - one of their blob files has no end. The replay reads its values without it, but not if a table refers to them.
    ///
    /// Other records may be in a table and in the WAL.
    fn leave_out_unfinished_flushes(
        &mut self,
        tables: &mut FoundTables,
        jobs: &WritingJobs,
        flushed: &BTreeMap<PartitionId, SeqNo>,
        segments: &Segments,
        blob_files: &BTreeMap<FileNumber, BlobFileMeta>,
        direct_values: &DirectValues,
    ) {
        let flushed = |job: &WritingJob| job.partition.and_then(|id| flushed.get(&id).copied()).unwrap_or_default();
        let is_unfinished = |job: &&WritingJob| job.is_flush && !job.is_complete && job.flushed_through > flushed(job);
        let mut undamaged = None;
        for job in jobs.0.values().filter(is_unfinished) {
            let is_named = job.outputs.iter().any(|number| self.is_known(*number));
            let outputs: Vec<FileNumber> = job.outputs.iter().filter(|n| tables.contains_key(n)).copied().collect();
            let first = outputs.iter().filter_map(|number| tables.get(number)).map(|t| t.meta.smallest_seqno).min();
            let Some(first) = first.filter(|_| !is_named) else { continue };
            let (from, through) = *undamaged.get_or_insert_with(|| self.undamaged_wal(segments));
            let in_wal = from <= first && flushed(job) < first && job.flushed_through <= through;
            let partition = job.partition.and_then(|id| self.state.partitions.get(&id));
            let has_operands = partition.is_some_and(|partition| partition.merge_operator.is_some());
            let used = outputs.iter().filter_map(|number| tables.get(number)).flat_map(|t| &t.meta.blob_usage);
            let mut unfinished = used.map(|usage| usage.logical_file).filter(|file| !blob_files.contains_key(file));
            // If a value is damaged, the replay skips its whole commit.
            let is_intact = |file: FileNumber| direct_values.get(&file).is_none_or(Option::is_none);
            let in_growing_file = unfinished.clone().next().is_some() && unfinished.all(is_intact);
            for number in outputs {
                if in_wal && (has_operands || in_growing_file) {
                    tables.remove(&number);
                    self.note_table(number, "not used: the flush has not ended, and the log has its records");
                } else if !in_wal {
                    let sentence = "the flush of this table has not ended, or files of it are lost: entries may be \
                                    missing, and operands of a merge operator may count twice";
                    self.note_table(number, sentence);
                }
            }
        }
    }

    /// The first and the last sequence number of the WAL. It has all commits between them. If it may not,
    /// the first is above the last.
    fn undamaged_wal(&self, segments: &Segments) -> (SeqNo, SeqNo) {
        let damaged = (SeqNo::MAX, SeqNo::ZERO);
        let Some(from) = segments.complete_from() else { return damaged };
        let mut through = SeqNo::ZERO;
        for (number, header) in segments.by_epoch.values() {
            let visited = self.open_segment(*number).and_then(|file| {
                visit_commits(header, &*file, &mut |commit| through = through.max(last_seqno(&commit)))
            });
            if !visited.is_ok_and(|is_undamaged| is_undamaged) {
                return damaged;
            }
        }
        (from, through)
    }

    fn is_known(&self, number: FileNumber) -> bool {
        self.state.partitions.values().any(|p| p.tables.contains_key(&number) || p.spilled.contains_key(&number))
    }

    /// The partition of a table. A new one gets the comparator of the table.
    fn partition_of(&mut self, table: &FoundTable, id: PartitionId, name: &str) -> &mut PartitionManifestState {
        let is_new = !self.state.partitions.contains_key(&id);
        let partition = self.partition(id, EngineKind::Lsm, name);
        if is_new {
            partition.meta.comparator.clone_from(&table.properties.comparator);
        }
        partition
    }

    /// Adds a table that the readable edits do not name to a partition.
    fn add_table(&mut self, id: PartitionId, name: &str, table: &FoundTable, meta: TableMeta) {
        self.partition_of(table, id, name).tables.insert(meta.number, (0, meta));
    }

    /// Creates the partitions that the properties of tables name. Spilled tables do not state the comparator.
    fn add_named_partitions(&mut self, tables: &FoundTables) {
        let is_spilled = |table: &&FoundTable| table.properties.origin == TableOrigin::Spilled;
        let others = tables.values().filter(|table| !is_spilled(table));
        for table in others.chain(tables.values().filter(is_spilled)) {
            if let Some((id, name)) = &table.properties.partition {
                self.partition_of(table, *id, name);
            }
        }
    }

    /// Adds every table to the partition that its properties name, apart from ingested ones. The records of the
    /// partition that are in tables are in no part of the WAL that is still needed.
    fn add_named_tables(&mut self, tables: &FoundTables, flushed: &BTreeMap<PartitionId, SeqNo>) {
        for (number, table) in tables.iter().filter(|(_, table)| table.properties.origin != TableOrigin::Spilled) {
            let Some((id, name)) = &table.properties.partition else { continue };
            if !table.is_ingested() && !self.is_known(*number) {
                self.add_table(*id, name, table, table.meta.clone());
            }
        }
        for (id, partition) in &mut self.state.partitions {
            partition.flushed_seqno = partition.flushed_seqno.max(flushed.get(id).copied().unwrap_or_default());
        }
        for (number, table) in tables {
            let Some((id, _)) = table.properties.partition.as_ref() else { continue };
            if table.properties.origin != TableOrigin::Spilled || self.is_known(*number) {
                continue;
            }
            match self.state.partitions.get_mut(id) {
                Some(partition) if partition.meta.comparator != BYTEWISE_NAME => {
                    partition.spilled.insert(*number, table.meta.clone());
                }
                _ => self.note_table(*number, "not used: the comparator of its partition is not known"),
            }
        }
        for partition in self.state.partitions.values_mut() {
            let flushed = partition.flushed_seqno;
            partition.spilled.retain(|_, table| table.largest_seqno > flushed);
        }
    }

    /// Removes the range deletes of the readable edits that a compaction may have applied, if the edit that removed
    /// them is lost. The others may overlap, because edits between them are lost.
    fn leave_out_applied_range_deletes(&mut self, tables: &FoundTables) -> Result<()> {
        let order = KeyOrder::bytewise();
        let mut edits = Vec::new();
        for (id, partition) in self.state.partitions.iter().filter(|(_, known)| !known.range_tombstones.is_empty()) {
            let is_bytewise = partition.meta.comparator == BYTEWISE_NAME;
            let removed = partition.range_tombstones.values().map(|fragment| fragment.range.start.clone()).collect();
            let mut is_applied = false;
            let mut added = Vec::new();
            for fragment in partition.range_tombstones.values() {
                // The order of the keys is not known without the comparator.
                let whole = KeyRange { start: KeyBoundary::Min, end: KeyBoundary::Max };
                let range = if is_bytewise { &fragment.range } else { &whole };
                let is_kept = |seqno: &&SeqNo| !hides(partition, tables, range, **seqno);
                let seqnos: Arc<[SeqNo]> = fragment.seqnos.iter().filter(is_kept).copied().collect();
                is_applied |= seqnos.len() < fragment.seqnos.len();
                if !seqnos.is_empty() {
                    added.push(RangeTombstone { seqnos, ..fragment.clone() });
                }
            }
            if is_bytewise {
                added = merged_fragments(added, &order)?.iter().cloned().collect();
            }
            if is_applied {
                let sentence = format!(
                    "range deletes of partition {:?} are not used: a compaction may have applied them, and later \
                     writes look older; removed keys may be back",
                    partition.meta.name
                );
                self.notes.push((self.dir.join(MANIFEST_NAME), sentence));
            }
            edits.push(PartitionEdit::RangeTombstones { removed, added }.of(*id));
        }
        edits.iter().try_for_each(|edit| self.state.apply(edit))
    }

    /// Adds the tables of ingests with their sequence numbers. The WAL has the number of an ingest as long as it has
    /// the commit behind it. Otherwise it is above everything that was visible when the ingest was written, and commits
    /// after that time count as newer.
    fn add_ingested_tables(&mut self, tables: &FoundTables, wal: &WalFacts) {
        let mut ingests: BTreeMap<FileNumber, Vec<(PartitionId, String, &FoundTable)>> = BTreeMap::new();
        for (number, table) in tables.iter().filter(|(_, table)| table.is_ingested()) {
            if let Some((id, name)) = table.properties.partition.clone().filter(|_| !self.is_known(*number)) {
                ingests.entry(table.ingest_number()).or_default().push((id, name, table));
            }
        }
        for (first, members) in ingests {
            let id = members[0].0;
            let marker = wal.markers.get(&first).into_iter().flatten();
            // No other record has the partition of a marker, so a remove with another one is no marker.
            let is_marker = |of: &PartitionId| {
                !self.state.partitions.contains_key(of) && wal.records.get(of).is_none_or(|(count, _)| *count == 1)
            };
            let marker = marker.filter(|(of, _)| is_marker(of)).map(|(_, at)| *at).max();
            let older = tables.range(..first).filter(|(_, table)| table.is_of(id) && !table.is_ingested());
            let older = older.map(|(_, table)| table.meta.largest_seqno);
            let visible = members.iter().map(|(_, _, table)| match table.properties.origin {
                TableOrigin::Ingest { visible, .. } => visible,
                _ => SeqNo::ZERO,
            });
            let visible = visible.chain(older).max().unwrap_or_default();
            let seqno = marker.map_or(next_seqno(visible), |marker| SeqNo(marker.0.saturating_sub(1)));
            for (_, name, table) in &members {
                if marker.is_none() {
                    self.note_lost_seqno(id, table, visible, wal);
                }
                self.add_table(id, name, table, table.meta.clone().with_global_seqno(seqno));
            }
        }
    }

    fn note_lost_seqno(&mut self, id: PartitionId, table: &FoundTable, visible: SeqNo, wal: &WalFacts) {
        let order = KeyOrder::bytewise();
        let overlaps = |other: &TableMeta| {
            order.cmp(&other.smallest_key.0, &table.meta.largest_key.0).is_le()
                && order.cmp(&table.meta.smallest_key.0, &other.largest_key.0).is_le()
        };
        let partition = self.state.partitions.get(&id);
        let mut others = partition.into_iter().flat_map(|partition| partition.tables.values());
        let mut range_tombstones = partition.into_iter().flat_map(|partition| partition.range_tombstones.values());
        let has_newer = others.any(|(_, other)| other.largest_seqno > visible && overlaps(other))
            || range_tombstones.any(|tombstone| tombstone.seqnos.iter().any(|seqno| *seqno > visible))
            || wal.records.get(&id).is_some_and(|(_, last)| *last > visible);
        if wal.complete_from.is_some_and(|first| first <= next_seqno(visible)) {
            let sentence = "used, but the ingest that has written the table may not have been committed";
            self.note_table(table.meta.number, sentence);
        } else if has_newer {
            let sentence = format!(
                "the place of this ingest among the commits is lost: those after sequence number {visible} count as \
                 newer"
            );
            self.note_table(table.meta.number, sentence);
        }
    }

    /// Makes a partition of each table that names none, because an earlier version has written it. All other ids are
    /// known by now.
    fn add_unnamed_tables(&mut self, tables: &FoundTables) {
        for (number, table) in tables.iter().filter(|(_, table)| table.properties.partition.is_none()) {
            if !self.is_known(*number) {
                let id = PartitionId(self.state.next_partition_id.max(1));
                let meta = match table.is_ingested() {
                    true => table.meta.clone().with_global_seqno(INGEST_PLACEHOLDER),
                    false => table.meta.clone(),
                };
                self.add_table(id, &format!("table-{:06}", number.0), table, meta);
                self.note_table(*number, "the table names no partition, so it is one of its own");
            }
        }
    }

    /// Reads the finished blob files, and returns them by the logical files that they contain. The others have no end,
    /// or are damaged.
    fn read_blob_files(&mut self) -> (BTreeMap<FileNumber, BlobFileMeta>, BTreeMap<FileNumber, Error>) {
        let mut found: BTreeMap<FileNumber, BlobFileMeta> = BTreeMap::new();
        let mut unreadable = BTreeMap::new();
        let blobs = self.files.blob_files();
        for number in self.numbers(DataFileKind::Blob) {
            self.state.raise_next_numbers(number.0 + 1, 0, 0);
            match BlobFile::read_meta(&blobs, &self.cache, number) {
                // Of two files with the same values, the newer one was written by a blob GC.
                Ok(meta) => {
                    found.extend(meta.sections.iter().map(|s| (s.logical_file, meta.clone())).collect::<Vec<_>>())
                }
                Err(error) => _ = unreadable.insert(number, error),
            }
        }
        (found, unreadable)
    }

    /// Adds the blob files that tables refer to. Where a file is missing or damaged, one is added whose values cannot
    /// be read.
    fn add_blob_files(&mut self, found: &BTreeMap<FileNumber, BlobFileMeta>) {
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

    /// Leaves out the blob files that cannot be read. A file without an end is intact if only the WAL refers to it, and
    /// finds all values.
    fn leave_out_blob_files(&mut self, unreadable: BTreeMap<FileNumber, Error>, mut direct_values: DirectValues) {
        for (number, error) in unreadable {
            let is_named = self.state.partitions.values().any(|partition| partition.blob_files.contains_key(&number));
            match direct_values.remove(&number).filter(|_| !is_named) {
                Some(None) => {}
                Some(Some(damage)) => self.leave_out(DataFileKind::Blob.file_name(number), damage),
                None => self.leave_out(DataFileKind::Blob.file_name(number), error),
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
            let name = PoolFileKind::Pool.name(id);
            self.state.raise_next_numbers(0, id.0 + 1, 0);
            if let Some(partition) = self.state.partitions.get(&id) {
                if partition.meta.engine == EngineKind::Lsm as u8 {
                    self.leave_out(name, Error::corruption("the partition of this pool has tables"));
                }
                continue;
            }
            if self.dropped.contains(&id) {
                self.note(name, "not used: its partition was dropped");
                continue;
            }
            let read =
                self.read(&name, PAGE_LEN as u64).and_then(|page| match page.starts_with(&FileKind::Pool.magic()) {
                    true => Ok((EngineKind::PmemMapped, Default::default())),
                    false => ImageHeader::decode(&page).map(|header| (EngineKind::Pmem, header.replay_from)),
                });
            match read {
                Ok((engine, flushed)) => {
                    self.partition(id, engine, &format!("partition-{}", id.0)).flushed_seqno = flushed;
                    self.note(name, "the name of this partition is lost; it may have been dropped");
                }
                Err(error) => self.leave_out(name, error),
            }
        }
    }

    /// Adds the WAL segments of the database, and the partitions of their records. No segment is in memory as a whole.
    fn add_wal(&mut self, tables: &FoundTables, segments: Segments) -> WalFacts {
        let mut facts = WalFacts { complete_from: segments.complete_from(), ..WalFacts::default() };
        let ingested = tables.values().filter(|table| table.is_ingested());
        facts.markers = ingested.map(|table| (table.ingest_number(), Vec::new())).collect();
        let mut written = BTreeSet::new();
        let mut newest_range_delete: BTreeMap<PartitionId, SeqNo> = BTreeMap::new();
        for (epoch, (number, header)) in &segments.by_epoch {
            self.state.raise_next_numbers(number.0 + 1, 0, epoch.0.saturating_add(1));
            self.state.wal_segments.insert(*epoch, *number);
            let Ok(file) = self.open_segment(*number) else { continue };
            // The replay reports what cannot be read.
            let _ = visit_commits(header, &*file, &mut |commit| {
                self.visit_commit(&commit, tables, &mut facts, &mut written, &mut newest_range_delete);
            });
        }
        for id in written {
            if !self.dropped.contains(&id) && !self.state.partitions.contains_key(&id) {
                self.partition(id, EngineKind::Lsm, &format!("partition-{}", id.0));
                let sentence = format!("the name of partition-{} is lost; it may have been dropped", id.0);
                self.note(MANIFEST_NAME.to_owned(), sentence);
            }
        }
        facts
    }

    /// The segments of the WAL, and whether no part of it is missing. Segments that the newest one does not follow,
    /// over any number of others, are spare files with old records. They are left out, unless they may have newer ones.
    fn find_segments(&mut self) -> Segments {
        let mut segments = BTreeMap::new();
        let mut is_complete = true;
        for (name, number) in self.names.keys().filter_map(|name| Some((name, parse_segment_name(name)?))) {
            let header = self.read(name, SEGMENT_HEADER_LEN as u64).and_then(|bytes| WalSegmentHeader::decode(&bytes));
            match header.ok().filter(|_| number.0 < FILE_NUMBER_LIMIT) {
                Some(header) if header.epoch.0 != 0 => _ = segments.insert(header.epoch, (number, header)),
                Some(_) => {}
                None => is_complete = false,
            }
        }
        if self.state.id == [0; 16]
            && let Some((_, (_, newest))) = segments.last_key_value()
        {
            self.state.id = newest.database_id;
        }
        let id = self.state.id;
        segments.retain(|_, (_, header)| header.database_id == id);
        let mut linked = newest_chain(&segments);
        while self.is_unfinished_rewrite(&linked, &segments) {
            for (epoch, (number, _)) in linked.iter().filter_map(|epoch| segments.remove_entry(epoch)) {
                self.state.raise_next_numbers(number.0 + 1, 0, epoch.0.saturating_add(1));
            }
            linked = newest_chain(&segments);
        }
        let first = linked.iter().filter_map(|epoch| segments.get(epoch)).map(|(_, header)| header.first_seqno).min();
        let is_old = |segment: &FoundSegment| {
            let last = self.last_commit(segment).map(|last| last.max(Some(segment.1.first_seqno)));
            last.is_ok_and(|last| first.is_some() && last < first)
        };
        if is_complete && segments.iter().all(|(epoch, segment)| linked.contains(epoch) || is_old(segment)) {
            segments.retain(|epoch, _| linked.contains(epoch));
        } else {
            is_complete = false;
        }
        Segments { by_epoch: segments, is_complete }
    }

    /// Whether `chain` was begun by a recovery that skips damage and was interrupted: nothing states that any of it is
    /// durable, no other segment follows it, and others have commits behind its first part that is whole. If it begins
    /// behind all others, it replaces none of them.
    fn is_unfinished_rewrite(&self, chain: &BTreeSet<WalEpoch>, segments: &FoundSegments) -> bool {
        let (rewritten, others): (Vec<_>, Vec<_>) = segments.iter().partition(|(epoch, _)| chain.contains(epoch));
        let find = |number| find_segment_file(&*self.fs, &self.dir, number, self.state.id);
        let has_no_mark = |(_, (number, _)): &(&WalEpoch, &FoundSegment)| {
            find(*number).is_ok_and(|found| found.is_ok_and(|segment| segment.is_of_rewrite(&*self.fs)))
        };
        let is_followed = others.iter().any(|(_, (_, header))| chain.contains(&header.previous_epoch));
        if is_followed || !rewritten.iter().all(has_no_mark) {
            return false;
        }
        let first = rewritten.iter().map(|(_, (_, header))| header.first_seqno).min();
        let last = others.iter().map(|(_, other)| self.last_commit(other).unwrap_or(Some(SeqNo::MAX))).max().flatten();
        first <= last && self.whole_through(&rewritten) < last
    }

    /// The last sequence number of successive segments before the first one that is missing.
    fn whole_through(&self, segments: &[(&WalEpoch, &FoundSegment)]) -> Option<SeqNo> {
        let mut last: Option<SeqNo> = None;
        for (_, (number, header)) in segments {
            if last.is_some_and(|last| header.first_seqno != next_seqno(last)) {
                break;
            }
            let end = self.open_segment(*number).and_then(|file| whole_through(header, &*file));
            let Ok(end) = end else { break };
            last = Some(end);
        }
        last
    }

    fn open_segment(&self, number: FileNumber) -> Result<Arc<dyn File>> {
        self.fs.open(&segment_path(&self.dir, number), OpenMode::Read)
    }

    /// The last sequence number of the commits of a segment that can be read.
    fn last_commit(&self, (number, header): &FoundSegment) -> Result<Option<SeqNo>> {
        let mut last = None;
        let file = self.open_segment(*number)?;
        visit_commits(header, &*file, &mut |commit| last = last.max(Some(last_seqno(&commit))))?;
        Ok(last)
    }

    fn visit_commit(
        &mut self,
        commit: &WalCommit<'_>,
        tables: &FoundTables,
        facts: &mut WalFacts,
        written: &mut BTreeSet<PartitionId>,
        newest: &mut BTreeMap<PartitionId, SeqNo>,
    ) {
        if let Some(marker) = IngestMarker::of_payload(commit.payload)
            && let Some(found) = facts.markers.get_mut(&marker.first_table)
        {
            found.push((marker.partition, commit.first_seqno));
        }
        for (at, record) in (0..).zip(WalRecordIter::new(commit.payload).map_while(Result::ok)) {
            let (id, seqno) = (record.partition, SeqNo(commit.first_seqno.0.saturating_add(at)).min(SeqNo::MAX));
            if id.0 >= FILE_NUMBER_LIMIT || !matches!(IngestNote::of_record(&record), Ok(None)) {
                continue;
            }
            let (count, last) = facts.records.entry(id).or_default();
            (*count, *last) = (*count + 1, seqno.max(*last));
            self.state.raise_next_numbers(0, id.0 + 1, 0);
            match record.kind {
                // A partition that has nothing else is empty, or does not exist, as that of the marker of an ingest.
                RecordKind::Delete | RecordKind::SingleDelete => {}
                RecordKind::RangeDelete => {
                    let is_next = newest.get(&id).is_none_or(|newest| *newest < seqno);
                    if let Ok(range) = KeyRange::decode(record.key, record.value)
                        && is_next
                        && self.is_lost_range_delete(id, &range.to_owned(), seqno, tables)
                    {
                        newest.insert(id, seqno);
                        let set = facts.range_tombstones.entry(id).or_default();
                        *set = set.with_range_delete(range.to_owned(), seqno, &[SeqNo::MAX], &KeyOrder::bytewise());
                    }
                }
                _ => _ = written.insert(id),
            }
        }
    }

    /// Whether a range delete of the WAL was flushed, so that replay skips it and only the manifest had it.
    fn is_lost_range_delete(&self, id: PartitionId, range: &KeyRange, seqno: SeqNo, tables: &FoundTables) -> bool {
        let Some(partition) = self.state.partitions.get(&id) else { return false };
        partition.meta.comparator == BYTEWISE_NAME
            && seqno <= partition.flushed_seqno
            && !range.is_empty(&KeyOrder::bytewise())
            && !hides(partition, tables, range, seqno)
    }

    /// Adds the flushed range deletes of the WAL to those of the readable edits.
    fn add_range_tombstones(&mut self, wal: WalFacts) -> Result<()> {
        let order = KeyOrder::bytewise();
        for (id, found) in wal.range_tombstones {
            let Some(partition) = self.state.partitions.get(&id) else { continue };
            let known = partition.range_tombstones.values().cloned().collect();
            let known = RangeTombstones::from_fragments(known, &order)?;
            let (removed, added) = known.difference(&known.merged_with(&found, &[SeqNo::MAX], &order), &order);
            self.state.apply(&PartitionEdit::RangeTombstones { removed, added }.of(id))?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<RebuiltManifest> {
        // The new database may lack changes of the damaged one, so positions of its changes are not valid.
        self.state.instance = random_instance();
        self.state.raise_next_numbers(1, 1, 1);
        // The WAL, pools and tables of lost edits may have records that expire.
        self.state.partitions.values_mut().for_each(|partition| partition.uses_expiry = true);
        let edits = self.state.edits();
        ManifestState::replay(&edits)?;
        let bytes = encode_manifest(self.state.instance, &edits)?;
        Ok(RebuiltManifest { bytes, left_out: self.left_out, notes: self.notes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stored sequence number may be the highest one.
    #[test]
    fn next_seqno_ends_at_the_highest_one() {
        assert_eq!((next_seqno(SeqNo(4)), next_seqno(SeqNo::MAX)), (SeqNo(5), SeqNo::MAX));
        let commit = WalCommit { first_seqno: SeqNo::MAX, seqno_count: u32::MAX, payload: &[] };
        assert!(last_seqno(&commit) > SeqNo::MAX, "no overflow");
    }
}
