//! Builds a database directory from a backup.

use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::{Database, EngineType, Partition, PartitionCreateOptions, PersistMode, PmemOptions, inspect};

use crate::create::{BackupInfo, checksum_at};
use crate::error::{BackupError, Result};
use crate::layout::{BackupManifest, StoredFile, StoredObject, StoredPartition};
use crate::log::{Until, choose, read_headers};
use crate::log_object::{LoggedCommit, LoggedOperation, decode};
use crate::progress::{Progress, Stage, StageProgress};
use crate::store::BackupStore;

/// The name of the manifest of a database.
const MANIFEST: &str = "MANIFEST";

/// Attempts to lock a file that other calls remove meanwhile.
const LOCK_ATTEMPTS: usize = 1000;

/// Opens a partition that the shipped log changes.
type OpenPartition = dyn Fn(&Database, &str) -> azekura::Result<Partition>;

/// Options of [`BackupStore::restore`].
#[non_exhaustive]
pub struct RestoreOptions {
    backup: Option<String>,
    until: Option<Until>,
    open_partition: Box<OpenPartition>,
}

impl Default for RestoreOptions {
    fn default() -> RestoreOptions {
        RestoreOptions { backup: None, until: None, open_partition: Box::new(|db, name| db.partition(name)) }
    }
}

impl RestoreOptions {
    /// Restores this backup, without the log unless `until` says how far. Default: the newest that is not beyond
    /// `until`.
    #[must_use]
    pub fn backup(mut self, id: impl Into<String>) -> RestoreOptions {
        self.backup = Some(id.into());
        self
    }

    /// Applies the shipped log up to there. Default: to its end.
    #[must_use]
    pub fn until(mut self, until: Until) -> RestoreOptions {
        self.until = Some(until);
        self
    }

    /// Opens the partitions that the log changes by this function, which a partition with a comparator or a merge
    /// operator of the program needs. Default: [`Database::partition`].
    #[must_use]
    pub fn open_partition(
        mut self,
        open: impl Fn(&Database, &str) -> azekura::Result<Partition> + 'static,
    ) -> RestoreOptions {
        self.open_partition = Box::new(open);
        self
    }
}

impl std::fmt::Debug for RestoreOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RestoreOptions { backup, until, .. } = self;
        f.debug_struct("RestoreOptions").field("backup", backup).field("until", until).finish_non_exhaustive()
    }
}

/// What [`BackupStore::restore`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoreReport {
    /// The backup.
    pub backup: BackupInfo,
    /// Bytes of the backup that were downloaded by this call.
    pub downloaded_bytes: u64,
    /// Commits of the log that were applied to it.
    pub applied_commits: usize,
    /// The last sequence number that is restored.
    pub sequence: u64,
}

impl BackupStore {
    /// Restores a backup to `path`, which must not exist or be an empty directory.
    ///
    /// The database is built in a directory beside `path` with the same name and `.azekura-restore.tmp`, and renamed at
    /// the end. After a failure that directory stays, and the next call downloads only what is missing in it: files
    /// that do not have the checksum of the backup, and of files that are stored in parts only such parts. Calls with
    /// the same `path` exclude each other by a lock on a file with the same name and `.azekura-restore.lock`.
    ///
    /// A backup that is not [durable](BackupInfo::is_durable) is left out if the log may have replaced its last
    /// commits. If it is not known that they were lost, and the log does not reach as far, the result is `Gap`: a limit
    /// before them restores the log.
    ///
    /// # Errors
    /// `Invalid` if `path` is not empty, a symbolic link, or the root of a file system. `Database` with `Locked` during
    /// another call for `path`. `Missing`, `WrongContent`, `Gap` if the store does not have what was stored.
    pub fn restore(
        &self,
        path: &Path,
        options: &RestoreOptions,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<RestoreReport> {
        let path = std::path::absolute(path).map_err(|error| BackupError::io("find the directory", path, error))?;
        check_target(&path)?;
        let (manifest, log) = self.block_on(self.choose(options))?;
        let tmp = path_beside(&path, ".azekura-restore.tmp")?;
        create_parents(&path)?;
        let _lock = RestoreLock::take(path_beside(&path, ".azekura-restore.lock")?)?;
        check_target(&path)?;
        // Its files are removed, so it must not be a link to another directory.
        match fs::create_dir(&tmp) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !tmp.is_symlink() => {}
            created => created.map_err(|error| BackupError::io("create the directory", &tmp, error))?,
        }
        let downloaded_bytes = self.block_on(self.download_files(&manifest, &tmp, progress))?;
        let (applied_commits, sequence) = self.apply_log(&manifest, &log, &tmp, options, progress)?;
        make_new_database(&tmp)?;
        publish(&tmp, &path)?;
        Ok(RestoreReport { backup: BackupInfo::of(&manifest), downloaded_bytes, applied_commits, sequence })
    }

