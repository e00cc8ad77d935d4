//! Against a map, one change after the other.

use std::sync::Arc;

use super::world::{Model, Op, World};
use crate::base::comparator::Comparator;
use crate::base::{ErrorKind, KeyOrder, SeqNo};
use crate::mem::epoch::Moment;
use crate::mem::epoch::Pin;
use crate::mem::epoch::tests::eventually;
use crate::mem::region::PAGE;
use crate::pmem::inner::Goal;
use crate::pmem::leaf::SLOTS;
use crate::pmem::leaf::Spot;
use crate::pmem::medium::{Granularity, Image, Medium};
use crate::pmem::sim::Sim;
use crate::pmem::tree::{PoolOptions, Tree};
use crate::vfs::Env;
use crate::vfs::dice::Dice;
use crate::vfs::env::SystemEnv;

pub(super) fn options(len_max: u64, slots: usize) -> PoolOptions {
    PoolOptions { len_max, grow_by: 4 * PAGE, slots }
}

pub(super) fn world(options: &PoolOptions) -> World<Image> {
    World::create(Image::new(options.len_max).unwrap(), options)
}

/// The same pool in a process that starts anew.
pub(super) fn reopened<M: Medium>(tree: &Tree<M>, options: &PoolOptions) -> World<Image> {
    let mut bytes = vec![0; tree.region().len() as usize];
    tree.region().read(0, &mut bytes);
    let image = Image::new(options.len_max).unwrap();
    image.grow(bytes.len() as u64).unwrap();
    image.write(0, &[&bytes]);
    let (world, report) = World::open(image, options).unwrap();
    assert_eq!(report.repairs, 0, "nothing was half done");
    world
}

fn random_key(dice: &mut Dice) -> Vec<u8> {
    match dice.below(3) {
        0 => format!("user:{:04}", dice.below(400)).into_bytes(),
        1 => (0..dice.below(5)).map(|_| [0, 1, 127, 255][dice.below(4)]).collect(),
        _ => (dice.below(500) as u16).to_be_bytes().to_vec(),
    }
}

fn random_value(dice: &mut Dice) -> Vec<u8> {
    let len = if dice.below(50) == 0 { dice.below(9000) } else { dice.below(120) };
    vec![dice.throw() as u8; len]
}

#[test]
fn it_is_a_map() {
    for (seed, slots) in [(1, 4), (2, 7), (3, SLOTS)] {
        let options = options(4 << 20, slots);
        let (mut world, mut model, mut dice) = (world(&options), Model::new(), Dice::new(seed, 0));
        for round in 0..8000 {
            let growing = if round / 1500 % 2 == 0 { 7 } else { 2 };
            let op = if dice.eighths(growing) {
                Op::Put(random_key(&mut dice), random_value(&mut dice))
            } else {
                let some = model.range(random_key(&mut dice)..).next().map(|(key, _)| key.clone());
                Op::Remove(some.unwrap_or_else(|| random_key(&mut dice)))
            };
            world.apply(&op).unwrap();
            op.apply_to(&mut model);
            if round % 50 == 49 {
                world.tree.pack().unwrap();
            }
            if round % 800 == 799 {
                let probes: Vec<_> = (0..100).map(|_| random_key(&mut dice)).collect();
                world.agrees(&model, &probes);
                world.is_sound();
            }
            if round % 2400 == 2399 {
                let seqno = world.seqno;
                world = reopened(&world.tree, &options);
                world.seqno = seqno;
                world.visible.publish(SeqNo(seqno));
                world.agrees(&model, &[]);
                world.is_sound();
            }
        }
    }
}

