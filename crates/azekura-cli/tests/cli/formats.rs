//! import and export as CSV, JSON lines and native files: encodings, options, bad input.

use std::sync::Arc;

use azekura::{
    Comparator, CompressionType, Config, EngineType, FilterPolicy, KvSeparationOptions, PartitionCreateOptions,
    PmemOptions,
};
use serde_json::json;

use super::fixture::CliFixture;

/// Keys and values that are difficult in one of the formats.
fn difficult_entries() -> Vec<(Vec<u8>, Vec<u8>)> {
    let all: Vec<u8> = (0..=255).collect();
    let mut entries: Vec<(Vec<u8>, Vec<u8>)> = [
        (&b""[..], &b""[..]),
        (b"\"", b"a,b\r\nc\"\"d"),
        (b"\\x41", b"\\"),
        (b"\n", b"\t"),
        (b"\xef\xbb\xbfkey", b"="),
        (b" spaces ", b" "),
        (b"\xff", b"\xc3"),
        ("\u{85}\u{1f600}".as_bytes(), "\u{2028}".as_bytes()),
    ]
    .map(|(key, value)| (key.to_vec(), value.to_vec()))
    .to_vec();
    entries.push((all.clone(), all));
    entries.sort();
    entries
}

fn fill(p: &CliFixture, db: &str, entries: &[(Vec<u8>, Vec<u8>)]) {
    let db = Config::new(p.path(db)).open().unwrap();
    let partition = db.open_partition("default", PartitionCreateOptions::default()).unwrap();
    entries.iter().for_each(|(key, value)| partition.insert(key, value).unwrap());
    drop(partition);
    db.close().unwrap();
}

fn entries(p: &CliFixture, db: &str, partition: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    let db = Config::new(p.path(db)).open_read_only().unwrap();
    let partition = db.partition(partition).unwrap();
    partition.iter().map(Result::unwrap).map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

#[test]
fn every_format_and_encoding_round_trips() {
    let p = CliFixture::new();
    let stored = difficult_entries();
    fill(&p, "d", &stored);
    let mut n = 0;
    for format in ["csv", "jsonl", "native"] {
        for encoding in ["", "hex", "base64", "escape"] {
            if format == "native" && !encoding.is_empty() {
                continue;
            }
            n += 1;
            let flags = if encoding.is_empty() {
                String::new()
            } else {
                format!("--key-encoding {encoding} --value-encoding {encoding}")
            };
            let (file, copy) = (format!("out{n}"), format!("copy{n}"));
            let report = p.json(&format!("export --db d {file} --format {format} {flags}"));
            assert_eq!(report["entries"], stored.len(), "{format} {encoding}");
            let piped = p.run(&format!("export --db d - --format {format} {flags}"));
            assert!(
                piped.out == std::fs::read(p.path(&file)).unwrap(),
                "{format}: a file and standard output are equal"
            );
            p.ok(&format!("import --db {copy} {file} --format {format}"));
            assert!(entries(&p, &copy, "default") == stored, "{format} {encoding}");
            let mut args: Vec<String> = ["import", "--db", "piped", "-", "--format", format].map(String::from).to_vec();
            args.extend(["--partition".into(), format!("p{n}")]);
            assert_eq!(p.run_with_input(args, &piped.out).code, Some(0));
            assert!(entries(&p, "piped", &format!("p{n}")) == stored, "{format} {encoding} from standard input");
        }
    }
}

#[test]
fn one_output_has_one_encoding_and_states_it() {
    let p = CliFixture::new();
    fill(&p, "d", &[(b"a".to_vec(), b"1".to_vec()), (b"b".to_vec(), b"2".to_vec())]);
    assert_eq!(p.ok("export --db d - --format csv"), "key,value\na,1\nb,2\n");
    assert_eq!(
        p.ok("scan --db d --json --key-encoding base64"),
        "{\"key_base64\":\"YQ==\",\"value\":\"1\"}\n{\"key_base64\":\"Yg==\",\"value\":\"2\"}\n"
    );
    fill(&p, "d", &[(b"c".to_vec(), b"\xff".to_vec())]);
    assert_eq!(p.ok("export --db d - --format csv"), "key,value_hex\na,31\nb,32\nc,ff\n");
    let lines = [("a", "31"), ("b", "32"), ("c", "ff")]
        .map(|(key, value)| format!("{{\"key\":\"{key}\",\"value_hex\":\"{value}\"}}\n"))
        .concat();
    assert_eq!(p.ok("scan --db d --json"), lines);
    assert_eq!(p.ok("scan --db d --json --limit 1"), "{\"key\":\"a\",\"value\":\"1\"}\n", "the limit applies");
    assert_eq!(p.ok("scan --db d --json --limit 1 --hex"), "{\"key_hex\":\"61\",\"value_hex\":\"31\"}\n");
    assert_eq!(p.ok("scan --db d --json --reverse --keys-only"), "{\"key\":\"c\"}\n{\"key\":\"b\"}\n{\"key\":\"a\"}\n");
    assert_eq!(p.ok("export --db d -"), lines);
    let refused = p.run("export --db d out.csv --value-encoding utf8");
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.err.contains("--value-encoding") && !p.path("out.csv").exists(), "{refused:?}");
    assert_eq!(p.run("scan --db d --key-encoding hex").code, Some(2), "the option is for --json");
    assert_eq!(p.run("export --db d out.azk --key-encoding hex").code, Some(2));
}

