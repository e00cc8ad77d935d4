//! The comparators of all tests: orders of keys, each with a form of the key that sorts the same way as bytes, and a
//! comparator that counts, blocks, panics or calls back.

use std::cmp::Ordering;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering as Memory};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::base::comparator::Comparator;

/// The order of a partition's keys.
///
/// ```
/// use azekura::testing::TestOrder;
/// assert!(TestOrder::Reversed.canonical(b"b") < TestOrder::Reversed.canonical(b"a"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestOrder {
    /// Ascending, as bytes. Its comparator does not say that it is bytewise.
    Bytes,
    /// Descending; different bytes are different keys.
    Reversed,
    /// ASCII letters of either case are the same key.
    AnyCase,
    /// The same, with a canonical form that can be hashed.
    AnyCaseHashed,
    /// As `AnyCase`, descending.
    ReversedAnyCase,
    /// Descending, for [checksummed](TestOrder::valid_key) keys of any length; panics when it is given another byte
    /// string.
    ChecksummedReversed,
    /// Little-endian numbers of eight bytes, the highest two of which are a checksum of the others; panics as
    /// `ChecksummedReversed` does.
    ChecksummedNumbers,
    /// As `ChecksummedNumbers`, but it does not say that different bytes are different keys, and has a canonical form.
    ChecksummedNumbersHashed,
}

fn key_checksum(bytes: &[u8]) -> [u8; 2] {
    let sum = bytes.iter().fold(0x5EA1u16, |sum, byte| sum.rotate_left(5) ^ u16::from(*byte).wrapping_mul(0x9E37));
    sum.to_be_bytes()
}

impl TestOrder {
    /// Every order, that of bytes first.
    pub const ALL: [TestOrder; 8] = [
        TestOrder::Bytes,
        TestOrder::Reversed,
        TestOrder::AnyCase,
        TestOrder::AnyCaseHashed,
        TestOrder::ReversedAnyCase,
        TestOrder::ChecksummedReversed,
        TestOrder::ChecksummedNumbers,
        TestOrder::ChecksummedNumbersHashed,
    ];

    /// The comparator; `None` for the order of bytes.
    pub fn comparator(self) -> Option<Arc<dyn Comparator>> {
        match self {
            TestOrder::Bytes => None,
            _ => Some(Arc::new(self)),
        }
    }

    /// Whether the comparator panics on a byte string that [`valid_key`](TestOrder::valid_key) did not make.
    pub fn is_strict(self) -> bool {
        matches!(
            self,
            TestOrder::ChecksummedReversed | TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed
        )
    }

    /// A key that this order accepts, made of any bytes. The orders that panic on unknown byte strings accept keys that
    /// end in a checksum: a key that the engine invents does not.
    pub fn valid_key(self, bytes: &[u8]) -> Vec<u8> {
        let body = match self {
            TestOrder::ChecksummedReversed => bytes[..bytes.len().min(65_533)].to_vec(),
            TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed => {
                let sum = bytes.iter().fold(bytes.len() as u64, |sum, byte| sum.wrapping_mul(257) + u64::from(*byte));
                sum.to_le_bytes()[..6].to_vec()
            }
            _ => return bytes.to_vec(),
        };
        [&body[..], &key_checksum(&body)].concat()
    }

    /// Panics if `key` was not made by [`valid_key`](TestOrder::valid_key).
    fn check_valid(self, key: &[u8]) {
        let body = match self {
            TestOrder::ChecksummedReversed if key.len() >= 2 => &key[..key.len() - 2],
            TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed if key.len() == 8 => &key[..6],
            TestOrder::ChecksummedReversed | TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed => {
                panic!("{self:?} was given {key:.20?}")
            }
            _ => return,
        };
        assert!(key.ends_with(&key_checksum(body)), "{self:?} was given {key:.20?}");
    }

    /// A form of `key` whose byte order is this order; equal keys have equal forms.
    pub fn canonical(self, key: &[u8]) -> Vec<u8> {
        match self {
            TestOrder::Bytes => key.to_vec(),
            TestOrder::AnyCase | TestOrder::AnyCaseHashed => key.to_ascii_lowercase(),
            TestOrder::ReversedAnyCase => TestOrder::Reversed.canonical(&key.to_ascii_lowercase()),
            TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed => key.iter().rev().copied().collect(),
            TestOrder::Reversed | TestOrder::ChecksummedReversed => {
                let mut out: Vec<u8> = key.iter().flat_map(|byte| (255 - u16::from(*byte)).to_be_bytes()).collect();
                out.extend_from_slice(&256u16.to_be_bytes());
                out
            }
        }
    }
}

