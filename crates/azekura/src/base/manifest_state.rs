//! The state that the version edits of a manifest build.
//!
//! It is a pure value: opening replays the manifest into it, every batch of edits changes it, and a rewrite of the
//! manifest encodes it. It contains files and names only.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::key_range::{KeyBoundary, RangeTombstone};
use crate::base::version_edit::{
    BlobFileMeta, FileNumber, PartitionEdit, PartitionId, PartitionMeta, TableMeta, VersionEdit, WalEpoch,
};
use crate::base::{Error, Result, SeqNo};

/// State of one partition in the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartitionManifestState {
    pub(crate) meta: PartitionMeta,
    pub(crate) tables: BTreeMap<FileNumber, (u8, TableMeta)>,
    pub(crate) blob_files: BTreeMap<FileNumber, BlobFileMeta>,
    pub(crate) flushed_seqno: SeqNo,
    /// Tables of [`PartitionEdit::TableSpilled`] with records above `flushed_seqno`.
    pub(crate) spilled: BTreeMap<FileNumber, TableMeta>,
    /// The fragments of the flushed range tombstones, by their encoded starts.
    pub(crate) range_tombstones: BTreeMap<Vec<u8>, RangeTombstone>,
    /// File id of a pool, once it is known.
    pub(crate) pool_file_id: Option<[u8; 16]>,
    /// The highest sequence number of any table so far. Compactions may have removed it from the tables.
    largest_table_seqno: SeqNo,
    /// Name of the merge operator. Without one, the partition has no operands.
    pub(crate) merge_operator: Option<String>,
    /// Whether the partition may have records that expire.
    pub(crate) uses_expiry: bool,
}

/// State of the database in the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ManifestState {
    pub(crate) id: [u8; 16],
    pub(crate) instance: [u8; 16],
    pub(crate) hash_seed: u64,
    pub(crate) created_ms: u64,
    /// Encoded settings with which the database was last opened for writing; empty if an older version wrote the
    /// manifest.
    pub(crate) settings: Vec<u8>,
    pub(crate) partitions: BTreeMap<PartitionId, PartitionManifestState>,
    pub(crate) wal_segments: BTreeMap<WalEpoch, FileNumber>,
    pub(crate) wal_end: Option<(WalEpoch, SeqNo)>,
    /// The ends of the WAL that were recorded before `wal_end`, oldest first, at most [`EARLIER_WAL_ENDS_MAX`]. Both
    /// numbers rise, unless the first is [`ALL_LOST`] or [`FORGOTTEN`]. No valid commit that a segment up to such an
    /// epoch contains has a higher sequence number.
    pub(crate) earlier_wal_ends: VecDeque<(WalEpoch, SeqNo)>,
    /// Sequence number of the last [`VersionEdit::AllFlushed`].
    pub(crate) all_flushed: SeqNo,
    /// All file numbers below this one are used. The next two fields are the same for partition ids and WAL epochs.
    pub(crate) next_file_number: u64,
    pub(crate) next_partition_id: u64,
    pub(crate) next_wal_epoch: u32,
}

/// Maximum number of recorded ends of the WAL, without the newest: 64, and [`FORGOTTEN`].
const EARLIER_WAL_ENDS_MAX: usize = 65;
/// In place of an end of the WAL: no position of this epoch is valid, not even that before the first commit.
const ALL_LOST: SeqNo = SeqNo::MAX;
/// In place of ends of the WAL that are not known any more.
const FORGOTTEN: SeqNo = SeqNo(SeqNo::MAX.0 - 1);
/// Exclusive upper bound of numbers in the manifest, so that there is always a next number.
const NUMBER_LIMIT: u64 = 1 << 62;
/// Exclusive upper bound of levels.
const LEVELS_MAX: u8 = 64;
/// Maximum number of tables of a partition that [`ManifestState::check_invariants`] visits.
const CHECKED_TABLES_MAX: usize = 8;
/// Maximum count of used numbers that the manifest does not contain yet: those of files that were being written.
const UNRECORDED_NUMBERS_MAX: u64 = 1 << 32;

impl PartitionManifestState {
    pub(crate) fn new(meta: PartitionMeta) -> PartitionManifestState {
        PartitionManifestState {
            meta,
            tables: BTreeMap::new(),
            blob_files: BTreeMap::new(),
            flushed_seqno: SeqNo::ZERO,
            spilled: BTreeMap::new(),
            range_tombstones: BTreeMap::new(),
            pool_file_id: None,
            largest_table_seqno: SeqNo::ZERO,
            merge_operator: None,
            uses_expiry: false,
        }
    }

