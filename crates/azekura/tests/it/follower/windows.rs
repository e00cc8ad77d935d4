//! What a writer does between two steps of a follower.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestOrder};
use azekura::{
    ChangePosition, Changes, Config, Database, ErrorKind, GarbageCollection, Partition, PartitionCreateOptions,
    PersistMode, RecoveryMode,
};

use super::faults::{config, open_writer, partition, text};
use super::interleaved::{padded, separated};
use super::open_hook::OpenHookFs;
use crate::changes::DIR;
use crate::pools::pool_options;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::test_dir::crash_or_kill;
use crate::testkit::watchdog::wait_until;

fn end_of(db: &Database) -> u64 {
    db.change_position().unwrap().sequence_number()
}

/// Writes so much that the segments are recycled that a follower would read next.
pub(super) fn recycle_the_log(writer: &Database) {
    let fill = partition(writer, "fill");
    for n in 0..200 {
        fill.insert("k", padded(n, 5_000)).unwrap();
        if n % 20 == 0 {
            fill.flush().unwrap();
            while writer.step().unwrap() {}
        }
    }
}

/// Which work of a follower the ingest meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowerWork {
    Open,
    Advance,
    Reload,
    Checkpoint,
}

/// An ingest before any opening of a file or listing. Its note has the number before that of its marker. A state with
/// the number of the note has the records.
fn check_ingest_before_open(work: FollowerWork, has_marker: bool, nth: u64) -> bool {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = config(Arc::new(faults.clone())).mapped_wal(false).wal_segment_size(64 << 10).open().unwrap();
    let p = partition(&writer, "p");
    p.insert("k", "1").unwrap();
    let fs = OpenHookFs::new(machine.clone());
    let open = || config(Arc::new(fs.clone())).open_follower();
    let opened = (work != FollowerWork::Open).then(|| open().unwrap());
    p.insert("k", "2").unwrap();
    if work == FollowerWork::Reload {
        p.flush().unwrap();
        recycle_the_log(&writer);
    }
    let note = Arc::new(AtomicU64::new(u64::MAX));
    let (ingesting, writing, noting) = (p.clone(), writer.clone(), Arc::clone(&note));
    let is_reached = fs.once("", nth, move || {
        let before = end_of(&writing);
        if has_marker {
            ingesting.ingest([("i", "1")]).unwrap();
        } else {
            // The disk is full when the marker is written. Another commit follows the note.
            let full = Fault::Error(std::io::ErrorKind::StorageFull);
            faults.inject(FaultPlan::new(OpKind::Write, 3, full).in_path(".wal").forever());
            ingesting.ingest([("i", "1")]).unwrap();
            faults.clear_faults();
            assert_eq!(end_of(&writing), before + 1, "no marker");
            ingesting.insert("after", "1").unwrap();
        }
        noting.store(before + 1, Ordering::SeqCst);
    });
    let check = |db: &Database, end: u64| {
        let found = db.partition("p").unwrap().get("i").unwrap();
        let note = note.load(Ordering::SeqCst);
        assert!(found.is_some() || end < note, "{work:?} {nth}: no record of the ingest {note} at {end}");
    };
    let follower = opened.unwrap_or_else(|| open().unwrap());
    match work {
        FollowerWork::Open => {}
        FollowerWork::Advance | FollowerWork::Reload => _ = follower.catch_up().unwrap(),
        FollowerWork::Checkpoint => {
            follower.checkpoint("/copies/1").unwrap();
            fs.clear();
            let to: Arc<dyn Fs> = Arc::new(machine);
            let end = azekura::inspect::wal_end(&to, Path::new("/copies/1")).unwrap();
            let copy = Config::new("/copies/1").fs(to).workers(0).open().unwrap();
            check(&copy, end.unwrap());
        }
    }
    fs.clear();
    check(&follower, end_of(&follower));
    follower.catch_up().unwrap();
    assert_eq!(end_of(&follower), end_of(&writer));
    let found = follower.partition("p").unwrap().get("i").unwrap();
    assert_eq!(found.is_some(), is_reached.load(Ordering::SeqCst));
    is_reached.load(Ordering::SeqCst)
}

/// Regression: a follower had read the manifest before an ingest and its note after it, and took the note for the
/// ingest. A program that then read the changes from that position on did not get the ingest.
#[test]
fn no_position_is_behind_a_missing_ingest() {
    use FollowerWork::{Advance, Checkpoint, Open, Reload};
    for work in [Open, Advance, Reload, Checkpoint] {
        for has_marker in [true, false] {
            let reached = (0..).find(|nth| !check_ingest_before_open(work, has_marker, *nth));
            assert!(reached > Some(2), "{work:?} calls the file system {reached:?} times");
        }
    }
}

/// The positions of the last commit of one open, and of the first commit of the next one.
type TwoOpens = (ChangePosition, Option<(ChangePosition, Database)>);

/// The epoch of a position is not lower than that of the open that has written the commit before it.
fn check_epoch((first, later): &TwoOpens, position: ChangePosition, at: &str) {
    let (first, later) = (*first, later.as_ref().map(|(last, _)| *last));
    let open = if position.sequence_number() > first.sequence_number() { later.unwrap() } else { first };
    assert!(position.epoch() >= open.epoch(), "{at}: {position:?}, {first:?}, {later:?}");
}

