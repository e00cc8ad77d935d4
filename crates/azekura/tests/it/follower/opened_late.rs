//! Partitions whose comparators a follower is given late, and pools of followers.

use std::sync::Arc;
use std::time::Duration;

use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv, TestOrder};
use azekura::{Config, Database, ErrorKind, Partition, PartitionCreateOptions, Result, Slice};

use super::faults::{config, open_writer, partition, text};
use super::interleaved::{padded, separated};
use crate::pools::pool_options;
use crate::testkit::ordered_partitions::open_ordered;

fn open_reversed(db: &Database, options: PartitionCreateOptions) -> Result<Partition> {
    open_ordered(TestOrder::Reversed, db, "p", options, None)
}

fn follow(machine: &MemFs) -> Config {
    config(Arc::new(machine.clone()))
}

/// Regression: a snapshot read a later state of a partition whose comparator was given after it was created. Of a table
/// the writer had dropped the version that it needed; a pool kept none when it was built.
#[test]
fn a_snapshot_is_older_than_the_comparator() {
    for (options, has_flush) in
        [(Default::default(), true), (separated(), true), (pool_options(8 << 20), true), (pool_options(8 << 20), false)]
    {
        let machine = MemFs::new();
        let writer = open_writer(&machine);
        let p = open_reversed(&writer, options.clone()).unwrap();
        let put = |n: u64| {
            p.insert("k", padded(n, 800)).unwrap();
            p.insert(format!("only {n}"), "").unwrap();
            p.insert("removed", "").unwrap();
        };
        put(1);
        let follower = follow(&machine).open_follower().unwrap();
        let before = follower.snapshot();
        put(2);
        p.remove("removed").unwrap();
        p.remove_range("only 1"..="only 1").unwrap();
        if has_flush {
            p.flush().unwrap();
        }
        follower.catch_up().unwrap();
        let after = follower.snapshot();
        let followed = open_reversed(&follower, options).unwrap();
        match before.get(&followed, "k") {
            Ok(found) => {
                assert_eq!(found.as_deref(), Some(&padded(1, 800)[..]));
                let keys: Vec<_> = before.keys(&followed).map(|key| key.unwrap().to_vec()).collect();
                assert_eq!(keys, [&b"removed"[..], b"only 1", b"k"]);
                assert!(before.contains_key(&followed, "removed").unwrap());
                assert_eq!(before.multi_get(&followed, ["only 2"]).unwrap(), [None]);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
                let kind = |error: azekura::Error| error.kind();
                assert_eq!(before.len(&followed).map_err(kind).unwrap_err(), ErrorKind::Invalid);
                assert_eq!(before.multi_get(&followed, ["k"]).map_err(kind).unwrap_err(), ErrorKind::Invalid);
                assert_eq!(before.size_of(&followed, "k").map_err(kind).unwrap_err(), ErrorKind::Invalid);
            }
        }
        for snapshot in [after, follower.snapshot()] {
            assert_eq!(snapshot.get(&followed, "k").unwrap().as_deref(), Some(&padded(2, 800)[..]));
            let keys: Vec<_> = snapshot.keys(&followed).map(|key| key.unwrap().to_vec()).collect();
            assert_eq!(keys, [&b"only 2"[..], b"k"]);
        }
    }
}

/// Regression: a pool that was built late had the limit of the writer at that time, not that of a follower.
#[test]
fn the_limit_of_a_pool_is_raised_later() {
    let machine = MemFs::new();
    let writer = open_writer(&machine);
    let p = open_reversed(&writer, pool_options(1 << 20)).unwrap();
    p.insert("k", "1").unwrap();
    let follower = follow(&machine).open_follower().unwrap();
    let followed = open_reversed(&follower, pool_options(1 << 20)).unwrap();
    p.set_options(pool_options(2 << 20)).unwrap();
    for n in 0..150 {
        p.insert(format!("{n}"), padded(n, 10_000)).unwrap();
    }
    assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
    assert_eq!(followed.len().unwrap(), 151);
    assert_eq!(text(&followed, "k").as_deref(), Some("1"));
}

