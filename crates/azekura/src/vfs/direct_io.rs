//! A file of the disk that goes past the cache of the system.
//!
//! The kernel then moves whole sectors between the device and memory that is aligned like them; this file makes
//! whatever is asked of it so. Reads fetch the sectors around. Writes one behind the other are collected and go out in
//! large whole pieces; the last, broken sector goes the usual way. Writes in any other order end all this.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::base::{Error, Result};
use crate::vfs::disk_file::DiskFile;
use crate::vfs::fs::{File, Mapping};

/// The sectors of all devices that are known divide this.
const DIRECT_IO_ALIGN: usize = 4096;

/// What is written goes to the device in pieces of this many bytes; so much memory is held while a file is written.
const WRITE_BUFFER_LEN: usize = 1 << 20;

/// A regular file opened with `O_DIRECT`. Thread safe. Other handles see what was written once this one was synced,
/// read or asked to map.
pub(super) struct DirectFile {
    disk: DiskFile,
    write_buffer: Mutex<DirectWriteBuffer>,
    /// Whether there may be something in `tail` that is not in the file; set under its lock.
    has_pending: AtomicBool,
}

/// The end of a file that is being written.
#[derive(Default)]
struct DirectWriteBuffer {
    /// A sector larger than a piece, so that a piece of it is aligned.
    bytes: Vec<u8>,
    /// Where the aligned piece begins in `bytes`.
    align_offset: usize,
    /// Bytes of the piece that are filled.
    len: usize,
    /// Where the piece goes in the file; a multiple of [`DIRECT_IO_ALIGN`].
    at: u64,
    /// From now on everything goes through the cache of the system.
    bypass: bool,
}

fn set_direct(disk: &DiskFile, direct: bool) -> Result<()> {
    let flags = fcntl_getfl(&disk.file);
    let set = flags.and_then(|flags| {
        fcntl_setfl(&disk.file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })
    });
    set.map_err(|e| Error::io("open past the cache", &e.into()).in_file(&disk.path))
}

/// Memory with room for `len` bytes behind the first aligned one, and where that is.
fn aligned_buffer(len: usize) -> (Vec<u8>, usize) {
    let bytes = vec![0; len + DIRECT_IO_ALIGN];
    let lead = bytes.as_ptr().align_offset(DIRECT_IO_ALIGN);
    (bytes, lead)
}

impl DirectFile {
    /// Takes over an open file; gives it back where the file system has no such thing.
    pub(super) fn new(disk: DiskFile) -> std::result::Result<DirectFile, DiskFile> {
        match set_direct(&disk, true) {
            Ok(()) => Ok(DirectFile { disk, write_buffer: Mutex::default(), has_pending: AtomicBool::new(false) }),
            Err(_) => Err(disk),
        }
    }

    fn lock_buffer(&self) -> MutexGuard<'_, DirectWriteBuffer> {
        self.write_buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device that wants more than our alignment is read and written the usual way.
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
        self.retry_buffered(self.disk.write_at(sectors, at), || self.disk.write_at(sectors, at))
    }

    /// Writes what was collected: whole sectors directly, a broken one through the cache. That one stays collected, so
    /// that the next write may go on behind it.
    fn flush_buffer(&self, tail: &mut DirectWriteBuffer) -> Result<()> {
        if !self.has_pending.load(Ordering::Relaxed) {
            return Ok(());
        }
        let whole = tail.len - tail.len % DIRECT_IO_ALIGN;
        let (sectors, broken) = tail.bytes[tail.align_offset..tail.align_offset + tail.len].split_at(whole);
        if !sectors.is_empty() {
            self.write_sectors(sectors, tail.at)?;
        }
        if !broken.is_empty() {
            set_direct(&self.disk, false)?;
            let written = self.disk.write_at(broken, tail.at + whole as u64);
            written.and(set_direct(&self.disk, true))?;
        }
        tail.bytes.copy_within(tail.align_offset + whole..tail.align_offset + tail.len, tail.align_offset);
        tail.len -= whole;
        tail.at += whole as u64;
        self.has_pending.store(false, Ordering::Release);
        Ok(())
    }

    /// From now on everything goes through the cache; what was collected is written first.
    fn switch_to_buffered(&self, tail: &mut DirectWriteBuffer) -> Result<()> {
        if !tail.bypass {
            self.flush_buffer(tail)?;
            set_direct(&self.disk, false)?;
            *tail = DirectWriteBuffer { bypass: true, ..DirectWriteBuffer::default() };
        }
        Ok(())
    }

    /// Everything that was written is with the system.
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
        let (mut bytes, lead) = aligned_buffer(len);
        let sectors = &mut bytes[lead..lead + len];
        let from = offset - before as u64;
        let got = self.disk.read_at(sectors, from);
        let got = self.retry_buffered(got, || self.disk.read_at(sectors, from))?;
        let got = got.saturating_sub(before).min(buf.len());
        buf[..got].copy_from_slice(&sectors[before..before + got]);
        Ok(got)
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

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        self.switch_to_buffered(&mut self.lock_buffer())?;
        self.disk.map(len)
    }
}

impl Drop for DirectFile {
    /// A failure is not reported here: a caller that needs the result syncs.
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
    use crate::vfs::disk::DiskFs;
    use crate::vfs::fs::{Fs, OpenMode};
    use crate::vfs::seeded_rng::SeededRng;

    #[test]
    fn direct_file_matches_buffered_file() {
        let root = tempfile::tempdir().unwrap();
        let mut rng = SeededRng::new(1, 0);
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
