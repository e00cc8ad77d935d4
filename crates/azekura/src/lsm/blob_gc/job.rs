//! A blob GC in progress.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::reader::{BlobReadAhead, LiveBlobs};
use crate::blob::writer::BlobRewriteWriter;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::blob::map::BlobMap;
use crate::lsm::pending_outputs::{NewFile, PendingOutputs};
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::version::{HasTableMeta, Version};
use crate::vfs::open_files::DataFileKind;

/// Copies the referenced values of some blob files, one step at a time. It may pause between two steps while flushes
/// and compactions run. These only remove references to its input files. If they remove an input file, the job is of no
/// use any more. An unfinished job that is dropped leaves no file.
pub(crate) struct BlobGcJob {
    context: Arc<TreeContext>,
    /// The files to be removed. Their values are read here.
    inputs: Vec<Arc<BlobHandle>>,
    live: LiveBlobs,
    /// The sections still to be copied, the current one first.
    sections: std::iter::Peekable<std::vec::IntoIter<BlobGcSection>>,
    /// Number of copied values of the current section, and the next ordinal; `None` before the section is begun.
    position: Option<(u64, u32)>,
    read_ahead: BlobReadAhead,
    target_size: u64,
    created_ms: u64,
    writer: Option<(NewFile, BlobRewriteWriter)>,
    outputs: Vec<BlobFileMeta>,
    /// `None` once an edit may name the files.
    pending: Option<PendingOutputs>,
    outputs_durable: bool,
    pub(crate) bytes_read: u64,
}

/// A logical file to be copied.
struct BlobGcSection {
    logical: FileNumber,
    handle: Arc<BlobHandle>,
    /// Bytes of the frames to be copied.
    bytes: u64,
}

