//! Rules about the words of comments and documents.

use crate::LintReport;
use crate::import_graph::ImportGraph;
use crate::source::words_from;
use crate::tree::SourceTree;

/// The glossary lists words that are not used.
const GLOSSARY: &str = "docs/glossary.md";

const PERSONS: &[&str] = &["who", "whoever", "whom", "nobody", "somebody", "no one", "anybody"];

const METAPHORS: &[&str] = &[
    "house",
    "houses",
    "door",
    "doors",
    "wing",
    "wings",
    "graveyard",
    "doom",
    "doomed",
    "buried",
    "shelf",
    "shelves",
    "company",
    "so many",
    "so long as",
];

/// A sentence names its actor: a thread, a file, the caller.
pub(crate) fn persons(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, line, text) in prose(tree) {
        for word in PERSONS.iter().filter(|word| contains_words(text, word)) {
            report.add("person", path, line, format!("`{word}`: name the thread, the object or the caller"));
        }
    }
}

/// A sentence uses the terms of the field.
pub(crate) fn metaphors(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, line, text) in prose(tree) {
        for word in METAPHORS.iter().filter(|word| contains_words(text, word)) {
            report.add("metaphor", path, line, format!("`{word}`: use the term of the field"));
        }
    }
}

/// The guide for users of other stores.
const MIGRATING: &str = "crates/azekura/docs/guide/migrating.md";

/// A concept has one word: those in the last column of the glossary are not used. The bench, the importers and
/// the guide about migrating speak of other stores in their words, and the changelog names what was renamed.
pub(crate) fn glossary(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    let forbidden = tree.documents.get(GLOSSARY).map_or_else(Vec::new, |text| words_not_used(text));
    let exempt = ["CHANGELOG.md", MIGRATING];
    let other_stores = ["crates/azekura-bench/", "crates/azekura-cli/src/command/transfer/peer/"];
    let is_exempt = |path: &str| other_stores.iter().any(|at| path.starts_with(at)) || exempt.contains(&path);
    for (path, line, text) in prose(tree).filter(|(path, ..)| !is_exempt(path)) {
        for word in forbidden.iter().filter(|word| contains_words(text, word)) {
            report.add("glossary", path, line, format!("`{word}`: use the word of {GLOSSARY}"));
        }
    }
}

/// The words in the last column of the table of the glossary.
fn words_not_used(glossary: &str) -> Vec<&str> {
    let rows = glossary.lines().filter(|line| line.starts_with('|')).skip(2);
    let columns = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    columns.flat_map(|words| words.split(',')).map(str::trim).filter(|word| !word.is_empty()).collect()
}

/// The lines of comments and of Markdown documents, with path and line number.
fn prose(tree: &SourceTree) -> impl Iterator<Item = (&str, usize, &str)> {
    let documents = tree.documents.iter().filter(|(path, _)| path.ends_with(".md"));
    documents
        .flat_map(|(path, text)| text.lines().enumerate().map(move |(i, line)| (path.as_str(), i + 1, line)))
        .chain(comment_lines(tree))
        .filter(|(path, ..)| *path != GLOSSARY)
}

fn comment_lines(tree: &SourceTree) -> impl Iterator<Item = (&str, usize, &str)> {
    tree.sources.iter().flat_map(|(path, source)| {
        source.comments.iter().flat_map(move |(at, comment)| {
            let first = source.line_of(*at);
            comment.lines().enumerate().map(move |(i, line)| (path.as_str(), first + i, line))
        })
    })
}

/// Whether `text` contains the words of `wanted` in a row, in any case.
fn contains_words(text: &str, wanted: &str) -> bool {
    let words: Vec<&str> = words_from(text, 0).map(|(_, word)| word).collect();
    let wanted: Vec<&str> = wanted.split(' ').collect();
    words.windows(wanted.len()).any(|row| row.iter().zip(&wanted).all(|(a, b)| a.eq_ignore_ascii_case(b)))
}
