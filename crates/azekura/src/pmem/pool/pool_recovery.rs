//! Creates and opens the tree of a pool by following the chain of leaves, without trusting unverified bytes.
//!
//! One thread follows the chain. Several threads read and check its leaves and their records, part by part, if there
//! are many. Checks between two parts, of the last leaf of one and the first leaf of the next, run at the end.
//! [`PoolCheckLevel`] says how much of each record is read.

use std::sync::Arc;

use crate::base::file_format::{FileHeader, FileKind};
use crate::base::sync::WakeSignal;
use crate::base::version_edit::ExpiryTimes;
use crate::base::{Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::PartitionReaders;
use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex, Ordering, PoisonError, lock};
use crate::mem::pages::PAGE;
use crate::mem::region::Region;
use crate::pmem::allocator::Allocator;
use crate::pmem::inner::InnerTree;
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN, LeafAddr, LeafCommitWord, PoolLeaf, SLOTS, set_bits};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::pool::image::{run_with_helpers, thread_panicked_error};
use crate::pmem::pool::used_space::UsedSpaceBitmap;
use crate::pmem::record::{BUFFER_ALIGN, LeafSlot, PoolRecord};
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolExpiry, PoolOptions, PoolTree, leaf_check_seed};
use crate::vfs::Env;

/// How much of a pool is checked when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolCheckLevel {
    /// No byte is trusted: the whole pool is read, and every checksum must match.
    Full,
    /// The bytes are trusted to be those that were written. Leaves are checked. Records must be where the slots point
    /// to, must not overlap, and must be between those of the adjacent leaves. Only the header and the key of a
    /// record are read.
    StructureOnly,
}

/// Statistics of a recovered pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolRecoveryReport {
    pub(crate) records: u64,
    pub(crate) leaves: u64,
    /// Number of words that a crash had left incomplete.
    pub(crate) repairs: u64,
    /// The highest sequence number of a record.
    pub(crate) max_seqno: SeqNo,
    pub(crate) expiry: ExpiryTimes,
}

pub(crate) const OVERLAP: &str = "two records overlap, or one and a leaf";

/// Number of bytes of a record that are prefetched: for a full check, most whole records; for a check of the
/// structure, most headers and keys.
const RECORD_PREFETCH_LENS: [u64; 2] = [192, 32];

/// A valid slot: its index, its word, and its fingerprint.
pub(crate) type ValidSlot = (usize, LeafSlot, u8);

pub(crate) fn corruption_at(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

/// A leaf that was read and checked.
#[derive(Default)]
pub(crate) struct RecoveredLeaf {
    pub(crate) offset: u64,
    pub(crate) commit_word: u64,
    pub(crate) slots: Vec<ValidSlot>,
    /// The records of `slots`, in the same order.
    pub(crate) records: Vec<PoolRecord>,
    /// (Key prefix, index in `records`) sorted by key; empty if the records were not sorted.
    sorted: Vec<(u64, u32)>,
    /// Indices of the first and the last record in key order.
    first_and_last: Option<(u32, u32)>,
}

/// Prefetches the leaf after the next one.
pub(crate) fn prefetch_leaf<M: PersistenceBackend>(tree: &PoolTree<M>, at: u64) {
    tree.region().prefetch(at, LEAF_LEN);
}

/// Prefetches the records of the next leaf, and their bits in `used`.
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

/// Reads the record of a slot if it has the common form ([`PoolRecord::decode_short`]).
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
    /// Reads and checks a leaf and its records. Replaces the leaf that was read before.
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
            RecordKind::Put | RecordKind::ExpiringPut => Ok(record),
            _ => Err(corruption_at("a leaf cannot contain a record of that kind", record.offset)),
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
            return Err(corruption_at("a leaf contains a key twice", self.offset));
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

    /// Drops the records that are not before `first`, the first record of the next leaf with records. That leaf must
    /// contain each of them as the same slot. Returns the new commit word.
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

    /// The records that were not dropped, unordered.
    pub(crate) fn remaining_records(&self) -> impl Iterator<Item = &PoolRecord> {
        // Only `drop_records_from` drops records, and it sorts them first.
        let (all, sorted) = match self.sorted.is_empty() && self.first_and_last.is_some() {
            true => (self.records.as_slice(), &[][..]),
            false => (&[][..], self.sorted.as_slice()),
        };
        all.iter().chain(sorted.iter().map(|(_, n)| &self.records[*n as usize]))
    }
}

