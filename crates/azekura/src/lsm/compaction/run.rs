//! Carrying a plan out.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::edit::{Edit, FileId};
use crate::base::{Result, SeqNo};
use crate::engine::{Host, TaskReport};
use crate::lsm::compaction::job::Job;
use crate::lsm::compaction::plan::Plan;
use crate::lsm::compaction::remembered::Remembered;
use crate::lsm::compaction::strategy::{choose, unclean_at_bottom};
use crate::lsm::compaction::view::View;
use crate::lsm::handle::TableHandle;
use crate::lsm::metrics::Counters;
use crate::lsm::options::LsmOptions;
use crate::lsm::slot::lock;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::version::{BOTTOM, Change, Described};

/// A merge looks up after this many bytes whether it should yield; tests have less to merge.
const STEP_BYTES: u64 = if cfg!(test) { 8 << 10 } else { 1 << 20 };

impl LsmTree {
    /// Does one compaction, or a part of one if the host wants it to yield. `forced` also waits while another runs.
    pub(crate) fn compact(&self, forced: bool, host: &dyn Host) -> Result<TaskReport> {
        Ok(self.compact_by(forced, host, |view| choose(view, forced))?.unwrap_or_default())
    }

    /// Does what `choose` says, or goes on with a compaction that has yielded; `None` if there is nothing to do, or if
    /// another runs and this is not to `wait`.
    pub(crate) fn compact_by(
        &self,
        wait: bool,
        host: &dyn Host,
        choose: impl FnOnce(&View<'_, TableHandle>) -> Option<Plan>,
    ) -> Result<Option<TaskReport>> {
        let Some(_occupied) = self.compacting.occupy(wait) else { return Ok(None) };
        self.check_open()?;
        let paused = lock(&self.remembered).paused.take();
        let mut job = match paused {
            Some(job) => job,
            None => {
                let points = host.read_points();
                let now = self.current.get();
                let Some(plan) = self.plan(&now, points.first().copied(), choose) else { return Ok(None) };
                if plan.moves {
                    return self.move_tables(&now, &plan, host).map(Some);
                }
                Job::new(&self.context, &self.options(), &now.version, plan, points, host.now_ms())
            }
        };
        while !job.step(STEP_BYTES)? {
            self.check_open()?;
            if host.should_yield() {
                let report = TaskReport { level: job.plan.to, ..TaskReport::default() };
                lock(&self.remembered).paused = Some(job);
                return Ok(Some(report));
            }
        }
        self.complete(job, host).map(Some)
    }

    /// Whether a task would find something to do.
    pub(crate) fn wants_compaction(&self, forced: bool) -> bool {
        let now = self.current.get();
        let options = self.options();
        let oldest = self.context.points.oldest();
        let mut remembered = lock(&self.remembered);
        remembered.oldest_point = remembered.oldest_point.max(oldest); // snapshots may be gone since the last task
        let wanted =
            remembered.paused.is_some() || choose(&self.compaction_view(&now, &options, &remembered), forced).is_some();
        if forced && !wanted {
            // Snapshots may be gone by the next time: let it look again at tables whose tombstones could not go now.
            remembered.oldest_point = SeqNo::MAX;
        }
        wanted
    }

    /// Tables of the bottom level from which a rewrite takes tombstones or superseded versions. Opens those that may
    /// have any: what they say of themselves is needed.
    ///
    /// # Errors
    /// Those of opening tables.
    pub(crate) fn unclean_at_bottom(&self, points: &[SeqNo]) -> Result<BTreeSet<FileId>> {
        let now = self.current.get();
        for table in now.version.level(BOTTOM).iter().filter(|table| table.meta().highest > SeqNo::ZERO) {
            table.table()?;
        }
        let options = self.options();
        let mut remembered = lock(&self.remembered);
        remembered.oldest_point = points.first().copied().unwrap_or(SeqNo::ZERO);
        Ok(unclean_at_bottom(&self.compaction_view(&now, &options, &remembered)))
    }

    fn plan(
        &self,
        now: &SuperVersion,
        oldest_point: Option<SeqNo>,
        choose: impl FnOnce(&View<'_, TableHandle>) -> Option<Plan>,
    ) -> Option<Plan> {
        let options = self.options();
        let mut remembered = lock(&self.remembered);
        remembered.oldest_point = oldest_point.unwrap_or(SeqNo::ZERO);
        choose(&self.compaction_view(now, &options, &remembered))
    }

    fn compaction_view<'a>(
        &'a self,
        now: &'a SuperVersion,
        options: &'a LsmOptions,
        remembered: &'a Remembered,
    ) -> View<'a, TableHandle> {
        View {
            version: &now.version,
            order: &self.context.order,
            options,
            positions: &remembered.positions,
            oldest_point: remembered.oldest_point,
            at_rest: now.active.is_empty() && now.sealed.is_empty(),
        }
    }

