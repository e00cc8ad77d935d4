//! Opening: from the bytes in a directory to a running database.
//!
//! The steps:
//! 1. make the path absolute, look at the directory without changing it, take the lock;
//! 2. no manifest and nothing else: create the database, atomically, by renaming its first manifest into place;
//! 3. read the manifest into a ledger, check that every table it names is there and whole, read the pools;
//! 4. read the log: every commit that is not in tables goes into memtables, or into pools; the whole log is validated
//!    before anything is written, so that a failed open changes nothing (but pools that are memory: what the log has
//!    for them they get at once, and it is synced first);
//! 5. sync what was replayed (it may be in the page cache only), or write it into new segments if damage was passed
//!    over, make blob files of what it points to in files that were never finished, write the manifest anew with the
//!    end of the log, begin a fresh segment, remove files that nothing names, start the workers.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::base::edit::{Edit, EngineKind, Epoch, FileId, PartitionId};
use crate::base::event::Event;
use crate::base::ledger::{Ledger, PartitionLedger};
use crate::base::sync::Bell;
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::block::cache::BlockCache;
use crate::db::catalog::{Catalog, PartitionState, TreeParts};
use crate::db::commit::Committer;
use crate::db::config::{Config, PlantedBug};
use crate::db::handle::Handle;
use crate::db::shared::{Parts, Recovered, Shared, Writer};
use crate::db::spill;
use crate::db::state::metadata::Metadata;
use crate::db::state::poison::Poison;
use crate::db::state::reserve::Reserve;
use crate::db::worker;
use crate::engine::{ReadPoints, Visible};
use crate::lsm::blobs::left::LeftEarly;
use crate::manifest::{Manifest, NAME, TEMPORARY};
use crate::pmem::store;
use crate::table::graveyard::Graveyard;
use crate::vfs::files::{DataFiles, DataKind, DirectPolicy, parse_name};
use crate::vfs::fs::{LOCK, RESERVE, create_dirs, sync_names_above};
use crate::vfs::limited::{LimitedFs, max_cached};
use crate::vfs::{Env, FileLock, Fs, LockMode, OpenMode};
use crate::wal::format::{HEADER_LEN, parse_name as parse_segment_name, segment_path};
use crate::wal::log::EPOCHS_SKIPPED_MAX;
use crate::wal::payload::{GAP, Records, check_payload, pointers};
use crate::wal::segment::PAGE;
use crate::wal::{self, LogCommit, Mark, RecoveryMode, ReplayOptions, ReplayReport, Wal, WalOptions};

/// What a look at the directory shows.
#[derive(Default)]
struct Listing {
    has_manifest: bool,
    /// Tables and blob files by kind and number, log segments by number, with their lengths.
    data: HashMap<(DataKind, FileId), u64>,
    segments: HashMap<FileId, u64>,
    pools: Vec<(PartitionId, PathBuf)>,
    /// A name that no database has.
    foreign: Option<String>,
}

fn list(fs: &dyn Fs, dir: &Path) -> Result<Listing> {
    let mut listing = Listing::default();
    if !fs.exists(dir)? {
        return Ok(listing);
    }
    for entry in fs.read_dir(dir)? {
        if let Some((kind, id)) = parse_name(&entry.name) {
            listing.data.insert((kind, id), entry.len);
        } else if let Some(id) = parse_segment_name(&entry.name) {
            listing.segments.insert(id, entry.len);
        } else if let Some((partition, _)) = store::parse_name(&entry.name) {
            listing.pools.push((partition, dir.join(&entry.name)));
        } else if entry.name == NAME {
            listing.has_manifest = true;
        } else if ![LOCK, RESERVE, TEMPORARY].contains(&entry.name.as_str()) {
            listing.foreign.get_or_insert(entry.name);
        }
    }
    Ok(listing)
}

impl Listing {
    /// Forgets files whose numbers the database cannot have given.
    fn leave_alone(&mut self, ledger: &Ledger) {
        self.data.retain(|(_, id), _| id.0 < ledger.files_end());
        self.segments.retain(|id, _| id.0 < ledger.files_end());
        self.pools.retain(|(id, _)| id.0 < ledger.partitions_end());
    }
}

