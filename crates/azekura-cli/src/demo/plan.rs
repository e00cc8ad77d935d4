//! The files to store, as a list on disk, and the jobs that follow from it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use walkdir::{DirEntry, WalkDir};

use super::options::{FILE_BYTES_MAX, INPUT_BYTES_MAX};
use super::scratch::go_on;
use super::version;
use crate::display;
use crate::failure::{Failure, Result};
use crate::path_key;
use crate::progress::Progress;

/// What lies below a directory. The list itself is a file: length of the path (4 bytes), path.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) list: PathBuf,
    pub(crate) root: PathBuf,
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    /// Stands between a path and its version in a key; no path ends with it and a number.
    pub(crate) marker: String,
    pub(crate) left_out: LeftOut,
    /// Why not everything was taken; empty if it was.
    pub(crate) cut_short: Vec<String>,
}

/// What was left out: all counted, the first few named.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    pub(crate) count: u64,
    pub(crate) first: Vec<String>,
}

impl LeftOut {
    pub(crate) fn add(&mut self, sentence: String) {
        self.count += 1;
        if self.first.len() < 10 {
            self.first.push(sentence);
        }
    }
}

/// What to walk.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    pub(crate) root: &'a Path,
    /// Directories to stay out of.
    pub(crate) without: Vec<PathBuf>,
    /// Whether `target` and `.git` are passed by.
    pub(crate) without_build: bool,
    pub(crate) until: Instant,
}

impl Walk<'_> {
    fn enters(&self, entry: &DirEntry) -> bool {
        if !entry.file_type().is_dir() || entry.depth() == 0 {
            return true;
        }
        let build = self.without_build && ["target", ".git"].iter().any(|name| entry.file_name() == *name);
        !build && !self.without.iter().any(|own| own == entry.path())
    }

    /// Writes the list of all regular files, in the order of the directories.
    pub(crate) fn plan(&self, list: &Path, json: bool) -> Result<Plan> {
        let failed = |e| Failure::os("write the list of files", list, e);
        let mut out = BufWriter::new(File::create(list).map_err(failed)?);
        let mut plan = Plan {
            list: list.to_path_buf(),
            root: self.root.to_path_buf(),
            files: 0,
            bytes: 0,
            marker: "@v".into(),
            left_out: LeftOut::default(),
            cut_short: Vec::new(),
        };
        let progress = Progress::spinner(json, "Looking");
        for entry in WalkDir::new(self.root).sort_by_file_name().into_iter().filter_entry(|e| self.enters(e)) {
            go_on()?;
            let Some((key, size)) = plan.accept(entry) else { continue };
            if plan.bytes + size > INPUT_BYTES_MAX || Instant::now() > self.until {
                let why = if Instant::now() > self.until { "time" } else { "size" };
                plan.cut_short.push(format!("the directory has more files; the demo stays within its {why}"));
                break;
            }
            while has_version(&key, &plan.marker) {
                plan.marker.push('v');
            }
            plan.files += 1;
            plan.bytes += size;
            progress.add(1);
            out.write_all(&(key.len() as u32).to_le_bytes()).and_then(|()| out.write_all(&key)).map_err(failed)?;
        }
        out.flush().map_err(failed)?;
        Ok(plan)
    }
}

impl Plan {
    /// Key and size of what can be stored; notes what cannot.
    fn accept(&mut self, entry: walkdir::Result<DirEntry>) -> Option<(Vec<u8>, u64)> {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                self.left_out.add(error.to_string());
                return None;
            }
        };
        if !entry.file_type().is_file() {
            return None;
        }
        let size = entry.metadata().map_or(0, |data| data.len());
        if size > FILE_BYTES_MAX {
            let limit = display::bytes(FILE_BYTES_MAX);
            self.left_out.add(format!("{}: {} is more than {limit}", entry.path().display(), display::bytes(size)));
            return None;
        }
        Some((path_key::of(entry.path(), &self.root), size))
    }

    /// All jobs from the first on.
    pub(crate) fn jobs(&self) -> Result<Jobs> {
        Jobs::open(&self.list, &self.root, &self.marker)
    }
}

/// Whether `key` ends with the marker and a number, as the key of a generated version does.
fn has_version(key: &[u8], marker: &str) -> bool {
    let digits = key.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    digits > 0 && key[..key.len() - digits].ends_with(marker.as_bytes())
}

