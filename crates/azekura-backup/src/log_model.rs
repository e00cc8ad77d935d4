//! Random histories of a database, its watchers and its backups in memory: a restore never mixes two histories, and is
//! never shorter than what is stored without an error.
//!
//! - `AZEKURA_BACKUP_SEEDS`: histories of each of four kinds; 120 by default.
//! - `AZEKURA_SEED`: runs one history only.

use std::collections::BTreeMap;

use azekura::testing::SeededRng;

use crate::error::BackupError;
use crate::history::{History, sort_backups};
use crate::layout::BackupManifest;
use crate::log::{StoredLog, Until, chain, choose, unneeded_logs};
use crate::log_object::{LogHeader, test_position};

/// What may happen beside commits, opens, power loss, backups, watchers and `prune`.
#[derive(Clone, Copy, Debug)]
struct Events {
    /// The clock is set back.
    clock_back: bool,
    /// A recovery loses durable commits. Then restores may be shorter: what was stored is another history.
    damage: bool,
    /// Number of ends of the log that a database keeps; others are forgotten.
    ends_max: usize,
}

/// The commits of a state: commit n + 1 is at index n. Commits of different histories have different numbers.
type Line = Vec<u64>;

/// A log object, and the commits in it by their sequence numbers.
struct ShippedLog {
    header: LogHeader,
    commits: Vec<(u64, u64)>,
}

struct ModelBackup {
    manifest: BackupManifest,
    line: Line,
}

/// A watcher with its end in the store, as in `watch.rs`. Its position is at its end.
#[derive(Clone, Copy)]
struct ModelWatcher {
    after: u64,
    /// The epoch of its position.
    position_epoch: u32,
    /// The epoch of the database when it was compared with the store.
    epoch: u32,
}

struct Model {
    events: Events,
    rng: SeededRng,
    line: Line,
    /// The commit before each commit.
    parents: BTreeMap<u64, u64>,
    /// Number of commits that survive power loss.
    durable: usize,
    epoch: u32,
    wal_ends: Vec<(u32, Option<u64>)>,
    forgotten: Option<u32>,
    clock: u64,
    logs: BTreeMap<u64, ShippedLog>,
    backups: Vec<ModelBackup>,
    next_backup: u64,
    watchers: [Option<ModelWatcher>; 2],
    /// What was stored of the history at each time.
    expected: Vec<(u64, Line)>,
    /// What has happened, for messages.
    story: Vec<String>,
}

impl Model {
    fn new(seed: u64, events: Events) -> Model {
        Model {
            events,
            rng: SeededRng::with_stream(seed, 5),
            line: Line::new(),
            parents: BTreeMap::new(),
            durable: 0,
            epoch: 1,
            wal_ends: Vec::new(),
            forgotten: None,
            clock: 1000,
            logs: BTreeMap::new(),
            backups: Vec::new(),
            next_backup: 0,
            watchers: [None; 2],
            expected: Vec::new(),
            story: Vec::new(),
        }
    }

    fn sequence(&self) -> u64 {
        self.line.len() as u64
    }

    fn note(&mut self, what: &str) {
        let (sequence, epoch, clock) = (self.sequence(), self.epoch, self.clock);
        self.story.push(format!("{what}: commit {sequence}, epoch {epoch}, time {clock}"));
    }

    fn step(&mut self) {
        self.clock += 10;
        if self.events.clock_back && self.rng.below(12) == 0 {
            self.clock -= self.rng.below(200).min(self.clock - 1000);
        }
        match self.rng.below(24) {
            0..8 => {
                let commit = self.parents.len() as u64 + 1;
                self.parents.insert(commit, self.line.last().copied().unwrap_or(0));
                self.line.push(commit);
            }
            8..11 => self.durable = self.line.len(),
            11 => self.open("open", self.line.len()),
            12 => {
                let left = self.rng.below((self.line.len() - self.durable) as u64 + 1) as usize;
                self.open("power loss", self.durable + left);
            }
            13 if self.events.damage && self.rng.below(4) == 0 => {
                let lost = self.rng.below(4) as usize;
                self.open("damage", self.durable.saturating_sub(lost));
            }
            14 => drop(self.create(true)),
            15 => drop(self.create(false)),
            16..21 => {
                let watcher = self.rng.below(2) as usize;
                self.watchers[watcher] = self.watch_step(watcher);
            }
            21 => self.watchers[self.rng.below(2) as usize] = None,
            22 if self.rng.below(3) == 0 => self.prune(),
            _ => {}
        }
    }

