//! The shared library and the functions of its C API that the bench calls, as declared in `rocksdb/c.h` of [`VERSION`].

#![allow(unsafe_code)]

use crate::failure::Result;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uchar};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The release whose library is loaded; the same as in `install-rocksdb`.
pub(crate) const VERSION: &str = "11.8.1";

/// The command that puts the library where it is looked for.
const INSTALL: &str = "sh crates/azekura-bench/install-rocksdb";

/// Types that the library alone knows the insides of.
macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub(super) struct $name {
            _inside: [u8; 0],
        }
    )*};
}

opaque!(
    Db,
    Family,
    DbOptions,
    TableOptions,
    WriteOptions,
    ReadOptions,
    FlushOptions,
    Cache,
    FilterPolicy,
    WriteBatch,
    PinnedValue,
    Cursor
);

/// Where a call leaves its error: null, or a string that [`C::check`] frees.
pub(super) type Error = *mut c_char;

/// Declares the functions as a struct of pointers, named as in C but without `rocksdb_`.
macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions. The library behind them is never unloaded.
        pub(super) struct C {
            // # Safety
            // Each is called as `c.h` says: with living objects of its own library, and lengths that are the bytes'.
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl C {
            fn resolve(library: &'static Library) -> std::result::Result<C, libloading::Error> {
                Ok(C {
                    // SAFETY: the type is that of the declaration in c.h of `VERSION`, which the library's name states.
                    $($name: *unsafe { library.get(concat!("rocksdb_", stringify!($name)))? },)*
                })
            }
        }
    };
}

functions! {
    // The database and its column families.
    open_column_families(*const DbOptions, *const c_char, c_int, *const *const c_char, *const *const DbOptions,
        *mut *mut Family, *mut Error) -> *mut Db;
    list_column_families(*const DbOptions, *const c_char, *mut usize, *mut Error) -> *mut *mut c_char;
    list_column_families_destroy(*mut *mut c_char, usize);
    create_column_family(*mut Db, *const DbOptions, *const c_char, *mut Error) -> *mut Family;
    column_family_handle_destroy(*mut Family);
    close(*mut Db);
    put_cf(*mut Db, *const WriteOptions, *mut Family, *const u8, usize, *const u8, usize, *mut Error);
    delete_cf(*mut Db, *const WriteOptions, *mut Family, *const u8, usize, *mut Error);
    write(*mut Db, *const WriteOptions, *mut WriteBatch, *mut Error);
    get_pinned_cf(*mut Db, *const ReadOptions, *mut Family, *const u8, usize, *mut Error) -> *mut PinnedValue;
    flush_cf(*mut Db, *const FlushOptions, *mut Family, *mut Error);
    flush_wal(*mut Db, c_uchar, *mut Error);
    property_int_cf(*mut Db, *mut Family, *const c_char, *mut u64) -> c_int;
    property_value_cf(*mut Db, *mut Family, *const c_char) -> *mut c_char;
    free(*mut c_char);
    // Values, batches, cursors.
    pinnableslice_value(*const PinnedValue, *mut usize) -> *const u8;
    pinnableslice_destroy(*mut PinnedValue);
    writebatch_create() -> *mut WriteBatch;
    writebatch_put_cf(*mut WriteBatch, *mut Family, *const u8, usize, *const u8, usize);
    writebatch_destroy(*mut WriteBatch);
    create_iterator_cf(*mut Db, *const ReadOptions, *mut Family) -> *mut Cursor;
    iter_seek_to_first(*mut Cursor);
    iter_seek_to_last(*mut Cursor);
    iter_seek(*mut Cursor, *const u8, usize);
    iter_seek_for_prev(*mut Cursor, *const u8, usize);
    iter_valid(*const Cursor) -> c_uchar;
    iter_next(*mut Cursor);
    iter_prev(*mut Cursor);
    iter_key(*const Cursor, *mut usize) -> *const u8;
    iter_value(*const Cursor, *mut usize) -> *const u8;
    iter_get_error(*const Cursor, *mut Error);
    iter_destroy(*mut Cursor);
    // Options.
    options_create() -> *mut DbOptions;
    options_destroy(*mut DbOptions);
    options_set_create_if_missing(*mut DbOptions, c_uchar);
    options_set_create_missing_column_families(*mut DbOptions, c_uchar);
    options_set_write_buffer_size(*mut DbOptions, usize);
    options_set_max_background_jobs(*mut DbOptions, c_int);
    options_set_use_fsync(*mut DbOptions, c_int);
    options_set_use_direct_reads(*mut DbOptions, c_uchar);
    options_set_compression(*mut DbOptions, c_int);
    options_set_target_file_size_base(*mut DbOptions, u64);
    options_set_max_bytes_for_level_base(*mut DbOptions, u64);
    options_set_block_based_table_factory(*mut DbOptions, *mut TableOptions);
    options_set_enable_blob_files(*mut DbOptions, c_uchar);
    options_set_min_blob_size(*mut DbOptions, u64);
    options_set_enable_blob_gc(*mut DbOptions, c_uchar);
    options_set_blob_compression_type(*mut DbOptions, c_int);
    block_based_options_create() -> *mut TableOptions;
    block_based_options_destroy(*mut TableOptions);
    block_based_options_set_block_size(*mut TableOptions, usize);
    block_based_options_set_block_cache(*mut TableOptions, *mut Cache);
    block_based_options_set_filter_policy(*mut TableOptions, *mut FilterPolicy);
    block_based_options_set_whole_key_filtering(*mut TableOptions, c_uchar);
    block_based_options_set_cache_index_and_filter_blocks(*mut TableOptions, c_uchar);
    block_based_options_set_data_block_index_type(*mut TableOptions, c_int);
    block_based_options_set_data_block_hash_ratio(*mut TableOptions, f64);
    filterpolicy_create_bloom_full(f64) -> *mut FilterPolicy;
    cache_create_hyper_clock(usize, usize) -> *mut Cache;
    cache_destroy(*mut Cache);
    cache_get_usage(*const Cache) -> usize;
    writeoptions_create() -> *mut WriteOptions;
    writeoptions_set_sync(*mut WriteOptions, c_uchar);
    writeoptions_destroy(*mut WriteOptions);
    readoptions_create() -> *mut ReadOptions;
    readoptions_destroy(*mut ReadOptions);
    flushoptions_create() -> *mut FlushOptions;
    flushoptions_destroy(*mut FlushOptions);
}

