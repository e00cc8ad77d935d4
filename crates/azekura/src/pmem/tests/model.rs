//! Compares the tree with a map after each change.

use std::sync::Arc;

use super::fixture::{POOL, PoolFixture, PoolOp, PoolTreeModel};
use crate::base::version_edit::PartitionId;
use crate::base::{ErrorKind, KeyOrder, Result, SeqNo};
use crate::engine::SnapshotGuard;
use crate::iter::InternalIter;
use crate::mem::atomic::AtomicBool;
use crate::mem::epoch::Pin;
use crate::mem::epoch::tests::wait_until;
use crate::mem::epoch::wait_for_readers;
use crate::mem::pages::PAGE;
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::LeafAddr;
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::{PersistGranularity, PersistenceBackend, PoolImage};
use crate::pmem::pool_iter::PoolIter;
use crate::pmem::sim::Sim;
use crate::pmem::tree::{PoolOptions, PoolTree, TreeStep};
use crate::testing::{SeededRng, TestOrder, is_in_own_process};

pub(crate) fn options(len_max: u64, slots: usize) -> PoolOptions {
    PoolOptions { len_max, grow_by: 4 * PAGE, slots_per_leaf: slots }
}

pub(crate) fn new_fixture(options: &PoolOptions) -> PoolFixture<PoolImage> {
    PoolFixture::create(PoolImage::new(options.len_max).unwrap(), options)
}

/// Opens a copy of the pool, as a new process does.
pub(crate) fn reopen_fixture<M: PersistenceBackend>(
    tree: &PoolTree<M>,
    options: &PoolOptions,
) -> PoolFixture<PoolImage> {
    let mut bytes = vec![0; tree.region().len() as usize];
    tree.region().read(0, &mut bytes);
    let image = PoolImage::new(options.len_max).unwrap();
    image.grow(bytes.len() as u64).unwrap();
    image.write(0, &[&bytes]);
    let (fixture, report) = PoolFixture::open(image, options).unwrap();
    assert_eq!(report.repairs, 0, "no change was incomplete");
    fixture
}

fn random_key(rng: &mut SeededRng) -> Vec<u8> {
    match rng.below(3) {
        0 => format!("user:{:04}", rng.below(400)).into_bytes(),
        1 => (0..rng.below(5)).map(|_| [0, 1, 127, 255][rng.below(4)]).collect(),
        _ => (rng.below(500) as u16).to_be_bytes().to_vec(),
    }
}

fn random_value(rng: &mut SeededRng) -> Vec<u8> {
    let len = if rng.below(50) == 0 { rng.below(9000) } else { rng.below(120) };
    vec![rng.next_u64() as u8; len]
}

#[test]
fn tree_matches_map_model() {
    for (seed, slots) in [(1, 4), (2, 7), (3, SLOTS)] {
        let options = options(4 << 20, slots);
        let (mut fixture, mut model, mut rng) = (new_fixture(&options), PoolTreeModel::new(), SeededRng::new(seed));
        for round in 0..8000 {
            let growing = if round / 1500 % 2 == 0 { 7 } else { 2 };
            let op = if rng.chance_in_8(growing) {
                PoolOp::Put(random_key(&mut rng), random_value(&mut rng))
            } else if rng.below(40) == 0 {
                let low = random_key(&mut rng);
                let high = match rng.below(4) {
                    0 => random_key(&mut rng),
                    n => model.range(low.clone()..).nth(1 + 15 * n).map_or_else(Vec::new, |(key, _)| key.clone()),
                };
                if low >= high { PoolOp::Remove(low) } else { PoolOp::RemoveRange(low, high) }
            } else {
                let some = model.range(random_key(&mut rng)..).next().map(|(key, _)| key.clone());
                PoolOp::Remove(some.unwrap_or_else(|| random_key(&mut rng)))
            };
            fixture.apply(&op).unwrap();
            op.apply_to(&mut model);
            if round % 50 == 49 {
                fixture.tree.merge_sparse_leaves().unwrap();
            }
            if round % 800 == 799 {
                let probes: Vec<_> = (0..100).map(|_| random_key(&mut rng)).collect();
                fixture.assert_matches(&model, &probes);
                fixture.check_invariants();
            }
            if round % 2400 == 2399 {
                let seqno = fixture.seqno;
                fixture = reopen_fixture(&fixture.tree, &options);
                fixture.seqno = seqno;
                fixture.visible.publish(SeqNo(seqno));
                fixture.assert_matches(&model, &[]);
                fixture.check_invariants();
            }
        }
    }
}

