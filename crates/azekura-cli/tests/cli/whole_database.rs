//! stats, levels, verify, compact, checkpoint.

use azekura::Config;

use super::fixture::CliFixture;

/// A database with tables: 3,000 entries, some overwritten, some removed.
fn database_with_tables() -> CliFixture {
    let p = CliFixture::new();
    let line =
        |n: u32, v: u32| format!("{{\"key\":\"key{n:05}\",\"value\":\"{v}-{}\"}}\n", "x".repeat((n % 300) as usize));
    for version in 0..2 {
        let lines: String = (0..3000).map(|n| line(n, version)).collect();
        assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    }
    p.ok("del --db d key00001 key00002");
    p
}

#[test]
fn compact_keeps_content() {
    let p = database_with_tables();
    let before = p.run("export --db d -").out;
    let json = p.json("compact --db d");
    assert_eq!(json["partitions"][0]["name"], "default");
    assert!(p.run("export --db d -").out == before, "compaction changed the content");
    assert_eq!(p.ok("count --db d"), "2998\n");
    let levels = p.json("levels --db d");
    let level = |name: &str| -> u64 {
        levels["partitions"][0]["levels"].as_array().unwrap().iter().map(|l| l[name].as_u64().unwrap()).sum()
    };
    assert_eq!((level("entries"), level("tombstones")), (2998, 0), "{levels}");
    let drawn = p.ok("levels --db d");
    assert!(drawn.contains("default") && drawn.contains('█') && drawn.contains("2,998"), "{drawn}");
    assert!(p.ok("stats --db d").contains("recovery"));
    assert!(p.ok("compact --db d").contains("default"));
}

#[test]
fn verify_names_file_with_flipped_byte() {
    let p = database_with_tables();
    p.ok("compact --db d");
    assert!(p.ok("verify --db d").contains("No damage found"));
    assert_eq!(p.json("verify --db d")["sound"], true);
    let table = p.files("d", "sst").pop().expect("a compacted database has a table");
    let good = std::fs::read(&table).unwrap();
    for at in [0, 100, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        std::fs::write(&table, &bad).unwrap();
        let ran = p.run("verify --db d");
        assert_eq!(ran.code, Some(1), "byte {at}: {ran:?}");
        assert!(ran.text().contains(table.file_name().unwrap().to_str().unwrap()), "byte {at}: {ran:?}");
        let ran = p.run("verify --db d --json");
        assert_eq!(ran.code, Some(1));
        let json: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
        let wrong: Vec<_> = json["files"].as_array().unwrap().iter().filter(|f| !f["problem"].is_null()).collect();
        assert_eq!((json["sound"].as_bool(), wrong.len()), (Some(false), 1), "byte {at}: {json}");
        assert_eq!(wrong[0]["problem"]["kind"], "corruption", "byte {at}: {json}");
    }
    std::fs::write(&table, &good[..good.len() / 2]).unwrap();
    assert_eq!(p.run("verify --db d").code, Some(1), "cut in half");
    std::fs::remove_file(&table).unwrap();
    let ran = p.run("verify --db d");
    assert!(matches!(ran.code, Some(1 | 5)), "missing: {ran:?}");
    std::fs::write(&table, &good).unwrap();
    p.ok("verify --db d");
}

#[test]
fn damaged_table_error_names_the_file() {
    let p = database_with_tables();
    p.ok("compact --db d");
    let table = p.files("d", "sst").pop().unwrap();
    let mut bytes = std::fs::read(&table).unwrap();
    for byte in &mut bytes[200..400] {
        *byte ^= 1;
    }
    std::fs::write(&table, bytes).unwrap();
    let ran = p.run("scan --db d --json");
    assert_eq!(ran.code, Some(5), "{}", ran.err);
    let error = ran.error();
    assert_eq!(error["kind"], "corruption");
    assert!(error["file"].as_str().unwrap().ends_with(".sst") && error["offset"].is_u64(), "{error}");
}

#[test]
fn checkpoint_opens_and_stays_unchanged() {
    let p = database_with_tables();
    p.ok("put --create --db d --partition second k v");
    let before = p.run("export --db d -").out;
    let json = p.json("checkpoint --db d copy");
    assert_eq!(json["partitions"], 2);
    p.ok("put --create --db d key00003 later");
    assert!(p.run("export --db copy -").out == before, "the copy differs");
    assert_eq!(p.ok("get --db copy --partition second k"), "v");
    p.ok("verify --db copy");
    p.ok("put --create --db copy own 1");
    assert_eq!(p.run("get --db d own").code, Some(1));
    let again = p.run("checkpoint --db d copy");
    assert_eq!(again.code, Some(3), "an existing path is refused: {again:?}");
}

