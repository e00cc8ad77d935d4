//! blobs, gc scan, gc run.

use azekura::{CompressionType, Config, KvSeparationOptions, PartitionCreateOptions};
use serde_json::{Value, json};

use super::fixture::CliFixture;

/// "pages" has 100 values of 2,000 bytes in several blob files: 50 overwritten before a compaction, ten removed after
/// it. "queue" is empty. "plain" has no key-value separation.
fn database_with_stale_blobs() -> CliFixture {
    let p = CliFixture::new();
    // Without background compactions, which would drop more versions.
    let db = Config::new(p.path("d")).workers(0).open().unwrap();
    let separation = KvSeparationOptions::default().blob_file_target_size(64 << 10).automatic_gc(None);
    let options = PartitionCreateOptions::default().with_kv_separation(separation.compression(CompressionType::None));
    let pages = db.open_partition("pages", options.clone()).unwrap();
    let put = |n: u8, round: u8| pages.insert(format!("page {n:02}"), [round; 2_000]).unwrap();
    (0..100).for_each(|n| put(n, 0));
    pages.flush().unwrap();
    (0..50).for_each(|n| put(n, 1));
    pages.major_compact().unwrap();
    (90..100).for_each(|n| pages.remove(format!("page {n}")).unwrap());
    pages.flush().unwrap();
    db.open_partition("queue", options).unwrap();
    db.open_partition("plain", PartitionCreateOptions::default()).unwrap().insert("k", vec![7; 5_000]).unwrap();
    drop(pages);
    db.close().unwrap();
    p
}

fn pages(of: &Value) -> &Value {
    of["partitions"].as_array().unwrap().iter().find(|partition| partition["name"] == "pages").unwrap()
}

#[test]
fn blobs_lists_stalest_file_first() {
    let p = database_with_stale_blobs();
    let json = p.json("blobs --db d");
    let names: Vec<_> = json["partitions"].as_array().unwrap().iter().map(|partition| &partition["name"]).collect();
    assert_eq!(names, ["pages", "queue"]);
    let files = pages(&json)["files"].as_array().unwrap();
    let sum = |name: &str| files.iter().map(|file| file[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("values"), sum("referenced_values")), (150 - 33, 100), "the fully stale file was removed");
    assert_eq!(sum("referenced_bytes") + sum("stale_bytes"), sum("value_bytes"));
    assert_eq!(pages(&json)["stale_bytes"], sum("stale_bytes"));
    let shares = files.iter().map(|file| file["stale_bytes"].as_f64().unwrap() / file["value_bytes"].as_f64().unwrap());
    assert!(shares.rev().is_sorted() && files[0]["stale_bytes"].as_u64() > Some(0), "{json}");

    let drawn = p.ok("blobs --db d --partition pages");
    let lines: Vec<&str> = drawn.lines().collect();
    assert!(lines[0].starts_with("pages: ") && lines[0].contains("117 values"), "{drawn}");
    assert!(lines[1].contains("staleness") && lines[2].contains(files[0]["file"].as_str().unwrap()), "{drawn}");
    assert!(lines[2].contains('█') && lines[2].contains("%") && drawn.contains("gc scan"), "{drawn}");
    assert_eq!(lines.len(), 3 + files.len(), "{drawn}");
    assert!(p.ok("blobs --db d").contains("queue: no blob files"));
    assert!(p.ok("blobs --db d --partition plain").contains("plain: no blob files (no key-value separation)"));
}

#[test]
fn gc_scan_is_exact_and_writes_nothing() {
    let p = database_with_stale_blobs();
    let json = p.json("gc scan --db d");
    let report = pages(&json);
    assert_eq!((&report["total_blobs"], &report["stale_blobs"]), (&json!(117), &json!(27)), "17, and 10 removed");
    assert_eq!(report["pinned_bytes"], 0);
    let amp = report["space_amp"].as_f64().unwrap();
    assert!((amp - 117.0 / 90.0).abs() < 0.01, "{report}");
    let text = p.ok("gc scan --db d --partition pages");
    assert!(text.starts_with("pages:\n  blob files") && text.contains("27 stale"), "{text}");
    let both = p.json("gc scan --db d --partition queue --partition pages");
    assert_eq!(both["partitions"][0]["name"], "queue");
    assert_eq!(both["partitions"][0]["space_amp"], 1.0);
    assert_eq!(pages(&both), report);
}

#[test]
fn gc_run_reaches_its_goal() {
    let p = database_with_stale_blobs();
    let before = p.run("export --db d --partition pages -").out;
    let json = p.json("gc run --db d --drop-stale");
    let dropped = pages(&json);
    // When the database is opened, a background compaction may drop the tombstones first. Then it also deletes the
    // fully stale file, whose bytes are not among those that this call freed.
    let stale = |when: &str| dropped[when]["stale_segment_count"].as_u64().unwrap();
    assert!(stale("before") <= 1 && stale("after") == 0, "{dropped}");
    let file_bytes = |when: &str| dropped[format!("file_bytes_{when}")].as_u64().unwrap();
    let freed = file_bytes("before") - file_bytes("after");
    assert!(stale("before") == 0 || freed > 2_000, "{dropped}");
    assert!([0, freed].contains(&dropped["freed_bytes"].as_u64().unwrap()), "{dropped}");
    let json = p.json("gc run --db d --partition pages --staleness 0.3");
    let report = &json["partitions"][0];
    assert!(report["freed_bytes"].as_u64() > Some(0), "{json}");
    assert_eq!(
        report["freed_bytes"].as_u64().unwrap(),
        report["file_bytes_before"].as_u64().unwrap() - report["file_bytes_after"].as_u64().unwrap()
    );
    let text = p.ok("gc run --db d --space-amp 1");
    assert!(text.contains("pages: ") && text.contains("1.00 now") && text.contains("queue: 0 B freed"), "{text}");
    let json = p.json("gc scan --db d");
    assert_eq!((&pages(&json)["total_blobs"], &pages(&json)["stale_bytes"]), (&json!(90), &json!(0)));
    assert!(p.run("export --db d --partition pages -").out == before, "blob GC changed the content");
    assert_eq!(p.json("verify --db d")["sound"], true);
    p.ok("gc run --db d");
}

#[test]
fn gc_without_separation_fails_with_advice() {
    let p = database_with_stale_blobs();
    for line in ["gc scan --db d --partition plain", "gc run --db d --partition plain"] {
        let ran = p.run(line);
        assert_eq!(ran.code, Some(3), "{line}: {ran:?}");
        for word in ["plain", "no key-value separation", "compact", "with_kv_separation"] {
            assert!(ran.err.contains(word), "{line}: {ran:?}");
        }
        let missing = p.run(&line.replace("plain", "absent"));
        assert_eq!(missing.code, Some(3), "{missing:?}");
        assert!(missing.err.contains("absent") && missing.err.contains("pages"), "{missing:?}");
    }
    for bad in ["--space-amp 0.9", "--space-amp NaN", "--staleness 1.1", "--staleness x", "--drop-stale --staleness 0"]
    {
        assert_eq!(p.run(&format!("gc run --db d {bad}")).code, Some(2), "{bad}");
    }
    p.ok("put --create --db other k v");
    for line in ["gc scan --db other", "gc run --db other", "blobs --db other"] {
        assert!(p.ok(line).contains("No partition has key-value separation"), "{line}");
    }
}
