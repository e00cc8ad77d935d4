//! The blob files of a version: their handles, in which blob file each logical file is stored, and how much of it is
//! referenced.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::version_edit::{BlobFileMeta, FileNumber, TableBlobUsage};
use crate::base::{Error, Result};
use crate::blob::reader::BlobFile;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// A blob file that is opened on first read. When the last holder drops an obsolete file, it may be removed; the
/// holder, which may be any reader, does not remove it. Thread safe.
pub(crate) struct BlobHandle {
    meta: BlobFileMeta,
    file: BlobFile,
    files: DataFiles,
    obsolete_files: Arc<ObsoleteFiles>,
    obsolete: AtomicBool,
}

impl BlobHandle {
    /// `files`: the blob files of the database.
    pub(crate) fn new(
        meta: BlobFileMeta,
        file: BlobFile,
        files: DataFiles,
        obsolete_files: Arc<ObsoleteFiles>,
    ) -> Arc<BlobHandle> {
        files.add_live_bytes(meta.size);
        Arc::new(BlobHandle { meta, file, files, obsolete_files, obsolete: AtomicBool::new(false) })
    }

    pub(crate) fn meta(&self) -> &BlobFileMeta {
        &self.meta
    }

    pub(crate) fn file(&self) -> &BlobFile {
        &self.file
    }

    /// No manifest names the file any more: dropping the last handle makes it obsolete.
    pub(crate) fn mark_obsolete(&self) {
        self.obsolete.store(true, Ordering::Release);
    }
}

impl Drop for BlobHandle {
    fn drop(&mut self) {
        self.files.remove_live_bytes(self.meta.size);
        if *self.obsolete.get_mut() {
            self.obsolete_files.push(DataFileKind::Blob, self.meta.number);
        }
    }
}

/// The blob files of a version. Immutable once the version is published.
#[derive(Clone, Default)]
pub(crate) struct BlobMap {
    /// By file number.
    files: BTreeMap<FileNumber, Arc<BlobHandle>>,
    locations: BTreeMap<FileNumber, BlobLocation>,
    totals: BlobTotals,
}

/// No table has this number of entries, or of bytes before compression, and no blob file this number of values or
/// bytes. The sums over all files fit in 64 bits.
pub(crate) const FIGURE_LIMIT: u64 = 1 << 48;

/// Sums of frame bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobTotals {
    /// In all files.
    pub(crate) bytes: u64,
    /// Bytes that tables refer to.
    pub(crate) referenced: u64,
}

/// A flush or a compaction that only finds out whether values are still referenced is worth its cost if it may concern
/// at least this part of the referenced bytes.
const HIDDEN_SHARE_DIVISOR: u64 = 16;

impl BlobTotals {
    /// Number of possibly hidden bytes that justify a flush or a compaction.
    pub(crate) fn min_hidden_bytes_to_compact(&self) -> u64 {
        (self.referenced / HIDDEN_SHARE_DIVISOR).max(1)
    }

    /// With this many hidden referenced bytes, a target permits half as many other stale bytes as without.
    pub(crate) fn hidden_bytes_allowance(&self, target: f32) -> u64 {
        let target = f64::from(target);
        (self.referenced as f64 * (1.0 - (1.0 + target) / (2.0 * target))) as u64
    }

    /// Whether the blob files have more than `target` bytes for each referenced byte, if `hidden` referenced bytes are
    /// not counted.
    pub(crate) fn exceed_space_amp(&self, target: f32, hidden: u64) -> bool {
        self.bytes as f64 > f64::from(target) * self.referenced.saturating_sub(hidden) as f64
    }
}

/// The blob file of a logical file, and the references of tables to it.
#[derive(Clone)]
struct BlobLocation {
    handle: Arc<BlobHandle>,
    count: u64,
    bytes: u64,
}

/// Metrics of one blob file.
///
/// ```
/// # use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
/// # let separation = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
/// for round in 0..2u8 {
///     pages.insert("page", vec![round; 5_000])?;
///     pages.flush()?;
/// }
/// assert_eq!(pages.metrics().stale_blob_bytes(), 0); // no compaction has dropped the pointer to the first value
/// pages.insert("other page", vec![2; 5_000])?;
/// pages.remove("page")?;
/// pages.major_compact()?;
/// let metrics = pages.metrics();
/// let stale: u64 = metrics.blob_files.iter().map(|file| file.stale_bytes()).sum();
/// assert_eq!(stale, metrics.stale_blob_bytes());
/// # assert_eq!(metrics.blob_files.len(), 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BlobFileMetrics {
    /// File number, as in the file name.
    pub id: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Values stored in the file.
    pub values: u64,
    /// Bytes of these values as stored.
    pub value_bytes: u64,
    /// Values that a table points to, including those that only a snapshot can read. An overwritten value counts
    /// until a compaction drops its pointer.
    pub referenced_values: u64,
    /// Bytes of the referenced values as stored.
    pub referenced_bytes: u64,
}

