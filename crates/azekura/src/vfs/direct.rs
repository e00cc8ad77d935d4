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
const SECTOR: usize = 4096;

/// What is written goes to the device in pieces of this many bytes; so much memory is held while a file is written.
const PIECE: usize = 1 << 20;

/// A regular file opened with `O_DIRECT`. Thread safe. Other handles see what was written once this one was synced,
/// read or asked to map.
pub(super) struct DirectFile {
    disk: DiskFile,
    tail: Mutex<Tail>,
    /// Whether there may be something in `tail` that is not in the file; set under its lock.
    pending: AtomicBool,
}

/// The end of a file that is being written.
#[derive(Default)]
struct Tail {
    /// A sector larger than a piece, so that a piece of it is aligned.
    bytes: Vec<u8>,
    /// Where the aligned piece begins in `bytes`.
    lead: usize,
    /// Bytes of the piece that are filled.
    len: usize,
    /// Where the piece goes in the file; a multiple of [`SECTOR`].
    at: u64,
    /// From now on everything goes through the cache of the system.
    buffered: bool,
}

fn set_direct(disk: &DiskFile, direct: bool) -> Result<()> {
    let flags = fcntl_getfl(&disk.file);
    let set = flags.and_then(|flags| {
        fcntl_setfl(&disk.file, if direct { flags | OFlags::DIRECT } else { flags - OFlags::DIRECT })
    });
    set.map_err(|e| Error::io("open past the cache", &e.into()).in_file(&disk.path))
}

/// Memory with room for `len` bytes behind the first aligned one, and where that is.
fn aligned(len: usize) -> (Vec<u8>, usize) {
    let bytes = vec![0; len + SECTOR];
    let lead = bytes.as_ptr().align_offset(SECTOR);
    (bytes, lead)
}

impl DirectFile {
    /// Takes over an open file; gives it back where the file system has no such thing.
    pub(super) fn new(disk: DiskFile) -> std::result::Result<DirectFile, DiskFile> {
        match set_direct(&disk, true) {
            Ok(()) => Ok(DirectFile { disk, tail: Mutex::default(), pending: AtomicBool::new(false) }),
            Err(_) => Err(disk),
        }
    }

    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device that wants more than our alignment is read and written the usual way.
    fn or_buffered<R>(&self, done: Result<R>, again: impl FnOnce() -> Result<R>) -> Result<R> {
        match done {
            Err(error) if error.os_kind() == Some(io::ErrorKind::InvalidInput) => {
                set_direct(&self.disk, false)?;
                again()
            }
            done => done,
        }
    }

    fn append(&self, tail: &mut Tail, mut bytes: &[u8]) -> Result<()> {
        if tail.bytes.is_empty() {
            (tail.bytes, tail.lead) = aligned(PIECE);
        }
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(PIECE - tail.len));
            let at = tail.lead + tail.len;
            tail.bytes[at..at + now.len()].copy_from_slice(now);
            tail.len += now.len();
            bytes = later;
            if tail.len == PIECE {
                self.write_sectors(&tail.bytes[tail.lead..tail.lead + PIECE], tail.at)?;
                tail.at += PIECE as u64;
                tail.len = 0;
            }
        }
        Ok(())
    }

    fn write_sectors(&self, sectors: &[u8], at: u64) -> Result<()> {
        self.or_buffered(self.disk.write_at(sectors, at), || self.disk.write_at(sectors, at))
    }

    /// Writes what was collected: whole sectors directly, a broken one through the cache. That one stays collected, so
    /// that the next write may go on behind it.
    fn write_out(&self, tail: &mut Tail) -> Result<()> {
        if !self.pending.load(Ordering::Relaxed) {
            return Ok(());
        }
        let whole = tail.len - tail.len % SECTOR;
        let (sectors, broken) = tail.bytes[tail.lead..tail.lead + tail.len].split_at(whole);
        if !sectors.is_empty() {
            self.write_sectors(sectors, tail.at)?;
        }
        if !broken.is_empty() {
            set_direct(&self.disk, false)?;
            let written = self.disk.write_at(broken, tail.at + whole as u64);
            written.and(set_direct(&self.disk, true))?;
        }
        tail.bytes.copy_within(tail.lead + whole..tail.lead + tail.len, tail.lead);
        tail.len -= whole;
        tail.at += whole as u64;
        self.pending.store(false, Ordering::Release);
        Ok(())
    }

    /// From now on everything goes through the cache; what was collected is written first.
    fn give_up(&self, tail: &mut Tail) -> Result<()> {
        if !tail.buffered {
            self.write_out(tail)?;
            set_direct(&self.disk, false)?;
            *tail = Tail { buffered: true, ..Tail::default() };
        }
        Ok(())
    }

    /// Everything that was written is with the system.
    fn settle(&self) -> Result<()> {
        if self.pending.load(Ordering::Acquire) { self.write_out(&mut self.tail()) } else { Ok(()) }
    }
}

