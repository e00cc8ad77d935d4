#![doc = include_str!("../../docs/format/edit.md")]

use crate::base::coding::{ByteReader, put_bytes, put_varint};
use crate::base::error::{Error, Result};
use crate::base::key::{NEVER_MS, SeqNo};
use crate::base::key_range::{KeyBoundary, RangeTombstone};

/// Number of a file, never reused in its database. File names contain it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FileNumber(pub(crate) u64);

/// Number of a partition, never reused in its database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PartitionId(pub(crate) u64);

/// Number of one use of a WAL segment file. Increases with every segment that is started, and is never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WalEpoch(pub(crate) u32);

/// Metadata of a table in the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableMeta {
    pub(crate) number: FileNumber,
    /// Size of the file in bytes.
    pub(crate) size: u64,
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    pub(crate) smallest_seqno: SeqNo,
    pub(crate) largest_seqno: SeqNo,
    /// Creation time in milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// Bytes of keys and values before prefix compression and codecs.
    pub(crate) raw_bytes: u64,
    /// User key and sequence number of the first and the last entry.
    pub(crate) smallest_key: (Vec<u8>, SeqNo),
    pub(crate) largest_key: (Vec<u8>, SeqNo),
    /// References to blob files, in ascending order of logical files.
    pub(crate) blob_usage: Vec<TableBlobUsage>,
    /// Every range delete of the partition up to this sequence number was applied: the table has no entry that it
    /// covers. [`PartitionEdit::RangeDeletesApplied`] sets it.
    pub(crate) range_deletes_applied_through: SeqNo,
    /// The expiry times of its entries. [`PartitionEdit::TableExpiry`] sets it.
    pub(crate) expiry: ExpiryTimes,
    /// The sequence number of every entry of an ingested table. The file contains [`INGEST_PLACEHOLDER`] instead,
    /// because it was written before this number was assigned. The sequence numbers of the other fields are this one.
    pub(crate) global_seqno: Option<SeqNo>,
}

/// The expiry times of the entries of a table, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpiryTimes {
    /// Number of entries that expire.
    pub(crate) entries: u64,
    /// The lowest and the highest expiry time; 0 if no entry expires.
    pub(crate) lowest_ms: u64,
    pub(crate) highest_ms: u64,
}

impl ExpiryTimes {
    /// Counts an entry with this expiry time.
    pub(crate) fn add(&mut self, expires_ms: u64) {
        debug_assert!(expires_ms < NEVER_MS, "an entry that expires has an expiry time");
        self.lowest_ms = if self.entries == 0 { expires_ms } else { self.lowest_ms.min(expires_ms) };
        self.highest_ms = self.highest_ms.max(expires_ms);
        self.entries += 1;
    }

    /// Counts the entries of another table.
    pub(crate) fn add_all(&mut self, other: &ExpiryTimes) {
        if other.entries > 0 {
            let entries = self.entries;
            self.add(other.lowest_ms);
            self.add(other.highest_ms);
            self.entries = entries + other.entries;
        }
    }

    /// An estimate of the number of entries that have expired at `now_ms`. It is 0 only if none has, and all if all
    /// have.
    pub(crate) fn estimate_expired(&self, now_ms: u64) -> u64 {
        if self.entries == 0 || now_ms < self.lowest_ms {
            return 0;
        }
        let span = u128::from(self.highest_ms - self.lowest_ms) + 1;
        let passed = (u128::from(now_ms - self.lowest_ms) + 1).min(span);
        let expired = (u128::from(self.entries) * passed / span).max(1);
        debug_assert!(expired <= u128::from(self.entries), "not more entries have expired than expire");
        expired as u64
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put_varints(out, [self.entries, self.lowest_ms, self.highest_ms]);
    }

    /// # Errors
    /// `Corruption` if the bytes are not expiry times of at least one entry.
    pub(crate) fn decode(d: &mut ByteReader<'_>) -> Result<ExpiryTimes> {
        let times = ExpiryTimes { entries: d.varint()?, lowest_ms: d.varint()?, highest_ms: d.varint()? };
        match times.entries > 0 && times.lowest_ms <= times.highest_ms && times.highest_ms < NEVER_MS {
            true => Ok(times),
            false => Err(Error::corruption("expiry times of a table contradict each other")),
        }
    }
}

