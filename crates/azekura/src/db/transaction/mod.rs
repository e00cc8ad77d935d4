//! Transactions: reads at a snapshot, own writes, and what was read, for the validation at the commit.
//!
//! Modules, in reading order: [`transaction`] (the public calls), [`transaction_options`], [`untracked_reads`],
//! [`transaction_state`], [`transaction_view`] (the snapshot under the own writes), [`read_set`].

pub(crate) mod read_set;
#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds its parts")]
pub(crate) mod transaction;
pub(crate) mod transaction_options;
pub(crate) mod transaction_state;
pub(crate) mod transaction_view;
pub(crate) mod untracked_reads;
