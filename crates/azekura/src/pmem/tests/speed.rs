//! Nanoseconds per operation, printed: `cargo test --release -p azekura --lib pmem::tests::speed -- --ignored
//! --nocapture`.

use std::collections::BTreeMap;
use std::hint::black_box;

use super::fixture::{PoolFixture, PoolOp};
use super::model::{new_fixture, options};
use crate::base::{InternalKey, SeqNo};
use crate::iter::InternalIter;
use crate::mem::region::PAGE;
use crate::mem::slice::Slice;
use crate::memtable::speed::{mixed, random_key, time};
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend, PoolImage};
use crate::pmem::tree::PoolOptions;
use crate::vfs::disk::DiskFs;
use crate::vfs::disk::tests::temp_dir;
use crate::vfs::{Fs, OpenMode};

/// What a record costs beside its key and value, in bytes: in the pool, and in memory with all that is built over it.
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
        for n in 0..40_000 {
            fixture.apply(&PoolOp::Put(random_key(n).to_vec(), vec![7; 100])).unwrap();
        }
        let (pool, memory) = overhead(&fixture, 116);
        println!("{what}: {pool:.1} bytes in the pool, {memory:.1} in memory");
        assert!(pool <= 40.0 && memory <= 40.0, "{what}: {pool} and {memory}");
        let (usage, _) = fixture.tree.usage().unwrap();
        assert!(usage.free_bytes < 2 << 20, "what is free at the end of a run or a step: {}", usage.free_bytes);
    }
}

/// Prints what records cost, and how long the pool takes to open.
fn reopen(fixture: PoolFixture<PoolImage>, options: &PoolOptions) {
    let count = fixture.tree.len();
    let (pool, memory) = overhead(&fixture, 116);
    println!("  {pool:.1} bytes of overhead in the pool, {memory:.1} in memory");
    let bytes = fixture.tree.region().len();
    let image = PoolImage::new(options.len_max).unwrap();
    image.grow(bytes).unwrap();
    let mut piece = vec![0; 1 << 20];
    for at in (0..bytes).step_by(1 << 20) {
        let piece = &mut piece[..(bytes - at).min(1 << 20) as usize];
        fixture.tree.region().read(at, piece);
        image.write(at, &[piece]);
    }
    drop(fixture);
    time("open, per record", count, || {
        PoolFixture::open(image, options).unwrap();
    });
}

/// What `BTreeMap` takes for the same: insert, get hit, get miss, scan.
fn measure_btree_map(keys: &[[u8; 16]], absent: &[[u8; 16]], shuffled: &[[u8; 16]]) -> [f64; 5] {
    println!("beside it, BTreeMap<[u8; 16], Box<[u8]>>");
    let (count, value) = (keys.len() as u64, [7; 100]);
    let mut map = BTreeMap::new();
    let insert = time("insert", count, || {
        for key in keys {
            map.insert(*key, Box::<[u8]>::from(&value[..]));
        }
    });
    let hit = time("get hit, copied", count, || {
        for key in shuffled {
            black_box(Slice::from(&*map[key]));
        }
    });
    let miss = time("get miss", count, || {
        for key in absent {
            black_box(map.contains_key(key));
        }
    });
    let scan = time("scan, per entry", count, || {
        assert_eq!(map.iter().filter(|(_, value)| black_box(value)[0] == 7).count() as u64, count);
    });
    [insert, hit, miss, scan, scan]
}

/// The first walk, which finds leaves in no order, and another one; walks back, and short ones.
fn scans(fixture: &PoolFixture<PoolImage>, from: &[[u8; 16]]) -> [f64; 2] {
    let count = fixture.tree.len();
    let pin = fixture.snapshots.register();
    let mut cursor = fixture.tree.iter(pin.seqno());
    let forward = ["first scan, per entry", "scan forward, per entry"].map(|what| {
        time(what, count, || {
            let mut met = 0;
            cursor.seek_to_first().unwrap();
            while cursor.valid() {
                met += u64::from(black_box(cursor.entry()).value[0] == 7);
                cursor.next().unwrap();
            }
            assert_eq!(met, count);
        })
    });
    time("scan backward, per entry", count, || {
        cursor.seek_to_last().unwrap();
        while cursor.valid() {
            black_box(cursor.entry().value[0]);
            cursor.prev().unwrap();
        }
    });
    let seeks = count / 10;
    time("seek and 10 entries", seeks, || {
        for key in &from[..seeks as usize] {
            cursor.seek(InternalKey::before_versions_of(key)).unwrap();
            for _ in 0..10 {
                if cursor.valid() {
                    black_box(cursor.entry().value[0]);
                    cursor.next().unwrap();
                }
            }
        }
    });
    forward
}