/// The sequence number that the entries of an ingested table have in the file. Not 0, so that there is a position
/// after every entry of a user key.
pub(crate) const INGEST_PLACEHOLDER: SeqNo = SeqNo(1);

impl TableMeta {
    /// The edit that sets [`range_deletes_applied_through`](TableMeta::range_deletes_applied_through), if necessary.
    fn range_deletes_applied(&self) -> Option<PartitionEdit> {
        let through = self.range_deletes_applied_through;
        (through > SeqNo::ZERO).then_some(PartitionEdit::RangeDeletesApplied { table: self.number, through })
    }

    /// The edits that set the fields that the edit of the table itself does not contain.
    pub(crate) fn detail_edits(&self) -> impl Iterator<Item = PartitionEdit> {
        let expiry = PartitionEdit::TableExpiry { table: self.number, times: self.expiry };
        self.range_deletes_applied().into_iter().chain((self.expiry.entries > 0).then_some(expiry))
    }

    /// The metadata of an ingested table once its sequence number is assigned.
    pub(crate) fn with_global_seqno(mut self, seqno: SeqNo) -> TableMeta {
        (self.smallest_seqno, self.largest_seqno, self.global_seqno) = (seqno, seqno, Some(seqno));
        (self.smallest_key.1, self.largest_key.1) = (seqno, seqno);
        self
    }

    /// The sequence number that the file contains where the metadata has `seqno`.
    pub(crate) fn seqno_in_file(&self, seqno: SeqNo) -> SeqNo {
        if self.global_seqno.is_some() { INGEST_PLACEHOLDER } else { seqno }
    }

    /// Bytes of blob files that its entries point to.
    pub(crate) fn referenced_blob_bytes(&self) -> u64 {
        self.blob_usage.iter().map(|uses| uses.bytes).sum()
    }
}

/// Metadata of a blob file in the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobFileMeta {
    pub(crate) number: FileNumber,
    /// Size of the file in bytes.
    pub(crate) size: u64,
    /// Creation time in milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// One section for each logical file that has values in this file.
    pub(crate) sections: Vec<BlobFileSection>,
}

/// The values of one logical file in a blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobFileSection {
    pub(crate) logical_file: FileNumber,
    pub(crate) values: u64,
    /// Bytes of the frames of the values.
    pub(crate) bytes: u64,
    /// Whether the values were copied from another file, so that the offsets in pointers are not valid.
    pub(crate) rewritten: bool,
}

/// References to one logical file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableBlobUsage {
    pub(crate) logical_file: FileNumber,
    /// Number of referenced values.
    pub(crate) count: u64,
    /// Bytes of their frames.
    pub(crate) bytes: u64,
}

impl TableBlobUsage {
    fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.logical_file.0);
        put_varint(out, self.count);
        put_varint(out, self.bytes);
    }

    fn read(d: &mut ByteReader<'_>) -> Result<TableBlobUsage> {
        Ok(TableBlobUsage { logical_file: FileNumber(d.varint()?), count: d.varint()?, bytes: d.varint()? })
    }
}

/// Number of an engine in the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EngineKind {
    Lsm = 0,
    /// A pool whose image is written to a file by checkpoints.
    Pmem = 1,
    /// A pool in a mapped file.
    PmemMapped = 2,
}

impl EngineKind {
    pub(crate) fn from_number(number: u8) -> Option<EngineKind> {
        [EngineKind::Lsm, EngineKind::Pmem, EngineKind::PmemMapped].into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether changes of such a tree may be missing in the WAL.
    pub(crate) fn may_skip_wal(self) -> bool {
        self == EngineKind::PmemMapped
    }
}

/// Metadata of a partition in the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartitionMeta {
    pub(crate) id: PartitionId,
    /// An [`EngineKind`]; other numbers require a newer version.
    pub(crate) engine: u8,
    pub(crate) name: String,
    pub(crate) comparator: String,
    pub(crate) settings: Vec<u8>,
}

/// One change of the database's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VersionEdit {
    Database { id: [u8; 16], instance: [u8; 16], hash_seed: u64, created_ms: u64 },
    DatabaseSettings { settings: Vec<u8> },
    PartitionCreated(PartitionMeta),
    Partition { id: PartitionId, edit: PartitionEdit },
    WalSegmentAdded { epoch: WalEpoch, file: FileNumber },
    WalSegmentRemoved { epoch: WalEpoch },
    WalEnd { epoch: WalEpoch, seqno: SeqNo },
    NextNumbers { file: FileNumber, partition: PartitionId, epoch: WalEpoch },
    AllFlushed { through: SeqNo },
}

