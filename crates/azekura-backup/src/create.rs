//! Makes a backup: a checkpoint, the upload of what is not stored yet, and a manifest.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use azekura::fs::{DiskFs, Fs};
use azekura::{ChangePosition, Database, ErrorKind, PersistMode, inspect};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::{ObjectMeta, PutMode};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{BackupError, Result};
use crate::history::History;
use crate::holds::{HoldWriter, held_objects};
use crate::layout::{
    BackupManifest, Checksum, FILES, PARTS, StoredFile, StoredObject, StoredPartition, backup_object, content_of,
    file_object, hex, part_object, to_json,
};
use crate::progress::{Progress, Stage, StageProgress};
use crate::scratch::{Scratch, random};
use crate::store::{BackupStore, CHUNK};

/// Attempts to make a checkpoint while no partition is created or deleted.
const CHECKPOINT_ATTEMPTS: usize = 20;
/// Calls of `catch_up` until a follower has reached a position.
const CATCH_UP_ATTEMPTS: usize = 100;
/// Default of [`CreateOptions::durable_wait`].
const DURABLE_WAIT: Duration = Duration::from_secs(10);
const DURABLE_PAUSE: Duration = Duration::from_millis(10);

/// Options of [`BackupStore::create`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CreateOptions {
    scratch: Option<PathBuf>,
    durable_wait: Duration,
}

impl Default for CreateOptions {
    fn default() -> CreateOptions {
        CreateOptions { scratch: None, durable_wait: DURABLE_WAIT }
    }
}

impl CreateOptions {
    /// The existing directory in which the checkpoint is made for the time of the upload. Default: the one that the
    /// database is in, where a checkpoint consists of hard links.
    #[must_use]
    pub fn scratch(mut self, directory: impl Into<PathBuf>) -> CreateOptions {
        self.scratch = Some(directory.into());
        self
    }

    /// How long to wait, beside the writer of another process, until it has synced the commits of the backup.
    /// After that the backup is not [durable](BackupInfo::is_durable). Default: 10 seconds.
    #[must_use]
    pub fn durable_wait(mut self, longest: Duration) -> CreateOptions {
        self.durable_wait = longest;
        self
    }
}

/// A stored backup.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupInfo {
    /// Names the backup. Ids sort by time.
    pub id: String,
    /// When it was made, in milliseconds since 1970.
    pub time_ms: u64,
    /// The last sequence number in it.
    pub sequence: u64,
    /// Number of its files.
    pub files: usize,
    /// Bytes of its files; a restore downloads them.
    pub bytes: u64,
    /// The names of its partitions, sorted.
    pub partitions: Vec<String>,
    /// Whether every commit in it survived power loss of the database. Only then a shipped log continues it.
    pub is_durable: bool,
}

impl BackupInfo {
    pub(crate) fn of(manifest: &BackupManifest) -> BackupInfo {
        BackupInfo {
            id: manifest.id.clone(),
            time_ms: manifest.time_ms,
            sequence: manifest.sequence,
            files: manifest.files.len(),
            bytes: manifest.files.iter().map(|file| file.bytes).sum(),
            partitions: manifest.partitions.iter().map(|partition| partition.name.clone()).collect(),
            is_durable: manifest.is_durable,
        }
    }
}

/// What [`BackupStore::create`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CreateReport {
    /// The backup.
    pub backup: BackupInfo,
    /// Objects that were uploaded, without the manifest.
    pub uploaded_objects: usize,
    /// Their bytes.
    pub uploaded_bytes: u64,
    /// Bytes of the backup that were stored already.
    pub reused_bytes: u64,
}

/// Where the bytes of an object to upload are.
struct Source {
    path: PathBuf,
    offset: u64,
    object: StoredObject,
}

/// The files of a checkpoint, and where the bytes of their objects are.
struct Plan {
    files: Vec<StoredFile>,
    sources: Vec<Source>,
}

