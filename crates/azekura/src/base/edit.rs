#![doc = include_str!("../../docs/format/edit.md")]

use crate::base::coding::{Decoder, put_bytes, put_varint};
use crate::base::error::{Error, Result};
use crate::base::key::SeqNo;

/// The number of a file, unique in its database for ever; files are named by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileId(pub(crate) u64);

/// The number of a partition, unique in its database for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PartitionId(pub(crate) u64);

/// The number of a log segment's life; rises with every segment that is begun and is never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(pub(crate) u32);

/// What the manifest knows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableMeta {
    pub(crate) id: FileId,
    /// Of the file, in bytes.
    pub(crate) size: u64,
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    pub(crate) lowest: SeqNo,
    pub(crate) highest: SeqNo,
    /// Milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// Bytes of keys and values before prefix compression and codecs.
    pub(crate) raw_bytes: u64,
    /// User key and sequence number of the first and the last entry.
    pub(crate) smallest: (Vec<u8>, SeqNo),
    pub(crate) largest: (Vec<u8>, SeqNo),
    /// What its entries point to, by logical files in ascending order.
    pub(crate) blobs: Vec<BlobUse>,
}

impl TableMeta {
    /// Bytes of blob files that its entries point to.
    pub(crate) fn pointed_bytes(&self) -> u64 {
        self.blobs.iter().map(|uses| uses.bytes).sum()
    }
}

/// What the manifest knows of a blob file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobMeta {
    pub(crate) id: FileId,
    /// Of the file, in bytes.
    pub(crate) size: u64,
    /// Milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// One for each logical file that has values here.
    pub(crate) sections: Vec<BlobSection>,
}

/// The values of one logical file in a blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobSection {
    pub(crate) logical: FileId,
    pub(crate) values: u64,
    /// Of their frames.
    pub(crate) bytes: u64,
    /// Whether they were copied from elsewhere, so that pointers' offsets do not hold.
    pub(crate) rewritten: bool,
}

/// How much of one logical file is referenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobUse {
    pub(crate) logical: FileId,
    /// Values.
    pub(crate) count: u64,
    /// Their frames.
    pub(crate) bytes: u64,
}

impl BlobUse {
    fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.logical.0);
        put_varint(out, self.count);
        put_varint(out, self.bytes);
    }

    fn read(d: &mut Decoder<'_>) -> Result<BlobUse> {
        Ok(BlobUse { logical: FileId(d.varint()?), count: d.varint()?, bytes: d.varint()? })
    }
}

/// The number of an engine in the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EngineKind {
    Lsm = 0,
    /// A pool whose image goes to a file.
    Pmem = 1,
    /// A pool whose file is used as memory.
    PmemMemory = 2,
}

impl EngineKind {
    pub(crate) fn from_number(number: u8) -> Option<EngineKind> {
        [EngineKind::Lsm, EngineKind::Pmem, EngineKind::PmemMemory].into_iter().find(|kind| *kind as u8 == number)
    }
}

/// What the manifest knows of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartitionMeta {
    pub(crate) id: PartitionId,
    /// An [`EngineKind`]; others need a newer version.
    pub(crate) engine: u8,
    pub(crate) name: String,
    pub(crate) comparator: String,
    pub(crate) settings: Vec<u8>,
}

/// One change of the database's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Edit {
    Database { id: [u8; 16], instance: [u8; 16], hash_seed: u64, created_ms: u64 },
    PartitionCreated(PartitionMeta),
    PartitionDropped { partition: PartitionId },
    PartitionSettings { partition: PartitionId, settings: Vec<u8> },
    TableAdded { partition: PartitionId, level: u8, table: TableMeta },
    TableRemoved { partition: PartitionId, table: FileId },
    TableMoved { partition: PartitionId, table: FileId, level: u8 },
    Flushed { partition: PartitionId, through: SeqNo },
    SegmentAdded { epoch: Epoch, file: FileId },
    SegmentRetired { epoch: Epoch },
    LogEnd { epoch: Epoch, seqno: SeqNo },
    NextIds { file: FileId, partition: PartitionId, epoch: Epoch },
    BlobFileAdded { partition: PartitionId, file: BlobMeta },
    BlobFileRemoved { partition: PartitionId, file: FileId },
    PoolFileId { partition: PartitionId, file_id: [u8; 16] },
    AllFlushed { through: SeqNo },
    TableSpilled { partition: PartitionId, table: TableMeta },
}

