//! Fills the templates of the page and of its Markdown version.

use crate::engine::registry::OURS;
use crate::error::Result;
use crate::report::chart::{Series, bars, lines, short, three_digits};
use crate::report::compare::{Case, Goal, Standing, Verdict, cases, ratio};
use crate::report::document::{Document, Section};
use minijinja::Environment;
use serde_json::{Value, json};

/// Columns of the tables: heading, field, unit, whether it is left out where no engine has the figure.
const COLUMNS: [(&str, &str, &str, bool); 18] = [
    ("ops/s", "ops_per_s", "", true),
    ("p50", "p50_us", "us", false),
    ("p99", "p99_us", "us", false),
    ("p99.9", "p999_us", "us", false),
    ("CPU per op", "cpu_us_per_op", "us", false),
    ("write amp", "write_amp", "", false),
    ("space amp", "space_amp", "", false),
    ("peak RSS", "peak_rss_bytes", "bytes", false),
    ("commits per sync", "commits_per_sync", "", true),
    ("writes/s", "writes_per_s", "", true),
    ("p99 of writes", "write_p99_us", "us", true),
    ("open", "open_ms", "ms", true),
    ("first get", "first_get_ms", "ms", true),
    ("close", "close_ms", "ms", true),
    ("settle", "settle_s", "s", true),
    ("fetched per read", "device_bytes_per_op", "bytes", true),
    ("tables", "tables", "", true),
    ("records lost", "lost_records", "", true),
];

/// The page: one file with inline style and drawings, without scripts.
pub(crate) fn html(document: &Document) -> Result<String> {
    render("report.html", include_str!("report.html"), document)
}

/// The same tables as Markdown.
pub(crate) fn markdown(document: &Document) -> Result<String> {
    render("report.md", include_str!("report.md"), document)
}

fn render(name: &str, template: &str, document: &Document) -> Result<String> {
    let mut environment = Environment::new();
    environment.add_filter("unit", |number: Option<f64>, unit: String| quantity(number, &unit));
    environment.add_filter("cell", |text: String| cell(&text));
    let sections: Vec<Value> = document.sections.iter().map(|section| self::section(document, section)).collect();
    let verdicts = || sections.iter().flat_map(|one| one["cases"].as_array()).flatten().map(|case| &case["verdict"]);
    let won = verdicts().filter(|verdict| verdict["wins"] == true).count();
    let lost = verdicts().filter(|verdict| verdict["wins"] == false).count();
    let style = include_str!("style.css");
    let context = json!({"document": document, "sections": sections, "won": won, "lost": lost, "style": style});
    Ok(environment.render_named_str(name, template, minijinja::value::Serde(context))?)
}

/// A section with its cases, ready to be printed.
fn section(document: &Document, section: &Section) -> Value {
    let engines: Vec<&str> = document.engines.iter().map(|engine| engine.name.as_str()).collect();
    let all = cases(&section.measurements, &engines);
    let goal = &section.goal;
    let heading = COLUMNS.iter().find(|column| column.1 == goal.field && goal.unit != "ops/s");
    let heading = heading.map_or(goal.unit.as_str(), |column| column.0);
    let cases: Vec<Value> = all.iter().map(|one| case(document, one, goal)).collect();
    let scaling: Vec<Value> =
        all.chunk_by(|one, next| one.workload == next.workload).filter_map(|group| threads(group, goal)).collect();
    json!({
        "title": section.title, "about": section.about, "command": section.command, "dropped": section.dropped,
        "goal": goal, "heading": heading, "cases": cases, "scaling": scaling,
    })
}

