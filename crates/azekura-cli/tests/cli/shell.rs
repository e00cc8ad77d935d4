//! shell, as a script and at a terminal.

use azekura::Config;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::fixture::{CliFixture, CliResult};
use super::terminal::Terminal;

/// Runs the lines as a script on the database "d".
fn script(p: &CliFixture, lines: &str) -> CliResult {
    p.run_with_input(["shell", "--db", "d"], lines.as_bytes())
}

/// The output of a script that must succeed.
fn ok(p: &CliFixture, lines: &str) -> String {
    let ran = script(p, lines);
    assert_eq!((ran.code, &*ran.err), (Some(0), ""), "{lines}: {ran:?}");
    ran.text()
}

#[test]
fn script_runs_every_command() {
    let p = CliFixture::new();
    let out = ok(
        &p,
        "# comment, then an empty line\n\n\
         create users --compression miniz:6\ncreate pages --kv-separation 1KiB\npartitions\n\
         put --create k v\nuse users\nput a 1\nput b 2\nput c 3\nscan\nget b\nremove a missing\ncount\n\
         scan --from b --reverse --limit 1\nscan --prefix c --keys-only\nget k --partition default\n\
         flush --partition users\ncompact --partition users\npersist\npersist sync-data\n\
         drop pages --yes\npartitions\nquit\nthis is not read\n",
    );
    let compacted = out.lines().find(|line| line.starts_with("users: ") && line.ends_with(" now"));
    let out: String = out.lines().filter(|line| !line.starts_with("users: ")).map(|line| format!("{line}|")).collect();
    let expected = "\"users\" created|\"pages\" created|pages|users|a\t1|b\t2|c\t3|2|1 of 2 keys removed|2|c\t3|c|v|\
                    \"pages\" dropped|default|users|";
    assert_eq!(out, expected);
    assert!(compacted.is_some_and(|line| line.contains("before")));
    assert_eq!(p.ok("scan --db d --partition users"), "b\t2\nc\t3\n", "one-shot commands see it");
    let stats = ok(&p, "put x y\nstats\nstats --all --partition default\n");
    assert!(stats.contains("commits, records") && stats.contains("blob GC"), "{stats}");
    assert!(ok(&p, "help\n").contains("commit"));
    assert!(ok(&p, "help scan\n").contains("--reverse"));
}

#[test]
fn words_have_quotes_escapes_and_hex() {
    let p = CliFixture::new();
    ok(&p, "put --create 'two words' \"a\\tb\\\"\"\nput \\x00\\xff ''\nput --hex cafe 00\nput caf\u{e9} \\u{e9}\n");
    let scanned = "\\x00\\xff\t\ncaf\u{e9}\t\u{e9}\ntwo words\ta\\tb\"\n\\xca\\xfe\t\\x00\n";
    assert_eq!(p.ok("scan --db d"), scanned);
    assert_eq!(ok(&p, "scan"), scanned, "a last line without its end");
    assert_eq!(ok(&p, "get \\xca\\xfe\r\nget --hex 63616fc3a9\n".replace("6f", "66").as_str()), "\\x00\nc3a9\n");
    let raw = p.run_with_input(["shell", "--db", "d"], b"put \xfe \xff\nget --hex fe\n");
    assert_eq!((raw.code, raw.text().as_str()), (Some(0), "ff\n"), "{raw:?}");
    std::fs::write(p.path("file"), [0, 10, 255]).unwrap();
    assert_eq!(ok(&p, "put f --file file\nget f\n"), "\\x00\\n\\xff\n");
}

