//! Shared mappings of files on disk, on Linux. Contains the only unsafe code of this folder.
//!
//! [`DiskMappedBytes`] lends the bytes of a file that does not change any more. A [`DiskMapping`] is never read and
//! never exposed as a reference: callers store bytes through `write_at` and read them through `File::read_at`, which is
//! coherent with the mapping because both use the page cache. So no Rust reference points to memory that another
//! process could change. [`DiskMappedMemory`] is read and written as atomics only. The caller must not truncate a file
//! below a range that it stores into, because such a store raises SIGBUS, which ends the process but corrupts nothing.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::{fmt, io, slice};

use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::base::mapped_memory::MappedMemory;
use crate::base::shared_bytes::BytesOwner;
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::vfs::fs::Mapping;

/// Maps the first `len` bytes of `file`, shared, which must be open for this access. Returns the start and the length
/// of the mapping, which the caller unmaps. `path` is for error messages.
fn map_shared(file: &File, len: u64, access: ProtFlags, path: &Path) -> Result<(NonNull<u8>, usize)> {
    let len = usize::try_from(len).ok().filter(|len| (1..=isize::MAX as usize).contains(len));
    let len =
        len.ok_or_else(|| Error::invalid("a mapping needs at least 1 byte and must fit into memory").in_file(path))?;
    // SAFETY: the kernel chooses a fresh range of addresses (null hint, no MAP_FIXED), so no memory in use is touched.
    let base = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) };
    let base = base.map_err(|e| Error::io("map", &io::Error::from(e)).in_file(path))?;
    Ok((NonNull::new(base.cast()).expect("mmap never returns the null page without MAP_FIXED"), len))
}

/// The first `len` bytes of a file, mapped shared.
pub(crate) struct DiskMapping {
    base: NonNull<u8>,
    len: usize,
    path: PathBuf,
    /// Held while storing, so that two threads never store into the same bytes at once.
    storing: Mutex<()>,
}

// SAFETY: the mapping belongs to this value alone until it is dropped, and memory mappings are not bound to a thread.
unsafe impl Send for DiskMapping {}
// SAFETY: the only access to the memory through `&self` is `write_at`, which holds `storing`; `populate` changes no
// byte.
unsafe impl Sync for DiskMapping {}

impl DiskMapping {
    /// Maps the first `len` bytes of `file`, which must be open for reading and writing. `path` is for error messages.
    pub(crate) fn new(file: &File, len: u64, path: &Path) -> Result<DiskMapping> {
        let (base, len) = map_shared(file, len, ProtFlags::READ | ProtFlags::WRITE, path)?;
        Ok(DiskMapping { base, len, path: path.to_path_buf(), storing: Mutex::new(()) })
    }

    /// `offset` and `len` as a range in the mapping; `None` if the range is outside.
    fn inside(&self, offset: u64, len: u64) -> Option<(usize, usize)> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len as u64)?;
        Some((offset as usize, (end - offset) as usize))
    }
}

impl Mapping for DiskMapping {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        let (start, len) = self.inside(offset, bytes.len() as u64).expect("a store is inside its mapping");
        let _one_at_a_time = lock(&self.storing);
        // SAFETY: `inside` has checked that `start..start + len` is in the mapping, which is valid as long as `self`.
        // The source is a live slice. It cannot overlap the mapping, because no reference into the mapping is ever
        // returned. The lock excludes other stores through this mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(start), len) };
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        let outside = || Error::invalid("the range is outside the mapping").in_file(&self.path).at_offset(offset);
        let (start, len) = self.inside(offset, len).ok_or_else(outside)?;
        if len == 0 {
            return Ok(());
        }
        let page_start = start - start % rustix::param::page_size();
        debug_assert!(self.base.addr().get().is_multiple_of(rustix::param::page_size()), "a mapping starts at a page");
        // SAFETY: the range is in the mapping (its start is rounded down to a page of the mapping), and
        // MADV_POPULATE_WRITE changes no byte: it makes pages resident and writable, or returns an error.
        let done = retry_on_intr(|| unsafe {
            let at = self.base.as_ptr().add(page_start).cast::<c_void>();
            madvise(at, start + len - page_start, Advice::LinuxPopulateWrite)
        });
        done.map_err(|e| {
            let error = match e {
                Errno::INVAL => Error::unsupported("this kernel cannot populate a mapping"),
                e => Error::io("populate", &io::Error::from(e)),
            };
            error.in_file(&self.path).at_offset(offset)
        })
    }
}

impl Drop for DiskMapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping that `new` created and that only this drop unmaps. No
        // pointer into the mapping is left.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping cannot fail");
    }
}

impl fmt::Debug for DiskMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskMapping").field("path", &self.path).field("len", &self.len).finish()
    }
}

