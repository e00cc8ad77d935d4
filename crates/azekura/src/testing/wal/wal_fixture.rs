//! The database: it opens a WAL, replays it, and records its callbacks in a manifest. Damages files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, Result, SeqNo};
use crate::testing::TestEnv;
use crate::testing::seeded_rng::SeededRng;
use crate::testing::wal::test_manifest::{TestManifest, TestManifestEdit};
use crate::vfs::env::SystemEnv;
use crate::vfs::{Env, Fs, OpenMode};
use crate::wal::{
    PartitionSeqno, RecoveryMode, Wal, WalCallbacks, WalCommit, WalOptions, WalReplayOptions, WalReplayReport,
    WalRetention, format::segment_path, replay,
};

pub(crate) const DATABASE: [u8; 16] = [0xdb; 16];

/// First sequence number, count and payload of a commit.
pub(crate) type OwnedWalCommit = (u64, u32, Vec<u8>);

pub(crate) fn dir() -> &'static Path {
    Path::new("/")
}

/// The callbacks of the WAL.
pub(crate) struct TestWalCallbacks {
    manifest: TestManifest,
    next_id: AtomicU64,
    listed_segments: Mutex<BTreeMap<WalEpoch, FileNumber>>,
    pub(crate) sync_dependencies_calls: AtomicU64,
    /// Duration of a sync, in microseconds of real time.
    pub(crate) sync_delay_us: AtomicU64,
    /// Called once, in the next sync.
    pub(crate) call_in_sync: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl WalCallbacks for TestWalCallbacks {
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)> {
        let next = self.next_id.fetch_add(1, Ordering::Relaxed);
        Ok((WalEpoch(next as u32), FileNumber(next)))
    }

    fn add_segment_to_manifest(&self, epoch: WalEpoch, file: FileNumber) -> Result<()> {
        self.manifest.append(&[TestManifestEdit::SegmentAdded(epoch, file)])?;
        self.listed_segments.lock().unwrap().insert(epoch, file);
        Ok(())
    }

    fn end_wal_in_manifest(&self, epoch: WalEpoch, seqno: SeqNo) -> Result<()> {
        self.manifest.append(&[TestManifestEdit::WalEnd(epoch, seqno)])?;
        self.manifest.sync()
    }

    fn sync_dependencies(&self) -> Result<()> {
        self.sync_dependencies_calls.fetch_add(1, Ordering::Relaxed);
        let pause = self.sync_delay_us.load(Ordering::Relaxed);
        if pause > 0 {
            SystemEnv::new().sleep(Duration::from_micros(pause));
        }
        let call = self.call_in_sync.lock().unwrap().take();
        call.into_iter().for_each(|call| call());
        self.manifest.sync()
    }
}

/// The state of the WAL that the test manifest records.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestManifestState {
    pub(crate) listed_segments: BTreeMap<WalEpoch, FileNumber>,
    pub(crate) wal_end: Option<(WalEpoch, SeqNo)>,
    pub(crate) next_id: u64,
}

pub(crate) fn load_manifest_state(fs: &Arc<dyn Fs>) -> Result<TestManifestState> {
    let mut known = TestManifestState { next_id: 1, ..TestManifestState::default() };
    for note in TestManifest::load(fs, dir())? {
        match note {
            TestManifestEdit::SegmentAdded(epoch, file) => {
                known.next_id = known.next_id.max(u64::from(epoch.0) + 1).max(file.0 + 1);
                known.listed_segments.insert(epoch, file);
            }
            TestManifestEdit::SegmentRetired(epoch) => drop(known.listed_segments.remove(&epoch)),
            TestManifestEdit::WalEnd(epoch, seqno) => known.wal_end = Some((epoch, seqno)),
        }
    }
    for entry in fs.read_dir(dir())? {
        if let Some(file) = crate::wal::format::parse_segment_name(&entry.name) {
            known.next_id = known.next_id.max(file.0 + 1);
        }
    }
    Ok(known)
}

