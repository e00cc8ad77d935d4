//! `BTreeMap` as an engine: what memory costs without anything that lasts. It is gone when it is closed.

use crate::engine::{Engine, Scan};
use crate::failure::Result;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Bound::{Included, Unbounded};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

type Records = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// One map, behind a lock as whoever shares one has to put it.
#[derive(Clone, Default)]
pub(crate) struct MapEngine(Arc<RwLock<Records>>);

impl MapEngine {
    fn read(&self) -> RwLockReadGuard<'_, Records> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Records> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine for MapEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write().insert(key.into(), value.into());
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write().remove(key);
        Ok(())
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut map = self.write();
        records.iter().for_each(|(key, value)| drop(map.insert(key.as_slice().into(), value.as_slice().into())));
        Ok(())
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let map = self.read();
        let found = map.get(key);
        if let Some(value) = found {
            seen(value);
        }
        Ok(found.is_some())
    }

    #[expect(clippy::borrowed_box, reason = "that is what the map holds")]
    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let map = self.read();
        let range = match scan {
            Scan::First | Scan::Last => map.range::<[u8], _>((Unbounded, Unbounded)),
            Scan::From(key) => map.range::<[u8], _>((Included(key), Unbounded)),
            Scan::Back(key) => map.range::<[u8], _>((Unbounded, Included(key))),
        };
        let (limit, mut count) = (usize::try_from(limit).unwrap_or(usize::MAX), 0);
        let mut show = |(key, value): (&Box<[u8]>, &Box<[u8]>)| {
            seen(key, value);
            count += 1;
        };
        match scan {
            Scan::First | Scan::From(_) => range.take(limit).for_each(&mut show),
            Scan::Last | Scan::Back(_) => range.rev().take(limit).for_each(&mut show),
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
        Ok(Box::new(MapEngine::default()))
    }

    fn stats(&self) -> Map<String, Value> {
        Map::new()
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
