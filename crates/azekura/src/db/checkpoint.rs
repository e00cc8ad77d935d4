//! A copy of the database at one commit, made of hard links.
//!
//! The steps:
//! 1. between two commits: copy the pools that are memory, note the ledger, the end of the log and how far each of its
//!    segments is written;
//! 2. in a new directory beside `path`: link every table and blob file of the ledger (copy across file systems), copy
//!    what there is of blob files that only the log points into, of the pools (which begin no checkpoint meanwhile) and
//!    the used part of the log, write a manifest that says where the log ends, with a new instance id;
//! 3. sync all of it, rename to `path`, which must not exist, sync the parent.
//!
//! The new directory is `azekura-checkpoint-<16 hexadecimal digits>.tmp`, a random name that did not exist. Nothing
//! else is ever removed: a directory that a process left when it was killed stays until the user removes it.
//!
//! Meanwhile segments are not recycled. A file that a compaction removes between 1 and 2 makes the attempt start
//! again with a newer ledger.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::manifest_state::ManifestState;
use crate::base::sync::lock;
use crate::base::version_edit::FileNumber;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::inner::{DbInner, DbWriter};
use crate::db::recovery::is_missing;
use crate::manifest::Manifest;
use crate::vfs::fs::{PersistenceLevel, create_dirs, sync_parent_dirs};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::segment_path;
use crate::wal::options::WalSegmentInfo;

/// Attempts before giving up on a database that compacts faster than its tables can be linked.
const ATTEMPTS: usize = 20;
/// Bytes copied at a time.
const COPY_CHUNK: usize = 1 << 20;

/// The moment that is copied.
struct CheckpointState {
    manifest_state: ManifestState,
    /// Early files with their lengths, some of which the ledger may have meanwhile.
    direct_blobs: Vec<(FileNumber, PathBuf, u64)>,
    /// Of the log.
    wal_end: SeqNo,
    segments: Vec<WalSegmentInfo>,
}

/// Keeps segments from being recycled.
struct WalRecyclingPause<'a>(&'a DbInner);

impl<'a> WalRecyclingPause<'a> {
    fn new(inner: &'a DbInner) -> WalRecyclingPause<'a> {
        *lock(&inner.running_checkpoints) += 1;
        WalRecyclingPause(inner)
    }
}

impl Drop for WalRecyclingPause<'_> {
    fn drop(&mut self) {
        *lock(&self.0.running_checkpoints) -= 1;
    }
}

pub(crate) fn checkpoint(inner: &DbInner, path: &Path) -> Result<()> {
    let _call = inner.begin_api_call();
    let writer = inner.writer()?;
    inner.check_outside()?;
    let _work = inner.begin_work()?;
    let fs = &*inner.fs;
    let path = fs.absolute(path)?;
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("a checkpoint needs a path with a name").in_file(path));
    };
    if fs.exists(&path)? {
        return Err(path_exists_error(&path));
    }
    // No partition is created, deleted or given its comparator meanwhile: each pool is held, or stays as it is.
    let _names = lock(&inner.partition_ddl_lock);
    let _hold = WalRecyclingPause::new(inner);
    let created = create_dirs(fs, parent)?;
    for _ in 0..ATTEMPTS {
        let tmp = create_temporary(inner, parent)?;
        match copy_database(inner, writer, &tmp) {
            Ok(()) => return publish(fs, &tmp, &path, created),
            Err(error) => {
                drop(fs.remove_dir_all(&tmp));
                if !is_missing(&error) {
                    return Err(error);
                }
            }
        }
    }
    Err(Error::new(ErrorKind::Conflict, "compaction removes tables faster than a checkpoint can link them: try again"))
}

fn path_exists_error(path: &Path) -> Error {
    Error::invalid("a checkpoint needs a path that does not exist yet").in_file(path)
}

/// Creates a directory for the copy under a name that nothing has.
fn create_temporary(inner: &DbInner, parent: &Path) -> Result<PathBuf> {
    let mut last = Error::new(ErrorKind::Conflict, "no free name for a temporary directory");
    for _ in 0..ATTEMPTS {
        let mut random = [0; 8];
        inner.env.random(&mut random);
        let tmp = parent.join(format!("azekura-checkpoint-{:016x}.tmp", u64::from_le_bytes(random)));
        match inner.fs.create_dir(&tmp) {
            Err(error) if error.os_kind() == Some(io::ErrorKind::AlreadyExists) => last = error,
            done => return done.map(|()| tmp),
        }
    }
    Err(last)
}

/// Copies the database as it is at one moment to the empty directory `tmp`, durably but for the name of `tmp`.
fn copy_database(inner: &DbInner, writer: &DbWriter, tmp: &Path) -> Result<()> {
    // No pool may come to hold on disk what is committed behind the moment.
    let partitions = inner.catalog.all();
    let pools = || partitions.iter().filter_map(|partition| partition.pool_if_built());
    let _held: Vec<_> = pools().map(|pool| pool.block_checkpoints()).collect();
    let moment = writer.committer.run_exclusively(|| {
        // What is memory has no other moment to be copied at: writers wait for it.
        pools()
            .filter(|pool| pool.persistence_level() > PersistenceLevel::WalOnly)
            .try_for_each(|pool| pool.copy_to(tmp))?;
        Ok::<_, Error>(CheckpointState {
            direct_blobs: direct_blob_files(inner), // first: a flush may give them to the ledger
            manifest_state: writer.version_set.manifest_state(),
            wal_end: writer.wal.appended(),
            segments: writer.wal.segments(),
        })
    })?;
    write_copy(inner, &moment, &partitions, tmp)
}