/// One change of an existing partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PartitionEdit {
    Dropped,
    Settings {
        settings: Vec<u8>,
    },
    TableAdded {
        level: u8,
        table: TableMeta,
    },
    TableRemoved {
        table: FileNumber,
    },
    TableMoved {
        table: FileNumber,
        level: u8,
    },
    TableSpilled {
        table: TableMeta,
    },
    Flushed {
        through: SeqNo,
    },
    BlobFileAdded {
        file: BlobFileMeta,
    },
    BlobFileRemoved {
        file: FileNumber,
    },
    PoolFileId {
        file_id: [u8; 16],
    },
    /// Changes the fragments of the flushed range tombstones: removes those with these starts, then adds others.
    RangeTombstones {
        removed: Vec<KeyBoundary>,
        added: Vec<RangeTombstone>,
    },
    RangeDeletesApplied {
        table: FileNumber,
        through: SeqNo,
    },
    /// The WAL was durable through this sequence number, although no table of the partition has it any more.
    WalDurable {
        through: SeqNo,
    },
    /// Sets the name of the partition's merge operator, which it had not before.
    MergeOperator {
        name: String,
    },
    /// Sets [`TableMeta::expiry`].
    TableExpiry {
        table: FileNumber,
        times: ExpiryTimes,
    },
    /// The partition may have records that expire from now on. Written before the first of them.
    ExpiryUsed,
}

/// A reader may skip an edit with this bit in its tag if it does not know the edit.
const IGNORABLE_TAG_BIT: u8 = 0x80;
/// This edit may be skipped, because an older version can open the pool without it.
const POOL_FILE_ID: u8 = IGNORABLE_TAG_BIT | 16;
/// This edit may be skipped, because an older version then only replays more of the WAL.
const ALL_FLUSHED: u8 = IGNORABLE_TAG_BIT | 17;
/// This edit may be skipped, because it only informs users.
const DATABASE_SETTINGS: u8 = IGNORABLE_TAG_BIT | 19;
/// This edit may be skipped, because an older version then only notices less damage of the WAL.
const WAL_DURABLE: u8 = IGNORABLE_TAG_BIT | 24;

impl VersionEdit {
    fn tag(&self) -> u8 {
        match self {
            VersionEdit::Database { .. } => 1,
            VersionEdit::PartitionCreated(_) => 2,
            VersionEdit::Partition { edit, .. } => edit.tag(),
            VersionEdit::WalSegmentAdded { .. } => 8,
            VersionEdit::WalSegmentRemoved { .. } => 9,
            VersionEdit::WalEnd { .. } => 10,
            VersionEdit::NextNumbers { .. } => 11,
            VersionEdit::AllFlushed { .. } => ALL_FLUSHED,
            VersionEdit::DatabaseSettings { .. } => DATABASE_SETTINGS,
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
            VersionEdit::Database { id, instance, hash_seed, created_ms } => {
                out.extend_from_slice(id);
                out.extend_from_slice(instance);
                out.extend_from_slice(&hash_seed.to_le_bytes());
                put_varint(out, *created_ms);
            }
            VersionEdit::PartitionCreated(meta) => {
                put_varint(out, meta.id.0);
                out.push(meta.engine);
                put_bytes(out, meta.name.as_bytes());
                put_bytes(out, meta.comparator.as_bytes());
                put_bytes(out, &meta.settings);
            }
            VersionEdit::DatabaseSettings { settings } => put_bytes(out, settings),
            VersionEdit::Partition { id, edit } => {
                put_varint(out, id.0);
                edit.encode_payload(out);
            }
            VersionEdit::AllFlushed { through } => put_varint(out, through.0),
            VersionEdit::WalSegmentAdded { epoch, file } => put_varints(out, [u64::from(epoch.0), file.0]),
            VersionEdit::WalSegmentRemoved { epoch } => put_varint(out, u64::from(epoch.0)),
            VersionEdit::WalEnd { epoch, seqno } => put_varints(out, [u64::from(epoch.0), seqno.0]),
            VersionEdit::NextNumbers { file, partition, epoch } => {
                put_varints(out, [file.0, partition.0, u64::from(epoch.0)]);
            }
        }
    }

