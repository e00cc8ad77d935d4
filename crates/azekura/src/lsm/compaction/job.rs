//! A merge of tables under way.

use std::collections::HashSet;
use std::sync::Arc;

use crate::base::edit::{FileId, TableMeta};
use crate::base::{Result, SeqNo};
use crate::cursor::Cursor;
use crate::cursor::merge::MergeCursor;
use crate::lsm::compaction::plan::Plan;
use crate::lsm::handle::{TableHandle, TreeContext};
use crate::lsm::older::Older;
use crate::lsm::options::LsmOptions;
use crate::lsm::output::{Finished, Output, OutputPlan};
use crate::lsm::read::RunCursor;
use crate::lsm::retain::Retain;
use crate::lsm::rewrite::Rewrite;
use crate::lsm::version::{Described, Run, Version};
use crate::lsm::written::Unnamed;

/// Does what a [`Plan`] that is no move says, a step at a time; it may lie paused between two steps while flushes add
/// to level 0. Dropped unfinished, it leaves no file behind.
pub(crate) struct Job {
    pub(crate) plan: Plan,
    /// The oldest read point it knows.
    pub(crate) oldest_point: SeqNo,
    pub(crate) bytes_read: u64,
    state: State,
}

enum State {
    Merging(Box<Rewrite>),
    /// `Unnamed` until an edit may name the tables.
    Written(Vec<TableMeta>, Option<Unnamed>),
}

impl Job {
    /// `points`: what readers saw when the plan was made, ascending.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        options: &LsmOptions,
        version: &Version<TableHandle>,
        plan: Plan,
        points: Vec<SeqNo>,
        created_ms: u64,
    ) -> Job {
        let chosen: HashSet<FileId> = plan.upper.iter().chain(&plan.lower).copied().collect();
        let order = &context.order;
        let mut bytes_read = 0;
        let mut children: Vec<Box<dyn Cursor>> = Vec::new();
        let levels = if plan.from == plan.to { vec![plan.to] } else { vec![plan.from, plan.to] };
        for run in levels.iter().flat_map(|&level| &version.level(level).runs) {
            let inputs = run.tables().iter().filter(|table| chosen.contains(&table.meta().id)).map(Arc::clone);
            let inputs: Vec<Arc<TableHandle>> = inputs.collect();
            bytes_read += inputs.iter().map(|table| table.meta().size).sum::<u64>();
            if !inputs.is_empty() {
                children.push(Box::new(RunCursor::new(Arc::new(Run::new(inputs, order)), context, false)));
            }
        }
        let stay = version.level(plan.to).iter().filter(|table| !chosen.contains(&table.meta().id));
        let output = OutputPlan {
            options: options.table_at(plan.to),
            table_size: options.compaction.table_size,
            created_ms,
            separation: None, // what stood in a table when it was flushed stays there
            neighbours: stay.map(|table| table.meta().smallest.0.clone()).collect(),
        };
        let cursor = MergeCursor::new(order.clone(), children);
        let retain = Retain::new(points);
        let oldest_point = retain.oldest_point();
        let older = Older::new(order.clone(), version.runs_below(plan.to));
        let output = Output::new(Arc::clone(context), output);
        let rewrite = Rewrite::new(cursor, order.clone(), retain, older, true, output);
        Job { plan, oldest_point, bytes_read, state: State::Merging(Box::new(rewrite)) }
    }

    /// Goes on for about `budget` bytes; true when all tables are written and durable. After a failure it must be
    /// dropped.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let State::Merging(rewrite) = &mut self.state else { return Ok(true) };
        if !rewrite.step(budget)? {
            return Ok(false);
        }
        let State::Merging(rewrite) = std::mem::replace(&mut self.state, State::Written(Vec::new(), None)) else {
            unreachable!("it was merging a moment ago");
        };
        let Finished { tables, unnamed, .. } = rewrite.finish()?;
        self.state = State::Written(tables, Some(unnamed));
        Ok(true)
    }

    /// What it has written, once [`step`](Job::step) has said true. An edit may name it from now on, so it stays.
    pub(crate) fn name_output(&mut self) -> &[TableMeta] {
        let State::Written(tables, unnamed) = &mut self.state else { return &[] };
        if let Some(unnamed) = unnamed.take() {
            unnamed.keep();
        }
        tables
    }
}
