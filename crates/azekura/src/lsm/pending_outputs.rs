//! Written files that no version edit names yet.

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::version_edit::{BlobFileMeta, FileNumber, TableMeta};
use crate::base::{Result, SeqNo};
use crate::lsm::blob::direct_file::DirectBlobFile;
use crate::lsm::table_handle::TreeContext;
use crate::memtable::Memtable;
use crate::vfs::File;
use crate::vfs::open_files::DataFileKind;

/// Files that no edit names yet. They become obsolete when this is dropped, unless [`release`](PendingOutputs::release)
/// was called.
pub(crate) struct PendingOutputs {
    context: Arc<TreeContext>,
    files: Vec<(DataFileKind, FileNumber)>,
}

impl PendingOutputs {
    pub(crate) fn new(context: Arc<TreeContext>) -> PendingOutputs {
        PendingOutputs { context, files: Vec::new() }
    }

    /// Creates an empty file with a new number.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn create(&mut self, kind: DataFileKind) -> Result<NewFile> {
        let id = self.context.new_file_id();
        let tables = &self.context.files;
        let (file, path) = match kind {
            DataFileKind::Table => (tables.create(id)?, tables.path(id)),
            DataFileKind::Blob => (tables.blob_files().create(id)?, tables.blob_files().path(id)),
        };
        self.files.push((kind, id));
        let mut file_id = [0; 16];
        self.context.env.random(&mut file_id);
        Ok(NewFile { id, file_id, file, path })
    }

    /// Makes the names of all files durable.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn sync_dir(&self) -> Result<()> {
        self.context.fs.sync_dir(&self.context.dir)
    }

    /// Keeps the files, because an edit may name them from now on, whether or not it is committed.
    pub(crate) fn release(mut self) {
        self.files.clear();
    }
}

impl Drop for PendingOutputs {
    fn drop(&mut self) {
        for &(kind, id) in &self.files {
            self.context.obsolete_files.push(kind, id);
        }
    }
}

/// A file that no edit names yet.
pub(crate) struct NewFile {
    pub(crate) id: FileNumber,
    /// Random id for the header of the file.
    pub(crate) file_id: [u8; 16],
    pub(crate) file: Arc<dyn File>,
    path: PathBuf,
}

impl NewFile {
    /// Lets `finish` write the end of the file, and makes its bytes durable, but not its name.
    ///
    /// # Errors
    /// Those of `finish`; `Io` that names the file.
    pub(crate) fn finish<M>(self, finish: impl FnOnce(FileNumber) -> Result<M>) -> Result<M> {
        let meta = finish(self.id)?;
        self.file.sync_data().map_err(|error| error.in_file(&self.path))?;
        Ok(meta)
    }
}

/// A flush whose files are written and whose edit is not committed.
pub(crate) struct UncommittedFlush {
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    /// The last sequence number of the memtables.
    pub(crate) through: SeqNo,
    pub(crate) tables: Vec<TableMeta>,
    /// All blob files of the flush. `blob_bytes` counts only the bytes that the flush itself has written.
    pub(crate) blobs: Vec<BlobFileMeta>,
    pub(crate) blob_bytes: u64,
    /// Direct blob files that are finished, or whose values were copied.
    pub(crate) finished_direct_blobs: Vec<Arc<DirectBlobFile>>,
    /// `None` once an edit may name the files.
    pub(crate) pending: Option<PendingOutputs>,
}
