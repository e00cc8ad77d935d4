//! Creates and opens the tree of a pool by following the chain of leaves, without trusting unverified bytes.
//!
//! One thread follows the chain. Several threads read and check its leaves and their records, part by part, if there
//! are many. Checks between two parts, of the last leaf of one and the first leaf of the next, run at the end.
//! [`PoolCheckLevel`] says how much of each record is read.

use std::sync::Arc;

use crate::base::file_format::{FileHeader, FileKind};
use crate::base::sync::WakeSignal;
use crate::base::{Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::SnapshotList;
use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};
use crate::mem::region::{PAGE, Region};
use crate::pmem::allocator::Allocator;
use crate::pmem::inner::InnerTree;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN, LeafAddr, LeafCommitWord, PoolLeaf, SLOTS, set_bits};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::pool::parallel::{run_with_helpers, thread_panicked_error};
use crate::pmem::pool::used_space::UsedSpaceBitmap;
use crate::pmem::record::{BUFFER_ALIGN, LeafSlot, PoolRecord};
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolOptions, PoolTree, leaf_check_seed};
use crate::vfs::Env;

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

pub(crate) const OVERLAP: &str = "two records overlap, or one and a leaf";

/// Lines of a record that are asked for ahead, in bytes: all of most; head and key of most.
const RECORD_PREFETCH_LENS: [u64; 2] = [192, 32];

/// A valid slot: its number, itself, its fingerprint.
pub(crate) type ValidSlot = (usize, LeafSlot, u8);

