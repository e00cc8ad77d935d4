//! Which blob files a version has, where logical files lie, and how much of them is referenced.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::base::edit::{BlobUse, FileId};
use crate::base::{Error, Result};
use crate::lsm::blobs::handle::BlobHandle;

/// The blob files of a version. Immutable once the version is published.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlobMap {
    /// By their numbers.
    files: BTreeMap<FileId, Arc<BlobHandle>>,
    places: BTreeMap<FileId, Place>,
    totals: Totals,
}

/// Bytes of frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// In all files.
    pub(crate) bytes: u64,
    /// Of those, what tables refer to.
    pub(crate) referenced: u64,
}

/// Less than this part of what is referenced is not worth a flush or a merge just to know whether it still is.
const SHOWN_SHARE: u64 = 16;

impl Totals {
    /// So many bytes that may be hidden are worth a flush or a merge.
    pub(crate) fn worth_showing(&self) -> u64 {
        (self.referenced / SHOWN_SHARE).max(1)
    }

    /// With so many referenced bytes hidden, a target allows half as many stale ones beside the others as without.
    pub(crate) fn may_hide_within(&self, target: f32) -> u64 {
        let target = f64::from(target);
        (self.referenced as f64 * (1.0 - (1.0 + target) / (2.0 * target))) as u64
    }

    /// Whether there are more than `target` bytes for each referenced one if tables refer to `hidden` bytes less.
    pub(crate) fn exceed(&self, target: f32, hidden: u64) -> bool {
        self.bytes as f64 > f64::from(target) * self.referenced.saturating_sub(hidden) as f64
    }
}

/// Where a logical file lies, and what tables refer to of it.
#[derive(Clone, Debug)]
struct Place {
    handle: Arc<BlobHandle>,
    count: u64,
    bytes: u64,
}

/// How full a blob file is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobFileUse {
    pub(crate) id: FileId,
    /// Of the file.
    pub(crate) size: u64,
    /// Values, and bytes of their frames.
    pub(crate) values: u64,
    pub(crate) bytes: u64,
    /// Of those, what tables refer to.
    pub(crate) referenced_values: u64,
    pub(crate) referenced_bytes: u64,
}