#[test]
fn batch_is_atomic_and_can_be_aborted() {
    let p = CliFixture::new();
    let out = ok(
        &p,
        "create other\nput --create a 1\nbegin\nput b 2\nput --partition other c 3\nremove a\nscan\n\
         commit --durability sync-data\nscan\nscan --partition other\n\
         begin\nput z 9\nabort\nbegin\nrollback\nbegin\ncommit\ncount\n",
    );
    let expected = "\"other\" created\na\t1\n3 writes committed\nb\t2\nc\t3\n1 write discarded\n0 writes discarded\n0 \
                    writes committed\n1\n";
    assert_eq!(out, expected);
    for (lines, why) in [
        ("begin\nput lost 1\n", "without a `commit`; 1 write of its batch"),
        ("begin\nput lost 1\nquit\n", "without a `commit`"),
        ("begin\nbegin\n", "a batch of 0 writes is open"),
        ("commit\n", "there is no batch"),
        ("abort\n", "there is no batch"),
        ("begin\ndrop other\n", "within a batch"),
        ("begin\nput --create x 1\nput --create --partition new x 1\n", "a batch cannot create a partition"),
        (&format!("begin\nput x 1\nput {} 2\n", "k".repeat(70_000)), "65535"),
    ] {
        let ran = script(&p, lines);
        assert_eq!(ran.code, Some(1), "{lines:.40}: {ran:?}");
        let line = format!("line {}: ", lines.lines().count());
        assert!(ran.err.contains(&line) && ran.err.contains(why), "{lines:.40}: {ran:?}");
    }
    assert_eq!(p.ok("scan --db d"), "b\t2\n");
    assert!(!p.ok("partitions --db d list").contains("new"));
}

#[test]
fn first_failing_command_ends_a_script() {
    let p = CliFixture::new();
    ok(&p, "put --create a 1\n");
    for (bad, why) in [
        ("fly", "there is no command \"fly\""),
        ("get", "<KEY>"),
        ("get missing", "no value for missing"),
        ("use nowhere", "no partition is named \"nowhere\"; there are: default"),
        ("drop nowhere", "no partition is named"),
        ("get k --partition nowhere", "no partition is named"),
        ("put k", "<VALUE"),
        ("put k -", "standard input"),
        ("put k --file nowhere", "cannot read the value"),
        ("put k \"v", "column 7 is not closed"),
        ("put k \\q", "is not an escape"),
        ("get --hex xyz", "not hexadecimal"),
        ("scan --from b --to a", "--from must not be greater"),
        ("scan --limit many", "invalid value"),
        ("create x --block-size 1KiBs", "--block-size"),
        ("create x --engine pmem --block-size 1KiB", "pmem"),
        ("persist maybe", "[possible values: buffer, sync-data, sync-all]"),
        ("stats --partition nowhere", "no partition is named"),
    ] {
        let ran = script(&p, &format!("count\n{bad}\nput after 1\n"));
        assert_eq!((ran.code, ran.text().as_str()), (Some(1), "1\n"), "{bad}: {ran:?}");
        assert!(ran.err.starts_with("azekura: line 2: ") && ran.err.contains(why), "{bad}: {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{bad}: {ran:?}");
    }
    assert_eq!(p.ok("scan --db d"), "a\t1\n");
    assert_eq!(p.ok("partitions list --db d"), "default\n");
}

#[test]
fn only_writes_create_a_database() {
    let p = CliFixture::new();
    for line in ["", "fly", "get a", "use x", "drop x", "partitions", "stats", "commit", "put k", "flush"] {
        let ran = script(&p, &format!("{line}\n"));
        assert_eq!(ran.code, Some(i32::from(!line.is_empty())), "{line}: {ran:?}");
        assert!(!p.path("d").exists(), "{line}");
    }
    assert_eq!(p.run("shell --db d --read-only").code, Some(3));
    ok(&p, "create x\n");
    assert_eq!(p.ok("partitions list --db d"), "x\n");
    let refused = script(&p, &format!("put --create {} v\n", "k".repeat(70_000)));
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert_eq!(p.ok("partitions list --db d"), "x\n", "no partition without an entry");
    std::fs::write(p.path("file"), "no database").unwrap();
    assert_eq!(p.run("shell --db file").code, Some(3));
}

#[test]
fn read_only_shell_writes_nothing() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    let reader = Config::new(p.path("d")).open_read_only().unwrap();
    let run = |lines: &str| p.run_with_input(["shell", "--db", "d", "--read-only"], lines.as_bytes());
    let read = run("get k\nscan\ncount\npartitions\nstats\nuse default\n");
    assert_eq!(read.code, Some(0), "{read:?}");
    assert!(read.text().starts_with("v\nk\tv\n1\ndefault\n"), "{read:?}");
    for line in ["put k w", "remove k", "create x", "drop default", "begin", "flush", "compact", "persist"] {
        let ran = run(&format!("{line}\n"));
        assert_eq!(ran.code, Some(1), "{line}: {ran:?}");
        assert!(ran.err.contains("--read-only"), "{line}: {ran:?}");
    }
    let beside = script(&p, "count\nput k w\n");
    assert_eq!((beside.code, &*beside.text()), (Some(1), "1\n"), "a reader is open: {beside:?}");
    assert!(beside.err.contains("line 2: locked"), "{beside:?}");
    reader.close().unwrap();
    assert_eq!(p.ok("get --db d k"), "v");
}