    /// The backup to restore, and the log objects to apply to it.
    async fn choose(&self, options: &RestoreOptions) -> Result<(BackupManifest, Vec<String>)> {
        let record = self.existing().await?;
        let until = options.until.unwrap_or_default();
        let missing = |message: String| BackupError::NoBackup { message };
        let wanted = options.backup.as_deref();
        // Before the manifests, because `prune` removes the manifest of a backup before the log that continues it.
        let headers = match wanted {
            Some(_) if options.until.is_none() => Vec::new(),
            _ => read_headers(self, &record.database).await?,
        };
        let (manifests, damaged) = self.manifests_and_damage(&record.database).await?;
        if let Some(id) = wanted {
            let found = manifests.iter().find(|(_, manifest)| manifest.id == id);
            let (_, manifest) = found.ok_or_else(|| missing(format!("there is no backup {id}")))?;
            if options.until.is_none() {
                return Ok((manifest.clone(), Vec::new()));
            }
            if !until.admits_backup(manifest) {
                return Err(BackupError::invalid(format!("backup {id} is later than the time to restore")));
            }
        }
        // The damaged one may be the newest, or the one that shows which part of the log a recovery has lost.
        damaged.into_iter().next().map_or(Ok(()), Err)?;
        if let Some((manifest, log)) = choose(&headers, &manifests, wanted, until)? {
            return Ok((manifest.clone(), log));
        }
        if let Some(id) = wanted {
            return Err(missing(format!("no log continues backup {id}, which was not durable")));
        }
        Err(missing("there is no backup, or none of that time".into()))
    }

    /// Makes the files of the backup, and no others, in `tmp`. Returns the bytes that it downloads.
    async fn download_files(
        &self,
        manifest: &BackupManifest,
        tmp: &Path,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<u64> {
        let files: HashMap<&str, &StoredFile> = manifest.files.iter().map(|file| (&*file.name, file)).collect();
        let failed = |error| BackupError::io("read the directory", tmp, error);
        for entry in fs::read_dir(tmp).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let is_file = entry.file_type().is_ok_and(|of| of.is_file());
            if !is_file || entry.file_name().to_str().is_none_or(|name| !files.contains_key(name)) {
                let path = entry.path();
                let is_dir = entry.file_type().is_ok_and(|of| of.is_dir());
                let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(|error| BackupError::io("remove", &path, error))?;
            }
        }
        let each = manifest.files.iter().map(|file| (file, missing_parts(&tmp.join(&file.name), file)));
        let missing: Vec<_> = each.collect();
        let total = missing.iter().flat_map(|(_, parts)| parts).map(|(_, part)| part.bytes).sum();
        let mut downloaded = StageProgress::new(Stage::Downloading, total, progress);
        for (file, parts) in missing {
            self.download_file(file, &parts, &tmp.join(&file.name), &mut downloaded).await?;
        }
        Ok(total)
    }

