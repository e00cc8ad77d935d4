//! Opening for reading only: beside other readers, never beside a writer, and without a trace.

use azekura::{ErrorKind, PersistMode};

use super::{config, error, sample, whole};

#[test]
fn readers_see_the_log_too_and_leave_no_trace() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    sample(&dir);
    let before = whole(temporary.path());
    for _ in 0..2 {
        let readers = [config(&dir).open_read_only().unwrap(), config(&dir).open_read_only().unwrap()];
        for db in &readers {
            let p = db.open_partition("p", Default::default()).unwrap();
            assert_eq!(p.len().unwrap(), 120);
            assert_eq!(p.get([110]).unwrap().as_deref(), Some(&[110; 50][..]), "only the log has it");
            assert_eq!(db.snapshot().iter(&p).rev().count(), 120);
            assert_eq!(db.list_partitions(), ["p"]);
            assert!(db.metrics().replayed_records == 20 && db.disk_space() > 0);
        }
        assert_eq!(error(config(&dir).open()).kind(), ErrorKind::Locked, "a writer beside readers");
        let [one, other] = readers;
        one.close().unwrap();
        drop(other);
    }
    assert!(before == whole(temporary.path()), "a reader wrote");
}

#[test]
fn readers_cannot_write() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    sample(&dir);
    let before = whole(temporary.path());
    let db = config(&dir).open_read_only().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let mut batch = db.batch();
    batch.insert(&p, "k", "v");
    let refused = [
        error(p.insert("k", "v")),
        error(p.remove("k")),
        error(p.remove_weak("k")),
        error(batch.commit()),
        error(p.flush()),
        error(p.major_compact()),
        error(db.persist(PersistMode::SyncAll)),
        error(db.checkpoint(temporary.path().join("copy"))),
        error(db.open_partition("new", Default::default())),
        error(db.delete_partition(p.clone())),
        error(db.step()),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(p.len().unwrap(), 120);
    drop((p, db));
    assert!(before == whole(temporary.path()), "a reader wrote");
}

#[test]
fn a_reader_shows_the_moment_of_its_opening() {
    let temporary = tempfile::tempdir().unwrap();
    let (dir, moved) = (temporary.path().join("db"), temporary.path().join("moved"));
    sample(&dir);
    let db = config(&dir).open_read_only().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    let mut iter = p.iter();
    iter.next().unwrap().unwrap();
    assert_eq!(error(config(&dir).open()).kind(), ErrorKind::Locked);
    std::fs::rename(&dir, &moved).unwrap();
    assert_eq!(error(config(&moved).open()).kind(), ErrorKind::Locked, "the lock is on the file, not on its name");
    std::fs::rename(&moved, &dir).unwrap();
    assert_eq!(iter.map(Result::unwrap).collect::<Vec<_>>().len(), 119);
}
