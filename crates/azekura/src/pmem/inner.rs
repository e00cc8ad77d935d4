//! The way to the leaves: a tree of separators in memory.
//!
//! A node is never changed, but for the pointers to the nodes below it: it is made anew and put in place of the old
//! one, so a reader that is pinned walks from node to node without a lock or a version to look at. Nodes that are split
//! are replaced together, by one store above them, and stay as they were for those who are on their way. The old node
//! above them goes on to point to what was below it when it was replaced, which was after such a reader began. So what
//! a walk finds was right at some moment of the walk.
//!
//! One thread at a time changes it; any number walk.

use std::cmp::Ordering as Order;
use std::sync::Arc;

use crate::base::KeyOrder;
use crate::mem::epoch::{EpochCell, Pin};
use crate::mem::prefetch::prefetch;

/// Children of a node.
const FAN: usize = 64;
/// Children of a node when the tree is built at once: some room is left for those to come.
const BUILT: usize = 52;

/// Which leaf is wanted.
#[derive(Clone, Copy)]
pub(crate) enum Goal<'a> {
    /// The one where this key is, or would be.
    At(&'a [u8]),
    /// The one where the last key before this one is, or one to the right of it.
    Before(&'a [u8]),
    First,
    Last,
}

/// A leaf, and what its keys lie between; `None` = nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found<'p> {
    pub(crate) leaf: u64,
    /// Its keys are not before this.
    pub(crate) low: Option<&'p [u8]>,
    /// Its keys are before this; others in it belong to the leaf behind it.
    pub(crate) high: Option<&'p [u8]>,
    /// Those that hang on the same node, and its number among them.
    all: &'p [u64],
    at: usize,
}

impl Found<'_> {
    /// The leaf so many leaves on, or, below 0, back, as far as they hang on the same node.
    #[inline]
    pub(crate) fn beside(&self, leaves: isize) -> Option<u64> {
        self.all.get(self.at.wrapping_add_signed(leaves)).copied()
    }
}

type Cell = EpochCell<Node>;

/// A node: separator `n` stands between the children `n` and `n + 1`, is behind every key of the former and not behind
/// any of the latter. One more of both fits in than belongs there: what is split was that large for a moment.
#[repr(C, align(64))]
struct Node {
    /// What all separators begin with, in bytes.
    common: u32,
    count: u16,
    /// How many levels of nodes are below it.
    level: u16,
    /// The first eight bytes of what all begin with, as of [`head_of`].
    begin: u64,
    /// Above the lowest level.
    nodes: Box<[Cell]>,
    /// The separators one behind the other, and where each ends.
    ends: Box<[u32]>,
    bytes: Box<[u8]>,
    /// Where the order is that of the bytes: four bytes of each separator behind what all of them begin with, as of
    /// [`short_head`], and behind the last one the highest numbers. In the node itself, as what is looked at in every
    /// walk, so that all of it can be fetched at once.
    heads: [i32; FAN],
    /// On the lowest level: offsets in the pool.
    leaves: [u64; FAN + 1],
}

enum Child {
    Leaf(u64),
    Node(Arc<Node>),
}

enum Children {
    Leaves(Vec<u64>),
    Nodes(Vec<Arc<Node>>),
}

impl Children {
    fn len(&self) -> usize {
        match self {
            Children::Leaves(leaves) => leaves.len(),
            Children::Nodes(nodes) => nodes.len(),
        }
    }

    fn insert(&mut self, at: usize, child: Child) {
        match (self, child) {
            (Children::Leaves(leaves), Child::Leaf(leaf)) => leaves.insert(at, leaf),
            (Children::Nodes(nodes), Child::Node(node)) => nodes.insert(at, node),
            _ => unreachable!("children of a node are on one level"),
        }
    }

    fn remove(&mut self, at: usize) {
        match self {
            Children::Leaves(leaves) => drop(leaves.remove(at)),
            Children::Nodes(nodes) => drop(nodes.remove(at)),
        }
    }

