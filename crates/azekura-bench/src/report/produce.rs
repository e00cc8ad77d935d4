//! Runs a preset and gives its document; writes the files of a document.

use crate::cli::{Cli, Command, Place};
use crate::engine::registry;
use crate::failure::Result;
use crate::machine::conditions::Conditions;
use crate::machine::disk::Scratch;
use crate::report::clock;
use crate::report::document::{Document, EngineNote, FORMAT, Goal, Section};
use crate::report::draw::chart;
use crate::report::preset::{Entry, Preset};
use crate::report::{markdown, page, quantity, versions};
use crate::task::opening::SMALL_RECORDS;
use crate::task::rounds::{Comparison, Loaded, verdict};
use clap::Parser;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs `preset` on `engines`, or on all of this build. The second answer says whether azekura had figures for
/// everything and nobody gave a wrong answer.
pub(crate) fn produce(preset: &Preset, engines: &[String], place: &Place) -> Result<(Document, Result<()>)> {
    let start = Instant::now();
    let notes = notes(engines)?;
    let running: Vec<String> =
        notes.iter().filter(|note| note.missing.is_none()).map(|note| note.name.clone()).collect();
    let count: u32 = preset.entries.iter().map(|entry| preset.measurements(entry, running.len())).sum();
    let planned_s = preset.total(running.len());
    eprintln!(
        "{}: {count} measurements of {} s, about {} in all, never above {}; engines: {}",
        preset.name,
        preset.seconds(running.len()),
        quantity::seconds(planned_s),
        quantity::seconds(preset.limit_s),
        running.join(", "),
    );
    let scratch = place.scratch()?;
    let each = Duration::try_from_secs_f64(preset.device_s)?;
    let mut conditions = Conditions::begin(scratch.path(), &SMALL_RECORDS, each)?;
    let made = clock::now();
    let mut run =
        Running { preset, engines: running, start, scratch: &scratch, loaded: Loaded::default(), outcome: Ok(()) };
    let sections = (preset.entries.iter().zip(preset.deadlines(run.engines.len())))
        .map(|(entry, deadline)| run.section(entry, deadline))
        .collect::<Result<Vec<_>>>()?;
    let outcome = run.outcome;
    conditions.finish(scratch.path(), each)?;
    let asked = if engines.is_empty() { String::new() } else { format!(" --engine {}", engines.join(",")) };
    let mut document = Document {
        format: FORMAT,
        preset: preset.name.to_owned(),
        made,
        version: versions::ours(),
        command: format!("cargo run --release -p azekura-bench --features peers -- report {}{asked}", preset.name),
        engines: notes,
        conditions: json!(conditions),
        planned_s,
        limit_s: preset.limit_s,
        took_s: start.elapsed().as_secs_f64(),
        rounds: preset.rounds,
        sections,
    };
    versions::told(&mut document);
    Ok((document, outcome))
}

/// The engines of the report: those asked for, which must run; or all that run here, and those that do not with their
/// reason.
fn notes(asked: &[String]) -> Result<Vec<EngineNote>> {
    let note = |name: &str, missing| EngineNote { name: name.to_owned(), version: versions::of(name), missing };
    if !asked.is_empty() {
        return asked.iter().map(|name| registry::check(name).map(|()| note(name, None))).collect();
    }
    let mut notes: Vec<EngineNote> = Vec::new();
    for name in chart::PALETTE.into_iter().chain(registry::names()) {
        if notes.iter().all(|known| known.name != name) {
            notes.push(note(name, registry::check(name).err().map(|why| why.to_string())));
        }
    }
    Ok(notes)
}

/// A preset under way.
struct Running<'a> {
    preset: &'a Preset,
    engines: Vec<String>,
    start: Instant,
    scratch: &'a Scratch,
    loaded: Loaded,
    outcome: Result<()>,
}

impl Running<'_> {
    /// Runs one entry; what is not begun by `deadline`, in seconds behind the start, is dropped and counted.
    fn section(&mut self, entry: &Entry, deadline: f64) -> Result<Section> {
        let words = self.preset.command(entry, &self.engines);
        let so_far = quantity::seconds(self.start.elapsed().as_secs_f64());
        eprintln!("--- {} ({so_far} so far)", entry.title);
        let deadline = self.start + Duration::try_from_secs_f64(deadline)?;
        // A test keeps the presets in step with the command line; were they not, the page would say so.
        let measurements = match comparison(&words) {
            Ok(own) => Comparison { deadline: Some(deadline), ..own }.run_on(self.scratch, &mut self.loaded)?,
            Err(failure) => {
                eprintln!("{failure}");
                Vec::new()
            }
        };
        if entry.last_of_data {
            self.loaded.clear();
        }
        if self.outcome.is_ok() {
            self.outcome = verdict(&measurements);
        }
        let wanted = self.preset.measurements(entry, self.engines.len()) as usize;
        let (field, unit, less_is_better) = entry.goal;
        Ok(Section {
            title: entry.title.to_owned(),
            about: entry.about.to_owned(),
            command: format!("azekura-bench {}", words.join(" ")),
            goal: Goal { field: field.to_owned(), unit: unit.to_owned(), less_is_better },
            dropped: dropped(wanted, measurements.len()),
            measurements: measurements
                .iter()
                .map(serde_json::to_value)
                .collect::<std::result::Result<Vec<Value>, _>>()?,
        })
    }
}

fn comparison(words: &[String]) -> Result<Comparison> {
    let line = std::iter::once("azekura-bench").chain(words.iter().map(String::as_str));
    match Cli::try_parse_from(line)?.command {
        Command::Run(run) => run.comparison(),
        _ => Err(format!("`{}` is not a run", words.join(" ")).into()),
    }
}

/// What is said of measurements that were not made.
fn dropped(wanted: usize, made: usize) -> Option<String> {
    let left = wanted.saturating_sub(made);
    (left > 0).then(|| format!("The time was up: {left} of {wanted} measurements were dropped."))
}

/// Writes page, Markdown and document into `out`.
pub(crate) fn write(document: &Document, out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).map_err(|error| format!("cannot create {}: {error}", out.display()))?;
    let files = [
        ("report.json", document.text()?),
        ("report.md", markdown::render(document)),
        ("report.html", page::render(document)),
    ];
    for (name, text) in files {
        let path = out.join(name);
        std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{comparison, dropped, notes, write};
    use crate::report::document::Document;
    use crate::report::document::tests::sample;

    #[test]
    fn a_written_document_can_be_rendered_again() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("a/b"), dir.path().join("c"));
        write(&sample(), &one).unwrap();
        write(&Document::read(&one.join("report.json")).unwrap(), &two).unwrap();
        for name in ["report.json", "report.md", "report.html"] {
            assert_eq!(std::fs::read(one.join(name)).unwrap(), std::fs::read(two.join(name)).unwrap(), "{name}");
        }
    }

    #[test]
    fn what_was_dropped_is_counted() {
        assert_eq!(dropped(21, 21), None);
        assert_eq!(dropped(21, 14).as_deref(), Some("The time was up: 7 of 21 measurements were dropped."));
    }

    #[test]
    fn engines_asked_for_must_run_and_all_others_are_named() {
        assert!(notes(&["nosuchdb".into()]).is_err());
        let all = notes(&[]).unwrap();
        assert!(all[0].name == "azekura" && all[0].missing.is_none());
        assert!(all.iter().any(|note| note.name == "rocksdb"));
        assert!(comparison(&["device".into()]).is_err());
    }
}
