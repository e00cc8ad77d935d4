//! Tests of whole tables against a model, under every option, and with damage in every byte.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::checksum::{location_seed, xxh3};
use crate::base::compression::CompressionType;
use crate::base::file_format::FileFooter;
use crate::base::version_edit::{FileNumber, TableMeta};
use crate::base::{EntryRef, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::block::frame::FRAME_HEADER_LEN;
use crate::block::{BlockCache, BlockKind};
use crate::iter::InternalIter;
use crate::mem::epoch::Pin;
use crate::mem::epoch::tests::wait_until;
use crate::mem::slice::Slice;
use crate::table::options::{DataBlockIndexType, FilterPolicy, TableOptions, TableReadOptions};
use crate::table::prefix::PrefixExtractor;
use crate::table::reader::{PointLookup, TableReader};
use crate::table::writer::TableWriter;
use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, TestOrder};
use crate::vfs::open_files::{DataFiles, DirectIo, FileAccess};
use crate::vfs::{Fs, OpenMode};

const FILE_ID: [u8; 16] = *b"random file id!!";
const SEED: u64 = 99;
const ID: FileNumber = FileNumber(7);
const PATH: &str = "/db/000007.sst";
const INDEX_TYPES: [DataBlockIndexType; 3] =
    [DataBlockIndexType::BinarySearch, DataBlockIndexType::BinaryAndHash, DataBlockIndexType::Fingerprint];

/// The result of a lookup, as an owned value.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FoundEntry {
    pub(super) seqno: SeqNo,
    pub(super) kind: RecordKind,
    pub(super) value: Slice,
}

impl TableReader {
    pub(super) fn get(&self, lookup: &PointLookup<'_>) -> Result<Option<FoundEntry>> {
        self.get_with(lookup, &Pin::new(), |seqno, kind, value| FoundEntry { seqno, kind, value: value.to_slice() })
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct TableRow {
    pub(super) user_key: Vec<u8>,
    pub(super) seqno: SeqNo,
    pub(super) kind: RecordKind,
    pub(super) value: Vec<u8>,
}

impl TableRow {
    fn key(&self) -> InternalKey<'_> {
        InternalKey::new(&self.user_key, self.seqno)
    }

    fn entry(&self) -> EntryRef<'_> {
        EntryRef { user_key: &self.user_key, seqno: self.seqno, kind: self.kind, value: &self.value }
    }
}

fn put(user_key: &[u8], seqno: u64, value: &[u8]) -> TableRow {
    TableRow { user_key: user_key.to_vec(), seqno: SeqNo(seqno), kind: RecordKind::Put, value: value.to_vec() }
}

/// Sorts rows into internal order. Of rows with equal internal keys, the first stays.
fn sort_rows(mut rows: Vec<TableRow>, order: &KeyOrder) -> Vec<TableRow> {
    rows.sort_by(|a, b| a.key().cmp(&b.key(), order));
    rows.dedup_by(|a, b| a.key().cmp(&b.key(), order).is_eq());
    rows
}

pub(super) struct TableFixture {
    pub(super) fs: MemFs,
    pub(super) meta: TableMeta,
    order: KeyOrder,
    options: TableOptions,
}

impl TableFixture {
    pub(super) fn new(rows: &[TableRow], options: &TableOptions, order: &KeyOrder) -> TableFixture {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let file = fs.open(Path::new(PATH), OpenMode::Create).unwrap();
        let mut writer = TableWriter::create(file, FILE_ID, options.clone(), order.clone(), SEED, 1234);
        for row in rows {
            writer.add(row.entry()).unwrap();
        }
        let meta = writer.finish(ID).unwrap();
        assert_eq!(meta.entries, rows.len() as u64);
        TableFixture { fs, meta, order: order.clone(), options: options.clone() }
    }

    pub(super) fn open_with_cache(&self, cache: u64, db_seed: u64) -> Result<Arc<TableReader>> {
        self.open_on_fs(Arc::new(self.fs.clone()), cache, db_seed)
    }

    fn open_on_fs(&self, fs: Arc<dyn Fs>, cache: u64, db_seed: u64) -> Result<Arc<TableReader>> {
        let files = DataFiles::tables(fs, Path::new("/db"), 3, FileAccess::buffered());
        let cache = Arc::new(BlockCache::new(cache));
        let options = TableReadOptions::for_level(&self.options, 1);
        TableReader::open(&files, cache, &self.meta, self.order.clone(), db_seed, options).map(Arc::new)
    }

    pub(super) fn open(&self) -> Result<Arc<TableReader>> {
        self.open_with_cache(1 << 20, SEED)
    }

