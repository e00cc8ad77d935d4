//! What differs between operating systems.
//!
//! Functions of `family` exist for Unix and Windows. Functions of `extras` use what only Linux has; elsewhere they say
//! that it is not supported, and the callers do without.

#[cfg(not(target_os = "linux"))]
pub(super) use self::extras_missing as extras;
#[cfg(target_os = "linux")]
pub(super) use self::extras_of_linux as extras;
#[cfg(unix)]
pub(super) use self::unix as family;
#[cfg(windows)]
pub(super) use self::windows as family;

#[cfg(unix)]
pub(super) mod unix {
    use std::fs::{DirBuilder, File, OpenOptions};
    use std::io;
    pub(crate) use std::os::unix::fs::FileExt;
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    use std::path::Path;

    use rustix::fs::{FallocateFlags, OFlags};
    use rustix::io::{Errno, retry_on_intr};

    /// Only the owner may read and write files.
    const FILE_MODE: u32 = 0o600;
    const DIR_MODE: u32 = 0o700;

    /// Refuses a symbolic link, opens a pipe without waiting for its other end, and sets the mode of a new file.
    pub(crate) fn guard_open(options: &mut OpenOptions) {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        options.custom_flags(flags.bits() as i32).mode(FILE_MODE);
    }

    /// A builder of directories that only their owner may use.
    pub(crate) fn dir_builder() -> DirBuilder {
        let mut builder = DirBuilder::new();
        builder.mode(DIR_MODE);
        builder
    }

    /// Opens a directory, to sync or lock it; `None` if the system has no such handles.
    pub(crate) fn open_dir(path: &Path) -> io::Result<Option<File>> {
        OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits() as i32).open(path).map(Some)
    }

    /// Reserves space for `len` bytes from `offset`, growing the file if needed. False if the file system cannot.
    pub(crate) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<bool> {
        match retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            done => done.map(|()| true).map_err(io::Error::from),
        }
    }

    /// The most files that the process may have open.
    pub(crate) fn open_files_max() -> Option<u64> {
        rustix::process::getrlimit(rustix::process::Resource::Nofile).current
    }
}

#[cfg(windows)]
pub(super) mod windows {
    use std::fs::{DirBuilder, File, OpenOptions};
    use std::io;
    use std::os::windows::fs::OpenOptionsExt;
    use std::path::Path;

    /// Opens a symbolic link itself, which the caller then refuses.
    const FILE_FLAG_OPEN_REPARSE_POINT: u32 = 0x0020_0000;

    /// Positioned reads and writes, named as on Unix.
    pub(crate) trait FileExt {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
        fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    }

    impl FileExt for File {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            std::os::windows::fs::FileExt::seek_read(self, buf, offset)
        }

        fn write_all_at(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
            while !bytes.is_empty() {
                match std::os::windows::fs::FileExt::seek_write(self, bytes, offset) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(n) => (bytes, offset) = (&bytes[n..], offset + n as u64),
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            Ok(())
        }
    }

    pub(crate) fn guard_open(options: &mut OpenOptions) {
        options.custom_flags(FILE_FLAG_OPEN_REPARSE_POINT);
    }

    pub(crate) fn dir_builder() -> DirBuilder {
        DirBuilder::new()
    }

    /// Windows syncs names with the log of the file system.
    pub(crate) fn open_dir(path: &Path) -> io::Result<Option<File>> {
        std::fs::metadata(path).map(|_| None)
    }

    pub(crate) fn allocate(_file: &File, _offset: u64, _len: u64) -> io::Result<bool> {
        Ok(false)
    }

    pub(crate) fn open_files_max() -> Option<u64> {
        None
    }
}

#[cfg(target_os = "linux")]
pub(super) mod extras_of_linux {
    use std::fs::File as StdFile;
    use std::io::{self, IoSliceMut};
    use std::num::NonZeroU64;
    use std::path::Path;
    use std::sync::Arc;

    use rustix::fs::{Advice, CWD, Mode, OFlags, RenameFlags};
    use rustix::io::{Errno, ReadWriteFlags, preadv2, retry_on_intr};
    use rustix::rand::{GetRandomFlags, getrandom};

    use crate::base::Result;
    use crate::base::mapped_memory::{MappedBytes, MappedMemory};
    use crate::vfs::fs::{Mapping, PersistenceLevel};
    pub(crate) use crate::vfs::mmap::wiped_on_fork;
    use crate::vfs::mmap::{DiskMappedBytes, DiskMappedMemory, DiskMapping};

    const EXT4_MAGIC: u64 = 0xEF53;
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const XFS_MAGIC: u64 = 0x5846_5342;

    /// Asks the system to read a range into its page cache, without waiting. False if it refuses.
    pub(crate) fn will_read(file: &StdFile, offset: u64, len: u64) -> bool {
        rustix::fs::fadvise(file, offset, NonZeroU64::new(len), Advice::WillNeed).is_ok()
    }

    /// Whether the page cache has the byte at `offset`. False if the file system cannot tell.
    pub(crate) fn is_in_memory(file: &StdFile, offset: u64) -> bool {
        let mut byte = [0];
        preadv2(file, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT) == Ok(1)
    }

    pub(crate) fn map(file: &StdFile, len: u64, path: &Path) -> Result<Option<Box<dyn Mapping>>> {
        Ok(Some(Box::new(DiskMapping::new(file, len, path)?)))
    }

