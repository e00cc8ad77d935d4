//! Opens databases and partitions, each command with the fewest rights that it needs. A command that only reads does so
//! beside a process that writes.

use std::path::Path;
use std::{fmt, io};

use azekura::{Config, Database, ErrorKind, Partition, PartitionCreateOptions, Settings};
use serde_json::{Value, json};

use crate::display::plural;
use crate::error::{CliError, Result, print_error, print_notice};

/// An open database.
#[derive(Debug)]
pub(crate) struct OpenedDatabase {
    pub(crate) db: Database,
    /// Whether `db` is a follower, because another process has the database open for writing.
    pub(crate) is_follower: bool,
}

impl OpenedDatabase {
    /// As [`print_lag`], if the database is a follower.
    pub(crate) fn print_lag(&self, json: bool) {
        if self.is_follower {
            print_lag(&self.db, json);
        }
    }
}

/// How far a follower was behind its writer when its state had been read. Formatted as a clause.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FollowerLag {
    /// The last sequence number that was visible.
    pub(crate) sequence_number: u64,
    /// Sequence numbers that the writer had used since. `None` if the follower could not catch up.
    behind: Option<u64>,
}

impl FollowerLag {
    /// Catches up, which shows what the writer has committed since the last time.
    pub(crate) fn measure(db: &Database) -> Result<FollowerLag> {
        let sequence_number = db.change_position()?.sequence_number();
        let behind = db.catch_up().ok().map(|now| now.sequence_number().saturating_sub(sequence_number));
        Ok(FollowerLag { sequence_number, behind })
    }

    pub(crate) fn to_json(self) -> Value {
        json!({ "sequence_number": self.sequence_number, "behind": self.behind })
    }
}

impl fmt::Display for FollowerLag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.behind {
            Some(behind) => {
                write!(f, "the writer was {} ahead when this had been read", plural(behind, "sequence number"))
            }
            None => f.write_str("how far the writer is ahead could not be read"),
        }
    }
}

/// Says on standard error how far the writer of a follower is ahead of what a command has read. Prints nothing if the
/// writer is not ahead.
pub(crate) fn print_lag(db: &Database, json: bool) {
    // The result of the command is complete without it.
    let Ok(lag) = FollowerLag::measure(db) else { return };
    if lag.behind != Some(0) {
        let notice = json!({ "kind": "behind_writer", "sequence_number": lag.sequence_number, "behind": lag.behind });
        print_notice(json, notice, format_args!("azekura: {lag}."));
    }
}

/// How often the database of a backup catches up beside another process.
#[cfg(feature = "backup")]
const BACKUP_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);

/// Opens a database for commands that only read: shares the directory with other readers and writes nothing. If another
/// process writes to it, reads beside that process, and says so on standard error.
pub(crate) fn open_to_read(path: &Path, json: bool) -> Result<OpenedDatabase> {
    check_directory(path)?;
    match Config::new(path).open_read_only() {
        Err(locked) if locked.kind() == ErrorKind::Locked => {
            Ok(OpenedDatabase { db: open_beside(path, locked.into(), json)?, is_follower: true })
        }
        opened => Ok(OpenedDatabase { db: opened?, is_follower: false }),
    }
}

/// Opens a database for commands that change it. If another process writes to it, opens it as [`open_to_read`] does.
pub(crate) fn open_to_write_or_read(path: &Path, json: bool) -> Result<OpenedDatabase> {
    match open_existing(path) {
        Err(locked) if locked.is_locked() => {
            Ok(OpenedDatabase { db: open_beside(path, locked, json)?, is_follower: true })
        }
        opened => Ok(OpenedDatabase { db: opened?, is_follower: false }),
    }
}

/// Opens a follower of a database that another process writes, and says so on standard error. `locked`: the error of
/// opening it otherwise.
///
/// # Errors
/// `locked` if the database has a partition that cannot be followed.
pub(crate) fn open_beside(path: &Path, locked: CliError, json: bool) -> Result<Database> {
    open_follower(Config::new(path), locked, json)
}