/// The writer closes the database, opens it again and commits before any opening of a file or listing. False if there
/// are fewer.
fn check_reopen_before_call(work: FollowerWork, nth: u64) -> bool {
    let machine = MemFs::new();
    let on_machine = machine.clone();
    let open_writer = move || {
        let config = config(Arc::new(on_machine.clone())).wal_segment_size(64 << 10);
        config.wal_retention(Duration::from_secs(3600)).max_retained_wal_size(128 << 10).open().unwrap()
    };
    let writer = open_writer();
    let p = partition(&writer, "p");
    p.insert("k", "1").unwrap();
    let fs = OpenHookFs::new(machine.clone());
    let open = || config(Arc::new(fs.clone())).open_follower();
    let opened = (work != FollowerWork::Open).then(|| open().unwrap());
    let start = |follower: &Database| follower.changes_since(follower.change_position().unwrap()).unwrap();
    let mut changes = opened.as_ref().map(start);
    p.insert("k", "2").unwrap();
    if work == FollowerWork::Reload {
        p.flush().unwrap();
        recycle_the_log(&writer);
    }
    let opens = Arc::new(Mutex::new((writer.change_position().unwrap(), None)));
    let (opens_in, follower_in, mut calls, mut old) = (Arc::clone(&opens), opened.clone(), 0, Some((p, writer)));
    fs.set(move |_| {
        let opens: &mut TwoOpens = &mut opens_in.lock().unwrap();
        if calls == nth {
            drop(old.take());
            let writer = open_writer();
            partition(&writer, "p").insert("k", "3").unwrap();
            opens.1 = Some((writer.change_position().unwrap(), writer));
        }
        calls += 1;
        if let Some(follower) = &follower_in {
            check_epoch(opens, follower.change_position().unwrap(), &format!("{work:?} {nth}, at call {calls}"));
        }
    });
    let follower = opened.unwrap_or_else(|| open().unwrap());
    match work {
        FollowerWork::Open => {}
        FollowerWork::Advance | FollowerWork::Reload => _ = follower.catch_up().unwrap(),
        FollowerWork::Checkpoint => follower.checkpoint("/copies/1").unwrap(),
    }
    fs.clear();
    let opens = opens.lock().unwrap();
    check_epoch(&opens, follower.change_position().unwrap(), &format!("{work:?} {nth}"));
    let Some((last, _writer)) = &opens.1 else { return false };
    if work == FollowerWork::Checkpoint {
        let to: Arc<dyn Fs> = Arc::new(machine);
        let ends = azekura::inspect::wal_ends(&to, Path::new("/copies/1")).unwrap();
        let of_first = ends.first(opens.0.epoch()).unwrap().1;
        assert!(of_first <= Some(opens.0.sequence_number()), "{nth}: {ends:?}, {:?}", opens.0);
    }
    for commit in changes.iter_mut().filter(|_| work == FollowerWork::Advance).flatten() {
        check_epoch(&opens, commit.unwrap().position(), &format!("changes, {nth}"));
    }
    follower.catch_up().unwrap();
    assert_eq!(follower.change_position().unwrap(), *last);
    true
}

/// Regression: a follower had read the manifest before the writer was opened again and the log after it. Its positions,
/// and the checkpoint that it made, had the end of the later open and the epoch of the earlier one.
#[test]
fn positions_have_the_epoch_of_their_open() {
    use FollowerWork::{Advance, Checkpoint, Open, Reload};
    for work in [Open, Advance, Reload, Checkpoint] {
        let reached = (0..).find(|nth| !check_reopen_before_call(work, *nth));
        assert!(reached > Some(2), "{work:?} calls the file system {reached:?} times");
    }
}

/// Range deletes and puts in a pool: some behind a new partition, and some behind an ingest before any opening of a
/// file or listing of a follower that catches up. Returns how many states it showed if there was one.
fn check_range_delete_behind_ingest(has_marker: bool, nth: u64) -> Option<usize> {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = config(Arc::new(faults.clone())).mapped_wal(false).open().unwrap();
    let q = partition(&writer, "q");
    let pool = writer.open_partition("pool", pool_options(8 << 20)).unwrap();
    ["a", "b", "c"].iter().for_each(|key| pool.insert(key, "1").unwrap());
    let fs = OpenHookFs::new(machine);
    let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
    let state = |db: &Database| {
        let pairs = db.partition("pool").unwrap().iter().map(|pair| pair.map(|(key, value)| [key, value].concat()));
        let has_row = db.partition("q").unwrap().contains_key("i").unwrap();
        (end_of(db), has_row, pairs.collect::<azekura::Result<Vec<_>>>().unwrap())
    };
    // The states of the writer behind each commit, and those that the follower showed.
    let written = Arc::new(Mutex::new(vec![state(&follower)]));
    partition(&writer, "new").insert("k", "1").unwrap();
    pool.remove_range("a".."c").unwrap();
    written.lock().unwrap().push(state(&writer));
    let shown = Arc::new(Mutex::new(Vec::new()));
    let (of_writer, of_follower, following) = (Arc::clone(&written), Arc::clone(&shown), follower.clone());
    let mut calls = 0;
    fs.set(move |_| {
        if calls == nth {
            if !has_marker {
                // The disk is full when the marker of the ingest is written.
                let full = Fault::Error(std::io::ErrorKind::StorageFull);
                faults.inject(FaultPlan::new(OpKind::Write, 3, full).in_path(".wal").forever());
            }
            q.ingest([("i", "1")]).unwrap();
            faults.clear_faults();
            let works: [&dyn Fn() -> azekura::Result<()>; 4] =
                [&|| pool.insert("b", "2"), &|| pool.remove_range("b"..="c"), &|| pool.insert("c", "3"), &|| {
                    pool.insert("a", "4")
                }];
            of_writer.lock().unwrap().push(state(&writer));
            for work in works {
                work().unwrap();
                of_writer.lock().unwrap().push(state(&writer));
            }
        }
        calls += 1;
        of_follower.lock().unwrap().push(state(&following));
    });
    follower.catch_up().unwrap();
    fs.clear();
    let (written, mut shown) = (written.lock().unwrap(), shown.lock().unwrap());
    shown.push(state(&follower));
    shown.iter().for_each(|state| assert!(written.contains(state), "{nth}: {state:?} is none of {written:?}"));
    shown.dedup();
    (written.len() > 2).then_some(shown.len())
}

