//! Followers and feeds beside a log that is damaged, at times only for a while, and recoveries that are killed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{MemFs, SeededRng};
use azekura::{ChangePosition, Changes, Config, Database, ErrorKind, Operation, PersistMode, RecoveryMode, Result};

use super::faults::{config, partition};
use crate::changes::DIR;
use crate::testkit::env_u64;
use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::file_bytes;

const MODES: [RecoveryMode; 3] = [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage];

/// A feed, and the numbers of the commits before it and of those that it has returned.
struct Feed {
    changes: Changes,
    seen: Vec<u64>,
    is_before_a_loss: bool,
}

/// A random history of a database whose commits insert one number each, in ascending order.
struct History {
    machine: MemFs,
    rng: SeededRng,
    story: Vec<String>,
    retention: Duration,
    db: Option<Database>,
    /// The numbers in the database.
    commits: Vec<u64>,
    next: u64,
    follower: Database,
    feeds: Vec<Feed>,
    /// Positions, each with the numbers before it.
    positions: Vec<(ChangePosition, Vec<u64>)>,
    losses: u32,
    /// Commits of feeds that were begun before a loss and have gone on.
    read_on: u32,
}

/// The numbers in a database.
fn numbers_of(db: &Database) -> Vec<u64> {
    let number = |key: Result<azekura::Slice>| String::from_utf8_lossy(&key.unwrap()).parse().unwrap();
    let mut numbers: Vec<u64> = partition(db, "p").keys().map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// Adds the numbers of the next commits to `seen`, up to an error.
fn read_on(changes: &mut Changes, seen: &mut Vec<u64>) {
    for commit in changes.map_while(Result::ok) {
        for change in commit.changes() {
            let Operation::Insert { key, .. } = change.operation else { panic!("no commit does this: {change:?}") };
            seen.push(String::from_utf8_lossy(key).parse().unwrap());
        }
    }
}

impl History {
    fn new(seed: u64) -> History {
        let machine = MemFs::new();
        let retention = Duration::from_secs(if seed.is_multiple_of(3) { 0 } else { 3_600 });
        let open = || open(&machine, retention);
        let db = open().open().unwrap();
        partition(&db, "p");
        let follower = open().open_follower().unwrap();
        History {
            rng: SeededRng::with_stream(seed, 77),
            story: vec![format!("seed {seed}")],
            retention,
            db: Some(db),
            commits: Vec::new(),
            next: 1,
            follower,
            feeds: Vec::new(),
            positions: Vec::new(),
            losses: 0,
            read_on: 0,
            machine,
        }
    }

    fn db(&self) -> &Database {
        self.db.as_ref().unwrap()
    }

    fn commit(&mut self) {
        let len = if self.rng.below(4) == 0 { 30_000 } else { 10 };
        partition(self.db(), "p").insert(self.next.to_string(), vec![0; len]).unwrap();
        self.commits.push(self.next);
        self.next += 1;
        self.positions.push((self.db().change_position().unwrap(), self.commits.clone()));
    }

    /// A feed from a position returns what follows it in the present history, or a part of it.
    fn read_from_a_position(&mut self) {
        let (position, before) = self.rng.pick(&self.positions);
        for db in [self.db(), &self.follower] {
            let Ok(mut changes) = db.changes_since(position) else { continue };
            let mut seen = before.clone();
            read_on(&mut changes, &mut seen);
            // A follower that has not caught up knows of no loss.
            let has_read = seen.len() > before.len() || std::ptr::eq(db, self.db());
            assert!(!has_read || self.commits.starts_with(&seen), "{position}: {seen:?}\n{:#?}", self.story);
        }
    }

    /// A follower that has caught up shows the state of the writer.
    fn catch_up(&mut self) {
        let caught_up = self.follower.catch_up();
        self.story.push(format!("catch up: {caught_up:?}"));
        match caught_up {
            Ok(position) => {
                assert_eq!(position, self.db().change_position().unwrap(), "{:#?}", self.story);
                assert_eq!(numbers_of(&self.follower), self.commits, "{:#?}", self.story);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Stale, "{:#?}", self.story);
                if self.rng.chance_one_in(2) {
                    self.follower = open(&self.machine, self.retention).open_follower().unwrap();
                    self.feeds.clear();
                }
            }
        }
    }

    fn read_feeds(&mut self) {
        for Feed { changes, seen, is_before_a_loss } in &mut self.feeds {
            let before = seen.len();
            read_on(changes, seen);
            let read = seen.len() - before;
            assert!(read == 0 || self.commits.starts_with(seen), "{seen:?} of {:?}\n{:#?}", self.commits, self.story);
            self.read_on += if *is_before_a_loss { read as u32 } else { 0 };
        }
    }

    fn kill(&mut self) {
        self.machine.freeze_after(Some(0));
        self.db = None;
        self.machine.freeze_after(None);
    }

    /// Changes a byte of a segment. Returns its file, its offset and what it was.
    fn damage(&mut self) -> (PathBuf, u64, u8) {
        let names = self.machine.read_dir(Path::new(DIR)).unwrap().into_iter().map(|entry| entry.name);
        let segments: Vec<_> = names.filter(|name| name.ends_with(".wal")).collect();
        let path = Path::new(DIR).join(self.rng.pick(&segments));
        let file = self.machine.open(&path, OpenMode::Write).unwrap();
        let bytes = file_bytes(&*file);
        let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0).max(128) as u64;
        let at = 128 + self.rng.below(used - 127).min(bytes.len() as u64 - 129);
        file.write_at(&[bytes[at as usize] ^ 1], at).unwrap();
        self.story.push(format!("damage of {path:?} at {at}"));
        (path, at, bytes[at as usize])
    }

    /// Ends the damage, if the byte has not been written since.
    fn heal(&mut self, (path, at, byte): (PathBuf, u64, u8)) {
        let Ok(file) = self.machine.open(&path, OpenMode::Write) else { return };
        if file_bytes(&*file).get(at as usize) == Some(&(byte ^ 1)) {
            file.write_at(&[byte], at).unwrap();
            self.story.push("no damage any more".into());
        }
    }

    /// Opens that are killed at some operation.
    fn kill_opens(&mut self) -> bool {
        for _ in 0..self.rng.below(3) {
            let (mode, operations) = (self.rng.pick(&MODES), self.rng.below(60));
            self.machine.freeze_after(Some(operations));
            let opened = open(&self.machine, self.retention).recovery_mode(mode).open();
            let is_open = opened.is_ok();
            self.db = opened.ok();
            self.story.push(format!("{mode:?} killed after {operations} operations, was open: {is_open}"));
            self.kill();
            if is_open {
                return true;
            }
            if self.rng.chance_one_in(2) {
                drop(self.follower.catch_up());
            }
        }
        false
    }

    fn reopen(&mut self) {
        if self.rng.chance_one_in(3) {
            self.db.take().unwrap().close().unwrap();
        } else {
            self.kill();
        }
        let damage = self.rng.chance_one_in(2).then(|| self.damage());
        let was_open = self.kill_opens();
        if let Some(damage) = damage.filter(|_| !was_open && self.rng.chance_one_in(3)) {
            self.heal(damage);
        }
        let modes = if self.rng.chance_one_in(4) { &MODES[2..] } else { &MODES };
        self.db = modes.iter().find_map(|mode| open(&self.machine, self.retention).recovery_mode(*mode).open().ok());
        assert!(self.db.is_some(), "{:#?}", self.story);
        let found = numbers_of(self.db());
        self.story.push(format!("opened with {found:?} of {:?}", self.commits));
        if found != self.commits {
            self.losses += 1;
            self.feeds.iter_mut().for_each(|feed| feed.is_before_a_loss = true);
            if !self.commits.starts_with(&found) {
                self.positions.clear(); // none is valid
            }
            self.commits = found;
        }
    }

    fn step(&mut self) {
        match self.rng.below(20) {
            0..7 => self.commit(),
            7 => {
                partition(self.db(), "p").flush().unwrap();
                while self.db().step().unwrap() {}
                self.story.push("flush".into());
            }
            8 | 9 => self.db().persist(PersistMode::SyncData).unwrap(),
            10 => {
                let (position, seen) = (self.follower.change_position().unwrap(), numbers_of(&self.follower));
                let changes = self.follower.changes_since(position);
                self.feeds.extend(changes.map(|changes| Feed { changes, seen, is_before_a_loss: false }));
                self.story.push(format!("feed from {position}"));
            }
            11 if !self.positions.is_empty() => self.read_from_a_position(),
            12..15 => self.catch_up(),
            15..17 => self.read_feeds(),
            _ => self.reopen(),
        }
    }
}

fn open(machine: &MemFs, retention: Duration) -> Config {
    let config = config(Arc::new(machine.clone())).wal_segment_size(64 << 10);
    config.wal_retention(retention).max_retained_wal_size(1 << 30)
}

/// Each commit that a feed returns continues what it has returned, in the present history of the database, also when
/// damage that a killed recovery has met is gone. A follower that has caught up shows the state of the writer.
#[test]
fn feeds_and_followers_of_a_damaged_log() {
    let seeds = test_seeds(10 * env_u64("AZEKURA_FOLLOWER_RUNS", 8));
    let (mut losses, mut read_on) = (0, 0);
    for seed in &seeds {
        let mut history = History::new(*seed);
        (0..history.rng.below(200)).for_each(|_| history.step());
        (losses, read_on) = (losses + history.losses, read_on + history.read_on);
    }
    assert!(seeds.len() < 40 || (losses > 10 && read_on > 3), "{losses} losses, {read_on} commits of feeds behind one");
}
