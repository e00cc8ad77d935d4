//! Reads of every kind, compared with the model.

use std::collections::VecDeque;
use std::ops::Bound;

use azekura::testing::{SeededRng, TestOrder};
use azekura::{ErrorKind, Iter, Slice};

use super::partition_model::{KeyValue, ModelBounds, PartitionModel};
use super::run::{LongLivedIter, ModelRun, OpenPartition, SnapshotModel};

/// Compares an item of an iterator with the expected pair.
pub(super) fn assert_item(item: Option<azekura::Result<(Slice, Slice)>>, wanted: Option<&KeyValue>, what: &str) {
    match (item, wanted) {
        (None, None) => {}
        (Some(Ok((key, value))), Some(pair)) => {
            assert!(
                key[..] == pair.0[..] && value[..] == pair.1[..],
                "{what}: {key:.40?} instead of {:.40?} value {:.40?} {:.40?}",
                pair.0,
                &value[..],
                pair.1
            )
        }
        (Some(Err(error)), _) => panic!("{what}: {error}"),
        (Some(Ok((key, _))), None) => panic!("{what}: {key:.40?} instead of the end"),
        (None, Some(pair)) => panic!("{what}: the end instead of {:.40?}", pair.0),
    }
}

/// Consumes an iterator from both ends in random turns.
pub(super) fn check_iter_both_ends(mut iter: Iter, pairs: Vec<KeyValue>, rng: &mut SeededRng, what: &str) {
    let mut rest = VecDeque::from(pairs);
    let way = rng.below(3);
    loop {
        let forward = way == 0 || (way == 1 && rng.chance_one_in(2));
        let wanted = if forward { rest.pop_front() } else { rest.pop_back() };
        let item = if forward { iter.next() } else { iter.next_back() };
        assert_item(item, wanted.as_ref(), what);
        if wanted.is_none() {
            // After the end, both sides keep returning `None`.
            assert_item(iter.next_back(), None, what);
            assert_item(iter.next(), None, what);
            return;
        }
    }
}

/// All reads of one partition.
pub(super) fn check_partition(half: &OpenPartition, rng: &mut SeededRng, what: &str) {
    let (part, model) = (&half.part, &half.model);
    let pairs = model.pairs();
    check_iter_both_ends(part.iter(), pairs.clone(), rng, what);
    assert_eq!(part.len().unwrap(), pairs.len() as u64, "{what}: len");
    assert_eq!(part.is_empty().unwrap(), pairs.is_empty(), "{what}: is_empty");
    assert_item(part.first_key_value().transpose(), pairs.first(), what);
    assert_item(part.last_key_value().transpose(), pairs.last(), what);
    let keys: Vec<Slice> = part.keys().map(|key| key.unwrap()).collect();
    assert!(keys.iter().map(|k| &k[..]).eq(pairs.iter().map(|(k, _)| &k[..])), "{what}: keys");
    for (entry, (key, value)) in part.entries().zip(&pairs) {
        let entry = entry.unwrap();
        let whole = entry.key()[..] == key[..] && entry.value().unwrap()[..] == value[..];
        assert!(whole && entry.size() as usize == value.len(), "{what}: entries at {key:.40?}");
    }
    let values: Vec<Slice> = part.values().map(|value| value.unwrap()).collect();
    assert!(values.iter().map(|v| &v[..]).eq(pairs.iter().map(|(_, v)| &v[..])), "{what}: values");
    for (key, value) in &pairs {
        assert!(part.get(key).unwrap().as_deref() == Some(&value[..]), "{what}: get of {key:.40?}");
    }
}

pub(super) fn check_key(half: &OpenPartition, key: &[u8], what: &str) {
    let wanted = half.model.get(key);
    let got = half.part.get(key).unwrap();
    let borrowed = half.part.get_with(key, <[u8]>::to_vec).unwrap();
    assert!(borrowed.as_deref() == got.as_deref(), "get_with of {key:.40?}");
    assert!(got.as_deref() == wanted.map(|v| &v[..]), "{what}: get of {key:.40?} gives {got:.40?}");
    assert_eq!(half.part.contains_key(key).unwrap(), wanted.is_some(), "{what}: contains_key of {key:.40?}");
    let size = half.part.size_of(key).unwrap();
    assert_eq!(size, wanted.map(|value| value.len() as u32), "{what}: size_of {key:.40?}");
}

impl ModelRun {
    /// An existing key, or any key.
    pub(super) fn likely_key(&mut self, name: &str) -> Vec<u8> {
        let n = self.rng.next_u64();
        match self.partitions[name].model.nth_key(n) {
            Some(key) if !self.rng.chance_one_in(4) => key,
            _ => self.random_key(name),
        }
    }

    pub(super) fn get(&mut self) {
        let name = self.random_partition_name();
        let key = self.likely_key(name);
        check_key(&self.partitions[name], &key, name);
    }

    pub(super) fn multi_get(&mut self) {
        let name = self.random_partition_name();
        let count = if self.rng.chance_one_in(4) { self.rng.below(300) } else { self.rng.below(12) };
        let mut keys: Vec<Vec<u8>> = (0..count).map(|_| self.likely_key(name)).collect();
        if self.rng.chance_one_in(2) {
            keys.extend_from_within(..keys.len() / 2); // duplicates
        }
        let half = &self.partitions[name];
        let got = half.part.multi_get(&keys).unwrap();
        assert_eq!(got.len(), keys.len());
        for (key, got) in keys.iter().zip(got) {
            assert!(got.as_deref() == half.model.get(key).map(|v| &v[..]), "{name}: multi_get of {key:.40?}");
        }
    }

