//! Opening databases and partitions, each command with no more rights than it needs.

use std::io;
use std::path::Path;

use azekura::{Config, Database, Partition, PartitionCreateOptions};

use crate::args::MapArgs;
use crate::failure::{Failure, Result};

/// For commands that only read: shares the directory with other readers and writes nothing.
pub(crate) fn to_read(path: &Path) -> Result<Database> {
    must_exist(path)?;
    Ok(Config::new(path).open_read_only()?)
}

/// For commands that change an existing database.
pub(crate) fn to_change(path: &Path) -> Result<Database> {
    must_exist(path)?;
    Ok(Config::new(path).open()?)
}

/// For commands that create what is missing.
pub(crate) fn to_fill(path: &Path) -> Result<Database> {
    Ok(Config::new(path).open()?)
}

/// A partition that must exist, with the options that are stored with it.
pub(crate) fn existing(db: &Database, name: &str) -> Result<Partition> {
    if db.partition_exists(name) {
        return Ok(db.partition(name)?);
    }
    let names = db.list_partitions();
    let others = if names.is_empty() { "there are none".into() } else { format!("there are: {}", names.join(", ")) };
    let message = format!("no partition is named \"{name}\"; {others}");
    Err(Failure::Input { file: db.path().to_path_buf(), message })
}

/// The partition to read from, with its database.
pub(crate) fn map_to_read(map: &MapArgs) -> Result<(Database, Partition)> {
    let db = to_read(&map.db.path)?;
    let partition = existing(&db, &map.partition)?;
    Ok((db, partition))
}

/// A partition to write to, with its database.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) db: Database,
    pub(crate) partition: Partition,
    /// Whether this command has created the partition.
    created: bool,
}

impl Target {
    /// Closes the database. A partition that was created here, and that nothing could be `stored` in, is deleted first.
    pub(crate) fn close(self, stored: bool) -> Result<()> {
        if self.created && !stored && self.partition.is_empty()? {
            self.db.delete_partition(self.partition)?;
        } else {
            drop(self.partition);
        }
        Ok(self.db.close()?)
    }
}

/// The partition to write to; it and its database are created if they are missing.
pub(crate) fn map_to_fill(map: &MapArgs) -> Result<Target> {
    let db = to_fill(&map.db.path)?;
    let created = !db.partition_exists(&map.partition);
    let partition = match created {
        true => db.open_partition(&map.partition, PartitionCreateOptions::default())?,
        false => db.partition(&map.partition)?,
    };
    Ok(Target { db, partition, created })
}

/// The partition that was named, which must exist, or all of them.
pub(crate) fn named_or_all(db: &Database, name: Option<&str>) -> Result<Vec<Partition>> {
    match name {
        Some(name) => Ok(vec![existing(db, name)?]),
        None => db.list_partitions().iter().map(|name| existing(db, name)).collect(),
    }
}

/// A sentence for the newcomer, where the engine could only say that something is missing.
pub(crate) fn must_exist(path: &Path) -> Result<()> {
    match path.metadata() {
        Ok(data) if data.is_dir() => Ok(()),
        Ok(_) => {
            Err(Failure::Input { file: path.to_path_buf(), message: "a database is a directory; this is not".into() })
        }
        Err(_) if path.is_symlink() => {
            let message = "this is a symbolic link to a path that does not exist".into();
            Err(Failure::Input { file: path.to_path_buf(), message })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let message = "there is no database here; `put`, `import` and `partitions create` make one".into();
            Err(Failure::Input { file: path.to_path_buf(), message })
        }
        Err(error) => Err(Failure::os("look at the database", path, error)),
    }
}
