//! Comparators that are not the ones a partition was created with.

use std::sync::Arc;

use azekura::testing::{MemFs, Survival, TestComparator, TestOrder};
use azekura::{DataBlockIndexType, Database, ErrorKind, Partition, PartitionCreateOptions, Result};

use super::{error_kind, expect_error, open, open_partition};

fn ordered(db: &Database, name: &str, order: TestOrder) -> Result<Partition> {
    db.open_partition_with_comparator(name, Default::default(), Arc::new(order))
}

#[test]
fn wrong_comparator_is_refused_and_both_named() {
    let machine = MemFs::new();
    let db = open(&machine);
    ordered(&db, "down", TestOrder::Reversed).unwrap().insert("k", "v").unwrap();
    open_partition(&db, "up").insert("k", "v").unwrap();
    let refused = |db: &Database, life: &str| {
        let wrong = [
            (expect_error(ordered(db, "down", TestOrder::AnyCase)), "any case"),
            (expect_error(db.open_partition("down", Default::default())), "azekura.bytewise"),
        ];
        for (error, other) in wrong {
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{life}");
            assert!(text.contains("\"reversed\"") && text.contains(other), "{life}: {text}");
        }
        let text = expect_error(ordered(db, "up", TestOrder::Reversed)).to_string();
        assert!(text.contains("\"reversed\"") && text.contains("bytewise"), "{life}: {text}");
    };
    refused(&db, "when it is open");
    db.close().unwrap();
    let db = open(&machine);
    refused(&db, "before its comparator is given");
    ordered(&db, "down", TestOrder::Reversed).unwrap();
    refused(&db, "after its comparator is given");
    assert_eq!(db.list_partitions(), ["down", "up"]);
}

#[test]
fn names_of_comparators_have_1_to_255_bytes() {
    let db = open(&MemFs::new());
    for (len, good) in [(0, false), (1, true), (255, true), (256, false)] {
        let named = Arc::new(TestComparator::minimal(TestOrder::Bytes).named(&"n".repeat(len)));
        let opened = db.open_partition_with_comparator(&format!("p{len}"), Default::default(), named);
        assert_eq!(opened.is_ok(), good, "{len} bytes");
        assert!(good || error_kind(opened) == ErrorKind::Invalid);
    }
    assert_eq!(db.list_partitions().len(), 2);
}

#[test]
fn wal_keeps_records_until_comparator_is_given() {
    let machine = MemFs::new();
    let db = open(&machine);
    let down = ordered(&db, "down", TestOrder::Reversed).unwrap();
    (0..10u8).for_each(|n| down.insert([n], "table").unwrap());
    down.flush().unwrap();
    (5..15u8).for_each(|n| down.insert([n], "log").unwrap());
    machine.freeze_after(Some(0));
    drop((down, db));
    machine.crash(Survival::Everything, 0);
    for life in 0..4u8 {
        let db = open(&machine);
        open_partition(&db, "other").insert([life], "v").unwrap();
        open_partition(&db, "other").flush().unwrap();
        assert_eq!(db.list_partitions(), ["down", "other"]);
        if life % 2 == 0 { db.close().unwrap() } else { drop(db) }
    }
    let db = open(&machine);
    let down = ordered(&db, "down", TestOrder::Reversed).unwrap();
    let keys: Vec<u8> = down.keys().map(|key| key.unwrap()[0]).collect();
    assert_eq!(keys, (0..15).rev().collect::<Vec<u8>>());
    assert_eq!(down.get([7]).unwrap().as_deref(), Some(&b"log"[..]));
    assert_eq!(error_kind(down.prefix("x").next().unwrap()), ErrorKind::Invalid, "prefixes need the order of bytes");
}