/// The file id in the header of a pool.
///
/// # Errors
/// `Corruption` if the pool ends before its first leaf, or its header is damaged.
pub(crate) fn read_file_id(region: &Region) -> Result<[u8; 16]> {
    if !region.contains(HEAD_LEAF_OFFSET, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    let mut header = [0; FileHeader::LEN];
    region.read(0, &mut header);
    Ok(FileHeader::decode(FileKind::Pool, &header)?.file_id)
}

/// Checks every leaf and every record separately, without the key order.
///
/// # Errors
/// `Corruption` if the pool is damaged.
pub(crate) fn verify_records(region: &Region) -> Result<PoolRecoveryReport> {
    let file_id = read_file_id(region)?;
    let (seal, mut used, mut at, mut report) = (
        leaf_check_seed(&file_id),
        UsedSpaceBitmap::new(region.len())?,
        HEAD_LEAF_OFFSET,
        PoolRecoveryReport::default(),
    );
    // The slots of the last leaf with records before this one.
    let mut before: Vec<LeafSlot> = Vec::new();
    while at != 0 {
        if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
            return Err(corruption_at("the chain of leaves leads to invalid memory or has a cycle", at));
        }
        let leaf = PoolLeaf::new(region, at);
        if leaf.commit_word().count() >= SLOTS || !leaf.check_matches(seal, leaf.commit_word()) {
            return Err(corruption_at("check of a leaf does not match", at));
        }
        let slots: Vec<LeafSlot> = set_bits(leaf.commit_word().valid_slots()).map(|n| leaf.slot(n)).collect();
        for slot in &slots {
            let record = PoolRecord::read(region, *slot)?;
            if record.kind.without_expiry() != RecordKind::Put || !record.checksum_matches(region, &file_id) {
                return Err(corruption_at("checksum of a record does not match", record.offset));
            }
            report.max_seqno = report.max_seqno.max(record.seqno);
            record.expires_ms(region)?;
            match used.mark(record.offset, record.buffer_len()) {
                true => report.records += 1,
                // A crash in the middle of a split leaves the same slot in two adjacent leaves.
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

/// Number of leaves that one thread reads at a time; small in tests, so that there are several parts.
const LEAVES_PER_PART: usize = if cfg!(all(test, debug_assertions)) { 3 } else { 256 };

/// Maximum time, in milliseconds, that a thread sleeps before it checks again whether the chain has grown.
const CHAIN_WAIT_MS: u64 = 10;

/// The result of reading a part of the chain, or the whole chain.
#[derive(Default)]
pub(crate) struct RecoveredPart {
    /// The leaves to keep, each with the separator between it and the leaf before it.
    pub(crate) leaves: Vec<(Vec<u8>, u64)>,
    empty_leaves: Vec<u64>,
    /// Words that a crash has left incomplete: (offset, repaired word).
    pub(crate) repairs: Vec<(u64, u64)>,
    pub(crate) report: PoolRecoveryReport,
    /// The first leaf with records: its index in `leaves`, its first record, and its slots. The separator before it
    /// is not known yet.
    first_leaf: Option<(usize, PoolRecord, Vec<ValidSlot>)>,
    /// The last leaf with records. Which of its records belong to the next leaf is known once that leaf is read.
    last_leaf: Option<RecoveredLeaf>,
    /// Scratch space for a key.
    key: Vec<u8>,
}

/// The chain of leaves, as far as it was followed.
#[derive(Default)]
struct LeafChain {
    /// The leaves in the order of the chain, [`LEAVES_PER_PART`] in each part.
    parts: Vec<Arc<[u64]>>,
    is_complete: bool,
}

/// State that all reading threads share.
pub(crate) struct PoolRecovery<M: PersistenceBackend> {
    tree: PoolTree<M>,
    check_level: PoolCheckLevel,
    /// The space of the leaves and records that each thread has read.
    used_space: Mutex<Vec<UsedSpaceBitmap>>,
    chain: Mutex<LeafChain>,
    /// Signaled when the chain gets longer.
    chain_grew: WakeSignal,
    /// The next part that no thread has taken.
    next_part: AtomicUsize,
    failed: AtomicBool,
    /// The results of the parts, unordered.
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

    /// Follows the chain, reads all parts, and joins their results.
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
        // After a part has failed, other parts before and behind it may not have been read.
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
        debug_assert!(
            all.leaves.first().is_some_and(|(_, at)| *at == HEAD_LEAF_OFFSET),
            "the first leaf of a pool is always kept"
        );
        all.add_link_repairs(&tree, &chain);
        for leaf in &all.empty_leaves {
            used.clear(*leaf, LEAF_LEN);
        }
        Ok((tree, used, all))
    }

    /// Follows the chain, and passes its parts to the other threads.
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
                return Err(corruption_at("the chain of leaves leads to invalid memory or has a cycle", at));
            }
            show(at);
            let next = self.tree.leaf(LeafAddr(at)).next_leaf(self.tree.check_seed);
            at = next.ok_or_else(|| corruption_at("check of the next leaf does not match", at))?;
        }
        lock(&self.used_space).push(used);
        Ok(())
    }

    /// Waits until part `number` of the chain was followed; `None` if the chain is shorter.
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

    /// Reads parts until there are no more, or one has failed.
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
    /// Decides which records of a leaf belong to it, given the first record and the slots of the next leaf with
    /// records. Returns the separator between the two.
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
            record.expires_ms(tree.region())?.into_iter().for_each(|time| self.report.expiry.add(time));
        }
        let mut separator = Vec::new();
        let Some((first, _)) = next else { return Ok(separator) };
        first.read_key(tree.region(), &mut separator);
        // A shorter separator is enough if it is behind the last record of this leaf.
        if let Some(last) = read.last() {
            last.read_key(tree.region(), &mut self.key);
            let len = tree.separator(&self.key, &separator).len();
            separator.truncate(len);
        }
        Ok(separator)
    }

    /// Resolves the last leaf with records, and returns the separator between the next leaf and the leaves before it.
    /// If all of its records belong to the next leaf, it is dropped: a crash leaves such a leaf when the records of a
    /// leaf are merged into an empty one.
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
        let removed = self.leaves.pop();
        if let Some((n, first, slots)) = &mut self.first_leaf
            && *n == self.leaves.len()
        {
            (*first, *slots) = (*next.0, next.1.to_vec());
        }
        Ok(removed.map_or(separator, |(own, _)| own))
    }

    /// Appends the next part.
    fn append_part<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        used: &mut UsedSpaceBitmap,
        mut part: RecoveredPart,
    ) -> Result<()> {
        if let Some((n, first, slots)) = part.first_leaf.take() {
            part.leaves[n].0 = match self.last_leaf.take() {
                Some(mut last) => self.separate(tree, used, &mut last, (&first, &slots))?,
                // Only leaves without records are before this one. The separator is an inserted key, because the
                // empty key is before all others only in bytewise order, and a comparator may not accept it.
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
        self.report.expiry.add_all(&part.report.expiry);
        Ok(())
    }

    /// Adds repairs of the next pointers, so that the chain contains only the leaves to keep.
    fn add_link_repairs<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>, chain: &[u64]) {
        let (mut kept_leaves, mut last, mut skipped) =
            (self.leaves.iter().map(|(_, at)| *at).peekable(), HEAD_LEAF_OFFSET, false);
        for at in chain.iter().copied().chain([0]) {
            if at != 0 && kept_leaves.next_if_eq(&at).is_none() {
                skipped = true;
                continue;
            }
            if skipped {
                self.repairs.push((tree.leaf(LeafAddr(last)).next_offset(), tree.check_seed.next_word(last, at)));
            }
            (last, skipped) = (at, false);
        }
        debug_assert!(kept_leaves.next().is_none(), "the leaves to keep are in the order of the chain");
    }
}

