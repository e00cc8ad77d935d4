//! Options from tables. A table for [`options!`] has one entry for each option of a struct. The macro defines the
//! struct, the defaults, the methods that set the options, the check of their ranges, and their encoding.
//!
//! ```text
//! options! {
//!     /// The options of leveled compaction.
//!     pub struct LeveledOptions {
//!         /// Sets the number of runs at which level 0 is compacted, 1 to 1,000. Default 4.
//!         [7] l0_compaction_trigger(runs): u32 = 4, in 1..=1_000;
//!         // …
//!     }
//! }
//! ```
//!
//! An entry has these parts, in this order:
//! - The documentation of the method that sets the option: what it does, its unit, its range, its default, an example.
//! - `[7]`: its number in the stored options, which never changes and is never used again. `[4 bit 2]`: a bit of a
//!   number that several options share. An option without a number is not stored.
//! - The name, which the method, the field of the struct and JSON have.
//! - `(runs)`: the argument of the method. `(codec: CompressionType)`: the same with a type of its own, which `into`
//!   converts to that of the option. Without an argument there is no such method.
//! - The type, an [`OptionValue`], after attributes of the field, if there are any.
//! - The default.
//! - `in 1..=1_000`: the range. `check f`: a function that returns `Invalid` for a value that is not permitted.
//!
//! Stored options are numbered fields, or, inside of such a field, values one after the other in the order of their
//! entries, which their numbers count. `docs/format/edit.md` has both formats.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use crate::base::coding::{ByteReader, put_bytes, put_varint};
use crate::base::compression::CompressionType;
use crate::base::{Error, ErrorKind, Result};

