//! Range deletes: snapshots, whole leaves, versions, and crashes between publication, removal and the marks up to which
//! the WAL is not replayed.

use std::sync::{Arc, Mutex};

use super::fixture::{FILE_ID, POOL, PoolFixture, PoolOp, PoolTreeModel, range_record};
use super::model::{new_fixture, options, reopen_fixture};
use crate::base::version_edit::{PartitionEdit, PartitionId, VersionEdit};
use crate::base::{EntryRef, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, EngineHost, LastVisibleSeqno, ReadSeqno, SnapshotList, Staged, Task};
use crate::iter::InternalIter;
use crate::mem::epoch::Pin;
use crate::mem::pages::PAGE;
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::{LeafAddr, SLOTS, set_bits};
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::{PersistGranularity, PersistenceBackend, PoolImage};
use crate::pmem::pool::checkpoint::MappedPoolDurability;
use crate::pmem::pool::engine::PoolEngine;
use crate::pmem::pool::pool_recovery::{create, open_with};
use crate::pmem::pool::{ManifestPoolInfo, PmemEngine, PoolCheckLevel, PoolLocation, StoredPool};
use crate::pmem::pool_header::{PoolSeqnoField, read_seqno_field};
use crate::pmem::record::PoolRecord;
use crate::pmem::sim::Sim;
use crate::pmem::tree::{PoolOptions, TreeStep};
use crate::testing::seeded_rng::SeededRng;
use crate::testing::{MemFs, TestEnv};

fn key(n: u32) -> Vec<u8> {
    format!("k{n:05}").into_bytes()
}

/// A fixture with the keys below `count`.
fn filled(options: &PoolOptions, count: u32) -> (PoolFixture<PoolImage>, PoolTreeModel) {
    let (mut fixture, mut model) = (new_fixture(options), PoolTreeModel::new());
    for n in 0..count {
        change(&mut fixture, &mut model, PoolOp::Put(key(n), vec![n as u8; 40]));
    }
    (fixture, model)
}

fn change(fixture: &mut PoolFixture<PoolImage>, model: &mut PoolTreeModel, op: PoolOp) {
    fixture.apply(&op).unwrap();
    op.apply_to(model);
}

fn leaf_count(fixture: &PoolFixture<PoolImage>) -> u64 {
    fixture.tree.usage().unwrap().1
}

#[test]
fn covered_leaves_are_unlinked() {
    let options = options(4 << 20, SLOTS);
    let (mut fixture, mut model) = filled(&options, 9_000);
    let before = leaf_count(&fixture);
    assert!(before > 150, "{before} leaves have several parent nodes");
    change(&mut fixture, &mut model, PoolOp::RemoveRange(key(1_000), key(8_000)));
    fixture.assert_matches(&model, &[key(999), key(1_000), key(7_999), key(8_000)]);
    fixture.check_invariants();
    assert!(leaf_count(&fixture) <= before * 2 / 9 + 2, "{} of {before} leaves remain", leaf_count(&fixture));
    change(&mut fixture, &mut model, PoolOp::RemoveRange(Vec::new(), vec![0xFF]));
    fixture.assert_matches(&model, &[key(0), key(8_500)]);
    fixture.check_invariants();
    assert_eq!((leaf_count(&fixture), fixture.tree.len()), (1, 0), "only the first leaf remains");
    for n in 0..3_000 {
        change(&mut fixture, &mut model, PoolOp::Put(key(n * 3), vec![1; 40]));
    }
    fixture.check_invariants();
    let again = reopen_fixture(&fixture.tree, &options);
    again.assert_matches(&model, &[]);
}