/// Fails for a directory that holds something else, or a database without its manifest.
fn check_listing(dir: &Path, listing: &Listing) -> Result<()> {
    if listing.has_manifest {
        return Ok(());
    }
    if !listing.data.is_empty() || !listing.segments.is_empty() || !listing.pools.is_empty() {
        let message = "the manifest is missing, but data files or log segments are here: restore it from a copy";
        return Err(Error::corruption(message).in_file(dir.join(NAME)));
    }
    match &listing.foreign {
        Some(name) => {
            let message = format!("the directory is no azekura database: it holds {name:?}; choose an empty one");
            Err(Error::invalid(message).in_file(dir))
        }
        None => Ok(()),
    }
}

/// Bytes of log that spilled tables stand for.
fn spilled_bytes(ledger: &Ledger) -> u64 {
    let tables = ledger.partitions.values().flat_map(|partition| partition.spilled.values());
    tables.map(spill::log_bytes).fold(0, u64::saturating_add)
}

/// Opens for reading and writing.
pub(crate) fn open(mut config: Config) -> Result<Arc<Handle>> {
    config.check()?;
    config.path = config.fs.absolute(&config.path)?;
    let limited = LimitedFs::wrap(&mut config.fs);
    let start = config.env.monotonic_ns();
    let (fs, dir) = (Arc::clone(&config.fs), config.path.clone());
    check_listing(&dir, &list(&*fs, &dir)?)?;
    let created = create_dirs(&*fs, &dir)?;
    let lock = fs.lock_dir(&dir, LockMode::Exclusive)?;
    let listing = list(&*fs, &dir)?;
    check_listing(&dir, &listing)?;
    if !listing.has_manifest {
        // Before the manifest: a directory without one is created anew, one that vanished with it is a loss.
        sync_names_above(&*fs, &dir, created)?;
        create(&*config.env, &fs, &dir)?;
    }
    let mut state = Loaded::read(&config, listing, &limited, false)?;
    state.sync_for_pools(&config)?;
    let report = state.replay(&config)?;
    state.finish(config, report, lock, start)
}

/// Opens for reading only, beside other readers: replays into memory and writes nothing.
pub(crate) fn open_read_only(mut config: Config) -> Result<Arc<Handle>> {
    config.check()?;
    config.path = config.fs.absolute(&config.path)?;
    let limited = LimitedFs::wrap(&mut config.fs);
    let start = config.env.monotonic_ns();
    let (fs, dir) = (Arc::clone(&config.fs), config.path.clone());
    let listing = list(&*fs, &dir)?;
    if !listing.has_manifest {
        check_listing(&dir, &listing)?;
        return Err(Error::invalid("there is no database here").in_file(dir));
    }
    let lock = fs.lock_dir(&dir, LockMode::Shared)?;
    let mut state = Loaded::read(&config, list(&*fs, &dir)?, &limited, true)?;
    let report = state.replay(&config)?;
    state.finish_read_only(config, &report, lock, start)
}

/// Writes the first manifest; until it has its name there is no database.
fn create(env: &dyn Env, fs: &Arc<dyn Fs>, dir: &Path) -> Result<()> {
    let (mut id, mut instance, mut file_id, mut seed) = ([0; 16], [0; 16], [0; 16], [0; 8]);
    for bytes in [&mut id, &mut instance, &mut file_id] {
        env.random(bytes);
    }
    env.random(&mut seed);
    let edits = [
        Edit::Database { id, instance, hash_seed: u64::from_le_bytes(seed), created_ms: env.now_ms() },
        Edit::NextIds { file: FileId(1), partition: PartitionId(1), epoch: Epoch(1) },
    ];
    Manifest::create(Arc::clone(fs), dir, file_id, &edits).map(drop)
}

/// A database whose bytes were read, and nothing written yet.
struct Loaded {
    ledger: Ledger,
    listing: Listing,
    catalog: Catalog,
    parts: TreeParts,
    by_id: HashMap<PartitionId, Arc<PartitionState>>,
    /// Blob files without an owner that the log points into.
    left: LeftEarly,
    /// Whether damage is skipped.
    salvages: bool,
    /// The first numbers of commits that were skipped because they point to values that are lost, or name partitions
    /// that are not known.
    skipped: HashSet<SeqNo>,
    records: u64,
    /// Of the manifest as it was read.
    manifest_bytes: u64,
}

