//! External merge sort of entries in any order, with bounded memory.
//!
//! The entries are collected in a buffer. A full buffer is sorted and written to a *run file*: a table without a
//! filter, which no edit names, so that the next open removes it after a crash. The sequence numbers of its entries are
//! the number of the buffer. So the merge of the run files meets the entry that was added last before the other entries
//! of its key.

use std::sync::Arc;

use crate::base::{EntryRef, Error, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::entry_buffer::EntryBuffer;
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter};
use crate::lsm::read::RunIter;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::SortedRun;
use crate::table::options::{DataBlockIndexType, FilterPolicy, TableOptions, TableReadOptions};

/// Number of run files that are merged at a time. Each uses up to 256 KiB for read-ahead, and one block. Tests merge
/// fewer.
const MERGE_FAN_IN: usize = if cfg!(any(test, feature = "testing")) { 4 } else { 24 };

/// Sorts the entries of one caller. If it is dropped, the run files become obsolete.
pub(crate) struct ExternalSorter {
    context: Arc<TreeContext>,
    options: RunFileOptions,
    buffer: EntryBuffer,
    /// Bytes of memory that the buffer may use.
    memory: usize,
    /// Run files by the number of merges that their entries have passed.
    generations: Vec<Vec<Arc<TableHandle>>>,
    buffers_written: u64,
    now_ms: u64,
}

/// How run files are written.
struct RunFileOptions {
    table: TableOptions,
    read: TableReadOptions,
}

/// The entries in key order, each key once.
pub(crate) struct SortedEntries {
    context: Arc<TreeContext>,
    source: SortedSource,
}

enum SortedSource {
    /// The buffer, and the index of the next entry.
    InMemory(EntryBuffer, usize),
    /// The merged run files, and the last key.
    InRunFiles(MergingIter, Option<Vec<u8>>),
}

impl ExternalSorter {
    pub(crate) fn new(tree: &LsmTree, memory: usize, now_ms: u64) -> ExternalSorter {
        let options = tree.options();
        let table = TableOptions {
            filter_policy: FilterPolicy::None,
            data_block_index_type: DataBlockIndexType::BinarySearch,
            ..options.table_options(0)
        };
        let read = options.read_options(0);
        let mut buffer = EntryBuffer::default();
        buffer.reserve(memory);
        ExternalSorter {
            context: Arc::clone(&tree.context),
            options: RunFileOptions { table, read },
            buffer,
            memory,
            generations: Vec::new(),
            buffers_written: 0,
            now_ms,
        }
    }

    /// Whether the buffer has no space for this entry, so that it must be [written](ExternalSorter::write_run) first.
    #[inline]
    pub(crate) fn must_write_before(&self, key: &[u8], value: &[u8]) -> bool {
        !self.buffer.is_empty() && self.buffer.memory() + EntryBuffer::entry_memory(key, value) > self.memory
    }

    #[inline]
    pub(crate) fn push(&mut self, key: &[u8], value: &[u8]) {
        debug_assert!(!self.must_write_before(key, value), "the buffer has space for the entry");
        self.buffer.push(key, value);
    }