/// Edits with this bit in their tag may be skipped by a reader that does not know them.
const IGNORABLE: u8 = 0x80;
/// An older version may open the pool without it.
const POOL_FILE_ID: u8 = IGNORABLE | 16;
/// An older version reads more of the log without it.
const ALL_FLUSHED: u8 = IGNORABLE | 17;

impl Edit {
    fn tag(&self) -> u8 {
        match self {
            Edit::Database { .. } => 1,
            Edit::PartitionCreated(_) => 2,
            Edit::PartitionDropped { .. } => 3,
            Edit::PartitionSettings { .. } => 4,
            // Without pointers as it always was, so that an older version reads it.
            Edit::TableAdded { table, .. } if table.blobs.is_empty() => 5,
            Edit::TableAdded { .. } => 13,
            Edit::TableRemoved { .. } => 6,
            Edit::Flushed { .. } => 7,
            Edit::SegmentAdded { .. } => 8,
            Edit::SegmentRetired { .. } => 9,
            Edit::LogEnd { .. } => 10,
            Edit::NextIds { .. } => 11,
            Edit::TableMoved { .. } => 12,
            Edit::BlobFileAdded { .. } => 14,
            Edit::BlobFileRemoved { .. } => 15,
            Edit::PoolFileId { .. } => POOL_FILE_ID,
            Edit::AllFlushed { .. } => ALL_FLUSHED,
            Edit::TableSpilled { .. } => 18,
        }
    }

