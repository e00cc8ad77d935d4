//! A leaf and its records, read and judged.

use crate::base::SeqNo;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, RecordKind, Result};
use crate::mem::region::Region;
use crate::pmem::leaf::{Commit, LEAF_ALIGN, LEAF_LEN, Leaf, SLOTS, Spot, bits};
use crate::pmem::medium::Medium;
use crate::pmem::record::{Record, STEP, Slot};
use crate::pmem::recover::used::Used;
use crate::pmem::tree::{HEAD, Tree, seal_of};

/// What is known of a pool before it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Nothing: all of it is read, and every checksum must match.
    Nothing,
    /// Its bytes are those that were written. Leaves are checked, and that records stand where they lead, do not
    /// overlap and lie between those of the leaves beside; of a record only its head and its key are read.
    Bytes,
}

/// What was found in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) records: u64,
    pub(crate) leaves: u64,
    /// Words that a crash had left half done.
    pub(crate) repairs: u64,
    /// The highest sequence number of a record.
    pub(crate) highest: SeqNo,
}

pub(super) const OVERLAP: &str = "two records overlap, or one and a leaf";

/// Lines of a record that are asked for ahead, in bytes: all of most; head and key of most.
const NEAR: [u64; 2] = [192, 32];

/// A valid slot: its number, itself, its fingerprint.
pub(super) type Filled = (usize, Slot, u8);

