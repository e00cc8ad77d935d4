//! Writes the tables and blob files of a flush or a compaction: cuts, syncs, and removes them after a failure.

use std::sync::Arc;

use crate::base::version_edit::{BlobFileMeta, TableMeta};
use crate::base::{EntryRef, KeyOrder, RecordKind, Result};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::writer::BlobWriter;
use crate::lsm::blob::options::KvSeparationOptions;
use crate::lsm::pending_outputs::{NewFile, PendingOutputs};
use crate::lsm::table_handle::TreeContext;
use crate::table::options::TableOptions;
use crate::table::writer::TableWriter;
use crate::vfs::open_files::DataFileKind;

/// How tables are cut and built.
pub(crate) struct OutputOptions {
    pub(crate) table: TableOptions,
    /// A table is finished at the first new user key after this many bytes.
    pub(crate) target_file_size: u64,
    pub(crate) created_ms: u64,
    /// Smallest keys of the tables that stay on the output level, ascending. No output table extends over one of them.
    pub(crate) output_level_boundaries: Vec<Vec<u8>>,
    /// How values are separated; `None` leaves each value in its entry.
    pub(crate) separation: Option<KvSeparationOptions>,
}

/// The written files, durable with their names.
pub(crate) struct FinishedOutputs {
    pub(crate) tables: Vec<TableMeta>,
    pub(crate) blobs: Vec<BlobFileMeta>,
    pub(crate) pending: PendingOutputs,
}

/// Writes a sequence of tables, and their blob files. No user key is in two of the tables.
pub(crate) struct TableOutputWriter {
    context: Arc<TreeContext>,
    options: OutputOptions,
    /// Index of the first of `options.output_level_boundaries` that is above the last key.
    next_boundary: usize,
    writer: Option<(NewFile, TableWriter)>,
    finished: Vec<TableMeta>,
    separator: Option<BlobSeparator>,
    pending: PendingOutputs,
}

impl TableOutputWriter {
    pub(crate) fn new(context: Arc<TreeContext>, options: OutputOptions) -> TableOutputWriter {
        let pending = PendingOutputs::new(Arc::clone(&context));
        let separator = options.separation.clone().map(|separation| BlobSeparator::new(separation, options.created_ms));
        TableOutputWriter { context, options, next_boundary: 0, writer: None, finished: Vec::new(), separator, pending }
    }

    /// Adds an entry in internal key order. `new_key`: its user key differs from that of the previous entry.
    pub(crate) fn add(&mut self, entry: EntryRef<'_>, new_key: bool) -> Result<()> {
        if new_key {
            let behind = advance_past(
                &self.options.output_level_boundaries,
                &mut self.next_boundary,
                entry.user_key,
                &self.context.order,
            );
            let full = self.writer.as_ref().is_some_and(|(_, w)| w.written_bytes() >= self.options.target_file_size);
            if behind || full {
                self.finish_table()?;
            }
        }
        if self.writer.is_none() {
            self.writer = Some(self.begin_table()?);
        }
        let (_, writer) = self.writer.as_mut().expect("it was created above");
        match &mut self.separator {
            Some(separator) if separator.should_separate(&entry) => {
                writer.add(separator.write_value(entry, &mut self.pending)?)
            }
            _ => writer.add(entry),
        }
    }

    fn begin_table(&mut self) -> Result<(NewFile, TableWriter)> {
        let new = self.pending.create(DataFileKind::Table)?;
        let (order, seed) = (self.context.order.clone(), self.context.hash_seed);
        let (options, file) = (self.options.table.clone(), Arc::clone(&new.file));
        let writer = TableWriter::create(file, new.file_id, options, order, seed, self.options.created_ms)?;
        Ok((new, writer))
    }

    /// Finishes the table being written, if there is one, and makes its bytes durable.
    fn finish_table(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.finished.push(new.finish(|id| writer.finish(id))?);
        }
        Ok(())
    }

    /// Finishes the last files and makes all names durable.
    pub(crate) fn finish(mut self) -> Result<FinishedOutputs> {
        self.finish_table()?;
        let blobs = self.separator.take().map_or_else(|| Ok(Vec::new()), BlobSeparator::finish)?;
        if !self.finished.is_empty() {
            self.pending.sync_dir()?;
        }
        Ok(FinishedOutputs { tables: self.finished, blobs, pending: self.pending })
    }
}

/// Moves `at` past every boundary that is not above `key`. Returns whether it moved.
fn advance_past(boundaries: &[Vec<u8>], at: &mut usize, key: &[u8], order: &KeyOrder) -> bool {
    let from = *at;
    while boundaries.get(*at).is_some_and(|boundary| order.cmp(boundary, key).is_le()) {
        *at += 1;
    }
    *at > from
}

/// Writes a sequence of blob files.
pub(crate) struct BlobSeparator {
    options: KvSeparationOptions,
    created_ms: u64,
    writer: Option<(NewFile, BlobWriter)>,
    finished: Vec<BlobFileMeta>,
    /// The encoded pointer to the last value.
    pointer: Vec<u8>,
}

impl BlobSeparator {
    pub(crate) fn new(options: KvSeparationOptions, created_ms: u64) -> BlobSeparator {
        BlobSeparator { options, created_ms, writer: None, finished: Vec::new(), pointer: Vec::new() }
    }

    /// Whether the value of an entry goes to a blob file.
    pub(crate) fn should_separate(&self, entry: &EntryRef<'_>) -> bool {
        entry.kind == RecordKind::Put && entry.value.len() as u64 >= u64::from(self.options.threshold)
    }

    /// Writes the value of an entry to a blob file, and returns the entry with the pointer. New files are added to
    /// `pending`.
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
        let (_, writer) = self.writer.as_mut().expect("it was created above");
        self.pointer.clear();
        writer.append(entry.value)?.encode(&mut self.pointer);
        Ok(EntryRef { kind: RecordKind::BlobPointer, value: &self.pointer, ..entry })
    }

    /// Finishes the file being written, if there is one, and makes its bytes durable.
    fn finish_file(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.finished.push(new.finish(|_| writer.finish())?);
        }
        Ok(())
    }

    /// Finishes the last file. The caller makes the names durable.
    pub(crate) fn finish(mut self) -> Result<Vec<BlobFileMeta>> {
        self.finish_file()?;
        Ok(self.finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossing_a_boundary_is_reported_once() {
        let boundaries = [b"c".to_vec(), b"e".to_vec(), b"f".to_vec()];
        let mut at = 0;
        let order = KeyOrder::bytewise();
        let passed: Vec<bool> = ["a", "b", "d", "dd", "g", "h"]
            .iter()
            .map(|k| advance_past(&boundaries, &mut at, k.as_bytes(), &order))
            .collect();
        assert_eq!(passed, [false, false, true, false, true, false]);
    }
}