/// The first `len` bytes of a file, mapped as atomic words.
pub(crate) struct DiskMappedMemory {
    base: NonNull<AtomicU64>,
    len: usize,
    map_sync: bool,
    path: PathBuf,
}

// SAFETY: the mapping belongs to this value alone, memory mappings are not bound to a thread, and atomics may be
// shared.
unsafe impl Send for DiskMappedMemory {}
// SAFETY: as above.
unsafe impl Sync for DiskMappedMemory {}

impl DiskMappedMemory {
    /// Maps the first `len` bytes, a multiple of 8, of `file`, which must be open for reading and writing.
    pub(crate) fn new(file: &File, len: u64, path: &Path) -> Result<DiskMappedMemory> {
        let fits = |len: &usize| (1..=isize::MAX as usize).contains(len) && len.is_multiple_of(8);
        let len = usize::try_from(len).ok().filter(fits);
        let len = len.ok_or_else(|| {
            Error::invalid("mapped memory needs a positive multiple of 8 bytes and must fit into memory").in_file(path)
        })?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses a fresh range of addresses (null hint, no MAP_FIXED), so no memory in use is
        // touched.
        let map = |flags| unsafe { mmap(ptr::null_mut(), len, access, flags, file, 0) };
        let (map_sync, base) = match map(MAP_SYNC_FLAGS) {
            Ok(base) => (true, base),
            // The file is not in persistent memory, or the kernel does not know the flags.
            Err(Errno::OPNOTSUPP | Errno::INVAL) => {
                let base = map(MapFlags::SHARED).map_err(|e| Error::io("map", &io::Error::from(e)).in_file(path))?;
                (false, base)
            }
            Err(e) => return Err(Error::io("map", &io::Error::from(e)).in_file(path)),
        };
        let base = NonNull::new(base.cast()).expect("mmap never returns the null page without MAP_FIXED");
        Ok(DiskMappedMemory { base, len, map_sync, path: path.to_path_buf() })
    }
}

/// Flags that the kernel rejects unless stores reach the medium directly and the file's block allocation is durable
/// before a store.
const MAP_SYNC_FLAGS: MapFlags = MapFlags::SHARED_VALIDATE.union(MapFlags::SYNC);

impl MappedMemory for DiskMappedMemory {
    fn atomic_words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `len` bytes long, starts at a page boundary, and is valid as long as `self`. It is
        // accessed as atomics only. The caller does not access words past the end of the file.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len / 8) }
    }

    fn survives_power_loss(&self) -> bool {
        self.map_sync
    }
}

impl Drop for DiskMappedMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping that `new` created and that only this drop unmaps. The
        // slices that `atomic_words` returned were borrowed from `self`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping cannot fail");
    }
}

impl fmt::Debug for DiskMappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DiskMappedMemory { path, len, map_sync, .. } = self;
        f.debug_struct("DiskMappedMemory").field("path", path).field("len", len).field("map_sync", map_sync).finish()
    }
}

/// Maximum number of files that the process maps for reading at a time: a quarter of the mappings that Linux permits a
/// process by default. Without mappings, neither the allocator nor new threads get memory.
const MAPPED_FILES_MAX: usize = 16 << 10;
/// Number of files that the process maps for reading.
static MAPPED_FILES: AtomicUsize = AtomicUsize::new(0);