    /// Appends the edit to `out`.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let mut payload = Vec::new();
        self.encode_payload(&mut payload);
        out.push(self.tag());
        put_bytes(out, &payload);
    }

    fn encode_payload(&self, out: &mut Vec<u8>) {
        match self {
            Edit::Database { id, instance, hash_seed, created_ms } => {
                out.extend_from_slice(id);
                out.extend_from_slice(instance);
                out.extend_from_slice(&hash_seed.to_le_bytes());
                put_varint(out, *created_ms);
            }
            Edit::PartitionCreated(meta) => {
                put_varint(out, meta.id.0);
                out.push(meta.engine);
                put_bytes(out, meta.name.as_bytes());
                put_bytes(out, meta.comparator.as_bytes());
                put_bytes(out, &meta.settings);
            }
            Edit::PartitionDropped { partition } => put_varint(out, partition.0),
            Edit::PartitionSettings { partition, settings } => {
                put_varint(out, partition.0);
                put_bytes(out, settings);
            }
            Edit::TableAdded { partition, level, table } => {
                put_varint(out, partition.0);
                out.push(*level);
                encode_table(table, out);
                encode_uses(&table.blobs, out);
            }
            Edit::BlobFileAdded { partition, file } => {
                put_varint(out, partition.0);
                encode_blob_file(file, out);
            }
            Edit::TableSpilled { partition, table } => {
                put_varint(out, partition.0);
                encode_table(table, out);
                encode_uses(&table.blobs, out);
            }
            Edit::PoolFileId { partition, file_id } => {
                put_varint(out, partition.0);
                out.extend_from_slice(file_id);
            }
            Edit::TableRemoved { partition, table: file } | Edit::BlobFileRemoved { partition, file } => {
                put_varint(out, partition.0);
                put_varint(out, file.0);
            }
            Edit::TableMoved { partition, table, level } => {
                put_varint(out, partition.0);
                put_varint(out, table.0);
                out.push(*level);
            }
            Edit::Flushed { partition, through } => {
                put_varint(out, partition.0);
                put_varint(out, through.0);
            }
            Edit::AllFlushed { through } => put_varint(out, through.0),
            Edit::SegmentAdded { epoch, file } => {
                put_varint(out, u64::from(epoch.0));
                put_varint(out, file.0);
            }
            Edit::SegmentRetired { epoch } => put_varint(out, u64::from(epoch.0)),
            Edit::LogEnd { epoch, seqno } => {
                put_varint(out, u64::from(epoch.0));
                put_varint(out, seqno.0);
            }
            Edit::NextIds { file, partition, epoch } => {
                put_varint(out, file.0);
                put_varint(out, partition.0);
                put_varint(out, u64::from(epoch.0));
            }
        }
    }

    /// Reads one record of the manifest: a batch of edits.
    ///
    /// # Errors
    /// `Corruption` for bytes that are no edits, `Unsupported` for an unknown tag that may not be skipped.
    pub(crate) fn decode_batch(bytes: &[u8]) -> Result<Vec<Edit>> {
        let mut d = Decoder::new(bytes);
        let mut edits = Vec::new();
        while !d.is_empty() {
            let tag = d.u8()?;
            let mut payload = Decoder::new(d.bytes()?);
            if let Some(edit) = Edit::decode_payload(tag, &mut payload)? {
                payload.finish()?;
                edits.push(edit);
            }
        }
        Ok(edits)
    }

    fn decode_payload(tag: u8, d: &mut Decoder<'_>) -> Result<Option<Edit>> {
        Ok(Some(match tag {
            1 => Edit::Database {
                id: d.bytes16()?,
                instance: d.bytes16()?,
                hash_seed: d.u64()?,
                created_ms: d.varint()?,
            },
            2 => Edit::PartitionCreated(PartitionMeta {
                id: partition(d)?,
                engine: d.u8()?,
                name: string(d)?,
                comparator: string(d)?,
                settings: d.bytes()?.to_vec(),
            }),
            3 => Edit::PartitionDropped { partition: partition(d)? },
            4 => Edit::PartitionSettings { partition: partition(d)?, settings: d.bytes()?.to_vec() },
            5 => Edit::TableAdded { partition: partition(d)?, level: d.u8()?, table: decode_table(d)? },
            13 => {
                let (partition, level, table) = (partition(d)?, d.u8()?, decode_table(d)?);
                Edit::TableAdded { partition, level, table: TableMeta { blobs: decode_uses(d)?, ..table } }
            }
            14 => Edit::BlobFileAdded { partition: partition(d)?, file: decode_blob_file(d)? },
            15 => Edit::BlobFileRemoved { partition: partition(d)?, file: FileId(d.varint()?) },
            POOL_FILE_ID => Edit::PoolFileId { partition: partition(d)?, file_id: d.bytes16()? },
            ALL_FLUSHED => Edit::AllFlushed { through: seqno(d)? },
            18 => {
                let (partition, table) = (partition(d)?, decode_table(d)?);
                let blobs = if d.is_empty() { Vec::new() } else { decode_uses(d)? };
                Edit::TableSpilled { partition, table: TableMeta { blobs, ..table } }
            }
            6 => Edit::TableRemoved { partition: partition(d)?, table: FileId(d.varint()?) },
            7 => Edit::Flushed { partition: partition(d)?, through: seqno(d)? },
            8 => Edit::SegmentAdded { epoch: epoch(d)?, file: FileId(d.varint()?) },
            9 => Edit::SegmentRetired { epoch: epoch(d)? },
            10 => Edit::LogEnd { epoch: epoch(d)?, seqno: seqno(d)? },
            11 => Edit::NextIds { file: FileId(d.varint()?), partition: partition(d)?, epoch: epoch(d)? },
            12 => Edit::TableMoved { partition: partition(d)?, table: FileId(d.varint()?), level: d.u8()? },
            _ if tag & IGNORABLE != 0 => return Ok(None),
            _ => return Err(Error::unsupported(format!("manifest edit {tag} needs a newer version"))),
        }))
    }
}

