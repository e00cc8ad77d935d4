//! The moments that readers look at.

use std::sync::{Arc, Mutex};

use crate::base::SeqNo;
use crate::base::sync::lock;
use crate::engine::Visible;

/// The sequence numbers at which snapshots and iterators read, each with the number of its readers.
///
/// A reader registers *while* it chooses its number: flushes and compactions ask for the list under the same lock, so a
/// version is dropped only if no present reader needs it and every later reader looks at a later moment.
#[derive(Debug)]
pub(crate) struct ReadPoints {
    visible: Visible,
    /// Ascending; a vector, because most readers come and go at its end.
    held: Mutex<Vec<(SeqNo, usize)>>,
}

impl ReadPoints {
    pub(crate) fn new(visible: Visible) -> Arc<ReadPoints> {
        Arc::new(ReadPoints { visible, held: Mutex::default() })
    }

    /// Registers a reader of the newest published commit.
    pub(crate) fn register(self: &Arc<Self>) -> ReadPin {
        let mut held = lock(&self.held);
        let at = self.visible.get();
        match held.last_mut() {
            Some((last, readers)) if *last == at => *readers += 1,
            _ => held.push((at, 1)), // what is visible only rises
        }
        ReadPin { at, points: Arc::clone(self) }
    }

    /// All moments that are looked at, ascending, ending with the newest published commit.
    pub(crate) fn list(&self) -> Vec<SeqNo> {
        let held = lock(&self.held);
        let mut list: Vec<SeqNo> = held.iter().map(|(at, _)| *at).collect();
        let newest = self.visible.get();
        if list.last() != Some(&newest) {
            list.push(newest);
        }
        list
    }

    /// Readers that are registered.
    pub(crate) fn count(&self) -> usize {
        lock(&self.held).iter().map(|(_, readers)| readers).sum()
    }
}

/// One reader's registration; ends when dropped.
#[derive(Debug)]
pub(crate) struct ReadPin {
    at: SeqNo,
    points: Arc<ReadPoints>,
}

impl ReadPin {
    pub(crate) fn at(&self) -> SeqNo {
        self.at
    }
}

impl Clone for ReadPin {
    fn clone(&self) -> ReadPin {
        let mut held = lock(&self.points.held);
        if let Ok(i) = held.binary_search_by_key(&self.at, |(at, _)| *at) {
            held[i].1 += 1;
        }
        drop(held);
        ReadPin { at: self.at, points: Arc::clone(&self.points) }
    }
}

impl Drop for ReadPin {
    fn drop(&mut self) {
        let mut held = lock(&self.points.held);
        if let Ok(i) = held.binary_search_by_key(&self.at, |(at, _)| *at) {
            held[i].1 -= 1;
            if held[i].1 == 0 {
                held.remove(i);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_each_moment_once_and_the_newest_always() {
        let visible = Visible::default();
        let points = ReadPoints::new(visible.clone());
        assert_eq!(points.list(), [SeqNo(0)]);
        visible.publish(SeqNo(5));
        let (a, b) = (points.register(), points.register());
        visible.publish(SeqNo(9));
        let c = points.register();
        assert_eq!(points.list(), [SeqNo(5), SeqNo(9)]);
        drop(a);
        let d = b.clone();
        drop(b);
        visible.publish(SeqNo(12));
        assert_eq!(points.list(), [SeqNo(5), SeqNo(9), SeqNo(12)]);
        assert_eq!(points.count(), 2);
        drop((c, d));
        assert_eq!(points.list(), [SeqNo(12)]);
    }
}