impl BackupStore {
    /// Makes a backup of the database as of now.
    ///
    /// The database is used as before meanwhile. After a failure or a crash, what was uploaded stays stored, and the
    /// next call does not upload it again.
    ///
    /// # Errors
    /// Those of [`BackupError`]; `OtherDatabase` if the store has the backups of another database. `Database` with
    /// `Stale` if the database is a follower, and a recovery of the writer has lost commits of the backup meanwhile.
    pub fn create(
        &self,
        db: &Database,
        options: &CreateOptions,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<CreateReport> {
        self.create_with_partitions(db, options, false, progress).map(|(report, _)| report)
    }

    /// As [`create`](BackupStore::create). Returns the partitions in the backup too, with their ids. With
    /// `must_be_durable`, `NoFeed` before anything is uploaded if the commits do not become durable in time.
    pub(crate) fn create_with_partitions(
        &self,
        db: &Database,
        options: &CreateOptions,
        must_be_durable: bool,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<(CreateReport, Vec<(String, u64)>)> {
        let database = hex(&db.change_position()?.database_id());
        let record = self.block_on(self.existing_or_new(&database))?;
        let earlier = self.block_on(self.manifests(&database))?;
        check_history(db, &earlier)?;
        let scratch = Scratch::new(db.path(), options.scratch.as_deref())?;
        let checkpoint = scratch.checkpoint();
        let disk: Arc<dyn Fs> = Arc::new(DiskFs::new());

        let (position, partitions) = make_checkpoint(db, &disk, &checkpoint)?;
        let time_ms = (self.clock)();
        let id = format!("{time_ms:013}-{}", hex(&random::<4>()?));
        let mut manifest = BackupManifest::new(id, database);
        manifest.time_ms = time_ms;
        let stored = |(name, id): &(String, u64)| StoredPartition { name: name.clone(), id: *id };
        manifest.partitions = partitions.iter().map(stored).collect();
        manifest.position = position.to_string();
        let ends = inspect::wal_ends(&disk, &checkpoint)?;
        (manifest.wal_ends, manifest.forgotten_ends) = (ends.known, ends.forgotten);
        manifest.sequence = (manifest.wal_ends.pop().and_then(|(_, end)| end))
            .ok_or_else(|| BackupError::invalid("the checkpoint does not record the end of its log"))?;
        check_lost(&manifest, &earlier)?;
        manifest.is_durable = make_durable(db, manifest.sequence, position.epoch(), options.durable_wait)?;
        if must_be_durable && !manifest.is_durable {
            let message = "the process that writes has not synced the commits of the backup in time; \
                           `Config::sync_interval` makes it sync";
            return Err(BackupError::NoFeed(azekura::Error::new(ErrorKind::Conflict, message)));
        }

        let plan = plan(&disk, &checkpoint, &stored_files(&earlier), progress)?;
        manifest.files = plan.files;
        manifest.check(&backup_object(&manifest.id, &[]))?;
        let grace = Duration::from_secs(record.grace_seconds);
        let report = self.block_on(self.upload(db, manifest, plan.sources, grace, progress))?;
        Ok((report, partitions))
    }

    /// Uploads the objects that are missing, and publishes the manifest.
    async fn upload(
        &self,
        db: &Database,
        mut manifest: BackupManifest,
        mut sources: Vec<Source>,
        grace: Duration,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<CreateReport> {
        let holds = HoldWriter::begin(self, grace).await?;
        let missing = self.missing_objects(&mut manifest, &mut sources, &holds).await?;
        holds.hold(manifest.objects().map(|of| of.object.clone()).collect()).await?;
        let uploaded_bytes: u64 = missing.iter().map(|source| source.object.bytes).sum();

        let upload = Upload {
            store: self,
            holds: &holds,
            sent: RefCell::new(StageProgress::new(Stage::Uploading, uploaded_bytes, progress)),
            has_failed: Cell::new(false),
        };
        // After an error the others end by themselves, so that they can clean up.
        let each = stream::iter(&missing).map(|source| upload.run(source)).buffer_unordered(self.concurrency);
        each.collect::<Vec<_>>().await.into_iter().collect::<Result<()>>()?;

        check_kept(db, &manifest)?;
        holds.check_in_time()?;
        let bytes = to_json(&manifest);
        let object = backup_object(&manifest.id, &bytes);
        if !self.put_new(&object, bytes.into()).await? {
            return Err(BackupError::wrong(object, "another writer has written a backup of this name"));
        }
        if let Err(error) = check_kept(db, &manifest).and_then(|()| holds.check_in_time()) {
            self.delete(&object).await?;
            return Err(error);
        }
        let backup = BackupInfo::of(&manifest);
        let reused_bytes = backup.bytes.saturating_sub(uploaded_bytes);
        Ok(CreateReport { backup, uploaded_objects: missing.len(), uploaded_bytes, reused_bytes })
    }

    /// The objects that have to be uploaded, each once. Gives them names that no object had before, because a call of
    /// `prune` may still delete what was listed under an old one.
    async fn missing_objects<'s>(
        &self,
        manifest: &mut BackupManifest,
        sources: &'s mut [Source],
        holds: &HoldWriter<'_>,
    ) -> Result<Vec<&'s Source>> {
        let mut stored: HashMap<String, Vec<(String, ObjectMeta)>> = HashMap::new();
        for folder in [FILES, PARTS] {
            for (object, meta) in self.list_folder(folder).await? {
                stored.entry(content_of(&object).to_owned()).or_default().push((object, meta));
            }
        }
        let mut protected = held_objects(self, holds.now(), holds.reuse_age()).await?;
        for (_, earlier) in self.manifests(&manifest.database).await? {
            protected.extend(earlier.objects().map(|of| of.object.clone()));
        }
        // Others may be deleted at any time, or are damaged.
        let is_safe = |object: &StoredObject, (name, meta): &(String, ObjectMeta)| {
            let is_young = holds.age(meta.last_modified) < holds.reuse_age();
            meta.size == object.bytes && (is_young || protected.contains(name))
        };
        let mut names: HashMap<String, String> = HashMap::new();
        let mut missing: HashSet<String> = HashSet::new();
        for object in manifest.files.iter_mut().flat_map(|file| &mut file.objects) {
            let content = content_of(&object.object);
            if !names.contains_key(content) {
                let safe = stored.get(content).and_then(|of| of.iter().find(|of| is_safe(object, of)));
                let name = match safe {
                    Some((name, _)) => name.clone(),
                    None => format!("{content}-{}", hex(&random::<4>()?)),
                };
                missing.extend(safe.is_none().then(|| name.clone()));
                names.insert(content.to_owned(), name);
            }
            object.object = names[content].clone();
        }
        for source in sources.iter_mut() {
            source.object.object = names[content_of(&source.object.object)].clone();
        }
        Ok(sources.iter().filter(|source| missing.remove(&source.object.object)).collect())
    }
}

/// The upload of the objects of one backup.
struct Upload<'a> {
    store: &'a BackupStore,
    holds: &'a HoldWriter<'a>,
    sent: RefCell<StageProgress<'a>>,
    has_failed: Cell<bool>,
}

