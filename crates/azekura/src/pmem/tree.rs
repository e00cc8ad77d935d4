//! The tree: where everything hangs together, and how it is read.

use std::sync::Arc;

use crate::base::checksum::{key_hash, place_seed};
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::ReadPoints;
use crate::mem::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, EXPLORED, Mutex, MutexGuard, Ordering, PoisonError, fence,
};
use crate::mem::epoch::Pin;
use crate::mem::region::Region;
use crate::mem::slice::Slice;
use crate::pmem::inner::{Goal, Inner};
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{Commit, LEAF_LEN, Leaf, SLOTS, Seal, bits};
use crate::pmem::medium::{Medium, Splits};
use crate::pmem::order::Orders;
use crate::pmem::record::{Record, Slot};
use crate::pmem::shelves::Shelves;
use crate::pmem::space::{Space, Usage};
use crate::pmem::versions::{Versions, poisoned};
use crate::vfs::fs::PersistenceLevel;

/// Where the first leaf stands.
pub(crate) const HEAD: u64 = 4096;

/// Locks of leaves: a leaf has that of its place.
const STRIPES: usize = if EXPLORED { 2 } else { 64 };

/// So many bits tell the records of a leaf apart while they are sorted.
const NUMBER_BITS: u32 = 6;

/// A value that is worth fetching before its key was compared, in bytes.
const NEAR: u64 = 192;

/// How large a pool may get, and in which steps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PoolOptions {
    /// The most bytes.
    pub(crate) len_max: u64,
    /// It grows by so many bytes.
    pub(crate) grow_by: u64,
    /// Slots of a leaf that are used, 4..=48.
    pub(crate) slots: usize,
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions { len_max: 4 << 30, grow_by: 4 << 20, slots: SLOTS }
    }
}

/// What those at work beside each other rely on. A test leaves one of them out, and sees that it is missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is said that keys have got another leaf.
    Shape,
    /// The order of a leaf is that of one version.
    Order,
    /// Readers leave what they may be at before it is reused.
    Limbo,
    /// What a point shows is kept.
    Versions,
}

/// What a leaf shares with those of the same stripe.
#[repr(align(64))]
pub(crate) struct Stripe {
    lock: Mutex<()>,
    /// Raised before any slot or fingerprint is written over: what was read with the same number before and after, and
    /// by the same commit word, is one state.
    changes: AtomicU64,
    /// Its share of the records that came and went, with the lock held; modulo 2^64.
    records: AtomicU64,
}

/// How far leaves were made denser.
#[derive(Default)]
pub(crate) struct Packing {
    /// A key of the leaf to go on with; none for the first leaf.
    pub(crate) next: Option<Vec<u8>>,
    /// Leaves that were looked at since one was freed; when these are all, nothing is tried before something changes.
    pub(crate) barren: u64,
    /// The number of records and of leaves when they were looked at, and whether there was a leaf to shift records to.
    pub(crate) state: (u64, u64, bool),
}

/// A B+ tree on a medium. Readers never wait; writers wait for those of the same leaf.
pub(crate) struct Tree<M> {
    pub(crate) medium: M,
    pub(crate) file_id: [u8; 16],
    pub(crate) seal: Seal,
    hash_seed: u64,
    pub(crate) order: KeyOrder,
    bytes_are_keys: bool,
    pub(crate) slots: usize,
    /// What is in it are words of [`Spot`]s.
    pub(crate) inner: Inner,
    pub(crate) orders: Orders,
    /// Held by who changes `inner`, and who locks two leaves.
    pub(crate) structure: Mutex<()>,
    /// The log is being replayed: there are no readers.
    pub(crate) replaying: AtomicBool,
    /// Set under `structure`: nothing is changed any more, and no read of the pool begins.
    closed: AtomicBool,
    /// Raised when keys have got another leaf, before they are gone from the one where they were.
    pub(crate) shape: AtomicU64,
    stripes: Box<[Stripe]>,
    pub(crate) space: Mutex<Space>,
    pub(crate) shelves: Shelves,
    pub(crate) versions: Versions,
    /// Records that it was opened with.
    pub(crate) len: AtomicU64,
    pub(crate) leaves: AtomicU64,
    /// Promises of leaves that have ended, and that `space` was not told of yet.
    pub(crate) ended: AtomicUsize,
    pub(crate) splits: Splits,
    pub(crate) packing: Mutex<Packing>,
    /// Shifts of records from one leaf to the one before it, by packing.
    #[cfg(test)]
    pub(crate) shifts: AtomicU64,
    #[cfg(test)]
    without: std::sync::OnceLock<Step>,
}

