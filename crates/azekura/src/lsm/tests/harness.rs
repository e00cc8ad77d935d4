//! A tree, a host that checks the rules of an engine, and a model of the visible values at every sequence number.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::compression::CompressionType;
use crate::base::version_edit::{
    BlobFileMeta, FileNumber, PartitionEdit, PartitionId, TableBlobUsage, TableMeta, VersionEdit,
};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::block::BlockCache;
use crate::engine::{
    Engine, EngineHost, KeyBounds, LastVisibleSeqno, ReadSeqno, SnapshotList, Staged, Task, TaskReport,
};
use crate::iter::visible::{Backward, Direction, Forward, VisibleIter};
use crate::lsm::options::LsmOptions;
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::{TreeContext, TreeResources};
use crate::lsm::version::HasTableMeta;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::testing::fault_fs::FaultFs;
use crate::testing::seeded_rng::SeededRng;
use crate::testing::{MemFs, Survival};
use crate::vfs::open_files::{DataFileKind, DataFiles, FileAccess, parse_data_file_name};
use crate::vfs::{Env, Fs};

pub(crate) const PARTITION: PartitionId = PartitionId(3);
const SEED: u64 = 77;
/// The bounds of all keys.
pub(crate) const ALL: KeyBounds<'static> = (Bound::Unbounded, Bound::Unbounded);

fn partition_edits(edits: &[VersionEdit]) -> impl Iterator<Item = &PartitionEdit> {
    edits.iter().filter_map(|edit| match edit {
        VersionEdit::Partition { id: PARTITION, edit } => Some(edit),
        VersionEdit::NextNumbers { .. } => None,
        other => panic!("a tree does not write {other:?}"),
    })
}

/// The tables with their levels, the blob files, and the flushed sequence number after a list of edits.
pub(crate) fn replay(edits: &[VersionEdit]) -> (Vec<(u8, TableMeta)>, Vec<BlobFileMeta>, SeqNo) {
    let (mut tables, mut flushed): (BTreeMap<FileNumber, (u8, TableMeta)>, _) = (BTreeMap::new(), SeqNo::ZERO);
    let mut blobs: BTreeMap<FileNumber, BlobFileMeta> = BTreeMap::new();
    for edit in partition_edits(edits) {
        match edit.clone() {
            PartitionEdit::TableAdded { level, table } => {
                assert!(tables.insert(table.number, (level, table)).is_none(), "a table is added once");
            }
            PartitionEdit::TableRemoved { table } => {
                assert!(tables.remove(&table).is_some(), "only existing files are removed")
            }
            PartitionEdit::TableMoved { table, level } => {
                tables.get_mut(&table).expect("only existing tables are moved").0 = level
            }
            PartitionEdit::Flushed { through } => {
                assert!(through >= flushed);
                flushed = through;
            }
            PartitionEdit::BlobFileAdded { file } => {
                assert!(blobs.insert(file.number, file).is_none(), "a blob file is added once");
            }
            PartitionEdit::BlobFileRemoved { file } => {
                assert!(blobs.remove(&file).is_some(), "only existing files are removed");
            }
            other => panic!("a tree does not write {other:?}"),
        }
    }
    (tables.into_values().collect(), blobs.into_values().collect(), flushed)
}

/// All files that a list of edits names.
fn named_files(edits: &[VersionEdit]) -> HashMap<(DataFileKind, FileNumber), u64> {
    let (tables, blobs, _) = replay(edits);
    let tables = tables.iter().map(|(_, table)| ((DataFileKind::Table, table.number), table.size));
    tables.chain(blobs.iter().map(|file| ((DataFileKind::Blob, file.number), file.size))).collect()
}

/// Checks that tables point to values of existing blob files, and that every blob file is referenced unless `counts`.
fn check_references(edits: &[VersionEdit], counts: bool) {
    let (tables, blobs, _) = replay(edits);
    let mut uses: BTreeMap<FileNumber, (u64, u64)> = BTreeMap::new();
    for blob in tables.iter().flat_map(|(_, table)| &table.blob_usage) {
        let sum = uses.entry(blob.logical_file).or_default();
        *sum = (sum.0 + blob.count, sum.1 + blob.bytes);
    }
    for file in &blobs {
        let used = file.sections.iter().filter(|section| {
            let (count, bytes) = uses.remove(&section.logical_file).unwrap_or_default();
            assert!(count <= section.values && bytes <= section.bytes);
            count > 0
        });
        assert!(used.count() > 0 || counts, "a blob file without references is removed");
    }
    assert!(uses.is_empty(), "tables point to {uses:?}, which are missing");
}

