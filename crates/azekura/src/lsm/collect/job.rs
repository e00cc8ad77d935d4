//! A collection under way.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::edit::{BlobMeta, FileId};
use crate::base::{Error, Result};
use crate::blob::liveness::Liveness;
use crate::blob::reader::ValuesAhead;
use crate::blob::writer::RewriteWriter;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::map::BlobMap;
use crate::lsm::handle::{TableHandle, TreeContext};
use crate::lsm::version::{Described, Version};
use crate::lsm::written::{NewFile, Unnamed};
use crate::vfs::files::DataKind;

/// Copies what tables refer to out of some blob files, a step at a time. It may lie paused between two steps while
/// flushes and compactions go on: references only go, and if one of its files goes, it is of no use any more. Dropped
/// unfinished, it leaves no file behind.
pub(crate) struct Collection {
    context: Arc<TreeContext>,
    /// The files that shall go; their values are read here.
    files: Vec<Arc<BlobHandle>>,
    live: Liveness,
    /// Sections that are copied, the current one first.
    pieces: std::iter::Peekable<std::vec::IntoIter<Piece>>,
    /// Values of the current piece that were copied, and the ordinal that comes next; none before it was begun.
    begun: Option<(u64, u32)>,
    ahead: ValuesAhead,
    target_size: u64,
    created_ms: u64,
    writer: Option<(NewFile, RewriteWriter)>,
    done: Vec<BlobMeta>,
    /// Until an edit may name the files.
    unnamed: Option<Unnamed>,
    written: bool,
    pub(crate) bytes_read: u64,
}

/// A logical file to be copied.
struct Piece {
    logical: FileId,
    handle: Arc<BlobHandle>,
    /// Of the frames that are copied.
    bytes: u64,
}

