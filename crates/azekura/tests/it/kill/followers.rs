//! Processes that follow the writer and read its change feed. The writer, a follower, several or all of them are
//! killed and started again, while the others go on.
//!
//! Each commit of the writer sets its number in two partitions, so a follower knows which commit a state is that of:
//! the state must be that after this commit, and a later one is not older, also after a kill of the writer or the
//! follower, because a kill loses nothing. The feed returns each commit once, from a position that the follower stores
//! outside of the database together with the numbers that it has read.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use azekura::testing::SeededRng;
use azekura::{
    ChangePosition, CommittedBatch, Config, Database, ErrorKind, Operation, Partition, PlantedBug, Snapshot,
};
use tempfile::TempDir;

use super::{
    BLOB_GC_FLAG_FILE, ChildProcess, FOLLOWERS_FLAG_FILE, KillCounters, LOADED_PARTITION, PARTITION_NAMES,
    RETENTION_FLAG_FILE, WRITER_ENV, WRITERS, acknowledged_commits, check, commit_contents, config, count_acknowledged,
    counter_key, end_with_parent, expected_state, find_load_in, new_test_dir, number_of, say,
};
use crate::testkit::atomic_writes::EXPIRING;
use crate::testkit::{FailureReport, Map, env_u64};

/// Set in a following process; the value is a directory for its files, in that of the writer.
const FOLLOWER_ENV: &str = "AZEKURA_KILL_FOLLOWER";
const FOLLOWERS: usize = 2;
/// A file that exists when the writer has ended for good.
const END_FILE: &str = "end";
/// A file with the name of the planted bug of the followers.
const BUG_FILE: &str = "bug";
/// The position of the feed, and the numbers that belong to it.
const PROGRESS_FILE: &str = "progress";
/// A partition that the writer creates and deletes.
const TEMPORARY_PARTITION: &str = "temporary";
/// The followers store their progress after this number of commits of the feed, and after its end.
const COMMITS_PER_STORE: u64 = 100;
const BUGS: [PlantedBug; 4] = [
    PlantedBug::FollowerTearsCommits,
    PlantedBug::FollowerMissesRecycling,
    PlantedBug::FollowerForgetsSnapshots,
    PlantedBug::UnnoticedRecycling,
];

/// The writer: flushes, compactions, checkpoints, and partitions that are created and deleted.
pub(super) fn change_files_until_killed(dir: &Path, db: &Database, partitions: &[Partition]) {
    let copy = dir.join("copy");
    for n in 0u64.. {
        for part in partitions {
            part.flush().unwrap();
        }
        match n % 4 {
            0 => {
                let temporary = db.open_partition(TEMPORARY_PARTITION, Default::default()).unwrap();
                temporary.insert("k", n.to_le_bytes()).unwrap();
            }
            1 => partitions[1].major_compact().unwrap(),
            2 => db.delete_partition_by_name(TEMPORARY_PARTITION).unwrap(),
            _ => {
                if copy.exists() {
                    fs::remove_dir_all(&copy).unwrap();
                }
                db.checkpoint(&copy).unwrap();
            }
        }
    }
}

/// What a follower stores.
struct FollowerProgress {
    position: ChangePosition,
    /// The last commit of each writer before the position.
    read: [u64; WRITERS as usize],
    counters: FollowerCounters,
}

/// Counts of one follower, over all processes.
#[derive(Clone, Copy, Debug, Default)]
struct FollowerCounters {
    opens: u64,
    /// States that were compared.
    states: u64,
    /// Commits of the feed.
    commits: u64,
    /// Positions of the feed that were gone.
    stale: u64,
    /// Values of the feed that were gone, because a later commit has replaced them.
    gone: u64,
}

impl FollowerCounters {
    fn numbers(&mut self) -> [&mut u64; 5] {
        let FollowerCounters { opens, states, commits, stale, gone } = self;
        [opens, states, commits, stale, gone]
    }
}