#[test]
fn ascending_keys_leave_full_leaves_and_emptied_ones_serve_again() {
    let options = options(1 << 20, SLOTS);
    let mut world = world(&options);
    let key = |n: u32| n.to_be_bytes().to_vec();
    for n in 0..2000 {
        world.apply(&Op::Put(key(n), b"value".to_vec())).unwrap();
    }
    let full = 2000u64.div_ceil(SLOTS as u64 - 1);
    let (_, leaves) = world.tree.usage().unwrap();
    assert_eq!(leaves, full, "all but the last are full");
    for round in 0..5 {
        let before = world.tree.usage().unwrap().0;
        for n in 0..2000 {
            world.apply(&Op::Remove(key(n))).unwrap();
        }
        world.is_sound();
        let (usage, leaves) = world.tree.usage().unwrap();
        assert!(world.tree.len() == 0 && leaves == 1, "only the head is left, not {leaves}");
        // Other tests of this process may be reading something.
        eventually(|| world.tree.space().unwrap().settle(true));
        assert_eq!(usage.leaves_free as u64 + 1, before.leaves_free as u64 + full, "the others are free");
        for n in 0..2000 {
            world.apply(&Op::Put(key(n), b"other".to_vec())).unwrap();
        }
        world.is_sound();
        let (usage, leaves) = world.tree.usage().unwrap();
        assert_eq!((leaves, usage.leaves_free), (full, before.leaves_free), "the same leaves, without a new one");
        assert_eq!(usage.len, before.len, "the pool did not grow in round {round}");
        if round == 2 {
            let seqno = world.seqno;
            world = reopened(&world.tree, &options);
            (world.seqno, _) = (seqno, world.visible.publish(SeqNo(seqno)));
            assert_eq!(world.tree.usage().unwrap().1, full);
        }
    }
    // Sparse ones are joined.
    for n in (0..2000).filter(|n| n % 10 != 0) {
        world.apply(&Op::Remove(key(n))).unwrap();
    }
    world.is_sound();
    let (_, leaves) = world.tree.usage().unwrap();
    assert!(leaves <= full / 3, "{leaves} leaves for 200 records");
}

#[test]
fn a_full_pool_is_readable_and_after_removals_writable() {
    for slots in [4, SLOTS] {
        let options = options(32 * PAGE, slots);
        let (mut world, mut model, mut dice) = (world(&options), Model::new(), Dice::new(9, 0));
        for round in 0..6 {
            let mut refused = 0;
            while refused < 20 {
                let len = [5, 100, 700, 3000][dice.below(if round % 2 == 0 { 4 } else { 2 })];
                let op = Op::Put((dice.below(5000) as u32).to_be_bytes().to_vec(), vec![round; len]);
                match world.apply(&op) {
                    Ok(()) => op.apply_to(&mut model),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace);
                        refused += 1;
                    }
                }
            }
            world.agrees(&model, &[]);
            world.is_sound();
            assert_eq!(world.tree.usage().unwrap().0.len, options.len_max);
            let gone: Vec<_> = model.keys().filter(|_| dice.below(4) > 0).cloned().collect();
            for key in gone {
                model.remove(&key);
                world.apply(&Op::Remove(key)).unwrap();
            }
            world.agrees(&model, &[]);
            world.is_sound();
        }
        for key in model.keys() {
            world.apply(&Op::Remove(key.clone())).unwrap();
        }
        // As much as there is in one piece: all but the header, the head and the new record's own.
        let big = Op::Put(b"big".to_vec(), vec![1; (28 * PAGE) as usize]);
        // Other tests of this process may be reading something.
        eventually(|| world.apply(&big).is_ok());
        world.is_sound();
    }
}

/// Every write left an entry behind in the youngest table of versions, which walks and lookups of missing keys then
/// asked, although no reader needed it: a walk over an emptied pool read thousands of removed records.
#[test]
fn an_emptied_pool_asks_no_versions() {
    let mut world = world(&options(4 << 20, SLOTS));
    let key = |n: u32| n.to_be_bytes().to_vec();
    (0..5000).for_each(|n| world.apply(&Op::Put(key(n), vec![1; 20])).unwrap());
    let old = world.points.register();
    (0..5000).for_each(|n| world.apply(&Op::Put(key(n), vec![2; 20])).unwrap());
    let versions = &Arc::clone(&world.tree).versions;
    assert!(versions.asked_at(old.at()) >= 2 && versions.asked_at(world.visible.get()) == 0);
    drop(old);
    let before = versions.memory_bytes();
    // The next change lets go of what the reader needed.
    world.apply(&Op::Put(key(9999), vec![3; 20])).unwrap();
    world.tree.forget_stale().unwrap();
    assert!(versions.memory_bytes() < before / 2 && !versions.has_stale());
    (0..5000).for_each(|n| world.apply(&Op::Remove(key(n))).unwrap());
    assert_eq!(versions.asked_at(world.visible.get()), 0);
    assert_eq!((world.contents().len(), world.tree.usage().unwrap().1), (1, 2), "the head and one leaf are left");
}

