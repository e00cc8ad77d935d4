//! Text tables for the terminal.

use crate::report::compare::figure;
use comfy_table::presets::{ASCII_MARKDOWN, NOTHING};
use comfy_table::{CellAlignment, Table};
use serde_json::{Map, Value};

const MIB: f64 = (1 << 20) as f64;
/// Columns of numbers in the table of a run: heading, field, factor, decimals.
const COLUMNS: [(&str, &str, f64, usize); 11] = [
    ("ops/s", "ops_per_s", 1.0, 0),
    ("p50 us", "p50_us", 1.0, 2),
    ("p99 us", "p99_us", 1.0, 2),
    ("p99.9 us", "p999_us", 1.0, 2),
    ("max us", "max_us", 1.0, 0),
    ("cpu us/op", "cpu_us_per_op", 1.0, 2),
    ("settle s", "settle_s", 1.0, 2),
    ("write amp", "write_amp", 1.0, 2),
    ("space amp", "space_amp", 1.0, 2),
    ("peak RSS MiB", "peak_rss_bytes", 1.0 / MIB, 0),
    ("ratio", "ratio_to_best_peer", 1.0, 2),
];

fn decimal(number: Option<f64>, decimals: usize) -> String {
    number.map_or_else(|| "-".into(), |number| format!("{number:.decimals$}"))
}

/// The objects of a run: the medians of every workload, number of threads and engine.
pub(crate) fn medians(objects: &[Map<String, Value>], markdown: bool) -> String {
    let mut heading = vec!["workload", "engine", "threads", "ops/s", "slowest s"];
    heading.extend(COLUMNS[1..].iter().map(|column| column.0).chain(["(range)", "scaling", "remarks"]));
    let rows = objects.iter().map(|object| {
        let row = Value::Object(object.clone());
        let word = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let number = |(_, field, factor, decimals): (_, &str, f64, usize)| {
            decimal(figure(&row, field).map(|number| number * factor), decimals)
        };
        let rounds = row["rounds"].as_array().into_iter().flatten();
        let seconds = rounds.flat_map(|round| round["intervals_ops_per_s"].as_array().into_iter().flatten());
        let mut cells = vec![word("workload"), word("engine"), row["threads"].to_string()];
        cells.extend([number(COLUMNS[0]), decimal(seconds.filter_map(Value::as_f64).reduce(f64::min), 0)]);
        cells.extend(COLUMNS[1..].iter().copied().map(number));
        let range = |i| row["ratio_range"][i].as_f64();
        let range = range(0).zip(range(1)).map_or_else(String::new, |(low, high)| format!("({low:.2}-{high:.2})"));
        cells.extend([range, decimal(row["scaling"].as_f64(), 2), remarks(object)]);
        cells
    });
    let mut table = Table::new();
    table.load_style(if markdown { ASCII_MARKDOWN } else { NOTHING }).set_header(heading).add_rows(rows);
    table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.trim_fmt() + "\n"
}

/// The figures that only this workload has, which follow `error_kind`, and the error.
fn remarks(object: &Map<String, Value>) -> String {
    let own = object.iter().skip_while(|(name, _)| *name != "error_kind").skip(1);
    let own = own.take_while(|(name, _)| *name != "best_peer").map(|(name, value)| match value {
        Value::Number(number) if number.is_f64() => format!("{name} {:.2}", number.as_f64().unwrap_or(f64::NAN)),
        other => format!("{name} {other}"),
    });
    own.chain(object["error"].as_str().map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

/// The conditions of a run in a few lines.
pub(crate) fn conditions(c: &Value) -> String {
    let word = |field: &str| c[field].as_str().unwrap_or_default();
    let (cpus, cpu, kernel, file_system) = (&c["cpus"], word("cpu_model"), word("kernel"), word("file_system"));
    let (before, after) = (&c["load_average_before"], &c["load_average_after"]);
    let mut text = format!("{cpus} x {cpu}, Linux {kernel}, {file_system}; load average {before}, after {after}\n");
    for part in ["harness", "device_before", "device_after"] {
        let figures = c[part].as_object().into_iter().flatten();
        let figures = figures.map(|(name, number)| format!("{name} {}", decimal(number.as_f64(), 0)));
        text += &format!("{part}: {}\n", figures.collect::<Vec<_>>().join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::medians;
    use crate::error::ErrorKind;
    use crate::report::compare::run_objects;
    use crate::task::measure::tests::{failed, sample};
    use serde_json::json;

    #[test]
    fn each_engine_has_one_row() {
        let rows = [sample("azekura", 1, 1.0), sample("azekura", 2, 1.0), sample("fjall", 1, 2.0)];
        let text = medians(&run_objects(&rows, &json!({}), &json!({})), false);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("2.00") && text.contains("commits_per_s 50.00"), "{text}");
    }

    #[test]
    fn row_without_figures_shows_the_error() {
        let rows = [sample("azekura", 1, 1.0), failed("fjall", ErrorKind::TimedOut)];
        let text = medians(&run_objects(&rows, &json!({}), &json!({})), false);
        let last = text.lines().last().unwrap_or_default();
        let words: Vec<&str> = last.split_whitespace().collect();
        assert!(words.starts_with(&["fillrandom", "fjall"]) && last.ends_with("why"), "{text}");
    }
}