#[test]
fn ascending_inserts_fill_and_reuse_leaves() {
    let options = options(1 << 20, SLOTS);
    let mut fixture = new_fixture(&options);
    let key = |n: u32| n.to_be_bytes().to_vec();
    for n in 0..2000 {
        fixture.apply(&PoolOp::Put(key(n), b"value".to_vec())).unwrap();
    }
    let full = 2000u64.div_ceil(SLOTS as u64 - 1);
    let (_, leaves) = fixture.tree.usage().unwrap();
    assert_eq!(leaves, full, "all but the last are full");
    for round in 0..5 {
        let before = fixture.tree.usage().unwrap().0;
        for n in 0..2000 {
            fixture.apply(&PoolOp::Remove(key(n))).unwrap();
        }
        fixture.check_invariants();
        let (usage, leaves) = fixture.tree.usage().unwrap();
        assert!(fixture.tree.len() == 0 && leaves == 1, "only the head remains, not {leaves}");
        // Other tests of this process may be pinned.
        wait_until(|| fixture.tree.lock_allocator().unwrap().reclaim_retired(true));
        assert_eq!(usage.free_leaves as u64 + 1, before.free_leaves as u64 + full, "the others are free");
        for n in 0..2000 {
            fixture.apply(&PoolOp::Put(key(n), b"other".to_vec())).unwrap();
        }
        fixture.check_invariants();
        let (usage, leaves) = fixture.tree.usage().unwrap();
        assert_eq!((leaves, usage.free_leaves), (full, before.free_leaves), "the same leaves, without a new one");
        assert_eq!(usage.len, before.len, "the pool did not grow in round {round}");
        if round == 2 {
            let seqno = fixture.seqno;
            fixture = reopen_fixture(&fixture.tree, &options);
            (fixture.seqno, _) = (seqno, fixture.visible.publish(SeqNo(seqno)));
            assert_eq!(fixture.tree.usage().unwrap().1, full);
        }
    }
    // Sparse leaves are merged.
    for n in (0..2000).filter(|n| n % 10 != 0) {
        fixture.apply(&PoolOp::Remove(key(n))).unwrap();
    }
    fixture.check_invariants();
    let (_, leaves) = fixture.tree.usage().unwrap();
    assert!(leaves <= full / 3, "{leaves} leaves for 200 records");
}

#[test]
fn full_pool_is_writable_after_removals() {
    for slots in [4, SLOTS] {
        let options = options(32 * PAGE, slots);
        let (mut fixture, mut model, mut rng) = (new_fixture(&options), PoolTreeModel::new(), SeededRng::new(9));
        for round in 0..6 {
            let mut refused = 0;
            while refused < 20 {
                let len = [5, 100, 700, 3000][rng.below(if round % 2 == 0 { 4 } else { 2 })];
                let op = PoolOp::Put((rng.below(5000) as u32).to_be_bytes().to_vec(), vec![round; len]);
                match fixture.apply(&op) {
                    Ok(()) => op.apply_to(&mut model),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        refused += 1;
                    }
                }
            }
            fixture.assert_matches(&model, &[]);
            fixture.check_invariants();
            assert_eq!(fixture.tree.usage().unwrap().0.len, options.len_max);
            let removed: Vec<_> = model.keys().filter(|_| rng.below(4) > 0).cloned().collect();
            for key in removed {
                model.remove(&key);
                fixture.apply(&PoolOp::Remove(key)).unwrap();
            }
            fixture.assert_matches(&model, &[]);
            fixture.check_invariants();
        }
        for key in model.keys() {
            fixture.apply(&PoolOp::Remove(key.clone())).unwrap();
        }
        // The record fills the longest free range: the pool without its header, the head leaf and the overhead of the
        // record.
        let big = PoolOp::Put(b"big".to_vec(), vec![1; (28 * PAGE) as usize]);
        // Other tests of this process may be pinned.
        wait_until(|| fixture.apply(&big).is_ok());
        fixture.check_invariants();
    }
}

