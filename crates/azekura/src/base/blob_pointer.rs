//! Pointers to values in blob files, and the list of a table's references to blob files.

use std::collections::BTreeMap;

use crate::base::coding::{ByteReader, put_varint};
use crate::base::error::{Error, Result};
use crate::base::key::{RecordKind, split_expiry};
use crate::base::version_edit::{FileNumber, TableBlobUsage};

/// Position of a value in a blob file: the value of an entry of kind [`BlobPointer`](crate::base::RecordKind).
///
/// It names a *logical* file and the value's ordinal in that file. Both stay when blob GC copies the value to another
/// file. The offset is valid only in the file to which the value was first written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobPointer {
    pub(crate) logical_file: FileNumber,
    pub(crate) ordinal: u32,
    /// Offset of the frame in the file to which it was first written.
    pub(crate) frame_offset: u64,
    /// Length of the frame, in any file.
    pub(crate) frame_len: u64,
    /// Length of the value.
    pub(crate) value_len: u32,
}

impl BlobPointer {
    /// The offset at which the value ends in the file to which it was first written.
    pub(crate) fn frame_end(&self) -> u64 {
        self.frame_offset + self.frame_len
    }

    #[inline]
    pub(crate) fn value_id(&self) -> BlobValueId {
        BlobValueId { logical_file: self.logical_file, ordinal: self.ordinal }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.logical_file.0);
        put_varint(out, u64::from(self.ordinal));
        put_varint(out, self.frame_offset);
        put_varint(out, self.frame_len);
        put_varint(out, u64::from(self.value_len));
    }

    /// Decodes a pointer from exactly `bytes`.
    ///
    /// # Errors
    /// `Corruption` if the bytes are not a valid pointer.
    pub(crate) fn decode(bytes: &[u8]) -> Result<BlobPointer> {
        let mut d = ByteReader::new(bytes);
        let pointer = BlobPointer {
            logical_file: FileNumber(d.varint()?),
            ordinal: d.varint_u32()?,
            frame_offset: d.varint()?,
            frame_len: d.varint()?,
            value_len: d.varint_u32()?,
        };
        d.finish()?;
        Ok(pointer)
    }

    /// The pointer that a record has as its value; `None` for the other kinds.
    ///
    /// # Errors
    /// As [`decode`](BlobPointer::decode) and [`split_expiry`].
    #[inline]
    pub(crate) fn of_record(kind: RecordKind, value: &[u8]) -> Result<Option<BlobPointer>> {
        match kind {
            RecordKind::BlobPointer | RecordKind::ExpiringBlobPointer => {
                BlobPointer::decode(split_expiry(kind, value)?.2).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// What identifies a value in all blob files of a database. It stays when blob GC copies the value to another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobValueId {
    pub(crate) logical_file: FileNumber,
    pub(crate) ordinal: u32,
}

/// A set of ordinals, as ascending runs that are not adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OrdinalSet {
    /// First ordinal and length of each run; the length is at least 1.
    runs: Vec<(u32, u32)>,
}

/// Exclusive upper bound of ordinals.
const ORDINAL_LIMIT: u64 = 1 << 32;

impl OrdinalSet {
    /// Number of ordinals.
    pub(crate) fn count(&self) -> u64 {
        self.runs.iter().map(|(_, len)| u64::from(*len)).sum()
    }

    pub(crate) fn contains(&self, ordinal: u32) -> bool {
        let behind = self.runs.partition_point(|(first, _)| *first <= ordinal);
        behind.checked_sub(1).is_some_and(|at| ordinal - self.runs[at].0 < self.runs[at].1)
    }

    /// The ordinals, ascending.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.runs.iter().flat_map(|&(first, len)| first..=first + (len - 1))
    }

    /// Adds all ordinals of `other`.
    pub(crate) fn merge(&mut self, other: &OrdinalSet) {
        let (before, mut runs) = (self.count(), std::mem::take(&mut self.runs));
        runs.extend_from_slice(&other.runs);
        self.runs = merge_runs(runs).0;
        debug_assert!(self.count() >= before.max(other.count()), "a union of ordinals loses none");
    }

    /// Encodes the number of runs, then for each run the gap after the previous one, and its length minus 1.
    fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.runs.len() as u64);
        let mut end = 0;
        for &(first, len) in &self.runs {
            debug_assert!(end == 0 || u64::from(first) > end, "runs of ordinals ascend and are not adjacent");
            put_varint(out, u64::from(first) - end);
            put_varint(out, u64::from(len - 1));
            end = u64::from(first) + u64::from(len);
        }
    }

    fn read(d: &mut ByteReader<'_>) -> Result<OrdinalSet> {
        let count = d.varint()?;
        // A run takes at least two bytes, so the memory is proportional to the bytes read.
        if count > d.rest().len() as u64 / 2 {
            return Err(Error::corruption("blob references end within a run"));
        }
        let mut runs = Vec::with_capacity(count as usize);
        let mut end = 0u64;
        for at in 0..count {
            let (gap, more) = (d.varint_u32()?, d.varint_u32()?);
            if gap == 0 && at > 0 {
                return Err(Error::corruption("runs of blob references are adjacent"));
            }
            let first = end + u64::from(gap);
            end = first + u64::from(more) + 1;
            if end > ORDINAL_LIMIT || more == u32::MAX {
                return Err(Error::corruption("blob references exceed the last possible ordinal"));
            }
            runs.push((first as u32, more + 1));
        }
        Ok(OrdinalSet { runs })
    }
}