pub(super) fn corrupt(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

/// A leaf that was read.
#[derive(Default)]
pub(super) struct Read {
    pub(super) at: u64,
    pub(super) commit: u64,
    pub(super) slots: Vec<Filled>,
    /// Those of the slots.
    pub(super) records: Vec<Record>,
    /// Numbers of records by their keys; none if that was not asked.
    sorted: Vec<(u64, u32)>,
    /// The first and the last record by their keys.
    ends: Option<(u32, u32)>,
}

/// Asks for the leaf that is read after the next one.
pub(super) fn fetch_leaf<M: Medium>(tree: &Tree<M>, at: u64) {
    tree.region().prefetch(at, LEAF_LEN);
}

/// Asks for the records of a leaf that is read next, and where they are marked.
pub(super) fn fetch_records<M: Medium>(tree: &Tree<M>, at: u64, trust: Trust, used: &Used) {
    let (leaf, near) = (tree.leaf(Spot(at)), NEAR[usize::from(trust == Trust::Bytes)]);
    let words = leaf.slots();
    for n in bits(leaf.commit().valid()) {
        let slot = Slot(words[n]);
        leaf.region.prefetch(slot.at(), slot.len().unwrap_or(near).min(near));
        used.fetch(slot.at());
    }
}

/// The record of a slot if it is like most.
#[inline]
fn short(region: &Region, slot: Slot) -> Option<Record> {
    let (at, len) = (slot.at(), slot.len()?);
    if len < STEP || !region.contains(at, len) {
        return None;
    }
    let [first, second] = region.load_all(at);
    Record::short(slot, first, second)
}

impl Read {
    /// Reads and checks a leaf and its records, in place of what was read before.
    pub(super) fn read<M: Medium>(&mut self, tree: &Tree<M>, at: u64, trust: Trust) -> Result<()> {
        let leaf = tree.leaf(Spot(at));
        let (commit, words) = (leaf.commit(), leaf.slots());
        let prints: [u64; SLOTS / 8] = leaf.region.load_all(leaf.print_at(0));
        (self.at, self.commit) = (at, commit.0);
        self.slots.clear();
        let mut check = Commit::empty(tree.seal, at);
        for n in bits(commit.valid()) {
            let (slot, print) = (Slot(words[n]), prints[n / 8].to_le_bytes()[n % 8]);
            check = check.flipped(n, tree.seal.of_slot(at, n, print, slot));
            self.slots.push((n, slot, print));
        }
        if check != commit || commit.count() >= SLOTS {
            return Err(corrupt("check of a leaf does not match", at));
        }
        self.records.clear();
        self.sorted.clear();
        match trust {
            Trust::Nothing => self.read_all(tree),
            Trust::Bytes => self.read_heads(tree),
        }
    }

    fn record<M: Medium>(tree: &Tree<M>, slot: Slot) -> Result<Record> {
        let record = Record::read(tree.region(), slot)?;
        match record.kind {
            RecordKind::Put => Ok(record),
            _ => Err(corrupt("a record of that kind does not stand in a leaf", record.at)),
        }
    }

    fn read_all<M: Medium>(&mut self, tree: &Tree<M>) -> Result<()> {
        let (region, mut key) = (tree.region(), Vec::new());
        for (_, slot, print) in &self.slots {
            let record = Read::record(tree, *slot)?;
            if !record.verifies(region, &tree.file_id) {
                return Err(corrupt("checksum of a record does not match", record.at));
            }
            record.key(region, &mut key);
            if tree.print(&key) != *print {
                return Err(corrupt("fingerprint of a record does not match", self.at));
            }
            self.records.push(record);
        }
        self.sort(tree);
        let record = |n: &(u64, u32)| &self.records[n.1 as usize];
        if self.sorted.windows(2).any(|pair| tree.cmp_keys(record(&pair[0]), record(&pair[1])).is_eq()) {
            return Err(corrupt("a leaf has a key twice", self.at));
        }
        Ok(())
    }

    fn read_heads<M: Medium>(&mut self, tree: &Tree<M>) -> Result<()> {
        let head_of = |record: &Record| match tree.order.is_bytewise() {
            true => tree.region().head(record.key_at, record.key_len),
            false => 0,
        };
        let (mut low, mut high) = ((u64::MAX, 0), (0, 0));
        for (n, (_, slot, _)) in self.slots.iter().enumerate() {
            let record = match short(tree.region(), *slot) {
                Some(record) => record,
                None => Read::record(tree, *slot)?,
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
        self.ends = (!self.slots.is_empty()).then_some((low.1, high.1));
        Ok(())
    }

    fn sort<M: Medium>(&mut self, tree: &Tree<M>) {
        tree.sorted(&self.records, 0, &mut self.sorted);
        self.find_ends();
    }

    fn find_ends(&mut self) {
        self.ends = self.sorted.first().zip(self.sorted.last()).map(|(first, last)| (first.1, last.1));
    }

    pub(super) fn first(&self) -> Option<&Record> {
        self.ends.map(|(first, _)| &self.records[first as usize])
    }

    pub(super) fn last(&self) -> Option<&Record> {
        self.ends.map(|(_, last)| &self.records[last as usize])
    }

    /// Takes the records away that are not before the first of the next leaf with records, in which each of them must
    /// stand as the very same slot; what becomes of the commit word.
    pub(super) fn cut<M: Medium>(&mut self, tree: &Tree<M>, first: &Record, next: &[Filled]) -> Result<Commit> {
        let mut commit = Commit(self.commit);
        if self.last().is_none_or(|last| tree.cmp_keys(last, first).is_lt()) {
            return Ok(commit);
        }
        if self.sorted.is_empty() {
            self.sort(tree);
        }
        while let Some((_, n)) = self.sorted.last()
            && tree.cmp_keys(&self.records[*n as usize], first).is_ge()
        {
            let (n, slot, print) = self.slots[*n as usize];
            if !next.iter().any(|(_, there, _)| *there == slot) {
                return Err(corrupt("keys of two leaves are out of order", self.at));
            }
            commit = commit.flipped(n, tree.seal.of_slot(self.at, n, print, slot));
            self.sorted.pop();
        }
        self.find_ends();
        Ok(commit)
    }

    /// The records that are left, in no order.
    pub(super) fn left(&self) -> impl Iterator<Item = &Record> {
        // Nothing is taken away but by `cut`, which sorts.
        let (all, sorted) = match self.sorted.is_empty() && self.ends.is_some() {
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
pub(crate) fn check_records(region: &Region) -> Result<Report> {
    let mut header = [0; FileHeader::LEN];
    if !region.contains(HEAD, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    region.read(0, &mut header);
    let file_id = FileHeader::decode(FileKind::Pool, &header)?.file_id;
    let (seal, mut used, mut at, mut report) = (seal_of(&file_id), Used::new(region.len())?, HEAD, Report::default());
    // Of the last leaf before this one that has records.
    let mut before: Vec<Slot> = Vec::new();
    while at != 0 {
        if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
            return Err(corrupt("the chain of leaves leads to what is no leaf, or in a circle", at));
        }
        let leaf = Leaf::new(region, at);
        if leaf.commit().count() >= SLOTS || !leaf.verifies(seal, leaf.commit()) {
            return Err(corrupt("check of a leaf does not match", at));
        }
        let slots: Vec<Slot> = bits(leaf.commit().valid()).map(|n| leaf.slot(n)).collect();
        for slot in &slots {
            let record = Record::read(region, *slot)?;
            if record.kind != RecordKind::Put || !record.verifies(region, &file_id) {
                return Err(corrupt("checksum of a record does not match", record.at));
            }
            report.highest = report.highest.max(record.seqno);
            match used.mark(record.at, record.buffer_len()) {
                true => report.records += 1,
                // A crash in the middle of a split leaves the same slot in two leaves beside each other.
                false if before.contains(slot) => {}
                false => return Err(corrupt(OVERLAP, record.at)),
            }
        }
        report.leaves += 1;
        if !slots.is_empty() {
            before = slots;
        }
        at = leaf.next(seal).ok_or_else(|| corrupt("check of the next leaf does not match", at))?;
    }
    Ok(report)
}
