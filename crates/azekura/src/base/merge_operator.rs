//! Merge operators: code of the user that computes the value of a key from operands, and the operators that this crate
//! has.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::base::key::VALUE_LEN_MAX;
use crate::base::{Error, Result};

/// Computes the value of a key from its previous value and the operands of [`merge`](crate::Partition::merge).
///
/// A merge is a write without a read: LSM partitions store the operand, and combine it with the older ones in reads,
/// flushes and compactions. A pmem partition combines it in the call.
///
/// The operator is given with [`PartitionComponents`](crate::PartitionComponents) when a partition is opened. Its
/// [`name`](MergeOperator::name) is stored with the partition, and opening the partition without it or with an operator
/// of another name is `Invalid`. [`Database::partition`](crate::Database::partition) finds the operators of
/// [`merge_operators`](crate::merge_operators) by their stored names.
///
/// - The result must depend on the arguments only. It must not matter how operands are grouped by
///   [`partial_merge`](MergeOperator::partial_merge).
/// - If the operator fails or panics, reads of the key return
///   [`MergeFailed`](crate::ErrorKind::MergeFailed) until the key is written anew. Flushes and compactions keep the
///   operands. Reads of other keys are not affected. The key ends an iteration that meets it with the error; a
///   [`seek`](crate::Iter::seek) past it, or a range without it, reads on.
/// - It may be called from several threads. In a flush or a compaction, the calls that a
///   [`Comparator`](crate::Comparator) must not make are `Invalid`.
///
/// Most operators are simpler to write as [`AssociativeMerge`].
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{MergeOperator, PartitionComponents, Result};
/// use std::sync::Arc;
/// /// Keeps the last three operands.
/// struct LastThree;
/// impl MergeOperator for LastThree {
///     fn name(&self) -> &str { "last three" }
///     fn full_merge(&self, _key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
///         let all: Vec<u8> = existing.into_iter().chain(operands.iter().copied()).flatten().copied().collect();
///         Ok(all[all.len().saturating_sub(3)..].to_vec())
///     }
/// }
/// let components = PartitionComponents::default().merge_operator(Arc::new(LastThree));
/// let recent = db.open_partition_with("recent", Default::default(), components)?;
/// for letter in ["a", "b", "c", "d"] {
///     recent.merge("ada", letter)?;
/// }
/// assert_eq!(recent.get("ada")?.unwrap(), "bcd");
/// # Ok(()) }
/// ```
pub trait MergeOperator: Send + Sync {
    /// The name: 1..=255 bytes, stored with the partition and checked at every open. Names that begin with `azekura.`
    /// are those of [`merge_operators`](crate::merge_operators).
    ///
    /// ```
    /// use azekura::{MergeOperator, merge_operators};
    /// assert_eq!(merge_operators::u64_add().name(), "azekura.u64_add");
    /// ```
    fn name(&self) -> &str;

    /// Returns the value of `key` after all `operands`, the oldest first; there is at least one. `existing` is the
    /// value before them; `None` if the key had none.
    ///
    /// # Errors
    /// Any; see [`MergeOperator`] for its effect.
    ///
    /// ```
    /// use azekura::{MergeOperator, merge_operators};
    /// let append = merge_operators::append(",");
    /// assert_eq!(append.full_merge(b"key", Some(b"a"), &[b"b", b"c"]).unwrap(), b"a,b,c");
    /// assert_eq!(append.full_merge(b"key", None, &[b"b"]).unwrap(), b"b");
    /// ```
    fn full_merge(&self, key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>>;

    /// Combines at least two operands, the oldest first, to one operand with the same effect. `None` keeps them as they
    /// are, which is the default.
    ///
    /// ```
    /// use azekura::{MergeOperator, merge_operators};
    /// let (one, two) = (1u64.to_le_bytes(), 2u64.to_le_bytes());
    /// let sum = merge_operators::u64_add().partial_merge(b"key", &[&one, &two]);
    /// assert_eq!(sum.unwrap(), 3u64.to_le_bytes());
    /// ```
    fn partial_merge(&self, key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        let _unused = (key, operands);
        None
    }

    /// Checks an operand before it is written. [`merge`](crate::Partition::merge) returns the error as `Invalid`, and
    /// writes nothing. By default every operand is accepted.
    ///
    /// # Errors
    /// Any, for an operand that [`full_merge`](MergeOperator::full_merge) would refuse.
    ///
    /// ```
    /// use azekura::{MergeOperator, merge_operators};
    /// let counter = merge_operators::u64_add();
    /// assert!(counter.check_operand(&1u64.to_le_bytes()).is_ok());
    /// assert!(counter.check_operand(b"one").is_err());
    /// ```
    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        let _unused = operand;
        Ok(())
    }
}

