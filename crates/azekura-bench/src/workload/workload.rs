//! The list of workloads and what each one needs.

use crate::engine::{Engine, Options, Sync};
use crate::failure::Result;
use crate::machine::meter::Meter;
use crate::workload::generations::Generations;
use crate::workload::keys::KeyOrder;
use crate::workload::read::Choice;
use crate::workload::shape::Shape;
use crate::workload::zipf::{THETA, Zipf};
use crate::workload::{beside, bulk, fill, queue, read, scan, spread, ycsb};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Partitions of `partitions64`.
const PARTITIONS: u64 = 64;
/// Values at least so large are kept apart from the tree in workloads of blobs, by engines that can.
const BLOBS_APART_FROM: u64 = 1 << 10;

/// More partitions of one open database, shared by all threads.
pub(crate) type Partitions = Arc<Vec<Box<dyn Engine>>>;

/// One thread's share of a workload.
pub(crate) trait Work: Send {
    /// Before the clock starts; gives the bytes of the records it added to the data set.
    ///
    /// # Errors
    /// What the engine says.
    fn prepare(&mut self, _engine: &dyn Engine) -> Result<u64> {
        Ok(0)
    }

    /// Does the next operation (or the next bundle of them) and tells the meter.
    ///
    /// # Errors
    /// What the engine says, or that what it gave back is wrong.
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()>;

    /// Behind the last operation, while the clock still runs.
    ///
    /// # Errors
    /// What the engine says.
    fn finish(&mut self, _engine: &dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Uncounted, when the engine is at rest: looks at about `most` of the records written.
    ///
    /// # Errors
    /// What the engine says, or that what it gave back is wrong.
    fn verify(&mut self, _engine: &dyn Engine, _most: u64) -> Result<()> {
        Ok(())
    }
}

/// A workload by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Workload {
    /// Write n records in ascending key order into an empty database.
    #[value(name = "fillseq")]
    #[serde(rename = "fillseq")]
    FillSeq,
    /// Write n records in random key order, each key once, into an empty database.
    #[value(name = "fillrandom")]
    #[serde(rename = "fillrandom")]
    FillRandom,
    /// Write records in random key order into an empty database, each synced before it returns.
    #[value(name = "fillsync")]
    #[serde(rename = "fillsync")]
    FillSync,
    /// Write n records in ascending key order in batches of 1,000 into an empty database, then sync.
    #[value(name = "bulkload")]
    #[serde(rename = "bulkload")]
    BulkLoad,
    /// Write new values to random keys of a loaded database.
    Overwrite,
    /// Get random keys that exist, uniformly.
    #[value(name = "readrandom")]
    #[serde(rename = "readrandom")]
    ReadRandom,
    /// Get keys that exist, zipfian: some very often.
    #[value(name = "readzipf")]
    #[serde(rename = "readzipf")]
    ReadZipf,
    /// Get keys that do not exist, spread between those that do.
    #[value(name = "readmissing")]
    #[serde(rename = "readmissing")]
    ReadMissing,
    /// Get random keys while one more thread overwrites records at a fixed rate (see --write-rate).
    #[value(name = "readwhilewriting")]
    #[serde(rename = "readwhilewriting")]
    ReadWhileWriting,
    /// Scan the whole database in key order; each record is an operation.
    #[value(name = "readseq")]
    #[serde(rename = "readseq")]
    ReadSeq,
    /// Scan the whole database against key order; each record is an operation.
    #[value(name = "readreverse")]
    #[serde(rename = "readreverse")]
    ReadReverse,
    /// Seek to a random key and read the records that follow (see --seek-nexts).
    #[value(name = "seekrandom")]
    #[serde(rename = "seekrandom")]
    SeekRandom,
    /// Seek to a random record and read 10 records upwards.
    #[value(name = "scan10")]
    #[serde(rename = "scan10")]
    Scan10,
    /// Seek to a random record and read 100 records upwards.
    #[value(name = "scan100")]
    #[serde(rename = "scan100")]
    Scan100,
    /// Seek to a random record and read 10 records downwards.
    #[value(name = "scan10-reverse")]
    #[serde(rename = "scan10-reverse")]
    Scan10Reverse,
    /// Seek to a random record and read 100 records downwards.
    #[value(name = "scan100-reverse")]
    #[serde(rename = "scan100-reverse")]
    Scan100Reverse,
    /// Append to a queue and delete from its head, ten at a time (see --depth); each item is an operation.
    Queue,
    /// Half puts, half gets over 64 partitions of one database, which is empty at first.
    #[value(name = "partitions64")]
    #[serde(rename = "partitions64")]
    Partitions64,
    /// Write blobs in random key order, each key once, into an empty database (see --value-size).
    #[value(name = "blobload")]
    #[serde(rename = "blobload")]
    BlobLoad,
    /// Get blobs, zipfian.
    #[value(name = "blobread")]
    #[serde(rename = "blobread")]
    BlobRead,
    /// Write new values to random blobs of a loaded database.
    #[value(name = "bloboverwrite")]
    #[serde(rename = "bloboverwrite")]
    BlobOverwrite,
    /// Write n records unsynced, kill the process behind the last one, open, look for each record.
    Recovery,
    /// Open a loaded database that was closed cleanly, get one record, close it.
    Open,
    /// Half reads, half updates, zipfian.
    YcsbA,
    /// 95 % reads, 5 % updates, zipfian.
    YcsbB,
    /// Reads only, zipfian.
    YcsbC,
    /// 95 % reads of recent records, 5 % inserts.
    YcsbD,
    /// 95 % scans of 1 to 100 records, 5 % inserts, zipfian.
    YcsbE,
    /// Half reads, half read-modify-writes, zipfian.
    YcsbF,
}

