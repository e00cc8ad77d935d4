//! A map as an engine, for tests of the harness: right, or wrong in one chosen way.

use crate::engine::map::MapEngine;
use crate::engine::{Engine, Scan};
use crate::error::Result;
use serde_json::{Map, Value};

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
    /// Its scans give one record less than they could.
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

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let skipped = usize::from(self.lie == Lie::SkipsFirst);
        let mut records = Vec::new();
        let more = limit.saturating_add(skipped as u64);
        self.map.scan(scan, more, &mut |key, value| records.push((key.to_vec(), value.to_vec())))?;
        records.drain(..skipped.min(records.len()));
        if self.lie == Lie::Disorders && records.len() > 2 {
            records.swap(1, 2);
        }
        if self.lie == Lie::EndsEarly {
            records.pop();
        }
        for (key, value) in &records {
            for _ in 0..if self.lie == Lie::Repeats { 2 } else { 1 } {
                seen(key, value);
            }
        }
        Ok(records.len() as u64)
    }

    fn flush(&self) -> Result<()> {
        self.map.flush()
    }

    fn sync(&self) -> Result<()> {
        self.map.sync()
    }

    fn busy(&self) -> Result<bool> {
        self.map.busy()
    }

    fn partition(&self, _name: &str) -> Result<Box<dyn Engine>> {
        let map = if self.lie == Lie::OnePartition { self.map.clone() } else { MapEngine::default() };
        Ok(Box::new(Memory { map, lie: self.lie }))
    }

    fn stats(&self) -> Map<String, Value> {
        self.map.stats()
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
