//! Records of the log that wait for the comparator of their partition, and the tables that they are moved to.
//!
//! A partition with a comparator of the user has no tree until [`Database::open_partition_with_comparator`] gives that
//! comparator. Its records of the log are held in memory until then, and the log must not be retired before they are
//! permanent. When the log is too large they are spilled: written to tables in bytewise order of their keys, with every
//! version. These tables are no part of the tree. When the comparator is given, their records are read back and
//! replayed in the order of their sequence numbers, ahead of those of the log; flushes make the tables obsolete.
//!
//! [`Database::open_partition_with_comparator`]: crate::Database::open_partition_with_comparator

use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::version_edit::TableMeta;
use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::lsm::table_handle::TreeContext;
use crate::lsm::table_output::{FinishedOutputs, OutputOptions, TableOutputWriter};
use crate::table::options::{FilterPolicy, TableOptions, TableReadOptions};
use crate::table::reader::TableReader;

/// A spilled table is cut at the first new key behind this many bytes.
const TABLE_SIZE: u64 = 64 << 20;

/// A record of the log that waits for the comparator of its partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PendingRecord {
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

impl PendingRecord {
    pub(crate) fn new(entry: EntryRef<'_>) -> PendingRecord {
        let EntryRef { user_key: user, seqno, kind, value } = entry;
        PendingRecord { seqno, kind, key: user.to_vec(), value: value.to_vec() }
    }

    pub(crate) fn entry(&self) -> EntryRef<'_> {
        EntryRef { user_key: &self.key, seqno: self.seqno, kind: self.kind, value: &self.value }
    }
}

/// Bytes of log that the records of a spilled table took, at most: each has a header of a few bytes.
pub(crate) fn log_bytes(table: &TableMeta) -> u64 {
    table.raw_bytes.saturating_add(table.entries.saturating_mul(32))
}

/// Writes the records to tables, durable under their names. The tables are removed when the returned [`PendingOutputs`]
/// is dropped.
///
/// # Errors
/// `Io` and `OutOfSpace`.
pub(crate) fn write(
    context: TreeContext,
    compression: CompressionType,
    records: &[PendingRecord],
    created_ms: u64,
) -> Result<(Vec<TableMeta>, PendingOutputs)> {
    let options = OutputOptions {
        table: TableOptions { compression, filter: FilterPolicy::None, ..TableOptions::default() },
        target_file_size: TABLE_SIZE,
        created_ms,
        output_level_boundaries: Vec::new(),
        separation: None,
    };
    let mut sorted: Vec<&PendingRecord> = records.iter().collect();
    sorted.sort_unstable_by(|a, b| a.key.cmp(&b.key).then(b.seqno.cmp(&a.seqno)));
    let mut output = TableOutputWriter::new(Arc::new(context), options);
    let mut last = None;
    for record in sorted {
        output.add(record.entry(), last != Some(&record.key))?;
        last = Some(&record.key);
    }
    let FinishedOutputs { tables, pending, .. } = output.finish()?;
    Ok((tables, pending))
}

/// Reads back the records above `after`, in the order of their sequence numbers. They are all in memory at once, as
/// they were before they were spilled.
///
/// # Errors
/// `Corruption` and `Io`, naming the table.
pub(crate) fn read<'a>(
    context: &TreeContext,
    tables: impl Iterator<Item = &'a TableMeta>,
    after: SeqNo,
) -> Result<Vec<PendingRecord>> {
    let mut records = Vec::new();
    for meta in tables {
        read_table(context, meta, after, &mut records)
            .map_err(|error| error.in_file(context.files.path(meta.number)))?;
    }
    records.sort_unstable_by_key(|record| record.seqno);
    Ok(records)
}

fn read_table(context: &TreeContext, meta: &TableMeta, after: SeqNo, out: &mut Vec<PendingRecord>) -> Result<()> {
    let options = TableReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_partitions: false };
    let (files, cache) = (Arc::clone(&context.files), Arc::clone(&context.cache));
    let table = Arc::new(TableReader::open(files, cache, meta, KeyOrder::bytewise(), context.hash_seed, options)?);
    let mut cursor = table.iter(false);
    cursor.seek_to_first()?;
    while let Some(entry) = cursor.current() {
        if entry.seqno > after {
            out.push(PendingRecord::new(entry));
        }
        cursor.next()?;
    }
    Ok(())
}
