//! Commands that read beside a process that writes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Stdio};

use azekura::{Config, Database, KvSeparationOptions, Partition, PartitionCreateOptions};
use serde_json::{Value, json};

use super::errors::READING;
use super::fixture::CliFixture;

/// The database "d", which the test writes to: another process than the commands.
struct Writer {
    db: Database,
    partition: Partition,
}

impl Writer {
    fn open(p: &CliFixture) -> Writer {
        let db = Config::new(p.path("d")).open().unwrap();
        let partition = db.open_partition("default", PartitionCreateOptions::default()).unwrap();
        Writer { db, partition }
    }

    fn put(&self, key: &str, value: &str) {
        self.partition.insert(key, value).unwrap();
    }

    fn seqno(&self) -> u64 {
        self.db.change_position().unwrap().sequence_number()
    }

    fn close(self) {
        drop(self.partition);
        self.db.close().unwrap();
    }
}

/// What a command says when it reads beside a writer.
fn notice(seqno: u64) -> String {
    format!("azekura: another process has the database open: reading beside it, as of sequence number {seqno}.\n")
}

/// A shell whose lines are written and read one by one.
struct PipedShell {
    child: Child,
    input: ChildStdin,
    out: BufReader<ChildStdout>,
    err: ChildStderr,
}

impl PipedShell {
    fn start(p: &CliFixture, args: &[&str]) -> PipedShell {
        let mut command = p.command([&["shell", "--db", "d"], args].concat());
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let (input, out) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let err = child.stderr.take().unwrap();
        PipedShell { child, input, out, err }
    }

    /// Sends a line, and returns the first line that it prints.
    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        let mut answer = String::new();
        self.out.read_line(&mut answer).unwrap();
        answer.trim_end().to_string()
    }

    /// Sends a line, and returns the exit code and standard error after the end of input.
    fn end(mut self, line: &str) -> (Option<i32>, String) {
        writeln!(self.input, "{line}").unwrap();
        drop(self.input);
        let mut err = String::new();
        self.err.read_to_string(&mut err).unwrap();
        (self.child.wait().unwrap().code(), err)
    }
}

#[test]
fn reading_commands_run_beside_a_writer() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    let separated = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    let pages = writer.db.open_partition("pages", separated).unwrap();
    pages.insert("long", vec![7; 100_000]).unwrap();
    pages.flush().unwrap();
    writer.put("k", "flushed");
    writer.partition.flush().unwrap();
    writer.put("k", "v");
    let seqno = writer.seqno();
    for line in READING {
        let ran = p.run(line);
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        assert!(ran.err.starts_with(&notice(seqno)), "{line}: {ran:?}");
        let notices = ran.err.lines().filter(|line| !line.contains("tables and blob files are checked")).count();
        assert_eq!(notices, 1, "{line}: {ran:?}");
        let ran = p.run(&format!("{line} --json"));
        assert_eq!(ran.code, Some(0), "{line}: {ran:?}");
        for object in ran.text().lines().filter(|_| !line.starts_with("export")) {
            assert!(serde_json::from_str::<Value>(object).is_ok(), "{line}: {object}");
        }
        let first: Value = serde_json::from_str(ran.err.lines().next().unwrap()).unwrap();
        assert_eq!(first, json!({ "notice": { "kind": "beside_writer", "sequence_number": seqno } }), "{line}");
    }
    assert_eq!(p.ok("get --db d k"), "v");
    assert_eq!(p.ok("scan --db d"), "k\tv\n");
    assert_eq!(p.ok("count --db d --partition pages"), "1\n");
    assert_eq!(p.ok("partitions --db d list"), "default\npages\n");
    assert_eq!(p.ok("export --db d -"), "{\"key\":\"k\",\"value\":\"v\"}\n");
    assert_eq!(p.ok("get --db d long --partition pages").len(), 100_000);
    assert_eq!(p.json("levels --db d")["partitions"][0]["name"], "default");
    assert_eq!(p.json("stats --db d")["follower"], json!({ "sequence_number": seqno, "behind": 0 }));
    let stats = p.ok("stats --db d");
    assert!(stats.contains(&format!("As of sequence number {seqno}; the writer was 0 sequence numbers ahead")));
    let missing = p.run("get --db d none");
    assert_eq!((missing.code, missing.err), (Some(1), notice(seqno) + "azekura: no value for none.\n"));
    writer.put("k", "later");
    assert_eq!(p.ok("get --db d k"), "later");
    writer.close();
    let alone = p.run("stats --db d --json");
    assert_eq!((alone.code, &*alone.err), (Some(0), ""));
    assert_eq!(serde_json::from_str::<Value>(&alone.text()).unwrap()["follower"], Value::Null);
    p.assert_cleaned_up();
}

