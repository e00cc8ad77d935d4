//! Writes a copy of the database as of one commit, built of hard links where possible.
//!
//! Steps:
//! 1. Between two commits: copy the mapped pools, and record the manifest state, the end of the write-ahead log (WAL)
//!    and the written length of each of its segments.
//! 2. In a new directory beside `path`: hard-link every table and blob file of the manifest state (or copy it, if the
//!    file system does not support the link). Copy the direct blob files that no version edit has added yet, the pools
//!    that are not mapped, and the written part of the WAL. Write a manifest with the end of the WAL and a new
//!    instance id.
//! 3. Sync all files, rename the directory to `path`, which must not exist, and sync the parent.
//!
//! The new directory is `azekura-checkpoint-<16 hexadecimal digits>.tmp`, with a random number for which no directory
//! existed. A failed checkpoint removes only this directory. If the process is killed, the directory stays until the
//! user removes it.
//!
//! While a checkpoint runs, no WAL segment is recycled and no checkpoint of a pool runs. If a compaction removes a file
//! between steps 1 and 2, the attempt is repeated with a newer manifest state.
//!
//! A [follower](crate::db::catch_up) copies the files of a writer that it cannot stop: the manifest first, then the
//! tables and the pools, whose records are all in the WAL, then the WAL, and last the direct blob files, because the
//! writer writes a value before the commit that points to it. Then it reads the copy as recovery does, which notices a
//! copy that is not of one moment, and repeats the attempt. The copy ends before an ingest whose tables the copied
//! manifest does not name.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::manifest_state::{ManifestState, PartitionManifestState};
use crate::base::sync::lock;
use crate::base::version_edit::FileNumber;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::inner::{DbInner, DbWriter};
use crate::db::partition_state::PartitionState;
use crate::db::recovery::open::{check_copy, check_same_open, is_changed_meanwhile};
use crate::db::recovery::recovery_state::check_followable;
use crate::manifest::Manifest;
use crate::tree::stored_tree;
use crate::vfs::fs::{create_dirs, sync_parent_dirs};
use crate::vfs::open_files::{DataFileKind, parse_data_file_name};
use crate::vfs::{Fs, OpenMode};
use crate::wal::format::{parse_segment_name, segment_path};
use crate::wal::options::WalSegmentInfo;

/// Maximum number of attempts to copy the files, which fail if compactions remove tables before they are linked; also
/// of attempts to find a free directory name.
const ATTEMPTS: usize = 20;
/// Bytes copied at a time.
const COPY_CHUNK: usize = 1 << 20;

/// State of the database between two commits, which the checkpoint copies.
struct CheckpointState {
    manifest_state: ManifestState,
    /// Direct blob files with their paths and lengths in bytes. `manifest_state` may contain some of them too, because
    /// a flush may add them after they are listed.
    unlisted_blobs: Vec<(FileNumber, PathBuf, u64)>,
    /// The highest sequence number that the WAL contains.
    wal_end: SeqNo,
    segments: Vec<WalSegmentInfo>,
}

/// Implements [`Database::checkpoint`](crate::Database::checkpoint).
pub(crate) fn checkpoint(inner: &DbInner, path: &Path) -> Result<()> {
    let _call = inner.begin_api_call();
    let writer = if inner.follower.is_some() { None } else { Some(inner.writer()?) };
    inner.check_outside()?;
    let _work = inner.begin_work()?;
    let fs = &*inner.fs;
    let path = fs.absolute(path)?;
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("the checkpoint path has no file name").in_file(path));
    };
    if fs.exists(&path)? {
        return Err(path_exists_error(&path));
    }
    // While this lock is held, no partition is created or deleted and no tree is built. So the files of a pool without
    // a tree do not change, and `copy_database` can block the checkpoints of every other pool.
    let _ddl_guard = lock(&inner.partition_ddl_lock);
    let _retirement_pause = writer.map(|writer| writer.wal_maintenance.pause_retirement());
    let created = create_dirs(fs, parent)?;
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let tmp = create_temporary(inner, parent)?;
        let copied = match writer {
            Some(writer) => copy_database(inner, writer, &tmp),
            None => copy_beside_writer(inner, &tmp),
        };
        let error = match copied {
            Ok(()) => return publish(fs, &tmp, &path, created),
            Err(error) => error,
        };
        drop(fs.remove_dir_all(&tmp));
        match writer {
            Some(_) if error.is_missing_file() => {}
            None if is_changed_meanwhile(&error) => last = Some(error),
            _ => return Err(error),
        }
        inner.check_open()?; // `close` waits for this call
    }
    let message = "compaction removes tables faster than a checkpoint can link them: try again";
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Conflict, message)))
}

