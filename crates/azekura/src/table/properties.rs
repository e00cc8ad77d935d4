//! What a table says about itself; the layout is drawn in `docs/format/table.md`.

use crate::base::coding::{Decoder, put_bytes, put_varint};
use crate::base::compression::{Codec, CompressionType};
use crate::base::key::KEY_LEN_MAX;
use crate::base::{Error, Result, SeqNo};
use crate::table::format::IGNORABLE;
use crate::table::options::DataBlockIndexType;

/// The properties of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Properties {
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
    /// Bytes of keys and values before prefix compression and codecs.
    pub(crate) raw_bytes: u64,
    pub(crate) lowest: SeqNo,
    pub(crate) highest: SeqNo,
    /// The seed of the hashes in filter and data blocks.
    pub(crate) hash_seed: u64,
    pub(crate) comparator: String,
    pub(crate) compression: CompressionType,
    /// Asked for; blocks may have fallen back. `None`: not said, which is so for tables with restart points only.
    pub(crate) data_block_index_type: Option<DataBlockIndexType>,
    /// Milliseconds since 1970.
    pub(crate) created_ms: u64,
    pub(crate) data_blocks: u64,
    pub(crate) index_pieces: u64,
    pub(crate) filter_pieces: u64,
    pub(crate) filter_keys: u64,
    pub(crate) partitioned: bool,
    pub(crate) smallest: (Vec<u8>, SeqNo),
    pub(crate) largest: (Vec<u8>, SeqNo),
    /// Bytes of frames.
    pub(crate) data_bytes: u64,
    pub(crate) index_bytes: u64,
    pub(crate) filter_bytes: u64,
    /// Entries behind a newer version of their user key.
    pub(crate) superseded: u64,
    /// The lowest sequence number of an entry with an older version behind it; 0 if there is none, or nothing is said.
    pub(crate) superseded_from: SeqNo,
}

const SEED: u8 = 6;
const COMPARATOR: u8 = 7;
const COMPRESSION: u8 = 0x88;
const SMALLEST: u8 = 15;
const LARGEST: u8 = 16;
/// Every tag that must be there, as bits by their number without the ignorable bit.
const REQUIRED: u32 = 0b1_1111_1110_1111_1110;

impl Properties {
    /// The properties that are one number.
    fn numbers(&self) -> [(u8, u64); 17] {
        [
            (1, self.entries),
            (2, self.tombstones),
            (3, self.raw_bytes),
            (4, self.lowest.0),
            (5, self.highest.0),
            (9, self.created_ms),
            (10, self.data_blocks),
            (11, self.index_pieces),
            (12, self.filter_pieces),
            (13, self.filter_keys),
            (14, u64::from(self.partitioned)),
            (0x91, self.data_bytes),
            (0x92, self.index_bytes),
            (0x93, self.filter_bytes),
            (0x94, self.data_block_index_type.map_or(0, DataBlockIndexType::to_number)),
            (0x95, self.superseded),
            (0x96, self.superseded_from.0),
        ]
    }

    fn set_number(&mut self, tag: u8, value: u64) -> Result<bool> {
        match tag {
            1 => self.entries = value,
            2 => self.tombstones = value,
            3 => self.raw_bytes = value,
            4 => self.lowest = seqno(value)?,
            5 => self.highest = seqno(value)?,
            9 => self.created_ms = value,
            10 => self.data_blocks = value,
            11 => self.index_pieces = value,
            12 => self.filter_pieces = value,
            13 => self.filter_keys = value,
            14 => self.partitioned = value != 0,
            0x91 => self.data_bytes = value,
            0x92 => self.index_bytes = value,
            0x93 => self.filter_bytes = value,
            // Only told to people: what reads a block is the kind in its frame.
            0x94 => self.data_block_index_type = DataBlockIndexType::from_number(value),
            0x95 => self.superseded = value,
            0x96 => self.superseded_from = seqno(value)?,
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
        for (tag, value) in self.numbers() {
            payload.clear();
            put_varint(&mut payload, value);
            put(tag, &payload);
        }
        put(SEED, &self.hash_seed.to_le_bytes());
        put(COMPARATOR, self.comparator.as_bytes());
        put(
            COMPRESSION,
            &match self.compression {
                CompressionType::None => [Codec::None as u8, 0],
                CompressionType::Lz4 => [Codec::Lz4 as u8, 0],
                CompressionType::Miniz(level) => [Codec::Zlib as u8, level],
            },
        );
        for (tag, (user, seqno)) in [(SMALLEST, &self.smallest), (LARGEST, &self.largest)] {
            payload.clear();
            put_varint(&mut payload, seqno.0);
            payload.extend_from_slice(user);
            put(tag, &payload);
        }
        out
    }

    /// Counts an entry that comes behind `newer`, a newer version of its user key.
    pub(crate) fn count_superseded(&mut self, newer: SeqNo) {
        let lowest = if self.superseded == 0 { newer } else { self.superseded_from.min(newer) };
        self.superseded += 1;
        self.superseded_from = lowest;
    }

    /// # Errors
    /// `Corruption` for bytes that are no properties or not all of them, `Unsupported` for one that must be known.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Properties> {
        let mut d = Decoder::new(bytes);
        let mut properties = Properties::default();
        let mut seen = 0u32;
        while !d.is_empty() {
            let tag = d.u8()?;
            let payload = d.bytes()?;
            if !properties.set(tag, payload)? {
                if tag & IGNORABLE == 0 {
                    return Err(Error::unsupported(format!("table property {tag} needs a newer version")));
                }
                continue;
            }
            let bit = 1 << (tag & !IGNORABLE);
            if seen & bit != 0 {
                return Err(Error::corruption(format!("table property {tag} occurs twice")));
            }
            seen |= bit;
        }
        if seen & REQUIRED != REQUIRED {
            return Err(Error::corruption("table lacks some of its properties"));
        }
        Ok(properties)
    }

