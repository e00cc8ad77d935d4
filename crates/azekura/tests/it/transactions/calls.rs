//! What the calls return, and that a call that fails changes nothing.

use std::time::Duration;

use azekura::{
    Config, ErrorKind, Gc, KvSeparationOptions, PartitionComponents, PersistMode, Slice, Transaction,
    TransactionOptions, merge_operators,
};

use super::{Fixture, lsm_options, pool_options};
use crate::testkit::ordered_partitions::open_counting;

fn pairs(iter: impl Iterator<Item = azekura::Result<(Slice, Slice)>>) -> String {
    let pair = |pair: azekura::Result<(Slice, Slice)>| {
        let (key, value) = pair.unwrap();
        format!("{}={}", key.escape_ascii(), value.escape_ascii())
    };
    iter.map(pair).collect::<Vec<_>>().join(" ")
}

#[test]
fn own_writes_are_read_back() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        for key in ["a", "c", "e"] {
            p.insert(key, "old").unwrap();
        }
        let mut tx = fixture.db.transaction();
        p.insert("d", "later").unwrap(); // not in the snapshot
        p.insert("c", "later").unwrap();
        tx.insert(p, "b", "new").unwrap();
        tx.insert(p, "c", "new").unwrap();
        tx.remove(p, "e").unwrap();
        for more in [0, 20] {
            (0..more).for_each(|n| tx.insert(p, [b'x', n], [n]).unwrap());
            assert_eq!(tx.get(p, "b").unwrap().unwrap(), "new");
            assert_eq!((tx.get(p, "e").unwrap(), tx.get(p, "d").unwrap()), (None, None));
            assert_eq!(tx.multi_get(p, ["a", "e"]).unwrap(), [Some("old".into()), None]);
            assert_eq!((tx.size_of(p, "c").unwrap(), tx.size_of(p, "e").unwrap()), (Some(3), None));
            assert!(tx.contains_key(p, "a").unwrap() && !tx.contains_key(p, "e").unwrap());
            assert_eq!(pairs(tx.range(p, .."x")), "a=old b=new c=new");
            assert_eq!(pairs(tx.range(p, .."x").rev()), "c=new b=new a=old");
            assert_eq!(pairs(tx.prefix(p, "b")), "b=new");
            assert_eq!(tx.iter(p).count(), 3 + usize::from(more));
            assert_eq!(tx.untracked().keys(p).count(), 3 + usize::from(more));
        }
        assert_eq!(tx.first_key_value(p).unwrap().unwrap().0, "a");
        assert_eq!(tx.last_key_value(p).unwrap().unwrap().0, [b'x', 19]);
        assert_eq!(pairs(p.range(.."x")), "a=old c=later d=later e=old");
    }
}

#[test]
fn ends_of_an_iterator_meet_and_seek() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        for n in (0..10u8).step_by(2) {
            p.insert([b'a' + n], [n]).unwrap(); // a c e g i
        }
        let mut tx = fixture.db.transaction();
        for n in (1..10u8).step_by(4) {
            tx.insert(p, [b'a' + n], [n]).unwrap(); // b f j
        }
        tx.remove(p, "e").unwrap();
        let mut keys = tx.keys(p);
        let mut step = |forward| {
            let key = if forward { keys.next() } else { keys.next_back() };
            key.map_or("-".into(), |key| String::from_utf8(key.unwrap().to_vec()).unwrap())
        };
        let order = [true, false, true, false, false, true, true, false, true];
        assert_eq!(order.map(&mut step).concat(), "ajbigcf--");
        keys.seek("d");
        assert_eq!(keys.next().unwrap().unwrap(), "f");
        keys.seek_back("z");
        assert_eq!(keys.next_back().unwrap().unwrap(), "j");
        keys.seek("e");
        assert_eq!(keys.next().unwrap().unwrap(), "f");
    }
}

