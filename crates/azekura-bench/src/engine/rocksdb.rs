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
use std::collections::{BTreeMap, BTreeSet};
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
/// Where a call stores its error: null, or a string that [`call`] frees.
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
        pub(crate) struct Api {
            $($($name: $type,)*)*
        }

        fn resolve(library: &'static Library) -> std::result::Result<Api, libloading::Error> {
            // SAFETY: the type is that of the declaration in c.h of `VERSION`, which the library's name states.
            unsafe { Ok(Api { $($($name: *library.get(concat!("rocksdb_", stringify!($name)))?,)*)* }) }
        }
    };
}

functions! {
    fn() -> Handle: writebatch_create options_create block_based_options_create writeoptions_create readoptions_create
        flushoptions_create;
    fn(Handle): column_family_handle_destroy close pinnableslice_destroy writebatch_destroy iter_seek_to_first
        iter_seek_to_last iter_next iter_prev iter_destroy options_destroy block_based_options_destroy cache_destroy
        writeoptions_destroy readoptions_destroy flushoptions_destroy;
    fn(Handle, *const c_char, c_int, *const *const c_char, *const Handle, *mut Handle, CallError) -> Handle:
        open_column_families;
    fn(Handle, *const c_char, *mut usize, CallError) -> *mut *mut c_char: list_column_families;
    fn(*mut *mut c_char, usize): list_column_families_destroy;
    fn(Handle, Handle, *const c_char, CallError) -> Handle: create_column_family;
    fn(Handle, *const c_char, Handle, CallError): get_options_from_string;
    fn(Handle, Handle, Handle, *const u8, usize, *const u8, usize, CallError): put_cf;
    fn(Handle, Handle, Handle, *const u8, usize, CallError): delete_cf;
    fn(Handle, Handle, Handle, CallError): write flush_cf;
    fn(Handle, Handle, Handle, *const u8, usize, CallError) -> Handle: get_pinned_cf;
    fn(Handle, c_uchar, CallError): flush_wal;
    fn(Handle, Handle, *const c_char, *mut u64) -> c_int: property_int_cf;
    fn(*mut c_char): free;
    fn(Handle, *mut usize) -> *const u8: pinnableslice_value iter_key iter_value;
    fn(Handle, Handle, *const u8, usize, *const u8, usize): writebatch_put_cf;
    fn(Handle, Handle, Handle) -> Handle: create_iterator_cf;
    fn(Handle, *const u8, usize): iter_seek iter_seek_for_prev;
    fn(Handle) -> c_uchar: iter_valid;
    fn(Handle, CallError): iter_get_error;
    fn(Handle, c_uchar): writeoptions_set_sync;
    fn(Handle, Handle): options_set_block_based_table_factory block_based_options_set_block_cache;
    fn(usize, usize) -> Handle: cache_create_hyper_clock;
}

/// The functions, loaded once per process; an error that names the install command if there is no library.
pub(crate) fn api() -> Result<&'static Api> {
    static LOADED: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
    let peers = || std::env::var_os("AZEKURA_BENCH_PEERS").map(PathBuf::from);
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peers");
    let path = || peers().unwrap_or_else(default).join("rocksdb").join(format!("librocksdb-{VERSION}.so"));
    LOADED.get_or_init(|| load(&path())).as_ref().map_err(|error| anyhow!("{error}"))
}

fn load(path: &Path) -> std::result::Result<Api, String> {
    // SAFETY: its constructors only register objects of RocksDB. The file is the release whose digest
    // `install-rocksdb` checked, or the one that the user put in its place.
    let library = unsafe { Library::new(path) };
    library.and_then(|library| resolve(Box::leak(Box::new(library)))).map_err(|reason| {
        let path = path.display();
        format!(
            "RocksDB {VERSION} is not usable here ({path}: {reason}); run `{INSTALL}` in the workspace to install it"
        )
    })
}

/// Calls a function that reports through [`CallError`].
fn call<T>(api: &Api, act: impl FnOnce(CallError) -> T) -> Result<T> {
    let mut error: *mut c_char = ptr::null_mut();
    let result = act(&mut error);
    if error.is_null() {
        return Ok(result);
    }
    // SAFETY: an error is a string that ends with zero; its ownership passes to the caller.
    unsafe {
        let message = CStr::from_ptr(error).to_string_lossy().into_owned();
        (api.free)(error);
        Err(anyhow!(message))
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

/// An object of the library, and the function that destroys it.
///
/// # Safety
/// The function is the one that `c.h` gives for objects of that type.
struct Object(Handle, unsafe extern "C" fn(Handle));

// SAFETY: a database, its column families and options that nothing changes may be used by many threads at once. Any
// other object stays on the thread that made it.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl std::marker::Sync for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the object has no other owner, and what it refers to is dropped after it.
        unsafe { (self.1)(self.0) };
    }
}

/// An open database with its option objects. Fields are dropped in this order: column families before their database.
struct Store {
    api: &'static Api,
    /// Every open column family by name.
    families: Mutex<BTreeMap<CString, Arc<Object>>>,
    db: Object,
    options: Object,
    write: Object,
    read: Object,
}

