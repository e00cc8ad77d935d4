//! Sizes as people write them: `65536`, `64K`, `64KiB`, `512M`, `1G`.

use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let number: u64 = digits.replace('_', "").parse().map_err(|_| format!("`{text}` is not a size"))?;
        let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            unit => return Err(format!("`{unit}` is not a unit of size: use K, M or G (powers of 1024)")),
        };
        number.checked_mul(1 << shift).map(Bytes).ok_or_else(|| format!("`{text}` is too large"))
    }
}

/// One size, or a range of them: `100`, `4K-1M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// The smallest.
    pub(crate) least: u64,
    /// The largest.
    pub(crate) most: u64,
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Sizes, String> {
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        let (Bytes(least), Bytes(most)) = (least.parse()?, most.parse()?);
        if least > most {
            return Err(format!("`{text}` is no range: it begins above its end"));
        }
        Ok(Sizes { least, most })
    }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, Sizes};

    #[test]
    fn ranges_parse() {
        assert_eq!("100".parse(), Ok(Sizes { least: 100, most: 100 }));
        assert_eq!("4K-1M".parse(), Ok(Sizes { least: 4 << 10, most: 1 << 20 }));
        assert!("1M-4K".parse::<Sizes>().is_err());
        assert!("4K-".parse::<Sizes>().is_err());
    }

    #[test]
    fn sizes_parse() {
        assert_eq!("64".parse(), Ok(Bytes(64)));
        assert_eq!("64K".parse(), Ok(Bytes(65_536)));
        assert_eq!("1_000".parse(), Ok(Bytes(1000)));
        assert_eq!("512MiB".parse(), Ok(Bytes(512 << 20)));
        assert!("12Q".parse::<Bytes>().is_err());
        assert!("".parse::<Bytes>().is_err());
        assert!("99999999999999999999".parse::<Bytes>().is_err());
        assert!("18446744073709551615G".parse::<Bytes>().is_err());
    }
}
