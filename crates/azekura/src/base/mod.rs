//! Floor 0: the words everything else is written in.
//!
//! Plain values and pure functions; nothing here opens a file, starts a thread or reads a clock.
//!
//! Invariants:
//! - every decoder returns [`Error`] of kind [`ErrorKind::Corruption`] on bytes it cannot make sense of, and never
//!   panics;
//! - integers on disk are little-endian and of fixed width or LEB128 varints, never `usize`.
//!
//! Rooms in reading order: [`error`], [`kind`], [`key`], [`part`] (what is handed on without a copy), [`comparator`],
//! [`coding`], [`checksum`], [`compression`], [`file_header`], [`file_footer`], [`blob_ref`] (pointers to values in
//! blob files), [`edit`], [`ledger`] (what edits add up to), [`event`], [`sync`].

pub(crate) mod blob_ref;
pub(crate) mod checksum;
pub(crate) mod coding;
pub(crate) mod comparator;
pub(crate) mod compression;
pub(crate) mod edit;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod file_footer;
pub(crate) mod file_header;
pub(crate) mod key;
pub(crate) mod kind;
pub(crate) mod ledger;
pub(crate) mod part;
pub(crate) mod sync;

pub(crate) use comparator::KeyOrder;
pub(crate) use error::{Error, ErrorKind, Result};
pub(crate) use key::{EntryRef, KeyRef, SeqNo};
pub(crate) use kind::RecordKind;