#[test]
fn range_deletes_behind_an_ingest_are_visible_as_a_whole() {
    for has_marker in [true, false] {
        let shown: Vec<_> = (0..).map_while(|nth| check_range_delete_behind_ingest(has_marker, nth)).collect();
        assert!(shown.contains(&3), "{shown:?}: before, up to the ingest, and behind it");
    }
}

/// The writer is killed at any operation of an ingest: before its note, behind it, and behind its tables.
#[test]
fn an_ingest_that_was_killed_is_not_skipped() {
    let mut found = Vec::new();
    for ops in 0.. {
        let machine = MemFs::new();
        let writer = open_writer(&machine);
        let p = partition(&writer, "p");
        p.insert("k", "1").unwrap();
        let before = end_of(&writer);
        machine.freeze_after(Some(ops));
        let is_done = p.ingest([("i", "1")]).is_ok();
        drop((p, writer));
        machine.freeze_after(None);
        let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
        let has_rows = |db: &Database| db.partition("p").unwrap().get("i").unwrap().is_some();
        for round in 0..2 {
            let end = end_of(&follower);
            assert!(has_rows(&follower) || end <= before, "{ops} operations, round {round}: {before}, {end}");
            follower.catch_up().unwrap();
        }
        follower.checkpoint("/copies/1").unwrap();
        let to: Arc<dyn Fs> = Arc::new(machine.clone());
        let end = azekura::inspect::wal_end(&to, Path::new("/copies/1")).unwrap().unwrap();
        let copy = Config::new("/copies/1").fs(to).workers(0).open().unwrap();
        assert!(has_rows(&copy) || end <= before, "{ops} operations: {before}, {end}");
        found.push(has_rows(&copy));
        // A writer that opens the database tells how the ingest has ended.
        let writer = open_writer(&machine);
        assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap(), "{ops} operations");
        partition(&writer, "p").insert("k", "2").unwrap();
        assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap(), "{ops} operations");
        assert_eq!(has_rows(&follower), has_rows(&writer));
        if is_done {
            break;
        }
    }
    assert!(found.contains(&false) && found.contains(&true), "{found:?}");
}

/// Regression: a follower that met the note of an ingest that a killed writer had not ended showed neither what
/// preceded it behind another ingest, nor partitions that were created and deleted before.
#[test]
fn an_unended_ingest_holds_nothing_before_it() {
    for ops in 0.. {
        let machine = MemFs::new();
        let writer = open_writer(&machine);
        let (p, gone) = (partition(&writer, "p"), partition(&writer, "gone"));
        gone.insert("k", "1").unwrap();
        let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
        p.ingest([("first", "1")]).unwrap();
        p.insert("k", "1").unwrap();
        drop(gone);
        writer.delete_partition_by_name("gone").unwrap();
        partition(&writer, "new");
        machine.freeze_after(Some(ops));
        let is_done = p.ingest([("second", "1")]).is_ok();
        drop((p, writer));
        machine.freeze_after(None);
        follower.catch_up().unwrap();
        let found = follower.partition("p").unwrap();
        assert!(found.contains_key("first").unwrap() && found.contains_key("k").unwrap(), "{ops} operations");
        let mut names = follower.list_partitions();
        names.sort_unstable();
        assert_eq!(names, ["new", "p"], "{ops} operations");
        if is_done {
            break;
        }
    }
}

/// Overwrites the first of these bytes in a file of the database.
fn damage(machine: &MemFs, part: &[u8]) {
    overwrite(machine, part, b"X");
}

fn overwrite(machine: &MemFs, part: &[u8], with: &[u8]) {
    for entry in machine.read_dir(Path::new(DIR)).unwrap().into_iter().filter(|entry| entry.name != "LOCK") {
        let file = machine.open(&Path::new(DIR).join(&entry.name), OpenMode::Write).unwrap();
        let mut bytes = vec![0; file.length().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        if let Some(at) = bytes.windows(part.len()).position(|window| window == part) {
            file.write_at(with, at as u64).unwrap();
            return file.sync_data().unwrap();
        }
    }
    panic!("no file has {part:?}");
}

/// Regression: a recovery that skips damage was noticed only by followers that had read no further than the first
/// segment of that open. The others lost a commit that was visible.
#[test]
fn a_salvage_is_stale_in_later_segments() {
    for options in [PartitionCreateOptions::default(), pool_options(8 << 20)] {
        let machine = MemFs::new();
        let open = |mode| {
            let config = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).recovery_mode(mode);
            config.open().unwrap()
        };
        let writer = open(RecoveryMode::Strict);
        let p = writer.open_partition("p", options).unwrap();
        p.insert("k", "before").unwrap();
        let fill = |from| (from..from + 200).for_each(|n| p.insert(format!("{n}"), padded(n, 1_000)).unwrap());
        fill(0);
        p.insert("k", "a value that is lost").unwrap();
        fill(200);
        let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
        p.insert("k2", "1").unwrap();
        follower.catch_up().unwrap();
        let followed = follower.partition("p").unwrap();
        assert_eq!(text(&followed, "k").as_deref(), Some("a value that is lost"));
        machine.freeze_after(Some(0));
        drop((writer, p));
        crash_or_kill(&machine, Survival::Everything, 1);
        damage(&machine, b"a value that is lost");
        let writer = open(RecoveryMode::Salvage);
        let p = writer.partition("p").unwrap();
        assert_eq!(text(&p, "k").as_deref(), Some("before"));
        for _ in 0..2 {
            let failed = follower.catch_up().map_err(|error| error.kind());
            assert_eq!(failed.unwrap_err(), ErrorKind::Stale);
            assert_eq!(text(&followed, "k").as_deref(), Some("a value that is lost"));
            p.insert("k3", "1").unwrap();
        }
    }
}