#[test]
fn every_command_prints_json() {
    let p = database_with_tables();
    assert_eq!(p.json("put --create --db d k v")["bytes"], 1);
    assert_eq!(p.json("get --db d k"), serde_json::json!({"key": "k", "value": "v", "found": true}));
    assert_eq!(p.json("del --db d k"), serde_json::json!({"asked": 1, "existed": 1}));
    let missing = p.run("get --db d k --json");
    assert_eq!(missing.code, Some(1));
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&missing.out).unwrap()["found"], false);
    assert_eq!(p.json("scan --db d --limit 1 --sizes"), serde_json::json!({"key": "key00000", "size": 2}));
    assert_eq!(p.json("count --db d")["count"], 2998);
    let stats = p.json("stats --db d");
    for name in ["disk_bytes", "user_bytes", "flushes", "cache", "recovery_ns", "partitions"] {
        assert!(!stats[name].is_null(), "{name}: {stats}");
    }
    assert!(p.json("levels --db d --partition default")["partitions"][0]["levels"].is_array());
    assert_eq!(p.json("partitions --db d create more")["created"], true);
    assert_eq!(p.json("partitions --db d drop more --yes")["dropped"], true);
}

/// `stats --watch` opened the database every few seconds. A service that started meanwhile failed because the database
/// was locked.
#[test]
fn stats_are_read_once() {
    let p = database_with_tables();
    assert_eq!(p.run("stats --db d --watch 1").code, Some(2));
    assert!(!p.ok("help stats").contains("watch"));
}

/// A database that was opened read-only reported 0 bytes for its manifest and its WAL.
#[test]
fn stats_report_manifest_and_wal_size() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    let stats = p.json("stats --db d");
    let manifest = std::fs::metadata(p.path("d/MANIFEST")).unwrap().len();
    assert_eq!(stats["manifest_bytes"], manifest);
    assert_eq!(stats["wal_segments"], 1);
    assert!(stats["wal_live_bytes"].as_u64().unwrap() > 0, "{stats}");
    assert!(!p.ok("stats --db d").contains("manifest  0 B"));
}

#[test]
fn stats_leave_out_rows_of_zeros() {
    let p = database_with_tables();
    let (some, all) = (p.ok("stats --db d"), p.ok("stats --db d --all"));
    for name in ["bytes on disk", "recovery", "manifest"] {
        assert!(some.contains(name) && all.contains(name), "{name}: {some}");
    }
    for name in ["blob GC", "write stalls", "dropped after damage"] {
        assert!(!some.contains(name) && all.contains(name), "{name}: {some}");
    }
    assert!(some.contains("rows of zeros left out; --all shows them") && !all.contains("left out"), "{all}");
    let stats = p.json("stats --db d");
    // Regression: the command listed the metrics for JSON, and four newer ones were missing.
    for name in ["blob_gc_runs", "active_memtable_bytes", "sealed_memtable_bytes", "pinned_memtable_bytes"] {
        assert_eq!(stats[name], 0, "JSON has all: {name}");
    }
    p.ok("partitions create pool --db d --engine pmem");
    assert_eq!(p.json("stats --db d --partition pool")["partitions"][0]["pool"]["split_fences"], 0);
}

#[test]
fn stats_show_settings_of_last_writer() {
    let p = CliFixture::new();
    Config::new(p.path("d")).workers(3).cache_size(1 << 20).open().unwrap().close().unwrap();
    let (some, all) = (p.ok("stats --db d"), p.ok("stats --db d --all"));
    assert!(some.contains("Settings of the last program") && some.contains("cache_size"), "{some}");
    assert!(!some.contains("wal_segment_size") && all.contains("wal_segment_size"), "{all}");
    let settings = &p.json("stats --db d")["settings"];
    assert_eq!((&settings["workers"], &settings["durability"]), (&3.into(), &"Buffer".into()), "{settings}");
    p.ok("put --create --db d k v");
    assert!(!p.ok("stats --db d").contains("Settings of"), "`put` opens with the defaults");
}
