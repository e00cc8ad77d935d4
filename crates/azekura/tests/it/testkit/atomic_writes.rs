//! Writes that are committed together, as a batch or as a transaction: both must be equally safe.

use std::time::Duration;

use azekura::{Batch, Database, Partition, PersistMode, Result, Transaction};

/// A time to live that outlasts a test.
const LONG_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The time to live of a value in a test that expects all values: none, or a long one for a third of the values.
pub(crate) fn ttl_of(value: &[u8]) -> Option<Duration> {
    value.iter().map(|&byte| usize::from(byte)).sum::<usize>().is_multiple_of(3).then_some(LONG_TTL)
}

pub(crate) enum AtomicWrites {
    Batch(Batch),
    /// A transaction that also reads each key that it writes, and its first error.
    Transaction(Box<Transaction>, Result<()>),
}

impl AtomicWrites {
    pub(crate) fn begin(db: &Database, is_transaction: bool, mode: PersistMode) -> AtomicWrites {
        if is_transaction {
            let mut tx = db.transaction();
            tx.durability(mode);
            return AtomicWrites::Transaction(Box::new(tx), Ok(()));
        }
        let mut batch = db.batch();
        batch.durability(mode);
        AtomicWrites::Batch(batch)
    }

    fn write(
        &mut self,
        in_batch: impl FnOnce(&mut Batch),
        in_transaction: impl FnOnce(&mut Transaction) -> Result<()>,
    ) {
        match self {
            AtomicWrites::Batch(batch) => in_batch(batch),
            AtomicWrites::Transaction(tx, done) => {
                if done.is_ok() {
                    *done = in_transaction(tx);
                }
            }
        }
    }

    pub(crate) fn insert(&mut self, part: &Partition, key: &[u8], value: &[u8]) {
        if let Some(ttl) = ttl_of(value) {
            return self.insert_with_ttl(part, key, value, ttl);
        }
        self.write(
            |batch| batch.insert(part, key, value),
            |tx| tx.get(part, key).and_then(|_| tx.insert(part, key, value)),
        );
    }

    fn insert_with_ttl(&mut self, part: &Partition, key: &[u8], value: &[u8], ttl: Duration) {
        self.write(
            |batch| batch.insert_with_ttl(part, key, value, ttl),
            |tx| tx.get(part, key).and_then(|_| tx.insert_with_ttl(part, key, value, ttl)),
        );
    }

    /// Removes a key by a value that expires after 1 ms. The caller does not read it earlier.
    pub(crate) fn expire(&mut self, part: &Partition, key: &[u8]) {
        self.insert_with_ttl(part, key, b"expired", Duration::from_millis(1));
    }

    pub(crate) fn remove(&mut self, part: &Partition, key: &[u8]) {
        self.write(|batch| batch.remove(part, key), |tx| tx.contains_key(part, key).and_then(|_| tx.remove(part, key)));
    }

    /// Removes one key by a range.
    pub(crate) fn remove_range(&mut self, part: &Partition, key: &[u8]) {
        self.write(
            |batch| batch.remove_range(part, key..=key),
            |tx| {
                tx.range(part, key..=key)
                    .try_for_each(|entry| entry.map(drop))
                    .and_then(|()| tx.remove_range(part, key..=key))
            },
        );
    }

    pub(crate) fn commit(self) -> Result<()> {
        match self {
            AtomicWrites::Batch(mut batch) => batch.commit(),
            AtomicWrites::Transaction(tx, done) => done.and_then(|()| tx.commit()),
        }
    }
}
