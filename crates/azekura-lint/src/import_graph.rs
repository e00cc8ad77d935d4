//! The layers of the engine's folders, and the imports between the files of one crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::source::{RustSource, matching_bracket, words_from};
use crate::tree::SourceTree;

/// Layer and folders of the engine. Each folder and each file directly below `src` must be listed.
const LAYERS: &[(u32, &[&str])] = &[
    (0, &["base"]),
    (1, &["vfs", "mem", "iter"]),
    (2, &["block", "record_log", "memtable", "engine"]),
    (3, &["table", "blob", "wal", "manifest"]),
    (4, &["lsm", "pmem"]),
    (5, &["tree"]),
    (6, &["db", "inspect"]),
    (7, &["lib", "guide"]),
    (8, &["testing"]),
];

/// The crate root, also where it is called `main.rs`.
pub(crate) const ROOT: &str = "lib.rs";

/// One path in the code of one file that leads to another file of the same crate.
pub(crate) struct Import {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) line: usize,
    /// The path as it is written.
    pub(crate) path: String,
    /// Compiled for tests only.
    pub(crate) test: bool,
    /// Imports all items of `path`.
    pub(crate) glob: bool,
}

pub(crate) struct ImportGraph<'a> {
    tree: &'a SourceTree,
    pub(crate) src: &'static str,
    pub(crate) imports: Vec<Import>,
}

/// The layer of a folder, or of a file directly below `src`.
pub(crate) fn layer_of(folder: &str) -> Option<u32> {
    LAYERS.iter().find(|(_, folders)| folders.contains(&folder)).map(|(layer, _)| *layer)
}

/// The folder that a file below `src` belongs to; a file directly below `src` is a folder of its own.
pub(crate) fn folder_of(file: &str) -> &str {
    file.split_once('/').map_or_else(|| file.strip_suffix(".rs").unwrap_or(file), |(folder, _)| folder)
}

impl<'a> ImportGraph<'a> {
    /// The imports of the crate with the sources in `src`, a path that ends with `/`.
    pub(crate) fn new(tree: &'a SourceTree, src: &'static str) -> ImportGraph<'a> {
        let exports = ModuleExports::new(tree, src);
        let mut imports = Vec::new();
        for (file, source) in tree.sources_in(src) {
            for path in crate_paths(source) {
                let to = exports.resolve("", &path.parts, 0);
                if to != file || path.glob {
                    let test = source.is_test(path.at);
                    let line = source.line_of(path.at);
                    imports.push(Import {
                        from: file.into(),
                        to,
                        line,
                        path: path.parts.join("::"),
                        test,
                        glob: path.glob,
                    });
                }
            }
        }
        ImportGraph { tree, src, imports }
    }

    /// Imports between folders in code that is not for tests, without those of `lib`, which re-exports from all
    /// folders.
    pub(crate) fn folder_imports(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for import in self.imports.iter().filter(|import| !import.test) {
            let (from, to) = (folder_of(&import.from), folder_of(&import.to));
            if from != to && from != "lib" && to != "lib" {
                found.entry(from).or_default().insert(to);
            }
        }
        found
    }

    /// The imports as the decision record lists them.
    pub(crate) fn import_list(&self) -> String {
        let imports = self.folder_imports();
        let mut lines = Vec::new();
        for folder in LAYERS.iter().rev().flat_map(|(_, folders)| *folders) {
            if let Some(to) = imports.get(folder) {
                let to: Vec<&str> =
                    LAYERS.iter().rev().flat_map(|(_, f)| *f).copied().filter(|f| to.contains(f)).collect();
                lines.push(format!("{folder} -> {}", to.join(", ")));
            }
        }
        lines.join("\n")
    }
}

impl fmt::Display for ImportGraph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let imports = self.folder_imports();
        let mut total = (0, 0);
        writeln!(f, "{:>5}  {:<9} {:>5} {:>7} {:>7}  imports", "layer", "folder", "files", "lines", "tests")?;
        for (layer, folders) in LAYERS.iter().rev() {
            for folder in *folders {
                let files: Vec<_> = self.tree.engine().filter(|(file, _)| folder_of(file) == *folder).collect();
                if files.is_empty() {
                    continue;
                }
                let all: usize = files.iter().map(|(_, source)| source.lines()).sum();
                let lines: usize = files.iter().map(|(_, source)| source.lines_without_tests()).sum();
                let to: Vec<&str> = imports.get(folder).into_iter().flatten().copied().collect();
                let (tests, to) = (all - lines, to.join(" "));
                writeln!(f, "{layer:>5}  {folder:<9} {:>5} {lines:>7} {tests:>7}  {to}", files.len())?;
                total = (total.0 + lines, total.1 + tests);
            }
        }
        write!(f, "{:>5}  {:<9} {:>5} {:>7} {:>7}", "", "all", self.tree.engine().count(), total.0, total.1)
    }
}

/// The re-exports of each `mod.rs`, so that an import is attributed to the file that defines the item.
struct ModuleExports<'a> {
    tree: &'a SourceTree,
    src: &'static str,
    /// Folder and name → path as `mod.rs` writes it.
    exports: BTreeMap<(String, String), Vec<String>>,
}

