//! Writes and everything that moves data, done to both.

use azekura::PersistMode;
use azekura::fs::Survival;

use super::reads::check_half;
use super::subject::{Half, PARTITIONS, Subject, open_in};

const MODES: [PersistMode; 3] = [PersistMode::Buffer, PersistMode::SyncData, PersistMode::SyncAll];

impl Subject {
    pub(super) fn insert(&mut self) {
        let name = self.some_name();
        let (key, value) = (if self.dice.one_in(3) { self.likely_key(name) } else { self.key(name) }, self.value());
        let half = self.half(name);
        half.part.insert(&key, &value).unwrap();
        half.book.insert(&key, &value);
    }

    pub(super) fn remove(&mut self) {
        let name = self.some_name();
        let key = self.likely_key(name);
        let half = self.half(name);
        half.part.remove(&key).unwrap();
        half.book.remove(&key);
    }

    pub(super) fn remove_weakly(&mut self) {
        let name = self.some_name();
        let n = self.dice.throw();
        let half = self.half(name);
        if let Some(key) = half.book.some_weak_key(n) {
            half.part.remove_weak(&key).unwrap();
            half.book.remove(&key);
        }
    }

    pub(super) fn half(&mut self, name: &str) -> &mut Half {
        self.halves.get_mut(name).expect("it is open")
    }

    pub(super) fn batch(&mut self) {
        let mut batch = self.db().batch().durability(self.dice.clone().pick(&MODES));
        for _ in 0..self.dice.below(20) {
            let name = self.some_name();
            let key = self.likely_key(name);
            let weak = self.halves[name].book.may_be_removed_weakly(&key) && self.dice.one_in(2);
            let (removes, value) = (self.dice.one_in(3), self.value());
            let half = self.half(name);
            match (removes, weak) {
                (false, _) => batch.insert(&half.part, &key, &value),
                (true, false) => batch.remove(&half.part, &key),
                (true, true) => batch.remove_weak(&half.part, &key),
            }
            if removes { half.book.remove(&key) } else { half.book.insert(&key, &value) }
        }
        batch.commit().unwrap();
    }

    pub(super) fn flush(&mut self) {
        let name = self.some_name();
        self.halves[name].part.flush().unwrap();
    }

    pub(super) fn compact(&mut self) {
        let name = self.some_name();
        self.halves[name].part.major_compact().unwrap();
    }

    pub(super) fn work(&mut self) {
        for _ in 0..1 + self.dice.below(6) {
            if !self.db().step().unwrap() {
                break;
            }
        }
    }

    pub(super) fn persist(&mut self) {
        let mode = self.dice.pick(&MODES);
        self.db().persist(mode).unwrap();
    }

    /// Opens a partition, deletes one, or opens one again under its name with other options.
    pub(super) fn partitions(&mut self) {
        let index = self.dice.index(PARTITIONS.len());
        let (name, order) = PARTITIONS[index];
        if !self.halves.contains_key(name) {
            assert!(!self.db().partition_exists(name));
            self.open_part(index);
        } else if self.halves.len() > 2 && self.dice.one_in(2) {
            let half = self.halves.remove(name).expect("it is open");
            let other = half.part.clone();
            self.db().delete_partition(half.part).unwrap();
            assert_eq!(other.get(b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
            assert_eq!(other.insert(b"", b"").unwrap_err().kind(), azekura::ErrorKind::Closed);
        } else {
            let options = order.allows(self.shape.changed(name, &format!("{name}{}", self.dice.below(9))));
            let opened = match order.comparator() {
                None => self.db().open_partition(name, options),
                Some(comparator) => self.db().open_partition_with_comparator(name, options, comparator),
            };
            opened.unwrap();
        }
        let mut names: Vec<&str> = self.halves.keys().copied().collect();
        names.sort_unstable();
        assert_eq!(self.db().list_partitions(), names);
    }

    pub(super) fn check_all(&mut self) {
        for (name, half) in &self.halves {
            check_half(half, &mut self.dice, name);
        }
    }

    /// Closes, or drops all handles, and opens again.
    pub(super) fn reopen(&mut self) {
        self.note_metrics();
        self.moments.clear();
        self.strolls.clear();
        let books: Vec<_> =
            std::mem::take(&mut self.halves).into_iter().map(|(name, half)| (name, half.book)).collect();
        let db = self.db.take().expect("it is open");
        if self.dice.one_in(2) {
            db.close().unwrap()
        } else {
            drop(db)
        }
        self.come_back(books, true);
    }

    /// The process dies; only in memory, where handles can be made to die with it.
    pub(super) fn kill(&mut self) {
        let Some(memory) = self.place.memory.clone() else { return self.reopen() };
        self.note_metrics();
        memory.freeze_after(Some(0));
        self.moments.clear();
        self.strolls.clear();
        let books: Vec<_> =
            std::mem::take(&mut self.halves).into_iter().map(|(name, half)| (name, half.book)).collect();
        self.db = None;
        memory.crash(Survival::Everything, 0);
        self.come_back(books, false);
    }

    fn come_back(&mut self, books: Vec<(&'static str, super::book::Book)>, clean: bool) {
        self.place.restart();
        self.db = Some(self.config().open().unwrap());
        let replayed = self.db().metrics().replayed_records;
        assert!(!clean || replayed == 0, "{replayed} records were replayed after a clean close");
        self.tally.replayed += replayed;
        for (name, book) in books {
            let part = open_in(self.db(), &self.shape, name, book.order);
            self.halves.insert(name, Half { part, book });
        }
        assert_eq!(self.db().list_partitions(), self.halves.keys().copied().collect::<Vec<_>>());
        self.check_all();
    }

    /// Copies the database, opens the copy, compares it, writes to it, and throws it away.
    pub(super) fn checkpoint(&mut self) {
        self.copies += 1;
        let path = self.place.dir.with_file_name(format!("copy {}", self.copies));
        self.db().checkpoint(&path).unwrap();
        assert_eq!(self.db().checkpoint(&path).unwrap_err().kind(), azekura::ErrorKind::Invalid, "it exists");
        let db = self.shape.config(&path, self.place.unlimited(), &self.env).open().unwrap();
        assert_eq!(db.list_partitions(), self.halves.keys().copied().collect::<Vec<_>>());
        for (name, half) in &self.halves {
            let part = open_in(&db, &self.shape, name, half.book.order);
            let copy = Half { part, book: half.book.clone() };
            check_half(&copy, &mut self.dice, name);
            copy.part.insert(half.book.order.seal(b"only in the copy"), b"").unwrap();
        }
        db.close().unwrap();
        self.place.fs.remove_dir_all(&path).unwrap();
    }
}
