//! Blob files as a whole: what is written is read, also after values moved, and damage is found.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::compression::CompressionType;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, ErrorKind, Result};
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::writer::{BlobRewriteWriter, BlobWriter};
use crate::block::{BlockCache, BlockKind};
use crate::mem::epoch::tests::wait_until;
use crate::vfs::mem::MemFs;
use crate::vfs::open_files::{DataFiles, DirectIoPolicy};
use crate::vfs::seeded_rng::SeededRng;
use crate::vfs::{Fs, OpenMode};

const CODECS: [CompressionType; 4] =
    [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(1), CompressionType::Miniz(9)];

/// A directory with blob files, and the cache before them.
struct BlobFixture {
    fs: MemFs,
    files: DataFiles,
    cache: Arc<BlockCache>,
}

impl BlobFixture {
    fn new(cache: u64) -> BlobFixture {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, DirectIoPolicy::never()).blob_files();
        BlobFixture { fs, files, cache: Arc::new(BlockCache::new(cache)) }
    }

    fn write(&self, id: u64, compression: CompressionType, values: &[Vec<u8>]) -> (BlobFileMeta, Vec<BlobPointer>) {
        let file = self.files.create(FileNumber(id)).unwrap();
        let mut writer = BlobWriter::create(file, file_id(id), FileNumber(id), compression, 77);
        let pointers = values.iter().map(|value| writer.append(value).unwrap()).collect();
        let about = writer.written_bytes();
        let meta = writer.finish().unwrap();
        assert!(about <= meta.size && meta.number == FileNumber(id));
        (meta, pointers)
    }

    fn open(&self, meta: &BlobFileMeta) -> BlobFile {
        BlobFile::new(self.files.clone(), Arc::clone(&self.cache), meta.number, meta.size)
    }

    /// A file with those values of `sources` that `live` says yes to, as collection would make it.
    fn rewrite(&self, id: u64, sources: &[&BlobFileMeta], live: impl Fn(FileNumber, u32) -> bool) -> BlobFileMeta {
        let file = self.files.create(FileNumber(id)).unwrap();
        let mut writer = BlobRewriteWriter::create(file, file_id(id), 78);
        for meta in sources {
            let source = self.open(meta);
            for section in &meta.sections {
                writer.begin_section(section.logical_file);
                let (mut iter, mut ahead) =
                    (source.section_iter(section.logical_file).unwrap(), BlobReadAhead::eager());
                while let Some((ordinal, handle)) = iter.next().unwrap() {
                    if live(section.logical_file, ordinal) {
                        source.with_frame(handle, &mut ahead, |frame| writer.copy_value(ordinal, frame)).unwrap();
                    }
                }
            }
        }
        assert!(writer.written_bytes() > 0);
        writer.finish(FileNumber(id)).unwrap()
    }

    fn bytes(&self, meta: &BlobFileMeta) -> Vec<u8> {
        let mut bytes = vec![0; meta.size as usize];
        self.files.get(meta.number).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Puts other bytes in the place of a file.
    fn replace(&self, id: FileNumber, bytes: &[u8]) {
        self.files.remove(id).unwrap();
        self.fs.open(&self.files.path(id), OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
    }
}

fn file_id(id: u64) -> [u8; 16] {
    [id as u8; 16]
}

/// Values of many lengths, some of which shrink.
fn random_values(rng: &mut SeededRng, count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut value = |_| {
        let len = rng.below(longest + 1);
        match rng.below(3) {
            0 => vec![rng.next_u64() as u8; len],
            1 => (0..len).map(|i| (i / 9) as u8).collect(),
            _ => (0..len).map(|_| rng.next_u64() as u8).collect(),
        }
    };
    (0..count).map(&mut value).collect()
}

fn error_kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error: Error| error.kind())
}