/// Regression: the feed of a follower returned commits that a later open of the writer had written with the numbers of
/// lost ones that the follower still showed, or passed lost ones silently.
#[test]
fn a_feed_ends_where_a_later_open_has_lost_commits() {
    for options in [PartitionCreateOptions::default(), pool_options(8 << 20)] {
        for mode in [RecoveryMode::PointInTime, RecoveryMode::Salvage] {
            let machine = MemFs::new();
            let open = |mode| config(Arc::new(machine.clone())).recovery_mode(mode).open().unwrap();
            let writer = open(RecoveryMode::Strict);
            let p = writer.open_partition("p", options.clone()).unwrap();
            let fill = |p: &Partition, value: &str| (0..10).for_each(|n| p.insert(format!("{n}"), value).unwrap());
            fill(&p, "1");
            let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
            let start = follower.change_position().unwrap();
            p.insert("k", "a value that is lost").unwrap();
            fill(&p, "2");
            follower.catch_up().unwrap();
            let position = follower.changes_since(start).unwrap().nth(5).unwrap().unwrap().position();
            let [mut early, mut late] = [start, position].map(|after| follower.changes_since(after).unwrap());
            machine.freeze_after(Some(0));
            drop((writer, p));
            crash_or_kill(&machine, Survival::Everything, 1);
            damage(&machine, b"a value that is lost");
            let writer = open(mode);
            fill(&writer.partition("p").unwrap(), "3");
            fill(&writer.partition("p").unwrap(), "4");

            let kind = |changes: &mut Changes| changes.next().unwrap().unwrap_err().kind();
            for _ in 0..2 {
                assert_eq!([kind(&mut early), kind(&mut late)], [ErrorKind::Stale; 2], "{mode:?}");
                for after in [start, position] {
                    let failed = follower.changes_since(after).and_then(|mut changes| changes.next().unwrap());
                    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Stale, "{mode:?}");
                }
            }
            assert_eq!(early.position(), start);
            // Commits that were not lost go on.
            drop(writer);
            let writer = open(RecoveryMode::Strict);
            let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
            let now = follower.change_position().unwrap();
            fill(&writer.partition("p").unwrap(), "5");
            follower.catch_up().unwrap();
            let mut changes = follower.changes_since(now).unwrap();
            drop(writer);
            let writer = open(RecoveryMode::Strict);
            fill(&writer.partition("p").unwrap(), "6");
            assert_eq!(changes.by_ref().map(Result::unwrap).count(), 10);
            follower.catch_up().unwrap();
            assert_eq!(changes.by_ref().map(Result::unwrap).count(), 10);
        }
    }
}

/// Damage of a synced commit is damage in the feed of a follower, too, which shows the commit.
#[test]
fn damage_of_a_synced_commit_is_not_stale() {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).mapped_wal(false).open().unwrap();
    let p = partition(&writer, "p");
    let start = writer.change_position().unwrap();
    p.insert("k", "a value that is lost").unwrap();
    writer.persist(PersistMode::SyncData).unwrap();
    p.insert("k", "states that the first one is durable").unwrap();
    let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
    follower.catch_up().unwrap();
    damage(&machine, b"a value that is lost");
    for db in [&writer, &follower] {
        let error = db.changes_since(start).unwrap().next().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
    }
}

/// A killed writer with two commits in the log, the first of which is damaged. Returns a follower that was opened
/// before them, and its position.
fn damaged_log(machine: &MemFs) -> (Database, ChangePosition) {
    let writer = open_writer(machine);
    let p = partition(&writer, "p");
    p.insert("a", "1").unwrap();
    p.flush().unwrap();
    let follower = config(Arc::new(machine.clone())).open_follower().unwrap();
    let start = follower.change_position().unwrap();
    ["a value that is lost", "1"].iter().for_each(|value| p.insert(value, value).unwrap());
    writer.persist(PersistMode::SyncData).unwrap();
    machine.freeze_after(Some(0));
    drop((writer, p));
    machine.freeze_after(None);
    overwrite(machine, b"a value that is lost", b"X");
    (follower, start)
}

/// Opens the database, which is killed after this number of operations. Returns whether the open has succeeded.
fn open_until(machine: &MemFs, mode: RecoveryMode, operations: u64) -> bool {
    machine.freeze_after(Some(operations));
    let is_open = config(Arc::new(machine.clone())).recovery_mode(mode).open().is_ok();
    machine.freeze_after(None);
    is_open
}