    /// Gives tables another level without touching them.
    fn move_tables(&self, now: &SuperVersion, plan: &Plan, host: &dyn Host) -> Result<TaskReport> {
        let (partition, level) = (self.context.partition, plan.to);
        let edits: Vec<Edit> = plan.upper.iter().map(|&table| Edit::TableMoved { partition, table, level }).collect();
        host.commit_edits(&edits)?;
        let tables = handles(now, plan.from, &plan.upper);
        self.remember_position(plan, &tables);
        self.publish_compaction(&plan.upper, tables.into_iter().map(|table| (level, table)).collect(), Vec::new());
        Counters::add(&self.counters.moved_tables, plan.upper.len() as u64);
        Ok(TaskReport { level, tables: plan.upper.len() as u64, ..TaskReport::default() })
    }

    /// Puts a merge's output in the place of its input. If the edit cannot be committed, the merge stays as it is:
    /// whether the manifest names its tables is not known then.
    fn complete(&self, mut job: Job, host: &dyn Host) -> Result<TaskReport> {
        if let Err(error) = self.check_open() {
            lock(&self.remembered).paused = Some(job); // `discard` removes its files
            return Err(error);
        }
        let (plan, bytes_read) = (job.plan.clone(), job.bytes_read);
        let (partition, level) = (self.context.partition, plan.to);
        let inputs: Vec<FileId> = plan.upper.iter().chain(&plan.lower).copied().collect();
        let tables = job.name_output().to_vec();
        let counted = self.early.counted(); // before the version: what memory points into then, tables do now
        let now = self.current.get();
        let upper = handles(&now, plan.from, &plan.upper);
        let obsolete = [&upper[..], &handles(&now, plan.to, &plan.lower)].concat();
        // No flush refers to a file that is there already and not counted: what is without references now stays so.
        let lost = obsolete.iter().flat_map(|table| &table.meta().blobs);
        let dead = now.version.blobs().unreferenced(&counted, tables.iter().flat_map(|table| &table.blobs), lost);
        let removed = inputs.iter().map(|&table| Edit::TableRemoved { partition, table });
        let added = tables.iter().map(|table| Edit::TableAdded { partition, level, table: table.clone() });
        let dropped = dead.iter().map(|file| Edit::BlobFileRemoved { partition, file: file.meta().id });
        if let Err(error) = host.commit_edits(&removed.chain(added).chain(dropped).collect::<Vec<Edit>>()) {
            lock(&self.remembered).paused = Some(job);
            return Err(error);
        }
        let bytes_written = tables.iter().map(|table| table.size).sum();
        let bytes_freed = dead.iter().map(|file| file.meta().size).sum();
        let report = TaskReport { level, tables: tables.len() as u64, bytes_read, bytes_written, bytes_freed };
        self.remember_position(&plan, &upper);
        obsolete.iter().for_each(|table| table.doom());
        dead.iter().for_each(|file| file.doom());
        let read = self.options().read_options(level);
        let handle = |meta| TableHandle::new(meta, Some(job.oldest_point), Arc::clone(&self.context), read);
        let blobs_removed = dead.iter().map(|file| file.meta().id).collect();
        let added: Vec<_> = tables.into_iter().map(|meta| (level, handle(meta))).collect();
        for (_, table) in added.iter().filter(|(level, table)| *level == BOTTOM && table.meta().highest > SeqNo::ZERO) {
            // Open, it says which superseded versions it kept. One that cannot be opened now is when it is read.
            drop(table.table());
        }
        self.publish_compaction(&inputs, added, blobs_removed);
        Counters::add(&self.counters.compactions, 1);
        Counters::add(&self.counters.compacted_read, bytes_read);
        Counters::add(&self.counters.compacted_written, bytes_written);
        Ok(report) // only now are the obsolete tables let go of, and without a lock
    }

    fn publish_compaction(&self, removed: &[FileId], added: Vec<(u8, Arc<TableHandle>)>, blobs_removed: Vec<FileId>) {
        self.current.replace(|now| {
            let removed: HashSet<FileId> = removed.iter().copied().collect();
            let change = Change { removed, added, blobs_removed, ..Change::default() };
            SuperVersion { version: Arc::new(now.version.with(change, &self.context.order)), ..now.clone() }
        });
    }

    fn remember_position(&self, plan: &Plan, upper: &[Arc<TableHandle>]) {
        if let Some(last) = upper.last().filter(|_| plan.from > 0 && plan.from != plan.to) {
            lock(&self.remembered).positions[usize::from(plan.from)] = Some(last.meta().largest.0.clone());
        }
    }
}

/// The tables of `level` with these numbers.
fn handles(now: &SuperVersion, level: u8, ids: &[FileId]) -> Vec<Arc<TableHandle>> {
    now.version.level(level).iter().filter(|table| ids.contains(&table.meta().id)).map(Arc::clone).collect()
}