#[test]
fn every_codec_and_length_round_trips() {
    for (codec, fill_cache) in CODECS.into_iter().flat_map(|codec| [(codec, true), (codec, false)]) {
        let world = BlobFixture::new(8 << 20);
        let mut all = random_values(&mut SeededRng::new(5, 0), 300, 2000);
        all.extend([0, 1, 30, 31, 32, 300_000].map(|len| vec![7; len]));
        all.extend(
            [0, 1, 30, 31, 32, 300_000].map(|len| (0..len).map(|i: u32| (i.wrapping_mul(i) % 251) as u8).collect()),
        );
        let (meta, pointers) = world.write(9, codec, &all);
        let file = world.open(&meta);
        assert_eq!(file.verify(&meta).unwrap(), all.len() as u64);
        assert_eq!(BlobFile::read_meta(&world.files, &world.cache, FileNumber(9)).unwrap(), meta);
        assert_eq!(meta.sections[0].bytes, pointers.iter().map(|pointer| pointer.frame_len).sum::<u64>());
        let mut ahead = BlobReadAhead::adaptive();
        for (at, (pointer, value)) in pointers.iter().zip(&all).enumerate() {
            assert_eq!((pointer.ordinal as usize, pointer.value_len as usize), (at, value.len()));
            assert_eq!(file.read_sequential(pointer, fill_cache, &mut ahead).unwrap(), value);
        }
        for (pointer, value) in pointers.iter().zip(&all).rev() {
            assert_eq!(file.read(pointer, fill_cache).unwrap(), value);
        }
        let held = world.cache.stats().kinds.into_iter().find(|(name, _)| *name == "blob").unwrap().1;
        assert_eq!(held.blocks > 300, fill_cache);
        assert!(file.memory_bytes() < 1000, "an open file holds its directory only");
    }
}

#[test]
fn incompressible_value_is_stored_raw() {
    let world = BlobFixture::new(0);
    let mut rng = SeededRng::new(1, 0);
    let noise: Vec<u8> = (0..5000).map(|_| rng.next_u64() as u8).collect();
    for (id, codec) in (1..).zip(CODECS) {
        let (_, pointers) = world.write(id, codec, &[noise.clone(), vec![3; 5000]]);
        assert_eq!(pointers[0].frame_len, 5016);
        assert_eq!(pointers[1].frame_len < 200, codec != CompressionType::None);
    }
}

#[test]
fn cached_value_is_shared_large_bypasses_cache() {
    let world = BlobFixture::new(80_000);
    let (meta, pointers) = world.write(1, CompressionType::None, &[vec![1; 5000], vec![2; 12_000], vec![3; 20]]);
    let file = world.open(&meta);
    let again = |pointer| (file.read(pointer, true).unwrap(), file.read(pointer, false).unwrap());
    let (first, second) = again(&pointers[0]);
    assert_eq!(first.as_ptr(), second.as_ptr(), "both are what the cache has");
    let (first, second) = again(&pointers[1]);
    assert_ne!(first.as_ptr(), second.as_ptr(), "more than an eighth of the cache");
    again(&pointers[2]);
    let stats = world.cache.stats();
    assert_eq!(stats.kinds[5].1.blocks, 2);
    drop(second);
    assert_eq!(first, [2; 12_000], "a value outlives what it was read from");
    world.cache.remove_file(FileNumber(1));
    wait_until(|| world.cache.used() == 0);
    assert!(file.read(&pointers[0], false).is_ok() && world.cache.used() == 0);
}

