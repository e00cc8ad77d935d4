//! The space that records take in a pool and in memory.

use super::fixture::{PoolFixture, PoolOp};
use super::model::new_fixture;
use crate::mem::atomic::Ordering;
use crate::mem::epoch::wait_for_readers;
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::tree::PoolOptions;
use crate::testing::seeded_rng::SeededRng;

/// Overhead of a record beyond its key and value, in bytes: in the pool, and in memory with inner nodes and orders.
fn overhead<M: PersistenceBackend>(fixture: &PoolFixture<M>, bytes: u64) -> (f64, f64) {
    let (usage, _) = fixture.tree.usage().unwrap();
    let records = fixture.tree.len() as f64;
    let idle = usage.free_leaves as u64 * crate::pmem::leaf::LEAF_LEN;
    let pool = (usage.len - usage.free_bytes - idle) as f64 / records;
    let memory = pool + (fixture.tree.inner.memory_bytes() + fixture.tree.leaf_orders.bytes()) as f64 / records;
    (pool - bytes as f64, memory - bytes as f64)
}

#[test]
fn record_overhead_is_at_most_40_bytes() {
    for (seqno, what) in [(1u64, "young"), (1 << 36, "old")] {
        let options = PoolOptions { len_max: 64 << 20, grow_by: 1 << 20, slots_per_leaf: SLOTS };
        let mut fixture = new_fixture(&options);
        fixture.seqno = seqno;
        let mut rng = SeededRng::new(1);
        for _ in 0..40_000 {
            let key = [rng.next_u64().to_be_bytes(), rng.next_u64().to_be_bytes()].concat();
            fixture.apply(&PoolOp::Put(key, vec![7; 100])).unwrap();
        }
        let (pool, memory) = overhead(&fixture, 116);
        println!("{what}: {pool:.1} bytes in the pool, {memory:.1} in memory");
        assert!(pool <= 40.0 && memory <= 40.0, "{what}: {pool} and {memory}");
        let (usage, _) = fixture.tree.usage().unwrap();
        assert!(usage.free_bytes < 2 << 20, "free bytes at the end of a run or a growth step: {}", usage.free_bytes);
    }
}

/// Regression: a pool retained many versions of other keys. A write that found the pool full did not look for stale
/// versions, because few were added since the last search. With large values, these few filled the pool, and every
/// later write was refused.
#[test]
fn few_large_stale_versions_are_found() {
    let options = PoolOptions { len_max: 64 << 20, grow_by: 1 << 20, slots_per_leaf: SLOTS };
    let mut fixture = new_fixture(&options);
    let put_small = |fixture: &mut PoolFixture<_>, value: u8| {
        for n in 0..5_000u32 {
            fixture.apply(&PoolOp::Put(n.to_be_bytes().to_vec(), vec![value])).unwrap();
        }
    };
    put_small(&mut fixture, 1);
    let snapshot = fixture.snapshots.register();
    put_small(&mut fixture, 2);
    for n in 0..58u8 {
        fixture.apply(&PoolOp::Put(vec![n; 5], vec![n; 1 << 20])).unwrap();
    }
    fixture.tree.forget_versions().unwrap();
    for round in 0..500u32 {
        let put = PoolOp::Put(b"hot".to_vec(), vec![round as u8; 64 << 10]);
        if fixture.apply(&put).is_err() {
            wait_for_readers(); // of other tests, which may have kept the space of dropped versions
            fixture.apply(&put).unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
    assert_eq!(fixture.tree.get_at(&7u32.to_be_bytes(), snapshot.seqno()).unwrap().as_deref(), Some(&[1][..]));
    drop(snapshot);
    fixture.check_invariants();
    assert!(fixture.tree.versions.is_empty());
}

/// Regression: if a reader had begun or ended since the last search for stale versions, the next search checked each
/// entry. In a full pool with an old snapshot and short readers, each write made such a search, while other writers
/// waited.
#[test]
fn ended_readers_cause_few_checks() {
    let options = PoolOptions { len_max: 64 << 20, grow_by: 1 << 20, slots_per_leaf: SLOTS };
    let mut fixture = new_fixture(&options);
    let put = |fixture: &mut PoolFixture<_>, n: u32, value: u8| {
        fixture.apply(&PoolOp::Put(n.to_be_bytes().to_vec(), vec![value])).unwrap();
    };
    (0..20_000).for_each(|n| put(&mut fixture, n, 1));
    let snapshot = fixture.snapshots.register();
    (0..20_000).for_each(|n| put(&mut fixture, n, 2));
    fixture.tree.forget_versions().unwrap();
    let before = fixture.tree.versions.checked_entries.load(Ordering::Relaxed);
    let tables = fixture.tree.versions.tables_searched_at(snapshot.seqno());
    assert!(tables >= 9, "{tables} tables");
    for round in 0..50 {
        let reader = fixture.snapshots.register();
        put(&mut fixture, round, 3);
        fixture.tree.forget_versions().unwrap();
        drop(reader);
        fixture.tree.forget_versions().unwrap();
    }
    let checked = fixture.tree.versions.checked_entries.load(Ordering::Relaxed) - before;
    assert_eq!(fixture.tree.versions.len(), 20_000);
    assert!(checked <= 100 * 2 * 2_048, "{checked} entries were checked");
    drop(snapshot);
    fixture.check_invariants();
    assert!(fixture.tree.versions.is_empty());
}
