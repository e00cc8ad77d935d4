//! Making a pool, and opening one.

use std::sync::Arc;

use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, KeyOrder, Result};
use crate::engine::SnapshotList;
use crate::mem::atomic::Ordering;
use crate::mem::region::PAGE;
use crate::pmem::allocator::Allocator;
use crate::pmem::inner::InnerTree;
use crate::pmem::leaf::{LEAF_LEN, LeafCommitWord, PoolLeaf};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::recover::leaves::{PoolCheckLevel, PoolRecoveryReport};
use crate::pmem::recover::walk::PoolRecovery;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolOptions, PoolTree, leaf_check_seed};
use crate::vfs::Env;

/// Makes an empty pool on `medium`, which holds nothing yet. Durable when it returns; before, there is no pool.
///
/// # Errors
/// `OutOfSpace` if not even that fits.
pub(crate) fn create<M: PersistenceBackend>(
    backend: M,
    file_id: [u8; 16],
    order: KeyOrder,
    options: &PoolOptions,
    snapshots: Arc<SnapshotList>,
) -> Result<PoolTree<M>> {
    let least = 2 * PAGE;
    let len = options.grow_by.max(least).min(options.len_max) / PAGE * PAGE;
    if len < least {
        return Err(Error::invalid(format!("a pool has at least {least} bytes")));
    }
    backend.grow(len)?;
    let seal = leaf_check_seed(&file_id);
    backend.write(0, &[&FileHeader { kind: FileKind::Pool, file_id }.encode()]);
    backend.flush(0, FileHeader::LEN as u64, PersistSite::FormatHeader);
    let leaf = PoolLeaf::new(backend.region(), HEAD_LEAF_OFFSET);
    backend.store(leaf.offset, LeafCommitWord::empty(seal, leaf.offset).0);
    backend.store(leaf.next_offset(), seal.next_word(leaf.offset, 0));
    backend.flush(leaf.offset, 16, PersistSite::FormatLeaf);
    backend.fence(PersistSite::FormatDone);
    let mut space = Allocator::new(len, options.len_max, options.grow_by);
    space.set_addresses(backend.region().reserved());
    space.add_free_at_open((HEAD_LEAF_OFFSET + LEAF_LEN, len - HEAD_LEAF_OFFSET - LEAF_LEN));
    let inner = InnerTree::bulk_load(&[(Vec::new(), HEAD_LEAF_OFFSET)], order.clone());
    let mut tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 1), snapshots);
    tree.inner = InnerTree::bulk_load(
        &[(Vec::new(), tree.leaf_orders.new_leaf_addr(HEAD_LEAF_OFFSET).0)],
        tree.key_order.clone(),
    );
    Ok(tree)
}

