//! A tree, and the model (a map) of its expected content.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::key_range::KeyRange;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::LastVisibleSeqno;
use crate::engine::SnapshotList;
use crate::iter::InternalIter;
use crate::mem::epoch::Pin;
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::LeafAddr;
use crate::pmem::leaf::{LEAF_LEN, set_bits};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::pool::pool_recovery::{PoolCheckLevel, PoolRecoveryReport, create, open_with};
use crate::pmem::pool_header::has_clean_shutdown_mark;
use crate::pmem::record::PoolRecord;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolOptions, PoolTree};

pub(crate) const FILE_ID: [u8; 16] = [0x5A; 16];
/// The partition of the tree.
pub(crate) const POOL: PartitionId = PartitionId(1);

pub(crate) type PoolTreeModel = BTreeMap<Vec<u8>, Vec<u8>>;

/// One change.
#[derive(Clone, Debug)]
pub(crate) enum PoolOp {
    Put(Vec<u8>, Vec<u8>),
    Remove(Vec<u8>),
    /// Removes the keys from the first one up to the second one.
    RemoveRange(Vec<u8>, Vec<u8>),
}

/// Encodes the range of keys from `low` up to `high`: key and value of the record.
pub(crate) fn range_record(low: &[u8], high: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let range = KeyRange::between(Bound::Included(low), Bound::Excluded(high));
    let mut value = Vec::new();
    range.encode_value(&mut value);
    (range.encoded_key().to_vec(), value)
}

impl PoolOp {
    pub(crate) fn apply_to(&self, model: &mut PoolTreeModel) {
        match self {
            PoolOp::Put(key, value) => drop(model.insert(key.clone(), value.clone())),
            PoolOp::Remove(key) => drop(model.remove(key)),
            PoolOp::RemoveRange(low, high) => model.retain(|key, _| key < low || key >= high),
        }
    }
}

pub(crate) struct PoolFixture<M: PersistenceBackend> {
    pub(crate) tree: Arc<PoolTree<M>>,
    pub(crate) visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) seqno: u64,
}

fn new_snapshots(seqno: u64) -> (LastVisibleSeqno, Arc<SnapshotList>) {
    let visible = LastVisibleSeqno::default();
    visible.publish(SeqNo(seqno));
    let snapshots = SnapshotList::new(visible.clone());
    (visible, snapshots)
}

impl<M: PersistenceBackend> PoolFixture<M> {
    pub(crate) fn create(backend: M, options: &PoolOptions) -> PoolFixture<M> {
        PoolFixture::create_with_order(backend, options, KeyOrder::bytewise())
    }

    pub(crate) fn create_with_order(backend: M, options: &PoolOptions, order: KeyOrder) -> PoolFixture<M> {
        let (visible, snapshots) = new_snapshots(0);
        let tree = create(backend, FILE_ID, order, options, snapshots.readers_of(POOL)).unwrap();
        PoolFixture { tree: Arc::new(tree), visible, snapshots, seqno: 0 }
    }

    pub(crate) fn open(backend: M, options: &PoolOptions) -> Result<(PoolFixture<M>, PoolRecoveryReport)> {
        PoolFixture::open_with_order(backend, options, KeyOrder::bytewise())
    }

    pub(crate) fn open_with_order(
        backend: M,
        options: &PoolOptions,
        order: KeyOrder,
    ) -> Result<(PoolFixture<M>, PoolRecoveryReport)> {
        let (visible, snapshots) = new_snapshots(0);
        let check_level = if has_clean_shutdown_mark(backend.region(), &FILE_ID) {
            PoolCheckLevel::StructureOnly
        } else {
            PoolCheckLevel::Full
        };
        let (tree, report) = open_with(backend, order, options, snapshots.readers_of(POOL), check_level, None)?;
        tree.clear_clean_shutdown_mark();
        visible.publish(report.max_seqno);
        Ok((PoolFixture { tree: Arc::new(tree), visible, snapshots, seqno: report.max_seqno.0 }, report))
    }

    /// Applies a change under the next sequence number, and makes it visible.
    pub(crate) fn apply(&mut self, op: &PoolOp) -> Result<()> {
        let seqno = self.publish(op)?;
        self.tree.remove_covered(seqno)
    }

    /// As [`apply`](PoolFixture::apply), but a range delete remains pending. Returns its sequence number.
    pub(crate) fn publish(&mut self, op: &PoolOp) -> Result<SeqNo> {
        self.seqno += 1;
        match op {
            PoolOp::Put(key, value) => self.tree.put(key, SeqNo(self.seqno), value)?,
            PoolOp::Remove(key) => drop(self.tree.remove(key, SeqNo(self.seqno))?),
            PoolOp::RemoveRange(low, high) => {
                let (key, value) = range_record(low, high);
                let (seqno, kind) = (SeqNo(self.seqno), RecordKind::RangeDelete);
                self.tree.add_range_delete(EntryRef { user_key: &key, seqno, kind, value: &value })?;
            }
        }
        self.visible.publish(SeqNo(self.seqno));
        Ok(SeqNo(self.seqno))
    }