#[test]
fn repeated_rewrites_keep_live_values() {
    for seed in 0..40 {
        let mut rng = SeededRng::new(seed, 3);
        let world = BlobFixture::new(if seed % 2 == 0 { 1 << 20 } else { 0 });
        let mut live: BTreeMap<(FileNumber, u32), (BlobPointer, Vec<u8>)> = BTreeMap::new();
        let mut physical = Vec::new();
        for id in 1..=3 {
            // The third has more values than one page of the index leads to.
            let (count, longest) = if id == 3 { (5000, 3) } else { (1 + rng.below(60), 400) };
            let all = random_values(&mut rng, count, longest);
            let (meta, pointers) = world.write(id, CODECS[rng.below(4)], &all);
            live.extend(pointers.into_iter().zip(all).map(|(p, value)| ((p.logical_file, p.ordinal), (p, value))));
            physical.push(meta);
        }
        for round in 0..2 {
            let one = *live.keys().next().unwrap();
            let share = 1 + rng.below(7);
            live.retain(|key, _| *key == one || rng.chance_in_8(share));
            let is_live = |logical, ordinal| live.contains_key(&(logical, ordinal));
            // Some files are put together, another stays as it is.
            let kept = physical.pop();
            let sources: Vec<&BlobFileMeta> = physical.iter().collect();
            physical = vec![world.rewrite(10 + round, &sources, is_live)];
            physical.extend(kept.filter(|meta| meta.sections.iter().all(|s| !s.rewritten)));
            let files: Vec<BlobFile> = physical.iter().map(|meta| world.open(meta)).collect();
            let mut ahead: Vec<BlobReadAhead> = files.iter().map(|_| BlobReadAhead::adaptive()).collect();
            for ((logical, ordinal), (pointer, value)) in &live {
                let holds = |meta: &BlobFileMeta| meta.sections.iter().any(|section| section.logical_file == *logical);
                let at = physical.iter().position(holds).expect("a live value is somewhere");
                let read = match rng.below(2) {
                    0 => files[at].read(pointer, rng.below(2) == 0),
                    _ => files[at].read_sequential(pointer, rng.below(2) == 0, &mut ahead[at]),
                };
                assert_eq!(read.unwrap(), value, "seed {seed}, round {round}, {logical:?} {ordinal}");
            }
            for (meta, file) in physical.iter().zip(&files) {
                file.verify(meta).unwrap();
                assert_eq!(&BlobFile::read_meta(&world.files, &world.cache, meta.number).unwrap(), meta);
            }
            let rewritten = physical[0].sections.iter().filter(|section| section.rewritten);
            for section in rewritten {
                let counted = live.keys().filter(|(logical, _)| *logical == section.logical_file).count() as u64;
                let bytes = live
                    .values()
                    .filter(|(p, _)| p.logical_file == section.logical_file)
                    .map(|(p, _)| p.frame_len)
                    .sum();
                assert_eq!((section.values, section.bytes), (counted, bytes));
            }
        }
    }
}

/// A file, pointers into it, and what they lead to.
type WrittenBlobFile = (BlobFileMeta, Vec<(BlobPointer, Vec<u8>)>);

/// A small file of two rewritten sections, and one as written; the pointers into both, and what they lead to.
fn write_two_files(world: &BlobFixture) -> [WrittenBlobFile; 2] {
    let all: Vec<Vec<u8>> = vec![vec![1; 40], Vec::new(), b"short".to_vec(), (0..50).collect()];
    let (one, pointers_one) = world.write(1, CompressionType::Lz4, &all);
    let (two, pointers_two) = world.write(2, CompressionType::Miniz(6), &all);
    let rewritten = world.rewrite(3, &[&one, &two], |_, ordinal| ordinal != 1);
    let pairs = |pointers: &[BlobPointer]| pointers.iter().copied().zip(all.clone()).collect::<Vec<_>>();
    let mut moved = [pairs(&pointers_one), pairs(&pointers_two)].concat();
    moved.retain(|(pointer, _)| pointer.ordinal != 1);
    [(one, pairs(&pointers_one)), (rewritten, moved)]
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let world = BlobFixture::new(0);
    for (meta, pairs) in write_two_files(&world) {
        let good = world.bytes(&meta);
        let check = |bad: &[u8], what: &str| {
            world.replace(meta.number, bad);
            let file = world.open(&meta);
            assert_eq!(error_kind(file.verify(&meta)), Some(ErrorKind::Corruption), "{what}");
            for (pointer, value) in &pairs {
                match file.read(pointer, true) {
                    Ok(read) => assert_eq!(&read, value, "{what}"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corruption, "{what}: {error}");
                        assert_eq!(error.file(), Some(world.files.path(meta.number).as_path()), "{what}");
                    }
                }
            }
        };
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            check(&bad, &format!("bit {bit}"));
        }
        for cut in 0..good.len() {
            check(&good[..cut], &format!("{cut} bytes"));
        }
        check(&[&good[..], &[0]].concat(), "one byte more");
        world.replace(meta.number, &good);
        world.open(&meta).verify(&meta).unwrap();
    }
}

