//! Names of partitions, and options outside of their ranges.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::Fs;
use azekura::testing::MemFs;
use azekura::{
    CompactionStrategy, CompressionType, Config, ErrorKind, FilterPolicy, KvSeparationOptions, LeveledOptions,
    PartitionCreateOptions,
};

use super::{assert_all_invalid, config, error_kind, expect_error, open, open_partition};
use crate::testkit::test_dir::dir_contents;

#[test]
fn partition_name_is_any_text_up_to_255_bytes() {
    let machine = MemFs::new();
    let db = open(&machine);
    let long = "x".repeat(256);
    let wide = "\u{2713}".repeat(86);
    assert_all_invalid(
        &db,
        &mut [
            ("the empty name", &mut || db.open_partition("", Default::default()).map(drop)),
            ("256 bytes", &mut || db.open_partition(&long, Default::default()).map(drop)),
            ("258 bytes in 86 letters", &mut || db.open_partition(&wide, Default::default()).map(drop)),
        ],
    );
    assert!(db.list_partitions().is_empty());
    let names = ["..", "../../x", "/etc/passwd", "a\0b", "\u{2713} \u{1f980}", "LOCK", "000001.sst", &long[1..], " "];
    for name in names {
        open_partition(&db, name).insert("name", name).unwrap();
        open_partition(&db, name).flush().unwrap();
    }
    let here: Vec<String> = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name).collect();
    assert!(
        here.iter().all(|n| n == "LOCK"
            || n == "RESERVE"
            || n == "MANIFEST"
            || n.ends_with(".sst")
            || n.ends_with(".blob")
            || n.ends_with(".wal")),
        "{here:?}"
    );
    assert_eq!(machine.read_dir(Path::new("/")).unwrap().len(), 1, "a name created a file outside of the directory");
    db.close().unwrap();
    let db = open(&machine);
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    assert_eq!(db.list_partitions(), sorted);
    for name in names {
        assert!(db.partition_exists(name));
        assert_eq!(open_partition(&db, name).get("name").unwrap().as_deref(), Some(name.as_bytes()));
    }
    assert!(!db.partition_exists("none") && !db.partition_exists(""));
}

#[test]
fn invalid_partition_options_create_nothing() {
    let machine = MemFs::new();
    let db = open(&machine);
    let good = PartitionCreateOptions::default;
    let leveled = |change: &dyn Fn(LeveledOptions) -> LeveledOptions| {
        good().compaction_strategy(CompactionStrategy::Leveled(change(LeveledOptions::default())))
    };
    let separation = |change: &dyn Fn(KvSeparationOptions) -> KvSeparationOptions| {
        good().with_kv_separation(change(KvSeparationOptions::default()))
    };
    let bad = [
        ("block_size", good().block_size(63)),
        ("block_size", good().block_size((1 << 20) + 1)),
        ("metadata_block_size", good().metadata_block_size(0)),
        ("restart_interval", good().restart_interval(0)),
        ("util_ratio", good().data_block_hash_table_util_ratio(0.0)),
        ("util_ratio", good().data_block_hash_table_util_ratio(10.01)),
        ("util_ratio", good().data_block_hash_table_util_ratio(f64::NAN)),
        ("max_memtable_size", good().max_memtable_size(4095)),
        ("max_memtable_size", good().max_memtable_size(u64::MAX)),
        ("filter", good().filter_policy(FilterPolicy::Bloom { bits_per_key: 0.0 })),
        ("filter", good().filter_policy(FilterPolicy::Bloom { bits_per_key: f32::NAN })),
        ("zlib", good().compression(CompressionType::Miniz(11))),
        ("zlib", good().compression_per_level(vec![CompressionType::None, CompressionType::Miniz(200)])),
        ("compression_per_level", good().compression_per_level(vec![CompressionType::None; 65])),
        ("l0_compaction_trigger", leveled(&|options| options.l0_compaction_trigger(0))),
        ("target_file_size", leveled(&|options| options.target_file_size(1))),
        ("level_size_multiplier", leveled(&|options| options.level_size_multiplier(1))),
        ("base_level_size", leveled(&|options| options.base_level_size(0))),
        ("separation_threshold", separation(&|options| options.separation_threshold(0))),
        ("blob_file_target_size", separation(&|options| options.blob_file_target_size(1000))),
        ("zlib", separation(&|options| options.compression(CompressionType::Miniz(11)))),
        ("automatic_gc", separation(&|options| options.automatic_gc(Some(0.5)))),
        ("automatic_gc", separation(&|options| options.automatic_gc(Some(f32::NAN)))),
    ];
    open_partition(&db, "old").insert("k", "v").unwrap();
    for (what, options) in bad {
        for name in ["new", "old"] {
            assert_all_invalid(&db, &mut [(what, &mut || db.open_partition(name, options.clone()).map(drop))]);
            let message = expect_error(db.open_partition(name, options.clone())).to_string();
            assert!(message.contains(what), "{message:?} does not name {what}");
        }
    }
    assert_eq!(db.list_partitions(), ["old"]);
}

#[test]
fn invalid_database_options_touch_no_file() {
    let machine = MemFs::new();
    type SetOption = fn(Config) -> Config;
    let bad: [(&str, SetOption); 11] = [
        ("workers", |c| c.workers(65)),
        ("wal_segment_size", |c| c.wal_segment_size(1)),
        ("wal_segment_size", |c| c.wal_segment_size((1 << 30) + 1)),
        ("max_wal_size", |c| c.wal_segment_size(1 << 20).max_wal_size(1 << 19)),
        ("max_open_files", |c| c.max_open_files(7)),
        ("memory_budget", |c| c.memory_budget(1000)),
        ("memory_budget", |c| c.memory_budget(u64::MAX)),
        ("cache_size", |c| c.cache_size(u64::MAX)),
        ("sync_interval", |c| c.sync_interval(Some(Duration::from_micros(999)))),
        ("sync_interval", |c| c.sync_interval(Some(Duration::MAX))),
        ("zlib", |c| c.compression(CompressionType::Miniz(11))),
    ];
    for (what, tune) in bad {
        let refused = expect_error(tune(config(&machine)).open());
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        assert!(refused.to_string().contains(what), "{refused} does not name {what}");
        assert_eq!(machine.op_count(), 0, "{what}: the disk was touched");
    }
    open(&machine).close().unwrap();
    let before = dir_contents(&machine, Path::new("/db"));
    for (_, tune) in bad {
        assert_eq!(error_kind(tune(config(&machine)).open()), ErrorKind::Invalid);
        assert_eq!(error_kind(tune(config(&machine)).open_read_only()), ErrorKind::Invalid);
        assert_eq!(error_kind(tune(config(&machine)).open_follower()), ErrorKind::Invalid);
    }
    assert!(dir_contents(&machine, Path::new("/db")) == before);
    let widest = config(&machine).workers(64).cache_size(0).max_open_files(8).wal_segment_size(64 << 10);
    let env: Arc<dyn azekura::fs::Env> = Arc::new(azekura::fs::SystemEnv::new());
    widest.env(env).sync_interval(Some(Duration::from_millis(1))).open().unwrap().close().unwrap();
}
