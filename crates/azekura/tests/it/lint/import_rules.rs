//! Rules about who may import whom.

use std::collections::{BTreeMap, BTreeSet};

use super::LintReport;
use super::import_graph::{Import, ImportGraph, ROOT, folder_of, layer_of};
use super::tree::{ENGINE, SourceTree};

/// The decision record whose fenced block lists every arrow between folders.
pub(super) const RECORD: &str = "docs/decisions/0002-arrows-between-folders.md";

fn report_import(report: &mut LintReport, rule: &'static str, arrow: &Import, what: String) {
    report.add(rule, &format!("{ENGINE}{}", arrow.from), arrow.line, what);
}

/// Imports go down: never up, never sideways to another folder of the same floor, tests included.
pub(super) fn layers(tree: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, _) in tree.engine() {
        if layer_of(folder_of(file)).is_none() {
            report.add("floors", &format!("{ENGINE}{file}"), 1, format!("`{}` stands on no floor", folder_of(file)));
        }
    }
    for arrow in plan.imports.iter().filter(|a| a.to != ROOT) {
        let (from, to) = (folder_of(&arrow.from), folder_of(&arrow.to));
        let (Some(high), Some(low)) = (layer_of(from), layer_of(to)) else { continue };
        if from != to && high <= low {
            let way = if high == low { "sideways" } else { "upward" };
            let what = format!("{way}: {from} (floor {high}) imports crate::{} (floor {low})", arrow.path);
            report_import(report, "floors", arrow, what);
        }
    }
}

/// `lib.rs` is only a way out.
pub(super) fn root_imports(_: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    for arrow in plan.imports.iter().filter(|a| a.to == ROOT && a.from != ROOT) {
        report_import(
            report,
            "root-import",
            arrow,
            format!("crate::{} is an item of lib.rs; name its file", arrow.path),
        );
    }
}

/// Files never import each other in a circle, inside a folder either.
pub(super) fn cycles(tree: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for arrow in plan.imports.iter().filter(|a| !a.test && a.from != ROOT && a.to != ROOT) {
        next.entry(&arrow.from).or_default().insert(&arrow.to);
    }
    let reach = |from: &str| {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut open: Vec<&str> = next.get(from).into_iter().flatten().copied().collect();
        while let Some(file) = open.pop() {
            if seen.insert(file) {
                open.extend(next.get(file).into_iter().flatten());
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = tree.engine().map(|(file, _)| (file, reach(file))).collect();
    for (file, seen) in reached.iter().filter(|(file, seen)| seen.contains(*file)) {
        let circle: Vec<&str> = seen.iter().filter(|other| reached[*other].contains(file)).copied().collect();
        for arrow in plan.imports.iter().filter(|a| !a.test && a.from == *file && circle.contains(&a.to.as_str())) {
            let what = format!("crate::{} closes a circle of {}", arrow.path, circle.join(", "));
            report_import(report, "circle", arrow, what);
        }
    }
}

/// Neighbours are named by their file.
pub(super) fn super_paths(tree: &SourceTree, _: &ImportGraph<'_>, report: &mut LintReport) {
    for (file, source) in tree.engine() {
        for (at, word) in source.words().filter(|(_, word)| *word == "super") {
            if source.code[at + word.len()..].starts_with("::") && !source.is_test(at) {
                let what = "`super::` hides which file is meant";
                report.add("super", &format!("{ENGINE}{file}"), source.line_of(at), what);
            }
        }
    }
}

/// A door plate is for other folders; those who live behind it do not import it.
pub(super) fn own_mod_file(_: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    for arrow in plan.imports.iter().filter(|a| !a.test && !a.glob) {
        if arrow.to.strip_suffix("mod.rs").is_some_and(|folder| arrow.from.starts_with(folder)) {
            report_import(report, "own-door", arrow, format!("crate::{} imports the folder it stands in", arrow.path));
        }
    }
}

/// A glob of a module hides what is used; a glob of an enum does not.
pub(super) fn globs(_: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    for arrow in plan.imports.iter().filter(|a| !a.test && a.glob && a.from != ROOT) {
        let last = arrow.path.rsplit("::").next().unwrap_or_default();
        if !last.starts_with(char::is_uppercase) {
            report_import(report, "glob", arrow, format!("crate::{}::* hides what is used", arrow.path));
        }
    }
}

/// A new arrow between folders needs a line in the decision record.
pub(super) fn unlisted_imports(tree: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    let listed = recorded_imports(tree);
    let mut seen = BTreeSet::new();
    for arrow in plan.imports.iter().filter(|a| !a.test) {
        let (from, to) = (folder_of(&arrow.from), folder_of(&arrow.to));
        let inside = from == to || from == "lib" || to == "lib";
        if !inside && !listed.contains_key(&(from.into(), to.into())) && seen.insert((from, to)) {
            report_import(report, "arrow-unlisted", arrow, format!("{from} -> {to} is not listed in {RECORD}"));
        }
    }
}

/// An arrow that is gone leaves the record too. Folders that do not exist yet may have their arrows announced.
pub(super) fn stale_record_lines(tree: &SourceTree, plan: &ImportGraph<'_>, report: &mut LintReport) {
    let found = plan.folder_imports();
    let exists = |folder: &str| tree.engine().any(|(file, _)| folder_of(file) == folder);
    for ((from, to), line) in recorded_imports(tree) {
        let walked = found.get(from.as_str()).is_some_and(|to_set| to_set.contains(to.as_str()));
        if !walked && exists(&from) && exists(&to) {
            report.add("arrow-gone", RECORD, line, format!("{from} -> {to} is listed, but no file goes that way"));
        }
    }
}

/// Arrows of the record with the line they stand on: `from -> to, to, to` inside a fence.
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
