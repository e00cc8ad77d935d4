//! Blob files that the write-ahead log (WAL) refers to and the manifest does not contain, because the process that
//! wrote them ended before it finished them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::writer::DirectBlobWriter;
use crate::block::frame::FRAME_HEADER_LEN;
use crate::block::{BlockCache, BlockHandle};
use crate::vfs::File;
use crate::vfs::open_files::DataFiles;

/// Checks every value that the replayed WAL refers to and that no flush has made permanent. Only reads. Uses memory
/// for one value, and a few bytes for each pointer.
pub(crate) struct UnfinishedBlobFiles {
    files: DataFiles,
    cache: Arc<BlockCache>,
    partitions: BTreeMap<PartitionId, FlushedBlobs>,
    unfinished: BTreeMap<FileNumber, UnfinishedBlobFile>,
    /// One more than the highest logical file number of any pointer.
    next_file_number: u64,
}

/// The state of a partition in the manifest.
struct FlushedBlobs {
    /// See [`PartitionManifestState::permanent`](crate::base::manifest_state::PartitionManifestState::permanent).
    permanent: SeqNo,
    logical: BTreeSet<FileNumber>,
}

/// A file that the manifest assigns to no partition, and its referenced values.
pub(crate) struct UnfinishedBlobFile {
    pub(crate) partition: PartitionId,
    pub(crate) file: BlobFile,
    pub(crate) file_id: [u8; 16],
    pub(crate) frames: BTreeMap<u32, BlockHandle>,
}

impl UnfinishedBlobFiles {
    /// `files` is the cache of blob files.
    pub(crate) fn new(manifest_state: &ManifestState, files: DataFiles, cache: Arc<BlockCache>) -> UnfinishedBlobFiles {
        let partitions = manifest_state.partitions.iter().map(|(id, partition)| {
            let sections = partition.blob_files.values().flat_map(|file| &file.sections);
            let logical = sections.map(|section| section.logical_file).collect();
            (*id, FlushedBlobs { permanent: partition.permanent(), logical })
        });
        let partitions = partitions.collect();
        UnfinishedBlobFiles { files, cache, partitions, unfinished: BTreeMap::new(), next_file_number: 0 }
    }

    /// Checks the pointers of one commit. Returns an error if one of them refers to no value, which is possible if
    /// the commit was not durable. The pointers are recorded only if all of them refer to values.
    ///
    /// # Errors
    /// `Io`, and `Unsupported` for a file of a newer version.
    pub(crate) fn check_commit(&mut self, pointers: &[(PartitionId, SeqNo, BlobPointer)]) -> Result<Option<Error>> {
        for (_, _, pointer) in pointers {
            self.next_file_number = self.next_file_number.max(pointer.logical_file.0.saturating_add(1));
        }
        let wanted = |(partition, seqno, pointer): &&(PartitionId, SeqNo, BlobPointer)| {
            let known = self.partitions.get(partition);
            known.is_some_and(|known| *seqno > known.permanent && !known.logical.contains(&pointer.logical_file))
        };
        let wanted: Vec<_> = pointers.iter().filter(wanted).collect();
        for (partition, _, pointer) in &wanted {
            match self.check_pointer(*partition, pointer) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Corruption => return Ok(Some(error)),
                Err(error) => return Err(error),
            }
        }
        for (_, _, pointer) in wanted {
            if let Some(found) = self.unfinished.get_mut(&pointer.logical_file) {
                found.frames.insert(pointer.ordinal, frame_handle(pointer));
            }
        }
        Ok(None)
    }

    /// Checks the value that a pointer of the WAL refers to.
    ///
    /// # Errors
    /// `Corruption` if there is no such value, `Io`, and `Unsupported` for a file of a newer version.
    pub(crate) fn check_pointer(&mut self, partition: PartitionId, pointer: &BlobPointer) -> Result<()> {
        let id = pointer.logical_file;
        let found = match self.unfinished.entry(id) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(free) => free.insert(open_unfinished(&self.files, &self.cache, id, partition)?),
        };
        let at = |error: Error| error.at_offset(pointer.frame_offset).in_file(self.files.path(id));
        let is_different = found.frames.get(&pointer.ordinal).is_some_and(|frame| *frame != frame_handle(pointer));
        if is_different || found.partition != partition || u64::from(pointer.ordinal) >= SECTION_VALUES_MAX {
            return Err(at(Error::corruption("blob pointers in the WAL contradict each other")));
        }
        found.file.with_frame(frame_handle(pointer), &mut BlobReadAhead::adaptive(), |frame| {
            match frame.raw_len == pointer.value_len as usize && pointer.frame_offset >= FileHeader::LEN as u64 {
                true => Ok(()),
                false => Err(Error::corruption("length of the value differs from its blob pointer")),
            }
        })
    }

    /// Lowest number for a new file: the WAL, or an invalid end of it, may refer to lower ones.
    pub(crate) fn next_file_number(&self) -> u64 {
        self.next_file_number
    }

    /// Whether the WAL refers to a value in this file.
    pub(crate) fn contains(&self, id: FileNumber) -> bool {
        self.unfinished.get(&id).is_some_and(|found| !found.frames.is_empty())
    }

    /// The files with at least one referenced value.
    pub(crate) fn unfinished_files(&self) -> impl Iterator<Item = (FileNumber, &UnfinishedBlobFile)> {
        self.unfinished.iter().filter(|(_, found)| !found.frames.is_empty()).map(|(id, found)| (*id, found))
    }
}