    fn bytes(&self) -> Vec<u8> {
        let file = self.fs.open(Path::new(PATH), OpenMode::Read).unwrap();
        let mut bytes = vec![0; file.length().unwrap() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn with_bytes(&self, bytes: &[u8]) -> TableFixture {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        fs.open(Path::new(PATH), OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
        TableFixture { fs, meta: self.meta.clone(), order: self.order.clone(), options: self.options.clone() }
    }
}

fn get(table: &TableReader, user_key: &[u8], at: SeqNo) -> Result<Option<(SeqNo, RecordKind, Vec<u8>)>> {
    let found = table.get(&PointLookup::new(user_key, at, &table.order, SEED))?;
    Ok(found.map(|found| (found.seqno, found.kind, found.value.to_vec())))
}

fn expected_get(
    rows: &[TableRow],
    user_key: &[u8],
    at: SeqNo,
    order: &KeyOrder,
) -> Option<(SeqNo, RecordKind, Vec<u8>)> {
    let target = InternalKey::new(user_key, at);
    let at = rows.partition_point(|row| row.key().cmp(&target, order).is_lt());
    let row = rows.get(at).filter(|row| order.cmp(&row.user_key, user_key).is_eq())?;
    Some((row.seqno, row.kind, row.value.clone()))
}

fn row_at(iter: &impl InternalIter) -> Option<TableRow> {
    iter.valid().then(|| {
        let entry = iter.entry();
        TableRow {
            user_key: entry.user_key.to_vec(),
            seqno: entry.seqno,
            kind: entry.kind,
            value: entry.value.to_vec(),
        }
    })
}

/// Checks that every method of reading returns the expected rows.
fn check_table(table: &Arc<TableReader>, rows: &[TableRow], targets: &[(Vec<u8>, SeqNo)]) {
    let order = table.order.clone();
    let mut iter = table.iter(true);
    for (user_key, at) in targets {
        assert_eq!(get(table, user_key, *at).unwrap(), expected_get(rows, user_key, *at, &order));
        let target = InternalKey::new(user_key, *at);
        let position = rows.partition_point(|row| row.key().cmp(&target, &order).is_lt());
        iter.seek(target).unwrap();
        assert_eq!(row_at(&iter).as_ref(), rows.get(position));
        if iter.valid() {
            iter.prev().unwrap();
            assert_eq!(row_at(&iter).as_ref(), position.checked_sub(1).map(|i| &rows[i]));
        }
        iter.seek_before(target).unwrap();
        assert_eq!(row_at(&iter).as_ref(), position.checked_sub(1).map(|i| &rows[i]));
        if iter.valid() {
            iter.next().unwrap();
            assert_eq!(row_at(&iter).as_ref(), rows.get(position));
        }
    }
    iter.seek_to_first().unwrap();
    for row in rows {
        assert_eq!(row_at(&iter).as_ref(), Some(row));
        iter.next().unwrap();
    }
    assert!(!iter.valid());
    let mut iter = table.iter(false);
    iter.seek_to_last().unwrap();
    for row in rows.iter().rev() {
        assert_eq!(row_at(&iter).as_ref(), Some(row));
        iter.prev().unwrap();
    }
    assert!(!iter.valid());
}

/// Changes direction at random, in the middle of blocks and at their ends.
fn check_random_steps(table: &Arc<TableReader>, rows: &[TableRow], random: &mut SeededRng) {
    let mut iter = table.iter(true);
    iter.seek_to_first().unwrap();
    let mut at = 0usize;
    for _ in 0..3 * rows.len() {
        let forward = random.below(5) < 3;
        if forward {
            iter.next().unwrap()
        } else {
            iter.prev().unwrap()
        }
        match at.checked_add_signed(if forward { 1 } else { -1 }).filter(|at| *at < rows.len()) {
            Some(next) => at = next,
            None => {
                assert!(!iter.valid());
                at = random.below(rows.len() as u64) as usize;
                iter.seek(rows[at].key()).unwrap();
            }
        }
        assert_eq!(row_at(&iter).as_ref(), Some(&rows[at]));
    }
}

fn random_targets(rows: &[TableRow], random: &mut SeededRng) -> Vec<(Vec<u8>, SeqNo)> {
    let mut targets = vec![(vec![], SeqNo::MAX), (vec![], SeqNo::ZERO), (vec![255; 20], SeqNo(5))];
    for row in rows {
        targets.push((row.user_key.clone(), row.seqno));
        targets.push((row.user_key.clone(), SeqNo(row.seqno.0 + 1)));
        targets.push((row.user_key.clone(), SeqNo(row.seqno.0.saturating_sub(1))));
        let mut near = row.user_key.clone();
        match random.below(4) {
            0 => near.push(0),
            1 => drop(near.pop()),
            2 => near.make_ascii_uppercase(),
            _ => near.iter_mut().last().into_iter().for_each(|last| *last = last.wrapping_add(1)),
        }
        targets.push((near, SeqNo(random.below(60))));
    }
    targets
}

/// Keys of few letters in both cases, some with many versions; some values are large, and some entries are
/// tombstones.
fn random_rows(n: u64, random: &mut SeededRng, order: &KeyOrder) -> Vec<TableRow> {
    let mut rows = Vec::new();
    for _ in 0..n {
        let len = random.below(7) as usize;
        let user_key: Vec<u8> = (0..len).map(|_| b"abcABC\xff"[random.below(7) as usize]).collect();
        let versions = if random.below(12) == 0 { 30 } else { 1 };
        for _ in 0..versions {
            let kind = [RecordKind::Put, RecordKind::Put, RecordKind::Delete, RecordKind::SingleDelete];
            let kind = kind[random.below(4) as usize];
            let len = if random.below(40) == 0 { 3000 } else { random.below(30) as usize };
            let value = if kind == RecordKind::Put { vec![random.below(256) as u8; len] } else { Vec::new() };
            rows.push(TableRow { user_key: user_key.clone(), seqno: SeqNo(random.below(55)), kind, value });
        }
    }
    sort_rows(rows, order)
}

#[test]
fn random_table_matches_model_for_every_option() {
    let mut random = SeededRng::new(4242);
    let orders = [
        KeyOrder::bytewise(),
        KeyOrder::custom(Arc::new(TestOrder::AnyCase)),
        KeyOrder::custom(Arc::new(TestOrder::AnyCaseHashed)),
        KeyOrder::custom(Arc::new(TestOrder::Reversed)),
    ];
    let codecs = [CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(6)];
    let sizes = [64u32, 100, 300, 1024, 4096, 16 << 10];
    for round in 0..96usize {
        let order = &orders[round % 4];
        let pick = |random: &mut SeededRng, n: usize| random.below(n as u64) as usize;
        let options = TableOptions {
            block_size: sizes[pick(&mut random, 6)],
            restart_interval: [1, 2, 5, 16, 255][pick(&mut random, 5)],
            data_block_index_type: INDEX_TYPES[pick(&mut random, 3)],
            data_block_hash_table_util_ratio: [0.1, 0.75, 1.0, 10.0][pick(&mut random, 4)],
            compression: codecs[round % 3],
            filter_policy: if random.below(4) == 0 {
                FilterPolicy::None
            } else {
                FilterPolicy::Bloom { bits_per_key: 10.0 }
            },
            prefix_extractor: [None, Some(PrefixExtractor::Fixed(2)), Some(PrefixExtractor::Delimiter(b'1'))]
                [round % 3],
            metadata_block_size: [64, 200, 4096][pick(&mut random, 3)],
            partition_index_and_filters: round % 5 != 0,
            cache_index_and_filter_blocks: random.below(2) == 0,
            pin_top_level: random.below(2) == 0,
            pin_l0_and_l1: random.below(2) == 0,
        };
        let n = 1 + random.below(120);
        let rows = random_rows(n, &mut random, order);
        let fixture = TableFixture::new(&rows, &options, order);
        let table = fixture.open_with_cache([0, 4000, 1 << 20][pick(&mut random, 3)], SEED).unwrap();
        table.verify().unwrap();
        let properties = table.properties();
        assert_eq!((properties.entries, table.fetcher.size), (rows.len() as u64, fixture.bytes().len() as u64));
        assert_eq!(properties.filter_partitions > 0, options.filter_policy != FilterPolicy::None && round % 4 != 1);
        check_table(&table, &rows, &random_targets(&rows, &mut random));
        check_random_steps(&table, &rows, &mut random);
        let written = if round % 4 == 1 { DataBlockIndexType::BinarySearch } else { options.data_block_index_type };
        assert_eq!(properties.data_block_index_type, Some(written), "an order without hashes falls back");
        let cache = &table.fetcher.cache;
        assert!(cache.used() <= cache.capacity());
    }
}

#[test]
fn versions_of_one_key_span_index_partitions() {
    let mut rows: Vec<TableRow> =
        (1..=400u64).rev().map(|seqno| put(b"key", 10 * seqno, &seqno.to_le_bytes())).collect();
    rows.insert(0, put(b"kex", 3, b"before"));
    rows.push(put(b"kez", 3, b"after"));
    for data_block_index_type in INDEX_TYPES {
        let sizes = TableOptions { block_size: 64, metadata_block_size: 64, ..TableOptions::default() };
        let fixture = TableFixture::new(&rows, &TableOptions { data_block_index_type, ..sizes }, &KeyOrder::bytewise());
        let table = fixture.open().unwrap();
        table.verify().unwrap();
        let properties = table.properties();
        assert!(properties.index_partitions > 10 && properties.data_blocks > 50, "{properties:?}");
        assert_eq!(properties.filter_partitions, 1);
        for at in 0..4010 {
            let found = get(&table, b"key", SeqNo(at)).unwrap();
            assert_eq!(found, expected_get(&rows, b"key", SeqNo(at), &table.order));
            assert_eq!(found.is_some(), at >= 10);
        }
        check_table(&table, &rows, &random_targets(&rows, &mut SeededRng::new(3)));
    }
}

#[test]
fn the_longest_keys_and_large_values() {
    let order = KeyOrder::bytewise();
    let mut random = SeededRng::new(77);
    let mut long = random.random_bytes(65_535);
    let mut rows =
        vec![put(b"", 5, b"value of empty key"), put(&long, 9, &random.random_bytes(100_000)), put(&long, 8, b"old")];
    long[65_534] ^= 1;
    rows.extend([
        put(&long, 9, b"x"),
        put(b"m", 4, &vec![7; 3 << 20]),
        put(b"m", 3, b""),
        put(b"n", 1, &[1; 32 << 10]),
    ]);
    rows.push(put(b"o", 1, &[1; (32 << 10) + 1]));
    rows.push(put(b"p", 1, b"small again"));
    let rows = sort_rows(rows, &order);
    for (compression, data_block_index_type) in [
        (CompressionType::None, DataBlockIndexType::Fingerprint),
        (CompressionType::Lz4, DataBlockIndexType::Fingerprint),
        (CompressionType::Lz4, DataBlockIndexType::BinaryAndHash),
        (CompressionType::None, DataBlockIndexType::BinarySearch),
    ] {
        let options = TableOptions { compression, data_block_index_type, ..TableOptions::default() };
        let fixture = TableFixture::new(&rows, &options, &order);
        let table = fixture.open().unwrap();
        table.verify().unwrap();
        check_table(&table, &rows, &random_targets(&rows, &mut random));
        assert_eq!(table.properties().data_block_index_type, Some(data_block_index_type));
        assert_eq!(table.properties().largest_key, (rows.last().unwrap().user_key.clone(), rows.last().unwrap().seqno));
        let longer = [long.as_slice(), &[0; 10]].concat();
        assert_eq!(get(&table, &longer, SeqNo::MAX).unwrap(), None);
        assert!(table.fetcher.cache.used() <= 1 << 20);
    }
}

#[test]
fn one_entry_is_a_table() {
    let one = [vec![put(b"", 0, b"")], vec![put(b"k", SeqNo::MAX.0, b"v")]];
    for (rows, data_block_index_type) in one.iter().flat_map(|rows| INDEX_TYPES.map(|index_type| (rows, index_type))) {
        let options = TableOptions { data_block_index_type, ..TableOptions::default() };
        let fixture = TableFixture::new(rows, &options, &KeyOrder::bytewise());
        assert_eq!((fixture.meta.smallest_seqno, fixture.meta.largest_seqno), (rows[0].seqno, rows[0].seqno));
        let table = fixture.open().unwrap();
        table.verify().unwrap();
        check_table(
            &table,
            rows,
            &[(vec![], SeqNo::MAX), (vec![], SeqNo(0)), (b"k".to_vec(), SeqNo::MAX), (vec![255], SeqNo(1))],
        );
    }
}

#[test]
fn entries_out_of_order_are_refused() {
    for (a, b) in [
        (put(b"b", 1, b""), put(b"a", 1, b"")),
        (put(b"a", 1, b""), put(b"a", 2, b"")),
        (put(b"a", 1, b""), put(b"a", 1, b"")),
    ] {
        let file = MemFs::new().open(Path::new("/t"), OpenMode::Create).unwrap();
        let order = KeyOrder::bytewise();
        let mut writer = TableWriter::create(file, FILE_ID, TableOptions::default(), order, SEED, 0);
        writer.add(a.entry()).unwrap();
        assert_eq!(writer.add(b.entry()).unwrap_err().kind(), ErrorKind::Corruption);
    }
}

fn sequential_rows(n: u64) -> Vec<TableRow> {
    (0..n)
        .map(|i| put(format!("key {:05}", 2 * i).as_bytes(), 1 + i % 9, format!("value {i}").repeat(3).as_bytes()))
        .collect()
}

#[test]
fn absent_keys_are_filtered_under_any_seed() {
    let rows = sequential_rows(3000);
    let options = TableOptions { metadata_block_size: 512, ..TableOptions::default() };
    let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    for db_seed in [SEED, 5] {
        let table = fixture.open_with_cache(8 << 20, db_seed).unwrap();
        for row in &rows {
            let lookup = PointLookup::new(&row.user_key, SeqNo::MAX, &table.order, db_seed);
            assert_eq!(table.get(&lookup).unwrap().unwrap().value, row.value);
        }
        let data_reads = |table: &TableReader| {
            let (_, data) = table.fetcher.cache.stats().kinds[0];
            data.hits + data.misses
        };
        let before = data_reads(&table);
        for i in 0..3000 {
            let key = format!("key {:05}", 2 * i + 1);
            assert!(table.get(&PointLookup::new(key.as_bytes(), SeqNo::MAX, &table.order, db_seed)).unwrap().is_none());
        }
        assert!(data_reads(&table) - before < 60, "about one in a hundred absent keys passes the filter");
        let no_hash = PointLookup { key: &rows[5].user_key, hash: None, snapshot_seqno: SeqNo::MAX };
        assert!(table.get(&no_hash).unwrap().is_some());
    }
}

#[test]
fn options_say_where_index_and_filter_live() {
    let rows = sequential_rows(4000);
    let kinds = |table: &TableReader| {
        let stats = table.fetcher.cache.stats();
        [1, 2, 3, 4].map(|i| stats.kinds[i].1.blocks)
    };
    let mut pinned_bytes = Vec::new();
    for (partition, cached, pin) in
        [(true, false, false), (true, true, true), (true, true, false), (false, false, true), (false, true, true)]
    {
        let options = TableOptions {
            metadata_block_size: 512,
            partition_index_and_filters: partition,
            cache_index_and_filter_blocks: cached,
            pin_top_level: pin,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let table = fixture.open_with_cache(8 << 20, SEED).unwrap();
        let at_open = table.pinned_bytes();
        rows.iter().for_each(|row| assert!(get(&table, &row.user_key, SeqNo::MAX).unwrap().is_some()));
        let [index, index_top, filter, filter_top] = kinds(&table);
        let properties = table.properties().clone();
        assert_eq!((index_top, filter_top), if partition && cached && !pin { (1, 1) } else { (0, 0) });
        let in_cache = partition || cached;
        let partitions = (properties.index_partitions, properties.filter_partitions);
        assert_eq!((index, filter), if in_cache { partitions } else { (0, 0) });
        assert_eq!(partitions == (1, 1), !partition);
        assert_eq!(table.pinned_bytes() > at_open, !in_cache);
        pinned_bytes.push(table.pinned_bytes());
    }
    let [tops, tops_pinned, nothing, whole, one_cached] = pinned_bytes[..] else { panic!() };
    assert!(tops == tops_pinned && nothing < tops && tops < whole && one_cached == nothing, "{pinned_bytes:?}");
}

#[test]
fn repeated_get_follows_child_links() {
    let rows = sequential_rows(2000);
    for (partition, cached, pin) in [(true, false, true), (true, true, false), (false, true, false)] {
        let options = TableOptions {
            block_size: 256,
            metadata_block_size: 512,
            partition_index_and_filters: partition,
            cache_index_and_filter_blocks: cached,
            pin_top_level: pin,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let table = fixture.open_with_cache(8 << 20, SEED).unwrap();
        let all = |table: &TableReader| {
            rows.iter().for_each(|row| assert!(get(table, &row.user_key, SeqNo::MAX).unwrap().is_some()));
            table.fetcher.cache.stats().kinds
        };
        let first = all(&table);
        let asked = table.fetcher.cache.lookup_count();
        let second = all(&table);
        assert_eq!(table.fetcher.cache.lookup_count(), asked, "{options:?}");
        for kind in 0..first.len() {
            let hits = second[kind].1.hits - first[kind].1.hits;
            let tops = u64::from(cached && !pin && partition) * rows.len() as u64;
            assert_eq!(hits, [2000, 2000, tops, 2000, tops, 0, 0][kind]);
            assert_eq!(second[kind].1.misses, first[kind].1.misses);
        }
        table.fetcher.cache.remove_file(ID);
        wait_until(|| table.fetcher.cache.used() == 0); // until then the cache rejects blocks
        assert_eq!(all(&table)[0].1.misses, 2 * first[0].1.misses);
        let mut iter = table.iter(true);
        let asked = table.fetcher.cache.lookup_count();
        iter.seek_to_first().unwrap();
        rows.iter().for_each(|_| iter.next().unwrap());
        assert_eq!(table.fetcher.cache.lookup_count(), asked, "iterators follow links too");
    }
}

#[test]
fn pinned_partitions_survive_a_scan() {
    let rows = sequential_rows(4000);
    for pinned in [false, true] {
        let options = TableOptions {
            block_size: 512,
            metadata_block_size: 512,
            compression: CompressionType::None,
            pin_l0_and_l1: pinned,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let table = fixture.open_with_cache(60_000, SEED).unwrap();
        get(&table, &rows[0].user_key, SeqNo::MAX).unwrap();
        let mut iter = table.iter(true);
        iter.seek(InternalKey::before_versions_of(&rows[1000].user_key)).unwrap();
        rows[1000..].iter().for_each(|_| iter.next().unwrap());
        let misses = |i: usize| table.fetcher.cache.stats().kinds[i].1.misses;
        let before = [misses(0), misses(1), misses(3)];
        get(&table, &rows[0].user_key, SeqNo::MAX).unwrap();
        let more = [misses(0) - before[0], misses(1) - before[1], misses(3) - before[2]];
        assert_eq!(more, if pinned { [1, 0, 0] } else { [1, 1, 1] });
        assert_eq!(table.fetcher.cache.stats().pinned > 0, pinned);
    }
}

/// Lookups, scans in both directions and removals of the whole file, with a cache that is smaller than the file. The
/// test compares every value completely.
#[test]
#[expect(clippy::disallowed_methods, reason = "the test needs scoped threads, which vfs does not offer")]
fn concurrent_reads_are_correct_during_eviction() {
    let rows = sequential_rows(3000);
    for (partition, cached, pin_top, pin_partitions, capacity) in [
        (true, false, true, false, 40_000),
        (true, true, false, true, 60_000),
        (false, true, false, false, 200_000),
        (true, true, false, false, 1 << 20),
    ] {
        let options = TableOptions {
            block_size: 512,
            metadata_block_size: 300,
            partition_index_and_filters: partition,
            cache_index_and_filter_blocks: cached,
            pin_top_level: pin_top,
            pin_l0_and_l1: pin_partitions,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let table = fixture.open_with_cache(capacity, SEED).unwrap();
        let (table, rows) = (&table, &rows);
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                scope.spawn(move || {
                    let mut random = SeededRng::new(77 + thread);
                    let mut iter = table.iter(thread != 1);
                    for round in 0..3000 {
                        // Half of the lookups use a tenth of the rows, so that some blocks stay in the cache.
                        let range = if random.below(2) == 0 { 300 } else { 3000 };
                        let row = &rows[random.below(range) as usize];
                        let found = get(table, &row.user_key, SeqNo::MAX).unwrap();
                        assert_eq!(found, Some((row.seqno, row.kind, row.value.clone())));
                        if round % 20 == 0 {
                            let at = random.below(2900) as usize;
                            iter.seek(InternalKey::before_versions_of(&rows[at].user_key)).unwrap();
                            for row in &rows[at..at + 50] {
                                assert_eq!(row_at(&iter).as_ref(), Some(row));
                                iter.next().unwrap();
                            }
                            iter.prev().unwrap();
                            assert_eq!(row_at(&iter).as_ref(), Some(&rows[at + 49]));
                        }
                        if random.below(400) == 0 {
                            table.fetcher.cache.remove_file(ID);
                        }
                        assert!(table.fetcher.cache.used() <= capacity);
                    }
                });
            }
        });
        let stats = table.fetcher.cache.stats();
        let (_, data) = stats.kinds[0];
        // The number of hits depends on the scheduler: while a pinned thread does not run, evicted blocks are not
        // freed, and the cache accepts no new ones.
        assert!(data.hits > 0 && data.misses > 100, "{stats:?}");
    }
}

#[test]
fn small_uncacheable_block_is_pinned_by_table() {
    let options = TableOptions {
        partition_index_and_filters: false,
        cache_index_and_filter_blocks: true,
        ..TableOptions::default()
    };
    for (rows, cache, fits) in [(sequential_rows(4000), 8000, true), (sequential_rows(20_000), 40_000, false)] {
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let table = fixture.open_with_cache(cache, SEED).unwrap();
        assert!(!table.fetcher.cache.admits(BlockKind::FilterPartition, 2 * table.properties().filter_bytes));
        let at_open = table.pinned_bytes();
        let get_all =
            || rows[..10].iter().for_each(|row| assert!(get(&table, &row.user_key, SeqNo::MAX).unwrap().is_some()));
        get_all();
        get_all();
        let filter_misses = table.fetcher.cache.stats().kinds[3].1.misses;
        if fits {
            assert!(table.pinned_bytes() > at_open + 4000 && filter_misses == 0);
        } else {
            // Many open tables that pinned such large filters would use memory without a bound.
            assert_eq!((table.pinned_bytes(), filter_misses), (at_open, 20));
        }
    }
}

/// A table whose index and filter have many partitions, and the file system that counts its reads.
fn open_counted(rows: &[TableRow], cache: u64) -> (Arc<TableReader>, FaultFs) {
    let options = TableOptions {
        block_size: 1024,
        metadata_block_size: 1024,
        cache_index_and_filter_blocks: true,
        ..TableOptions::default()
    };
    let fixture = TableFixture::new(rows, &options, &KeyOrder::bytewise());
    let counted = FaultFs::new(Arc::new(fixture.fs.clone()));
    (fixture.open_on_fs(Arc::new(counted.clone()), cache, SEED).unwrap(), counted)
}

/// Looks up random keys until the cache is full: it rejects blocks while other tests hold evicted ones.
fn get_until_full(table: &TableReader, rows: &[TableRow], rng: &mut SeededRng) {
    while !table.fetcher.cache.has_evicted() {
        get_random(table, rows, 1, true, rng);
    }
}

/// Looks up random keys that the table has or that it does not have.
fn get_random(table: &TableReader, rows: &[TableRow], lookups: u64, present: bool, rng: &mut SeededRng) {
    for _ in 0..lookups {
        let row = &rows[rng.next_u64() as usize % rows.len()];
        let key = [&row.user_key[..], if present { b"" } else { b"x" }].concat();
        let found = get(table, &key, SeqNo::MAX).unwrap();
        assert_eq!(found, present.then(|| (row.seqno, row.kind, row.value.clone())));
    }
}

/// Number of requests of data blocks and number of filter partitions that were read.
fn data_and_filter_requests(table: &TableReader) -> (u64, u64) {
    let stats = table.fetcher.cache.stats();
    let (data, filter) = (stats.kinds[0].1, stats.kinds[3].1);
    (data.hits + data.misses, filter.misses)
}

/// Most blocks of the table are never in the cache. If all keys exist, a filter excludes nothing.
#[test]
fn filter_that_excludes_nothing_is_not_read() {
    let (rows, mut rng) = (sequential_rows(50_000), SeededRng::new(1));
    let (table, fs) = open_counted(&rows, 100_000);
    get_until_full(&table, &rows, &mut rng);
    get_random(&table, &rows, 1000, true, &mut rng);
    let (reads, (_, filters)) = (fs.count(OpKind::Read), data_and_filter_requests(&table));
    get_random(&table, &rows, 6400, true, &mut rng);
    let (reads, filters) = (fs.count(OpKind::Read) - reads, data_and_filter_requests(&table).1 - filters);
    let until_known = 32; // if the partitions of nearly all lookups before were cached
    assert!((1..=101 + until_known).contains(&filters), "{filters} filter partitions were read");
    assert!(reads <= 2 * 6400 + filters, "{reads} reads");
}

/// A lookup of an absent key without its filter reads an index partition and a data block.
#[test]
fn filter_is_read_again_once_keys_are_absent() {
    let (rows, mut rng) = (sequential_rows(50_000), SeededRng::new(2));
    let (table, fs) = open_counted(&rows, 100_000);
    get_until_full(&table, &rows, &mut rng);
    get_random(&table, &rows, 1000, true, &mut rng);
    for round in 0..3 {
        let (reads, (data, _)) = (fs.count(OpKind::Read), data_and_filter_requests(&table));
        get_random(&table, &rows, 1000, false, &mut rng);
        let (reads, data) = (fs.count(OpKind::Read) - reads, data_and_filter_requests(&table).0 - data);
        let false_positives = 25; // one percent is expected
        assert!(data <= 5 + false_positives, "round {round}: {data} absent keys were looked up in the data");
        assert!(reads <= 1000 + 2 * (5 + false_positives), "round {round}: {reads} reads");
        get_random(&table, &rows, 100, true, &mut rng);
    }
}

#[test]
fn filter_is_read_while_the_cache_has_space() {
    let rows = sequential_rows(50_000);
    let (table, _) = open_counted(&rows, 64 << 20);
    let mut rng = SeededRng::new(3);
    get_random(&table, &rows, 3000, true, &mut rng);
    let (_, filter) = table.fetcher.cache.stats().kinds[3];
    assert!(!table.fetcher.cache.has_evicted());
    assert_eq!(filter.hits + filter.misses, 3000, "every lookup checks its filter");
}

#[test]
fn open_takes_two_reads_and_checks_comparator() {
    let rows = sequential_rows(4000);
    let fixture = TableFixture::new(&rows, &TableOptions::default(), &KeyOrder::bytewise());
    let other = TableFixture { order: KeyOrder::custom(Arc::new(TestOrder::Reversed)), ..fixture };
    let error = other.open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.message().contains("azekura.bytewise") && error.message().contains("reversed"), "{error}");
    let fixture = TableFixture { order: KeyOrder::bytewise(), ..other };
    let faults = FaultFs::new(Arc::new(fixture.fs.clone()));
    fixture.open_on_fs(Arc::new(faults.clone()), 1 << 20, SEED).unwrap();
    assert_eq!(faults.count(OpKind::Read), 2);
    for change in [
        |meta: &mut TableMeta| meta.entries += 1,
        |meta: &mut TableMeta| meta.size += 1,
        |meta: &mut TableMeta| meta.size = 3,
        |meta: &mut TableMeta| meta.largest_seqno = SeqNo(77),
    ] {
        let mut wrong = fixture.with_bytes(&fixture.bytes());
        change(&mut wrong.meta);
        let error = wrong.open().unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(Path::new(PATH))));
    }
}

/// Reads everything. Each result must be right or an error of a fitting kind. Returns whether an error was found.
fn expect_rows_or_corruption(fixture: &TableFixture, rows: &[TableRow], absent: &[u8]) -> bool {
    let fits = |kind| matches!(kind, ErrorKind::Corruption | ErrorKind::Unsupported);
    let table = match fixture.open() {
        Ok(table) => table,
        Err(error) => {
            assert!(fits(error.kind()) && error.file().is_some(), "{error}");
            return true;
        }
    };
    let mut detected = table.verify().is_err_and(|error| fits(error.kind()));
    for row in rows {
        match get(&table, &row.user_key, row.seqno) {
            Ok(found) => assert_eq!(found, Some((row.seqno, row.kind, row.value.clone()))),
            Err(error) => {
                assert!(fits(error.kind()) && error.file().is_some() && error.offset().is_some(), "{error}");
                detected = true;
            }
        }
    }
    if let Ok(found) = get(&table, absent, SeqNo::MAX) {
        assert_eq!(found, None);
    }
    let mut iter = table.iter(true);
    let mut moved = iter.seek_to_first();
    for row in rows {
        if moved.is_err() {
            break;
        }
        assert_eq!(row_at(&iter).as_ref(), Some(row));
        moved = iter.next();
    }
    assert!(!iter.valid());
    let mut moved = iter.seek_to_last();
    for row in rows.iter().rev() {
        if moved.is_err() {
            break;
        }
        assert_eq!(row_at(&iter).as_ref(), Some(row));
        moved = iter.prev();
    }
    assert!(!iter.valid());
    detected
}

#[test]
fn flipped_byte_is_corruption_everywhere() {
    let (rows, _) = rows_with_blob_pointers(40, &mut SeededRng::new(3));
    for (i, partition) in (0..6).map(|i| (i, i < 3)) {
        let options = TableOptions {
            block_size: 256,
            data_block_index_type: INDEX_TYPES[i % 3],
            metadata_block_size: 64,
            partition_index_and_filters: partition,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let good = fixture.bytes();
        assert!(!expect_rows_or_corruption(&fixture, &rows, b"key 00003"));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(
                expect_rows_or_corruption(&fixture.with_bytes(&bad), &rows, b"key 00003"),
                "byte {at} of {}",
                good.len()
            );
        }
    }
}

#[test]
fn a_table_cut_or_grown_at_any_length_is_refused() {
    let rows = sequential_rows(20);
    let fixture =
        TableFixture::new(&rows, &TableOptions { block_size: 128, ..TableOptions::default() }, &KeyOrder::bytewise());
    let good = fixture.bytes();
    for len in 0..good.len() {
        let mut cut = fixture.with_bytes(&good[..len]);
        assert_eq!(cut.open().unwrap_err().kind(), ErrorKind::Corruption);
        cut.meta.size = len as u64; // also if the manifest has this length
        assert_eq!(cut.open().unwrap_err().kind(), ErrorKind::Corruption);
    }
    let mut grown = fixture.with_bytes(&[good.as_slice(), &[0]].concat());
    assert_eq!(grown.open().unwrap_err().kind(), ErrorKind::Corruption);
    grown.meta.size += 1;
    assert_eq!(grown.open().unwrap_err().kind(), ErrorKind::Corruption);
}

#[test]
fn a_file_cut_while_it_is_open_gives_errors() {
    let rows = sequential_rows(400);
    let fixture = TableFixture::new(&rows, &TableOptions::default(), &KeyOrder::bytewise());
    let table = fixture.open().unwrap();
    fixture.fs.open(Path::new(PATH), OpenMode::Write).unwrap().set_length(100).unwrap();
    assert_eq!(get(&table, &rows[0].user_key, SeqNo::MAX).unwrap_err().kind(), ErrorKind::Corruption);
    assert_eq!(table.verify().unwrap_err().kind(), ErrorKind::Corruption);
    let mut iter = table.iter(true);
    assert!(iter.seek_to_first().is_err() && !iter.valid());
}

#[test]
fn unreadable_filter_means_may_match() {
    let rows = sequential_rows(2000);
    for partition in [true, false] {
        let options = TableOptions {
            metadata_block_size: 512,
            compression: CompressionType::None,
            partition_index_and_filters: partition,
            ..TableOptions::default()
        };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let mut bytes = fixture.bytes();
        for (kind, at, len) in list_frames(&bytes) {
            if matches!(kind, BlockKind::FilterPartition) {
                bytes[at + len - 9] ^= 1;
            }
        }
        let table = fixture.with_bytes(&bytes).open().unwrap();
        check_table(&table, &rows, &random_targets(&rows[..100], &mut SeededRng::new(6)));
        assert_eq!(table.verify().unwrap_err().kind(), ErrorKind::Corruption);
        let faults = FaultFs::new(Arc::new(fixture.fs.clone()));
        let table = fixture.open_on_fs(Arc::new(faults.clone()), 1 << 20, SEED).unwrap();
        faults.inject(FaultPlan::new(OpKind::Read, 1, Fault::Error(std::io::ErrorKind::Other)));
        assert!(
            get(&table, &rows[7].user_key, SeqNo::MAX).unwrap().is_some(),
            "the failed read was that of the filter"
        );
        assert_eq!(faults.fault_count(), 1);
    }
}

/// Kind, offset and length of each frame of an uncompressed table.
fn list_frames(bytes: &[u8]) -> Vec<(BlockKind, usize, usize)> {
    let (mut frames, mut at) = (Vec::new(), 64);
    while at < bytes.len() - FileFooter::LEN {
        let next_page = at.next_multiple_of(4096);
        if next_page > at && bytes.get(at..next_page).is_some_and(|padding| padding.iter().all(|byte| *byte == 0)) {
            at = next_page;
        }
        assert_eq!(bytes[at + 8], 0, "the frame is not compressed");
        let len = FRAME_HEADER_LEN + u32::from_le_bytes(bytes[at + 11..at + 15].try_into().unwrap()) as usize;
        frames.push((BlockKind::from_byte(bytes[at + 10]).unwrap(), at, len));
        at += len;
    }
    frames
}

#[test]
fn padding_keeps_blocks_in_pages_and_is_verified() {
    let rows = sequential_rows(4000);
    let options = TableOptions { block_size: 1700, compression: CompressionType::None, ..TableOptions::default() };
    let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    let bytes = fixture.bytes();
    let frames = list_frames(&bytes);
    let (mut end, mut padding) = (64, Vec::new());
    for (_, at, len) in &frames {
        padding.extend(end..*at);
        end = at + len;
    }
    let data = || frames.iter().filter(|(kind, ..)| kind.without_layout() == BlockKind::Data);
    let in_two_pages = data().filter(|(_, at, len)| at / 4096 < (at + len - 1) / 4096).count();
    let count = data().count();
    assert!(count > 50 && in_two_pages < count / 3, "{in_two_pages} of {count} data blocks are in two pages");
    assert!(padding.len() > 4096 && padding.len() * 20 <= bytes.len(), "{} bytes of padding", padding.len());
    let table = fixture.open().unwrap();
    table.verify().unwrap();
    check_table(&table, &rows, &random_targets(&rows[..200], &mut SeededRng::new(8)));
    for at in padding.into_iter().step_by(97) {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        let table = fixture.with_bytes(&bad).open().unwrap();
        let error = table.verify().unwrap_err();
        assert_eq!((error.kind(), error.offset()), (ErrorKind::Corruption, Some(at as u64)));
        check_table(&table, &rows, &random_targets(&rows[..5], &mut SeededRng::new(8)));
    }
}

#[test]
fn inconsistent_block_gives_error_not_panic() {
    let rows = sequential_rows(60);
    let fixtures = INDEX_TYPES.map(|data_block_index_type| {
        let options = TableOptions {
            block_size: 256,
            data_block_index_type,
            metadata_block_size: 100,
            compression: CompressionType::None,
            ..TableOptions::default()
        };
        TableFixture::new(&rows, &options, &KeyOrder::bytewise())
    });
    let goods = fixtures.each_ref().map(TableFixture::bytes);
    let mut random = SeededRng::new(2024);
    for round in 0..6000 {
        let (fixture, mut bad) = (&fixtures[round % 3], goods[round % 3].clone());
        let frames = list_frames(&bad);
        let (_, at, len) = frames[round / 3 % frames.len()];
        for _ in 0..1 + random.below(3) {
            let byte = at + FRAME_HEADER_LEN + random.below((len - FRAME_HEADER_LEN) as u64) as usize;
            bad[byte] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6) as usize];
        }
        let sum = xxh3(location_seed(&FILE_ID, at as u64), &bad[at + 8..at + len]);
        bad[at..at + 8].copy_from_slice(&sum.to_le_bytes());
        let Ok(table) = fixture.with_bytes(&bad).open() else { continue };
        let _ = table.verify();
        for row in rows.iter().step_by(7) {
            let _ = get(&table, &row.user_key, SeqNo(5));
        }
        let mut iter = table.iter(true);
        for (user_key, forward) in [(&b"key 00050"[..], true), (b"key 00051", false), (b"", true), (b"z", false)] {
            let target = InternalKey::before_versions_of(user_key);
            let mut moved = if forward { iter.seek(target) } else { iter.seek_before(target) };
            let mut steps = 0;
            while moved.is_ok() && iter.valid() {
                moved = if forward { iter.next() } else { iter.prev() };
                steps += 1;
                assert!(steps < 10_000);
            }
        }
    }
}

