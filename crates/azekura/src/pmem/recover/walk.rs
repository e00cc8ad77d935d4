//! The walk along the chain of leaves: one follows it, and all read what lies behind him.

use std::sync::Arc;

use crate::base::sync::Bell;
use crate::base::{Error, Result};
use crate::mem::atomic::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};
use crate::pmem::crew::{panicked, together};
use crate::pmem::leaf::{LEAF_ALIGN, LEAF_LEN, Spot};
use crate::pmem::medium::Medium;
use crate::pmem::record::Record;
use crate::pmem::recover::leaves::{Filled, OVERLAP, Read, Report, Trust, corrupt, fetch_leaf, fetch_records};
use crate::pmem::recover::used::Used;
use crate::pmem::tree::{HEAD, Tree};
use crate::vfs::Env;

/// Leaves that one thread reads before it looks for more; few in tests, so that there are parts.
const PART: usize = if cfg!(all(test, debug_assertions)) { 3 } else { 256 };

/// For this long somebody sleeps at most before he looks again whether the chain has got longer, in milliseconds.
const PATIENCE_MS: u64 = 10;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a part of the chain has come to, or all of it.
#[derive(Default)]
pub(super) struct Found {
    /// Leaves that are kept, each with what separates it from the one before.
    pub(super) kept: Vec<(Vec<u8>, u64)>,
    empty: Vec<u64>,
    /// Words that a crash has left half done: where, and what belongs there.
    pub(super) repairs: Vec<(u64, u64)>,
    pub(super) report: Report,
    /// The first leaf that holds something: where it stands in `kept`, its first record, its slots. What separates it
    /// from the one before is not known yet.
    first: Option<(usize, Record, Vec<Filled>)>,
    /// The last leaf that holds something: what of it belongs to the next one is known when that is read.
    waiting: Option<Read>,
    /// A key.
    key: Vec<u8>,
}

/// The chain of leaves, as far as it was followed.
#[derive(Default)]
struct Chain {
    /// Leaves in their order, [`PART`] at a time.
    parts: Vec<Arc<[u64]>>,
    ended: bool,
}

/// Everything that those who read parts need.
pub(super) struct Walk<M: Medium> {
    tree: Tree<M>,
    trust: Trust,
    /// What belongs to leaves, and to records that were read, for each who did.
    used: Mutex<Vec<Used>>,
    chain: Mutex<Chain>,
    /// Rung when the chain has got longer.
    longer: Bell,
    /// The next part that nobody reads yet.
    next: AtomicUsize,
    failed: AtomicBool,
    /// What came of parts, in no order.
    read: Mutex<Vec<(usize, Result<Found>)>>,
}

impl<M: Medium> Walk<M> {
    pub(super) fn new(tree: Tree<M>, trust: Trust) -> Walk<M> {
        let (used, chain, read) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        Walk { tree, trust, used, chain, longer: Bell::default(), next, failed, read }
    }