impl FollowerProgress {
    fn load(dir: &Path) -> Option<FollowerProgress> {
        let text = fs::read_to_string(dir.join(PROGRESS_FILE)).ok()?;
        let mut words = text.split(' ');
        let position = words.next()?.parse().unwrap();
        let mut numbers = words.map(|word| word.parse::<u64>().unwrap());
        let read = std::array::from_fn(|_| numbers.next().unwrap());
        let mut counters = FollowerCounters::default();
        counters.numbers().into_iter().zip(numbers).for_each(|(counter, number)| *counter = number);
        Some(FollowerProgress { position, read, counters })
    }

    /// Replaces the file as a whole.
    fn store(&mut self, dir: &Path) {
        let counters = self.counters.numbers().map(|number| *number);
        let numbers: Vec<String> = self.read.iter().chain(&counters).map(u64::to_string).collect();
        fs::write(dir.join("new"), format!("{} {}", self.position, numbers.join(" "))).unwrap();
        fs::rename(dir.join("new"), dir.join(PROGRESS_FILE)).unwrap();
    }
}

/// A following process.
struct FollowingProcess {
    dir: PathBuf,
    writer_dir: PathBuf,
    db: Database,
    partitions: Vec<Partition>,
    /// The position and the last commit of each writer that were seen last.
    position: ChangePosition,
    seen: [u64; WRITERS as usize],
    /// The last load that was seen.
    load: u64,
    /// A state of the past.
    kept: Option<(Snapshot, [u64; WRITERS as usize])>,
    progress: FollowerProgress,
}

/// The follower: looks until it is killed, or to the end if the writer has ended.
#[test]
fn follower() {
    let Some(dir) = std::env::var_os(FOLLOWER_ENV).map(PathBuf::from) else { return };
    end_with_parent();
    say("opening");
    let mut process = FollowingProcess::open(&dir);
    let mut rng = SeededRng::new(u64::from(std::process::id()));
    for n in 0u64.. {
        let is_end = process.writer_dir.join(END_FILE).exists();
        let before = process.position;
        process.look(n);
        process.read_changes();
        if n == 0 {
            say("follows");
        }
        if is_end && process.position == before {
            process.check_end();
            return say("ends");
        }
        // At times long enough for the writer to recycle segments that were not read.
        let longest = if rng.chance_one_in(8) { 300 } else { 20 };
        thread::sleep(Duration::from_millis(rng.below(longest)));
    }
}

impl FollowingProcess {
    fn open(dir: &Path) -> FollowingProcess {
        let writer_dir = dir.parent().unwrap().to_owned();
        let bug = fs::read_to_string(writer_dir.join(BUG_FILE)).ok();
        let bug = bug.map(|name| BUGS.into_iter().find(|bug| format!("{bug:?}") == name).unwrap());
        let open = || bug.into_iter().fold(config(&writer_dir), Config::plant_bug).open_follower();
        let db = loop {
            match open() {
                Err(error) if error.kind() == ErrorKind::Conflict => {} // the writer was faster
                opened => break opened.unwrap(),
            }
        };
        let partitions: Vec<Partition> = PARTITION_NAMES.map(|name| db.partition(name).unwrap()).into();
        let position = db.change_position().unwrap();
        let seen = read_counters(&db.snapshot(), &partitions);
        let progress = FollowerProgress::load(dir);
        if let Some(progress) = &progress {
            assert!(position >= progress.position, "{position:?} is before what was read, {:?}", progress.position);
        }
        let first = || FollowerProgress { position, read: seen, counters: FollowerCounters::default() };
        let mut progress = progress.unwrap_or_else(first);
        progress.counters.opens += 1;
        FollowingProcess {
            dir: dir.to_owned(),
            writer_dir,
            db,
            partitions,
            position,
            seen,
            load: 0,
            kept: None,
            progress,
        }
    }