fn case(document: &Document, case: &Case<'_>, goal: &Goal) -> Value {
    let ours = case.of(OURS);
    let verdict = ours.and_then(|own| case.verdict(own, goal));
    let best = case.standings.iter().filter_map(|one| Some((one.engine, one.goal(goal)?)));
    let best = best.reduce(|a, b| if (b.1 > a.1) != goal.less_is_better { b } else { a }).map(|best| best.0);
    let columns = COLUMNS.iter().filter(|(_, field, _, optional)| {
        let known = || case.standings.iter().any(|one| one.median(field).is_some_and(|value| value > 0.0));
        *field != goal.field && (!optional || known())
    });
    let columns: Vec<&(&str, &str, &str, bool)> = columns.collect();
    let standings = case.standings.iter().zip(&document.engines).map(|(one, note)| {
        let cells = columns.iter().map(|(_, field, unit, _)| {
            quantity(if *field == "lost_records" { one.largest(field) } else { one.median(field) }, unit)
        });
        json!({
            "engine": one.engine, "goal": one.goal(goal).map(|number| quantity(Some(number), &goal.unit)),
            "best": best == Some(one.engine), "missing": note.missing.is_some(), "cells": cells.collect::<Vec<_>>(),
            "remarks": remarks(one, note.missing.as_deref(), document.rounds),
            "commits_per_sync": one.median("commits_per_sync").map(three_digits),
        })
    });
    let label =
        if case.threads == 1 { case.workload.into() } else { format!("{}, {} threads", case.workload, case.threads) };
    json!({
        "label": label, "ours": ours.and_then(|own| own.goal(goal)).is_some(), "verdict": verdict.as_ref().map(told),
        "headings": columns.iter().map(|column| column.0).collect::<Vec<_>>(),
        "standings": standings.collect::<Vec<_>>(), "charts": charts(&label, case, goal),
    })
}

fn told(verdict: &Verdict<'_>) -> Value {
    let range = verdict.range.map(|(low, high)| format!("{}–{}", three_digits(low), three_digits(high)));
    json!({
        "peer": verdict.peer, "ratio": format!("{}×", three_digits(verdict.ratio)), "wins": verdict.ratio >= 1.0,
        "range": range, "disputed": verdict.range.is_some_and(|(low, high)| low < 1.0 && high > 1.0),
    })
}

/// Everything that should be said beside the figures of an engine.
fn remarks(standing: &Standing<'_>, missing: Option<&str>, rounds: u32) -> String {
    let mut words: Vec<String> = standing.error().into_iter().collect();
    if standing.rounds.is_empty() {
        words.push(missing.unwrap_or("not run").to_owned());
    } else if standing.error().is_none() && standing.good.len() < rounds as usize {
        words.push(format!("{} of {rounds} rounds", standing.good.len()));
    }
    let above_0 = |field: &str| standing.largest(field).filter(|number| *number > 0.0);
    if let Some(lost) = above_0("lost_records") {
        let holes = above_0("lost_holes").map(|holes| format!(", {holes:.0} of them before later ones that are there"));
        words.push(format!("lost {lost:.0} records{}", holes.unwrap_or_default()));
    }
    if standing.good.iter().any(|round| round["settled"] == false) {
        words.push("did not settle".into());
    }
    words.join("; ")
}

/// The drawings of a case: its course over time, latencies, amplification.
fn charts(label: &str, case: &Case<'_>, goal: &Goal) -> Vec<String> {
    let of = |points: &dyn Fn(&Standing<'_>) -> Vec<(f64, f64)>| -> Vec<Series> {
        let series = |one: &Standing<'_>| Series { name: one.engine.to_owned(), points: points(one) };
        case.standings.iter().map(series).collect()
    };
    let figures = |field: &str| of(&|one| one.median(field).map(|number| (0.0, number)).into_iter().collect());
    let first = match goal.field.as_str() {
        "ops_per_s" => lines(&format!("{label}: ops/s over time"), "seconds", &of(&|one| course(one, goal))),
        field => bars(&format!("{label}: {field}"), &figures(field)),
    };
    let bars_of = |field: &str, name: &str| bars(&format!("{label}: {name}"), &figures(field));
    let written = bars_of("write_amp", "bytes written per byte");
    let space = written.as_ref().and_then(|_| bars_of("space_amp", "bytes on disk per byte"));
    [first, bars_of("p99_us", "p99 latency, µs"), written, space].into_iter().flatten().collect()
}

/// Operations per second over the seconds of the middle round.
fn course(standing: &Standing<'_>, goal: &Goal) -> Vec<(f64, f64)> {
    let mut rounds = standing.good.clone();
    let key = |round: &&Value| round[&goal.field].as_f64().unwrap_or(0.0);
    rounds.sort_by(|one, other| key(one).total_cmp(&key(other)));
    let series = rounds.get(rounds.len() / 2).and_then(|middle| middle["series"].as_array());
    series.into_iter().flatten().filter_map(|one| Some((one["s"].as_f64()?, one["ops_per_s"].as_f64()?))).collect()
}