/// Regression: a pool of a follower kept every expired record, and every replaced version after a snapshot had ended.
#[test]
fn a_pool_of_a_follower_drops_what_has_expired() {
    let (machine, env) = (MemFs::new(), TestEnv::new(1));
    let open = || config(Arc::new(machine.clone())).env(Arc::new(env.clone()));
    let writer = open().open().unwrap();
    let options = pool_options(32 << 20).default_ttl(Duration::from_secs(60));
    let p = writer.open_partition("p", options).unwrap();
    let follower = open().open_follower().unwrap();
    follower.catch_up().unwrap();
    let followed = follower.partition("p").unwrap();
    let records = |p: &Partition| p.metrics().pool.unwrap().records;
    for round in 0..20 {
        for n in 0..200 {
            p.insert(format!("{round} {n}"), padded(n, 100)).unwrap();
        }
        env.advance(Duration::from_secs(61));
        while writer.step().unwrap() {}
        follower.catch_up().unwrap();
        let (written, followed) = (records(&p), records(&followed));
        assert!(followed <= written.max(400), "{followed} records in the follower, {written} in the writer");
    }
    let version_bytes = |p: &Partition| p.metrics().pool.unwrap().version_bytes;
    let snapshot = follower.snapshot();
    for n in 0..20_000u32 {
        p.insert("k", n.to_be_bytes()).unwrap();
    }
    follower.catch_up().unwrap();
    let kept = version_bytes(&followed);
    drop(snapshot);
    follower.catch_up().unwrap();
    assert!(version_bytes(&followed) <= kept / 2, "{kept} bytes of versions, then {}", version_bytes(&followed));
}

/// A pool is built late while commits are held, because the tables of an ingest before them cannot be opened.
#[test]
fn a_pool_is_built_while_commits_are_held() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = open_writer(&machine);
    let q = partition(&writer, "q");
    let p = open_reversed(&writer, pool_options(8 << 20)).unwrap();
    ["a", "b", "c"].iter().for_each(|key| p.insert(key, "1").unwrap());
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    q.ingest([("k", "ingested")]).unwrap();
    p.remove_range("b"..="a").unwrap();
    p.insert("b", "2").unwrap();
    p.remove("c").unwrap();
    p.insert("d", "2").unwrap();
    faults.inject(FaultPlan::new(OpKind::Open, 1, Fault::Error(std::io::ErrorKind::Other)).in_path(".sst").forever());
    follower.catch_up().unwrap_err();
    let before = follower.snapshot();
    let followed = open_reversed(&follower, pool_options(8 << 20)).unwrap();
    let check = |wanted: [Option<&str>; 4]| {
        let keys = ["a", "b", "c", "d"];
        assert_eq!(keys.map(|key| text(&followed, key)), wanted.map(|value| value.map(String::from)));
        let found = followed.multi_get(keys).unwrap();
        assert_eq!(
            found.iter().map(|value| value.as_deref()).collect::<Vec<_>>(),
            wanted.map(|v| v.map(str::as_bytes))
        );
        let pairs = followed.iter().map(|pair| pair.unwrap().0.to_vec()).collect::<Vec<_>>();
        let wanted = keys.iter().zip(wanted).rev().filter(|(_, value)| value.is_some());
        assert_eq!(pairs, wanted.map(|(key, _)| key.as_bytes()).collect::<Vec<_>>());
    };
    let old = [Some("1"), Some("1"), Some("1"), None];
    assert!(follower.partition("q").unwrap().get("k").unwrap().is_none(), "the commits behind the ingest are held");
    check(old);
    faults.clear_faults();
    follower.catch_up().unwrap();
    check([None, Some("2"), None, Some("2")]);
    assert_eq!(before.get(&followed, "a").unwrap().as_deref(), Some(&b"1"[..]));
    assert_eq!(before.len(&followed).unwrap(), 3);
}

