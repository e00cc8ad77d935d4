//! backup create, list, verify, restore, prune, watch.

#[cfg(unix)]
use std::io::{BufRead, BufReader};
#[cfg(unix)]
use std::process::Stdio;

use azekura::{Config, PersistMode};
#[cfg(unix)]
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};

use super::fixture::CliFixture;

#[test]
fn backup_is_created_listed_and_restored() {
    let p = CliFixture::new();
    p.ok("put --db d --create hello world");
    let first = p.json("backup create --db d store");
    assert!(first["uploaded_bytes"].as_u64().unwrap() > 0);
    p.ok("put --db d hello you");
    assert!(p.ok("backup create --db d store --rate-limit 100MiB").contains("uploaded"));
    assert_eq!(p.json("backup list store")["backups"].as_array().unwrap().len(), 2);
    assert!(p.ok("backup list store").contains("2 backups"));
    assert_eq!(p.json("backup verify store")["sound"], true);
    assert!(p.ok("backup verify store --quick").contains("no damage found"));
    p.ok("backup restore store copy");
    assert_eq!(p.ok("get --db copy hello"), "you");
    let id = first["id"].as_str().unwrap();
    let restored = p.json(&format!("backup restore store first --backup {id}"));
    assert_eq!(restored["backup"], id);
    assert_eq!(p.ok("get --db first hello"), "world");
    assert_eq!(p.json("backup prune --keep 1 --dry-run store")["removed_backups"][0], id);
    assert_eq!(p.json("backup prune --keep 1 store")["removed_backups"][0], id);
    assert!(p.ok("backup list store").contains("1 backup"));
}

#[test]
fn watched_database_is_restored_to_a_time() {
    let p = CliFixture::new();
    p.ok("put --db d --create hello world");
    assert!(p.ok("backup watch --db d --once store").contains("no backup"));
    p.ok("put --db d hello you");
    // The command that put the entry did not keep its log for others.
    let again = p.json("backup watch --db d --once store");
    assert!(again["backup"]["reason"].as_str().unwrap().contains("log"), "{again}");
    assert_eq!(p.ok("backup watch --db d --once store"), "");
    let restored = p.json("backup restore store copy");
    assert_eq!(restored["backup"], again["backup"]["id"]);
    assert_eq!(p.ok("get --db copy hello"), "you");
    let early = p.run("backup restore store early --until 2001-01-01T00:00:00Z");
    assert_eq!(early.code, Some(3), "{early:?}");
    assert!(early.err.contains("no backup"), "{early:?}");
    p.ok("backup restore store late --until 2999-01-01T00:00:00+02:00");
    assert_eq!(p.ok("get --db late hello"), "you");
}

#[test]
fn backup_errors_have_exit_codes() {
    let p = CliFixture::new();
    p.ok("put --db d --create hello world");
    p.ok("put --db other --create hello world");
    assert_eq!(p.run("backup list store").code, Some(3));
    p.ok("backup create --db d store");
    let refused = p.run("backup create --db other store");
    assert_eq!(refused.code, Some(3));
    assert!(refused.err.contains("another prefix"), "{refused:?}");
    assert_eq!(p.run("backup restore store d").code, Some(3), "the target is not empty");
    assert_eq!(p.run("backup restore store copy --until yesterday").code, Some(2));
    assert_eq!(p.run("backup prune --keep 0 store").code, Some(2));
    let part = std::fs::read_dir(p.path("store/parts")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(part, "damaged").unwrap();
    assert_eq!(p.run("backup verify store").code, Some(1));
    assert_eq!(p.run("backup restore store copy").code, Some(5));
}

/// This process writes, and the command is another one.
#[test]
fn database_of_a_running_writer_is_backed_up() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).wal_retention(std::time::Duration::from_secs(3600)).open().unwrap();
    let fruit = db.open_partition("fruit", Default::default()).unwrap();
    let put = |value: &str| {
        fruit.insert("apple", value).unwrap();
        db.persist(PersistMode::SyncData).unwrap();
    };
    put("green");
    let created = p.run("backup create --db d store");
    assert_eq!(created.code, Some(0), "{created:?}");
    assert!(created.err.contains("another process"), "{created:?}");
    put("red");
    let shipped = p.json("backup watch --db d --once store");
    assert_eq!(shipped["shipped"]["commits"], 1, "{shipped}");
    fruit.flush().unwrap();
    put("brown");
    assert_eq!(p.json("backup watch --db d --once store")["shipped"]["commits"], 1);
    p.ok("backup restore store copy");
    assert_eq!(p.ok("get --db copy --partition fruit apple"), "brown");
    assert_eq!(p.json("backup list store")["backups"].as_array().unwrap().len(), 1, "the log was enough");
}

/// Regression: without another writer, the command was the writer until it ended, and no program could open its
/// database.
#[cfg(unix)]
#[test]
fn watched_database_can_be_opened_for_writing() {
    let p = CliFixture::new();
    p.ok("put --db d --create hello world");
    let mut watch = p.command(["backup", "watch", "--db", "d", "--every", "0.05", "--json", "store"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<serde_json::Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert!(next()["backup"].is_object());
    let db = Config::new(p.path("d")).open().unwrap();
    db.partition("default").unwrap().insert("hello", "you").unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    assert_eq!(next()["shipped"]["commits"], 1);
    signal::kill(Pid::from_raw(watch.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    p.ok("backup restore store copy");
    assert_eq!(p.ok("get --db copy hello"), "you");
}

/// Regression: commands looked at Ctrl-C only between two requests, or not at all.
#[cfg(unix)]
#[test]
fn second_ctrl_c_ends_a_call_that_waits() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).open().unwrap();
    let mut create = p.command(["backup", "create", "--db", "d", "--rate-limit", "1", "store"]);
    let mut create = create.stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(create.stderr.take().unwrap()).lines();
    assert!(errors.next().unwrap().unwrap().contains("another process"), "Ctrl-C is caught from here on");
    // Two signals that are sent at once may be one.
    let mut code = None;
    for _ in 0..2000 {
        signal::kill(Pid::from_raw(create.id() as i32), Signal::SIGINT).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        code = create.try_wait().unwrap();
        if code.is_some() {
            break;
        }
    }
    drop(create.kill());
    assert_eq!(code.unwrap().code(), Some(130));
    drop(db);
}