/// Replays the WAL in `mode`.
pub(crate) fn replay_with_mode(fs: &Arc<dyn Fs>, mode: RecoveryMode) -> Result<(Vec<OwnedWalCommit>, WalReplayReport)> {
    replay_from(fs, mode, SeqNo::ZERO, u64::MAX)
}

pub(crate) fn replay_from(
    fs: &Arc<dyn Fs>,
    mode: RecoveryMode,
    from: SeqNo,
    refuse_at: u64,
) -> Result<(Vec<OwnedWalCommit>, WalReplayReport)> {
    let known = load_manifest_state(fs)?;
    let live = known.listed_segments.into_iter().collect();
    let durable = PartitionSeqno { seqno: from, partition: "partition \"a\"".into() };
    let options = WalReplayOptions {
        mode,
        listed_segments: live,
        wal_end: known.wal_end,
        flushed_through: from,
        durable_through: durable,
        ..WalReplayOptions::default()
    };
    replay_with_options(fs, DATABASE, options, refuse_at)
}

/// Replays the WAL, and refuses the first commit from the sequence number `refuse_at` on.
pub(crate) fn replay_with_options(
    fs: &Arc<dyn Fs>,
    database: [u8; 16],
    options: WalReplayOptions,
    refuse_at: u64,
) -> Result<(Vec<OwnedWalCommit>, WalReplayReport)> {
    let mut commits = Vec::new();
    let report = replay(Arc::clone(fs), dir(), database, options, &mut |commit| {
        if commit.first_seqno.0 >= refuse_at {
            return Ok(Some(Error::corruption("refused").in_file(dir().join("MANIFEST"))));
        }
        commits.push((commit.first_seqno.0, commit.seqno_count, commit.payload.to_vec()));
        Ok(None)
    })?;
    assert_eq!(report.commits, commits.len() as u64);
    Ok((commits, report))
}

pub(crate) struct WalFixture {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) callbacks: Arc<TestWalCallbacks>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) replayed: Vec<OwnedWalCommit>,
}

pub(crate) fn wal_options(segment_size: u64, mapped: bool) -> WalOptions {
    WalOptions { segment_size, mapped, populates_ahead: false, marks: true }
}

impl WalFixture {
    pub(crate) fn open(fs: Arc<dyn Fs>, options: WalOptions, seed: u64) -> Result<WalFixture> {
        WalFixture::open_with_mode(fs, options, seed, RecoveryMode::Strict, u64::MAX)
    }

    /// Opens with another environment than the test environment.
    pub(crate) fn open_with_env(fs: Arc<dyn Fs>, options: WalOptions, env: Arc<dyn Env>) -> Result<WalFixture> {
        let (replayed, report) = replay_with_mode(&fs, RecoveryMode::Strict)?;
        WalFixture::start(fs, options, env, replayed, report)
    }

    pub(crate) fn open_with_mode(
        fs: Arc<dyn Fs>,
        options: WalOptions,
        seed: u64,
        mode: RecoveryMode,
        refuse_at: u64,
    ) -> Result<WalFixture> {
        let env: Arc<dyn Env> = Arc::new(TestEnv::new(seed));
        let (replayed, report) = replay_from(&fs, mode, SeqNo::ZERO, refuse_at)?;
        WalFixture::start(fs, options, env, replayed, report)
    }

