//! The tree of a follower: another process writes the files, and this one installs what they contain.
//!
//! The memtables have every record from the write-ahead log (WAL) that the tables lack. So at the end of the WAL that
//! was read, the old tables with all memtables, and the newer tables with the rest of the memtables, are the same
//! state. A reader of an earlier moment needs the old one, because compactions drop what only it needs.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::blob_pointer::BlobPointer;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::manifest_state::PartitionManifestState;
use crate::base::sync::lock;
use crate::base::version_edit::{BlobFileMeta, FileNumber, TableMeta};
use crate::base::{ErrorKind, Result, SeqNo};
use crate::blob::reader::BlobReadAhead;
use crate::block::BlockHandle;
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::direct_file::{DirectBlobFile, DirectBlobFiles};
use crate::lsm::read::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::{HasTableMeta, Version};
use crate::memtable::Memtable;

/// Bytes at which a memtable of a follower is sealed, because the one that a flush has written in part is copied.
const MEMTABLE_SIZE_MAX: u64 = 8 << 20;

/// A state that the manifest names. Its files are open.
pub(crate) struct NewerState {
    version: Version<TableHandle>,
    flushed_through: SeqNo,
    active: Arc<Memtable>,
    sealed: Vec<Arc<Memtable>>,
}

impl LsmTree {
    /// Limits the size of memtables.
    pub(crate) fn limit_memtables(&self) {
        self.max_memtable_size.fetch_min(MEMTABLE_SIZE_MAX, Ordering::Relaxed);
    }

    /// Opens all tables and blob files. They stay open, and can be read after the writer has removed them.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn open_files(&self) -> Result<()> {
        open_files(&self.version())
    }

    /// Opens the files that the manifest names, and chooses the records of the memtables that the tables lack: those of
    /// `memtables`, or of this tree if it is `None`. The caller prevents insertions until the result is
    /// [installed](LsmTree::install_newer).
    ///
    /// # Errors
    /// `Corruption` if the manifest contradicts itself; those of the files; `OutOfSpace` if there is no memory.
    pub(crate) fn open_newer(
        &self,
        stored: &PartitionManifestState,
        memtables: Option<&LsmTree>,
    ) -> Result<NewerState> {
        let (context, options, order) = (&self.context, self.options(), &self.context.order);
        let before = self.current.get();
        let tables: HashMap<FileNumber, &Arc<TableHandle>> =
            before.version.tables().map(|(_, table)| (table.meta().number, table)).collect();
        let table = |(level, meta): &(u8, TableMeta)| {
            let known = tables.get(&meta.number).filter(|known| known.meta() == meta);
            let new = || TableHandle::new(meta.clone(), None, Arc::clone(context), options.read_options(*level));
            (*level, known.map_or_else(new, |known| Arc::clone(known)))
        };
        let blobs: HashMap<FileNumber, &Arc<BlobHandle>> =
            before.version.blobs().handles().map(|file| (file.meta().number, file)).collect();
        let blob = |meta: &BlobFileMeta| {
            let known = blobs.get(&meta.number).filter(|known| known.meta() == meta);
            known.map_or_else(|| context.blob_handle(meta.clone()), |known| Arc::clone(known))
        };
        let version = Version::restore(stored.tables.values().map(table).collect(), order)?;
        let version = version.restore_range_tombstones(stored.range_tombstones.values().cloned().collect(), order)?;
        let version = version.restore_blobs(stored.blob_files.values().map(blob).collect())?;
        open_files(&version)?;
        let from = memtables.map(|tree| tree.current.get());
        let SuperVersion { active, sealed, .. } = from.as_ref().unwrap_or(&before);
        let through = stored.flushed_seqno;
        let rest = |memtable: &Arc<Memtable>| -> Result<Option<Arc<Memtable>>> {
            if memtable.is_empty() || memtable.largest_seqno() <= through {
                return Ok(None);
            }
            if memtable.smallest_seqno() > through {
                return Ok(Some(Arc::clone(memtable)));
            }
            let copy = context.new_memtable();
            memtable.copy_newer(through, &copy)?;
            Ok((!copy.is_empty()).then_some(copy))
        };
        let active = rest(active)?.unwrap_or_else(|| context.new_memtable());
        let sealed = sealed.iter().filter_map(|memtable| rest(memtable).transpose()).collect::<Result<Vec<_>>>()?;
        sealed.iter().for_each(|memtable| memtable.seal());
        Ok(NewerState { version, flushed_through: through, active, sealed })
    }

    /// Replaces the tables and the memtables.
    pub(crate) fn install_newer(&self, newer: NewerState) {
        let NewerState { version, flushed_through, active: next, sealed } = newer;
        let version = Arc::new(version);
        let mut active = lock(&self.active_memtable);
        let before = self.current.get();
        let pointed: BTreeSet<FileNumber> = std::iter::once(&next)
            .chain(&sealed)
            .flat_map(|memtable| memtable.blob_pointer_counts())
            .map(|(logical, _)| logical)
            .collect();
        let is_needed = |id: &FileNumber| pointed.contains(id) && !version.blobs().contains(*id);
        let direct_blobs: DirectBlobFiles = before
            .direct_blobs
            .iter()
            .filter(|(id, _)| is_needed(id))
            .map(|(id, file)| (*id, Arc::clone(file)))
            .collect();
        self.current.replace(|now| SuperVersion {
            active: Arc::clone(&next),
            sealed: sealed.into(),
            version: Arc::clone(&version),
            direct_blobs: Arc::new(direct_blobs),
            flushed_through: now.flushed_through.max(flushed_through),
            has_older_range_deletes: false,
        });
        let replaced = std::mem::replace(&mut *active, next);
        if !Arc::ptr_eq(&replaced, &active) {
            replaced.seal();
        }
        drop(active);
        self.dead_ranges.note_ingest(); // records may be new that no insertion has told of
        release_files(&before, &version);
    }

    /// Makes the value of a pointer of the WAL readable. False if there is no such value. `is_checked`: see
    /// [`grow_direct_file`].
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn follow_pointer(&self, pointer: &BlobPointer, is_checked: bool) -> Result<bool> {
        let id = pointer.logical_file;
        let known =
            self.current.with(|now| (now.direct_blobs.get(&id).cloned(), now.version.blobs().handle(id).is_some()));
        match known {
            (_, true) => Ok(true),
            (Some(direct), false) => grow_direct_file(&direct, pointer, is_checked),
            (None, false) => match open_direct_file(&self.context, id, pointer.frame_end())? {
                Some(direct) if grow_direct_file(&direct, pointer, is_checked)? => {
                    self.add_direct_blob_files([direct]);
                    Ok(true)
                }
                _ => Ok(false),
            },
        }
    }
}

