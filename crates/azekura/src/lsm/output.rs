//! The files that a flush, a compaction, a blob GC or a recovery writes: from their creation to the version edit that
//! names them.
//!
//! A file is durable with its name before an edit names it. A file that no edit may name becomes obsolete.

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::key::{put_expiry, split_expiry};
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionEdit, TableMeta};
use crate::base::{EntryRef, Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::writer::BlobWriter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::direct_file::DirectBlobFile;
use crate::lsm::options::KvSeparationOptions;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::NUM_LEVELS;
use crate::memtable::Memtable;
use crate::table::format::{JobOrigin, TableOrigin};
use crate::table::options::TableOptions;
use crate::table::writer::TableWriter;
use crate::vfs::File;
use crate::vfs::open_files::DataFileKind;

/// Files that no edit names yet. They become obsolete when this is dropped, unless [`keep`](PendingOutputs::keep) was
/// called.
pub(crate) struct PendingOutputs {
    context: Arc<TreeContext>,
    created_ms: u64,
    created: Vec<(DataFileKind, FileNumber)>,
    table: Option<OpenOutput<TableWriter>>,
    blob_file: Option<OpenOutput<BlobWriter>>,
    /// The finished tables.
    pub(crate) tables: Vec<TableMeta>,
    /// The finished blob files.
    pub(crate) blobs: Vec<BlobFileMeta>,
    /// See [`TableMeta::range_deletes_applied_through`].
    pub(crate) range_deletes_applied_through: SeqNo,
    /// What writes the tables. The fields that differ between the tables are set when each is finished.
    pub(crate) origin: TableOrigin,
    is_kept: bool,
    /// No edit will name the files, so they are not synced.
    is_temporary: bool,
}

/// A file that is being written.
struct OpenOutput<W> {
    id: FileNumber,
    file: Arc<dyn File>,
    path: PathBuf,
    writer: W,
}

impl<W> OpenOutput<W> {
    /// Lets `finish` write the end of the file. If `sync`, makes its bytes durable, but not its name.
    fn finish<M>(self, sync: bool, finish: impl FnOnce(W, FileNumber) -> Result<M>) -> Result<M> {
        let meta = finish(self.writer, self.id)?;
        if sync {
            self.file.sync_data().map_err(|error| error.in_file(&self.path))?;
        }
        Ok(meta)
    }
}

fn out_of_order() -> Error {
    Error::corruption("tables are not in order, or the comparator contradicts itself")
}

impl PendingOutputs {
    pub(crate) fn new(context: &Arc<TreeContext>, created_ms: u64) -> PendingOutputs {
        PendingOutputs {
            context: Arc::clone(context),
            created_ms,
            created: Vec::new(),
            table: None,
            blob_file: None,
            tables: Vec::new(),
            blobs: Vec::new(),
            range_deletes_applied_through: SeqNo::ZERO,
            origin: TableOrigin::Unknown,
            is_kept: false,
            is_temporary: false,
        }
    }

    /// For files that no edit will name.
    pub(crate) fn temporary(context: &Arc<TreeContext>, created_ms: u64) -> PendingOutputs {
        let mut outputs = PendingOutputs::new(context, created_ms);
        outputs.is_temporary = true;
        outputs.origin = TableOrigin::Temporary;
        outputs
    }

    /// Creates a file with a new number. `begin` gets the file, its number, and a random id for its header.
    fn create<W>(
        &mut self,
        kind: DataFileKind,
        begin: impl FnOnce(Arc<dyn File>, FileNumber, [u8; 16]) -> Result<W>,
    ) -> Result<OpenOutput<W>> {
        debug_assert!(!self.is_kept, "an edit may name the files only once all of them are finished");
        let id = self.context.new_file_id();
        debug_assert!(self.created.last().is_none_or(|(_, last)| *last < id), "file numbers increase");
        let tables = &self.context.files;
        let (file, path) = match kind {
            DataFileKind::Table => (tables.create(id)?, tables.path(id)),
            DataFileKind::Blob => (tables.blob_files().create(id)?, tables.blob_files().path(id)),
        };
        self.created.push((kind, id));
        let mut file_id = [0; 16];
        self.context.env.random(&mut file_id);
        let writer = begin(Arc::clone(&file), id, file_id)?;
        Ok(OpenOutput { id, file, path, writer })
    }

    /// The table being written. If there is none, begins one with these options.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn table_writer(&mut self, options: &TableOptions) -> Result<&mut TableWriter> {
        if self.table.is_none() {
            let (order, seed, created_ms) = (self.context.order.clone(), self.context.hash_seed, self.created_ms);
            let context = Arc::clone(&self.context);
            self.table = Some(self.create(DataFileKind::Table, |file, _, file_id| {
                let mut writer = TableWriter::create(file, file_id, options.clone(), order, seed, created_ms);
                writer.set_partition(context.partition, &context.name);
                Ok(writer)
            })?);
        }
        Ok(&mut self.table.as_mut().expect("it was created above").writer)
    }

    /// Finishes the table being written, if there is one and `when` is true for it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`; `Corruption` if two entries point to the same value, or if the smallest key is above the
    /// largest one, because of an inconsistent comparator.
    pub(crate) fn finish_table(&mut self, when: impl FnOnce(&TableWriter) -> bool) -> Result<()> {
        self.finish_table_as(when, false)
    }

    fn finish_table_as(&mut self, when: impl FnOnce(&TableWriter) -> bool, is_last: bool) -> Result<()> {
        if let Some(mut table) = self.table.take_if(|table| when(&table.writer)) {
            let first_output = self.tables.first().map_or(table.id, |first| first.number);
            let ordinal = self.tables.len() as u64;
            let at_position = |job: JobOrigin| JobOrigin { first_output, ordinal, is_last, ..job };
            let origin = match self.origin.clone() {
                TableOrigin::Flush(job) => TableOrigin::Flush(at_position(job)),
                TableOrigin::Compaction(job) => TableOrigin::Compaction(at_position(job)),
                TableOrigin::Ingest { .. } => {
                    TableOrigin::Ingest { first_output, visible: self.context.last_visible.get() }
                }
                other => other,
            };
            table.writer.set_origin(origin);
            let id = table.id;
            let meta = table.finish(!self.is_temporary, TableWriter::finish)?;
            debug_assert_eq!(meta.number, id, "the metadata is that of the table");
            // The table writer has compared neighbouring keys only. No manifest with such a table can be opened.
            if self.context.order.cmp(&meta.smallest_key.0, &meta.largest_key.0).is_gt() {
                return Err(out_of_order());
            }
            debug_assert!(self.tables.last().is_none_or(|last| last.number < id), "tables are finished in their order");
            let range_deletes_applied_through = self.range_deletes_applied_through;
            self.tables.push(TableMeta { range_deletes_applied_through, ..meta });
        }
        Ok(())
    }

    /// Checks the first key of a table. The table writer checks the others.
    ///
    /// # Errors
    /// `Corruption` if it is not after the previous table, because of damaged input or an inconsistent comparator.
    fn check_next_key(&self, user_key: &[u8]) -> Result<()> {
        match self.tables.last().filter(|_| self.table.is_none()) {
            Some(last) if self.context.order.cmp(&last.largest_key.0, user_key).is_ge() => Err(out_of_order()),
            _ => Ok(()),
        }
    }

    /// The blob file being written. If there is none, begins one.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn blob_writer(&mut self) -> Result<&mut BlobWriter> {
        if self.blob_file.is_none() {
            let created_ms = self.created_ms;
            self.blob_file = Some(self.create(DataFileKind::Blob, |file, id, file_id| {
                Ok(BlobWriter::create(file, id, file_id, created_ms))
            })?);
        }
        Ok(&mut self.blob_file.as_mut().expect("it was created above").writer)
    }

    /// Finishes the blob file being written, if there is one and `when` is true for it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn finish_blob_file(&mut self, when: impl FnOnce(&BlobWriter) -> bool) -> Result<()> {
        if let Some(blob_file) = self.blob_file.take_if(|blob_file| when(&blob_file.writer)) {
            let id = blob_file.id;
            let meta = blob_file.finish(true, |writer, _| writer.finish())?;
            debug_assert_eq!(meta.number, id, "the metadata is that of the blob file");
            self.blobs.push(meta);
        }
        Ok(())
    }

    /// Finishes the files being written, and makes the names of all files durable. The last table is finished behind
    /// the blob files, because it states that the output is complete.
    ///
    /// # Errors
    /// Those of finishing a file, and `Io`.
    pub(crate) fn finish(&mut self) -> Result<()> {
        debug_assert!(!self.is_temporary, "temporary files have no durable names");
        self.finish_blob_file(|_| true)?;
        self.finish_table_as(|_| true, true)?;
        if self.created.is_empty() { Ok(()) } else { self.context.fs.sync_dir(&self.context.dir) }
    }

    /// Keeps the files, because an edit may name them from now on, whether or not it is committed. They are
    /// [finished](PendingOutputs::finish).
    pub(crate) fn keep(&mut self) {
        debug_assert!(self.table.is_none() && self.blob_file.is_none(), "an edit names finished files");
        self.is_kept = true;
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// [Keeps](PendingOutputs::keep) the files and returns the edits that name them, with the tables on `level`.
    pub(crate) fn edits(&mut self, level: u8) -> impl Iterator<Item = PartitionEdit> {
        debug_assert!(usize::from(level) < NUM_LEVELS && !self.is_temporary, "an edit names tables of a level");
        debug_assert!(self.created.len() <= self.tables.len() + self.blobs.len(), "the edits name every file");
        self.keep();
        let tables = self.tables.iter().flat_map(move |table| {
            let added = PartitionEdit::TableAdded { level, table: table.clone() };
            std::iter::once(added).chain(table.detail_edits())
        });
        let blobs = self.blobs.iter().map(|file| PartitionEdit::BlobFileAdded { file: file.clone() });
        blobs.chain(tables)
    }

    /// Length of the finished files in bytes.
    pub(crate) fn finished_bytes(&self) -> u64 {
        let tables: u64 = self.tables.iter().map(|table| table.size).sum();
        tables + self.blobs.iter().map(|file| file.size).sum::<u64>()
    }

    /// Makes the files obsolete, also if they were kept: no manifest names them.
    pub(crate) fn discard(mut self) {
        self.is_kept = false;
    }
}

