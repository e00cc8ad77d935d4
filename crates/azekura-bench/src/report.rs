//! From the figures of single rounds to medians, ratios to the best peer, and their ranges; the table of a run; and the
//! results page of a preset: Markdown with a table for each section and one chart. Reads figures by name: a missing
//! figure stays missing.

use crate::engine::object;
use crate::engine::registry::{OURS, is_ours};
use crate::error::Result;
use crate::measure::meter::{median, ratio};
use crate::task::comparison::Case;
use anyhow::Context;
use comfy_table::presets::{ASCII_MARKDOWN, NOTHING};
use comfy_table::{CellAlignment, Table};
use minijinja::{Environment, value::Serde};
use plotters::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// The version of this crate, which is that of azekura.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A figure of a measurement: a field of its own or one of its `engine_stats`.
pub(crate) fn figure(row: &Value, field: &str) -> Option<f64> {
    [&row[field], &row["engine_stats"][field]].into_iter().find_map(Value::as_f64).filter(|number| number.is_finite())
}

fn ops_per_s(row: &Value) -> Option<f64> {
    figure(row, "ops_per_s").filter(|rate| *rate > 0.0)
}

/// The rounds that have figures.
fn good(case: &Case) -> impl Iterator<Item = &Value> {
    case.iter().filter(|round| round["error"].is_null())
}

/// The median of operations per second, by which engines are compared.
fn median_rate(case: &Case) -> Option<f64> {
    median(good(case).filter_map(ops_per_s).collect())
}

/// Whether all these fields of two cases are the same.
fn same(fields: &[&str], one: &Case, other: &Case) -> bool {
    fields.iter().all(|field| one[0][*field] == other[0][*field])
}

/// The best peer, the ratio of medians to it, above 1 if this engine is faster, and the least and largest ratio of a
/// round. The engines of azekura are not peers of each other.
fn best_peer<'c>(own: &Case, cases: &'c [Case]) -> Option<(&'c Value, f64, Option<[f64; 2]>)> {
    let rate = median_rate(own)?;
    let ours = |case: &Case| is_ours(case[0]["engine"].as_str().unwrap_or_default());
    let rivals = |other: &&Case| !(same(&["engine"], own, other) || ours(own) && ours(other));
    let peers = cases.iter().filter(|other| same(&["workload", "threads"], own, other)).filter(rivals);
    let rated = peers.filter_map(|peer| Some((peer, median_rate(peer)?)));
    let (best, theirs) = rated.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let ratios = good(own).filter_map(|mine| {
        let theirs = good(best).find(|theirs| theirs["round"] == mine["round"])?;
        ratio(ops_per_s(mine)?, ops_per_s(theirs)?)
    });
    let range = ratios.map(|ratio| [ratio, ratio]).reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]);
    Some((&best[0]["engine"], ratio(rate, theirs)?, range))
}

/// The medians of all figures as one object; a failed round if there are no figures.
fn medians(case: &Case) -> Map<String, Value> {
    let objects: Vec<_> = good(case).filter_map(|round| round.as_object()).collect();
    let Some(bad) = case.iter().find(|round| !round["error"].is_null()) else { return median_object(&objects) };
    if objects.is_empty() {
        return object((*bad).clone());
    }
    let mut medians = median_object(&objects);
    let (bad_rounds, error) = (case.len() - objects.len(), bad["error"].as_str().unwrap_or_default());
    medians.insert("error".into(), json!(format!("{bad_rounds} of {} rounds: {error}", case.len())));
    medians.insert("error_kind".into(), bad["error_kind"].clone());
    medians
}

