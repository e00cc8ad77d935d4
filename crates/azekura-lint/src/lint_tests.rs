//! Tests of the rules on a small tree: each rule finds the violations planted there and accepts similar valid text.

use std::collections::BTreeSet;

use crate::import_rules::RECORD;
use crate::tree::{ENGINE, SourceTree};
use crate::{LINT_RULES, run_lints};

/// A small tree without violations.
fn valid_tree() -> Vec<(String, String)> {
    let files: &[(&str, &str)] = &[
        ("README.md", "# A\n\n## The `keys`, sorted\n\n[a](docs/glossary.md) [b](#the-keys-sorted)\n"),
        (
            "docs/glossary.md",
            "# Words\n\n| word | meaning | not |\n|---|---|---|\n| layer | a layer | floor, top floor |\n",
        ),
        (RECORD, "# Imports\n\n```text\ntable -> block, base\nblock -> base\n```\n"),
        ("crates/azekura/docs/format/block.md", "# Block\n"),
        (
            "crates/azekura/docs/guide/a.md",
            "See [`Error`] and [b].\n\n[`Error`]: https://docs.rs/azekura/E\n[b]: b.md\n",
        ),
        ("crates/azekura/docs/guide/b.md", "# B\n\n[top](#b)\n\n```rust\n#[derive(Debug)]\n```\n\n```sh\n# c\n```\n"),
        ("crates/azekura/src/guide.rs", "/// [`Error`]: crate::Error\n/// [b]: crate::guide::b\nmod a {}\n"),
        ("crates/azekura/src/lib.rs", "pub(crate) mod base;\npub use base::error::Error;\n"),
        (
            "crates/azekura/src/base/mod.rs",
            "//! Modules: [`error`].\npub(crate) mod error;\npub(crate) use error::Error;\n",
        ),
        ("crates/azekura/src/base/error.rs", "pub(crate) struct Error;\n"),
        ("crates/azekura/src/block/mod.rs", "//! Modules: [`frame`].\npub(crate) mod frame;\n"),
        (
            "crates/azekura/src/block/frame.rs",
            "#![doc = include_str!(\"../../docs/format/block.md\")]\nuse crate::base::Error;\nstruct Frame(Error);\n",
        ),
        ("crates/azekura/src/table/mod.rs", "//! Modules: [`reader`].\npub(crate) mod reader;\n"),
        (
            "crates/azekura/src/table/reader.rs",
            "use crate::base::error::{self, Error as E};\nuse crate::block::{frame::Frame};\n",
        ),
    ];
    files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect()
}

/// The small tree with one more file, or another text in a file.
fn valid_tree_with(path: &str, text: &str) -> SourceTree {
    let mut files = valid_tree();
    files.retain(|(p, _)| p != path);
    files.push((path.into(), text.into()));
    SourceTree::from_files(files)
}

fn source(file: &str) -> String {
    format!("crates/azekura/src/{file}")
}

/// Rules that need more than one planted file; each has a test of its own below.
const TESTED_SEPARATELY: &[&str] = &["import-cycle", "subfolder-cycle", "folder-size"];

/// The rules that a file violates in the small tree.
fn rules_broken_by(path: &str, text: &str) -> Vec<&'static str> {
    let rules: BTreeSet<_> = run_lints(&valid_tree_with(path, text)).into_iter().map(|error| error.rule).collect();
    rules.into_iter().collect()
}

const UNSAFE_BLOCK: &str = "fn f() {\n    let x = 1;\n    let _ = unsafe { g(x) };\n}\n";

/// Violations outside of the engine's sources.
const ERRORS_ELSEWHERE: &[(&str, &str, &str)] = &[
    ("format-included", "crates/azekura/docs/format/lonely.md", "# Lonely\n"),
    ("path", "ARCHITECTURE.md", "See `block/frame.rs` and `block/missing.rs`.\n"),
    ("link", "README.md", "[a](docs/gone.md)\n"),
    ("link", "README.md", "[a]\n\n[a]: docs/gone.md\n"),
    ("link", "crates/azekura/docs/guide/b.md", "[`Error`]\n\n[`Error`]: crate::Error\n"),
    ("guide-link", "crates/azekura/docs/guide/b.md", "[a](a.md)\n"),
    ("guide-link", "crates/azekura/docs/guide/b.md", "[a]\n\n[a]: a.md\n"),
    ("guide-link", "crates/azekura/docs/guide/b.md", "[`F`]\n\n[`F`]: https://docs.rs/azekura/F\n"),
    ("hidden-line", "README.md", "```rust\n# use a::b;\n```\n"),
    ("link", "docs/glossary.md", "[a](../README.md#nowhere)\n"),
    ("absolute-path", "README.md", concat!("See /wo", "rk/notes.\n")),
    ("person", "README.md", "For somebody.\n"),
    ("metaphor", "fuzz/README.md", "The house.\n"),
    ("unsafe-location", "crates/azekura-bench/src/engine/redb.rs", UNSAFE_BLOCK),
];

