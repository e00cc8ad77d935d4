//! Making a pool, and opening one: a walk along the chain of leaves, that believes nothing.
//!
//! All is read and judged first; what a crash left half done is repaired then, and made durable before anybody can
//! write. A pool that is refused is as it was.

use std::sync::Arc;

use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::ReadPoints;
use crate::mem::atomic::Ordering;
use crate::mem::region::PAGE;
use crate::pmem::inner::Inner;
use crate::pmem::leaf::{Commit, LEAF_ALIGN, LEAF_LEN, Leaf, SLOTS, Seal, bits};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::order::Spot;
use crate::pmem::record::{Record, STEP, Slot};
use crate::pmem::space::Space;
use crate::pmem::tree::{HEAD, PoolOptions, Tree, seal_of};

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

/// Makes an empty pool on `medium`, which holds nothing yet. Durable when it returns; before, there is no pool.
///
/// # Errors
/// `OutOfSpace` if not even that fits.
pub(crate) fn create<M: Medium>(
    medium: M,
    file_id: [u8; 16],
    order: KeyOrder,
    options: &PoolOptions,
    points: Arc<ReadPoints>,
) -> Result<Tree<M>> {
    let least = 2 * PAGE;
    let len = options.grow_by.max(least).min(options.len_max) / PAGE * PAGE;
    if len < least {
        return Err(Error::invalid(format!("a pool has at least {least} bytes")));
    }
    medium.grow(len)?;
    let seal = seal_of(&file_id);
    medium.write(0, &[&FileHeader { kind: FileKind::Pool, file_id }.encode()]);
    medium.flush(0, FileHeader::LEN as u64, Site::FormatHeader);
    let leaf = Leaf::new(medium.region(), HEAD);
    medium.store(leaf.at, Commit::empty(seal, leaf.at).0);
    medium.store(leaf.next_at(), seal.next_word(leaf.at, 0));
    medium.flush(leaf.at, 16, Site::FormatLeaf);
    medium.fence(Site::FormatDone);
    let mut space = Space::new(len, options.len_max, options.grow_by);
    space.add((HEAD + LEAF_LEN, len - HEAD - LEAF_LEN));
    let inner = Inner::build(&[(Vec::new(), HEAD)], order.clone());
    let mut tree = Tree::assemble(medium, file_id, order, options, (inner, space, 0, 1), points);
    tree.inner = Inner::build(&[(Vec::new(), tree.orders.spot(HEAD).0)], tree.order.clone());
    Ok(tree)
}

/// Opens the pool on `medium`.
///
/// # Errors
/// `Corruption` if it is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open<M: Medium>(
    medium: M,
    order: KeyOrder,
    options: &PoolOptions,
    points: Arc<ReadPoints>,
) -> Result<(Tree<M>, Report)> {
    let region = medium.region();
    if !region.contains(HEAD, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    let mut header = [0; FileHeader::LEN];
    region.read(0, &mut header);
    let file_id = FileHeader::decode(FileKind::Pool, &header)?.file_id;
    let len = region.len();
    // A tree without leaves lends its comparisons: nothing of it is used before the walk is over.
    let inner = Inner::build(&[(Vec::new(), HEAD)], order.clone());
    let space = Space::new(len, options.len_max.max(len), options.grow_by);
    let mut tree = Tree::assemble(medium, file_id, order, options, (inner, space, 0, 0), points);
    let mut walk = Walk::new(&tree)?;
    walk.run()?;
    let Walk { used, kept, repairs, report, .. } = walk;
    for (at, word) in &repairs {
        tree.medium.publish(*at, *word);
        tree.medium.flush(*at, 8, Site::RepairCommit);
    }
    if !repairs.is_empty() {
        tree.medium.fence(Site::RepairDone);
    }
    let kept: Vec<_> = kept.into_iter().map(|(separator, at)| (separator, tree.orders.spot(at).0)).collect();
    tree.inner = Inner::build(&kept, tree.order.clone());
    let mut free = Vec::new();
    used.free_ranges(|range| free.push(range));
    {
        let mut space = tree.space()?;
        free.into_iter().for_each(|range| space.add(range));
    }
    tree.len.store(report.records, Ordering::Relaxed);
    tree.leaves.store(report.leaves, Ordering::Relaxed);
    Ok((tree, report))
}

/// One bit for each [`STEP`] of a pool that belongs to something.
struct Used {
    bits: Vec<u64>,
    steps: u64,
}

impl Used {
    fn new(len: u64) -> Result<Used> {
        let (steps, mut bits) = (len / STEP, Vec::new());
        let words = usize::try_from(steps.div_ceil(64)).ok();
        let words = words.filter(|words| bits.try_reserve_exact(*words).is_ok());
        let words = words.ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "no memory for the map of a pool"))?;
        bits.resize(words, 0);
        Ok(Used { bits, steps })
    }

    /// Whether all of `len` bytes from `at` on were free; they are not any more.
    fn mark(&mut self, at: u64, len: u64) -> bool {
        let (mut step, end) = (at / STEP, (at + len).div_ceil(STEP));
        if end > self.steps {
            return false;
        }
        while step < end {
            let bit = step % 64;
            let count = (64 - bit).min(end - step);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let word = &mut self.bits[(step / 64) as usize];
            if *word & mask != 0 {
                return false;
            }
            *word |= mask;
            step += count;
        }
        true
    }

    fn clear(&mut self, at: u64, len: u64) {
        for step in at / STEP..(at + len).div_ceil(STEP) {
            self.bits[(step / 64) as usize] &= !(1 << (step % 64));
        }
    }

    /// Shows `free` every range that is marked nowhere.
    fn free_ranges(&self, mut free: impl FnMut((u64, u64))) {
        let mut start = None;
        let mut step = 0;
        while step < self.steps {
            let (word, bit) = (self.bits[(step / 64) as usize], step % 64);
            let (is_free, rest) =
                (word >> bit & 1 == 0, if word >> bit & 1 == 0 { word >> bit } else { !(word >> bit) });
            let run = u64::from(rest.trailing_zeros()).min(64 - bit).min(self.steps - step);
            match (is_free, start) {
                (true, None) => start = Some(step),
                (false, Some(from)) => {
                    free((from * STEP, (step - from) * STEP));
                    start = None;
                }
                _ => {}
            }
            step += run;
        }
        if let Some(from) = start {
            free((from * STEP, (self.steps - from) * STEP));
        }
    }
}

