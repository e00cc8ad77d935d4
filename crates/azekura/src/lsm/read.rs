//! Reads of a tree: lookups and iterators.

use std::sync::Arc;

use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::ReadSeqno;
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::version::{HasTableMeta, SortedRun, Version};
use crate::mem::epoch::Pin;
use crate::table::block_fetcher::BlockValue;
use crate::table::iter::TableIter;
use crate::table::reader::PointLookup;

impl SuperVersion {
    /// Finds the version of `key` that is visible at `at`, and passes its value or blob pointer to `read`, in place.
    /// Searches memtables and then runs, each from the newest. The first version found is the newest one.
    ///
    /// The caller has taken `self` before this resolves `Latest`, so that `self` contains every visible record.
    pub(crate) fn find<R>(
        &self,
        context: &TreeContext,
        key: &[u8],
        at: ReadSeqno,
        pin: &Pin,
        read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        let at = match at {
            ReadSeqno::Latest => context.last_visible.get(),
            ReadSeqno::At(seqno) => seqno,
        };
        let lookup = PointLookup::new(key, at, &context.order, context.hash_seed);
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if let Some(entry) = memtable.get(key, lookup.hash, at) {
                return Ok(entry.kind.is_value().then(|| read(entry.kind, BlockValue::unpinned(entry.value))));
            }
        }
        find_in_tables(&self.version, &context.order, &lookup, pin, read)
    }

    /// An iterator over all entries of this super version. It holds the tables. Entries that a memtable gets later are
    /// above every sequence number that was chosen before.
    pub(crate) fn iter(&self, context: &TreeContext) -> Box<dyn InternalIter> {
        let mut children: Vec<Box<dyn InternalIter>> = Vec::new();
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if !memtable.is_empty() {
                children.push(Box::new(memtable.iter()));
            }
        }
        for run in self.version.runs() {
            children.push(Box::new(RunIter::new(Arc::clone(run), context, true)));
        }
        match children.len() {
            1 => children.remove(0),
            _ => Box::new(MergingIter::new(context.order.clone(), children)),
        }
    }
}

fn find_in_tables<R>(
    version: &Version<TableHandle>,
    order: &KeyOrder,
    lookup: &PointLookup<'_>,
    pin: &Pin,
    read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
) -> Result<Option<R>> {
    let mut read = Some(read); // used once, in the table that has the key
    for run in version.runs() {
        let Some(table) = run.find(lookup.key, order) else { continue };
        if table.meta().smallest_seqno > lookup.snapshot_seqno {
            continue;
        }
        let found = table.table()?.get_with(lookup, pin, |_, kind, value| {
            let read = read.take().filter(|_| kind.is_value());
            read.map(|read| read(kind, value))
        })?;
        if let Some(value) = found {
            return Ok(value);
        }
    }
    Ok(None)
}

/// Iterates over the tables of a run and opens each of them when it is reached. Holds the run, and so its files.
pub(crate) struct RunIter {
    // Declared before `run`, so that the open table is dropped before the handles that make files obsolete.
    table_iter: Option<TableIter>,
    table_index: usize,
    run: Arc<SortedRun<TableHandle>>,
    order: KeyOrder,
    fill_cache: bool,
}

impl RunIter {
    pub(crate) fn new(run: Arc<SortedRun<TableHandle>>, context: &TreeContext, fill_cache: bool) -> RunIter {
        RunIter { table_iter: None, table_index: 0, run, order: context.order.clone(), fill_cache }
    }

    /// Opens the table at index `at`, unless it is open; `None` if there is no such table.
    fn open(&mut self, at: usize) -> Result<Option<&mut TableIter>> {
        let Some(handle) = self.run.tables().get(at) else {
            self.table_iter = None;
            return Ok(None);
        };
        if self.table_iter.is_none() || self.table_index != at {
            self.table_iter = None;
            self.table_iter = Some(handle.table()?.iter(self.fill_cache));
            self.table_index = at;
        }
        Ok(self.table_iter.as_mut())
    }

    /// Moves from the end of a table to the first entry after it.
    fn settle_forward(&mut self) -> Result<()> {
        while self.table_iter.as_ref().is_some_and(|inner| !inner.valid()) {
            if let Some(inner) = self.open(self.table_index + 1)? {
                inner.seek_to_first()?;
            }
        }
        Ok(())
    }

    fn settle_backward(&mut self) -> Result<()> {
        while self.table_iter.as_ref().is_some_and(|inner| !inner.valid()) {
            match self.table_index.checked_sub(1) {
                None => self.table_iter = None,
                Some(before) => {
                    if let Some(inner) = self.open(before)? {
                        inner.seek_to_last()?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs a step. If the step fails, the iterator is not valid afterwards.
    fn invalidate_on_error(&mut self, step: impl FnOnce(&mut RunIter) -> Result<()>) -> Result<()> {
        step(self).inspect_err(|_| self.table_iter = None)
    }
}

fn internal_key<'a>((user_key, seqno): &'a (Vec<u8>, SeqNo)) -> InternalKey<'a> {
    InternalKey::new(user_key, *seqno)
}

impl InternalIter for RunIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.invalidate_on_error(|this| {
            if let Some(inner) = this.open(0)? {
                inner.seek_to_first()?;
            }
            this.settle_forward()
        })
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.invalidate_on_error(|this| {
            if let Some(inner) = this.open(this.run.tables().len().wrapping_sub(1))? {
                inner.seek_to_last()?;
            }
            this.settle_backward()
        })
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.invalidate_on_error(|this| {
            let ends_before =
                |t: &Arc<TableHandle>| internal_key(&t.meta().largest_key).cmp(&target, &this.order).is_lt();
            let at = this.run.tables().partition_point(ends_before);
            if let Some(inner) = this.open(at)? {
                inner.seek(target)?;
            }
            this.settle_forward()
        })
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.invalidate_on_error(|this| {
            let begins_before =
                |t: &Arc<TableHandle>| internal_key(&t.meta().smallest_key).cmp(&target, &this.order).is_lt();
            let behind = this.run.tables().partition_point(begins_before);
            if let Some(inner) = this.open(behind.wrapping_sub(1))? {
                inner.seek_before(target)?;
            }
            this.settle_backward()
        })
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let Some(inner) = &mut self.table_iter else { return Ok(()) };
        match inner.next() {
            Ok(()) if inner.valid() => Ok(()),
            moved => self.invalidate_on_error(|this| moved.and_then(|()| this.settle_forward())),
        }
    }

    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.table_iter.as_ref().and_then(TableIter::key_and_kind))
    }

    fn prev(&mut self) -> Result<()> {
        self.invalidate_on_error(|this| {
            if let Some(inner) = &mut this.table_iter {
                inner.prev()?;
            }
            this.settle_backward()
        })
    }

    fn valid(&self) -> bool {
        self.table_iter.as_ref().is_some_and(|inner| inner.valid())
    }

    fn entry(&self) -> EntryRef<'_> {
        self.table_iter.as_ref().expect("the iterator is valid").entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        self.table_iter.as_ref().and_then(TableIter::current)
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.table_iter.as_ref().and_then(TableIter::shared_value)
    }
}
