//! Compares the database with the acknowledged writes and with the files.

use std::hash::{DefaultHasher, Hasher};

use azekura::{Partition, Slice};

use super::input::{CountedItems, InputFiles, fingerprint};
use super::writer::AckRecord;
use crate::error::Result;
use crate::{encoding, interrupt};

/// Digest of entries that does not depend on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ContentDigest {
    pub(super) entries: u64,
    /// Bytes of keys and values.
    pub(super) bytes: u64,
    sum: u64,
}

impl ContentDigest {
    pub(super) fn add(&mut self, key: &[u8], len: u64, hash: u64) {
        let mut hasher = DefaultHasher::new();
        hasher.write(key);
        hasher.write_u64(len);
        hasher.write_u64(hash);
        self.entries += 1;
        self.bytes += key.len() as u64 + len;
        self.sum = self.sum.wrapping_add(hasher.finish());
    }
}

/// Result of [`compare_acknowledged`].
#[derive(Debug, Default)]
pub(super) struct ComparisonResult {
    /// Keys without the acknowledged value.
    pub(super) wrong: CountedItems,
    /// Digest of all acknowledged writes.
    pub(super) expected: ContentDigest,
    /// Files whose content has changed since the writer read them.
    pub(super) changed: CountedItems,
}

/// Reads every acknowledged key and compares length and hash of its value; with `files` also each byte with the file.
pub(super) fn compare_acknowledged(
    partition: &Partition,
    input: &InputFiles,
    acks: &[Option<AckRecord>],
    files: bool,
) -> Result<ComparisonResult> {
    let mut result = ComparisonResult::default();
    for (put, ack) in (0..).zip(acks) {
        interrupt::check()?;
        let Some(AckRecord { len, hash }) = *ack else { continue };
        let key = input.key(put);
        result.expected.add(&key, len, hash);
        match partition.get(&key)? {
            None => result.wrong.add(format!("{}: missing", encoding::escaped(&key))),
            Some(value) if value.len() as u64 != len || fingerprint(&value) != hash => {
                result.wrong.add(format!("{}: differs from the acknowledged value", encoding::escaped(&key)));
            }
            Some(value) if files && input.content(put).as_deref() != Ok(&*value) => {
                result.changed.add(encoding::escaped(&key));
            }
            Some(_) => {}
        }
    }
    Ok(result)
}

/// Scans entries. Returns their digest, and the first key that is not greater than the key before.
pub(super) fn scan(
    entries: impl Iterator<Item = azekura::Result<(Slice, Slice)>>,
) -> Result<(ContentDigest, Option<Slice>)> {
    let mut digest = ContentDigest::default();
    let (mut last, mut unsorted): (Option<Slice>, Option<Slice>) = (None, None);
    for entry in entries {
        interrupt::check()?;
        let (key, value) = entry?;
        digest.add(&key, value.len() as u64, fingerprint(&value));
        if unsorted.is_none() && last.is_some_and(|last| *last >= *key) {
            unsorted = Some(key.clone());
        }
        last = Some(key);
    }
    Ok((digest, unsorted))
}

#[cfg(test)]
mod tests {
    use super::super::writer;
    use super::*;

    #[test]
    fn digest_depends_on_content_and_not_on_order() {
        let digest = |entries: &[(&[u8], u64)]| {
            let mut digest = ContentDigest::default();
            entries.iter().for_each(|(key, hash)| digest.add(key, 1, *hash));
            digest
        };
        let all = digest(&[(b"x", 5), (b"y", 6)]);
        assert_eq!(all, digest(&[(b"y", 6), (b"x", 5)]));
        assert_ne!(all, digest(&[(b"x", 6), (b"y", 5)]));
        assert_ne!(all, digest(&[(b"y", 6)]));
    }

    #[test]
    fn comparison_finds_lost_and_wrong_values() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("files");
        std::fs::create_dir(&root).unwrap();
        for name in ["a", "b", "c", "d"] {
            std::fs::write(root.join(name), name).unwrap();
        }
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let input = InputFiles::list(&root, false, until).unwrap();
        let (db, partition) = writer::open(&dir.path().join("db"), 1 << 20).unwrap();
        let acks: Vec<_> = (0..4).map(|put| writer::store(&partition, &input, put).unwrap()).collect();
        let compare = || compare_acknowledged(&partition, &input, &acks, true).unwrap();
        let good = compare();
        assert_eq!((good.wrong.count, good.changed.count), (0, 0));
        assert_eq!(scan(partition.iter()).unwrap().0, good.expected);
        partition.remove("a").unwrap();
        partition.insert("b", "x").unwrap();
        std::fs::write(root.join("c"), "later").unwrap();
        let bad = compare();
        assert_eq!(bad.wrong.first, ["a: missing", "b: differs from the acknowledged value"]);
        assert_eq!(bad.changed.first, ["c"]);
        assert_ne!(scan(partition.iter()).unwrap().0, bad.expected);
        drop(partition);
        db.close().unwrap();
    }
}
