#![doc = include_str!("../../docs/format/table.md")]

use std::sync::Arc;

use crate::base::coding::{ByteReader, put_bytes, put_varint};
use crate::base::compression::{Codec, CompressionType};
use crate::base::key::KEY_LEN_MAX;
use crate::base::version_edit::{ExpiryTimes, FileNumber, PartitionId, put_varints};
use crate::base::{Error, Result, SeqNo};
use crate::block::BlockHandle;
use crate::table::options::DataBlockIndexType;
use crate::table::prefix::PrefixExtractor;

/// A value of more bytes than this has a data block of its own.
pub(crate) const OWN_BLOCK_VALUE_MIN: usize = 32 << 10;
/// Length in bytes of the pages in which devices and the page cache store a file.
const PAGE_LEN: u64 = 4096;
/// Padding is at most this part of the bytes before the block that it precedes, itself included.
pub(crate) const PADDING_DIVISOR: u64 = 20;

/// Length in bytes of the padding before a frame of `len` bytes, if `offset` bytes of the file are written and
/// `padding` of them are padding: up to the next page if the frame then is in fewer pages, and if padding stays within
/// its part.
pub(crate) fn padding_before(offset: u64, len: u64, padding: u64) -> u64 {
    let next_page = offset.next_multiple_of(PAGE_LEN);
    let last_page = |start: u64| (start + len.max(1) - 1) / PAGE_LEN;
    let saves_page = last_page(next_page) - next_page / PAGE_LEN < last_page(offset) - offset / PAGE_LEN;
    let more = next_page - offset;
    if saves_page && (padding + more) * PADDING_DIVISOR <= next_page { more } else { 0 }
}

/// Whether padding from `start` to `end` may precede a frame.
pub(crate) fn is_padding_range(start: u64, end: u64) -> bool {
    end >= start && end - start < PAGE_LEN && (end == start || end.is_multiple_of(PAGE_LEN))
}

/// Bit of a tag of the metaindex or of a property: a reader that does not know the tag may skip it.
pub(crate) const SECTION_IGNORABLE: u8 = 0x80;
/// Tag of the property that names the prefix extractor. Older readers skip it and look up whole keys only.
const PROPERTY_PREFIX_EXTRACTOR: u8 = 0x97;
/// 0x98 would share its number with the required property 24.
const PROPERTY_PARTITION: u8 = 0x99;
const PROPERTY_ORIGIN: u8 = 0x9a;
/// Tag of the section of references to blob files. An older reader skips it, and fails at entries with blob pointers.
const SECTION_BLOB_REFERENCES: u8 = 0x85;

/// Handles of the sections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableMetaindex {
    pub(crate) properties: BlockHandle,
    pub(crate) index_top: BlockHandle,
    pub(crate) filter_top: Option<BlockHandle>,
    /// References to values of blob files. `None` for a table without blob pointers.
    pub(crate) blob_references: Option<BlockHandle>,
    /// Sections of a newer version that a reader may skip.
    pub(crate) ignored_sections: Vec<BlockHandle>,
}

impl TableMetaindex {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let filter_top = self.filter_top.as_ref().map(|handle| (3, handle));
        let references = self.blob_references.as_ref().map(|handle| (SECTION_BLOB_REFERENCES, handle));
        let required = [(1, &self.properties), (2, &self.index_top)];
        for (tag, handle) in required.into_iter().chain(filter_top).chain(references) {
            out.push(tag);
            handle.encode(&mut out);
        }
        out
    }

    /// # Errors
    /// `Corruption` if the bytes are not a metaindex, `Unsupported` for an unknown section that may not be skipped.
    pub(crate) fn decode(bytes: &[u8]) -> Result<TableMetaindex> {
        let mut d = ByteReader::new(bytes);
        let (mut known, mut references, mut unknown) = ([None; 3], None, Vec::new());
        while !d.is_empty() {
            let tag = d.u8()?;
            let handle = BlockHandle::read(&mut d)?;
            match tag {
                1..=3 if known[usize::from(tag) - 1].replace(handle).is_some() => {
                    return Err(Error::corruption(format!("metaindex contains section {tag} twice")));
                }
                1..=3 => {}
                SECTION_BLOB_REFERENCES if references.replace(handle).is_some() => {
                    return Err(Error::corruption("metaindex contains the blob references twice"));
                }
                SECTION_BLOB_REFERENCES => {}
                _ if tag & SECTION_IGNORABLE != 0 => unknown.push(handle),
                _ => return Err(Error::unsupported(format!("table section {tag} needs a newer version"))),
            }
        }
        match known {
            [Some(properties), Some(index_top), filter_top] => Ok(TableMetaindex {
                properties,
                index_top,
                filter_top,
                blob_references: references,
                ignored_sections: unknown,
            }),
            _ => Err(Error::corruption("metaindex lacks the properties or the index")),
        }
    }
}