impl Loaded {
    fn read(config: &Config, listing: Listing, limited: &LimitedFs, read_only: bool) -> Result<Loaded> {
        let (fs, dir) = (&config.fs, &config.path);
        let loaded = Manifest::load(Arc::clone(fs), dir)?;
        let mut ledger = Ledger::replay(&loaded.edits).map_err(|e| e.in_file(dir.join(NAME)))?;
        let mut listing = listing;
        listing.leave_alone(&ledger);
        let mut next_file = ledger.next_file;
        for id in listing.data.keys().map(|(_, id)| id).chain(listing.segments.keys()) {
            next_file = next_file.max(id.0 + 1); // a file may be here that no edit names yet
        }
        let direct = DirectPolicy::new(config.settings.direct_io, || config.env.memory());
        let max_open = max_cached(config.settings.max_open_files, config.env.files_left());
        let files = Arc::new(DataFiles::tables(Arc::clone(fs), dir, max_open, direct));
        limited.close_when_exhausted(&files);
        let cache = Arc::new(BlockCache::new(config.settings.cache_size));
        let work = Arc::new(Bell::default());
        let visible = Visible::default();
        let parts = TreeParts {
            points: ReadPoints::new(visible.clone()),
            visible,
            read_only,
            fs: Arc::clone(fs),
            env: Arc::clone(&config.env),
            dir: dir.clone(),
            graveyard: Arc::new(Graveyard::new(Arc::clone(&files), Arc::clone(&cache), Arc::clone(&work))),
            files,
            cache,
            work,
            hash_seed: ledger.hash_seed,
            next_file: Arc::new(AtomicU64::new(next_file)),
            codec: config.settings.compression,
            unsynced: Arc::default(),
            log_bytes: listing.segments.values().sum::<u64>().saturating_add(spilled_bytes(&ledger)),
            memory: Arc::default(),
        };
        let catalog = Catalog::new(parts.clone());
        let mut by_id = HashMap::new();
        for (id, stored) in &mut ledger.partitions {
            let partition = catalog.restore(stored.clone(), &listing.data)?;
            partition.forget_applied(stored);
            by_id.insert(*id, partition);
        }
        let salvages = config.settings.recovery_mode == RecoveryMode::Salvage;
        let left = LeftEarly::new(&ledger, &parts.files, &parts.cache);
        let (skipped, manifest_bytes) = (HashSet::new(), loaded.bytes);
        Ok(Loaded { ledger, listing, catalog, parts, by_id, left, salvages, skipped, manifest_bytes, records: 0 })
    }

    /// Makes durable what is about to be replayed, where some of it is durable as soon as it is: a pool may not have
    /// the half of a commit.
    fn sync_for_pools(&self, config: &Config) -> Result<()> {
        if !self.by_id.values().any(|partition| partition.survives_power_loss()) {
            return Ok(());
        }
        let (fs, dir) = (&config.fs, &config.path);
        let segments = self.listing.segments.keys().map(|id| segment_path(dir, *id));
        std::iter::once(dir.join(NAME))
            .chain(segments)
            .try_for_each(|path| fs.open(&path, OpenMode::Write)?.sync_data())
    }

    /// Reads the log into the trees. Writes nothing to disk, but to pools that are memory.
    fn replay(&mut self, config: &Config) -> Result<ReplayReport> {
        let options = self.replay_options(config);
        let manifest = config.path.join(NAME);
        let (fs, id) = (Arc::clone(&config.fs), self.ledger.id);
        let mut report =
            wal::replay(fs, &config.path, id, options, &mut |commit| self.replay_commit(&commit, &manifest))?;
        report.has_holes |= !self.skipped.is_empty();
        self.by_id.values().try_for_each(|partition| partition.end_replay())?;
        self.parts.next_file.fetch_max(self.left.next_file(), Ordering::Relaxed);
        Ok(report)
    }

