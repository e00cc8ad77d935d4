//! Readings of sensors with retention. Each day is a partition, so retention deletes the files of a day instead of
//! writing a tombstone for each reading. A query over several days reads one snapshot.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use azekura::{CompressionType, Config, Database, Error, Partition, PartitionCreateOptions, Result};

const SECONDS_PER_DAY: u64 = 86_400;

struct Readings {
    db: Database,
}

/// Readings of one sensor are adjacent, in the order of time.
fn reading_key(sensor: u32, second: u64) -> Vec<u8> {
    [&sensor.to_be_bytes()[..], &second.to_be_bytes()].concat()
}

/// The name sorts by day.
fn partition_name(day: u64) -> String {
    format!("readings {day:010}")
}

impl Readings {
    /// Opens the partition of a day. Readings are written once and read seldom, so the lower levels use zlib.
    fn day(&self, day: u64) -> Result<Partition> {
        let codecs = vec![CompressionType::Lz4, CompressionType::Miniz(6)];
        self.db.open_partition(&partition_name(day), PartitionCreateOptions::default().compression_per_level(codecs))
    }

    /// Inserts readings in one batch, which may span days.
    fn insert(&self, readings: &[(u32, u64, f32)]) -> Result<()> {
        let mut batch = self.db.batch();
        for (sensor, second, value) in readings {
            let day = self.day(second / SECONDS_PER_DAY)?;
            batch.insert(&day, reading_key(*sensor, *second), value.to_le_bytes());
        }
        batch.commit()
    }

    /// Returns count and mean of the readings of a sensor in the seconds from `start` up to `end`.
    fn mean(&self, sensor: u32, start: u64, end: u64) -> Result<(usize, f32)> {
        let snapshot = self.db.snapshot();
        let (mut count, mut sum) = (0, 0.0);
        for day in start / SECONDS_PER_DAY..=end / SECONDS_PER_DAY {
            if !self.db.partition_exists(&partition_name(day)) {
                continue; // no readings, or deleted
            }
            let range = reading_key(sensor, start)..reading_key(sensor, end);
            let mut readings = snapshot.range(&self.day(day)?, range);
            while let Some(reading) = readings.next_ref() {
                let (_, value) = reading?;
                sum += f32::from_le_bytes(value.try_into().expect("a value has 4 bytes"));
                count += 1;
            }
        }
        Ok((count, sum / count as f32))
    }

    /// Deletes the days before `first`, and returns their number.
    fn delete_before(&self, first: u64) -> Result<usize> {
        let names = self.db.list_partitions().into_iter();
        let old: Vec<String> = names.filter(|n| n.starts_with("readings ") && *n < partition_name(first)).collect();
        old.iter().try_for_each(|name| self.db.delete_partition_by_name(name))?;
        Ok(old.len())
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-time-series-{}", std::process::id()));
    let readings = Readings { db: Config::new(&path).open()? };
    for hour in 0..10 * 24 {
        readings.insert(&[(7, hour * 3600, hour as f32), (8, hour * 3600, 0.0)])?;
    }
    assert_eq!(readings.mean(7, 23 * 3600, 26 * 3600)?, (3, 24.0)); // hours 23, 24 and 25, on two days

    assert_eq!(readings.delete_before(7)?, 7);
    assert_eq!(readings.db.list_partitions(), [7, 8, 9].map(partition_name));
    let (count, mean) = readings.mean(7, 0, 10 * SECONDS_PER_DAY)?;
    println!("{count} readings remain, their mean is {mean}");
    assert_eq!(count, 3 * 24);

    readings.db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
