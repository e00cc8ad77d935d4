//! RocksDB 11, through the C API of its release library, which is looked for at run time.
//!
//! Invariants: nothing of it is needed to build or to link; a machine without the library has every other engine, and
//! is told the command that installs it. Unsafe code stands in [`library`], [`settings`] and [`store`]; what they offer
//! is safe. The version is pinned, because the signatures in [`library`] are those of that version.
//!
//! Rooms: [`library`] finds and loads it; [`settings`] its options objects, each owned; [`store`] one open database;
//! [`engine`] answers the trait.

pub(crate) mod engine;
pub(crate) mod library;
mod settings;
mod store;