    /// What the manifest and the files of the partitions say of the log.
    fn replay_options(&self, config: &Config) -> ReplayOptions {
        let memory = |p: &PartitionLedger| p.meta.engine == EngineKind::PmemMemory as u8;
        let pools_skip_log = self.ledger.partitions.values().any(memory);
        let (mut held, mut from) = (Mark::default(), SeqNo::MAX);
        let mut durable = Mark { seqno: self.ledger.all_flushed, partition: String::new() };
        for (id, stored) in &self.ledger.partitions {
            let Some(partition) = self.by_id.get(id) else { continue };
            let (needs_nothing, proven) = partition.proves(stored, pools_skip_log);
            from = from.min(needs_nothing);
            for (mark, seqno) in [(&mut durable, proven), (&mut held, partition.held())] {
                if seqno > mark.seqno {
                    *mark = Mark { seqno, partition: format!("partition {:?}", stored.meta.name) };
                }
            }
        }
        ReplayOptions {
            mode: config.settings.recovery_mode,
            live: self.ledger.segments.iter().map(|(epoch, file)| (*epoch, *file)).collect(),
            log_end: self.ledger.log_end,
            from: from.max(self.ledger.all_flushed).min(durable.seqno),
            durable,
            held,
            files_end: self.ledger.files_end(),
        }
    }

    /// Puts one commit of the log back into the trees. It is checked whole before any of it is applied.
    ///
    /// Gives a reason where the log must end: a commit names a partition whose creation did not survive, or points to a
    /// value that did not, so neither was ever synced. Salvage leaves out such a commit and goes on behind it.
    fn replay_commit(&mut self, commit: &LogCommit<'_>, manifest: &Path) -> Result<Option<Error>> {
        check_payload(commit.payload, commit.count)?;
        if commit.payload == GAP {
            return Ok(None);
        }
        for record in Records::new(commit.payload) {
            if record?.partition.0 >= self.ledger.next_partition {
                if self.salvages {
                    // Its partition's number will be given again: the log is written anew without it.
                    self.skipped.insert(commit.first);
                    return Ok(None);
                }
                let message =
                    "a synced commit names a partition that the manifest does not know: the manifest has lost its end";
                return Ok(Some(Error::corruption(message).in_file(manifest)));
            }
        }
        if let Some(reason) = self.left.check(&pointers(commit)?)? {
            if !self.salvages {
                return Ok(Some(reason));
            }
            self.skipped.insert(commit.first);
            return Ok(None);
        }
        let mut seqno = commit.first;
        for record in Records::new(commit.payload) {
            let record = record?;
            if let Some(partition) = self.by_id.get(&record.partition) {
                let entry = EntryRef { user: record.key, seqno, kind: record.kind, value: record.value };
                self.records += u64::from(partition.replay(entry)?);
            }
            seqno = seqno.plus(1);
        }
        // Nobody reads yet; what this replaces need not be kept for readers from before it.
        self.parts.visible.publish(SeqNo(seqno.0 - 1));
        Ok(None)
    }

    /// The last sequence number that was used: pools use some that the log does not get.
    fn last_seqno(&self, report: &ReplayReport) -> SeqNo {
        let pools = self.by_id.values().map(|partition| partition.highest_in_pool()).max().unwrap_or_default();
        report.last.max(pools)
    }

    /// Makes durable what was replayed, in a log that every later replay can read to its end.
    fn settle_log(&self, config: &Config, report: ReplayReport, next_epoch: &Arc<AtomicU32>) -> Result<ReplayReport> {
        let (fs, dir) = (&config.fs, &config.path);
        // First: the new manifest says that all of the log is durable.
        for segment in &report.segments {
            fs.open(&segment_path(dir, segment.file), OpenMode::Write)?.sync_data()?;
        }
        if report.has_holes {
            let rewrite = wal::Rewrite {
                options: self.replay_options(config),
                wal: wal_options(config),
                next_epoch: Arc::clone(next_epoch),
                next_file: Arc::clone(&self.parts.next_file),
            };
            let was_applied = |first: SeqNo| !self.skipped.contains(&first);
            return wal::rewrite(fs, dir, &config.env, self.ledger.id, rewrite, report, &was_applied);
        }
        Ok(report)
    }