    /// Follows the chain and reads all parts; puts together what they came to.
    pub(super) fn run(self, env: Option<&dyn Env>) -> Result<(Tree<M>, Used, Found)> {
        let (bytes, mut followed) = (self.tree.region().len(), Ok(()));
        let lead = |walk: &Walk<M>| {
            followed = walk.follow();
            walk.work();
        };
        let Walk { tree, used, chain, read, .. } = together(self, env, bytes, u64::MAX, lead, Walk::work)?;
        followed?;
        let (mut all, mut first): (_, Option<Used>) = (Found::default(), None);
        let mut read = read.into_inner().unwrap_or_else(PoisonError::into_inner);
        read.sort_unstable_by_key(|(number, _)| *number);
        // Once one has failed, others may not have been read, before it and behind it.
        if let Some(failed) = read.iter_mut().find(|(_, part)| part.is_err()) {
            std::mem::replace(&mut failed.1, Err(panicked()))?;
        }
        for other in used.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let Some(used) = &mut first else {
                first = Some(other);
                continue;
            };
            if !used.join(&other) {
                return Err(Error::corruption(OVERLAP));
            }
        }
        let mut used = first.ok_or_else(panicked)?;
        let chain: Vec<u64> = lock(&chain).parts.iter().flat_map(|part| part.iter().copied()).collect();
        if read.len() < chain.len().div_ceil(PART) {
            return Err(panicked());
        }
        for (_, part) in read {
            all.add(&tree, &mut used, part?)?;
        }
        if let Some(mut last) = all.waiting.take() {
            all.settle(&tree, &mut used, &mut last, None)?;
        }
        all.link(&tree, &chain);
        for leaf in &all.empty {
            used.clear(*leaf, LEAF_LEN);
        }
        Ok((tree, used, all))
    }

    /// Follows the chain, and lets others read what of it is there.
    fn follow(&self) -> Result<()> {
        let mut part = Vec::with_capacity(PART);
        let followed = self.each_leaf(|leaf| {
            part.push(leaf);
            if part.len() == PART {
                lock(&self.chain).parts.push(part.drain(..).collect());
                self.longer.ring();
            }
        });
        {
            let mut chain = lock(&self.chain);
            chain.parts.extend((!part.is_empty()).then(|| part.into()));
            chain.ended = true;
        }
        self.longer.ring();
        followed.inspect_err(|_| self.failed.store(true, Ordering::Relaxed))
    }

    fn each_leaf(&self, mut show: impl FnMut(u64)) -> Result<()> {
        let (region, mut used, mut at) = (self.tree.region(), Used::new(self.tree.region().len())?, HEAD);
        let all = used.mark(0, HEAD);
        debug_assert!(all, "nothing was marked before");
        while at != 0 {
            if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
                return Err(corrupt("the chain of leaves leads to what is no leaf, or in a circle", at));
            }
            show(at);
            let next = self.tree.leaf(Spot(at)).next(self.tree.seal);
            at = next.ok_or_else(|| corrupt("check of the next leaf does not match", at))?;
        }
        lock(&self.used).push(used);
        Ok(())
    }

    /// A part of the chain, once it was followed so far; none behind its end.
    fn part_of_chain(&self, number: usize) -> Option<Arc<[u64]>> {
        loop {
            let rings = self.longer.count();
            {
                let chain = lock(&self.chain);
                if chain.parts.len() > number || chain.ended {
                    return chain.parts.get(number).cloned();
                }
            }
            self.longer.wait(rings, PATIENCE_MS);
        }
    }

    /// Reads parts until there are none left, or one is refused.
    fn work(&self) {
        let mut used = None;
        while let Some((number, part)) = self.next_part() {
            let found = self.part(&part, &mut used);
            if found.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            lock(&self.read).push((number, found));
        }
        lock(&self.used).extend(used);
    }

    fn next_part(&self) -> Option<(usize, Arc<[u64]>)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let part = self.part_of_chain(number)?;
        (!self.failed.load(Ordering::Relaxed)).then_some((number, part))
    }

    /// Reads the leaves of a part.
    fn part(&self, part: &[u64], used: &mut Option<Used>) -> Result<Found> {
        let (tree, mut found, mut spare) = (&self.tree, Found::default(), Read::default());
        let used = match used {
            Some(used) => used,
            None => used.insert(Used::new(tree.region().len())?),
        };
        for (n, at) in part.iter().enumerate() {
            if let Some(next) = part.get(n + 2) {
                fetch_leaf(tree, *next);
            }
            if let Some(next) = part.get(n + 1) {
                fetch_records(tree, *next, self.trust, used);
            }
            let mut read = spare;
            read.read(tree, *at, self.trust)?;
            let Some(first) = read.first() else {
                match *at == HEAD {
                    true => found.kept.push((Vec::new(), HEAD)),
                    false => found.empty.push(*at),
                }
                spare = read;
                continue;
            };
            let mut separator = Vec::new();
            let mut before = found.waiting.take();
            match &mut before {
                None => found.first = Some((found.kept.len(), *first, read.slots.clone())),
                Some(before) => separator = found.separate(tree, used, before, (first, &read.slots))?,
            }
            found.kept.push((separator, *at));
            found.waiting = Some(read);
            spare = before.unwrap_or_default();
        }
        Ok(found)
    }
}

