//! A file system that injects faults into chosen operations.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::error::EMFILE;
use crate::base::mapped_memory::{MappedBytes, MappedMemory};
use crate::base::{Error, Result};
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode, PersistenceLevel, check_read_len};

/// A kind of operation that [`FaultFs`] counts and can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpKind {
    /// Every kind.
    Any,
    /// [`Fs::open`] of a file that exists.
    Open,
    /// [`Fs::open`] with [`OpenMode::Create`].
    Create,
    /// [`Fs::create_dir_all`] and [`Fs::create_dir`].
    CreateDir,
    /// [`Fs::read_dir`].
    ReadDir,
    /// [`Fs::exists`].
    Exists,
    /// [`Fs::rename`] and [`Fs::rename_noreplace`].
    Rename,
    /// [`Fs::remove_file`].
    RemoveFile,
    /// [`Fs::remove_dir_all`].
    RemoveDir,
    /// [`Fs::hard_link`].
    HardLink,
    /// [`Fs::sync_dir`].
    SyncDir,
    /// [`Fs::lock`] and [`Fs::lock_dir`].
    Lock,
    /// [`File::read_at`].
    Read,
    /// [`File::write_at`]. Stores through a mapping cannot fail and are not counted.
    Write,
    /// [`File::length`].
    Length,
    /// [`File::set_length`].
    SetLength,
    /// [`File::allocate`].
    Allocate,
    /// [`File::sync_data`] and [`File::sync_all`].
    Sync,
    /// [`File::map`].
    Map,
    /// [`Mapping::populate`].
    Populate,
}

const OP_KIND_COUNT: usize = OpKind::Populate as usize + 1;

/// The effect of a fault on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The operation fails with this error and has no effect.
    Error(io::ErrorKind),
    /// The operation fails because the process has too many open files, and has no effect.
    TooManyOpenFiles,
    /// The operation does its first half. A read then behaves as if the file ended there. A write, an allocation and
    /// a populate fail after the first half. Other operations fail and have no effect.
    Short,
    /// A sync of a file or a directory reports success and has no effect. Other operations are done normally.
    LyingSync,
}

/// How often a [`FaultPlan`] triggers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultFrequency {
    /// At the `nth` operation only.
    Once,
    /// At the `nth` operation and every later one.
    Forever,
}

/// Which operations fail, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// The kind of operation.
    pub op: OpKind,
    /// The first operation that fails, counted from 1 over the matching operations after [`FaultFs::inject`]. 0 means
    /// 1.
    pub nth: u64,
    /// How often the plan triggers.
    pub frequency: FaultFrequency,
    /// The effect on the operation.
    pub fault: Fault,
    /// Only operations on paths that contain this string match. For a rename or a link, either path may contain it.
    pub path_contains: Option<String>,
    /// Operations match only after this many faults of any plan have triggered.
    pub after_faults: u64,
}

impl FaultPlan {
    /// A plan that triggers once, at the `nth` operation of that kind, on any path.
    pub fn new(op: OpKind, nth: u64, what: Fault) -> FaultPlan {
        FaultPlan { op, nth, frequency: FaultFrequency::Once, fault: what, path_contains: None, after_faults: 0 }
    }

    /// The same plan, triggered at every later operation too.
    #[must_use]
    pub fn forever(mut self) -> FaultPlan {
        self.frequency = FaultFrequency::Forever;
        self
    }

    /// The same plan, for paths that contain `part` only.
    #[must_use]
    pub fn in_path(mut self, part: impl Into<String>) -> FaultPlan {
        self.path_contains = Some(part.into());
        self
    }

    /// The same plan, for operations after this many triggered faults only. Used for the second fault of a pair.
    #[must_use]
    pub fn after_faults(mut self, faults: u64) -> FaultPlan {
        self.after_faults = faults;
        self
    }
}