/// In a follower: copies the database, as of some commit that is not before the visible one, to the empty directory
/// `tmp`. The content is durable, but not the name of `tmp`.
///
/// # Errors
/// Those of [`is_changed_meanwhile`] if the writer has changed files meanwhile.
fn copy_beside_writer(inner: &DbInner, tmp: &Path) -> Result<()> {
    let (fs, dir) = (&*inner.fs, &inner.dir);
    let identity = Manifest::identity(fs, dir)?;
    let loaded = Manifest::load(Arc::clone(&inner.fs), dir)?;
    let manifest_state = ManifestState::replay(&loaded.edits)?;
    if let Some(follower) = &inner.follower {
        follower.check_same_database(&manifest_state)?;
    }
    let mut id = [0; 16];
    inner.env.random(&mut id);
    Manifest::create(Arc::clone(&inner.fs), tmp, id, &loaded.edits)?;
    // Pools before the WAL, which contains every record that may be in them.
    for partition in manifest_state.partitions.values() {
        check_followable(&partition.meta)?;
        stored_tree::copy_beside_writer(inner.catalog.resources(), &partition.meta, tmp)?;
        link_files(inner, partition, tmp)?;
    }
    for entry in fs.read_dir(dir)?.into_iter().filter(|entry| parse_segment_name(&entry.name).is_some()) {
        let (from, to) = (dir.join(&entry.name), tmp.join(&entry.name));
        copy_file(fs, &from, &to, entry.len)?;
    }
    let has = named_blob_files(&manifest_state);
    for entry in fs.read_dir(dir)? {
        let (from, to) = (dir.join(&entry.name), tmp.join(&entry.name));
        match parse_data_file_name(&entry.name) {
            // Records of the WAL may point into it.
            Some((DataFileKind::Blob, id)) if !has.contains(&id) => copy_file(fs, &from, &to, entry.len)?,
            _ => {}
        }
    }
    let is_current = || Ok(Manifest::identity(fs, dir)? == identity);
    let (mut copied, report) = check_copy(inner, tmp, &is_current)?;
    check_same_open(&inner.fs, dir, &manifest_state, &identity)?;
    let visible = inner.last_visible.get();
    if report.last_seqno < visible {
        return Err(Error::new(ErrorKind::Conflict, "the writer has changed the log while it was copied"));
    }
    for segment in &report.segments {
        let file = fs.open(&segment_path(tmp, segment.file), OpenMode::Write)?;
        file.set_length(segment.end_offset)?;
        file.sync_data()?;
    }
    let is_kept = |file: &FileNumber| report.segments.iter().any(|segment| segment.file == *file);
    for name in fs.read_dir(tmp)?.into_iter().map(|entry| entry.name) {
        if parse_segment_name(&name).is_some_and(|file| !is_kept(&file)) {
            fs.remove_file(&tmp.join(name))?;
        }
    }
    set_wal(&mut copied, &report.segments, report.last_seqno);
    create_manifest(inner, copied, tmp)
}

fn path_exists_error(path: &Path) -> Error {
    Error::invalid("the checkpoint path exists already").in_file(path)
}

/// Creates a directory for the copy under a free name.
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

/// Copies the database, as of a point between two commits, to the empty directory `tmp`. The content is durable, but
/// not the name of `tmp`.
fn copy_database(inner: &DbInner, writer: &DbWriter, tmp: &Path) -> Result<()> {
    // A checkpoint of a pool could write commits after the checkpoint state to the files that are copied below.
    let partitions = inner.catalog.all();
    let trees = || partitions.iter().filter_map(|partition| partition.tree_if_built());
    let _blocked_checkpoints: Vec<_> = trees().filter_map(|tree| tree.block_checkpoints()).collect();
    let state = writer.committer.run_exclusively(|| {
        // Each commit changes a mapped pool in place, so it is copied here, where writers wait.
        trees().filter(|tree| !tree.needs_wal()).try_for_each(|tree| tree.copy_to(tmp))?;
        Ok::<_, Error>(CheckpointState {
            // Listed first, because a flush may add them to the manifest state at any time.
            unlisted_blobs: unlisted_blob_files(inner),
            manifest_state: writer.version_set.manifest_state(),
            wal_end: writer.wal.appended(),
            segments: writer.wal.segments(),
        })
    })?;
    write_copy(inner, &state, &partitions, tmp)
}

/// Renames `tmp` to `path` durably. After a failure the copy is removed.
fn publish(fs: &dyn Fs, tmp: &Path, path: &Path, created: usize) -> Result<()> {
    if let Err(error) = fs.rename_noreplace(tmp, path) {
        drop(fs.remove_dir_all(tmp));
        let is_taken = error.os_kind() == Some(io::ErrorKind::AlreadyExists);
        return Err(if is_taken { path_exists_error(path) } else { error });
    }
    sync_parent_dirs(fs, path, created + 1).inspect_err(|_| {
        // The copy is removed only after the reverse rename is durable. Otherwise power loss could restore the name
        // `path` for a partly removed copy.
        let renamed_back = fs.rename_noreplace(path, tmp).and_then(|()| fs.sync_dir(tmp.parent().unwrap_or(tmp)));
        if renamed_back.is_ok() {
            drop(fs.remove_dir_all(tmp));
        }
    })
}

