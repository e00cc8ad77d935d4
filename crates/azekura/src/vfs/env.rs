//! Clocks, random numbers, threads, and the identity of the process. A forked child has the memory and the open files
//! of its parent and must not use them.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::base::{Error, Result};
use crate::vfs::platform::{extras, family};

/// A running thread.
///
/// ```
/// use azekura::fs::{Env, SystemEnv, Thread};
/// let env = SystemEnv::new();
/// let thread = env.spawn("example", Box::new(|| assert_eq!(1 + 1, 2))).unwrap();
/// assert!(!thread.is_current());
/// assert!(thread.join()); // ended without a panic
/// ```
pub trait Thread: Send + Sync {
    /// Waits until the thread ends. Returns true if it ended without a panic. Must not be called on the thread
    /// itself.
    fn join(self: Box<Self>) -> bool;

    /// Whether the caller runs on this thread.
    fn is_current(&self) -> bool;
}

/// Clocks, random numbers, threads and limits of the process: everything from the operating system except files.
/// Thread safe.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::fs::{Env, SystemEnv, Thread};
/// use std::sync::Arc;
/// use std::time::Duration;
/// /// The environment of the machine in a container that has little memory.
/// struct SmallMachine(SystemEnv);
/// impl Env for SmallMachine {
///     fn now_ms(&self) -> u64 { self.0.now_ms() }
///     fn monotonic_ns(&self) -> u64 { self.0.monotonic_ns() }
///     fn random(&self, out: &mut [u8]) { self.0.random(out) }
///     fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> azekura::Result<Box<dyn Thread>> {
///         self.0.spawn(name, body)
///     }
///     fn sleep(&self, duration: Duration) { self.0.sleep(duration) }
///     fn memory_limit(&self) -> Option<u64> { Some(256 << 20) }
/// }
/// let db = azekura::Config::new(&path).env(Arc::new(SmallMachine(SystemEnv::new()))).open()?;
/// assert!(db.open_partition("fruit", Default::default()).is_ok());
/// # Ok(()) }
/// ```
pub trait Env: Send + Sync {
    /// The wall clock in milliseconds since 1970. It may jump.
    fn now_ms(&self) -> u64;

    /// A clock that never goes back, in nanoseconds since an arbitrary start. If it goes back all the same, intervals
    /// count as 0.
    fn monotonic_ns(&self) -> u64;

    /// Fills `out` with random bytes. They are unpredictable in production.
    fn random(&self, out: &mut [u8]);

    /// Starts a thread.
    ///
    /// # Errors
    /// `Io` if the system cannot start another thread.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>>;

    /// Suspends the calling thread for `duration`, as measured by the clocks of this environment.
    fn sleep(&self, duration: Duration);

    /// A number that is the same in all threads of the process and different in every child that it forks.
    fn process_token(&self) -> u64 {
        process_token()
    }

    /// The most memory that the process may use, in bytes; `None` if unknown.
    fn memory_limit(&self) -> Option<u64> {
        None
    }

    /// How many more files the process may open now; `None` if unknown.
    fn available_file_handles(&self) -> Option<u64> {
        None
    }
}

/// The clocks, random numbers and threads of the machine.
///
/// ```
/// use azekura::fs::{Env, SystemEnv};
/// let env = SystemEnv::new();
/// let start = env.monotonic_ns();
/// assert!(env.monotonic_ns() >= start && env.now_ms() > 1_700_000_000_000);
/// ```
#[derive(Debug)]
pub struct SystemEnv {
    start: Instant,
}

impl SystemEnv {
    /// The environment of the machine. Its monotonic clock starts at 0.
    ///
    /// ```
    /// use azekura::fs::{Env, SystemEnv};
    /// assert!(SystemEnv::new().monotonic_ns() < 60_000_000_000); // less than a minute since `new`
    /// ```
    pub fn new() -> SystemEnv {
        SystemEnv { start: Instant::now() }
    }
}

impl Default for SystemEnv {
    fn default() -> SystemEnv {
        SystemEnv::new()
    }
}

impl Env for SystemEnv {
    fn now_ms(&self) -> u64 {
        // A clock set before 1970 counts as 1970.
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
    }