/// A record in a leaf, and its slot there.
pub(crate) struct Place {
    pub(crate) n: usize,
    pub(crate) record: Record,
}

#[cold]
fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

/// The seed of a pool's checks.
pub(crate) fn seal_of(file_id: &[u8; 16]) -> Seal {
    Seal(place_seed(file_id, 8))
}

impl<M: Medium> Tree<M> {
    /// What a pool is opened to: the way to its leaves, and what is free.
    pub(crate) fn assemble(
        medium: M,
        file_id: [u8; 16],
        order: KeyOrder,
        options: &PoolOptions,
        found: (Inner, Space, u64, u64),
        points: Arc<ReadPoints>,
    ) -> Tree<M> {
        let (inner, space, len, leaves) = found;
        let stripe = || Stripe { lock: Mutex::new(()), changes: AtomicU64::new(0), records: AtomicU64::new(0) };
        Tree {
            seal: seal_of(&file_id),
            hash_seed: place_seed(&file_id, 16),
            file_id,
            bytes_are_keys: order.bytes_identify_keys(),
            slots: options.slots.clamp(4, SLOTS),
            versions: Versions::new(order.clone(), points, options.len_max),
            order,
            inner,
            orders: Orders::new(options.len_max.max(medium.region().len())),
            structure: Mutex::new(()),
            replaying: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            shape: AtomicU64::new(0),
            stripes: (0..STRIPES).map(|_| stripe()).collect(),
            space: Mutex::new(space),
            shelves: Shelves::default(),
            len: AtomicU64::new(len),
            leaves: AtomicU64::new(leaves),
            ended: AtomicUsize::new(0),
            splits: Splits::default(),
            packing: Mutex::default(),
            #[cfg(test)]
            shifts: AtomicU64::new(0),
            #[cfg(test)]
            without: std::sync::OnceLock::new(),
            medium,
        }
    }

    #[inline]
    pub(crate) fn region(&self) -> &Region {
        self.medium.region()
    }