/// A file system that wraps another one and injects the faults of its [`FaultPlan`]s. A clone is the same file
/// system.
///
/// ```
/// use azekura::fs::{Fs, OpenMode};
/// use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind};
/// use std::{io, path::Path, sync::Arc};
///
/// # fn main() -> azekura::Result<()> {
/// let fs = FaultFs::new(Arc::new(MemFs::new()));
/// fs.inject(FaultPlan::new(OpKind::Write, 2, Fault::Error(io::ErrorKind::StorageFull)).in_path("log"));
///
/// let file = fs.open(Path::new("/log"), OpenMode::Create)?;
/// file.write_at(b"first", 0)?;
/// let error = file.write_at(b"second", 5).unwrap_err();
/// assert_eq!(error.kind(), azekura::ErrorKind::OutOfSpace);
/// file.write_at(b"third", 5)?;
/// assert_eq!((fs.count(OpKind::Write), fs.fault_count()), (3, 1));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FaultFs {
    inner: Arc<dyn Fs>,
    state: Arc<Mutex<FaultState>>,
}

/// Plans and counters, shared by the file system and every file that was opened through it.
#[derive(Debug, Default)]
struct FaultState {
    counts: [u64; OP_KIND_COUNT],
    fault_count: u64,
    plans: Vec<ArmedFault>,
    /// Number of open files and locks, and its limit.
    open: usize,
    open_max: Option<usize>,
    holds_syncs: bool,
}

#[derive(Debug)]
struct ArmedFault {
    plan: FaultPlan,
    matched: u64,
}

impl FaultState {
    /// Counts an operation on `paths` and returns the fault that applies to it. Every plan that matches counts the
    /// operation; the oldest plan that is due determines the fault.
    fn record_op(&mut self, op: OpKind, paths: &[&Path]) -> Option<Fault> {
        self.counts[op as usize] += 1;
        self.counts[OpKind::Any as usize] += 1;
        let mut fault = None;
        for armed in &mut self.plans {
            let plan = &armed.plan;
            let kind = plan.op == op || plan.op == OpKind::Any;
            let part = plan.path_contains.as_deref().unwrap_or("");
            if kind
                && self.fault_count >= plan.after_faults
                && paths.iter().any(|path| path.to_string_lossy().contains(part))
            {
                armed.matched += 1;
                let first = plan.nth.max(1);
                let due =
                    armed.matched == first || (armed.matched > first && plan.frequency == FaultFrequency::Forever);
                fault = fault.or(due.then_some(plan.fault));
            }
        }
        self.fault_count += u64::from(fault.is_some());
        fault
    }
}

fn lock_state(state: &Mutex<FaultState>) -> MutexGuard<'_, FaultState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn injected_error(kind: io::ErrorKind, path: &Path) -> Error {
    Error::io("run the operation: a fault was injected", &kind.into()).in_file(path)
}

fn too_many_open_files(path: &Path) -> Error {
    Error::io("open", &io::Error::from_raw_os_error(EMFILE)).in_file(path)
}

/// Converts a fault of an operation that cannot be done by half into its error. `Ok` if the operation is to be done.
fn fault_to_result(fault: Option<Fault>, path: &Path) -> Result<()> {
    match fault {
        None | Some(Fault::LyingSync) => Ok(()),
        Some(Fault::Short) => Err(injected_error(io::ErrorKind::Other, path)),
        Some(Fault::Error(kind)) => Err(injected_error(kind, path)),
        Some(Fault::TooManyOpenFiles) => Err(too_many_open_files(path)),
    }
}

impl FaultFs {
    /// Wraps `inner`, without faults.
    pub fn new(inner: Arc<dyn Fs>) -> FaultFs {
        FaultFs { inner, state: Arc::default() }
    }

    /// Adds a fault. It also applies to files that are already open.
    pub fn inject(&self, plan: FaultPlan) {
        lock_state(&self.state).plans.push(ArmedFault { plan, matched: 0 });
    }

    /// Removes all plans. Later operations succeed.
    pub fn clear_faults(&self) {
        lock_state(&self.state).plans.clear();
    }

    /// While `holds` is set, syncs of files do not return.
    pub fn hold_syncs(&self, holds: bool) {
        lock_state(&self.state).holds_syncs = holds;
    }

    /// Number of operations of that kind so far, including operations with a fault.
    pub fn count(&self, op: OpKind) -> u64 {
        lock_state(&self.state).counts[op as usize]
    }

    /// Number of triggered faults so far.
    pub fn fault_count(&self) -> u64 {
        lock_state(&self.state).fault_count
    }