    /// Sets the property `tag`; false if it is none of ours.
    fn set(&mut self, tag: u8, payload: &[u8]) -> Result<bool> {
        let mut d = Decoder::new(payload);
        match tag {
            SEED => self.hash_seed = d.u64()?,
            COMPARATOR => {
                let name = d.take(payload.len())?.to_vec();
                self.comparator = String::from_utf8(name).map_err(|_| Error::corruption("name is not UTF-8"))?;
            }
            COMPRESSION => {
                // Only told to people: what reads a block is the codec in its frame.
                self.compression = match (Codec::from_byte(d.u8()?), d.u8()?) {
                    (Ok(Codec::Lz4), _) => CompressionType::Lz4,
                    (Ok(Codec::Zlib), level) => CompressionType::Miniz(level),
                    _ => CompressionType::None,
                };
                return Ok(true);
            }
            SMALLEST => self.smallest = key(&mut d)?,
            LARGEST => self.largest = key(&mut d)?,
            _ if self.numbers().iter().any(|(number, _)| *number == tag) => {
                self.set_number(tag, d.varint()?)?;
            }
            _ => return Ok(false),
        }
        d.finish()?;
        Ok(true)
    }
}

fn seqno(value: u64) -> Result<SeqNo> {
    Some(SeqNo(value)).filter(|s| *s <= SeqNo::MAX).ok_or_else(|| Error::corruption("sequence number is over 56 bits"))
}

fn key(d: &mut Decoder<'_>) -> Result<(Vec<u8>, SeqNo)> {
    let seqno = seqno(d.varint()?)?;
    let user = d.take(d.rest().len())?;
    if user.len() > KEY_LEN_MAX {
        return Err(Error::corruption("key is longer than any can be"));
    }
    Ok((user.to_vec(), seqno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    fn some() -> Properties {
        Properties {
            entries: 1 << 40,
            tombstones: 3,
            raw_bytes: 900,
            lowest: SeqNo(0),
            highest: SeqNo::MAX,
            hash_seed: u64::MAX,
            comparator: "naïve".into(),
            compression: CompressionType::Miniz(6),
            data_block_index_type: Some(DataBlockIndexType::BinaryAndHash),
            created_ms: 17,
            data_blocks: 1,
            index_pieces: 2,
            filter_pieces: 0,
            filter_keys: 4,
            partitioned: true,
            smallest: (vec![], SeqNo(9)),
            largest: (vec![255; 70], SeqNo(1)),
            data_bytes: 5,
            index_bytes: 6,
            filter_bytes: 7,
            superseded: 8,
            superseded_from: SeqNo(11),
        }
    }

    #[test]
    fn round_trip_and_no_prefix_is_whole() {
        let bytes = some().encode();
        assert_eq!(Properties::decode(&bytes).unwrap(), some());
        for cut in 0..bytes.len() {
            assert!(Properties::decode(&bytes[..cut]).is_err(), "the largest key comes last and is needed");
        }
    }

    #[test]
    fn unknown_properties_are_refused_unless_ignorable() {
        let mut bytes = some().encode();
        bytes.extend_from_slice(&[0xC0, 1, 9]);
        assert_eq!(Properties::decode(&bytes).unwrap(), some());
        bytes.extend_from_slice(&[0x40, 1, 9]);
        assert_eq!(Properties::decode(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        let mut twice = some().encode();
        twice.extend_from_slice(&[1, 1, 9]);
        assert_eq!(Properties::decode(&twice).unwrap_err().kind(), ErrorKind::Corruption);
    }

    #[test]
    fn random_bytes_give_errors_at_worst() {
        let good = some().encode();
        let mut x = 88_172_645_463_325_252u64;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..3 {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                let at = x as usize % bad.len();
                bad[at] = (x >> 32) as u8;
            }
            if let Ok(properties) = Properties::decode(&bad) {
                assert_eq!(Properties::decode(&properties.encode()).unwrap(), properties);
            }
            let _ = crate::table::format::Directory::decode(&bad);
        }
    }
}
