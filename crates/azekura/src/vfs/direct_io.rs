//! Files with direct I/O, which bypasses the page cache of the operating system.
//!
//! With direct I/O the kernel transfers whole sectors between the device and aligned memory. [`DirectFile`] accepts
//! any offset and length. A read fetches the sectors around the requested range. Sequential writes are collected and
//! written in large aligned chunks; an incomplete last sector is written through the page cache. The first write that
//! is not sequential turns direct I/O off for the file, and so does a change of the length, an allocation or a
//! mapping.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::base::scratch::with_scratch;
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::vfs::disk_file::DiskFile;
use crate::vfs::fs::{File, Mapping};

/// Alignment in bytes. The sector sizes of all known devices divide it.
const DIRECT_IO_ALIGN: usize = 4096;

/// Length in bytes of a write to the device, and of the memory that a file uses while it is written.
const WRITE_BUFFER_LEN: usize = 1 << 20;

/// A regular file opened with `O_DIRECT`. Thread safe. Other handles see the written bytes after this handle is
/// synced, read or mapped.
pub(super) struct DirectFile {
    disk: DiskFile,
    write_buffer: Mutex<DirectWriteBuffer>,
    /// Whether `write_buffer` may contain bytes that the file does not. Set under the lock of `write_buffer`.
    has_pending: AtomicBool,
}

/// The collected end of a file that is being written.
#[derive(Default)]
struct DirectWriteBuffer {
    /// Longer than [`WRITE_BUFFER_LEN`] by one alignment unit, so that it contains an aligned chunk of that length.
    bytes: Vec<u8>,
    /// Start of the aligned chunk in `bytes`.
    align_offset: usize,
    /// Number of collected bytes in the chunk.
    len: usize,
    /// File offset of the chunk; a multiple of [`DIRECT_IO_ALIGN`].
    at: u64,
    /// Direct I/O is off: all operations use the page cache.
    bypass: bool,
}

fn set_direct(disk: &DiskFile, direct: bool) -> Result<()> {
    let flags = fcntl_getfl(&disk.file);
    let set = flags.and_then(|flags| {
        fcntl_setfl(&disk.file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })
    });
    set.map_err(|e| Error::io("switch direct I/O", &e.into()).in_file(&disk.path))
}

/// Allocates a buffer that contains an aligned range of `len` bytes. Returns the buffer and the start of the range.
fn aligned_buffer(len: usize) -> (Vec<u8>, usize) {
    let bytes = vec![0; len + DIRECT_IO_ALIGN];
    let lead = bytes.as_ptr().align_offset(DIRECT_IO_ALIGN);
    (bytes, lead)
}

impl DirectFile {
    /// Turns on direct I/O for an open file. Returns the file as the error if the file system does not support it.
    pub(super) fn new(disk: DiskFile) -> std::result::Result<DirectFile, DiskFile> {
        match set_direct(&disk, true) {
            Ok(()) => Ok(DirectFile { disk, write_buffer: Mutex::default(), has_pending: AtomicBool::new(false) }),
            Err(_) => Err(disk),
        }
    }

