//! Writing values apart from their keys, while tables are written.

use std::sync::Arc;

use crate::base::edit::{BlobMeta, FileId};
use crate::base::{EntryRef, RecordKind, Result};
use crate::blob::format::VALUES_MAX;
use crate::blob::writer::BlobWriter;
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::handle::TreeContext;
use crate::vfs::File;

/// A row of blob files being written.
pub(crate) struct Separator {
    context: Arc<TreeContext>,
    options: KvSeparationOptions,
    created_ms: u64,
    writer: Option<(FileId, Arc<dyn File>, BlobWriter)>,
    done: Vec<BlobMeta>,
    /// The pointer that stands for the last value.
    pointer: Vec<u8>,
}

impl Separator {
    pub(crate) fn new(context: Arc<TreeContext>, options: KvSeparationOptions, created_ms: u64) -> Separator {
        Separator { context, options, created_ms, writer: None, done: Vec::new(), pointer: Vec::new() }
    }

    /// Whether the value of an entry shall stand apart.
    pub(crate) fn takes(&self, entry: &EntryRef<'_>) -> bool {
        entry.kind == RecordKind::Put && entry.value.len() as u64 >= u64::from(self.options.threshold)
    }

    /// Writes the value of an entry, and gives the entry that stands for it. `begun` hears of a file before anything
    /// is in it.
    pub(crate) fn put<'a>(&'a mut self, entry: EntryRef<'a>, begun: impl FnOnce(FileId)) -> Result<EntryRef<'a>> {
        let full =
            |writer: &BlobWriter| writer.written_bytes() >= self.options.target_size || writer.values() >= VALUES_MAX;
        if self.writer.as_ref().is_some_and(|(_, _, writer)| full(writer)) {
            self.cut()?;
        }
        if self.writer.is_none() {
            let id = self.context.new_file_id();
            let file = self.context.files.blobs().create(id)?;
            begun(id);
            let mut file_id = [0; 16];
            self.context.env.random(&mut file_id);
            let codec = self.options.compression;
            let writer = BlobWriter::create(Arc::clone(&file), file_id, id, codec, self.created_ms);
            self.writer = Some((id, file, writer));
        }
        let (_, _, writer) = self.writer.as_mut().expect("it was just made");
        self.pointer.clear();
        writer.append(entry.value)?.encode(&mut self.pointer);
        Ok(EntryRef { kind: RecordKind::BlobPointer, value: &self.pointer, ..entry })
    }

    /// Ends the file being written, if there is one, and makes its bytes durable.
    fn cut(&mut self) -> Result<()> {
        if let Some((id, file, writer)) = self.writer.take() {
            let meta = writer.finish()?;
            file.sync_data().map_err(|error| error.in_file(self.context.files.blobs().path(id)))?;
            self.done.push(meta);
        }
        Ok(())
    }

    /// Ends the last file; the caller makes the names durable.
    pub(crate) fn finish(mut self) -> Result<Vec<BlobMeta>> {
        self.cut()?;
        Ok(self.done)
    }
}