    /// Catches up, and compares the state.
    fn look(&mut self, n: u64) {
        // Never stale, because a kill loses nothing.
        let position = self.db.catch_up().unwrap_or_else(|error| panic!("catch_up: {error}"));
        assert!(position >= self.position, "{position:?} after {:?}", self.position);
        self.position = position;
        let snapshot = self.db.snapshot();
        let seen = read_counters(&snapshot, &self.partitions);
        for (now, before) in seen.iter().zip(&self.seen) {
            assert!(now >= before, "the follower goes back from {:?} to {seen:?}", self.seen);
        }
        self.seen = seen;
        check_state(&snapshot, &self.partitions, seen);
        if self.db.partition_exists(LOADED_PARTITION) {
            let loaded = self.db.partition(LOADED_PARTITION).unwrap();
            let load = find_load_in(snapshot.values(&loaded)).unwrap();
            assert!(load == 0 || load >= self.load, "load {load} after {}", self.load);
            self.load = load.max(self.load);
        }
        if self.db.partition_exists(TEMPORARY_PARTITION) {
            assert!(self.db.partition(TEMPORARY_PARTITION).unwrap().len().unwrap() <= 1);
        }
        match &self.kept {
            Some((snapshot, seen)) => check_state(snapshot, &self.partitions, *seen),
            None => self.kept = Some((snapshot, seen)),
        }
        self.kept.take_if(|_| n % 5 == 4);
        self.progress.counters.states += 1;
    }

    /// Reads the changes up to the state that was seen last.
    fn read_changes(&mut self) {
        let read = self.db.changes_since(self.progress.position).and_then(|mut changes| {
            for commit in changes.by_ref() {
                self.take_commit(&commit?);
                self.progress.counters.commits += 1;
                if self.progress.counters.commits.is_multiple_of(COMMITS_PER_STORE) {
                    self.progress.store(&self.dir);
                }
            }
            self.progress.position = changes.position();
            Ok(())
        });
        if let Err(error) = read {
            assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
            assert!(!self.writer_dir.join(RETENTION_FLAG_FILE).exists(), "all segments are kept, but: {error}");
            // As an application does: it copies the present state, and reads the changes behind it.
            self.progress.counters.stale += 1;
            (self.progress.position, self.progress.read) = (self.position, self.seen);
        }
        assert_eq!(self.progress.read, self.seen, "the changes lead to the state");
        assert_eq!(self.progress.position.sequence_number(), self.position.sequence_number());
        self.progress.store(&self.dir);
    }

    /// Checks that this is the next commit of a writer, as a whole.
    fn take_commit(&mut self, commit: &CommittedBatch) {
        assert!(commit.position() > self.progress.position, "a commit is returned once");
        self.progress.position = commit.position();
        // The keys and their values; `Err` for a value that is gone.
        type Writes = BTreeMap<Vec<u8>, Result<Option<Vec<u8>>, ()>>;
        let mut found: BTreeMap<&str, Writes> = BTreeMap::new();
        for change in commit.changes().filter(|change| PARTITION_NAMES.contains(&change.partition)) {
            let writes = found.entry(change.partition).or_default();
            match change.operation {
                Operation::Insert { key, value, .. } => {
                    let value = value.get().unwrap().map(|value| value.to_vec());
                    self.progress.counters.gone += u64::from(value.is_none());
                    let value = value.filter(|value| value != EXPIRING).map_or(Err(()), |value| Ok(Some(value)));
                    writes.insert(key.to_vec(), value);
                }
                Operation::Remove { key } => _ = writes.insert(key.to_vec(), Ok(None)),
                Operation::RemoveRange { start: Bound::Included(key), end: Bound::Included(end) } if key == end => {
                    writes.insert(key.to_vec(), Ok(None));
                }
                other => panic!("no writer does this: {other:?}"),
            }
        }
        if found.is_empty() {
            return; // of another partition
        }
        let numbers = |writer: u64| found.values().next()?.get(counter_key(writer).as_bytes())?.as_ref().ok()?.clone();
        let writer = (0..WRITERS).find(|writer| numbers(*writer).is_some()).expect("each commit has a number");
        let (n, last) = (number_of(numbers(writer).as_deref()), &mut self.progress.read[writer as usize]);
        assert_eq!(n, *last + 1, "writer {writer}: the next commit, once");
        *last = n;
        let mut wanted = BTreeMap::from([(counter_key(writer).into_bytes(), Some(n.to_le_bytes().to_vec()))]);
        wanted.extend(commit_contents(writer, n).into_iter().map(|(key, value)| (key.into_bytes(), value)));
        for name in PARTITION_NAMES {
            let writes = found.get(name).unwrap_or_else(|| panic!("commit {n} without partition {name}"));
            let is_same = |(key, value): (&Vec<u8>, &Option<Vec<u8>>)| match writes.get(key) {
                Some(Ok(found)) => found == value,
                found => found.is_some(),
            };
            assert!(writes.len() == wanted.len() && wanted.iter().all(is_same), "commit {n} in {name}: {writes:.99?}");
        }
    }

