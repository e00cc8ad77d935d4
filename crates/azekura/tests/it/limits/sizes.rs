//! Keys, values and batches at their limits and above.

use azekura::testing::{MemFs, Survival};
use azekura::{Config, ErrorKind};

use super::{assert_all_invalid, config, error_kind, open, open_partition};

const KEY_MAX: usize = 65_535;

#[test]
fn oversized_key_or_value_is_never_logged() {
    let machine = MemFs::new();
    // The memory budget must not be the reason for the refusal.
    let db = config(&machine).memory_budget(1 << 40).open().unwrap();
    let p = open_partition(&db, "p");
    let key = vec![b'k'; KEY_MAX + 1];
    // Zeros that are never read take no memory.
    let value = vec![0u8; 1 << 32];
    let batch = |fill: &dyn Fn(&mut azekura::Batch)| {
        let mut batch = db.batch();
        batch.insert(&p, "before", "v");
        fill(&mut batch);
        batch.insert(&p, "after", "v");
        batch.commit()
    };
    assert_all_invalid(
        &db,
        &mut [
            ("insert of a long key", &mut || p.insert(&key, "v")),
            ("remove of a long key", &mut || p.remove(&key)),
            ("remove_weak of a long key", &mut || p.remove_weak(&key)),
            ("insert of a long value", &mut || p.insert("k", &value)),
            ("a batch with a long key", &mut || batch(&|batch| batch.insert(&p, &key, "v"))),
            ("a batch that removes a long key", &mut || batch(&|batch| batch.remove(&p, &key))),
            ("a batch with a long value", &mut || batch(&|batch| batch.insert(&p, "k", &value))),
        ],
    );
    assert!(p.is_empty().unwrap(), "a refused batch changed the partition");
    // Such a key cannot exist, and reading it is not an error.
    assert_eq!(p.get(&key).unwrap(), None);
    assert!(!p.contains_key(&key).unwrap() && p.size_of(&key).unwrap().is_none());
    assert_eq!(p.multi_get([&key]).unwrap(), [None]);
    assert_eq!(p.range(key.clone()..).count() + p.range(..key.clone()).count() + p.prefix(&key).count(), 0);
}

#[test]
fn batch_above_half_the_budget_is_refused() {
    let machine = MemFs::new();
    let db = config(&machine).memory_budget(1 << 20).open().unwrap();
    let p = open_partition(&db, "p");
    let half = vec![7; 1 << 19];
    assert_all_invalid(
        &db,
        &mut [
            ("a value", &mut || p.insert("k", [&half[..], b"x"].concat())),
            ("a batch", &mut || {
                let mut batch = db.batch();
                (0..600).for_each(|n: u32| batch.insert(&p, n.to_be_bytes(), &half[..1000]));
                batch.commit()
            }),
        ],
    );
    p.insert("k", &half[..500_000]).unwrap();
    let mut batch = db.batch();
    (0..400).for_each(|n: u32| batch.insert(&p, n.to_be_bytes(), &half[..1000]));
    batch.commit().unwrap();
    assert_eq!(p.len().unwrap(), 401);
}

#[test]
fn the_empty_and_the_longest_key_go_all_the_way() {
    let machine = MemFs::new();
    let longest = vec![0xff; KEY_MAX];
    let keys: [&[u8]; 5] = [b"", b"\0", &longest[..KEY_MAX - 1], &longest, b"m"];
    let check = |db: &azekura::Database| {
        let p = open_partition(db, "p");
        for key in keys {
            let wanted = format!("value of {}", key.len());
            assert_eq!(p.get(key).unwrap().as_deref(), Some(wanted.as_bytes()), "{} bytes", key.len());
        }
        let found: Vec<usize> = p.keys().map(|key| key.unwrap().len()).collect();
        assert_eq!(found, [0, 1, 1, KEY_MAX - 1, KEY_MAX]);
        assert_eq!(p.first_key_value().unwrap().unwrap().0.len(), 0);
        assert_eq!(p.last_key_value().unwrap().unwrap().0.len(), KEY_MAX);
        assert_eq!(p.prefix("").count(), 5);
        assert_eq!(p.prefix(&longest[..3]).rev().count(), 2);
    };
    let db = open(&machine);
    keys.iter().for_each(|key| open_partition(&db, "p").insert(key, format!("value of {}", key.len())).unwrap());
    check(&db);
    machine.freeze_after(Some(0));
    drop(db);
    machine.crash(Survival::Everything, 0);
    let db = open(&machine);
    assert_eq!(db.metrics().replayed_records, 5);
    check(&db);
    open_partition(&db, "p").flush().unwrap();
    check(&db);
    keys.iter().for_each(|key| open_partition(&db, "p").insert(key, format!("value of {}", key.len())).unwrap());
    open_partition(&db, "p").major_compact().unwrap();
    check(&db);
    db.close().unwrap();
    check(&open(&machine));
}