/// A [`MergeOperator`] whose operands have the form of a value, and that combines two of them: `merge(merge(a, b), c)`
/// equals `merge(a, merge(b, c))`. The first operand of a key without a value becomes its value.
///
/// ```
/// use azekura::{AssociativeMerge, MergeOperator, Result};
/// /// Keeps the longest word.
/// struct Longest;
/// impl AssociativeMerge for Longest {
///     fn name(&self) -> &str { "longest" }
///     fn merge(&self, _key: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>> {
///         Ok(if operand.len() > value.len() { operand.to_vec() } else { value.to_vec() })
///     }
/// }
/// let value = Longest.full_merge(b"key", Some(b"red"), &[b"yellow", b"blue"]);
/// assert_eq!(value.unwrap(), b"yellow");
/// ```
pub trait AssociativeMerge: Send + Sync {
    /// As [`MergeOperator::name`].
    ///
    /// ```
    /// # use azekura::{AssociativeMerge, Result};
    /// struct First;
    /// impl AssociativeMerge for First {
    ///     fn name(&self) -> &str { "first" }
    ///     fn merge(&self, _: &[u8], value: &[u8], _: &[u8]) -> Result<Vec<u8>> { Ok(value.to_vec()) }
    /// }
    /// assert_eq!(AssociativeMerge::name(&First), "first");
    /// ```
    fn name(&self) -> &str;

    /// Combines a value, or an older operand, with the next operand.
    ///
    /// # Errors
    /// As [`MergeOperator::full_merge`].
    ///
    /// ```
    /// # use azekura::{AssociativeMerge, Result};
    /// struct Or;
    /// impl AssociativeMerge for Or {
    ///     fn name(&self) -> &str { "or of two bytes" }
    ///     fn merge(&self, _: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>> {
    ///         Ok(value.iter().zip(operand).map(|(a, b)| a | b).collect())
    ///     }
    /// }
    /// assert_eq!(Or.merge(b"key", &[1, 2], &[4, 2]).unwrap(), [5, 2]);
    /// ```
    fn merge(&self, key: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>>;

    /// As [`MergeOperator::check_operand`].
    ///
    /// # Errors
    /// As [`MergeOperator::check_operand`].
    ///
    /// ```
    /// # use azekura::{AssociativeMerge, Error, Result};
    /// struct Shorter;
    /// impl AssociativeMerge for Shorter {
    ///     fn name(&self) -> &str { "the shorter of two values" }
    ///     fn merge(&self, _: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>> {
    ///         Ok(if operand.len() < value.len() { operand.to_vec() } else { value.to_vec() })
    ///     }
    ///     fn check_operand(&self, operand: &[u8]) -> Result<()> {
    ///         if operand.is_empty() { Err(Error::invalid("an empty operand")) } else { Ok(()) }
    ///     }
    /// }
    /// assert!(AssociativeMerge::check_operand(&Shorter, b"").is_err());
    /// ```
    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        let _unused = operand;
        Ok(())
    }
}

impl<M: AssociativeMerge> MergeOperator for M {
    fn name(&self) -> &str {
        AssociativeMerge::name(self)
    }

    fn full_merge(&self, key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
        let mut rest = operands.iter();
        let first = match existing {
            Some(value) => value.to_vec(),
            None => rest.next().map(|operand| operand.to_vec()).unwrap_or_default(),
        };
        rest.try_fold(first, |value, operand| self.merge(key, &value, operand))
    }