pub(crate) fn corruption_at(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

/// A leaf that was read.
#[derive(Default)]
pub(crate) struct RecoveredLeaf {
    pub(crate) offset: u64,
    pub(crate) commit_word: u64,
    pub(crate) slots: Vec<ValidSlot>,
    /// Those of the slots.
    pub(crate) records: Vec<PoolRecord>,
    /// Numbers of records by their keys; none if that was not asked.
    sorted: Vec<(u64, u32)>,
    /// The first and the last record by their keys.
    first_and_last: Option<(u32, u32)>,
}

/// Asks for the leaf that is read after the next one.
pub(crate) fn prefetch_leaf<M: PersistenceBackend>(tree: &PoolTree<M>, at: u64) {
    tree.region().prefetch(at, LEAF_LEN);
}

/// Asks for the records of a leaf that is read next, and where they are marked.
pub(crate) fn prefetch_leaf_records<M: PersistenceBackend>(
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
    pub(crate) fn read<M: PersistenceBackend>(
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

    pub(crate) fn first(&self) -> Option<&PoolRecord> {
        self.first_and_last.map(|(first, _)| &self.records[first as usize])
    }

    pub(crate) fn last(&self) -> Option<&PoolRecord> {
        self.first_and_last.map(|(_, last)| &self.records[last as usize])
    }

    /// Takes the records away that are not before the first of the next leaf with records, in which each of them must
    /// stand as the very same slot; what becomes of the commit word.
    pub(crate) fn drop_records_from<M: PersistenceBackend>(
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
    pub(crate) fn remaining_records(&self) -> impl Iterator<Item = &PoolRecord> {
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

/// Leaves that one thread reads before it looks for more; few in tests, so that there are parts.
const LEAVES_PER_PART: usize = if cfg!(all(test, debug_assertions)) { 3 } else { 256 };

/// Maximum time, in milliseconds, that a thread sleeps before it checks again whether the chain has grown.
const CHAIN_WAIT_MS: u64 = 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a part of the chain has come to, or all of it.
#[derive(Default)]
pub(crate) struct RecoveredPart {
    /// Leaves that are kept, each with what separates it from the one before.
    pub(crate) leaves: Vec<(Vec<u8>, u64)>,
    empty_leaves: Vec<u64>,
    /// Words that a crash has left half done: where, and what belongs there.
    pub(crate) repairs: Vec<(u64, u64)>,
    pub(crate) report: PoolRecoveryReport,
    /// The first leaf that holds something: where it stands in `kept`, its first record, its slots. What separates it
    /// from the one before is not known yet.
    first_leaf: Option<(usize, PoolRecord, Vec<ValidSlot>)>,
    /// The last leaf that holds something: what of it belongs to the next one is known when that is read.
    last_leaf: Option<RecoveredLeaf>,
    /// A key.
    key: Vec<u8>,
}

/// The chain of leaves, as far as it was followed.
#[derive(Default)]
struct LeafChain {
    /// Leaves in their order, [`LEAVES_PER_PART`] at a time.
    parts: Vec<Arc<[u64]>>,
    is_complete: bool,
}

/// Shared by all threads that read parts.
pub(crate) struct PoolRecovery<M: PersistenceBackend> {
    tree: PoolTree<M>,
    check_level: PoolCheckLevel,
    /// The space of leaves and of records, for each thread that read them.
    used_space: Mutex<Vec<UsedSpaceBitmap>>,
    chain: Mutex<LeafChain>,
    /// Rung when the chain has got longer.
    chain_grew: WakeSignal,
    /// The next part that no thread reads yet.
    next_part: AtomicUsize,
    failed: AtomicBool,
    /// What came of parts, in no order.
    parts_read: Mutex<Vec<(usize, Result<RecoveredPart>)>>,
}

impl<M: PersistenceBackend> PoolRecovery<M> {
    pub(crate) fn new(tree: PoolTree<M>, check_level: PoolCheckLevel) -> PoolRecovery<M> {
        let (used, chain, read) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        PoolRecovery {
            tree,
            check_level,
            used_space: used,
            chain,
            chain_grew: WakeSignal::default(),
            next_part: next,
            failed,
            parts_read: read,
        }
    }

    /// Follows the chain and reads all parts; puts together what they came to.
    pub(crate) fn run(self, env: Option<&dyn Env>) -> Result<(PoolTree<M>, UsedSpaceBitmap, RecoveredPart)> {
        let (bytes, mut followed) = (self.tree.region().len(), Ok(()));
        let lead = |walk: &PoolRecovery<M>| {
            followed = walk.follow_chain();
            walk.read_parts();
        };
        let PoolRecovery { tree, used_space: used, chain, parts_read: read, .. } =
            run_with_helpers(self, env, bytes, u64::MAX, lead, PoolRecovery::read_parts)?;
        followed?;
        let (mut all, mut first): (_, Option<UsedSpaceBitmap>) = (RecoveredPart::default(), None);
        let mut read = read.into_inner().unwrap_or_else(PoisonError::into_inner);
        read.sort_unstable_by_key(|(number, _)| *number);
        // Once one has failed, others may not have been read, before it and behind it.
        if let Some(failed) = read.iter_mut().find(|(_, part)| part.is_err()) {
            std::mem::replace(&mut failed.1, Err(thread_panicked_error()))?;
        }
        for other in used.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let Some(used) = &mut first else {
                first = Some(other);
                continue;
            };
            if !used.merge(&other) {
                return Err(Error::corruption(OVERLAP));
            }
        }
        let mut used = first.ok_or_else(thread_panicked_error)?;
        let chain: Vec<u64> = lock(&chain).parts.iter().flat_map(|part| part.iter().copied()).collect();
        if read.len() < chain.len().div_ceil(LEAVES_PER_PART) {
            return Err(thread_panicked_error());
        }
        for (_, part) in read {
            all.append_part(&tree, &mut used, part?)?;
        }
        if let Some(mut last) = all.last_leaf.take() {
            all.resolve_leaf(&tree, &mut used, &mut last, None)?;
        }
        all.add_link_repairs(&tree, &chain);
        for leaf in &all.empty_leaves {
            used.clear(*leaf, LEAF_LEN);
        }
        Ok((tree, used, all))
    }

    /// Follows the chain, and lets others read what of it is there.
    fn follow_chain(&self) -> Result<()> {
        let mut part = Vec::with_capacity(LEAVES_PER_PART);
        let followed = self.for_each_leaf(|leaf| {
            part.push(leaf);
            if part.len() == LEAVES_PER_PART {
                lock(&self.chain).parts.push(part.drain(..).collect());
                self.chain_grew.notify_all();
            }
        });
        {
            let mut chain = lock(&self.chain);
            chain.parts.extend((!part.is_empty()).then(|| part.into()));
            chain.is_complete = true;
        }
        self.chain_grew.notify_all();
        followed.inspect_err(|_| self.failed.store(true, Ordering::Relaxed))
    }

    fn for_each_leaf(&self, mut show: impl FnMut(u64)) -> Result<()> {
        let (region, mut used, mut at) =
            (self.tree.region(), UsedSpaceBitmap::new(self.tree.region().len())?, HEAD_LEAF_OFFSET);
        let all = used.mark(0, HEAD_LEAF_OFFSET);
        debug_assert!(all, "nothing was marked before");
        while at != 0 {
            if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
                return Err(corruption_at("the chain of leaves leads to what is no leaf, or in a circle", at));
            }
            show(at);
            let next = self.tree.leaf(LeafAddr(at)).next_leaf(self.tree.check_seed);
            at = next.ok_or_else(|| corruption_at("check of the next leaf does not match", at))?;
        }
        lock(&self.used_space).push(used);
        Ok(())
    }

    /// A part of the chain, once it was followed so far; none behind its end.
    fn wait_for_part(&self, number: usize) -> Option<Arc<[u64]>> {
        loop {
            let rings = self.chain_grew.generation();
            {
                let chain = lock(&self.chain);
                if chain.parts.len() > number || chain.is_complete {
                    return chain.parts.get(number).cloned();
                }
            }
            self.chain_grew.wait_past(rings, CHAIN_WAIT_MS);
        }
    }

    /// Reads parts until there are none left, or one is refused.
    fn read_parts(&self) {
        let mut used = None;
        while let Some((number, part)) = self.next_part() {
            let found = self.read_part(&part, &mut used);
            if found.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            lock(&self.parts_read).push((number, found));
        }
        lock(&self.used_space).extend(used);
    }

    fn next_part(&self) -> Option<(usize, Arc<[u64]>)> {
        let number = self.next_part.fetch_add(1, Ordering::Relaxed);
        let part = self.wait_for_part(number)?;
        (!self.failed.load(Ordering::Relaxed)).then_some((number, part))
    }

    /// Reads the leaves of a part.
    fn read_part(&self, part: &[u64], used: &mut Option<UsedSpaceBitmap>) -> Result<RecoveredPart> {
        let (tree, mut found, mut spare) = (&self.tree, RecoveredPart::default(), RecoveredLeaf::default());
        let used = match used {
            Some(used) => used,
            None => used.insert(UsedSpaceBitmap::new(tree.region().len())?),
        };
        for (n, at) in part.iter().enumerate() {
            if let Some(next) = part.get(n + 2) {
                prefetch_leaf(tree, *next);
            }
            if let Some(next) = part.get(n + 1) {
                prefetch_leaf_records(tree, *next, self.check_level, used);
            }
            let mut read = spare;
            read.read(tree, *at, self.check_level)?;
            let Some(first) = read.first() else {
                match *at == HEAD_LEAF_OFFSET {
                    true => found.leaves.push((Vec::new(), HEAD_LEAF_OFFSET)),
                    false => found.empty_leaves.push(*at),
                }
                spare = read;
                continue;
            };
            let mut separator = Vec::new();
            let mut before = found.last_leaf.take();
            match &mut before {
                None => found.first_leaf = Some((found.leaves.len(), *first, read.slots.clone())),
                Some(before) => separator = found.separate(tree, used, before, (first, &read.slots))?,
            }
            found.leaves.push((separator, *at));
            found.last_leaf = Some(read);
            spare = before.unwrap_or_default();
        }
        Ok(found)
    }
}

impl RecoveredPart {
    /// Decides what of a leaf is its own, now that the first record and the slots of the next one with records are
    /// known; what separates the two.
    fn resolve_leaf<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        used: &mut UsedSpaceBitmap,
        read: &mut RecoveredLeaf,
        next: Option<(&PoolRecord, &[ValidSlot])>,
    ) -> Result<Vec<u8>> {
        if let Some((first, slots)) = next {
            let commit = read.drop_records_from(tree, first, slots)?;
            if commit.0 != read.commit_word {
                self.repairs.push((read.offset, commit.0));
            }
        }
        for record in read.remaining_records() {
            if !used.mark(record.offset, record.buffer_len()) {
                return Err(corruption_at(OVERLAP, record.offset));
            }
            self.report.max_seqno = self.report.max_seqno.max(record.seqno);
            self.report.records += 1;
        }
        let mut separator = Vec::new();
        let Some((first, _)) = next else { return Ok(separator) };
        first.read_key(tree.region(), &mut separator);
        // A shorter key that is behind the last one still will do.
        if let Some(last) = read.last() {
            last.read_key(tree.region(), &mut self.key);
            let len = tree.separator(&self.key, &separator).len();
            separator.truncate(len);
        }
        Ok(separator)
    }

    /// Settles the last leaf with records, and returns what separates the next one from those before it. A leaf all of
    /// whose records belong to the next one goes: a crash leaves it when records are joined to a leaf that has none.
    fn separate<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        used: &mut UsedSpaceBitmap,
        read: &mut RecoveredLeaf,
        next: (&PoolRecord, &[ValidSlot]),
    ) -> Result<Vec<u8>> {
        let separator = self.resolve_leaf(tree, used, read, Some(next))?;
        if read.last().is_some() || read.offset == HEAD_LEAF_OFFSET {
            return Ok(separator);
        }
        self.empty_leaves.push(read.offset);
        let gone = self.leaves.pop();
        if let Some((n, first, slots)) = &mut self.first_leaf
            && *n == self.leaves.len()
        {
            (*first, *slots) = (*next.0, next.1.to_vec());
        }
        Ok(gone.map_or(separator, |(own, _)| own))
    }

    /// Adds the part that follows.
    fn append_part<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        used: &mut UsedSpaceBitmap,
        mut part: RecoveredPart,
    ) -> Result<()> {
        if let Some((n, first, slots)) = part.first_leaf.take() {
            part.leaves[n].0 = match self.last_leaf.take() {
                Some(mut last) => self.separate(tree, used, &mut last, (&first, &slots))?,
                // Only leaves without records stand before it. A key that was inserted, because an empty one is before
                // all others in the order of bytes alone, and a comparator may not know it.
                None => {
                    let mut separator = Vec::new();
                    first.read_key(tree.region(), &mut separator);
                    separator
                }
            };
            self.last_leaf = part.last_leaf.take();
        }
        self.leaves.append(&mut part.leaves);
        self.empty_leaves.append(&mut part.empty_leaves);
        self.repairs.append(&mut part.repairs);
        self.report.records += part.report.records;
        self.report.max_seqno = self.report.max_seqno.max(part.report.max_seqno);
        Ok(())
    }

    /// Sees to it that the chain leads from one leaf that is kept to the next, past the others.
    fn add_link_repairs<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>, chain: &[u64]) {
        let (mut kept, mut last, mut passed) =
            (self.leaves.iter().map(|(_, at)| *at).peekable(), HEAD_LEAF_OFFSET, false);
        for at in chain.iter().copied().chain([0]) {
            if at != 0 && kept.next_if_eq(&at).is_none() {
                passed = true;
                continue;
            }
            if passed {
                self.repairs.push((tree.leaf(LeafAddr(last)).next_offset(), tree.check_seed.next_word(last, at)));
            }
            (last, passed) = (at, false);
        }
    }
}