fn measure(count: u64) {
    let options = PoolOptions { len_max: 4 << 30, grow_by: 64 << 20, slots_per_leaf: SLOTS };
    let fixture = PoolFixture::create(PoolImage::new(options.len_max).unwrap(), &options);
    let keys: Vec<[u8; 16]> = (0..count).map(random_key).collect();
    let shuffled: Vec<[u8; 16]> = (0..count).map(|n| keys[(mixed(n + 7) % count) as usize]).collect();
    let absent: Vec<[u8; 16]> = (count..2 * count).map(random_key).collect();
    let value = [7; 100];
    println!("{count} records of 16 + 100 bytes in random order");
    let mut ours = Vec::new();
    ours.push(time("insert", count, || {
        for (n, key) in keys.iter().enumerate() {
            fixture.tree.put(key, SeqNo(n as u64 + 1), &value).unwrap();
        }
    }));
    fixture.visible.publish(SeqNo(count));
    ours.push(time("get hit", count, || {
        for key in &shuffled {
            black_box(fixture.tree.get(key).unwrap().unwrap());
        }
    }));
    ours.push(time("get miss", count, || {
        for key in &absent {
            black_box(fixture.tree.get(key).unwrap().is_none());
        }
    }));
    ours.extend(scans(&fixture, &shuffled));
    time("replace", count / 5, || {
        for (n, key) in shuffled.iter().take(count as usize / 5).enumerate() {
            let seqno = SeqNo(count + n as u64 + 1);
            fixture.tree.put(key, seqno, &value).unwrap();
            fixture.visible.publish(seqno);
        }
    });
    reopen(fixture, &options);
    let theirs = measure_btree_map(&keys, &absent, &shuffled);
    for ((what, ours), theirs) in ["insert", "get hit", "get miss", "first scan", "scan"].iter().zip(ours).zip(theirs) {
        println!("  {what:<10} {:.2} of BTreeMap's time", ours / theirs);
    }
}

/// The same tree on different media, and two writers with keys of their own.
#[expect(clippy::disallowed_methods, reason = "the writers race, and in vfs no threads are scoped")]
fn measure_backend<M: PersistenceBackend>(what: &str, backend: impl Fn() -> M) {
    let count = 1_000_000;
    let options = PoolOptions { len_max: 1 << 30, grow_by: 16 << 20, slots_per_leaf: SLOTS };
    let keys: Vec<[u8; 16]> = (0..count).map(random_key).collect();
    println!("{count} records on {what}");
    let fixture = PoolFixture::create(backend(), &options);
    let one = time("insert", count, || {
        for (n, key) in keys.iter().enumerate() {
            fixture.tree.put(key, SeqNo(n as u64 + 1), &[7; 100]).unwrap();
        }
    });
    fixture.visible.publish(SeqNo(count));
    time("get hit", count, || {
        for n in 0..count {
            black_box(fixture.tree.get(&keys[(mixed(n + 7) % count) as usize]).unwrap().unwrap());
        }
    });
    drop(fixture);
    let fixture = PoolFixture::create(backend(), &options);
    let two = time("insert, two writers", count, || {
        std::thread::scope(|s| {
            for writer in 0..2 {
                let (fixture, keys) = (&fixture, &keys);
                s.spawn(move || {
                    for n in (writer..count as usize).step_by(2) {
                        fixture.tree.put(&keys[n], SeqNo(n as u64 + 1), &[7; 100]).unwrap();
                    }
                });
            }
        });
    });
    assert_eq!(fixture.tree.len(), count);
    println!("  two writers are {:.2} times as fast as one", one / two);
}

#[test]
#[ignore = "measures speed; run it alone, in release"]
fn speed() {
    measure_backend("an image", || PoolImage::new(1 << 30).unwrap());
    let root = temp_dir(true);
    measure_backend("a file used as memory", || {
        let _ = DiskFs::new().remove_file(&root.path().join("pool"));
        let file = DiskFs::new().open(&root.path().join("pool"), OpenMode::Create).unwrap();
        MappedPoolFile::new(file, 1 << 30).unwrap()
    });
    measure(500_000);
    measure(5_000_000);
}

#[test]
#[ignore = "for counting instructions: run it alone, in release, under callgrind"]
fn counted_gets_and_scans() {
    let options = options(256 << 20, SLOTS);
    let fixture =
        PoolFixture::create(PoolImage::new(options.len_max).unwrap(), &PoolOptions { grow_by: 256 * PAGE, ..options });
    for n in 0..100_000u64 {
        fixture.tree.put(&random_key(n), SeqNo(n + 1), &[7; 100]).unwrap();
    }
    fixture.visible.publish(SeqNo(100_000));
    for n in 0..100_000u64 {
        black_box(fixture.tree.get(&random_key(mixed(n) % 100_000)).unwrap().unwrap());
    }
    let pin = fixture.snapshots.register();
    let mut cursor = fixture.tree.iter(pin.seqno());
    cursor.seek_to_first().unwrap();
    while cursor.valid() {
        black_box(cursor.entry().value[0]);
        cursor.next().unwrap();
    }
}
