//! Files below a directory: sizes, copies, eviction from the page cache.

use crate::error::Result;
use anyhow::Context;
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use walkdir::WalkDir;

/// Every file below `dir` with its metadata; files that vanish meanwhile are left out.
pub(crate) fn files(dir: &Path) -> impl Iterator<Item = (PathBuf, Metadata)> {
    let entries = WalkDir::new(dir).sort_by_file_name().into_iter().filter_map(|entry| entry.ok());
    entries.filter(|entry| entry.file_type().is_file()).filter_map(|e| Some((e.path().to_owned(), e.metadata().ok()?)))
}

/// Bytes allocated below `dir`.
pub(crate) fn allocated_bytes(dir: &Path) -> u64 {
    files(dir).map(|(_, metadata)| metadata.blocks() * 512).sum()
}

/// Length and allocated bytes of the files below `dir`, by file name extension.
pub(crate) fn by_extension(dir: &Path) -> BTreeMap<String, (u64, u64)> {
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (path, metadata) in files(dir) {
        let extension = path.extension().map_or_else(String::new, |end| end.to_string_lossy().into_owned());
        let sum = sums.entry(extension).or_default();
        *sum = (sum.0 + metadata.len(), sum.1 + metadata.blocks() * 512);
    }
    sums
}

/// Number of tables below `dir`.
pub(crate) fn number_of_tables(dir: &Path) -> usize {
    files(dir).filter(|(path, _)| path.extension().is_some_and(|end| end == "sst")).count()
}

/// Copies a directory tree and syncs each file, so that nothing remains to be written back; `to` must not exist.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    for entry in WalkDir::new(from) {
        let entry = entry?;
        let target = to.join(entry.path().strip_prefix(from)?);
        if entry.file_type().is_dir() {
            fs::create_dir(&target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    Ok(())
}

/// Syncs every file below `dir` and drops its pages from the page cache. Pages that a process has mapped stay.
pub(crate) fn evict(dir: &Path) -> Result<()> {
    for (path, _) in files(dir) {
        if let Ok(file) = File::open(path) {
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(())
}

/// Removes a directory tree if there is one.
pub(crate) fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// A new working directory below `parent`; removed with its content when dropped.
pub(crate) fn scratch(parent: &Path) -> Result<TempDir> {
    fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    Ok(tempfile::Builder::new().prefix("azekura-bench-").tempdir_in(parent)?)
}

#[cfg(test)]
mod tests {
    use super::{allocated_bytes, by_extension, copy_tree, files};
    use std::fs;

    #[test]
    fn copy_has_the_same_files() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("below")).unwrap();
        fs::write(from.join("a"), vec![1; 10_000]).unwrap();
        fs::write(from.join("below/b"), b"b").unwrap();
        let to = dir.path().join("to");
        copy_tree(&from, &to).unwrap();
        assert_eq!(fs::read(to.join("a")).unwrap(), vec![1; 10_000]);
        assert_eq!(fs::read(to.join("below/b")).unwrap(), b"b");
        assert!(files(&to).count() == 2 && allocated_bytes(&from) >= 8192);
    }

    #[test]
    fn sizes_are_added_up_by_extension() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below.dir")).unwrap();
        for (name, bytes) in [("a.sst", 10_000), ("below.dir/b.sst", 20), ("c.blob", 3), ("LOCK", 4)] {
            fs::write(dir.path().join(name), vec![1; bytes]).unwrap();
        }
        let sums = by_extension(dir.path());
        let lengths = [("", 4), ("blob", 3), ("sst", 10_020)];
        assert!(sums.iter().map(|(end, (length, _))| (end.as_str(), *length)).eq(lengths), "{sums:?}");
        assert_eq!(sums.values().map(|(_, allocated)| allocated).sum::<u64>(), allocated_bytes(dir.path()));
        assert!(by_extension(&dir.path().join("none")).is_empty());
    }
}