    /// Returns `Corruption` and changes nothing if the edit contradicts the state. The caller removes the partition for
    /// [`PartitionEdit::Dropped`].
    fn apply(&mut self, edit: &PartitionEdit) -> Result<()> {
        match edit {
            PartitionEdit::Dropped => {}
            PartitionEdit::Settings { settings } => self.meta.settings.clone_from(settings),
            PartitionEdit::TableAdded { level, table } => {
                check_level(table.number, *level)?;
                self.check_new(table.number)?;
                self.raise_table_seqno(table.largest_seqno);
                self.tables.insert(table.number, (*level, table.clone()));
            }
            PartitionEdit::TableSpilled { table } => {
                self.check_new(table.number)?;
                self.spilled.insert(table.number, table.clone());
            }
            PartitionEdit::TableRemoved { table } => _ = self.tables.remove(table).ok_or_else(|| no_table(*table))?,
            PartitionEdit::TableMoved { table, level } => {
                check_level(*table, *level)?;
                self.table(*table)?.0 = *level;
            }
            PartitionEdit::RangeDeletesApplied { table, through } => {
                self.table(*table)?.1.range_deletes_applied_through = *through;
            }
            PartitionEdit::TableExpiry { table, times } => self.table(*table)?.1.expiry = *times,
            PartitionEdit::ExpiryUsed => self.uses_expiry = true,
            PartitionEdit::BlobFileAdded { file } => {
                ensure(!self.blob_files.contains_key(&file.number), || {
                    format!("the manifest adds blob file {} twice", file.number.0)
                })?;
                self.blob_files.insert(file.number, file.clone());
            }
            PartitionEdit::BlobFileRemoved { file } => ensure(self.blob_files.remove(file).is_some(), || {
                format!("the manifest removes blob file {}, which it never added", file.0)
            })?,
            PartitionEdit::RangeTombstones { removed, added } => self.change_range_tombstones(removed, added)?,
            PartitionEdit::Flushed { through } => {
                self.flushed_seqno = self.flushed_seqno.max(*through);
                self.spilled.retain(|_, table| table.largest_seqno > *through);
            }
            PartitionEdit::WalDurable { through } => self.raise_table_seqno(*through),
            PartitionEdit::MergeOperator { name } => {
                ensure(self.merge_operator.is_none(), || {
                    format!("the manifest sets the operator of partition {} twice", self.meta.id.0)
                })?;
                self.merge_operator = Some(name.clone());
            }
            PartitionEdit::PoolFileId { file_id } => self.pool_file_id = Some(*file_id),
        }
        Ok(())
    }

    fn change_range_tombstones(&mut self, removed: &[KeyBoundary], added: &[RangeTombstone]) -> Result<()> {
        check_range_tombstones(&self.range_tombstones, removed, added)?;
        removed.iter().for_each(|start| drop(self.range_tombstones.remove(&encoded_start(start))));
        for fragment in added {
            self.range_tombstones.insert(encoded_start(&fragment.range.start), fragment.clone());
        }
        Ok(())
    }

    /// Panics if the newest tables or blob files, those with the highest numbers, are not listed as described.
    fn check_invariants(&self, next_file_number: u64) {
        for (number, (level, table)) in self.tables.iter().rev().take(CHECKED_TABLES_MAX) {
            assert_eq!(table.number, *number, "a table is listed by its number");
            assert!(*level < LEVELS_MAX, "a table is on a level that exists");
            assert!(number.0 < next_file_number, "no table has the next file number");
            assert!(table.largest_seqno <= self.largest_table_seqno, "the highest sequence number of all tables");
            assert!(!self.spilled.contains_key(number), "a table of a level is not a spilled table");
        }
        for (number, table) in self.spilled.iter().rev().take(CHECKED_TABLES_MAX) {
            assert_eq!(table.number, *number, "a spilled table is listed by its number");
            assert!(number.0 < next_file_number, "no spilled table has the next file number");
        }
        if let Some((number, file)) = self.blob_files.last_key_value() {
            assert_eq!(file.number, *number, "a blob file is listed by its number");
            assert!(number.0 < next_file_number, "no blob file has the next file number");
        }
        if let Some((start, fragment)) = self.range_tombstones.last_key_value() {
            assert_eq!(*start, encoded_start(&fragment.range.start), "a fragment is listed by its start");
        }
    }

    fn check_new(&self, table: FileNumber) -> Result<()> {
        let is_known = self.tables.contains_key(&table) || self.spilled.contains_key(&table);
        ensure(!is_known, || format!("the manifest adds table {} twice", table.0))
    }

    fn table(&mut self, table: FileNumber) -> Result<&mut (u8, TableMeta)> {
        self.tables.get_mut(&table).ok_or_else(|| no_table(table))
    }

