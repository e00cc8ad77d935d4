//! `report`: runs a preset and writes its page, or makes the page of an earlier run again.

use crate::cli::{Cli, Command, Place, Report};
use crate::commands::run::comparison;
use crate::engine::registry;
use crate::error::Result;
use crate::measure::device::Conditions;
use crate::measure::disk;
use crate::report::document::{self, Document, EngineNote, FORMAT, Section};
use crate::report::preset::{self, Preset, PresetEntry};
use crate::report::render::{html, markdown};
use crate::task::comparison::{Comparison, Loaded, verdict};
use crate::task::measure::harness_cost;
use crate::workload::data::SMALL_RECORDS;
use clap::Parser;
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Makes a report and writes its files.
pub(crate) fn report(report: &Report) -> Result<()> {
    let presets = preset::all()?;
    let named = presets.iter().find(|preset| preset.name == report.what);
    let (document, outcome) = match (report.what.as_str(), &report.file, named) {
        ("render", Some(file), _) => (Document::read(file)?, Ok(())),
        ("render", None, _) => return Err("render needs the report.json of an earlier run".into()),
        (name, Some(_), _) => return Err(format!("{name} takes no file; only render does").into()),
        (_, None, Some(preset)) => produce(preset, &report.engine, &report.place)?,
        (name, None, None) => return Err(format!("no preset is called `{name}`; there are quick and full").into()),
    };
    write(&document, &report.out)?;
    if report.json {
        println!("{}", json!(document));
    }
    outcome
}

/// Runs `preset` on `engines`, or on all of this build. The second result is an error if azekura lacks figures or an
/// engine gave a wrong answer.
fn produce(preset: &Preset, engines: &[String], place: &Place) -> Result<(Document, Result<()>)> {
    let start = Instant::now();
    let notes = notes(engines)?;
    let running: Vec<String> =
        notes.iter().filter(|note| note.missing.is_none()).map(|note| note.name.clone()).collect();
    let count: u32 = preset.entries.iter().map(|entry| preset.measurements(entry, running.len())).sum();
    let (seconds, planned_s) = (preset.seconds(running.len()), preset.total(running.len()));
    let Preset { name, limit_s, device_s, rounds, .. } = preset;
    eprintln!("{name}: {count} measurements of {seconds} s, about {planned_s:.0} s in all, at most {limit_s:.0} s");
    eprintln!("engines: {}", running.join(", "));
    let scratch = place.scratch()?;
    let mut conditions = Conditions::begin(&scratch.path, harness_cost(&SMALL_RECORDS), *device_s)?;
    let (made, mut loaded, mut outcome, mut sections) = (document::now(), Loaded::default(), Ok(()), Vec::new());
    for (entry, deadline) in preset.entries.iter().zip(preset.deadlines(running.len())) {
        eprintln!("--- {} ({:.0} s so far)", entry.title, start.elapsed().as_secs_f64());
        let words = preset.command(entry, &running);
        let deadline = Some(start + Duration::try_from_secs_f64(deadline)?);
        let rows = Comparison { deadline, ..parse(&words)? }.run(&scratch, &mut loaded)?;
        if entry.last_of_data {
            loaded.clear();
        }
        outcome = outcome.and_then(|()| verdict(&rows));
        let PresetEntry { title, about, goal, .. } = entry;
        sections.push(Section {
            title: title.clone(),
            about: about.clone(),
            command: format!("azekura-bench {}", words.join(" ")),
            goal: goal.clone(),
            dropped: dropped(preset.measurements(entry, running.len()) as usize, rows.len()),
            measurements: rows,
        });
    }
    conditions.finish(&scratch.path, *device_s)?;
    let asked = if engines.is_empty() { String::new() } else { format!(" --engine {}", engines.join(",")) };
    let mut document = Document {
        format: FORMAT,
        preset: name.clone(),
        made,
        version: document::own_version(),
        command: format!("cargo run --release -p azekura-bench --features peers -- report {name}{asked}"),
        engines: notes,
        conditions: json!(conditions),
        planned_s,
        limit_s: *limit_s,
        took_s: start.elapsed().as_secs_f64(),
        rounds: *rounds,
        sections,
    };
    document.note_versions();
    Ok((document, outcome))
}

/// The engines of the report: those asked for, which must run; or all, those that do not run with the reason.
fn notes(asked: &[String]) -> Result<Vec<EngineNote>> {
    asked.iter().try_for_each(|name| registry::check(name))?;
    let all: Vec<&str> =
        if asked.is_empty() { registry::known().collect() } else { asked.iter().map(String::as_str).collect() };
    let missing = |name: &str| registry::check(name).err().map(|why| why.to_string());
    let note =
        |name: &str| EngineNote { name: name.into(), version: document::version_of(name), missing: missing(name) };
    Ok(all.into_iter().map(note).collect())
}

fn parse(words: &[String]) -> Result<Comparison> {
    match Cli::try_parse_from(std::iter::once("azekura-bench").chain(words.iter().map(String::as_str)))?.command {
        Command::Run(run) => comparison(&run),
        _ => Err(format!("`{}` is not a run", words.join(" ")).into()),
    }
}

/// The note about measurements that were not made.
fn dropped(wanted: usize, made: usize) -> Option<String> {
    let left = wanted.saturating_sub(made);
    (left > 0).then(|| format!("The time was up: {left} of {wanted} measurements were dropped."))
}

/// Writes document, Markdown and page into `out`.
fn write(document: &Document, out: &Path) -> Result<()> {
    disk::write(out, "report.json", &format!("{}\n", json!(document)))?;
    disk::write(out, "report.md", &markdown(document)?)?;
    disk::write(out, "report.html", &html(document)?)
}

#[cfg(test)]
mod tests {
    use super::{dropped, notes, parse, write};
    use crate::report::document::Document;
    use crate::report::document::tests::sample;
    use crate::report::preset;

    #[test]
    fn written_document_is_rendered_again() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("a/b"), dir.path().join("c"));
        write(&sample(), &one).unwrap();
        write(&Document::read(&one.join("report.json")).unwrap(), &two).unwrap();
        for name in ["report.json", "report.md", "report.html"] {
            assert_eq!(std::fs::read(one.join(name)).unwrap(), std::fs::read(two.join(name)).unwrap(), "{name}");
        }
    }

    #[test]
    fn every_entry_of_a_preset_is_a_command() {
        for preset in preset::all().unwrap() {
            for entry in &preset.entries {
                let comparison = parse(&preset.command(entry, &["azekura".to_owned()])).unwrap();
                let cases = comparison.workloads.len() * comparison.threads.len();
                assert_eq!(cases as u32 * comparison.rounds, preset.measurements(entry, 1), "{}", entry.title);
                if entry.workloads == "partitions64" && preset.name == "quick" {
                    assert_eq!(comparison.plan.shape.n, 20_000, "the entry's own arguments win");
                }
            }
        }
        assert!(parse(&["device".into()]).is_err());
    }

    #[test]
    fn dropped_measurements_are_counted() {
        assert_eq!(dropped(21, 21), None);
        assert_eq!(dropped(21, 14).as_deref(), Some("The time was up: 7 of 21 measurements were dropped."));
    }

    #[test]
    fn asked_engines_must_run_and_others_are_listed() {
        assert!(notes(&["nosuchdb".into()]).is_err());
        let all = notes(&[]).unwrap();
        assert!(all[0].name == "azekura" && all[0].missing.is_none());
        assert!(all.iter().any(|note| note.name == "rocksdb"));
    }
}
