//! The files that the demo stores, and the puts that follow from them.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use walkdir::{DirEntry, WalkDir};

use crate::error::{CliError, Result};
use crate::{display, interrupt, path_key};

/// Maximum size of a file in bytes. Larger files are skipped, because a value is kept in memory completely.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Maximum size of the input in bytes, chosen for the time limit and for temporary directories.
const INPUT_BYTES_MAX: u64 = 2 << 30;

/// Maximum number of puts, which bounds the memory for keys and acknowledgements.
const PUTS_MAX: u64 = 200_000;

/// Minimum number of bytes that an edit adds to a file.
const EDIT_BYTES: usize = 300;

/// Hash of a value. The demo and its writer process are the same program, so another version may hash differently.
pub(super) fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// The number of some items, and the first ten of them.
#[derive(Debug, Default)]
pub(super) struct CountedItems {
    pub(super) count: u64,
    pub(super) first: Vec<String>,
}

impl CountedItems {
    pub(super) fn add(&mut self, item: String) {
        self.count += 1;
        if self.first.len() < 10 {
            self.first.push(item);
        }
    }
}

/// The input: version 0 of every file is its content, the later versions are edits of it. Put `n` stores version
/// `n / files` of file `n % files`.
#[derive(Debug, Default)]
pub(super) struct InputFiles {
    pub(super) root: PathBuf,
    /// Keys of the files: their paths relative to `root`.
    keys: Vec<Vec<u8>>,
    /// Sum of the file sizes.
    pub(super) bytes: u64,
    /// Number of versions of each file.
    pub(super) versions: u64,
    pub(super) skipped: CountedItems,
    /// Reasons why the input does not contain all files.
    pub(super) cut_short: Vec<String>,
}

impl InputFiles {
    /// Lists all regular files below `root`, in the order of their names. Stops at `until` and at the limits above.
    pub(super) fn list(root: &Path, skip_build: bool, until: Instant) -> Result<InputFiles> {
        let mut input = InputFiles { root: root.to_path_buf(), versions: 1, ..InputFiles::default() };
        let enter = |entry: &DirEntry| {
            let build = ["target", ".git"].iter().any(|name| entry.file_name() == *name);
            !(skip_build && build && entry.depth() > 0 && entry.file_type().is_dir())
        };
        for entry in WalkDir::new(root).sort_by_file_name().into_iter().filter_entry(enter) {
            interrupt::check()?;
            let entry = match entry {
                Ok(entry) if entry.file_type().is_file() => entry,
                Ok(_) => continue,
                Err(error) => {
                    input.skipped.add(error.to_string());
                    continue;
                }
            };
            let size = entry.metadata().map_or(0, |data| data.len());
            if size > FILE_BYTES_MAX {
                input.skipped.add(format!(
                    "{}: larger than {}",
                    entry.path().display(),
                    display::bytes(FILE_BYTES_MAX)
                ));
                continue;
            }
            let full = input.bytes + size > INPUT_BYTES_MAX || input.files() >= PUTS_MAX;
            if full || Instant::now() > until {
                let limit = if full { "size" } else { "time" };
                input.cut_short.push(format!("the directory has more files than the {limit} limit of the demo allows"));
                break;
            }
            input.bytes += size;
            input.keys.push(path_key::from_path(entry.path(), root));
        }
        Ok(input)
    }

    /// Writes 300 small text files below `root`, for directories without files, and lists them.
    pub(super) fn generate(root: &Path, until: Instant) -> Result<InputFiles> {
        for n in 0..300u64 {
            let path = root.join(format!("chapter-{:02}/text-{n:03}.txt", n % 12));
            fs::create_dir_all(path.parent().unwrap_or(root))
                .and_then(|()| fs::write(&path, format!("line of text {n}\n").repeat(30 + 8 * n as usize)))
                .map_err(|e| CliError::os("write a generated file", &path, e))?;
        }
        InputFiles::list(root, false, until)
    }

    /// Chooses the number of versions so that about `bytes` are written, within [`PUTS_MAX`].
    pub(super) fn repeat_for(&mut self, bytes: u64) {
        let bytes_per_version = self.bytes + self.files() * EDIT_BYTES as u64;
        let max_versions = PUTS_MAX / self.files().max(1);
        self.versions = bytes.div_ceil(bytes_per_version.max(1)).clamp(1, max_versions.max(1));
    }