    /// Decodes one record of the manifest: a batch of edits.
    ///
    /// # Errors
    /// `Corruption` if the bytes are not valid edits; `Unsupported` for an unknown tag that may not be skipped.
    pub(crate) fn decode_batch(bytes: &[u8]) -> Result<Vec<VersionEdit>> {
        let mut d = ByteReader::new(bytes);
        let mut edits = Vec::new();
        while !d.is_empty() {
            let tag = d.u8()?;
            let mut payload = ByteReader::new(d.bytes()?);
            if let Some(edit) = VersionEdit::decode_payload(tag, &mut payload)? {
                payload.finish()?;
                edits.push(edit);
            }
        }
        Ok(edits)
    }

    fn decode_payload(tag: u8, d: &mut ByteReader<'_>) -> Result<Option<VersionEdit>> {
        Ok(Some(match tag {
            1 => VersionEdit::Database {
                id: d.bytes16()?,
                instance: d.bytes16()?,
                hash_seed: d.u64()?,
                created_ms: d.varint()?,
            },
            2 => VersionEdit::PartitionCreated(PartitionMeta {
                id: partition(d)?,
                engine: d.u8()?,
                name: string(d)?,
                comparator: string(d)?,
                settings: d.bytes()?.to_vec(),
            }),
            DATABASE_SETTINGS => VersionEdit::DatabaseSettings { settings: d.bytes()?.to_vec() },
            ALL_FLUSHED => VersionEdit::AllFlushed { through: seqno(d)? },
            8 => VersionEdit::WalSegmentAdded { epoch: epoch(d)?, file: FileNumber(d.varint()?) },
            9 => VersionEdit::WalSegmentRemoved { epoch: epoch(d)? },
            10 => VersionEdit::WalEnd { epoch: epoch(d)?, seqno: seqno(d)? },
            11 => {
                VersionEdit::NextNumbers { file: FileNumber(d.varint()?), partition: partition(d)?, epoch: epoch(d)? }
            }
            _ => {
                let id = partition(d);
                match PartitionEdit::decode_payload(tag, d)? {
                    Some(edit) => edit.of(id?),
                    None if tag & IGNORABLE_TAG_BIT != 0 => return Ok(None),
                    None => return Err(Error::unsupported(format!("manifest edit {tag} needs a newer version"))),
                }
            }
        }))
    }
}

impl PartitionEdit {
    /// This change of the partition `id`.
    pub(crate) fn of(self, id: PartitionId) -> VersionEdit {
        VersionEdit::Partition { id, edit: self }
    }

    /// The table that the edit changes.
    pub(crate) fn table(&self) -> Option<FileNumber> {
        match self {
            PartitionEdit::TableAdded { table, .. } | PartitionEdit::TableSpilled { table } => Some(table.number),
            PartitionEdit::TableRemoved { table }
            | PartitionEdit::TableMoved { table, .. }
            | PartitionEdit::RangeDeletesApplied { table, .. }
            | PartitionEdit::TableExpiry { table, .. } => Some(*table),
            _ => None,
        }
    }

    /// The blob file that the edit adds or removes.
    pub(crate) fn blob_file(&self) -> Option<FileNumber> {
        match self {
            PartitionEdit::BlobFileAdded { file } => Some(file.number),
            PartitionEdit::BlobFileRemoved { file } => Some(*file),
            _ => None,
        }
    }

    /// The file that the edit adds.
    pub(crate) fn added_file(&self) -> Option<FileNumber> {
        match self {
            PartitionEdit::TableAdded { table, .. } | PartitionEdit::TableSpilled { table } => Some(table.number),
            PartitionEdit::BlobFileAdded { file } => Some(file.number),
            _ => None,
        }
    }

