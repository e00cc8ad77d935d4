//! redb files that the crate `redb` wrote.

use redb::{Database, Key, MultimapTableDefinition, TableDefinition, Value};

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, count_refused_damage, numbered, stored,
};
use crate::fixture::CliFixture;

const PLAIN: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("plain");

fn fill<K: Key + 'static, V: Value + 'static>(
    db: &Database,
    definition: TableDefinition<'_, K, V>,
    entries: impl FnOnce(&mut redb::Table<'_, K, V>),
) {
    let transaction = db.begin_write().unwrap();
    entries(&mut transaction.open_table(definition).unwrap());
    transaction.commit().unwrap();
}

fn fill_plain(db: &Database, entries: &Entries) {
    fill(db, PLAIN, |table| entries.iter().for_each(|(k, v)| drop(table.insert(&**k, &**v).unwrap())));
}

fn bytes<const N: usize>(entries: [(&[u8], &[u8]); N]) -> Entries {
    entries.map(|(key, value)| (key.to_vec(), value.to_vec())).into()
}

#[test]
fn tables_of_every_supported_type_are_imported() {
    let p = CliFixture::new();
    let db = Database::create(p.path("s.redb")).unwrap();
    fill_plain(&db, &numbered(0, 2000));
    fill(&db, TableDefinition::<&str, u64>::new("counts"), |table| {
        table.insert("one", 1).unwrap();
        table.insert("large", 0x0102_0304_0506_0708).unwrap();
    });
    fill(&db, TableDefinition::<i32, i64>::new("signed"), |table| {
        (-2..=1).for_each(|n| drop(table.insert(n, i64::from(n)).unwrap()));
    });
    fill(&db, TableDefinition::<u128, String>::new("wide"), |table| {
        table.insert(258, "text".to_string()).unwrap();
    });
    fill(&db, TableDefinition::<char, bool>::new("flags"), |table| {
        table.insert('a', true).unwrap();
    });
    fill(&db, TableDefinition::<u8, ()>::new("set"), |table| {
        table.insert(7, ()).unwrap();
    });
    fill(&db, TableDefinition::<&[u8], &[u8]>::new("no entries"), |_| {});
    drop(db);
    let wide_key = [&[0; 14][..], &[1, 2]].concat();
    let expected = [
        ("counts", bytes([(b"one", &[0, 0, 0, 0, 0, 0, 0, 1]), (b"large", &[1, 2, 3, 4, 5, 6, 7, 8])])),
        ("flags", bytes([(&[0, 0, b'a'], &[1])])),
        ("no entries", Entries::new()),
        ("plain", numbered(0, 2000)),
        ("set", bytes([(&[7], &[])])),
        (
            "signed",
            bytes([
                (&[0x7f, 0xff, 0xff, 0xfe], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]),
                (&[0x7f, 0xff, 0xff, 0xff], &[0xff; 8]),
                (&[0x80, 0, 0, 0], &[0; 8]),
                (&[0x80, 0, 0, 1], &[0, 0, 0, 0, 0, 0, 0, 1]),
            ]),
        ),
        ("wide", bytes([(&wide_key, b"text")])),
    ];
    assert_imported(&p, "redb", "s.redb", "d", &expected);
}

