//! Tests of whole blob files: written values are read, also after rewrites, and damage is detected.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::compression::CompressionType;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::base::{Error, ErrorKind, Result};
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::unfinished::UnfinishedBlobFile;
use crate::blob::writer::{BlobWriter, DirectBlobWriter};
use crate::block::frame::CompressedBlock;
use crate::block::{BlockCache, BlockHandle, BlockKind};
use crate::mem::epoch::tests::wait_until;
use crate::testing::MemFs;
use crate::testing::seeded_rng::SeededRng;
use crate::vfs::open_files::{DataFiles, FileAccess};
use crate::vfs::{Fs, OpenMode};

const CODECS: [CompressionType; 4] =
    [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(1), CompressionType::Miniz(9)];

/// A directory with blob files, and a block cache.
struct BlobFixture {
    fs: MemFs,
    files: DataFiles,
    cache: Arc<BlockCache>,
}

impl BlobFixture {
    fn new(cache: u64) -> BlobFixture {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, FileAccess::buffered()).blob_files();
        BlobFixture { fs, files, cache: Arc::new(BlockCache::new(cache)) }
    }

    fn write(&self, id: u64, compression: CompressionType, values: &[Vec<u8>]) -> (BlobFileMeta, Vec<BlobPointer>) {
        let file = self.files.create(FileNumber(id)).unwrap();
        let mut writer = BlobWriter::create(file, FileNumber(id), file_id(id), 77);
        let pointers = values.iter().map(|value| writer.append(value, compression).unwrap()).collect();
        let estimate = writer.written_bytes();
        let meta = writer.finish().unwrap();
        assert!(estimate <= meta.size && meta.number == FileNumber(id));
        (meta, pointers)
    }

    fn open(&self, meta: &BlobFileMeta) -> BlobFile {
        BlobFile::new(&self.files, Arc::clone(&self.cache), meta.number, meta.size)
    }

    /// Writes a file with those values of `sources` for which `live` is true, as blob GC does.
    fn rewrite(&self, id: u64, sources: &[&BlobFileMeta], live: impl Fn(FileNumber, u32) -> bool) -> BlobFileMeta {
        let file = self.files.create(FileNumber(id)).unwrap();
        let mut writer = BlobWriter::create(file, FileNumber(id), file_id(id), 78);
        for meta in sources {
            let source = self.open(meta);
            for section in &meta.sections {
                writer.begin_section(section.logical_file);
                let mut ahead = BlobReadAhead::eager();
                for entry in source.section_entries(section.logical_file, 0).unwrap() {
                    let (ordinal, handle) = entry.unwrap();
                    if live(section.logical_file, ordinal) {
                        source.with_frame(handle, &mut ahead, |frame| writer.copy_value(ordinal, frame)).unwrap();
                    }
                }
            }
        }
        assert!(writer.written_bytes() > 0);
        writer.finish().unwrap()
    }

    fn bytes(&self, meta: &BlobFileMeta) -> Vec<u8> {
        let mut bytes = vec![0; meta.size as usize];
        self.files.get(meta.number).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Replaces a file by one with other bytes.
    fn replace(&self, id: FileNumber, bytes: &[u8]) {
        self.files.remove(id).unwrap();
        self.fs.open(&self.files.path(id), OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
    }
}

fn file_id(id: u64) -> [u8; 16] {
    [id as u8; 16]
}

/// Values of many lengths, some of which are compressible.
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
    for (codec, cache) in CODECS.into_iter().flat_map(|codec| [(codec, 8 << 20), (codec, 0)]) {
        let fixture = BlobFixture::new(cache);
        let mut all = random_values(&mut SeededRng::new(5), 300, 2000);
        all.extend([0, 1, 30, 31, 32, 300_000].map(|len| vec![7; len]));
        all.extend(
            [0, 1, 30, 31, 32, 300_000].map(|len| (0..len).map(|i: u32| (i.wrapping_mul(i) % 251) as u8).collect()),
        );
        let (meta, pointers) = fixture.write(9, codec, &all);
        let file = fixture.open(&meta);
        assert_eq!(file.verify(&meta).unwrap(), all.len() as u64);
        assert_eq!(BlobFile::read_meta(&fixture.files, &fixture.cache, FileNumber(9)).unwrap(), meta);
        assert_eq!(meta.sections[0].bytes, pointers.iter().map(|pointer| pointer.frame_len).sum::<u64>());
        let mut ahead = BlobReadAhead::adaptive();
        for (at, (pointer, value)) in pointers.iter().zip(&all).enumerate() {
            assert_eq!((pointer.ordinal as usize, pointer.value_len as usize), (at, value.len()));
            assert_eq!(file.read(pointer, Some(&mut ahead)).unwrap(), value);
        }
        for (pointer, value) in pointers.iter().zip(&all).rev() {
            assert_eq!(file.read(pointer, None).unwrap(), value);
        }
        let cached = fixture.cache.stats().kinds.into_iter().find(|(name, _)| *name == "blob").unwrap().1;
        assert_eq!(cached.blocks > 300, cache > 0);
        assert!(file.memory_bytes() < 1000, "an open file holds its metaindex only");
    }
}