/// Neither the reservation of memory nor the removal reads a record of a leaf inside of the range.
#[test]
fn records_inside_a_range_are_not_read() {
    let (mut fixture, mut model) = filled(&options(4 << 20, SLOTS), 3_000);
    for n in (1_000..2_000).step_by(100) {
        let position = fixture.tree.inner.find_leaf(LeafTarget::Key(&key(n)), &Pin::new());
        let leaf = fixture.tree.leaf(LeafAddr(position));
        let slot = leaf.slot(set_bits(leaf.commit_word().valid_slots()).next().unwrap());
        fixture.tree.backend.store(slot.offset(), u64::MAX);
        assert!(PoolRecord::read(fixture.tree.region(), slot).is_err(), "the record is damaged");
    }
    let (low, high) = range_record(&key(500), &key(2_500));
    let staged = fixture.tree.reserve(&[(0, range_delete(&low, &high))]).unwrap();
    change(&mut fixture, &mut model, PoolOp::RemoveRange(key(500), key(2_500)));
    staged.iter().for_each(|(_, staged)| fixture.tree.release(*staged, true));
    fixture.assert_matches(&model, &[key(499), key(500), key(1_000), key(2_499), key(2_500)]);
    fixture.check_invariants();
}

/// Regression: a removal that failed had counted the records of leaves that stayed, and the next attempt counted them
/// once more.
#[test]
fn removal_that_failed_is_repeated_as_a_whole() {
    let (mut fixture, mut model) = filled(&options(4 << 20, SLOTS), 3_000);
    let range_delete = PoolOp::RemoveRange(key(500), key(2_500));
    let snapshot = fixture.snapshots.register();
    let leaf = fixture.tree.leaf(LeafAddr(fixture.tree.inner.find_leaf(LeafTarget::Key(&key(1_500)), &Pin::new())));
    let at = leaf.slot(set_bits(leaf.commit_word().valid_slots()).next().unwrap()).offset();
    let [word] = fixture.tree.region().load_array(at);
    fixture.tree.backend.store(at, u64::MAX);
    let seqno = fixture.publish(&range_delete).unwrap();
    assert_eq!(fixture.tree.remove_covered(seqno).unwrap_err().kind(), ErrorKind::Corruption);
    fixture.tree.backend.store(at, word);
    fixture.tree.remove_covered(seqno).unwrap();
    assert_eq!(fixture.tree.get_at(&key(1_500), snapshot.seqno()).unwrap().as_deref(), Some(&[220; 40][..]));
    range_delete.apply_to(&mut model);
    drop(snapshot);
    fixture.assert_matches(&model, &[key(499), key(500), key(1_500), key(2_499), key(2_500)]);
    fixture.check_invariants();
}

#[test]
fn snapshot_sees_removed_records() {
    for slots in [4, SLOTS] {
        let (mut fixture, mut model) = filled(&options(4 << 20, slots), 500);
        let snapshot = fixture.snapshots.register();
        let then = model.clone();
        change(&mut fixture, &mut model, PoolOp::Put(key(123), vec![7]));
        let later = fixture.snapshots.register();
        let between = model.clone();
        change(&mut fixture, &mut model, PoolOp::RemoveRange(key(100), key(400)));
        change(&mut fixture, &mut model, PoolOp::Put(key(150), vec![8]));
        change(&mut fixture, &mut model, PoolOp::RemoveRange(key(140), key(160)));
        change(&mut fixture, &mut model, PoolOp::Put(key(151), vec![9]));
        for (point, model) in [(&snapshot, &then), (&later, &between)] {
            let mut iter = fixture.tree.iter(point.seqno());
            iter.seek_to_first().unwrap();
            for (key, value) in model {
                let entry = iter.current().expect("the snapshot has the record");
                assert_eq!((entry.user_key, entry.value), (key.as_slice(), value.as_slice()));
                assert_eq!(fixture.tree.get_at(key, point.seqno()).unwrap().as_deref(), Some(value.as_slice()));
                iter.next().unwrap();
            }
            assert!(!iter.valid());
        }
        fixture.assert_matches(&model, &[key(99), key(150), key(399)]);
        assert!(!fixture.tree.versions.is_empty());
        drop((snapshot, later));
        fixture.check_invariants();
        assert!(fixture.tree.versions.is_empty());
        fixture.assert_matches(&model, &[]);
    }
}

