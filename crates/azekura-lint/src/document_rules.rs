//! Rules about documents: each format is described once and included by code, every link and path exists, the guide can
//! be read as a file and as documentation of the crate, and every public item has an example.

use std::collections::BTreeSet;

use crate::LintReport;
use crate::import_graph::ImportGraph;
use crate::source::{RustSource, matching_bracket, words_from};
use crate::tree::{ENGINE, SourceTree, resolve_relative};

/// The document that describes the layers and flows.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

const FORMAT_DOCS_DIR: &str = "crates/azekura/docs/format/";

/// The chapters of the user guide, and the file that includes them in the documentation of the crate.
const GUIDE_DIR: &str = "crates/azekura/docs/guide/";
const GUIDE_MODULE: &str = "crates/azekura/src/guide.rs";
/// Where items of the crate are documented.
const CRATE_DOCS: &str = "https://docs.rs/azekura/";

/// Files of the engine whose public items are for benchmarks and tests only.
const FILES_WITHOUT_EXAMPLES: &[&str] =
    &["inspect/data_blocks.rs", "testing/comparators.rs", "testing/script.rs", "testing/seeded_rng.rs"];
/// Traits of the interface to the operating system. One example at `Fs`, `Env`, `File` or `Thread` shows all methods.
const TRAITS_WITHOUT_METHOD_EXAMPLES: &[&str] = &["Env", "File", "Fs", "Mapping", "MappedMemory", "Thread"];
/// Types that a program does not use by itself, a type for tests, and the type that contains the README.
const TYPES_WITHOUT_EXAMPLES: &[&str] = &["FileLock", "MappedMemory", "Mapping", "PlantedBug", "Readme"];

/// The files that `include_str!` names, with the offset of the macro; `None` if the name is not a literal.
fn included_files(source: &RustSource) -> impl Iterator<Item = (usize, Option<&str>)> {
    let found = source.words().filter(|(at, word)| {
        matches!(*word, "include_str" | "include_bytes") && source.code[at + word.len()..].starts_with('!')
    });
    found.map(|(at, word)| (at, source.string_at(at + word.len() + 1)))
}

/// Each format document is included by the code that implements it.
pub(crate) fn formats_included(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let mut included = BTreeSet::new();
    for (path, source) in &tree.sources {
        included.extend(included_files(source).filter_map(|(_, target)| resolve_relative(path, target?)));
    }
    for path in tree.documents.keys().filter(|path| path.starts_with(FORMAT_DOCS_DIR) && !included.contains(*path)) {
        report.add("format-included", path, 1, "no source includes it");
    }
}

pub(crate) fn includes_exist(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, source) in &tree.sources {
        for (at, target) in included_files(source) {
            let exists =
                target.is_some_and(|target| resolve_relative(path, target).is_some_and(|file| tree.exists(&file)));
            if !exists {
                let what =
                    format!("includes `{}`, which does not exist", target.unwrap_or("a name that is not a literal"));
                report.add("include-exists", path, source.line_of(at), what);
            }
        }
    }
}

/// Links from one document to a file, or to a heading of a document.
pub(crate) fn links(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, text) in markdown(tree) {
        for Link { line, target, .. } in links_in(text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { Some(path.clone()) } else { resolve_relative(path, file) };
            let Some(file) = file.filter(|file| tree.exists(file)) else {
                report.add("link", path, line, format!("`{target}` leads nowhere"));
                continue;
            };
            let headings = tree.documents.get(&file).map(|text| headings(text)).unwrap_or_default();
            if !heading.is_empty() && !headings.contains(heading) {
                report.add("link", path, line, format!("`{target}`: {file} has no such heading"));
            }
        }
    }
}

/// A link of the guide to another chapter or to an item has a definition in the file, for its readers, and one of the
/// same label in [`GUIDE_MODULE`], which rustdoc checks.
pub(crate) fn guide_links(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let module = tree.sources.get(GUIDE_MODULE).map_or("", |source| &source.text);
    for (path, text) in markdown(tree).filter(|(path, _)| path.starts_with(GUIDE_DIR)) {
        for Link { line, label, target } in links_in(text) {
            let is_local = !target.contains("://") || target.starts_with(CRATE_DOCS);
            let is_defined = label.is_some_and(|label| module.contains(&format!("/// [{label}]: crate::")));
            if is_local && !target.starts_with('#') && !is_defined {
                report.add("guide-link", path, line, format!("`{target}` has no label that {GUIDE_MODULE} defines"));
            }
        }
    }
}

/// The web page of the repository shows all lines of a program.
pub(crate) fn hidden_lines(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, text) in markdown(tree) {
        for (line, content, language) in lines_with_language(text) {
            if language == Some("rust") && (content == "#" || content.starts_with("# ")) {
                report.add("hidden-line", path, line, "only rustdoc hides this line");
            }
        }
    }
}

fn markdown(tree: &SourceTree) -> impl Iterator<Item = (&String, &String)> {
    tree.documents.iter().filter(|(path, _)| path.ends_with(".md"))
}

