//! Compaction filters: what they see, what becomes of their decisions, and how they fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use azekura::testing::{SeededRng, TestEnv};
use azekura::{
    CompactionFilter, CompactionStrategy, Config, Database, EngineType, Error, ErrorKind, FilterContext,
    FilterDecision, FilterValue, KvSeparationOptions, LeveledOptions, Partition, PartitionComponents,
    PartitionCreateOptions, PmemOptions, Result,
};

use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::TestDir;

/// Removes values that begin with `r`, and replaces those that begin with `s` by [`replaced`]. Keeps all others.
#[derive(Default)]
struct ByFirstByte {
    calls: AtomicUsize,
    panics: AtomicBool,
    fails: AtomicBool,
}

fn replaced(value: &[u8]) -> Vec<u8> {
    let mut new = value.to_vec();
    new[0] = b'S';
    new.extend_from_slice(b" replaced");
    new
}

/// What becomes of a value once a filter was asked about it.
fn filtered(value: &[u8]) -> Option<Vec<u8>> {
    match value.first() {
        Some(b'r') => None,
        Some(b's') => Some(replaced(value)),
        _ => Some(value.to_vec()),
    }
}

impl CompactionFilter for ByFirstByte {
    fn name(&self) -> &str {
        "by first byte"
    }

    fn filter(&self, context: &FilterContext<'_>, key: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        assert!(context.partition == "p" && key.starts_with(b"key") && (1..=6).contains(&context.level));
        assert!(!self.panics.load(Ordering::SeqCst), "planted");
        if self.fails.load(Ordering::SeqCst) {
            return Err(Error::io("filter", &std::io::Error::other("planted")));
        }
        let size = value.size() as usize;
        assert_eq!(value.read()?.len(), size);
        Ok(match value.inline().unwrap().first() {
            Some(b'r') => FilterDecision::Remove,
            Some(b's') => FilterDecision::Replace(replaced(value.read()?)),
            _ => FilterDecision::Keep,
        })
    }
}

fn options() -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().l0_compaction_trigger(2).base_level_size(8 << 10);
    let leveled = leveled.target_file_size(4 << 10).level_size_multiplier(2);
    let separation = KvSeparationOptions::default().separation_threshold(200).automatic_gc(None);
    PartitionCreateOptions::default()
        .block_size(256)
        .max_memtable_size(8 << 10)
        .compaction_strategy(CompactionStrategy::Leveled(leveled))
        .with_kv_separation(separation)
}

fn database(place: &TestDir, env: &TestEnv) -> Database {
    Config::new(&place.dir).fs(Arc::clone(&place.fs)).env(Arc::new(env.clone())).workers(0).open().unwrap()
}

fn open(db: &Database, filter: &Arc<ByFirstByte>) -> Partition {
    let components = PartitionComponents::default().compaction_filter(Arc::clone(filter) as _);
    db.open_partition_with("p", options(), components).unwrap()
}

fn contents(partition: &Partition) -> BTreeMap<Vec<u8>, Vec<u8>> {
    partition.iter().map(|pair| pair.unwrap()).map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

#[test]
fn snapshots_keep_what_the_filter_removes() {
    let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(1), Arc::default());
    let db = database(&place, &env);
    let partition = open(&db, &filter);
    for (key, value) in [("key 1", "keep"), ("key 2", "remove"), ("key 3", "shorten")] {
        partition.insert(key, value).unwrap();
    }
    let snapshot = db.snapshot();
    partition.major_compact().unwrap();
    assert_eq!(filter.calls.load(Ordering::SeqCst), 0, "the snapshot needs every record");
    assert_eq!(partition.len().unwrap(), 3);
    assert_eq!(snapshot.get(&partition, "key 2").unwrap().unwrap(), "remove");
    drop(snapshot);
    partition.major_compact().unwrap();
    assert_eq!(filter.calls.load(Ordering::SeqCst), 3, "each record is in one table");
    assert_eq!(partition.len().unwrap(), 2);
    assert_eq!(partition.get("key 2").unwrap(), None);
    assert_eq!(partition.get("key 3").unwrap().unwrap(), "Shorten replaced");
}