/// What has written a table, for repair without a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum TableOrigin {
    /// Not stored, or of a kind that this version does not know.
    #[default]
    Unknown,
    Flush(JobOrigin),
    Compaction(JobOrigin),
    /// An ingest whose first table is `first_output`. Its sequence number is above `visible`; the WAL has it
    /// (`commit.md`).
    Ingest {
        first_output: FileNumber,
        visible: SeqNo,
    },
    /// A sorted part of the input of an ingest. No edit names the table.
    Temporary,
    /// Records that wait for the comparator of their partition.
    Spilled,
}

/// The flush or the compaction that has written a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JobOrigin {
    /// The first table that the job has written, the position of this one among its tables, and whether it is the last.
    pub(crate) first_output: FileNumber,
    pub(crate) ordinal: u64,
    pub(crate) is_last: bool,
    /// Every record of the partition up to this sequence number is in tables: once all tables of the flush are
    /// finished, or when the compaction began.
    pub(crate) flushed_through: SeqNo,
    /// The tables that the outputs of a compaction replace.
    pub(crate) inputs: Arc<[FileNumber]>,
}

impl JobOrigin {
    /// A job that has written no table yet.
    pub(crate) fn new(flushed_through: SeqNo, inputs: impl IntoIterator<Item = FileNumber>) -> JobOrigin {
        let inputs = inputs.into_iter().collect();
        JobOrigin { first_output: FileNumber(0), ordinal: 0, is_last: false, flushed_through, inputs }
    }

    fn put_fields(&self, out: &mut Vec<u8>) {
        let JobOrigin { first_output, ordinal, is_last, flushed_through, inputs } = self;
        put_varints(out, [first_output.0, *ordinal, u64::from(*is_last), flushed_through.0, inputs.len() as u64]);
        inputs.iter().for_each(|input| put_varint(out, input.0));
    }

    fn read_fields(d: &mut ByteReader<'_>) -> Result<JobOrigin> {
        let (first_output, ordinal, is_last) = (FileNumber(d.varint()?), d.varint()?, d.varint()? != 0);
        let flushed_through = checked_seqno(d.varint()?)?;
        // The count is not trusted: memory grows as inputs are read.
        let inputs = (0..d.varint()?).map(|_| d.varint().map(FileNumber)).collect::<Result<Vec<_>>>()?.into();
        Ok(JobOrigin { first_output, ordinal, is_last, flushed_through, inputs })
    }
}

impl TableOrigin {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            TableOrigin::Unknown => {}
            TableOrigin::Compaction(job) => {
                put_varint(out, 1);
                job.put_fields(out);
            }
            TableOrigin::Ingest { first_output, visible } => put_varints(out, [2, first_output.0, visible.0]),
            TableOrigin::Temporary => put_varint(out, 3),
            TableOrigin::Spilled => put_varint(out, 4),
            TableOrigin::Flush(job) => {
                put_varint(out, 5);
                job.put_fields(out);
            }
        }
    }

    /// Ignores what a later version has added behind the known fields.
    fn decode(d: &mut ByteReader<'_>) -> Result<TableOrigin> {
        let origin = match d.varint()? {
            1 => TableOrigin::Compaction(JobOrigin::read_fields(d)?),
            2 => TableOrigin::Ingest { first_output: FileNumber(d.varint()?), visible: checked_seqno(d.varint()?)? },
            3 => TableOrigin::Temporary,
            4 => TableOrigin::Spilled,
            5 => TableOrigin::Flush(JobOrigin::read_fields(d)?),
            _ => TableOrigin::Unknown,
        };
        d.take(d.rest().len())?;
        Ok(origin)
    }
}

