//! put, get, del, scan, count; partitions without options.

use super::fixture::CliFixture;

#[test]
fn put_get_scan_count_del_agree() {
    let p = CliFixture::new();
    for (key, value) in [("user:1", "ann"), ("user:2", "bob"), ("other", "x")] {
        p.ok(&format!("put --create --db d {key} {value}"));
    }
    assert_eq!(p.ok("get --db d user:2"), "bob");
    assert_eq!(p.ok("scan --db d"), "other\tx\nuser:1\tann\nuser:2\tbob\n");
    assert_eq!(p.ok("count --db d"), "3\n");
    assert_eq!(p.ok("count --db d --prefix user:"), "2\n");
    assert_eq!(p.ok("del --db d user:1 missing"), "1 of 2 keys removed\n");
    let removed = p.run("get --db d user:1");
    assert_eq!((removed.code, removed.out.as_slice()), (Some(1), &b""[..]));
    assert_eq!(p.ok("count --db d"), "2\n");
    p.ok("put --create --db d other y");
    assert_eq!(p.ok("get --db d other"), "y");
}

#[test]
fn writes_may_expect_a_value() {
    let p = CliFixture::new();
    let refused = |command: &str| {
        let run = p.run(command);
        let message = "\" does not have the expected value.\n";
        assert!(run.code == Some(1) && run.err.ends_with(message), "{command}: {run:?}");
    };
    for engine in ["lsm", "pmem"] {
        p.ok(&format!("partitions create --db d {engine} --engine {engine}"));
        let on = format!("--db d --partition {engine}");
        refused(&format!("put {on} key 1 --if-value 0"));
        p.ok(&format!("put {on} key 1 --if-absent"));
        refused(&format!("put {on} key 2 --if-absent"));
        refused(&format!("put {on} --hex 6b6579 32 --if-value 32"));
        p.ok(&format!("put {on} --hex 6b6579 32 --if-value 31 --ttl 1000"));
        assert_eq!(p.ok(&format!("get {on} key")), "2");
        p.ok(&format!("put {on} other 1"));
        refused(&format!("del {on} key other --if-value 1"));
        assert_eq!(p.ok(&format!("del {on} other --if-value 1")), "1 of 1 key removed\n");
        assert_eq!(p.run(&format!("del {on} --prefix k --if-value 1")).code, Some(2));
        assert_eq!(p.run(&format!("put {on} key 1 --if-absent --if-value 1")).code, Some(2));
        // A batch of the shell is a transaction.
        let batch = |expected: &str| {
            format!(
                "begin\nput --partition {engine} key 3 --if-value {expected}\nput --partition {engine} b 1\ncommit\n"
            )
        };
        let run = p.run_with_input(["shell", "--db", "d"], batch("1").as_bytes());
        let message = format!("line 4: key \"key\" of partition \"{engine}\" does not have the expected value");
        assert!(run.code == Some(1) && run.err.contains(&message) && run.err.contains("discarded"), "{run:?}");
        assert_eq!(p.ok(&format!("scan {on}")), "key\t2\n");
        assert_eq!(p.run_with_input(["shell", "--db", "d"], batch("2").as_bytes()).code, Some(0));
        assert_eq!(p.ok(&format!("scan {on}")), "b\t1\nkey\t3\n");
    }
    // A key has no value in what is created first.
    assert_eq!(p.run("put --db new --create key 1 --if-value 0").code, Some(2));
    assert!(!p.path("new").exists());
}

#[test]
fn ranges_are_removed_and_partitions_cleared() {
    let p = CliFixture::new();
    for key in ["user:1", "user:2", "a", "b", "c"] {
        p.ok(&format!("put --create --db d {key} value"));
    }
    assert_eq!(p.ok("del --db d --prefix user:"), "range removed\n");
    assert_eq!(p.ok("del --db d --from a --to c --json"), "{\"range_removed\":true}\n");
    assert_eq!(p.ok("del --db d --from c --to c"), "range removed\n");
    assert_eq!(p.ok("scan --db d --keys-only"), "c\n");
    assert_eq!(p.run("del --db d --from b --to a").code, Some(2));
    assert_eq!(p.run("del --db d c --prefix a").code, Some(2));
    assert_eq!(p.run("del --db d").code, Some(2));
    // `clear` removed everything without asking.
    let refused = p.run("clear --db d");
    assert!(refused.code == Some(2) && refused.err.contains("--yes"), "{refused:?}");
    let refused = p.run_with_input(["shell", "--db", "d"], b"clear\n");
    assert!(refused.code == Some(1) && refused.err.contains("--yes"), "{refused:?}");
    assert_eq!(p.ok("count --db d"), "1\n");
    assert!(p.ok("clear --db d --yes").ends_with("0 B now\n"));
    assert_eq!(p.ok("count --db d"), "0\n");
}

