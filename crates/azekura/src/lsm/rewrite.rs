//! From a cursor over versions to tables with those that survive: what flush and compaction have in common.

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::cursor::merge::MergeCursor;
use crate::lsm::handle::TableHandle;
use crate::lsm::older::Older;
use crate::lsm::output::{Finished, Output};
use crate::lsm::retain::{Fate, Retain};

/// A merge that can stop after any entry and go on later. Dropped unfinished, it leaves no file behind.
///
/// Its read points stay those of its beginning: readers that come later read at or above the last one, where it keeps
/// everything.
pub(crate) struct Rewrite {
    cursor: MergeCursor,
    order: KeyOrder,
    retain: Retain,
    older: Older<TableHandle>,
    /// Whether sequence numbers may become 0; not on level 0, whose runs are ordered by them.
    settles: bool,
    output: Output,
    started: bool,
    /// The current user key.
    key: Vec<u8>,
    in_key: bool,
    nothing_older: bool,
    /// Whether an entry of the current key was written.
    key_written: bool,
}

impl Rewrite {
    pub(crate) fn new(
        cursor: MergeCursor,
        order: KeyOrder,
        retain: Retain,
        older: Older<TableHandle>,
        settles: bool,
        output: Output,
    ) -> Rewrite {
        let (started, key, in_key, nothing_older, key_written) = (false, Vec::new(), false, false, false);
        Rewrite { cursor, order, retain, older, settles, output, started, key, in_key, nothing_older, key_written }
    }

    /// Goes on for about `budget` bytes of entries; true at the end.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        if !self.started {
            self.cursor.seek_to_first()?;
            self.started = true;
        }
        let mut passed = 0;
        while self.cursor.valid() {
            if passed >= budget {
                return Ok(false);
            }
            let user = self.cursor.entry().user;
            if !self.in_key || self.order.cmp(&self.key, user).is_ne() {
                self.end_key()?;
                self.begin_key();
            }
            passed += self.take()?;
            self.cursor.next()?;
        }
        self.end_key()?;
        Ok(true)
    }

    fn begin_key(&mut self) {
        let user = self.cursor.entry().user;
        self.key.clear();
        self.key.extend_from_slice(user);
        self.in_key = true;
        self.nothing_older = !self.older.may_hold(user);
        self.key_written = false;
    }

    /// Decides about the entry the cursor stands on; gives its size.
    fn take(&mut self) -> Result<u64> {
        let entry = self.cursor.entry();
        if self.retain.next(entry.seqno, entry.kind) == Fate::Keep {
            for (seqno, kind) in self.retain.release() {
                self.output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
                self.key_written = true;
            }
            let seqno = self.retain.settled(entry.seqno, entry.kind, self.settles && self.nothing_older);
            self.output.add(EntryRef { seqno, ..entry }, !self.key_written)?;
            self.key_written = true;
        }
        Ok((entry.user.len() + entry.value.len() + size_of::<SeqNo>()) as u64)
    }

    fn end_key(&mut self) -> Result<()> {
        for (seqno, kind) in self.retain.end_key(self.nothing_older) {
            self.output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
            self.key_written = true;
        }
        self.in_key = false;
        Ok(())
    }

    /// The files, durable under their names; after [`step`](Rewrite::step) has said true.
    pub(crate) fn finish(self) -> Result<Finished> {
        self.output.finish()
    }
}

fn tombstone(user: &[u8], seqno: SeqNo, kind: RecordKind) -> EntryRef<'_> {
    EntryRef { user, seqno, kind, value: &[] }
}
