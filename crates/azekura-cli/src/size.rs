//! Sizes on the command line: a number of bytes with an optional unit.

use std::ops::RangeInclusive;

use crate::display;

/// Help text of options that take a size.
pub(crate) const SIZE_HELP: &str = "SIZE is a number of bytes with an optional unit: KiB, MiB, GiB, TiB (powers of \
                                    1,024) or kB, MB, GB, TB (powers of 1,000). Examples: 4096, 64KiB, 1.5GiB";

/// Parses a size.
///
/// # Errors
/// A clause for the message of clap.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    parse_size::parse_size(text).map_err(|error| match error {
        parse_size::Error::PosOverflow => "the number exceeds 64 bits".to_string(),
        _ => "expected a number of bytes with an optional unit, such as 4096, 64KiB or 1.5GiB".to_string(),
    })
}

/// A parser of sizes in `range`, in bytes.
pub(crate) fn size_in<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let size = parse_size(text)?;
        let fits = if range.contains(&size) { T::try_from(size).ok() } else { None };
        fits.ok_or_else(|| {
            let (low, high) = (*range.start(), *range.end());
            format!(
                "{size} is out of range: {low} to {high} bytes ({} to {})",
                display::bytes(low),
                display::bytes(high)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_and_decimal_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 64 << 10),
            ("64 MiB", 64 << 20),
            ("1.5gib", 3 << 29),
            ("2ti", 2 << 40),
            ("1kB", 1000),
            ("3M", 3_000_000),
            ("1e3", 1000),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "-1", "x", "1XB", "KiB", "1 2 3x", "0x10", "18446744073709551616", "99999EiB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        let parse = size_in::<u32>(64..=1 << 20);
        assert_eq!(parse("1MiB"), Ok(1 << 20));
        assert_eq!(parse("2MiB").unwrap_err(), "2097152 is out of range: 64 to 1048576 bytes (64 B to 1.0 MiB)");
        assert!(parse("63").is_err());
        assert!(size_in::<u32>(0..=u64::MAX)("5GiB").is_err());
    }
}