impl Upload<'_> {
    /// Uploads an object.
    async fn run(&self, source: &Source) -> Result<()> {
        let done = if self.has_failed.get() { Err(BackupError::Interrupted) } else { self.object(source).await };
        self.has_failed.set(self.has_failed.get() || done.is_err());
        done
    }

    /// As [`run`](Upload::run). Compares what it reads with the checksum in the plan.
    async fn object(&self, source: &Source) -> Result<()> {
        let StoredObject { object, bytes: len, xxh3 } = &source.object;
        let failed = |error| BackupError::io("read the checkpoint", &source.path, error);
        let mut file = File::open(&source.path).map_err(failed)?;
        file.seek(SeekFrom::Start(source.offset)).map_err(failed)?;
        let changed = || BackupError::wrong(source.path.display().to_string(), "the file changed during the backup");
        if *len <= CHUNK as u64 {
            let bytes = read_piece(&mut file, usize::try_from(*len).unwrap_or(CHUNK)).map_err(failed)?;
            if Checksum::of(&bytes) != *xxh3 {
                return Err(changed());
            }
            self.store.put(object, bytes, PutMode::Overwrite).await?;
            return self.note_sent(object, *len).await;
        }
        let mut hasher = Xxh3::new();
        let sent = Cell::new(0);
        let read = |at: u64, n: usize| {
            if at == 0 {
                // The first attempt, or one after a failed one.
                hasher.reset();
                file.seek(SeekFrom::Start(source.offset)).map_err(failed)?;
                self.sent.borrow_mut().take_off(sent.replace(0));
            }
            let bytes = read_piece(&mut file, n).map_err(failed)?;
            hasher.update(&bytes);
            let is_last = at + n as u64 == *len;
            if is_last && Checksum::of_hasher(&hasher) != *xxh3 { Err(changed()) } else { Ok(bytes) }
        };
        let note_sent = &mut async |n| {
            sent.set(sent.get() + n);
            self.note_sent(object, n).await
        };
        self.store.put_large(object, *len, read, note_sent).await
    }

    /// # Errors
    /// `Interrupted`, also if another object has failed; `TooSlow`.
    async fn note_sent(&self, object: &str, bytes: u64) -> Result<()> {
        self.sent.borrow_mut().add(bytes, object)?;
        self.holds.renew_if_due().await?;
        if self.has_failed.get() { Err(BackupError::Interrupted) } else { Ok(()) }
    }
}

