//! Time, random numbers, threads, and the identity of the process. A forked child has the memory and the open files
//! of its parent and must not use them.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::base::{Error, Result};
use crate::vfs::mmap::wiped_on_fork;
use crate::vfs::seeded_rng::SeededRng;

/// A running thread.
pub trait Thread: Send + Sync {
    /// Waits for its end; true if it ended without a panic. Must not be called on the thread itself.
    fn join(self: Box<Self>) -> bool;

    /// Whether the caller runs on this thread.
    fn is_current(&self) -> bool;
}

/// The world beside files. Thread safe.
pub trait Env: Send + Sync {
    /// The wall clock, in milliseconds since 1970. May jump.
    fn now_ms(&self) -> u64;

    /// A clock that never goes back, in nanoseconds since some start.
    fn monotonic_ns(&self) -> u64;

    /// Fills `out` with random bytes, unpredictable in production.
    fn random(&self, out: &mut [u8]);

    /// Starts a thread.
    ///
    /// # Errors
    /// `Io` if the system has none to give.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>>;

    /// Waits.
    fn sleep(&self, duration: Duration);

    /// A number that is the same in all threads of the process, and another one in a child that it forks.
    fn process_token(&self) -> u64 {
        process_token()
    }

    /// Bytes of memory that the process could ever have; `None` where that is not known.
    fn memory_limit(&self) -> Option<u64> {
        None
    }

    /// How many more files the process may open now; `None` where that is not known.
    fn available_file_handles(&self) -> Option<u64> {
        None
    }
}

/// The machine: its clocks, its random numbers, its threads.
#[derive(Debug)]
pub struct SystemEnv {
    start: Instant,
}

impl SystemEnv {
    /// The machine.
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
            match retry_on_intr(|| getrandom(&mut *rest, GetRandomFlags::empty())) {
                Ok(n) if n > 0 => rest = &mut rest[n..],
                // A kernel or a sandbox without the call: std finds keys for its hash maps another way.
                _ => return random_from_std(rest),
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
        let machine = machine_memory();
        let group = std::fs::read_to_string(CGROUP_MEMORY_LIMIT_FILE).ok().and_then(|limit| limit.trim().parse().ok());
        machine.map_or(group, |machine| Some(group.map_or(machine, |group: u64| group.min(machine))))
    }

    fn available_file_handles(&self) -> Option<u64> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
        // Where open files are not listed, or none is left to list them with, half of the limit counts as used.
        let open = std::fs::read_dir(OPEN_FILES_DIR).map_or(limit / 2, |open| open.count() as u64);
        Some(limit.saturating_sub(open))
    }
}

/// Where the system lists the open files of the process.
const OPEN_FILES_DIR: &str = "/dev/fd";
/// Where Linux says how much memory the process's control group may use; a container sees its own.
const CGROUP_MEMORY_LIMIT_FILE: &str = "/sys/fs/cgroup/memory.max";

#[cfg(any(target_os = "linux", target_os = "android"))]
fn machine_memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).checked_mul(u64::from(info.mem_unit))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn machine_memory() -> Option<u64> {
    None
}

