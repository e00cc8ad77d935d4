//! Pools with arbitrary bytes give the right data or an error, and never panic.

use super::fixture::{FILE_ID, POOL, PoolFixture, PoolOp, PoolTreeModel};
use super::model::options;
use crate::base::{Error, ErrorKind, KeyOrder};
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::iter::InternalIter;
use crate::mem::pages::PAGE;
use crate::pmem::leaf::{LeafCommitWord, PoolLeaf};
use crate::pmem::persistence::{PersistGranularity, PersistenceBackend};
use crate::pmem::pool::pool_recovery::{PoolCheckLevel, open_with, verify_records};
use crate::pmem::pool_header::has_clean_shutdown_mark;
use crate::pmem::record::LeafSlot;
use crate::pmem::sim::Sim;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, leaf_check_seed};
use crate::testing::seeded_rng::SeededRng;

const LEN_MAX: u64 = 6 * PAGE;

fn pool() -> (Vec<u8>, PoolTreeModel) {
    let options = options(LEN_MAX, 6);
    let mut fixture = PoolFixture::create(Sim::new(&[], LEN_MAX, PersistGranularity::Line, None), &options);
    let (mut model, mut rng) = (PoolTreeModel::new(), SeededRng::new(2));
    for n in 0..60u8 {
        let op = PoolOp::Put(vec![n.wrapping_mul(37); 1 + rng.below(9)], vec![n; rng.below(100)]);
        fixture.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    for key in model.clone().keys().step_by(4) {
        fixture.apply(&PoolOp::Remove(key.clone())).unwrap();
        model.remove(key);
    }
    (fixture.tree.backend.image(), model)
}

/// Opens an image and returns its records, or `None` if it is refused.
fn open_contents(image: &[u8]) -> Option<PoolTreeModel> {
    let sim = Sim::new(image, LEN_MAX, PersistGranularity::Line, None);
    match PoolFixture::open(sim, &options(LEN_MAX, 6)) {
        Ok((fixture, _)) => Some(fixture.contents()),
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{error}");
            None
        }
    }
}

/// A pool with the mark of a clean shutdown.
fn clean_pool_bytes() -> (Vec<u8>, PoolTreeModel) {
    let (image, model) = pool();
    let (fixture, _) =
        PoolFixture::open(Sim::new(&image, LEN_MAX, PersistGranularity::Line, None), &options(LEN_MAX, 6)).unwrap();
    fixture.tree.set_clean_shutdown_mark();
    let closed = fixture.tree.backend.image();
    assert!(closed != image && has_clean_shutdown_mark(fixture.tree.region(), &FILE_ID));
    (closed, model)
}

/// Result of opening and using a damaged pool whose bytes are trusted.
#[derive(Debug, PartialEq, Eq)]
enum UncheckedOpenOutcome {
    Refused,
    /// All records were right, in both directions.
    Right,
    Wrong,
}

/// Opens an image and runs every kind of operation. The results may be wrong, or errors.
fn open_and_use(image: &[u8], model: &PoolTreeModel) -> UncheckedOpenOutcome {
    let may_fail = |error: Error| {
        let kinds = [ErrorKind::Corruption, ErrorKind::Unsupported, ErrorKind::OutOfSpace];
        assert!(kinds.contains(&error.kind()), "{error}");
    };
    let sim = Sim::new(image, LEN_MAX, PersistGranularity::Line, None);
    let mut fixture = match PoolFixture::open(sim, &options(LEN_MAX, 6)) {
        Ok((fixture, _)) => fixture,
        Err(error) => {
            may_fail(error);
            return UncheckedOpenOutcome::Refused;
        }
    };
    let (mut right, pin) = (true, fixture.snapshots.register());
    for forward in [true, false] {
        let (mut iter, mut found) = (fixture.tree.iter(pin.seqno()), PoolTreeModel::new());
        let mut moved = if forward { iter.seek_to_first() } else { iter.seek_to_last() };
        for _ in 0..200 {
            let Some(entry) = iter.current().filter(|_| moved.is_ok()) else { break };
            found.insert(entry.user_key.to_vec(), entry.value.to_vec());
            moved = if forward { iter.next() } else { iter.prev() };
        }
        right &= moved.map_err(may_fail).is_ok() && found == *model;
    }
    drop(pin);
    for (key, value) in model {
        match fixture.tree.get(key) {
            Ok(found) => right &= found.as_deref() == Some(value.as_slice()),
            Err(error) => {
                may_fail(error);
                right = false;
            }
        }
    }
    for (n, key) in model.keys().enumerate() {
        let op = if n % 3 == 0 {
            PoolOp::Remove(key.clone())
        } else {
            PoolOp::Put([key.as_slice(), b"+"].concat(), vec![1; 9])
        };
        let _ = fixture.apply(&op).map_err(may_fail);
    }
    if right { UncheckedOpenOutcome::Right } else { UncheckedOpenOutcome::Wrong }
}

