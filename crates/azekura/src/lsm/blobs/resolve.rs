//! From pointers to values.

use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::FileId;
use crate::base::{Error, Result};
use crate::blob::reader::ValuesAhead;
use crate::engine::Values;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::map::BlobMap;
use crate::mem::slice::Slice;

/// So many files does a walk read ahead in at a time.
const AHEAD_FILES: usize = 4;

impl BlobMap {
    /// What an entry points to, and the file that has it.
    ///
    /// # Errors
    /// `Corruption` for bytes that are no pointer, or one to a file that is not here.
    pub(crate) fn resolve(&self, pointer: &[u8]) -> Result<(BlobRef, &Arc<BlobHandle>)> {
        let pointer = BlobRef::decode(pointer)?;
        let handle = self.file(pointer.logical).ok_or_else(|| {
            Error::corruption(format!("value is in blob file {}, which the partition does not have", pointer.logical.0))
        })?;
        Ok((pointer, handle))
    }
}

/// Reads values one after the other, and ahead in the files where they follow each other.
pub(crate) struct BlobValues {
    /// The files read last, most recent first.
    ahead: Vec<(FileId, ValuesAhead)>,
    blobs: Arc<BlobMap>,
}

impl BlobValues {
    pub(crate) fn new(blobs: Arc<BlobMap>) -> BlobValues {
        BlobValues { ahead: Vec::new(), blobs }
    }
}

impl Values for BlobValues {
    fn read(&mut self, pointer: &[u8]) -> Result<Slice> {
        let (pointer, handle) = self.blobs.resolve(pointer)?;
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