    /// Opens the database with this number of its commits.
    fn open(&mut self, what: &str, commits: usize) {
        self.line.truncate(commits);
        self.durable = commits;
        let end = Some(self.sequence());
        self.wal_ends.retain(|(_, earlier)| *earlier < end);
        self.wal_ends.push((self.epoch, end));
        if self.wal_ends.len() > self.events.ends_max + 1 {
            self.forgotten = Some(self.wal_ends.remove(0).0);
        }
        self.epoch += 10;
        self.note(what);
    }

    fn manifests(&self) -> Vec<(String, BackupManifest)> {
        let mut all: Vec<_> = self.backups.iter().map(|of| (of.manifest.id.clone(), of.manifest.clone())).collect();
        sort_backups(&mut all);
        all
    }

    fn stored_logs(&self) -> Vec<StoredLog> {
        let stored = |(after, log): (&u64, &ShippedLog)| StoredLog {
            object: after.to_string(),
            after: *after,
            header: Ok(log.header),
        };
        self.logs.iter().map(stored).collect()
    }

    /// As `create`, beside a writer of another process if it does not make the commits durable. Returns whether the
    /// store accepts the backup.
    fn create(&mut self, makes_durable: bool) -> bool {
        let sequence = self.sequence();
        let mut manifest = BackupManifest::new(format!("{:05}", self.next_backup), String::new());
        manifest.time_ms = self.clock;
        manifest.sequence = sequence;
        manifest.wal_ends = self.wal_ends.iter().copied().filter(|(_, end)| *end < Some(sequence)).collect();
        manifest.forgotten_ends = self.forgotten;
        manifest.position = test_position(self.epoch, sequence).to_string();
        let history = History::of([&manifest]);
        let is_other = |of: &BackupManifest| of.sequence > sequence || history.has_lost(of.epoch(), of.sequence);
        if self.backups.iter().any(|of| of.manifest.is_durable && is_other(&of.manifest)) {
            return false;
        }
        if makes_durable {
            self.durable = self.line.len();
        }
        manifest.is_durable = self.durable == self.line.len();
        self.next_backup += 1;
        self.note(if manifest.is_durable { "backup" } else { "backup that is not durable" });
        self.backups.push(ModelBackup { manifest, line: self.line.clone() });
        true
    }

    /// As `Watcher::begin`; `None` if a backup is needed.
    fn begin(&self) -> Option<ModelWatcher> {
        let manifests = self.manifests();
        let (_, backup) = manifests.iter().rev().find(|(_, of)| of.is_durable)?;
        let log = chain(&self.stored_logs(), backup, &manifests, Until::End).ok()?;
        match log.objects.last() {
            None => self.go_on(backup.sequence, backup.epoch()),
            Some(object) => {
                let header = self.logs[&object.parse().unwrap()].header;
                self.go_on(header.end(), header.epoch())
            }
        }
    }

    /// `None` if the feed has not the position, because a recovery has lost it.
    fn go_on(&self, after: u64, position_epoch: u32) -> Option<ModelWatcher> {
        if self.forgotten.is_some_and(|forgotten| position_epoch <= forgotten) {
            return None;
        }
        let valid = self.wal_ends.iter().find(|(of, _)| *of >= position_epoch).and_then(|(_, end)| *end);
        let is_valid = after <= valid.unwrap_or(after) && after <= self.sequence();
        is_valid.then_some(ModelWatcher { after, position_epoch, epoch: self.epoch })
    }

