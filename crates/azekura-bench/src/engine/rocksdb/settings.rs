//! The library's options objects, each owned and destroyed with its owner.

#![allow(unsafe_code)]

use crate::engine::options::BLOOM_BITS;
use crate::engine::rocksdb::library::{C, Cache, DbOptions, FlushOptions, ReadOptions, TableOptions, WriteOptions};
use crate::engine::{Compression, Options, Sync};
use std::ffi::c_int;

/// `rocksdb_no_compression` and `rocksdb_lz4_compression`.
const NO_COMPRESSION: c_int = 0;
const LZ4_COMPRESSION: c_int = 4;
/// `rocksdb_block_based_table_data_block_index_type_binary_search_and_hash`.
const BINARY_SEARCH_AND_HASH: c_int = 1;

/// What the `rocksdb` engines differ in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DataBlocks {
    pub(crate) index: DataIndex,
    /// Of a block, before compression.
    pub(crate) bytes: u32,
}

/// How data blocks lead to their entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DataIndex {
    /// Binary search in data blocks: the default.
    Binary,
    /// A hash index behind each data block as well, filled to this ratio of keys to buckets.
    Hash(f64),
}

/// Everything that is told to the library when a database is opened and when it is used.
///
/// Owned pointers, valid until dropped; read only after `new`, so many threads may use them at once.
pub(super) struct Settings {
    c: &'static C,
    pub(super) db: *mut DbOptions,
    pub(super) write: *mut WriteOptions,
    pub(super) read: *mut ReadOptions,
    pub(super) flush: *mut FlushOptions,
    table: *mut TableOptions,
    cache: *mut Cache,
}

// SAFETY: the library's options objects belong to no thread, and nothing here changes them once they are made.
unsafe impl Send for Settings {}
// SAFETY: as above; the calls that read them take pointers to const.
unsafe impl std::marker::Sync for Settings {}

impl Settings {
    pub(super) fn new(c: &'static C, options: &Options, blocks: DataBlocks) -> Settings {
        // SAFETY: constructors without conditions; none of them gives null.
        let settings = unsafe {
            Settings {
                c,
                db: (c.options_create)(),
                write: (c.writeoptions_create)(),
                read: (c.readoptions_create)(),
                flush: (c.flushoptions_create)(),
                table: (c.block_based_options_create)(),
                // An entry charge of 0 is the form that sizes itself: the library's own default.
                cache: (c.cache_create_hyper_clock)(usize::try_from(options.cache_bytes).unwrap_or(usize::MAX), 0),
            }
        };
        settings.tell_table(blocks);
        settings.tell_database(options);
        settings.tell_blobs(options);
        settings
    }

    fn tell_table(&self, blocks: DataBlocks) {
        let c = self.c;
        // SAFETY: the objects are alive and no other thread has them yet. The table takes the filter policy over, and
        // keeps a reference of its own to the cache.
        unsafe {
            (c.block_based_options_set_block_size)(self.table, blocks.bytes as usize);
            (c.block_based_options_set_block_cache)(self.table, self.cache);
            let bloom = (c.filterpolicy_create_bloom_full)(f64::from(BLOOM_BITS));
            (c.block_based_options_set_filter_policy)(self.table, bloom);
            (c.block_based_options_set_whole_key_filtering)(self.table, 1);
            if let DataIndex::Hash(ratio) = blocks.index {
                (c.block_based_options_set_data_block_index_type)(self.table, BINARY_SEARCH_AND_HASH);
                (c.block_based_options_set_data_block_hash_ratio)(self.table, ratio);
            }
        }
    }

    fn tell_database(&self, options: &Options) {
        let c = self.c;
        // SAFETY: the objects are alive and no other thread has them yet. The table's options are copied.
        unsafe {
            (c.options_set_create_if_missing)(self.db, 1);
            (c.options_set_create_missing_column_families)(self.db, 1);
            (c.options_set_write_buffer_size)(self.db, usize::try_from(options.memtable_bytes).unwrap_or(usize::MAX));
            (c.options_set_max_background_jobs)(self.db, c_int::try_from(options.workers.max(1)).unwrap_or(c_int::MAX));
            (c.options_set_compression)(self.db, codec(options.compression));
            if let Some(bytes) = options.table_bytes {
                (c.options_set_target_file_size_base)(self.db, bytes);
                (c.options_set_max_bytes_for_level_base)(self.db, bytes.saturating_mul(4));
            }
            (c.options_set_use_fsync)(self.db, c_int::from(options.sync == Sync::All));
            (c.writeoptions_set_sync)(self.write, u8::from(options.sync != Sync::None));
            (c.options_set_block_based_table_factory)(self.db, self.table);
        }
    }

    fn tell_blobs(&self, options: &Options) {
        let c = self.c;
        let Some(bytes) = options.separate_from else { return };
        // SAFETY: as above.
        unsafe {
            (c.options_set_enable_blob_files)(self.db, 1);
            (c.options_set_min_blob_size)(self.db, bytes);
            (c.options_set_enable_blob_gc)(self.db, 1);
            (c.options_set_blob_compression_type)(self.db, codec(options.compression));
        }
    }

    /// Index and filters live in the block cache, and tables are read past the cache of the system.
    pub(super) fn spare_memory(&self) {
        let c = self.c;
        // SAFETY: as in `tell_database`; the table's options are copied once more.
        unsafe {
            (c.block_based_options_set_cache_index_and_filter_blocks)(self.table, 1);
            (c.options_set_block_based_table_factory)(self.db, self.table);
            (c.options_set_use_direct_reads)(self.db, 1);
        }
    }

    /// Bytes in the block cache now.
    pub(super) fn cache_used_bytes(&self) -> usize {
        // SAFETY: the cache is alive as long as `self`, and keeps count for many threads.
        unsafe { (self.c.cache_get_usage)(self.cache) }
    }
}

fn codec(compression: Compression) -> c_int {
    match compression {
        Compression::None => NO_COMPRESSION,
        Compression::Lz4 => LZ4_COMPRESSION,
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        let c = self.c;
        // SAFETY: each was made in `new` and is destroyed once; an open database keeps copies and references of its
        // own, and `store` drops the database first.
        unsafe {
            (c.block_based_options_destroy)(self.table);
            (c.cache_destroy)(self.cache);
            (c.options_destroy)(self.db);
            (c.writeoptions_destroy)(self.write);
            (c.readoptions_destroy)(self.read);
            (c.flushoptions_destroy)(self.flush);
        }
    }
}
