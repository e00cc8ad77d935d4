//! Which changes of other commits interfere with which reads.

use std::sync::Arc;

use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv};
use azekura::{
    Config, ErrorKind, Isolation, Iter, Partition, PartitionComponents, PartitionCreateOptions, Transaction,
    TransactionOptions, merge_operators,
};

use super::{Fixture, lsm_options, pool_options};

type Read = fn(&mut Transaction, &Partition);
type Change = fn(&Partition);
type ChangeInFixture = fn(&Fixture, &Partition);
type Changes = &'static [(&'static str, Change)];

/// The keys before each case: `b`, `d`, `f`.
fn fill(p: &Partition) {
    for pair in p.keys().collect::<azekura::Result<Vec<_>>>().unwrap() {
        p.remove(pair).unwrap();
    }
    for key in ["b", "d", "f"] {
        p.insert(key, "old").unwrap();
    }
}

/// Reads, with the changes that interfere with them, and changes that do not.
const CASES: &[(&str, Read, Changes, Changes)] = &[
    (
        "get of a present key",
        |tx, p| drop(tx.get(p, "b").unwrap()),
        &[("insert", |p| p.insert("b", "new").unwrap()), ("remove", |p| p.remove("b").unwrap())],
        &[("insert", |p| p.insert("c", "new").unwrap()), ("remove", |p| p.remove("d").unwrap())],
    ),
    (
        "lookups of an absent key",
        |tx, p| assert!(tx.size_of(p, "c").unwrap().is_none() && !tx.contains_key(p, "c").unwrap()),
        &[("insert", |p| p.insert("c", "new").unwrap())],
        &[("insert", |p| p.insert("b", "new").unwrap())],
    ),
    (
        "multi_get",
        |tx, p| assert_eq!(tx.multi_get(p, ["a", "f"]).unwrap().len(), 2),
        &[("insert", |p| p.insert("a", "new").unwrap()), ("remove", |p| p.remove("f").unwrap())],
        &[("insert", |p| p.insert("d", "new").unwrap())],
    ),
    (
        "first_key_value",
        |tx, p| assert_eq!(tx.first_key_value(p).unwrap().unwrap().0, "b"),
        &[("insert before", |p| p.insert("a", "new").unwrap()), ("remove", |p| p.remove("b").unwrap())],
        &[("insert after", |p| p.insert("c", "new").unwrap()), ("remove after", |p| p.remove("d").unwrap())],
    ),
    (
        "last_key_value",
        |tx, p| assert_eq!(tx.last_key_value(p).unwrap().unwrap().0, "f"),
        &[("insert after", |p| p.insert("g", "new").unwrap()), ("replace", |p| p.insert("f", "new").unwrap())],
        &[("insert before", |p| p.insert("e", "new").unwrap())],
    ),
    (
        "two steps of an iterator",
        |tx, p| assert_eq!(tx.iter(p).take(2).count(), 2),
        &[("in the gap", |p| p.insert("c", "new").unwrap()), ("the last one", |p| p.insert("d", "new").unwrap())],
        &[("behind", |p| p.insert("e", "new").unwrap()), ("behind", |p| p.remove("f").unwrap())],
    ),
    (
        "an empty range",
        |tx, p| assert_eq!(tx.range(p, "g".."x").count(), 0),
        &[("inside", |p| p.insert("h", "new").unwrap()), ("its start", |p| p.insert("g", "new").unwrap())],
        &[("its end", |p| p.insert("x", "new").unwrap()), ("outside", |p| p.insert("a", "new").unwrap())],
    ),
    (
        "keys from the back",
        |tx, p| assert_eq!(tx.keys(p).next_back().unwrap().unwrap(), "f"),
        &[("remove", |p| p.remove("f").unwrap()), ("insert after", |p| p.insert("z", "new").unwrap())],
        &[("insert before", |p| p.insert("a", "new").unwrap())],
    ),
    (
        "a prefix",
        |tx, p| assert_eq!(tx.prefix(p, "d").count(), 1),
        &[("inside", |p| p.insert("dd", "new").unwrap())],
        &[("outside", |p| p.insert("e", "new").unwrap())],
    ),
    (
        "a sought position",
        |tx, p| {
            let mut keys = tx.keys(p);
            keys.seek("e");
            assert_eq!(keys.next().unwrap().unwrap(), "f");
        },
        &[("in the gap", |p| p.insert("e", "new").unwrap()), ("the key", |p| p.remove("f").unwrap())],
        &[("before", |p| p.insert("d", "new").unwrap())],
    ),
    (
        "untracked reads",
        |tx, p| {
            assert_eq!(tx.untracked().iter(p).count(), 3);
            assert!(tx.untracked().contains_key(p, "b").unwrap());
        },
        &[],
        &[("insert", |p| p.insert("b", "new").unwrap()), ("remove", |p| p.remove("d").unwrap())],
    ),
    (
        "an own write",
        |tx, p| {
            tx.insert(p, "own", "written").unwrap();
            assert!(tx.get(p, "own").unwrap().is_some());
        },
        &[],
        &[("insert", |p| p.insert("own", "other").unwrap())],
    ),
];

