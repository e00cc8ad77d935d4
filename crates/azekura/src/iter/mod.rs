//! Walking over entries in internal order, alone and merged.
//!
//! Invariants:
//! - a cursor shows one moment: what is written after it was made may or may not appear, what was there appears once;
//! - an entry's borrow ends at the next step; nothing is copied until the public iterator hands it out;
//! - an error leaves the cursor not valid; seeking again is allowed.
//!
//! Rooms in reading order: [`iter`] (the contract), [`merge`] (k-way), [`visible`] (newest version at a sequence
//! number).

#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds the kinds of cursor")]
pub(crate) mod iter;
pub(crate) mod merge;
pub(crate) mod visible;

pub(crate) use iter::InternalIter;
