//! The inner nodes: a volatile tree of separators that leads from a key to its leaf.
//!
//! A node is never changed, except for the pointers to the nodes below it: a new node is built and replaces the old
//! one, so a pinned reader walks from node to node without a lock or a version check. Split nodes are replaced
//! together, by one store above them, and the old ones stay unchanged for readers that are on their way. The old node
//! above them still points to the nodes that were below it when it was replaced, which was after such a reader began.
//! So each pointer that a walk follows was valid at some time during the walk.
//!
//! One thread at a time changes it; any number walk.

use std::cmp::Ordering as Order;
use std::sync::Arc;

use crate::base::KeyOrder;
use crate::mem::epoch::{EpochCell, Pin};
use crate::mem::simd::prefetch;

/// Maximum number of children of a node.
const FANOUT: usize = 64;
/// Number of children of a node when the tree is bulk loaded, which leaves space for later inserts.
const BULK_LOAD_FANOUT: usize = 52;

/// Which leaf a search looks for.
#[derive(Clone, Copy)]
pub(crate) enum LeafTarget<'a> {
    /// The leaf to which this key belongs.
    Key(&'a [u8]),
    /// The leaf of the last key before this one, or a leaf to the right of it.
    BeforeKey(&'a [u8]),
    First,
    Last,
}

/// A leaf and the bounds of its keys; `None` = unbounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafPosition<'p> {
    pub(crate) leaf: u64,
    /// Its keys are not before this bound.
    pub(crate) low: Option<&'p [u8]>,
    /// Its keys are before this bound. If the leaf contains other keys, these belong to the next leaf.
    pub(crate) high: Option<&'p [u8]>,
    /// All leaves of the same parent node. `index` is the position of this leaf among them.
    siblings: &'p [u64],
    index: usize,
}

impl LeafPosition<'_> {
    /// The leaf `leaves` positions later, or earlier if negative; `None` if it has another parent node.
    #[inline]
    pub(crate) fn sibling(&self, leaves: isize) -> Option<u64> {
        self.siblings.get(self.index.wrapping_add_signed(leaves)).copied()
    }
}

type InnerNodeCell = EpochCell<InnerNode>;

/// A node. Separator `n` is between the children `n` and `n + 1`: it is behind every key of the former and not behind
/// any key of the latter. The arrays have space for one child and one separator more than a stored node has, because
/// a node is built with these before it is split.
#[repr(C, align(64))]
struct InnerNode {
    /// Length in bytes of the prefix that all separators share.
    common_len: u32,
    count: u16,
    /// Number of levels of nodes below this one.
    level: u16,
    /// The first eight bytes of the shared prefix, as of [`key_prefix_u64`].
    common_prefix: u64,
    /// Children above the lowest level, where they are nodes; empty on the lowest level.
    child_nodes: Box<[InnerNodeCell]>,
    /// The separators are concatenated in `separator_bytes`; this is the end of each.
    separator_ends: Box<[u32]>,
    separator_bytes: Box<[u8]>,
    /// If the key order is bytewise: four bytes of each separator after the shared prefix, as of [`key_prefix_i32`],
    /// padded with the highest value. They are stored in the node itself, because every search reads them, so that
    /// all of them can be prefetched together.
    separator_prefixes: [i32; FANOUT],
    /// Children on the lowest level: the words of the leaves' addresses.
    leaves: [u64; FANOUT + 1],
}

enum InnerChild {
    Leaf(u64),
    Node(Arc<InnerNode>),
}

enum InnerChildren {
    Leaves(Vec<u64>),
    Nodes(Vec<Arc<InnerNode>>),
}

impl InnerChildren {
    fn len(&self) -> usize {
        match self {
            InnerChildren::Leaves(leaves) => leaves.len(),
            InnerChildren::Nodes(nodes) => nodes.len(),
        }
    }

    fn insert(&mut self, at: usize, child: InnerChild) {
        match (self, child) {
            (InnerChildren::Leaves(leaves), InnerChild::Leaf(leaf)) => leaves.insert(at, leaf),
            (InnerChildren::Nodes(nodes), InnerChild::Node(node)) => nodes.insert(at, node),
            _ => unreachable!("children of a node are on one level"),
        }
    }

    fn remove(&mut self, at: usize) {
        match self {
            InnerChildren::Leaves(leaves) => drop(leaves.remove(at)),
            InnerChildren::Nodes(nodes) => drop(nodes.remove(at)),
        }
    }

