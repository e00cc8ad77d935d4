//! A reader of changes whose position is kept across crashes. It compares each commit with the history of a script.

use std::ops::Bound;
use std::time::Duration;

use azekura::testing::SeededRng;
use azekura::{ChangePosition, Changes, CommittedBatch, Config, Database, ErrorKind, Operation};

use super::script::CrashScript;
use crate::testkit::history::differences;
use crate::testkit::{HistoryEvent, HistoryWrite, Map, RandomOptions, State, WriteHistory};

/// Which segments of the log the database keeps for readers of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeedRetention {
    /// All.
    Everything,
    /// Those that an open reader needs.
    WhileOpen,
    /// About one.
    OneSegment,
}

/// How far the reader may find that commits are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FeedLoss {
    /// Nothing was lost.
    Nothing,
    /// Power loss may have removed the events after `durable`, and has removed those after `surviving`. The state after
    /// `fewest` events is the same as that after `surviving`.
    Events { durable: usize, fewest: usize, surviving: usize },
    /// Records of the log may be unreadable.
    Damage,
}

/// Rules: commits are whole, in order, each once, and none is missing. An error is `Stale`, and is returned only if the
/// commit was not retained or is lost.
#[derive(Clone, Debug)]
pub(super) struct ChangeFollower {
    options: RandomOptions,
    /// If not, it reads nothing.
    is_active: bool,
    retention: FeedRetention,
    is_durable_only: bool,
    /// `None` before the first open.
    position: Option<ChangePosition>,
    /// Number of events of the history that were passed, and the state after them.
    passed: usize,
    state: State,
    /// Whether the last commit was an ingest. A record follows it that no reader gets, and that power loss may remove.
    ends_with_ingest: bool,
    pub(super) commits: u64,
    pub(super) stale: u64,
}

impl ChangeFollower {
    pub(super) fn new(script: &CrashScript) -> ChangeFollower {
        let (seed, retentions) =
            (script.seed, [FeedRetention::Everything, FeedRetention::WhileOpen, FeedRetention::OneSegment]);
        ChangeFollower {
            options: script.options,
            is_active: script.is_followed,
            retention: retentions[(seed % 3) as usize],
            is_durable_only: seed % 2 == 1,
            position: None,
            passed: 0,
            state: State::new(),
            ends_with_ingest: false,
            commits: 0,
            stale: 0,
        }
    }

    /// The same options with those of the retention.
    pub(super) fn config(&self, config: Config) -> Config {
        match self.retention {
            FeedRetention::Everything => config.wal_retention(Duration::from_secs(1 << 20)),
            FeedRetention::WhileOpen => config.wal_retention(Duration::ZERO),
            FeedRetention::OneSegment => {
                config.wal_retention(Duration::from_secs(1 << 20)).max_retained_wal_size(70_000)
            }
        }
    }

    /// How many commits the reader reads behind a step: none, at most this many, or all. A reader for which few
    /// segments are kept reads seldom.
    pub(super) fn reads_behind_step(&self, rng: &mut SeededRng) -> Option<Option<usize>> {
        let is_slow = self.retention == FeedRetention::OneSegment && !rng.chance_one_in(5);
        rng.pick(&[None, Some(Some(1)), Some(None)]).filter(|_| !is_slow)
    }

    /// Continues at the position after an open. The caller reads all then, if anything may be lost.
    ///
    /// # Errors
    /// A violation of the rules.
    pub(super) fn resume(
        &mut self,
        db: &Database,
        history: &WriteHistory,
        loss: FeedLoss,
    ) -> Result<Option<Changes>, String> {
        if !self.is_active {
            return Ok(None);
        }
        let Some(position) = self.position else {
            self.begin(db, history)?;
            return self.resume(db, history, loss);
        };
        let opened = db.changes_since(position).and_then(|changes| match self.is_durable_only {
            true => changes.durable_only(),
            false => Ok(changes),
        });
        let is_lost = matches!(loss, FeedLoss::Events { surviving, .. } if self.passed > surviving);
        match opened {
            Ok(_) if is_lost => Err(format!("feed: {} events were read, {loss:?}, and it goes on", self.passed)),
            Ok(changes) => Ok(Some(changes)),
            Err(error) => {
                self.check_stale(&error, history, loss, false)?;
                self.begin(db, history)?;
                Ok(None)
            }
        }
    }

    /// Goes to the end of the history, without reading.
    fn begin(&mut self, db: &Database, history: &WriteHistory) -> Result<(), String> {
        self.position = Some(db.change_position().map_err(|e| format!("feed: {e}"))?);
        self.passed = history.events.len();
        self.state = history.state_after(self.passed);
        Ok(())
    }

