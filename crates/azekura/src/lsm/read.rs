//! Reading a tree: one key, or all of them in order.

use std::sync::Arc;

use crate::base::part::Part;
use crate::base::{EntryRef, KeyOrder, KeyRef, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::cursor::merge::MergeCursor;
use crate::engine::ReadPoint;
use crate::lsm::handle::{TableHandle, TreeContext};
use crate::lsm::super_version::SuperVersion;
use crate::lsm::version::{Described, Run, Version};
use crate::mem::epoch::Pin;
use crate::table::cursor::TableCursor;
use crate::table::reader::Lookup;
use crate::table::source::Value;

impl SuperVersion {
    /// Shows `read` the value of `key` as of `at`, or the pointer to it, where it lies. Memtables are asked first, from
    /// the newest, then runs, from the newest: the first version found is the newest there is.
    ///
    /// `self` was taken before `Latest` is resolved here, as it must be.
    pub(crate) fn find<R>(
        &self,
        context: &TreeContext,
        key: &[u8],
        at: ReadPoint,
        pin: &Pin,
        read: impl FnOnce(RecordKind, Value<'_>) -> R,
    ) -> Result<Option<R>> {
        let at = match at {
            ReadPoint::Latest => context.visible.get(),
            ReadPoint::At(seqno) => seqno,
        };
        let lookup = Lookup::new(key, at, &context.order, context.hash_seed);
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if let Some(entry) = memtable.get(key, lookup.hash, at) {
                return Ok(entry.kind.is_value().then(|| read(entry.kind, Value::loose(entry.value))));
            }
        }
        find_in_tables(&self.version, &context.order, &lookup, pin, read)
    }

    /// A cursor over everything that is there now; it keeps the tables it walks. What a memtable gets later, no moment
    /// that was chosen before can show.
    pub(crate) fn cursor(&self, context: &TreeContext) -> Box<dyn Cursor> {
        let mut children: Vec<Box<dyn Cursor>> = Vec::new();
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if !memtable.is_empty() {
                children.push(Box::new(memtable.cursor()));
            }
        }
        for run in self.version.runs() {
            children.push(Box::new(RunCursor::new(Arc::clone(run), context, true)));
        }
        match children.len() {
            1 => children.remove(0),
            _ => Box::new(MergeCursor::new(context.order.clone(), children)),
        }
    }
}

fn find_in_tables<R>(
    version: &Version<TableHandle>,
    order: &KeyOrder,
    lookup: &Lookup<'_>,
    pin: &Pin,
    read: impl FnOnce(RecordKind, Value<'_>) -> R,
) -> Result<Option<R>> {
    let mut read = Some(read); // it is used once, in whichever table has the key
    for run in version.runs() {
        let Some(table) = run.find(lookup.key, order) else { continue };
        if table.meta().lowest > lookup.at {
            continue;
        }
        let found = table.table()?.find(lookup, pin, |_, kind, value| {
            let read = read.take().filter(|_| kind.is_value());
            read.map(|read| read(kind, value))
        })?;
        if let Some(value) = found {
            return Ok(value);
        }
    }
    Ok(None)
}

/// Walks the tables of a run one after another, opening each when it is reached; keeps the run, and so the files.
pub(crate) struct RunCursor {
    // Before `run`: the open table goes before the handles that remove files.
    inner: Option<TableCursor>,
    at: usize,
    run: Arc<Run<TableHandle>>,
    order: KeyOrder,
    fill_cache: bool,
}

impl RunCursor {
    pub(crate) fn new(run: Arc<Run<TableHandle>>, context: &TreeContext, fill_cache: bool) -> RunCursor {
        RunCursor { inner: None, at: 0, run, order: context.order.clone(), fill_cache }
    }

    /// Opens the table at `at`, unless it is open; none if there is no such table.
    fn open(&mut self, at: usize) -> Result<Option<&mut TableCursor>> {
        let Some(handle) = self.run.tables().get(at) else {
            self.inner = None;
            return Ok(None);
        };
        if self.inner.is_none() || self.at != at {
            self.inner = None;
            self.inner = Some(handle.table()?.cursor(self.fill_cache));
            self.at = at;
        }
        Ok(self.inner.as_mut())
    }

    /// From the end of a table to the start of the next that has something.
    fn settle_forward(&mut self) -> Result<()> {
        while self.inner.as_ref().is_some_and(|inner| !inner.valid()) {
            if let Some(inner) = self.open(self.at + 1)? {
                inner.seek_to_first()?;
            }
        }
        Ok(())
    }

    fn settle_backward(&mut self) -> Result<()> {
        while self.inner.as_ref().is_some_and(|inner| !inner.valid()) {
            match self.at.checked_sub(1) {
                None => self.inner = None,
                Some(before) => {
                    if let Some(inner) = self.open(before)? {
                        inner.seek_to_last()?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Does a step that must leave the cursor not valid if it fails.
    fn guarded(&mut self, step: impl FnOnce(&mut RunCursor) -> Result<()>) -> Result<()> {
        step(self).inspect_err(|_| self.inner = None)
    }
}

fn bound<'a>((user, seqno): &'a (Vec<u8>, SeqNo)) -> KeyRef<'a> {
    KeyRef::new(user, *seqno)
}

impl Cursor for RunCursor {
    fn seek_to_first(&mut self) -> Result<()> {
        self.guarded(|this| {
            if let Some(inner) = this.open(0)? {
                inner.seek_to_first()?;
            }
            this.settle_forward()
        })
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.guarded(|this| {
            if let Some(inner) = this.open(this.run.tables().len().wrapping_sub(1))? {
                inner.seek_to_last()?;
            }
            this.settle_backward()
        })
    }

    fn seek(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.guarded(|this| {
            let ends_before = |t: &Arc<TableHandle>| bound(&t.meta().largest).cmp(&target, &this.order).is_lt();
            let at = this.run.tables().partition_point(ends_before);
            if let Some(inner) = this.open(at)? {
                inner.seek(target)?;
            }
            this.settle_forward()
        })
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.guarded(|this| {
            let begins_before = |t: &Arc<TableHandle>| bound(&t.meta().smallest).cmp(&target, &this.order).is_lt();
            let behind = this.run.tables().partition_point(begins_before);
            if let Some(inner) = this.open(behind.wrapping_sub(1))? {
                inner.seek_before(target)?;
            }
            this.settle_backward()
        })
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let Some(inner) = &mut self.inner else { return Ok(()) };
        match inner.next() {
            Ok(()) if inner.valid() => Ok(()),
            moved => self.guarded(|this| moved.and_then(|()| this.settle_forward())),
        }
    }

    fn forward(&mut self) -> Result<Option<(KeyRef<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.inner.as_ref().and_then(TableCursor::head))
    }

    fn prev(&mut self) -> Result<()> {
        self.guarded(|this| {
            if let Some(inner) = &mut this.inner {
                inner.prev()?;
            }
            this.settle_backward()
        })
    }

    fn valid(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.valid())
    }

    fn entry(&self) -> EntryRef<'_> {
        self.inner.as_ref().expect("only a valid cursor is asked for its entry").entry()
    }

    fn peek(&self) -> Option<EntryRef<'_>> {
        self.inner.as_ref().and_then(TableCursor::peek)
    }

    fn share(&self) -> Option<Part> {
        self.inner.as_ref().and_then(TableCursor::share)
    }
}