/// Regression: a recovery that skips damage was killed when it had written the log anew, with a gap in place of a
/// damaged commit, and before it had recorded that. A follower and its feed read on there, and lacked the commit for
/// good when the damage was gone.
#[test]
fn a_killed_salvage_is_not_read() {
    let mut healed = 0;
    for ops in 0.. {
        let machine = MemFs::new();
        let (follower, start) = damaged_log(&machine);
        let followed = follower.partition("p").unwrap();
        let mut changes = follower.changes_since(start).unwrap();
        let is_salvaged = open_until(&machine, RecoveryMode::Salvage, ops);
        let caught_up = follower.catch_up();
        assert_eq!(text(&followed, "1"), None, "{ops} operations: {caught_up:?}");
        assert_eq!(changes.by_ref().map_while(Result::ok).count(), 0, "{ops} operations");
        if is_salvaged {
            break;
        }
        overwrite(&machine, b"X value that is lost", b"a");
        let writer = open_writer(&machine);
        // A salvage that was killed late has recorded what it has skipped.
        if follower.catch_up().is_ok() {
            healed += 1;
            assert_eq!(follower.change_position().unwrap(), writer.change_position().unwrap());
            assert_eq!(changes.by_ref().map(Result::unwrap).count(), 2, "{ops} operations");
            let keys: Vec<_> = followed.keys().map(|key| key.unwrap().to_vec()).collect();
            assert_eq!(keys, [&b"1"[..], b"a", b"a value that is lost"]);
        }
    }
    assert!(healed > 5, "{healed} recoveries were killed in time");
}

/// Checks that a follower shows both commits after `start`, and its feed too.
fn check_both_commits(follower: &Database, start: ChangePosition, at: &str) {
    let p = follower.partition("p").unwrap();
    assert!(text(&p, "1").is_some() && text(&p, "a value that is lost").is_some(), "{at}");
    let changes = follower.changes_since(start).unwrap();
    assert_eq!(changes.map(Result::unwrap).count(), 2, "{at}");
}

/// Regression: of a salvage that was killed, a later open that was killed as well recorded the epochs, or a follower
/// that was opened knew them. Then feeds read the log that the salvage had written anew, and lacked the commit.
#[test]
fn segments_of_a_killed_salvage_are_removed() {
    let mut healed = 0;
    for ops in 0.. {
        for killed_after in 0.. {
            let at = format!("salvage killed after {ops} operations, the next open after {killed_after}");
            let machine = MemFs::new();
            let (early, start) = damaged_log(&machine);
            let follow = || config(Arc::new(machine.clone())).open_follower().unwrap();
            let is_salvaged = open_until(&machine, RecoveryMode::Salvage, ops);
            if is_salvaged {
                assert!(healed > 100, "{healed}");
                return;
            }
            overwrite(&machine, b"X value that is lost", b"a");
            let writer = open_writer(&machine.fork());
            if text(&partition(&writer, "p"), "a value that is lost").is_none() {
                break; // the salvage has recorded what it has skipped
            }
            check_both_commits(&follow(), start, &at);
            let is_open = open_until(&machine, RecoveryMode::Strict, killed_after);
            for follower in [early, follow()] {
                for _ in 0..2 {
                    follower.catch_up().unwrap();
                    check_both_commits(&follower, start, &at);
                }
            }
            healed += 1;
            if is_open {
                break;
            }
        }
    }
}

/// Regression: an open had removed the log that a killed salvage had written anew, and was killed before it had synced
/// the directory. Power loss brought it back behind the manifest of the open after that, whose end of the log it
/// followed: a strict open read it, and lacked a synced commit.
#[test]
fn power_loss_restores_no_removed_rewrite() {
    let damaged = |ops| {
        let machine = MemFs::new();
        let (_, start) = damaged_log(&machine);
        let is_salvaged = open_until(&machine, RecoveryMode::Salvage, ops);
        overwrite(&machine, b"X value that is lost", b"a");
        let keeps_both = text(&partition(&open_writer(&machine.fork()), "p"), "a value that is lost").is_some();
        (!is_salvaged && keeps_both).then_some((machine, start))
    };
    // The salvage was killed just before it has recorded what it has skipped.
    let (rewritten, start) = (0..).map_while(damaged).last().unwrap();
    let segments = |machine: &MemFs| {
        let entries = machine.read_dir(Path::new(DIR)).unwrap();
        entries.iter().filter(|entry| entry.name.ends_with(".wal")).count()
    };
    let mut removals = 0;
    for first in 0.. {
        let removed = rewritten.fork();
        if open_until(&removed, RecoveryMode::Strict, first) {
            break;
        }
        if segments(&removed) == segments(&rewritten) {
            continue;
        }
        removals += 1;
        for second in 0.. {
            let killed = removed.fork();
            let is_open = open_until(&killed, RecoveryMode::Strict, second);
            for seed in 8..16 {
                let lost = killed.fork();
                lost.crash(Survival::Random, seed);
                let at = format!("opens killed after {first} and {second} operations, seed {seed}");
                let follower = config(Arc::new(lost.clone())).open_follower().unwrap();
                check_both_commits(&follower, start, &at);
                let p = partition(&open_writer(&lost), "p");
                assert!(text(&p, "a value that is lost").is_some(), "{at}");
            }
            if is_open {
                break;
            }
        }
    }
    assert!(removals > 1, "{removals}");
}

/// Regression: where a recovery had recorded the end of the log and no segment after it, because it was killed, each
/// call read the whole database again.
#[test]
fn a_follower_waits_at_a_recorded_end() {
    let machine = MemFs::new();
    let open =
        |machine: &MemFs, mode| config(Arc::new(machine.clone())).wal_segment_size(64 << 10).recovery_mode(mode).open();
    let writer = open(&machine, RecoveryMode::Strict).unwrap();
    let p = partition(&writer, "p");
    p.insert("k", "a value that is lost").unwrap();
    (0..400).for_each(|n| p.insert(format!("{n}"), padded(n, 1_000)).unwrap());
    machine.freeze_after(Some(0));
    drop((writer, p));
    crash_or_kill(&machine, Survival::Everything, 1);
    damage(&machine, b"a value that is lost");
    let mut ends = 0;
    for ops in 0.. {
        let killed = machine.fork();
        killed.freeze_after(Some(ops));
        let is_open = open(&killed, RecoveryMode::PointInTime).is_ok();
        killed.freeze_after(None);
        let fs = OpenHookFs::new(killed.clone());
        if let Ok(follower) = config(Arc::new(fs.clone())).open_follower() {
            follower.catch_up().unwrap();
            let opened = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&opened);
            fs.set(move |_| _ = count.fetch_add(1, Ordering::SeqCst));
            follower.catch_up().unwrap();
            let segments = killed.read_dir(Path::new(DIR)).unwrap().len() as u64;
            let opened = opened.load(Ordering::SeqCst);
            assert!(opened <= segments + 6, "{opened} files were opened after {ops} operations, of {segments}");
            ends += 1;
        }
        if is_open {
            break;
        }
    }
    assert!(ends > 3, "{ends}");
}