    fn lock_buffer(&self) -> MutexGuard<'_, DirectWriteBuffer> {
        lock(&self.write_buffer)
    }

    /// Repeats an operation without direct I/O if it failed because the device needs a larger alignment.
    fn retry_buffered<R>(&self, done: Result<R>, again: impl FnOnce() -> Result<R>) -> Result<R> {
        match done {
            Err(error) if error.os_kind() == Some(io::ErrorKind::InvalidInput) => {
                set_direct(&self.disk, false)?;
                again()
            }
            done => done,
        }
    }

    fn append(&self, tail: &mut DirectWriteBuffer, mut bytes: &[u8]) -> Result<()> {
        if tail.bytes.is_empty() {
            (tail.bytes, tail.align_offset) = aligned_buffer(WRITE_BUFFER_LEN);
        }
        debug_assert!(tail.at.is_multiple_of(DIRECT_IO_ALIGN as u64), "the collected bytes start at a sector");
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(WRITE_BUFFER_LEN - tail.len));
            let at = tail.align_offset + tail.len;
            tail.bytes[at..at + now.len()].copy_from_slice(now);
            tail.len += now.len();
            bytes = later;
            if tail.len == WRITE_BUFFER_LEN {
                self.write_sectors(&tail.bytes[tail.align_offset..tail.align_offset + WRITE_BUFFER_LEN], tail.at)?;
                tail.at += WRITE_BUFFER_LEN as u64;
                tail.len = 0;
            }
        }
        Ok(())
    }

    fn write_sectors(&self, sectors: &[u8], at: u64) -> Result<()> {
        debug_assert!(sectors.len().is_multiple_of(DIRECT_IO_ALIGN), "whole sectors are written");
        debug_assert!(
            sectors.as_ptr().addr().is_multiple_of(DIRECT_IO_ALIGN),
            "sectors are written from aligned memory"
        );
        debug_assert!(at.is_multiple_of(DIRECT_IO_ALIGN as u64), "sectors are written at their place");
        self.retry_buffered(self.disk.write_at(sectors, at), || self.disk.write_at(sectors, at))
    }

    /// Writes the collected bytes: whole sectors with direct I/O, an incomplete last sector through the page cache.
    /// The incomplete sector stays in the buffer, so that the next write can complete it.
    fn flush_buffer(&self, tail: &mut DirectWriteBuffer) -> Result<()> {
        if !self.has_pending.load(Ordering::Relaxed) {
            return Ok(());
        }
        let whole = tail.len - tail.len % DIRECT_IO_ALIGN;
        let (sectors, partial) = tail.bytes[tail.align_offset..tail.align_offset + tail.len].split_at(whole);
        if !sectors.is_empty() {
            self.write_sectors(sectors, tail.at)?;
        }
        if !partial.is_empty() {
            set_direct(&self.disk, false)?;
            let written = self.disk.write_at(partial, tail.at + whole as u64);
            written.and(set_direct(&self.disk, true))?;
        }
        tail.bytes.copy_within(tail.align_offset + whole..tail.align_offset + tail.len, tail.align_offset);
        tail.len -= whole;
        tail.at += whole as u64;
        debug_assert!(tail.len < DIRECT_IO_ALIGN, "only an incomplete sector stays in the buffer");
        self.has_pending.store(false, Ordering::Release);
        Ok(())
    }

    /// Writes the collected bytes and turns direct I/O off for the file.
    fn switch_to_buffered(&self, tail: &mut DirectWriteBuffer) -> Result<()> {
        if !tail.bypass {
            self.flush_buffer(tail)?;
            set_direct(&self.disk, false)?;
            *tail = DirectWriteBuffer { bypass: true, ..DirectWriteBuffer::default() };
        }
        Ok(())
    }

    /// Writes the collected bytes, if there are any.
    fn flush_pending(&self) -> Result<()> {
        if self.has_pending.load(Ordering::Acquire) { self.flush_buffer(&mut self.lock_buffer()) } else { Ok(()) }
    }
}

impl File for DirectFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.flush_pending()?;
        let before = (offset % DIRECT_IO_ALIGN as u64) as usize;
        let len = before.checked_add(buf.len()).and_then(|len| len.checked_next_multiple_of(DIRECT_IO_ALIGN));
        let Some(len) = len.filter(|_| !buf.is_empty()) else { return Ok(0) };
        with_scratch(len + DIRECT_IO_ALIGN, |bytes| {
            let lead = bytes.as_ptr().align_offset(DIRECT_IO_ALIGN);
            let sectors = &mut bytes[lead..lead + len];
            let from = offset - before as u64;
            let got = self.disk.read_at(sectors, from);
            let got = self.retry_buffered(got, || self.disk.read_at(sectors, from))?;
            let got = got.saturating_sub(before).min(buf.len());
            buf[..got].copy_from_slice(&sectors[before..before + got]);
            Ok(got)
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let mut tail = self.lock_buffer();
        if tail.bypass || offset != tail.at + tail.len as u64 {
            self.switch_to_buffered(&mut tail)?;
            return self.disk.write_at(bytes, offset);
        }
        if !bytes.is_empty() {
            self.has_pending.store(true, Ordering::Release);
        }
        self.append(&mut tail, bytes)
    }

    fn length(&self) -> Result<u64> {
        self.flush_pending()?;
        self.disk.length()
    }

    fn set_length(&self, len: u64) -> Result<()> {
        self.switch_to_buffered(&mut self.lock_buffer())?;
        self.disk.set_length(len)
    }

    fn allocate(&self, len: u64) -> Result<()> {
        self.switch_to_buffered(&mut self.lock_buffer())?;
        self.disk.allocate(len)
    }

    fn sync_data(&self) -> Result<()> {
        self.flush_pending()?;
        self.disk.sync_data()
    }

    fn sync_all(&self) -> Result<()> {
        self.flush_pending()?;
        self.disk.sync_all()
    }

    /// Each read waits for the device.
    fn will_read(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        self.switch_to_buffered(&mut self.lock_buffer())?;
        self.disk.map(len)
    }
}

