//! A file system in memory that can lose power.
//!
//! Every file and directory is stored twice: in the state that the running program reads (*live*), and in the state
//! that the device certainly has (*synced*), with the list of changes between the two (*pending*). A sync empties the
//! list. A crash keeps the synced state and a chosen part of the list.
//!
//! Invariants:
//! - The synced state with all pending changes is the live state.
//! - Live state, synced state and forks share pages, and a writer copies a page first. So the cost of a sync, a fork
//!   and a crash depends on the changes and not on the lengths of the files.
//! - The same operations and the same seed give the same crash on every machine.
//! - One lock guards the whole tree. It is not held while a caller's code runs.
//!
//! Modules, in reading order: [`memfs`] (the interface), [`handle`] (open files, mappings, locks), [`tree`] (names),
//! [`inode`] (live, synced, pending), [`mapped_words`] (mapped files), [`content`] (pages), [`crash`] (the choice of
//! surviving changes).

pub(crate) mod content;
pub(crate) mod crash;
pub(crate) mod handle;
pub(crate) mod inode;
pub(crate) mod mapped_words;
pub(crate) mod memfs;
pub(crate) mod tree;

pub use crash::Survival;
pub use memfs::MemFs;