    fn start(
        fs: Arc<dyn Fs>,
        options: WalOptions,
        env: Arc<dyn Env>,
        replayed: Vec<OwnedWalCommit>,
        report: WalReplayReport,
    ) -> Result<WalFixture> {
        let next = load_manifest_state(&fs)?.next_id;
        for info in &report.segments {
            fs.open(&segment_path(dir(), info.file), OpenMode::Write)?.sync_data()?;
        }
        let listed = report.segments.iter().map(|info| TestManifestEdit::SegmentAdded(info.epoch, info.file));
        let notes: Vec<TestManifestEdit> = listed
            .chain([{
                let (epoch, seqno) = report.wal_end();
                TestManifestEdit::WalEnd(epoch, seqno)
            }])
            .collect();
        let recorder = TestManifest::create(&fs, dir(), &notes)?;
        let live = report.segments.iter().map(|info| (info.epoch, info.file)).collect();
        let host = Arc::new(TestWalCallbacks {
            manifest: recorder,
            next_id: AtomicU64::new(next),
            listed_segments: Mutex::new(live),
            sync_dependencies_calls: AtomicU64::new(0),
            sync_delay_us: AtomicU64::new(0),
            call_in_sync: Mutex::new(None),
        });
        let wal = Wal::start(
            Arc::clone(&fs),
            dir(),
            env,
            DATABASE,
            options,
            Arc::clone(&host) as Arc<dyn WalCallbacks>,
            &report,
            report.last_seqno.plus(1),
        )?;
        wal.start_first_segment()?;
        Ok(WalFixture { fs, callbacks: host, wal: Arc::new(wal), replayed })
    }

    /// Appends one commit with the next sequence numbers.
    pub(crate) fn append(&self, count: u32, payload: &[u8]) -> Result<OwnedWalCommit> {
        let first = self.wal.appended().plus(1);
        self.wal.append(&[WalCommit { first_seqno: first, seqno_count: count, payload }])?;
        Ok((first.0, count, payload.to_vec()))
    }

    pub(crate) fn sync(&self) {
        self.wal.sync(self.wal.appended(), false).unwrap();
    }

    /// Retires segments as a flush of all records up to `through` does. Returns how many.
    pub(crate) fn retire(&self, through: SeqNo) -> Result<usize> {
        self.retire_unless_retained(through, WalRetention::default)
    }

    /// As [`retire`](Self::retire), except for segments that are kept for readers of changes.
    pub(crate) fn retire_unless_retained(
        &self,
        through: SeqNo,
        retention: impl FnOnce() -> WalRetention,
    ) -> Result<usize> {
        let epochs = self.wal.retire(through, retention)?;
        let notes: Vec<TestManifestEdit> =
            epochs.iter().map(|epoch| TestManifestEdit::SegmentRetired(*epoch)).collect();
        self.callbacks.manifest.append(&notes)?;
        self.callbacks.manifest.sync()?;
        for epoch in &epochs {
            self.callbacks.listed_segments.lock().unwrap().remove(epoch);
        }
        self.wal.recycle(&epochs)?;
        Ok(epochs.len())
    }

    pub(crate) fn segment_path_at(&self, segment: usize) -> PathBuf {
        segment_path(dir(), self.wal.segments()[segment].file)
    }
}

/// A payload that identifies its commit.
pub(crate) fn random_payload(rng: &mut SeededRng, len: usize) -> Vec<u8> {
    let mut out = vec![rng.next_u64() as u8; len];
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = byte.wrapping_add((i as u8).wrapping_mul(31));
    }
    out
}

/// A random length that is often small, sometimes 0, and sometimes larger than a small segment.
pub(crate) fn random_length(rng: &mut SeededRng) -> usize {
    match rng.below(12) {
        0 => 0,
        1 => rng.below(20_000),
        2 => rng.below(3_000),
        _ => rng.below(200),
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
pub(crate) fn flip_byte(fs: &Arc<dyn Fs>, path: &Path, offset: u64) {
    let file = fs.open(path, OpenMode::Write).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_at(&[!byte[0]], offset).unwrap();
}

/// A log of five synced commits, of which the second is damaged and the first three are flushed. The search for the
/// end of the damage reads the file again.
pub(crate) fn wal_with_flushed_damage(fs: &Arc<dyn Fs>) {
    let fixture = WalFixture::open(Arc::clone(fs), wal_options(16 << 20, false), 1).unwrap();
    for len in [60, 2 << 20, 60, 60, 60] {
        fixture.append(1, &vec![7; len]).unwrap();
    }
    fixture.sync();
    let path = fixture.segment_path_at(0);
    drop(fixture);
    flip_byte(fs, &path, 1 << 20);
}
