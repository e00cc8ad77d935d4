//! `import --from`: databases of other engines, each read by its own library behind a Cargo feature.
//!
//! No importer changes its source. redb, LMDB and RocksDB open it read-only. LevelDB, sled and Fjall have no such mode,
//! so they open a copy in the temporary directory.
//!
//! Invariant: every table is read to its end before the first entry is stored, so a source that is damaged, or that has
//! a key beyond the limits, changes nothing.
//!
//! Reading order: `source` (what an importer provides), `run` (selection of tables, and the two passes), `source_lock`,
//! `source_copy`, then one file for each engine: `redb_source` with `overlay_backend`, `sled_source`, `fjall_source`,
//! `lmdb_source` with `check_process`, `leveldb_source` and `rocksdb_source` with `c_library`.

#![cfg_attr(
    not(feature = "import-all"),
    allow(dead_code, unused_imports, reason = "each importer uses a part of the shared code")
)]

#[cfg(feature = "_peer-library")]
mod c_library;
#[cfg(feature = "import-lmdb")]
mod check_process;
#[cfg(feature = "import-fjall")]
mod fjall_source;
#[cfg(feature = "import-leveldb")]
mod leveldb_source;
#[cfg(feature = "import-lmdb")]
mod lmdb_source;
#[cfg(feature = "import-redb")]
mod overlay_backend;
#[cfg(feature = "import-redb")]
mod redb_source;
#[cfg(feature = "import-rocksdb")]
mod rocksdb_source;
mod run;
#[cfg(feature = "import-sled")]
mod sled_source;
mod source;
#[cfg(feature = "_peer-copy")]
mod source_copy;
#[cfg(any(feature = "_peer-copy", feature = "_peer-library"))]
mod source_lock;

pub(super) use run::import;
