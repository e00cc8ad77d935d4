//! The columns of a table of figures: which fields are shown, under which heading, in which unit.

use crate::report::document::Goal;
use crate::report::figures::{Case, Standing};
use crate::report::quantity;

/// One column.
pub(crate) struct Column {
    pub(crate) heading: &'static str,
    field: &'static str,
    show: fn(f64) -> String,
    /// Whether it is left out where no engine has the figure.
    optional: bool,
    /// Whether the largest round is shown instead of the median.
    largest: bool,
}

const fn column(heading: &'static str, field: &'static str, show: fn(f64) -> String, optional: bool) -> Column {
    Column { heading, field, show, optional, largest: false }
}

fn millis(ms: f64) -> String {
    quantity::micros(ms * 1000.0)
}

fn whole(number: f64) -> String {
    format!("{number:.0}")
}

/// All columns, in the order they are shown. A field that is the goal of a section has its column already.
const COLUMNS: [Column; 18] = [
    column("ops/s", "ops_per_s", quantity::short, true),
    column("p50", "p50_us", quantity::micros, false),
    column("p99", "p99_us", quantity::micros, false),
    column("p99.9", "p999_us", quantity::micros, false),
    column("CPU per op", "cpu_us_per_op", quantity::micros, false),
    column("write amp", "write_amp", quantity::three_digits, false),
    column("space amp", "space_amp", quantity::three_digits, false),
    column("peak RSS", "peak_rss_bytes", quantity::bytes, false),
    column("commits per sync", "commits_per_sync", quantity::three_digits, true),
    column("writes/s", "writes_per_s", quantity::short, true),
    column("p99 of writes", "write_p99_us", quantity::micros, true),
    column("open", "open_ms", millis, true),
    column("first get", "first_get_ms", millis, true),
    column("close", "close_ms", millis, true),
    column("settle", "settle_s", settle, true),
    column("fetched per read", "device_bytes_per_op", quantity::bytes, true),
    column("tables", "tables", whole, true),
    Column { heading: "records lost", field: "lost_records", show: whole, optional: true, largest: true },
];

fn settle(seconds: f64) -> String {
    format!("{seconds:.1} s")
}

/// The columns that the standings of a case have figures for, without the goal's own.
pub(crate) fn shown(case: &Case<'_>) -> Vec<&'static Column> {
    let wanted = |column: &&Column| {
        let known = || case.standings.iter().any(|standing| column.value(standing).is_some_and(|value| value > 0.0));
        column.field != case.section.goal.field && (!column.optional || known())
    };
    COLUMNS.iter().filter(wanted).collect()
}

impl Column {
    fn value(&self, standing: &Standing<'_>) -> Option<f64> {
        if self.largest { standing.largest(self.field) } else { standing.median(self.field) }
    }

    /// The cell of one engine.
    pub(crate) fn cell(&self, standing: &Standing<'_>) -> String {
        quantity::or_none(self.value(standing), self.show)
    }
}

/// A goal's figure in its unit.
pub(crate) fn show_goal(goal: &Goal, number: f64) -> String {
    match goal.unit.as_str() {
        "ms" => millis(number),
        "us" => quantity::micros(number),
        _ => quantity::short(number),
    }
}

/// A goal's heading.
pub(crate) fn goal_heading(goal: &Goal) -> String {
    match goal.unit.as_str() {
        "ms" | "us" => COLUMNS
            .iter()
            .find(|column| column.field == goal.field)
            .map_or_else(|| goal.field.clone(), |column| column.heading.to_owned()),
        unit => unit.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{goal_heading, show_goal, shown};
    use crate::report::document::Goal;
    use crate::report::document::tests::sample;
    use crate::report::figures::cases;

    #[test]
    fn columns_without_figures_are_left_out() {
        let document = sample();
        let headings = |section: usize, case: usize| -> Vec<&str> {
            let all = cases(&document, &document.sections[section]);
            shown(&all[case]).iter().map(|column| column.heading).collect()
        };
        let always = ["p50", "p99", "p99.9", "CPU per op", "write amp", "space amp", "peak RSS"];
        assert_eq!(headings(0, 0), always);
        assert_eq!(headings(1, 0), [&always[..], &["records lost"]].concat(), "the goal is no column twice");
    }

    #[test]
    fn goals_have_units() {
        let goal = |unit: &str| Goal { field: "open_ms".into(), unit: unit.into(), less_is_better: true };
        assert_eq!((show_goal(&goal("ms"), 1.5), goal_heading(&goal("ms"))), ("1.50 ms".into(), "open".into()));
        assert_eq!((show_goal(&goal("ops/s"), 1500.0), goal_heading(&goal("x"))), ("1.50 k".into(), "x".into()));
    }
}