/// Records edits, and checks with each of them that the tree followed the rules.
pub(crate) struct CheckingHost {
    fs: MemFs,
    pub(crate) edits: Mutex<Vec<VersionEdit>>,
    /// Number of compactions that rewrote tables.
    compactions: AtomicU64,
    pub(crate) snapshots: Mutex<Vec<u64>>,
    pub(crate) visible: LastVisibleSeqno,
    durable: AtomicU64,
    pub(crate) yields: AtomicBool,
    pub(crate) refuse_edits: AtomicBool,
    /// Blob files may be without references while memtables may point into them.
    pub(crate) allow_unreferenced_blobs: AtomicBool,
}

pub(crate) fn tables_in(fs: &dyn Fs) -> HashMap<FileNumber, u64> {
    let entries = fs.read_dir(Path::new("/db")).unwrap().into_iter();
    entries.filter_map(|e| Some((FileNumber(e.name.strip_suffix(".sst")?.parse().ok()?), e.len))).collect()
}

/// Tables and blob files.
pub(crate) fn files_in(fs: &dyn Fs) -> HashMap<(DataFileKind, FileNumber), u64> {
    let entries = fs.read_dir(Path::new("/db")).unwrap().into_iter();
    entries.filter_map(|e| Some((parse_data_file_name(&e.name)?, e.len))).collect()
}

impl CheckingHost {
    pub(crate) fn compactions(&self) -> u64 {
        self.compactions.load(Ordering::SeqCst)
    }

    pub(crate) fn flushes(&self) -> usize {
        partition_edits(&self.edits.lock().unwrap())
            .filter(|edit| matches!(edit, PartitionEdit::Flushed { .. }))
            .count()
    }

    pub(crate) fn trivial_moves(&self) -> usize {
        partition_edits(&self.edits.lock().unwrap())
            .filter(|edit| matches!(edit, PartitionEdit::TableMoved { .. }))
            .count()
    }
}

impl EngineHost for CheckingHost {
    fn wal_end(&self) -> SeqNo {
        SeqNo::MAX
    }

    fn sync_wal_through(&self, through: SeqNo) -> Result<()> {
        self.durable.fetch_max(through.0, Ordering::SeqCst);
        Ok(())
    }

    fn commit_edits(&self, new: &[VersionEdit]) -> Result<()> {
        if self.refuse_edits.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::OutOfSpace, "no space for edits"));
        }
        let mut edits = self.edits.lock().unwrap();
        let present = files_in(&self.fs);
        for (file, size) in named_files(&edits) {
            assert_eq!(present.get(&file), Some(&size), "a named file was removed too early");
        }
        let after_power_loss = self.fs.fork();
        after_power_loss.crash(Survival::Nothing, 1);
        let durable = files_in(&after_power_loss);
        for edit in partition_edits(new) {
            match edit {
                PartitionEdit::TableAdded { table, .. } => {
                    let file = (DataFileKind::Table, table.number);
                    assert_eq!(durable.get(&file), Some(&table.size), "an edit names a table that is not durable");
                }
                PartitionEdit::BlobFileAdded { file: meta } => {
                    let file = (DataFileKind::Blob, meta.number);
                    assert_eq!(durable.get(&file), Some(&meta.size), "an edit names a blob file that is not durable");
                }
                PartitionEdit::Flushed { through } => {
                    assert!(through.0 <= self.durable.load(Ordering::SeqCst), "the WAL is synced first")
                }
                _ => {}
            }
        }
        if partition_edits(new).any(|edit| matches!(edit, PartitionEdit::TableRemoved { .. })) {
            self.compactions.fetch_add(1, Ordering::SeqCst);
        }
        edits.extend_from_slice(new);
        check_references(&edits, self.allow_unreferenced_blobs.load(Ordering::SeqCst));
        Ok(())
    }

    fn snapshot_seqnos(&self) -> Vec<SeqNo> {
        let mut snapshots = self.snapshots.lock().unwrap().clone();
        snapshots.push(self.visible.get().0);
        snapshots.sort_unstable();
        snapshots.into_iter().map(SeqNo).collect()
    }

    fn now_ms(&self) -> u64 {
        1_000
    }

    fn should_yield(&self) -> bool {
        self.yields.load(Ordering::SeqCst)
    }
}

