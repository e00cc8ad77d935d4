//! A blob file as the versions of a tree hold it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::edit::BlobMeta;
use crate::blob::reader::BlobFile;
use crate::block::BlockCache;
use crate::table::graveyard::Graveyard;
use crate::vfs::files::{DataFiles, DataKind};

/// A blob file that is opened when first read from. When the last holder lets go of a doomed one, its file may be
/// removed; the holder, who may be any reader, does not do that itself. Thread safe.
pub(crate) struct BlobHandle {
    meta: BlobMeta,
    file: BlobFile,
    files: DataFiles,
    graveyard: Arc<Graveyard>,
    doomed: AtomicBool,
}

impl BlobHandle {
    /// `files` are blob files.
    pub(crate) fn new(
        meta: BlobMeta,
        files: DataFiles,
        cache: Arc<BlockCache>,
        graveyard: Arc<Graveyard>,
    ) -> Arc<BlobHandle> {
        let file = BlobFile::new(files.clone(), cache, meta.id, meta.size);
        BlobHandle::of(meta, file, files, graveyard)
    }

    /// A file that is there already in another way.
    pub(crate) fn of(meta: BlobMeta, file: BlobFile, files: DataFiles, graveyard: Arc<Graveyard>) -> Arc<BlobHandle> {
        files.hold(meta.size);
        Arc::new(BlobHandle { meta, file, files, graveyard, doomed: AtomicBool::new(false) })
    }

    pub(crate) fn meta(&self) -> &BlobMeta {
        &self.meta
    }

    pub(crate) fn file(&self) -> &BlobFile {
        &self.file
    }

    /// No manifest names the file any more: the last holder gives it to the graveyard.
    pub(crate) fn doom(&self) {
        self.doomed.store(true, Ordering::Release);
    }
}

impl Drop for BlobHandle {
    fn drop(&mut self) {
        self.files.let_go(self.meta.size);
        if *self.doomed.get_mut() {
            self.graveyard.push(DataKind::Blob, self.meta.id);
        }
    }
}

impl std::fmt::Debug for BlobHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "blob file {}", self.meta.id.0)
    }
}