#[test]
fn script_prints_json() {
    let p = CliFixture::new();
    let lines = "put --create k v\nget k\nbegin\nremove k\ncommit\nscan\ncount\nuse default\npartitions\nflush\n\
                 persist\nget k\n";
    let ran = p.run_with_input(["shell", "--db", "d", "--json"], lines.as_bytes());
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let printed: Vec<Value> = ran.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(printed[..2], [json!({"key": "k", "bytes": 1}), json!({"key": "k", "found": true, "value": "v"})]);
    let rest = [json!({"batch": 0}), json!({"asked": 1}), json!({"committed": 1}), json!({"count": 0})];
    assert_eq!(printed[2..6], rest);
    assert_eq!(printed[6..8], [json!({"partition": "default"}), json!({"partitions": ["default"]})]);
    assert_eq!(printed.last(), Some(&json!({"key": "k", "found": false})));
    let error = ran.error();
    assert_eq!((&error["kind"], &error["message"]), (&"not_found".into(), &"line 12: no value for k".into()));
}

/// Lines are typed at a pseudo-terminal. Checks completion, history, errors that do not end the shell, and Ctrl-C.
#[test]
fn typed_lines_are_completed_and_saved() {
    let p = CliFixture::new();
    let mut shell = Terminal::run(&p, &["shell", "--db", "d"]);
    shell.wait_for("`help` lists the commands.");
    shell.wait_for("default> ");
    shell.type_until("put --create user:1 ann\r", "default> ");
    shell.type_until("put user:2 bob\r", "default> ");
    shell.type_until("put \"two words\" x\r", "default> ");
    shell.type_until("get us\t", "get user:");
    shell.type_until("2\r", "bob\r\n");
    shell.wait_for("> ");
    shell.type_until("get tw\t", "get \"two words\"");
    shell.type_until("\r", "x\r\n");
    shell.wait_for("> ");
    shell.type_until("nonsense\r", "there is no command \"nonsense\"");
    shell.wait_for("> ");
    shell.type_until("crea\tpages --kv-se\t1KiB\r", "\"pages\" created");
    shell.wait_for("> ");
    shell.type_until("use pa\t\r", "pages> ");
    shell.type_until("begin\r", "pages (batch of 0)> ");
    shell.type_until("put k v\r", "pages (batch of 1)> ");
    shell.type_until("not sent\x03", "pages (batch of 1)> ");
    shell.type_until("comm\t\r", "1 write committed");
    shell.wait_for("> ");
    shell.type_until("get k\r", "v\r\n");
    shell.wait_for("> ");
    // The arrow up shows the last line of the history.
    shell.type_until("\x1b[A", "get k");
    shell.type_until("\r", "v\r\n");
    shell.wait_for("> ");
    shell.type_until("\x04", "");
    assert_eq!(shell.end(), Some(0));
    let history = std::fs::read_to_string(p.path("history")).unwrap();
    assert!(history.contains("put --create user:1 ann\n") && history.contains("use pages"), "{history}");
    assert_eq!(p.ok("scan --db d --partition pages"), "k\tv\n");
}

#[test]
fn ctrl_c_stops_a_scan_and_not_the_shell() {
    let p = CliFixture::new();
    let lines: String = (0..50_000).map(|n| format!("{{\"key\":\"{n:08}\",\"value\":\"{n}\"}}\n")).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    let mut shell = Terminal::run(&p, &["shell", "--db", "d", "--read-only"]);
    shell.wait_for("> ");
    shell.type_until("scan\r", "00000100");
    shell.signal(Signal::SIGINT);
    shell.wait_for("interrupted");
    shell.wait_for("> ");
    shell.type_until("count\r", "50000");
    shell.wait_for("> ");
    shell.type_until("quit\r", "");
    assert_eq!(shell.end(), Some(0));
    assert!(!shell.text().contains("00049999"), "the scan ran to its end");
}
