//! Orders of keys: the engine gets a comparator, the model a form of the key that sorts the same way as bytes.

use std::cmp::Ordering;
use std::sync::Arc;

use azekura::{
    Comparator, DataBlockIndexType, Database, ErrorKind, MergeOperator, Partition, PartitionComponents,
    PartitionCreateOptions, PrefixExtractor, Result,
};

/// The order of a partition's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestOrder {
    Bytes,
    /// Descending; different bytes are different keys.
    Reversed,
    /// ASCII letters of either case are the same key.
    AnyCase,
    /// The same, with a canonical form that can be hashed.
    AnyCaseHashed,
    /// Descending, for [checksummed](TestOrder::valid_key) keys of any length; panics when it is given another byte
    /// string.
    ChecksummedReversed,
    /// Little-endian numbers of eight bytes, the highest two of which are a checksum of the others; panics as
    /// `ChecksummedReversed` does.
    ChecksummedNumbers,
    /// As `ChecksummedNumbers`, but it does not say that different bytes are different keys, and has a canonical form.
    ChecksummedNumbersHashed,
}

pub(crate) const TEST_ORDERS: [TestOrder; 7] = [
    TestOrder::Bytes,
    TestOrder::Reversed,
    TestOrder::AnyCase,
    TestOrder::AnyCaseHashed,
    TestOrder::ChecksummedReversed,
    TestOrder::ChecksummedNumbers,
    TestOrder::ChecksummedNumbersHashed,
];

fn key_checksum(bytes: &[u8]) -> [u8; 2] {
    let sum = bytes.iter().fold(0x5EA1u16, |sum, byte| sum.rotate_left(5) ^ u16::from(*byte).wrapping_mul(0x9E37));
    sum.to_be_bytes()
}

impl TestOrder {
    /// The comparator; `None` for the order of bytes.
    pub(crate) fn comparator(self) -> Option<Arc<dyn Comparator>> {
        match self {
            TestOrder::Bytes => None,
            _ => Some(Arc::new(self)),
        }
    }

    /// The options without those that this order refuses: if equal keys cannot be hashed, no block layout with
    /// hashes; unless the order is that of bytes, no prefix extractor.
    pub(crate) fn supported_options(self, options: PartitionCreateOptions) -> PartitionCreateOptions {
        match self {
            TestOrder::Bytes => options,
            TestOrder::AnyCase => options
                .prefix_extractor(None::<PrefixExtractor>)
                .data_block_index_type(DataBlockIndexType::BinarySearch),
            _ => options.prefix_extractor(None::<PrefixExtractor>),
        }
    }

    /// Whether the comparator panics on a byte string that [`valid_key`](TestOrder::valid_key) did not make.
    pub(crate) fn is_strict(self) -> bool {
        matches!(
            self,
            TestOrder::ChecksummedReversed | TestOrder::ChecksummedNumbers | TestOrder::ChecksummedNumbersHashed
        )
    }

    /// Opens or creates a partition whose keys have this order.
    ///
    /// # Errors
    /// Those of opening.
    pub(crate) fn open(self, db: &Database, name: &str, options: PartitionCreateOptions) -> Result<Partition> {
        self.open_with(db, name, options, None)
    }

    /// As [`open`](TestOrder::open), with a merge operator.
    pub(crate) fn open_with(
        self,
        db: &Database,
        name: &str,
        options: PartitionCreateOptions,
        operator: Option<Arc<dyn MergeOperator>>,
    ) -> Result<Partition> {
        let part = self.open_stored(db, name, options.clone(), operator)?;
        // Also sets the options of tests, which are not stored. They are valid, so the call is if the database is open
        // for writing.
        let changed = part.set_options(self.supported_options(options));
        changed.or_else(|error| if error.kind() == ErrorKind::Invalid { Ok(()) } else { Err(error) })?;
        Ok(part)
    }

    /// Opens a partition with its stored options, or creates it with `options`.
    pub(crate) fn open_stored(
        self,
        db: &Database,
        name: &str,
        options: PartitionCreateOptions,
        operator: Option<Arc<dyn MergeOperator>>,
    ) -> Result<Partition> {
        let mut components = PartitionComponents::default();
        if let Some(comparator) = self.comparator() {
            components = components.comparator(comparator);
        }
        if let Some(operator) = operator {
            components = components.merge_operator(operator);
        }
        db.open_partition_with(name, self.supported_options(options), components)
    }

    /// A key that this order accepts, made of any bytes. The orders that panic on unknown byte strings accept keys that
    /// end in a checksum: a key that the engine invents does not.
    pub(crate) fn valid_key(self, bytes: &[u8]) -> Vec<u8> {
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

    /// Panics if `key` was not made by [`valid_key`](TestOrder::valid_key) made.
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
    pub(crate) fn canonical(self, key: &[u8]) -> Vec<u8> {
        match self {
            TestOrder::Bytes => key.to_vec(),
            TestOrder::AnyCase | TestOrder::AnyCaseHashed => key.to_ascii_lowercase(),
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
            TestOrder::AnyCase | TestOrder::AnyCaseHashed => {
                let lower = |bytes: &[u8]| bytes.iter().map(u8::to_ascii_lowercase).collect::<Vec<u8>>();
                lower(a).cmp(&lower(b))
            }
        }
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        matches!(self, TestOrder::AnyCase | TestOrder::AnyCaseHashed | TestOrder::ChecksummedNumbersHashed)
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
}

#[test]
fn canonical_forms_sort_as_the_comparators_do() {
    let keys: Vec<&[u8]> = vec![b"", b"\0", b"a", b"A", b"ab", b"AB", b"aB", b"b", b"\xff", b"\xff\xff", b"a\0", b"Zz"];
    for order in TEST_ORDERS {
        for a in &keys {
            for b in &keys {
                let (a, b) = (&order.valid_key(a), &order.valid_key(b));
                let (one, other) = (order.canonical(a), order.canonical(b));
                assert_eq!(one.cmp(&other), order.compare(a, b), "{order:?}: {a:?} and {b:?}");
            }
        }
    }
}
