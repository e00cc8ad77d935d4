//! What a test does about the other tests of its process, and what it asks of a database.

use crate::db::database::Database;

/// Waits until every call that reads a database on another thread of this process has ended, and its memory is freed.
///
/// The threads of a process share the epochs that delay the reuse of memory, pool space and file handles. A test that
/// expects something to be reusable calls this first, because other tests read at the same time.
///
/// # Example
///
/// ```
/// let reader = std::thread::spawn(|| azekura::testing::wait_for_readers());
/// assert!(reader.join().is_ok());
/// ```
pub fn wait_for_readers() {
    crate::mem::epoch::wait_for_readers();
}

/// The number of flushes of `db` that wait because another task runs alone with the disk reserve.
///
/// # Example
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).open()?;
/// assert_eq!(azekura::testing::flushes_waiting_for_space(&db), 0);
/// # Ok(()) }
/// ```
pub fn flushes_waiting_for_space(db: &Database) -> usize {
    db.handle.inner.writer.as_ref().map_or(0, |writer| writer.space.flushes_waiting())
}

/// Runs a test again in a process that runs no other test. True there: the caller does its work then. False in the
/// calling process, after the other one has ended.
///
/// The threads of a process share the epochs that delay the reuse of pool space, and the memory that waits for readers.
/// A test that compares how much fits into a full pool, or that counts memory, would depend on the readers of other
/// tests. `test` is the test's path, without the crate.
///
/// # Panics
/// If the test fails in the other process.
///
/// # Example
///
/// ```no_run
/// if azekura::testing::is_in_own_process("pools::full_pool_takes_as_much_again") {
///     // fill a pool, empty it, and fill it again
/// }
/// ```
pub fn is_in_own_process(test: &str) -> bool {
    const OWN_PROCESS_ENV: &str = "AZEKURA_OWN_PROCESS";
    if std::env::var_os(OWN_PROCESS_ENV).is_some_and(|own| own == test) {
        return true;
    }
    let program = std::env::current_exe().expect("a test knows its program");
    let mut command = std::process::Command::new(program);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(OWN_PROCESS_ENV, test);
    let output = command.output().expect("a test can start its program");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    false
}