/// Rows whose blocks have too many restart intervals for a hash index, between rows whose blocks can have one.
#[test]
fn table_may_mix_blocks_with_and_without_hash() {
    let value = |i: u64| vec![7; if (1000..4000).contains(&i) { 0 } else { 100 }];
    let rows: Vec<TableRow> = (0..5000).map(|i| put(format!("{i:06}").as_bytes(), 1, &value(i))).collect();
    let options = TableOptions {
        block_size: 8192,
        restart_interval: 1,
        data_block_index_type: DataBlockIndexType::BinaryAndHash,
        compression: CompressionType::None,
        ..TableOptions::default()
    };
    let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    let kinds: Vec<BlockKind> = list_frames(&fixture.bytes()).into_iter().map(|(kind, ..)| kind).collect();
    let first = kinds.iter().position(|kind| *kind == BlockKind::Data).expect("a block without a hash index");
    let last = kinds.iter().rposition(|kind| *kind == BlockKind::Data).unwrap();
    assert!(kinds[..first].iter().all(|kind| *kind == BlockKind::DataWithHashIndex) && first > 10);
    assert!(
        kinds[last + 1..last + 10].iter().all(|kind| *kind == BlockKind::DataWithHashIndex),
        "later blocks have a hash index again"
    );
    let table = fixture.open().unwrap();
    table.verify().unwrap();
    check_table(&table, &rows, &random_targets(&rows, &mut SeededRng::new(9))[..3000]);
}