/// Half of a full pool's records were removed, each between two that stayed: no leaf could be cut from what they left,
/// and keys behind all others need new leaves.
#[test]
fn sparse_leaves_are_packed_where_space_is_short() {
    let env = SystemEnv::new();
    for (slots, step) in [(SLOTS, 2), (SLOTS, 3), (SLOTS, 5), (7, 2), (7, 3)] {
        let options = options(64 * PAGE, slots);
        let (mut world, mut model) = (world(&options), Model::new());
        let mut next = 0u32..;
        let mut fill = |world: &mut World<Image>, model: &mut Model| {
            let mut count = 0;
            for n in next.by_ref() {
                let op = Op::Put(n.to_be_bytes().to_vec(), vec![n as u8; 60]);
                // Other tests of this process may be reading something.
                let done = (0..100).any(|_| {
                    world.apply(&op).is_ok() || {
                        let moment = Moment::now();
                        while !moment.passed_by_others() {
                            env.sleep(std::time::Duration::from_millis(1));
                        }
                        false
                    }
                });
                if !done {
                    return count;
                }
                op.apply_to(model);
                count += 1;
            }
            count
        };
        let first = fill(&mut world, &mut model);
        for round in 0..3 {
            let gone: Vec<_> = model.keys().step_by(step).cloned().collect();
            for key in &gone {
                model.remove(key);
                world.apply(&Op::Remove(key.clone())).unwrap();
            }
            let more = fill(&mut world, &mut model);
            assert!(
                more * 10 >= gone.len() * 6,
                "{slots} slots, round {round}: {more} of {} fit of {first}",
                gone.len()
            );
            world.agrees(&model, &[]);
            world.is_sound();
        }
        let world = reopened(&world.tree, &options);
        world.agrees(&model, &[]);
    }
}

