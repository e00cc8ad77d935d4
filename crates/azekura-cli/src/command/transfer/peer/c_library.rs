//! The C interfaces of LevelDB and RocksDB, whose libraries are loaded at run time.
//!
//! Nothing of them is needed to build. RocksDB took its C interface over from LevelDB, so most functions differ in
//! their prefix only. The declarations below are the same in LevelDB 1.20 to 1.23 and in RocksDB 6 to 11.
//!
//! Invariant: a [`CStore`] owns its objects and destroys each once, iterators before families before the database.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::path::{Path, PathBuf};
use std::{env, ptr};

use libloading::Library;

use crate::error::{CliError, Result};

/// An object of the library: options, a database, a column family, an iterator.
type Handle = *mut c_void;
/// Where a call stores its error: null, or a string that [`call`] frees.
type CallError = *mut *mut c_char;

/// `kTolerateCorruptedTailRecords` of RocksDB: an incomplete record at the end of the WAL is ignored, any other damage
/// is an error. The default would ignore everything behind damage.
#[cfg(feature = "import-rocksdb")]
const TOLERATE_CORRUPTED_TAIL: c_int = 0;

/// Declares functions, by their signature, as a struct of pointers, named as in C without the prefix.
macro_rules! functions {
    ($(#[$meta:meta])* $api:ident $(fn($($argument:ty),*) $(-> $result:ty)?: $($name:ident)*;)*) => {
        // # Safety
        // Each is called as `c.h` says: with live objects of its own library, and the lengths of the bytes.
        functions! { @types $(#[$meta])* $api $([unsafe extern "C" fn($($argument),*) $(-> $result)?] [$($name)*])* }
    };
    (@types $(#[$meta:meta])* $api:ident $([$type:ty] [$($name:ident)*])*) => {
        $(#[$meta])*
        struct $api {
            $($($name: $type,)*)*
        }

        $(#[$meta])*
        impl $api {
            fn resolve(library: &'static Library, prefix: &str) -> std::result::Result<$api, libloading::Error> {
                let name = |name: &str| format!("{prefix}_{name}");
                // SAFETY: the types are those of the declarations in c.h, and the library is never unloaded.
                unsafe { Ok($api { $($($name: *library.get(name(stringify!($name)))?,)*)* }) }
            }
        }
    };
}

functions! {
    /// What both libraries have.
    CommonApi
    fn() -> Handle: options_create readoptions_create;
    fn(Handle): options_destroy readoptions_destroy close iter_seek_to_first iter_next iter_destroy;
    fn(Handle, c_uchar): options_set_paranoid_checks readoptions_set_verify_checksums readoptions_set_fill_cache;
    fn(Handle) -> c_uchar: iter_valid;
    fn(Handle, *mut usize) -> *const u8: iter_key iter_value;
    fn(Handle, CallError): iter_get_error;
    fn(*mut c_void): free;
}

functions! {
    #[cfg(feature = "import-leveldb")]
    LevelDbApi
    fn(Handle, *const c_char, CallError) -> Handle: open;
    fn(Handle, Handle) -> Handle: create_iterator;
}

functions! {
    #[cfg(feature = "import-rocksdb")]
    RocksDbApi
    fn(Handle, *const c_char, *mut usize, CallError) -> *mut *mut c_char: list_column_families;
    fn(*mut *mut c_char, usize): list_column_families_destroy;
    fn(Handle, *const c_char, c_int, *const *const c_char, *const Handle, *mut Handle, c_uchar, CallError) -> Handle:
        open_for_read_only_column_families;
    fn(Handle): column_family_handle_destroy;
    fn(Handle, Handle, Handle) -> Handle: create_iterator_cf;
    fn(Handle, c_int): options_set_wal_recovery_mode;
}

/// The name of a library: for people, in C, and of the environment variable that states its file.
struct LibraryName {
    engine: &'static str,
    prefix: &'static str,
    variable: &'static str,
    package: &'static str,
}

/// Loads the file that the environment variable names, or the first of `files`.
fn load(name: &LibraryName, files: &[String]) -> Result<(&'static Library, PathBuf)> {
    let LibraryName { engine, variable, package, .. } = name;
    let given = env::var_os(variable).map(PathBuf::from);
    let files: Vec<PathBuf> = given.map_or_else(|| files.iter().map(PathBuf::from).collect(), |file| vec![file]);
    let mut reason = String::new();
    for file in files {
        // SAFETY: the library is the one of the system, or the one that the user names. Its constructors only register
        // objects of its own.
        match unsafe { Library::new(&file) } {
            Ok(library) => return Ok((Box::leak(Box::new(library)), file)),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(CliError::library_missing(format!(
        "the library of {engine} cannot be loaded ({reason}); install it (on Debian `apt-get install {package}`), or \
         set {variable} to its file"
    )))
}

/// Calls a function that reports through [`CallError`]. The error is the text of the library.
fn call<T>(common: &CommonApi, act: impl FnOnce(CallError) -> T) -> Result<T, String> {
    let mut error: *mut c_char = ptr::null_mut();
    let result = act(&mut error);
    if error.is_null() {
        return Ok(result);
    }
    // SAFETY: an error is a string that ends with zero; its ownership passes to the caller.
    unsafe {
        let message = CStr::from_ptr(error).to_string_lossy().into_owned();
        (common.free)(error.cast());
        Err(message)
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

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the function is the one of c.h for the type of the object, which has no other owner. Objects that it
        // refers to are dropped after it, because they are declared after it.
        unsafe { (self.1)(self.0) };
    }
}

/// A column family of RocksDB, or the only table of LevelDB.
struct Family {
    name: CString,
    /// `None` for LevelDB.
    handle: Option<Object>,
}

/// An open database. Fields are dropped in this order.
pub(super) struct CStore {
    families: Vec<Family>,
    db: Object,
    read_options: Object,
    _options: Object,
    common: CommonApi,
    iterator: IteratorFunction,
}

/// The function that creates an iterator.
enum IteratorFunction {
    /// # Safety
    /// Called with a database and read options.
    #[cfg(feature = "import-leveldb")]
    LevelDb(unsafe extern "C" fn(Handle, Handle) -> Handle),
    /// # Safety
    /// Called with a database, read options and a column family of the database.
    #[cfg(feature = "import-rocksdb")]
    RocksDb(unsafe extern "C" fn(Handle, Handle, Handle) -> Handle),
}

fn c_path(path: &Path) -> Result<CString> {
    let text = path.to_str().and_then(|text| CString::new(text).ok());
    text.ok_or_else(|| CliError::input(path, "the path must be UTF-8 without zero bytes"))
}

/// Options with which every checksum is verified.
fn strict_options(common: &CommonApi) -> (Object, Object) {
    // SAFETY: constructors without conditions; none returns null.
    unsafe {
        let options = Object((common.options_create)(), common.options_destroy);
        let read_options = Object((common.readoptions_create)(), common.readoptions_destroy);
        (common.options_set_paranoid_checks)(options.0, 1);
        (common.readoptions_set_verify_checksums)(read_options.0, 1);
        (common.readoptions_set_fill_cache)(read_options.0, 0);
        (options, read_options)
    }
}

/// Opens the LevelDB database at `copy`, and changes its files. `path` is the one that messages name.
#[cfg(feature = "import-leveldb")]
pub(super) fn open_leveldb(copy: &Path, path: &Path) -> Result<CStore> {
    let name = LibraryName {
        engine: "LevelDB",
        prefix: "leveldb",
        variable: "AZEKURA_LEVELDB_LIBRARY",
        package: "libleveldb1d",
    };
    let files = ["libleveldb.so.1d", "libleveldb.so.1", "libleveldb.so", "libleveldb.dylib", "leveldb.dll"];
    let (library, file) = load(&name, &files.map(String::from))?;
    let incomplete = |error| CliError::library_missing(format!("{} is no library of LevelDB: {error}", file.display()));
    let common = CommonApi::resolve(library, name.prefix).map_err(incomplete)?;
    let api = LevelDbApi::resolve(library, name.prefix).map_err(incomplete)?;
    let (options, read_options) = strict_options(&common);
    let c_copy = c_path(copy)?;
    // SAFETY: options and path are alive during the call.
    let db = call(&common, |error| unsafe { (api.open)(options.0, c_copy.as_ptr(), error) });
    let db = Object(db.map_err(|reason| opening_error(&name, path, &reason))?, common.close);
    let families = vec![Family { name: c"default".into(), handle: None }];
    let iterator = IteratorFunction::LevelDb(api.create_iterator);
    Ok(CStore { families, db, read_options, _options: options, common, iterator })
}

/// Opens the RocksDB database at `path` with all column families, read-only.
#[cfg(feature = "import-rocksdb")]
pub(super) fn open_rocksdb(path: &Path) -> Result<CStore> {
    let name = LibraryName {
        engine: "RocksDB",
        prefix: "rocksdb",
        variable: "AZEKURA_ROCKSDB_LIBRARY",
        package: "librocksdb7.8",
    };
    // Distributions put the major version, or the major and the minor version, into the name.
    let versions = (6..=12).rev().flat_map(|major| {
        let minor = (0..=12).rev().map(move |minor| format!("librocksdb.so.{major}.{minor}"));
        std::iter::once(format!("librocksdb.so.{major}")).chain(minor)
    });
    let plain = ["librocksdb.so", "librocksdb.dylib", "rocksdb.dll"].map(String::from);
    let (library, file) = load(&name, &versions.chain(plain).collect::<Vec<_>>())?;
    let incomplete = |error| CliError::library_missing(format!("{} is no library of RocksDB: {error}", file.display()));
    let common = CommonApi::resolve(library, name.prefix).map_err(incomplete)?;
    let api = RocksDbApi::resolve(library, name.prefix).map_err(incomplete)?;
    let (options, read_options) = strict_options(&common);
    let c_path = c_path(path)?;
    let failed = |reason: String| opening_error(&name, path, &format!("{reason}; the library is {}", file.display()));
    // SAFETY: options, path and names are alive during the calls. The list of names is copied and destroyed once. To
    // open, names, options and handles are arrays of the same length, and the call fills the handles.
    unsafe {
        (api.options_set_wal_recovery_mode)(options.0, TOLERATE_CORRUPTED_TAIL);
        let mut count = 0;
        let list = call(&common, |error| (api.list_column_families)(options.0, c_path.as_ptr(), &mut count, error));
        let list = list.map_err(&failed)?;
        let names: Vec<CString> = (0..count).map(|i| CStr::from_ptr(*list.add(i)).to_owned()).collect();
        (api.list_column_families_destroy)(list, count);
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let (each, mut handles) = (vec![options.0; names.len()], vec![ptr::null_mut(); names.len()]);
        let count = c_int::try_from(names.len()).map_err(|_| failed("too many column families".into()))?;
        let db = call(&common, |error| {
            let (names_at, each_at, handles_at) = (pointers.as_ptr(), each.as_ptr(), handles.as_mut_ptr());
            let open = api.open_for_read_only_column_families;
            open(options.0, c_path.as_ptr(), count, names_at, each_at, handles_at, 0, error)
        });
        let db = Object(db.map_err(&failed)?, common.close);
        let handles = handles.into_iter().map(|handle| Some(Object(handle, api.column_family_handle_destroy)));
        let families = names.into_iter().zip(handles).map(|(name, handle)| Family { name, handle }).collect();
        let iterator = IteratorFunction::RocksDb(api.create_iterator_cf);
        Ok(CStore { families, db, read_options, _options: options, common, iterator })
    }
}

fn opening_error(name: &LibraryName, path: &Path, reason: &str) -> CliError {
    CliError::input(path, format!("{} cannot open this database: {reason}", name.engine))
}

impl CStore {
    /// The names of the column families.
    pub(super) fn names(&self) -> Vec<Vec<u8>> {
        self.families.iter().map(|family| family.name.to_bytes().to_vec()).collect()
    }

    /// Passes all entries of a column family to `visit`. The error of the library is a text; `visit` returns false to
    /// end the read.
    pub(super) fn read(&self, name: &[u8], visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), String> {
        let common = &self.common;
        let Some(family) = self.families.iter().find(|family| family.name.to_bytes() == name) else {
            return Ok(());
        };
        // SAFETY: database, options and family outlive the iterator. A key or value is used while the iterator is valid
        // and before it moves.
        unsafe {
            let iterator = match (&self.iterator, &family.handle) {
                #[cfg(feature = "import-leveldb")]
                (IteratorFunction::LevelDb(create), _) => create(self.db.0, self.read_options.0),
                #[cfg(feature = "import-rocksdb")]
                (IteratorFunction::RocksDb(create), Some(handle)) => create(self.db.0, self.read_options.0, handle.0),
                #[cfg(feature = "import-rocksdb")]
                (IteratorFunction::RocksDb(_), None) => return Ok(()),
            };
            let iterator = Object(iterator, common.iter_destroy);
            (common.iter_seek_to_first)(iterator.0);
            let (mut key_len, mut value_len) = (0, 0);
            while (common.iter_valid)(iterator.0) != 0 {
                let key = (common.iter_key)(iterator.0, &mut key_len);
                let value = (common.iter_value)(iterator.0, &mut value_len);
                if !visit(bytes(key, key_len), bytes(value, value_len)) {
                    return Ok(());
                }
                (common.iter_next)(iterator.0);
            }
            call(common, |error| (common.iter_get_error)(iterator.0, error))
        }
    }
}
