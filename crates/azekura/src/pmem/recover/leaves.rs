//! A leaf and its records, read and judged.

use crate::base::SeqNo;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, RecordKind, Result};
use crate::mem::region::Region;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN, LeafAddr, LeafCommitWord, PoolLeaf, SLOTS, set_bits};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::{BUFFER_ALIGN, LeafSlot, PoolRecord};
use crate::pmem::recover::used::UsedSpaceBitmap;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolTree, leaf_check_seed};

/// What is known of a pool before it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolCheckLevel {
    /// Nothing: all of it is read, and every checksum must match.
    Full,
    /// Its bytes are those that were written. Leaves are checked, and that records stand where they lead, do not
    /// overlap and lie between those of the leaves beside; of a record only its head and its key are read.
    StructureOnly,
}

/// What was found in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolRecoveryReport {
    pub(crate) records: u64,
    pub(crate) leaves: u64,
    /// Words that a crash had left half done.
    pub(crate) repairs: u64,
    /// The highest sequence number of a record.
    pub(crate) max_seqno: SeqNo,
}

pub(super) const OVERLAP: &str = "two records overlap, or one and a leaf";

/// Lines of a record that are asked for ahead, in bytes: all of most; head and key of most.
const RECORD_PREFETCH_LENS: [u64; 2] = [192, 32];

/// A valid slot: its number, itself, its fingerprint.
pub(super) type ValidSlot = (usize, LeafSlot, u8);

pub(super) fn corruption_at(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

/// A leaf that was read.
#[derive(Default)]
pub(super) struct RecoveredLeaf {
    pub(super) offset: u64,
    pub(super) commit_word: u64,
    pub(super) slots: Vec<ValidSlot>,
    /// Those of the slots.
    pub(super) records: Vec<PoolRecord>,
    /// Numbers of records by their keys; none if that was not asked.
    sorted: Vec<(u64, u32)>,
    /// The first and the last record by their keys.
    first_and_last: Option<(u32, u32)>,
}

/// Asks for the leaf that is read after the next one.
pub(super) fn prefetch_leaf<M: PersistenceBackend>(tree: &PoolTree<M>, at: u64) {
    tree.region().prefetch(at, LEAF_LEN);
}

/// Asks for the records of a leaf that is read next, and where they are marked.
pub(super) fn prefetch_leaf_records<M: PersistenceBackend>(
    tree: &PoolTree<M>,
    at: u64,
    check_level: PoolCheckLevel,
    used: &UsedSpaceBitmap,
) {
    let (leaf, near) =
        (tree.leaf(LeafAddr(at)), RECORD_PREFETCH_LENS[usize::from(check_level == PoolCheckLevel::StructureOnly)]);
    let words = leaf.slot_words();
    for n in set_bits(leaf.commit_word().valid_slots()) {
        let slot = LeafSlot(words[n]);
        leaf.region.prefetch(slot.offset(), slot.len().unwrap_or(near).min(near));
        used.prefetch(slot.offset());
    }
}

/// The record of a slot if it is like most.
#[inline]
fn read_short_record(region: &Region, slot: LeafSlot) -> Option<PoolRecord> {
    let (at, len) = (slot.offset(), slot.len()?);
    if len < BUFFER_ALIGN || !region.contains(at, len) {
        return None;
    }
    let [first, second] = region.load_array(at);
    PoolRecord::decode_short(slot, first, second)
}

impl RecoveredLeaf {
    /// Reads and checks a leaf and its records, in place of what was read before.
    pub(super) fn read<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        at: u64,
        check_level: PoolCheckLevel,
    ) -> Result<()> {
        let leaf = tree.leaf(LeafAddr(at));
        let (commit, words) = (leaf.commit_word(), leaf.slot_words());
        let fingerprints: [u64; SLOTS / 8] = leaf.region.load_array(leaf.fingerprint_offset(0));
        (self.offset, self.commit_word) = (at, commit.0);
        self.slots.clear();
        let mut check = LeafCommitWord::empty(tree.check_seed, at);
        for n in set_bits(commit.valid_slots()) {
            let (slot, fingerprint) = (LeafSlot(words[n]), fingerprints[n / 8].to_le_bytes()[n % 8]);
            check = check.flipped(n, tree.check_seed.slot_check(at, n, fingerprint, slot));
            self.slots.push((n, slot, fingerprint));
        }
        if check != commit || commit.count() >= SLOTS {
            return Err(corruption_at("check of a leaf does not match", at));
        }
        self.records.clear();
        self.sorted.clear();
        match check_level {
            PoolCheckLevel::Full => self.read_and_verify_records(tree),
            PoolCheckLevel::StructureOnly => self.read_record_headers(tree),
        }
    }

    fn read_record<M: PersistenceBackend>(tree: &PoolTree<M>, slot: LeafSlot) -> Result<PoolRecord> {
        let record = PoolRecord::read(tree.region(), slot)?;
        match record.kind {
            RecordKind::Put => Ok(record),
            _ => Err(corruption_at("a record of that kind does not stand in a leaf", record.offset)),
        }
    }

    fn read_and_verify_records<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>) -> Result<()> {
        let (region, mut key) = (tree.region(), Vec::new());
        for (_, slot, fingerprint) in &self.slots {
            let record = RecoveredLeaf::read_record(tree, *slot)?;
            if !record.checksum_matches(region, &tree.file_id) {
                return Err(corruption_at("checksum of a record does not match", record.offset));
            }
            record.read_key(region, &mut key);
            if tree.fingerprint(&key) != *fingerprint {
                return Err(corruption_at("fingerprint of a record does not match", self.offset));
            }
            self.records.push(record);
        }
        self.sort_by_key(tree);
        let record = |n: &(u64, u32)| &self.records[n.1 as usize];
        if self.sorted.windows(2).any(|pair| tree.cmp_keys(record(&pair[0]), record(&pair[1])).is_eq()) {
            return Err(corruption_at("a leaf has a key twice", self.offset));
        }
        Ok(())
    }

    fn read_record_headers<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>) -> Result<()> {
        let head_of = |record: &PoolRecord| match tree.key_order.is_bytewise() {
            true => tree.region().prefix_u64(record.key_offset, record.key_len),
            false => 0,
        };
        let (mut low, mut high) = ((u64::MAX, 0), (0, 0));
        for (n, (_, slot, _)) in self.slots.iter().enumerate() {
            let record = match read_short_record(tree.region(), *slot) {
                Some(record) => record,
                None => RecoveredLeaf::read_record(tree, *slot)?,
            };
            let head = head_of(&record);
            let other = |n: u32| &self.records[n as usize];
            if n == 0 || head < low.0 || head == low.0 && tree.cmp_keys(&record, other(low.1)).is_lt() {
                low = (head, n as u32);
            }
            if n == 0 || head > high.0 || head == high.0 && tree.cmp_keys(&record, other(high.1)).is_gt() {
                high = (head, n as u32);
            }
            self.records.push(record);
        }
        self.first_and_last = (!self.slots.is_empty()).then_some((low.1, high.1));
        Ok(())
    }

    fn sort_by_key<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>) {
        tree.sort_records(&self.records, 0, &mut self.sorted);
        self.set_first_and_last();
    }

    fn set_first_and_last(&mut self) {
        self.first_and_last = self.sorted.first().zip(self.sorted.last()).map(|(first, last)| (first.1, last.1));
    }

    pub(super) fn first(&self) -> Option<&PoolRecord> {
        self.first_and_last.map(|(first, _)| &self.records[first as usize])
    }

    pub(super) fn last(&self) -> Option<&PoolRecord> {
        self.first_and_last.map(|(_, last)| &self.records[last as usize])
    }

    /// Takes the records away that are not before the first of the next leaf with records, in which each of them must
    /// stand as the very same slot; what becomes of the commit word.
    pub(super) fn drop_records_from<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        first: &PoolRecord,
        next: &[ValidSlot],
    ) -> Result<LeafCommitWord> {
        let mut commit = LeafCommitWord(self.commit_word);
        if self.last().is_none_or(|last| tree.cmp_keys(last, first).is_lt()) {
            return Ok(commit);
        }
        if self.sorted.is_empty() {
            self.sort_by_key(tree);
        }
        while let Some((_, n)) = self.sorted.last()
            && tree.cmp_keys(&self.records[*n as usize], first).is_ge()
        {
            let (n, slot, fingerprint) = self.slots[*n as usize];
            if !next.iter().any(|(_, there, _)| *there == slot) {
                return Err(corruption_at("keys of two leaves are out of order", self.offset));
            }
            commit = commit.flipped(n, tree.check_seed.slot_check(self.offset, n, fingerprint, slot));
            self.sorted.pop();
        }
        self.set_first_and_last();
        Ok(commit)
    }

    /// The records that are left, in no order.
    pub(super) fn remaining_records(&self) -> impl Iterator<Item = &PoolRecord> {
        // Nothing is taken away but by `cut`, which sorts.
        let (all, sorted) = match self.sorted.is_empty() && self.first_and_last.is_some() {
            true => (self.records.as_slice(), &[][..]),
            false => (&[][..], self.sorted.as_slice()),
        };
        all.iter().chain(sorted.iter().map(|(_, n)| &self.records[*n as usize]))
    }
}