    /// As [`settle_log`](Self::settle_log), on a full disk with space that files have that are not needed.
    fn settle_log_when_full(
        &self,
        config: &Config,
        mut report: ReplayReport,
        reserve: &Reserve,
    ) -> Result<ReplayReport> {
        let next_epoch = Arc::new(AtomicU32::new(self.ledger.next_epoch));
        match self.settle_log(config, report.clone(), &next_epoch) {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => {
                match self.remove_unneeded_segments(config, &mut report) | reserve.release_all() {
                    true => self.settle_log(config, report, &next_epoch),
                    false => Err(error),
                }
            }
            settled => settled,
        }
    }

    /// Removes segments that no recovery needs; false if there were none. The other spare files stay until the new
    /// manifest is there: with a damaged manifest they may be part of the log.
    fn remove_unneeded_segments(&self, config: &Config, report: &mut ReplayReport) -> bool {
        let files = std::mem::take(&mut report.removable);
        let is_removed = |file: &FileId| config.fs.remove_file(&segment_path(&config.path, *file)).is_ok();
        let removed: Vec<FileId> = files.into_iter().filter(is_removed).collect();
        report.spares.retain(|file| !removed.contains(file));
        !removed.is_empty()
    }

    /// Gives the blob files without an owner to their partitions. Until the manifest says so, they still have none.
    fn take_over_blobs(&mut self, now_ms: u64) -> Result<()> {
        let context = Arc::new(self.parts.context(KeyOrder::bytewise(), PartitionId(0), ""));
        for (id, file) in self.left.take_over(&context, now_ms)? {
            if let (Some(ledger), Some(partition)) = (self.ledger.partitions.get_mut(&id), self.by_id.get(&id)) {
                ledger.blobs.insert(file.id, file.clone());
                partition.take_blob_file(file);
            }
        }
        Ok(())
    }

    fn finish_read_only(
        self,
        config: Config,
        report: &ReplayReport,
        lock: Box<dyn FileLock>,
        start: u64,
    ) -> Result<Arc<Handle>> {
        self.parts.visible.publish(self.last_seqno(report));
        let context = self.parts.context(KeyOrder::bytewise(), PartitionId(0), "");
        for (id, file) in self.left.show(&context) {
            if let Some(partition) = self.by_id.get(&id) {
                partition.show_early(file);
            }
        }
        let shared = self.into_shared(config, None, report, lock, start, None);
        shared.poison.heard(shared.poison.events().begin());
        Ok(Handle::new(Arc::new(shared), worker::Threads::default()))
    }

    fn finish(
        mut self,
        config: Config,
        report: ReplayReport,
        lock: Box<dyn FileLock>,
        start: u64,
    ) -> Result<Arc<Handle>> {
        let (fs, dir) = (&config.fs, &config.path);
        let last = self.last_seqno(&report);
        self.check_numbers(last, &report).map_err(|error| error.in_file(dir))?;
        let log_bytes = report.segments.iter().map(|segment| segment.end).sum();
        let reserve = Reserve::find(Arc::clone(fs), dir, config.settings.disk_reserve, log_bytes, self.manifest_bytes)?;
        let reserve = Arc::new(reserve);
        let damaged = report.has_holes || report.dropped_after_damage.is_some();
        let report = self.settle_log_when_full(&config, report, &reserve)?;
        let mut space = MakesSpace { config: &config, report: &report, reserve: &reserve, damaged, stage: 0 };
        while let Err(error) = self.take_over_blobs(config.env.now_ms()) {
            space.make(&self, error)?;
        }
        self.ledger.next_file = self.parts.next_file.load(Ordering::Relaxed);
        let (ended, end) = report.log_end();
        self.ledger.next_epoch = self.ledger.next_epoch.max(ended.0.saturating_add(1));
        self.ledger.segments = report.segments.iter().map(|segment| (segment.epoch, segment.file)).collect();
        self.ledger.log_end = Some((ended, end));
        self.note_pool_files();
        let mut file_id = [0; 16];
        config.env.random(&mut file_id);
        let edits = self.ledger.edits();
        let manifest = space.retry(&self, || Manifest::create(Arc::clone(fs), dir, file_id, &edits))?;
        let metadata = self.metadata(&config, manifest);
        let orphans = self.remove_orphans(&config, &report);
        let wal = Wal::start(
            Arc::clone(fs),
            dir,
            Arc::clone(&config.env),
            self.ledger.id,
            wal_options(&config),
            metadata.clone(),
            &report,
            end.plus(1),
        )?;
        space.retry(&self, || wal.begin_first())?;
        self.parts.visible.publish(last);
        let poison = Arc::new(Poison::new(config.listener.clone()));
        let wal = Arc::new(wal);
        let committer =
            Committer::new(Arc::clone(&wal), self.parts.visible.clone(), Arc::clone(&poison), Arc::clone(&reserve));
        let writer = Writer { metadata, wal, committer, reserve };
        let shared = Arc::new(self.into_shared(config, Some(writer), &report, lock, start, Some(poison)));
        shared.fill_reserve();
        shared.tell(&Event::Opened {
            replayed_records: shared.recovered.records,
            dropped_after_damage: shared.recovered.dropped.clone(),
            orphans_removed: orphans,
        });
        let threads = worker::start(&shared)?;
        shared.poison.heard(shared.poison.events().begin());
        shared.refresh_pressure();
        Ok(Handle::new(shared, threads))
    }