impl C {
    /// Makes a call that reports through `Error`, and turns what it left there into a `Result`.
    pub(super) fn call<T>(&self, call: impl FnOnce(*mut Error) -> T) -> Result<T> {
        let mut error: Error = std::ptr::null_mut();
        let result = call(&mut error);
        if error.is_null() {
            return Ok(result);
        }
        Err(self.take_text(error).into())
    }

    /// Copies a string that the library gave away, and frees it.
    pub(super) fn take_text(&self, text: *mut c_char) -> String {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the library gives strings that end with zero, and gives them away; nobody else frees them.
        unsafe {
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            (self.free)(text);
            copy
        }
    }
}

/// The functions, loaded once per process.
///
/// # Errors
/// There is no library for the bench, or not the pinned one; says what to do.
pub(super) fn c() -> Result<&'static C> {
    static LOADED: OnceLock<std::result::Result<C, String>> = OnceLock::new();
    Ok(LOADED.get_or_init(|| load(&place())).as_ref().map_err(String::as_str)?)
}

/// Says whether the library can be used here.
///
/// # Errors
/// As [`c`].
pub(crate) fn available() -> Result<()> {
    c().map(|_| ())
}

/// `rocksdb/` in the directory for peers: the one that `AZEKURA_BENCH_PEERS` names, or `target/peers`.
fn place() -> PathBuf {
    let peers = std::env::var_os("AZEKURA_BENCH_PEERS").map(PathBuf::from);
    let peers = peers.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peers"));
    peers.join("rocksdb").join(format!("librocksdb-{VERSION}.so"))
}

fn load(path: &Path) -> std::result::Result<C, String> {
    let why = |what: &dyn std::fmt::Display| {
        format!("RocksDB {VERSION} is not usable here ({what}); run `{INSTALL}` in the workspace to install it")
    };
    if !path.is_file() {
        return Err(why(&format!("no {}", path.display())));
    }
    // SAFETY: what its constructors do is RocksDB's own affair: it registers objects. It is the release that
    // `install-rocksdb` checked by its digest, or what the caller put there in its stead.
    let library = unsafe { Library::new(path) }.map_err(|error| why(&error))?;
    C::resolve(Box::leak(Box::new(library))).map_err(|error| why(&error))
}

#[cfg(test)]
mod tests {
    use super::{VERSION, load};
    use std::path::Path;

    #[test]
    fn missing_or_false_library_is_an_error_with_the_command() {
        let error = load(Path::new("no/such/library.so")).err().expect("there is none");
        assert!(error.contains("install-rocksdb") && error.contains("no/such/library.so"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("librocksdb.so");
        std::fs::write(&path, "no library at all").unwrap();
        let error = load(&path).err().expect("it is none");
        assert!(error.contains("install-rocksdb"), "{error}");
    }

    #[test]
    fn script_installs_the_version_that_is_loaded() {
        let script = include_str!("../../../install-rocksdb");
        assert!(script.lines().any(|line| line == format!("version={VERSION}")), "the versions differ");
    }
}