    /// Nothing is missing at the end.
    fn check_end(&self) {
        for (writer, seen) in (0..WRITERS).zip(self.seen) {
            let noted = acknowledged_commits(&self.writer_dir, writer);
            assert!([noted, noted + 1].contains(&seen), "writer {writer}: {seen}, {noted} were acknowledged");
        }
    }
}

/// The last commit of each writer, which must be the same in all partitions.
fn read_counters(snapshot: &Snapshot, partitions: &[Partition]) -> [u64; WRITERS as usize] {
    std::array::from_fn(|writer| {
        let key = counter_key(writer as u64);
        let read = |part| number_of(snapshot.get(part, &key).unwrap().as_deref());
        let numbers: Vec<u64> = partitions.iter().map(read).collect();
        assert!(numbers.iter().all(|n| *n == numbers[0]), "writer {writer}: a commit in part, {numbers:?}");
        numbers[0]
    })
}

/// Compares the keys and values of all partitions with those after these commits.
fn check_state(snapshot: &Snapshot, partitions: &[Partition], commits: [u64; WRITERS as usize]) {
    for (writer, n) in (0..WRITERS).zip(commits) {
        let wanted = expected_state(writer, n);
        for part in partitions {
            let pairs = snapshot.range(part, format!("w{writer} ")..format!("w{writer}!")).map(|pair| pair.unwrap());
            let found: Map = pairs.map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
            let found: Map = found.into_iter().filter(|(_, value)| value != EXPIRING).collect();
            assert!(found == wanted, "{}: not the state after commit {n} of writer {writer}", part.name);
        }
    }
}

/// The processes of one database.
struct FollowedWriter {
    place: TempDir,
    writer: Option<ChildProcess>,
    followers: [Option<ChildProcess>; FOLLOWERS],
}

impl FollowedWriter {
    fn new(retains: bool, bug: Option<PlantedBug>) -> FollowedWriter {
        let place = new_test_dir(std::env::temp_dir(), Some(FOLLOWERS_FLAG_FILE));
        fs::write(place.path().join(BLOB_GC_FLAG_FILE), "").unwrap();
        if retains {
            fs::write(place.path().join(RETENTION_FLAG_FILE), "").unwrap();
        }
        if let Some(bug) = bug {
            fs::write(place.path().join(BUG_FILE), format!("{bug:?}")).unwrap();
        }
        (0..FOLLOWERS).for_each(|n| fs::create_dir(follower_dir(place.path(), n)).unwrap());
        let mut started = FollowedWriter { place, writer: None, followers: Default::default() };
        started.start_writer().wait_for("open");
        started
    }

    fn start_writer(&mut self) -> &mut ChildProcess {
        let dir = self.place.path();
        self.writer.get_or_insert_with(|| ChildProcess::start("kill::writer", WRITER_ENV, dir))
    }

    fn start_follower(&mut self, n: usize) -> &mut ChildProcess {
        let dir = follower_dir(self.place.path(), n);
        self.followers[n].get_or_insert_with(|| ChildProcess::start("kill::followers::follower", FOLLOWER_ENV, &dir))
    }

