//! Figures of the log on the machine it runs on.
//!
//! `cargo test --release -p azekura --lib wal::testing::speed -- --ignored --nocapture`; the files go to
//! `target/wal-speed`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::edit::{Epoch, FileId};
use crate::base::{Result, SeqNo};
use crate::vfs::disk::DiskFs;
use crate::vfs::env::SystemEnv;
use crate::vfs::{Env, Fs};
use crate::wal::testing::{DATABASE, options};
use crate::wal::{LogCommit, ReplayOptions, ReplayReport, Wal, WalHost, replay};

struct Numbers(AtomicU64);

impl WalHost for Numbers {
    fn new_segment(&self) -> Result<(Epoch, FileId)> {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        Ok((Epoch(n as u32), FileId(n)))
    }

    fn segment_added(&self, _: Epoch, _: FileId) -> Result<()> {
        Ok(())
    }

    fn before_sync(&self) -> Result<()> {
        Ok(())
    }
}

/// Nanoseconds per commit of 140 bytes: the best and the median of batches of a thousand.
fn append(wal: &Wal, env: &SystemEnv, batches: usize, group: usize) -> (f64, f64) {
    let commit = LogCommit { first: SeqNo(0), count: 1, payload: &[7; 140] };
    let mut commits = vec![commit; group];
    let mut took: Vec<f64> = (0..batches)
        .map(|_| {
            let began = env.monotonic_ns();
            for _ in 0..1000 / group {
                let first = wal.appended().0 + 1;
                commits.iter_mut().enumerate().for_each(|(i, commit)| commit.first = SeqNo(first + i as u64));
                wal.append(&commits).unwrap();
            }
            (env.monotonic_ns() - began) as f64 / (1000 / group * group) as f64
        })
        .collect();
    took.sort_by(f64::total_cmp);
    (took[0], took[batches / 2])
}

#[test]
#[ignore = "prints figures; run with --release"]
fn append_sync_and_replay() {
    let env = Arc::new(SystemEnv::new());
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/wal-speed");
    for mapped in [true, false] {
        drop(fs.remove_dir_all(&dir));
        fs.create_dir_all(&dir).unwrap();
        let host = Arc::new(Numbers(AtomicU64::new(1)));
        let world = Arc::clone(&env) as Arc<dyn Env>;
        let none = ReplayReport::default();
        let wal = Wal::start(Arc::clone(&fs), &dir, world, DATABASE, options(32 << 20, mapped), host, &none, SeqNo(1))
            .unwrap();
        let show = |what: &str, (best, median): (f64, f64)| {
            eprintln!("mapped {mapped}: {what}: best {best:.0} ns, median {median:.0} ns");
        };
        show("append of 140 bytes, fresh file", append(&wal, &env, 400, 1));
        wal.sync(wal.appended(), false).unwrap();
        wal.recycle(&wal.retire(wal.appended()).unwrap()).unwrap();
        wal.seal().unwrap();
        show("append of 140 bytes, recycled file", append(&wal, &env, 150, 1));
        show("commit in a group of 20", append(&wal, &env, 150, 20));
        let began = env.monotonic_ns();
        for _ in 0..100 {
            append(&wal, &env, 1, 1000);
            wal.sync(wal.appended(), false).unwrap();
        }
        eprintln!("mapped {mapped}: 1000 commits and a sync: {} us", (env.monotonic_ns() - began) / 100_000);
        let live = wal.segments().iter().map(|info| (info.epoch, info.file)).collect();
        let bytes = wal.live_bytes();
        drop(wal);
        let began = env.monotonic_ns();
        let options = ReplayOptions { live, ..ReplayOptions::default() };
        let replayed = replay(Arc::clone(&fs), &dir, DATABASE, options, &mut |_| Ok(None)).unwrap();
        let ns = (env.monotonic_ns() - began) as f64;
        let commits = replayed.commits;
        eprintln!("mapped {mapped}: replay of {commits} commits at {:.2} GB/s", bytes as f64 / ns);
    }
    drop(fs.remove_dir_all(&dir));
}