impl File for DirectFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.settle()?;
        let before = (offset % SECTOR as u64) as usize;
        let len = before.checked_add(buf.len()).and_then(|len| len.checked_next_multiple_of(SECTOR));
        let Some(len) = len.filter(|_| !buf.is_empty()) else { return Ok(0) };
        let (mut bytes, lead) = aligned(len);
        let sectors = &mut bytes[lead..lead + len];
        let from = offset - before as u64;
        let got = self.disk.read_at(sectors, from);
        let got = self.or_buffered(got, || self.disk.read_at(sectors, from))?;
        let got = got.saturating_sub(before).min(buf.len());
        buf[..got].copy_from_slice(&sectors[before..before + got]);
        Ok(got)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let mut tail = self.tail();
        if tail.buffered || offset != tail.at + tail.len as u64 {
            self.give_up(&mut tail)?;
            return self.disk.write_at(bytes, offset);
        }
        if !bytes.is_empty() {
            self.pending.store(true, Ordering::Release);
        }
        self.append(&mut tail, bytes)
    }

    fn length(&self) -> Result<u64> {
        self.settle()?;
        self.disk.length()
    }

    fn set_length(&self, len: u64) -> Result<()> {
        self.give_up(&mut self.tail())?;
        self.disk.set_length(len)
    }

    fn allocate(&self, len: u64) -> Result<()> {
        self.give_up(&mut self.tail())?;
        self.disk.allocate(len)
    }

    fn sync_data(&self) -> Result<()> {
        self.settle()?;
        self.disk.sync_data()
    }

    fn sync_all(&self) -> Result<()> {
        self.settle()?;
        self.disk.sync_all()
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        self.give_up(&mut self.tail())?;
        self.disk.map(len)
    }
}

impl Drop for DirectFile {
    /// Nobody is told whether it succeeds: who wants to know has synced.
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

impl fmt::Debug for DirectFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DirectFile").field(&self.disk.path).finish()
    }
}

#[cfg(test)]
mod tests {
    use crate::vfs::dice::Dice;
    use crate::vfs::disk::DiskFs;
    use crate::vfs::fs::{Fs, OpenMode};

    #[test]
    fn whatever_is_asked_it_is_a_file() {
        let root = tempfile::tempdir().unwrap();
        let mut dice = Dice::new(1, 0);
        for round in 0..24u64 {
            let path = root.path().join(format!("{round}"));
            let file = DiskFs.open_direct(&path, OpenMode::Create).unwrap();
            let mut model: Vec<u8> = Vec::new();
            for step in 0..40u64 {
                let len = dice.below(if step % 7 == 0 { 3 << 19 } else { 9000 });
                match dice.below(if round % 2 == 0 { 12 } else { 15 }) {
                    0..=6 => {
                        let bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + step + round) as u8).collect();
                        file.write_at(&bytes, model.len() as u64).unwrap();
                        model.extend_from_slice(&bytes);
                    }
                    7..=9 => {
                        let offset = dice.below(model.len() + 5000);
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
                        let at = dice.below(model.len() + 1);
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
    fn a_system_without_it_gives_the_usual_file() {
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
