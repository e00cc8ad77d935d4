//! Figures of the log on the machine it runs on: `cargo test --release -p azekura --lib wal::speed -- --ignored --nocapture`.

use std::path::Path;
use std::sync::Arc;

use crate::base::SeqNo;
use crate::vfs::disk::DiskFs;
use crate::vfs::env::SystemEnv;
use crate::vfs::{Env, Fs};
use crate::wal::testing::{DATABASE, options};
use crate::wal::{LogCommit, ReplayOptions, ReplayReport, Wal, WalHost, WalOptions, replay};

struct Numbers(std::sync::atomic::AtomicU64);

impl WalHost for Numbers {
    fn new_segment(&self) -> crate::base::Result<(crate::base::edit::Epoch, crate::base::edit::FileId)> {
        let n = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok((crate::base::edit::Epoch(n as u32), crate::base::edit::FileId(n)))
    }

    fn segment_added(&self, _: crate::base::edit::Epoch, _: crate::base::edit::FileId) -> crate::base::Result<()> {
        Ok(())
    }

    fn before_sync(&self) -> crate::base::Result<()> {
        Ok(())
    }
}

fn start(dir: &Path, options: WalOptions) -> Wal {
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let (env, host) = (Arc::new(SystemEnv::new()), Arc::new(Numbers(1.into())));
    Wal::start(fs, dir, env, DATABASE, options, host, &ReplayReport::default(), SeqNo(1)).unwrap()
}

fn report(what: &str, env: &SystemEnv, began: u64, n: u64) {
    eprintln!("{what}: {:.1} ns each", (env.monotonic_ns() - began) as f64 / n as f64);
}

#[test]
#[ignore = "prints figures; run with --release"]
fn append_sync_and_replay() {
    let env = SystemEnv::new();
    let payload = [7u8; 140];
    for mapped in [true, false] {
        let temporary = tempfile::tempdir().unwrap();
        let wal = start(temporary.path(), options(64 << 20, mapped));
        for round in 0..3 {
            let (n, began) = (300_000, env.monotonic_ns());
            for _ in 0..n {
                wal.append(&[LogCommit { first: wal.appended().plus(1), count: 1, payload: &payload }]).unwrap();
            }
            report(&format!("mapped {mapped} round {round}: append of 140 bytes"), &env, began, n);
        }
        let (n, began) = (20_000, env.monotonic_ns());
        for _ in 0..n {
            let first = wal.appended().0 + 1;
            let group: [_; 16] =
                std::array::from_fn(|i| LogCommit { first: SeqNo(first + i as u64), count: 1, payload: &payload });
            wal.append(&group).unwrap();
        }
        report(&format!("mapped {mapped}: commit in a group of 16"), &env, began, n * 16);
        let (n, began) = (200, env.monotonic_ns());
        for _ in 0..n {
            wal.append(&[LogCommit { first: wal.appended().plus(1), count: 1, payload: &payload }]).unwrap();
            wal.sync(wal.appended(), false).unwrap();
        }
        report(&format!("mapped {mapped}: append and sync"), &env, began, n);
        let live = wal.segments().iter().map(|info| (info.epoch, info.file)).collect();
        let (bytes, commits) = (wal.live_bytes(), wal.stats().commits);
        drop(wal);
        let began = env.monotonic_ns();
        let options = ReplayOptions { live, ..ReplayOptions::default() };
        let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
        let replayed = replay(fs, temporary.path(), DATABASE, options, &mut |_| Ok(true)).unwrap();
        assert_eq!(replayed.commits, commits);
        let ns = (env.monotonic_ns() - began) as f64;
        eprintln!("mapped {mapped}: replay of {} MB at {:.2} GB/s", bytes >> 20, bytes as f64 / ns);
    }
}