/// A snapshot keeps an old version of a key, and every reader sees the range delete: the old version must not appear
/// to readers that are newer than the range delete.
#[test]
fn older_version_stays_hidden() {
    let (mut fixture, mut model) = filled(&options(4 << 20, 8), 20);
    let old = fixture.snapshots.register();
    change(&mut fixture, &mut model, PoolOp::Put(key(5), vec![2]));
    let range_delete = PoolOp::RemoveRange(key(0), key(20));
    let seqno = fixture.publish(&range_delete).unwrap();
    // Now the pending range delete hides the records, and the version that the snapshot keeps.
    let new = fixture.snapshots.register();
    for _ in 0..2 {
        assert_eq!(fixture.tree.get(&key(5)).unwrap(), None);
        assert_eq!(fixture.tree.get_at(&key(5), new.seqno()).unwrap(), None);
        assert_eq!(fixture.tree.get_many_at(&[&key(5)], new.seqno().into()).unwrap(), [None]);
        assert!(fixture.contents().is_empty());
        assert_eq!(fixture.tree.get_at(&key(5), old.seqno()).unwrap().as_deref(), Some(&[5; 40][..]));
        assert!(fixture.tree.changed_since(&key(5), old.seqno()).unwrap());
        let since =
            |since| fixture.tree.range_changed_since((std::ops::Bound::Unbounded, std::ops::Bound::Unbounded), since);
        assert!(since(old.seqno()).unwrap().is_some() && since(seqno).unwrap().is_none());
        fixture.tree.remove_covered(seqno).unwrap();
    }
    // The snapshot is dropped before the second range delete completes, so its records are not retained.
    change(&mut fixture, &mut PoolTreeModel::new(), PoolOp::Put(key(5), vec![3]));
    let seqno = fixture.publish(&range_delete).unwrap();
    drop(old);
    let newest = fixture.snapshots.register();
    drop(new);
    fixture.tree.remove_covered(seqno).unwrap();
    assert_eq!(fixture.tree.get(&key(5)).unwrap(), None);
    assert_eq!(fixture.tree.get_at(&key(5), newest.seqno()).unwrap(), None);
    assert!(fixture.contents().is_empty());
}

fn range_delete<'a>(low: &'a [u8], high: &'a [u8]) -> EntryRef<'a> {
    EntryRef { user_key: low, seqno: SeqNo::ZERO, kind: RecordKind::RangeDelete, value: high }
}

/// Without snapshots a range delete of any size is accepted; with one, only if memory for all records is allowed.
#[test]
fn version_memory_is_reserved_for_snapshots() {
    let (mut fixture, mut model) = filled(&options(4 << 20, SLOTS), 12_000);
    fixture.tree.versions.set_limit(0);
    let (low, high) = range_record(&key(0), &key(12_000));
    let reserve = || fixture.tree.reserve(&[(0, range_delete(&low, &high))]);
    let release =
        |staged: Vec<(u32, Staged)>| staged.iter().for_each(|(_, staged)| fixture.tree.release(*staged, true));
    release(reserve().unwrap());
    let snapshot = fixture.snapshots.register();
    let error = reserve().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfSpace, "{error}");
    drop(snapshot);
    release(reserve().unwrap());
    change(&mut fixture, &mut model, PoolOp::RemoveRange(key(0), key(12_000)));
    assert_eq!(fixture.tree.len(), 0);
    fixture.check_invariants();
}

/// Regression: without a reader, a range delete reserved no memory for versions. A snapshot that was created before the
/// commit was visible retained its records beyond the limit.
#[test]
fn version_memory_is_reserved_for_later_readers() {
    let (mut fixture, mut model) = filled(&options(4 << 20, SLOTS), 3_000);
    let (low, high) = range_record(&key(0), &key(3_000));
    let staged = fixture.tree.reserve(&[(0, range_delete(&low, &high))]).unwrap();
    let [(u32::MAX, Staged::SplitsAndVersions(_, version_bytes))] = staged[..] else { panic!("{staged:?}") };
    let free = fixture.tree.versions.memory_max() - version_bytes;
    assert!(fixture.tree.versions.try_reserve(free + 1).is_none(), "another batch gets the same memory");
    let snapshot = fixture.snapshots.register();
    change(&mut fixture, &mut model, PoolOp::RemoveRange(key(0), key(3_000)));
    let (retained, table) = (fixture.tree.versions.memory_bytes(), 128 << 10);
    assert!(retained > 0 && retained <= version_bytes + table, "{retained} of {version_bytes}");
    assert_eq!(fixture.tree.get_at(&key(7), snapshot.seqno()).unwrap().as_deref(), Some(&[7; 40][..]));
    fixture.tree.release(staged[0].1, true);
}