/// A comparator may treat keys such as "16" and "0X10" as equal. Only a comparator that returns a canonical form of
/// the key may have blocks that are searched by hash. By default, blocks without hashes are written.
#[test]
fn hashed_blocks_are_refused_without_canonical() {
    let machine = MemFs::new();
    let db = open(&machine);
    let asked = |name: &str, order: TestOrder, index_type| {
        let options = PartitionCreateOptions::default().data_block_index_type(index_type);
        db.open_partition_with_comparator(name, options, Arc::new(order))
    };
    ordered(&db, "not asked", TestOrder::AnyCase).unwrap();
    for index_type in [DataBlockIndexType::BinaryAndHash, DataBlockIndexType::Fingerprint] {
        for name in ["new", "not asked"] {
            let error = expect_error(asked(name, TestOrder::AnyCase, index_type));
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("\"any case\"") && error.to_string().contains("canonical"), "{error}");
        }
        asked(&format!("{index_type:?}"), TestOrder::AnyCaseHashed, index_type).unwrap();
        asked(&format!("{index_type:?}, reversed"), TestOrder::Reversed, index_type).unwrap();
    }
    assert_eq!(db.list_partitions().len(), 5);
    asked("searched", TestOrder::AnyCase, DataBlockIndexType::BinarySearch).unwrap();
    for name in db.list_partitions() {
        let order = match name.as_str() {
            "not asked" | "searched" => TestOrder::AnyCase,
            name if name.ends_with("reversed") => TestOrder::Reversed,
            _ => TestOrder::AnyCaseHashed,
        };
        // The same options as before: opening with default options would not enable hashes.
        let part = ordered(&db, &name, order).unwrap();
        (0..300).for_each(|n| part.insert(format!("Key {n}"), format!("{n}")).unwrap());
        part.flush().unwrap();
        (0..300).step_by(9).for_each(|n| part.remove(format!("KEY {n}")).unwrap());
        part.insert("absent in the tables", "x").unwrap();
        part.flush().unwrap();
        for n in 0..320 {
            let found = |key: String| part.get(key).unwrap().map(|value| value.to_vec());
            let expected = (n < 300 && n % 9 != 0).then(|| format!("{n}").into_bytes());
            if order == TestOrder::Reversed {
                assert_eq!(found(format!("Key {n}")).is_some(), n < 300, "{name}: {n}");
            } else {
                assert_eq!(found(format!("key {n}")), expected, "{name}: {n}");
                assert_eq!(found(format!("KEY {n}")), expected, "{name}: {n}");
            }
        }
    }
}

/// Tables of one partition have the layouts of the options at the time of writing, and are read and compacted
/// together.
#[test]
fn layouts_of_blocks_mix_in_one_partition() {
    let db = open(&MemFs::new());
    let types = [None, Some(DataBlockIndexType::BinarySearch), Some(DataBlockIndexType::BinaryAndHash)];
    let types = types.into_iter().chain([Some(DataBlockIndexType::Fingerprint)]);
    for (round, index_type) in types.enumerate() {
        let options = PartitionCreateOptions::default().block_size(256).restart_interval(2);
        let options = match index_type {
            None => options,
            Some(index_type) => options.data_block_index_type(index_type),
        };
        let part = db.open_partition("p", Default::default()).unwrap();
        part.set_options(options).unwrap();
        (0..400).step_by(round + 1).for_each(|n| part.insert(format!("{n:04}"), format!("{n} {round}")).unwrap());
        part.flush().unwrap();
        let newest = |n: usize| (0..=round).rev().find(|round| n.is_multiple_of(round + 1)).unwrap();
        let check = |when: &str| {
            for n in 0..400 {
                let found = part.get(format!("{n:04}")).unwrap().expect("the key exists");
                assert_eq!(*found, *format!("{n} {}", newest(n)).as_bytes(), "{when}");
                assert!(part.get(format!("{n:04}a")).unwrap().is_none());
            }
            assert_eq!(part.len().unwrap(), 400, "{when}");
        };
        check("tables of all layouts");
        if round == 3 {
            part.major_compact().unwrap();
            check("merged");
        }
    }
}
