//! Pools behind the contract of an engine.
//!
//! A pool is a tree with somebody who keeps it: by checkpoints, where the log makes its records durable and the image
//! goes to its file now and then, or as memory, where the file is used as such, and what is stored into it is durable
//! by itself.
//!
//! Rooms in reading order: [`contract`], [`home`] (where a pool belongs), [`pool`] (what both do), [`checkpoints`],
//! [`memory`], [`stored`] (opening).

pub(crate) mod checkpoints;
pub(crate) mod contract;
pub(crate) mod home;
pub(crate) mod memory;
pub(crate) mod pool;
pub(crate) mod stored;

pub(crate) use contract::{AssignSeqnoFn, PmemEngine, PoolStats};
pub(crate) use home::{PoolLocation, uses_mapped_pools};
pub(crate) use stored::{ManifestPoolInfo, StoredPool};
