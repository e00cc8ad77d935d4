//! A follower beside a script, as another process of the same machine. A kill of the writer does not end it.

use azekura::testing::SeededRng;
use azekura::{Config, Database, ErrorKind, Partition, Snapshot};

use crate::testkit::history::differences;
use crate::testkit::read_database::read_database;
use crate::testkit::{Map, RandomOptions, State};

/// Rules: what is visible is the state after a whole commit of the history. A follower that has caught up with an idle
/// writer shows all commits. Until it catches up again, it shows the same. Snapshots keep their state.
pub(super) struct FollowerBeside {
    options: RandomOptions,
    db: Database,
    /// The state that was visible when the follower caught up last.
    visible: State,
    kept: Option<(Snapshot, Vec<Partition>, State)>,
}

impl FollowerBeside {
    /// Opens a follower with these options.
    ///
    /// # Errors
    /// A violation of the rules; no error of the follower is allowed.
    pub(super) fn open(config: Config, options: RandomOptions) -> Result<FollowerBeside, String> {
        let db = config.open_follower().map_err(|e| format!("open of a follower: {e}"))?;
        let visible = read_database(&db, &options).map_err(|e| format!("read of a follower: {e}"))?;
        Ok(FollowerBeside { options, db, visible, kept: None })
    }

    pub(super) fn visible(&self) -> &State {
        &self.visible
    }

    /// Checks that the same state is visible as when the follower caught up last.
    ///
    /// # Errors
    /// As [`open`](FollowerBeside::open).
    pub(super) fn check_unchanged(&self) -> Result<(), String> {
        let found = read_database(&self.db, &self.options).map_err(|e| format!("read of a follower: {e}"))?;
        check_same(&self.visible, &found, "without catching up")
    }

    /// Catches up, and returns what is visible.
    ///
    /// # Errors
    /// As [`open`](FollowerBeside::open).
    pub(super) fn catch_up(&mut self) -> Result<&State, String> {
        let before = self.db.change_position().map_err(|e| e.to_string())?;
        let position = self.db.catch_up().map_err(|e| format!("catch_up: {e}"))?;
        if !matches!(before.partial_cmp(&position), Some(std::cmp::Ordering::Less | std::cmp::Ordering::Equal)) {
            return Err(format!("a follower goes back from {before:?} to {position:?}"));
        }
        self.visible = read_database(&self.db, &self.options).map_err(|e| format!("read of a follower: {e}"))?;
        if let Some((snapshot, partitions, wanted)) = &self.kept {
            let mut wanted = wanted.clone();
            // A snapshot does not read partitions that were deleted since.
            let mut found = read_snapshot(snapshot, partitions).map_err(|e| format!("a snapshot: {e}"))?;
            found.retain(|_, map| !map.is_empty());
            wanted.retain(|name, map| !map.is_empty() && found.contains_key(name));
            check_same(&wanted, &found, "a snapshot of a follower")?;
        }
        Ok(&self.visible)
    }

    /// Whether the follower is told that a recovery has ended the log before a commit that it has read. Otherwise, it
    /// catches up.
    ///
    /// # Errors
    /// As [`open`](FollowerBeside::open), except for `Stale`.
    pub(super) fn is_stale(&mut self) -> Result<bool, String> {
        match self.db.catch_up() {
            Err(error) if error.kind() == ErrorKind::Stale => self.check_unchanged().map(|()| true),
            caught_up => caught_up.map(|_| false).map_err(|e| format!("catch_up: {e}")),
        }
    }

    /// Catches up with a writer that does nothing meanwhile.
    ///
    /// # Errors
    /// As [`open`](FollowerBeside::open), and if it does not show `wanted` then.
    pub(super) fn catch_up_with(&mut self, wanted: &State) -> Result<(), String> {
        check_same(wanted, self.catch_up()?, "after catch_up")
    }

    /// Keeps the present state in a snapshot, instead of an earlier one.
    ///
    /// # Errors
    /// Those of the partitions.
    pub(super) fn keep_snapshot(&mut self) -> Result<(), String> {
        let open = |name: &String| self.options.open(&self.db, name);
        let partitions = self.visible.keys().map(open).collect::<azekura::Result<_>>().map_err(|e| e.to_string())?;
        self.kept = Some((self.db.snapshot(), partitions, self.visible.clone()));
        Ok(())
    }

    /// One of these checks, drawn at random, or none. `wanted` is the state of the writer.
    ///
    /// # Errors
    /// Those of the checks.
    pub(super) fn check_some(&mut self, rng: &mut SeededRng, wanted: &State) -> Result<(), String> {
        match rng.below(10) {
            0..=2 => self.catch_up_with(wanted),
            3 => self.check_unchanged(),
            4 => self.catch_up_with(wanted).and_then(|()| self.keep_snapshot()),
            _ => Ok(()),
        }
    }
}

/// The pairs of the partitions that were not deleted since.
fn read_snapshot(snapshot: &Snapshot, partitions: &[Partition]) -> azekura::Result<State> {
    let mut state = State::new();
    for part in partitions {
        let pairs = snapshot.iter(part).map(|pair| pair.map(|(key, value)| (key.to_vec(), value.to_vec())));
        let map = match pairs.collect::<azekura::Result<Map>>() {
            Err(error) if error.kind() == ErrorKind::Closed => continue,
            map => map?,
        };
        for (key, value) in &map {
            assert_eq!(snapshot.get(part, key)?.as_deref(), Some(&value[..]), "{key:?} by get");
        }
        state.insert(part.name.to_string(), map);
    }
    Ok(state)
}

fn check_same(wanted: &State, found: &State, when: &str) -> Result<(), String> {
    match wanted == found {
        true => Ok(()),
        false => Err(format!("a follower, {when}: {:.5?}", differences(wanted, found))),
    }
}
