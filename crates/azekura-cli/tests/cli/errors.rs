//! Error messages and exit codes.

use azekura::Config;

use super::fixture::CliFixture;

/// Commands that read the database "d", which has an entry "k".
pub(crate) const READING: [&str; 10] = [
    "get --db d k",
    "scan --db d",
    "count --db d",
    "stats --db d",
    "levels --db d",
    "blobs --db d",
    "gc scan --db d",
    "partitions --db d list",
    "verify --db d",
    "export --db d -",
];

#[test]
fn missing_database_is_an_error() {
    let p = CliFixture::new();
    for line in [
        "get --db nowhere k",
        "scan --db nowhere",
        "del --db nowhere k",
        "stats --db nowhere",
        "verify --db nowhere",
        "blobs --db nowhere",
        "gc scan --db nowhere",
        "gc run --db nowhere",
    ] {
        let ran = p.run(line);
        assert_eq!(ran.code, Some(3), "{line}: {ran:?}");
        assert!(ran.err.contains("no database") && ran.err.contains("nowhere"), "{line}: {ran:?}");
        assert!(!p.path("nowhere").exists(), "{line} created something");
    }
}

#[test]
fn foreign_directory_is_refused_and_unchanged() {
    let p = CliFixture::new();
    std::fs::create_dir(p.path("holiday")).unwrap();
    std::fs::write(p.path("holiday/photo.jpg"), "not a table").unwrap();
    std::fs::write(p.path("file"), "not even a directory").unwrap();
    for line in [
        "put --create --db holiday k v",
        "get --db holiday k",
        "import --db holiday tmp",
        "compact --db holiday",
        "get --db file k",
    ] {
        let ran = p.run(&format!("{line} --json"));
        assert_eq!(ran.code, Some(3), "{line}: {ran:?}");
        let error = ran.error();
        assert!(error["file"].as_str().is_some_and(|f| f.contains("holiday") || f.contains("file")), "{line}: {error}");
        assert!(error["message"].as_str().is_some_and(|m| m.len() > 10), "{line}: {error}");
    }
    let names: Vec<_> = std::fs::read_dir(p.path("holiday")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["photo.jpg"]);
    std::fs::write(p.path("holiday/MANIFEST"), "this is no manifest either").unwrap();
    let ran = p.run("get --db holiday k");
    assert!(matches!(ran.code, Some(3 | 5)), "{ran:?}");
    assert!(ran.err.contains("MANIFEST"), "{ran:?}");
}

#[test]
fn open_database_is_locked() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    let writer = Config::new(p.path("d")).open().unwrap();
    for line in [
        "put --create --db d k v",
        "merge --db d k v",
        "del --db d k",
        "clear --db d --yes",
        "compact --db d",
        "gc run --db d",
        "checkpoint --db d copy",
        "partitions --db d create p",
        "partitions --db d drop default --yes",
    ] {
        let ran = p.run(&format!("{line} --json"));
        assert_eq!(ran.code, Some(4), "{line}: {ran:?}");
        let error = ran.error();
        assert_eq!(error["kind"], "locked", "{line}");
        if cfg!(target_os = "linux") {
            assert_eq!(error["holders"][0]["pid"], std::process::id(), "{line}: {error}");
            assert_eq!(error["holders"][0]["mode"], "write", "{line}: {error}");
            let text = p.run(line).err;
            let named = text.contains(&format!("process {} (", std::process::id()));
            assert!(named && text.contains("has the database open for writing"), "{line}: {text}");
        }
    }
    writer.close().unwrap();

    let reader = Config::new(p.path("d")).open_read_only().unwrap();
    for line in READING {
        assert_eq!(p.run(line).code, Some(0), "{line} while a reader is open");
    }
    let refused = p.run("put --create --db d k v");
    assert_eq!(refused.code, Some(4));
    assert!(!cfg!(target_os = "linux") || refused.err.contains("open for reading"), "{refused:?}");
    assert_eq!(p.run("gc run --db d").code, Some(4));
    reader.close().unwrap();
    assert_eq!(p.ok("get --db d k"), "v");
}

#[test]
fn reading_commands_change_nothing() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    let state = || -> Vec<_> {
        let files = walkdir::WalkDir::new(p.path("d")).sort_by_file_name().into_iter().map(Result::unwrap);
        let files = files.filter(|entry| entry.file_type().is_file());
        files.map(|f| (f.path().to_path_buf(), std::fs::read(f.path()).unwrap())).collect()
    };
    let before = state();
    for line in READING {
        assert_eq!(p.run(line).code, Some(0), "{line}");
        assert!(state() == before, "{line} changed the database");
    }
}