/// One column family. It is dropped before the store.
struct RocksdbEngine {
    family: Arc<Object>,
    store: Arc<Store>,
}

/// Opens or creates a RocksDB database at `dir` with every column family it has and [`PARTITION`]. `hashed`: a hash
/// index in each data block; `direct`: index and filters in the block cache and direct reads.
pub(crate) fn open(dir: &Path, options: &Options, hashed: bool, direct: bool) -> Result<Box<dyn Engine>> {
    let api = api()?;
    let path = CString::new(dir.as_os_str().as_bytes())?;
    let text = CString::new(options_text(options, hashed, direct))?;
    let mut names = BTreeSet::from([c"default".to_owned(), CString::new(PARTITION)?]);
    let cache_bytes = usize::try_from(options.cache_bytes)?;
    // SAFETY: constructors without conditions; none returns null. A charge of 0 sizes the cache's table by itself. The
    // base options keep references of their own to the table options, and these to the cache. Paths, names and options
    // are alive during the calls that use them. A list of names is copied and destroyed once. To open, names, options
    // and handles are arrays of the same length, and the call fills the handles.
    unsafe {
        let cache = Object((api.cache_create_hyper_clock)(cache_bytes, 0), api.cache_destroy);
        let table = Object((api.block_based_options_create)(), api.block_based_options_destroy);
        let base = Object((api.options_create)(), api.options_destroy);
        let own = Object((api.options_create)(), api.options_destroy);
        let write = Object((api.writeoptions_create)(), api.writeoptions_destroy);
        let read = Object((api.readoptions_create)(), api.readoptions_destroy);
        (api.block_based_options_set_block_cache)(table.0, cache.0);
        (api.options_set_block_based_table_factory)(base.0, table.0);
        (api.writeoptions_set_sync)(write.0, u8::from(options.sync != Sync::None));
        call(api, |error| (api.get_options_from_string)(base.0, text.as_ptr(), own.0, error))?;
        let mut count = 0;
        // An error means that there is no database yet; any other one is returned by the call that opens it.
        if let Ok(list) = call(api, |error| (api.list_column_families)(own.0, path.as_ptr(), &mut count, error)) {
            names.extend((0..count).map(|i| CStr::from_ptr(*list.add(i)).to_owned()));
            (api.list_column_families_destroy)(list, count);
        }
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let (each, mut handles) = (vec![own.0; names.len()], vec![ptr::null_mut(); names.len()]);
        let (count, handles_at) = (c_int::try_from(names.len())?, handles.as_mut_ptr());
        let db = call(api, |error| {
            (api.open_column_families)(own.0, path.as_ptr(), count, pointers.as_ptr(), each.as_ptr(), handles_at, error)
        })?;
        let db = Object(db, api.close);
        let family = |handle| Arc::new(Object(handle, api.column_family_handle_destroy));
        let families = Mutex::new(names.into_iter().zip(handles.into_iter().map(family)).collect());
        RocksdbEngine::of(Arc::new(Store { api, families, db, options: own, write, read }), PARTITION)
    }
}

/// The options in RocksDB's own text format.
fn options_text(options: &Options, hashed: bool, direct: bool) -> String {
    let Options { memtable_bytes, block_bytes, .. } = options;
    let (fsync, jobs) = (options.sync == Sync::All, options.workers.max(1));
    let codec = if options.compression == Compression::Lz4 { "kLZ4Compression" } else { "kNoCompression" };
    let index = if hashed { "kDataBlockBinaryAndHash" } else { "kDataBlockBinarySearch" };
    let sized = |bytes: u64| format!("target_file_size_base={bytes};max_bytes_for_level_base={};", bytes * 4);
    let blobs = |bytes| format!("enable_blob_files=true;min_blob_size={bytes};enable_blob_garbage_collection=true;");
    let sizes =
        options.table_bytes.map(sized).unwrap_or_default() + &options.separate_from.map(blobs).unwrap_or_default();
    format!(
        "create_if_missing=true;create_missing_column_families=true;write_buffer_size={memtable_bytes};\
         max_background_jobs={jobs};compression={codec};blob_compression_type={codec};use_fsync={fsync};\
         use_direct_reads={direct};{sizes}block_based_table_factory={{block_size={block_bytes};\
         filter_policy=bloomfilter:{BLOOM_BITS}:false;whole_key_filtering=true;data_block_index_type={index};\
         data_block_hash_table_util_ratio={HASH_RATIO};cache_index_and_filter_blocks={direct}}};"
    )
}

impl RocksdbEngine {
    /// The column family of that name, created if it is missing.
    fn of(store: Arc<Store>, name: &str) -> Result<Box<dyn Engine>> {
        let (api, name) = (store.api, CString::new(name)?);
        let mut families = store.families.lock().unwrap_or_else(PoisonError::into_inner);
        if !families.contains_key(&name) {
            // SAFETY: database, options and name are alive during the call.
            let made = call(api, |error| unsafe {
                (api.create_column_family)(store.db.0, store.options.0, name.as_ptr(), error)
            })?;
            families.insert(name.clone(), Arc::new(Object(made, api.column_family_handle_destroy)));
        }
        let family = Arc::clone(&families[&name]);
        drop(families);
        Ok(Box::new(RocksdbEngine { family, store }))
    }

