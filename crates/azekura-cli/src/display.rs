//! Numbers, bars and tables as text.

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// "12.3 MiB".
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// "1,234,567".
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// "1 table", "2 tables", "2 entries".
pub(crate) fn plural(n: u64, noun: &str) -> String {
    match (n, noun.strip_suffix("ry")) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{} {stem}ries", count(n)),
        (_, None) => format!("{} {noun}s", count(n)),
    }
}

/// "83 ms", "2.4 s".
pub(crate) fn duration(d: Duration) -> String {
    match d.as_nanos() {
        0..1_000_000 => format!("{} µs", d.as_micros()),
        1_000_000..1_000_000_000 => format!("{:.1} ms", d.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", d.as_secs_f64()),
    }
}

/// "97.3 % (12,345 of 12,690)", or "no reads" if `whole` is 0.
pub(crate) fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "no reads".into();
    }
    format!("{:.1} % ({} of {})", part as f64 * 100.0 / whole as f64, count(part), count(whole))
}

/// A bar whose length is `part / whole` of `width` characters, in steps of an eighth of a character.
pub(crate) fn bar(part: u64, whole: u64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if part == 0 || whole == 0 {
        return String::new();
    }
    let eighths = ((part as f64 / whole as f64).min(1.0) * (width * 8) as f64).round().max(1.0) as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

/// A table without borders; the columns in `right` are aligned to the right.
pub(crate) fn plain_table(head: &[&str], right: std::ops::Range<usize>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(head);
    for column in right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A table with borders, of names and values.
pub(crate) fn name_value_table(rows: &[(&str, String)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    for (name, value) in rows {
        table.add_row([*name, value]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(5 << 40), "5.0 TiB");
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(plural(1, "entry"), "1 entry");
        assert_eq!(plural(2000, "entry"), "2,000 entries");
        assert_eq!(plural(0, "key"), "0 keys");
        assert_eq!(duration(Duration::from_micros(1500)), "1.5 ms");
        assert_eq!(share(1, 4), "25.0 % (1 of 4)");
        assert_eq!(share(0, 0), "no reads");
    }

    #[test]
    fn bar_length_follows_its_share() {
        assert_eq!(bar(0, 10, 10), "");
        assert_eq!(bar(1, 1_000_000, 10), "▏");
        assert_eq!(bar(5, 10, 10), "█████");
        assert_eq!(bar(10, 10, 10).chars().count(), 10);
    }
}
