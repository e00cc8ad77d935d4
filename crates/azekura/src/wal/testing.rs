//! A database of nothing but a log and a recorder, for the tests of this folder.
//!
//! Rooms: [`recorder`] (what the host is told), [`speed`] (figures).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::edit::{Epoch, FileId};
use crate::base::{Error, Result, SeqNo};
use crate::vfs::dice::Dice;
use crate::vfs::env::{SystemEnv, TestEnv};
use crate::vfs::{Env, Fs, OpenMode};
use crate::wal::{
    LogCommit, Mark, RecoveryMode, ReplayOptions, ReplayReport, Wal, WalHost, WalOptions, format::segment_path, replay,
};

use crate::wal::testing::recorder::{Note, Recorder};

mod recorder;
mod speed;

pub(crate) const DATABASE: [u8; 16] = [0xdb; 16];

/// A commit that is owned.
pub(crate) type Commit = (u64, u32, Vec<u8>);

pub(crate) fn dir() -> &'static Path {
    Path::new("/")
}

/// The log's host.
pub(crate) struct Host {
    recorder: Recorder,
    next: AtomicU64,
    live: Mutex<BTreeMap<Epoch, FileId>>,
    pub(crate) before_syncs: AtomicU64,
    /// How long a sync takes, in microseconds of real time.
    pub(crate) pause_us: AtomicU64,
}

impl WalHost for Host {
    fn new_segment(&self) -> Result<(Epoch, FileId)> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        Ok((Epoch(next as u32), FileId(next)))
    }

    fn segment_added(&self, epoch: Epoch, file: FileId) -> Result<()> {
        self.recorder.append(&[Note::Added(epoch, file)])?;
        self.live.lock().unwrap().insert(epoch, file);
        Ok(())
    }

    fn before_sync(&self) -> Result<()> {
        self.before_syncs.fetch_add(1, Ordering::Relaxed);
        let pause = self.pause_us.load(Ordering::Relaxed);
        if pause > 0 {
            SystemEnv::new().sleep(Duration::from_micros(pause));
        }
        self.recorder.sync()
    }
}

/// What the recorder says of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) live: BTreeMap<Epoch, FileId>,
    pub(crate) log_end: Option<(Epoch, SeqNo)>,
    pub(crate) next: u64,
}

pub(crate) fn known(fs: &Arc<dyn Fs>) -> Result<Known> {
    let mut known = Known { next: 1, ..Known::default() };
    for note in Recorder::load(fs, dir())? {
        match note {
            Note::Added(epoch, file) => {
                known.next = known.next.max(u64::from(epoch.0) + 1).max(file.0 + 1);
                known.live.insert(epoch, file);
            }
            Note::Retired(epoch) => drop(known.live.remove(&epoch)),
            Note::End(epoch, seqno) => known.log_end = Some((epoch, seqno)),
        }
    }
    for entry in fs.read_dir(dir())? {
        if let Some(file) = crate::wal::format::parse_name(&entry.name) {
            known.next = known.next.max(file.0 + 1);
        }
    }
    Ok(known)
}

/// Reads the log as `mode` does.
pub(crate) fn read(fs: &Arc<dyn Fs>, mode: RecoveryMode) -> Result<(Vec<Commit>, ReplayReport)> {
    read_from(fs, mode, SeqNo::ZERO, u64::MAX)
}

pub(crate) fn read_from(
    fs: &Arc<dyn Fs>,
    mode: RecoveryMode,
    from: SeqNo,
    refuse_at: u64,
) -> Result<(Vec<Commit>, ReplayReport)> {
    let known = known(fs)?;
    let live = known.live.into_iter().collect();
    let durable = Mark { seqno: from, partition: "partition \"a\"".into() };
    let options = ReplayOptions { mode, live, log_end: known.log_end, from, durable, ..ReplayOptions::default() };
    let mut commits = Vec::new();
    let report = replay(Arc::clone(fs), dir(), DATABASE, options, &mut |commit| {
        if commit.first.0 >= refuse_at {
            return Ok(Some(Error::corruption("refused").in_file(dir().join("MANIFEST"))));
        }
        commits.push((commit.first.0, commit.count, commit.payload.to_vec()));
        Ok(None)
    })?;
    assert_eq!(report.commits, commits.len() as u64);
    Ok((commits, report))
}

pub(crate) struct Mini {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) host: Arc<Host>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) replayed: Vec<Commit>,
}

pub(crate) fn options(segment_size: u64, mapped: bool) -> WalOptions {
    WalOptions { segment_size, mapped, marks: true }
}