    /// Starts the processes that do not run, and kills some of them a random time later.
    fn kill_some(&mut self, rng: &mut SeededRng) {
        let is_early = rng.chance_one_in(3);
        self.start_writer().wait_for(if is_early { "opening" } else { "acknowledged" });
        for n in 0..FOLLOWERS {
            self.start_follower(n).wait_for(if rng.chance_one_in(3) { "opening" } else { "follows" });
        }
        thread::sleep(Duration::from_micros(rng.below(60_000)));
        let victims = rng.pick(&[0b001, 0b001, 0b010, 0b100, 0b011, 0b110, 0b111]);
        if victims & 1 > 0 {
            self.writer.take().unwrap().kill();
        }
        for n in 0..FOLLOWERS {
            if victims >> (n + 1) & 1 > 0 {
                self.followers[n].take().unwrap().kill();
            }
        }
    }

    /// Ends the writer, and lets the followers read all.
    fn end(mut self, counters: &mut KillCounters, followed: &mut FollowerCounters) {
        (0..FOLLOWERS).for_each(|n| self.start_follower(n).wait_for("follows"));
        if let Some(writer) = self.writer.take() {
            writer.kill();
        }
        check(self.place.path(), counters);
        fs::write(self.place.path().join(END_FILE), "").unwrap();
        for n in 0..FOLLOWERS {
            self.start_follower(n).wait_for("ends");
            let progress = FollowerProgress::load(&follower_dir(self.place.path(), n));
            let mut of_this = progress.expect("a follower stores its progress").counters;
            followed.numbers().into_iter().zip(of_this.numbers()).for_each(|(sum, number)| *sum += *number);
        }
        count_acknowledged(self.place.path(), counters);
    }
}

fn follower_dir(dir: &Path, n: usize) -> PathBuf {
    dir.join(format!("follower {n}"))
}

/// Kills processes, in a new database after every fifth time.
fn follow_and_kill(test: &'static str, kills: u64, bug: Option<PlantedBug>) -> (KillCounters, FollowerCounters) {
    let seed = env_u64("AZEKURA_SEED", 1);
    let replay = FailureReport::new(test, seed);
    let mut rng = SeededRng::new(seed);
    let (mut counters, mut followed) = (KillCounters::default(), FollowerCounters::default());
    for n in 0..kills.div_ceil(5) {
        let mut processes = FollowedWriter::new(n % 2 == 0 && bug.is_none(), bug);
        for kill in 0..(kills - n * 5).min(5) {
            replay.set_progress(format!("database {n}, kill {kill}"));
            processes.kill_some(&mut rng);
            counters.kills += 1;
        }
        processes.end(&mut counters, &mut followed);
    }
    (counters, followed)
}

#[test]
fn followers_see_whole_commits_across_kills() {
    let test = "kill::followers::followers_see_whole_commits_across_kills";
    let (counters, followed) = follow_and_kill(test, env_u64("AZEKURA_KILLS", 80).div_ceil(4), None);
    println!("{counters:?} {followed:?}");
    assert!(counters.acknowledged > 0 && followed.states > 0 && followed.commits > 0, "{counters:?} {followed:?}");
}

/// The first failure ends the kills. How many it takes depends on how far the processes get between them.
#[test]
fn planted_bugs_are_found_across_kills() {
    for bug in BUGS {
        let test = "kill::followers::planted_bugs_are_found_across_kills";
        let found = std::panic::catch_unwind(|| follow_and_kill(test, 1_000, Some(bug)));
        let panic = found.expect_err(&format!("{bug:?} was not noticed"));
        let text = panic.downcast_ref::<String>().map_or("", |text| text);
        let why = text.lines().find(|line| !line.contains("panicked") && line.len() > 60 || line.contains("not the"));
        println!("{bug:?} is red: {}", why.unwrap_or(text));
    }
}