#[test]
fn limits_are_kept_and_large_values_have_room() {
    let options = options(64 << 20, SLOTS);
    let mut world = world(&options);
    assert_eq!(world.tree.put(&[0; 65_536], SeqNo(1), b"").unwrap_err().kind(), ErrorKind::Invalid);
    let mut model = Model::new();
    for (n, len) in [0, 1, 15, 16, 255, 65_535].into_iter().enumerate() {
        let op = Op::Put(vec![n as u8; len], vec![n as u8; 3 << (3 * n)]);
        world.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    world.apply(&Op::Put(b"large".to_vec(), vec![7; 20 << 20])).unwrap();
    assert_eq!(world.tree.size_of(b"large").unwrap(), Some(20 << 20));
    assert!(world.apply(&Op::Put(b"larger".to_vec(), vec![8; 50 << 20])).is_err());
    world.apply(&Op::Put(b"large".to_vec(), vec![9; 20 << 20])).unwrap();
    world.apply(&Op::Remove(b"large".to_vec())).unwrap();
    world.agrees(&model, &[]);
    world.is_sound();
}

/// The first walk sorts; the next one finds the orders, but for leaves that were changed meanwhile.
#[test]
fn walks_leave_orders_until_slots_are_written_over() {
    let mut world = world(&options(1 << 20, SLOTS));
    let key = |n: u32| n.to_be_bytes().to_vec();
    let mut model = Model::new();
    for n in (0..4000).map(|n| n * 7919 % 4001) {
        let op = Op::Put(key(n), vec![1]);
        world.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    let ordered = |world: &World<Image>, n| {
        let spot = Spot(world.tree.inner.leaf(Goal::At(&key(n)), &Pin::new()));
        world.tree.orders.get(spot.number(), world.tree.orders.version(spot.number())).is_some()
    };
    assert!(!(0..4000).any(|n| ordered(&world, n)));
    assert_eq!(world.contents(), model);
    assert!((0..4000).all(|n| ordered(&world, n)));
    for op in [Op::Remove(key(1000)), Op::Put(key(2000), vec![2]), Op::Put(key(3001), vec![3])] {
        world.apply(&op).unwrap();
        op.apply_to(&mut model);
    }
    assert!(ordered(&world, 1000), "a slot that goes changes no order");
    assert!(!ordered(&world, 2000) && !ordered(&world, 3001));
    assert_eq!(world.contents(), model);
    let image = reopened(&world.tree, &options(1 << 20, SLOTS));
    assert!(!ordered(&image, 1000));
    assert_eq!((image.contents(), ordered(&image, 1000)), (model, true));
}

#[test]
fn what_is_not_newer_is_left_out() {
    let world = world(&options(1 << 20, SLOTS));
    world.tree.put(b"k", SeqNo(5), b"five").unwrap();
    world.tree.put(b"k", SeqNo(5), b"again").unwrap();
    world.tree.put(b"k", SeqNo(3), b"three").unwrap();
    assert!(!world.tree.remove(b"k", SeqNo(4)).unwrap() && !world.tree.remove(b"none", SeqNo(9)).unwrap());
    world.visible.publish(SeqNo(5));
    assert_eq!(world.tree.get(b"k").unwrap().unwrap(), "five");
    world.is_sound();
}

#[test]
fn points_show_what_was_there_and_nothing_that_is_not_published() {
    for slots in [4, SLOTS] {
        let options = options(8 << 20, slots);
        let (mut world, mut model, mut dice) = (world(&options), Model::new(), Dice::new(4, 0));
        let mut held = Vec::new();
        let keys: Vec<Vec<u8>> = (0..300u16).map(|n| n.to_be_bytes().to_vec()).collect();
        for round in 0..6000 {
            let key = keys[dice.below(keys.len())].clone();
            let op = if dice.eighths(if round / 1000 % 2 == 0 { 6 } else { 3 }) {
                Op::Put(key, random_value(&mut dice))
            } else {
                Op::Remove(key)
            };
            // Applied, but not published: nobody sees it.
            let before = model.clone();
            let seqno = SeqNo(world.seqno + 1);
            let (Op::Put(key, _) | Op::Remove(key)) = &op;
            match &op {
                Op::Put(key, value) => world.tree.put(key, seqno, value).unwrap(),
                Op::Remove(key) => drop(world.tree.remove(key, seqno).unwrap()),
            }
            assert_eq!(world.tree.get(key).unwrap().as_deref(), before.get(key).map(Vec::as_slice));
            if round % 500 == 250 {
                assert_eq!(world.contents(), before);
            }
            world.seqno += 1;
            world.visible.publish(seqno);
            op.apply_to(&mut model);
            assert_eq!(world.tree.get(key).unwrap().as_deref(), model.get(key).map(Vec::as_slice));
            if dice.below(200) == 0 {
                held.push((world.points.register(), model.clone()));
            }
            if held.len() > 5 {
                held.swap_remove(dice.below(6));
            }
            if round % 600 == 599 {
                for (held, model) in &held {
                    for key in &keys {
                        let got = world.tree.get_at(key, held.at()).unwrap();
                        assert_eq!(got.as_deref(), model.get(key).map(Vec::as_slice));
                    }
                    use crate::cursor::Cursor;
                    let mut cursor = world.tree.cursor(held.at());
                    cursor.seek_to_last().unwrap();
                    for (key, value) in model.iter().rev() {
                        assert_eq!(cursor.peek().map(|entry| (entry.user, entry.value)), Some((&key[..], &value[..])));
                        cursor.prev().unwrap();
                    }
                    assert!(!cursor.valid());
                }
            }
        }
        held.clear();
        world.agrees(&model, &keys);
        world.is_sound();
    }
}

/// Different bytes may be equal here, and the empty key is not the first.
struct Backwards;

impl Comparator for Backwards {
    fn name(&self) -> &str {
        "backwards, without regard to case"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
        b.to_ascii_lowercase().cmp(&a.to_ascii_lowercase())
    }
}

#[test]
fn any_order_of_keys_will_do() {
    let options = options(4 << 20, 6);
    let order = KeyOrder::custom(Arc::new(Backwards));
    let mut world = World::create_in(Image::new(options.len_max).unwrap(), &options, order.clone());
    let (mut model, mut dice) = (Model::new(), Dice::new(6, 0));
    for _ in 0..3000 {
        let mut key = format!("{:x}", dice.below(1500)).into_bytes();
        let lower = key.clone();
        if dice.below(2) == 0 {
            key.make_ascii_uppercase();
        }
        let op = if dice.eighths(5) { Op::Put(key, lower.clone()) } else { Op::Remove(key) };
        world.apply(&op).unwrap();
        match op {
            Op::Put(..) => drop(model.insert(lower.clone(), lower)),
            Op::Remove(_) => drop(model.remove(&lower)),
        }
    }
    world.is_sound();
    let mut bytes = vec![0; world.tree.region().len() as usize];
    world.tree.region().read(0, &mut bytes);
    let sim = Sim::new(&bytes, options.len_max, Granularity::Line, None);
    let (again, report) = World::open_in(sim, &options, order).unwrap();
    again.is_sound();
    assert_eq!((report.records, report.repairs), (model.len() as u64, 0));
    for (key, value) in &model {
        assert_eq!(again.tree.get(&key.to_ascii_uppercase()).unwrap().unwrap(), *value);
    }
    let values: Vec<_> = again.contents().into_values().collect();
    assert_eq!(values.len(), model.len());
}