    /// A property that is a number; `None` if there is none of that name.
    fn number(&self, property: &CStr) -> Option<u64> {
        let (mut number, Store { api, db, .. }) = (0, &*self.store);
        // SAFETY: all is alive during the call.
        let failed = unsafe { (api.property_int_cf)(db.0, self.family.0, property.as_ptr(), &mut number) };
        (failed == 0).then_some(number)
    }
}

impl Engine for RocksdbEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let Store { api, db, write, .. } = &*self.store;
        let (family, at, len) = (self.family.0, value.as_ptr(), value.len());
        // SAFETY: all is alive during the call, which copies the bytes.
        call(api, |error| unsafe { (api.put_cf)(db.0, write.0, family, key.as_ptr(), key.len(), at, len, error) })
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        let Store { api, db, write, .. } = &*self.store;
        // SAFETY: as for a put.
        call(api, |error| unsafe { (api.delete_cf)(db.0, write.0, self.family.0, key.as_ptr(), key.len(), error) })
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let Store { api, db, write, .. } = &*self.store;
        // SAFETY: the batch belongs to this call and copies the bytes.
        unsafe {
            let batch = Object((api.writebatch_create)(), api.writebatch_destroy);
            for (key, value) in records {
                let family = self.family.0;
                (api.writebatch_put_cf)(batch.0, family, key.as_ptr(), key.len(), value.as_ptr(), value.len());
            }
            call(api, |error| (api.write)(db.0, write.0, batch.0, error))
        }
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let (Store { api, db, read, .. }, family) = (&*self.store, self.family.0);
        // SAFETY: all is alive during the call; null means that there is no such key. The pinned bytes stay until the
        // value is destroyed, and `seen` cannot keep them.
        unsafe {
            let value = call(api, |error| (api.get_pinned_cf)(db.0, read.0, family, key.as_ptr(), key.len(), error))?;
            if value.is_null() {
                return Ok(false);
            }
            let (value, mut len) = (Object(value, api.pinnableslice_destroy), 0);
            seen(bytes((api.pinnableslice_value)(value.0, &mut len), len));
        }
        Ok(true)
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let Store { api, db, read, .. } = &*self.store;
        // SAFETY: the database, options and family outlive the cursor. A key or value is used while the cursor is valid
        // and before it moves.
        unsafe {
            let cursor = Object((api.create_iterator_cf)(db.0, read.0, self.family.0), api.iter_destroy);
            let (first, seek, step) = match scan.ascends {
                true => (api.iter_seek_to_first, api.iter_seek, api.iter_next),
                false => (api.iter_seek_to_last, api.iter_seek_for_prev, api.iter_prev),
            };
            scan.from.map_or_else(|| first(cursor.0), |key| seek(cursor.0, key.as_ptr(), key.len()));
            let (mut key_len, mut value_len) = (0, 0);
            while (api.iter_valid)(cursor.0) != 0 {
                let key = (api.iter_key)(cursor.0, &mut key_len);
                let value = (api.iter_value)(cursor.0, &mut value_len);
                if !seen(bytes(key, key_len), bytes(value, value_len)) {
                    break;
                }
                step(cursor.0);
            }
            call(api, |error| (api.iter_get_error)(cursor.0, error))
        }
    }

    fn flush(&self) -> Result<()> {
        let Store { api, db, .. } = &*self.store;
        // SAFETY: all is alive during the calls.
        unsafe {
            let wait = Object((api.flushoptions_create)(), api.flushoptions_destroy);
            call(api, |error| (api.flush_cf)(db.0, wait.0, self.family.0, error))
        }
    }

    fn sync(&self) -> Result<()> {
        let Store { api, db, .. } = &*self.store;
        // SAFETY: the database is open.
        call(api, |error| unsafe { (api.flush_wal)(db.0, 1, error) })
    }

    fn busy(&self) -> Result<bool> {
        let running = [c"rocksdb.num-running-compactions", c"rocksdb.num-running-flushes"];
        let pending = [c"rocksdb.compaction-pending", c"rocksdb.mem-table-flush-pending"];
        Ok([running, pending].concat().into_iter().any(|property| self.number(property).unwrap_or(0) > 0))
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        RocksdbEngine::of(Arc::clone(&self.store), name)
    }

    fn stats(&self) -> Map<String, Value> {
        let cache_used_bytes = self.number(c"rocksdb.block-cache-usage");
        let table_bytes = self.number(c"rocksdb.total-sst-files-size");
        object(json!({"version": VERSION, "cache_used_bytes": cache_used_bytes, "table_bytes": table_bytes}))
    }

    fn close(self: Box<Self>) -> Result<()> {
        let RocksdbEngine { family, store } = *self;
        drop(family);
        Arc::into_inner(store).map(drop).context("a partition is still in use")
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
