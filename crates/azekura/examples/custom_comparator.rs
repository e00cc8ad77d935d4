//! A partition with an order of its own: keys are decimal numbers as text, and sort by number. `7` and `007` are the
//! same key, because their canonical form is the same.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use std::cmp::Ordering;
use std::sync::Arc;

use azekura::{Comparator, Config, Error, ErrorKind, PartitionCreateOptions, Result};

/// Sorts decimal text by number, of any length.
struct DecimalOrder;

fn without_leading_zeros(key: &[u8]) -> &[u8] {
    let zeros = key.iter().take_while(|byte| **byte == b'0').count();
    &key[zeros..]
}

impl Comparator for DecimalOrder {
    /// Stored with the partition. Another order needs another name.
    fn name(&self) -> &str {
        "example.decimal.v1"
    }

    /// A longer number is larger; numbers of one length sort by their digits.
    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        let (a, b) = (without_leading_zeros(a), without_leading_zeros(b));
        a.len().cmp(&b.len()).then_with(|| a.cmp(b))
    }

    /// `7` and `007` are equal. This is also the default.
    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        true
    }

    /// Equal keys have one canonical form, so filters and hash indexes can hash it. Without this method the partition
    /// would have none.
    fn canonical(&self, key: &[u8], out: &mut Vec<u8>) -> bool {
        out.clear();
        out.extend_from_slice(without_leading_zeros(key));
        true
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-custom-comparator-{}", std::process::id()));
    let options = PartitionCreateOptions::default;
    {
        let db = Config::new(&path).open()?;
        let lines = db.open_partition_with_comparator("lines", options(), Arc::new(DecimalOrder))?;
        for key in ["10", "9", "100", "007"] {
            lines.insert(key, key)?;
        }
        lines.insert("7", "replaces 007")?;
        lines.flush()?; // the table has a filter of canonical forms

        assert_eq!(lines.get("0007")?.expect("was inserted"), "replaces 007");
        let values: Vec<_> = lines.values().collect::<Result<_>>()?;
        assert_eq!(values, ["replaces 007", "9", "10", "100"]);
        assert_eq!(lines.range("8".."50").count(), 2);
        // A prefix has no meaning in this order.
        let error = lines.prefix("1").next().expect("an item with the error").expect_err("not bytewise");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    } // the last handle closes the database

    let db = Config::new(&path).open()?;
    let error = db.open_partition("lines", options()).expect_err("the comparator is missing");
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let lines = db.open_partition_with_comparator("lines", options(), Arc::new(DecimalOrder))?;
    assert_eq!(lines.len()?, 4);

    drop(lines);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}
