//! Merge operators: their names, their failures, and merges of several threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use azekura::testing::{SeededRng, TestEnv};
use azekura::{
    CompactionStrategy, Config, Database, EngineType, Error, ErrorKind, KvSeparationOptions, LeveledOptions,
    MergeOperator, Partition, PartitionComponents, PartitionCreateOptions, PmemOptions, Result, merge_operators,
};

use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::TestDir;

const WORKS: u8 = 0;
const FAILS: u8 = 1;
const PANICS: u8 = 2;

/// Appends operands. Fails or panics on request, in a full merge only for operands that contain `!`.
#[derive(Default)]
struct Unreliable {
    mode: AtomicU8,
}

impl Unreliable {
    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }
}

impl MergeOperator for Unreliable {
    fn name(&self) -> &str {
        "unreliable"
    }

    fn full_merge(&self, _key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
        if operands.iter().any(|operand| operand.contains(&b'!')) {
            match self.mode.load(Ordering::SeqCst) {
                FAILS => return Err(Error::invalid("planted")),
                PANICS => panic!("planted"),
                _ => {}
            }
        }
        Ok(existing.into_iter().chain(operands.iter().copied()).flatten().copied().collect())
    }

    fn partial_merge(&self, _key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        match self.mode.load(Ordering::SeqCst) {
            FAILS => None,
            PANICS => panic!("planted"),
            _ => Some(operands.concat()),
        }
    }

    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        match operand {
            b"refused" => Err(Error::corruption("refused")),
            b"panics" => panic!("planted"),
            _ => Ok(()),
        }
    }
}

fn lsm_options() -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().l0_compaction_trigger(2).base_level_size(8 << 10);
    let leveled = leveled.target_file_size(4 << 10).level_size_multiplier(2);
    let separation = KvSeparationOptions::default().separation_threshold(60).automatic_gc(None);
    PartitionCreateOptions::default()
        .block_size(256)
        .max_memtable_size(8 << 10)
        .compaction_strategy(CompactionStrategy::Leveled(leveled))
        .with_kv_separation(separation)
}

fn pool_options() -> PartitionCreateOptions {
    PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(16 << 20)))
}

fn open_database(place: &TestDir, env: &TestEnv) -> Database {
    Config::new(&place.dir).fs(Arc::clone(&place.fs)).env(Arc::new(env.clone())).workers(0).open().unwrap()
}

fn with_operator(operator: &Arc<Unreliable>) -> PartitionComponents {
    PartitionComponents::default().merge_operator(Arc::clone(operator) as _)
}

fn contents(partition: &Partition) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    partition.iter().map(|pair| pair.unwrap()).map(|(key, value)| (text(&key), text(&value))).collect()
}

