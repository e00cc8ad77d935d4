//! Where the image of a pool goes: the files that checkpoints bring its changed pages to.
//!
//! Invariants:
//! - a checkpoint is one moment of the image, and writers don't stop for it;
//! - the files hold a whole checkpoint at every moment, whichever writes were lost;
//! - what a checkpoint costs follows the pages that were changed.
//!
//! Rooms in reading order: [`pages`] (what was changed, and the cut), [`format`](mod@format) (bytes), [`shadow`],
//! [`load`] (reading an image), [`files`].

pub(crate) mod files;
pub(crate) mod format;
mod load;
pub(crate) mod pages;
pub(crate) mod shadow;
#[cfg(test)]
mod tests;

pub(crate) use files::{ImageStore, PoolFileKind, parse_pool_file_name};
