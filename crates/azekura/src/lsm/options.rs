//! What a tree can be told.

use crate::base::compression::CompressionType;
use crate::base::{Error, Result};
use crate::lsm::blob::options::KvSeparationOptions;
use crate::table::options::{TableOptions, TableReadOptions};

/// The settings of one LSM tree; a change applies to what is written from then on, and to how tables are held that were
/// not used yet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LsmOptions {
    /// A memtable that holds at least this many bytes is sealed.
    pub(crate) max_memtable_size: u64,
    pub(crate) compaction: LeveledOptions,
    /// How tables are built; its `compression` stands for the levels that `compression_per_level` leaves out.
    pub(crate) table: TableOptions,
    /// By level, the last one also for deeper levels; empty means `table.compression` everywhere.
    pub(crate) compression_per_level: Vec<CompressionType>,
    /// `None`: every value stands beside its key.
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

    /// How tables are opened that are on `level` then.
    pub(crate) fn read_options(&self, level: u8) -> TableReadOptions {
        TableReadOptions::for_level(&self.table, level)
    }
}

/// The settings of leveled compaction: level 0 takes flushes as they come, every deeper level is one sorted run, and
/// each is allowed `level_size_multiplier` times as many bytes as the one above.
#[derive(Clone, Debug, PartialEq)]
pub struct LeveledOptions {
    /// Level 0 is merged down when it has this many runs, 1..=1,000. Default 4.
    pub l0_compaction_trigger: u32,
    /// Tables are cut at this many bytes, at the next user key; 4 KiB to 16 GiB. Default 64 MiB.
    pub target_file_size: u64,
    /// How many times larger each level may be than the one above, 2..=100. Default 10.
    pub level_size_multiplier: u32,
    /// The level that level 0 is merged into may hold this many bytes; until there are more, it is the bottom; 4 KiB to
    /// 1 TiB. Default 256 MiB.
    pub base_level_size: u64,
}

impl LeveledOptions {
    /// # Errors
    /// `Invalid` for options out of their range.
    pub(crate) fn check(&self) -> Result<()> {
        let ranges = [
            ("l0_trigger", u64::from(self.l0_compaction_trigger), 1..=1_000),
            ("table_size", self.target_file_size, 4 << 10..=16 << 30),
            ("level_ratio", u64::from(self.level_size_multiplier), 2..=100),
            ("base_size", self.base_level_size, 4 << 10..=1 << 40),
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
