//! One open RocksDB database and its column families, behind calls that are safe.

#![allow(unsafe_code)]

use crate::engine::rocksdb::library::{C, Cursor, Db, Family};
use crate::engine::rocksdb::settings::Settings;
use crate::engine::{Scan, options};
use crate::failure::Result;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// An open database. All its calls may be made by many threads at once, as RocksDB promises.
pub(super) struct Store {
    c: &'static C,
    db: *mut Db,
    /// Every family that is open, by name; each lives until the store is dropped.
    families: Mutex<BTreeMap<String, FamilyId>>,
    settings: Settings,
}

/// A column family of the store that gave it, and of no other.
#[derive(Clone, Copy)]
pub(super) struct FamilyId(*mut Family);

// SAFETY: a database and its column families may be used by many threads at once without a lock; only closing may not,
// and that needs the store itself.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}
// SAFETY: it is only an address, which `Store`'s calls alone follow.
unsafe impl Send for FamilyId {}
// SAFETY: as above.
unsafe impl Sync for FamilyId {}

impl Store {
    /// Opens or creates the database at `dir`, with every column family it has and [`options::PARTITION`].
    pub(super) fn open(c: &'static C, dir: &Path, settings: Settings) -> Result<Store> {
        let path = CString::new(dir.as_os_str().as_bytes())?;
        let mut names = if dir.join("CURRENT").exists() { list_families(c, &path, &settings)? } else { Vec::new() };
        for wanted in ["default", options::PARTITION] {
            if !names.iter().any(|name| name.as_bytes() == wanted.as_bytes()) {
                names.push(CString::new(wanted)?);
            }
        }
        let pointers: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let told = vec![settings.db.cast_const(); names.len()];
        let mut handles = vec![ptr::null_mut(); names.len()];
        let count = c_int::try_from(names.len())?;
        // SAFETY: names, options and handles are arrays of `count`, alive during the call; it fills the handles in.
        let db = c.call(|error| unsafe {
            let (names, told) = (pointers.as_ptr(), told.as_ptr());
            (c.open_column_families)(settings.db, path.as_ptr(), count, names, told, handles.as_mut_ptr(), error)
        })?;
        let families = names.iter().zip(handles).map(|(n, handle)| (n.to_string_lossy().into(), FamilyId(handle)));
        Ok(Store { c, db, families: Mutex::new(families.collect()), settings })
    }

    /// The family of that name, made if there is none.
    pub(super) fn family(&self, name: &str) -> Result<FamilyId> {
        let mut families = self.families.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(family) = families.get(name) {
            return Ok(*family);
        }
        let c_name = CString::new(name)?;
        let c = self.c;
        // SAFETY: database, options and name are alive during the call.
        let made =
            c.call(|error| unsafe { (c.create_column_family)(self.db, self.settings.db, c_name.as_ptr(), error) })?;
        families.insert(name.to_owned(), FamilyId(made));
        Ok(FamilyId(made))
    }

    pub(super) fn put(&self, family: FamilyId, key: &[u8], value: &[u8]) -> Result<()> {
        let (c, told) = (self.c, self.settings.write);
        // SAFETY: all is alive during the call, which copies the bytes.
        c.call(|error| unsafe {
            (c.put_cf)(self.db, told, family.0, key.as_ptr(), key.len(), value.as_ptr(), value.len(), error);
        })
    }

    pub(super) fn delete(&self, family: FamilyId, key: &[u8]) -> Result<()> {
        let (c, told) = (self.c, self.settings.write);
        // SAFETY: as for a put.
        c.call(|error| unsafe { (c.delete_cf)(self.db, told, family.0, key.as_ptr(), key.len(), error) })
    }

    /// Writes the records as one batch.
    pub(super) fn put_batch(&self, family: FamilyId, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let (c, told) = (self.c, self.settings.write);
        // SAFETY: the batch is this call's own and copies the bytes; it is destroyed once, behind the write.
        unsafe {
            let batch = (c.writebatch_create)();
            for (key, value) in records {
                (c.writebatch_put_cf)(batch, family.0, key.as_ptr(), key.len(), value.as_ptr(), value.len());
            }
            let written = c.call(|error| (c.write)(self.db, told, batch, error));
            (c.writebatch_destroy)(batch);
            written
        }
    }

    /// Lends the value of `key` where it lies: pinned, not copied.
    pub(super) fn get(&self, family: FamilyId, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let (c, told) = (self.c, self.settings.read);
        // SAFETY: all is alive during the call; null means that there is no such key.
        let value =
            c.call(|error| unsafe { (c.get_pinned_cf)(self.db, told, family.0, key.as_ptr(), key.len(), error) })?;
        if value.is_null() {
            return Ok(false);
        }
        let mut len = 0;
        // SAFETY: the bytes stay where they are until the value is destroyed, and `seen` cannot keep them.
        unsafe {
            let bytes = (c.pinnableslice_value)(value, &mut len);
            seen(slice(bytes, len));
            (c.pinnableslice_destroy)(value);
        }
        Ok(true)
    }