    /// Fails where numbers are used up, or are not those of this database.
    fn check_numbers(&self, last: SeqNo, report: &ReplayReport) -> Result<()> {
        if last >= SeqNo::MAX {
            return Err(Error::unsupported("the database has used up its sequence numbers: open it for reading only"));
        }
        let highest = report.log_end().0;
        if highest.0 > self.ledger.next_epoch.saturating_add(EPOCHS_SKIPPED_MAX) {
            let message = format!("a log segment has epoch {}, far beyond what the manifest knows", highest.0);
            return Err(Error::corruption(message));
        }
        Ok(())
    }

    /// Notes the file ids of pools, which older versions did not write to the manifest.
    fn note_pool_files(&mut self) {
        for (id, state) in &self.by_id {
            if let (Some(stored), Some(file_id)) = (self.ledger.partitions.get_mut(id), state.pool_file_id) {
                stored.pool_file_id = Some(file_id);
            }
        }
    }

    fn metadata(&self, config: &Config, manifest: Manifest) -> Arc<Metadata> {
        let unsynced = match config.settings.planted_bug {
            Some(PlantedBug::LogSyncBeforeValues) => Arc::default(),
            _ => Arc::clone(&self.parts.unsynced),
        };
        let (ledger, next_file) = (self.ledger.clone(), Arc::clone(&self.parts.next_file));
        Arc::new(Metadata::new(
            manifest,
            ledger,
            next_file,
            Arc::clone(&config.env),
            unsynced,
            Arc::clone(&self.parts.work),
        ))
    }

    /// Removes tables, blob files and segments that neither the ledger nor the log's pool names, and the pools of
    /// partitions that are not there. A failure is not
    /// fatal: they are found again by the next open.
    fn remove_orphans(&self, config: &Config, report: &ReplayReport) -> u64 {
        let kept: HashSet<FileId> =
            report.segments.iter().map(|s| s.file).chain(report.spares.iter().copied()).collect();
        let pools = self.listing.pools.iter().filter(|(id, _)| !self.ledger.partitions.contains_key(id));
        let segments = self.listing.segments.keys().filter(|id| !kept.contains(id));
        let paths = self
            .unnamed_data()
            .map(|(kind, id)| self.data_path(kind, id))
            .chain(segments.map(|id| segment_path(&config.path, *id)))
            .chain(pools.map(|(_, path)| path.clone()));
        paths.filter(|path| config.fs.remove_file(path).is_ok()).count() as u64
    }

    /// Tables and blob files that were there and the ledger does not name.
    fn unnamed_data(&self) -> impl Iterator<Item = (DataKind, FileId)> {
        let partitions = || self.ledger.partitions.values();
        let tables =
            partitions().flat_map(|p| p.tables.keys().chain(p.spilled.keys()).map(|id| (DataKind::Table, *id)));
        let blobs = partitions().flat_map(|p| p.blobs.keys().map(|id| (DataKind::Blob, *id)));
        let named: HashSet<(DataKind, FileId)> = tables.chain(blobs).collect();
        self.listing.data.keys().copied().filter(move |file| !named.contains(file))
    }

    fn data_path(&self, kind: DataKind, id: FileId) -> PathBuf {
        match kind {
            DataKind::Table => self.parts.files.path(id),
            DataKind::Blob => self.parts.files.blobs().path(id),
        }
    }

