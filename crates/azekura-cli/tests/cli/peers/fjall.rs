//! Databases that the crate `fjall` wrote.

use fjall::{Database, KeyspaceCreateOptions, KvSeparationOptions, PersistMode};

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, count_refused_damage, numbered, stored,
};
use crate::fixture::CliFixture;

/// Writes the keyspaces; those of `flushed` to tables, the others to the journal.
fn write(p: &CliFixture, keyspaces: &[(&str, Entries)], flushed: &[&str]) {
    let db = Database::builder(p.path("s")).open().unwrap();
    for (name, entries) in keyspaces {
        let separated = KeyspaceCreateOptions::default().with_kv_separation(Some(KvSeparationOptions::default()));
        let options = || if *name == "large" { separated } else { KeyspaceCreateOptions::default() };
        let keyspace = db.keyspace(name, options).unwrap();
        entries.iter().for_each(|(key, value)| keyspace.insert(&**key, &**value).unwrap());
        if flushed.contains(name) {
            keyspace.rotate_memtable_and_wait().unwrap();
        }
    }
    db.persist(PersistMode::SyncAll).unwrap();
}

#[test]
fn keyspaces_are_imported() {
    let p = CliFixture::new();
    let large = Entries::from([(b"large".to_vec(), vec![0x5a; 2 << 20])]);
    let keyspaces = [
        ("journal", numbered(0, 100)),
        ("large", large),
        ("no entries", Entries::new()),
        ("users", numbered(100, 2000)),
    ];
    write(&p, &keyspaces, &["large", "users"]);
    assert_imported(&p, "fjall", "s", "d", &keyspaces);
    p.ok("import --db e --from fjall s --table users --partition people");
    assert!(stored(&p, "e", "people") == numbered(100, 2000));
}

#[test]
fn empty_and_foreign_sources() {
    let p = CliFixture::new();
    write(&p, &[], &[]);
    assert_eq!(p.json("import --db d --from fjall s")["entries"], 0);
    assert!(!p.path("d").exists(), "there is no keyspace");
    assert_foreign_sources_refused(&p, "fjall");
    std::fs::write(p.path("s/version"), b"FJL\x02").unwrap();
    let error = assert_refused(&p, "--from fjall s", 3);
    assert!(error["message"].as_str().unwrap().contains("Fjall 2; only Fjall 3"), "{error}");
}

#[test]
fn open_database_is_locked() {
    let p = CliFixture::new();
    let db = Database::builder(p.path("s")).open().unwrap();
    assert_refused(&p, "--from fjall s", 4);
    drop(db);
}

/// Cuts off the zeros for which the journal has allocated space.
fn trim_journal(p: &CliFixture) {
    let path = p.path("s/0.jnl");
    let content = std::fs::read(&path).unwrap();
    let end = content.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
    std::fs::write(&path, &content[..end]).unwrap();
}

#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    let keyspaces = [("journal", numbered(2000, 2100)), ("users", numbered(0, 2000))];
    write(&p, &keyspaces, &["users"]);
    trim_journal(&p);
    let all = |p: &CliFixture, place: &str| {
        for (name, entries) in &keyspaces {
            assert!(stored(p, "target", name) == *entries, "{place}: {name}");
        }
    };
    let refused = count_refused_damage(&p, "fjall", "s", 6, all);
    assert!(refused >= 20, "{refused}");
}

/// Fjall ends the journal before such a record without an error.
#[test]
fn torn_journal_is_imported_on_request() {
    let p = CliFixture::new();
    write(&p, &[("users", numbered(0, 100))], &[]);
    trim_journal(&p);
    let content = std::fs::read(p.path("s/0.jnl")).unwrap();
    std::fs::write(p.path("s/0.jnl"), &content[..content.len() - 20]).unwrap();
    let error = assert_refused(&p, "--from fjall s", 3);
    assert!(error["message"].as_str().unwrap().contains("--allow-torn-log"), "{error}");
    p.ok("import --db d --from fjall s --allow-torn-log");
    let mut entries = numbered(0, 100);
    entries.pop_last();
    assert!(stored(&p, "d", "users") == entries);
}