    /// The WAL was durable through this sequence number before the manifest had its state of this partition.
    pub(crate) fn durable_seqno(&self) -> SeqNo {
        self.largest_table_seqno.max(self.permanent())
    }

    fn raise_table_seqno(&mut self, seqno: SeqNo) {
        self.largest_table_seqno = self.largest_table_seqno.max(seqno);
    }

    /// The edit that keeps [`durable_seqno`](Self::durable_seqno) if the edits of the tables do not imply it.
    fn wal_durable_edit(&self) -> Option<PartitionEdit> {
        let tables = self.tables.values().map(|(_, table)| table.largest_seqno);
        let through = self.largest_table_seqno;
        (through > tables.max().unwrap_or_default()).then_some(PartitionEdit::WalDurable { through })
    }

    /// The shortest list of edits that builds the state of a new partition.
    fn edits(&self) -> Vec<PartitionEdit> {
        let operator = self.merge_operator.clone();
        let mut edits: Vec<_> = operator.map(|name| PartitionEdit::MergeOperator { name }).into_iter().collect();
        edits.push(PartitionEdit::Flushed { through: self.flushed_seqno });
        edits.extend(self.pool_file_id.map(|file_id| PartitionEdit::PoolFileId { file_id }));
        edits.extend(self.uses_expiry.then_some(PartitionEdit::ExpiryUsed));
        edits.extend(self.blob_files.values().map(|file| PartitionEdit::BlobFileAdded { file: file.clone() }));
        for (level, table) in self.tables.values() {
            edits.push(PartitionEdit::TableAdded { level: *level, table: table.clone() });
            edits.extend(table.detail_edits());
        }
        if !self.range_tombstones.is_empty() {
            let added = self.range_tombstones.values().cloned().collect();
            edits.push(PartitionEdit::RangeTombstones { removed: Vec::new(), added });
        }
        edits.extend(self.wal_durable_edit());
        edits.extend(self.spilled.values().map(|table| PartitionEdit::TableSpilled { table: table.clone() }));
        edits
    }

    /// The tables of all levels, and the spilled tables.
    pub(crate) fn all_tables(&self) -> impl Iterator<Item = &TableMeta> {
        self.tables.values().map(|(_, table)| table).chain(self.spilled.values())
    }

    /// All records of the partition through this sequence number are in permanent files, so the WAL is not needed for
    /// them.
    pub(crate) fn permanent(&self) -> SeqNo {
        let spilled = self.spilled.values().map(|table| table.largest_seqno);
        spilled.max().unwrap_or_default().max(self.flushed_seqno)
    }

    /// Whether a blob file contains the values of this logical one.
    pub(crate) fn has_logical_blob_file(&self, logical: FileNumber) -> bool {
        let mut sections = self.blob_files.values().flat_map(|file| &file.sections);
        sections.any(|section| section.logical_file == logical)
    }
}

impl ManifestState {
    /// Panics if the numbers of the database or these partitions, which were changed, contradict each other. Called in
    /// builds with debug assertions after each batch of edits.
    pub(crate) fn check_invariants(&self, changed: impl IntoIterator<Item = PartitionId>) {
        if let Some((id, _)) = self.partitions.last_key_value() {
            assert!(id.0 < self.next_partition_id, "the next partition id is not used");
        }
        if let Some((epoch, file)) = self.wal_segments.last_key_value() {
            assert!(epoch.0 < self.next_wal_epoch, "the next epoch is not used");
            assert!(file.0 < self.next_file_number, "no WAL segment has the next file number");
        }
        for id in changed {
            if let Some(partition) = self.partitions.get(&id) {
                assert_eq!(partition.meta.id, id, "a partition is listed by its id");
                partition.check_invariants(self.next_file_number);
            }
        }
    }

    /// The WAL was durable through this sequence number before the manifest had its state of the partitions.
    pub(crate) fn durable_seqno(&self) -> SeqNo {
        self.partitions
            .values()
            .map(PartitionManifestState::durable_seqno)
            .max()
            .unwrap_or_default()
            .max(self.all_flushed)
    }

    /// According to the manifest, all records of all partitions through this sequence number are in permanent files.
    pub(crate) fn flushed_by_all(&self) -> SeqNo {
        let least = self.partitions.values().map(PartitionManifestState::permanent).min();
        least.unwrap_or_default().max(self.all_flushed)
    }

    /// This database created no file with this number or a higher one. Such files are not touched, and are ignored
    /// when new numbers are assigned.
    pub(crate) fn file_number_limit(&self) -> u64 {
        self.next_file_number + UNRECORDED_NUMBERS_MAX
    }

    /// The same for partition ids in the names of pool files.
    pub(crate) fn partition_id_limit(&self) -> u64 {
        self.next_partition_id + UNRECORDED_NUMBERS_MAX
    }

