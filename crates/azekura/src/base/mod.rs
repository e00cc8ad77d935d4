//! Floor 0: the words everything else is written in.
//!
//! Plain values and pure functions; nothing here opens a file, starts a thread or reads a clock.
//!
//! Invariants:
//! - every decoder returns [`Error`] of kind [`ErrorKind::Corruption`] on bytes it cannot make sense of, and never
//!   panics;
//! - integers on disk are little-endian and of fixed width or LEB128 varints, never `usize`.
//!
//! Rooms in reading order: [`error`], [`record_kind`], [`key`], [`shared_bytes`] (what is handed on without a copy),
//! [`comparator`], [`coding`], [`checksum`], [`compression`], [`file_header`], [`file_footer`], [`blob_pointer`]
//! (pointers to values in blob files), [`version_edit`], [`manifest_state`] (what edits add up to), [`event`],
//! [`sync`].

pub(crate) mod blob_pointer;
pub(crate) mod checksum;
pub(crate) mod coding;
pub(crate) mod comparator;
pub(crate) mod compression;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod file_footer;
pub(crate) mod file_header;
pub(crate) mod key;
pub(crate) mod manifest_state;
pub(crate) mod record_kind;
pub(crate) mod shared_bytes;
pub(crate) mod sync;
pub(crate) mod version_edit;

pub(crate) use comparator::KeyOrder;
pub(crate) use error::{Error, ErrorKind, Result};
pub(crate) use key::{EntryRef, InternalKey, SeqNo};
pub(crate) use record_kind::RecordKind;