/// Random bytes by way of the keys that std draws from the system for each hash map.
fn random_from_std(out: &mut [u8]) {
    for chunk in out.chunks_mut(8) {
        let word = RandomState::new().build_hasher().finish().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

fn spawn_thread(name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>> {
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

/// Where [`TestEnv`]'s wall clock starts: November 2023.
const TEST_START_MS: i64 = 1_700_000_000_000;

/// Below this a virtual sleep only lets other threads run; above it it also naps, so that a thread that polls does not
/// burn a core.
const REAL_SLEEP_THRESHOLD: Duration = Duration::from_micros(100);
const REAL_SLEEP: Duration = Duration::from_micros(50);

/// A world for tests: random bytes from a seed, a clock that moves only by [`Env::sleep`] and [`TestEnv::advance`], and
/// real threads. A clone is the same world.
///
/// ```
/// use azekura::fs::{Env, TestEnv};
/// use std::time::Duration;
/// let env = TestEnv::new(7);
/// let before = env.now_ms();
/// env.sleep(Duration::from_secs(3600)); // returns at once
/// assert_eq!(env.now_ms() - before, 3_600_000);
/// ```
#[derive(Clone)]
pub struct TestEnv(Arc<TestEnvState>);

struct TestEnvState {
    elapsed_ns: AtomicU64,
    wall_ms: AtomicI64,
    rng: Mutex<SeededRng>,
}

impl TestEnv {
    /// A world whose random bytes follow from `seed`.
    pub fn new(seed: u64) -> TestEnv {
        TestEnv(Arc::new(TestEnvState {
            elapsed_ns: AtomicU64::new(0),
            wall_ms: AtomicI64::new(TEST_START_MS),
            rng: Mutex::new(SeededRng::new(seed, 0)),
        }))
    }

    /// Moves both clocks forward.
    pub fn advance(&self, duration: Duration) {
        self.0.elapsed_ns.fetch_add(duration.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Changes the wall clock by this many milliseconds, also backward; the monotonic clock does not change.
    pub fn jump_wall_clock(&self, ms: i64) {
        self.0.wall_ms.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Env for TestEnv {
    fn now_ms(&self) -> u64 {
        let elapsed = (self.monotonic_ns() / 1_000_000) as i64;
        self.0.wall_ms.load(Ordering::SeqCst).saturating_add(elapsed).max(0) as u64
    }

    fn monotonic_ns(&self) -> u64 {
        self.0.elapsed_ns.load(Ordering::SeqCst)
    }

    fn random(&self, out: &mut [u8]) {
        let mut rng = self.0.rng.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in out.chunks_mut(8) {
            chunk.copy_from_slice(&rng.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>> {
        spawn_thread(name, body)
    }

    fn sleep(&self, duration: Duration) {
        self.advance(duration);
        if duration > REAL_SLEEP_THRESHOLD {
            thread::sleep(REAL_SLEEP);
        } else {
            thread::yield_now();
        }
    }
}

impl fmt::Debug for TestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestEnv").field("now_ms", &self.now_ms()).finish_non_exhaustive()
    }
}

/// A number that is the same in all threads of this process, and another one in every child that it forks.
///
/// Costs a load from memory where the kernel wipes a page on fork (Linux 4.14), a system call elsewhere.
pub(crate) fn process_token() -> u64 {
    static WORD: OnceLock<Option<&'static AtomicU64>> = OnceLock::new();
    let Some(word) = WORD.get_or_init(wiped_on_fork) else { return u64::from(std::process::id()) };
    match word.load(Ordering::Relaxed) {
        0 => assign_token(word),
        token => token,
    }
}

/// Draws the number of a new process. The clock is in it because a process id alone comes again, in another namespace
/// even at the same time.
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

    #[test]
    fn system_env_gives_time_and_random_bytes() {
        let env = SystemEnv::new();
        assert!(env.now_ms() > TEST_START_MS as u64);
        let start = env.monotonic_ns();
        env.sleep(Duration::from_millis(2));
        assert!(env.monotonic_ns() - start >= 2_000_000);
        let (mut a, mut b, mut c) = ([0; 1000], [0; 1000], [0; 21]);
        env.random(&mut a);
        env.random(&mut b);
        random_from_std(&mut c);
        assert_ne!(a, b);
        assert!(a[992..] != [0; 8] && c[..8] != c[8..16] && c[16..] != [0; 5], "left unfilled");
        env.random(&mut []);
    }

    #[test]
    fn threads_have_names_and_report_panics() {
        for env in [&SystemEnv::new() as &dyn Env, &TestEnv::new(1)] {
            let (tell, told) = mpsc::channel();
            let body = move || tell.send(thread::current().name().map(str::to_owned)).unwrap();
            let running = env.spawn("azekura-1", Box::new(body)).unwrap();
            assert!(!running.is_current());
            assert_eq!(told.recv().unwrap().as_deref(), Some("azekura-1"));
            assert!(running.join());
            let panics = env.spawn("dies", Box::new(|| std::panic::resume_unwind(Box::new("quietly")))).unwrap();
            assert!(!panics.join());
        }
    }

    #[test]
    fn a_thread_is_current_on_itself() {
        let (give, given) = mpsc::channel::<Box<dyn Thread>>();
        let (tell, told) = mpsc::channel();
        let body = move || tell.send(given.recv().unwrap().is_current()).unwrap();
        give.send(SystemEnv::new().spawn("self", Box::new(body)).unwrap()).unwrap();
        assert!(told.recv().unwrap());
    }

    #[test]
    fn test_env_repeats_and_its_clock_is_virtual() {
        let draw = |seed| {
            let mut bytes = [0; 13];
            TestEnv::new(seed).random(&mut bytes);
            bytes
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let env = TestEnv::new(1);
        let same = env.clone();
        env.sleep(Duration::from_secs(1));
        same.advance(Duration::from_secs(2));
        assert_eq!((env.monotonic_ns(), env.now_ms()), (3_000_000_000, TEST_START_MS as u64 + 3_000));
        env.jump_wall_clock(-5_000);
        assert_eq!((same.monotonic_ns(), same.now_ms()), (3_000_000_000, TEST_START_MS as u64 - 2_000));
        env.jump_wall_clock(i64::MIN / 2);
        assert_eq!(env.now_ms(), 0);
    }
}
