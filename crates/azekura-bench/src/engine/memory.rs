//! An ordered map as an engine, for tests of the harness: right, or wrong in one chosen way.

use crate::engine::{Engine, Scan};
use crate::failure::Result;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

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
    map: Arc<RwLock<BTreeMap<Vec<u8>, Vec<u8>>>>,
    lie: Lie,
}

impl Memory {
    pub(crate) fn new(lie: Lie) -> Memory {
        Memory { map: Arc::default(), lie }
    }
}

impl Engine for Memory {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let mut map = self.map.write().unwrap();
        if (self.lie == Lie::Stale && map.contains_key(key)) || (self.lie == Lie::Forgets && key[7].is_multiple_of(100))
        {
            return Ok(());
        }
        map.insert(key.to_vec(), value.to_vec());
        Ok(())
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let Some(mut value) = self.map.read().unwrap().get(key).cloned() else { return Ok(self.lie == Lie::FindsAll) };
        if self.lie == Lie::Flips {
            *value.last_mut().unwrap() ^= 1;
        }
        seen(&value);
        Ok(true)
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        if self.lie != Lie::KeepsDeleted || !key[7].is_multiple_of(100) {
            self.map.write().unwrap().remove(key);
        }
        Ok(())
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        records.iter().try_for_each(|(key, value)| self.put(key, value))
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let map = self.map.read().unwrap();
        let records: Box<dyn Iterator<Item = (&Vec<u8>, &Vec<u8>)>> = match scan {
            Scan::First => Box::new(map.iter()),
            Scan::From(key) => Box::new(map.range(key.to_vec()..)),
            Scan::Last => Box::new(map.iter().rev()),
            Scan::Back(key) => Box::new(map.range(..=key.to_vec()).rev()),
        };
        let skipped = usize::from(self.lie == Lie::SkipsFirst);
        let mut count = 0;
        let mut records: Vec<_> = records.skip(skipped).take(limit as usize).collect();
        if self.lie == Lie::Disorders && records.len() > 2 {
            records.swap(1, 2);
        }
        if self.lie == Lie::EndsEarly {
            records.pop();
        }
        for (key, value) in records {
            for _ in 0..if self.lie == Lie::Repeats { 2 } else { 1 } {
                seen(key, value);
            }
            count += 1;
        }
        Ok(count)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn busy(&self) -> Result<bool> {
        Ok(false)
    }

    fn tables(&self) -> Result<u64> {
        Ok(1)
    }

    fn partition(&self, _name: &str) -> Result<Box<dyn Engine>> {
        let map = if self.lie == Lie::OnePartition { Arc::clone(&self.map) } else { Arc::default() };
        Ok(Box::new(Memory { map, lie: self.lie }))
    }

    fn stats(&self) -> Map<String, Value> {
        Map::new()
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