/// The median of each number over several objects; the other values are those of the first.
fn median_object(objects: &[&Map<String, Value>]) -> Map<String, Value> {
    let merge = |(name, value): (&String, &Value)| {
        let middle = || median(objects.iter().filter_map(|object| object.get(name)?.as_f64()).collect());
        let merged = match value {
            Value::Number(number) if number.is_f64() => json!(middle()),
            Value::Number(_) => json!(middle().map(|number| number.round() as u64)),
            Value::Object(_) => {
                let inner: Vec<_> = objects.iter().filter_map(|object| object.get(name)?.as_object()).collect();
                Value::Object(median_object(&inner))
            }
            other => other.clone(),
        };
        (name.clone(), merged)
    };
    objects.first().map_or_else(Map::new, |first| first.iter().map(merge).collect())
}

/// The JSON objects of a run, one for each workload, number of threads and engine.
pub(crate) fn run_objects(cases: &[Case], settings: &Value, conditions: &Value) -> Vec<Map<String, Value>> {
    let row = |own: &Case| {
        let threads = |case: &Case| case[0]["threads"].as_u64();
        let fewest = cases.iter().filter(|other| same(&["workload", "engine"], own, other)).min_by_key(|c| threads(c));
        let alone = fewest.filter(|fewest| threads(fewest) < threads(own)).and_then(median_rate);
        let best = best_peer(own, cases);
        let mut row = medians(own);
        row.shift_remove("round");
        row.extend(object(json!({
            "best_peer": best.map(|(peer, ..)| peer), "ratio_to_best_peer": best.map(|(_, ratio, _)| ratio),
            "ratio_range": best.and_then(|(.., range)| range),
            "scaling": median_rate(own).zip(alone).and_then(|(own, alone)| ratio(own, alone)),
            "settings": settings, "conditions": conditions, "rounds": own,
        })));
        row
    };
    cases.iter().map(row).collect()
}

/// The figures in a table, which are also its headings.
const COLUMNS: &str = "threads ops_per_s p50_us p99_us p999_us max_us cpu_us_per_op settle_s write_amp space_amp \
                       scaling ratio_to_best_peer";

/// Workloads on one data set with one set of options.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) title: String,
    about: String,
    /// Arguments of `run` that make these measurements; those of every section first.
    pub(crate) arguments: String,
    /// The objects that `run --json` prints.
    #[serde(default)]
    pub(crate) rows: Vec<Map<String, Value>>,
}

/// A preset, and with its rows the document of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) preset: String,
    /// Arguments of `run` for every section.
    pub(crate) arguments: String,
    pub(crate) sections: Vec<Section>,
}

/// The presets that `report` knows.
pub(crate) fn presets() -> Result<Vec<Report>> {
    Ok(serde_json::from_str(include_str!("report/presets.json"))?)
}

/// The preset of that name.
pub(crate) fn preset(name: &str) -> Result<Report> {
    let found = presets()?.into_iter().find(|preset| preset.preset == name);
    found.with_context(|| format!("no preset is called `{name}`"))
}