/// Regression: in a pool, a reversed range returned a key behind its end, if the end was the last key of a leaf and the
/// transaction had written a key behind it. A checker of histories found this among 100,000 transactions.
#[test]
fn reversed_ranges_return_no_key_behind_their_end() {
    let fixture = Fixture::new();
    let merged = [("merged lsm", lsm_options()), ("merged pool", pool_options())].map(|(name, options)| {
        let components = PartitionComponents::default().merge_operator(merge_operators::append(""));
        fixture.db.open_partition_with(name, options, components).unwrap()
    });
    for p in fixture.partitions().into_iter().chain(&merged) {
        (0..400u16).step_by(2).for_each(|n| p.insert(n.to_be_bytes(), "old").unwrap());
        let mut tx = fixture.db.transaction();
        tx.insert(p, 301u16.to_be_bytes(), "own").unwrap();
        let key = |n: u16| n.to_be_bytes();
        for n in 0..300u16 {
            let last = n / 2 * 2;
            for mut iter in [tx.range(p, ..=key(n)), tx.range(p, ..key(n + 1))] {
                assert_eq!(iter.next_back().unwrap().unwrap().0, key(last), "..={n} in {}", p.name);
            }
            let mut iter = tx.range(p, key(n)..=key(n));
            assert_eq!(iter.next_back().is_some(), n == last, "{n}..={n} in {}", p.name);
            let mut iter = tx.range(p, ..key(n + 1));
            iter.seek_back(key(n));
            assert_eq!(iter.next_back().unwrap().unwrap().0, key(last), "a seek to {n} in {}", p.name);
        }
    }
}

#[test]
fn iterators_do_not_see_later_writes() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        p.insert("a", "1").unwrap();
        let mut tx = fixture.db.transaction();
        tx.insert(p, "b", "1").unwrap();
        let iter = tx.iter(p);
        tx.insert(p, "a", "2").unwrap();
        tx.insert(p, "c", "2").unwrap();
        assert_eq!(pairs(tx.iter(p)), "a=2 b=1 c=2");
        assert_eq!(pairs(iter), "a=1 b=1");
    }
}

#[test]
fn rollback_restores_writes() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        let mut tx = fixture.db.transaction();
        tx.insert(p, "a", "1").unwrap();
        let first = tx.savepoint();
        tx.insert(p, "a", "2").unwrap();
        tx.insert(fixture.other(p), "other", "2").unwrap();
        let iter = tx.iter(p);
        let second = tx.savepoint();
        tx.remove(p, "a").unwrap();
        assert_eq!(pairs(tx.iter(p)), "");
        tx.rollback_to(&second).unwrap();
        assert_eq!(pairs(tx.iter(p)), "a=2");
        tx.remove(p, "a").unwrap();
        tx.rollback_to(&first).unwrap();
        assert_eq!(pairs(tx.iter(p)), "a=1");
        assert_eq!(pairs(iter), "a=2", "an iterator keeps the writes that it was made with");
        assert_eq!(tx.rollback_to(&second).unwrap_err().kind(), ErrorKind::Invalid);
        let other = fixture.db.transaction().savepoint();
        assert_eq!(tx.rollback_to(&other).unwrap_err().kind(), ErrorKind::Invalid);
        tx.rollback_to(&first).unwrap();
        tx.commit().unwrap();
        assert_eq!(pairs(p.iter()), "a=1");
        assert!(fixture.other(p).get("other").unwrap().is_none());
        p.remove("a").unwrap();
    }
}