    /// Limits the number of open files and locks, including those that are open now. An open beyond the limit fails
    /// as it does when a process has too many open files. `None`: no limit.
    pub fn limit_open(&self, max: Option<usize>) {
        lock_state(&self.state).open_max = max;
    }

    /// Number of open files and locks.
    pub fn open_count(&self) -> usize {
        lock_state(&self.state).open
    }

    fn check(&self, op: OpKind, path: &Path) -> Result<()> {
        fault_to_result(lock_state(&self.state).record_op(op, &[path]), path)
    }

    /// Counts one more open file. Fails if the limit is reached.
    fn open_token(&self, path: &Path) -> Result<OpenFileToken> {
        let mut state = lock_state(&self.state);
        if state.open_max.is_some_and(|max| state.open >= max) {
            return Err(too_many_open_files(path));
        }
        state.open += 1;
        Ok(OpenFileToken(Arc::clone(&self.state)))
    }

    fn open_with(
        &self,
        path: &Path,
        mode: OpenMode,
        open: impl FnOnce() -> Result<Arc<dyn File>>,
    ) -> Result<Arc<dyn File>> {
        self.check(if mode == OpenMode::Create { OpKind::Create } else { OpKind::Open }, path)?;
        let token = self.open_token(path)?;
        Ok(Arc::new(FaultFile {
            inner: open()?,
            path: path.to_path_buf(),
            state: Arc::clone(&self.state),
            _token: token,
        }))
    }

    fn check_two_paths(&self, op: OpKind, from: &Path, to: &Path) -> Result<()> {
        fault_to_result(lock_state(&self.state).record_op(op, &[from, to]), from)
    }
}

impl fmt::Debug for FaultFs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultFs")
            .field("inner", &self.inner)
            .field("faults", &self.fault_count())
            .finish_non_exhaustive()
    }
}

impl Fs for FaultFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.open_with(path, mode, || self.inner.open(path, mode))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.open_with(path, mode, || self.inner.open_direct(path, mode))
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.check(OpKind::CreateDir, path)?;
        self.inner.create_dir_all(path)
    }

    fn create_dir(&self, path: &Path) -> Result<()> {
        self.check(OpKind::CreateDir, path)?;
        self.inner.create_dir(path)
    }

    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        self.inner.absolute(path)
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.check(OpKind::ReadDir, path)?;
        let _token = self.open_token(path)?;
        self.inner.read_dir(path)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        self.check(OpKind::Exists, path)?;
        self.inner.exists(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.check_two_paths(OpKind::Rename, from, to)?;
        self.inner.rename(from, to)
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        self.check_two_paths(OpKind::Rename, from, to)?;
        self.inner.rename_noreplace(from, to)
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.check(OpKind::RemoveFile, path)?;
        self.inner.remove_file(path)
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.check(OpKind::RemoveDir, path)?;
        self.inner.remove_dir_all(path)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        self.check_two_paths(OpKind::HardLink, from, to)?;
        self.inner.hard_link(from, to)
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let fault = lock_state(&self.state).record_op(OpKind::SyncDir, &[path]);
        fault_to_result(fault, path)?;
        let _token = self.open_token(path)?;
        if fault.is_some() { Ok(()) } else { self.inner.sync_dir(path) }
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.check(OpKind::Lock, path)?;
        let token = self.open_token(path)?;
        Ok(Box::new(FaultLock { _inner: self.inner.lock(path, mode)?, _token: token }))
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.check(OpKind::Lock, dir)?;
        self.inner.lock_dir(dir, mode)
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.inner.overwrites_in_place(dir)
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        self.inner.persistence_level(dir)
    }
}

/// Counts as one open file until it is dropped.
#[derive(Debug)]
struct OpenFileToken(Arc<Mutex<FaultState>>);

impl Drop for OpenFileToken {
    fn drop(&mut self) {
        lock_state(&self.0).open -= 1;
    }
}

#[derive(Debug)]
struct FaultLock {
    _inner: Box<dyn FileLock>,
    _token: OpenFileToken,
}

impl FileLock for FaultLock {}