/// Commits a transaction that has read, after `change`, and optionally maintenance.
fn commit_after(fixture: &Fixture, p: &Partition, read: Read, change: Change, flushed: bool) -> Option<ErrorKind> {
    fill(p);
    if flushed {
        p.flush().unwrap();
    }
    let mut tx = fixture.db.transaction();
    tx.insert(fixture.other(p), "x", "written").unwrap();
    read(&mut tx, p);
    change(p);
    if flushed {
        p.flush().unwrap();
        p.major_compact().unwrap();
    }
    let committed = tx.commit();
    assert_eq!(committed.is_ok(), fixture.other(p).take("x").unwrap().is_some());
    committed.err().map(|error| error.kind())
}

#[test]
fn tracked_reads_conflict_with_their_changes() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        for flushed in [false, true] {
            for (name, read, interfering, others) in CASES {
                let case = |change: &str| format!("{name}, {change}, in {}, flushed: {flushed}", p.name);
                for (change, apply) in *interfering {
                    let found = commit_after(&fixture, p, *read, *apply, flushed);
                    assert_eq!(found, Some(ErrorKind::Conflict), "{}", case(change));
                }
                for (change, apply) in *others {
                    assert_eq!(commit_after(&fixture, p, *read, *apply, flushed), None, "{}", case(change));
                }
            }
        }
    }
}

/// Every kind of commit of another thread, which changes the key `d`, and whether it also changes `f`.
const KINDS_OF_CHANGES: &[(&str, bool, ChangeInFixture)] = &[
    ("batch", false, |fixture, p| {
        let mut batch = fixture.db.batch();
        batch.insert(p, "d", "new");
        batch.insert(fixture.other(p), "z", "new");
        batch.commit().unwrap();
    }),
    ("conditional batch", false, |fixture, p| {
        let mut batch = fixture.db.batch();
        batch.expect(p, "d", Some(b"old"));
        batch.remove(p, "d");
        batch.commit().unwrap();
    }),
    ("transaction", false, |fixture, p| {
        fixture.db.transact(|tx| tx.insert(p, "d", [&tx.get(p, "d")?.unwrap()[..], b"!"].concat())).unwrap();
    }),
    ("exclusive transaction", false, |fixture, p| {
        let mut tx = fixture.db.transaction_with(TransactionOptions::default().exclusive(true)).unwrap();
        tx.remove(p, "d").unwrap();
        tx.commit().unwrap();
    }),
    ("compare_and_swap", false, |_, p| assert!(p.compare_and_swap("d", Some(b"old"), Some(b"new")).unwrap())),
    ("take", false, |_, p| assert_eq!(p.take("d").unwrap().unwrap(), "old")),
    ("fetch_update", false, |_, p| drop(p.fetch_update("d", |_| Some("new")).unwrap())),
    ("merge", false, |_, p| p.merge("d", "!").unwrap()),
    ("remove_weak", false, |_, p| p.remove_weak("d").unwrap()),
    ("insert_with_ttl", false, |_, p| p.insert_with_ttl("d", "new", std::time::Duration::from_secs(3600)).unwrap()),
    ("remove_range", false, |_, p| p.remove_range("c".."e").unwrap()),
    ("remove_prefix", false, |_, p| p.remove_prefix("d").unwrap()),
    ("ingest", false, |_, p| _ = p.ingest([("d", "new")]).unwrap()),
    ("bulk", false, |_, p| _ = p.bulk([("d", "new"), ("d", "newer")]).unwrap()),
    ("clear", true, |_, p| p.clear().unwrap()),
];

