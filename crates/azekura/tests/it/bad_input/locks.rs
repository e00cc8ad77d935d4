//! A directory has one writer or many readers, in this process and in others.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::Env;
use azekura::testing::{MemFs, TestEnv};
use azekura::{Config, ErrorKind};

use super::{config, expect_error};

/// Set in the process that holds the lock for a test; the value is the directory.
const HOLDER_ENV: &str = "AZEKURA_LOCK_HOLDER";

/// The other process: opens the database, prints the result, and waits for the end of its input.
#[test]
fn lock_holder_process() {
    let Some(dir) = std::env::var_os(HOLDER_ENV).map(PathBuf::from) else { return };
    let opened = config(&dir).open();
    let mut out = std::io::stdout();
    let word = opened.as_ref().map_or_else(|e| format!("{:?}", e.kind()), |_| "holds".to_owned());
    writeln!(out, "\nsays {word}").and_then(|()| out.flush()).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(opened);
}

/// The other process and its output.
fn start_lock_holder(dir: &Path) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["bad_input::locks::lock_holder_process", "--exact", "--nocapture", "--test-threads=1"])
        .env(HOLDER_ENV, dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let word = lines.into_iter().find_map(|line| line.strip_prefix("says ").map(str::to_owned));
    (child, word.expect("the child prints its result"))
}

#[test]
fn a_second_opening_is_locked_in_this_process() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    let db = config(&dir).open().unwrap();
    for opened in [config(&dir).open(), config(&dir).open_read_only()] {
        let error = expect_error(opened);
        assert_eq!((error.kind(), error.file()), (ErrorKind::Locked, Some(&*dir.join("LOCK"))), "{error}");
        let named = error.message().contains(&format!("this process ({}) has the database open", std::process::id()));
        assert!(named || !cfg!(target_os = "linux"), "{error}");
    }
    db.open_partition("p", Default::default()).unwrap().insert("k", "v").unwrap();
    drop(db);
    config(&dir).open().unwrap();
}

#[test]
fn lock_is_held_across_processes_until_exit() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    let db = config(&dir).open().unwrap();
    let (child, word) = start_lock_holder(&dir);
    assert_eq!(word, "Locked");
    child.wait_with_output().unwrap();
    drop(db);
    let (mut child, word) = start_lock_holder(&dir);
    assert_eq!(word, "holds");
    let error = expect_error(config(&dir).open());
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert!(error.message().contains(&format!("process {} (", child.id())) || !cfg!(target_os = "linux"), "{error}");
    assert_eq!(expect_error(config(&dir).open_read_only()).kind(), ErrorKind::Locked);
    child.kill().unwrap();
    child.wait().unwrap();
    config(&dir).open().unwrap();
}

/// Regression: a service that replaces another one had to poll, because the second open failed at once.
#[test]
fn open_waits_for_lock_by_the_env_clock() {
    let (fs, env) = (MemFs::new(), TestEnv::new(1));
    let config = || Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).env(Arc::new(env.clone())).workers(0);
    let first = config().open().unwrap();
    let waiting = || config().wait_for_lock(Duration::from_secs(3));
    for opened in [waiting().open(), waiting().open_read_only()] {
        assert_eq!(expect_error(opened).kind(), ErrorKind::Locked);
    }
    assert_eq!(env.monotonic_ns(), 6_000_000_000, "no pause reaches beyond the end");
    env.run_backwards(); // the pauses are counted
    assert_eq!(expect_error(waiting().open()).kind(), ErrorKind::Locked);
    let (env, year) = (TestEnv::new(2), Duration::from_secs(365 * 86_400));
    std::thread::scope(|threads| {
        let second = threads.spawn(|| config().env(Arc::new(env.clone())).wait_for_lock(year).open().unwrap());
        while env.monotonic_ns() < 1_000_000_000 {
            std::thread::yield_now(); // it has not slept for a second yet
        }
        drop(first);
        second.join().unwrap().close().unwrap();
    });
}

#[test]
fn leftover_lock_file_does_not_lock() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("LOCK"), b"12345").unwrap();
    config(&dir).open().unwrap();
    std::fs::remove_file(dir.join("LOCK")).unwrap();
    config(&dir).open().unwrap();
}