#[test]
fn values_of_many_mebibytes_span_segments() {
    for mapped in [true, false] {
        let machine = MemFs::new();
        let tune = |config: Config| config.wal_segment_size(64 << 10).mapped_wal(mapped);
        let values: Vec<Vec<u8>> = (1..5u8).map(|n| vec![n; usize::from(n) * 1_500_000 + 7]).collect();
        let db = tune(config(&machine)).open().unwrap();
        let p = open_partition(&db, "p");
        for (n, value) in values.iter().enumerate() {
            p.insert([n as u8], value).unwrap();
            p.insert("small", [n as u8]).unwrap();
        }
        let after_kill = machine.fork();
        drop((p, db));
        for machine in [after_kill, machine] {
            let db = tune(config(&machine)).open().unwrap();
            let p = open_partition(&db, "p");
            for (n, value) in values.iter().enumerate() {
                assert!(p.get([n as u8]).unwrap().as_deref() == Some(&value[..]), "value {n}, mapped {mapped}");
                assert_eq!(p.size_of([n as u8]).unwrap(), Some(value.len() as u32));
            }
            assert_eq!(p.get("small").unwrap().as_deref(), Some(&[3u8][..]));
        }
    }
}

#[test]
fn an_empty_batch_does_nothing_but_sync() {
    let machine = MemFs::new();
    let db = open(&machine);
    let p = open_partition(&db, "p");
    db.batch().commit().unwrap();
    assert_eq!(db.metrics().commits, 0);
    p.insert("k", "v").unwrap();
    let mut batch = db.batch();
    batch.durability(azekura::PersistMode::SyncData);
    assert_eq!((batch.is_empty(), batch.len()), (true, 0));
    batch.commit().unwrap();
    let after = machine.fork();
    after.crash(Survival::Nothing, 0);
    assert!(open_partition(&open(&after), "p").contains_key("k").unwrap());
    let dropped = {
        let mut batch = db.batch();
        batch.insert(&p, "dropped", "v");
        batch.len()
    };
    assert_eq!((dropped, p.contains_key("dropped").unwrap()), (1, false));
    let other = open(&MemFs::new());
    let mut batch = db.batch();
    batch.insert(&open_partition(&other, "p"), "k", "v");
    assert_eq!(error_kind(batch.commit()), ErrorKind::Invalid, "a partition of another database");
}

#[test]
fn snapshot_refuses_foreign_partitions() {
    let (db, other) = (open(&MemFs::new()), open(&MemFs::new()));
    let (own, foreign) = (open_partition(&db, "p"), open_partition(&other, "p"));
    own.insert("k", "own").unwrap();
    foreign.insert("k", "foreign").unwrap();
    let snapshot = db.snapshot();
    let refused = [
        ("get", snapshot.get(&foreign, "k").err()),
        ("get_with", snapshot.get_with(&foreign, "k", |_| panic!("a value of another database")).err()),
        ("contains_key", snapshot.contains_key(&foreign, "k").err()),
        ("size_of", snapshot.size_of(&foreign, "k").err()),
        ("multi_get", snapshot.multi_get(&foreign, ["k"]).err()),
        ("iter", snapshot.iter(&foreign).next().unwrap().err()),
        ("range", snapshot.range(&foreign, "a"..).next_back().unwrap().err()),
        ("prefix", snapshot.prefix(&foreign, "k").next().unwrap().err()),
        ("keys", snapshot.keys(&foreign).next().unwrap().err()),
        ("values", snapshot.values(&foreign).next().unwrap().err()),
        ("entries", snapshot.entries(&foreign).next().unwrap().err()),
        ("first_key_value", snapshot.first_key_value(&foreign).err()),
        ("last_key_value", snapshot.last_key_value(&foreign).err()),
        ("is_empty", snapshot.is_empty(&foreign).err()),
        ("len", snapshot.len(&foreign).err()),
    ];
    for (call, error) in refused {
        assert_eq!(error.map(|error| error.kind()), Some(ErrorKind::Invalid), "{call}");
    }
    assert_eq!(snapshot.get(&own, "k").unwrap().unwrap(), "own");
    assert_eq!(snapshot.iter(&own).count(), 1);
}