    /// Checks an error of a reader, which is held open if `is_held`.
    fn check_stale(
        &mut self,
        error: &azekura::Error,
        history: &WriteHistory,
        loss: FeedLoss,
        is_held: bool,
    ) -> Result<(), String> {
        self.stale += 1;
        let is_lost = match loss {
            FeedLoss::Nothing => false,
            FeedLoss::Events { durable, .. } => {
                (self.passed > durable || self.ends_with_ingest) && !self.is_durable_only
            }
            FeedLoss::Damage if error.kind() == ErrorKind::Corruption => return Ok(()),
            FeedLoss::Damage => true,
        };
        let rest = history.events.iter().skip(self.passed);
        let is_behind = rest.into_iter().any(|event| matches!(event, HistoryEvent::Commit(_)))
            || history.acknowledged < history.events.len();
        let may_be_recycled = is_behind
            && match self.retention {
                FeedRetention::Everything => false,
                FeedRetention::WhileOpen => !is_held,
                FeedRetention::OneSegment => true,
            };
        if error.kind() == ErrorKind::Stale && (is_lost || may_be_recycled) {
            return Ok(());
        }
        Err(format!("feed after {} events ({self}): {error}", self.passed))
    }

    /// Reads at most `max` commits. Without a maximum, no commit of the history may be missing then.
    ///
    /// # Errors
    /// A violation of the rules. Returns false if the reader was told that it is stale.
    pub(super) fn read(
        &mut self,
        changes: &mut Changes,
        db: &Database,
        history: &WriteHistory,
        loss: FeedLoss,
        max: Option<usize>,
    ) -> Result<bool, String> {
        for commit in changes.by_ref().take(max.unwrap_or(usize::MAX)) {
            match commit {
                Ok(commit) => self.take_commit(&commit, history)?,
                Err(error) => {
                    self.check_stale(&error, history, loss, true)?;
                    self.begin(db, history)?;
                    return Ok(false);
                }
            }
        }
        let position = Changes::position(changes);
        if self.position.is_none_or(|before| before > position) {
            return Err("feed: the position goes back".into());
        }
        self.position = Some(position);
        if max.is_none() && loss != FeedLoss::Damage {
            let end = if self.is_durable_only { history.durable } else { history.acknowledged };
            while self.passed < end {
                let is_lost = matches!(loss, FeedLoss::Events { fewest, .. } if self.passed >= fewest);
                if !is_lost && !self.may_be_absent(history, self.passed) {
                    return Err(format!("feed ({self}): event {} is missing", self.passed + 1));
                }
                self.pass_event(history);
            }
        }
        Ok(true)
    }

    /// Compares the state of a reader at the end of `history` with that of the database, whose log may be damaged.
    pub(super) fn check_state(&self, found: &State, history: &WriteHistory) -> Result<(), String> {
        if self.ends_with_ingest && self.passed > history.acknowledged {
            return Ok(()); // the crash may have prevented the ingest
        }
        // Partitions that were deleted or created behind the last commit are not compared.
        let rest = &history.events[self.passed.min(history.events.len())..];
        let changes = |name: &str| {
            rest.iter().any(|event| match event {
                HistoryEvent::Drop(other) | HistoryEvent::Create(other) => other == name,
                HistoryEvent::Commit(_) => false,
            })
        };
        let full = |state: &State| -> State {
            let state =
                state.iter().filter(|(name, map)| !map.is_empty() && found.contains_key(*name) && !changes(name));
            state.map(|(name, map)| (name.clone(), map.clone())).collect()
        };
        match full(found) == full(&self.state) {
            true => Ok(()),
            false => Err(format!("feed ({self}): no error, but {:.5?}", differences(found, &self.state))),
        }
    }

    fn pass_event(&mut self, history: &WriteHistory) {
        history.events[self.passed].apply(&mut self.state);
        self.passed += 1;
    }

    /// Passes the next event with effect, if it is this commit.
    fn take_commit(&mut self, commit: &CommittedBatch, history: &WriteHistory) -> Result<(), String> {
        self.commits += 1;
        if self.position.is_some_and(|before| before >= commit.position()) {
            return Err(format!("feed ({self}): a commit is returned twice"));
        }
        self.position = Some(commit.position());
        self.ends_with_ingest = commit.changes().all(|change| matches!(change.operation, Operation::Ingest { .. }));
        while let Some(event) = history.events.get(self.passed) {
            let HistoryEvent::Commit(writes) = event else {
                self.pass_event(history);
                continue;
            };
            match self.apply(commit, writes, history)? {
                true => {
                    self.pass_event(history);
                    return Ok(());
                }
                false if self.may_be_absent(history, self.passed) => self.pass_event(history),
                false => {
                    let (n, changes) = (self.passed + 1, commit.changes().collect::<Vec<_>>());
                    return Err(format!("feed ({self}): {changes:.200?} instead of event {n}, {event:.200?}"));
                }
            }
        }
        // The note of an ingest is written before the ingest, which the crash has prevented.
        if self.ends_with_ingest {
            return Ok(());
        }
        Err(format!("feed ({self}): a commit after all events: {:.200?}", commit.changes().collect::<Vec<_>>()))
    }

