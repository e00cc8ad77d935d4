//! Rules about single lines of code and comments.

use crate::LintReport;
use crate::import_graph::ImportGraph;
use crate::source::{RustSource, words_from};
use crate::tree::{ENGINE, SourceTree};

/// Files of the bench with unsafe code: calls of C libraries of two peers, and a baseline that flushes cache lines.
const UNSAFE_PEER_PATHS: &[&str] = &[
    "crates/azekura-bench/src/engine/rocksdb.rs",
    "crates/azekura-bench/src/engine/heed.rs",
    "crates/azekura-bench/src/experiment/leaf_pool.rs",
    "crates/azekura-cli/src/command/transfer/peer/c_library.rs",
    "crates/azekura-cli/src/command/transfer/peer/lmdb_source.rs",
    "crates/azekura-cli/tests/cli/peers/lmdb.rs",
];

/// Unsafe code is confined to a few files.
fn may_be_unsafe(path: &str) -> bool {
    if UNSAFE_PEER_PATHS.iter().any(|place| path.starts_with(place)) {
        return true;
    }
    let engine = path.strip_prefix(ENGINE);
    engine.is_some_and(|file| file == "vfs/mmap.rs" || file.starts_with("vfs/mmap/") || file.starts_with("mem/"))
}

pub(crate) fn unsafe_locations(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (path, source) in tree.sources.iter().filter(|(path, _)| !may_be_unsafe(path)) {
        let forbids = |at: usize| source.code[..at].ends_with("deny(") || source.code[..at].ends_with("forbid(");
        let offends = |at, word| word == "unsafe" || (word == "unsafe_code" && !forbids(at));
        for (at, word) in source.words().filter(|(at, word)| offends(*at, *word)) {
            let what = format!("`{word}` outside of vfs/mmap.rs, mem/ and the peers in C");
            report.add("unsafe-location", path, source.line_of(at), what);
        }
    }
}

/// Old code is in the history of Git, not in comments.
pub(crate) fn commented_out(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    const STARTS: &[&str] = &[
        "let ", "fn ", "pub ", "pub(", "use ", "mod ", "impl ", "struct ", "enum ", "if ", "for ", "while ", "match ",
        "return ", "self.", "assert", "#[", "} else", "}",
    ];
    for (path, source) in &tree.sources {
        for (at, comment) in &source.comments {
            let Some(text) = comment.strip_prefix("//").filter(|text| !text.starts_with(['/', '!'])) else { continue };
            let text = text.trim();
            let is_code = STARTS.iter().any(|start| text.starts_with(start)) && text.ends_with([';', '{', '}', ']']);
            if is_code {
                report.add("commented-out", path, source.line_of(*at), format!("`{text}` looks like code"));
            }
        }
    }
}

/// Open work belongs in an issue.
pub(crate) fn markers(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    const MARKERS: &[&str] = &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    for (path, source) in &tree.sources {
        for (at, comment) in &source.comments {
            for (i, line) in comment.lines().enumerate() {
                let bare = line.trim_matches(|c: char| !c.is_alphanumeric());
                let marked = words_from(line, 0).any(|(_, word)| MARKERS.contains(&word));
                if marked || bare.eq_ignore_ascii_case(MARKERS[0]) {
                    let what = format!("`{}` belongs in an issue", line.trim());
                    report.add("marker", path, source.line_of(*at) + i, what);
                }
            }
        }
    }
}

/// The engine uses the operating system through `vfs` only, and prints nothing. `clippy.toml` bans the functions of
/// std; this rule bans the rest.
pub(crate) fn host_access(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, source) in tree.engine().filter(|(file, _)| !file.starts_with("vfs/")) {
        let banned = |code: &RustSource, at: usize, word: &str| match word {
            // `mem` may ask for huge pages.
            "rustix" => !(file.starts_with("mem/") && code.code[at..].starts_with("rustix::mm")),
            "libc" | "tempfile" | "rand" | "getrandom" => code.code[at + word.len()..].starts_with("::"),
            "print" | "println" | "eprint" | "eprintln" => {
                code.code[at + word.len()..].starts_with('!') && !code.is_test(at)
            }
            _ => false,
        };
        for (at, word) in source.words().filter(|(at, word)| banned(source, *at, word)) {
            let what = format!("`{word}` outside of vfs/");
            report.add("host-access", &format!("{ENGINE}{file}"), source.line_of(at), what);
        }
    }
}

/// No text names a path of a developer's machine.
pub(crate) fn absolute_paths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    const PLACES: &[&str] = &[concat!("/ho", "me/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
    let sources = tree.sources.iter().map(|(path, source)| (path, source.text.as_str()));
    let papers = tree.documents.iter().map(|(path, text)| (path, text.as_str()));
    for (path, text) in sources.chain(papers) {
        for (i, line) in text.lines().enumerate() {
            for place in PLACES {
                let at_start = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-/}".contains(c));
                if line.match_indices(place).any(|(at, _)| at_start(at)) {
                    report.add("absolute-path", path, i + 1, format!("names `{place}`"));
                }
            }
        }
    }
}
