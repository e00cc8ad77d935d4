//! A file system in memory that can lose power.
//!
//! Every file and directory stands in it twice: as the running program sees it (*live*), and as the device is sure to
//! hold it (*synced*), with the list of changes between the two (*pending*). A sync empties the list; a crash keeps the
//! synced state and a chosen part of the list.
//!
//! Invariants:
//! - synced + all pending changes = live;
//! - pages are shared between live, synced and forks, and copied by who writes first, so a sync, a fork and a crash
//!   cost by what changed and not by how long the files are;
//! - the same operations and the same seed give the same crash, on every machine;
//! - one lock guards the whole tree; it is never held while a caller's code runs.
//!
//! Rooms in reading order: [`memfs`] (the face), [`handle`] (open files, mappings, locks), [`tree`] (names), [`inode`]
//! (live, synced, pending), [`mapped_words`] (files used as memory), [`content`] (pages), [`crash`] (what survives).

pub(crate) mod content;
pub(crate) mod crash;
pub(crate) mod handle;
pub(crate) mod inode;
pub(crate) mod mapped_words;
pub(crate) mod memfs;
pub(crate) mod tree;

pub use crash::Survival;
pub use memfs::MemFs;