#[test]
fn verify_finds_key_missing_from_hash_index() {
    let rows = sequential_rows(300);
    for data_block_index_type in [DataBlockIndexType::BinaryAndHash, DataBlockIndexType::Fingerprint] {
        let compression = CompressionType::None;
        let options = TableOptions { data_block_index_type, compression, ..TableOptions::default() };
        let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
        let mut bad = fixture.bytes();
        let (kind, at, len) = list_frames(&bad)[1];
        let block = at + FRAME_HEADER_LEN..at + len;
        match kind {
            BlockKind::DataWithHashIndex => {
                let buckets = usize::from(u16::from_le_bytes([bad[block.end - 2], bad[block.end - 1]]));
                bad[block.end - 12 - buckets..block.end - 12].fill(255);
            }
            _ => {
                let count = usize::from(bad[block.end - 8]);
                let prefix = usize::from(bad[block.end - 4]);
                let fingerprints = block.end - 8 - prefix - 3 * count;
                bad[fingerprints] ^= 1;
            }
        }
        let sum = xxh3(location_seed(&FILE_ID, at as u64), &bad[at + 8..at + len]);
        bad[at..at + 8].copy_from_slice(&sum.to_le_bytes());
        let error = fixture.with_bytes(&bad).open().unwrap().verify().unwrap_err();
        assert_eq!((error.kind(), error.offset()), (ErrorKind::Corruption, Some(at as u64)), "{error}");
    }
}