/// Opens a database for a backup, without keeping other processes from writing to it, if that is possible. It catches
/// up with them by itself.
#[cfg(feature = "backup")]
pub(crate) fn open_to_back_up(path: &Path, json: bool) -> Result<Database> {
    let config = || Config::new(path).follow_interval(Some(BACKUP_INTERVAL));
    match open_existing(path) {
        Err(locked) if locked.is_locked() => return open_follower(config(), locked, json),
        // Now what is in the log is durable.
        opened => opened?.close()?,
    }
    match config().open_follower() {
        Err(error) if error.kind() == ErrorKind::Unsupported => open_existing(path),
        opened => Ok(opened?),
    }
}

fn open_follower(config: Config, locked: CliError, json: bool) -> Result<Database> {
    let db = config.open_follower().map_err(|error| match error.kind() {
        ErrorKind::Unsupported => locked.with_note(&format!("it cannot be read meanwhile: {}", error.message())),
        _ => error.into(),
    })?;
    let seqno = db.change_position()?.sequence_number();
    let text = format_args!(
        "azekura: another process has the database open: reading beside it, as of sequence number {seqno}."
    );
    print_notice(json, json!({ "kind": "beside_writer", "sequence_number": seqno }), text);
    Ok(db)
}

/// Opens a database for commands that change it.
pub(crate) fn open_existing(path: &Path) -> Result<Database> {
    open_existing_for(path, 0)
}

/// As [`open_existing`], with memory for an entry of this many bytes.
pub(crate) fn open_existing_for(path: &Path, entry_bytes: u64) -> Result<Database> {
    check_directory(path)?;
    // The engine would create a database in an empty directory, and says what is wrong with any other one.
    if is_empty_directory(path) {
        return Err(CliError::input(path, "there is no database here: the directory is empty"));
    }
    Ok(Config::new(path).memory_budget(memory_budget_for(entry_bytes)).open()?)
}