    pub(super) fn bounds(&mut self, name: &str) -> ModelBounds {
        let (low, high) = (self.likely_key(name), self.likely_key(name));
        let mut bound = |key: Vec<u8>| match self.rng.below(5) {
            0 => Bound::Unbounded,
            1 | 2 => Bound::Excluded(key),
            _ => Bound::Included(key),
        };
        (bound(low), bound(high))
    }

    pub(super) fn range(&mut self) {
        let name = self.random_partition_name();
        let bounds = self.bounds(name);
        let half = &self.partitions[name];
        let what = format!("{name}: range {bounds:.60?}");
        check_iter_both_ends(half.part.range(bounds.clone()), half.model.range(&bounds), &mut self.rng, &what);
    }

    pub(super) fn prefix(&mut self) {
        let name = self.random_partition_name();
        let mut prefix = self.likely_key(name);
        prefix.truncate(self.rng.below(6));
        let half = &self.partitions[name];
        let mut iter = half.part.prefix(&prefix);
        if half.model.order == TestOrder::Bytes {
            check_iter_both_ends(
                iter,
                half.model.prefix(&prefix),
                &mut self.rng,
                &format!("{name}: prefix {prefix:?}"),
            );
        } else {
            let refused = iter.next().expect("the iterator returns an error").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid);
            assert!(iter.next().is_none());
        }
    }

    /// Creates an iterator that is used while the partition changes.
    pub(super) fn open_long_lived_iter(&mut self) {
        let name = self.random_partition_name();
        let bounds = self.bounds(name);
        let half = &self.partitions[name];
        let rest = half.model.range(&bounds).into();
        self.iters.push(LongLivedIter { iter: half.part.range(bounds), expected: rest, partition: name });
        if self.iters.len() > 4 {
            let at = self.rng.below(self.iters.len());
            let LongLivedIter { iter, expected: rest, partition: of } = self.iters.swap_remove(at);
            check_iter_both_ends(iter, rest.into(), &mut self.rng, &format!("{of}: an old iterator"));
        }
    }

    /// A few steps of an old iterator.
    pub(super) fn advance_long_lived_iter(&mut self) {
        if self.iters.is_empty() {
            return;
        }
        let at = self.rng.below(self.iters.len());
        for _ in 0..self.rng.below(8) {
            let forward = self.rng.chance_one_in(2);
            let old_iter = &mut self.iters[at];
            let wanted = if forward { old_iter.expected.pop_front() } else { old_iter.expected.pop_back() };
            let item = if forward { old_iter.iter.next() } else { old_iter.iter.next_back() };
            assert_item(item, wanted.as_ref(), &format!("{}: an old iterator", old_iter.partition));
        }
    }

    pub(super) fn take_snapshot(&mut self) {
        let moment = SnapshotModel { snapshot: self.db().snapshot(), partitions: self.partitions.clone() };
        self.snapshots.push(moment);
        if self.snapshots.len() > 4 {
            let at = self.rng.below(self.snapshots.len());
            self.snapshots.swap_remove(at);
        }
    }

    pub(super) fn check_snapshot(&mut self) {
        if self.snapshots.is_empty() {
            return;
        }
        let moment = &self.snapshots[self.rng.below(self.snapshots.len())];
        for (name, half) in &moment.partitions {
            // A partition that was deleted since is missing for snapshots too, even if a new partition has its name.
            if self.partitions.get(name).is_some_and(|now| format!("{:?}", now.part) == format!("{:?}", half.part)) {
                check_snapshot_partition(moment, half, &mut self.rng, name);
            }
        }
    }
}

fn check_snapshot_partition(moment: &SnapshotModel, half: &OpenPartition, rng: &mut SeededRng, name: &str) {
    let (snapshot, part, model): (_, _, &PartitionModel) = (&moment.snapshot, &half.part, &half.model);
    let what = format!("{name}: a snapshot");
    check_iter_both_ends(snapshot.iter(part), model.pairs(), rng, &what);
    for n in 0..20 {
        let Some(key) = model.nth_key(rng.next_u64() ^ n) else { break };
        assert!(snapshot.contains_key(part, &key).unwrap(), "{what}: {key:.40?}");
        let expected = model.get(&key).map(|v| &v[..]);
        assert!(snapshot.get(part, &key).unwrap().as_deref() == expected, "{what}: {key:.40?}");
        let borrowed = snapshot.get_with(part, &key, <[u8]>::to_vec).unwrap();
        assert!(borrowed.as_deref() == expected, "{what}: get_with of {key:.40?}");
    }
    let keys: Vec<Vec<u8>> = (0..rng.below(150)).filter_map(|_| model.nth_key(rng.next_u64())).collect();
    let expected: Vec<_> = keys.iter().map(|key| model.get(key).map(|v| &v[..])).collect();
    let got = snapshot.multi_get(part, &keys).unwrap();
    assert!(got.iter().map(|value| value.as_deref()).eq(expected), "{what}: multi_get");
    let bounds = (Bound::Unbounded, model.nth_key(rng.next_u64()).map_or(Bound::Unbounded, Bound::Excluded));
    check_iter_both_ends(snapshot.range(part, bounds.clone()), model.range(&bounds), rng, &what);
    assert_eq!(snapshot.keys(part).count(), model.len(), "{what}: keys");
    assert_eq!(snapshot.is_empty(part).unwrap(), model.len() == 0, "{what}: is_empty");
    assert_eq!(snapshot.len(part).unwrap(), model.len() as u64, "{what}: len");
    assert_item(snapshot.first_key_value(part).transpose(), model.pairs().first(), &what);
    assert_item(snapshot.last_key_value(part).transpose(), model.pairs().last(), &what);
}