impl Drop for DirectFile {
    /// Ignores errors: a caller that needs the result calls a sync before.
    fn drop(&mut self) {
        let _ = self.flush_pending();
    }
}

impl fmt::Debug for DirectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DirectFile").field(&self.disk.path).finish()
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::seeded_rng::SeededRng;
    use crate::vfs::disk::DiskFs;
    use crate::vfs::fs::{Fs, OpenMode};

    #[test]
    fn direct_file_matches_buffered_file() {
        let root = tempfile::tempdir().unwrap();
        let mut rng = SeededRng::new(1);
        for round in 0..24u64 {
            let path = root.path().join(format!("{round}"));
            let file = DiskFs.open_direct(&path, OpenMode::Create).unwrap();
            let mut model: Vec<u8> = Vec::new();
            for step in 0..40u64 {
                let len = rng.below(if step % 7 == 0 { 3 << 19 } else { 9000 });
                match rng.below(if round % 2 == 0 { 12 } else { 15 }) {
                    0..=6 => {
                        let bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + step + round) as u8).collect();
                        file.write_at(&bytes, model.len() as u64).unwrap();
                        model.extend_from_slice(&bytes);
                    }
                    7..=9 => {
                        let offset = rng.below(model.len() + 5000);
                        let mut buf = vec![0xEE; len.min(70_000)];
                        let got = file.read_at(&mut buf, offset as u64).unwrap();
                        let there = model.get(offset..).unwrap_or_default();
                        let wanted = &there[..there.len().min(buf.len())];
                        assert_eq!((got, &buf[..got] == wanted), (wanted.len(), true), "round {round} step {step}");
                    }
                    10 => assert_eq!(file.length().unwrap(), model.len() as u64),
                    11 => {
                        file.sync_data().unwrap();
                        let mut seen = vec![0; model.len()];
                        let other = DiskFs.open(&path, OpenMode::Read).unwrap();
                        other.read_exact_at(&mut seen, 0).unwrap();
                        assert!(seen == model && other.length().unwrap() == model.len() as u64);
                    }
                    12 => {
                        let at = rng.below(model.len() + 1);
                        model.resize(model.len().max(at + 10), 0);
                        model[at..at + 10].copy_from_slice(b"elsewhere!");
                        file.write_at(b"elsewhere!", at as u64).unwrap();
                    }
                    13 => {
                        model.truncate(model.len() / 2);
                        file.set_length(model.len() as u64).unwrap();
                    }
                    _ => {
                        model.resize(model.len() + 100, 0);
                        file.allocate(model.len() as u64).unwrap();
                    }
                }
            }
            drop(file);
            let mut seen = vec![0; model.len()];
            let again = DiskFs.open_direct(&path, OpenMode::Read).unwrap();
            again.read_exact_at(&mut seen, 0).unwrap();
            assert!(seen == model, "round {round}");
            assert_eq!(again.read_at(&mut [0; 10], model.len() as u64).unwrap(), 0);
            assert_eq!(again.read_at(&mut [0; 10], u64::MAX).unwrap(), 0);
        }
    }

    #[test]
    fn open_direct_falls_back_to_buffered_file() {
        let shm = std::path::Path::new("/dev/shm");
        if shm.is_dir() {
            let root = tempfile::tempdir_in(shm).unwrap();
            let file = DiskFs.open_direct(&root.path().join("f"), OpenMode::Create).unwrap();
            file.write_at(b"abc", 0).unwrap();
            let mut buf = [0; 3];
            file.read_exact_at(&mut buf, 0).unwrap();
            assert_eq!(&buf, b"abc");
        }
    }
}
