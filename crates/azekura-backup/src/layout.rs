//! Names of objects and the JSON in them. `docs/format/store.md` describes both.

use azekura::ChangePosition;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::{BackupError, Result};

/// The object that makes a prefix a store of backups.
pub(crate) const STORE_OBJECT: &str = "azekura-backup.json";
/// Tables and finished blob files.
pub(crate) const FILES: &str = "files";
/// Parts of the files of a checkpoint that change.
pub(crate) const PARTS: &str = "parts";
/// The manifests of backups.
pub(crate) const BACKUPS: &str = "backups";
/// The shipped log.
pub(crate) const LOG: &str = "log";
/// Lists of objects that are protected for the grace time.
pub(crate) const HOLDS: &str = "holds";

/// Most ends of the log in the manifest of a backup. Those of this version have up to 64.
const WAL_ENDS_MAX: usize = 1024;

/// The format version that this build writes, and the newest one that it reads.
pub(crate) const VERSION: u64 = 1;
const STORE_FORMAT: &str = "azekura-backup store";
const BACKUP_FORMAT: &str = "azekura-backup backup";

/// 128 bits of xxh3 as 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Checksum(pub(crate) String);

impl Checksum {
    pub(crate) fn of(bytes: &[u8]) -> Checksum {
        Checksum(hex(&xxh3_128(bytes).to_be_bytes()))
    }

    pub(crate) fn of_hasher(hasher: &Xxh3) -> Checksum {
        Checksum(hex(&hasher.digest128().to_be_bytes()))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of the object of an immutable file.
pub(crate) fn file_object(id: &[u8; 16], len: u64, checksum: &Checksum) -> String {
    format!("{FILES}/{}-{len}-{}", hex(id), checksum.0)
}

/// The name of the object of a part, which is that of its content.
pub(crate) fn part_object(len: u64, checksum: &Checksum) -> String {
    format!("{PARTS}/{len}-{}", checksum.0)
}

/// The part of the name of a file or part that depends on its content, without the 8 random digits of the upload.
pub(crate) fn content_of(object: &str) -> &str {
    object.rsplit_once('-').filter(|(_, end)| end.len() == 8).map_or(object, |(content, _)| content)
}

/// Whether a name in [`FILES`] or [`PARTS`] is one of this crate. `prune` deletes no other objects.
pub(crate) fn is_data_object(object: &str) -> bool {
    let Some((folder, name)) = content_of(object).split_once('/') else { return false };
    let mut segments = name.split('-');
    let is_id = folder == PARTS || segments.next().is_some_and(|id| is_hex(id, 32));
    let is_len = segments.next().is_some_and(|len| len.parse::<u64>().is_ok());
    is_id && is_len && segments.next().is_some_and(|checksum| is_hex(checksum, 32)) && segments.next().is_none()
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The name of the manifest of a backup: its id, and the checksum of its bytes.
pub(crate) fn backup_object(id: &str, bytes: &[u8]) -> String {
    format!("{BACKUPS}/{id}-{}.json", Checksum::of(bytes).0)
}

/// The id in the name of a manifest; `None` if it is not the name of one.
pub(crate) fn backup_id(object: &str) -> Option<&str> {
    let (id, checksum) = object.strip_prefix(BACKUPS)?.strip_prefix('/')?.strip_suffix(".json")?.rsplit_once('-')?;
    let (time, random) = id.split_once('-')?;
    (is_hex(checksum, 32) && is_hex(random, 8) && time.len() == 13 && time.parse::<u64>().is_ok()).then_some(id)
}

/// The name of the log object whose first commit is behind this sequence number. Two writers that ship the same commit
/// write the same name.
pub(crate) fn log_object(after: u64) -> String {
    format!("{LOG}/{after:020}.log")
}

/// The content of [`STORE_OBJECT`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreRecord {
    format: String,
    version: u64,
    /// The id of the database whose backups are stored here.
    pub(crate) database: String,
    /// The grace time of [`prune`](crate::BackupStore::prune), which writers rely on.
    pub(crate) grace_seconds: u64,
}

impl StoreRecord {
    pub(crate) fn new(database: String, grace_seconds: u64) -> StoreRecord {
        StoreRecord { format: STORE_FORMAT.into(), version: VERSION, database, grace_seconds }
    }
}

/// A partition of the database at the time of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredPartition {
    pub(crate) name: String,
    pub(crate) id: u64,
}

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredObject {
    pub(crate) object: String,
    pub(crate) bytes: u64,
    pub(crate) xxh3: Checksum,
}

/// A file of the database directory: the bytes of its objects, one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredFile {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// The random id of a table or of a finished blob file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    pub(crate) objects: Vec<StoredObject>,
}

/// The manifest of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupManifest {
    format: String,
    version: u64,
    pub(crate) id: String,
    pub(crate) database: String,
    /// Milliseconds since 1970 by the clock of the writer, after the checkpoint was made.
    pub(crate) time_ms: u64,
    /// The last sequence number in the backup.
    pub(crate) sequence: u64,
    /// Whether every commit of the backup survived power loss of the database before the backup was published. Only
    /// then the log can continue it.
    pub(crate) is_durable: bool,
    /// A position of changes at or before `sequence`, of the same epoch.
    pub(crate) position: String,
    /// Ends of the log that the database recorded before, oldest first: an epoch, and the last sequence number that is
    /// valid of this and earlier epochs. `None`: it is not known that any is valid. Empty if an older version wrote it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) wal_ends: Vec<(u32, Option<u64>)>,
    /// The highest epoch of ends that the database has forgotten. Lower than those of `wal_ends`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) forgotten_ends: Option<u32>,
    pub(crate) partitions: Vec<StoredPartition>,
    pub(crate) files: Vec<StoredFile>,
}

