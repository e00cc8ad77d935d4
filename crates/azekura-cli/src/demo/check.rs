//! Comparing the database with the ledger and with the files.

use std::ops::Bound;

use azekura::{Partition, Slice};

use super::ledger::{Digest, Ledger, Line, fingerprint};
use super::plan::Plan;
use super::scratch::go_on;
use crate::encoding;
use crate::failure::Result;
use crate::progress::Progress;

/// One claim and whether it held.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) claim: &'static str,
    pub(crate) held: bool,
    pub(crate) detail: String,
}

/// Keys whose value was not as it should be: all counted, the first named.
#[derive(Debug, Default)]
pub(crate) struct Wrong {
    pub(crate) count: u64,
    pub(crate) first: Option<String>,
}

impl Wrong {
    pub(crate) fn add(&mut self, key: &[u8], what: &str) {
        self.count += 1;
        self.first.get_or_insert_with(|| format!("{}: {what}", encoding::escaped(key)));
    }

    /// "3 wrong, the first: a/b: missing", or the given words if nothing is wrong.
    pub(crate) fn or(&self, good: String) -> String {
        match &self.first {
            None => good,
            Some(first) => format!("{} wrong, the first is {first}", self.count),
        }
    }
}

/// What a pass over the ledger found.
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub(crate) wrong: Wrong,
    /// What the database should hold.
    pub(crate) expected: Digest,
    /// Files whose content is another one now than when it was stored; they were compared by length and hash.
    pub(crate) changed: Vec<String>,
    pub(crate) changed_count: u64,
}

/// Gets every acknowledged key, and compares length and hash with the ledger; with `files` also each byte with the
/// file.
pub(crate) fn acknowledged(
    partition: &Partition,
    plan: &Plan,
    ledger: &mut Ledger,
    files: bool,
    progress: &Progress,
) -> Result<Compared> {
    let mut jobs = plan.jobs()?;
    let mut found = Compared::default();
    for line in ledger.read()? {
        go_on()?;
        let job = jobs.next_job()?;
        let Line::Stored { len, hash } = line? else { continue };
        found.expected.add(&job.key, len, hash);
        progress.add(len);
        let Some(value) = partition.get(&job.key)? else {
            found.wrong.add(&job.key, "missing");
            continue;
        };
        if value.len() as u64 != len || fingerprint(&value) != hash {
            found.wrong.add(&job.key, "not what was acknowledged");
        } else if files && jobs.content(&job).as_deref() != Ok(&*value) {
            // The value is what the writer read, so it is the file that changed (or went away) since.
            found.changed_count += 1;
            if found.changed.len() < 10 {
                found.changed.push(encoding::escaped(&job.key));
            }
        }
    }
    Ok(found)
}

/// What a scan saw.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    pub(crate) digest: Digest,
    /// Keys that were not greater than the one before.
    pub(crate) out_of_order: Wrong,
}

/// A range scan over everything.
pub(crate) fn scan_live(partition: &Partition) -> Result<Scanned> {
    let everything: (Bound<Vec<u8>>, Bound<Vec<u8>>) = (Bound::Unbounded, Bound::Unbounded);
    scan(partition.range(everything))
}

/// Goes through entries that should come in order.
pub(crate) fn scan(entries: impl Iterator<Item = azekura::Result<(Slice, Slice)>>) -> Result<Scanned> {
    let mut scanned = Scanned::default();
    let mut last: Option<Slice> = None;
    for entry in entries {
        go_on()?;
        let (key, value) = entry?;
        scanned.digest.add(&key, value.len() as u64, fingerprint(&value));
        if last.as_ref().is_some_and(|last| **last >= *key) {
            scanned.out_of_order.add(&key, "not behind the key before it");
        }
        last = Some(key);
    }
    Ok(scanned)
}
