//! Floor 3: the write-ahead log. One for all partitions; a chain of segments, each a file of records.
//!
//! Invariants:
//! - sequence numbers are consecutive through the whole chain, and a group of commits never spans two segments;
//! - a sync covers all earlier unsynced segments first, and a segment is begun only once all but the one before it are
//!   synced;
//! - a listed segment's name is durable before it is listed, and its header is written after it is listed: a listed
//!   segment whose header is of an older life was never synced;
//! - replay reads only; a replayed segment is never appended to;
//! - after a failed sync or a failed write of frames nothing is written any more.
//!
//! Rooms in reading order: [`format`](mod@format), [`batch_codec`] (a commit's records), [`options`], [`callbacks`],
//! [`segment`] (the one being written), [`sync_state`] (who syncs), [`writer`] (the state), [`append`], [`sync`],
//! [`recycling`]; then reading: [`segment_set`] (what files there are), [`reader`] (from segment to segment),
//! [`salvage`], [`replay`](mod@replay), [`rewrite`](mod@rewrite) (after damage that was passed over).

pub(crate) mod append;
pub(crate) mod batch_codec;
pub(crate) mod callbacks;
pub(crate) mod format;
pub(crate) mod options;
pub(crate) mod reader;
pub(crate) mod recycling;
pub(crate) mod replay;
pub(crate) mod rewrite;
pub(crate) mod salvage;
pub(crate) mod segment;
pub(crate) mod segment_set;
pub(crate) mod sync;
pub(crate) mod sync_state;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod writer;

pub use options::RecoveryMode;

pub(crate) use callbacks::WalCallbacks;
pub(crate) use format::scan_segment_bytes;
pub(crate) use options::{PartitionSeqno, WalCommit, WalOptions, WalReplayOptions, WalReplayReport};
pub(crate) use replay::replay;
pub(crate) use rewrite::{WalRewriteOptions, rewrite_wal};
pub(crate) use writer::Wal;