fn planted_errors() -> Vec<(&'static str, String, String)> {
    let long_function = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(69));
    let long_file = "const X: u8 = 1;\n".repeat(801);
    let long_mod_file = format!("//! No modules.\n{}", "//!\n".repeat(60));
    let cases: &[(&'static str, &str, &str)] = &[
        ("layers", "block/a.rs", "use crate::table::reader::Reader;\n"),
        ("layers", "block/a.rs", "#[cfg(test)]\nmod tests {\n    use crate::table::reader::Reader;\n}\n"),
        ("layers", "record/a.rs", "fn f() -> crate::block::frame::Frame {}\n"),
        ("layers", "engine.rs", "use crate::{block::frame::Frame as F};\n"),
        ("layers", "other/a.rs", "\n"),
        ("root-import", "table/a.rs", "use crate::Error;\n"),
        ("root-import", "table/a.rs", "fn f() { crate::Error; }\n"),
        ("super", "table/a.rs", "use super::reader;\n"),
        ("own-module", "table/a.rs", "use crate::table;\n"),
        ("glob", "table/a.rs", "use crate::base::error::*;\n"),
        ("import-unlisted", "wal/a.rs", "use crate::block::frame::Frame;\n"),
        ("import-stale", "block/frame.rs", "#![doc = include_str!(\"../../docs/format/block.md\")]\n"),
        ("module-doc", "table/mod.rs", "// Modules: reader.\nmod reader;\n"),
        ("module-doc", "table/mod.rs", "//! Modules: a reader-like thing.\nmod reader_;\n"),
        ("module-doc", "table/mod.rs", "//! Modules: none.\npub(crate) fn f() {}\n"),
        ("module-doc", "table/mod.rs", &long_mod_file),
        ("file-length", "table/a.rs", &long_file),
        ("function-length", "table/a.rs", &long_function),
        ("file-name", "table/util.rs", "\n"),
        ("file-name", "table/helpers/a.rs", "\n"),
        ("type-name", "table/a.rs", "pub(crate) struct Error;\n"),
        ("person", "engine.rs", "/// For threads WHO wait.\nfn f() {}\n"),
        ("person", "engine.rs", "fn f() {\n    g(); // no one waits\n}\n"),
        ("glossary", "engine.rs", "//! The Floor above.\n"),
        ("metaphor", "engine.rs", "//! Text.\n//!\n//! So many blocks.\n"),
        ("line-width", "table/a.rs", &format!("//! {}\n", "é".repeat(117))),
        ("unsafe-location", "table/a.rs", UNSAFE_BLOCK),
        ("unsafe-location", "table/a.rs", "#![allow(unsafe_code)]\n"),
        ("commented-out", "table/a.rs", "// let x = 1;\n"),
        ("commented-out", "table/a.rs", "fn f() {\n    //if x {\n}\n"),
        ("marker", "table/a.rs", concat!("// FIX", "ME: later\n")),
        ("marker", "table/a.rs", concat!("//! to", "do\n")),
        ("host-access", "table/a.rs", "use rustix::fs::fsync;\n"),
        ("host-access", "mem/a.rs", "use rustix::fs::fsync;\n"),
        ("host-access", "table/a.rs", "fn f() { println!(); }\n"),
        ("absolute-path", "table/a.rs", concat!("const DIR: &str = \"/ho", "me/user\";\n")),
        ("include-exists", "table/a.rs", "#![doc = include_str!(\"../../docs/format/gone.md\")]\n"),
        ("example", "table/a.rs", "/// ```\n/// println!();\n/// ```\npub fn f() {}\n"),
        ("example", "table/a.rs", "/// Text.\n#[must_use]\npub fn f() {}\n"),
        ("example", "table/a.rs", "/// ```\npub(crate) fn e() {}\n\npub const fn f() {}\n"),
    ];
    let mut all: Vec<_> = cases.iter().map(|(rule, file, text)| (*rule, source(file), text.to_string())).collect();
    all.extend(ERRORS_ELSEWHERE.iter().map(|(rule, path, text)| (*rule, path.to_string(), text.to_string())));
    all
}

