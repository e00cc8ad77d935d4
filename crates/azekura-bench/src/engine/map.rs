//! `BTreeMap` behind a lock: the cost of memory alone. Closing it discards its content.

use crate::engine::{Engine, Scan, Visit, found, visit};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};

type OrderedMap = BTreeMap<Box<[u8]>, Box<[u8]>>;

#[derive(Clone, Default)]
pub(crate) struct MapEngine(Arc<RwLock<OrderedMap>>);

const POISONED: &str = "a thread panicked while it held the lock";

impl Engine for MapEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.0.write().expect(POISONED).insert(key.into(), value.into());
        Ok(())
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.0.write().expect(POISONED).remove(key);
        Ok(())
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        records.iter().try_for_each(|(key, value)| self.put(key, value))
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Ok(found(self.0.read().expect(POISONED).get(key), seen))
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let map = self.0.read().expect(POISONED);
        let records = map.range::<[u8], _>(scan.bounds()).map(Ok::<_, Error>);
        if scan.ascends { visit(records, seen) } else { visit(records.rev(), seen) }
    }
}