/// Two partitions, of which one has the key `k`.
struct Moved {
    partitions: [Partition; 2],
}

impl Moved {
    fn open(db: &Database) -> Moved {
        Moved { partitions: ["from", "to"].map(|name| partition(db, name)) }
    }

    /// Moves the key in one commit, and deletes the partition that had it.
    fn move_and_delete(&self, db: &Database) {
        let mut batch = db.batch();
        batch.remove(&self.partitions[0], "k");
        batch.insert(&self.partitions[1], "k", "1");
        batch.commit().unwrap();
        db.delete_partition_by_name("from").unwrap();
    }

    fn check(follower: &Database) {
        let snapshot = follower.snapshot();
        let has_key = |name| follower.partition(name).is_ok_and(|part| snapshot.get(&part, "k").unwrap().is_some());
        assert!(has_key("to") || has_key("from"), "at {}", end_of(follower));
    }
}

/// Regression: a partition was deleted before the last commits to it were visible, because a call reads a part of the
/// log only.
#[test]
fn a_deletion_is_not_before_commits_of_a_limit() {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).memory_budget(1 << 30).open().unwrap();
    let large = writer.open_partition("f", PartitionCreateOptions::default().max_memtable_size(128 << 20)).unwrap();
    let moved = Moved::open(&writer);
    moved.partitions[0].insert("k", "1").unwrap();
    let follower = config(Arc::new(machine)).memory_budget(1 << 30).open_follower().unwrap();
    (0..18).for_each(|n| large.insert(format!("{n}"), vec![1; 4 << 20]).unwrap());
    moved.move_and_delete(&writer);
    for _ in 0..3 {
        follower.catch_up().unwrap();
        Moved::check(&follower);
    }
    assert!(follower.partition("from").is_err());
}

/// Removes the value of `large`, and its blob file.
fn remove_value(writer: &Database, blobs: &Partition) {
    blobs.remove("large").unwrap();
    blobs.insert("other", "1").unwrap();
    blobs.flush().unwrap();
    blobs.major_compact().unwrap();
    blobs.gc_with_space_amp_target(1.0).unwrap();
    while writer.step().unwrap() {}
}

/// Regression: as above, because a commit before them waits for a newer manifest.
#[test]
fn a_deletion_is_not_before_commits_that_wait() {
    for is_ingest in [false, true] {
        let machine = MemFs::new();
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let writer = config(Arc::new(faults.clone())).open().unwrap();
        let moved = Moved::open(&writer);
        let blobs = writer.open_partition("blobs", separated()).unwrap();
        blobs.set_options(separated()).unwrap();
        moved.partitions[0].insert("k", "1").unwrap();
        let fs = OpenHookFs::new(machine.clone());
        let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
        if is_ingest {
            // The ingest fails, so no table tells that it has ended.
            let full = Fault::Error(std::io::ErrorKind::StorageFull);
            faults.inject(FaultPlan::new(OpKind::Write, 1, full).in_path("MANIFEST").forever());
            let failed = blobs.ingest([("i", "1")]).map_err(|error| error.kind());
            faults.clear_faults();
            assert_eq!(failed.unwrap_err(), ErrorKind::OutOfSpace);
        } else {
            blobs.insert("large", padded(1, 5_000)).unwrap();
        }
        moved.move_and_delete(&writer);
        let (follower_in, mut is_first) = (follower.clone(), true);
        let (blobs, writing) = (blobs.clone(), writer.clone());
        fs.set(move |path| {
            if is_first && !is_ingest && path.extension().is_some_and(|end| end == "wal") {
                is_first = false;
                // After the manifest was read.
                remove_value(&writing, &blobs);
            }
            Moved::check(&follower_in);
        });
        follower.catch_up().unwrap();
        fs.clear();
        Moved::check(&follower);
        assert_eq!(follower.change_position().unwrap(), writer.change_position().unwrap());
        assert!(follower.partition("from").is_err());
    }
}

/// Regression: a pool that was read later than the manifest was shown before the log was read as far as the pool goes,
/// so a key was missing that it had before and after.
#[test]
fn a_new_pool_is_not_ahead_of_the_log() {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).memory_budget(1 << 30).open().unwrap();
    let large = writer.open_partition("f", PartitionCreateOptions::default().max_memtable_size(128 << 20)).unwrap();
    let fs = OpenHookFs::new(machine);
    let follower = config(Arc::new(fs.clone())).memory_budget(1 << 30).open_follower().unwrap();
    let pool = writer.open_partition("pool", pool_options(8 << 20)).unwrap();
    pool.insert("k", "1").unwrap();
    pool.flush().unwrap();
    let (follower_in, mut is_first) = (follower.clone(), true);
    fs.set(move |path| {
        if is_first && path.extension().is_some_and(|end| end == "pool") {
            is_first = false;
            (0..18).for_each(|n| large.insert(format!("{n}"), vec![1; 4 << 20]).unwrap());
            pool.insert("k", "2").unwrap();
            pool.flush().unwrap();
        }
        if let Ok(followed) = follower_in.partition("pool") {
            assert!(followed.get("k").unwrap().is_some(), "the pool has had the key all the time");
        }
    });
    follower.catch_up().unwrap();
    fs.clear();
    assert_eq!(text(&follower.partition("pool").unwrap(), "k").as_deref(), Some("2"));
}

