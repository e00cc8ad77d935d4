//! Layer 0: shared values and pure functions. Nothing here opens a file, starts a thread or reads a clock.
//!
//! Invariants:
//! - Every decoder returns an [`Error`] of kind [`ErrorKind::Corruption`] for invalid bytes, and never panics.
//! - Integers on disk are little-endian and of fixed width, or LEB128 varints; never `usize`.
//!
//! Modules, in reading order: [`error`], [`key`], [`shared_bytes`] (bytes returned without a copy),
//! [`comparator`], [`merge_operator`], [`key_range`] (the keys that a range delete removes), [`coding`], [`checksum`],
//! [`compression`], [`options`] (tables of options), [`file_format`] (headers and footers of files), [`blob_pointer`]
//! (pointers to values in blob files), [`version_edit`], [`manifest_state`] (the state that version edits build),
//! [`event`], [`sync`], [`mapped_memory`] (the words of a mapped file), [`scratch`] (buffers that a thread reuses).

pub(crate) mod blob_pointer;
pub(crate) mod checksum;
pub(crate) mod coding;
pub(crate) mod comparator;
pub(crate) mod compression;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod file_format;
pub(crate) mod key;
pub(crate) mod key_range;
pub(crate) mod manifest_state;
pub(crate) mod mapped_memory;
pub(crate) mod merge_operator;
pub(crate) mod options;
pub(crate) mod scratch;
pub(crate) mod shared_bytes;
pub(crate) mod sync;
pub(crate) mod version_edit;

pub(crate) use comparator::KeyOrder;
pub(crate) use error::{Error, ErrorKind, Result};
pub(crate) use key::RecordKind;
pub(crate) use key::{EntryRef, InternalKey, SeqNo};