    fn partial_merge(&self, key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        MergeOperator::full_merge(self, key, None, operands).ok()
    }

    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        AssociativeMerge::check_operand(self, operand)
    }
}

/// Calls [`MergeOperator::full_merge`] for a key with `operands` from the newest to the oldest.
///
/// # Errors
/// `MergeFailed` if the operator fails or panics, or if its result is too long for a value.
pub(crate) fn merge_fully<T: AsRef<[u8]>>(
    operator: &dyn MergeOperator,
    key: &[u8],
    existing: Option<&[u8]>,
    operands: &[T],
) -> Result<Vec<u8>> {
    debug_assert!(!operands.is_empty(), "a value without operands is not merged");
    let operands: Vec<&[u8]> = operands.iter().rev().map(AsRef::as_ref).collect();
    let failed = |reason: &str| {
        let message = format!("merge operator {:?} failed for a key: {reason}", operator.name());
        Error::merge_failed(message, key)
    };
    match catch_unwind(AssertUnwindSafe(|| operator.full_merge(key, existing, &operands))) {
        Ok(Ok(value)) if value.len() as u64 <= VALUE_LEN_MAX => Ok(value),
        Ok(Ok(value)) => Err(failed(&format!("its result has {} bytes, more than 4 GiB - 1", value.len()))),
        Ok(Err(error)) => Err(failed(error.message())),
        Err(_) => Err(failed("it panicked")),
    }
}

/// Calls [`MergeOperator::partial_merge`] with at least two `operands` from the newest to the oldest. `None` if the
/// operator cannot combine them, also if it panics.
pub(crate) fn merge_partially<T: AsRef<[u8]>>(
    operator: &dyn MergeOperator,
    key: &[u8],
    operands: &[T],
) -> Option<Vec<u8>> {
    debug_assert!(operands.len() >= 2, "there are operands to combine");
    let operands: Vec<&[u8]> = operands.iter().rev().map(AsRef::as_ref).collect();
    let merged = catch_unwind(AssertUnwindSafe(|| operator.partial_merge(key, &operands)));
    merged.ok().flatten().filter(|operand| operand.len() as u64 <= VALUE_LEN_MAX)
}

/// Calls [`MergeOperator::check_operand`].
///
/// # Errors
/// `Invalid` if the operator refuses the operand or panics.
pub(crate) fn check_operand(operator: &dyn MergeOperator, operand: &[u8]) -> Result<()> {
    let refused =
        |reason: &str| Error::invalid(format!("merge operator {:?} refuses an operand: {reason}", operator.name()));
    match catch_unwind(AssertUnwindSafe(|| operator.check_operand(operand))) {
        Ok(checked) => checked.map_err(|error| refused(error.message())),
        Err(_) => Err(refused("it panicked")),
    }
}

/// What the names of the operators of this crate begin with.
const NAME_PREFIX: &str = "azekura.";
/// What the name of an [`append`] operator begins with. The separator follows in hexadecimal digits.
const APPEND_PREFIX: &str = "azekura.append:";
/// Longest separator of [`append`] in bytes, so that its name is not too long.
const SEPARATOR_LEN_MAX: usize = 64;

/// The operator of this crate with this name.
pub(crate) fn shipped_operator(name: &str) -> Option<Arc<dyn MergeOperator>> {
    let found = match name.strip_prefix(APPEND_PREFIX) {
        Some(digits) => append(parse_hex(digits)?),
        None => [u64_add(), i64_add(), max(), set_union()].into_iter().find(|operator| operator.name() == name)?,
    };
    (found.name() == name).then_some(found)
}

/// Whether the name is reserved for operators of this crate, and none of them has it.
pub(crate) fn is_reserved_name(name: &str) -> bool {
    name.starts_with(NAME_PREFIX) && shipped_operator(name).is_none()
}

