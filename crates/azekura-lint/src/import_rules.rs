//! Rules about imports between files and folders.

use std::collections::{BTreeMap, BTreeSet};

use crate::LintReport;
use crate::import_graph::{Import, ImportGraph, ROOT, folder_of, layer_of};
use crate::tree::{ENGINE, SourceTree};

/// The decision record whose fenced block lists every import between folders.
pub(crate) const RECORD: &str = "docs/decisions/0002-imports-between-folders.md";

/// Crates beside the engine.
const OTHER_CRATES: &[&str] =
    &["crates/azekura-cli/src/", "crates/azekura-bench/src/", "crates/azekura-raft/src/", "crates/azekura-backup/src/"];

/// The rule about cycles between files.
const FILE_CYCLE: &str = "import-cycle";

/// The folder of simulated file systems and environments, compiled for tests and with the feature of this name.
const TESTING: &str = "testing";

/// The crate root of a program.
const MAIN: &str = "main.rs";

fn report_import(report: &mut LintReport, rule: &'static str, import: &Import, what: String) {
    report.add(rule, &format!("{ENGINE}{}", import.from), import.line, what);
}

/// A folder imports from lower layers only, not from another folder of its own layer; also in tests. Tests of every
/// layer may import from [`TESTING`].
pub(crate) fn layers(tree: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, _) in tree.engine() {
        if layer_of(folder_of(file)).is_none() {
            report.add("layers", &format!("{ENGINE}{file}"), 1, format!("`{}` belongs to no layer", folder_of(file)));
        }
    }
    for import in graph.imports.iter().filter(|i| i.to != ROOT) {
        let (from, to) = (folder_of(&import.from), folder_of(&import.to));
        if import.test && to == TESTING {
            continue;
        }
        let (Some(high), Some(low)) = (layer_of(from), layer_of(to)) else { continue };
        if from != to && high <= low {
            let way = if high == low { "sideways" } else { "upward" };
            let what = format!("{way}: {from} (layer {high}) imports crate::{} (layer {low})", import.path);
            report_import(report, "layers", import, what);
        }
    }
}

/// No file imports from `lib.rs`, which only re-exports.
pub(crate) fn root_imports(_: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    for import in graph.imports.iter().filter(|i| i.to == ROOT && i.from != ROOT) {
        report_import(
            report,
            "root-import",
            import,
            format!("crate::{} is an item of lib.rs; name its file", import.path),
        );
    }
}

/// No cycle of imports between files, in the engine, the CLI and the bench.
pub(crate) fn cycles(tree: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    report_cycles(graph, FILE_CYCLE, report, |file, _| file.to_string());
    for src in OTHER_CRATES {
        report_cycles(&ImportGraph::new(tree, src), FILE_CYCLE, report, |file, _| file.to_string());
    }
}

/// No cycle of imports between the subfolders of a folder, so that they have an order.
pub(crate) fn subfolder_cycles(tree: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    let subfolder = |file: &str, other: &str| {
        let shared = file.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        let start = file[..shared].rfind('/').map_or(0, |slash| slash + 1);
        let len = file[start..].find('/').unwrap_or(file.len() - start);
        file[..start + len].to_string()
    };
    report_cycles(graph, "subfolder-cycle", report, subfolder);
    for src in OTHER_CRATES {
        report_cycles(&ImportGraph::new(tree, src), "subfolder-cycle", report, subfolder);
    }
}

