//! Making a pool, and opening one: a walk along the chain of leaves, that believes nothing.
//!
//! All is read and judged first; what a crash left half done is repaired then, and made durable before anybody can
//! write. A pool that is refused is as it was.
//!
//! The chain itself is followed by one thread; its leaves and their records are read and judged part by part, by
//! several threads if there is much of it. What concerns two parts, the last leaf of one and the first of the next, is
//! judged at the end.

use std::sync::Arc;

use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::ReadPoints;
use crate::mem::atomic::{AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, PoisonError};
use crate::mem::region::PAGE;
use crate::pmem::inner::Inner;
use crate::pmem::leaf::{Commit, LEAF_ALIGN, LEAF_LEN, Leaf, SLOTS, bits};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::order::Spot;
use crate::pmem::record::{Record, STEP, Slot};
use crate::pmem::space::Space;
use crate::pmem::tree::{HEAD, PoolOptions, Tree, seal_of};
use crate::vfs::Env;

/// Leaves that one thread reads before it looks for more; few in tests, so that there are parts.
const PART: usize = if cfg!(all(test, debug_assertions)) { 3 } else { 256 };
/// For every so many bytes of a pool another thread helps, up to so many.
const SHARE: u64 = if cfg!(all(test, debug_assertions)) { 16 << 10 } else { 16 << 20 };
const HELPERS_MAX: u64 = 3;

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
/// As for [`open_with`].
#[cfg(test)]
pub(crate) fn open<M: Medium>(
    medium: M,
    order: KeyOrder,
    options: &PoolOptions,
    points: Arc<ReadPoints>,
) -> Result<(Tree<M>, Report)> {
    open_with(medium, order, options, points, None)
}

/// Opens the pool on `medium`, a large one with threads of `env`.
///
/// # Errors
/// `Corruption` if it is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open_with<M: Medium>(
    medium: M,
    order: KeyOrder,
    options: &PoolOptions,
    points: Arc<ReadPoints>,
    env: Option<&dyn Env>,
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
    let tree = Tree::assemble(medium, file_id, order, options, (inner, space, 0, 0), points);
    let (mut tree, used, found) = Walk::new(tree)?.run(env)?;
    for (at, word) in &found.repairs {
        tree.medium.publish(*at, *word);
        tree.medium.flush(*at, 8, Site::RepairCommit);
    }
    if !found.repairs.is_empty() {
        tree.medium.fence(Site::RepairDone);
    }
    let spot = |(separator, at): &(Vec<u8>, u64)| (separator.clone(), tree.orders.spot(*at).0);
    let spots: Vec<_> = found.kept.iter().map(spot).collect();
    tree.inner = Inner::build(&spots, tree.order.clone());
    let mut free = Vec::new();
    used.free_ranges(|range| free.push(range));
    {
        let mut space = tree.space()?;
        free.into_iter().for_each(|range| space.add(range));
    }
    let report = Report { leaves: found.kept.len() as u64, repairs: found.repairs.len() as u64, ..found.report };
    tree.len.store(report.records, Ordering::Relaxed);
    tree.leaves.store(report.leaves, Ordering::Relaxed);
    Ok((tree, report))
}

/// One bit for each [`STEP`] of a pool that belongs to something. Thread safe.
struct Used {
    bits: Vec<AtomicU64>,
    steps: u64,
}