/// Makes an empty pool on `medium`, which holds nothing yet. Durable when it returns; before, there is no pool.
///
/// # Errors
/// `OutOfSpace` if not even that fits.
pub(crate) fn create<M: PersistenceBackend>(
    backend: M,
    file_id: [u8; 16],
    order: KeyOrder,
    options: &PoolOptions,
    snapshots: Arc<SnapshotList>,
) -> Result<PoolTree<M>> {
    let least = 2 * PAGE;
    let len = options.grow_by.max(least).min(options.len_max) / PAGE * PAGE;
    if len < least {
        return Err(Error::invalid(format!("a pool has at least {least} bytes")));
    }
    backend.grow(len)?;
    let seal = leaf_check_seed(&file_id);
    backend.write(0, &[&FileHeader { kind: FileKind::Pool, file_id }.encode()]);
    backend.flush(0, FileHeader::LEN as u64, PersistSite::FormatHeader);
    let leaf = PoolLeaf::new(backend.region(), HEAD_LEAF_OFFSET);
    backend.store(leaf.offset, LeafCommitWord::empty(seal, leaf.offset).0);
    backend.store(leaf.next_offset(), seal.next_word(leaf.offset, 0));
    backend.flush(leaf.offset, 16, PersistSite::FormatLeaf);
    backend.fence(PersistSite::FormatDone);
    let mut space = Allocator::new(len, options.len_max, options.grow_by);
    space.set_addresses(backend.region().reserved());
    space.add_free_at_open((HEAD_LEAF_OFFSET + LEAF_LEN, len - HEAD_LEAF_OFFSET - LEAF_LEN));
    let inner = InnerTree::bulk_load(&[(Vec::new(), HEAD_LEAF_OFFSET)], order.clone());
    let mut tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 1), snapshots);
    tree.inner = InnerTree::bulk_load(
        &[(Vec::new(), tree.leaf_orders.new_leaf_addr(HEAD_LEAF_OFFSET).0)],
        tree.key_order.clone(),
    );
    Ok(tree)
}