fn encode_table(table: &TableMeta, out: &mut Vec<u8>) {
    let numbers = [
        table.id.0,
        table.size,
        table.entries,
        table.tombstones,
        table.lowest.0,
        table.highest.0,
        table.created_ms,
        table.raw_bytes,
    ];
    for number in numbers {
        put_varint(out, number);
    }
    for (user, seqno) in [&table.smallest, &table.largest] {
        put_bytes(out, user);
        put_varint(out, seqno.0);
    }
}

fn decode_table(d: &mut Decoder<'_>) -> Result<TableMeta> {
    Ok(TableMeta {
        id: FileId(d.varint()?),
        size: d.varint()?,
        entries: d.varint()?,
        tombstones: d.varint()?,
        lowest: seqno(d)?,
        highest: seqno(d)?,
        created_ms: d.varint()?,
        raw_bytes: d.varint()?,
        smallest: (d.bytes()?.to_vec(), seqno(d)?),
        largest: (d.bytes()?.to_vec(), seqno(d)?),
        blobs: Vec::new(),
    })
}

/// Nothing for a table that points to no blob file.
fn encode_uses(uses: &[BlobUse], out: &mut Vec<u8>) {
    if !uses.is_empty() {
        put_varint(out, uses.len() as u64);
        uses.iter().for_each(|uses| uses.encode(out));
    }
}

fn decode_uses(d: &mut Decoder<'_>) -> Result<Vec<BlobUse>> {
    let uses: Vec<BlobUse> = (0..d.varint()?).map(|_| BlobUse::read(d)).collect::<Result<_>>()?;
    match !uses.is_empty() && uses.is_sorted_by(|a, b| a.logical < b.logical) {
        true => Ok(uses),
        false => Err(Error::corruption("blob files that a table points to are not in ascending order")),
    }
}

fn encode_blob_file(file: &BlobMeta, out: &mut Vec<u8>) {
    for number in [file.id.0, file.size, file.created_ms, file.sections.len() as u64] {
        put_varint(out, number);
    }
    for section in &file.sections {
        put_varint(out, section.logical.0);
        put_varint(out, section.values);
        put_varint(out, section.bytes);
        out.push(u8::from(section.rewritten));
    }
}

fn decode_blob_file(d: &mut Decoder<'_>) -> Result<BlobMeta> {
    let (id, size, created_ms) = (FileId(d.varint()?), d.varint()?, d.varint()?);
    let section = |d: &mut Decoder<'_>| {
        let (logical, values, bytes) = (FileId(d.varint()?), d.varint()?, d.varint()?);
        let rewritten = match d.u8()? {
            0 => false,
            1 => true,
            flags => return Err(Error::unsupported(format!("flags {flags:#x} of a section need a newer version"))),
        };
        Ok(BlobSection { logical, values, bytes, rewritten })
    };
    let sections = (0..d.varint()?).map(|_| section(d)).collect::<Result<_>>()?;
    Ok(BlobMeta { id, size, created_ms, sections })
}

fn partition(d: &mut Decoder<'_>) -> Result<PartitionId> {
    Ok(PartitionId(d.varint()?))
}

fn epoch(d: &mut Decoder<'_>) -> Result<Epoch> {
    Ok(Epoch(d.varint_u32()?))
}

fn seqno(d: &mut Decoder<'_>) -> Result<SeqNo> {
    let seqno = SeqNo(d.varint()?);
    if seqno > SeqNo::MAX { Err(Error::corruption("sequence number is larger than 56 bits")) } else { Ok(seqno) }
}

