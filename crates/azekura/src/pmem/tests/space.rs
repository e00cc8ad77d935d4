//! The space that records take in a pool and in memory.

use super::fixture::{PoolFixture, PoolOp};
use super::model::new_fixture;
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
        let mut rng = SeededRng::new(1, 0);
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
