//! A tree, and a map that says what must be in it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::{KeyOrder, KeyRef, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::ReadPoints;
use crate::engine::Visible;
use crate::mem::epoch::Pin;
use crate::pmem::inner::Goal;
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{LEAF_LEN, bits};
use crate::pmem::medium::Medium;
use crate::pmem::notes::is_closed;
use crate::pmem::record::Record;
use crate::pmem::recover::{Report, Trust, create, open_with};
use crate::pmem::tree::{HEAD, PoolOptions, Tree};

pub(super) const FILE_ID: [u8; 16] = [0x5A; 16];

pub(super) type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// One change.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Put(Vec<u8>, Vec<u8>),
    Remove(Vec<u8>),
}

impl Op {
    pub(super) fn apply_to(&self, model: &mut Model) {
        match self {
            Op::Put(key, value) => drop(model.insert(key.clone(), value.clone())),
            Op::Remove(key) => drop(model.remove(key)),
        }
    }
}

pub(super) struct World<M: Medium> {
    pub(super) tree: Arc<Tree<M>>,
    pub(super) visible: Visible,
    pub(super) points: Arc<ReadPoints>,
    pub(super) seqno: u64,
}

fn points(seqno: u64) -> (Visible, Arc<ReadPoints>) {
    let visible = Visible::default();
    visible.publish(SeqNo(seqno));
    let points = ReadPoints::new(visible.clone());
    (visible, points)
}

impl<M: Medium> World<M> {
    pub(super) fn create(medium: M, options: &PoolOptions) -> World<M> {
        World::create_in(medium, options, KeyOrder::bytewise())
    }

    pub(super) fn create_in(medium: M, options: &PoolOptions, order: KeyOrder) -> World<M> {
        let (visible, points) = points(0);
        let tree = create(medium, FILE_ID, order, options, Arc::clone(&points)).unwrap();
        World { tree: Arc::new(tree), visible, points, seqno: 0 }
    }

    pub(super) fn open(medium: M, options: &PoolOptions) -> Result<(World<M>, Report)> {
        World::open_in(medium, options, KeyOrder::bytewise())
    }

    pub(super) fn open_in(medium: M, options: &PoolOptions, order: KeyOrder) -> Result<(World<M>, Report)> {
        let (visible, points) = points(0);
        let trust = if is_closed(medium.region(), &FILE_ID) { Trust::Bytes } else { Trust::Nothing };
        let (tree, report) = open_with(medium, order, options, Arc::clone(&points), trust, None)?;
        tree.note_open();
        visible.publish(report.highest);
        Ok((World { tree: Arc::new(tree), visible, points, seqno: report.highest.0 }, report))
    }

    /// Applies a change under the next sequence number, and makes it visible.
    pub(super) fn apply(&mut self, op: &Op) -> Result<()> {
        self.seqno += 1;
        match op {
            Op::Put(key, value) => self.tree.put(key, SeqNo(self.seqno), value)?,
            Op::Remove(key) => drop(self.tree.remove(key, SeqNo(self.seqno))?),
        }
        self.visible.publish(SeqNo(self.seqno));
        Ok(())
    }

    /// All there is, as a cursor shows it going forward.
    pub(super) fn contents(&self) -> Model {
        let pin = self.points.register();
        let mut cursor = self.tree.cursor(pin.at());
        let mut all = Model::new();
        cursor.seek_to_first().unwrap();
        while let Some(entry) = cursor.peek() {
            assert!(all.insert(entry.user.to_vec(), entry.value.to_vec()).is_none(), "a key came twice");
            cursor.next().unwrap();
        }
        all
    }

    /// Everything that can be asked gives what the model has; `probes` are keys that may be there or not.
    pub(super) fn agrees(&self, model: &Model, probes: &[Vec<u8>]) {
        for key in model.keys().chain(probes) {
            let expected = model.get(key).map(Vec::as_slice);
            assert_eq!(self.tree.get(key).unwrap().as_deref(), expected, "{key:?}");
            assert_eq!(self.tree.size_of(key).unwrap(), expected.map(|value| value.len() as u32));
        }
        assert_eq!(self.tree.len(), model.len() as u64);
        assert_eq!(self.contents(), *model);
        let pin = self.points.register();
        let mut cursor = self.tree.cursor(pin.at());
        cursor.seek_to_last().unwrap();
        for (key, value) in model.iter().rev() {
            let entry = cursor.peek().expect("going back, one is missing");
            assert_eq!((entry.user, entry.value), (key.as_slice(), value.as_slice()));
            cursor.prev().unwrap();
        }
        assert!(!cursor.valid());
        for key in probes {
            cursor.seek(KeyRef::first_of(key)).unwrap();
            let expected = model.range(key.clone()..).next().map(|(key, _)| key.as_slice());
            assert_eq!(cursor.peek().map(|entry| entry.user), expected);
            cursor.seek_before(KeyRef::first_of(key)).unwrap();
            let expected = model.range(..key.clone()).next_back().map(|(key, _)| key.as_slice());
            assert_eq!(cursor.peek().map(|entry| entry.user), expected);
        }
    }

    /// The order of the leaves, the way to them, and every byte of the pool. While nobody writes or waits to read.
    pub(super) fn is_sound(&self) {
        let tree = &self.tree;
        let (mut at, mut leaves, mut records, mut bytes) = (HEAD, 0, 0, 0);
        let mut last: Option<Record> = None;
        while at != 0 {
            let leaf = tree.leaf(Spot(at));
            let commit = leaf.commit();
            assert!(leaf.verifies(tree.seal, commit) && commit.count() < tree.slots);
            let all: Vec<Record> =
                bits(commit.valid()).map(|n| Record::read(tree.region(), leaf.slot(n)).unwrap()).collect();
            let mut sorted = Vec::new();
            tree.sorted(&all, 0, &mut sorted);
            for (_, n) in sorted {
                let record = all[n as usize];
                assert!(last.is_none_or(|last| tree.cmp_keys(&last, &record).is_lt()), "keys are out of order");
                let mut key = Vec::new();
                record.key(tree.region(), &mut key);
                let found = Spot(tree.inner.leaf(Goal::At(&key), &Pin::new())).leaf();
                assert_eq!(found, at, "the way does not lead to its leaf");
                assert!(record.verifies(tree.region(), &FILE_ID));
                bytes += record.buffer_len();
                last = Some(record);
            }
            (leaves, records) = (leaves + 1, records + all.len() as u64);
            at = leaf.next(tree.seal).unwrap();
        }
        for range in tree.versions.forget_now().unwrap() {
            tree.space().unwrap().retire(range);
        }
        let (usage, in_use) = tree.usage().unwrap();
        assert_eq!((leaves, records), (in_use, tree.len()));
        let leaf_bytes = (leaves + usage.leaves_free as u64) * LEAF_LEN;
        assert_eq!(HEAD + bytes + leaf_bytes + usage.free, usage.len, "bytes were lost or are there twice");
    }
}