#[test]
fn bad_calls_are_typed_errors() {
    let fixture = Fixture::new();
    let (db, p) = (&fixture.db, &fixture.lsm);
    let foreign = Fixture::new();
    let mut tx = db.transaction();
    let kind = |result: azekura::Result<()>| result.unwrap_err().kind();
    assert_eq!(kind(tx.insert(&foreign.lsm, "k", "v")), ErrorKind::Invalid);
    assert_eq!(kind(tx.get(&foreign.pool, "k").map(drop)), ErrorKind::Invalid);
    assert_eq!(kind(tx.iter(&foreign.lsm).next().unwrap().map(drop)), ErrorKind::Invalid);
    assert_eq!(kind(tx.insert(p, [0; 65_536], "")), ErrorKind::Invalid);
    assert_eq!(kind(tx.insert(p, "k", vec![0; 9 << 20])), ErrorKind::Invalid, "over the memory limit");
    let deleted = db.open_partition("deleted", lsm_options()).unwrap();
    let mut late = db.transaction();
    late.insert(&deleted, "k", "v").unwrap();
    late.insert(p, "k", "late").unwrap();
    db.delete_partition(deleted.clone()).unwrap();
    assert_eq!(kind(tx.insert(&deleted, "k", "v")), ErrorKind::Closed);
    assert_eq!(kind(late.commit()), ErrorKind::Closed);
    tx.insert(p, "k", "v").unwrap();
    tx.commit().unwrap();
    assert_eq!(p.get("k").unwrap().unwrap(), "v");

    let mut after_close = db.transaction();
    after_close.insert(p, "k", "closed").unwrap();
    db.clone().close().unwrap();
    assert_eq!(kind(after_close.get(p, "k").map(drop)), ErrorKind::Closed);
    assert_eq!(kind(after_close.insert(p, "k", "v")), ErrorKind::Closed);
    assert_eq!(kind(after_close.commit()), ErrorKind::Closed);
    read_only_transactions_read(&fixture);
}

#[test]
fn every_call_after_close_is_an_error() {
    for pool in [false, true] {
        let fixture = Fixture::new();
        let (db, p) = (&fixture.db, fixture.partitions()[usize::from(pool)]);
        p.insert("k", "v").unwrap();
        let begin = || {
            let mut tx = db.transaction();
            assert!(tx.get(p, "k").unwrap().is_some());
            tx.insert(p, "own", "written").unwrap();
            tx
        };
        let (mut tx, unwritten) = (begin(), db.transaction());
        let (mut iter, mut keys) = (tx.iter(p), tx.untracked().keys(p));
        assert!(iter.next().unwrap().is_ok());
        let mut batch = db.batch();
        batch.expect(p, "k", Some(b"v"));
        batch.insert(p, "k", "written");
        db.clone().close().unwrap();
        let kind = |result: azekura::Result<()>| result.err().map(|error| error.kind());
        let all = [
            ("get", kind(tx.get(p, "k").map(drop))),
            ("get of an own write", kind(tx.get(p, "own").map(drop))),
            ("contains_key", kind(tx.contains_key(p, "k").map(drop))),
            ("size_of", kind(tx.size_of(p, "own").map(drop))),
            ("multi_get", kind(tx.multi_get(p, ["k"]).map(drop))),
            ("first_key_value", kind(tx.first_key_value(p).map(drop))),
            ("last_key_value", kind(tx.last_key_value(p).map(drop))),
            ("iter", kind(tx.iter(p).next().unwrap().map(drop))),
            ("prefix", kind(tx.prefix(p, "k").next().unwrap().map(drop))),
            ("entries", kind(tx.entries(p).next().unwrap().map(drop))),
            ("untracked", kind(tx.untracked().get(p, "k").map(drop))),
            ("an old iterator", kind(iter.next().unwrap().map(drop))),
            ("an untracked iterator", kind(keys.next().unwrap().map(drop))),
            ("insert", kind(tx.insert(p, "k", "w"))),
            ("insert_with_ttl", kind(tx.insert_with_ttl(p, "k", "w", Duration::from_secs(1)))),
            ("merge", kind(tx.merge(p, "k", "w"))),
            ("remove", kind(tx.remove(p, "k"))),
            ("remove_weak", kind(tx.remove_weak(p, "k"))),
            ("remove_range", kind(tx.remove_range::<&str>(p, ..))),
            ("commit", kind(tx.commit())),
            ("commit without writes", kind(unwritten.commit())),
            ("conditional batch", kind(batch.commit())),
            ("compare_and_swap", kind(p.compare_and_swap("k", Some(b"v"), None).map(drop))),
            ("insert_if_absent", kind(p.insert_if_absent("l", "w").map(drop))),
            ("fetch_update", kind(p.fetch_update("k", |_| Some("w")).map(drop))),
            ("take", kind(p.take("k").map(drop))),
            ("transact", kind(db.transact(|tx| tx.insert(p, "k", "w")))),
            ("exclusive", kind(db.transaction_with(TransactionOptions::default().exclusive(true)).map(drop))),
        ];
        for (call, found) in all {
            assert_eq!(found, Some(ErrorKind::Closed), "{call}");
        }
        let again = Config::new(&fixture.dir.dir).fs(fixture.dir.fs.clone()).workers(0).open().unwrap();
        let p = again.partition(&p.name).unwrap();
        assert_eq!(pairs(p.iter()), "k=v", "nothing was logged");
    }
}

