//! Time limits: a test that hangs or waits in vain fails with a message.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit, far above the time that a slow machine needs.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs `body` on another thread and fails if it takes longer than ten minutes. Passes a panic of `body` on.
pub(crate) fn run_with_timeout<T: Send + 'static>(what: &str, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let running = thread::spawn(move || {
        let result = body();
        // The receiver was dropped if the time limit has passed.
        done.send(()).ok();
        result
    });
    match wait.recv_timeout(TIMEOUT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => match running.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        },
    }
}

/// Waits until `condition` holds; fails after ten minutes.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "not reached: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
