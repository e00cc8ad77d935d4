//! The list of workloads and what each one needs.

use crate::engine::Engine;
use crate::failure::Result;
use crate::machine::meter::Meter;
use crate::workload::generations::Generations;
use crate::workload::keys::KeyOrder;
use crate::workload::shape::Shape;
use crate::workload::{fill, read, ycsb};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One thread's share of a workload.
pub(crate) trait Work: Send {
    /// Does the next operation (or the next bundle of them) and tells the meter.
    ///
    /// # Errors
    /// What the engine says, or that what it gave back is wrong.
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()>;
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
    /// Write new values to random keys of a loaded database.
    Overwrite,
    /// Get random keys that exist, uniformly.
    #[value(name = "readrandom")]
    #[serde(rename = "readrandom")]
    ReadRandom,
    /// Get keys that do not exist, spread between those that do.
    #[value(name = "readmissing")]
    #[serde(rename = "readmissing")]
    ReadMissing,
    /// Scan the whole database in key order; each record is an operation.
    #[value(name = "readseq")]
    #[serde(rename = "readseq")]
    ReadSeq,
    /// Seek to a random key and read the records that follow (see --seek-nexts).
    #[value(name = "seekrandom")]
    #[serde(rename = "seekrandom")]
    SeekRandom,
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
#[derive(Clone, Debug)]
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
    /// Acknowledged generations, empty for workloads that only read.
    pub(crate) generations: Arc<Generations>,
}

impl Workload {
    /// The name on the command line and in reports.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it runs on a loaded database; otherwise on an empty one.
    pub(crate) fn loads(self) -> bool {
        !matches!(self, Workload::FillSeq | Workload::FillRandom)
    }

    /// Whether it writes.
    pub(crate) fn writes(self) -> bool {
        use Workload::{FillRandom, FillSeq, Overwrite, YcsbA, YcsbB, YcsbD, YcsbE, YcsbF};
        matches!(self, FillSeq | FillRandom | Overwrite | YcsbA | YcsbB | YcsbD | YcsbE | YcsbF)
    }

    /// Whether it changes records that may have been changed before.
    pub(crate) fn updates(self) -> bool {
        matches!(self, Workload::Overwrite | Workload::YcsbA | Workload::YcsbB | Workload::YcsbF)
    }

    /// What is done, uncounted, before it, so that caches hold what they will hold.
    pub(crate) fn warm_up(self) -> Option<Workload> {
        use Workload::{FillRandom, FillSeq, Overwrite, YcsbA, YcsbB, YcsbC, YcsbD, YcsbE, YcsbF};
        match self {
            FillSeq | FillRandom | Overwrite => None,
            YcsbA | YcsbB | YcsbC | YcsbD | YcsbE | YcsbF => Some(YcsbC),
            reads => Some(reads),
        }
    }

    /// How its indices become keys.
    pub(crate) fn key_order(self) -> KeyOrder {
        if self == Workload::FillSeq { KeyOrder::Sequential } else { KeyOrder::Scrambled }
    }

    /// Operations when none are asked for: `n`, fewer where one operation is many records.
    pub(crate) fn default_ops(self, n: u64) -> u64 {
        match self {
            Workload::SeekRandom | Workload::YcsbE => (n / 10).max(1),
            _ => n,
        }
    }

    /// The share of one thread.
    pub(crate) fn share(self, share: Share) -> Box<dyn Work> {
        match self {
            Workload::FillSeq | Workload::FillRandom => Box::new(fill::Fill::new(&share, self == Workload::FillSeq)),
            Workload::Overwrite => Box::new(fill::Overwrite::new(share)),
            Workload::ReadRandom => Box::new(read::ReadRandom::new(&share, true)),
            Workload::ReadMissing => Box::new(read::ReadRandom::new(&share, false)),
            Workload::ReadSeq => Box::new(read::ReadSeq::new(&share)),
            Workload::SeekRandom => Box::new(read::SeekRandom::new(&share)),
            Workload::YcsbA => Box::new(ycsb::ReadUpdate::new(share, 50, false)),
            Workload::YcsbB => Box::new(ycsb::ReadUpdate::new(share, 95, false)),
            Workload::YcsbC => Box::new(ycsb::ReadUpdate::new(share, 100, false)),
            Workload::YcsbF => Box::new(ycsb::ReadUpdate::new(share, 50, true)),
            Workload::YcsbD => Box::new(ycsb::ReadLatest::new(share)),
            Workload::YcsbE => Box::new(ycsb::ShortScans::new(share)),
        }
    }
}