impl BlobFileMetrics {
    /// Returns the bytes of values that no table points to any more.
    ///
    /// ```
    /// let mut file = azekura::BlobFileMetrics::default();
    /// (file.value_bytes, file.referenced_bytes) = (4_000, 3_000);
    /// assert_eq!(file.stale_bytes(), 1_000);
    /// ```
    pub fn stale_bytes(&self) -> u64 {
        self.value_bytes.saturating_sub(self.referenced_bytes)
    }
}

impl BlobMap {
    /// Builds the map from the blob files and tables of a manifest.
    ///
    /// # Errors
    /// `Corruption` for a logical file in two blob files, for figures that no blob file has, and for tables that refer
    /// to values that no blob file has.
    pub(crate) fn restore<'a>(
        handles: impl IntoIterator<Item = Arc<BlobHandle>>,
        uses: impl IntoIterator<Item = &'a TableBlobUsage>,
    ) -> Result<BlobMap> {
        let mut map = BlobMap::default();
        for handle in handles {
            let meta = handle.meta();
            if meta.sections.iter().any(|section| section.values.max(section.bytes) >= FIGURE_LIMIT) {
                return Err(Error::corruption(format!("figures of blob file {} are impossible", meta.number.0)));
            }
            if let Some(logical) = map.add(&handle, &[]) {
                return Err(Error::corruption(format!("manifest has logical blob file {} in two files", logical.0)));
            }
        }
        for uses in uses {
            let Some(place) = map.locations.get_mut(&uses.logical_file) else {
                let logical = uses.logical_file.0;
                return Err(Error::corruption(format!("tables point to blob file {logical}, which is missing")));
            };
            place.count = place.count.saturating_add(uses.count);
            place.bytes = place.bytes.saturating_add(uses.bytes);
        }
        for (logical, place) in &map.locations {
            let section = place.handle.meta().sections.iter().find(|section| section.logical_file == *logical);
            if section.is_none_or(|section| place.count > section.values || place.bytes > section.bytes) {
                let logical = logical.0;
                return Err(Error::corruption(format!("tables point to more of blob file {logical} than it has")));
            }
        }
        map.recompute_totals();
        Ok(map)
    }

    fn recompute_totals(&mut self) {
        let sections = self.files.values().flat_map(|handle| &handle.meta().sections);
        let bytes = sections.map(|section| section.bytes).sum();
        self.totals = BlobTotals { bytes, referenced: self.locations.values().map(|place| place.bytes).sum() };
    }

    pub(crate) fn totals(&self) -> BlobTotals {
        self.totals
    }

    /// Adds a file and keeps the reference counts of its logical files. Returns a logical file that is also in another
    /// file that is not `removed`, if there is one.
    fn add(&mut self, handle: &Arc<BlobHandle>, removed: &[FileNumber]) -> Option<FileNumber> {
        let meta = handle.meta();
        let mut twice = self.files.insert(meta.number, Arc::clone(handle)).map(|_| meta.number);
        for section in &meta.sections {
            let place = BlobLocation { handle: Arc::clone(handle), count: 0, bytes: 0 };
            match self.locations.entry(section.logical_file) {
                Entry::Vacant(free) => drop(free.insert(place)),
                Entry::Occupied(mut here) => {
                    let (count, bytes) = (here.get().count, here.get().bytes);
                    let before = here.insert(BlobLocation { count, bytes, ..place });
                    if !removed.contains(&before.handle.meta().number) {
                        twice = Some(section.logical_file);
                    }
                }
            }
        }
        twice
    }

    /// Returns the map after blob files and references were added and removed. A logical file of a removed file may be
    /// in an added file, and must be if it is referenced.
    pub(crate) fn with_changes<'a>(
        &self,
        added: &[Arc<BlobHandle>],
        removed: &[FileNumber],
        gained: impl IntoIterator<Item = &'a TableBlobUsage>,
        lost: impl IntoIterator<Item = &'a TableBlobUsage>,
    ) -> BlobMap {
        let mut map = self.clone();
        for handle in added {
            let twice = map.add(handle, removed);
            debug_assert!(twice.is_none(), "a logical file is in one blob file");
        }
        for uses in gained {
            map.adjust_references(uses, u64::saturating_add);
        }
        for uses in lost {
            map.adjust_references(uses, |all, lost| {
                debug_assert!(all >= lost, "a table that is removed has added its references");
                all.saturating_sub(lost)
            });
        }
        for id in removed {
            let file = map.files.remove(id);
            debug_assert!(file.is_some(), "the version has the file to be removed");
        }
        if !removed.is_empty() {
            map.locations.retain(|_, place| {
                let is_removed = removed.contains(&place.handle.meta().number);
                debug_assert!(!is_removed || place.count == 0, "a file that tables point to is not removed");
                !is_removed
            });
        }
        map.recompute_totals();
        map
    }

    fn adjust_references(&mut self, uses: &TableBlobUsage, by: impl Fn(u64, u64) -> u64) {
        let place = self.locations.get_mut(&uses.logical_file);
        debug_assert!(place.is_some(), "tables point to blob files of their version only");
        if let Some(place) = place {
            (place.count, place.bytes) = (by(place.count, uses.count), by(place.bytes, uses.bytes));
        }
    }

    /// Panics if the references differ from those of `used`, which are those of all tables, or if a logical file is not
    /// in exactly one blob file.
    pub(crate) fn check_invariants<'a>(&self, used: impl IntoIterator<Item = &'a TableBlobUsage>) {
        let sections: usize = self.files.values().map(|handle| handle.meta().sections.len()).sum();
        assert_eq!(sections, self.locations.len(), "each logical file is in exactly one blob file");
        let mut references: BTreeMap<FileNumber, (u64, u64)> = BTreeMap::new();
        for uses in used {
            let (count, bytes) = references.entry(uses.logical_file).or_default();
            (*count, *bytes) = (count.saturating_add(uses.count), bytes.saturating_add(uses.bytes));
        }
        for (logical, place) in &self.locations {
            let wanted = references.remove(logical).unwrap_or_default();
            assert_eq!((place.count, place.bytes), wanted, "references to blob file {}", logical.0);
            assert!(self.files.contains_key(&place.handle.meta().number), "the version has the file of each value");
        }
        let (mut recomputed, known) = (self.clone(), self.totals);
        recomputed.recompute_totals();
        assert_eq!(recomputed.totals, known, "the totals are the sums over the files");
        assert!(references.is_empty(), "tables point to blob files of their version only");
    }

    /// The blob file that has the values of a logical file.
    pub(crate) fn handle(&self, logical: FileNumber) -> Option<&Arc<BlobHandle>> {
        self.locations.get(&logical).map(|place| &place.handle)
    }

    pub(crate) fn contains(&self, file: FileNumber) -> bool {
        self.files.contains_key(&file)
    }

    /// Bytes of a logical file that tables refer to.
    pub(crate) fn referenced(&self, logical: FileNumber) -> u64 {
        self.locations.get(&logical).map_or(0, |place| place.bytes)
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = &Arc<BlobHandle>> {
        self.files.values()
    }

    /// Whether memtables may point into a file. `counted`: the logical files with counted pointers.
    pub(crate) fn has_memory_pointers(handle: &BlobHandle, counted: &BTreeSet<FileNumber>) -> bool {
        !counted.is_empty() && handle.meta().sections.iter().any(|section| counted.contains(&section.logical_file))
    }

    /// Files without references once `gained` and `lost` are applied, neither of which adds or removes a file.
    /// `counted`: the logical files that memtables may point into.
    pub(crate) fn unreferenced<'a>(
        &self,
        counted: &BTreeSet<FileNumber>,
        gained: impl IntoIterator<Item = &'a TableBlobUsage>,
        lost: impl IntoIterator<Item = &'a TableBlobUsage>,
    ) -> Vec<Arc<BlobHandle>> {
        if self.files.is_empty() {
            return Vec::new();
        }
        let after = self.with_changes(&[], &[], gained, lost);
        let is_used = |handle: &Arc<BlobHandle>| {
            handle
                .meta()
                .sections
                .iter()
                .any(|section| after.locations.get(&section.logical_file).is_some_and(|p| p.count > 0))
        };
        let is_free = |handle: &&Arc<BlobHandle>| !is_used(handle) && !BlobMap::has_memory_pointers(handle, counted);
        self.files.values().filter(is_free).map(Arc::clone).collect()
    }

    /// Size and use of each file, by file number.
    pub(crate) fn stats(&self) -> Vec<BlobFileMetrics> {
        self.handles_with_stats().map(|(_, uses)| uses).collect()
    }

    /// Each file, with its size and use, by file number.
    pub(crate) fn handles_with_stats(&self) -> impl Iterator<Item = (&Arc<BlobHandle>, BlobFileMetrics)> {
        self.files.values().map(|handle| {
            let meta = handle.meta();
            let mut sum = BlobFileMetrics { id: meta.number.0, bytes: meta.size, ..BlobFileMetrics::default() };
            for section in &meta.sections {
                sum.values += section.values;
                sum.value_bytes += section.bytes;
                if let Some(place) = self.locations.get(&section.logical_file) {
                    sum.referenced_values += place.count;
                    sum.referenced_bytes += place.bytes;
                }
            }
            (handle, sum)
        })
    }
}
