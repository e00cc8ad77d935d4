//! Removes old backups, and deletes objects that nothing needs.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use crate::error::{BackupError, Result};
use crate::holds::{Start, age, held_objects, write_hold};
use crate::layout::{BackupManifest, FILES, HOLDS, Hold, LOG, PARTS, is_data_object};
use crate::log::{read_listed, unneeded_logs};
use crate::store::BackupStore;

/// Options of [`BackupStore::prune`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PruneOptions {
    keep: usize,
    is_dry_run: bool,
}

impl PruneOptions {
    /// Keeps this number of backups, the newest, at least 1. If none of them is
    /// [durable](crate::BackupInfo::is_durable), keeps the newest that is too, because the log continues it.
    pub fn keep(backups: usize) -> PruneOptions {
        PruneOptions { keep: backups, is_dry_run: false }
    }

    /// Changes nothing, and reports what would be removed and deleted.
    #[must_use]
    pub fn dry_run(mut self, yes: bool) -> PruneOptions {
        self.is_dry_run = yes;
        self
    }
}

/// What [`BackupStore::prune`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PruneReport {
    /// The ids of the backups that were removed.
    pub removed_backups: Vec<String>,
    /// Objects that were deleted, log objects included.
    pub deleted_objects: usize,
    /// Their bytes.
    pub deleted_bytes: u64,
}

impl BackupStore {
    /// Removes all but the newest backups, and objects that nothing has needed for the grace time of the store, those
    /// of the log before the oldest backup included. So the space of a removed backup is free after the first call that
    /// is made later than the grace time, and a restore that is running goes on for this time.
    ///
    /// # Errors
    /// `Invalid` if no backup would be kept; `TooSlow` if it paused for more than a quarter of the grace time while it
    /// removed backups; others of [`BackupError`].
    pub fn prune(&self, options: &PruneOptions) -> Result<PruneReport> {
        if options.keep == 0 {
            return Err(BackupError::invalid("at least one backup must be kept"));
        }
        self.block_on(self.prune_async(options))
    }

    async fn prune_async(&self, options: &PruneOptions) -> Result<PruneReport> {
        let record = self.existing().await?;
        let grace = Duration::from_secs(record.grace_seconds);
        let mut kept = self.manifests(&record.database).await?;
        let mut removed: Vec<_> = kept.drain(..kept.len().saturating_sub(options.keep)).collect();
        // The log continues nothing but a durable backup.
        if !kept.iter().any(|(_, of)| of.is_durable)
            && let Some(newest) = removed.iter().rposition(|(_, of)| of.is_durable)
        {
            kept.push(removed.remove(newest));
        }
        let mut report = PruneReport {
            removed_backups: removed.iter().map(|(_, manifest)| manifest.id.clone()).collect(),
            ..PruneReport::default()
        };
        // Listed before what protects them, so that what is protected meanwhile is seen.
        let listed_logs = self.list_folder(LOG).await?;
        let logs = read_listed(self, &listed_logs, &record.database).await?;
        let mut candidates = BTreeMap::new();
        for folder in [FILES, PARTS] {
            candidates.extend(self.list_folder(folder).await?.into_iter().filter(|(object, _)| is_data_object(object)));
        }
        let all: Vec<&BackupManifest> = kept.iter().chain(&removed).map(|(_, of)| of).collect();
        let before: HashSet<&str> = unneeded_logs(&logs, &all).map(|log| &*log.object).collect();
        let log_names = unneeded_logs(&logs, &all[..kept.len()]).map(|log| log.object.clone());
        let log_names = log_names.filter(|object| !before.contains(&**object));
        let objects: HashSet<String> = removed.iter().flat_map(|(_, of)| names(of)).chain(log_names).collect();
        let now = if options.is_dry_run {
            time_of_writer(self)
        } else {
            let start = Start::now(self);
            let now = write_hold(self, &Hold { objects: objects.iter().cloned().collect() }).await?;
            for (object, _) in &removed {
                // The hold must outlive the holds of writers that still see the manifest.
                if start.elapsed(self) > grace / 4 {
                    return Err(BackupError::TooSlow);
                }
                self.delete(object).await?;
            }
            now
        };
        let mut used = held_objects(self, now, grace).await?;
        // Listed again: backups that were published meanwhile.
        let mut live = self.manifests(&record.database).await?;
        live.retain(|(object, _)| removed.iter().all(|(gone, _)| gone != object));
        used.extend(kept.iter().chain(&live).flat_map(|(_, of)| names(of)));
        if options.is_dry_run {
            used.extend(objects);
        }

        let kept: Vec<&BackupManifest> = kept.iter().chain(&live).map(|(_, of)| of).collect();
        let before: HashSet<&str> = unneeded_logs(&logs, &kept).map(|log| &*log.object).collect();
        candidates.extend(listed_logs.into_iter().filter(|(object, _)| before.contains(&**object)));
        candidates.retain(|object, meta| !used.contains(object) && age(now, meta.last_modified) > grace);
        report.deleted_objects = candidates.len();
        report.deleted_bytes = candidates.values().map(|meta| meta.size).sum();
        if !options.is_dry_run {
            for object in candidates.keys() {
                self.delete(object).await?;
            }
            for (object, meta) in self.list_json(HOLDS).await? {
                if age(now, meta.last_modified) / 2 > grace {
                    self.delete(&object).await?;
                }
            }
        }
        Ok(report)
    }
}

/// The time by the clock of this machine: a dry run writes no object, from which it would learn the time of the store.
fn time_of_writer(store: &BackupStore) -> chrono::DateTime<chrono::Utc> {
    let ms = i64::try_from((store.clock)()).unwrap_or(i64::MAX);
    chrono::DateTime::from_timestamp_millis(ms).unwrap_or_default() + store.later
}

fn names(manifest: &BackupManifest) -> impl Iterator<Item = String> {
    manifest.objects().map(|of| of.object.clone())
}
