//! RocksDB, through the C API of its release library, which is loaded at run time.
//!
//! Nothing of it is needed to build or to link. Without the library every other engine works, and the error names the
//! command that installs it. The version is pinned, because the declarations below are those of that version.

#![allow(unsafe_code)]

use crate::engine::{BLOOM_BITS, Compression, Engine, Options, PARTITION, Scan, Sync, Visit, object};
use crate::error::Result;
use anyhow::{Context, anyhow};
use libloading::Library;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The release whose library is loaded; the same as in `install-rocksdb`.
pub(crate) const VERSION: &str = "11.8.1";
const INSTALL: &str = "sh crates/azekura-bench/install-rocksdb";
/// Entries per bucket of `rocksdb-hash`: RocksDB's default.
const HASH_RATIO: f64 = 0.75;

/// An object of the library: a database, column family, option set, batch, iterator.
type Handle = *mut c_void;
/// Where a call stores its error: null, or a string that [`take_text`] frees.
type CallError = *mut *mut c_char;

/// Declares the functions, by their signature, as a struct of pointers, named as in C without `rocksdb_`.
macro_rules! functions {
    ($(fn($($argument:ty),*) $(-> $result:ty)?: $($name:ident)*;)*) => {
        // # Safety
        // Each is called as `c.h` says: with live objects of its own library, and the lengths of the bytes.
        functions! { @types $([unsafe extern "C" fn($($argument),*) $(-> $result)?] [$($name)*])* }
    };
    (@types $([$type:ty] [$($name:ident)*])*) => {
        /// The functions. Their library is never unloaded.
        struct Api {
            $($($name: $type,)*)*
        }

        fn resolve(library: &'static Library) -> std::result::Result<Api, libloading::Error> {
            // SAFETY: the type is that of the declaration in c.h of `VERSION`, which the library's name states.
            unsafe { Ok(Api { $($($name: *library.get(concat!("rocksdb_", stringify!($name)))?,)*)* }) }
        }
    };
}

functions! {
    fn(Handle, *const c_char, c_int, *const *const c_char, *const Handle, *mut Handle, CallError) -> Handle:
        open_column_families;
    fn(Handle, *const c_char, *mut usize, CallError) -> *mut *mut c_char: list_column_families;
    fn(*mut *mut c_char, usize): list_column_families_destroy;
    fn(Handle, Handle, *const c_char, CallError) -> Handle: create_column_family;
    fn(Handle): column_family_handle_destroy close pinnableslice_destroy writebatch_destroy iter_seek_to_first
        iter_seek_to_last iter_next iter_prev iter_destroy options_destroy block_based_options_destroy cache_destroy
        writeoptions_destroy readoptions_destroy flushoptions_destroy;
    fn(Handle, *const c_char, Handle, CallError): get_options_from_string;
    fn(Handle, Handle, Handle, *const u8, usize, *const u8, usize, CallError): put_cf;
    fn(Handle, Handle, Handle, *const u8, usize, CallError): delete_cf;
    fn(Handle, Handle, Handle, CallError): write flush_cf;
    fn(Handle, Handle, Handle, *const u8, usize, CallError) -> Handle: get_pinned_cf;
    fn(Handle, c_uchar, CallError): flush_wal;
    fn(Handle, Handle, *const c_char, *mut u64) -> c_int: property_int_cf;
    fn(*mut c_char): free;
    fn(Handle, *mut usize) -> *const u8: pinnableslice_value iter_key iter_value;
    fn() -> Handle: writebatch_create options_create block_based_options_create writeoptions_create readoptions_create
        flushoptions_create;
    fn(Handle, Handle, *const u8, usize, *const u8, usize): writebatch_put_cf;
    fn(Handle, Handle, Handle) -> Handle: create_iterator_cf;
    fn(Handle, *const u8, usize): iter_seek iter_seek_for_prev;
    fn(Handle) -> c_uchar: iter_valid;
    fn(Handle, CallError): iter_get_error;
    fn(Handle, c_uchar): writeoptions_set_sync;
    fn(Handle, Handle): options_set_block_based_table_factory block_based_options_set_block_cache;
    fn(usize, usize) -> Handle: cache_create_hyper_clock;
    fn(Handle) -> usize: cache_get_usage;
}

/// The functions, loaded once per process; an error that names the install command if there is no library.
fn api() -> Result<&'static Api> {
    static LOADED: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let peers = || std::env::var_os("AZEKURA_BENCH_PEERS").map(PathBuf::from);
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peers");
    let path = || peers().unwrap_or_else(default).join("rocksdb").join(format!("librocksdb-{VERSION}.so"));
    LOADED.get_or_init(|| load(&path())).as_ref().map_err(|error| anyhow!("{error}"))
}

