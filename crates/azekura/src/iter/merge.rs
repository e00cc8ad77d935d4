//! Merges several iterators into one.

use std::cmp::Ordering;

use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, InternalKey, KeyOrder, Result};
use crate::iter::iter::InternalIter;

/// Merges children in internal order with a binary heap. A step costs one or two comparisons while the same child
/// stays at the front. Of entries with equal positions, which a tree never contains, the one of the child with the
/// lower index comes first.
pub(crate) struct MergingIter {
    order: KeyOrder,
    children: Vec<Box<dyn InternalIter>>,
    /// Indexes of the valid children, as a heap: the child with the current entry is at 0.
    heap: Vec<usize>,
    direction: MergeDirection,
    /// Buffer for the current key while the direction changes.
    reverse_key: Vec<u8>,
}

/// The direction of an iteration.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MergeDirection {
    Forward,
    Backward,
}

impl MergingIter {
    pub(crate) fn new(order: KeyOrder, children: Vec<Box<dyn InternalIter>>) -> MergingIter {
        let heap = Vec::with_capacity(children.len());
        MergingIter { order, children, heap, direction: MergeDirection::Forward, reverse_key: Vec::new() }
    }

    /// Whether child `a` comes before child `b` in the current direction.
    fn comes_before(&self, a: usize, b: usize) -> bool {
        let (first, second) = (self.children[a].entry(), self.children[b].entry());
        let by_key = first.key().cmp(&second.key(), &self.order);
        let ordering = match self.direction {
            MergeDirection::Forward => by_key.then(a.cmp(&b)),
            MergeDirection::Backward => by_key.reverse().then(b.cmp(&a)),
        };
        ordering == Ordering::Less
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let mut best = at;
            for child in [2 * at + 1, 2 * at + 2] {
                if child < self.heap.len() && self.comes_before(self.heap[child], self.heap[best]) {
                    best = child;
                }
            }
            if best == at {
                return;
            }
            self.heap.swap(at, best);
            at = best;
        }
    }

    /// Moves every child with `step`, and builds the heap of the valid ones.
    fn rebuild_heap(
        &mut self,
        direction: MergeDirection,
        mut step: impl FnMut(&mut dyn InternalIter) -> Result<()>,
    ) -> Result<()> {
        self.heap.clear();
        self.direction = direction;
        for child in &mut self.children {
            step(child.as_mut())?;
        }
        self.heap.extend((0..self.children.len()).filter(|&i| self.children[i].valid()));
        for at in (0..self.heap.len() / 2).rev() {
            self.sift_down(at);
        }
        debug_assert!((1..self.heap.len()).all(|at| self.is_heap_at(at)), "no child is before its parent in the heap");
        Ok(())
    }

    /// For assertions: whether the entry at index `at` of the heap is not before its parent. True for a custom order.
    fn is_heap_at(&self, at: usize) -> bool {
        self.order.is_custom() || at == 0 || !self.comes_before(self.heap[at], self.heap[(at - 1) / 2])
    }

    /// Steps the front child in the current direction and restores the heap.
    fn advance(&mut self) -> Result<()> {
        debug_assert!(!self.heap.is_empty(), "only a valid iterator is moved");
        let front = self.heap[0];
        let child = &mut self.children[front];
        let stepped = match self.direction {
            MergeDirection::Forward => child.next(),
            MergeDirection::Backward => child.prev(),
        };
        if let Err(error) = stepped {
            self.heap.clear();
            return Err(error);
        }
        if !self.children[front].valid() {
            self.heap.swap_remove(0);
        }
        self.sift_down(0);
        debug_assert!((1..self.heap.len().min(3)).all(|at| self.is_heap_at(at)), "the front is the first entry");
        Ok(())
    }

    /// Changes the direction at the current entry: moves every other child to the other side of it.
    fn reverse_direction(&mut self, direction: MergeDirection) -> Result<()> {
        debug_assert!(self.valid(), "the direction changes at an entry");
        debug_assert!(self.direction != direction, "the direction changes");
        let order = self.order.clone();
        let mut key = std::mem::take(&mut self.reverse_key);
        let entry = self.entry();
        let seqno = entry.seqno;
        key.clear();
        key.extend_from_slice(entry.user_key);
        let at = InternalKey::new(&key, seqno);
        let turned = match direction {
            MergeDirection::Backward => self.rebuild_heap(direction, |child| child.seek_before(at)),
            MergeDirection::Forward => self.rebuild_heap(direction, |child| {
                child.seek(at)?;
                if child.valid() && child.entry().key().cmp(&at, &order).is_eq() {
                    child.next()?;
                }
                Ok(())
            }),
        };
        self.reverse_key = key;
        turned
    }
}

impl InternalIter for MergingIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.rebuild_heap(MergeDirection::Forward, |child| child.seek_to_first())
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.rebuild_heap(MergeDirection::Backward, |child| child.seek_to_last())
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.rebuild_heap(MergeDirection::Forward, |child| child.seek(target))
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.rebuild_heap(MergeDirection::Backward, |child| child.seek_before(target))
    }

    fn next(&mut self) -> Result<()> {
        match self.direction {
            MergeDirection::Forward => self.advance(),
            MergeDirection::Backward => self.reverse_direction(MergeDirection::Forward),
        }
    }

    fn prev(&mut self) -> Result<()> {
        match self.direction {
            MergeDirection::Backward => self.advance(),
            MergeDirection::Forward => self.reverse_direction(MergeDirection::Backward),
        }
    }

    fn valid(&self) -> bool {
        !self.heap.is_empty()
    }

    fn entry(&self) -> EntryRef<'_> {
        self.children[self.heap[0]].entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        self.heap.first().and_then(|&front| self.children[front].current())
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.heap.first().and_then(|&front| self.children[front].shared_value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{RecordKind, SeqNo};
    use crate::testing::seeded_rng::SeededRng;
    use crate::testing::vec_iter::VecIter;

    #[test]
    fn random_walks_match_one_sorted_vector() {
        let mut rng = SeededRng::new(1);
        for round in 0..200 {
            let order = KeyOrder::bytewise();
            let children = 1 + rng.below(5);
            let mut child_entries = vec![Vec::new(); children];
            for seqno in 1..=rng.below(40) {
                let key = vec![b'a' + rng.below(12)];
                let child = rng.below(children);
                child_entries[child].push((key, SeqNo(seqno), RecordKind::Put, vec![round as u8]));
            }
            let mut oracle = VecIter::new(order.clone(), child_entries.concat());
            let boxed = child_entries
                .into_iter()
                .map(|entries| Box::new(VecIter::new(order.clone(), entries)) as Box<dyn InternalIter>);
            let mut merged = MergingIter::new(order.clone(), boxed.collect());
            for _ in 0..100 {
                let key = [b'a' + rng.below(13)];
                let target = InternalKey::new(&key, SeqNo(rng.below(42)));
                let step = rng.below(10);
                for cursor in [&mut oracle as &mut dyn InternalIter, &mut merged] {
                    match step {
                        0 => cursor.seek_to_first().unwrap(),
                        1 => cursor.seek_to_last().unwrap(),
                        2 => cursor.seek(target).unwrap(),
                        3 => cursor.seek_before(target).unwrap(),
                        n if n < 7 && cursor.valid() => cursor.next().unwrap(),
                        _ if cursor.valid() => cursor.prev().unwrap(),
                        _ => {}
                    }
                }
                assert_eq!(oracle.valid(), merged.valid());
                if oracle.valid() {
                    assert_eq!(oracle.entry(), merged.entry());
                }
            }
        }
    }
}
