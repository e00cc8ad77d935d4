//! Permitted effects of damage: correct data, or an error that names the damaged file.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::MemFs;
use azekura::{Config, Database, Error, ErrorKind, Result};

use super::sample::{DIR, SampleDatabase, config, options};
use crate::testkit::State;
use crate::testkit::test_dir::dir_contents;

/// The effect of one piece of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DamageOutcome {
    /// The damage has no effect.
    Unaffected,
    /// Opening fails with an error that names the file; nothing on disk has changed.
    Refused,
    /// Opening succeeds, and a read of the damaged data fails with an error that names the file.
    ReadErrors,
    /// The WAL ends early, but not before its synced part ends.
    WalEndsEarly,
    /// As `EndsEarly`, and valid commits behind the damage are reported.
    WalEndsEarlyReported,
}

/// How a damaged database is opened.
#[derive(Clone, Copy, Debug)]
pub(super) enum DamageOpenMode {
    Writing,
    ReadOnly,
    Follower,
}

pub(super) struct DamagedDatabase<'a> {
    pub(super) sample: &'a SampleDatabase,
    /// Files that an error may name.
    pub(super) files: Vec<String>,
    /// The state must be a prefix of the history with at least this number of events.
    pub(super) floor: usize,
    /// Whether files were truncated.
    pub(super) is_cut: bool,
    /// Whether valid commits behind the damage show that commits are missing.
    pub(super) reports_dropped: bool,
}

impl DamagedDatabase<'_> {
    /// Opens the database on `machine` and reads all of it. Returns the effect of the damage, or the violated rule.
    pub(super) fn check(&self, machine: &MemFs, how: DamageOpenMode) -> std::result::Result<DamageOutcome, String> {
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        catch_unwind(AssertUnwindSafe(|| self.open_and_read(&fs, how))).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            Err(format!("panicked: {:?}", text.or(panic.downcast_ref::<&str>().map(ToString::to_string))))
        })
    }

    fn open_and_read(&self, fs: &Arc<dyn Fs>, how: DamageOpenMode) -> std::result::Result<DamageOutcome, String> {
        let before = dir_contents(&**fs, Path::new(DIR));
        let config: Config = config(Arc::clone(fs), 99);
        let opened = match how {
            DamageOpenMode::Writing => config.open(),
            DamageOpenMode::ReadOnly => config.open_read_only(),
            DamageOpenMode::Follower => config.open_follower(),
        };
        let unchanged = || dir_contents(&**fs, Path::new(DIR)) == before;
        let db = match opened {
            Err(error) => {
                self.check_error_location(&error)?;
                return if unchanged() {
                    Ok(DamageOutcome::Refused)
                } else {
                    Err("a failed open changed files".into())
                };
            }
            Ok(db) => db,
        };
        let read = self.read(&db)?;
        let outcome = match read {
            None => DamageOutcome::ReadErrors,
            Some(state) => {
                let history = &self.sample.history;
                let count = history.matching_prefix(&state, self.floor)?;
                let dropped = db.metrics().dropped_after_damage;
                match dropped {
                    _ if count == history.events.len() => DamageOutcome::Unaffected,
                    Some(dropped) if self.is_damaged_file(&dropped.file) && dropped.frames > 0 => {
                        DamageOutcome::WalEndsEarlyReported
                    }
                    Some(dropped) => return Err(format!("blames {dropped:?}")),
                    None if count + 1 < history.events.len() && self.reports_dropped => {
                        return Err(format!("ends after {count} commits without a report of the valid ones after"));
                    }
                    None => DamageOutcome::WalEndsEarly,
                }
            }
        };
        if !matches!(how, DamageOpenMode::Writing) && !unchanged() {
            return Err("opening for reading changed files".into());
        }
        Ok(outcome)
    }

    fn is_damaged_file(&self, path: &Path) -> bool {
        // A manifest that lost its end is an older manifest, so it may name tables that were removed since.
        let is_older = self.is_cut && self.files.iter().any(|file| file == "MANIFEST");
        (is_older && path.extension().is_some_and(|e| e == "sst" || e == "blob" || e == "pool" || e == "wal"))
            || self.files.iter().any(|file| Path::new(DIR).join(file) == path)
    }

    fn check_error_location(&self, error: &Error) -> std::result::Result<(), String> {
        let kind = matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported);
        match error.file() {
            Some(file) if kind && self.is_damaged_file(file) => Ok(()),
            file => Err(format!("{:?} that names {:?}: {error}", error.kind(), file.map(PathBuf::from))),
        }
    }

    /// All pairs, or `None` if an error that names the file prevented some reads; the pairs that were read are
    /// correct.
    fn read(&self, db: &Database) -> std::result::Result<Option<State>, String> {
        let wanted = self.sample.history.state_after(self.sample.history.events.len());
        let mut state = State::new();
        let mut hindered = false;
        for name in db.list_partitions() {
            let opened = db.open_partition(&name, options(&name));
            let Some(part) = self.ignore_expected_error(opened, &mut hindered)? else { continue };
            let mut pairs = Vec::new();
            for pair in part.iter() {
                let Some((key, value)) = self.ignore_expected_error(pair, &mut hindered)? else { break };
                pairs.push((key.to_vec(), value.to_vec()));
            }
            for (backward, pair) in part.iter().rev().enumerate() {
                let Some((key, value)) = self.ignore_expected_error(pair, &mut hindered)? else { break };
                let place = pairs.len().checked_sub(backward + 1).map(|at| &pairs[at]);
                if !hindered && place.is_none_or(|(k, v)| k[..] != key[..] || v[..] != value[..]) {
                    return Err(format!("{name}: backward gives {key:?}"));
                }
            }
            for n in 0..30 {
                let key = format!("key {n:03}").into_bytes();
                let Some(got) = self.ignore_expected_error(part.get(&key), &mut hindered)? else { continue };
                let iterated = pairs.iter().find(|(k, _)| *k == key).map(|(_, v)| &v[..]);
                if !hindered && got.as_deref() != iterated {
                    return Err(format!("{name}: get of {key:?} and iteration disagree"));
                }
                let right = wanted.get(&name).and_then(|map| map.get(&key)).map(|v| &v[..]);
                if hindered && got.as_deref() != right {
                    return Err(format!("{name}: wrong value of {key:?} in addition to an error"));
                }
            }
            if hindered && !is_prefix_of(&pairs, wanted.get(&name)) {
                return Err(format!("{name}: wrong pairs before an error"));
            }
            state.insert(name, pairs.into_iter().collect());
        }
        Ok((!hindered).then_some(state))
    }

    /// Accepts an error that names the right file.
    fn ignore_expected_error<T>(
        &self,
        result: Result<T>,
        hindered: &mut bool,
    ) -> std::result::Result<Option<T>, String> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                *hindered = true;
                self.check_error_location(&error).map(|()| None)
            }
        }
    }
}