/// Creates an empty pool on `backend`, which is empty. The pool is durable when this returns; before, there is no
/// pool.
///
/// # Errors
/// `OutOfSpace` if the backend cannot grow to the initial length, `Invalid` if the options allow less than two pages.
pub(crate) fn create<M: PersistenceBackend>(
    backend: M,
    file_id: [u8; 16],
    order: KeyOrder,
    options: &PoolOptions,
    readers: PartitionReaders,
) -> Result<PoolTree<M>> {
    let min_len = 2 * PAGE;
    let len = options.grow_by.max(min_len).min(options.len_max) / PAGE * PAGE;
    if len < min_len {
        return Err(Error::invalid(format!("a pool must have at least {min_len} bytes")));
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
    let mut tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 1), readers);
    tree.inner = InnerTree::bulk_load(
        &[(Vec::new(), tree.leaf_orders.new_leaf_addr(HEAD_LEAF_OFFSET).0)],
        tree.key_order.clone(),
    );
    Ok(tree)
}

/// Opens the pool on `backend`. `check_level` states how much is checked. A large pool is read with threads of `env`.
///
/// # Errors
/// `Corruption` if the pool is damaged, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open_with<M: PersistenceBackend>(
    backend: M,
    order: KeyOrder,
    options: &PoolOptions,
    readers: PartitionReaders,
    check_level: PoolCheckLevel,
    env: Option<&dyn Env>,
) -> Result<(PoolTree<M>, PoolRecoveryReport)> {
    let region = backend.region();
    let file_id = read_file_id(region)?;
    let len = region.len();
    // The recovery uses only the comparisons and checks of this tree. Its leaves are added after the chain was read.
    let inner = InnerTree::bulk_load(&[(Vec::new(), HEAD_LEAF_OFFSET)], order.clone());
    let mut space = Allocator::new(len, options.len_max, options.grow_by);
    space.set_addresses(region.reserved());
    let tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 0), readers);
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
    tree.expiry = PoolExpiry::new(report.expiry);
    Ok((tree, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::PartitionId;
    use crate::base::{ErrorKind, SeqNo};
    use crate::engine::{LastVisibleSeqno, SnapshotList};
    use crate::pmem::leaf::set_bits;
    use crate::pmem::persistence::PoolImage;
    use crate::vfs::env::SystemEnv;

    fn options() -> PoolOptions {
        PoolOptions { len_max: 64 << 20, grow_by: 64 * PAGE, slots_per_leaf: 20 }
    }

    fn new_readers() -> PartitionReaders {
        let visible = LastVisibleSeqno::default();
        visible.publish(SeqNo::MAX);
        SnapshotList::new(visible).readers_of(PartitionId(1))
    }

    fn reopen_bytes(bytes: &[u8], env: Option<&dyn Env>) -> Result<(PoolTree<PoolImage>, PoolRecoveryReport)> {
        let image = PoolImage::new(options().len_max).unwrap();
        image.grow(bytes.len() as u64).unwrap();
        image.load_words(0, bytes);
        open_with(image, KeyOrder::bytewise(), &options(), new_readers(), PoolCheckLevel::Full, env)
    }

    /// Any number of threads finds the same records, and refuses the same damage.
    #[test]
    fn parallel_open_equals_single_threaded() {
        let image = PoolImage::new(options().len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_readers()).unwrap();
        let key = |n: u64| (n * 7919 % 10_007).to_be_bytes();
        for n in 0..10_007 {
            tree.put(&key(n), SeqNo(n + 1), &[n as u8; 30]).unwrap();
        }
        // A crash can leave empty leaves in the chain.
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

    /// A crash in the middle of a merge leaves the same records in two leaves. Regression: removals had emptied the
    /// left leaf before the merge. Recovery restored it as an empty leaf with the separator of the right one. The next
    /// merge then removed the right leaf from the inner nodes, and lookups used a leaf that was free.
    #[test]
    fn leaf_goes_when_all_of_it_is_in_the_next() {
        for left in 0..8 {
            let image = PoolImage::new(options().len_max).unwrap();
            let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_readers()).unwrap();
            let keys: Vec<_> = (0..300u64).map(u64::to_be_bytes).collect();
            for (key, n) in keys.iter().zip(1..) {
                tree.put(key, SeqNo(n), &[7; 30]).unwrap();
            }
            // The leaves are sparse, so that they are merged.
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
            assert!(there.iter().all(|key| opened.get(&key[..]).unwrap().is_some()), "a merge lost a leaf");
            assert_eq!(
                report.leaves + u64::from(left.offset != HEAD_LEAF_OFFSET),
                tree.leaf_count.load(Ordering::Relaxed)
            );
        }
    }
}
