//! Closures that `get_with` calls: they may use the database in every way, and panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use azekura::fs::SystemEnv;
use azekura::testing::MemFs;
use azekura::{Database, ErrorKind, Partition};

use super::{config, error_kind, open_partition};
use crate::pools::open_pool;
use crate::testkit::watchdog::run_with_timeout;

/// Calls `check` with a database and an LSM partition, with it after a flush, and with a pool; with and without
/// workers. Each partition has the record `k` = `v`.
fn on_every_tree(what: &str, check: fn(Database, Partition)) {
    for (workers, tree) in [(0, "memtable"), (0, "table"), (0, "pool"), (2, "memtable"), (2, "table"), (2, "pool")] {
        run_with_timeout(&format!("{what}, {workers} workers, {tree}"), move || {
            let db = config(&MemFs::new()).workers(workers).env(Arc::new(SystemEnv::new())).open().unwrap();
            let part = if tree == "pool" { open_pool(&db, "p") } else { open_partition(&db, "p") };
            part.insert("k", "v").unwrap();
            if tree == "table" {
                part.flush().unwrap();
            }
            check(db, part);
        });
    }
}

#[test]
fn get_with_closure_may_read_and_write() {
    on_every_tree("reading and writing", |db, part| {
        let value = part.get_with("k", |value| {
            for n in 0..2_000u32 {
                part.insert(n.to_be_bytes(), [7; 500]).unwrap();
            }
            part.insert("k", "new").unwrap();
            assert_eq!(part.get_with("k", <[u8]>::to_vec).unwrap().as_deref(), Some(&b"new"[..]));
            assert_eq!(part.len().unwrap(), 2_001);
            part.flush().unwrap();
            part.major_compact().unwrap();
            open_partition(&db, "other").insert("k", "v").unwrap();
            db.checkpoint("/copy").unwrap();
            value.to_vec()
        });
        assert_eq!(value.unwrap().as_deref(), Some(&b"v"[..]), "the value is that of the start of the call");
        assert_eq!(part.get("k").unwrap().as_deref(), Some(&b"new"[..]));
        db.close().unwrap();
    });
}

#[test]
fn get_with_closure_may_delete_its_partition() {
    on_every_tree("deleting", |db, part| {
        let found = part.get_with("k", |value| {
            db.delete_partition(part.clone()).unwrap();
            value.to_vec()
        });
        assert!(matches!(&found, Ok(Some(value)) if value == b"v") || error_kind(found) == ErrorKind::Closed);
        assert_eq!(error_kind(part.get("k")), ErrorKind::Closed);
        db.close().unwrap();
    });
}

#[test]
fn get_with_closure_may_close_the_database() {
    on_every_tree("closing", |db, part| {
        let found = part.get_with("k", |value| {
            db.clone().close().unwrap();
            value.to_vec()
        });
        assert_eq!(error_kind(found), ErrorKind::Closed);
    });
}

#[test]
fn get_with_closure_may_panic() {
    on_every_tree("panicking", |db, part| {
        let panic = catch_unwind(AssertUnwindSafe(|| part.get_with("k", |_| panic!("a closure panics"))));
        assert!(panic.is_err());
        part.insert("k", "new").unwrap();
        part.flush().unwrap();
        assert_eq!(part.get_with("k", <[u8]>::to_vec).unwrap().as_deref(), Some(&b"new"[..]));
        assert!(!db.metrics().poisoned, "the database did not run the closure on a thread of its own");
        db.close().unwrap();
    });
}