    /// As `Watcher::step`. Returns the watcher behind it.
    fn watch_step(&mut self, number: usize) -> Option<ModelWatcher> {
        let begun = match self.watchers[number] {
            Some(of) if of.epoch == self.epoch => self.go_on(of.after, of.position_epoch),
            _ => self.begin(),
        };
        let Some(watcher) = begun else {
            let is_stored = self.create(true);
            return is_stored.then_some(ModelWatcher {
                after: self.sequence(),
                position_epoch: self.epoch,
                epoch: self.epoch,
            });
        };
        let count = (self.durable as u64).saturating_sub(watcher.after);
        if count == 0 {
            return Some(watcher);
        }
        let end = watcher.after + 1 + self.rng.below(count);
        if let Some(other) = self.logs.get(&watcher.after) {
            return self.go_on(other.header.end(), other.header.epoch());
        }
        let header = LogHeader::for_test(watcher.after, self.epoch, end, self.clock);
        let commits = (watcher.after..end).map(|at| (at + 1, self.line[at as usize])).collect();
        self.logs.insert(watcher.after, ShippedLog { header, commits });
        self.note(&format!("watcher {number} ships {}..{end}", watcher.after));
        Some(ModelWatcher { after: end, position_epoch: self.epoch, ..watcher })
    }

    /// As `prune`, later than the grace time.
    fn prune(&mut self) {
        let keep = 1 + self.rng.below(3) as usize;
        let mut kept = self.manifests();
        let mut removed: Vec<_> = kept.drain(..kept.len().saturating_sub(keep)).collect();
        if !kept.iter().any(|(_, of)| of.is_durable)
            && let Some(newest) = removed.iter().rposition(|(_, of)| of.is_durable)
        {
            kept.push(removed.remove(newest));
        }
        self.backups.retain(|of| removed.iter().all(|(id, _)| *id != of.manifest.id));
        let logs = self.stored_logs();
        let kept: Vec<_> = kept.iter().map(|(_, of)| of).collect();
        for log in unneeded_logs(&logs, &kept) {
            self.logs.remove(&log.after);
        }
        self.expected.clear();
        self.note(&format!("prune to {keep}"));
    }

    /// The commits of a restore of these log objects; `None` if it is refused.
    fn restore(&self, logs: &[StoredLog], until: Until) -> Option<Line> {
        self.restore_of(logs, None, until).ok().flatten()
    }

    /// As [`restore`](Model::restore), with `--backup ID`.
    fn restore_of(&self, logs: &[StoredLog], wanted: Option<&str>, until: Until) -> crate::Result<Option<Line>> {
        let manifests = self.manifests();
        let Some((chosen, objects)) = choose(logs, &manifests, wanted, until)? else { return Ok(None) };
        let backup = self.backups.iter().find(|of| of.manifest.id == chosen.id);
        let mut line = backup.expect("it is in the store").line.clone();
        for object in objects {
            for (sequence, commit) in &self.logs[&object.parse().unwrap()].commits {
                if *sequence > line.len() as u64 && until.admits_commit(*sequence) {
                    assert_eq!(*sequence, line.len() as u64 + 1, "the log has a hole");
                    line.push(*commit);
                }
            }
        }
        Ok(Some(line))
    }

    /// The longest part of the history, up to `limit`, that backups that end up to there and the log have.
    fn stored(&self, limit: u64) -> Line {
        let within = self.backups.iter().filter(|of| of.line.len() as u64 <= limit);
        let kept = within.map(|of| of.line.iter().zip(&self.line).take_while(|(stored, now)| stored == now).count());
        let Some(mut end) = kept.max().map(|end| end as u64) else { return Line::new() };
        while let Some(log) = self.logs.values().find(|log| log.header.continues(end) && self.has(log))
            && end < limit
        {
            end = log.header.end().min(limit);
        }
        self.line[..end as usize].to_vec()
    }

    /// Compares a restore with what it must have, if it is not refused.
    fn check(&self, logs: &[StoredLog], until: Until, stored: &[u64]) {
        let Some(line) = self.restore(logs, until) else { return };
        let is_mixed = line.windows(2).any(|two| self.parents[&two[1]] != two[0]);
        assert!(!is_mixed, "{until:?} mixes {line:?}, now {:?}\n{:#?}", self.line, self.story);
        let is_short = !line.starts_with(stored) && !self.events.damage;
        assert!(!is_short, "{until:?} has {line:?}, stored is {stored:?}\n{:#?}", self.story);
        assert!(line.last().is_none() || until.admits_commit(line.len() as u64), "{until:?} has {line:?}");
    }

