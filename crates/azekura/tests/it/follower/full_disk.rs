//! A follower reads a commit whose write fails, because a file system that does not overwrite in place is full.

use std::io;
use std::sync::{Arc, Mutex};

use azekura::fs::{File, Mapping};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind};
use azekura::{Batch, Error, ErrorKind, Partition, Result};

use super::faults::{config, partition, text};
use super::open_hook::OpenHookFs;
use super::windows::recycle_the_log;
use crate::pools::pool_options;

type WriteHook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// A file of the log. Once a hook is set, the next write is made, calls the hook, and fails as on a full disk, as if
/// only a later part of it had failed.
struct FullDiskFile {
    inner: Arc<dyn File>,
    hook: WriteHook,
}

impl std::fmt::Debug for FullDiskFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FullDiskFile")
    }
}

impl File for FullDiskFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.inner.write_at(bytes, offset)?;
        let hook = self.hook.lock().unwrap().take();
        hook.map_or(Ok(()), |hook| {
            hook();
            Err(Error::io("write", &io::Error::from(io::ErrorKind::StorageFull)))
        })
    }
    fn length(&self) -> Result<u64> {
        self.inner.length()
    }
    fn set_length(&self, len: u64) -> Result<()> {
        self.inner.set_length(len)
    }
    fn allocate(&self, len: u64) -> Result<()> {
        self.inner.allocate(len)
    }
    fn sync_data(&self) -> Result<()> {
        self.inner.sync_data()
    }
    fn sync_all(&self) -> Result<()> {
        self.inner.sync_all()
    }
    fn map(&self, _: u64) -> Result<Option<Box<dyn Mapping>>> {
        Ok(None)
    }
}

/// Regression: a follower showed such a commit, and then took other ones with the same sequence numbers for it. It went
/// on without an error: a pool kept the value that was never committed.
#[test]
fn a_commit_that_failed_was_read() {
    for (is_held, later_key) in [(false, "k"), (true, "k"), (false, "other"), (true, "other")] {
        check_failed_commit(is_held, later_key, &|batch, part| batch.insert(part, "k", "failed"));
    }
}

/// Regression: a pool had removed the key, and got it back when the database was read again. It still had the old
/// record for readers up to the number of the removal, so those behind it missed the key when it was removed later.
#[test]
fn a_removal_that_failed_was_read() {
    for (is_held, is_range) in [(false, false), (false, true), (true, false), (true, true)] {
        check_failed_commit(is_held, "other", &|batch, part| {
            match is_range {
                true => batch.remove_range(part, "k"..="k"),
                false => batch.remove(part, "k"),
            }
            batch.insert(part, "x", "failed"); // a commit that only removes uses the reserve
        });
    }
}

/// A commit in two partitions fails when a follower has read it, and is held there or not. One with `later_key` gets
/// its sequence numbers.
fn check_failed_commit(is_held: bool, later_key: &str, fails: &dyn Fn(&mut Batch, &Partition)) {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let hook = WriteHook::default();
    let failing = Arc::clone(&hook);
    let full = OpenHookFs::new(machine).copying_on_write(move |path, inner| {
        match path.extension().is_some_and(|ending| ending == "wal") {
            true => Arc::new(FullDiskFile { inner, hook: Arc::clone(&failing) }),
            false => inner,
        }
    });
    let writer = config(Arc::new(full)).open().unwrap();
    let (p, q) = (partition(&writer, "p"), writer.open_partition("q", pool_options(8 << 20)).unwrap());
    [&p, &q].iter().for_each(|part| part.insert("k", "old").unwrap());
    let follower = config(Arc::new(faults.clone())).open_follower().unwrap();
    if is_held {
        p.ingest([("i", "ingested")]).unwrap();
        let eio = Fault::Error(io::ErrorKind::Other);
        faults.inject(FaultPlan::new(OpKind::Open, 1, eio).in_path(".sst").forever());
    }
    let commit = |change: &dyn Fn(&mut Batch, &Partition)| {
        let mut batch = writer.batch();
        [&p, &q].iter().for_each(|part| change(&mut batch, part));
        batch.commit()
    };
    let reader = follower.clone();
    *hook.lock().unwrap() = Some(Box::new(move || {
        std::thread::scope(|scope| {
            let caught_up = scope.spawn(|| reader.catch_up().is_ok()).join().unwrap();
            assert_eq!(caught_up, !is_held);
        });
    }));
    assert_eq!(commit(fails).unwrap_err().kind(), ErrorKind::OutOfSpace);
    let followed = ["p", "q"].map(|name| follower.partition(name).unwrap());
    let shown = followed.each_ref().map(|part| text(part, "k"));
    assert_eq!(shown == ["old"; 2].map(|old| Some(old.into())), is_held, "{shown:?}");
    commit(&|batch, part| batch.insert(part, later_key, "committed")).unwrap();
    (0..3).for_each(|n| p.insert("later", n.to_string()).unwrap());
    if later_key == "other" {
        recycle_the_log(&writer); // the follower finds no segment that tells what has failed
    }
    faults.clear_faults();
    for _ in 0..2 {
        let caught_up = follower.catch_up().map_err(|error| error.kind());
        assert_eq!(caught_up, Err(ErrorKind::Stale), "held: {is_held}, {later_key}");
    }
    let follower = config(Arc::new(faults)).open_follower().unwrap();
    let followed = ["p", "q"].map(|name| text(&follower.partition(name).unwrap(), later_key).unwrap());
    assert_eq!(followed, ["committed"; 2]);
}
