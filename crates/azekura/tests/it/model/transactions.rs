//! Transactions and conditional writes. No other commit interferes: conflicts are tested by `it::transactions`.

use std::collections::BTreeMap;
use std::ops::Bound;

use azekura::testing::TestOrder;
use azekura::{ErrorKind, Isolation, Transaction, TransactionOptions};

use super::partition_model::{ModelBounds, PartitionModel};
use super::reads::{assert_item, check_iter_both_ends, check_key};
use super::run::{ModelRun, OpenPartition};
use super::writes::MODES;

/// Longer keys and values are not written: a transaction has at most half the memory budget, which may be 1 MiB.
const LEN_MAX: usize = 1_000;

type Models = BTreeMap<&'static str, PartitionModel>;

impl ModelRun {
    fn models(&self) -> Models {
        self.partitions.iter().map(|(name, half)| (*name, half.model.clone())).collect()
    }

    fn set_models(&mut self, models: &Models) {
        for (name, model) in models {
            self.open_partition(name).model.clone_from(model);
        }
    }

    fn short_key(&mut self, name: &str) -> Vec<u8> {
        let key = self.likely_key(name);
        if key.len() <= LEN_MAX { key } else { self.partitions[name].model.order.valid_key(b"key 000") }
    }

    /// The bounds, or all keys in place of bounds with a long key.
    fn short_bounds(bounds: ModelBounds) -> ModelBounds {
        let is_long = |bound: &Bound<Vec<u8>>| match bound {
            Bound::Included(key) | Bound::Excluded(key) => key.len() > LEN_MAX,
            Bound::Unbounded => false,
        };
        match is_long(&bounds.0) || is_long(&bounds.1) {
            true => (Bound::Unbounded, Bound::Unbounded),
            false => bounds,
        }
    }

    /// A transaction of reads and writes. The models contain its writes, until they are discarded.
    pub(super) fn transact(&mut self) {
        let isolation = self.rng.pick(&[Isolation::Serializable, Isolation::Serializable, Isolation::Snapshot]);
        let options = TransactionOptions::default().isolation(isolation).exclusive(self.rng.chance_one_in(4));
        let mut tx = self.db().transaction_with(options).unwrap();
        tx.durability(self.rng.pick(&MODES));
        let before = self.models();
        let mut savepoint = None;
        for _ in 0..self.rng.below(24) {
            match self.rng.below(9) {
                0..=3 => self.read_in_transaction(&tx),
                4..=6 => self.write_in_transaction(&mut tx),
                7 => savepoint = Some((tx.savepoint(), self.models())),
                _ => {
                    if let Some((point, models)) = &savepoint {
                        tx.rollback_to(point).unwrap();
                        self.set_models(models);
                    }
                }
            }
        }
        let name = self.random_partition_name();
        let key = self.likely_key(name);
        let outside = OpenPartition { part: self.partitions[name].part.clone(), model: before[name].clone() };
        check_key(&outside, &key, &format!("{name}: outside of the transaction"));
        if self.rng.chance_one_in(4) {
            drop(tx);
            self.set_models(&before);
        } else {
            tx.commit().unwrap();
        }
    }

    fn read_in_transaction(&mut self, tx: &Transaction) {
        let name = self.random_partition_name();
        let keys: Vec<Vec<u8>> = (0..4).map(|_| self.short_key(name)).collect();
        let (bounds, way) = (ModelRun::short_bounds(self.bounds(name)), self.rng.below(7));
        let OpenPartition { part, model } = &self.partitions[name];
        let what = format!("{name}: a transaction");
        let wanted = model.get(&keys[0]).map(|value| &value[..]);
        match way {
            0 => assert!(tx.get(part, &keys[0]).unwrap().as_deref() == wanted, "{what}: {:.40?}", keys[0]),
            1 => {
                assert_eq!(tx.size_of(part, &keys[0]).unwrap(), wanted.map(|value| value.len() as u32), "{what}");
                assert_eq!(tx.untracked().contains_key(part, &keys[0]).unwrap(), wanted.is_some(), "{what}");
            }
            2 => {
                let wanted = keys.iter().map(|key| model.get(key).map(|value| &value[..]));
                let got = tx.multi_get(part, &keys).unwrap();
                assert!(got.iter().map(|value| value.as_deref()).eq(wanted), "{what}: multi_get");
            }
            3 => {
                let pairs = model.pairs();
                assert_item(tx.first_key_value(part).unwrap().map(Ok), pairs.first(), &what);
                assert_item(tx.last_key_value(part).unwrap().map(Ok), pairs.last(), &what);
            }
            4 if model.order == TestOrder::Bytes => {
                let prefix = &keys[0][..keys[0].len().min(5)];
                check_iter_both_ends(tx.prefix(part, prefix), model.prefix(prefix), &mut self.rng, &what);
            }
            5 => check_iter_both_ends(
                tx.untracked().range(part, bounds.clone()),
                model.range(&bounds),
                &mut self.rng,
                &what,
            ),
            _ => check_iter_both_ends(tx.range(part, bounds.clone()), model.range(&bounds), &mut self.rng, &what),
        }
    }