impl Drop for PendingOutputs {
    fn drop(&mut self) {
        if !self.is_kept {
            self.created.iter().for_each(|&(kind, id)| self.context.obsolete_files.push(kind, id));
        }
    }
}

/// How tables are cut and built.
pub(crate) struct OutputOptions {
    pub(crate) table: TableOptions,
    /// A table is finished at the first new user key after this many bytes.
    pub(crate) target_file_size: u64,
    /// Smallest keys of the tables that stay on the output level, ascending. No output table extends over one of them.
    pub(crate) output_level_boundaries: Vec<Vec<u8>>,
    /// How values are separated; `None` leaves each value in its entry.
    pub(crate) separation: Option<KvSeparationOptions>,
    /// How [new](ValueOrigin::New) values are separated.
    pub(crate) new_value_separation: Option<KvSeparationOptions>,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueOrigin {
    /// From the inputs.
    Stored,
    /// From a compaction filter or a merge operator.
    New,
}

/// Writes sorted entries to a sequence of tables, and large values to blob files. No user key is in two of the tables.
pub(crate) struct TableOutputWriter {
    options: OutputOptions,
    /// Index of the first of `options.output_level_boundaries` that is above the last key.
    next_boundary: usize,
    /// The encoded pointer to the last value in a blob file, behind its expiry time if it has one.
    pointer: Vec<u8>,
    pub(crate) outputs: PendingOutputs,
}

impl TableOutputWriter {
    pub(crate) fn new(outputs: PendingOutputs, options: OutputOptions) -> TableOutputWriter {
        debug_assert!(
            outputs.context.order.is_custom() || options.output_level_boundaries.is_sorted(),
            "the tables that stay are in key order"
        );
        TableOutputWriter { options, next_boundary: 0, pointer: Vec::new(), outputs }
    }

