//! The tables of a database whose manifest is lost, and what they state about the flushes and compactions that have
//! written them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::key_range::KeyRange;
use crate::base::version_edit::{FileNumber, INGEST_PLACEHOLDER, PartitionId, TableMeta};
use crate::base::{KeyOrder, SeqNo};
use crate::table::format::{JobOrigin, TableOrigin, TableProperties};

/// A table that can be read.
pub(super) struct FoundTable {
    pub(super) properties: TableProperties,
    pub(super) meta: TableMeta,
}

pub(super) type FoundTables = BTreeMap<FileNumber, FoundTable>;

impl FoundTable {
    /// Whether its sequence number is in the lost manifest. Several entries of other tables have several numbers.
    pub(super) fn is_ingested(&self) -> bool {
        let is_placeholder =
            self.meta.smallest_seqno == INGEST_PLACEHOLDER && self.meta.largest_seqno == INGEST_PLACEHOLDER;
        match self.properties.origin {
            TableOrigin::Ingest { .. } => true,
            TableOrigin::Unknown => self.meta.entries > 1 && is_placeholder,
            _ => false,
        }
    }

    /// The number of the first table of the same ingest.
    pub(super) fn ingest_number(&self) -> FileNumber {
        match self.properties.origin {
            TableOrigin::Ingest { first_output, .. } => first_output,
            _ => self.meta.number,
        }
    }

    pub(super) fn is_of(&self, id: PartitionId) -> bool {
        self.properties.partition.as_ref().is_some_and(|(of, _)| *of == id)
    }

    fn job(&self) -> Option<&JobOrigin> {
        match &self.properties.origin {
            TableOrigin::Flush(job) | TableOrigin::Compaction(job) => Some(job),
            _ => None,
        }
    }

    /// Keeps one list of inputs in memory for all tables of a compaction.
    pub(super) fn share_inputs(&mut self, lists: &mut BTreeMap<FileNumber, Arc<[FileNumber]>>) {
        if let TableOrigin::Compaction(job) = &mut self.properties.origin {
            let list = lists.entry(job.first_output).or_insert_with(|| Arc::clone(&job.inputs));
            if *list == job.inputs {
                job.inputs = Arc::clone(list);
            }
        }
    }

    /// See [`hides_range_delete`].
    pub(super) fn hides(&self, range: &KeyRange, seqno: SeqNo, order: &KeyOrder) -> bool {
        hides_range_delete(&self.meta, &self.properties.origin, range, seqno, order)
    }
}

/// Whether a range delete at `seqno` must not be applied again because of a table: a compaction has applied it, and
/// then set sequence numbers to 0, also of newer entries.
///
/// [`TableMeta::range_deletes_applied_through`] does not tell it. If it is above `seqno`, the compaction may have found
/// only newer range deletes, and if it is 0, none at all.
pub(super) fn hides_range_delete(
    table: &TableMeta,
    origin: &TableOrigin,
    range: &KeyRange,
    seqno: SeqNo,
    order: &KeyOrder,
) -> bool {
    let overlaps = range.start.cmp_key(&table.largest_key.0, order).is_lt()
        && range.end.cmp_key(&table.smallest_key.0, order).is_gt();
    // Tables of earlier versions do not state what was flushed when they were written.
    let has_applied = !matches!(origin, TableOrigin::Compaction(job) if job.flushed_through < seqno);
    overlaps && table.smallest_seqno == SeqNo::ZERO && has_applied
}

/// A flush or a compaction, and those of its tables that are there.
pub(super) struct WritingJob {
    pub(super) outputs: Vec<FileNumber>,
    pub(super) partition: Option<PartitionId>,
    pub(super) is_flush: bool,
    /// All its tables are there.
    pub(super) is_complete: bool,
    pub(super) flushed_through: SeqNo,
    /// The tables that a compaction replaces.
    pub(super) inputs: Arc<[FileNumber]>,
}

/// The flushes and compactions by their first tables.
pub(super) struct WritingJobs(pub(super) BTreeMap<FileNumber, WritingJob>);

impl WritingJobs {
    /// A flush is complete only if the blob files of its tables are finished, because a flush finishes some of them
    /// behind its tables. `has_blob_file`: whether a blob file is there and finished.
    pub(super) fn new(tables: &FoundTables, has_blob_file: impl Fn(FileNumber) -> bool) -> WritingJobs {
        let mut found: BTreeMap<FileNumber, Vec<(&FoundTable, &JobOrigin)>> = BTreeMap::new();
        for table in tables.values() {
            if let Some(job) = table.job() {
                found.entry(job.first_output).or_default().push((table, job));
            }
        }
        let job = |(first, outputs): (FileNumber, Vec<(&FoundTable, &JobOrigin)>)| {
            let (table, job) = outputs[0];
            let is_flush = matches!(table.properties.origin, TableOrigin::Flush(_));
            let ordinals: BTreeSet<u64> = outputs.iter().map(|(_, job)| job.ordinal).collect();
            let last = outputs.iter().find(|(_, job)| job.is_last).map(|(_, job)| job.ordinal);
            let mut used = outputs.iter().flat_map(|(table, _)| &table.meta.blob_usage);
            let is_complete = last.is_some_and(|last| ordinals.into_iter().eq(0..=last))
                && (!is_flush || used.all(|usage| has_blob_file(usage.logical_file)));
            let job = WritingJob {
                outputs: outputs.iter().map(|(table, _)| table.meta.number).collect(),
                partition: table.properties.partition.as_ref().map(|(id, _)| *id),
                is_flush,
                is_complete,
                flushed_through: job.flushed_through,
                inputs: Arc::clone(&job.inputs),
            };
            (first, job)
        };
        WritingJobs(found.into_iter().map(job).collect())
    }