    fn tag(&self) -> u8 {
        match self {
            PartitionEdit::Dropped => 3,
            PartitionEdit::Settings { .. } => 4,
            // A table without pointers has the older tag, so that an older version can read it.
            PartitionEdit::TableAdded { table, .. } if table.global_seqno.is_some() => 20,
            PartitionEdit::TableAdded { table, .. } if table.blob_usage.is_empty() => 5,
            PartitionEdit::TableAdded { .. } => 13,
            PartitionEdit::TableRemoved { .. } => 6,
            PartitionEdit::Flushed { .. } => 7,
            PartitionEdit::TableMoved { .. } => 12,
            PartitionEdit::BlobFileAdded { .. } => 14,
            PartitionEdit::BlobFileRemoved { .. } => 15,
            PartitionEdit::PoolFileId { .. } => POOL_FILE_ID,
            PartitionEdit::TableSpilled { .. } => 18,
            PartitionEdit::RangeTombstones { .. } => 21,
            PartitionEdit::RangeDeletesApplied { .. } => 22,
            PartitionEdit::MergeOperator { .. } => 23,
            PartitionEdit::WalDurable { .. } => WAL_DURABLE,
            PartitionEdit::TableExpiry { .. } => 25,
            PartitionEdit::ExpiryUsed => 26,
        }
    }

    /// Appends what follows the partition id.
    fn encode_payload(&self, out: &mut Vec<u8>) {
        match self {
            PartitionEdit::Dropped | PartitionEdit::ExpiryUsed => {}
            PartitionEdit::Settings { settings } => put_bytes(out, settings),
            PartitionEdit::TableAdded { level, table } => {
                out.push(*level);
                encode_table_and_uses(table, out);
            }
            PartitionEdit::TableSpilled { table } => encode_table_and_uses(table, out),
            PartitionEdit::BlobFileAdded { file } => encode_blob_file(file, out),
            PartitionEdit::RangeTombstones { removed, added } => encode_range_tombstones(removed, added, out),
            PartitionEdit::RangeDeletesApplied { table, through } => put_varints(out, [table.0, through.0]),
            PartitionEdit::MergeOperator { name } => put_bytes(out, name.as_bytes()),
            PartitionEdit::TableExpiry { table, times } => {
                put_varint(out, table.0);
                times.encode(out);
            }
            PartitionEdit::PoolFileId { file_id } => out.extend_from_slice(file_id),
            PartitionEdit::TableRemoved { table: file } | PartitionEdit::BlobFileRemoved { file } => {
                put_varint(out, file.0);
            }
            PartitionEdit::TableMoved { table, level } => {
                put_varint(out, table.0);
                out.push(*level);
            }
            PartitionEdit::Flushed { through } | PartitionEdit::WalDurable { through } => put_varint(out, through.0),
        }
    }

    /// Decodes what follows the partition id; `None` for an unknown tag.
    fn decode_payload(tag: u8, d: &mut ByteReader<'_>) -> Result<Option<PartitionEdit>> {
        Ok(Some(match tag {
            3 => PartitionEdit::Dropped,
            4 => PartitionEdit::Settings { settings: d.bytes()?.to_vec() },
            5 => PartitionEdit::TableAdded { level: d.u8()?, table: decode_table(d)? },
            6 => PartitionEdit::TableRemoved { table: FileNumber(d.varint()?) },
            7 => PartitionEdit::Flushed { through: seqno(d)? },
            12 => PartitionEdit::TableMoved { table: FileNumber(d.varint()?), level: d.u8()? },
            13 => {
                let (level, table) = (d.u8()?, decode_table(d)?);
                PartitionEdit::TableAdded { level, table: TableMeta { blob_usage: decode_blob_usage(d)?, ..table } }
            }
            14 => PartitionEdit::BlobFileAdded { file: decode_blob_file(d)? },
            15 => PartitionEdit::BlobFileRemoved { file: FileNumber(d.varint()?) },
            POOL_FILE_ID => PartitionEdit::PoolFileId { file_id: d.bytes16()? },
            18 => {
                let table = decode_table(d)?;
                let blob_usage = if d.is_empty() { Vec::new() } else { decode_blob_usage(d)? };
                PartitionEdit::TableSpilled { table: TableMeta { blob_usage, ..table } }
            }
            20 => PartitionEdit::TableAdded { level: d.u8()?, table: decode_ingested_table(d)? },
            21 => PartitionEdit::RangeTombstones {
                removed: (0..d.varint()?).map(|_| KeyBoundary::decode_start(d)).collect::<Result<_>>()?,
                added: (0..d.varint()?).map(|_| RangeTombstone::decode(d)).collect::<Result<_>>()?,
            },
            22 => PartitionEdit::RangeDeletesApplied { table: FileNumber(d.varint()?), through: seqno(d)? },
            23 => PartitionEdit::MergeOperator { name: string(d)? },
            WAL_DURABLE => PartitionEdit::WalDurable { through: seqno(d)? },
            25 => PartitionEdit::TableExpiry { table: FileNumber(d.varint()?), times: ExpiryTimes::decode(d)? },
            26 => PartitionEdit::ExpiryUsed,
            _ => return Ok(None),
        }))
    }
}

