//! Text tables for the terminal.

use crate::measure::device::{Conditions, DeviceLimits};
use crate::report::compare::{engines, figure};
use crate::task::child::median;
use comfy_table::presets::NOTHING;
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

/// A table with `words` columns of words on the left, then numbers.
fn table(heading: Vec<String>, words: usize, rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(heading).add_rows(rows);
    let columns = table.column_count();
    table.column_iter_mut().enumerate().for_each(|(i, column)| {
        column.set_padding((0, if i + 1 == columns { 0 } else { 2 }));
        column.set_cell_alignment(if i < words { CellAlignment::Left } else { CellAlignment::Right });
    });
    table.trim_fmt() + "\n"
}

fn decimal(number: Option<f64>, decimals: usize) -> String {
    number.map_or_else(|| "-".into(), |number| format!("{number:.decimals$}"))
}

/// The objects of a run: the medians of every workload, number of threads and engine.
pub(crate) fn medians(objects: &[Map<String, Value>]) -> String {
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
    table(heading.into_iter().map(str::to_owned).collect(), 2, rows)
}

/// The figures that only this workload has, which follow `error_kind`, and what went wrong.
fn remarks(object: &Map<String, Value>) -> String {
    let own = object.iter().skip_while(|(name, _)| *name != "error_kind").skip(1);
    let own = own.take_while(|(name, _)| *name != "best_peer").map(|(name, value)| match value {
        Value::Number(number) if number.is_f64() => format!("{name} {:.2}", number.as_f64().unwrap_or(f64::NAN)),
        other => format!("{name} {other}"),
    });
    own.chain(object["error"].as_str().map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

/// The medians of the numbers of an `open` or `partitions` run, one row for each engine.
pub(crate) fn openings(rows: &[Value]) -> String {
    let fields: Vec<&String> =
        rows.first().and_then(Value::as_object).into_iter().flatten().map(|(name, _)| name).collect();
    let fields = &fields[1..]; // the first one is the engine
    let heading = ["engine", "rounds"].into_iter().chain(fields.iter().map(|field| field.as_str()));
    let cells = engines(rows).into_iter().map(|engine| {
        let own: Vec<&Value> = rows.iter().filter(|row| row["engine"] == engine).collect();
        let number = |field: &&String| {
            let middle = median(own.iter().filter_map(|row| figure(row, field)).collect());
            decimal(middle, if field.ends_with("_ms") { 2 } else { 0 })
        };
        [engine.to_owned(), own.len().to_string()].into_iter().chain(fields.iter().map(number)).collect()
    });
    table(heading.map(str::to_owned).collect(), 1, cells)
}

/// The conditions of a run in a few lines.
pub(crate) fn conditions(c: &Conditions) -> String {
    let load = |load: [f64; 3]| load.map(|one| format!("{one:.2}")).join(" ");
    let gib = c.memory_bytes as f64 / f64::from(1 << 30);
    let (before, after) = (load(c.load_average_before), load(c.load_average_after));
    format!(
        "{} x {}, {gib:.1} GiB, Linux {}, {}; load average {before} before, {after} after\n\
         harness: {:.0} ns per put, {:.0} ns per get\ndevice before: {}\ndevice after:  {}\n",
        c.cpus,
        c.cpu_model,
        c.kernel,
        c.file_system,
        c.harness.put_ns,
        c.harness.get_ns,
        device(&c.device_before),
        device(&c.device_after),
    )
}

fn device(limits: &DeviceLimits) -> String {
    format!(
        "pwrite {:.0} MB/s, small pwrite {:.0}/s, fdatasync mean {:.0} us median {:.0} us, \
         pread 4 KiB {} direct, {:.0}/s cached",
        limits.pwrite_mb_per_s,
        limits.small_pwrite_per_s,
        limits.fdatasync_mean_us,
        limits.fdatasync_p50_us,
        limits.direct_pread_per_s.map_or("not offered".into(), |rate| format!("{rate:.0}/s")),
        limits.cached_pread_per_s,
    )
}

#[cfg(test)]
mod tests {
    use super::{medians, openings};
    use crate::error::ErrorKind;
    use crate::report::compare::run_objects;
    use crate::task::measure::tests::{failed, sample};
    use serde_json::json;

    #[test]
    fn each_engine_has_one_row() {
        let rows = [sample("azekura", 1, 1.0), sample("azekura", 2, 1.0), sample("fjall", 1, 2.0)];
        let text = medians(&run_objects(&rows, &json!({}), &json!({})));
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("2.00") && text.contains("commits_per_s 50.00"), "{text}");
    }

    #[test]
    fn row_without_figures_shows_the_error() {
        let rows = [sample("azekura", 1, 1.0), failed("fjall", ErrorKind::TimedOut)];
        let text = medians(&run_objects(&rows, &json!({}), &json!({})));
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("fillrandom  fjall") && last.ends_with("why"), "{text}");
    }

    #[test]
    fn openings_show_medians() {
        let rows = [1.0, 9.0, 3.0].map(|ms| json!({"engine": "azekura", "open_ms": ms, "tables": 7}));
        let text = openings(&rows);
        let cells: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(cells, ["azekura", "3", "3.00", "7"]);
    }
}
