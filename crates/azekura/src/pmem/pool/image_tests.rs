//! Checkpoints that are interrupted by power loss, failing devices and damage.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::base::file_format::{FileHeader, FileKind};
use crate::base::version_edit::PartitionId;
use crate::base::{Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::mem::pages::PAGE;
use crate::pmem::leaf::SLOTS;
use crate::pmem::persistence::{PersistenceBackend, PoolImage};
use crate::pmem::pool::image::{ImageStore, LoadedImage, PoolFileKind, parse_pool_file_name};
use crate::pmem::pool::image_format::PAGES_PER_GROUP;
use crate::pmem::pool::pool_recovery::{self, PoolCheckLevel};
use crate::pmem::tree::{PoolOptions, PoolTree};
use crate::testing::seeded_rng::SeededRng;
use crate::testing::{Fault, FaultFs, FaultPlan, OpKind};
use crate::testing::{MemFs, Survival};
use crate::vfs::env::SystemEnv;
use crate::vfs::{Env, Fs, OpenMode};

const DIR: &str = "/db";
const PARTITION: PartitionId = PartitionId(3);
const LEN_MAX: u64 = 1200 * PAGE;

/// One state that the files may contain: the bytes of the image and `replay_from`.
type ImageFileState = (Vec<u8>, u64);

fn open(fs: &Arc<dyn Fs>, never_written: bool, read_only: bool) -> Result<(ImageStore, Option<LoadedImage>)> {
    ImageStore::open(fs, Path::new(DIR), PARTITION, LEN_MAX, never_written, read_only, None)
}

fn bytes_of(image: &PoolImage) -> Vec<u8> {
    let mut bytes = vec![0; image.region().len() as usize];
    image.region().read(0, &mut bytes);
    bytes
}

fn state_of(loaded: &LoadedImage) -> ImageFileState {
    assert_eq!(loaded.max_seqno.0, loaded.replay_from.0 + 5);
    (bytes_of(&loaded.image), loaded.replay_from.0)
}

fn directory(fs: &dyn Fs) {
    fs.create_dir_all(Path::new(DIR)).unwrap();
    fs.sync_dir(Path::new("/")).unwrap();
}

/// A file system with the directory, and the same file system as a trait object.
fn fresh() -> (MemFs, Arc<dyn Fs>) {
    let mem = MemFs::new();
    directory(&mem);
    let fs: Arc<dyn Fs> = Arc::new(mem.clone());
    (mem, fs)
}

/// An image that is changed and checkpointed repeatedly, and the states that its files may contain.
struct CheckpointHistory {
    store: ImageStore,
    image: PoolImage,
    rng: SeededRng,
    round: u64,
    last_durable: Option<ImageFileState>,
    in_progress: Option<ImageFileState>,
}

impl CheckpointHistory {
    fn create(fs: &Arc<dyn Fs>, seed: u64) -> Result<CheckpointHistory> {
        let (store, _) = open(fs, true, false)?;
        let image = PoolImage::new(LEN_MAX).unwrap();
        image.grow(3 * PAGE).unwrap();
        image.write(0, &[&FileHeader { kind: FileKind::Pool, file_id: [seed as u8; 16] }.encode()]);
        Ok(CheckpointHistory {
            store,
            image,
            rng: SeededRng::new(seed),
            round: 0,
            last_durable: None,
            in_progress: None,
        })
    }

    fn reopen(fs: &Arc<dyn Fs>, seed: u64) -> CheckpointHistory {
        let (store, loaded) = open(fs, false, false).unwrap();
        let loaded = loaded.unwrap();
        let finished = Some(state_of(&loaded));
        CheckpointHistory {
            store,
            image: loaded.image,
            rng: SeededRng::with_stream(seed, 1),
            round: 1000,
            last_durable: finished,
            in_progress: None,
        }
    }

    fn change(&mut self, count: usize) {
        for _ in 0..count {
            let words = self.image.region().len() as usize / 8 - 8;
            let at = 8 * (8 + self.rng.below(words - 300)) as u64;
            match self.rng.below(8) {
                0 => self.image.write(at, &[&vec![self.rng.next_u64() as u8; 1 + self.rng.below(2000)]]),
                _ => self.image.publish(at, self.rng.next_u64()),
            }
        }
        if self.rng.below(8) == 0 {
            let pages = self.image.region().len() / PAGE;
            let len = (3 + self.rng.below(pages as usize) as u64).min(pages) * PAGE;
            self.image.shrink(len, &self.image.block_growth().unwrap());
        } else if self.rng.below(3) == 0 {
            let more = if self.rng.below(3) == 0 { 600 } else { 2 };
            let _full = self.image.grow(self.image.region().len() + more * PAGE);
        }
    }

    fn checkpoint(&mut self) -> Result<()> {
        self.round += 1;
        let number = self.round;
        let state = (bytes_of(&self.image), number);
        self.in_progress = Some(state.clone());
        let image = &self.image;
        let cut = &mut || SeqNo(number);
        let written = self.store.checkpoint(image, cut, &mut |at| {
            assert_eq!(at, SeqNo(number));
            // This store is made after the pages were copied, so it is not part of this checkpoint.
            image.publish(64, 8 * number);
            Ok(SeqNo(number + 5))
        })?;
        assert!(written.bytes <= 4 * PAGE * (written.pages + 2), "{written:?}");
        (self.last_durable, self.in_progress) = (Some(state), None);
        Ok(())
    }

    /// Makes `rounds` checkpoints, until one fails.
    fn run(&mut self, rounds: usize) -> Result<()> {
        for _ in 0..rounds {
            let count = self.rng.below(12);
            self.change(count);
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Checks that the files on `fs` contain one of the expected states.
    fn assert_recovers(&self, fs: &Arc<dyn Fs>, what: &str) {
        let Some(finished) = &self.last_durable else { return };
        for read_only in [true, false, false] {
            let loaded = open(fs, false, read_only).unwrap_or_else(|error| panic!("{what}: {error}")).1.unwrap();
            let found = state_of(&loaded);
            let known = [Some(finished), self.in_progress.as_ref()].into_iter().flatten().any(|state| *state == found);
            assert!(known, "{what}, read only {read_only}: {} was found, {} was finished", found.1, finished.1);
        }
    }
}

#[test]
fn pool_file_names_round_trip() {
    assert_eq!(PoolFileKind::Pool.name(PARTITION), "p000003.pool");
    assert_eq!(parse_pool_file_name("p000003.shadow"), Some((PARTITION, PoolFileKind::Shadow)));
    assert_eq!(parse_pool_file_name("p1234567.pool"), Some((PartitionId(1_234_567), PoolFileKind::Pool)));
    for name in ["p3.pool", "000003.pool", "p000003.sst", "p000003.pool.tmp", "p+00003.pool", "pool"] {
        assert_eq!(parse_pool_file_name(name), None, "{name}");
    }
}

#[test]
fn image_recovers_after_many_checkpoints() {
    let (_, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 1).unwrap();
    assert_eq!(life.store.disk_bytes(), 0);
    life.store.copy_to(Path::new("/nowhere")).unwrap();
    life.run(40).unwrap();
    life.image.grow(600 * PAGE).unwrap();
    life.checkpoint().unwrap();
    life.assert_recovers(&fs, "after a life");
    assert!(life.image.region().len() > PAGES_PER_GROUP * PAGE, "more than one group");
    assert!(life.store.disk_bytes() >= life.image.region().len());
    // Nothing changed, except for the store after the last snapshot.
    let written = life.store.checkpoint(&life.image, &mut || SeqNo(99), &mut |_| Ok(SeqNo(104))).unwrap();
    assert_eq!((written.pages, written.bytes), (1, 2 * 3 * PAGE));
    let written = life.store.checkpoint(&life.image, &mut || SeqNo(99), &mut |_| Ok(SeqNo(104))).unwrap();
    assert_eq!((written.pages, written.bytes), (0, 2 * PAGE));

    fs.create_dir_all(Path::new("/copy")).unwrap();
    life.store.copy_to(Path::new("/copy")).unwrap();
    let copy = |partition| ImageStore::open(&fs, Path::new("/copy"), partition, 0, false, false, None);
    let loaded = copy(PARTITION).unwrap().1.unwrap();
    assert_eq!(state_of(&loaded), (bytes_of(&life.image), 99));
    fs.rename(Path::new("/copy/p000003.pool"), Path::new("/copy/p000004.pool")).unwrap();
    assert_eq!(copy(PartitionId(4)).err().unwrap().kind(), ErrorKind::Corruption);
    let missing = copy(PARTITION).err().unwrap();
    assert_eq!((missing.kind(), missing.file()), (ErrorKind::Corruption, Some(Path::new("/copy/p000003.pool"))));

    let reader = open(&fs, false, true).unwrap();
    let refused = reader.0.checkpoint(&life.image, &mut || SeqNo(1), &mut Ok);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    // Without a recorded checkpoint nothing is read, and the pool starts empty.
    assert!(open(&fs, true, true).unwrap().1.is_none());
    let mut life = CheckpointHistory::create(&fs, 2).unwrap();
    assert!(fs.exists(Path::new("/db/p000003.pool")).unwrap(), "to open changes nothing");
    life.run(2).unwrap();
    life.assert_recovers(&fs, "in another life");
}

#[test]
fn large_shadow_is_truncated() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    directory(&*fs);
    let (store, _) = ImageStore::open(&fs, Path::new(DIR), PARTITION, 3000 * PAGE, true, false, None).unwrap();
    let image = PoolImage::new(3000 * PAGE).unwrap();
    image.grow(3000 * PAGE).unwrap();
    image.write(0, &[&FileHeader { kind: FileKind::Pool, file_id: [1; 16] }.encode()]);
    (1..2500).for_each(|page| image.store(page * PAGE, page));
    let written = store.checkpoint(&image, &mut || SeqNo(1), &mut Ok).unwrap();
    assert_eq!(written.pages, 2500);
    let shadow = fs.open(Path::new("/db/p000003.shadow"), OpenMode::Read).unwrap();
    assert_eq!(shadow.length().unwrap(), 0);
    assert_eq!(store.disk_bytes(), fs.open(store.path(), OpenMode::Read).unwrap().length().unwrap());
}

#[test]
fn image_is_one_snapshot_after_power_loss() {
    let mut crashes = 0;
    for seed in 1..3 {
        let mut after = 0;
        loop {
            let mem = MemFs::new();
            directory(&mem);
            mem.freeze_after(Some(after));
            let fs: Arc<dyn Fs> = Arc::new(mem.clone());
            let Ok(mut life) = CheckpointHistory::create(&fs, seed) else {
                after += 1;
                continue;
            };
            let ended = life.run(5);
            let survivals = [Survival::Nothing, Survival::Everything, Survival::DataOnly, Survival::MetadataOnly];
            let random = (0..6).map(|seed| (Survival::Random, after * 6 + seed));
            for (survival, seed) in survivals.into_iter().map(|survival| (survival, 0)).chain(random) {
                let fork = mem.fork();
                fork.crash(survival, seed);
                let fs: Arc<dyn Fs> = Arc::new(fork);
                let what = format!("after {after} operations, {survival:?} {seed}");
                life.assert_recovers(&fs, &what);
                crashes += 1;
                if life.last_durable.is_some() && after % 5 == 0 {
                    let mut next = CheckpointHistory::reopen(&fs, seed);
                    next.run(2).unwrap();
                    next.assert_recovers(&fs, &what);
                }
            }
            if ended.is_ok() {
                break;
            }
            after += 1;
        }
        assert!(after > 40, "{after}");
    }
    assert!(crashes > 1000, "{crashes}");
}

#[test]
fn shadow_survives_power_loss_when_reapplied() {
    let (mem, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 8).unwrap();
    life.run(3).unwrap();
    life.change(20);
    let faulty = FaultFs::new(Arc::clone(&fs));
    let through: Arc<dyn Fs> = Arc::new(faulty.clone());
    let mut life = CheckpointHistory { store: open(&through, false, false).unwrap().0, ..life };
    // The shadow is written, but its pages cannot be copied to the pool file.
    faulty.inject(FaultPlan::new(OpKind::Write, 2, Fault::Error(std::io::ErrorKind::Other)).in_path(".pool").forever());
    assert!(life.checkpoint().is_err());
    // The checkpoint is permanent nevertheless. The next one first copies the pages of the shadow.
    life.last_durable = life.in_progress.clone();
    life.in_progress = life.last_durable.as_ref().map(|(bytes, _)| (bytes.clone(), 777));
    let mut after = 0;
    loop {
        let fork = mem.fork();
        fork.crash(Survival::Everything, 0);
        fork.freeze_after(Some(after));
        let again: Arc<dyn Fs> = Arc::new(fork.clone());
        let opened = open(&again, false, false).and_then(|(store, loaded)| {
            store.checkpoint(&loaded.unwrap().image, &mut || SeqNo(777), &mut |_| Ok(SeqNo(782)))
        });
        for seed in 0..8 {
            let crashed = fork.fork();
            crashed.crash(Survival::Random, seed);
            life.assert_recovers(&(Arc::new(crashed) as Arc<dyn Fs>), &format!("after {after} operations, {seed}"));
        }
        if opened.is_ok() && !fork.is_frozen() {
            break;
        }
        after += 1;
    }
    assert!(after > 5, "{after}");
}

/// Whatever fails, the caller gets the error, the files keep a complete checkpoint, and the next one succeeds.
#[test]
fn checkpoint_retries_after_io_error() {
    let full = Fault::Error(std::io::ErrorKind::StorageFull);
    let mut struck = 0;
    for what in [Fault::Error(std::io::ErrorKind::Other), full, Fault::Short] {
        for nth in 1.. {
            let mem = MemFs::new();
            directory(&mem);
            let faulty = FaultFs::new(Arc::new(mem.clone()));
            let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
            let mut life = CheckpointHistory::create(&fs, nth).unwrap();
            life.run(2).unwrap();
            life.change(9);
            faulty.inject(FaultPlan::new(OpKind::Any, nth, what));
            let ended = life.checkpoint();
            let hit = faulty.fault_count() > 0;
            faulty.clear_faults();
            // Invalidating the shadow may fail without an error, because it changes no result.
            assert!(hit || ended.is_ok());
            for (survival, seed) in [(Survival::Nothing, 0), (Survival::Random, 1), (Survival::Random, 2)] {
                let fork = mem.fork();
                fork.crash(survival, seed);
                life.assert_recovers(&(Arc::new(fork) as Arc<dyn Fs>), &format!("{what:?} at {nth}, {survival:?}"));
            }
            life.run(2).unwrap();
            mem.crash(Survival::Nothing, 0);
            life.assert_recovers(&(Arc::new(mem) as Arc<dyn Fs>), "after a repair");
            struck += u64::from(hit && ended.is_err());
            if !hit {
                break;
            }
        }
    }
    assert!(struck > 20, "{struck}");
}

#[test]
fn checkpoint_fails_when_wal_sync_fails() {
    let (_, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 4).unwrap();
    life.run(2).unwrap();
    life.change(5);
    let poisoned = || Error::new(ErrorKind::Poisoned, "the log failed");
    let failed = life.store.checkpoint(&life.image, &mut || SeqNo(9), &mut |_| Err(poisoned()));
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Poisoned);
    life.assert_recovers(&fs, "nothing of it counts");
    life.checkpoint().unwrap();
    life.assert_recovers(&fs, "all of it counts");
}

/// A device acknowledges a sync that it did not do. After a crash the files contain a checkpoint, or opening them
/// fails.
#[test]
fn lying_sync_is_detected_at_open() {
    let (mut found, mut fine) = (0, 0);
    for nth in 1..9 {
        for seed in 0..40 {
            let mem = MemFs::new();
            directory(&mem);
            let faulty = FaultFs::new(Arc::new(mem.clone()));
            let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
            let mut life = CheckpointHistory::create(&fs, seed).unwrap();
            let mut states = Vec::new();
            faulty.inject(FaultPlan::new(OpKind::Sync, nth, Fault::LyingSync).forever());
            for _ in 0..5 {
                life.change(6);
                life.checkpoint().unwrap();
                states.extend(life.last_durable.clone());
            }
            mem.crash(Survival::Random, seed);
            match open(&(Arc::new(mem) as Arc<dyn Fs>), false, false) {
                Ok((_, loaded)) => {
                    assert!(states.contains(&state_of(&loaded.unwrap())), "a mixture was believed");
                    fine += 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
                    found += 1;
                }
            }
        }
    }
    assert!(found > 10 && fine > 10, "{found} {fine}");
}

fn contents(fs: &dyn Fs, name: &str) -> Vec<u8> {
    let file = fs.open(&Path::new(DIR).join(name), OpenMode::Read).unwrap();
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Opens files with these bytes.
fn open_bytes(pool: &[u8], shadow: &[u8], read_only: bool) -> Option<ImageFileState> {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    directory(&*fs);
    for (bytes, file) in [(pool, PoolFileKind::Pool), (shadow, PoolFileKind::Shadow)] {
        let file = fs.open(&Path::new(DIR).join(file.name(PARTITION)), OpenMode::Create).unwrap();
        file.write_at(bytes, 0).unwrap();
    }
    match open(&fs, false, read_only) {
        Ok((_, loaded)) => Some(state_of(&loaded.unwrap())),
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{error}");
            assert!(error.file().is_some(), "{error}");
            None
        }
    }
}

#[test]
fn damaged_image_is_refused_or_unchanged() {
    let (_, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 3).unwrap();
    life.image.grow(4 * PAGE).unwrap();
    life.change(3);
    life.checkpoint().unwrap();
    let (old_pool, old) = (contents(&*fs, "p000003.pool"), life.last_durable.clone().unwrap());
    life.image.publish(PAGE + 800, 4711);
    let faulty = FaultFs::new(Arc::clone(&fs));
    let through: Arc<dyn Fs> = Arc::new(faulty.clone());
    let mut life = CheckpointHistory { store: open(&through, false, false).unwrap().0, ..life };
    faulty.inject(FaultPlan::new(OpKind::Write, 1, Fault::Error(std::io::ErrorKind::Other)).in_path(".pool"));
    assert!(life.checkpoint().is_err());
    let (shadow, new) = (contents(&*fs, "p000003.shadow"), life.in_progress.clone().unwrap());
    life.checkpoint().unwrap();
    let (new_pool, newest) = (contents(&*fs, "p000003.pool"), life.last_durable.clone().unwrap());

    assert_eq!(open_bytes(&old_pool, &[], false), Some(old.clone()));
    assert_eq!(open_bytes(&old_pool, &shadow, false), Some(new.clone()));
    assert_eq!(open_bytes(&old_pool, &shadow, true), Some(new.clone()));
    assert_eq!(open_bytes(&new_pool, &shadow, false), Some(newest.clone()), "a shadow of before");
    let (mut rng, mut refused) = (SeededRng::new(9), 0);
    for at in (0..new_pool.len()).step_by(29).chain(0..200) {
        let mut bad = new_pool.clone();
        bad[at] ^= 1 << rng.below(8);
        let found = open_bytes(&bad, &[], at % 2 == 0);
        assert!(found.is_none() || found.as_ref() == Some(&newest), "byte {at}");
        refused += usize::from(found.is_none());
    }
    assert!(refused > 500, "{refused}");
    for at in (0..shadow.len()).step_by(29).chain(0..200) {
        let mut bad = shadow.clone();
        bad[at] ^= 1 << rng.below(8);
        let found = open_bytes(&old_pool, &bad, at % 2 == 0);
        assert!([Some(&old), Some(&new)].contains(&found.as_ref()), "byte {at}");
    }
    for len in (0..new_pool.len()).step_by(1021) {
        assert_eq!(open_bytes(&new_pool[..len], &[], len % 2 == 0), None, "{len} bytes");
    }
    for len in (0..shadow.len()).step_by(1021) {
        assert_eq!(open_bytes(&old_pool, &shadow[..len], len % 2 == 0), Some(old.clone()));
    }
    for _ in 0..300 {
        let mut bad = shadow.clone();
        let (from, len) = (rng.below(bad.len()), rng.below(9000));
        let to = rng.below(bad.len());
        let len = len.min(bad.len() - from.max(to));
        bad.copy_within(from..from + len, to);
        let found = open_bytes(&old_pool, &bad, false);
        assert!([Some(&old), Some(&new)].contains(&found.as_ref()), "{from} {to} {len}");
    }
}

/// Any number of threads reads the same image and refuses the same damage, with and without a shadow.
#[test]
fn parallel_load_equals_single_threaded() {
    let (_, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 12).unwrap();
    life.image.grow(LEN_MAX).unwrap();
    (1..1190).for_each(|page| life.image.publish(page * PAGE + 800, page));
    life.checkpoint().unwrap();
    (100..900).step_by(3).for_each(|page| life.image.publish(page * PAGE + 808, page));
    let faulty = FaultFs::new(Arc::clone(&fs));
    let through: Arc<dyn Fs> = Arc::new(faulty.clone());
    let mut life = CheckpointHistory { store: open(&through, false, false).unwrap().0, ..life };
    // Half of the shadow's pages are copied to the pool file.
    faulty.inject(FaultPlan::new(OpKind::Write, 100, Fault::Error(std::io::ErrorKind::Other)).in_path(".pool"));
    assert!(life.checkpoint().is_err());
    let env = SystemEnv::new();
    let load = |pool: &[u8], shadow: &[u8], env: Option<&dyn Env>| {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        directory(&*fs);
        for (bytes, file) in [(pool, PoolFileKind::Pool), (shadow, PoolFileKind::Shadow)] {
            let file = fs.open(&Path::new(DIR).join(file.name(PARTITION)), OpenMode::Create).unwrap();
            file.write_at(bytes, 0).unwrap();
        }
        let loaded = ImageStore::open(&fs, Path::new(DIR), PARTITION, LEN_MAX, false, false, env);
        loaded.map(|(_, loaded)| state_of(&loaded.unwrap())).map_err(|error| (error.kind(), error.offset()))
    };
    let (pool, shadow) = (contents(&*fs, "p000003.pool"), contents(&*fs, "p000003.shadow"));
    let (mut rng, mut seen) = (SeededRng::with_stream(3, 3), [0; 3]);
    for round in 0..80 {
        let (mut pool, mut shadow) = (pool.clone(), shadow.clone());
        for _ in 0..round % 3 {
            let place = rng.below(pool.len());
            pool[place] ^= 1 << rng.below(8);
        }
        if round % 8 == 7 {
            let place = rng.below(shadow.len());
            shadow[place] ^= 1;
        }
        let (alone, together) = (load(&pool, &shadow, None), load(&pool, &shadow, Some(&env)));
        assert_eq!(alone.as_ref().err().map(|error| error.0), together.as_ref().err().map(|error| error.0));
        assert!(alone.is_err() || alone == together, "round {round}");
        seen[match &alone {
            Ok(found) if Some(found) == life.in_progress.as_ref() => 0,
            Ok(found) => usize::from(Some(found) == life.last_durable.as_ref()),
            Err(_) => 2,
        }] += 1;
    }
    // A pool file with only half of the pages cannot be used without the shadow.
    assert!(seen[0] > 20 && seen[1] == 0 && seen[2] > 20, "{seen:?}");
}

const KEYS: u64 = 240;

/// Whether change `round` of key `n` is a put; otherwise it is a removal.
fn is_put(n: u64, round: u64) -> bool {
    !(n * 7 + round).is_multiple_of(3)
}

/// A value that contains its key and its round, and whose other bytes show whether it is complete.
fn value(n: u64, round: u64) -> Vec<u8> {
    let mut value = [n.to_le_bytes(), round.to_le_bytes()].concat();
    value.resize(16 + ((n + round) % 3000) as usize * usize::from(round.is_multiple_of(50)), (n ^ round) as u8);
    value
}

fn load_numbers(of: &[AtomicU64]) -> Vec<u64> {
    of.iter().map(|number| number.load(Ordering::SeqCst)).collect()
}

/// A tree that two threads change, and the rounds that began and ended for each key.
struct ConcurrentTree {
    tree: PoolTree<PoolImage>,
    visible: LastVisibleSeqno,
    next: AtomicU64,
    begun: Vec<AtomicU64>,
    ended: Vec<AtomicU64>,
}

impl ConcurrentTree {
    fn change(&self, n: u64) {
        let round = self.begun[n as usize].fetch_add(1, Ordering::SeqCst) + 1;
        let (seqno, key) = (SeqNo(self.next.fetch_add(1, Ordering::SeqCst)), n.to_be_bytes());
        match is_put(n, round) {
            true => self.tree.put(&key, seqno, &value(n, round)).unwrap(),
            false => drop(self.tree.remove(&key, seqno).unwrap()),
        }
        while self.visible.get().0 + 1 != seqno.0 {
            std::thread::yield_now();
        }
        self.visible.publish(seqno);
        self.ended[n as usize].store(round, Ordering::SeqCst);
    }
}

/// Opens the files after a crash, and checks that each key has a state between those at the cut and at the end.
fn assert_recovers_between(fs: &MemFs, options: &PoolOptions, at_cut: &[u64], at_end: &[u64]) {
    let fork = fs.fork();
    fork.crash(Survival::Nothing, 0);
    let loaded = open(&(Arc::new(fork) as Arc<dyn Fs>), false, false).unwrap().1.unwrap();
    let visible = LastVisibleSeqno::default();
    let readers = SnapshotList::new(visible.clone()).readers_of(PARTITION);
    let (tree, report) = pool_recovery::open_with(
        loaded.image,
        KeyOrder::bytewise(),
        options,
        readers,
        PoolCheckLevel::StructureOnly,
        None,
    )
    .unwrap();
    assert!(report.max_seqno <= loaded.max_seqno);
    visible.publish(SeqNo::MAX);
    let mut present = 0;
    for n in 0..KEYS {
        let mut rounds = at_cut[n as usize]..=at_end[n as usize];
        match tree.get(&n.to_be_bytes()).unwrap() {
            Some(found) => {
                let round = u64::from_le_bytes(found[8..16].try_into().unwrap());
                assert!(found == value(n, round) && rounds.contains(&round), "key {n}: {round}, not in {rounds:?}");
                present += 1;
            }
            None => assert!(rounds.any(|round| round == 0 || !is_put(n, round)), "key {n} is missing: {rounds:?}"),
        }
    }
    assert_eq!(tree.len(), present);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
fn checkpoint_during_writes_is_one_snapshot() {
    for slots in [4, SLOTS] {
        let (mem, fs) = fresh();
        let (store, _) = open(&fs, true, false).unwrap();
        // The pool is small, so that leaves and buffers are reused soon.
        let options = PoolOptions { len_max: 512 * PAGE, grow_by: 4 * PAGE, slots_per_leaf: slots };
        let visible = LastVisibleSeqno::default();
        let readers = SnapshotList::new(visible.clone()).readers_of(PARTITION);
        let image = PoolImage::new(options.len_max).unwrap();
        let tree = pool_recovery::create(image, [5; 16], KeyOrder::bytewise(), &options, readers).unwrap();
        let numbers_of_keys = || (0..KEYS).map(|_| AtomicU64::new(0)).collect();
        let next = AtomicU64::new(1);
        let fixture = ConcurrentTree { tree, visible, next, begun: numbers_of_keys(), ended: numbers_of_keys() };
        let (stop, mut pages) = (AtomicBool::new(false), 0);
        std::thread::scope(|s| {
            for writer in 0..2 {
                let (fixture, stop) = (&fixture, &stop);
                s.spawn(move || {
                    let mut rng = SeededRng::with_stream(writer, 3);
                    while !stop.load(Ordering::Relaxed) {
                        fixture.change(rng.below(KEYS as usize / 2) as u64 * 2 + writer);
                    }
                });
            }
            let (mut last, next) = (0, || fixture.next.load(Ordering::SeqCst));
            for _ in 0..100 {
                last = next().max(last + 40);
                while next() < last + 40 {
                    std::thread::yield_now();
                }
                let mut at_cut = Vec::new();
                let cut = &mut || {
                    let visible = fixture.visible.get();
                    at_cut = load_numbers(&fixture.ended);
                    visible
                };
                let highest = &mut |_| Ok(SeqNo(fixture.next.load(Ordering::SeqCst)));
                pages += store.checkpoint(&fixture.tree.backend, cut, highest).unwrap().pages;
                assert_recovers_between(&mem, &options, &at_cut, &load_numbers(&fixture.begun));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let ended = load_numbers(&fixture.ended);
        store.checkpoint(&fixture.tree.backend, &mut || fixture.visible.get(), &mut Ok).unwrap();
        assert_recovers_between(&mem, &options, &ended, &ended);
        assert!(pages > 100, "{pages}");
    }
}

/// A reader beside a writer gets the image of one checkpoint, or an error.
#[test]
#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
fn image_read_beside_writer_is_one_checkpoint() {
    let (_, fs) = fresh();
    let mut history = CheckpointHistory::create(&fs, 7).unwrap();
    history.run(1).unwrap();
    let (is_done, mut states) = (AtomicBool::new(false), vec![history.last_durable.clone().unwrap()]);
    let (read, refused) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut read, mut refused): (Vec<ImageFileState>, u64) = (Vec::new(), 0);
            while !is_done.load(Ordering::Acquire) || read.is_empty() {
                match open(&fs, false, true) {
                    Ok((_, loaded)) => read.push(state_of(&loaded.unwrap())),
                    Err(error) => {
                        assert!([ErrorKind::Conflict, ErrorKind::Corruption].contains(&error.kind()), "{error}");
                        refused += 1;
                    }
                }
            }
            (read, refused)
        });
        for _ in 0..200 {
            history.run(1).unwrap();
            states.push(history.last_durable.clone().unwrap());
        }
        is_done.store(true, Ordering::Release);
        reader.join().unwrap()
    });
    println!("{} images were read, {refused} were refused", read.len());
    for state in read {
        assert!(states.contains(&state), "the image at {} has pages of several checkpoints", state.1);
    }
    // The copy of a writer that does nothing is its last image.
    fs.create_dir_all(Path::new("/copy")).unwrap();
    ImageStore::copy_beside_writer(&fs, Path::new(DIR), PARTITION, Path::new("/copy")).unwrap();
    let (_, copy) = ImageStore::open(&fs, Path::new("/copy"), PARTITION, LEN_MAX, false, true, None).unwrap();
    assert_eq!(Some(state_of(&copy.unwrap())), history.last_durable);
}