/// Regression: without a reader, a batch was refused if its range deletes and its replaced records together needed more
/// memory than the limit, although the range deletes alone did not. Each record that the batch puts counted twice.
#[test]
fn ranges_and_puts_fit_without_readers() {
    let (fixture, _) = filled(&options(8 << 20, SLOTS), 6_700);
    let keys: Vec<_> = (0..6_700).map(key).collect();
    let reserve = |(first, last): (u32, u32), puts: std::ops::Range<usize>| {
        let (low, high) = range_record(&key(first), &key(last));
        let put = |key| EntryRef { user_key: key, seqno: SeqNo::ZERO, kind: RecordKind::Put, value: &[7; 40] };
        let records = keys[puts].iter().map(|key| put(key)).chain([range_delete(&low, &high)]);
        let staged = fixture.tree.reserve(&(0..).zip(records).collect::<Vec<_>>())?;
        staged.iter().for_each(|(_, staged)| fixture.tree.release(*staged, false));
        let Some((_, Staged::SplitsAndVersions(_, version_bytes))) = staged.last() else { panic!("{staged:?}") };
        Ok::<_, crate::base::Error>(*version_bytes)
    };
    let limit = fixture.tree.versions.memory_max();
    // Either part fits, with one record in the range or many.
    for range in [(0, 1), (0, 3_000)] {
        let bytes = reserve(range, 2_000..6_000).unwrap_or_else(|error| panic!("{range:?}: {error}"));
        assert!((limit / 3..=limit).contains(&bytes), "{bytes} of {limit}");
    }
    let one_leaf = reserve((0, 1), 0..0).unwrap();
    assert!(one_leaf < 20_000, "{one_leaf} bytes for the records of a leaf");
    // A version that is needed, because its change is not visible, takes a part of the limit.
    fixture.tree.put(&key(7), SeqNo(fixture.seqno + 1), &[1]).unwrap();
    fixture.visible.publish(SeqNo(fixture.seqno + 1));
    fixture.tree.put(&key(8), SeqNo(fixture.seqno + 2), &[1]).unwrap();
    fixture.tree.forget_versions().unwrap();
    assert!(fixture.tree.versions.memory_bytes() > 0);
    let reserved: Vec<_> = (5_000..=6_700).step_by(40).map(|count| reserve((0, count), 0..0)).collect();
    assert!(reserved[0].as_ref().is_ok_and(|bytes| *bytes > limit / 2), "{reserved:?}");
    assert!(reserved.iter().all(Result::is_ok), "{reserved:?}");
    assert!(reserved.last().unwrap().as_ref().is_ok_and(|bytes| *bytes == 0), "accepted without a reservation");
    let snapshot = fixture.snapshots.register();
    assert_eq!(reserve((0, 3_000), 2_000..6_000).unwrap_err().kind(), ErrorKind::OutOfSpace);
    drop(snapshot);
}

#[test]
fn malformed_ranges_are_corruption() {
    let (fixture, _) = filled(&options(4 << 20, SLOTS), 1);
    let (low, high) = range_record(&key(2), &key(1));
    let equal = range_record(&key(1), &key(1));
    for (user_key, value) in [(&low, &high), (&equal.0, &equal.1), (&low, &Vec::new()), (&low, &vec![0xFF])] {
        let entry = EntryRef { user_key, seqno: SeqNo(9), kind: RecordKind::RangeDelete, value };
        assert_eq!(fixture.tree.add_range_delete(entry).unwrap_err().kind(), ErrorKind::Corruption);
    }
    assert_eq!(fixture.tree.len(), 1);
}

fn location(fs: &MemFs, visible: &LastVisibleSeqno) -> PoolLocation {
    PoolLocation {
        fs: Arc::new(fs.clone()),
        env: Arc::new(TestEnv::new(1)),
        dir: "/".into(),
        partition: PartitionId(1),
        name: "pool".into(),
        visible: visible.clone(),
        snapshots: SnapshotList::new(visible.clone()),
        read_only: false,
        wal_bytes: 1 << 20,
    }
}

