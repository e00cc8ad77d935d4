//! Writes and maintenance operations, applied to the database and to the model.

use std::ops::Bound;
use std::time::Duration;

use azekura::testing::{Survival, TestOrder};
use azekura::{BulkOptions, ErrorKind, Gc, PersistMode};

use super::partition_model::{KeyValue, ModelBounds, PartitionModel};
use super::reads::check_partition;
use super::run::{ModelRun, OpenPartition, PARTITIONS, open_with_order};
use crate::testkit::ordered_partitions::{open_ordered, open_stored};

const HOUR: Duration = Duration::from_secs(3600);
pub(super) const MODES: [PersistMode; 3] = [PersistMode::Buffer, PersistMode::SyncData, PersistMode::SyncAll];

impl ModelRun {
    pub(super) fn insert(&mut self) {
        let name = self.random_partition_name();
        let (key, value) = (
            if self.rng.chance_one_in(3) { self.likely_key(name) } else { self.random_key(name) },
            self.random_value(),
        );
        let half = self.open_partition(name);
        half.part.insert(&key, &value).unwrap();
        half.model.insert(&key, &value);
    }

    /// One or several merges of a key.
    pub(super) fn merge(&mut self) {
        let name = self.random_partition_name();
        let key = self.likely_key(name);
        for _ in 0..self.rng.pick(&[1, 1, 2, 10]) {
            let operand = self.random_operand();
            let has_operator = self.options.merge_operator(name).is_some();
            let is_pool = self.options.is_pool(name);
            let half = self.open_partition(name);
            let done = half.part.merge(&key, &operand);
            if !has_operator {
                assert_eq!(done.unwrap_err().kind(), ErrorKind::Invalid);
                return;
            }
            done.unwrap();
            half.model.merge(&key, &operand, is_pool);
        }
    }

    /// Short, because values grow by their operands.
    fn random_operand(&mut self) -> Vec<u8> {
        let len = if self.rng.chance_one_in(16) { 2_000 } else { self.rng.below(12) };
        self.rng.random_bytes(len as usize)
    }

    /// A time to live that ends half an hour after one of the next full hours, and that hour. Sleeps of the engine move
    /// the clock by much less.
    pub(super) fn random_ttl(&mut self) -> (Duration, u64) {
        let hours = self.rng.below(6);
        (HOUR * hours as u32 + HOUR / 2, self.hour + hours + 1)
    }

    pub(super) fn insert_with_ttl(&mut self) {
        let name = self.random_partition_name();
        let (key, value, (ttl, hour)) = (self.likely_key(name), self.random_value(), self.random_ttl());
        let half = self.open_partition(name);
        half.part.insert_with_ttl(&key, &value, ttl).unwrap();
        half.model.insert_until(&key, &value, hour);
    }

    /// Moves the wall clock forward or back. The database has seen the time before the clock goes back.
    pub(super) fn move_clock(&mut self) {
        let hours = self.rng.below(5);
        if self.rng.chance_one_in(3) {
            self.insert_with_ttl();
            let back = hours.min(self.wall_hour);
            self.env.jump_wall_clock(-(back as i64 * HOUR.as_millis() as i64));
            self.wall_hour -= back;
        } else {
            self.set_wall_hour(self.wall_hour + hours);
        }
    }

    /// Moves the wall clock to its highest value.
    pub(super) fn catch_up_clock(&mut self) {
        self.set_wall_hour(self.hour);
    }

    fn set_wall_hour(&mut self, hour: u64) {
        self.env.jump_wall_clock((hour - self.wall_hour) as i64 * HOUR.as_millis() as i64);
        (self.wall_hour, self.hour) = (hour, self.hour.max(hour));
        self.partitions.values_mut().for_each(|half| half.model.expire(self.hour));
    }

    pub(super) fn remove(&mut self) {
        let name = self.random_partition_name();
        let key = self.likely_key(name);
        let half = self.open_partition(name);
        half.part.remove(&key).unwrap();
        half.model.remove(&key);
    }

    pub(super) fn remove_weakly(&mut self) {
        let name = self.random_partition_name();
        let n = self.rng.next_u64();
        let half = self.open_partition(name);
        if let Some(key) = half.model.nth_weakly_removable_key(n) {
            half.part.remove_weak(&key).unwrap();
            half.model.remove(&key);
        }
    }

