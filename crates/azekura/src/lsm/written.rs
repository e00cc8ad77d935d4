//! What a flush has written and not committed yet.

use std::sync::Arc;

use crate::base::SeqNo;
use crate::base::edit::{BlobMeta, TableMeta};
use crate::lsm::output::Unnamed;
use crate::memtable::Memtable;

/// A flush whose files are written.
pub(crate) struct Written {
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    /// The last record of the memtables.
    pub(crate) through: SeqNo,
    pub(crate) tables: Vec<TableMeta>,
    pub(crate) blobs: Vec<BlobMeta>,
    /// Until an edit may name the files.
    pub(crate) unnamed: Option<Unnamed>,
}