    pub(crate) fn map_memory(file: &StdFile, len: u64, path: &Path) -> Result<Option<Box<dyn MappedMemory>>> {
        Ok(Some(Box::new(DiskMappedMemory::new(file, len, path)?)))
    }

    /// Without effect on a 32-bit system, whose address space is smaller than many databases.
    pub(crate) fn map_for_reading(file: &StdFile, len: u64, path: &Path) -> Result<Option<Arc<MappedBytes>>> {
        if cfg!(not(target_pointer_width = "64")) || len == 0 {
            return Ok(None);
        }
        Ok(DiskMappedBytes::new(file, len, path)?.map(MappedBytes::new))
    }

    /// Renames and replaces nothing; `None` if the file system or the kernel does not support that.
    pub(crate) fn rename_noreplace(from: &Path, to: &Path) -> Option<io::Result<()>> {
        match retry_on_intr(|| rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => None,
            done => Some(done.map_err(io::Error::from)),
        }
    }

    fn file_system_magic(dir: &Path) -> Option<u64> {
        retry_on_intr(|| rustix::fs::statfs(dir)).ok().map(|stat| stat.f_type as u64 & 0xFFFF_FFFF)
    }

    /// Opens a file without a name, which the file system removes when it is closed.
    fn open_unnamed(dir: &Path) -> Option<StdFile> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR).ok().map(StdFile::from)
    }

    /// Whether files in `dir` can never share blocks. Tries to clone a file into another one.
    fn has_no_reflinks(dir: &Path) -> bool {
        let (Some(from), Some(to)) = (open_unnamed(dir), open_unnamed(dir)) else { return false };
        rustix::fs::ioctl_ficlone(&to, &from) == Err(Errno::OPNOTSUPP)
    }

    /// Whether files in `dir` are in persistent memory. Tries to map a file.
    fn supports_synchronous_mapping(dir: &Path) -> bool {
        const LEN: u64 = 4096;
        let Some(file) = open_unnamed(dir) else { return false };
        file.set_len(LEN).is_ok()
            && DiskMappedMemory::new(&file, LEN, dir).is_ok_and(|words| words.survives_power_loss())
    }

    pub(crate) fn overwrites_in_place(dir: &Path) -> bool {
        match file_system_magic(dir) {
            Some(EXT4_MAGIC | TMPFS_MAGIC) => true,
            Some(XFS_MAGIC) => has_no_reflinks(dir),
            _ => false,
        }
    }

    pub(crate) fn persistence_level(dir: &Path) -> PersistenceLevel {
        // Mapped memory is accessed as words of the processor, and files contain little-endian words.
        if cfg!(target_endian = "big") {
            return PersistenceLevel::WalOnly;
        }
        match file_system_magic(dir) {
            Some(TMPFS_MAGIC) => PersistenceLevel::ProcessCrash,
            Some(_) if supports_synchronous_mapping(dir) => PersistenceLevel::PowerLoss,
            _ => PersistenceLevel::WalOnly,
        }
    }

    /// Fills a part of `out` with random bytes. Returns its length; 0 if the kernel or a sandbox does not allow the
    /// call.
    pub(crate) fn random(out: &mut [u8]) -> usize {
        retry_on_intr(|| getrandom(&mut *out, GetRandomFlags::empty())).unwrap_or(0)
    }

    pub(crate) fn machine_memory() -> Option<u64> {
        let info = rustix::system::sysinfo();
        (info.totalram as u64).checked_mul(u64::from(info.mem_unit))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn overwrites_in_place_depends_on_file_system() {
            if Path::new("/dev/shm").is_dir() {
                let shm = Path::new("/dev/shm");
                assert_eq!(overwrites_in_place(shm), file_system_magic(shm) == Some(TMPFS_MAGIC));
            }
            assert!(!overwrites_in_place(Path::new("/proc")));
            assert!(!overwrites_in_place(Path::new("/no/such/directory")));
        }
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) mod extras_missing {
    use std::fs::File;
    use std::io;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use crate::base::Result;
    use crate::base::mapped_memory::{MappedBytes, MappedMemory};
    use crate::vfs::fs::{Mapping, PersistenceLevel};

    pub(crate) fn will_read(_file: &File, _offset: u64, _len: u64) -> bool {
        false
    }

    pub(crate) fn is_in_memory(_file: &File, _offset: u64) -> bool {
        false
    }

    pub(crate) fn map(_file: &File, _len: u64, _path: &Path) -> Result<Option<Box<dyn Mapping>>> {
        Ok(None)
    }

    pub(crate) fn map_memory(_file: &File, _len: u64, _path: &Path) -> Result<Option<Box<dyn MappedMemory>>> {
        Ok(None)
    }

    pub(crate) fn map_for_reading(_file: &File, _len: u64, _path: &Path) -> Result<Option<Arc<MappedBytes>>> {
        Ok(None)
    }

    pub(crate) fn rename_noreplace(_from: &Path, _to: &Path) -> Option<io::Result<()>> {
        None
    }

    pub(crate) fn overwrites_in_place(_dir: &Path) -> bool {
        false
    }

    pub(crate) fn persistence_level(_dir: &Path) -> PersistenceLevel {
        PersistenceLevel::WalOnly
    }

    pub(crate) fn wiped_on_fork() -> Option<&'static AtomicU64> {
        None
    }

    pub(crate) fn random(_out: &mut [u8]) -> usize {
        0
    }

    pub(crate) fn machine_memory() -> Option<u64> {
        None
    }
}