#[test]
fn major_compact_filters_the_bottom_level() {
    let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(2), Arc::<ByFirstByte>::default());
    let db = database(&place, &env);
    let partition = db.open_partition("p", options()).unwrap();
    for n in 0..500 {
        partition.insert(format!("key {n:04}"), if n % 2 == 0 { "remove" } else { "keep" }).unwrap();
    }
    partition.major_compact().unwrap();
    drop((partition, db));
    let db = database(&place, &env);
    let partition = open(&db, &filter);
    partition.major_compact().unwrap();
    assert_eq!((partition.len().unwrap(), filter.calls.load(Ordering::SeqCst)), (250, 500));
    drop((partition, db));
    // It may be missing: it is not part of the data.
    let db = database(&place, &env);
    let partition = db.open_partition("p", options()).unwrap();
    partition.insert("key 0001", "remove").unwrap();
    partition.major_compact().unwrap();
    assert_eq!(partition.get("key 0001").unwrap().unwrap(), "remove");
}

#[test]
fn new_values_are_separated_by_their_length() {
    let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(3), Arc::default());
    let db = database(&place, &env);
    let partition = open(&db, &filter);
    // 195 bytes are below the threshold, and 204 are not.
    partition.insert("key 1", [b's'; 195]).unwrap();
    partition.insert("key 2", [b's'; 300]).unwrap();
    partition.insert("key 3", [b'r'; 400]).unwrap();
    partition.flush().unwrap();
    assert_eq!(partition.metrics().blob_files.iter().map(|file| file.values).sum::<u64>(), 2);
    partition.major_compact().unwrap();
    for (key, len) in [("key 1", 195), ("key 2", 300)] {
        assert_eq!(partition.get(key).unwrap().unwrap(), replaced(&vec![b's'; len]));
    }
    let referenced: u64 = partition.metrics().blob_files.iter().map(|file| file.referenced_values).sum();
    assert_eq!((partition.len().unwrap(), referenced), (2, 2));
    drop((partition, db));
    let partition = open(&database(&place, &env), &filter);
    assert_eq!(partition.get("key 1").unwrap().unwrap(), replaced(&[b's'; 195]));
}

#[test]
fn error_of_filter_keeps_data() {
    let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(4), Arc::<ByFirstByte>::default());
    let db = database(&place, &env);
    let partition = open(&db, &filter);
    partition.insert("key 1", "remove").unwrap();
    partition.insert("key 2", "keep").unwrap();
    filter.fails.store(true, Ordering::SeqCst);
    assert_eq!(partition.major_compact().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(partition.len().unwrap(), 2);
    partition.insert("key 3", "writes go on").unwrap();
    filter.fails.store(false, Ordering::SeqCst);
    partition.major_compact().unwrap();
    assert_eq!(partition.len().unwrap(), 2);
}