    /// Adds an entry in internal key order. `new_key`: its user key differs from that of the previous entry.
    ///
    /// # Errors
    /// Those of [`TableWriter::add`] and of finishing a file. `Corruption` also if a table would not begin after the
    /// previous one.
    pub(crate) fn add(&mut self, entry: EntryRef<'_>, new_key: bool) -> Result<()> {
        self.add_value(entry, new_key, ValueOrigin::Stored)
    }

    /// As [`add`](TableOutputWriter::add), for an entry whose value has that origin.
    pub(crate) fn add_value(&mut self, entry: EntryRef<'_>, new_key: bool, origin: ValueOrigin) -> Result<()> {
        let TableOutputWriter { options, next_boundary, pointer, outputs } = self;
        debug_assert!(new_key || outputs.table.is_some(), "the versions of a key are in one table");
        if new_key {
            let order = &outputs.context.order;
            let behind = advance_past(&options.output_level_boundaries, next_boundary, entry.user_key, order);
            outputs.finish_table(|table| behind || table.written_bytes() >= options.target_file_size)?;
            outputs.check_next_key(entry.user_key)?;
        }
        let separation = match origin {
            ValueOrigin::Stored => &options.separation,
            ValueOrigin::New => &options.new_value_separation,
        };
        let (expires_ms, kind, value) = split_expiry(entry.kind, entry.value)?;
        if let Some(separation) = separation
            && kind == RecordKind::Put
            && value.len() as u64 >= u64::from(separation.separation_threshold)
        {
            outputs
                .finish_blob_file(|file| file.written_bytes() >= separation.blob_file_target_size || file.is_full())?;
            pointer.clear();
            let mut kind = RecordKind::BlobPointer;
            if entry.kind.has_expiry() {
                kind = kind.with_expiry();
                put_expiry(pointer, expires_ms, &[]);
            }
            outputs.blob_writer()?.append(value, separation.compression)?.encode(pointer);
            let pointer_entry = EntryRef { kind, value: pointer, ..entry };
            return outputs.table_writer(&options.table)?.add(pointer_entry);
        }
        outputs.table_writer(&options.table)?.add(entry)
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

/// A flush whose files are written and whose edit is not committed.
pub(crate) struct UncommittedFlush {
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    /// The last sequence number of the memtables.
    pub(crate) through: SeqNo,
    /// The files of the flush, and the direct blob files that it has finished.
    pub(crate) outputs: PendingOutputs,
    /// Bytes that the flush itself has written.
    pub(crate) bytes_written: u64,
    /// The range deletes of the memtables, as far as a reader at one of `snapshots` or later needs them.
    pub(crate) range_tombstones: RangeTombstones,
    pub(crate) snapshots: Vec<SeqNo>,
    /// Direct blob files that are finished, or whose values were copied.
    pub(crate) finished_direct_blobs: Vec<Arc<DirectBlobFile>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::lsm::tests::harness::{LsmFixture, small_options};

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

    /// Regression: only the order within a table was checked. With a comparator that contradicted itself, or with
    /// damaged inputs, tables overlapped. The manifest named them, and the next open failed with `Corruption`.
    #[test]
    fn next_table_must_begin_after_the_last_one() {
        let fixture = LsmFixture::new(KeyOrder::bytewise(), small_options(), 3);
        let options = OutputOptions {
            table: fixture.options.table_options(1),
            target_file_size: 1,
            output_level_boundaries: Vec::new(),
            separation: None,
            new_value_separation: None,
        };
        let mut writer = TableOutputWriter::new(PendingOutputs::new(&fixture.tree.context, 0), options);
        let mut add = |user_key: &[u8], seqno| {
            writer.add(EntryRef { user_key, seqno: SeqNo(seqno), kind: RecordKind::Put, value: b"v" }, true)
        };
        for key in [b"b", b"c"] {
            add(key, 5).unwrap();
        }
        for key in [&b"a"[..], b"b", b"c"] {
            assert_eq!(add(key, 4).unwrap_err().kind(), ErrorKind::Corruption);
        }
        add(b"d", 5).unwrap();
        writer.outputs.finish().unwrap();
        assert_eq!(writer.outputs.tables.len(), 3);
    }
}