#[test]
fn files_made_by_hand_can_be_imported() {
    let p = CliFixture::new();
    let csv = "value,key\r\n\"one, \"\"1\"\"\",a\r\ntwo,\u{fc}";
    std::fs::write(p.path("plain.csv"), format!("\u{feff}{csv}")).unwrap();
    p.ok("import --db d plain.csv");
    std::fs::write(p.path("quoted.csv"), "\u{feff}\"key\",\"value\"\n\"\",\"\n\"\"\r\"\n").unwrap();
    p.ok("import --db quoted quoted.csv");
    assert_eq!(p.ok("scan --db quoted"), "\t\\n\"\\r\n");
    assert_eq!(p.ok("scan --db d"), "a\tone, \"1\"\n\u{fc}\ttwo\n");
    std::fs::write(p.path("hex.csv"), "key,value\n00ff,plain\n").unwrap();
    p.ok("import --db e hex.csv --key-encoding hex");
    assert_eq!(p.ok("scan --db e"), "\\x00\\xff\tplain\n");
    std::fs::write(p.path("escape.jsonl"), "{\"key\":\"a\\\\x00\",\"value\":\"Y2Fm\"}\n").unwrap();
    p.ok("import --db f escape.jsonl --key-encoding escape --value-encoding base64");
    assert_eq!(p.ok("scan --db f"), "a\\x00\tcaf\n");
    // Exports of earlier versions chose the encoding for each line.
    std::fs::write(p.path("old.jsonl"), "{\"key\":\"a\",\"value_hex\":\"ff\"}\n{\"key_hex\":\"ff\",\"value\":\"b\"}\n")
        .unwrap();
    p.ok("import --db g old.jsonl");
    assert_eq!(p.ok("scan --db g"), "a\t\\xff\n\\xff\tb\n");
}

