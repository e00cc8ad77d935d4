//! Options drawn at random: so small that a few hundred operations fill levels, partitions of indexes, and segments.

use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Env, Fs};
use azekura::testing::{SeededRng, TestEnv, TestOrder};
use azekura::{
    CompactionStrategy, CompressionType, Config, DataBlockIndexType, Database, DirectIo, EngineType, FilterPolicy,
    KvSeparationOptions, LeveledOptions, MergeOperator, Partition, PartitionCreateOptions, PmemOptions,
    PrefixExtractor, Result, merge_operators,
};

use super::ordered_partitions::open_ordered;

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
        let mut rng = self.rng_for(name, 0x04DE);
        if self.has_orders && rng.chance_one_in(2) { rng.pick(&TestOrder::ALL[1..]) } else { TestOrder::Bytes }
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
        open_ordered(self.order(name), db, name, self.partition_options(name), self.merge_operator(name))
    }

    /// The merge operator of the partition `name`, which appends operands to the value. Half of the partitions have
    /// one.
    pub(crate) fn merge_operator(&self, name: &str) -> Option<Arc<dyn MergeOperator>> {
        self.rng_for(name, 0x3E16).chance_one_in(2).then(|| merge_operators::append(""))
    }

    /// The options of the database: manual background work, and a deterministic environment. A run has one `env` for
    /// all its opens, so that random numbers do not repeat. Every open may have other options than the one before.
    pub(crate) fn config(&self, path: &Path, fs: Arc<dyn Fs>, env: &TestEnv) -> Config {
        let mut random = [0; 8];
        env.random(&mut random);
        let mut rng = SeededRng::new(self.seed ^ u64::from_le_bytes(random) >> 62);
        let config = Config::new(path)
            .fs(fs)
            .env(Arc::new(env.clone()))
            .workers(0)
            .cache_size(rng.pick(&[0, 4 << 10, 64 << 10, 8 << 20]))
            .memory_budget(rng.pick(&[1 << 20, 16 << 20]))
            .max_open_files(rng.pick(&[8, 512]))
            .wal_segment_size(rng.pick(&[64 << 10, 100_000, 1 << 20]))
            .max_wal_size(rng.pick(&[1 << 20, 2 << 20, 512 << 20]))
            .direct_io(rng.pick(&[DirectIo::Never, DirectIo::Automatic, DirectIo::Always]))
            .mapped_wal(!rng.chance_one_in(3))
            .compression(rng.pick(&CODECS));
        if rng.chance_one_in(3) { config.direct_io(DirectIo::Never).mapped_reads(true) } else { config }
    }

    fn rng_for(&self, word: &str, salt: u64) -> SeededRng {
        let sum = word.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        SeededRng::new(self.seed ^ (sum << 20) ^ salt)
    }

    /// The options of the partition of that name.
    pub(crate) fn partition_options(&self, name: &str) -> PartitionCreateOptions {
        self.changed_partition_options(name, name)
    }

    /// Other options for the partition; equal values of `word` give equal options.
    pub(crate) fn changed_partition_options(&self, name: &str, word: &str) -> PartitionCreateOptions {
        let mut rng = self.rng_for(word, 0x0A67);
        if self.is_pool(name) {
            let sizes = PmemOptions::default().max_size(rng.pick(&[32 << 20, 256 << 20]));
            let sizes = sizes.growth_step(rng.pick(&[4 << 10, 64 << 10, 1 << 20]));
            return PartitionCreateOptions::default().engine(EngineType::Pmem(sizes));
        }
        let mut options = PartitionCreateOptions::default()
            .block_size(rng.pick(&[64, 100, 256, 1000, 4096]))
            .restart_interval(rng.pick(&[1, 2, 3, 16, 255]))
            .data_block_hash_table_util_ratio(rng.pick(&[0.1, 0.5, 0.75, 1.0, 10.0]))
            .metadata_block_size(rng.pick(&[64, 128, 1000, 4096]))
            .partition_index_and_filters(rng.chance_one_in(2))
            .cache_index_and_filter_blocks(rng.chance_one_in(2))
            .pin_top_level(rng.chance_one_in(2))
            .pin_l0_and_l1(rng.chance_one_in(2))
            .max_memtable_size(rng.pick(&[4 << 10, 6_000, 16 << 10, 64 << 10]))
            .compaction_strategy(CompactionStrategy::Leveled(random_leveled_options(&mut rng)));
        if !rng.chance_one_in(4) {
            options = options.data_block_index_type(rng.pick(&INDEX_TYPES));
        }
        if rng.chance_one_in(2) {
            options = options.compression(rng.pick(&CODECS));
        }
        if rng.chance_one_in(2) {
            let levels = (0..1 + rng.below(3)).map(|_| rng.pick(&CODECS)).collect();
            options = options.compression_per_level(levels);
        }
        if rng.chance_one_in(2) {
            let separation = KvSeparationOptions::default()
                .separation_threshold(rng.pick(&[16, 30, 100, 1000]))
                .blob_file_target_size(rng.pick(&[1 << 10, 8 << 10, 1 << 20]))
                .compression(rng.pick(&CODECS))
                .automatic_gc(None)
                .direct_write_threshold(rng.pick(&[16, 60, 1 << 20]));
            options = options.with_kv_separation(separation);
        }
        let extractors = [PrefixExtractor::Fixed(1), PrefixExtractor::Fixed(3), PrefixExtractor::Delimiter(b'0')];
        options = options.prefix_extractor(extractors.get(self.rng_for(word, 0x9F1E).below(6)).copied());
        match rng.below(4) {
            0 => options.filter_policy(FilterPolicy::None),
            1 => options.filter_policy(FilterPolicy::Bloom { bits_per_key: 1.0 }),
            2 => options.filter_policy(FilterPolicy::Bloom { bits_per_key: 20.0 }),
            _ => options,
        }
    }
}

fn random_leveled_options(rng: &mut SeededRng) -> LeveledOptions {
    LeveledOptions::default()
        .l0_compaction_trigger(rng.pick(&[1, 2, 4]))
        .target_file_size(rng.pick(&[4 << 10, 8 << 10, 64 << 10]))
        .level_size_multiplier(rng.pick(&[2, 3, 10]))
        .base_level_size(rng.pick(&[8 << 10, 32 << 10, 1 << 20]))
}
