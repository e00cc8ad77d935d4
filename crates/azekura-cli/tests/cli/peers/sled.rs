//! Databases that the crate `sled` wrote.

use std::fs::File;

use sled::{Config, Db};

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, count_refused_damage, numbered, stored,
};
use crate::fixture::CliFixture;

fn open(p: &CliFixture) -> Db {
    Config::new().path(p.path("s")).open().unwrap()
}

/// Closes the database `s`, and waits until nothing holds its lock. Sled does not unlock the file, so threads of sled,
/// and a child that another test is just starting, may hold the lock a moment longer.
fn close(p: &CliFixture, db: Db) {
    drop(db);
    let file = File::open(p.path("s/db")).unwrap();
    file.lock().unwrap();
    file.unlock().unwrap();
}

fn write(p: &CliFixture, trees: &[(&str, Entries)]) {
    let db = open(p);
    for (name, entries) in trees {
        let tree = db.open_tree(if *name == "default" { "__sled__default" } else { name }).unwrap();
        entries.iter().for_each(|(key, value)| drop(tree.insert(key, &**value).unwrap()));
    }
    db.flush().unwrap();
    close(p, db);
}

#[test]
fn trees_are_imported() {
    let p = CliFixture::new();
    let large = Entries::from([(b"large".to_vec(), vec![0x5a; 2 << 20])]);
    let trees = [("default", numbered(0, 100)), ("large", large), ("users", numbered(100, 2000))];
    write(&p, &trees);
    assert_imported(&p, "sled", "s", "d", &trees);
    p.ok("import --db e --from sled s --table default --partition people");
    assert!(stored(&p, "e", "people") == numbered(0, 100));
}

#[test]
fn empty_default_tree_is_omitted_if_others_exist() {
    let p = CliFixture::new();
    write(&p, &[("users", numbered(0, 10))]);
    assert_imported(&p, "sled", "s", "d", &[("users", numbered(0, 10))]);
    p.ok("import --db e --from sled s --partition people");
    assert!(stored(&p, "e", "people") == numbered(0, 10));
}

#[test]
fn empty_and_foreign_sources() {
    let p = CliFixture::new();
    write(&p, &[]);
    assert_imported(&p, "sled", "s", "d", &[("default", Entries::new())]);
    assert_foreign_sources_refused(&p, "sled");
}

#[test]
fn open_database_is_locked() {
    let p = CliFixture::new();
    write(&p, &[("users", numbered(0, 10))]);
    let db = open(&p);
    assert_refused(&p, "--from sled s", 4);
    drop(db);
}

#[test]
fn names_that_are_not_utf8_are_refused() {
    let p = CliFixture::new();
    write(&p, &[("users", numbered(0, 10))]);
    let db = open(&p);
    db.open_tree(b"\xff").unwrap().insert("k", "v").unwrap();
    close(&p, db);
    let error = assert_refused(&p, "--from sled s", 3);
    assert!(error["message"].as_str().unwrap().contains("\\xff"), "{error}");
    p.ok("import --db d --from sled s --table users");
    assert!(stored(&p, "d", "users") == numbered(0, 10));
}

#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    write(&p, &[("users", numbered(0, 2000))]);
    let all = |p: &CliFixture, place: &str| assert!(stored(p, "target", "users") == numbered(0, 2000), "{place}");
    let refused = count_refused_damage(&p, "sled", "s", 20, all);
    assert!(refused >= 5, "{refused}");
}

#[test]
fn long_key_is_named_and_changes_nothing() {
    let p = CliFixture::new();
    let entries = [(b"a".to_vec(), b"1".to_vec()), (vec![b'k'; 70_000], b"2".to_vec())].into();
    write(&p, &[("users", entries)]);
    let error = assert_refused(&p, "--from sled s", 3);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("table \"users\", key kkkk") && message.contains("70000 bytes"), "{message}");
}

/// When sled opens a database, it overwrites the remains of freed segments, also after a clean close.
#[test]
fn database_with_freed_segments_is_imported() {
    let p = CliFixture::new();
    let db = open(&p);
    let tree = db.open_tree("users").unwrap();
    for n in 0..60_000u32 {
        tree.insert((n.wrapping_mul(2_654_435_761) >> 20).to_be_bytes(), vec![n as u8; 200]).unwrap();
    }
    db.flush().unwrap();
    let entries: Entries = tree.iter().map(Result::unwrap).map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
    drop(tree);
    close(&p, db);
    let ran = p.run("import --db d --from sled s");
    assert!(ran.code == Some(0) || ran.err.contains("--allow-torn-log"), "{ran:?}");
    p.ok("import --db d --from sled s --allow-torn-log");
    assert!(stored(&p, "d", "users") == entries);
}
