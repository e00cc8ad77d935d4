//! Concurrent readers and writers.
#![expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::fixture::{PoolFixture, PoolOp};
use super::model::{new_fixture, options, reopen_fixture};
use crate::base::{ErrorKind, RecordKind, SeqNo};
use crate::iter::InternalIter;
use crate::mem::pages::PAGE;
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend, PoolImage};
use crate::pmem::tree::PoolOptions;
use crate::testing::seeded_rng::SeededRng;
use crate::vfs::disk::DiskFs;
use crate::vfs::disk::tests::temp_dir;
use crate::vfs::{Fs, OpenMode};

/// Allocates sequence numbers, and publishes them in order.
struct OrderedPublisher<'a, M: PersistenceBackend> {
    fixture: &'a PoolFixture<M>,
    next: AtomicU64,
}

impl<M: PersistenceBackend> OrderedPublisher<'_, M> {
    fn commit(&self, change: impl FnOnce(SeqNo)) {
        let seqno = self.next.fetch_add(1, Ordering::SeqCst);
        change(SeqNo(seqno));
        while self.fixture.visible.get().0 + 1 != seqno {
            std::thread::yield_now();
        }
        self.fixture.visible.publish(SeqNo(seqno));
    }
}

fn key(n: u64) -> [u8; 8] {
    n.to_be_bytes()
}

/// A value that contains its key and its round, and whose other bytes show whether it is complete.
fn value(n: u64, round: u64) -> Vec<u8> {
    let mut value = [n.to_le_bytes(), round.to_le_bytes()].concat();
    value.resize(16 + (n + round) as usize % 90, (n ^ round) as u8);
    value
}

/// Checks a value of key `n` and returns its round.
fn round_of(n: u64, bytes: &[u8]) -> u64 {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(bytes, value(word(0), word(8)), "a value is torn");
    assert_eq!(word(0), n, "a value belongs to another key");
    word(8)
}

/// Number of keys. Every third key always exists.
const KEYS: u64 = 240;

/// Looks up keys while other threads write. A key that always exists is found, and no key gets an older value again.
fn check_gets<M: PersistenceBackend>(fixture: &PoolFixture<M>, rng: &mut SeededRng, seen: &mut [u64]) {
    for _ in 0..200 {
        let n = rng.below(KEYS as usize) as u64;
        let got = fixture.tree.get(&key(n)).unwrap();
        assert!(got.is_some() || !n.is_multiple_of(3), "a key that always exists was not found");
        if let Some(got) = got {
            let round = round_of(n, &got);
            assert!(round >= seen[n as usize], "a reader got an older value than before");
            seen[n as usize] = round;
        }
    }
}

/// Checks that one sequence number shows the same state forward, backward and by gets.
fn check_scan<M: PersistenceBackend>(fixture: &PoolFixture<M>) {
    let snapshot = fixture.snapshots.register();
    let mut iter = fixture.tree.iter(snapshot.seqno());
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    iter.seek_to_first().unwrap();
    while let Some(entry) = iter.current() {
        let n = u64::from_be_bytes(entry.user_key.try_into().unwrap());
        forward.push((n, round_of(n, entry.value)));
        iter.next().unwrap();
    }
    assert!(forward.windows(2).all(|pair| pair[0].0 < pair[1].0));
    assert_eq!(forward.iter().filter(|(n, _)| n % 3 == 0).count() as u64, KEYS / 3);
    iter.seek_to_last().unwrap();
    while let Some(entry) = iter.current() {
        let n = u64::from_be_bytes(entry.user_key.try_into().unwrap());
        backward.push((n, round_of(n, entry.value)));
        iter.prev().unwrap();
    }
    backward.reverse();
    assert_eq!(forward, backward, "two reads at one sequence number differ");
    for &(n, round) in forward.iter().step_by(7) {
        let got = fixture.tree.get_at(&key(n), snapshot.seqno()).unwrap().expect("the iterator returned this key");
        assert_eq!(round_of(n, &got), round);
    }
}

