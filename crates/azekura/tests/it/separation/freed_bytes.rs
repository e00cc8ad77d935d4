//! A blob GC call returns the bytes that it freed itself; the metrics have the sum over all calls.

use azekura::testing::MemFs;
use azekura::{
    CompressionType, Config, Database, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions,
};
use std::sync::Arc;

use crate::testkit::watchdog::wait_until;

fn options(automatic: Option<f32>) -> PartitionCreateOptions {
    let separation = KvSeparationOptions::default().separation_threshold(500).blob_file_target_size(8 << 10);
    let separation = separation.compression(CompressionType::None).automatic_gc(automatic);
    PartitionCreateOptions::default().with_kv_separation(separation)
}

/// 200 values of 1,000 bytes, every other of them overwritten; compaction has counted the stale ones.
fn open_half_stale(workers: usize) -> (Database, Partition) {
    let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(workers).wal_segment_size(256 << 10).open().unwrap();
    let part = db.open_partition("p", options(None)).unwrap();
    for round in 0..2u8 {
        (0..200u8).step_by(1 + usize::from(round)).for_each(|n| part.insert([n], [n ^ round; 1_000]).unwrap());
        part.flush().unwrap();
    }
    part.major_compact().unwrap();
    (db, part)
}

/// Bytes of blob files, and freed bytes: the sum does not change while nothing is written.
fn live_and_freed_bytes(db: &Database, part: &Partition) -> (u64, u64) {
    (part.metrics().blob_bytes(), db.metrics().blob_bytes_freed)
}

/// The bytes of blob files once all freed bytes are counted, which a worker does a moment later.
fn wait_for_freed_bytes(db: &Database, part: &Partition, before: (u64, u64)) -> (u64, u64) {
    wait_until("all freed bytes are counted", || {
        let after = live_and_freed_bytes(db, part);
        after.0 + after.1 == before.0 + before.1
    });
    live_and_freed_bytes(db, part)
}

fn check_freed_bytes(part: &Partition) {
    (0..200u8).for_each(|n| assert_eq!(part.get([n]).unwrap().unwrap(), [n ^ u8::from(n % 2 == 0); 1_000]));
    assert_eq!(part.gc_scan().unwrap().stale_bytes, 0);
}

#[test]
fn freed_bytes_of_several_calls_add_up() {
    for workers in [0, 2] {
        let (db, part) = open_half_stale(workers);
        let before = live_and_freed_bytes(&db, &part);
        let freed: Vec<u64> = std::thread::scope(|scope| {
            let collect = || scope.spawn(|| part.gc_with_space_amp_target(1.0).unwrap());
            let all = [collect(), collect(), collect()];
            all.map(|call| call.join().unwrap()).to_vec()
        });
        let after = wait_for_freed_bytes(&db, &part, before);
        assert_eq!(freed.iter().sum::<u64>(), before.0 - after.0, "{freed:?}");
        assert!(before.0 - after.0 > 90_000);
        check_freed_bytes(&part);
    }
}

#[test]
fn gc_call_returns_only_bytes_it_freed() {
    let (db, part) = open_half_stale(0);
    part.set_options(options(Some(1.2))).unwrap();
    let before = live_and_freed_bytes(&db, &part);
    while db.step().unwrap() {}
    let between = live_and_freed_bytes(&db, &part);
    let by_itself = before.0 - between.0;
    assert!(by_itself > 0 && between.1 - before.1 == by_itself);
    let freed = part.gc_with_space_amp_target(1.0).unwrap();
    let after = live_and_freed_bytes(&db, &part);
    assert!(freed > 0 && freed == between.0 - after.0 && after.1 - before.1 == by_itself + freed);
    assert_eq!(part.gc_with_space_amp_target(1.0).unwrap(), 0);
    check_freed_bytes(&part);

    // At the same time: the bytes that the call does not return were freed by the workers.
    let (db, part) = open_half_stale(2);
    let before = live_and_freed_bytes(&db, &part);
    part.set_options(options(Some(1.0))).unwrap();
    let freed = part.gc_with_space_amp_target(1.0).unwrap();
    let after = wait_for_freed_bytes(&db, &part, before);
    assert!(freed <= before.0 - after.0, "{freed}");
    check_freed_bytes(&part);
}