fn parse_hex(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    let bytes: Option<Vec<u8>> = pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect();
    bytes.filter(|bytes| bytes.len() <= SEPARATOR_LEN_MAX)
}

/// Adds numbers: values and operands are `u64` in 8 little-endian bytes. A sum beyond the range wraps around.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{PartitionComponents, merge_operators};
/// let components = PartitionComponents::default().merge_operator(merge_operators::u64_add());
/// let visits = db.open_partition_with("visits", Default::default(), components)?;
/// visits.merge("front page", 1u64.to_le_bytes())?;
/// visits.merge("front page", 2u64.to_le_bytes())?;
/// assert_eq!(visits.get("front page")?.unwrap(), 3u64.to_le_bytes()[..]);
/// assert_eq!(visits.merge("front page", "one").unwrap_err().kind(), azekura::ErrorKind::Invalid);
/// # Ok(()) }
/// ```
pub fn u64_add() -> Arc<dyn MergeOperator> {
    Arc::new(AddOperator {
        name: "azekura.u64_add",
        add: |a, b| u64::from_le_bytes(a).wrapping_add(u64::from_le_bytes(b)).to_le_bytes(),
    })
}

/// Adds numbers as [`u64_add`], with `i64` values and operands, so that a counter can also fall.
///
/// ```
/// use azekura::{MergeOperator, merge_operators};
/// let stock = merge_operators::i64_add();
/// let left = stock.full_merge(b"apples", Some(&40i64.to_le_bytes()), &[&(-2i64).to_le_bytes()]);
/// assert_eq!(left.unwrap(), 38i64.to_le_bytes());
/// ```
pub fn i64_add() -> Arc<dyn MergeOperator> {
    Arc::new(AddOperator {
        name: "azekura.i64_add",
        add: |a, b| i64::from_le_bytes(a).wrapping_add(i64::from_le_bytes(b)).to_le_bytes(),
    })
}

/// Appends operands to the value, each after `separator`; the first one of a key without a value has none. A longer
/// separator than 64 bytes is cut to that length.
///
/// ```
/// use azekura::{MergeOperator, merge_operators};
/// let lines = merge_operators::append("\n");
/// assert_eq!(lines.full_merge(b"log", Some(b"started"), &[b"stopped"]).unwrap(), b"started\nstopped");
/// ```
pub fn append(separator: impl AsRef<[u8]>) -> Arc<dyn MergeOperator> {
    let separator = separator.as_ref();
    let separator = separator[..separator.len().min(SEPARATOR_LEN_MAX)].to_vec();
    let digits: String = separator.iter().map(|byte| format!("{byte:02x}")).collect();
    Arc::new(AppendOperator { name: format!("{APPEND_PREFIX}{digits}"), separator })
}

/// Keeps the greatest of the value and the operands, in the order of bytes.
///
/// ```
/// use azekura::{MergeOperator, merge_operators};
/// let newest = merge_operators::max();
/// let day = newest.full_merge(b"ada", Some(b"2024-05-01"), &[b"2023-11-30", b"2024-06-02"]);
/// assert_eq!(day.unwrap(), b"2024-06-02");
/// ```
pub fn max() -> Arc<dyn MergeOperator> {
    Arc::new(MaxOperator)
}

/// Joins sets of byte strings. [`encode_set`] makes an operand, and [`decode_set`] reads a value.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::PartitionComponents;
/// use azekura::merge_operators::{decode_set, encode_set, set_union};
/// let components = PartitionComponents::default().merge_operator(set_union());
/// let tags = db.open_partition_with("tags", Default::default(), components)?;
/// tags.merge("photo 1", encode_set(["sea", "sky"]))?;
/// tags.merge("photo 1", encode_set(["boat", "sea"]))?;
/// assert_eq!(decode_set(&tags.get("photo 1")?.unwrap())?, [&b"boat"[..], b"sea", b"sky"]);
/// # Ok(()) }
/// ```
pub fn set_union() -> Arc<dyn MergeOperator> {
    Arc::new(SetUnionOperator)
}