/// Two writers, each with its own keys between the keys that never change, and readers of all keys.
fn race<M: PersistenceBackend>(fixture: &PoolFixture<M>, rounds: u64) {
    let order = OrderedPublisher { fixture, next: AtomicU64::new(1) };
    for n in (0..KEYS).step_by(3) {
        order.commit(|seqno| fixture.tree.put(&key(n), seqno, &value(n, 0)).unwrap());
    }
    let (stop, walked) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = |writer: u64| {
        let mut rng = SeededRng::with_stream(writer, 8);
        for round in 1..=rounds {
            let n = rng.below(KEYS as usize / 3) as u64 * 3 + writer;
            // The number of keys rises and falls, so that leaves are split and merged.
            let put = rng.chance_in_8(if round / 400 % 2 == 0 { 7 } else { 1 });
            order.commit(|seqno| match put {
                true => fixture.tree.put(&key(n), seqno, &value(n, round)).unwrap(),
                false => drop(fixture.tree.remove(&key(n), seqno).unwrap()),
            });
            if round % 16 == 0 {
                fixture.tree.merge_sparse_leaves().unwrap();
            }
        }
    };
    std::thread::scope(|s| {
        for reader in 0..2u64 {
            let (stop, walked) = (&stop, &walked);
            s.spawn(move || {
                let (mut rng, mut seen) = (SeededRng::with_stream(reader, 9), vec![0; KEYS as usize]);
                // The reader runs at least once, even if the writers end before it begins.
                loop {
                    check_gets(fixture, &mut rng, &mut seen);
                    check_scan(fixture);
                    walked.fetch_add(1, Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let write = &write;
        let writers = [1, 2].map(|writer| s.spawn(move || write(writer)));
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    assert!(walked.load(Ordering::Relaxed) >= 2);
    fixture.check_invariants();
}

#[test]
fn readers_see_valid_state_during_two_writers() {
    for slots in [4, SLOTS] {
        // The pool is small, so that buffers are reused soon.
        let options = options(256 * PAGE, slots);
        let fixture = new_fixture(&options);
        race(&fixture, 1600);
        reopen_fixture(&fixture.tree, &options).check_invariants();
    }
}

#[test]
fn mapped_pool_reopens_with_same_contents() {
    let root = temp_dir(true);
    let (fs, path) = (DiskFs::new(), root.path().join("pool"));
    let options = PoolOptions { len_max: 1 << 20, grow_by: 16 * PAGE, slots_per_leaf: 5 };
    let shared = |mode| MappedPoolFile::new(fs.open(&path, mode).unwrap(), options.len_max).unwrap();
    let fixture = PoolFixture::create(shared(OpenMode::Create), &options);
    race(&fixture, 800);
    let (before, len) = (fixture.contents(), fixture.tree.region().len());
    drop(fixture);
    let (again, report) = PoolFixture::open(shared(OpenMode::Write), &options).unwrap();
    assert_eq!((again.contents(), report.repairs, again.tree.region().len()), (before, 0, len));
    again.check_invariants();
}

#[test]
fn two_writers_of_one_leaf_lose_nothing() {
    let options = options(8 << 20, SLOTS);
    let fixture: PoolFixture<PoolImage> = new_fixture(&options);
    let count = 8000u64;
    std::thread::scope(|s| {
        for writer in 0..2 {
            let fixture = &fixture;
            s.spawn(move || {
                for n in (writer..count).step_by(2) {
                    fixture.tree.put(&key(n), SeqNo(n + 1), &value(n, 0)).unwrap();
                }
            });
        }
    });
    fixture.visible.publish(SeqNo(count));
    assert_eq!(fixture.tree.len(), count);
    assert!((0..count).all(|n| fixture.tree.get(&key(n)).unwrap().is_some()));
    fixture.check_invariants();
}

/// Two threads fill a pool, each from its own thread cache. A third thread then uses the rest of these caches before
/// the pool is full.
#[test]
fn thread_caches_are_empty_when_pool_is_full() {
    let options = options(4 << 20, SLOTS);
    let fixture: PoolFixture<PoolImage> = new_fixture(&options);
    let fill = |from: u64| {
        let mut count = 0;
        let order = AtomicU64::new(from);
        let take = || Ok(Some(SeqNo(order.fetch_add(1, Ordering::Relaxed))));
        loop {
            match fixture.tree.put_assigning_seqno(RecordKind::Put, &key(from + count), &[7; 60], take) {
                Ok(put) => assert!(put),
                Err(error) => {
                    assert_eq!(error.kind(), crate::base::ErrorKind::OutOfSpace);
                    return count;
                }
            }
            count += 1;
        }
    };
    std::thread::scope(|s| {
        let fill = &fill;
        for from in [1 << 20, 2 << 20] {
            s.spawn(move || assert!(fill(from) > 1000));
        }
    });
    fill(3 << 20);
    let (usage, _) = fixture.tree.usage().unwrap();
    assert!(usage.len == 4 << 20 && usage.free_bytes < 64 << 10, "{usage:?}");
    assert_eq!(fixture.tree.thread_caches.bytes(), 0);
    fixture.visible.publish(SeqNo(4 << 20));
    fixture.check_invariants();
}

/// Closing does not wait for a thread that allocates space for a change without a sequence number. Regression: such a
/// thread split a leaf in a file that the next process had opened.
#[test]
fn nothing_changes_after_stop_writes() {
    let options = options(64 * PAGE, 4);
    let fixture = new_fixture(&options);
    let mut seqno = 0;
    let mut put = |key: &[u8]| {
        fixture.tree.put_assigning_seqno(RecordKind::Put, key, &[7; 100], || {
            seqno += 1;
            Ok(Some(SeqNo(seqno)))
        })
    };
    // A leaf of four slots takes three records.
    (0..3).for_each(|n| assert!(put(&key(n)).unwrap()));
    fixture.tree.stop_writes();
    let region = fixture.tree.region();
    let bytes = || region.slice(0, region.len() as usize);
    let (before, leaves) = (bytes(), fixture.tree.usage().unwrap().1);
    assert_eq!(put(&key(3)).unwrap_err().kind(), ErrorKind::Closed, "the change would split the leaf");
    let long = vec![7; 200 * PAGE as usize];
    let too_long =
        fixture.tree.put_assigning_seqno(RecordKind::Put, &key(4), &long, || panic!("there is no space for it"));
    assert_eq!(too_long.unwrap_err().kind(), ErrorKind::Closed, "the change would grow the pool or find it full");
    assert!(bytes() == before && fixture.tree.usage().unwrap().1 == leaves && seqno == 3);
}

/// Regression: a copy stopped the allocation of sequence numbers, but leaves are split before a number is allocated. So
/// the copy had one half of a leaf from before the split, and the other half from after it.
#[test]
fn copy_has_one_tree_structure() {
    let options = options(4096 * PAGE, 8);
    let mut fixture = new_fixture(&options);
    let stop = AtomicBool::new(false);
    let some_key = |n: u64| key(n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    for round in 0..20u64 {
        for n in 0..300 {
            fixture.apply(&PoolOp::Put(some_key(300 * round + n).to_vec(), vec![7; 20])).unwrap();
        }
        let copy = PoolImage::new(options.len_max).unwrap();
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut rng = SeededRng::with_stream(round, 5);
                while !stop.load(Ordering::SeqCst) {
                    let key = key(rng.next_u64());
                    assert!(
                        !fixture.tree.put_assigning_seqno(RecordKind::Put, &key, &[7; 20], || Ok(None)).unwrap(),
                        "the change gets no sequence number"
                    );
                }
            });
            let copied = fixture.tree.with_structure_locked(|| {
                // Writers may grow the pool meanwhile; no leaf refers to the new pages.
                let (region, len) = (fixture.tree.region(), fixture.tree.region().len());
                copy.grow(len)?;
                let mut page = [0; PAGE as usize];
                for at in (0..len).step_by(page.len()) {
                    region.read(at, &mut page);
                    copy.write(at, &[&page]);
                    std::thread::yield_now();
                }
                Ok(())
            });
            stop.store(true, Ordering::SeqCst);
            copied.unwrap();
        });
        stop.store(false, Ordering::SeqCst);
        let (copied, _) = PoolFixture::open(copy, &options).unwrap();
        assert_eq!(copied.tree.len(), 300 * (round + 1));
    }
}