#[test]
fn usage_error_is_printed_as_text_and_json() {
    let p = CliFixture::new();
    let ran = p.run("get");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("Usage:"), "{ran:?}");
    let ran = p.run("get --json");
    assert_eq!(ran.code, Some(2));
    let error = ran.error();
    assert_eq!(error["kind"], "usage");
    assert!(error["message"].as_str().is_some_and(|m| m.contains("<KEY>")), "{error}");
    assert_eq!(p.run("fly").code, Some(2));
    let long = "k".repeat(70_000);
    let ran = p.run_args(["put", "--create", "--db", "d", &long, "v"]);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(ran.err.contains("65535") || ran.err.contains("65,535"), "{ran:?}");
}

#[test]
fn every_command_has_help() {
    let p = CliFixture::new();
    let all = "demo put get del scan count import export stats levels blobs gc verify compact checkpoint \
               shell partitions generate exit-codes";
    let top = p.ok("--help");
    for command in all.split_whitespace() {
        assert!(top.contains(command), "{command}");
        assert!(p.ok(&format!("help {command}")).contains("azekura"), "{command}");
    }
    assert!(p.ok("help exit-codes").contains("locked"));
    assert!(p.ok("exit-codes").contains("130"));
    assert!(p.ok("--version").starts_with("azekura "));
}

/// `eprintln!` panics if standard error is a closed pipe, so every exit code was 101.
#[test]
fn closed_pipes_do_not_change_the_exit_code() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        writer
    };
    for line in READING {
        let mut reading = p.command(line.split_whitespace());
        assert_eq!(reading.stdout(closed()).stderr(closed()).status().unwrap().code(), Some(0), "{line}");
    }
    let run = |line: &str| {
        let mut command = p.command(line.split_whitespace());
        command.stdout(std::process::Stdio::null()).stderr(closed()).status().unwrap().code()
    };
    let failing = [("get --db d none", 1), ("get --db none k", 3), ("fly", 2), ("get", 2), ("import --db d none", 3)];
    for (line, code) in failing {
        assert_eq!(run(line), Some(code), "{line}");
        assert_eq!(run(&format!("{line} --json")), Some(code), "{line} --json");
    }
    std::fs::write(p.path("long.jsonl"), format!("{{\"key\":\"{}\",\"value\":\"\"}}", "k".repeat(70_000))).unwrap();
    assert_eq!(run("import --db d long.jsonl"), Some(1));
}

/// `compact`, `delete` and others created a database in an empty directory.
#[test]
fn no_database_is_made_by_maintenance() {
    let p = CliFixture::new();
    std::fs::create_dir(p.path("empty")).unwrap();
    for line in
        ["compact", "del k", "gc run --space-amp 1.5", "partitions drop p --yes", "get k", "stats", "checkpoint copy"]
    {
        let ran = p.run(&format!("{line} --db empty"));
        assert!(ran.code == Some(3) && ran.err.contains("no database here"), "{line}: {ran:?}");
        assert_eq!(std::fs::read_dir(p.path("empty")).unwrap().count(), 0, "{line}");
    }
}

#[test]
fn dangling_link_has_its_own_error() {
    let p = CliFixture::new();
    std::os::unix::fs::symlink("nowhere", p.path("link")).unwrap();
    for line in
        ["get --db link k", "stats --db link", "put --create --db link k v", "import --db link tmp", "verify --db link"]
    {
        let ran = p.run(line);
        assert_eq!(ran.code, Some(3), "{line}: {ran:?}");
        assert!(ran.err.contains("symbolic link to a path that does not exist"), "{line}: {ran:?}");
    }
}

/// `verify` treated a directory without the file `LOCK` as a database without a writer.
#[test]
fn verify_notices_writer_without_lock_file() {
    let p = CliFixture::new();
    let writer = Config::new(p.path("d")).open().unwrap();
    std::fs::remove_file(p.path("d/LOCK")).unwrap();
    let beside = p.run("verify --db d");
    assert!(beside.code == Some(0) && beside.err.contains("reading beside it"), "{beside:?}");
    writer.close().unwrap();
    let alone = p.run("verify --db d");
    assert_eq!((alone.code, &*alone.err), (Some(0), ""));
    p.run("verify --db tmp");
    p.assert_cleaned_up();
}