    /// Applies commits to the restored database. Returns their number, and the last sequence number in the database.
    fn apply_log(
        &self,
        manifest: &BackupManifest,
        log: &[String],
        tmp: &Path,
        options: &RestoreOptions,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<(usize, u64)> {
        let (mut applied, mut sequence) = (0, manifest.sequence);
        if log.is_empty() {
            return Ok((applied, sequence));
        }
        let until = options.until.unwrap_or_default();
        let mut progress = StageProgress::new(Stage::Applying, log.len() as u64, progress);
        let largest = self.block_on(self.largest(log))?;
        let mut target = RestoreTarget::open(tmp, largest)?;
        for object in log {
            let bytes = self.block_on(self.get(object))?;
            let decoded = decode(object, &bytes)?;
            let names = |of: &StoredPartition| (of.name.clone(), of.id);
            if !decoded.partitions.iter().cloned().eq(manifest.partitions.iter().map(names)) {
                return Err(BackupError::invalid(format!(
                    "partitions were created or deleted after backup {}: restore a later one",
                    manifest.id
                )));
            }
            for commit in &decoded.commits {
                if commit.sequence > sequence && until.admits_commit(commit.sequence) {
                    target = target.apply(commit, &decoded.partitions, &*options.open_partition)?;
                    (applied, sequence) = (applied + 1, commit.sequence);
                }
            }
            progress.add(1, object)?;
        }
        target.close(&*options.open_partition)?;
        Ok((applied, sequence))
    }

    /// The length of the largest of these objects.
    async fn largest(&self, objects: &[String]) -> Result<u64> {
        let mut largest = 0;
        for object in objects {
            largest = largest.max(self.head(object).await?.size);
        }
        Ok(largest)
    }

    /// Downloads these parts of a file, and makes the whole file durable: an earlier call may have ended before it did.
    async fn download_file(
        &self,
        file: &StoredFile,
        parts: &[(u64, &StoredObject)],
        path: &Path,
        progress: &mut StageProgress<'_>,
    ) -> Result<()> {
        let failed = |error| BackupError::io("write", path, error);
        let mut out = File::options().create(true).truncate(false).write(true).open(path).map_err(failed)?;
        if out.metadata().map_err(failed)?.len() > file.bytes {
            out.set_len(file.bytes).map_err(failed)?;
        }
        // In the order of their offsets, so that no part begins beyond the end of the file.
        for (begin, object) in parts {
            let write = &mut |piece: Option<&[u8]>| match piece {
                Some(piece) => out.write_all(piece).map_err(failed),
                None => out.seek(SeekFrom::Start(*begin)).map(drop).map_err(failed),
            };
            self.download(object, progress, write).await?;
        }
        // After a failed sync the cached bytes are right, and those on the disk may be wrong: nothing is kept of them.
        out.sync_all().inspect_err(|_| drop(fs::remove_file(path))).map_err(failed)
    }
}

/// The restored database, while the log is applied to it.
struct RestoreTarget {
    db: Database,
    path: PathBuf,
    /// Bytes that a commit has at most.
    commit_bytes: u64,
    partitions: HashMap<String, Partition>,
    /// The options of the pools whose limit was raised.
    stored_options: HashMap<String, PartitionCreateOptions>,
}

impl RestoreTarget {
    /// Opens the database with memory for commits of this many bytes.
    fn open(path: &Path, commit_bytes: u64) -> Result<RestoreTarget> {
        let (partitions, stored_options) = (HashMap::new(), HashMap::new());
        let db = open_with_memory(path, commit_bytes)?;
        Ok(RestoreTarget { db, path: path.to_owned(), commit_bytes, partitions, stored_options })
    }

    /// Applies a commit. If a pool is full, its limit may have been raised after the backup.
    fn apply(mut self, commit: &LoggedCommit, names: &[(String, u64)], open: &OpenPartition) -> Result<RestoreTarget> {
        for factor in [8, 64, 512, 4096] {
            match self.try_apply(commit, names, open) {
                Err(error) if error.kind() == azekura::ErrorKind::OutOfSpace => {
                    self = self.with_raised_limits(commit, names, factor)?;
                }
                applied => return Ok(applied.map(|()| self)?),
            }
        }
        self.try_apply(commit, names, open)?;
        Ok(self)
    }

