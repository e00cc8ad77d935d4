//! Comparators that are not the ones a partition was created with.

use std::sync::Arc;

use azekura::fs::{MemFs, Survival};
use azekura::{Comparator, Database, ErrorKind, Partition, Result};

use super::{error, kind, open, part};
use crate::world::order::Order;

fn ordered(db: &Database, name: &str, order: Order) -> Result<Partition> {
    db.open_partition_with_comparator(name, Default::default(), Arc::new(order))
}

#[test]
fn another_comparator_is_refused_and_both_are_named() {
    let machine = MemFs::new();
    let db = open(&machine);
    ordered(&db, "down", Order::Reversed).unwrap().insert("k", "v").unwrap();
    part(&db, "up").insert("k", "v").unwrap();
    let refused = |db: &Database, life: &str| {
        let wrong = [
            (error(ordered(db, "down", Order::AnyCase)), "any case"),
            (error(db.open_partition("down", Default::default())), "azekura.bytewise"),
        ];
        for (error, other) in wrong {
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{life}");
            assert!(text.contains("\"reversed\"") && text.contains(other), "{life}: {text}");
        }
        let text = error(ordered(db, "up", Order::Reversed)).to_string();
        assert!(text.contains("\"reversed\"") && text.contains("bytewise"), "{life}: {text}");
    };
    refused(&db, "when it is open");
    db.close().unwrap();
    let db = open(&machine);
    refused(&db, "when its comparator has not come");
    ordered(&db, "down", Order::Reversed).unwrap();
    refused(&db, "when it has come");
    assert_eq!(db.list_partitions(), ["down", "up"]);
}

#[test]
fn names_of_comparators_have_1_to_255_bytes() {
    struct Named(String);
    impl Comparator for Named {
        fn name(&self) -> &str {
            &self.0
        }
        fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
            a.cmp(b)
        }
    }
    let db = open(&MemFs::new());
    for (len, good) in [(0, false), (1, true), (255, true), (256, false)] {
        let named = Arc::new(Named("n".repeat(len)));
        let opened = db.open_partition_with_comparator(&format!("p{len}"), Default::default(), named);
        assert_eq!(opened.is_ok(), good, "{len} bytes");
        assert!(good || kind(opened) == ErrorKind::Invalid);
    }
    assert_eq!(db.list_partitions().len(), 2);
}

#[test]
fn records_wait_in_the_log_for_their_comparator() {
    let machine = MemFs::new();
    let db = open(&machine);
    let down = ordered(&db, "down", Order::Reversed).unwrap();
    (0..10u8).for_each(|n| down.insert([n], "table").unwrap());
    down.flush().unwrap();
    (5..15u8).for_each(|n| down.insert([n], "log").unwrap());
    machine.freeze_after(Some(0));
    drop((down, db));
    machine.crash(Survival::Everything, 0);
    for life in 0..4u8 {
        let db = open(&machine);
        part(&db, "other").insert([life], "v").unwrap();
        part(&db, "other").flush().unwrap();
        assert_eq!(db.list_partitions(), ["down", "other"]);
        if life % 2 == 0 { db.close().unwrap() } else { drop(db) }
    }
    let db = open(&machine);
    let down = ordered(&db, "down", Order::Reversed).unwrap();
    let keys: Vec<u8> = down.keys().map(|key| key.unwrap()[0]).collect();
    assert_eq!(keys, (0..15).rev().collect::<Vec<u8>>());
    assert_eq!(down.get([7]).unwrap().as_deref(), Some(&b"log"[..]));
    assert_eq!(kind(down.prefix("x").next().unwrap()), ErrorKind::Invalid, "prefixes need the order of bytes");
}
