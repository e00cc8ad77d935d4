//! The laws of the house, as a test: reads the sources, prints the floor plan, and lists every offence.
//!
//! Rooms in reading order: `tree` (the files, from disk or planted), `source` (what is code, comment, string and test
//! in a Rust file), `plan` (floors and arrows), `rules_of_arrows`, `rules_of_shape`, `rules_of_words`,
//! `rules_of_papers`, and `planted`, where every rule is shown to go red.
//!
//! `cargo test -p azekura --test it tidy -- --nocapture` prints the plan.

mod plan;
mod planted;
mod rules_of_arrows;
mod rules_of_papers;
mod rules_of_shape;
mod rules_of_words;
mod source;
mod tree;

use std::fmt;
use std::path::Path;

use plan::Plan;
use tree::Tree;

/// One breach of one rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Offence {
    path: String,
    line: usize,
    rule: &'static str,
    what: String,
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: [{}] {}", self.path, self.line, self.rule, self.what)
    }
}

/// Collects offences.
#[derive(Default)]
struct Report(Vec<Offence>);

impl Report {
    fn add(&mut self, rule: &'static str, path: &str, line: usize, what: impl Into<String>) {
        self.0.push(Offence { path: path.into(), line, rule, what: what.into() });
    }
}

type Rule = fn(&Tree, &Plan<'_>, &mut Report);

/// Every rule by the name that its offences carry.
const RULES: &[(&str, Rule)] = &[
    ("floors", rules_of_arrows::floors),
    ("root-import", rules_of_arrows::root_imports),
    ("circle", rules_of_arrows::circles),
    ("super", rules_of_arrows::super_paths),
    ("own-door", rules_of_arrows::own_door),
    ("glob", rules_of_arrows::globs),
    ("arrow-unlisted", rules_of_arrows::unlisted_arrows),
    ("arrow-gone", rules_of_arrows::gone_arrows),
    ("door-plate", rules_of_shape::door_plates),
    ("file-length", rules_of_shape::file_lengths),
    ("function-length", rules_of_shape::function_lengths),
    ("folder-size", rules_of_shape::folder_sizes),
    ("name", rules_of_shape::names),
    ("line-width", rules_of_shape::line_widths),
    ("unsafe-place", rules_of_words::unsafe_places),
    ("safety-comment", rules_of_words::safety_comments),
    ("unfinished", rules_of_words::unfinished),
    ("commented-out", rules_of_words::commented_out),
    ("unwrap", rules_of_words::unwraps),
    ("marker", rules_of_words::markers),
    ("world", rules_of_words::world),
    ("absolute-path", rules_of_words::absolute_paths),
    ("format-included", rules_of_papers::formats_included),
    ("include-exists", rules_of_papers::includes_exist),
    ("link", rules_of_papers::links),
];

fn judge(tree: &Tree) -> Vec<Offence> {
    let plan = Plan::new(tree);
    let mut report = Report::default();
    for (_, rule) in RULES {
        rule(tree, &plan, &mut report);
    }
    report.0.sort();
    report.0.dedup();
    report.0
}

#[test]
fn the_house_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = Tree::read(&root);
    let plan = Plan::new(&tree);
    println!("{plan}");
    let offences = judge(&tree);
    let list: Vec<String> = offences.iter().map(ToString::to_string).collect();
    if offences.iter().any(|o| o.rule.starts_with("arrow-")) {
        println!("The arrows as found, for {}:\n\n{}", rules_of_arrows::RECORD, plan.arrow_list());
    }
    assert!(list.is_empty(), "{} offences against the laws of the house:\n{}", list.len(), list.join("\n"));
}
