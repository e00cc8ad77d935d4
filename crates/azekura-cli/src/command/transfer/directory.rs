//! A directory: relative paths are keys, contents are values.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use azekura::Partition;
use walkdir::{DirEntry, WalkDir};

use crate::command::transfer::loader::EntryLoader;
use crate::command::transfer::report::TransferReport;
use crate::command::transfer::writer::{UNFINISHED_PREFIX, UNFINISHED_SUFFIX, directory_of, sync_directory};
use crate::error::{CliError, Result};
use crate::interrupt;
use crate::progress::ProgressReporter;
use crate::{display, encoding, path_key};

/// Stores every regular file below `source` under its relative path. Skips unreadable files, and what an export that
/// was killed has left.
pub(super) fn import(source: &Path, db: &Path, loader: &mut EntryLoader<'_>) -> Result<()> {
    if !source.is_dir() {
        return Err(CliError::input(source, "not a directory"));
    }
    // The database may be inside `source`, and may be created during the walk. Its files are not imported.
    let is_database = |entry: &DirEntry| {
        let database = || fs::canonicalize(db).ok();
        entry.file_type().is_dir() && fs::canonicalize(entry.path()).is_ok_and(|dir| database() == Some(dir))
    };
    let mut walk = WalkDir::new(source).sort_by_file_name().into_iter().filter_entry(|entry| !is_database(entry));
    while let Some(entry) = walk.next() {
        match entry {
            Ok(entry) if is_unfinished_export(&entry) => {
                if entry.file_type().is_dir() {
                    walk.skip_current_dir();
                }
                loader.report.skip(entry.path().display().to_string(), "an interrupted export has left it");
            }
            Ok(entry) if entry.file_type().is_file() => import_file(entry.path(), source, loader)?,
            Ok(_) => {}
            Err(error) => {
                let name = error.path().unwrap_or(source).display().to_string();
                let reason = error.into_io_error().map_or("a loop of symbolic links".into(), |e| e.to_string());
                loader.report.skip(name, reason);
            }
        }
    }
    Ok(())
}

/// Whether this file or directory is from an export that was killed.
fn is_unfinished_export(entry: &DirEntry) -> bool {
    let name = entry.file_name().as_encoded_bytes();
    entry.depth() > 0 && name.starts_with(UNFINISHED_PREFIX.as_bytes()) && name.ends_with(UNFINISHED_SUFFIX.as_bytes())
}

fn import_file(path: &Path, source: &Path, loader: &mut EntryLoader<'_>) -> Result<()> {
    let name = || path.display().to_string();
    let length = path.metadata().map_or(0, |data| data.len());
    if length > u64::from(u32::MAX) {
        loader.report.skip(name(), format!("{} exceed the maximum size of a value", display::bytes(length)));
        return Ok(());
    }
    match fs::read(path) {
        Ok(content) => {
            loader.progress.add(1);
            loader.progress.message(name());
            loader.put(&path_key::from_path(path, source), &content, name)
        }
        Err(error) => {
            loader.report.skip(name(), error.to_string());
            Ok(())
        }
    }
}

/// Writes every value to the file below `target` whose relative path is the key. `target` must be new or empty, so that
/// it contains no symbolic link to another directory.
///
/// The files are written to a temporary directory in `target`, and moved out of it when all are complete and synced. So
/// an export that was interrupted does not look complete.
pub(super) fn export(partition: &Partition, target: &Path, json: bool) -> Result<TransferReport> {
    let existing = target.ancestors().find(|dir| dir.exists());
    fs::create_dir_all(target).map_err(|e| CliError::os("create the directory", target, e))?;
    let mut names = fs::read_dir(target).map_err(|e| CliError::os("read the directory", target, e))?;
    if names.next().is_some() {
        return Err(CliError::input(target, "the directory must be new or empty"));
    }
    let unfinished = tempfile::Builder::new().prefix(UNFINISHED_PREFIX).suffix(UNFINISHED_SUFFIX).tempdir_in(target);
    let unfinished = unfinished.map_err(|e| CliError::os("create a directory", target, e))?;
    let progress = ProgressReporter::entries(json, partition.approximate_len(), "Exporting");
    let report = write_files(partition, unfinished.path(), &progress)?;
    sync_tree(unfinished.path())?;
    let moved = fs::read_dir(unfinished.path()).and_then(|mut entries| {
        entries.try_for_each(|entry| entry.and_then(|entry| fs::rename(entry.path(), target.join(entry.file_name()))))
    });
    moved.map_err(|e| CliError::os("move the files to the directory", target, e))?;
    unfinished.close().map_err(|e| CliError::os("remove the temporary directory in", target, e))?;
    sync_directory(target).map_err(|e| CliError::os("sync the directory", target, e))?;
    // The names of the directories that were created are in their parents.
    for created in target.ancestors().take_while(|dir| Some(*dir) != existing && !dir.as_os_str().is_empty()) {
        let parent = directory_of(created);
        sync_directory(parent).map_err(|e| CliError::os("sync the directory", parent, e))?;
    }
    Ok(report)
}

fn write_files(partition: &Partition, target: &Path, progress: &ProgressReporter) -> Result<TransferReport> {
    let mut report = TransferReport::default();
    for entry in partition.iter() {
        interrupt::check()?;
        let (key, value) = entry?;
        let name = || encoding::escaped(&key);
        let Some(relative) = path_key::to_relative_path(&key) else {
            report.skip(name(), "the key is not a safe relative path");
            continue;
        };
        match write_file(&target.join(relative), &value) {
            Ok(()) => {
                report.count(&key, &value);
                progress.add(1);
            }
            // One key is the directory of another key ("a" and "a/b"), or a name is too long for this file system.
            Err(error) if is_bad_name(error.kind()) => report.skip(name(), error.to_string()),
            Err(error) => return Err(CliError::os("write a file", target.join(name()), error)),
        }
    }
    Ok(report)
}

/// Makes all files and directories below `root` durable. All files are written before, so that the first sync of many
/// file systems writes most of the others.
fn sync_tree(root: &Path) -> Result<()> {
    for entry in WalkDir::new(root).contents_first(true) {
        interrupt::check()?;
        let entry = entry.map_err(|e| CliError::os("read the directory", root, e.into()))?;
        let synced = match entry.file_type().is_dir() {
            true => sync_directory(entry.path()),
            false => OpenOptions::new().write(true).open(entry.path()).and_then(|file| file.sync_all()),
        };
        synced.map_err(|e| CliError::os("sync", entry.path(), e))?;
    }
    Ok(())
}

/// Writes a new file. Removes it after an error.
fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(content).inspect_err(|_| drop(fs::remove_file(path)))
}

fn is_bad_name(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{AlreadyExists, InvalidFilename, InvalidInput, IsADirectory, NotADirectory};
    matches!(kind, AlreadyExists | InvalidFilename | InvalidInput | IsADirectory | NotADirectory)
}