/// Opens the pool on `medium`, of which so much is known; a large one with threads of `env`.
///
/// # Errors
/// `Corruption` if it is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open_with<M: PersistenceBackend>(
    backend: M,
    order: KeyOrder,
    options: &PoolOptions,
    snapshots: Arc<SnapshotList>,
    check_level: PoolCheckLevel,
    env: Option<&dyn Env>,
) -> Result<(PoolTree<M>, PoolRecoveryReport)> {
    let region = backend.region();
    if !region.contains(HEAD_LEAF_OFFSET, LEAF_LEN) {
        return Err(Error::corruption("the pool ends before its first leaf"));
    }
    let mut header = [0; FileHeader::LEN];
    region.read(0, &mut header);
    let file_id = FileHeader::decode(FileKind::Pool, &header)?.file_id;
    let len = region.len();
    // A tree without leaves lends its comparisons: nothing of it is used before the walk is over.
    let inner = InnerTree::bulk_load(&[(Vec::new(), HEAD_LEAF_OFFSET)], order.clone());
    let mut space = Allocator::new(len, options.len_max, options.grow_by);
    space.set_addresses(region.reserved());
    let tree = PoolTree::assemble(backend, file_id, order, options, (inner, space, 0, 0), snapshots);
    let (mut tree, used, found) = PoolRecovery::new(tree, check_level).run(env)?;
    for (at, word) in &found.repairs {
        tree.backend.publish(*at, *word);
        tree.backend.flush(*at, 8, PersistSite::RepairCommit);
    }
    if !found.repairs.is_empty() {
        tree.backend.fence(PersistSite::RepairDone);
    }
    let leaves = found.leaves.len() as u64;
    let addr = |(separator, at)| (separator, tree.leaf_orders.new_leaf_addr(at).0);
    let addrs: Vec<_> = found.leaves.into_iter().map(addr).collect();
    tree.inner = InnerTree::bulk_load(&addrs, tree.key_order.clone());
    let mut free = Vec::new();
    used.for_each_free_range(|range| free.push(range));
    {
        let mut space = tree.lock_allocator()?;
        free.into_iter().for_each(|range| space.add_free_at_open(range));
    }
    let report = PoolRecoveryReport { leaves, repairs: found.repairs.len() as u64, ..found.report };
    tree.records_at_open.store(report.records, Ordering::Relaxed);
    tree.leaf_count.store(report.leaves, Ordering::Relaxed);
    Ok((tree, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{ErrorKind, SeqNo};
    use crate::engine::LastVisibleSeqno;
    use crate::memtable::speed::{random_key, time};
    use crate::pmem::leaf::set_bits;
    use crate::pmem::persistence::PoolImage;
    use crate::vfs::env::SystemEnv;

    fn options() -> PoolOptions {
        PoolOptions { len_max: 64 << 20, grow_by: 64 * PAGE, slots_per_leaf: 20 }
    }

    fn new_snapshots() -> Arc<SnapshotList> {
        let visible = LastVisibleSeqno::default();
        visible.publish(SeqNo::MAX);
        SnapshotList::new(visible)
    }

    fn reopen_bytes(bytes: &[u8], env: Option<&dyn Env>) -> Result<(PoolTree<PoolImage>, PoolRecoveryReport)> {
        let image = PoolImage::new(options().len_max).unwrap();
        image.grow(bytes.len() as u64).unwrap();
        image.load_words(0, bytes);
        open_with(image, KeyOrder::bytewise(), &options(), new_snapshots(), PoolCheckLevel::Full, env)
    }

    /// However many read it, the same is found, and the same is refused.
    #[test]
    fn parallel_open_equals_single_threaded() {
        let image = PoolImage::new(options().len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_snapshots()).unwrap();
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
        let (alone, report) = reopen_bytes(&bytes, None).unwrap();
        assert_eq!((report.records, report.repairs), (tree.len(), 0));
        for _ in 0..20 {
            let (together, same) = reopen_bytes(&bytes, Some(&env)).unwrap();
            assert_eq!((same, together.usage().unwrap()), (report, alone.usage().unwrap()));
            for n in (0..10_007).step_by(17) {
                assert_eq!(together.get(&key(n)).unwrap(), tree.get(&key(n)).unwrap());
            }
        }
        let mut refused = 0;
        for at in (4096..bytes.len()).step_by(bytes.len() / 80) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            let (alone, together) = (reopen_bytes(&damaged, None), reopen_bytes(&damaged, Some(&env)));
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

    /// A crash in the middle of a join leaves the same records in two leaves. A left leaf that had no others, because a
    /// removal had emptied it, was kept as an empty leaf with the separator of the right one: the next join removed the
    /// right one from the tree, and lookups went to a leaf that was free.
    #[test]
    fn leaf_goes_when_all_of_it_is_in_the_next() {
        for left in 0..8 {
            let image = PoolImage::new(options().len_max).unwrap();
            let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), new_snapshots()).unwrap();
            let keys: Vec<_> = (0..300u64).map(u64::to_be_bytes).collect();
            for (key, n) in keys.iter().zip(1..) {
                tree.put(key, SeqNo(n), &[7; 30]).unwrap();
            }
            // Sparse, so that leaves are joined.
            keys.iter().step_by(2).for_each(|key| assert!(tree.remove(key, SeqNo(400)).unwrap()));
            let next = |leaf: PoolLeaf<'_>| PoolLeaf::new(tree.region(), leaf.next_leaf(tree.check_seed).unwrap());
            let chain: Vec<_> =
                std::iter::successors(Some(PoolLeaf::new(tree.region(), HEAD_LEAF_OFFSET)), |leaf| Some(next(*leaf)))
                    .take(left + 2)
                    .collect();
            let (left, right) = (chain[left], chain[left + 1]);
            let mut commit = LeafCommitWord::empty(tree.check_seed, left.offset);
            for n in set_bits(right.commit_word().valid_slots()) {
                let (slot, fingerprint) = (right.slot(n), right.fingerprint(n));
                tree.backend.store(left.slot_offset(n), slot.0);
                tree.backend.store(left.fingerprint_offset(n), left.fingerprint_word(n, fingerprint));
                commit = commit.flipped(n, tree.check_seed.slot_check(left.offset, n, fingerprint, slot));
            }
            tree.backend.publish(left.offset, commit.0);
            let mut bytes = vec![0; tree.region().len() as usize];
            tree.region().read(0, &mut bytes);

            let (opened, report) = reopen_bytes(&bytes, None).unwrap();
            let there: Vec<_> = keys.iter().filter(|key| opened.get(&key[..]).unwrap().is_some()).collect();
            assert_eq!(there.len() as u64, report.records);
            while opened.merge_sparse_leaves().unwrap() > 0 {}
            assert!(there.iter().all(|key| opened.get(&key[..]).unwrap().is_some()), "a join lost a leaf");
            assert_eq!(
                report.leaves + u64::from(left.offset != HEAD_LEAF_OFFSET),
                tree.leaf_count.load(Ordering::Relaxed)
            );
        }
    }

    /// Prints what a record takes: `cargo test --release -p azekura --lib recover::tests::speed -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "measures speed; run it alone, in release"]
    fn speed() {
        let (options, count) =
            (PoolOptions { len_max: 1 << 30, grow_by: 16 << 20, ..PoolOptions::default() }, 1_000_000);
        let image = PoolImage::new(options.len_max).unwrap();
        let tree = create(image, [3; 16], KeyOrder::bytewise(), &options, new_snapshots()).unwrap();
        for n in 0..count {
            tree.put(&random_key(n), SeqNo(n + 1), &[7; 100]).unwrap();
        }
        let mut bytes = vec![0; tree.region().len() as usize];
        tree.region().read(0, &mut bytes);
        let env = SystemEnv::new();
        for round in 0..16 {
            let image = PoolImage::new(options.len_max).unwrap();
            image.grow(bytes.len() as u64).unwrap();
            image.load_words(0, &bytes);
            let env: Option<&dyn Env> = if round % 2 == 0 { None } else { Some(&env) };
            let check_level = if round / 2 % 2 == 0 { PoolCheckLevel::Full } else { PoolCheckLevel::StructureOnly };
            let mut tree = None;
            time(
                &format!("open, {check_level:?} trusted, {} threads", if env.is_some() { 4 } else { 1 }),
                count,
                || {
                    tree = open_with(image, KeyOrder::bytewise(), &options, new_snapshots(), check_level, env).ok();
                },
            );
            assert!(tree.is_some());
        }
    }
}
