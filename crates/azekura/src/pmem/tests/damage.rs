//! Pools of any bytes: right data or an error, never a panic.

use super::model::options;
use super::world::{FILE_ID, Model, Op, World};
use crate::base::{Error, ErrorKind, KeyOrder};
use crate::cursor::Cursor;
use crate::engine::{ReadPoints, Visible};
use crate::mem::region::PAGE;
use crate::pmem::leaf::{Commit, Leaf};
use crate::pmem::medium::{Granularity, Medium};
use crate::pmem::notes::is_closed;
use crate::pmem::record::Slot;
use crate::pmem::recover::{Trust, check_records, open_with};
use crate::pmem::sim::Sim;
use crate::pmem::tree::{HEAD, seal_of};
use crate::vfs::dice::Dice;

const LEN_MAX: u64 = 6 * PAGE;

fn pool() -> (Vec<u8>, Model) {
    let options = options(LEN_MAX, 6);
    let mut world = World::create(Sim::new(&[], LEN_MAX, Granularity::Line, None), &options);
    let (mut model, mut dice) = (Model::new(), Dice::new(2, 0));
    for n in 0..60u8 {
        let op = Op::Put(vec![n.wrapping_mul(37); 1 + dice.below(9)], vec![n; dice.below(100)]);
        world.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    for key in model.clone().keys().step_by(4) {
        world.apply(&Op::Remove(key.clone())).unwrap();
        model.remove(key);
    }
    (world.tree.medium.image(), model)
}

/// Opens an image: what is in it, if it is not refused.
fn opened(image: &[u8]) -> Option<Model> {
    let sim = Sim::new(image, LEN_MAX, Granularity::Line, None);
    match World::open(sim, &options(LEN_MAX, 6)) {
        Ok((world, _)) => Some(world.contents()),
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{error}");
            None
        }
    }
}

/// The pool, which says that it was closed.
fn closed_pool() -> (Vec<u8>, Model) {
    let (image, model) = pool();
    let (world, _) = World::open(Sim::new(&image, LEN_MAX, Granularity::Line, None), &options(LEN_MAX, 6)).unwrap();
    world.tree.note_closed();
    let closed = world.tree.medium.image();
    assert!(closed != image && is_closed(world.tree.region(), &FILE_ID));
    (closed, model)
}

/// What came of a pool that was believed.
#[derive(Debug, PartialEq, Eq)]
enum Believed {
    Refused,
    /// It is what it was, going forward and back.
    Right,
    Wrong,
}

/// Opens an image, and does with it whatever can be done: the answers may be wrong, or errors.
fn used(image: &[u8], model: &Model) -> Believed {
    let may_fail = |error: Error| {
        let kinds = [ErrorKind::Corruption, ErrorKind::Unsupported, ErrorKind::OutOfSpace];
        assert!(kinds.contains(&error.kind()), "{error}");
    };
    let sim = Sim::new(image, LEN_MAX, Granularity::Line, None);
    let mut world = match World::open(sim, &options(LEN_MAX, 6)) {
        Ok((world, _)) => world,
        Err(error) => {
            may_fail(error);
            return Believed::Refused;
        }
    };
    let (mut right, pin) = (true, world.points.register());
    for forward in [true, false] {
        let (mut cursor, mut found) = (world.tree.cursor(pin.at()), Model::new());
        let mut moved = if forward { cursor.seek_to_first() } else { cursor.seek_to_last() };
        for _ in 0..200 {
            let Some(entry) = cursor.peek().filter(|_| moved.is_ok()) else { break };
            found.insert(entry.user.to_vec(), entry.value.to_vec());
            moved = if forward { cursor.next() } else { cursor.prev() };
        }
        right &= moved.map_err(may_fail).is_ok() && found == *model;
    }
    drop(pin);
    for (key, value) in model {
        match world.tree.get(key) {
            Ok(found) => right &= found.as_deref() == Some(value.as_slice()),
            Err(error) => {
                may_fail(error);
                right = false;
            }
        }
    }
    for (n, key) in model.keys().enumerate() {
        let op =
            if n % 3 == 0 { Op::Remove(key.clone()) } else { Op::Put([key.as_slice(), b"+"].concat(), vec![1; 9]) };
        let _ = world.apply(&op).map_err(may_fail);
    }
    if right { Believed::Right } else { Believed::Wrong }
}