fn decode_ingested_table(d: &mut ByteReader<'_>) -> Result<TableMeta> {
    let table = decode_table(d)?;
    let blob_usage = if d.is_empty() { Vec::new() } else { decode_blob_usage(d)? };
    let ingested = TableMeta { blob_usage, ..table.clone() }.with_global_seqno(table.largest_seqno);
    if (ingested.smallest_seqno, &ingested.smallest_key, &ingested.largest_key)
        != (table.smallest_seqno, &table.smallest_key, &table.largest_key)
    {
        return Err(Error::corruption("an ingested table has more than one sequence number"));
    }
    Ok(ingested)
}

fn encode_table(table: &TableMeta, out: &mut Vec<u8>) {
    let numbers = [
        table.number.0,
        table.size,
        table.entries,
        table.tombstones,
        table.smallest_seqno.0,
        table.largest_seqno.0,
        table.created_ms,
        table.raw_bytes,
    ];
    for number in numbers {
        put_varint(out, number);
    }
    for (user, seqno) in [&table.smallest_key, &table.largest_key] {
        put_bytes(out, user);
        put_varint(out, seqno.0);
    }
}

fn decode_table(d: &mut ByteReader<'_>) -> Result<TableMeta> {
    Ok(TableMeta {
        number: FileNumber(d.varint()?),
        size: d.varint()?,
        entries: d.varint()?,
        tombstones: d.varint()?,
        smallest_seqno: seqno(d)?,
        largest_seqno: seqno(d)?,
        created_ms: d.varint()?,
        raw_bytes: d.varint()?,
        smallest_key: (d.bytes()?.to_vec(), seqno(d)?),
        largest_key: (d.bytes()?.to_vec(), seqno(d)?),
        blob_usage: Vec::new(),
        range_deletes_applied_through: SeqNo::ZERO,
        expiry: ExpiryTimes::default(),
        global_seqno: None,
    })
}

/// Returns no bytes for a table without pointers to blob files.
fn encode_table_and_uses(table: &TableMeta, out: &mut Vec<u8>) {
    encode_table(table, out);
    encode_uses(&table.blob_usage, out);
}

fn encode_uses(uses: &[TableBlobUsage], out: &mut Vec<u8>) {
    if !uses.is_empty() {
        put_varint(out, uses.len() as u64);
        uses.iter().for_each(|uses| uses.encode(out));
    }
}

fn decode_blob_usage(d: &mut ByteReader<'_>) -> Result<Vec<TableBlobUsage>> {
    let uses: Vec<TableBlobUsage> = (0..d.varint()?).map(|_| TableBlobUsage::read(d)).collect::<Result<_>>()?;
    match !uses.is_empty() && uses.is_sorted_by(|a, b| a.logical_file < b.logical_file) {
        true => Ok(uses),
        false => Err(Error::corruption("blob files that a table points to are not in ascending order")),
    }
}

pub(crate) fn put_varints<const N: usize>(out: &mut Vec<u8>, numbers: [u64; N]) {
    numbers.into_iter().for_each(|number| put_varint(out, number));
}

fn encode_range_tombstones(removed: &[KeyBoundary], added: &[RangeTombstone], out: &mut Vec<u8>) {
    put_varint(out, removed.len() as u64);
    removed.iter().for_each(|start| start.encode_start(out));
    put_varint(out, added.len() as u64);
    added.iter().for_each(|fragment| fragment.encode(out));
}

fn encode_blob_file(file: &BlobFileMeta, out: &mut Vec<u8>) {
    for number in [file.number.0, file.size, file.created_ms, file.sections.len() as u64] {
        put_varint(out, number);
    }
    for section in &file.sections {
        put_varint(out, section.logical_file.0);
        put_varint(out, section.values);
        put_varint(out, section.bytes);
        out.push(u8::from(section.rewritten));
    }
}