/// How each engine scales with threads; `None` for a single number of threads.
fn threads(group: &[Case<'_>], goal: &Goal) -> Option<Value> {
    let [first, .., last] = group else { return None };
    let series = |(i, one): (usize, &Standing<'_>)| Series {
        name: one.engine.to_owned(),
        points: group.iter().filter_map(|case| Some((case.threads as f64, case.standings[i].goal(goal)?))).collect(),
    };
    let series: Vec<Series> = first.standings.iter().enumerate().map(series).collect();
    let rows = first.standings.iter().zip(&last.standings).map(|(first, last)| {
        let factor = last.goal(goal).zip(first.goal(goal)).and_then(|(last, first)| ratio(last, first));
        let factor = factor.map_or("–".into(), |factor| format!("{}×", three_digits(factor)));
        json!({"engine": first.engine, "factor": factor})
    });
    let chart = lines(&format!("{} by threads", first.workload), "threads", &series);
    let heading = format!("{}: {} ÷ {} threads", first.workload, last.threads, first.threads);
    Some(json!({"heading": heading, "rows": rows.collect::<Vec<_>>(), "chart": chart}))
}

/// A number in a unit that suits its size; a dash if it is missing.
fn quantity(number: Option<f64>, unit: &str) -> String {
    let Some(number) = number.filter(|number| number.is_finite()) else { return "–".into() };
    let scaled = |number: f64, factor: f64, units: &[&str]| {
        let place = units.iter().enumerate().take_while(|(i, _)| number >= factor.powi(*i as i32) * 0.9995).last();
        let (i, unit) = place.unwrap_or((0, &units[0]));
        format!("{} {unit}", three_digits(number / factor.powi(i as i32)))
    };
    match unit {
        "us" => scaled(number * 1e3, 1e3, &["ns", "µs", "ms", "s"]),
        "ms" => scaled(number * 1e6, 1e3, &["ns", "µs", "ms", "s"]),
        "s" => format!("{number:.1} s"),
        "bytes" => scaled(number, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"]),
        _ => short(number),
    }
}

/// Text that breaks no table of Markdown.
fn cell(text: &str) -> String {
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    one_line.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::{cell, html, markdown, quantity};
    use crate::report::document::tests::sample;
    use serde_json::Value;

    #[test]
    fn markdown_of_the_sample_is_as_expected() {
        let text = markdown(&sample()).unwrap();
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/report/sample.md"), &text).unwrap();
        }
        assert_eq!(text, include_str!("sample.md"), "UPDATE=1 writes the expected text anew");
    }

    #[test]
    fn page_is_one_file_with_all_parts() {
        let page = html(&sample()).unwrap();
        let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
        let parsed = roxmltree::Document::parse(body).unwrap_or_else(|error| panic!("{error}"));
        let all = |tag: &'static str| parsed.descendants().filter(move |node| node.has_tag_name(tag));
        let headings: Vec<&str> = all("h2").filter_map(|node| node.text()).collect();
        assert_eq!(headings, ["Conditions", "Summary", "Reads & writes", "After a kill", "How to read it"]);
        assert_eq!(all("script").count() + all("link").count(), 0, "nothing is fetched");
        assert!(all("svg").count() > 3);
        for words in
            ["A &lt;Model&gt; 9000", "not in this build", "Linux 6.1.0", "2 won", "1 lost", "timed out after 5 s"]
        {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn missing_conditions_are_dashes() {
        let mut document = sample();
        document.conditions = Value::Null;
        document.engines[1].missing = Some("no | such\nthing".into());
        let text = markdown(&document).unwrap();
        assert!(text.contains("| Memory | – |") && text.contains("no: no \\| such thing"), "{text}");
        assert!(html(&document).is_ok());
    }

    #[test]
    fn units_suit_the_size() {
        let us = [0.0, 0.25, 1.5, 1200.0, 3e6].map(|us| quantity(Some(us), "us"));
        assert_eq!(us, ["0 ns", "250 ns", "1.50 µs", "1.20 ms", "3.00 s"]);
        let bytes = [0.0, 512.0, 1536.0, 3.0 * 1024.0 * 1024.0, 2f64.powi(42)].map(|b| quantity(Some(b), "bytes"));
        assert_eq!(bytes, ["0 B", "512 B", "1.50 KiB", "3.00 MiB", "4.00 TiB"]);
        assert_eq!((quantity(None, ""), quantity(Some(1.5), "ms")), ("–".into(), "1.50 ms".into()));
        assert_eq!(cell("a|b\n<c> \\d"), "a\\|b &lt;c> \\\\d");
    }
}