    /// Applies all batches of a manifest, in order.
    ///
    /// # Errors
    /// `Corruption` if an edit contradicts an earlier one, or the first edit does not create the database.
    pub(crate) fn replay(edits: &[VersionEdit]) -> Result<ManifestState> {
        if !matches!(edits.first(), Some(VersionEdit::Database { .. })) {
            return Err(Error::corruption("the manifest does not start with the edit that creates the database"));
        }
        let mut manifest_state = ManifestState::default();
        for edit in edits {
            manifest_state.apply(edit)?;
        }
        Ok(manifest_state)
    }

    /// Checks that these edits can be applied one after the other. Changes nothing.
    ///
    /// # Errors
    /// `Corruption` if an edit contradicts the state or an earlier edit.
    pub(crate) fn check_all(&self, edits: &[VersionEdit]) -> Result<()> {
        let mut changed = self.part_named_by(edits);
        edits.iter().try_for_each(|edit| changed.apply(edit))
    }

    /// The part of the state that decides whether the edits can be applied: the partitions that they name, each only
    /// with the tables and blob files that they name.
    fn part_named_by(&self, edits: &[VersionEdit]) -> ManifestState {
        let mut part = ManifestState::default();
        for edit in edits {
            let (id, table, blob_file) = match edit {
                VersionEdit::PartitionCreated(meta) => (&meta.id, None, None),
                VersionEdit::Partition { id, edit } => (id, edit.table(), edit.blob_file()),
                _ => continue,
            };
            let Some(known) = self.partitions.get(id) else { continue };
            let named = part.partitions.entry(*id).or_insert_with(|| PartitionManifestState {
                merge_operator: known.merge_operator.clone(),
                ..PartitionManifestState::new(known.meta.clone())
            });
            if let Some(number) = table {
                named.tables.extend(known.tables.get(&number).map(|table| (number, table.clone())));
                named.spilled.extend(known.spilled.get(&number).map(|table| (number, table.clone())));
            }
            if let Some(number) = blob_file {
                named.blob_files.extend(known.blob_files.get(&number).map(|file| (number, file.clone())));
            }
            if matches!(edit, VersionEdit::Partition { edit: PartitionEdit::RangeTombstones { .. }, .. }) {
                named.range_tombstones.clone_from(&known.range_tombstones);
            }
        }
        part
    }

    /// Returns `Corruption` and changes nothing if the edit contradicts the state.
    pub(crate) fn apply(&mut self, edit: &VersionEdit) -> Result<()> {
        check_numbers(edit)?;
        match edit {
            VersionEdit::Database { id, instance, hash_seed, created_ms } => {
                (self.id, self.instance, self.hash_seed, self.created_ms) = (*id, *instance, *hash_seed, *created_ms);
            }
            VersionEdit::DatabaseSettings { settings } => self.settings.clone_from(settings),
            VersionEdit::PartitionCreated(meta) => {
                ensure(!self.partitions.contains_key(&meta.id), || {
                    format!("the manifest creates partition {} twice", meta.id.0)
                })?;
                self.next_partition_id = self.next_partition_id.max(meta.id.0 + 1);
                self.partitions.insert(meta.id, PartitionManifestState::new(meta.clone()));
            }
            VersionEdit::Partition { id, edit } => {
                let no_partition = || format!("the manifest refers to partition {}, which does not exist", id.0);
                let partition = self.partitions.get_mut(id).ok_or_else(|| Error::corruption(no_partition()))?;
                partition.apply(edit)?;
                if *edit == PartitionEdit::Dropped {
                    self.partitions.remove(id);
                }
                self.next_file_number = self.next_file_number.max(edit.added_file().map_or(0, |file| file.0 + 1));
            }
            VersionEdit::AllFlushed { through } => self.all_flushed = self.all_flushed.max(*through),
            VersionEdit::WalSegmentAdded { epoch, file } => {
                self.raise_next_numbers(file.0 + 1, 0, epoch.0 + 1);
                self.wal_segments.insert(*epoch, *file);
            }
            VersionEdit::WalSegmentRemoved { epoch } => _ = self.wal_segments.remove(epoch),
            VersionEdit::WalEnd { epoch, seqno } => self.set_wal_end(*epoch, *seqno),
            VersionEdit::NextNumbers { file, partition, epoch } => {
                self.raise_next_numbers(file.0, partition.0, epoch.0);
            }
        }
        Ok(())
    }

