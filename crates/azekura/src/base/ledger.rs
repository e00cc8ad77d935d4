//! What all edits of the manifest add up to.
//!
//! The ledger is a pure value: replaying the manifest builds it, every batch of edits changes it, and writing the
//! manifest anew writes it out. It knows files and names only; the trees know what is in them.

use std::collections::BTreeMap;

use crate::base::edit::{BlobMeta, Edit, Epoch, FileId, PartitionId, PartitionMeta, TableMeta};
use crate::base::{Error, Result, SeqNo};

/// A partition as the manifest knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartitionLedger {
    pub(crate) meta: PartitionMeta,
    pub(crate) tables: BTreeMap<FileId, (u8, TableMeta)>,
    pub(crate) blobs: BTreeMap<FileId, BlobMeta>,
    pub(crate) flushed: SeqNo,
    /// Tables of [`Edit::TableSpilled`] that have records above `flushed`.
    pub(crate) spilled: BTreeMap<FileId, TableMeta>,
    /// Of a pool, once that is known.
    pub(crate) pool_file_id: Option<[u8; 16]>,
}

/// The database as the manifest knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    pub(crate) id: [u8; 16],
    pub(crate) instance: [u8; 16],
    pub(crate) hash_seed: u64,
    pub(crate) created_ms: u64,
    pub(crate) partitions: BTreeMap<PartitionId, PartitionLedger>,
    pub(crate) segments: BTreeMap<Epoch, FileId>,
    pub(crate) log_end: Option<(Epoch, SeqNo)>,
    /// What [`Edit::AllFlushed`] says.
    pub(crate) all_flushed: SeqNo,
    /// Numbers below these were used.
    pub(crate) next_file: u64,
    pub(crate) next_partition: u64,
    pub(crate) next_epoch: u32,
}

/// No number that the manifest names is as high as this one, so that there is always a next one.
const NUMBERS_END: u64 = 1 << 62;
/// Numbers that can be in use beyond those that the manifest knows: of files that were being written.
const UNKNOWN_NUMBERS_MAX: u64 = 1 << 32;

impl PartitionLedger {
    /// The log was durable up to here before the manifest said what it says of this partition.
    pub(crate) fn durable(&self) -> SeqNo {
        let tables = self.tables.values().map(|(_, table)| table.highest);
        tables.max().unwrap_or_default().max(self.permanent())
    }

    /// The log is not needed for records of the partition up to here.
    pub(crate) fn permanent(&self) -> SeqNo {
        let spilled = self.spilled.values().map(|table| table.highest);
        spilled.max().unwrap_or_default().max(self.flushed)
    }
}

impl Ledger {
    /// The log was durable up to here before the manifest said what it says of the partitions.
    pub(crate) fn durable(&self) -> SeqNo {
        self.partitions.values().map(PartitionLedger::durable).max().unwrap_or_default().max(self.all_flushed)
    }

    /// Every record of every partition up to here is in permanent files, as far as the manifest says.
    pub(crate) fn flushed_by_all(&self) -> SeqNo {
        let least = self.partitions.values().map(PartitionLedger::permanent).min();
        least.unwrap_or_default().max(self.all_flushed)
    }

    /// Files with this number or a higher one were not made by this database: they are left alone, and do not count
    /// when fresh numbers are chosen.
    pub(crate) fn files_end(&self) -> u64 {
        self.next_file + UNKNOWN_NUMBERS_MAX
    }

    /// The same for the numbers of partitions in the names of pools.
    pub(crate) fn partitions_end(&self) -> u64 {
        self.next_partition + UNKNOWN_NUMBERS_MAX
    }

    /// Adds up the batches of a manifest.
    ///
    /// # Errors
    /// `Corruption` if the edits contradict each other or the first is not the database's own.
    pub(crate) fn replay(edits: &[Edit]) -> Result<Ledger> {
        if !matches!(edits.first(), Some(Edit::Database { .. })) {
            return Err(Error::corruption("the manifest does not begin with the database's own entry"));
        }
        let mut ledger = Ledger::default();
        for edit in edits {
            ledger.apply(edit)?;
        }
        Ok(ledger)
    }