/// A record of the WAL.
#[derive(Clone)]
struct LoggedRecord {
    seqno: SeqNo,
    kind: RecordKind,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl LoggedRecord {
    fn entry(&self) -> EntryRef<'_> {
        EntryRef { user_key: &self.key, seqno: self.seqno, kind: self.kind, value: &self.value }
    }

    fn apply_to(&self, model: &mut PoolTreeModel) {
        match self.kind {
            RecordKind::Put => drop(model.insert(self.key.clone(), self.value.clone())),
            RecordKind::Delete => drop(model.remove(&self.key)),
            _ => {
                let range = crate::base::key_range::KeyRange::decode(&self.key, &self.value).unwrap();
                model.retain(|key, _| !range.contains(key, &KeyOrder::bytewise()));
            }
        }
    }
}

fn random_record(rng: &mut SeededRng, seqno: SeqNo, with_ranges: bool) -> LoggedRecord {
    let number = |rng: &mut SeededRng| rng.below(30) as u32;
    match rng.below(8) {
        0..=3 => {
            let value = vec![seqno.0 as u8; 1 + rng.below(20)];
            LoggedRecord { seqno, kind: RecordKind::Put, key: key(number(rng)), value }
        }
        4 | 5 if with_ranges => {
            let first = number(rng);
            let (key, value) = range_record(&key(first), &key(first + 1 + rng.below(12) as u32));
            LoggedRecord { seqno, kind: RecordKind::RangeDelete, key, value }
        }
        _ => LoggedRecord { seqno, kind: RecordKind::Delete, key: key(number(rng)), value: Vec::new() },
    }
}

fn contents(engine: &dyn Engine, at: SeqNo) -> PoolTreeModel {
    let mut iter = engine.view().iter(at.into(), (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded)).unwrap();
    let mut all = PoolTreeModel::new();
    iter.seek_to_first().unwrap();
    while let Some(entry) = iter.current() {
        all.insert(entry.user_key.to_vec(), entry.value.to_vec());
        iter.next().unwrap();
    }
    for (key, value) in &all {
        assert_eq!(engine.get(key, ReadSeqno::At(at.into())).unwrap().as_deref(), Some(value.as_slice()));
    }
    all
}

const SIM_LEN_MAX: u64 = 16 * PAGE;

fn sim_options() -> PoolOptions {
    PoolOptions { grow_by: PAGE, ..options(SIM_LEN_MAX, 5) }
}

/// A mapped pool that lost power: opened again, with the WAL replayed from the sequence number in its header.
fn replayed_contents(image: &[u8], granularity: PersistGranularity, wal: &[LoggedRecord]) -> Result<PoolTreeModel> {
    let sim = Sim::new(image, SIM_LEN_MAX, granularity, None);
    let applied = read_seqno_field(sim.region(), &FILE_ID, PoolSeqnoField::AppliedThrough)?;
    let (visible, fs) = (LastVisibleSeqno::default(), MemFs::new());
    let snapshots = SnapshotList::new(visible.clone());
    let order = KeyOrder::bytewise();
    let readers = snapshots.readers_of(POOL);
    let (tree, report) = open_with(sim, order, &sim_options(), readers, PoolCheckLevel::Full, None)?;
    let durability = MappedPoolDurability::new(location(&fs, &visible), "/pool".into(), (applied, report.max_seqno));
    let engine = PoolEngine::new(tree, durability, &PmemOptions::default());
    for record in wal.iter().filter(|record| record.seqno > applied) {
        engine.replay(record.entry())?;
        visible.publish(record.seqno);
    }
    engine.end_replay()?;
    visible.publish(SeqNo::MAX);
    Ok(contents(&engine, SeqNo::MAX))
}