impl Found {
    /// Decides what of a leaf is its own, now that the first record and the slots of the next one with records are
    /// known; what separates the two.
    fn settle<M: Medium>(
        &mut self,
        tree: &Tree<M>,
        used: &mut Used,
        read: &mut Read,
        next: Option<(&Record, &[Filled])>,
    ) -> Result<Vec<u8>> {
        if let Some((first, slots)) = next {
            let commit = read.cut(tree, first, slots)?;
            if commit.0 != read.commit {
                self.repairs.push((read.at, commit.0));
            }
        }
        for record in read.left() {
            if !used.mark(record.at, record.buffer_len()) {
                return Err(corrupt(OVERLAP, record.at));
            }
            self.report.highest = self.report.highest.max(record.seqno);
            self.report.records += 1;
        }
        let mut separator = Vec::new();
        let Some((first, _)) = next else { return Ok(separator) };
        first.key(tree.region(), &mut separator);
        // A shorter key that is behind the last one still will do.
        if let Some(last) = read.last() {
            last.key(tree.region(), &mut self.key);
            let len = tree.separator(&self.key, &separator).len();
            separator.truncate(len);
        }
        Ok(separator)
    }

    /// Settles the last leaf with records, and returns what separates the next one from those before it. A leaf all of
    /// whose records belong to the next one goes: a crash leaves it when records are joined to a leaf that has none.
    fn separate<M: Medium>(
        &mut self,
        tree: &Tree<M>,
        used: &mut Used,
        read: &mut Read,
        next: (&Record, &[Filled]),
    ) -> Result<Vec<u8>> {
        let separator = self.settle(tree, used, read, Some(next))?;
        if read.last().is_some() || read.at == HEAD {
            return Ok(separator);
        }
        self.empty.push(read.at);
        let gone = self.kept.pop();
        if let Some((n, first, slots)) = &mut self.first
            && *n == self.kept.len()
        {
            (*first, *slots) = (*next.0, next.1.to_vec());
        }
        Ok(gone.map_or(separator, |(own, _)| own))
    }

    /// Adds the part that follows.
    fn add<M: Medium>(&mut self, tree: &Tree<M>, used: &mut Used, mut part: Found) -> Result<()> {
        if let Some((n, first, slots)) = part.first.take() {
            part.kept[n].0 = match self.waiting.take() {
                Some(mut last) => self.separate(tree, used, &mut last, (&first, &slots))?,
                // Only leaves without records stand before it. A key that was inserted, because an empty one is before
                // all others in the order of bytes alone, and a comparator may not know it.
                None => {
                    let mut separator = Vec::new();
                    first.key(tree.region(), &mut separator);
                    separator
                }
            };
            self.waiting = part.waiting.take();
        }
        self.kept.append(&mut part.kept);
        self.empty.append(&mut part.empty);
        self.repairs.append(&mut part.repairs);
        self.report.records += part.report.records;
        self.report.highest = self.report.highest.max(part.report.highest);
        Ok(())
    }

    /// Sees to it that the chain leads from one leaf that is kept to the next, past the others.
    fn link<M: Medium>(&mut self, tree: &Tree<M>, chain: &[u64]) {
        let (mut kept, mut last, mut passed) = (self.kept.iter().map(|(_, at)| *at).peekable(), HEAD, false);
        for at in chain.iter().copied().chain([0]) {
            if at != 0 && kept.next_if_eq(&at).is_none() {
                passed = true;
                continue;
            }
            if passed {
                self.repairs.push((tree.leaf(Spot(last)).next_at(), tree.seal.next_word(last, at)));
            }
            (last, passed) = (at, false);
        }
    }
}
