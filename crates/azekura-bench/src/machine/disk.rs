//! Files below a directory: how many bytes they take, copying them, removing them.

use crate::failure::Result;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What a directory tree takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DiskUse {
    /// Bytes allocated.
    pub(crate) allocated: u64,
    /// Files.
    pub(crate) files: u64,
}

/// Adds up every file below `dir`. Files that vanish meanwhile are left out.
pub(crate) fn usage(dir: &Path) -> DiskUse {
    let mut total = DiskUse::default();
    let Ok(entries) = fs::read_dir(dir) else { return total };
    for entry in entries.flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_dir() {
            let below = usage(&entry.path());
            total.allocated += below.allocated;
            total.files += below.files;
        } else {
            total.allocated += metadata.blocks() * 512;
            total.files += 1;
        }
    }
    total
}

/// Bytes of the files below `dir` by what their names end with: as long as each says it is, and allocated. Files that
/// vanish meanwhile are left out.
pub(crate) fn by_endings(dir: &Path) -> BTreeMap<String, (u64, u64)> {
    let mut sums = BTreeMap::new();
    let mut add = |end: String, (length, allocated): (u64, u64)| {
        let sum: &mut (u64, u64) = sums.entry(end).or_default();
        *sum = (sum.0 + length, sum.1 + allocated);
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else { continue };
        let path = entry.path();
        if metadata.is_dir() {
            by_endings(&path).into_iter().for_each(|(end, sum)| add(end, sum));
        } else {
            let end = path.extension().map_or_else(String::new, |end| end.to_string_lossy().into_owned());
            add(end, (metadata.len(), metadata.blocks() * 512));
        }
    }
    sums
}

/// Copies a directory tree and syncs each file, so that nothing is left to write back; `to` must not exist.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
            fs::File::open(&target)?.sync_all()?;
        }
    }
    Ok(())
}

/// Syncs every file below `dir` and asks the kernel to forget its pages. Pages that somebody has mapped stay.
pub(crate) fn evict(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            evict(&entry.path())?;
        } else if kind.is_file()
            && let Ok(file) = fs::File::open(entry.path())
        {
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

/// A directory of our own below the one the caller named; removed with everything in it when dropped, unless kept.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// Creates `parent/azekura-bench-<process id>`.
    pub(crate) fn create(parent: &Path, keep: bool) -> Result<Scratch> {
        let path = parent.join(format!("azekura-bench-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Scratch { path, keep })
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it stays.
    pub(crate) fn keeps(&self) -> bool {
        self.keep
    }

    /// A path below it where nothing is: whatever was there is removed.
    pub(crate) fn fresh(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        remove(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path); // nothing more can be done about it
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Scratch, by_endings, copy_tree, usage};
    use std::fs;

    #[test]
    fn copies_have_the_same_files() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("below")).unwrap();
        fs::write(from.join("a"), vec![1; 10_000]).unwrap();
        fs::write(from.join("below/b"), b"b").unwrap();
        let to = dir.path().join("to");
        copy_tree(&from, &to).unwrap();
        assert_eq!(fs::read(to.join("a")).unwrap(), vec![1; 10_000]);
        assert_eq!(fs::read(to.join("below/b")).unwrap(), b"b");
        assert_eq!(usage(&to).files, 2);
        assert!(usage(&from).allocated >= 8192);
    }

    #[test]
    fn files_are_added_up_by_endings() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("below.dir")).unwrap();
        for (name, bytes) in [("a.sst", 10_000), ("below.dir/b.sst", 20), ("c.blob", 3), ("LOCK", 4)] {
            fs::write(dir.path().join(name), vec![1; bytes]).unwrap();
        }
        let sums = by_endings(dir.path());
        let lengths = [("", 4), ("blob", 3), ("sst", 10_020)];
        assert!(sums.iter().map(|(end, (length, _))| (end.as_str(), *length)).eq(lengths), "{sums:?}");
        assert_eq!(sums.values().map(|(_, allocated)| allocated).sum::<u64>(), usage(dir.path()).allocated);
        assert!(by_endings(&dir.path().join("none")).is_empty());
    }

    #[test]
    fn scratch_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = Scratch::create(dir.path(), false).unwrap();
        let path = scratch.fresh("db").unwrap();
        fs::create_dir(&path).unwrap();
        assert!(!scratch.fresh("db").unwrap().exists());
        drop(scratch);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
