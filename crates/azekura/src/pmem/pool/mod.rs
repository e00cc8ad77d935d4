//! The files of a pool: images, mapped pool files, recovery, checkpoints, and the engine that `db` calls.
//!
//! Invariants:
//! - A checkpoint is a snapshot of the image at one point in time, and does not stop writers.
//! - The files contain a whole checkpoint at any time, whichever writes a crash loses. The cost of a checkpoint depends
//!   on the number of changed pages.
//! - Recovery reads and checks everything first. Then it repairs the leaves that a crash left incomplete, and makes
//!   them durable before any write. A pool that is refused is unchanged.
//!
//! Modules, lowest first: [`metrics`], [`image_format`] (also the shadow), [`image`] (files of a pool in memory),
//! [`used_space`], [`pool_recovery`], [`engine`], [`checkpoint`] (durability of images and of mapped files), [`open`].

pub(crate) mod checkpoint;
pub(crate) mod engine;
pub(crate) mod image;
pub(crate) mod image_format;
#[cfg(test)]
mod image_tests;
pub(crate) mod metrics;
pub(crate) mod open;
pub(crate) mod pool_recovery;
pub(crate) mod used_space;

pub(crate) use engine::{PmemEngine, PoolLocation, uses_mapped_pools};
pub(crate) use image::{ImageStore, PoolFileKind, parse_pool_file_name};
pub(crate) use image_format::{ImageHeader, PAGE_LEN};
pub(crate) use open::{ManifestPoolInfo, StoredPool};
pub(crate) use pool_recovery::{PoolCheckLevel, PoolRecoveryReport};
