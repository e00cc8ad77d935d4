//! Options and settings as data: stored with the database, and serialized by `serde`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::testing::MemFs;
use azekura::{
    CompactionStrategy, CompressionType, Config, DataBlockIndexType, EngineType, ErrorKind, FilterPolicy,
    KvSeparationOptions, LeveledOptions, Metrics, PartitionCreateOptions, PartitionMetrics, PmemOptions, Settings,
};

fn json_round_trip<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

#[test]
fn stored_settings_are_those_of_last_writer() {
    let fs = MemFs::new();
    let config = || Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).workers(0);
    let first = config().cache_size(1 << 20).sync_interval(Some(Duration::from_millis(25)));
    let db = first.clone().open().unwrap();
    assert_eq!(db.settings(), first.settings());
    assert_eq!(db.stored_settings().as_ref(), Some(first.settings()));
    db.checkpoint("/copy").unwrap();
    db.close().unwrap();
    let stored = || config().open_read_only().unwrap().stored_settings();
    assert_eq!(stored().as_ref(), Some(first.settings()), "a reader stores nothing");
    let copy = Config::new(Path::new("/copy")).fs(Arc::new(fs.clone())).open_read_only().unwrap();
    assert_eq!(copy.stored_settings().as_ref(), Some(first.settings()));
    let second = config().compression(CompressionType::Miniz(3));
    second.clone().open().unwrap().close().unwrap();
    assert_eq!(stored().as_ref(), Some(second.settings()));
}

#[test]
fn options_and_metrics_round_trip_as_json() {
    let settings = Config::new("/db").workers(7).sync_interval(Some(Duration::from_millis(3))).settings().clone();
    assert_eq!(json_round_trip(&settings), settings);
    let options = PartitionCreateOptions::default()
        .block_size(1 << 10)
        .compression(CompressionType::Miniz(7))
        .compression_per_level(vec![CompressionType::None, CompressionType::Lz4])
        .data_block_index_type(DataBlockIndexType::BinaryAndHash)
        .data_block_hash_table_util_ratio(0.5)
        .filter_policy(FilterPolicy::Bloom { bits_per_key: 12.5 })
        .pin_l0_and_l1(true)
        .compaction_strategy(CompactionStrategy::Leveled(LeveledOptions::default().l0_compaction_trigger(9)));
    let separated = options.clone().with_kv_separation(KvSeparationOptions::default().separation_threshold(77));
    let pool = options.clone().engine(EngineType::Pmem(PmemOptions::default().max_size(5 << 20)));
    for options in [PartitionCreateOptions::default(), options, separated, pool] {
        assert_eq!(json_round_trip(&options), options);
    }
    let fs = MemFs::new();
    let db = Config::new(Path::new("/db")).fs(Arc::new(fs)).workers(0).open().unwrap();
    let part = db.open_partition("p", PartitionCreateOptions::default()).unwrap();
    part.insert("key", "value").unwrap();
    part.flush().unwrap();
    let metrics: Metrics = json_round_trip(&db.metrics());
    assert_eq!((metrics.commits, metrics.flushes), (1, 1));
    let metrics: PartitionMetrics = json_round_trip(&part.metrics());
    assert_eq!(metrics, part.metrics());
}

/// Regression: every open replaced the stored options by the given ones, without an error. A program that opened a
/// partition with `Default::default()` reset a TTL, a block size or the limit of a pool.
#[test]
fn open_keeps_options_that_set_options_changes() {
    let fs = MemFs::new();
    let config = || Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).workers(0);
    let sized = |bytes| EngineType::Pmem(PmemOptions::default().max_size(bytes));
    let ttl = Duration::from_secs(60);
    let (lsm, pool) = (PartitionCreateOptions::default(), PartitionCreateOptions::default().engine(sized(1 << 20)));
    for (name, first, second, other_engine) in [
        ("lsm", lsm.clone().block_size(1 << 10), lsm.clone().default_ttl(ttl), pool.clone()),
        ("pool", pool.clone(), lsm.clone().engine(sized(2 << 20)).default_ttl(ttl), lsm),
    ] {
        let db = config().open().unwrap();
        let part = db.open_partition(name, first.clone()).unwrap();
        assert_eq!(db.open_partition(name, second.clone()).unwrap().options(), first);
        part.set_options(second.clone()).unwrap();
        assert_eq!(db.partition(name).unwrap().options(), second);
        for wrong in [other_engine.clone(), first.clone().block_size(1)] {
            assert_eq!(part.set_options(wrong).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!(db.open_partition(name, other_engine).unwrap_err().kind(), ErrorKind::Invalid);
        db.close().unwrap();
        assert_eq!(part.set_options(first.clone()).unwrap_err().kind(), ErrorKind::Closed);
        let reader = config().open_read_only().unwrap();
        let part = reader.open_partition(name, first.clone()).unwrap();
        assert_eq!(part.set_options(first.clone()).unwrap_err().kind(), ErrorKind::Invalid, "read-only");
        assert_eq!(part.options(), second);
        drop((reader, part));
        let db = config().open().unwrap();
        assert_eq!(db.open_partition(name, first.clone()).unwrap().options(), second);
        let part = db.partition(name).unwrap();
        db.delete_partition(part.clone()).unwrap();
        assert_eq!(part.set_options(first).unwrap_err().kind(), ErrorKind::Closed);
    }
}

/// The names in JSON are those of the methods that set the options, and omitted options have their defaults.
#[test]
fn json_names_are_those_of_the_methods() {
    let json = r#"{
        "block_size": 8192, "filter_policy": {"bloom": {"bits_per_key": 20.0}}, "compression": {"miniz": 4},
        "compaction_strategy": {"leveled": {"target_file_size": 1048576}},
        "kv_separation": {"separation_threshold": 4096, "automatic_gc": null}
    }"#;
    let expected = PartitionCreateOptions::default()
        .block_size(8192)
        .filter_policy(FilterPolicy::Bloom { bits_per_key: 20.0 })
        .compression(CompressionType::Miniz(4))
        .compaction_strategy(CompactionStrategy::Leveled(LeveledOptions::default().target_file_size(1 << 20)))
        .with_kv_separation(KvSeparationOptions::default().separation_threshold(4096).automatic_gc(None));
    assert_eq!(serde_json::from_str::<PartitionCreateOptions>(json).unwrap(), expected);
    let settings: Settings = serde_json::from_str(r#"{"cache_size": 5, "durability": "sync_all"}"#).unwrap();
    let config = Config::new("/db").cache_size(5).durability(azekura::PersistMode::SyncAll);
    assert_eq!(&settings, config.settings());
}