#[test]
fn merges_need_an_operator_and_change_values() {
    let p = CliFixture::new();
    for engine in ["lsm", "pmem"] {
        p.ok(&format!("partitions create --db d {engine} --engine {engine} --merge-operator append:,"));
        for word in ["a", "b"] {
            p.ok(&format!("merge --db d --partition {engine} key {word}"));
        }
        assert_eq!(p.ok(&format!("get --db d --partition {engine} key")), "a,b");
    }
    p.ok("partitions create --db d sum --merge-operator u64-add");
    assert_eq!(p.run("merge --db d --partition sum key 1").code, Some(3), "not 8 bytes");
    p.ok("merge --db d --partition sum --hex 00 ff00000000000000");
    p.ok("merge --db d --partition sum --hex 00 0200000000000000");
    assert_eq!(p.ok("get --db d --partition sum --hex 00"), "0101000000000000\n");
    p.ok("put --create --db d key value");
    assert_eq!(p.run("merge --db d key value").code, Some(3), "no operator");
    assert_eq!(p.run("merge --db d --partition missing key value").code, Some(3));
    assert_eq!(p.run("partitions create --db d other --merge-operator min").code, Some(2));
    let shell =
        p.run_with_input(["shell", "--db", "d"], b"use lsm\nmerge key c\nbegin\nmerge key d\ncommit\nget key\n");
    assert!(String::from_utf8_lossy(&shell.out).contains("a,b,c,d"), "{shell:?}");
}

#[test]
fn entries_expire_after_their_time_to_live() {
    let p = CliFixture::new();
    p.ok("put --create --db d long value --ttl 1000000");
    p.ok("put --create --db d short value --ttl 0.001");
    p.ok("partitions create --db d --default-ttl 0.001 cache");
    p.ok("partitions create --db d --default-ttl 0.001 --engine pmem pool");
    p.ok("put --create --db d --partition cache key value");
    p.ok("put --create --db d --partition cache long value --ttl 1e6");
    p.ok("put --create --db d --partition pool key value");
    assert_eq!(p.ok("scan --db d"), "long\tvalue\n");
    assert_eq!(p.ok("scan --db d --partition cache"), "long\tvalue\n");
    assert_eq!(p.ok("count --db d --partition pool"), "0\n");
    assert_eq!(p.run("get --db d short").code, Some(1));
    p.ok("compact --db d");
    p.ok("verify --db d");
    assert_eq!(p.ok("scan --db d"), "long\tvalue\n");
    for bad in ["0", "-1", "x", "1e300"] {
        assert_eq!(p.run(&format!("put --create --db d key value --ttl={bad}")).code, Some(2));
    }
}

#[test]
fn put_reads_argument_file_and_stdin() {
    let p = CliFixture::new();
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    std::fs::write(p.path("file"), &bytes).unwrap();
    p.ok("put --create --db d f --file file");
    assert_eq!(p.run("get --db d f").out, bytes);
    let piped = p.run_with_input(["put", "--create", "--db", "d", "stdin", "-"], &bytes);
    assert_eq!(piped.code, Some(0), "{piped:?}");
    assert_eq!(p.run("get --db d stdin").out, bytes);
    assert_eq!(p.run_args(["put", "--create", "--db", "d", "", ""]).code, Some(0), "the empty key and value are legal");
    assert_eq!(p.run_args(["get", "--db", "d", ""]).code, Some(0));
    assert_eq!(p.run("put --create --db d key value --file file").code, Some(2));
    assert_eq!(p.run("put --create --db d key").code, Some(2));
}

#[test]
fn hex_keys_and_values_round_trip() {
    let p = CliFixture::new();
    p.ok("put --create --db d --hex 00ff CAFE");
    assert_eq!(p.ok("get --db d --hex 00ff"), "cafe\n");
    assert_eq!(p.run("get --db d --hex 00FF").code, Some(0));
    assert_eq!(p.ok("scan --db d --hex"), "00ff\tcafe\n");
    assert_eq!(p.ok("scan --db d"), "\\x00\\xff\t\\xca\\xfe\n");
    assert_eq!(p.ok("scan --db d --hex --prefix 00 --keys-only"), "00ff\n");
    let bad = p.run("get --db d --hex 0");
    assert_eq!(bad.code, Some(2));
    assert!(bad.err.contains("hexadecimal"), "{bad:?}");
}

