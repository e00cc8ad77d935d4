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

use crate::base::edit::FileId;
use crate::base::ledger::Ledger;
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::recovery::is_missing;
use crate::db::shared::{Shared, Writer};
use crate::manifest::Manifest;
use crate::vfs::fs::{PersistenceLevel, create_dirs, sync_names_above};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::segment_path;
use crate::wal::options::SegmentInfo;

/// Attempts before giving up on a database that compacts faster than its tables can be linked.
const ATTEMPTS: usize = 20;
/// Bytes copied at a time.
const COPY_CHUNK: usize = 1 << 20;

/// The moment that is copied.
struct Moment {
    ledger: Ledger,
    /// Early files with their lengths, some of which the ledger may have meanwhile.
    early: Vec<(FileId, PathBuf, u64)>,
    /// Of the log.
    end: SeqNo,
    segments: Vec<SegmentInfo>,
}

/// Keeps segments from being recycled.
struct Hold<'a>(&'a Shared);

impl<'a> Hold<'a> {
    fn new(shared: &'a Shared) -> Hold<'a> {
        *lock(&shared.checkpoints) += 1;
        Hold(shared)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        *lock(&self.0.checkpoints) -= 1;
    }
}

pub(crate) fn checkpoint(shared: &Shared, path: &Path) -> Result<()> {
    let _call = shared.begin_call();
    let writer = shared.writer()?;
    shared.check_outside()?;
    let _shift = shared.begin_work()?;
    let fs = &*shared.fs;
    let path = fs.absolute(path)?;
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("a checkpoint needs a path with a name").in_file(path));
    };
    if fs.exists(&path)? {
        return Err(taken(&path));
    }
    // No partition is created, deleted or given its comparator meanwhile: each pool is held, or stays as it is.
    let _names = lock(&shared.naming);
    let _hold = Hold::new(shared);
    let created = create_dirs(fs, parent)?;
    for _ in 0..ATTEMPTS {
        let tmp = create_temporary(shared, parent)?;
        match copy_database(shared, writer, &tmp) {
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

fn taken(path: &Path) -> Error {
    Error::invalid("a checkpoint needs a path that does not exist yet").in_file(path)
}

/// Creates a directory for the copy under a name that nothing has.
fn create_temporary(shared: &Shared, parent: &Path) -> Result<PathBuf> {
    let mut last = Error::new(ErrorKind::Conflict, "no free name for a temporary directory");
    for _ in 0..ATTEMPTS {
        let mut random = [0; 8];
        shared.env.random(&mut random);
        let tmp = parent.join(format!("azekura-checkpoint-{:016x}.tmp", u64::from_le_bytes(random)));
        match shared.fs.create_dir(&tmp) {
            Err(error) if error.os_kind() == Some(io::ErrorKind::AlreadyExists) => last = error,
            done => return done.map(|()| tmp),
        }
    }
    Err(last)
}

/// Copies the database as it is at one moment to the empty directory `tmp`, durably but for the name of `tmp`.
fn copy_database(shared: &Shared, writer: &Writer, tmp: &Path) -> Result<()> {
    // No pool may come to hold on disk what is committed behind the moment.
    let partitions = shared.catalog.all();
    let pools = || partitions.iter().filter_map(|partition| partition.pool_if_built());
    let _held: Vec<_> = pools().map(|pool| pool.hold()).collect();
    let moment = writer.committer.alone(|| {
        // What is memory has no other moment to be copied at: writers wait for it.
        pools().filter(|pool| pool.level() > PersistenceLevel::Logged).try_for_each(|pool| pool.copy_to(tmp))?;
        Ok::<_, Error>(Moment {
            early: early_files(shared), // first: a flush may give them to the ledger
            ledger: writer.metadata.ledger(),
            end: writer.wal.appended(),
            segments: writer.wal.segments(),
        })
    })?;
    build(shared, &moment, &partitions, tmp)
}

/// Gives the copy in `tmp` the name `path`, durably. If that fails, the copy is removed.
fn publish(fs: &dyn Fs, tmp: &Path, path: &Path, created: usize) -> Result<()> {
    if let Err(error) = fs.rename_new(tmp, path) {
        drop(fs.remove_dir_all(tmp));
        let is_taken = error.os_kind() == Some(io::ErrorKind::AlreadyExists);
        return Err(if is_taken { taken(path) } else { error });
    }
    sync_names_above(fs, path, created + 1).inspect_err(|_| {
        // It is removed only when power loss cannot bring the name back: `path` must never hold half of a copy.
        let unnamed = fs.rename_new(path, tmp).and_then(|()| fs.sync_dir(tmp.parent().unwrap_or(tmp)));
        if unnamed.is_ok() {
            drop(fs.remove_dir_all(tmp));
        }
    })
}

/// The blob files that the log points into and no edit names.
fn early_files(shared: &Shared) -> Vec<(FileId, PathBuf, u64)> {
    let partitions = shared.catalog.all();
    let trees = partitions.iter().filter_map(|partition| partition.lsm_if_built());
    trees.flat_map(|tree| tree.early_extents()).collect()
}

fn build(shared: &Shared, moment: &Moment, partitions: &[Arc<PartitionState>], tmp: &Path) -> Result<()> {
    let fs = &*shared.fs;
    for partition in partitions {
        let Some(tree) = partition.tree_if_built() else {
            partition.copy_unbuilt_pool(tmp)?;
            continue;
        };
        // Those that are memory were copied at the moment.
        if let Some(pool) = tree.pmem().filter(|pool| pool.level() == PersistenceLevel::Logged) {
            pool.copy_to(tmp)?;
        }
    }
    for partition in moment.ledger.partitions.values() {
        let files = &shared.catalog.parts().files;
        let tables = partition.tables.values().map(|(_, table)| table).chain(partition.spilled.values());
        let tables = tables.map(|table| (files.path(table.id), table.size));
        let blobs = partition.blobs.values().map(|file| (files.blobs().path(file.id), file.size));
        for (from, size) in tables.chain(blobs) {
            let name = from.file_name().ok_or_else(|| Error::invalid("a file of data has no name"))?;
            link_or_copy(fs, &from, &tmp.join(name), size)?;
        }
    }
    let mut ledger = moment.ledger.clone();
    let has = |logical: FileId| {
        let files = ledger.partitions.values().flat_map(|partition| partition.blobs.values());
        files.flat_map(|file| &file.sections).any(|section| section.logical == logical)
    };
    // Copied, because they go on growing here.
    for (_, from, len) in moment.early.iter().filter(|(id, ..)| !has(*id)) {
        let name = from.file_name().ok_or_else(|| Error::invalid("a file of data has no name"))?;
        copy(fs, from, &tmp.join(name), *len)?;
    }
    ledger.segments.clear();
    for segment in &moment.segments {
        copy(fs, &segment_path(&shared.dir, segment.file), &segment_path(tmp, segment.file), segment.end)?;
        ledger.segments.insert(segment.epoch, segment.file);
    }
    if let Some(last) = moment.segments.last() {
        ledger.log_end = Some((last.epoch, moment.end));
    }
    let mut file_id = [0; 16];
    shared.env.random(&mut ledger.instance);
    shared.env.random(&mut file_id);
    Manifest::create(Arc::clone(&shared.fs), tmp, file_id, &ledger.edits())?;
    fs.sync_dir(tmp)
}

fn link_or_copy(fs: &dyn Fs, from: &Path, to: &Path, len: u64) -> Result<()> {
    match fs.hard_link(from, to) {
        Err(error) if error.kind() == ErrorKind::Unsupported => copy(fs, from, to, len),
        other => other,
    }
}

/// Copies the first `len` bytes, durably but for the name.
fn copy(fs: &dyn Fs, from: &Path, to: &Path, len: u64) -> Result<()> {
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
