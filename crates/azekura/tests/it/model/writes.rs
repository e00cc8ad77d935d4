//! Writes and maintenance operations, applied to the database and to the model.

use azekura::PersistMode;
use azekura::testing::Survival;

use super::reads::check_partition;
use super::run::{ModelRun, OpenPartition, PARTITIONS, open_with_order};

const MODES: [PersistMode; 3] = [PersistMode::Buffer, PersistMode::SyncData, PersistMode::SyncAll];

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

    pub(super) fn open_partition(&mut self, name: &str) -> &mut OpenPartition {
        self.partitions.get_mut(name).expect("it is open")
    }

    pub(super) fn batch(&mut self) {
        let mut batch = self.db().batch();
        batch.durability(self.rng.clone().pick(&MODES));
        for _ in 0..self.rng.below(20) {
            let name = self.random_partition_name();
            let key = self.likely_key(name);
            let weak = self.partitions[name].model.may_remove_weakly(&key) && self.rng.chance_one_in(2);
            let (removes, value) = (self.rng.chance_one_in(3), self.random_value());
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

    pub(super) fn flush(&mut self) {
        let name = self.random_partition_name();
        self.partitions[name].part.flush().unwrap();
    }

    pub(super) fn major_compact(&mut self) {
        let name = self.random_partition_name();
        self.partitions[name].part.major_compact().unwrap();
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

    /// Opens a partition, deletes one, or reopens one with other options.
    pub(super) fn change_partitions(&mut self) {
        let index = self.rng.index(PARTITIONS.len());
        let (name, order) = PARTITIONS[index];
        if !self.partitions.contains_key(name) {
            assert!(!self.db().partition_exists(name));
            self.open_part(index);
        } else if self.partitions.len() > 2 && self.rng.chance_one_in(2) {
            let half = self.partitions.remove(name).expect("it is open");
            let other = half.part.clone();
            self.db().delete_partition(half.part).unwrap();
            assert_eq!(other.get(b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
            assert_eq!(other.insert(b"", b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
        } else {
            let options = order.supported_options(
                self.options.changed_partition_options(name, &format!("{name}{}", self.rng.below(9))),
            );
            let opened = match order.comparator() {
                None => self.db().open_partition(name, options),
                Some(comparator) => self.db().open_partition_with_comparator(name, options, comparator),
            };
            opened.unwrap();
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
        memory.crash(Survival::Everything, 0);
        self.reopen_after_kill(books, false);
    }

    fn reopen_after_kill(&mut self, books: Vec<(&'static str, super::partition_model::PartitionModel)>, clean: bool) {
        self.test_dir.restart();
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