type WrittenRecords = Vec<(u64, RecordKind, Vec<u8>, Vec<u8>)>;
/// The values of a key by sequence number, oldest first.
type ValueHistory = Vec<(u64, Option<Vec<u8>>)>;

pub(crate) struct LsmFixture {
    pub(crate) fs: MemFs,
    pub(crate) faults: FaultFs,
    pub(crate) order: KeyOrder,
    pub(crate) options: LsmOptions,
    next_file_id: Arc<AtomicU64>,
    env: Arc<dyn Env>,
    pub(crate) host: CheckingHost,
    pub(crate) tree: LsmTree,
    log: WrittenRecords,
    versions: Vec<(Vec<u8>, ValueHistory)>,
    random: SeededRng,
}

pub(crate) fn small_options() -> LsmOptions {
    let mut options = LsmOptions::default();
    options.table.block_size = 256;
    options.table.metadata_block_size = 256;
    options.compaction.target_file_size = 2 << 10;
    options.compaction.base_level_size = 10 << 10;
    options.compaction.level_size_multiplier = 3;
    options.compaction.l0_compaction_trigger = 3;
    options
}

fn context(
    fs: &FaultFs,
    order: &KeyOrder,
    next: &Arc<AtomicU64>,
    env: &Arc<dyn Env>,
    visible: &LastVisibleSeqno,
) -> TreeContext {
    let fs: Arc<dyn Fs> = Arc::new(fs.clone());
    let dir = PathBuf::from("/db");
    let files = Arc::new(DataFiles::tables(Arc::clone(&fs), &dir, 4, FileAccess::buffered()));
    let cache = Arc::new(BlockCache::new(1 << 20));
    let resources = TreeResources {
        obsolete_files: Arc::new(ObsoleteFiles::new(Arc::clone(&files), Arc::clone(&cache), Arc::default())),
        files,
        cache,
        fs,
        dir,
        env: Arc::clone(env),
        next_file_id: Arc::clone(next),
        unsynced_blobs: Arc::default(),
        last_visible: visible.clone(),
        snapshots: SnapshotList::new(LastVisibleSeqno::default()),
        memtable_memory: Arc::default(),
        hash_seed: SEED,
        work_available: Arc::default(),
        read_only: false,
        default_codec: CompressionType::None,
        wal_bytes: 0,
    };
    TreeContext::new(&Arc::new(resources), order.clone(), PARTITION, "things")
}

impl LsmFixture {
    pub(crate) fn new(order: KeyOrder, options: LsmOptions, seed: u64) -> LsmFixture {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        fs.sync_dir(Path::new("/")).unwrap();
        let faults = FaultFs::new(Arc::new(fs.clone()));
        let next_file_id = Arc::new(AtomicU64::new(1));
        let env: Arc<dyn Env> = Arc::new(crate::testing::TestEnv::new(seed));
        let visible = LastVisibleSeqno::default();
        let host = CheckingHost {
            fs: fs.clone(),
            edits: Mutex::default(),
            compactions: AtomicU64::new(0),
            snapshots: Mutex::default(),
            visible: visible.clone(),
            durable: AtomicU64::new(0),
            yields: AtomicBool::new(false),
            refuse_edits: AtomicBool::new(false),
            allow_unreferenced_blobs: AtomicBool::new(false),
        };
        let context = context(&faults, &order, &next_file_id, &env, &visible);
        let tree = LsmTree::restore(context, options.clone(), Vec::new(), Vec::new(), Vec::new(), SeqNo::ZERO).unwrap();
        let (log, versions, random) = (Vec::new(), Vec::new(), SeededRng::new(seed));
        LsmFixture { fs, faults, order, options, next_file_id, env, host, tree, log, versions, random }
    }

    pub(crate) fn random(&mut self, below: u64) -> u64 {
        self.random.below(below)
    }

    pub(crate) fn visible(&self) -> u64 {
        self.host.visible.get().0
    }

    /// Writes one record and publishes it.
    pub(crate) fn write(&mut self, kind: RecordKind, key: &[u8], value: &[u8]) {
        self.write_unpublished(kind, key, value);
        self.host.visible.publish(SeqNo(self.log.len() as u64));
    }

    pub(crate) fn write_unpublished(&mut self, kind: RecordKind, key: &[u8], value: &[u8]) {
        self.apply_record(kind, key, value, (kind == RecordKind::Put).then(|| value.to_vec()));
    }