    /// Saves the keys for the writer process.
    pub(super) fn save(&self, list: &Path) -> Result<()> {
        fs::write(list, self.keys.join(&0)).map_err(|e| CliError::os("write the list of files", list, e))
    }

    /// Loads the list that [`InputFiles::save`] wrote.
    pub(super) fn load(list: &Path, root: &Path, versions: u64) -> Result<InputFiles> {
        let bytes = fs::read(list).map_err(|e| CliError::os("read the list of files", list, e))?;
        let keys = bytes.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
        Ok(InputFiles { root: root.to_path_buf(), keys, versions, ..InputFiles::default() })
    }

    pub(super) fn files(&self) -> u64 {
        self.keys.len() as u64
    }

    pub(super) fn puts(&self) -> u64 {
        self.files() * self.versions
    }

    /// Key of a put. The key of a later version is a path below that of its file, so it differs from every file path.
    pub(super) fn key(&self, put: u64) -> Vec<u8> {
        let key = &self.keys[(put % self.files()) as usize];
        match put / self.files() {
            0 => key.clone(),
            version => [key, format!("/v{version}").as_bytes()].concat(),
        }
    }

    /// Value of a put, computed from the current content of the file. The error is a sentence about the file.
    pub(super) fn content(&self, put: u64) -> Result<Vec<u8>, String> {
        let key = &self.keys[(put % self.files()) as usize];
        let path = path_key::to_relative_path(key).map(|path| self.root.join(path)).ok_or("not a path")?;
        let mut content = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content))
            .and_then(|n| if n as u64 > FILE_BYTES_MAX { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(()) })
            .map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(edited_version(content, key, put / self.files()))
    }
}

/// Edits `content`; the result depends on `content`, `key` and `version` only. Version 0 is `content`.
fn edited_version(mut content: Vec<u8>, key: &[u8], version: u64) -> Vec<u8> {
    if version > 0 {
        let seed = fingerprint(key).wrapping_add(version);
        for byte in content.iter_mut().skip(seed as usize % 256).step_by(256) {
            *byte = b'a' + (seed % 26) as u8;
        }
        let line = format!("version {version} {seed:016x}\n");
        content.extend_from_slice(line.repeat(EDIT_BYTES.div_ceil(line.len())).as_bytes());
    }
    content
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn versions_are_repeatable_and_differ() {
        let content = b"one two three\n".repeat(100);
        assert_eq!(edited_version(content.clone(), b"p", 0), content);
        let first = edited_version(content.clone(), b"p", 1);
        assert_eq!(first, edited_version(content.clone(), b"p", 1));
        assert_ne!(first, edited_version(content.clone(), b"p", 2));
        assert_ne!(first, edited_version(content, b"q", 1));
        assert!(edited_version(Vec::new(), b"p", 1).len() >= EDIT_BYTES);
    }

    #[test]
    fn puts_are_equal_after_saving_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("files");
        fs::create_dir_all(root.join("target")).unwrap();
        for name in ["a", "b", "target/x"] {
            fs::write(root.join(name), name).unwrap();
        }
        let until = Instant::now() + Duration::from_secs(60);
        assert_eq!(InputFiles::list(&root, false, until).unwrap().files(), 3);
        let mut input = InputFiles::list(&root, true, until).unwrap();
        assert_eq!((input.files(), input.bytes, input.puts()), (2, 2, 2));
        input.repeat_for(3 * (2 + 2 * EDIT_BYTES as u64));
        input.save(&dir.path().join("list")).unwrap();
        let loaded = InputFiles::load(&dir.path().join("list"), &root, input.versions).unwrap();
        let keys: Vec<_> = (0..loaded.puts()).map(|put| String::from_utf8(loaded.key(put)).unwrap()).collect();
        assert_eq!(keys, ["a", "b", "a/v1", "b/v1", "a/v2", "b/v2"]);
        assert_eq!(loaded.content(1).unwrap(), b"b");
        assert_eq!(loaded.content(3).unwrap(), edited_version(b"b".to_vec(), b"b", 1));
        fs::remove_file(root.join("b")).unwrap();
        assert!(loaded.content(1).unwrap_err().contains("files/b"));
    }

    #[test]
    fn number_of_versions_is_bounded() {
        let mut input = InputFiles { keys: vec![b"a".to_vec(); 3], ..InputFiles::default() };
        input.repeat_for(u64::MAX);
        assert_eq!(input.versions, PUTS_MAX / 3);
        input.repeat_for(0);
        assert_eq!(input.versions, 1);
    }
}
