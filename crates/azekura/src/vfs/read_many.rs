//! Reads many ranges of files, with overlapping reads where the device can serve several at a time.

use std::ops::DerefMut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::vfs::fs::File;

/// Maximum number of threads that read at the same time, including the calling thread.
const READERS_MAX: usize = 16;
/// Number of reads for each thread: with fewer, starting a thread costs more than it saves.
const READS_PER_READER: usize = 2;

/// One range of a file.
pub(crate) struct RangeRead<B> {
    pub(crate) file: Arc<dyn File>,
    pub(crate) offset: u64,
    /// Is filled by the read.
    pub(crate) bytes: B,
    /// The failure of the read, if it failed.
    pub(crate) error: Option<Error>,
}

impl<B: DerefMut<Target = [u8]>> RangeRead<B> {
    fn run(&mut self) {
        self.error = self.file.read_exact_at(&mut self.bytes, self.offset).err();
    }
}

/// Fills the bytes of all reads. Announces them first, so that the operating system can read ahead. Reads of files that
/// cannot be announced are shared among up to [`READERS_MAX`] threads. Each read records its own error.
pub(crate) fn read_all<B: DerefMut<Target = [u8]> + Send>(reads: &mut [RangeRead<B>]) {
    if reads.len() < 2 {
        return reads.iter_mut().for_each(RangeRead::run);
    }
    let announce = |read: &mut RangeRead<B>| read.file.will_read(read.offset, read.bytes.len() as u64);
    let waits = reads.iter_mut().map(announce).filter(|announced| !announced).count();
    let readers = (waits / READS_PER_READER).min(READERS_MAX);
    if readers < 2 {
        return reads.iter_mut().for_each(RangeRead::run);
    }
    read_in_threads(reads, readers);
}

fn read_in_threads<B: DerefMut<Target = [u8]> + Send>(reads: &mut [RangeRead<B>], readers: usize) {
    let next = AtomicUsize::new(0);
    let panicked = AtomicBool::new(false);
    let reads: Vec<Mutex<&mut RangeRead<B>>> = reads.iter_mut().map(Mutex::new).collect();
    let read_some = || {
        while let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
            lock(read).run();
        }
    };
    thread::scope(|scope| {
        // If the system starts no more threads, the others read all.
        let started = |_| thread::Builder::new().name("azekura-read".to_owned()).spawn_scoped(scope, read_some).ok();
        let others: Vec<_> = (1..readers).map_while(started).collect();
        read_some();
        let failed = others.into_iter().any(|other| other.join().is_err());
        panicked.store(failed, Ordering::Relaxed);
    });
    // A file implementation panicked in another thread, as it would have in this one.
    assert!(!panicked.into_inner(), "a file panicked while it was read");
}

/// Returns the bytes of a read.
///
/// # Errors
/// That of the read.
pub(crate) fn finished<B>(read: RangeRead<B>) -> Result<B> {
    read.error.map_or(Ok(read.bytes), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::mapped_memory::MappedMemory;
    use crate::vfs::fs::Mapping;

    /// A file of 1000 bytes, each its offset modulo 251. Counts calls.
    #[derive(Debug, Default)]
    struct Pattern {
        announces: bool,
        announced: AtomicUsize,
        running: AtomicUsize,
        max_running: AtomicUsize,
    }

    impl File for Pattern {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.max_running.fetch_max(running, Ordering::SeqCst);
            let len = buf.len().min(1000usize.saturating_sub(offset as usize));
            (0..len).for_each(|i| buf[i] = ((offset as usize + i) % 251) as u8);
            self.running.fetch_sub(1, Ordering::SeqCst);
            Ok(len)
        }
        fn will_read(&self, _offset: u64, _len: u64) -> bool {
            self.announced.fetch_add(1, Ordering::SeqCst);
            self.announces
        }
        fn write_at(&self, _: &[u8], _: u64) -> Result<()> {
            Err(Error::unsupported("a pattern does not change"))
        }
        fn length(&self) -> Result<u64> {
            Ok(1000)
        }
        fn set_length(&self, _: u64) -> Result<()> {
            Err(Error::unsupported("a pattern does not change"))
        }
        fn allocate(&self, _: u64) -> Result<()> {
            Err(Error::unsupported("a pattern does not change"))
        }
        fn sync_data(&self) -> Result<()> {
            Err(Error::unsupported("a pattern does not change"))
        }
        fn sync_all(&self) -> Result<()> {
            Err(Error::unsupported("a pattern does not change"))
        }
        fn map(&self, _: u64) -> Result<Option<Box<dyn Mapping>>> {
            Ok(None)
        }
        fn map_memory(&self, _: u64) -> Result<Option<Box<dyn MappedMemory>>> {
            Ok(None)
        }
    }

    fn reads(file: &Arc<Pattern>, offsets: &[u64]) -> Vec<RangeRead<Vec<u8>>> {
        let read = |&offset| RangeRead { file: Arc::clone(file) as _, offset, bytes: vec![0; 20], error: None };
        offsets.iter().map(read).collect()
    }

    #[test]
    fn every_range_is_read_or_has_its_error() {
        let offsets: Vec<u64> = (0..100).map(|i| i * 7).chain([980, 981, 2000]).collect();
        for announces in [false, true] {
            let file = Arc::new(Pattern { announces, ..Pattern::default() });
            let mut all = reads(&file, &offsets);
            read_all(&mut all);
            assert_eq!(file.announced.load(Ordering::SeqCst), offsets.len());
            assert!(!announces || file.max_running.load(Ordering::SeqCst) == 1, "announced reads need no threads");
            assert!(file.max_running.load(Ordering::SeqCst) <= READERS_MAX);
            for read in all {
                let offset = read.offset as usize;
                match finished(read) {
                    Ok(bytes) => assert!(bytes.iter().enumerate().all(|(i, b)| *b as usize == (offset + i) % 251)),
                    Err(error) => assert!(offset > 980 && error.kind() == ErrorKind::Corruption),
                }
            }
        }
    }

    #[test]
    fn single_read_is_not_announced() {
        let file = Arc::new(Pattern::default());
        let mut one = reads(&file, &[3]);
        read_all(&mut one);
        assert_eq!(file.announced.load(Ordering::SeqCst), 0);
        assert_eq!(finished(one.remove(0)).unwrap()[0], 3);
    }
}