/// A cleanly closed pool is trusted. Damage is found by `verify`. A read gets wrong bytes or an error, and never
/// panics.
#[test]
fn full_check_finds_all_damage_of_clean_pool() {
    let (image, model) = clean_pool_bytes();
    assert_eq!(open_and_use(&image, &model), UncheckedOpenOutcome::Right);
    let (mut rng, mut wrong, mut refused) = (SeededRng::new(17), 0, 0);
    for at in 0..image.len() {
        let mut damaged = image.clone();
        damaged[at] ^= 1 << rng.below(8);
        let sim = Sim::new(&damaged, LEN_MAX, PersistGranularity::Line, None);
        let found = open_with(
            sim,
            KeyOrder::bytewise(),
            &options(LEN_MAX, 6),
            SnapshotList::new(LastVisibleSeqno::default()).readers_of(POOL),
            PoolCheckLevel::Full,
            None,
        );
        match open_and_use(&damaged, &model) {
            UncheckedOpenOutcome::Right => {}
            UncheckedOpenOutcome::Wrong => {
                assert!(found.is_err(), "byte {at} was accepted, and `verify` does not find the damage");
                wrong += 1;
            }
            UncheckedOpenOutcome::Refused => {
                assert!(found.is_err(), "byte {at} was refused, and `verify` does not find the damage");
                refused += 1;
            }
        }
        let region = Sim::new(&damaged, LEN_MAX, PersistGranularity::Line, None);
        if let (Ok(_), Err(error)) = (found, verify_records(region.region())) {
            panic!("byte {at} was refused, but only without a comparator: {error}");
        }
    }
    assert!(wrong > 500 && refused > 500, "{wrong} {refused}");
}

#[test]
fn damaged_clean_pool_never_panics() {
    let (image, model) = clean_pool_bytes();
    let mut rng = SeededRng::new(19);
    let mut seen = [0; 3];
    for round in 0..4000 {
        let mut damaged = image.clone();
        for _ in 0..1 + rng.below(4) {
            match round % 3 {
                0 => {
                    let (from, to) = (96 + rng.below(image.len() - 96), 96 + rng.below(image.len() - 96));
                    let len = rng.below(600).min(image.len() - from.max(to));
                    damaged.copy_within(from..from + len, to);
                }
                1 => {
                    let at = 96 + rng.below(image.len() - 104) / 8 * 8;
                    damaged[at..at + 8].copy_from_slice(&rng.next_u64().to_le_bytes());
                }
                _ => damaged[96 + rng.below(image.len() - 96)] = rng.next_u64() as u8,
            }
        }
        seen[open_and_use(&damaged, &model) as usize] += 1;
    }
    assert!(seen.iter().all(|count| *count > 200), "{seen:?}");
}

#[test]
fn flipped_byte_is_detected_or_harmless() {
    let (image, model) = pool();
    assert_eq!(open_contents(&image).as_ref(), Some(&model));
    let (mut rng, mut found) = (SeededRng::new(7), 0);
    for at in 0..image.len() {
        let mut damaged = image.clone();
        damaged[at] ^= 1 << rng.below(8);
        match open_contents(&damaged) {
            Some(contents) => assert!(contents == model, "byte {at} is damaged and was accepted"),
            None => found += 1,
        }
    }
    let record_bytes: usize = model.iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(found > record_bytes, "{found} of {} bytes are checked, {record_bytes} are keys and values", image.len());
}