/// A key that is too long is refused by writes, and absent for reads.
#[test]
fn long_keys_and_bounds_are_typed_errors() {
    let fixture = Fixture::new();
    let long = [b'k'; 65_536];
    for p in fixture.partitions() {
        let mut tx = fixture.db.transaction();
        let kind = |result: azekura::Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(tx.insert(p, long, "v")), ErrorKind::Invalid);
        assert_eq!(kind(tx.insert_with_ttl(p, long, "v", Duration::from_secs(1))), ErrorKind::Invalid);
        assert_eq!(kind(tx.remove(p, long)), ErrorKind::Invalid);
        assert_eq!(kind(tx.remove_weak(p, long)), ErrorKind::Invalid);
        assert_eq!(kind(tx.remove_range(p, long..)), ErrorKind::Invalid);
        assert_eq!(kind(tx.remove_range(p, "b".."a")), ErrorKind::Invalid);
        assert_eq!(kind(tx.merge(p, "k", "v")), ErrorKind::Invalid, "there is no operator");
        // No key is that long, so the reads find nothing.
        assert!(tx.get(p, long).unwrap().is_none() && tx.size_of(p, long).unwrap().is_none());
        assert_eq!(tx.range(p, long..).count() + tx.range(p, "z".."a").count(), 0);
        assert!(p.compare_and_swap(long, None, Some(b"v")).is_err_and(|error| error.kind() == ErrorKind::Invalid));
        assert_eq!(kind(p.fetch_update(long, |_| Some("v")).map(drop)), ErrorKind::Invalid);
        assert!(p.take(long).unwrap().is_none());
        let mut batch = fixture.db.batch();
        batch.insert(p, "k", "v");
        batch.expect(p, long, None);
        let error = batch.commit().unwrap_err();
        assert_eq!((error.kind(), error.batch_position()), (ErrorKind::Invalid, Some(1)));
        p.insert("another", "change").unwrap();
        tx.insert(p, "k", "written").unwrap();
        tx.commit().unwrap();
        assert_eq!(pairs(p.iter()), "another=change k=written");
    }
}