    fn split_off(&mut self, at: usize) -> Children {
        match self {
            Children::Leaves(leaves) => Children::Leaves(leaves.split_off(at)),
            Children::Nodes(nodes) => Children::Nodes(nodes.split_off(at)),
        }
    }
}

/// Eight bytes of `key` from `from` on as a big-endian number, as if zeros followed: of two keys the numbers are never
/// in the opposite order.
#[inline]
pub(crate) fn head_of(key: &[u8], from: usize) -> u64 {
    let rest = key.get(from..).unwrap_or_default();
    if let Some(word) = rest.first_chunk() {
        return u64::from_be_bytes(*word);
    }
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_be_bytes(word)
}

/// The four bytes of `key` from `from` on, ordered as these are: signed, because that is what processors compare many
/// of at once.
#[inline]
fn short_head(key: &[u8], from: usize) -> i32 {
    ((head_of(key, from) >> 32) as u32 ^ 1 << 31).cast_signed()
}

/// How many of `heads` are lower than `head`. All are looked at: that is quicker than to look where it is, because
/// nothing waits for anything, and which way a search goes nobody can foresee.
#[inline]
fn lower(heads: &[i32; FAN], head: i32) -> usize {
    heads.iter().map(|other| u32::from(*other < head)).sum::<u32>() as usize
}

impl Node {
    fn new(separators: &[&[u8]], children: Children, order: &KeyOrder) -> Node {
        assert_eq!(separators.len() + 1, children.len(), "a separator stands between each two children");
        let mut end = 0;
        let ends = separators.iter().map(|separator| {
            end += separator.len();
            u32::try_from(end).expect("64 keys of at most 64 KiB")
        });
        let mut node = Node {
            common: 0,
            count: children.len() as u16,
            level: 0,
            begin: 0,
            nodes: Box::default(),
            ends: ends.collect(),
            bytes: separators.concat().into(),
            heads: [i32::MAX; FAN],
            leaves: [0; FAN + 1],
        };
        match children {
            Children::Leaves(leaves) => node.leaves[..leaves.len()].copy_from_slice(&leaves),
            Children::Nodes(nodes) => {
                node.level = nodes[0].level + 1;
                node.nodes = nodes.into_iter().map(EpochCell::new).collect();
            }
        }
        if let (true, Some(first), Some(last)) = (order.is_bytewise(), separators.first(), separators.last()) {
            // What the first and the last begin with all between them do.
            let common = first.iter().zip(*last).take_while(|(a, b)| a == b).count();
            node.common = common as u32;
            node.begin = head_of(&first[..common], 0);
            for (head, separator) in node.heads.iter_mut().zip(separators) {
                *head = short_head(separator, common);
            }
        }
        node
    }

    #[inline]
    fn len(&self) -> usize {
        self.count as usize
    }

    #[inline]
    fn separator(&self, n: usize) -> &[u8] {
        let start = if n == 0 { 0 } else { self.ends[n - 1] as usize };
        &self.bytes[start..self.ends[n] as usize]
    }

    fn separators(&self) -> Vec<&[u8]> {
        (0..self.ends.len()).map(|n| self.separator(n)).collect()
    }

    fn children(&self) -> Children {
        if self.nodes.is_empty() {
            Children::Leaves(self.leaves[..self.len()].to_vec())
        } else {
            Children::Nodes(self.nodes.iter().map(EpochCell::share).collect())
        }
    }