#[test]
fn bad_text_files_change_nothing() {
    let p = CliFixture::new();
    p.ok("put --create --db d old value");
    let cases = [
        ("a.csv", "", "empty"),
        ("a.csv", "a,b\n1,2\n", "must name the columns"),
        ("a.csv", "key\n1\n", "no column \"value\""),
        ("a.csv", "key,value,more\n1,2,3\n", "\"more\""),
        ("a.csv", "key,key_hex,value\n1,2,3\n", "two columns for the key"),
        ("a.csv", "key,value\n1,2\n3\n", "line 3 has 1 columns"),
        ("a.csv", "key,value\n1,2\n3,\"cut of", "line 3: a quotation mark"),
        // The import accepted an even number of quotation marks, and stored other contents.
        ("a.csv", "key,value\n\"abc,1\n\"def,2\nghi,3\n", "line 3: text behind a closing quotation mark"),
        ("a.csv", "key,value\n\"a\"b,\"c\"d\n", "line 2: text behind"),
        ("a.csv", "key,value\na \"b\",c\n", "line 2: a quotation mark in a field"),
        ("a.csv", "key_hex,value\n61,2\n6,2\n", "line 3: the key is not hexadecimal"),
        ("a.csv", "key,value_escape\n61,\\q\n", "no escape"),
        ("a.jsonl", "{\"key\":\"a\",\"value\":\"1\"}\n{\"key\":\"b\",\"val", "line 2"),
        ("a.jsonl", "{\"key\":\"a\",\"key\":\"b\",\"value\":\"1\"}\n", "duplicate field"),
        ("a.jsonl", "{\"key\":\"a\",\"key_hex\":\"61\",\"value\":\"1\"}\n", "both present"),
        ("a.jsonl", "{\"key_base64\":\"*\",\"value\":\"1\"}\n", "not base64"),
        ("a.jsonl", "key,value\n1,2\n", "line 1"),
    ];
    for (name, content, why) in cases {
        std::fs::write(p.path(name), content).unwrap();
        for command in ["import --db d", "import --db none", "import --db none --dry-run"] {
            let ran = p.run(&format!("{command} {name}"));
            assert_eq!(ran.code, Some(3), "{content:?}: {ran:?}");
            assert!(ran.err.contains(why) && ran.err.contains("nothing was stored"), "{content:?}: {ran:?}");
        }
        assert!(!p.path("none").exists(), "{content:?}");
        assert_eq!(p.ok("scan --db d"), "old\tvalue\n", "{content:?}");
    }
    let conflict = "key_hex,value\n61,2\n";
    std::fs::write(p.path("a.csv"), conflict).unwrap();
    assert_eq!(p.run("import --db d a.csv --key-encoding base64").code, Some(3));
    std::fs::write(p.path("a.csv"), b"key,value\n\xff,2\n").unwrap();
    let ran = p.run("import --db d a.csv --json");
    assert_eq!(ran.error()["offset"], 10, "{ran:?}");
}

#[test]
fn dry_run_reports_and_stores_nothing() {
    let p = CliFixture::new();
    let long = format!("key,value\na,1\n{},2\n", "k".repeat(70_000));
    std::fs::write(p.path("a.csv"), long).unwrap();
    let ran = p.run("import --db d a.csv --dry-run --json");
    let report: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
    assert_eq!((ran.code, &report["entries"], &report["left_out"][0]["name"]), (Some(1), &json!(1), &json!("line 3")));
    std::fs::create_dir(p.path("dir")).unwrap();
    std::fs::write(p.path("dir/file"), "x").unwrap();
    assert_eq!(p.ok("import --db d dir --dry-run"), "1 entry, 5 B can be stored\n");
    assert!(!p.path("d").exists());
    assert_eq!(p.run("import --db d a.csv").code, Some(1));
    assert_eq!(p.ok("count --db d"), "1\n");
}

/// Partitions with options that differ from the defaults, and their options.
fn database_with_options(p: &CliFixture) -> Vec<(&'static str, PartitionCreateOptions)> {
    let separation = KvSeparationOptions::default()
        .separation_threshold(600)
        .compression(CompressionType::Miniz(3))
        .automatic_gc(None);
    let options = PartitionCreateOptions::default()
        .block_size(1000)
        .compression(CompressionType::Miniz(7))
        .filter_policy(FilterPolicy::Bloom { bits_per_key: 12.3 })
        .data_block_hash_table_util_ratio(0.3)
        .max_memtable_size(1 << 20);
    let partitions = vec![
        ("blobs", options.clone().with_kv_separation(separation)),
        ("empty", options.compression_per_level(vec![CompressionType::None, CompressionType::Lz4])),
        (
            "memory",
            PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(5 << 20))),
        ),
    ];
    let db = Config::new(p.path("d")).open().unwrap();
    for (name, options) in &partitions {
        let partition = db.open_partition(name, options.clone()).unwrap();
        let count = if *name == "empty" { 0 } else { 5000u32 };
        (0..count).for_each(|n| partition.insert(n.to_be_bytes(), vec![n as u8; (n % 1000) as usize]).unwrap());
    }
    db.close().unwrap();
    partitions
}