/// Encodes a set for [`set_union`]: its members in ascending order of bytes, each after its length as a little-endian
/// `u32`.
///
/// ```
/// use azekura::merge_operators::encode_set;
/// assert_eq!(encode_set(["b", "a", "b"]), b"\x01\0\0\0a\x01\0\0\0b");
/// ```
pub fn encode_set<T: AsRef<[u8]>>(members: impl IntoIterator<Item = T>) -> Vec<u8> {
    let members: Vec<T> = members.into_iter().collect();
    encode_sorted(members.iter().map(AsRef::as_ref).collect())
}

fn encode_sorted(mut members: Vec<&[u8]>) -> Vec<u8> {
    members.sort_unstable();
    members.dedup();
    let mut set = Vec::with_capacity(members.iter().map(|member| size_of::<u32>() + member.len()).sum());
    for member in members {
        // A longer member does not fit a value; the set is then refused as malformed or too long.
        set.extend_from_slice(&(member.len() as u32).to_le_bytes());
        set.extend_from_slice(member);
    }
    set
}

/// Returns the members of a set that [`encode_set`] or [`set_union`] has made, in ascending order.
///
/// # Errors
/// `Invalid` if the bytes are not such a set.
///
/// ```
/// use azekura::merge_operators::{decode_set, encode_set};
/// assert_eq!(decode_set(&encode_set(["b", "a"])).unwrap(), [b"a", b"b"]);
/// assert!(decode_set(b"red").is_err());
/// ```
pub fn decode_set(mut set: &[u8]) -> Result<Vec<&[u8]>> {
    let mut members: Vec<&[u8]> = Vec::new();
    while !set.is_empty() {
        let (len, rest) = set.split_first_chunk().ok_or_else(|| Error::invalid("a set ends within a length"))?;
        let member = rest.split_at_checked(u32::from_le_bytes(*len) as usize);
        let (member, rest) = member.ok_or_else(|| Error::invalid("a set ends within a member"))?;
        if members.last().is_some_and(|last| *last >= member) {
            return Err(Error::invalid("the members of a set are not in ascending order"));
        }
        members.push(member);
        set = rest;
    }
    Ok(members)
}

struct AddOperator {
    name: &'static str,
    add: fn([u8; 8], [u8; 8]) -> [u8; 8],
}

fn number(bytes: &[u8]) -> Result<[u8; 8]> {
    bytes.try_into().map_err(|_| Error::invalid(format!("a number has {} bytes instead of 8", bytes.len())))
}

impl AssociativeMerge for AddOperator {
    fn name(&self) -> &str {
        self.name
    }

    fn merge(&self, _key: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>> {
        Ok((self.add)(number(value)?, number(operand)?).to_vec())
    }

    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        number(operand).map(drop)
    }
}

struct AppendOperator {
    name: String,
    separator: Vec<u8>,
}

impl MergeOperator for AppendOperator {
    fn name(&self) -> &str {
        &self.name
    }

    fn full_merge(&self, _key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
        let parts: Vec<&[u8]> = existing.into_iter().chain(operands.iter().copied()).collect();
        Ok(parts.join(&self.separator[..]))
    }

    fn partial_merge(&self, _key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        Some(operands.join(&self.separator[..]))
    }
}

struct MaxOperator;

impl AssociativeMerge for MaxOperator {
    fn name(&self) -> &str {
        "azekura.max"
    }

    fn merge(&self, _key: &[u8], value: &[u8], operand: &[u8]) -> Result<Vec<u8>> {
        Ok(value.max(operand).to_vec())
    }
}

struct SetUnionOperator;

impl MergeOperator for SetUnionOperator {
    fn name(&self) -> &str {
        "azekura.set_union"
    }

    fn full_merge(&self, _key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
        let mut members = Vec::new();
        for set in existing.into_iter().chain(operands.iter().copied()) {
            members.extend(decode_set(set)?);
        }
        Ok(encode_sorted(members))
    }

    fn partial_merge(&self, key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        self.full_merge(key, None, operands).ok()
    }