/// Opens the pool on `medium`, of which so much is known; a large one with threads of `env`.
///
/// # Errors
/// `Corruption` if it is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open_with<M: PersistenceBackend>(
    backend: M,
    order: KeyOrder,
    options: &PoolOptions,
    snapshots: Arc<SnapshotList>,
    check_level: PoolCheckLevel,
    env: Option<&dyn Env>,
) -> Result<(PoolTree<M>, PoolRecoveryReport)> {
    let region = backend.region();
    if !region.contains(HEAD_LEAF_OFFSET, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    let mut header = [0; FileHeader::LEN];
    region.read(0, &mut header);
    let file_id = FileHeader::decode(FileKind::Pool, &header)?.file_id;
    let len = region.len();
    // A tree without leaves lends its comparisons: nothing of it is used before the walk is over.
    let inner = InnerTree::bulk_load(&[(Vec::new(), HEAD_LEAF_OFFSET)], order.clone());
    let mut space = Allocator::new(len, options.len_max, options.grow_by);
    space.set_addresses(region.reserved());
    let tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 0), snapshots);
    let (mut tree, used, found) = PoolRecovery::new(tree, check_level).run(env)?;
    for (at, word) in &found.repairs {
        tree.backend.publish(*at, *word);
        tree.backend.flush(*at, 8, PersistSite::RepairCommit);
    }
    if !found.repairs.is_empty() {
        tree.backend.fence(PersistSite::RepairDone);
    }
    let leaves = found.leaves.len() as u64;
    let addr = |(separator, at)| (separator, tree.leaf_orders.new_leaf_addr(at).0);
    let addrs: Vec<_> = found.leaves.into_iter().map(addr).collect();
    tree.inner = InnerTree::bulk_load(&addrs, tree.key_order.clone());
    let mut free = Vec::new();
    used.for_each_free_range(|range| free.push(range));
    {
        let mut space = tree.lock_allocator()?;
        free.into_iter().for_each(|range| space.add_free_at_open(range));
    }
    let report = PoolRecoveryReport { leaves, repairs: found.repairs.len() as u64, ..found.report };
    tree.records_at_open.store(report.records, Ordering::Relaxed);
    tree.leaf_count.store(report.leaves, Ordering::Relaxed);
    Ok((tree, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{ErrorKind, SeqNo};
    use crate::engine::LastVisibleSeqno;
    use crate::memtable::speed::{random_key, time};
    use crate::pmem::leaf::set_bits;
    use crate::pmem::persistence::PoolImage;
    use crate::vfs::env::SystemEnv;

    fn options() -> PoolOptions {
        PoolOptions { len_max: 64 << 20, grow_by: 64 * PAGE, slots_per_leaf: 20 }
    }

    fn new_snapshots() -> Arc<SnapshotList> {
        let visible = LastVisibleSeqno::default();
        visible.publish(SeqNo::MAX);
        SnapshotList::new(visible)
    }

    fn reopen_bytes(bytes: &[u8], env: Option<&dyn Env>) -> Result<(PoolTree<PoolImage>, PoolRecoveryReport)> {
        let image = PoolImage::new(options().len_max).unwrap();
        image.grow(bytes.len() as u64).unwrap();
        image.load_words(0, bytes);
        open_with(image, KeyOrder::bytewise(), &options(), new_snapshots(), PoolCheckLevel::Full, env)
    }

    /// However many read it, the same is found, and the same is refused.
    #[test]
    fn parallel_open_equals_single_threaded() {
        let image = PoolImage::new(options().len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_snapshots()).unwrap();
        let key = |n: u64| (n * 7919 % 10_007).to_be_bytes();
        for n in 0..10_007 {
            tree.put(&key(n), SeqNo(n + 1), &[n as u8; 30]).unwrap();
        }
        // Leaves that are empty stand in the chain where a crash left them.
        for n in (0..10_007).filter(|n| n * 7919 % 10_007 / 500 % 3 == 1) {
            tree.remove(&key(n), SeqNo(20_000 + n)).unwrap();
        }
        let mut bytes = vec![0; tree.region().len() as usize];
        tree.region().read(0, &mut bytes);
        let env = SystemEnv::new();
        let (alone, report) = reopen_bytes(&bytes, None).unwrap();
        assert_eq!((report.records, report.repairs), (tree.len(), 0));
        for _ in 0..20 {
            let (together, same) = reopen_bytes(&bytes, Some(&env)).unwrap();
            assert_eq!((same, together.usage().unwrap()), (report, alone.usage().unwrap()));
            for n in (0..10_007).step_by(17) {
                assert_eq!(together.get(&key(n)).unwrap(), tree.get(&key(n)).unwrap());
            }
        }
        let mut refused = 0;
        for at in (4096..bytes.len()).step_by(bytes.len() / 80) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            let (alone, together) = (reopen_bytes(&damaged, None), reopen_bytes(&damaged, Some(&env)));
            match (alone, together) {
                (Ok((_, alone)), Ok((_, together))) => assert_eq!(alone, together),
                (Err(alone), Err(together)) => {
                    assert_eq!((alone.kind(), together.kind()), (ErrorKind::Corruption, ErrorKind::Corruption));
                    refused += 1;
                }
                (alone, together) => panic!("{:?} {:?}", alone.err(), together.err()),
            }
        }
        assert!(refused > 20, "{refused}");
    }

    /// A crash in the middle of a join leaves the same records in two leaves. A left leaf that had no others, because a
    /// removal had emptied it, was kept as an empty leaf with the separator of the right one: the next join removed the
    /// right one from the tree, and lookups went to a leaf that was free.
    #[test]
    fn leaf_goes_when_all_of_it_is_in_the_next() {
        for left in 0..8 {
            let image = PoolImage::new(options().len_max).unwrap();
            let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_snapshots()).unwrap();
            let keys: Vec<_> = (0..300u64).map(u64::to_be_bytes).collect();
            for (key, n) in keys.iter().zip(1..) {
                tree.put(key, SeqNo(n), &[7; 30]).unwrap();
            }
            // Sparse, so that leaves are joined.
            keys.iter().step_by(2).for_each(|key| assert!(tree.remove(key, SeqNo(400)).unwrap()));
            let next = |leaf: PoolLeaf<'_>| PoolLeaf::new(tree.region(), leaf.next_leaf(tree.check_seed).unwrap());
            let chain: Vec<_> =
                std::iter::successors(Some(PoolLeaf::new(tree.region(), HEAD_LEAF_OFFSET)), |leaf| Some(next(*leaf)))
                    .take(left + 2)
                    .collect();
            let (left, right) = (chain[left], chain[left + 1]);
            let mut commit = LeafCommitWord::empty(tree.check_seed, left.offset);
            for n in set_bits(right.commit_word().valid_slots()) {
                let (slot, fingerprint) = (right.slot(n), right.fingerprint(n));
                tree.backend.store(left.slot_offset(n), slot.0);
                tree.backend.store(left.fingerprint_offset(n), left.fingerprint_word(n, fingerprint));
                commit = commit.flipped(n, tree.check_seed.slot_check(left.offset, n, fingerprint, slot));
            }
            tree.backend.publish(left.offset, commit.0);
            let mut bytes = vec![0; tree.region().len() as usize];
            tree.region().read(0, &mut bytes);

            let (opened, report) = reopen_bytes(&bytes, None).unwrap();
            let there: Vec<_> = keys.iter().filter(|key| opened.get(&key[..]).unwrap().is_some()).collect();
            assert_eq!(there.len() as u64, report.records);
            while opened.merge_sparse_leaves().unwrap() > 0 {}
            assert!(there.iter().all(|key| opened.get(&key[..]).unwrap().is_some()), "a join lost a leaf");
            assert_eq!(
                report.leaves + u64::from(left.offset != HEAD_LEAF_OFFSET),
                tree.leaf_count.load(Ordering::Relaxed)
            );
        }
    }

    /// Prints what a record takes: `cargo test --release -p azekura --lib recover::tests::speed -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "measures speed; run it alone, in release"]
    fn speed() {
        let (options, count) =
            (PoolOptions { len_max: 1 << 30, grow_by: 16 << 20, ..PoolOptions::default() }, 1_000_000);
        let image = PoolImage::new(options.len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options, new_snapshots()).unwrap();
        for n in 0..count {
            tree.put(&random_key(n), SeqNo(n + 1), &[7; 100]).unwrap();
        }
        let mut bytes = vec![0; tree.region().len() as usize];
        tree.region().read(0, &mut bytes);
        let env = SystemEnv::new();
        for round in 0..16 {
            let image = PoolImage::new(options.len_max).unwrap();
            image.grow(bytes.len() as u64).unwrap();
            image.load_words(0, &bytes);
            let env: Option<&dyn Env> = if round % 2 == 0 { None } else { Some(&env) };
            let check_level = if round / 2 % 2 == 0 { PoolCheckLevel::Full } else { PoolCheckLevel::StructureOnly };
            let mut tree = None;
            time(
                &format!("open, {check_level:?} trusted, {} threads", if env.is_some() { 4 } else { 1 }),
                count,
                || {
                    tree = open_with(image, KeyOrder::bytewise(), &options, new_snapshots(), check_level, env).ok();
                },
            );
            assert!(tree.is_some());
        }
    }
}