#[test]
fn operator_name_is_checked_at_every_open() {
    for options in [lsm_options(), pool_options()] {
        let (place, env) = (TestDir::in_memory(), TestEnv::new(1));
        let operator = Arc::default();
        let kind = |opened: Result<Partition>| opened.unwrap_err().kind();
        let max = || PartitionComponents::default().merge_operator(merge_operators::max());
        {
            let db = open_database(&place, &env);
            let p = db.open_partition_with("p", options.clone(), with_operator(&operator)).unwrap();
            p.merge("a", "1").unwrap();
            db.open_partition_with("shipped", options.clone(), max()).unwrap().merge("a", "1").unwrap();
            db.open_partition("none", options.clone()).unwrap();
            db.close().unwrap();
        }
        let db = open_database(&place, &env);
        assert_eq!(kind(db.partition("p")), ErrorKind::Invalid, "the operator was not given yet");
        assert_eq!(kind(db.open_partition("p", options.clone())), ErrorKind::Invalid);
        assert_eq!(kind(db.open_partition_with("p", options.clone(), max())), ErrorKind::Invalid);
        assert_eq!(kind(db.open_partition("shipped", options.clone())), ErrorKind::Invalid);
        db.step().unwrap(); // background work needs no operator
        let p = db.open_partition_with("p", options.clone(), with_operator(&operator)).unwrap();
        p.merge("a", "2").unwrap();
        assert_eq!(contents(&p), [("a".into(), "12".into())]);
        let shipped = db.partition("shipped").unwrap();
        shipped.merge("a", "2").unwrap();
        assert_eq!(shipped.get("a").unwrap().unwrap(), "2");
        let none = db.partition("none").unwrap();
        assert_eq!(none.merge("a", "1").unwrap_err().kind(), ErrorKind::Invalid);
        assert!(none.is_empty().unwrap());
        drop((p, shipped, none));
        db.close().unwrap();
        let config = Config::new(&place.dir).fs(Arc::clone(&place.fs)).env(Arc::new(env.clone()));
        let db = config.open_read_only().unwrap();
        assert_eq!(kind(db.open_partition_with("none", options.clone(), max())), ErrorKind::Invalid, "it has none");
        assert_eq!(db.partition("shipped").unwrap().get("a").unwrap().unwrap(), "2");
        let p = db.open_partition_with("p", options, with_operator(&operator)).unwrap();
        assert_eq!(p.merge("a", "3").unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(contents(&p), [("a".into(), "12".into())]);
    }
}

#[test]
fn invalid_names_and_operands_are_refused() {
    struct Named(String);
    impl MergeOperator for Named {
        fn name(&self) -> &str {
            &self.0
        }
        fn full_merge(&self, _: &[u8], _: Option<&[u8]>, _: &[&[u8]]) -> Result<Vec<u8>> {
            Ok(Vec::new())
        }
    }
    let (place, env, operator) = (TestDir::in_memory(), TestEnv::new(2), Arc::default());
    let db = open_database(&place, &env);
    for name in ["", "azekura.mine", &"n".repeat(256)] {
        let components = PartitionComponents::default().merge_operator(Arc::new(Named(name.to_owned())));
        let opened = db.open_partition_with("p", lsm_options(), components);
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Invalid, "{name:?}");
    }
    assert!(db.list_partitions().is_empty());
    for (name, options) in [("lsm", lsm_options()), ("pool", pool_options())] {
        let p = db.open_partition_with(name, options, with_operator(&operator)).unwrap();
        for operand in ["refused", "panics"] {
            assert_eq!(p.merge("a", operand).unwrap_err().kind(), ErrorKind::Invalid);
            let mut batch = db.batch();
            batch.insert(&p, "b", "1");
            batch.merge(&p, "a", operand);
            assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Invalid);
            let mut tx = db.transaction();
            assert_eq!(tx.merge(&p, "a", operand).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!(p.merge([0; 65_536], "1").unwrap_err().kind(), ErrorKind::Invalid);
        assert!(p.is_empty().unwrap());
    }
}

/// Checks all kinds of reads while the operator fails for the key `b` only.
fn check_failing_reads(db: &Database, p: &Partition) {
    let failed = |error: Error| assert_eq!(error.kind(), ErrorKind::MergeFailed, "{error}");
    failed(p.get("b").unwrap_err());
    failed(p.get_with("b", |_| ()).unwrap_err());
    failed(p.size_of("b").unwrap_err());
    failed(p.contains_key("b").unwrap_err());
    failed(p.multi_get(["a", "b"]).unwrap_err());
    failed(p.iter().find_map(Result::err).unwrap());
    failed(p.iter().rev().find_map(Result::err).unwrap());
    failed(db.snapshot().get(p, "b").unwrap_err());
    failed(db.transaction().get(p, "b").unwrap_err());
    for pair in ["a", "c"] {
        assert_eq!(p.get(pair).unwrap().unwrap(), "1", "another key");
    }
    assert_eq!(p.iter().next().unwrap().unwrap().0, "a");
    assert_eq!(p.iter().next_back().unwrap().unwrap().0, "c");
    for iter in [p.range(.."b"), p.range("c"..)] {
        assert_eq!(iter.inspect(|pair| assert!(pair.is_ok())).count(), 1, "the key is beyond the bounds");
    }
    let inside = p.range("a".."b").rev().chain(p.range("c"..="d").rev());
    assert_eq!(inside.inspect(|pair| assert!(pair.is_ok())).count(), 2);
}

#[test]
fn failing_operator_keeps_operands() {
    for mode in [FAILS, PANICS] {
        let (place, env, operator) = (TestDir::in_memory(), TestEnv::new(3), Arc::<Unreliable>::default());
        let db = open_database(&place, &env);
        let p = db.open_partition_with("p", lsm_options(), with_operator(&operator)).unwrap();
        for (key, value) in [("a", "1"), ("b", "1"), ("c", "1")] {
            p.insert(key, value).unwrap();
        }
        operator.set(mode);
        p.merge("b", "!2").unwrap();
        p.merge("b", "3").unwrap();
        check_failing_reads(&db, &p);
        p.flush().unwrap();
        check_failing_reads(&db, &p);
        p.merge("b", "!4").unwrap();
        p.flush().unwrap();
        p.major_compact().unwrap();
        check_failing_reads(&db, &p);
        operator.set(WORKS);
        assert_eq!(p.get("b").unwrap().unwrap(), "1!23!4");
        p.major_compact().unwrap();
        operator.set(mode);
        p.merge("b", "!5").unwrap();
        check_failing_reads(&db, &p);
        p.insert("b", "new").unwrap(); // the failing operands are not needed any more
        let all = [("a", "1"), ("b", "new"), ("c", "1")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(contents(&p), all);
        assert_eq!(p.iter().rev().inspect(|pair| assert!(pair.is_ok())).count(), 3);
        p.major_compact().unwrap();
        assert_eq!(contents(&p), all);
    }
}

#[test]
fn failing_operator_changes_no_pool() {
    for mode in [FAILS, PANICS] {
        let (place, env, operator) = (TestDir::in_memory(), TestEnv::new(4), Arc::<Unreliable>::default());
        let db = open_database(&place, &env);
        let p = db.open_partition_with("p", pool_options(), with_operator(&operator)).unwrap();
        p.insert("a", "1").unwrap();
        operator.set(mode);
        assert_eq!(p.merge("a", "!2").unwrap_err().kind(), ErrorKind::MergeFailed);
        let mut batch = db.batch();
        batch.insert(&p, "b", "1");
        batch.merge(&p, "a", "!3");
        assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::MergeFailed);
        let mut tx = db.transaction();
        tx.merge(&p, "a", "!4").unwrap();
        assert_eq!(tx.get(&p, "a").unwrap_err().kind(), ErrorKind::MergeFailed);
        assert_eq!(tx.commit().unwrap_err().kind(), ErrorKind::MergeFailed);
        assert_eq!(contents(&p), [("a".into(), "1".into())]);
        p.merge("a", "5").unwrap();
        assert_eq!(p.get("a").unwrap().unwrap(), "15");
    }
}

/// Flushes and compactions run while the operator fails or works, snapshots are taken and released: the values are
/// those of a map.
#[test]
fn values_survive_failures_of_maintenance() {
    for seed in test_seeds(8) {
        let (place, env, operator) = (TestDir::in_memory(), TestEnv::new(seed), Arc::<Unreliable>::default());
        let db = open_database(&place, &env);
        let p = db.open_partition_with("p", lsm_options(), with_operator(&operator)).unwrap();
        let mut rng = SeededRng::new(seed);
        let (mut model, mut snapshots) = (BTreeMap::<String, String>::new(), Vec::new());
        for n in 0..600 {
            let key = format!("key {}", rng.below(12));
            match rng.below(20) {
                0..=10 => {
                    let operand = format!("{}{n},", if rng.chance_one_in(3) { "!" } else { "" });
                    p.merge(&key, &operand).unwrap();
                    model.entry(key).or_default().push_str(&operand);
                }
                11 | 12 => {
                    let value = format!("{n}:{}", "v".repeat(rng.below(100) as usize));
                    p.insert(&key, &value).unwrap();
                    model.insert(key, value);
                }
                13 => {
                    p.remove(&key).unwrap();
                    model.remove(&key);
                }
                14 => {
                    let end = format!("key {}", rng.below(12));
                    if key < end {
                        p.remove_range(key.clone()..end.clone()).unwrap();
                        model.retain(|k, _| *k < key || *k >= end);
                    }
                }
                15 => snapshots.push((db.snapshot(), model.clone())),
                16 if !snapshots.is_empty() => drop(snapshots.swap_remove(rng.below(snapshots.len()))),
                _ => {
                    operator.set(rng.pick(&[WORKS, FAILS, PANICS]));
                    match rng.below(8) {
                        0..=3 => p.flush().unwrap(),
                        4 => p.major_compact().unwrap(),
                        _ => _ = db.step().unwrap(),
                    }
                    operator.set(WORKS);
                }
            }
            let expected: Vec<(String, String)> = model.clone().into_iter().collect();
            assert_eq!(contents(&p), expected, "seed {seed}, operation {n}");
            if n % 20 == 0 {
                for (snapshot, model) in &snapshots {
                    let seen = snapshot.iter(&p).rev().map(|pair| pair.unwrap());
                    let wanted = model.iter().rev();
                    assert!(seen.eq(wanted.map(|(key, value)| (key.as_str().into(), value.as_str().into()))));
                }
            }
        }
    }
}

#[test]
fn merges_of_threads_are_all_counted() {
    const THREADS: u64 = 4;
    const MERGES: u64 = 300;
    for options in [lsm_options(), pool_options()] {
        let place = TestDir::on_disk();
        let db = Config::new(&place.dir).open().unwrap();
        let components = PartitionComponents::default().merge_operator(merge_operators::u64_add());
        let p = db.open_partition_with("p", options, components).unwrap();
        let one = 1u64.to_le_bytes();
        std::thread::scope(|threads| {
            for thread in 0..THREADS {
                let (db, p) = (&db, &p);
                threads.spawn(move || {
                    for n in 0..MERGES {
                        match (thread + n) % 3 {
                            0 => p.merge("n", one).unwrap(),
                            1 => {
                                let mut batch = db.batch();
                                batch.merge(p, "n", one);
                                batch.merge(p, format!("{thread}"), one);
                                batch.commit().unwrap();
                            }
                            _ => {
                                let mut tx = db.transaction();
                                tx.merge(p, "n", one).unwrap();
                                tx.commit().unwrap(); // no conflict, because nothing was read
                            }
                        }
                        if n % 50 == 0 {
                            p.flush().unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(p.get("n").unwrap().unwrap(), (THREADS * MERGES).to_le_bytes()[..]);
        drop(p);
        db.close().unwrap();
        let db = Config::new(&place.dir).open().unwrap();
        assert_eq!(db.partition("p").unwrap().get("n").unwrap().unwrap(), (THREADS * MERGES).to_le_bytes()[..]);
    }
}

/// Many merges of one key in a batch: a pool gets one value.
#[test]
fn batch_merges_of_a_key_become_one_value() {
    let (place, env, operator) = (TestDir::in_memory(), TestEnv::new(5), Arc::<Unreliable>::default());
    let db = open_database(&place, &env);
    let p = db.open_partition_with("p", pool_options(), with_operator(&operator)).unwrap();
    p.insert("a", vec![b'x'; 100_000]).unwrap();
    let mut batch = db.batch();
    for n in 0..1_000 {
        batch.merge(&p, "a", format!("{n}"));
        batch.merge(&p, "b", "1");
    }
    batch.remove(&p, "c");
    batch.merge(&p, "c", "2");
    batch.merge(&p, "d", "1");
    batch.remove(&p, "d");
    batch.commit().unwrap();
    assert_eq!((p.size_of("a").unwrap(), p.size_of("b").unwrap()), (Some(102_890), Some(1_000)));
    assert_eq!((p.get("c").unwrap().unwrap(), p.get("d").unwrap()), ("2".into(), None));
    assert!(db.metrics().user_bytes < 300_000, "{} bytes were written", db.metrics().user_bytes);
}

/// One key whose operator fails ends an iteration, as documented. All other keys can be read: by `get`, behind the key
/// by a seek, and from the other end.
#[test]
fn failing_operand_hides_no_other_key() {
    let (dir, operator) = (TestDir::in_memory(), Arc::new(Unreliable::default()));
    let db = Config::new(&dir.dir).fs(dir.fs.clone()).workers(0).open().unwrap();
    let components = PartitionComponents::default().merge_operator(operator.clone());
    let p = db.open_partition_with("p", lsm_options(), components).unwrap();
    for key in ["a", "b", "c", "d"] {
        p.merge(key, if key == "b" { "!" } else { "ok" }).unwrap();
    }
    operator.set(FAILS);
    for _in_memory in [true, false] {
        assert_eq!(p.get("b").unwrap_err().kind(), ErrorKind::MergeFailed);
        assert_eq!((p.get("a").unwrap().unwrap(), p.get("c").unwrap().unwrap()), ("ok".into(), "ok".into()));
        let keys = |iter: azekura::Iter| iter.map(|pair| pair.unwrap().0).collect::<Vec<_>>();
        let mut iter = p.iter();
        assert_eq!(iter.next().unwrap().unwrap().0, "a");
        assert_eq!(iter.next().unwrap().unwrap_err().kind(), ErrorKind::MergeFailed);
        assert!(iter.next().is_none(), "an error ends the iteration");
        iter.seek("c");
        assert_eq!(keys(iter), ["c", "d"], "a seek begins it again");
        assert_eq!(keys(p.range("b\0"..)), ["c", "d"]);
        let mut iter = p.iter();
        assert_eq!(
            (iter.next_back().unwrap().unwrap().0, iter.next_back().unwrap().unwrap().0),
            ("d".into(), "c".into())
        );
        assert_eq!(iter.next_back().unwrap().unwrap_err().kind(), ErrorKind::MergeFailed);
        assert_eq!(p.range(.."b").next_back().unwrap().unwrap().0, "a");
        p.flush().unwrap();
    }
    operator.set(WORKS);
    assert_eq!(p.get("b").unwrap().unwrap(), "!");
}

/// Regression: an iterator of a transaction that has removed everything up to the last key never returned if that key
/// has a value above an operand. It moved to the last key again and again.
#[test]
fn transaction_that_removes_operands_ends_scans() {
    let db = azekura::Config::new("/db").fs(Arc::new(azekura::testing::MemFs::new())).workers(0).open().unwrap();
    let components = azekura::PartitionComponents::default().merge_operator(azekura::merge_operators::append(""));
    let part = db.open_partition_with("p", Default::default(), components).unwrap();
    part.insert("a", "1").unwrap();
    part.merge("z", "2").unwrap();
    part.insert("z", "3").unwrap();
    let mut tx = db.transaction();
    tx.remove_range(&part, "b"..).unwrap();
    let pairs: Vec<_> = tx.iter(&part).map(|pair| pair.unwrap().0.to_vec()).collect();
    assert_eq!(pairs, [b"a".to_vec()]);
    assert_eq!(tx.iter(&part).rev().count(), 1);
}

/// Regression: a step failed if the operator failed for a key that the iterator does not read: the one behind the key
/// to which the back was sought, or one behind the other end.
#[test]
fn operands_beyond_an_iterator_may_fail() {
    let (dir, operator) = (TestDir::in_memory(), Arc::new(Unreliable::default()));
    let db = Config::new(&dir.dir).fs(dir.fs.clone()).workers(0).open().unwrap();
    let p = db.open_partition_with("p", lsm_options().max_memtable_size(1 << 20), with_operator(&operator)).unwrap();
    for (key, operand) in [("a", "ok"), ("b", "ok"), ("d", "!"), ("e", "ok")] {
        p.merge(key, operand).unwrap();
    }
    for n in 10..90 {
        p.insert(format!("c{n}"), "deleted").unwrap();
        p.remove(format!("c{n}")).unwrap();
    }
    operator.set(FAILS);
    for _in_memory in [true, false] {
        for key in ["b", "c", "c89"] {
            for _remembers_deleted_keys in [false, true] {
                let mut iter = p.iter();
                iter.seek_back(key);
                assert_eq!(iter.next_back().unwrap().unwrap().0, "b", "{key}");
                assert_eq!(iter.next_back().unwrap().unwrap().0, "a");
                assert!(iter.next_back().is_none());
            }
        }
        let mut iter = p.iter();
        iter.seek_back("c89");
        let keys: Vec<_> = iter.by_ref().map(|pair| pair.unwrap().0).collect();
        assert_eq!(keys, ["a", "b"], "the front ends at the back");
        iter.seek("d\0");
        iter.seek_back("f");
        assert_eq!(iter.next_back().unwrap().unwrap().0, "e");
        assert!(iter.next_back().is_none(), "the back ends at the front");
        iter.seek("c");
        assert_eq!(iter.next().unwrap().unwrap_err().kind(), ErrorKind::MergeFailed);
        iter.seek_back("d");
        assert_eq!(iter.next_back().unwrap().unwrap_err().kind(), ErrorKind::MergeFailed);
        p.flush().unwrap();
    }
}

/// Regression: an iterator of a transaction failed if the operator failed for a key that the transaction had written
/// anew, and before it returned the written keys before such a key.
#[test]
fn own_writes_replace_failing_operands() {
    let (dir, operator) = (TestDir::in_memory(), Arc::new(Unreliable::default()));
    let db = Config::new(&dir.dir).fs(dir.fs.clone()).workers(0).open().unwrap();
    let p = db.open_partition_with("p", lsm_options().max_memtable_size(1 << 20), with_operator(&operator)).unwrap();
    for n in 100..300 {
        p.insert(format!("b{n}"), "deleted").unwrap();
        p.remove(format!("b{n}")).unwrap();
    }
    for (key, operand) in [("a", "1"), ("c", "!"), ("d", "2")] {
        p.merge(key, operand).unwrap();
    }
    let (kept, pairs) = (db.snapshot(), |iter: azekura::Iter| {
        iter.map(|pair| pair.unwrap()).map(|(key, value)| [&*key, b"=", &*value].concat()).collect::<Vec<_>>()
    });
    operator.set(FAILS);
    for _in_memory in [true, false] {
        let mut tx = db.transaction();
        tx.insert(&p, "b", "own").unwrap();
        let mut iter = tx.iter(&p);
        assert_eq!(iter.next().unwrap().unwrap().0, "a");
        assert_eq!(iter.next().unwrap().unwrap().0, "b");
        assert_eq!(iter.next().unwrap().unwrap_err().kind(), ErrorKind::MergeFailed);
        iter.seek_back("b200");
        assert_eq!(iter.next_back().unwrap().unwrap().0, "b");
        for own in ["put", "removed", "range removed", "merged"] {
            let before = tx.savepoint();
            match own {
                "put" => tx.insert(&p, "c", "3").unwrap(),
                "removed" => tx.remove(&p, "c").unwrap(),
                "range removed" => tx.remove_range(&p, "b1".."d").unwrap(),
                _ => {
                    tx.remove(&p, "c").unwrap();
                    tx.merge(&p, "c", "3").unwrap();
                }
            }
            let mut wanted: Vec<_> = ["a=1", "b=own", "c=3", "d=2"].map(|pair| pair.as_bytes().to_vec()).into();
            if own.ends_with("removed") {
                wanted.remove(2);
            }
            assert_eq!(pairs(tx.iter(&p)), wanted, "{own}");
            wanted.reverse();
            let reversed = tx.iter(&p).rev().map(|pair| pair.unwrap());
            let reversed: Vec<_> = reversed.map(|(key, value)| [&*key, b"=", &*value].concat()).collect();
            assert_eq!(reversed, wanted, "{own}");
            tx.rollback_to(&before).unwrap();
        }
        p.flush().unwrap();
    }
    drop(kept);
}