    fn monotonic_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn random(&self, out: &mut [u8]) {
        let mut rest = out;
        while !rest.is_empty() {
            match extras::random(rest) {
                0 => return random_without_system_call(rest),
                n => rest = &mut rest[n..],
            }
        }
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>> {
        spawn_thread(name, body)
    }

    fn sleep(&self, duration: Duration) {
        thread::sleep(duration);
    }

    fn memory_limit(&self) -> Option<u64> {
        let machine = extras::machine_memory();
        let group = std::fs::read_to_string(CGROUP_MEMORY_LIMIT_FILE).ok().and_then(|limit| limit.trim().parse().ok());
        machine.map_or(group, |machine| Some(group.map_or(machine, |group: u64| group.min(machine))))
    }

    fn available_file_handles(&self) -> Option<u64> {
        let limit = family::open_files_max()?;
        // If the open files cannot be listed, for example because no handle is left for the listing, half of the
        // limit counts as used.
        let open = std::fs::read_dir(OPEN_FILES_DIR).map_or(limit / 2, |open| open.count() as u64);
        Some(limit.saturating_sub(open))
    }
}

/// Directory in which the system lists the open files of the process.
const OPEN_FILES_DIR: &str = "/dev/fd";
/// File that contains the memory limit of the process's control group on Linux. A container sees its own limit.
const CGROUP_MEMORY_LIMIT_FILE: &str = "/sys/fs/cgroup/memory.max";

/// File of random bytes on Unix.
const RANDOM_FILE: &str = "/dev/urandom";

/// Reads random bytes from [`RANDOM_FILE`], or derives them from the keys that std draws from the system for each hash
/// map.
fn random_without_system_call(out: &mut [u8]) {
    if std::fs::File::open(RANDOM_FILE).and_then(|mut file| file.read_exact(out)).is_err() {
        random_from_std(out);
    }
}

fn random_from_std(out: &mut [u8]) {
    for chunk in out.chunks_mut(8) {
        let word = RandomState::new().build_hasher().finish().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

pub(crate) fn spawn_thread(name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
    let handle = spawned.map_err(|e| Error::io(&format!("start the thread {name}"), &e))?;
    Ok(Box::new(SystemThread(handle)))
}

struct SystemThread(JoinHandle<()>);

impl Thread for SystemThread {
    fn join(self: Box<Self>) -> bool {
        self.0.join().is_ok()
    }

    fn is_current(&self) -> bool {
        thread::current().id() == self.0.thread().id()
    }
}

/// The process that opened a database. A forked child has its objects, but none of its threads: a lock that another
/// thread held at the fork is never released in the child.
pub(crate) struct OpeningProcess {
    env: Arc<dyn Env>,
    token: u64,
}

impl OpeningProcess {
    /// The calling process.
    pub(crate) fn new(env: Arc<dyn Env>) -> OpeningProcess {
        let token = env.process_token();
        OpeningProcess { env, token }
    }

    /// Whether the calling process was forked from it.
    #[inline]
    pub(crate) fn has_forked_caller(&self) -> bool {
        self.env.process_token() != self.token
    }
}

/// A number that is the same in all threads of this process and different in every child that it forks.
///
/// Costs one load from memory where the kernel wipes a page on fork (Linux 4.14), and a system call elsewhere.
pub(crate) fn process_token() -> u64 {
    static WORD: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
    let Some(word) = WORD.get_or_init(extras::wiped_on_fork) else { return u64::from(std::process::id()) };
    match word.load(Ordering::Relaxed) {
        0 => assign_token(word),
        token => token,
    }
}

/// Chooses the token of a new process. The token includes the clock, because process ids are reused, and processes in
/// different namespaces may have the same id at the same time.
#[cold]
fn assign_token(word: &AtomicU64) -> u64 {
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let token = (u64::from(std::process::id()) << 32 ^ now_ns) | 1;
    word.compare_exchange(0, token, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|other| other, |_| token)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::testing::test_env::TestEnv;

    #[test]
    fn system_env_gives_time_and_random_bytes() {
        let env = SystemEnv::new();
        assert!(env.now_ms() > 1_700_000_000_000);
        let start = env.monotonic_ns();
        env.sleep(Duration::from_millis(2));
        assert!(env.monotonic_ns() - start >= 2_000_000);
        let (mut a, mut b, mut c) = ([0; 1000], [0; 1000], [0; 21]);
        env.random(&mut a);
        env.random(&mut b);
        random_from_std(&mut c);
        assert_ne!(a, b);
        assert!(a[992..] != [0; 8] && c[..8] != c[8..16] && c[16..] != [0; 5], "bytes were not filled");
        env.random(&mut []);
    }

    #[test]
    fn threads_have_names_and_report_panics() {
        for env in [&SystemEnv::new() as &dyn Env, &TestEnv::new(1)] {
            let (sender, receiver) = mpsc::channel();
            let body = move || sender.send(thread::current().name().map(str::to_owned)).unwrap();
            let running = env.spawn("azekura-1", Box::new(body)).unwrap();
            assert!(!running.is_current());
            assert_eq!(receiver.recv().unwrap().as_deref(), Some("azekura-1"));
            assert!(running.join());
            let panics = env.spawn("panics", Box::new(|| std::panic::resume_unwind(Box::new("quietly")))).unwrap();
            assert!(!panics.join());
        }
    }

    #[test]
    fn a_thread_is_current_on_itself() {
        let (thread_sender, thread_receiver) = mpsc::channel::<Box<dyn Thread>>();
        let (sender, receiver) = mpsc::channel();
        let body = move || sender.send(thread_receiver.recv().unwrap().is_current()).unwrap();
        thread_sender.send(SystemEnv::new().spawn("self", Box::new(body)).unwrap()).unwrap();
        assert!(receiver.recv().unwrap());
    }
}