#[test]
fn every_kind_of_change_is_found() {
    let fixture = Fixture::new();
    let reads: [(&str, Read, bool); 8] = [
        ("get", |tx, p| assert!(tx.get(p, "d").unwrap().is_some()), true),
        ("size_of", |tx, p| assert!(tx.size_of(p, "d").unwrap().is_some()), true),
        ("multi_get", |tx, p| assert!(tx.multi_get(p, ["x", "d"]).unwrap()[1].is_some()), true),
        ("range", |tx, p| assert_eq!(tx.range(p, "c".."e").count(), 1), true),
        ("reversed range", |tx, p| assert_eq!(tx.range(p, "d"..).rev().count(), 2), true),
        ("another key", |tx, p| assert!(tx.get(p, "f").unwrap().is_some()), false),
        ("another range", |tx, p| assert_eq!(tx.range(p, "e".."z").count(), 1), false),
        ("the last key", |tx, p| assert_eq!(tx.last_key_value(p).unwrap().unwrap().0, "f"), false),
    ];
    for options in [lsm_options(), pool_options()] {
        let components = PartitionComponents::default().merge_operator(merge_operators::append(""));
        let p = fixture.db.open_partition_with("merged", options, components).unwrap();
        for flushed in [false, true] {
            for (change, changes_all, apply) in KINDS_OF_CHANGES {
                for (read_name, read, reads_changed) in reads {
                    fill(&p);
                    if flushed {
                        p.flush().unwrap();
                    }
                    let mut tx = fixture.db.transaction();
                    read(&mut tx, &p);
                    tx.insert(fixture.other(&p), "x", "written").unwrap();
                    apply(&fixture, &p);
                    if flushed {
                        p.flush().unwrap();
                        p.major_compact().unwrap();
                    }
                    let wanted = (reads_changed || *changes_all).then_some(ErrorKind::Conflict);
                    let found = tx.commit().err().map(|error| error.kind());
                    assert_eq!(found, wanted, "{change} and {read_name} in {p:?}, flushed: {flushed}");
                    assert_eq!(fixture.other(&p).take("x").unwrap().is_none(), wanted.is_some());
                }
            }
        }
        fixture.db.delete_partition(p).unwrap();
    }
}

/// A partition of the same name is another one.
#[test]
fn deleted_partition_fails_what_was_read() {
    let fixture = Fixture::new();
    for options in [lsm_options(), pool_options()] {
        let p = fixture.db.open_partition("deleted", options.clone()).unwrap();
        let reads: [Read; 3] = [
            |tx, p| assert!(tx.get(p, "k").unwrap().is_none()),
            |tx, p| assert_eq!(tx.iter(p).count(), 0),
            |tx, p| tx.insert(p, "k", "written").unwrap(),
        ];
        let mut open = reads.map(|read| {
            let mut tx = fixture.db.transaction();
            read(&mut tx, &p);
            tx.insert(&fixture.lsm, "x", "written").unwrap();
            tx
        });
        fixture.db.delete_partition(p.clone()).unwrap();
        let again = fixture.db.open_partition("deleted", options).unwrap();
        for tx in &mut open {
            assert_eq!(tx.get(&p, "l").unwrap_err().kind(), ErrorKind::Closed);
            assert!(tx.get(&again, "k").unwrap().is_none());
        }
        for tx in open {
            assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Closed);
        }
        assert!(fixture.lsm.is_empty().unwrap() && again.is_empty().unwrap());
        fixture.db.delete_partition(again).unwrap();
    }
}

#[test]
fn conflict_names_partition_and_key() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        fill(p);
        let mut tx = fixture.db.transaction();
        assert_eq!(tx.range(p, "c".."e").count(), 1);
        tx.insert(fixture.other(p), "x", "y").unwrap();
        p.remove("d").unwrap();
        let error = tx.commit().unwrap_err();
        assert_eq!(error.conflicting_key(), Some((&*p.name, &b"d"[..])));
        assert!(!error.to_string().contains("\"d\""), "messages contain no keys: {error}");
        assert!(fixture.other(p).get("x").unwrap().is_none());
    }
}

#[test]
fn blind_writes_conflict_at_snapshot_isolation() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        for (isolation, wins) in [(Isolation::Serializable, true), (Isolation::Snapshot, false)] {
            for removes in [false, true] {
                fill(p);
                let mut tx = fixture.db.transaction_with(TransactionOptions::default().isolation(isolation)).unwrap();
                if removes {
                    tx.remove(p, "b").unwrap()
                } else {
                    tx.insert(p, "b", "mine").unwrap()
                }
                p.insert("b", "other").unwrap();
                assert_eq!(tx.commit().is_ok(), wins);
                let expected = if wins { (!removes).then_some("mine") } else { Some("other") };
                assert_eq!(p.get("b").unwrap(), expected.map(Into::into));
            }
        }
    }
}

#[test]
fn reads_may_be_changed_at_snapshot_isolation() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        fill(p);
        let options = TransactionOptions::default().isolation(Isolation::Snapshot);
        let mut tx = fixture.db.transaction_with(options).unwrap();
        assert_eq!(tx.iter(p).count(), 3);
        tx.insert(p, "x", "mine").unwrap();
        p.insert("b", "other").unwrap();
        tx.commit().unwrap();
    }
}