/// What a thread needs to know to make its share of a workload.
#[derive(Clone)]
pub(crate) struct Share {
    /// The data set.
    pub(crate) shape: Shape,
    /// This thread's number, from 0.
    pub(crate) thread: u64,
    /// Number of threads.
    pub(crate) threads: u64,
    /// Seed of this thread's choices.
    pub(crate) seed: u64,
    /// Records read behind each seek of `seekrandom`.
    pub(crate) seek_nexts: u64,
    /// Records per second of the writer of `readwhilewriting`; 0 for as many as possible.
    pub(crate) write_rate: u64,
    /// Depth of `queue`, of all threads together.
    pub(crate) depth: u64,
    /// Acknowledged generations, empty for workloads that only read.
    pub(crate) generations: Arc<Generations>,
    /// The partitions of `partitions64`, empty otherwise.
    pub(crate) partitions: Partitions,
}

impl Share {
    /// Where this thread's stretch of the data set begins, if each has as many records as it has operations.
    pub(crate) fn stretch(&self) -> u64 {
        let (each, rest) = (self.shape.n / self.threads, self.shape.n % self.threads);
        each * self.thread + self.thread.min(rest)
    }
}

impl Workload {
    /// The name on the command line and in reports.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it runs on a loaded database; otherwise on an empty one.
    pub(crate) fn loads(self) -> bool {
        use Workload::{BlobLoad, BulkLoad, FillRandom, FillSeq, FillSync, Partitions64, Queue, Recovery};
        !matches!(self, FillSeq | FillRandom | FillSync | BulkLoad | BlobLoad | Queue | Partitions64 | Recovery)
    }

    /// Whether it writes.
    pub(crate) fn writes(self) -> bool {
        use Workload::{YcsbD, YcsbE};
        !self.loads() || self.updates() || matches!(self, YcsbD | YcsbE)
    }

    /// Whether it changes records that may have been changed before.
    pub(crate) fn updates(self) -> bool {
        use Workload::{BlobOverwrite, Overwrite, ReadWhileWriting, YcsbA, YcsbB, YcsbF};
        matches!(self, Overwrite | BlobOverwrite | ReadWhileWriting | YcsbA | YcsbB | YcsbF)
    }

    /// Whether its values are blobs.
    pub(crate) fn blobs(self) -> bool {
        matches!(self, Workload::BlobLoad | Workload::BlobRead | Workload::BlobOverwrite)
    }

    /// Whether threads make no difference to it.
    pub(crate) fn alone(self) -> bool {
        matches!(self, Workload::Recovery | Workload::Open)
    }

    /// Whether it ends with the data set: each record is written once.
    pub(crate) fn fills(self) -> bool {
        !self.loads() && !matches!(self, Workload::Queue | Workload::Partitions64)
    }

    /// How many more partitions it runs on.
    pub(crate) fn partitions(self) -> u64 {
        if self == Workload::Partitions64 { PARTITIONS } else { 0 }
    }

    /// What is done, uncounted, before it, so that caches hold what they will hold.
    pub(crate) fn warm_up(self) -> Option<Workload> {
        use Workload::{BlobOverwrite, Open, Overwrite, ReadRandom, ReadWhileWriting};
        use Workload::{YcsbA, YcsbB, YcsbC, YcsbD, YcsbE, YcsbF};
        match self {
            Overwrite | BlobOverwrite | Open => None,
            ReadWhileWriting => Some(ReadRandom),
            YcsbA | YcsbB | YcsbC | YcsbD | YcsbE | YcsbF => Some(YcsbC),
            other => other.loads().then_some(other),
        }
    }

