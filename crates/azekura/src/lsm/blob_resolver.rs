//! Resolves blob pointers to values.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::version_edit::FileNumber;
use crate::base::{Error, Result};
use crate::blob::reader::BlobReadAhead;
use crate::engine::BlobResolver;
use crate::lsm::blob::direct_file::DirectBlobFiles;
use crate::lsm::blob::map::BlobMap;
use crate::lsm::super_version::SuperVersion;
use crate::mem::slice::Slice;

/// Maximum number of blob files in which an iterator reads ahead at a time.
const READ_AHEAD_FILES_MAX: usize = 4;

/// The error for a pointer to a file that neither the version nor the direct blob files have.
pub(crate) fn missing_blob_file_error(pointer: &BlobPointer) -> Error {
    Error::corruption(format!("value is in blob file {}, which the partition does not have", pointer.logical_file.0))
}

/// Resolves pointers of an iterator. Reads ahead in a blob file if successive values follow each other in it.
pub(crate) struct ReadAheadBlobResolver {
    /// The files read last, most recent first.
    read_ahead: Vec<(FileNumber, BlobReadAhead)>,
    blobs: Arc<BlobMap>,
    direct_blobs: Arc<DirectBlobFiles>,
}

impl ReadAheadBlobResolver {
    /// Uses the blob files of `now`, which contain every value that is visible at `now`.
    pub(crate) fn new(now: &SuperVersion) -> ReadAheadBlobResolver {
        let (blobs, direct_blobs) = (Arc::clone(now.version.blobs()), Arc::clone(&now.direct_blobs));
        ReadAheadBlobResolver { read_ahead: Vec::new(), blobs, direct_blobs }
    }
}

impl BlobResolver for ReadAheadBlobResolver {
    fn resolve(&mut self, pointer: &[u8]) -> Result<Slice> {
        let pointer = BlobPointer::decode(pointer)?;
        let file = self.blobs.handle(pointer.logical_file).or_else(|| self.direct_blobs.handle(pointer.logical_file));
        let handle = file.ok_or_else(|| missing_blob_file_error(&pointer))?;
        let id = handle.meta().number;
        let at = self.read_ahead.iter().position(|(file, _)| *file == id);
        let recent = match at {
            Some(at) => self.read_ahead.remove(at),
            None => (id, BlobReadAhead::adaptive()),
        };
        self.read_ahead.insert(0, recent);
        self.read_ahead.truncate(READ_AHEAD_FILES_MAX);
        handle.file().read_sequential(&pointer, true, &mut self.read_ahead[0].1)
    }
}
