//! WAL and memory stay within their bounds with zero, one and two workers, while partitions are created and deleted,
//! and a listener uses the database at random events.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use azekura::fs::SystemEnv;
use azekura::testing::{MemFs, SeededRng};
use azekura::{
    CompactionStrategy, Config, Database, ErrorKind, Event, KvSeparationOptions, LeveledOptions, Listener, Partition,
    PartitionCreateOptions, Result,
};

use crate::testkit::watchdog::run_with_timeout;

const BUDGET: u64 = 2 << 20;
const MAX_WAL_SIZE: u64 = 256 << 10;
const WAL_SEGMENT_SIZE: u64 = 64 << 10;
const WRITERS: u64 = 2;
const PARTITIONS: u64 = 6;
/// Partitions of no writer: one that is never flushed for its own size, and one of the listener.
const OTHER_PARTITIONS: u64 = 2;
/// Bytes that a partition may have in addition to the budget, as `Config::memory_budget` says.
const PARTITION_MEMORY_ALLOWANCE: u64 = 64 << 10;
/// Maximum single allocation of an active memtable, in bytes.
const MEMTABLE_CHUNK: u64 = 2 << 20;

/// Bound on the bytes of memtables, without those that iterators pin.
const MEMORY_BOUND: u64 =
    BUDGET + (WRITERS * PARTITIONS + OTHER_PARTITIONS) * PARTITION_MEMORY_ALLOWANCE + MEMTABLE_CHUNK;
/// Bound on the bytes of the WAL: its maximum, and the bytes written during the flushes that free it.
const WAL_BOUND: u64 = MAX_WAL_SIZE + 3 * BUDGET;

/// The bound that a run reaches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BoundedResource {
    /// Memtables and the WAL have no limits of their own.
    Memory,
    /// Memtables are small, and compactions are always wanted.
    Wal,
}

/// Reads, writes, opens, deletes, flushes and drops handles at random events.
struct RandomActionListener {
    db: Mutex<Option<Database>>,
    rng: Mutex<SeededRng>,
    actions: AtomicU64,
}

impl RandomActionListener {
    fn run_action(&self, db: &Database, action: u64) -> Result<()> {
        let own = db.open_partition("listener", Default::default())?;
        match action {
            0 => own.insert("k", [0; 2_000]),
            1 => own.flush(),
            2 => db.list_partitions().iter().try_for_each(|name| db.partition(name)?.first_key_value().map(drop)),
            3 => db.delete_partition(own),
            4 => db.step().map(drop),
            _ => own.iter().try_for_each(|pair| pair.map(drop)),
        }
    }
}

impl Listener for RandomActionListener {
    fn on_event(&self, event: &Event) {
        let (acts, action) = {
            let mut random = self.rng.lock().unwrap();
            (random.chance_one_in(3), random.below(6))
        };
        let db = self.db.lock().unwrap().clone();
        let Some(db) = db.filter(|_| acts || matches!(event, Event::Closed)) else { return };
        self.actions.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = self.run_action(&db, action) {
            // Partitions are deleted while this loop reads them.
            assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::NotFound | ErrorKind::Invalid), "{error}");
        }
    }
}

fn random_partition_options(random: &mut SeededRng, bound: BoundedResource) -> PartitionCreateOptions {
    let leveled =
        LeveledOptions::default().l0_compaction_trigger(1).base_level_size(64 << 10).target_file_size(32 << 10);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let options = if bound == BoundedResource::Wal { options.max_memtable_size(32 << 10) } else { options };
    match random.chance_one_in(3) {
        true => options.with_kv_separation(KvSeparationOptions::default().separation_threshold(500)),
        false => options,
    }
}

/// The partitions of a writer, each with its expected content.
type WriterPartitions = BTreeMap<String, (Partition, BTreeMap<u64, u8>)>;

fn check_bounds(db: &Database, workers: usize, bound: BoundedResource) {
    let metrics = db.metrics();
    let (used_bytes, max_bytes) = match bound {
        BoundedResource::Memory => (metrics.active_memtable_bytes + metrics.sealed_memtable_bytes, MEMORY_BOUND),
        BoundedResource::Wal => (metrics.wal_live_bytes, WAL_BOUND),
    };
    assert!(used_bytes <= max_bytes, "{workers} workers: {used_bytes} bytes, bound {max_bytes}");
}