#[test]
fn incompressible_value_is_stored_raw() {
    let fixture = BlobFixture::new(0);
    let mut rng = SeededRng::new(1);
    let noise: Vec<u8> = (0..5000).map(|_| rng.next_u64() as u8).collect();
    for (id, codec) in (1..).zip(CODECS) {
        let (_, pointers) = fixture.write(id, codec, &[noise.clone(), vec![3; 5000]]);
        assert_eq!(pointers[0].frame_len, 5016);
        assert_eq!(pointers[1].frame_len < 200, codec != CompressionType::None);
    }
}

#[test]
fn cached_value_is_shared_large_bypasses_cache() {
    let fixture = BlobFixture::new(80_000);
    let (meta, pointers) = fixture.write(1, CompressionType::None, &[vec![1; 5000], vec![2; 12_000], vec![3; 20]]);
    let file = fixture.open(&meta);
    let again = |pointer| (file.read(pointer, None).unwrap(), file.read(pointer, None).unwrap());
    let (first, second) = again(&pointers[0]);
    assert_eq!(first.as_ptr(), second.as_ptr(), "both share the cached value");
    let (first, second) = again(&pointers[1]);
    assert_ne!(first.as_ptr(), second.as_ptr(), "the value exceeds an eighth of the cache");
    again(&pointers[2]);
    let stats = fixture.cache.stats();
    assert_eq!(stats.kinds[5].1.blocks, 2);
    drop(second);
    assert_eq!(first, [2; 12_000], "a slice stays valid without the cache");
    fixture.cache.remove_file(FileNumber(1));
    wait_until(|| fixture.cache.used() < 5000); // the links to values stay
    assert_eq!(file.read(&pointers[0], None).unwrap(), [1; 5000], "read from the file again");
}