/// A mapped pool was copied to a file system that cannot map it. The file stays unchanged until an image of it is
/// permanent.
#[test]
fn mapped_pool_becomes_image() {
    let (mem, fs) = fresh();
    let mut life = CheckpointHistory::create(&fs, 6).unwrap();
    life.change(30);
    let bytes = bytes_of(&life.image);
    let file = fs.open(Path::new("/db/p000003.pool"), OpenMode::Create).unwrap();
    file.write_at(&bytes, 0).unwrap();
    file.sync_data().unwrap();
    fs.sync_dir(Path::new(DIR)).unwrap();
    let found = |fs: &MemFs, read_only| {
        let loaded = open(&(Arc::new(fs.clone()) as Arc<dyn Fs>), false, read_only).unwrap().1.unwrap();
        let there = bytes_of(&loaded.image);
        // Space for the image may have been allocated already.
        assert!(there[..bytes.len()] == bytes && there[bytes.len()..].iter().all(|byte| *byte == 0));
        loaded.replay_from.0
    };
    assert_eq!((found(&mem, true), found(&mem, false)), (0, 0));
    let mut after = 0;
    loop {
        let fork = mem.fork();
        fork.freeze_after(Some(after));
        let frozen: Arc<dyn Fs> = Arc::new(fork.clone());
        let written = open(&frozen, false, false)
            .and_then(|(store, loaded)| store.checkpoint(&loaded.unwrap().image, &mut || SeqNo(7), &mut Ok));
        for seed in 0..6 {
            let crashed = fork.fork();
            crashed.crash(Survival::Random, seed);
            let from = [found(&crashed, true), found(&crashed, false), found(&crashed, false)];
            assert!(from == [7; 3] || written.is_err() && from == [0; 3], "after {after}: {from:?}");
        }
        if written.is_ok() {
            break;
        }
        after += 1;
    }
    assert!(after > 5, "{after}");
    let (store, loaded) = open(&fs, false, false).unwrap();
    fs.create_dir_all(Path::new("/copy")).unwrap();
    store.copy_to(Path::new("/copy")).unwrap();
    assert_eq!(fs.open(Path::new("/copy/p000003.pool"), OpenMode::Read).unwrap().length().unwrap(), bytes.len() as u64);
    let written = store.checkpoint(&loaded.unwrap().image, &mut || SeqNo(8), &mut Ok).unwrap();
    assert_eq!((written.pages, found(&mem, false)), (bytes.len() as u64 / PAGE, 8));
}