    /// How many separators are before `key`, or, with `or_equal`, not behind it: the number of the child.
    #[inline]
    fn rank(&self, key: &[u8], or_equal: bool, order: &KeyOrder, bytewise: bool) -> usize {
        let (mut low, mut high) = (0, self.len() - 1);
        if bytewise {
            let common = self.common as usize;
            if common > 0 {
                let beside = self.beside_common(key, common);
                if beside.is_ne() {
                    return if beside.is_lt() { 0 } else { high };
                }
            }
            let head = short_head(key, common);
            low = lower(&self.heads, head);
            if low >= high || self.heads[low] != head {
                return low;
            }
            high = low + self.heads[low..high].partition_point(|separator| *separator == head);
        }
        while low < high {
            let middle = (low + high) / 2;
            let of_key = order.cmp(self.separator(middle), key);
            if of_key.is_lt() || or_equal && of_key.is_eq() { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// The leaves on both sides of leaf `at`.
    fn beside(&self, at: usize) -> (Option<u64>, Option<u64>) {
        let leaves = &self.leaves[..self.len()];
        (at.checked_sub(1).map(|at| leaves[at]), leaves.get(at + 1).copied())
    }

    /// The node of `cell`, below this one. What every walk looks at of it is fetched together.
    #[inline]
    fn below<'p>(&self, cell: &'p Cell, pin: &'p Pin) -> &'p Node {
        let node = cell.read(pin);
        prefetch(&node.count);
        prefetch(&node.heads);
        if self.level == 1 {
            prefetch(&node.leaves);
        }
        node
    }

    /// Where `key` is: before all keys that begin as all separators do, behind them, or among them. For what begins in
    /// few bytes alike they are in the node itself.
    #[inline]
    fn beside_common(&self, key: &[u8], common: usize) -> Order {
        if common <= 8 && common <= key.len() {
            return (head_of(key, 0) & (u64::MAX << (64 - 8 * common))).cmp(&self.begin);
        }
        let begins = &self.bytes[..common];
        if key.starts_with(begins) { Order::Equal } else { key.cmp(begins) }
    }

    /// With `instead`, if there is one, in place of child `at`, `child` behind it, and `separator` between them.
    fn with(&self, at: usize, instead: Option<Node>, separator: &[u8], child: Child, order: &KeyOrder) -> Node {
        let (mut separators, mut children) = (self.separators(), self.children());
        if let (Some(node), Children::Nodes(nodes)) = (instead, &mut children) {
            nodes[at] = Arc::new(node);
        }
        separators.insert(at, separator);
        children.insert(at + 1, child);
        Node::new(&separators, children, order)
    }

    /// Without child `at`; what belonged there goes to its left neighbour, or else to the right one.
    fn without(&self, at: usize, order: &KeyOrder) -> Node {
        let (mut separators, mut children) = (self.separators(), self.children());
        separators.remove(at.saturating_sub(1));
        children.remove(at);
        Node::new(&separators, children, order)
    }

    /// The first `keep` children, the separator behind them, and the others.
    fn halves(&self, keep: usize, order: &KeyOrder) -> (Node, Vec<u8>, Node) {
        let separators = self.separators();
        let mut left = self.children();
        let right = left.split_off(keep);
        let left = Node::new(&separators[..keep - 1], left, order);
        (left, self.separator(keep - 1).to_vec(), Node::new(&separators[keep..], right, order))
    }

    fn bytes(&self) -> u64 {
        let beside = size_of_val(&*self.nodes) + size_of_val(&*self.ends) + self.bytes.len();
        // With two counts in front, which are as large as the alignment.
        (size_of::<Node>() + align_of::<Node>() + beside) as u64
    }
}

/// The tree above the leaves of one pool.
pub(crate) struct Inner {
    root: Cell,
    order: KeyOrder,
    bytewise: bool,
}

/// The nodes from the root down to the leaf, with the number of the child that was taken in each.
type Path<'p> = Vec<(&'p Cell, &'p Node, usize)>;

impl Inner {
    /// The way to `leaves`, at least one, each with what separates it from the one before (that of the first is not
    /// looked at).
    pub(crate) fn build(leaves: &[(Vec<u8>, u64)], order: KeyOrder) -> Inner {
        let mut level: Vec<(&[u8], Node)> = Vec::new();
        for part in leaves.chunks(BUILT) {
            let separators: Vec<&[u8]> = part[1..].iter().map(|(separator, _)| separator.as_slice()).collect();
            let children = Children::Leaves(part.iter().map(|(_, leaf)| *leaf).collect());
            level.push((&part[0].0, Node::new(&separators, children, &order)));
        }
        while level.len() > 1 {
            let mut above = Vec::new();
            let mut nodes = level.into_iter().peekable();
            while nodes.peek().is_some() {
                let part: Vec<_> = nodes.by_ref().take(BUILT).collect();
                let separators: Vec<&[u8]> = part[1..].iter().map(|(separator, _)| *separator).collect();
                let first = part[0].0;
                let children = part.into_iter().map(|(_, node)| Arc::new(node)).collect();
                above.push((first, Node::new(&separators, Children::Nodes(children), &order)));
            }
            level = above;
        }
        let (_, root) = level.pop().expect("there is a leaf");
        Inner { root: EpochCell::new(Arc::new(root)), bytewise: order.is_bytewise(), order }
    }

    /// The number of the child where `goal` is.
    #[inline]
    fn child(&self, node: &Node, goal: Goal<'_>) -> usize {
        match goal {
            Goal::At(key) => node.rank(key, true, &self.order, self.bytewise),
            Goal::Before(key) => node.rank(key, false, &self.order, self.bytewise),
            Goal::First => 0,
            Goal::Last => node.len() - 1,
        }
    }

    /// The leaf of `goal`.
    #[inline]
    pub(crate) fn leaf(&self, goal: Goal<'_>, pin: &Pin) -> u64 {
        let mut node = self.root.read(pin);
        loop {
            let at = self.child(node, goal);
            let Some(below) = node.nodes.get(at) else { return node.leaves[at] };
            node = node.below(below, pin);
        }
    }

    /// The leaf of `goal`, and what lies beside it.
    pub(crate) fn find<'p>(&'p self, goal: Goal<'_>, pin: &'p Pin) -> Found<'p> {
        let mut node = self.root.read(pin);
        let (mut low, mut high) = (None, None);
        loop {
            let at = self.child(node, goal);
            if let Some(before) = at.checked_sub(1) {
                low = Some(node.separator(before));
            }
            if at < node.ends.len() {
                high = Some(node.separator(at));
            }
            let Some(below) = node.nodes.get(at) else {
                return Found { leaf: node.leaves[at], low, high, all: &node.leaves[..node.len()], at };
            };
            node = node.below(below, pin);
        }
    }

    /// The leaves on both sides of that of `key` that hang on the same node.
    pub(crate) fn neighbours(&self, key: &[u8], pin: &Pin) -> (Option<u64>, Option<u64>) {
        let path = self.path(key, pin);
        let &(_, node, at) = path.last().expect("there is a root");
        node.beside(at)
    }

    fn path<'p>(&'p self, key: &[u8], pin: &'p Pin) -> Path<'p> {
        let (mut path, mut cell): (Path<'p>, &Cell) = (Vec::new(), &self.root);
        loop {
            let node = cell.read(pin);
            let at = self.child(node, Goal::At(key));
            path.push((cell, node, at));
            let Some(below) = node.nodes.get(at) else { return path };
            cell = below;
        }
    }

    /// Puts `leaf` behind the leaf where `separator` is now; keys from there on are its own.
    pub(crate) fn insert(&self, separator: &[u8], leaf: u64) {
        let pin = Pin::new();
        let mut change: Option<(Node, Vec<u8>, Node)> = None;
        for (cell, node, at) in self.path(separator, &pin).into_iter().rev() {
            let whole = match change.take() {
                None => node.with(at, None, separator, Child::Leaf(leaf), &self.order),
                Some((left, between, right)) => {
                    node.with(at, Some(left), &between, Child::Node(Arc::new(right)), &self.order)
                }
            };
            if whole.len() <= FAN {
                return cell.store(Arc::new(whole));
            }
            // Ascending, the full node stays full.
            let keep = if at + 1 == FAN { FAN } else { FAN / 2 };
            change = Some(whole.halves(keep, &self.order));
        }
        let (left, between, right) = change.expect("the root is on every path, and was not stored");
        let children = Children::Nodes(vec![Arc::new(left), Arc::new(right)]);
        self.root.store(Arc::new(Node::new(&[&between], children, &self.order)));
    }

    /// Takes the leaf where `key` is away; what belongs there goes to the leaf before it on the same node, or else to
    /// the one behind it. The last leaf of all stays.
    pub(crate) fn remove(&self, key: &[u8]) {
        let pin = Pin::new();
        let path = self.path(key, &pin);
        for (cell, node, at) in path.into_iter().rev() {
            if node.len() > 1 {
                return cell.store(Arc::new(node.without(at, &self.order)));
            }
        }
    }

    /// Puts `leaf` in the place of the leaf behind `old`, a separator that stands on its node, and `new` in the place
    /// of that separator.
    pub(crate) fn replace(&self, old: &[u8], new: &[u8], leaf: u64) {
        let pin = Pin::new();
        let path = self.path(old, &pin);
        let &(cell, node, at) = path.last().expect("there is a root");
        let (mut separators, mut children) = (node.separators(), node.leaves[..node.len()].to_vec());
        debug_assert!(at > 0 && separators[at - 1] == old, "it separates two leaves of one node");
        (separators[at - 1], children[at]) = (new, leaf);
        cell.store(Arc::new(Node::new(&separators, Children::Leaves(children), &self.order)));
    }

    /// The bytes that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        fn below(node: &Node, pin: &Pin) -> u64 {
            let under = node.nodes.iter().map(|cell| below(cell.read(pin), pin));
            node.bytes() + under.sum::<u64>()
        }
        let pin = Pin::new();
        below(self.root.read(&pin), &pin)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::base::comparator::Comparator;
    use crate::vfs::dice::Dice;

    struct Reversed;
    impl Comparator for Reversed {
        fn name(&self) -> &str {
            "reversed"
        }
        fn compare(&self, a: &[u8], b: &[u8]) -> std::cmp::Ordering {
            b.cmp(a)
        }
    }

    /// Checks every question against a map from separators to leaves; that of the leftmost leaf is below all keys.
    fn check(inner: &Inner, model: &BTreeMap<Vec<u8>, u64>, leftmost: u64, keys: &[Vec<u8>]) {
        let pin = Pin::new();
        for key in keys {
            let at = model.range(..=key.clone()).next_back();
            let behind = model.range((std::ops::Bound::Excluded(key.clone()), std::ops::Bound::Unbounded)).next();
            let expected = at.map_or(leftmost, |(_, leaf)| *leaf);
            assert_eq!(inner.leaf(Goal::At(key), &pin), expected, "{key:?}");
            let found = inner.find(Goal::At(key), &pin);
            let (low, high) = (at.map(|(key, _)| key.as_slice()), behind.map(|(key, _)| key.as_slice()));
            assert_eq!((found.leaf, found.low, found.high), (expected, low, high));
            assert_eq!((found.beside(-1), found.beside(1)), inner.neighbours(key, &pin));
            assert_eq!(found.beside(0), Some(expected));
            let before = model.range(..key.clone()).next_back().map_or(leftmost, |(_, leaf)| *leaf);
            assert_eq!(inner.leaf(Goal::Before(key), &pin), before);
        }
        let last = model.last_key_value().map_or(leftmost, |(_, leaf)| *leaf);
        assert_eq!((inner.leaf(Goal::Last, &pin), inner.leaf(Goal::First, &pin)), (last, leftmost));
    }

    fn keys(count: usize, seed: u64) -> Vec<Vec<u8>> {
        let mut dice = Dice::new(seed, 0);
        (0..count)
            .map(|_| match dice.below(4) {
                0 => format!("user:{:08}", dice.below(10_000)).into_bytes(),
                1 => (0..dice.below(4)).map(|_| dice.below(3) as u8 * 127).collect(),
                _ => dice.throw().to_be_bytes()[..1 + dice.below(8)].to_vec(),
            })
            .collect()
    }

    #[test]
    fn it_answers_as_a_map_does_while_it_grows_and_shrinks() {
        let inner = Inner::build(&[(Vec::new(), 1)], KeyOrder::bytewise());
        let mut model = BTreeMap::new();
        let all = keys(6000, 3);
        let (mut next, mut dice) = (2, Dice::new(4, 0));
        for (n, key) in all.iter().enumerate() {
            if n % 3000 < 2000 {
                if !key.is_empty() && !model.contains_key(key) {
                    inner.insert(key, next);
                    model.insert(key.clone(), next);
                    next += 1;
                }
            } else if let Some((gone, _)) = model.range(all[dice.below(all.len())].clone()..).next() {
                let gone = gone.clone();
                let pin = Pin::new();
                // Where the leaf is the first of its node, what it had goes to the right.
                let (left, _) = inner.neighbours(&gone, &pin);
                drop(pin);
                inner.remove(&gone);
                model.remove(&gone);
                if left.is_none() {
                    let pin = Pin::new();
                    let heir = inner.find(Goal::At(&gone), &pin);
                    // Its separator moved down, or a whole node is gone and what it had went to the left.
                    if let Some((old, leaf)) = model.range(gone.clone()..).next()
                        && *leaf == heir.leaf
                    {
                        let (old, leaf, low) = (old.clone(), *leaf, heir.low.map(<[u8]>::to_vec));
                        model.remove(&old);
                        model.insert(low.unwrap(), leaf);
                    }
                }
            }
            if n % 500 == 499 {
                check(&inner, &model, 1, &all[..1000]);
            }
        }
        assert!(model.len() > 500 && inner.bytes() > 10_000);
    }

    #[test]
    fn ascending_insertion_leaves_full_nodes() {
        let inner = Inner::build(&[(Vec::new(), 0)], KeyOrder::bytewise());
        let all: Vec<Vec<u8>> = (1..10_000u64).map(|n| format!("{n:09}").into_bytes()).collect();
        let mut model = BTreeMap::new();
        for (n, key) in all.iter().enumerate() {
            inner.insert(key, n as u64 + 1);
            model.insert(key.clone(), n as u64 + 1);
        }
        check(&inner, &model, 0, &all);
        let each = inner.bytes() as f64 / all.len() as f64;
        assert!(each < 40.0, "{each} bytes for each leaf with a separator of 9");
    }

    #[test]
    fn it_is_built_at_once_in_any_order() {
        for count in [1, 2, 52, 53, 5000] {
            let mut all: Vec<Vec<u8>> = keys(count, 9);
            all.sort();
            all.dedup();
            let leaves: Vec<_> = all.iter().cloned().zip(1..).collect();
            let model = leaves.iter().skip(1).cloned().collect();
            check(&Inner::build(&leaves, KeyOrder::bytewise()), &model, 1, &all);

            all.reverse();
            let leaves: Vec<_> = all.iter().cloned().zip(1..).collect();
            let reversed = Inner::build(&leaves, KeyOrder::custom(Arc::new(Reversed)));
            let pin = Pin::new();
            for (key, leaf) in &leaves {
                assert_eq!(reversed.leaf(Goal::At(key), &pin), *leaf);
                assert_eq!(reversed.leaf(Goal::Before(key), &pin), *leaf - u64::from(*leaf > 1));
            }
        }
    }

    #[test]
    fn walks_end_where_keys_were_or_are_while_nodes_split() {
        // Leaf n has the keys from n on, until others come between: what is found is never behind the key.
        let inner = Inner::build(&[(Vec::new(), 0)], KeyOrder::bytewise());
        let count: u64 = if cfg!(miri) { 300 } else { 20_000 };
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for seed in 0..2 {
                let (inner, stop) = (&inner, &stop);
                s.spawn(move || {
                    let mut dice = Dice::new(seed, 1);
                    let mut seen = vec![0; count as usize];
                    while !stop.load(Ordering::Relaxed) {
                        let key = dice.below(count as usize) as u64;
                        let found = inner.leaf(Goal::At(&key.to_be_bytes()), &Pin::new());
                        assert!(found <= key && found >= seen[key as usize], "a walk went back");
                        seen[key as usize] = found;
                    }
                });
            }
            let mut order: Vec<u64> = (1..count).collect();
            let mut dice = Dice::new(7, 2);
            (1..order.len()).for_each(|n| order.swap(n, dice.below(n + 1)));
            for n in order {
                inner.insert(&n.to_be_bytes(), n);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
