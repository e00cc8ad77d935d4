//! Options of a tree.

use crate::base::compression::CompressionType;
use crate::base::{Error, Result};
use crate::lsm::blob::options::KvSeparationOptions;
use crate::table::options::{TableOptions, TableReadOptions};

/// The options of one LSM tree. A change applies to files that are written from then on, and to tables that are opened
/// from then on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LsmOptions {
    /// A memtable that holds at least this many bytes is sealed.
    pub(crate) max_memtable_size: u64,
    pub(crate) compaction: LeveledOptions,
    /// How tables are built. Its `compression` applies to levels that `compression_per_level` does not have.
    pub(crate) table: TableOptions,
    /// By level. The last one also applies to deeper levels. If empty, `table.compression` applies to all levels.
    pub(crate) compression_per_level: Vec<CompressionType>,
    /// `None`: every value is stored in a table with its key.
    pub(crate) kv_separation: Option<KvSeparationOptions>,
}

impl Default for LsmOptions {
    fn default() -> LsmOptions {
        LsmOptions {
            max_memtable_size: 64 << 20,
            compaction: LeveledOptions::default(),
            table: TableOptions::default(),
            compression_per_level: Vec::new(),
            kv_separation: None,
        }
    }
}

impl LsmOptions {
    pub(crate) fn compression_at(&self, level: u8) -> CompressionType {
        let list = &self.compression_per_level;
        list.get(usize::from(level)).or(list.last()).copied().unwrap_or(self.table.compression)
    }

    /// The table options for `level`.
    pub(crate) fn table_options(&self, level: u8) -> TableOptions {
        TableOptions { compression: self.compression_at(level), ..self.table.clone() }
    }

    /// Values of at least this many bytes are direct blob writes.
    pub(crate) fn direct_write_threshold(&self) -> u64 {
        let separation = self.kv_separation.as_ref();
        separation.map_or(u64::MAX, |separation| u64::from(separation.threshold.max(separation.direct_write_threshold)))
    }

    /// The options with which tables on `level` are opened.
    pub(crate) fn read_options(&self, level: u8) -> TableReadOptions {
        TableReadOptions::for_level(&self.table, level)
    }
}

/// The options of leveled compaction. Flushes add runs to level 0. Every deeper level is one sorted run, and its size
/// target is `level_size_multiplier` times that of the level above.
#[derive(Clone, Debug, PartialEq)]
pub struct LeveledOptions {
    /// Level 0 is compacted when it has this many runs, 1 to 1,000. Default 4.
    pub l0_compaction_trigger: u32,
    /// A table is finished at the first new user key after this many bytes, 4 KiB to 16 GiB. Default 64 MiB.
    pub target_file_size: u64,
    /// Ratio of the size targets of adjacent levels, 2 to 100. Default 10.
    pub level_size_multiplier: u32,
    /// Maximum size in bytes of the base level, into which level 0 is compacted, 4 KiB to 1 TiB. Until the tree has
    /// more data, the bottom level is the base level. Default 256 MiB.
    pub base_level_size: u64,
}

impl LeveledOptions {
    /// # Errors
    /// `Invalid` for options out of their range.
    pub(crate) fn check(&self) -> Result<()> {
        let ranges = [
            ("l0_compaction_trigger", u64::from(self.l0_compaction_trigger), 1..=1_000),
            ("target_file_size", self.target_file_size, 4 << 10..=16 << 30),
            ("level_size_multiplier", u64::from(self.level_size_multiplier), 2..=100),
            ("base_level_size", self.base_level_size, 4 << 10..=1 << 40),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                let (low, high) = (range.start(), range.end());
                return Err(Error::invalid(format!("{name} is {value}, out of its range {low}..={high}")));
            }
        }
        Ok(())
    }
}

impl Default for LeveledOptions {
    fn default() -> LeveledOptions {
        LeveledOptions {
            l0_compaction_trigger: 4,
            target_file_size: 64 << 20,
            level_size_multiplier: 10,
            base_level_size: 256 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_given_codec_serves_deeper_levels() {
        let mut options = LsmOptions::default();
        assert_eq!(options.compression_at(3), options.table.compression);
        options.compression_per_level = vec![CompressionType::None, CompressionType::Miniz(3)];
        assert_eq!(options.compression_at(0), CompressionType::None);
        assert_eq!(options.compression_at(6), CompressionType::Miniz(3));
        assert_eq!(options.table_options(6).compression, CompressionType::Miniz(3));
    }
}