    /// Whether the partition of this name is deleted after the event with this index. Then its changes may be left out.
    fn is_deleted_later(history: &WriteHistory, index: usize, name: &str) -> bool {
        let mut later = history.events[index..].iter();
        later.any(|event| matches!(event, HistoryEvent::Drop(dropped) if dropped == name))
    }

    /// Whether the event changes nothing that the feed must contain.
    fn may_be_absent(&self, history: &WriteHistory, index: usize) -> bool {
        let HistoryEvent::Commit(writes) = &history.events[index] else { return true };
        let mut after = self.state.clone();
        history.events[index].apply(&mut after);
        let mut names = writes.iter().map(|write| &write.partition);
        names.all(|name| Self::is_deleted_later(history, index, name) || after.get(name) == self.state.get(name))
    }

    /// Whether the commit leads from the state to that after these writes, which are those of the next event.
    fn apply(&self, commit: &CommittedBatch, writes: &[HistoryWrite], history: &WriteHistory) -> Result<bool, String> {
        let mut wanted = self.state.clone();
        history.events[self.passed].apply(&mut wanted);
        let mut state = self.state.clone();
        for change in commit.changes() {
            let name = change.partition;
            if Self::is_deleted_later(history, self.passed, name) {
                continue;
            }
            let own = || writes.iter().filter(|write| write.partition == name);
            if own().next().is_none() {
                return Ok(false);
            }
            let order = self.options.order(name);
            let map = state.entry(name.to_owned()).or_default();
            match change.operation {
                Operation::Insert { key, value, .. } => {
                    let found = value.get().map_err(|e| format!("feed: value of {key:?}: {e}"))?;
                    let set = match found {
                        Some(value) => value.to_vec(),
                        None if !is_written_later(history, self.passed, name, key) => {
                            return Err(format!("feed: the value of {key:?} is gone, and no later change sets it"));
                        }
                        None => {
                            match own().rev().find(|write| write.key == key).and_then(|write| write.value.clone()) {
                                Some(value) => value,
                                None => return Ok(false),
                            }
                        }
                    };
                    map.insert(key.to_vec(), set);
                }
                Operation::Remove { key } => _ = map.remove(key),
                Operation::RemoveRange { start, end } => {
                    let canonical = |bound: Bound<&[u8]>| bound.map(|key| order.canonical(key));
                    let bounds = (canonical(start), canonical(end));
                    map.retain(|key, _| !std::ops::RangeBounds::contains(&bounds, &order.canonical(key)));
                }
                Operation::Merge { key, operand } => map.entry(key.to_vec()).or_default().extend_from_slice(operand),
                Operation::Ingest { first, last } => {
                    let keys = own().map(|write| order.canonical(&write.key));
                    let ends = (keys.clone().min(), keys.max());
                    if ends != (Some(order.canonical(first)), Some(order.canonical(last))) {
                        return Ok(false);
                    }
                    map.extend(own().filter_map(|write| Some((write.key.clone(), write.value.clone()?))));
                }
                _ => return Err("feed: an unknown change".into()),
            }
        }
        let empty = Map::new();
        Ok(writes.iter().all(|HistoryWrite { partition: name, .. }| {
            Self::is_deleted_later(history, self.passed, name)
                || state.get(name).unwrap_or(&empty) == wanted.get(name).unwrap_or(&empty)
        }))
    }
}

impl std::fmt::Display for ChangeFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = if self.is_durable_only { "durable commits" } else { "all commits" };
        write!(f, "{what}, retention {:?}, {} passed", self.retention, self.passed)
    }
}

/// Whether an event after that with this index writes the key.
fn is_written_later(history: &WriteHistory, index: usize, name: &str, key: &[u8]) -> bool {
    history.events[index + 1..].iter().any(|event| match event {
        HistoryEvent::Commit(writes) => writes.iter().any(|write| write.partition == name && write.key == key),
        HistoryEvent::Drop(dropped) => dropped == name,
        HistoryEvent::Create(_) => false,
    })
}
