//! Values that a merge operator computes in reads: the operands of a key are versions of it, above the version that the
//! oldest of them changes.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{VALUE_LEN_MAX, split_expiry};
use crate::base::merge_operator::{MergeOperator, merge_fully};
use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{BlobResolver, KeyBounds, ReadMoment};
use crate::iter::InternalIter;
use crate::iter::visible::{Backward, Direction, Forward};
use crate::lsm::read::{SuperVersion, missing_blob_file_error};
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::HasTableMeta;
use crate::mem::slice::Slice;

/// The operands of a key, from the newest to the oldest, and what they change.
#[derive(Default)]
struct OperandChain {
    operands: Vec<Vec<u8>>,
    bytes: u64,
    base: ChainBase,
}

#[derive(Default)]
enum ChainBase {
    /// The key had no value, or its versions are not read completely.
    #[default]
    Missing,
    Inline(Vec<u8>),
    Blob(BlobPointer, Vec<u8>),
}

impl OperandChain {
    /// Adds the next older version, for a reader at the time `now_ms`. Returns whether the versions below it are
    /// needed.
    ///
    /// # Errors
    /// `Corruption` for a malformed pointer or expiry time. `MergeFailed` if the operands are longer than
    /// the longest value.
    fn add(&mut self, kind: RecordKind, value: &[u8], now_ms: u64) -> Result<bool> {
        debug_assert!(matches!(self.base, ChainBase::Missing), "the versions below the base are not needed");
        let (expires_ms, kind, value) = split_expiry(kind, value)?;
        if expires_ms <= now_ms {
            return Ok(false);
        }
        match kind {
            RecordKind::Merge => {
                self.bytes += value.len() as u64;
                if self.bytes > VALUE_LEN_MAX {
                    return Err(Error::new(ErrorKind::MergeFailed, "the operands of a key have more than 4 GiB - 1"));
                }
                self.operands.push(value.to_vec());
                return Ok(true);
            }
            RecordKind::Put => self.base = ChainBase::Inline(value.to_vec()),
            RecordKind::BlobPointer => self.base = ChainBase::Blob(BlobPointer::decode(value)?, value.to_vec()),
            _ => {}
        }
        Ok(false)
    }

    /// Computes the value. `resolve` reads a value in a blob file.
    fn merge(
        &self,
        operator: &dyn MergeOperator,
        key: &[u8],
        resolve: impl FnOnce(&BlobPointer, &[u8]) -> Result<Slice>,
    ) -> Result<Vec<u8>> {
        let blob_value;
        let existing = match &self.base {
            ChainBase::Missing => None,
            ChainBase::Inline(value) => Some(value.as_slice()),
            ChainBase::Blob(pointer, encoded) => {
                blob_value = resolve(pointer, encoded)?;
                Some(&*blob_value)
            }
        };
        match (self.operands.is_empty(), existing) {
            (true, existing) => Ok(existing.unwrap_or_default().to_vec()),
            (false, existing) => merge_fully(operator, key, existing, &self.operands),
        }
    }
}

impl SuperVersion {
    /// Computes the value of `key` at `at`, the moment of a registered snapshot, which was registered before
    /// this super version was taken. `None` if the key is deleted.
    ///
    /// Each source is newer than those after it, so the search ends at the first one that has the base.
    #[cold]
    pub(crate) fn find_merged(
        &self,
        context: &TreeContext,
        operator: &dyn MergeOperator,
        key: &[u8],
        at: ReadMoment,
    ) -> Result<Option<Vec<u8>>> {
        let order = &context.order;
        let sets = if self.has_range_deletes() { self.range_tombstones() } else { Vec::new() };
        let removed = sets.iter().map(|set| set.covering_seqno(key, at.seqno, order)).max().unwrap_or_default();
        let mut chain = OperandChain::default();
        let mut may_have_older = true;
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if may_have_older && memtable.has_records() {
                may_have_older = collect_versions(&mut memtable.iter(), order, key, at, removed, &mut chain)?;
            }
        }
        for run in self.version.runs() {
            let Some(table) = run.find(key, order).filter(|_| may_have_older) else { continue };
            if table.meta().smallest_seqno <= at.seqno && table.meta().largest_seqno >= removed {
                let mut iter = table.table()?.iter(true);
                may_have_older = collect_versions(&mut iter, order, key, at, removed, &mut chain)?;
            }
        }
        if chain.operands.is_empty() && matches!(chain.base, ChainBase::Missing) {
            return Ok(None);
        }
        let resolve = |pointer: &BlobPointer, _: &[u8]| {
            let file = self.blob_file(pointer.logical_file).ok_or_else(|| missing_blob_file_error(pointer))?;
            file.file().read(pointer, None)
        };
        chain.merge(operator, key, resolve).map(Some)
    }
}

/// Adds the versions of `key` from `at` down to `removed` to `chain`, until the base is found. Returns whether older
/// versions are needed.
fn collect_versions(
    iter: &mut dyn InternalIter,
    order: &KeyOrder,
    key: &[u8],
    at: ReadMoment,
    removed: SeqNo,
    chain: &mut OperandChain,
) -> Result<bool> {
    iter.seek(InternalKey::new(key, at.seqno))?;
    while let Some(entry) = iter.current().filter(|entry| order.cmp(entry.user_key, key).is_eq()) {
        if entry.seqno < removed || !chain.add(entry.kind, entry.value, at.now_ms)? {
            return Ok(false);
        }
        iter.next()?;
    }
    Ok(true)
}