/// A database that is open for reading only has transactions that read.
fn read_only_transactions_read(fixture: &Fixture) {
    let reader = Config::new(&fixture.dir.dir).fs(fixture.dir.fs.clone()).open_read_only().unwrap();
    let p = reader.partition("lsm").unwrap();
    let mut tx = reader.transaction();
    assert_eq!(tx.get(&p, "k").unwrap().unwrap(), "v");
    tx.insert(&p, "k", "w").unwrap();
    assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Invalid);
    let only_reads = reader.transaction();
    assert!(only_reads.contains_key(&p, "k").unwrap());
    only_reads.commit().unwrap();
    let exclusive = reader.transaction_with(TransactionOptions::default().exclusive(true));
    assert_eq!(exclusive.unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn memory_of_a_transaction_is_bounded() {
    let fixture = Fixture::new();
    let p = &fixture.lsm;
    let mut tx = fixture.db.transaction();
    tx.insert(p, "first", "kept").unwrap();
    let refused = (0..1_000_000u32).find_map(|n| tx.get(p, [&n.to_be_bytes()[..], &[0; 200]].concat()).err());
    assert_eq!(refused.unwrap().kind(), ErrorKind::Invalid);
    assert_eq!(tx.untracked().get(p, "first").unwrap().unwrap(), "kept");
    tx.commit().unwrap();
    assert_eq!(p.get("first").unwrap().unwrap(), "kept");
    let mut tx = fixture.db.transaction();
    let refused = (0..100_000u32).find_map(|n| tx.insert(p, n.to_be_bytes(), [0; 1000]).err());
    assert_eq!(refused.unwrap().kind(), ErrorKind::Invalid);
    let (reads, tx) = (tx.untracked().keys(p).count(), tx);
    tx.commit().unwrap();
    assert_eq!(p.len().unwrap(), reads as u64);
}

#[test]
fn large_values_go_to_blob_files() {
    let fixture = Fixture::new();
    let separation = KvSeparationOptions::default().separation_threshold(100).direct_write_threshold(1000);
    let p = fixture.db.open_partition("blobs", lsm_options().with_kv_separation(separation)).unwrap();
    let value = |n: u8| vec![n; 5000];
    let mut tx = fixture.db.transaction();
    tx.insert(&p, "a", value(1)).unwrap();
    let before = tx.savepoint();
    tx.insert(&p, "a", value(2)).unwrap();
    assert_eq!((tx.get(&p, "a").unwrap().unwrap(), tx.size_of(&p, "a").unwrap()), (value(2).into(), Some(5000)));
    assert_eq!(tx.iter(&p).next().unwrap().unwrap().1, value(2));
    tx.rollback_to(&before).unwrap();
    assert_eq!(tx.entries(&p).next().unwrap().unwrap().value().unwrap(), value(1));
    tx.commit().unwrap();
    assert_eq!(p.get("a").unwrap().unwrap(), value(1));

    let mut lost = fixture.db.transaction();
    assert!(lost.contains_key(&p, "a").unwrap());
    lost.insert(&p, "b", value(3)).unwrap();
    p.insert("a", value(4)).unwrap();
    assert_eq!(lost.commit().unwrap_err().kind(), ErrorKind::Conflict);
    p.flush().unwrap();
    assert_eq!((p.get("a").unwrap().unwrap(), p.get("b").unwrap()), (value(4).into(), None));
}

/// An iterator returns the writes that it was made with, although their values in blob files belong to no commit, or
/// are removed again.
#[test]
fn iterators_keep_values_of_ended_transactions() {
    let fixture = Fixture::new();
    let separation = KvSeparationOptions::default().separation_threshold(100).direct_write_threshold(1000);
    let options = lsm_options().with_kv_separation(separation.blob_file_target_size(16 << 10));
    let p = fixture.db.open_partition("blobs", options).unwrap();
    let value = |n: u8| vec![n; 5000];
    for end in ["rollback", "drop", "commit"] {
        let mut tx = fixture.db.transaction();
        let before = tx.savepoint();
        (0..8).for_each(|n| tx.insert(&p, [n], value(n)).unwrap());
        let (iter, entries) = (tx.iter(&p), tx.untracked().entries(&p).map(|entry| entry.unwrap()));
        let entries: Vec<_> = entries.collect();
        match end {
            "rollback" => tx.rollback_to(&before).unwrap(),
            "drop" => drop(tx),
            _ => {
                tx.commit().unwrap();
                (0..8u8).for_each(|n| p.remove([n]).unwrap());
            }
        }
        p.insert("other", value(9)).unwrap();
        for _ in 0..2 {
            p.flush().unwrap();
            p.major_compact().unwrap();
            p.gc_drop_stale_segments().unwrap();
            p.gc_with_staleness_threshold(0.1).unwrap();
            while fixture.db.step().unwrap() {}
        }
        p.remove("other").unwrap();
        let found: Vec<_> = iter.values().map(|value| value.unwrap()).collect();
        assert_eq!(found, (0..8).map(|n| Slice::from(value(n))).collect::<Vec<_>>(), "after a {end}");
        let found: Vec<_> = entries.iter().map(|entry| entry.value().unwrap()).collect();
        assert_eq!(found, (0..8).map(|n| Slice::from(value(n))).collect::<Vec<_>>(), "entries after a {end}");
        assert!(p.is_empty().unwrap());
    }
}

/// A transaction and what it returns have no lifetimes, and move between threads.
#[test]
fn transactions_move_between_threads() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        p.insert("a", "1").unwrap();
        let mut tx = fixture.db.transaction();
        tx.insert(p, "b", "2").unwrap();
        let (there, iter, point) = (p.clone(), tx.iter(p), tx.savepoint());
        let moved = std::thread::spawn(move || {
            assert_eq!(pairs(iter), "a=1 b=2");
            tx.insert(&there, "c", "3").unwrap();
            tx.rollback_to(&point).unwrap();
            tx.insert(&there, "d", "4").unwrap();
            tx.commit().unwrap();
        });
        moved.join().unwrap();
        assert_eq!(pairs(p.iter()), "a=1 b=2 d=4");
    }
}