/// Gives the copy in `tmp` the name `path`, durably. If that fails, the copy is removed.
fn publish(fs: &dyn Fs, tmp: &Path, path: &Path, created: usize) -> Result<()> {
    if let Err(error) = fs.rename_noreplace(tmp, path) {
        drop(fs.remove_dir_all(tmp));
        let is_taken = error.os_kind() == Some(io::ErrorKind::AlreadyExists);
        return Err(if is_taken { path_exists_error(path) } else { error });
    }
    sync_parent_dirs(fs, path, created + 1).inspect_err(|_| {
        // It is removed only when power loss cannot bring the name back: `path` must never hold half of a copy.
        let unnamed = fs.rename_noreplace(path, tmp).and_then(|()| fs.sync_dir(tmp.parent().unwrap_or(tmp)));
        if unnamed.is_ok() {
            drop(fs.remove_dir_all(tmp));
        }
    })
}

/// The blob files that the log points into and no edit names.
fn direct_blob_files(inner: &DbInner) -> Vec<(FileNumber, PathBuf, u64)> {
    let partitions = inner.catalog.all();
    let trees = partitions.iter().filter_map(|partition| partition.lsm_if_built());
    trees.flat_map(|tree| tree.direct_blob_extents()).collect()
}

fn write_copy(inner: &DbInner, moment: &CheckpointState, partitions: &[Arc<PartitionState>], tmp: &Path) -> Result<()> {
    let fs = &*inner.fs;
    for partition in partitions {
        let Some(tree) = partition.tree_if_built() else {
            partition.copy_unbuilt_pool(tmp)?;
            continue;
        };
        // Those that are memory were copied at the moment.
        if let Some(pool) = tree.pmem().filter(|pool| pool.persistence_level() == PersistenceLevel::WalOnly) {
            pool.copy_to(tmp)?;
        }
    }
    for partition in moment.manifest_state.partitions.values() {
        let files = &inner.catalog.resources().files;
        let tables = partition.all_tables().map(|table| (files.path(table.number), table.size));
        let blobs = partition.blob_files.values().map(|file| (files.blob_files().path(file.number), file.size));
        for (from, size) in tables.chain(blobs) {
            let name = from.file_name().ok_or_else(|| Error::invalid("a file of data has no name"))?;
            link_or_copy(fs, &from, &tmp.join(name), size)?;
        }
    }
    let mut manifest_state = moment.manifest_state.clone();
    let has = |logical: FileNumber| {
        let files = manifest_state.partitions.values().flat_map(|partition| partition.blob_files.values());
        files.flat_map(|file| &file.sections).any(|section| section.logical_file == logical)
    };
    // Copied, because they go on growing here.
    for (_, from, len) in moment.direct_blobs.iter().filter(|(id, ..)| !has(*id)) {
        let name = from.file_name().ok_or_else(|| Error::invalid("a file of data has no name"))?;
        copy_file(fs, from, &tmp.join(name), *len)?;
    }
    manifest_state.wal_segments.clear();
    for segment in &moment.segments {
        copy_file(fs, &segment_path(&inner.dir, segment.file), &segment_path(tmp, segment.file), segment.end_offset)?;
        manifest_state.wal_segments.insert(segment.epoch, segment.file);
    }
    if let Some(last) = moment.segments.last() {
        manifest_state.wal_end = Some((last.epoch, moment.wal_end));
    }
    let mut file_id = [0; 16];
    inner.env.random(&mut manifest_state.instance);
    inner.env.random(&mut file_id);
    Manifest::create(Arc::clone(&inner.fs), tmp, file_id, &manifest_state.edits())?;
    fs.sync_dir(tmp)
}

fn link_or_copy(fs: &dyn Fs, from: &Path, to: &Path, len: u64) -> Result<()> {
    match fs.hard_link(from, to) {
        Err(error) if error.kind() == ErrorKind::Unsupported => copy_file(fs, from, to, len),
        other => other,
    }
}

/// Copies the first `len` bytes, durably but for the name.
fn copy_file(fs: &dyn Fs, from: &Path, to: &Path, len: u64) -> Result<()> {
    let (source, target) = (fs.open(from, OpenMode::Read)?, fs.open(to, OpenMode::Create)?);
    let mut buffer = vec![0; COPY_CHUNK.min(usize::try_from(len).unwrap_or(COPY_CHUNK))];
    let mut at = 0;
    while at < len {
        let n = buffer.len().min(usize::try_from(len - at).unwrap_or(usize::MAX));
        source.read_exact_at(&mut buffer[..n], at).map_err(|error| error.in_file(from))?;
        target.write_at(&buffer[..n], at)?;
        at += n as u64;
    }
    target.sync_data()
}