impl BackupManifest {
    pub(crate) fn new(id: String, database: String) -> BackupManifest {
        BackupManifest {
            format: BACKUP_FORMAT.into(),
            version: VERSION,
            id,
            database,
            time_ms: 0,
            sequence: 0,
            is_durable: false,
            position: String::new(),
            wal_ends: Vec::new(),
            forgotten_ends: None,
            partitions: Vec::new(),
            files: Vec::new(),
        }
    }

    /// # Errors
    /// `WrongContent` if the position is malformed.
    pub(crate) fn position(&self, object: &str) -> Result<ChangePosition> {
        self.position.parse().map_err(|_| BackupError::wrong(object, "the position in the manifest is malformed"))
    }

    /// The epoch of the position, which [`check`](BackupManifest::check) has parsed.
    pub(crate) fn epoch(&self) -> u32 {
        self.position.parse().map_or(0, |position: ChangePosition| position.epoch())
    }

    /// All objects of the backup except for the manifest, some of them more than once.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &StoredObject> {
        self.files.iter().flat_map(|file| &file.objects)
    }

    /// # Errors
    /// `WrongContent` if a restore of the manifest could write outside of its directory, if lengths do not add up, or
    /// if the position or the ends of the log are malformed.
    pub(crate) fn check(&self, object: &str) -> Result<()> {
        let wrong = |message: String| Err(BackupError::wrong(object, message));
        if backup_id(object) != Some(&self.id) {
            return wrong(format!("the manifest is that of backup {}", self.id));
        }
        let end = (self.position(object)?.epoch(), Some(self.sequence));
        let mut later = self.wal_ends.iter().skip(1).chain([&end]);
        let rises = |of: &(u32, Option<u64>)| later.next().is_some_and(|later| of.0 < later.0 && of.1 < later.1);
        let first = self.wal_ends.first().unwrap_or(&end).0;
        let is_before = self.forgotten_ends.is_none_or(|forgotten| forgotten < first);
        if self.wal_ends.len() > WAL_ENDS_MAX || !self.wal_ends.iter().all(rises) || !is_before {
            return wrong("the ends of the log in the manifest contradict each other".into());
        }
        for file in &self.files {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            if file.name.is_empty() || file.name.starts_with('.') || !file.name.chars().all(is_plain) {
                return wrong(format!("{:?} is not the name of a database file", file.name));
            }
            let sum = file.objects.iter().try_fold(0u64, |sum, of| sum.checked_add(of.bytes));
            if sum != Some(file.bytes) {
                return wrong(format!("the parts of {} do not have its length", file.name));
            }
        }
        if self.files.iter().try_fold(0u64, |sum, of| sum.checked_add(of.bytes)).is_none() {
            return wrong("the length of its files is too large".into());
        }
        let mut names: Vec<&str> = self.files.iter().map(|file| &*file.name).collect();
        names.sort_unstable();
        match names.windows(2).find(|two| two[0] == two[1]) {
            Some(twice) => wrong(format!("the manifest has two files {}", twice[0])),
            None => Ok(()),
        }
    }
}

/// The content of a hold: objects that no call of `prune` deletes until the hold is older than the grace time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hold {
    pub(crate) objects: Vec<String>,
}

/// What every JSON object of this crate has.
#[derive(Deserialize)]
struct FormatFields {
    format: String,
    version: u64,
}

pub(crate) fn to_json(value: &impl Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(value).unwrap_or_default();
    json.push(b'\n');
    json
}

/// # Errors
/// `WrongContent` if the bytes are not JSON of the format, `NewerVersion`.
fn from_json<T: DeserializeOwned>(object: &str, bytes: &[u8], format: &str) -> Result<T> {
    let wrong = |error: serde_json::Error| BackupError::wrong(object, format!("this is no {format}: {error}"));
    let fields: FormatFields = serde_json::from_slice(bytes).map_err(wrong)?;
    if fields.format != format {
        return Err(BackupError::wrong(object, format!("this is no {format}, but {:?}", fields.format)));
    }
    if fields.version > VERSION {
        return Err(BackupError::NewerVersion { object: object.into(), version: fields.version });
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

pub(crate) fn decode_store(object: &str, bytes: &[u8]) -> Result<StoreRecord> {
    match from_json(object, bytes, STORE_FORMAT) {
        Err(BackupError::WrongContent { .. }) => Err(BackupError::NotABackupStore { object: object.into() }),
        decoded => decoded,
    }
}

pub(crate) fn decode_backup(object: &str, bytes: &[u8]) -> Result<BackupManifest> {
    if backup_id(object).is_none_or(|id| backup_object(id, bytes) != object) {
        return Err(BackupError::wrong(object, "the checksum of the manifest does not match its name"));
    }
    let manifest: BackupManifest = from_json(object, bytes, BACKUP_FORMAT)?;
    manifest.check(object)?;
    Ok(manifest)
}

pub(crate) fn decode_hold(object: &str, bytes: &[u8]) -> Result<Hold> {
    serde_json::from_slice(bytes).map_err(|error| BackupError::wrong(object, format!("this is no hold: {error}")))
}