#[test]
fn empty_transactions_succeed() {
    let fixture = Fixture::new();
    let mut tx: Transaction = fixture.db.transaction();
    tx.durability(PersistMode::SyncAll);
    assert!(tx.get(&fixture.lsm, "a").unwrap().is_none());
    fixture.lsm.insert("a", "1").unwrap();
    tx.commit().unwrap(); // it read one state, and wrote nothing
}

#[test]
fn expected_values_decide_over_a_batch() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        let other = fixture.other(p);
        p.insert("a", "1").unwrap();
        let commit = |key: &str, expected: Option<&[u8]>| {
            let mut batch = fixture.db.batch();
            batch.expect(p, key, expected);
            batch.insert(other, "written", key);
            batch.commit()
        };
        for (key, expected) in [("a", None), ("a", Some(&b"2"[..])), ("b", Some(b"1")), ("b", Some(b""))] {
            let error = commit(key, expected).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict);
            assert_eq!(error.conflicting_key(), Some((&*p.name, key.as_bytes())));
            assert!(other.get("written").unwrap().is_none());
        }
        for (key, expected) in [("a", Some(&b"1"[..])), ("b", None)] {
            commit(key, expected).unwrap();
            assert_eq!(other.take("written").unwrap().unwrap(), key);
        }
        let mut batch = fixture.db.batch();
        batch.expect(p, "a", None);
        assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Conflict, "without writes");
        batch.commit().unwrap(); // empty again
        p.remove("a").unwrap();
    }
}