    /// Bounds of a range delete: of a few existing keys, or any.
    pub(super) fn removed_bounds(&mut self, name: &str) -> ModelBounds {
        let (n, len) = (self.rng.next_u64(), self.rng.below(12));
        let few = self.partitions[name].model.nth_keys(n, len).filter(|_| !self.rng.chance_one_in(4));
        let Some((low, high)) = few else { return self.bounds(name) };
        let exclusive = self.rng.chance_one_in(2);
        (Bound::Included(low), if exclusive { Bound::Excluded(high) } else { Bound::Included(high) })
    }

    pub(super) fn remove_range(&mut self) {
        let name = self.random_partition_name();
        let bounds = self.removed_bounds(name);
        let half = self.open_partition(name);
        let done = half.part.remove_range(bounds.clone());
        match done {
            Err(error) if half.model.is_reversed(&bounds) => assert_eq!(error.kind(), ErrorKind::Invalid),
            done => {
                done.unwrap();
                half.model.remove_range(&bounds);
            }
        }
    }

    pub(super) fn remove_prefix(&mut self) {
        let name = self.random_partition_name();
        let mut prefix = self.likely_key(name);
        prefix.truncate(4 + self.rng.below(4));
        let half = self.open_partition(name);
        let done = half.part.remove_prefix(&prefix);
        match half.model.order {
            TestOrder::Bytes => {
                done.unwrap();
                half.model.prefix(&prefix).iter().for_each(|(key, _)| half.model.remove(key));
            }
            _ => assert_eq!(done.unwrap_err().kind(), ErrorKind::Invalid),
        }
    }

    pub(super) fn clear(&mut self) {
        let name = self.random_partition_name();
        let keeps_files = self.options.is_pool(name) || !self.snapshots.is_empty() || !self.iters.is_empty();
        let half = self.open_partition(name);
        half.part.clear().unwrap();
        half.model.remove_range(&(Bound::Unbounded, Bound::Unbounded));
        assert!(keeps_files || half.part.disk_space() == 0, "{name}: a file is left");
    }

    pub(super) fn open_partition(&mut self, name: &str) -> &mut OpenPartition {
        self.partitions.get_mut(name).expect("it is open")
    }

    pub(super) fn batch(&mut self) {
        let mut batch = self.db().batch();
        batch.durability(self.rng.clone().pick(&MODES));
        for _ in 0..self.rng.below(20) {
            let name = self.random_partition_name();
            if self.rng.chance_one_in(12) {
                let bounds = self.removed_bounds(name);
                let half = self.open_partition(name);
                if !half.model.is_reversed(&bounds) {
                    batch.remove_range(&half.part, bounds.clone());
                    half.model.remove_range(&bounds);
                }
                continue;
            }
            let key = self.likely_key(name);
            let weak = self.partitions[name].model.may_remove_weakly(&key) && self.rng.chance_one_in(2);
            if self.options.merge_operator(name).is_some() && self.rng.chance_one_in(4) {
                let (operand, is_pool) = (self.random_operand(), self.options.is_pool(name));
                let half = self.open_partition(name);
                batch.merge(&half.part, &key, &operand);
                half.model.merge(&key, &operand, is_pool);
                continue;
            }
            let (removes, value) = (self.rng.chance_one_in(3), self.random_value());
            if !removes && self.rng.chance_one_in(4) {
                let (ttl, hour) = self.random_ttl();
                let half = self.open_partition(name);
                batch.insert_with_ttl(&half.part, &key, &value, ttl);
                half.model.insert_until(&key, &value, hour);
                continue;
            }
            let half = self.open_partition(name);
            match (removes, weak) {
                (false, _) => batch.insert(&half.part, &key, &value),
                (true, false) => batch.remove(&half.part, &key),
                (true, true) => batch.remove_weak(&half.part, &key),
            }
            if removes { half.model.remove(&key) } else { half.model.insert(&key, &value) }
        }
        batch.commit().unwrap();
    }

