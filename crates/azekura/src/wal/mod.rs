//! Layer 3: the write-ahead log (WAL), which all partitions share. It is a chain of segments. Each segment is a file of
//! records.
//!
//! Invariants:
//! - Sequence numbers are consecutive through the whole chain, and a group of commits never spans two segments.
//! - A sync covers all earlier unsynced segments first. A segment is begun only when all segments but the one before
//!   it are synced.
//! - The name of a segment is durable before the segment is listed, and its header is written after that. So a listed
//!   segment whose header has an older epoch was never synced.
//! - Replay only reads. A replayed segment is never appended to.
//! - After a failed sync or a failed write of frames, the WAL writes nothing more.
//!
//! Modules, in reading order: [`format`](mod@format) (segments, and the records of a commit), [`options`],
//! [`segment`] (the segment being written), [`writer`] (shared state and appending), [`sync`], [`recycling`]; for
//! recovery: [`reader`] (finds and replays segments), [`rewrite`](mod@rewrite) (rewrites the WAL after a replay that
//! skipped damage). [`tail`] reads the WAL while it is written.

pub(crate) mod format;
pub(crate) mod options;
pub(crate) mod reader;
pub(crate) mod recycling;
pub(crate) mod rewrite;
pub(crate) mod segment;
pub(crate) mod sync;
pub(crate) mod tail;
pub(crate) mod writer;

pub use options::RecoveryMode;

pub(crate) use format::scan_segment_bytes;
pub(crate) use options::{
    PartitionSeqno, WalCallbacks, WalCommit, WalOptions, WalReplayOptions, WalReplayReport, WalRetention,
    WalSegmentInfo,
};
pub(crate) use reader::replay;
pub(crate) use rewrite::{WalRewriteOptions, rewrite_wal};
pub(crate) use writer::Wal;
