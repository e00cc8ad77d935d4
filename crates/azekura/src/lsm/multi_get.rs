//! Reads of several keys of a tree at one sequence number.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::{RecordKind, Result, SeqNo};
use crate::engine::{ReadMoment, ReadSeqno};
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::read::{SuperVersion, missing_blob_file_error, unexpired_value};
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::HasTableMeta;
use crate::mem::epoch::Pin;
use crate::mem::slice::Slice;
use crate::table::block_fetcher::BlockValue;
use crate::table::multi_get::{TableLookup, find_all};
use crate::table::reader::PointLookup;

/// Number of keys that are looked up together, and so the maximum number of blocks that are read together.
const GROUP_LEN: usize = 128;

/// The pointer of a value in a blob file, and the number of its key.
struct PendingBlob {
    number: usize,
    pointer: BlobPointer,
    file: Arc<BlobHandle>,
}

/// The values of the keys that were looked up so far.
struct FoundValues<'a> {
    now: &'a SuperVersion,
    context: &'a TreeContext,
    at: ReadMoment,
    values: Vec<Option<Slice>>,
    blobs: Vec<PendingBlob>,
    /// The numbers of keys whose visible version is an operand.
    operands: Vec<usize>,
}

impl FoundValues<'_> {
    /// Sets the value of key `number` to that of its visible version.
    fn set(&mut self, number: usize, kind: RecordKind, value: BlockValue<'_>) -> Result<()> {
        let (kind, value) = match kind {
            RecordKind::Put | RecordKind::BlobPointer => (kind, value),
            _ => match unexpired_value(self.context, ReadSeqno::At(self.at), kind, value)? {
                Some(value) => value,
                None => return Ok(()),
            },
        };
        debug_assert!(self.values[number].is_none(), "a key has one visible version");
        if kind == RecordKind::BlobPointer {
            let pointer = BlobPointer::decode(&value)?;
            let pin = Pin::new();
            if let Some(value) = self.context.cache.linked_value(pointer.value_id(), pointer.value_len, &pin) {
                self.values[number] = Some(value.to_slice(|| value.to_arc()));
                return Ok(());
            }
            let file = self.now.blob_file(pointer.logical_file);
            let file = Arc::clone(file.ok_or_else(|| missing_blob_file_error(&pointer))?);
            self.blobs.push(PendingBlob { number, pointer, file });
        } else if kind == RecordKind::Merge {
            self.operands.push(number);
        } else {
            self.values[number] = Some(value.to_slice());
        }
        Ok(())
    }
}

impl LsmTree {
    /// Returns the values of `keys` at `at`, the moment of a registered snapshot, in the order of `keys`.
    ///
    /// The super version is taken after the snapshot was registered, so it contains every version that is visible at
    /// `at`, and the blob files of their values.
    pub(crate) fn get_many(&self, keys: &[&[u8]], at: ReadMoment) -> Result<Vec<Option<Slice>>> {
        let now = self.current.get();
        let context = &self.context;
        let (values, blobs, operands) = (vec![None; keys.len()], Vec::new(), Vec::new());
        let mut found = FoundValues { now: &now, context, at, values, blobs, operands };
        for (group, keys) in keys.chunks(GROUP_LEN).enumerate() {
            now.find_group(&self.context, keys, group * GROUP_LEN, at.seqno, &mut found)?;
        }
        read_blobs(&mut found)?;
        for number in std::mem::take(&mut found.operands) {
            found.values[number] = self.merged_value(keys[number], ReadSeqno::At(at))?.map(Slice::from);
        }
        Ok(found.values)
    }
}

impl SuperVersion {
    /// Looks up `keys`, which are numbered from `first` on.
    fn find_group(
        &self,
        context: &TreeContext,
        keys: &[&[u8]],
        first: usize,
        at: SeqNo,
        found: &mut FoundValues<'_>,
    ) -> Result<()> {
        debug_assert!(keys.len() <= GROUP_LEN, "the arrays have an element for each key");
        let lookups: Vec<PointLookup<'_>> =
            keys.iter().map(|key| PointLookup::new(key, at, &context.order, context.hash_seed)).collect();
        // Numbers of the keys of which no version was found yet.
        let mut pending: Vec<usize> = (0..keys.len()).collect();
        // By key, the newest range delete over it; the key has no older version.
        let mut removed = [SeqNo::ZERO; GROUP_LEN];
        let has_range_deletes = self.has_range_deletes();
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if memtable.is_empty() {
                continue;
            }
            if has_range_deletes {
                let set = memtable.range_tombstones_arc();
                for &number in &pending {
                    let newest = set.covering_seqno(keys[number], at, &context.order);
                    removed[number] = removed[number].max(newest);
                }
            }
            let hashes = || pending.iter().filter_map(|&number| lookups[number].hash);
            hashes().for_each(|hash| memtable.prefetch_slot(hash));
            hashes().for_each(|hash| memtable.prefetch_records(hash));
            let mut rest = Vec::with_capacity(pending.len());
            for &number in &pending {
                match memtable.get(lookups[number].key, lookups[number].hash, at) {
                    Some(entry) if entry.seqno < removed[number] => {}
                    Some(entry) => found.set(first + number, entry.kind, BlockValue::unpinned(entry.value))?,
                    None => rest.push(number),
                }
            }
            pending = rest;
        }
        if has_range_deletes {
            for &number in &pending {
                let newest = self.version.range_tombstones().covering_seqno(keys[number], at, &context.order);
                removed[number] = removed[number].max(newest);
            }
        }
        for run in self.version.runs() {
            if pending.is_empty() {
                break;
            }
            let mut in_run = Vec::with_capacity(pending.len());
            for &number in &pending {
                let lookup = &lookups[number];
                let Some(table) = run.find(lookup.key, &context.order) else { continue };
                if table.meta().smallest_seqno <= at && table.meta().largest_seqno >= removed[number] {
                    in_run.push(TableLookup { number, table: table.table()?, lookup });
                }
            }
            let mut is_found = [false; GROUP_LEN];
            find_all(&in_run, &mut |number, seqno, kind, value| {
                is_found[number] = true;
                if seqno < removed[number] { Ok(()) } else { found.set(first + number, kind, value) }
            })?;
            pending.retain(|&number| !is_found[number]);
            debug_assert!(pending.is_sorted_by(|a, b| a < b), "each key is pending once");
        }
        Ok(())
    }
}

/// Reads the values that are in blob files, in the order of files and offsets.
fn read_blobs(found: &mut FoundValues<'_>) -> Result<()> {
    found.blobs.sort_by_key(|blob| (blob.file.meta().number, blob.pointer.logical_file, blob.pointer.frame_offset));
    for blobs in found.blobs.chunks(GROUP_LEN) {
        if blobs.len() > 1 {
            for blob in blobs {
                blob.file.file().will_read(&blob.pointer);
            }
        }
        for blob in blobs {
            found.values[blob.number] = Some(blob.file.file().read(&blob.pointer, None)?);
        }
    }
    Ok(())
}
