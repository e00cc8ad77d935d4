//! Keys, values and pools at the limits of their sizes, against a map, through kills, power loss and reopening.

use azekura::testing::{MemFs, SeededRng, Survival};
use azekura::{Database, EngineType, ErrorKind, Partition, PartitionCreateOptions, PersistMode, PmemOptions};

use super::{config, is_refused};
use crate::testkit::Map;
use crate::testkit::test_dir::crash_or_kill;

/// The smallest `max_size` and `growth_step`, in bytes.
const SMALLEST: (u64, u64) = (64 << 10, 4 << 10);

/// Lengths of keys around the longest inline slice and the longest length that is encoded in one byte, and the longest.
const KEYS: [usize; 11] = [0, 1, 7, 8, 9, 22, 23, 127, 128, 65_534, 65_535];

/// Lengths of values around inline slices, powers of two of buffers, the values that an iterator reads with their keys,
/// the runs that a thread cuts records from, pages, and lengths that are encoded in two bytes.
const VALUES: [usize; 21] = [
    0, 1, 15, 16, 17, 22, 23, 127, 128, 1_023, 1_024, 1_025, 4_095, 4_096, 4_097, 16_383, 16_384, 16_385, 65_535,
    65_536, 65_537,
];

fn open(fs: &MemFs, (max, step): (u64, u64)) -> (Database, Partition) {
    let db = config(fs).wal_segment_size(64 << 10).open().unwrap();
    let sizes = PmemOptions::default().max_size(max).growth_step(step);
    let part = db.open_partition("p", PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))).unwrap();
    (db, part)
}

fn check(part: &Partition, model: &Map, when: &str) {
    let pairs = |iter: &mut dyn Iterator<Item = azekura::Result<(azekura::Slice, azekura::Slice)>>| {
        iter.map(|pair| pair.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect::<Vec<_>>()
    };
    let found = pairs(&mut part.iter());
    assert!(found.iter().map(|(k, v)| (k, v)).eq(model), "{when}: {} of {} records", found.len(), model.len());
    let mut back = pairs(&mut part.iter().rev());
    back.reverse();
    assert!(back == found, "{when}: backward");
    assert!(part.keys().map(|key| key.unwrap().to_vec()).eq(model.keys().cloned()), "{when}: keys");
    for (key, value) in model {
        assert!(part.get(key).unwrap().as_deref() == Some(&value[..]), "{when}: key of {} bytes", key.len());
        assert_eq!(part.size_of(key).unwrap(), Some(value.len() as u32), "{when}");
        let from = part.range(key.clone()..).next().unwrap().unwrap();
        assert!(from.0[..] == key[..] && from.1[..] == value[..], "{when}: range from a key of {} bytes", key.len());
    }
}

/// The files after a kill or a power loss. A read-only open and a read-write open both find `model`.
fn check_after_crash(fs: &MemFs, survival: Survival, sizes: (u64, u64), model: &Map, when: &str) -> MemFs {
    let fs = fs.fork();
    crash_or_kill(&fs, survival, 7);
    let reader = config(&fs).open_read_only().unwrap();
    check(&reader.partition("p").unwrap(), model, when);
    drop(reader);
    check(&open(&fs, sizes).1, model, when);
    fs
}

/// The longest value that a new pool takes under a key of `key_len` bytes; `None` if it does not take the key alone.
fn longest_value(sizes: (u64, u64), key_len: usize) -> Option<usize> {
    let fits = |len: usize| match open(&MemFs::new(), sizes).1.insert(vec![b'k'; key_len], vec![b'v'; len]) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{error}");
            false
        }
    };
    let (mut low, mut high) = (0, sizes.0 as usize);
    if !fits(low) {
        return None;
    }
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

#[test]
fn longest_value_fits_and_one_byte_more_fails() {
    for (sizes, key_len) in [(SMALLEST, 0), (SMALLEST, 1), ((256 << 10, 4 << 10), 65_535), ((256 << 10, 1 << 20), 1)] {
        let when = format!("{sizes:?}, key of {key_len} bytes");
        let len = longest_value(sizes, key_len).unwrap();
        assert!(len + key_len >= sizes.0 as usize / 2, "{when}: no value of more than {len} bytes");
        let (fs, key) = (MemFs::new(), vec![b'k'; key_len]);
        let (db, part) = open(&fs, sizes);
        assert_eq!(part.insert(&key, vec![b'v'; len + 1]).unwrap_err().kind(), ErrorKind::OutOfSpace, "{when}");
        check(&part, &Map::new(), &when);
        let mut model = Map::new();
        for round in 0..6u8 {
            model.insert(key.clone(), vec![round; len]);
            assert!(!is_refused(&part, &key, &model[&key]), "{when}, round {round}");
            check(&part, &model, &when);
            check_after_crash(&fs, Survival::Everything, sizes, &model, &when);
            if round % 2 == 0 {
                part.flush().unwrap();
            } else {
                db.persist(PersistMode::SyncData).unwrap();
            }
            check_after_crash(&fs, Survival::Nothing, sizes, &model, &when);
            part.remove(&key).unwrap();
            model.clear();
            check_after_crash(&fs, Survival::Everything, sizes, &model, &when);
        }
        drop((part, db));
        check(&open(&fs, sizes).1, &model, &when);
    }
}

#[test]
fn keys_too_long_for_smallest_pool_are_refused() {
    assert_eq!(longest_value(SMALLEST, 65_535), None);
}

#[test]
fn sizes_at_all_limits_agree_with_a_map() {
    let mut fulls = [0; 3];
    for (seed, sizes) in [SMALLEST, (1 << 20, 4 << 10), (8 << 20, 1 << 20)].into_iter().enumerate() {
        let mut rng = SeededRng::new(seed as u64);
        let (mut fs, mut model) = (MemFs::new(), Map::new());
        for life in 0..4 {
            let (db, part) = open(&fs, sizes);
            for n in 0..60 {
                let when = format!("{sizes:?}, life {life}, change {n}");
                let (mut batch, mut new) = (db.batch(), model.clone());
                for _ in 0..rng.pick(&[1, 1, 2, 5]) {
                    let key = vec![rng.pick(&[0, b'k', 0xff]); rng.pick(&KEYS)];
                    if rng.chance_one_in(4) {
                        batch.remove(&part, &key);
                        new.remove(&key);
                    } else {
                        let value = vec![n as u8; rng.pick(&VALUES)];
                        batch.insert(&part, &key, &value);
                        new.insert(key, value);
                    }
                }
                match batch.commit() {
                    Ok(()) => model = new,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{when}: {error}");
                        fulls[seed] += 1;
                    }
                }
                if n % 20 == 0 {
                    check(&part, &model, &when);
                }
                if rng.chance_one_in(15) {
                    part.flush().unwrap();
                }
            }
            db.persist(PersistMode::SyncData).unwrap();
            let survival = if life % 2 == 0 { Survival::Everything } else { Survival::Nothing };
            fs = check_after_crash(&fs, survival, sizes, &model, &format!("{sizes:?}, life {life}"));
        }
        assert!(model.len() > 3, "{sizes:?}: {} records", model.len());
    }
    assert!(fulls[0] > 20 && fulls[1] > 0 && fulls[2] == 0, "{fulls:?} times full");
}