#[test]
fn valid_tree_passes_all_lints() {
    assert_eq!(run_lints(&SourceTree::from_files(valid_tree())), []);
}

#[test]
fn public_items_need_examples() {
    let example = "/// ```\n/// assert!(true);\n/// ```\n";
    let text = format!(
        "{example}#[must_use]\npub struct S(pub(crate) fn());
{example}pub trait T {{\n{example}    fn f() {{\n        fn inner() {{}}\n    }}\n    fn g();\n}}
pub(crate) fn private() {{}}
/// Text.\n#[doc(hidden)]\npub fn hidden() {{}}
#[cfg(test)]\npub fn test() {{}}
pub enum E {{}}
"
    );
    let errors = run_lints(&valid_tree_with(&source("table/a.rs"), &text));
    let found: Vec<_> = errors.iter().map(|error| (error.rule, error.line, error.what.as_str())).collect();
    assert_eq!(found, [("example", 16, "`g` has no example"), ("example", 24, "`E` has no example")]);
    assert!(rules_broken_by(&source("inspect/data_blocks.rs"), "pub fn f() {}\n").is_empty());
}

#[test]
fn every_planted_violation_is_found() {
    for (rule, path, text) in planted_errors() {
        let found = rules_broken_by(&path, &text);
        assert!(found.contains(&rule), "{rule} accepts {path}, found {found:?}:\n{text}");
    }
}

#[test]
fn every_rule_has_a_planted_violation() {
    let planted: BTreeSet<&str> =
        planted_errors().iter().map(|(rule, ..)| *rule).chain(TESTED_SEPARATELY.iter().copied()).collect();
    let rules: BTreeSet<&str> = LINT_RULES.iter().map(|(name, _)| *name).collect();
    assert_eq!(rules, planted);
}

#[test]
fn unlisted_import_is_found_when_record_is_empty() {
    let errors = run_lints(&valid_tree_with(RECORD, "# Imports\n\ntable -> block, base\n"));
    let found: Vec<_> =
        errors.iter().filter(|error| error.rule == "import-unlisted").map(|error| &error.what[..15]).collect();
    assert_eq!(found, ["block -> base i", "table -> base i", "table -> block "]);
}

#[test]
fn cycles_through_reexports_and_paths_are_found() {
    let mut files = valid_tree();
    files.push((source("block/a.rs"), "use crate::block::{b::{B}};\n".into()));
    files.push((source("block/b.rs"), "fn f(_: crate::block::deep::C) {}\n".into()));
    files.push((source("block/deep/mod.rs"), "//! Module: `c`.\nmod c;\npub(crate) use c::C;\n".into()));
    files.push((source("block/deep/c.rs"), "use crate::{block::{a::A}};\n".into()));
    let errors = run_lints(&SourceTree::from_files(files));
    let cycle: Vec<_> =
        errors.iter().filter(|error| error.rule == "import-cycle").map(|error| error.path.as_str()).collect();
    assert_eq!(cycle, [source("block/a.rs"), source("block/b.rs"), source("block/deep/c.rs")]);
    assert!(errors[0].what.contains("block/a.rs, block/b.rs, block/deep/c.rs"), "{}", errors[0]);
}

#[test]
fn cycles_of_subfolders_are_found() {
    let mut files = valid_tree();
    files.push((source("block/a/x.rs"), "use crate::block::b::y::B;\n".into()));
    files.push((source("block/b/y.rs"), "struct B;\n".into()));
    files.push((source("block/b/z.rs"), "use crate::block::a::x::A;\n".into()));
    let errors = run_lints(&SourceTree::from_files(files));
    let cycle: Vec<_> = errors.iter().map(|error| (error.rule, error.path.as_str())).collect();
    let (x, z) = (source("block/a/x.rs"), source("block/b/z.rs"));
    assert_eq!(cycle, [("subfolder-cycle", x.as_str()), ("subfolder-cycle", z.as_str())]);
}

#[test]
fn cycles_are_found_in_other_crates() {
    for name in ["azekura-cli", "azekura-bench", "azekura-raft"] {
        let mut files = valid_tree();
        files.push((format!("crates/{name}/src/a.rs"), "use crate::b::B;\n".into()));
        files.push((format!("crates/{name}/src/b.rs"), "use crate::a::A;\n".into()));
        let errors = run_lints(&SourceTree::from_files(files));
        assert!(errors.iter().any(|error| error.rule == "import-cycle"), "{name}");
    }
}

