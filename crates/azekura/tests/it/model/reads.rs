//! Reads of every kind, compared with the model.

use std::collections::VecDeque;
use std::ops::Bound;

use azekura::{ErrorKind, Iter, Slice};

use super::book::{Book, Bounds, Pair};
use super::subject::{Half, Moment, Stroll, Subject};
use crate::world::Dice;
use crate::world::order::Order;

/// Compares an item of an iterator with the pair it should be.
pub(super) fn is_pair(item: Option<azekura::Result<(Slice, Slice)>>, wanted: Option<&Pair>, what: &str) {
    match (item, wanted) {
        (None, None) => {}
        (Some(Ok((key, value))), Some(pair)) => {
            assert!(key[..] == pair.0[..] && value[..] == pair.1[..], "{what}: {key:.40?} instead of {:.40?}", pair.0)
        }
        (Some(Err(error)), _) => panic!("{what}: {error}"),
        (Some(Ok((key, _))), None) => panic!("{what}: {key:.40?} instead of the end"),
        (None, Some(pair)) => panic!("{what}: the end instead of {:.40?}", pair.0),
    }
}

/// Takes everything from both ends in random turns.
pub(super) fn walk(mut iter: Iter, pairs: Vec<Pair>, dice: &mut Dice, what: &str) {
    let mut rest = VecDeque::from(pairs);
    let way = dice.below(3);
    loop {
        let forward = way == 0 || (way == 1 && dice.one_in(2));
        let wanted = if forward { rest.pop_front() } else { rest.pop_back() };
        let item = if forward { iter.next() } else { iter.next_back() };
        is_pair(item, wanted.as_ref(), what);
        if wanted.is_none() {
            // An end stays an end, on both sides.
            is_pair(iter.next_back(), None, what);
            is_pair(iter.next(), None, what);
            return;
        }
    }
}