/// Checks every leaf and every record by itself, where the order of keys is not known.
///
/// # Errors
/// `Corruption` if it is not what was written.
pub(crate) fn verify_records(region: &Region) -> Result<PoolRecoveryReport> {
    let mut header = [0; FileHeader::LEN];
    if !region.contains(HEAD_LEAF_OFFSET, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    region.read(0, &mut header);
    let file_id = FileHeader::decode(FileKind::Pool, &header)?.file_id;
    let (seal, mut used, mut at, mut report) = (
        leaf_check_seed(&file_id),
        UsedSpaceBitmap::new(region.len())?,
        HEAD_LEAF_OFFSET,
        PoolRecoveryReport::default(),
    );
    // Of the last leaf before this one that has records.
    let mut before: Vec<LeafSlot> = Vec::new();
    while at != 0 {
        if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
            return Err(corruption_at("the chain of leaves leads to what is no leaf, or in a circle", at));
        }
        let leaf = PoolLeaf::new(region, at);
        if leaf.commit_word().count() >= SLOTS || !leaf.check_matches(seal, leaf.commit_word()) {
            return Err(corruption_at("check of a leaf does not match", at));
        }
        let slots: Vec<LeafSlot> = set_bits(leaf.commit_word().valid_slots()).map(|n| leaf.slot(n)).collect();
        for slot in &slots {
            let record = PoolRecord::read(region, *slot)?;
            if record.kind != RecordKind::Put || !record.checksum_matches(region, &file_id) {
                return Err(corruption_at("checksum of a record does not match", record.offset));
            }
            report.max_seqno = report.max_seqno.max(record.seqno);
            match used.mark(record.offset, record.buffer_len()) {
                true => report.records += 1,
                // A crash in the middle of a split leaves the same slot in two leaves beside each other.
                false if before.contains(slot) => {}
                false => return Err(corruption_at(OVERLAP, record.offset)),
            }
        }
        report.leaves += 1;
        if !slots.is_empty() {
            before = slots;
        }
        at = leaf.next_leaf(seal).ok_or_else(|| corruption_at("check of the next leaf does not match", at))?;
    }
    Ok(report)
}