/// Reports every import that is part of a cycle. `node_of` gives the node that the first of two files belongs to.
fn report_cycles(
    graph: &ImportGraph<'_>,
    rule: &'static str,
    report: &mut LintReport,
    node_of: impl Fn(&str, &str) -> String,
) {
    let is_counted = |i: &&Import| !i.test && i.from != ROOT && i.to != ROOT && i.from != MAIN;
    let imports: Vec<(String, String, &Import)> = (graph.imports.iter().filter(is_counted))
        .map(|i| (node_of(&i.from, &i.to), node_of(&i.to, &i.from), i))
        .filter(|(from, to, _)| from != to)
        .collect();
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (from, to, _) in &imports {
        next.entry(from).or_default().insert(to);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> = next.keys().map(|node| (*node, reachable(&next, node))).collect();
    for (from, to, import) in &imports {
        let is_file_cycle = from.ends_with(".rs") && to.ends_with(".rs");
        let goes_back = reached.get(to.as_str()).is_some_and(|nodes| nodes.contains(from.as_str()));
        if goes_back && is_file_cycle == (rule == FILE_CYCLE) {
            let in_cycle = |node: &&&str| reached.get(**node).is_some_and(|nodes| nodes.contains(from.as_str()));
            let cycle: Vec<&str> = reached[from.as_str()].iter().filter(in_cycle).copied().collect();
            let what = format!("crate::{} closes a cycle of {}", import.path, cycle.join(", "));
            report.add(rule, &format!("{}{}", graph.src, import.from), import.line, what);
        }
    }
}

fn reachable<'a>(next: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &str) -> BTreeSet<&'a str> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut open: Vec<&str> = next.get(from).into_iter().flatten().copied().collect();
    while let Some(node) = open.pop() {
        if seen.insert(node) {
            open.extend(next.get(node).into_iter().flatten());
        }
    }
    seen
}

/// Other files are named by their path from the crate root.
pub(crate) fn super_paths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, source) in tree.engine() {
        for (at, word) in source.words().filter(|(_, word)| *word == "super") {
            if source.code[at + word.len()..].starts_with("::") && !source.is_test(at) {
                let what = "`super::` hides which file is meant";
                report.add("super", &format!("{ENGINE}{file}"), source.line_of(at), what);
            }
        }
    }
}

/// The re-exports of a `mod.rs` are for other folders; the files of its own folder do not use them.
pub(crate) fn own_mod_file(_: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    for import in graph.imports.iter().filter(|i| !i.test && !i.glob) {
        if import.to.strip_suffix("mod.rs").is_some_and(|folder| import.from.starts_with(folder)) {
            report_import(
                report,
                "own-module",
                import,
                format!("crate::{} imports the folder that contains the file", import.path),
            );
        }
    }
}

/// A glob of a module hides which items are used; a glob of an enum does not.
pub(crate) fn globs(_: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    for import in graph.imports.iter().filter(|i| !i.test && i.glob && i.from != ROOT) {
        let last = import.path.rsplit("::").next().unwrap_or_default();
        if !last.starts_with(char::is_uppercase) {
            report_import(report, "glob", import, format!("crate::{}::* hides what is used", import.path));
        }
    }
}

/// A new import between folders needs a line in the decision record.
pub(crate) fn unlisted_imports(tree: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    let listed = recorded_imports(tree);
    let mut seen = BTreeSet::new();
    for import in graph.imports.iter().filter(|i| !i.test) {
        let (from, to) = (folder_of(&import.from), folder_of(&import.to));
        let inside = from == to || from == "lib" || to == "lib";
        if !inside && !listed.contains_key(&(from.into(), to.into())) && seen.insert((from, to)) {
            report_import(report, "import-unlisted", import, format!("{from} -> {to} is not listed in {RECORD}"));
        }
    }
}

/// The record lists no import that does not exist. Imports of folders that do not exist yet may be listed.
pub(crate) fn stale_record_lines(tree: &SourceTree, graph: &ImportGraph<'_>, report: &mut LintReport) {
    let found = graph.folder_imports();
    let exists = |folder: &str| tree.engine().any(|(file, _)| folder_of(file) == folder);
    for ((from, to), line) in recorded_imports(tree) {
        let walked = found.get(from.as_str()).is_some_and(|to_set| to_set.contains(to.as_str()));
        if !walked && exists(&from) && exists(&to) {
            report.add(
                "import-stale",
                RECORD,
                line,
                format!("{from} -> {to} is listed, but no file has such an import"),
            );
        }
    }
}

/// The imports of the record with their line: `from -> to, to, to` inside a fence.
fn recorded_imports(tree: &SourceTree) -> BTreeMap<(String, String), usize> {
    let mut found = BTreeMap::new();
    let mut fenced = false;
    for (i, line) in tree.documents.get(RECORD).map_or("", String::as_str).lines().enumerate() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if let Some((from, to)) = line.split_once("->").filter(|_| fenced) {
            for to in to.split(',') {
                found.insert((from.trim().to_string(), to.trim().to_string()), i + 1);
            }
        }
    }
    found
}
