//! Writing values apart from their keys, while tables are written.

use std::sync::Arc;

use crate::base::version_edit::BlobFileMeta;
use crate::base::{EntryRef, RecordKind, Result};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::writer::BlobWriter;
use crate::lsm::blob::options::KvSeparationOptions;
use crate::lsm::pending_outputs::{NewFile, PendingOutputs};
use crate::vfs::open_files::DataFileKind;

/// A row of blob files being written.
pub(crate) struct BlobSeparator {
    options: KvSeparationOptions,
    created_ms: u64,
    writer: Option<(NewFile, BlobWriter)>,
    finished: Vec<BlobFileMeta>,
    /// The pointer that stands for the last value.
    pointer: Vec<u8>,
}

impl BlobSeparator {
    pub(crate) fn new(options: KvSeparationOptions, created_ms: u64) -> BlobSeparator {
        BlobSeparator { options, created_ms, writer: None, finished: Vec::new(), pointer: Vec::new() }
    }

    /// Whether the value of an entry shall stand apart.
    pub(crate) fn should_separate(&self, entry: &EntryRef<'_>) -> bool {
        entry.kind == RecordKind::Put && entry.value.len() as u64 >= u64::from(self.options.threshold)
    }

    /// Writes the value of an entry, and gives the entry that stands for it; files are made among the `unnamed`.
    pub(crate) fn write_value<'a>(
        &'a mut self,
        entry: EntryRef<'a>,
        pending: &mut PendingOutputs,
    ) -> Result<EntryRef<'a>> {
        let full = |writer: &BlobWriter| {
            writer.written_bytes() >= self.options.target_size || writer.value_count() >= SECTION_VALUES_MAX
        };
        if self.writer.as_ref().is_some_and(|(_, writer)| full(writer)) {
            self.finish_file()?;
        }
        if self.writer.is_none() {
            let new = pending.create(DataFileKind::Blob)?;
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
    fn finish_file(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.finished.push(new.finish(|_| writer.finish())?);
        }
        Ok(())
    }

    /// Ends the last file; the caller makes the names durable.
    pub(crate) fn finish(mut self) -> Result<Vec<BlobFileMeta>> {
        self.finish_file()?;
        Ok(self.finished)
    }
}