impl BlobGcJob {
    /// Takes as many of the `chosen` files as fill one file of `target_size`, at least one; `None` if none of them
    /// exists. Reads the blob references of the tables.
    ///
    /// # Errors
    /// Those of reading tables.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        version: &Version<TableHandle>,
        chosen: &[FileNumber],
        target_size: u64,
        created_ms: u64,
    ) -> Result<Option<BlobGcJob>> {
        let (files, sections) = select_inputs(version.blobs(), chosen, target_size);
        if files.is_empty() {
            return Ok(None);
        }
        let logical: BTreeSet<FileNumber> = sections.iter().map(|section| section.logical).collect();
        let mut live = LiveBlobs::default();
        for (_, table) in version.tables() {
            if table.meta().blob_usage.iter().any(|uses| logical.contains(&uses.logical_file)) {
                live.add_files(&table.table()?.blob_references()?, |file| logical.contains(&file));
            }
        }
        Ok(Some(BlobGcJob {
            pending: Some(PendingOutputs::new(Arc::clone(context))),
            context: Arc::clone(context),
            inputs: files,
            live,
            sections: sections.into_iter().peekable(),
            position: None,
            read_ahead: BlobReadAhead::adaptive(),
            target_size,
            created_ms,
            writer: None,
            outputs: Vec::new(),
            outputs_durable: false,
            bytes_read: 0,
        }))
    }

    /// The files to be removed.
    pub(crate) fn inputs(&self) -> &[Arc<BlobHandle>] {
        &self.inputs
    }

    /// Whether the version still has all input files.
    pub(crate) fn inputs_exist(&self, blobs: &BlobMap) -> bool {
        self.inputs.iter().all(|file| blobs.contains(file.meta().number))
    }

    /// Continues for about `budget` bytes; true when all files are written and durable. A job that has failed must be
    /// dropped.
    ///
    /// # Errors
    /// Those of reading and writing; `Corruption` if the blob file lacks a referenced value.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let mut left = budget;
        while let Some(section) = self.sections.peek() {
            if left == 0 {
                return Ok(false);
            }
            let (logical, handle, bytes) = (section.logical, Arc::clone(&section.handle), section.bytes);
            if self.position.is_none() {
                self.begin_section(logical, bytes)?;
            }
            let read = self.copy_section(logical, &handle, left)?;
            left = left.saturating_sub(read);
            self.bytes_read += read;
        }
        if !self.outputs_durable {
            self.finish_output()?;
            if !self.outputs.is_empty() {
                self.context.fs.sync_dir(&self.context.dir)?;
            }
            self.outputs_durable = true;
        }
        Ok(true)
    }

    /// Begins the section of a logical file, in a new file if the current one would become too large: a logical file is
    /// always in a single blob file.
    fn begin_section(&mut self, logical: FileNumber, bytes: u64) -> Result<()> {
        let full = |writer: &BlobRewriteWriter| writer.written_bytes().saturating_add(bytes) > self.target_size;
        if self.writer.as_ref().is_some_and(|(_, writer)| full(writer)) {
            self.finish_output()?;
        }
        if self.writer.is_none() {
            let pending = self.pending.as_mut().expect("outputs are pending until all sections are copied");
            let new = pending.create(DataFileKind::Blob)?;
            let writer = BlobRewriteWriter::create(Arc::clone(&new.file), new.file_id, self.created_ms);
            self.writer = Some((new, writer));
        }
        let (_, writer) = self.writer.as_mut().expect("it was created above");
        writer.begin_section(logical);
        self.position = Some((0, 0));
        Ok(())
    }

    /// Copies values of the current section, and returns the bytes of the frames. At its end, the next section becomes
    /// the current one.
    fn copy_section(&mut self, logical: FileNumber, handle: &BlobHandle, budget: u64) -> Result<u64> {
        let (mut copied, mut next) = self.position.expect("the section was begun");
        let (_, writer) = self.writer.as_mut().expect("a section that was begun has a file");
        let live = self.live.ordinals_of(logical);
        let file = handle.file();
        let mut iter = file.section_iter(logical)?;
        iter.seek(next);
        let mut passed = 0;
        while let Some((ordinal, frame)) = iter.next()? {
            if ordinal < next || live.is_none_or(|live| !live.contains(ordinal)) {
                continue;
            }
            if passed >= budget {
                self.position = Some((copied, ordinal));
                return Ok(passed);
            }
            file.with_frame(frame, &mut self.read_ahead, |frame| writer.copy_value(ordinal, frame))?;
            copied += 1;
            next = ordinal.saturating_add(1);
            passed += frame.len;
        }
        if copied != live.map_or(0, |live| live.count()) {
            let error = Error::corruption("tables point to values that the blob file does not have");
            return Err(error.in_file(file.path()));
        }
        self.position = None;
        self.sections.next();
        Ok(passed)
    }

    /// Finishes the file being written, if there is one, and makes its bytes durable.
    fn finish_output(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.outputs.push(new.finish(|id| writer.finish(id))?);
        }
        Ok(())
    }

    /// The written files, after [`step`](BlobGcJob::step) has returned true. They are kept from now on, because an edit
    /// may name them.
    pub(crate) fn take_outputs(&mut self) -> &[BlobFileMeta] {
        if let Some(pending) = self.pending.take_if(|_| self.outputs_durable) {
            pending.release();
        }
        &self.outputs
    }

    /// Makes its output files obsolete, also those of an edit that failed and is known not to be in the manifest.
    pub(crate) fn abandon(mut self) {
        if self.pending.take().is_none() {
            self.outputs.iter().for_each(|file| self.context.obsolete_files.push(DataFileKind::Blob, file.number));
        }
    }
}

/// Selects the input files of one blob GC, and the sections to copy.
fn select_inputs(
    blobs: &BlobMap,
    chosen: &[FileNumber],
    target_size: u64,
) -> (Vec<Arc<BlobHandle>>, Vec<BlobGcSection>) {
    let (mut files, mut copied, mut bytes) = (Vec::new(), Vec::new(), 0u64);
    for handle in blobs.handles().filter(|handle| chosen.contains(&handle.meta().number)) {
        let sections =
            handle.meta().sections.iter().map(|section| (section.logical_file, blobs.referenced(section.logical_file)));
        let wanted: Vec<(FileNumber, u64)> = sections.filter(|(_, bytes)| *bytes > 0).collect();
        let more: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
        if !files.is_empty() && bytes.saturating_add(more) > target_size {
            continue;
        }
        bytes = bytes.saturating_add(more);
        files.push(Arc::clone(handle));
        copied.extend(wanted.iter().map(|&(logical, bytes)| BlobGcSection {
            logical,
            handle: Arc::clone(handle),
            bytes,
        }));
    }
    (files, copied)
}