    /// Writes a value to a direct blob file, and a record that points to it.
    pub(crate) fn put_direct(&mut self, key: &str, value: &str) {
        let staged = Staged::Blob(self.tree.write_blob_directly(value.as_bytes()).unwrap());
        self.tree.begin_commit(staged).unwrap();
        let mut pointer = Vec::new();
        staged.blob().unwrap().encode(&mut pointer);
        self.apply_record(RecordKind::BlobPointer, key.as_bytes(), &pointer, Some(value.as_bytes().to_vec()));
        self.tree.end_commit(staged, true);
        self.host.visible.publish(SeqNo(self.log.len() as u64));
    }

    fn apply_record(&mut self, kind: RecordKind, key: &[u8], value: &[u8], shown: Option<Vec<u8>>) {
        let seqno = self.log.len() as u64 + 1;
        self.log.push((seqno, kind, key.to_vec(), value.to_vec()));
        self.tree.apply(EntryRef { user_key: key, seqno: SeqNo(seqno), kind, value }, Staged::Nothing).unwrap();
        let order = &self.order;
        match self.versions.iter_mut().find(|(other, _)| order.cmp(other, key).is_eq()) {
            Some((_, versions)) => versions.push((seqno, shown)),
            None => self.versions.push((key.to_vec(), vec![(seqno, shown)])),
        }
    }

    pub(crate) fn put(&mut self, key: &str, value: &str) {
        self.write(RecordKind::Put, key.as_bytes(), value.as_bytes());
    }

    pub(crate) fn delete(&mut self, key: &str) {
        self.write(RecordKind::Delete, key.as_bytes(), b"");
    }

    fn shown(&self, versions: &[(u64, Option<Vec<u8>>)], at: u64) -> Option<Vec<u8>> {
        versions.iter().rev().find(|(seqno, _)| *seqno <= at).and_then(|(_, value)| value.clone())
    }

    /// How often a key was put since its last removal.
    pub(crate) fn puts_since_removal(&self, key: &[u8]) -> usize {
        let found = self.versions.iter().find(|(other, _)| self.order.cmp(other, key).is_eq());
        found.map_or(0, |(_, versions)| versions.iter().rev().take_while(|(_, value)| value.is_some()).count())
    }

    /// Checks gets and iterators, in both directions, at every registered snapshot.
    pub(crate) fn check_reads(&self) {
        let mut snapshots = self.host.snapshots.lock().unwrap().clone();
        snapshots.push(self.visible());
        for &at in &snapshots {
            let mut expected: Vec<(&[u8], Vec<u8>)> = Vec::new();
            for (key, versions) in &self.versions {
                let shown = self.shown(versions, at);
                let got = self.tree.get(key, ReadSeqno::At(SeqNo(at).into())).unwrap();
                assert_eq!(got.as_ref().map(|v| v.to_vec()), shown, "{} at {at}", key.escape_ascii());
                let size = self.tree.size_of(key, ReadSeqno::At(SeqNo(at).into())).unwrap();
                assert_eq!(size, shown.as_ref().map(|value| value.len() as u32));
                expected.extend(shown.map(|value| (key.as_slice(), value)));
            }
            expected.sort_by(|a, b| self.order.cmp(a.0, b.0));
            self.check_scans(at, &expected);
        }
        assert_eq!(self.tree.get(b"no such key", ReadSeqno::Latest).unwrap(), None);
    }

    /// The keys and values at a sequence number, in the direction `D`.
    fn scan<D: Direction>(&self, at: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
        let (view, at) = (self.tree.view(), SeqNo(at));
        let (mut values, mut pairs) = (view.blob_resolver(), Vec::new());
        let iter = view.iter(at.into(), ALL).unwrap();
        let mut iter = VisibleIter::<_, D>::new(iter, self.order.clone(), at, Bound::Unbounded)
            .with_dead_ranges(view.dead_ranges());
        D::seek(&mut iter, Bound::Unbounded).unwrap();
        while iter.valid() {
            let (key, kind, value) = iter.entry();
            let value = match kind {
                RecordKind::BlobPointer => values.resolve(value).unwrap().to_vec(),
                _ => value.to_vec(),
            };
            pairs.push((key.to_vec(), value));
            D::step(&mut iter).unwrap();
        }
        pairs
    }