/// Whether a database would be created here.
pub(crate) fn is_empty_directory(path: &Path) -> bool {
    path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

/// Opens a database, or creates it if it is missing.
pub(crate) fn open_or_create(path: &Path) -> Result<Database> {
    open_or_create_for(path, 0)
}

/// As [`open_or_create`], with memory for an entry of this many bytes.
pub(crate) fn open_or_create_for(path: &Path, entry_bytes: u64) -> Result<Database> {
    Ok(Config::new(path).memory_budget(memory_budget_for(entry_bytes)).open()?)
}

/// The memory budget with which a database can store an entry of this many bytes: an entry may have half of it.
pub(crate) fn memory_budget_for(entry_bytes: u64) -> u64 {
    const OVERHEAD: u64 = 1 << 20;
    (2 * (entry_bytes + OVERHEAD)).max(Settings::default().memory_budget)
}

/// Opens a partition that must exist, with its stored options.
pub(crate) fn existing_partition(db: &Database, name: &str) -> Result<Partition> {
    if db.partition_exists(name) {
        return Ok(db.partition(name)?);
    }
    let names = db.list_partitions();
    let others = if names.is_empty() { "there are none".into() } else { format!("there are: {}", names.join(", ")) };
    Err(CliError::input(db.path(), format!("no partition is named \"{name}\"; {others}")))
}

/// Opens all partitions in the order of their names. A partition with a comparator that this program does not have is
/// reported and skipped.
pub(crate) fn all_partitions(db: &Database) -> Result<Vec<Partition>> {
    let mut names = db.list_partitions();
    names.sort();
    let mut partitions = Vec::new();
    for name in names {
        match db.partition(&name) {
            Ok(partition) => partitions.push(partition),
            Err(error) if error.kind() == ErrorKind::Invalid => {
                print_error(format_args!("azekura: skipped: {}.", error.message()));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(partitions)
}

/// Opens the named partition, which must exist, or all partitions whatever their comparator is.
///
/// # Errors
/// Those of a partition that cannot be opened.
pub(crate) fn partitions(db: &Database, name: Option<&str>) -> Result<Vec<Partition>> {
    let names = name.map_or_else(|| db.list_partitions(), |name| vec![name.to_string()]);
    names.iter().map(|name| existing_partition(db, name)).collect()
}

/// Opens the partition to read from, with its database.
pub(crate) fn partition_to_read(path: &Path, name: &str, json: bool) -> Result<(OpenedDatabase, Partition)> {
    let opened = open_to_read(path, json)?;
    let partition = existing_partition(&opened.db, name)?;
    Ok((opened, partition))
}

/// A partition to write to, with its database.
#[derive(Debug)]
pub(crate) struct WritablePartition {
    pub(crate) db: Database,
    pub(crate) partition: Partition,
    /// Whether this command created the partition.
    created: bool,
}

impl WritablePartition {
    /// Closes the database. Unless an entry was `stored`, an empty partition that this command created is deleted.
    pub(crate) fn close(self, stored: bool) -> Result<()> {
        if self.created && !stored && self.partition.is_empty()? {
            self.db.delete_partition(self.partition)?;
        } else {
            drop(self.partition);
        }
        Ok(self.db.close()?)
    }
}

/// Opens the partition to write to, with memory for an entry of this many bytes. With `create`, creates it and its
/// database if they are missing.
pub(crate) fn partition_to_write(path: &Path, name: &str, create: bool, entry_bytes: u64) -> Result<WritablePartition> {
    let db = if create { open_or_create_for(path, entry_bytes)? } else { open_existing_for(path, entry_bytes)? };
    let (partition, created) = partition_to_put(&db, name, create)?;
    Ok(WritablePartition { db, partition, created })
}

/// Opens a partition to write to. With `create`, creates it if it is missing, and then returns true with it.
pub(crate) fn partition_to_put(db: &Database, name: &str, create: bool) -> Result<(Partition, bool)> {
    match create {
        true => open_or_create_partition(db, name, PartitionCreateOptions::default()),
        false => existing_partition(db, name)
            .map(|partition| (partition, false))
            .map_err(|error| error.with_note("`put --create` creates it")),
    }
}

/// Opens a partition with its stored options, or creates it with `options`. Returns whether it was created.
pub(crate) fn open_or_create_partition(
    db: &Database,
    name: &str,
    options: PartitionCreateOptions,
) -> Result<(Partition, bool)> {
    let created = !db.partition_exists(name);
    let partition = if created { db.open_partition(name, options)? } else { db.partition(name)? };
    Ok((partition, created))
}

/// Fails unless `path` is a directory. The message says which commands create a database.
pub(crate) fn check_directory(path: &Path) -> Result<()> {
    let message = match path.metadata() {
        Ok(data) if data.is_dir() => return Ok(()),
        Ok(_) => "a database is a directory; this is not",
        Err(_) if path.is_symlink() => "this is a symbolic link to a path that does not exist",
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            "there is no database here; `put --create`, `import` and `partitions create` create one"
        }
        Err(error) => return Err(CliError::os("read the directory", path, error)),
    };
    Err(CliError::input(path, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_is_what_was_committed_since() {
        let dir = tempfile::tempdir().unwrap();
        let writer = Config::new(dir.path()).open().unwrap();
        let partition = writer.open_partition("p", PartitionCreateOptions::default()).unwrap();
        partition.insert("a", "1").unwrap();
        let follower = Config::new(dir.path()).open_follower().unwrap();
        let read = writer.change_position().unwrap().sequence_number();
        (0..3).for_each(|n| partition.insert([n], "2").unwrap());
        let lag = FollowerLag::measure(&follower).unwrap();
        assert_eq!(lag.to_json(), json!({ "sequence_number": read, "behind": 3 }));
        assert_eq!(lag.to_string(), "the writer was 3 sequence numbers ahead when this had been read");
        assert_eq!(FollowerLag::measure(&follower).unwrap().behind, Some(0));
    }
}
