//! Any bytes give a value or a typed error: the committed corpus is replayed, and valid inputs of every decoder are
//! mutated for a while. The same decoders are the targets of `fuzz/`.
//!
//! - `AZEKURA_FUZZ_SECONDS`: how long to mutate, over all decoders; 2 by default.
//! - `AZEKURA_SEED`: which mutations; 1 by default. A failure names its seed and keeps its input.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, FuzzDecoder, MemFs, OpKind, SeededRng, decode};
use azekura::{
    Config, EngineType, ErrorKind, KvSeparationOptions, PartitionCreateOptions, PersistMode, PersistenceLevel,
    PmemOptions, Result,
};

use crate::testkit::env_u64;

/// Processor time for one input, in a build without optimization.
const INPUT_MAX: Duration = Duration::from_secs(2);
/// Maximum length of a mutated input, in bytes.
const INPUT_BYTES_MAX: usize = 1 << 20;

type FuzzTarget = (&'static str, fn(&[u8]) -> Result<()>);

/// Every decoder under the name of its fuzz target and of its folder in the corpus.
const FUZZ_TARGETS: &[FuzzTarget] = &[
    ("batch", |bytes| decode(FuzzDecoder::Batch, bytes)),
    ("blob_metaindex", |bytes| decode(FuzzDecoder::BlobMetaindex, bytes)),
    ("blob_file", |bytes| decode(FuzzDecoder::BlobFile, bytes)),
    ("blob_index_page", |bytes| decode(FuzzDecoder::BlobIndexPage, bytes)),
    ("blob_pointer", |bytes| decode(FuzzDecoder::BlobPointer, bytes)),
    ("blob_references", |bytes| decode(FuzzDecoder::BlobReferences, bytes)),
    ("block", |bytes| decode(FuzzDecoder::Block, bytes)),
    ("block_hash_index", |bytes| decode(FuzzDecoder::BlockWithHashIndex, bytes)),
    ("block_fingerprint", |bytes| decode(FuzzDecoder::FingerprintBlock, bytes)),
    ("version_edits", |bytes| decode(FuzzDecoder::VersionEdits, bytes)),
    ("file_header", |bytes| decode(FuzzDecoder::FileHeader, bytes)),
    ("filter_partition", |bytes| decode(FuzzDecoder::FilterPartition, bytes)),
    ("frame", |bytes| decode(FuzzDecoder::Frame, bytes)),
    ("manifest", |bytes| decode(FuzzDecoder::Manifest, bytes)),
    ("pool", |bytes| decode(FuzzDecoder::Pool, bytes)),
    ("pool_shadow", |bytes| decode(FuzzDecoder::PoolShadow, bytes)),
    ("table", |bytes| decode(FuzzDecoder::Table, bytes)),
    ("wal_frame", |bytes| decode(FuzzDecoder::WalFrame, bytes)),
];

/// Inputs named `good-…` decode, inputs named `bad-…` give an error of kind corruption, and all other inputs must
/// not panic.
#[test]
fn corpus_inputs_give_expected_results() {
    let mut inputs = 0;
    for target in FUZZ_TARGETS {
        for (path, bytes) in corpus_inputs(target.0) {
            let outcome = run_target(*target, &bytes, &path.display().to_string());
            let name = path.file_name().and_then(|name| name.to_str()).expect("names are UTF-8");
            match outcome {
                Err(error) if name.starts_with("good-") => panic!("{} does not decode: {error}", path.display()),
                Ok(()) if name.starts_with("bad-") => panic!("{} decodes", path.display()),
                _ => inputs += 1,
            }
        }
    }
    println!("{inputs} inputs of the corpus, {} decoders", FUZZ_TARGETS.len());
}

#[test]
fn mutated_inputs_are_harmless() {
    let seconds = env_u64("AZEKURA_FUZZ_SECONDS", 2);
    let seed = env_u64("AZEKURA_SEED", 1);
    let share = Duration::from_millis(seconds * 1000 / FUZZ_TARGETS.len() as u64);
    let database = files_of_a_database();
    for (i, target) in FUZZ_TARGETS.iter().enumerate() {
        let mut good: Vec<Vec<u8>> = corpus_inputs(target.0).into_iter().map(|(_, bytes)| bytes).collect();
        good.extend(database.iter().filter(|(name, _)| *name == target.0).map(|(_, bytes)| bytes.clone()));
        assert!(!good.is_empty(), "no input to mutate for {}", target.0);
        let mut rng = SeededRng::new(seed ^ ((i as u64) << 32));
        let (start, mut inputs) = (Instant::now(), 0u64);
        while inputs < 100 || start.elapsed() < share {
            let input = mutate(&good, &mut rng);
            let _ = run_target(*target, &input, &format!("AZEKURA_SEED={seed}, input {inputs}"));
            inputs += 1;
        }
        println!("{:<16} {inputs:>9} inputs from {} good ones", target.0, good.len());
    }
}

/// Decodes one input. A panic, too much work or an unexpected error kind keeps the input and fails the test.
fn run_target((name, decode): FuzzTarget, input: &[u8], origin: &str) -> Result<()> {
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| decode(input)));
    let took = start.elapsed();
    let what = match outcome {
        Err(_) => "panicked".to_string(),
        // Time passes on a busy machine, too: what counts is the processor time.
        Ok(_) if took > INPUT_MAX && processor_time_of(|| decode(input)) > INPUT_MAX => format!("took {took:?}"),
        Ok(Err(error)) if !matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported) => {
            format!("the error is not of kind corruption: {error:?}")
        }
        Ok(outcome) => return outcome,
    };
    let saved = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}.bin"));
    std::fs::write(&saved, input).expect("the input can be saved");
    panic!("{name} {what} on {} bytes ({origin}); saved as {}", input.len(), saved.display());
}

