//! Log and memory within their bounds with zero, one and two workers, while partitions come and go beside all work, and
//! a listener uses the database at random events.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use azekura::fs::SystemEnv;
use azekura::testing::MemFs;
use azekura::{
    CompactionStrategy, Config, Database, ErrorKind, Event, KvSeparationOptions, LeveledOptions, Listener, Partition,
    PartitionCreateOptions, Result,
};

use crate::testkit::SeededRng;
use crate::testkit::watchdog::run_with_timeout;

const BUDGET: u64 = 2 << 20;
const MAX_WAL_SIZE: u64 = 256 << 10;
const WAL_SEGMENT_SIZE: u64 = 64 << 10;
const WRITERS: u64 = 2;
const PARTITIONS: u64 = 6;
/// Partitions beside those of the writers: one that is never flushed for its own sake, one of the listener.
const OTHER_PARTITIONS: u64 = 2;
/// What a partition may keep beside the budget, as `Config::memory_budget` says.
const PARTITION_MEMORY_ALLOWANCE: u64 = 64 << 10;
/// A memtable that is being filled may allocate so much at once.
const MEMTABLE_CHUNK: u64 = 2 << 20;

/// What memtables may take, without those that iterators hold.
const MEMORY_BOUND: u64 =
    BUDGET + (WRITERS * PARTITIONS + OTHER_PARTITIONS) * PARTITION_MEMORY_ALLOWANCE + MEMTABLE_CHUNK;
/// What the log may hold: what it should, and what is written while memtables are flushed that hold it.
const WAL_BOUND: u64 = MAX_WAL_SIZE + 3 * BUDGET;

/// What a run presses against.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BoundedResource {
    /// Memtables are as large as they like, and the log is too.
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
    fn run_action(&self, db: &Database, deed: u64) -> Result<()> {
        let own = db.open_partition("listener", Default::default())?;
        match deed {
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
        let (acts, deed) = {
            let mut dice = self.rng.lock().unwrap();
            (dice.chance_one_in(3), dice.below(6))
        };
        let db = self.db.lock().unwrap().clone();
        let Some(db) = db.filter(|_| acts || matches!(event, Event::Closed)) else { return };
        self.actions.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = self.run_action(&db, deed) {
            // Partitions go while they are looked at.
            assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::NotFound | ErrorKind::Invalid), "{error}");
        }
    }
}

fn random_partition_options(dice: &mut SeededRng, bound: BoundedResource) -> PartitionCreateOptions {
    let leveled =
        LeveledOptions::default().l0_compaction_trigger(1).base_level_size(64 << 10).target_file_size(32 << 10);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let options = if bound == BoundedResource::Wal { options.max_memtable_size(32 << 10) } else { options };
    match dice.chance_one_in(3) {
        true => options.with_kv_separation(KvSeparationOptions::default().separation_threshold(500)),
        false => options,
    }
}

/// A writer's partitions, each with what it holds.
type WriterPartitions = BTreeMap<String, (Partition, BTreeMap<u64, u8>)>;

fn check_bounds(db: &Database, workers: usize, bound: BoundedResource) {
    let metrics = db.metrics();
    let (held, most) = match bound {
        BoundedResource::Memory => (metrics.active_memtable_bytes + metrics.sealed_memtable_bytes, MEMORY_BOUND),
        BoundedResource::Wal => (metrics.wal_live_bytes, WAL_BOUND),
    };
    assert!(held <= most, "{workers} workers: {held} bytes, bound {most}");
}

fn run_writer(db: &Database, writer: u64, workers: usize, bound: BoundedResource) -> WriterPartitions {
    let mut dice = SeededRng::new(writer);
    let mut own = WriterPartitions::new();
    let cold = db.partition("cold").unwrap();
    for n in 0..6_000u64 {
        if n % 256 == 0 {
            // It holds the log again, and it is too small to be flushed for its own size.
            cold.insert("k", "v").unwrap();
        }
        let name = format!("w{writer}/{}", dice.below(PARTITIONS));
        let (part, book) = own.entry(name.clone()).or_insert_with(|| {
            let part = db.open_partition(&name, random_partition_options(&mut dice, bound)).unwrap();
            assert!(part.is_empty().unwrap(), "{name} was deleted, or is new");
            (part, BTreeMap::new())
        });
        let key = dice.below(2_000);
        part.insert(key.to_be_bytes(), vec![n as u8; 900]).unwrap();
        book.insert(key, n as u8);
        if dice.chance_one_in(200) {
            let (part, _) = own.remove(&name).unwrap();
            match dice.chance_one_in(2) {
                true => db.delete_partition(part.clone()).unwrap(),
                false => db.delete_partition_by_name(&name).unwrap(),
            }
            assert_eq!(part.get("k").unwrap_err().kind(), ErrorKind::Closed);
        }
        match bound {
            BoundedResource::Memory if workers == 0 => while db.step().unwrap() {},
            // Fewer steps than there is work.
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
    let (db, dice) = (Mutex::default(), Mutex::new(SeededRng::new(workers as u64)));
    let busybody = Arc::new(RandomActionListener { db, rng: dice, actions: AtomicU64::new(0) });
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
    assert!(busybody.actions.load(Ordering::SeqCst) > 10 && db.metrics().compactions > 0);
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