#[test]
fn native_export_carries_options() {
    let p = CliFixture::new();
    let partitions = database_with_options(&p);
    assert_eq!(p.json("export --db d all.azk")["entries"], 10_000);
    p.ok("import --db e all.azk");
    p.ok("import --db plain all.azk --ignore-options");
    p.ok("import --db renamed all.azk --partition memory");
    let open = |name: &str| Config::new(p.path(name)).open_read_only().unwrap();
    for (name, options) in &partitions {
        assert_eq!(open("e").partition(name).unwrap().options(), *options, "{name}");
        assert_eq!(open("plain").partition(name).unwrap().options(), PartitionCreateOptions::default(), "{name}");
        assert!(entries(&p, "e", name) == entries(&p, "d", name), "{name}");
    }
    assert_eq!(open("renamed").list_partitions(), ["memory"]);
    p.ok("export --db d one.azk --partition blobs");
    p.ok("import --db renamed one.azk --partition other");
    assert!(entries(&p, "renamed", "other") == entries(&p, "d", "blobs"));
    assert_eq!(open("renamed").partition("other").unwrap().options(), partitions[0].1);
    let unknown = p.run("import --db renamed all.azk --partition nothing");
    assert_eq!(unknown.code, Some(3));
    assert!(unknown.err.contains("blobs, empty, memory"), "{unknown:?}");
    // An existing partition keeps its options.
    p.ok("import --db plain all.azk");
    assert_eq!(open("plain").partition("blobs").unwrap().options(), PartitionCreateOptions::default());
}

/// The order of bytes under a name that the program does not know.
struct ForeignOrder;

impl Comparator for ForeignOrder {
    fn name(&self) -> &str {
        "foreign"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
        a.cmp(b)
    }
}

/// Regression: an export that had skipped the only partition was refused by an import as damaged.
#[test]
fn native_file_without_partitions_is_read() {
    let p = CliFixture::new();
    let db = Config::new(p.path("d")).open().unwrap();
    drop(db.open_partition_with_comparator("p", Default::default(), Arc::new(ForeignOrder)).unwrap());
    db.close().unwrap();
    let skipped = p.run("export --db d none.azk");
    assert!(skipped.err.contains("foreign") || skipped.text().contains("foreign"), "{skipped:?}");
    fill(&p, "e", &[]);
    assert_eq!(p.json("import --db e none.azk")["entries"], 0);
    assert_eq!(Config::new(p.path("e")).open_read_only().unwrap().list_partitions(), ["default"]);
    p.ok("import --db f none.azk --dry-run");
    assert!(!p.path("f").exists(), "nothing is created");
    p.ok("import --db f none.azk");
    assert!(Config::new(p.path("f")).open_read_only().unwrap().list_partitions().is_empty());
    assert_eq!(p.run("import --db f none.azk --partition p").code, Some(3));
}

/// A file of version 1 of the format. Every later version reads it.
#[test]
fn native_file_of_version_1_is_read() {
    let p = CliFixture::new();
    std::fs::write(p.path("old.azk"), include_bytes!("testdata/native-v1.azk")).unwrap();
    assert_eq!(p.json("import --db d old.azk")["entries"], 3);
    let pair = |key: &[u8], value: &[u8]| (key.to_vec(), value.to_vec());
    assert_eq!(entries(&p, "d", "pages"), [pair(b"a", b"1"), pair(b"b", b"2")]);
    assert_eq!(entries(&p, "d", "pool"), [pair(b"\x00\xff", b"\xca\xfe")]);
    let db = Config::new(p.path("d")).open_read_only().unwrap();
    let separated = KvSeparationOptions::default().separation_threshold(1 << 10);
    let pages = PartitionCreateOptions::default().block_size(16 << 10).with_kv_separation(separated);
    assert_eq!(db.partition("pages").unwrap().options(), pages);
    let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
    assert_eq!(db.partition("pool").unwrap().options(), PartitionCreateOptions::default().engine(pool));
}