/// Regression: after the writer was opened again, a range delete in a pool waited for the manifest of the new open, and
/// that for the commits behind the range delete. The follower read the database again, which a pool without a tree does
/// not survive, and was stale for good.
#[test]
fn a_range_delete_does_not_wait_for_a_new_open() {
    let machine = MemFs::new();
    let open = || follow(&machine).wal_retention(Duration::from_secs(3600)).open().unwrap();
    let pool = |db: &Database| db.open_partition("pool", pool_options(8 << 20)).unwrap();
    let (writer, options) = (open(), pool_options(8 << 20));
    pool(&writer).insert("k", "1").unwrap();
    open_reversed(&writer, options.clone()).unwrap().insert("k", "1").unwrap();
    let follower = follow(&machine).open_follower().unwrap();
    drop(writer);
    let writer = open();
    pool(&writer).remove_range("k"..="k").unwrap();
    let p = open_reversed(&writer, options.clone()).unwrap();
    p.insert("k", "2").unwrap();
    p.flush().unwrap();
    assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
    assert_eq!(text(&follower.partition("pool").unwrap(), "k"), None);
    assert_eq!(text(&open_reversed(&follower, options).unwrap(), "k").as_deref(), Some("2"));
}

/// Regression: a range delete in a pool waited for the install of a new partition, and the install for the flush of
/// another pool behind the range delete. The follower read the database again, and was stale for good if that pool has
/// no tree yet.
#[test]
fn a_range_delete_does_not_wait_for_a_new_partition() {
    for flushes_unbuilt in [false, true] {
        let machine = MemFs::new();
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let open = || follow(&machine).wal_retention(Duration::from_secs(3600)).open().unwrap();
        let pool = |db: &Database| db.open_partition("pool", pool_options(8 << 20)).unwrap();
        let (writer, options) = (open(), pool_options(8 << 20));
        ["k", "l", "m"].iter().for_each(|key| pool(&writer).insert(key, "1").unwrap());
        open_reversed(&writer, options.clone()).unwrap().insert("k", "1").unwrap();
        let flushed = partition(&writer, "flushed");
        let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
        let followed = follower.partition("pool").unwrap();
        flushed.insert("a", "1").unwrap();
        flushed.flush().unwrap();
        writer.open_partition("new", Default::default()).unwrap().insert("a", "1").unwrap();
        // Puts between and behind the range deletes, of covered keys too.
        pool(&writer).remove_range("k"..="l").unwrap();
        pool(&writer).insert("l", "2").unwrap();
        pool(&writer).remove_range("l".."m").unwrap();
        ["kk", "l"].iter().for_each(|key| pool(&writer).insert(key, "3").unwrap());
        let p = open_reversed(&writer, options.clone()).unwrap();
        p.insert("k", "2").unwrap();
        if flushes_unbuilt {
            p.flush().unwrap();
        }
        let values = |read: &dyn Fn(&str) -> Result<Option<Slice>>| {
            ["k", "kk", "l", "m"].map(|key| read(key).unwrap().map(|value| value.to_vec()))
        };
        let some = |value: &str| Some(value.as_bytes().to_vec());
        let old = [some("1"), None, some("1"), some("1")];
        // The install fails: the commits are in the pool, and not visible.
        let in_tables = FaultPlan::new(OpKind::Open, 1, Fault::Error(std::io::ErrorKind::Other)).in_path(".sst");
        faults.inject(in_tables.forever());
        follower.catch_up().unwrap_err();
        assert_eq!(values(&|key| followed.get(key)), old, "{flushes_unbuilt}");
        assert_eq!(followed.iter().count(), 3);
        let before = follower.snapshot();
        faults.clear_faults();
        assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
        for _ in 0..2 {
            let now = values(&|key| followed.get(key));
            assert_eq!(now, [None, some("3"), some("3"), some("1")], "{flushes_unbuilt}");
            assert_eq!(values(&|key| before.get(&followed, key)), old, "{flushes_unbuilt}");
            let keys: Vec<_> = followed.iter().map(|pair| pair.unwrap().0.to_vec()).collect();
            assert_eq!(keys, [&b"kk"[..], b"l", b"m"]);
            pool(&writer).insert("m", "1").unwrap();
            follower.catch_up().unwrap();
        }
        assert_eq!(text(&follower.partition("new").unwrap(), "a").as_deref(), Some("1"));
        assert_eq!(text(&open_reversed(&follower, options).unwrap(), "k").as_deref(), Some("2"));
    }
}
