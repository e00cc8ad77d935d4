//! A snapshot keeps seeing the old state while entries are overwritten, removed and added; then the old state is put
//! back from it.

use azekura::{Database, Partition, Snapshot};

use super::check::{Check, Wrong, scan, scan_live};
use super::ledger::{Digest, Ledger, Line};
use super::plan::Plan;
use crate::display::plural;
use crate::failure::Result;

/// About how many keys are changed.
const KEYS: u64 = 600;

/// Large values are left alone: what is overwritten is read again and written back.
const VALUE_BYTES_MAX: u64 = 1 << 20;

/// What is done to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Overwrite,
    Remove,
    Neighbour,
}

/// Changes things under a snapshot, looks, and restores them.
pub(crate) fn check(
    db: &Database,
    partition: &Partition,
    plan: &Plan,
    ledger: &mut Ledger,
    before: Digest,
) -> Result<Check> {
    let snapshot = db.snapshot();
    let keys = keys_to_change(plan, ledger)?;
    for (key, change) in &keys {
        match change {
            Change::Overwrite => partition.insert(key, b"changed")?,
            Change::Remove => partition.remove(key)?,
            Change::Neighbour => partition.insert(neighbour(key), b"new")?,
        }
    }
    partition.flush()?;
    let mut wrong = Wrong::default();
    for (key, change) in &keys {
        look_at_both(&snapshot, partition, key, *change, &mut wrong)?;
    }
    let seen = scan(snapshot.iter(partition))?;
    if seen.digest != before {
        wrong.add(b"the scan through the snapshot", "not the old state");
    }
    for (key, change) in &keys {
        match (change, snapshot.get(partition, key)?) {
            (Change::Neighbour, _) => partition.remove(neighbour(key))?,
            (_, Some(old)) => partition.insert(key, old)?,
            (_, None) => {} // Told above already.
        }
    }
    if scan_live(partition)?.digest != before {
        wrong.add(b"the scan after putting everything back", "not the old state");
    }
    let good = format!(
        "{} changed under it; it saw all {} as they were",
        plural(keys.len() as u64, "key"),
        plural(before.entries, "entry")
    );
    Ok(Check { claim: "a snapshot sees the old state after changes", held: wrong.count == 0, detail: wrong.or(good) })
}

/// Keys from all over the database, as many as [`KEYS`] or a few more.
fn keys_to_change(plan: &Plan, ledger: &mut Ledger) -> Result<Vec<(Vec<u8>, Change)>> {
    let step = (ledger.lines() / KEYS).max(1);
    let mut jobs = plan.jobs()?;
    let mut keys = Vec::new();
    for line in ledger.read()? {
        let job = jobs.next_job()?;
        let small = matches!(line?, Line::Stored { len, .. } if len <= VALUE_BYTES_MAX);
        if small && job.index % step == 0 {
            let change = [Change::Overwrite, Change::Remove, Change::Neighbour][keys.len() % 3];
            keys.push((job.key, change));
        }
    }
    Ok(keys)
}

/// A key that is no path, because of its zero byte.
fn neighbour(key: &[u8]) -> Vec<u8> {
    [key, b"\0new"].concat()
}

fn look_at_both(
    snapshot: &Snapshot,
    partition: &Partition,
    key: &[u8],
    change: Change,
    wrong: &mut Wrong,
) -> Result<()> {
    let old = snapshot.get(partition, key)?;
    if old.is_none() {
        wrong.add(key, "missing in the snapshot");
    }
    let now = partition.get(key)?;
    let live_is_right = match change {
        Change::Overwrite => now.is_some_and(|value| *value == *b"changed"),
        Change::Remove => now.is_none(),
        Change::Neighbour => now == old && partition.get(neighbour(key))?.is_some_and(|value| *value == *b"new"),
    };
    if !live_is_right {
        wrong.add(key, "the change itself is not seen");
    }
    if change == Change::Neighbour && snapshot.get(partition, neighbour(key))?.is_some() {
        wrong.add(key, "the snapshot sees what came later");
    }
    Ok(())
}
