//! A disk with one head, simulated: a file system that passes everything on and counts the reads that reach it.
//!
//! The clock of the disk is virtual: what the reads would have taken follows from how often the head had to move and
//! how many bytes went by. One disk serves all threads, so its clock runs for all of them together.

use crate::experiment::fs::through::{ThroughFs, Watch};
use azekura::fs::Fs;
use std::ops::Sub;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Past the cache of the system whole sectors are read.
pub(crate) const SECTOR: u64 = 4096;

/// How fast a disk is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Speed {
    pub(crate) seeks_per_s: f64,
    pub(crate) bytes_per_s: f64,
}

/// What reached a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) reads: u64,
    /// Reads that did not continue the one before.
    pub(crate) seeks: u64,
    /// Of the sectors that went by.
    pub(crate) bytes: u64,
}

impl Traffic {
    /// Seconds that a disk of that speed is busy with it.
    pub(crate) fn seconds(&self, speed: Speed) -> f64 {
        self.seeks as f64 / speed.seeks_per_s + self.bytes as f64 / speed.bytes_per_s
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    fn sub(self, earlier: Traffic) -> Traffic {
        Traffic {
            reads: self.reads.saturating_sub(earlier.reads),
            seeks: self.seeks.saturating_sub(earlier.seeks),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}

/// The disk. Thread safe: reads of many threads pass one after the other.
#[derive(Debug, Default)]
pub(crate) struct Spindle {
    head: Mutex<Head>,
    /// Files opened so far; each opening has a place of its own on the disk.
    files: AtomicU64,
}

#[derive(Debug, Default)]
struct Head {
    /// The file and the offset in it behind the last read.
    behind: Option<(u64, u64)>,
    traffic: Traffic,
}

impl Head {
    /// `len` bytes at `offset` of `file` are read. Of a read that continues the last one, the sector at the seam has
    /// gone by already.
    fn pass(&mut self, file: u64, offset: u64, len: u64) {
        if len == 0 {
            return; // the end of the file is known without the disk
        }
        let continues = self.behind == Some((file, offset));
        let (first, end) = (offset / SECTOR, offset.saturating_add(len));
        let first = if continues { offset.div_ceil(SECTOR) } else { first };
        self.traffic.reads += 1;
        self.traffic.seeks += u64::from(!continues);
        self.traffic.bytes += end.div_ceil(SECTOR).saturating_sub(first) * SECTOR;
        self.behind = Some((file, end));
    }
}

impl Watch for Spindle {
    type Known = u64;

    fn opened(&self, _: &Path) -> u64 {
        self.files.fetch_add(1, Ordering::Relaxed)
    }

    fn read(&self, file: u64, offset: u64, bytes: u64) {
        self.head.lock().unwrap_or_else(PoisonError::into_inner).pass(file, offset, bytes);
    }

    fn wrote(&self, _: u64, _: u64) {}
}

/// A file system on such a disk; only reads are the disk's. A clone is the same one.
pub(crate) type SpindleFs = ThroughFs<Spindle>;

impl ThroughFs<Spindle> {
    /// Counts the reads that reach `inner`. Where they shall take the time of a real device, `direct` makes those past
    /// the cache of the system what they say; where they take virtual time, the cache of the system is faster.
    pub(crate) fn new(inner: Arc<dyn Fs>, direct: bool) -> SpindleFs {
        SpindleFs::on(inner, Spindle::default(), direct)
    }

    /// What has reached the disk so far.
    pub(crate) fn traffic(&self) -> Traffic {
        self.watch.head.lock().unwrap_or_else(PoisonError::into_inner).traffic
    }
}

#[cfg(test)]
mod tests {
    use super::{SECTOR, Speed, SpindleFs, Traffic};
    use azekura::fs::{File, Fs, MemFs, OpenMode};
    use std::path::Path;
    use std::sync::Arc;

    const SLOW: Speed = Speed { seeks_per_s: 100.0, bytes_per_s: 1e6 };

    fn disk() -> SpindleFs {
        SpindleFs::new(Arc::new(MemFs::new()), true)
    }

    fn file(fs: &SpindleFs, name: &str, sectors: u64) -> Arc<dyn File> {
        let file = fs.open_direct(Path::new(name), OpenMode::Create).unwrap();
        file.write_at(&vec![7; (sectors * SECTOR) as usize], 0).unwrap();
        file
    }

    fn read(file: &dyn File, offset: u64, len: u64) {
        file.read_exact_at(&mut vec![0; len as usize], offset).unwrap();
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9 * b
    }

    #[test]
    fn a_scan_moves_the_head_once_and_random_reads_move_it_each_time() {
        let fs = disk();
        let file = file(&fs, "/table", 100);
        assert_eq!(fs.traffic(), Traffic::default(), "writes and openings are not counted");
        (0..100).for_each(|i| read(file.as_ref(), i * SECTOR, SECTOR));
        let scan = fs.traffic();
        assert_eq!(scan, Traffic { reads: 100, seeks: 1, bytes: 100 * SECTOR });
        assert!(near(scan.seconds(SLOW), 0.01 + 0.4096), "{}", scan.seconds(SLOW));
        (0..100).for_each(|i| read(file.as_ref(), i * 37 % 100 * SECTOR, SECTOR));
        let random = fs.traffic() - scan;
        assert_eq!(random, Traffic { reads: 100, seeks: 100, bytes: 100 * SECTOR });
        assert!(near(random.seconds(SLOW), 1.0 + 0.4096), "{}", random.seconds(SLOW));
    }

    #[test]
    fn whole_sectors_go_by_and_the_one_at_a_seam_only_once() {
        let fs = disk();
        let file = file(&fs, "/table", 10);
        read(file.as_ref(), 4000, 200);
        assert_eq!(fs.traffic(), Traffic { reads: 1, seeks: 1, bytes: 2 * SECTOR });
        read(file.as_ref(), 4200, 100);
        assert_eq!(fs.traffic(), Traffic { reads: 2, seeks: 1, bytes: 2 * SECTOR });
        read(file.as_ref(), 4300, 4000);
        assert_eq!(fs.traffic(), Traffic { reads: 3, seeks: 1, bytes: 3 * SECTOR });
        read(file.as_ref(), 4300, 10);
        assert_eq!(fs.traffic(), Traffic { reads: 4, seeks: 2, bytes: 4 * SECTOR });
        assert_eq!(file.read_at(&mut [0; 10], 10 * SECTOR).unwrap(), 0);
        assert_eq!(fs.traffic().reads, 4, "the end of the file is no read");
    }

    #[test]
    fn the_head_moves_between_files_and_between_threads() {
        let fs = disk();
        let (one, other) = (file(&fs, "/one", 10), file(&fs, "/other", 10));
        for i in 0..10 {
            read(one.as_ref(), i * SECTOR, SECTOR);
            read(other.as_ref(), i * SECTOR, SECTOR);
        }
        assert_eq!(fs.traffic(), Traffic { reads: 20, seeks: 20, bytes: 20 * SECTOR });
        let before = fs.traffic();
        std::thread::scope(|scope| {
            for file in [&one, &other] {
                scope.spawn(move || (0..50).for_each(|i| read(file.as_ref(), i % 10 * SECTOR, SECTOR)));
            }
        });
        let both = fs.traffic() - before;
        assert_eq!((both.reads, both.bytes), (100, 100 * SECTOR), "one disk counts for all");
        assert!(both.seeks >= 10, "{both:?}");
    }

    #[test]
    fn everything_but_reads_is_passed_on() {
        let fs = disk();
        let path = Path::new("/dir/file");
        fs.create_dir_all(Path::new("/dir")).unwrap();
        let file = fs.open(path, OpenMode::Create).unwrap();
        file.allocate(100).unwrap();
        file.set_length(10).unwrap();
        file.sync_data().unwrap();
        file.sync_all().unwrap();
        assert_eq!(file.length().unwrap(), 10);
        fs.hard_link(path, Path::new("/dir/link")).unwrap();
        fs.rename(path, Path::new("/dir/name")).unwrap();
        fs.sync_dir(Path::new("/dir")).unwrap();
        assert_eq!(fs.read_dir(Path::new("/dir")).unwrap().len(), 2);
        fs.remove_file(Path::new("/dir/link")).unwrap();
        assert!(!fs.exists(path).unwrap() && fs.exists(Path::new("/dir/name")).unwrap());
        fs.remove_dir_all(Path::new("/dir")).unwrap();
        assert_eq!(fs.traffic(), Traffic::default());
    }
}
