//! Opens a database as writer, reader or follower.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{FileNumber, PartitionId, VersionEdit, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::config::Config;
use crate::db::handle::DbHandle;
use crate::db::inner::DbInner;
use crate::db::partition_state::PartitionState;
use crate::db::recovery::directory_listing::{check_listing, list_directory};
use crate::db::recovery::recovery_state::{OpenedAs, RecoveryState};
use crate::lsm::tree_context::TreeResources;
use crate::manifest::{Manifest, ManifestIdentity};
use crate::vfs::fs::{create_dirs, sync_parent_dirs};
use crate::vfs::open_files::HandleLimitFs;
use crate::vfs::{Env, FileLock, Fs, LockMode};
use crate::wal::{self, RecoveryMode, WalReplayOptions, WalReplayReport};

/// The first and the longest pause between two attempts to lock the directory.
const LOCK_PAUSE_MIN: Duration = Duration::from_millis(1);
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(50);

/// How often a follower tries to read files that a writer changes.
const FOLLOWER_ATTEMPTS_MIN: u32 = 5;
const FOLLOWER_ATTEMPTS_MAX: u32 = 100;

/// Opens a database for reading and writing. Creates it if the directory is empty or does not exist.
pub(crate) fn open(mut config: Config) -> Result<Arc<DbHandle>> {
    config.check()?;
    config.path = config.fs.absolute(&config.path)?;
    let limited = HandleLimitFs::wrap(&mut config.fs);
    let start = config.env.monotonic_ns();
    let (fs, dir) = (Arc::clone(&config.fs), config.path.clone());
    check_listing(&dir, &list_directory(&*fs, &dir)?)?;
    let created = create_dirs(&*fs, &dir)?;
    let lock = lock_dir(&config, LockMode::Exclusive)?;
    let listing = list_directory(&*fs, &dir)?;
    check_listing(&dir, &listing)?;
    if !listing.has_manifest {
        // Parent directories are synced before the manifest is created. A directory without a manifest is created
        // again, but losing a directory together with its manifest would lose data.
        sync_parent_dirs(&*fs, &dir, created)?;
        create_database(&*config.env, &fs, &dir)?;
    }
    let mut state = RecoveryState::read(&config, listing, Some(&limited), OpenedAs::Writer)?;
    state.sync_before_replay(&config)?;
    let report = state.replay(&config)?;
    state.finish(config, report, lock, start)
}

/// Opens a database for reading only. Other readers may have it open too. Replays the WAL into memory and writes
/// nothing.
pub(crate) fn open_read_only(mut config: Config) -> Result<Arc<DbHandle>> {
    config.check()?;
    config.path = config.fs.absolute(&config.path)?;
    let limited = HandleLimitFs::wrap(&mut config.fs);
    let start = config.env.monotonic_ns();
    let (fs, dir) = (Arc::clone(&config.fs), config.path.clone());
    let listing = list_directory(&*fs, &dir)?;
    if !listing.has_manifest {
        check_listing(&dir, &listing)?;
        return Err(Error::new(ErrorKind::NotFound, "there is no database here").in_file(dir));
    }
    let lock = lock_dir(&config, LockMode::Shared)?;
    let mut state = RecoveryState::read(&config, list_directory(&*fs, &dir)?, Some(&limited), OpenedAs::Reader)?;
    let report = state.replay(&config)?;
    state.finish_read_only(config, &report, lock, start)
}

/// Opens a database for reading while another process may write to it. Takes no lock and writes nothing.
pub(crate) fn open_follower(mut config: Config) -> Result<Arc<DbHandle>> {
    config.check()?;
    // What looks damaged may be in the middle of being written.
    config.settings.recovery_mode = RecoveryMode::Strict;
    config.path = config.fs.absolute(&config.path)?;
    let start = config.env.monotonic_ns();
    let listing = list_directory(&*config.fs, &config.path)?;
    if !listing.has_manifest {
        check_listing(&config.path, &listing)?;
        return Err(Error::new(ErrorKind::NotFound, "there is no database here").in_file(&config.path));
    }
    let (state, report, identity) = read_beside_writer(&config, &|| Ok(()))?;
    state.finish_follower(config, &report, identity, start)
}

