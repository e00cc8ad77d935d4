//! A blob file as the versions of a tree refer to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::version_edit::BlobFileMeta;
use crate::blob::reader::BlobFile;
use crate::block::BlockCache;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// A blob file that is opened on first read. When the last holder drops an obsolete file, it may be removed; the
/// holder, which may be any reader, does not remove it. Thread safe.
pub(crate) struct BlobHandle {
    meta: BlobFileMeta,
    file: BlobFile,
    files: DataFiles,
    obsolete_files: Arc<ObsoleteFiles>,
    obsolete: AtomicBool,
}

impl BlobHandle {
    /// `files`: the blob files of the database.
    pub(crate) fn new(
        meta: BlobFileMeta,
        files: DataFiles,
        cache: Arc<BlockCache>,
        obsolete_files: Arc<ObsoleteFiles>,
    ) -> Arc<BlobHandle> {
        let file = BlobFile::new(files.clone(), cache, meta.number, meta.size);
        BlobHandle::from_open_file(meta, file, files, obsolete_files)
    }

    /// A handle of a blob file that is open already.
    pub(crate) fn from_open_file(
        meta: BlobFileMeta,
        file: BlobFile,
        files: DataFiles,
        obsolete_files: Arc<ObsoleteFiles>,
    ) -> Arc<BlobHandle> {
        files.add_live_bytes(meta.size);
        Arc::new(BlobHandle { meta, file, files, obsolete_files, obsolete: AtomicBool::new(false) })
    }

    pub(crate) fn meta(&self) -> &BlobFileMeta {
        &self.meta
    }

    pub(crate) fn file(&self) -> &BlobFile {
        &self.file
    }

    /// No manifest names the file any more: dropping the last handle makes it obsolete.
    pub(crate) fn mark_obsolete(&self) {
        self.obsolete.store(true, Ordering::Release);
    }
}

impl Drop for BlobHandle {
    fn drop(&mut self) {
        self.files.remove_live_bytes(self.meta.size);
        if *self.obsolete.get_mut() {
            self.obsolete_files.push(DataFileKind::Blob, self.meta.number);
        }
    }
}

impl std::fmt::Debug for BlobHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "blob file {}", self.meta.number.0)
    }
}