impl Collection {
    /// Of those of `chosen` that are there, as many as fill one file of `target_size`, at least one; `None` if none is
    /// there. Reads what tables refer to.
    ///
    /// # Errors
    /// Those of reading tables.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        version: &Version<TableHandle>,
        chosen: &[FileId],
        target_size: u64,
        created_ms: u64,
    ) -> Result<Option<Collection>> {
        let (files, pieces) = group(version.blobs(), chosen, target_size);
        if files.is_empty() {
            return Ok(None);
        }
        let logical: BTreeSet<FileId> = pieces.iter().map(|piece| piece.logical).collect();
        let mut live = Liveness::default();
        for (_, table) in version.tables() {
            if table.meta().blobs.iter().any(|uses| logical.contains(&uses.logical)) {
                live.add_of(&table.table()?.blob_references()?, |file| logical.contains(&file));
            }
        }
        Ok(Some(Collection {
            unnamed: Some(Unnamed::new(Arc::clone(context))),
            context: Arc::clone(context),
            files,
            live,
            pieces: pieces.into_iter().peekable(),
            begun: None,
            ahead: ValuesAhead::adaptive(),
            target_size,
            created_ms,
            writer: None,
            done: Vec::new(),
            written: false,
            bytes_read: 0,
        }))
    }

    /// The files that shall go.
    pub(crate) fn files(&self) -> &[Arc<BlobHandle>] {
        &self.files
    }

    /// Whether all files that shall go are there still.
    pub(crate) fn applies_to(&self, blobs: &BlobMap) -> bool {
        self.files.iter().all(|file| blobs.has(file.meta().id))
    }

    /// Goes on for about `budget` bytes; true when all files are written and durable. After a failure it must be
    /// dropped.
    ///
    /// # Errors
    /// Those of reading and writing; `Corruption` if a value is missing that tables refer to.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let mut left = budget;
        while let Some(piece) = self.pieces.peek() {
            if left == 0 {
                return Ok(false);
            }
            let (logical, handle, bytes) = (piece.logical, Arc::clone(&piece.handle), piece.bytes);
            if self.begun.is_none() {
                self.begin(logical, bytes)?;
            }
            let read = self.copy(logical, &handle, left)?;
            left = left.saturating_sub(read);
            self.bytes_read += read;
        }
        if !self.written {
            self.cut()?;
            if !self.done.is_empty() {
                self.context.fs.sync_dir(&self.context.dir)?;
            }
            self.written = true;
        }
        Ok(true)
    }

    /// Makes room for a logical file: one stands in one file as a whole.
    fn begin(&mut self, logical: FileId, bytes: u64) -> Result<()> {
        let full = |writer: &RewriteWriter| writer.written_bytes().saturating_add(bytes) > self.target_size;
        if self.writer.as_ref().is_some_and(|(_, writer)| full(writer)) {
            self.cut()?;
        }
        if self.writer.is_none() {
            let unnamed = self.unnamed.as_mut().expect("an edit may name the files once all are written");
            let new = unnamed.create(DataKind::Blob)?;
            let writer = RewriteWriter::create(Arc::clone(&new.file), new.file_id, self.created_ms);
            self.writer = Some((new, writer));
        }
        let (_, writer) = self.writer.as_mut().expect("it was just made");
        writer.begin_section(logical);
        self.begun = Some((0, 0));
        Ok(())
    }

    /// Copies values of the current piece; gives the bytes of frames passed. At the end of the piece it goes on to the
    /// next.
    fn copy(&mut self, logical: FileId, handle: &BlobHandle, budget: u64) -> Result<u64> {
        let (mut copied, mut next) = self.begun.expect("the piece was begun");
        let (_, writer) = self.writer.as_mut().expect("a piece that was begun has a file");
        let live = self.live.of(logical);
        let file = handle.file();
        let mut walk = file.walk(logical)?;
        walk.seek(next);
        let mut passed = 0;
        while let Some((ordinal, frame)) = walk.next()? {
            if ordinal < next || live.is_none_or(|live| !live.contains(ordinal)) {
                continue;
            }
            if passed >= budget {
                self.begun = Some((copied, ordinal));
                return Ok(passed);
            }
            file.with_frame(frame, &mut self.ahead, |frame| writer.copy(ordinal, frame))?;
            copied += 1;
            next = ordinal.saturating_add(1);
            passed += frame.len;
        }
        if copied != live.map_or(0, |live| live.count()) {
            let error = Error::corruption("tables point to values that the blob file does not have");
            return Err(error.in_file(file.path()));
        }
        self.begun = None;
        self.pieces.next();
        Ok(passed)
    }

    /// Ends the file being written, if there is one, and makes its bytes durable.
    fn cut(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.done.push(new.end(|id| writer.finish(id))?);
        }
        Ok(())
    }

    /// What it has written, once [`step`](Collection::step) has said true. An edit may name it from now on, so it
    /// stays.
    pub(crate) fn name_output(&mut self) -> &[BlobMeta] {
        if let Some(unnamed) = self.unnamed.take_if(|_| self.written) {
            unnamed.keep();
        }
        &self.done
    }

    /// Gives what it has written to the graveyard, also what an edit was to name that failed and is known not to be
    /// there.
    pub(crate) fn give_up(mut self) {
        if self.unnamed.take().is_none() {
            self.done.iter().for_each(|file| self.context.graveyard.push(DataKind::Blob, file.id));
        }
    }
}

/// The files of one collection, and what of them is copied.
fn group(blobs: &BlobMap, chosen: &[FileId], target_size: u64) -> (Vec<Arc<BlobHandle>>, Vec<Piece>) {
    let (mut files, mut pieces, mut bytes) = (Vec::new(), Vec::new(), 0u64);
    for handle in blobs.handles().filter(|handle| chosen.contains(&handle.meta().id)) {
        let sections =
            handle.meta().sections.iter().map(|section| (section.logical, blobs.referenced(section.logical)));
        let wanted: Vec<(FileId, u64)> = sections.filter(|(_, bytes)| *bytes > 0).collect();
        let more: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
        if !files.is_empty() && bytes.saturating_add(more) > target_size {
            continue;
        }
        bytes = bytes.saturating_add(more);
        files.push(Arc::clone(handle));
        pieces.extend(wanted.iter().map(|&(logical, bytes)| Piece { logical, handle: Arc::clone(handle), bytes }));
    }
    (files, pieces)
}