    /// Records a new end of the WAL, and keeps the one before if it says more than the new one.
    pub(crate) fn set_wal_end(&mut self, epoch: WalEpoch, seqno: SeqNo) {
        self.earlier_wal_ends.extend(self.wal_end.replace((epoch, seqno)));
        let is_needless = |(before, end): &(WalEpoch, SeqNo)| (*end >= seqno && *end < FORGOTTEN) || *before >= epoch;
        while self.earlier_wal_ends.back().is_some_and(is_needless) {
            self.earlier_wal_ends.pop_back();
        }
        if self.earlier_wal_ends.len() > EARLIER_WAL_ENDS_MAX {
            self.earlier_wal_ends.pop_front();
            self.earlier_wal_ends[0].1 = FORGOTTEN;
        }
    }

    /// The epoch of positions of changes: above that of the recorded end of the WAL. Every open records an end with a
    /// higher epoch before it begins a segment, so that positions of two opens have different epochs, also if power
    /// loss has removed all segments of the first one.
    pub(crate) fn position_epoch(&self) -> WalEpoch {
        WalEpoch(self.wal_end.map_or(0, |(epoch, _)| epoch.0).saturating_add(1))
    }

    /// Makes every position up to now stale, because commits were lost that such a position precedes. The same for
    /// followers, which have read segments up to `highest`, the highest epoch of the WAL: segments get epochs above
    /// that of the positions of their open. Returns the highest epoch that is stale now; the caller then records the
    /// end of the WAL with a higher one.
    pub(crate) fn forget_positions(&mut self, highest: WalEpoch) -> WalEpoch {
        let epoch = self.position_epoch().max(highest);
        self.wal_end = None;
        self.earlier_wal_ends = VecDeque::from([(epoch, ALL_LOST)]);
        epoch
    }

    /// The last sequence number that is valid of those up to a position of `epoch`, if an end of the WAL was recorded
    /// since.
    ///
    /// # Errors
    /// `Stale` if no such number is valid, or if the first one that was recorded since is forgotten.
    pub(crate) fn end_of_epoch(&self, epoch: WalEpoch) -> Result<Option<SeqNo>> {
        if self.forgotten_ends().is_some_and(|forgotten| epoch <= forgotten) {
            return Err(Error::stale("the position is older than the recorded ends of the log"));
        }
        self.end_of_segment(epoch)
    }

    /// A sequence number at or above the last one that is valid in segments of `epoch`, if an end of the WAL was
    /// recorded since.
    ///
    /// # Errors
    /// `Stale` if a recovery since has lost commits in the middle.
    pub(crate) fn end_of_segment(&self, epoch: WalEpoch) -> Result<Option<SeqNo>> {
        match self.wal_ends().find(|(end, _)| *end >= epoch) {
            Some((_, None)) => Err(Error::stale("a recovery has lost commits in the middle of the log")),
            end => Ok(end.and_then(|(_, seqno)| seqno)),
        }
    }

    /// The highest epoch of the ends of the WAL that were recorded and are not known any more.
    pub(crate) fn forgotten_ends(&self) -> Option<WalEpoch> {
        self.earlier_wal_ends.front().filter(|(_, end)| *end == FORGOTTEN).map(|(epoch, _)| *epoch)
    }

    /// All recorded ends of the WAL that are known, oldest first, with `None` for [`ALL_LOST`].
    pub(crate) fn wal_ends(&self) -> impl Iterator<Item = (WalEpoch, Option<SeqNo>)> {
        let ends = self.earlier_wal_ends.iter().copied().chain(self.wal_end);
        let known = ends.filter(|(_, end)| *end != FORGOTTEN);
        known.map(|(epoch, end)| (epoch, (end != ALL_LOST).then_some(end)))
    }

    /// Makes sure that no new file, partition or segment gets a number below these.
    pub(crate) fn raise_next_numbers(&mut self, file: u64, partition: u64, epoch: u32) {
        self.next_file_number = self.next_file_number.max(file);
        self.next_partition_id = self.next_partition_id.max(partition);
        self.next_wal_epoch = self.next_wal_epoch.max(epoch);
    }

    /// The shortest list of edits that builds this state.
    pub(crate) fn edits(&self) -> Vec<VersionEdit> {
        let mut edits = vec![
            VersionEdit::Database {
                id: self.id,
                instance: self.instance,
                hash_seed: self.hash_seed,
                created_ms: self.created_ms,
            },
            VersionEdit::NextNumbers {
                file: FileNumber(self.next_file_number),
                partition: PartitionId(self.next_partition_id),
                epoch: WalEpoch(self.next_wal_epoch),
            },
        ];
        if !self.settings.is_empty() {
            edits.push(VersionEdit::DatabaseSettings { settings: self.settings.clone() });
        }
        for (id, partition) in &self.partitions {
            edits.push(VersionEdit::PartitionCreated(partition.meta.clone()));
            edits.extend(partition.edits().into_iter().map(|edit| edit.of(*id)));
        }
        edits.extend(
            self.wal_segments.iter().map(|(epoch, file)| VersionEdit::WalSegmentAdded { epoch: *epoch, file: *file }),
        );
        if self.all_flushed > SeqNo::ZERO {
            edits.push(VersionEdit::AllFlushed { through: self.all_flushed });
        }
        let wal_ends = self.earlier_wal_ends.iter().copied().chain(self.wal_end);
        edits.extend(wal_ends.map(|(epoch, seqno)| VersionEdit::WalEnd { epoch, seqno }));
        edits
    }
}