/// Batches and single changes of a mapped pool. Power fails, or the process ends, at each fence. `skipped` is a planted
/// fault.
fn crash_mapped_pool(
    granularity: PersistGranularity,
    seed: u64,
    skipped: Option<TreeStep>,
) -> std::result::Result<usize, String> {
    let (visible, fs, mut rng) = (LastVisibleSeqno::default(), MemFs::new(), SeededRng::new(seed));
    let location = location(&fs, &visible);
    let sim = Sim::new(&[], SIM_LEN_MAX, granularity, None);
    let snapshots = Arc::clone(&location.snapshots);
    let tree = create(sim, FILE_ID, KeyOrder::bytewise(), &sim_options(), location.readers()).unwrap();
    let durability = MappedPoolDurability::new(location, "/pool".into(), (SeqNo::ZERO, SeqNo::ZERO));
    let engine = PoolEngine::new(tree, durability, &PmemOptions::default());
    engine.end_replay().unwrap();
    engine.tree.skip_step(skipped);
    let (mut wal, mut model, mut seqno, mut states) =
        (Vec::<LoggedRecord>::new(), PoolTreeModel::new(), SeqNo::ZERO, 0);
    for round in 0..60 {
        let before = model.clone();
        let is_batch = round % 3 != 0;
        let _snapshot = (rng.below(4) == 0).then(|| snapshots.register());
        engine.tree.backend.start_recording();
        if is_batch {
            // The WAL has the whole group before any of it is applied.
            let group: Vec<_> =
                (1..=1 + rng.below(6) as u64).map(|n| random_record(&mut rng, seqno.plus(n), true)).collect();
            wal.extend(group.iter().cloned());
            for record in &group {
                engine.apply(record.entry(), Staged::Nothing).map_err(|error| error.to_string())?;
                record.apply_to(&mut model);
            }
            seqno = seqno.plus(group.len() as u64);
            visible.publish(seqno);
            if contents(&engine, seqno) != model {
                return Err("a pending range delete hides the wrong records".into());
            }
            engine.complete_range_deletes().map_err(|error| error.to_string())?;
        } else {
            let single = random_record(&mut rng, seqno.plus(1), false);
            let made = engine.write_single(single.kind, &single.key, &single.value, &mut || Ok(Some(single.seqno)));
            made.map_err(|error| error.to_string())?;
            single.apply_to(&mut model);
            seqno = single.seqno;
            visible.publish(seqno);
        }
        if contents(&engine, seqno) != model {
            return Err("wrong records without any failure".into());
        }
        for point in engine.tree.backend.take_crash_points() {
            let mut images = Vec::new();
            states += point.images(32, &mut rng, |image| images.push(image.to_vec()));
            for image in images {
                let found = replayed_contents(&image, granularity, &wal).map_err(|error| error.to_string())?;
                if found != model && (is_batch || found != before) {
                    return Err(format!(
                        "round {round}: {} records where {} belong, or others",
                        found.len(),
                        model.len()
                    ));
                }
            }
        }
    }
    Ok(states)
}

/// The regression that had to be found before pools could have range deletes: a removal of the same batch recorded
/// that the pool contains the WAL up to a range delete whose covered records were still there. A kill at that moment
/// brought them back.
#[test]
fn mapped_pool_repeats_pending_range_deletes() {
    for granularity in [PersistGranularity::Line, PersistGranularity::Word] {
        let states: usize = (0..8).map(|seed| crash_mapped_pool(granularity, seed, None).unwrap()).sum();
        println!("{granularity:?}: {states} states");
        assert!(states > 2_000, "{states}");
        let unnoticed =
            (0..8).all(|seed| crash_mapped_pool(granularity, seed, Some(TreeStep::KeepBelowPending)).is_ok());
        assert!(!unnoticed, "the planted fault is found");
    }
}

/// A host that records through which sequence number the pool was flushed.
#[derive(Default)]
struct TestHost {
    visible: LastVisibleSeqno,
    flushed: Mutex<SeqNo>,
    file_id: Mutex<Option<[u8; 16]>>,
}

impl EngineHost for TestHost {
    fn sync_wal_through(&self, _through: SeqNo) -> Result<()> {
        Ok(())
    }

