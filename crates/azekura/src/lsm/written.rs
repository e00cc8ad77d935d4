//! What was written and not committed yet.

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::edit::{BlobMeta, FileId, TableMeta};
use crate::base::{Result, SeqNo};
use crate::lsm::blobs::early::EarlyFile;
use crate::lsm::handle::TreeContext;
use crate::memtable::Memtable;
use crate::vfs::File;
use crate::vfs::files::DataKind;

/// Files that no edit names yet; given to the graveyard when this is dropped, unless they are kept.
pub(crate) struct Unnamed {
    context: Arc<TreeContext>,
    files: Vec<(DataKind, FileId)>,
}

impl Unnamed {
    pub(crate) fn new(context: Arc<TreeContext>) -> Unnamed {
        Unnamed { context, files: Vec::new() }
    }

    /// Makes an empty file under a new number.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn create(&mut self, kind: DataKind) -> Result<NewFile> {
        let id = self.context.new_file_id();
        let tables = &self.context.files;
        let (file, path) = match kind {
            DataKind::Table => (tables.create(id)?, tables.path(id)),
            DataKind::Blob => (tables.blobs().create(id)?, tables.blobs().path(id)),
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
    pub(crate) fn sync_names(&self) -> Result<()> {
        self.context.fs.sync_dir(&self.context.dir)
    }

    /// An edit may name them from now on, so they must stay, whatever becomes of it.
    pub(crate) fn keep(mut self) {
        self.files.clear();
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        for &(kind, id) in &self.files {
            self.context.graveyard.push(kind, id);
        }
    }
}

/// A file that no edit names yet.
pub(crate) struct NewFile {
    pub(crate) id: FileId,
    /// Random, for what is written into it.
    pub(crate) file_id: [u8; 16],
    pub(crate) file: Arc<dyn File>,
    path: PathBuf,
}

impl NewFile {
    /// Has it ended by `finish`, which is given its number, and makes its bytes durable, not its name.
    ///
    /// # Errors
    /// Those of `finish`; `Io`, naming the file.
    pub(crate) fn end<M>(self, finish: impl FnOnce(FileId) -> Result<M>) -> Result<M> {
        let meta = finish(self.id)?;
        self.file.sync_data().map_err(|error| error.in_file(&self.path))?;
        Ok(meta)
    }
}

/// A flush whose files are written.
pub(crate) struct Written {
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    /// The last record of the memtables.
    pub(crate) through: SeqNo,
    pub(crate) tables: Vec<TableMeta>,
    /// Blob files, and of their bytes those that the flush has written.
    pub(crate) blobs: Vec<BlobMeta>,
    pub(crate) blob_bytes: u64,
    /// Early files that are among them, or whose values are.
    pub(crate) ended: Vec<Arc<EarlyFile>>,
    /// Until an edit may name the files.
    pub(crate) unnamed: Option<Unnamed>,
}