/// Time for which this thread runs `f`; 0 where the operating system does not tell.
fn processor_time_of(f: impl FnOnce() -> Result<()>) -> Duration {
    let used = || {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
    };
    let before = used();
    drop(f());
    used().zip(before).map_or(Duration::ZERO, |(after, before)| after - before)
}

/// Inputs under `testdata/corpus/NAME`, by name.
fn corpus_inputs(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/corpus").join(name);
    let Ok(entries) = std::fs::read_dir(&folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|e| e.expect("the corpus can be read").path()).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path).expect("the corpus can be read");
        (path, bytes)
    };
    paths.into_iter().map(read).collect()
}

/// The files of a small database with tables, one of them ingested, and range tombstones, by fuzz target.
fn files_of_a_database() -> Vec<(&'static str, Vec<u8>)> {
    let fs = MemFs::new();
    let dir = Path::new("/db");
    let config = Config::new(dir).fs(Arc::new(fs.clone())).workers(0);
    let separation = KvSeparationOptions::default().separation_threshold(40).blob_file_target_size(4 << 10);
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let database = config.open().expect("a fresh database opens");
    let partition = database.open_partition("p", options).expect("a partition is made");
    for round in 0..2u32 {
        for i in 0..300u32 {
            let len = 30 + (i as usize % 20);
            partition.insert(format!("key{:05}", i * 7), vec![round as u8; len]).expect("inserts");
        }
        partition.remove("key00007").expect("removes");
        partition.remove_range("key00100".."key00150").expect("removes a range");
        partition.flush().expect("flushes");
    }
    partition.ingest((0..50u32).map(|i| (format!("ley{i:05}"), vec![i as u8; 60]))).expect("ingests");
    assert!(partition.metrics().range_tombstones > 0, "the manifest has range tombstones");
    database.persist(PersistMode::SyncAll).expect("syncs");
    // A compaction in the background would remove files between the listing and the reading.
    drop((partition, database));
    let mut files = Vec::new();
    for entry in fs.read_dir(dir).expect("the directory can be listed") {
        let target = match entry.name.rsplit('.').next() {
            Some("sst") => "table",
            Some("blob") => "blob_file",
            Some("MANIFEST") => "manifest",
            _ => continue,
        };
        let file = fs.open(&dir.join(&entry.name), OpenMode::Read).expect("the file opens");
        let mut bytes = vec![0; entry.len as usize];
        file.read_exact_at(&mut bytes, 0).expect("the file can be read");
        files.push((target, bytes));
    }
    files.extend(files_of_a_pool());
    for wanted in ["table", "blob_file", "manifest", "pool", "pool_shadow"] {
        assert!(files.iter().any(|(target, _)| *target == wanted), "the database has a {wanted}");
    }
    files
}