fn load(path: &Path) -> std::result::Result<Api, String> {
    let unusable = |reason: &dyn std::fmt::Display| {
        let path = path.display();
        format!(
            "RocksDB {VERSION} is not usable here ({path}: {reason}); run `{INSTALL}` in the workspace to install it"
        )
    };
    // SAFETY: its constructors only register objects of RocksDB. The file is the release whose digest
    // `install-rocksdb` checked, or the one that the user put in its place.
    let library = unsafe { Library::new(path) }.map_err(|error| unusable(&error))?;
    resolve(Box::leak(Box::new(library))).map_err(|error| unusable(&error))
}

/// Returns an error if the library cannot be used here.
pub(crate) fn available() -> Result<()> {
    api().map(|_| ())
}

/// Calls a function that reports through [`CallError`].
fn call<T>(api: &Api, act: impl FnOnce(CallError) -> T) -> Result<T> {
    let mut error = ptr::null_mut();
    let result = act(&mut error);
    if error.is_null() { Ok(result) } else { Err(anyhow!(take_text(api, error))) }
}

/// Copies a string that the library gave away, and frees it.
fn take_text(api: &Api, text: *mut c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the library returns strings that end with zero and passes their ownership to the caller.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        (api.free)(text);
        copy
    }
}

/// Bytes owned by the library.
///
/// # Safety
/// `len` bytes at `bytes` must not change during `'a`; for 0 bytes the address may be null.
unsafe fn bytes<'a>(bytes: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: as the caller guarantees.
    if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(bytes, len) } }
}

/// An open database with its option objects. All its calls may be made by many threads at once.
struct Store {
    api: &'static Api,
    db: Handle,
    options: Handle,
    write: Handle,
    read: Handle,
    flush: Handle,
    cache: Handle,
    /// Every open column family by name, until the store is dropped.
    families: Mutex<BTreeMap<String, Family>>,
}

/// A column family of one store.
#[derive(Clone, Copy)]
struct Family(Handle);

// SAFETY: a database, its column families and options that nothing changes may be used by many threads at once.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl std::marker::Sync for Store {}
// SAFETY: an address that only the calls of `Store` follow.
unsafe impl Send for Family {}
// SAFETY: as above.
unsafe impl std::marker::Sync for Family {}

struct RocksdbEngine {
    family: Family,
    store: Arc<Store>,
}

/// Opens or creates a RocksDB database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, options, false, false)
}

/// The same with a hash index in each data block.
pub(crate) fn open_hashed(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, options, true, false)
}

/// The same with index and filters in the block cache and direct reads.
pub(crate) fn open_direct(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, options, false, true)
}

/// Opens a database with data blocks that are `hashed` or not, with direct reads or not.
fn open_with(dir: &Path, options: &Options, hashed: bool, direct: bool) -> Result<Box<dyn Engine>> {
    let api = api()?;
    let text = CString::new(options_text(options, hashed, direct))?;
    // SAFETY: constructors without conditions; none returns null. A charge of 0 sizes the cache's table by itself. The
    // base options keep references of their own to the table options, and these to the cache.
    let mut store = unsafe {
        let cache = (api.cache_create_hyper_clock)(usize::try_from(options.cache_bytes)?, 0);
        let (base, table) = ((api.options_create)(), (api.block_based_options_create)());
        (api.block_based_options_set_block_cache)(table, cache);
        (api.options_set_block_based_table_factory)(base, table);
        let store = Store {
            api,
            db: ptr::null_mut(),
            options: (api.options_create)(),
            write: (api.writeoptions_create)(),
            read: (api.readoptions_create)(),
            flush: (api.flushoptions_create)(),
            cache,
            families: Mutex::default(),
        };
        (api.writeoptions_set_sync)(store.write, u8::from(options.sync != Sync::None));
        let parsed = call(api, |error| (api.get_options_from_string)(base, text.as_ptr(), store.options, error));
        (api.block_based_options_destroy)(table);
        (api.options_destroy)(base);
        parsed.map(|()| store)?
    };
    store.open(dir)?;
    Ok(Box::new(RocksdbEngine { family: store.family(PARTITION)?, store: Arc::new(store) }))
}

