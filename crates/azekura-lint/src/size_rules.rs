//! Rules about sizes, and about `mod.rs` files.

use std::collections::BTreeMap;

use crate::LintReport;
use crate::import_graph::ImportGraph;
use crate::source::words_from;
use crate::tree::SourceTree;

const MOD_FILE_LINES_MAX: usize = 60;
const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;
const FOLDER_FILES_MAX: usize = 25;
const COLUMNS_MAX: usize = 120;

/// `mod.rs` documents the folder and names its modules; it defines nothing.
pub(crate) fn mod_files(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    const DEFINITIONS: &[&str] = &["fn", "struct", "enum", "trait", "impl", "union", "static", "macro_rules"];
    for (path, source) in tree.sources.iter().filter(|(path, _)| path.ends_with("/mod.rs")) {
        let lines = source.lines();
        if lines > MOD_FILE_LINES_MAX {
            report.add("module-doc", path, lines, format!("{lines} lines are more than {MOD_FILE_LINES_MAX}"));
        }
        if !source.text.starts_with("//!") {
            report.add("module-doc", path, 1, "does not begin with `//!`: document the folder");
        }
        let doc = source.comments.iter().filter(|(_, text)| text.starts_with("//!"));
        let doc: String = doc.map(|(_, text)| format!("{text}\n")).collect();
        for (at, module) in source.modules().filter(|(at, _)| !source.is_test(*at)) {
            if !words_from(&doc, 0).any(|(_, word)| word == module) {
                report.add("module-doc", path, source.line_of(at), format!("does not name the module `{module}`"));
            }
        }
        for (at, word) in source.words().filter(|(at, word)| DEFINITIONS.contains(word) && !source.is_test(*at)) {
            report.add("module-doc", path, source.line_of(at), format!("`{word}`: a `mod.rs` defines nothing"));
        }
    }
}

pub(crate) fn file_lengths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, source) in &tree.sources {
        let lines = source.lines_without_tests();
        if lines > FILE_LINES_MAX {
            let what = format!("{lines} lines without tests are more than {FILE_LINES_MAX}");
            report.add("file-length", path, lines, what);
        }
    }
}

pub(crate) fn function_lengths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, source) in &tree.sources {
        for function in source.functions() {
            let lines = function.last_line - function.first_line + 1;
            if lines > FUNCTION_LINES_MAX {
                let what = format!("fn {} has {lines} lines, more than {FUNCTION_LINES_MAX}", function.name);
                report.add("function-length", path, function.first_line, what);
            }
        }
    }
}

pub(crate) fn folder_sizes(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for path in tree.sources.keys() {
        *folders.entry(path.rsplit_once('/').map_or("", |(folder, _)| folder)).or_default() += 1;
    }
    for (folder, files) in folders.into_iter().filter(|(_, files)| *files > FOLDER_FILES_MAX) {
        report.add("folder-size", folder, 1, format!("{files} files are more than {FOLDER_FILES_MAX}"));
    }
}

pub(crate) fn line_widths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, source) in &tree.sources {
        for (i, line) in source.text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > COLUMNS_MAX {
                report.add("line-width", path, i + 1, format!("{columns} columns are more than {COLUMNS_MAX}"));
            }
        }
    }
}