/// # Errors
/// `OtherHistory` if the store has a durable backup of a later state than that of the database.
fn check_history(db: &Database, earlier: &[(String, BackupManifest)]) -> Result<()> {
    let durable = || earlier.iter().map(|(_, manifest)| manifest).filter(|manifest| manifest.is_durable);
    for manifest in durable() {
        catch_up_to(db, manifest.sequence, manifest.epoch())?;
    }
    let now = db.change_position()?.sequence_number();
    match durable().find(|manifest| manifest.sequence > now) {
        None => Ok(()),
        Some(later) => Err(BackupError::OtherHistory {
            message: format!("backup {} ends with commit {}, the database with {now}", later.id, later.sequence),
        }),
    }
}

/// # Errors
/// `OtherHistory` if a recovery of the database has lost commits of a durable backup.
fn check_lost(manifest: &BackupManifest, earlier: &[(String, BackupManifest)]) -> Result<()> {
    let history = History::of([manifest]);
    let is_lost = |of: &&BackupManifest| of.is_durable && history.has_lost(of.epoch(), of.sequence);
    match earlier.iter().map(|(_, of)| of).find(is_lost) {
        None => Ok(()),
        Some(lost) => Err(BackupError::OtherHistory {
            message: format!("a recovery has lost commits of backup {}, which ends with {}", lost.id, lost.sequence),
        }),
    }
}

/// The last sequence number that is valid of those up to a position of `epoch`, if the manifest of the database records
/// an end of the log since, and knows the first one.
pub(crate) fn recorded_end(db: &Database, epoch: u32) -> azekura::Result<Option<u64>> {
    let disk: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let ends = inspect::wal_ends(&disk, db.path())?;
    Ok(ends.first(epoch).filter(|_| ends.knows_first(epoch)).map(|(_, valid)| valid.unwrap_or_default()))
}