/// The properties of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TableProperties {
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    /// Bytes of keys and values before prefix compression and compression.
    pub(crate) raw_bytes: u64,
    pub(crate) smallest_seqno: SeqNo,
    pub(crate) largest_seqno: SeqNo,
    /// The seed of the hashes in filter and data blocks.
    pub(crate) hash_seed: u64,
    pub(crate) comparator: String,
    /// The extractor whose prefixes the filter contains; `None` if it contains none, or those of an extractor that this
    /// version does not know.
    pub(crate) prefix_extractor: Option<PrefixExtractor>,
    pub(crate) compression: CompressionType,
    /// The configured type; the hash index of single blocks may be missing. `None` if it is not stored: such a table
    /// has restart points only.
    pub(crate) data_block_index_type: Option<DataBlockIndexType>,
    /// Creation time in milliseconds since 1970.
    pub(crate) created_ms: u64,
    pub(crate) data_blocks: u64,
    pub(crate) index_partitions: u64,
    pub(crate) filter_partitions: u64,
    pub(crate) filter_keys: u64,
    pub(crate) partitioned: bool,
    pub(crate) smallest_key: (Vec<u8>, SeqNo),
    pub(crate) largest_key: (Vec<u8>, SeqNo),
    /// Length of all data frames in bytes; `index_bytes` and `filter_bytes` likewise.
    pub(crate) data_bytes: u64,
    pub(crate) index_bytes: u64,
    pub(crate) filter_bytes: u64,
    /// Number of entries that follow a newer version of their user key.
    pub(crate) superseded_entries: u64,
    /// Lowest sequence number of an entry that is followed by an older version of its user key. 0 if there is none,
    /// or if it is not stored.
    pub(crate) smallest_superseding_seqno: SeqNo,
    /// The expiry times of the entries; not stored if no entry expires.
    pub(crate) expiry: ExpiryTimes,
    /// Id and name of the partition, for repair without a manifest. `None` if it is not stored.
    pub(crate) partition: Option<(PartitionId, String)>,
    /// Open tables do not keep it.
    pub(crate) origin: TableOrigin,
}

const PROPERTY_HASH_SEED: u8 = 6;
const PROPERTY_COMPARATOR: u8 = 7;
const PROPERTY_COMPRESSION: u8 = 0x88;
const PROPERTY_SMALLEST_KEY: u8 = 15;
const PROPERTY_LARGEST_KEY: u8 = 16;
/// Only in tables with entries that expire. An older version refuses them.
const PROPERTY_EXPIRY: u8 = 24;
/// Required properties, as a bit set of their tags without the ignorable bit.
const REQUIRED_PROPERTIES: u32 = 0b1_1111_1110_1111_1110;

impl TableProperties {
    /// The properties that are one number, with their tags.
    fn numeric_properties(&self) -> [(u8, u64); 17] {
        [
            (1, self.entries),
            (2, self.tombstones),
            (3, self.raw_bytes),
            (4, self.smallest_seqno.0),
            (5, self.largest_seqno.0),
            (9, self.created_ms),
            (10, self.data_blocks),
            (11, self.index_partitions),
            (12, self.filter_partitions),
            (13, self.filter_keys),
            (14, u64::from(self.partitioned)),
            (0x91, self.data_bytes),
            (0x92, self.index_bytes),
            (0x93, self.filter_bytes),
            (0x94, self.data_block_index_type.map_or(0, DataBlockIndexType::to_number)),
            (0x95, self.superseded_entries),
            (0x96, self.smallest_superseding_seqno.0),
        ]
    }