    fn check_operand(&self, operand: &[u8]) -> Result<()> {
        decode_set(operand).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::testing::seeded_rng::SeededRng;

    fn operators() -> [Arc<dyn MergeOperator>; 6] {
        [u64_add(), i64_add(), append(""), append(", "), max(), set_union()]
    }

    fn operand(operator: &dyn MergeOperator, random: &mut SeededRng) -> Vec<u8> {
        let mut word = || vec![b'a' + random.below(6) as u8; 1 + random.below(3)];
        match operator.name() {
            "azekura.u64_add" | "azekura.i64_add" => random.next_u64().to_le_bytes().to_vec(),
            "azekura.set_union" => encode_set([word(), word()]),
            _ => word(),
        }
    }

    #[test]
    fn shipped_operators_are_found_by_name() {
        for operator in operators() {
            let found = shipped_operator(operator.name()).unwrap();
            assert_eq!(found.name(), operator.name());
            assert!(!is_reserved_name(operator.name()));
        }
        for name in ["azekura.append:0", "azekura.append:2C", "azekura.append:g0", "azekura.min", "azekura."] {
            assert!(shipped_operator(name).is_none() && is_reserved_name(name), "{name}");
        }
        assert!(!is_reserved_name("sum"));
    }

    /// However the operands are grouped, the value is the same.
    #[test]
    fn groups_of_operands_do_not_matter() {
        let mut random = SeededRng::new(7);
        for operator in operators() {
            for round in 0..200 {
                let count = 2 + random.below(5);
                let operands: Vec<Vec<u8>> = (0..count).map(|_| operand(&*operator, &mut random)).collect();
                let existing = (round % 2 == 0).then(|| operand(&*operator, &mut random));
                let newest_first: Vec<&[u8]> = operands.iter().rev().map(Vec::as_slice).collect();
                let whole = merge_fully(&*operator, b"k", existing.as_deref(), &newest_first).unwrap();
                let (from, to) = (random.below(count - 1), count);
                let mut grouped: Vec<Vec<u8>> = newest_first.iter().map(|operand| operand.to_vec()).collect();
                let joined = merge_partially(&*operator, b"k", &grouped[from..to]).unwrap();
                grouped.splice(from..to, [joined]);
                let value = merge_fully(&*operator, b"k", existing.as_deref(), &grouped).unwrap();
                assert_eq!(value, whole, "{}", operator.name());
                operands.iter().for_each(|operand| check_operand(&*operator, operand).unwrap());
            }
        }
    }

    #[test]
    fn malformed_operands_are_refused() {
        for (operator, operand) in [(u64_add(), &b"1"[..]), (i64_add(), b""), (set_union(), b"\x05\0\0\0a")] {
            assert_eq!(check_operand(&*operator, operand).unwrap_err().kind(), ErrorKind::Invalid);
            let failed = merge_fully(&*operator, b"k", Some(operand), &[operand]);
            assert_eq!(failed.unwrap_err().kind(), ErrorKind::MergeFailed);
        }
        assert!(decode_set(b"\x01\0\0\0b\x01\0\0\0a").is_err(), "not in order");
    }

    struct Panics;

    impl MergeOperator for Panics {
        fn name(&self) -> &str {
            "panics"
        }
        fn full_merge(&self, _: &[u8], _: Option<&[u8]>, _: &[&[u8]]) -> Result<Vec<u8>> {
            panic!("full merge")
        }
        fn partial_merge(&self, _: &[u8], _: &[&[u8]]) -> Option<Vec<u8>> {
            panic!("partial merge")
        }
        fn check_operand(&self, _: &[u8]) -> Result<()> {
            panic!("check")
        }
    }

    #[test]
    fn panics_become_errors() {
        assert_eq!(merge_fully(&Panics, b"k", None, &[b"a"]).unwrap_err().kind(), ErrorKind::MergeFailed);
        assert_eq!(merge_partially(&Panics, b"k", &[b"a", b"b"]), None);
        assert_eq!(check_operand(&Panics, b"a").unwrap_err().kind(), ErrorKind::Invalid);
    }
}