/// Sorts runs and joins adjacent and overlapping ones. Also returns whether any ordinal was in two runs.
fn merge_runs(mut runs: Vec<(u32, u32)>) -> (Vec<(u32, u32)>, bool) {
    runs.sort_unstable();
    let mut shared = false;
    let mut out: Vec<(u32, u32)> = Vec::with_capacity(runs.len());
    for (first, len) in runs {
        let end = u64::from(first) + u64::from(len);
        if let Some(last) = out.last_mut() {
            let last_end = u64::from(last.0) + u64::from(last.1);
            if u64::from(first) <= last_end {
                shared |= u64::from(first) < last_end;
                let length = end.max(last_end) - u64::from(last.0);
                // Only all 2^32 ordinals do not fit a run; the last ordinal is never assigned.
                last.1 = u32::try_from(length).unwrap_or(u32::MAX);
                continue;
            }
        }
        out.push((first, len));
    }
    debug_assert!(out.iter().all(|(_, len)| *len > 0), "a run has at least one ordinal");
    debug_assert!(
        out.windows(2).all(|pair| u64::from(pair[0].0) + u64::from(pair[0].1) < u64::from(pair[1].0)),
        "runs are ascending and not adjacent"
    );
    (out, shared)
}

/// References of the entries of one table: for each logical file, how many bytes and which ordinals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobReferences {
    files: BTreeMap<FileNumber, BlobFileReferences>,
}

/// References to one logical file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct BlobFileReferences {
    count: u64,
    bytes: u64,
    ordinals: OrdinalSet,
}

impl BlobReferences {
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The files, ascending.
    pub(crate) fn file_usage(&self) -> impl Iterator<Item = TableBlobUsage> + '_ {
        self.files.iter().map(|(&logical, file)| TableBlobUsage {
            logical_file: logical,
            count: file.count,
            bytes: file.bytes,
        })
    }

    /// The referenced ordinals of each file, in ascending order of the files.
    pub(crate) fn ordinals(&self) -> impl Iterator<Item = (FileNumber, &OrdinalSet)> {
        self.files.iter().map(|(&logical, file)| (logical, &file.ordinals))
    }

    /// Encodes the number of files, then for each file the difference to the previous file number, count, bytes and
    /// ordinals.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, self.files.len() as u64);
        let mut before = 0;
        for (logical, file) in &self.files {
            debug_assert_eq!(file.count, file.ordinals.count(), "each reference has an ordinal of its own");
            put_varint(&mut out, logical.0 - before);
            put_varint(&mut out, file.count);
            put_varint(&mut out, file.bytes);
            file.ordinals.encode(&mut out);
            before = logical.0;
        }
        out
    }

    /// # Errors
    /// `Corruption` if the bytes are not valid references.
    pub(crate) fn decode(bytes: &[u8]) -> Result<BlobReferences> {
        let mut d = ByteReader::new(bytes);
        let mut files = BTreeMap::new();
        let mut before = 0u64;
        for at in 0..d.varint()? {
            let gap = d.varint()?;
            let logical = before.checked_add(gap).filter(|_| gap > 0 || at == 0);
            let logical = logical.ok_or_else(|| Error::corruption("referenced files are not in ascending order"))?;
            let file =
                BlobFileReferences { count: d.varint()?, bytes: d.varint()?, ordinals: OrdinalSet::read(&mut d)? };
            if file.count == 0 || file.count != file.ordinals.count() {
                return Err(Error::corruption("blob references differ from their count"));
            }
            files.insert(FileNumber(logical), file);
            before = logical;
        }
        d.finish()?;
        Ok(BlobReferences { files })
    }
}

/// Builds the references of a table. Pointers may be added in any order. Consecutive pointers with consecutive
/// ordinals share one run and take no additional memory.
#[derive(Debug, Default)]
pub(crate) struct BlobReferencesBuilder {
    files: BTreeMap<FileNumber, BlobFileReferences>,
    runs: u64,
}

impl BlobReferencesBuilder {
    pub(crate) fn add(&mut self, pointer: &BlobPointer) {
        let file = self.files.entry(pointer.logical_file).or_default();
        file.count += 1;
        file.bytes = file.bytes.saturating_add(pointer.frame_len);
        if let Some((first, len)) = file.ordinals.runs.last_mut()
            && first.checked_add(*len) == Some(pointer.ordinal)
        {
            *len += 1;
            return;
        }
        file.ordinals.runs.push((pointer.ordinal, 1));
        self.runs += 1;
    }