/// Regression: every write left an entry in the newest table of versions. Scans and lookups of missing keys searched
/// that table, although no reader needed it: a scan of an emptied pool read thousands of removed records.
#[test]
fn emptied_pool_searches_no_version_tables() {
    let mut fixture = new_fixture(&options(4 << 20, SLOTS));
    let key = |n: u32| n.to_be_bytes().to_vec();
    (0..5000).for_each(|n| fixture.apply(&PoolOp::Put(key(n), vec![1; 20])).unwrap());
    let old = fixture.snapshots.register();
    (0..5000).for_each(|n| fixture.apply(&PoolOp::Put(key(n), vec![2; 20])).unwrap());
    let versions = &Arc::clone(&fixture.tree).versions;
    assert!(versions.tables_searched_at(old.seqno()) >= 2 && versions.tables_searched_at(fixture.visible.get()) == 0);
    drop(old);
    let before = versions.memory_bytes();
    // The next change drops the versions that the reader needed.
    fixture.apply(&PoolOp::Put(key(9999), vec![3; 20])).unwrap();
    fixture.tree.drop_stale_versions().unwrap();
    assert!(versions.memory_bytes() < before / 2 && !versions.has_stale_tables());
    (0..5000).for_each(|n| fixture.apply(&PoolOp::Remove(key(n))).unwrap());
    assert_eq!(versions.tables_searched_at(fixture.visible.get()), 0);
    assert_eq!((fixture.contents().len(), fixture.tree.usage().unwrap().1), (1, 2), "the head and one leaf remain");
}

/// Regression: a pool retained every version since the oldest snapshot or iterator of any partition. Writes of one
/// counter were refused after some thousands, because the entries of its versions used all memory of the limit.
#[test]
fn counter_needs_one_version_per_snapshot() {
    for slots in [4, SLOTS] {
        let mut fixture = new_fixture(&options(4 << 20, slots));
        let versions = &Arc::clone(&fixture.tree).versions;
        let count = |fixture: &mut PoolFixture<_>, to: u64| {
            while fixture.seqno < to {
                let value = (fixture.seqno + 1).to_be_bytes().to_vec();
                fixture.apply(&PoolOp::Put(b"counter".to_vec(), value)).unwrap();
            }
        };
        let seen = |fixture: &PoolFixture<_>, snapshot: &SnapshotGuard| {
            let mut iter = fixture.tree.iter(snapshot.seqno());
            iter.seek_to_first().unwrap();
            let value = iter.current().unwrap().value.to_vec();
            assert_eq!(fixture.tree.get_at(b"counter", snapshot.seqno()).unwrap().as_deref(), Some(value.as_slice()));
            u64::from_be_bytes(value.try_into().unwrap())
        };
        count(&mut fixture, 10);
        let first = fixture.snapshots.register();
        let _other = fixture.snapshots.register_for(PartitionId(2), &AtomicBool::new(false));
        count(&mut fixture, 30_000);
        let second = fixture.snapshots.register_for(POOL, &AtomicBool::new(false));
        count(&mut fixture, 60_000);
        assert_eq!((seen(&fixture, &first), seen(&fixture, &second)), (10, 30_000));
        assert!(fixture.tree.changed_since(b"counter", first.seqno()).unwrap());
        fixture.tree.forget_versions().unwrap();
        assert_eq!(versions.len(), 2, "one for each snapshot");
        fixture.apply(&PoolOp::Remove(b"counter".to_vec())).unwrap();
        fixture.tree.forget_versions().unwrap();
        assert_eq!((versions.len(), seen(&fixture, &first), seen(&fixture, &second)), (2, 10, 30_000));
        drop(first);
        fixture.tree.forget_versions().unwrap();
        assert_eq!((versions.len(), seen(&fixture, &second)), (1, 30_000));
        drop(second);
        fixture.check_invariants();
        assert!(versions.is_empty(), "the reader of another partition needs none");
    }
}