impl UnfinishedBlobFile {
    /// Length in bytes of all referenced frames.
    pub(crate) fn referenced_bytes(&self) -> u64 {
        self.frames.values().map(|frame| frame.len).sum()
    }

    /// Finishes file `id` durably without copying its values. `file` is its handle for writing. Cuts off what follows
    /// the last referenced value. Overwrites other unreferenced values with zeros, unless it is a single valid one. A
    /// failed call can be repeated, also by another process.
    ///
    /// An fsync that failed in an earlier process may have left clean pages that were never written. Therefore every
    /// frame is written again, with the same bytes, so that the sync covers it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`; `Corruption` if a referenced frame is damaged. `OutOfSpace` also if `wal_is_damaged` and
    /// another recovery mode could read zeros as a value.
    pub(crate) fn finish_in_place(
        &self,
        id: FileNumber,
        file: Arc<dyn File>,
        created_ms: u64,
        wal_is_damaged: bool,
    ) -> Result<BlobFileMeta> {
        let end = self.check_layout()?;
        file.set_length(end)?;
        let mut writer = DirectBlobWriter::create(Arc::clone(&file), self.file_id, id, created_ms)?;
        let mut next_ordinal = 0;
        for (ordinal, frame) in &self.frames {
            skip_unreferenced(&mut writer, *ordinal - next_ordinal, frame.offset, wal_is_damaged)?;
            writer.rewrite_frame(*frame).map_err(|error| error.at_offset(frame.offset))?;
            next_ordinal = ordinal + 1;
        }
        debug_assert_eq!(writer.end_offset(), end, "the file ends with the last referenced value");
        // Before the footer is written, so that a file with a footer has all of its values.
        file.sync_data()?;
        let meta = writer.finish()?;
        file.sync_data()?;
        Ok(meta)
    }

    /// Checks that the unreferenced ordinals fit between the referenced frames. Returns the end of the last referenced
    /// frame.
    fn check_layout(&self) -> Result<u64> {
        let (mut next_ordinal, mut end) = (0, FileHeader::LEN as u64);
        for (ordinal, frame) in &self.frames {
            let missing = u64::from(*ordinal) - next_ordinal;
            let fits = frame.offset.checked_sub(end).is_some_and(|gap| {
                (gap == 0) == (missing == 0) && gap >= missing.saturating_mul(FRAME_HEADER_LEN as u64)
            });
            if !fits {
                return Err(Error::corruption("blob pointers in the WAL contradict each other"));
            }
            (next_ordinal, end) = (u64::from(*ordinal) + 1, frame.end()?);
        }
        Ok(end)
    }
}

/// Adds `count` unreferenced values, which end at `end`, to a file that is finished in place.
fn skip_unreferenced(writer: &mut DirectBlobWriter, count: u32, end: u64, wal_is_damaged: bool) -> Result<()> {
    let offset = writer.end_offset();
    if count == 1 {
        match writer.rewrite_frame(BlockHandle { offset, len: end - offset }) {
            Err(error) if error.kind() == ErrorKind::Corruption && wal_is_damaged => {
                let message = "a file with a lost value, to which the damaged WAL may point, must be copied";
                return Err(Error::new(ErrorKind::OutOfSpace, message).at_offset(offset));
            }
            Err(error) if error.kind() == ErrorKind::Corruption => {}
            kept => return kept,
        }
    }
    writer.append_zeros_up_to(end, count)
}

fn frame_handle(pointer: &BlobPointer) -> BlockHandle {
    BlockHandle { offset: pointer.frame_offset, len: pointer.frame_len }
}

/// Opens a file in its current state, whether or not it was finished.
fn open_unfinished(
    files: &DataFiles,
    cache: &Arc<BlockCache>,
    id: FileNumber,
    partition: PartitionId,
) -> Result<UnfinishedBlobFile> {
    let opened = files.get(id).and_then(|handle| {
        let (mut header, end) = ([0; FileHeader::LEN], handle.length()?);
        handle.read_exact_at(&mut header, 0)?;
        Ok((FileHeader::decode(FileKind::Blob, &header)?.file_id, end))
    });
    let (file_id, end) = opened.map_err(|error| match error.os_kind() {
        Some(io::ErrorKind::NotFound) => {
            Error::corruption("blob file that the WAL refers to is missing: restore it from a copy")
                .at_offset(0)
                .in_file(files.path(id))
        }
        _ => error.in_file(files.path(id)),
    })?;
    let file = BlobFile::growing(files, Arc::clone(cache), id, None, file_id, end);
    Ok(UnfinishedBlobFile { partition, file, file_id, frames: BTreeMap::new() })
}
