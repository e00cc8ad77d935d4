//! Orders of keys: the engine gets a comparator, the model a form of the key that sorts the same way as bytes.

use std::cmp::Ordering;
use std::sync::Arc;

use azekura::{Comparator, DataBlockIndexType, PartitionCreateOptions};

/// The order of a partition's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Bytes,
    /// Descending; different bytes are different keys.
    Reversed,
    /// ASCII letters of either case are the same key.
    AnyCase,
    /// The same, with a canonical form that can be hashed.
    AnyCaseHashed,
    /// Descending, for [sealed](Order::seal) keys of any length; panics when it is given another byte string.
    Sealed,
    /// Little-endian numbers of eight bytes, the highest two of which seal the others; panics as `Sealed` does.
    Fixed,
    /// As `Fixed`, but it does not say that different bytes are different keys, and has a canonical form.
    FixedHashed,
}

pub(crate) const ORDERS: [Order; 7] = [
    Order::Bytes,
    Order::Reversed,
    Order::AnyCase,
    Order::AnyCaseHashed,
    Order::Sealed,
    Order::Fixed,
    Order::FixedHashed,
];

fn seal_of(bytes: &[u8]) -> [u8; 2] {
    let sum = bytes.iter().fold(0x5EA1u16, |sum, byte| sum.rotate_left(5) ^ u16::from(*byte).wrapping_mul(0x9E37));
    sum.to_be_bytes()
}

impl Order {
    /// The comparator; `None` for the order of bytes.
    pub(crate) fn comparator(self) -> Option<Arc<dyn Comparator>> {
        match self {
            Order::Bytes => None,
            _ => Some(Arc::new(self)),
        }
    }

    /// The options without what this order refuses: where equal keys cannot be hashed, no layout of blocks that does.
    pub(crate) fn allows(self, options: PartitionCreateOptions) -> PartitionCreateOptions {
        match self {
            Order::AnyCase => options.data_block_index_type(DataBlockIndexType::BinarySearch),
            _ => options,
        }
    }

    /// A key that this order accepts, made of any bytes. The orders that panic on unknown byte strings accept keys that
    /// end in a checksum: a key that the engine invents does not.
    pub(crate) fn seal(self, bytes: &[u8]) -> Vec<u8> {
        let body = match self {
            Order::Sealed => bytes[..bytes.len().min(65_533)].to_vec(),
            Order::Fixed | Order::FixedHashed => {
                let sum = bytes.iter().fold(bytes.len() as u64, |sum, byte| sum.wrapping_mul(257) + u64::from(*byte));
                sum.to_le_bytes()[..6].to_vec()
            }
            _ => return bytes.to_vec(),
        };
        [&body[..], &seal_of(&body)].concat()
    }

    /// Panics if `key` is none that [`seal`](Order::seal) made.
    fn check(self, key: &[u8]) {
        let body = match self {
            Order::Sealed if key.len() >= 2 => &key[..key.len() - 2],
            Order::Fixed | Order::FixedHashed if key.len() == 8 => &key[..6],
            Order::Sealed | Order::Fixed | Order::FixedHashed => panic!("{self:?} was given {key:.20?}"),
            _ => return,
        };
        assert!(key.ends_with(&seal_of(body)), "{self:?} was given {key:.20?}");
    }

    /// A form of `key` that compares as bytes as `key` does in this order; equal keys have the same one.
    pub(crate) fn canonical(self, key: &[u8]) -> Vec<u8> {
        match self {
            Order::Bytes => key.to_vec(),
            Order::AnyCase | Order::AnyCaseHashed => key.to_ascii_lowercase(),
            Order::Fixed | Order::FixedHashed => key.iter().rev().copied().collect(),
            Order::Reversed | Order::Sealed => {
                let mut out: Vec<u8> = key.iter().flat_map(|byte| (255 - u16::from(*byte)).to_be_bytes()).collect();
                out.extend_from_slice(&256u16.to_be_bytes());
                out
            }
        }
    }
}

impl Comparator for Order {
    fn name(&self) -> &str {
        match self {
            Order::Bytes => "bytes",
            Order::Reversed => "reversed",
            Order::AnyCase => "any case",
            Order::AnyCaseHashed => "any case, hashed",
            Order::Sealed => "sealed",
            Order::Fixed => "fixed",
            Order::FixedHashed => "fixed, hashed",
        }
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        self.check(a);
        self.check(b);
        match self {
            Order::Bytes => a.cmp(b),
            Order::Reversed | Order::Sealed => b.cmp(a),
            Order::Fixed | Order::FixedHashed => a.iter().rev().cmp(b.iter().rev()),
            Order::AnyCase | Order::AnyCaseHashed => {
                let lower = |bytes: &[u8]| bytes.iter().map(u8::to_ascii_lowercase).collect::<Vec<u8>>();
                lower(a).cmp(&lower(b))
            }
        }
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        matches!(self, Order::AnyCase | Order::AnyCaseHashed | Order::FixedHashed)
    }

    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        self.check(key);
        out.clear();
        match self {
            Order::FixedHashed => out.extend_from_slice(key),
            _ => out.extend(key.iter().map(u8::to_ascii_lowercase)),
        }
        self.has_canonical()
    }

    fn has_canonical(&self) -> bool {
        matches!(self, Order::AnyCaseHashed | Order::FixedHashed)
    }
}

#[test]
fn canonical_forms_sort_as_the_comparators_do() {
    let keys: Vec<&[u8]> = vec![b"", b"\0", b"a", b"A", b"ab", b"AB", b"aB", b"b", b"\xff", b"\xff\xff", b"a\0", b"Zz"];
    for order in ORDERS {
        for a in &keys {
            for b in &keys {
                let (a, b) = (&order.seal(a), &order.seal(b));
                let (one, other) = (order.canonical(a), order.canonical(b));
                assert_eq!(one.cmp(&other), order.compare(a, b), "{order:?}: {a:?} and {b:?}");
            }
        }
    }
}