/// Reads a database that a writer may change meanwhile. Tries again if the writer has changed files after the manifest
/// was read that names them.
///
/// # Errors
/// Those of the files, and of `check_open`, which is called before each further attempt.
fn read_beside_writer(
    config: &Config,
    check_open: &dyn Fn() -> Result<()>,
) -> Result<(RecoveryState, WalReplayReport, ManifestIdentity)> {
    for attempt in 1.. {
        let before = Manifest::identity(&*config.fs, &config.path);
        let read = before.clone().and_then(|identity| {
            // The manifest is read first: the WAL contains every commit that the manifest has made permanent.
            let listing = list_directory(&*config.fs, &config.path)?;
            let mut state = RecoveryState::read(config, listing, None, OpenedAs::Follower)?;
            let is_current = || Ok(Manifest::identity(&*config.fs, &config.path)? == identity);
            let report = replay_beside_writer(&mut state, config, &is_current)?;
            check_same_open(&config.fs, &config.path, &state.manifest_state, &identity)?;
            state.open_files()?;
            Ok((state, report, identity))
        });
        let error = match read {
            Err(error) if is_changed_meanwhile(&error) => error,
            read => return read,
        };
        let is_same = Manifest::identity(&*config.fs, &config.path).ok() == before.ok();
        if attempt >= if is_same { FOLLOWER_ATTEMPTS_MIN } else { FOLLOWER_ATTEMPTS_MAX } {
            return Err(error);
        }
        check_open()?;
        config.env.sleep(LOCK_PAUSE_MIN * attempt.min(50));
    }
    unreachable!("the loop returns after its last attempt")
}

/// As [`RecoveryState::replay`], beside a writer that may change the manifest after it was read. If the manifest does
/// not tell how the last ingest has ended, the WAL ends before its note: the note stands for records that are in
/// tables only. `is_current`: whether the manifest has not changed since it was read.
///
/// # Errors
/// Those of a replay; `Conflict` if the manifest has to be read again.
fn replay_beside_writer(
    state: &mut RecoveryState,
    config: &Config,
    is_current: &dyn Fn() -> Result<bool>,
) -> Result<WalReplayReport> {
    let report = state.replay(config)?;
    // A pool has only visible records, so the ingest has ended before its image was written.
    let is_in_pool = state.open_note.is_some_and(|note| note <= state.last_in_trees());
    if (state.is_note_followed || is_in_pool) && !is_current()? {
        return Err(Error::new(ErrorKind::Conflict, "the manifest has changed while the log was read"));
    }
    let Some(note) = state.open_note.filter(|_| !is_in_pool) else { return Ok(report) };
    let end = SeqNo(note.0 - 1);
    // The end of the WAL excludes segments that the manifest does not list.
    let listed_segments = report.segments.iter().map(|segment| (segment.epoch, segment.file)).collect();
    let wal_end = Some((report.wal_end().0, end));
    let options = WalReplayOptions { wal_end, listed_segments, ..state.replay_options(config) };
    let (fs, id) = (Arc::clone(&config.fs), state.manifest_state.id);
    let before_note = wal::replay(fs, &config.path, id, options, &mut |_| Ok(None))?;
    if before_note.last_seqno != end {
        return Err(Error::new(ErrorKind::Conflict, "the log has changed while it was read"));
    }
    Ok(WalReplayReport { durable_through: report.durable_through, ..before_note })
}

/// Checks that the writer has not opened the database again since its manifest was read, with this identity: the WAL
/// may have commits of the later open, which the manifest does not record.
///
/// # Errors
/// `Conflict` if it has; those of the manifest.
pub(crate) fn check_same_open(
    fs: &Arc<dyn Fs>,
    dir: &Path,
    read: &ManifestState,
    identity: &ManifestIdentity,
) -> Result<()> {
    let open_of = |state: &ManifestState| (state.id, state.instance, state.position_epoch());
    match Manifest::load_if_replaced(fs, dir, identity.0)? {
        Some(now) if open_of(&now) != open_of(read) => {
            Err(Error::new(ErrorKind::Conflict, "the database was opened again or replaced while it was read"))
        }
        _ => Ok(()),
    }
}