/// The blob files that WAL records may point to and that no version edit has added.
fn unlisted_blob_files(inner: &DbInner) -> Vec<(FileNumber, PathBuf, u64)> {
    let partitions = inner.catalog.all();
    let trees = partitions.iter().filter_map(|partition| partition.tables_if_built());
    trees.flat_map(|tree| tree.direct_blob_extents()).collect()
}

fn write_copy(inner: &DbInner, state: &CheckpointState, partitions: &[Arc<PartitionState>], tmp: &Path) -> Result<()> {
    let fs = &*inner.fs;
    for partition in partitions {
        let Some(tree) = partition.tree_if_built() else {
            partition.copy_unbuilt(tmp)?;
            continue;
        };
        // Mapped pools were copied between two commits.
        if tree.needs_wal() {
            tree.copy_to(tmp)?;
        }
    }
    for partition in state.manifest_state.partitions.values() {
        link_files(inner, partition, tmp)?;
    }
    let mut manifest_state = state.manifest_state.clone();
    let has = named_blob_files(&manifest_state);
    // Direct blob files are copied, because a hard link would receive the values that the database still appends.
    for (_, from, len) in state.unlisted_blobs.iter().filter(|(id, ..)| !has.contains(id)) {
        let name = from.file_name().ok_or_else(|| Error::invalid("a data file has no name"))?;
        copy_file(fs, from, &tmp.join(name), *len)?;
    }
    for segment in &state.segments {
        copy_file(fs, &segment_path(&inner.dir, segment.file), &segment_path(tmp, segment.file), segment.end_offset)?;
    }
    debug_assert!(
        state.segments.last().is_none_or(|last| last.last_seqno >= state.wal_end),
        "the copied segments contain the whole WAL"
    );
    set_wal(&mut manifest_state, &state.segments, state.wal_end);
    create_manifest(inner, manifest_state, tmp)
}

/// The blob files and logical files of a manifest.
fn named_blob_files(manifest_state: &ManifestState) -> HashSet<FileNumber> {
    let files = manifest_state.partitions.values().flat_map(|partition| partition.blob_files.values());
    files.flat_map(|file| file.sections.iter().map(|section| section.logical_file).chain([file.number])).collect()
}

/// Links the tables and blob files of a partition.
fn link_files(inner: &DbInner, partition: &PartitionManifestState, tmp: &Path) -> Result<()> {
    let files = &inner.catalog.resources().files;
    let tables = partition.all_tables().map(|table| (files.path(table.number), table.size));
    let blobs = partition.blob_files.values().map(|file| (files.blob_files().path(file.number), file.size));
    for (from, size) in tables.chain(blobs) {
        let name = from.file_name().ok_or_else(|| Error::invalid("a data file has no name"))?;
        link_or_copy(&*inner.fs, &from, &tmp.join(name), size)?;
    }
    Ok(())
}

/// Records the segments of a copied WAL, oldest first, and its end.
fn set_wal(manifest_state: &mut ManifestState, segments: &[WalSegmentInfo], end: SeqNo) {
    debug_assert!(segments.is_sorted_by(|a, b| a.epoch < b.epoch), "the oldest segment is the first");
    manifest_state.wal_segments = segments.iter().map(|segment| (segment.epoch, segment.file)).collect();
    if let Some(last) = segments.last() {
        manifest_state.set_wal_end(last.epoch, end);
    }
}

/// Writes the manifest of a copy, with an instance id of its own.
fn create_manifest(inner: &DbInner, mut manifest_state: ManifestState, tmp: &Path) -> Result<()> {
    let mut file_id = [0; 16];
    inner.env.random(&mut manifest_state.instance);
    inner.env.random(&mut file_id);
    let edits = manifest_state.edits();
    debug_assert!(ManifestState::replay(&edits).is_ok(), "the next open accepts the manifest of the copy");
    Manifest::create(Arc::clone(&inner.fs), tmp, file_id, &edits)?;
    inner.fs.sync_dir(tmp)
}

fn link_or_copy(fs: &dyn Fs, from: &Path, to: &Path, len: u64) -> Result<()> {
    match fs.hard_link(from, to) {
        Err(error) if error.kind() == ErrorKind::Unsupported => copy_file(fs, from, to, len),
        other => other,
    }
}

/// Copies the first `len` bytes of a file. The content is durable, but not the name.
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
