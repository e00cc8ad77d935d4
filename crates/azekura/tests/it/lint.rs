//! The laws of the house, as a test: reads the sources, prints the floor plan, and lists every offence.
//!
//! Rooms in reading order: `tree` (the files, from disk or planted), `source` (what is code, comment, string and test
//! in a Rust file), `plan` (floors and arrows), `rules_of_arrows`, `rules_of_shape`, `rules_of_words`,
//! `rules_of_papers`, and `planted`, where every rule is shown to go red.
//!
//! `cargo test -p azekura --test it tidy -- --nocapture` prints the plan.

mod document_rules;
mod import_graph;
mod import_rules;
mod line_rules;
mod lint_tests;
mod size_rules;
mod source;
mod tree;

use std::fmt;
use std::path::Path;

use import_graph::ImportGraph;
use tree::SourceTree;

/// One breach of one rule.
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

/// Collects offences.
#[derive(Default)]
struct LintReport(Vec<LintError>);

impl LintReport {
    fn add(&mut self, rule: &'static str, path: &str, line: usize, what: impl Into<String>) {
        self.0.push(LintError { path: path.into(), line, rule, what: what.into() });
    }
}

type LintRule = fn(&SourceTree, &ImportGraph<'_>, &mut LintReport);

/// Every rule by the name that its offences carry.
const LINT_RULES: &[(&str, LintRule)] = &[
    ("floors", import_rules::layers),
    ("root-import", import_rules::root_imports),
    ("circle", import_rules::cycles),
    ("super", import_rules::super_paths),
    ("own-door", import_rules::own_mod_file),
    ("glob", import_rules::globs),
    ("arrow-unlisted", import_rules::unlisted_imports),
    ("arrow-gone", import_rules::stale_record_lines),
    ("door-plate", size_rules::mod_files),
    ("file-length", size_rules::file_lengths),
    ("function-length", size_rules::function_lengths),
    ("folder-size", size_rules::folder_sizes),
    ("name", size_rules::file_names),
    ("line-width", size_rules::line_widths),
    ("unsafe-place", line_rules::unsafe_locations),
    ("safety-comment", line_rules::safety_comments),
    ("unfinished", line_rules::unfinished),
    ("commented-out", line_rules::commented_out),
    ("unwrap", line_rules::unwraps),
    ("marker", line_rules::markers),
    ("world", line_rules::host_access),
    ("absolute-path", line_rules::absolute_paths),
    ("format-included", document_rules::formats_included),
    ("include-exists", document_rules::includes_exist),
    ("link", document_rules::links),
];

fn run_lints(tree: &SourceTree) -> Vec<LintError> {
    let plan = ImportGraph::new(tree);
    let mut report = LintReport::default();
    for (_, rule) in LINT_RULES {
        rule(tree, &plan, &mut report);
    }
    report.0.sort();
    report.0.dedup();
    report.0
}

#[test]
fn sources_pass_all_lints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = SourceTree::read(&root);
    let plan = ImportGraph::new(&tree);
    println!("{plan}");
    let offences = run_lints(&tree);
    let list: Vec<String> = offences.iter().map(ToString::to_string).collect();
    if offences.iter().any(|o| o.rule.starts_with("arrow-")) {
        println!("The arrows as found, for {}:\n\n{}", import_rules::RECORD, plan.import_list());
    }
    assert!(list.is_empty(), "{} offences against the laws of the house:\n{}", list.len(), list.join("\n"));
}