fn string(d: &mut Decoder<'_>) -> Result<String> {
    let bytes = d.bytes()?;
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::corruption("name is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    fn one_of_each() -> Vec<Edit> {
        let (partition, table, epoch) = (PartitionId(3), FileId(900), Epoch(7));
        let whole = TableMeta {
            id: table,
            size: 1 << 40,
            entries: 9,
            tombstones: 2,
            lowest: SeqNo(0),
            highest: SeqNo::MAX,
            created_ms: 77,
            raw_bytes: 300,
            smallest: (vec![], SeqNo(4)),
            largest: (vec![255; 300], SeqNo(1)),
            blobs: Vec::new(),
        };
        let uses = BlobUse { logical: FileId(901), count: 2, bytes: 3 };
        vec![
            Edit::Database { id: [5; 16], instance: [6; 16], hash_seed: u64::MAX, created_ms: 1 << 41 },
            Edit::PartitionCreated(PartitionMeta {
                id: partition,
                engine: 0,
                name: "naïve".into(),
                comparator: "c".into(),
                settings: vec![1, 2, 3],
            }),
            Edit::PartitionDropped { partition },
            Edit::PartitionSettings { partition, settings: vec![] },
            Edit::TableAdded { partition, level: 6, table: whole.clone() },
            Edit::BlobFileAdded {
                partition,
                file: BlobMeta {
                    id: FileId(901),
                    size: 1 << 26,
                    created_ms: 78,
                    sections: vec![
                        BlobSection { logical: FileId(901), values: 9, bytes: 1 << 25, rewritten: false },
                        BlobSection { logical: FileId(7), values: u64::MAX, bytes: 1, rewritten: true },
                    ],
                },
            },
            Edit::BlobFileRemoved { partition, file: FileId(901) },
            Edit::PoolFileId { partition, file_id: [9; 16] },
            Edit::TableRemoved { partition, table },
            Edit::TableMoved { partition, table, level: 2 },
            Edit::TableSpilled { partition, table: whole.clone() },
            Edit::TableSpilled { partition, table: TableMeta { blobs: vec![uses], ..whole } },
            Edit::Flushed { partition, through: SeqNo(12) },
            Edit::AllFlushed { through: SeqNo(13) },
            Edit::SegmentAdded { epoch, file: table },
            Edit::SegmentRetired { epoch },
            Edit::LogEnd { epoch, seqno: SeqNo(13) },
            Edit::NextIds { file: table, partition, epoch },
        ]
    }

    #[test]
    fn every_edit_round_trips_and_no_prefix_of_it_decodes_to_something_else() {
        for edit in one_of_each() {
            let mut bytes = Vec::new();
            edit.encode(&mut bytes);
            assert_eq!(Edit::decode_batch(&bytes).unwrap(), [edit]);
            for cut in 1..bytes.len() {
                assert!(Edit::decode_batch(&bytes[..cut]).is_err());
            }
        }
    }

    #[test]
    fn a_table_with_pointers_has_a_tag_that_older_versions_refuse() {
        let Some(Edit::TableAdded { partition, level, table }) = one_of_each().into_iter().nth(4) else {
            panic!("the fifth is a table");
        };
        let tagged = |blobs: Vec<BlobUse>| {
            let edit = Edit::TableAdded { partition, level, table: TableMeta { blobs, ..table.clone() } };
            let mut bytes = Vec::new();
            edit.encode(&mut bytes);
            (bytes[0], Edit::decode_batch(&bytes).map(|edits| assert_eq!(edits, [edit])))
        };
        let one = |logical| BlobUse { logical: FileId(logical), count: 3, bytes: 4000 };
        assert!(matches!(tagged(vec![]), (5, Ok(()))));
        assert!(matches!(tagged(vec![one(2), one(90)]), (13, Ok(()))));
        assert!(matches!(tagged(vec![one(90), one(2)]), (13, Err(_))), "not in order");
        assert!(matches!(tagged(vec![one(2), one(2)]), (13, Err(_))), "twice");
    }

    #[test]
    fn unknown_edits_are_refused_unless_ignorable() {
        assert_eq!(Edit::decode_batch(&[0x50, 1, 9]).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(Edit::decode_batch(&[0xd0, 1, 9]).unwrap(), []);
        assert_eq!(Edit::decode_batch(&[3, 2, 9, 9]).unwrap_err().kind(), ErrorKind::Corruption, "left-over bytes");
    }
}