/// Records that are newer than an iterator are retired although it may have their slots, so it must not read them. The
/// counter of retirements is skipped once, to see that this is noticed.
#[test]
fn iterator_reads_no_reused_record() {
    for is_counted in [true, false] {
        let mut fixture = new_fixture(&options(32 * PAGE, SLOTS));
        if !is_counted {
            fixture.tree.skip_step(Some(TreeStep::CountRetirements));
        }
        let key = |n: u8| vec![n];
        let put = |fixture: &mut PoolFixture<_>, n: u8, len: usize| {
            let put = PoolOp::Put(key(n), vec![0xFF; len]);
            // Readers of other tests may keep the space of replaced records.
            let is_put = (0..100).any(|_| fixture.apply(&put).inspect_err(|_| wait_for_readers()).is_ok());
            assert!(is_put);
        };
        (0..20).for_each(|n| put(&mut fixture, 2 * n, 10));
        let snapshot = fixture.snapshots.register();
        (0..20).for_each(|n| put(&mut fixture, 2 * n + 1, 10));
        let scan = |iter: &mut PoolIter<_>, is_up: bool| -> Result<Vec<u8>> {
            let mut keys = Vec::new();
            while let Some(entry) = iter.current() {
                keys.push(entry.user_key[0]);
                if is_up { iter.next()? } else { iter.prev()? }
            }
            Ok(keys)
        };
        let (mut up, mut down) = (fixture.tree.iter(snapshot.seqno()), fixture.tree.iter(snapshot.seqno()));
        up.seek_to_first().unwrap();
        down.seek_to_last().unwrap();
        // The newer records are replaced, and their space gets values that are no records.
        for round in 0..40 {
            (0..20).for_each(|n| put(&mut fixture, 2 * n + 1, 1000 + round));
            fixture.tree.forget_versions().unwrap();
            fixture.tree.lock_allocator().unwrap().seal_retired_batch();
            wait_for_readers(); // so that the space is used again
        }
        let (up, down) = (scan(&mut up, true), scan(&mut down, false));
        let expected: Vec<u8> = (0..20).map(|n| 2 * n).collect();
        let is_right = up.is_ok_and(|keys| keys == expected) && down.is_ok_and(|keys| keys.iter().rev().eq(&expected));
        assert_eq!(is_right, is_counted);
    }
}

/// Regression: half of the records of a full pool were removed, each between two remaining records. No leaf could be
/// allocated from the free ranges, but keys after all others need new leaves.
#[test]
fn sparse_leaves_merge_when_pool_is_full() {
    if !is_in_own_process("pmem::tests::model::sparse_leaves_merge_when_pool_is_full") {
        return;
    }
    for (slots, step) in [(SLOTS, 2), (SLOTS, 3), (SLOTS, 5), (7, 2), (7, 3)] {
        let options = options(64 * PAGE, slots);
        let (mut fixture, mut model) = (new_fixture(&options), PoolTreeModel::new());
        let mut next = 0u32..;
        let mut fill = |fixture: &mut PoolFixture<PoolImage>, model: &mut PoolTreeModel| {
            let mut count = 0;
            for n in next.by_ref() {
                let op = PoolOp::Put(n.to_be_bytes().to_vec(), vec![n as u8; 60]);
                if fixture.apply(&op).is_err() {
                    return count;
                }
                op.apply_to(model);
                count += 1;
            }
            count
        };
        let first = fill(&mut fixture, &mut model);
        for round in 0..3 {
            let removed: Vec<_> = model.keys().step_by(step).cloned().collect();
            for key in &removed {
                model.remove(key);
                fixture.apply(&PoolOp::Remove(key.clone())).unwrap();
            }
            let more = fill(&mut fixture, &mut model);
            assert!(
                more * 10 >= removed.len() * 6,
                "{slots} slots, round {round}: {more} of {} fit of {first}",
                removed.len()
            );
            fixture.assert_matches(&model, &[]);
            fixture.check_invariants();
        }
        let fixture = reopen_fixture(&fixture.tree, &options);
        fixture.assert_matches(&model, &[]);
    }
}