    fn set_numeric(&mut self, tag: u8, value: u64) -> Result<bool> {
        match tag {
            1 => self.entries = value,
            2 => self.tombstones = value,
            3 => self.raw_bytes = value,
            4 => self.smallest_seqno = checked_seqno(value)?,
            5 => self.largest_seqno = checked_seqno(value)?,
            9 => self.created_ms = value,
            10 => self.data_blocks = value,
            11 => self.index_partitions = value,
            12 => self.filter_partitions = value,
            13 => self.filter_keys = value,
            14 => self.partitioned = value != 0,
            0x91 => self.data_bytes = value,
            0x92 => self.index_bytes = value,
            0x93 => self.filter_bytes = value,
            // For information only: readers use the kind in the frame of each block.
            0x94 => self.data_block_index_type = DataBlockIndexType::from_number(value),
            0x95 => self.superseded_entries = value,
            0x96 => self.smallest_superseding_seqno = checked_seqno(value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut payload = Vec::new();
        let mut put = |tag: u8, payload: &[u8]| {
            out.push(tag);
            put_bytes(&mut out, payload);
        };
        for (tag, value) in self.numeric_properties() {
            payload.clear();
            put_varint(&mut payload, value);
            put(tag, &payload);
        }
        put(PROPERTY_HASH_SEED, &self.hash_seed.to_le_bytes());
        put(PROPERTY_COMPARATOR, self.comparator.as_bytes());
        put(
            PROPERTY_COMPRESSION,
            &match self.compression {
                CompressionType::None => [Codec::None as u8, 0],
                CompressionType::Lz4 => [Codec::Lz4 as u8, 0],
                CompressionType::Miniz(level) => [Codec::Zlib as u8, level],
            },
        );
        if let Some(extractor) = self.prefix_extractor {
            put(PROPERTY_PREFIX_EXTRACTOR, extractor.name().as_bytes());
        }
        if let Some((id, name)) = &self.partition {
            payload.clear();
            put_varint(&mut payload, id.0);
            payload.extend_from_slice(name.as_bytes());
            put(PROPERTY_PARTITION, &payload);
        }
        if self.origin != TableOrigin::Unknown {
            payload.clear();
            self.origin.encode(&mut payload);
            put(PROPERTY_ORIGIN, &payload);
        }
        if self.expiry.entries > 0 {
            payload.clear();
            self.expiry.encode(&mut payload);
            put(PROPERTY_EXPIRY, &payload);
        }
        for (tag, (user_key, seqno)) in
            [(PROPERTY_SMALLEST_KEY, &self.smallest_key), (PROPERTY_LARGEST_KEY, &self.largest_key)]
        {
            payload.clear();
            put_varint(&mut payload, seqno.0);
            payload.extend_from_slice(user_key);
            put(tag, &payload);
        }
        out
    }

    /// Counts an entry that follows `newer`, a newer version of its user key.
    pub(crate) fn count_superseded(&mut self, newer: SeqNo) {
        let lowest = if self.superseded_entries == 0 { newer } else { self.smallest_superseding_seqno.min(newer) };
        self.superseded_entries += 1;
        self.smallest_superseding_seqno = lowest;
    }

    /// # Errors
    /// `Corruption` if the bytes are not properties or a required property is missing, `Unsupported` for an unknown
    /// property that may not be skipped.
    pub(crate) fn decode(bytes: &[u8]) -> Result<TableProperties> {
        let mut d = ByteReader::new(bytes);
        let mut properties = TableProperties::default();
        let mut seen = 0u32;
        while !d.is_empty() {
            let tag = d.u8()?;
            let payload = d.bytes()?;
            if !properties.set(tag, payload)? {
                if tag & SECTION_IGNORABLE == 0 {
                    return Err(Error::unsupported(format!("table property {tag} needs a newer version")));
                }
                continue;
            }
            let bit = 1 << (tag & !SECTION_IGNORABLE);
            if seen & bit != 0 {
                return Err(Error::corruption(format!("table property {tag} occurs twice")));
            }
            seen |= bit;
        }
        if seen & REQUIRED_PROPERTIES != REQUIRED_PROPERTIES {
            return Err(Error::corruption("table lacks required properties"));
        }
        Ok(properties)
    }

    /// Sets the property `tag`. Returns false if the tag is unknown.
    fn set(&mut self, tag: u8, payload: &[u8]) -> Result<bool> {
        let mut d = ByteReader::new(payload);
        match tag {
            PROPERTY_HASH_SEED => self.hash_seed = d.u64()?,
            PROPERTY_COMPARATOR => {
                let name = d.take(payload.len())?.to_vec();
                self.comparator =
                    String::from_utf8(name).map_err(|_| Error::corruption("comparator name is not UTF-8"))?;
            }
            PROPERTY_COMPRESSION => {
                // For information only: readers use the codec in the frame of each block.
                self.compression = match (Codec::from_byte(d.u8()?), d.u8()?) {
                    (Ok(Codec::Lz4), _) => CompressionType::Lz4,
                    (Ok(Codec::Zlib), level) => CompressionType::Miniz(level),
                    _ => CompressionType::None,
                };
                return Ok(true);
            }
            PROPERTY_PREFIX_EXTRACTOR => {
                self.prefix_extractor = PrefixExtractor::from_name(d.take(payload.len())?);
            }
            PROPERTY_PARTITION => {
                let id = PartitionId(d.varint()?);
                let name = d.take(d.rest().len())?.to_vec();
                let name = String::from_utf8(name).map_err(|_| Error::corruption("partition name is not UTF-8"))?;
                self.partition = Some((id, name));
            }
            PROPERTY_ORIGIN => self.origin = TableOrigin::decode(&mut d)?,
            PROPERTY_EXPIRY => self.expiry = ExpiryTimes::decode(&mut d)?,
            PROPERTY_SMALLEST_KEY => self.smallest_key = decode_key(&mut d)?,
            PROPERTY_LARGEST_KEY => self.largest_key = decode_key(&mut d)?,
            _ if self.numeric_properties().iter().any(|(number, _)| *number == tag) => {
                self.set_numeric(tag, d.varint()?)?;
            }
            _ => return Ok(false),
        }
        d.finish()?;
        Ok(true)
    }
}

fn checked_seqno(value: u64) -> Result<SeqNo> {
    Some(SeqNo(value)).filter(|s| *s <= SeqNo::MAX).ok_or_else(|| Error::corruption("sequence number exceeds 56 bits"))
}

fn decode_key(d: &mut ByteReader<'_>) -> Result<(Vec<u8>, SeqNo)> {
    let seqno = checked_seqno(d.varint()?)?;
    let user_key = d.take(d.rest().len())?;
    if user_key.len() > KEY_LEN_MAX {
        return Err(Error::corruption("key exceeds the maximum length"));
    }
    Ok((user_key.to_vec(), seqno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::testing::seeded_rng::SeededRng;

    #[test]
    fn metaindex_round_trips_and_skips_ignorable() {
        let handle = |offset| BlockHandle { offset, len: 9 };
        let mut metaindex = TableMetaindex { properties: handle(1), index_top: handle(2), ..TableMetaindex::default() };
        assert_eq!(TableMetaindex::decode(&metaindex.encode()).unwrap(), metaindex);
        metaindex.filter_top = Some(handle(3));
        assert_eq!(TableMetaindex::decode(&metaindex.encode()).unwrap(), metaindex);
        metaindex.blob_references = Some(handle(4));
        let mut bytes = metaindex.encode();
        assert_eq!(TableMetaindex::decode(&bytes).unwrap(), metaindex);
        for cut in 0..bytes.len() {
            if let Ok(d) = TableMetaindex::decode(&bytes[..cut]) {
                assert_eq!(d.blob_references, None);
            }
        }
        bytes.extend_from_slice(&[0x86, 7, 9]);
        assert_eq!(TableMetaindex::decode(&bytes).unwrap().ignored_sections, [handle(7)]);
        bytes.extend_from_slice(&[4, 7, 9]);
        assert_eq!(TableMetaindex::decode(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(TableMetaindex::decode(&[1, 1, 1, 1, 1, 1]).unwrap_err().kind(), ErrorKind::Corruption);
    }

    fn sample_properties() -> TableProperties {
        TableProperties {
            entries: 1 << 40,
            tombstones: 3,
            raw_bytes: 900,
            smallest_seqno: SeqNo(0),
            largest_seqno: SeqNo::MAX,
            hash_seed: u64::MAX,
            comparator: "naïve".into(),
            prefix_extractor: Some(PrefixExtractor::Fixed(8)),
            compression: CompressionType::Miniz(6),
            data_block_index_type: Some(DataBlockIndexType::BinaryAndHash),
            created_ms: 17,
            data_blocks: 1,
            index_partitions: 2,
            filter_partitions: 0,
            filter_keys: 4,
            partitioned: true,
            smallest_key: (vec![], SeqNo(9)),
            largest_key: (vec![255; 70], SeqNo(1)),
            data_bytes: 5,
            index_bytes: 6,
            filter_bytes: 7,
            superseded_entries: 8,
            smallest_superseding_seqno: SeqNo(11),
            expiry: ExpiryTimes { entries: 2, lowest_ms: 5, highest_ms: 1 << 60 },
            partition: Some((PartitionId(300), "naïve".into())),
            origin: TableOrigin::Compaction(JobOrigin {
                first_output: FileNumber(300),
                ordinal: 2,
                is_last: true,
                ..JobOrigin::new(SeqNo(1 << 40), [FileNumber(7), FileNumber(200)])
            }),
        }
    }

    #[test]
    fn padding_saves_pages_within_its_part() {
        assert_eq!(padding_before(4096 * 19 + 2000, 3000, 0), 2096);
        for (offset, len, padding, what) in [
            (4096 * 19 + 2000, 2096, 0, "it ends with the page"),
            (4096 * 19, 5000, 0, "it begins with a page"),
            (4096 * 19 + 2000, 5000, 0, "two pages in either case"),
            (4096 * 19 + 2000, 3000, 2100, "too much padding before"),
            (2000, 3000, 0, "too much for so short a file"),
        ] {
            assert_eq!(padding_before(offset, len, padding), 0, "{what}");
        }
        assert_eq!(padding_before(4096 * 19 + 2000, 6500, 0), 2096, "two pages instead of three");
        let mut rng = SeededRng::new(3);
        let (mut offset, mut padding) = (64, 0);
        for _ in 0..5_000 {
            let len = 1 + rng.below(9_000) as u64;
            let more = padding_before(offset, len, padding);
            assert!(is_padding_range(offset, offset + more));
            (offset, padding) = (offset + more, padding + more);
            assert!(padding * PADDING_DIVISOR <= offset);
            offset += len;
        }
        assert!(padding * (PADDING_DIVISOR + 5) > offset, "the part of the padding is used");
        for (start, end) in [(5, 4), (0, 4096), (5, 6), (5, 8192)] {
            assert!(!is_padding_range(start, end), "{start} to {end}");
        }
    }

    #[test]
    fn properties_round_trip_and_prefixes_fail() {
        let bytes = sample_properties().encode();
        assert_eq!(TableProperties::decode(&bytes).unwrap(), sample_properties());
        for cut in 0..bytes.len() {
            assert!(TableProperties::decode(&bytes[..cut]).is_err(), "the last property, the largest key, is required");
        }
    }

    #[test]
    fn unknown_property_is_refused_unless_ignorable() {
        let mut bytes = sample_properties().encode();
        bytes.extend_from_slice(&[0xC0, 1, 9]);
        assert_eq!(TableProperties::decode(&bytes).unwrap(), sample_properties());
        bytes.extend_from_slice(&[0x40, 1, 9]);
        assert_eq!(TableProperties::decode(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        let mut twice = sample_properties().encode();
        twice.extend_from_slice(&[1, 1, 9]);
        assert_eq!(TableProperties::decode(&twice).unwrap_err().kind(), ErrorKind::Corruption);
    }

    /// A field behind the origin of an ingest made the table unreadable, and one behind that of a compaction became an
    /// input.
    #[test]
    fn later_fields_of_an_origin_are_ignored() {
        let job = JobOrigin::new(SeqNo(9), [FileNumber(7)]);
        let ingest = TableOrigin::Ingest { first_output: FileNumber(3), visible: SeqNo(4) };
        let known = [TableOrigin::Compaction(job.clone()), ingest, TableOrigin::Temporary, TableOrigin::Spilled];
        for origin in known.into_iter().chain([TableOrigin::Flush(job)]) {
            let mut bytes = Vec::new();
            origin.encode(&mut bytes);
            bytes.extend_from_slice(&[200, 1, 5]);
            let mut properties = TableProperties::default();
            assert!(properties.set(PROPERTY_ORIGIN, &bytes).unwrap());
            assert_eq!(properties.origin, origin);
        }
        let huge = [1, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 127, 1];
        assert!(TableProperties::default().set(PROPERTY_ORIGIN, &huge).is_err());
    }

    #[test]
    fn random_bytes_give_errors_at_worst() {
        let good = sample_properties().encode();
        let mut rng = SeededRng::new(1);
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..3 {
                let at = rng.below(bad.len());
                bad[at] = rng.next_u64() as u8;
            }
            if let Ok(properties) = TableProperties::decode(&bad) {
                assert_eq!(TableProperties::decode(&properties.encode()).unwrap(), properties);
            }
            let _ = crate::table::format::TableMetaindex::decode(&bad);
        }
    }
}