    fn check_scans(&self, at: u64, expected: &[(&[u8], Vec<u8>)]) {
        let (up, mut down) = (self.scan::<Forward>(at), self.scan::<Backward>(at));
        down.reverse();
        let same = |a: &(Vec<u8>, Vec<u8>), b: &(&[u8], Vec<u8>)| self.order.cmp(&a.0, b.0).is_eq() && a.1 == b.1;
        for iter in [up, down] {
            assert_eq!(iter.len(), expected.len(), "at {at}");
            assert!(iter.iter().zip(expected).all(|(a, b)| same(a, b)), "at {at}");
        }
    }

    pub(crate) fn run(&self, task: Task, forced: bool) -> Result<TaskReport> {
        let result = self.tree.run(task, forced, &self.host);
        self.tree.context.obsolete_files.remove_all();
        result
    }

    pub(crate) fn flush(&self) {
        self.tree.seal();
        self.run(Task::Flush, false).unwrap();
    }

    /// Runs tasks until there are none.
    pub(crate) fn run_all_tasks(&self, forced: bool) {
        for _ in 0..10_000 {
            let Some(task) = self.tree.next_task(forced, &[]) else { return };
            self.run(task, forced).unwrap();
        }
        panic!("the tasks do not end");
    }

    pub(crate) fn major_compact(&self) {
        self.tree.seal();
        self.run_all_tasks(true);
    }

    /// The tables of the tree by level. Checks that the edits contain the same ones.
    pub(crate) fn tables(&self) -> Vec<(u8, TableMeta)> {
        let version = self.tree.version();
        let mut tables: Vec<_> = version.tables().map(|(level, table)| (level, table.meta().clone())).collect();
        tables.sort_by_key(|(_, table)| table.number);
        let (named, blobs, flushed) = replay(&self.host.edits.lock().unwrap());
        assert_eq!(tables, named);
        let blobs_of_version: Vec<BlobFileMeta> =
            version.blobs().handles().map(|handle| handle.meta().clone()).collect();
        assert_eq!(blobs_of_version, blobs);
        for file in version.blobs().stats() {
            let here = |uses: &&TableBlobUsage| {
                version.blobs().handle(uses.logical_file).is_some_and(|h| h.meta().number.0 == file.id)
            };
            let uses: Vec<&TableBlobUsage> =
                tables.iter().flat_map(|(_, table)| &table.blob_usage).filter(here).collect();
            let sums = (uses.iter().map(|uses| uses.count).sum(), uses.iter().map(|uses| uses.bytes).sum());
            assert_eq!((file.referenced_values, file.referenced_bytes), sums, "the sums are up to date");
        }
        assert_eq!(self.tree.flushed_through(), flushed);
        tables
    }

    /// Waits for files that epoch pins of other threads keep a little longer, then checks that only named files exist.
    pub(crate) fn check_files(&self) {
        self.tables();
        drop(self.tree.take_paused()); // no edit names its outputs yet
        let named = named_files(&self.host.edits.lock().unwrap());
        for _ in 0..2_000_000 {
            if files_in(&self.fs) == named {
                return;
            }
            self.tree.flushed_through(); // releasing an epoch pin frees files
            self.tree.context.obsolete_files.remove_all();
            std::thread::yield_now();
        }
        panic!("the directory has {:?}, the edits name {named:?}", files_in(&self.fs));
    }

    /// Drops paused tasks, as closing does.
    pub(crate) fn close(&self) {
        drop(self.tree.take_paused());
        self.tree.abandon_direct_blob_files();
        self.tree.context.obsolete_files.close();
    }

    /// Closes the tree and restores it from its edits and its records.
    pub(crate) fn reopen(&mut self) {
        self.close();
        let (tables, blobs, flushed) = replay(&self.host.edits.lock().unwrap());
        let named = named_files(&self.host.edits.lock().unwrap());
        for (kind, id) in files_in(&self.fs).into_keys().filter(|file| !named.contains_key(file)) {
            let files = &self.tree.context.files;
            let path = if kind == DataFileKind::Table { files.path(id) } else { files.blob_files().path(id) };
            self.fs.remove_file(&path).unwrap(); // an epoch pin of another test kept it until now
        }
        let context = context(&self.faults, &self.order, &self.next_file_id, &self.env, &self.host.visible);
        self.tree = LsmTree::restore(context, self.options.clone(), tables, blobs, Vec::new(), flushed).unwrap();
        for (seqno, kind, user, value) in self.log.iter().filter(|record| record.0 > flushed.0) {
            self.tree
                .apply(EntryRef { user_key: user, seqno: SeqNo(*seqno), kind: *kind, value }, Staged::Nothing)
                .unwrap();
        }
    }
}
