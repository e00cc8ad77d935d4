//! What the engine writes, by kind of file: counts the bytes that are handed to a file system.

use crate::experiment::fs::through::{ThroughFs, Watch};
use azekura::fs::DiskFs;
use serde::{Deserialize, Serialize};
use std::ops::Sub;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes written, by kind of file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) log: u64,
    pub(crate) tables: u64,
    pub(crate) blobs: u64,
    /// The manifest and the like.
    pub(crate) other: u64,
}

impl Written {
    pub(crate) fn without_log(self) -> u64 {
        self.tables + self.blobs + self.other
    }
}

impl Sub for Written {
    type Output = Written;

    fn sub(self, earlier: Written) -> Written {
        Written {
            log: self.log.saturating_sub(earlier.log),
            tables: self.tables.saturating_sub(earlier.tables),
            blobs: self.blobs.saturating_sub(earlier.blobs),
            other: self.other.saturating_sub(earlier.other),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Log,
    Tables,
    Blobs,
    Other,
}

/// The counters, in the order of [`Kind`].
#[derive(Debug, Default)]
pub(crate) struct Tally([AtomicU64; 4]);

impl Watch for Tally {
    type Known = Kind;

    fn opened(&self, path: &Path) -> Kind {
        match path.extension().and_then(|end| end.to_str()) {
            Some("wal") => Kind::Log,
            Some("sst") => Kind::Tables,
            Some("blob") => Kind::Blobs,
            _ => Kind::Other,
        }
    }

    fn read(&self, _: Kind, _: u64, _: u64) {}

    fn wrote(&self, kind: Kind, bytes: u64) {
        self.0[kind as usize].fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A file system that counts.
pub(crate) type TallyFs = ThroughFs<Tally>;

impl ThroughFs<Tally> {
    /// Of the disk.
    pub(crate) fn counting() -> TallyFs {
        TallyFs::on(Arc::new(DiskFs::new()), Tally::default(), true)
    }

    /// What was written so far.
    pub(crate) fn written(&self) -> Written {
        let [log, tables, blobs, other] = self.watch.0.each_ref().map(|counter| counter.load(Ordering::Relaxed));
        Written { log, tables, blobs, other }
    }
}

#[cfg(test)]
mod tests {
    use super::{Tally, TallyFs, Written};
    use azekura::fs::{Fs, MemFs, OpenMode};
    use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
    use std::path::Path;
    use std::sync::Arc;

    #[test]
    fn bytes_are_counted_by_the_kind_of_their_file() {
        let fs = TallyFs::on(Arc::new(MemFs::new()), Tally::default(), true);
        fs.create_dir_all(Path::new("/dir")).unwrap();
        for (name, bytes) in [("1.wal", 1), ("2.sst", 20), ("3.blob", 300), ("MANIFEST", 4000)] {
            let file = fs.open(&Path::new("/dir").join(name), OpenMode::Create).unwrap();
            file.write_at(&vec![1; bytes], 0).unwrap();
            file.read_exact_at(&mut [0; 1], 0).unwrap();
        }
        assert_eq!(fs.written(), Written { log: 1, tables: 20, blobs: 300, other: 4000 });
        assert_eq!(fs.written().without_log(), 4320);
        let file = fs.open_direct(Path::new("/dir/3.blob"), OpenMode::Write).unwrap();
        file.write_at(&[1; 5], 0).unwrap();
        assert_eq!(
            fs.clone().written() - Written { blobs: 300, ..Written::default() },
            Written { log: 1, tables: 20, blobs: 5, other: 4000 }
        );
    }

    #[test]
    fn what_a_database_writes_is_what_its_files_have() {
        let dir = tempfile::tempdir().unwrap();
        let fs = TallyFs::counting();
        let path = dir.path().join("db");
        let db = Config::new(&path).fs(Arc::new(fs.clone())).open().unwrap();
        let apart = KvSeparationOptions::default().compression(azekura::CompressionType::None);
        let options = PartitionCreateOptions::default().with_kv_separation(apart);
        let pages = db.open_partition("pages", options).unwrap();
        (0..50u32).for_each(|i| pages.insert(i.to_be_bytes(), vec![7; 10_000]).unwrap());
        pages.flush().unwrap();
        let (written, metrics) = (fs.written(), pages.metrics());
        let blobs: u64 = metrics.blob_files.iter().map(|file| file.bytes).sum();
        let tables: u64 = metrics.levels.iter().map(|level| level.bytes).sum();
        assert_eq!((written.blobs, written.tables), (blobs, tables), "{written:?}");
        assert!(blobs > 500_000 && tables > 500 && written.log > 500_000 && written.other > 100, "{written:?}");
    }
}