impl Used {
    fn new(len: u64) -> Result<Used> {
        let (steps, mut bits) = (len / STEP, Vec::new());
        let words = usize::try_from(steps.div_ceil(64)).ok();
        let words = words.filter(|words| bits.try_reserve_exact(*words).is_ok());
        let words = words.ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "no memory for the map of a pool"))?;
        bits.resize_with(words, || AtomicU64::new(0));
        Ok(Used { bits, steps })
    }

    /// Whether all of `len` bytes from `at` on were free; they are not any more. Of two that overlap one is told so at
    /// least.
    fn mark(&self, at: u64, len: u64) -> bool {
        let (mut step, end) = (at / STEP, (at + len).div_ceil(STEP));
        if end > self.steps {
            return false;
        }
        while step < end {
            let bit = step % 64;
            let count = (64 - bit).min(end - step);
            let mask = (u64::MAX >> (64 - count)) << bit;
            if self.bits[(step / 64) as usize].fetch_or(mask, Ordering::Relaxed) & mask != 0 {
                return false;
            }
            step += count;
        }
        true
    }

    fn clear(&self, at: u64, len: u64) {
        for step in at / STEP..(at + len).div_ceil(STEP) {
            self.bits[(step / 64) as usize].fetch_and(!(1 << (step % 64)), Ordering::Relaxed);
        }
    }

    /// Shows `free` every range that is marked nowhere.
    fn free_ranges(&self, mut free: impl FnMut((u64, u64))) {
        let mut start = None;
        let mut step = 0;
        while step < self.steps {
            let (word, bit) = (self.bits[(step / 64) as usize].load(Ordering::Relaxed), step % 64);
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

/// A valid slot: its number, itself, its fingerprint.
type Filled = (usize, Slot, u8);

/// A leaf that was read: its records in their order.
struct Read {
    at: u64,
    commit: Commit,
    slots: Vec<Filled>,
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

/// What a part of the chain has come to, or all of it.
#[derive(Default)]
struct Found {
    /// Leaves that are kept, each with what separates it from the one before.
    kept: Vec<(Vec<u8>, u64)>,
    empty: Vec<u64>,
    repairs: Vec<(u64, u64)>,
    report: Report,
    /// The first leaf that holds something: where it stands in `kept`, its first record, its slots. What separates it
    /// from the one before is not known yet.
    first: Option<(usize, Record, Vec<Filled>)>,
    /// The last leaf that holds something: what of it belongs to the next one is known when that is read.
    waiting: Option<Read>,
}

fn corrupt(what: &str, at: u64) -> Error {
    Error::corruption(what).at_offset(at)
}

/// Everything that those who read parts need.
struct Walk<M: Medium> {
    tree: Tree<M>,
    used: Used,
    /// All leaves in their order.
    chain: Vec<u64>,
    /// The next part that nobody reads yet.
    next: AtomicUsize,
    failed: AtomicBool,
    parts: Mutex<Vec<Option<Result<Found>>>>,
}

impl<M: Medium> Walk<M> {
    /// Follows the chain.
    fn new(tree: Tree<M>) -> Result<Walk<M>> {
        let (region, used, mut chain) = (tree.region(), Used::new(tree.region().len())?, Vec::new());
        let all = used.mark(0, HEAD);
        debug_assert!(all, "nothing was marked before");
        let mut at = HEAD;
        while at != 0 {
            if !at.is_multiple_of(LEAF_ALIGN) || !region.contains(at, LEAF_LEN) || !used.mark(at, LEAF_LEN) {
                return Err(corrupt("the chain of leaves leads to what is no leaf, or in a circle", at));
            }
            chain.push(at);
            let next = tree.leaf(Spot(at)).next(tree.seal);
            at = next.ok_or_else(|| corrupt("check of the next leaf does not match", at))?;
        }
        let parts = Mutex::new((0..chain.len().div_ceil(PART)).map(|_| None).collect());
        Ok(Walk { tree, used, chain, next: AtomicUsize::new(0), failed: AtomicBool::new(false), parts })
    }

    /// Reads all parts and puts together what they came to.
    fn run(self, env: Option<&dyn Env>) -> Result<(Tree<M>, Used, Found)> {
        let helpers = (self.tree.region().len() / SHARE).min(HELPERS_MAX).min(self.chain.len() as u64 / PART as u64);
        let walk = Arc::new(self);
        let mut threads = Vec::new();
        for _ in 0..env.map_or(0, |_| helpers) {
            let theirs = Arc::clone(&walk);
            // Without a thread this one does their share.
            let spawned = env.map(|env| env.spawn("azekura-open", Box::new(move || theirs.work())));
            threads.extend(spawned.and_then(Result::ok));
        }
        walk.work();
        let panics = threads.into_iter().filter_map(|thread| (!thread.join()).then_some(())).count();
        let walk = Arc::into_inner(walk).filter(|_| panics == 0);
        let panicked = || Error::new(ErrorKind::Poisoned, "a thread panicked while it read a pool");
        let Walk { tree, used, chain, parts, .. } = walk.ok_or_else(panicked)?;
        let mut all = Found::default();
        let mut parts = parts.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Once one has failed, others may not have been read, before it and behind it.
        if let Some(failed) = parts.iter_mut().find(|part| matches!(part, Some(Err(_)))) {
            failed.take().unwrap_or_else(|| Err(panicked()))?;
        }
        for part in parts {
            let part = part.ok_or_else(panicked)??;
            all.add(&tree, &used, part)?;
        }
        let waiting = all.waiting.take();
        all.settle(&tree, &used, waiting, None)?;
        all.link(&tree, &chain);
        for leaf in &all.empty {
            used.clear(*leaf, LEAF_LEN);
        }
        Ok((tree, used, all))
    }

    /// Reads parts until there are none left, or one is refused.
    fn work(&self) {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = self.chain.chunks(PART).nth(number) else { return };
            if self.failed.load(Ordering::Relaxed) {
                return;
            }
            let found = self.part(part, &self.chain[part.len() + number * PART..]);
            if found.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            self.parts.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(found);
        }
    }

    /// Reads the leaves of a part, behind which `rest` follow.
    fn part(&self, part: &[u64], rest: &[u64]) -> Result<Found> {
        let (tree, used, mut found) = (&self.tree, &self.used, Found::default());
        for (n, at) in part.iter().enumerate() {
            let ahead = |by: usize| part.get(n + by).or_else(|| rest.get((n + by).checked_sub(part.len())?));
            if let Some(next) = ahead(2) {
                tree.region().prefetch(*next, LEAF_LEN);
            }
            if let Some(next) = ahead(1).filter(|_| n + 1 < part.len()) {
                fetch_records(tree.leaf(Spot(*next)));
            }
            let read = read(tree, tree.leaf(Spot(*at)))?;
            let Some(first) = read.first() else {
                match *at == HEAD {
                    true => found.kept.push((Vec::new(), HEAD)),
                    false => found.empty.push(*at),
                }
                continue;
            };
            let separator = match &found.first {
                None => {
                    found.first = Some((found.kept.len(), *first, read.slots.clone()));
                    Vec::new()
                }
                Some(_) => {
                    let waiting = found.waiting.take();
                    found.settle(tree, used, waiting, Some((first, &read.slots)))?
                }
            };
            found.kept.push((separator, *at));
            found.waiting = Some(read);
        }
        Ok(found)
    }
}

/// Asks for the records of a leaf that is looked at next.
fn fetch_records(leaf: Leaf<'_>) {
    for n in bits(leaf.commit().valid()) {
        let slot = leaf.slot(n);
        leaf.region.prefetch(slot.at(), slot.len().unwrap_or(64).min(192));
    }
}

/// Reads and checks a leaf and its records.
fn read<M: Medium>(tree: &Tree<M>, leaf: Leaf<'_>) -> Result<Read> {
    let (region, commit) = (tree.region(), leaf.commit());
    if commit.count() >= SLOTS || !leaf.verifies(tree.seal, commit) {
        return Err(corrupt("check of a leaf does not match", leaf.at));
    }
    let slots: Vec<Filled> = bits(commit.valid()).map(|n| (n, leaf.slot(n), leaf.print(n))).collect();
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
    let same = |pair: &[(u64, u32)]| tree.cmp_keys(&records[pair[0].1 as usize], &records[pair[1].1 as usize]).is_eq();
    if sorted.windows(2).any(same) {
        return Err(corrupt("a leaf has a key twice", leaf.at));
    }
    Ok(Read { at: leaf.at, commit, slots, records, sorted })
}

impl Found {
    /// Decides what of a leaf that waits is its own, now that the first record and the slots of the next one with
    /// records are known; what separates the two.
    fn settle<M: Medium>(
        &mut self,
        tree: &Tree<M>,
        used: &Used,
        waiting: Option<Read>,
        next: Option<(&Record, &[Filled])>,
    ) -> Result<Vec<u8>> {
        let (region, mut separator) = (tree.region(), Vec::new());
        if let Some((first, _)) = next {
            first.key(region, &mut separator);
        }
        let Some(mut read) = waiting else { return Ok(separator) };
        if let Some((first, slots)) = next {
            let mut commit = read.commit;
            while let Some((_, n)) = read.sorted.last()
                && tree.cmp_keys(&read.records[*n as usize], first).is_ge()
            {
                let (n, slot, print) = read.slots[*n as usize];
                if !slots.iter().any(|(_, there, _)| *there == slot) {
                    return Err(corrupt("keys of two leaves are out of order", read.at));
                }
                commit = commit.flipped(n, tree.seal.of_slot(read.at, n, print, slot));
                read.sorted.pop();
            }
            if commit != read.commit {
                self.repairs.push((read.at, commit.0));
            }
        }
        for (_, n) in &read.sorted {
            let record = &read.records[*n as usize];
            if !used.mark(record.at, record.buffer_len()) {
                return Err(corrupt("two records overlap, or one and a leaf", record.at));
            }
            self.report.highest = self.report.highest.max(record.seqno);
        }
        self.report.records += read.sorted.len() as u64;
        // A shorter key that is behind the last one still will do.
        let Some(last) = read.last().filter(|_| !separator.is_empty()) else { return Ok(separator) };
        let mut before = Vec::new();
        last.key(region, &mut before);
        Ok(tree.separator(&before, &separator).to_vec())
    }

    /// Adds the part that follows.
    fn add<M: Medium>(&mut self, tree: &Tree<M>, used: &Used, mut part: Found) -> Result<()> {
        if let Some((n, first, slots)) = part.first.take() {
            let waiting = self.waiting.take();
            part.kept[n].0 = self.settle(tree, used, waiting, Some((&first, &slots)))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Visible;
    use crate::memtable::speed::{random_key, time};
    use crate::pmem::medium::Image;
    use crate::vfs::env::SystemEnv;

    fn options() -> PoolOptions {
        PoolOptions { len_max: 64 << 20, grow_by: 64 * PAGE, slots: 20 }
    }

    fn points() -> Arc<ReadPoints> {
        let visible = Visible::default();
        visible.publish(SeqNo::MAX);
        ReadPoints::new(visible)
    }

    fn reopened(bytes: &[u8], env: Option<&dyn Env>) -> Result<(Tree<Image>, Report)> {
        let image = Image::new(options().len_max).unwrap();
        image.grow(bytes.len() as u64).unwrap();
        image.load(0, bytes);
        open_with(image, KeyOrder::bytewise(), &options(), points(), env)
    }

    /// However many read it, the same is found, and the same is refused.
    #[test]
    fn threads_find_what_one_does() {
        let image = Image::new(options().len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), points()).unwrap();
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
        let (alone, report) = reopened(&bytes, None).unwrap();
        assert_eq!((report.records, report.repairs), (tree.len(), 0));
        for _ in 0..20 {
            let (together, same) = reopened(&bytes, Some(&env)).unwrap();
            assert_eq!((same, together.usage().unwrap()), (report, alone.usage().unwrap()));
            for n in (0..10_007).step_by(17) {
                assert_eq!(together.get(&key(n)).unwrap(), tree.get(&key(n)).unwrap());
            }
        }
        let mut refused = 0;
        for at in (4096..bytes.len()).step_by(bytes.len() / 60) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            let (alone, together) = (reopened(&damaged, None), reopened(&damaged, Some(&env)));
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

    /// Prints what a record takes: `cargo test --release -p azekura --lib recover::tests::speed -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "measures speed; run it alone, in release"]
    fn speed() {
        let (options, count) =
            (PoolOptions { len_max: 1 << 30, grow_by: 16 << 20, ..PoolOptions::default() }, 1_000_000);
        let image = Image::new(options.len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options, points()).unwrap();
        for n in 0..count {
            tree.put(&random_key(n), SeqNo(n + 1), &[7; 100]).unwrap();
        }
        let mut bytes = vec![0; tree.region().len() as usize];
        tree.region().read(0, &mut bytes);
        let env = SystemEnv::new();
        for round in 0..8 {
            let image = Image::new(options.len_max).unwrap();
            image.grow(bytes.len() as u64).unwrap();
            image.load(0, &bytes);
            let env: Option<&dyn Env> = if round % 2 == 0 { None } else { Some(&env) };
            time(if env.is_some() { "open, threads" } else { "open, one thread" }, count, || {
                open_with(image, KeyOrder::bytewise(), &options, points(), env).unwrap();
            });
        }
    }
}