/// Everything about one partition.
pub(super) fn check_half(half: &Half, dice: &mut Dice, what: &str) {
    let (part, book) = (&half.part, &half.book);
    let pairs = book.pairs();
    walk(part.iter(), pairs.clone(), dice, what);
    assert_eq!(part.len().unwrap(), pairs.len() as u64, "{what}: len");
    assert_eq!(part.is_empty().unwrap(), pairs.is_empty(), "{what}: is_empty");
    is_pair(part.first_key_value().transpose(), pairs.first(), what);
    is_pair(part.last_key_value().transpose(), pairs.last(), what);
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

pub(super) fn check_key(half: &Half, key: &[u8], what: &str) {
    let wanted = half.book.get(key);
    let got = half.part.get(key).unwrap();
    assert!(got.as_deref() == wanted.map(|v| &v[..]), "{what}: get of {key:.40?} gives {got:.40?}");
    assert_eq!(half.part.contains_key(key).unwrap(), wanted.is_some(), "{what}: contains_key of {key:.40?}");
    let size = half.part.size_of(key).unwrap();
    assert_eq!(size, wanted.map(|value| value.len() as u32), "{what}: size_of {key:.40?}");
}

impl Subject {
    /// A key that is there, or any.
    pub(super) fn likely_key(&mut self, name: &str) -> Vec<u8> {
        let n = self.dice.throw();
        match self.halves[name].book.some_key(n) {
            Some(key) if !self.dice.one_in(4) => key,
            _ => self.key(name),
        }
    }

    pub(super) fn get(&mut self) {
        let name = self.some_name();
        let key = self.likely_key(name);
        check_key(&self.halves[name], &key, name);
    }

    pub(super) fn multi_get(&mut self) {
        let name = self.some_name();
        let keys: Vec<Vec<u8>> = (0..self.dice.below(12)).map(|_| self.likely_key(name)).collect();
        let half = &self.halves[name];
        let got = half.part.multi_get(&keys).unwrap();
        assert_eq!(got.len(), keys.len());
        for (key, got) in keys.iter().zip(got) {
            assert!(got.as_deref() == half.book.get(key).map(|v| &v[..]), "{name}: multi_get of {key:.40?}");
        }
    }

    pub(super) fn bounds(&mut self, name: &str) -> Bounds {
        let (low, high) = (self.likely_key(name), self.likely_key(name));
        let mut bound = |key: Vec<u8>| match self.dice.below(5) {
            0 => Bound::Unbounded,
            1 | 2 => Bound::Excluded(key),
            _ => Bound::Included(key),
        };
        (bound(low), bound(high))
    }

    pub(super) fn range(&mut self) {
        let name = self.some_name();
        let bounds = self.bounds(name);
        let half = &self.halves[name];
        let what = format!("{name}: range {bounds:.60?}");
        walk(half.part.range(bounds.clone()), half.book.range(&bounds), &mut self.dice, &what);
    }

    pub(super) fn prefix(&mut self) {
        let name = self.some_name();
        let mut prefix = self.likely_key(name);
        prefix.truncate(self.dice.index(6));
        let half = &self.halves[name];
        let mut iter = half.part.prefix(&prefix);
        if half.book.order == Order::Bytes {
            walk(iter, half.book.prefix(&prefix), &mut self.dice, &format!("{name}: prefix {prefix:?}"));
        } else {
            let refused = iter.next().expect("an item that says why").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid);
            assert!(iter.next().is_none());
        }
    }

    /// Begins an iterator that lives on while the partition changes.
    pub(super) fn stroll(&mut self) {
        let name = self.some_name();
        let bounds = self.bounds(name);
        let half = &self.halves[name];
        let rest = half.book.range(&bounds).into();
        self.strolls.push(Stroll { iter: half.part.range(bounds), rest, of: name });
        if self.strolls.len() > 4 {
            let at = self.dice.index(self.strolls.len());
            let Stroll { iter, rest, of } = self.strolls.swap_remove(at);
            walk(iter, rest.into(), &mut self.dice, &format!("{of}: an old iterator"));
        }
    }

    /// A few steps of an old iterator.
    pub(super) fn stroll_on(&mut self) {
        if self.strolls.is_empty() {
            return;
        }
        let at = self.dice.index(self.strolls.len());
        for _ in 0..self.dice.below(8) {
            let forward = self.dice.one_in(2);
            let stroll = &mut self.strolls[at];
            let wanted = if forward { stroll.rest.pop_front() } else { stroll.rest.pop_back() };
            let item = if forward { stroll.iter.next() } else { stroll.iter.next_back() };
            is_pair(item, wanted.as_ref(), &format!("{}: an old iterator", stroll.of));
        }
    }

    pub(super) fn take_snapshot(&mut self) {
        let moment = Moment { snapshot: self.db().snapshot(), halves: self.halves.clone() };
        self.moments.push(moment);
        if self.moments.len() > 4 {
            let at = self.dice.index(self.moments.len());
            self.moments.swap_remove(at);
        }
    }

    pub(super) fn check_snapshot(&mut self) {
        if self.moments.is_empty() {
            return;
        }
        let moment = &self.moments[self.dice.index(self.moments.len())];
        for (name, half) in &moment.halves {
            // A partition that was deleted since is gone for snapshots too, even if there is a new one of its name.
            if self.halves.get(name).is_some_and(|now| format!("{:?}", now.part) == format!("{:?}", half.part)) {
                check_moment(moment, half, &mut self.dice, name);
            }
        }
    }
}

fn check_moment(moment: &Moment, half: &Half, dice: &mut Dice, name: &str) {
    let (snapshot, part, book): (_, _, &Book) = (&moment.snapshot, &half.part, &half.book);
    let what = format!("{name}: a snapshot");
    walk(snapshot.iter(part), book.pairs(), dice, &what);
    for n in 0..20 {
        let Some(key) = book.some_key(dice.throw() ^ n) else { break };
        assert!(snapshot.contains_key(part, &key).unwrap(), "{what}: {key:.40?}");
        assert!(snapshot.get(part, &key).unwrap().as_deref() == book.get(&key).map(|v| &v[..]), "{what}: {key:.40?}");
    }
    let bounds = (Bound::Unbounded, book.some_key(dice.throw()).map_or(Bound::Unbounded, Bound::Excluded));
    walk(snapshot.range(part, bounds.clone()), book.range(&bounds), dice, &what);
    assert_eq!(snapshot.keys(part).count(), book.len(), "{what}: keys");
    assert_eq!(snapshot.is_empty(part).unwrap(), book.len() == 0, "{what}: is_empty");
    assert_eq!(snapshot.len(part).unwrap(), book.len() as u64, "{what}: len");
    is_pair(snapshot.first_key_value(part).transpose(), book.pairs().first(), &what);
    is_pair(snapshot.last_key_value(part).transpose(), book.pairs().last(), &what);
}