/// A pool that was closed is believed. What is damaged then is found by who verifies it, and whoever uses it gets wrong
/// bytes or an error, and nothing worse.
#[test]
fn what_is_believed_and_damaged_is_found_by_who_doubts() {
    let (image, model) = closed_pool();
    assert_eq!(used(&image, &model), Believed::Right);
    let (mut dice, mut wrong, mut refused) = (Dice::new(17, 0), 0, 0);
    for at in 0..image.len() {
        let mut damaged = image.clone();
        damaged[at] ^= 1 << dice.below(8);
        let sim = Sim::new(&damaged, LEN_MAX, Granularity::Line, None);
        let found = open_with(
            sim,
            KeyOrder::bytewise(),
            &options(LEN_MAX, 6),
            ReadPoints::new(Visible::default()),
            Trust::Nothing,
            None,
        );
        match used(&damaged, &model) {
            Believed::Right => {}
            Believed::Wrong => {
                assert!(found.is_err(), "byte {at} was believed, and who verifies does not find it");
                wrong += 1;
            }
            Believed::Refused => {
                assert!(found.is_err(), "byte {at} was refused, and who verifies does not find it");
                refused += 1;
            }
        }
        let region = Sim::new(&damaged, LEN_MAX, Granularity::Line, None);
        if let (Ok(_), Err(error)) = (found, check_records(region.region())) {
            panic!("byte {at} is refused only where the order is not known: {error}");
        }
    }
    assert!(wrong > 500 && refused > 500, "{wrong} {refused}");
}

#[test]
fn any_bytes_of_a_pool_that_is_believed_do_no_harm() {
    let (image, model) = closed_pool();
    let mut dice = Dice::new(19, 0);
    let mut seen = [0; 3];
    for round in 0..4000 {
        let mut damaged = image.clone();
        for _ in 0..1 + dice.below(4) {
            match round % 3 {
                0 => {
                    let (from, to) = (96 + dice.below(image.len() - 96), 96 + dice.below(image.len() - 96));
                    let len = dice.below(600).min(image.len() - from.max(to));
                    damaged.copy_within(from..from + len, to);
                }
                1 => {
                    let at = 96 + dice.below(image.len() - 104) / 8 * 8;
                    damaged[at..at + 8].copy_from_slice(&dice.throw().to_le_bytes());
                }
                _ => damaged[96 + dice.below(image.len() - 96)] = dice.throw() as u8,
            }
        }
        seen[used(&damaged, &model) as usize] += 1;
    }
    assert!(seen.iter().all(|count| *count > 200), "{seen:?}");
}

#[test]
fn every_flipped_byte_is_found_or_means_nothing() {
    let (image, model) = pool();
    assert_eq!(opened(&image).as_ref(), Some(&model));
    let (mut dice, mut found) = (Dice::new(7, 0), 0);
    for at in 0..image.len() {
        let mut damaged = image.clone();
        damaged[at] ^= 1 << dice.below(8);
        match opened(&damaged) {
            Some(contents) => assert!(contents == model, "byte {at} is wrong and was believed"),
            None => found += 1,
        }
    }
    let kept: usize = model.iter().map(|(key, value)| key.len() + value.len()).sum();
    assert!(found > kept, "{found} of {} bytes count, {kept} are keys and values", image.len());
}

