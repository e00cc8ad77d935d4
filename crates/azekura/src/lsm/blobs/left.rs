//! What an earlier life has left in early files: taken over when the database is opened.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::{BlobMeta, FileId, PartitionId};
use crate::base::ledger::Ledger;
use crate::base::{Error, Result, SeqNo};
use crate::blob::reader::BlobFile;
use crate::blob::unsealed::{Found, Unsealed};
use crate::block::{BlockCache, BlockHandle};
use crate::lsm::blobs::carry::{Carried, carry};
use crate::lsm::blobs::early::EarlyFile;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::handle::TreeContext;
use crate::lsm::written::Unnamed;
use crate::vfs::OpenMode;
use crate::vfs::files::DataFiles;

/// A file with values carried over is ended once it has so many bytes of them.
const CARRIED_BYTES: u64 = 64 << 20;

/// The early files of an earlier life, as the log that is being read points to them.
pub(crate) struct LeftEarly {
    unsealed: Unsealed,
}

impl LeftEarly {
    /// `files` are tables.
    pub(crate) fn new(ledger: &Ledger, files: &DataFiles, cache: &Arc<BlockCache>) -> LeftEarly {
        LeftEarly { unsealed: Unsealed::new(ledger, files.blobs(), Arc::clone(cache)) }
    }

    /// See [`Unsealed::check`].
    ///
    /// # Errors
    /// Those of reading.
    pub(crate) fn check(&mut self, pointers: &[(PartitionId, SeqNo, BlobRef)]) -> Result<Option<Error>> {
        self.unsealed.check(pointers)
    }

    /// Whether the log points into that file.
    pub(crate) fn has(&self, id: FileId) -> bool {
        self.unsealed.found().any(|(found, _)| found == id)
    }

    /// See [`Unsealed::next_file`].
    pub(crate) fn next_file(&self) -> u64 {
        self.unsealed.next_file()
    }

    /// Makes blob files like others of them, durably, for the manifest to name. What is whole is taken as it is;
    /// values of others are carried over to new files, because nothing is appended to a file of an earlier life.
    /// `context` is that of any tree.
    ///
    /// # Errors
    /// Those of reading and writing; nothing is named yet, so the next open begins again.
    pub(crate) fn take_over(
        &self,
        context: &Arc<TreeContext>,
        created_ms: u64,
    ) -> Result<Vec<(PartitionId, BlobMeta)>> {
        let (mut taken, mut unneeded) = (Vec::new(), Vec::new());
        let mut torn: BTreeMap<PartitionId, Vec<(FileId, &Found)>> = BTreeMap::new();
        for (id, found) in self.unsealed.found() {
            match whole(context, id, found) {
                Some(meta) => {
                    context.fs.open(&found.file.path(), OpenMode::Write)?.sync_data()?;
                    taken.push((found.partition, meta));
                }
                None => {
                    unneeded.push(id);
                    torn.entry(found.partition).or_default().push((id, found));
                }
            }
        }
        let mut unnamed = Unnamed::new(Arc::clone(context));
        for (partition, files) in torn {
            let mut group: Vec<Carried<'_>> = Vec::new();
            let mut bytes = 0u64;
            for (logical, found) in files {
                if bytes >= CARRIED_BYTES {
                    taken.push((partition, carry(&mut unnamed, &std::mem::take(&mut group), created_ms)?));
                    bytes = 0;
                }
                let frames: Vec<(u32, BlockHandle)> = found.frames.iter().map(|(at, frame)| (*at, *frame)).collect();
                group.push(Carried { logical, file: &found.file, frames });
                bytes = bytes.saturating_add(found.bytes());
            }
            taken.push((partition, carry(&mut unnamed, &group, created_ms)?));
        }
        if !taken.is_empty() {
            unnamed.sync_names()?;
        }
        unnamed.keep();
        // They are removed as soon as the manifest is written; one that is open would keep its space.
        unneeded.into_iter().for_each(|id| context.files.blobs().forget(id));
        Ok(taken)
    }

    /// The files as they are, for one who may not write.
    pub(crate) fn show(&self, context: &TreeContext) -> Vec<(PartitionId, Arc<EarlyFile>)> {
        let early = self.unsealed.found().map(|(id, found)| {
            let (values, bytes) = (found.frames.len() as u64, found.bytes());
            let handle = context.growing_handle(id, None, found.file_id, found.file.size());
            (found.partition, EarlyFile::of_earlier_life(handle, values, bytes))
        });
        early.collect()
    }
}

/// What the manifest is to say of a file that has its end, and all that is pointed to.
fn whole(context: &TreeContext, id: FileId, found: &Found) -> Option<BlobMeta> {
    let files = context.files.blobs();
    let meta = BlobFile::describe(&files, &context.cache, id).ok()?;
    let file = BlobHandle::new(meta.clone(), files, Arc::clone(&context.cache), Arc::clone(&context.graveyard));
    let opened = file.file().opened().ok()?;
    let section = opened.directory.section(id).filter(|section| !section.rewritten)?;
    let alone = meta.sections.len() == 1;
    let vouched = found.frames.iter().all(|(at, frame)| section.vouch(*at, *frame).is_some());
    (alone && vouched).then_some(meta)
}