/// Defines a struct of options, and the methods that set them.
macro_rules! options {
    ($(#[$meta:meta])* $vis:vis struct $Struct:ident { $($entries:tt)* }) => {
        $crate::base::options::option_struct! { $(#[$meta])* $vis struct $Struct { $($entries)* } }
        $crate::base::options::option_setters! { impl $Struct () { $($entries)* } }
    };
}

/// Defines a struct of options with their defaults, checks and encoding.
macro_rules! option_struct {
    ($(#[$meta:meta])* $vis:vis struct $Struct:ident { $(
        $(#[$doc:meta])*
        $([$number:tt $(bit $bit:literal)?])? $name:ident $(($($argument:tt)*))?: $(#[$field_meta:meta])* $type:ty
            = $default:expr $(, in $range:expr)? $(, check $check:expr)?;
    )* }) => {
        $(#[$meta])*
        $vis struct $Struct { $($(#[$field_meta])* pub(crate) $name: $type,)* }

        impl Default for $Struct {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl $crate::base::options::OptionTable for $Struct {
            fn check_ranges(&self) -> $crate::base::Result<()> {
                $(
                    $($crate::base::options::check_range(stringify!($name), self.$name, $range)?;)?
                    $($crate::base::options::check_with(&self.$name, $check)?;)?
                )*
                Ok(())
            }

            fn store(&self) -> Vec<$crate::base::options::StoredOption> {
                let mut stored = Vec::new();
                $($(stored.extend($crate::base::options::store_as($number, None$(.or(Some($bit)))?, &self.$name));)?)*
                stored
            }

            fn load(&mut self, stored: &mut $crate::base::options::StoredOptions<'_, '_>) -> $crate::base::Result<()> {
                $($(stored.load($number, None$(.or(Some($bit)))?, &mut self.$name)?;)?)*
                Ok(())
            }
        }
    };
}

/// Defines the methods that set the options of a table. With `()` the struct of the table has them. With `(field)` they
/// belong to the struct that has the struct of the table in this field.
macro_rules! option_setters {
    (impl $Struct:ident $field:tt { $(
        $(#[$doc:meta])*
        $([$($number:tt)*])? $name:ident $(($($argument:tt)*))?: $(#[$field_meta:meta])* $type:ty
            = $default:expr $(, in $range:expr)? $(, check $check:expr)?;
    )* }) => {
        impl $Struct {
            $($crate::base::options::option_setter! { $field $name ($($($argument)*)?) $type, $(#[$doc])* })*
        }
    };
}

/// Defines the method that sets one option.
macro_rules! option_setter {
    ($field:tt $name:ident () $type:ty, $(#[$doc:meta])*) => {};
    ($field:tt $name:ident ($argument:ident) $type:ty, $(#[$doc:meta])*) => {
        $crate::base::options::option_setter! { $field $name ($argument: $type) $type, $(#[$doc])* }
    };
    (($($field:ident)?) $name:ident ($argument:ident: $argument_type:ty) $type:ty, $(#[$doc:meta])*) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $argument: $argument_type) -> Self {
            self$(.$field)?.$name = $argument.into();
            self
        }
    };
}

/// Defines how options are stored as numbers: `$encode` returns the number, `$decode` the option, or `None` for a
/// number out of range.
macro_rules! number_options {
    ($($type:ty: $encode:expr, $decode:expr;)*) => { $(impl $crate::base::options::OptionValue for $type {
        fn encode(&self) -> Option<Vec<u8>> {
            let (encode, mut out): (fn(&$type) -> u64, _) = ($encode, Vec::new());
            $crate::base::coding::put_varint(&mut out, encode(self));
            Some(out)
        }

        fn decode(d: &mut $crate::base::coding::ByteReader<'_>) -> $crate::base::Result<$type> {
            let decode: fn(u64) -> Option<$type> = $decode;
            decode(d.varint()?).ok_or_else(|| $crate::base::Error::invalid("a stored option is out of its range"))
        }
    })* };
}

pub(crate) use {number_options, option_setter, option_setters, option_struct, options};

/// A struct that [`options!`] defines.
pub(crate) trait OptionTable: Default {
    /// `Invalid` if an option is out of its range.
    fn check_ranges(&self) -> Result<()>;

    /// The options that are stored, in the order of their entries.
    fn store(&self) -> Vec<StoredOption>;

    /// Reads the stored options. Those that are not there keep their values. `Invalid` if one is out of the range of
    /// its type.
    fn load(&mut self, stored: &mut StoredOptions<'_, '_>) -> Result<()>;
}

/// How an option is stored.
pub(crate) trait OptionValue: Sized {
    /// `None`: nothing is stored, and a reader keeps the default.
    fn encode(&self) -> Option<Vec<u8>>;

    /// `Invalid` for a value out of the range of the type.
    fn decode(d: &mut ByteReader<'_>) -> Result<Self>;
}

/// An option as it is stored: its number, its bit if it shares the number, and its value.
pub(crate) type StoredOption = (u64, Option<u32>, Vec<u8>);

/// `None` if nothing is stored.
pub(crate) fn store_as(number: u64, bit: Option<u32>, value: &impl OptionValue) -> Option<StoredOption> {
    value.encode().map(|value| (number, bit, value))
}

/// Encodes options as fields in the order of their numbers, except that those of `last` come last, in this order.
pub(crate) fn encode_fields(options: impl IntoIterator<Item = StoredOption>, last: &[u64]) -> Vec<u8> {
    let mut fields = BTreeMap::new();
    for (number, bit, value) in options {
        let field: &mut Vec<u8> = fields.entry(number).or_insert_with(|| vec![0]);
        match bit {
            Some(bit) => field[0] |= value[0] << bit,
            None => *field = value,
        }
    }
    let last: Vec<_> = last.iter().filter_map(|number| fields.remove_entry(number)).collect();
    let mut out = Vec::new();
    for (number, value) in fields.into_iter().chain(last) {
        put_varint(&mut out, number);
        put_bytes(&mut out, &value);
    }
    out
}

/// Stored options that are read.
pub(crate) enum StoredOptions<'r, 'b> {
    Fields(BTreeMap<u64, &'b [u8]>),
    /// Values one after the other. Versions with fewer options wrote fewer values.
    Values(&'r mut ByteReader<'b>),
}

impl<'b> StoredOptions<'_, 'b> {
    pub(crate) fn fields(bytes: &'b [u8]) -> Result<Self> {
        let (mut fields, mut d) = (BTreeMap::new(), ByteReader::new(bytes));
        while !d.is_empty() {
            fields.insert(d.varint()?, d.bytes()?);
        }
        Ok(StoredOptions::Fields(fields))
    }

    /// Reads one option, if it is there.
    pub(crate) fn load<T: OptionValue>(&mut self, number: u64, bit: Option<u32>, option: &mut T) -> Result<()> {
        let mut field = None;
        let d = match self {
            StoredOptions::Fields(fields) => {
                let Some(value) = fields.get(&number) else { return Ok(()) };
                field.insert(ByteReader::new(value))
            }
            StoredOptions::Values(d) if d.is_empty() => return Ok(()),
            StoredOptions::Values(d) => d,
        };
        *option = match bit {
            Some(bit) => T::decode(&mut ByteReader::new(&[(d.varint()? >> bit & 1) as u8]))?,
            None => T::decode(d)?,
        };
        Ok(())
    }
}

number_options! {
    bool: |yes| u64::from(*yes), |number| Some(number != 0);
    u8: |number| u64::from(*number), |number| number.try_into().ok();
    u32: |number| u64::from(*number), |number| number.try_into().ok();
    u64: |number| *number, Some;
    f64: |number| number.to_bits(), |bits| Some(f64::from_bits(bits));
    // No option of this type can be 0.
    Option<f32>: |number| u64::from(number.map_or(0, f32::to_bits)),
        |bits| u32::try_from(bits).ok().map(|bits| (bits != 0).then(|| f32::from_bits(bits)));
}

/// Seconds and nanoseconds.
impl OptionValue for Option<Duration> {
    fn encode(&self) -> Option<Vec<u8>> {
        self.map(|duration| {
            let mut out = Vec::new();
            put_varint(&mut out, duration.as_secs());
            put_varint(&mut out, u64::from(duration.subsec_nanos()));
            out
        })
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<Option<Duration>> {
        match (d.varint()?, d.varint_u32()?) {
            (secs, nanos @ 0..1_000_000_000) => Ok(Some(Duration::new(secs, nanos))),
            _ => Err(Error::corruption("a stored option contains an invalid duration")),
        }
    }
}

impl OptionValue for CompressionType {
    fn encode(&self) -> Option<Vec<u8>> {
        Some(self.to_stored().into())
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<CompressionType> {
        let codec = CompressionType::from_stored([d.u8()?, d.u8()?]);
        codec.ok_or_else(|| Error::corruption("a stored option contains an unknown compression codec"))
    }
}

impl OptionValue for Vec<CompressionType> {
    fn encode(&self) -> Option<Vec<u8>> {
        Some(self.iter().flat_map(|codec| codec.to_stored()).collect())
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<Vec<CompressionType>> {
        let mut codecs = Vec::new();
        while !d.is_empty() {
            codecs.push(CompressionType::decode(d)?);
        }
        Ok(codecs)
    }
}

/// No bytes for `None`.
impl OptionValue for Option<CompressionType> {
    fn encode(&self) -> Option<Vec<u8>> {
        Some(self.iter().flat_map(|codec| codec.to_stored()).collect())
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<Option<CompressionType>> {
        Ok(Vec::decode(d)?.first().copied())
    }
}

/// The values of the options of a table, one after the other.
pub(crate) fn encode_values(options: &impl OptionTable) -> Vec<u8> {
    options.store().into_iter().flat_map(|(_, _, value)| value).collect()
}

/// Reads what [`encode_values`] wrote. If a value is out of its range, all options of the table have their default.
pub(crate) fn decode_values<T: OptionTable>(d: &mut ByteReader<'_>) -> Result<T> {
    let mut options = T::default();
    match options.load(&mut StoredOptions::Values(d)).and_then(|()| options.check_ranges()) {
        Err(error) if error.kind() == ErrorKind::Invalid => Ok(T::default()),
        read => read.map(|()| options),
    }
}

impl<T: OptionTable> OptionValue for Option<T> {
    fn encode(&self) -> Option<Vec<u8>> {
        self.as_ref().map(encode_values)
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<Option<T>> {
        decode_values(d).map(Some)
    }
}

/// `Invalid` if an option is out of its range.
pub(crate) fn check_range<T: PartialOrd + Display>(name: &str, value: T, range: RangeInclusive<T>) -> Result<()> {
    match range.contains(&value) {
        true => Ok(()),
        false => {
            let (low, high) = (range.start(), range.end());
            Err(Error::invalid(format!("{name} is {value}, out of its range {low}..={high}")))
        }
    }
}

/// Checks an option by a function of its own.
pub(crate) fn check_with<T>(value: &T, check: impl FnOnce(&T) -> Result<()>) -> Result<()> {
    check(value)
}