impl Comparator for TestOrder {
    fn name(&self) -> &str {
        match self {
            TestOrder::Bytes => "bytes",
            TestOrder::Reversed => "reversed",
            TestOrder::AnyCase => "any case",
            TestOrder::AnyCaseHashed => "any case, hashed",
            TestOrder::ReversedAnyCase => "any case, reversed",
            TestOrder::ChecksummedReversed => "sealed",
            TestOrder::ChecksummedNumbers => "fixed",
            TestOrder::ChecksummedNumbersHashed => "fixed, hashed",
        }
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        self.check_valid(a);
        self.check_valid(b);
        match self {
            TestOrder::Bytes => a.cmp(b),
            TestOrder::Reversed | TestOrder::ChecksummedReversed => b.cmp(a),
            TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed => a.iter().rev().cmp(b.iter().rev()),
            TestOrder::AnyCase | TestOrder::AnyCaseHashed => a.to_ascii_lowercase().cmp(&b.to_ascii_lowercase()),
            TestOrder::ReversedAnyCase => TestOrder::AnyCase.compare(b, a),
        }
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        matches!(
            self,
            TestOrder::AnyCase
                | TestOrder::AnyCaseHashed
                | TestOrder::ReversedAnyCase
                | TestOrder::ChecksummedNumbersHashed
        )
    }

    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        self.check_valid(key);
        out.clear();
        match self {
            TestOrder::ChecksummedNumbersHashed => out.extend_from_slice(key),
            _ => out.extend(key.iter().map(u8::to_ascii_lowercase)),
        }
        self.has_canonical()
    }

    fn has_canonical(&self) -> bool {
        matches!(self, TestOrder::AnyCaseHashed | TestOrder::ChecksummedNumbersHashed)
    }

    fn short_successor(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        match self {
            TestOrder::Reversed => {} // the empty key is the last one
            _ => out.extend_from_slice(key),
        }
    }
}

/// Compares with a function, which may contradict itself.
///
/// ```
/// use azekura::Comparator;
/// use azekura::testing::FnComparator;
/// use std::cmp::Ordering;
/// assert!(FnComparator(|_: &[u8], _: &[u8]| Ordering::Less).compare(b"a", b"a").is_lt());
/// ```
pub struct FnComparator<F>(pub F);

impl<F: Fn(&[u8], &[u8]) -> Ordering + Send + Sync> Comparator for FnComparator<F> {
    fn name(&self) -> &str {
        "function"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        (self.0)(a, b)
    }
}

type CompareHook = Box<dyn Fn(&[u8], &[u8]) + Send + Sync>;
type CompareFilter = Box<dyn Fn(&[u8], &[u8]) -> bool + Send + Sync>;

/// A comparator that counts its comparisons. A test can make them block, panic or call a function.
///
/// ```
/// use azekura::Comparator;
/// use azekura::testing::{TestComparator, TestOrder};
/// let order = TestComparator::new(TestOrder::Reversed);
/// assert!(order.compare(b"a", b"b").is_gt() && order.comparisons() == 1);
/// ```
pub struct TestComparator {
    order: TestOrder,
    name: String,
    /// All optional methods have their defaults.
    is_minimal: bool,
    has_wrong_separators: bool,
    hook: Option<CompareHook>,
    waits_if: Option<CompareFilter>,
    call: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    comparisons: AtomicU64,
    is_blocked: AtomicBool,
    waiting: AtomicU64,
    panics: AtomicBool,
}

impl TestComparator {
    /// A comparator with the order and the name of `order`.
    pub fn new(order: TestOrder) -> TestComparator {
        TestComparator {
            order,
            name: order.name().to_owned(),
            is_minimal: false,
            has_wrong_separators: false,
            hook: None,
            waits_if: None,
            call: Mutex::new(None),
            comparisons: AtomicU64::new(0),
            is_blocked: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            panics: AtomicBool::new(false),
        }
    }

    /// The same with the default of every optional method, so that equal keys may have different bytes.
    pub fn minimal(order: TestOrder) -> TestComparator {
        TestComparator { is_minimal: true, ..TestComparator::new(order) }
    }

    /// Changes the name.
    pub fn named(self, name: &str) -> TestComparator {
        TestComparator { name: name.to_owned(), ..self }
    }

