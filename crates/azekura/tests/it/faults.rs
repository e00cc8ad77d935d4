//! The n-th call of each kind to the file system fails, once or for ever, in every phase of a database's life: no
//! panic, no wait without an end, nothing acknowledged is lost.
//!
//! - `AZEKURA_FAULT_STRIDE`: try every so many calls only.
//!
//! Rooms in reading order: `life` (the phases, and what must hold at their end), `sweep` (every call), `rules` (failed
//! syncs poison, a full disk does not), `setbacks` (what fails for ever keeps nobody else from their work).

mod life;
mod rules;
mod setbacks;
mod sweep;