/// Regression: a follower that read the database again read the file of a new pool twice, and restored keys that were
/// deleted in between.
#[test]
fn a_new_pool_is_of_the_moment_of_a_reload() {
    let reached = (0..).find(|nth| !check_removal_from_new_pool(*nth));
    assert!(reached > Some(2), "{reached:?} openings");
}

/// A key is removed from a new pool at the `nth` opening of its files. False if there are fewer.
fn check_removal_from_new_pool(nth: u64) -> bool {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).open().unwrap();
    let p = partition(&writer, "p");
    p.insert("k", "1").unwrap();
    let fs = OpenHookFs::new(machine);
    let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
    p.flush().unwrap();
    recycle_the_log(&writer);
    let (writing, mut created) = (writer.clone(), None::<Partition>);
    let openings = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&openings);
    fs.set(move |path| {
        let ends_with = |wanted: &str| path.extension().is_some_and(|end| end == wanted);
        // Behind the manifest of the call that finds the log recycled.
        if created.is_none() && ends_with("wal") {
            let pool = writing.open_partition("pool", pool_options(8 << 20)).unwrap();
            ["k", "stays"].iter().for_each(|key| pool.insert(key, "1").unwrap());
            pool.flush().unwrap();
            created = Some(pool);
        }
        if (ends_with("pool") || ends_with("shadow")) && counting.fetch_add(1, Ordering::SeqCst) == nth {
            let pool = created.as_ref().unwrap();
            pool.remove("k").unwrap();
            pool.flush().unwrap();
        }
    });
    follower.catch_up().unwrap();
    fs.clear();
    follower.catch_up().unwrap();
    assert_eq!(follower.change_position().unwrap(), writer.change_position().unwrap());
    let is_reached = openings.load(Ordering::SeqCst) > nth;
    let [pool, followed] = [&writer, &follower].map(|db| db.partition("pool").unwrap());
    assert_eq!(text(&followed, "k"), text(&pool, "k"), "removed at opening {nth}");
    assert_eq!(text(&followed, "stays").as_deref(), Some("1"));
    is_reached
}

/// Regression: a follower took over a part of what it had read when a reload failed.
#[test]
fn a_failed_reload_changes_nothing() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).open().unwrap();
    let order = TestOrder::Reversed;
    let p = open_ordered(order, &writer, "p", Default::default(), None).unwrap();
    let q = partition(&writer, "q");
    let insert = |from, to| (from..to).for_each(|n| p.insert(format!("{n}"), "1").unwrap());
    insert(1, 51);
    p.flush().unwrap();
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    insert(51, 81);
    follower.catch_up().unwrap();
    p.flush().unwrap();
    recycle_the_log(&writer);
    insert(81, 91);
    q.insert("k", "1").unwrap();
    let tables = || -> Vec<String> {
        let names = machine.read_dir(Path::new(DIR)).unwrap().into_iter().map(|entry| entry.name);
        names.filter(|name| name.ends_with(".sst")).collect()
    };
    let before = tables();
    q.flush().unwrap();
    let table = tables().into_iter().find(|name| !before.contains(name)).unwrap();
    // The first opening reads the database again, the second one installs what was read.
    let eio = Fault::Error(std::io::ErrorKind::Other);
    faults.inject(FaultPlan::new(OpKind::Open, 2, eio).in_path(table).forever());
    let failed = follower.catch_up();
    faults.clear_faults();
    failed.unwrap_err();
    let followed = open_ordered(order, &follower, "p", Default::default(), None).unwrap();
    let keys = || followed.iter().map(|pair| pair.unwrap().0.to_vec()).collect::<Vec<_>>();
    let wanted = |end| {
        let mut keys: Vec<_> = (1..end).map(|n| format!("{n}").into_bytes()).collect();
        keys.sort_by(|a, b| b.cmp(a));
        keys
    };
    assert_eq!(keys(), wanted(81), "as before");
    follower.catch_up().unwrap();
    assert_eq!(keys(), wanted(91));
}

/// A call of `catch_up` that reads the database again and fails midway: the manifest looks damaged once, and the table
/// cannot be opened when it is installed.
fn fail_reload(faults: &FaultFs, follower: &Database) {
    faults.inject(FaultPlan::new(OpKind::Read, 1, Fault::Short).in_path("MANIFEST"));
    let eio = Fault::Error(std::io::ErrorKind::Other);
    faults.inject(FaultPlan::new(OpKind::Open, 2, eio).in_path(".sst").forever());
    let failed = follower.catch_up();
    faults.clear_faults();
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
}