#[derive(Debug)]
struct FaultFile {
    inner: Arc<dyn File>,
    path: PathBuf,
    state: Arc<Mutex<FaultState>>,
    _token: OpenFileToken,
}

impl FaultFile {
    fn record_op(&self, op: OpKind) -> Option<Fault> {
        lock_state(&self.state).record_op(op, &[&self.path])
    }

    fn check(&self, op: OpKind) -> Result<()> {
        fault_to_result(self.record_op(op), &self.path)
    }

    fn sync(&self, done: impl FnOnce() -> Result<()>) -> Result<()> {
        while lock_state(&self.state).holds_syncs {
            std::thread::yield_now();
        }
        let fault = self.record_op(OpKind::Sync);
        fault_to_result(fault, &self.path)?;
        if fault.is_some() { Ok(()) } else { done() }
    }

    fn allocate_with(&self, len: u64, allocate: impl Fn(u64) -> Result<()>) -> Result<()> {
        match self.record_op(OpKind::Allocate) {
            Some(Fault::Short) => {
                let now = self.inner.length()?;
                allocate(now + len.saturating_sub(now) / 2)?;
                Err(injected_error(io::ErrorKind::StorageFull, &self.path))
            }
            fault => {
                fault_to_result(fault, &self.path)?;
                allocate(len)
            }
        }
    }
}

impl File for FaultFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        match self.record_op(OpKind::Read) {
            Some(Fault::Short) => {
                let half = buf.len() / 2;
                self.inner.read_at(&mut buf[..half], offset)
            }
            fault => {
                fault_to_result(fault, &self.path)?;
                self.inner.read_at(buf, offset)
            }
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let got = self.read_at(buf, offset)?;
        check_read_len(got, buf.len(), offset).map_err(|e| e.in_file(&self.path))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        match self.record_op(OpKind::Write) {
            Some(Fault::Short) => {
                self.inner.write_at(&bytes[..bytes.len() / 2], offset)?;
                Err(injected_error(io::ErrorKind::WriteZero, &self.path))
            }
            fault => {
                fault_to_result(fault, &self.path)?;
                self.inner.write_at(bytes, offset)
            }
        }
    }

    fn length(&self) -> Result<u64> {
        self.check(OpKind::Length)?;
        self.inner.length()
    }

    fn set_length(&self, len: u64) -> Result<()> {
        self.check(OpKind::SetLength)?;
        self.inner.set_length(len)
    }

    fn allocate(&self, len: u64) -> Result<()> {
        self.allocate_with(len, |len| self.inner.allocate(len))
    }

    fn allocate_from(&self, from: u64, len: u64) -> Result<()> {
        self.allocate_with(len, |len| self.inner.allocate_from(from, len))
    }

    fn sync_data(&self) -> Result<()> {
        self.sync(|| self.inner.sync_data())
    }

    fn sync_all(&self) -> Result<()> {
        self.sync(|| self.inner.sync_all())
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        self.check(OpKind::Map)?;
        let (path, state) = (self.path.clone(), Arc::clone(&self.state));
        Ok(self.inner.map(len)?.map(|inner| Box::new(FaultMapping { inner, path, state }) as Box<dyn Mapping>))
    }

    /// Stores into mapped memory cannot fail later, so the fault occurs here.
    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        self.check(OpKind::Map)?;
        self.inner.map_memory(len)
    }

    fn map_for_reading(&self, len: u64) -> Result<Option<Arc<MappedBytes>>> {
        self.check(OpKind::Map)?;
        self.inner.map_for_reading(len)
    }
}

#[derive(Debug)]
struct FaultMapping {
    inner: Box<dyn Mapping>,
    path: PathBuf,
    state: Arc<Mutex<FaultState>>,
}

impl Mapping for FaultMapping {
    fn write_at(&self, bytes: &[u8], offset: u64) {
        self.inner.write_at(bytes, offset);
    }