fn decode_blob_file(d: &mut ByteReader<'_>) -> Result<BlobFileMeta> {
    let (id, size, created_ms) = (FileNumber(d.varint()?), d.varint()?, d.varint()?);
    let section = |d: &mut ByteReader<'_>| {
        let (logical, values, bytes) = (FileNumber(d.varint()?), d.varint()?, d.varint()?);
        let rewritten = match d.u8()? {
            0 => false,
            1 => true,
            flags => return Err(Error::unsupported(format!("flags {flags:#x} of a section need a newer version"))),
        };
        Ok(BlobFileSection { logical_file: logical, values, bytes, rewritten })
    };
    let sections = (0..d.varint()?).map(|_| section(d)).collect::<Result<_>>()?;
    Ok(BlobFileMeta { number: id, size, created_ms, sections })
}

fn partition(d: &mut ByteReader<'_>) -> Result<PartitionId> {
    Ok(PartitionId(d.varint()?))
}

fn epoch(d: &mut ByteReader<'_>) -> Result<WalEpoch> {
    Ok(WalEpoch(d.varint_u32()?))
}

fn seqno(d: &mut ByteReader<'_>) -> Result<SeqNo> {
    let seqno = SeqNo(d.varint()?);
    if seqno > SeqNo::MAX { Err(Error::corruption("sequence number is larger than 56 bits")) } else { Ok(seqno) }
}

