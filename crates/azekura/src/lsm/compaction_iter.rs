//! From a cursor over versions to tables with those that survive: what flush and compaction have in common.

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::older::OlderRuns;
use crate::lsm::retain::{DropDecision, VersionDropRules};
use crate::lsm::table_handle::TableHandle;
use crate::lsm::table_output::{FinishedOutputs, TableOutputWriter};

/// A merge that can stop after any entry and go on later. Dropped unfinished, it leaves no file behind.
///
/// Its read points stay those of its beginning: readers that come later read at or above the last one, where it keeps
/// everything.
pub(crate) struct CompactionIter {
    input: MergingIter,
    order: KeyOrder,
    rules: VersionDropRules,
    older_runs: OlderRuns<TableHandle>,
    /// Whether sequence numbers may become 0; not on level 0, whose runs are ordered by them.
    zero_seqnos: bool,
    output: TableOutputWriter,
    started: bool,
    /// The current user key.
    key: Vec<u8>,
    in_key: bool,
    is_base_level_for_key: bool,
    /// Whether an entry of the current key was written.
    key_written: bool,
}

impl CompactionIter {
    pub(crate) fn new(
        cursor: MergingIter,
        order: KeyOrder,
        retain: VersionDropRules,
        older: OlderRuns<TableHandle>,
        settles: bool,
        output: TableOutputWriter,
    ) -> CompactionIter {
        let (started, key, in_key, nothing_older, key_written) = (false, Vec::new(), false, false, false);
        CompactionIter {
            input: cursor,
            order,
            rules: retain,
            older_runs: older,
            zero_seqnos: settles,
            output,
            started,
            key,
            in_key,
            is_base_level_for_key: nothing_older,
            key_written,
        }
    }

    /// Goes on for about `budget` bytes of entries; true at the end.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        if !self.started {
            self.input.seek_to_first()?;
            self.started = true;
        }
        let mut passed = 0;
        while self.input.valid() {
            if passed >= budget {
                return Ok(false);
            }
            let user = self.input.entry().user_key;
            if !self.in_key || self.order.cmp(&self.key, user).is_ne() {
                self.finish_key()?;
                self.begin_key();
            }
            passed += self.process_entry()?;
            self.input.next()?;
        }
        self.finish_key()?;
        Ok(true)
    }

    fn begin_key(&mut self) {
        let user = self.input.entry().user_key;
        self.key.clear();
        self.key.extend_from_slice(user);
        self.in_key = true;
        self.is_base_level_for_key = !self.older_runs.may_contain_key(user);
        self.key_written = false;
    }

    /// Decides about the entry the cursor stands on; gives its size.
    fn process_entry(&mut self) -> Result<u64> {
        let entry = self.input.entry();
        if self.rules.decide(entry.seqno, entry.kind) == DropDecision::Keep {
            for (seqno, kind) in self.rules.take_deferred() {
                self.output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
                self.key_written = true;
            }
            let seqno =
                self.rules.output_seqno(entry.seqno, entry.kind, self.zero_seqnos && self.is_base_level_for_key);
            self.output.add(EntryRef { seqno, ..entry }, !self.key_written)?;
            self.key_written = true;
        }
        Ok((entry.user_key.len() + entry.value.len() + size_of::<SeqNo>()) as u64)
    }

    fn finish_key(&mut self) -> Result<()> {
        for (seqno, kind) in self.rules.finish_key(self.is_base_level_for_key) {
            self.output.add(tombstone(&self.key, seqno, kind), !self.key_written)?;
            self.key_written = true;
        }
        self.in_key = false;
        Ok(())
    }

    /// The files, durable under their names; after [`step`](CompactionIter::step) has said true.
    pub(crate) fn finish(self) -> Result<FinishedOutputs> {
        self.output.finish()
    }
}

fn tombstone(user: &[u8], seqno: SeqNo, kind: RecordKind) -> EntryRef<'_> {
    EntryRef { user_key: user, seqno, kind, value: &[] }
}