    /// Fails if the edit contradicts what is known; then nothing has changed.
    pub(crate) fn check(&self, edit: &Edit) -> Result<()> {
        check_numbers(edit)?;
        let known = |partition: &PartitionId| {
            self.partitions.get(partition).ok_or_else(|| {
                Error::corruption(format!("the manifest speaks of partition {}, which does not exist", partition.0))
            })
        };
        let is_new = |partition: &PartitionId, table: &FileId| {
            let known = known(partition)?;
            match known.tables.contains_key(table) || known.spilled.contains_key(table) {
                true => Err(Error::corruption(format!("the manifest adds table {} twice", table.0))),
                false => Ok(()),
            }
        };
        let has_table = |partition: &PartitionId, table: &FileId| match known(partition)?.tables.contains_key(table) {
            true => Ok(()),
            false => Err(Error::corruption(format!("the manifest speaks of table {}, which it never added", table.0))),
        };
        match edit {
            Edit::Database { .. }
            | Edit::SegmentAdded { .. }
            | Edit::SegmentRetired { .. }
            | Edit::LogEnd { .. }
            | Edit::AllFlushed { .. }
            | Edit::NextIds { .. } => Ok(()),
            Edit::PartitionCreated(meta) => match self.partitions.get(&meta.id) {
                Some(_) => Err(Error::corruption(format!("the manifest creates partition {} twice", meta.id.0))),
                None => Ok(()),
            },
            Edit::PartitionDropped { partition }
            | Edit::PartitionSettings { partition, .. }
            | Edit::Flushed { partition, .. }
            | Edit::PoolFileId { partition, .. } => known(partition).map(drop),
            Edit::TableAdded { partition, level, table } => {
                if *level >= 64 {
                    return Err(Error::corruption(format!("table {} stands on level {level}", table.id.0)));
                }
                is_new(partition, &table.id)
            }
            Edit::TableSpilled { partition, table } => is_new(partition, &table.id),
            Edit::TableRemoved { partition, table } | Edit::TableMoved { partition, table, .. } => {
                has_table(partition, table)
            }
            Edit::BlobFileAdded { partition, file } => match known(partition)?.blobs.contains_key(&file.id) {
                true => Err(Error::corruption(format!("the manifest adds blob file {} twice", file.id.0))),
                false => Ok(()),
            },
            Edit::BlobFileRemoved { partition, file } => match known(partition)?.blobs.contains_key(file) {
                true => Ok(()),
                false => {
                    Err(Error::corruption(format!("the manifest removes blob file {}, which it never added", file.0)))
                }
            },
        }
    }

    /// Takes the edit in.
    pub(crate) fn apply(&mut self, edit: &Edit) -> Result<()> {
        self.check(edit)?;
        match edit {
            Edit::Database { id, instance, hash_seed, created_ms } => {
                (self.id, self.instance, self.hash_seed, self.created_ms) = (*id, *instance, *hash_seed, *created_ms);
            }
            Edit::PartitionCreated(meta) => {
                self.next_partition = self.next_partition.max(meta.id.0 + 1);
                let (tables, blobs) = (BTreeMap::new(), BTreeMap::new());
                let (flushed, spilled, pool_file_id) = (SeqNo::ZERO, BTreeMap::new(), None);
                let fresh = PartitionLedger { meta: meta.clone(), tables, blobs, flushed, spilled, pool_file_id };
                self.partitions.insert(meta.id, fresh);
            }
            Edit::PartitionDropped { partition } => {
                self.partitions.remove(partition);
            }
            Edit::PartitionSettings { partition, settings } => {
                self.partition(*partition)?.meta.settings.clone_from(settings);
            }
            Edit::TableAdded { partition, level, table } => {
                self.next_file = self.next_file.max(table.id.0 + 1);
                self.partition(*partition)?.tables.insert(table.id, (*level, table.clone()));
            }
            Edit::TableRemoved { partition, table } => {
                self.partition(*partition)?.tables.remove(table);
            }
            Edit::BlobFileAdded { partition, file } => {
                self.next_file = self.next_file.max(file.id.0 + 1);
                self.partition(*partition)?.blobs.insert(file.id, file.clone());
            }
            Edit::BlobFileRemoved { partition, file } => {
                self.partition(*partition)?.blobs.remove(file);
            }
            Edit::TableMoved { partition, table, level } => {
                if let Some((at, _)) = self.partition(*partition)?.tables.get_mut(table) {
                    *at = *level;
                }
            }
            Edit::Flushed { partition, through } => {
                let partition = self.partition(*partition)?;
                partition.flushed = partition.flushed.max(*through);
                partition.spilled.retain(|_, table| table.highest > *through);
            }
            Edit::TableSpilled { partition, table } => {
                self.next_file = self.next_file.max(table.id.0 + 1);
                self.partition(*partition)?.spilled.insert(table.id, table.clone());
            }
            Edit::AllFlushed { through } => self.all_flushed = self.all_flushed.max(*through),
            Edit::PoolFileId { partition, file_id } => self.partition(*partition)?.pool_file_id = Some(*file_id),
            Edit::SegmentAdded { epoch, file } => {
                self.next_file = self.next_file.max(file.0 + 1);
                self.next_epoch = self.next_epoch.max(epoch.0 + 1);
                self.segments.insert(*epoch, *file);
            }
            Edit::SegmentRetired { epoch } => {
                self.segments.remove(epoch);
            }
            Edit::LogEnd { epoch, seqno } => self.log_end = Some((*epoch, *seqno)),
            Edit::NextIds { file, partition, epoch } => {
                self.next_file = self.next_file.max(file.0);
                self.next_partition = self.next_partition.max(partition.0);
                self.next_epoch = self.next_epoch.max(epoch.0);
            }
        }
        Ok(())
    }