/// The options in RocksDB's own text format.
fn options_text(options: &Options, hashed: bool, direct: bool) -> String {
    let codec = if options.compression == Compression::Lz4 { "kLZ4Compression" } else { "kNoCompression" };
    let index = if hashed { "kDataBlockBinaryAndHash" } else { "kDataBlockBinarySearch" };
    let mut text = format!(
        "create_if_missing=true;create_missing_column_families=true;write_buffer_size={};max_background_jobs={};\
         compression={codec};use_fsync={};use_direct_reads={direct};\
         block_based_table_factory={{block_size={};filter_policy=bloomfilter:{BLOOM_BITS}:false;\
         whole_key_filtering=true;data_block_index_type={index};\
         data_block_hash_table_util_ratio={HASH_RATIO};cache_index_and_filter_blocks={direct}}};",
        options.memtable_bytes,
        options.workers.max(1),
        options.sync == Sync::All,
        options.block_bytes,
    );
    if let Some(bytes) = options.table_bytes {
        let level_bytes = bytes.saturating_mul(4);
        text += &format!("target_file_size_base={bytes};max_bytes_for_level_base={level_bytes};");
    }
    if let Some(bytes) = options.separate_from {
        text += &format!(
            "enable_blob_files=true;min_blob_size={bytes};enable_blob_garbage_collection=true;\
             blob_compression_type={codec};"
        );
    }
    text
}

impl Store {
    /// Opens or creates the database at `dir` with every column family it has and [`PARTITION`].
    fn open(&mut self, dir: &Path) -> Result<()> {
        let (api, path) = (self.api, CString::new(dir.as_os_str().as_bytes())?);
        let mut names = vec![c"default".to_owned(), CString::new(PARTITION)?];
        if dir.join("CURRENT").exists() {
            let mut count = 0;
            // SAFETY: path and options are alive during the call, which returns an array of `count` strings; they are
            // copied, and destroyed once.
            unsafe {
                let list =
                    call(api, |error| (api.list_column_families)(self.options, path.as_ptr(), &mut count, error))?;
                names.extend((0..count).map(|i| CStr::from_ptr(*list.add(i)).to_owned()));
                (api.list_column_families_destroy)(list, count);
            }
            names.sort();
            names.dedup();
        }
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let (options, mut handles) = (vec![self.options; names.len()], vec![ptr::null_mut(); names.len()]);
        let (count, handles_at) = (c_int::try_from(names.len())?, handles.as_mut_ptr());
        // SAFETY: names, options and handles are arrays of `count`, alive during the call, which fills the handles.
        self.db = call(api, |error| unsafe {
            let (names, options) = (pointers.as_ptr(), options.as_ptr());
            (api.open_column_families)(self.options, path.as_ptr(), count, names, options, handles_at, error)
        })?;
        let families = names.iter().zip(handles).map(|(name, handle)| (name.to_string_lossy().into(), Family(handle)));
        self.families = Mutex::new(families.collect());
        Ok(())
    }

    /// The column family of that name, created if it is missing.
    fn family(&self, name: &str) -> Result<Family> {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = families.get(name) {
            return Ok(*family);
        }
        let (api, c_name) = (self.api, CString::new(name)?);
        // SAFETY: database, options and name are alive during the call.
        let made =
            call(api, |error| unsafe { (api.create_column_family)(self.db, self.options, c_name.as_ptr(), error) })?;
        families.insert(name.to_owned(), Family(made));
        Ok(Family(made))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let api = self.api;
        let families = self.families.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the store has no other owner; families are destroyed before their database, options after it, each
        // once.
        unsafe {
            families.values().for_each(|family| (api.column_family_handle_destroy)(family.0));
            if !self.db.is_null() {
                (api.close)(self.db);
            }
            (api.cache_destroy)(self.cache);
            (api.options_destroy)(self.options);
            (api.writeoptions_destroy)(self.write);
            (api.readoptions_destroy)(self.read);
            (api.flushoptions_destroy)(self.flush);
        }
    }
}