    /// Its separators and successors are not between the keys that they should separate.
    pub fn with_wrong_separators(self) -> TestComparator {
        TestComparator { has_wrong_separators: true, ..self }
    }

    /// Calls `hook` in each comparison.
    pub fn with_hook(self, hook: impl Fn(&[u8], &[u8]) + Send + Sync + 'static) -> TestComparator {
        TestComparator { hook: Some(Box::new(hook)), ..self }
    }

    /// Only comparisons for which `waits` is true wait while the comparator is [blocked](TestComparator::block).
    pub fn waits_if(self, waits: impl Fn(&[u8], &[u8]) -> bool + Send + Sync + 'static) -> TestComparator {
        TestComparator { waits_if: Some(Box::new(waits)), ..self }
    }

    /// The next comparison calls `call`.
    pub fn call_once(&self, call: impl FnOnce() + Send + 'static) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(call));
    }

    /// Drops the call of [`call_once`](TestComparator::call_once). True if no comparison has made it.
    pub fn cancel_call(&self) -> bool {
        self.take_call().is_some()
    }

    fn take_call(&self) -> Option<Box<dyn FnOnce() + Send>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether comparisons panic from now on.
    pub fn set_panicking(&self, panics: bool) {
        self.panics.store(panics, Memory::SeqCst);
    }

    /// Makes comparisons wait until the guard is dropped.
    pub fn block(&self) -> BlockedComparator<'_> {
        self.is_blocked.store(true, Memory::SeqCst);
        BlockedComparator(self)
    }

    /// Number of comparisons that have waited.
    pub fn waiting(&self) -> u64 {
        self.waiting.load(Memory::SeqCst)
    }

    /// Number of comparisons so far.
    pub fn comparisons(&self) -> u64 {
        self.comparisons.load(Memory::SeqCst)
    }
}

/// Unblocks a [`TestComparator`] when dropped, also by a panic, because a waiting thread would hang the test.
///
/// ```
/// use azekura::testing::{TestComparator, TestOrder};
/// let order = TestComparator::new(TestOrder::Bytes);
/// drop(order.block());
/// assert_eq!(order.waiting(), 0);
/// ```
pub struct BlockedComparator<'a>(&'a TestComparator);

impl Drop for BlockedComparator<'_> {
    fn drop(&mut self) {
        self.0.is_blocked.store(false, Memory::SeqCst);
    }
}

impl Comparator for TestComparator {
    fn name(&self) -> &str {
        &self.name
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        self.comparisons.fetch_add(1, Memory::SeqCst);
        assert!(!self.panics.load(Memory::SeqCst), "the comparator panics");
        let waits = || self.is_blocked.load(Memory::SeqCst) && self.waits_if.as_ref().is_none_or(|waits| waits(a, b));
        if waits() {
            self.waiting.fetch_add(1, Memory::SeqCst);
            while self.is_blocked.load(Memory::SeqCst) {
                thread::sleep(Duration::from_millis(1));
            }
        }
        self.hook.iter().for_each(|hook| hook(a, b));
        self.take_call().into_iter().for_each(|call| call());
        self.order.compare(a, b)
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        self.is_minimal || self.order.can_keys_with_different_byte_contents_be_equal()
    }

    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        !self.is_minimal && Comparator::canonical(&self.order, key, out)
    }

    fn has_canonical(&self) -> bool {
        !self.is_minimal && self.order.has_canonical()
    }

    fn shortest_separator(&self, start: &[u8], limit: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(if self.has_wrong_separators { limit } else { start });
    }

    fn short_successor(&self, key: &[u8], out: &mut Vec<u8>) {
        out.clear();
        match (self.has_wrong_separators, self.is_minimal) {
            (true, _) => out.push(b'{'),
            (false, true) => out.extend_from_slice(key),
            (false, false) => self.order.short_successor(key, out),
        }
    }
}

impl fmt::Debug for TestComparator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestComparator").field("order", &self.order).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_forms_sort_as_the_comparators_do() {
        let keys: Vec<&[u8]> =
            vec![b"", b"\0", b"a", b"A", b"ab", b"AB", b"aB", b"b", b"\xff", b"\xff\xff", b"a\0", b"Zz"];
        for order in TestOrder::ALL {
            for a in &keys {
                for b in &keys {
                    let (a, b) = (&order.valid_key(a), &order.valid_key(b));
                    let (one, other) = (order.canonical(a), order.canonical(b));
                    assert_eq!(one.cmp(&other), order.compare(a, b), "{order:?}: {a:?} and {b:?}");
                }
            }
        }
    }
}