    fn split_off(&mut self, at: usize) -> InnerChildren {
        match self {
            InnerChildren::Leaves(leaves) => InnerChildren::Leaves(leaves.split_off(at)),
            InnerChildren::Nodes(nodes) => InnerChildren::Nodes(nodes.split_off(at)),
        }
    }
}

/// Eight bytes of `key` from `from` on as a big-endian integer, padded with zeros. The integers of two keys are never
/// in the opposite order of these bytes.
#[inline]
pub(crate) fn key_prefix_u64(key: &[u8], from: usize) -> u64 {
    let rest = key.get(from..).unwrap_or_default();
    if let Some(word) = rest.first_chunk() {
        return u64::from_be_bytes(*word);
    }
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_be_bytes(word)
}

/// The four bytes of `key` from `from` on as an integer of the same order. It is signed, because processors compare
/// signed integers many at a time.
#[inline]
fn key_prefix_i32(key: &[u8], from: usize) -> i32 {
    ((key_prefix_u64(key, from) >> 32) as u32 ^ 1 << 31).cast_signed()
}

/// The number of `heads` that are lower than `head`. It compares all of them: that is faster than a binary search,
/// whose branches are unpredictable and whose loads depend on each other.
#[inline]
fn count_lower(heads: &[i32; FANOUT], head: i32) -> usize {
    heads.iter().map(|other| u32::from(*other < head)).sum::<u32>() as usize
}

impl InnerNode {
    fn new(separators: &[&[u8]], children: InnerChildren, order: &KeyOrder) -> InnerNode {
        let mut end = 0;
        let ends = separators.iter().map(|separator| {
            end += separator.len() as u32; // 64 keys of at most 64 KiB
            end
        });
        InnerNode::with_separators(ends.collect(), separators.concat().into(), children, order)
    }

    /// A node whose separator `n` ends at byte `separator_ends[n]` of `separator_bytes`.
    fn with_separators(
        separator_ends: Box<[u32]>,
        separator_bytes: Box<[u8]>,
        children: InnerChildren,
        order: &KeyOrder,
    ) -> InnerNode {
        assert_eq!(separator_ends.len() + 1, children.len(), "a separator stands between each two children");
        debug_assert!(children.len() <= FANOUT + 1, "a node is split when it has one child too many");
        let mut node = InnerNode {
            common_len: 0,
            count: children.len() as u16,
            level: 0,
            common_prefix: 0,
            child_nodes: Box::default(),
            separator_ends,
            separator_bytes,
            separator_prefixes: [i32::MAX; FANOUT],
            leaves: [0; FANOUT + 1],
        };
        match children {
            InnerChildren::Leaves(leaves) => node.leaves[..leaves.len()].copy_from_slice(&leaves),
            InnerChildren::Nodes(nodes) => {
                node.level = nodes[0].level + 1;
                debug_assert!(nodes.iter().all(|other| other.level + 1 == node.level), "children are on one level");
                node.child_nodes = nodes.into_iter().map(EpochCell::new).collect();
            }
        }
        debug_assert!(order.is_custom() || node.separators().is_sorted(), "separators are in key order");
        if order.is_bytewise() && node.len() > 1 {
            // All separators share the prefix that the first and the last share, because they are sorted.
            let (first, last) = (node.separator(0), node.separator(node.len() - 2));
            let common = first.iter().zip(last).take_while(|(a, b)| a == b).count();
            debug_assert!(
                order.is_custom() || node.separators().iter().all(|one| one.starts_with(&first[..common])),
                "the prefix is shared"
            );
            let common_prefix = key_prefix_u64(&first[..common], 0);
            let mut prefixes = [i32::MAX; FANOUT];
            let mut start = 0;
            for (prefix, end) in prefixes.iter_mut().zip(&node.separator_ends) {
                *prefix = key_prefix_i32(&node.separator_bytes[start..*end as usize], common);
                start = *end as usize;
            }
            (node.common_len, node.common_prefix, node.separator_prefixes) = (common as u32, common_prefix, prefixes);
        }
        node
    }

    #[inline]
    fn len(&self) -> usize {
        self.count as usize
    }

    #[inline]
    fn separator(&self, n: usize) -> &[u8] {
        let start = if n == 0 { 0 } else { self.separator_ends[n - 1] as usize };
        &self.separator_bytes[start..self.separator_ends[n] as usize]
    }