/// One thing to store.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) index: u64,
    pub(crate) version: u64,
    pub(crate) key: Vec<u8>,
    path: Vec<u8>,
}

/// The endless sequence of jobs: every file, then the first version of every file, then the second, …
pub(crate) struct Jobs {
    list: BufReader<File>,
    name: PathBuf,
    root: PathBuf,
    marker: String,
    index: u64,
    version: u64,
}

impl Jobs {
    pub(crate) fn open(list: &Path, root: &Path, marker: &str) -> Result<Jobs> {
        let file = File::open(list).map_err(|e| Failure::os("open the list of files", list, e))?;
        Ok(Jobs {
            list: BufReader::new(file),
            name: list.to_path_buf(),
            root: root.to_path_buf(),
            marker: marker.to_string(),
            index: 0,
            version: 0,
        })
    }

    /// Goes on to job `n`.
    pub(crate) fn skip_to(&mut self, n: u64) -> Result<()> {
        while self.index < n {
            self.next_job()?;
        }
        Ok(())
    }

    pub(crate) fn next_job(&mut self) -> Result<Job> {
        let path = match self.read_path() {
            Ok(Some(path)) => path,
            Ok(None) => {
                self.version += 1;
                let again = self.list.rewind().and_then(|()| self.read_path());
                again.and_then(|path| path.ok_or(io::ErrorKind::UnexpectedEof.into())).map_err(|e| self.failed(e))?
            }
            Err(error) => return Err(self.failed(error)),
        };
        let mut key = path.clone();
        if self.version > 0 {
            key.extend_from_slice(format!("{}{}", self.marker, self.version).as_bytes());
        }
        self.index += 1;
        Ok(Job { index: self.index - 1, version: self.version, key, path })
    }

    /// What the job stores, as the file is now.
    ///
    /// # Errors
    /// A sentence about the file, which is then left out.
    pub(crate) fn content(&self, job: &Job) -> Result<Vec<u8>, String> {
        let path =
            path_key::to_relative_path(&job.path).map(|relative| self.root.join(relative)).ok_or("not a path")?;
        let read = || {
            let mut content = Vec::new();
            File::open(&path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut content)?;
            Ok(content)
        };
        let content: Vec<u8> = read().map_err(|e: io::Error| format!("{}: {e}", path.display()))?;
        if content.len() as u64 > FILE_BYTES_MAX {
            return Err(format!("{}: grew beyond {}", path.display(), display::bytes(FILE_BYTES_MAX)));
        }
        Ok(version::edited(content, &job.path, job.version))
    }

    fn read_path(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut length = [0; 4];
        match self.list.read_exact(&mut length) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let mut path = vec![0; u32::from_le_bytes(length) as usize];
        self.list.read_exact(&mut path)?;
        Ok(Some(path))
    }

    fn failed(&self, error: io::Error) -> Failure {
        Failure::os("read the list of files", &self.name, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_versions_are_recognised() {
        assert!(has_version(b"a/b@v12", "@v"));
        for key in [&b"a@v"[..], b"a12", b"a@v1x", b"a@vv1"] {
            assert!(!has_version(key, "@v"), "{key:?}");
        }
    }

    #[test]
    fn jobs_go_round_and_the_marker_evades_real_names() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("files");
        std::fs::create_dir_all(root.join("target")).unwrap();
        for name in ["a", "a@v1", "target/x"] {
            std::fs::write(root.join(name), name).unwrap();
        }
        let until = Instant::now() + std::time::Duration::from_secs(60);
        let walk = Walk { root: &root, without: Vec::new(), without_build: true, until };
        let plan = walk.plan(&dir.path().join("list"), true).unwrap();
        assert_eq!((plan.files, plan.bytes, plan.marker.as_str()), (2, 5, "@vv"));
        let mut jobs = plan.jobs().unwrap();
        let keys: Vec<_> = (0..4).map(|_| String::from_utf8(jobs.next_job().unwrap().key).unwrap()).collect();
        assert_eq!(keys, ["a", "a@v1", "a@vv1", "a@v1@vv1"]);
        let mut jobs = plan.jobs().unwrap();
        jobs.skip_to(3).unwrap();
        let job = jobs.next_job().unwrap();
        assert_eq!((job.index, job.version, job.key.as_slice()), (3, 1, &b"a@v1@vv1"[..]));
        assert_eq!(jobs.content(&job).unwrap(), version::edited(b"a@v1".to_vec(), b"a@v1", 1));
    }
}