    /// Checks restores without one object. They have no less if a later one tells that it is missing.
    fn check_missing(&mut self, logs: &[StoredLog], limits: &[(Until, Line)]) {
        let whole: Vec<_> = limits.iter().map(|(until, _)| (*until, self.restore(logs, *until))).collect();
        for number in 0..logs.len() {
            let mut fewer = self.stored_logs();
            let missing = fewer.remove(number).header.expect("the headers are valid");
            self.story.push(format!("the log object behind {} is missing", missing.after));
            for (until, whole) in &whole {
                let follows = |of: &LogHeader| of.after >= missing.end() && of.epoch() >= missing.epoch();
                let tells = |of: &LogHeader| follows(of) && until.admits_log(of) && !self.events.clock_back;
                // An object beyond the limit may have the commits before one within it. The store looks the same if
                // the clock was set back between the two, and none is missing.
                let end = self.restore(&fewer, *until).map_or(0, |line| line.len() as u64);
                let beyond = || fewer.iter().flat_map(|of| &of.header).filter(|of| !until.admits_log(of));
                let precedes = |at: &LogHeader, of: &LogHeader| {
                    at.after == end && at.end() <= of.after && at.epoch() <= of.epoch()
                };
                let tells = |of: &LogHeader| tells(of) && !beyond().any(|at| precedes(at, of));
                let is_told = fewer.iter().flat_map(|of| &of.header).any(tells);
                self.check(&fewer, *until, whole.as_deref().filter(|_| is_told).unwrap_or_default());
            }
            self.story.pop();
        }
    }

    /// The part of the history that a durable backup and the log behind it have. Of a limit in time, only the backup.
    fn stored_behind(&self, backup: &ModelBackup, until: Until) -> Line {
        let mut end = backup.line.len() as u64;
        if !backup.manifest.is_durable || !self.line.starts_with(&backup.line) {
            return Line::new();
        }
        let limit = match until {
            Until::End => u64::MAX,
            Until::Sequence(limit) => limit,
            Until::TimeMs(_) => end,
        };
        while let Some(log) = self.logs.values().find(|log| log.header.continues(end) && self.has(log))
            && end < limit
        {
            end = log.header.end().min(limit);
        }
        self.line[..end as usize].to_vec()
    }

    /// Whether the commits of a log object are in the history.
    fn has(&self, log: &ShippedLog) -> bool {
        log.commits.iter().all(|(at, of)| self.line.get(*at as usize - 1) == Some(of))
    }

    /// Checks that a restore is not refused while every object is there, unless the store cannot tell what to
    /// restore. The log continues no backup that is not durable.
    fn check_refusal(&self, logs: &[StoredLog], wanted: Option<&ModelBackup>, until: Until) {
        if self.events.damage || self.events.clock_back {
            return;
        }
        let id = wanted.map(|of| &*of.manifest.id);
        let refused = match self.restore_of(logs, id, until) {
            Ok(Some(_)) => return,
            Ok(None) => "there is no backup".to_owned(),
            Err(error) => error.to_string(),
        };
        let is_justified = match wanted {
            Some(backup) => !backup.manifest.is_durable || end_of_log(logs, backup.manifest.sequence, until).1,
            None => self.is_unknown(logs, until),
        };
        assert!(is_justified, "{id:?} {until:?}: {refused}, now {:?}\n{:#?}", self.line, self.story);
    }

    /// Whether the log continues no backup within the limit, because none is durable, or one that is not durable may
    /// have had later commits than the log. It is not known that they were lost before the last epoch within the
    /// limit: of several ends of the log with one number, a manifest has the last only. And no backup shows that they
    /// were in the database in that epoch: a recovery may have lost them after an earlier one.
    fn is_unknown(&self, logs: &[StoredLog], until: Until) -> bool {
        let all = History::of(self.backups.iter().map(|of| &of.manifest));
        let manifests = self.backups.iter().map(|of| &of.manifest);
        let within: Vec<_> = manifests.filter(|of| until.admits_backup(of)).collect();
        let headers = logs.iter().flat_map(|of| &of.header).filter(|of| until.admits_log(of));
        let last = headers.map(LogHeader::epoch).chain(within.iter().map(|of| of.epoch())).max().unwrap_or(0);
        let durable = within.iter().filter(|of| of.is_durable);
        let Some(end) = durable.map(|of| end_of_log(logs, of.sequence, until).0).max() else { return true };
        let may_be_later = |of: &&BackupManifest| all.kept_before(of.epoch(), of.sequence, last) > end;
        let is_kept = |of: &&BackupManifest| of.is_durable || all.kept_until(of.epoch(), of.sequence) >= last;
        within.iter().any(|of| !is_kept(of) && may_be_later(of))
    }