#[test]
fn panic_of_filter_poisons_writes_only() {
    let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(5), Arc::<ByFirstByte>::default());
    let db = database(&place, &env);
    let partition = open(&db, &filter);
    partition.insert("key 1", "remove").unwrap();
    filter.panics.store(true, Ordering::SeqCst);
    assert_eq!(partition.major_compact().unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(partition.insert("key 2", "").unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(partition.get("key 1").unwrap().unwrap(), "remove");
    drop((partition, db));
    filter.panics.store(false, Ordering::SeqCst);
    let partition = open(&database(&place, &env), &filter);
    partition.major_compact().unwrap();
    assert!(partition.is_empty().unwrap());
}

#[test]
fn pool_and_empty_name_are_invalid() {
    struct Unnamed;
    impl CompactionFilter for Unnamed {
        fn name(&self) -> &str {
            ""
        }
        fn filter(&self, _: &FilterContext<'_>, _: &[u8], _: &mut FilterValue<'_>) -> Result<FilterDecision> {
            Ok(FilterDecision::Keep)
        }
    }
    let (place, env) = (TestDir::in_memory(), TestEnv::new(6));
    let db = database(&place, &env);
    let filter = |filter: Arc<dyn CompactionFilter>| PartitionComponents::default().compaction_filter(filter);
    let in_memory = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
    let pool = db.open_partition_with("p", in_memory, filter(Arc::new(ByFirstByte::default())));
    assert_eq!(pool.unwrap_err().kind(), ErrorKind::Invalid);
    let unnamed = db.open_partition_with("p", options(), filter(Arc::new(Unnamed)));
    assert_eq!(unnamed.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(db.list_partitions().is_empty());
}

/// The values that a key may have: as written, or as the filter leaves it.
fn check_visible(written: &BTreeMap<Vec<u8>, Vec<u8>>, seen: &mut BTreeMap<Vec<u8>, Vec<u8>>, partition: &Partition) {
    let found = contents(partition);
    for (key, value) in written {
        let now = found.get(key);
        let is_done = now != Some(value) && now == filtered(value).as_ref();
        assert!(now == Some(value) || is_done, "{key:?}: wrote {value:?}, found {now:?}");
        // A decision is final.
        assert!(is_done || !seen.contains_key(key), "{key:?}: {now:?} came back");
        if is_done {
            seen.insert(key.clone(), value.clone());
        }
    }
    assert!(found.keys().all(|key| written.contains_key(key)), "a removed key came back");
}

#[test]
fn random_work_never_undoes_a_decision() {
    for seed in test_seeds(12) {
        let (place, env, filter) = (TestDir::in_memory(), TestEnv::new(seed), Arc::<ByFirstByte>::default());
        let mut rng = SeededRng::new(seed);
        let mut db = database(&place, &env);
        let mut partition = open(&db, &filter);
        let (mut written, mut seen) = (BTreeMap::new(), BTreeMap::new());
        let mut snapshot = None;
        for _ in 0..1_200 {
            let key = format!("key {:03}", rng.below(150)).into_bytes();
            match rng.below(100) {
                0..=69 => {
                    let len = rng.pick(&[1, 20, 150, 195, 250]);
                    let value = vec![rng.pick(b"krs"); len];
                    partition.insert(&key, &value).unwrap();
                    seen.remove(&key);
                    written.insert(key, value);
                }
                70..=79 => {
                    partition.remove(&key).unwrap();
                    seen.remove(&key);
                    written.remove(&key);
                }
                80..=83 => partition.flush().unwrap(),
                84..=93 => drop(db.step().unwrap()),
                94 => partition.major_compact().unwrap(),
                95 | 96 => snapshot = Some((db.snapshot(), contents(&partition))),
                97 => snapshot = None,
                98 => check_visible(&written, &mut seen, &partition),
                _ => {
                    snapshot = None;
                    drop((partition, db));
                    db = database(&place, &env);
                    partition = open(&db, &filter);
                }
            }
            if let Some((snapshot, expected)) = snapshot.as_ref().filter(|_| rng.chance_one_in(40)) {
                let now: BTreeMap<Vec<u8>, Vec<u8>> =
                    snapshot.iter(&partition).map(|p| p.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
                assert!(now == *expected, "seed {seed}: a snapshot changed");
            }
        }
        drop(snapshot);
        partition.major_compact().unwrap();
        let expected: BTreeMap<_, _> =
            written.iter().filter_map(|(key, value)| Some((key.clone(), filtered(value)?))).collect();
        assert!(contents(&partition) == expected, "seed {seed}: after the last compaction");
        assert!(filter.calls.load(Ordering::SeqCst) > 200, "seed {seed}: the filter was hardly asked");
    }
}
