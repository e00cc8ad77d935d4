//! Environments that LMDB wrote, through the crate `heed`.
#![allow(unsafe_code)]

use std::path::Path;

use heed::types::Bytes;
use heed::{CommitOrAbort, DatabaseFlags, Env, EnvFlags, EnvOpenOptions};

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, count_refused_damage, numbered, stored,
};
use crate::fixture::CliFixture;

fn open(path: &Path, flags: EnvFlags) -> Env {
    if !flags.contains(EnvFlags::NO_SUB_DIR) {
        std::fs::create_dir_all(path).unwrap();
    }
    let mut options = EnvOpenOptions::new();
    options.map_size(64 << 20).max_dbs(8);
    // SAFETY: no other process changes the file below the map.
    unsafe { options.flags(flags | EnvFlags::NO_SYNC).open(path).unwrap() }
}

fn write(env: &Env, name: Option<&str>, flags: DatabaseFlags, entries: &[(Vec<u8>, Vec<u8>)]) {
    let created = env.create_databases_and_commit(env.write_txn().unwrap(), |opener, transaction| {
        let mut options = opener.database_options().types::<Bytes, Bytes>();
        if let Some(name) = name {
            options.name(name);
        }
        options.flags(flags).create(transaction).map(CommitOrAbort::<_, ()>::Commit)
    });
    let database = created.unwrap().commit().unwrap();
    let mut transaction = env.write_txn().unwrap();
    entries.iter().for_each(|(key, value)| database.put(&mut transaction, key, value).unwrap());
    transaction.commit().unwrap();
}

fn fill(env: &Env, databases: &[(&str, Entries)]) {
    for (name, entries) in databases {
        let entries: Vec<_> = entries.clone().into_iter().collect();
        write(env, (*name != "default").then_some(*name), DatabaseFlags::empty(), &entries);
    }
}

#[test]
fn named_databases_are_imported() {
    let p = CliFixture::new();
    let mut unnamed = numbered(0, 100);
    // As long as the record of a named database.
    unnamed.insert(b"not a database".to_vec(), vec![0x33; 48]);
    let large = Entries::from([(b"large".to_vec(), vec![0x5a; 2 << 20])]);
    let databases =
        [("default", unnamed), ("large", large), ("no entries", Entries::new()), ("users", numbered(1, 2000))];
    let env = open(&p.path("s"), EnvFlags::empty());
    fill(&env, &databases);
    p.ok("import --db beside --from lmdb s --table users --partition people");
    assert!(stored(&p, "beside", "people") == numbered(1, 2000), "a program has the environment open");
    env.prepare_for_closing().wait();
    std::fs::remove_file(p.path("s/lock.mdb")).unwrap();
    assert_imported(&p, "lmdb", "s", "d", &databases);
}

#[test]
fn single_file_is_imported() {
    let p = CliFixture::new();
    let env = open(&p.path("s.mdb"), EnvFlags::NO_SUB_DIR);
    fill(&env, &[("users", numbered(0, 100))]);
    env.prepare_for_closing().wait();
    assert_imported(&p, "lmdb", "s.mdb", "d", &[("users", numbered(0, 100))]);
}

#[test]
fn empty_and_foreign_sources() {
    let p = CliFixture::new();
    let env = open(&p.path("s"), EnvFlags::empty());
    fill(&env, &[("default", Entries::new())]);
    env.prepare_for_closing().wait();
    assert_imported(&p, "lmdb", "s", "d", &[("default", Entries::new())]);
    assert_foreign_sources_refused(&p, "lmdb");
}

/// The maximum key of LMDB has 511 bytes, so no key is too long.
#[test]
fn several_values_for_a_key_are_refused() {
    let p = CliFixture::new();
    let env = open(&p.path("s"), EnvFlags::empty());
    let entries = [(b"k".to_vec(), b"1".to_vec()), (b"k".to_vec(), b"2".to_vec())];
    write(&env, Some("several"), DatabaseFlags::DUP_SORT, &entries);
    fill(&env, &[("users", numbered(0, 100))]);
    env.prepare_for_closing().wait();
    let error = assert_refused(&p, "--from lmdb s", 3);
    assert!(error["message"].as_str().unwrap().contains("several values for a key"), "{error}");
    p.ok("import --db d --from lmdb s --table users");
    assert!(stored(&p, "d", "users") == numbered(0, 100));
}

/// A named database has a name that is not UTF-8. Its record became an entry, and the import omitted the database.
#[test]
fn name_that_is_not_utf8_is_refused() {
    let p = CliFixture::new();
    let env = open(&p.path("s"), EnvFlags::empty());
    let text = (b"\xfe".to_vec(), vec![b'x'; 48]);
    fill(&env, &[("users", numbered(0, 100)), ("default", Entries::from([text]))]);
    let opened = env.open_databases_and_commit(env.read_txn().unwrap(), |opener, transaction| {
        opener.open_database::<Bytes, Bytes>(transaction, None).map(CommitOrAbort::<_, ()>::Commit)
    });
    let unnamed = opened.unwrap().commit().flatten().unwrap();
    let transaction = env.read_txn().unwrap();
    let record = unnamed.get(&transaction, b"users").unwrap().unwrap().to_vec();
    drop(transaction);
    write(&env, None, DatabaseFlags::empty(), &[(b"\xff\xfe".to_vec(), record)]);
    env.prepare_for_closing().wait();
    let error = assert_refused(&p, "--from lmdb s", 3);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("\\xff\\xfe") && message.contains("not UTF-8"), "{error}");
    p.ok("import --db d --from lmdb s --table users --table default");
    assert!(stored(&p, "d", "users") == numbered(0, 100));
    assert_eq!(stored(&p, "d", "default").len(), 1);
}

/// LMDB has no checksums, so the import does not find all damage. No damage ends the command by a signal.
#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    let env = open(&p.path("s"), EnvFlags::empty());
    fill(&env, &[("users", numbered(0, 2000))]);
    env.prepare_for_closing().wait();
    std::fs::remove_file(p.path("s/lock.mdb")).unwrap();
    count_refused_damage(&p, "lmdb", "s", 40, |_, _| {});
    let content = std::fs::read(p.path("s/data.mdb")).unwrap();
    for len in [content.len() / 2, 9000, 100] {
        std::fs::write(p.path("s/data.mdb"), &content[..len]).unwrap();
        assert_refused(&p, "--from lmdb s", 3);
    }
    let mut damaged = content.clone();
    damaged[8192..].fill(0xff);
    std::fs::write(p.path("s/data.mdb"), damaged).unwrap();
    assert_refused(&p, "--from lmdb s", 3);
}