impl Report {
    /// Writes `report.md`, its chart `ratios.svg`, and this document as `report.json`.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let document = format!("{}\n", json!(self));
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        for (name, text) in [("report.json", document), ("report.md", self.markdown()?), ("ratios.svg", self.chart()?)]
        {
            fs::write(dir.join(name), text)?;
            eprintln!("wrote {}", dir.join(name).display());
        }
        Ok(())
    }

    fn markdown(&self) -> Result<String> {
        let tables: Vec<String> = self.sections.iter().map(|section| table(&section.rows, true)).collect();
        let conditions = self.sections.iter().find_map(|section| section.rows.first()?.get("conditions"));
        let context = json!({
            "report": self, "summary": self.summary(), "tables": tables, "conditions": conditions, "made": now(),
            "version": VERSION,
        });
        Ok(Environment::new().render_str(include_str!("report/page.jinja"), Serde(context))?)
    }

    /// Every row with its section.
    fn rows(&self) -> impl Iterator<Item = (&Section, &Map<String, Value>)> {
        self.sections.iter().flat_map(|section| section.rows.iter().map(move |row| (section, row)))
    }

    /// The rows of azekura's LSM partitions.
    fn own_rows(&self) -> impl Iterator<Item = (&Section, &Map<String, Value>)> {
        self.rows().filter(|(_, row)| row["engine"] == OURS)
    }

    /// Operations per second as Markdown: a row for each workload and number of threads, a column for each engine, and
    /// the ratio of azekura to its best peer with its range.
    fn summary(&self) -> String {
        let text = |row: &Map<String, Value>, field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let mut engines: Vec<String> = Vec::new();
        for engine in self.rows().map(|(_, row)| text(row, "engine")) {
            if !engines.contains(&engine) {
                engines.push(engine);
            }
        }
        let mut table = Table::new();
        table.load_style(ASCII_MARKDOWN);
        let before = ["section", "workload", "threads"].map(str::to_owned);
        table.set_header(before.into_iter().chain(engines.clone()).chain([format!("{OURS} ÷ best peer")]));
        for (section, own) in self.own_rows() {
            let of = |engine: &String| {
                let mut rows = section.rows.iter().filter(|row| row["workload"] == own["workload"]);
                let row = rows.find(|row| row["threads"] == own["threads"] && row["engine"] == **engine)?;
                ops_per_s(&Value::Object(row.clone()))
            };
            let rates = engines.iter().map(|engine| of(engine).map_or("–".into(), |rate| format!("{rate:.0}")));
            let ratio = own["ratio_to_best_peer"]
                .as_f64()
                .map(|ratio| format!("{ratio:.2} ({}, {})", text(own, "best_peer"), range(own)));
            let names = [section.title.clone(), text(own, "workload"), own["threads"].to_string()];
            table.add_row(names.into_iter().chain(rates).chain([ratio.unwrap_or("–".into())]));
        }
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        table.trim_fmt() + "\n"
    }

    /// A bar for each workload, in another colour below 1: the throughput of azekura divided by that of its best peer.
    fn chart(&self) -> Result<String> {
        let ratio = |(section, row): (&Section, &Map<String, Value>)| {
            let ratio = row["ratio_to_best_peer"].as_f64()?;
            let (title, workload, threads) = (&section.title, row["workload"].as_str()?, &row["threads"]);
            Some((ratio, format!("{title}: {workload}, threads: {threads}: {ratio:.2}")))
        };
        let ratios: Vec<(f64, String)> = self.own_rows().filter_map(ratio).collect();
        let largest = ratios.iter().fold(1.0, |largest: f64, (ratio, _)| largest.max(*ratio));
        let mut text = String::new();
        let root = SVGBackend::with_string(&mut text, (640, 60 + 22 * ratios.len() as u32)).into_drawing_area();
        let mut builder = ChartBuilder::on(&root);
        builder.caption("azekura divided by its best peer", ("sans-serif", 15)).margin(8).x_label_area_size(34);
        let mut chart = builder.build_cartesian_2d(0.0..largest * 1.8, 0.0..ratios.len().max(1) as f64)?;
        chart.configure_mesh().disable_mesh().disable_y_axis().draw()?;
        for (i, (ratio, label)) in ratios.iter().rev().enumerate() {
            let (colour, bottom) = (if *ratio < 1.0 { RED } else { BLUE }, i as f64);
            chart.draw_series([Rectangle::new([(0.0, bottom + 0.2), (*ratio, bottom + 0.8)], colour.filled())])?;
            let place = (*ratio + largest * 0.02, bottom + 0.65);
            chart.draw_series([Text::new(label.clone(), place, ("sans-serif", 13))])?;
        }
        drop((chart, root));
        Ok(text)
    }
}

/// Date and time, UTC.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}

