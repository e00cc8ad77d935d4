//! The result of a preset: written as `report.json`, so that its page can be made again without running.

use crate::engine::registry::is_ours;
use crate::error::Result;
use crate::report::compare::Goal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Version of the file. Others are refused.
pub(crate) const FORMAT: u64 = 1;
/// Pins the versions of engines that are crates.
const LOCK: &str = include_str!("../../../../Cargo.lock");

/// One run of a preset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Document {
    pub(crate) format: u64,
    pub(crate) preset: String,
    /// When it began.
    pub(crate) made: String,
    /// The version of azekura, with its commit if that is known.
    pub(crate) version: String,
    /// The command that makes it again.
    pub(crate) command: String,
    /// Engines in the order of their columns.
    pub(crate) engines: Vec<EngineNote>,
    pub(crate) conditions: Value,
    pub(crate) planned_s: f64,
    pub(crate) limit_s: f64,
    pub(crate) took_s: f64,
    pub(crate) rounds: u32,
    pub(crate) sections: Vec<Section>,
}

/// One engine of a report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EngineNote {
    pub(crate) name: String,
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
    pub(crate) goal: Goal,
    /// The figures of each round.
    pub(crate) measurements: Vec<Value>,
    /// Which measurements were left out.
    pub(crate) dropped: Option<String>,
}

impl Document {
    /// Reads a document; an error if it is no such file or one of another format.
    pub(crate) fn read(path: &Path) -> Result<Document> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Document::parse(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    pub(crate) fn parse(text: &str) -> Result<Document> {
        let value: Value = serde_json::from_str(text)?;
        match value["format"].as_u64() {
            Some(FORMAT) => Ok(serde_json::from_value(value)?),
            Some(format) => Err(format!("this is a report of format {format}; this program reads {FORMAT}").into()),
            None => Err("this is not a report: it has no `format`".into()),
        }
    }

    /// Takes over the versions that engines reported with their measurements.
    pub(crate) fn note_versions(&mut self) {
        let rows: Vec<&Value> = self.sections.iter().flat_map(|section| &section.measurements).collect();
        for note in &mut self.engines {
            let own = rows.iter().filter(|row| row["engine"] == note.name.as_str());
            let reported = own.filter_map(|row| row["engine_stats"]["version"].as_str()).next();
            note.version = reported.map(str::to_owned).or(note.version.take());
        }
    }
}

/// The version of azekura, with its commit if the sources are at hand, and whether they were changed.
pub(crate) fn own_version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let git = |arguments: &[&str]| {
        let answer = Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(arguments).output().ok()?;
        answer.status.success().then(|| String::from_utf8_lossy(&answer.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]).filter(|commit| !commit.is_empty()) else {
        return version.to_owned();
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    format!("{version} ({commit}{})", if changed { ", changed" } else { "" })
}

/// The version of an engine that is a crate.
pub(crate) fn version_of(engine: &str) -> Option<String> {
    if is_ours(engine) { Some(env!("CARGO_PKG_VERSION").to_owned()) } else { locked_version(LOCK, engine) }
}

fn locked_version(lock: &str, name: &str) -> Option<String> {
    let value = |entry: &str, field: &str| -> Option<String> {
        let line = entry.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(" = "))?;
        Some(line.trim_matches('"').to_owned())
    };
    let entry = lock.split("[[package]]").find(|entry| value(entry, "name").as_deref() == Some(name))?;
    value(entry, "version")
}

/// Date and time, UTC.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Document, FORMAT, locked_version, own_version, version_of};
    use serde_json::json;

    /// A small report of three engines and two sections with good, failed, missing and partial rows.
    pub(crate) fn sample() -> Document {
        Document::parse(include_str!("sample.json")).unwrap()
    }

    #[test]
    fn document_survives_its_file() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert_eq!(Document::parse(&text).unwrap(), sample());
    }

    #[test]
    fn other_files_are_refused() {
        let refused = |text: &str| Document::parse(text).unwrap_err().to_string();
        assert!(refused("{}").contains("no `format`"));
        assert!(refused("{\"format\": 99}").contains(&format!("format 99; this program reads {FORMAT}")));
        assert!(Document::parse("[").is_err() && Document::parse("{\"format\": 1}").is_err());
    }

    #[test]
    fn versions_come_from_the_lock_file_or_the_engine() {
        let entry = |name: &str, version: &str| format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        let lock = format!("version = 4\n{}{}", entry("a-b", "9.0.0"), entry("a", "1.2.3"));
        assert_eq!((locked_version(&lock, "a").as_deref(), locked_version(&lock, "b")), (Some("1.2.3"), None));
        assert!(version_of("fjall").unwrap().starts_with("3."), "the lock file pins it");
        assert!(own_version().starts_with(env!("CARGO_PKG_VERSION")));
        let mut document = sample();
        document.sections[0].measurements[1]["engine_stats"] = json!({"version": "10.1"});
        document.note_versions();
        let versions: Vec<_> = document.engines.iter().map(|note| note.version.as_deref()).collect();
        assert_eq!(versions, [Some("0.1.0"), Some("10.1"), None]);
    }
}