/// # Errors
/// `Stale` if the database records that a recovery has lost commits of a backup. If that is not known, later backups
/// tell it.
fn check_kept(db: &Database, manifest: &BackupManifest) -> Result<()> {
    match recorded_end(db, manifest.epoch()) {
        Ok(Some(end)) if end < manifest.sequence => {
            Err(azekura::Error::new(ErrorKind::Stale, "a recovery has lost commits of the backup meanwhile").into())
        }
        _ => Ok(()),
    }
}

/// In a follower, reads what the writer has committed.
pub(crate) fn catch_up(db: &Database) -> Result<()> {
    match db.followed_files() {
        // No follower.
        Err(error) if error.kind() == ErrorKind::Invalid => Ok(()),
        _ => Ok(db.catch_up().map(drop)?),
    }
}

/// In a follower, reads up to a sequence number of an epoch, or as far as the writer has written.
pub(crate) fn catch_up_to(db: &Database, sequence: u64, epoch: u32) -> Result<()> {
    let mut now = db.change_position()?;
    for _ in 0..CATCH_UP_ATTEMPTS {
        if now.sequence_number() >= sequence && now.epoch() >= epoch {
            break;
        }
        catch_up(db)?;
        let before = std::mem::replace(&mut now, db.change_position()?);
        if now == before {
            break;
        }
    }
    Ok(())
}

/// Makes a checkpoint. Returns a position before its end, of its epoch, and the partitions in it. Others may be created
/// or deleted meanwhile.
fn make_checkpoint(db: &Database, disk: &Arc<dyn Fs>, path: &Path) -> Result<(ChangePosition, Vec<(String, u64)>)> {
    catch_up(db)?;
    for _ in 0..CHECKPOINT_ATTEMPTS {
        let position = db.change_position()?;
        db.checkpoint(path)?;
        // The checkpoint of a follower has what the writer has committed, which may be more than the follower has read.
        let end = inspect::wal_end(disk, path)?.unwrap_or_default();
        catch_up(db)?; // also if there is no later commit: the epoch may have risen
        catch_up_to(db, end, position.epoch())?;
        // Beside the writer of another process, which may have opened the database again, the epoch may rise.
        let now = db.change_position()?;
        if now.epoch() == position.epoch() && now.sequence_number() >= end {
            return Ok((position, inspect::partition_ids(disk, path)?));
        }
        fs::remove_dir_all(path).map_err(|error| BackupError::io("remove the checkpoint", path, error))?;
    }
    let message = "the database is opened all the time: try again";
    Err(azekura::Error::new(ErrorKind::Conflict, message).into())
}

/// Makes the commits up to a sequence number durable. Beside the writer of another process, waits until it does so.
/// Returns whether they are known to be.
fn make_durable(db: &Database, sequence: u64, epoch: u32, longest: Duration) -> Result<bool> {
    match db.persist(PersistMode::SyncData) {
        Ok(()) => return Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported) => {}
        Err(error) => return Err(error.into()),
    }
    let start = Instant::now();
    loop {
        match catch_up(db) {
            Err(BackupError::Database(error)) if error.kind() == ErrorKind::Stale => return Ok(false),
            read => read?,
        }
        let durable = db.durable_position()?;
        if durable.epoch() != epoch {
            // The next open of the writer may have lost commits, and given later ones their numbers.
            return Ok(false);
        }
        if durable.sequence_number() >= sequence {
            return Ok(true);
        }
        if start.elapsed() >= longest {
            return Ok(false);
        }
        std::thread::sleep(DURABLE_PAUSE);
    }
}

/// The objects of immutable files by id and length.
fn stored_files(manifests: &[(String, BackupManifest)]) -> HashMap<(String, u64), StoredObject> {
    let files = manifests.iter().flat_map(|(_, manifest)| &manifest.files);
    let one = |file: &StoredFile| Some(((file.id.clone()?, file.bytes), file.objects.first()?.clone()));
    files.filter_map(one).collect()
}