/// The writer commits while a command prints more than a pipe holds.
#[test]
fn long_commands_say_how_far_behind_they_are() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    (0..200).for_each(|n| writer.put(&format!("key {n:03}"), &"v".repeat(10_000)));
    for (line, json) in [("scan --db d", false), ("export --db d -", true)] {
        let seqno = writer.seqno();
        let words = line.split(' ').chain(json.then_some("--json"));
        let mut child = p.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        out.read_exact(&mut [0]).unwrap();
        (0..3).for_each(|_| writer.put("key 000", "later"));
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert!(rest.len() > 1_900_000 && !rest.contains("later"), "{line}: {} bytes", rest.len());
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {err}");
        let last = err.lines().nth(1).unwrap_or_else(|| panic!("{line}: one notice only: {err}"));
        if json {
            let wanted = json!({ "kind": "behind_writer", "sequence_number": seqno, "behind": 3 });
            assert_eq!(serde_json::from_str::<Value>(last).unwrap(), json!({ "notice": wanted }), "{line}");
        } else {
            assert_eq!(last, "azekura: the writer was 3 sequence numbers ahead when this had been read.", "{line}");
        }
        writer.put("key 000", &"v".repeat(10_000));
    }
    writer.close();
}

#[test]
fn export_beside_a_writer_can_be_imported() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    writer.put("a", "1");
    writer.db.open_partition("other", PartitionCreateOptions::default()).unwrap().insert("b", "2").unwrap();
    p.ok("export --db d all.azk");
    p.ok("import --db copy all.azk");
    assert_eq!(p.ok("scan --db copy"), "a\t1\n");
    assert_eq!(p.ok("scan --db copy --partition other"), "b\t2\n");
    writer.close();
}

/// A byte of a table is changed while the writer has it open.
#[test]
fn verify_beside_a_writer_finds_damage() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    writer.put("k", "v");
    writer.partition.flush().unwrap();
    let sound = p.json("verify --db d");
    assert_eq!((&sound["sound"], sound["files"].as_array().unwrap().len()), (&json!(true), 1), "{sound}");
    let table = &p.files("d", "sst")[0];
    let mut bytes = std::fs::read(table).unwrap();
    bytes[70] ^= 1;
    std::fs::write(table, bytes).unwrap();
    let ran = p.run("verify --db d");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let name = table.file_name().unwrap().to_str().unwrap();
    assert!(ran.text().contains(name) && ran.text().contains("damaged"), "{ran:?}");
    writer.close();
}

#[test]
fn shell_reads_what_the_writer_commits() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    writer.put("k", "1");
    let seqno = writer.seqno();
    let mut shells = [PipedShell::start(&p, &[]), PipedShell::start(&p, &["--read-only"])];
    for (n, flushes) in [("2", false), ("3", true), ("4", false)] {
        for shell in &mut shells {
            assert_eq!(shell.ask("count"), "1");
        }
        writer.put("k", n);
        if flushes {
            writer.partition.flush().unwrap();
        }
        for shell in &mut shells {
            assert_eq!(shell.ask("get k"), n);
        }
    }
    let new = writer.db.open_partition("new", PartitionCreateOptions::default()).unwrap();
    new.insert("k", "in new").unwrap();
    let [mut writable, mut read_only] = shells;
    assert_eq!(read_only.ask("get k --partition new"), "in new");
    assert_eq!(writable.ask("get k --partition new"), "in new");
    let (code, err) = read_only.end("put k 5");
    assert!(code == Some(1) && err.contains("--read-only"), "{err}");
    let (code, err) = writable.end("put k 5");
    assert!(code == Some(1) && err.contains(": locked: "), "{err}");
    assert!(err.starts_with(&notice(seqno)), "{err}");
    assert_eq!(writer.partition.get("k").unwrap().unwrap(), "4");
    drop(new);
    writer.close();
}

/// A shell that may write does so once the other process has closed the database.
#[test]
fn shell_writes_when_the_writer_has_ended() {
    let p = CliFixture::new();
    let writer = Writer::open(&p);
    writer.put("k", "1");
    let mut shell = PipedShell::start(&p, &[]);
    assert_eq!(shell.ask("get k"), "1");
    writer.put("k", "2");
    writer.close();
    assert_eq!(shell.ask("get k"), "2");
    assert_eq!(shell.ask("begin\nput k 3\ncommit"), "1 write committed");
    assert_eq!(shell.ask("get k"), "3");
    assert_eq!(shell.end("stats").0, Some(0));
    assert_eq!(p.ok("get --db d k"), "3");
}

