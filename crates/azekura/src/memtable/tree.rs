//! The ordered index: a B+ tree that only grows.
//!
//! A split publishes the right node first, then links it into the parent, and only then shortens the left node. So a
//! descent, even one that reads an outdated state, ends at the right leaf or at one left of it, and the search
//! continues from there through the right siblings.

use crate::base::{Error, ErrorKind, InternalKey, Result};
use crate::mem::append_vec::AppendVec;
use crate::mem::atomic::{AtomicBool, AtomicU64, Ordering, SCHEDULE_EXPLORATION, spin_loop};
use crate::mem::simd::prefetch;
use crate::memtable::node::{INNER_CAP, LEAF_CAP, MemtableInnerNode, MemtableLeaf, MemtableNode};
use crate::memtable::record::MemtableRecords;

/// Number of attempts of a reader before it reads open nodes on the slow path.
const READ_RETRIES_MAX: usize = if SCHEDULE_EXPLORATION { 2 } else { 32 };

/// Upper bound of the levels of inner nodes, enough for 2^32 records: every node is at least half full, except after
/// ascending insertions, which fill nodes.
const HEIGHT_MAX: usize = 12;

/// The entry that a reader seeks.
#[derive(Clone, Copy)]
pub(crate) enum MemtableSeekTarget<'a> {
    /// The first entry at or after this key.
    LowerBound(InternalKey<'a>),
    /// The last entry strictly before this key.
    Before(InternalKey<'a>),
    /// The last entry.
    Last,
}

/// A copy of one state of a leaf.
pub(crate) struct MemtableLeafCopy {
    refs: [u32; LEAF_CAP],
    count: usize,
    /// The number of the right sibling, plus 1; 0 = none.
    next: u32,
    /// Number of entries before the seek target for which the copy was made.
    rank: usize,
}

impl MemtableLeafCopy {
    pub(crate) fn new() -> MemtableLeafCopy {
        MemtableLeafCopy { refs: [0; LEAF_CAP], count: 0, next: 0, rank: 0 }
    }

    /// The reference bits of the entries, in order.
    pub(crate) fn refs(&self) -> &[u32] {
        &self.refs[..self.count]
    }

    /// Copies one state of `leaf`.
    fn copy_from(&mut self, leaf: &MemtableLeaf, records: &MemtableRecords, seek_target: MemtableSeekTarget<'_>) {
        for _ in 0..READ_RETRIES_MAX {
            let version = leaf.header().version();
            if version.is_multiple_of(2) {
                self.collect(leaf);
                self.rank = match seek_target {
                    MemtableSeekTarget::LowerBound(target) | MemtableSeekTarget::Before(target) => {
                        leaf.rank(records, target, false)
                    }
                    MemtableSeekTarget::Last => self.count,
                };
                if leaf.header().validate(version) {
                    debug_assert!(self.rank <= self.count, "the target is in the leaf, or after it");
                    return;
                }
            }
            spin_loop();
        }
        self.copy_open(leaf, records, seek_target);
    }

    /// Copies a leaf that may be open, without its key prefixes. Two equal copies under one version are one state of
    /// the leaf, because no state occurs twice within a change.
    #[cold]
    fn copy_open(&mut self, leaf: &MemtableLeaf, records: &MemtableRecords, seek_target: MemtableSeekTarget<'_>) {
        loop {
            let version = leaf.header().version();
            self.collect(leaf);
            let mut again = MemtableLeafCopy::new();
            again.collect(leaf);
            let same = self.refs() == again.refs() && self.next == again.next;
            if same && leaf.header().validate(version) {
                break;
            }
            spin_loop();
        }
        self.remove_duplicate();
        self.rank = match seek_target {
            MemtableSeekTarget::LowerBound(target) | MemtableSeekTarget::Before(target) => {
                self.refs().partition_point(|&bits| records.cmp(bits, target).is_lt())
            }
            MemtableSeekTarget::Last => self.count,
        };
    }

    #[inline]
    fn collect(&mut self, leaf: &MemtableLeaf) {
        let shape = leaf.header().shape();
        (self.count, self.next) = (shape.count, shape.next);
        for (n, bits) in self.refs[..shape.count].iter_mut().enumerate() {
            *bits = leaf.record(n);
        }
    }

    /// Removes the duplicate of the entry that an insertion in progress stores twice.
    fn remove_duplicate(&mut self) {
        if let Some(duplicate) = self.refs().windows(2).position(|pair| pair[0] == pair[1]) {
            self.refs.copy_within(duplicate + 1..self.count, duplicate);
            self.count -= 1;
        }
        debug_assert!(self.refs().windows(2).all(|pair| pair[0] != pair[1]), "an insertion repeats one entry at most");
    }
}

/// The position of the writer's next insertion: a leaf and the index in it, and the path from the root to the leaf. The
/// writer keeps one value and changes it in place, because it is large.
#[derive(Default)]
pub(crate) struct MemtableInsertPosition {
    /// For each inner node its number and the index of the link that was followed.
    path: [(u32, u32); HEIGHT_MAX],
    path_len: usize,
    leaf: u32,
    at: usize,
    /// Whether the last record is at this position.
    is_last_insertion: bool,
    /// How often the next records are compared with the last one before the tree is searched without that.
    follow_attempts: u8,
}

/// Number of records that are compared with the last one after a record that followed its predecessor.
const FOLLOW_ATTEMPTS: u8 = 2;

impl MemtableInsertPosition {
    /// The next records may follow each other in key order.
    pub(crate) fn begin_run(&mut self) {
        self.follow_attempts = FOLLOW_ATTEMPTS;
    }
}

/// The ordered index: references to records in key order. Any number of readers may use it during the insertions of
/// one writer.
pub(crate) struct MemtableTree {
    /// Number of levels of inner nodes << 32 | number of the topmost node. Leaf 0 is always the leftmost leaf.
    root: AtomicU64,
    leaves: AppendVec<MemtableLeaf>,
    inners: AppendVec<MemtableInnerNode>,
    /// Whether the last record was inserted behind all others. Only the writer uses this.
    is_appending: AtomicBool,
}

impl MemtableTree {
    pub(crate) fn new() -> MemtableTree {
        MemtableTree {
            root: AtomicU64::new(0),
            leaves: AppendVec::new(),
            inners: AppendVec::new(),
            is_appending: AtomicBool::new(false),
        }
    }

    /// Bytes that the nodes take.
    pub(crate) fn bytes(&self) -> u64 {
        self.leaves.bytes() + self.inners.bytes()
    }

    fn root(&self) -> (usize, u32) {
        let root = self.root.load(Ordering::Acquire);
        ((root >> 32) as usize, root as u32)
    }

    fn leaf(&self, number: u32) -> &MemtableLeaf {
        self.leaves.get(number).expect("links refer to existing leaves")
    }

    fn inner(&self, number: u32) -> &MemtableInnerNode {
        self.inners.get(number).expect("links refer to existing nodes")
    }

    /// Finds `seek_target`: copies its leaf to `copy` and returns its index there, or `None` if there is no such
    /// entry.
    pub(crate) fn seek(
        &self,
        records: &MemtableRecords,
        seek_target: MemtableSeekTarget<'_>,
        copy: &mut MemtableLeafCopy,
    ) -> Option<usize> {
        self.leaves.get(0)?;
        let leaf = self.leaf(self.descend(records, seek_target));
        prefetch(leaf);
        copy.copy_from(leaf, records, seek_target);
        match seek_target {
            MemtableSeekTarget::LowerBound(_) => {
                while copy.rank == copy.count {
                    let next = copy.next.checked_sub(1)?;
                    copy.copy_from(self.leaf(next), records, seek_target);
                }
                Some(copy.rank)
            }
            MemtableSeekTarget::Before(_) | MemtableSeekTarget::Last => {
                while let (true, Some(next)) = (copy.rank == copy.count, copy.next.checked_sub(1)) {
                    let mut right = MemtableLeafCopy::new();
                    right.copy_from(self.leaf(next), records, seek_target);
                    if right.rank == 0 {
                        break;
                    }
                    *copy = right;
                }
                copy.rank.checked_sub(1)
            }
        }
    }

    /// Copies the leftmost leaf; false if the tree is empty.
    pub(crate) fn first(&self, records: &MemtableRecords, copy: &mut MemtableLeafCopy) -> bool {
        self.leaves.get(0).inspect(|leaf| copy.copy_from(leaf, records, MemtableSeekTarget::Last)).is_some()
            && copy.count > 0
    }

    /// Copies the right sibling of the leaf in `copy`; false if there is none.
    pub(crate) fn right_of(&self, records: &MemtableRecords, copy: &mut MemtableLeafCopy) -> bool {
        let Some(next) = copy.next.checked_sub(1) else { return false };
        copy.copy_from(self.leaf(next), records, MemtableSeekTarget::Last);
        true
    }

    /// Returns the number of the leaf that contains `seek_target`, or of a leaf left of it.
    fn descend(&self, records: &MemtableRecords, seek_target: MemtableSeekTarget<'_>) -> u32 {
        'again: for _ in 0..READ_RETRIES_MAX {
            let root = self.root.load(Ordering::Acquire);
            let (height, mut node) = ((root >> 32) as usize, root as u32);
            let mut above: Option<(&MemtableInnerNode, u64)> = None;
            for _ in 0..height {
                let inner = self.inner(node);
                let version = inner.header().version();
                // If the node was split after its parent was read, the descent would end too far to the left.
                let parent_unchanged = match above {
                    Some((parent, version)) => parent.header().validate(version),
                    None => self.root.load(Ordering::Acquire) == root,
                };
                if !version.is_multiple_of(2) || !parent_unchanged {
                    spin_loop();
                    continue 'again;
                }
                let Some(child) = validated_child(inner, version, records, seek_target) else { continue 'again };
                node = child;
                above = Some((inner, version));
            }
            return node;
        }
        self.descend_open(records, seek_target)
    }

    /// Descends through nodes that may be open.
    #[cold]
    fn descend_open(&self, records: &MemtableRecords, seek_target: MemtableSeekTarget<'_>) -> u32 {
        let (height, root) = self.root();
        (0..height).fold(root, |node, _| follow_open(self.inner(node), records, seek_target))
    }

    /// Sets `position` to that of a record with this key. Valid until the next insertion. Needs no search if the record
    /// follows the last one, which was inserted at `position`.
    #[inline]
    pub(crate) fn find_position(
        &self,
        records: &MemtableRecords,
        key: InternalKey<'_>,
        position: &mut MemtableInsertPosition,
    ) {
        let is_last_insertion = std::mem::take(&mut position.is_last_insertion);
        if is_last_insertion && position.follow_attempts > 0 {
            if self.follows(records, position, key) {
                (position.at, position.follow_attempts) = (position.at + 1, FOLLOW_ATTEMPTS);
                return;
            }
            position.follow_attempts -= 1;
        }
        if self.leaves.len() == 0 {
            (position.path_len, position.leaf, position.at) = (0, 0, 0);
        } else if self.is_appending.load(Ordering::Relaxed) && self.find_end(records, key, position) {
            position.follow_attempts = FOLLOW_ATTEMPTS;
        } else {
            self.set_path(position, |inner| inner.rank(records, key, true) - 1);
            let leaf = self.leaf(position.leaf);
            prefetch(leaf);
            position.at = leaf.rank(records, key, false);
        }
    }

    /// Whether the position for a record with this key is right behind `last`, the position of the last insertion.
    fn follows(&self, records: &MemtableRecords, last: &MemtableInsertPosition, key: InternalKey<'_>) -> bool {
        let leaf = self.leaf(last.leaf);
        let shape = leaf.header().shape();
        let next = last.at + 1;
        debug_assert!(next <= shape.count, "the last record is in its leaf");
        let is_before_next =
            if next == shape.count { shape.next == 0 } else { records.cmp(leaf.record(next), key).is_gt() };
        is_before_next && records.cmp(leaf.record(last.at), key).is_lt()
    }

    /// Sets `position` to that behind all records, if `key` is behind all of them. Ascending insertions then need no
    /// search.
    fn find_end(&self, records: &MemtableRecords, key: InternalKey<'_>, position: &mut MemtableInsertPosition) -> bool {
        self.set_path(position, |inner| inner.header().shape().count - 1);
        let leaf = self.leaf(position.leaf);
        position.at = leaf.header().shape().count;
        debug_assert_eq!(leaf.header().shape().next, 0, "the last links lead to the rightmost leaf");
        position.at > 0 && records.cmp(leaf.record(position.at - 1), key).is_lt()
    }

    /// Inserts the record `bits` with key `user_key` at the position that [`MemtableTree::find_position`]
    /// has set.
    /// Only one thread at a time may insert.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory; then the entries of the tree are unchanged.
    pub(crate) fn insert(
        &self,
        records: &MemtableRecords,
        position: &mut MemtableInsertPosition,
        bits: u32,
        user_key: &[u8],
    ) -> Result<()> {
        if self.leaves.len() == 0 {
            self.leaves.push(MemtableLeaf::new()).ok_or_else(no_memory)?;
        }
        let leaf = self.leaf(position.leaf);
        let shape = leaf.header().shape();
        self.is_appending.store(position.at == shape.count && shape.next == 0, Ordering::Relaxed);
        position.is_last_insertion = shape.count < LEAF_CAP;
        if shape.count < LEAF_CAP {
            leaf.insert(position.at, bits, user_key, records);
            return Ok(());
        }
        self.split_and_insert(records, position, bits, user_key)
    }

    /// The writer's descent, along the links whose indexes `choose_link` returns. Nodes do not change during it,
    /// because only the writer changes them.
    #[inline]
    fn set_path(&self, position: &mut MemtableInsertPosition, choose_link: impl Fn(&MemtableInnerNode) -> usize) {
        let (height, mut node) = self.root();
        debug_assert!(height <= HEIGHT_MAX, "a path has space for every level");
        for step in &mut position.path[..height] {
            let inner = self.inner(node);
            let link = choose_link(inner);
            *step = (node, link as u32);
            node = inner.link(link).1;
        }
        (position.path_len, position.leaf) = (height, node);
    }

    /// Splits the full leaf of `position` and inserts the record into one of the two leaves. If insertions are
    /// ascending, the left leaf keeps all entries before the insertion point, otherwise half of its entries.
    fn split_and_insert(
        &self,
        records: &MemtableRecords,
        position: &MemtableInsertPosition,
        bits: u32,
        user_key: &[u8],
    ) -> Result<()> {
        let MemtableInsertPosition { path, path_len, leaf: number, at, .. } = position;
        let (path, number, at) = (&path[..*path_len], *number, *at);
        let leaf = self.leaf(number);
        let shape = leaf.header().shape();
        debug_assert_eq!(shape.count, LEAF_CAP, "only a full leaf is split");
        debug_assert!(at <= shape.count, "the position is in the leaf");
        let ascending = at > 0 && at == shape.append_index;
        let rightmost = at == LEAF_CAP && shape.next == 0;
        let keep = if ascending || rightmost { at } else { LEAF_CAP / 2 };
        let into_left = at <= keep && keep < LEAF_CAP;
        let upper = leaf.copy_upper(keep, records);

        if !into_left {
            upper.insert(at - keep, bits, user_key, records);
        }
        let separator = upper.record(0);
        let right = self.leaves.push(upper).ok_or_else(no_memory)?;
        self.link(records, path, number, (separator, right))?;
        debug_assert!(
            keep == 0
                || records.order().is_custom()
                || records.cmp(leaf.record(keep - 1), records.get_by_bits(separator).key()).is_le(),
            "the entries of the left leaf are not after the separator"
        );
        leaf.truncate(keep, right, records);
        if into_left {
            leaf.insert(at, bits, user_key, records);
        }
        Ok(())
    }

    /// Inserts the link to a new node into the parent, which is the last step of `path`, after the link to the left
    /// sibling, node number `left`. Splits a full parent first. A split root gets a new root above it.
    fn link(&self, records: &MemtableRecords, path: &[(u32, u32)], left: u32, new: (u32, u32)) -> Result<()> {
        let Some((&(number, followed), path)) = path.split_last() else {
            debug_assert_eq!(self.root().1, left, "a node without parent is the root");
            let root = MemtableInnerNode::with_first_child(left);
            root.insert(1, new, records);
            let root = self.inners.push(root).ok_or_else(no_memory)?;
            let height = self.root().0 as u64 + 1;
            self.root.store(height << 32 | u64::from(root), Ordering::Release);
            return Ok(());
        };
        let (inner, followed) = (self.inner(number), followed as usize);
        let at = followed + 1;
        debug_assert_eq!(inner.link(followed).1, left, "the path leads to the node that was split");
        if inner.header().shape().count < INNER_CAP {
            inner.insert(at, new, records);
            return Ok(());
        }
        if at == INNER_CAP {
            // Ascending insertions: the full node stays full. The new node starts with the new child, whose separator
            // moves up to the parent.
            let right = self.inners.push(MemtableInnerNode::with_first_child(new.1)).ok_or_else(no_memory)?;
            return self.link(records, path, number, (new.0, right));
        }
        let keep = INNER_CAP / 2;
        let upper = inner.copy_upper(keep, records);
        let separator = inner.record(keep);
        if at > keep {
            upper.insert(at - keep, new, records);
        }
        let right = self.inners.push(upper).ok_or_else(no_memory)?;
        self.link(records, path, number, (separator, right))?;
        inner.truncate(keep, records);
        if at <= keep {
            inner.insert(at, new, records);
        }
        Ok(())
    }
}

/// Returns the child of `inner` for `seek_target`, or `None` if the node changed since it had `version`.
#[inline]
fn validated_child(
    inner: &MemtableInnerNode,
    version: u64,
    records: &MemtableRecords,
    seek_target: MemtableSeekTarget<'_>,
) -> Option<u32> {
    let rank = match seek_target {
        MemtableSeekTarget::LowerBound(target) => inner.rank(records, target, true),
        MemtableSeekTarget::Before(target) => inner.rank(records, target, false),
        MemtableSeekTarget::Last => inner.header().shape().count,
    };
    let child = inner.link(rank - 1).1;
    inner.header().validate(version).then_some(child)
}

/// Returns the child of `inner`, which may be open, for `seek_target`, or a child left of it. Each link is valid by
/// itself: the entries below its child are not before its separator. So the function returns the child of the last
/// link that it reads before a separator after the target.
#[cold]
fn follow_open(inner: &MemtableInnerNode, records: &MemtableRecords, seek_target: MemtableSeekTarget<'_>) -> u32 {
    let mut child = inner.link(0).1;
    for n in 1..inner.header().shape().count {
        let (separator, next) = inner.link(n);
        let reached = match seek_target {
            MemtableSeekTarget::LowerBound(target) => records.cmp(separator, target).is_le(),
            MemtableSeekTarget::Before(target) => records.cmp(separator, target).is_lt(),
            MemtableSeekTarget::Last => true,
        };
        if !reached {
            break;
        }
        child = next;
    }
    child
}

#[cold]
fn no_memory() -> Error {
    Error::new(ErrorKind::OutOfSpace, "no memory for the index of a memtable")
}

#[cfg(test)]
impl MemtableTree {
    /// Opens all closed nodes, as if the writer had stopped in the middle of changing them, so that readers use the
    /// slow path. A second call closes them again.
    pub(crate) fn toggle_write_in_progress(&self) {
        (0..self.leaves.len()).for_each(|n| self.leaf(n).header().toggle_write_in_progress());
        (0..self.inners.len()).for_each(|n| self.inner(n).header().toggle_write_in_progress());
    }

    pub(crate) fn height(&self) -> usize {
        self.root().0
    }

    /// Average used fraction of a leaf.
    pub(crate) fn fill(&self) -> f64 {
        let used: usize = (0..self.leaves.len()).map(|n| self.leaf(n).header().shape().count).sum();
        used as f64 / (self.leaves.len() as usize * LEAF_CAP) as f64
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::{EntryRef, KeyOrder, RecordKind, SeqNo};
    use crate::mem::arena::Arena;

    fn stored(records: &MemtableRecords, writer: &mut crate::mem::arena::ArenaWriter, n: u32) -> u32 {
        let user_key = n.to_be_bytes();
        let entry = EntryRef { user_key: &user_key, seqno: SeqNo(1), kind: RecordKind::Put, value: b"" };
        records.append(writer, entry, None).unwrap().to_bits()
    }

    #[test]
    fn leaf_is_readable_at_every_step_of_insert() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let records = MemtableRecords::new(arena, KeyOrder::bytewise());
        let all: Vec<u32> = (0..10).map(|n| stored(&records, &mut writer, n)).collect();
        for at in 0..10 {
            let leaf = MemtableLeaf::new();
            let before: Vec<u32> = all.iter().copied().filter(|bits| *bits != all[at]).collect();
            for (n, &bits) in before.iter().enumerate() {
                leaf.insert(n, bits, records.get_by_bits(bits).user_key(), &records);
            }
            let mut steps = 0;
            leaf.insert_in_steps(at, all[at], &mut || {
                let mut copy = MemtableLeafCopy::new();
                let seek_target = (at as u32).to_be_bytes();
                copy.copy_from(
                    &leaf,
                    &records,
                    MemtableSeekTarget::LowerBound(InternalKey::before_versions_of(&seek_target)),
                );
                assert!(copy.refs() == before || copy.refs() == all, "{:?}", copy.refs());
                assert_eq!(copy.rank, at);
                steps += 1;
            });
            assert_eq!(steps, (before.len() - at).max(1) + 2);
        }
    }

    /// Separator `10 * n` leads to child `n`. While the writer inserts links in any order, no descent ends right of
    /// its target.
    #[test]
    fn changing_inner_node_never_leads_too_far_right() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let records = MemtableRecords::new(arena, KeyOrder::bytewise());
        let count = INNER_CAP as u32 - 1;
        let all: Vec<u32> = (1..=count).map(|n| stored(&records, &mut writer, 10 * n)).collect();
        let nodes = AppendVec::new();
        nodes.push(MemtableInnerNode::with_first_child(0)).unwrap();
        let rounds = if cfg!(miri) { 2 } else { 3_000 };
        std::thread::scope(|s| {
            for reader in 1..=2 {
                let (nodes, records) = (&nodes, &records);
                s.spawn(move || {
                    let mut n = reader;
                    while nodes.len() <= rounds {
                        let inner: &MemtableInnerNode = nodes.get(nodes.len() - 1).unwrap();
                        n = (n * 7 + 13) % (10 * count + 19);
                        let seek_target = n.to_be_bytes();
                        let seek_target = MemtableSeekTarget::LowerBound(InternalKey::new(&seek_target, SeqNo(1)));
                        assert!(follow_open(inner, records, seek_target) <= n / 10);
                        let version = inner.header().version();
                        if version.is_multiple_of(2)
                            && let Some(child) = validated_child(inner, version, records, seek_target)
                        {
                            assert!(child <= n / 10, "{child} for {n}");
                        }
                    }
                });
            }
            for round in 0..rounds {
                let inner = nodes.get(round).unwrap();
                let mut inserted = Vec::new();
                for n in 0..count {
                    let child = n * (2 * round + 7) % count;
                    if inserted.contains(&child) {
                        continue;
                    }
                    inserted.push(child);
                    let at = inserted.iter().filter(|other| **other < child).count() + 1;
                    inner.insert(at, (all[child as usize], child + 1), &records);
                }
                nodes.push(MemtableInnerNode::with_first_child(0)).unwrap();
            }
        });
    }

    #[test]
    fn descent_restarts_when_node_changed() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let records = MemtableRecords::new(arena, KeyOrder::bytewise());
        let inner = MemtableInnerNode::with_first_child(0);
        let version = inner.header().version();
        assert_eq!(validated_child(&inner, version, &records, MemtableSeekTarget::Last), Some(0));
        inner.insert(1, (stored(&records, &mut writer, 10), 1), &records);
        assert_eq!(validated_child(&inner, version, &records, MemtableSeekTarget::Last), None);
        assert_eq!(validated_child(&inner, inner.header().version(), &records, MemtableSeekTarget::Last), Some(1));
    }
}