impl BlobMap {
    /// The map of a manifest's blob files and tables.
    ///
    /// # Errors
    /// `Corruption` for a logical file in two blob files, and for tables that refer to what is in none.
    pub(crate) fn restore<'a>(
        handles: impl IntoIterator<Item = Arc<BlobHandle>>,
        uses: impl IntoIterator<Item = &'a BlobUse>,
    ) -> Result<BlobMap> {
        let mut map = BlobMap::default();
        for handle in handles {
            if let Some(logical) = map.add(&handle, &[]) {
                return Err(Error::corruption(format!("manifest has blob file {} in two places", logical.0)));
            }
        }
        for uses in uses {
            let Some(place) = map.places.get_mut(&uses.logical) else {
                let logical = uses.logical.0;
                return Err(Error::corruption(format!("tables point to blob file {logical}, which is not there")));
            };
            place.count = place.count.saturating_add(uses.count);
            place.bytes = place.bytes.saturating_add(uses.bytes);
        }
        for (logical, place) in &map.places {
            let section = place.handle.meta().sections.iter().find(|section| section.logical == *logical);
            if section.is_none_or(|section| place.count > section.values || place.bytes > section.bytes) {
                let logical = logical.0;
                return Err(Error::corruption(format!("tables point to more of blob file {logical} than there is")));
            }
        }
        map.add_up();
        Ok(map)
    }

    fn add_up(&mut self) {
        let sections = self.files.values().flat_map(|handle| &handle.meta().sections);
        let bytes = sections.map(|section| section.bytes).sum();
        self.totals = Totals { bytes, referenced: self.places.values().map(|place| place.bytes).sum() };
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Takes in a file; what tables refer to of its logical files stays as it was. Gives a logical file that was here
    /// already, in a file that is not `removed`, if there is one.
    fn add(&mut self, handle: &Arc<BlobHandle>, removed: &[FileId]) -> Option<FileId> {
        let meta = handle.meta();
        let mut twice = self.files.insert(meta.id, Arc::clone(handle)).map(|_| meta.id);
        for section in &meta.sections {
            let place = Place { handle: Arc::clone(handle), count: 0, bytes: 0 };
            match self.places.entry(section.logical) {
                Entry::Vacant(free) => drop(free.insert(place)),
                Entry::Occupied(mut here) => {
                    let (count, bytes) = (here.get().count, here.get().bytes);
                    let before = here.insert(Place { count, bytes, ..place });
                    if !removed.contains(&before.handle.meta().id) {
                        twice = Some(section.logical);
                    }
                }
            }
        }
        twice
    }

    /// The map after blob files and references came and went. A logical file of a removed file may lie in an added one,
    /// and must if it is referenced.
    pub(crate) fn with<'a>(
        &self,
        added: &[Arc<BlobHandle>],
        removed: &[FileId],
        gained: impl IntoIterator<Item = &'a BlobUse>,
        lost: impl IntoIterator<Item = &'a BlobUse>,
    ) -> BlobMap {
        let mut map = self.clone();
        for handle in added {
            let twice = map.add(handle, removed);
            debug_assert!(twice.is_none(), "a logical file lies in one place");
        }
        for uses in gained {
            map.change(uses, u64::saturating_add);
        }
        for uses in lost {
            map.change(uses, u64::saturating_sub);
        }
        for id in removed {
            map.files.remove(id);
        }
        if !removed.is_empty() {
            map.places.retain(|_, place| {
                let gone = removed.contains(&place.handle.meta().id);
                debug_assert!(!gone || place.count == 0, "what tables point to stays");
                !gone
            });
        }
        map.add_up();
        map
    }

    fn change(&mut self, uses: &BlobUse, by: impl Fn(u64, u64) -> u64) {
        let place = self.places.get_mut(&uses.logical);
        debug_assert!(place.is_some(), "tables point to blob files of their version only");
        if let Some(place) = place {
            (place.count, place.bytes) = (by(place.count, uses.count), by(place.bytes, uses.bytes));
        }
    }

    /// The blob file that has the values of a logical file.
    pub(crate) fn file(&self, logical: FileId) -> Option<&Arc<BlobHandle>> {
        self.places.get(&logical).map(|place| &place.handle)
    }

    pub(crate) fn has(&self, file: FileId) -> bool {
        self.files.contains_key(&file)
    }

    /// Bytes of a logical file that tables refer to.
    pub(crate) fn referenced(&self, logical: FileId) -> u64 {
        self.places.get(&logical).map_or(0, |place| place.bytes)
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = &Arc<BlobHandle>> {
        self.files.values()
    }

    /// Whether memory may point into a file, by the logical files that it is known to point into.
    pub(crate) fn is_counted(handle: &BlobHandle, counted: &BTreeSet<FileId>) -> bool {
        !counted.is_empty() && handle.meta().sections.iter().any(|section| counted.contains(&section.logical))
    }

    /// Files of which nothing is referenced once `gained` and `lost` are counted too, none of which adds or removes a
    /// file; `counted` are logical files that memory points into.
    pub(crate) fn unreferenced<'a>(
        &self,
        counted: &BTreeSet<FileId>,
        gained: impl IntoIterator<Item = &'a BlobUse>,
        lost: impl IntoIterator<Item = &'a BlobUse>,
    ) -> Vec<Arc<BlobHandle>> {
        if self.files.is_empty() {
            return Vec::new();
        }
        let after = self.with(&[], &[], gained, lost);
        let is_used = |handle: &Arc<BlobHandle>| {
            handle.meta().sections.iter().any(|section| after.places.get(&section.logical).is_some_and(|p| p.count > 0))
        };
        let is_free = |handle: &&Arc<BlobHandle>| !is_used(handle) && !BlobMap::is_counted(handle, counted);
        self.files.values().filter(is_free).map(Arc::clone).collect()
    }

    /// How full each file is, by their numbers.
    pub(crate) fn uses(&self) -> Vec<BlobFileUse> {
        let uses = self.files.values().map(|handle| {
            let meta = handle.meta();
            let mut sum = BlobFileUse { id: meta.id, size: meta.size, ..BlobFileUse::default() };
            for section in &meta.sections {
                sum.values += section.values;
                sum.bytes += section.bytes;
                if let Some(place) = self.places.get(&section.logical) {
                    sum.referenced_values += place.count;
                    sum.referenced_bytes += place.bytes;
                }
            }
            sum
        });
        uses.collect()
    }
}