#[test]
fn single_key_operations_are_exact() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        assert!(p.compare_and_swap("k", None, None).unwrap());
        assert!(!p.compare_and_swap("k", Some(b"1"), Some(b"2")).unwrap());
        assert!(p.insert_if_absent("k", "1").unwrap() && !p.insert_if_absent("k", "2").unwrap());
        assert!(p.compare_and_swap("k", Some(b"1"), Some(b"2")).unwrap());
        assert_eq!(p.fetch_update("k", |old| Some([old.unwrap(), b"!"].concat())).unwrap().unwrap(), "2");
        assert_eq!(p.get("k").unwrap().unwrap(), "2!");
        assert_eq!(p.fetch_update("k", |_| None::<Vec<u8>>).unwrap().unwrap(), "2!");
        assert_eq!(p.fetch_update("k", |old| old.map(<[u8]>::to_vec)).unwrap(), None);
        assert_eq!(p.take("k").unwrap(), None);
        p.insert("k", "3").unwrap();
        assert_eq!(p.take("k").unwrap().unwrap(), "3");
        assert!(p.is_empty().unwrap());
        assert_eq!(p.insert_if_absent([0; 65_536], "").unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn concurrent_updates_of_a_key_all_count() {
    let fixture = Fixture::new();
    for p in fixture.partitions() {
        let number = |bytes: Option<&[u8]>| bytes.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..100 {
                        p.fetch_update("n", |old| Some((number(old) + 1).to_le_bytes())).unwrap();
                        fixture
                            .db
                            .transact(|tx| {
                                let next = number(tx.get(p, "n")?.as_deref()) + 1;
                                tx.insert(p, "n", next.to_le_bytes())
                            })
                            .unwrap();
                    }
                });
            }
            threads.spawn(|| (0..200u8).for_each(|n| p.insert([n, n], "noise").unwrap()));
        });
        assert_eq!(number(p.get("n").unwrap().as_deref()), 800);
    }
}

/// Regression: a scan of a transaction that had written to the partition passed every key that was removed since the
/// last flush. So the rounds of a queue cost more and more, if a round inserted a key before it took the first one.
#[test]
fn queue_under_own_writes_stays_flat() {
    let fixture = Fixture::new();
    let (p, counting) = open_counting(&fixture.db, "queue", lsm_options());
    (0..10u64).for_each(|n| p.insert(n.to_be_bytes(), "job").unwrap());
    let mut next = 10u64;
    for backward in [false, true] {
        let mut compared = Vec::new();
        for _ in 0..6 {
            let before = counting.comparisons();
            for _ in 0..500 {
                // Backward, the numbers descend: the first job is the last key.
                let number = if backward { u64::MAX - next } else { next };
                let mut tx = fixture.db.transaction();
                tx.insert(&p, number.to_be_bytes(), "job").unwrap();
                let first = if backward { tx.last_key_value(&p) } else { tx.first_key_value(&p) };
                tx.remove(&p, first.unwrap().unwrap().0).unwrap();
                tx.commit().unwrap();
                next += 1;
            }
            compared.push(counting.comparisons() - before);
        }
        assert!(compared[5] < 2 * compared[0], "comparisons of 500 rounds: {compared:?}");
    }
}

/// Regression: if any record was newer than the transaction, its commit read every record of the memtable in the range
/// that a scan had passed, twice, and all keys that were removed since the last flush among them.
#[test]
fn queue_beside_a_producer_stays_flat() {
    let fixture = Fixture::new();
    let (p, counting) = open_counting(&fixture.db, "queue", lsm_options());
    (0..10u64).for_each(|n| p.insert(n.to_be_bytes(), "job").unwrap());
    let mut compared = Vec::new();
    for slice in 0..6u64 {
        let before = counting.comparisons();
        for n in 0..500 {
            let mut tx = fixture.db.transaction();
            let (number, _) = tx.first_key_value(&p).unwrap().unwrap();
            tx.remove(&p, number).unwrap();
            p.insert((10 + 500 * slice + n).to_be_bytes(), "job").unwrap();
            tx.commit().unwrap();
        }
        compared.push(counting.comparisons() - before);
    }
    assert!(compared[5] < 2 * compared[0], "comparisons of 500 rounds: {compared:?}");
    // What was inserted before the first key is a conflict, however many records are newer.
    for newer in [0, 2_000] {
        let mut tx = fixture.db.transaction();
        let (first, _) = tx.first_key_value(&p).unwrap().unwrap();
        tx.remove(&p, &first).unwrap();
        p.insert("", "urgent").unwrap();
        (0..newer).for_each(|n: u64| p.insert(u64::MAX.wrapping_sub(n).to_be_bytes(), "").unwrap());
        assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::Conflict);
        p.remove("").unwrap();
    }
}