impl Mini {
    pub(crate) fn open(fs: Arc<dyn Fs>, options: WalOptions, seed: u64) -> Result<Mini> {
        Mini::open_as(fs, options, seed, RecoveryMode::Strict, u64::MAX)
    }

    /// Opens in another world than the one of tests.
    pub(crate) fn open_in(fs: Arc<dyn Fs>, options: WalOptions, env: Arc<dyn Env>) -> Result<Mini> {
        let (replayed, report) = read(&fs, RecoveryMode::Strict)?;
        Mini::start(fs, options, env, replayed, report)
    }

    pub(crate) fn open_as(
        fs: Arc<dyn Fs>,
        options: WalOptions,
        seed: u64,
        mode: RecoveryMode,
        refuse_at: u64,
    ) -> Result<Mini> {
        let env: Arc<dyn Env> = Arc::new(TestEnv::new(seed));
        let (replayed, report) = read_from(&fs, mode, SeqNo::ZERO, refuse_at)?;
        Mini::start(fs, options, env, replayed, report)
    }

    fn start(
        fs: Arc<dyn Fs>,
        options: WalOptions,
        env: Arc<dyn Env>,
        replayed: Vec<Commit>,
        report: ReplayReport,
    ) -> Result<Mini> {
        let next = known(&fs)?.next;
        for info in &report.segments {
            fs.open(&segment_path(dir(), info.file), OpenMode::Write)?.sync_data()?;
        }
        let listed = report.segments.iter().map(|info| Note::Added(info.epoch, info.file));
        let notes: Vec<Note> = listed
            .chain([{
                let (epoch, seqno) = report.log_end();
                Note::End(epoch, seqno)
            }])
            .collect();
        let recorder = Recorder::create(&fs, dir(), &notes)?;
        let live = report.segments.iter().map(|info| (info.epoch, info.file)).collect();
        let host = Arc::new(Host {
            recorder,
            next: AtomicU64::new(next),
            live: Mutex::new(live),
            before_syncs: AtomicU64::new(0),
            pause_us: AtomicU64::new(0),
        });
        let wal = Wal::start(
            Arc::clone(&fs),
            dir(),
            env,
            DATABASE,
            options,
            Arc::clone(&host) as Arc<dyn WalHost>,
            &report,
            report.last.plus(1),
        )?;
        wal.begin_first()?;
        Ok(Mini { fs, host, wal: Arc::new(wal), replayed })
    }

    /// Appends one commit with what comes next.
    pub(crate) fn append(&self, count: u32, payload: &[u8]) -> Result<Commit> {
        let first = self.wal.appended().plus(1);
        self.wal.append(&[LogCommit { first, count, payload }])?;
        Ok((first.0, count, payload.to_vec()))
    }

    pub(crate) fn sync(&self) {
        self.wal.sync(self.wal.appended(), false).unwrap();
    }

    /// What a flush of everything up to `through` does to the log.
    pub(crate) fn retire(&self, through: SeqNo) -> Result<usize> {
        let epochs = self.wal.retire(through)?;
        let notes: Vec<Note> = epochs.iter().map(|epoch| Note::Retired(*epoch)).collect();
        self.host.recorder.append(&notes)?;
        self.host.recorder.sync()?;
        for epoch in &epochs {
            self.host.live.lock().unwrap().remove(epoch);
        }
        self.wal.recycle(&epochs)?;
        Ok(epochs.len())
    }

    pub(crate) fn path(&self, segment: usize) -> PathBuf {
        segment_path(dir(), self.wal.segments()[segment].file)
    }
}

/// A payload that says who it is.
pub(crate) fn payload(dice: &mut Dice, len: usize) -> Vec<u8> {
    let mut out = vec![dice.throw() as u8; len];
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = byte.wrapping_add((i as u8).wrapping_mul(31));
    }
    out
}

/// A length that is often small, sometimes nothing, and sometimes longer than a small segment.
pub(crate) fn length(dice: &mut Dice) -> usize {
    match dice.below(12) {
        0 => 0,
        1 => dice.below(20_000),
        2 => dice.below(3_000),
        _ => dice.below(200),
    }
}

pub(crate) fn file_bytes(fs: &Arc<dyn Fs>, path: &Path) -> Vec<u8> {
    let file = fs.open(path, OpenMode::Read).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

pub(crate) fn overwrite(fs: &Arc<dyn Fs>, path: &Path, offset: u64, bytes: &[u8]) {
    fs.open(path, OpenMode::Write).unwrap().write_at(bytes, offset).unwrap();
}

/// Flips all bits of one byte.
pub(crate) fn flip(fs: &Arc<dyn Fs>, path: &Path, offset: u64) {
    let file = fs.open(path, OpenMode::Write).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_at(&[!byte[0]], offset).unwrap();
}
