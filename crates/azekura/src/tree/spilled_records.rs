//! Buffered WAL records of partitions whose comparator was not given yet, and the spilled tables that store them.
//!
//! A partition with a custom comparator has no tree until [`Database::open_partition_with_comparator`] gives the
//! comparator. Until then its records of the write-ahead log (WAL) are buffered in memory, and the WAL segments that
//! contain them cannot be retired. If the WAL exceeds its maximum size, the buffered records are spilled: all versions
//! are written to tables in bytewise key order. Spilled tables do not belong to a tree. When the comparator is given,
//! their records are read and replayed by ascending sequence number, before the records of the WAL. A later flush that
//! covers all records of a spilled table makes it obsolete.
//!
//! [`Database::open_partition_with_comparator`]: crate::Database::open_partition_with_comparator

use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::TableMeta;
use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter};
use crate::lsm::tree_context::TreeContext;
use crate::table::format::TableOrigin;
use crate::table::options::{FilterPolicy, TableOptions, TableReadOptions};
use crate::table::reader::TableReader;

/// Target size of a spilled table in bytes. A table is finished at the first new key after this many bytes.
const TABLE_SIZE: u64 = 64 << 20;

/// A WAL record of a partition whose comparator was not given yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PendingRecord {
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

impl PendingRecord {
    pub(crate) fn new(entry: EntryRef<'_>) -> PendingRecord {
        let EntryRef { user_key, seqno, kind, value } = entry;
        PendingRecord { seqno, kind, key: user_key.to_vec(), value: value.to_vec() }
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        (size_of::<PendingRecord>() + self.key.len() + self.value.len()) as u64
    }

    pub(crate) fn entry(&self) -> EntryRef<'_> {
        EntryRef { user_key: &self.key, seqno: self.seqno, kind: self.kind, value: &self.value }
    }
}

/// Returns an upper bound of the WAL bytes of all records in spilled tables: keys and values, and at most 32 bytes of
/// header per record.
pub(crate) fn wal_bytes(manifest_state: &ManifestState) -> u64 {
    let tables = manifest_state.partitions.values().flat_map(|partition| partition.spilled.values());
    let bytes = |table: &TableMeta| table.raw_bytes.saturating_add(table.entries.saturating_mul(32));
    tables.map(bytes).fold(0, u64::saturating_add)
}

/// Writes the records to tables. Contents and names of the tables are durable when this returns. They become obsolete
/// when the returned [`PendingOutputs`] is dropped before [`PendingOutputs::keep`] was called.
///
/// # Errors
/// `Io` and `OutOfSpace`.
pub(crate) fn write(
    context: TreeContext,
    compression: CompressionType,
    records: &[PendingRecord],
    created_ms: u64,
) -> Result<PendingOutputs> {
    let options = OutputOptions {
        table: TableOptions { compression, filter_policy: FilterPolicy::None, ..TableOptions::default() },
        target_file_size: TABLE_SIZE,
        output_level_boundaries: Vec::new(),
        separation: None,
        new_value_separation: None,
    };
    let mut sorted: Vec<&PendingRecord> = records.iter().collect();
    sorted.sort_unstable_by(|a, b| a.key.cmp(&b.key).then(b.seqno.cmp(&a.seqno)));
    debug_assert!(
        sorted.is_sorted_by(|a, b| (&a.key, b.seqno) < (&b.key, a.seqno)),
        "each version of a key is written once, the newest first"
    );
    let mut outputs = PendingOutputs::new(&Arc::new(context), created_ms);
    outputs.origin = TableOrigin::Spilled;
    let mut output = TableOutputWriter::new(outputs, options);
    let mut last = None;
    for record in sorted {
        output.add(record.entry(), last != Some(&record.key))?;
        last = Some(&record.key);
    }
    output.outputs.finish()?;
    Ok(output.outputs)
}

/// Returns the records of `tables` with sequence numbers above `after`, in ascending order. All of them are in memory
/// at once.
///
/// # Errors
/// `Corruption` and `Io`, with the path of the table.
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
    let (files, cache) = (&context.files, Arc::clone(&context.cache));
    let table = Arc::new(TableReader::open(files, cache, meta, KeyOrder::bytewise(), context.hash_seed, options)?);
    let mut iter = table.iter(false);
    iter.seek_to_first()?;
    while let Some(entry) = iter.current() {
        if entry.seqno > after {
            out.push(PendingRecord::new(entry));
        }
        iter.next()?;
    }
    Ok(())
}
