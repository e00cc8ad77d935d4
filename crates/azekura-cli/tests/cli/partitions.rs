//! partitions create with options.

use serde_json::Value;

use super::fixture::CliFixture;

/// The metrics of one partition of the database "d".
fn partition(p: &CliFixture, name: &str) -> Value {
    p.json(&format!("stats --db d --partition {name}"))["partitions"][0].take()
}

/// Stores 2,000 entries with values of `len` bytes and writes them to tables.
fn fill(p: &CliFixture, name: &str, len: usize) {
    let line = |n: u32| format!("{{\"key\":\"{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(len));
    let lines: String = (0..2_000).map(line).collect();
    let stored = p.run_with_input(["import", "--db", "d", "--partition", name, "-"], lines.as_bytes());
    assert_eq!(stored.code, Some(0), "{stored:?}");
    p.ok(&format!("compact --db d --partition {name}"));
}

#[test]
fn options_change_how_data_is_stored() {
    let p = CliFixture::new();
    p.ok("partitions --db d create pool --engine pmem --pool-max-size 1MiB --pool-growth-step 64KiB");
    assert_eq!(partition(&p, "pool")["pool"]["bytes"], 64 << 10);
    let full = p.run_with_input(["put", "--create", "--db", "d", "--partition", "pool", "k", "-"], &[0; 2 << 20]);
    assert_eq!(full.code, Some(3), "{full:?}");
    assert!(full.err.contains("out of space"), "{full:?}");

    p.ok("partitions create pages --db d --kv-separation 1KiB --blob-file-size 64KiB --blob-compression none");
    fill(&p, "pages", 1_024);
    let pages = partition(&p, "pages");
    assert!(pages["blob_files"].as_u64() > Some(25), "2 MB in files of 64 KiB: {pages}");

    p.ok("partitions create plain --db d --compression none --index-type binary-search --filter-bits none");
    p.ok("partitions create packed --db d --compression-per-level none,miniz:9 --block-size 32KiB");
    fill(&p, "plain", 100);
    fill(&p, "packed", 100);
    let bytes = |name: &str| partition(&p, name)["disk_bytes"].as_u64().unwrap();
    assert!(bytes("plain") > 200_000 && bytes("packed") < 60_000, "{} and {}", bytes("plain"), bytes("packed"));
    let verified = p.ok("verify --db d");
    assert!(verified.contains("of type BinarySearch") && verified.contains("of type Fingerprint"), "{verified}");
}

/// The CLI checks ranges before it creates anything. They are those of the engine.
#[test]
fn ranges_of_options_are_those_of_the_engine() {
    let p = CliFixture::new();
    let lsm = [
        ("block-size", ["64", "1MiB"], ["63", "1048577"]),
        ("metadata-block-size", ["64", "1MiB"], ["63", "1048577"]),
        ("restart-interval", ["1", "255"], ["0", "256"]),
        ("hash-table-util-ratio", ["0.1", "10"], ["0.09", "10.1"]),
        ("filter-bits", ["1", "64"], ["0.9", "64.1"]),
        ("memtable-size", ["4KiB", "2GiB"], ["4095", "2147483649"]),
        ("l0-compaction-trigger", ["1", "1000"], ["0", "1001"]),
        ("target-file-size", ["4KiB", "16GiB"], ["4095", "17179869185"]),
        ("level-size-multiplier", ["2", "100"], ["1", "101"]),
        ("base-level-size", ["4KiB", "1TiB"], ["4095", "1099511627777"]),
        ("compression", ["none", "miniz:10"], ["zstd", "miniz:11"]),
        ("index-type", ["binary-search", "fingerprint"], ["BinarySearch", ""]),
        ("pin-top-level", ["true", "false"], ["yes", "1"]),
        ("kv-separation", ["1", "4294967295"], ["0", "4GiB"]),
        ("kv-separation 1KiB --blob-file-size", ["1KiB", "64GiB"], ["1023", "68719476737"]),
        ("kv-separation 1KiB --blob-gc", ["1", "off"], ["0.99", "inf"]),
        ("engine pmem --pool-max-size", ["64KiB", "1GiB"], ["65535", "8796093022209"]),
        ("engine pmem --pool-growth-step", ["4KiB", "1GiB"], ["4095", "1073741825"]),
    ];
    for (option, bounds, beyond) in lsm {
        for bad in beyond {
            let ran = p.run(&format!("partitions create --db new x --{option} {bad}"));
            assert_eq!(ran.code, Some(2), "{option} {bad}: {ran:?}");
            let named = option.rsplit("--").next().unwrap();
            assert!(ran.err.contains(named), "{option} {bad}: {ran:?}");
        }
        for (i, good) in bounds.iter().enumerate() {
            let created =
                p.json(&format!("partitions create --db d {}-{i} --{option} {good}", option.replace(' ', "_")));
            assert_eq!(created["created"], true, "{option} {good}");
        }
    }
    assert!(!p.path("new").exists(), "bad options changed something");
}

#[test]
fn bad_names_and_contradictions_are_refused() {
    let p = CliFixture::new();
    let many = vec!["lz4"; 65].join(",");
    for (options, why) in [
        ("--engine pmem --block-size 4KiB", "pmem"),
        ("--engine pmem --kv-separation 4KiB", "pmem"),
        ("--pool-max-size 1MiB", "--engine pmem"),
        ("--engine lsm --pool-growth-step 1MiB", "--engine pmem"),
        ("--blob-file-size 1MiB", "--kv-separation"),
        ("--engine tree", "lsm, pmem"),
        ("--block-size 4KiBs", "4096, 64KiB"),
        (&format!("--compression-per-level {many}"), "64"),
        (&"n".repeat(256), "unexpected argument"),
    ] {
        let ran = p.run(&format!("partitions create --db d x {options}"));
        assert_eq!(ran.code, Some(2), "{options}: {ran:?}");
        assert!(ran.err.contains(why), "{options}: {ran:?}");
    }
    for name in ["", &"n".repeat(256)] {
        for command in [&["partitions", "create"][..], &["put", "k", "v", "--partition"]] {
            let ran = p.run_args(command.iter().copied().chain([name, "--db", "d"]));
            assert_eq!(ran.code, Some(2), "{name}: {ran:?}");
        }
    }
    assert!(!p.path("d").exists());
}

#[test]
fn existing_partition_keeps_its_options() {
    let p = CliFixture::new();
    p.ok("partitions create x --db d --engine pmem");
    assert_eq!(p.ok("partitions create x --db d"), "\"x\" exists already\n");
    let again = p.ok("partitions create x --db d --engine lsm --block-size 8KiB");
    assert_eq!(again, "\"x\" exists already; its options are unchanged\n");
    assert!(partition(&p, "x")["pool"].is_object());
}