    fn partition(&mut self, id: PartitionId) -> Result<&mut PartitionLedger> {
        self.partitions.get_mut(&id).ok_or_else(|| Error::corruption("edit of a partition that does not exist"))
    }

    /// The shortest list of edits that adds up to this ledger.
    pub(crate) fn edits(&self) -> Vec<Edit> {
        let mut edits = vec![
            Edit::Database {
                id: self.id,
                instance: self.instance,
                hash_seed: self.hash_seed,
                created_ms: self.created_ms,
            },
            Edit::NextIds {
                file: FileId(self.next_file),
                partition: PartitionId(self.next_partition),
                epoch: Epoch(self.next_epoch),
            },
        ];
        for (id, partition) in &self.partitions {
            edits.push(Edit::PartitionCreated(partition.meta.clone()));
            edits.push(Edit::Flushed { partition: *id, through: partition.flushed });
            edits.extend(partition.pool_file_id.map(|file_id| Edit::PoolFileId { partition: *id, file_id }));
            for file in partition.blobs.values() {
                edits.push(Edit::BlobFileAdded { partition: *id, file: file.clone() });
            }
            for (level, table) in partition.tables.values() {
                edits.push(Edit::TableAdded { partition: *id, level: *level, table: table.clone() });
            }
            for table in partition.spilled.values() {
                edits.push(Edit::TableSpilled { partition: *id, table: table.clone() });
            }
        }
        edits.extend(self.segments.iter().map(|(epoch, file)| Edit::SegmentAdded { epoch: *epoch, file: *file }));
        if self.all_flushed > SeqNo::ZERO {
            edits.push(Edit::AllFlushed { through: self.all_flushed });
        }
        edits.extend(self.log_end.map(|(epoch, seqno)| Edit::LogEnd { epoch, seqno }));
        edits
    }
}

