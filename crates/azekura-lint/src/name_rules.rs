//! Rules about the names of files and types.

use std::collections::BTreeMap;

use crate::LintReport;
use crate::import_graph::ImportGraph;
use crate::source::words_from;
use crate::tree::{ENGINE, SourceTree};

const FORBIDDEN_FILE_NAMES: &[&str] = &["util", "utils", "common", "helpers", "helper", "types", "misc"];

/// A file is named after one noun; names that fit any content are forbidden.
pub(crate) fn file_names(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for path in tree.sources.keys() {
        for part in path.trim_end_matches(".rs").split('/').filter(|part| FORBIDDEN_FILE_NAMES.contains(part)) {
            report.add("file-name", path, 1, format!("`{part}` fits any content; name the noun"));
        }
    }
}

/// Every type name of the engine has one definition, tests excepted. Two definitions in one file are the variants of a
/// type for different platforms.
pub(crate) fn type_names(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    const KEYWORDS: &[&str] = &["struct", "enum", "trait", "union", "type"];
    let mut defined: BTreeMap<&str, &str> = BTreeMap::new();
    for (file, source) in tree.engine() {
        for (at, _) in source.words().filter(|(at, word)| KEYWORDS.contains(word) && !source.is_test(*at)) {
            // Definitions are at the start of a line; associated types are indented.
            let line = &source.code[source.code[..at].rfind('\n').map_or(0, |end| end + 1)..at];
            let is_item = !line.starts_with(' ');
            let name = words_from(&source.code, at).nth(1).map_or("", |(_, name)| name);
            if is_item && *defined.entry(name).or_insert(file) != file {
                let what = format!("`{name}` is defined in {} too", defined[name]);
                report.add("type-name", &format!("{ENGINE}{file}"), source.line_of(at), what);
            }
        }
    }
}