/// An iterator that is destroyed with its owner, also when a visitor panics.
struct Cursor(&'static Api, Handle);

impl Drop for Cursor {
    fn drop(&mut self) {
        // SAFETY: made by `create_iterator_cf`, destroyed once, before its database is closed.
        unsafe { (self.0.iter_destroy)(self.1) };
    }
}

impl RocksdbEngine {
    /// A property that is a number; `None` if there is none of that name.
    fn number(&self, property: &CStr) -> Option<u64> {
        let (mut number, store) = (0, &self.store);
        // SAFETY: all is alive during the call.
        let failed = unsafe { (store.api.property_int_cf)(store.db, self.family.0, property.as_ptr(), &mut number) };
        (failed == 0).then_some(number)
    }
}

impl Engine for RocksdbEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let Store { api, db, write, .. } = *self.store;
        let (family, len) = (self.family.0, value.len());
        // SAFETY: all is alive during the call, which copies the bytes.
        call(api, |error| unsafe {
            (api.put_cf)(db, write, family, key.as_ptr(), key.len(), value.as_ptr(), len, error)
        })
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        let Store { api, db, write, .. } = *self.store;
        // SAFETY: as for a put.
        call(api, |error| unsafe { (api.delete_cf)(db, write, self.family.0, key.as_ptr(), key.len(), error) })
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let Store { api, db, write, .. } = *self.store;
        // SAFETY: the batch belongs to this call and copies the bytes; it is destroyed once, after the write.
        unsafe {
            let batch = (api.writebatch_create)();
            for (key, value) in records {
                let family = self.family.0;
                (api.writebatch_put_cf)(batch, family, key.as_ptr(), key.len(), value.as_ptr(), value.len());
            }
            let written = call(api, |error| (api.write)(db, write, batch, error));
            (api.writebatch_destroy)(batch);
            written
        }
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let Store { api, db, read, .. } = *self.store;
        let (family, mut len) = (self.family.0, 0);
        // SAFETY: all is alive during the call; null means that there is no such key. The pinned bytes stay until the
        // value is destroyed, and `seen` cannot keep them.
        unsafe {
            let value = call(api, |error| (api.get_pinned_cf)(db, read, family, key.as_ptr(), key.len(), error))?;
            if value.is_null() {
                return Ok(false);
            }
            seen(bytes((api.pinnableslice_value)(value, &mut len), len));
            (api.pinnableslice_destroy)(value);
        }
        Ok(true)
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: Visit<'_>) -> Result<u64> {
        let Store { api, db, read, .. } = *self.store;
        // SAFETY: the database, options and family outlive the cursor. A key or value is used while the cursor is valid
        // and before it moves.
        unsafe {
            let cursor = Cursor(api, (api.create_iterator_cf)(db, read, self.family.0));
            match scan {
                Scan::First => (api.iter_seek_to_first)(cursor.1),
                Scan::From(key) => (api.iter_seek)(cursor.1, key.as_ptr(), key.len()),
                Scan::Last => (api.iter_seek_to_last)(cursor.1),
                Scan::Back(key) => (api.iter_seek_for_prev)(cursor.1, key.as_ptr(), key.len()),
            }
            let step = if scan.ascends() { api.iter_next } else { api.iter_prev };
            let (mut count, mut key_len, mut value_len) = (0, 0, 0);
            while count < limit && (api.iter_valid)(cursor.1) != 0 {
                let key = (api.iter_key)(cursor.1, &mut key_len);
                let value = (api.iter_value)(cursor.1, &mut value_len);
                seen(bytes(key, key_len), bytes(value, value_len));
                count += 1;
                if count < limit {
                    step(cursor.1);
                }
            }
            call(api, |error| (api.iter_get_error)(cursor.1, error))?;
            Ok(count)
        }
    }

    fn flush(&self) -> Result<()> {
        let Store { api, db, flush, .. } = *self.store;
        // SAFETY: all is alive during the call.
        call(api, |error| unsafe { (api.flush_cf)(db, flush, self.family.0, error) })
    }

    fn sync(&self) -> Result<()> {
        let Store { api, db, .. } = *self.store;
        // SAFETY: the database is open.
        call(api, |error| unsafe { (api.flush_wal)(db, 1, error) })
    }

    fn busy(&self) -> Result<bool> {
        let running = [c"rocksdb.num-running-compactions", c"rocksdb.num-running-flushes"];
        let pending = [c"rocksdb.compaction-pending", c"rocksdb.mem-table-flush-pending"];
        Ok([running, pending].concat().into_iter().any(|property| self.number(property).unwrap_or(0) > 0))
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        Ok(Box::new(RocksdbEngine { family: self.store.family(name)?, store: Arc::clone(&self.store) }))
    }

    fn stats(&self) -> Map<String, Value> {
        // SAFETY: the cache is alive as long as the store and may be asked by many threads.
        let cache_used_bytes = unsafe { (self.store.api.cache_get_usage)(self.store.cache) };
        let table_bytes = self.number(c"rocksdb.total-sst-files-size");
        object(json!({"version": VERSION, "cache_used_bytes": cache_used_bytes, "table_bytes": table_bytes}))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Arc::into_inner(self.store).map(drop).context("a partition is still in use")
    }
}

#[cfg(test)]
mod tests {
    use super::{VERSION, load};
    use std::path::Path;

    #[test]
    fn missing_library_is_an_error_with_the_command() {
        let error = load(Path::new("no/such/library.so")).err().expect("there is none");
        assert!(error.contains("install-rocksdb") && error.contains("no/such/library.so"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("librocksdb.so");
        std::fs::write(&path, "not a library").unwrap();
        let error = load(&path).err().expect("it is not a library");
        assert!(error.contains("install-rocksdb"), "{error}");
    }

    #[test]
    fn script_installs_the_version_that_is_loaded() {
        let script = include_str!("../../install-rocksdb");
        assert!(script.lines().any(|line| line == format!("version={VERSION}")), "the versions differ");
    }
}
