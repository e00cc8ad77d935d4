//! Everything a report is made from: written as `report.json`, so that a page can be made again without running.

use crate::failure::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// Version of the file. A reader refuses others.
pub(crate) const FORMAT: u32 = 1;

/// One run of a preset. Measurements and conditions are kept as they were printed, so that figures added later do not
/// make older files unreadable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Document {
    pub(crate) format: u32,
    /// Preset by name.
    pub(crate) preset: String,
    /// When it began, by the system's clock.
    pub(crate) made: String,
    /// The version of azekura, with its commit if that is known.
    pub(crate) version: String,
    /// The command that makes it again.
    pub(crate) command: String,
    /// Engines asked for, in the order of their columns.
    pub(crate) engines: Vec<EngineNote>,
    /// What [`crate::machine::conditions::Conditions`] says.
    pub(crate) conditions: Value,
    /// Seconds it should have taken, was allowed to take, and took.
    pub(crate) planned_s: f64,
    pub(crate) limit_s: f64,
    pub(crate) took_s: f64,
    /// Rounds wanted of each measurement.
    pub(crate) rounds: u32,
    pub(crate) sections: Vec<Section>,
}

/// One engine of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineNote {
    pub(crate) name: String,
    /// Version, if it is known.
    pub(crate) version: Option<String>,
    /// Why it did not run at all.
    pub(crate) missing: Option<String>,
}

/// Workloads on one data set with one set of options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Section {
    pub(crate) title: String,
    pub(crate) about: String,
    /// The command that makes these measurements alone.
    pub(crate) command: String,
    /// The figure that engines are compared by.
    pub(crate) goal: Goal,
    /// What `--json` prints of each round.
    pub(crate) measurements: Vec<Value>,
    /// What was left out, in words.
    pub(crate) dropped: Option<String>,
}

/// The figure that engines are compared by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Goal {
    /// Its field in a measurement.
    pub(crate) field: String,
    /// Its unit.
    pub(crate) unit: String,
    /// Whether less of it is better.
    pub(crate) less_is_better: bool,
}

impl Document {
    /// Reads a document back.
    ///
    /// # Errors
    /// It is no such file, or one of another format.
    pub(crate) fn read(path: &Path) -> Result<Document> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Document::parse(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    /// Parses a document.
    pub(crate) fn parse(text: &str) -> Result<Document> {
        let value: Value = serde_json::from_str(text)?;
        match value["format"].as_u64() {
            Some(format) if format == u64::from(FORMAT) => Ok(serde_json::from_value(value)?),
            Some(format) => Err(format!("this is a report of format {format}; this program reads {FORMAT}").into()),
            None => Err("this is no report: it has no `format`".into()),
        }
    }

    /// The file's text, with a line per measurement: a committed report can be compared line by line.
    pub(crate) fn text(&self) -> Result<String> {
        let mut head = serde_json::to_value(self)?;
        let mut sections = Vec::new();
        for section in &self.sections {
            let mut own = serde_json::to_value(section)?;
            own["measurements"] = Value::Array(Vec::new());
            let lines: Vec<String> = section.measurements.iter().map(|one| format!("\n      {one}")).collect();
            let filled = format!("\"measurements\":[{}]", lines.join(","));
            sections.push(format!("\n    {}", own.to_string().replacen("\"measurements\":[]", &filled, 1)));
        }
        head["sections"] = Value::Array(Vec::new());
        let filled = format!("\"sections\":[{}\n]", sections.join(","));
        Ok(head.to_string().replacen("\"sections\":[]", &filled, 1) + "\n")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Document, FORMAT};

    /// A small report of three engines, two sections and every kind of row: good, failed, missing, partial.
    pub(crate) fn sample() -> Document {
        Document::parse(include_str!("sample.json")).unwrap()
    }

    #[test]
    fn a_document_survives_its_file() {
        let document = sample();
        let text = document.text().unwrap();
        assert!(text.lines().count() > document.sections[0].measurements.len(), "a line per measurement");
        assert_eq!(Document::parse(&text).unwrap(), document);
    }

    #[test]
    fn other_files_are_refused_in_words() {
        let refused = |text: &str| Document::parse(text).unwrap_err().to_string();
        assert!(refused("{}").contains("no `format`"));
        assert!(refused("{\"format\": 99}").contains(&format!("format 99; this program reads {FORMAT}")));
        assert!(Document::parse("[").is_err() && Document::parse("{\"format\": 1}").is_err());
    }
}