    /// Checks restores of one backup to these limits.
    fn check_wanted(&self, logs: &[StoredLog], limits: &[(Until, Line)]) {
        for backup in &self.backups {
            let id = &*backup.manifest.id;
            for (until, _) in limits.iter().filter(|(until, _)| until.admits_backup(&backup.manifest)) {
                self.check_refusal(logs, Some(backup), *until);
                let Ok(Some(line)) = self.restore_of(logs, Some(id), *until) else { continue };
                let is_mixed = line.windows(2).any(|two| self.parents[&two[1]] != two[0]);
                assert!(!is_mixed, "{id} {until:?} mixes {line:?}\n{:#?}", self.story);
                assert!(line.starts_with(&backup.line), "{id} {until:?} has {line:?}\n{:#?}", self.story);
                let stored = self.stored_behind(backup, *until);
                let is_short = !self.events.damage && !line.starts_with(&stored);
                assert!(!is_short, "{id} {until:?} has {line:?}, stored is {stored:?}\n{:#?}", self.story);
            }
        }
    }

    /// Checks restores to all limits.
    fn check_all(&mut self) {
        let mut limits = vec![(Until::End, self.stored(u64::MAX))];
        limits.extend(self.expected.iter().map(|(time, stored)| (Until::TimeMs(*time), stored.clone())));
        limits.extend((0..self.sequence() + 3).map(|n| (Until::Sequence(n), self.stored(n))));
        for _ in 0..20 {
            limits.push((Until::TimeMs(900 + self.rng.below(self.clock - 800)), Line::new()));
        }
        let mut logs = self.stored_logs();
        limits.iter().for_each(|(until, stored)| self.check(&logs, *until, stored));
        limits.iter().for_each(|(until, _)| self.check_refusal(&logs, None, *until));
        self.check_wanted(&logs, &limits);
        self.check_missing(&logs, &limits);
        // With a damaged object, what is restored has no less. If it begins before a backup, it is not known whether it
        // ends behind it, or has replaced commits of one that is not durable.
        let newest = self.backups.iter().map(|of| of.manifest.sequence).max();
        let begin = logs.partition_point(|log| Some(log.after) < newest);
        if begin < logs.len() {
            let damaged = begin + self.rng.below((logs.len() - begin) as u64) as usize;
            logs[damaged].header = Err(BackupError::wrong("log", "damaged"));
            self.story.push(format!("log object {} is damaged", logs[damaged].after));
            limits.iter().for_each(|(until, stored)| self.check(&logs, *until, stored));
        }
    }
}

/// The end of the log behind a state, and whether more of it follows behind commits that it does not have. A later
/// backup may have them.
fn end_of_log(logs: &[StoredLog], mut end: u64, until: Until) -> (u64, bool) {
    let headers: Vec<_> = logs.iter().flat_map(|of| &of.header).filter(|of| until.admits_log(of)).collect();
    while let Some(of) = headers.iter().find(|of| of.continues(end)) {
        end = of.end();
    }
    (end, headers.iter().any(|of| of.after > end))
}

/// Runs a history.
fn run(seed: u64, events: Events) {
    let mut model = Model::new(seed, events);
    for _ in 0..10 + seed % 120 {
        model.step();
        let stored = model.stored(u64::MAX);
        model.check(&model.stored_logs(), Until::End, &stored);
        if !events.clock_back {
            model.expected.push((model.clock, stored));
        }
    }
    model.check_all();
}

fn env_u64(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

#[test]
fn restores_of_random_histories_lack_nothing() {
    let seeds = match env_u64("AZEKURA_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..env_u64("AZEKURA_BACKUP_SEEDS").unwrap_or(120),
    };
    for (clock_back, damage) in [(false, false), (true, false), (false, true), (true, true)] {
        for seed in seeds.clone() {
            let events = Events { clock_back, damage, ends_max: [64, 4, 2, 1][seed as usize % 4] };
            let ran = std::panic::catch_unwind(|| run(seed, events));
            ran.unwrap_or_else(|_| panic!("again: AZEKURA_SEED={seed}, with {events:?}"));
        }
    }
}