/// The first `len` bytes of a file, mapped for reading.
pub(crate) struct DiskMappedBytes {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone until it is dropped, and memory mappings are not bound to a thread.
unsafe impl Send for DiskMappedBytes {}
// SAFETY: the bytes can only be read.
unsafe impl Sync for DiskMappedBytes {}

impl DiskMappedBytes {
    /// Maps the first `len` bytes of `file`, which must be open for reading and not shorter. `None` if the process maps
    /// many files.
    pub(crate) fn new(file: &File, len: u64, path: &Path) -> Result<Option<DiskMappedBytes>> {
        let (base, len) = map_shared(file, len, ProtFlags::READ, path)?;
        let count = MAPPED_FILES.fetch_add(1, Ordering::Relaxed) + 1;
        let mapped = DiskMappedBytes { base, len }; // its drop unmaps the file and decrements the count
        // SAFETY: the range is the mapping created above, and the advice changes no byte.
        let _only_a_hint = unsafe { madvise(base.as_ptr().cast::<c_void>(), len, Advice::Random) };
        Ok((count <= MAPPED_FILES_MAX).then_some(mapped))
    }
}

impl BytesOwner for DiskMappedBytes {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes long, readable, and valid as long as `self`. The engine maps only files
        // that it never changes or shortens again; that no other program does so is a condition of
        // `Config::mapped_reads`.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for DiskMappedBytes {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping that `new` created and that only this drop unmaps. The
        // slices that `bytes` returned were borrowed from `self`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping a whole mapping cannot fail");
        MAPPED_FILES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A word that is zero at first and zero again in every child that this process forks. It is valid until the process
/// ends. `None` if the kernel does not support this.
pub(crate) fn wiped_on_fork() -> Option<&'static AtomicU64> {
    let len = rustix::param::page_size();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses a fresh range of addresses (null hint, no MAP_FIXED), so no memory in use is touched.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the range is the mapping created above, to which no other code has a pointer. The advice changes the
    // bytes that a child reads from it. They are read as an atomic, for which any value is valid.
    if unsafe { madvise(base, len, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: base and length are those of the mapping created above, and no pointer into it exists.
        let _left_mapped = unsafe { munmap(base, len) };
        return None;
    }
    // SAFETY: the mapping starts at a page boundary, is longer than a word, readable and writable, zeroed by the
    // kernel, and never unmapped. It is accessed as an atomic only.
    Some(unsafe { &*base.cast::<AtomicU64>() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::base::ErrorKind;
    use crate::vfs::env::process_token;

    const LEN: u64 = 64 * 1024;

    fn mapped() -> (File, DiskMapping) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN).unwrap();
        let mapping = DiskMapping::new(&file, LEN, Path::new("map")).unwrap();
        (file, mapping)
    }

    #[test]
    fn stores_are_read_back_through_the_file() {
        let (file, mapping) = mapped();
        mapping.populate(5000, 10).unwrap();
        mapping.write_at(b"0123456789", 5000);
        mapping.write_at(b"end", LEN - 3);
        let mut buf = [0; 10];
        file.read_exact_at(&mut buf, 5000).unwrap();
        assert_eq!(&buf, b"0123456789");
        file.read_exact_at(&mut buf[..3], LEN - 3).unwrap();
        assert_eq!(&buf[..3], b"end");
    }

    #[test]
    fn concurrent_stores_do_not_interleave() {
        let (file, mapping) = mapped();
        mapping.populate(0, LEN).unwrap();
        std::thread::scope(|scope| {
            for byte in 1..=4u8 {
                let mapping = &mapping;
                scope.spawn(move || (0..200).for_each(|_| mapping.write_at(&[byte; 9000], 100)));
            }
        });
        let mut buf = [0; 9000];
        file.read_exact_at(&mut buf, 100).unwrap();
        assert!(buf[0] > 0 && buf.iter().all(|b| *b == buf[0]), "a mix of two stores");
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn mapped_memory_reads_file_bytes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mapped = DiskMappedMemory::new(&file, LEN, Path::new("map")).unwrap();
        assert_eq!(mapped.atomic_words().len(), LEN as usize / 8);
        mapped.atomic_words()[7].store(u64::from_le_bytes(*b"01234567"), Ordering::Relaxed);
        let mut buf = [0; 8];
        file.read_exact_at(&mut buf, 56).unwrap();
        assert_eq!(&buf, b"01234567");
        file.write_all_at(b"abcdefgh", 4088).unwrap();
        assert_eq!(mapped.atomic_words()[511].load(Ordering::Relaxed).to_le_bytes(), *b"abcdefgh");
        for len in [0, 12, u64::MAX] {
            assert_eq!(DiskMappedMemory::new(&file, len, Path::new("map")).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }

    // # Safety
    // These are the C library's own declarations.
    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn _exit(status: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }

    #[test]
    fn a_forked_child_has_a_token_of_its_own() {
        let token = process_token();
        assert_eq!(std::thread::spawn(process_token).join().unwrap(), token);
        // The child runs only loads, stores and system calls.
        let child = fork();
        if child == 0 {
            let own = process_token();
            _exit(i32::from(own == token || own != process_token()));
        }
        let mut status = -1;
        // SAFETY: the child was forked above and `status` is a local variable.
        let waited = unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert_eq!(process_token(), token);
    }

    #[test]
    #[should_panic(expected = "inside its mapping")]
    fn a_store_outside_panics() {
        mapped().1.write_at(b"xx", LEN - 1);
    }

    #[test]
    #[should_panic(expected = "inside its mapping")]
    fn an_offset_that_overflows_panics() {
        mapped().1.write_at(b"xx", u64::MAX);
    }

    #[test]
    fn ranges_outside_are_errors() {
        let (file, mapping) = mapped();
        assert_eq!(mapping.populate(LEN - 1, 2).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(mapping.populate(u64::MAX, 2).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(DiskMapping::new(&file, 0, Path::new("map")).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(DiskMapping::new(&file, u64::MAX, Path::new("map")).is_err());
    }

    #[test]
    fn populate_past_end_of_file_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mapping = DiskMapping::new(&file, LEN, Path::new("map")).unwrap();
        mapping.populate(0, 4096).unwrap();
        let error = mapping.populate(0, LEN).unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Io, Some(Path::new("map"))));
    }
}
