//! Rules about documents: each format is described once and included by code, and every link and path exists.

use std::collections::BTreeSet;

use super::LintReport;
use super::import_graph::ImportGraph;
use super::source::RustSource;
use super::tree::{SourceTree, resolve_relative};

/// The document that describes the layers and flows.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

const FORMAT_DOCS_DIR: &str = "crates/azekura/docs/format/";

/// The files that `include_str!` names, with the offset of the macro; `None` if the name is not a literal.
fn included_files(source: &RustSource) -> impl Iterator<Item = (usize, Option<&str>)> {
    let found = source.words().filter(|(at, word)| {
        matches!(*word, "include_str" | "include_bytes") && source.code[at + word.len()..].starts_with('!')
    });
    found.map(|(at, word)| (at, source.string_at(at + word.len() + 1)))
}

/// Each format document is included by the code that implements it.
pub(super) fn formats_included(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let mut included = BTreeSet::new();
    for (path, source) in &tree.sources {
        included.extend(included_files(source).filter_map(|(_, target)| resolve_relative(path, target?)));
    }
    for path in tree.documents.keys().filter(|path| path.starts_with(FORMAT_DOCS_DIR) && !included.contains(*path)) {
        report.add("format-included", path, 1, "no source includes it");
    }
}

pub(super) fn includes_exist(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
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
pub(super) fn links(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, text) in tree.documents.iter().filter(|(path, _)| path.ends_with(".md")) {
        for (line, target) in link_targets(text) {
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

/// Every source file that [`ARCHITECTURE`] names in backticks exists: below the engine's sources, or below the crate.
pub(super) fn paths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let Some(text) = tree.documents.get(ARCHITECTURE) else { return };
    for (line, content) in lines_outside_fences(text) {
        for path in content.split('`').skip(1).step_by(2).filter(|span| span.ends_with(".rs") && span.contains('/')) {
            if !["crates/azekura/src/", "crates/azekura/"].iter().any(|root| tree.exists(&format!("{root}{path}"))) {
                report.add("path", ARCHITECTURE, line, format!("`{path}` does not exist"));
            }
        }
    }
}

/// Targets of `[text](target)` outside of fences and code spans, with their lines.
fn link_targets(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (line, content) in lines_outside_fences(text) {
        for (at, _) in content.match_indices("](") {
            let in_code = content[..at].matches('`').count() % 2 == 1;
            let target = content[at + 2..].split([')', ' ']).next().unwrap_or_default();
            if !in_code {
                found.push((line, target));
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
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (!fenced && !fence).then_some((i + 1, line))
    })
}