#[test]
fn one_table_can_be_chosen_and_renamed() {
    let p = CliFixture::new();
    let db = Database::create(p.path("s.redb")).unwrap();
    fill_plain(&db, &numbered(0, 20));
    fill(&db, TableDefinition::<(u8, u8), Option<u8>>::new("pairs"), |table| {
        table.insert((1, 2), Some(3)).unwrap();
    });
    let transaction = db.begin_write().unwrap();
    transaction
        .open_multimap_table(MultimapTableDefinition::<&str, u8>::new("several"))
        .unwrap()
        .insert("k", 1)
        .unwrap();
    transaction.commit().unwrap();
    drop(db);
    for (table, words) in [("pairs", ["(u8,u8)", "Option<u8>"]), ("several", ["multimap", "several values"])] {
        let error = assert_refused(&p, &format!("--from redb s.redb --table plain --table {table}"), 3);
        let message = error["message"].as_str().unwrap();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert!(message.contains("choose other tables with --table"), "{message}");
    }
    let error = assert_refused(&p, "--from redb s.redb --table nothing", 3);
    assert!(error["message"].as_str().unwrap().contains("there are: pairs, plain, several"), "{error}");
    let error = assert_refused(&p, "--from redb s.redb --partition one", 3);
    assert!(error["message"].as_str().unwrap().contains("--table"), "{error}");
    p.ok("import --db d --from redb s.redb --table plain --partition renamed");
    assert_eq!(p.ok("partitions --db d list"), "renamed\n");
    assert!(stored(&p, "d", "renamed") == numbered(0, 20));
}

#[test]
fn file_that_was_not_closed_is_imported() {
    let p = CliFixture::new();
    let db = Database::create(p.path("open.redb")).unwrap();
    fill_plain(&db, &numbered(0, 200));
    assert_refused(&p, "--from redb open.redb", 4);
    std::fs::copy(p.path("open.redb"), p.path("killed.redb")).unwrap();
    assert!(redb::ReadOnlyDatabase::open(p.path("killed.redb")).is_err(), "it needs a repair");
    assert_imported(&p, "redb", "killed.redb", "d", &[("plain", numbered(0, 200))]);
}

#[test]
fn empty_and_foreign_sources() {
    let p = CliFixture::new();
    drop(Database::create(p.path("s.redb")).unwrap());
    assert_eq!(p.json("import --db d --from redb s.redb")["entries"], 0);
    assert!(!p.path("d").exists(), "there is no table");
    std::fs::write(p.path("zero.redb"), "").unwrap();
    assert_refused(&p, "--from redb zero.redb", 3);
    assert_foreign_sources_refused(&p, "redb");
}

#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    let db = Database::create(p.path("s.redb")).unwrap();
    fill_plain(&db, &numbered(0, 2000));
    drop(db);
    let all = |p: &CliFixture, place: &str| assert!(stored(p, "target", "plain") == numbered(0, 2000), "{place}");
    let refused = count_refused_damage(&p, "redb", "s.redb", 40, all);
    assert!(refused >= 5, "{refused} of 40");
    let content = std::fs::read(p.path("s.redb")).unwrap();
    std::fs::write(p.path("s.redb"), &content[..content.len() / 2]).unwrap();
    assert_refused(&p, "--from redb s.redb", 3);
}

#[test]
fn long_key_is_named_and_changes_nothing() {
    let p = CliFixture::new();
    let db = Database::create(p.path("s.redb")).unwrap();
    fill_plain(&db, &bytes([(b"a", b"1"), (&[b'k'; 65_536], b"2")]));
    drop(db);
    let error = assert_refused(&p, "--from redb s.redb", 3);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("table \"plain\", key kkkk") && message.contains("65536 bytes"), "{message}");
}

/// The import fails because the second partition is full. Then the first one must not exist.
#[test]
fn failed_store_removes_new_partitions() {
    let p = CliFixture::new();
    let db = Database::create(p.path("s.redb")).unwrap();
    for table in ["a", "z"] {
        fill(&db, TableDefinition::<u32, &[u8]>::new(table), |table| {
            (0..3000).for_each(|n| drop(table.insert(n, &[0xab; 100][..]).unwrap()));
        });
    }
    drop(db);
    p.ok("partitions --db d create z --engine pmem --pool-max-size 64KiB");
    let ran = p.run("import --db d --from redb s.redb --json");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert_eq!(ran.error()["kind"], "pool_full", "{ran:?}");
    assert_eq!(p.ok("partitions --db d list"), "z\n");
    let entries = stored(&p, "d", "z").len();
    let message = ran.error()["message"].as_str().unwrap().to_string();
    assert_eq!(message.ends_with("were stored in partitions that existed before"), entries > 0, "{entries}: {message}");
}