/// Replaces operands by the values that they lead to, for a reader at one moment. Other entries pass
/// unchanged, and so do operands that are newer than the reader or beyond its bounds, and older versions of a key.
///
/// A value is computed at an operand that is reached forward. Backward, the oldest versions of a key come first: at an
/// operand, the iterator moves to the newest version that the reader sees.
pub(crate) struct MergedValuesIter {
    inner: Box<dyn InternalIter>,
    order: KeyOrder,
    operator: Arc<dyn MergeOperator>,
    blobs: Box<dyn BlobResolver>,
    at: ReadMoment,
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    /// Whether the current entry is `key`, `seqno` and `value`. Then `inner` is anywhere after it.
    is_merged: bool,
    key: Vec<u8>,
    seqno: SeqNo,
    value: Vec<u8>,
    /// Why the current entry, which was reached backward, has no value.
    failed: Option<Error>,
}

impl MergedValuesIter {
    /// `blobs` reads the blob values of `inner`.
    pub(crate) fn new(
        inner: Box<dyn InternalIter>,
        order: KeyOrder,
        operator: Arc<dyn MergeOperator>,
        blobs: Box<dyn BlobResolver>,
        at: ReadMoment,
        bounds: KeyBounds<'_>,
    ) -> MergedValuesIter {
        let bounds = (bounds.0.cloned(), bounds.1.cloned());
        let (key, value) = (Vec::new(), Vec::new());
        let (is_merged, seqno, failed) = (false, SeqNo::ZERO, None);
        MergedValuesIter { inner, order, operator, blobs, at, bounds, is_merged, key, seqno, value, failed }
    }

    /// Whether the current entry of `inner` is an operand that the reader may see.
    #[inline]
    fn is_at_operand(&self) -> bool {
        self.inner.head().is_some_and(|(key, kind)| {
            kind == RecordKind::Merge
                && key.seqno <= self.at.seqno
                && Backward::is_within(&self.order, &self.bounds.0, key.user_key)
                && Forward::is_within(&self.order, &self.bounds.1, key.user_key)
        })
    }

    /// After `inner` has moved forward, or anywhere by a seek forward.
    #[inline]
    fn settle_forward(&mut self) -> Result<()> {
        (self.is_merged, self.failed) = (false, None);
        if self.is_at_operand() { self.merge() } else { Ok(()) }
    }

    /// After `inner` has moved backward. If the value cannot be computed, the next step returns the error, because the
    /// caller may have moved here only to find that the key behind has no further version.
    #[inline]
    fn settle_backward(&mut self) -> Result<()> {
        (self.is_merged, self.failed) = (false, None);
        if !self.is_at_operand() {
            return Ok(());
        }
        self.key.clear();
        self.key.extend_from_slice(self.inner.entry().user_key);
        self.inner.seek(InternalKey::new(&self.key, self.at.seqno))?;
        if let Err(error) = self.settle_forward() {
            (self.is_merged, self.failed) = (true, Some(error));
            self.value.clear();
        }
        Ok(())
    }

    /// Computes the value at the operand of `inner`.
    #[cold]
    fn merge(&mut self) -> Result<()> {
        let entry = self.inner.entry();
        debug_assert_eq!(entry.kind, RecordKind::Merge, "a value is computed at an operand");
        debug_assert!(entry.seqno <= self.at.seqno, "the reader sees the operand");
        self.key.clear();
        self.key.extend_from_slice(entry.user_key);
        self.seqno = entry.seqno;
        let merged = self.compute_value();
        let Err(error) = merged else {
            self.is_merged = true;
            return Ok(());
        };
        // The reader does not need the value of a version that is not the newest one for it.
        self.inner.seek(InternalKey::new(&self.key, self.at.seqno))?;
        if self.inner.head().is_some_and(|(newest, _)| newest.seqno == self.seqno) {
            return Err(error);
        }
        self.inner.seek(InternalKey::new(&self.key, self.seqno))
    }

    fn compute_value(&mut self) -> Result<()> {
        let mut chain = OperandChain::default();
        while let Some(entry) = self.inner.current().filter(|entry| self.order.keys_equal(entry.user_key, &self.key)) {
            if !chain.add(entry.kind, entry.value, self.at.now_ms)? {
                break;
            }
            self.inner.next()?;
        }
        debug_assert!(!chain.operands.is_empty(), "the first version is an operand");
        let blobs = &mut self.blobs;
        self.value = chain.merge(&*self.operator, &self.key, |_, pointer| blobs.resolve(pointer))?;
        Ok(())
    }

    fn merged_entry(&self) -> EntryRef<'_> {
        EntryRef { user_key: &self.key, seqno: self.seqno, kind: RecordKind::Put, value: &self.value }
    }
}

impl InternalIter for MergedValuesIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.inner.seek_to_first()?;
        self.settle_forward()
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.inner.seek_to_last()?;
        self.settle_backward()
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.inner.seek(target)?;
        self.settle_forward()
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.inner.seek_before(target)?;
        self.settle_backward()
    }

    fn next(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)?;
        if !self.is_merged {
            self.inner.next()?;
        }
        self.settle_forward()
    }

    fn prev(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)?;
        match self.is_merged {
            true => self.inner.seek_before(InternalKey::new(&self.key, self.seqno))?,
            false => self.inner.prev()?,
        }
        self.settle_backward()
    }

    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.head())
    }

    fn valid(&self) -> bool {
        self.is_merged || self.inner.valid()
    }

    fn entry(&self) -> EntryRef<'_> {
        if self.is_merged { self.merged_entry() } else { self.inner.entry() }
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        if self.is_merged { Some(self.merged_entry()) } else { self.inner.current() }
    }

    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        match self.is_merged {
            true => Some((InternalKey::new(&self.key, self.seqno), RecordKind::Put)),
            false => self.inner.head(),
        }
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        if self.is_merged { None } else { self.inner.shared_value() }
    }
}
