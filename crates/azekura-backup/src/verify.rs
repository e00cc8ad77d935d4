//! Lists backups, and checks that the store has what they need.

use std::collections::{BTreeMap, HashMap};

use xxhash_rust::xxh3::Xxh3;

use crate::create::BackupInfo;
use crate::error::{BackupError, Result};
use crate::layout::{BackupManifest, Checksum, FILES, PARTS, StoredObject};
use crate::log::{StoredLog, Until, chain, read_headers};
use crate::log_object::decode;
use crate::progress::{Progress, Stage, StageProgress};
use crate::store::BackupStore;

/// Options of [`BackupStore::verify`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct VerifyOptions {
    backup: Option<String>,
    is_quick: bool,
}

impl VerifyOptions {
    /// Checks this backup. Default: all.
    #[must_use]
    pub fn backup(mut self, id: impl Into<String>) -> VerifyOptions {
        self.backup = Some(id.into());
        self
    }

    /// Compares lengths only, and downloads nothing but manifests and the headers of the log.
    #[must_use]
    pub fn quick(mut self, yes: bool) -> VerifyOptions {
        self.is_quick = yes;
        self
    }
}

/// What [`BackupStore::verify`] found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct StoreReport {
    /// Backups that were checked.
    pub backups: usize,
    /// Objects that were checked, each once.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Log objects that were checked.
    pub log_objects: usize,
    /// What is wrong: objects that are missing, or have other bytes than were stored.
    pub problems: Vec<BackupError>,
}

impl BackupStore {
    /// All backups, oldest first.
    ///
    /// # Errors
    /// `NoBackup` if nothing is stored there, and others of [`BackupError`].
    pub fn list(&self) -> Result<Vec<BackupInfo>> {
        self.block_on(async {
            let record = self.existing().await?;
            let manifests = self.manifests(&record.database).await?;
            Ok(manifests.iter().map(|(_, manifest)| BackupInfo::of(manifest)).collect())
        })
    }

    /// Checks that every object of the backups is stored with the bytes that it had.
    ///
    /// # Errors
    /// `NoBackup` if there is none. Damage to an object is in the report.
    pub fn verify(
        &self,
        options: &VerifyOptions,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<StoreReport> {
        self.block_on(async {
            let record = self.existing().await?;
            // Both at once, as a restore does: a backup or a prune may change them while objects are read.
            let logs = if options.backup.is_none() { read_headers(self, &record.database).await? } else { Vec::new() };
            let (mut manifests, damaged) = self.manifests_and_damage(&record.database).await?;
            if let Some(id) = &options.backup {
                manifests.retain(|(_, manifest)| manifest.id == *id);
            }
            if manifests.is_empty() && damaged.is_empty() {
                let message = options.backup.as_ref().map(|id| format!("there is no backup {id}"));
                return Err(BackupError::NoBackup { message: message.unwrap_or_else(|| "there is no backup".into()) });
            }
            let mut report = StoreReport { backups: manifests.len(), problems: damaged, ..StoreReport::default() };
            self.verify_objects(&manifests, options.is_quick, &mut report, progress).await?;
            if options.backup.is_none() {
                self.verify_log(&logs, &manifests, options.is_quick, &mut report).await?;
            }
            Ok(report)
        })
    }

    async fn verify_objects(
        &self,
        manifests: &[(String, BackupManifest)],
        is_quick: bool,
        report: &mut StoreReport,
        progress: &mut dyn FnMut(&Progress<'_>) -> bool,
    ) -> Result<()> {
        let objects: BTreeMap<&str, &StoredObject> =
            manifests.iter().flat_map(|(_, manifest)| manifest.objects()).map(|of| (&*of.object, of)).collect();
        let mut stored = HashMap::new();
        for folder in [FILES, PARTS] {
            stored.extend(self.list_folder(folder).await?.into_iter().map(|(name, meta)| (name, meta.size)));
        }
        let total = objects.values().fold(0u64, |sum, of| sum.saturating_add(of.bytes));
        let mut checked = StageProgress::new(Stage::Downloading, total, progress);
        for (name, object) in objects {
            report.objects += 1;
            report.bytes = report.bytes.saturating_add(object.bytes);
            let problem = match stored.get(name) {
                None => Err(BackupError::Missing { object: name.to_owned() }),
                Some(len) if *len != object.bytes => {
                    Err(BackupError::wrong(name, format!("it has {len} bytes instead of {}", object.bytes)))
                }
                Some(_) if is_quick => checked.add(object.bytes, name),
                Some(_) => self.download(object, &mut checked, &mut |_| Ok(())).await,
            };
            match problem {
                Ok(()) => {}
                Err(error @ (BackupError::Missing { .. } | BackupError::WrongContent { .. })) => {
                    report.problems.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Checks that the log objects are whole, and that they continue the newest backup without a gap.
    async fn verify_log(
        &self,
        logs: &[StoredLog],
        manifests: &[(String, BackupManifest)],
        is_quick: bool,
        report: &mut StoreReport,
    ) -> Result<()> {
        report.log_objects = logs.len();
        let oldest = manifests.iter().map(|(_, of)| of.sequence).min().unwrap_or(0);
        for StoredLog { object, header, .. } in logs {
            let checked = match header {
                Err(error) => Err(BackupError::wrong(object, error.to_string())),
                Ok(_) if is_quick => Ok(()),
                Ok(_) => self.get(object).await.and_then(|bytes| decode(object, &bytes)).map(drop),
            };
            match checked {
                Ok(()) => {}
                // `prune` may have deleted it meanwhile, because no backup needs it.
                Err(BackupError::Missing { .. }) if header.as_ref().is_ok_and(|of| of.end() <= oldest) => {}
                Err(error @ (BackupError::Missing { .. } | BackupError::WrongContent { .. })) => {
                    report.problems.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some((_, newest)) = manifests.iter().rev().find(|(_, manifest)| manifest.is_durable) {
            report.problems.extend(chain(logs, newest, manifests, Until::End).err());
        }
        Ok(())
    }

    /// Downloads an object, and checks its length and checksum. `None` to `piece`: the pieces begin again.
    pub(crate) async fn download(
        &self,
        object: &StoredObject,
        progress: &mut StageProgress<'_>,
        piece: &mut impl FnMut(Option<&[u8]>) -> Result<()>,
    ) -> Result<()> {
        let mut hasher = Xxh3::new();
        let mut len = 0;
        self.get_large(&object.object, &mut |bytes| {
            match bytes {
                None => {
                    hasher.reset();
                    progress.take_off(len);
                    len = 0;
                }
                Some(bytes) => {
                    hasher.update(bytes);
                    len += bytes.len() as u64;
                    if len > object.bytes {
                        return Err(BackupError::wrong(&object.object, "it is longer than what was stored"));
                    }
                    progress.add(bytes.len() as u64, &object.object)?;
                }
            }
            piece(bytes)
        })
        .await?;
        if len != object.bytes {
            let message = format!("it has {len} bytes instead of {}", object.bytes);
            return Err(BackupError::wrong(&object.object, message));
        }
        if Checksum::of_hasher(&hasher) != object.xxh3 {
            return Err(BackupError::wrong(&object.object, "its checksum does not match"));
        }
        Ok(())
    }
}
