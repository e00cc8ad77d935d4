//! Expected content of a partition: a `BTreeMap` in the order of its keys.

use std::collections::BTreeMap;
use std::ops::Bound;

use azekura::testing::TestOrder;

pub(super) type KeyValue = (Vec<u8>, Vec<u8>);
pub(super) type ModelBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// The pairs of one partition by the canonical form of their keys.
#[derive(Clone, Debug)]
pub(super) struct PartitionModel {
    pub(super) order: TestOrder,
    pairs: BTreeMap<Vec<u8>, KeyValue>,
    /// Number of inserts of a key since it was last removed.
    inserts: BTreeMap<Vec<u8>, u32>,
    /// The hour at which a pair expires, by the canonical form of its key.
    expires: BTreeMap<Vec<u8>, u64>,
    /// Operands above a pair that expires. They become the value when it expires.
    operands: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl PartitionModel {
    pub(super) fn new(order: TestOrder) -> PartitionModel {
        PartitionModel {
            order,
            pairs: BTreeMap::new(),
            inserts: BTreeMap::new(),
            expires: BTreeMap::new(),
            operands: BTreeMap::new(),
        }
    }

    pub(super) fn insert(&mut self, key: &[u8], value: &[u8]) {
        let canonical = self.order.canonical(key);
        *self.inserts.entry(canonical.clone()).or_default() += 1;
        self.forget_expiry(&canonical);
        self.pairs.insert(canonical, (key.to_vec(), value.to_vec()));
    }

    fn forget_expiry(&mut self, canonical: &[u8]) {
        self.expires.remove(canonical);
        self.operands.remove(canonical);
    }

    /// Appends `operand` to the value. Only the first write of an absent key counts as an insert. A pool computes the
    /// value at once, and it does not expire.
    pub(super) fn merge(&mut self, key: &[u8], operand: &[u8], is_pool: bool) {
        let canonical = self.order.canonical(key);
        match is_pool {
            true => self.forget_expiry(&canonical),
            false if self.expires.contains_key(&canonical) => {
                self.operands.entry(canonical.clone()).or_default().extend_from_slice(operand);
            }
            false => {}
        }
        self.inserts.entry(canonical.clone()).or_insert(1);
        let pair = self.pairs.entry(canonical).or_default();
        pair.0 = key.to_vec();
        pair.1.extend_from_slice(operand);
    }

    pub(super) fn insert_until(&mut self, key: &[u8], value: &[u8], hour: u64) {
        self.insert(key, value);
        self.expires.insert(self.order.canonical(key), hour);
    }

    /// Removes the pairs that have expired. They still count as inserted.
    pub(super) fn expire(&mut self, hour: u64) {
        let expired: Vec<_> = self
            .expires
            .iter()
            .filter(|(_, expires)| **expires <= hour)
            .map(|(canonical, _)| canonical.clone())
            .collect();
        for canonical in expired {
            self.expires.remove(&canonical);
            let operands = self.operands.remove(&canonical);
            match (operands, self.pairs.get_mut(&canonical)) {
                (Some(operands), Some(pair)) => pair.1 = operands,
                _ => drop(self.pairs.remove(&canonical)),
            }
        }
    }

    pub(super) fn remove(&mut self, key: &[u8]) {
        let canonical = self.order.canonical(key);
        self.pairs.remove(&canonical);
        self.inserts.remove(&canonical);
        self.forget_expiry(&canonical);
    }

    /// Takes over a pair from another model, or its absence.
    pub(super) fn copy_key(&mut self, from: &PartitionModel, key: &[u8]) {
        fn copy<T: Clone>(to: &mut BTreeMap<Vec<u8>, T>, from: &BTreeMap<Vec<u8>, T>, canonical: &Vec<u8>) {
            match from.get(canonical) {
                Some(found) => drop(to.insert(canonical.clone(), found.clone())),
                None => drop(to.remove(canonical)),
            }
        }
        let canonical = self.order.canonical(key);
        copy(&mut self.pairs, &from.pairs, &canonical);
        copy(&mut self.inserts, &from.inserts, &canonical);
        copy(&mut self.expires, &from.expires, &canonical);
        copy(&mut self.operands, &from.operands, &canonical);
    }

    /// Whether a range contains a key in its canonical form.
    pub(super) fn contains(&self, (low, high): &ModelBounds, canonical: &[u8]) -> bool {
        let above = match low {
            Bound::Included(low) => *canonical >= *self.order.canonical(low),
            Bound::Excluded(low) => *canonical > *self.order.canonical(low),
            Bound::Unbounded => true,
        };
        above
            && match high {
                Bound::Included(high) => *canonical <= *self.order.canonical(high),
                Bound::Excluded(high) => *canonical < *self.order.canonical(high),
                Bound::Unbounded => true,
            }
    }

    /// Removes the pairs in a range.
    pub(super) fn remove_range(&mut self, bounds: &ModelBounds) {
        self.range(bounds).iter().for_each(|(key, _)| self.remove(key));
    }

    /// Whether the start of a range is above its end.
    pub(super) fn is_reversed(&self, bounds: &ModelBounds) -> bool {
        match (&bounds.0, &bounds.1) {
            (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
            (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => {
                self.order.canonical(low) > self.order.canonical(high)
            }
        }
    }

    /// The keys of up to `len` successive pairs: the first and the last.
    pub(super) fn nth_keys(&self, n: u64, len: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let from = n as usize % self.pairs.len().max(1);
        let mut keys = self.pairs.values().map(|(key, _)| key).skip(from).take(len.max(1));
        let first = keys.next()?;
        Some((first.clone(), keys.next_back().unwrap_or(first).clone()))
    }

    /// Whether `remove_weak` may be used: the key was inserted exactly once since it was last removed.
    pub(super) fn may_remove_weakly(&self, key: &[u8]) -> bool {
        self.inserts.get(&self.order.canonical(key)) == Some(&1)
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&Vec<u8>> {
        self.pairs.get(&self.order.canonical(key)).map(|(_, value)| value)
    }

    pub(super) fn len(&self) -> usize {
        self.pairs.len()
    }

    pub(super) fn pairs(&self) -> Vec<KeyValue> {
        self.pairs.values().cloned().collect()
    }

    /// The pairs in a range; a reversed one is empty.
    pub(super) fn range(&self, bounds: &ModelBounds) -> Vec<KeyValue> {
        let canonical = |bound: &Bound<Vec<u8>>| bound.as_ref().map(|key| self.order.canonical(key));
        let (low, high) = (canonical(&bounds.0), canonical(&bounds.1));
        let above = |key: &Vec<u8>| match &low {
            Bound::Unbounded => true,
            Bound::Included(low) => key >= low,
            Bound::Excluded(low) => key > low,
        };
        let below = |key: &Vec<u8>| match &high {
            Bound::Unbounded => true,
            Bound::Included(high) => key <= high,
            Bound::Excluded(high) => key < high,
        };
        self.pairs.iter().filter(|(key, _)| above(key) && below(key)).map(|(_, pair)| pair.clone()).collect()
    }

    /// The pairs whose keys begin with `prefix`, by their bytes.
    pub(super) fn prefix(&self, prefix: &[u8]) -> Vec<KeyValue> {
        self.pairs.values().filter(|(key, _)| key.starts_with(prefix)).cloned().collect()
    }

    /// The `n`-th existing key, modulo the number of keys.
    pub(super) fn nth_key(&self, n: u64) -> Option<Vec<u8>> {
        let at = n as usize % self.pairs.len().max(1);
        self.pairs.values().nth(at).map(|(key, _)| key.clone())
    }

    /// A key that may be removed weakly.
    pub(super) fn nth_weakly_removable_key(&self, n: u64) -> Option<Vec<u8>> {
        let once: Vec<&Vec<u8>> = self.inserts.iter().filter(|(_, count)| **count == 1).map(|(key, _)| key).collect();
        let canonical = *once.get(n as usize % once.len().max(1))?;
        self.pairs.get(canonical).map(|(key, _)| key.clone())
    }
}
