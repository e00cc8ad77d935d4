//! A map as an engine, for tests of the harness: right, or wrong in one chosen way.

use crate::engine::map::MapEngine;
use crate::engine::{Change, Engine, Scan, Visit, existing};
use crate::error::Result;

/// The one thing a [`Memory`] does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// Nothing.
    None,
    /// It keeps the first value of a key for ever.
    Stale,
    /// It forgets every hundredth record it is given.
    Forgets,
    /// It flips a bit of what it gives back.
    Flips,
    /// It finds everything.
    FindsAll,
    /// Its scans leave the first record out.
    SkipsFirst,
    /// Its scans give each record twice.
    Repeats,
    /// It keeps every hundredth record that is deleted.
    KeepsDeleted,
    /// Its scans give the second record after the third.
    Disorders,
    /// Its scans end after five records.
    EndsEarly,
    /// All its partitions are one.
    OnePartition,
}

/// A map and its lie.
pub(crate) struct Memory {
    map: MapEngine,
    lie: Lie,
}

impl Memory {
    pub(crate) fn new(lie: Lie) -> Memory {
        Memory { map: MapEngine::default(), lie }
    }

    fn has(&self, key: &[u8]) -> bool {
        self.map.get(key, &mut |_| ()).unwrap()
    }
}

/// Records of a full scan.
pub(crate) fn number_of_records(engine: &dyn Engine) -> u64 {
    let mut count = 0;
    let counting = &mut |_: &[u8], _: &[u8]| {
        count += 1;
        true
    };
    engine.scan(Scan { from: None, ascends: true }, counting).unwrap();
    count
}

impl Engine for Memory {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        if (self.lie == Lie::Stale && self.has(key)) || (self.lie == Lie::Forgets && key[7].is_multiple_of(100)) {
            return Ok(());
        }
        self.map.put(key, value)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let found = self.map.get(key, &mut |value| {
            let mut value = value.to_vec();
            if self.lie == Lie::Flips {
                *value.last_mut().unwrap() ^= 1;
            }
            seen(&value);
        })?;
        Ok(found || self.lie == Lie::FindsAll)
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        if self.lie == Lie::KeepsDeleted && key[7].is_multiple_of(100) {
            return Ok(());
        }
        self.map.delete(key)
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        records.iter().try_for_each(|(key, value)| self.put(key, value))
    }

    /// Not isolated: the threads of a workload change different keys.
    fn transact(&self, keys: &[Vec<u8>], change: Change<'_>) -> Result<()> {
        for (position, key) in keys.iter().enumerate() {
            let mut value = None;
            self.get(key, &mut |bytes| value = Some(bytes.to_vec()))?;
            let value = change(position, &existing(value)?)?;
            self.put(key, &value)?;
        }
        Ok(())
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let (mut count, mut second) = (0, None);
        self.map.scan(scan, &mut |key, value| {
            count += 1;
            match (self.lie, count) {
                (Lie::SkipsFirst, 1) => true,
                (Lie::Repeats, _) => seen(key, value) && seen(key, value),
                (Lie::Disorders, 2) => {
                    second = Some((key.to_vec(), value.to_vec()));
                    true
                }
                (Lie::Disorders, 3) => seen(key, value) && second.take().is_some_and(|(k, v)| seen(&k, &v)),
                (Lie::EndsEarly, 6) => false,
                _ => seen(key, value),
            }
        })
    }

    fn partition(&self, _name: &str) -> Result<Box<dyn Engine>> {
        let map = if self.lie == Lie::OnePartition { self.map.clone() } else { MapEngine::default() };
        Ok(Box::new(Memory { map, lie: self.lie }))
    }
}
