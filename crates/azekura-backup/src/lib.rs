#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! In reading order: `layout` (names and JSON), `history`, `store` (requests, retries, rate limit), `scratch`,
//! `create`, `holds`, `prune`, `verify`, `log_object` and `log` (the shipped log), `watch`, `restore`, `progress`,
//! `error`. `log_model` tests `log` with random histories.
//!
//! # Why no object is deleted that a backup needs
//!
//! Writers and `prune` hold no locks. They rely on the grace time g of the store, on the clock of the store, which
//! gives every object its time, and on listings that show an object at the latest g/4 after it was written.
//!
//! - `prune` writes the names of the objects of a backup to a hold before it removes the manifest, at the latest g/4
//!   later (otherwise it ends with `TooSlow`). It lists the objects, then holds and manifests. It deletes an object
//!   that is older than g, and that neither a manifest nor a hold younger than g names. The same for the part of the
//!   log that only removed backups need.
//! - A writer lists what is stored. It uses an object again if a manifest names it, or if it is younger than g/4, or if
//!   a hold younger than g/4 names it. Every other object it uploads, under a new name that has random digits. Within
//!   g/4 after it began the listing it writes the names of all objects of the backup to a hold, and renews that every
//!   g/8. A writer that finds out that it paused for more than 3/4 g gives up (`TooSlow`). At the end it writes the
//!   manifest, and removes it if that was too late.
//!
//! Let `prune` list the objects and then the holds at p, and delete an object x of a backup whose writer wrote its
//! first hold at h.
//! - If a manifest named x when the writer listed, and was removed since, its hold was written at most g/4 before the
//!   removal, and the listing showed the manifest at most g/4 longer. Because `prune` ignored that hold, it was written
//!   before p - g. So h < p - g + 3/4 g: the last g/4 is the time of the writer between its listing and its hold.
//! - If x was younger than g/4 or in a hold younger than g/4, then x or the hold was written before p - g, because
//!   otherwise `prune` would have left x. So again h < p - g + g/2.
//! - If the writer uploaded x, then x is the only object that ever had its name, and was written after the hold. So
//!   h < p - g.
//!
//! In each case `prune` sees at p the first hold, or one that renews it and is younger than g, or the manifest. So it
//! leaves x. How long `prune` takes after p does not matter, because it deletes only names that it listed before p. Two
//! writers, and two calls of `prune`, do not disturb each other: manifests and log objects are created only if their
//! name is free, and no name is used again.
mod create;
mod error;
mod history;
mod holds;
mod layout;
mod log;
#[cfg(test)]
mod log_model;
mod log_object;
mod progress;
mod prune;
mod restore;
mod scratch;
mod store;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod verify;
mod watch;

pub use create::{BackupInfo, CreateOptions, CreateReport};
pub use error::{BackupError, Result};
pub use log::Until;
pub use progress::{Progress, Stage};
pub use prune::{PruneOptions, PruneReport};
pub use restore::{RestoreOptions, RestoreReport};
pub use store::BackupStore;
pub use verify::{StoreReport, VerifyOptions};
pub use watch::{WatchStep, Watcher};
