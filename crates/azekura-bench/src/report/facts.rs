//! The conditions of a document in words, for page and Markdown alike.

use crate::report::document::Document;
use crate::report::quantity::{self, NONE};
use serde_json::Value;

/// Name and value of each condition.
pub(crate) fn facts(document: &Document) -> Vec<(String, String)> {
    let c = &document.conditions;
    let text = |field: &str| c[field].as_str().filter(|text| !text.is_empty()).unwrap_or(NONE).to_owned();
    let loads = |field: &str| {
        let numbers: Vec<String> = c[field]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_f64)
            .map(|one| format!("{one:.2}"))
            .collect();
        if numbers.is_empty() { NONE.into() } else { numbers.join(" ") }
    };
    let cpus = c["cpus"].as_u64().map_or(NONE.to_owned(), |cpus| cpus.to_string());
    let nanos = |field: &str| quantity::or_none(c["harness"][field].as_f64(), |ns| format!("{ns:.0} ns"));
    [
        ("Date", document.made.clone()),
        ("Processors", format!("{cpus} × {}", text("cpu_model"))),
        ("Memory", quantity::or_none(c["memory_bytes"].as_f64(), quantity::bytes)),
        ("Kernel", format!("Linux {}", text("kernel"))),
        ("File system", text("file_system")),
        ("Load average before", loads("load_average_before")),
        ("Load average after", loads("load_average_after")),
        ("Cost of the harness", format!("{} per put, {} per get", nanos("put_ns"), nanos("get_ns"))),
        ("Rounds", format!("{}, engines taking turns", document.rounds)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// Puts a figure in words.
type Show = fn(f64) -> String;

/// What the device can do: name, before, after.
pub(crate) fn device(document: &Document) -> Vec<[String; 3]> {
    let rate = |number: f64| format!("{}/s", quantity::short(number));
    let megabytes = |number: f64| format!("{number:.0} MB/s");
    let rows: [(&str, &str, Show); 6] = [
        ("buffered pwrite of 1 MiB, one sync at the end", "pwrite_mb_per_s", megabytes),
        ("pwrite of 128 bytes, no sync", "small_pwrite_per_s", rate),
        ("pwrite of 4 KiB and fdatasync, mean", "fdatasync_mean_us", quantity::micros),
        ("the same, median", "fdatasync_p50_us", quantity::micros),
        ("pread of 4 KiB past the page cache", "direct_pread_per_s", rate),
        ("pread of 4 KiB from the page cache", "cached_pread_per_s", rate),
    ];
    let cell = |when: &str, field: &str, show: Show| quantity::or_none(document.conditions[when][field].as_f64(), show);
    rows.iter()
        .map(|(name, field, show)| {
            [(*name).to_owned(), cell("device_before", field, *show), cell("device_after", field, *show)]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{device, facts};
    use crate::report::document::tests::sample;
    use serde_json::Value;

    #[test]
    fn conditions_are_told_and_gaps_are_dashes() {
        let mut document = sample();
        let known = facts(&document);
        assert!(known.contains(&("Processors".into(), "2 × A <Model> 9000".into())), "{known:?}");
        assert!(known.contains(&("Load average after".into(), "1.50 0.90 0.50".into())), "{known:?}");
        assert_eq!(device(&document)[4][1..], ["9.00 k/s", "–"]);
        document.conditions = Value::Null;
        assert!(facts(&document).contains(&("Memory".into(), "–".into())));
        assert!(device(&document).iter().all(|row| row[1] == "–" && row[2] == "–"));
    }
}