#[test]
fn damaged_native_files_change_nothing() {
    let p = CliFixture::new();
    database_with_options(&p);
    p.ok("export --db d all.azk --partition memory");
    let good = std::fs::read(p.path("all.azk")).unwrap();
    let check = |bytes: &[u8], what: &str| {
        std::fs::write(p.path("bad.azk"), bytes).unwrap();
        let ran = p.run("import --db e bad.azk --format native --json");
        assert_eq!(ran.code, Some(3), "{what}: {ran:?}");
        let error = ran.error();
        assert!(error["offset"].is_u64() && error["message"].as_str().unwrap().contains("nothing"), "{what}: {error}");
        assert!(!p.path("e").exists(), "{what}");
    };
    for cut in (0..40).chain([good.len() / 2, good.len() - 30, good.len() - 1]) {
        check(&good[..cut], &format!("cut off at byte {cut}"));
    }
    for at in (0..120).step_by(7).chain([good.len() / 3, good.len() / 2, good.len() - 20, good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        check(&bad, &format!("byte {at} changed"));
    }
    check(&[&good[..], b"x"].concat(), "one extra byte");
    let ran = p.run("import --db e all.azk --format csv");
    assert!(ran.code == Some(3) && ran.err.contains("native"), "{ran:?}");
    // From standard input the entries before the damage are stored, and the message says so.
    let ran = p.run_with_input(["import", "--db", "e", "-"], &good[..good.len() - 1]);
    assert!(ran.code == Some(3) && ran.err.contains("before it were stored"), "{ran:?}");
}

#[test]
fn csv_columns_and_delimiter_can_be_named() {
    let p = CliFixture::new();
    std::fs::write(p.path("a.csv"), "id;name;note\n1;ann;x\n2;\"b;ob\";y\n").unwrap();
    p.ok("import --db d a.csv --key-column id --value-column name --delimiter ;");
    assert_eq!(p.ok("scan --db d"), "1\tann\n2\tb;ob\n");
    p.ok("export --db d b.csv --key-column id --value-column name --delimiter \\t");
    assert_eq!(std::fs::read_to_string(p.path("b.csv")).unwrap(), "id\tname\n1\tann\n2\tb;ob\n");
    p.ok("export --db d c.csv --key-column id --key-encoding hex");
    assert!(std::fs::read_to_string(p.path("c.csv")).unwrap().starts_with("id_hex,value\n31,ann\n"));
    p.ok("import --db e c.csv --key-column id");
    assert_eq!(p.ok("count --db e"), "2\n");
    let missing = p.run("import --db d a.csv --key-column none --delimiter ;");
    assert!(missing.code == Some(3) && missing.err.contains("no column \"none\""), "{missing:?}");
    assert_eq!(p.run("import --db d a.csv --delimiter ab").code, Some(2));
    assert_eq!(p.run("export --db d x.jsonl --delimiter ;").code, Some(2));
}

/// A failed import said nothing about the batches that were stored before the failure, unless the input was wrong.
#[test]
fn failed_import_says_how_much_it_stored() {
    let p = CliFixture::new();
    let good: String = (0..1500).map(|n| format!("{{\"key\":\"{n}\",\"value\":\"v\"}}\n")).collect();
    let ran = p.run_with_input(["import", "--db", "d", "-"], format!("{good}bad\n").as_bytes());
    assert!(ran.code == Some(3) && ran.err.contains("1,500 entries before it were stored"), "{ran:?}");
    assert_eq!(p.ok("count --db d"), "1500\n");
    // An error of the database: the pool is full.
    p.ok("partitions create --db d pool --engine pmem --pool-max-size 64KiB");
    let large = good.replace("\"v\"", &format!("\"{}\"", "v".repeat(200)));
    let ran = p.run_with_input(["import", "--db", "d", "--partition", "pool", "-"], large.as_bytes());
    let stored: u32 = p.ok("count --db d --partition pool").trim().parse().unwrap();
    assert!((1..1500).contains(&stored) && ran.code == Some(3), "{stored}: {ran:?}");
    let digits: String = ran.err.chars().filter(|c| *c != ',').collect();
    assert!(digits.contains(&format!("; {stored} entries before it were stored")), "{stored}: {ran:?}");
}
