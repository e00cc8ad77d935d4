//! The results page of a preset: Markdown with one chart, made from a JSON document that keeps every figure.

use crate::engine::registry::OURS;
use crate::error::Result;
use crate::measure::disk;
use crate::report::{chart, table};
use minijinja::{Environment, value::Serde};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Workloads on one data set with one set of options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) about: String,
    /// Arguments of `run` that make these measurements; those of every section first.
    pub(crate) arguments: String,
    /// The objects that `run --json` prints.
    #[serde(default)]
    pub(crate) rows: Vec<Map<String, Value>>,
}

/// A preset, and with its rows the document of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) preset: String,
    /// Arguments of `run` for every section.
    pub(crate) arguments: String,
    /// When it was made, and by which version.
    #[serde(default)]
    pub(crate) made: String,
    #[serde(default)]
    pub(crate) version: String,
    pub(crate) sections: Vec<Section>,
}

/// The presets that `report` knows.
pub(crate) fn presets() -> Result<Vec<Report>> {
    Ok(serde_json::from_str(include_str!("presets.json"))?)
}

impl Report {
    /// Writes `report.md`, its chart `ratios.svg`, and this document as `report.json`.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        disk::write(dir, "report.json", &format!("{}\n", json!(self)))?;
        disk::write(dir, "report.md", &self.markdown()?)?;
        let title = "azekura divided by its best peer";
        self.chart(title).map_or(Ok(()), |svg| disk::write(dir, "ratios.svg", &svg))
    }

    fn markdown(&self) -> Result<String> {
        let table = |section: &Section| table::medians(&section.rows, true);
        let tables: Vec<String> = self.sections.iter().map(table).collect();
        let conditions = self.sections.iter().find_map(|section| section.rows.first()?.get("conditions"));
        let context = json!({"report": self, "tables": tables, "conditions": conditions});
        Ok(Environment::new().render_str(include_str!("page.jinja"), Serde(context))?)
    }

    /// A bar for each workload: the throughput of azekura divided by that of its best peer.
    fn chart(&self, title: &str) -> Option<String> {
        let ours = |row: &&Map<String, Value>| row.get("engine").is_some_and(|engine| engine == OURS);
        let rows = self.sections.iter().flat_map(|section| &section.rows).filter(ours);
        let bar = |row: &Map<String, Value>| {
            let (workload, threads) = (row.get("workload")?.as_str()?, row.get("threads")?.as_u64()?);
            let label = if threads == 1 { workload.into() } else { format!("{workload}, {threads} threads") };
            Some((label, row.get("ratio_to_best_peer")?.as_f64()?))
        };
        chart::bars(title, &rows.filter_map(bar).collect::<Vec<_>>())
    }
}

/// The version of this crate, which is that of azekura.
pub(crate) fn version() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// Date and time, UTC.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}

#[cfg(test)]
mod tests {
    use super::{Report, presets};
    use crate::report::compare::run_objects;
    use crate::task::measure::tests::sample;
    use serde_json::json;

    #[test]
    fn report_is_written_and_read_again() {
        let rows = [sample("azekura", 1, 1.0), sample("fjall", 1, 2.0)];
        let conditions = json!({"cpus": 2, "cpu_model": "A 9000", "kernel": "6.1", "file_system": "ext4"});
        let mut report = presets().unwrap().remove(0);
        (report.made, report.version) = ("2026-03-01 12:00 UTC".into(), "0.1.0".into());
        report.sections.truncate(1);
        report.sections[0].rows = run_objects(&rows, &json!({}), &conditions);
        let dir = tempfile::tempdir().unwrap();
        report.write(dir.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&read("report.json")).unwrap(), report);
        let page = read("report.md");
        for part in ["2026-03-01 12:00 UTC", "A 9000", "## Writes", "| fillrandom", "| fjall", "2.00", "ratios.svg"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let chart = read("ratios.svg");
        assert!(roxmltree::Document::parse(&chart).is_ok() && chart.contains("fillrandom"), "{chart}");
    }

    #[test]
    fn report_without_rows_has_no_chart() {
        let report = presets().unwrap().remove(0);
        assert!(report.chart("none").is_none() && report.markdown().unwrap().contains("unknown"));
    }
}