#[test]
fn a_cursor_seeks_again_after_an_error() {
    let rows = sequential_rows(400);
    let options = TableOptions { compression: CompressionType::None, ..TableOptions::default() };
    let fixture = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    let mut bytes = fixture.bytes();
    bytes[200] ^= 1; // in the first data block
    let table = fixture.with_bytes(&bytes).open().unwrap();
    let mut iter = table.iter(true);
    assert_eq!(iter.seek_to_first().unwrap_err().offset(), Some(64));
    iter.seek_to_last().unwrap();
    assert_eq!(row_at(&iter).as_ref(), rows.last());
    while iter.valid() && iter.prev().is_ok() {}
    assert!(!iter.valid());
    iter.seek(rows[399].key()).unwrap();
    assert_eq!(row_at(&iter).as_ref(), rows.last());
}

#[test]
fn handles_of_files_are_bounded() {
    let fs = MemFs::new();
    fs.create_dir_all(Path::new("/db")).unwrap();
    for id in 0..10 {
        let file = fs.open(Path::new(&format!("/db/{id:06}.sst")), OpenMode::Create).unwrap();
        file.write_at(&[id], 0).unwrap();
    }
    let files = DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, FileAccess::buffered());
    let mut random = SeededRng::new(1);
    for _ in 0..200 {
        let id = random.below(10);
        let mut byte = [99];
        files.get(FileNumber(id)).unwrap().read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(u64::from(byte[0]), id);
        assert!(files.open_file_count() <= 4);
    }
    files.get(FileNumber(3)).unwrap();
    files.close(FileNumber(3));
    fs.remove_file(Path::new("/db/000003.sst")).unwrap();
    assert_eq!(files.get(FileNumber(3)).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn direct_io_applies_when_tables_exceed_memory() {
    let applies = |mode, memory, tables| {
        let files =
            DataFiles::tables(Arc::new(MemFs::new()), Path::new("/db"), 4, FileAccess::new(mode, false, || memory));
        files.add_live_bytes(tables);
        files.uses_direct_io()
    };
    assert!(!applies(DirectIo::Never, Some(1000), 5000));
    assert!(applies(DirectIo::Always, None, 0));
    assert!(!applies(DirectIo::Automatic, Some(1000), 500));
    assert!(applies(DirectIo::Automatic, Some(1000), 501));
    assert!(!applies(DirectIo::Automatic, None, u64::MAX), "the memory of the process is unknown");
}

#[test]
fn the_same_entries_give_the_same_bytes() {
    let mut random = SeededRng::new(12);
    let rows = random_rows(100, &mut random, &KeyOrder::bytewise());
    let options = TableOptions { block_size: 512, ..TableOptions::default() };
    let one = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    let two = TableFixture::new(&rows, &options, &KeyOrder::bytewise());
    assert!(one.bytes() == two.bytes());
    let by_key: BTreeMap<&[u8], &TableRow> = rows.iter().rev().map(|row| (row.user_key.as_slice(), row)).collect();
    for (user_key, newest) in by_key {
        assert_eq!(get(&one.open().unwrap(), user_key, SeqNo::MAX).unwrap().unwrap().0, newest.seqno);
    }
}

/// Rows of values and blob pointers, and the pointers.
fn rows_with_blob_pointers(n: u64, rng: &mut SeededRng) -> (Vec<TableRow>, Vec<BlobPointer>) {
    let mut rows = sequential_rows(n);
    let mut pointers = Vec::new();
    for row in rows.iter_mut().filter(|row| row.kind == RecordKind::Put) {
        if rng.below(3) > 0 {
            let logical = FileNumber(20 + rng.below(3));
            let pointer = BlobPointer {
                logical_file: logical,
                ordinal: pointers.len() as u32,
                frame_offset: 64,
                frame_len: 900 + rng.below(9),
                value_len: 880,
            };
            row.kind = RecordKind::BlobPointer;
            row.value.clear();
            pointer.encode(&mut row.value);
            pointers.push(pointer);
        }
    }
    (rows, pointers)
}

#[test]
fn table_lists_its_blob_references() {
    for (seed, compression) in (1..).zip([CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(3)]) {
        let (rows, pointers) = rows_with_blob_pointers(900, &mut SeededRng::new(seed));
        let fixture =
            TableFixture::new(&rows, &TableOptions { compression, ..TableOptions::default() }, &KeyOrder::bytewise());
        let table = fixture.open().unwrap();
        table.verify().unwrap();
        let references = table.blob_references().unwrap();
        let mut live: Vec<(FileNumber, u32)> = references
            .ordinals()
            .flat_map(|(logical, set)| set.iter().map(move |ordinal| (logical, ordinal)))
            .collect();
        let mut wanted: Vec<(FileNumber, u32)> = pointers.iter().map(|p| (p.logical_file, p.ordinal)).collect();
        live.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(live, wanted);
        let bytes: u64 = fixture.meta.blob_usage.iter().map(|uses| uses.bytes).sum();
        assert_eq!(bytes, pointers.iter().map(|p| p.frame_len).sum::<u64>());
        let described = TableReader::read_meta(table.fetcher.file.files(), &table.fetcher.cache, ID).unwrap();
        assert_eq!(described, fixture.meta);
        let row = rows.iter().find(|row| row.kind == RecordKind::BlobPointer).unwrap();
        let found = get(&table, &row.user_key, row.seqno).unwrap().unwrap();
        assert_eq!((found.1, found.2), (RecordKind::BlobPointer, row.value.clone()));
    }
}

fn write_rows(rows: &[TableRow]) -> Result<TableMeta> {
    let fs = MemFs::new();
    fs.create_dir_all(Path::new("/db"))?;
    let file = fs.open(Path::new(PATH), OpenMode::Create)?;
    let mut writer = TableWriter::create(file, FILE_ID, TableOptions::default(), KeyOrder::bytewise(), SEED, 1);
    rows.iter().try_for_each(|row| writer.add(row.entry()))?;
    writer.finish(ID)
}

#[test]
fn verify_finds_wrong_blob_references() {
    let (rows, _) = rows_with_blob_pointers(900, &mut SeededRng::new(7));
    let mut fixture = TableFixture::new(&rows, &TableOptions::default(), &KeyOrder::bytewise());
    fixture.meta.blob_usage[0].bytes += 1;
    let error = fixture.open().unwrap().verify().unwrap_err();
    assert_eq!((error.kind(), error.file().is_some()), (ErrorKind::Corruption, true));
    // A value that two entries refer to, and a malformed pointer.
    let mut twice = rows.clone();
    let value = rows.iter().find(|row| row.kind == RecordKind::BlobPointer).unwrap().value.clone();
    let other = twice.iter_mut().rev().find(|row| row.kind == RecordKind::BlobPointer).unwrap();
    other.value = value;
    assert_eq!(write_rows(&twice).unwrap_err().kind(), ErrorKind::Corruption);
    twice.iter_mut().rev().find(|row| row.kind == RecordKind::BlobPointer).unwrap().value = vec![1, 2];
    assert_eq!(write_rows(&twice).unwrap_err().kind(), ErrorKind::Corruption);
}