    /// Raises the limits of the pools that the commit changes to this many times their bytes. A limit that is more than
    /// doubled holds after an open.
    fn with_raised_limits(
        mut self,
        commit: &LoggedCommit,
        names: &[(String, u64)],
        factor: u64,
    ) -> Result<RestoreTarget> {
        for name in commit.operations.iter().map(|(number, _)| &names[*number].0) {
            let Some(partition) = self.partitions.remove(name) else { continue };
            let Some(pool) = partition.metrics().pool else { continue };
            let limit = (pool.bytes.saturating_add(self.commit_bytes).saturating_mul(factor)).clamp(1 << 20, 8 << 40);
            let stored = self.stored_options.entry(name.clone()).or_insert_with(|| partition.options());
            partition.set_options(stored.clone().engine(EngineType::Pmem(PmemOptions::default().max_size(limit))))?;
        }
        self.partitions.clear();
        self.db.close()?;
        self.db = open_with_memory(&self.path, self.commit_bytes)?;
        Ok(self)
    }

    fn try_apply(
        &mut self,
        commit: &LoggedCommit,
        names: &[(String, u64)],
        open: &OpenPartition,
    ) -> azekura::Result<()> {
        let mut batch = self.db.batch();
        for (number, operation) in &commit.operations {
            let name = &names[*number].0;
            if !self.partitions.contains_key(name) {
                self.partitions.insert(name.clone(), open(&self.db, name)?);
            }
            let partition = &self.partitions[name];
            match operation {
                LoggedOperation::Insert { key, value, expires_ms } => {
                    batch.insert_with_expiry(partition, key, value, *expires_ms);
                }
                LoggedOperation::Remove { key } => batch.remove(partition, key),
                LoggedOperation::RemoveRange { start, end } => {
                    let bounds = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
                    batch.remove_range::<&[u8]>(partition, bounds);
                }
                LoggedOperation::Merge { key, operand } => batch.merge(partition, key, operand),
            }
        }
        batch.commit()
    }

    /// Makes everything durable, with the options of the backup. A pool keeps what exceeds its limit.
    fn close(self, open: &OpenPartition) -> Result<()> {
        for (name, options) in self.stored_options {
            open(&self.db, &name)?.set_options(options)?;
        }
        self.db.persist(PersistMode::SyncAll)?;
        drop(self.partitions);
        Ok(self.db.close()?)
    }
}

/// Opens a database with memory for commits of this many bytes.
fn open_with_memory(path: &Path, commit_bytes: u64) -> azekura::Result<Database> {
    let budget = commit_bytes.saturating_mul(4).max(azekura::Settings::default().memory_budget);
    azekura::Config::new(path).memory_budget(budget).open()
}

/// The parts of a file that no earlier restore has written completely, with their offsets.
fn missing_parts<'f>(path: &Path, file: &'f StoredFile) -> Vec<(u64, &'f StoredObject)> {
    let mut written = File::open(path).ok();
    let mut begin = 0;
    let with_offsets = file.objects.iter().map(|object| {
        begin += object.bytes;
        (begin - object.bytes, object)
    });
    let is_missing = |(begin, object): &(u64, &StoredObject)| {
        let written = written.as_mut().map(|written| checksum_at(written, *begin, object.bytes));
        !written.is_some_and(|of| of.is_ok_and(|of| of == object.xxh3))
    };
    with_offsets.filter(is_missing).collect()
}

/// The path in the same directory, with a longer name.
fn path_beside(path: &Path, end: &str) -> Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => {
            let mut name = name.to_owned();
            name.push(end);
            Ok(parent.join(name))
        }
        _ => Err(BackupError::invalid(format!("{} cannot be created", path.display()))),
    }
}

/// Excludes other restores to a path. The file is removed when this is dropped.
struct RestoreLock {
    path: PathBuf,
    _file: File,
}