    fn into_shared(
        self,
        config: Config,
        writer: Option<Writer>,
        report: &ReplayReport,
        lock: Box<dyn FileLock>,
        start: u64,
        poison: Option<Arc<Poison>>,
    ) -> Shared {
        let ns = config.env.monotonic_ns() - start;
        Shared::new(Parts {
            fs: config.fs,
            env: config.env,
            dir: config.path,
            settings: config.settings,
            visible: self.parts.visible.clone(),
            catalog: self.catalog,
            writer,
            poison: poison.unwrap_or_else(|| Arc::new(Poison::new(config.listener))),
            recovered: Recovered {
                records: self.records,
                ns,
                dropped: report.dropped_after_damage.clone(),
                log_bytes: report.segments.iter().map(|segment| segment.end).sum(),
                log_segments: report.segments.len(),
                manifest_bytes: self.manifest_bytes,
            },
            lock: Some(lock),
        })
    }
}

/// Finds space for a database that is opened on a full disk.
struct MakesSpace<'a> {
    config: &'a Config,
    report: &'a ReplayReport,
    reserve: &'a Reserve,
    /// Damage was passed over: until the new manifest has its name, the old log is all that another open can use.
    damaged: bool,
    stage: u32,
}

impl MakesSpace<'_> {
    /// Runs what needs space, again and again while some can be made.
    fn retry<T>(&mut self, state: &Loaded, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match work() {
                Ok(done) => return Ok(done),
                Err(error) => self.make(state, error)?,
            }
        }
    }

    /// Makes space in ever costlier ways, so that what failed with `error` can be tried again.
    ///
    /// # Errors
    /// The same error where it says something else, or nothing is left to give.
    fn make(&mut self, state: &Loaded, error: Error) -> Result<()> {
        while error.kind() == ErrorKind::OutOfSpace && self.stage < 2 {
            self.stage += 1;
            let made = match self.stage {
                1 => {
                    state.parts.graveyard.remove_all(); // what the attempt has left
                    self.remove_unfinished(state)? | self.trim_segments()
                }
                _ => self.reserve.release_all(),
            };
            if made {
                return Ok(());
            }
        }
        Err(error)
    }

    /// Removes tables and blob files that flushes, compactions and blob GC have not finished; false if there were none.
    /// The new manifest is not there yet: the old one must be durable, and what the log points into stays.
    fn remove_unfinished(&self, state: &Loaded) -> Result<bool> {
        let (fs, dir) = (&self.config.fs, &self.config.path);
        fs.open(&dir.join(NAME), OpenMode::Write)?.sync_data()?;
        fs.sync_dir(dir)?;
        let unfinished = state.unnamed_data().filter(|(kind, id)| *kind == DataKind::Table || !state.left.has(*id));
        Ok(unfinished.filter(|(kind, id)| fs.remove_file(&state.data_path(*kind, *id)).is_ok()).count() > 0)
    }

    /// Cuts off the space behind the end of replayed segments, and most of spare ones; false if there was none, or if
    /// damage was passed over.
    fn trim_segments(&self) -> bool {
        if self.damaged {
            return false;
        }
        let ends = self.report.segments.iter().map(|segment| (segment.file, segment.end));
        let spares = self.report.spares.iter().map(|file| (*file, HEADER_LEN as u64));
        let trim = |(file, end): (FileId, u64)| {
            let file = self.config.fs.open(&segment_path(&self.config.path, file), OpenMode::Write)?;
            let (len, end) = (file.length()?, end.next_multiple_of(PAGE));
            if len > end { file.set_length(end).map(|()| true) } else { Ok(false) }
        };
        let trimmed: Vec<bool> = ends.chain(spares).map(|one| trim(one).unwrap_or(false)).collect();
        trimmed.contains(&true)
    }
}

fn wal_options(config: &Config) -> WalOptions {
    WalOptions { segment_size: config.settings.log_segment_size, mapped: config.settings.mapped_log, marks: true }
}

/// Whether an error says that a file is not there.
pub(crate) fn is_missing(error: &Error) -> bool {
    error.kind() == ErrorKind::Io && error.os_kind() == Some(io::ErrorKind::NotFound)
}