fn string(d: &mut ByteReader<'_>) -> Result<String> {
    let bytes = d.bytes()?;
    String::from_utf8(bytes.to_vec()).map_err(|_| Error::corruption("name is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::ErrorKind;
    use crate::base::key_range::KeyRange;

    const TIMES: ExpiryTimes = ExpiryTimes { entries: 3, lowest_ms: 0, highest_ms: NEVER_MS - 1 };

    fn sample_edits() -> Vec<VersionEdit> {
        let (partition, table, epoch) = (PartitionId(3), FileNumber(900), WalEpoch(7));
        let whole = TableMeta {
            range_deletes_applied_through: SeqNo::ZERO,
            number: table,
            size: 1 << 40,
            entries: 9,
            tombstones: 2,
            smallest_seqno: SeqNo(0),
            largest_seqno: SeqNo::MAX,
            created_ms: 77,
            raw_bytes: 300,
            smallest_key: (vec![], SeqNo(4)),
            largest_key: (vec![255; 300], SeqNo(1)),
            blob_usage: Vec::new(),
            expiry: ExpiryTimes::default(),
            global_seqno: None,
        };
        let uses = TableBlobUsage { logical_file: FileNumber(901), count: 2, bytes: 3 };
        vec![
            VersionEdit::Database { id: [5; 16], instance: [6; 16], hash_seed: u64::MAX, created_ms: 1 << 41 },
            VersionEdit::PartitionCreated(PartitionMeta {
                id: partition,
                engine: 0,
                name: "naïve".into(),
                comparator: "c".into(),
                settings: vec![1, 2, 3],
            }),
            PartitionEdit::Dropped.of(partition),
            VersionEdit::DatabaseSettings { settings: vec![7; 200] },
            PartitionEdit::Settings { settings: vec![] }.of(partition),
            PartitionEdit::TableAdded { level: 6, table: whole.clone() }.of(partition),
            PartitionEdit::BlobFileAdded {
                file: BlobFileMeta {
                    number: FileNumber(901),
                    size: 1 << 26,
                    created_ms: 78,
                    sections: vec![
                        BlobFileSection { logical_file: FileNumber(901), values: 9, bytes: 1 << 25, rewritten: false },
                        BlobFileSection { logical_file: FileNumber(7), values: u64::MAX, bytes: 1, rewritten: true },
                    ],
                },
            }
            .of(partition),
            PartitionEdit::BlobFileRemoved { file: FileNumber(901) }.of(partition),
            PartitionEdit::PoolFileId { file_id: [9; 16] }.of(partition),
            PartitionEdit::TableRemoved { table }.of(partition),
            PartitionEdit::TableMoved { table, level: 2 }.of(partition),
            PartitionEdit::TableSpilled { table: whole.clone() }.of(partition),
            PartitionEdit::TableSpilled { table: TableMeta { blob_usage: vec![uses], ..whole } }.of(partition),
            PartitionEdit::RangeTombstones {
                removed: vec![KeyBoundary::Min, KeyBoundary::After(Arc::from(&b"k"[..]))],
                added: vec![RangeTombstone {
                    range: KeyRange { start: KeyBoundary::Before(Arc::from(&b"a"[..])), end: KeyBoundary::Max },
                    seqnos: Arc::new([SeqNo(9), SeqNo(4)]),
                }],
            }
            .of(partition),
            PartitionEdit::RangeDeletesApplied { table, through: SeqNo(11) }.of(partition),
            PartitionEdit::TableExpiry { table, times: TIMES }.of(partition),
            PartitionEdit::ExpiryUsed.of(partition),
            PartitionEdit::Flushed { through: SeqNo(12) }.of(partition),
            VersionEdit::AllFlushed { through: SeqNo(13) },
            PartitionEdit::WalDurable { through: SeqNo(14) }.of(partition),
            VersionEdit::WalSegmentAdded { epoch, file: table },
            VersionEdit::WalSegmentRemoved { epoch },
            VersionEdit::WalEnd { epoch, seqno: SeqNo(13) },
            VersionEdit::NextNumbers { file: table, partition, epoch },
        ]
    }

    #[test]
    fn edits_round_trip_and_prefixes_fail_to_decode() {
        for edit in sample_edits() {
            let mut bytes = Vec::new();
            edit.encode(&mut bytes);
            assert_eq!(VersionEdit::decode_batch(&bytes).unwrap(), [edit]);
            for cut in 1..bytes.len() {
                assert!(VersionEdit::decode_batch(&bytes[..cut]).is_err());
            }
        }
    }

    #[test]
    fn table_with_blob_pointers_has_newer_tag() {
        let added = sample_edits().into_iter().find_map(|edit| match edit {
            VersionEdit::Partition { id, edit: PartitionEdit::TableAdded { level, table } } => Some((id, level, table)),
            _ => None,
        });
        let (partition, level, table) = added.expect("one of the samples is a table");
        let tagged = |blobs: Vec<TableBlobUsage>| {
            let edit = PartitionEdit::TableAdded { level, table: TableMeta { blob_usage: blobs, ..table.clone() } }
                .of(partition);
            let mut bytes = Vec::new();
            edit.encode(&mut bytes);
            (bytes[0], VersionEdit::decode_batch(&bytes).map(|edits| assert_eq!(edits, [edit])))
        };
        let one = |logical| TableBlobUsage { logical_file: FileNumber(logical), count: 3, bytes: 4000 };
        assert!(matches!(tagged(vec![]), (5, Ok(()))));
        assert!(matches!(tagged(vec![one(2), one(90)]), (13, Ok(()))));
        assert!(matches!(tagged(vec![one(90), one(2)]), (13, Err(_))), "not in order");
        assert!(matches!(tagged(vec![one(2), one(2)]), (13, Err(_))), "twice");
    }

    #[test]
    fn expired_entries_are_estimated() {
        let mut times = ExpiryTimes::default();
        assert_eq!(times.estimate_expired(u64::MAX), 0);
        for expires_ms in [100, 199, 150, 120] {
            times.add(expires_ms);
        }
        assert_eq!(times, ExpiryTimes { entries: 4, lowest_ms: 100, highest_ms: 199 });
        assert_eq!([99, 100, 149, 198, 199, u64::MAX].map(|now| times.estimate_expired(now)), [0, 1, 2, 3, 4, 4]);
        for bad in [(0, 1, 2), (1, 3, 2), (1, 2, NEVER_MS)] {
            let mut bytes = Vec::new();
            ExpiryTimes { entries: bad.0, lowest_ms: bad.1, highest_ms: bad.2 }.encode(&mut bytes);
            assert!(ExpiryTimes::decode(&mut ByteReader::new(&bytes)).is_err());
        }
    }

    #[test]
    fn unknown_edits_fail_unless_ignorable() {
        assert_eq!(VersionEdit::decode_batch(&[0x50, 1, 9]).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(VersionEdit::decode_batch(&[0xd0, 1, 9]).unwrap(), []);
        assert_eq!(
            VersionEdit::decode_batch(&[3, 2, 9, 9]).unwrap_err().kind(),
            ErrorKind::Corruption,
            "left-over bytes"
        );
    }
}
