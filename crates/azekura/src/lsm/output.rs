//! Writing tables and blob files: cutting, syncing, and cleaning up what fails.

use std::sync::Arc;

use crate::base::edit::{BlobMeta, TableMeta};
use crate::base::{EntryRef, KeyOrder, Result};
use crate::lsm::blobs::options::KvSeparationOptions;
use crate::lsm::blobs::separator::Separator;
use crate::lsm::handle::TreeContext;
use crate::lsm::written::{NewFile, Unnamed};
use crate::table::options::TableOptions;
use crate::table::writer::TableWriter;
use crate::vfs::files::DataKind;

/// How tables are cut and built.
pub(crate) struct OutputPlan {
    pub(crate) options: TableOptions,
    /// A table is cut at the first new user key behind this many bytes.
    pub(crate) table_size: u64,
    pub(crate) created_ms: u64,
    /// Smallest keys of the tables that stay in the level written to, ascending: no output reaches over one.
    pub(crate) neighbours: Vec<Vec<u8>>,
    /// How values are kept apart; `None` leaves each where it stands.
    pub(crate) separation: Option<KvSeparationOptions>,
}

/// What was written, durable under its names.
pub(crate) struct Finished {
    pub(crate) tables: Vec<TableMeta>,
    pub(crate) blobs: Vec<BlobMeta>,
    pub(crate) unnamed: Unnamed,
}

/// A row of tables being written, and blob files beside. No user key is in two of the tables.
pub(crate) struct Output {
    context: Arc<TreeContext>,
    plan: OutputPlan,
    /// The first of `plan.neighbours` that is behind the last key.
    neighbour: usize,
    writer: Option<(NewFile, TableWriter)>,
    done: Vec<TableMeta>,
    separator: Option<Separator>,
    unnamed: Unnamed,
}

impl Output {
    pub(crate) fn new(context: Arc<TreeContext>, plan: OutputPlan) -> Output {
        let unnamed = Unnamed::new(Arc::clone(&context));
        let separator = plan.separation.clone().map(|options| Separator::new(options, plan.created_ms));
        Output { context, plan, neighbour: 0, writer: None, done: Vec::new(), separator, unnamed }
    }

    /// Adds an entry in internal order; `new_key` says that its user key is not that of the entry before.
    pub(crate) fn add(&mut self, entry: EntryRef<'_>, new_key: bool) -> Result<()> {
        if new_key {
            let behind = pass(&self.plan.neighbours, &mut self.neighbour, entry.user, &self.context.order);
            let full = self.writer.as_ref().is_some_and(|(_, w)| w.written_bytes() >= self.plan.table_size);
            if behind || full {
                self.cut()?;
            }
        }
        if self.writer.is_none() {
            self.writer = Some(self.begin()?);
        }
        let (_, writer) = self.writer.as_mut().expect("it was just made");
        match &mut self.separator {
            Some(separator) if separator.takes(&entry) => writer.add(separator.put(entry, &mut self.unnamed)?),
            _ => writer.add(entry),
        }
    }

    fn begin(&mut self) -> Result<(NewFile, TableWriter)> {
        let new = self.unnamed.create(DataKind::Table)?;
        let (order, seed) = (self.context.order.clone(), self.context.hash_seed);
        let (options, file) = (self.plan.options.clone(), Arc::clone(&new.file));
        let writer = TableWriter::create(file, new.file_id, options, order, seed, self.plan.created_ms)?;
        Ok((new, writer))
    }

    /// Ends the table being written, if there is one, and makes its bytes durable.
    fn cut(&mut self) -> Result<()> {
        if let Some((new, writer)) = self.writer.take() {
            self.done.push(new.end(|id| writer.finish(id))?);
        }
        Ok(())
    }

    /// Ends the last files and makes all names durable.
    pub(crate) fn finish(mut self) -> Result<Finished> {
        self.cut()?;
        let blobs = self.separator.take().map_or_else(|| Ok(Vec::new()), Separator::finish)?;
        if !self.done.is_empty() {
            self.unnamed.sync_names()?;
        }
        Ok(Finished { tables: self.done, blobs, unnamed: self.unnamed })
    }
}

/// Moves `at` behind every fence that is not behind `key`; whether it passed one.
fn pass(fences: &[Vec<u8>], at: &mut usize, key: &[u8], order: &KeyOrder) -> bool {
    let from = *at;
    while fences.get(*at).is_some_and(|fence| order.cmp(fence, key).is_le()) {
        *at += 1;
    }
    *at > from
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passing_a_fence_is_told_once() {
        let fences = [b"c".to_vec(), b"e".to_vec(), b"f".to_vec()];
        let mut at = 0;
        let order = KeyOrder::bytewise();
        let passed: Vec<bool> =
            ["a", "b", "d", "dd", "g", "h"].iter().map(|k| pass(&fences, &mut at, k.as_bytes(), &order)).collect();
        assert_eq!(passed, [false, false, true, false, true, false]);
    }
}
