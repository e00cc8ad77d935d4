//! A file that redb may write to without changing it: what it writes stays in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;

/// Size of the ranges that are kept in memory after a write, in bytes.
const CHUNK_BYTES: u64 = 4096;

/// The file with the changed ranges. redb checks and repairs its database in it.
#[derive(Debug)]
pub(super) struct OverlayBackend {
    state: Mutex<OverlayState>,
}

#[derive(Debug)]
struct OverlayState {
    file: File,
    /// Bytes of the file that were not cut off.
    file_len: u64,
    len: u64,
    /// Changed chunks by their number.
    chunks: BTreeMap<u64, Box<[u8]>>,
}

impl OverlayBackend {
    pub(super) fn new(file: File) -> io::Result<OverlayBackend> {
        let len = file.metadata()?.len();
        Ok(OverlayBackend { state: Mutex::new(OverlayState { file, file_len: len, len, chunks: BTreeMap::new() }) })
    }

    fn state(&self) -> MutexGuard<'_, OverlayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OverlayState {
    fn check_range(&self, offset: u64, len: usize) -> io::Result<()> {
        let end = offset.checked_add(len as u64);
        if end.is_some_and(|end| end <= self.len) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Reads from the file alone. Bytes behind its end are zero.
    fn read_file(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let available = usize::try_from(self.file_len.saturating_sub(offset)).unwrap_or(usize::MAX).min(out.len());
        let (stored, rest) = out.split_at_mut(available);
        rest.fill(0);
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.read_exact(stored)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, out.len())?;
        self.read_file(offset, out)?;
        let end = offset + out.len() as u64;
        for (number, chunk) in self.chunks.range(offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES)) {
            let start = number * CHUNK_BYTES;
            let (from, to) = (start.max(offset), (start + CHUNK_BYTES).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&chunk[(from - start) as usize..(to - start) as usize]);
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check_range(offset, data.len())?;
        let end = offset + data.len() as u64;
        for number in offset / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES) {
            let start = number * CHUNK_BYTES;
            if !self.chunks.contains_key(&number) {
                let mut chunk = vec![0; CHUNK_BYTES as usize];
                self.read_file(start, &mut chunk)?;
                self.chunks.insert(number, chunk.into());
            }
            let chunk = self.chunks.get_mut(&number).expect("it was inserted above");
            let (from, to) = (start.max(offset), (start + CHUNK_BYTES).min(end));
            chunk[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&data[(from - offset) as usize..(to - offset) as usize]);
        }
        Ok(())
    }

    /// Bytes that are cut off are zero if the file grows again.
    fn set_len(&mut self, len: u64) {
        self.len = len;
        self.file_len = self.file_len.min(len);
        self.chunks.split_off(&len.div_ceil(CHUNK_BYTES));
        if let Some(chunk) = self.chunks.get_mut(&(len / CHUNK_BYTES)) {
            chunk[(len % CHUNK_BYTES) as usize..].fill(0);
        }
    }
}

impl StorageBackend for OverlayBackend {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.state().read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.state().set_len(len);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.state().write(offset, data)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn writes_stay_in_memory() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
        file.write_all(&content).unwrap();
        let overlay = OverlayBackend::new(file.reopen().unwrap()).unwrap();
        let mut expected = content.clone();
        for (offset, len) in [(0, 1), (4090, 20), (9990, 10), (100, 9000)] {
            overlay.write(offset as u64, &vec![0xee; len]).unwrap();
            expected[offset..offset + len].fill(0xee);
            let mut all = vec![0; expected.len()];
            overlay.read(0, &mut all).unwrap();
            assert!(all == expected, "{offset} {len}");
        }
        assert!(overlay.write(9999, &[0; 2]).is_err() && overlay.read(u64::MAX, &mut [0; 2]).is_err());
        overlay.set_len(5000).unwrap();
        overlay.set_len(12_000).unwrap();
        expected.truncate(5000);
        expected.resize(12_000, 0);
        let mut all = vec![1; 12_000];
        overlay.read(0, &mut all).unwrap();
        assert!(all == expected && overlay.len().unwrap() == 12_000);
        assert!(std::fs::read(file.path()).unwrap() == content, "the file is unchanged");
    }
}
