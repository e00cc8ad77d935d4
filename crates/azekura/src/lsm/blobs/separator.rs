//! Writing values apart from their keys, while tables are written.

use std::sync::Arc;

use crate::base::edit::BlobMeta;
use crate::base::{EntryRef, RecordKind, Result};
use crate::blob::format::VALUES_MAX;
use crate::blob::writer::BlobWriter;
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::written::{NewFile, Unnamed};
use crate::vfs::files::DataKind;

/// A row of blob files being written.
pub(crate) struct Separator {
    options: KvSeparationOptions,
    created_ms: u64,
    writer: Option<(NewFile, BlobWriter)>,
    done: Vec<BlobMeta>,
    /// The pointer that stands for the last value.
    pointer: Vec<u8>,
}

impl Separator {
    pub(crate) fn new(options: KvSeparationOptions, created_ms: u64) -> Separator {
        Separator { options, created_ms, writer: None, done: Vec::new(), pointer: Vec::new() }
    }

    /// Whether the value of an entry shall stand apart.
    pub(crate) fn takes(&self, entry: &EntryRef<'_>) -> bool {
        entry.kind == RecordKind::Put && entry.value.len() as u64 >= u64::from(self.options.threshold)
    }

    /// Writes the value of an entry, and gives the entry that stands for it; files are made among the `unnamed`.
    pub(crate) fn put<'a>(&'a mut self, entry: EntryRef<'a>, unnamed: &mut Unnamed) -> Result<EntryRef<'a>> {
        let full =
            |writer: &BlobWriter| writer.written_bytes() >= self.options.target_size || writer.values() >= VALUES_MAX;
        if self.writer.as_ref().is_some_and(|(_, writer)| full(writer)) {
            self.cut()?;
        }
        if self.writer.is_none() {
            let new = unnamed.create(DataKind::Blob)?;
            let (file, codec) = (Arc::clone(&new.file), self.options.compression);
            let writer = BlobWriter::create(file, new.file_id, new.id, codec, self.created_ms);
            self.writer = Some((new, writer));
        }
        let (_, writer) = self.writer.as_mut().expect("it was just made");
        self.pointer.clear();
        writer.append(entry.value)?.encode(&mut self.pointer);
        Ok(EntryRef { kind: RecordKind::BlobPointer, value: &self.pointer, ..entry })
    }

    /// Ends the file being written, if there is one, and makes its bytes durable.
    fn cut(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.done.push(new.end(|_| writer.finish())?);
        }
        Ok(())
    }

    /// Ends the last file; the caller makes the names durable.
    pub(crate) fn finish(mut self) -> Result<Vec<BlobMeta>> {
        self.cut()?;
        Ok(self.done)
    }
}
