//! Lists of objects that are in use although no manifest names them: those of a backup that is being written, and those
//! of backups that were removed. `lib.rs` says why this is enough.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::error::{BackupError, Result};
use crate::layout::{HOLDS, Hold, decode_hold, hex, to_json};
use crate::scratch::random;
use crate::store::BackupStore;

/// Writes the holds of one backup, and knows the time of the store.
pub(crate) struct HoldWriter<'a> {
    store: &'a BackupStore,
    grace: Duration,
    /// The time of the store, when this was made.
    now: DateTime<Utc>,
    objects: RefCell<Vec<String>>,
    /// When the last hold was written, or this was made.
    last: Cell<Start>,
}

impl<'a> HoldWriter<'a> {
    /// Writes a hold of no object, to read the clock of the store.
    pub(crate) async fn begin(store: &'a BackupStore, grace: Duration) -> Result<HoldWriter<'a>> {
        let now = write_hold(store, &Hold::default()).await?;
        let last = Cell::new(Start::now(store));
        Ok(HoldWriter { store, grace, now, objects: RefCell::default(), last })
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        self.now
    }

    /// The age of an object by the clock of the store.
    pub(crate) fn age(&self, modified: DateTime<Utc>) -> Duration {
        age(self.now, modified)
    }

    /// Objects that no manifest names are used again up to this age.
    pub(crate) fn reuse_age(&self) -> Duration {
        self.grace / 4
    }

    /// Protects these objects from now on.
    ///
    /// # Errors
    /// `TooSlow` if it took longer than a quarter of the grace time to find out which of them exist.
    pub(crate) async fn hold(&self, objects: Vec<String>) -> Result<()> {
        self.objects.replace(objects);
        self.renew(self.grace / 4).await
    }

    /// Renews the hold when an eighth of the grace time has passed.
    pub(crate) async fn renew_if_due(&self) -> Result<()> {
        if self.since_last() < self.grace / 8 { Ok(()) } else { self.renew(self.grace / 4 * 3).await }
    }

    async fn renew(&self, longest: Duration) -> Result<()> {
        // Other writers rely on a hold, so none is written that is too late.
        self.check_in(longest)?;
        let started = Start::now(self.store);
        let hold = Hold { objects: self.objects.borrow().clone() };
        write_hold(self.store, &hold).await?;
        self.check_in(longest)?;
        self.last.set(started);
        Ok(())
    }

    /// # Errors
    /// `TooSlow` if the hold may end before the manifest is visible.
    pub(crate) fn check_in_time(&self) -> Result<()> {
        self.check_in(self.grace / 4 * 3)
    }

    fn check_in(&self, longest: Duration) -> Result<()> {
        if self.since_last() > longest { Err(BackupError::TooSlow) } else { Ok(()) }
    }

    fn since_last(&self) -> Duration {
        self.last.get().elapsed(self.store)
    }
}

/// A time by two clocks, because one stops while the machine sleeps.
#[derive(Clone, Copy)]
pub(crate) struct Start(Instant, u64);

impl Start {
    pub(crate) fn now(store: &BackupStore) -> Start {
        Start(Instant::now(), (store.clock)())
    }

    pub(crate) fn elapsed(self, store: &BackupStore) -> Duration {
        let Start(instant, ms) = self;
        instant.elapsed().max(Duration::from_millis((store.clock)().saturating_sub(ms)))
    }
}

/// Age of an object. One from the future is new.
pub(crate) fn age(now: DateTime<Utc>, modified: DateTime<Utc>) -> Duration {
    (now - modified).to_std().unwrap_or_default()
}

/// Writes a hold. Returns the time that the store gave it.
pub(crate) async fn write_hold(store: &BackupStore, hold: &Hold) -> Result<DateTime<Utc>> {
    let object = format!("{HOLDS}/{}.json", hex(&random::<8>()?));
    store.put_new(&object, to_json(hold).into()).await?;
    Ok(store.head(&object).await?.last_modified + store.later)
}

/// The objects that holds younger than `max_age` name.
pub(crate) async fn held_objects(
    store: &BackupStore,
    now: DateTime<Utc>,
    max_age: Duration,
) -> Result<HashSet<String>> {
    let mut held = HashSet::new();
    for (object, meta) in store.list_json(HOLDS).await? {
        if age(now, meta.last_modified) <= max_age {
            match store.get(&object).await {
                Ok(bytes) => held.extend(decode_hold(&object, &bytes)?.objects),
                Err(BackupError::Missing { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(held)
}