#[test]
fn writer_is_killed_beside_a_shell() {
    let p = CliFixture::new();
    let mut writer = PipedShell::start(&p, &["--json"]);
    writer.ask("put --create k 1");
    let mut reader = PipedShell::start(&p, &[]);
    assert_eq!(reader.ask("get k"), "1");
    writer.ask("put k 2");
    writer.child.kill().unwrap();
    writer.child.wait().unwrap();
    assert_eq!(reader.ask("get k"), "2");
    assert_eq!(p.run("get --db d k").err, "", "no process has the database open for writing");
    let next = Writer::open(&p);
    assert_eq!(reader.ask("get k"), "2");
    next.put("k", "3");
    assert_eq!(reader.ask("get k"), "3");
    next.close();
    assert_eq!(reader.end("quit").0, Some(0));
}

fn segment_contents(p: &CliFixture) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    p.files("d", "wal").into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// As after power loss: a commit that the shell has seen is lost.
#[test]
fn shell_opens_again_when_it_is_stale() {
    let p = CliFixture::new();
    let mut writer = PipedShell::start(&p, &["--json"]);
    writer.ask("put --create k 1");
    let mut reader = PipedShell::start(&p, &[]);
    assert_eq!(reader.ask("get k"), "1");
    let before = segment_contents(&p);
    writer.ask("put k lost");
    assert_eq!(reader.ask("get k"), "lost");
    writer.child.kill().unwrap();
    writer.child.wait().unwrap();
    before.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
    let next = Writer::open(&p);
    assert_eq!(reader.ask("get k"), "1");
    next.put("k", "2");
    assert_eq!(reader.ask("get k"), "2");
    let (code, err) = reader.end("quit");
    assert_eq!((code, err.matches("opening the database again").count()), (Some(0), 1), "{err}");
    next.close();
}

/// The lock of a database with a pool in mapped memory is reported, because such a pool cannot be followed.
#[test]
fn pool_in_memory_is_locked_beside_a_writer() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return };
    let p = CliFixture::in_dir(dir);
    p.ok("partitions create --db d pool --engine pmem");
    let writer = Config::new(p.path("d")).open().unwrap();
    for line in ["get --db d k --partition pool", "verify --db d", "shell --db d"] {
        let ran = p.run(&format!("{line} --json"));
        assert_eq!(ran.code, Some(4), "{line}: {ran:?}");
        let error = ran.error();
        assert_eq!(error["kind"], "locked", "{line}: {error}");
        assert!(error["message"].as_str().unwrap().contains("pool in mapped memory"), "{line}: {error}");
    }
    writer.close().unwrap();
}

fn set_modes(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    for entry in walkdir::WalkDir::new(path).contents_first(true) {
        let entry = entry.unwrap();
        let execute = if entry.file_type().is_dir() { 0o111 } else { 0 };
        std::fs::set_permissions(entry.path(), std::fs::Permissions::from_mode(mode | execute)).unwrap();
    }
}

/// The reader may only read. If this process may write anyway, because it is the superuser's, the reader has another
/// user.
#[test]
fn reader_needs_read_permission_only() {
    let mut p = CliFixture::new();
    let writer = Writer::open(&p);
    writer.put("k", "1");
    writer.partition.flush().unwrap();
    writer.put("k", "2");
    set_modes(&p.path("d"), 0o444);
    if std::fs::write(p.path("d/file"), "").is_ok() {
        std::fs::remove_file(p.path("d/file")).unwrap();
        if !p.become_other_user() {
            set_modes(&p.path("d"), 0o644);
            return println!("skipped: this process may write to every file, and cannot start one of another user");
        }
    }
    for line in READING {
        let ran = p.run(line);
        assert!(ran.code == Some(0) && ran.err.starts_with(&notice(writer.seqno())), "{line}: {ran:?}");
    }
    let mut shell = PipedShell::start(&p, &["--read-only"]);
    assert_eq!(shell.ask("get k"), "2");
    assert_eq!(shell.end("quit").0, Some(0));
    let refused = p.run("shell --db d");
    assert!(refused.code == Some(3) && refused.err.contains("Permission denied"), "{refused:?}");
    set_modes(&p.path("d"), 0o644);
    writer.close();
}