    fn populate(&self, offset: u64, len: u64) -> Result<()> {
        match lock_state(&self.state).record_op(OpKind::Populate, &[&self.path]) {
            Some(Fault::Short) => {
                self.inner.populate(offset, len / 2)?;
                Err(injected_error(io::ErrorKind::Other, &self.path))
            }
            fault => {
                fault_to_result(fault, &self.path)?;
                self.inner.populate(offset, len)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::testing::{MemFs, Survival};

    fn faulty() -> (MemFs, FaultFs, Arc<dyn File>) {
        let inner = MemFs::new();
        let fs = FaultFs::new(Arc::new(inner.clone()));
        let file = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
        fs.sync_dir(Path::new("/")).unwrap();
        (inner, fs, file)
    }

    fn error(kind: io::ErrorKind) -> Fault {
        Fault::Error(kind)
    }

    #[test]
    fn nth_operation_fails_once_or_forever() {
        let (_, fs, file) = faulty();
        fs.inject(FaultPlan::new(OpKind::Write, 3, error(io::ErrorKind::StorageFull)));
        let outcome = |file: &Arc<dyn File>| (0..5).map(|_| file.write_at(b"x", 0).is_ok()).collect::<Vec<_>>();
        assert_eq!(outcome(&file), [true, true, false, true, true]);
        fs.inject(FaultPlan::new(OpKind::Write, 4, error(io::ErrorKind::StorageFull)).forever());
        assert_eq!(outcome(&file), [true, true, true, false, false]);
        let e = file.write_at(b"x", 0).unwrap_err();
        assert_eq!((e.kind(), e.os_kind()), (ErrorKind::OutOfSpace, Some(io::ErrorKind::StorageFull)));
        assert_eq!((e.file(), fs.fault_count(), fs.count(OpKind::Write)), (Some(Path::new("/f")), 4, 11));
        fs.clear_faults();
        assert!(outcome(&file).iter().all(|ok| *ok));
    }

    #[test]
    fn only_matching_paths_are_counted_and_fail() {
        let (_, fs, file) = faulty();
        fs.inject(FaultPlan::new(OpKind::Any, 1, error(io::ErrorKind::Other)).in_path("wal").forever());
        file.write_at(b"x", 0).unwrap();
        assert!(fs.open(Path::new("/1.wal"), OpenMode::Create).is_err());
        assert!(fs.rename(Path::new("/f"), Path::new("/2.wal")).is_err(), "either path of a rename counts");
        assert!(fs.exists(Path::new("/f")).unwrap());
    }

    #[test]
    fn plan_after_faults_waits_for_first_fault() {
        let (_, fs, file) = faulty();
        let broken = error(io::ErrorKind::Other);
        fs.inject(FaultPlan::new(OpKind::Write, 2, broken).after_faults(1));
        fs.inject(FaultPlan::new(OpKind::Write, 3, broken));
        let outcome: Vec<bool> = (0..7).map(|_| file.write_at(b"x", 0).is_ok()).collect();
        assert_eq!(outcome, [true, true, false, true, false, true, true]);
    }

    #[test]
    fn short_does_the_first_half() {
        let (_, fs, file) = faulty();
        file.write_at(b"12345678", 0).unwrap();
        let next = |op| fs.inject(FaultPlan::new(op, 1, Fault::Short));
        next(OpKind::Write);
        assert_eq!(file.write_at(b"abcd", 0).unwrap_err().kind(), ErrorKind::Io);
        let mut buf = [0; 8];
        next(OpKind::Read);
        assert_eq!(file.read_at(&mut buf, 0).unwrap(), 4);
        assert_eq!(&buf, b"ab34\0\0\0\0");
        next(OpKind::Read);
        assert_eq!(file.read_exact_at(&mut buf, 0).unwrap_err().kind(), ErrorKind::Corruption);
        next(OpKind::Allocate);
        assert_eq!(file.allocate(108).unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert_eq!(file.length().unwrap(), 58);
        next(OpKind::Sync);
        assert!(file.sync_all().is_err());
    }

    #[test]
    fn lying_sync_reports_success_and_loses_data() {
        let (inner, fs, file) = faulty();
        file.write_at(b"synced", 0).unwrap();
        file.sync_data().unwrap();
        fs.inject(FaultPlan::new(OpKind::Sync, 1, Fault::LyingSync));
        fs.inject(FaultPlan::new(OpKind::SyncDir, 1, Fault::LyingSync));
        file.write_at(b"lied to", 0).unwrap();
        file.sync_data().unwrap();
        fs.rename(Path::new("/f"), Path::new("/g")).unwrap();
        fs.sync_dir(Path::new("/")).unwrap();
        assert_eq!(fs.fault_count(), 2);
        inner.crash(Survival::Nothing, 0);
        assert_eq!(fs.open(Path::new("/f"), OpenMode::Read).unwrap().length().unwrap(), 6);
    }

    #[test]
    fn populate_fails_at_the_planned_call() {
        let (_, fs, file) = faulty();
        file.allocate(1 << 16).unwrap();
        let mapping = file.map(1 << 16).unwrap().unwrap();
        fs.inject(FaultPlan::new(OpKind::Populate, 2, error(io::ErrorKind::StorageFull)));
        mapping.populate(0, 4096).unwrap();
        assert_eq!(mapping.populate(4096, 4096).unwrap_err().kind(), ErrorKind::OutOfSpace);
        mapping.write_at(b"here", 0);
        let mut buf = [0; 4];
        file.read_exact_at(&mut buf, 0).unwrap();
        assert_eq!(&buf, b"here");
    }

    #[test]
    fn every_operation_kind_can_fail_and_is_counted() {
        let (_, fs, file) = faulty();
        file.allocate(8192).unwrap();
        let mapping = file.map(8192).unwrap().unwrap();
        let (f, g) = (Path::new("/f"), Path::new("/g"));
        type Run<'a> = Box<dyn Fn() -> Result<()> + 'a>;
        let all: Vec<(OpKind, Run<'_>)> = vec![
            (OpKind::Open, Box::new(|| fs.open(f, OpenMode::Read).map(|_| ()))),
            (OpKind::Create, Box::new(|| fs.open(g, OpenMode::Create).map(|_| ()))),
            (OpKind::CreateDir, Box::new(|| fs.create_dir_all(Path::new("/d")))),
            (OpKind::ReadDir, Box::new(|| fs.read_dir(Path::new("/")).map(|_| ()))),
            (OpKind::Exists, Box::new(|| fs.exists(f).map(|_| ()))),
            (OpKind::Rename, Box::new(|| fs.rename(g, Path::new("/h")))),
            (OpKind::RemoveFile, Box::new(|| fs.remove_file(Path::new("/h")))),
            (OpKind::RemoveDir, Box::new(|| fs.remove_dir_all(Path::new("/d")))),
            (OpKind::HardLink, Box::new(|| fs.hard_link(f, Path::new("/l")))),
            (OpKind::SyncDir, Box::new(|| fs.sync_dir(Path::new("/")))),
            (OpKind::Lock, Box::new(|| fs.lock(f, LockMode::Shared).map(|_| ()))),
            (OpKind::Read, Box::new(|| file.read_at(&mut [0], 0).map(|_| ()))),
            (OpKind::Write, Box::new(|| file.write_at(b"x", 0))),
            (OpKind::Length, Box::new(|| file.length().map(|_| ()))),
            (OpKind::SetLength, Box::new(|| file.set_length(8192))),
            (OpKind::Allocate, Box::new(|| file.allocate(8192))),
            (OpKind::Sync, Box::new(|| file.sync_data())),
            (OpKind::Sync, Box::new(|| file.sync_all())),
            (OpKind::Map, Box::new(|| file.map(8192).map(|_| ()))),
            (OpKind::Populate, Box::new(|| mapping.populate(0, 4096))),
        ];
        for (op, run) in &all {
            let (ops, any) = (fs.count(*op), fs.count(OpKind::Any));
            fs.inject(FaultPlan::new(*op, 0, error(io::ErrorKind::PermissionDenied)));
            assert_eq!(run().unwrap_err().os_kind(), Some(io::ErrorKind::PermissionDenied), "{op:?}");
            run().unwrap_or_else(|e| panic!("{op:?} failed without a fault: {e}"));
            assert_eq!((fs.count(*op), fs.count(OpKind::Any)), (ops + 2, any + 2), "{op:?}");
        }
        assert_eq!(
            all.iter().map(|(op, _)| *op as usize).collect::<std::collections::BTreeSet<_>>().len(),
            OP_KIND_COUNT - 1
        );
    }
}
