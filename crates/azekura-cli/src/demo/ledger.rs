//! What was acknowledged: line n is about job n. Two numbers of 8 bytes each: length and hash of the stored value, or
//! all ones for a job that was left out.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Result};

const LEFT_OUT: u64 = u64::MAX;

/// The hash by which values are compared where the bytes themselves are gone. Parent and writer are the same program,
/// so it need not be the same one in the next version.
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Stored { len: u64, hash: u64 },
    LeftOut,
}

/// The file, while it is written.
#[derive(Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    out: BufWriter<File>,
    lines: u64,
    /// Lines that say `Stored`.
    pub(crate) stored: u64,
    /// Bytes of their values.
    pub(crate) bytes: u64,
}

impl Ledger {
    pub(crate) fn create(path: &Path) -> Result<Ledger> {
        let file = File::create(path).map_err(|e| Failure::os("create the ledger", path, e))?;
        Ok(Ledger { path: path.to_path_buf(), out: BufWriter::new(file), lines: 0, stored: 0, bytes: 0 })
    }

    pub(crate) fn lines(&self) -> u64 {
        self.lines
    }

    pub(crate) fn add(&mut self, line: Line) -> Result<()> {
        let (len, hash) = match line {
            Line::Stored { len, hash } => (len, hash),
            Line::LeftOut => (LEFT_OUT, LEFT_OUT),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        bytes[8..].copy_from_slice(&hash.to_le_bytes());
        self.out.write_all(&bytes).map_err(|e| Failure::os("write the ledger", &self.path, e))?;
        self.lines += 1;
        if let Line::Stored { len, .. } = line {
            self.stored += 1;
            self.bytes += len;
        }
        Ok(())
    }

    /// All lines from the first on.
    pub(crate) fn read(&mut self) -> Result<impl Iterator<Item = Result<Line>> + use<>> {
        let path = self.path.clone();
        let failed = move |e: io::Error| Failure::os("read the ledger", &path, e);
        self.out.flush().map_err(&failed)?;
        let mut input = BufReader::new(File::open(&self.path).map_err(&failed)?);
        let mut left = self.lines;
        Ok(std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            Some(read_line(&mut input).map_err(&failed))
        }))
    }
}

fn read_line(input: &mut impl Read) -> io::Result<Line> {
    let (mut len, mut hash) = ([0; 8], [0; 8]);
    input.read_exact(&mut len)?;
    input.read_exact(&mut hash)?;
    let (len, hash) = (u64::from_le_bytes(len), u64::from_le_bytes(hash));
    Ok(if len == LEFT_OUT { Line::LeftOut } else { Line::Stored { len, hash } })
}

/// A sum over entries that does not depend on their order: equal sums, equal contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Digest {
    pub(crate) entries: u64,
    /// Bytes of keys and values.
    pub(crate) bytes: u64,
    sum: u64,
}

impl Digest {
    pub(crate) fn add(&mut self, key: &[u8], len: u64, hash: u64) {
        let mut hasher = DefaultHasher::new();
        hasher.write(key);
        hasher.write_u64(len);
        hasher.write_u64(hash);
        self.entries += 1;
        self.bytes += key.len() as u64 + len;
        self.sum = self.sum.wrapping_add(hasher.finish());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::create(&dir.path().join("ledger")).unwrap();
        let lines = [Line::Stored { len: 0, hash: 1 }, Line::LeftOut, Line::Stored { len: 7, hash: 2 }];
        for line in lines {
            ledger.add(line).unwrap();
        }
        assert_eq!(ledger.read().unwrap().collect::<Result<Vec<_>>>().unwrap(), lines);
        assert_eq!((ledger.lines(), ledger.stored, ledger.bytes), (3, 2, 7));
    }

    #[test]
    fn digests_see_content_and_not_order() {
        let (mut a, mut b, mut c) = (Digest::default(), Digest::default(), Digest::default());
        a.add(b"x", 1, 5);
        a.add(b"y", 1, 6);
        b.add(b"y", 1, 6);
        b.add(b"x", 1, 5);
        c.add(b"x", 1, 6);
        c.add(b"y", 1, 5);
        assert_eq!(a, b);
        assert_ne!(a, c);
    }
}
