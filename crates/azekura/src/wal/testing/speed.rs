//! Measurements of the WAL on the machine that runs them.
//!
//! `cargo test --release -p azekura --lib wal::testing::speed -- --ignored --nocapture`; the files go to
//! `target/wal-speed`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Result, SeqNo};
use crate::vfs::disk::DiskFs;
use crate::vfs::env::SystemEnv;
use crate::vfs::{Env, Fs};
use crate::wal::testing::{DATABASE, wal_options};
use crate::wal::{Wal, WalCallbacks, WalCommit, WalReplayOptions, WalReplayReport, replay};

struct BenchWalCallbacks(AtomicU64);

impl WalCallbacks for BenchWalCallbacks {
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)> {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        Ok((WalEpoch(n as u32), FileNumber(n)))
    }

    fn add_segment_to_manifest(&self, _: WalEpoch, _: FileNumber) -> Result<()> {
        Ok(())
    }

    fn sync_dependencies(&self) -> Result<()> {
        Ok(())
    }
}

/// Nanoseconds per commit of 140 bytes: the minimum and the median of batches of 1,000.
fn time_appends(wal: &Wal, env: &SystemEnv, batches: usize, group: usize) -> (f64, f64) {
    let commit = WalCommit { first_seqno: SeqNo(0), seqno_count: 1, payload: &[7; 140] };
    let mut commits = vec![commit; group];
    let mut took: Vec<f64> = (0..batches)
        .map(|_| {
            let began = env.monotonic_ns();
            for _ in 0..1000 / group {
                let first = wal.appended().0 + 1;
                commits.iter_mut().enumerate().for_each(|(i, commit)| commit.first_seqno = SeqNo(first + i as u64));
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
        let host = Arc::new(BenchWalCallbacks(AtomicU64::new(1)));
        let world = Arc::clone(&env) as Arc<dyn Env>;
        let none = WalReplayReport::default();
        let wal =
            Wal::start(Arc::clone(&fs), &dir, world, DATABASE, wal_options(32 << 20, mapped), host, &none, SeqNo(1))
                .unwrap();
        let show = |what: &str, (best, median): (f64, f64)| {
            eprintln!("mapped {mapped}: {what}: best {best:.0} ns, median {median:.0} ns");
        };
        show("append of 140 bytes, fresh file", time_appends(&wal, &env, 400, 1));
        wal.sync(wal.appended(), false).unwrap();
        wal.recycle(&wal.retire(wal.appended()).unwrap()).unwrap();
        wal.seal().unwrap();
        show("append of 140 bytes, recycled file", time_appends(&wal, &env, 150, 1));
        show("commit in a group of 20", time_appends(&wal, &env, 150, 20));
        let began = env.monotonic_ns();
        for _ in 0..100 {
            time_appends(&wal, &env, 1, 1000);
            wal.sync(wal.appended(), false).unwrap();
        }
        eprintln!("mapped {mapped}: 1000 commits and a sync: {} us", (env.monotonic_ns() - began) / 100_000);
        let live = wal.segments().iter().map(|info| (info.epoch, info.file)).collect();
        let bytes = wal.live_bytes();
        drop(wal);
        let began = env.monotonic_ns();
        let options = WalReplayOptions { listed_segments: live, ..WalReplayOptions::default() };
        let replayed = replay(Arc::clone(&fs), &dir, DATABASE, options, &mut |_| Ok(None)).unwrap();
        let ns = (env.monotonic_ns() - began) as f64;
        let commits = replayed.commits;
        eprintln!("mapped {mapped}: replay of {commits} commits at {:.2} GB/s", bytes as f64 / ns);
    }
    drop(fs.remove_dir_all(&dir));
}
