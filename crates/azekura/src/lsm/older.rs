//! Whether a key may have versions older than a merge sees.

use std::sync::Arc;

use crate::base::KeyOrder;
use crate::lsm::version::{Described, Run};

/// The runs that are older than every input of a merge, asked with ascending keys: each question moves on from the
/// last.
pub(crate) struct Older<T> {
    order: KeyOrder,
    /// A run, and its first table that does not end before the last key asked for.
    runs: Vec<(Arc<Run<T>>, usize)>,
}

impl<T: Described> Older<T> {
    pub(crate) fn new(order: KeyOrder, runs: Vec<Arc<Run<T>>>) -> Older<T> {
        Older { order, runs: runs.into_iter().map(|run| (run, 0)).collect() }
    }

    /// Whether one of the runs has a table whose range holds `key`; keys must not descend.
    pub(crate) fn may_hold(&mut self, key: &[u8]) -> bool {
        let order = &self.order;
        let mut found = false;
        for (run, at) in &mut self.runs {
            let tables = run.tables();
            while tables.get(*at).is_some_and(|table| order.cmp(&table.meta().largest.0, key).is_lt()) {
                *at += 1;
            }
            found |= tables.get(*at).is_some_and(|table| order.cmp(&table.meta().smallest.0, key).is_le());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsm::version::tests::{run, table};

    #[test]
    fn ranges_count_and_gaps_do_not() {
        let runs = vec![run(vec![table(1, "b", "d"), table(2, "f", "h")]), run(vec![table(3, "m", "m")])];
        let mut older = Older::new(KeyOrder::bytewise(), runs);
        let answers: Vec<bool> =
            ["a", "b", "c", "d", "e", "h", "i", "m", "n"].iter().map(|key| older.may_hold(key.as_bytes())).collect();
        assert_eq!(answers, [false, true, true, true, false, true, false, true, false]);
    }
}