/// Regression: a failed operation of a batch, and all operations after it, did not count. A program that commits after
/// each 100 operations added operations without end. The error did not tell which operation was wrong.
#[test]
fn failed_operations_count_and_have_a_position() {
    let db = open(&MemFs::new());
    let p = open_partition(&db, "p");
    let long = vec![0; KEY_MAX + 1];
    type Operation = fn(&mut azekura::Batch, &azekura::Partition, &[u8]);
    let operations: [Operation; 6] = [
        |batch, p, key| batch.insert(p, key, "v"),
        |batch, p, key| batch.remove(p, key),
        |batch, p, key| batch.remove_range(p, key..),
        |batch, p, key| batch.expect(p, key, None),
        |batch, p, key| batch.insert_with_ttl(p, key, "v", std::time::Duration::from_secs(1)),
        |batch, p, key| batch.merge(p, key, "v"),
    ];
    for operation in operations {
        let mut batch = db.batch();
        batch.insert(&p, "a", "v");
        batch.expect(&p, "a", None);
        batch.remove_range(&p, "b".."b"); // writes nothing, and counts
        assert!(batch.error().is_none());
        operation(&mut batch, &p, &long);
        batch.insert(&p, "c", "v");
        batch.insert(&p, &long, "the second error");
        assert_eq!((batch.len(), batch.error().and_then(azekura::Error::batch_position)), (6, Some(3)));
        let error = batch.commit().unwrap_err();
        assert_eq!((error.kind(), error.batch_position()), (ErrorKind::Invalid, Some(3)), "{error}");
        assert!(batch.is_empty() && batch.error().is_none());
    }
    let mut batch = db.batch();
    batch.insert(&p, "a", "v");
    batch.expect(&p, "b", Some(b"v"));
    let error = batch.commit().unwrap_err();
    assert_eq!((error.kind(), error.batch_position()), (ErrorKind::Conflict, Some(1)));
    assert!(p.is_empty().unwrap());
}

#[test]
fn batch_is_usable_again_after_commit_or_error() {
    let machine = MemFs::new();
    let db = open(&machine);
    let separated = azekura::PartitionCreateOptions::default().with_kv_separation(Default::default());
    let pool = crate::pools::pool_options(8 << 20);
    let partitions =
        [("tree", separated), ("pool", pool)].map(|(name, options)| db.open_partition(name, options).unwrap());
    let large = vec![7; 2 << 20]; // a direct blob write
    let mut batch = db.batch();
    for round in 0..3u8 {
        batch.extend(partitions.iter().map(|partition| (partition, [round], b"small")));
        batch.insert(&partitions[0], [round, 1], &large);
        assert_eq!(batch.len(), 3);
        batch.commit().unwrap();
        assert!(batch.is_empty());
        // A failed batch leaves no writes, no blobs and no error behind.
        batch.insert(&partitions[0], "refused", &large);
        batch.insert(&partitions[1], vec![0; KEY_MAX + 1], "v");
        assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Invalid);
        assert!(batch.is_empty());
        batch.remove(&partitions[1], "cleared");
        batch.insert(&partitions[1], vec![0; KEY_MAX + 1], "v");
        batch.clear();
        batch.commit().unwrap();
    }
    for (partition, len) in partitions.iter().zip([6, 3]) {
        assert_eq!(partition.len().unwrap(), len);
        assert_eq!(partition.get("refused").unwrap(), None);
        assert_eq!(partition.into_iter().map(|pair| pair.unwrap().0.len() as u64).min(), Some(1));
    }
    assert_eq!(db.partition("none").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(db.delete_partition_by_name("none").unwrap_err().kind(), ErrorKind::NotFound);
}