/// Regression: after a reload that had failed, the follower went on reading the log, with pools that were ahead of it.
#[test]
fn pools_of_a_failed_reload_are_not_shown() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).open().unwrap();
    let parts = [partition(&writer, "a"), writer.open_partition("pool", pool_options(8 << 20)).unwrap()];
    let q = partition(&writer, "q");
    let commit = |n: u64| {
        let mut batch = writer.batch();
        parts.iter().for_each(|part| batch.insert(part, "k", padded(n, 2_000)));
        batch.commit().unwrap();
    };
    commit(0);
    let fs = OpenHookFs::new(faults.clone());
    let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
    (1..100).for_each(commit);
    q.insert("k", "1").unwrap();
    q.flush().unwrap();
    fail_reload(&faults, &follower);
    let (follower_in, states) = (follower.clone(), Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&states);
    let check = move || {
        let snapshot = follower_in.snapshot();
        let read = |name| {
            let part = follower_in.partition(name).unwrap();
            snapshot.get(&part, "k").unwrap().map(|value| value.to_vec())
        };
        assert_eq!(read("a"), read("pool"), "at {}", end_of(&follower_in));
        seen.fetch_add(1, Ordering::SeqCst);
    };
    check();
    fs.set(move |_| check());
    follower.catch_up().unwrap();
    fs.clear();
    assert_eq!(follower.change_position().unwrap(), writer.change_position().unwrap());
    assert!(states.load(Ordering::SeqCst) > 3);
}

/// A pool has records of a history that power loss has ended, and nothing tells which.
#[test]
fn a_lost_history_in_a_pool_is_stale() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = open_writer(&machine);
    let pool = writer.open_partition("pool", pool_options(8 << 20)).unwrap();
    pool.insert("k", "0").unwrap();
    let q = partition(&writer, "q");
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    q.insert("k", "1").unwrap();
    q.flush().unwrap();
    (1..10).for_each(|n| pool.insert("k", format!("lost {n}")).unwrap());
    fail_reload(&faults, &follower);
    machine.freeze_after(Some(0));
    drop((writer, pool, q));
    crash_or_kill(&machine, Survival::Nothing, 1);
    let writer = open_writer(&machine);
    let pool = writer.partition("pool").unwrap();
    assert_eq!(text(&pool, "k").as_deref(), Some("0"));
    pool.insert("k", "new").unwrap();
    let failed = follower.catch_up().unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Stale, "{failed}");
    assert_eq!(text(&follower.partition("pool").unwrap(), "k").as_deref(), Some("0"));
}

/// Regression: a follower whose manifest or table was gone reported success at each call, and stayed where it was.
#[test]
fn a_missing_file_is_an_error() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let writer = open_writer(&machine);
    let p = partition(&writer, "p");
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    p.insert("k", "1").unwrap();
    p.flush().unwrap();
    let missing = Fault::Error(std::io::ErrorKind::NotFound);
    faults.inject(FaultPlan::new(OpKind::Open, 1, missing).in_path(".sst").forever());
    assert_eq!(follower.catch_up().unwrap_err().kind(), ErrorKind::Io);
    faults.clear_faults();
    assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
    machine.rename(&Path::new(DIR).join("MANIFEST"), Path::new("/MANIFEST")).unwrap();
    p.insert("k", "2").unwrap();
    (0..2).for_each(|_| assert_eq!(follower.catch_up().unwrap_err().kind(), ErrorKind::Io));
    machine.rename(Path::new("/MANIFEST"), &Path::new(DIR).join("MANIFEST")).unwrap();
    assert_eq!(follower.catch_up().unwrap(), writer.change_position().unwrap());
    assert_eq!(text(&follower.partition("p").unwrap(), "k").as_deref(), Some("2"));
}

/// A follower beside a log with a damaged commit in the middle.
fn follower_of_damaged_log() -> (OpenHookFs, Database) {
    let machine = MemFs::new();
    let writer = config(Arc::new(machine.clone())).wal_segment_size(64 << 10).open().unwrap();
    let p = partition(&writer, "p");
    p.insert("k", "1").unwrap();
    let fs = OpenHookFs::new(machine.clone());
    let follower = config(Arc::new(fs.clone())).open_follower().unwrap();
    p.insert("k", "a value that is lost").unwrap();
    (0..200).for_each(|n| p.insert("n", padded(n, 1_000)).unwrap());
    machine.freeze_after(Some(0));
    drop((writer, p));
    machine.freeze_after(None);
    damage(&machine, b"a value that is lost");
    (fs, follower)
}

/// Counts the openings of the manifest, and calls `work` before the one with this number.
fn count_manifests(fs: &OpenHookFs, nth: u64, mut work: impl FnMut() + Send + 'static) -> Arc<AtomicU64> {
    let count = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&count);
    fs.set(move |path| {
        if path.ends_with("MANIFEST") && counting.fetch_add(1, Ordering::SeqCst) == nth {
            work();
        }
    });
    count
}

/// Regression: a call read a database with a damaged log up to a hundred times, and `close` waited for it.
#[test]
fn a_damaged_log_is_read_a_few_times() {
    let (fs, follower) = follower_of_damaged_log();
    let count = count_manifests(&fs, u64::MAX, || {});
    assert_eq!(follower.catch_up().unwrap_err().kind(), ErrorKind::Corruption);
    let count = count.load(Ordering::SeqCst);
    assert!((4..30).contains(&count), "the manifest was opened {count} times");
}

#[test]
fn close_ends_the_work_of_a_follower() {
    for is_checkpoint in [false, true] {
        let (fs, follower) = follower_of_damaged_log();
        let (closing, followed) = (follower.clone(), follower.partition("p").unwrap());
        let closed = Arc::new(Mutex::new(None));
        let closed_in = Arc::clone(&closed);
        let count = count_manifests(&fs, 3, move || {
            let closing = closing.clone();
            *closed_in.lock().unwrap() = Some(std::thread::spawn(move || closing.close()));
            wait_until("the database closes", || followed.get("k").is_err());
        });
        let failed = if is_checkpoint { follower.checkpoint("/copies/1") } else { follower.catch_up().map(drop) };
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Closed);
        closed.lock().unwrap().take().unwrap().join().unwrap().unwrap();
        let count = count.load(Ordering::SeqCst);
        assert!(count < 8, "the manifest was opened {count} times");
    }
}