fn encoded_start(start: &KeyBoundary) -> Vec<u8> {
    let mut encoded = Vec::new();
    start.encode_start(&mut encoded);
    encoded
}

/// Returns `Corruption` if a fragment is removed that does not exist, or one is added that exists.
fn check_range_tombstones(
    known: &BTreeMap<Vec<u8>, RangeTombstone>,
    removed: &[KeyBoundary],
    added: &[RangeTombstone],
) -> Result<()> {
    let removed: BTreeSet<Vec<u8>> = removed.iter().map(encoded_start).collect();
    if !removed.iter().all(|start| known.contains_key(start)) {
        return Err(Error::corruption("the manifest removes a range tombstone that it never added"));
    }
    let mut seen = BTreeSet::new();
    for start in added.iter().map(|fragment| encoded_start(&fragment.range.start)) {
        if (known.contains_key(&start) && !removed.contains(&start)) || !seen.insert(start) {
            return Err(Error::corruption("the manifest adds two range tombstones with one start"));
        }
    }
    Ok(())
}

fn check_level(table: FileNumber, level: u8) -> Result<()> {
    ensure(level < LEVELS_MAX, || format!("table {} is on level {level}", table.0))
}

fn no_table(table: FileNumber) -> Error {
    Error::corruption(format!("the manifest refers to table {}, which it never added", table.0))
}

/// # Errors
/// `Corruption` with this message unless `holds`.
fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::corruption(message())) }
}