fn is_prefix_of(pairs: &[(Vec<u8>, Vec<u8>)], wanted: Option<&crate::testkit::Map>) -> bool {
    pairs.iter().map(|(k, v)| (k, v)).eq(wanted.into_iter().flatten().take(pairs.len()))
}

/// Every pair was written once and every commit is whole; for a prefix, the state is a state of the history.
pub(super) fn check_only_written_pairs(
    db: &Database,
    sample: &SampleDatabase,
    is_prefix: bool,
) -> std::result::Result<(), String> {
    let mut state = State::new();
    for name in db.list_partitions() {
        let part = db.open_partition(&name, options(&name)).map_err(|e| e.to_string())?;
        let pairs = part.iter().map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())));
        state.insert(name, pairs.collect::<Result<_>>().map_err(|e| e.to_string())?);
    }
    if is_prefix {
        return sample.history.matching_prefix(&state, sample.flushed).map(drop);
    }
    // Each commit of the sample sets one distinct key in every partition.
    let mut partitions = state.values();
    let first = partitions.next().ok_or("no partition")?;
    if partitions.any(|other| !other.keys().eq(first.keys())) {
        return Err("half a commit".into());
    }
    let written = |name: &str, key: &[u8], value: &[u8]| {
        sample.history.events.iter().any(|event| match event {
            crate::testkit::HistoryEvent::Commit(writes) => {
                writes.iter().any(|w| w.partition == name && w.key == key && w.value.as_deref() == Some(value))
            }
            _ => false,
        })
    };
    for (name, map) in &state {
        if let Some((key, _)) = map.iter().find(|(key, value)| !written(name, key, value)) {
            return Err(format!("{name}: {key:?} never had this value"));
        }
    }
    Ok(())
}