/// Opens a direct blob file of the writer, readable up to `end`. `None` if it is gone or has no header.
///
/// # Errors
/// `Io`.
pub(crate) fn open_direct_file(context: &TreeContext, id: FileNumber, end: u64) -> Result<Option<Arc<DirectBlobFile>>> {
    let mut header = [0; FileHeader::LEN];
    let opened = context.files.blob_files().get(id).and_then(|file| {
        file.read_exact_at(&mut header, 0)?;
        FileHeader::decode(FileKind::Blob, &header)
    });
    match opened {
        Err(error) if error.is_missing_file() || error.kind() == ErrorKind::Corruption => Ok(None),
        Err(error) => Err(error.in_file(context.files.blob_files().path(id))),
        Ok(header) => {
            let handle = context.growing_blob_handle(id, None, header.file_id, end);
            Ok(Some(DirectBlobFile::new(handle, 0, 0, None)))
        }
    }
}

/// Makes a direct blob file readable up to the value of a pointer. `is_checked`: reads the value, because power loss
/// may have taken it, and returns false if it does not verify.
///
/// # Errors
/// `Io`.
pub(crate) fn grow_direct_file(direct: &DirectBlobFile, pointer: &BlobPointer, is_checked: bool) -> Result<bool> {
    let file = direct.handle.file();
    if direct.written() < pointer.frame_end() {
        file.grow_to(pointer.frame_end());
    }
    if is_checked {
        let frame = BlockHandle { offset: pointer.frame_offset, len: pointer.frame_len };
        match file.with_frame(frame, &mut BlobReadAhead::adaptive(), |_| Ok(())) {
            // Also of a file that the writer has removed since, because a newer manifest has the value elsewhere.
            Err(error) if error.is_missing_file() || error.kind() == ErrorKind::Corruption => return Ok(false),
            read => read?,
        }
    }
    Ok(true)
}

fn open_files(version: &Version<TableHandle>) -> Result<()> {
    version.tables().try_for_each(|(_, table)| table.table().map(drop))?;
    version.blobs().handles().try_for_each(|handle| handle.file().open_file())
}

/// Closes the files of `before` that `version` does not have, once no reader needs them.
fn release_files(before: &SuperVersion, version: &Version<TableHandle>) {
    let tables: BTreeSet<FileNumber> = version.tables().map(|(_, table)| table.meta().number).collect();
    let unused = before.version.tables().map(|(_, table)| table);
    unused.filter(|table| !tables.contains(&table.meta().number)).for_each(|table| table.mark_obsolete());
    let direct = before.direct_blobs.values().map(|file| &file.handle);
    let blobs = before.version.blobs().handles().chain(direct);
    blobs.filter(|file| !version.blobs().contains(file.meta().number)).for_each(|file| file.mark_obsolete());
}
