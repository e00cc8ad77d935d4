//! Making a pool, and opening one.

use std::sync::Arc;

use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, KeyOrder, Result};
use crate::engine::ReadPoints;
use crate::mem::atomic::Ordering;
use crate::mem::region::PAGE;
use crate::pmem::inner::Inner;
use crate::pmem::leaf::{Commit, LEAF_LEN, Leaf};
use crate::pmem::medium::{Medium, Site};
use crate::pmem::recover::leaves::{Report, Trust};
use crate::pmem::recover::walk::Walk;
use crate::pmem::space::Space;
use crate::pmem::tree::{HEAD, PoolOptions, Tree, seal_of};
use crate::vfs::Env;

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
    space.set_addresses(medium.region().reserved());
    space.add((HEAD + LEAF_LEN, len - HEAD - LEAF_LEN));
    let inner = Inner::build(&[(Vec::new(), HEAD)], order.clone());
    let mut tree = Tree::assemble(medium, file_id, order, options, (inner, space, 0, 1), points);
    tree.inner = Inner::build(&[(Vec::new(), tree.orders.spot(HEAD).0)], tree.order.clone());
    Ok(tree)
}

/// Opens the pool on `medium`, of which so much is known; a large one with threads of `env`.
///
/// # Errors
/// `Corruption` if it is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no
/// memory. Then nothing was changed.
pub(crate) fn open_with<M: Medium>(
    medium: M,
    order: KeyOrder,
    options: &PoolOptions,
    points: Arc<ReadPoints>,
    trust: Trust,
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
    let mut space = Space::new(len, options.len_max, options.grow_by);
    space.set_addresses(region.reserved());
    let tree = Tree::assemble(medium, file_id, order, options, (inner, space, 0, 0), points);
    let (mut tree, used, found) = Walk::new(tree, trust).run(env)?;
    for (at, word) in &found.repairs {
        tree.medium.publish(*at, *word);
        tree.medium.flush(*at, 8, Site::RepairCommit);
    }
    if !found.repairs.is_empty() {
        tree.medium.fence(Site::RepairDone);
    }
    let leaves = found.kept.len() as u64;
    let spot = |(separator, at)| (separator, tree.orders.spot(at).0);
    let spots: Vec<_> = found.kept.into_iter().map(spot).collect();
    tree.inner = Inner::build(&spots, tree.order.clone());
    let mut free = Vec::new();
    used.free_ranges(|range| free.push(range));
    {
        let mut space = tree.space()?;
        free.into_iter().for_each(|range| space.add(range));
    }
    let report = Report { leaves, repairs: found.repairs.len() as u64, ..found.report };
    tree.len.store(report.records, Ordering::Relaxed);
    tree.leaves.store(report.leaves, Ordering::Relaxed);
    Ok((tree, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{ErrorKind, SeqNo};
    use crate::engine::Visible;
    use crate::memtable::speed::{random_key, time};
    use crate::pmem::leaf::bits;
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
        open_with(image, KeyOrder::bytewise(), &options(), points(), Trust::Nothing, env)
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
        for at in (4096..bytes.len()).step_by(bytes.len() / 80) {
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

    /// A crash in the middle of a join leaves the same records in two leaves. A left leaf that had no others, because a
    /// removal had emptied it, was kept as an empty leaf with the separator of the right one: the next join removed the
    /// right one from the tree, and lookups went to a leaf that was free.
    #[test]
    fn leaf_goes_when_all_of_it_is_in_the_next() {
        for left in 0..8 {
            let image = Image::new(options().len_max).unwrap();
            let tree = create(image, [3; 16], KeyOrder::bytewise(), &options(), points()).unwrap();
            let keys: Vec<_> = (0..300u64).map(u64::to_be_bytes).collect();
            for (key, n) in keys.iter().zip(1..) {
                tree.put(key, SeqNo(n), &[7; 30]).unwrap();
            }
            // Sparse, so that leaves are joined.
            keys.iter().step_by(2).for_each(|key| assert!(tree.remove(key, SeqNo(400)).unwrap()));
            let next = |leaf: Leaf<'_>| Leaf::new(tree.region(), leaf.next(tree.seal).unwrap());
            let chain: Vec<_> = std::iter::successors(Some(Leaf::new(tree.region(), HEAD)), |leaf| Some(next(*leaf)))
                .take(left + 2)
                .collect();
            let (left, right) = (chain[left], chain[left + 1]);
            let mut commit = Commit::empty(tree.seal, left.at);
            for n in bits(right.commit().valid()) {
                let (slot, print) = (right.slot(n), right.print(n));
                tree.medium.store(left.slot_at(n), slot.0);
                tree.medium.store(left.print_at(n), left.print_word(n, print));
                commit = commit.flipped(n, tree.seal.of_slot(left.at, n, print, slot));
            }
            tree.medium.publish(left.at, commit.0);
            let mut bytes = vec![0; tree.region().len() as usize];
            tree.region().read(0, &mut bytes);

            let (opened, report) = reopened(&bytes, None).unwrap();
            let there: Vec<_> = keys.iter().filter(|key| opened.get(&key[..]).unwrap().is_some()).collect();
            assert_eq!(there.len() as u64, report.records);
            while opened.pack().unwrap() > 0 {}
            assert!(there.iter().all(|key| opened.get(&key[..]).unwrap().is_some()), "a join lost a leaf");
            assert_eq!(report.leaves + u64::from(left.at != HEAD), tree.leaves.load(Ordering::Relaxed));
        }
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
        for round in 0..16 {
            let image = Image::new(options.len_max).unwrap();
            image.grow(bytes.len() as u64).unwrap();
            image.load(0, &bytes);
            let env: Option<&dyn Env> = if round % 2 == 0 { None } else { Some(&env) };
            let trust = if round / 2 % 2 == 0 { Trust::Nothing } else { Trust::Bytes };
            let mut tree = None;
            time(&format!("open, {trust:?} trusted, {} threads", if env.is_some() { 4 } else { 1 }), count, || {
                tree = open_with(image, KeyOrder::bytewise(), &options, points(), trust, env).ok();
            });
            assert!(tree.is_some());
        }
    }
}
