//! Blob files that the log points to and the manifest does not know: a life of the database ended before they did.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::{FileId, PartitionId};
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::ledger::Ledger;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::blob::format::VALUES_MAX;
use crate::blob::reader::{BlobFile, ValuesAhead};
use crate::block::{BlockCache, BlockHandle};
use crate::vfs::files::DataFiles;

/// Looks at every value that a log being read points to and that no flush has seen to. Reads only; memory: one value,
/// and some bytes for each pointer.
pub(crate) struct Unsealed {
    files: DataFiles,
    cache: Arc<BlockCache>,
    partitions: BTreeMap<PartitionId, Known>,
    found: BTreeMap<FileId, Found>,
    /// Behind the highest number that was pointed to.
    next_file: u64,
}

/// What the manifest knows of a partition.
struct Known {
    /// See [`PartitionLedger::permanent`](crate::base::ledger::PartitionLedger::permanent).
    permanent: SeqNo,
    logical: BTreeSet<FileId>,
}

/// A file without an owner, and the values of it that are pointed to.
pub(crate) struct Found {
    pub(crate) partition: PartitionId,
    pub(crate) file: BlobFile,
    pub(crate) file_id: [u8; 16],
    pub(crate) frames: BTreeMap<u32, BlockHandle>,
}

impl Unsealed {
    /// `files` are blob files.
    pub(crate) fn new(ledger: &Ledger, files: DataFiles, cache: Arc<BlockCache>) -> Unsealed {
        let partitions = ledger.partitions.iter().map(|(id, partition)| {
            let sections = partition.blobs.values().flat_map(|file| &file.sections);
            let logical = sections.map(|section| section.logical).collect();
            (*id, Known { permanent: partition.permanent(), logical })
        });
        let partitions = partitions.collect();
        Unsealed { files, cache, partitions, found: BTreeMap::new(), next_file: 0 }
    }

    /// Looks at the pointers of one commit; gives what is wrong if one of them leads to no value, as it may where the
    /// commit was not durable. Only if all of them do lead somewhere, they are noted.
    ///
    /// # Errors
    /// `Io`, and `Unsupported` for a file of a newer version.
    pub(crate) fn check(&mut self, pointers: &[(PartitionId, SeqNo, BlobRef)]) -> Result<Option<Error>> {
        for (_, _, pointer) in pointers {
            self.next_file = self.next_file.max(pointer.logical.0.saturating_add(1));
        }
        let wanted = |(partition, seqno, pointer): &&(PartitionId, SeqNo, BlobRef)| {
            let known = self.partitions.get(partition);
            known.is_some_and(|known| *seqno > known.permanent && !known.logical.contains(&pointer.logical))
        };
        let wanted: Vec<_> = pointers.iter().filter(wanted).collect();
        for (partition, _, pointer) in &wanted {
            match self.check_one(*partition, pointer) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Corruption => return Ok(Some(error)),
                Err(error) => return Err(error),
            }
        }
        for (_, _, pointer) in wanted {
            if let Some(found) = self.found.get_mut(&pointer.logical) {
                found.frames.insert(pointer.ordinal, frame_of(pointer));
            }
        }
        Ok(None)
    }

    fn check_one(&mut self, partition: PartitionId, pointer: &BlobRef) -> Result<()> {
        let id = pointer.logical;
        let found = match self.found.entry(id) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(free) => free.insert(open(&self.files, &self.cache, id, partition)?),
        };
        let at = |error: Error| error.at_offset(pointer.offset).in_file(self.files.path(id));
        let is_other = found.frames.get(&pointer.ordinal).is_some_and(|frame| *frame != frame_of(pointer));
        if is_other || found.partition != partition || u64::from(pointer.ordinal) >= VALUES_MAX {
            return Err(at(Error::corruption("the log points to this value in two ways")));
        }
        found.file.with_frame(frame_of(pointer), &mut ValuesAhead::adaptive(), |frame| {
            match frame.raw_len == pointer.len as usize && pointer.offset >= FileHeader::LEN as u64 {
                true => Ok(()),
                false => Err(Error::corruption("value has another length than its pointer says")),
            }
        })
    }

    /// No file may get a number below this one: the log, or an end of it that does not count, speaks of those.
    pub(crate) fn next_file(&self) -> u64 {
        self.next_file
    }

    /// The files that values were found in.
    pub(crate) fn found(&self) -> impl Iterator<Item = (FileId, &Found)> {
        self.found.iter().filter(|(_, found)| !found.frames.is_empty()).map(|(id, found)| (*id, found))
    }
}

impl Found {
    /// Bytes of the frames that are pointed to.
    pub(crate) fn bytes(&self) -> u64 {
        self.frames.values().map(|frame| frame.len).sum()
    }
}

fn frame_of(pointer: &BlobRef) -> BlockHandle {
    BlockHandle { offset: pointer.offset, len: pointer.stored }
}

/// A file as it lies there, with or without its end.
fn open(files: &DataFiles, cache: &Arc<BlockCache>, id: FileId, partition: PartitionId) -> Result<Found> {
    let opened = files.file(id).and_then(|handle| {
        let (mut header, end) = ([0; FileHeader::LEN], handle.length()?);
        handle.read_exact_at(&mut header, 0)?;
        Ok((FileHeader::decode(FileKind::Blob, &header)?.file_id, end))
    });
    let (file_id, end) = opened.map_err(|error| match error.os_kind() {
        Some(io::ErrorKind::NotFound) => {
            Error::corruption("blob file that the log points to is missing: restore it from a copy")
                .at_offset(0)
                .in_file(files.path(id))
        }
        _ => error.in_file(files.path(id)),
    })?;
    let file = BlobFile::growing(files.clone(), Arc::clone(cache), id, None, file_id, end);
    Ok(Found { partition, file, file_id, frames: BTreeMap::new() })
}