#[test]
fn wrong_pointer_is_corruption_with_location() {
    let world = BlobFixture::new(0);
    for (meta, pairs) in write_two_files(&world) {
        let file = world.open(&meta);
        let (good, _) = pairs[0];
        file.read(&good, true).unwrap();
        let rewritten = meta.sections[0].rewritten;
        for (what, bad) in [
            ("another logical file", BlobPointer { logical_file: FileNumber(7), ..good }),
            ("an ordinal behind the end", BlobPointer { ordinal: 4, ..good }),
            ("the ordinal of another value", BlobPointer { ordinal: good.ordinal + 1, ..good }),
            ("the last ordinal there is", BlobPointer { ordinal: u32::MAX, ..good }),
            ("a longer frame", BlobPointer { frame_len: good.frame_len + 1, ..good }),
            ("a shorter frame", BlobPointer { frame_len: good.frame_len - 1, ..good }),
            ("no frame", BlobPointer { frame_len: 0, ..good }),
            ("the longest frame", BlobPointer { frame_len: u64::MAX, ..good }),
            ("a longer value", BlobPointer { value_len: good.value_len + 1, ..good }),
            ("an empty value", BlobPointer { value_len: 0, ..good }),
            ("an offset in between", BlobPointer { frame_offset: good.frame_offset + 1, ..good }),
            ("an offset behind the file", BlobPointer { frame_offset: meta.size, ..good }),
            ("an offset behind all files", BlobPointer { frame_offset: u64::MAX, ..good }),
        ] {
            for fill_cache in [true, false] {
                let read = file.read(&bad, fill_cache);
                if rewritten && (bad.frame_offset != good.frame_offset) {
                    assert!(read.is_ok(), "offsets say nothing here");
                    continue;
                }
                let error = read.expect_err(what);
                assert_eq!(error.kind(), ErrorKind::Corruption, "{what}");
                assert!(error.file().is_some() && error.offset().is_some(), "{what}: {error}");
            }
        }
        assert_eq!(error_kind(file.section_iter(FileNumber(7))), Some(ErrorKind::Corruption));
    }
}

#[test]
fn verify_fails_when_manifest_differs() {
    let world = BlobFixture::new(0);
    let [(meta, _), _] = write_two_files(&world);
    let mut other = meta.clone();
    other.sections[0].bytes += 1;
    assert_eq!(error_kind(world.open(&meta).verify(&other)), Some(ErrorKind::Corruption));
    other = BlobFileMeta { created_ms: 0, ..meta.clone() };
    assert_eq!(error_kind(world.open(&meta).verify(&other)), Some(ErrorKind::Corruption));
    let longer = BlobFileMeta { size: meta.size + 1, ..meta };
    assert_eq!(error_kind(world.open(&longer).head().map(drop)), Some(ErrorKind::Corruption));
}

#[test]
fn cache_entry_of_other_kind_is_not_a_value() {
    let world = BlobFixture::new(1 << 20);
    let [_, (meta, pairs)] = write_two_files(&world);
    let file = world.open(&meta);
    // A page of the index stands where a pointer says a value does.
    file.read(&pairs[0].0, true).unwrap();
    let page = file.head().unwrap().metaindex.sections[0].pages[0].handle;
    let cached =
        world.cache.get::<crate::block::cached_block::CachedBlobValue>(meta.number, page.offset, BlockKind::Blob, None);
    assert!(cached.is_none());
}