/// Reads a copy of the database in `dir` as an open would, and writes nothing. Returns its manifest and how far its WAL
/// goes. `is_current`: see [`replay_beside_writer`].
///
/// # Errors
/// Those of an open; `Conflict` if the manifest has to be copied again.
pub(crate) fn check_copy(
    inner: &DbInner,
    dir: &Path,
    is_current: &dyn Fn() -> Result<bool>,
) -> Result<(ManifestState, WalReplayReport)> {
    let mut config = Config::new(dir).fs(Arc::clone(&inner.fs)).env(Arc::clone(&inner.env));
    config.settings = inner.settings.clone();
    config.settings.cache_size = 1 << 20;
    let mut state = RecoveryState::read(&config, list_directory(&*inner.fs, dir)?, None, OpenedAs::Reader)?;
    let report = replay_beside_writer(&mut state, &config, is_current)?;
    Ok((state.manifest_state, report))
}

/// Whether a follower may get `error` because the writer changed files while they were read.
pub(crate) fn is_changed_meanwhile(error: &Error) -> bool {
    error.is_missing_file() || matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Conflict)
}

/// What a follower takes over when it reads the database again, because the WAL that it followed is gone.
pub(crate) struct ReadAgain {
    pub(crate) manifest_state: Arc<ManifestState>,
    pub(crate) identity: ManifestIdentity,
    pub(crate) partitions: HashMap<PartitionId, Arc<PartitionState>>,
    pub(crate) resources: Arc<TreeResources>,
    /// The unfinished direct blob files, with the offsets of their ends.
    pub(crate) direct_blobs: Vec<(PartitionId, FileNumber, u64)>,
    pub(crate) last_seqno: SeqNo,
    /// The last sequence number that was read from the WAL, and the epoch of its segment.
    pub(crate) wal_seqno: SeqNo,
    pub(crate) wal_epoch: WalEpoch,
}

/// Reads the database beside a writer. The result shares nothing with an open database.
///
/// # Errors
/// Those of the files, and of `check_open`, which is called before each further attempt.
pub(crate) fn read_again(config: &Config, check_open: &dyn Fn() -> Result<()>) -> Result<ReadAgain> {
    let (state, report, identity) = read_beside_writer(config, check_open)?;
    let (last_seqno, (wal_epoch, wal_seqno)) = (state.last_seqno(&report), report.wal_end());
    let direct_blobs =
        state.unfinished_blobs.unfinished_files().map(|(id, found)| (found.partition, id, found.file.size())).collect();
    let RecoveryState { manifest_state, by_id: partitions, resources, .. } = state;
    let manifest_state = Arc::new(manifest_state);
    Ok(ReadAgain { manifest_state, identity, partitions, resources, direct_blobs, last_seqno, wal_seqno, wal_epoch })
}

/// Locks the directory. Tries again while another handle holds the lock, for at most the configured time.
fn lock_dir(config: &Config, mode: LockMode) -> Result<Box<dyn FileLock>> {
    let start = config.env.monotonic_ns();
    let (mut slept, mut pause) = (Duration::ZERO, LOCK_PAUSE_MIN);
    loop {
        match config.fs.lock_dir(&config.path, mode) {
            Err(error) if error.kind() == ErrorKind::Locked => {
                let elapsed = Duration::from_nanos(config.env.monotonic_ns().saturating_sub(start));
                // The sleeps too, so that the wait ends if the clock does not advance.
                let rest = config.lock_wait.saturating_sub(elapsed.max(slept));
                if rest.is_zero() {
                    return Err(error);
                }
                config.env.sleep(pause.min(rest));
                slept += pause.min(rest);
                pause = (pause * 2).min(LOCK_PAUSE_MAX);
            }
            locked => return locked,
        }
    }
}

/// Writes the first manifest. The database exists once the manifest has its name.
fn create_database(env: &dyn Env, fs: &Arc<dyn Fs>, dir: &Path) -> Result<()> {
    let (mut id, mut instance, mut file_id, mut seed) = ([0; 16], [0; 16], [0; 16], [0; 8]);
    for bytes in [&mut id, &mut instance, &mut file_id] {
        env.random(bytes);
    }
    env.random(&mut seed);
    let edits = [
        VersionEdit::Database { id, instance, hash_seed: u64::from_le_bytes(seed), created_ms: env.now_ms() },
        VersionEdit::NextNumbers { file: FileNumber(1), partition: PartitionId(1), epoch: WalEpoch(1) },
    ];
    Manifest::create(Arc::clone(fs), dir, file_id, &edits).map(drop)
}