#[test]
fn size_limits_hold_and_large_values_fit() {
    let options = options(64 << 20, SLOTS);
    let mut fixture = new_fixture(&options);
    assert_eq!(fixture.tree.put(&[0; 65_536], SeqNo(1), b"").unwrap_err().kind(), ErrorKind::Invalid);
    let mut model = PoolTreeModel::new();
    for (n, len) in [0, 1, 15, 16, 255, 65_535].into_iter().enumerate() {
        let op = PoolOp::Put(vec![n as u8; len], vec![n as u8; 3 << (3 * n)]);
        fixture.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    fixture.apply(&PoolOp::Put(b"large".to_vec(), vec![7; 20 << 20])).unwrap();
    assert_eq!(fixture.tree.size_of(b"large").unwrap(), Some(20 << 20));
    assert!(fixture.apply(&PoolOp::Put(b"larger".to_vec(), vec![8; 50 << 20])).is_err());
    fixture.apply(&PoolOp::Put(b"large".to_vec(), vec![9; 20 << 20])).unwrap();
    fixture.apply(&PoolOp::Remove(b"large".to_vec())).unwrap();
    fixture.assert_matches(&model, &[]);
    fixture.check_invariants();
}

/// The first scan sorts the leaves. The next one uses the cached orders, except for leaves that were changed
/// meanwhile.
#[test]
fn scan_caches_leaf_orders_until_slot_write() {
    let mut fixture = new_fixture(&options(1 << 20, SLOTS));
    let key = |n: u32| n.to_be_bytes().to_vec();
    let mut model = PoolTreeModel::new();
    for n in (0..4000).map(|n| n * 7919 % 4001) {
        let op = PoolOp::Put(key(n), vec![1]);
        fixture.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    let ordered = |fixture: &PoolFixture<PoolImage>, n| {
        let addr = LeafAddr(fixture.tree.inner.find_leaf(LeafTarget::Key(&key(n)), &Pin::new()));
        fixture.tree.leaf_orders.get(addr.order_id(), fixture.tree.leaf_orders.version(addr.order_id())).is_some()
    };
    assert!(!(0..4000).any(|n| ordered(&fixture, n)));
    assert_eq!(fixture.contents(), model);
    assert!((0..4000).all(|n| ordered(&fixture, n)));
    for op in [PoolOp::Remove(key(1000)), PoolOp::Put(key(2000), vec![2]), PoolOp::Put(key(3001), vec![3])] {
        fixture.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    assert!(ordered(&fixture, 1000), "clearing a slot keeps the cached orders");
    assert!(!ordered(&fixture, 2000) && !ordered(&fixture, 3001));
    assert_eq!(fixture.contents(), model);
    let image = reopen_fixture(&fixture.tree, &options(1 << 20, SLOTS));
    assert!(!ordered(&image, 1000));
    assert_eq!((image.contents(), ordered(&image, 1000)), (model, true));
}

#[test]
fn older_seqno_is_ignored() {
    let fixture = new_fixture(&options(1 << 20, SLOTS));
    fixture.tree.put(b"k", SeqNo(5), b"five").unwrap();
    fixture.tree.put(b"k", SeqNo(5), b"again").unwrap();
    fixture.tree.put(b"k", SeqNo(3), b"three").unwrap();
    assert!(!fixture.tree.remove(b"k", SeqNo(4)).unwrap() && !fixture.tree.remove(b"none", SeqNo(9)).unwrap());
    fixture.visible.publish(SeqNo(5));
    assert_eq!(fixture.tree.get(b"k").unwrap().unwrap(), "five");
    fixture.check_invariants();
}

#[test]
fn snapshot_shows_only_published_changes() {
    for slots in [4, SLOTS] {
        let options = options(8 << 20, slots);
        let (mut fixture, mut model, mut rng) = (new_fixture(&options), PoolTreeModel::new(), SeededRng::new(4));
        let mut snapshots = Vec::new();
        let keys: Vec<Vec<u8>> = (0..300u16).map(|n| n.to_be_bytes().to_vec()).collect();
        for round in 0..6000 {
            let key = keys[rng.below(keys.len())].clone();
            let op = if rng.chance_in_8(if round / 1000 % 2 == 0 { 6 } else { 3 }) {
                PoolOp::Put(key.clone(), random_value(&mut rng))
            } else {
                PoolOp::Remove(key.clone())
            };
            // The change is applied, but not published, so no reader sees it.
            let before = model.clone();
            let seqno = SeqNo(fixture.seqno + 1);
            match &op {
                PoolOp::Put(_, value) => fixture.tree.put(&key, seqno, value).unwrap(),
                _ => drop(fixture.tree.remove(&key, seqno).unwrap()),
            }
            assert_eq!(fixture.tree.get(&key).unwrap().as_deref(), before.get(&key).map(Vec::as_slice));
            if round % 500 == 250 {
                assert_eq!(fixture.contents(), before);
            }
            fixture.seqno += 1;
            fixture.visible.publish(seqno);
            op.apply_to(&mut model);
            assert_eq!(fixture.tree.get(&key).unwrap().as_deref(), model.get(&key).map(Vec::as_slice));
            if rng.below(200) == 0 {
                snapshots.push((fixture.snapshots.register(), model.clone()));
            }
            if snapshots.len() > 5 {
                snapshots.swap_remove(rng.below(6));
            }
            if round % 600 == 599 {
                for (snapshot, model) in &snapshots {
                    for key in &keys {
                        let got = fixture.tree.get_at(key, snapshot.seqno()).unwrap();
                        assert_eq!(got.as_deref(), model.get(key).map(Vec::as_slice));
                    }
                    use crate::iter::InternalIter;
                    let mut iter = fixture.tree.iter(snapshot.seqno());
                    iter.seek_to_last().unwrap();
                    for (key, value) in model.iter().rev() {
                        assert_eq!(
                            iter.current().map(|entry| (entry.user_key, entry.value)),
                            Some((&key[..], &value[..]))
                        );
                        iter.prev().unwrap();
                    }
                    assert!(!iter.valid());
                }
            }
        }
        snapshots.clear();
        fixture.assert_matches(&model, &keys);
        fixture.check_invariants();
    }
}

#[test]
fn tree_works_with_custom_comparator() {
    let options = options(4 << 20, 6);
    let order = KeyOrder::custom(Arc::new(TestOrder::ReversedAnyCase));
    let mut fixture = PoolFixture::create_with_order(PoolImage::new(options.len_max).unwrap(), &options, order.clone());
    let (mut model, mut rng) = (PoolTreeModel::new(), SeededRng::new(6));
    for _ in 0..3000 {
        let mut key = format!("{:x}", rng.below(1500)).into_bytes();
        let lower = key.clone();
        if rng.below(2) == 0 {
            key.make_ascii_uppercase();
        }
        let op = if rng.chance_in_8(5) { PoolOp::Put(key, lower.clone()) } else { PoolOp::Remove(key) };
        fixture.apply(&op).unwrap();
        match op {
            PoolOp::Put(..) => drop(model.insert(lower.clone(), lower)),
            _ => drop(model.remove(&lower)),
        }
    }
    fixture.check_invariants();
    let mut bytes = vec![0; fixture.tree.region().len() as usize];
    fixture.tree.region().read(0, &mut bytes);
    let sim = Sim::new(&bytes, options.len_max, PersistGranularity::Line, None);
    let (again, report) = PoolFixture::open_with_order(sim, &options, order).unwrap();
    again.check_invariants();
    assert_eq!((report.records, report.repairs), (model.len() as u64, 0));
    for (key, value) in &model {
        assert_eq!(again.tree.get(&key.to_ascii_uppercase()).unwrap().unwrap(), *value);
    }
    let values: Vec<_> = again.contents().into_values().collect();
    assert_eq!(values.len(), model.len());
}