#[test]
fn repeated_rewrites_keep_live_values() {
    for seed in 0..40 {
        let mut rng = SeededRng::with_stream(seed, 3);
        let fixture = BlobFixture::new(if seed % 2 == 0 { 1 << 20 } else { 0 });
        let mut live: BTreeMap<(FileNumber, u32), (BlobPointer, Vec<u8>)> = BTreeMap::new();
        let mut physical = Vec::new();
        for id in 1..=3 {
            // The third file has more values than one page of the index.
            let (count, longest) = if id == 3 { (5000, 3) } else { (1 + rng.below(60), 400) };
            let all = random_values(&mut rng, count, longest);
            let (meta, pointers) = fixture.write(id, CODECS[rng.below(4)], &all);
            live.extend(pointers.into_iter().zip(all).map(|(p, value)| ((p.logical_file, p.ordinal), (p, value))));
            physical.push(meta);
        }
        for round in 0..2 {
            let one = *live.keys().next().unwrap();
            let share = 1 + rng.below(7);
            live.retain(|key, _| *key == one || rng.chance_in_8(share));
            let is_live = |logical, ordinal| live.contains_key(&(logical, ordinal));
            // Two files are rewritten together, the third stays as it is.
            let kept = physical.pop();
            let sources: Vec<&BlobFileMeta> = physical.iter().collect();
            physical = vec![fixture.rewrite(10 + round, &sources, is_live)];
            physical.extend(kept.filter(|meta| meta.sections.iter().all(|s| !s.rewritten)));
            let files: Vec<BlobFile> = physical.iter().map(|meta| fixture.open(meta)).collect();
            let mut ahead: Vec<BlobReadAhead> = files.iter().map(|_| BlobReadAhead::adaptive()).collect();
            for ((logical, ordinal), (pointer, value)) in &live {
                let holds = |meta: &BlobFileMeta| meta.sections.iter().any(|section| section.logical_file == *logical);
                let at = physical.iter().position(holds).expect("one file contains each live value");
                let read = match rng.below(2) {
                    0 => files[at].read(pointer, None),
                    _ => files[at].read(pointer, Some(&mut ahead[at])),
                };
                assert_eq!(read.unwrap(), value, "seed {seed}, round {round}, {logical:?} {ordinal}");
            }
            for (meta, file) in physical.iter().zip(&files) {
                file.verify(meta).unwrap();
                assert_eq!(&BlobFile::read_meta(&fixture.files, &fixture.cache, meta.number).unwrap(), meta);
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

/// A blob file, and pointers into it with their values.
type WrittenBlobFile = (BlobFileMeta, Vec<(BlobPointer, Vec<u8>)>);

/// A file with one section as first written, and a small file with two rewritten sections; each with pointers and
/// values.
fn write_two_files(fixture: &BlobFixture) -> [WrittenBlobFile; 2] {
    let all: Vec<Vec<u8>> = vec![vec![1; 40], Vec::new(), b"short".to_vec(), (0..50).collect()];
    let (one, pointers_one) = fixture.write(1, CompressionType::Lz4, &all);
    let (two, pointers_two) = fixture.write(2, CompressionType::Miniz(6), &all);
    let rewritten = fixture.rewrite(3, &[&one, &two], |_, ordinal| ordinal != 1);
    let pairs = |pointers: &[BlobPointer]| pointers.iter().copied().zip(all.clone()).collect::<Vec<_>>();
    let mut moved = [pairs(&pointers_one), pairs(&pointers_two)].concat();
    moved.retain(|(pointer, _)| pointer.ordinal != 1);
    [(one, pairs(&pointers_one)), (rewritten, moved)]
}

#[test]
fn every_flipped_bit_and_every_cut_is_found() {
    let fixture = BlobFixture::new(0);
    for (meta, pairs) in write_two_files(&fixture) {
        let good = fixture.bytes(&meta);
        let check = |bad: &[u8], what: &str| {
            fixture.replace(meta.number, bad);
            let file = fixture.open(&meta);
            assert_eq!(error_kind(file.verify(&meta)), Some(ErrorKind::Corruption), "{what}");
            for (pointer, value) in &pairs {
                match file.read(pointer, None) {
                    Ok(read) => assert_eq!(&read, value, "{what}"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corruption, "{what}: {error}");
                        assert_eq!(error.file(), Some(fixture.files.path(meta.number).as_path()), "{what}");
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
        fixture.replace(meta.number, &good);
        fixture.open(&meta).verify(&meta).unwrap();
    }
}

#[test]
fn wrong_pointer_is_corruption_with_location() {
    let fixture = BlobFixture::new(0);
    for (meta, pairs) in write_two_files(&fixture) {
        let file = fixture.open(&meta);
        let (good, _) = pairs[0];
        file.read(&good, None).unwrap();
        let rewritten = meta.sections[0].rewritten;
        for (what, bad) in [
            ("another logical file", BlobPointer { logical_file: FileNumber(7), ..good }),
            ("an ordinal after the end", BlobPointer { ordinal: 4, ..good }),
            ("the ordinal of another value", BlobPointer { ordinal: good.ordinal + 1, ..good }),
            ("the highest ordinal", BlobPointer { ordinal: u32::MAX, ..good }),
            ("a longer frame", BlobPointer { frame_len: good.frame_len + 1, ..good }),
            ("a shorter frame", BlobPointer { frame_len: good.frame_len - 1, ..good }),
            ("no frame", BlobPointer { frame_len: 0, ..good }),
            ("the longest frame", BlobPointer { frame_len: u64::MAX, ..good }),
            ("a longer value", BlobPointer { value_len: good.value_len + 1, ..good }),
            ("an empty value", BlobPointer { value_len: 0, ..good }),
            ("an offset inside the frame", BlobPointer { frame_offset: good.frame_offset + 1, ..good }),
            ("an offset at the end of the file", BlobPointer { frame_offset: meta.size, ..good }),
            ("the highest offset", BlobPointer { frame_offset: u64::MAX, ..good }),
        ] {
            for mut ahead in [None, Some(BlobReadAhead::adaptive())] {
                let read = file.read(&bad, ahead.as_mut());
                if rewritten && (bad.frame_offset != good.frame_offset) {
                    assert!(read.is_ok(), "a rewritten section ignores offsets");
                    continue;
                }
                let error = read.expect_err(what);
                assert_eq!(error.kind(), ErrorKind::Corruption, "{what}");
                assert!(error.file().is_some() && error.offset().is_some(), "{what}: {error}");
            }
        }
        assert_eq!(error_kind(file.section_entries(FileNumber(7), 0)), Some(ErrorKind::Corruption));
    }
}

#[test]
fn verify_fails_when_manifest_differs() {
    let fixture = BlobFixture::new(0);
    let [(meta, _), _] = write_two_files(&fixture);
    let mut other = meta.clone();
    other.sections[0].bytes += 1;
    assert_eq!(error_kind(fixture.open(&meta).verify(&other)), Some(ErrorKind::Corruption));
    other = BlobFileMeta { created_ms: 0, ..meta.clone() };
    assert_eq!(error_kind(fixture.open(&meta).verify(&other)), Some(ErrorKind::Corruption));
    let longer = BlobFileMeta { size: meta.size + 1, ..meta };
    assert_eq!(error_kind(fixture.open(&longer).head().map(drop)), Some(ErrorKind::Corruption));
}

#[test]
fn cache_entry_of_other_kind_is_not_a_value() {
    let fixture = BlobFixture::new(1 << 20);
    let [_, (meta, pairs)] = write_two_files(&fixture);
    let file = fixture.open(&meta);
    // A page of the index is stored at the offset of a pointer.
    file.read(&pairs[0].0, None).unwrap();
    let page = file.head().unwrap().metaindex.sections[0].pages[0].handle;
    let cached = fixture.cache.get::<crate::block::cached_block::CachedBlobValue>(
        meta.number,
        page.offset,
        BlockKind::Blob,
        None,
    );
    assert!(cached.is_none());
}

/// An unfinished file with these values, of which `referenced` are referenced, and the pointers to all of them.
fn unfinished_file(
    fixture: &BlobFixture,
    values: &[Vec<u8>],
    referenced: impl Fn(u32) -> bool,
) -> (UnfinishedBlobFile, Vec<BlobPointer>) {
    let file = fixture.files.create_shared(FileNumber(7)).unwrap();
    let mut writer = DirectBlobWriter::create(Arc::clone(&file), file_id(7), FileNumber(7), 77).unwrap();
    let append = |value: &Vec<u8>| {
        let block = CompressedBlock::new(BlockKind::Blob, CompressionType::None, value);
        writer.append(&block.frame()).unwrap()
    };
    let pointers: Vec<BlobPointer> = values.iter().map(append).collect();
    let end = writer.end_offset();
    file.write_at(b"the part of a frame", end).unwrap();
    let growing = (fixture.files.clone(), Arc::clone(&fixture.cache));
    let file = BlobFile::growing(&growing.0, growing.1, FileNumber(7), None, file_id(7), end);
    let frames = pointers.iter().filter(|pointer| referenced(pointer.ordinal));
    let frames = frames.map(|p| (p.ordinal, BlockHandle { offset: p.frame_offset, len: p.frame_len })).collect();
    (UnfinishedBlobFile { partition: PartitionId(1), file, file_id: file_id(7), frames }, pointers)
}

/// What is not referenced: one value at the start, two and three in the middle, and two at the end.
fn is_referenced(ordinal: u32) -> bool {
    ![0, 3, 4, 7, 8, 9, 12, 13].contains(&ordinal)
}

#[test]
fn unfinished_file_is_finished_in_place() {
    for seed in 0..20 {
        let fixture = BlobFixture::new(0);
        let mut values = random_values(&mut SeededRng::new(seed), 14, 2000);
        values.iter_mut().for_each(|value| if seed < 4 { value.resize(500, 7) } else { value.push(7) });
        let (unfinished, pointers) = unfinished_file(&fixture, &values, is_referenced);
        let path = fixture.files.path(FileNumber(7));
        let (open, ops) = (|| fixture.fs.open(&path, OpenMode::Write).unwrap(), fixture.fs.op_count());
        let is_damaged = seed % 2 == 1;
        let meta = unfinished.finish_in_place(FileNumber(7), open(), 78, is_damaged).unwrap();
        let written = fixture.fs.op_count() - ops;
        assert_eq!(written, 5 + 12, "header and all values are written, so that the sync covers them");
        assert_eq!((meta.sections[0].values, meta.sections[0].rewritten, meta.created_ms), (12, false, 78));
        let file = fixture.open(&meta);
        assert_eq!(file.verify(&meta).unwrap(), 12);
        for (pointer, value) in pointers.iter().zip(&values) {
            match file.read(pointer, None) {
                Ok(read) => {
                    assert_eq!(&read, value);
                    assert!(is_referenced(pointer.ordinal) || pointer.ordinal == 0);
                }
                Err(error) => assert!(!is_referenced(pointer.ordinal) && error.kind() == ErrorKind::Corruption),
            }
        }
        // Once more, as after a crash.
        let bytes = fixture.bytes(&meta);
        assert_eq!(unfinished.finish_in_place(FileNumber(7), open(), 78, is_damaged).unwrap(), meta);
        assert!(fixture.bytes(&meta) == bytes);
    }
}

#[test]
fn damaged_wal_keeps_single_lost_value() {
    for is_wal_damaged in [false, true] {
        let fixture = BlobFixture::new(0);
        let values = vec![vec![5; 100]; 14];
        let (unfinished, pointers) = unfinished_file(&fixture, &values, is_referenced);
        let file = fixture.fs.open(&fixture.files.path(FileNumber(7)), OpenMode::Write).unwrap();
        file.write_at(&[6], pointers[0].frame_offset + 50).unwrap();
        let finished = unfinished.finish_in_place(FileNumber(7), file, 78, is_wal_damaged);
        if is_wal_damaged {
            assert_eq!(error_kind(finished), Some(ErrorKind::OutOfSpace));
            assert_eq!(error_kind(unfinished.file.read(&pointers[0], None)), Some(ErrorKind::Corruption));
            assert_eq!(unfinished.file.read(&pointers[1], None).unwrap(), values[1]);
        } else {
            let meta = finished.unwrap();
            assert_eq!(fixture.open(&meta).verify(&meta).unwrap(), 12);
        }
    }
}

#[test]
fn damaged_value_is_not_finished_in_place() {
    let fixture = BlobFixture::new(0);
    let (mut unfinished, pointers) = unfinished_file(&fixture, &vec![vec![5; 100]; 14], is_referenced);
    let open = || fixture.fs.open(&fixture.files.path(FileNumber(7)), OpenMode::Write).unwrap();
    open().write_at(&[6], pointers[5].frame_offset + 50).unwrap();
    let error = unfinished.finish_in_place(FileNumber(7), open(), 78, false).unwrap_err();
    assert_eq!((error.kind(), error.offset()), (ErrorKind::Corruption, Some(pointers[5].frame_offset)));
    // Pointers that leave no space for the ordinals between them are refused before anything is written.
    let first = unfinished.frames[&1];
    unfinished.frames.insert(9, BlockHandle { offset: first.offset + first.len + 20, len: first.len });
    unfinished.frames.retain(|ordinal, _| *ordinal == 1 || *ordinal == 9);
    let ops = fixture.fs.op_count();
    let refused = unfinished.finish_in_place(FileNumber(7), open(), 78, false);
    assert_eq!((error_kind(refused), fixture.fs.op_count()), (Some(ErrorKind::Corruption), ops));
}
