//! The lint test: reads all sources and documents of the repository and lists every violation of a rule.
//!
//! Modules, in reading order: `tree` (the files, read from disk or given by a test), `source` (splits a Rust file into
//! code, comments, strings and tests), `import_graph` (layers and imports), `import_rules`, `size_rules`, `name_rules`,
//! `line_rules`, `prose_rules`, `document_rules`, and `lint_tests`, which shows that every rule finds its violation.
//!
//! The crate is empty unless it is compiled as a test, and depends on nothing, so that it compiles in seconds.
//! `cargo test -p azekura-lint -- --nocapture` prints layers, sizes and imports.
#![cfg(test)]

mod document_rules;
mod import_graph;
mod import_rules;
mod line_rules;
mod lint_tests;
mod name_rules;
mod prose_rules;
mod size_rules;
mod source;
mod tree;

use std::fmt;
use std::path::Path;

use import_graph::ImportGraph;
use tree::{ENGINE, SourceTree};

/// One violation of one rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LintError {
    path: String,
    line: usize,
    rule: &'static str,
    what: String,
}

impl fmt::Display for LintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: [{}] {}", self.path, self.line, self.rule, self.what)
    }
}

/// Collects violations.
#[derive(Default)]
struct LintReport(Vec<LintError>);

impl LintReport {
    fn add(&mut self, rule: &'static str, path: &str, line: usize, what: impl Into<String>) {
        self.0.push(LintError { path: path.into(), line, rule, what: what.into() });
    }
}

type LintRule = fn(&SourceTree, &ImportGraph<'_>, &mut LintReport);

/// Every rule by the name that its violations carry.
const LINT_RULES: &[(&str, LintRule)] = &[
    ("layers", import_rules::layers),
    ("root-import", import_rules::root_imports),
    ("import-cycle", import_rules::cycles),
    ("subfolder-cycle", import_rules::subfolder_cycles),
    ("super", import_rules::super_paths),
    ("own-module", import_rules::own_mod_file),
    ("glob", import_rules::globs),
    ("import-unlisted", import_rules::unlisted_imports),
    ("import-stale", import_rules::stale_record_lines),
    ("module-doc", size_rules::mod_files),
    ("file-length", size_rules::file_lengths),
    ("function-length", size_rules::function_lengths),
    ("folder-size", size_rules::folder_sizes),
    ("file-name", name_rules::file_names),
    ("type-name", name_rules::type_names),
    ("line-width", size_rules::line_widths),
    ("person", prose_rules::persons),
    ("metaphor", prose_rules::metaphors),
    ("glossary", prose_rules::glossary),
    ("unsafe-location", line_rules::unsafe_locations),
    ("commented-out", line_rules::commented_out),
    ("marker", line_rules::markers),
    ("host-access", line_rules::host_access),
    ("absolute-path", line_rules::absolute_paths),
    ("format-included", document_rules::formats_included),
    ("include-exists", document_rules::includes_exist),
    ("link", document_rules::links),
    ("guide-link", document_rules::guide_links),
    ("hidden-line", document_rules::hidden_lines),
    ("path", document_rules::paths),
    ("example", document_rules::examples),
];

/// Rules whose violations are printed and do not fail: a size is a guide, and no file is split to meet it.
const WARNINGS: [&str; 3] = ["file-length", "function-length", "folder-size"];

fn run_lints(tree: &SourceTree) -> Vec<LintError> {
    let graph = ImportGraph::new(tree, ENGINE);
    let mut report = LintReport::default();
    for (_, rule) in LINT_RULES {
        rule(tree, &graph, &mut report);
    }
    report.0.sort();
    report.0.dedup();
    report.0
}

#[test]
fn sources_pass_all_lints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = SourceTree::read(&root);
    let graph = ImportGraph::new(&tree, ENGINE);
    println!("{graph}");
    let (warnings, errors): (Vec<_>, Vec<_>) =
        run_lints(&tree).into_iter().partition(|error| WARNINGS.contains(&error.rule));
    warnings.iter().for_each(|warning| println!("warning: {warning}"));
    let list: Vec<String> = errors.iter().map(ToString::to_string).collect();
    if errors.iter().any(|error| matches!(error.rule, "import-unlisted" | "import-stale")) {
        println!("The imports as found, for {}:\n\n{}", import_rules::RECORD, graph.import_list());
    }
    assert!(list.is_empty(), "{} violations:\n{}", list.len(), list.join("\n"));
}