    /// Sorts the buffer and writes it to a run file.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn write_run(&mut self) -> Result<()> {
        debug_assert!(!self.buffer.is_empty(), "a run file has an entry");
        self.buffers_written += 1;
        self.buffer.sort(&self.context.order);
        let seqno = SeqNo(self.buffers_written);
        let mut writer = RunFileWriter::new(&self.context, &self.options, self.now_ms);
        for (user_key, value) in self.buffer.iter() {
            writer.add(EntryRef { user_key, seqno, kind: RecordKind::Put, value })?;
        }
        let run = writer.finish()?;
        self.buffer.clear(self.memory);
        self.add_run(run, 0);
        self.merge_full_generations()
    }

    fn add_run(&mut self, run: Arc<TableHandle>, generation: usize) {
        debug_assert!(generation <= self.generations.len(), "a run follows the previous generation");
        if self.generations.len() == generation {
            self.generations.push(Vec::new());
        }
        self.generations[generation].push(run);
    }

    /// Merges each generation that has the maximum number of run files into one run file of the next generation.
    fn merge_full_generations(&mut self) -> Result<()> {
        let mut at = 0;
        while at < self.generations.len() {
            if self.generations[at].len() >= MERGE_FAN_IN {
                let runs = std::mem::take(&mut self.generations[at]);
                let merged = self.merge(runs)?;
                self.add_run(merged, at + 1);
            }
            at += 1;
        }
        debug_assert!(self.generations.iter().all(|runs| runs.len() < MERGE_FAN_IN), "full generations are merged");
        Ok(())
    }

    fn merge(&self, runs: Vec<Arc<TableHandle>>) -> Result<Arc<TableHandle>> {
        debug_assert!((2..=MERGE_FAN_IN).contains(&runs.len()), "a merge has several runs, and a bound of them");
        let mut writer = RunFileWriter::new(&self.context, &self.options, self.now_ms);
        let mut last_key: Option<Vec<u8>> = None;
        let mut merged = self.merging_iter(runs);
        merged.seek_to_first()?;
        while let Some(entry) = merged.current() {
            if is_new_key(&mut last_key, entry.user_key, &self.context) {
                writer.add(entry)?;
            }
            merged.next()?;
        }
        writer.finish()
    }

    fn merging_iter(&self, runs: Vec<Arc<TableHandle>>) -> MergingIter {
        let order = &self.context.order;
        let iter = |run| {
            let run = Arc::new(SortedRun::new(vec![run], order));
            Box::new(RunIter::new(run, &self.context, false)) as Box<dyn InternalIter>
        };
        MergingIter::new(order.clone(), runs.into_iter().map(iter).collect())
    }

    /// Ends the input. Merges run files until all of them can be merged at once.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn finish(mut self) -> Result<SortedEntries> {
        if self.generations.is_empty() {
            self.buffer.sort(&self.context.order);
            return Ok(SortedEntries { context: self.context, source: SortedSource::InMemory(self.buffer, 0) });
        }
        if !self.buffer.is_empty() {
            self.write_run()?;
        }
        self.buffer = EntryBuffer::default(); // its memory is free for the merge
        // Later generations are larger, so the merges begin with the first.
        let mut runs: Vec<Arc<TableHandle>> = std::mem::take(&mut self.generations).into_iter().flatten().collect();
        while runs.len() > MERGE_FAN_IN {
            let rest = runs.split_off(MERGE_FAN_IN);
            let merged = self.merge(runs)?;
            runs = rest;
            runs.push(merged);
        }
        let mut merged = self.merging_iter(runs);
        merged.seek_to_first()?;
        Ok(SortedEntries { context: self.context, source: SortedSource::InRunFiles(merged, None) })
    }
}

impl SortedEntries {
    /// Calls `write` with the next keys and their values, until it returns false. Returns true at the end.
    ///
    /// # Errors
    /// Those of `write`, `Io`, and `Corruption` if a run file is damaged.
    pub(crate) fn write_while(&mut self, mut write: impl FnMut(&[u8], &[u8]) -> Result<bool>) -> Result<bool> {
        match &mut self.source {
            SortedSource::InMemory(buffer, next) => {
                while let Some((key, value)) = buffer.get(*next) {
                    *next += 1;
                    if !write(key, value)? {
                        return Ok(false);
                    }
                }
            }
            SortedSource::InRunFiles(merged, last_key) => {
                while let Some(entry) = merged.current() {
                    let goes_on =
                        !is_new_key(last_key, entry.user_key, &self.context) || write(entry.user_key, entry.value)?;
                    merged.next()?;
                    if !goes_on {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Whether the key differs from `last`, which becomes the key.
fn is_new_key(last: &mut Option<Vec<u8>>, key: &[u8], context: &TreeContext) -> bool {
    match last {
        Some(last) if context.order.cmp(last, key).is_eq() => return false,
        Some(last) => {
            last.clear();
            last.extend_from_slice(key);
        }
        None => *last = Some(key.to_vec()),
    }
    true
}

/// Writes one run file.
struct RunFileWriter {
    context: Arc<TreeContext>,
    read: TableReadOptions,
    output: TableOutputWriter,
}

impl RunFileWriter {
    fn new(context: &Arc<TreeContext>, options: &RunFileOptions, now_ms: u64) -> RunFileWriter {
        let output = OutputOptions {
            table: options.table.clone(),
            target_file_size: u64::MAX,
            output_level_boundaries: Vec::new(),
            separation: None,
            new_value_separation: None,
        };
        let output = TableOutputWriter::new(PendingOutputs::temporary(context, now_ms), output);
        RunFileWriter { context: Arc::clone(context), read: options.read, output }
    }

    fn add(&mut self, entry: EntryRef<'_>) -> Result<()> {
        self.output.add(entry, true)
    }

    /// The file becomes obsolete when the result is dropped.
    fn finish(self) -> Result<Arc<TableHandle>> {
        let mut outputs = self.output.outputs;
        outputs.finish_table(|_| true)?;
        let meta = outputs.tables.pop().ok_or_else(|| Error::corruption("a run file has no entries"))?;
        debug_assert!(outputs.tables.is_empty() && outputs.blobs.is_empty(), "a run file is one table");
        outputs.keep();
        let handle = TableHandle::new(meta, None, self.context, self.read);
        handle.mark_obsolete();
        Ok(handle)
    }
}