#[test]
fn cycle_of_test_imports_is_accepted() {
    let mut files = valid_tree();
    files.push((source("block/a.rs"), "use crate::block::b::B;\n".into()));
    files.push((source("block/b.rs"), "#[cfg(test)]\nmod tests {\n    use crate::block::a::A;\n}\n".into()));
    assert_eq!(run_lints(&SourceTree::from_files(files)), []);
}

#[test]
fn only_tests_import_testing() {
    let with = |import: &str| {
        let mut files = valid_tree();
        files.push((source("testing/fs.rs"), "pub(crate) struct MemFs;\n".into()));
        files.push((source("table/a.rs"), format!("{import}use crate::testing::fs::MemFs;\n")));
        run_lints(&SourceTree::from_files(files))
    };
    assert!(with("").iter().any(|error| error.rule == "layers"));
    for condition in ["#[cfg(test)]\n", "#[cfg(any(test, feature = \"testing\"))]\n"] {
        assert_eq!(with(condition), [], "{condition}");
    }
}

#[test]
fn folder_of_26_files_is_too_large() {
    let file = |i: usize| (source(&format!("block/b{i}.rs")), String::new());
    let mut files = valid_tree();
    files.extend((0..23).map(file));
    assert_eq!(run_lints(&SourceTree::from_files(files.clone())), [], "25 are allowed");
    files.push(file(23));
    assert_eq!(run_lints(&SourceTree::from_files(files))[0].rule, "folder-size");
}

/// Valid text that is similar to a violation.
#[test]
fn similar_valid_text_is_accepted() {
    let cases: &[(&str, &str)] = &[
        (
            "table/a.rs",
            "/// See [`X`](crate::db::X), `super::x`, println!().\nconst S: &str = \"crate::db::X unsafe\";\n",
        ),
        ("table/a.rs", "const R: &str = r#\"println!(\"{\") unsafe {\"#;\nfn f() { g(br\"{\") }\n"),
        ("table/a.rs", "const C: [char; 3] = ['{', '\\'', '\"'];\nfn f<'a>(_: &'a str) {}\n"),
        ("table/a.rs", "/* unsafe /* nested */ println!() */\nfn f() {}\n"),
        ("table/a.rs", "pub(in crate::table) struct X;\npub(crate) struct Y;\n"),
        ("table/a.rs", "use crate::base::error::Kind::*;\n"),
        ("table/a.rs", "#![deny(unsafe_code)]\n"),
        ("table/a.rs", "#[cfg(test)]\nmod tests {\n    use super::*;\n    fn f() { println!() }\n}\n"),
        ("table/a.rs", "#[cfg(test)]\nuse std::{fmt, io};\n\n// let us begin; with care\n// if this fails, we stop\n"),
        ("table/a.rs", "struct S {\n    #[cfg(test)]\n    hits: Vec<u8>,\n    other: u8,\n}\n"),
        ("mem/a.rs", "use rustix::mm::Advice;\nunsafe fn f() {}\n"),
    ];
    for (file, text) in cases {
        let declared = "//! Modules: [`reader`].\npub(crate) mod reader;\n#[cfg(test)]\nmod tests;\n";
        let mut files = valid_tree();
        files.retain(|(path, _)| *path != source("table/mod.rs"));
        files.push((source("table/mod.rs"), declared.into()));
        files.push((source(file), text.to_string()));
        assert_eq!(run_lints(&SourceTree::from_files(files)), [], "{file}:\n{text}");
    }
}

#[test]
fn longest_function_and_file_are_allowed() {
    let function = format!("fn f() {{\n{}}}\n", "    g(\"}\");\n".repeat(68));
    assert_eq!(rules_broken_by(&source("table/a.rs"), &function), Vec::<&str>::new());
    let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "    const X: u8 = 1;\n".repeat(300));
    let file = format!("{}{tests}", "const X: u8 = 1;\n".repeat(800));
    assert_eq!(rules_broken_by(&source("table/a.rs"), &file), Vec::<&str>::new());
}

#[test]
fn import_graph_lists_layers_and_imports() {
    let tree = SourceTree::from_files(valid_tree());
    let graph = crate::import_graph::ImportGraph::new(&tree, ENGINE);
    assert_eq!(graph.import_list(), "table -> block, base\nblock -> base");
    let printed = graph.to_string();
    let table = printed.lines().find(|line| line.contains("table")).expect("table has a line");
    assert_eq!(table.split_whitespace().collect::<Vec<_>>(), ["3", "table", "2", "4", "0", "base", "block"]);
}
