//! Text for people: aligned columns, and the conditions beside them.

use crate::machine::conditions::Conditions;
use crate::machine::device::DeviceLimits;
use crate::report::measurement::Measurement;
use crate::report::summary::{Summary, median};
use serde_json::Value;

/// Sets rows in columns; the first row is the heading. Numbers stand right, the first two columns left.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    // A row that ends early says something in its last cell, which makes no column wider.
    let rows_of = |column: usize| rows.iter().filter(move |row| row.len() == columns || column + 1 < row.len());
    let width =
        |column: usize| rows_of(column).filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
            if column < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// The medians of every workload and engine.
pub(crate) fn medians(summaries: &[Summary]) -> String {
    let heading = [
        "workload",
        "engine",
        "threads",
        "ops/s",
        "slowest s",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "max us",
        "cpu us/op",
        "settle s",
        "write amp",
        "space amp",
        "peak RSS MiB",
        "ratio",
        "(range)",
        "scaling",
        "remarks",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for summary in summaries {
        let m = &summary.median;
        if m.ops == 0
            && let Some(error) = &m.error
        {
            rows.push(vec![m.workload.clone(), m.engine.clone(), m.threads.to_string(), error.clone()]);
            continue;
        }
        let intervals = summary.rounds.iter().flat_map(|round| &round.intervals_ops_per_s);
        let slowest = intervals.copied().reduce(f64::min);
        rows.push(vec![
            m.workload.clone(),
            m.engine.clone(),
            m.threads.to_string(),
            format!("{:.0}", m.ops_per_s),
            slowest.map_or("-".into(), |rate| format!("{rate:.0}")),
            format!("{:.2}", m.p50_us),
            format!("{:.2}", m.p99_us),
            format!("{:.2}", m.p999_us),
            format!("{:.0}", m.max_us),
            format!("{:.2}", m.cpu_us_per_op),
            format!("{:.2}", m.settle_s),
            m.write_amp.map_or("-".into(), |amp| format!("{amp:.2}")),
            format!("{:.2}", m.space_amp),
            format!("{:.0}", m.peak_rss_bytes as f64 / f64::from(1 << 20)),
            summary.ratio_to_best_peer.map_or("-".into(), |ratio| format!("{ratio:.2}")),
            summary.ratio_range.map_or(String::new(), |(low, high)| format!("({low:.2}-{high:.2})")),
            summary.scaling.map_or(String::new(), |scaling| format!("{scaling:.2}")),
            remarks(m),
        ]);
    }
    align(&rows)
}

/// What only this workload has, and what went wrong in some rounds.
fn remarks(m: &Measurement) -> String {
    let number = |value: &Value| match value.as_f64() {
        Some(number) if value.is_f64() => format!("{number:.2}"),
        _ => value.to_string(),
    };
    let own = m.extra.iter().map(|(name, value)| format!("{name} {}", number(value)));
    own.chain(m.error.clone()).collect::<Vec<_>>().join(", ")
}

/// The conditions of a run in a few lines.
pub(crate) fn conditions(conditions: &Conditions) -> String {
    let c = conditions;
    let load = |load: [f64; 3]| load.map(|one| format!("{one:.2}")).join(" ");
    format!(
        "{} x {}, {:.1} GiB, Linux {}, {}; load average {} before, {} after\n\
         harness: {:.0} ns per put, {:.0} ns per get\ndevice before: {}\ndevice after:  {}\n",
        c.cpus,
        c.cpu_model,
        c.memory_bytes as f64 / f64::from(1 << 30),
        c.kernel,
        c.file_system,
        load(c.load_average_before),
        load(c.load_average_after),
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

/// The medians of the numbers of an `open` or `partitions` run, one row per engine.
pub(crate) fn openings(answers: &[(String, Value)]) -> String {
    let mut engines: Vec<&str> = Vec::new();
    for (engine, _) in answers {
        if !engines.contains(&engine.as_str()) {
            engines.push(engine);
        }
    }
    let Some(Value::Object(first)) = answers.first().map(|(_, answer)| answer) else { return String::new() };
    let mut rows = vec![["engine", "rounds"].into_iter().map(str::to_owned).chain(first.keys().cloned()).collect()];
    for engine in engines {
        let own: Vec<&Value> = answers.iter().filter(|(name, _)| name == engine).map(|(_, answer)| answer).collect();
        let cells = first.keys().map(|key| {
            let middle = median(own.iter().filter_map(|answer| answer[key].as_f64()).collect());
            if key.ends_with("_ms") { format!("{middle:.2}") } else { format!("{middle:.0}") }
        });
        rows.push([engine.to_owned(), own.len().to_string()].into_iter().chain(cells).collect());
    }
    align(&rows)
}

#[cfg(test)]
mod tests {
    use super::{align, medians, openings};
    use crate::failure::{Kind, Told};
    use crate::report::measurement::Measurement;
    use crate::report::measurement::tests::{sample, sample_task};
    use crate::report::summary::summarise;
    use serde_json::json;

    #[test]
    fn columns_line_up() {
        let rows =
            [vec!["a", "b", "number"], vec!["long", "x", "1"]].map(|row| row.into_iter().map(str::to_owned).collect());
        assert_eq!(align(&rows), "a     b  number\nlong  x       1\n");
    }

    #[test]
    fn tables_name_each_engine_once() {
        let text =
            medians(&summarise(&[sample("azekura", 1, 1.0), sample("azekura", 2, 1.0), sample("fjall", 1, 2.0)]));
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("2.00") && text.contains("commits_per_s 50.00"), "{text}");
    }

    #[test]
    fn a_row_without_figures_says_why() {
        let told = Told { kind: Kind::TimedOut, error: "timed out after 120 s".into() };
        let hung = Measurement::failed("fjall", &sample_task("fjall", 1).1, &told);
        let text = medians(&summarise(&[sample("azekura", 1, 1.0), hung]));
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("fillrandom  fjall") && last.ends_with("timed out after 120 s"), "{text}");
    }

    #[test]
    fn openings_show_medians() {
        let answers = [1.0, 9.0, 3.0].map(|ms| ("azekura".to_owned(), json!({"open_ms": ms, "tables": 7})));
        assert!(openings(&answers).ends_with("azekura  3          3.00       7\n"), "{}", openings(&answers));
    }
}