    /// For each partition, a sequence number up to which all of its records were written to tables.
    pub(super) fn flushed_through(&self, tables: &FoundTables) -> BTreeMap<PartitionId, SeqNo> {
        let jobs = self.0.values().filter(|job| job.is_complete || !job.is_flush);
        let stated = jobs.filter_map(|job| Some((job.partition?, job.flushed_through)));
        // Tables of earlier versions do not state it.
        let is_earlier = |table: &&FoundTable| table.properties.origin == TableOrigin::Unknown && !table.is_ingested();
        let earlier = tables.values().filter(is_earlier);
        let earlier =
            earlier.filter_map(|table| Some((table.properties.partition.as_ref()?.0, table.meta.largest_seqno)));
        let mut flushed = BTreeMap::new();
        for (id, through) in stated.chain(earlier) {
            let flushed: &mut SeqNo = flushed.entry(id).or_default();
            *flushed = through.max(*flushed);
        }
        flushed
    }

    /// Whether a compaction has not ended, and nothing is lost without its tables: all tables that it reads are there,
    /// and no later compaction of the partition can have read its tables. The edits name none of the tables.
    pub(super) fn is_unfinished_compaction(&self, first: FileNumber, tables: &FoundTables) -> bool {
        let Some(job) = self.0.get(&first).filter(|job| !job.is_flush && !job.is_complete) else { return false };
        let mut later = self.0.range(first..).skip(1).map(|(_, later)| later);
        job.inputs.iter().all(|input| tables.contains_key(input))
            && !later.any(|later| !later.is_flush && later.partition == job.partition)
    }

    /// Whether a compaction that has set sequence numbers to 0 may have had a table as input indirectly: another
    /// compaction had replaced the table, and the tables of that one are gone.
    pub(super) fn may_have_replaced(&self, table: &FoundTable, tables: &FoundTables) -> bool {
        let Some((id, _)) = &table.properties.partition else { return false };
        let (order, is_bytewise) = (KeyOrder::bytewise(), table.properties.comparator == BYTEWISE_NAME);
        let is_behind = |output: &FoundTable| {
            is_bytewise && order.cmp(&output.meta.largest_key.0, &table.meta.smallest_key.0).is_lt()
        };
        let begins_behind = |output: &FoundTable| {
            is_bytewise && order.cmp(&output.meta.smallest_key.0, &table.meta.largest_key.0).is_gt()
        };
        let later = self.0.range(table.meta.number..).map(|(_, job)| job);
        let mut later = later.filter(|job| {
            let is_later = !job.outputs.contains(&table.meta.number) && table.meta.largest_seqno <= job.flushed_through;
            !job.is_flush && job.partition == Some(*id) && is_later
        });
        later.any(|job| {
            let from = job.outputs.partition_point(|output| tables.get(output).is_some_and(is_behind));
            let mut outputs = job.outputs[from..].iter().filter_map(|output| tables.get(output));
            outputs.by_ref().take_while(|output| !begins_behind(output)).any(|o| o.meta.smallest_seqno == SeqNo::ZERO)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::ExpiryTimes;

    /// A range delete that a compaction of an earlier version has applied was applied again, and hid newer entries.
    #[test]
    fn tables_of_earlier_versions_hide_deletes() {
        let table = |smallest, origin| FoundTable {
            properties: TableProperties { origin, ..TableProperties::default() },
            meta: TableMeta {
                number: FileNumber(1),
                size: 100,
                entries: 10,
                tombstones: 0,
                smallest_seqno: SeqNo(smallest),
                largest_seqno: SeqNo(20),
                created_ms: 0,
                raw_bytes: 100,
                smallest_key: (b"c".to_vec(), SeqNo(smallest)),
                largest_key: (b"f".to_vec(), SeqNo(20)),
                blob_usage: Vec::new(),
                range_deletes_applied_through: SeqNo::ZERO,
                expiry: ExpiryTimes::default(),
                global_seqno: None,
            },
        };
        let order = KeyOrder::bytewise();
        let range = KeyRange::decode(b"a", &[0, b'z']).unwrap().to_owned();
        let hides = |smallest, origin| table(smallest, origin).hides(&range, SeqNo(9), &order);
        let compaction = |through| TableOrigin::Compaction(JobOrigin::new(SeqNo(through), []));
        assert!(hides(0, TableOrigin::Unknown) && !hides(1, TableOrigin::Unknown));
        assert!(hides(0, compaction(9)) && !hides(0, compaction(8)));
    }
}
