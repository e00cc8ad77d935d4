//! The walk along the chain of leaves: one follows it, and all read what lies behind him.

use std::sync::Arc;

use crate::base::sync::WakeSignal;
use crate::base::{Error, Result};
use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};
use crate::pmem::crew::{run_with_helpers, thread_panicked_error};
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN, LeafAddr};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::PoolRecord;
use crate::pmem::recover::leaves::{
    OVERLAP, PoolCheckLevel, PoolRecoveryReport, RecoveredLeaf, ValidSlot, corruption_at, prefetch_leaf,
    prefetch_leaf_records,
};
use crate::pmem::recover::used::UsedSpaceBitmap;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolTree};
use crate::vfs::Env;

/// Leaves that one thread reads before it looks for more; few in tests, so that there are parts.
const LEAVES_PER_PART: usize = if cfg!(all(test, debug_assertions)) { 3 } else { 256 };

/// For this long somebody sleeps at most before he looks again whether the chain has got longer, in milliseconds.
const CHAIN_WAIT_MS: u64 = 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a part of the chain has come to, or all of it.
#[derive(Default)]
pub(super) struct RecoveredPart {
    /// Leaves that are kept, each with what separates it from the one before.
    pub(super) leaves: Vec<(Vec<u8>, u64)>,
    empty_leaves: Vec<u64>,
    /// Words that a crash has left half done: where, and what belongs there.
    pub(super) repairs: Vec<(u64, u64)>,
    pub(super) report: PoolRecoveryReport,
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

/// Everything that those who read parts need.
pub(super) struct PoolRecovery<M: PersistenceBackend> {
    tree: PoolTree<M>,
    check_level: PoolCheckLevel,
    /// What belongs to leaves, and to records that were read, for each who did.
    used_space: Mutex<Vec<UsedSpaceBitmap>>,
    chain: Mutex<LeafChain>,
    /// Rung when the chain has got longer.
    chain_grew: WakeSignal,
    /// The next part that nobody reads yet.
    next_part: AtomicUsize,
    failed: AtomicBool,
    /// What came of parts, in no order.
    parts_read: Mutex<Vec<(usize, Result<RecoveredPart>)>>,
}

impl<M: PersistenceBackend> PoolRecovery<M> {
    pub(super) fn new(tree: PoolTree<M>, check_level: PoolCheckLevel) -> PoolRecovery<M> {
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
    pub(super) fn run(self, env: Option<&dyn Env>) -> Result<(PoolTree<M>, UsedSpaceBitmap, RecoveredPart)> {
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