    /// Shows up to `limit` records; says how many there were.
    pub(super) fn scan(
        &self,
        family: FamilyId,
        scan: Scan<'_>,
        limit: u64,
        seen: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<u64> {
        let c = self.c;
        // SAFETY: database, options and family are alive, and outlive the cursor, which `OpenCursor` destroys. A key or
        // a value is looked at while the cursor is valid and before it moves.
        unsafe {
            let cursor = OpenCursor { c, raw: (c.create_iterator_cf)(self.db, self.settings.read, family.0) };
            let at = cursor.raw;
            match scan {
                Scan::First => (c.iter_seek_to_first)(at),
                Scan::From(key) => (c.iter_seek)(at, key.as_ptr(), key.len()),
                Scan::Last => (c.iter_seek_to_last)(at),
                Scan::Back(key) => (c.iter_seek_for_prev)(at, key.as_ptr(), key.len()),
            }
            let step = if matches!(scan, Scan::First | Scan::From(_)) { c.iter_next } else { c.iter_prev };
            let mut count = 0;
            while count < limit && (c.iter_valid)(at) != 0 {
                let (mut key_len, mut value_len) = (0, 0);
                let key = (c.iter_key)(at, &mut key_len);
                let value = (c.iter_value)(at, &mut value_len);
                seen(slice(key, key_len), slice(value, value_len));
                count += 1;
                if count < limit {
                    step(at);
                }
            }
            c.call(|error| (c.iter_get_error)(at, error))?;
            Ok(count)
        }
    }

    /// Flushes the family's memtables and waits.
    pub(super) fn flush(&self, family: FamilyId) -> Result<()> {
        let (c, told) = (self.c, self.settings.flush);
        // SAFETY: all is alive during the call.
        c.call(|error| unsafe { (c.flush_cf)(self.db, told, family.0, error) })
    }

    /// Syncs the log.
    pub(super) fn sync_log(&self) -> Result<()> {
        let c = self.c;
        // SAFETY: the database is open.
        c.call(|error| unsafe { (c.flush_wal)(self.db, 1, error) })
    }

    /// A property that is a number; `None` if there is none of that name.
    pub(super) fn number(&self, family: FamilyId, property: &CStr) -> Option<u64> {
        let mut number = 0;
        // SAFETY: all is alive during the call.
        let failed = unsafe { (self.c.property_int_cf)(self.db, family.0, property.as_ptr(), &mut number) };
        (failed == 0).then_some(number)
    }

    /// A property that is a text; empty if there is none of that name.
    pub(super) fn text(&self, family: FamilyId, property: &CStr) -> String {
        // SAFETY: all is alive during the call.
        let text = unsafe { (self.c.property_value_cf)(self.db, family.0, property.as_ptr()) };
        self.c.take_text(text)
    }

    /// Bytes in the block cache now.
    pub(super) fn cache_used_bytes(&self) -> usize {
        self.settings.cache_used_bytes()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let families = self.families.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody else has the store any more; families go before their database, each once.
        unsafe {
            for family in families.values() {
                (self.c.column_family_handle_destroy)(family.0);
            }
            (self.c.close)(self.db);
        }
    }
}

/// A cursor that is destroyed with its owner, also when `seen` panics.
struct OpenCursor {
    c: &'static C,
    raw: *mut Cursor,
}

impl Drop for OpenCursor {
    fn drop(&mut self) {
        // SAFETY: made by `create_iterator_cf`, destroyed once, before its database is closed.
        unsafe { (self.c.iter_destroy)(self.raw) };
    }
}

/// Bytes of the library's.
///
/// # Safety
/// `len` bytes at `bytes` must stay as they are for `'a`; of no bytes, the address may be null.
unsafe fn slice<'a>(bytes: *const u8, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes, len) }
}

fn list_families(c: &'static C, path: &CStr, settings: &Settings) -> Result<Vec<CString>> {
    let mut count = 0;
    // SAFETY: path and options are alive during the call, which gives an array of `count` strings away; they are copied
    // and given back once.
    unsafe {
        let list = c.call(|error| (c.list_column_families)(settings.db, path.as_ptr(), &mut count, error))?;
        let names = (0..count).map(|i| CStr::from_ptr(*list.add(i)).to_owned()).collect();
        (c.list_column_families_destroy)(list, count);
        Ok(names)
    }
}