impl<'a> ModuleExports<'a> {
    fn new(tree: &'a SourceTree, src: &'static str) -> ModuleExports<'a> {
        let mut exports = BTreeMap::new();
        for (file, source) in tree.sources_in(src) {
            let Some(folder) = file.strip_suffix("/mod.rs") else { continue };
            for use_tree in use_trees(source) {
                for (name, path) in
                    use_tree.leaves.into_iter().filter(|leaf| leaf.name != "*").map(|l| (l.name, l.parts))
                {
                    exports.insert((folder.to_string(), name), path);
                }
            }
        }
        ModuleExports { tree, src, exports }
    }

    fn is_file(&self, file: &str) -> bool {
        self.tree.sources.contains_key(&format!("{}{file}", self.src))
    }

    /// The file that holds what `parts` names, seen from `folder` (empty for the root of the crate).
    fn resolve(&self, folder: &str, parts: &[String], depth: u32) -> String {
        let module = if folder.is_empty() { ROOT.to_string() } else { format!("{folder}/mod.rs") };
        let Some(head) = parts.first() else { return module };
        let inner = if folder.is_empty() { head.clone() } else { format!("{folder}/{head}") };
        if let Some(second) = parts.get(1) {
            let file = format!("{inner}/{second}.rs");
            if !self.is_file(&format!("{inner}/mod.rs")) && self.is_file(&file) {
                return file;
            }
        }
        if self.is_file(&format!("{inner}.rs")) {
            return format!("{inner}.rs");
        }
        if self.is_file(&format!("{inner}/mod.rs")) {
            return self.resolve(&inner, &parts[1..], depth);
        }
        match self.exports.get(&(folder.to_string(), head.clone())) {
            // A cycle of re-exports does not compile; the bound is for the trees of `lint_tests`.
            Some(path) if depth < 8 => match path.first().map(String::as_str) {
                Some("crate") => self.resolve("", &path[1..], depth + 1),
                Some("self") => self.resolve(folder, &path[1..], depth + 1),
                _ => self.resolve(folder, path, depth + 1),
            },
            _ => module,
        }
    }
}

/// A path that begins with `crate::`, without that word.
struct CratePath {
    at: usize,
    parts: Vec<String>,
    glob: bool,
}

fn crate_paths(source: &RustSource) -> Vec<CratePath> {
    let mut found = Vec::new();
    let trees = use_trees(source);
    for leaf in trees.iter().flat_map(|tree| &tree.leaves) {
        if leaf.parts.first().is_some_and(|p| p == "crate") {
            found.push(CratePath { at: leaf.at, parts: leaf.parts[1..].to_vec(), glob: leaf.name == "*" });
        }
    }
    for (at, _) in source.words().filter(|(_, word)| *word == "crate") {
        let in_use = trees.iter().any(|tree| tree.range.contains(&at));
        let visibility = source.code[..at].trim_end().ends_with("(in");
        if !in_use && !visibility && source.code[at..].starts_with("crate::") {
            found.push(CratePath { at, parts: path_parts(&source.code, at + "crate::".len()), glob: false });
        }
    }
    found
}

fn path_parts(code: &str, mut at: usize) -> Vec<String> {
    let mut parts = Vec::new();
    while let Some((start, word)) = words_from(code, at).next().filter(|(start, _)| *start == at) {
        parts.push(word.to_string());
        at = start + word.len();
        if !code[at..].starts_with("::") {
            break;
        }
        at += 2;
    }
    parts
}

struct UseItem {
    range: std::ops::Range<usize>,
    leaves: Vec<UseLeaf>,
}

/// One item that a `use` imports.
struct UseLeaf {
    at: usize,
    /// The name in this file; `*` for a glob.
    name: String,
    parts: Vec<String>,
}

fn use_trees(source: &RustSource) -> Vec<UseItem> {
    let mut found = Vec::new();
    for (at, _) in source.words().filter(|(_, word)| *word == "use") {
        let code = &source.code;
        let Some(len) = code[at..].find(';') else { continue };
        if code[at + 3..].trim_start().starts_with('<') {
            continue; // precise capturing in a bound: `use<'a>`
        }
        let mut leaves = Vec::new();
        flatten(code, at + 3, at + len, &[], &mut leaves);
        found.push(UseItem { range: at..at + len, leaves });
    }
    found
}

/// Splits one use tree: `a::{b, c as d, e::*}`.
fn flatten(code: &str, start: usize, end: usize, prefix: &[String], leaves: &mut Vec<UseLeaf>) {
    let text = &code[start..end];
    if let Some(open) = text.find('{') {
        let mut parts = prefix.to_vec();
        parts.extend(words_from(text, 0).take_while(|(at, _)| *at < open).map(|(_, word)| word.to_string()));
        let (open, close) = (start + open, matching_bracket(code, start + open));
        let mut from = open + 1;
        for to in top_level_commas(code, open + 1, close).into_iter().chain([close]) {
            if !code[from..to].trim().is_empty() {
                flatten(code, from, to, &parts, leaves);
            }
            from = to + 1;
        }
        return;
    }
    let at = start + text.find(|c: char| !c.is_whitespace()).unwrap_or(0);
    let (path, alias) = text.split_once(" as ").map_or((text, None), |(path, alias)| (path, Some(alias.trim())));
    let mut parts = prefix.to_vec();
    parts.extend(words_from(path, 0).map(|(_, word)| word.to_string()));
    if path.trim_end().ends_with('*') {
        leaves.push(UseLeaf { at, name: "*".into(), parts });
        return;
    }
    if parts.len() > 1 && parts.last().is_some_and(|part| part == "self") {
        parts.pop();
    }
    let name = alias.or(parts.last().map(String::as_str)).unwrap_or_default().to_string();
    leaves.push(UseLeaf { at, name, parts });
}

/// Offsets of the commas between `from` and `to` that are not inside an inner bracket.
fn top_level_commas(code: &str, from: usize, to: usize) -> Vec<usize> {
    let mut depth = 0;
    let mut found = Vec::new();
    for (i, byte) in code.bytes().enumerate().take(to).skip(from) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b',' if depth == 0 => found.push(i),
            _ => {}
        }
    }
    found
}
