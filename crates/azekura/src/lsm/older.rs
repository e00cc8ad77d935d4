//! Whether a key may have versions older than a merge sees.

use std::sync::Arc;

use crate::base::KeyOrder;
use crate::lsm::version::{HasTableMeta, SortedRun};

/// The runs that are older than every input of a merge, asked with ascending keys: each question moves on from the
/// last.
pub(crate) struct OlderRuns<T> {
    order: KeyOrder,
    /// A run, and its first table that does not end before the last key asked for.
    runs: Vec<(Arc<SortedRun<T>>, usize)>,
}

impl<T: HasTableMeta> OlderRuns<T> {
    pub(crate) fn new(order: KeyOrder, runs: Vec<Arc<SortedRun<T>>>) -> OlderRuns<T> {
        OlderRuns { order, runs: runs.into_iter().map(|run| (run, 0)).collect() }
    }

    /// Whether one of the runs has a table whose range holds `key`; keys must not descend.
    pub(crate) fn may_contain_key(&mut self, key: &[u8]) -> bool {
        let order = &self.order;
        let mut found = false;
        for (run, at) in &mut self.runs {
            let tables = run.tables();
            while tables.get(*at).is_some_and(|table| order.cmp(&table.meta().largest_key.0, key).is_lt()) {
                *at += 1;
            }
            found |= tables.get(*at).is_some_and(|table| order.cmp(&table.meta().smallest_key.0, key).is_le());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsm::version::tests::{run, table};

    #[test]
    fn only_keys_in_table_ranges_may_be_older() {
        let runs = vec![run(vec![table(1, "b", "d"), table(2, "f", "h")]), run(vec![table(3, "m", "m")])];
        let mut older = OlderRuns::new(KeyOrder::bytewise(), runs);
        let answers: Vec<bool> = ["a", "b", "c", "d", "e", "h", "i", "m", "n"]
            .iter()
            .map(|key| older.may_contain_key(key.as_bytes()))
            .collect();
        assert_eq!(answers, [false, true, true, true, false, true, false, true, false]);
    }
}