/// The image of a pool, a mapped pool, and the shadow of an unfinished checkpoint.
fn files_of_a_pool() -> Vec<(&'static str, Vec<u8>)> {
    let (mut files, dir) = (Vec::new(), Path::new("/db"));
    for (level, fails) in
        [(PersistenceLevel::WalOnly, false), (PersistenceLevel::ProcessCrash, false), (PersistenceLevel::WalOnly, true)]
    {
        let mem = MemFs::new();
        mem.set_mapped_memory(level);
        let fs = FaultFs::new(Arc::new(mem.clone()));
        let database = Config::new(dir).fs(Arc::new(fs.clone())).open().expect("a fresh database opens");
        let pool = EngineType::Pmem(PmemOptions::default().max_size(256 << 10).growth_step(16 << 10));
        let options = PartitionCreateOptions::default().engine(pool);
        let partition = database.open_partition("p", options).expect("a partition is made");
        for i in 0..300u32 {
            partition.insert(format!("key{:05}", i * 7), vec![i as u8; 20]).expect("inserts");
        }
        if fails {
            let broken = FaultPlan::new(OpKind::Write, 1, Fault::Error(std::io::ErrorKind::Other));
            fs.inject(broken.in_path(".pool").forever());
        }
        assert_eq!(partition.flush().is_err(), fails, "whether the checkpoint of the image succeeds");
        // A checkpoint in the background would replace files between the listing and the reading.
        drop((partition, database));
        let (suffix, target) = if fails { (".shadow", "pool_shadow") } else { (".pool", "pool") };
        for entry in mem.read_dir(dir).expect("the directory can be listed") {
            if entry.name.ends_with(suffix) {
                let mut bytes = vec![0; entry.len as usize];
                let file = mem.open(&dir.join(&entry.name), OpenMode::Read).expect("the file opens");
                file.read_exact_at(&mut bytes, 0).expect("the file can be read");
                decode(if fails { FuzzDecoder::PoolShadow } else { FuzzDecoder::Pool }, &bytes).expect("it decodes");
                files.push((target, bytes));
            }
        }
    }
    files
}

/// One valid input, changed in a few places.
fn mutate(good: &[Vec<u8>], rng: &mut SeededRng) -> Vec<u8> {
    const NUMBERS: &[u64] = &[0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 40, u64::MAX];
    let mut input = good[rng.below(good.len())].clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(input.len() + 1);
        let room = input.len() - at;
        let len = rng.below(room.min(64) + 1);
        match rng.below(9) {
            0 if room > 0 => input[at] ^= 1 << rng.below(8),
            1 if room > 0 => input[at] = rng.next_u64() as u8,
            2 => input.truncate(at),
            3 => drop(input.drain(at..at + len)),
            4 => {
                let copy = input[at..at + len].to_vec();
                input.splice(at..at, copy);
            }
            5 => {
                let number = NUMBERS[rng.below(NUMBERS.len())].to_le_bytes();
                let width = [1, 2, 4, 8][rng.below(4)].min(room);
                input[at..at + width].copy_from_slice(&number[..width]);
            }
            // The longest varint, and a length greater than the input.
            6 => drop(input.splice(at..at + len.min(1), [0xff, 0xff, 0xff, 0xff, 0x0f])),
            7 => {
                let other = &good[rng.below(good.len())];
                let from = rng.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => input.extend((0..len).map(|_| rng.next_u64() as u8)),
        }
        input.truncate(INPUT_BYTES_MAX);
    }
    input
}
