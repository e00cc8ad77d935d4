//! The files of the repository, read from disk or given by a test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::source::RustSource;

/// The folder of the engine's sources.
pub(crate) const ENGINE: &str = "crates/azekura/src/";

/// Text files by their path from the root of the repository, with `/` as separator.
pub(crate) struct SourceTree {
    /// Text files other than Rust sources.
    pub(crate) documents: BTreeMap<String, String>,
    pub(crate) sources: BTreeMap<String, RustSource>,
    /// The paths of all files and directories.
    names: BTreeSet<String>,
}

impl SourceTree {
    /// Reads the repository, without build output and generated files.
    pub(crate) fn read(root: &Path) -> SourceTree {
        let mut files = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(root.join(&folder)).expect("the repository can be read") {
                let entry = entry.expect("the repository can be read");
                let name = entry.file_name().into_string().expect("names are UTF-8");
                let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
                let kind = entry.file_type().expect("the repository can be read");
                if kind.is_dir() && !is_generated(&path, &name) {
                    folders.push(path);
                } else if kind.is_file() {
                    let bytes = std::fs::read(entry.path()).expect("the repository can be read");
                    files.push((path, String::from_utf8(bytes).unwrap_or_default()));
                }
            }
        }
        SourceTree::from_files(files)
    }

    /// A tree of these files.
    pub(crate) fn from_files(files: impl IntoIterator<Item = (String, String)>) -> SourceTree {
        let mut tree = SourceTree { documents: BTreeMap::new(), sources: BTreeMap::new(), names: BTreeSet::new() };
        for (path, text) in files {
            for (i, _) in path.match_indices('/') {
                tree.names.insert(path[..i].into());
            }
            tree.names.insert(path.clone());
            if path.ends_with(".rs") {
                tree.sources.insert(path, RustSource::new(text));
            } else {
                tree.documents.insert(path, text);
            }
        }
        tree.mark_tests();
        tree
    }

    /// Whether a file or a directory of that name exists.
    pub(crate) fn exists(&self, path: &str) -> bool {
        path.is_empty() || self.names.contains(path)
    }

    /// The sources of the engine, by their path below [`ENGINE`].
    pub(crate) fn engine(&self) -> impl Iterator<Item = (&str, &RustSource)> {
        self.sources_in(ENGINE)
    }

    /// The sources in a folder, by their path below it.
    pub(crate) fn sources_in(&self, folder: &str) -> impl Iterator<Item = (&str, &RustSource)> {
        self.sources.iter().filter_map(move |(path, source)| Some((path.strip_prefix(folder)?, source)))
    }

    /// Files that are tests as a whole: those in test directories, and modules that are declared under `cfg(test)`.
    fn mark_tests(&mut self) {
        let mut roots: Vec<String> = Vec::new();
        for (path, source) in &self.sources {
            let stem = path.strip_suffix("/mod.rs").or_else(|| path.strip_suffix(".rs")).unwrap_or(path);
            let stem = stem.strip_suffix("/lib").or_else(|| stem.strip_suffix("/main")).unwrap_or(stem);
            roots.extend(source.test_modules().map(|name| format!("{stem}/{name}")));
        }
        for (path, source) in &mut self.sources {
            let below =
                |root: &String| path.strip_prefix(root.as_str()).is_some_and(|r| r == ".rs" || r.starts_with('/'));
            let is_test_folder = ["fuzz/", "crates/azekura-lint/"].iter().any(|folder| path.starts_with(folder));
            if path.contains("/tests/") || is_test_folder || roots.iter().any(below) {
                source.mark_as_test();
            }
        }
    }
}

fn is_generated(path: &str, name: &str) -> bool {
    matches!(name, "target" | ".git") || matches!(path, "fuzz/corpus" | "fuzz/artifacts" | "fuzz/coverage")
}

/// Joins a path to the folder of `from` and resolves `.` and `..`; `None` if the result is outside of the repository.
pub(crate) fn resolve_relative(from: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}