    /// All records, read by an iterator in forward direction.
    pub(crate) fn contents(&self) -> PoolTreeModel {
        let pin = self.snapshots.register();
        let mut iter = self.tree.iter(pin.seqno());
        let mut all = PoolTreeModel::new();
        iter.seek_to_first().unwrap();
        while let Some(entry) = iter.current() {
            assert!(all.insert(entry.user_key.to_vec(), entry.value.to_vec()).is_none(), "a key was returned twice");
            iter.next().unwrap();
        }
        all
    }

    /// Checks that every kind of read returns the content of the model. `probes` are keys that may exist or not.
    pub(crate) fn assert_matches(&self, model: &PoolTreeModel, probes: &[Vec<u8>]) {
        for key in model.keys().chain(probes) {
            let expected = model.get(key).map(Vec::as_slice);
            assert_eq!(self.tree.get(key).unwrap().as_deref(), expected, "{key:?}");
            assert_eq!(self.tree.size_of(key).unwrap(), expected.map(|value| value.len() as u32));
        }
        assert_eq!(self.tree.len(), model.len() as u64);
        assert_eq!(self.contents(), *model);
        let pin = self.snapshots.register();
        let mut iter = self.tree.iter(pin.seqno());
        iter.seek_to_last().unwrap();
        for (key, value) in model.iter().rev() {
            let entry = iter.current().expect("an entry is missing in backward order");
            assert_eq!((entry.user_key, entry.value), (key.as_slice(), value.as_slice()));
            iter.prev().unwrap();
        }
        assert!(!iter.valid());
        for key in probes {
            iter.seek(InternalKey::before_versions_of(key)).unwrap();
            let expected = model.range(key.clone()..).next().map(|(key, _)| key.as_slice());
            assert_eq!(iter.current().map(|entry| entry.user_key), expected);
            iter.seek_before(InternalKey::before_versions_of(key)).unwrap();
            let expected = model.range(..key.clone()).next_back().map(|(key, _)| key.as_slice());
            assert_eq!(iter.current().map(|entry| entry.user_key), expected);
        }
    }

    /// Checks the order of the leaves, the inner nodes, and that every byte of the pool is accounted for. Requires
    /// that there are no concurrent writers and no pinned readers.
    pub(crate) fn check_invariants(&self) {
        let tree = &self.tree;
        let (mut at, mut leaves, mut records, mut bytes) = (HEAD_LEAF_OFFSET, 0, 0, 0);
        let mut last: Option<PoolRecord> = None;
        while at != 0 {
            let leaf = tree.leaf(LeafAddr(at));
            let commit = leaf.commit_word();
            assert!(leaf.check_matches(tree.check_seed, commit) && commit.count() < tree.slots_per_leaf);
            let all: Vec<PoolRecord> = set_bits(commit.valid_slots())
                .map(|n| PoolRecord::read(tree.region(), leaf.slot(n)).unwrap())
                .collect();
            let mut sorted = Vec::new();
            tree.sort_records(&all, 0, &mut sorted);
            for (_, n) in sorted {
                let record = all[n as usize];
                assert!(last.is_none_or(|last| tree.cmp_keys(&last, &record).is_lt()), "keys are out of order");
                let mut key = Vec::new();
                record.read_key(tree.region(), &mut key);
                let found = LeafAddr(tree.inner.find_leaf(LeafTarget::Key(&key), &Pin::new())).offset();
                assert_eq!(found, at, "the inner nodes do not lead to the leaf");
                assert!(record.checksum_matches(tree.region(), &FILE_ID));
                bytes += record.buffer_len();
                last = Some(record);
            }
            (leaves, records) = (leaves + 1, records + all.len() as u64);
            at = leaf.next_leaf(tree.check_seed).unwrap();
        }
        for range in tree.versions.drop_stale(|| tree.settled_seqno()).unwrap() {
            tree.lock_allocator().unwrap().retire(range);
        }
        let (usage, in_use) = tree.usage().unwrap();
        assert_eq!((leaves, records), (in_use, tree.len()));
        let leaf_bytes = (leaves + usage.free_leaves as u64) * LEAF_LEN;
        assert_eq!(
            HEAD_LEAF_OFFSET + bytes + leaf_bytes + usage.free_bytes,
            usage.len,
            "bytes are lost or allocated twice"
        );
    }
}
