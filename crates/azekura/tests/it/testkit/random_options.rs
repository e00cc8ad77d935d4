//! Options drawn at random: so small that a few hundred operations fill levels, pieces and segments.

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Env, Fs};
use azekura::testing::TestEnv;
use azekura::{
    CompactionStrategy, CompressionType, Config, DataBlockIndexType, Database, DirectIo, EngineType, FilterPolicy,
    KvSeparationOptions, LeveledOptions, Partition, PartitionCreateOptions, PmemOptions, Result,
};

use super::comparators::{TEST_ORDERS, TestOrder};
use super::rng::SeededRng;

/// The options of one run, all of them from its seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomOptions {
    pub(crate) seed: u64,
    /// Whether half of the partitions have a comparator, drawn by name.
    pub(crate) has_orders: bool,
}

const CODECS: [CompressionType; 5] = [
    CompressionType::None,
    CompressionType::Lz4,
    CompressionType::Miniz(0),
    CompressionType::Miniz(6),
    CompressionType::Miniz(10),
];

pub(crate) const INDEX_TYPES: [DataBlockIndexType; 3] =
    [DataBlockIndexType::BinarySearch, DataBlockIndexType::BinaryAndHash, DataBlockIndexType::Fingerprint];

impl RandomOptions {
    pub(crate) fn new(seed: u64) -> RandomOptions {
        RandomOptions { seed, has_orders: false }
    }

    /// The same, and half of the partitions have a comparator, most of which panic on a key that was not inserted.
    pub(crate) fn with_orders(seed: u64) -> RandomOptions {
        RandomOptions { seed, has_orders: true }
    }

    /// The order of the keys of the partition `name`. [`TestOrder::valid_key`] makes keys for it.
    pub(crate) fn order(&self, name: &str) -> TestOrder {
        let mut dice = self.rng_for(name, 0x04DE);
        if self.has_orders && dice.chance_one_in(2) { dice.pick(&TEST_ORDERS[1..]) } else { TestOrder::Bytes }
    }

    /// Whether the partition `name` is a pool.
    pub(crate) fn is_pool(&self, name: &str) -> bool {
        self.rng_for(name, 0x9001).chance_one_in(3)
    }

    /// Opens or creates the partition `name`.
    ///
    /// # Errors
    /// Those of opening.
    pub(crate) fn open(&self, db: &Database, name: &str) -> Result<Partition> {
        self.order(name).open(db, name, self.partition_options(name))
    }

    /// The database's options: manual work, and a world without chance. A run has one `env` for all its opens, so that
    /// no random number comes twice. Every open may have other options than the one before.
    pub(crate) fn config(&self, path: &Path, fs: Arc<dyn Fs>, env: &TestEnv) -> Config {
        let mut random = [0; 8];
        env.random(&mut random);
        let mut dice = SeededRng::new(self.seed ^ u64::from_le_bytes(random) >> 62);
        Config::new(path)
            .fs(fs)
            .env(Arc::new(env.clone()))
            .workers(0)
            .cache_size(dice.pick(&[0, 4 << 10, 64 << 10, 8 << 20]))
            .memory_budget(dice.pick(&[1 << 20, 16 << 20]))
            .max_open_files(dice.pick(&[8, 512]))
            .wal_segment_size(dice.pick(&[64 << 10, 100_000, 1 << 20]))
            .max_wal_size(dice.pick(&[1 << 20, 2 << 20, 512 << 20]))
            .direct_io(dice.pick(&[DirectIo::Never, DirectIo::Automatic, DirectIo::Always]))
            .mapped_wal(!dice.chance_one_in(3))
            .compression(dice.pick(&CODECS))
    }

    fn rng_for(&self, word: &str, salt: u64) -> SeededRng {
        let sum = word.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        SeededRng::new(self.seed ^ (sum << 20) ^ salt)
    }

    /// The options of the partition of that name.
    pub(crate) fn partition_options(&self, name: &str) -> PartitionCreateOptions {
        self.changed_partition_options(name, name)
    }

    /// Other options for it, the same each time for a word.
    pub(crate) fn changed_partition_options(&self, name: &str, word: &str) -> PartitionCreateOptions {
        let mut dice = self.rng_for(word, 0x0A67);
        if self.is_pool(name) {
            let sizes = PmemOptions::default().max_size(dice.pick(&[32 << 20, 256 << 20]));
            let sizes = sizes.growth_step(dice.pick(&[4 << 10, 64 << 10, 1 << 20]));
            return PartitionCreateOptions::default().engine(EngineType::Pmem(sizes));
        }
        let mut options = PartitionCreateOptions::default()
            .block_size(dice.pick(&[64, 100, 256, 1000, 4096]))
            .restart_interval(dice.pick(&[1, 2, 3, 16, 255]))
            .data_block_hash_table_util_ratio(dice.pick(&[0.1, 0.5, 0.75, 1.0, 10.0]))
            .metadata_block_size(dice.pick(&[64, 128, 1000, 4096]))
            .partition_index_and_filters(dice.chance_one_in(2))
            .cache_index_and_filter_blocks(dice.chance_one_in(2))
            .pin_top_level(dice.chance_one_in(2))
            .pin_l0_and_l1(dice.chance_one_in(2))
            .max_memtable_size(dice.pick(&[4 << 10, 6_000, 16 << 10, 64 << 10]))
            .compaction_strategy(CompactionStrategy::Leveled(random_leveled_options(&mut dice)));
        if !dice.chance_one_in(4) {
            options = options.data_block_index_type(dice.pick(&INDEX_TYPES));
        }
        if dice.chance_one_in(2) {
            options = options.compression(dice.pick(&CODECS));
        }
        if dice.chance_one_in(2) {
            let levels = (0..1 + dice.below(3)).map(|_| dice.pick(&CODECS)).collect();
            options = options.compression_per_level(levels);
        }
        if dice.chance_one_in(2) {
            let apart = KvSeparationOptions::default()
                .separation_threshold(dice.pick(&[16, 30, 100, 1000]))
                .blob_file_target_size(dice.pick(&[1 << 10, 8 << 10, 1 << 20]))
                .compression(dice.pick(&CODECS))
                .automatic_gc(None)
                .direct_write_threshold(dice.pick(&[16, 60, 1 << 20]));
            options = options.with_kv_separation(apart);
        }
        match dice.below(4) {
            0 => options.filter_policy(FilterPolicy::None),
            1 => options.filter_policy(FilterPolicy::Bloom { bits_per_key: 1.0 }),
            2 => options.filter_policy(FilterPolicy::Bloom { bits_per_key: 20.0 }),
            _ => options,
        }
    }
}

fn random_leveled_options(dice: &mut SeededRng) -> LeveledOptions {
    LeveledOptions::default()
        .l0_compaction_trigger(dice.pick(&[1, 2, 4]))
        .target_file_size(dice.pick(&[4 << 10, 8 << 10, 64 << 10]))
        .level_size_multiplier(dice.pick(&[2, 3, 10]))
        .base_level_size(dice.pick(&[8 << 10, 32 << 10, 1 << 20]))
}