#[test]
fn arbitrary_bytes_are_refused_or_read() {
    let (image, model) = pool();
    let mut rng = SeededRng::new(3);
    let (mut refused, mut unharmed) = (0, 0);
    for round in 0..3000 {
        let mut damaged = image.clone();
        match round % 4 {
            0 => damaged.iter_mut().skip(64).for_each(|byte| *byte = rng.next_u64() as u8),
            1 => damaged.truncate(rng.below(7) * PAGE as usize),
            2 => {
                let (from, to) = (rng.below(image.len()), rng.below(image.len()));
                let len = rng.below(600).min(image.len() - from.max(to));
                damaged.copy_within(from..from + len, to);
            }
            _ => {
                let at = rng.below(image.len() - 8) / 8 * 8;
                damaged[at..at + 8].copy_from_slice(&rng.next_u64().to_le_bytes());
            }
        }
        match open_contents(&damaged) {
            Some(contents) => {
                assert!(contents == model, "damage was accepted in round {round}");
                unharmed += 1;
            }
            None => refused += 1,
        }
    }
    assert!(refused > 1000 && unharmed > 100, "{refused} {unharmed}");
}

/// Valid checks do not make invalid content acceptable: the recovery also checks the targets of links and slots.
#[test]
fn nonsense_with_valid_checks_is_refused() {
    let (image, model) = pool();
    let seal = leaf_check_seed(&FILE_ID);
    let mut rng = SeededRng::new(11);
    let mut refused = 0;
    let closed = clean_pool_bytes().0;
    for round in 0..3000 {
        let sim = Sim::new(&image, LEN_MAX, PersistGranularity::Line, None);
        let mut leaves = vec![HEAD_LEAF_OFFSET];
        while let Some(next) =
            PoolLeaf::new(sim.region(), *leaves.last().unwrap()).next_leaf(seal).filter(|next| *next != 0)
        {
            leaves.push(next);
        }
        let leaf = PoolLeaf::new(sim.region(), leaves[rng.below(leaves.len())]);
        let (commit, n) = (leaf.commit_word(), rng.below(6));
        match round % 3 {
            0 => {
                // The link points to an arbitrary offset.
                let anywhere =
                    [leaves[rng.below(leaves.len())], 0, 64 * rng.below(300) as u64, rng.next_u64() >> 24 << 4];
                let next = anywhere[rng.below(4)] & ((1 << 44) - 1);
                sim.store(leaf.next_offset(), seal.next_word(leaf.offset, next));
            }
            1 => {
                // The slot points to an arbitrary offset: into another record, or to a record of another leaf.
                let other = PoolLeaf::new(sim.region(), leaves[rng.below(leaves.len())]).slot(rng.below(6));
                let word =
                    [rng.next_u64(), other.0, other.0 + rng.below(4) as u64, leaf.slot(n).0 ^ 1 << rng.below(64)];
                let slot = LeafSlot(word[rng.below(4)]);
                let mut new = commit;
                if commit.valid_slots() >> n & 1 == 1 {
                    new = new.flipped(n, seal.slot_check(leaf.offset, n, leaf.fingerprint(n), leaf.slot(n)));
                }
                sim.store(leaf.slot_offset(n), slot.0);
                sim.store(leaf.offset, new.flipped(n, seal.slot_check(leaf.offset, n, leaf.fingerprint(n), slot)).0);
            }
            _ => {
                // An arbitrary set of slots is valid.
                let valid = rng.next_u64() & ((1 << 48) - 1);
                let shares = crate::pmem::leaf::set_bits(valid)
                    .fold(LeafCommitWord::empty(seal, leaf.offset), |commit, n| {
                        commit.flipped(n, seal.slot_check(leaf.offset, n, leaf.fingerprint(n), leaf.slot(n)))
                    });
                sim.store(leaf.offset, shares.0);
            }
        }
        // If the bytes are trusted, the pool is wrong or refused, but nothing panics.
        let mut believed = sim.image();
        believed[64..96].copy_from_slice(&closed[64..96]);
        open_and_use(&believed, &model);
        match open_contents(&sim.image()) {
            None => refused += 1,
            // A chain that ends early, or an old slot whose record still exists, cannot be distinguished from valid
            // data. But keys are in order, and every record existed at some time.
            Some(contents) => {
                let foreign = contents.iter().find(|(key, value)| {
                    model.get(*key) != Some(*value) && !value.iter().all(|byte| Some(byte) == value.first())
                });
                assert_eq!(foreign, None);
            }
        }
    }
    assert!(refused > 2000, "{refused}");
}
