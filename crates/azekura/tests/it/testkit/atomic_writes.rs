//! Writes that are committed together, as a batch, a transaction or a conditional batch: all must be equally safe.

use std::time::Duration;

use azekura::{Batch, Database, Partition, PersistMode, Result, Transaction};

/// A time to live that outlasts a test.
const LONG_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// The value of a key that expires before it is read.
pub(crate) const EXPIRING: &[u8] = b"expired";

/// The time to live of a value in a test that expects all values: none, or a long one for a third of the values.
pub(crate) fn ttl_of(value: &[u8]) -> Option<Duration> {
    value.iter().map(|&byte| usize::from(byte)).sum::<usize>().is_multiple_of(3).then_some(LONG_TTL)
}

pub(crate) enum AtomicWrites {
    Batch(Batch),
    /// A batch that expects the present value of each key that it writes, and the first error of reading one.
    Conditional(Batch, Result<()>),
    /// A transaction that also reads each key that it writes, and its first error.
    Transaction(Box<Transaction>, Result<()>),
}

impl AtomicWrites {
    /// Begins the commit with the number `n`, which determines its kind: every second one is a transaction.
    pub(crate) fn begin(db: &Database, n: u64, mode: PersistMode) -> AtomicWrites {
        if n.is_multiple_of(2) {
            let mut tx = db.transaction();
            tx.durability(mode);
            return AtomicWrites::Transaction(Box::new(tx), Ok(()));
        }
        let mut batch = db.batch();
        batch.durability(mode);
        if n.is_multiple_of(3) { AtomicWrites::Conditional(batch, Ok(())) } else { AtomicWrites::Batch(batch) }
    }

    fn write(
        &mut self,
        part: &Partition,
        key: &[u8],
        in_batch: impl FnOnce(&mut Batch),
        in_transaction: impl FnOnce(&mut Transaction) -> Result<()>,
    ) {
        match self {
            AtomicWrites::Batch(batch) => in_batch(batch),
            AtomicWrites::Conditional(batch, done) => {
                if done.is_ok() {
                    *done = expect_present_value(batch, part, key);
                    in_batch(batch);
                }
            }
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
            part,
            key,
            |batch| batch.insert(part, key, value),
            |tx| tx.get(part, key).and_then(|_| tx.insert(part, key, value)),
        );
    }

    fn insert_with_ttl(&mut self, part: &Partition, key: &[u8], value: &[u8], ttl: Duration) {
        self.write(
            part,
            key,
            |batch| batch.insert_with_ttl(part, key, value, ttl),
            |tx| tx.get(part, key).and_then(|_| tx.insert_with_ttl(part, key, value, ttl)),
        );
    }

    /// Removes a key by a value that expires after 1 ms. The caller does not read it earlier.
    pub(crate) fn expire(&mut self, part: &Partition, key: &[u8]) {
        self.insert_with_ttl(part, key, EXPIRING, Duration::from_millis(1));
    }

    pub(crate) fn remove(&mut self, part: &Partition, key: &[u8]) {
        self.write(
            part,
            key,
            |batch| batch.remove(part, key),
            |tx| tx.contains_key(part, key).and_then(|_| tx.remove(part, key)),
        );
    }

    /// Removes one key by a range.
    pub(crate) fn remove_range(&mut self, part: &Partition, key: &[u8]) {
        self.write(
            part,
            key,
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
            AtomicWrites::Conditional(mut batch, done) => done.and_then(|()| batch.commit()),
            AtomicWrites::Transaction(tx, done) => done.and_then(|()| tx.commit()),
        }
    }
}

/// Adds the present value of `key` as an expectation, unless it expires before the commit.
fn expect_present_value(batch: &mut Batch, part: &Partition, key: &[u8]) -> Result<()> {
    let present = part.get(key)?;
    if present.as_deref() != Some(EXPIRING) {
        batch.expect(part, key, present.as_deref());
    }
    Ok(())
}

/// Sets a key to a value that does not expire, or removes it, by an operation that depends on its present value. No
/// other thread writes the key.
pub(crate) fn write_conditionally(part: &Partition, key: &[u8], value: Option<&[u8]>, n: u64) -> Result<()> {
    let present = part.get(key)?;
    match (value, &present) {
        (Some(value), None) if n.is_multiple_of(2) => part.insert_if_absent(key, value).map(|done| assert!(done)),
        (Some(value), _) if n.is_multiple_of(3) => part
            .fetch_update(key, |found| {
                assert_eq!(found, present.as_deref());
                Some(value)
            })
            .map(drop),
        (None, Some(present)) if n.is_multiple_of(2) => {
            part.take(key).map(|taken| assert_eq!(taken.as_ref(), Some(present)))
        }
        // A swap of an absent key for an absent key writes nothing.
        (None, None) => part.remove(key),
        _ => part.compare_and_swap(key, present.as_deref(), value).map(|done| assert!(done)),
    }
}