    fn separators(&self) -> Vec<&[u8]> {
        (0..self.separator_ends.len()).map(|n| self.separator(n)).collect()
    }

    fn children(&self) -> InnerChildren {
        if self.child_nodes.is_empty() {
            InnerChildren::Leaves(self.leaves[..self.len()].to_vec())
        } else {
            InnerChildren::Nodes(self.child_nodes.iter().map(EpochCell::load_arc).collect())
        }
    }

    /// The index of the child for `key`: the number of separators that are before `key`, or, with `or_equal`, not
    /// behind it.
    #[inline]
    fn rank(&self, key: &[u8], or_equal: bool, order: &KeyOrder, bytewise: bool) -> usize {
        let (mut low, mut high) = (0, self.len() - 1);
        if bytewise {
            let common = self.common_len as usize;
            if common > 0 {
                let common_order = self.cmp_common_prefix(key, common);
                if common_order.is_ne() {
                    return if common_order.is_lt() { 0 } else { high };
                }
            }
            let head = key_prefix_i32(key, common);
            low = count_lower(&self.separator_prefixes, head);
            if low >= high || self.separator_prefixes[low] != head {
                return low;
            }
            high = low + self.separator_prefixes[low..high].partition_point(|separator| *separator == head);
        }
        while low < high {
            let middle = (low + high) / 2;
            let of_key = order.cmp(self.separator(middle), key);
            if of_key.is_lt() || or_equal && of_key.is_eq() { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// The bounds of the keys of child `at`, if `bounds` are those of this node.
    #[inline]
    fn bounds_of<'p>(&'p self, at: usize, (low, high): SeparatorPair<'p>) -> SeparatorPair<'p> {
        let low = at.checked_sub(1).map_or(low, |before| Some(self.separator(before)));
        (low, if at < self.separator_ends.len() { Some(self.separator(at)) } else { high })
    }

    /// The position of leaf `at`, if `bounds` are those of this node.
    #[inline]
    fn position<'p>(&'p self, at: usize, bounds: SeparatorPair<'p>) -> LeafPosition<'p> {
        let (low, high) = self.bounds_of(at, bounds);
        LeafPosition { leaf: self.leaves[at], low, high, siblings: &self.leaves[..self.len()], index: at }
    }

    /// The leaves before and behind leaf `at` in this node.
    fn neighbours(&self, at: usize) -> (Option<u64>, Option<u64>) {
        let leaves = &self.leaves[..self.len()];
        (at.checked_sub(1).map(|at| leaves[at]), leaves.get(at + 1).copied())
    }

    /// Loads the node of `cell`, below this one, and prefetches the fields that every search reads.
    #[inline]
    fn load_child<'p>(&self, cell: &'p InnerNodeCell, pin: &'p Pin) -> &'p InnerNode {
        let node = cell.load_pinned(pin);
        prefetch(&node.count);
        prefetch(&node.separator_prefixes);
        if self.level == 1 {
            prefetch(&node.leaves);
        }
        node
    }

    /// Compares `key` with the keys that begin with the shared prefix: it is before them, one of them, or behind
    /// them. A shared prefix of up to eight bytes is read from the node itself.
    #[inline]
    fn cmp_common_prefix(&self, key: &[u8], common: usize) -> Order {
        if common <= 8 && common <= key.len() {
            return (key_prefix_u64(key, 0) & (u64::MAX << (64 - 8 * common))).cmp(&self.common_prefix);
        }
        let begins = &self.separator_bytes[..common];
        if key.starts_with(begins) { Order::Equal } else { key.cmp(begins) }
    }

    /// This node with `child` inserted behind child `at`, and `separator` between the two. If `instead` is given, it
    /// replaces child `at`.
    fn with_child_inserted(
        &self,
        at: usize,
        instead: Option<InnerNode>,
        separator: &[u8],
        child: InnerChild,
        order: &KeyOrder,
    ) -> InnerNode {
        let mut children = self.children();
        if let (Some(node), InnerChildren::Nodes(nodes)) = (instead, &mut children) {
            nodes[at] = Arc::new(node);
        }
        debug_assert!(at < children.len(), "the new child is behind an existing one");
        children.insert(at + 1, child);
        let start = at.checked_sub(1).map_or(0, |before| self.separator_ends[before]);
        let (before, behind) = self.separator_bytes.split_at(start as usize);
        let shift = separator.len() as u32;
        let (ends, moved) = self.separator_ends.split_at(at);
        let ends = ends.iter().copied().chain([start + shift]).chain(moved.iter().map(|end| end + shift));
        InnerNode::with_separators(ends.collect(), [before, separator, behind].concat().into(), children, order)
    }

    /// This node without child `at`. The keys of that child then belong to the child before it, or if there is none,
    /// to the child behind it.
    fn with_child_removed(&self, at: usize, order: &KeyOrder) -> InnerNode {
        let (mut separators, mut children) = (self.separators(), self.children());
        separators.remove(at.saturating_sub(1));
        children.remove(at);
        InnerNode::new(&separators, children, order)
    }

    /// Splits the node: its first `keep` children, the separator behind them, and the other children.
    fn halves(&self, keep: usize, order: &KeyOrder) -> (InnerNode, Vec<u8>, InnerNode) {
        let separators = self.separators();
        let mut left = self.children();
        let right = left.split_off(keep);
        debug_assert!(left.len() > 0 && right.len() > 0, "both halves have a child");
        let left = InnerNode::new(&separators[..keep - 1], left, order);
        (left, self.separator(keep - 1).to_vec(), InnerNode::new(&separators[keep..], right, order))
    }

    fn memory_bytes(&self) -> u64 {
        let content_bytes =
            size_of_val(&*self.child_nodes) + size_of_val(&*self.separator_ends) + self.separator_bytes.len();
        // An `Arc` stores two counters before the node, padded to the alignment of the node.
        (size_of::<InnerNode>() + align_of::<InnerNode>() + content_bytes) as u64
    }
}

/// The inner nodes of one pool.
pub(crate) struct InnerTree {
    root: InnerNodeCell,
    order: KeyOrder,
    bytewise: bool,
}

/// The lower and the upper bound of keys; `None` = unbounded.
type SeparatorPair<'p> = (Option<&'p [u8]>, Option<&'p [u8]>);

/// The nodes from the root down to a leaf, with the index of the chosen child in each.
type InnerPath<'p> = Vec<(&'p InnerNodeCell, &'p InnerNode, usize)>;

impl InnerTree {
    /// Builds the tree of `leaves`, at least one. Each comes with the separator between it and the leaf before it;
    /// the separator of the first leaf is ignored.
    pub(crate) fn bulk_load(leaves: &[(Vec<u8>, u64)], order: KeyOrder) -> InnerTree {
        let mut level: Vec<(&[u8], InnerNode)> = Vec::new();
        for part in leaves.chunks(BULK_LOAD_FANOUT) {
            let separators: Vec<&[u8]> = part[1..].iter().map(|(separator, _)| separator.as_slice()).collect();
            let children = InnerChildren::Leaves(part.iter().map(|(_, leaf)| *leaf).collect());
            level.push((&part[0].0, InnerNode::new(&separators, children, &order)));
        }
        while level.len() > 1 {
            let mut above = Vec::new();
            let mut nodes = level.into_iter().peekable();
            while nodes.peek().is_some() {
                let part: Vec<_> = nodes.by_ref().take(BULK_LOAD_FANOUT).collect();
                let separators: Vec<&[u8]> = part[1..].iter().map(|(separator, _)| *separator).collect();
                let first = part[0].0;
                let children = part.into_iter().map(|(_, node)| Arc::new(node)).collect();
                above.push((first, InnerNode::new(&separators, InnerChildren::Nodes(children), &order)));
            }
            level = above;
        }
        let (_, root) = level.pop().expect("there is a leaf");
        InnerTree { root: EpochCell::new(Arc::new(root)), bytewise: order.is_bytewise(), order }
    }

    /// The index of the child that leads to `target`.
    #[inline]
    fn child_index(&self, node: &InnerNode, target: LeafTarget<'_>) -> usize {
        match target {
            LeafTarget::Key(key) => node.rank(key, true, &self.order, self.bytewise),
            LeafTarget::BeforeKey(key) => node.rank(key, false, &self.order, self.bytewise),
            LeafTarget::First => 0,
            LeafTarget::Last => node.len() - 1,
        }
    }

    /// The leaf of `target`.
    #[inline]
    pub(crate) fn find_leaf(&self, target: LeafTarget<'_>, pin: &Pin) -> u64 {
        let mut node = self.root.load_pinned(pin);
        loop {
            let at = self.child_index(node, target);
            let Some(below) = node.child_nodes.get(at) else { return node.leaves[at] };
            node = node.load_child(below, pin);
        }
    }

    /// The leaf of `target`, with the bounds of its keys and its siblings.
    pub(crate) fn find_position<'p>(&'p self, target: LeafTarget<'_>, pin: &'p Pin) -> LeafPosition<'p> {
        let (node, at, bounds) = self.find_node(target, pin);
        node.position(at, bounds)
    }

    /// As [`find_position`](InnerTree::find_position), and the leaves behind it that have the same parent node.
    pub(crate) fn find_positions_from<'p>(&'p self, target: LeafTarget<'_>, pin: &'p Pin) -> Vec<LeafPosition<'p>> {
        let (node, at, bounds) = self.find_node(target, pin);
        (at..node.len()).map(|at| node.position(at, bounds)).collect()
    }

    /// The node of the lowest level that leads to `target`, the index of the leaf in it, and the bounds of the node's
    /// keys.
    #[inline]
    fn find_node<'p>(&'p self, target: LeafTarget<'_>, pin: &'p Pin) -> (&'p InnerNode, usize, SeparatorPair<'p>) {
        let mut node = self.root.load_pinned(pin);
        let mut bounds = (None, None);
        loop {
            let at = self.child_index(node, target);
            let Some(below) = node.child_nodes.get(at) else { return (node, at, bounds) };
            bounds = node.bounds_of(at, bounds);
            node = node.load_child(below, pin);
        }
    }

    /// The leaves before and behind the leaf of `key` that have the same parent node.
    pub(crate) fn neighbours(&self, key: &[u8], pin: &Pin) -> (Option<u64>, Option<u64>) {
        let path = self.path(LeafTarget::Key(key), pin);
        let &(_, node, at) = path.last().expect("there is a root");
        node.neighbours(at)
    }

    fn path<'p>(&'p self, target: LeafTarget<'_>, pin: &'p Pin) -> InnerPath<'p> {
        let (mut path, mut cell): (InnerPath<'p>, &InnerNodeCell) = (Vec::new(), &self.root);
        loop {
            let node = cell.load_pinned(pin);
            let at = self.child_index(node, target);
            path.push((cell, node, at));
            let Some(below) = node.child_nodes.get(at) else { return path };
            cell = below;
        }
    }

    /// Inserts `leaf` behind the current leaf of `separator`. Keys from `separator` on then belong to `leaf`.
    pub(crate) fn insert(&self, separator: &[u8], leaf: u64) {
        let pin = Pin::new();
        let mut change: Option<(InnerNode, Vec<u8>, InnerNode)> = None;
        for (cell, node, at) in self.path(LeafTarget::Key(separator), &pin).into_iter().rev() {
            let grown = match change.take() {
                None => node.with_child_inserted(at, None, separator, InnerChild::Leaf(leaf), &self.order),
                Some((left, between, right)) => {
                    node.with_child_inserted(at, Some(left), &between, InnerChild::Node(Arc::new(right)), &self.order)
                }
            };
            if grown.len() <= FANOUT {
                return cell.store(Arc::new(grown));
            }
            // With ascending inserts the full node stays full.
            let keep = if at + 1 == FANOUT { FANOUT } else { FANOUT / 2 };
            change = Some(grown.halves(keep, &self.order));
        }
        let (left, between, right) = change.expect("the root is on every path, and was not stored");
        let children = InnerChildren::Nodes(vec![Arc::new(left), Arc::new(right)]);
        self.root.store(Arc::new(InnerNode::new(&[&between], children, &self.order)));
    }

    /// Removes the leaf of `key`. Its keys then belong to the leaf before it with the same parent node, or if there
    /// is none, to the leaf behind it. The only leaf of a tree is not removed.
    pub(crate) fn remove(&self, key: &[u8]) {
        let leaf = self.find_leaf(LeafTarget::Key(key), &Pin::new());
        self.remove_siblings(LeafTarget::Key(key), |other| other == leaf);
    }

    /// As [`remove`](InnerTree::remove), for all leaves that `is_removed` accepts and that have the same parent node as
    /// the leaf of `target`.
    pub(crate) fn remove_siblings(&self, target: LeafTarget<'_>, is_removed: impl Fn(u64) -> bool) {
        let pin = Pin::new();
        let mut path = self.path(target, &pin);
        let (cell, node, _) = path.pop().expect("there is a root");
        let remaining: Vec<usize> = (0..node.len()).filter(|at| !is_removed(node.leaves[*at])).collect();
        if let Some((_, others)) = remaining.split_first() {
            let separators: Vec<&[u8]> = others.iter().map(|at| node.separator(at - 1)).collect();
            let leaves = remaining.iter().map(|at| node.leaves[*at]).collect();
            return cell.store(Arc::new(InnerNode::new(&separators, InnerChildren::Leaves(leaves), &self.order)));
        }
        for (cell, node, at) in path.into_iter().rev() {
            if node.len() > 1 {
                return cell.store(Arc::new(node.with_child_removed(at, &self.order)));
            }
        }
    }

    /// Replaces the separator `old` by `new`, and the leaf behind it by `leaf`. `old` is a separator of the lowest
    /// level.
    pub(crate) fn replace(&self, old: &[u8], new: &[u8], leaf: u64) {
        let pin = Pin::new();
        let path = self.path(LeafTarget::Key(old), &pin);
        let &(cell, node, at) = path.last().expect("there is a root");
        let (mut separators, mut children) = (node.separators(), node.leaves[..node.len()].to_vec());
        debug_assert!(at > 0 && separators[at - 1] == old, "it separates two leaves of one node");
        (separators[at - 1], children[at]) = (new, leaf);
        cell.store(Arc::new(InnerNode::new(&separators, InnerChildren::Leaves(children), &self.order)));
    }

    /// Number of bytes that the nodes take.
    pub(crate) fn memory_bytes(&self) -> u64 {
        fn below(node: &InnerNode, pin: &Pin) -> u64 {
            let under = node.child_nodes.iter().map(|cell| below(cell.load_pinned(pin), pin));
            node.memory_bytes() + under.sum::<u64>()
        }
        let pin = Pin::new();
        below(self.root.load_pinned(&pin), &pin)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::testing::{SeededRng, TestOrder};

    /// Checks every lookup against a map from separators to leaves. The separator of the leftmost leaf is below all
    /// keys.
    fn check(inner: &InnerTree, model: &BTreeMap<Vec<u8>, u64>, leftmost: u64, keys: &[Vec<u8>]) {
        let pin = Pin::new();
        for key in keys {
            let at = model.range(..=key.clone()).next_back();
            let behind = model.range((std::ops::Bound::Excluded(key.clone()), std::ops::Bound::Unbounded)).next();
            let expected = at.map_or(leftmost, |(_, leaf)| *leaf);
            assert_eq!(inner.find_leaf(LeafTarget::Key(key), &pin), expected, "{key:?}");
            let found = inner.find_position(LeafTarget::Key(key), &pin);
            let (low, high) = (at.map(|(key, _)| key.as_slice()), behind.map(|(key, _)| key.as_slice()));
            assert_eq!((found.leaf, found.low, found.high), (expected, low, high));
            assert_eq!((found.sibling(-1), found.sibling(1)), inner.neighbours(key, &pin));
            assert_eq!(found.sibling(0), Some(expected));
            let before = model.range(..key.clone()).next_back().map_or(leftmost, |(_, leaf)| *leaf);
            assert_eq!(inner.find_leaf(LeafTarget::BeforeKey(key), &pin), before);
        }
        let last = model.last_key_value().map_or(leftmost, |(_, leaf)| *leaf);
        assert_eq!(
            (inner.find_leaf(LeafTarget::Last, &pin), inner.find_leaf(LeafTarget::First, &pin)),
            (last, leftmost)
        );
    }

    fn keys(count: usize, seed: u64) -> Vec<Vec<u8>> {
        let mut rng = SeededRng::new(seed);
        (0..count)
            .map(|_| match rng.below(4) {
                0 => format!("user:{:08}", rng.below(10_000)).into_bytes(),
                1 => (0..rng.below(4)).map(|_| rng.below(3) as u8 * 127).collect(),
                _ => rng.next_u64().to_be_bytes()[..1 + rng.below(8)].to_vec(),
            })
            .collect()
    }

    #[test]
    fn inner_tree_matches_map_when_it_changes() {
        let inner = InnerTree::bulk_load(&[(Vec::new(), 1)], KeyOrder::bytewise());
        let mut model = BTreeMap::new();
        let all = keys(6000, 3);
        let (mut next, mut rng) = (2, SeededRng::new(4));
        for (n, key) in all.iter().enumerate() {
            if n % 3000 < 2000 {
                if !key.is_empty() && !model.contains_key(key) {
                    inner.insert(key, next);
                    model.insert(key.clone(), next);
                    next += 1;
                }
            } else if let Some((removed, _)) = model.range(all[rng.below(all.len())].clone()..).next() {
                let removed = removed.clone();
                let pin = Pin::new();
                // If the leaf is the first of its node, its keys belong to the leaf to the right.
                let (left, _) = inner.neighbours(&removed, &pin);
                drop(pin);
                inner.remove(&removed);
                model.remove(&removed);
                if left.is_none() {
                    let pin = Pin::new();
                    let next_position = inner.find_position(LeafTarget::Key(&removed), &pin);
                    // Either the separator of that leaf is lower now, or a whole node was removed and its keys belong
                    // to the left.
                    if let Some((old, leaf)) = model.range(removed.clone()..).next()
                        && *leaf == next_position.leaf
                    {
                        let (old, leaf, low) = (old.clone(), *leaf, next_position.low.map(<[u8]>::to_vec));
                        model.remove(&old);
                        model.insert(low.unwrap(), leaf);
                    }
                }
            }
            if n % 500 == 499 {
                check(&inner, &model, 1, &all[..1000]);
            }
        }
        assert!(model.len() > 500 && inner.memory_bytes() > 10_000);
    }

    #[test]
    fn ascending_insertion_leaves_full_nodes() {
        let inner = InnerTree::bulk_load(&[(Vec::new(), 0)], KeyOrder::bytewise());
        let all: Vec<Vec<u8>> = (1..10_000u64).map(|n| format!("{n:09}").into_bytes()).collect();
        let mut model = BTreeMap::new();
        for (n, key) in all.iter().enumerate() {
            inner.insert(key, n as u64 + 1);
            model.insert(key.clone(), n as u64 + 1);
        }
        check(&inner, &model, 0, &all);
        let each = inner.memory_bytes() as f64 / all.len() as f64;
        assert!(each < 40.0, "{each} bytes for each leaf with a separator of 9");
    }

    #[test]
    fn bulk_load_works_in_any_key_order() {
        for count in [1, 2, 52, 53, 5000] {
            let mut all: Vec<Vec<u8>> = keys(count, 9);
            all.sort();
            all.dedup();
            let leaves: Vec<_> = all.iter().cloned().zip(1..).collect();
            let model = leaves.iter().skip(1).cloned().collect();
            check(&InnerTree::bulk_load(&leaves, KeyOrder::bytewise()), &model, 1, &all);

            all.reverse();
            let leaves: Vec<_> = all.iter().cloned().zip(1..).collect();
            let reversed = InnerTree::bulk_load(&leaves, KeyOrder::custom(Arc::new(TestOrder::Reversed)));
            let pin = Pin::new();
            for (key, leaf) in &leaves {
                assert_eq!(reversed.find_leaf(LeafTarget::Key(key), &pin), *leaf);
                assert_eq!(reversed.find_leaf(LeafTarget::BeforeKey(key), &pin), *leaf - u64::from(*leaf > 1));
            }
        }
    }

    #[test]
    fn lookup_never_goes_back_while_nodes_split() {
        // Leaf n has the keys from n on, until leaves are inserted between: the leaf found is never behind the key.
        let inner = InnerTree::bulk_load(&[(Vec::new(), 0)], KeyOrder::bytewise());
        let count: u64 = if cfg!(miri) { 300 } else { 20_000 };
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for seed in 0..2 {
                let (inner, stop) = (&inner, &stop);
                s.spawn(move || {
                    let mut rng = SeededRng::with_stream(seed, 1);
                    let mut seen = vec![0; count as usize];
                    while !stop.load(Ordering::Relaxed) {
                        let key = rng.below(count as usize) as u64;
                        let found = inner.find_leaf(LeafTarget::Key(&key.to_be_bytes()), &Pin::new());
                        assert!(found <= key && found >= seen[key as usize], "an earlier leaf than before");
                        seen[key as usize] = found;
                    }
                });
            }
            let mut order: Vec<u64> = (1..count).collect();
            let mut rng = SeededRng::with_stream(7, 2);
            (1..order.len()).for_each(|n| order.swap(n, rng.below(n + 1)));
            for n in order {
                inner.insert(&n.to_be_bytes(), n);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