    #[inline]
    pub(crate) fn leaf(&self, spot: Spot) -> Leaf<'_> {
        Leaf::at(self.region(), spot)
    }

    #[inline]
    fn stripe_no(leaf: u64) -> usize {
        (leaf / LEAF_LEN) as usize % STRIPES
    }

    #[inline]
    pub(crate) fn changes(&self, leaf: u64) -> &AtomicU64 {
        &self.stripes[Self::stripe_no(leaf)].changes
    }

    /// Says that slots of `leaf`, whose lock is held, are about to be written over.
    pub(crate) fn open(&self, leaf: Leaf<'_>) {
        let changes = self.changes(leaf.at);
        changes.store(changes.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if self.does(Step::Order) {
            self.orders.raise(leaf.order);
        }
        fence(Ordering::Release);
    }

    /// Counts a record that came to `leaf`, whose lock is held, or went.
    pub(crate) fn count(&self, leaf: u64, came: bool) {
        let records = &self.stripes[Self::stripe_no(leaf)].records;
        let by = if came { 1 } else { u64::MAX };
        records.store(records.load(Ordering::Relaxed).wrapping_add(by), Ordering::Release);
    }

    /// Says that keys have got another leaf, which the way to it leads to already.
    pub(crate) fn reshaped(&self) {
        if self.does(Step::Shape) {
            self.shape.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether a step is taken, which only a test may deny.
    #[cfg(not(test))]
    #[inline]
    pub(crate) fn does(&self, _step: Step) -> bool {
        true
    }

    #[cfg(test)]
    pub(crate) fn does(&self, step: Step) -> bool {
        self.without.get() != Some(&step)
    }

    /// Leaves a step out from now on.
    #[cfg(test)]
    pub(crate) fn leave_out(&self, step: Option<Step>) {
        step.into_iter().for_each(|step| self.without.set(step).expect("one fault at a time"));
    }

    /// Locks a leaf against other writers.
    pub(crate) fn lock(&self, leaf: u64) -> Result<MutexGuard<'_, ()>> {
        self.stripes[Self::stripe_no(leaf)].lock.lock().map_err(poisoned)
    }

    /// Locks two leaves. Only for the holder of `structure`: who holds one lock waits for no other.
    pub(crate) fn lock_both(&self, a: u64, b: u64) -> Result<(MutexGuard<'_, ()>, Option<MutexGuard<'_, ()>>)> {
        let second = if Self::stripe_no(a) == Self::stripe_no(b) { None } else { Some(self.lock(b)?) };
        Ok((self.lock(a)?, second))
    }

    /// The lock of the structure, for who splits a leaf.
    ///
    /// # Errors
    /// `Closed` if nothing may be changed any more.
    pub(crate) fn lock_structure(&self) -> Result<MutexGuard<'_, ()>> {
        let structure = self.structure.lock().map_err(poisoned)?;
        self.check_open().map(|()| structure)
    }

    #[inline]
    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            false => Ok(()),
            true => Err(closed_error()),
        }
    }

    /// Pins the thread, so that what it finds in the pool is not reused. Every read of leaves and records is made under
    /// such a pin: the database waits for those that began before [`end_changes`](Tree::end_changes), and gives the
    /// file to other processes then.
    ///
    /// # Errors
    /// `Closed` after `end_changes`: the file may hold what another process has written.
    #[inline(always)]
    pub(crate) fn pin(&self) -> Result<Pin> {
        let pin = Pin::new();
        // The pin, `closed` and the epoch are accessed with SeqCst: either this load sees that `closed` was set, or the
        // thread that set it sees this pin.
        self.check_open().map(|()| pin)
    }

    /// Runs `work` while no leaf is split: that happens for changes that have no number yet, so that who lets nobody
    /// have one has not stopped it.
    pub(crate) fn while_still<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        let _structure = self.structure.lock().map_err(poisoned)?;
        work()
    }

    /// Nothing is changed any more when this returns, by those neither who are about to split a leaf or to grow the
    /// pool for a change that will not come: all that happens before a change has a number. Nobody has one any more.
    pub(crate) fn end_changes(&self) {
        // What a panic has left behind is left as it is.
        let structure = self.structure.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::SeqCst);
        drop(structure);
        self.space.lock().unwrap_or_else(PoisonError::into_inner).end();
    }

    /// The log is replayed until [`end_replay`](Tree::end_replay), before the first reader comes: what it replaces is
    /// kept for no reader, and the limit of the pool does not hold.
    pub(crate) fn begin_replay(&self) {
        self.replaying.store(true, Ordering::Release);
        self.space.lock().unwrap_or_else(PoisonError::into_inner).begin_replay();
    }

    pub(crate) fn end_replay(&self) -> Result<()> {
        self.space()?.end_replay();
        self.replaying.store(false, Ordering::Release);
        Ok(())
    }

    pub(crate) fn space(&self) -> Result<MutexGuard<'_, Space>> {
        self.space.lock().map_err(poisoned)
    }

    /// The fingerprint of a key.
    #[inline]
    pub(crate) fn print(&self, key: &[u8]) -> u8 {
        if self.bytes_are_keys {
            return key_hash(self.hash_seed, key) as u8;
        }
        self.order.hashable(key, &mut Vec::new()).map_or(0, |bytes| key_hash(self.hash_seed, bytes) as u8)
    }

    #[inline]
    fn is_key(&self, record: &Record, key: &[u8]) -> bool {
        if self.bytes_are_keys {
            return record.key_len == key.len() && self.region().holds(record.key_at, key);
        }
        let mut stored = Vec::new();
        record.key(self.region(), &mut stored);
        self.order.cmp(&stored, key).is_eq()
    }

    /// The record of `key` in a leaf, by the slots that `commit` says are valid.
    #[inline]
    pub(crate) fn look(&self, leaf: Leaf<'_>, commit: Commit, key: &[u8], print: u8) -> Result<Option<Place>> {
        for n in bits(leaf.alike(commit, print)) {
            let slot = leaf.slot(n);
            self.region().prefetch(slot.at(), slot.len().unwrap_or(NEAR).min(NEAR));
            let record = Record::read(self.region(), slot)?;
            if self.is_key(&record, key) {
                return Ok(Some(Place { n, record }));
            }
        }
        Ok(None)
    }

    /// The record of `key` that is in the tree now. What is found was there at some moment of the call, and stays
    /// readable while `pin` lives.
    #[inline]
    pub(crate) fn newest(&self, key: &[u8], pin: &Pin) -> Result<Option<Record>> {
        let print = self.print(key);
        loop {
            let shape = self.shape.load(Ordering::Acquire);
            let leaf = self.leaf(Spot(self.inner.leaf(Goal::At(key), pin)));
            self.region().prefetch(leaf.at, LEAF_LEN);
            let changes = self.changes(leaf.at).load(Ordering::Acquire);
            if let Some(place) = self.look(leaf, leaf.commit(), key, print)? {
                return Ok(Some(place.record));
            }
            if self.unchanged(leaf.at, changes, shape) {
                return Ok(None);
            }
        }
    }

    /// Whether what was read of a leaf is one state of it, and it was the leaf to read.
    #[inline]
    pub(crate) fn unchanged(&self, leaf: u64, changes: u64, shape: u64) -> bool {
        fence(Ordering::Acquire);
        self.changes(leaf).load(Ordering::Relaxed) == changes && self.shape.load(Ordering::Relaxed) == shape
    }

    /// The value of `key` as of the newest commit that is visible.
    ///
    /// # Errors
    /// `Corruption` if the pool is not what was written.
    #[inline]
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Slice>> {
        self.get_with(key, |region, record| region.slice(record.value_at(), record.value_len))
    }

    /// The length of the value of `key`, as [`Tree::get`].
    pub(crate) fn size_of(&self, key: &[u8]) -> Result<Option<u32>> {
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        self.get_with(key, |_, record| record.value_len as u32)
    }

    fn get_with<T>(&self, key: &[u8], read: impl Fn(&Region, &Record) -> T) -> Result<Option<T>> {
        let pin = self.pin()?;
        loop {
            let at = self.versions.points().visible();
            let newest = self.newest(key, &pin)?;
            if let Some(record) = newest.filter(|record| record.seqno <= at) {
                return Ok(Some(read(self.region(), &record)));
            }
            if let Some((kind, slot)) = self.versions.find(key, at) {
                return self.of_version(kind, slot, &read);
            }
            // What was visible at that moment may have been replaced, and that made visible, and it be forgotten: then
            // a later moment answers.
            if self.versions.has_all_since(at) {
                return Ok(None);
            }
        }
    }

    /// The value of `key` as of `at`, the point of a reader that is registered.
    pub(crate) fn get_at(&self, key: &[u8], at: SeqNo) -> Result<Option<Slice>> {
        self.get_at_with(key, at, |region, record| region.slice(record.value_at(), record.value_len))
    }

    /// The length of the value of `key`, as [`Tree::get_at`].
    pub(crate) fn size_of_at(&self, key: &[u8], at: SeqNo) -> Result<Option<u32>> {
        self.get_at_with(key, at, |_, record| record.value_len as u32)
    }

    fn get_at_with<T>(&self, key: &[u8], at: SeqNo, read: impl Fn(&Region, &Record) -> T) -> Result<Option<T>> {
        let pin = self.pin()?;
        if let Some(record) = self.newest(key, &pin)?.filter(|record| record.seqno <= at) {
            return Ok(Some(read(self.region(), &record)));
        }
        match self.versions.find(key, at) {
            Some((kind, slot)) => self.of_version(kind, slot, &read),
            None => Ok(None),
        }
    }

    fn of_version<T>(&self, kind: RecordKind, slot: Slot, read: &impl Fn(&Region, &Record) -> T) -> Result<Option<T>> {
        if kind.is_tombstone() {
            return Ok(None);
        }
        let record = Record::read(self.region(), slot)?;
        Ok(Some(read(self.region(), &record)))
    }

    /// Records in the tree.
    pub(crate) fn len(&self) -> u64 {
        let shares = self.stripes.iter().map(|stripe| stripe.records.load(Ordering::Acquire));
        // One that came to another leaf meanwhile than it went from may be missing.
        shares.fold(self.len.load(Ordering::Acquire), u64::wrapping_add).cast_signed().max(0).cast_unsigned()
    }

    pub(crate) fn level(&self) -> PersistenceLevel {
        self.medium.level()
    }

    /// The space of the pool, and leaves in use.
    pub(crate) fn usage(&self) -> Result<(Usage, u64)> {
        let usage = self.space()?.usage();
        let free = usage.free + self.shelves.bytes();
        Ok((Usage { free, ..usage }, self.leaves.load(Ordering::Acquire)))
    }

    /// Compares the keys of two records.
    pub(crate) fn cmp_keys(&self, a: &Record, b: &Record) -> std::cmp::Ordering {
        if self.order.is_bytewise() {
            return self.region().cmp_within((a.key_at, a.key_len), (b.key_at, b.key_len));
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        a.key(self.region(), &mut left);
        b.key(self.region(), &mut right);
        self.order.cmp(&left, &right)
    }

    /// Compares the key of a record with `key`.
    pub(crate) fn cmp_key(&self, record: &Record, key: &[u8]) -> std::cmp::Ordering {
        if self.order.is_bytewise() {
            return self.region().cmp(record.key_at, record.key_len, key);
        }
        let mut stored = Vec::with_capacity(record.key_len.min(KEY_LEN_MAX));
        record.key(self.region(), &mut stored);
        self.order.cmp(&stored, key)
    }

    /// The numbers of `records` in the order of their keys, and of one key from the newest to the oldest. Heads are
    /// taken behind the first `common` bytes, which all keys must begin with.
    pub(crate) fn sorted(&self, records: &[Record], common: usize, out: &mut Vec<(u64, u32)>) {
        out.clear();
        let head = |record: &Record| {
            let rest = record.key_len.saturating_sub(common);
            self.region().head(record.key_at + (record.key_len - rest) as u64, rest)
        };
        let by_key = |a: &(u64, u32), b: &(u64, u32)| {
            let (a, b) = (&records[a.1 as usize], &records[b.1 as usize]);
            self.cmp_keys(a, b).then(b.seqno.cmp(&a.seqno))
        };
        if !self.order.is_bytewise() || records.len() > 1 << NUMBER_BITS {
            out.extend(records.iter().zip(0..).map(|(record, n)| (head(record), n)));
            return out.sort_unstable_by(by_key);
        }
        // Plain numbers are sorted fastest: the upper bits of the heads, and in the lower ones which record it is.
        let mut packed = [0; 1 << NUMBER_BITS];
        let packed = &mut packed[..records.len()];
        for ((n, record), word) in records.iter().enumerate().zip(packed.iter_mut()) {
            *word = head(record) >> NUMBER_BITS << NUMBER_BITS | n as u64;
        }
        packed.sort_unstable();
        let number = (1 << NUMBER_BITS) - 1;
        out.extend(packed.iter().map(|word| (word >> NUMBER_BITS, (word & number) as u32)));
        let mut rest = out.as_mut_slice();
        while let Some((first, _)) = rest.first() {
            let alike = rest.iter().take_while(|(head, _)| head == first).count();
            let (same, behind) = std::mem::take(&mut rest).split_at_mut(alike);
            if alike > 1 {
                same.sort_unstable_by(by_key);
            }
            rest = behind;
        }
    }
}