    fn wal_end(&self) -> SeqNo {
        self.visible.get()
    }

    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()> {
        for edit in edits {
            match edit {
                VersionEdit::Partition { edit: PartitionEdit::Flushed { through }, .. } => {
                    *self.flushed.lock().unwrap() = *through
                }
                VersionEdit::Partition { edit: PartitionEdit::PoolFileId { file_id }, .. } => {
                    *self.file_id.lock().unwrap() = Some(*file_id)
                }
                other => panic!("a checkpoint has no edit {other:?}"),
            }
        }
        Ok(())
    }

    fn snapshot_seqnos(&self) -> Vec<SeqNo> {
        vec![self.visible.get()]
    }

    fn now_ms(&self) -> u64 {
        0
    }

    fn should_yield(&self) -> bool {
        false
    }
}

/// A checkpoint between the publication of a range delete and the removal of the covered records ends below it, so that
/// the WAL is kept and replayed from there.
#[test]
fn checkpoint_ends_below_pending_range_delete() {
    for completes in [false, true] {
        let (fs, host) = (MemFs::new(), TestHost::default());
        let options = PmemOptions::default().max_size(1 << 20).growth_step(64 << 10);
        let open = |flushed, file_id| {
            let known = ManifestPoolInfo { created_mapped: false, flushed_through: flushed, file_id };
            let stored = StoredPool::read(location(&fs, &host.visible), &known, &options).unwrap();
            stored.open(KeyOrder::bytewise(), &options, file_id.is_none()).unwrap()
        };
        let (mut wal, mut model) = (Vec::new(), PoolTreeModel::new());
        let engine: Arc<dyn PmemEngine> = open(SeqNo::ZERO, None);
        engine.end_replay().unwrap();
        let log = |kind, key: Vec<u8>, value: Vec<u8>, wal: &mut Vec<LoggedRecord>, model: &mut PoolTreeModel| {
            let record = LoggedRecord { seqno: SeqNo(wal.len() as u64 + 1), kind, key, value };
            record.apply_to(model);
            engine.apply(record.entry(), Staged::Nothing).unwrap();
            wal.push(record);
        };
        for n in 0..400 {
            log(RecordKind::Put, key(n), vec![1; 30], &mut wal, &mut model);
        }
        let (low, high) = range_record(&key(10), &key(390));
        log(RecordKind::RangeDelete, low, high, &mut wal, &mut model);
        log(RecordKind::Put, key(200), vec![2], &mut wal, &mut model);
        host.visible.publish(SeqNo(wal.len() as u64));
        if completes {
            engine.complete_range_deletes().unwrap();
        }
        engine.run(Task::Flush, true, &host).unwrap();
        let flushed = *host.flushed.lock().unwrap();
        let pending = SeqNo(401);
        assert_eq!(flushed, if completes { SeqNo(402) } else { SeqNo(400) });
        assert_eq!(engine.first_unflushed(), if completes { None } else { Some(pending) });
        // Regression: a flush waited forever, because the checkpoint below its target was not followed by another.
        assert_eq!(engine.next_task(false, &[]).is_some(), !completes);
        assert_eq!(contents(&*engine, host.visible.get()), model);
        drop(engine);
        let again = open(flushed, *host.file_id.lock().unwrap());
        assert_eq!(again.flushed_through(), flushed);
        for record in wal.iter().filter(|record| record.seqno > flushed) {
            again.replay(record.entry()).unwrap();
        }
        again.end_replay().unwrap();
        assert_eq!(contents(&*again, host.visible.get()), model);
    }
}

/// Regression: a group of `multi_get` found the leaves of its keys first and loaded the pending range deletes second.
/// If a range delete that it sees completed in between, an unlinked leaf still had the removed record.
#[test]
fn guessed_leaf_is_not_read_after_removal() {
    let (mut fixture, _) = filled(&options(4 << 20, SLOTS), 2_000);
    let seqno = fixture.publish(&PoolOp::RemoveRange(key(500), key(1_500))).unwrap();
    let reader = fixture.snapshots.register();
    let pin = fixture.tree.pin().unwrap();
    let guess = fixture.tree.guess_leaf(&key(1_000), &pin);
    fixture.tree.remove_covered(seqno).unwrap();
    let found = fixture.tree.get_guessed(&key(1_000), guess, reader.seqno().into(), &pin).unwrap();
    assert_eq!(found.as_deref(), None);
}