/// Returns `Corruption` if the edit uses a number at or above [`NUMBER_LIMIT`], or names something by a number that has
/// few successors below it.
fn check_numbers(edit: &VersionEdit) -> Result<()> {
    let (number, epoch) = match edit {
        VersionEdit::PartitionCreated(meta) => (meta.id.0, WalEpoch(0)),
        VersionEdit::Partition { edit, .. } => {
            let sections = if let PartitionEdit::BlobFileAdded { file } = edit { &*file.sections } else { &[] };
            let logical = sections.iter().map(|section| section.logical_file);
            (logical.chain(edit.added_file()).max().unwrap_or_default().0, WalEpoch(0))
        }
        VersionEdit::WalSegmentAdded { epoch, file } => (file.0, *epoch),
        VersionEdit::WalEnd { epoch, .. } => (0, *epoch),
        VersionEdit::NextNumbers { file, partition, epoch } => (file.0.max(partition.0), *epoch),
        _ => return Ok(()),
    };
    let is_next = matches!(edit, VersionEdit::NextNumbers { .. });
    if number >= if is_next { NUMBER_LIMIT } else { NUMBER_LIMIT - UNRECORDED_NUMBERS_MAX } {
        return Err(Error::corruption(format!("the manifest contains the number {number}, which is above the limit")));
    }
    if epoch == WalEpoch(u32::MAX) {
        return Err(Error::corruption("the manifest contains a WAL epoch above the limit"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::version_edit::ExpiryTimes;

    fn partition(id: u64) -> VersionEdit {
        VersionEdit::PartitionCreated(PartitionMeta {
            id: PartitionId(id),
            engine: 0,
            name: format!("p{id}"),
            comparator: "c".into(),
            settings: vec![1],
        })
    }

    fn table(partition: u64, id: u64, level: u8) -> VersionEdit {
        let table = TableMeta {
            number: FileNumber(id),
            size: 9,
            entries: 1,
            tombstones: 0,
            smallest_seqno: SeqNo(1),
            largest_seqno: SeqNo(1),
            created_ms: 0,
            raw_bytes: 2,
            smallest_key: (b"a".to_vec(), SeqNo(1)),
            largest_key: (b"a".to_vec(), SeqNo(1)),
            blob_usage: Vec::new(),
            range_deletes_applied_through: SeqNo::ZERO,
            expiry: ExpiryTimes::default(),
            global_seqno: None,
        };
        PartitionEdit::TableAdded { level, table }.of(PartitionId(partition))
    }

    fn spilled(partition: u64, id: u64, highest: u64) -> VersionEdit {
        let VersionEdit::Partition { id: partition, edit: PartitionEdit::TableAdded { table, .. } } =
            table(partition, id, 0)
        else {
            unreachable!()
        };
        PartitionEdit::TableSpilled { table: TableMeta { largest_seqno: SeqNo(highest), ..table } }.of(partition)
    }

    #[test]
    fn ends_of_epochs_are_those_recorded_next() {
        let mut state = ManifestState::default();
        assert_eq!(state.end_of_epoch(WalEpoch(1)).unwrap(), None);
        for (epoch, end) in [(2, 10), (4, 10), (5, 30), (9, 20), (9, 25)] {
            state.set_wal_end(WalEpoch(epoch), SeqNo(end));
        }
        let end = |state: &ManifestState, epoch| state.end_of_epoch(WalEpoch(epoch)).unwrap().map(|seqno| seqno.0);
        assert_eq!([1, 2, 3, 4].map(|epoch| end(&state, epoch)), [Some(10); 4], "the later of two equal ends is kept");
        assert_eq!([5, 9, 10].map(|epoch| end(&state, epoch)), [Some(25), Some(25), None], "30 was abandoned");
        assert_eq!(state.position_epoch(), WalEpoch(10));
        let mut of_followers = state.clone();
        assert_eq!(state.forget_positions(WalEpoch(9)), WalEpoch(10));
        state.set_wal_end(WalEpoch(12), SeqNo(40));
        assert_eq!([11, 12, 13].map(|epoch| end(&state, epoch)), [Some(40), Some(40), None]);
        let is_stale = |state: &ManifestState, epoch| {
            state.end_of_epoch(WalEpoch(epoch)).is_err_and(|error| error.kind() == crate::base::ErrorKind::Stale)
        };
        assert!([4, 10].iter().all(|epoch| is_stale(&state, *epoch)), "also the position before the first commit");
        assert_eq!(
            of_followers.forget_positions(WalEpoch(14)),
            WalEpoch(14),
            "segments of the open have higher epochs"
        );
        of_followers.set_wal_end(WalEpoch(15), SeqNo(40));
        assert!([10, 11, 14].iter().all(|epoch| is_stale(&of_followers, *epoch)));
        assert_eq!(end(&of_followers, 15), Some(40));
        for n in 0..200 {
            state.set_wal_end(WalEpoch(20 + n), SeqNo(50 + u64::from(n)));
        }
        let forgotten = state.earlier_wal_ends[0].0.0;
        assert!([20, forgotten].iter().all(|epoch| is_stale(&state, *epoch)));
        assert_eq!(
            [forgotten + 1, 218, 219, 220].map(|epoch| end(&state, epoch)),
            [Some(u64::from(forgotten) + 31), Some(248), Some(249), None]
        );
        // Regression: a loss removed ends, and positions of forgotten epochs were taken for valid ones.
        let kept = u64::from(forgotten) + 33;
        state.set_wal_end(WalEpoch(220), SeqNo(kept));
        assert!([20, forgotten].iter().all(|epoch| is_stale(&state, *epoch)));
        assert_eq!([forgotten + 1, 219, 220].map(|epoch| end(&state, epoch)), [Some(kept - 2), Some(kept), Some(kept)]);
        assert_eq!(state.end_of_segment(WalEpoch(20)).unwrap(), Some(SeqNo(kept - 2)));
    }

    #[test]
    fn manifest_state_round_trips_through_edits() {
        let times = ExpiryTimes { entries: 1, lowest_ms: 5, highest_ms: 5 };
        let edits = [
            VersionEdit::Database { id: [1; 16], instance: [2; 16], hash_seed: 3, created_ms: 4 },
            partition(1),
            partition(2),
            table(1, 7, 0),
            table(1, 8, 0),
            table(2, 9, 1),
            PartitionEdit::TableMoved { table: FileNumber(8), level: 3 }.of(PartitionId(1)),
            PartitionEdit::TableRemoved { table: FileNumber(7) }.of(PartitionId(1)),
            PartitionEdit::Flushed { through: SeqNo(50) }.of(PartitionId(1)),
            PartitionEdit::Flushed { through: SeqNo(40) }.of(PartitionId(1)),
            VersionEdit::AllFlushed { through: SeqNo(60) },
            VersionEdit::AllFlushed { through: SeqNo(55) },
            VersionEdit::WalSegmentAdded { epoch: WalEpoch(1), file: FileNumber(20) },
            VersionEdit::WalSegmentAdded { epoch: WalEpoch(2), file: FileNumber(21) },
            VersionEdit::WalSegmentRemoved { epoch: WalEpoch(1) },
            VersionEdit::WalEnd { epoch: WalEpoch(1), seqno: SeqNo(12) },
            PartitionEdit::PoolFileId { file_id: [7; 16] }.of(PartitionId(1)),
            PartitionEdit::ExpiryUsed.of(PartitionId(1)),
            PartitionEdit::TableExpiry { table: FileNumber(8), times }.of(PartitionId(1)),
            PartitionEdit::Dropped.of(PartitionId(2)),
            partition(3),
            spilled(3, 30, 70),
            spilled(3, 31, 90),
            PartitionEdit::Flushed { through: SeqNo(70) }.of(PartitionId(3)),
        ];
        let manifest_state = ManifestState::replay(&edits).unwrap();
        let third = &manifest_state.partitions[&PartitionId(3)];
        assert_eq!(third.spilled.keys().collect::<Vec<_>>(), [&FileNumber(31)], "one is flushed");
        assert_eq!((third.flushed_seqno, third.permanent(), third.durable_seqno()), (SeqNo(70), SeqNo(90), SeqNo(90)));
        assert_eq!(
            (manifest_state.next_file_number, manifest_state.next_partition_id, manifest_state.next_wal_epoch),
            (32, 4, 3)
        );
        assert_eq!(manifest_state.partitions[&PartitionId(1)].flushed_seqno, SeqNo(50), "it never decreases");
        assert_eq!((manifest_state.flushed_by_all(), manifest_state.durable_seqno()), (SeqNo(60), SeqNo(90)));
        assert_eq!(manifest_state.partitions[&PartitionId(1)].tables[&FileNumber(8)].0, 3);
        assert_eq!(manifest_state.partitions[&PartitionId(1)].tables[&FileNumber(8)].1.expiry, times);
        assert!(manifest_state.partitions[&PartitionId(1)].uses_expiry && !third.uses_expiry);
        assert_eq!(ManifestState::replay(&manifest_state.edits()).unwrap(), manifest_state);
    }

    /// Regression: a compaction rewrote an ingested table with sequence number 0. After that, recovery accepted a WAL
    /// that had lost its end, without commits that are older than the ingest.
    #[test]
    fn durable_seqno_outlives_its_table() {
        let database = VersionEdit::Database { id: [1; 16], instance: [2; 16], hash_seed: 3, created_ms: 4 };
        let VersionEdit::Partition { id, edit: PartitionEdit::TableAdded { table: meta, .. } } = table(1, 7, 6) else {
            unreachable!()
        };
        let ingested = PartitionEdit::TableAdded { level: 0, table: meta.with_global_seqno(SeqNo(40)) }.of(id);
        let removed = PartitionEdit::TableRemoved { table: FileNumber(7) }.of(id);
        let manifest_state =
            ManifestState::replay(&[database, partition(1), ingested, removed, table(1, 8, 6)]).unwrap();
        assert_eq!(manifest_state.partitions[&id].durable_seqno(), SeqNo(40));
        assert_eq!(ManifestState::replay(&manifest_state.edits()).unwrap(), manifest_state);
    }

    #[test]
    fn contradicting_edit_fails_and_changes_nothing() {
        let database = VersionEdit::Database { id: [1; 16], instance: [2; 16], hash_seed: 3, created_ms: 4 };
        assert_eq!(ManifestState::replay(&[partition(1)]).unwrap_err().kind(), ErrorKind::Corruption);
        let mut manifest_state = ManifestState::replay(&[database, partition(1), table(1, 7, 0)]).unwrap();
        let before = manifest_state.clone();
        for bad in [
            partition(1),
            table(1, 7, 1),
            table(2, 8, 1),
            spilled(1, 7, 1),
            spilled(2, 8, 1),
            spilled(1, NUMBER_LIMIT, 1),
            // Regression: it was applied, and the next manifest contained the next number, which is refused.
            spilled(1, NUMBER_LIMIT - 1, 1),
            table(1, 9, 64),
            PartitionEdit::TableRemoved { table: FileNumber(8) }.of(PartitionId(1)),
            PartitionEdit::TableMoved { table: FileNumber(7), level: 1 }.of(PartitionId(3)),
            // Regression: it was applied, and the next manifest contained a table on this level, which is refused.
            PartitionEdit::TableMoved { table: FileNumber(7), level: 64 }.of(PartitionId(1)),
            PartitionEdit::Dropped.of(PartitionId(3)),
            PartitionEdit::ExpiryUsed.of(PartitionId(3)),
            PartitionEdit::TableExpiry {
                table: FileNumber(8),
                times: ExpiryTimes { entries: 1, lowest_ms: 5, highest_ms: 5 },
            }
            .of(PartitionId(1)),
        ] {
            assert_eq!(manifest_state.apply(&bad).unwrap_err().kind(), ErrorKind::Corruption);
            assert_eq!(manifest_state, before);
        }
    }
}