#[test]
fn scans_take_ranges_directions_and_limits() {
    let p = CliFixture::new();
    let lines: String = (0..50).map(|n| format!("{{\"key\":\"k{n:02}\",\"value\":\"{}\"}}\n", "v".repeat(n))).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    let keys = |line: &str| p.ok(&format!("scan --db d --keys-only {line}")).replace('\n', " ");
    assert_eq!(keys("--from k10 --to k13"), "k10 k11 k12 ");
    assert_eq!(keys("--from k10 --to k13 --reverse"), "k12 k11 k10 ");
    assert_eq!(keys("--limit 2"), "k00 k01 ");
    assert_eq!(keys("--reverse --limit 2"), "k49 k48 ");
    assert_eq!(keys("--prefix k3 --limit 3 --reverse"), "k39 k38 k37 ");
    assert_eq!(keys("--from k48"), "k48 k49 ");
    assert_eq!(keys("--from k10 --to k10"), "");
    assert_eq!(keys("--prefix nothing"), "");
    assert_eq!(p.ok("count --db d --from k10 --to k20"), "10\n");
    assert_eq!(p.ok("scan --db d --sizes --from k48"), "k48\t48\nk49\t49\n");
    assert_eq!(p.run("scan --db d --from b --to a").code, Some(2));
    assert_eq!(p.run("scan --db d --prefix a --from a").code, Some(2));
}

#[test]
fn closed_output_pipe_is_no_error() {
    let p = CliFixture::new();
    let line = format!("{{\"key\":\"k\",\"value\":\"{}\"}}\n", "v".repeat(4 << 20));
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], line.as_bytes()).code, Some(0));
    let mut child = p.command(["scan", "--db", "d"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn partitions_can_be_created_used_and_dropped() {
    let p = CliFixture::new();
    p.ok("partitions --db d create users");
    p.ok("partitions --db d create users");
    p.ok("put --create --db d --partition events e1 1");
    p.ok("put --create --db d --partition users u1 1");
    assert_eq!(p.ok("partitions --db d list"), "events\nusers\n");
    assert_eq!(p.ok("scan --db d --partition users"), "u1\t1\n");
    let unknown = p.run("get --db d key");
    assert_eq!(unknown.code, Some(3), "{unknown:?}");
    assert!(unknown.err.contains("\"default\"") && unknown.err.contains("events, users"), "{unknown:?}");
    p.ok("partitions --db d drop users --yes");
    assert_eq!(p.run("partitions --db d drop users --yes").code, Some(1));
    assert_eq!(p.json("partitions --db d list"), serde_json::json!({"partitions": ["events"]}));
}

/// `put` with a wrong name of a partition or of a database created it.
#[test]
fn put_creates_nothing_without_flag() {
    let p = CliFixture::new();
    let refused = p.run("put --db d key value");
    assert!(refused.code == Some(3) && refused.err.contains("put --create"), "{refused:?}");
    assert!(!p.path("d").exists());
    p.ok("put --db d --create key value");
    p.ok("put --db d key other");
    let refused = p.run("put --db d --partition uesrs key value");
    assert!(refused.code == Some(3) && refused.err.contains("`put --create` creates it"), "{refused:?}");
    assert_eq!(p.ok("partitions --db d list"), "default\n");
}

#[test]
fn dropping_needs_a_confirmation() {
    let p = CliFixture::new();
    p.ok("put --db d --create key value");
    let refused = p.run("partitions drop --db d default");
    assert!(refused.code == Some(2) && refused.err.contains("--yes"), "{refused:?}");
    assert_eq!(p.ok("count --db d"), "1\n");
    p.ok("partitions drop --db d default --yes");
}

#[test]
fn database_is_named_by_the_environment() {
    let p = CliFixture::new();
    let run = |args: &[&str]| p.command(args).env("AZEKURA_DB", p.path("from env")).output().unwrap();
    assert!(run(&["put", "--create", "key", "value"]).status.success());
    assert_eq!(run(&["get", "key"]).stdout, b"value");
    assert!(!run(&["get", "key", "--db", "other"]).status.success());
    assert!(p.path("from env").is_dir() && !p.path(".azekura_data").exists());
}