    /// How its indices become keys.
    pub(crate) fn key_order(self) -> KeyOrder {
        match self {
            Workload::FillSeq | Workload::BulkLoad | Workload::Queue => KeyOrder::Sequential,
            _ => KeyOrder::Scrambled,
        }
    }

    /// The options it runs with: what it is about is not left to be asked for.
    pub(crate) fn options(self, asked: &Options) -> Options {
        let mut options = asked.clone();
        match self {
            Workload::FillSync if asked.sync == Sync::None => options.sync = Sync::Data,
            Workload::Recovery => options.sync = Sync::None,
            _ if self.blobs() => options.separate_from = asked.separate_from.or(Some(BLOBS_APART_FROM)),
            _ => {}
        }
        options
    }

    /// Operations when none are asked for: `n`, fewer where one operation is many records or a sync, more where it
    /// takes time to show.
    pub(crate) fn default_ops(self, n: u64) -> u64 {
        use Workload::{BlobOverwrite, FillSync, Open, Scan10, Scan10Reverse, Scan100, Scan100Reverse};
        match self {
            Workload::SeekRandom | Workload::YcsbE | Scan10 | Scan10Reverse => (n / 10).max(1),
            Scan100 | Scan100Reverse => (n / 50).max(1),
            FillSync => (n / 50).max(1000).min(n),
            BlobOverwrite => n.saturating_mul(2),
            Open => 1,
            _ => n,
        }
    }

    /// The share of one thread.
    pub(crate) fn share(self, share: Share) -> Box<dyn Work> {
        use Workload::{BlobLoad, BlobOverwrite, BlobRead, BulkLoad, FillRandom, FillSeq, FillSync, Overwrite};
        use Workload::{Open, Partitions64, Queue, ReadMissing, ReadRandom, ReadReverse, ReadSeq, ReadWhileWriting};
        use Workload::{ReadZipf, Recovery, Scan10, Scan10Reverse, Scan100, Scan100Reverse, SeekRandom};
        use Workload::{YcsbA, YcsbB, YcsbC, YcsbD, YcsbE, YcsbF};
        let nexts = share.seek_nexts;
        match self {
            FillSeq | FillRandom | FillSync | BlobLoad | Recovery => Box::new(fill::Fill::new(&share, self == FillSeq)),
            BulkLoad => Box::new(bulk::BulkLoad::new(&share)),
            Overwrite | BlobOverwrite => Box::new(fill::Overwrite::new(share)),
            ReadRandom | Open => Box::new(read::ReadRandom::new(&share, Choice::Uniform)),
            ReadZipf | BlobRead => {
                Box::new(read::ReadRandom::new(&share, Choice::Zipf(Zipf::new(share.shape.n, THETA))))
            }
            ReadMissing => Box::new(read::ReadRandom::new(&share, Choice::Missing)),
            ReadWhileWriting => Box::new(beside::Reader::new(share)),
            ReadSeq => Box::new(scan::ScanAll::new(&share, false)),
            ReadReverse => Box::new(scan::ScanAll::new(&share, true)),
            SeekRandom => Box::new(scan::ScanSome::new(&share, nexts, false)),
            Scan10 => Box::new(scan::ScanSome::new(&share, 10, false)),
            Scan100 => Box::new(scan::ScanSome::new(&share, 100, false)),
            Scan10Reverse => Box::new(scan::ScanSome::new(&share, 10, true)),
            Scan100Reverse => Box::new(scan::ScanSome::new(&share, 100, true)),
            Queue => Box::new(queue::Queue::new(&share)),
            Partitions64 => Box::new(spread::Spread::new(share)),
            YcsbA => Box::new(ycsb::ReadUpdate::new(share, 50, false)),
            YcsbB => Box::new(ycsb::ReadUpdate::new(share, 95, false)),
            YcsbC => Box::new(ycsb::ReadUpdate::new(share, 100, false)),
            YcsbF => Box::new(ycsb::ReadUpdate::new(share, 50, true)),
            YcsbD => Box::new(ycsb::ReadLatest::new(share)),
            YcsbE => Box::new(ycsb::ShortScans::new(share)),
        }
    }

    /// What runs beside the counted threads, uncounted, until they end.
    pub(crate) fn beside(self, share: Share) -> Option<Box<dyn Work>> {
        (self == Workload::ReadWhileWriting).then(|| Box::new(beside::Writer::new(share)) as Box<dyn Work>)
    }
}