fn run_writer(db: &Database, writer: u64, workers: usize, bound: BoundedResource) -> WriterPartitions {
    let mut random = SeededRng::new(writer);
    let mut own = WriterPartitions::new();
    let cold = db.partition("cold").unwrap();
    for n in 0..6_000u64 {
        if n % 256 == 0 {
            // The record keeps the WAL again, and its memtable is too small to be flushed for its size.
            cold.insert("k", "v").unwrap();
        }
        let name = format!("w{writer}/{}", random.below(PARTITIONS));
        let (part, book) = own.entry(name.clone()).or_insert_with(|| {
            let part = db.open_partition(&name, random_partition_options(&mut random, bound)).unwrap();
            assert!(part.is_empty().unwrap(), "{name} was deleted, or is new");
            (part, BTreeMap::new())
        });
        let key = random.below(2_000u64);
        part.insert(key.to_be_bytes(), vec![n as u8; 900]).unwrap();
        book.insert(key, n as u8);
        if random.chance_one_in(200) {
            let (part, _) = own.remove(&name).unwrap();
            match random.chance_one_in(2) {
                true => db.delete_partition(part.clone()).unwrap(),
                false => db.delete_partition_by_name(&name).unwrap(),
            }
            assert_eq!(part.get("k").unwrap_err().kind(), ErrorKind::Closed);
        }
        match bound {
            BoundedResource::Memory if workers == 0 => while db.step().unwrap() {},
            // Fewer steps than the writes cause.
            BoundedResource::Wal if workers == 0 && n % 16 == 0 => drop(db.step().unwrap()),
            _ => {}
        }
        if n % 16 == 0 {
            check_bounds(db, workers, bound);
        }
    }
    own
}

fn run_bounds_test(workers: usize, bound: BoundedResource) {
    let (db, random) = (Mutex::default(), Mutex::new(SeededRng::new(workers as u64)));
    let busybody = Arc::new(RandomActionListener { db, rng: random, actions: AtomicU64::new(0) });
    let config = || Config::new("/db").env(Arc::new(SystemEnv::new())).workers(workers);
    let machine = MemFs::new();
    let config = || config().fs(Arc::new(machine.clone()));
    let config = || match bound {
        BoundedResource::Memory => config().memory_budget(BUDGET),
        BoundedResource::Wal => {
            config().memory_budget(BUDGET).wal_segment_size(WAL_SEGMENT_SIZE).max_wal_size(MAX_WAL_SIZE)
        }
    };
    let db = config().listener(busybody.clone()).open().unwrap();
    *busybody.db.lock().unwrap() = Some(db.clone());
    db.open_partition("cold", Default::default()).unwrap().insert("k", "v").unwrap();
    let owns: Vec<WriterPartitions> = thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn({
                    let db = &db;
                    move || run_writer(db, writer, workers, bound)
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    // The scheduler decides how many tasks have run, so the test goes on until enough have.
    let cold = db.partition("cold").unwrap();
    while busybody.actions.load(Ordering::SeqCst) <= 10 || db.metrics().compactions == 0 {
        cold.insert("k", "v").unwrap();
        cold.major_compact().unwrap();
    }
    for (name, (part, book)) in owns.iter().flatten() {
        assert_eq!(part.len().unwrap(), book.len() as u64, "{name}");
        for (key, value) in book {
            assert_eq!(part.get(key.to_be_bytes()).unwrap().as_deref(), Some(&[*value; 900][..]), "{name}");
        }
    }
    db.close().unwrap();
    *busybody.db.lock().unwrap() = None;
    let db = config().open().unwrap();
    assert_eq!((db.metrics().replayed_records, db.partition("cold").unwrap().len().unwrap()), (0, 1));
}

#[test]
fn bounds_hold_without_workers() {
    run_with_timeout("a run by hand", || {
        [BoundedResource::Memory, BoundedResource::Wal].map(|bound| run_bounds_test(0, bound))
    });
}

#[test]
fn bounds_hold_with_one_worker() {
    run_with_timeout("a run with one worker", || {
        [BoundedResource::Memory, BoundedResource::Wal].map(|bound| run_bounds_test(1, bound))
    });
}

#[test]
fn bounds_hold_with_two_workers() {
    run_with_timeout("a run with two workers", || {
        [BoundedResource::Memory, BoundedResource::Wal].map(|bound| run_bounds_test(2, bound))
    });
}
