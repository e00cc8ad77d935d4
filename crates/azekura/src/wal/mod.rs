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
//! Rooms in reading order: [`format`](mod@format), [`payload`] (a commit's records), [`options`], [`host`], [`segment`]
//! (the one being written), [`company`] (who syncs), [`log`] (the state), [`append`], [`sync`], [`retire`]; then
//! reading: [`survey`] (what files there are), [`walk`] (from segment to segment), [`salvage`], [`replay`](mod@replay),
//! [`rewrite`](mod@rewrite) (after damage that was passed over).

pub(crate) mod append;
pub(crate) mod company;
pub(crate) mod format;
pub(crate) mod host;
pub(crate) mod log;
pub(crate) mod options;
pub(crate) mod payload;
pub(crate) mod replay;
pub(crate) mod retire;
pub(crate) mod rewrite;
pub(crate) mod salvage;
pub(crate) mod segment;
pub(crate) mod survey;
pub(crate) mod sync;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod walk;

pub use options::RecoveryMode;

pub(crate) use format::scan_bytes;
pub(crate) use host::WalHost;
pub(crate) use log::Wal;
pub(crate) use options::{LogCommit, Mark, ReplayOptions, ReplayReport, WalOptions};
pub(crate) use replay::replay;
pub(crate) use rewrite::{Rewrite, rewrite};