impl RestoreLock {
    /// # Errors
    /// `Database` with `Locked`; `Io` if the path never names the file that was opened, as a symbolic link does.
    fn take(path: PathBuf) -> Result<RestoreLock> {
        let failed = |error| BackupError::io("lock", &path, error);
        for _ in 0..LOCK_ATTEMPTS {
            let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
            match file.try_lock() {
                // The call that held the lock may have removed the file after it was opened here.
                Ok(()) if !is_file_at(&file, &path) => {}
                Ok(()) => return Ok(RestoreLock { path, _file: file }),
                Err(TryLockError::WouldBlock) => {
                    let message = "another restore to this directory is running";
                    return Err(azekura::Error::new(azekura::ErrorKind::Locked, message).in_file(path).into());
                }
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
        Err(failed(std::io::Error::other("the path does not name the file that was opened")))
    }
}

/// Whether the path still names the open file. Other systems than Unix do not remove files that are open.
fn is_file_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |of: fs::Metadata| (of.dev(), of.ino());
        file.metadata().ok().map(id) == fs::symlink_metadata(path).ok().map(id)
    }
    #[cfg(not(unix))]
    {
        let _ = (file, path);
        true
    }
}

impl Drop for RestoreLock {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.path));
    }
}

/// # Errors
/// `Invalid` unless the path does not exist or is an empty directory.
fn check_target(path: &Path) -> Result<()> {
    if path.is_symlink() {
        return Err(BackupError::invalid(format!("{} is a symbolic link", path.display())));
    }
    if is_mount_point(path) {
        let message = format!("{} is a mount point, which cannot be replaced: give a directory in it", path.display());
        return Err(BackupError::invalid(message));
    }
    match fs::read_dir(path).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(BackupError::invalid(format!("the directory {} is not empty", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            Err(BackupError::invalid(format!("{} is not a directory", path.display())))
        }
        Err(error) => Err(BackupError::io("read the directory", path, error)),
    }
}

/// Whether a directory is the root of another file system than that of its parent.
fn is_mount_point(path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let device = |path: &Path| fs::metadata(path).map(|of| of.dev()).ok();
        let (own, parent) = (device(path), path.parent().and_then(device));
        own.zip(parent).is_some_and(|(own, parent)| own != parent)
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        false
    }
}

/// Creates the directories above `path`, and makes their names durable.
fn create_parents(path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let missing = parent.ancestors().take_while(|directory| !directory.exists()).count();
    fs::create_dir_all(parent).map_err(|error| BackupError::io("create the directory", parent, error))?;
    parent.ancestors().skip(1).take(missing).try_for_each(sync_directory)
}

/// Gives the directory an instance id of its own, because two restores of one backup are different databases: a store
/// would take the log of one for that of the other.
fn make_new_database(tmp: &Path) -> Result<()> {
    let disk: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let manifest = inspect::manifest_of_copy(&disk, tmp)?;
    let path = tmp.join(MANIFEST);
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(&manifest)?;
        file.sync_all()
    });
    // A part of it is not the manifest of the backup, so the next call downloads that again.
    written.map_err(|error| BackupError::io("write", &path, error))
}

/// Makes the names in `tmp` durable, and renames it to `path`.
fn publish(tmp: &Path, path: &Path) -> Result<()> {
    sync_directory(tmp)?;
    match fs::remove_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(BackupError::io("replace the empty directory", path, error)),
    }
    fs::rename(tmp, path).map_err(|error| BackupError::io("rename the restored directory to", path, error))?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Makes the names in a directory durable. Other systems than Unix have no call for it.
fn sync_directory(path: &Path) -> Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    let synced = File::open(path).and_then(|directory| directory.sync_all());
    synced.map_err(|error| BackupError::io("sync the directory", path, error))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Regression: the first of three calls removed the file that the second had locked. The third locked a new one.
    #[test]
    fn lock_on_a_removed_file_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = RestoreLock::take(path.clone()).unwrap();
        let opened_by_second = File::open(&path).unwrap();
        assert!(is_file_at(&opened_by_second, &path));
        drop(first);
        assert!(!is_file_at(&opened_by_second, &path));
        let third = RestoreLock::take(path.clone()).unwrap();
        assert!(!is_file_at(&opened_by_second, &path));
        assert!(RestoreLock::take(path).is_err());
        drop(third);
    }

    /// Regression: the call never returned.
    #[cfg(unix)]
    #[test]
    fn lock_on_a_symbolic_link_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        assert_eq!(RestoreLock::take(path).err().unwrap().kind(), "io");
    }
}