/// Fails for numbers that have no next one: those that the edit says are used.
fn check_numbers(edit: &Edit) -> Result<()> {
    let (number, epoch) = match edit {
        Edit::PartitionCreated(meta) => (meta.id.0, Epoch(0)),
        Edit::TableAdded { table, .. } | Edit::TableSpilled { table, .. } => (table.id.0, Epoch(0)),
        Edit::BlobFileAdded { file, .. } => {
            let logical = file.sections.iter().map(|section| section.logical.0);
            (logical.chain([file.id.0]).max().unwrap_or_default(), Epoch(0))
        }
        Edit::SegmentAdded { epoch, file } => (file.0, *epoch),
        Edit::LogEnd { epoch, .. } => (0, *epoch),
        Edit::NextIds { file, partition, epoch } => (file.0.max(partition.0), *epoch),
        _ => return Ok(()),
    };
    if number >= NUMBERS_END {
        return Err(Error::corruption(format!("the manifest names {number}, which no file or partition has")));
    }
    if epoch == Epoch(u32::MAX) {
        return Err(Error::corruption("the manifest names a log segment behind the last possible one"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    fn partition(id: u64) -> Edit {
        Edit::PartitionCreated(PartitionMeta {
            id: PartitionId(id),
            engine: 0,
            name: format!("p{id}"),
            comparator: "c".into(),
            settings: vec![1],
        })
    }

    fn table(partition: u64, id: u64, level: u8) -> Edit {
        let table = TableMeta {
            id: FileId(id),
            size: 9,
            entries: 1,
            tombstones: 0,
            lowest: SeqNo(1),
            highest: SeqNo(1),
            created_ms: 0,
            raw_bytes: 2,
            smallest: (b"a".to_vec(), SeqNo(1)),
            largest: (b"a".to_vec(), SeqNo(1)),
            blobs: Vec::new(),
        };
        Edit::TableAdded { partition: PartitionId(partition), level, table }
    }

    fn spilled(partition: u64, id: u64, highest: u64) -> Edit {
        let Edit::TableAdded { partition, table, .. } = table(partition, id, 0) else { unreachable!() };
        Edit::TableSpilled { partition, table: TableMeta { highest: SeqNo(highest), ..table } }
    }

    #[test]
    fn a_ledger_written_out_adds_up_to_itself() {
        let edits = [
            Edit::Database { id: [1; 16], instance: [2; 16], hash_seed: 3, created_ms: 4 },
            partition(1),
            partition(2),
            table(1, 7, 0),
            table(1, 8, 0),
            table(2, 9, 1),
            Edit::TableMoved { partition: PartitionId(1), table: FileId(8), level: 3 },
            Edit::TableRemoved { partition: PartitionId(1), table: FileId(7) },
            Edit::Flushed { partition: PartitionId(1), through: SeqNo(50) },
            Edit::Flushed { partition: PartitionId(1), through: SeqNo(40) },
            Edit::AllFlushed { through: SeqNo(60) },
            Edit::AllFlushed { through: SeqNo(55) },
            Edit::SegmentAdded { epoch: Epoch(1), file: FileId(20) },
            Edit::SegmentAdded { epoch: Epoch(2), file: FileId(21) },
            Edit::SegmentRetired { epoch: Epoch(1) },
            Edit::LogEnd { epoch: Epoch(1), seqno: SeqNo(12) },
            Edit::PoolFileId { partition: PartitionId(1), file_id: [7; 16] },
            Edit::PartitionDropped { partition: PartitionId(2) },
            partition(3),
            spilled(3, 30, 70),
            spilled(3, 31, 90),
            Edit::Flushed { partition: PartitionId(3), through: SeqNo(70) },
        ];
        let ledger = Ledger::replay(&edits).unwrap();
        let third = &ledger.partitions[&PartitionId(3)];
        assert_eq!(third.spilled.keys().collect::<Vec<_>>(), [&FileId(31)], "one is flushed");
        assert_eq!((third.flushed, third.permanent(), third.durable()), (SeqNo(70), SeqNo(90), SeqNo(90)));
        assert_eq!((ledger.next_file, ledger.next_partition, ledger.next_epoch), (32, 4, 3));
        assert_eq!(ledger.partitions[&PartitionId(1)].flushed, SeqNo(50), "flushed never goes back");
        assert_eq!((ledger.flushed_by_all(), ledger.durable()), (SeqNo(60), SeqNo(90)));
        assert_eq!(ledger.partitions[&PartitionId(1)].tables[&FileId(8)].0, 3);
        assert_eq!(Ledger::replay(&ledger.edits()).unwrap(), ledger);
    }

    #[test]
    fn contradictions_are_corruption_and_change_nothing() {
        let database = Edit::Database { id: [1; 16], instance: [2; 16], hash_seed: 3, created_ms: 4 };
        assert_eq!(Ledger::replay(&[partition(1)]).unwrap_err().kind(), ErrorKind::Corruption);
        let mut ledger = Ledger::replay(&[database, partition(1), table(1, 7, 0)]).unwrap();
        let before = ledger.clone();
        for bad in [
            partition(1),
            table(1, 7, 1),
            table(2, 8, 1),
            spilled(1, 7, 1),
            spilled(2, 8, 1),
            spilled(1, NUMBERS_END, 1),
            table(1, 9, 64),
            Edit::TableRemoved { partition: PartitionId(1), table: FileId(8) },
            Edit::TableMoved { partition: PartitionId(3), table: FileId(7), level: 1 },
            Edit::PartitionDropped { partition: PartitionId(3) },
        ] {
            assert_eq!(ledger.apply(&bad).unwrap_err().kind(), ErrorKind::Corruption);
            assert_eq!(ledger, before);
        }
    }
}