/// The objects of a run, one row each, as Markdown or for the terminal.
pub(crate) fn table(objects: &[Map<String, Value>], markdown: bool) -> String {
    let mut table = Table::new();
    table.load_style(if markdown { ASCII_MARKDOWN } else { NOTHING });
    let headings = ["workload", "engine"].into_iter().chain(COLUMNS.split(' ')).chain(["range", "remarks"]);
    table.set_header(headings.map(|field| field.replace('_', " ")));
    for object in objects {
        let row = Value::Object(object.clone());
        let numbers = COLUMNS.split(' ').map(|field| match &row[field] {
            Value::Number(whole) if whole.is_u64() => whole.to_string(),
            _ => figure(&row, field).map_or("-".into(), number),
        });
        let names = ["workload", "engine"].map(|field| row[field].as_str().unwrap_or_default().to_owned());
        table.add_row(names.into_iter().chain(numbers).chain([range(object), remarks(object)]));
    }
    table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.trim_fmt() + "\n"
}

fn number(number: f64) -> String {
    if number < 100.0 { format!("{number:.2}") } else { format!("{number:.0}") }
}

/// The least and largest ratio of a round.
fn range(object: &Map<String, Value>) -> String {
    let ratios = object["ratio_range"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    ratios.map(number).collect::<Vec<_>>().join("-")
}

/// The figures that only this workload has, which follow `error_kind`, and the error.
fn remarks(object: &Map<String, Value>) -> String {
    let own = object.iter().skip_while(|(name, _)| *name != "error_kind").skip(1);
    let own = own.take_while(|(name, _)| *name != "best_peer").map(|(name, value)| match value.as_f64() {
        Some(number) => format!("{name} {number:.2}"),
        None => format!("{name} {value}"),
    });
    own.chain(object["error"].as_str().map(str::to_owned)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{Case, Report, figure, presets, ratio, run_objects, same, table};
    use crate::error::ErrorKind;
    use crate::task::measure::tests::{failed, sample};
    use serde_json::{Map, Value, json};

    /// The objects of rows, grouped by workload, threads and engine.
    fn objects(rows: &[Value]) -> Vec<Map<String, Value>> {
        objects_on(rows, &json!({}))
    }

    fn objects_on(rows: &[Value], conditions: &Value) -> Vec<Map<String, Value>> {
        let mut cases: Vec<Case> = Vec::new();
        for row in rows {
            match cases.iter_mut().find(|case| same(&["workload", "threads", "engine"], case, &vec![row.clone()])) {
                Some(case) => case.push(row.clone()),
                None => cases.push(vec![row.clone()]),
            }
        }
        run_objects(&cases, &json!({}), conditions)
    }

    #[test]
    fn ratio_is_none_without_a_number() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        for (top, bottom) in [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)] {
            assert_eq!(ratio(top, bottom), None, "{top} / {bottom}");
        }
        let one = json!({"a": 1.5, "b": null, "engine_stats": {"b": 3, "d": "four"}});
        assert_eq!(["a", "b", "d", "e"].map(|field| figure(&one, field)), [Some(1.5), Some(3.0), None, None]);
    }

    #[test]
    fn ratio_is_of_medians_and_range_of_rounds() {
        // Seconds for 100 operations: azekura 1, 2, 4 and fjall 4, 4, 4.
        let rows = [(1, 1.0), (2, 2.0), (3, 4.0)]
            .map(|(round, seconds)| [sample("azekura", round, seconds), sample("fjall", round, 4.0)]);
        let objects = objects(&rows.concat());
        assert_eq!(objects.len(), 2);
        assert_eq!((&objects[0]["ops_per_s"], &objects[0]["ratio_to_best_peer"]), (&json!(50.0), &json!(2.0)));
        assert_eq!((&objects[0]["best_peer"], &objects[0]["ratio_range"]), (&json!("fjall"), &json!([1.0, 4.0])));
        assert_eq!((&objects[1]["ratio_to_best_peer"], objects[1].get("round")), (&json!(0.5), None));
        assert_eq!((objects[0]["rounds"].as_array().unwrap().len(), &objects[0]["n"]), (3, &json!(100)));
    }

    #[test]
    fn engines_of_azekura_are_not_peers() {
        let all = [sample("azekura", 1, 4.0), sample("azekura-pmem", 1, 1.0), sample("fjall", 1, 8.0)];
        let peers: Vec<Value> = objects(&all).iter().map(|object| object["best_peer"].clone()).collect();
        assert_eq!(peers, ["fjall", "fjall", "azekura-pmem"]);
        assert!(objects(&all[..2]).iter().all(|object| object["best_peer"].is_null()));
    }

    #[test]
    fn failed_rounds_are_skipped_and_reported() {
        let mut late = failed("fjall", ErrorKind::TimedOut);
        late["round"] = json!(2);
        let rows = [sample("azekura", 1, 1.0), sample("fjall", 1, 4.0), sample("azekura", 2, 1.0), late.clone()];
        let two = objects(&rows);
        assert_eq!((&two[1]["ops_per_s"], &two[1]["error"]), (&json!(25.0), &json!("1 of 2 rounds: why")));
        assert_eq!(two[0]["ratio_range"], json!([4.0, 4.0]));
        let alone = objects(&[rows[0].clone(), late]);
        assert_eq!((&alone[1]["error"], &alone[1]["ops_per_s"]), (&json!("why"), &json!(0.0)));
        assert!(alone[0]["ratio_to_best_peer"].is_null() && alone[1]["ratio_to_best_peer"].is_null());
    }

    #[test]
    fn scaling_is_to_the_fewest_threads() {
        let two = |engine: &str, seconds| {
            let mut row = sample(engine, 1, seconds);
            row["threads"] = json!(2);
            row
        };
        let rows = [sample("azekura", 1, 4.0), sample("fjall", 1, 4.0), two("azekura", 1.0), two("fjall", 2.0)];
        let scaling: Vec<Value> = objects(&rows).iter().map(|object| object["scaling"].clone()).collect();
        assert_eq!(scaling, [json!(null), json!(null), json!(4.0), json!(2.0)]);
    }

    #[test]
    fn report_has_every_section_and_a_chart() {
        let rows = [sample("azekura", 1, 1.0), sample("fjall", 1, 2.0)];
        let conditions = json!({"cpus": 2, "cpu_model": "A 9000", "kernel": "6.1", "file_system": "ext4"});
        let mut report = presets().unwrap().remove(0);
        report.sections.truncate(1);
        report.sections[0].rows = objects_on(&rows, &conditions);
        let dir = tempfile::tempdir().unwrap();
        report.write(dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        let written: Report = serde_json::from_str(&read("report.json")).unwrap();
        assert_eq!(written.sections[0].rows, report.sections[0].rows);
        let page = read("report.md");
        for part in ["A 9000", "## Writes", "| fillrandom", "| fjall", "| 2.00 (fjall, 2.00-2.00) |", "ratios.svg"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let chart = read("ratios.svg");
        assert!(roxmltree::Document::parse(&chart).is_ok() && chart.contains("fillrandom"), "{chart}");
    }

    #[test]
    fn report_without_rows_is_written() {
        let report = presets().unwrap().remove(0);
        assert!(roxmltree::Document::parse(&report.chart().unwrap()).is_ok());
        assert!(report.markdown().unwrap().contains("unknown"));
    }

    #[test]
    fn each_engine_has_one_row() {
        let rows = [sample("azekura", 1, 1.0), sample("azekura", 2, 1.0), sample("fjall", 1, 2.0)];
        let text = table(&objects(&rows), false);
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.contains("2.00") && text.contains("commits_per_s 50"), "{text}");
    }

    #[test]
    fn row_without_figures_shows_the_error() {
        let rows = [sample("azekura", 1, 1.0), failed("fjall", ErrorKind::TimedOut)];
        let text = table(&objects(&rows), false);
        let last = text.lines().last().unwrap_or_default();
        let words: Vec<&str> = last.split_whitespace().collect();
        assert!(words.starts_with(&["fillrandom", "fjall"]) && last.ends_with("why"), "{text}");
    }
}
