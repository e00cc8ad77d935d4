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
}

pub(crate) const ORDERS: [Order; 4] = [Order::Bytes, Order::Reversed, Order::AnyCase, Order::AnyCaseHashed];

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

    /// A form of `key` that compares as bytes as `key` does in this order; equal keys have the same one.
    pub(crate) fn canonical(self, key: &[u8]) -> Vec<u8> {
        match self {
            Order::Bytes => key.to_vec(),
            Order::AnyCase | Order::AnyCaseHashed => key.to_ascii_lowercase(),
            Order::Reversed => {
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
        }
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        match self {
            Order::Bytes => a.cmp(b),
            Order::Reversed => b.cmp(a),
            Order::AnyCase | Order::AnyCaseHashed => {
                let lower = |bytes: &[u8]| bytes.iter().map(u8::to_ascii_lowercase).collect::<Vec<u8>>();
                lower(a).cmp(&lower(b))
            }
        }
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        !matches!(self, Order::Bytes | Order::Reversed)
    }

    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        out.clear();
        out.extend(key.iter().map(u8::to_ascii_lowercase));
        *self == Order::AnyCaseHashed
    }
}

#[test]
fn canonical_forms_sort_as_the_comparators_do() {
    let keys: Vec<&[u8]> = vec![b"", b"\0", b"a", b"A", b"ab", b"AB", b"aB", b"b", b"\xff", b"\xff\xff", b"a\0", b"Zz"];
    for order in ORDERS {
        for a in &keys {
            for b in &keys {
                let (one, other) = (order.canonical(a), order.canonical(b));
                assert_eq!(one.cmp(&other), order.compare(a, b), "{order:?}: {a:?} and {b:?}");
            }
        }
    }
}