    fn write_in_transaction(&mut self, tx: &mut Transaction) {
        // More than a few writes are looked up in another way.
        for _ in 0..self.rng.pick(&[1, 1, 1, 20]) {
            let name = self.random_partition_name();
            let (key, mut value, (ttl, hour)) = (self.short_key(name), self.random_value(), self.random_ttl());
            value.truncate(LEN_MAX / 10);
            let (way, bounds) = (self.rng.below(10), ModelRun::short_bounds(self.removed_bounds(name)));
            let (has_operator, is_pool) = (self.options.merge_operator(name).is_some(), self.options.is_pool(name));
            let OpenPartition { part, model } = self.open_partition(name);
            match way {
                0 if !model.is_reversed(&bounds) => {
                    tx.remove_range(part, bounds.clone()).unwrap();
                    model.remove_range(&bounds);
                }
                1 if has_operator => {
                    tx.merge(part, &key, &value).unwrap();
                    model.merge(&key, &value, is_pool);
                }
                2 => {
                    tx.insert_with_ttl(part, &key, &value, ttl).unwrap();
                    model.insert_until(&key, &value, hour);
                }
                3 if model.may_remove_weakly(&key) => {
                    tx.remove_weak(part, &key).unwrap();
                    model.remove(&key);
                }
                4 | 5 => {
                    tx.remove(part, &key).unwrap();
                    model.remove(&key);
                }
                _ => {
                    tx.insert(part, &key, &value).unwrap();
                    model.insert(&key, &value);
                }
            }
        }
    }

    /// An operation that reads a key and writes it in one step.
    pub(super) fn update(&mut self) {
        let name = self.random_partition_name();
        let (key, value, way) = (self.likely_key(name), self.random_value(), self.rng.below(7));
        let OpenPartition { part, model } = self.open_partition(name);
        let present = model.get(&key).cloned();
        let present = present.as_deref();
        // What is written: a value, a removal or nothing.
        let written: Option<Option<Vec<u8>>> = match way {
            0 => part.insert_if_absent(&key, &value).unwrap().then_some(Some(value)),
            1 => {
                assert!(part.take(&key).unwrap().as_deref() == present, "{name}: {key:.40?}");
                present.is_some().then_some(None)
            }
            2 | 3 => {
                let new = (way == 2).then_some(value);
                assert!(part.compare_and_swap(&key, present, new.as_deref()).unwrap(), "{name}: {key:.40?}");
                (new.is_some() || present.is_some()).then_some(new)
            }
            4 => {
                let other = [present.unwrap_or_default(), b"other"].concat();
                assert!(!part.compare_and_swap(&key, Some(&other), Some(&value)).unwrap(), "{name}: {key:.40?}");
                None
            }
            _ => {
                let new = (way == 5).then_some(value);
                let found = part.fetch_update(&key, |found| {
                    assert!(found == present, "{name}: {key:.40?}");
                    new.clone()
                });
                assert!(found.unwrap().as_deref() == present, "{name}: {key:.40?}");
                (new.is_some() || present.is_some()).then_some(new)
            }
        };
        assert!(way != 0 || written.is_some() == present.is_none(), "{name}: {key:.40?}");
        match written {
            Some(Some(value)) => model.insert(&key, &value),
            Some(None) => model.remove(&key),
            None => {}
        }
    }

    /// A batch that depends on the values of keys, of which one may be another.
    pub(super) fn conditional_batch(&mut self) {
        let mut batch = self.db().batch();
        batch.durability(self.rng.pick(&MODES));
        let mut wrong = None;
        for _ in 0..1 + self.rng.below(4) {
            let name = self.random_partition_name();
            let key = self.likely_key(name);
            let is_wrong = self.rng.chance_one_in(8);
            let OpenPartition { part, model } = &self.partitions[name];
            let present = model.get(&key).map(|value| &value[..]);
            match present {
                Some(_) if is_wrong => batch.expect(part, &key, None),
                None if is_wrong => batch.expect(part, &key, Some(b"a value")),
                present => batch.expect(part, &key, present),
            }
            if is_wrong && wrong.is_none() {
                wrong = Some((name, key));
            }
        }
        let name = self.random_partition_name();
        let (key, value) = (self.likely_key(name), self.random_value());
        batch.insert(&self.partitions[name].part, &key, &value);
        match (batch.commit(), wrong) {
            (Ok(()), None) => self.open_partition(name).model.insert(&key, &value),
            (Err(error), Some((name, key))) => {
                assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
                assert_eq!(error.conflicting_key(), Some((name, &key[..])));
            }
            (done, wrong) => panic!("{done:?}, expected a conflict: {}", wrong.is_some()),
        }
    }
}