/// A leaf that was read: its records in their order.
struct Read {
    at: u64,
    commit: Commit,
    slots: Vec<(usize, Slot, u8)>,
    records: Vec<Record>,
    sorted: Vec<(u64, u32)>,
}

impl Read {
    fn first(&self) -> Option<&Record> {
        self.sorted.first().map(|(_, n)| &self.records[*n as usize])
    }

    fn last(&self) -> Option<&Record> {
        self.sorted.last().map(|(_, n)| &self.records[*n as usize])
    }
}

struct Walk<'a, M: Medium> {
    tree: &'a Tree<M>,
    seal: Seal,
    used: Used,
    /// The last leaf that is kept and holds something: what of it belongs to the next one is known when that is read.
    waiting: Option<Read>,
    /// The last leaf that is kept, where the chain goes on.
    linked: u64,
    /// Leaves that are kept, each with what separates it from the one before.
    kept: Vec<(Vec<u8>, u64)>,
    empty: Vec<u64>,
    repairs: Vec<(u64, u64)>,
    report: Report,
}

fn corrupt(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

impl<'a, M: Medium> Walk<'a, M> {
    fn new(tree: &'a Tree<M>) -> Result<Walk<'a, M>> {
        let mut used = Used::new(tree.region().len())?;
        let all = used.mark(0, HEAD);
        debug_assert!(all, "nothing was marked before");
        Ok(Walk {
            tree,
            seal: tree.seal,
            used,
            waiting: None,
            linked: HEAD,
            kept: Vec::new(),
            empty: Vec::new(),
            repairs: Vec::new(),
            report: Report::default(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut at = HEAD;
        while at != 0 {
            let next = self.leaf(at)?;
            at = next;
        }
        self.settle(None)?;
        // The chain ends at the last leaf that is kept.
        self.link(0)?;
        for leaf in std::mem::take(&mut self.empty) {
            self.used.clear(leaf, LEAF_LEN);
        }
        self.report.repairs = self.repairs.len() as u64;
        Ok(())
    }

    /// Reads the leaf at `at`; the offset of the next one.
    fn leaf(&mut self, at: u64) -> Result<u64> {
        let region = self.tree.region();
        if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !self.used.mark(at, LEAF_LEN) {
            return Err(corrupt("the chain of leaves leads to what is no leaf, or in a circle", at));
        }
        let leaf = self.tree.leaf(Spot(at));
        let commit = leaf.commit();
        if commit.count() >= SLOTS || !leaf.verifies(self.seal, commit) {
            return Err(corrupt("check of a leaf does not match", at));
        }
        let next = leaf.next(self.seal).ok_or_else(|| corrupt("check of the next leaf does not match", at))?;
        let read = self.read(leaf, commit)?;
        if read.records.is_empty() && at != HEAD {
            self.empty.push(at);
            return Ok(next);
        }
        let separator = self.settle(Some(&read))?;
        self.link(at)?;
        self.kept.push((separator, at));
        self.report.leaves += 1;
        if !read.records.is_empty() {
            self.waiting = Some(read);
        }
        Ok(next)
    }

    /// Reads and checks the records of a leaf.
    fn read(&self, leaf: Leaf<'_>, commit: Commit) -> Result<Read> {
        let (tree, region) = (self.tree, self.tree.region());
        let slots: Vec<_> = bits(commit.valid()).map(|n| (n, leaf.slot(n), leaf.print(n))).collect();
        for (_, slot, _) in &slots {
            region.prefetch(slot.at(), slot.len().unwrap_or(64).min(192));
        }
        let (mut records, mut key) = (Vec::with_capacity(slots.len()), Vec::new());
        for (_, slot, print) in &slots {
            let record = Record::read(region, *slot)?;
            if !record.verifies(region, &tree.file_id) {
                return Err(corrupt("checksum of a record does not match", record.at));
            }
            if record.kind != RecordKind::Put {
                return Err(corrupt("a record of that kind does not stand in a leaf", record.at));
            }
            record.key(region, &mut key);
            if tree.print(&key) != *print {
                return Err(corrupt("fingerprint of a record does not match", leaf.at));
            }
            records.push(record);
        }
        let mut sorted = Vec::with_capacity(records.len());
        tree.sorted(&records, 0, &mut sorted);
        let same =
            |pair: &[(u64, u32)]| tree.cmp_keys(&records[pair[0].1 as usize], &records[pair[1].1 as usize]).is_eq();
        if sorted.windows(2).any(same) {
            return Err(corrupt("a leaf has a key twice", leaf.at));
        }
        Ok(Read { at: leaf.at, commit, slots, records, sorted })
    }

    /// Decides what of the leaf that waits is its own, now that the next one with records is known; what separates the
    /// two.
    fn settle(&mut self, next: Option<&Read>) -> Result<Vec<u8>> {
        let (tree, region) = (self.tree, self.tree.region());
        let mut separator = Vec::new();
        let first = next.and_then(Read::first);
        if let Some(first) = first {
            first.key(region, &mut separator);
        }
        let Some(mut read) = self.waiting.take() else { return Ok(self.shortened(None, separator)) };
        if let (Some(first), Some(next)) = (first, next) {
            let mut commit = read.commit;
            while let Some((_, n)) = read.sorted.last()
                && tree.cmp_keys(&read.records[*n as usize], first).is_ge()
            {
                let (n, slot, print) = read.slots[*n as usize];
                if !next.slots.iter().any(|(_, there, _)| *there == slot) {
                    return Err(corrupt("keys of two leaves are out of order", read.at));
                }
                commit = commit.flipped(n, self.seal.of_slot(read.at, n, print, slot));
                read.sorted.pop();
            }
            if commit != read.commit {
                self.repairs.push((read.at, commit.0));
            }
        }
        for (_, n) in &read.sorted {
            let record = &read.records[*n as usize];
            if !self.used.mark(record.at, record.buffer_len()) {
                return Err(corrupt("two records overlap, or one and a leaf", record.at));
            }
            self.report.highest = self.report.highest.max(record.seqno);
        }
        self.report.records += read.sorted.len() as u64;
        Ok(self.shortened(read.last(), separator))
    }

    /// `first`, or a shorter key that is behind `last` still.
    fn shortened(&self, last: Option<&Record>, first: Vec<u8>) -> Vec<u8> {
        let Some(last) = last.filter(|_| !first.is_empty()) else { return first };
        let mut before = Vec::new();
        last.key(self.tree.region(), &mut before);
        self.tree.separator(&before, &first).to_vec()
    }

    /// Sees to it that the chain goes from the last leaf that is kept to `at`.
    fn link(&mut self, at: u64) -> Result<()> {
        if at == HEAD {
            return Ok(());
        }
        let leaf = self.tree.leaf(Spot(self.linked));
        let now = leaf.next(self.seal).ok_or_else(|| corrupt("check of the next leaf does not match", leaf.at))?;
        if now != at {
            self.repairs.push((leaf.next_at(), self.seal.next_word(leaf.at, at)));
        }
        self.linked = at;
        Ok(())
    }
}