    /// Estimated size of the encoded section in bytes.
    pub(crate) fn estimated_encoded_len(&self) -> u64 {
        // A gap takes at most five bytes and rarely more than two. Most runs are short.
        self.runs * 3 + self.files.len() as u64 * 12
    }

    /// # Errors
    /// `Corruption` if two entries refer to the same value.
    pub(crate) fn finish(self) -> Result<BlobReferences> {
        let mut files = self.files;
        for file in files.values_mut() {
            let (runs, shared) = merge_runs(std::mem::take(&mut file.ordinals.runs));
            file.ordinals = OrdinalSet { runs };
            if shared || file.ordinals.count() != file.count {
                return Err(Error::corruption("two entries point to the same value of a blob file"));
            }
        }
        Ok(BlobReferences { files })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    fn pointer(logical: u64, ordinal: u32) -> BlobPointer {
        BlobPointer { logical_file: FileNumber(logical), ordinal, frame_offset: 64, frame_len: 20, value_len: 4 }
    }

    #[test]
    fn decode_fails_for_prefix_of_pointer() {
        let wide = BlobPointer {
            logical_file: FileNumber(u64::MAX),
            ordinal: u32::MAX,
            frame_offset: u64::MAX,
            frame_len: 9,
            value_len: u32::MAX,
        };
        for pointer in [pointer(0, 0), wide] {
            let mut bytes = Vec::new();
            pointer.encode(&mut bytes);
            assert_eq!(BlobPointer::decode(&bytes).unwrap(), pointer);
            for cut in 0..bytes.len() {
                assert!(BlobPointer::decode(&bytes[..cut]).is_err());
            }
            bytes.push(0);
            assert!(BlobPointer::decode(&bytes).is_err());
        }
    }

    #[test]
    fn references_match_set_model_in_any_order() {
        let mut rng = SeededRng::new(1);
        for round in 0..300 {
            let (mut builder, mut model) = (BlobReferencesBuilder::default(), BTreeMap::<u64, BTreeSet<u32>>::new());
            for _ in 0..rng.below(200) {
                let (logical, ordinal) = (rng.below(3) * 70, rng.below(150));
                if model.entry(logical).or_default().insert(ordinal) {
                    builder.add(&pointer(logical, ordinal));
                }
            }
            let references = builder.finish().unwrap();
            let bytes = references.encode();
            assert_eq!(BlobReferences::decode(&bytes).unwrap(), references, "round {round}");
            let wanted: Vec<TableBlobUsage> = model
                .iter()
                .map(|(&logical, set)| (FileNumber(logical), set.len() as u64))
                .map(|(logical, count)| TableBlobUsage { logical_file: logical, count, bytes: count * 20 })
                .collect();
            assert_eq!(references.file_usage().collect::<Vec<_>>(), wanted);
            for ((_, ordinals), set) in references.ordinals().zip(model.values()) {
                assert!(ordinals.iter().eq(set.iter().copied()));
                assert!((0..160).all(|ordinal| ordinals.contains(ordinal) == set.contains(&ordinal)));
            }
            for cut in 0..bytes.len() {
                assert!(BlobReferences::decode(&bytes[..cut]).is_err());
            }
        }
    }

    #[test]
    fn builder_fails_when_value_is_referenced_twice() {
        for ordinals in [&[5, 5][..], &[1, 2, 3, 2], &[9, 1, 9]] {
            let mut builder = BlobReferencesBuilder::default();
            ordinals.iter().for_each(|&ordinal| builder.add(&pointer(7, ordinal)));
            assert!(builder.finish().is_err(), "{ordinals:?}");
        }
        let set = |runs: &[(u32, u32)]| OrdinalSet { runs: runs.to_vec() };
        let mut all = set(&[(0, 2), (10, 5)]);
        all.merge(&set(&[(2, 1), (12, 9), (u32::MAX - 1, 1)]));
        assert_eq!(all, set(&[(0, 3), (10, 11), (u32::MAX - 1, 1)]));
    }

    #[test]
    fn decode_fails_when_ordinal_runs_are_invalid() {
        for (what, bytes) in [
            ("touch", &[2, 0, 0, 0, 0][..]),
            ("too many", &[200, 1, 0, 0]),
            ("behind the end", &[1, 0xff, 0xff, 0xff, 0xff, 0x0f, 1]),
            ("all ordinals", &[1, 0, 0xff, 0xff, 0xff, 0xff, 0x0f]),
        ] {
            assert!(OrdinalSet::read(&mut ByteReader::new(bytes)).is_err(), "{what}");
        }
        assert!(BlobReferences::decode(&[1, 5, 2, 40, 1, 0, 0]).is_err(), "another count");
        assert!(BlobReferences::decode(&[2, 5, 1, 40, 1, 0, 0, 0, 1, 40, 1, 0, 0]).is_err(), "a file twice");
    }
}