    /// Entries for one partition: keys of it and others, now and then more than a table or a sort buffer has. A pool
    /// takes them as one batch, whose size is limited.
    fn random_entries(&mut self, name: &str) -> Vec<KeyValue> {
        let count = if self.rng.chance_one_in(8) { 200 } else { self.rng.below(20) };
        let mut bytes = 0;
        let mut entries = Vec::new();
        while entries.len() < count as usize && bytes < 300 << 10 {
            let entry = (self.likely_key(name), self.random_value());
            bytes += entry.0.len() + entry.1.len();
            entries.push(entry);
        }
        entries
    }

    pub(super) fn ingest(&mut self) {
        let name = self.random_partition_name();
        let mut model = PartitionModel::new(self.partitions[name].model.order);
        self.random_entries(name).iter().for_each(|(key, value)| model.insert(key, value));
        let sorted = model.pairs();
        let half = self.open_partition(name);
        assert_eq!(half.part.ingest(sorted.iter().map(|(key, value)| (key, value))).unwrap(), sorted.len() as u64);
        sorted.iter().for_each(|(key, value)| half.model.insert(key, value));
        if sorted.len() > 1 {
            let descending = sorted.iter().rev().map(|(key, value)| (key, value));
            assert_eq!(half.part.ingest(descending).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }

    pub(super) fn bulk(&mut self) {
        let name = self.random_partition_name();
        let entries = self.random_entries(name);
        let options = BulkOptions::default().memory(64 << 10);
        let half = self.open_partition(name);
        let given = entries.iter().map(|(key, value)| Ok::<_, azekura::Error>((key, value)));
        let mut different = PartitionModel::new(half.model.order);
        entries.iter().for_each(|(key, value)| different.insert(key, value));
        assert_eq!(half.part.bulk_with_options(given, &options).unwrap(), different.len() as u64);
        different.pairs().iter().for_each(|(key, value)| half.model.insert(key, value));
    }

    pub(super) fn flush(&mut self) {
        let name = self.random_partition_name();
        self.partitions[name].part.flush().unwrap();
    }

    pub(super) fn major_compact(&mut self) {
        let name = self.random_partition_name();
        self.partitions[name].part.major_compact().unwrap();
    }

    /// A call that counts stale values in blob files, or removes them. No pair changes.
    pub(super) fn collect_blob_garbage(&mut self) {
        let name = self.random_partition_name();
        let has_readers = !self.snapshots.is_empty() || !self.iters.is_empty();
        let (way, target, threshold) =
            (self.rng.below(4), self.rng.pick(&[1.0, 1.2, 3.0]), self.rng.pick(&[0.0, 0.3, 1.0]));
        let part = &self.partitions[name].part;
        let done = match way {
            0 => part.gc_scan().map(|_| 0),
            1 => part.gc_with_space_amp_target(target),
            2 => part.gc_with_staleness_threshold(threshold),
            _ => part.gc_drop_stale_segments(),
        };
        let separates = !serde_json::to_value(part.options()).unwrap()["kv_separation"].is_null();
        if let Err(error) = done {
            assert!(!separates && error.kind() == ErrorKind::Invalid, "{name}: {error}");
        }
        if !separates {
            return; // the partition may have had other options, and blob files of that time
        }
        let report = part.gc_scan().unwrap();
        let pairs = self.partitions[name].model.len() as u64;
        assert!(has_readers || report.total_blobs - report.stale_blobs <= pairs, "{name}: {pairs} pairs, {report}");
        match way {
            1 => assert!(report.space_amp() <= target + 0.001, "{name}: target {target}, {report}"),
            2 if threshold == 0.0 => assert_eq!(report.stale_bytes, 0, "{name}: {report}"),
            3 => assert_eq!(report.stale_segment_count, 0, "{name}: {report}"),
            _ => {}
        }
        check_partition(&self.partitions[name], &mut self.rng, name);
    }

    pub(super) fn run_background_step(&mut self) {
        for _ in 0..1 + self.rng.below(6) {
            if !self.db().step().unwrap() {
                break;
            }
        }
    }

    pub(super) fn persist(&mut self) {
        let mode = self.rng.pick(&MODES);
        self.db().persist(mode).unwrap();
    }

    /// Opens a partition, deletes one, or opens one again and changes its options.
    pub(super) fn change_partitions(&mut self) {
        let index = self.rng.below(PARTITIONS.len());
        let (name, order) = PARTITIONS[index];
        if !self.partitions.contains_key(name) {
            assert!(!self.db().partition_exists(name));
            self.open_part(index);
        } else if self.partitions.len() > 2 && self.rng.chance_one_in(2) {
            let half = self.partitions.remove(name).expect("it is open");
            self.forget_copy(name);
            let other = half.part.clone();
            self.db().delete_partition(half.part).unwrap();
            assert_eq!(other.get(b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
            assert_eq!(other.insert(b"", b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
        } else {
            let options = self.options.changed_partition_options(name, &format!("{name}{}", self.rng.below(9)));
            let stored = self.partitions[name].part.options();
            let operator = || self.options.merge_operator(name);
            let part = open_stored(order, self.db(), name, options.clone(), operator()).unwrap();
            assert_eq!(part.options(), stored, "an open changes no options");
            open_ordered(order, self.db(), name, options, operator()).unwrap();
        }
        let mut names: Vec<&str> = self.partitions.keys().copied().collect();
        names.sort_unstable();
        assert_eq!(self.db().list_partitions(), names);
    }

    pub(super) fn check_all_partitions(&mut self) {
        for (name, half) in &self.partitions {
            check_partition(half, &mut self.rng, name);
        }
    }

    /// Closes, or drops all handles, and opens again.
    pub(super) fn reopen(&mut self) {
        self.record_metrics();
        self.snapshots.clear();
        self.iters.clear();
        let books: Vec<_> =
            std::mem::take(&mut self.partitions).into_iter().map(|(name, half)| (name, half.model)).collect();
        let db = self.db.take().expect("it is open");
        if self.rng.chance_one_in(2) {
            db.close().unwrap()
        } else {
            drop(db)
        }
        self.reopen_after_kill(books, true);
    }

    /// Kills the process; only in memory, where all handles can be dropped without effect.
    pub(super) fn kill(&mut self) {
        let Some(memory) = self.test_dir.mem_fs.clone() else { return self.reopen() };
        self.record_metrics();
        memory.freeze_after(Some(0));
        self.snapshots.clear();
        self.iters.clear();
        let books: Vec<_> =
            std::mem::take(&mut self.partitions).into_iter().map(|(name, half)| (name, half.model)).collect();
        self.db = None;
        match self.follower {
            // It goes on.
            Some(_) => memory.freeze_after(None),
            None => memory.crash(Survival::Everything, 0),
        }
        self.reopen_after_kill(books, false);
    }

    fn reopen_after_kill(&mut self, books: Vec<(&'static str, super::partition_model::PartitionModel)>, clean: bool) {
        self.test_dir.restart();
        self.set_wall_hour(self.hour); // an open database forgets the highest time when it is closed
        self.db = Some(self.config().open().unwrap());
        let replayed = self.db().metrics().replayed_records;
        assert!(!clean || replayed == 0, "{replayed} records were replayed after a clean close");
        self.counters.replayed += replayed;
        for (name, book) in books {
            let part = open_with_order(self.db(), &self.options, name, book.order);
            self.partitions.insert(name, OpenPartition { part, model: book });
        }
        assert_eq!(self.db().list_partitions(), self.partitions.keys().copied().collect::<Vec<_>>());
        self.check_all_partitions();
    }

    /// Copies the database, opens the copy, compares it, writes to it, and deletes it.
    pub(super) fn checkpoint(&mut self) {
        self.checkpoints += 1;
        self.set_wall_hour(self.hour); // the copy sees the time of its own open
        let path = self.test_dir.dir.with_file_name(format!("copy {}", self.checkpoints));
        self.db().checkpoint(&path).unwrap();
        assert_eq!(self.db().checkpoint(&path).unwrap_err().kind(), azekura::ErrorKind::Invalid, "it exists");
        let db = self.options.config(&path, self.test_dir.unlimited_fs(), &self.env).open().unwrap();
        assert_eq!(db.list_partitions(), self.partitions.keys().copied().collect::<Vec<_>>());
        for (name, half) in &self.partitions {
            let part = open_with_order(&db, &self.options, name, half.model.order);
            let copy = OpenPartition { part, model: half.model.clone() };
            check_partition(&copy, &mut self.rng, name);
            copy.part.insert(half.model.order.valid_key(b"only in the copy"), b"").unwrap();
        }
        db.close().unwrap();
        self.test_dir.fs.remove_dir_all(&path).unwrap();
    }
}
