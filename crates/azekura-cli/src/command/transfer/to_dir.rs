//! Entries become files: key → path, value → content.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use azekura::Partition;

use crate::command::transfer::moved::Moved;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::{encoding, path_key};

/// Writes every entry below `target`, which must be new or empty, so that no link in it can lead elsewhere.
pub(crate) fn export(partition: &Partition, target: &Path, json: bool) -> Result<Moved> {
    fs::create_dir_all(target).map_err(|e| Failure::os("create the directory", target, e))?;
    let mut names = fs::read_dir(target).map_err(|e| Failure::os("look into the directory", target, e))?;
    if names.next().is_some() {
        return Err(Failure::Input {
            file: target.to_path_buf(),
            message: "the directory must be new or empty".into(),
        });
    }
    let progress = Progress::entries(json, partition.approximate_len(), "Exporting");
    let mut moved = Moved::default();
    for entry in partition.iter() {
        let (key, value) = entry?;
        let Some(relative) = path_key::to_relative_path(&key) else {
            moved.left_out.push((encoding::escaped(&key), "the key is no safe relative path".into()));
            continue;
        };
        match write_file(&target.join(relative), &value) {
            Ok(()) => {
                moved.entries += 1;
                moved.bytes += (key.len() + value.len()) as u64;
                progress.add(1);
            }
            // One key is a directory of another ("a" and "a/b"), or a name is too long for this file system.
            Err(error) if blames_the_name(error.kind()) => {
                moved.left_out.push((encoding::escaped(&key), error.to_string()))
            }
            Err(error) => return Err(Failure::os("write a file", target.join(encoding::escaped(&key)), error)),
        }
    }
    Ok(moved)
}

fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    // A file that ends early would look like a whole one.
    file.write_all(content).inspect_err(|_| drop(fs::remove_file(path)))
}

fn blames_the_name(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, InvalidFilename, InvalidInput, IsADirectory, NotADirectory};
    matches!(kind, AlreadyExists | InvalidFilename | InvalidInput | IsADirectory | NotADirectory)
}
