//! Options and settings as data: stored with the database, and serialized by `serde`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::testing::MemFs;
use azekura::{
    CompactionStrategy, CompressionType, Config, DataBlockIndexType, EngineType, FilterPolicy, KvSeparationOptions,
    LeveledOptions, Metrics, PartitionCreateOptions, PartitionMetrics, PmemOptions, Settings,
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

/// The names in JSON are those of the methods that set the options, and options that are left out have defaults.
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