/// Every source file that [`ARCHITECTURE`] names in backticks exists: below the engine's sources, or below the crate.
pub(crate) fn paths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let Some(text) = tree.documents.get(ARCHITECTURE) else { return };
    for (line, content) in lines_outside_fences(text) {
        for path in content.split('`').skip(1).step_by(2).filter(|span| span.ends_with(".rs") && span.contains('/')) {
            if !["crates/azekura/src/", "crates/azekura/"].iter().any(|root| tree.exists(&format!("{root}{path}"))) {
                report.add("path", ARCHITECTURE, line, format!("`{path}` does not exist"));
            }
        }
    }
}

/// Every public function, method and type of the engine has an example in its documentation, which asserts a result.
/// The compiler refuses `pub` for items that the crate does not export.
pub(crate) fn examples(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, source) in tree.engine().filter(|(file, _)| !FILES_WITHOUT_EXAMPLES.contains(file)) {
        for (at, name) in public_items(source) {
            let line = source.line_of(at);
            let doc = doc_above(source, line);
            let has_example = doc.contains("```") && doc.contains("assert");
            if !source.is_test(at) && !has_example && !doc.contains("#[doc(hidden)]") {
                report.add("example", &format!("{ENGINE}{file}"), line, format!("`{name}` has no example"));
            }
        }
    }
}

/// Public functions, types, and methods of public traits: the offset of their first keyword, and their names.
fn public_items(source: &RustSource) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (at, _) in source.words().filter(|(_, word)| *word == "pub") {
        let mut words =
            words_from(&source.code, at).skip(1).skip_while(|(_, word)| matches!(*word, "const" | "unsafe"));
        let (Some((_, keyword)), Some((name_at, name))) = (words.next(), words.next()) else { continue };
        let exempt = match keyword {
            "fn" => false,
            "struct" | "enum" | "trait" => TYPES_WITHOUT_EXAMPLES.contains(&name),
            _ => continue,
        };
        // `pub struct $name` in a macro: the documentation is at the calls of the macro.
        if !exempt && !source.code[..name_at].ends_with('$') {
            found.push((at, name));
        }
        if keyword == "trait" && !TRAITS_WITHOUT_METHOD_EXAMPLES.contains(&name) {
            found.extend(methods(&source.code, name_at));
        }
    }
    found
}

/// The methods of the trait whose name is at `name_at`.
fn methods(code: &str, name_at: usize) -> Vec<(usize, &str)> {
    let open = name_at + code[name_at..].find('{').unwrap_or(0);
    let end = matching_bracket(code, open);
    let is_method = |at: usize| {
        let inside = &code[open + 1..at];
        inside.matches('{').count() == inside.matches('}').count()
    };
    let words = words_from(code, open).take_while(|(at, _)| *at < end);
    let keywords = words.filter(|(at, word)| *word == "fn" && is_method(*at));
    keywords.filter_map(|(at, _)| Some((at, words_from(code, at).nth(1)?.1))).collect()
}

/// The comments and attributes directly above a line.
fn doc_above(source: &RustSource, line: usize) -> String {
    let lines: Vec<&str> = source.text.lines().take(line - 1).collect();
    let is_doc = |text: &&&str| ["///", "#["].iter().any(|start| text.trim_start().starts_with(start));
    lines.iter().rev().take_while(is_doc).map(|text| format!("{text}\n")).collect()
}

/// `[text](target)`, or a definition `[label]: target`.
struct Link<'a> {
    line: usize,
    label: Option<&'a str>,
    target: &'a str,
}

/// Links and definitions outside of fences and code spans.
fn links_in(text: &str) -> Vec<Link<'_>> {
    let mut found = Vec::new();
    for (line, content) in lines_outside_fences(text) {
        if let Some((label, target)) = content.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            found.push(Link { line, label: Some(label), target });
        }
        for (at, _) in content.match_indices("](") {
            let in_code = content[..at].matches('`').count() % 2 == 1;
            let target = content[at + 2..].split([')', ' ']).next().unwrap_or_default();
            if !in_code {
                found.push(Link { line, label: None, target });
            }
        }
    }
    found
}

/// Headings in the form that links use.
fn headings(text: &str) -> BTreeSet<String> {
    let titles = lines_outside_fences(text)
        .filter_map(|(_, line)| line.strip_prefix('#'))
        .map(|rest| rest.trim_start_matches('#').trim());
    let slug = |title: &str| {
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    titles.map(slug).collect()
}

/// Lines outside of fences, counted from 1.
fn lines_outside_fences(text: &str) -> impl Iterator<Item = (usize, &str)> {
    lines_with_language(text).filter(|(.., language)| language.is_none()).map(|(line, content, _)| (line, content))
}

/// Lines without those of the fences, counted from 1, with the language of the fences around them.
fn lines_with_language(text: &str) -> impl Iterator<Item = (usize, &str, Option<&str>)> {
    let mut language = None;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let Some(info) = line.trim_start().strip_prefix("```") else { return Some((i + 1, line, language)) };
        language = if language.is_none() { Some(info.trim()) } else { None };
        None
    })
}
