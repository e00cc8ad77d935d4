//! Which charts a case gets.

use crate::report::columns::goal_heading;
use crate::report::draw::chart::{self, Bar, Dots, Line};
use crate::report::figures::{Case, Standing};
use crate::report::quantity;

const PERCENTILES: [(&str, &str); 3] = [("p50", "p50_us"), ("p99", "p99_us"), ("p99.9", "p999_us")];

/// The charts of one case: what nobody has figures for is not drawn.
pub(crate) fn of_case(case: &Case<'_>) -> Vec<String> {
    let name = case.label();
    let goal = &case.section.goal;
    let throughput = goal.field == "ops_per_s";
    let first = if throughput {
        chart::lines(&format!("{name}: ops/s over time"), "seconds", &courses(case, "ops_per_s"))
            .or_else(|| goal_bars(case))
    } else {
        goal_bars(case)
    };
    let latency = throughput.then(|| latencies(case)).flatten();
    let written = amplification(case, "write_amp", "write amplification");
    // Space stands beside writing only: a workload that reads says nothing about it.
    let space = written.as_ref().and_then(|_| amplification(case, "space_amp", "space amplification"));
    [first, latency, written, space].into_iter().flatten().collect()
}

fn goal_bars(case: &Case<'_>) -> Option<String> {
    let goal = &case.section.goal;
    let show: fn(f64) -> String = if goal.unit == "ms" { |ms| quantity::micros(ms * 1e3) } else { quantity::short };
    let title = match goal.unit.as_str() {
        "ms" => format!("{}: {} (ms)", case.label(), goal_heading(goal)),
        unit => format!("{}: {unit}", case.label()),
    };
    let rows: Vec<Bar> = bars_of(case, |standing| standing.goal(goal));
    chart::bars(&title, &rows, show)
}

fn bars_of(case: &Case<'_>, value: impl Fn(&Standing<'_>) -> Option<f64>) -> Vec<Bar> {
    case.standings.iter().map(|standing| Bar { engine: standing.engine.clone(), value: value(standing) }).collect()
}

fn courses(case: &Case<'_>, field: &str) -> Vec<Line> {
    let course = |standing: &Standing<'_>| standing.course(&case.section.goal, field);
    case.standings.iter().map(|standing| Line { engine: standing.engine.clone(), points: course(standing) }).collect()
}

fn latencies(case: &Case<'_>) -> Option<String> {
    let rows: Vec<Dots> = case
        .standings
        .iter()
        .map(|standing| Dots {
            engine: standing.engine.clone(),
            values: PERCENTILES.iter().map(|(_, field)| standing.median(field)).collect(),
        })
        .collect();
    chart::latencies(&format!("{}: latency", case.label()), &PERCENTILES.map(|(name, _)| name), &rows)
}

/// Over time where the values are large enough for it to change within a run, else as bars.
fn amplification(case: &Case<'_>, field: &str, name: &str) -> Option<String> {
    let title = format!("{}: {name}", case.label());
    let over_time = || chart::lines(&format!("{title} over time"), "seconds", &courses(case, field));
    let as_bars = || chart::bars(&title, &bars_of(case, |standing| standing.median(field)), quantity::three_digits);
    if case.workload == "bloboverwrite" { over_time().or_else(as_bars) } else { as_bars() }
}

/// The chart of a workload over numbers of threads.
pub(crate) fn of_threads(group: &[Case<'_>]) -> Vec<String> {
    let Some(first) = group.first() else { return Vec::new() };
    let goal = &first.section.goal;
    let points = |engine: usize| {
        group
            .iter()
            .filter_map(|case| Some((case.threads as f64, case.standings.get(engine)?.goal(goal)?)))
            .collect::<Vec<_>>()
    };
    let lines: Vec<Line> = first
        .standings
        .iter()
        .enumerate()
        .map(|(i, standing)| Line { engine: standing.engine.clone(), points: points(i) })
        .collect();
    let title = format!("{}: {} by threads", first.workload, goal_heading(goal));
    chart::lines(&title, "threads", &lines).into_iter().collect()
}