/// A key that was written again with the same value, or removed and inserted again, has changed for this check. A key
/// that was inserted and removed again in a pool may be unchanged.
#[test]
fn key_that_was_restored_may_conflict() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        fill(p);
        let mut tx = fixture.db.transaction();
        assert_eq!(tx.get(p, "b").unwrap().unwrap(), "old");
        tx.insert(p, "x", "mine").unwrap();
        p.remove("b").unwrap();
        p.insert("b", "old").unwrap();
        assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Conflict);
    }
}

#[test]
fn commits_conflict_across_partitions() {
    let fixture = Fixture::new();
    let (lsm, pool) = (&fixture.lsm, &fixture.pool);
    let (mut a, mut b) = (fixture.db.transaction(), fixture.db.transaction());
    assert!(a.get(lsm, "k").unwrap().is_none() && b.get(pool, "k").unwrap().is_none());
    a.insert(pool, "k", "a").unwrap();
    b.insert(lsm, "k", "b").unwrap();
    a.commit().unwrap();
    assert_eq!(b.commit().unwrap_err().conflicting_key(), Some(("pool", &b"k"[..])));
    assert!(lsm.get("k").unwrap().is_none());
}

/// A full pool returns the space that a commit has reserved, if the commit conflicts.
#[test]
fn conflict_releases_reservations() {
    let fixture = Fixture::new();
    let p = &fixture.pool;
    let len = 1 << 20;
    for round in 0..100u8 {
        let mut tx = fixture.db.transaction();
        assert!(tx.get(p, "k").unwrap().is_none_or(|value| value[0] == round - 1));
        tx.insert(p, "large", vec![round; len]).unwrap();
        p.insert("k", [round]).unwrap();
        assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Conflict);
    }
    assert!(p.get("large").unwrap().is_none());
    p.insert("large", vec![1; len]).unwrap();
}

/// Range deletes of other commits, and of the transaction itself.
#[test]
fn range_deletes_take_part_in_conflicts() {
    let fixture = Fixture::new();
    let p = &fixture.lsm;
    let reads: [(&str, Read, bool); 4] = [
        ("key inside", |tx, p| assert!(tx.contains_key(p, "d").unwrap()), true),
        ("key outside", |tx, p| assert!(tx.contains_key(p, "f").unwrap()), false),
        ("overlapping range", |tx, p| assert_eq!(tx.range(p, "d".."z").count(), 2), true),
        ("other range", |tx, p| assert_eq!(tx.range(p, "e".."z").count(), 1), false),
    ];
    for (name, read, conflicts) in reads {
        for flushed in [false, true] {
            let expected = conflicts.then_some(ErrorKind::Conflict);
            let found = commit_after(&fixture, p, read, |p| p.remove_range("c".."e").unwrap(), flushed);
            assert_eq!(found, expected, "{name}, flushed: {flushed}");
        }
    }
    for (isolation, wins) in [(Isolation::Serializable, true), (Isolation::Snapshot, false)] {
        fill(p);
        let mut tx = fixture.db.transaction_with(TransactionOptions::default().isolation(isolation)).unwrap();
        tx.remove_range(p, "c"..="d").unwrap();
        assert!(tx.get(p, "d").unwrap().is_none() && tx.untracked().keys(p).count() == 2);
        p.insert("c", "other").unwrap();
        assert_eq!(tx.commit().is_ok(), wins);
        assert_eq!(p.contains_key("c").unwrap(), !wins);
    }
}

/// A seek behind a failed step moves both ends of an iterator back to their bounds. The transaction forgot what the
/// other end had read, and committed although one of these keys had changed.
#[test]
fn reads_count_when_a_failed_step_restarts_them() {
    for front in [true, false] {
        let faults = FaultFs::new(Arc::new(MemFs::new()));
        let config = Config::new("/db").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
        let db = config.open().unwrap();
        let p = db.open_partition("p", PartitionCreateOptions::default().block_size(256)).unwrap();
        (b'a'..=b'j').for_each(|key| p.insert([key], [key; 3000]).unwrap());
        p.flush().unwrap();
        let mut tx = db.transaction();
        let mut iter = tx.iter(&p);
        let step = |iter: &mut Iter, front: bool| if front { iter.next() } else { iter.next_back() };
        let keys: Vec<_> = (0..3).map(|_| step(&mut iter, !front).unwrap().unwrap().0).collect();
        faults.inject(FaultPlan::new(OpKind::Read, 1, Fault::Error(std::io::ErrorKind::Other)));
        assert!(step(&mut iter, front).unwrap().is_err());
        faults.clear_faults();
        if front {
            iter.seek("a")
        } else {
            iter.seek_back("j")
        }
        assert_eq!(step(&mut iter, !front).unwrap().unwrap().0, keys[0]);
        drop(iter);
        p.insert(&keys[2], "changed").unwrap();
        tx.insert(&p, "sum", "of all keys").unwrap();
        assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Conflict, "{keys:?}");
    }
}