#[test]
fn any_bytes_at_all_are_refused_or_read() {
    let (image, model) = pool();
    let mut dice = Dice::new(3, 0);
    let (mut refused, mut unharmed) = (0, 0);
    for round in 0..3000 {
        let mut damaged = image.clone();
        match round % 4 {
            0 => damaged.iter_mut().skip(64).for_each(|byte| *byte = dice.throw() as u8),
            1 => damaged.truncate(dice.below(7) * PAGE as usize),
            2 => {
                let (from, to) = (dice.below(image.len()), dice.below(image.len()));
                let len = dice.below(600).min(image.len() - from.max(to));
                damaged.copy_within(from..from + len, to);
            }
            _ => {
                let at = dice.below(image.len() - 8) / 8 * 8;
                damaged[at..at + 8].copy_from_slice(&dice.throw().to_le_bytes());
            }
        }
        match opened(&damaged) {
            Some(contents) => {
                assert!(contents == model, "damage was believed in round {round}");
                unharmed += 1;
            }
            None => refused += 1,
        }
    }
    assert!(refused > 1000 && unharmed > 100, "{refused} {unharmed}");
}

/// Checks that match do not make sense of nonsense: what lies behind them is looked at, too.
#[test]
fn well_made_nonsense_is_refused() {
    let (image, model) = pool();
    let seal = seal_of(&FILE_ID);
    let mut dice = Dice::new(11, 0);
    let mut refused = 0;
    let closed = closed_pool().0;
    for round in 0..3000 {
        let sim = Sim::new(&image, LEN_MAX, Granularity::Line, None);
        let mut leaves = vec![HEAD];
        while let Some(next) = Leaf::new(sim.region(), *leaves.last().unwrap()).next(seal).filter(|next| *next != 0) {
            leaves.push(next);
        }
        let leaf = Leaf::new(sim.region(), leaves[dice.below(leaves.len())]);
        let (commit, n) = (leaf.commit(), dice.below(6));
        match round % 3 {
            0 => {
                // The chain goes anywhere.
                let anywhere =
                    [leaves[dice.below(leaves.len())], 0, 64 * dice.below(300) as u64, dice.throw() >> 24 << 4];
                let next = anywhere[dice.below(4)] & ((1 << 44) - 1);
                sim.store(leaf.next_at(), seal.next_word(leaf.at, next));
            }
            1 => {
                // A slot leads anywhere: into another record, to another leaf's.
                let other = Leaf::new(sim.region(), leaves[dice.below(leaves.len())]).slot(dice.below(6));
                let word =
                    [dice.throw(), other.0, other.0 + dice.below(4) as u64, leaf.slot(n).0 ^ 1 << dice.below(64)];
                let slot = Slot(word[dice.below(4)]);
                let mut new = commit;
                if commit.valid() >> n & 1 == 1 {
                    new = new.flipped(n, seal.of_slot(leaf.at, n, leaf.print(n), leaf.slot(n)));
                }
                sim.store(leaf.slot_at(n), slot.0);
                sim.store(leaf.at, new.flipped(n, seal.of_slot(leaf.at, n, leaf.print(n), slot)).0);
            }
            _ => {
                // Any slots are valid.
                let valid = dice.throw() & ((1 << 48) - 1);
                let shares = crate::pmem::leaf::bits(valid).fold(Commit::empty(seal, leaf.at), |commit, n| {
                    commit.flipped(n, seal.of_slot(leaf.at, n, leaf.print(n), leaf.slot(n)))
                });
                sim.store(leaf.at, shares.0);
            }
        }
        // Believed, it is wrong or refused, and does no harm.
        let mut believed = sim.image();
        believed[64..96].copy_from_slice(&closed[64..96]);
        used(&believed, &model);
        match opened(&sim.image()) {
            None => refused += 1,
            // Nobody can tell a chain that was cut at a leaf, or an old slot whose record is there still, from what was
            // written; but keys are in order, and every record is one that was once there.
            Some(contents) => {
                let stranger = contents.iter().find(|(key, value)| {
                    model.get(*key) != Some(*value) && !value.iter().all(|byte| Some(byte) == value.first())
                });
                assert_eq!(stranger, None);
            }
        }
    }
    assert!(refused > 2000, "{refused}");
}
