//! From pointers to values.

use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::FileId;
use crate::base::{Error, Result};
use crate::blob::reader::ValuesAhead;
use crate::engine::Values;
use crate::lsm::blobs::early::EarlyMap;
use crate::lsm::blobs::map::BlobMap;
use crate::lsm::super_version::SuperVersion;
use crate::mem::slice::Slice;

/// So many files does a walk read ahead in at a time.
const AHEAD_FILES: usize = 4;

/// What it means that a pointer leads to a file that is nowhere.
pub(crate) fn no_such_file(pointer: &BlobRef) -> Error {
    Error::corruption(format!("value is in blob file {}, which the partition does not have", pointer.logical.0))
}

/// Reads values one after the other, and ahead in the files where they follow each other.
pub(crate) struct BlobValues {
    /// The files read last, most recent first.
    ahead: Vec<(FileId, ValuesAhead)>,
    blobs: Arc<BlobMap>,
    early: Arc<EarlyMap>,
}

impl BlobValues {
    /// Of that moment: what was visible then points to files that were there then.
    pub(crate) fn new(now: &SuperVersion) -> BlobValues {
        let (blobs, early) = (Arc::clone(now.version.blobs()), Arc::clone(&now.early));
        BlobValues { ahead: Vec::new(), blobs, early }
    }
}

impl Values for BlobValues {
    fn read(&mut self, pointer: &[u8]) -> Result<Slice> {
        let pointer = BlobRef::decode(pointer)?;
        let file = self.blobs.file(pointer.logical).or_else(|| self.early.file(pointer.logical));
        let handle = file.ok_or_else(|| no_such_file(&pointer))?;
        let id = handle.meta().id;
        let at = self.ahead.iter().position(|(file, _)| *file == id);
        let recent = match at {
            Some(at) => self.ahead.remove(at),
            None => (id, ValuesAhead::adaptive()),
        };
        self.ahead.insert(0, recent);
        self.ahead.truncate(AHEAD_FILES);
        handle.file().read_on(&pointer, true, &mut self.ahead[0].1)
    }
}
