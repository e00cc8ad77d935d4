//! Read-only opening: possible while other readers are open, refused while a writer is open. It changes nothing.

use azekura::{ErrorKind, PersistMode};

use super::{config, create_sample, expect_error, snapshot_dir};

#[test]
fn read_only_open_replays_wal_and_writes_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    let before = snapshot_dir(temporary.path());
    for _ in 0..2 {
        let readers = [config(&dir).open_read_only().unwrap(), config(&dir).open_read_only().unwrap()];
        for db in &readers {
            let p = db.open_partition("p", Default::default()).unwrap();
            assert_eq!(p.len().unwrap(), 120);
            assert_eq!(p.get([110]).unwrap().as_deref(), Some(&[110; 50][..]), "the record is in the WAL only");
            assert_eq!(db.snapshot().iter(&p).rev().count(), 120);
            assert_eq!(db.list_partitions(), ["p"]);
            assert!(db.metrics().replayed_records == 20 && db.disk_space() > 0);
        }
        assert_eq!(expect_error(config(&dir).open()).kind(), ErrorKind::Locked, "readers are open");
        let [one, other] = readers;
        one.close().unwrap();
        drop(other);
    }
    assert!(before == snapshot_dir(temporary.path()), "a reader wrote");
}

#[test]
fn readers_cannot_write() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    let before = snapshot_dir(temporary.path());
    let db = config(&dir).open_read_only().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let mut batch = db.batch();
    batch.insert(&p, "k", "v");
    let refused = [
        expect_error(p.insert("k", "v")),
        expect_error(p.remove("k")),
        expect_error(p.remove_weak("k")),
        expect_error(batch.commit()),
        expect_error(p.flush()),
        expect_error(p.major_compact()),
        expect_error(db.persist(PersistMode::SyncAll)),
        expect_error(db.checkpoint(temporary.path().join("copy"))),
        expect_error(db.delete_partition(p.clone())),
        expect_error(db.step()),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(expect_error(db.open_partition("new", Default::default())).kind(), ErrorKind::NotFound);
    assert_eq!(p.len().unwrap(), 120);
    drop((p, batch, db));
    assert!(before == snapshot_dir(temporary.path()), "a reader wrote");
}

#[test]
fn read_only_database_shows_state_at_open() {
    let temporary = tempfile::tempdir().unwrap();
    let (dir, moved) = (temporary.path().join("db"), temporary.path().join("moved"));
    create_sample(&dir);
    let db = config(&dir).open_read_only().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let mut iter = p.iter();
    iter.next().unwrap().unwrap();
    assert_eq!(expect_error(config(&dir).open()).kind(), ErrorKind::Locked);
    std::fs::rename(&dir, &moved).unwrap();
    assert_eq!(
        expect_error(config(&moved).open()).kind(),
        ErrorKind::Locked,
        "the lock is on the file, not on its name"
    );
    std::fs::rename(&moved, &dir).unwrap();
    assert_eq!(iter.map(Result::unwrap).collect::<Vec<_>>().len(), 119);
}