/// Names the objects of every file of the checkpoint. Reads only the files that no earlier backup has.
fn plan(
    fs: &Arc<dyn Fs>,
    checkpoint: &Path,
    stored: &HashMap<(String, u64), StoredObject>,
    progress: &mut dyn FnMut(&Progress<'_>) -> bool,
) -> Result<Plan> {
    let failed = |error| BackupError::io("read the checkpoint", checkpoint, error);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(checkpoint).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().into_string();
        let name = name.map_err(|name| BackupError::invalid(format!("the file name {name:?} is not UTF-8")))?;
        paths.push((name, entry.path(), entry.metadata().map_err(failed)?.len()));
    }
    paths.sort();
    let total = paths.iter().map(|(_, _, len)| len).sum();
    let mut read = StageProgress::new(Stage::Reading, total, progress);
    let mut plan = Plan { files: Vec::new(), sources: Vec::new() };
    for (name, path, bytes) in paths {
        let id = inspect::immutable_file_id(fs, &path)?;
        let known = id.and_then(|id| stored.get(&(hex(&id), bytes)));
        let objects = match (known, id) {
            (Some(object), _) => {
                read.add(bytes, &name)?;
                vec![object.clone()]
            }
            (None, Some(id)) => {
                let checksum = checksum_of(&path, &mut |n| read.add(n, &name))?;
                vec![StoredObject { object: file_object(&id, bytes, &checksum), bytes, xxh3: checksum }]
            }
            (None, None) => parts_of(&path, &mut |n| read.add(n, &name))?,
        };
        let mut offset = 0;
        for object in &objects {
            plan.sources.push(Source { path: path.clone(), offset, object: object.clone() });
            offset += object.bytes;
        }
        plan.files.push(StoredFile { name, bytes, id: id.map(|id| hex(&id)), objects });
    }
    Ok(plan)
}

/// The parts of a file that changes: each has a fixed offset, so that a change of some bytes changes few parts.
fn parts_of(path: &Path, read: &mut dyn FnMut(u64) -> Result<()>) -> Result<Vec<StoredObject>> {
    let mut parts = Vec::new();
    for_each_piece(path, &mut |piece| {
        let (bytes, xxh3) = (piece.len() as u64, Checksum::of(piece));
        parts.push(StoredObject { object: part_object(bytes, &xxh3), bytes, xxh3 });
        read(bytes)
    })?;
    Ok(parts)
}

/// The checksum of a file.
fn checksum_of(path: &Path, read: &mut dyn FnMut(u64) -> Result<()>) -> Result<Checksum> {
    let mut hasher = Xxh3::new();
    for_each_piece(path, &mut |piece| {
        hasher.update(piece);
        read(piece.len() as u64)
    })?;
    Ok(Checksum::of_hasher(&hasher))
}

fn for_each_piece(path: &Path, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let failed = |error| BackupError::io("read", path, error);
    let mut file = File::open(path).map_err(failed)?;
    let mut buffer = Vec::new();
    loop {
        buffer.clear();
        file.by_ref().take(CHUNK as u64).read_to_end(&mut buffer).map_err(failed)?;
        if buffer.is_empty() {
            return Ok(());
        }
        each(&buffer)?;
    }
}

/// The checksum of a range of a file.
pub(crate) fn checksum_at(file: &mut File, begin: u64, len: u64) -> std::io::Result<Checksum> {
    let (mut hasher, mut rest) = (Xxh3::new(), len);
    file.seek(SeekFrom::Start(begin))?;
    while rest > 0 {
        let n = rest.min(CHUNK as u64);
        hasher.update(&read_piece(file, usize::try_from(n).unwrap_or(CHUNK))?);
        rest -= n;
    }
    Ok(Checksum::of_hasher(&hasher))
}

fn read_piece(file: &mut File, len: usize) -> std::io::Result<Bytes> {
    let mut bytes = vec![0; len];
    file.read_exact(&mut bytes)?;
    Ok(bytes.into())
}
